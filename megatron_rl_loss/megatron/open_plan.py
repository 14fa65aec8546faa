"""`open_plan` for a loop that calls Megatron's schedule several times per optimizer step.

Between `open_plan` and `close` nothing is reduced: each schedule's own finalising is held back, and so is what DDP
reduces during a backward pass. `close` finalises once and scales the gradient buffers by one factor. What is divided by
another count has buffers of its own, and a run of the schedule of its own.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import astuple
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor

from megatron_rl_loss.errors import BadBatchError
from megatron_rl_loss.megatron.flags import has_cuda_graphs
from megatron_rl_loss.megatron.planning import checked_model
from megatron_rl_loss.megatron.probe import check_fresh_gradients
from megatron_rl_loss.modes.loss_modes import LossModes
from megatron_rl_loss.plan.late_counts import ClosedPlan, LateCount
from megatron_rl_loss.plan.open_plan import OpenPlan
from megatron_rl_loss.plan.plan import Plan
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.totals import UnitCounting

#: What a schedule or DDP reduces gradients by, in the model's config.
_HOOKS = ("finalize_model_grads_func", "no_sync_func", "grad_sync_func")
#: What turns auxiliary losses off; Megatron reads it in each forward pass.
_OFF = {
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
    "mtp_loss_scaling_factor": 0.0,
    "dsa_indexer_loss_coeff": 0.0,
}
#: What Megatron divides auxiliary losses by, with per-token loss.
_AUXILIARY_COUNT = LateCount("step_active_tokens")


def open_plan(
    mode: str,
    *,
    model: Any,
    pg_collection: ProcessGroupCollection | None = None,
    divisor: float | None = None,
    units: UnitCounting | None = None,
    terms: Mapping[str, str | None] | None = None,
    **options: Any,
) -> "OpenMegatronPlan":
    """`megatron_rl_loss.plan.open_plan` of a Megatron model, whose gradients `OpenMegatronPlan.close` makes final.

    All else is as there, `options` too; `model` and `pg_collection` as in `plan_step`. Declared `terms` may divide by
    other counts: then train on each call in `OpenMegatronPlan.passes`. Do the same where the model has MoE auxiliary
    losses or multi-token prediction, which Megatron divides by the tokens of the step, unless the mode is
    ``token_mean`` or `nominal_tokens` is given.

    Raises:
        ContractError, ValueError, TypeError: as there and as `plan_step`; chunks that are not in Megatron's
            DistributedDataParallel; gradients that are not 0; a plan that is open on this model; auxiliary losses
            without per-token loss, or in several passes with CUDA graphs.
    """
    config, chunks, step_groups = checked_model(model, pg_collection)
    modes = LossModes.resolve(mode, divisor=divisor, units=units, terms=terms)
    if plan_open_on(config) is not None:
        raise ValueError("a model with an open plan: its gradients are that step's. Close or abandon that plan first.")
    if config.finalize_model_grads_func is None or not all(isinstance(one, DistributedDataParallel) for one in chunks):
        raise ValueError(
            f"an open plan of a {type(chunks[0]).__name__}: it scales the gradient buffers of Megatron's "
            "DistributedDataParallel, after the config's finalize_model_grads_func. Set both, or use "
            "megatron_rl_loss.plan.open_plan and scale the gradients by its factor yourself."
        )
    check_fresh_gradients(chunks)
    return OpenMegatronPlan(config, chunks, modes, step_groups, bool(config.calculate_per_token_loss), **options)


def plan_open_on(config: Any) -> "OpenMegatronPlan | None":
    """The plan that is open on the model of this config, if any."""
    holder = getattr(getattr(config, "finalize_model_grads_func", None), "__self__", None)
    return holder if isinstance(holder, OpenMegatronPlan) else None


def auxiliary_losses(config: Any) -> list[str]:
    """The losses that Megatron adds to the backward pass, by the setting that turns them on."""
    names = ["mtp_num_layers", "dsa_indexer_loss_coeff"]
    if config.num_moe_experts:
        names += ["moe_aux_loss_coeff", "moe_z_loss_coeff"]
    values = {name: getattr(config, name, None) for name in names}
    return [name for name, value in values.items() if any(value if isinstance(value, list) else [value])]


def _off(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without auxiliary losses; a list of coefficients stays one."""
    return {name: [0.0] * len(value) if isinstance(value, list) else _OFF[name] for name, value in values.items()}


def _logged() -> dict[str, Tensor]:
    """What Megatron has summed up of multi-token prediction for its log: every pass adds to it."""
    return {name: value for name, value in MTPLossLoggingHelper.tracker.items() if isinstance(value, Tensor)}


def _saved(samples: Samples) -> dict[str, Any]:
    """What is counted of them, as arguments of `Samples`."""
    return {
        "loss_masks": list(samples.loss_masks),
        "rollout_ids": samples.rollout_ids,
        "prompt_ids": samples.prompt_ids,
        "tokens": samples.tokens,
        "term_masks": {name: list(further.loss_masks) for name, further in samples.by_mask.items()},
    }


def _refuse(*_: Any, **__: Any) -> None:
    raise ValueError(
        "gradients that are reduced or zeroed while a plan is open: calls before would count several times, or not at "
        "all. Leave finalize_model_grads and zero_grad_buffer() to close() and abandon()."
    )


class OpenMegatronPlan(OpenPlan):
    """An open plan that holds back the reduction of a model's gradients; as a context it is abandoned if not closed."""

    has_passes = True

    def __init__(self, config: Any, chunks: list[Any], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        auxiliary, by = auxiliary_losses(config), self.modes.policy.mode.name
        if auxiliary and by != "token_mean" and options.get("nominal_tokens") is None:
            self.counts.append(_AUXILIARY_COUNT)
        if auxiliary and not self._per_token:
            raise ValueError(
                f"{', '.join(auxiliary)} in an open plan without per-token loss: the factor at the end of the step "
                "would scale these losses too. Turn calculate_per_token_loss on, these losses off, or use plan_step."
            )
        if auxiliary and len(self.counts) > 1 and has_cuda_graphs(config):
            raise ValueError(
                f"{', '.join(auxiliary)} and CUDA graphs in an open plan of several passes: graphs replay these losses "
                "in every pass, and one must train them. Turn graphs off, or use plan_step."
            )
        self._config, self._chunks = config, chunks
        self._num_runs = 0
        self._num_tokens = torch.zeros((), dtype=torch.int64, device=next(chunks[0].parameters()).device)
        self._further_gradients = [[torch.zeros_like(one) for one in self._gradients] for _ in self.counts[1:]]
        self._options: dict[str, Any] = {}  # of the schedule's finalising
        self._hooks = {name: getattr(config, name) for name in _HOOKS}
        config.finalize_model_grads_func, config.grad_sync_func = self._hold, None
        config.no_sync_func = contextlib.nullcontext  # a schedule's own would end the one below
        self._contexts = contextlib.ExitStack()
        for chunk in chunks:
            self._contexts.enter_context(chunk.no_sync())
            for name in ("finish_grad_sync", "zero_grad_buffer"):
                setattr(chunk, name, _refuse)
                self._contexts.callback(delattr, chunk, name)

    def __enter__(self) -> "OpenMegatronPlan":
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_open:
            self.abandon()

    def _hold(self, model: Any, num_tokens: Tensor | None = None, **options: Any) -> None:
        """What a schedule calls at its end in the place of `finalize_model_grads`."""
        self._num_runs += 1
        self._options = options
        if num_tokens is not None and self.current_count == self.late_count:
            self._num_tokens += num_tokens.to(self._num_tokens)

    def passes(self, call: Plan) -> Iterator[Plan]:
        """The call, once for each count that a part of the loss divides by, on all ranks: run the schedule each time.

        Gradients of a pass are added to buffers of its count; the first one reports. (Megatron's kernels overwrite what
        a backward pass saved, so that one forward pass does not serve two.)
        """
        self._require_open()
        kept = {name: value for name, value in vars(self._config).items() if name in _OFF}
        for late, apart in zip(self.counts, [None, *self._further_gradients], strict=True):
            has_auxiliary = late == (_AUXILIARY_COUNT if _AUXILIARY_COUNT in self.counts else self.late_count)
            self.current_count = late
            vars(self._config).update({} if has_auxiliary else _off(kept))
            logged = {name: value.clone() for name, value in _logged().items()}
            self._exchange(apart)
            try:
                yield call
            finally:
                self._exchange(apart)
                self.current_count = self.late_count
                vars(self._config).update(kept)
                if not has_auxiliary:
                    for name, value in _logged().items():
                        value.copy_(logged.get(name, torch.zeros_like(value)))

    def _exchange(self, apart: list[Tensor] | None) -> None:
        """What the buffers hold for what a further count has."""
        for gradient, other in zip(self._gradients, apart, strict=True) if apart else ():
            held = gradient.clone()
            gradient.copy_(other)
            other.copy_(held)

    def _described(self) -> list[Samples] | None:
        expected = [len(samples or ()) * len(self.counts) for samples, _ in self._calls]
        wrong = any(self.num_losses) and self.num_losses != expected
        wrong |= self._num_runs not in (0, len(self._calls) * len(self.counts))
        if wrong or self.current_count != self.late_count:  # or within a pass
            raise ValueError(
                f"{self._num_runs} runs of the schedule for {len(self._calls)} calls of add, in which micro-batches "
                f"returned {self.num_losses} losses where {expected} are expected: the loss divides by "
                f"{' and by '.join(map(str, self.counts))}, and the schedule must run once for each call and count. "
                "Abandon this plan, and run the schedule on what plan.passes(plan.add(...)) yields, or save it between "
                "two calls."
            )
        return super()._described()

    def close(self) -> ClosedPlan:
        """Count the step, reduce the gradients and scale them; all ranks call it together, before clipping.

        Raises:
            BadBatchError: on every rank, as in `OpenPlan.close`; calls that were not trained on once each; auxiliary
                losses beside another factor than 1. The plan stays open, and no gradient was changed.
        """
        closed = self._closed()
        auxiliary, count = auxiliary_losses(self._config), closed.counts[self.late_count]
        if closed.factor != 1 and auxiliary and _AUXILIARY_COUNT not in self.counts:
            raise BadBatchError(
                f"{', '.join(auxiliary)} in a step of {closed.totals.step_active_tokens} active tokens and "
                f"{count:g} of {self.late_count}, planned as {self.nominal_tokens} and {self.nominal}: the factor "
                "between would scale them too. Give the step's as nominal_tokens and nominal, use token_mean with "
                "masks of 0 and 1, or plan_step."
            )
        self._restore()
        for late, apart in zip(self.counts[1:], self._further_gradients, strict=True):
            for gradient, other in zip(self._gradients, apart, strict=True):
                gradient.add_(other, alpha=count / (closed.counts[late] or count or 1))
        for chunk in self._chunks:
            if chunk.ddp_config.overlap_grad_reduce:
                chunk.start_grad_sync()  # what the last backward pass would have begun
        num_tokens = self._num_tokens if closed.divides_by_tokens else None
        self._config.finalize_model_grads_func(self._chunks, num_tokens, **self._options)
        if closed.factor != 1:
            for chunk in self._chunks:
                chunk.scale_gradients(closed.factor)
        return closed

    def abandon(self) -> None:
        """Zero the gradients and give Megatron its hooks back; each rank may do so alone."""
        self._require_open()
        self._restore()
        for gradient in itertools.chain(*self._further_gradients):  # which a pass that is not over will put back
            gradient.zero_()
        for chunk in self._chunks:
            chunk.zero_grad_buffer()

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of an open step, in tensors and plain values: calls so far and the sums of their gradients.

        Save it with the model's checkpoint, a file per rank: gradients are not reduced yet. Raises ValueError within a
        call, whose rest cannot be gone on with.
        """
        self._require_open()
        self._described()
        return {
            "settings": self.settings,
            "calls": [samples and [_saved(one) for one in samples] for samples, _ in self._calls],
            "form": self.form,
            "whole": sorted(self._whole_kinds),
            "late_counts": {name: astuple(late) for name, late in self.late_counts.items()},
            "num_runs": self._num_runs,
            "num_losses": self.num_losses.copy(),
            "num_tokens": self._num_tokens.clone(),
            "gradients": [
                [one.clone() for one in of_count] for of_count in (self._gradients, *self._further_gradients)
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a step that was saved on this rank, in the same layout; ValueError for one of other settings."""
        if state["settings"] != self.settings or self._calls:
            raise ValueError(
                f"a saved step by {state['settings']}, a plan by {self.settings} with {len(self._calls)} calls: it "
                "must be of the same settings, and without calls. Open one with those of the saved step."
            )
        for saved in state["calls"]:
            samples = saved and [Samples(**one) for one in saved]
            self._calls.append((samples, self._count(samples or [])))
        self.form, self._num_runs, self.num_losses = state["form"], state["num_runs"], state["num_losses"].copy()
        self.late_counts = {name: LateCount(*late) for name, late in state["late_counts"].items()}
        self._whole_kinds = set(state["whole"])
        self._num_tokens.copy_(state["num_tokens"])
        for gradients, saved in zip((self._gradients, *self._further_gradients), state["gradients"], strict=True):
            for gradient, value in zip(gradients, saved, strict=True):
                gradient.copy_(value)

    @property
    def _gradients(self) -> list[Tensor]:
        """All that is added to in a backward pass."""
        buffers = [one for chunk in self._chunks for one in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        return [one for buffer in buffers for one in (buffer.grad_data, *getattr(buffer, "extra_main_grads", ()))]

    def _restore(self) -> None:
        self._is_open = False
        self._contexts.close()
        for name, hook in self._hooks.items():
            setattr(self._config, name, hook)
