"""One optimizer step of a trainer, simulated: its loss function is called as on every rank and micro-batch, and what
it does to each token is measured.

A token's weight is c · ∂(returned loss)/∂(that token's loss), with c = 1/K where micro-batches are averaged, times 1/D
where data-parallel ranks are, times 1/C where context-parallel ranks are; added up over the calls that see the token.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_rl_loss.audit.calling import GIVEN, LossCall
from megatron_rl_loss.audit.drawn_steps import DrawnSample, DrawnStep
from megatron_rl_loss.audit.tokens import MeasuredStep, Split, StepTokens
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


@dataclass(frozen=True)
class LossCase:
    """A step and how it is split; plain data, whose `repr` makes it again.

    Attributes:
        ranks: the samples of each micro-batch of each data-parallel rank, ``[dp_size][num_microbatches][rows]``.
        cp_size: context-parallel ranks that every micro-batch is cut for.
        split_rollouts: whether samples of one rollout number are one rollout.
        seed: of the losses of tokens.
        poisoned: whether losses are NaN where the mask is 0.
        padded_masks: whether a loss function that asks for the masks of rows gets them as long as their padded slots.
    """

    ranks: tuple[tuple[tuple[DrawnSample, ...], ...], ...]
    cp_size: int = 1
    split_rollouts: bool = False
    seed: int = 0
    poisoned: bool = False
    padded_masks: bool = False

    @cached_property
    def step(self) -> DrawnStep:
        """All samples, in order."""
        samples = tuple(sample for rank in self.ranks for microbatch in rank for sample in microbatch)
        return DrawnStep(samples, self.split_rollouts)

    @property
    def num_microbatches(self) -> int:
        return len(self.ranks[0])

    @property
    def dp_size(self) -> int:
        return len(self.ranks)

    def uncut(self) -> "LossCase":
        """The same samples in one micro-batch on one rank."""
        return replace(self, ranks=((self.step.samples,),), cp_size=1, padded_masks=False)

    def __str__(self) -> str:
        """The masks: samples apart by a space, micro-batches by a bar, with their rollouts where those are split."""
        ranks = []
        for rank in self.ranks:
            rows = [" ".join(map(self._shown, microbatch)) for microbatch in rank]
            ranks.append(" | ".join(rows))
        named = [f"rank {i}: {rows}" for i, rows in enumerate(ranks)] if self.dp_size > 1 else ranks
        return "; ".join(named) + (f"; CP {self.cp_size}" if self.cp_size > 1 else "")

    def _shown(self, sample: DrawnSample) -> str:
        rollout = f"rollout {sample.rollout}:" if self.split_rollouts else ""
        return f"{rollout}[{''.join(map(str, sample.mask))}]"

    def losses(self, takes: str = "losses") -> Tensor:
        """A random number a mask entry, float32 [num_entries]: of both signs, or below 0 for log-probs."""
        generator = torch.Generator().manual_seed(self.seed)
        masks = torch.cat(self.step.masks)
        values = 3 * torch.randn(len(masks), generator=generator)
        values = -values.abs() - 0.1 if takes == "log_probs" else values
        return values.masked_fill(masks == 0, float("nan")) if self.poisoned else values

    def advantages(self) -> Tensor:
        """A random number a sample, float32 [num_samples], of both signs and at least 0.5 in size."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        values = torch.randn(len(self.step.samples), generator=generator)
        return values + 0.5 * torch.where(values < 0, -1.0, 1.0)


@dataclass(frozen=True)
class Signature:
    """What the loss function asks for beside the first two parameters: its word for it, and that of `GIVEN`."""

    asks: tuple[tuple[str, str], ...]
    left_alone: tuple[str, ...]

    @classmethod
    def of(cls, loss_fn: Any, call: LossCall) -> "Signature":
        """Refuses a function that cannot be called with what the trainer has."""
        check_callable(
            "loss_fn", loss_fn, "it must be a function of losses and masks", "Pass the function, not its result"
        )
        try:
            parameters = list(inspect.signature(loss_fn).parameters.values())
        except ValueError:  # built in
            return cls((), ())
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
        asks, left_alone = [], []
        for parameter in parameters:
            if parameter in first_two or parameter.kind in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL):
                continue
            if parameter.name in bound:
                continue
            if parameter.name in known and parameter.kind != kinds.POSITIONAL_ONLY:
                asks.append((parameter.name, known[parameter.name]))
            elif parameter.default is kinds.empty:
                raise TypeError(
                    f"a loss function with a parameter {parameter.name!r} that has no default: only what a trainer has "
                    "is given by name. Bind it with functools.partial, or say what it is with "
                    f"LossCall(names={{{parameter.name!r}: ...}}). {did_you_mean(parameter.name, list(known))}."
                )
            else:
                left_alone.append(parameter.name)
        for name, given in asks:
            if call.takes == "losses" and given in ("old_log_probs", "advantages", "sample_advantages"):
                raise TypeError(
                    f"a loss function that asks for {name!r}: one that is given the losses of tokens needs none. If it "
                    'makes the losses itself, say LossCall(takes="log_probs").'
                )
        return cls(tuple(asks), tuple(left_alone))


def measure(loss_fn: LossFunction, call: LossCall, case: LossCase) -> MeasuredStep:
    """The weight of every token of a step, as the optimizer of such a trainer would get it; NaN where a loss is.

    Raises:
        CallFailed: a call that raises, or that returns no number with a gradient; the text says which call.
        ValueError, TypeError: a function that cannot be called with what the trainer has.
    """
    return _Simulation(loss_fn, call, case).run()


class _Simulation:
    """The calls of one step."""

    def __init__(self, loss_fn: LossFunction, call: LossCall, case: LossCase) -> None:
        self.loss_fn, self.call, self.case = loss_fn, call, case
        self.asks = Signature.of(loss_fn, call).asks
        self.lengths = [len(sample.mask) for sample in case.step.samples]
        self.values = case.losses(call.takes)
        self.advantages = case.advantages()

    def run(self) -> MeasuredStep:
        weights = np.zeros(len(self.values))
        holders = np.full(len(self.values), -1)
        stray = (0, 0.0)
        first = 0
        for dp_rank, rank in enumerate(self.case.ranks):
            for number, microbatch in enumerate(rank):
                part = _MicroBatch(self, dp_rank, number, first, microbatch)
                weights[part.entries], holders[part.entries], loose = part.measure()
                stray = (stray[0] + loose[0], stray[1] + loose[1])
                first += len(microbatch)
        case = self.case
        split = Split(num_microbatches=case.num_microbatches, dp_size=case.dp_size, cp_size=case.cp_size)
        return MeasuredStep(tokens=self._tokens(holders), weights=weights, split=split, stray=stray)

    @cached_property
    def totals(self) -> StepTotals:
        """Of the step, with the sums that a mode declares."""
        return self.case.step.totals_with(getattr(self.loss_fn, "statistics", {}))

    def scale(self) -> float:
        """What the trainer multiplies gradients by afterwards."""
        case, call = self.case, self.call
        factors = [
            case.num_microbatches if call.microbatches == "mean" else 1,
            case.dp_size if call.dp == "mean" else 1,
            case.cp_size if call.cp == "mean" else 1,
        ]
        return float(1 / np.prod(factors))

    def _tokens(self, holders: Any) -> StepTokens:
        samples = self.case.step.samples
        places = [
            (dp_rank, number)
            for dp_rank, rank in enumerate(self.case.ranks)
            for number, microbatch in enumerate(rank)
            for _ in microbatch
        ]
        of_sample = {
            "sample": np.arange(len(samples)),
            "dp_rank": np.array([place[0] for place in places]),
            "microbatch": np.array([place[1] for place in places]),
            "rollout": np.array([s.rollout if self.case.split_rollouts else i for i, s in enumerate(samples)]),
            "prompt": np.array([sample.prompt for sample in samples]),
        }
        lengths = np.array(self.lengths)
        return StepTokens(
            mask=np.concatenate([np.array(sample.mask, dtype=np.float64) for sample in samples]),
            position=np.concatenate([np.arange(n) for n in lengths]),
            cp_rank=holders,
            response_lengths=lengths,
            total_lengths=lengths,
            **{name: values.repeat(lengths) for name, values in of_sample.items()},
        )


class _MicroBatch:
    """The calls of one micro-batch, one a context-parallel rank."""

    def __init__(self, step: _Simulation, dp_rank: int, number: int, first: int, drawn: Sequence[DrawnSample]) -> None:
        self.step, self.dp_rank, self.number, self.drawn = step, dp_rank, number, drawn
        self.rows = slice(first, first + len(drawn))
        begin = sum(step.lengths[:first])
        self.lengths = step.lengths[self.rows]
        self.entries = slice(begin, begin + sum(self.lengths))
        whole, cp_size = step.case.step, step.case.cp_size
        rollout_ids = whole.rollout_ids
        self.masks = whole.masks[self.rows]
        self.labels = {name: entries[self.rows] for name, entries in whole.labels.items()}
        layout = _layout(step.call, self.lengths, cp_size)
        if step.case.padded_masks:
            slots = _slots(step.call, self.lengths, cp_size, spare=True)
            layout = ZigzagTHD([0, *np.cumsum(slots).tolist()])
            self.masks = [pad(mask, (0, slot - len(mask))) for mask, slot in zip(self.masks, slots, strict=True)]
            turns = zip(self.labels["turns"], slots, strict=True)
            self.labels["turns"] = [pad(entry, (0, slot - len(entry)), value=-1) for entry, slot in turns]
        self.samples = Samples(
            self.masks,
            layout=layout,
            prompt_ids=whole.prompt_ids[self.rows],
            rollout_ids=None if rollout_ids is None else rollout_ids[self.rows],
        )
        #: Where the entries of unpadded masks are in the layout's buffer, [num_entries].
        self.at = concatenated_ranges(np.array(self.samples.mask_starts), np.array(self.lengths))

    def measure(self) -> tuple[Any, Any, tuple[int, float]]:
        """Weight and CP rank of each mask entry, and the weight in padding: its places and the sum of its sizes."""
        step, cp_size = self.step, self.step.case.cp_size
        buffer = np.zeros(self.samples.total_tokens)
        holder = np.full(self.samples.total_tokens, -1)
        for cp_rank in range(cp_size):
            local = self.samples.local(cp_rank, cp_size)
            positions = local.positions.numpy()
            np.add.at(buffer, positions, self._derivatives(cp_rank, local) * step.scale())
            if step.call.cp_cut != "gathered":
                holder[positions] = cp_rank
        weights, holders = buffer[self.at], holder[self.at]
        buffer[self.at] = 0
        return weights, holders, (int((buffer != 0).sum()), float(np.abs(buffer).sum()))

    def _derivatives(self, cp_rank: int, local: LocalTokens) -> Any:
        """Of the returned loss by the loss of each token that the CP rank holds, float64 [num_local_tokens]."""
        call = self.step.call
        values = self._local(local, self.step.values[self.entries].split(self.lengths))
        leaf = values.requires_grad_()
        advantages = self.step.advantages[self.rows][local.sample_index]
        mask = local.mask.clone()
        given = {name: self._given(what, cp_rank, local, values, advantages) for name, what in self.step.asks}
        where = self._where(cp_rank)
        try:
            loss = self.step.loss_fn(self._shaped(leaf * 1, local), self._shaped(mask, local), **given)
        except Exception as error:
            raise CallFailed("raises", f"it raises {type(error).__name__}: {error}{where}") from error
        _check_loss(loss, where)
        (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
        if gradient is None:
            gradient = torch.zeros_like(leaf)
        if not bool(torch.isfinite(loss)):
            gradient = gradient * float("nan")
        if call.takes == "log_probs":
            gradient = -gradient / advantages
        return gradient.double().numpy()

    def _where(self, cp_rank: int) -> str:
        case = self.step.case
        parts = [f"micro-batch {self.number}"] * (case.num_microbatches > 1)
        parts += [f"DP rank {self.dp_rank}"] * (case.dp_size > 1) + [f"CP rank {cp_rank}"] * (case.cp_size > 1)
        return f" ({', '.join(parts)})" if parts else ""

    def _local(self, local: LocalTokens, values: Sequence[Tensor]) -> Tensor:
        buffer = torch.zeros(self.samples.total_tokens)
        buffer[torch.from_numpy(self.at)] = torch.cat([*values])
        return local.of(buffer).clone()

    def _shaped(self, flat: Tensor, local: LocalTokens) -> Any:
        """What the CP rank holds, as the function is given it."""
        if self.step.call.rows == "padded":
            return flat.view(len(self.lengths), -1)
        if self.step.call.rows == "lists":
            call, cp_size = self.step.call, self.step.case.cp_size
            parts = 1 if call.cp_cut == "gathered" else cp_size
            return list(flat.split([size // parts for size in _slots(call, self.lengths, cp_size)]))
        return flat

    def _given(self, what: str, cp_rank: int, local: LocalTokens, values: Tensor, advantages: Tensor) -> Any:
        """What the function asks for, by its name in `GIVEN`."""
        case, whole = self.step.case, self.step.case.step
        ranks = [sum(map(len, rank)) for rank in case.ranks]
        mine = slice(sum(ranks[: self.dp_rank]), sum(ranks[: self.dp_rank + 1]))
        tokens = torch.tensor([sum(sample.mask) for sample in whole.samples])
        units = whole.rollout_ids or list(range(len(whole.samples)))
        if what in ("rollout_tokens", "prompt_tokens"):
            ids = torch.tensor(units if what == "rollout_tokens" else whole.prompt_ids)
            return torch.stack([tokens[ids == one].sum() for one in ids[self.rows]])
        makers: dict[str, Callable[[], Any]] = {
            "step_tokens": lambda: tokens.sum(),
            "rank_tokens": lambda: tokens[mine].sum(),
            "microbatch_tokens": lambda: tokens[self.rows].sum(),
            "step_samples": lambda: len(tokens),
            "step_active_samples": lambda: int((tokens > 0).sum()),
            "rank_samples": lambda: ranks[self.dp_rank],
            "step_rollouts": lambda: len(set(units)),
            "step_prompts": lambda: len(set(whole.prompt_ids)),
            "num_microbatches": lambda: case.num_microbatches,
            "microbatch": lambda: self.number,
            "dp_size": lambda: case.dp_size,
            "dp_rank": lambda: self.dp_rank,
            "cp_size": lambda: case.cp_size,
            "cp_rank": lambda: cp_rank,
            "world_size": lambda: case.dp_size * case.cp_size,
            "sample_tokens": lambda: tokens[self.rows],
            "rollout_ids": lambda: units[self.rows],
            "prompt_ids": lambda: whole.prompt_ids[self.rows],
            "cu_seqlens": lambda: torch.tensor([0, *_slots(self.step.call, self.lengths, case.cp_size)]).cumsum(0),
            "sample_index": lambda: self._shaped(local.sample_index.clone(), local),
            "old_log_probs": lambda: self._shaped(values.detach().clone(), local),
            "advantages": lambda: self._shaped(advantages.clone(), local),
            "sample_advantages": lambda: self.step.advantages[self.rows].clone(),
            "loss_masks": lambda: [mask.clone() for mask in self.masks],
            "labels": lambda: self.labels,
            "layout": lambda: self.samples.layout,
            "totals": lambda: self.step.totals,
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


def _slots(call: LossCall, lengths: Sequence[int], cp_size: int, spare: bool = False) -> list[int]:
    """Padded sizes of the rows: of one width, or each for itself; divisible as the cut wants it."""
    multiple = 2 * cp_size if cp_size > 1 else 1
    sizes = [-(-length // multiple) * multiple + 2 * cp_size * spare for length in lengths]
    return [max(sizes)] * len(sizes) if call.rows == "padded" else sizes


def _layout(call: LossCall, lengths: Sequence[int], cp_size: int) -> Layout:
    bounds = [0, *np.cumsum(_slots(call, lengths, cp_size)).tolist()]
    if call.cp_cut == "gathered":
        return Gathered(bounds, total_lengths=list(lengths))
    if call.cp_cut == "contiguous":
        return Contiguous(bounds, total_lengths=list(lengths), per_slot=True)
    if call.cp_cut == "responses" and cp_size > 1:
        return ZigzagResponse([length + 3 for length in lengths], list(lengths))
    if call.rows == "padded":
        return ZigzagBSHD(len(lengths), bounds[1], total_lengths=list(lengths))
    return ZigzagTHD(bounds, total_lengths=list(lengths))
