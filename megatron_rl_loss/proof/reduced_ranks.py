"""The ranks over which a model's wrapper reduces gradients, against those whose tokens a plan counts."""

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from megatron_rl_loss.core.collectives import StepGroups, gather_objects, ranks_of, world_rank
from megatron_rl_loss.proof.schedules import chunks_of


def reduced_over(model: Any) -> Iterator[tuple[str, set[int]]]:
    """The wrappers of a model, or of a list of Megatron's chunks, each with the ranks that it reduces over."""
    if not dist.is_available():
        return
    from torch.distributed.fsdp import FSDPModule

    for chunk in chunks_of(model):
        for module in chunk.modules():
            # torch's DistributedDataParallel has the first, Megatron's the second.
            group = getattr(module, "process_group", None) or getattr(module, "dp_cp_group", None)
            if isinstance(group, dist.ProcessGroup):
                yield type(module).__name__, set(ranks_of(group))
            elif isinstance(module, FSDPModule):
                yield from (("fully_shard", ranks) for ranks in _ranks_of_meshes(module))


def _ranks_of_meshes(module: Any) -> Iterator[set[int]]:
    """Of a module with `fully_shard`, whose parameters' own meshes may have tensor-parallel dimensions too."""
    for group in _parameter_groups(module):
        if not getattr(group.mesh_info, "is_spmd_mesh", False):
            yield set(group.mesh_info.mesh.mesh.flatten().tolist())


def _parameter_groups(module: Any) -> list[Any]:
    """What FSDP2 keeps of a module's own parameters, which nothing public tells."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def unreduced(model: Any) -> str:
    """Why `fully_shard` has no final gradients after a step's last backward pass; empty where it may have."""
    if dist.is_available():
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            groups = _parameter_groups(module) if isinstance(module, FSDPModule) else []
            if not all(getattr(group, "reduce_grads", True) for group in groups):
                return (
                    "fully_shard has reduced no gradients: set_requires_gradient_sync(False) holds in the last backward"
                    " pass. Call set_requires_gradient_sync(True) before that of the last micro-batch"
                )
    return ""


def counted_by(groups: StepGroups) -> set[int]:
    """The ranks that a plan knows: those of all its groups together. All of them call it."""
    ranks = {world_rank()}
    for group in groups.all:
        ranks = set().union(*gather_objects(ranks, group))
    return ranks


def uncounted(model: Any, counted: set[int]) -> str:
    """The fault of a wrapper that reduces over ranks of which the plan knows nothing; empty for none."""
    for wrapper, ranks in reduced_over(model):
        if not ranks <= counted:
            return f"{_both(wrapper, ranks, counted)}: tokens of the others are in no denominator. {_REMEDY}"
    return ""


def left_out(model: Any, counted: set[int]) -> str:
    """What is wrong with a wrapper that reduces over some of the plan's ranks, if nobody adds up the rest.

    A sum of the user's own may, or the others hold the same samples: it is evidence only where numbers say so too.
    """
    for wrapper, ranks in reduced_over(model):
        if ranks < counted:
            return f"{_both(wrapper, ranks, counted)}: what the others hold weighs nothing here. {_REMEDY}"
    return ""


_REMEDY = (
    "Give plan_step the group that the model is wrapped with, dp_group=..., and groups whose ranks hold the same "
    "samples as replica_groups=[...]."
)


def _both(wrapper: str, ranks: set[int], counted: set[int]) -> str:
    return f"{wrapper} reduces gradients over {len(ranks)} ranks, and the plan counts the tokens of {len(counted)}"
