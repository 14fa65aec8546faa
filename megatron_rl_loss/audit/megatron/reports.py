"""What each rank has to say of a measured step, and what all of them together make of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_rl_loss.audit.assembly import Part, measured_step
from megatron_rl_loss.audit.megatron.anchor import Factor
from megatron_rl_loss.audit.tokens import MeasuredStep, Split
from megatron_rl_loss.modes.names import Aggregation
from megatron_rl_loss.reduction.taps import DeclaredTerm

_ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-18}
#: The term that is measured where nothing was tapped: what the model returned to the loss function.
OUTPUT = "output"
NO_TAP = (
    "Nothing was tapped. Write per_token_loss = tap(per_token_loss, samples=...) in the loss function, before masks "
    "and means (from megatron_rl_loss import tap). Without it only the derivative by the model's output is "
    "seen: under PPO that is the weight times advantage and ratio, and 0 for clipped tokens."
)


@dataclass
class Report:
    """What a rank has to say of a step; sent to the first rank."""

    stage: int
    factors: list[Factor] = field(default_factory=list)
    loss_scale: float = 1.0
    num_microbatches: int = 0
    terms: dict[str, list[Part]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    loss_dtypes: list[str] = field(default_factory=list)
    auxiliary: dict[str, list[float]] = field(default_factory=dict)  # scales of each micro-batch, by setting


def assembled(reports: Sequence[Report], split: Split) -> dict[str, MeasuredStep]:
    """What all ranks said, by term."""
    factor, problems, notes = _agreed(reports)
    unknown = [*(text for report in reports for text in report.unknown), *problems]
    notes = [*(note for report in reports for note in report.notes), *notes]
    reporting = [report for report in reports if report.num_microbatches]
    dtypes = reporting[0].loss_dtypes if reporting else []
    facts: dict[str, Any] = {"loss_dtypes": dtypes} if dtypes else {}
    scale = reporting[0].loss_scale if reporting else 1.0
    if factor is not None:
        facts |= {
            "factor": factor.value,
            "anchor": factor.name,
            "residual": factor.residual,
            "residual_by_rounding": factor.rounding,
            "uncertainty": factor.uncertainty,
            "loss_scale": scale,
        }
    facts["rounding"] = _coarsest(dtypes, facts.get("uncertainty", 0.0))
    value = 1.0 if factor is None or unknown else factor.value / scale
    if unknown:
        notes.append("Weights are up to one factor that is not known.")
    elif len(reporting) < split.dp_size * split.cp_size:
        unknown.append("Some ranks of the last pipeline stage computed no loss.")
    parts: dict[str, list[Part]] = {}
    for report in reports:
        for term, of_term in report.terms.items():
            parts.setdefault(term, []).extend(of_term)
    described = {one.place for of_term in parts.values() for one in of_term if one.rows is not None}
    if factor is not None and not unknown:
        by_setting = _auxiliary(reporting, parts, value, split)
        facts |= {"auxiliary": by_setting} if by_setting else {}
        for name, (low, high) in by_setting.items():
            if max(abs(low - 1), abs(high - 1)) > _ROUNDING[facts["rounding"]]:
                weigh = f"{low:.4g}" if high - low < 1e-5 * high else f"{low:.4g} to {high:.4g}"
                notes.append(f"Of {name} the auxiliary loss weighs {weigh} times what it should.")
    steps = {}
    for term in [term for term, of_term in parts.items() if any(one.reached for one in of_term)] or [*parts] or ["pg"]:
        of_term = [part for part in parts.get(term, []) if part.place in described]
        told = [part.declared for part in of_term if part.declared is not None]
        steps[term] = measured_step(
            of_term,
            value,
            split,
            unknown=tuple(dict.fromkeys([*[NO_TAP] * (term == OUTPUT), *unknown])),
            notes=tuple(dict.fromkeys(notes)),
            facts=facts | (told[0] if told and all(one == told[0] for one in told) else {}),
        )
    return steps


def _auxiliary(
    reports: Sequence[Report], parts: Mapping[str, Sequence[Part]], factor: float, split: Split
) -> dict[str, tuple[float, float]]:
    """What auxiliary losses weigh of what they should, lowest and highest, by the setting that turns them on.

    With per-token loss they should be divided by the active tokens of the step, as each micro-batch's was multiplied by
    its own; else averaged over micro-batches and ranks, as in one call of Megatron's schedule.
    """
    of_policy = parts.get("pg", next(iter(parts.values()), []))
    tokens = sum(int(np.count_nonzero(part.rows.mask)) for part in of_policy if part.rows is not None)
    denominator = tokens if split.per_token else split.dp_size * split.cp_size
    by_setting: dict[str, list[float]] = {}
    for report in reports:
        for name, scales in report.auxiliary.items():
            by_setting.setdefault(name, []).extend(scale * factor * denominator for scale in scales)
    return {name: (min(values), max(values)) for name, values in by_setting.items()}


def shown(aggregation: Aggregation) -> dict[str, Any]:
    """What can be sent of it, and be written as JSON; a mode of the user's own is a name."""
    return {"mode": aggregation.mode.name, "divisor": aggregation.divisor, "units": aggregation.units}


def declared(term: DeclaredTerm) -> dict[str, Any]:
    """The same of a term's own aggregation and coefficient, as facts."""
    return {"expected": shown(term.aggregation), "coefficient": float(term.coef)}


def _coarsest(dtypes: Sequence[str], uncertainty: float) -> str:
    """The floating-point type whose rounding the weights have: of the losses, or of the factor if that is coarser."""
    coarser = {"bfloat16": 2.0**-11, "float16": 2.0**-18, "float32": -1.0}  # where the factor is as uncertain as this
    return next(name for name, least in coarser.items() if name in dtypes or not uncertainty <= least)


def _agreed(reports: Sequence[Report]) -> tuple[Factor | None, list[str], list[str]]:
    """The factor of the stage that computes the loss, what is wrong with it, and what to know of the others."""
    last = max(report.stage for report in reports)
    factors = [(report.stage, factor) for report in reports for factor in report.factors]
    of_loss = [factor for stage, factor in factors if stage == last]
    if not of_loss:
        return None, [], []
    sound = [factor for factor in of_loss if not factor.problem]
    if not sound:
        return of_loss[-1], [unreadable(of_loss[-1].problem)], []
    reference = sound[-1]
    problems, notes = [], []
    for stage, factor in factors:
        if factor.problem and factor.residual > factor.rounding:
            problems.append(unreadable(factor.problem))
        elif factor.problem:
            notes.append(f"Of pipeline stage {stage} no factor could be read: {factor.problem}.")
        elif abs(factor.value / reference.value - 1) > factor.rounding + reference.rounding:
            problems.append(
                f"Gradients of {factor.name} on pipeline stage {stage} are multiplied by {factor.value:.6g}, those of "
                f"{reference.name} on stage {last} by {reference.value:.6g}: no weight holds for all parameters."
            )
    return reference, problems, notes


def unreadable(why: str) -> str:
    return f"The factor of gradients cannot be read: {why}."
