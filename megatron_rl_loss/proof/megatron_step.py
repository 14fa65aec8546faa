"""The measurement of a step under Megatron's schedule and DDP, up to finalised gradients."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_rl_loss.core.aggregation import Aggregation, resolve
from megatron_rl_loss.core.collectives import attempt, several
from megatron_rl_loss.core.taps import Taps, observed_taps
from megatron_rl_loss.proof.bucket_groups import BucketGroups, unseen
from megatron_rl_loss.proof.measurement import Measurement, Ranks, Source

#: Bound for norms over many tokens, where roundings of half precision average out.
_PATH_TOLERANCE = 1e-2


class MegatronStep(Measurement):
    """Measures one step: a ``with`` around the call of Megatron's schedule, up to finalised gradients.

    If a model finalises gradients after the schedule, as SkyRL's does, the step is measured then.

    Args:
        model: the model chunk or list of chunks.
        groups: the process groups of the model.
        unknown: reasons of the launch against a verdict, such as CUDA graphs.
        then: as in `Measurement`.
    """

    def __init__(
        self,
        model: Any,
        groups: ProcessGroupCollection,
        *,
        unknown: Sequence[str] = (),
        then: Callable[[Exception | None], None] | None = None,
    ) -> None:
        chunks = model if isinstance(model, list) else [model]
        self.config, self.groups = get_model_config(chunks[0]), groups
        same = several(groups.dp_cp, groups.tp)
        ranks = Ranks(groups.dp, groups.cp, groups.tp, groups.pp, groups.dp_cp, same)
        why = unseen(chunks)
        source: Source | Exception | None = None if why else attempt(lambda: BucketGroups(chunks, groups))
        device = next(chunks[0].parameters()).device
        super().__init__(source, ranks, device, unseen=why, unknown=unknown, then=then)

    @property
    def expected(self) -> Aggregation | None:
        """The aggregation of terms that declare none; per-token loss asks for a token mean."""
        return self._expected or (resolve("token_mean") if self.config.calculate_per_token_loss else None)

    def _observe(self, stack: ExitStack) -> None:
        numbered = _Numbered(schedules.forward_step_calc_loss, self.taps)
        stack.callback(numbered.remove)
        schedules.forward_step_calc_loss = numbered

    def __exit__(self, error: Any, *rest: Any) -> None:
        # SkyRL finalises gradients after the schedule, by this method of the object whose method the config names as
        # finalize_model_grads_func. Weights are those of finalised gradients, so the measurement ends with it.
        owner: Any = getattr(self.config.finalize_model_grads_func, "__self__", None)
        finalize: Any = getattr(owner, "run_pending_grad_sync", None)
        if error is not None or finalize is None:
            super().__exit__(error)
            return
        self._stack.close()

        def end() -> None:
            vars(owner).pop("run_pending_grad_sync", None)  # the method is there again
            if isinstance(self._source, BucketGroups):
                self.fail(attempt(self._source.see_unlinked))
            finalize()
            self._end()

        owner.run_pending_grad_sync = end

    def _further(self) -> None:
        scale = getattr(self.config, "grad_scale_func", None)
        self.loss_scale = float(scale(torch.ones((), device=self.device))) if scale else 1.0
        path = self._path() if self.computes_loss else 1.0
        for tapped in (tapped for of_term in self.taps.losses.values() for tapped in of_term.values()):
            if tapped.at_log_probs:
                tapped.path = path

    def _path(self) -> float:
        """The ratio of gradients at the model's output to the gradients that engines' losses send to log-probs.

        The backward of a gather over CP ranks sums the gradients (1) or takes a rank's own slice (1 / CP).
        """
        groups, sent = self.groups, self.taps.log_prob_gradients
        seen = [] if sent is None else ["followed" if sent.is_followed else "not followed"]
        over = several(groups.dp_cp, groups.tp)  # a rank whose rows are all masked may have none
        agreed, cp_size = self.exchange.agree(seen, ["not followed", "followed"], over), groups.cp.size()
        if "not followed" in agreed or not agreed:
            if agreed and cp_size > 1 and sent is not None and sent.is_replicated:
                self.limit("The backward pass of log-probs gathered over CP ranks cannot be followed.")
            return 1.0
        sums = torch.zeros(2, dtype=torch.float64) if sent is None else sent.sent_and_arrived(groups.cp)
        sums[0] /= groups.tp.size()  # all TP ranks send the same gradients, each to its part of the vocabulary
        for group in over:
            self.exchange.reduce(sums, group)
        path = float(sums[1] / sums[0])
        for honest in (1.0, 1 / cp_size):
            if abs(path / honest - 1) < _PATH_TOLERANCE:
                return honest
        if sums[0]:
            self.evidence(f"Gradients of log-probs arrive {path:.6g} times at the model's output, not once.")
        return 1.0


class _Numbered:
    """Megatron's ``forward_step_calc_loss``: each training loss that `taps` observe begins a micro-batch of them.

    Steps that overlap, as of two models in two threads, wrap each other's; each takes out its own.
    """

    def __init__(self, calculate: Any, taps: Taps) -> None:
        self.calculate, self.taps = calculate, taps

    @property
    def __wrapped__(self) -> Any:
        """Whose signature `inspect` gives for this one's: it tells versions of Megatron apart."""
        return self.calculate

    def remove(self) -> None:
        outer = schedules.forward_step_calc_loss
        if outer is self:
            schedules.forward_step_calc_loss = self.calculate
            return
        while isinstance(outer, _Numbered) and outer.calculate is not self:
            outer = outer.calculate
        if isinstance(outer, _Numbered):
            outer.calculate = self.calculate

    def __call__(self, model: Any, output_tensor: Any, loss_func: Any, *args: Any, **kwargs: Any) -> Any:
        taps = self.taps

        def keep_size(gradient: Tensor) -> None:
            if taps.log_prob_gradients is not None:
                taps.log_prob_gradients.keep_output(gradient)

        def numbered_loss_func(output: Any, **further: Any) -> Any:
            if torch.is_grad_enabled() and getattr(output, "requires_grad", True):  # else a probe, or no training
                taps.begin_microbatch()
                if isinstance(output, Tensor) and output.requires_grad:
                    output.register_hook(keep_size)
            return loss_func(output, **further)

        is_ours = loss_func is not None and observed_taps() is taps
        return self.calculate(model, output_tensor, numbered_loss_func if is_ours else loss_func, *args, **kwargs)
