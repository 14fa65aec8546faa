"""verl's policy and critic from their own start: VERL_PATH=~/verl, and Ray.

Real: verl's example script, its Hydra config, dataclasses and `main`, which starts Ray, its trainer's `init` with
resource pools and worker groups, the workers of policy and critic in Ray, TransferQueue, the trainer's `_update_actor`
and `_update_critic`, the Megatron engine's `train_batch` with its forward function, its cut of rows over CP ranks and
its gather, `ppo_loss` and `value_loss`. Stubbed: `uv`, the GPU, the sampler and what manages it, rewards, the data
loader, Hugging Face's config and tokenizer, and the models, tables of logits and of values whose optimizers keep
gradients.
"""

import importlib
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron_on_cpu
import oracle
import pytest
import torch
import torch.distributed as dist
import verl_launch
from checkouts import VERL, checkout, record_errors
from logit_table import KeepsGradients, logits
from ranks import run_ranks
from ray_workers import local_ray
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
TOLERANCE = 2e-6
CLIP, CLIP_C, ENTROPY, KL = 0.2, 3.0, 0.01, 0.1
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
TABLE = torch.linspace(-1, 1, TOKENS + 1)  # the value, and the logit of the next token, at each token; the last pads
RETURNS = torch.linspace(1, -1, TOKENS).roll(3)
ADVANTAGES = torch.linspace(-2, 2, TOKENS).roll(5)
OLD, REFERENCE = (-3.4 + torch.linspace(-1, 1, TOKENS).roll(shift) for shift in (2, 9))
_OF_BOTH: tuple[str, ...] = (
    f"ppo_micro_batch_size_per_gpu={ROWS_OF_A_MICROBATCH}",
    "ppo_mini_batch_size=6",
    "loss_agg_mode=token-mean",
)
_OF_BOTH += (f"megatron.context_parallel_size={CP}",)
SETTINGS = [
    *("algorithm.adv_estimator=gae", "data.train_batch_size=6", f"trainer.n_gpus_per_node={CP}", "trainer.nnodes=1"),
    *("trainer.resume_mode=disable", "critic.model.path=none", *(f"critic.{setting}" for setting in _OF_BOTH)),
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
        initialize_global_process_group_ray=initialize_process_group, set_numa_affinity=lambda: None,
        FlopsCounter=lambda config: SimpleNamespace(estimate_flops=lambda *_, **__: (1.0, 1.0)),
        get_device_name=lambda: "cpu",
    )  # fmt: skip
    engine = importlib.import_module("verl.workers.engine.megatron.transformer_impl")
    vars(engine).update(get_device_id=lambda: torch.device("cpu"), get_device_name=lambda: "cpu")
    vars(engine)["MegatronEngine"].initialize = initialize


def initialize_process_group(timeout_second: Any) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))


def initialize(engine: Any) -> None:
    """As the engine's own, on the thread on which Ray runs an actor's methods where one of them is a coroutine."""
    if threading.current_thread() is not threading.main_thread():
        megatron_on_cpu.redirect_this_thread()
    of_values = "Value" in type(engine).__name__
    model = table_model(TABLE.tolist(), per_token=True, forward=values if of_values else logits)
    model.module.pre_process = model.module.post_process = True
    engine.module, engine.optimizer = [model], KeepsGradients(model)
    engine.lr_scheduler, engine.optimizer.param_groups = SimpleNamespace(step=lambda increment: None), [{"lr": 0.0}]
    engine.tf_config = model.config


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


def right_gradients() -> dict[str, torch.Tensor]:
    """Of the token means of the policy's loss with its terms and of half the critic's squared error, in float64."""
    gradients = {}
    for role in ("policy", "critic"):
        table, begin, samples = TABLE.double().requires_grad_(), 0, []
        for prompt, mask in ROWS:
            at = torch.arange(begin + prompt - 1, begin + prompt - 1 + len(mask))  # of the token before each
            losses = policy_losses(table[at], at) if role == "policy" else 0.5 * (table[at] - RETURNS[at].double()) ** 2
            samples.append(oracle.Sample(losses, torch.tensor(mask).float()))
            begin += prompt + len(mask)
        (gradients[role],) = torch.autograd.grad(oracle.step_loss("token_mean", samples, None), table)
    return gradients


def policy_losses(entries: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """PPO's clipped loss with an entropy bonus and a KL penalty; each logit stands beside TOKENS logits of 0."""
    old, reference, advantages = (column[at].double() for column in (OLD, REFERENCE, ADVANTAGES))
    normalizer = torch.log(entries.exp() + TOKENS)
    log_probs = entries - normalizer
    ratio = (log_probs - old).exp()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
    losses = torch.where(advantages < 0, torch.minimum(-advantages * CLIP_C, losses), losses)
    entropy = normalizer - log_probs.exp() * entries
    return losses - ENTROPY * entropy + KL * (log_probs - reference)


def gradients_of(worker: Any) -> dict[str, torch.Tensor]:
    """By the role of each model that a worker trains."""
    workers = {role: getattr(inner, "actor", inner) for role, inner in worker.worker_dict.items()}
    kept = {role: inner.engine.optimizer.gradients for role, inner in workers.items()}
    return {"critic" if role == "critic" else "policy": gradients[0] for role, gradients in kept.items() if gradients}


def make_trainer(config: Any, critic_apart: bool) -> Any:
    """verl's own for `config`, without data and with the critic in a pool of its own, if asked for."""
    from verl.trainer.ppo.utils import Role

    v1 = importlib.import_module("verl.trainer.ppo.v1.trainer_sync")

    class Trainer(v1.PPOTrainerSync):  # type: ignore[misc,name-defined]
        def _init_dataloader(self) -> None: ...

        def _init_resource_pool_mgr(self) -> None:
            super()._init_resource_pool_mgr()
            if critic_apart:
                self.resource_pool_manager.resource_pool_spec["critic_pool"] = [CP]
                self.resource_pool_manager.mapping[Role.Critic] = "critic_pool"

    return Trainer(config)


class Runner:
    """In place of verl's `TaskRunnerV1`, which would sample: a step of policy and critic on `fields`."""

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
        trainer._update_actor(batch, {})
        trainer._update_critic(batch, {})
        workers = {w for group in (trainer.actor_rollout_wg, trainer.critic_wg) for w in group.workers}
        self.gradients = ray.get([worker.__ray_call__.remote(gradients_of) for worker in workers])
        tq.close()

    def result(self) -> Any:
        return self.gradients


def drive(root: str, overrides: list[str], critic_apart: bool) -> tuple[list[dict[str, torch.Tensor]], list[str]]:
    """verl's `main` up to a step of its policy and critic: gradients by role, workers' lines."""
    runners: list[Any] = []

    def remote() -> Any:
        runners.append(ray.remote(Runner).remote(critic_apart))
        return runners[0]

    with local_ray(__name__, root, gpus=CP * (1 + critic_apart), by_engine=True) as lines:
        main(overrides, SimpleNamespace(remote=remote))
        return ray.get(runners[0].result.remote()), lines()


@pytest.mark.parametrize(("way", "critic_apart"), [(OWN, False), (LIB, False), (LIB, True), (SCRIPT, False)])
def test_a_policy_and_its_critic(way: str, critic_apart: bool, tmp_path: Path, record_property: Any) -> None:
    """The worker of a critic that is apart never imports `external_lib`: verl's driver sends it its loss and config.

    What the script sets reaches any process.
    """
    root = checkout(VERL)
    overrides = ["model_engine=megatron", *SETTINGS]
    if way == LIB:
        overrides += EXTERNAL_LIB
    elif way == SCRIPT:
        overrides = [*overrides_of(RECIPE, root, tmp_path), *SETTINGS, *SMALL]
    ((gradients, lines),) = run_ranks(1, drive, root, overrides, critic_apart)
    print(*lines, sep="\n")
    for role, right in right_gradients().items():
        errors = [relative_error(of_worker[role], right) for of_worker in gradients if role in of_worker]
        assert len(errors) == CP
        assert max(errors) < TOLERANCE if way != OWN else min(errors) > 1e-2
        setting = {"critic": "started: critic", "policy": "started: policy"}[role] + ", CP 2 with per-token loss"
        record_errors(record_property, VERL, setting, **{"own" if way == OWN else "ours": max(errors)})
    of_policy, of_critic = (
        f"megatron_rl_loss: {', '.join(f'token_mean on {term}' for term in terms)}, aggregation proved on"
        for terms in (("verl's loss", "entropy", "kl", "advantages"), ("verl's loss",))
    )
    for line in "megatron_rl_loss in verl worker 0: replaced", of_policy, of_critic:
        assert any(found.startswith(line) for found in lines) == (way != OWN), (line, lines)
