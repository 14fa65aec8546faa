"""Log-probs and entropy of logits: rounding, extremes, kept ids, memory, refusals; values: test_every_way.py."""

from typing import Any

import head_oracle
import numpy as np
import pytest
import torch
from head_oracle import TOKENS, VOCABULARY, batch_of, given, relative
from ranks import run_ranks, start_process_group
from refusals import refusal_tests, refusals
from torch import Tensor

from megatron_rl_loss.logprobs import KeptIds, log_probs_from_logits

#: Sums over the vocabulary, an exponential and a logarithm, in float32.
FP32 = 1e-6


def logits_of(batch: head_oracle.Batch) -> Tensor:
    return batch.hidden @ batch.weight.T + batch.bias


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["plain", "cold, bias", "kept ids", "padded vocabulary"])
def test_only_logits_and_their_gradient_are_rounded_to_their_dtype(name: str, dtype: torch.dtype) -> None:
    batch, labels, mask, options = given(name)
    keep, slopes = batch.keep if "kept" in name else None, torch.linspace(-2, 3, TOKENS).double() * mask
    leaf = logits_of(batch).to(dtype).double().requires_grad_()
    expected = [one * mask for one in head_oracle.log_probs_and_entropy(leaf, labels, keep=keep, **options)]
    (gradient,) = torch.autograd.grad(((expected[0] - 0.3 * expected[1]) * slopes).sum(), leaf)
    for more in ({}, {"gradient_in_place": True}, {"chunk_tokens": 3}):
        logits = leaf.detach().to(dtype).requires_grad_() * 1
        options |= {"keep": keep, "entropy": True, "token_mask": mask, **more}
        found = log_probs_from_logits(logits, labels, **options)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == torch.promote_types(dtype, torch.float32)
            assert relative(one, other) <= (1e-13 if dtype == torch.float64 else FP32)
        total = ((found.log_probs - 0.3 * found.entropy) * slopes.to(found.entropy.dtype)).sum()
        (of_logits,) = torch.autograd.grad(total, logits)
        assert relative(of_logits, gradient) <= {torch.float64: 1e-13, torch.float32: FP32}.get(
            dtype, torch.finfo(dtype).eps
        )
        options.pop(next(iter(more), None), None)


#: Others mask ids with it; times log2 e, it is -inf.
LEAST = torch.finfo(torch.float32).min

#: An entropy near 0 and one of few ids; -inf as models mask ids, for all ids of a rank too; probabilities that vanish.
FAR = [[0.0, 90, 0, -90], [5, 5, -torch.inf, -torch.inf], [3e4, 0, -3e4, 0], [0, 0, 3e4, -3e4], [0, 1, 2, 3]]
FAR += [[5, 4, LEAST, LEAST], [LEAST, 2, LEAST, 1]]
FAR_LABELS = [0, 1, 2, 0, 3, 0, 3]


def far(columns: slice = slice(None), group: Any = None) -> list[list[Any]]:
    leaf = torch.tensor(FAR)[:, columns].requires_grad_()
    log_probs, entropy = log_probs_from_logits(leaf, torch.tensor(FAR_LABELS), entropy=True, tp_group=group)
    (gradient,) = torch.autograd.grad((log_probs - entropy).sum(), leaf)
    return [one.tolist() for one in (log_probs, entropy, gradient.T)]


def far_on_rank() -> list[list[Any]]:
    start_process_group()
    group = torch.distributed.group.WORLD
    return far(slice(2 * group.rank(), 2 * group.rank() + 2), group)


def test_logits_far_apart_and_infinite_ones() -> None:
    leaf = torch.tensor(FAR, dtype=torch.float64).clamp(min=-1e5).requires_grad_()
    expected = head_oracle.log_probs_and_entropy(leaf, torch.tensor(FAR_LABELS))
    (gradient,) = torch.autograd.grad((expected[0] - expected[1]).sum(), leaf)
    alone, (first, second) = far(), run_ranks(2, far_on_rank, timeout_s=600)
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
        assert torch.equal(kept.mask(np.arange(TOKENS), part.start, part.stop, batch.keep.device), batch.keep[:, part])
    for more in ({}, {"token_mask": batch.mask}, {"chunk_tokens": 3}):
        both = [log_probs_from_logits(logits_of(batch), batch.labels, keep=keep, **more) for keep in (kept, batch.keep)]
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
        ({"vocab_size": 0}, "vocab_size 0 for logits of 8", {}),
        ({"labels": LABELS[:2]}, r"labels of shape \(2,\): for these tokens", {}),
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

test_refusals = refusal_tests(REFUSALS)
