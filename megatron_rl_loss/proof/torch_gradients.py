"""Gradients of a model in plain PyTorch, as a source of sketches: DDP, FSDP2, an all-reduce of one's own, one process.

What backward gives is seen by a hook of each leaf tensor, which runs before DDP's reducer does; the final gradient is
what `.grad` holds at the end of the ``with``. FSDP2 (`fully_shard`) makes one unsharded leaf of each parameter and
keeps it, so that a hook set while a module is gathered stays. Of a sharded gradient each rank has a part of the sketch.

A job may add gradients up over all ranks of the step, or wrongly over some. Each of these sums is tried: where most
parameters are a multiple of a sum over some ranks alone, tokens of the others weigh nothing, and that is evidence.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_loss.core.collectives import Group, StepGroups, attempt, several
from megatron_rl_loss.proof.exchange import Exchange
from megatron_rl_loss.proof.factor import Alike, Fit, Parameter, no_factor
from megatron_rl_loss.proof.hooks import Failure, put_first, watch
from megatron_rl_loss.proof.measurement import sizes_of
from megatron_rl_loss.proof.sketches import Backward, Signs, num_patterns

#: Hooks of a reduction may round gradients to this type, which nobody sees.
_HALF = torch.finfo(torch.bfloat16).eps
_ALONE = "not summed over ranks at all"
_NOT_ZERO = (
    "Gradients were not 0 before the step, which added to them: those of an earlier step, or of a loss that the plan "
    "does not count. Call optimizer.zero_grad() before every step, and make one plan for all that one optimizer step "
    "trains on; run the backward pass of a supervised loss after the `with`."
)
_EMPTIED = (
    "Gradients were set to None between backward passes of the step: those of the micro-batches before are lost. Call "
    "optimizer.zero_grad() once for each step, before its first micro-batch."
)
_LEFT_OUT = "Gradients are {}: what other ranks hold weighs 0 in this rank's optimizer."
_MAY_BE_MEANT = (
    "Gradients were not 0 before the step, and nobody measured the step before it: what they are is unknown."
)


def unseen(model: Any) -> str:
    """Why the gradients of a model cannot be measured; empty if they can."""
    if dist.is_available():
        from torch.distributed.fsdp import FullyShardedDataParallel

        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            return no_factor("FullyShardedDataParallel joins parameters into flat ones. Use fully_shard")
    if any(hasattr(parameter, "main_grad") for parameter in model.parameters()):
        return no_factor(
            "gradients are added up in main_grad, and not in .grad. Pass the module that Megatron's "
            "DistributedDataParallel made, as the schedule gets it"
        )
    return ""


@dataclass
class _Trained:
    """A trainable parameter: `tensor` has the final `.grad`; the leaf is its unsharded one, where there is another."""

    tensor: Any
    module: Any
    attribute: str
    leaf: Any = None


@dataclass(frozen=True)
class _Sum:
    """A sum of backward's gradients over some ranks, which the final ones may be a multiple of."""

    fault: str  # what is wrong with it, in words; empty for that over all ranks
    summed: Tensor
    final: Tensor


class TorchGradients:
    """The trainable parameters of a model; a `measurement.Source`.

    Args:
        groups: that the step is spread over.
        before: what is known of the gradients before the step.
        optimizer: whose parameters the model should have; None if nobody said it.

    Attributes:
        leaves: the tensors whose hooks see what backward gives.
        final: float64 [parameters, patterns + 1], of this rank's final gradients, after `sketch`.
    """

    def __init__(self, model: Any, groups: StepGroups, before: "Before", optimizer: Any = None) -> None:
        self._groups, self._before, self._all = groups, before, groups.all
        self._sharded = _sharded_modules(model)
        self.parameters, self._trained = list[Parameter](), list[_Trained]()
        known = set[int]()
        for module in self._sharded:
            module.reshard()
        for prefix, module in model.named_modules():
            for attribute, tensor in module._parameters.items():
                if tensor is None or not tensor.requires_grad or id(tensor) in known:
                    continue
                known.add(id(tensor))
                name = f"{prefix}.{attribute}".removeprefix(".").replace("_checkpoint_wrapped_module.", "")
                self.parameters.append(Parameter.of(name, tensor, [tensor.dtype]))
                self._trained.append(_Trained(tensor, module, attribute))
        known |= {id(parameter) for parameter in model.parameters()}  # frozen ones too
        rows = [] if optimizer is None else [row for group in optimizer.param_groups for row in group["params"]]
        self._missing = [[*row.shape] for row in rows if id(row) not in known]
        self.signs = Signs(num_patterns(len(self._trained)))
        device = self._trained[0].tensor.device if self._trained else torch.device("cpu")
        self._backward = Backward.of(self.signs, len(self._trained), device)
        self._held: Tensor | None = None
        self.final = torch.zeros(0)
        self._undo: list[Callable[[], None]] = []
        self._is_seen = self._is_taken = False  # a backward pass came to a parameter; it added to `.grad`
        self._taken = set[int]()  # parameters whose `.grad` has a part of the step
        self._lost: Tensor | None = None  # the table of what came before `.grad` was set to None

    @property
    def leaves(self) -> list[Any]:
        return [trained.leaf for trained in self._trained]

    @property
    def tensors(self) -> list[Tensor]:
        rows = (trained.tensor for trained in self._trained)
        return [tensor.detach().to_local() if _is_sharded(tensor) else tensor for tensor in rows]

    def open(self, take: Callable[[], None], fail: Failure) -> None:
        self._find_leaves()
        # Known before the step, so that an error here is no danger between two collectives.
        self._parts = _parts_by_groups([trained.tensor for trained in self._trained])
        self._parts_of_leaves = _parts_by_groups(self.leaves)
        for number, leaf in enumerate(self.leaves):
            self._undo.append(watch(leaf, partial(self._see, number), partial(self._take, number, take), fail))

    def _find_leaves(self) -> None:
        by_module: dict[int, list[_Trained]] = {}
        for trained in self._trained:
            by_module.setdefault(id(trained.module), []).append(trained)
        for module in self._sharded:
            module.reshard()  # after an evaluation the root's parameters may still be whole
        for module in self._sharded:
            module.unshard()  # of the module's own parameters; their unsharded tensors are kept
            for inner in module.modules():
                for trained in by_module.get(id(inner), ()):
                    now = inner._parameters[trained.attribute]
                    if trained.leaf is None and now is not trained.tensor:
                        trained.leaf = now
            module.reshard()
        self._sharded = []  # they may hold the model, which this may outlive
        for trained in self._trained:
            trained.leaf, trained.module = trained.tensor if trained.leaf is None else trained.leaf, None

    def close(self) -> None:
        undo, self._undo = self._undo, []
        for remove in undo:
            remove()

    def _take(self, number: int, take: Callable[[], None]) -> None:
        take()
        self._is_taken = True
        self._taken.add(number)
        self._backward.take(number)

    def _see(self, number: int, gradient: Tensor) -> None:
        """A tensor hook: returns nothing, so that the gradient goes on as it is."""
        if self._held is None:  # the step's first gradient
            self._held = self.held()
        self._is_seen = True
        trained = self._trained[number]
        if number in self._taken and trained.leaf is trained.tensor and trained.tensor.grad is None:
            self._backward.flush()
            self._lost = self._backward.table.clone()
            self._taken.clear()
        known = self.parameters[number]
        if gradient.layout != torch.strided:
            known.why = "its gradient is sparse"
            return
        known.eps = max(known.eps, torch.finfo(gradient.dtype).eps)
        if not _is_sharded(gradient):
            self._backward.see(number, gradient, self._trained[number].leaf)
        elif _places(gradient) == _places(self._trained[number].leaf):
            self._backward.see_sketch(number, sketch_part(self.signs, gradient))
        else:
            known.why = "its gradient is sharded in another way than the parameter"

    def untrained(self, *, is_reached: bool) -> str:
        """Why no gradient was added to `.grad`, where that is not because gradients are 0; empty if it is.

        Args:
            is_reached: a backward pass came to the losses.
        """
        if self._is_seen and not self._is_taken:
            return no_factor("torch.autograd.grad gives gradients that nobody sees used. Call backward() on the loss")
        if is_reached and not self._is_seen:
            return no_factor("no loss reaches a parameter of the model that was given. Pass the one that is trained")
        return ""

    def held(self) -> Tensor:
        """float64 [parameters, patterns + 1]: of what `.grad` holds now, on this rank."""
        rows = [self._gradient_sketch(number) for number in range(len(self._trained))]
        return torch.stack(rows) if rows else self._backward.table.cpu()

    def _gradient_sketch(self, number: int) -> Tensor:
        gradient, known = self._trained[number].tensor.grad, self.parameters[number]
        if gradient is not None and gradient.layout != torch.strided:
            known.why = "its gradient is sparse"
        if gradient is None or known.why:
            return torch.zeros(self.signs.patterns + 1, dtype=torch.float64)
        known.eps = max(known.eps, torch.finfo(gradient.dtype).eps)
        return sketch_part(self.signs, gradient).cpu()

    def sketch(self) -> int:
        self._backward.flush()
        for number in self._backward.changed:
            self.parameters[number].why = "a hook changes its gradient in place"
        self.final = self.held()
        self._held = torch.zeros_like(self.final) if self._held is None else self._held
        return max([1, *self._backward.num_terms])

    def alike(self, exchange: Exchange, num_terms: int, where: str) -> Alike:
        own = self._add_parts(exchange, self._backward.table.cpu(), are_leaves=True)
        final = self._add_parts(exchange, self.final)
        assert self._held is not None
        self._whole_final = final
        has_held, is_meant, has_lost = self._look_before(exchange, own)
        for parameter in self.parameters:
            parameter.roundings = 3.0 + num_terms + sum(group.size() for group in self._groups.loss_groups)
        by_group, right = self._right_sums(exchange, own, final, has_held=has_held, is_meant=is_meant)
        final = self._whole_final
        tried = [(of, 0.0) for of in right]
        fits = self._fit(exchange, tried)
        if (best := self._best(exchange, fits, tried, own)) is None:  # all ranks agree on it
            partial_sums = self._partial_sums(exchange, own, final, by_group, has_lost=has_lost)
            further = [(of, 0.0) for of in partial_sums] + [(of, _HALF) for of in (*right, *partial_sums)]
            tried, fits = tried + further, fits + self._fit(exchange, further)
            best = self._best(exchange, fits, tried, own)
        chosen, least_eps = tried[best or 0]
        alike = exchange.local(lambda: fits[best or 0].alike(where), Alike())
        if has_held and not self._before.is_known:
            alike.limits.append(_MAY_BE_MEANT)
        elif has_held and not is_meant:
            alike.faults.append(_NOT_ZERO)
        if least_eps > 0:
            alike.notes.append("rounded like bfloat16 on the way")
        for shape in self._missing:
            alike.uncovered[f"a parameter of shape {shape}"] = (
                "the optimizer has it, and the model that was given has not"
            )
        alike.total += len(self._missing)
        if chosen.fault:
            alike.faults.append(chosen.fault)
        self._explain(exchange, alike, own)
        return alike

    def _fit(self, exchange: Exchange, tried: list[tuple[_Sum, float]]) -> list[Fit]:
        nothing: list[Fit] = []
        return exchange.local(
            lambda: [Fit(self.parameters, of.summed, of.final, least) for of, least in tried], nothing
        )

    def _best(self, exchange: Exchange, fits: list[Fit], tried: list[tuple[_Sum, float]], own: Tensor) -> int | None:
        """The first that all ranks are certain of, if there is one; what only half precision explains looks like it."""

        def look() -> list[float]:
            return [
                float(fit.is_certain and not (least_eps and fit.leans_on(own)))
                for fit, (_, least_eps) in zip(fits, tried, strict=True)
            ]

        is_certain = exchange.local(look, [0.0] * len(tried))
        uncertain = exchange.largest([-certain for certain in is_certain], self._all)
        return next((number for number, most in enumerate(uncertain) if most < 0), None)

    def _look_before(self, exchange: Exchange, own: Tensor) -> tuple[bool, bool, bool]:
        """On all ranks: some parameter that was trained on had a gradient before; it is meant to be added to.

        Also True if `.grad` was set to None between backward passes of some rank.
        """

        def look() -> list[float]:
            assert self._held is not None
            is_held = self._held[:, -1] > 0
            is_added = -float(self._before.is_added_to(self._held))
            return [float((is_held & (own[:, -1] > 0)).any()), is_added, float(self._lost is not None)]

        has_held, minus_meant, has_lost = exchange.largest(exchange.local(look, [0.0, 0.0, 0.0]), self._all)
        return has_held > 0, minus_meant < 0, has_lost > 0

    def _right_sums(
        self, exchange: Exchange, own: Tensor, final: Tensor, *, has_held: bool, is_meant: bool
    ) -> tuple[Tensor, list[_Sum]]:
        """The sum over the first group of ranks; and those over all, of which the final gradients may be multiples."""
        whole, first_sum = own.clone(), own
        for number, group in enumerate(self._groups.loss_groups):
            exchange.reduce(whole, group)
            first_sum = whole.clone() if number == 0 else first_sum
        assert self._held is not None
        # What a parameter held before is no gradient of this step: one that no loss of it reaches may keep it.
        held = self._add_parts(exchange, self._held)
        less = torch.cat([(final - held)[:, :-1], final[:, -1:] + held[:, -1:]], 1)
        less[(less[:, :-1].abs().amax(1) <= 2.0**-40 * held[:, -1].sqrt())] = 0.0
        is_kept = (whole[:, -1] == 0) & (held[:, -1] > 0)
        self._whole_final = final = torch.where(is_kept[:, None], less, final)
        if has_held and is_meant:
            self._whole_final = final = less
        return first_sum, [_Sum("", whole, final)] + ([_Sum("", whole, less)] if has_held else [])

    def _partial_sums(
        self, exchange: Exchange, own: Tensor, final: Tensor, dp_sum: Tensor, *, has_lost: bool
    ) -> list[_Sum]:
        """Sums of which the final gradients are multiples where some ranks, or micro-batches, are left out."""
        sums = []
        if has_lost:
            lost = torch.zeros_like(own) if self._lost is None else self._lost.cpu()
            later = own - self._add_parts(exchange, lost, are_leaves=True)
            for group in self._groups.loss_groups:
                exchange.reduce(later, group)
            sums.append(_Sum(_EMPTIED, later, final))
        if len(self._groups.loss_groups) == 2:
            cp_sum = own.clone()
            exchange.reduce(cp_sum, self._groups.cp_group)
            sums.append(_Sum(_LEFT_OUT.format("summed over the DP ranks alone, not over CP"), dp_sum, final))
            sums.append(_Sum(_LEFT_OUT.format("summed over the CP ranks alone, not over DP"), cp_sum, final))
        if self._groups.loss_groups:
            sums.append(_Sum(_LEFT_OUT.format(_ALONE), own, final))
        return sums

    def _add_parts(self, exchange: Exchange, table: Tensor, *, are_leaves: bool = False) -> Tensor:
        """A table of parts of sketches, each summed over the ranks that hold the parts of its tensor."""
        total = table.clone()
        for numbers, groups in self._parts_of_leaves if are_leaves else self._parts:
            part = total[numbers]
            for group in groups:
                exchange.reduce(part, group)
            total[numbers] = part
        return total

    def _values(self) -> Tensor:
        """float64 [parameters, 1]: a number of this rank's part of each parameter."""
        return torch.stack([sketch_part(self.signs, trained.tensor.detach()).cpu()[:1] for trained in self._trained])

    def _multiples(self, own: Tensor) -> list[float]:
        """By which factor each final gradient is that of this rank alone; NaN for none, and where there is one rank."""
        fit = Fit(self.parameters, own, self._whole_final)
        several_ranks = bool(self._groups.loss_groups)
        return [fit.multiple(number) if several_ranks else math.nan for number in range(len(self.parameters))]

    def _explain(self, exchange: Exchange, alike: Alike, own: Tensor) -> None:
        """Say what is known of parameters that have not the factor; all ranks call it together."""
        numbers = {parameter.name: number for number, parameter in enumerate(self.parameters)}
        odd = {numbers[name] for name in alike.unlike}
        flags = [float(number in odd) for number in numbers.values()]
        if not exchange.largest([float(bool(odd))], self._all)[0]:
            return
        values = exchange.local(self._values, torch.zeros(len(flags), 1, dtype=torch.float64))
        values = self._add_parts(exchange, values)[:, 0]
        mine = [*flags, *values.tolist(), *(-values).tolist()]
        count, together = len(flags), exchange.largest(mine, self._all)
        alone: list[float] = exchange.local(lambda: self._multiples(own), [math.nan] * count)
        for name, number in numbers.items():
            if together[number] and together[count + number] + together[2 * count + number]:
                alike.covered -= name not in (*alike.unlike, *alike.zero, *alike.uncovered)
                alike.unlike.pop(name, None)
                alike.uncovered[name] = "ranks hold different values of it"
            elif name in alike.unlike:
                alike.unlike[name] = alike.unlike[name] if math.isnan(alone[number]) else _ALONE


def _sharded_modules(model: Any) -> list[Any]:
    """Modules that FSDP2 shards, of which there are none without torch's distributed package."""
    if not dist.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _is_sharded(values: Any) -> bool:
    return hasattr(values, "device_mesh") and hasattr(values, "placements")


def _places(values: Any) -> Any:
    return (values.device_mesh, values.placements) if _is_sharded(values) else None


def _parts_by_groups(tensors: list[Any]) -> list[tuple[list[int], list[Group]]]:
    """The numbers of tensors that are cut over the same groups, with these groups."""
    by_groups = dict[tuple[int, ...], tuple[list[int], list[Group]]]()
    for number, tensor in enumerate(tensors):
        groups = _groups_of_parts(tensor)
        by_groups.setdefault(tuple(map(id, groups)), ([], groups))[0].append(number)
    return [*by_groups.values()]


def _groups_of_parts(values: Any) -> list[Group]:
    """The groups over whose ranks parts of a tensor's sketch add up."""
    if not _is_sharded(values):
        return []
    mesh = values.device_mesh
    places = enumerate(values.placements)
    return several(*(mesh.get_group(dim) for dim, place in places if not place.is_replicate()))


def sketch_part(signs: Signs, values: Any) -> Tensor:
    """The sketch of this rank's part of a tensor."""
    if not _is_sharded(values):
        return signs.sketch(values.detach())
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local = values.detach().to_local()
    _, offsets = compute_local_shape_and_global_offset(values.shape, values.device_mesh, values.placements)
    return signs.sketch(local, values.shape, offsets)


class Before:
    """What is known of a model's gradients before a step: those at the end of its last one, if that was measured.

    Attributes:
        is_known: they are known, or there was no step before.
    """

    def __init__(self, gradients: TorchGradients | None = None, *, is_known: bool = True) -> None:
        self.is_known, self._gradients = is_known, gradients
        self._sizes = [] if gradients is None else sizes_of(gradients.tensors)
        self._now: Tensor | None = None
        self._trained, self._is_moved = set[int](), False

    def is_added_to(self, held: Tensor) -> bool:
        """True if what gradients hold is that of the last step, and no optimizer moved parameters since."""
        if self._gradients is None or held.shape != self._gradients.final.shape:
            return False
        is_same = bool(torch.isclose(held, self._gradients.final, rtol=1e-9, atol=0.0).all())
        return is_same and sizes_of(self._gradients.tensors) == self._sizes

    @contextmanager
    def compared(self) -> Iterator[None]:
        """In the ``with`` of another step: note what gradients hold at its first one, and which parameters train."""

        def see(number: int, _: Tensor) -> None:
            self._trained.add(number)
            if self._now is None and self._gradients is not None:
                now = attempt(self._gradients.held)  # an error in a hook would end the backward pass
                self._now = now if isinstance(now, Tensor) else torch.zeros(0)
                self._is_moved = attempt(lambda: sizes_of(self.tensors)) != self._sizes

        leaves = [] if self._gradients is None else self._gradients.leaves
        undo = [put_first(leaf, partial(see, number)) for number, leaf in enumerate(leaves)]
        try:
            yield
        finally:
            for remove in undo:
                remove()

    @property
    def tensors(self) -> list[Tensor]:
        return [] if self._gradients is None else self._gradients.tensors

    def leftover(self) -> str:
        """Whether `.grad` held, of parameters that train, what the step before left there, or a multiple of it.

        ``left`` if an optimizer has moved parameters since, ``added`` if none has; empty if it did not.
        """
        if self._gradients is None or self._now is None or not len(self._now):
            return ""
        numbers = sorted(self._trained)
        now, parameters = self._now[numbers], [self._gradients.parameters[number] for number in numbers]
        if not bool(now[:, -1].sum() > 0):
            return ""
        fit = Fit(parameters, self._gradients.final[numbers], now)
        is_held = fit.is_certain and fit.share > 0.9
        if not is_held:
            return ""
        return "left" if self._is_moved else "added"
