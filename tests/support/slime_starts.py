"""Launches of slime, vime and miles from their own start, in workers of Ray: options, stubs, stages and their oracle.

The model is what `--custom-model-provider-path` names, a table of logits, in Megatron's own DDP and optimizer.
slime and vime have one driver, `drive`: vime is a fork of slime.
"""

import dataclasses
import importlib
import itertools
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from checkouts import Framework, checkout
from logit_table import Step, expected, log_probs_of, logits, make_step, rollout_data
from ranks import run_ranks
from ray_workers import gradients_of, local_ray, on_each, stub_names
from slime_launches import CP, DP, OURS
from start_stages import ADAM, LEARNING_RATE, Launch, errors_of_stages, keeping_gradients, record_stages, run_stages
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


def stub_files(engine: str) -> None:
    """slime and vime: Hugging Face's config, tokenizer and weights, the transfer of weights, and NumPy's version."""
    import numpy as np

    no_checkpoint = SimpleNamespace(from_pretrained=lambda *_, **__: SimpleNamespace(vocab_size=100))
    of_megatron = f"{engine}.backends.megatron_utils"
    for name in "actor", "arguments":
        stub_names(f"{of_megatron}.{name}", AutoConfig=no_checkpoint, AutoTokenizer=no_checkpoint)
    stub_names(f"{of_megatron}.checkpoint", _load_checkpoint_hf=lambda **_: (0, 0))
    stub_names(f"{of_megatron}.initialize", np=SimpleNamespace(__version__="1.26.4", random=np.random))
    stub_transfer(engine)


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


def arguments_of(engine: str, flags: list[str]) -> Any:
    sys.argv = ["train.py", *STARTED.split(), *flags]
    args = importlib.import_module(f"{engine}.utils.arguments").parse_args()
    args.enable_gloo_process_groups = True  # the installed Megatron has another name for it
    args.bf16, args.params_dtype = False, torch.float32  # no option of theirs asks for it
    args.padded_vocab_size = args.vocab_size  # of a module that the installed Megatron has elsewhere
    args.use_distributed_optimizer = False  # whose checkpoints Megatron loads with Transformer Engine alone
    return args


class Calls:
    """Those of slime's and vime's train.py, with a group of workers."""

    handles, start = "_actor_handlers", "create"
    of_group: ClassVar[dict[str, Any]] = {}

    def __init__(self, engine: str, args: Any) -> None:
        self.engine, self.ray = engine, importlib.import_module("ray")
        Path(args.ref_load, "weights").touch()  # of Hugging Face

    def put(self, data: dict[str, Any]) -> Any:
        return importlib.import_module(f"{self.engine}.utils.misc").Box(self.ray.put(data))

    def train(self, group: Any, rollout: int, data: list[Any]) -> Any:
        return self.ray.get(group.async_train(rollout, data))

    def wait(self, result: Any) -> None:
        """For what another method of the group returns: these have waited."""

    @staticmethod
    def error_of_evaluation(actor: Any, references: Any) -> float:
        """In a worker: of the log-probs that its forward-only pass gives."""
        data = actor._get_rollout_data(references)
        iterator = importlib.import_module(type(actor).__module__).get_data_iterator(data)
        return error_of_log_probs(actor.compute_log_prob(iterator, data["num_microbatches"]), data)


def drive(test: str, engine: str, root: str, flags: list[str], calls_of: type[Calls]) -> list[Launch]:
    """As the engine's train.py up to two rollouts, and again from their checkpoint up to a third."""
    with local_ray(test, root, gpus=DP * CP) as lines, tempfile.TemporaryDirectory() as folder:
        placement = importlib.import_module(f"{engine}.ray.placement_group")
        flags = [*flags, "--ref-load", folder, "--save", f"{folder}/saved"]
        args = arguments_of(engine, flags)
        calls, places = calls_of(engine, args), placement.create_placement_groups(args)["actor"]
        of_steps, to_evaluate = (
            [calls.put(data_of(step, dp_rank)) for dp_rank in range(DP)]
            for step in (step_of_a_launch(), step_to_evaluate())
        )

        def launch(args: Any, resumed: bool) -> Launch:
            nodes = args.actor_num_nodes, args.actor_num_gpus_per_node
            group = placement.allocate_train_group(args, *nodes, places, **calls.of_group)
            calls.wait(getattr(group, calls.start)())
            workers, rollouts = getattr(group, calls.handles), itertools.count(2 if resumed else 0)
            on_each(workers, keep_gradients)

            def sleep() -> None:
                on_each(workers, allow_offloading)
                calls.wait(group.offload())
                calls.wait(group.onload())  # the groups are other ones from here on, behind the same objects
                on_each(workers, allow_offloading, False)

            launched = run_stages(
                resumed, lines=lines, step=lambda: calls.train(group, next(rollouts), of_steps), sleep=sleep,
                evaluate=lambda: max(on_each(workers, calls.error_of_evaluation, to_evaluate)),
                gradients=lambda: on_each(workers, gradients_of), save=lambda: calls.wait(group.save_model(1)),
            )  # fmt: skip
            assert set(on_each(workers, group_type)) == {"ReloadableProcessGroup"}
            for worker in workers:
                calls.ray.kill(worker)
            return launched

        return [launch(args, False), launch(arguments_of(engine, [*flags, "--load", f"{folder}/saved"]), True)]


def started(test: str, framework: Framework, options: list[str], calls_of: type[Calls] = Calls) -> list[Launch]:
    """`drive` of the engine of that checkout, with the stubs of a test's module, in a process of its own."""
    engine = framework.variable.removesuffix("_PATH").lower()
    (launches,) = run_ranks(1, drive, test, engine, checkout(framework), options, calls_of)
    assert isinstance(launches, list)
    return launches


def record_start(record_property: Any, framework: Framework, launches: list[Launch]) -> None:
    """Of launches with `HOOKS`, each of which proves its first step."""
    step, lines = step_of_a_launch(), launches[-1].lines
    print(*lines, sep="\n")
    assert sum("aggregation proved" in line for line in lines) == len(launches)

    def gradient_at(table: torch.Tensor) -> torch.Tensor:
        return expected(dataclasses.replace(step, table=table), "constant", 40.0)[1]

    start = errors_of_stages(launches, DP * CP, gradient_at, step.table)
    record_stages(record_property, framework, "`compute_log_prob`", start)


def assert_misspelt_option_is_said(launches: list[Launch], engine: str) -> None:
    """The engine ignores options that it does not know: without `count_steps` a hook is proved in the second step."""
    assert len(launches[0].gradients) == DP * CP
    assert f"{engine} worker 0: count_steps did not run in this worker" in "".join(launches[0].lines)
