"""Ids of rollouts and prompts: which may be used. That they do nothing but group: `steps.steps` draws them."""

from functools import partial
from typing import Any

import pytest
import torch
from refusals import refusal_tests, refusals

from megatron_rl_loss import Samples
from megatron_rl_loss.step.ids import as_ids

#: hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
DIGESTS = {"prompt/0": "8310b148311e9803", "": "e4a6a0577479b2b4", "é": "cb1abf8beff3192f"}


def test_ints_stay_and_strings_are_hashed_alike_everywhere() -> None:
    """Ranks hash apart from each other: the numbers are part of what they agree on. 61 bits join none."""
    assert as_ids("ids", [3, -5, 2**61 - 1], 3).tolist() == [3, -5, 2**61 - 1]
    hashed = as_ids("ids", list(DIGESTS), 3)
    assert hashed.tolist() == [int.from_bytes(bytes.fromhex(one), "little") % 2**61 for one in DIGESTS.values()]
    assert (hashed.dtype, hashed.device.type) == (torch.int64, "cpu")


@pytest.mark.parametrize("ids", [(1, 2), range(1, 3), torch.tensor([1, 2]), torch.tensor([1, 2]).byte()], ids=type)
def test_any_sequence_of_ints(ids: Any) -> None:
    assert as_ids("ids", ids, 2).tolist() == [1, 2]


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


test_refusals = refusal_tests(REFUSALS)
