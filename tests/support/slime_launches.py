"""Launches of slime and miles: their flags, with a hook of ours or without, and steps of `logit_table`."""

from collections.abc import Callable, Sequence
from typing import Any

import oracle
import torch
from checkouts import Settings
from logit_table import CLIP_HIGH, CLIP_LOW, Step

#: Log-probs are float32 sums over the vocabulary.
TOLERANCE = 2e-6
DP, CP = 2, 2
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
