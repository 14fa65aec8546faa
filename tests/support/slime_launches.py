"""Launches of slime and miles: their flags, with a hook of ours or without, and steps of `logit_table`.

The second half is for launches from their own start, in workers of Ray.
"""

import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import oracle
import torch
from checkouts import Settings
from logit_table import (
    CLIP_HIGH,
    CLIP_LOW,
    KeepsGradients,
    Step,
    expected,
    logit_model,
    make_step,
    rollout_data,
)  # fmt: skip

#: Log-probs are float32 sums over the vocabulary.
TOLERANCE = 2e-6
OURS = "megatron_rl_loss.engines"
MakeStep = Callable[[], Step]

VALUES = {
    "data_pad_size_multiplier": 8,
    "seq_length": 8,
    "micro_batch_size": 1,
    "loss_type": "policy_loss",
    "advantage_estimator": "grpo",
    "eps_clip": CLIP_LOW,
    "eps_clip_high": CLIP_HIGH,
    "entropy_coef": 0.0,
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "log_probs_chunk_size": -1,
    "qkv_format": "thd",
    "check_for_nan_in_loss_and_grad": True,
    "pipeline_model_parallel_size": 1,
    **dict.fromkeys(("calculate_per_token_loss", "use_dynamic_global_batch_size"), False),
}


def arguments(**changed: Any) -> Any:
    return Settings(**VALUES | changed)


def with_steps(launch: dict[str, Any]) -> dict[str, Any]:
    """Tensors are made on the rank: a process is handed few of them."""
    return launch | {"steps": [make() for make in launch["steps"]]}


def compute_in_float32() -> None:
    """Megatron's fused cross entropy rounds to bfloat16 on its way back."""
    from megatron.core.fusions import fused_cross_entropy

    def plain(logits: torch.Tensor, target: torch.Tensor, group: Any) -> torch.Tensor:
        return -logits.log_softmax(-1).gather(-1, target[..., None]).squeeze(-1)

    fused_cross_entropy.fused_vocab_parallel_cross_entropy = plain


def case(
    peer: str, mode: str, hook: str | None, steps: Sequence[MakeStep], *, counted: bool = False, mended: bool = False,
    **flags: Any,
) -> dict[str, Any]:  # fmt: skip
    """A launch with a hook of ours; without, with their own reducer. `mended`: of a peer without phantom tokens."""
    flags["custom_pg_loss_reducer_function_path"] = hook and f"{OURS}.slime.{hook}"
    if counted:
        flags["custom_megatron_init_path"] = f"{OURS}.slime.count_steps"
    padded = 24 if flags.get("qkv_format") == "bshd" else None
    divisor = oracle.divisor_of(mode, 40.0)
    return {"mode": mode, "divisor": divisor, "flags": flags, "steps": steps, "padded": padded, "mended": mended}


# --- from the start

DP, CP = 2, 2
#: What their modules import and a launch without a GPU, a sampler and checkpoints does not use.
NOT_USED: tuple[str, ...] = (
    "torch_memory_saver",
    "sglang",
    "sglang_router",
    "safetensors",
    "huggingface_hub",
    "PIL",
    "pylatexenc",
)
NOT_USED += ("mbridge", "megatron.bridge", "ring_flash_attn", "aiohttp", "numba", "transformers")
#: Options of a launch: `step_of_a_launch` is its step.
STARTED = (
    "--debug-train-only --num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 --global-batch-size 12 --tokenizer-type NullTokenizer "
    f"--vocab-size 100 --hf-checkpoint none --actor-num-nodes 1 --actor-num-gpus-per-node {DP * CP} "
    f"--context-parallel-size {CP} --distributed-backend gloo --rollout-batch-size 12 --n-samples-per-prompt 1 "
    "--num-rollout 2 --use-rollout-logprobs --eps-clip 0.2 --eps-clip-high 0.28 --loss-type policy_loss "
    "--advantage-estimator grpo --kl-coef 0 --entropy-coef 0"
)


HOOKS = ["--custom-pg-loss-reducer-function-path", f"{OURS}.slime.constant_40"]
HOOKS += ["--custom-megatron-init-path", f"{OURS}.slime.count_steps"]


def model_and_optimizer(args: Any, role: str, **_: Any) -> Any:
    model = logit_model(make_step(7, DP).table, per_token=args.calculate_per_token_loss)
    optimizer: Any = KeepsGradients(model)
    optimizer.param_groups, optimizer.scale_loss = [], None
    return [model], optimizer, SimpleNamespace(step=lambda increment: None), -1


def step_of_a_launch() -> Step:
    """The step, with advantages as GRPO has them: one for each sample."""
    step = make_step(7, DP)
    samples = [
        dataclasses.replace(sample, advantages=torch.full_like(sample.advantages, 0.5 + 0.1 * i))
        for i, sample in enumerate(step.samples)
    ]
    return dataclasses.replace(step, samples=samples)


def data_of(step: Step, dp_rank: int) -> dict[str, Any]:
    """What the rollout manager puts into Ray's store for one data-parallel rank."""
    whole = rollout_data([step], dp_rank, lambda values, total, response: values)
    chosen = [i for of_batch in step.dealt[dp_rank] for i in of_batch]
    kept: tuple[str, ...] = ("tokens", "response_lengths", "loss_masks", "rollout_log_probs", "rollout_mask_sums")
    kept += ("micro_batch_indices", "num_microbatches", "global_batch_sizes")
    return {name: whole[name] for name in kept} | {
        "partition": chosen,
        "total_lengths": [sample.total for sample in step.samples],
        "rewards": [0.5 + 0.1 * i for i in chosen],
        "rollout_mask_sums": torch.stack(whole["rollout_mask_sums"]),
    }


def allow_offloading(actor: Any, offloads: bool = True) -> None:
    actor.args.offload_train = offloads


def group_type(actor: Any) -> str:
    from megatron.core import parallel_state

    return type(parallel_state.get_data_parallel_group()).__name__


def error_of(gradients: list[list[torch.Tensor]], mode: str, divisor: float | None) -> float:
    """The largest error of a gradient that workers' optimizers got, relative to its largest entry."""
    _, by_entry, _ = expected(step_of_a_launch(), mode, divisor)
    return max(float((g.double() - by_entry).abs().max() / by_entry.abs().max()) for of in gradients for g in of)
