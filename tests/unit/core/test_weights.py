"""The weight of a token: proved once, over modes, countings, layouts, CP and DP, masks and ids; and what is refused.

`oracle` states it a second time, in float64 and plain loops. Over real ranks: tests/unit/core/test_counting.py.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from oracle import NAN, Sample
from placements import LAID_OUT
from refusals import refusal_tests, refusals
from steps import (
    Step,
    divisor_of,
    drawn_step,
    error_of,
    ids_of,
    placed,
    samples_of,
    token_weights,
    totals_of,
    weights_of,
)

from megatron_rl_loss import (
    Gathered,
    Mode,
    Samples,
    StepTotals,
    Sum,
    ZigzagTHD,
    make_pg_loss_reducer,
    plan_step,
    register_pg_loss_reducer,
    weights_column,
)
from megatron_rl_loss.core import layouts
from megatron_rl_loss.core.collectives import StepGroups
from megatron_rl_loss.core.counting import count_step
from megatron_rl_loss.core.modes import ModeInputs
from megatron_rl_loss.core.samples import LocalTokens
from megatron_rl_loss.core.segments import segments_by

# --- against the oracle


def numbered(step: ModeInputs) -> Any:
    """Another weight for every token of the micro-batch."""
    return [100.0 * i + np.arange(len(mask)) + 1 for i, mask in enumerate(step.batch.loss_masks)]


ROOTS = Sum(of=lambda samples: samples.mask_sums**0.5, by="prompt")
by_roots = Mode(name="by_roots", function=lambda step: 1 / step.sum("roots").clip(1e-30), sums={"roots": ROOTS})


def own_mode_weights(samples: list[Sample]) -> dict[Any, list[list[float]]]:
    """Weights of `by_roots`; those of `numbered` count positions in a micro-batch."""
    tokens, roots = [float(sample.mask.double().sum()) for sample in samples], dict[Any, float]()
    for sample, number in zip(samples, tokens, strict=True):
        roots[sample.prompt_id] = roots.get(sample.prompt_id, 0.0) + number**0.5
    besides = [1 / roots[sample.prompt_id] if t else 0 for sample, t in zip(samples, tokens, strict=True)]
    masks = [sample.mask.double().tolist() for sample in samples]
    return {by_roots: [[entry * beside for entry in mask] for mask, beside in zip(masks, besides, strict=True)]}


def worst_error(step: Step, place: Any, cp_size: int, units: Any) -> tuple[float, int]:
    """The worst error of all weights of the step, and the number of vectors; a rank's tokens are checked on the way."""
    hands = [hand for dp_rank in range(len(step.hands)) for hand in placed(step, dp_rank, place, cp_size)]
    described = [samples_of(chosen, at) for chosen, at in hands]
    totals = count_step(described, StepGroups(), sums=[ROOTS])
    modes: dict[Any, Any] = {mode: weights_of(mode, step.samples, units) for mode in (*oracle.MODES, *oracle.BY_IDS)}
    modes |= own_mode_weights(step.samples)
    number = {id(sample): i for i, sample in enumerate(step.samples)}
    errors, vectors = [0.0], 0
    for (chosen, at), samples in zip(hands, described, strict=True):
        copies = cp_size if isinstance(at.layout, Gathered) else 1
        mode_weights = {mode: [weights[number[id(sample)]] for sample in chosen] for mode, weights in modes.items()}
        mode_weights[numbered] = [
            [(100.0 * i + t + 1) * m for t, m in enumerate(sample.mask.double().tolist())]
            for i, sample in enumerate(chosen)
        ]
        for rank, held in enumerate(at.held):
            check_part(samples.local(rank, cp_size), chosen, held)
            for mode, weights in mode_weights.items():
                asked = {"divisor": divisor_of(mode), "units": units, "cp_rank": rank, "cp_size": cp_size}
                vector = token_weights(mode, samples, totals, **asked)
                errors.append(error_of(vector, [weights[t[0]][t[1]] / copies if t else 0.0 for t in held]))
                vectors += 1
    return max(errors), vectors


def check_part(local: LocalTokens, chosen: list[Sample], held: list[oracle.Token]) -> None:
    """Positions, samples and masks of a rank's tokens, and their runs."""
    tokens = [(k, at) for k, at in enumerate(held) if at is not None]
    numbers, positions = local.sample_index.tolist(), local.positions.tolist()
    assert len(local) == len(held) == len(numbers) == len(positions)
    assert local.mask.tolist() == [0 if at is None else float(chosen[at[0]].mask[at[1]]) for at in held]
    assert [positions[k] for k, _ in tokens] == [local.samples.mask_starts[i] + t for _, (i, t) in tokens]
    assert [numbers[k] for k, _ in tokens] == [i for _, (i, _) in tokens]
    assert numbers == sorted(numbers)
    assert local.num_active == sum(bool(chosen[i].mask[t] != 0) for _, (i, t) in tokens)
    assert local.counts.tolist() == [numbers.count(i) for i in range(len(chosen))]
    assert [p for begin, n, _ in local.runs for p in range(begin, begin + n)] == positions
    whole = torch.arange(local.samples.total_tokens)
    assert torch.equal(local.of(torch.stack([whole, -whole], 1))[:, 1], -local.of(whole))


def test_the_weights_of_every_token(record_property: Callable[[str, object], None]) -> None:
    """Modes x countings x layouts x CP, over micro-batches of two DP ranks with masks and ids of every kind."""
    vectors, worst = 0, 0.0
    countings = [*oracle.UNITS]
    for seed in range(len(countings) * len(LAID_OUT)):
        place, cp_size = LAID_OUT[seed % len(LAID_OUT)]
        step = drawn_step(seed, dp_size=2, num_microbatches=2)
        error, number = worst_error(step, place, cp_size, countings[seed // len(LAID_OUT)])
        assert error < oracle.EXACT, (seed, place.__name__, cp_size)
        vectors, worst = vectors + number, max(worst, error)
    assert vectors > 3000
    record_property("weight_vectors", vectors)
    record_property("weight_error", worst)


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "active tokens for fractional ones": (Samples, "mask_sums", property(lambda samples: samples.active_tokens)),
    "copies are not shared": (LocalTokens, "copies", 1),
    "a rank holds its neighbour's": (
        layouts.Slots, "pieces", lambda self, r, c, pieces=layouts.Slots.pieces: pieces(self, (r + 1) % c, c)
    ),
    "samples for rollouts": (
        ModeInputs,
        "_segments",
        lambda self, key: segments_by("sample" if key == "rollout" else key, self.batch, "a mode"),
    ),
    "turns of a sample alone": (
        ModeInputs, "_at_samples",
        lambda self, key, *more, whole=ModeInputs._at_samples: whole(self, "sample" if key == "turn" else key, *more)
    ),
    "all samples of a session for active ones": (
        ModeInputs, "samples", lambda self, key: self._at_samples(key, "all", np.ones(len(self.batch)), 1)
    ),
    "active units for all": (
        ModeInputs, "_known",
        lambda self, counts, counted, key, whole=ModeInputs._known:
            whole(self, counts, {"all": "active", "active": "all"}.get(counted, counted), key)
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong = FAULTS[fault]
    monkeypatch.setattr(owner, name, wrong)
    units = "active" if "for active" in fault else "all"

    def is_seen(seed: int) -> bool:
        place, cp_size = LAID_OUT[seed % len(LAID_OUT)]
        try:
            return worst_error(drawn_step(seed, 2, 2), place, cp_size, units)[0] > oracle.EXACT
        except (AssertionError, ValueError):
            return True

    assert any(map(is_seen, range(2 * len(LAID_OUT))))


@pytest.mark.parametrize(("mode", "units"), oracle.WORKED_VALUES)
def test_the_oracle_and_the_weights_give_what_is_worked_out_by_hand(mode: str, units: Any) -> None:
    """README shows these values."""
    value, divisor = oracle.WORKED_VALUES[mode, units], divisor_of(mode)
    losses = torch.cat([sample.losses for sample in oracle.WORKED])
    oracle_weights = torch.tensor(
        [w for sample in oracle.step_weights(mode, oracle.WORKED, divisor, units) for w in sample]
    )
    assert float(oracle_weights.double() @ losses) == pytest.approx(value, rel=1e-6)
    assert float(oracle.step_loss(mode, oracle.WORKED, divisor, units)) == pytest.approx(value, rel=1e-14)
    slopes = torch.cat(oracle.step_gradient(mode, oracle.WORKED, divisor, units))
    torch.testing.assert_close(oracle_weights.double(), slopes)
    masks, ids = [sample.mask for sample in oracle.WORKED], ids_of(oracle.WORKED)
    weights = token_weights(mode, Samples(masks, **ids), totals_of(oracle.WORKED), divisor=divisor, units=units)
    assert float(weights.double() @ losses) == pytest.approx(value, rel=1e-6)
    column = weights_column(mode, Samples(masks, **ids), divisor=divisor, units=units)
    assert list(map(len, column)) == list(map(len, masks))
    assert torch.equal(torch.cat(column), weights)


# --- sums that modes declare


def shared_by(power: float) -> Mode:
    """Two modes of one factory, whose functions have the same name."""
    by = Sum(of=lambda samples: np.where(samples.mask_sums > 0, samples.mask_sums**power, 0))
    return Mode(
        name="shared", function=lambda step: step.batch.mask_sums ** (power - 1) / step.sum("power"), sums={"power": by}
    )


def test_two_modes_of_one_factory_have_sums_of_their_own() -> None:
    masks = [torch.ones(4), torch.zeros(2), torch.ones(1)]
    modes = [shared_by(0.25), shared_by(2.0)]
    totals = StepTotals.of(masks, sums=[total for mode in modes for total in mode.sums.values()])
    for mode in modes:
        weights = token_weights(mode, Samples(masks), totals)
        assert float(weights.sum()) == pytest.approx(1)
        assert torch.equal(weights, torch.cat(weights_column(mode, masks)))


@pytest.mark.parametrize("returned", [[1.0], [1.0, NAN], [[1.0, 1.0]], None], ids=str)
def test_a_declared_sum_is_one_finite_number_a_sample(returned: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        StepTotals.of([[1], [1]], sums=[Sum(of=lambda samples: returned)])


MASKS = [torch.ones(4), torch.tensor([1.0, 0.5, 0, 0])]
LOSSES = torch.tensor([1.0, 2, 3, 4, 5, 6, NAN, NAN])


# --- refusals, each beside its nearest legal neighbour


def totals_of_ones(*lengths: float, sums: Any = (), **ids: Any) -> StepTotals:
    """Totals of masks of ones, the last of which may be a fraction."""
    masks = [[1.0] * int(length) + [length % 1] for length in lengths]
    return StepTotals.of(Samples(masks, **ids), sums=sums)


WITH_ROLLOUTS = StepTotals.of(Samples(MASKS, rollout_ids=[0, 0], prompt_ids=[0, 0]))
PROMPTS = totals_of_ones(8, 6, prompt_ids=[0, 7])
ONE, TWO, ZERO, SIX = totals_of_ones(9), totals_of_ones(5, 5), totals_of_ones(0, 0), totals_of_ones(3, 3)
ROLLOUTS: dict[str, Any] = {"rollout_ids": [0, 0]}
IDS: dict[str, Any] = {"prompt_ids": [0, 0]}
BOTH: dict[str, Any] = {**ROLLOUTS, **IDS}
UNKNOWN, LAID_OUT_TWO = "has no count in the step's totals", ZigzagTHD([0, 4, 8])


def reduced(mode: Any, totals: Any, ids: Any = IDS, masks: Any = MASKS, units: Any = None) -> Any:
    divisor = ids.get("divisor", divisor_of(mode))
    samples = Samples(masks, **{name: values for name, values in ids.items() if name != "divisor"})
    return make_pg_loss_reducer(mode, samples, totals=totals, units=units, divisor=divisor)


def weigh_by(mode: Any, totals: StepTotals, layout: Any = None, cp_size: int = 1, masks: Any = MASKS) -> Any:
    return token_weights(mode, Samples(masks, layout=layout), totals, cp_size=cp_size)


def on_mask(entry: float, divisor: float) -> torch.Tensor:
    masks = [torch.tensor([entry, 1.0])]
    return token_weights("token_sum", Samples(masks), StepTotals.of(masks), divisor=divisor)


def beside_flags(weight: float) -> torch.Tensor:
    return token_weights(lambda step: weight, Samples([[1, 0]]), StepTotals.of([[1, 0]]))


KNOWN = ("prompt_mean", PROMPTS, {"prompt_ids": [0, 7]})
test_refusals = refusal_tests(
    {
        **refusals(
            reduced,
            *(
                (("prompt_mean", PROMPTS, {"prompt_ids": unknown}), f"sample {i} {UNKNOWN}", KNOWN)
                for i, unknown in ((1, [0, 1]), (0, ["a", "b"]), (0, [1, 7]))
            ),
            (("prompt_mean", PROMPTS, {}), "'prompt_mean' and samples without prompt_ids", KNOWN),
            *(
                ((mode, WITH_ROLLOUTS), "totals with rollout ids, a micro-batch without", (mode, WITH_ROLLOUTS, BOTH))
                for mode in ("sample_mean", "constant")
            ),
            (("constant", TWO, ROLLOUTS), "a micro-batch with rollout ids, totals without",
             ("constant", WITH_ROLLOUTS, ROLLOUTS)),
            (("sample_mean", WITH_ROLLOUTS, {"rollout_ids": [0, 5]}), f"sample 1 {UNKNOWN}",
             ("sample_mean", WITH_ROLLOUTS, ROLLOUTS)),
            # --- totals without a count
            (("prompt_mean", SIX), "totals without prompt units: 'prompt_mean' needs them", ("prompt_mean", PROMPTS)),
            ((by_roots, PROMPTS), "totals without a declared sum by prompt: 'by_roots'",
             (by_roots, totals_of_ones(8, 6, prompt_ids=[0, 0], sums=[ROOTS]))),
            # --- totals of a part of the step
            (("token_mean", ZERO), "step_tokens of 0 in the totals", ("token_mean", ZERO, IDS, [torch.zeros(4)] * 2)),
            (("token_mean", totals_of_ones(2, 2)), "step_tokens of 4 in the totals, and 5.5 in these",
             ("token_mean", SIX)),
            (("constant", ONE, {}), r"sample units \(all\) of 1 in the totals, and 2", ("constant", TWO, {})),
            (("sample_mean", totals_of_ones(5, 9, rollout_ids=[0, 1]), ROLLOUTS),
             "mask tokens of one rollout of .* and 5.5",
             ("sample_mean", totals_of_ones(5.5, 9, rollout_ids=[0, 1]), ROLLOUTS)),
            # --- names and settings
            (("token_mean", SIX, IDS, MASKS, "some"), "'some': there is no such unit counting. Choose one of all",
             ("token_mean", SIX, IDS, MASKS, "active")),
            (("token_mean", SIX, {"divisor": 8}), "divisor 8 with loss aggregation 'token_mean': this mode takes none",
             ("token_mean", SIX)),
            *(
                (("constant", TWO, {"divisor": wrong}), text, ("constant", TWO, {"divisor": 1e-3}))
                for wrong, text in (
                    (None, "'constant' without a divisor"), (0, "divisor 0 .* between 1e-30 and 1e30"), (-8, "-8"),
                    (NAN, "nan"), (1e30, r"1e\+30"),
                )
            ),
        ),
        **refusals(
            reduced,
            (("token_mean", None), "totals is None: it must be a StepTotals", ("token_mean", SIX)),
            (("constant", TWO, {"divisor": True}), "divisor True .*must be a Python number", ("constant", TWO)),
            (("constant", TWO, {"divisor": "8"}), "divisor '8'", ("constant", TWO)),
            error=TypeError,
        ),
        **refusals(
            weigh_by,
            (("token_mean", SIX, LAID_OUT_TWO, 2), "cp_size=2 without a cp_rank", ("token_mean", SIX, LAID_OUT_TWO)),
        ),
        **refusals(
            on_mask,
            ((1e-30, 1e17), "float32 rounds to 0: .*not be trained", (1e-20, 1e17)),
            ((1e-30, 1e10), "float32 rounds to 0", (1e-20, 1e10)),  # to fewer bits
            ((1e9, 2e-30), "NaN or Inf", (1e9, 1e-20)),
        ),
        **refusals(
            beside_flags,
            ((1e-38,), "float32 rounds to 0", (2e-38,)),
            ((4e38,), "NaN or Inf", (3e38,)),
            ((-1.0,), "weights down to -1", (0.0,)),
        ),
    }
)  # fmt: skip


def test_a_mode_is_rehearsed_without_judging_its_numbers() -> None:
    """Weights of a part of a step need not be finite: here a leave-one-out divisor."""
    samples = [Samples([[1, 1]], prompt_ids=["a"]), Samples([[1], [0]], prompt_ids=["a", "b"])]
    plan = plan_step(samples, lambda step: 1 / (step.samples("prompt") - 1), dp_group=None)
    assert [weights for microbatch in plan for weights in microbatch.weights.tolist()] == [1, 1, 1, 0]


@pytest.mark.parametrize("name", ["token_mean", "my-sum", "", "1st", "class", None])
def test_names_of_modes(name: Any) -> None:
    with pytest.raises(ValueError, match="must be a Python identifier that is not taken"):
        register_pg_loss_reducer(name)
    with pytest.raises(TypeError, match="mode 'x' is a int: it must be a function"):
        register_pg_loss_reducer("x")(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="formula of 'x' is 3: it must be a text"):
        register_pg_loss_reducer("x", formula=3)(numbered)
    assert isinstance(register_pg_loss_reducer("x")(numbered), Mode)
    assert torch.equal(token_weights("x", Samples(MASKS), SIX), token_weights(numbered, Samples(MASKS), SIX))
