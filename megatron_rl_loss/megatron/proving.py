"""The proof of a step under Megatron's schedule: a model's groups, and what a launch makes unmeasurable."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron_rl_loss.core.aggregation import Aggregation
from megatron_rl_loss.core.collectives import Group, ModelGroups, check_together, gather_objects
from megatron_rl_loss.core.record import PlanUse
from megatron_rl_loss.megatron.flags import REMAT_SIZES, has_cuda_graphs
from megatron_rl_loss.megatron.model_settings import groups_of
from megatron_rl_loss.megatron.packing import watch_packs
from megatron_rl_loss.proof.findings import WRONG, Finding, Verdict
from megatron_rl_loss.proof.first_step import FirstStep
from megatron_rl_loss.proof.megatron_step import MegatronStep
from megatron_rl_loss.proof.schedules import chunks_of


def facts_of(model: Any, pg_collection: ProcessGroupCollection | None = None) -> tuple[ModelGroups, list[str]]:
    """The groups of a model, or list of chunks, and reasons why a step of it cannot be measured: of `MegatronStep`.

    Args:
        pg_collection: the process groups; default: the model's, else Megatron's parallel state.
    """
    chunk = chunks_of(model)[0]
    groups = groups_of(chunk, pg_collection)
    return groups, _cannot_know(get_model_config(chunk), groups)


class MegatronFirstStep(FirstStep):
    """`FirstStep` of a Megatron model, whose ``step`` is around the call of the schedule.

    It also refuses packs in which the state of a layer runs from one sample into the next (`packing`): the weights of
    tokens are right there, and what the model makes of them is not.

    Args:
        asked, loss, further: as of `FirstStep`.
        pg_collection: as of `facts_of`.
        is_own_loop, is_of_engine: as of `MegatronStep`.
    """

    def __init__(
        self,
        asked: Aggregation | None,
        loss: str,
        *,
        pg_collection: ProcessGroupCollection | None = None,
        is_own_loop: bool = False,
        is_of_engine: bool = False,
        **further: Any,
    ) -> None:
        #: What packs of the step that runs lack on this rank; None once a step showed that they lack nothing.
        self._faults: Sequence[str] | None = ()

        def measure(model: Any, plan: PlanUse | None, then: Callable[[Exception | None], None]) -> MegatronStep:
            groups, unknown = facts_of(model, pg_collection)

            def conclude(failure: Exception | None) -> None:
                measured.findings += [Finding(WRONG, fault) for fault in self._faults or ()]
                then(failure)
                self._faults = None

            measured = MegatronStep(
                model, groups, unknown=unknown, is_own_loop=is_own_loop, is_of_engine=is_of_engine, plan=plan,
                then=conclude,
            )  # fmt: skip
            return measured

        def groups_that_agree(model: Any, plan: PlanUse | None) -> list[Group]:
            groups, _ = facts_of(model, pg_collection)
            return groups.all

        super().__init__(asked, loss, measure=measure, groups_of=groups_that_agree, **further)

    @contextmanager
    def step(self, model: Any, *, trains: bool = True, plan: PlanUse | None = None, **further: Any) -> Iterator[None]:
        if trains and not self.is_agreed:
            self.agree(self._groups_of(model, plan))
        if not trains or self.level == "off" or self._faults is None:
            with super().step(model, trains=trains, plan=plan, **further):
                yield
            return
        with ExitStack() as stack:
            self._faults = check_together(lambda: stack.enter_context(watch_packs(model)), self._groups)
            with super().step(model, trains=trains, plan=plan, **further):
                yield
            if self._faults is not None:  # the step was not measured
                self._refuse_packs(plan)

    def _refuse_packs(self, plan: PlanUse | None) -> None:
        """Raise or print what packs lack, on any rank: a pipeline stage has layers of its own. All ranks call it."""
        faults = list(self._faults or ())
        for group in self._groups:
            faults = [*dict.fromkeys(fault for rank_faults in gather_objects(faults, group) for fault in rank_faults)]
        asked = self.asked or (None if plan is None else plan.policy)
        verdict = Verdict([Finding(WRONG, fault) for fault in faults], self.aim(asked))
        self._faults = () if verdict.outcome.stops(self.level) else None  # after a refusal the next step is looked at
        if faults:
            self._tell(verdict.line(self.level), stops=verdict.outcome.stops(self.level))


def _cannot_know(config: Any, groups: ModelGroups) -> list[str]:
    """Reasons against a verdict in the config: hooks that do not run, groups and reductions that are not followed."""
    finalize = config.finalize_model_grads_func
    has_remat = any((getattr(config, name, 1) or 1) > 1 for name in REMAT_SIZES)
    reasons = []
    if has_cuda_graphs(config):
        reasons.append("CUDA graphs replay a backward pass without its hooks. Audit a step without CUDA graphs.")
    if has_remat:
        reasons.append("Weight-rematerialising TP (GTP) reduces over further groups, which the audit does not follow.")
    if finalize is None and groups.dp_cp.size() > 1:
        reasons.append("The schedule does not finalise gradients: the config has no finalize_model_grads_func.")
    return reasons
