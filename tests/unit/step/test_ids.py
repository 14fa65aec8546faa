"""Ids of rollouts and prompts: which may be used, and that they do nothing but group."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from refusals import Call, check_refusal, each_of, refusals
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

of_one = partial(Samples, [torch.ones(1)])
REFUSALS = {
    **refusals(
        of_one,
        ({"rollout_ids": []}, "0 rollout_ids for 1 loss masks", {"rollout_ids": [0]}),
        ({"prompt_ids": [0, 1]}, "2 prompt_ids for 1 loss masks", {"prompt_ids": [0]}),
        ({"prompt_ids": [2**61]}, "beyond 61 bits", {"prompt_ids": [2**61 - 1]}),
        ({"rollout_ids": [-(2**61)]}, "beyond 61 bits", {"rollout_ids": [1 - 2**61]}),
        ({"rollout_ids": [2**70]}, "Pass them as strings", {"rollout_ids": [str(2**70)]}),
    ),
    **refusals(
        of_one,
        ({"prompt_ids": [0.0]}, r"prompt_ids holds 0.0 \(float\)", {"prompt_ids": ["0.0"]}),
        ({"rollout_ids": torch.tensor([1.0])}, "rollout_ids holds 1.0", {"rollout_ids": torch.tensor([1])}),
        ({"rollout_ids": torch.tensor([[1]])}, r"holds \[1\] \(list\)", {"rollout_ids": torch.tensor([1])}),
        ({"prompt_ids": [True]}, "holds True", {"prompt_ids": [1]}),
        ({"prompt_ids": [None]}, "holds None", {"prompt_ids": None}),
        ({"prompt_ids": [b"a"]}, r"b'a' \(bytes\)", {"prompt_ids": ["a"]}),
        ({"prompt_ids": "a"}, "prompt_ids is 'a': there must be one id per sample", {"prompt_ids": ["\ud800"]}),
        ({"prompt_ids": {1}}, "prompt_ids is {1}", {"prompt_ids": (1,)}),
        ({"rollout_ids": 1}, "rollout_ids is 1", {"rollout_ids": [1]}),
        ({"rollout_ids": torch.tensor(1)}, r"rollout_ids is tensor\(1\)", {"rollout_ids": [1]}),
        error=TypeError,
    ),
    **refusals(
        partial(Samples, [torch.ones(1)] * 2),
        (
            {"prompt_ids": [0, "0"]},
            "prompt_ids holds 0 and '0': an int and its string are two ids",
            {"prompt_ids": [0, "1"]},
        ),
    ),
}


@each_of(REFUSALS)
def test_refusals(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    check_refusal(refused, error, text, accepted)
