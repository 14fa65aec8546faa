"""Log-probs, entropy and the gradients of a loss of them, from logits and from hidden states, against float64.

And what the output layer in chunks costs, and where its gradients go.
"""

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
    expected_of,
    given,
    relative,
)
from ranks import run_ranks, start_process_group
from refusals import refusal_tests, refusals
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl_loss.logprobs import TensorParallel, log_probs_from_hidden, log_probs_from_logits, loss_from_hidden
from megatron_rl_loss.logprobs.layer import WeightGradient

WAYS = ("logits", "two passes", "one pass")
of_hidden = pytest.mark.parametrize("way", WAYS[1:])
Parallel = dict[str, Any]


def leaves_of(name: str, dtype: torch.dtype = torch.float32, parallel: Parallel | None = None) -> Found:
    """Of this rank: its part of the vocabulary and, with sequence parallelism, of tokens."""
    batch, group = given(name, dtype)[0], (parallel or {}).get("group")
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    columns = slice(rank * VOCABULARY // size, (rank + 1) * VOCABULARY // size)
    mine = slice(rank * TOKENS // size, (rank + 1) * TOKENS // size)
    mine = mine if (parallel or {}).get("sequence_parallel") else slice(None)
    leaves = {"hidden": batch.hidden[mine], "weight": batch.weight[columns], "bias": batch.bias[columns]}
    return {
        key: one.to(dtype).requires_grad_() for key, one in leaves.items() if key != "bias" or CASES[name].get("bias")
    }


def values_of(
    way: str, name: str, leaves: Found, wanted: Wanted = BOTH, parallel: Parallel | None = None, **more: Any
) -> Found:
    """The same as `expected_of` but gradients, of the code under test."""
    hidden, weight, bias = leaves["hidden"], leaves["weight"], leaves.get("bias")
    (batch, labels, mask, options), parallel = given(name, hidden.dtype), parallel or {}
    group = parallel.get("group")
    first = 0 if group is None else group.rank() * len(weight)
    exact = torch.promote_types(hidden.dtype, torch.float32)
    labels, weights = labels.masked_fill(~mask, -100), (batch.weights * mask).to(exact)
    near = batch.advantages.to(exact)
    keep = batch.keep[:, first : first + len(weight)] if CASES[name].get("keep") else None
    options |= {"keep": keep, "entropy": wanted[1] != 0, "token_mask": mask, **more}
    loss = functools.partial(head_oracle.losses_of, wanted=wanted)
    if way == "logits":
        logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
        log_probs, entropy = log_probs_from_logits(logits, labels, tp_group=group, **options)
    else:
        options |= {"bias": bias, "tensor_parallel": TensorParallel(**parallel)}
    if way == "two passes":
        log_probs, entropy = log_probs_from_hidden(hidden, weight, labels, **options)
    if way == "one pass":
        inputs = {"near": near.masked_fill(weights == 0, torch.nan)}  # is ignored there
        share, values = loss_from_hidden(hidden, weight, labels, weights, loss, inputs, **options)
        assert set(values) - {"entropy"} == {"log_probs", "losses", "mixed"}
        assert not any(one.requires_grad for one in values.values())
        log_probs, entropy = values["log_probs"], values.get("entropy")
    else:
        share = (loss(log_probs, entropy, near)[0] * weights).sum()
    return {"log_probs": log_probs, "share": share} | ({} if entropy is None else {"entropy": entropy})


def found_of(way: str, name: str, dtype: torch.dtype, wanted: Wanted, parallel: Any = None, **more: Any) -> Found:
    leaves = leaves_of(name, dtype, parallel)
    found = values_of(way, name, leaves, wanted, parallel, **more)
    assert {one.dtype for one in found.values()} == {torch.promote_types(dtype, torch.float32)}
    (found["share"] * 3).backward()
    assert all(leaf.grad is not None and leaf.grad.dtype == dtype for leaf in leaves.values())
    found |= {key: leaf.grad.double() / 3 for key, leaf in leaves.items()}
    return {key: one.detach() for key, one in found.items()}


def check(found: Found, expected: Found, dtype: torch.dtype) -> None:
    assert set(found) == set(expected)
    for key, value in expected.items():
        if value.abs().max() > 0:
            assert relative(found[key], value) <= BOUNDS[dtype], key
        else:
            assert found[key].count_nonzero() == 0, key


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_in_any_chunks(name: str, way: str) -> None:
    chunks: list[dict[str, Any]] = [{"chunk_tokens": number} for number in (1, 7, TOKENS)]
    options = [{}, {"gradient_in_place": True}, *chunks] if way == "logits" else chunks
    for dtype, wanted in {*itertools.product([torch.float32], WANTED.values()), *((one, BOTH) for one in BOUNDS)}:
        for more in options if (dtype, wanted) == (torch.float32, BOTH) else options[1:2]:
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

    dist.all_reduce = counting
    ways = [("logits", False), *itertools.product(WAYS[1:], (False, True))]
    for (way, sequence_parallel), name, wanted in itertools.product(ways, CASES, WANTED):
        if wanted == "both" or name == "plain":
            parallel = {"group": group, "sequence_parallel": sequence_parallel}
            of = found_of(way, name, torch.float32, WANTED[wanted], parallel, chunk_tokens=7)
            found[way, sequence_parallel, name, wanted] = {key: one.tolist() for key, one in of.items()}, [*sent]
            sent.clear()
    alone = found_of("two passes", "plain", torch.float32, BOTH, {"group": group, "sum_gradient": False})
    found["not summed"] = {"hidden": alone["hidden"].tolist()}, []
    return found


@pytest.mark.slow
def test_vocabulary_and_tokens_over_several_ranks() -> None:
    by_rank = run_ranks(4, on_tp_rank, timeout_s=600)
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


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("at", [(True, True), (True, False), (False, True)], ids=["both", "forward", "backward"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16])
def test_autocast_is_its_casts(to: torch.dtype, way: str, at: tuple[bool, bool]) -> None:
    """Made by hand, and none where backward alone is inside; float64 stays, and dtypes may differ as torch's may."""
    forward, backward = (torch.autocast("cpu", dtype=to, enabled=on) for on in at)
    pairs = [*itertools.product(DTYPES, DTYPES), (torch.float64, torch.float64)] if at[0] else zip(DTYPES, DTYPES)  # noqa: B905
    for dtypes in pairs:
        gradients = []
        for by_hand in (False, True):
            leaves = leaves_of("plain")
            leaves = {
                key: leaves[key].detach().to(dtype).requires_grad_() for key, dtype in zip(leaves, dtypes, strict=True)
            }
            cast = {key: one.to(to) if at[0] and one.dtype != torch.float64 else one for key, one in leaves.items()}
            with contextlib.nullcontext() if by_hand else forward:
                share = values_of(way, "plain", cast if by_hand else leaves)["share"]
            alone = way == "logits" and not at[0]  # the product's backward is autograd's: torch casts it
            with contextlib.nullcontext() if by_hand or alone else backward:
                share.backward()
            gradients.append([leaf.grad for leaf in leaves.values()])
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


# --- what chunks cost


class Watching(TorchDispatchMode):
    """The largest tensor that any operation gives, and the tokens that pass through products with the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.tokens = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.numel())
        if func is torch.ops.aten.mm.default and result.shape[1] == VOCABULARY:
            self.tokens += result.shape[0]
        return result


def watched(way: str, chunk_tokens: int, name: str, differentiate: bool = True) -> Watching:
    leaves = {key: leaf.detach().requires_grad_(differentiate) for key, leaf in leaves_of(name).items()}
    with Watching() as seen:
        share = values_of(way, name, leaves, chunk_tokens=chunk_tokens)["share"]
        if differentiate:
            share.backward()
    return seen


@of_hidden
def test_no_tensor_has_the_logits_of_more_than_a_chunk(way: str) -> None:
    largest = max(TOKENS * HIDDEN, VOCABULARY * HIDDEN)  # hidden states and the weight are there anyway
    assert largest < TOKENS * VOCABULARY
    assert watched(way, 8, "hot, all tokens").largest <= largest
    assert watched(way, TOKENS, "hot, all tokens").largest >= TOKENS * VOCABULARY  # negative control


@pytest.mark.parametrize("chunk_tokens", [1, 5, TOKENS])
def test_the_output_layer_does_not_run_on_masked_tokens(chunk_tokens: int) -> None:
    active = int(given("plain")[2].sum())
    assert 0 < active < TOKENS
    assert watched("two passes", chunk_tokens, "plain").tokens == 2 * active  # forward, and again backward
    assert watched("one pass", chunk_tokens, "plain").tokens == active
    assert watched("two passes", chunk_tokens, "plain", differentiate=False).tokens == active
    assert watched("two passes", chunk_tokens, "no token counts").tokens == 0


# --- gradients that go elsewhere, or nowhere


class Kept(WeightGradient):
    """A main gradient of the test."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(torch.ones(weight.shape, dtype=torch.promote_types(weight.dtype, torch.float32)))

    def for_autograd(self) -> Tensor | None:
        return None


@of_hidden
@pytest.mark.parametrize("dtype", BOUNDS)
def test_the_weights_gradient_is_added_to_the_main_gradient(dtype: torch.dtype, way: str) -> None:
    leaves, expected = leaves_of("plain", dtype), expected_of("plain", dtype)
    main = Kept(leaves["weight"])
    (2 * values_of(way, "plain", leaves, chunk_tokens=7, main_gradient=main)["share"]).backward()
    assert leaves["weight"].grad is None
    assert relative((main.total.double() - 1) / 2, expected["weight"]) <= BOUNDS[dtype]
    assert relative(leaves["hidden"].grad.double() / 2, expected["hidden"]) <= BOUNDS[dtype]


@of_hidden
@pytest.mark.parametrize(("frozen", "trained"), [("hidden", "weight"), ("weight", "hidden")])
def test_a_frozen_side_gets_no_gradient(frozen: str, trained: str, way: str) -> None:
    leaves = leaves_of("plain")
    leaves[frozen].requires_grad_(False)
    values_of(way, "plain", leaves, chunk_tokens=7)["share"].backward()
    assert leaves[frozen].grad is None
    assert relative(leaves[trained].grad, expected_of("plain", torch.float32)[trained]) <= FP32


def test_weights_that_float16_cannot_hold_are_not_lost() -> None:
    """1e-9 per token, scaled up afterwards as a carrier and a loss scale do."""
    labels, gradients = given("plain")[1], []
    for scale in (1.0, 1e9):
        leaves, weights = leaves_of("plain", torch.float16), torch.full((TOKENS,), 1 / scale)
        (loss_from_hidden(*leaves.values(), labels, weights, lambda lp, _: (-lp, {}))[0] * scale).backward()
        gradients.append(leaves["hidden"].grad)
    assert gradients[0].abs().max() > 0.1
    torch.testing.assert_close(*gradients, rtol=4 * 2.0**-11, atol=2.0**-14)


def test_a_chunk_whose_loss_has_no_gradient_gives_none() -> None:
    def first_half(log_probs: Tensor, _: Tensor | None, place: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return log_probs if place[0] < TOKENS // 2 else torch.ones_like(log_probs), {}

    (hidden, weight), labels = leaves_of("plain").values(), given("plain")[1]
    inputs, ones = {"place": torch.arange(TOKENS)}, torch.ones(TOKENS)
    loss_from_hidden(hidden, weight, labels, ones, first_half, inputs, chunk_tokens=TOKENS // 4)[0].backward()
    assert hidden.grad[: TOKENS // 2].abs().amax(1).min() > 0
    assert hidden.grad[TOKENS // 2 :].abs().max() == 0


@of_hidden
@pytest.mark.parametrize("number", [0, 1024])
def test_the_weights_gradient_is_summed_in_float32_over_chunks(number: int, way: str) -> None:
    """Of equal tokens, each a chunk; a bfloat16 sum of equal terms stops growing at 256 of them. Of none, it is 0."""
    hidden = torch.ones(number, 4, dtype=torch.bfloat16, requires_grad=True)
    weight, labels = torch.zeros(8, 4, dtype=torch.bfloat16, requires_grad=True), torch.zeros(number).long()
    if way == "one pass":
        share = loss_from_hidden(hidden, weight, labels, torch.ones(number), lambda lp, _: (lp, {}), chunk_tokens=1)[0]
    else:
        share = log_probs_from_hidden(hidden, weight, labels, chunk_tokens=1).log_probs.sum()
    share.backward()
    of_one = torch.full((8, 4), -1 / 8)  # [j = label] - q[j], exact in bfloat16
    of_one[0] += 1
    assert torch.equal(weight.grad.float(), number * of_one)
    assert hidden.grad.shape == hidden.shape


def test_hidden_states_of_three_dimensions() -> None:
    (hidden, weight), labels = leaves_of("plain").values(), given("plain")[1]
    plain = log_probs_from_hidden(hidden, weight, labels).log_probs
    cut = log_probs_from_hidden(hidden.view(8, 4, HIDDEN), weight, labels.view(8, 4), chunk_tokens=5)
    torch.testing.assert_close(cut.log_probs, plain.view(8, 4))


H, W, L = torch.zeros(3, 4), torch.zeros(8, 4), torch.tensor([0, 3, 7])


def head(hidden: Tensor = H, weight: Tensor = W, labels: Tensor = L, **more: Any) -> Any:
    return log_probs_from_hidden(hidden, weight, labels, **more)


def fold(weights: Tensor = L + 1.0, loss: Any = lambda lp, _, **more: (lp, {}), **inputs: Tensor) -> Any:
    return loss_from_hidden(H, W, L, weights, loss, inputs)


def metric(name: str, of: Any = lambda lp: lp) -> dict[str, Any]:
    return {"loss": lambda lp, _: (lp, {name: of(lp)})}


ROWS = H[:, None]
REFUSALS = {
    **refusals(
        head,
        ((ROWS, W, L[None]), r"for these tokens they must be \(3, 1\)", (ROWS, W, L[:, None])),
        ((H, W[:, :3]), r"\(3, 4\).* and \(8, 3\)", (H, W)),
        ((H, W.half()), "of one dtype", (H.half(), W.half())),
        ({"bias": torch.zeros(7)}, r"and \(7,\)", {"bias": torch.zeros(8)}),
        ({"chunk_tokens": 0}, "chunk_tokens is 0", {"chunk_tokens": 1}),
    ),
    **refusals(
        fold,
        ((torch.ones(2),), "weights: 2 values for 3 tokens", ()),
        ({"old": torch.ones(4)}, "old: 4 values for 3 tokens", {"old": torch.ones(3)}),
        ({"loss": lambda lp, _: (lp.sum(), {})}, "the losses: 1 values for 3 tokens", {}),
        (metric("losses"), "a metric named 'losses'", metric("k")),
        (metric("kl", torch.mean), "kl: 1 values for 3 tokens", metric("kl")),
    ),
    **refusals(fold, ({"loss": None}, "per_token_loss is a NoneType: it must give losses", {}), error=TypeError),
}

test_refusals = refusal_tests(REFUSALS)
