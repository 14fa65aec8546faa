"""Log-probs as rollout engines write them, read into the columns of score centering."""

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refusal_tests, refusals

from megatron_rl_loss.losses.sampler_columns import ids_and_log_probs, likeliest_ids, sampled_log_probs

RIGHT = [[(-0.1, 7), (-3.0, 2)], [(-0.5, 4)]]
LIKELIEST: dict[str, Any] = {
    "SGLang": [[(-0.1, 7, None), (-3.0, 2, "the")], [(-0.5, 4, None)]],
    "SGLang's JSON": json.loads("[[[-0.1, 7, null], [-3.0, 2, null]], [[-0.5, 4, null]]]"),
    "vLLM": [{2: SimpleNamespace(logprob=-3.0), 7: SimpleNamespace(logprob=-0.1)}, {4: SimpleNamespace(logprob=-0.5)}],
    "vLLM's JSON": json.loads('[{"7": {"logprob": -0.1}, "2": {"logprob": -3.0}}, {"4": {"logprob": -0.5}}]'),
    "numbers by id": [{7: -0.1, 2: -3.0}, {4: -0.5}],
    "OpenAI's, with ids": [
        [{"token": "token_id:7", "logprob": -0.1}, {"token": "token_id:2", "logprob": -3.0}],
        [{"token": "token_id:4", "logprob": -0.5}],
    ],
    "the sampled token twice": [[(-0.1, 7), (-3.0, 2), (-0.1, 7)], [(-0.5, 4)]],
}  # fmt: skip


@pytest.mark.parametrize("column", LIKELIEST.values(), ids=LIKELIEST)
def test_likeliest_ids(column: Any) -> None:
    pairs = likeliest_ids(column)
    assert pairs == RIGHT
    assert likeliest_ids(json.loads(json.dumps(pairs))) == RIGHT
    ids, log_probs = ids_and_log_probs(pairs)
    assert (ids.tolist(), ids.dtype) == ([[7, 2], [4, 0]], torch.int64)
    assert log_probs.tolist() == [pytest.approx([-0.1, -3.0]), [-0.5, -math.inf]]
    assert [column.shape for column in ids_and_log_probs(pairs, most=1)] == [(2, 1)] * 2
    assert [column.shape for column in ids_and_log_probs([])] == [(0, 1)] * 2


def test_sampled_log_probs() -> None:
    assert sampled_log_probs([-0.5, 0, -9999.0]) == [-0.5, 0.0, -math.inf]  # NeMo-Gym's and vLLM's floor
    assert sampled_log_probs([(-0.5, 3, None), [-1, 4, "a"]]) == [-0.5, -1.0]


REFUSALS = {
    **refusals(
        likeliest_ids,
        (([{" the": -0.1}],), "the token ' the' among the likeliest of token 0: a text names no id", ([{5: -0.1}],)),
        (([[{"token": "a", "logprob": -1}]],), "return_tokens_as_token_ids", ([[{"token": "5", "logprob": -1}]],)),
        (([-0.1],), "likeliest ids of token 0 as '-0.1'", ([[(-0.1, 3)]],)),
        (([[-0.1, -0.2]],), "likeliest ids of token 0", ([[[-0.1, 2]]],)),
        (([None],), r"Convert them to \[\[log-prob, id\]", ([[]],)),
        (([{5: 0.4}],), "a log-prob of 0.4 at token 0", ([{5: -0.4}],)),
    ),
    **refusals(
        sampled_log_probs,
        (([-0.1, None],), "a log-prob of None at token 1: .*prompt's first token", ([-0.1, -0.2],)),
        (([{"logprob": -0.1}],), "it must be a number, at most 0", ([-0.1],)),
        (([0.7],), "a log-prob of 0.7", ([math.log(0.7)],)),
    ),
}
test_refusals = refusal_tests(REFUSALS)
