"""Wrong uses of samples, masks and ids that once passed in silence, or with an error of torch or NumPy."""

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refusal_tests, refusals

from megatron_rl_loss import Metric, Samples, ZigzagTHD, group_relative_advantages, plan_step
from megatron_rl_loss.core.samples import UnreadMasks, read_masks

ONE, OTHER, EMPTY = Samples([[1, 1]]), Samples([[1, 1]]), Samples([])
IDS = [15496.0, 995.0, 11.0, 42.0, 7.0, 3.0, 9.0, 100.0, 257.0]
SLOTS = torch.tensor([0, 4, 4, 8], dtype=torch.int32)


def planned(*samples: Samples) -> Any:
    return plan_step(list(samples), "token_mean", dp_group=None)


def packed(masks: int, filler_slots: int) -> Samples:
    return Samples([[1] * 4] * masks, layout=ZigzagTHD(SLOTS, filler_slots=filler_slots))


REFUSALS = {
    **refusals(
        planned,
        ((ONE, ONE), "micro-batches 0 and 1 are one Samples object: its samples would count twice", (ONE, OTHER)),
        ((EMPTY, ONE, OTHER, ONE), "micro-batches 1 and 3 are one", (EMPTY, ONE, EMPTY, OTHER)),
    ),
    **refusals(
        lambda ids: Samples([[1], [1], [1]], prompt_ids=ids),
        (([0, "a", 1],), "prompt_ids mix strings and ints, 'a' and 0", (["0", "a", "1"],)),
        (([0, "0", 0],), r"'0'", (["0", "0", "0"],)),
    ),
    **refusals(
        lambda rows: Samples([[1, 1], [1, 1]], ids={"turn": rows}),
        (([[0, "a"], [1, 1]],), r"ids\['turn'\] mix strings and ints", ([["0", "a"], ["1", "1"]],)),
        (([["a", "a"], [-1, -1]],), "and \"\" for no unit", ([["a", "a"], ["b", "b"]],)),
    ),
    **refusals(
        lambda ids: group_relative_advantages([1.0, 0.0], ids),
        ((["p", 7],), "prompt_ids mix strings and ints, 'p' and 7", (["p", "7"],)),
    ),
    **refusals(
        packed,
        ((2, 1), "2 loss masks for 1 slots .*Empty slots are left out already: never count them", (2, 0)),
        ((1, 2), "never count them", (1, 1)),
    ),
    **refusals(
        lambda mask: planned(Samples([mask])),
        ((torch.ones(3, device="meta"),), r"of shape \(3,\) on the meta device: it must have values", (torch.ones(3),)),
    ),
    **refusals(
        lambda mask: Samples([mask]),
        ((torch.ones(3).to(torch.float8_e4m3fn),), "loss masks of torch.float8_e4m3fn", (torch.ones(3).half(),)),
        ((torch.ones(3).to(torch.float8_e5m2),), "Cast the masks, or pass 0/1", (torch.ones(3).bfloat16(),)),
        ((np.array(["1", "0"]),), "the loss mask of sample 0 is a ndarray", (np.array([1, 0]),)),
        (([[1], [1, 1]],), "the loss mask of sample 0 is a list", ([1, 1],)),
        (([torch.ones(2), torch.ones(1)],), "the loss mask of sample 0 is a list", ([torch.ones(()), torch.ones(())],)),
        (([None, 1],), "must hold one real number per token", ([0, 1],)),
        error=TypeError,
    ),
    **refusals(
        lambda mask: Samples([mask]),
        ((np.array([1, 2**32 - 1], np.uint32),), "holds 4294967295", (np.array([1, 0], np.uint32),)),
        ((torch.tensor([2], dtype=torch.uint16),), "holds 2.0", (torch.tensor([1], dtype=torch.uint16),)),
        ((np.array([-1.0], ">f8"),), "holds -1.0", (np.array([1.0], ">f8"),)),
        ((np.array([math.nan], np.longdouble),), "holds nan", (np.array([0.5], np.longdouble),)),
    ),
}  # fmt: skip
test_refusals = refusal_tests(REFUSALS)


@pytest.mark.parametrize(
    "masks",
    [
        [torch.ones(3, dtype=torch.uint16), torch.tensor([1, 0], dtype=torch.uint32)],
        [torch.ones(3, dtype=torch.uint64), torch.tensor([1, 0], dtype=torch.int8)],
        [np.ones(3, ">f4"), np.array([1, 0], ">i2")],
        [np.ones(3, np.longdouble), [1.0, 0.0]],
        [[torch.ones((), requires_grad=True)] * 3, [torch.tensor(1), torch.tensor(0)]],
        [[np.float64(1)] * 3, (True, False)],
    ],
    ids=["unsigned", "wide unsigned", "big-endian", "long double", "lists of tensors", "NumPy numbers"],
)
def test_masks_of_any_real_numbers(masks: Any) -> None:
    samples = Samples(masks)
    assert [mask.tolist() for mask in samples.loss_masks] == [[1, 1, 1], [1, 0]]
    assert samples.mask_sums.tolist() == [3, 1]


def test_token_ids_in_the_place_of_a_mask_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"sample 1 holds whole numbers up to 15496, of many values: they look like"):
        Samples([[1.0, 0.0], IDS])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Samples([[512.0] * 9, [0.5, *IDS], [float(k % 3) for k in range(200)]])  # weights


def late(*masks: Any) -> Samples:
    """As samples whose masks lie on a device, and are read before the step."""
    samples = Samples([[1] * len(mask) for mask in masks])
    samples._masks = UnreadMasks([torch.tensor(mask) for mask in masks])
    return samples


def test_an_error_of_a_late_mask_names_the_micro_batch() -> None:
    with pytest.raises(ValueError, match=r"^micro-batch 2: the loss mask of sample 1 holds -1.0"):
        read_masks([late([1.0]), late([0.5, 1.0]), late([1.0], [1.0, -1.0])])
    with pytest.raises(ValueError, match=r"^the loss mask of sample 0 holds 2.0"):
        late([2]).buffer  # noqa: B018


def test_a_metric_over_ids_in_a_step_without_a_sample_is_0() -> None:
    """As every other metric of such a step; with a sample that lacks the ids it is an error."""
    nothing = torch.zeros(0, requires_grad=True)
    for over in ("turn", "samples"):
        plan = plan_step([Samples([])], "token_mean", dp_group=None)
        *_, report = plan[0].loss(nothing, {"metric": Metric(nothing.detach(), over)}, form="3-tuple")
        assert plan.finish([report])["metric"] == 0
    plan = plan_step([Samples([[1]])], "token_mean", dp_group=None)
    with pytest.raises(ValueError, match="a metric over 'turn': there are no such units or ids"):
        plan[0].loss(torch.ones(1, requires_grad=True), {"metric": Metric(torch.ones(1), "turn")})
