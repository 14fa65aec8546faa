"""Samples: masks and ids as users give them, what replicas compare, and what is refused.

What a rank holds of them: tests/unit/core/test_weights.py.
"""

import itertools
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from device import DEVICE
from refusals import refusal_tests, refusals
from torch import Tensor

from megatron_rl_loss import (
    Contiguous,
    Gathered,
    Samples,
    StepTotals,
    Term,
    ZigzagBSHD,
    ZigzagTHD,
    make_pg_loss_reducer,
    plan_step,
)
from megatron_rl_loss.core.ids import as_ids
from megatron_rl_loss.core.plan import Plan
from megatron_rl_loss.core.samples import ReadMasks, UnreadMasks, read_masks

NAN, INF = float("nan"), float("inf")

# --- masks

UNUSUAL: dict[str, list[Any]] = {
    "every other entry of a longer tensor": [torch.tensor([1, 1, 0, 0, 1, 1])[::2], torch.tensor([1, 0])],
    "several dtypes": [torch.tensor([1, 0, 1]), torch.tensor([True, False]), torch.tensor([0.5, 0.0]).half(), [1, 0.0]],
    "lists and arrays": [[1, 0, 1], [True, False], [0.5, 1], np.array([1, 0], np.uint8), (1, 0), []],
    "read-only and reversed arrays": [np.broadcast_to(np.float32(1), 3), np.array([1.0, 0, 0])[::-1]],
    "fractions": [torch.tensor([1, 0.5, 0, 1]), torch.tensor([1.0, 255.0]).bfloat16()],
    "minus zero": [torch.tensor([-0.0, 1.0])],
    "a parameter": [torch.nn.Parameter(torch.tensor([1.0, 0, 1]))],
    "a negated view": [torch.complex(torch.zeros(3), torch.tensor([-1.0, 0, -1])).conj().imag, torch.tensor([1.0])],
    "the smallest and the largest": [torch.tensor([1e-30, 1e9, 0], dtype=torch.float64), torch.tensor([1e-30, 1e9])],
    "some empty": [torch.tensor([]), torch.tensor([1.0, 0]), torch.tensor([]), torch.tensor([1.0]), torch.tensor([])],
}
UNSOUND = {
    "negative": torch.tensor([1, -1]),
    "a negative byte": torch.tensor([1, -1], dtype=torch.int8),
    "integers beyond 1": torch.tensor([1, 2]),
    "bytes beyond 1": torch.tensor([1, 255], dtype=torch.uint8),
    "too small": torch.tensor([1, 0.9e-30]),
    "too large": torch.tensor([1, 1.1e9]),
    "too small for float32": torch.tensor([1, 0.9e-30], dtype=torch.float64),
    "too large for a count": torch.tensor([1, 1e29], dtype=torch.float64),
    "a read-only int beyond 1": np.broadcast_to(np.int64(2), 3),
    "NaN": torch.tensor([1.0, NAN]).half(),
    "infinite": torch.tensor([1.0, INF], dtype=torch.float64),
    "a list": [1, 2],
}


@pytest.mark.gpus
@pytest.mark.parametrize("unusual", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_masks(unusual: list[Any]) -> None:
    lists = [mask if isinstance(mask, list | tuple) else mask.tolist() for mask in unusual]
    samples = Samples([mask.to(DEVICE) if isinstance(mask, Tensor) else mask for mask in unusual])
    rows = [torch.tensor(mask, dtype=torch.float64) for mask in lists]
    assert samples.mask_lengths == list(map(len, rows))
    assert samples.mask_sums.tolist() == [float(row.sum()) for row in rows]
    assert samples.active_tokens.tolist() == [int((row != 0).sum()) for row in rows]
    assert samples.local(0, 1).mask.tolist() == pytest.approx(torch.cat(rows).tolist(), rel=1e-7)
    assert [mask.tolist() for mask in samples.loss_masks] == [pytest.approx(row.tolist(), rel=1e-7) for row in rows]


@pytest.mark.parametrize("mask", UNSOUND.values(), ids=UNSOUND)
@pytest.mark.parametrize("beside", [torch.ones(3), torch.ones(3).long(), [1, 0]], ids=["floats", "ints", "a list"])
def test_unsound_masks_are_refused_with_their_sample(mask: Any, beside: Any) -> None:
    with pytest.raises(ValueError, match=r"the loss mask of sample 1 holds .*token weights must be finite and >= 0"):
        Samples([beside, mask])


def test_bools_of_other_bytes_are_refused_with_their_sample() -> None:
    two = torch.tensor([1, 2], dtype=torch.uint8).view(torch.bool)
    for masks in ([two], [torch.tensor([True]), two]):
        with pytest.raises(ValueError, match=rf"the loss mask of sample {len(masks) - 1} holds 2\.0: "):
            Samples(masks)


NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (np.ma.array([1, 1, 0], mask=[False, True, False]), r"MaskedArray: .*mask\.filled\(0\)"),
        (NESTED, r"mask\.unbind\(\)"),
    ],
    ids=["a masked array", "a nested tensor"],
)
def test_masks_of_other_kinds_are_refused_with_their_sample(mask: Any, says: str) -> None:
    with pytest.raises(TypeError, match=f"the loss mask of sample 1 is a .*{says}"):
        Samples([[1, 0], mask])


def test_what_a_step_counts_cannot_be_changed() -> None:
    """A mask or id that changed after the count would be weighed by denominators of another step."""
    samples = Samples([[1, 1], [0.5]], rollout_ids=[0, 1], ids={"turn": [[0, 0], [1]]}, layout=Gathered([0, 2, 3]))
    held, cut = samples.local(0, 1), Samples([[1] * 4], layout=ZigzagTHD([0, 4])).local(0, 2)
    counted = (
        samples.buffer, *samples.loss_masks, samples.mask_sums, samples.active_tokens, samples.ids["rollout"],
        *samples.parts["turn"], samples.parts["rollout"].sample, held.mask, cut.mask,
    )  # fmt: skip
    for values in counted:
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 0


def test_masks_that_change_later_change_nothing() -> None:
    for mask in (torch.tensor([1, 1, 0, 1]), torch.tensor([1.0, 1, 0, 1]), np.array([1.0, 1, 0, 1])):
        samples = Samples([mask])
        mask[:] = 0
        assert (samples.local(0, 1).mask.tolist(), samples.mask_sums.tolist()) == ([1, 1, 0, 1], [3])


def test_buffers_of_rows_are_cut_in_their_shape() -> None:
    local, tokens = Samples([[1] * 8], layout=ZigzagTHD([0, 8])).local(1, 2), torch.arange(8)
    assert local.of(tokens).tolist() == [2, 3, 4, 5]
    assert local.of(tokens[None]).tolist() == [[2, 3, 4, 5]]
    assert local.of(tokens[None, :, None]).tolist() == [[[2], [3], [4], [5]]]


def test_fractional_masks_are_summed_in_float64() -> None:
    for dtype in (torch.float32, torch.float64):
        mask = torch.full((1_000_003,), 0.1, dtype=dtype)
        # In float64 a sum of a million terms is off by 2^-53 a million times at most.
        assert float(Samples([mask]).mask_sums[0]) == pytest.approx(1_000_003 * float(mask[0]), rel=1e-9)


def test_masks_on_a_device_are_read_in_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands in for one; its values are those that `to_array` is made to return."""
    read: list[int] = []

    def to_array(values: Tensor) -> Any:
        read.append(len(values))
        return np.arange(len(values)) % 2

    monkeypatch.setattr("megatron_rl_loss.core.masks.to_array", to_array)
    device: dict[str, Any] = {"device": "meta", "dtype": torch.int64}
    of_steps = [Samples([torch.ones(3, **device)] * 2, term_masks={"kl": [torch.ones(3, **device)] * 2}) for _ in "ab"]
    assert read == []
    read_masks(of_steps)
    assert read == [24]
    assert [samples.mask_sums.tolist() for samples in of_steps] == [[1, 2], [1, 2]]
    assert of_steps[1].with_mask("kl").mask_sums.tolist() == [1, 2]


def test_all_that_is_counted_reads_masks_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "megatron_rl_loss.core.masks.to_array",
        lambda values: np.arange(len(values)) % 2 if values.is_meta else values.numpy(),
    )
    masks = [torch.ones(3, device="meta", dtype=torch.int64)]
    for name in ("buffer", "loss_masks", "mask_sums", "active_tokens", "holds_flags"):
        assert np.sum(getattr(Samples(masks), name)) == 1, name
    assert reduced(masks).weights.tolist() == [0, 0.5, 0]


def test_masks_on_the_host_and_on_a_device_stay_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "megatron_rl_loss.core.masks.to_array",
        lambda values: np.arange(len(values)) % 2 if values.is_meta else values.numpy(),
    )
    device: dict[str, Any] = {"device": "meta", "dtype": torch.int64}
    samples = Samples([torch.tensor([1, 0]), torch.ones(3, **device), torch.tensor([0, 1]), torch.ones(1, **device)])
    assert [mask.tolist() for mask in samples.loss_masks] == [[1, 0], [0, 1, 0], [0, 1], [1]]


@pytest.mark.parametrize("kind", [torch.int32, torch.bool, torch.int64, torch.uint8])
@pytest.mark.parametrize("padding", [0, 3])
def test_many_masks_are_read_as_few(kind: torch.dtype, padding: int) -> None:
    """More than fit into a cache, a group at a time: the same sums and buffer, and weights to the bit."""
    draw = torch.Generator().manual_seed(0)
    lengths = [*torch.randint(1, 9000, (30,), generator=draw).tolist(), 40_000, 1, 0, 70_000]
    masks = [(torch.rand(n, generator=draw) < 0.6).to(kind) for n in lengths]
    layout = ZigzagTHD([0, *itertools.accumulate(n + padding for n in lengths)], lengths)
    samples = Samples(masks, layout=layout if padding else None)
    few = Samples([mask.double() for mask in masks], layout=layout if padding else None)
    assert samples.holds_flags
    assert np.array_equal(samples.buffer, few.buffer.astype(np.float32))
    assert np.array_equal(samples.mask_sums, few.mask_sums)
    totals, local = StepTotals.of(masks), samples.local(0, 1)
    weights = make_pg_loss_reducer("sample_mean", samples, totals=totals).weights
    beside = (1 / (np.maximum(samples.mask_sums, 1) * len(masks))).astype(np.float32)
    assert np.array_equal(weights.numpy(), local.mask * beside[local.sample_index])
    if kind != torch.bool:
        masks[31][0] = 2
        with pytest.raises(ValueError, match=r"the loss mask of sample 31 holds 2\.0"):
            Samples(masks)


def test_masks_that_nobody_has_read_are_of_another_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_rl_loss.core.masks.to_array", lambda values: np.ones(len(values), np.int64))
    samples = Samples([torch.ones(3, device="meta", dtype=torch.int64)])
    assert isinstance(samples._masks, UnreadMasks)
    read = samples.masks
    assert isinstance(read, ReadMasks)
    assert samples.masks is read
    assert isinstance(Samples([[1, 1]])._masks, ReadMasks)


def test_a_micro_batch_is_cut_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the check before the count, by weights, by a term's mask and by a mask that is added later."""
    cut, real = list[tuple[int, int]](), ZigzagTHD.pieces

    def pieces(self: ZigzagTHD, cp_rank: int, cp_size: int) -> Any:
        cut.append((cp_rank, cp_size))
        return real(self, cp_rank, cp_size)

    monkeypatch.setattr(ZigzagTHD, "pieces", pieces)
    masks = [[1, 1, 0, 1], [1, 0, 0, 1]]
    parts = [Samples(masks, layout=ZigzagTHD([0, 4, 8]), term_masks={"kl": masks}) for _ in range(3)]
    plan = plan_step(parts, "token_mean", term_masks=["kl"], dp_group=None)
    for microbatch in plan:
        losses = torch.ones(8, requires_grad=True)
        microbatch.loss({"pg": losses, "kl": Term(losses, mask="kl")}).backward()
    assert plan.finish()["loss"] == pytest.approx(2)
    assert cut == [(0, 1)] * 3
    parts[0].local(1, 2)
    assert parts[0].local(1, 2).positions.tolist() == [1, 2, 5, 6]
    assert cut == [(0, 1)] * 3 + [(1, 2)]
    assert "_cut" not in {name for name, value in vars(pickle.loads(pickle.dumps(parts[0]))).items() if value}


def test_samples_without_a_sample() -> None:
    for layout, size in ((None, 0), (ZigzagTHD([0, 8], filler_slots=1), 8)):
        samples = Samples([], layout=layout)
        local = samples.local(0, 1)
        assert (len(samples), samples.total_tokens, samples.with_mask("any")) == (0, size, samples)
        assert local.mask.tolist() == [0] * size
        assert (local.num_active, local.runs, len(local)) == (0, [], size)


def test_values_of_a_sample_are_put_where_its_mask_is_and_stay_differentiable() -> None:
    """A KL that is packed so beside an attached loss trains."""
    samples = Samples([[1, 1], [1, 0, 1]], layout=ZigzagTHD([0, 4, 8], [2, 3]))
    rows = [torch.tensor([1.0, 2], requires_grad=True), torch.tensor([3.0, 4, 5], requires_grad=True)]
    packed = samples.in_buffer(rows)
    assert packed.tolist() == [1, 2, 0, 0, 3, 4, 5, 0]
    losses = torch.ones(8, requires_grad=True)
    plan_step([samples], "token_sum", dp_group=None)[0].loss({"pg": losses, "kl": Term(packed, coef=2)}).backward()
    assert [row.grad.tolist() for row in rows if row.grad is not None] == [[2, 2], [2, 0, 2]]
    assert samples.in_buffer([[1, 2], np.array([3, 4, 5])]).tolist() == [1, 2, 0, 0, 3, 4, 5, 0]
    of_samples = torch.tensor([0.5, -1.0], requires_grad=True)
    assert samples.in_buffer([0.5, -1]).tolist() == [0.5, 0.5, 0, 0, -1, -1, -1, 0]
    assert samples.in_buffer(of_samples).tolist() == [0.5, 0.5, 0, 0, -1, -1, -1, 0]
    samples.in_buffer(of_samples).sum().backward()
    assert of_samples.grad is not None
    assert of_samples.grad.tolist() == [2, 3]
    assert samples.in_buffer([0.5, torch.tensor([1.0, 2, 3])]).tolist() == [0.5, 0.5, 0, 0, 1, 2, 3, 0]
    assert samples.in_buffer([[1, 2], of_samples[1]]).tolist() == [1, 2, 0, 0, -1, -1, -1, 0]
    filler = Samples([], layout=ZigzagTHD([0, 8], filler_slots=1))
    assert torch.equal(filler.in_buffer(torch.zeros(0)), torch.zeros(8))


# --- ids

#: hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
DIGESTS = {"prompt/0": "8310b148311e9803", "": "e4a6a0577479b2b4", "é": "cb1abf8beff3192f"}


def test_ints_stay_and_strings_are_hashed_alike_everywhere() -> None:
    """Ranks hash apart from each other: the numbers are part of what they agree on. 61 bits join none."""
    assert as_ids("ids", [3, -5, 2**61 - 1], 3).tolist() == [3, -5, 2**61 - 1]
    hashed = as_ids("ids", list(DIGESTS), 3)
    assert hashed.tolist() == [int.from_bytes(bytes.fromhex(digest), "little") % 2**61 for digest in DIGESTS.values()]
    for ids in ((1, 2), range(1, 3), torch.tensor([1, 2]).byte(), np.array([1, 2]), np.array([1, 2], object)):
        assert as_ids("ids", ids, 2).tolist() == [1, 2]


# --- what replicas compare


class Opaque:
    """A class without a repr of its own, which would be the same on two ranks."""


def described(**options: Any) -> Samples:
    return Samples([[1, 0, 1, 1], [1, 1, 1, 1]], **{"layout": ZigzagTHD([0, 4, 8]), **options})


DTYPES = itertools.cycle([torch.int32, torch.int64])
ID_LISTS: Any = itertools.cycle([[1, 2], torch.tensor([1, 2]).int()])
ORDERS = itertools.cycle([["x", "y", "zz"], ["zz", "y", "x"]])
ALIKE: dict[str, Callable[[], dict[str, Any]]] = {
    "tokens of another dtype of ints": lambda: {"tokens": torch.arange(8, dtype=next(DTYPES))},
    "bf16 tokens": lambda: {"tokens": torch.ones(8).bfloat16()},
    "ids in a list or a tensor": lambda: {"rollout_ids": next(ID_LISTS)},
    "labels of objects": lambda: {"labels": {"env": [Opaque(), Opaque()]}},
    "labels of sets": lambda: {"labels": {"tags": [set(next(ORDERS)), frozenset("b")]}},
    "labels of dicts": lambda: {"labels": {"of": [dict.fromkeys(next(ORDERS), 1), {Opaque(): None, Opaque(): {}}]}},
    "labels of tensors": lambda: {"labels": {"turns": [torch.arange(4), np.arange(3)]}},
}
UNLIKE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "layouts that cut otherwise": ({}, {"layout": Contiguous([0, 4, 8])}),
    "slots for rows": ({}, {"layout": ZigzagBSHD(2, 4)}),
    "per slot": ({"layout": Contiguous([0, 4, 8])}, {"layout": Contiguous([0, 4, 8], per_slot=True)}),
    "backward of a gather": ({"layout": Gathered([0, 4, 8])}, {"layout": Gathered([0, 4, 8], backward="slice")}),
    "tokens": ({"tokens": torch.arange(8)}, {"tokens": torch.arange(8) + 1}),
    "token shapes": ({"tokens": torch.ones(8)}, {"tokens": torch.ones(2, 4)}),
    "ids": ({"ids": {"session": [1, 2]}}, {"ids": {"session": [2, 1]}}),
    "ids per token": ({"ids": {"turn": [[1, 1, 2, 2], [3] * 4]}}, {"ids": {"turn": [[1, 2, 2, 2], [3] * 4]}}),
    "names of ids": ({"ids": {"session": [1, 2]}}, {"ids": {"task": [1, 2]}}),
    "labels": ({"labels": {"a": [1, 2]}}, {"labels": {"a": [1, 3]}}),
    "term masks": ({"term_masks": {"kl": [[1] * 4] * 2}}, {"term_masks": {"kl": [[1] * 4, [1, 1, 1, 0]]}}),
}


@pytest.mark.parametrize("options", ALIKE.values(), ids=ALIKE)
def test_replicas_with_the_same_samples_agree(options: Callable[[], dict[str, Any]]) -> None:
    assert described(**options()).digest() == described(**options()).digest() != described().digest()


@pytest.mark.parametrize(("mine", "theirs"), UNLIKE.values(), ids=UNLIKE)
def test_replicas_with_other_samples_do_not(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert described(**mine).digest() == described(**mine).digest() != described(**theirs).digest()


def test_fractional_weights_apart_are_told_apart() -> None:
    digests = {Samples([torch.tensor(mask)]).digest() for mask in ([1.0, 1], [1, 1.0001], [1, 0.0], [1.0, 1, 0])}
    assert len(digests) == 4


def test_tokens_of_a_filler_micro_batch_have_no_sample() -> None:
    local = Samples([], layout=ZigzagTHD([0, 4], filler_slots=1)).local(0, 1)
    assert (local.spread(np.ones(0)).tolist(), local.sample_index.tolist()) == ([0.0] * 4, [0] * 4)


# --- refusals, each beside its nearest legal neighbour

TWO, of_one_token = torch.ones(2), partial(Samples, [torch.ones(1)])


def of_masks(*masks: Any) -> Samples:
    return Samples(list(masks))


def reduced(mask: Any) -> Any:
    return make_pg_loss_reducer("token_mean", mask, totals=StepTotals.of([[1, 1]]))


test_refusals = refusal_tests(
    {
        **refusals(
            of_masks,
            ((torch.ones(1, 2),), r"sample 0 has shape \(1, 2\): it must be 1-D", (TWO,)),
            ((TWO, torch.tensor(1)), r"sample 1 has shape \(\)", (TWO, torch.tensor([1]))),
        ),
        **refusals(
            of_masks,
            ((TWO, TWO.to(torch.cfloat)), "loss masks of torch.complex64", (TWO, TWO.half())),
            ((TWO, torch.ones(2, device="meta", dtype=torch.cfloat)), "loss masks of torch.complex64", (TWO,)),
            ((TWO.to_sparse(),), "sample 0 is torch.sparse_coo: .*Pass mask.to_dense", (TWO,)),
            ((["a"],), "sample 0 is a list: it must hold one real number per token", ([1],)),
            (([1, [2]],), "sample 0 is a list", ([1, 1],)),
            error=TypeError,
        ),
        **refusals(
            reduced,
            ((TWO,), r"loss_masks is one Tensor: it must be a list of 1-D masks.*list\(loss_masks\)", ([TWO],)),
            ((None,), "loss_masks is one NoneType", ([TWO],)),
            (({(1, 1)},), r"loss_masks is one set: it must be a list of 1-D masks.*Pass \[mask, ...\]", ([(1, 1)],)),
            (({(1, 1): "a"},), "loss_masks is one dict: it must be a list", ([(1, 1)],)),
            (("11",), "loss_masks is one str", ([TWO],)),
            error=TypeError,
        ),
        **refusals(
            of_one_token,
            ({"prompt_ids": iter("a")}, "prompt_ids is <.* one id per sample", {"prompt_ids": ["a"]}),
            ({"labels": {"a": iter([1])}}, "labels 'a' is a list_iterator: there must be one", {"labels": {"a": [1]}}),
            ({"tokens": [[1, 2], [3]]}, "tokens in rows of different lengths", {"tokens": [[1]]}),
            *(
                ({"labels": {"a": wrong}}, f"labels 'a' is a {type(wrong).__name__}: there must be one",
                 {"labels": {"a": ["b"]}}) for wrong in ({"b"}, {0: "b"}, "b")
            ),
            *(
                ({"prompt_ids": wrong}, "there must be one id per sample", {"prompt_ids": ["a"]})
                for wrong in (frozenset("a"), {"a": 0}.keys(), {0: "a"})
            ),
            error=TypeError,
        ),
        **refusals(
            lambda values: Samples([[1, 1]]).in_buffer(values),
            ((iter([1.0]),), "values is a list_iterator: there must be one entry per sample", ([1.0],)),
            ((torch.tensor(1.0),), "values is a Tensor: there must be one entry per sample", (torch.tensor([1.0]),)),
            (({0: 1.0},), "values is a dict: there must be one entry per sample", ([1.0],)),
            (({1.0},), "values is a set: there must be one entry per sample", ([1.0],)),
            error=TypeError,
        ),
        **refusals(
            lambda values: Samples([[1, 1]]).in_buffer(values),
            ((torch.ones(1, 2, 3),), r"rows of \[\(2, 3\)\] values for loss masks of \[2\]", (torch.ones(1, 2),)),
        ),
        **refusals(
            lambda buffer: Samples([[1, 1]]).local(0, 1).of(buffer),
            (([1.0, 2.0],), "a list to cut: it must be a tensor or an array", (torch.ones(2),)),
            error=TypeError,
        ),
        **refusals(
            of_one_token,
            ({"rollout_ids": []}, "0 rollout_ids for 1 loss masks", {"rollout_ids": [0]}),
            ({"prompt_ids": [0, 1]}, "2 prompt_ids for 1 loss masks", {"prompt_ids": [0]}),
            *(
                ({f"{kind}_ids": [1], "ids": {kind: [2]}}, rf"{kind}_ids= together with ids=.*'{kind}': .*Drop one",
                 {f"{kind}_ids": [1]})
                for kind in ("rollout", "prompt")
            ),
            ({"ids": {"session": []}}, r"0 ids\['session'\] for 1", {"ids": {"session": [1]}}),
            ({"ids": {"turn": [[1, 2]]}}, r"ids\['turn'\] with rows of \[2\] entries for loss masks of \[1\]",
             {"ids": {"turn": [[1]]}}),
            ({"ids": {"turn": [[-1]]}}, "a token with a nonzero mask and a negative .*Mask the token, or",
             {"ids": {"turn": [[0]]}}),
            ({"ids": {"turn": [[""]]}}, "a token with a nonzero mask and a negative", {"ids": {"turn": [["a"]]}}),
            ({"ids": {"turn": [[1], [2]]}}, r"2 ids\['turn'\] for 1 loss", {"ids": {"turn": torch.tensor([[1]])}}),
            *(
                ({kind: wrong}, "a negative or empty id for sample 0: such an id names no unit", {kind: right})
                for kind in ("rollout_ids", "prompt_ids") for wrong, right in (([-1], [0]), ([""], ["-1"]))
            ),
            *(
                ({"ids": {"session": [wrong]}}, r"ids\['session'\] with a negative or empty id.*must be in a session",
                 {"ids": {"session": [right]}}) for wrong, right in ((-1, 0), ("", "a"))
            ),
            ({"tokens": TWO}, r"shape \(2,\) for a buffer of 1 .*of responses alone", {"tokens": torch.arange(1)}),
            ({"tokens": [[1, 2]]}, r"tokens of shape \(1, 2\) for", {"tokens": [[1]]}),
            ({"ids": {"step": [1]}}, "ids named 'step'", {"ids": {"steps": [1]}}),
            ({"ids": {"sample": [1]}}, "ids named 'sample': .*Rename them", {"ids": {"samples": [1]}}),
            ({"prompt_ids": [2**61]}, "beyond 61 bits", {"prompt_ids": [2**61 - 1]}),
            ({"rollout_ids": [-(2**61)]}, "beyond 61 bits.*as strings", {"rollout_ids": [str(-(2**61))]}),
            ({"labels": {"task": []}}, "0 labels 'task' for 1", {"labels": {"task": [1]}}),
            ({"term_masks": {"kl": [TWO]}}, r"masks 'kl' of \[2\] entries, loss masks of \[1\]",
             {"term_masks": {"kl": [[1]]}}),
            ({"term_masks": {"kl": []}}, "0 masks 'kl' for 1", {"term_masks": {"kl": [[1]]}}),
        ),
        **refusals(
            of_one_token,
            *(
                ({"prompt_ids": wrong}, text, {"prompt_ids": ["0"]})
                for wrong, text in (
                    ([0.0], r"prompt_ids holds 0.0 \(float\)"), (torch.tensor([1.0]), "holds 1.0"),
                    ([True], "holds True"),
                    (torch.tensor([[1]]), r"holds \[1\] \(list\)"), ([None], "holds None"), ([b"a"], "bytes"),
                    ("a", "prompt_ids is 'a': there must be one id per sample"), ({1}, "is {1}"), (1, "is 1"),
                    (torch.tensor(1), r"is tensor\(1\)"),
                )
            ),
            ({"ids": {1: [0], "a": [0]}}, "ids has the key 1: it must be a dict whose keys", {"ids": {"a": [0]}}),
            ({"ids": [[0]]}, "ids is a list: it must be a dict whose keys are names", {"ids": {"session": [0]}}),
            ({"labels": [0]}, "labels is a list", {"labels": {"task": [0]}}),
            ({"term_masks": [[1]]}, "term_masks is a list", {"term_masks": {"kl": [[1]]}}),
            ({"layout": Gathered}, "layout is <class.*it must be a Layout", {"layout": Gathered([0, 1])}),
            ({"layout": "zigzag"}, "layout is 'zigzag'", {"layout": None}),
            ({"cp_group": torch.ones(())}, "a process group of type Tensor", {"cp_group": None}),
            error=TypeError,
        ),
        **refusals(
            Samples([TWO]).in_buffer,
            (([None],), "None for a sample: it must be a number, or a row", ([1.5],)),
            error=TypeError,
        ),
        **refusals(
            partial(Samples, [[1], [1]]),
            ({"ids": {"turn": [[1], 2]}}, r"with rows of \[1, None\] entries for loss masks of \[1, 1\]",
             {"ids": {"turn": [[1], [2]]}}),
        ),
        **refusals(
            partial(Samples, [TWO] * 2),
            ({"prompt_ids": [0, "0"]}, "holds 0 and '0': these are two ids", {"prompt_ids": ["0", "1"]}),
        ),
        **refusals(
            Samples([TWO, torch.ones(1)]).in_buffer,
            (([TWO],), "1 rows for 2 loss masks", ([TWO, TWO[:1]],)),
            (([TWO, TWO],), r"rows of \[2, 2\] values for loss masks of \[2, 1\]", ([TWO, TWO[:1]],)),
        ),
        **refusals(
            lambda layout, cp_size: Samples([torch.ones(4)], layout=layout).local(0, cp_size),
            ((None, 2), "cp_size is 2 and no layout", (Gathered([0, 4]), 2)),
        ),
        **refusals(
            Samples([TWO], term_masks={"kl": [TWO]}, labels={"a": [1]}).with_mask,
            (("nll",), "the samples have no mask 'nll' .they have kl", ("kl",)),
        ),
    }
)  # fmt: skip


def test_samples_show_their_counts() -> None:
    samples = Samples([[1, 1, 0], [1]], prompt_ids=["a", "b"])
    assert repr(samples) == "Samples(2 samples, 4 tokens, 3 active, no layout, parts by prompt, sample)"
    unread = Samples([torch.ones(3, device="meta")], layout=ZigzagTHD([0, 4], total_lengths=[3]))
    assert repr(unread) == "Samples(1 samples, 3 tokens, ZigzagTHD, parts by sample)"  # the device is not read
    plan = plan_step([samples], "token_mean", num_microbatches=1, dp_group=None)
    assert repr(plan) == f"Plan({plan.describe()})"


def cells(table: str) -> list[list[str]]:
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall("<tr>(.*?)</tr>", table)]


def test_samples_and_plans_are_tables_in_a_notebook() -> None:
    samples = Samples([[1, 1, 0], [0.5] * 7], prompt_ids=["a", "b"], ids={"<b>": [1, 2]})
    assert cells(samples._repr_html_())[1:] == [
        ["0", "3", "2", "1 1 0"],
        ["1", "7", "7", "0.5 0.5 0.5 0.5 0.5 0.5 ..."],
    ]
    assert "<b>" not in samples._repr_html_()
    assert "parts by &lt;b&gt;, prompt, sample" in samples._repr_html_()
    unread = Samples([torch.ones(3, device="meta")] * 9)
    assert cells(unread._repr_html_())[1:] == [[f"{i}", "3", "on a device", ""] for i in range(8)] + [["and 1 more"]]
    more = [Samples([[1]], prompt_ids=["a"]), Samples([], prompt_ids=[])]
    plan = plan_step([Samples([[1, 1, 0], [1, 1]], prompt_ids=["a", "b"]), *more], "prompt_mean", dp_group=None)
    head, *rows = cells(plan._repr_html_())
    assert head == ["micro-batch", "samples", "rollouts", "prompts", "tokens", "active", "first weights"]
    assert rows[0] == ["0", "2", "2", "2", "5", "4", "0.1667 0.1667 0.25 0.25"]
    assert rows[1:] == [["1", "1", "1", "1", "1", "1", "0.1667"], ["2", "0", "0", "0", "0", "0", ""]]
    assert plan.describe() in plan._repr_html_()
    nine = plan_step([Samples([[1]]) for _ in range(9)], "token_mean", dp_group=None)
    assert [row[0] for row in cells(nine._repr_html_())[1:]] == [*"01234567", "and 1 more"]
    assert not plan.record.use.is_used  # to look at a plan is not to train on it
    assert len(cells(Plan(None, plan.record)._repr_html_())) == 1


@pytest.mark.parametrize("tokens", ["a", ["a"], [None]])
def test_tokens_that_are_no_numbers_are_refused(tokens: Any) -> None:
    with pytest.raises(TypeError, match="they must be numbers"):
        Samples([[1]], tokens=tokens)
