"""SkyRL from its own start: SKYRL_PATH=~/SkyRL, and Ray.

Real: the registration in the run script, SkyRL's command line, `validate_cfg`, `initialize_ray` with the runtime
environment that SkyRL makes, `sync_registries`, its entry point in a Ray task with `BasePPOExp._setup_trainer`,
`RayPPOTrainer` with `build_models`, `compute_advantages_and_returns`, `train_critic_and_policy`, `save_checkpoints` and
`load_checkpoints`, its dispatch of `forward` with a loss, worker groups with `offload_to_cpu` and `backload_to_gpu`, in
Ray's workers `MegatronPolicyWorker` with `MegatronStrategy`, the loss that SkyRL's registry gives there, and Megatron's
optimizer.
Stubbed: the GPU, the tokenizer, data and sampler, weight transfer, Megatron-Bridge, and the model, a table of logits.
"""

import importlib
import runpy
import sys
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bigram_step import BETA, CLIP_HIGH, CLIP_LOW, PROMPTS, ROWS, bigram_model, make_batch, right_log_probs
from checkouts import SKYRL, Settings, checkout
from pages import code_of
from ranks import run_ranks
from ray_workers import LIMIT, after_import, gradients_of, lines_in, local_ray, nothing, on_cpu, on_each, stub_names
from refusals import outcome_of
from repository import EXAMPLES
from skyrl_rows import data_of
from start_stages import ConstantRate, Launch, adam, assert_said, errors_on_rows, record_stages, run_stages
from uv_here import words_of_uv

ray: Any = pytest.importorskip("ray")
pytest.importorskip("omegaconf")
pytestmark = pytest.mark.slow

_BACKEND = "skyrl.backends.skyrl_train"
_REAL = {"ray", "pydantic", "yaml", "omegaconf", "aiohttp", f"{_BACKEND}.inference_servers"}
_REAL |= {f"{_BACKEND}.distributed.megatron.{name}" for name in ("megatron_strategy", "optimizer")}
_NOT_USED = ("zstandard", "wandb", "megatron.core.dist_checkpointing.strategies.base")
ENGINE = replace(
    SKYRL,
    passed_by=("skyrl", "skyrl.backends"),  # whose other backends it would import
    stand_ins=(*(name for name in SKYRL.stand_ins if name not in _REAL), *_NOT_USED),
)
WORKERS = 2  # of the policy
TERMS = {"kl": "token_mean", "entropy": "sample_mean"}
ENTROPY = 0.02
#: As in SkyRL's run scripts. `validate_cfg` checks the sizes.
OPTIONS = {
    "trainer.strategy": "megatron",
    "trainer.algorithm.policy_loss_type": "mine",
    "trainer.algorithm.eps_clip_low": CLIP_LOW,
    "trainer.algorithm.eps_clip_high": CLIP_HIGH,
    "trainer.algorithm.use_kl_loss": "true",
    "trainer.algorithm.kl_loss_coef": BETA,
    "trainer.algorithm.use_entropy_loss": "true",
    "trainer.algorithm.entropy_loss_coef": ENTROPY,
    "trainer.placement.colocate_all": "false",
    "trainer.placement.colocate_policy_ref": "false",
    "trainer.placement.policy_num_gpus_per_node": WORKERS,
    "trainer.placement.ref_num_gpus_per_node": 1,
    "trainer.policy.model.path": "/",
    "trainer.ref.model.path": "/",
    "trainer.train_batch_size": 3,
    "trainer.policy_mini_batch_size": 3,
    "generator.n_samples_per_prompt": ROWS // 3,
    "trainer.micro_forward_batch_size_per_gpu": 2,
    "trainer.micro_train_batch_size_per_gpu": 2,
    "trainer.logger": "console",
    "generator.inference_engine.num_engines": 1,
}


def stub() -> None:
    """What a machine without a GPU, a sampler, checkpoints and Megatron-Bridge lacks."""
    after_import(f"{_BACKEND}.workers.megatron.megatron_worker", in_worker)
    stub_names("skyrl.train.entrypoints.main_base", get_tokenizer=no_tokenizer)
    stub_names("skyrl.train.utils.utils", peer_access_supported=lambda **_: True)


def in_worker(module: Any) -> None:
    def by_gloo(start: Any) -> Any:
        def call(self: Any) -> Any:
            dist.init_process_group("gloo")  # of which SkyRL makes one with NCCL if there is none
            return start(self)

        return on_cpu(call)

    def init_configs(self: Any, *_: Any, **__: Any) -> None:
        self.provider, self.enable_router_replay, self.is_vlm = Settings(), False, False

    module.MegatronWorker.init_configs = init_configs
    module.MegatronWorker.make_megatron_module = lambda self, **_: [bigram_model(use_distributed_optimizer=True)]
    module.get_megatron_optimizer = lambda modules, config: adam(modules[0])
    module.get_megatron_optimizer_param_scheduler = lambda **_: ConstantRate()
    module.MegatronStrategy.save_hf_configs = nothing
    for name in ("PolicyWorker", "RefWorker"):
        cls = vars(module)[f"Megatron{name}Base"]
        cls.init_worker_process_group = by_gloo(cls.init_worker_process_group)
        setattr(module, name, ray.remote(num_gpus=1)(cls))  # as SkyRL does: Ray has kept the methods as they were


def no_tokenizer(*_: Any, **__: Any) -> Any:
    return Settings()


class LateWorker:
    """A worker that takes the loss from SkyRL's registry before it imports what adds the weights."""

    def loss(self) -> str:
        loss = importlib.import_module(f"{_BACKEND}.utils.ppo_utils").PolicyLossRegistry.get("mine")
        importlib.import_module(f"{_BACKEND}.workers.megatron.megatron_model_wrapper")
        rows = torch.zeros(2, 3)
        return outcome_of(lambda: loss(rows, rows, rows, Settings()))


def entrypoint(cfg: Any) -> Launch:
    """SkyRL's `skyrl_entrypoint`, but for the rollouts before a step, with the lines of SkyRL's own logs."""
    base: Any = importlib.import_module("skyrl.train.entrypoints.main_base").BasePPOExp
    unused = ("get_train_dataset", "get_eval_dataset", "get_tracker", "get_inference_client", "get_generator")
    experiment = type("Experiment", (base,), dict.fromkeys(unused, nothing))(cfg)
    trainer = experiment._setup_trainer()
    batches = importlib.import_module(f"{_BACKEND}.training_batch")
    preprocess = importlib.import_module("skyrl.train.dataset.preprocess")
    convert = preprocess.convert_prompts_responses_to_batch_tensors

    def rows() -> Any:
        data = batches.TrainingInputBatch(data_of(slice(None), itemgetter("advantages"), convert))
        uids = [str(prompt) for prompt in PROMPTS]
        data.metadata = {
            "response_length": data["response_mask"].shape[1],
            "avg_response_length": 0.0,
            "uids": uids,
            "policy_mini_batch_boundaries": [(0, ROWS)],
            "policy_prompt_boundaries": preprocess.compute_prompt_boundaries(uids),
        }
        return data

    def step() -> None:
        data = rows()
        advantages, data["values"] = data["advantages"], None
        data["rewards"] = torch.zeros_like(advantages)
        trainer.compute_advantages_and_returns(data)
        data["advantages"] = advantages  # in the place of those of the rewards
        trainer.train_critic_and_policy(data)

    def evaluate() -> float:
        loss = trainer.dispatch.forward("policy", rows(), loss_fn="cross_entropy").metrics["loss"]
        mask = (make_batch()["token_mask"] * make_batch()["sample_mask"][:, None])[:, 1:]
        right = -float((right_log_probs() * mask).sum())
        return abs(loss - right) / right

    def sleep() -> None:
        trainer.policy_model.offload_to_cpu()
        trainer.policy_model.backload_to_gpu()

    def save() -> None:
        trainer.global_step = 2
        vars(importlib.import_module("skyrl.train.trainer"))["asdict"] = lambda cfg: {}  # skyrl_gym's are stand-ins
        trainer.save_checkpoints()

    return run_stages(
        trainer.load_checkpoints()[0] > 0, lines=lambda: lines_of_infra(cfg.trainer.log_path), evaluate=evaluate,
        step=step, sleep=sleep, save=save,
        gradients=lambda: on_each(trainer.policy_model._actor_handlers, gradients_of),
    )  # fmt: skip


def lines_of_infra(folder: str) -> list[str]:
    """In SkyRL's own logs of its workers."""
    return [line for log in Path(folder).rglob("infra-*.log") for line in lines_in(log)]


def drive(root: str, folder: str, options: dict[str, Any]) -> tuple[Any, list[str], str]:
    """As a run script does: what the entry point gives, our lines in Ray's logs, and what a late worker says.

    Of a launch that stops, the error in the place of the first.
    """
    with local_ray(__name__, root, gpus=WORKERS + 1, by_engine=True) as lines:
        ppo_utils = importlib.import_module(f"{_BACKEND}.utils.ppo_utils")
        of_ours = importlib.import_module("megatron_rl_loss.engines.skyrl").AggregatedPolicyLoss
        ppo_utils.PolicyLossRegistry.register("mine", of_ours("regular", group_size=4, **TERMS))
        config = importlib.import_module("skyrl.train.config").SkyRLTrainConfig
        paths = {f"trainer.{name}_path": folder for name in ("log", "export", "ckpt")}
        cfg = config.from_cli_overrides([f"{key}={value}" for key, value in (OPTIONS | paths | options).items()])
        utils = importlib.import_module("skyrl.train.utils")
        utils.validate_cfg(cfg)
        utils.initialize_ray(cfg)
        try:
            launch = ray.get(ray.remote(num_cpus=1)(entrypoint).remote(cfg))
        except ray.exceptions.RayTaskError as error:
            return str(error), lines(), ""
        late = ray.get(ray.remote(num_cpus=1)(LateWorker).remote().loss.remote())
        return launch, lines(), late


@pytest.mark.timeout(2 * LIMIT + 100)
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("prompt_mean", {"trainer.algorithm.loss_reduction": "prompt_mean"}),
        (
            "sample_mean",
            {
                "trainer.algorithm.loss_reduction": "sequence_mean",
                "trainer.policy.megatron_config.context_parallel_size": WORKERS,
            },
        ),
    ],
    ids=["DP 2", "CP 2"],
)
def test_workers_of_a_launch_aggregate_as_asked(
    mode: str, options: dict[str, Any], record_property: Any, tmp_path: Path
) -> None:
    asked = [options | {"trainer.log_path": str(tmp_path / f"log{i}")} for i in range(2)]
    launches = list[Launch]()
    own = options["trainer.algorithm.loss_reduction"]
    says = f"in SkyRL driver: loss_reduction={own}, measured in SkyRL's own division of advantages: each of"
    proved = "token_sum with divisor 1 on SkyRL's policy loss, sample_mean on entropy, token_mean on kl"
    for of_launch in asked:
        launch, lines, late = run_ranks(1, drive, checkout(SKYRL), str(tmp_path), of_launch)[0]
        assert isinstance(launch, Launch), launch
        launches.append(launch)
        print(*lines, "---", sep="\n")
        assert_said(launch.lines, "SkyRL", proved, does="replaced MegatronModelWrapper.forward_backward_mini_batch")
        assert [line for line in lines if "worker 0" in line] == []  # SkyRL's workers print into its own log
        assert any(says in line and f"has the weight of {mode}" in line for line in lines)
        assert late.startswith("ValueError")
        assert "took the loss from SkyRL's registry first" in late

    start = errors_on_rows(launches, WORKERS, mode, TERMS, entropy=ENTROPY)
    record_stages(record_property, SKYRL, "`forward` with a loss", start)


def test_a_launch_with_another_loss_stops(tmp_path: Path) -> None:
    """Every worker has the registered loss, whatever the option names."""
    options = {"trainer.algorithm.policy_loss_type": "regular", "trainer.algorithm.use_kl_loss": "false"}
    ((error, *_),) = run_ranks(1, drive, checkout(SKYRL), str(tmp_path), options)
    assert "SkyRL trained with another loss. Register an AggregatedPolicyLoss" in error


def launched_by(root: str, words: list[str]) -> tuple[str, str, str]:
    """Of a launch by the page's entry point: the policy loss, the mode, and the type of the registered loss."""
    with local_ray(__name__, root, gpus=WORKERS + 1, by_engine=True):
        stub()
        base: Any = importlib.import_module("skyrl.train.entrypoints.main_base")
        seen: list[Any] = []
        base.initialize_ray = lambda cfg: None  # a Ray of the machine's own size
        base.skyrl_entrypoint = SimpleNamespace(remote=seen.append)
        base.ray = SimpleNamespace(get=lambda reference: reference)
        sys.argv = ["skyrl_main", *words]
        runpy.run_path(str(EXAMPLES / "recipes" / "skyrl_main.py"), run_name="__main__")
        registry = importlib.import_module(f"{_BACKEND}.utils.ppo_utils").PolicyLossRegistry
        algorithm = seen[0].trainer.algorithm
        loss = registry.get(algorithm.policy_loss_type)
        return algorithm.policy_loss_type, algorithm.loss_reduction, type(loss).__name__


def test_skyrls_script_with_the_entry_point_of_the_page(tmp_path: Path) -> None:
    """SkyRL's script up to `uv`, then SkyRL's `main` with the script's options up to the Ray task that trains."""
    root = checkout(SKYRL)
    (of_page,) = code_of("engines/skyrl.md", "bash")
    command, *settings = of_page.replace("...", "").replace("\\\n", "\n").splitlines()
    theirs = "uv run --isolated --extra megatron -m skyrl.train.entrypoints.main_base"
    text = Path(root, "examples/train/megatron/run_megatron.sh").read_text()
    assert text.count(theirs) == 1
    script = tmp_path / "run.sh"
    script.write_text(text.replace(theirs, command.rstrip() + " " + " ".join(settings)))
    words = words_of_uv([str(script), "trainer.logger=console"], tmp_path)
    assert words[words.index("--with") + 1].endswith("/megatron_rl_loss")
    assert words[words.index("-m") + 1] == "skyrl_main"
    launched = run_ranks(1, launched_by, root, words[words.index("-m") + 2 :])[0]
    assert launched == ("mine", "prompt_mean", "AggregatedPolicyLoss")
