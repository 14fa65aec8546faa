"""What a step is, in a line that shows at a glance what no check can: wrong ids, masks or numbers of ranks."""

from megatron_rl_loss.modes.names import Aggregation
from megatron_rl_loss.step.totals import StepTotals


def summarize(totals: StepTotals) -> dict[str, float]:
    """The step in numbers that a logger can take; counts that are not known on this rank are left out."""
    rollouts, prompts = totals.rollouts, totals.prompts
    known: dict[str, float | None] = {
        "rollouts": rollouts.all,
        "active_rollouts": rollouts.active,
        "prompts": prompts.all,
        "tokens": totals.step_entries,
        "active_tokens": totals.step_active_tokens,
    }
    return {name: value for name, value in known.items() if value is not None}


def describe_step(
    aggregation: Aggregation, totals: StepTotals, *, num_microbatches: int, dp_size: int, cp_size: int
) -> str:
    """The line of the log for a step: what was asked for, what there is of it, how it is split."""
    counts = summarize(totals)
    parts = []
    if "rollouts" in counts:
        parts.append(f"{counts['rollouts']:,.0f} rollouts")
    if counts.get("prompts"):
        parts.append(f"{counts['prompts']:,.0f} prompts ({counts['rollouts'] / counts['prompts']:.1f} each)")
    if {"tokens", "active_tokens"} <= counts.keys():
        parts.append(f"{counts['active_tokens']:,.0f} of {counts['tokens']:,.0f} tokens active")
    if {"rollouts", "active_rollouts"} <= counts.keys():
        parts.append(f"{counts['rollouts'] - counts['active_rollouts']:,.0f} rollouts fully masked")
    split = f"{num_microbatches} micro-batches x DP {dp_size}, CP {cp_size}"
    return " | ".join([aggregation.describe(), ", ".join(parts) or "counts not known on this rank", split])
