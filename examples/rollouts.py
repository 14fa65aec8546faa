"""Rollouts: read them from JSONL, compute advantages, and pack the rollouts of a step for Megatron.

Each line of the file is a JSON object for one *sample* (a prompt and a response to it):

| key               | value                                                                                          |
|-------------------|------------------------------------------------------------------------------------------------|
| `prompt_tokens`   | token ids, at least one                                                                        |
| `response_tokens` | token ids, at least one                                                                        |
| `loss_mask`       | one weight >= 0 a response token: 0 does not count, 1 does, fractions are weights              |
| `reward`          | finite number; the same on all samples of a rollout                                            |
| `prompt_id`       | int or string; equal for all responses to a prompt                                             |
| `rollout_id`      | int or string, unique in the file but for samples that are parts of one rollout (agent turns)  |
| `old_log_probs`   | optional, on all lines or none: log-prob of each response token under the policy that drew it  |
| `rollout_log_probs` | optional, on all lines or none: the inference engine's, numbers or SGLang's tuples        |
| `top_log_probs`   | optional, on all lines or none: its likeliest ids at each response token, as of vLLM or SGLang |

NeMo-Gym's name for `rollout_log_probs`, `generation_log_probs`, is read too.
"""

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl_loss import Samples, ZigzagTHD, group_relative_advantages
from megatron_rl_loss.losses.sampler_columns import ids_and_log_probs, likeliest_ids, sampled_log_probs

_KEYS = {"prompt_tokens", "response_tokens", "loss_mask", "reward", "prompt_id", "rollout_id"}
_OPTIONAL_KEYS = {"old_log_probs", "rollout_log_probs", "top_log_probs"}
_OF_NEMO_GYM = "generation_log_probs"


@dataclass(frozen=True)
class Rollout:
    """One sample, ready to train on. `advantage` is that of its whole rollout.

    `top_log_probs` are pairs of log-prob and id, the likeliest first.
    """

    prompt_tokens: list[int]
    response_tokens: list[int]
    loss_mask: list[float]
    reward: float
    prompt_id: int | str
    rollout_id: int | str
    old_log_probs: list[float] | None = None
    rollout_log_probs: list[float] | None = None
    top_log_probs: list[list[tuple[float, int]]] | None = None
    advantage: float = 0.0

    @property
    def num_inputs(self) -> int:
        """Number of the model's input positions: every token but the last, each labelled with the next."""
        return len(self.prompt_tokens) + len(self.response_tokens) - 1


def read_rollouts(path: str | Path, *, vocab_size: int, normalize_by_std: bool = True) -> list[Rollout]:
    """Read and check a whole file, and compute group-relative advantages over its prompt groups.

    Raises ValueError with file, line number and reason for the first wrong line.
    """
    path = Path(path)
    rollouts: list[Rollout] = []
    first_of: dict[int | str, Rollout] = {}
    first_of_prompt: dict[int | str, Rollout] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            rollout = _parse(line, vocab_size)
            first = first_of.setdefault(rollout.rollout_id, rollout)
            _check_alike(rollout, first)
            if rollout is first:  # later parts of a split rollout may have a longer prompt
                _check_prompt(rollout, first_of_prompt.setdefault(rollout.prompt_id, rollout))
            rollouts.append(rollout)
            for key in sorted(_OPTIONAL_KEYS):
                if (getattr(rollout, key) is None) != (getattr(rollouts[0], key) is None):
                    raise ValueError(f"{key} must be on all lines or on none")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not rollouts:
        raise ValueError(f"{path}: no rollouts in the file. Write some with tools/make_rollouts.py.")
    return with_advantages(rollouts, normalize_by_std=normalize_by_std)


def _parse(line: str, vocab_size: int) -> Rollout:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, not an object")
    if _OF_NEMO_GYM in record and "rollout_log_probs" not in record:
        record["rollout_log_probs"] = record.pop(_OF_NEMO_GYM)
    missing, unknown = _KEYS - record.keys(), record.keys() - _KEYS - _OPTIONAL_KEYS
    if missing or unknown:
        raise ValueError(f"missing keys {sorted(missing)}, unknown keys {sorted(unknown)}")
    for key in ("prompt_tokens", "response_tokens"):
        tokens = record[key]
        if (
            not isinstance(tokens, list)
            or not tokens
            or not all(type(t) is int and 0 <= t < vocab_size for t in tokens)
        ):
            raise ValueError(f"{key} must be a list of one or more ints in [0, {vocab_size}), the vocabulary")
    if record.get("rollout_log_probs") is not None:
        record["rollout_log_probs"] = sampled_log_probs(record["rollout_log_probs"])
    if record.get("top_log_probs") is not None:
        record["top_log_probs"] = likeliest_ids(record["top_log_probs"])
        if any(token_id >= vocab_size for pairs in record["top_log_probs"] for _, token_id in pairs):
            raise ValueError(f"top_log_probs has an id that is not in [0, {vocab_size}), the vocabulary")
    length = len(record["response_tokens"])
    for key in ("rollout_log_probs", "top_log_probs"):
        if record.get(key) is not None and len(record[key]) != length:
            raise ValueError(f"{key} has {len(record[key])} entries for {length} response tokens")
    for key in ("loss_mask", "old_log_probs"):
        if record.get(key) is None and key in _OPTIONAL_KEYS:
            continue
        values = record[key]
        if not isinstance(values, list) or not all(_is_number(value) for value in values):
            raise ValueError(f"{key} must be a list of finite numbers")
        if len(values) != length:
            raise ValueError(f"{key} has {len(values)} entries for {length} response tokens")
    if min(record["loss_mask"]) < 0:
        raise ValueError("loss_mask has a negative entry; weights must be >= 0")
    if record.get("old_log_probs") and max(record["old_log_probs"]) > 0:
        raise ValueError("old_log_probs has an entry above 0, which no log-probability is")
    if not _is_number(record["reward"]):
        raise ValueError(f"reward is {record['reward']!r}; it must be a finite number")
    for key in ("prompt_id", "rollout_id"):
        if type(record[key]) not in (int, str):
            raise ValueError(f"{key} is {record[key]!r}; it must be an int or a string")
    return Rollout(**record)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _check_alike(rollout: Rollout, first: Rollout) -> None:
    """Check that two samples of one rollout agree."""
    if (rollout.prompt_id, rollout.reward) != (first.prompt_id, first.reward):
        raise ValueError(f"rollout_id {rollout.rollout_id!r} came before with another prompt_id or reward")


def _check_prompt(rollout: Rollout, first: Rollout) -> None:
    """Check that two rollouts of one prompt group agree."""
    if rollout.prompt_tokens != first.prompt_tokens:
        raise ValueError(f"prompt_id {rollout.prompt_id!r} came before with other prompt_tokens")


def write_rollouts(path: Path, rollouts: Sequence[Rollout]) -> None:
    """Write the format that `read_rollouts` reads, without advantages."""
    records = [{name: value for name, value in vars(rollout).items() if name != "advantage"} for rollout in rollouts]
    path.write_text("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records), encoding="utf-8")


def with_advantages(rollouts: Sequence[Rollout], *, normalize_by_std: bool = True) -> list[Rollout]:
    """Group-relative advantages. A rollout counts once in its group, however many samples it was split into."""
    by_rollout = {rollout.rollout_id: rollout for rollout in rollouts}
    advantages = group_relative_advantages(
        torch.tensor([rollout.reward for rollout in by_rollout.values()], dtype=torch.float64),
        [rollout.prompt_id for rollout in by_rollout.values()],
        normalize_by_std=normalize_by_std,
        dp_group=None,  # every rank reads all rollouts
    )
    by_id = dict(zip(by_rollout, advantages.tolist(), strict=True))
    return [replace(rollout, advantage=by_id[rollout.rollout_id]) for rollout in rollouts]


@dataclass(frozen=True)
class Pack:
    """One micro-batch: rollouts in the padded slots of one sequence of fixed length, not yet cut for a CP rank.

    Tensors are [seq_length], of the likeliest ids [seq_length, K]; position t holds input token t, and all values of
    the token that it predicts, t + 1. `cu_seqlens` are the bounds of the slots, int32.
    """

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    advantages: Tensor
    old_log_probs: Tensor | None
    rollout_log_probs: Tensor | None
    top_ids: Tensor | None
    top_log_probs: Tensor | None
    cu_seqlens: Tensor
    samples: Samples


def make_pack(rollouts: list[Rollout], *, seq_length: int, slot_multiple: int) -> Pack:
    """Lay `rollouts` end to end, each padded to a multiple of `slot_multiple`, the rest of the sequence as filler."""
    cu_seqlens, masks = [0], []
    tokens = torch.zeros(seq_length, dtype=torch.int64)
    labels, position_ids = torch.zeros_like(tokens), torch.zeros_like(tokens)
    advantages, old_log_probs, rollout_log_probs = torch.zeros(3, seq_length)
    most = max((len(pairs) for rollout in rollouts for pairs in rollout.top_log_probs or ()), default=1)
    top_ids, top_log_probs = torch.zeros(seq_length, most).long(), torch.full((seq_length, most), -math.inf)
    for rollout in rollouts:
        start, n = cu_seqlens[-1], rollout.num_inputs
        end = start + _padded(n, slot_multiple)
        sequence = torch.tensor(rollout.prompt_tokens + rollout.response_tokens)
        tokens[start : start + n], labels[start : start + n] = sequence[:-1], sequence[1:]
        first_response = len(rollout.prompt_tokens) - 1
        mask = torch.zeros(n)
        mask[first_response:] = torch.tensor(rollout.loss_mask)
        masks.append(mask)
        advantages[start : start + n] = rollout.advantage
        if rollout.old_log_probs is not None:
            old_log_probs[start + first_response : start + n] = torch.tensor(rollout.old_log_probs)
        if rollout.rollout_log_probs is not None:
            rollout_log_probs[start + first_response : start + n] = torch.tensor(rollout.rollout_log_probs)
        if rollout.top_log_probs is not None:
            ids, log_probs = ids_and_log_probs(rollout.top_log_probs)
            at = slice(start + first_response, start + n), slice(ids.shape[1])
            top_ids[at], top_log_probs[at] = ids, log_probs
        cu_seqlens.append(end)
    filler_slots = int(cu_seqlens[-1] < seq_length)
    if filler_slots:
        cu_seqlens.append(seq_length)
    for start, end in itertools.pairwise(cu_seqlens):
        position_ids[start:end] = torch.arange(end - start)
    cu = torch.tensor(cu_seqlens, dtype=torch.int32)
    return Pack(
        tokens=tokens,
        labels=labels,
        position_ids=position_ids,
        advantages=advantages,
        old_log_probs=old_log_probs if rollouts and rollouts[0].old_log_probs is not None else None,
        rollout_log_probs=rollout_log_probs if rollouts and rollouts[0].rollout_log_probs is not None else None,
        top_ids=top_ids if rollouts and rollouts[0].top_log_probs is not None else None,
        top_log_probs=top_log_probs if rollouts and rollouts[0].top_log_probs is not None else None,
        cu_seqlens=cu,
        samples=Samples(
            masks,
            layout=ZigzagTHD(cu, total_lengths=[rollout.num_inputs for rollout in rollouts], filler_slots=filler_slots),
            rollout_ids=[rollout.rollout_id for rollout in rollouts],
            prompt_ids=[rollout.prompt_id for rollout in rollouts],
            tokens=tokens,
        ),
    )


def _padded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def balance(rollouts: list[Rollout], num_packs: int, *, seq_length: int, slot_multiple: int) -> list[list[Rollout]]:
    """Deal a step's rollouts to its packs: longest first, each to the pack with the most room.

    Raises ValueError if they do not fit.
    """
    packs: list[list[Rollout]] = [[] for _ in range(num_packs)]
    used = [0] * num_packs
    for rollout in sorted(rollouts, key=lambda rollout: -rollout.num_inputs):
        emptiest = used.index(min(used))
        used[emptiest] += _padded(rollout.num_inputs, slot_multiple)
        packs[emptiest].append(rollout)
        if used[emptiest] > seq_length:
            raise ValueError(
                f"{len(rollouts)} rollouts do not fit into {num_packs} packs of {seq_length} tokens. "
                "Raise --seq-length or --global-batch-size (packs a step), or lower --prompts-per-step."
            )
    return packs


def packs_of_rank(
    rollouts: list[Rollout],
    *,
    prompts_per_step: int,
    packs_per_step: int,
    seq_length: int,
    slot_multiple: int,
    dp_rank: int,
    dp_size: int,
    first_step: int = 0,
) -> Iterator[Pack]:
    """The endless stream of packs of one data-parallel rank, `packs_per_step / dp_size` a step.

    Step k trains on the k-th `prompts_per_step` prompts of the file, cyclically. A step has the same rollouts in every
    layout.
    """
    by_prompt: dict[int | str, list[Rollout]] = {}
    for rollout in rollouts:
        by_prompt.setdefault(rollout.prompt_id, []).append(rollout)
    prompts = list(by_prompt.values())
    if len(prompts) < prompts_per_step:
        raise ValueError(f"--prompts-per-step {prompts_per_step}: the file has only {len(prompts)} prompts. Lower it.")
    step = first_step
    while True:
        begin = step * prompts_per_step
        chosen = [prompts[(begin + i) % len(prompts)] for i in range(prompts_per_step)]
        step_rollouts = [rollout for group in chosen for rollout in group]
        packs = balance(step_rollouts, packs_per_step, seq_length=seq_length, slot_multiple=slot_multiple)
        for pack in packs[dp_rank::dp_size]:
            yield make_pack(pack, seq_length=seq_length, slot_multiple=slot_multiple)
        step += 1
