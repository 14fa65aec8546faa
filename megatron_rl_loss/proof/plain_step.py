"""The proof of a step in plain PyTorch, with DDP, FSDP2 or sums of one's own.

The measurement, the findings and the words are those of the proof under Megatron; only where gradients are seen is
another place (`torch_gradients`).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rl_loss.core.collectives import StepGroups, attempt, size_of
from megatron_rl_loss.core.plan import Plan
from megatron_rl_loss.core.record import PlanUse
from megatron_rl_loss.core.taps import LossScale, Taps, backward_pass
from megatron_rl_loss.proof.difference import Compared, named
from megatron_rl_loss.proof.exchange import Exchange
from megatron_rl_loss.proof.factor import ZERO, Factor, no_factor
from megatron_rl_loss.proof.first_step import FirstStep, Stated
from megatron_rl_loss.proof.measurement import Measurement, Ranks
from megatron_rl_loss.proof.outcomes import ProofLevel
from megatron_rl_loss.proof.own_tokens import own_losses
from megatron_rl_loss.proof.reduced_ranks import counted_by, left_out, uncounted, unreduced
from megatron_rl_loss.proof.torch_gradients import Before, TorchGradients, unseen

_UNCHANGED = "Call backward once on what each micro-batch's loss() returned, unchanged."
_CHANGED = (
    "Gradients were multiplied by {:.4g} after the backward passes that gave them. Leave .grad as it is inside the "
    "`with`."
)
_CLIPPED = "End the `with` before gradients are clipped."
_OWN_SCALE = "A scale of your own, which you divide out after the `with`, is prove_step(..., loss_scale=...)."
_GRADIENTS = (
    'plan_step(..., gradients=...) says what your trainer does: "averaged over ranks" under DistributedDataParallel or '
    'fully_shard, "summed over ranks" where you add gradients up yourself.'
)
_REDUCTION = "All ranks of plan_step's groups must be in the reduction."
LEFT = (
    "gradients of the step before are still in .grad: this step's gradients were added to them. Call "
    "optimizer.zero_grad() before every step, and make one plan for all micro-batches between two optimizer steps."
)
ADDED = (
    "token weights of two plans add up: gradients of the `with` before are still in .grad, and no optimizer has moved "
    "parameters since. Two losses of one optimizer step may be meant so. Micro-batches of one step are not: a plan for "
    "each divides by its own tokens alone. Make one plan for all micro-batches between two optimizer steps, and call "
    "optimizer.zero_grad() before each."
)
_SCALES = (
    "Losses of the step went through several gradient scalers, or some through none: one optimizer divides by one "
    "scale. Scale each loss by the scaler of its optimizer; a second model has a `with` of its own."
)


def _remedy(wrong: Compared, factor: Factor) -> str:
    """What to do about weights that are not as asked, by what they and the factor of gradients are."""
    ranks = {name: size for name, size in wrong.sizes.items() if name != "micro-batches" and size > 1}
    rounding = max(1e-4, factor.rounding)

    def is_by_ranks(value: float) -> bool:
        return math.isclose(value, 1, rel_tol=rounding) or bool(named(value, ranks, rounding))

    if wrong.is_one_number and not is_by_ranks(factor.value) and is_by_ranks(wrong.high / factor.value):
        return _CHANGED.format(wrong.high)
    texts = [_UNCHANGED]
    if wrong.is_one_number and not wrong.after.as_if:
        if named(wrong.high, ranks):
            texts = [_GRADIENTS, _UNCHANGED]
        elif not named(wrong.high, wrong.sizes):
            texts += [_CLIPPED] if 0 < wrong.high < 1 else []
            texts += [_OWN_SCALE] if wrong.high > 0 else []
    elif ranks and not wrong.after.as_if:
        texts.append(_REDUCTION)
    return " ".join(texts)


class TorchStep(Measurement):
    """Measures one step of a model: a ``with`` around forward, backward and whatever adds gradients up over ranks.

    Args:
        groups: that the step is spread over.
        before, optimizer: as of `TorchGradients`.
        plan, then: as in `Measurement`.

    Attributes:
        loss_scale: what the user multiplies losses by, and divides gradients by after the ``with``.
        left_out: what is wrong with the model's wrapper if gradients are no sum over all ranks; empty for nothing.
    """

    def __init__(
        self,
        model: Any,
        groups: StepGroups,
        *,
        before: Before | None = None,
        optimizer: Any = None,
        plan: PlanUse | None = None,
        loss_scale: float = 1.0,
        left_out: str = "",
        then: Callable[[Exception | None], None] | None = None,
    ) -> None:
        why = unseen(model)
        source: Any = None if why else attempt(lambda: TorchGradients(model, groups, before or Before(), optimizer))
        is_alone = all(size_of(group) == 1 for group in groups.all)
        # Where the context-parallel group changes, the plan's dp_group has the ranks of both.
        ranks = Ranks(groups.dp_group, groups.cp_group, dp_cp=groups.dp_group, same=groups.all)
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        super().__init__(source, ranks, device, unseen=why, plan=plan, then=then)
        self._model, self.loss_scale, self.left_out = model, loss_scale, left_out
        self.gradients = source if isinstance(source, TorchGradients) else None
        self.takes_forms_of = "loop" if is_alone else ""  # on one rank, it does not matter what was said of ranks

    def _observe(self, stack: ExitStack) -> None:
        stack.enter_context(_watched_scalers(self.taps))

    def _further(self) -> None:
        self.exchange.local(self._scale_back, None)
        if self.alike.gradient == "finite" and self.alike.factor is None and self.left_out:
            self.evidence(self.left_out)
        self.exchange.local(self._doubt_zeros, None)
        self.exchange.local(self._doubt_sync, None)

    def _doubt_sync(self) -> None:
        """Gradients that FSDP2 has not reduced yet are not those that somebody zeroed."""
        are_all_zero = self.alike.factor is None and {*self.alike.unlike.values()} == {ZERO}
        if self.alike.gradient == "finite" and are_all_zero and (why := unreduced(self._model)):
            self.alike.problem = no_factor(why)

    def _doubt_zeros(self) -> None:
        """Gradients that are 0 since another model has them are not those of a step without any."""
        if self.gradients is None or self.alike.gradient != "zero":
            return
        terms = own_losses(self.taps, self.plan).values()
        is_reached = any(tapped.is_reached for term_taps in terms for tapped in term_taps.values())
        if why := self.gradients.untrained(is_reached=is_reached):
            self.alike.gradient, self.alike.problem = "unseen", why

    def _scale_back(self) -> None:
        """Divide gradients at losses by the scale that their scaler's optimizer divides by after the step."""
        taps = [tapped for term_taps in own_losses(self.taps, self.plan).values() for tapped in term_taps.values()]
        scales = set[float]()
        for tapped in taps:
            own = {_still_scaled_by(scale, self.taps) for scale in tapped.scales}
            tapped.path = 1 / max(own, default=1.0)
            scales |= own
        if len(scales) > 1:
            self.limit(_SCALES)


def _still_scaled_by(scale: LossScale | None, taps: Taps) -> float:
    """What gradients are to be divided by after the step: 1 where the scaler divided them inside it."""
    return 1.0 if scale is None or id(scale.scaler) in taps.unscaled else scale.value


@contextmanager
def _watched_scalers(taps: Taps) -> Iterator[None]:
    """Tell taps of each backward pass which GradScaler scaled its loss, and which scalers divided gradients again."""
    undo = list[Callable[[], None]]()

    def see(loss_scale: LossScale, _: Tensor) -> None:
        number = backward_pass()
        known = taps.scales.setdefault(number, loss_scale)
        if known != loss_scale:
            taps.scales[number] = LossScale(None, float("nan"))

    def watch_scale(kind: Any) -> None:
        scale = kind.scale

        def noted_scale(scaler: Any, outputs: Any) -> Any:
            scaled = scale(scaler, outputs)
            loss_scale = LossScale(scaler, float(scaler.get_scale()))
            for tensor in [scaled] if isinstance(scaled, Tensor) else scaled:
                if tensor.requires_grad:
                    tensor.register_hook(partial(see, loss_scale))
            return scaled

        kind.scale = noted_scale
        undo.append(lambda: setattr(kind, "scale", scale))

    def watch_unscale(kind: Any) -> None:
        unscale = kind.unscale_

        def noted_unscale(scaler: Any, optimizer: Any) -> Any:
            taps.unscaled.add(id(scaler))
            return unscale(scaler, optimizer)

        kind.unscale_ = noted_unscale
        undo.append(lambda: setattr(kind, "unscale_", unscale))

    kinds: list[Any] = [torch.amp.GradScaler]
    for kind in kinds:  # which grows
        kinds += kind.__subclasses__()
        if "scale" in vars(kind):
            watch_scale(kind)
        if "unscale_" in vars(kind):
            watch_unscale(kind)
    try:
        yield
    finally:
        for restore in undo:
            restore()


class PlainProof:
    """The proofs of a model's steps, one of each claim, and a look at gradients in the step after a measured one.

    Attributes:
        sent: bytes handed to reductions in the step that was measured last.
    """

    def __init__(self) -> None:
        self.sent = 0
        self._firsts = dict[str, FirstStep]()
        # Of the step before, if it was measured, as it is on all ranks or none; a rank may have failed to.
        self._was_measured, self._before = False, Before()

    @contextmanager
    def step(self, model: Any, plan: Plan, level: Callable[[], ProofLevel], stated: Stated) -> Iterator[None]:
        groups, use, claim = plan.record.groups, plan.record.use, plan.record.modes.describe()
        was_measured, before = self._was_measured, self._before
        self._was_measured, self._before = False, Before(is_known=False)

        def measure(model: Any, plan: PlanUse | None, then: Callable[[Exception | None], None]) -> TorchStep:
            def end(failure: Exception | None) -> None:
                known = attempt(lambda: (measured.sent, Before(measured.gradients)))
                if not isinstance(known, Exception):
                    self.sent, self._before = known
                then(failure)

            measured = TorchStep(
                model, groups, plan=plan, before=before, optimizer=stated.optimizer, then=end,
                loss_scale=stated.loss_scale, left_out=left_out(model, counted),
            )  # fmt: skip
            self._was_measured = True
            return measured

        if claim not in self._firsts:
            self._firsts[claim] = FirstStep(None, "the policy loss", measure=measure, remedy=_remedy)
        first = self._firsts[claim]
        if not first.is_agreed:
            first.agree(groups.all, level)
        counted = set[int]() if first.is_over else counted_by(groups)
        is_looked_at = was_measured and first.is_over and first.level != "off"
        with ExitStack() as stack:
            if is_looked_at:
                stack.enter_context(first.leaving())
                stack.enter_context(before.compared())
            check = lambda: uncounted(model, counted) or stated.fault()  # noqa: E731
            stack.enter_context(first.step(model, plan=use, measure=measure, check=check))
            yield
        if is_looked_at:
            leftover = attempt(before.leftover)
            changes = Exchange().agree([leftover] if isinstance(leftover, str) else [], ["left", "added"], groups.all)
            if "left" in changes:
                first.tell_left(LEFT)
            elif changes:
                first.tell_added(ADDED)
