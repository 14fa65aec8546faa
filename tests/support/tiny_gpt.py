"""A tiny real Megatron GPTModel in a given layout: its config, its data, its optimizer, a step of its schedule.

Imported by forked ranks after `warm_megatron`; everything of Megatron is the real one (see `megatron_on_cpu`).
"""

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import gpt_oracle
import oracle
import torch
import torch.distributed as dist
from gpt_oracle import GptShape, Rollout
from table_step import run_schedule, start
from tiny_hybrid import name_in_gpt, tiny_hybrid
from torch import Tensor

from megatron_rl_loss import Samples, ZigzagTHD
from megatron_rl_loss.megatron.flags import AggregationSettings


class Layout(NamedTuple):
    """A way to split a step over ranks; all cases of one run in the same processes."""

    tp: int
    sp: bool  # sequence parallelism
    pp: int
    vp: int  # virtual stages a rank, 1 for none
    cp: int
    dp: int

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def num_layers(self) -> int:
        return max(self.pp * self.vp, 2)

    def __str__(self) -> str:
        sp, vp = "sp" if self.sp else "", f"v{self.vp}" if self.vp > 1 else ""
        return f"world{self.world_size}-tp{self.tp}{sp}-pp{self.pp}{vp}-cp{self.cp}-dp{self.dp}"


#: Ways of `OutputHead`; with "main grad" as the flag that asks for a kernel of a GPU would.
HEADS = ("two passes", "one pass", "one pass, main grad")


class Case(NamedTuple):
    """The settings that vary inside a layout."""

    microbatches: int
    mode: str
    units: str
    scaling: str  # of the loss by Megatron: mean, averaged in collective (a DDP option) or per token
    bf16: bool
    optimizer: str  # plain, distributed, overlap or distributed+overlap
    tied: bool
    lopsided: bool
    head: str = ""  # Megatron's, or one of `HEADS`
    loop: str = "adapter"  # around the schedule; or a "plan", evaluated before it is trained on

    def shape(self, layout: Layout) -> GptShape:
        return GptShape(layout.num_layers, self.tied, self.bf16)


def dealt(num_samples: int, masked: Sequence[int], dp: int, microbatches: int, lopsided: bool) -> list[list[list[int]]]:
    """Sample numbers by data-parallel rank and micro-batch; every sample is dealt once, whatever the layout.

    Uneven, so that rollouts and prompt groups straddle ranks and micro-batches. With three slots or more, one holds
    fully masked samples only. `lopsided` leaves the last rank (or the only rank's last micro-batch) without a sample.
    """
    hands: list[list[list[int]]] = [[[] for _ in range(microbatches)] for _ in range(dp)]
    slots = [(d, m) for m in range(microbatches) for d in range(dp)]
    if lopsided and len(slots) > 1:
        slots = [slot for slot in slots if slot[0] != dp - 1] if dp > 1 else slots[:-1]
    rng = random.Random(100 * dp + microbatches)
    left = list(range(num_samples))
    if len(slots) > 2:
        d, m = slots.pop(1)
        hands[d][m] = list(masked[:2])
        left = [i for i in left if i not in masked[:2]]
    for i in left:
        d, m = rng.choice(slots)
        hands[d][m].append(i)
    return hands


class Batch:
    """A packed micro-batch, and the part of it that a context-parallel rank holds (by the oracle's zigzag)."""

    def __init__(
        self, rollouts: Sequence[Rollout], cp_rank: int, cp_size: int, filler: bool, cp_group: Any = None
    ) -> None:
        multiple = 2 * cp_size
        lengths = [len(rollout.tokens) for rollout in rollouts]
        sizes = [-(-length // multiple) * multiple for length in lengths]
        # A pack without samples still needs tokens; in other packs filler must not count either.
        fillers = [multiple] if filler or not rollouts else []
        slots = oracle.padded_slots([*lengths, *[0] * len(fillers)], sizes + fillers)
        bounds = [sum((sizes + fillers)[:k]) for k in range(len(slots) + 1)]
        held = oracle.zigzag(slots, cp_rank, cp_size)

        def local(name: str, padding: float = 0) -> Tensor:
            values = [padding if at is None else getattr(rollouts[at[0]], name)[at[1]] for at in held]
            return torch.tensor([values])

        self.tokens, self.labels = local("tokens").long(), local("labels").long()
        self.mask, self.old_log_probs, self.advantages = (
            local(name).float() for name in ("mask", "old_log_probs", "advantages")
        )
        self.positions = torch.tensor([[0 if at is None else at[1] for at in held]])
        self.bounds = torch.tensor(bounds, dtype=torch.int32)
        self._rollouts, self.cp_group = rollouts, cp_group
        self._layout = ZigzagTHD(bounds, total_lengths=lengths, filler_slots=len(fillers))
        self.samples = self.described()

    def described(self, correct: Callable[[Sequence[Rollout]], list[Tensor]] | None = None) -> Samples:
        """Whole samples, as a data loader describes them, not this rank's part; `correct`: a term's masks."""
        return Samples(
            [torch.tensor(rollout.mask) for rollout in self._rollouts],
            layout=self._layout,
            rollout_ids=[rollout.rollout_id for rollout in self._rollouts],
            prompt_ids=[rollout.prompt_id for rollout in self._rollouts],
            cp_group=self.cp_group,
            term_masks=None if correct is None else {"correct": correct(self._rollouts)},
        )

    def cuda(self) -> "Batch":
        """On the GPU, but for the samples: masks and ids stay where a data loader makes them."""
        for name in ("tokens", "labels", "mask", "old_log_probs", "advantages", "positions", "bounds"):
            setattr(self, name, getattr(self, name).cuda())
        return self

    def packed_seq_params(self, model: Any = None) -> Any:
        from megatron_rl_loss import packed_seq_params

        return packed_seq_params(self.bounds, model, **({} if self.cp_group is None else {"cp_group": self.cp_group}))


def columns_of(
    batch: Batch, rollouts: Sequence[Rollout], further: Mapping[str, Callable[[Rollout], Tensor]]
) -> dict[str, Any]:
    """The columns of a whole pack, as a data loader lays them out: what a policy loss needs, and further ones."""

    def column(of_rollouts: list[Tensor]) -> Tensor:
        values_of_pack = of_rollouts[0].new_zeros(int(batch.bounds[-1]), *of_rollouts[0].shape[1:])
        for values, (begin, _) in zip(of_rollouts, pairwise(batch.bounds.tolist()), strict=False):  # filler is behind
            values_of_pack[begin : begin + len(values)] = values
        return values_of_pack

    of_policy: dict[str, Callable[[Rollout], Tensor]] = {
        "tokens": lambda rollout: torch.tensor(rollout.tokens),
        "positions": lambda rollout: torch.arange(len(rollout.tokens)),
        "labels": lambda rollout: torch.tensor(rollout.labels),
        "old_log_probs": lambda rollout: torch.tensor(rollout.old_log_probs),
        "advantages": lambda rollout: torch.tensor(rollout.advantages),
    }
    return {name: column([of(rollout) for rollout in rollouts]) for name, of in (of_policy | {**further}).items()}


def fully_masked(rollouts: Sequence[Rollout]) -> list[int]:
    return [i for i, rollout in enumerate(rollouts) if not any(rollout.mask)]


def batches_of(rollouts: Sequence[Rollout], case: Case, dp: int, dp_rank: int, cp: int, cp_rank: int) -> list[Batch]:
    hands = dealt(len(rollouts), fully_masked(rollouts), dp, case.microbatches, case.lopsided)
    return [Batch([rollouts[i] for i in hand], cp_rank, cp, filler=m % 3 == 1) for m, hand in enumerate(hands[dp_rank])]


@dataclass
class Ready:
    """A model in Megatron's DDP with its optimizer."""

    config: Any
    chunks: list[Any]
    optimizer: Any


def tiny_config(layout: Layout, *, per_token: bool, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A configuration with the oracle's sizes, and without features that need a GPU."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer import TransformerConfig

    virtual = layout.vp > 1
    settings: dict[str, Any] = {
        "num_layers": layout.num_layers,
        "hidden_size": gpt_oracle.HIDDEN,
        "ffn_hidden_size": gpt_oracle.FFN,
        "num_attention_heads": gpt_oracle.HEADS,
        "num_query_groups": gpt_oracle.GROUPS,
        "kv_channels": gpt_oracle.CHANNELS,
        "layernorm_epsilon": gpt_oracle.EPSILON,
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.sp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vp if virtual else None,
        "context_parallel_size": layout.cp,
        "calculate_per_token_loss": per_token,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        # Packs differ in length; Megatron asks for this dispatcher with it, even without experts.
        "variable_seq_lengths": layout.pp > 1,
        "moe_token_dispatcher_type": "alltoall",
        "overlap_p2p_comm": virtual,
        "batch_p2p_comm": not virtual,
    }
    config = TransformerConfig(**settings | changes)
    config.finalize_model_grads_func = finalize_model_grads
    return config


def tiny_model(config: Any, block: Any, vp_stage: int | None = None, **options: Any) -> Any:
    """This rank's part of the model."""
    from megatron.core import parallel_state as mpu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection

    stage: dict[str, Any] = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    return GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=gpt_oracle.VOCAB,
        max_sequence_length=64,
        pre_process=mpu.is_pipeline_first_stage(**stage),
        post_process=mpu.is_pipeline_last_stage(**stage),
        position_embedding_type="rope",
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        vp_stage=vp_stage,
        **options,
    )


def config_of(layout: Layout, case: Case, attention: str = "packed") -> Any:
    dtype = torch.bfloat16 if case.bf16 else torch.float32
    layers = {"num_layers": 2 * layout.num_layers} if attention == "hybrid" else {}
    return tiny_config(layout, per_token=case.scaling == "per token", dtype=dtype, **layers)


def gpt_chunk(layout: Layout, case: Case, config: Any, stage: int = 0, attention: str = "packed") -> Any:
    """This rank's part of a virtual stage, with the oracle's weights.

    `attention`: "packed" is `examples/packed_attention.py`, "te" is Transformer Engine's in its stead (GPUs, bf16),
    "hybrid" is the first in a HybridModel, whose layers are halves of a GPT's.
    """
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from packed_attention import layer_spec

    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    weights = gpt_oracle.weights_of(case.shape(layout))
    vp_stage = stage if layout.vp > 1 else None
    if attention == "hybrid":
        stages = layout.pp * layout.vp
        pattern = "|".join(["*-" * (layout.num_layers // stages)] * stages)
        model = tiny_hybrid(config, pattern, vp_stage, share_embeddings_and_output_weights=case.tied)
        return in_precision(config, case, with_weights(model, weights, layout))
    block = layer_spec(SimpleNamespace(transformer=config), vp_stage)
    if attention == "te":
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        for layer in block.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = TEDotProductAttention
    model = tiny_model(config, block, vp_stage, share_embeddings_and_output_weights=case.tied)
    return in_precision(config, case, with_weights(model, weights, layout))


def with_weights(model: Any, weights: Mapping[str, Tensor], layout: Layout) -> Any:
    """The model with this rank's parts of whole weights, by their names in a GPT."""
    from megatron.core import parallel_state as mpu

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full, dim = weights[full_name(name, model)], cut_dim(parameter)
            rank = mpu.get_tensor_model_parallel_rank()
            parameter.copy_(full if dim is None else full.chunk(layout.tp, dim)[rank])
    return model.cuda()


def in_precision(config: Any, case: Case, model: Any) -> Any:
    from megatron.core.transformer.module import Float16Module

    return Float16Module(config, model) if case.bf16 else model


def build(layout: Layout, case: Case, attention: str) -> Ready:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    virtual = layout.vp > 1
    config = config_of(layout, case, attention)
    overlap, distributed = "overlap" in case.optimizer, "distributed" in case.optimizer
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        use_distributed_optimizer=distributed,
        average_in_collective=case.scaling == "averaged in collective",
        bucket_size=1000,  # several buckets, so that overlapping has something to reorder
    )
    chunks = [
        DistributedDataParallel(config, ddp_config, gpt_chunk(layout, case, config, stage, attention))
        for stage in range(layout.vp)
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=gpt_oracle.LEARNING_RATE,
            adam_beta1=gpt_oracle.BETA1,
            adam_beta2=gpt_oracle.BETA2,
            adam_eps=gpt_oracle.ADAM_EPSILON,
            weight_decay=0.0,
            clip_grad=gpt_oracle.CLIP_GRAD,
            bf16=case.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=distributed,
        ),
        chunks,
    )
    # As `megatron.training.training.train` sets them.
    config.grad_scale_func = optimizer.scale_loss
    if overlap:
        config.no_sync_func = [chunk.no_sync for chunk in chunks] if virtual else chunks[0].no_sync
        config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks] if virtual else chunks[0].start_grad_sync
    return Ready(config, chunks, optimizer)


def cut_dim(parameter: Tensor) -> int | None:
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None  # type: ignore[attr-defined]


def full_name(name: str, model: Any) -> str:
    """A parameter's name, with the layer's number in the whole model; a tied output layer is the embedding."""
    name = name.removeprefix("module.")
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
    name = ".".join(parts)
    if hasattr(model, "hybrid_layer_pattern"):
        name = name_in_gpt(name)
    if model.share_embeddings_and_output_weights and name == "output_layer.weight":
        return "embedding.word_embeddings.weight"
    return name


def gather_sharded_gradients(chunks: list[Any]) -> None:
    """The distributed optimizer reduces each bucket's gradients to the rank that owns the shard: make them whole."""
    for chunk in chunks:
        for group in chunk.bucket_groups:
            ranks = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                mine = bucket.grad_data.chunk(ranks.size())[ranks.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, mine, group=ranks)


# ---- a step


class Outcome(NamedTuple):
    """One rank's shards by full name, with the dimension in which each is cut (None: whole)."""

    gradients: dict[str, tuple[Any, int | None]]
    weights: dict[str, tuple[Any, int | None]]
    grad_norm: float
    metrics: dict[str, float] | None  # on the last pipeline stage


def collect(chunks: list[Any], of_gradients: bool) -> dict[str, tuple[Any, int | None]]:
    from megatron.core.utils import unwrap_model

    values = {}
    for chunk in chunks:
        model = unwrap_model(chunk)
        for name, parameter in model.named_parameters():
            value = parameter.main_grad if of_gradients else parameter.detach()
            key = full_name(name, model)
            # Both copies of a tied embedding must agree with the oracle: neither may hide the other.
            while key in values:
                key += "'"
            values[key] = (value.double().cpu().numpy().copy(), cut_dim(parameter))
    return values


def start_layout(layout: Layout) -> Any:
    """Megatron's groups on this rank: its parallel state."""
    virtual = {"virtual_pipeline_model_parallel_size": layout.vp} if layout.vp > 1 else {}
    return start(layout.tp, layout.pp, layout.cp, **virtual)


def place_in(mpu: Any) -> dict[str, int]:
    return {
        "tp": mpu.get_tensor_model_parallel_rank(),
        "pp": mpu.get_pipeline_model_parallel_rank(),
        "cp": mpu.get_context_parallel_rank(),
        "dp": mpu.get_data_parallel_rank(),
    }


def prepared(layout: Layout, case: Case, rollouts: Sequence[Rollout], attention: str) -> tuple[Ready, list[Batch]]:
    """A fresh model, and this rank's micro-batches."""
    from megatron.core import parallel_state as mpu

    dp_rank, cp_rank = mpu.get_data_parallel_rank(), mpu.get_context_parallel_rank()
    batches = batches_of(rollouts, case, layout.dp, dp_rank, layout.cp, cp_rank)
    return build(layout, case, attention), [batch.cuda() for batch in batches]


def mode_of(case: Case) -> dict[str, Any]:
    divisor = oracle.divisor_of(case.mode, gpt_oracle.DIVISOR)
    return {"mode": case.mode, "divisor": divisor, "units": case.units}


def settings_of(case: Case, **options: Any) -> AggregationSettings:
    return AggregationSettings.resolve(with_per_token_loss=case.scaling == "per token", **mode_of(case), **options)


def output_of(model: Any, batch: Batch, head: Any = None, context: Any = None) -> Any:
    """The model's output, or that of an `OutputHead` in its output layer's place."""
    call = model if head is None else functools.partial(head, model, context=context)
    params = batch.packed_seq_params(model)
    return call(batch.tokens, batch.positions, None, labels=batch.labels, packed_seq_params=params)


def run_batches(
    layout: Layout,
    ready: Ready,
    forward_step: Any,
    batches: list[Any],
    wrap: Any = None,
    watch: Any = None,
    **options: Any,
) -> Any:
    """Megatron's schedule over the step, with virtual stages where the layout has them: what it stored."""
    ready.optimizer.zero_grad()
    data: Any = [iter(batches) for _ in range(layout.vp)] if layout.vp > 1 else iter(batches)
    model = ready.chunks if layout.vp > 1 else ready.chunks[0]
    return run_schedule(forward_step, data if watch is None else watch(data), model, len(batches), wrap, **options)
