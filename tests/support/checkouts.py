"""The real code of other frameworks, imported from checkouts that environment variables name.

Nothing of theirs is in this repository. A test without its checkout is skipped and says which variable to set. What
their modules import and is not installed here gets a stand-in: an empty module of that name, whose attributes are
empty too. Packages whose ``__init__`` would start the whole framework are passed by, their modules are real.
"""

import email
import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest


@dataclass(frozen=True)
class Framework:
    """A checkout of an engine, and the way to import it.

    Attributes:
        variable: names the checkout.
        proof: a file that a checkout has.
        passed_by: packages whose ``__init__`` does not run.
        stand_ins: packages that get one where they are not installed, and single modules (with a dot) that always do.
        since: a file that older checkouts lack, which are skipped; and the oldest that was read.
        replaced: packages that get a stand-in even where they are installed: they would inspect other stand-ins.
    """

    variable: str
    proof: str
    passed_by: tuple[str, ...]
    stand_ins: tuple[str, ...]
    since: tuple[str, str] | None = None
    replaced: tuple[str, ...] = ()


def _packages(name: str, *below: str) -> tuple[str, ...]:
    return name, *(f"{name}.{part}" for part in below)


SLIME = Framework(
    variable="SLIME_PATH",
    proof="slime/backends/megatron_utils/loss.py",
    passed_by=_packages("slime", "backends", "backends.megatron_utils", "utils"),
    stand_ins=("httpx", "tqdm", "wandb"),
)
VIME = Framework(
    variable="VIME_PATH",
    proof="vime/backends/megatron_utils/loss.py",
    passed_by=_packages("vime", "backends", "backends.megatron_utils", "utils"),
    stand_ins=("httpx", "ray", "tqdm", "transformers", "wandb"),
)
MILES = Framework(
    variable="MILES_PATH",
    proof="miles/backends/training_utils/loss.py",
    passed_by=_packages(
        "miles", "backends", *(f"backends.{part}_utils" for part in ("fsdp", "megatron", "training")), "utils"
    ),
    stand_ins=(
        *("huggingface_hub", "pydantic", "ray", "sglang", "tqdm", "transformers", "wandb"),
        *("miles.utils.audit_utils", "miles.utils.dumper_utils", "miles.utils.http_utils"),  # logs and servers
        *("miles.utils.processing_utils", "miles.backends.fsdp_utils.update_weight_utils"),  # tokenizers, other engines
    ),
)
VERL = Framework(
    variable="VERL_PATH",
    proof="verl/trainer/ppo/core_algos.py",
    passed_by=_packages("verl", "trainer", "trainer.ppo", "workers", "workers.engine"),
    stand_ins=(
        *("codetiming", "datasets", "omegaconf", "orjson", "pandas", "ray", "tensordict", "transformers"),
        "verl.utils.checkpoint",
    ),
    since=("verl/trainer/distillation/losses.py", "verl 1dda039b (2026-08-22)"),
)
_MEGATRON_OF_SKYRL = "skyrl.backends.skyrl_train.distributed.megatron"
SKYRL = Framework(
    variable="SKYRL_PATH",
    proof="skyrl/backends/skyrl_train/utils/ppo_utils.py",
    passed_by=(
        *_packages("skyrl", "train", "train.dataset", "backends", "backends.skyrl_train"),
        *_packages("skyrl.backends.skyrl_train", "utils", "mtp", "distributed", "distributed.megatron")[1:],
        *_packages("skyrl.backends.skyrl_train", "workers", "workers.megatron")[1:],
    ),
    stand_ins=(
        *("aiohttp", "datasets", "httpx", "huggingface_hub", "jaxtyping", "loguru", "megatron.bridge", "omegaconf"),
        *("orjson", "peft", "pybase64", "pydantic", "ray", "rich", "safetensors", "skyrl_gym", "torchdata", "tqdm"),
        *("transformers", "yaml"),
        *(f"{_MEGATRON_OF_SKYRL}.{name}" for name in ("megatron_strategy", "optimizer")),  # checkpoints, optimizers
        *(f"skyrl.backends.skyrl_train.{name}" for name in ("inference_servers", "patches", "weight_sync")),
        *(f"skyrl.backends.skyrl_train.workers.megatron.{name}" for name in ("adapter_store", "model_bridges")),
    ),
)
NEMO_RL = Framework(
    variable="NEMO_RL_PATH",
    proof="nemo_rl/algorithms/loss/loss_functions.py",
    passed_by=_packages("nemo_rl", "models", "models.megatron", "models.megatron.draft"),
    stand_ins=(
        *("datasets", "decord", "fastapi", "hydra", "mlflow", "omegaconf", "PIL", "prometheus_client", "pydantic"),
        *("pynvml", "ray", "requests", "rich", "swanlab", "tensordict", "torchdata", "transformers", "uvicorn"),
        *("wandb", "zmq", "megatron.bridge"),
        *("nemo_rl.data.multimodal_utils", "nemo_rl.algorithms.x_token"),  # images, other tokenizers
        *("nemo_rl.models.dtensor", "nemo_rl.models.huggingface", "nemo_rl.models.policy"),  # other workers
        "nemo_rl.models.megatron.config",
    ),
)
AREAL = Framework(
    variable="AREAL_PATH",
    proof="areal/engine/megatron_engine.py",
    passed_by=_packages("areal", "engine", "trainer", "trainer.ppo"),
    stand_ins=(
        *("aiohttp", "colorlog", "httpx", "hydra", "lark", "mbridge", "numba", "omegaconf", "orjson", "pandas", "ray"),
        *("pydantic", "safetensors", "tenacity", "torchdata", "transformers", "uvloop", "yaml", "megatron.bridge"),
        *("areal.infra", "areal.v2", "areal.experimental.training_service"),  # launchers and servers
    ),
)
MS_SWIFT = Framework(
    variable="MS_SWIFT_PATH",
    proof="swift/megatron/trainers/grpo_trainer.py",
    passed_by=_packages("swift", "megatron", "megatron.trainers", "rl_core", "rlhf_trainers"),
    stand_ins=(
        *("accelerate", "aiohttp", "dacite", "datasets", "fastapi", "huggingface_hub", "json_repair", "mcore_bridge"),
        *("modelscope", "msgspec", "openai", "pandas", "peft", "PIL", "ray", "requests", "tqdm"),
        *(
            "transformers",
            "trl",
            "uvicorn",
            "swift.arguments",
            "swift.ray.megatron.checkpoint_engine",
            "swift.utils.logger",
        ),
        *("swift.tuners", "swift.template", "swift.dataset", "swift.rewards"),
        *(
            "swift.dataloader",
            "swift.infer_engine",
            "swift.rollout",
            "swift.trainers",
        ),  # what generates, other trainers
        *("swift.megatron.arguments", "swift.megatron.callbacks", "swift.megatron.model"),
        *(f"swift.rlhf_trainers.{name}" for name in ("gkd_helpers", "grpo_trainer", "vllm_client")),
    ),
    replaced=("pydantic",),
)
ROLL = Framework(
    variable="ROLL_PATH",
    proof="roll/distributed/strategy/megatron_strategy.py",
    passed_by=(
        *_packages("roll", "configs", "datasets", "distributed", "distributed.executor", "distributed.scheduler"),
        *_packages("roll", "distributed.strategy", "pipeline", "pipeline.agentic", "pipeline.rlvr", "utils")[1:],
        *_packages("roll", "third_party", "third_party.megatron")[1:],
    ),
    stand_ins=(
        *("accelerate", "codetiming", "dacite", "PIL", "peft", "psutil", "pydantic", "ray", "requests"),
        *(
            "tensordict",
            "tqdm",
            "transformers",
            *(f"mcore_adapter.{name}" for name in ("checkpointing", "patcher", "trainer")),
        ),
        *("roll.configs.base_config", "roll.configs.worker_config"),
        *("roll.datasets.collator", "roll.distributed.executor.worker", "roll.distributed.scheduler.decorator"),
        *("roll.distributed.scheduler.transfer_backend", "roll.models"),
        *("roll.pipeline.agentic.utils", "roll.pipeline.rlvr.rlvr_config", "roll.third_party.megatron.model_update"),
        *(f"roll.utils.{name}" for name in ("checkpoint_manager", "collective", "cuda_ipc_utils", "offload_nccl")),
        *("roll.utils.context_managers", "roll.utils.logging", "roll.utils.telemetry"),
    ),
)
RLINF = Framework(
    variable="RLINF_PATH",
    proof="rlinf/workers/megatron_worker.py",
    passed_by=(
        *_packages("rlinf", "algorithms", "data", "data.schema", "hybrid_engines", "hybrid_engines.megatron", "utils"),
        *_packages("rlinf", "workers", "workers.actor", "utils.resharding")[1:],
    ),
    stand_ins=(
        *("omegaconf", "ray", "tqdm", "transformers", "rlinf.agents", "rlinf.config", "rlinf.models"),
        *("rlinf.scheduler", "rlinf.workers.rollout"),
        *(f"rlinf.utils.{name}" for name in ("flops", "initialize", "logging", "placement", "profiler", "timers")),
        *(f"rlinf.utils.resharding.{name}" for name in ("mcore_weight_reshard", "reshard_config")),
    ),
)
_UNREAD = ("checkpointing", "config", "initialize", "nvrx_straggler", "state", "tensor_inspect", "utils.mlflow_utils")
BRIDGE = Framework(
    variable="BRIDGE_PATH",
    proof="megatron/bridge/training/train.py",
    passed_by=("megatron.bridge", *(f"megatron.bridge.{name}" for name in ("data", "training", "utils"))),
    stand_ins=(
        *("datasets", "huggingface_hub", "hydra", "modelopt", "omegaconf", "PIL", "pydantic", "rich", "safetensors"),
        *("tqdm", "transformers", "wandb", "yaml", "megatron.bridge.models", "megatron.bridge.peft"),
        *(f"megatron.bridge.training.{name}" for name in _UNREAD),
        "megatron.bridge.training.utils.flop_utils",  # names of a newer megatron-core
    ),
)
MEGATRON_LM = Framework(
    variable="MEGATRON_LM_PATH",
    proof="train_rl.py",
    passed_by=("megatron.rl",),
    stand_ins=(
        *("pydantic", "torch_memory_saver", "wandb", "yaml", "torch.utils.tensorboard"),
        *("megatron.rl.agent", "megatron.rl.inference", "megatron.rl.server"),  # what generates the rollouts
    ),
)

TRL = Framework(
    variable="TRL_PATH",
    proof="trl/trainer/grpo_trainer.py",
    passed_by=_packages("trl", "experimental", "experimental.gkd", "trainer"),
    stand_ins=(
        *("accelerate", "datasets", "huggingface_hub", "liger_kernel", "pandas", "peft", "transformers"),
        *(f"trl.{name}" for name in ("chat_template_utils", "data_utils", "distributed", "extras", "generation")),
        *("trl.import_utils", "trl.models", "trl.experimental.gkd.gkd_config", "trl.experimental.utils"),
        *(f"trl.trainer.{name}" for name in ("base_trainer", "callbacks", "grpo_config", "sft_trainer", "utils")),
    ),
)
PRIME_RL = Framework(
    variable="PRIME_RL_PATH",
    proof="src/prime_rl/trainer/rl/loss.py",
    passed_by=_packages("prime_rl", "trainer", "trainer.rl"),
    stand_ins=("beartype", "jaxtyping", "prime_rl.configs", "prime_rl.utils"),
)


def checkout(framework: Framework) -> str:
    """The path of its checkout; without one, the test is skipped."""
    path = os.environ.get(framework.variable)
    if not path:
        pytest.skip(f"set {framework.variable} to a checkout to run its real code")
    if not (Path(path) / framework.proof).exists():
        pytest.fail(f"{framework.variable}={path} has no {framework.proof}")
    if framework.since is not None and not (Path(path) / framework.since[0]).exists():
        pytest.skip(f"{path} is older than what was read, {framework.since[1]}: it has no {framework.since[0]}")
    return path


def record_errors(
    record_property: Any, framework: Framework, setting: str, own: float | None = None, ours: float | None = None
) -> None:
    """Record, for the table at the end of a run, a setting's errors by the engine itself, if any, and with ours."""
    root = Path(checkout(framework))
    command = ["git", "-C", str(root), "log", "-1", "--abbrev=8", "--format=Version: `%h`"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout
    name = framework.variable.removesuffix("_PATH").lower()
    metadata = [*(folder / "PKG-INFO" for folder in (root, root.parent)), *root.glob(f"*{name}-*.dist-info/METADATA")]
    of_package = [file for file in metadata if file.exists()]  # of an unpacked sdist or wheel, which is no repository
    version = email.message_from_string(of_package[0].read_text() if of_package else commit)["Version"]
    engine = name.replace("_", "-")
    record_property("engine", (engine, str(version), setting, own, ours))


def load(framework: Framework, root: str, *modules: str) -> list[Any]:
    """Import modules of a checkout, for the life of this process."""
    stand_in(framework, root)
    return [importlib.import_module(name) for name in modules]


def stand_in(framework: Framework, root: str) -> None:
    """Pass its packages by and put stand-ins into their places, for the life of this process."""
    for name in framework.passed_by:
        package = ModuleType(name)
        package.__path__ = [str(Path(root, *name.split(".")))]
        sys.modules[name] = package
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, package)
    for name in [name for name in sys.modules if name.partition(".")[0] in framework.replaced]:
        del sys.modules[name]
    missing = [name for name in framework.stand_ins if "." in name or importlib.util.find_spec(name) is None]
    missing += framework.replaced
    sys.meta_path.insert(0, _StandIns(missing))


class Settings(SimpleNamespace):
    """Settings of an engine: one that is not set is None, which is off."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _StandIns:
    """Finds and makes the stand-ins, their submodules included."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        mine = any(name == package or name.startswith(f"{package}.") for package in self.names)
        return ModuleSpec(name, self, is_package=True) if mine else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def _no(*_: Any, **__: Any) -> bool:
    return False


class _EmptyModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _no if name.startswith("is_") else _empty(name)


def _empty(name: str) -> "_Empty":
    methods = {"__call__": _decorate, "__getattr__": _self, "__init_subclass__": classmethod(lambda cls, **_: None)}
    return _Empty(name, (), methods)


def _decorate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """An empty decorator changes nothing; anything else that is called is itself."""
    return args[0] if len(args) == 1 and isinstance(args[0], FunctionType | type) else self


def _self(self: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return self


class _Empty(type):
    """A class that may be a base, a decorator or a part of an annotation."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], FunctionType | type):
            return args[0]
        return super().__call__()

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _empty(name)

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())  # without it, `in` and loops would ask for item after item

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __or__
