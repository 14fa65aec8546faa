"""Every public function of a place's tokens, with three guests: no sample, a part masked whole, fractional weights.

Statistics and advantages are compared with plain loops in float64; everything with itself, alone and behind others.
"""

import functools
import inspect
import itertools
import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from rests import with_rest
from torch import Tensor

import megatron_rl_loss
from megatron_rl_loss import (
    Gate,
    Gathered,
    Metric,
    Samples,
    StepTotals,
    Term,
    ZigzagBSHD,
    ZigzagTHD,
    divergence_at_ids,
    fold_into_advantages,
    gae,
    group_relative_advantages,
    importance_weights,
    keep_tokens,
    kl_estimate,
    make_pg_loss_reducer,
    measure_tokens,
    pass_gap,
    plan_step,
    policy_loss,
    ppo_clip_loss,
    score_centering,
    segment_mean,
    segment_quantile,
    segment_scan,
    segment_sum,
    surviving_masks,
    tap,
    to_tokens,
    value_loss,
    weights_column,
    whiten_advantages,
)
from megatron_rl_loss.losses.advantages import gdpo_advantages, maxrl_advantages, rloo_advantages
from megatron_rl_loss.losses.by_name import POLICY_LOSSES
from megatron_rl_loss.losses.scans import sums_within

#: Of one sample its mask, its turns, and the ids of its session and its rollout.
One = tuple[list[float], list[int], str, str]
PERS = ("sample", "rollout", "session", "turn")


def drawn(rng: random.Random, number: int) -> One:
    """A sample with holes, or masked whole; turns side by side, of which some are masked whole; fractional weights."""
    turns = [turn for turn in range(rng.randint(1, 4)) for _ in range(rng.randint(1, 4))]
    masked = {turn for turn in set(turns) if rng.random() < 0.3}
    weight = rng.choice([1.0, 0.1, 1e-14, 1e6])
    mask = [0.0 if turn in masked or rng.random() < 0.3 else rng.choice([weight, weight / 3]) for turn in turns]
    return mask, [100 * number + turn for turn in turns], f"s{number // 2}", f"r{number // 3}"


def local_of(given: Sequence[One]) -> Any:
    ids: dict[str, Any] = {
        "turn": [turns for _, turns, _, _ in given],
        "session": [session for *_, session, _ in given],
    }
    masks = [torch.tensor(mask, dtype=torch.float64) for mask, *_ in given]
    return Samples(masks, ids=ids, rollout_ids=[rollout for *_, rollout in given]).local(0, 1)


def values_of(rng: random.Random, given: Sequence[One]) -> list[list[float]]:
    """Values in random order; NaN where they must not be looked at."""
    return [[rng.uniform(-2, 2) if entry else math.nan for entry in mask] for mask, *_ in given]


def flat(rows: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


# --- plain loops

Place = tuple[int, int]  # sample and mask entry


def parts_of(given: Sequence[One], per: str) -> list[tuple[object, list[Place]]]:
    """The unit, and the entries, of each number that a statistic returns."""
    parts: list[tuple[object, list[Place]]] = []
    for i, (mask, turns, session, rollout) in enumerate(given):
        entries = [(i, t) for t in range(len(mask))]
        if per == "turn":
            parts += [(turn, [(i, t) for t in range(len(mask)) if turns[t] == turn]) for turn in dict.fromkeys(turns)]
        else:
            parts.append(({"sample": i, "session": session, "rollout": rollout}[per], entries))
    return parts


def over_units(given: Sequence[One], per: str, of_unit: Callable[[list[Place]], float]) -> list[float]:
    """A number of each unit's active entries, at each of its parts."""
    parts = parts_of(given, per)
    found = []
    for unit, _ in parts:
        entries = [(i, t) for other, places in parts if other == unit for i, t in places if given[i][0][t]]
        found.append(of_unit(entries))
    return found


def quantile_of(pairs: list[tuple[float, float]], q: float) -> float:
    """The first value, in ascending order, up to which the weights reach their share; in fractions."""
    wanted, so_far = Fraction(q) * sum(Fraction(m) for _, m in pairs) * (1 - Fraction(1, 10**12)), Fraction(0)
    for value, m in sorted(pairs):
        so_far += Fraction(m)
        if so_far >= wanted:
            return value
    return 0.0


def generalised(mask: list[float], steps: list[Any], r: list[float], v: list[float], gamma: float, lam: float) -> Any:
    """GAE by its definition, over the steps that have an active token: advantages and returns of tokens."""
    tokens: dict[Any, list[int]] = {}
    for t, step in enumerate(steps):
        if mask[t]:
            tokens.setdefault(step, []).append(t)
    advantages, returns, later, following = [0.0] * len(mask), [0.0] * len(mask), 0.0, 0.0
    for own in reversed(tokens.values()):
        value = v[own[0]]
        later = math.fsum(r[t] for t in own) + gamma * following - value + gamma * lam * later
        following = value
        for t in own:
            advantages[t], returns[t] = later, later + value
    return advantages, returns


STEPS = [[drawn(random.Random(f"{n} {k}"), k) for k in range(1 + n % 6)] for n in range(40)]


def test_the_data_has_the_guests() -> None:
    every = [one for given in STEPS for one in given]
    whole = [not any(mask) for mask, *_ in every]
    turns = [any(mask) and not any(m for m, of in zip(mask, turns, strict=True) if of == turn)
             for mask, turns, *_ in every for turn in set(turns)]  # fmt: skip
    assert 0 < sum(whole) < len(whole)
    assert 0 < sum(turns) < len(turns)
    assert {0.1, 1e-14, 1e6} <= {max(mask) for mask, *_ in every}


@pytest.mark.parametrize("per", PERS)
@pytest.mark.parametrize("given", STEPS)
def test_statistics(given: list[One], per: str) -> None:
    rng = random.Random(1)
    rows, local = values_of(rng, given), local_of(given)
    values = flat(rows)

    def mask(i: int, t: int) -> float:
        return given[i][0][t]

    def stated_sum(entries: list[Place]) -> float:
        return math.fsum(mask(i, t) * rows[i][t] for i, t in entries)

    def stated_mean(entries: list[Place]) -> float:
        return stated_sum(entries) / math.fsum(mask(i, t) for i, t in entries) if entries else 0.0

    scale = max(1.0, *(mask(i, t) for i, row in enumerate(rows) for t in range(len(row))))
    assert segment_sum(values, local, per=per).tolist() == pytest.approx(
        over_units(given, per, stated_sum), rel=1e-12, abs=1e-12 * scale
    )
    means = over_units(given, per, stated_mean)
    found = segment_mean(values, local, per=per)
    assert found.tolist() == pytest.approx(means, rel=1e-12, abs=1e-12)
    at_tokens = {place: m for (_, places), m in zip(parts_of(given, per), means, strict=True) for place in places}
    assert to_tokens(found, local, per=per).tolist() == pytest.approx(
        [at_tokens[i, t] for i, row in enumerate(rows) for t in range(len(row))], rel=1e-12, abs=1e-12
    )

    def stated_quantile(q: float, entries: list[Place]) -> float:
        return quantile_of([(rows[i][t], mask(i, t)) for i, t in entries], q)

    for q in (0.2, 0.5, 0.9, 1.0):
        stated = over_units(given, per, functools.partial(stated_quantile, q))
        assert segment_quantile(values, local, q=q, per=per).tolist() == stated


@pytest.mark.parametrize("given", STEPS)
def test_gae(given: list[One]) -> None:
    rng = random.Random(2)
    rewards, values, local = values_of(rng, given), values_of(rng, given), local_of(given)
    lam = [rng.random() for _ in given]
    for steps, gamma, of_samples in (("token", 0.9, 0.5), ("turn", 1.0, 0.5), ("turn", 0.9, lam), ("token", 0.9, lam)):
        stated = [
            generalised(
                mask, turns if steps == "turn" else list(range(len(mask))), rewards[i], values[i], gamma,
                lam[i] if of_samples is lam else 0.5,
            )
            for i, (mask, turns, *_) in enumerate(given)
        ]  # fmt: skip
        found = gae(flat(rewards), flat(values), local, gamma=gamma, lam=of_samples, steps=steps)
        for k in (0, 1):
            assert found[k].tolist() == pytest.approx([x for row in stated for x in row[k]], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("given", STEPS[:12])
@pytest.mark.parametrize("mode", ["sample_mean", "session_mean", "turn_mean"])
def test_modes(mode: str, given: list[One]) -> None:
    """Weights of all tokens, by units of which some are masked whole."""
    per = {"sample_mean": "rollout", "session_mean": "session", "turn_mean": "turn"}[mode]
    parts = parts_of(given, per)
    units = {unit for unit, _ in parts}
    masks = [mask for mask, *_ in given]
    expected = [[0.0] * len(mask) for mask in masks]
    for unit in units:
        own = [places for other, places in parts if other == unit]
        for places in own:
            pool = [place for of in ([places] if mode == "session_mean" else own) for place in of]
            total = math.fsum(masks[i][t] for i, t in pool)
            share = len(own) if mode == "session_mean" else 1
            for i, t in places:
                expected[i][t] = masks[i][t] / (total * share * len(units)) if masks[i][t] else 0.0
    plan = plan_step([local_of(given).samples], mode, dp_group=None)
    assert plan[0].weights.tolist() == pytest.approx([w for row in expected for w in row], rel=1e-6)


# --- every function, alone and behind others, and of no sample


def with_ids(x: Tensor) -> Tensor:
    """Log-probs at two ids of each token."""
    return torch.stack([x, x.sin()], -1) - 3


def of_segments(statistic: Callable[..., Tensor], per: str, **settings: Any) -> Callable[..., Tensor]:
    return lambda x, at: to_tokens(statistic(x, at, per=per, **settings), at, per=per)


def of_policy(name: str, **settings: Any) -> Callable[..., Tensor]:
    return lambda x, at: (
        policy_loss(
            name, -x.exp(), -x.detach().exp() - 0.1 * x.detach().sin(), x.detach(), at, **settings
        ).per_token_loss
    )


#: Values of tokens, and their place -> one value for each token, of which none depends on another sample.
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    **{f"segment_sum {per}": of_segments(segment_sum, per) for per in PERS},
    **{f"segment_mean {per}": of_segments(segment_mean, per) for per in PERS},
    **{f"segment_quantile {per} {q}": of_segments(segment_quantile, per, q=q) for per in PERS for q in (0.5, 1.0)},
    "segment_quantile interpolates": lambda x, at: to_tokens(segment_quantile(x, at, q=0.3, interpolates=True), at),
    "segment_scan": lambda x, at: segment_scan(x, at, gamma=0.9),
    "segment_scan list": lambda x, at: segment_scan(x, at, gamma=[0.5] * len(at.samples), reverse=True, steps="all"),
    "to_tokens": lambda x, at: to_tokens(torch.ones(len(at.samples)), at),
    "gae token": lambda x, at: gae(x, x.square(), at, lam=[0.5] * len(at.samples))[0],
    "gae turn": lambda x, at: gae(x, x.square(), at, steps="turn", lam=torch.full((len(at.samples),), 0.5))[1],
    "whiten_advantages": lambda x, at: whiten_advantages([x], [at], per="turn", dp_cp_group=None)[0],
    **{f"policy_loss {name}": of_policy(name) for name in POLICY_LOSSES},
    **{f"policy_loss {name} {per}": of_policy(name, per=per) for name in ("gspo", "gmpo", "vespo") for per in PERS},
    "ppo_clip_loss": lambda x, at: ppo_clip_loss(-x.exp(), -x.exp() - 0.1, x, at).per_token_loss,
    **{
        f"importance_weights {level} {how}": lambda x, at, level=level, how=how: importance_weights(
            0.1 * x, Gate(level=level, aggregate=how, high=1.05), at
        )
        for level in ("sequence", "rollout")
        for how in ("sum", "mean", "max")
    },
    "value_loss": lambda x, at: value_loss(x, x.square(), at),
    "kl_estimate": lambda x, at: kl_estimate(-x.exp(), -x.exp() - 0.1, at),
    "divergence_at_ids": lambda x, at: divergence_at_ids(
        with_rest(with_ids(-x.exp())), with_ids(-x.square()), at, kind="forward_kl"
    ),
    "score_centering": lambda x, at: score_centering(with_rest(with_ids(-x.exp())), with_ids(-x.square()), x, at),
}  # fmt: skip


#: Arguments by which a public function takes samples, a part of them, or a step of them.
OF_SAMPLES = {"local", "samples", "plan", "microbatch", "loss_masks", "prompt_ids"}
#: A proof of a plan, in tests/plain; dumps of log-probs, in tests/unit/audit; packs of a model, in tests/megatron.
ELSEWHERE = {"prove_step", "compare_log_probs", "check_packing"}


def public_name(name: str) -> Any:
    """A public name; None for one of Megatron's rooms where Megatron is not installed, as with another Python."""
    try:
        return getattr(megatron_rl_loss, name)
    except ImportError:
        if find_spec("megatron") is not None:
            raise
        return None


def public_functions_of(arguments: set[str]) -> set[str]:
    public = {name: public_name(name) for name in vars(megatron_rl_loss)["_HOME_OF"]}
    functions = {name: found for name, found in public.items() if inspect.isfunction(found)}
    return {name for name, found in functions.items() if arguments & set(inspect.signature(found).parameters)}


@pytest.mark.parametrize("name", sorted(public_functions_of(OF_SAMPLES) - ELSEWHERE))
def test_every_function_of_samples_has_guests(name: str) -> None:
    tables = FUNCTIONS if name in public_functions_of({"local"}) else OF_STEPS
    assert name in {row.split()[0] for row in tables}, f"{name}: add a row to the table, here or in OF_STEPS"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_sample_alone_and_behind_others(name: str) -> None:
    """The same bits: of a rollout its samples go together."""
    rng = random.Random(3)
    for n in range(20):
        before = [drawn(random.Random(f"before {n} {k}"), k) for k in range(6)] * (1 + 10 * (n % 2))
        before = [(mask, [t + 1000 * k for t in turns], f"b{session}", f"b{rollout}")
                  for k, (mask, turns, session, rollout) in enumerate(before)]  # fmt: skip
        own = [drawn(random.Random(f"own {n} {k}"), 1000 + k) for k in range(2 + n % 3)]
        own = [(mask, turns, "s", "r") for mask, turns, *_ in own]
        rows = values_of(rng, own)
        others = flat(values_of(rng, before))
        ours = flat([[0.0 if math.isnan(x) else x for x in row] for row in rows])
        alone = FUNCTIONS[name](ours, local_of(own))
        behind = FUNCTIONS[name](torch.cat([others.nan_to_num(7), ours]), local_of([*before, *own]))[len(others) :]
        assert torch.equal(alone, behind), (name, n, (alone - behind).abs().max())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_of_no_sample_there_is_nothing(name: str) -> None:
    """Of any filler zeros in the shape of its tokens, and no error on that rank alone; nothing is warned of."""
    fillers = [
        Samples([]),
        Samples([], prompt_ids=[], rollout_ids=[], ids={"turn": [], "session": []}),
        Samples([], layout=ZigzagTHD([0])),
        Samples([], layout=ZigzagTHD([0, 4, 8], filler_slots=2)),
        Samples([], layout=Gathered([0, 4], filler_slots=1), prompt_ids=[]),
        Samples([], layout=ZigzagBSHD(2, 4, filler_slots=2)),
    ]
    for samples in fillers:
        local = samples.local(0, 1)
        for values in (torch.zeros(local.loss_shapes[0]), torch.ones(local.loss_shapes[0])):
            found = FUNCTIONS[name](values, local)
            assert found.numel() == len(local)
            if name.split()[0] not in ("value_loss", "kl_estimate", "divergence_at_ids", "importance_weights"):
                assert not (found.flatten() * torch.from_numpy(local.mask.copy())).any()


# --- every function of a step, however the step is cut into micro-batches, with fillers between them

Step = list[tuple[Samples, Tensor]]  # samples of each micro-batch, and a value of each token


def planned(step: Step, mode: str = "turn_mean") -> Any:
    return plan_step([samples for samples, _ in step], mode, dp_group=None, divisor=7.0 if mode == "constant" else None)


def of_metric(over: str, kind: Any) -> Callable[[Step], Any]:
    def reduced(step: Step) -> Any:
        plan = planned(step)
        for microbatch, (_, values) in zip(plan, step, strict=True):
            metric = Metric(values.float(), over, kind=kind)
            microbatch.loss(values.float().requires_grad_(), {"x": metric})
        return torch.stack([plan.finish()["x"]])

    return reduced


def reduced_by_hand(step: Step) -> Tensor:
    totals = StepTotals.of(joined(step)[0], dp_group=None)
    return sum(
        (make_pg_loss_reducer("session_mean", samples, totals=totals)(x)[None] for samples, x in step), torch.zeros(1)
    )


def folded_by_hand(step: Step) -> Tensor:
    """One advantage for each token of the step."""
    samples, values = joined(step)
    rows = fold_into_advantages(list(values.split(samples.mask_lengths)), samples, mode="turn_mean", dp_group=None)
    return torch.cat([torch.zeros(0), *rows])


def kept(step: Step) -> Tensor:
    """A loss of the tokens above 0 alone, by their own counts."""
    plan = planned(step)
    values = {id(microbatch): x for microbatch, (_, x) in zip(plan, step, strict=True)}
    keep_tokens(plan, "above", lambda microbatch: values[id(microbatch)] > 0)
    terms = [{"x": Term(x.float().requires_grad_(), "session_mean", mask="above")} for _, x in step]
    return sum((mb.loss(term)[None] for mb, term in zip(plan, terms, strict=True)), torch.zeros(1))


def measured(step: Step) -> Tensor:
    plan = planned(step)
    values = {id(microbatch): x for microbatch, (_, x) in zip(plan, step, strict=True)}
    seen = measure_tokens(plan, lambda microbatch: values[id(microbatch)])
    return torch.tensor([seen.mean, seen.sum, *(seen.quantile(q) for q in (0.2, 0.9, 1.0))])


def largest_gap(step: Step) -> Tensor:
    gaps = [torch.zeros(1)]
    for microbatch, (_, values) in zip(planned(step), step, strict=True):
        microbatch.log_probs["before"] = (values + 1e-5 * values.sin()).float()
        gaps.append(pass_gap(microbatch, "before", values)[None])
    return torch.cat(gaps).amax(0, keepdim=True)


def survivors(step: Step) -> Tensor:
    """Of whole rollouts, which a cut between them leaves whole."""
    rows = []
    for samples, x in step:
        ids: Any = samples.ids.get("rollout", [])
        gate = Gate(high=1.2, level="rollout", aggregate="mean")
        rows += surviving_masks(samples.loss_masks, x.split(samples.mask_lengths), gate, rollout_ids=ids)
    return torch.cat([torch.zeros(0), *rows])


def of_prompts(function: Callable[..., Tensor], step: Step) -> Tensor:
    """Of the step's rollouts: the largest value of each sample as its reward."""
    rewards = [row.nan_to_num().abs().sum() for samples, x in step for row in x.split(samples.mask_lengths)]
    ids = [i // 6 for i in range(len(rewards))]
    return function([float(reward) for reward in rewards], ids)


def weights_of(mode: str, step: Step) -> Tensor:
    return torch.cat([microbatch.weights for microbatch in planned(step, mode)])


def whitened(per: str, step: Step) -> Tensor:
    local = [samples.local(0, 1) for samples, _ in step]
    return torch.cat(whiten_advantages([x for _, x in step], local, per=per, dp_cp_group=None))


def of_microbatches(function: Callable[..., Tensor], step: Step) -> Tensor:
    return torch.cat([function(x, mb).flatten() for mb, (_, x) in zip(planned(step), step, strict=True)])


#: A step -> numbers that do not depend on its cut: one for each token, for each sample, or for the step.
OF_STEPS: dict[str, Callable[[Step], Tensor]] = {
    **{
        f"plan_step {mode}": functools.partial(weights_of, mode)
        for mode in ("sample_mean", "session_mean", "turn_mean", "token_mean", "constant")
    },
    "weights_column": lambda step: torch.cat(
        [*weights_column("turn_mean", joined(step)[0], dp_group=None), torch.zeros(0)]
    ),
    "make_pg_loss_reducer": reduced_by_hand,
    "fold_into_advantages": folded_by_hand,
    "keep_tokens": kept,
    "measure_tokens": measured,
    "pass_gap": largest_gap,
    "surviving_masks": survivors,
    "tap": lambda step: torch.cat([tap(x.float(), "x", samples=samples) for samples, x in step]),
    **{
        f"a metric over {over}, {kind}": of_metric(over, kind)
        for over in ("samples", "tokens", "session", "turn", "none")
        for kind in ("mean", "max", "variance")
    },
    **{f"whiten_advantages per {per}": functools.partial(whitened, per) for per in ("step", "session", "turn")},
    **{
        function.__name__: functools.partial(of_prompts, function)
        for function in (group_relative_advantages, rloo_advantages, maxrl_advantages)
    },
    "gdpo_advantages": functools.partial(of_prompts, lambda rewards, ids: gdpo_advantages([rewards, rewards], ids)),
    # Statistics of a unit, and what is made of them, where the cut leaves the unit whole.
    **{
        f"{name}, whole units": functools.partial(of_microbatches, of)
        for name, of in FUNCTIONS.items()
        if name.split()[0] not in ("whiten_advantages", "divergence_at_ids", "score_centering")
    },
}


def joined(step: Step) -> tuple[Samples, Tensor]:
    """All samples of a step as one micro-batch."""
    masks = [mask for samples, _ in step for mask in samples.loss_masks]
    filled = [samples for samples, _ in step if len(samples)]
    turns = [row.tolist() for samples in filled for row in turns_of(samples)]
    ids = {"turn": turns, "session": [i for samples in filled for i in samples.ids["session"].tolist()]}
    rollouts = [i for samples in filled for i in samples.ids["rollout"].tolist()]
    return Samples(masks, ids=ids, rollout_ids=rollouts), torch.cat([x for _, x in step])


def turns_of(samples: Samples) -> list[Any]:
    parts = samples.parts["turn"]
    return np.split(np.append(parts.ids, -1)[parts.entry_parts], np.cumsum(samples.mask_lengths)[:-1])


def cut_into(given: list[One], rows: list[list[float]], places: list[int]) -> Step:
    """A step in micro-batches that begin at these places, some twice, so that there are fillers."""
    step = []
    for begin, end in itertools.pairwise([0, *places, len(given)]):
        samples = local_of(given[begin:end]).samples if end > begin else Samples([])
        step.append((samples, flat(rows[begin:end])))
    return step


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", OF_STEPS)
def test_a_step_is_the_same_however_it_is_cut(name: str) -> None:
    rng = random.Random(name)
    for n in range(6):
        given = [drawn(random.Random(f"{n} {k}"), k) for k in range(24)]
        # Weights of 1e-14 and 1e6 side by side leave the small ones no digits in a sum of the step.
        given = [([m and 0.1 + m % 0.7 for m in mask], turns, s, r) for mask, turns, s, r in given]
        rows = [[0.0 if math.isnan(x) else x for x in row] for row in values_of(rng, given)]
        whole = OF_STEPS[name](cut_into(given, rows, []))
        for _ in range(3):
            apart = 6 if "whole units" in name or name in ("surviving_masks",) else 1
            places = sorted(apart * rng.randint(0, 24 // apart) for _ in range(rng.randint(2, 6)))
            found = OF_STEPS[name](cut_into(given, rows, places))
            digits = 1e-12 if whole.dtype == torch.float64 else 2e-6
            torch.testing.assert_close(found, whole, rtol=digits, atol=digits)


def test_a_mean_of_means_depends_on_the_cut() -> None:
    """Negative control of the test above."""
    given = [drawn(random.Random(f"0 {k}"), k) for k in range(24)]
    rows = [[0.0 if math.isnan(x) else x for x in row] for row in values_of(random.Random(0), given)]
    whole, cut = (
        torch.stack([x.mean() for _, x in cut_into(given, rows, places)]).mean() for places in ([], [3, 4, 20])
    )
    assert (whole - cut).abs() > 1e-3


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name.startswith(("policy_loss", "segment_sum"))])
def test_a_filler_trains_on_nothing(name: str) -> None:
    """Its share has a graph, so backward runs on that rank as on the others, and a gradient of 0."""
    local = Samples([], layout=ZigzagTHD([0, 4], filler_slots=1)).local(0, 1)
    leaf = torch.ones(local.loss_shapes[0], requires_grad=True)
    FUNCTIONS[name](leaf, local).sum().backward()
    assert leaf.grad is not None
    assert not leaf.grad.any()


def test_units_that_no_sample_has_are_refused_on_a_fillers_rank_too() -> None:
    """Other ranks raise, and a rank that did not would wait for them in the next collective."""
    plan = plan_step([Samples([[1, 1]], ids={"turn": [[0, 1]]}), Samples([])], "sample_mean", dp_group=None)
    for microbatch, size in zip(plan, (2, 0), strict=True):
        segment_sum(torch.ones(size), microbatch, per="turn")
        with pytest.raises(ValueError, match="per='trun'"):
            segment_sum(torch.ones(size), microbatch, per="trun")
    (filler,) = plan_step([Samples([])], "sample_mean", dp_group=None)
    assert segment_sum(torch.ones(0), filler, per="turn").tolist() == []


@pytest.mark.parametrize("q", [0.07, 0.2, 0.3, 0.5, 0.9, 1.0])
def test_a_quantile_counts_flags_as_weights_of_1(q: float) -> None:
    """By their number, not by a running sum; in floating point 0.07 * 100 is above 7."""
    generator = torch.Generator().manual_seed(0)
    masks = [(torch.rand(n, generator=generator) < share).int() for n, share in ((100, 1), (37, 0.5), (9, 0), (1, 1))]
    values = torch.randn(147, generator=generator, dtype=torch.float64)
    of_flags, of_weights = (
        segment_quantile(values, Samples([mask.to(dtype) for mask in masks]).local(0, 1), q=q)
        for dtype in (torch.int32, torch.float64)
    )
    rows = [row[mask != 0] for row, mask in zip(values.split([100, 37, 9, 1]), masks, strict=True)]
    stated = [quantile_of([(x, 1.0) for x in row.tolist()], q) for row in rows]
    assert of_flags.tolist() == of_weights.tolist() == stated


def test_running_sums_of_a_unit_have_the_bits_of_the_unit_alone() -> None:
    values = torch.rand(5000, dtype=torch.float64) * torch.logspace(-9, 9, 5000, dtype=torch.float64)
    lengths = [1, 2, 37, 960, 4000]
    together = sums_within(values, torch.arange(5).repeat_interleave(torch.tensor(lengths)))
    for part, own in zip(together.split(lengths), values.split(lengths), strict=True):
        assert torch.equal(part, sums_within(own, torch.zeros(len(own), dtype=torch.int64)))
        assert part.tolist() == pytest.approx(own.cumsum(0).tolist(), rel=1e-14)
