"""By what are gradients multiplied between a rank's backward pass and the optimizer? One number, read off a parameter.

DDP scales and sums gradients, finalisation divides them: by the same factor for every parameter that all data-parallel
and context-parallel ranks share. So one parameter is enough, the *anchor*: with g_r what backward passes gave it on
rank r, and fin what the optimizer would get,

    fin = f * G,    G = sum_r g_r,    hence    f = <fin, G> / <G, G>.

The residual |fin - f * G| / |f * G| says whether there was one factor at all: it is rounding where all ranks were
scaled alike, and large where they were not.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatron_rl_loss.step.collectives import Group, all_reduce, several

#: A residual up to so many times what independent roundings add up to is rounding.
_SLACK = 4
#: Above this a residual says nothing, since scaling apart may be as large.
_TOO_UNCERTAIN = 0.25


@dataclass(frozen=True)
class Factor:
    """What one anchor says."""

    name: str  # of the parameter
    value: float = math.nan  # f
    residual: float = math.nan  # |fin - f * G| / |f * G|
    rounding: float = math.nan  # what the residual may be by rounding alone
    uncertainty: float = math.nan  # what f may be off by, relative to it: roundings of all entries average out
    problem: str = ""  # why f cannot be relied on


@dataclass
class Anchor:
    """A parameter, and what backward passes give it on this rank."""

    name: str
    parameter: Tensor
    chunk: DistributedDataParallel  # the model chunk
    over_tp: bool  # whether finalisation sums its gradient over tensor-parallel ranks too (sequence parallelism)
    gradient: Tensor = field(init=False)  # the sum of its gradients, float64 [numel]
    magnitude: Tensor = field(init=False)  # the sum of their absolute values
    num_terms: int = 0  # how many there were

    def __post_init__(self) -> None:
        self.gradient = torch.zeros(self.parameter.numel(), dtype=torch.float64, device=self.parameter.device)
        self.magnitude = torch.zeros_like(self.gradient)

    def keep(self, gradient: Tensor) -> None:
        """A tensor hook: returns nothing, so that the gradient goes on as it is."""
        flat = gradient.detach().reshape(-1).double()
        self.gradient += flat
        self.magnitude += flat.abs()
        self.num_terms += 1

    def owned(self) -> slice:
        """The part of the finalised gradient that this rank's optimizer uses; the rest is no gradient of the step."""
        if not self.chunk.ddp_config.use_distributed_optimizer:
            return slice(0, self.parameter.numel())
        group = self.chunk.param_to_bucket_group[self.parameter]
        bucket = group.param_to_bucket[self.parameter]
        size = bucket.grad_data.numel() // group.intra_distributed_optimizer_instance_size
        first = size * group.intra_distributed_optimizer_instance_rank
        start, end = bucket.param_to_index[self.parameter]
        return slice(min(max(first, start), end) - start, max(min(first + size, end), start) - start)

    def factor(self, dp_cp: Group, tp: Group) -> Factor:
        """f, once gradients are finalised. All ranks of the groups must call it together."""
        sums = torch.stack([self.gradient, self.magnitude])
        terms = torch.tensor([float(self.num_terms)], dtype=torch.float64)
        for group in several(dp_cp, tp) if self.over_tp else several(dp_cp):
            all_reduce(sums, group)
            all_reduce(terms, group)
        owned = self.owned()
        main_grad: Tensor = self.parameter.main_grad  # type: ignore[attr-defined]
        final = main_grad.reshape(-1)[owned].double()
        gradient, magnitude = sums[:, owned]
        dots = torch.stack([final @ gradient, gradient @ gradient, final @ final, magnitude @ magnitude])
        for group in several(dp_cp):
            all_reduce(dots, group)
        final_gradient, gradient2, final2, magnitude2 = dots.tolist()
        name = self.name
        if not math.isfinite(final_gradient + gradient2 + final2):
            return Factor(name, problem=f"the gradient of {name} is not finite")
        if gradient2 == 0:
            nothing, cancelled = f"no gradient reached {name}", f"the gradients of {name} add up to 0"
            return Factor(name, problem=nothing if magnitude2 == 0 else cancelled)
        value = final_gradient / gradient2
        # Where gradients cancel, the sum's rounding is that of its terms.
        relative = torch.finfo(main_grad.dtype).eps * math.sqrt(magnitude2 / gradient2)
        rounding = _SLACK * relative * math.sqrt(int(terms) + dp_cp.size())
        residual = math.inf if value == 0 else math.sqrt(max(final2 / (value * value * gradient2) - 1, 0.0))
        problem = ""
        if value == 0:
            problem = f"the finalised gradient of {name} is 0, but not what made it"
        elif rounding > _TOO_UNCERTAIN:
            problem = f"the gradients of {name} cancel: rounding may be {rounding:.2g} of what is left"
        elif residual > rounding:
            problem = (
                f"the finalised gradient of {name} is no multiple of the sum over ranks of what backward passes gave "
                f"it (residual {residual:.2g}, rounding {rounding:.1g}), as if ranks or micro-batches were scaled "
                "apart or left out, or gradients were there before the step"
            )
        return Factor(name, value, residual, rounding, rounding / math.sqrt(self.parameter.numel()), problem)


def choose(chunk: Any, config: Any) -> Anchor | str:
    """The anchor of a model chunk, the same on all its ranks; or why there is none."""
    if not isinstance(chunk, DistributedDataParallel):
        return f"{type(chunk).__name__} is not Megatron-Core's own DistributedDataParallel: its gradients lie elsewhere"
    usable = [named for named in chunk.module.named_parameters() if _is_usable(chunk, config, *named)]
    if not usable:
        return (
            "no parameter can be relied on: it must be trainable, whole on every rank, no expert's, not shared between "
            "stages, and its gradient must not be accumulated by a fused kernel"
        )
    name, parameter = min(usable, key=_preference)
    over_tp = bool(config.sequence_parallel and getattr(parameter, "sequence_parallel", False))
    return Anchor(name, parameter, chunk, over_tp)


#: Embeddings may be shared; query and key norms are summed over TP by their name; routers by rules of their own.
_AVOIDED = ("embedding", "q_layernorm", "k_layernorm", "router", "output_layer")
_MARKS = ("shared", "shared_embedding", "average_gradients_across_tp_domain", "skip_backward_post_hook",
          "is_gtp_weight_remat")  # fmt: skip


def _is_usable(chunk: Any, config: Any, name: str, parameter: Tensor) -> bool:
    return (
        parameter in chunk.param_to_bucket_group  # trainable
        and getattr(parameter, "allreduce", True)  # no expert's
        and parameter.numel() > 1  # of one number there is no residual
        and not any(part in name for part in _AVOIDED)
        and not any(getattr(parameter, mark, False) for mark in _MARKS)
        and not (getattr(config, "gradient_accumulation_fusion", False) and parameter.dim() > 1)
    )


def _preference(named: tuple[str, Tensor]) -> tuple[bool, bool, int, int, str]:
    """Smaller is better: the last norm, then vectors, then what is small but not tiny."""
    name, parameter = named
    return "final_layernorm" not in name, parameter.numel() < 16, parameter.dim(), parameter.numel(), name
