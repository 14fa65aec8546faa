"""Launches of slime, vime and miles from their own start, in workers of Ray: options, stubs, stages and their oracle.

The model is what `--custom-model-provider-path` names, a table of logits, in Megatron's own DDP and optimizer.
slime and vime have one driver, `drive`: vime is a fork of slime.
"""

import dataclasses
import importlib
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from checkouts import Framework, checkout
from logit_table import Step, expected, log_probs_of, logits, make_step, rollout_data
from ranks import run_ranks
from ray_workers import after_import, gradients_of, local_ray
from slime_launches import CP, DP, OURS, TOLERANCE
from start_stages import ADAM, LEARNING_RATE, errors_of_steps, keeping_gradients, right_gradients
from table_step import table_chunk

#: What their modules import and a launch without a GPU, a sampler and checkpoints does not use.
NOT_USED: tuple[str, ...] = ("torch_memory_saver", "safetensors", "huggingface_hub", "PIL", "pylatexenc", "mbridge")
NOT_USED += ("megatron.bridge", "ring_flash_attn", "aiohttp", "numba", "transformers")
#: Options of a launch: `step_of_a_launch` is its step.
STARTED = (
    "--debug-train-only --num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 --global-batch-size 12 --tokenizer-type NullTokenizer "
    f"--vocab-size 100 --hf-checkpoint none --actor-num-nodes 1 --actor-num-gpus-per-node {DP * CP} "
    f"--context-parallel-size {CP} --distributed-backend gloo --rollout-batch-size 12 --n-samples-per-prompt 1 "
    "--num-rollout 3 --use-rollout-logprobs --eps-clip 0.2 --eps-clip-high 0.28 --loss-type policy_loss "
    "--advantage-estimator grpo --kl-coef 0 --entropy-coef 0 --custom-model-provider-path slime_starts.table_of_logits "
    f"--lr {LEARNING_RATE} --min-lr {LEARNING_RATE} --lr-decay-style constant --ckpt-format torch_dist "
    "--save-interval 1 "
)
STARTED += " ".join(f"--{name.replace('_', '-')} {value}" for name, value in ADAM.items())

SEED = 7
HOOKS = ["--custom-pg-loss-reducer-function-path", f"{OURS}.slime.constant_40"]
HOOKS += ["--custom-megatron-init-path", f"{OURS}.slime.count_steps"]
MISSPELT = [option.replace("--custom-megatron-init-path", "--custom-megatron-start") for option in HOOKS]


def stub_transfer(engine: str) -> None:
    """The transfer of weights to samplers."""
    nothing: Any = lambda *_, **__: SimpleNamespace(pop_metrics=dict)  # noqa: E731
    stub_names(f"{engine}.backends.megatron_utils.actor", UpdateWeightFromDistributed=nothing)


def stub_checkpoint(engine: str) -> None:
    """slime and vime: Hugging Face's config, tokenizer and weights, and the version of NumPy that their stack wants."""
    import numpy as np

    no_checkpoint = SimpleNamespace(from_pretrained=lambda *_, **__: SimpleNamespace(vocab_size=100))
    of_megatron = f"{engine}.backends.megatron_utils"
    for name in "actor", "arguments":
        stub_names(f"{of_megatron}.{name}", AutoConfig=no_checkpoint, AutoTokenizer=no_checkpoint)
    stub_names(f"{of_megatron}.checkpoint", _load_checkpoint_hf=lambda **_: (0, 0))
    stub_names(f"{of_megatron}.initialize", np=SimpleNamespace(__version__="1.26.4", random=np.random))


def stub_names(module: str, **names: Any) -> None:
    """In the module once the engine imports it: not all of Ray's workers do."""
    after_import(module, lambda imported: vars(imported).update(names))


def table_of_logits(pre_process: bool, post_process: bool) -> Any:
    """As a user's provider of a model."""
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    return table_chunk(make_step(SEED, DP).table.tolist(), core_transformer_config_from_args(get_args()), logits)


def step_of_a_launch() -> Step:
    """The step, with advantages as GRPO has them: one for each sample."""
    step = make_step(SEED, DP)
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


def step_to_evaluate() -> Step:
    """The step, with its right log-probs as those of the sampler: the engine cuts both in the same way."""
    step = step_of_a_launch()
    for sample, log_probs in zip(step.samples, log_probs_of(step, step.table.double()), strict=True):
        sample.old_log_probs = log_probs.float()
    return step


def error_of_evaluation(actor: Any, references: Any) -> float:
    """In a worker: of the log-probs that its forward-only pass gives, in slime and vime."""
    data = actor._get_rollout_data(references)
    iterator = importlib.import_module(type(actor).__module__).get_data_iterator(data)
    return error_of_log_probs(actor.compute_log_prob(iterator, data["num_microbatches"]), data)


def error_of_log_probs(results: dict[str, list[torch.Tensor]], data: dict[str, list[torch.Tensor]]) -> float:
    log_probs, right = (torch.cat(values) for values in (results["log_probs"], data["rollout_log_probs"]))
    return float((log_probs - right).abs().max() / right.abs().max())


def keep_gradients(actor: Any) -> None:
    keeping_gradients(actor.optimizer, actor.model[0])


def allow_offloading(actor: Any, offloads: bool = True) -> None:
    actor.args.offload_train = offloads


def group_type(actor: Any) -> str:
    from megatron.core import parallel_state

    return type(parallel_state.get_data_parallel_group()).__name__


class Start(NamedTuple):
    """What launches did: the error of an evaluation and the library's lines until then, gradients of each worker.

    Those of two rollouts, with sleep in between, and of one of new workers; then all lines, and the groups' type.
    """

    evaluated: float
    before: list[str]
    gradients: list[list[torch.Tensor]]
    resumed: list[list[torch.Tensor]]
    lines: list[str]
    groups: str

    def errors(self) -> tuple[float, list[float]]:
        """Of the evaluation, and of a launch with `HOOKS` in its three rollouts, after checks of what each shows."""
        print(self.groups, *self.before, "---", *self.lines, sep="\n")
        assert self.groups == "ReloadableProcessGroup"
        assert not any("aggregation" in line for line in self.before)
        assert sum("aggregation proved" in line for line in self.lines) == 2  # of both launches
        step = step_of_a_launch()

        def gradient_at(table: torch.Tensor) -> torch.Tensor:
            return expected(dataclasses.replace(step, table=table), "constant", 40.0)[1]

        right = right_gradients([gradient_at] * 3, step.table)
        errors = [*errors_of_steps(self.gradients, right[:2]), *errors_of_steps(self.resumed, right[2:])]
        assert max(*errors, self.evaluated) < TOLERANCE
        return self.evaluated, errors


def arguments_of(engine: str, flags: list[str]) -> Any:
    sys.argv = ["train.py", *STARTED.split(), *flags]
    args = importlib.import_module(f"{engine}.utils.arguments").parse_args()
    args.enable_gloo_process_groups = True  # the installed Megatron has another name for it
    args.bf16, args.params_dtype = False, torch.float32  # no option of theirs asks for it
    args.padded_vocab_size = args.vocab_size  # of a module that the installed Megatron has elsewhere
    args.use_distributed_optimizer = False  # whose checkpoints Megatron loads with Transformer Engine alone
    return args


def drive(test: str, engine: str, root: str, flags: list[str]) -> Start:
    """As slime's and vime's train.py up to two rollouts, and again from their checkpoint up to a third."""
    with local_ray(test, root, gpus=DP * CP) as lines, tempfile.TemporaryDirectory() as folder:
        ray: Any = importlib.import_module("ray")
        placement = importlib.import_module(f"{engine}.ray.placement_group")
        boxed = importlib.import_module(f"{engine}.utils.misc").Box
        of_steps, to_evaluate = (
            [boxed(ray.put(data_of(step, dp_rank))) for dp_rank in range(DP)]
            for step in (step_of_a_launch(), step_to_evaluate())
        )
        Path(folder, "weights").touch()  # of Hugging Face
        of_workers: list[Any] = []

        def launch(*further: str) -> Any:
            args = arguments_of(engine, [*flags, *further, "--ref-load", folder, "--save", f"{folder}/saved"])
            of_workers[:] = of_workers or [placement.create_placement_groups(args)["actor"]]
            nodes = args.actor_num_nodes, args.actor_num_gpus_per_node
            group = placement.allocate_train_group(args, *nodes, *of_workers)
            group.create()
            of_each(group, keep_gradients)
            return group

        def of_each(group: Any, function: Any, *given: Any) -> Any:
            return ray.get([worker.__ray_call__.remote(function, *given) for worker in group._actor_handlers])

        group = launch()
        evaluated = max(of_each(group, error_of_evaluation, to_evaluate))
        before = lines()
        ray.get(group.async_train(0, of_steps))
        of_each(group, allow_offloading)
        group.offload()
        group.onload()  # the groups are other ones from here on, behind the same objects
        of_each(group, allow_offloading, False)
        ray.get(group.async_train(1, of_steps))
        group.save_model(1)
        gradients, groups = of_each(group, gradients_of), of_each(group, group_type)[0]
        group.release()
        group = launch("--load", f"{folder}/saved")
        ray.get(group.async_train(2, of_steps))
        return Start(evaluated, before, gradients, of_each(group, gradients_of), lines(), groups)


def started(test: str, framework: Framework, options: list[str]) -> Start:
    """`drive` of the engine of that checkout, with the stubs of a test's module, in a process of its own."""
    engine = framework.variable.removesuffix("_PATH").lower()
    (start,) = run_ranks(1, drive, test, engine, checkout(framework), options)
    assert isinstance(start, Start)
    return start


def assert_misspelt_option_is_said(start: Start, engine: str) -> None:
    """The engine ignores options that it does not know: without `count_steps` a hook is proved in the second step."""
    assert len(start.gradients) == DP * CP
    assert f"{engine} worker 0: count_steps did not run in this worker" in "".join(start.lines)
