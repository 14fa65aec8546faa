"""What the output layer in chunks costs, and where its gradients go; values: test_every_way.py."""

from dataclasses import replace
from typing import Any

import head_oracle
import pytest
import torch
from head_oracle import BOTH, BOUNDS, FP32, HIDDEN, TOKENS, VOCABULARY, batch_of, expected_of, losses_of, relative
from refusals import Call, check_refusal, each_of, refusals
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl_loss.logprobs import log_probs_from_hidden, loss_from_hidden
from megatron_rl_loss.logprobs.hidden import add_product

both_ways = pytest.mark.parametrize("one_pass", [False, True], ids=["two passes", "one pass"])


def share_of(one_pass: bool, hidden: Tensor, weight: Tensor, batch: head_oracle.Batch, **options: Any) -> Tensor:
    options = {"entropy": True, "token_mask": batch.mask} | options
    exact = torch.promote_types(hidden.dtype, torch.float32)
    weights, near = batch.weights.to(exact), batch.advantages.to(exact)

    def loss(log_probs: Tensor, entropy: Tensor | None, near: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return losses_of(log_probs, entropy, near, wanted=BOTH)

    if one_pass:
        return loss_from_hidden(hidden, weight, batch.labels, weights, loss, {"near": near}, **options).share
    return (loss(*log_probs_from_hidden(hidden, weight, batch.labels, **options), near)[0] * weights).sum()


def leaves_of(batch: head_oracle.Batch, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return batch.hidden.to(dtype).requires_grad_(), batch.weight.to(dtype).requires_grad_()


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
    hidden, weight = (one.detach().requires_grad_(differentiate) for one in leaves_of(batch))
    with Watching() as seen:
        share = share_of(one_pass, hidden, weight, batch, token_mask=mask, chunk_tokens=chunk_tokens)
        if differentiate:
            share.backward()
    return seen


@both_ways
def test_no_tensor_has_the_logits_of_more_than_a_chunk(one_pass: bool) -> None:
    mask = torch.ones(TOKENS, dtype=torch.bool)
    largest = max(TOKENS * HIDDEN, VOCABULARY * HIDDEN)  # hidden states and the weight are there anyway
    assert largest < TOKENS * VOCABULARY
    assert watched(one_pass, 16, mask).largest <= largest
    assert watched(one_pass, TOKENS, mask).largest >= TOKENS * VOCABULARY  # negative control


@pytest.mark.parametrize("chunk_tokens", [1, 5, TOKENS])
def test_the_output_layer_does_not_run_on_masked_tokens(chunk_tokens: int) -> None:
    mask = batch_of(TOKENS, VOCABULARY, HIDDEN).mask
    active = int(mask.sum())
    assert 0 < active < TOKENS
    assert watched(False, chunk_tokens, mask).tokens == 2 * active  # forward, and again backward
    assert watched(True, chunk_tokens, mask).tokens == active
    assert watched(False, chunk_tokens, mask, differentiate=False).tokens == active
    assert watched(False, chunk_tokens, torch.zeros(TOKENS)).tokens == 0


# --- gradients that go elsewhere, or nowhere


class Kept:
    """A main gradient of the test."""

    def __init__(self, weight: Tensor) -> None:
        self.total = torch.ones(weight.shape, dtype=torch.promote_types(weight.dtype, torch.float32))

    def add_product(self, of_logits: Tensor, hidden: Tensor) -> None:
        add_product(self.total, of_logits, hidden)

    def add_scaled(self, gradient: Tensor, scale: Tensor) -> None:
        self.total.addcmul_(gradient, scale)

    def placeholder(self) -> Tensor | None:
        return None


@both_ways
@pytest.mark.parametrize("dtype", BOUNDS)
def test_the_weights_gradient_is_added_to_the_main_gradient(dtype: torch.dtype, one_pass: bool) -> None:
    batch = batch_of(TOKENS, VOCABULARY, HIDDEN, dtype)
    hidden, weight = leaves_of(batch, dtype)
    main = Kept(weight)
    (2 * share_of(one_pass, hidden, weight, batch, chunk_tokens=7, main_gradient=main)).backward()
    expected = expected_of("plain", dtype)
    assert weight.grad is None
    assert hidden.grad is not None
    assert relative((main.total.double() - 1) / 2, expected["weight"]) <= BOUNDS[dtype]
    assert relative(hidden.grad.double() / 2, expected["hidden"]) <= BOUNDS[dtype]


@both_ways
@pytest.mark.parametrize("frozen", [0, 1], ids=["hidden", "weight"])
def test_a_frozen_side_gets_no_gradient(frozen: int, one_pass: bool) -> None:
    batch = batch_of(TOKENS, VOCABULARY, HIDDEN)
    leaves = leaves_of(batch)
    leaves[frozen].requires_grad_(False)
    share_of(one_pass, *leaves, batch, chunk_tokens=7).backward()
    trained, name = leaves[1 - frozen], ("weight", "hidden")[frozen]
    assert leaves[frozen].grad is None
    assert trained.grad is not None
    assert relative(trained.grad, expected_of("plain", torch.float32)[name]) <= FP32


def test_weights_that_float16_cannot_hold_are_not_lost() -> None:
    """1e-9 per token, scaled up afterwards as a carrier and a loss scale do."""
    batch = batch_of(TOKENS, VOCABULARY, HIDDEN, torch.float16)
    hidden, weight = leaves_of(batch, torch.float16)
    weights = torch.full((TOKENS,), 1e-9)
    share, _ = loss_from_hidden(hidden, weight, batch.labels, weights, lambda log_probs, _: (-log_probs, {}))
    (share * 1e9).backward()
    leaf = batch.hidden.clone().requires_grad_()
    log_probs, _ = head_oracle.log_probs_and_entropy(leaf @ batch.weight.T, batch.labels)
    (-log_probs).sum().backward()
    assert relative(hidden.grad, leaf.grad) <= 4 * 2.0**-11  # type: ignore[arg-type]


def test_a_chunk_whose_loss_has_no_gradient_gives_none() -> None:
    batch = batch_of(TOKENS, VOCABULARY, HIDDEN)
    hidden, weight = leaves_of(batch)

    def first_half(log_probs: Tensor, _: Tensor | None, place: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return log_probs if place[0] < TOKENS // 2 else torch.ones_like(log_probs), {}

    inputs, ones = {"place": torch.arange(TOKENS)}, torch.ones(TOKENS)
    loss_from_hidden(hidden, weight, batch.labels, ones, first_half, inputs, chunk_tokens=TOKENS // 4).share.backward()
    assert hidden.grad[: TOKENS // 2].abs().amax(1).min() > 0  # type: ignore[index]
    assert hidden.grad[TOKENS // 2 :].abs().max() == 0  # type: ignore[index]


@both_ways
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


@both_ways
@pytest.mark.parametrize("tokens", [0, TOKENS])
def test_no_token_at_all(tokens: int, one_pass: bool) -> None:
    """None are there, or none count: one pass gives a share of 0 with a graph, and every metric by its name."""
    whole = batch_of(TOKENS, VOCABULARY, HIDDEN)
    of_tokens = ("hidden", "labels", "weights", "old_log_probs", "advantages")
    batch = replace(whole, **{name: getattr(whole, name)[:tokens] for name in of_tokens})
    leaves = leaves_of(batch)
    share = share_of(one_pass, *leaves, batch, token_mask=torch.zeros(tokens))
    share.backward()
    assert float(share.detach()) == 0 or (tokens and not one_pass)
    assert all(leaf.grad is not None and leaf.grad.count_nonzero() == 0 for leaf in leaves)


def test_hidden_states_of_three_dimensions() -> None:
    batch = batch_of(TOKENS, VOCABULARY, HIDDEN)
    hidden, weight = (one.detach() for one in leaves_of(batch))
    plain = log_probs_from_hidden(hidden, weight, batch.labels).log_probs
    cut = log_probs_from_hidden(hidden.view(12, 4, HIDDEN), weight, batch.labels.view(12, 4), chunk_tokens=5)
    torch.testing.assert_close(cut.log_probs, plain.view(12, 4))


H, W, L = torch.zeros(3, 4), torch.zeros(8, 4), torch.tensor([0, 3, 7])


def head(hidden: Tensor = H, weight: Tensor = W, labels: Tensor = L, **more: Any) -> Any:
    return log_probs_from_hidden(hidden, weight, labels, **more)


def fold(weights: Tensor = L + 1.0, loss: Any = lambda lp, _, **more: (lp, {}), **inputs: Tensor) -> Any:
    return loss_from_hidden(H, W, L, weights, loss, inputs)


ROWS = H[:, None]
REFUSALS = {
    **refusals(
        head,
        ((ROWS, W, L[None]), r"hidden states they must be \(3, 1\)", (ROWS, W, L[:, None])),
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
        (
            {"loss": lambda lp, _: (lp, {"losses": lp})},
            "a metric named 'losses'",
            {"loss": lambda lp, _: (lp, {"k": lp})},
        ),
        (
            {"loss": lambda lp, _: (lp, {"kl": lp.mean()})},
            "kl: 1 values for 3 tokens",
            {"loss": lambda lp, _: (lp, {"kl": lp})},
        ),
    ),
    **refusals(fold, ({"loss": None}, "per_token_loss is a NoneType: it must give losses", {}), error=TypeError),
}


@each_of(REFUSALS)
def test_refusals(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    check_refusal(refused, error, text, accepted)
