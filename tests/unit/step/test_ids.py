"""Ids of rollouts and prompts: which may be used, and that they do nothing but group."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from refusals import Call, Refusal, check_refusal, each_of
from steps import Step, assert_equals_oracle, quick, run_step, steps

from megatron_rl_loss import Samples
from megatron_rl_loss.step.ids import as_ids

#: hashlib.blake2b(text.encode(), digest_size=8).hexdigest() of "prompt/0", "" and "é"
DIGESTS = ("8310b148311e9803", "e4a6a0577479b2b4", "cb1abf8beff3192f")
#: and of "step 7/prompt 999/rollout 99"
LAST_DIGEST = "da9cc41f87fafb29"


def test_ints_stay_and_strings_are_hashed_alike_everywhere() -> None:
    """Ranks hash apart from each other: the numbers are part of what they agree on."""
    assert as_ids("ids", [3, -5, 2**61 - 1], 3).tolist() == [3, -5, 2**61 - 1]
    hashed = as_ids("ids", ["prompt/0", "", "é"], 3)
    assert hashed.tolist() == [int.from_bytes(bytes.fromhex(one), "little") % 2**61 for one in DIGESTS]
    assert hashed.dtype == torch.int64
    assert hashed.device.type == "cpu"


def test_many_strings_stay_apart() -> None:
    """1e5 of them meet in 32 bits about once, in 16 bits nearly always; in 61 bits once in 1e8 such steps."""
    names = [f"step 7/prompt {i % 1000}/rollout {i // 1000}" for i in range(100_000)]
    hashed = as_ids("ids", names, len(names))
    assert len(hashed.unique()) == len(names)
    assert int(hashed[-1]) == int.from_bytes(bytes.fromhex(LAST_DIGEST), "little") % 2**61
    for bits in (16, 32):  # negative control: fewer bits would have joined some of these
        for part in (hashed % 2**bits, hashed >> (61 - bits)):
            assert len(part.unique()) < len(names)


@pytest.mark.parametrize(
    "ids", [[1, 2], (1, 2), range(1, 3), torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.uint8)], ids=type
)
def test_any_sequence_of_ints(ids: Any) -> None:
    assert as_ids("ids", ids, 2).tolist() == [1, 2]


def test_a_string_is_not_its_number() -> None:
    assert as_ids("ids", ["1"], 1).tolist() != [1]


@pytest.mark.parametrize(
    "rename",
    [str, lambda i: f"rollout/{i}", lambda i: i - 5, lambda i: i * 2**55],
    ids=["str", "path", "shift", "large"],
)
@quick
@given(step=steps())
def test_ids_only_group(rename: Callable[[int], int | str], step: Step) -> None:
    """Any ids that group alike give the same loss."""
    number = {key: i for i, key in enumerate(dict.fromkeys(one.prompt_id for one in step.samples))}
    rollout = {key: i for i, key in enumerate(dict.fromkeys(one.rollout_id for one in step.samples))}
    renamed = [
        replace(
            one,
            prompt_id=rename(number[one.prompt_id]),
            rollout_id=None if one.rollout_id is None else rename(rollout[one.rollout_id]),
        )
        for one in step.samples
    ]
    for mode in ("sample_mean", "prompt_mean"):
        assert_equals_oracle(run_step(renamed, step.microbatches, mode), step.samples, mode)


# --- refusals, each beside its nearest legal neighbour

ONE, TWO = torch.ones(1), torch.ones(2)


def of_masks(*masks: Any, **keywords: Any) -> Call:
    return lambda: Samples(list(masks), **keywords)


REFUSALS: dict[str, Refusal] = {
    "too few ids": (
        of_masks(ONE, TWO, rollout_ids=[0]),
        ValueError,
        "1 rollout_ids for 2 loss masks",
        of_masks(ONE, TWO, rollout_ids=[0, 0]),
    ),
    "too many ids": (
        of_masks(ONE, prompt_ids=[0, 1]),
        ValueError,
        "2 prompt_ids for 1 loss masks",
        of_masks(ONE, prompt_ids=[0]),
    ),
    "ids for no sample": (of_masks(prompt_ids=[0]), ValueError, "1 prompt_ids for 0", of_masks(prompt_ids=[])),
    "float id": (
        of_masks(ONE, prompt_ids=[0.0]),
        TypeError,
        r"prompt_ids holds 0.0 \(float\)",
        of_masks(ONE, prompt_ids=["0.0"]),
    ),
    "float tensor of ids": (
        of_masks(ONE, rollout_ids=torch.tensor([1.0])),
        TypeError,
        "rollout_ids holds 1.0",
        of_masks(ONE, rollout_ids=torch.tensor([1])),
    ),
    "2-D tensor of ids": (
        of_masks(ONE, rollout_ids=torch.tensor([[1]])),
        TypeError,
        r"holds \[1\] \(list\)",
        of_masks(ONE, rollout_ids=torch.tensor([1])),
    ),
    "bool id": (of_masks(ONE, prompt_ids=[True]), TypeError, "holds True", of_masks(ONE, prompt_ids=[1])),
    "None as an id": (of_masks(ONE, prompt_ids=[None]), TypeError, "holds None", of_masks(ONE, prompt_ids=None)),
    "bytes id": (of_masks(ONE, prompt_ids=[b"a"]), TypeError, r"b'a' \(bytes\)", of_masks(ONE, prompt_ids=["a"])),
    "id too large": (
        of_masks(ONE, prompt_ids=[2**61]),
        ValueError,
        "beyond 61 bits",
        of_masks(ONE, prompt_ids=[2**61 - 1]),
    ),
    "id too small": (
        of_masks(ONE, rollout_ids=[-(2**61)]),
        ValueError,
        "beyond 61 bits",
        of_masks(ONE, rollout_ids=[1 - 2**61]),
    ),
    "id beyond int64": (
        of_masks(ONE, rollout_ids=[2**70]),
        ValueError,
        "Pass them as strings",
        of_masks(ONE, rollout_ids=[str(2**70)]),
    ),
}


@each_of(REFUSALS)
def test_refusals(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    check_refusal(refused, error, text, accepted)
