"""The proof of a loop of one's own over Megatron's schedule."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from megatron_rl_loss.core.collectives import Group, check_together
from megatron_rl_loss.core.errors import only_if
from megatron_rl_loss.core.plan import Plan
from megatron_rl_loss.megatron.proving import MegatronFirstStep, facts_of
from megatron_rl_loss.proof.exchange import Exchange
from megatron_rl_loss.proof.first_step import Stated
from megatron_rl_loss.proof.megatron_step import LEFT, before_forward, fresh_failure
from megatron_rl_loss.proof.outcomes import ProofLevel
from megatron_rl_loss.proof.reduced_ranks import counted_by, uncounted
from megatron_rl_loss.proof.schedules import chunks_of

_REMEDY = "Return what microbatch.loss(...) returned, all of it and unchanged; put a coefficient into a Term."
_STATED = (
    "prove_step(..., optimizer=..., loss_scale=...) of a Megatron model: its DDP holds its parameters, and its config "
    "the loss scale. Leave both out."
)


class MegatronProof:
    """The proofs of a model's steps, one of each claim, and a look at gradients before each and the step after it."""

    def __init__(self) -> None:
        self._firsts, self._was_measured = dict[str, MegatronFirstStep](), False
        self._over: list[Group] = []  # the model's groups, of which its first step tells

    @contextmanager
    def step(self, model: Any, plan: Plan, level: Callable[[], ProofLevel], stated: Stated) -> Iterator[None]:
        claim = plan.record.modes.describe()
        if claim not in self._firsts:
            self._firsts[claim] = check_together(lambda: self._begun(model), plan.record.groups.all)
        first, over = self._firsts[claim], self._over
        if not first.is_agreed:  # before any other collective: ranks of other levels would wait for each other
            first.agree(over, level)
        counted = set[int]() if first.is_over else counted_by(plan.record.groups)
        twice = _STATED if stated.optimizer is not None or stated.loss_scale != 1 else ""
        is_looked_at = self._was_measured and first.is_over and first.level != "off"  # a step that is not measured
        self._was_measured = not first.is_over
        chunks, left = chunks_of(model), list[Exception | None]()
        with ExitStack() as stack:
            if is_looked_at:
                stack.enter_context(first.leaving())
                stack.enter_context(before_forward(lambda: left.append(fresh_failure(chunks))))
            check = lambda: twice or uncounted(model, counted) or stated.fault()  # noqa: E731
            stack.enter_context(first.step(model, plan=plan.record.use, check=check))
            yield
        if is_looked_at and Exchange().agree(only_if(any(left), ["left"]), ["left"], over):
            first.tell_left(next((str(failure) for failure in left if failure), LEFT))

    def _begun(self, model: Any) -> MegatronFirstStep:
        """The proof of a claim."""
        groups, _ = facts_of(model)
        self._over = groups.all
        return MegatronFirstStep(None, "the policy loss", remedy=lambda wrong, factor: _REMEDY, is_own_loop=True)
