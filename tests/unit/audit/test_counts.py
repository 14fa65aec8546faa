"""What a loss may have counted: every count that a reading can be made of, against plain loops on random steps."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from counted_steps import Array, measured, ragged

from megatron_rl_loss.audit.counts import COUNTINGS, SCOPES, Cells, Count
from megatron_rl_loss.audit.tokens import MeasuredStep, Split, StepTokens
from megatron_rl_loss.audit.verdict import judge
from megatron_rl_loss.modes.names import resolve

#: By what ids the parts of a step are told apart.
IDS: dict[str, tuple[str, ...]] = {
    "step": (), "dp_rank": ("dp_rank",), "microbatch_over_dp": ("microbatch",), "microbatch": ("dp_rank", "microbatch"),
    "rank": ("dp_rank", "cp_rank"), "cp_place": ("dp_rank", "microbatch", "cp_rank"),
}  # fmt: skip
#: What mask entries of a sample, or of another part, count as.
RULES: dict[str, Any] = {
    "mask": sum, "length": len, "all": lambda m: 1, "active": any, "clamped": lambda m: max(sum(m), 1),
    "masked_length": lambda m: sum(m) or len(m), "shifted": lambda m: sum(m) + any(m),
}  # fmt: skip


def by_loops(tokens: StepTokens, count: Count, cp_size: int) -> Array:
    """The count around every entry of the masks."""
    rows = [{name: int(getattr(tokens, name)[i]) for name in IDS["cp_place"] + ("sample", "rollout", "prompt")}
            for i in range(len(tokens))]  # fmt: skip
    around = IDS[count.scope] + (() if count.unit == "scope" else (count.unit,))
    part = (*IDS[count.scope], "sample") if count.what == "tokens" else (*around, count.what)
    part = {"clamped_pieces": IDS["cp_place"], "clamped_microbatches": IDS["microbatch"]}.get(count.counting, part)
    parts: dict[Any, dict[Any, list[float]]] = {}
    keys = [tuple(row[name] for name in around) for row in rows]
    for key, row, m in zip(keys, rows, tokens.mask.tolist(), strict=True):
        parts.setdefault(key, {}).setdefault(tuple(row[name] for name in part), []).append(m)
    found = {}
    for key, members in parts.items():
        longest = max(map(len, members.values()))
        padded = -(-longest // (2 * cp_size)) * 2 * cp_size if count.counting.startswith("padded") else longest
        if count.counting.endswith(("width", "rectangle")):
            found[key] = padded * (1 if count.counting.endswith("width") else len(members))
        elif count.counting in ("response", "total"):
            lengths = getattr(tokens, f"{count.counting}_lengths")
            found[key] = sum(lengths[sample] for *_, sample in members)
        elif count.what == "tokens" and count.counting == "active":
            found[key] = sum(m != 0 for one in members.values() for m in one)
        else:
            found[key] = sum(RULES[count.counting.removesuffix("_pieces").removesuffix("_microbatches")](one)
                             for one in members.values())  # fmt: skip
    return np.array([found[key] for key in keys], float)


def step_of(seed: int, **how: Any) -> tuple[StepTokens, Cells]:
    how = {"samples": (1, 2), "fractional": True, "masked": 0.4, "longest": 12, "uneven_prompts": True} | how
    step = measured(ragged(seed, **how), lambda t: t.m)
    tokens = replace(step.tokens, response_lengths=np.arange(int(step.tokens.sample.max()) + 1) % 4 + 1)
    return tokens, Cells(tokens, step.split)


@pytest.mark.parametrize("seed", range(3))
def test_every_count_is_what_loops_say(seed: int) -> None:
    tokens, cells = step_of(seed, D=2, C=2, K=3, split_rollouts=True)
    counts = {count for _, count in cells.features()}
    counts |= {Count("tokens", counting=counting) for counting in COUNTINGS}
    counts |= {Count(unit, "step", how) for unit in cells.units for how in ("all", "active")}
    assert len(counts) > 150
    for count in counts:
        np.testing.assert_array_equal(cells.values(count)[cells.of_entry], by_loops(tokens, count, 2), str(count))
    rest = {"sample": tokens.sample, "rollout": tokens.rollout, "prompt": tokens.prompt}
    numbers = {name: len(np.unique(ids)) for name, ids in rest.items()}
    total = float(tokens.mask.sum())
    for count, average in {
        Count("tokens", "microbatch"): total / 6, Count("tokens", "cp_place"): total / 12,
        Count("tokens", unit="rollout"): total / numbers["rollout"],
        Count("sample", "dp_rank", "all"): numbers["sample"] / 2,
        Count("sample", counting="active", unit="prompt"): numbers["sample"] / numbers["prompt"],
        Count("microbatch", "dp_rank", "active"): 6 / 2,
    }.items():  # fmt: skip
        assert cells.average(count) == average, count


def test_parts_are_those_the_step_was_split_into() -> None:
    for sizes, scopes in {
        (1, 1, 1): ["step"], (1, 1, 2): ["step", "microbatch"], (2, 1, 1): ["step", "microbatch"],
        (1, 2, 1): ["step", "cp_place"], (2, 2, 2): list(SCOPES),
    }.items():  # fmt: skip
        assert step_of(0, **dict(zip("DCK", sizes, strict=True)))[1].scopes() == scopes


def test_parts_without_a_token_or_an_entry_are_parts() -> None:
    """A third micro-batch of both ranks has no mask entry; where every CP rank holds all, CP makes no parts."""
    tokens, _ = step_of(1, D=2, C=2, K=2)
    cells = Cells(tokens, Split(num_microbatches=3, dp_size=2, cp_size=2))
    everywhere = Cells(replace(tokens, cp_rank=np.full_like(tokens.sample, -1)), Split(cp_size=2, dp_size=2))
    pieces = ("dp_rank", "microbatch", "cp_rank")
    found = [cells.number_of_parts(names) for names in (pieces, pieces[:2], ("sample",))]
    assert [*found, everywhere.number_of_parts(pieces)] == [12, 6, len(np.unique(tokens.sample)), 4]


@pytest.mark.slow
def test_a_large_step_is_judged_at_once() -> None:
    """40 thousand tokens: in less than a second on a free core, with room for a machine that is busy otherwise."""
    samples = 20_000
    sample = np.repeat(np.arange(samples), 2)
    position = np.arange(len(sample)) % 2
    mask = (np.random.default_rng(1).random(len(sample)) < 0.7).astype(float)
    piece = sample * 64 // samples
    tokens = StepTokens(
        mask=mask, sample=sample, position=position, dp_rank=piece // 16, microbatch=piece % 16, cp_rank=position % 2,
        rollout=sample, prompt=sample // 5,
    )  # fmt: skip
    own = np.bincount(piece, weights=mask)[piece]
    step = MeasuredStep(tokens=tokens, weights=mask / own, split=Split(num_microbatches=16, dp_size=4, cp_size=2))
    for mode in ("prompt_mean", None):
        begin = time.process_time()
        verdict = judge(step, None if mode is None else resolve(mode))
        assert time.process_time() - begin < 4
        assert "the tokens of the micro-batch, not of the step" in verdict.readings[0].text
