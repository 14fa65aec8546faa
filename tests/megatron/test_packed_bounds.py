"""The layout's slots are compared with those that Megatron's `PackedSeqParams` in the batch would cut."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_rl_loss import Samples, ZigzagTHD
from megatron_rl_loss.megatron.lookahead import check_packed_bounds


def packed(*bounds: int, padded: bool = True, device: str = "cpu") -> PackedSeqParams:
    cu = torch.tensor(bounds, dtype=torch.int32, device=device)
    more = {"cu_seqlens_q_padded": cu, "cu_seqlens_kv_padded": cu} if padded else {}
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu if not padded else cu - cu % 2, **more)


#: Two samples of 8 slots' tokens each, and 4 tokens of padding as a slot of their own.
SAMPLES = Samples([[1] * 8, [1] * 8], layout=ZigzagTHD([0, 8, 16, 20], filler_slots=1))


@pytest.mark.parametrize(
    "batch",
    [
        {"packed": packed(0, 8, 20)},
        SimpleNamespace(params=packed(0, 8, 20)),
        {"packed": packed(0, 8, 20, padded=False)},
    ],
    ids=["dict", "object", "unpadded"],
)
def test_padding_that_the_model_cuts_with_a_sample_is_no_dummy_sequence(batch: Any) -> None:
    rule = r"micro-batch 3: the model's packed bounds have \[\], and the layout's \[16\] in their place"
    with pytest.raises(ValueError, match=rule):
        check_packed_bounds(3, batch, SAMPLES, 2)
    check_packed_bounds(3, batch, SAMPLES, 1)  # nothing is cut


@pytest.mark.parametrize(
    "batch",
    [
        {"packed": packed(0, 8, 16, 20)},
        {"packed": packed(0, 8, 8, 16, 20, 20)},  # empty slots
        {"packed": packed(0, 8, 20, device="meta")},  # of a device nothing is read
        {"tokens": torch.zeros(3)},
        None,
    ],
    ids=["equal", "empty slots", "on a device", "no bounds", "nothing"],
)
def test_what_agrees_or_cannot_be_read_passes(batch: Any) -> None:
    check_packed_bounds(0, batch, SAMPLES, 2)
