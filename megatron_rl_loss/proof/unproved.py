"""A step that is not proved, in words."""

from megatron_rl_loss.core.carriers import find_form
from megatron_rl_loss.proof.outcomes import PROOF_VARIABLE, Losses, Outcome
from megatron_rl_loss.proof.step_state import StepState, unlike_in_words
from megatron_rl_loss.proof.terms import OfTerms

#: A loop of one's own may return any loss; `LossAggregation` refuses another one than `Microbatch.loss` made.
_UNTRAINED = (
    "the step trains on losses that no micro-batch of the plan handed out: its loss() was not called. Return the "
    "result of microbatch.loss(per_token_loss) unchanged; a loss that you weigh yourself must go through "
    "tap(per_token_loss, samples=...)."
)
#: What the caller of another form than those of Megatron's schedule is.
_FORMS_OF = {"loop": "for a loop without Megatron's schedule", "engine": "which is for another trainer"}
_CAUSE = "For the cause run: python -m megatron_rl_loss audit SCRIPT ..."


def line_of(outcome: str, text: str, aim: str, level: str) -> str:
    """What the first rank prints, or all ranks raise.

    Args:
        text: the reasons.
        aim: what was asked of which loss.
        level: as in `prove_step`.
    """
    if outcome == "unknown":
        return f"{aim}, NOT PROVED: {text}"
    if outcome == "unlike":
        stops = "All ranks aborted before the optimizer step (strict)."
        goes_on = stops if level == "strict" else f"Training goes on; {PROOF_VARIABLE}=strict aborts."
        return f"{aim}, NOT PROVED: {text}\n{goes_on}"
    if outcome == "wrong":
        stops = f"All ranks aborted before the optimizer step; {PROOF_VARIABLE}=warn trains on."
        goes_on = stops if level in ("error", "strict") else "Training goes on."
        return f"{aim} was expected, but the first training step does something else.\n{text}\n{goes_on}"
    why = "gradients of the step overflow" if outcome == "overflow" else "no token of the step has a gradient"
    return f"{aim}, not proved yet: {why}, so the next step is measured. {text}".rstrip()


def reasons(
    outcome: Outcome, losses: Losses, state: StepState, of_terms: OfTerms, *, never: str = "", remedy: str = ""
) -> str:
    """Why a step is wrong, unknown or without a gradient.

    Args:
        never, remedy: words, as in `FirstStep`.
    """
    if outcome == "wrong" and losses == "untrained":
        return never or _UNTRAINED
    if outcome == "wrong":
        forms = sorted(name for name in state.forms if find_form(name).caller != "schedule")
        returned = [f"Micro-batches returned form={name!r}, {_FORMS_OF[find_form(name).caller]}." for name in forms[:1]]
        unlike = [unlike_in_words(state)] * bool(state.all_parameters.unlike and state.factors)
        return "\n".join([*of_terms.faults, *unlike, *returned, remedy or _CAUSE])
    if outcome in ("wait", "overflow"):
        return " ".join(state.uncertain)
    if outcome == "unlike":
        return unlike_in_words(state)
    texts = [*state.unknown, *state.uncertain * (not state.factors), *of_terms.unknown]
    if losses == "unseen":
        texts.append("No loss went through a reducer or a tap of this library outside of compiled graphs.")
    if not texts:
        texts.append(f"Nothing was compared: {', '.join(of_terms.uncovered) or 'there is no loss'}.")
    return " ".join(dict.fromkeys(texts))
