"""Packed samples on layers whose state runs along the sequence, such as Mamba-2 and the gated delta net.

Attention knows where each sample of a pack begins: by the bounds of `PackedSeqParams`. A layer with a state must begin
anew there, else the state of a sample runs on into the next one, and the step depends on its packing. Megatron's
`MambaMixer` reads ``seq_idx`` for this, the number of each token's sequence, which `PackedSeqParams` makes only of
``total_tokens`` (`core/packed_seq_params.py`, from 0.17 on). Layers of the gated delta net read the bounds themselves.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn import Module

from megatron_rl_loss.core.transfers import to_device
from megatron_rl_loss.proof.schedules import chunks_of
from megatron_rl_loss.trees.models import MAMBA, is_mixer_with_state

_FIELDS = {field.name for field in dataclasses.fields(PackedSeqParams)}


def layers_with_state(model: Any) -> dict[str, Module]:
    """The mixers of a model, or list of chunks, whose state runs along the sequence, by their names; of this rank."""
    chunks = chunks_of(model)
    return {name: module for chunk in chunks for name, module in chunk.named_modules() if is_mixer_with_state(module)}


def packed_seq_params(cu_seqlens_padded: Tensor, model: Any = None, **further: Any) -> PackedSeqParams:
    """Megatron's description of a pack whose samples lie in the slots between these bounds.

        model(tokens, positions, None, labels=labels, packed_seq_params=packed_seq_params(cu_seqlens, model))

    Args:
        cu_seqlens_padded: the bounds of the slots, int32 [slots + 1], of the whole pack, over all context-parallel
            ranks. Best on the host, which reads two numbers of them; they are copied to the model's device.
        model: the model chunk that is called. If one of its layers has a state, ``total_tokens`` is set where this
            Megatron knows it. It costs a pass over the tokens, so other models do without.
        further: of `PackedSeqParams`, such as ``max_seqlen_q`` (default: the longest slot), ``cu_seqlens_q`` without
            padding, or ``cp_group``.
    """
    longest = further.get("max_seqlen_q") or int(cu_seqlens_padded.diff().max())
    fields: dict[str, Any] = {"qkv_format": "thd", "max_seqlen_q": longest, "max_seqlen_kv": longest}
    if model is not None and "total_tokens" in _FIELDS and _has_state(model):
        fields["total_tokens"] = int(cu_seqlens_padded[-1])
    device = cu_seqlens_padded.device if model is None else next(model.parameters()).device
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    fields |= dict.fromkeys(names, to_device(cu_seqlens_padded, device))
    return PackedSeqParams(**fields | further)


#: A model's modules are searched once, not for each micro-batch.
_SEARCHED: WeakKeyDictionary[Module, bool] = WeakKeyDictionary()


def _has_state(model: Module) -> bool:
    if model not in _SEARCHED:
        _SEARCHED[model] = bool(layers_with_state(model))
    return _SEARCHED[model]


@contextmanager
def watch_packs(model: Any) -> Iterator[list[str]]:
    """A ``with`` around forward passes: a list that gets what each pack lacks for the layers of this rank.

    Nothing is raised inside, where one rank alone would leave the others waiting.
    """
    chunks, faults, mixers = chunks_of(model), list[str](), layers_with_state(model)

    def look(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if faults:  # the first one says it for all layers and micro-batches
            return
        for packed in (value for value in (*args, *kwargs.values()) if isinstance(value, PackedSeqParams)):
            # A mixer gets the parameters from its own layer; the model, in versions whose layers drop them.
            called_mixers = {name: mixer for name, mixer in mixers.items() if module in (mixer, *chunks)}
            fault = fault_of(packed, called_mixers)
            if fault:
                faults.append(fault)

    modules = [*mixers.values(), *chunks] if mixers else []
    handles = [module.register_forward_pre_hook(look, with_kwargs=True) for module in modules]
    try:
        yield faults
    finally:
        for handle in handles:
            handle.remove()


def fault_of(packed: PackedSeqParams, mixers: dict[str, Module]) -> str:
    """Why the state of a sample would run on into the next one of this pack, in words; empty if it does not."""
    bounds = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    if not isinstance(bounds, Tensor) or len(bounds) < 3:
        return ""
    mamba = {name: mixer for name, mixer in mixers.items() if _is_mamba(mixer)}
    if mamba and "seq_idx" in _FIELDS:
        if getattr(packed, "seq_idx", None) is None:
            return _runs_on(
                mamba,
                "PackedSeqParams without total_tokens",
                "Pass PackedSeqParams(..., total_tokens=int(cu_seqlens[-1])), or what packed_seq_params(cu_seqlens, "
                "model) returns.",
            )
        if not _begins_at(packed.seq_idx.flatten(), bounds):
            return _runs_on(
                mamba,
                "PackedSeqParams whose seq_idx changes elsewhere than at its bounds",
                "Pass total_tokens=int(cu_seqlens[-1]) in its stead, of which Megatron makes it.",
            )
    unaware = {name: mixer for name, mixer in mamba.items() if not hasattr(mixer, "_create_packed_seq_idx")}
    if unaware and "seq_idx" not in _FIELDS:  # 0.15; the mixer of 0.16 numbers the tokens itself
        return _runs_on(unaware, "a pack under a Megatron-Core whose Mamba layers know none", "Use 0.16 or later.")
    delta = {name: mixer for name, mixer in mixers.items() if not _is_mamba(mixer)}
    if delta and packed.qkv_format != "thd":
        fault = f"PackedSeqParams of qkv_format {packed.qkv_format!r}"
        return _runs_on(delta, fault, 'Pass qkv_format="thd", of which these layers read the bounds.')
    return ""


def _is_mamba(mixer: Module) -> bool:
    return MAMBA in [base.__name__ for base in type(mixer).__mro__]


def _begins_at(seq_idx: Tensor, bounds: Tensor) -> bool:
    """True if the numbers of tokens change at each bound, and nowhere else before the last one."""
    total = int(bounds[-1])
    if len(seq_idx) < total:
        return False
    begins = torch.zeros(total, dtype=torch.bool, device=seq_idx.device)
    inner = to_device(bounds[:-1].long(), seq_idx.device)
    begins[inner[inner < total]] = True
    return bool(torch.equal((seq_idx[:total].diff() != 0), begins[1:]))


def _runs_on(mixers: Sequence[str] | dict[str, Module], fault: str, remedy: str) -> str:
    names = [*mixers]
    among = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    return (
        f"{fault}, on a model with layers that have a state ({among}): the state of a sample runs on into the next one "
        f"of its pack, so that gradients depend on the packing. {remedy}"
    )
