"""The proof of the first training step: each token has the weight that was asked for, or all ranks abort.

The audit measures the step. Expected weights come from the masks and ids that the ranks gathered, never from a reducer.
After a step without a gradient, such as an overflow of fp16, the next step is measured.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_rl_loss.audit.judge import judge
from megatron_rl_loss.audit.launch import print_text
from megatron_rl_loss.audit.megatron.audit import Audit
from megatron_rl_loss.audit.schedules import run_schedules_by
from megatron_rl_loss.audit.tokens import StepTokens
from megatron_rl_loss.megatron.flags import PROOF_VARIABLE, ProofLevel, proof_level
from megatron_rl_loss.modes.names import Aggregation, resolve
from megatron_rl_loss.modes.table import Mode, ModeFunction
from megatron_rl_loss.reduction.taps import observe
from megatron_rl_loss.step.collectives import agree_on, attempt, raise_together, several, world_rank
from megatron_rl_loss.step.units import UnitCounting

Schedule = Callable[..., Any]

#: A loop of one's own may return any loss; `LossAggregation` refuses another one than `Microbatch.loss` made.
_NEVER = (
    "loss_func returned losses that no micro-batch handed out: neither its loss() nor its carry() was called. Return "
    "the result of microbatch.loss(per_token_loss) unchanged, made outside torch.compile; a loss that you weigh "
    "yourself must go through tap(per_token_loss, samples=...)."
)
_REMEDY = (
    "Give plan_step and prove_first_step one mode. Return what microbatch.loss(...) returned, all of it and unchanged; "
    "put a coefficient into a Term."
)


def prove_first_step(
    forward_backward_func: Schedule,
    mode: str | Mode | ModeFunction,
    *,
    divisor: float | None = None,
    units: UnitCounting | None = None,
    level: ProofLevel | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> Schedule:
    """Wrap Megatron's schedule so that its first training step is proved; for a loop of your own.

        forward_backward_func = prove_first_step(get_forward_backward_func(), "prompt_mean")

    The proof covers the policy loss and every term that names a mode. The first rank prints one line. A step with a
    gradient and without any loss of this library is a fault.

    Args:
        forward_backward_func: the schedule; all ranks call it together, with ``model=``.
        mode, divisor, units: as in `make_pg_loss_reducer`.
        level: ``error`` raises on every rank before the optimizer step, ``warn`` prints, ``off`` measures nothing;
            default: the environment's ``MEGATRON_RL_LOSS_PROOF``, else ``error``.
        pg_collection: the process groups; default: the model's, else Megatron's parallel state.

    Raises:
        ValueError, TypeError: unusable settings.
        BadBatchError: on every rank, in the first training step, for wrong weights, or none from this library.
    """
    asked, words = resolve(mode, divisor=divisor, units=units), {"never": _NEVER, "remedy": _REMEDY}
    proof = FirstStep(asked, "the policy loss", level=proof_level(level), pg_collection=pg_collection, **words)

    @wraps(forward_backward_func)
    def proved(*args: Any, **kwargs: Any) -> Any:
        with proof.step(kwargs["model"], trains=not kwargs.get("forward_only")):
            return forward_backward_func(*args, **kwargs)

    return proved


def prove_engine(
    asked: Aggregation | None,
    loss: str,
    *,
    is_ours: Callable[[], bool] = lambda: True,
    each_model: bool = False,
    **words: Any,
) -> "FirstStep":
    """The proof of the next training step of this process, at the environment's level; `words` as in `FirstStep`.

    Args:
        is_ours: returns True, on all ranks alike, if the call of a schedule trains the policy.
        each_model: prove the next step of each model; a process may hold an actor and a critic.
    """
    proof = FirstStep(asked, loss, level=proof_level(), **words)
    proofs: WeakKeyDictionary[Any, FirstStep] = WeakKeyDictionary()  # an address is used again

    def run(schedule: Schedule, *args: Any, **kwargs: Any) -> Any:
        model = kwargs["model"]
        chunk = model[0] if isinstance(model, list) else model
        own = proofs.setdefault(chunk, copy(proof)) if each_model else proof
        with own.step(model, trains=not (proof.is_over or kwargs.get("forward_only")) and is_ours()):
            result = schedule(*args, **kwargs)
        if proof.is_over:
            put_back()
        return result

    put_back = run_schedules_by(run)
    return proof


class FirstStep:
    """The proof of a process's first training step, with a `with` around each call of the schedule.

    Args:
        asked: the aggregation of the policy loss, and of terms that declare none. It may change until a step is proved.
        loss: words for the policy loss in the printed line.
        level: as in `prove_first_step`.
        pg_collection: the process groups; default: the model's, else Megatron's parallel state.
        beside: words for parts of the loss that are not proved, appended to the line.
        never: words for a step with a gradient and without any tapped loss, which is a fault then. Without `never` the
            step is not proved, and the next one is measured.
        remedy: words for wrong weights, appended to the report.

    Attributes:
        group_size: number of samples of each prompt that the engine was told to generate, if known.
        terms: names of terms that each micro-batch must have exactly once; otherwise a fault.
        outcome: of the last measured step, on all ranks: ``wrong``, ``unknown``, ``later`` or ``proved``.
        is_over: no further step is measured.
    """

    def __init__(
        self,
        asked: Aggregation | None,
        loss: str,
        *,
        level: str = "error",
        pg_collection: ProcessGroupCollection | None = None,
        beside: str = "",
        never: str = "",
        remedy: str = "",
    ) -> None:
        self.asked, self._loss, self._level, self._pg_collection = asked, loss, level, pg_collection
        self._beside, self._never, self._remedy = beside, never, remedy
        self.outcome, self.terms = "", list[str]()
        self.group_size: int | None = None
        self.is_over = level == "off"

    @property
    def _aim(self) -> str:
        return self._loss if self.asked is None else f"{self.asked} on {self._loss}"

    def give_up(self, why: str) -> None:
        """Print on the first rank that nothing is proved; all ranks call it."""
        self.is_over, self.outcome = True, "unknown"
        if not world_rank():
            print_text(f"megatron_rl_loss: {self._aim}, NOT PROVED: {why}")

    @contextmanager
    def step(self, model: Any, *, trains: bool = True) -> Iterator[None]:
        """A ``with`` around the schedule's call. Raises BadBatchError at its end, or once gradients are finalised."""
        if self.is_over or not trains:
            yield
            return
        audit = Audit(model, pg_collection=self._pg_collection, then=lambda failure: self._conclude(audit, failure))
        with observe(aggregation=self.asked), audit:
            yield

    def _conclude(self, audit: Audit, failure: Exception | None) -> None:
        """Print the line or raise, on every rank."""
        groups = several(audit._groups.dp_cp, audit._groups.tp, audit._groups.pp)
        finding: Any = failure or ("", "")
        if audit.steps and failure is None:
            finding = attempt(lambda: self._finding(audit))
        if isinstance(finding, Exception):
            if not isinstance(finding, ValueError):  # no limit of the proof but an error in it: training goes on
                traceback.print_exception(finding)
            finding = "unknown", f"{self._aim}, NOT PROVED: {type(finding).__name__}: {finding}"
        found, text = finding
        kinds = agree_on([found], ["wrong", "unknown", "later", "proved"], groups)
        waited, self.outcome = self.outcome == "later", next(iter(kinds), "")
        self.is_over = "later" not in kinds
        if "wrong" in kinds and self._level == "error":
            raise_together(True, ValueError(text) if found == "wrong" else None, groups)
        if found and not (found == "later" and waited):
            print_text(f"megatron_rl_loss: {text}")

    def _finding(self, audit: Audit) -> tuple[str, str]:
        """The outcome (wrong, unknown, later or proved) and its text, on the first rank."""
        modes: list[str] = []
        reports: list[str] = []
        unknown: list[str] = []
        facts, tokens = next(iter(audit.steps.values())).facts, None
        for name, step in audit.steps.items():
            if name != "pg" and "expected" not in step.facts:
                continue  # a term of the user's own
            loss = self._loss if name == "pg" else name
            if step.facts.get("coefficient") == 0:
                modes.append(f"a coefficient of 0 on {loss}")
                continue
            expected, tokens = audit.expected_of(name), step.tokens if tokens is None else tokens
            if name == "pg" and step.facts.get("undeclared_term"):
                unknown.append(f"The coefficient of {loss} is not known.")
                continue
            verdict = judge(step, expected)
            if verdict.unknown or expected is None:
                unknown.append(verdict.unknown[0] if verdict.unknown else f"The mode of {loss} is not known by name.")
            elif verdict.sound:
                modes.append(f"{expected} on {loss}")
            else:
                reports.append(f"On {loss}: {verdict}")
        reports += [self._remedy] * bool(self._remedy and reports)
        reports += facts["faults"]
        for name in self.terms:
            if name not in audit.steps or f"{name}#2" in audit.steps:
                where = "several times in a micro-batch" if name in audit.steps else "in no micro-batch"
                reports.append(f"The {name} term went through a reducer of this library {where}.")
        if self._never and facts["has_gradient"] and not facts["has_taps"]:
            reports = [self._never]
        if reports:
            says = f"{self._aim} was asked, and the first training step does something else."
            stops = f"All ranks aborted before the optimizer step; {PROOF_VARIABLE}=warn trains on."
            return "wrong", "\n".join([says, *reports, stops if self._level == "error" else "Training goes on."])
        is_masked = facts["has_parts"] and not any(step.tokens.mask.any() for step in audit.steps.values())
        if not facts["has_gradient"] or not facts["has_taps"] or is_masked:
            lacks = "no tapped loss" if facts["has_gradient"] and not facts["has_taps"] else "no gradient"
            return "later", f"{self._aim}, not proved yet: the step has {lacks}, so the next one is measured"
        if unknown or tokens is None:
            why = " ".join(dict.fromkeys(unknown)) or "No loss went through a reducer of this library."
            return "unknown", f"{self._aim}, NOT PROVED: {why}"
        beside = f"; {self._beside}" * bool(self._beside)
        return "proved", f"{', '.join(modes)}, proved on {_sizes(tokens, self.group_size)}{beside}; masks as given"


def _sizes(tokens: StepTokens, group_size: int | None) -> str:
    """The step in numbers, which people compare with their intentions."""
    number = len(np.unique(tokens.sample))
    says = f"{np.count_nonzero(tokens.mask):,} tokens of {number:,} samples"
    if "prompt" not in tokens.ids:
        return says
    _, first = np.unique(tokens.sample, return_index=True)
    _, sizes = np.unique(tokens.ids["prompt"][first], return_counts=True)
    of_sizes = f"{sizes.min()}" if sizes.min() == sizes.max() else f"{sizes.min()} to {sizes.max()}"
    promised = f" (generated: {group_size} each)" if group_size and {*sizes.tolist()} != {group_size} else ""
    return f"{says}, {len(sizes):,} prompts of {of_sizes}{promised}"
