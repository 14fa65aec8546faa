"""The output layer in chunks against a float64 layer of all tokens: values, gradients, ranks, memory, work."""

import functools
from collections.abc import Mapping
from typing import Any

import head_oracle
import oracle
import pytest
import torch
from head_oracle import batch_of, relative
from ranks import run_ranks, start_process_group
from refusals import Call, Refusal, check_refusal, each_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl_loss.logprobs.hidden import ALONE, TensorParallel, add_product, log_probs_from_hidden, loss_from_hidden
from megatron_rl_loss.losses import ppo_clip_loss

TOKENS, VOCABULARY, HIDDEN = 48, 24, 16
BONUS = 0.05
#: Sums over tokens, hidden and vocabulary, in float32 and in bfloat16, whose products are rounded four times in a row.
FP32, BF16 = oracle.chain_error(1, TOKENS), 4 * 2.0**-8
assert FP32 < 2e-5
CHUNKS = (1, 7, TOKENS)
Found = dict[str, Tensor]

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "cold, bias": {"temperature": 0.5, "bias": True},
    "kept ids": {"keep": True},
    "padded": {"vocab_size": 17, "bias": True},
    "all tokens": {"token_mask": False},
}


def labels_of(batch: head_oracle.Batch, case: Mapping[str, Any]) -> Tensor:
    return batch.labels % case.get("vocab_size", VOCABULARY)


def mask_of(batch: head_oracle.Batch, case: Mapping[str, Any]) -> Tensor:
    return batch.mask if case.get("token_mask", True) else torch.ones_like(batch.mask)


@functools.cache
def expected_of(name: str, dtype: torch.dtype) -> Found:
    """The loss, its values and gradients."""
    batch, case = batch_of(TOKENS, VOCABULARY, HIDDEN, dtype), CASES[name]
    hidden, weight, bias = (one.clone().requires_grad_() for one in (batch.hidden, batch.weight, batch.bias))
    logits = hidden @ weight.T + (bias if case.get("bias") else 0)
    log_probs, entropy = head_oracle.log_probs_and_entropy(
        logits,
        labels_of(batch, case),
        case.get("temperature", 1.0),
        batch.keep if case.get("keep") else None,
        case.get("vocab_size"),
    )
    share = head_oracle.policy_loss(log_probs, entropy, batch, BONUS)
    share.backward()
    mask = mask_of(batch, case)
    found = {"log_probs": log_probs * mask, "entropy": entropy * mask, "share": share}
    found |= {"hidden": hidden.grad, "weight": weight.grad} | ({"bias": bias.grad} if case.get("bias") else {})  # type: ignore[dict-item]
    return {key: one.detach() for key, one in found.items()}


def losses_of(
    log_probs: Tensor, entropy: Tensor | None, old_log_probs: Tensor, advantages: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    assert entropy is not None
    policy = ppo_clip_loss(log_probs, old_log_probs, advantages, clip_low=0.2, clip_high=0.28)
    return policy.per_token_loss - BONUS * entropy, {"ppo_kl": policy.ppo_kl}


def found_of(
    name: str,
    dtype: torch.dtype,
    one_pass: bool,
    chunk_tokens: int,
    parallel: TensorParallel = ALONE,
    rank: int = 0,
    size: int = 1,
) -> Found:
    """The same of the code under test: this rank's part of the vocabulary and, with sequence parallelism, of tokens."""
    batch, case = batch_of(TOKENS, VOCABULARY, HIDDEN, dtype), CASES[name]
    columns = slice(rank * VOCABULARY // size, (rank + 1) * VOCABULARY // size)
    mine = slice(rank * TOKENS // size, (rank + 1) * TOKENS // size) if parallel.sequence_parallel else slice(None)
    hidden = batch.hidden[mine].to(dtype).requires_grad_()
    weight, bias = (one[columns].to(dtype).requires_grad_() for one in (batch.weight, batch.bias))
    options: dict[str, Any] = {
        "bias": bias if case.get("bias") else None,
        "tensor_parallel": parallel,
        "temperature": case.get("temperature", 1.0),
        "keep": batch.keep[:, columns] if case.get("keep") else None,
        "vocab_size": case.get("vocab_size"),
        "entropy": True,
        "token_mask": mask_of(batch, case),
        "chunk_tokens": chunk_tokens,
    }
    labels = labels_of(batch, case).masked_fill(~options["token_mask"], -100)
    inputs = {"old_log_probs": batch.old_log_probs.float(), "advantages": batch.advantages.float()}
    if one_pass:
        share, values = loss_from_hidden(hidden, weight, labels, batch.weights.float(), losses_of, inputs, **options)
        assert set(values) == {"log_probs", "entropy", "ppo_kl"}
        assert not any(one.requires_grad for one in values.values())
        log_probs, entropy = values["log_probs"], values["entropy"]
    else:
        log_probs, entropy = log_probs_from_hidden(hidden, weight, labels, **options)  # type: ignore[assignment]
        losses, _ = losses_of(log_probs, entropy, **inputs)
        share = (losses * batch.weights.float()).sum()
    assert log_probs.dtype == entropy.dtype == share.dtype == torch.float32
    (share * 3).backward()
    found = {"log_probs": log_probs, "entropy": entropy, "share": share}
    for key, leaf in {"hidden": hidden, "weight": weight, **({"bias": bias} if case.get("bias") else {})}.items():
        assert leaf.grad is not None
        assert leaf.grad.dtype == dtype
        found[key] = leaf.grad.double() / 3
    return {key: one.detach() for key, one in found.items()}


def check(found: Found, expected: Found, dtype: torch.dtype) -> None:
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert relative(found[key], value) <= (FP32 if dtype == torch.float32 else BF16), key


@pytest.mark.parametrize("one_pass", [False, True], ids=["two passes", "one pass"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_in_any_chunks(name: str, dtype: torch.dtype, one_pass: bool) -> None:
    for chunk_tokens in CHUNKS:
        check(found_of(name, dtype, one_pass, chunk_tokens), expected_of(name, dtype), dtype)


def on_tp_rank(sequence_parallel: bool) -> list[dict[str, Any]]:
    start_process_group()
    group = torch.distributed.group.WORLD
    assert group is not None
    parallel = TensorParallel(group=group, sequence_parallel=sequence_parallel)
    return [
        {
            key: one.tolist()
            for key, one in found_of(name, torch.float32, one_pass, 7, parallel, group.rank(), group.size()).items()
        }
        for name in CASES
        for one_pass in (False, True)
    ]


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp with sp"])
@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_vocabulary_and_tokens_over_several_ranks(tp: int, sequence_parallel: bool) -> None:
    by_rank = run_ranks(tp, on_tp_rank, sequence_parallel)
    for k, name in enumerate(name for name in CASES for _ in range(2)):
        parts = [{key: torch.tensor(one, dtype=torch.float64) for key, one in rank[k].items()} for rank in by_rank]
        whole = {key: torch.cat([part[key] for part in parts]) for key in ("weight", "bias") if key in parts[0]}
        if sequence_parallel:
            whole["hidden"] = torch.cat([part["hidden"] for part in parts])
        for part in parts:
            check(part | whole, expected_of(name, torch.float32), torch.float32)


def without_the_sum(parallel: dict[str, Any]) -> list[list[float]]:
    start_process_group()
    group = torch.distributed.group.WORLD
    assert group is not None
    found = found_of("plain", torch.float32, False, 7, TensorParallel(group=group, **parallel), group.rank(), 2)
    return found["hidden"].tolist()


def test_a_gradient_that_is_summed_by_the_caller() -> None:
    """As Megatron's `disable_grad_reduce`; and the negative control of the sum: one rank's part is far off."""
    parts = [torch.tensor(one) for one in run_ranks(2, without_the_sum, {"sum_gradient": False})]
    expected = expected_of("plain", torch.float32)["hidden"]
    assert relative(sum(parts), expected) <= FP32  # type: ignore[arg-type]
    assert relative(parts[0], expected) > 1000 * FP32


# --- what it costs


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


def watched(one_pass: bool, chunk_tokens: int, mask: Tensor, differentiate: bool = True) -> Watching:
    batch = batch_of(TOKENS, VOCABULARY, HIDDEN)
    hidden, weight = (one.float().requires_grad_(differentiate) for one in (batch.hidden, batch.weight))
    labels, inputs = batch.labels, {"old_log_probs": batch.old_log_probs, "advantages": batch.advantages}
    with Watching() as seen:
        if one_pass:
            weights = batch.weights.float()
            found = loss_from_hidden(
                hidden, weight, labels, weights, losses_of, inputs,
                entropy=True, token_mask=mask, chunk_tokens=chunk_tokens,
            )  # fmt: skip
            share = found.share
        else:
            log_probs, entropy = log_probs_from_hidden(
                hidden, weight, labels, entropy=True, token_mask=mask, chunk_tokens=chunk_tokens
            )
            share = losses_of(log_probs, entropy, **inputs)[0].sum()
        if differentiate:
            share.backward()
    return seen


@pytest.mark.parametrize("one_pass", [False, True], ids=["two passes", "one pass"])
def test_no_tensor_has_the_logits_of_more_than_a_chunk(one_pass: bool) -> None:
    mask = torch.ones(TOKENS, dtype=torch.bool)
    largest = max(TOKENS * HIDDEN, VOCABULARY * HIDDEN)  # hidden states and the weight are there anyway
    assert largest < TOKENS * VOCABULARY
    assert watched(one_pass, 16, mask).largest <= largest
    assert watched(one_pass, TOKENS, mask).largest >= TOKENS * VOCABULARY  # negative control


@pytest.mark.parametrize("chunk_tokens", [1, 5, TOKENS])
def test_masked_tokens_are_not_put_through_the_output_layer(chunk_tokens: int) -> None:
    mask = batch_of(TOKENS, VOCABULARY, HIDDEN).mask
    active = int(mask.sum())
    assert 0 < active < TOKENS
    assert watched(False, chunk_tokens, mask).tokens == 2 * active  # forward, and again backward
    assert watched(True, chunk_tokens, mask).tokens == active
    assert watched(False, chunk_tokens, mask, differentiate=False).tokens == active
    assert watched(False, chunk_tokens, torch.zeros(TOKENS)).tokens == 0


def test_a_forward_pass_alone_keeps_nothing() -> None:
    batch = batch_of(TOKENS, VOCABULARY, HIDDEN)
    hidden, weight = batch.hidden.float().requires_grad_(), batch.weight.float()
    with torch.no_grad():
        log_probs, entropy = log_probs_from_hidden(hidden, weight, batch.labels, entropy=True)
        share, _ = loss_from_hidden(hidden, weight, batch.labels, batch.weights, lambda log_probs, _: (log_probs, {}))
    assert entropy is not None
    assert not any(one.requires_grad for one in (log_probs, entropy, share))
    expected = head_oracle.log_probs_and_entropy(batch.hidden @ batch.weight.T, batch.labels)
    assert relative(log_probs, expected[0]) <= FP32
    assert relative(share, (batch.weights * expected[0]).sum()) <= FP32


# --- gradients that go elsewhere, or nowhere


class Kept:
    """A main gradient of the test."""

    def __init__(self, weight: Tensor) -> None:
        self.total = torch.ones(weight.shape)

    def add_product(self, of_logits: Tensor, hidden: Tensor) -> None:
        add_product(self.total, of_logits, hidden)

    def add_scaled(self, gradient: Tensor, scale: Tensor) -> None:
        self.total.addcmul_(gradient, scale)

    def placeholder(self) -> Tensor | None:
        return None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("one_pass", [False, True], ids=["two passes", "one pass"])
def test_the_weights_gradient_is_added_to_the_main_gradient(one_pass: bool, dtype: torch.dtype) -> None:
    batch = batch_of(TOKENS, VOCABULARY, HIDDEN, dtype)
    hidden, weight = (one.to(dtype).requires_grad_() for one in (batch.hidden, batch.weight))
    main = Kept(weight)
    inputs = {"old_log_probs": batch.old_log_probs.float(), "advantages": batch.advantages.float()}
    options: dict[str, Any] = {"entropy": True, "chunk_tokens": 7, "main_gradient": main, "token_mask": batch.mask}
    if one_pass:
        share = loss_from_hidden(
            hidden, weight, batch.labels, batch.weights.float(), losses_of, inputs, **options
        ).share
    else:
        log_probs, entropy = log_probs_from_hidden(hidden, weight, batch.labels, **options)
        share = (losses_of(log_probs, entropy, **inputs)[0] * batch.weights.float()).sum()
    (2 * share).backward()
    assert weight.grad is None
    expected = expected_of("plain", dtype)
    bound = FP32 if dtype == torch.float32 else BF16
    assert relative((main.total.double() - 1) / 2, expected["weight"]) <= bound
    assert hidden.grad is not None
    assert relative(hidden.grad.double() / 2, expected["hidden"]) <= bound


@pytest.mark.parametrize("one_pass", [False, True], ids=["two passes", "one pass"])
@pytest.mark.parametrize("frozen", ["weight", "hidden"])
def test_a_frozen_side_gets_no_gradient(frozen: str, one_pass: bool) -> None:
    batch = batch_of(TOKENS, VOCABULARY, HIDDEN)
    leaves = {name: getattr(batch, name).float().requires_grad_(name != frozen) for name in ("hidden", "weight")}
    inputs = {"old_log_probs": batch.old_log_probs, "advantages": batch.advantages}
    options: dict[str, Any] = {"entropy": True, "chunk_tokens": 7, "token_mask": batch.mask}
    args = (leaves["hidden"], leaves["weight"], batch.labels)
    if one_pass:
        loss_from_hidden(*args, batch.weights.float(), losses_of, inputs, **options).share.backward()
    else:
        (losses_of(*log_probs_from_hidden(*args, **options), **inputs)[0] * batch.weights).sum().backward()
    expected = expected_of("plain", torch.float32)
    for name, leaf in leaves.items():
        if name == frozen:
            assert leaf.grad is None
        else:
            assert leaf.grad is not None
            assert relative(leaf.grad, expected[name]) <= FP32


def test_weights_that_float16_cannot_hold_are_not_lost() -> None:
    """1e-9 a token, scaled up afterwards as a carrier and a loss scale do."""
    batch = batch_of(TOKENS, VOCABULARY, HIDDEN, torch.float16)
    hidden, weight = (one.half().requires_grad_() for one in (batch.hidden, batch.weight))
    weights = torch.full((TOKENS,), 1e-9)
    share, _ = loss_from_hidden(hidden, weight, batch.labels, weights, lambda log_probs, _: (-log_probs, {}))
    (share * 1e9).backward()
    leaf = batch.hidden.clone().requires_grad_()
    log_probs, _ = head_oracle.log_probs_and_entropy(leaf @ batch.weight.T, batch.labels)
    (-log_probs).sum().backward()
    assert hidden.grad is not None
    assert leaf.grad is not None
    assert relative(hidden.grad, leaf.grad) <= 4 * 2.0**-11


def test_losses_that_are_nan_where_the_weight_is_0_are_ignored() -> None:
    batch = batch_of(TOKENS, VOCABULARY, HIDDEN)
    hidden, weight = batch.hidden.float().requires_grad_(), batch.weight.float()
    nan = torch.where(batch.weights == 0, torch.nan, 0.0)

    def losses(log_probs: Tensor, _: Tensor | None, nan: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return log_probs + nan, {}

    share, values = loss_from_hidden(
        hidden, weight, batch.labels, batch.weights.float(), losses, {"nan": nan}, token_mask=torch.ones(TOKENS)
    )
    share.backward()
    expected, _ = head_oracle.log_probs_and_entropy(batch.hidden @ batch.weight.T, batch.labels)
    assert relative(share, (batch.weights * expected).sum()) <= FP32
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()
    assert relative(values["log_probs"], expected) <= FP32


def test_a_chunk_whose_loss_has_no_gradient_gives_none() -> None:
    """Its place in the gradient of the hidden states is new memory, which torch fills with NaN here."""
    batch = batch_of(TOKENS, VOCABULARY, HIDDEN)
    hidden, weight = batch.hidden.float().requires_grad_(), batch.weight.float()

    def first_half(log_probs: Tensor, _: Tensor | None, place: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return log_probs if place[0] < TOKENS // 2 else torch.ones_like(log_probs), {}

    place = torch.arange(TOKENS)
    torch.use_deterministic_algorithms(True)
    try:
        share, _ = loss_from_hidden(
            hidden, weight, batch.labels, torch.ones(TOKENS), first_half, {"place": place}, chunk_tokens=TOKENS // 4
        )
    finally:
        torch.use_deterministic_algorithms(False)
    share.backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()
    assert hidden.grad[: TOKENS // 2].abs().amax(1).min() > 0
    assert hidden.grad[TOKENS // 2 :].abs().max() == 0


@pytest.mark.parametrize("one_pass", [False, True], ids=["two passes", "one pass"])
def test_the_weights_gradient_is_summed_in_float32_over_chunks(one_pass: bool) -> None:
    """Of 1024 equal tokens, each a chunk; a bfloat16 sum of equal terms stops growing at 256 of them."""
    number = 1024
    hidden, labels = torch.ones(number, 4, dtype=torch.bfloat16), torch.zeros(number, dtype=torch.int64)
    weight = torch.zeros(8, 4, dtype=torch.bfloat16, requires_grad=True)
    if one_pass:
        weights = torch.ones(number)
        loss_from_hidden(hidden, weight, labels, weights, lambda lp, _: (lp, {}), chunk_tokens=1).share.backward()
    else:
        log_probs_from_hidden(hidden, weight, labels, chunk_tokens=1).log_probs.sum().backward()
    of_one = torch.full((8, 4), -1 / 8)  # [j = label] - q[j], exact in bfloat16
    of_one[0] += 1
    assert weight.grad is not None
    assert torch.equal(weight.grad.float(), number * of_one)


def test_no_token_at_all() -> None:
    """A share of 0 with a graph, and every metric by its name."""
    batch = batch_of(TOKENS, VOCABULARY, HIDDEN)
    hidden, weight = (one.float().requires_grad_() for one in (batch.hidden, batch.weight))
    inputs = {"old_log_probs": batch.old_log_probs, "advantages": batch.advantages}
    share, values = loss_from_hidden(hidden, weight, batch.labels, torch.zeros(TOKENS), losses_of, inputs, entropy=True)
    share.backward()
    assert float(share.detach()) == 0
    assert set(values) == {"log_probs", "entropy", "ppo_kl"}
    for leaf in (hidden, weight):
        assert leaf.grad is not None
        assert leaf.grad.abs().max() == 0


def test_hidden_states_of_three_dimensions() -> None:
    batch = batch_of(TOKENS, VOCABULARY, HIDDEN)
    plain = log_probs_from_hidden(batch.hidden.float(), batch.weight.float(), batch.labels).log_probs
    cut = log_probs_from_hidden(
        batch.hidden.float().view(12, 4, HIDDEN), batch.weight.float(), batch.labels.view(12, 4), chunk_tokens=5
    )
    assert cut.log_probs.shape == (12, 4)
    torch.testing.assert_close(cut.log_probs.view(-1), plain)


H, W, L = torch.zeros(3, 4), torch.zeros(8, 4), torch.tensor([0, 3, 7])
fine = functools.partial(log_probs_from_hidden, H, W, L)


def folded(weights: Tensor = L + 1.0, loss: Any = lambda lp, _, **more: (lp, {}), **inputs: Tensor) -> Any:
    return loss_from_hidden(H, W, L, weights, loss, inputs)


REFUSALS: dict[str, Refusal] = {
    "labels in another order": (
        lambda: log_probs_from_hidden(H[:, None], W, L[None]), ValueError, r"hidden states they must be \(3, 1\)",
        lambda: log_probs_from_hidden(H[:, None], W, L[:, None])),
    "a weight of another size": (
        lambda: log_probs_from_hidden(H, W[:, :3], L), ValueError, r"\(3, 4\).* and \(8, 3\)", fine),
    "a weight of another dtype": (lambda: log_probs_from_hidden(H, W.half(), L), ValueError, "of one dtype", fine),
    "a bias of another size": (
        lambda: fine(bias=torch.zeros(7)), ValueError, r"and \(7,\)", lambda: fine(bias=torch.zeros(8))),
    "chunks of no tokens": (
        lambda: fine(chunk_tokens=0), ValueError, "chunk_tokens is 0", lambda: fine(chunk_tokens=1)),
    "weights of other tokens": (lambda: folded(torch.ones(2)), ValueError, "weights: 2 values for 3 tokens", folded),
    "inputs of other tokens": (
        lambda: folded(old=torch.ones(4)), ValueError, "old: 4 values for 3 tokens", lambda: folded(old=torch.ones(3))),
    "a loss that is reduced": (
        lambda: folded(loss=lambda lp, _: (lp.sum(), {})), ValueError, "the losses: 1 values for 3 tokens", folded),
    "a metric that is reduced": (
        lambda: folded(loss=lambda lp, _: (lp, {"kl": lp.mean()})), ValueError, "kl: 1 values for 3 tokens",
        lambda: folded(loss=lambda lp, _: (lp, {"kl": lp}))),
}  # fmt: skip


@each_of(REFUSALS)
def test_refusals(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    check_refusal(refused, error, text, accepted)
