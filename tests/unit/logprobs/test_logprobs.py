"""Log-probs and entropy of logits against float64 sums over single tokens, on one rank and on several."""

import functools
import itertools
from typing import Any

import head_oracle
import pytest
import torch
from head_oracle import batch_of, relative
from oracle import ROUNDING
from ranks import run_ranks, start_process_group
from refusals import Call, check_refusal, each_of, refusals
from torch import Tensor

from megatron_rl_loss.logprobs import KeptIds, log_probs_from_logits

TOKENS, VOCABULARY = 37, 24
#: Sums over the vocabulary, an exponential and a logarithm.
FP32 = 1e-6
assert VOCABULARY * ROUNDING < 2 * FP32


def logits_of(batch: head_oracle.Batch) -> Tensor:
    return batch.hidden @ batch.weight.T + batch.bias


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 1.7},
    "kept ids": {"keep": True},
    "kept ids, cold": {"keep": True, "temperature": 0.6},
    "padded vocabulary": {"vocab_size": 17},
    "padded to several ranks": {"vocab_size": 5},
    "masked tokens": {"token_mask": True},
    "masked tokens, kept ids": {"token_mask": True, "keep": True, "temperature": 0.8},
    "all tokens masked": {"token_mask": False},
}
WANTED = {"log-probs": (1.0, 0.0), "entropy": (0.0, 1.0), "both": (1.0, -0.3)}


def expected_of(batch: head_oracle.Batch, case: dict[str, Any], wanted: tuple[float, float]) -> tuple[Tensor, ...]:
    """Log-probs, entropy, and the gradient of a weighted sum of both."""
    logits = logits_of(batch).requires_grad_()
    labels, options = labels_of(batch, case), dict(case)
    mask = mask_of(batch, options.pop("token_mask", None))
    options["keep"] = batch.keep if options.get("keep") else None
    log_probs, entropy = (one * mask for one in head_oracle.log_probs_and_entropy(logits, labels, **options))
    total = ((wanted[0] * log_probs + wanted[1] * entropy) * slopes()).sum()
    (gradient,) = torch.autograd.grad(total, logits)
    return log_probs, entropy, gradient


def labels_of(batch: head_oracle.Batch, case: dict[str, Any]) -> Tensor:
    return batch.labels % case.get("vocab_size", VOCABULARY)


def mask_of(batch: head_oracle.Batch, masked: bool | None) -> Tensor:
    return batch.mask if masked else torch.full((TOKENS,), masked is None)


def slopes() -> Tensor:
    return torch.linspace(-2, 3, TOKENS).double()


def found_of(
    batch: head_oracle.Batch,
    case: dict[str, Any],
    wanted: tuple[float, float],
    dtype: torch.dtype,
    columns: slice = slice(None),
    group: Any = None,
    **more: Any,
) -> tuple[Tensor, ...]:
    logits = logits_of(batch)[:, columns].to(dtype).requires_grad_()
    options, labels = dict(case), labels_of(batch, case)
    if "token_mask" in options:
        options["token_mask"] = mask_of(batch, options["token_mask"])
        labels = labels.masked_fill(~options["token_mask"], -100)
    if options.get("keep"):
        options["keep"] = batch.keep[:, columns]
    with_entropy = wanted[1] != 0
    log_probs, entropy = log_probs_from_logits(logits, labels, tp_group=group, entropy=with_entropy, **options, **more)
    assert (entropy is None) == (not with_entropy)
    total = wanted[0] * log_probs + (0 if entropy is None else wanted[1] * entropy)
    (gradient,) = torch.autograd.grad((total * slopes().to(total.dtype)).sum(), logits)
    assert gradient.dtype == dtype
    return log_probs.detach(), log_probs.detach() * 0 if entropy is None else entropy.detach(), gradient.detach()


def check(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], bound: float, with_entropy: bool) -> None:
    for name, one, other in zip(("log_probs", "entropy", "gradient"), found, expected, strict=True):
        if (name != "entropy" or with_entropy) and other.abs().max() > 0:
            assert relative(one, other) <= bound, name
        elif name != "entropy":
            assert one.abs().max() == 0


@pytest.mark.parametrize("wanted", WANTED.values(), ids=WANTED)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_float32_and_float64(case: dict[str, Any], wanted: tuple[float, float]) -> None:
    batch = batch_of(TOKENS, VOCABULARY, 8)
    expected = expected_of(batch, case, wanted)
    for dtype, bound in ((torch.float32, FP32), (torch.float64, 1e-13)):
        for more in ({}, {"chunk_tokens": 1}, {"chunk_tokens": 5}, {"gradient_in_place": True}):
            leaf = found_of(batch, case, wanted, dtype, **more)
            check(leaf, expected, bound, with_entropy=wanted[1] != 0)
    assert {leaf[0].dtype, leaf[1].dtype} == {torch.float64}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_reductions_of_low_precision_logits_are_float32(case: dict[str, Any], dtype: torch.dtype) -> None:
    """Nothing is lost but what rounding logits and their gradient to the dtype loses."""
    batch = batch_of(TOKENS, VOCABULARY, 8)
    rounded = logits_of(batch).to(dtype).double()
    same = head_oracle.Batch(**{**vars(batch), "hidden": rounded, "weight": torch.eye(VOCABULARY).double(),
                                "bias": torch.zeros(VOCABULARY).double()})  # fmt: skip
    expected = expected_of(same, case, WANTED["both"])
    for more in ({}, {"gradient_in_place": True}, {"chunk_tokens": 3}):
        log_probs, entropy, gradient = found_of(same, case, WANTED["both"], dtype, **more)
        assert log_probs.dtype == entropy.dtype == torch.float32
        check((log_probs, entropy, expected[2]), expected, FP32, with_entropy=True)
        if expected[2].abs().max() > 0:
            assert relative(gradient, expected[2]) <= torch.finfo(dtype).eps


def on_tp_rank() -> tuple[dict[Any, list[list[Any]]], dict[Any, list[tuple[str, int]]], list[list[Any]]]:
    """Values and gradients of every case, what each exchanges, and `far`."""
    start_process_group()
    dist, group = torch.distributed, torch.distributed.group.WORLD
    assert group is not None
    sent, all_reduce = [], dist.all_reduce

    def counting(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        sent.append((str(op), tensor.numel()))
        all_reduce(tensor, op=op, group=group)

    dist.all_reduce = counting  # type: ignore[assignment]
    held, batch, found, exchanged = VOCABULARY // group.size(), batch_of(TOKENS, VOCABULARY, 8), {}, {}
    columns = slice(group.rank() * held, (group.rank() + 1) * held)
    for at in itertools.product(CASES, WANTED, (None, 4)):
        name, wanted, chunk_tokens = at
        of = found_of(batch, CASES[name], WANTED[wanted], torch.float32, columns, group, chunk_tokens=chunk_tokens)
        found[at], exchanged[at] = [one.tolist() for one in of], [*sent]
        sent.clear()
    pair = slice(2 * group.rank(), 2 * group.rank() + 2)
    return found, exchanged, far(pair, group) if group.size() == 2 else []


@functools.cache
def by_tp_rank(tp: int) -> list[Any]:
    return run_ranks(tp, on_tp_rank, timeout_s=600)


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_vocabulary_over_several_ranks(tp: int) -> None:
    batch = batch_of(TOKENS, VOCABULARY, 8)
    for name, wanted, chunk_tokens in itertools.product(CASES, WANTED, (None, 4)):
        at, with_entropy = (name, wanted, chunk_tokens), WANTED[wanted][1] != 0
        parts = [[torch.tensor(one, dtype=torch.float64) for one in found[at]] for found, _, _ in by_tp_rank(tp)]
        assert all(torch.equal(part[0], parts[0][0]) for part in parts)
        found = (parts[0][0], parts[0][1], torch.cat([part[2] for part in parts], 1))
        check(found, expected_of(batch, CASES[name], WANTED[wanted]), FP32, with_entropy)
        tokens = int(mask_of(batch, CASES[name].get("token_mask")).sum())
        for _, exchanged, _ in by_tp_rank(tp):  # one maximum and one sum, whatever the chunks
            assert [numbers for _, numbers in exchanged[at]] == [tokens, (2 + with_entropy) * tokens][
                : 2 * bool(tokens)
            ]
            assert ["MAX" in op for op, _ in exchanged[at]] == [True, False][: 2 * bool(tokens)]


#: Others mask ids with it; times log2 e, it is -inf.
LEAST = torch.finfo(torch.float32).min

#: An entropy near 0 and one of few ids; -inf as models mask ids, for all ids of a rank too; probabilities that vanish.
FAR = [[0.0, 90, 0, -90], [5, 5, -torch.inf, -torch.inf], [3e4, 0, -3e4, 0], [0, 0, 3e4, -3e4], [0, 1, 2, 3]]
FAR += [[5, 4, LEAST, LEAST], [LEAST, 2, LEAST, 1]]
FAR_LABELS = [0, 1, 2, 0, 3, 0, 3]


def far(columns: slice = slice(None), group: Any = None) -> list[list[Any]]:
    leaf = torch.tensor(FAR)[:, columns].requires_grad_()
    log_probs, entropy = log_probs_from_logits(leaf, torch.tensor(FAR_LABELS), entropy=True, tp_group=group)
    assert entropy is not None
    (gradient,) = torch.autograd.grad((log_probs - entropy).sum(), leaf)
    return [one.tolist() for one in (log_probs, entropy, gradient.T)]


def test_logits_far_apart_and_infinite_ones() -> None:
    leaf = torch.tensor(FAR, dtype=torch.float64).clamp(min=-1e5).requires_grad_()
    expected = head_oracle.log_probs_and_entropy(leaf, torch.tensor(FAR_LABELS))
    (gradient,) = torch.autograd.grad((expected[0] - expected[1]).sum(), leaf)
    alone, (first, second) = far(), (of_far for _, _, of_far in by_tp_rank(2))
    assert first[:2] == second[:2]
    for found in (alone, [*first[:2], first[2] + second[2]]):
        log_probs, entropy, of_logits = (torch.tensor(one, dtype=torch.float64) for one in found)
        torch.testing.assert_close(log_probs, expected[0].detach(), rtol=1e-6, atol=0)
        torch.testing.assert_close(entropy, expected[1].detach(), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(of_logits.T, gradient, rtol=1e-6, atol=1e-6)
    assert log_probs_from_logits(torch.tensor([[0.0, torch.nan]]), torch.tensor([0])).log_probs.isnan().all()


def test_kept_ids_are_their_mask() -> None:
    batch = batch_of(TOKENS, VOCABULARY, 8)
    counts = batch.keep.sum(1)
    kept = KeptIds(batch.keep.nonzero()[:, 1], torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]))
    for part in (slice(0, VOCABULARY), slice(8, 16)):
        assert torch.equal(kept.mask(torch.arange(TOKENS), part.start, part.stop), batch.keep[:, part])
    for more in ({}, {"token_mask": batch.mask}, {"chunk_tokens": 3}):
        both = [
            log_probs_from_logits(logits_of(batch), batch.labels, keep=keep, **more)  # type: ignore[arg-type]
            for keep in (kept, batch.keep)
        ]
        assert torch.equal(both[0].log_probs, both[1].log_probs)
    one = torch.arange(VOCABULARY) < 9  # for all tokens
    both = [log_probs_from_logits(logits_of(batch), batch.labels, keep=keep) for keep in (one, one.expand(TOKENS, -1))]
    assert torch.equal(both[0].log_probs, both[1].log_probs)


def test_shapes_and_dtypes_of_labels() -> None:
    batch = batch_of(36, VOCABULARY, 8)
    plain = log_probs_from_logits(logits_of(batch), batch.labels).log_probs
    cut = log_probs_from_logits(
        logits_of(batch).view(4, 9, -1).transpose(0, 1), batch.labels.view(4, 9).T.int(), chunk_tokens=2
    )
    assert torch.equal(cut.log_probs.T.reshape(-1), plain)
    assert cut.entropy is None


def test_the_gradient_in_place_is_the_logits_and_can_be_had_once() -> None:
    logits = torch.randn(5, 7, requires_grad=True) * 1
    log_probs, _ = log_probs_from_logits(logits, torch.arange(5), gradient_in_place=True)
    (gradient,) = torch.autograd.grad(log_probs.sum(), logits, retain_graph=True)
    assert gradient.data_ptr() == logits.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(log_probs.sum(), logits)


def test_nothing_is_kept_but_the_logits_and_a_few_numbers_a_token() -> None:
    kept: list[Tensor] = []
    logits = torch.randn(50, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        log_probs_from_logits(logits, torch.zeros(50, dtype=torch.int64), entropy=True)
    assert sorted(one.numel() for one in kept) == [3 * 50, 50 * 64]
    assert logits.data_ptr() in [one.data_ptr() for one in kept]


LOGITS, LABELS = torch.zeros(3, 8), torch.tensor([0, 3, 7])


def of(logits: Tensor = LOGITS, labels: Tensor = LABELS, **more: Any) -> Any:
    return log_probs_from_logits(logits, labels, **more)


def kept_ids(*offsets: int) -> Any:
    return of(keep=KeptIds(LABELS, torch.tensor(offsets)))


ONES = torch.ones(3)
MASKED = {"labels": LABELS - 100, "token_mask": torch.zeros(3)}
KEEP = torch.ones(3, 8, dtype=torch.bool)
REFUSALS = {
    **refusals(
        of,
        ({"temperature": 0}, r"it must be a number in \(0, inf\)", {}),
        ({"labels": LABELS + 1}, "a label 8 in a vocabulary of 8", {}),
        ({"labels": LABELS - 100}, "a label -100 .*token_mask", MASKED),
        ({"vocab_size": 7}, "a label 7 in a vocabulary of 7", {"vocab_size": 8}),
        ({"vocab_size": 9}, "vocab_size 9 for logits of 8 columns", {}),
        ({"vocab_size": 0}, "vocab_size is 0", {}),
        ({"labels": LABELS[:2]}, r"labels of shape \(2,\): for the logits", {}),
        ({"token_mask": torch.ones(3, 1)}, r"a token mask of shape \(3, 1\)", {"token_mask": ONES}),
        ({"keep": KEEP.float()}, "a keep-mask of torch.float32", {"keep": KEEP}),
        ({"keep": KEEP[:, :4]}, r"shape \(3, 4\): it must be bool, \(3, 8\)", {"keep": KEEP[0]}),
        ({"chunk_tokens": 0}, "chunk_tokens is 0", {"chunk_tokens": 1}),
        *(
            ({"labels": LABELS.to(dtype) + 8}, "a label 8 in a vocabulary of 8", {"labels": LABELS.to(dtype)})
            for dtype in (torch.int32, torch.int16, torch.uint8)
        ),
    ),
    **refusals(kept_ids, ((0, 3), r"offsets of shape \(2,\) for 3 tokens", (0, 1, 3, 3))),
    **refusals(
        of,
        ({"logits": LOGITS.long()}, "logits of torch.int64", {}),
        ({"kernel": "liger"}, "kernel is a str: it must make log-probs of logits", {}),
        ({"tp_group": "nccl"}, "a process group of type str: it must be a ProcessGroup", {"tp_group": None}),
        *(
            ({"labels": labels}, f"labels of {labels.dtype}", {})
            for labels in (LABELS.float(), LABELS.half(), LABELS.cfloat(), LABELS > 0)
        ),
        error=TypeError,
    ),
}


@each_of(REFUSALS)
def test_refusals(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    check_refusal(refused, error, text, accepted)
