"""One optimizer step of a trainer, simulated: its loss function is called as on every rank and micro-batch.

A token's weight is c · ∂(returned loss)/∂(that token's loss), with c = 1/K where micro-batches are averaged, times 1/D
where data-parallel ranks are, times 1/C where context-parallel ranks are; added up over the calls that see the token.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor

from megatron_rl_loss.audit.assembly import Part, Rows, measured_step
from megatron_rl_loss.audit.tokens import MeasuredStep, Split
from megatron_rl_loss.errors import check_callable, check_choice, check_mapping, did_you_mean
from megatron_rl_loss.step import layouts
from megatron_rl_loss.step.collectives import StepGroups
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.totals import StepTotals, count_step
from megatron_rl_loss.step.units import Sum

LossFunction = Callable[..., Tensor]
#: What a loss function may ask for by the name of a parameter, beside its first two: what it is, and how it is made.
#: Counts of tokens are sums of masks, 0-dim int64; a *step* is all micro-batches of all data-parallel ranks.
GIVEN: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "step_tokens": ("mask tokens of the step", lambda c: c.tokens.sum()),
    "rank_tokens": ("mask tokens of this data-parallel rank's micro-batches", lambda c: c.tokens[c.rank].sum()),
    "microbatch_tokens": ("mask tokens of this micro-batch, on all its CP ranks", lambda c: c.tokens[c.rows].sum()),
    "step_samples": ("rows of the step, masked ones too", lambda c: len(c.tokens)),
    "step_active_samples": ("rows of the step with a token whose mask is not 0", lambda c: int((c.tokens > 0).sum())),
    "rank_samples": ("rows of this data-parallel rank's micro-batches", lambda c: len(c.tokens[c.rank])),
    "step_rollouts": ("rollouts of the step", lambda c: len(c.rollouts.unique())),
    "step_prompts": ("prompts of the step", lambda c: len(c.prompts.unique())),
    "num_microbatches": ("micro-batches of a rank", lambda c: len(c.step.ranks[0])),
    "microbatch": ("the number of this one, from 0", lambda c: c.microbatch),
    "dp_size": ("data-parallel ranks", lambda c: len(c.step.ranks)),
    "dp_rank": ("the number of this one", lambda c: c.dp_rank),
    "cp_size": ("context-parallel ranks", lambda c: c.step.cp_size),
    "cp_rank": ("the number of this one", lambda c: c.cp_rank),
    "world_size": ("data- times context-parallel ranks", lambda c: len(c.step.ranks) * c.step.cp_size),
    "sample_tokens": ("int64 [num_samples]: mask tokens of each row, on all CP ranks", lambda c: c.tokens[c.rows]),
    "rollout_tokens": ("the same, of the row's rollout in the whole step", lambda c: _tokens_of(c.rollouts, c)),
    "prompt_tokens": ("the same, of the row's prompt in the whole step", lambda c: _tokens_of(c.prompts, c)),
    "rollout_ids": ("list [num_samples]: the rollout of each row", lambda c: c.rollouts[c.rows].tolist()),
    "prompt_ids": ("list [num_samples]: the prompt of each row", lambda c: c.prompts[c.rows].tolist()),
    "cu_seqlens": ("int64 [num_samples + 1]: where rows begin in packed losses, uncut", lambda c: torch.tensor(c.bounds)),
    "sample_index": ("int64, shaped as the losses: the row of each token", lambda c: c.shaped(c.index.clone())),
    "old_log_probs": ("shaped and equal as the log-probs, no gradient", lambda c: c.shaped(c.values.detach().clone())),
    "advantages": ("shaped as the log-probs: equal within a row, never 0", lambda c: c.shaped(c.advantages[c.index])),
    "sample_advantages": ("[num_samples]: the same, one per row", lambda c: c.advantages.clone()),
    "local": ("the `LocalTokens` that this rank holds: `Samples.local`", lambda c: c.local),
    "totals": ("the `StepTotals` of the step", lambda c: c.step.totals(c.sums)),
}


@dataclass(frozen=True, kw_only=True)
class LossCall:
    """How a trainer calls its loss function, and divides afterwards. The defaults are plain PyTorch: DDP, without CP.

    >>> LossCall(microbatches="mean", names={"total": "step_tokens"}).describe()
    'padded rows, micro-batches averaged, DP ranks averaged'

    Of ``log_probs`` the function makes losses itself; then a weight is what a policy gradient at ratio 1 puts on a
    token, beside its advantage. `cp_cut` is what a CP rank holds of every row: if ``gathered`` all, and gradients
    of all copies count; ``responses`` is a zigzag over prompt and response, of which the response is kept (packed).
    """

    takes: Literal["losses", "log_probs"] = "losses"  # the first thing the function is given, of tokens
    rows: Literal["padded", "packed", "lists"] = "padded"  # [batch, seq], [num_tokens], or one tensor per row
    names: Mapping[str, str] = field(default_factory=dict)  # parameters that are called otherwise than in `GIVEN`
    microbatches: Literal["sum", "mean"] = "sum"  # "mean": the trainer divides what is returned by their number
    dp: Literal["mean", "sum"] = "mean"  # "mean" as DDP and FSDP do, "sum" where a trainer undoes that
    cp: Literal["mean", "sum", None] = None  # None: there are no context-parallel ranks
    cp_cut: Literal["zigzag", "contiguous", "gathered", "responses"] = "zigzag"
    even_microbatches: bool = False  # whether all micro-batches have as many rows
    masked_samples: bool = True  # whether fully masked rows occur; without them micro-batches have active tokens
    split_rollouts: bool = False  # whether a rollout may be several rows (turns, branches)

    def __post_init__(self) -> None:
        check_mapping("LossCall.names", self.names, 'Write names={"num_items_in_batch": "step_tokens"}, say')
        for parameter, given in self.names.items():
            check_choice(f"number for LossCall.names[{parameter!r}]", given, GIVEN)
        hints = {name: hint for name, hint in get_type_hints(LossCall).items() if name != "names"}
        for name, choices in ((name, get_args(hint) or (True, False)) for name, hint in hints.items()):
            if not any(getattr(self, name) is one or getattr(self, name) == one != 1 for one in choices):
                rule = f"it must be one of {', '.join(map(repr, choices))}. Say what your trainer does"
                raise ValueError(f"LossCall.{name} is {getattr(self, name)!r}: {rule}.")
        if self.cp_cut != "zigzag" and self.cp is None:
            remedy = 'without context-parallel ranks nothing is cut. Say what becomes of them: cp="sum" or cp="mean"'
            raise ValueError(f"LossCall.cp_cut is {self.cp_cut!r}, and LossCall.cp None: {remedy}.")
        if self.cp_cut == "responses" and self.rows != "packed":
            remedy = 'what is left of rows is packed. Say rows="packed"'
            raise ValueError(f"LossCall.cp_cut is 'responses', and LossCall.rows {self.rows!r}: {remedy}.")

    def describe(self) -> str:
        """One line of what was assumed."""
        done = {"sum": "summed", "mean": "averaged"}
        rows = "a tensor per row" if self.rows == "lists" else f"{self.rows} rows"
        cp = f", {self.cp_cut} CP ranks {done[self.cp]}" if self.cp else ""
        parts = f"{rows}, micro-batches {done[self.microbatches]}, DP ranks {done[self.dp]}{cp}"
        return "log-probs, " * (self.takes == "log_probs") + parts


#: The calls of trainers by name, from their public sources (TRL 1.10.0.dev0, verl 0.10.0.dev).
CALLS: dict[str, LossCall] = {
    "pytorch": LossCall(),
    # transformers.Trainer with a `compute_loss_func` and `average_tokens_across_devices` multiplies what the function
    # returns by the number of processes, which DDP divides by.
    "transformers": LossCall(names={"num_items_in_batch": "step_tokens"}, dp="sum", even_microbatches=True),
    # trl.GRPOTrainer switches off the division by accumulation steps: its loss function divides by itself. Its
    # `num_items_in_batch` is that of a generation batch, the step's where `steps_per_generation` is the accumulation.
    "trl": LossCall(
        names={"num_items_in_batch": "step_tokens", "num_processes": "dp_size"}
        | dict.fromkeys(("gradient_accumulation_steps", "current_gradient_accumulation_steps"), "num_microbatches"),
        even_microbatches=True,
    ),
    # verl's `agg_loss` as its engines call it: global counts, times dp_size against averaged gradients.
    "verl": LossCall(names={"batch_num_tokens": "step_tokens", "global_batch_size": "step_samples"}),
    # prime-rl's `compute_loss`: lists of sequences, one global `loss_scale`; FSDP's division is undone.
    "prime_rl": LossCall(rows="lists", names={"loss_scale": "step_tokens"}, dp="sum"),
}


class CallFailed(Exception):
    """A call of the loss function gave nothing to measure: (its kind, what it did)."""


def asked_for(loss_fn: Any, call: LossCall) -> tuple[dict[str, str], list[str]]:
    """Names that a loss function asks for beside its first two parameters, with those of `GIVEN`.

    Also the parameters that are left at their defaults. Refuses what cannot be called with what the trainer has.
    """
    check_callable("loss_fn", loss_fn, "it must be a function of losses and masks", "Pass the function, not its result")
    try:
        signature = inspect.signature(loss_fn)
    except ValueError:  # built in
        return {}, []
    try:
        first_two = signature.bind_partial(0, 0).arguments
    except TypeError:
        raise TypeError(
            f"a loss function that takes {', '.join(signature.parameters) or 'nothing'}: its first two parameters are "
            f"given the {call.takes} and the mask. Wrap it: lambda {call.takes}, mask: your_loss({call.takes}, mask)."
        ) from None
    known, asks, left_alone = {name: name for name in GIVEN} | dict(call.names), dict[str, str](), list[str]()
    for name, parameter in signature.parameters.items():
        if name in first_two or name in getattr(loss_fn, "keywords", {}) or str(parameter).startswith("*"):
            continue
        if name in known:
            asks[name] = known[name]
        elif parameter.default is not parameter.empty:
            left_alone.append(name)
        else:
            raise TypeError(
                f"a loss function with a parameter {name!r} that has no default: only what a trainer has is given by "
                "name. Bind it with functools.partial, or say what it is with "
                f"LossCall(names={{{name!r}: ...}}). {did_you_mean(name, list(known))}."
            )
        if call.takes == "losses" and asks.get(name) in ("old_log_probs", "advantages", "sample_advantages"):
            raise TypeError(
                f"a loss function that asks for {name!r}: one that is given the losses of tokens needs none. If it "
                'makes the losses itself, say LossCall(takes="log_probs").'
            )
    return asks, left_alone


class DrawnSample(NamedTuple):
    """A row of data: its loss mask, of zeros and ones, and the numbers of the rollout and the prompt it belongs to."""

    mask: tuple[int, ...]
    rollout: int
    prompt: int


class DrawnStep(NamedTuple):
    """A step and how it is cut; plain data, whose `repr` makes it again."""

    ranks: tuple[tuple[tuple[DrawnSample, ...], ...], ...]  # [dp_size][num_microbatches][rows]
    cp_size: int = 1  # context-parallel ranks that every micro-batch is cut for
    seed: int = 0  # of the losses and advantages, whatever the cut

    @property
    def rows(self) -> list[DrawnSample]:
        """All of them, in order."""
        return [row for rank in self.ranks for microbatch in rank for row in microbatch]

    def samples(self, rows: slice = slice(None), call: LossCall | None = None) -> Samples:
        """Some rows, laid out as the call says; with labels that a mode of one's own may look at."""
        masks, rollouts, prompts = zip(*self.rows[rows], strict=True)
        numbers = range(len(self.rows))[rows]
        labels = {
            "advantage": [-1.0 if i % 3 == 0 else 1.0 for i in numbers],
            "weight": [0.5 + i % 3 for i in numbers],
            "adapter": [f"adapter {i % 2}" for i in numbers],
            "turns": [torch.arange(len(mask)) // 3 for mask in masks],
        }
        layout = None if call is None else _layout(call, list(map(len, masks)), self.cp_size)
        masks = [torch.tensor(mask, dtype=torch.float32) for mask in masks]
        return Samples(masks, layout=layout, rollout_ids=rollouts, prompt_ids=prompts, labels=labels)

    def totals(self, sums: Sequence[Sum] = ()) -> StepTotals:
        """Of the step, with sums that a mode declares."""
        return count_step([self.samples()], StepGroups(), sums=sums)


def _layout(call: LossCall, lengths: list[int], cp_size: int) -> layouts.Layout:
    """Rows of one width or each for itself, as long as the cut wants it."""
    multiple = 2 * cp_size if cp_size > 1 else 1
    sizes = [-(-length // multiple) * multiple for length in lengths]
    bounds = [0, *accumulate([max(sizes)] * len(sizes) if call.rows == "padded" else sizes)]
    if call.cp_cut == "gathered":
        return layouts.Gathered(bounds, total_lengths=lengths)
    if call.cp_cut == "contiguous":
        return layouts.Contiguous(bounds, total_lengths=lengths, per_slot=True)
    if call.cp_cut == "responses":
        return layouts.ZigzagResponse([length + 3 for length in lengths], lengths)
    if call.rows == "padded":
        return layouts.ZigzagBSHD(len(lengths), bounds[1], total_lengths=lengths)
    return layouts.ZigzagTHD(bounds, total_lengths=lengths)


def _tokens_of(ids: Tensor, c: Any) -> Tensor:
    return torch.stack([c.tokens[ids == one].sum() for one in ids[c.rows]])


def measure(
    loss_fn: LossFunction, call: LossCall, step: DrawnStep, sums: Sequence[Sum] = (), poisoned: bool = False
) -> MeasuredStep:
    """The weight of every token of a step, as the optimizer of such a trainer would get it; NaN where a loss is.

    `sums` are counted in the totals; poisoned losses are NaN where the mask is 0. Raises CallFailed for a call that
    raises, or that returns no number with a gradient; ValueError and TypeError as `asked_for`.
    """
    asks, _ = asked_for(loss_fn, call)
    lengths, rollouts, prompts = zip(*((len(mask), *ids) for mask, *ids in step.rows), strict=True)
    generator = torch.Generator().manual_seed(step.seed)
    advantages = torch.randn(len(lengths), generator=generator)
    advantages += 0.5 * torch.where(advantages < 0, -1, 1)
    losses = 3 * torch.randn(sum(lengths), generator=generator)
    losses = -losses.abs() - 0.1 if call.takes == "log_probs" else losses
    if poisoned:
        losses[torch.tensor([entry for row in step.rows for entry in row.mask]) == 0] = torch.nan
    of_step = {"call": call, "step": step, "sums": sums, "tokens": torch.tensor([sum(row.mask) for row in step.rows])}
    of_step |= {"rollouts": torch.tensor(rollouts), "prompts": torch.tensor(prompts)}
    parts, end = list[Part](), 0
    for dp_rank, rank in enumerate(step.ranks):
        of_rank = slice(end, end + sum(map(len, rank)))
        for number, chosen in enumerate(rank):
            rows = slice(end, end := end + len(chosen))
            samples = step.samples(rows, call)
            buffer = samples.in_buffer(losses.split(lengths)[rows])
            for cp_rank in range(step.cp_size):
                place = {"dp_rank": dp_rank, "microbatch": number, "cp_rank": cp_rank}
                local = samples.local(cp_rank, step.cp_size)
                c = SimpleNamespace(**of_step, **place, rank=of_rank, rows=rows, local=local, bounds=samples.layout.bounds)
                c.values, c.advantages = local.of(buffer).clone().requires_grad_(), advantages[rows]
                c.index = torch.from_numpy(local.sample_index)
                gradients = _derivative(loss_fn, asks, c)
                parts.append(Part(rows=Rows.of(local), positions=local.positions, gradients=gradients, **place))
    sizes = {"num_microbatches": len(step.ranks[0]), "dp_size": len(step.ranks), "cp_size": step.cp_size}
    done = zip(sizes.values(), (call.microbatches, call.dp, call.cp), strict=True)
    return measured_step(parts, 1 / math.prod(size for size, how in done if how == "mean"), Split(**sizes))


def _derivative(loss_fn: LossFunction, asks: Mapping[str, str], c: Any) -> Any:
    """Of the loss that a call returns by the loss of each token that the rank holds, [num_local_tokens]."""
    where = f" (micro-batch {c.microbatch}, DP rank {c.dp_rank}, CP rank {c.cp_rank})"
    held = c.step.cp_size if c.call.cp_cut != "gathered" else 1
    sizes = [(end - begin) // held for begin, end in zip(c.bounds, c.bounds[1:], strict=False)]
    views = {"padded": lambda x: x.view(len(sizes), -1), "packed": lambda x: x, "lists": lambda x: list(x.split(sizes))}
    c.shaped = views[c.call.rows]
    try:
        given = {name: GIVEN[what][1](c) for name, what in asks.items()}
        loss: Any = loss_fn(c.shaped(c.values * 1), c.shaped(torch.from_numpy(c.local.mask.copy())), **given)
    except Exception as error:
        raise CallFailed("raises", f"it raises {type(error).__name__}: {error}{where}") from error
    if not isinstance(loss, Tensor):
        hint = ": return the loss alone" if isinstance(loss, tuple | list | dict) else ""
        raise CallFailed("no loss", f"it returns a {type(loss).__name__}, no tensor{hint}{where}")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise CallFailed("no loss", f"it returns {loss.dtype} of shape {tuple(loss.shape)}, not one number{where}")
    if not loss.requires_grad:
        raise CallFailed("no graph", f"what it returns has no graph, so nothing is trained{where}")
    (gradient,) = torch.autograd.grad(loss, c.values, allow_unused=True)
    gradient = torch.zeros_like(c.values) if gradient is None else gradient
    gradient = gradient if torch.isfinite(loss) else gradient * torch.nan
    return (-gradient / c.advantages[c.index] if c.call.takes == "log_probs" else gradient).double().numpy()
