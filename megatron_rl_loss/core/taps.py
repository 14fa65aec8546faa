"""Records of the gradient that reaches each token's loss, while a proof or an audit observes the step.

They change nothing. Of a loss that a reducer of this package sums, the share is hooked: its gradient times the
reducer's weights are the gradients of its tokens. A loss that somebody else sums is tapped token by token (`tap`). Both
see everything that the loss function and the schedule do to a token on this rank: its weight, their factors and the
loss scale. What happens to gradients afterwards they do not see.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar
from weakref import ref

import torch
from torch import Tensor

from megatron_rl_loss.core.aggregation import Aggregation
from megatron_rl_loss.core.samples import Samples

#: A graph between a loss, or the losses of a reducer, and what they are made of has a few nodes; behind more lies the
#: model.
_MOST_NODES = 4096


def nodes_before(node: Any, is_end: Callable[[Any], bool]) -> Iterator[Any]:
    """A graph's nodes from this one back, none behind an end; None in the place of what lies behind thousands."""
    nodes, seen, number = deque([node]), set[Any]([None]), 0
    while nodes:
        node = nodes.popleft()  # the near ones first
        if node in seen:
            continue
        seen.add(node)
        yield node
        if is_end(node):
            continue
        if number == _MOST_NODES:
            yield None
            return
        number += 1
        nodes += [before for before, _ in node.next_functions]


def is_of_model(node: Any) -> bool:
    """True for a parameter, and for what `nodes_before` gives where a graph goes on."""
    return node is None or type(node).__name__ == "AccumulateGrad"


def backward_pass() -> int:
    """The number of the backward pass that runs in this thread; -1 for none."""
    # Not public, but torch.utils.checkpoint calls it in all versions that pyproject.toml allows.
    return torch._C._current_graph_task_id()


class LossScale(NamedTuple):
    """What a gradient scaler multiplied a loss by; its `unscale_` divides the gradients of its optimizer by it."""

    scaler: Any
    value: float


@dataclass(frozen=True)
class Declared:
    """What is said of a term: by the reducer that sums it, or by an engine's adapter. Plain, so that ranks compare it.

    Attributes:
        mode: the term's own, in words; "" for none.
        has_policys_mode: that is the policy loss's too, its own or for want of one.
        coef: the factor of the term in the loss; NaN where there may be any; None where nobody said it.
        doubt: why a difference of weights is no evidence; "" for none.
        count: the samples by which an engine divides; None where nobody said it.
    """

    mode: str = ""
    has_policys_mode: bool = False
    coef: float | None = None
    doubt: str = ""
    count: float | None = None


class GradientSum:
    """The sum of the gradients that reach a tensor, over all backward passes.

    Attributes:
        total: float32 (float64 of float64 values) [numel]; None before the backward pass.
    """

    def __init__(self, total: Tensor | None = None) -> None:
        self.total = total

    def add(self, gradient: Tensor) -> None:
        """A tensor hook: returns nothing, so that the gradient goes on as it is."""
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        flat = gradient.detach().reshape(-1).to(dtype, copy=True)
        self.total = flat if self.total is None else self.total + flat


class LossOutput(NamedTuple):
    """The losses that a loss function of this package returned, and the gradient that reached them."""

    made_by: str
    gradient: GradientSum


class SummedShare:
    """A share that a reducer of this package summed: its gradient times the reducer's weights is that of its tokens.

    Attributes:
        reducer: its weights, aggregation, mask and plan.
        scale: of the gradient of a token: the share's times this times the token's weight.
        unseen: why the way from the losses to the share is not seen; "" where it is.
        outputs: of loss functions, which the losses were made of.
        is_beside: the losses depend on the model beside these outputs.
        slope: the gradient of the share, 0-dim; None before the backward pass.
        off: the largest error of a token's gradient, relative to the largest gradient, 0-dim.
    """

    def __init__(
        self,
        reducer: "Weighing",
        scale: float,
        unseen: str = "",
        outputs: Sequence[LossOutput] = (),
        is_beside: bool = False,
    ) -> None:
        self.reducer, self.scale, self.unseen, self.outputs, self.is_beside = reducer, scale, unseen, outputs, is_beside
        self.slope: Tensor | None = None
        self.off: Tensor | None = None

    def see(self, gradient: Tensor) -> None:
        """A tensor hook of the share, for `check`: returns nothing, so that the gradient goes on as it is."""
        self._last = gradient.detach().clone()

    def add(self, gradient: Tensor) -> None:
        """Add a gradient of the share."""
        self.slope = gradient.detach().clone() if self.slope is None else self.slope + gradient.detach()

    def check(self, gradient: Tensor) -> None:
        """A tensor hook of the losses, after that of the share: compares what was sent to them with the weights."""
        sent = self.reducer.weights * (self._last * self.scale)
        off = (gradient.detach().reshape(-1).to(sent) - sent).abs().max() if len(sent) else sent.sum()
        off = off / sent.abs().max().clamp(min=torch.finfo(sent.dtype).tiny) if len(sent) else off
        self.off = off if self.off is None else torch.maximum(self.off, off)

    def gradient(self) -> Tensor | None:
        """Of each token, float32 [num_local_tokens]; None before the backward pass."""
        return None if self.slope is None else self.reducer.weights * (self.slope * self.scale)


class Weighing(Protocol):
    """What a share knows of the reducer that made it: a `WeightedSum`."""

    weights: Tensor  # [num_local_tokens]
    aggregation: Aggregation
    mask: str | None  # one of the samples' further masks
    plan: Any  # the `PlanUse` of the plan that made it, if one did


@dataclass(eq=False)
class Tap:
    """The losses of one term of one micro-batch, and what is known of them.

    Attributes:
        shape, dtype: of the losses.
        samples: of the losses.
        coef, doubt, count: as in `Declared`.
        aggregation: the term's own.
        share: of losses that a reducer of this package summed, whose gradients it knows; other losses are hooked.
        hooked: the gradients that reached other losses.
        tokens: the model's input ids, int [numel].
        log_probs: float32 [numel] of both sides, where they are to be compared.
        source: a weak reference to the losses, for the tensor would keep its graph.
        at_log_probs: before the gradient lies the way of log-probs to the model's output, which multiplies by `path`.
        scales: of the backward passes that the gradient came by; None of one whose loss no scaler multiplied.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    samples: Samples | None = None
    coef: float | None = None
    aggregation: Aggregation | None = None
    share: SummedShare | None = None
    hooked: GradientSum = field(default_factory=GradientSum)
    tokens: Tensor | None = None
    log_probs: tuple[Tensor, ...] = ()
    source: Callable[[], Tensor | None] = lambda: None
    at_log_probs: bool = False
    path: float = 1.0
    scales: set[LossScale | None] = field(default_factory=set)
    doubt: str = ""
    count: float | None = None

    @property
    def gradient(self) -> Tensor | None:
        """The gradient that reached each token's loss, float [numel]; None before the backward pass."""
        gradient = self.hooked.total if self.share is None else self.share.gradient()
        return gradient if gradient is None or self.path == 1 else gradient * self.path

    @property
    def is_reached(self) -> bool:
        """True once a gradient came."""
        return (self.hooked.total if self.share is None else self.share.slope) is not None

    @property
    def mask(self) -> str | None:
        """The further mask of the samples by which tokens are weighed; None for the loss mask."""
        return None if self.share is None else self.share.reducer.mask

    @property
    def declared(self) -> Declared:
        """What is said of the term."""
        plan = None if self.share is None else self.share.reducer.plan
        has_policys_mode = plan is not None and self.aggregation is not None and self.aggregation == plan.policy
        mode = "" if self.aggregation is None else self.aggregation.describe()
        coef = None if self.coef is None else float(self.coef)
        return Declared(mode, has_policys_mode, coef, self.doubt, self.count)


@dataclass
class Taps:
    """Everything that was tapped of one step on this rank.

    Attributes:
        num_microbatches: how many were begun. At 0, each tap of a name counts as another micro-batch.
        losses: by term and micro-batch. A term that is tapped twice in a micro-batch is a second term.
        outputs: of loss functions of this package in this micro-batch, with their nodes in the graph.
        log_prob_gradients: of losses `at_log_probs`, a `LogProbGradients`.
        is_counted: somebody calls `take`; otherwise every backward pass counts.
        plans: those of the steps that ran, one inside the other, when losses were tapped.
        scales: by backward pass, what a gradient scaler multiplied its loss by.
        unscaled: ids of the scalers that divided gradients again.
        parts: of this micro-batch's loss, as far as `part_of_loss` was told.
        added: what a loss of the step has beside its terms, in words; the step is then not proved.
        receipt: of what this micro-batch handed out; None for nothing.
    """

    is_counted: bool = False
    num_microbatches: int = 0
    losses: dict[str, dict[int, Tap]] = field(default_factory=dict)
    outputs: list[tuple[Any, LossOutput]] = field(default_factory=list)
    log_prob_gradients: Any = None
    plans: set[Any] = field(default_factory=set)
    scales: dict[int, LossScale] = field(default_factory=dict)
    unscaled: set[int] = field(default_factory=set)
    parts: list["LossPart"] = field(default_factory=list)
    added: set[str] = field(default_factory=set)
    receipt: Any = None
    _waiting: dict[int, list[Callable[[], None]]] = field(default_factory=dict)
    _trained: set[int] = field(default_factory=set)

    def take(self) -> None:
        """Count what this backward pass showed so far, and shows from now on: it trains.

        Called once the pass has given a gradient to a parameter, or to the output of a model whose schedule started it.
        """
        number = backward_pass()
        self._trained.add(number)
        for count in self._waiting.pop(number, ()):
            count()

    def training_hook(
        self, add: Callable[[Tensor], None], scales: set[LossScale | None] | None = None
    ) -> Callable[[Tensor], None]:
        """A tensor hook that adds a gradient once the backward pass that it came by trains.

        `scales` receives what a gradient scaler multiplied the pass's loss by, None for nothing.

        A pass for a log, as of ``torch.autograd.grad``, does not; neither does a loss that is detached from the model.
        Where nothing takes any gradient all step long, on any rank, all passes count. A reentrant checkpoint computes
        losses again inside a pass, and takes their gradients by a pass of its own: either of the two may train.
        """
        around = backward_pass() if self.is_counted else -1

        def add_scaled(gradient: Tensor, scale: LossScale | None) -> None:
            add(gradient)
            if scales is not None:
                scales.add(scale)

        def hook(gradient: Tensor) -> None:
            copy, number = gradient.detach().clone(), backward_pass()
            scale = self.scales.get(number, self.scales.get(around))
            if not self.is_counted or {number, around} & self._trained:
                add_scaled(copy, scale)
                return
            is_added: list[bool] = []

            def count() -> None:
                if not is_added:
                    is_added.append(True)
                    add_scaled(copy, scale)

            for waits_for in {number, around} - {-1}:
                self._waiting.setdefault(waits_for, []).append(count)

        return hook

    @property
    def trained(self) -> bool:
        """True if a backward pass of this rank trained."""
        return bool(self._trained)

    def end(self, *, trained: bool) -> None:
        """Count the passes that trained nothing, if none did on any rank (`trained`)."""
        self.outputs, self.parts = [], []
        waiting, self._waiting = self._waiting, {}
        for count in itertools.chain.from_iterable(waiting.values()) if not trained else ():
            count()

    def begin_microbatch(self) -> None:
        self.num_microbatches += 1
        self.outputs, self.parts, self.receipt = [], [], None  # nodes of graphs are freed

    def add_output(self, per_token_loss: Tensor, made_by: str) -> None:
        """Record what reaches the losses that a loss function returned."""
        if torch.is_grad_enabled() and per_token_loss.requires_grad:
            output = LossOutput(made_by, GradientSum())
            per_token_loss.register_hook(self.training_hook(output.gradient.add))
            self.outputs.append((per_token_loss.grad_fn, output))

    def outputs_of(self, losses: Tensor) -> tuple[list[LossOutput], bool]:
        """The outputs that the losses were made of, as their graph says; True if they depend on the model beside."""
        by_node = dict(self.outputs)
        nodes = list(nodes_before(losses.grad_fn, by_node.__contains__)) if by_node else []
        return [by_node[node] for node in nodes if node in by_node], any(map(is_of_model, nodes))

    def find(self, losses: Tensor) -> Tap | None:
        """The tap of these very losses in this micro-batch, if there is one."""
        for term_taps in self.losses.values():
            for number, tapped in term_taps.items():
                is_now = self.num_microbatches in (0, number + 1)
                if is_now and tapped.source() is losses:
                    return tapped
        return None

    def of(self, losses: Tensor, name: str) -> Tap:
        """The tap of these very losses in this micro-batch; made if there is none yet."""
        if known := self.find(losses):
            return known
        tapped = Tap(tuple(losses.shape), losses.dtype, source=ref(losses))
        if losses.requires_grad:
            losses.register_hook(self.training_hook(tapped.hooked.add, tapped.scales))
        self.add(tapped, name)
        return tapped

    def add(self, tapped: Tap, name: str, number: int | None = None) -> None:
        """Add losses to a micro-batch, this one, under their name, or, if it is taken, as a further term."""
        counted = self.num_microbatches - 1 if self.num_microbatches else len(self.losses.get(name, {}))
        microbatch = counted if number is None else number
        terms = itertools.chain([name], (f"{name}#{number}" for number in itertools.count(2)))
        term = next(term for term in terms if microbatch not in self.losses.setdefault(term, {}))
        self.losses[term][microbatch] = tapped
        self.plans |= _OBSERVED.get().plans


# --- what observes the step that runs now

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Observed(NamedTuple):
    """The taps to which losses report, and the aggregation that the step should have; None where nobody said so.

    `plans` are those of the steps that run, one inside the other.
    """

    taps: Taps | None = None
    aggregation: Aggregation | None = None
    plans: frozenset[Any] = frozenset()


#: Whoever runs a step sets it and puts it back. Loss functions are called by a schedule that knows nothing of a
#: measurement, so none can hand it on.
_OBSERVED: ContextVar[Observed] = ContextVar("observed", default=Observed())  # noqa: B039  # a value


@contextmanager
def observe(taps: Taps | None = None, aggregation: Aggregation | None = None, plan: Any = None) -> Iterator[None]:
    """In a ``with``: losses report to the taps; the step is a plan's, and has the aggregation. None changes nothing."""
    outer = _OBSERVED.get()
    plans = outer.plans if plan is None else outer.plans | {plan}
    token = _OBSERVED.set(Observed(taps or outer.taps, aggregation or outer.aggregation, plans))
    try:
        yield
    finally:
        _OBSERVED.reset(token)


@contextmanager
def unobserved() -> Iterator[None]:
    """In a ``with``: losses report to nobody, for a loss function that is tried and does not train."""
    token = _OBSERVED.set(_OBSERVED.get()._replace(taps=None))
    try:
        yield
    finally:
        _OBSERVED.reset(token)


def expected_aggregation() -> Aggregation | None:
    """The aggregation of the current step, if its trainer said so."""
    return _OBSERVED.get().aggregation


def observed_taps() -> Taps | None:
    """Those of the measurement that observes the current step, if one does; None while torch compiles."""
    return None if torch.compiler.is_compiling() else _OBSERVED.get().taps


def is_observed() -> bool:
    """True while a measurement observes the current step."""
    return observed_taps() is not None


def taps_of(value: Tensor) -> Taps | None:
    """`observed_taps`, unless no gradient will reach the value."""
    return observed_taps() if torch.is_grad_enabled() and value.requires_grad else None


class LossPart(NamedTuple):
    """The node of the graph of a part of a loss, and the nodes that it may be made of; None for any."""

    node: Any
    inputs: list[Any] | None


def part_of_loss(value: Tensor, inputs: Sequence[Tensor] | None = None) -> Tensor:
    """The value unchanged, a part of this micro-batch's loss: it is measured, or somebody says who aggregates it.

    `inputs` are all by which it may depend on the model; None for any.
    """
    if (taps := taps_of(value)) is not None:
        taps.parts.append(LossPart(value.grad_fn, None if inputs is None else [held.grad_fn for held in inputs]))
    return value


def reports_output(loss_function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate a loss function: the gradient at its result shows what lies between it and the reducer."""

    @wraps(loss_function)
    def report(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        result = loss_function(*args, **kwargs)
        if (taps := observed_taps()) is not None:
            per_token_loss: Any = getattr(result, "per_token_loss", result)
            taps.add_output(per_token_loss, loss_function.__name__)
        return result

    return report


def tap(
    per_token_loss: Tensor,
    name: str = "pg",
    *,
    samples: Samples | None = None,
    coef: float | None = None,
    aggregation: Aggregation | None = None,
    tokens: Tensor | None = None,
    log_probs: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The losses unchanged; while an audit observes the step, the tap records the gradient that reaches them.

    Call it in a loss function on the unreduced losses, before masks or weights are multiplied to them, once for each
    term: ``per_token_loss = tap(per_token_loss, samples=samples_of(batch))``. The reducers of this package do so
    themselves. Without an audit, without gradients, of losses that need none or while torch compiles it does nothing.

    Args:
        per_token_loss: float, this rank's losses in the order of the samples' layout.
        name: of the term.
        samples: the samples of these losses; optional where the audit has `samples_of`.
        coef: the factor of the term in the loss; an audit divides it out. NaN where there may be any.
        aggregation: the term's own, if it is not the policy loss's.
        tokens: the model's input ids on this rank, in the order of the losses; an audit compares them with those of
            ``Samples(tokens=...)``, cut by the layout.
        log_probs: the trainer's and the batch's old ones, in the order of the losses, for an audit to compare.
    """
    taps = observed_taps()
    is_of_no_token = samples is not None and not per_token_loss.numel()  # its samples are told all the same
    if taps is None or not torch.is_grad_enabled() or not (per_token_loss.requires_grad or is_of_no_token):
        return per_token_loss
    tapped = taps.of(per_token_loss, name)  # this package's reducers tap losses that the user may have tapped before
    tapped.samples = tapped.samples or samples
    tapped.coef = coef if tapped.coef is None else tapped.coef
    tapped.aggregation = tapped.aggregation or aggregation
    if tapped.tokens is None and tokens is not None:
        tapped.tokens = torch.as_tensor(tokens).detach().reshape(-1).clone()
    tapped.log_probs = tapped.log_probs or tuple(
        values.detach().reshape(-1).to(torch.float32, copy=True) for values in log_probs or ()
    )
    return per_token_loss
