"""Check that checkouts of engines still have the functions that `megatron_rl_loss.engines` replaces.

    python tools/check_engines.py ~/slime ~/verl ~/SkyRL

Files are parsed, not imported. It prints a line for each file, function or parameter that is missing, and ends with
exit status 1. CONTRIBUTING.md has a weekly job.
"""

import ast
import sys
from pathlib import Path

#: By engine and file: the functions with the parameters that are needed; for a name that is only imported, None.
Functions = dict[str, list[str] | None]
_STEP = ["args", "data_iterator", "num_microbatches"]
_SKYRL, _SWIFT = "skyrl/backends/skyrl_train", "swift/megatron/trainers"
_ESTIMATORS = "nemo_rl/algorithms/advantage_estimator.py"
ENGINES: dict[str, dict[str, Functions]] = {
    "slime": {
        "slime/backends/megatron_utils/model.py": {
            "train_one_step": [*_STEP, "step_global_batch_size"], "loss_function": None,
        },
        "slime/backends/megatron_utils/loss.py": {"loss_function": ["args", "batch"], "get_sum_of_sample_mean": None},
        "slime/backends/megatron_utils/cp_utils.py": {"get_sum_of_sample_mean": []},
    },
    "miles": {
        "miles/backends/megatron_utils/model.py": {
            "train_one_step": [*_STEP, "num_rollouts"], "loss_function": None,
        },
        "miles/backends/training_utils/loss.py": {"loss_function": ["args", "batch"], "get_sum_of_sample_mean": None},
        "miles/backends/training_utils/cp_utils.py": {"get_sum_of_sample_mean": []},
        "miles/utils/multi_lora.py": {"is_multi_lora_enabled": ["args"]},
    },
    "vime": {
        "vime/backends/megatron_utils/model.py": {
            "train_one_step": [*_STEP, "step_global_batch_size"], "loss_function": None,
        },
        "vime/backends/megatron_utils/loss.py": {"loss_function": ["args", "batch"], "get_sum_of_sample_mean": None},
        "vime/backends/megatron_utils/cp_utils.py": {"get_sum_of_sample_mean": []},
    },
    "verl": {
        "verl/trainer/ppo/core_algos.py": {
            "agg_loss": [
                "loss_mat", "loss_mask", "loss_agg_mode", "batch_num_tokens", "global_batch_size", "loss_scale_factor",
            ],
            "get_policy_loss_fn": ["name"],
            "kl_penalty": ["kl_penalty"],
        },
        "verl/workers/utils/losses.py": {
            "ppo_loss": ["config", "model_output", "data"], "value_loss": ["data"], "no_padding_2_padding": None,
        },
        "verl/workers/engine/megatron/transformer_impl.py": {
            "MegatronEngineWithLMHead.postprocess_micro_batch_func": ["data", "loss_function"],
        },
    },
    "SkyRL": {
        "skyrl/train/trainer.py": {
            "RayPPOTrainer._normalize_advantages": ["data", "mini_batch_boundaries", "prompt_boundaries"],
        },
        f"{_SKYRL}/workers/megatron/megatron_model_wrapper.py": {
            "MegatronModelWrapper.forward_backward_mini_batch": ["micro_batches", "loss_fn"],
            "from_parallel_logits_to_logprobs": None, "from_parallel_logits_to_logprobs_packed_sequences": None,
            "masked_mean": None, "vocab_parallel_entropy_packed_sequences": None,
            "from_parallel_hidden_to_entropy_packed_sequences": None, "shift_mask_for_mtp": None,
            "draft_soft_ce": None, "draft_soft_ce_topk": None,
        },
        f"{_SKYRL}/distributed/megatron/model_utils.py": {
            "from_parallel_logits_to_logprobs": ["vocab_parallel_logits"],
            "from_parallel_logits_to_logprobs_packed_sequences": ["vocab_parallel_logits"],
            "vocab_parallel_entropy_packed_sequences": ["loss_mask"],
            "from_parallel_hidden_to_entropy_packed_sequences": ["loss_mask"],
        },
        f"{_SKYRL}/utils/torch_utils.py": {"masked_mean": ["tensor", "mask", "dim"]},
        f"{_SKYRL}/mtp/soft_ce.py": {
            "shift_mask_for_mtp": ["mask", "mtp_layer_number", "cu_seqlens"],
            "draft_soft_ce": ["mask", "global_normalization_factor"],
            "draft_soft_ce_topk": ["mask", "global_normalization_factor"],
        },
    },
    "NeMo-RL": {
        "nemo_rl/models/policy/lm_policy.py": {"Policy.train": ["data", "loss_fn", "gbs"]},
        _ESTIMATORS: {"GRPOAdvantageEstimator.compute_advantage": ["prompt_ids"]},
        "nemo_rl/algorithms/loss/loss_functions.py": {
            "ClippedPGLossFn.__call__": ["next_token_logprobs", "data", "global_valid_seqs", "global_valid_toks"],
        },
    },
    "AReaL": {
        "areal/engine/megatron_engine.py": {
            "MegatronEngine.train_batch": ["input_", "loss_fn", "loss_weight_fn"],
            "MegatronEngine.forward_backward_batch": [], "MegatronPPOActor.ppo_update": ["args"],
        },
        "areal/trainer/ppo/actor.py": {
            "grpo_loss_fn": ["logprobs", "entropy", "input_data"], "PPOActorController.ppo_update": ["args"],
            "PPOActorControllerV2.ppo_update": ["args"],
        },
    },
    "ROLL": {
        "roll/distributed/strategy/megatron_strategy.py": {
            "MegatronTrainStrategy.train_step": ["batch", "loss_func"],
            "MegatronInferStrategy.op_compute_log_probs": [], "MegatronInferStrategy.op_compute_entropy": [],
        },
        "roll/pipeline/rlvr/actor_worker.py": {"ActorWorker.loss_func": ["data"]},
        "roll/pipeline/base_worker.py": {"ActorWorker.get_old_log_probs_with_cache": [], "create_strategy": None},
        "roll/distributed/strategy/factory.py": {"create_strategy": ["worker"]},
    },
    "RLinf": {
        "rlinf/workers/megatron_worker.py": {
            "MegatronWorker.training_step": ["batch"], "MegatronWorker.run_forward_backward": ["batch"],
        },
        "rlinf/workers/actor/megatron_actor_worker.py": {
            "MegatronActor.get_forward_step_func": [], "policy_loss": None,
        },
        "rlinf/scheduler/worker/worker_group.py": {"WorkerGroup.launch": ["cluster"]},
        "rlinf/algorithms/losses.py": {
            "compute_ppo_actor_loss": ["logprobs", "old_logprobs", "advantages", "fast_path_zero_loss_mask"],
        },
    },
    "ms-swift": {
        f"{_SWIFT}/grpo_trainer.py": {
            "MegatronGRPOTrainer.loss_func": ["output_tensor", "data"],
            "compute_logps_and_entropy_from_logits": None, "collate_to_grpo_micro_batch": None,
        },
        f"{_SWIFT}/rollout_mixin.py": {
            "MegatronRolloutMixin._preprocess_inputs": ["samples"],
            "MegatronRolloutMixin._on_train_step_batch": ["encoded_batches"],
        },
        f"{_SWIFT}/vocab_parallel_utils.py": {"compute_logps_and_entropy_from_logits": ["logits"]},
        f"{_SWIFT}/base.py": {"BaseMegatronTrainer.train_step": ["train_data_iterator"]},
        "swift/rlhf_trainers/utils.py": {"collate_to_grpo_micro_batch": ["samples"]},
        "swift/ray/megatron/grpo_trainer.py": {"GRPOTrainer.expand_for_generation": ["prompt_batch"]},
    },
    "Megatron-LM": {
        "train_rl.py": {
            "forward_step": ["data_iterator"],
            "loss_func": [
                "loss_mask", "kl_term", "ratios", "entropy_term", "truncated_from_above", "truncated_from_below",
                "output_tensor",
            ],
        },
    },
    "Megatron-Bridge": {
        "megatron/bridge/training/train.py": {"get_forward_backward_func": None},
        "megatron/bridge/training/eval.py": {"get_forward_backward_func": None},
    },
}  # fmt: skip


def names_of(tree: ast.Module) -> dict[str, list[str] | None]:
    """The functions and methods of a file with their parameters; None for names that the file imports."""
    names: dict[str, list[str] | None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: None for alias in node.names}
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for body, prefix in [(tree.body, ""), *((node.body, f"{node.name}.") for node in classes)]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                signature = node.args
                parameters = [
                    *signature.posonlyargs, *signature.args, *signature.kwonlyargs, signature.vararg, signature.kwarg
                ]  # fmt: skip
                names[prefix + node.name] = [parameter.arg for parameter in parameters if parameter is not None]
    return names


def missing_in(root: Path, files: dict[str, Functions]) -> list[str]:
    """A line for each file, function and parameter that the checkout lacks."""
    lines = []
    for file, functions in files.items():
        if not (root / file).is_file():
            lines.append(f"no {file}")
            continue
        names = names_of(ast.parse((root / file).read_text(encoding="utf-8")))
        for name, parameters in functions.items():
            if name not in names:
                lines.append(f"{file} has no {name}")
            elif lacks := sorted({*(parameters or ())} - {*(names[name] or parameters or ())}):
                lines.append(f"{file}: {name} has no {', '.join(lacks)}")
    return lines


def main(paths: list[str]) -> int:
    """Print a line for each engine that was found, and for all that it lacks; 1 if something is missing."""
    failed = not paths
    if not paths:
        print(__doc__)
    for path in paths:
        roots = [Path(path), Path(path) / "src"]
        held = [
            (name, root) for name, files in ENGINES.items() for root in roots
            if any((root / file).is_file() for file in files)
        ]  # fmt: skip
        if not held:
            print(f"{path}: no engine of {', '.join(ENGINES)}. Pass the folder that holds its package.")
            failed = True
        for name, root in held:
            lines = missing_in(root, ENGINES[name])
            failed |= bool(lines)
            print(f"{name}: {'all names found' if not lines else ''}", *lines, sep="\n  " if lines else "")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
