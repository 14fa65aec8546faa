"""`segments_by` against plain loops over each sample's mask entries, and the guests: no sample, and masked parts."""

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from refusals import refusal_tests, refusals

from megatron_rl_loss import Gathered, Samples, ZigzagBSHD, ZigzagTHD
from megatron_rl_loss.core.segments import Segments, segments_by

Drawn = dict[str, Any]
KEYS = ("step", "sample", "rollout", "prompt", "session", "turn")


def drawn(rng: random.Random) -> Drawn:
    """Samples of unequal lengths with fractional weights, some of 0 entries, some masked whole, and their ids."""
    lengths = [rng.choice([0, 1, 3, 7]) for _ in range(rng.randint(1, 6))]
    masks = [[rng.choice([0, 0, 1, 0.3, 1e-12]) * rng.choice([0, 1, 1]) for _ in range(n)] for n in lengths]
    turns = [sorted(rng.randint(-1, 2) + 10 * rng.randint(0, 1) for _ in range(n)) for n in lengths]
    turns = [
        [turn if turn >= 0 or not m else 0 for turn, m in zip(*row, strict=True)]
        for row in zip(turns, masks, strict=True)
    ]
    sample_ids = {key: [rng.randint(0, 2) for _ in lengths] for key in ("prompt", "session")}
    return {"masks": masks, "turn": turns, **sample_ids}


def stated(given: Drawn, key: str) -> list[tuple[int, Any, list[int]]]:
    """Sample, id of the unit and mask entries of each segment, by plain loops."""
    found: list[tuple[int, Any, list[int]]] = []
    for i, mask in enumerate(given["masks"]):
        if key != "turn":
            unit = 0 if key == "step" else i if key in ("sample", "rollout") else given[key][i]
            found.append((i, unit, list(range(len(mask)))))
            continue
        turns_here: dict[Any, list[int]] = {}
        for t, turn in enumerate(given["turn"][i]):
            if turn >= 0:
                turns_here.setdefault(turn, []).append(t)
        found += [(i, turn, entries) for turn, entries in turns_here.items()]
    return found


def samples_of(given: Drawn) -> Samples:
    slots = [max(map(len, given["masks"])) + 1] * len(given["masks"])
    layout = Gathered([sum(slots[:i]) for i in range(len(slots) + 1)], total_lengths=[*map(len, given["masks"])])
    ids = {"session": given["session"], "turn": given["turn"]}
    return Samples(
        [np.array(mask, float) for mask in given["masks"]], layout=layout, prompt_ids=given["prompt"], ids=ids
    )


@pytest.mark.parametrize("key", KEYS)
def test_segments_are_those_of_plain_loops(key: str) -> None:
    rng, num_masked = random.Random(7), 0
    for _ in range(100):
        given = drawn(rng)
        samples, expected = samples_of(given), stated(given, key)
        segments = segments_by(key, samples, "a test")
        masks = [[given["masks"][i][t] for t in entries] for i, _, entries in expected]
        sums = [math.fsum(entries) for entries in masks]
        units = {unit for _, unit, _ in expected}
        unit_sums = [
            math.fsum(m for m, (_, other, _) in zip(sums, expected, strict=True) if other == unit)
            for _, unit, _ in expected
        ]
        assert (segments.sample.tolist(), segments.ids.tolist()) == (
            [i for i, *_ in expected],
            [u for _, u, _ in expected],
        )
        assert segments.mask_sums.tolist() == pytest.approx(sums, rel=1e-12)
        assert segments.active.tolist() == [any(entries) for entries in masks]
        assert segments.unit_mask_sums[segments.unit].tolist() == pytest.approx(unit_sums, rel=1e-12)
        assert segments.num_units == len(units)
        assert segments.have_ids == (key not in ("sample", "rollout"))
        places = [-1] * samples.total_tokens
        firsts = [0.0] * samples.total_tokens
        for number, ((i, _, entries), mask) in enumerate(zip(expected, masks, strict=True)):
            begin = samples.mask_starts[i]
            for t in entries:
                places[begin + t] = number
            for t in [t for t, m in zip(entries, mask, strict=True) if m][:1]:
                firsts[begin + t] = 1
        assert segments.in_buffer.tolist() == places
        assert segments.firsts.tolist() == firsts
        counts, order = segments.sort(samples.local(0, 1))
        if order is not None:
            assert (counts.tolist(), order.tolist()) == (
                [len(entries) for _, _, entries in expected],
                [samples.mask_starts[i] + t for i, _, entries in expected for t in entries],
            )
        as_tokens = segments.as_tokens()
        assert as_tokens.mask.tolist() == segments.active.tolist()
        assert as_tokens.sample_index.tolist() == segments.sample.tolist()
        num_masked += sum(not any(entries) for entries in masks)
    assert num_masked > 10


#: What a rank passes that has no sample, with and without ids and padding.
FILLERS: Sequence[dict[str, Any]] = (
    {},
    {"prompt_ids": [], "ids": {"turn": [], "session": []}},
    {"layout": ZigzagTHD([0, 4], filler_slots=1)},
    {"layout": ZigzagTHD([0, 4], filler_slots=1), "prompt_ids": []},
    {"layout": ZigzagTHD([0])},
    {"layout": Gathered([0, 4], filler_slots=1)},
)


@pytest.mark.parametrize("filler", FILLERS)
@pytest.mark.parametrize("key", [*KEYS, "unheard_of"])
def test_a_filler_has_no_segment_by_any_key(key: str, filler: dict[str, Any]) -> None:
    samples = Samples([], **filler)
    segments = segments_by(key, samples, "a test", over_microbatches=True)
    local = samples.local(0, 1)
    assert (len(segments), segments.num_units, segments.mask_sums.tolist(), segments.active.tolist()) == (0, 0, [], [])
    assert segments.in_buffer.tolist() == [-1] * len(local)
    assert segments.at_tokens(segments.ids, local, -1).tolist() == [-1] * len(local)
    assert (segments.firsts.tolist(), len(segments.as_tokens())) == ([0.0] * len(local), 0)
    assert segments.sort(local)[0].tolist() == []
    segments.check_order()


def by(key: str, **more: Any) -> Segments:
    return segments_by(key, Samples([[1, 1]], ids={"session": [3]}), "per='...'", **more)


def in_order(turns: list[int], mask: list[int]) -> None:
    segments_by("turn", Samples([mask], ids={"turn": [turns]}), "a test").check_order()


test_refusals = refusal_tests(
    {
        **refusals(
            by,
            ({"key": "prompt"}, r"samples without prompt_ids \(they have session\): .+prompt_ids=", {"key": "session"}),
            ({"key": "turn"}, r"samples without ids\['turn'\]", {"key": "step"}),
            ({"key": "sample", "over_microbatches": True}, "samples without", {"key": "sample"}),
            ({"key": "rollout", "over_microbatches": True}, "without rollout_ids", {"key": "rollout"}),
        ),
        **refusals(
            in_order,
            (([0, 1, 0], [1, 1, 1]), "sample 0 comes back to a turn", ([0, 1, 0], [1, 0, 1])),
            (([0, 1, 0], [0, 1, 1]), "sample 0 comes back to a turn", ([0, 1, 0], [1, 1, 0])),
        ),
    }
)


def test_a_batch_of_rows_is_a_layout_too() -> None:
    samples = Samples([[1, 0], [0, 1]], layout=ZigzagBSHD(2, 4, [2, 2]), ids={"turn": [[0, 0], [1, 2]]})
    assert segments_by("turn", samples, "a test").in_buffer.tolist() == [0, 0, -1, -1, 1, 2, -1, -1]
