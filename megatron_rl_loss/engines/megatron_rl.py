"""Megatron-LM's own RL, `train_rl.py` (0.19 and main), with the aggregation of your choice; nothing is patched.

The stock `loss_func` returns a bin's token sum and its token count, so Megatron trains on the mean over bins of their
token means. Here the same per-token losses, from the unchanged `forward_step`, follow the mode that the flags name.

    aggregation = loss_aggregation(args)
    with aggregation.attached():
        pretrain(..., with_loss_aggregation(train_rl.forward_step), ...)

Position p of a row of S tokens stands for the log-prob of token p + 1: rows have S - 1 losses, masks shift by one.
"""

import inspect
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_rl_loss.core.errors import check_choice
from megatron_rl_loss.core.ids import Ids
from megatron_rl_loss.core.layouts import Gathered, Layout, ZigzagTHD
from megatron_rl_loss.core.metrics import Metric
from megatron_rl_loss.core.microbatch import Microbatch
from megatron_rl_loss.core.samples import Samples
from megatron_rl_loss.core.transfers import to_device
from megatron_rl_loss.extend import any_flag_given, check_command_line
from megatron_rl_loss.megatron.iterator import next_microbatch
from megatron_rl_loss.megatron.launch import LossAggregation

__all__ = ["is_asked_for", "loss_aggregation", "loss_func", "samples_of", "with_loss_aggregation"]

#: Per-token losses of a context-parallel rank: all on every rank, or its zigzag part of every slot.
CpLosses = Literal["gathered", "sliced"]
_VERSIONS = "Use a train_rl.py of Megatron-LM 0.19 or of its main branch."


def is_asked_for(args: Namespace) -> bool:
    """True if a flag of this package was given. Raises ValueError for flags that are misspelt or not registered."""
    check_command_line(args, sys.argv[1:])
    return any_flag_given(args)


def loss_aggregation(
    args: Namespace, *, cp_losses: CpLosses = "gathered", ids_of: Callable[[Any], Mapping[str, Ids]] = lambda batch: {}
) -> LossAggregation:
    """The `LossAggregation` of a `train_rl.py` launch, from Megatron's parsed and validated `args`.

    Args:
        cp_losses: ``gathered`` if a context-parallel rank gets all S - 1 losses of a row (main), ``sliced`` if a rank
            gets its S / cp zigzag positions (0.19).
        ids_of: a batch of `train_rl.py`'s iterator -> ids of its rows, ``{"prompt_ids": [...]}`` for ``prompt_mean``;
            ``rollout_ids`` where `train_rl.py` splits a rollout into turns: by default a row is one. The proof of the
            first step compares prompts with ``--grpo-group-size``.

    Raises ValueError and TypeError as `LossAggregation.from_args`, and for an unknown `cp_losses`, unit counting
    ``all`` (`train_rl.py` pads the batch with fully masked rows), ``--check-for-spiky-loss``.
    """
    check_choice("value of cp_losses", cp_losses, ("gathered", "sliced"))
    aggregation = LossAggregation.from_args(
        args,
        lambda batch: samples_of(batch, cp_losses, **ids_of(batch)),
        group_size=getattr(args, "grpo_group_size", None),
    )
    policy = aggregation.settings.modes.policy
    if policy.mode.name != "token_mean" and policy.units == "all":
        raise ValueError(
            f"{policy.mode.name} counting all units in train_rl.py: train_rl.py pads the batch with fully masked "
            "rows, which would count as rollouts. Add --loss-aggregation-units active."
        )
    if getattr(args, "check_for_spiky_loss", False):
        raise ValueError(
            "--check-for-spiky-loss in train_rl.py: a policy loss is near 0, so ratios of losses show no spike. Drop "
            "the flag, and watch grad-norm."
        )
    return aggregation


def with_loss_aggregation(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """`train_rl.forward_step` with `loss_func` of this module in place of its own; for use inside `attached()`.

    Raises, at the first micro-batch, TypeError for an iterator that gives no `Microbatch`, ValueError for a
    `forward_step` with a loss function that this module does not know.
    """
    known = tuple(inspect.signature(loss_func).parameters)[1:]

    @wraps(forward_step)
    def aggregated(data_iterator: Iterator[Microbatch], *args: Any, **kwargs: Any) -> tuple[Tensor, Callable[..., Any]]:
        microbatch = next_microbatch(data_iterator)
        output, stock = forward_step(iter([microbatch.data]), *args, **kwargs)
        if not isinstance(stock, partial) or tuple(inspect.signature(stock.func).parameters) != known:
            raise ValueError(
                f"the loss function {stock!r} from forward_step: it must be a partial of "
                f"loss_func({', '.join(known)}). {_VERSIONS}"
            )
        return output, partial(loss_func, microbatch, *stock.args, **stock.keywords)

    return aggregated


def loss_func(
    microbatch: Microbatch, loss_mask: Tensor, kl_term: Tensor, ratios: Tensor, entropy_term: Tensor,
    truncated_from_above: Tensor, truncated_from_below: Tensor, output_tensor: Tensor,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
    """The return value that Megatron gets for a micro-batch; the arguments after the first are `train_rl.py`'s own.

    Reports ``pg_loss``, the step loss that is trained on, and the five ``rl/`` metrics as token means over the step.
    Raises ValueError for losses that are not this rank's part of the micro-batch. NaNs are left to Megatron's check
    of gradients.
    """
    per_token = {
        "kl_term": kl_term, "pi_over_pi_old": ratios, "entropy_term": entropy_term,
        "truncated_from_above": truncated_from_above, "truncated_from_below": truncated_from_below,
    }  # fmt: skip
    means = {
        f"rl/{name}": Metric(to_device(values.detach().float().reshape(-1), output_tensor.device), "tokens")
        for name, values in per_token.items()
    }
    return microbatch.loss(output_tensor.reshape(-1), means)


def samples_of(batch: Any, cp_losses: CpLosses = "gathered", **ids: Any) -> Samples:
    """The samples of a batch of `train_rl.py`'s iterator: a packed bin's number, or the seven tensors of unpacked rows.

    The bin is looked up in Megatron's RL runtime state. Raises ValueError for a batch of neither kind, sequences that
    leave their bin, a mask that is set on a sequence's first token.
    """
    num_tensors = len(batch) if isinstance(batch, Sequence) else type(batch).__name__
    if num_tensors == 1 and batch[0].numel() == 1:
        from megatron.rl.rl_utils import get_rl_runtime_state

        context, bin_index = get_rl_runtime_state().packing_context, int(batch[0])
        loss_masks = context.packed_loss_mask[bin_index][None]
        # The beginning of each sequence, then the end of the last one's slot; nothing for an empty bin.
        edges = context.packing_info.seq_starts[bin_index] or [0]
    elif num_tensors == 7 and batch[3].dim() == 2:
        loss_masks, edges = batch[3], [0, batch[3].shape[1]]
    else:
        raise ValueError(
            f"a batch of {num_tensors}: train_rl.py's iterator gives a bin number, or seven tensors, of which the "
            f"fourth is the loss mask. {_VERSIONS}"
        )
    masks, layout = rows_of(loss_masks, edges, cp_losses)
    return Samples(masks, layout=layout, **ids)


def rows_of(loss_masks: Tensor, edges: Sequence[int], cp_losses: CpLosses) -> tuple[list[Tensor], Layout]:
    """Masks and layout of rows, from token masks [num_rows, S]; `edges` are the bounds of each row's slots.

    Gathered rows have S - 1 positions, sliced ones S, of which the last predicts nothing.
    """
    loss_masks = loss_masks.cpu()  # in one copy
    num_rows, seq_length = loss_masks.shape
    if edges[0] != 0 or edges[-1] > seq_length:
        raise ValueError(
            f"sequences from {edges[0]} to {edges[-1]} in a bin of {seq_length} tokens: sequences must begin at 0 "
            "and end inside the bin. Check the packing."
        )
    if bool((loss_masks[:, list(edges[:-1])] != 0).any()):
        raise ValueError(
            "a loss mask that is set on a sequence's first token: no log-prob predicts that token. Mask every prompt "
            "from its first token on."
        )
    layout, size = (Gathered, seq_length - 1) if cp_losses == "gathered" else (ZigzagTHD, seq_length)
    shifted = torch.nn.functional.pad(loss_masks, (0, 1))[:, 1 : size + 1]
    slots = [(begin, min(end, size)) for begin, end in pairwise(edges)]
    masks = [row[begin:end] for row in shifted for begin, end in slots]
    cu_seqlens = [0, *(row * size + end for row in range(num_rows) for _, end in slots)]
    padding = [num_rows * size] if cu_seqlens[-1] < num_rows * size else []  # of a bin, which is one row
    return masks, layout(cu_seqlens + padding, filler_slots=len(padding))
