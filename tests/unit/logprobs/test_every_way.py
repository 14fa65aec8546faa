"""Log-probs, entropy and the gradients of a loss of them, from logits and from hidden states, against float64."""

import contextlib
import functools
import itertools
from typing import Any

import head_oracle
import pytest
import torch
from head_oracle import (
    BOTH,
    BOUNDS,
    CASES,
    FP32,
    HIDDEN,
    TOKENS,
    VOCABULARY,
    WANTED,
    Found,
    Wanted,
    batch_of,
    expected_of,
    given,
    losses_of,
    relative,
)
from ranks import run_ranks, start_process_group
from torch import Tensor

from megatron_rl_loss.logprobs import TensorParallel, log_probs_from_hidden, log_probs_from_logits, loss_from_hidden

WAYS = ("logits", "two passes", "one pass")


def found_of(
    way: str, name: str, dtype: torch.dtype, wanted: Wanted = BOTH, parallel: dict[str, Any] | None = None, **more: Any
) -> Found:
    """The same of the code under test: this rank's part of the vocabulary and, with sequence parallelism, of tokens."""
    (batch, labels, mask, options), case = given(name, dtype), CASES[name]
    parallel = parallel or {}
    group = parallel.get("group")
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    columns = slice(rank * VOCABULARY // size, (rank + 1) * VOCABULARY // size)
    mine = slice(rank * TOKENS // size, (rank + 1) * TOKENS // size)
    mine = mine if parallel.get("sequence_parallel") else slice(None)
    leaves = {"hidden": batch.hidden[mine], "weight": batch.weight[columns], "bias": batch.bias[columns]}
    leaves = {key: one.to(dtype).requires_grad_() for key, one in leaves.items() if key != "bias" or case.get("bias")}
    hidden, weight, bias = leaves["hidden"], leaves["weight"], leaves.get("bias")
    labels, exact = labels.masked_fill(~mask, -100), torch.promote_types(dtype, torch.float32)
    weights, near = (batch.weights * mask).to(exact), batch.advantages.to(exact)
    options |= {"keep": batch.keep[:, columns] if case.get("keep") else None, "entropy": wanted[1] != 0, **more}
    options["token_mask"] = mask
    loss = functools.partial(losses_of, wanted=wanted)
    if way == "one pass":
        at = {"bias": bias, "tensor_parallel": TensorParallel(**parallel), **options}
        near = near.masked_fill(weights == 0, torch.nan)  # is ignored there
        share, values = loss_from_hidden(hidden, weight, labels, weights, loss, {"near": near}, **at)
        assert set(values) - {"entropy"} == {"log_probs", "losses", "mixed"}
        assert not any(one.requires_grad for one in values.values())
        log_probs, entropy = values["log_probs"], values.get("entropy")
    else:
        if way == "logits":
            logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
            log_probs, entropy = log_probs_from_logits(logits, labels, tp_group=group, **options)
        else:
            at = {"bias": bias, "tensor_parallel": TensorParallel(**parallel), **options}
            log_probs, entropy = log_probs_from_hidden(hidden, weight, labels, **at)
        share = (loss(log_probs, entropy, near)[0] * weights).sum()
    found = {"log_probs": log_probs, "share": share} | ({} if entropy is None else {"entropy": entropy})
    assert {one.dtype for one in found.values()} == {exact}
    (share * 3).backward()
    assert all(leaf.grad is not None and leaf.grad.dtype == dtype for leaf in leaves.values())
    found |= {key: leaf.grad.double() / 3 for key, leaf in leaves.items()}  # type: ignore[union-attr]
    return {key: one.detach() for key, one in found.items()}


def check(found: Found, expected: Found, dtype: torch.dtype) -> None:
    assert set(found) == set(expected)
    for key, value in expected.items():
        if value.abs().max() > 0:
            assert relative(found[key], value) <= BOUNDS[dtype], key
        else:
            assert found[key].count_nonzero() == 0, key


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_in_any_chunks(name: str, dtype: torch.dtype, way: str) -> None:
    chunks: list[dict[str, Any]] = [{"chunk_tokens": number} for number in (1, 7, TOKENS)]
    for wanted in WANTED.values() if dtype == torch.float32 else [BOTH]:
        for more in [{}, {"gradient_in_place": True}, *chunks] if way == "logits" else chunks:
            check(found_of(way, name, dtype, wanted, **more), expected_of(name, dtype, wanted), dtype)


Exchanged = list[tuple[bool, int]]


def on_tp_rank() -> dict[Any, tuple[dict[str, Any], Exchanged]]:
    """What every way gives, and each `all_reduce`: whether of a maximum, and of how many numbers."""
    start_process_group()
    dist, group = torch.distributed, torch.distributed.group.WORLD
    sent, all_reduce, found = Exchanged(), dist.all_reduce, {}

    def counting(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        sent.append((op == dist.ReduceOp.MAX, tensor.numel()))
        all_reduce(tensor, op=op, group=group)

    dist.all_reduce = counting  # type: ignore[assignment]
    ways = [("logits", False), *itertools.product(WAYS[1:], (False, True))]
    for (way, sequence_parallel), name, wanted in itertools.product(ways, CASES, WANTED):
        parallel = {"group": group, "sequence_parallel": sequence_parallel}
        of = found_of(way, name, torch.float32, WANTED[wanted], parallel, chunk_tokens=7)
        found[way, sequence_parallel, name, wanted] = {key: one.tolist() for key, one in of.items()}, [*sent]
        sent.clear()
    alone = found_of("two passes", "plain", torch.float32, BOTH, {"group": group, "sum_gradient": False})
    found["not summed"] = {"hidden": alone["hidden"].tolist()}, []
    return found


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_vocabulary_and_tokens_over_several_ranks(tp: int) -> None:
    by_rank = run_ranks(tp, on_tp_rank, timeout_s=600)
    for at in by_rank[0]:
        parts = [{key: torch.tensor(one, dtype=torch.float64) for key, one in rank[at][0].items()} for rank in by_rank]
        summed = torch.stack([part["hidden"] for part in parts]).sum(0)
        if at == "not summed":  # as Megatron's `disable_grad_reduce`; one rank's part is far off
            expected = expected_of("plain", torch.float32)["hidden"]
            assert relative(summed, expected) <= FP32
            assert relative(parts[0]["hidden"], expected) > 1000 * FP32
            continue
        way, sequence_parallel, name, wanted = at
        cut = ("weight", "bias", "hidden") if sequence_parallel else ("weight", "bias")
        whole = {key: torch.cat([part[key] for part in parts]) for key in cut if key in parts[0]}
        whole |= {"hidden": summed} if way == "logits" else {}
        for part in parts:
            check(part | whole, expected_of(name, torch.float32, WANTED[wanted]), torch.float32)
        if way == "logits":  # one maximum and one sum, whatever the chunks
            tokens, numbers = int(given(name)[2].sum()), 3 if WANTED[wanted][1] else 2
            expected_sent = [(True, tokens), (False, numbers * tokens)] if tokens else []
            assert all(rank[at][1] == expected_sent for rank in by_rank)


# --- under `torch.autocast`, gradients are as near to float64 as those of the naive way


@functools.cache
def sharp_batch() -> tuple[head_oracle.Batch, Tensor]:
    """Logits that half precision rounds far; and the gradient of the hidden states."""
    batch = batch_of(TOKENS, VOCABULARY, HIDDEN, torch.bfloat16, sharp=6)
    leaf = batch.hidden.clone().requires_grad_()
    share_of(*head_oracle.log_probs_and_entropy(leaf @ batch.weight.T, batch.labels), batch).backward()
    assert leaf.grad is not None
    return batch, leaf.grad


def clipped(log_probs: Tensor, entropy: Tensor | None, old: Tensor, advantages: Tensor) -> tuple[Tensor, Found]:
    assert entropy is not None
    ratio = (log_probs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages) - 0.05 * entropy, {}


def share_of(log_probs: Tensor, entropy: Tensor | None, batch: head_oracle.Batch) -> Tensor:
    return (clipped(log_probs, entropy, batch.old_log_probs, batch.advantages)[0] * batch.weights).sum()


def autocast_share(way: str, hidden: Tensor, weight: Tensor, batch: head_oracle.Batch) -> Tensor:
    """``naive`` is as one would write it, in the dtypes that it is given or that autocast chooses."""
    if way == "naive":
        log_q = (hidden @ weight.T).float().log_softmax(-1)
        return share_of(log_q.gather(-1, batch.labels[:, None])[:, 0], -(log_q.exp() * log_q).sum(-1), batch)
    if way == "logits":
        return share_of(*log_probs_from_logits(hidden @ weight.T, batch.labels, entropy=True), batch)
    if way == "two passes":
        found = log_probs_from_hidden(hidden, weight, batch.labels, entropy=True, token_mask=batch.mask)
        return share_of(*found, batch)
    inputs = {"old": batch.old_log_probs, "advantages": batch.advantages}
    return loss_from_hidden(hidden, weight, batch.labels, batch.weights, clipped, inputs, entropy=True).share


PLACES = {"inside": (True, True), "backward outside": (True, False), "backward inside alone": (False, True)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("at", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16])
def test_autocast_is_as_near_as_the_naive_way(to: torch.dtype, way: str, at: tuple[bool, bool]) -> None:
    forward, backward = (torch.autocast("cpu", dtype=to, enabled=on) for on in at)
    batch, expected = sharp_batch()
    for of_hidden, of_weight in itertools.product(DTYPES, DTYPES):
        if of_hidden != of_weight and not at[0]:
            continue  # refused, as torch does
        errors = []
        for one in (way, "naive"):
            hidden, weight = batch.hidden.to(of_hidden).requires_grad_(), batch.weight.to(of_weight).requires_grad_()
            with forward:
                share = autocast_share(one, hidden, weight, batch)
            alone = one == "naive" and way != "logits" and not at[0]  # ours hands no product to autograd
            with contextlib.nullcontext() if alone else backward:
                share.backward()
            assert hidden.grad is not None
            errors.append(relative(hidden.grad, expected))
        assert errors[0] <= 1.2 * errors[1] + 1e-5, (of_hidden, of_weight, errors)
