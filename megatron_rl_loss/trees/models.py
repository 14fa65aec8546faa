"""What a model must be to run on a tree's slots, by what is seen of it; and rotary embeddings by depth."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from megatron_rl_loss.core.collectives import warn_on_one_rank
from megatron_rl_loss.core.transfers import to_device

#: Megatron's mixers whose state runs along the sequence, by the name of a class or base class: their files need kernels
#: to be imported. In a pack such a state must begin anew (`megatron.packing`); on a tree it cannot branch.
MAMBA, DELTA = "MambaMixer", ("GatedDeltaNet", "_GDNBase", "GatedDeltaProductMixer")
#: Classes of layers with a state that goes from slot to slot, as transformers, Megatron and others name them.
_WITH_STATE = re.compile(r"Mamba|GatedDelta|DeltaNet|Rwkv|RWKV|Retention|LinearAttention|Mixer2")
#: Parameters by which state-space layers are known under any name.
_STATE_PARAMETERS = {"A_log", "dt_bias"}
_DROPOUTS = ("attention_dropout", "hidden_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob", "attn_pdrop")


def is_mixer_with_state(module: nn.Module) -> bool:
    """True for one of Megatron's, or a class made of it."""
    return not {MAMBA, *DELTA}.isdisjoint(base.__name__ for base in type(module).__mro__)


def check_serves_trees(models: Iterable[nn.Module]) -> None:
    """Raise ValueError for layers whose state runs from slot to slot; warn of dropout in a model that trains.

    Slots of one branch follow those of another in the buffer. Attention can be told so; a state-space layer (Mamba), a
    gated delta net, a recurrence or a convolution along the slots takes over the state of the other branch. Dropout is
    drawn once for a slot, where copies in whole samples would differ: the gradient is right in expectation alone.
    """
    for model in models:
        _check_described(model)
        dropouts = set[str]()
        for name, module in model.named_modules():
            kind = type(module).__name__
            own = {key for key, _ in module.named_parameters(recurse=False)}
            is_convolution = isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1
            is_of_megatron, is_recurrence = is_mixer_with_state(module), isinstance(module, nn.RNNBase)
            is_stateful = is_of_megatron or is_convolution or is_recurrence or own & _STATE_PARAMETERS
            if is_stateful or _WITH_STATE.search(kind):
                raise ValueError(
                    f"a PrefixTree in a model with {kind} ({name}): its state would go from one branch to the next, "
                    "which attention alone can be told not to. Train this model on whole samples, or on attention "
                    "layers alone."
                )
            if model.training:
                dropouts |= {
                    f"{kind} of {p}" for p in [getattr(module, "p", 0)] if isinstance(module, nn.Dropout) and p
                }
                config = getattr(module, "config", None)
                named = {key: getattr(config, key, 0) for key in _DROPOUTS}
                dropouts |= {f"{key} {value}" for key, value in named.items() if isinstance(value, float) and value > 0}
        if dropouts:
            warn_on_one_rank(
                f"a PrefixTree in a model with dropout ({', '.join(sorted(dropouts))}): a slot draws once for all of "
                "its samples, where whole samples would draw for each. Set dropout to 0 to have their gradients."
            )


def _check_described(model: nn.Module) -> None:
    """Raise ValueError for what Megatron's models say of all their pipeline stages."""
    for module in model.modules():
        pattern, config = getattr(module, "hybrid_layer_pattern", None) or "", getattr(module, "config", None)
        said = {
            f"the layers {pattern!r} (M: Mamba, G: gated delta nets)": any(kind in pattern for kind in "MG"),
            "multi-token prediction": getattr(config, "mtp_num_layers", None),
            "a sliding window (window_size)": getattr(config, "window_size", None),
        }
        for what in [what for what, is_said in said.items() if is_said]:
            raise ValueError(
                f"a PrefixTree in a model with {what}: it goes by neighbours in the buffer, where a branch follows "
                "another one. Train this model on whole samples, or leave that out."
            )


@contextmanager
def rotary_by_depth(models: Iterable[nn.Module], depths: Tensor) -> Iterator[None]:
    """Inside, modules named `rotary_pos_emb`, as Megatron's models have, give the embedding of each slot's depth.

    Megatron makes rotary embeddings of places 0, 1, 2, ... in the buffer, whatever position ids it is given.
    """
    rows = depths.reshape(-1)
    last = int(rows.max()) if len(rows) else 0

    def by_depth(module: nn.Module, arguments: Any, output: Any) -> Any:
        embeddings: Tensor = output[0] if isinstance(output, tuple) else output
        if len(embeddings) <= last or len(embeddings) != len(rows):
            raise ValueError(
                f"rotary embeddings of {len(embeddings)} places for {len(rows)} slots: a rank's model must see all "
                "slots of the tree. Leave context parallelism out, and pass the depths of all slots."
            )
        depth_embeddings = embeddings[to_device(rows, embeddings.device)]
        return (depth_embeddings, *output[1:]) if isinstance(output, tuple) else depth_embeddings

    rotary_parts = [part for model in models for name, part in model.named_modules() if name.endswith("rotary_pos_emb")]
    hooks = [part.register_forward_hook(by_depth) for part in rotary_parts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
