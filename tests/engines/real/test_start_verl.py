"""verl's policy and critic from their own start: VERL_PATH=~/verl, and Ray.

Real: verl's example script, its Hydra config, dataclasses and `main`, which starts Ray, its trainer's `init` with
resource pools and worker groups, the workers of policy and critic in Ray, TransferQueue, the trainer's
`_compute_old_log_prob`, `_update_actor`, `_update_critic`, `_save_checkpoint` and `_load_checkpoint`, the Megatron
engine's `initialize` and `train_batch` with its forward function, its cut of rows over CP ranks and its gather, its
offload and load of weights and optimizer around each step, its checkpoints, `ppo_loss` and `value_loss`, and Megatron's
optimizer. Stubbed: `uv`, the GPU, the sampler and what manages it, rewards, the data loader, Hugging Face's config and
tokenizer, and the models, tables of logits and of values.
"""

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
import verl_launch
from checkouts import VERL, checkout, record_errors
from logit_table import logits
from ranks import run_ranks
from ray_workers import LIMIT, lines_of_workers, local_ray, nothing, on_cpu, on_each
from start_stages import ConstantRate, Launch, Start, adam, assert_said, errors_of_stages, record_stages, run_stages
from table_step import relative_error, table_model
from verl_launch import RECIPE, main, overrides_of

ray: Any = pytest.importorskip("ray")
hydra: Any = pytest.importorskip("hydra")
for _package in ("tensordict", "torchdata", "transfer_queue"):
    pytest.importorskip(_package)
pytestmark = pytest.mark.slow

CP, ROWS_OF_A_MICROBATCH = 2, 2
ENGINE = verl_launch.ENGINE
INSTALL = "megatron_rl_loss.engines.verl_install"
CLIP, CLIP_C, CLIP_VALUE, ENTROPY, KL = 0.2, 3.0, 0.5, 0.01, 0.1
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
#: The value, and the logit of the next token, at each token; then what pads, and makes part of it of each rank's.
VOCABULARY = 100
TABLE = torch.cat([torch.linspace(-1, 1, TOKENS), torch.zeros(VOCABULARY - TOKENS)])
RETURNS = torch.linspace(1, -1, TOKENS).roll(3)
ADVANTAGES = torch.linspace(-2, 2, TOKENS).roll(5)
OLD, REFERENCE = (-4.5 + torch.linspace(-1, 1, TOKENS).roll(shift) for shift in (2, 9))
_OF_BOTH: tuple[str, ...] = (
    f"ppo_micro_batch_size_per_gpu={ROWS_OF_A_MICROBATCH}",
    "ppo_mini_batch_size=6",
    "loss_agg_mode=token-mean",
)
_OF_BOTH += (f"megatron.context_parallel_size={CP}", "megatron.use_dist_checkpointing=True")
_OF_BOTH += tuple(f"megatron.{state}_offload=True" for state in ("param", "grad", "optimizer"))
SETTINGS = [
    *("algorithm.adv_estimator=gae", "data.train_batch_size=6", f"trainer.n_gpus_per_node={CP}", "trainer.nnodes=1"),
    *("critic.model.path=none", *(f"critic.{setting}" for setting in _OF_BOTH)),
    *(f"actor_rollout_ref.actor.{setting}" for setting in _OF_BOTH),
    *(
        f"actor_rollout_ref.{setting}"
        for setting in (
            *("model.path=none", "rollout.name=sglang", "rollout.tensor_model_parallel_size=1"),
            *("rollout.log_prob_micro_batch_size_per_gpu=2", "ref.log_prob_micro_batch_size_per_gpu=2"),
            *(f"ref.megatron.context_parallel_size={CP}", f"actor.entropy_coeff={ENTROPY}"),
            *("actor.use_kl_loss=True", f"actor.kl_loss_coef={KL}", "actor.kl_loss_type=kl"),
        )
    ),
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
]
#: How a user asks for the library: not, in verl's settings, or with the recipe's line behind verl's own script.
OWN, LIB, SCRIPT = "own", "external_lib", "script"
EXTERNAL_LIB = [f"{model}.model.external_lib={INSTALL}" for model in ("actor_rollout_ref", "critic")]
#: In place of what verl's script sets for eight GPUs and long responses. Its dynamic batches stay: of 16 tokens.
SMALL = [
    f"actor_rollout_ref.{role}.megatron.{size}_model_parallel_size=1"
    for role in ("actor", "ref")
    for size in ("tensor", "pipeline")
]
SMALL += ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8", "critic.ppo_max_token_len_per_gpu=8"]
SMALL += ["actor_rollout_ref.rollout.n=1"]


def stub() -> None:
    """What a machine without a GPU and checkpoints lacks."""
    torch.cuda.mem_get_info = lambda *_: (2**40, 2**40)
    model = importlib.import_module("verl.workers.config.model")
    config = SimpleNamespace(architectures=["Table"], tie_word_embeddings=False)
    unused = ("copy_to_local", "hf_tokenizer", "hf_processor", "get_generation_config", "update_model_config")
    vars(model).update(dict.fromkeys(unused, nothing))
    ids = SimpleNamespace(bos_token_id=0, eos_token_id=0, pad_token_id=0, chat_template=None)
    vars(model)["hf_tokenizer"] = lambda *_, **__: ids
    vars(model)["AutoConfig"] = SimpleNamespace(from_pretrained=lambda *_, **__: config)
    workers = importlib.import_module("verl.workers.engine_workers")
    vars(workers).update(
        initialize_global_process_group_ray=initialize_process_group, set_numa_affinity=lambda: None,
        FlopsCounter=lambda config: SimpleNamespace(estimate_flops=lambda *_, **__: (1.0, 1.0)),
    )  # fmt: skip
    engine = importlib.import_module("verl.workers.engine.megatron.transformer_impl")
    vars(engine)["get_device_id"] = lambda: torch.device("cpu")
    of_engine = vars(engine)["MegatronEngine"]
    of_engine.initialize = on_cpu(of_engine.initialize)
    of_engine._build_tf_config, of_engine._build_megatron_module = build_config, build_table
    of_engine._build_optimizer = lambda self: adam(self.module[0])
    of_engine._build_lr_scheduler = lambda self: ConstantRate()


def initialize_process_group(timeout_second: Any) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))


def build_config(engine: Any) -> None:
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(1)  # verl's own seed is of a GPU
    engine.is_value_model = engine.model_config.model_type == "value_model"
    engine.share_embeddings_and_output_weights, engine.param_dtype = False, torch.float32
    engine.bridge = engine.provider = engine.peft_cls = engine.tf_config = None


def build_table(engine: Any) -> list[Any]:
    forward = values if engine.is_value_model else logits
    model = table_model(TABLE.tolist(), per_token=True, forward=forward, use_distributed_optimizer=True)
    model.module.pre_process = model.module.post_process = True
    engine.tf_config = model.config
    return [model]


def values(table: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    return table[input_ids][..., None]


def fields() -> Any:
    """The rows as verl's rollouts and its trainer put them into TransferQueue, jagged."""
    from tensordict import TensorDict

    first = torch.tensor([0, *(prompt + len(mask) for prompt, mask in ROWS)]).cumsum(0).tolist()
    ids = [torch.arange(first[i], first[i + 1]) for i in range(len(ROWS))]

    def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    responses = [row[prompt:] for row, (prompt, _) in zip(ids, ROWS, strict=True)]
    masks = jagged([torch.tensor(mask) for _, mask in ROWS])
    of_responses = {"values": TABLE, "returns": RETURNS, "advantages": ADVANTAGES, "old_log_probs": OLD}
    of_responses["ref_log_prob"] = REFERENCE
    return TensorDict(
        {
            "input_ids": jagged(ids), "response_mask": masks, "loss_mask": masks, "responses": jagged(responses),
            "position_ids": jagged([torch.arange(len(row)) for row in ids]),
            "prompts": jagged([row[:prompt] for row, (prompt, _) in zip(ids, ROWS, strict=True)]),
            **{name: jagged([table[row - 1] for row in responses]) for name, table in of_responses.items()},
        }, batch_size=len(ROWS),
    )  # fmt: skip


def gradient_of(role: str, table: torch.Tensor) -> torch.Tensor:
    """Of the token mean of the policy's loss with its terms, or of the critic's loss, in float64."""
    table = table.clone().requires_grad_()
    samples = []
    for at, mask in entries_before():
        losses = policy_losses(table[at], at) if role == "policy" else value_losses(table[at], at)
        samples.append(oracle.Sample(losses, mask.float()))
    (gradient,) = torch.autograd.grad(oracle.step_loss("token_mean", samples, None), table)
    return gradient


def entries_before() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each row: the entries of the tokens before those of its response, and its mask."""
    begins = torch.tensor([0, *(prompt + len(mask) for prompt, mask in ROWS)]).cumsum(0).tolist()
    return [
        (torch.arange(begin + prompt - 1, begin + prompt - 1 + len(mask)), torch.tensor(mask))
        for begin, (prompt, mask) in zip(begins, ROWS, strict=False)
    ]


def log_probs_and_normalizer(entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each logit stands beside zeros."""
    normalizer = torch.log(entries.exp() + VOCABULARY - 1)
    return entries - normalizer, normalizer


def policy_losses(entries: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """PPO's clipped loss with an entropy bonus and a KL penalty."""
    old, reference, advantages = (column[at].double() for column in (OLD, REFERENCE, ADVANTAGES))
    log_probs, normalizer = log_probs_and_normalizer(entries)
    ratio = (log_probs - old).exp()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
    losses = torch.where(advantages < 0, torch.minimum(-advantages * CLIP_C, losses), losses)
    entropy = normalizer - log_probs.exp() * entries
    return losses - ENTROPY * entropy + KL * (log_probs - reference)


def value_losses(entries: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Half the squared error, of values or of those clipped near what they were in the rollout, the larger."""
    old, returns = TABLE[at].double(), RETURNS[at].double()
    near = torch.maximum(torch.minimum(entries, old + CLIP_VALUE), old - CLIP_VALUE)
    return 0.5 * torch.maximum((entries - returns) ** 2, (near - returns) ** 2)


def error_of_log_probs(rows: Any) -> float:
    """Of the log-probs of responses, a row each."""
    right = torch.cat([log_probs_and_normalizer(TABLE[at].double())[0] for at, _ in entries_before()])
    return relative_error(torch.cat([*rows.unbind()]), right)


def gradients_of(worker: Any) -> dict[str, list[torch.Tensor]]:
    """By the role of each model that a worker trains."""
    workers = {role: getattr(inner, "actor", inner) for role, inner in worker.worker_dict.items()}
    kept = {role: inner.engine.optimizer.gradients for role, inner in workers.items()}
    return {"critic" if role == "critic" else "policy": gradients for role, gradients in kept.items() if gradients}


def make_trainer(config: Any, critic_apart: bool) -> Any:
    """verl's own for `config`, without data and with the critic in a pool of its own, if asked for."""
    from verl.trainer.ppo.utils import Role

    v1 = importlib.import_module("verl.trainer.ppo.v1.trainer_sync")

    class Trainer(v1.PPOTrainerSync):  # type: ignore[misc,name-defined]
        def _init_dataloader(self) -> None:
            self.train_dataloader = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)

        def _init_resource_pool_mgr(self) -> None:
            super()._init_resource_pool_mgr()
            if critic_apart:
                self.resource_pool_manager.resource_pool_spec["critic_pool"] = [CP]
                self.resource_pool_manager.mapping[Role.Critic] = "critic_pool"

    return Trainer(config)


class Runner:
    """In place of verl's `TaskRunnerV1`, which would sample: stages of policy and critic on `fields`."""

    def __init__(self, critic_apart: bool) -> None:
        self.critic_apart = critic_apart

    def run(self, config: Any) -> None:
        tq = importlib.import_module("transfer_queue")
        config.transfer_queue.enable = True
        tq.init(config.transfer_queue)
        trainer = make_trainer(config, self.critic_apart)
        trainer.init()
        keys = [f"row {i}" for i in range(len(ROWS))]
        batch = tq.kv_batch_put(keys, "train", fields(), [{} for _ in keys])

        def evaluate() -> float:
            others, sampled = [f"to evaluate {i}" for i in range(len(ROWS))], fields()
            sampled["rollout_log_probs"] = sampled["old_log_probs"]  # which verl compares
            trainer._compute_old_log_prob(tq.kv_batch_put(others, "train", sampled, [{} for _ in others]), {})
            data = tq.kv_batch_get(keys=others, partition_id="train", select_fields=["old_log_probs"])
            return error_of_log_probs(data["old_log_probs"])

        def step() -> None:
            trainer._update_actor(batch, {})
            trainer._update_critic(batch, {})

        def save() -> None:
            trainer.global_steps = 2
            trainer._save_checkpoint()

        workers = {w for group in (trainer.actor_rollout_wg, trainer.critic_wg) for w in group.workers}
        self.launch = run_stages(
            trainer.global_steps > 0, lines=lines_of_workers, gradients=lambda: on_each(workers, gradients_of),
            evaluate=evaluate, step=step, save=save,
        )  # fmt: skip
        tq.close()

    def launched(self) -> Launch:
        return self.launch


def drive(root: str, overrides: list[str], critic_apart: bool) -> Launch:
    """verl's `main` up to steps of its policy and critic."""
    runners: list[Any] = []

    def remote() -> Any:
        runners.append(ray.remote(Runner).remote(critic_apart))
        return runners[0]

    with local_ray(__name__, root, gpus=CP * (1 + critic_apart), by_engine=True):
        main(overrides, SimpleNamespace(remote=remote))
        launch: Launch = ray.get(runners[0].launched.remote())
        return launch


@pytest.mark.timeout(2 * LIMIT + 100)
@pytest.mark.parametrize(("way", "critic_apart"), [(OWN, False), (LIB, False), (LIB, True), (SCRIPT, False)])
def test_a_policy_and_its_critic(way: str, critic_apart: bool, tmp_path: Path, record_property: Any) -> None:
    """The worker of a critic that is apart never imports `external_lib`: verl's driver sends it its loss and config.

    What the script sets reaches any process.
    """
    root = checkout(VERL)
    overrides, starts = ["model_engine=megatron", *SETTINGS], list[Start]()
    if way == LIB:
        overrides += EXTERNAL_LIB
    elif way == SCRIPT:
        overrides = [*overrides_of(RECIPE, root, tmp_path), *SETTINGS, *SMALL]
    overrides += [f"trainer.default_local_dir={tmp_path}/checkpoints"]
    resumes = ["trainer.resume_mode=disable", "trainer.resume_mode=auto"][: 1 + (way == LIB and not critic_apart)]
    launches = [run_ranks(1, drive, root, [*overrides, resume], critic_apart)[0] for resume in resumes]
    for role in "policy", "critic":
        of_role = [
            launch._replace(gradients=[of_worker[role] for of_worker in launch.gradients if role in of_worker])
            for launch in launches
        ]
        start = errors_of_stages(of_role, CP, partial(gradient_of, role), TABLE)
        start.check(way != OWN)
        setting = f"started: {role}, CP 2 with per-token loss"
        record_errors(record_property, VERL, setting, **{"own" if way == OWN else "ours": start.first})
        starts.append(start)
    if len(launches) == 2:
        record_stages(record_property, VERL, "`_compute_old_log_prob`", Start(*map(max, zip(*starts, strict=True))))
    of_policy = ", ".join(f"token_mean on {term}" for term in ("verl's loss", "entropy", "kl", "advantages"))
    for launch in launches:
        for proved in of_policy, "token_mean on verl's loss":
            assert_said(launch.lines, "verl", proved, way != OWN)
