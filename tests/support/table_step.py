"""A step of the real Megatron-Core on a model that is a table: one parameter for every token of the step, its loss.

So the gradient after Megatron's whole way (schedule scaling, DDP, reduction, per-token division) is the token's weight,
to be compared with the float64 oracle.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import oracle
import torch
from logged_means import logged_means
from ranks import start_process_group

import megatron_rl_loss
from megatron_rl_loss import LossAggregation, Samples, ZigzagTHD
from megatron_rl_loss.megatron.flags import AggregationSettings


class Batch:
    """A packed micro-batch: token numbers into the table (the last, unused entry is padding) and the samples.

    `of_samples`: further keyword arguments of `Samples` (term_masks, labels), by name, with a value for each sample.
    """

    def __init__(
        self,
        samples: list[oracle.Sample],
        chosen: list[int],
        cp_size: int,
        gathered: bool = False,
        cp_group: Any = None,
        **of_samples: Any,
    ) -> None:
        first = [0]
        for sample in samples:
            first.append(first[-1] + len(sample.mask))
        lengths = [len(samples[i].mask) for i in chosen]
        sizes = [-(-length // (2 * cp_size)) * 2 * cp_size for length in lengths]
        slots = oracle.padded_slots(lengths, sizes)
        self.numbers = [[first[-1] if at is None else first[chosen[at[0]]] + at[1] for at in slot] for slot in slots]
        cu_seqlens = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
        self.gathered = gathered
        further: Any = {
            name: {key: [values[i] for i in chosen] for key, values in by_key.items()}
            for name, by_key in of_samples.items()
        }
        self.samples = Samples(
            [samples[i].mask for i in chosen],
            # Looked up late: a launch with zigzag does not load other layouts.
            layout=(megatron_rl_loss.Gathered if gathered else ZigzagTHD)(cu_seqlens, total_lengths=lengths),
            rollout_ids=[str(samples[i].rollout_id) for i in chosen],
            prompt_ids=[str(samples[i].prompt_id) for i in chosen],
            cp_group=cp_group,
            **further,
        )

    def local_numbers(self, cp_rank: int, cp_size: int) -> torch.Tensor:
        """Numbers of a rank's tokens, by the oracle's zigzag, not by the package's."""
        if self.gathered:
            return torch.tensor([n for slot in self.numbers for n in slot], dtype=torch.int64)
        held = oracle.zigzag(self.numbers, cp_rank, cp_size)  # type: ignore[arg-type]
        return torch.tensor(held, dtype=torch.int64)


def start(tp: int = 1, pp: int = 1, cp: int = 1, **more: Any) -> Any:
    """On a rank: torch's default group and Megatron's groups, of which it gives the state."""
    from megatron.core import parallel_state

    start_process_group()
    parallel_state.initialize_model_parallel(tp, pp, context_parallel_size=cp, **more)
    return parallel_state


def table_chunk(table: list[float], config: Any, forward: Any = lambda losses, numbers: losses[numbers]) -> Any:
    """The losses of all tokens as a parameter; of a later pipeline stage, its own beside what it receives."""
    from megatron.core.enums import ModelType
    from megatron.core.transformer.module import MegatronModule

    class Table(MegatronModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(config)
            self.model_type = ModelType.encoder_or_decoder
            self.pre_process = self.share_embeddings_and_output_weights = False
            self.received: Any = [None]  # from an earlier pipeline stage, to which this one adds its own
            self.losses = torch.nn.Parameter(torch.tensor(table))
            self.forward_of = forward

        def set_input_tensor(self, received: Any) -> None:
            self.received = received if isinstance(received, list) else [received]

        def forward(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> Any:
            own = self.forward_of(self.losses, input_ids)
            return own if self.received[0] is None else own + self.received[0]

    return Table().cuda()


def table_model(
    table: list[float],
    *,
    per_token: bool = False,
    ddp: bool = True,
    forward: Any = lambda losses, numbers: losses[numbers],
    stages: int = 1,
    frozen: bool = False,
    **ddp_options: Any,
) -> Any:
    """The losses of all tokens (or what `forward` makes of the table) as a parameter, in Megatron's own DDP.

    `stages` of a pipeline have equal parts of the table each, which they add up. With `frozen`, as under LoRA, a half
    of the table is a parameter that is not trained.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=1,
        calculate_per_token_loss=per_token,
        use_cpu_initialization=True,
    )
    config.finalize_model_grads_func = finalize_model_grads
    if stages > 1:
        config.pipeline_model_parallel_size, config.pipeline_dtype = stages, torch.float32
        config.variable_seq_lengths = True
    part = [entry / stages / (2 if frozen else 1) for entry in table]
    table_in_megatron = table_chunk(part, config, forward)
    if frozen:
        base = torch.nn.Parameter(torch.tensor(part), requires_grad=False)
        table_in_megatron.base = base
        table_in_megatron.forward_of = lambda losses, numbers: forward(losses + base, numbers)
    if not ddp:
        return table_in_megatron
    model = DistributedDataParallel(config, DistributedDataParallelConfig(**ddp_options), table_in_megatron)
    if ddp_options.get("overlap_grad_reduce"):
        config.no_sync_func = model.no_sync
    return model


def aggregation(
    samples_of: Any = None,
    *,
    terms: Any = None,
    term_masks: Any = (),
    prepared: AggregationSettings | None = None,
    **settings: Any,
) -> Any:
    describe = samples_of or (lambda batch: batch.samples)
    asked = prepared or AggregationSettings.resolve(**settings)
    return LossAggregation(asked, describe, terms=terms, term_masks=term_masks)


def run_schedule(
    forward_step: Any,
    data: Any,
    model: Any,
    num_microbatches: int,
    wrap: Any = None,
    *,
    fresh: bool = True,
    **options: Any,
) -> Any:
    """Megatron's schedule over a step, with fresh gradients, or over a call of one: what it stored."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for chunk in (model if isinstance(model, list) else [model]) if fresh else []:
        chunk.zero_grad_buffer()
    schedule = get_forward_backward_func()
    return (schedule if wrap is None else wrap(schedule))(
        forward_step_func=forward_step,
        data_iterator=data,
        model=model,
        num_microbatches=num_microbatches,
        seq_length=64,
        micro_batch_size=1,
        **options,
    )


def begun(step: Any, data: Any, model: Any, num_microbatches: int) -> Any:
    """The iterators that a schedule is given for an evaluation step, which this one does not run."""
    iterators: list[Any] = []

    def keep(**options: Any) -> list[Any]:
        iterators.append(options["data_iterator"])
        return []

    schedule = step.wrap_schedule(keep)
    options = {"data_iterator": data, "model": model, "num_microbatches": num_microbatches, "forward_only": True}
    options["collect_non_loss_data"] = True  # no losses are collected
    schedule(forward_step_func=print, **options)
    return iterators[0]


def run_step(
    model: Any, batches: Sequence[Any], loss: Callable[[Any, torch.Tensor], Any], wrap: Any = None, **options: Any
) -> Any:
    """Megatron's schedule over a step of the table, of which this rank has its part: what it stored.

    Each of `batches` is a `Batch` where `wrap` is a `LossAggregation`'s, else a pair of one and a plan's micro-batch.
    The loss function returns ``loss(microbatch, losses)``. `options` as of `run_schedule`.
    """
    from megatron.core import parallel_state

    cp_rank, cp_size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()

    def forward_step(iterator: Iterator[Any], chunk: Any) -> Any:
        drawn = next(iterator)
        batch, microbatch = drawn if isinstance(drawn, tuple) else (drawn.data, drawn)
        return chunk(batch.local_numbers(cp_rank, cp_size).cuda()), functools.partial(loss, microbatch)

    count = options.pop("num_microbatches", len(batches))
    return run_schedule(forward_step, iter(batches), model, count, wrap, **options)


def one_step(
    model: Any, batches: list[Batch], loss_aggregation: Any, *, metric: bool = True
) -> tuple[torch.Tensor, dict[str, float]]:
    """A step's reduced gradient, and what `train_step` would log."""

    def loss(microbatch: Any, losses: torch.Tensor) -> Any:
        return microbatch.loss(losses[None], {"twice": 2 * losses[None]} if metric else None)

    logged = logged_means(run_step(model, batches, loss, loss_aggregation.wrap_schedule))
    return model.module.losses.main_grad.clone().cpu(), logged


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
