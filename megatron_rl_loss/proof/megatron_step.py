"""The measurement of a step under Megatron's schedule and DDP, up to finalised gradients."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_rl_loss.core.aggregation import Aggregation, resolve
from megatron_rl_loss.core.collectives import ModelGroups, attempt, failure_of, several
from megatron_rl_loss.core.record import PlanUse
from megatron_rl_loss.core.taps import Taps, observed_taps
from megatron_rl_loss.proof.bucket_groups import BucketGroups, check_fresh_gradients, unseen
from megatron_rl_loss.proof.loss_parts import MORE_TERMS, has_more
from megatron_rl_loss.proof.measurement import Measurement, Ranks, Source
from megatron_rl_loss.proof.schedules import chunks_of

LEFT = "another rank has gradients that are not 0 before the step's first micro-batch."
_BESIDE = (
    "The loss that was returned is not that of microbatch.loss(...) alone: it depends on the model's output by another "
    "way, whose weights nobody asked for. Put every term into loss({...}), with its coefficient."
)
_ADDED = (
    f"{MORE_TERMS}: the model's output reaches it by a way that nobody measures. Somebody added a term after the loss "
    "function, or aggregated one by another function."
)
_OTHER_COUNT = (
    "The token count that was returned is {}, and microbatch.loss(...) handed out {}: Megatron divides by it. Return "
    "the result of microbatch.loss(...) unchanged."
)
#: Bound for norms over many tokens, where roundings of half precision average out.
_PATH_TOLERANCE = 1e-2


class MegatronStep(Measurement):
    """Measures one step: a ``with`` around the call of Megatron's schedule, up to finalised gradients.

    If a model finalises gradients after the schedule, as SkyRL's does, the step is measured then.

    Args:
        model: the model chunk or list of chunks.
        groups: the process groups of the model.
        unknown: reasons of the launch against a verdict, such as CUDA graphs.
        is_own_loop: nobody else looks at gradients before the step, and at what loss functions return.
        is_of_engine: an engine's adapter notes the parts of the loss (`part_of_loss`); what is beside them is unknown.
        plan, then: as in `Measurement`.
    """

    takes_forms_of = "schedule"

    def __init__(
        self,
        model: Any,
        groups: ModelGroups,
        *,
        unknown: Sequence[str] = (),
        is_own_loop: bool = False,
        is_of_engine: bool = False,
        plan: PlanUse | None = None,
        then: Callable[[Exception | None], None] | None = None,
    ) -> None:
        chunks = chunks_of(model)
        self.config, self.groups = get_model_config(chunks[0]), groups
        same = several(groups.dp_cp, groups.tp)
        ranks = Ranks(groups.dp, groups.cp, groups.tp, groups.pp, groups.dp_cp, same)
        why = unseen(chunks)
        source: Source | Exception | None = None if why else attempt(lambda: BucketGroups(chunks, groups))
        device = next(chunks[0].parameters()).device
        super().__init__(source, ranks, device, unseen=why, unknown=unknown, plan=plan, then=then)
        self._is_own_loop, self._chunks, self._returned = is_own_loop, chunks, dict[str, None]()
        self._is_of_engine = is_of_engine

    @property
    def expected(self) -> Aggregation | None:
        """The aggregation of terms that declare none; per-token loss asks for a token mean."""
        return self._expected or (resolve("token_mean") if self.config.calculate_per_token_loss else None)

    def _observe(self, stack: ExitStack) -> None:
        passes = _Backward(schedules.backward_step)
        stack.enter_context(_put_in_place("backward_step", passes))
        numbered = _Numbered(schedules.forward_step_calc_loss, self.taps, passes)
        stack.enter_context(_put_in_place("forward_step_calc_loss", numbered))

    def _look(self, stack: ExitStack) -> None:
        if self._is_own_loop or self._is_of_engine:
            look = self._see_returned if self._is_own_loop else self._see_parts
            # An error of this rank alone would leave the others waiting.
            see = lambda returned, output: self.fail(attempt(lambda: look(returned, output)))  # noqa: E731
            seen = _Seen(schedules.forward_step_calc_loss, self.taps, see)
            stack.enter_context(_put_in_place("forward_step_calc_loss", seen))
        if self._is_own_loop:
            stack.enter_context(before_forward(self._look_at_gradients))

    def _look_at_gradients(self) -> None:
        if failure := fresh_failure(self._chunks):
            self._returned[str(failure)] = None

    def _see_returned(self, returned: Any, output: Any) -> None:
        """Note what a loss function returned that its micro-batch did not hand out."""
        receipt = self.taps.receipt
        parts = None if receipt is None else receipt.form.read(returned)
        if receipt is None or parts is None:
            return
        loss, count = parts["loss"], parts.get("num_tokens")
        handed = receipt.tensors["num_tokens"]() if "num_tokens" in receipt.tensors else None
        if isinstance(count, Tensor) and isinstance(handed, Tensor) and not torch.equal(count.to(handed), handed):
            self._returned[_OTHER_COUNT.format(count.item(), handed.item())] = None
        # An output head hands out several tensors, and may have summed the share before the loss function began.
        if isinstance(output, Tensor) and has_more(loss, output, self.taps.parts):
            self._returned[_BESIDE] = None

    def _see_parts(self, returned: Any, output: Any) -> None:
        """Note that the engine's loss has more than the parts that its adapter knows."""
        loss = returned[0] if isinstance(returned, tuple) else returned
        if self.taps.parts and has_more(loss, output, self.taps.parts):
            self.taps.added.add(_ADDED)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        # SkyRL finalises gradients after the schedule, by this method of the object whose method the config names as
        # finalize_model_grads_func. Weights are those of finalised gradients, so the measurement ends with it.
        owner: Any = getattr(self.config.finalize_model_grads_func, "__self__", None)
        finalize: Any = getattr(owner, "run_pending_grad_sync", None)
        if error is not None or finalize is None:
            super().__exit__(kind, error, trace)
            return
        self._stack.close()
        if self.leaving is not None:
            self.leaving.leave(None)

        def end() -> None:
            vars(owner).pop("run_pending_grad_sync", None)  # the method is there again
            if isinstance(self._source, BucketGroups):
                self.fail(attempt(self._source.see_unlinked))
            finalize()
            self._end()

        owner.run_pending_grad_sync = end

    def _further(self) -> None:
        exchange = self.exchange
        self.loss_scale = exchange.local(self._read_loss_scale, 1.0)
        path = self._path() if self.computes_loss else 1.0
        for tapped in (tapped for term_taps in self.taps.losses.values() for tapped in term_taps.values()):
            if tapped.at_log_probs:
                tapped.path = path
        self.evidence(*self._returned)

    def _read_loss_scale(self) -> float:
        scale = getattr(self.config, "grad_scale_func", None)
        return float(scale(torch.ones((), device=self.device))) if scale else 1.0

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


def fresh_failure(chunks: Sequence[Any]) -> Exception | None:
    """The error of gradients that are not 0, if they are not."""
    return failure_of(attempt(lambda: check_fresh_gradients(chunks)))


@contextmanager
def before_forward(look: Callable[[], object]) -> Iterator[None]:
    """In the ``with``: a function is called once, before the first loss of the schedule is computed on this stage."""
    with _put_in_place("forward_step_calc_loss", _Looked(schedules.forward_step_calc_loss, look)):
        yield


@contextmanager
def _put_in_place(name: str, wrapped: "_Wrapped") -> Iterator[None]:
    """In the ``with``: one of the schedule's functions is another one.

    Steps that overlap, as of two models in two threads, wrap each other's; each takes out its own.
    """
    setattr(schedules, name, wrapped)
    try:
        yield
    finally:
        outer = getattr(schedules, name)
        if outer is wrapped:
            setattr(schedules, name, wrapped.calculate)
        while isinstance(outer, _Wrapped) and outer.calculate is not wrapped:
            outer = outer.calculate
        if isinstance(outer, _Wrapped):
            outer.calculate = wrapped.calculate


class _Wrapped:
    """A function of Megatron's schedules in the place of another."""

    def __init__(self, calculate: Any) -> None:
        self.calculate = calculate

    @property
    def __wrapped__(self) -> Any:
        """Whose signature `inspect` gives for this one's: it tells versions of Megatron apart."""
        return self.calculate


class _Looked(_Wrapped):
    """Calls a function once before it."""

    def __init__(self, calculate: Any, look: Callable[[], object]) -> None:
        super().__init__(calculate)
        self.look: Callable[[], object] | None = look

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        look, self.look = self.look, None
        if look is not None:
            look()
        return self.calculate(*args, **kwargs)


class _Backward(_Wrapped):
    """Megatron's ``backward_step``: the passes that it starts train, whichever parameters this stage has."""

    is_running = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.is_running = True
        try:
            return self.calculate(*args, **kwargs)
        finally:
            self.is_running = False


class _Numbered(_Wrapped):
    """Megatron's ``forward_step_calc_loss``: each training loss that `taps` observe begins a micro-batch of them.

    Args:
        passes: the schedule's backward passes, which train once they reach the model's output.
    """

    def __init__(self, calculate: Any, taps: Taps, passes: _Backward) -> None:
        super().__init__(calculate)
        self.taps, self.passes = taps, passes

    def __call__(self, model: Any, output_tensor: Any, loss_func: Any, *args: Any, **kwargs: Any) -> Any:
        taps, passes = self.taps, self.passes

        def reach(gradient: Tensor) -> None:
            if passes.is_running and taps.is_counted:
                taps.take()
            if taps.log_prob_gradients is not None:
                taps.log_prob_gradients.keep_output(gradient)

        def numbered_loss_func(output: Any, **further: Any) -> Any:
            if _trains(output):
                taps.begin_microbatch()
                if isinstance(output, Tensor) and output.requires_grad:
                    output.register_hook(reach)
            return loss_func(output, **further)

        is_ours = loss_func is not None and observed_taps() is taps
        return self.calculate(model, output_tensor, numbered_loss_func if is_ours else loss_func, *args, **kwargs)


class _Seen(_Wrapped):
    """Megatron's ``forward_step_calc_loss``: `see` is called with what a training loss returned, and its output."""

    def __init__(self, calculate: Any, taps: Taps, see: Callable[[Any, Any], object]) -> None:
        super().__init__(calculate)
        self.taps, self.see = taps, see

    def __call__(self, model: Any, output_tensor: Any, loss_func: Any, *args: Any, **kwargs: Any) -> Any:
        def seen_loss_func(output: Any, **further: Any) -> Any:
            returned = loss_func(output, **further)
            if _trains(output):
                self.see(returned, output)
            return returned

        is_ours = loss_func is not None and observed_taps() is self.taps
        return self.calculate(model, output_tensor, seen_loss_func if is_ours else loss_func, *args, **kwargs)


def _trains(output: Any) -> bool:
    """False for a probe, or where nothing is trained."""
    return torch.is_grad_enabled() and bool(getattr(output, "requires_grad", True))
