"""A tiny GPT with experts and multi-token prediction, and steps of packed micro-batches through Megatron's schedule."""

import functools
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import oracle
import torch
import torch.distributed as dist
from gpt_oracle import VOCAB
from table_step import run_schedule, start
from tiny_gpt import Layout, tiny_config, tiny_model

SEQ_LENGTH = 32
MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.5,
    "moe_z_loss_coeff": 0.1,
}
MTP = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.5}
MODELS: dict[str, dict[str, Any]] = {"moe": MOE, "mtp": MTP, "moe and mtp": MOE | MTP}


def build(model: str, per_token: bool, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1) -> Any:
    """A tiny GPT of two layers in Megatron's DDP."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe import token_dispatcher
    from packed_attention import layer_spec

    if ep > 1:
        # The sizes of the exchange between experts' ranks become lists where they are copied from a GPU
        # (moe_utils.py:1184), else they stay tensors, which all_to_all_single refuses. On a CPU: convert them here.
        token_dispatcher.maybe_move_tensor_to_cpu = lambda sizes, as_numpy=False, **_: (
            sizes.numpy() if as_numpy and isinstance(sizes, torch.Tensor) else sizes
        )
    if not dist.is_initialized():
        start(tp, pp, cp, expert_model_parallel_size=ep)
    settings = MODELS[model] | {"expert_model_parallel_size": ep, "init_method_std": 0.3}  # routers with a preference
    config = tiny_config(Layout(tp, tp > 1, pp, 1, cp, 1), per_token=per_token, **settings)
    block = layer_spec(SimpleNamespace(transformer=config))
    if "num_moe_experts" in settings:
        experts = get_gpt_layer_local_spec(num_experts=config.num_moe_experts).submodules.mlp
        for layer in block.layer_specs:
            layer.submodules.mlp = experts
    mtp = None
    if "mtp_num_layers" in settings:
        mtp = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False)
        for layer in mtp.layer_specs if mtp is not None else []:  # the stock local norm refuses sequence parallelism
            layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = block.layer_norm
    torch.manual_seed(3)
    model_parallel_cuda_manual_seed(3, force_reset_rng=True)
    gpt = tiny_model(config, block, mtp_block_spec=mtp, share_embeddings_and_output_weights=False)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)


class Packed:
    """A micro-batch: a pack of rollouts, this CP rank's part of it cut by the oracle, and losses' weights for it."""

    def __init__(self, rng: random.Random, cp_rank: int, cp_size: int, with_policy: bool) -> None:
        from rollouts import Rollout, make_pack

        rollouts = []
        for i in range(rng.randint(2, 3)):
            lengths = rng.randint(1, 4), rng.randint(1, 5)
            prompt, response = ([rng.randrange(VOCAB) for _ in range(length)] for length in lengths)
            mask = [float(rng.random() < 0.7) for _ in response]
            rollouts.append(Rollout(prompt, response, mask, 0.0, 0, i))
        self.pack = make_pack(rollouts, seq_length=SEQ_LENGTH, slot_multiple=2 * cp_size)
        self.samples = self.pack.samples
        bounds = self.pack.packed_seq_params.cu_seqlens_q.tolist()
        slots: list[list[oracle.Token]] = [[(0, p) for p in range(a, b)] for a, b in zip(bounds, bounds[1:])]  # noqa: B905, RUF007
        held = [token[1] for token in oracle.zigzag(slots, cp_rank, cp_size) if token is not None]
        mask = torch.zeros(SEQ_LENGTH)
        for begin, one in zip(bounds, self.samples.loss_masks, strict=False):  # bounds has an end and filler too
            mask[begin : begin + one.numel()] = one
        self.mask = mask[held][None]
        self.tokens, self.labels, self.position_ids = (
            values[held][None] for values in (self.pack.tokens, self.pack.labels, self.pack.position_ids)
        )
        advantages = torch.tensor([rng.uniform(-4, 4) * with_policy for _ in range(SEQ_LENGTH)])
        self.advantages = advantages[held][None]


def step_data(num_microbatches: int, with_policy: bool) -> list[Packed]:
    from megatron.core import parallel_state as mpu

    rng = random.Random(mpu.get_data_parallel_rank())  # the same on all ranks that share data
    cp_rank, cp_size = mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()
    return [Packed(rng, cp_rank, cp_size, with_policy) for _ in range(num_microbatches)]


def run_step(model: Any, batches: list[Packed], loss_of: Any, wrap: Any = None) -> Any:
    """One step through Megatron's schedule: the final gradient of every parameter, by name."""

    def forward_step(iterator: Iterator[Any], model: Any) -> Any:
        given = next(iterator)
        batch = given if isinstance(given, Packed) else given.data
        output = model(
            batch.tokens,
            batch.position_ids,
            attention_mask=None,
            labels=batch.labels,
            loss_mask=batch.mask,
            packed_seq_params=batch.pack.packed_seq_params,
        )
        return output, functools.partial(loss_of, given)

    run_schedule(forward_step, iter(batches), model, len(batches), wrap)
    return {name: parameter.main_grad.clone() for name, parameter in model.module.named_parameters()}
