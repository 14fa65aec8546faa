"""Launches of slime, vime and miles from their own start, in workers of Ray: options, stubs, a step and its oracle.

slime and vime have one driver, `drive`: vime is a fork of slime.
"""

import dataclasses
import importlib
import sys
from types import SimpleNamespace
from typing import Any

import torch
from checkouts import Framework, checkout
from logit_table import KeepsGradients, Step, expected, logit_model, make_step, rollout_data
from ranks import run_ranks
from ray_workers import gradients_of, local_ray
from slime_launches import CP, DP, OURS, TOLERANCE

#: What their modules import and a launch without a GPU, a sampler and checkpoints does not use.
NOT_USED: tuple[str, ...] = ("torch_memory_saver", "safetensors", "huggingface_hub", "PIL", "pylatexenc", "mbridge")
NOT_USED += ("megatron.bridge", "ring_flash_attn", "aiohttp", "numba", "transformers")
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
MISSPELT = [option.replace("--custom-megatron-init-path", "--custom-megatron-start") for option in HOOKS]


def stub_actor(engine: str) -> None:
    """Its weights' backup and transfer, and its model, which is the table of logits of `step_of_a_launch`."""
    actor = importlib.import_module(f"{engine}.backends.megatron_utils.actor")
    backuper = SimpleNamespace(backup=lambda tag: None, restore=lambda tag: None, backup_tags={"actor"})
    vars(actor).update(
        TensorBackuper=SimpleNamespace(create=lambda **_: backuper),
        UpdateWeightFromDistributed=lambda *_, **__: SimpleNamespace(pop_metrics=dict),
        initialize_model_and_optimizer=model_and_optimizer,
    )


def stub_checkpoint(engine: str) -> None:
    """slime and vime: Hugging Face's config and tokenizer, and the version of NumPy that their stack wants."""
    import numpy as np

    no_checkpoint = SimpleNamespace(from_pretrained=lambda *_, **__: SimpleNamespace(vocab_size=100))
    for name in "actor", "arguments":
        module = importlib.import_module(f"{engine}.backends.megatron_utils.{name}")
        vars(module).update(AutoConfig=no_checkpoint, AutoTokenizer=no_checkpoint)
    initialize = importlib.import_module(f"{engine}.backends.megatron_utils.initialize")
    vars(initialize)["np"] = SimpleNamespace(__version__="1.26.4", random=np.random)


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


#: Gradients of each worker, the lines of all, and the type of the first worker's groups.
Rollouts = tuple[list[list[torch.Tensor]], list[str], str]


def drive(test: str, engine: str, root: str, flags: list[str]) -> Rollouts:
    """As slime's and vime's train.py up to two rollouts, with the workers put to sleep in between."""
    with local_ray(test, root, gpus=DP * CP) as lines:
        ray: Any = importlib.import_module("ray")
        sys.argv = ["train.py", *STARTED.split(), *flags]
        args = importlib.import_module(f"{engine}.utils.arguments").parse_args()
        args.enable_gloo_process_groups = True  # the installed Megatron has another name for it
        placement = importlib.import_module(f"{engine}.ray.placement_group")
        boxed = importlib.import_module(f"{engine}.utils.misc").Box
        group = placement.allocate_train_group(
            args, args.actor_num_nodes, args.actor_num_gpus_per_node, placement.create_placement_groups(args)["actor"]
        )
        group.create()
        references = [boxed(ray.put(data_of(step_of_a_launch(), dp_rank))) for dp_rank in range(DP)]
        workers = group._actor_handlers
        ray.get(group.async_train(0, references))
        ray.get([worker.__ray_call__.remote(allow_offloading) for worker in workers])
        group.offload()
        group.onload()  # the groups are other ones from here on, behind the same objects
        ray.get([worker.__ray_call__.remote(allow_offloading, False) for worker in workers])
        ray.get(group.async_train(1, references))
        gradients = ray.get([worker.__ray_call__.remote(gradients_of) for worker in workers])
        return gradients, lines(), ray.get(workers[0].__ray_call__.remote(group_type))


def started(test: str, framework: Framework, options: list[str]) -> Rollouts:
    """`drive` of the engine of that checkout, with the stubs of a test's module, in a process of its own."""
    engine = framework.variable.removesuffix("_PATH").lower()
    rollouts: Rollouts = run_ranks(1, drive, test, engine, checkout(framework), options)[0]
    return rollouts


def assert_misspelt_option_is_said(rollouts: Rollouts, engine: str) -> None:
    """The engine ignores options that it does not know: without `count_steps` a hook is proved in the second step."""
    gradients, lines, _ = rollouts
    assert len(gradients) == DP * CP
    assert f"{engine} worker 0: count_steps did not run in this worker" in "".join(lines)


def error_of_rollouts(rollouts: Rollouts) -> float:
    """The largest error of two rollouts with `HOOKS`, of all workers, after the checks of what every launch shows."""
    gradients, lines, groups = rollouts
    print(groups, *lines, sep="\n")
    assert groups == "ReloadableProcessGroup"
    assert [len(of_worker) for of_worker in gradients] == [2] * DP * CP
    error = error_of(gradients, "constant", 40.0)
    assert error < TOLERANCE
    return error
