"""A tiny GPT with experts and multi-token prediction, and steps of packed micro-batches through Megatron's schedule."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from gpt_oracle import rollouts_without_old_policy
from table_step import run_schedule, start
from tiny_gpt import Batch, Case, Layout, batches_of, tiny_config, tiny_model
from tiny_hybrid import tiny_hybrid

MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.5,
    "moe_z_loss_coeff": 0.1,
}
MTP = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.5}
SHARED = MOE | {"moe_shared_expert_intermediate_size": 16}
MODELS: dict[str, dict[str, Any]] = {"moe": MOE, "shared": SHARED, "mtp": MTP, "moe and mtp": MOE | MTP}


def build(
    model: str, per_token: bool, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, *, is_hybrid: Any = False
) -> Any:
    """A tiny GPT of two layers in Megatron's DDP; or the HybridModel of four layers that is one, without stages."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import multi_token_prediction
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from packed_attention import layer_spec

    # Without Transformer Engine 0.15 and 0.16 read the first name and do not define it, and the second, by which main
    # asks whether a layer is one of inference, fails: none is.
    vars(moe_utils).setdefault("te_general_gemm", None)
    multi_token_prediction.is_inference_column_parallel_linear = lambda module: False
    if ep > 1:
        # The sizes of the exchange between experts' ranks become lists where they are copied from a GPU
        # (moe_utils.py:1184), else they stay tensors, which all_to_all_single refuses. On a CPU: convert them here.
        token_dispatcher.maybe_move_tensor_to_cpu = lambda sizes, as_numpy=False, **_: (
            sizes.numpy() if as_numpy and isinstance(sizes, torch.Tensor) else sizes
        )
    if not dist.is_initialized():
        start(tp, pp, cp, expert_model_parallel_size=ep)
    settings = MODELS[model] | {"expert_model_parallel_size": ep, "init_method_std": 0.3}  # routers with a preference
    if is_hybrid:
        settings["num_layers"] = 4
    config = tiny_config(Layout(tp, tp > 1, pp, 1, cp, 1), per_token=per_token, **settings)
    if is_hybrid:
        torch.manual_seed(3)
        model_parallel_cuda_manual_seed(3, force_reset_rng=True)
        block = "*E" if config.num_moe_experts else "*-"
        depths = [block] * (config.mtp_num_layers or 0)
        hybrid = tiny_hybrid(config, "/".join([2 * block, *depths]))
        return DistributedDataParallel(config, DistributedDataParallelConfig(), hybrid)
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


def step_data(num_microbatches: int, with_policy: bool) -> list[Batch]:
    """This rank's micro-batches: a few ragged samples of `gpt_oracle`, masks of 0 and 1, and advantages, or none."""
    from megatron.core import parallel_state as mpu

    rollouts = [
        replace(
            rollout,
            mask=[float(weight > 0) for weight in rollout.mask],
            advantages=[with_policy * 4 * advantage for advantage in rollout.advantages],
            old_log_probs=[0.0] * len(rollout.mask),
        )
        for rollout in rollouts_without_old_policy()[:8]
    ]
    case = Case(num_microbatches, "sample_mean", "all", "mean", False, "plain", False, False)
    dp, dp_rank = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
    cp, cp_rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    return batches_of(rollouts, case, dp, dp_rank, cp, cp_rank)


def run_step(model: Any, batches: list[Batch], loss_of: Any, wrap: Any = None) -> Any:
    """One step through Megatron's schedule: the gradient of every parameter, by name."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()  # the dev branch refuses to log per-token loss after loss of another kind

    def forward_step(iterator: Iterator[Any], model: Any) -> Any:
        drawn = next(iterator)
        batch = drawn if isinstance(drawn, Batch) else drawn.data
        output = model(
            batch.tokens,
            batch.positions,
            attention_mask=None,
            labels=batch.labels,
            loss_mask=batch.mask,
            packed_seq_params=batch.packed_seq_params(model),
        )
        return output, functools.partial(loss_of, drawn)

    run_schedule(forward_step, iter(batches), model, len(batches), wrap)
    return {name: parameter.main_grad.clone() for name, parameter in model.module.named_parameters()}
