"""A critic of verl from its own start: VERL_PATH=~/verl, and Ray.

Real: verl's Hydra config and dataclasses, its resource pool, worker groups and `TrainingWorker` in Ray, `value_loss`
as `RayPPOTrainer` sends it, the Megatron engine's `train_batch`, its cut of rows over CP ranks and its gather.
Stubbed: the GPU, Hugging Face's config and tokenizer, and the model, a table of values whose optimizer keeps gradients.
"""

import dataclasses
import importlib
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from checkouts import VERL, checkout, record_errors
from logit_table import KeepsGradients
from ranks import run_ranks
from ray_workers import local_ray
from table_step import relative_error, table_model

ray: Any = pytest.importorskip("ray")
hydra: Any = pytest.importorskip("hydra")
pytest.importorskip("tensordict")
pytestmark = pytest.mark.slow

CP, ROWS_OF_A_MICROBATCH = 2, 2
_NOT_USED = ("transformers", "datasets", "orjson", "pandas", "peft", "pyarrow", "accelerate", "torchdata")
#: With verl's own `__init__`, which is what reads `VERL_USE_EXTERNAL_MODULES`.
ENGINE = dataclasses.replace(VERL, passed_by=(), stand_ins=(*_NOT_USED, "uvicorn", "fastapi"))
INSTALL = "megatron_rl_loss.engines.verl_install"
TOLERANCE = 2e-6
#: Of each row: tokens of the prompt, and the mask of its response.
ROWS: list[tuple[int, list[int]]] = [
    (1, [1, 1, 0]),
    (3, [1]),
    (2, [1, 0, 1, 1, 1]),
    (4, [0, 0]),
    (1, [1] * 7),
    (2, [1, 1]),
]
TOKENS = sum(prompt + len(mask) for prompt, mask in ROWS)
TABLE = torch.linspace(-1, 1, TOKENS + 1)  # the value at each token; its last entry pads
RETURNS = torch.linspace(1, -1, TOKENS).roll(3)


def stub() -> None:
    """What a machine without a GPU and checkpoints lacks."""
    model = importlib.import_module("verl.workers.config.model")
    config = SimpleNamespace(architectures=["Table"], tie_word_embeddings=False)
    nothing = dict.fromkeys(
        ["copy_to_local", "hf_tokenizer", "hf_processor", "get_generation_config", "update_model_config"]
    )
    vars(model).update({name: lambda *_, **__: None for name in nothing})
    ids = SimpleNamespace(bos_token_id=0, eos_token_id=0, pad_token_id=0, chat_template=None)
    vars(model)["hf_tokenizer"] = lambda *_, **__: ids
    vars(model)["AutoConfig"] = SimpleNamespace(from_pretrained=lambda *_, **__: config)
    workers = importlib.import_module("verl.workers.engine_workers")
    vars(workers).update(
        initialize_global_process_group_ray=lambda timeout_second: dist.init_process_group(
            "gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
        ),
        set_numa_affinity=lambda: None, FlopsCounter=lambda config: None, get_device_name=lambda: "cpu",
    )  # fmt: skip
    engine = importlib.import_module("verl.workers.engine.megatron.transformer_impl")
    vars(engine).update(get_device_id=lambda: torch.device("cpu"), get_device_name=lambda: "cpu")
    vars(engine)["MegatronEngine"].initialize = initialize
    vars(importlib.import_module("verl.models.mcore"))["get_mcore_engine_forward_fn"] = lambda config: values_of


def initialize(engine: Any) -> None:
    model = table_model(TABLE.tolist(), per_token=True)
    engine.module, engine.optimizer = [model], KeepsGradients(model)
    engine.tf_config = model.config


def values_of(model: Any, input_ids: Any, *_: Any, **__: Any) -> Any:
    """As verl's forward function: rows cut over CP ranks, the model, and whole rows gathered."""
    util = importlib.import_module("verl.models.mcore.util")
    local, packed, *_ = util.preprocess_thd_engine(input_ids)
    return util.postprocess_thd_engine(model(local.flatten())[None], packed, input_ids, len(input_ids))


def batch() -> Any:
    """The rows as verl's trainer sends them, jagged."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    first = torch.tensor([0, *(prompt + len(mask) for prompt, mask in ROWS)]).cumsum(0).tolist()
    ids = [torch.arange(first[i], first[i + 1]) for i in range(len(ROWS))]

    def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    prompts, masks = [prompt for prompt, _ in ROWS], [torch.tensor(mask) for _, mask in ROWS]
    data = TensorDict(
        {
            "input_ids": jagged(ids), "response_mask": jagged(masks), "loss_mask": jagged(masks),
            "prompts": jagged([row[:n] for row, n in zip(ids, prompts, strict=True)]),
            "responses": jagged([row[n:] for row, n in zip(ids, prompts, strict=True)]),
            "values": jagged([TABLE[row[n:] - 1] for row, n in zip(ids, prompts, strict=True)]),
            "returns": jagged([RETURNS[row[n:] - 1] for row, n in zip(ids, prompts, strict=True)]),
        }, batch_size=len(ROWS),
    )  # fmt: skip
    tensordict_utils.assign_non_tensor(
        data, global_batch_size=len(ROWS), use_dynamic_bsz=False, micro_batch_size_per_gpu=ROWS_OF_A_MICROBATCH,
        global_token_num=None,
    )  # fmt: skip
    return data


def right_gradient() -> torch.Tensor:
    """Of the token mean of half the squared error, in float64."""
    table, begin, samples = TABLE.double().requires_grad_(), 0, []
    for prompt, mask in ROWS:
        before = torch.arange(begin + prompt - 1, begin + prompt - 1 + len(mask))  # a value is that of the next token
        samples.append(oracle.Sample(0.5 * (table[before] - RETURNS[before].double()) ** 2, torch.tensor(mask).float()))
        begin += prompt + len(mask)
    (gradient,) = torch.autograd.grad(oracle.step_loss("token_mean", samples, None), table)
    return gradient


def gradient_of(worker: Any) -> torch.Tensor:
    (critic,) = (inner for inner in vars(worker).get("worker_dict", {"": worker}).values())
    return critic.engine.optimizer.gradients[0]


def drive(root: str, external_lib: bool, variable: bool) -> tuple[list[torch.Tensor], list[str]]:
    """As `RayPPOTrainer.init_workers` and one step of its critic, in a pool of its own: gradients, workers' lines."""
    if variable:
        os.environ["VERL_USE_EXTERNAL_MODULES"] = INSTALL
    variables = {"VERL_USE_EXTERNAL_MODULES": INSTALL} if variable else {}
    with local_ray(__name__, root, gpus=CP, variables=variables) as lines:
        from verl.single_controller.ray.base import (
            RayClassWithInitArgs,
            RayResourcePool,
            RayWorkerGroup,
            create_colocated_worker_cls,
        )
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig

        overrides = [f"{name}.model.path=none" for name in ("actor_rollout_ref", "critic")]
        overrides += ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", "critic.ppo_micro_batch_size_per_gpu=4"]
        overrides += [f"critic.megatron.context_parallel_size={CP}", "critic.loss_agg_mode=token-mean"]
        overrides += [f"critic.model.external_lib={INSTALL}"] * external_lib
        with hydra.initialize_config_dir(str(Path(root, "verl/trainer/config")), version_base=None):
            config = hydra.compose("ppo_megatron_trainer", overrides)
        critic = omega_conf_to_dataclass(config.critic)
        of_worker = TrainingWorkerConfig(
            model_type="value_model", model_config=critic.model, engine_config=critic.engine,
            optimizer_config=critic.optim, checkpoint_config=critic.checkpoint, profiler_config=None, extra_context={},
        )  # fmt: skip
        critic.engine.max_token_len_per_gpu = critic.ppo_max_token_len_per_gpu
        cls = RayClassWithInitArgs(cls=ray.remote(TrainingWorker), config=of_worker)
        group = RayWorkerGroup(
            resource_pool=RayResourcePool([CP], name_prefix="critic"),
            ray_cls_with_init=create_colocated_worker_cls(class_dict={"critic": cls}), device_name="cuda",
        )  # fmt: skip
        critics = group.spawn(prefix_set={"critic"})["critic"]
        critics.reset()
        losses = importlib.import_module("verl.workers.utils.losses")
        critics.set_loss_fn(partial(losses.value_loss, config=critic))
        critics.train_batch(batch()).get()
        gradients = ray.get([worker.__ray_call__.remote(gradient_of) for worker in critics.workers])
        return gradients, lines()


@pytest.mark.parametrize("way", ["own", "external_lib", "variable"])
def test_a_critic_in_a_pool_of_its_own(way: str, record_property: Any) -> None:
    """Its worker never imports `external_lib`: verl's driver does, and sends the pickled config."""
    ((gradients, lines),) = run_ranks(1, drive, checkout(VERL), way == "external_lib", way == "variable")
    print(*lines, sep="\n")
    error = max(relative_error(gradient, right_gradient()) for gradient in gradients)
    setting = {"own" if way == "own" else "ours": error}
    record_errors(record_property, VERL, "started: critic of its own pool, CP 2 with per-token loss", **setting)
    if way == "own":
        assert error > 1e-2
        assert not lines
    else:
        assert error < TOLERANCE
        assert any(line.startswith("megatron_rl_loss in verl worker 0: replaced") for line in lines)
        assert any("aggregation proved" in line for line in lines)
