"""Does what a model says of a sample depend on the pack that it lies in? A check by changing what must not matter.

The same micro-batch runs through Megatron's schedule several times, in evaluation mode and without gradients, always in
a buffer of one size and one cut: as it is; with the tokens of every second sample changed; with other padding; with
positions that begin anew; and of some samples with the sample alone at the front of the buffer. Values of a token that
change by more than rounding tell what was seen, and the first layer whose output changes tells what saw it.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from megatron_rl_loss.audit.assembly import portable
from megatron_rl_loss.core.collectives import ModelGroups, check_together, gather_objects, several
from megatron_rl_loss.core.layouts import Slots
from megatron_rl_loss.core.microbatch import Microbatch
from megatron_rl_loss.core.samples import Samples
from megatron_rl_loss.core.transfers import to_device
from megatron_rl_loss.megatron.forward_pass import evaluating
from megatron_rl_loss.megatron.iterator import DataIterator, MicrobatchIterator, batches_of
from megatron_rl_loss.megatron.packing import layers_with_state, packed_seq_params
from megatron_rl_loss.megatron.proving import facts_of
from megatron_rl_loss.proof.schedules import chunks_of

#: So many samples are also run alone, if a layout of slots and no attention mask describes the pack.
_MOST_ALONE = 4
#: A value is a sum of some hundred rounded products: by chance their roundings add up to less than this many.
_ROUNDINGS = 64
ATTENTION, STATE = "attention over bounds", "a state that runs on"
PADDING, POSITIONS, ALONE = "padding that is seen", "positions that do not start anew", "another value alone"


class PackFinding(NamedTuple):
    """What a sample's values depend on beside the sample.

    Attributes:
        position: the first token of the sample whose value changes.
        difference: the largest change of a value.
        layer: the first layer whose output changes; empty where no layer was compared.
    """

    dp_rank: int
    sample: int
    kind: str
    position: int
    difference: float
    layer: str = ""

    def __str__(self) -> str:
        at = f" from {self.layer} on" if self.layer else ""
        return (
            f"DP rank {self.dp_rank}, sample {self.sample}: {self.kind}{at}; values change from token {self.position} "
            f"on, by up to {self.difference:.3g}"
        )


@dataclass
class PackReport:
    """The findings of all ranks, and the largest change of a value that is taken for rounding.

    Attributes:
        undecided: why a sample may depend on its pack all the same; empty if none does, or some do.
    """

    findings: list[PackFinding] = field(default_factory=list)
    rounding: float = 0.0
    undecided: str = ""

    def __str__(self) -> str:
        says = [str(finding) for finding in self.findings] or [self.undecided or "No sample depends on its pack"]
        return "\n".join([*says, *([] if self.undecided else [f"Rounding: {self.rounding:.1e}"])])


class _Trial(NamedTuple):
    """One run: local tokens to be changed, or the slot that is alone; `anew` begins positions anew."""

    name: str
    changed: Tensor | None = None
    anew: bool = False
    alone: int | None = None


def check_packing(
    forward_step: Callable[[Any, Any], tuple[Any, Any]],
    batch: Any,
    model: Any,
    samples: Samples,
    *,
    pg_collection: ProcessGroupCollection | None = None,
    **options: Any,
) -> PackReport:
    """Compare the values of a micro-batch's tokens with those in other packs, on all ranks together.

        report = check_packing(forward_step, batch, model, samples_of(batch), seq_length=4096, micro_batch_size=1)

    Args:
        forward_step: as the schedule takes it; the model's output, or its first part, has a value for each token of
            this rank: losses, log-probs or logits. Its loss function is not called.
        batch: of this data-parallel rank; the iterator of `forward_step` gives it again and again.
        model: the model chunk, or list of chunks. Each takes ``input_ids`` and ``position_ids``.
        samples: describes the batch. Without ``total_lengths`` in its layout, padding of a slot is part of the sample.
        pg_collection: the process groups; default: the model's, else Megatron's parallel state.
        options: of the schedule: ``seq_length`` and ``micro_batch_size``.

    Raises:
        ValueError: on all ranks, an output without a value for each token of a rank, or a batch whose tokens are not
            those of the layout.
    """
    groups, _ = facts_of(model, pg_collection)
    chunks = chunks_of(model)
    return _checked(forward_step, [_Again(batch) for _ in chunks], chunks, samples, groups, options)


class _Again(NamedTuple):
    """A batch that an iterator gives again and again."""

    batch: Any

    def iterator(self, turns: int) -> Iterator[Any]:
        """At least that many times; `LossAggregation` takes no iterator but its own."""
        batches = (copy(self.batch) for _ in count())  # a forward step may take a dictionary apart
        return MicrobatchIterator(islice(batches, turns)) if isinstance(self.batch, Microbatch) else batches


class KeptBatches:
    """The first batch that a step's iterators give, kept for a check of packing after the step.

        kept = KeptBatches(data_iterator)
        losses = forward_backward_func(data_iterator=kept.data_iterator, ...)
        report = kept.check(forward_step, model, samples, seq_length=4096, micro_batch_size=1)

    Attributes:
        data_iterator: what the schedule gets in place of the step's own.
    """

    def __init__(self, data_iterator: DataIterator) -> None:
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        self._first: list[list[Any] | None] = [None if iterator is None else [] for iterator in iterators]
        kept = [self._keep(*chunk_batches) for chunk_batches in zip(iterators, self._first, strict=True)]
        self.data_iterator: DataIterator = kept if isinstance(data_iterator, list) else kept[0]

    @staticmethod
    def _keep(iterator: Iterator[Any] | None, first: list[Any] | None) -> Iterator[Any] | None:
        if iterator is None or first is None:
            return None
        if isinstance(iterator, MicrobatchIterator):
            first += [copy(microbatch) for microbatch in iterator.first()]
            return iterator

        def read() -> Iterator[Any]:
            for batch in batches_of(iterator):
                if not first:
                    first.append(copy(batch))
                yield batch

        return read()

    def check(self, forward_step: Any, model: Any, samples: object, **options: Any) -> PackReport:
        """`check_packing` of the batch that was kept; its `Samples` may be known to the last pipeline stage alone.

        Raises ValueError on all ranks if they are not known to it, or name a context-parallel group of their own.
        """
        groups, _ = facts_of(model, None)
        chunks = chunks_of(model)
        stage_samples = gather_objects(portable(samples) if isinstance(samples, Samples) else None, groups.pp)
        described = next((samples_here for samples_here in stage_samples if samples_here is not None), None)

        def known() -> Samples:
            if described is None:
                raise ValueError("the samples of the first micro-batch are not known. Call tap(..., samples=samples).")
            if described.cp_group is not None:
                raise ValueError("a context-parallel group of the micro-batch's own: check_packing knows the model's.")
            return described

        described = check_together(known, several(*groups.all))
        # A stage that read nothing reads nothing again.
        batches = [None if first is None else _Again(next(iter(first), None)) for first in self._first]
        return _checked(forward_step, batches, chunks, described, groups, options)


def _checked(
    forward_step: Any,
    batches: list[_Again | None],
    chunks: list[Any],
    samples: Samples,
    groups: ModelGroups,
    options: dict[str, Any],
) -> PackReport:
    everywhere = several(*groups.all)

    def prepared() -> tuple[_Pack, list[_Trial], list[_Run]]:
        pack = _Pack(samples, *samples.place_in(groups.cp), groups.tp.rank(), groups.tp.size())
        trials = pack.trials()
        while len(chunks) > 1 and len(trials) % groups.pp.size():  # whole rounds of virtual stages
            trials.append(_Trial("again"))
        return pack, trials, [_Run(pack, trials, unwrap_model(chunk)) for chunk in chunks]

    pack, trials, runs = check_together(prepared, everywhere)

    def step(iterator: Any, chunk: Any) -> tuple[Any, Any]:
        output, _ = forward_step(iterator, chunk)
        return output, lambda output, non_loss_data: output

    with ExitStack() as stack, torch.no_grad(), evaluating(chunks):
        for run in runs:
            stack.enter_context(run.hooked())
        iterators = [None if batch is None else batch.iterator(len(trials)) for batch in batches]
        outputs = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(trials),
            forward_only=True,
            collect_non_loss_data=True,
            **options,
        )
    dtype = get_model_config(chunks[0]).params_dtype
    eps = torch.finfo(dtype).eps

    def compared() -> Any:
        """Of this rank: by change and sample what its values show, their rounding, and the first layers."""
        layers = dict[tuple[str, int], tuple[int, str, bool]]()
        for run in runs:
            run.raise_fault()
            layers |= {key: first for key, first in run.first_layers(eps).items() if key not in layers}
        values = [pack.values(output) for output in outputs or ()]
        changes, rounding, is_coarse = pack.compared(trials, values, eps) if values else ({}, 0.0, False)
        dp_rank = groups.dp.rank()
        return (
            {(dp_rank, *key): change for key, change in changes.items()},
            rounding,
            is_coarse,
            {(dp_rank, *key): layer for key, layer in layers.items()},
        )

    comparisons = check_together(compared, everywhere)
    for group in everywhere:
        comparisons = _joined(gather_objects(comparisons, group))
    return _report(str(dtype).removeprefix("torch."), *comparisons)


def _joined(comparisons: list[Any]) -> Any:
    """Of each change the first token, the largest difference and the first layer, over ranks."""
    changes: dict[Any, tuple[int, float]] = {}
    layers: dict[Any, tuple[int, str, bool]] = {}
    rounding, is_coarse = 0.0, False
    for values, largest, exceeds, first in comparisons:
        rounding, is_coarse = max(rounding, largest), is_coarse or exceeds
        for key, (position, difference) in values.items():
            before = changes.get(key, (position, difference))
            changes[key] = min(before[0], position), max(before[1], difference)
        for key, layer in first.items():
            layers[key] = min(layers.get(key, layer), layer)
    return changes, rounding, is_coarse, layers


def _report(
    dtype: str, changes: dict[Any, Any], rounding: float, is_coarse: bool, layers: dict[Any, Any]
) -> PackReport:
    findings = []
    for (dp_rank, trial, sample), (position, difference) in sorted(changes.items()):
        if trial == "padding" and (dp_rank, "others", sample) in changes:
            continue  # that of others, seen in the same way
        kind = {"padding": PADDING, "positions": POSITIONS, "alone": ALONE}.get(trial, ATTENTION)
        _, layer, has_state = layers.get((dp_rank, trial, sample), (0, "", False))
        if trial == "others" and has_state:
            kind = STATE
        findings.append(PackFinding(dp_rank, sample, kind, position, difference, layer))
    explained = {(finding.dp_rank, finding.sample) for finding in findings if finding.kind != ALONE}
    findings = [f for f in findings if f.kind != ALONE or (f.dp_rank, f.sample) not in explained]
    undecided = (
        f"Not decided: values change by up to {rounding:.2g}, which may be rounding of {dtype}, or what a sample sees "
        "of its pack. Run the check in float32."
    )
    return PackReport(findings, rounding, undecided if is_coarse and not findings else "")


class _Pack:
    """Which sample, token and slot each local place of this rank is."""

    def __init__(self, samples: Samples, cp_rank: int, cp_size: int, tp_rank: int, tp_size: int) -> None:
        self.samples, self.layout = samples, samples.layout
        self.tp_rank, self.tp_size = tp_rank, tp_size
        owner = torch.full((samples.total_tokens,), -1)
        token = torch.zeros_like(owner)
        lengths = self.layout.total_lengths if self.layout is not None else None
        for number, (begin, end) in enumerate(samples.places):
            owner[begin:end], token[begin:end] = number, torch.arange(end - begin)
            if lengths is not None:
                owner[begin + lengths[number] : end] = -1  # padding, of which a mask has an entry
        local = samples.local(cp_rank, cp_size)
        self.owner, self.token = local.of(owner), local.of(token)
        self.slot: Tensor | None = None
        if isinstance(self.layout, Slots):
            bounds = torch.tensor(sorted(set(self.layout.bounds)))
            at = torch.arange(int(bounds[-1]))
            self.bounds, self.slot = bounds, local.of(torch.bucketize(at, bounds[1:], right=True))
            self.slot_of_sample = [int(torch.bucketize(begin, bounds[1:], right=True)) for begin, _ in samples.places]
            begins = local.of(at - bounds[torch.bucketize(at, bounds[1:], right=True)])
            self.anew = torch.where(self.owner < 0, begins, self.token)
        else:
            self.anew = self.token

    def trials(self) -> list[_Trial]:
        every_second = [(self.owner >= 0) & (self.owner % 2 == odd) for odd in (0, 1)]
        trials = [
            _Trial("given"),
            _Trial("again"),
            _Trial("others", every_second[0]),
            _Trial("others", every_second[1]),
        ]
        trials += [_Trial("padding", self.owner < 0), _Trial("positions", anew=True)]
        if self.slot is not None and len(self.samples) > 1:
            trials += [_Trial("alone", alone=number) for number in range(min(len(self.samples), _MOST_ALONE))]
        return trials

    def order(self, number: int) -> Tensor:
        """The local places of a sample's slot, then all others: the buffer in which it is alone at the front."""
        assert self.slot is not None
        is_own = self.slot == self.slot_of_sample[number]
        return torch.cat([is_own.nonzero()[:, 0], (~is_own).nonzero()[:, 0]])

    def values(self, output: Any) -> Tensor:
        """[local tokens, ...] of a step's output, by token."""
        first = output[0] if isinstance(output, tuple | list) else output
        if not isinstance(first, Tensor) or first.dim() < 1 or first.shape[:2].numel() != len(self.owner):
            shape = tuple(first.shape) if isinstance(first, Tensor) else type(first).__name__
            raise ValueError(
                f"a forward step whose output is {shape} for {len(self.owner)} local tokens: the check compares a "
                "value of each token. Return the model's losses, log-probs or logits."
            )
        return first.detach().float().cpu().reshape(len(self.owner), -1)

    def compared(
        self, trials: list[_Trial], values: list[Tensor], eps: float
    ) -> tuple[dict[tuple[str, int], tuple[int, float]], float, bool]:
        """By change and sample the first token and the largest difference, and the largest that is rounding.

        Also True if that exceeds rounding of float32.
        """
        unchanged, changes, rounding = values[0], dict[tuple[str, int], tuple[int, float]](), 0.0
        scale, again = max(1.0, float(unchanged.abs().max())), float((values[1] - unchanged).abs().max())
        bound, fine = (
            _ROUNDINGS * each * scale + 2 * again for each in (eps, min(eps, torch.finfo(torch.float32).eps))
        )
        for trial, changed in zip(trials[1:], values[1:], strict=True):
            if trial.name == "alone":
                assert trial.alone is not None
                back = torch.empty_like(changed)
                back[self.order(trial.alone)] = changed
                changed, looked_at = back, self.owner == trial.alone
            else:
                looked_at = (self.owner >= 0) & ~(torch.zeros(()).bool() if trial.changed is None else trial.changed)
            difference = (changed - unchanged).abs().amax(-1).nan_to_num(nan=torch.inf) * looked_at
            rounding = max(rounding, float(difference[difference <= bound].max()) if len(difference) else 0.0)
            for number in self.owner[difference > bound].unique().tolist():
                is_seen = (self.owner == number) & (difference > bound)
                seen = int(self.token[is_seen].min()), float(difference[is_seen].max())
                changes[trial.name, number] = seen
        return changes, rounding, rounding > fine


class _Run:
    """A model chunk in the trials: hooks that change its inputs, and keep a number of each token and layer."""

    def __init__(self, pack: _Pack, trials: list[_Trial], chunk: Any) -> None:
        self._pack, self._trials, self._chunk, self._turn = pack, trials, chunk, -1
        self._sketches: dict[int, list[Tensor]] = {}
        self._fault = ""
        self._signature = inspect.signature(chunk.forward)
        self._layers = list(getattr(getattr(chunk, "decoder", None), "layers", ()))

    @contextmanager
    def hooked(self) -> Iterator[None]:
        handles = [self._chunk.register_forward_pre_hook(self._change, with_kwargs=True)]
        for number, layer in enumerate(self._layers):
            handles.append(layer.register_forward_hook(lambda _, __, out, n=number: self._keep(n, out)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def raise_fault(self) -> None:
        if self._fault:
            raise ValueError(self._fault)

    def _change(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._turn += 1
        trial, pack = self._trials[self._turn], self._pack
        bound = self._signature.bind(*args, **kwargs)
        inputs = bound.arguments

        def edit(name: str, change: Callable[[Tensor], Tensor]) -> None:
            if isinstance(values := inputs.get(name), Tensor):
                if values.numel() != len(pack.owner):  # other ranks wait in the schedule: told behind it
                    self._fault = self._fault or (
                        f"{name} of {values.numel()} tokens, and a layout that gives this rank {len(pack.owner)}: the "
                        "samples must describe the batch. Pass those of this micro-batch."
                    )
                    return
                inputs[name] = change(values.reshape(-1)).view_as(values)

        if trial.changed is not None:
            changed = trial.changed
            edit("input_ids", lambda ids: torch.where(to_device(changed, ids.device), ids.max() - ids, ids))
        if trial.anew or trial.alone is not None:
            edit("position_ids", lambda at: to_device(pack.anew, at.device, at.dtype))
        if trial.alone is not None:
            order = pack.order(trial.alone)
            for name in ("input_ids", "position_ids", "labels"):
                edit(name, lambda values: values[to_device(order, values.device)])
            if isinstance(packed := inputs.get("packed_seq_params"), PackedSeqParams):
                slot = pack.slot_of_sample[trial.alone]
                size, total = int(pack.bounds[slot + 1] - pack.bounds[slot]), int(pack.bounds[-1])
                bounds = torch.tensor(sorted({0, size, total}), dtype=torch.int32)
                further = {"cp_group": batch_group} if (batch_group := getattr(packed, "cp_group", None)) else {}
                inputs["packed_seq_params"] = packed_seq_params(bounds, self._chunk, **further)
        return bound.args, bound.kwargs

    def _keep(self, layer: int, output: Any) -> None:
        """A random sum of each token's outputs, which another output has only by chance."""
        hidden = output[0] if isinstance(output, tuple) else output
        generator = torch.Generator().manual_seed(layer)
        weights = to_device(torch.randn(hidden.shape[-1], generator=generator), hidden.device)
        self._sketches.setdefault(layer, []).append((hidden.detach().float() @ weights).t().cpu())

    def first_layers(self, eps: float) -> dict[tuple[str, int], tuple[int, str, bool]]:
        """By change and sample the first layer whose output changes: number, name, and whether it has a state."""
        first = dict[tuple[str, int], tuple[int, str, bool]]()
        with_state = set(layers_with_state(self._chunk).values())
        pack = self._pack
        for number, layer in enumerate(self._layers):
            sketches = self._sketches[number]
            unchanged = sketches[0]
            owner = pack.owner.view(unchanged.shape[0], -1)
            changed = [None if t.changed is None else t.changed.view_as(owner) for t in self._trials]
            part = slice(None)
            if owner.shape[1] != unchanged.shape[1]:  # sequence parallelism
                part = slice(pack.tp_rank * unchanged.shape[1], (pack.tp_rank + 1) * unchanged.shape[1])
            own = owner[:, part]
            bound = _ROUNDINGS * eps * max(1.0, float(unchanged.abs().max()))
            for trial, mask, sketch in zip(self._trials[1:], changed[1:], sketches[1:], strict=True):
                if mask is None:
                    continue
                differs = ((sketch - unchanged).abs() > bound) & (own >= 0) & ~mask[:, part]
                for sample in own[differs].unique().tolist():
                    has_state = not with_state.isdisjoint(layer.modules())
                    name = f"layer {layer.layer_number} ({type(layer).__name__})"
                    first.setdefault((trial.name, sample), (layer.layer_number, name, has_state))
        return first
