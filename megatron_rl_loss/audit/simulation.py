"""One optimizer step of a trainer, simulated: its loss function is called as on every rank and micro-batch, and what
it does to each token is measured.

A token's weight is c · ∂(returned loss)/∂(that token's loss), with c = 1/K where micro-batches are averaged, times 1/D
where data-parallel ranks are, times 1/C where context-parallel ranks are; added up over the calls that see the token.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args, get_type_hints

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_rl_loss.audit.assembly import Part, Rows, measured_step
from megatron_rl_loss.audit.drawn_steps import LossCase
from megatron_rl_loss.audit.tokens import MeasuredStep, Split
from megatron_rl_loss.errors import check_callable, check_choice, did_you_mean
from megatron_rl_loss.step import layouts
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.totals import StepTotals

LossFunction = Callable[..., Tensor]
Failure = Literal["raises", "no loss", "no graph"]


#: What a loss function may ask for by the name of a parameter, beside its first two. Counts of tokens are sums of
#: masks, 0-dim int64 tensors; a *step* is all micro-batches of all data-parallel ranks.
GIVEN: dict[str, str] = {
    "step_tokens": "mask tokens of the step",
    "rank_tokens": "mask tokens of this data-parallel rank's micro-batches",
    "microbatch_tokens": "mask tokens of this micro-batch, not cut for context parallelism",
    "step_samples": "rows of the step, masked ones too",
    "step_active_samples": "rows of the step with a token whose mask is not 0",
    "rank_samples": "rows of this data-parallel rank's micro-batches",
    "step_rollouts": "rollouts of the step",
    "step_prompts": "prompts of the step",
    "num_microbatches": "micro-batches of a rank",
    "microbatch": "the number of this one, from 0",
    "dp_size": "data-parallel ranks",
    "dp_rank": "the number of this one",
    "cp_size": "context-parallel ranks",
    "cp_rank": "the number of this one",
    "world_size": "data- times context-parallel ranks",
    "sample_tokens": "int64 [num_samples]: mask tokens of each row, not cut for context parallelism",
    "rollout_tokens": "int64 [num_samples]: mask tokens, in the whole step, of the rollout of each row",
    "prompt_tokens": "int64 [num_samples]: mask tokens, in the whole step, of the prompt of each row",
    "rollout_ids": "list [num_samples]: the rollout of each row",
    "prompt_ids": "list [num_samples]: the prompt of each row",
    "cu_seqlens": "int64 [num_samples + 1]: where rows begin in packed losses, not cut for context parallelism",
    "sample_index": "int64, shaped as the losses: the row of each token",
    "old_log_probs": "shaped as the log-probs: equal to them, without gradient",
    "advantages": "shaped as the log-probs: equal within a row, never 0",
    "sample_advantages": "[num_samples]: the same, one per row",
    "loss_masks": "list [num_samples]: the 1-D mask of each row, not padded and not cut for context parallelism",
    "step_masks": "list [step_samples]: the 1-D mask of each row of the step",
    "step_prompt_ids": "list [step_samples]: the prompt of each row of the step",
    "first_row": "the number, in the step, of this micro-batch's first row",
    "labels": "a dict of lists [num_samples] of what a mode of one's own may look at, random",
    "layout": "the `Layout` of the losses",
    "local": "the `LocalTokens` that this rank holds: `Samples.local`",
    "totals": "the `StepTotals` of the step",
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
    cp: Literal["mean", "sum"] | None = None  # None: there are no context-parallel ranks
    cp_cut: Literal["zigzag", "contiguous", "gathered", "responses"] = "zigzag"
    even_microbatches: bool = False  # whether all micro-batches have as many rows
    masked_samples: bool = True  # whether fully masked rows occur; without them micro-batches have active tokens
    split_rollouts: bool = False  # whether a rollout may be several rows (turns, branches)

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(LossCall).items():
            value = getattr(self, name)
            if hint is bool and not isinstance(value, bool):
                raise TypeError(f"LossCall.{name} is {value!r}: it must be True or False. Say whether it is so.")
            if get_args(hint) and name not in ("names", "cp"):
                check_choice(f"LossCall.{name}", value, get_args(hint))
        if self.cp is not None:
            check_choice("LossCall.cp", self.cp, ("mean", "sum"))
        elif self.cp_cut != "zigzag":
            raise ValueError(
                f"LossCall.cp_cut is {self.cp_cut!r}, and LossCall.cp None: without context-parallel ranks nothing is "
                'cut. Say what becomes of them: cp="sum" or cp="mean".'
            )
        if self.cp_cut == "responses" and self.rows != "packed":
            raise ValueError(
                f"LossCall.cp_cut is 'responses', and LossCall.rows {self.rows!r}: what is left of rows is packed. "
                'Say rows="packed".'
            )
        if not isinstance(self.names, Mapping):
            raise TypeError(
                f"LossCall.names is a {type(self.names).__name__}: it must map parameters of the loss function to what "
                'they are given. Write names={"num_items_in_batch": "step_tokens"}, say.'
            )
        for parameter, given in self.names.items():
            check_choice(f"number for LossCall.names[{parameter!r}]", given, GIVEN)

    def describe(self) -> str:
        """One line of what was assumed."""
        done = {"sum": "summed", "mean": "averaged"}
        rows = f"{self.rows} rows" if self.rows != "lists" else "a tensor per row"
        parts = ["log-probs"] * (self.takes == "log_probs") + [rows]
        parts += [f"micro-batches {done[self.microbatches]}", f"DP ranks {done[self.dp]}"]
        if self.cp:
            parts.append(f"{self.cp_cut} CP ranks {done[self.cp]}")
        return ", ".join(parts)


#: The calls of trainers by name, from their public sources (TRL 1.10.0.dev0, verl 0.10.0.dev).
CALLS: dict[str, LossCall] = {
    "pytorch": LossCall(),
    # transformers.Trainer with a `compute_loss_func` and `average_tokens_across_devices` multiplies what the function
    # returns by the number of processes, which DDP divides by.
    "transformers": LossCall(names={"num_items_in_batch": "step_tokens"}, dp="sum", even_microbatches=True),
    # trl.GRPOTrainer switches off the division by accumulation steps: its loss function divides by itself. Its
    # `num_items_in_batch` is that of a generation batch, the step's where `steps_per_generation` is the accumulation.
    "trl": LossCall(
        names={
            "num_items_in_batch": "step_tokens",
            "num_processes": "dp_size",
            "gradient_accumulation_steps": "num_microbatches",
            "current_gradient_accumulation_steps": "num_microbatches",
        },
        even_microbatches=True,
    ),
    # verl's `agg_loss` as its engines call it: global counts, times dp_size against averaged gradients.
    "verl": LossCall(names={"batch_num_tokens": "step_tokens", "global_batch_size": "step_samples"}),
    # prime-rl's `compute_loss`: lists of sequences, one global `loss_scale`; FSDP's division is undone.
    "prime_rl": LossCall(rows="lists", names={"loss_scale": "step_tokens"}, dp="sum"),
}


class CallFailed(Exception):
    """A call of the loss function gave nothing to measure. `kind` says what, the text how."""

    def __init__(self, kind: Failure, text: str) -> None:
        super().__init__(text)
        self.kind: Failure = kind


def asked_for(loss_fn: Any, call: LossCall) -> tuple[dict[str, str], list[str]]:
    """What a loss function asks for beside its first two parameters: its word for it, and that of `GIVEN`.

    Also the parameters that are left at their defaults. Refuses what cannot be called with what the trainer has.
    """
    check_callable("loss_fn", loss_fn, "it must be a function of losses and masks", "Pass the function, not its result")
    try:
        parameters = list(inspect.signature(loss_fn).parameters.values())
    except ValueError:  # built in
        return {}, []
    kinds = inspect.Parameter
    first_two = [p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)][:2]
    if len(first_two) < 2 and not any(p.kind == kinds.VAR_POSITIONAL for p in parameters):
        names = ", ".join(p.name for p in parameters) or "nothing"
        raise TypeError(
            f"a loss function that takes {names}: its first two parameters are given the {call.takes} and the "
            f"mask. Wrap it: lambda {call.takes}, mask: your_loss({call.takes}, mask)."
        )
    bound = loss_fn.keywords if isinstance(loss_fn, functools.partial) else {}
    known = {name: name for name in GIVEN} | dict(call.names)
    asks: dict[str, str] = {}
    left_alone = []
    for parameter in parameters:
        name, kind = parameter.name, parameter.kind
        if parameter in first_two or kind in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL) or name in bound:
            continue
        if name in known and kind != kinds.POSITIONAL_ONLY:
            asks[name] = known[name]
            if call.takes == "losses" and known[name] in ("old_log_probs", "advantages", "sample_advantages"):
                raise TypeError(
                    f"a loss function that asks for {name!r}: one that is given the losses of tokens needs none. "
                    'If it makes the losses itself, say LossCall(takes="log_probs").'
                )
        elif parameter.default is kinds.empty:
            raise TypeError(
                f"a loss function with a parameter {name!r} that has no default: only what a trainer has is given "
                "by name. Bind it with functools.partial, or say what it is with "
                f"LossCall(names={{{name!r}: ...}}). {did_you_mean(name, list(known))}."
            )
        else:
            left_alone.append(name)
    return asks, left_alone


class _Call:
    """One call of the loss function: of a micro-batch, on a context-parallel rank; `rows` are its samples."""

    def __init__(
        self, call: LossCall, case: LossCase, totals: Callable[[], StepTotals], rows: slice, dp_rank: int, number: int,
        cp_rank: int,
    ) -> None:  # fmt: skip
        self.call, self.case, self.totals, self.rows = call, case, totals, rows
        self.dp_rank, self.number, self.cp_rank = dp_rank, number, cp_rank
        masks, ids, every_id = case.masks[rows], case.ids(rows), case.ids()
        self.tokens = torch.tensor([sum(sample.mask) for sample in case.samples])  # of each row of the step
        self.row_tokens = self.tokens[rows]
        self.rank_tokens = self.tokens.split([sum(map(len, rank)) for rank in case.ranks])[dp_rank]
        self.prompts, self.rollouts = every_id["prompt_ids"], every_id["rollout_ids"] or [*range(len(self.tokens))]
        self.lengths = list(map(len, masks))
        self.labels = {name: entries[rows] for name, entries in case.labels.items()}
        self.slots = _slots(call, self.lengths, case.cp_size, spare=case.padded_masks)
        layout = _layout(call, self.lengths, self.slots, case.cp_size)
        #: As they are: where the entries of masks are in the layout's buffer.
        self.described = self.samples = Samples(masks, layout=layout, labels=self.labels, **ids)
        if case.padded_masks:

            def padded(rows: list[Tensor], value: int) -> list[Tensor]:
                return [pad(row, (0, slot - len(row)), value=value) for row, slot in zip(rows, self.slots, strict=True)]

            self.labels = self.labels | {"turns": padded(self.labels["turns"], -1)}
            layout = layouts.ZigzagTHD([0, *np.cumsum(self.slots).tolist()])
            self.samples = Samples(padded(masks, 0), layout=layout, labels=self.labels, **ids)
        self.local = self.samples.local(cp_rank, case.cp_size)
        self.sample_index = torch.from_numpy(self.local.sample_index)
        before = sum(map(len, case.masks[: rows.start]))
        values = case.losses(call.takes)[before : before + sum(self.lengths)]
        buffer = self.described.in_buffer(values.split(self.lengths))
        #: Losses or log-probs of the tokens that the rank holds, [num_local_tokens].
        self.values = self.local.of(buffer).clone().requires_grad_()
        self.advantages = case.advantages()[rows][self.sample_index]

    def part(self, loss_fn: LossFunction, asks: dict[str, str]) -> Part:
        """What is measured in it."""
        rows, lengths = Rows.of(self.described.local(self.cp_rank, self.case.cp_size)), np.array(self.lengths)
        return Part(
            dp_rank=self.dp_rank,
            cp_rank=self.cp_rank,
            microbatch=self.number,
            rows=replace(rows, known=rows.known | {"response_lengths": lengths, "total_lengths": lengths}),
            positions=self.local.positions,
            gradients=self._derivatives(loss_fn, {name: self.given(what) for name, what in asks.items()}),
        )

    def _derivatives(self, loss_fn: LossFunction, given: dict[str, Any]) -> Any:
        """Of the returned loss by the loss of each token that the rank holds, float64 [num_local_tokens]."""
        try:
            loss = loss_fn(self.shaped(self.values * 1), self.shaped(torch.from_numpy(self.local.mask.copy())), **given)
        except Exception as error:
            raise CallFailed("raises", f"it raises {type(error).__name__}: {error}{self._where()}") from error
        _check_loss(loss, self._where())
        (gradient,) = torch.autograd.grad(loss, self.values, allow_unused=True)
        if gradient is None:
            gradient = torch.zeros_like(self.values)
        if not bool(torch.isfinite(loss)):
            gradient = gradient * float("nan")
        if self.call.takes == "log_probs":
            gradient = -gradient / self.advantages
        return gradient.double().numpy()

    def _where(self) -> str:
        case = self.case
        parts = [f"micro-batch {self.number}"] * (case.num_microbatches > 1)
        parts += [f"DP rank {self.dp_rank}"] * (case.dp_size > 1) + [f"CP rank {self.cp_rank}"] * (case.cp_size > 1)
        return f" ({', '.join(parts)})" if parts else ""

    def shaped(self, flat: Tensor) -> Any:
        """What the rank holds, as the function is given it."""
        if self.call.rows == "padded":
            return flat.view(len(self.lengths), -1)
        if self.call.rows == "lists":
            ranks = 1 if self.call.cp_cut == "gathered" else self.case.cp_size
            return list(flat.split([size // ranks for size in self.slots]))
        return flat

    def given(self, what: str) -> Any:
        """What the function asks for, by its name in `GIVEN`."""
        makers: dict[str, Callable[[], Any]] = {
            "step_tokens": self.tokens.sum,
            "rank_tokens": self.rank_tokens.sum,
            "microbatch_tokens": self.row_tokens.sum,
            "step_samples": lambda: len(self.tokens),
            "step_active_samples": lambda: int((self.tokens > 0).sum()),
            "rank_samples": lambda: len(self.rank_tokens),
            "step_rollouts": lambda: len(set(self.rollouts)),
            "step_prompts": lambda: len(set(self.prompts)),
            "num_microbatches": lambda: self.case.num_microbatches,
            "microbatch": lambda: self.number,
            "dp_size": lambda: self.case.dp_size,
            "dp_rank": lambda: self.dp_rank,
            "cp_size": lambda: self.case.cp_size,
            "cp_rank": lambda: self.cp_rank,
            "world_size": lambda: self.case.dp_size * self.case.cp_size,
            "sample_tokens": lambda: self.row_tokens,
            "rollout_tokens": lambda: self.tokens_of(self.rollouts),
            "prompt_tokens": lambda: self.tokens_of(self.prompts),
            "rollout_ids": lambda: self.rollouts[self.rows],
            "prompt_ids": lambda: self.prompts[self.rows],
            "cu_seqlens": lambda: torch.tensor([0, *self.slots]).cumsum(0),
            "sample_index": lambda: self.shaped(self.sample_index.clone()),
            "old_log_probs": lambda: self.shaped(self.values.detach().clone()),
            "advantages": lambda: self.shaped(self.advantages.clone()),
            "sample_advantages": lambda: self.case.advantages()[self.rows],
            "loss_masks": lambda: [torch.from_numpy(mask.copy()) for mask in self.samples.loss_masks],
            "step_masks": lambda: [mask.clone() for mask in self.case.masks],
            "step_prompt_ids": lambda: list(self.prompts),
            "first_row": lambda: self.rows.start,
            "labels": lambda: self.labels,
            "layout": lambda: self.samples.layout,
            "local": lambda: self.local,
            "totals": self.totals,
        }
        return makers[what]()

    def tokens_of(self, ids: list[int]) -> Tensor:
        """Mask tokens, in the whole step, of each row's unit; of the units of all rows of the step."""
        units = torch.tensor(ids)
        return torch.stack([self.tokens[units == one].sum() for one in units[self.rows]])


def _check_loss(loss: Any, where: str) -> None:
    if not isinstance(loss, Tensor):
        hint = ": return the loss alone" if isinstance(loss, tuple | list | dict) else ""
        raise CallFailed("no loss", f"it returns a {type(loss).__name__}, no tensor{hint}{where}")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise CallFailed("no loss", f"it returns {loss.dtype} of shape {tuple(loss.shape)}, not one number{where}")
    if not loss.requires_grad:
        raise CallFailed("no graph", f"what it returns has no graph, so nothing is trained{where}")


def _slots(call: LossCall, lengths: Sequence[int], cp_size: int, spare: bool) -> list[int]:
    """Padded sizes of the rows: of one width, or each for itself; divisible as the cut wants it."""
    multiple = 2 * cp_size if cp_size > 1 else 1
    sizes = [-(-length // multiple) * multiple + 2 * cp_size * spare for length in lengths]
    return [max(sizes)] * len(sizes) if call.rows == "padded" else sizes


def _layout(call: LossCall, lengths: list[int], slots: list[int], cp_size: int) -> layouts.Layout:
    bounds = [0, *np.cumsum(slots).tolist()]
    if call.cp_cut == "gathered":
        return layouts.Gathered(bounds, total_lengths=lengths)
    if call.cp_cut == "contiguous":
        return layouts.Contiguous(bounds, total_lengths=lengths, per_slot=True)
    if call.cp_cut == "responses" and cp_size > 1:
        return layouts.ZigzagResponse([length + 3 for length in lengths], lengths)
    if call.rows == "padded":
        return layouts.ZigzagBSHD(len(lengths), bounds[1], total_lengths=lengths)
    return layouts.ZigzagTHD(bounds, total_lengths=lengths)


def measure(loss_fn: LossFunction, call: LossCall, case: LossCase) -> MeasuredStep:
    """The weight of every token of a step, as the optimizer of such a trainer would get it; NaN where a loss is.

    Raises:
        CallFailed: a call that raises, or that returns no number with a gradient; the text says which call.
        ValueError, TypeError: a function that cannot be called with what the trainer has.
    """
    asks, _ = asked_for(loss_fn, call)
    totals = functools.cache(functools.partial(case.totals_with, getattr(loss_fn, "sums", ())))
    first, parts = 0, list[Part]()
    for dp_rank, rank in enumerate(case.ranks):
        for number, samples in enumerate(rank):
            rows = slice(first, first + len(samples))
            ranks = range(case.cp_size)
            parts += [_Call(call, case, totals, rows, dp_rank, number, cp).part(loss_fn, asks) for cp in ranks]
            first = rows.stop
    split = Split(num_microbatches=case.num_microbatches, dp_size=case.dp_size, cp_size=case.cp_size)
    divided_by = case.num_microbatches if call.microbatches == "mean" else 1
    divided_by *= (case.dp_size if call.dp == "mean" else 1) * (case.cp_size if call.cp == "mean" else 1)
    return measured_step(parts, 1 / divided_by, split)
