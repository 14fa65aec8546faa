"""One optimizer step of a trainer, simulated: its loss function is called as on every rank and micro-batch, and what
it does to each token is measured.

A token's weight is c · ∂(returned loss)/∂(that token's loss), with c = 1/K where micro-batches are averaged, times 1/D
where data-parallel ranks are, times 1/C where context-parallel ranks are; added up over the calls that see the token.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_rl_loss.audit.assembly import Part, Rows, measured_step
from megatron_rl_loss.audit.calling import GIVEN, LossCall
from megatron_rl_loss.audit.drawn_steps import LossCase
from megatron_rl_loss.audit.tokens import MeasuredStep, Split
from megatron_rl_loss.errors import check_callable, did_you_mean
from megatron_rl_loss.step.layouts import (
    Contiguous,
    Gathered,
    Layout,
    ZigzagBSHD,
    ZigzagResponse,
    ZigzagTHD,
    concatenated_ranges,
)
from megatron_rl_loss.step.samples import LocalTokens, Samples
from megatron_rl_loss.step.totals import StepTotals

LossFunction = Callable[..., Tensor]
Failure = Literal["raises", "no loss", "no graph"]


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


def measure(loss_fn: LossFunction, call: LossCall, case: LossCase) -> MeasuredStep:
    """The weight of every token of a step, as the optimizer of such a trainer would get it; NaN where a loss is.

    Raises:
        CallFailed: a call that raises, or that returns no number with a gradient; the text says which call.
        ValueError, TypeError: a function that cannot be called with what the trainer has.
    """
    asks, _ = asked_for(loss_fn, call)
    totals = functools.cache(functools.partial(case.totals_with, getattr(loss_fn, "statistics", {})))
    first, parts = 0, list[Part]()
    for dp_rank, rank in enumerate(case.ranks):
        for number, samples in enumerate(rank):
            rows = slice(first, first + len(samples))
            parts += _MicroBatch(loss_fn, asks, totals, call, case, dp_rank, number, rows).parts()
            first = rows.stop
    split = Split(num_microbatches=case.num_microbatches, dp_size=case.dp_size, cp_size=case.cp_size)
    divided_by = case.num_microbatches if call.microbatches == "mean" else 1
    divided_by *= (case.dp_size if call.dp == "mean" else 1) * (case.cp_size if call.cp == "mean" else 1)
    return measured_step(parts, 1 / divided_by, split)


class _MicroBatch:
    """The calls of one micro-batch, one a context-parallel rank; `rows` are its samples of the step."""

    def __init__(
        self, loss_fn: LossFunction, asks: dict[str, str], totals: Callable[[], StepTotals],
        call: LossCall, case: LossCase, dp_rank: int, number: int, rows: slice,
    ) -> None:  # fmt: skip
        self.loss_fn, self.asks, self.totals, self.call, self.case = loss_fn, asks, totals, call, case
        self.dp_rank, self.number, self.rows = dp_rank, number, rows
        ids, cp_size, masks = case.ids(rows), case.cp_size, case.masks[rows]
        self.lengths = list(map(len, masks))
        begin = sum(map(len, case.masks[: rows.start]))
        self.entries = slice(begin, begin + sum(self.lengths))
        self.labels = {name: entries[rows] for name, entries in case.labels.items()}
        self.slots = _slots(call, self.lengths, cp_size, spare=case.padded_masks)
        layout = _layout(call, self.lengths, self.slots, cp_size)
        #: As they are: where the entries of masks are in the layout's buffer.
        self.described = self.samples = Samples(masks, layout=layout, **ids)
        if case.padded_masks:
            turns = zip(self.labels["turns"], self.slots, strict=True)
            self.labels["turns"] = [pad(entry, (0, slot - len(entry)), value=-1) for entry, slot in turns]
            padded = [pad(mask, (0, slot - len(mask))) for mask, slot in zip(masks, self.slots, strict=True)]
            self.samples = Samples(padded, layout=ZigzagTHD([0, *np.cumsum(self.slots).tolist()]), **ids)

    def parts(self) -> Iterator[Part]:
        """What each context-parallel rank measures."""
        cp_size, lengths = self.case.cp_size, np.array(self.lengths)
        rows = replace(Rows.of(self.described, cp_size), response_lengths=lengths, total_lengths=lengths)
        for cp_rank in range(cp_size):
            local = self.samples.local(cp_rank, cp_size)
            place: Any = {"dp_rank": self.dp_rank, "cp_rank": cp_rank, "microbatch": self.number}
            positions, gradients = local.positions.numpy(), self._derivatives(cp_rank, local)
            yield Part(**place, rows=rows, positions=positions, gradients=gradients)

    def _derivatives(self, cp_rank: int, local: LocalTokens) -> Any:
        """Of the returned loss by the loss of each token that the CP rank holds, float64 [num_local_tokens]."""
        buffer = torch.zeros(self.samples.total_tokens)
        at = concatenated_ranges(np.array(self.described.mask_starts), np.array(self.lengths))
        buffer[torch.from_numpy(at)] = self.case.losses(self.call.takes)[self.entries]
        leaf = local.of(buffer).clone().requires_grad_()
        advantages = self.case.advantages()[self.rows][local.sample_index]
        given = {name: self._given(what, cp_rank, local, leaf, advantages) for name, what in self.asks.items()}
        where = self._where(cp_rank)
        try:
            loss = self.loss_fn(self._shaped(leaf * 1), self._shaped(local.mask.clone()), **given)
        except Exception as error:
            raise CallFailed("raises", f"it raises {type(error).__name__}: {error}{where}") from error
        _check_loss(loss, where)
        (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
        if gradient is None:
            gradient = torch.zeros_like(leaf)
        if not bool(torch.isfinite(loss)):
            gradient = gradient * float("nan")
        if self.call.takes == "log_probs":
            gradient = -gradient / advantages
        return gradient.double().numpy()

    def _where(self, cp_rank: int) -> str:
        case = self.case
        parts = [f"micro-batch {self.number}"] * (case.num_microbatches > 1)
        parts += [f"DP rank {self.dp_rank}"] * (case.dp_size > 1) + [f"CP rank {cp_rank}"] * (case.cp_size > 1)
        return f" ({', '.join(parts)})" if parts else ""

    def _shaped(self, flat: Tensor) -> Any:
        """What the CP rank holds, as the function is given it."""
        if self.call.rows == "padded":
            return flat.view(len(self.lengths), -1)
        if self.call.rows == "lists":
            ranks = 1 if self.call.cp_cut == "gathered" else self.case.cp_size
            return list(flat.split([size // ranks for size in self.slots]))
        return flat

    def _given(self, what: str, cp_rank: int, local: LocalTokens, values: Tensor, advantages: Tensor) -> Any:
        """What the function asks for, by its name in `GIVEN`."""
        case, rows, ids = self.case, self.rows, self.case.ids()
        rank_sizes = [sum(map(len, rank)) for rank in case.ranks]
        of_rank = slice(sum(rank_sizes[: self.dp_rank]), sum(rank_sizes[: self.dp_rank + 1]))
        tokens = torch.tensor([sum(sample.mask) for sample in case.samples])
        rollouts, prompts = ids["rollout_ids"] or list(range(len(tokens))), ids["prompt_ids"]

        def unit_tokens(ids: list[int]) -> Tensor:
            units = torch.tensor(ids)
            return torch.stack([tokens[units == one].sum() for one in units[rows]])

        makers: dict[str, Callable[[], Any]] = {
            "step_tokens": tokens.sum,
            "rank_tokens": tokens[of_rank].sum,
            "microbatch_tokens": tokens[rows].sum,
            "step_samples": lambda: len(tokens),
            "step_active_samples": lambda: int((tokens > 0).sum()),
            "rank_samples": lambda: rank_sizes[self.dp_rank],
            "step_rollouts": lambda: len(set(rollouts)),
            "step_prompts": lambda: len(set(prompts)),
            "num_microbatches": lambda: case.num_microbatches,
            "microbatch": lambda: self.number,
            "dp_size": lambda: case.dp_size,
            "dp_rank": lambda: self.dp_rank,
            "cp_size": lambda: case.cp_size,
            "cp_rank": lambda: cp_rank,
            "world_size": lambda: case.dp_size * case.cp_size,
            "sample_tokens": lambda: tokens[rows],
            "rollout_tokens": lambda: unit_tokens(rollouts),
            "prompt_tokens": lambda: unit_tokens(prompts),
            "rollout_ids": lambda: rollouts[rows],
            "prompt_ids": lambda: prompts[rows],
            "cu_seqlens": lambda: torch.tensor([0, *self.slots]).cumsum(0),
            "sample_index": lambda: self._shaped(local.sample_index.clone()),
            "old_log_probs": lambda: self._shaped(values.detach().clone()),
            "advantages": lambda: self._shaped(advantages.clone()),
            "sample_advantages": lambda: case.advantages()[rows],
            "loss_masks": lambda: [mask.clone() for mask in self.samples.loss_masks],
            "labels": lambda: self.labels,
            "layout": lambda: self.samples.layout,
            "totals": self.totals,
        }
        return makers[what]()


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


def _layout(call: LossCall, lengths: list[int], slots: list[int], cp_size: int) -> Layout:
    bounds = [0, *np.cumsum(slots).tolist()]
    if call.cp_cut == "gathered":
        return Gathered(bounds, total_lengths=lengths)
    if call.cp_cut == "contiguous":
        return Contiguous(bounds, total_lengths=lengths, per_slot=True)
    if call.cp_cut == "responses" and cp_size > 1:
        return ZigzagResponse([length + 3 for length in lengths], lengths)
    if call.rows == "padded":
        return ZigzagBSHD(len(lengths), bounds[1], total_lengths=lengths)
    return ZigzagTHD(bounds, total_lengths=lengths)
