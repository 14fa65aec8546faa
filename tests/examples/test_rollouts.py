"""The example's JSONL reader, its advantages and its packing; and the tool that writes such files."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import make_rollouts
import pytest
from pages import code_under
from repository import EXAMPLES
from rollouts import Rollout, balance, make_pack, packs_of_rank, read_rollouts, write_rollouts

GOOD: dict[str, Any] = {
    "prompt_tokens": [1, 2],
    "response_tokens": [3, 4, 0],
    "loss_mask": [1, 0.5, 0],
    "reward": 1.0,
    "prompt_id": "p",
    "rollout_id": "p/0",
}


def written(path: Path, *records: Any) -> Path:
    path = path / "rollouts.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


BAD_LINES = {
    "not json": ("{", "not JSON"),
    "not an object": ("[1]", "a list, not an object"),
    "missing key": ({k: v for k, v in GOOD.items() if k != "reward"}, r"missing keys \['reward'\]"),
    "unknown key": (GOOD | {"rewrad": 1}, r"unknown keys \['rewrad'\]"),
    "empty prompt": (GOOD | {"prompt_tokens": []}, "prompt_tokens must be a list of one or more"),
    "empty response": (
        GOOD | {"response_tokens": [], "loss_mask": []},
        "response_tokens must be a list of one or more",
    ),
    "token beyond the vocabulary": (GOOD | {"response_tokens": [3, 32, 0]}, r"ints in \[0, 32\)"),
    "token as bool": (GOOD | {"prompt_tokens": [True]}, "prompt_tokens must be"),
    "short mask": (GOOD | {"loss_mask": [1, 1]}, "loss_mask has 2 entries for 3 response tokens"),
    "negative mask": (GOOD | {"loss_mask": [1, -1, 0]}, "negative entry"),
    "NaN mask": (GOOD | {"loss_mask": [1, float("nan"), 0]}, "loss_mask must be a list of finite numbers"),
    "infinite reward": (GOOD | {"reward": float("inf")}, "reward is inf"),
    "reward as bool": (GOOD | {"reward": True}, "reward is True"),
    "id as null": (GOOD | {"rollout_id": None}, "rollout_id is None"),
    "short old log-probs": (GOOD | {"old_log_probs": [-1]}, "old_log_probs has 1 entries"),
    "short rollout log-probs": (GOOD | {"rollout_log_probs": [-1]}, "rollout_log_probs has 1 entries"),
    "short likeliest ids": (GOOD | {"top_log_probs": [{"3": -0.1}]}, "top_log_probs has 1 entries"),
    "likeliest texts": (GOOD | {"top_log_probs": [{"a": -0.1}] * 3}, "a text names no id.*Ask the engine for ids"),
    "likeliest id beyond the vocabulary": (GOOD | {"top_log_probs": [[[-0.1, 32]]] * 3}, r"not in \[0, 32\)"),
    "positive old log-prob": (GOOD | {"old_log_probs": [-1, 0.5, -1]}, "above 0"),
}


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_bad_line_is_named(tmp_path: Path, line: Any, reason: str) -> None:
    path = written(tmp_path, GOOD, "", line)
    with pytest.raises(ValueError, match=rf"rollouts\.jsonl, line 3: .*{reason}"):
        read_rollouts(path, vocab_size=32)


@pytest.mark.parametrize("change", [{"prompt_id": "q"}, {"reward": 0.0}])
def test_parts_of_a_rollout_must_agree(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"line 2: rollout_id 'p/0' came before"):
        read_rollouts(written(tmp_path, GOOD, GOOD | change), vocab_size=32)
    assert len(read_rollouts(written(tmp_path, GOOD, GOOD), vocab_size=32)) == 2


def test_old_log_probs_are_all_or_none(tmp_path: Path) -> None:
    with_log_probs = GOOD | {"old_log_probs": [-1, -2, 0], "rollout_id": "p/1"}
    with pytest.raises(ValueError, match="line 2: old_log_probs must be on all lines or on none"):
        read_rollouts(written(tmp_path, GOOD, with_log_probs), vocab_size=32)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no rollouts in the file"):
        read_rollouts(written(tmp_path, "", ""), vocab_size=32)


def test_a_split_rollout_counts_once_in_its_group(tmp_path: Path) -> None:
    winner = [GOOD | {"rollout_id": "w"}] * 3
    loser = GOOD | {"rollout_id": "l", "reward": 0.0}
    rollouts = read_rollouts(written(tmp_path, *winner, loser), vocab_size=32, normalize_by_std=False)
    assert [rollout.advantage for rollout in rollouts] == [0.5, 0.5, 0.5, -0.5]


def rollout(prompt: int, response: int, mask: list[float], **fields: Any) -> Rollout:
    """Tokens 1, 2, 3, ... so that every token says its place."""
    tokens = list(range(1, prompt + response + 1))
    ids: Any = {"prompt_id": "p", "rollout_id": "r", "reward": 0.0} | fields
    return Rollout(tokens[:prompt], tokens[prompt:], mask, **ids)


def test_a_pack_is_aligned_with_the_labels() -> None:
    first = rollout(2, 3, [1, 0, 0.5], advantage=2.0, old_log_probs=[-1.0, -2.0, -3.0])
    second = rollout(1, 1, [1], advantage=-1.0, old_log_probs=[-4.0])
    pack = make_pack([first, second], seq_length=12, slot_multiple=4)
    # Input t predicts token t + 1; the first response token is predicted by the last of the prompt.
    assert pack.tokens.tolist() == [1, 2, 3, 4, 1, 0, 0, 0, 0, 0, 0, 0]
    assert pack.labels.tolist() == [2, 3, 4, 5, 2, 0, 0, 0, 0, 0, 0, 0]
    assert pack.position_ids.tolist() == [0, 1, 2, 3] * 3
    assert [mask.tolist() for mask in pack.samples.loss_masks] == [[0, 1, 0, 0.5], [1]]
    assert pack.advantages.tolist() == [2, 2, 2, 2, -1, 0, 0, 0, 0, 0, 0, 0]
    assert pack.old_log_probs is not None
    assert pack.old_log_probs.tolist() == [0, -1, -2, -3, -4, 0, 0, 0, 0, 0, 0, 0]
    assert pack.cu_seqlens.tolist() == [0, 4, 8, 12]


@pytest.mark.parametrize("num_rollouts", [0, 1, 3, 4])
def test_filler_is_no_sample(num_rollouts: int) -> None:
    pack = make_pack([rollout(1, 4, [1, 1, 1, 1])] * num_rollouts, seq_length=16, slot_multiple=4)
    assert len(pack.samples) == num_rollouts
    assert len(pack.samples.local(0, 1)) == 16
    assert pack.cu_seqlens.tolist() == sorted({*range(0, 4 * num_rollouts + 1, 4), 16})


def test_rollouts_are_dealt_evenly_and_all_once() -> None:
    rollouts = [rollout(1, n, [1] * n, rollout_id=n) for n in (9, 8, 7, 6, 5, 4, 3, 2)]
    packs = balance(rollouts, 2, seq_length=32, slot_multiple=1)
    assert sorted(r.rollout_id for pack in packs for r in pack) == list(range(2, 10))
    assert [sum(r.num_inputs for r in pack) for pack in packs] == [22, 22]
    with pytest.raises(ValueError, match=r"8 rollouts do not fit into 2 packs of 21 tokens.*--seq-length"):
        balance(rollouts, 2, seq_length=21, slot_multiple=1)


def test_more_prompts_than_the_file_has_are_refused() -> None:
    sizes = {"prompts_per_step": 2, "packs_per_step": 1, "seq_length": 8, "slot_multiple": 2}
    with pytest.raises(ValueError, match="the file has only 1 prompts"):
        next(packs_of_rank([rollout(1, 1, [1])], dp_rank=0, dp_size=1, **sizes))


# ---- tools/make_rollouts.py


def test_the_committed_file_is_what_the_tool_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "arithmetic.jsonl"
    monkeypatch.setattr(sys, "argv", ["make_rollouts.py", "--output", str(output)])
    make_rollouts.main()
    assert output.read_text() == (EXAMPLES / "arithmetic.jsonl").read_text()


def decoded(tokens: list[int]) -> str:
    return "".join("" if token == make_rollouts.END else make_rollouts.CHARACTERS[token - 1] for token in tokens)


def test_rewards_are_those_of_a_verifier() -> None:
    rollouts = read_rollouts(EXAMPLES / "arithmetic.jsonl", vocab_size=32)
    for rollout in rollouts:
        a, b = decoded(rollout.prompt_tokens).removesuffix("=").split("+")
        ended = rollout.response_tokens[-1] == make_rollouts.END
        assert rollout.reward == (ended and decoded(rollout.response_tokens).rpartition("=")[2] == str(int(a) + int(b)))
        assert ended or not any(rollout.loss_mask), "cut off responses are fully masked"
    assert 0.3 < sum(rollout.reward for rollout in rollouts) / len(rollouts) < 0.9
    assert len({len(rollout.response_tokens) for rollout in rollouts}) > 20, "ragged"
    assert any(0 < sum(rollout.loss_mask) < len(rollout.loss_mask) for rollout in rollouts), (
        "what the calculator wrote is masked"
    )


def test_the_samplers_log_probs_are_read_as_engines_write_them_and_packed(tmp_path: Path) -> None:
    """vLLM's, SGLang's and NeMo-Gym's forms, fewer ids at some tokens; written and read again they are the same."""
    forms = [
        {"rollout_log_probs": [-0.5, -1.0, -2.0], "top_log_probs": [{"3": {"logprob": -0.5}, "9": -2.0}] * 3},
        {"generation_log_probs": [-0.5, -1.0, -2.0], "top_log_probs": [[[-2.0, 9, None], [-0.5, 3, None]]] * 3},
        {"rollout_log_probs": [[-0.5, 3, "x"], [-1.0, 4, None], [-2.0, 0, None]], "top_log_probs": [{"3": -0.5}] * 3},
    ]
    records = [GOOD | {"rollout_id": f"p/{i}", "reward": i} | form for i, form in enumerate(forms)]
    rollouts = read_rollouts(written(tmp_path, *records), vocab_size=32)
    assert [rollout.rollout_log_probs for rollout in rollouts] == [[-0.5, -1.0, -2.0]] * 3
    assert rollouts[0].top_log_probs == rollouts[1].top_log_probs == [[(-0.5, 3), (-2.0, 9)]] * 3
    write_rollouts(tmp_path / "again.jsonl", rollouts)
    assert read_rollouts(tmp_path / "again.jsonl", vocab_size=32) == rollouts
    pack = make_pack(rollouts, seq_length=16, slot_multiple=4)
    assert pack.top_ids is not None
    assert pack.top_log_probs is not None
    assert pack.rollout_log_probs is not None
    assert pack.rollout_log_probs[:5].tolist() == [0, -0.5, -1.0, -2.0, 0]
    assert pack.top_ids[[1, 9]].tolist() == [[3, 9], [3, 0]]
    assert pack.top_log_probs[[0, 1, 9]].tolist() == [[-math.inf] * 2, [-0.5, -2.0], [-0.5, -math.inf]]
    assert make_pack([], seq_length=16, slot_multiple=4).top_ids is None
    lacking = GOOD | {"rollout_id": "b", "rollout_log_probs": [-1] * 3}
    with pytest.raises(ValueError, match="line 2: top_log_probs must be on all lines or on none"):
        read_rollouts(written(tmp_path, records[0], lacking), vocab_size=32)


ANSWERED: dict[str, Any] = {
    "slime": [[(-2.0, 9, None), (-0.5, 3, None)], [(-0.5, 3, None)], [(-0.25, 1, None), (-2.0, 9, None)]],
    "verl, SkyRL": [
        {3: SimpleNamespace(logprob=-0.5), 9: SimpleNamespace(logprob=-2.0)},
        {3: SimpleNamespace(logprob=-0.5)},
        {9: SimpleNamespace(logprob=-2.0), 1: SimpleNamespace(logprob=-0.25)},
    ],
}


@pytest.mark.parametrize("engine", ANSWERED)
def test_the_pages_lines_read_what_an_engine_answers(engine: str, tmp_path: Path) -> None:
    sampled = [(-0.5, 3, None), (-1.0, 4, None), (-0.25, 1, None)] if engine == "slime" else [-0.5, -1.0, -0.25]
    names: dict[str, Any] = {"answered": ANSWERED[engine], "token_log_probs": sampled}
    exec(code_under("losses.md", "The likeliest ids of an engine"), names)
    assert names["rollout_ids"].tolist() == [[3, 9], [3, 0], [1, 9]]
    assert names["rollout_log_probs"].tolist() == [[-0.5, -2.0], [-0.5, -math.inf], [-0.25, -2.0]]
    record = GOOD | {"top_log_probs": names["pairs"], "rollout_log_probs": names["sampled"]}
    rollout, _ = read_rollouts(written(tmp_path, record, record | {"rollout_id": "p/1", "reward": 0}), vocab_size=32)
    assert rollout.top_log_probs == names["pairs"] == [[(-0.5, 3), (-2.0, 9)], [(-0.5, 3)], [(-0.25, 1), (-2.0, 9)]]
    assert rollout.rollout_log_probs == [-0.5, -1.0, -0.25]
