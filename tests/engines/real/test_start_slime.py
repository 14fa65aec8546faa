"""slime from its own start: SLIME_PATH=~/slime, and Ray.

Real: slime's command line, placement groups, `RayTrainGroup`, the actor's `__init__`, `init`, `train`, `sleep` and
`wake_up` in Ray's workers with slime's own `ReloadableProcessGroup`, and all that a training step of theirs calls.
Stubbed: the GPU, the sampler, Hugging Face's config and tokenizer, weight transfer, and the model, which is a table of
logits whose optimizer keeps gradients.
"""

import dataclasses
import importlib
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkouts import SLIME, checkout, record_errors
from logit_table import KeepsGradients, Step, expected, logit_model, make_step, rollout_data
from ranks import run_ranks
from ray_workers import local_ray
from slime_launches import OURS, TOLERANCE

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

DP, CP = 2, 2
STAND_INS = ("torch_memory_saver", "transformers", "sglang", "sglang_router", "safetensors", "huggingface_hub", "PIL")
STAND_INS += ("pylatexenc", "mbridge", "megatron.bridge", "ring_flash_attn", "aiohttp", "numba")
ARGUMENTS = (
    "--debug-train-only --num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 --global-batch-size 12 --tokenizer-type NullTokenizer "
    f"--vocab-size 100 --hf-checkpoint none --actor-num-nodes 1 --actor-num-gpus-per-node {DP * CP} "
    f"--context-parallel-size {CP} --distributed-backend gloo --rollout-batch-size 12 --n-samples-per-prompt 1 "
    "--num-rollout 2 --use-rollout-logprobs --eps-clip 0.2 --eps-clip-high 0.28 --loss-type policy_loss "
    "--advantage-estimator grpo --kl-coef 0 --entropy-coef 0"
)


def stub() -> None:
    """What a machine without GPU, sampler and checkpoint lacks."""
    import numpy as np

    cpu = torch.device("cpu")
    accelerator = importlib.import_module("slime.utils.accelerator")
    vars(accelerator)["_ACCELERATOR"] = SimpleNamespace(
        device=lambda index=None: cpu, device_type="cpu", current_device=lambda: cpu, set_device=lambda index: None,
        set_allocator_expandable_segments=lambda: False, synchronize=lambda *_: None, empty_cache=lambda: None,
        mem_get_info=lambda *_: (2**40, 2**40), memory_allocated=lambda *_: 0, memory_reserved=lambda *_: 0,
        communication_backend_name="gloo", is_available=lambda: True, visible_devices_env_key=lambda: "NONE",
        resolve_visible_device_id=int, communication_backend=lambda default: default, supports=lambda capability: False,
        manual_seed=lambda seed: None, distributed_device_id=lambda index=None: None,
    )  # fmt: skip
    actor = importlib.import_module("slime.backends.megatron_utils.actor")
    arguments = importlib.import_module("slime.backends.megatron_utils.arguments")
    no_checkpoint = SimpleNamespace(from_pretrained=lambda *_, **__: SimpleNamespace(vocab_size=100))
    for module in (actor, arguments):
        vars(module).update(AutoConfig=no_checkpoint, AutoTokenizer=no_checkpoint)
    initialize = importlib.import_module("slime.backends.megatron_utils.initialize")
    vars(initialize)["np"] = SimpleNamespace(__version__="1.26.4", random=np.random)  # the stack wants NumPy 1
    vars(actor)["UpdateWeightFromDistributed"] = lambda *_, **__: SimpleNamespace(pop_metrics=dict)
    backuper = SimpleNamespace(backup=lambda tag: None, restore=lambda tag: None, backup_tags={"actor"})
    vars(actor)["TensorBackuper"] = SimpleNamespace(create=lambda **_: backuper)
    vars(actor)["initialize_model_and_optimizer"] = model_and_optimizer


def model_and_optimizer(args: Any, role: str) -> Any:
    model = logit_model(make_step(7, DP).table, per_token=args.calculate_per_token_loss)
    optimizer: Any = KeepsGradients(model)
    optimizer.param_groups, optimizer.scale_loss = [], None
    return [model], optimizer, SimpleNamespace(step=lambda increment: None), -1


def rewarded() -> Step:
    """The step, with advantages as GRPO has them: one for each sample."""
    step = make_step(7, DP)
    samples = [
        dataclasses.replace(sample, advantages=torch.full_like(sample.advantages, 0.5 + 0.1 * i))
        for i, sample in enumerate(step.samples)
    ]
    return dataclasses.replace(step, samples=samples)


def data_of(step: Step, dp_rank: int) -> dict[str, Any]:
    """What slime's rollout manager puts into Ray's store for one data-parallel rank."""
    whole = rollout_data([step], dp_rank, lambda values, total, response: values)
    chosen = [i for of_batch in step.dealt[dp_rank] for i in of_batch]
    kept = ("tokens", "response_lengths", "loss_masks", "rollout_log_probs", "rollout_mask_sums")
    kept += ("micro_batch_indices", "num_microbatches", "global_batch_sizes")
    return {name: whole[name] for name in kept} | {
        "partition": chosen,
        "total_lengths": [sample.total for sample in step.samples],
        "rewards": [0.5 + 0.1 * i for i in chosen],
        "rollout_mask_sums": torch.stack(whole["rollout_mask_sums"]),
    }


def drive(root: str, flags: list[str]) -> tuple[list[list[torch.Tensor]], list[str], str]:
    """As slime's train.py up to the first rollouts: gradients of each worker, the workers' lines, how groups look."""
    import ray

    with local_ray("SLIME", root, f"{__name__}.stub", STAND_INS, gpus=DP * CP) as lines:
        sys.argv = ["train.py", *ARGUMENTS.split(), *flags]
        args = importlib.import_module("slime.utils.arguments").parse_args()
        placement = importlib.import_module("slime.ray.placement_group")
        boxed = importlib.import_module("slime.utils.misc").Box
        group = placement.allocate_train_group(
            args, args.actor_num_nodes, args.actor_num_gpus_per_node, placement.create_placement_groups(args)["actor"]
        )
        group.create()
        references = [boxed(ray.put(data_of(rewarded(), dp_rank))) for dp_rank in range(DP)]
        try:
            ray.get(group.async_train(0, references))
            for worker in group._actor_handlers:
                ray.get(worker.__ray_call__.remote(allow_offloading))
            group.offload()
            group.onload()  # slime's groups are other ones from here on, behind the same objects
            for worker in group._actor_handlers:
                ray.get(worker.__ray_call__.remote(allow_offloading, False))
            ray.get(group.async_train(1, references))
        except ray.exceptions.RayTaskError as error:
            return [], lines(), str(error)
        workers = group._actor_handlers
        gradients = ray.get([worker.__ray_call__.remote(gradients_of) for worker in workers])
        return gradients, lines(), ray.get(workers[0].__ray_call__.remote(group_type))


def allow_offloading(actor: Any, offloads: bool = True) -> None:
    actor.args.offload_train = offloads


def gradients_of(actor: Any) -> list[torch.Tensor]:
    return list(actor.optimizer.gradients)


def group_type(actor: Any) -> str:
    from megatron.core import parallel_state

    return type(parallel_state.get_data_parallel_group()).__name__


def started(*flags: str) -> tuple[list[list[torch.Tensor]], list[str], str]:
    result: tuple[list[list[torch.Tensor]], list[str], str] = run_ranks(1, drive, checkout(SLIME), list(flags))[0]
    return result


def test_workers_of_a_launch_aggregate_as_asked(record_property: Any) -> None:
    """Two rollouts, with the workers put to sleep in between, which destroys all groups and builds them again."""
    path = f"{OURS}.slime"
    gradients, lines, groups = started(
        "--custom-pg-loss-reducer-function-path", f"{path}.constant_40", "--custom-megatron-init-path", f"{path}.count_steps"
    )  # fmt: skip
    print(groups, *lines, sep="\n")
    assert groups == "ReloadableProcessGroup"
    _, by_entry, _ = expected(rewarded(), "constant", 40.0)
    error = max(float((g.double() - by_entry).abs().max() / by_entry.abs().max()) for of in gradients for g in of)
    assert [len(of_worker) for of_worker in gradients] == [2] * DP * CP
    assert error < TOLERANCE
    record_errors(record_property, SLIME, "started: two rollouts, groups built again in between", ours=error)
