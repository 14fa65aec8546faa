"""`Report`: one rank's part of a measured step; and the `MeasuredStep` of each term from all reports."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_rl_loss.audit.assembly import Part, SampleArrays, differ_over_cp, measured_step
from megatron_rl_loss.audit.megatron.anchor import Factor
from megatron_rl_loss.audit.tokens import MeasuredStep, Split
from megatron_rl_loss.modes.names import Aggregation
from megatron_rl_loss.reduction.taps import TappedLosses
from megatron_rl_loss.step.samples import Samples

DYNAMIC_CP = "Context-parallel groups change: DP is the first rank of a group, micro-batch its size and turn."


@dataclass
class Report:
    """One rank's part of a measured step, which is sent to the first rank."""

    stage: int
    factors: list[Factor]  # of each model chunk that has one
    unknown: list[str]
    faults: list[str] = field(default_factory=list)  # further reasons, which are faults of the step
    has_gradient: bool = True  # finite ones, not all 0
    has_taps: bool = False
    num_microbatches: int = 0  # whose loss this rank computed; 0 on ranks that add no tokens
    terms: dict[str, list[Part]] = field(default_factory=dict)
    dtypes: set[str] = field(default_factory=set)  # of the losses
    tokens: tuple[int, int] = (0, 0)  # numbers of the model's ids that were compared with the samples', and that differ
    only_tapped: int = 0  # number of the model's ids that had none of the samples to be compared with
    not_finite: list[str] = field(default_factory=list)  # places whose losses had gradients that are not finite

    def add(
        self,
        term: str,
        tapped: TappedLosses | None,
        samples: Samples,
        cp_size: int,
        asked: Aggregation | None,
        **place: int,
    ) -> None:
        """Add a term's tokens of a micro-batch; `tapped` is None if the term was not tapped there.

        `asked` is the policy loss's aggregation, compared here since functions cannot be sent to the first rank. A term
        may have a mask of its own, over the same tokens as the others.
        """
        losses = tapped or TappedLosses((0,), torch.float32)  # without a gradient
        own = samples if losses.samples is None else losses.samples
        local = own.local(place["cp_rank"], cp_size)
        if tapped:
            self.dtypes.add(str(losses.dtype).removeprefix("torch."))
        sizes = {one.numel() for one in (losses.tokens, *losses.log_probs) if one is not None}
        if tapped and (sizes | {math.prod(losses.shape)}) != {len(local)}:
            given, held = f"losses of shape {losses.shape} and values {sorted(sizes)}", f"{len(local)} tokens"
            remedy = "Tap one loss per token, in the layout's order, or correct the layout."
            self.unknown.append(f"Term {term!r} was tapped with {given}; by its layout the rank holds {held}. {remedy}")
            return
        if losses.tokens is not None and own.tokens is not None:
            cut = local.of(torch.as_tensor(own.tokens, device=losses.tokens.device).reshape(-1))
            compared, differ = self.tokens
            self.tokens = compared + len(local), differ + int((cut != losses.tokens).sum())
        elif losses.tokens is not None:
            self.only_tapped += len(local)
        if losses.gradient is not None and not losses.gradient.isfinite().all():
            self.not_finite.append("DP {dp_rank}, micro-batch {microbatch}, CP {cp_rank}".format(**place))
        declared: dict[str, Any] = {}
        if losses.coef is not None and math.isnan(losses.coef):
            declared["undeclared_term"] = True
        elif losses.coef is not None:
            declared["coefficient"] = float(losses.coef)
        if losses.aggregation is not None:
            declared["expected"] = shown(losses.aggregation)
            if losses.aggregation == asked:
                declared["as_policy"] = True
        part = Part(
            **place,
            samples=None if place["cp_rank"] else SampleArrays.of(own.local(0, cp_size)),
            positions=local.positions,
            gradients=np.zeros(len(local)) if losses.gradient is None else losses.gradient.cpu().numpy(),
            reached=losses.gradient is not None,
            declared=declared or None,
            log_probs=np.stack([one.cpu() for one in losses.log_probs]) if losses.log_probs else None,
        )
        self.terms.setdefault(term, []).append(part)


def assembled(
    reports: Sequence[Report], groups: ProcessGroupCollection, config: Any, loss_scale: float, *, dynamic_cp: bool
) -> dict[str, MeasuredStep]:
    """The measured steps, by term."""
    parts: dict[str, list[Part]] = {}
    for term, of_term in chain.from_iterable(report.terms.items() for report in reports):
        parts.setdefault(term, []).extend(of_term)
    terms = [term for term, of_term in parts.items() if any(one.reached for one in of_term)] or [*parts] or ["pg"]
    policy = "pg" if "pg" in terms else terms[0]
    factor, unknown, faults = _agreed_factor(reports)
    compared, differ = (sum(one.tokens[i] for one in reports) for i in (0, 1))
    not_finite = [place for report in reports for place in report.not_finite]
    if (faults or unknown) and not_finite:
        unknown.append(f"Gradients of losses are NaN or infinite at {'; '.join(not_finite[:3])}.")
    if differ:
        faults.append(f"The layout or the batch given is not the model's: {differ} of {compared} tokens differ.")
    if any(map(differ_over_cp, parts.values())):
        faults.append("Context-parallel ranks scale the gradients of a gathered token differently.")
    if sum(one.num_microbatches > 0 for one in reports) < groups.dp_cp.size():
        unknown.append("Some ranks of the last pipeline stage computed no loss.")
    unknown = faults + unknown
    sizes = {f"{name}_size": getattr(groups, name).size() for name in ("dp", "cp", "tp", "pp")}
    if dynamic_cp:
        sizes |= {"dp_size": groups.dp_cp.size(), "cp_size": 1}
    split = Split(num_microbatches=max(one.num_microbatches for one in reports), **sizes)
    # An auxiliary loss goes through no loss function: on average over ranks, or tokens, it weighs 1.
    masks = [part.samples.mask for part in parts.get(policy, []) if part.samples is not None]
    counted = sum(map(np.count_nonzero, masks)) if config.calculate_per_token_loss else groups.dp_cp.size()
    notes = [DYNAMIC_CP] * dynamic_cp + _auxiliary_losses(config, factor.value * counted, 1e-3 + factor.rounding)
    if only := sum(one.only_tapped for one in reports):
        notes.append(f"{only} input ids were tapped and could not be compared: give Samples(tokens=...), too")
    facts: dict[str, Any] = {"factor": factor.value, "anchor": factor.name, "loss_scale": loss_scale}
    has_gradient = not not_finite and all(one.has_gradient for one in reports)
    facts |= {"faults": list(dict.fromkeys(faults)), "has_gradient": has_gradient, "has_parts": bool(parts)}
    facts["has_taps"] = any(one.has_taps for one in reports)
    facts["rounding"] = _rounding({dtype for report in reports for dtype in report.dtypes}, factor.uncertainty)
    if compared:
        facts["tokens_compared"] = compared
    # A rank that never taps a term gives its tokens no weight by it.
    held = {(*part.place, part.cp_rank): part for of_term in parts.values() for part in of_term}
    held |= {(*one.place, 0): one for of_term in parts.values() for one in of_term if one.samples is not None}
    nothing = {at: replace(part, gradients=0 * part.gradients, declared=None) for at, part in held.items()}
    described = {one.place for one in held.values() if one.samples is not None}
    steps = {}
    for term in terms:
        own_parts = nothing | {(*part.place, part.cp_rank): part for part in parts.get(term, [])}
        of_term = [part for part in own_parts.values() if part.place in described]
        declared = [part.declared or {} for part in parts.get(term, []) if part.reached]
        agree = all(one == declared[0] for one in declared)
        own = declared[0] if agree and declared and declared[0] else {"undeclared_term": term != policy}
        apart = [] if agree else [f"Ranks or micro-batches declare {term!r} differently: {declared[:4]}."]
        said = {"unknown": tuple(dict.fromkeys(unknown + apart)), "notes": tuple(notes), "facts": facts | own}
        steps[term] = measured_step(of_term, 1.0 if unknown else factor.value / loss_scale, split, **said)
    return steps


def _agreed_factor(reports: Sequence[Report]) -> tuple[Factor, list[str], list[str]]:
    """The factor of the last stage that has one, the reasons against a verdict, and those that are faults."""
    unknown = [text for report in reports for text in report.unknown]
    faults = [text for report in reports for text in report.faults]
    factors = sorted(((one.stage, factor) for one in reports for factor in one.factors), key=lambda one: one[0])
    stage, last = factors[-1] if factors else (0, Factor())
    for at, one in factors:
        if abs(one.value / last.value - 1) > one.rounding + last.rounding:
            apart = f"{one.value:.6g} on pipeline stage {at} ({one.name}), {last.value:.6g} on stage {stage}"
            faults.append(f"Gradients are multiplied by {apart}: no weight holds for all parameters.")
    return last, unknown, faults


def _auxiliary_losses(config: Any, weight: float, rounding: float) -> list[str]:
    """A note on MoE and multi-token losses if their weight is not 1, as it should be."""
    moe = ("moe_aux_loss_coeff", "moe_z_loss_coeff") if config.num_moe_experts else ()
    names = [name for name in (*moe, "mtp_num_layers") if np.any(getattr(config, name, None) or 0)]
    if not names or not abs(weight - 1) > rounding:
        return []
    says = f"weigh {weight:.4g} times what they should: the factor at the step's end scales them too."
    return [f"Auxiliary losses ({', '.join(names)}) {says}"]


def shown(aggregation: Aggregation) -> dict[str, Any]:
    """The aggregation as plain data; a mode of the user's becomes its name."""
    return {"mode": aggregation.mode.name, "divisor": aggregation.divisor, "units": aggregation.units}


def _rounding(dtypes: set[str], uncertainty: float) -> str:
    """The type whose rounding the weights have: that of the losses, or a coarser one if the factor is uncertain."""
    if "bfloat16" in dtypes or not uncertainty <= 2.0**-11:
        return "bfloat16"
    return "float16" if "float16" in dtypes or not uncertainty <= 2.0**-18 else "float32"
