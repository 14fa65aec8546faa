"""The proof of the first step in plain PyTorch, with DDP, FSDP2 or sums of one's own.

The measurement, the table of outcomes and the words are those of the proof under Megatron; only where gradients are
seen is another place (`torch_gradients`).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron_rl_loss.core.collectives import StepGroups, attempt, raise_together, world_rank
from megatron_rl_loss.core.errors import print_text
from megatron_rl_loss.core.plan import Plan
from megatron_rl_loss.core.record import PlanUse
from megatron_rl_loss.proof.exchange import Exchange
from megatron_rl_loss.proof.factor import Fit
from megatron_rl_loss.proof.first_step import FirstStep
from megatron_rl_loss.proof.measurement import Measurement, Ranks
from megatron_rl_loss.proof.outcomes import ProofLevel
from megatron_rl_loss.proof.own_tokens import plans_of
from megatron_rl_loss.proof.reduced_ranks import uncounted
from megatron_rl_loss.proof.torch_gradients import TorchGradients, first_gradient, unseen

_REMEDY = (
    'form= says what your trainer does to gradients: form="mean" where it averages them over ranks (DDP, fully_shard), '
    'form="sum" where it adds them up or there is one process. Call backward on what loss() returned, and do not '
    "divide it by the number of micro-batches or ranks. All ranks of the groups of plan_step must be in the reduction. "
    "End the `with` before gradients are clipped."
)
_LEFT = (
    "gradients of the step before are still in .grad: this step's gradients were added to them. Call "
    "optimizer.zero_grad() before every step, and make one plan for all micro-batches between two optimizer steps."
)


class TorchStep(Measurement):
    """Measures one step of a model: a ``with`` around forward, backward and whatever adds gradients up over ranks.

    Args:
        groups: that the step is spread over.
        plan: of the step.
        then: as in `Measurement`.
    """

    def __init__(
        self,
        model: Any,
        groups: StepGroups,
        *,
        plan: PlanUse | None = None,
        then: Callable[[Exception | None], None] | None = None,
    ) -> None:
        why = unseen(model)
        source: Any = None if why else attempt(lambda: TorchGradients(model, groups))
        self.gradients = source if isinstance(source, TorchGradients) else None
        # Where the context-parallel group changes, the plan's dp_group has the ranks of both.
        ranks = Ranks(groups.dp_group, groups.cp_group, dp_cp=groups.dp_group, same=groups.all)
        self._scales, self._is_unscaled, self._plan = list[Any](), False, plan
        super().__init__(source, ranks, next(model.parameters()).device, unseen=why, then=then)

    def _observe(self, stack: ExitStack) -> None:
        stack.enter_context(self._watch_scalers())

    @contextmanager
    def _watch_scalers(self) -> Iterator[None]:
        """Note which GradScaler scales the loss, and whether gradients are unscaled inside the ``with``."""
        kind = torch.amp.GradScaler
        scale, unscale = kind.scale, kind.unscale_

        def noted_scale(scaler: Any, outputs: Any) -> Any:
            scaled = scale(scaler, outputs)
            self._scales.append(scaler)
            return scaled

        def noted_unscale(scaler: Any, optimizer: Any) -> Any:
            self._is_unscaled = True
            return unscale(scaler, optimizer)

        patched: Any = kind
        patched.scale, patched.unscale_ = noted_scale, noted_unscale
        try:
            yield
        finally:
            patched.scale, patched.unscale_ = scale, unscale

    def _further(self) -> None:
        if self._scales and not self._is_unscaled:
            self.loss_scale = float(self._scales[-1].get_scale())
        if self._plan is not None and (plans := plans_of(self.taps)) and self._plan not in plans:
            self.limit("The step trained on micro-batches of another plan. Pass the plan of this step.")


class PlainProof:
    """The proof of a model's first step, and a look at gradients in its second.

    Attributes:
        sent: bytes handed to reductions in the step that was measured last.
    """

    def __init__(self, level: ProofLevel) -> None:
        self._groups, self.sent = StepGroups(), 0  # of this step
        self._source: TorchGradients | None
        self.first = FirstStep(
            None,
            "the policy loss",
            measure=self._measure,
            groups_of=lambda model, plan: self._groups.all,
            level=level,
            remedy=_REMEDY,
        )
        # Of the step before, if it was measured, as it is on all ranks or none.
        self._was_measured, self._source = False, None

    def _measure(self, model: Any, plan: PlanUse | None, then: Callable[[Exception | None], None]) -> TorchStep:
        def end(failure: Exception | None) -> None:
            self.sent = measured.sent
            then(failure)

        measured = TorchStep(model, self._groups, plan=plan, then=end)
        self._was_measured, self._source = True, measured.gradients
        return measured

    @contextmanager
    def step(self, model: Any, plan: Plan) -> Iterator[None]:
        before, is_checked = self._source, self._was_measured
        self._source, self._was_measured, self._groups = None, False, plan.record.groups
        groups, left = self._groups.all, list[bool]()
        if not self.first.is_agreed:
            self.first.agree(groups)
        if not self.first.is_over:
            self.first.refuse(uncounted(model, self._groups), plan.record.use, groups)
        with ExitStack() as stack:
            if before is not None:
                for remove in first_gradient(before.leaves, lambda: left.append(_is_left(before))):
                    stack.callback(remove)
            with self.first.step(model, plan=plan.record.use):
                yield
        if is_checked and Exchange().agree(["left"] if any(left) else [], ["left"], groups):
            if self.first.level in ("error", "strict"):
                raise_together(True, ValueError(_LEFT) if not world_rank() else None, groups)
            if not world_rank():
                print_text(f"megatron_rl_loss: {_LEFT}")


def _is_left(before: TorchGradients) -> bool:
    """True if what `.grad` holds is that of the step before, or a multiple of it."""

    def compare() -> bool:
        now = before.held()
        if not bool(now[:, -1].sum() > 0):
            return False
        fit = Fit(before.parameters, before.final, now)
        return fit.is_certain and fit.share > 0.9

    return attempt(compare) is True  # an error in a hook would end the backward pass
