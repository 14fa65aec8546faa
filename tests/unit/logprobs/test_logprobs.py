"""Log-probs, entropy and gradients of a loss of them, in every way, against float64; and what they cost."""

import contextlib
import itertools
from collections import Counter
from typing import Any

import head_oracle
import numpy as np
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
    Outputs,
    batch_of,
    expected_of,
    inputs_of,
    relative,
)
from interpreted import needs_triton, use_kernels
from logprob_ways import WAYS, WAYS_OF, check, kept_ids, leaves_of, results_of, values_of
from ranks import bytes_gathered, run_ranks, start_process_group
from refusals import refusal_tests, refusals
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl_loss import OutputLayer, Teacher, log_probs_from_hidden, log_probs_from_logits, loss_from_hidden
from megatron_rl_loss.logprobs.kept_ids import KeptIds
from megatron_rl_loss.logprobs.layer import WeightGradient

#: Cases whose chunks have one token, too: one of each kind of values.
ONE_BY_ONE = {"plain", "kept ids", "five ids", "a rest", "reverse KL, kept ids"}
every_way = pytest.mark.parametrize("way", WAYS)
of_hidden = pytest.mark.parametrize("way", WAYS[1:])


@pytest.mark.parametrize(("way", "name"), WAYS_OF)
def test_values_and_gradients_in_any_chunks(name: str, way: str) -> None:
    fewest = 1 if name in ONE_BY_ONE else 3
    options: list[dict[str, Any]] = [{"chunk_tokens": number} for number in (fewest, 7, TOKENS)]
    options += [{}, {"gradient_in_place": True}] if way == "logits" else []
    options += [{"keep": kept_ids()}, {"keep": kept_ids(), "chunk_tokens": 5}] if CASES[name].get("keep") else []
    for dtype, wanted in {*itertools.product([torch.float32], WANTED.values()), *((dtype, BOTH) for dtype in BOUNDS)}:
        for more in options if (dtype, wanted) == (torch.float32, BOTH) else options[1:2]:
            check(results_of(way, name, dtype, wanted, **more), expected_of(name, dtype, wanted), dtype)


def on_tp_rank() -> dict[Any, tuple[Outputs, list[int]]]:
    """Every way's values and gradients, and the bytes that each all-gather sends."""
    start_process_group()
    group, sent, by_case = torch.distributed.group.WORLD, bytes_gathered(), dict[Any, Any]()
    ways = [("logits", False), *itertools.product(WAYS[1:], (False, True))]
    for (way, sequence_parallel), name, wanted in itertools.product(ways, CASES, WANTED):
        if (wanted == "both" or name == "plain") and (way, name) in WAYS_OF:
            parallel = {"group": group, "sequence_parallel": sequence_parallel}
            more: Any = {"keep": kept_ids()} if name == "kept ids" else {}
            of = results_of(way, name, torch.float32, WANTED[wanted], parallel, chunk_tokens=7, **more)
            by_case[way, sequence_parallel, name, wanted] = of, [*sent]
            sent.clear()
    alone = {"group": group, "sum_gradient": False}
    by_case["not summed"] = results_of("two passes", "plain", torch.float32, BOTH, alone), []
    return by_case


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_vocabulary_and_tokens_over_several_ranks(ranks: int) -> None:
    by_rank = run_ranks(ranks, on_tp_rank, timeout_s=600)
    for at in by_rank[0]:
        parts = [rank[at][0] for rank in by_rank]
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
        if way == "logits":  # once, whatever the chunks
            numbers = 3 + CASES[name].get("ids", 1) + 2 * CASES[name].get("rest", False)  # its top and its sum
            assert all(rank[at][1] == [4 * numbers * TOKENS] for rank in by_rank)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("at", [(True, True), (True, False), (False, True)], ids=["both", "forward", "backward"])
@every_way
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
            cast = {key: leaf.to(to) if at[0] and leaf.dtype != torch.float64 else leaf for key, leaf in leaves.items()}
            with contextlib.nullcontext() if by_hand else forward:
                share = values_of(way, "plain", cast if by_hand else leaves)["share"]
            alone = way == "logits" and not at[0]  # the product's backward is autograd's: torch casts it
            with contextlib.nullcontext() if by_hand or alone else backward:
                share.backward()
            gradients.append([leaf.grad for leaf in leaves.values()])
        for slope, other in zip(*gradients, strict=True):
            torch.testing.assert_close(slope, other, rtol=0, atol=0)


# --- devices


@every_way
@pytest.mark.parametrize("name", ["cold, bias", "kept ids", "padded vocabulary", "hot, all tokens"])
def test_nothing_is_read_back_from_a_device(name: str, way: str) -> None:
    """`meta` has shapes and no numbers: whatever reads them, or copies them to the host, raises."""
    on_device = {key: leaf.detach().to("meta").requires_grad_() for key, leaf in leaves_of(name).items()}
    keep = {"keep": batch_of(TOKENS, VOCABULARY, HIDDEN).keep.to("meta")}
    ids = KeptIds(kept_ids().ids.to("meta"), kept_ids().offsets)
    further: list[Any] = [keep, {"keep": kept_ids()}, {"keep": ids}] if "kept" in name else [{}]
    for more in further:
        values_of(way, name, on_device, chunk_tokens=5, **more)["share"].backward()
    assert all(leaf.grad is not None for leaf in on_device.values())
    if way == "one pass":  # the tokens are those with a weight, on the host
        values_of(way, name, on_device, token_mask=None, **more)["share"].backward()
    with pytest.raises(ValueError, match="on the meta device"):  # negative control: a mask on the device must be read
        values_of(way, name, on_device, token_mask=inputs_of(name)[2].to("meta"), **more)


@every_way
@pytest.mark.parametrize("name", ["plain", "kept ids"])
def test_the_default_device_does_not_matter(name: str, way: str) -> None:
    """Another one than the tensors', where whatever is made without saying a device fails."""
    expected = expected_of(name, torch.float32)
    more = {"keep": kept_ids()} if name == "kept ids" else {}
    with torch.device("meta"):
        results = results_of(way, name, torch.float32, BOTH, **more)
    check(results, expected, torch.float32)


# --- what chunks cost


class Watching(TorchDispatchMode):
    """The largest tensor that any operation gives, and the tokens that pass through products with the weight."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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
@pytest.mark.parametrize("chunk_tokens", [1, 5, 8])
def test_no_tensor_has_the_logits_of_more_than_a_chunk_nor_of_masked_tokens(chunk_tokens: int, way: str) -> None:
    largest = max(TOKENS * HIDDEN, VOCABULARY * HIDDEN)  # hidden states and the weight are there anyway
    assert watched(way, chunk_tokens, "hot, all tokens").largest <= largest < TOKENS * VOCABULARY
    assert watched(way, TOKENS, "hot, all tokens").largest >= TOKENS * VOCABULARY  # negative control
    active = int(inputs_of("plain")[2].sum())
    assert 0 < active < TOKENS
    assert watched(way, chunk_tokens, "plain").tokens == (1 + (way == "two passes")) * active
    assert watched(way, chunk_tokens, "plain", differentiate=False).tokens == active
    assert watched(way, chunk_tokens, "no token counts").tokens == 0
    with_teacher = watched(way, chunk_tokens, "JSD, padded vocabulary")
    assert with_teacher.largest <= largest
    assert with_teacher.tokens == (2 + 2 * (way == "two passes")) * TOKENS  # the teacher's, too


def test_nothing_is_kept_but_the_logits_and_a_few_numbers_a_token() -> None:
    kept: list[Tensor] = []
    logits = torch.randn(50, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
        log_probs_from_logits(logits, torch.zeros(50, dtype=torch.int64), entropy=True)
    assert sorted(saved.numel() for saved in kept) == [50, 3 * 50, 50 * 64]  # labels, norm, logits
    assert logits.data_ptr() in [saved.data_ptr() for saved in kept]


# --- gradients that go elsewhere, or nowhere


class Main(WeightGradient):
    def for_autograd(self) -> Tensor | None:
        return None


@of_hidden
@pytest.mark.parametrize("dtype", BOUNDS)
def test_the_weights_gradient_goes_to_the_main_gradient_and_frozen_sides_get_none(dtype: torch.dtype, way: str) -> None:
    expected, exact = expected_of("plain", dtype), torch.promote_types(dtype, torch.float32)
    for frozen in (None, "hidden", "weight"):
        leaves = leaves_of("plain", dtype)
        main = Main(torch.ones(leaves["weight"].shape, dtype=exact))
        if frozen:
            leaves[frozen].requires_grad_(False)
        (2 * values_of(way, "plain", leaves, chunk_tokens=7, main_gradient=main)["share"]).backward()
        assert leaves["weight"].grad is None
        assert (leaves["hidden"].grad is None) == (frozen == "hidden")
        of_weight = expected["weight"] * (frozen != "weight")
        assert ((main.total.double() - 1) / 2 - of_weight).abs().max() <= BOUNDS[dtype] * expected["weight"].abs().max()
        if frozen != "hidden":
            assert relative(leaves["hidden"].grad.double() / 2, expected["hidden"]) <= BOUNDS[dtype]


def test_weights_that_float16_cannot_hold_are_not_lost() -> None:
    """1e-9 per token, scaled up afterwards as a carrier and a loss scale do."""
    labels, gradients = inputs_of("plain")[1], []
    for scale in (1.0, 1e9):
        leaves, weights = leaves_of("plain", torch.float16), torch.full((TOKENS,), 1 / scale)
        layer = OutputLayer(leaves["weight"])
        share, _ = loss_from_hidden(leaves["hidden"], layer, labels, weights, lambda lp, _: (-lp, {}))
        (share * scale).backward()
        gradients.append(leaves["hidden"].grad)
    assert gradients[0].abs().max() > 0.1
    torch.testing.assert_close(*gradients, rtol=4 * 2.0**-11, atol=2.0**-14)


def test_a_chunk_whose_loss_has_no_gradient_gives_none() -> None:
    def first_half(log_probs: Tensor, _: Tensor | None, place: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return log_probs if place[0] < TOKENS // 2 else torch.ones_like(log_probs), {}

    (hidden, weight), labels = leaves_of("plain").values(), inputs_of("plain")[1]
    inputs, ones = {"place": torch.arange(TOKENS)}, torch.ones(TOKENS)
    layer = OutputLayer(weight, chunk_tokens=TOKENS // 4)
    loss_from_hidden(hidden, layer, labels, ones, first_half, inputs)[0].backward()
    assert hidden.grad[: TOKENS // 2].abs().amax(1).min() > 0
    assert hidden.grad[TOKENS // 2 :].abs().max() == 0


@of_hidden
@pytest.mark.parametrize("number", [0, 320])
def test_the_weights_gradient_is_summed_in_float32_over_chunks(number: int, way: str) -> None:
    """Equal tokens, each a chunk: a bfloat16 sum of equal terms stops growing at 256. Without tokens the sum is 0."""
    hidden = torch.ones(number, 4, dtype=torch.bfloat16, requires_grad=True)
    weight, labels = torch.zeros(8, 4, dtype=torch.bfloat16, requires_grad=True), torch.zeros(number).long()
    layer = OutputLayer(weight, chunk_tokens=1)
    if way == "one pass":
        loss_from_hidden(hidden, layer, labels, labels + 1.0, lambda lp, _: (lp, {}))[0].backward()
    else:
        log_probs_from_hidden(hidden, layer, labels).log_probs.sum().backward()
    of_token = torch.full((8, 4), -1 / 8)  # [j = label] - q[j], exact in bfloat16
    of_token[0] += 1
    assert torch.equal(weight.grad.float(), number * of_token)
    assert hidden.grad.shape == hidden.shape


# --- logits: rounding, extremes, shapes


def logits_of(batch: head_oracle.Batch) -> Tensor:
    return batch.hidden @ batch.weight.T + batch.bias


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
@pytest.mark.parametrize("name", ["plain", "cold, bias", "kept ids", "padded vocabulary"])
def test_only_logits_and_their_gradient_are_rounded_to_their_dtype(name: str, dtype: torch.dtype) -> None:
    batch, labels, mask, options = inputs_of(name)
    keep, slopes = batch.keep if "kept" in name else None, torch.linspace(-2, 3, TOKENS).double() * mask
    leaf = logits_of(batch).to(dtype).double().requires_grad_()
    expected = [value * mask for value in head_oracle.log_probs_and_entropy(leaf, labels, keep=keep, **options)]
    (gradient,) = torch.autograd.grad(((expected[0] - 0.3 * expected[1]) * slopes).sum(), leaf)
    exact = 1e-13 if dtype == torch.float64 else 1e-6  # sums over the vocabulary, an exponential and a logarithm
    ways: list[Any] = [{}, {"gradient_in_place": True}, {"chunk_tokens": 3}]
    for more in ways:
        logits = leaf.detach().to(dtype).requires_grad_() * 1
        outputs = log_probs_from_logits(logits, labels, keep=keep, entropy=True, token_mask=mask, **options, **more)
        assert all(relative(value, right) <= exact for value, right in zip(outputs, expected, strict=True))
        total = ((outputs.log_probs - 0.3 * outputs.entropy) * slopes.to(outputs.entropy.dtype)).sum()
        (of_logits,) = torch.autograd.grad(total, logits, retain_graph=True)
        assert relative(of_logits, gradient) <= max(exact, torch.finfo(dtype).eps if dtype.itemsize == 2 else 0)
        if "gradient_in_place" in more:
            assert of_logits.data_ptr() == logits.data_ptr()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(total, logits)


#: Others mask ids with it; times log2 e, it is -inf.
LEAST = torch.finfo(torch.float32).min

#: An entropy near 0 and one of few ids; -inf as models mask ids, for all ids of a rank too; probabilities that vanish.
FAR = [[0.0, 90, 0, -90], [5, 5, -torch.inf, -torch.inf], [3e4, 0, -3e4, 0], [0, 0, 3e4, -3e4], [0, 1, 2, 3]]
FAR += [[5, 4, LEAST, LEAST], [LEAST, 2, LEAST, 1]]
FAR_LABELS = [0, 1, 2, 0, 3, 0, 3]


def far(columns: slice = slice(None), group: Any = None) -> list[Tensor]:
    leaf = torch.tensor(FAR)[:, columns].requires_grad_()
    log_probs, entropy = log_probs_from_logits(leaf, torch.tensor(FAR_LABELS), entropy=True, tp_group=group)
    (gradient,) = torch.autograd.grad((log_probs - entropy).sum(), leaf)
    return [value.detach().double() for value in (log_probs, entropy, gradient)]


def far_on_rank() -> list[Tensor]:
    start_process_group()
    group = torch.distributed.group.WORLD
    return far(slice(2 * group.rank(), 2 * group.rank() + 2), group)


def test_logits_far_apart_and_infinite_ones() -> None:
    leaf = torch.tensor(FAR, dtype=torch.float64).clamp(min=-1e5).requires_grad_()
    expected = head_oracle.log_probs_and_entropy(leaf, torch.tensor(FAR_LABELS))
    (gradient,) = torch.autograd.grad((expected[0] - expected[1]).sum(), leaf)
    first, second = run_ranks(2, far_on_rank, timeout_s=600)
    assert torch.equal(torch.stack(first[:2]), torch.stack(second[:2]))
    for log_probs, entropy, of_logits in (far(), [*first[:2], torch.cat([first[2], second[2]], 1)]):
        torch.testing.assert_close(log_probs, expected[0].detach(), rtol=1e-6, atol=0)
        torch.testing.assert_close(entropy, expected[1].detach(), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(of_logits, gradient, rtol=1e-6, atol=1e-6)
    assert log_probs_from_logits(torch.tensor([[0.0, torch.nan]]), torch.tensor([0])).log_probs.isnan().all()


def test_shapes_and_dtypes() -> None:
    (hidden, weight), labels = leaves_of("plain").values(), inputs_of("plain")[1]
    layer = OutputLayer(weight)
    plain = log_probs_from_hidden(hidden, layer, labels).log_probs
    cut_layer = OutputLayer(weight, chunk_tokens=5)
    cut = log_probs_from_hidden(hidden.view(8, 4, HIDDEN), cut_layer, labels.view(8, 4)).log_probs
    logits = (hidden @ weight.T).view(8, 4, -1).transpose(0, 1)
    of_logits, entropy = log_probs_from_logits(logits, labels.view(8, 4).T.int(), chunk_tokens=2)
    assert entropy is None
    torch.testing.assert_close([cut, of_logits.T], [plain.view(8, 4)] * 2)
    ragged = kept_ids().mask(np.arange(TOKENS), 8, 16, torch.device("cpu"))  # as a rank in the middle has them
    assert torch.equal(ragged, batch_of(TOKENS, VOCABULARY, HIDDEN).keep[:, 8:16])
    for_all = torch.arange(VOCABULARY) < 9  # for all tokens
    both = [log_probs_from_hidden(hidden, layer, labels, keep=keep) for keep in (for_all, for_all.expand(TOKENS, -1))]
    assert torch.equal(both[0].log_probs, both[1].log_probs)


# --- refusals

LOGITS, LABELS = torch.zeros(3, 8), torch.tensor([0, 3, 7])
H, W = torch.zeros(3, 4), torch.zeros(8, 4)


def of(logits: Tensor = LOGITS, labels: Tensor = LABELS, **more: Any) -> Any:
    return log_probs_from_logits(logits, labels, **more)


def head(hidden: Tensor = H, weight: Tensor = W, labels: Tensor = LABELS, **of_layer: Any) -> Any:
    return log_probs_from_hidden(hidden, OutputLayer(weight, **of_layer), labels)


def fold(weights: Tensor = LABELS + 1.0, loss: Any = lambda lp, _, **more: (lp, {}), **inputs: Tensor) -> Any:
    return loss_from_hidden(H, OutputLayer(W), LABELS, weights, loss, inputs)


def ids_at(*offsets: int) -> Any:
    return of(keep=KeptIds(LABELS, torch.tensor(offsets)))


def metric(name: str, of: Any = lambda lp: lp) -> dict[str, Any]:
    return {"loss": lambda lp, _: (lp, {name: of(lp)})}


TWO = torch.tensor([[0, 1]] * 3)
REST = {"labels": TWO, "rest_without": TWO > 0}
KEEP, ROWS = LOGITS == 0, H[:, None]
REFUSALS = {
    **refusals(
        of,
        ({"logits": LOGITS[0]}, r"logits of shape \(8,\): there must be a dimension of tokens", {}),
        ({"logits": LOGITS[0], "labels": LABELS[0]}, r"logits of shape \(8,\)", {}),
        (
            {"logits": LOGITS.softmax(-1)},
            "whose first row is above 0 and sums to 1",
            {"logits": LOGITS.log_softmax(-1)},
        ),
        ({"temperature": 0}, r"it must be a number in \(0, inf\)", {}),
        ({"labels": LABELS + 1}, "a label 8 in a vocabulary of 8", {}),
        ({"labels": LABELS - 100}, "a label -100 .*token_mask", {"labels": LABELS - 100, "token_mask": [0, 0, 0]}),
        ({"vocab_size": 7}, "a label 7 in a vocabulary of 7", {"vocab_size": 8}),
        *(({"vocab_size": size}, f"vocab_size {size} for logits of 8 columns", {}) for size in (9, 0, 7.5, True)),
        ({"labels": LABELS[:2]}, r"labels of shape \(2,\): for these tokens", {}),
        ({"labels": LABELS[:, None][:, :0]}, r"labels of shape \(3, 0\).*K >= 1", {"labels": LABELS[:, None]}),
        ({"labels": LABELS[:, None, None]}, r"labels of shape \(3, 1, 1\).*\(3, K\)", {"labels": LABELS[:, None]}),
        ({"labels": torch.tensor([[0, 8]] * 3)}, "a label 8 in a vocabulary of 8", {}),
        ({"labels": TWO, "rest_without": TWO[0] > 0}, r"rest_without of \(2,\) for labels of shape \(3, 2\)", REST),
        ({"labels": TWO, "rest_without": [True]}, "rest_without of list", REST),
        ({"rest_without": LABELS > 0}, r"for labels of shape \(3,\): it must be .* labels \[..., K\]", REST),
        (
            {"token_mask": [0.0, -torch.inf, 0.0]},
            "a token mask with -inf: .*neither labels nor",
            {"token_mask": [1, 0, 1]},
        ),
        ({"token_mask": [1.0, torch.nan, 0.0]}, "a token mask with nan", {"token_mask": [True, False, True]}),
        ({"token_mask": torch.ones(3, 1)}, r"a token mask of shape \(3, 1\)", {"token_mask": np.ones(3)}),
        ({"keep": KEEP.float()}, "a keep-mask of torch.float32", {"keep": KEEP}),
        ({"keep": KEEP[:, :4]}, r"shape \(3, 4\): it must be bool, \(3, 8\)", {"keep": KEEP[0]}),
        ({"chunk_tokens": 0}, "chunk_tokens is 0", {"chunk_tokens": 1}),
        *(
            ({"labels": LABELS.to(dtype) + 8}, "a label 8 in a vocabulary of 8", {"labels": LABELS.to(dtype)})
            for dtype in (torch.int32, torch.int16, torch.uint8)
        ),
    ),
    **refusals(ids_at, ((0, 3), r"offsets of shape \(2,\) for 3 tokens", (0, 1, 3, 3))),
    **refusals(
        of,
        ({"logits": LOGITS.long()}, "logits is torch.int64: it must be a float tensor", {}),
        ({"kernel": 1}, "kernel is a int: it must make log-probs of logits", {}),
        ({"tp_group": "nccl"}, "a process group of type str: it must be a ProcessGroup", {"tp_group": None}),
        *(
            ({"labels": labels}, f"labels of {labels.dtype}", {})
            for labels in (LABELS.float(), LABELS.half(), LABELS.to(torch.cfloat), LABELS > 0)
        ),
        error=TypeError,
    ),
    **refusals(
        head,
        ((ROWS, W, LABELS[None]), r"for these tokens they must be \(3, 1\)", (ROWS, W, LABELS[:, None])),
        ((H[0], W, LABELS), r"hidden states of shape \(4,\): there must be a dimension of tokens", (H, W)),
        ((H, W[:, :3]), r"\(3, 4\).* and \(8, 3\)", (H, W)),
        ((H, W.half()), "of one dtype", (H.half(), W.half())),
        ({"bias": torch.zeros(7)}, r"and \(7,\)", {"bias": torch.zeros(8)}),
        ({"chunk_tokens": 0}, "chunk_tokens is 0", {"chunk_tokens": 1}),
    ),
    **refusals(
        fold,
        ((torch.ones(2),), "weights of 2 values for 3 tokens", ()),
        ({"old": torch.ones(4)}, "old of 4 values for 3 tokens", {"old": torch.ones(3)}),
        ({"loss": lambda lp, _: (lp.sum(), {})}, "the losses of 1 values for 3 tokens", {}),
        (metric("losses"), "a metric named 'losses'", metric("k")),
        (metric("kl", torch.mean), "kl of 1 values for 3 tokens", metric("kl")),
    ),
    **refusals(fold, ({"loss": None}, "per_token_loss is a NoneType: it must give losses", {}), error=TypeError),
}

test_refusals = refusal_tests(REFUSALS)


# --- a rest that is far below the marked ids


def far_rest(group: Any = None) -> tuple[Tensor, Tensor]:
    """Log-prob of the rest and the logits' gradient for gaps of 20 to 660, with a large gradient from above."""
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    leaf = far_logits().float().chunk(ranks, -1)[rank].requires_grad_()
    labels, marked = torch.tensor([[0, 5]] * len(leaf)), torch.tensor([[True, True]] * len(leaf))
    log_probs, _ = log_probs_from_logits(leaf, labels, tp_group=group, temperature=0.3, rest_without=marked)
    log_probs[:, -1].backward(torch.full((len(leaf),), 1000.0))
    assert leaf.grad is not None
    return log_probs[:, -1].detach(), leaf.grad


def far_logits() -> Tensor:
    logits = torch.randn(7, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    logits[:, [0, 5]] += torch.tensor([[20.0], [30], [60], [105], [150], [200], [660]])
    return logits.double()


def far_rest_on_rank() -> tuple[Tensor, Tensor]:
    start_process_group()
    return far_rest(torch.distributed.group.WORLD)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rest_however_small_has_its_log_and_its_gradient(ranks: int) -> None:
    exact = far_logits().requires_grad_()
    z = exact / 0.3
    right = z[:, [1, 2, 3, 4, 6, 7]].logsumexp(-1) - z.logsumexp(-1)
    right.backward(torch.full((7,), 1000.0, dtype=torch.float64))
    parts = [far_rest()] if ranks == 1 else run_ranks(ranks, far_rest_on_rank, timeout_s=600)
    for value, _ in parts:  # a difference of logits of up to 2200: one rounding of each
        torch.testing.assert_close(value.double(), right.detach(), rtol=4e-7, atol=0)
    gradient = torch.cat([slopes for _, slopes in parts], -1).double()
    assert exact.grad is not None
    # x exp(-x) roundings of each entry, at most a few: the rest's logits are compared with their own largest.
    assert (gradient - exact.grad).abs().max() / exact.grad.abs().max() < 5e-7
    assert right.detach().min() < -2000  # far beyond float32's exp


def test_a_rest_without_an_id_is_a_constant() -> None:
    leaf = torch.randn(2, 3, requires_grad=True)
    labels, keep = torch.tensor([[0, 1]] * 2), torch.tensor([True, True, False])
    for more in ({"keep": keep}, {"vocab_size": 2}):
        log_probs, _ = log_probs_from_logits(leaf, labels, rest_without=torch.ones(2, 2) > 0, **more)
        (slopes,) = torch.autograd.grad(log_probs[:, -1].sum(), leaf)
        assert log_probs[:, -1].tolist() == pytest.approx([-87.336] * 2, rel=1e-4)
        assert not slopes.any()


#: Arguments that backward reads again, by name: a way to call, with these arguments, and how one is refilled.
REFILLED: dict[str, dict[str, Any]] = {
    "labels": {"labels": torch.tensor([1, 2, 3, 0])},
    "labels of K ids": {"labels": torch.tensor([[1, 2], [2, 3], [3, 1], [0, 1]])},
    "keep": {"keep": torch.arange(24).view(4, 6) % 3 > 0},
    "ids": {"keep": KeptIds(torch.tensor([0, 1, 2, 5, 3, 4]), torch.tensor([0, 2, 3, 5, 6]))},
    "token_mask": {"token_mask": torch.tensor([1, 0, 1, 1])},
    "rest_without": {"labels": torch.tensor([[1, 2], [2, 3], [3, 1], [0, 1]]), "rest_without": torch.ones(4, 2) > 0},
    "teacher": {"teacher": torch.randn(4, 6, generator=torch.Generator().manual_seed(1))},
    "logits": {},
}


def gradient_after_a_change(name: str, change: bool, kernel: Any) -> Tensor | str:
    of_call = REFILLED[name].items()
    given: dict[str, Any] = {key: value.clone() if isinstance(value, Tensor) else value for key, value in of_call}
    labels = given.pop("labels", torch.tensor([1, 2, 3, 0]))
    ids = given["keep"].ids.clone() if name == "ids" else None
    if ids is not None:
        given["keep"] = KeptIds(ids, given["keep"].offsets)
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    read = logits * 1
    if name == "teacher":
        taught = Teacher(given["teacher"], kind="reverse_kl")
        values = log_probs_from_hidden(read, OutputLayer(torch.eye(6)), labels, teacher=taught).divergence
    else:
        values = log_probs_from_logits(read, labels, kernel=kernel, **given).log_probs
    if change:
        of = labels if name.startswith("labels") else ids if ids is not None else given.get(name, read)
        with torch.no_grad():
            of.copy_(of.flip(0).flip(-1) if of.dim() > 1 else of.flip(0))
    try:
        return torch.autograd.grad(values.sum(), logits)[0]
    except RuntimeError as error:
        return str(error)


def check_changes(kernel: Any) -> None:
    for name in REFILLED if kernel is None else set(REFILLED) - {"rest_without", "teacher"}:
        right, changed = (gradient_after_a_change(name, change, kernel) for change in (False, True))
        assert isinstance(right, Tensor)
        if isinstance(changed, Tensor):  # it was copied
            assert name in ("token_mask", "ids"), name
            assert torch.equal(changed, right), name
        else:
            assert "modified by an inplace operation" in changed, name


def test_what_is_changed_before_backward_is_refused() -> None:
    """A buffer of a batch that is refilled too early would give the gradient of other labels."""
    check_changes(None)


def check_changes_of_kernels() -> None:
    use_kernels()
    check_changes("triton")


@needs_triton
def test_what_is_changed_before_the_kernels_backward_is_refused() -> None:
    run_ranks(1, check_changes_of_kernels)


def test_a_gradient_cannot_overwrite_what_others_read() -> None:
    leaf, labels = torch.randn(3, 4).requires_grad_(), torch.tensor([0, 1, 2])
    for logits, what in ((leaf, "a leaf"), ((leaf * 1)[:1].expand(3, 4), "expanded")):
        with pytest.raises(ValueError, match=f"gradient_in_place with logits that are {what}: the gradient would"):
            log_probs_from_logits(logits, labels, gradient_in_place=True)
    with torch.no_grad():
        log_probs_from_logits(leaf, labels, gradient_in_place=True)


@pytest.mark.parametrize("chunk_tokens", [3, 12, 50], ids=["four chunks", "one chunk", "one chunk, more tokens"])
def test_the_weights_gradient_of_the_first_chunk_is_written_not_added(chunk_tokens: int) -> None:
    """Of one chunk in the weight's dtype; of several each later one is added in float32."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=draw).bfloat16() for n in (12, 40))
    weight.requires_grad_()
    layer = OutputLayer(weight, chunk_tokens=chunk_tokens)
    total = log_probs_from_hidden(hidden, layer, torch.arange(12)).log_probs.sum()
    made = OfWeight(40 * 16)
    with made:
        (gradient,) = torch.autograd.grad(total, weight)
    assert not [name for name in made.names if "zero" in name or "fill" in name]
    if chunk_tokens >= 12:
        assert made.names == {"mm": 1}
    exact = weight.detach().float().requires_grad_()
    right = torch.autograd.grad((hidden.float() @ exact.t()).log_softmax(-1)[range(12), range(12)].sum(), exact)[0]
    assert float((gradient.float() - right).abs().max() / right.abs().max()) < 2 * 2**-8 * 4


class OfWeight(TorchDispatchMode):
    """Operations that make or fill a tensor of the weight's size."""

    def __init__(self, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size, self.names = size, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if isinstance(result, Tensor) and result.numel() == self.size and not name.startswith(FREE):
            self.names[name] += 1
        return result


FREE = ("view", "t", "transpose", "detach", "empty", "new_empty", "_unsafe_view", "alias", "slice")
