"""Simulation of one optimizer step of a trainer: calls its loss function for every rank and micro-batch.

A token's weight is c · ∂(returned loss)/∂(that token's loss), summed over the calls that see the token. c is 1/K if
micro-batches are averaged, times 1/D if data-parallel ranks are averaged, times 1/C if context-parallel ranks are.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain, product
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_rl_loss.audit.assembly import Part, measured_step
from megatron_rl_loss.audit.tokens import MeasuredStep, Split
from megatron_rl_loss.core.collectives import StepGroups
from megatron_rl_loss.core.counting import count_step
from megatron_rl_loss.core.errors import check_callable, check_choice, check_mapping
from megatron_rl_loss.core.layouts import LAYOUTS, Slots, ZigzagBSHD, ZigzagTHD
from megatron_rl_loss.core.samples import Samples
from megatron_rl_loss.trees.layout import PrefixTree

#: The layouts that steps are drawn in, by the name of the cut in `LossCall.cp_cut`.
DRAWN_LAYOUTS: dict[str, Any] = LAYOUTS | {str(PrefixTree.cut): PrefixTree}
#: Parameters that a loss function may have beside its first two; `LossCall` describes them.
PARAMETERS = (
    *("step_tokens", "rank_tokens", "microbatch_tokens", "sample_tokens", "rollout_tokens", "prompt_tokens"),
    *("step_samples", "rank_samples", "step_active_samples", "step_rollouts", "step_prompts", "num_microbatches"),
    *("dp_size", "cp_size", "world_size", "microbatch", "dp_rank", "cp_rank", "rollout_ids", "prompt_ids"),
    *("cu_seqlens", "sample_index", "local", "totals", "old_log_probs", "advantages", "sample_advantages"),
)
#: Those of them that have a value with ``takes="log_probs"`` alone.
LOG_PROB_PARAMETERS = PARAMETERS[-3:]
#: Kinds of faults: weights that are wrong, or depend on losses or chance; calls that raise, or return no usable loss.
FaultKind = Literal["weights", "values", "chance", "raises", "no loss", "no graph", "NaN", "backward"]


@dataclass(frozen=True, kw_only=True)
class LossCall:
    """A trainer's call of its loss function, and the divisions that follow. The defaults are plain PyTorch: DDP, no CP.

    >>> LossCall(microbatches="mean", names={"total": "step_tokens"}).describe()  # doctest: +ELLIPSIS
    'padded rows, micro-batches averaged, ...no CP, some rows fully masked, ..., total is step_tokens'

    Further parameters of the function get these values by name. Tokens are sums of masks; a step is all micro-batches
    of all DP ranks.

    - ``step_tokens``, ``rank_tokens``, ``microbatch_tokens``: of the step, DP rank, micro-batch (all CP ranks)
    - ``sample_tokens``, ``rollout_tokens``, ``prompt_tokens``: of each row, its rollout, its prompt, [rows]
    - ``step_samples``, ``rank_samples``, ``step_active_samples``: number of rows; active ones have a mask token
    - ``step_rollouts``, ``step_prompts``, ``num_microbatches``, ``dp_size``, ``cp_size``, ``world_size`` (DP times CP)
    - ``microbatch``, ``dp_rank``, ``cp_rank``: the place of the call, from 0
    - ``rollout_ids``, ``prompt_ids``: lists, an id for each row
    - ``cu_seqlens``, ``sample_index``: for packed losses, the uncut starts of rows and the row of each token
    - ``local``, ``totals``: the `LocalTokens` and `StepTotals` of reducers
    - ``old_log_probs``, ``advantages``, ``sample_advantages``: with ``takes="log_probs"`` alone. The old log-probs
      equal the log-probs, without gradient; advantages are by token and by row, never 0

    Attributes:
        takes: the first argument. With ``log_probs`` the function computes losses itself; a weight is then the factor
            of a token's advantage in the policy gradient at ratio 1.
        rows: shape of losses and mask: [batch, seq], [num_tokens], or one tensor per row.
        names: parameters with other names, such as ``{"num_items_in_batch": "step_tokens"}``.
        microbatches: ``mean`` if the trainer divides by the number of micro-batches.
        dp: ``mean`` as DDP and FSDP do, ``sum`` if the trainer undoes that.
        cp: the same over context-parallel ranks; None without CP.
        cp_cut: the part of every row that a CP rank holds: ``zigzag``, ``contiguous``; ``gathered`` is the whole row,
            and gradients of all copies count; ``responses`` is a zigzag over prompt and response, of which the response
            is kept (packed rows); ``tree`` is a zigzag over the slots of a `PrefixTree`, whose rows share prefixes, and
            end with a masked token (packed rows).
        even_microbatches: all micro-batches have the same number of rows.
        masked_samples: some rows are fully masked; if False, every row has an active token.
        fractional_masks: some steps' masks hold weights between 0 and 1; if False, zeros and ones alone.
        split_rollouts: a rollout may have several rows (turns, branches).
        returns: one number; or what a ``loss_func`` of Megatron's schedule returns. With ``megatron`` the loss of
            (loss, num_tokens, report) is divided by num_tokens, and that of (loss, report) multiplied by the CP size;
            micro-batches and ranks are averaged. With ``megatron_per_token``, `calculate_per_token_loss`, gradients are
            summed, and divided by the sum of all num_tokens.
    """

    takes: Literal["losses", "log_probs"] = "losses"
    rows: Literal["padded", "packed", "lists"] = "padded"
    names: Mapping[str, str] = field(default_factory=dict)
    microbatches: Literal["sum", "mean"] = "sum"
    dp: Literal["mean", "sum"] = "mean"
    cp: Literal["mean", "sum", None] = None
    cp_cut: str = "zigzag"
    even_microbatches: Literal[True, False] = False
    masked_samples: Literal[True, False] = True
    fractional_masks: Literal[True, False] = True
    split_rollouts: Literal[True, False] = False
    returns: Literal["loss", "megatron", "megatron_per_token"] = "loss"

    def __post_init__(self) -> None:
        check_mapping("LossCall.names", self.names, 'Write names={"num_items_in_batch": "step_tokens"}, for example')
        for parameter, value in self.names.items():
            check_choice(f"value of LossCall.names[{parameter!r}]", value, PARAMETERS)
        for name, hint in get_type_hints(LossCall).items():
            value, choices = (
                repr(getattr(self, name)),
                list(map(repr, DRAWN_LAYOUTS if name == "cp_cut" else get_args(hint))),
            )
            if name != "names" and value not in choices:
                raise ValueError(f"LossCall.{name} is {value}: it must be one of {', '.join(choices)}. Choose one.")
        has_rows = issubclass(DRAWN_LAYOUTS[self.cp_cut], Slots)
        if (self.cp_cut != "zigzag" and self.cp is None) or (not has_rows and self.rows != "packed"):
            raise ValueError(
                f"LossCall.cp_cut is {self.cp_cut!r} with cp {self.cp!r}, rows {self.rows!r}: a cut needs CP, and "
                'responses and tree need packed rows. Set cp="sum" or cp="mean", and for these two rows="packed".'
            )

    def describe(self) -> str:
        """The assumed call in one line: every field, in words."""
        done = {"sum": "summed", "mean": "averaged"}
        words = {
            "takes": {"losses": "", "log_probs": "log-probs"}[self.takes],
            "returns": {
                "loss": "",
                "megatron": "Megatron's schedule",
                "megatron_per_token": "Megatron, per-token loss",
            }[self.returns],
            "rows": "a tensor per row" if self.rows == "lists" else f"{self.rows} rows",
            "microbatches": f"micro-batches {done[self.microbatches]}",
            "even_microbatches": "all of as many rows" if self.even_microbatches else "of any numbers of rows",
            "dp": f"DP ranks {done[self.dp]}",
            "cp": f"{self.cp_cut} CP ranks {done[self.cp]}" if self.cp else "no CP",
            "masked_samples": "some rows fully masked" if self.masked_samples else "no row fully masked",
            "fractional_masks": "some masks of weights" if self.fractional_masks else "masks of 0 and 1",
            "split_rollouts": "rollouts over several rows" if self.split_rollouts else "a rollout per row",
            "names": ", ".join(f"{name} is {what}" for name, what in self.names.items()),
        }
        return ", ".join(filter(None, words.values()))

    @property
    def cuts(self) -> str:
        """In which cuts of a step its weights are checked, in words."""
        return f"however the step is cut{' into micro-batches of as many rows' * self.even_microbatches}"


#: A common name for the number of micro-batches, which Hugging Face's trainers give.
_STEPS = {"gradient_accumulation_steps": "num_microbatches"}

#: The calls of trainers by name, from their public sources (TRL 1.10.0.dev0, verl 0.10.0.dev, Megatron-Core 0.19).
CALLS: dict[str, LossCall] = {
    "pytorch": LossCall(names=_STEPS),
    # `forward_step_calc_loss`, DDP's mean over DP and CP ranks; with per-token loss `finalize_model_grads`.
    "megatron": LossCall(returns="megatron", microbatches="mean", cp="mean"),
    "megatron_per_token": LossCall(returns="megatron_per_token", dp="sum", cp="sum"),
    # With a `compute_loss_func` and `average_tokens_across_devices` the Trainer multiplies by DDP's number of ranks.
    "transformers": LossCall(
        names={"num_items_in_batch": "step_tokens"} | _STEPS, dp="sum", even_microbatches=True, fractional_masks=False
    ),
    # GRPOTrainer's loss function divides by accumulation steps itself. Its `num_items_in_batch` is that of a generation
    # batch, the step's where `steps_per_generation` is the accumulation.
    "trl": LossCall(
        names={"num_items_in_batch": "step_tokens", "num_processes": "dp_size"}
        | _STEPS
        | {"current_gradient_accumulation_steps": "num_microbatches"},
        even_microbatches=True,
        fractional_masks=False,
    ),
    # `agg_loss` as verl's engines call it: global counts, times dp_size against averaged gradients.
    "verl": LossCall(names={"batch_num_tokens": "step_tokens", "global_batch_size": "step_samples"}),
    # `compute_loss`: lists of sequences, one global `loss_scale`; FSDP's division is undone.
    "prime_rl": LossCall(rows="lists", names={"loss_scale": "step_tokens"}, dp="sum", fractional_masks=False),
}


#: Entries that are drawn for a row; longer ones repeat them.
_LONGEST = 32


class NotForSchedule(Exception):
    """Raised for a value that Megatron's schedule does not take from a loss function."""


class CallFailed(Exception):
    """Raised for a call of the loss function that gave nothing to measure: (its kind, a sentence)."""


def asked_for(loss_fn: Any, call: LossCall) -> dict[str, str]:
    """The parameters of a loss function beside losses and mask, as names of `PARAMETERS`."""
    check_callable("loss_fn", loss_fn, "it must be a function of losses and masks", "Pass the function, not its result")
    known = {name: name for name in PARAMETERS} | dict(call.names)
    bound = [*getattr(loss_fn, "keywords", ()), *(LOG_PROB_PARAMETERS if call.takes == "losses" else ())]
    beside = list(inspect.signature(loss_fn).parameters)[2:]
    return {name: known[name] for name in beside if name in known and name not in bound}


class DrawnRow(NamedTuple):
    """A row of data: its loss mask of zeros and ones, or weights, its units, its DP rank and its micro-batch."""

    mask: tuple[float, ...]
    rollout: int = 0
    prompt: int = 0
    dp_rank: int = 0
    microbatch: int = 0


class DrawnStep(NamedTuple):
    """A step and its cut, as plain data; evaluating its `repr` makes the same step."""

    rows: tuple[DrawnRow, ...]  # in order of their places
    num_microbatches: int = 1
    dp_size: int = 1
    cp_size: int = 1  # context-parallel ranks that every micro-batch is cut for
    seed: int = 0  # of the losses and advantages, whatever the cut
    advantages: tuple[float, float] = (1.0, 0.0)  # factor and constant by which all of them are moved


#: A drawn row -> its id, a row of ids, or its label.
OfRow = Callable[[DrawnRow], Any]


class Described(NamedTuple):
    """What the user's own modes read of the rows: further ids and labels, by name."""

    ids: Mapping[str, OfRow] = {}
    labels: Mapping[str, OfRow] = {}


_AS_DRAWN = Described()


def samples_of(rows: Sequence[DrawnRow], call: LossCall, cp_size: int, described: Described = _AS_DRAWN) -> Samples:
    """`Samples` of these rows, padded for the call and the cut, with ids and labels for modes of the user's."""
    masks, rollouts, prompts, *_ = zip(*rows, strict=True)
    lengths, multiple = list(map(len, masks)), 2 * cp_size if cp_size > 1 else 1
    sizes = [-(-length // multiple) * multiple for length in lengths]
    bounds = [0, *accumulate([max(sizes)] * len(sizes) if call.rows == "padded" else sizes)]
    layout_class = DRAWN_LAYOUTS[call.cp_cut]
    if call.rows == "padded" and layout_class is ZigzagTHD:
        layout_class = ZigzagBSHD  # the same cut, of rows
    if layout_class is PrefixTree:
        layout = PrefixTree(_branching(lengths), multiple=multiple, cp_attention=True)
    else:
        layout = layout_class.drawn(bounds, lengths)
    labels = {"weight": [0.5 + sum(mask) % 3 for mask in masks], "turns": [np.arange(size) // 3 for size in lengths]}
    # A turn goes on over masked tokens behind the last active one: these are no turn that counts.
    last = [int(np.append(0, np.flatnonzero(mask))[-1]) for mask in masks]
    row_columns = zip(rollouts, last, lengths, strict=True)
    turns = [100 * rollout + np.minimum(np.arange(size), end) // 3 for rollout, end, size in row_columns]
    ids = {"session": prompts, "turn": turns} | {name: [*map(of, rows)] for name, of in described.ids.items()}
    labels |= {name: [*map(of, rows)] for name, of in described.labels.items()}
    return Samples(masks, layout=layout, rollout_ids=rollouts, prompt_ids=prompts, ids=ids, labels=labels)


def _branching(lengths: Sequence[int]) -> list[list[int]]:
    """Token ids of rows of these lengths: half of each is common to all; of every third one, all is."""
    halves = [length if number % 3 == 0 else length // 2 for number, length in enumerate(lengths)]
    return [[0] * half + [1 + i] * (size - half) for i, (half, size) in enumerate(zip(halves, lengths, strict=True))]


def for_labels(step: DrawnStep, call: LossCall) -> DrawnStep:
    """The step with a masked token behind each row, where the call's layout has no loss at a row's last token."""
    if call.cp_cut != PrefixTree.cut:
        return step
    return step._replace(rows=tuple(row._replace(mask=(*row.mask, 0)) for row in step.rows))


def _advantages(step: DrawnStep, generator: torch.Generator) -> Tensor:
    """One per row, drawn, then moved as the step says."""
    advantages = torch.randn(len(step.rows), generator=generator)
    advantages += 0.5 * torch.where(advantages < 0, -1, 1)  # none is near 0
    factor, constant = step.advantages
    return factor * advantages + constant


def advantages_of_entries(step: DrawnStep) -> npt.NDArray[np.float64]:
    """The advantage of each mask entry's row, end to end."""
    advantages = _advantages(step, torch.Generator().manual_seed(step.seed))
    return advantages.double().numpy().repeat([len(row.mask) for row in step.rows])


def measure(
    loss_fn: Any, call: LossCall, step: DrawnStep, poisoned: bool = False, described: Described = _AS_DRAWN
) -> MeasuredStep:
    """The weight of every token of a step, as this trainer's optimizer would get it; NaN for a loss that is not finite.

    Poisoned losses are NaN where the mask is 0. Raises CallFailed for a call that raises or returns no number with a
    gradient, TypeError for a `loss_fn` that is no function.
    """
    asks, K, D, C = asked_for(loss_fn, call), step.num_microbatches, step.dp_size, step.cp_size
    masks, *ids = list(zip(*step.rows, strict=True))[:3]
    generator, lengths = torch.Generator().manual_seed(step.seed), list(map(len, masks))
    advantages = _advantages(step, generator)
    # A row's losses do not depend on the lengths of others: a padded row has those of the unpadded one.
    drawn = torch.randn(len(masks), _LONGEST, generator=generator).repeat(1, max(lengths) // _LONGEST + 1)
    losses = torch.cat([row[:length] for row, length in zip(drawn, lengths, strict=True)])
    losses = -losses.abs() - 0.1 if call.takes == "log_probs" else 3 * losses
    if poisoned:
        losses[torch.tensor(list(chain(*masks))) == 0] = torch.nan
    tokens, (rollouts, prompts) = torch.tensor(list(map(sum, masks))), map(torch.tensor, ids)
    rollout_tokens, prompt_tokens = (
        torch.stack([tokens[of == unit].sum() for unit in of]) for of in (rollouts, prompts)
    )
    sums = getattr(loss_fn, "sums", ())  # that a mode declares
    totals = None
    if "totals" in asks.values():
        totals = count_step([samples_of(step.rows, call, C, described)], StepGroups(), sums=sums)
    step_facts: dict[str, Any] = {
        "num_microbatches": K, "dp_size": D, "cp_size": C, "world_size": D * C, "totals": totals,
        "step_tokens": tokens.sum(), "step_samples": len(masks), "step_active_samples": int((tokens > 0).sum()),
        "step_rollouts": len(rollouts.unique()), "step_prompts": len(prompts.unique()),
    }  # fmt: skip
    rows_of_losses = losses.split(lengths)
    parts, num_tokens = list[Part](), list[float]()
    for d, k in product(range(D), range(K)):
        rank = [i for i, row in enumerate(step.rows) if row.dp_rank == d]
        here = [i for i in rank if step.rows[i].microbatch == k]
        samples = samples_of([step.rows[i] for i in here], call, C, described)
        whole = samples.in_buffer([rows_of_losses[i] for i in here]).reshape(-1)
        bounds = [*samples.mask_starts, samples.total_tokens]
        microbatch_facts = step_facts | {
            "rank_tokens": tokens[rank].sum(), "rank_samples": len(rank), "microbatch_tokens": tokens[here].sum(),
            "sample_tokens": tokens[here], "rollout_tokens": rollout_tokens[here], "prompt_tokens": prompt_tokens[here],
            "rollout_ids": rollouts[here].tolist(), "prompt_ids": prompts[here].tolist(),
            "sample_advantages": advantages[here], "cu_seqlens": torch.tensor(bounds),
        }  # fmt: skip
        for c in range(C):
            local = samples.local(c, C)
            x = local.of(whole).clone().requires_grad_()
            at = torch.tensor(local.sample_index)
            view = partial(_view, call.rows, [int(size) // (C // local.copies) for size in np.diff(bounds)])
            place: dict[str, Any] = {"dp_rank": d, "cp_rank": c, "microbatch": k}
            have = microbatch_facts | place | {
                "local": local, "sample_index": view(at), "old_log_probs": view(x.detach().clone()),
                "advantages": view(advantages[here][at]),
            }  # fmt: skip
            further = {name: _own(have[what]) for name, what in asks.items()}
            called = partial(loss_fn, view(x * 1), view(torch.tensor(local.mask)), **further)
            if call.returns != "loss":
                called = partial(_scheduled, called, C, num_tokens, call.returns == "megatron_per_token")
            gradient = _derivative(called, x, f" (micro-batch {k}, DP rank {d}, CP rank {c})")
            weights = (-gradient / advantages[here][at] if call.takes == "log_probs" else gradient).double().numpy()
            parts.append(Part.of(local, weights, samples, **place))
    averaged = ((K, call.microbatches), (D, call.dp), (C, call.cp))
    factor = math.prod(1 / size for size, done in averaged if done == "mean") / max(sum(num_tokens), 1)
    return measured_step(parts, factor, Split(num_microbatches=K, dp_size=D, cp_size=C))


def _own(value: Any) -> Any:
    """A copy of what several calls get: a loss function may change it in place."""
    return value.clone() if isinstance(value, Tensor) else value.copy() if isinstance(value, list) else value


def _view(rows: str, sizes: list[int], flat: Tensor) -> Any:
    """The tokens of a rank, in the shape that the loss function gets."""
    if rows == "padded":
        return flat.view(len(sizes), -1)
    return list(flat.split(sizes)) if rows == "lists" else flat


def _scheduled(call: Callable[[], Any], cp_size: int, num_tokens: list[float], per_token: bool) -> Any:
    """The loss as Megatron's schedule scales what a loss function returns; without its mean over micro-batches."""
    returned = call()
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        values = f"{len(returned)} values" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
        raise NotForSchedule(values)
    if len(returned) == 2:
        return returned[0] * cp_size
    count = float(returned[1])
    num_tokens.append(count * per_token)
    return returned[0] if per_token else returned[0] / max(count, 1)


def _derivative(call: Callable[[], Any], values: Tensor, where: str) -> Tensor:
    """The derivative of the returned loss by each value; NaN if the loss is not finite."""
    try:
        loss = call()
    except NotForSchedule as error:
        raise CallFailed("no loss", f"it returns {error}{where}") from None
    except Exception as error:
        said = f"{error}".partition("\n")[0][:300]
        raise CallFailed("raises", f"it raises {type(error).__name__}: {said}{where}") from error
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        what = f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise CallFailed("no loss", f"it returns {what}, not a tensor with one number{where}")
    if not loss.requires_grad:
        raise CallFailed("no graph", f"its result has no graph, so nothing is trained{where}")
    (gradient,) = torch.autograd.grad(loss, values, allow_unused=True)
    gradient = torch.zeros_like(values) if gradient is None else gradient
    return gradient if torch.isfinite(loss) else gradient * torch.nan
