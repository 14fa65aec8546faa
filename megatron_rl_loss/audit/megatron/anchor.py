"""The factor between a rank's backward pass and the gradient that the optimizer gets, measured on one parameter.

DDP and finalisation scale all parameters alike that every data-parallel and context-parallel rank holds. One of these
is the *anchor*. With g_r its gradient from backward passes on rank r, and fin its finalised gradient,

    fin = f * G,    G = sum_r g_r,    hence    f = <fin, G> / <G, G>.

The residual |fin - f * G| / |f * G| is rounding if all ranks were scaled alike, and large otherwise.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatron_rl_loss.step.collectives import Group, all_reduce, several

#: A residual counts as rounding up to this multiple of the sum of independent roundings.
_SLACK = 4
#: Above this bound the residual cannot tell rounding from ranks that were scaled differently.
_TOO_UNCERTAIN = 0.25
#: Embeddings may be shared; Megatron sums query and key norms over TP by name, and routers by rules of their own.
_AVOIDED = ("embedding", "q_layernorm", "k_layernorm", "router", "output_layer")
_MARKS = ("shared", "shared_embedding", "average_gradients_across_tp_domain", "skip_backward_post_hook",
          "is_gtp_weight_remat")  # fmt: skip


@dataclass(frozen=True)
class Factor:
    """The factor of one anchor; a `problem` is the reason against using it."""

    name: str = ""  # of the parameter
    value: float = math.nan  # f
    rounding: float = math.nan  # the residual that rounding alone may leave
    uncertainty: float = math.nan  # the relative error of f: roundings of all entries average out
    apart: bool = False  # the residual is larger than rounding
    empty: bool = False  # the anchor's gradients are 0, not finite, or rounding alone
    problem: str = ""


@dataclass
class Anchor:
    """A parameter, and the sum of its gradients from backward passes on this rank."""

    name: str
    parameter: Tensor
    chunk: DistributedDataParallel
    over_tp: bool  # finalisation sums its gradient over tensor-parallel ranks too (sequence parallelism)
    sums: Tensor  # of gradients and of their absolute values, float64 [2, numel]
    num_terms: int = 0

    def keep(self, gradient: Tensor) -> None:
        """Tensor hook that adds the gradient to the sums; returns None, so the gradient does not change."""
        flat = gradient.detach().reshape(-1).double()
        self.sums += torch.stack([flat, flat.abs()])
        self.num_terms += 1

    def owned(self) -> slice:
        """The part of the finalised gradient that this rank's optimizer uses; the rest of the buffer is invalid."""
        if not self.chunk.ddp_config.use_distributed_optimizer:
            return slice(0, self.parameter.numel())
        group = self.chunk.param_to_bucket_group[self.parameter]
        bucket = group.param_to_bucket[self.parameter]
        size = bucket.grad_data.numel() // group.intra_distributed_optimizer_instance_size
        first = size * group.intra_distributed_optimizer_instance_rank
        start, end = bucket.param_to_index[self.parameter]
        return slice(min(max(first, start), end) - start, max(min(first + size, end), start) - start)

    def factor(self, dp_cp: Group, tp: Group) -> Factor:
        """The factor f, after gradients are finalised. All ranks of the groups must call it together."""
        sums, terms = self.sums.clone(), torch.tensor([float(self.num_terms)], dtype=torch.float64)
        for group in several(dp_cp, tp) if self.over_tp else several(dp_cp):
            all_reduce(sums, group)
            all_reduce(terms, group)
        main_grad: Tensor = self.parameter.main_grad  # type: ignore[attr-defined]
        owned, name = self.owned(), self.name
        final, (gradient, magnitude) = main_grad.reshape(-1)[owned].double(), sums[:, owned]
        dots = torch.stack([final @ gradient, gradient @ gradient, final @ final, magnitude @ magnitude])
        for group in several(dp_cp):
            all_reduce(dots, group)
        final_gradient, gradient2, final2, magnitude2 = dots.tolist()
        if not gradient2 or not math.isfinite(final_gradient + gradient2 + final2):
            return no_factor(f"the gradients of {name} are 0 or not finite", empty=True)
        value = final_gradient / gradient2
        # Where gradients cancel, the sum's rounding is that of its terms.
        relative = torch.finfo(main_grad.dtype).eps * math.sqrt(magnitude2 / gradient2)
        rounding = _SLACK * relative * math.sqrt(int(terms) + dp_cp.size())
        residual = math.sqrt(max(final2 / (value * value * gradient2) - 1, 0.0)) if value else math.inf
        if rounding > _TOO_UNCERTAIN:
            left = f"rounding may be {rounding:.2g} of the rest"
            return no_factor(f"the gradients of {name} cancel, {left}", empty=True)
        if residual > rounding:
            why = "ranks or micro-batches were scaled differently or left out, or gradients were not 0 before the step"
            of_rounding = f"residual {residual:.2g}, rounding {rounding:.1g}"
            says = f"the final gradient of {name} is no multiple of the sum over ranks ({of_rounding}), as if {why}"
            return no_factor(says, apart=True)
        return Factor(name, value, rounding, rounding / math.sqrt(self.parameter.numel()))


def no_factor(why: str, *, apart: bool = False, empty: bool = False) -> Factor:
    return Factor(apart=apart, empty=empty, problem=f"The scaling of gradients cannot be measured: {why}.")


def choose(chunk: Any, config: Any) -> Anchor | Factor:
    """The anchor of a model chunk, the same on all its ranks, or a `Factor` with the reason why there is none."""
    if not isinstance(chunk, DistributedDataParallel):
        return no_factor(f"{type(chunk).__name__} is not Megatron-Core's own DistributedDataParallel")

    def is_usable(name: str, parameter: Tensor) -> bool:
        fused = getattr(config, "gradient_accumulation_fusion", False) and parameter.dim() > 1
        avoided = any(part in name for part in _AVOIDED) or any(getattr(parameter, mark, False) for mark in _MARKS)
        trains, of_expert = parameter in chunk.param_to_bucket_group, not getattr(parameter, "allreduce", True)
        return trains and parameter.numel() > 1 and not (fused or avoided or of_expert)  # one number has no residual

    def preference(named: tuple[str, Tensor]) -> tuple[bool, bool, int, int]:
        """Smaller is better: the last norm, then vectors, then parameters that are small but not tiny."""
        return "final_layernorm" not in named[0], named[1].numel() < 16, named[1].dim(), named[1].numel()

    usable = [named for named in chunk.module.named_parameters() if is_usable(*named)]
    if not usable:
        return no_factor("no parameter is trainable, whole on each rank, unshared and outside experts")
    name, parameter = min(usable, key=preference)
    over_tp = bool(config.sequence_parallel and getattr(parameter, "sequence_parallel", False))
    sums = torch.zeros(2, parameter.numel(), dtype=torch.float64, device=parameter.device)
    return Anchor(name, parameter, chunk, over_tp, sums)
