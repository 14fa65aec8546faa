"""RLinf's own rows, loss, scaling and schedule call with our factors, from a checkout: RLINF_PATH=~/RLinf.

Real: `RolloutResult.to_actor_batch`, `MegatronActor.training_step` with its dynamic micro-batches, its packing, its
count of valid tokens, its policy loss and KL penalty; Megatron's schedule and DDP. The model is a table of logits.
Replaced: Ray, the optimizer.
"""

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import bigram_step
import pytest
import torch
from bigram_step import BETA, CLIP_HIGH, CLIP_LOW, LENGTH, TOLERANCE, assert_exact, bigram_model, compare, errors_of, k3
from checkouts import RLINF, Settings, checkout, load
from plants import Plant, assert_stops
from ranks import run_ranks
from replacements import aggregated
from rlinf_rows import LEFT, PROMPT, rollout_of_rank
from table_step import start
from torch import Tensor

from megatron_rl_loss.engines import token_mean

MODES: dict[str, dict[str, Any]] = {
    "token_mean": {},
    "sample_mean": {"units": "active", "kl": "token_mean"},
    "prompt_mean": {"kl": "token_mean"},
    "constant": {"divisor": 40.0, "kl": "token_mean"},
    "token_sum": {"divisor": 25.0, "kl": "token_mean"},
}
ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k3": k3,
    "low_var_kl": k3,
    "kl": lambda log_probs, reference: log_probs - reference,
    "k2": lambda log_probs, reference: (log_probs - reference) ** 2 / 2,
    "abs": lambda log_probs, reference: (log_probs - reference).abs(),
}
make_batch = bigram_step.make_batch

pytestmark = pytest.mark.slow


def without_empty_rows() -> dict[str, Tensor]:
    """The rows, each with a token to train on: RLinf alone drops others in the micro-batch of a masked row."""
    batch = make_batch()
    return batch | {"sample_mask": torch.ones_like(batch["sample_mask"])}


def with_many_empty_rows() -> dict[str, Tensor]:
    """Rows of which some are fully masked: the first of a micro-batch and whole micro-batches, on one rank alone.

    Others have one token to train on.
    """
    batch = make_batch()
    batch["token_mask"][[2, 9], 4:] = 0
    batch["sample_mask"][[0, 4, 6, 8, 10]] = 0
    return batch


class NoGroup:
    def launch(self, cluster: Any) -> None: ...


def entropy_and_log_probs(logits: Tensor, labels: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """In the place of RLinf's function, whose entropy has another gradient."""
    log_probs = logits.log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1), log_probs.gather(-1, labels[..., None]).squeeze(-1)


def train(root: str, cp: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """On a rank: the error of each case's gradient."""
    state = start(cp=cp)
    actors, bases, results, _ = load(
        RLINF, root, "rlinf.workers.actor.megatron_actor_worker", "rlinf.workers.megatron_worker",
        "rlinf.data.schema.reasoning_results", "rlinf.algorithms.losses",
    )  # fmt: skip
    vars(importlib.import_module("rlinf.scheduler.worker.worker_group"))["WorkerGroup"] = NoGroup
    results.Worker = SimpleNamespace(torch_device_type="cpu")
    of_cases, of_rlinf = [], actors.vocab_parallel_entropy_and_log_probs
    for case in cases:
        actors.vocab_parallel_entropy_and_log_probs = entropy_and_log_probs if case.get("exact") else of_rlinf
        bigram_step.make_batch = without_empty_rows if case.get("full") else case.get("rows", make_batch)
        if "ids" in case:
            bigram_step.make_batch = partial(bigram_step.with_prompts, make_batch(), case["ids"])
        model = bigram_model()
        model.module.pre_process = model.module.post_process = True
        algorithm = Settings(
            use_valid_token_scale=case.get("scale", True), loss_type="actor",
            loss_agg_func=case.get("loss_agg_func", "token-mean"),
            sampling_params=Settings(temperature=1.0), n_minibatches=1, entropy_bonus=case.get("entropy", 0.0),
            group_size=case.get("group_size", 8),
            **case.get("correction", {}), **case.get("config", {}),
        )  # fmt: skip
        algorithm.get = lambda name, default=None, algorithm=algorithm: vars(algorithm).get(name, default)
        actor: Any = object.__new__(type("Actor", (actors.MegatronActor,), {}))
        optimizer = Settings(step=lambda: (True, 0.0, None), param_groups=[{"lr": 0.0}], zero_grad=lambda: None)
        vars(actor).update(
            cfg=Settings(algorithm=algorithm, runner=Settings(task_type="reasoning")), model=[model], role="actor",
            _cfg=Settings(optim=Settings()), transformer_config=model.config, response_len=LENGTH - PROMPT,
            loss_agg_func=bases.masked_mean, clip_ratio_low=CLIP_LOW, clip_ratio_high=CLIP_HIGH, clip_ratio_c=None,
            calculate_entropy="entropy" in case, calculate_entropy_loss="entropy" in case,
            kl_beta=case.get("beta", BETA), kl_penalty_type=case.get("estimator", "k3"),
            enable_dynamic_batch_size=True, max_tokens_per_mbs=24, variable_seq_lengths=True, use_profiler=False,
            total_batch_size_per_dp=1, optimizer=optimizer, lr_scheduler=Settings(step=lambda increment: None),
        )  # fmt: skip
        dp_rank, dp, is_corrected = (
            state.get_data_parallel_rank(),
            state.get_data_parallel_world_size(),
            "correction" in case,
        )
        rollout = rollout_of_rank(dp_rank, dp, results, is_corrected)
        if case.get("images"):
            rollout.multi_modal_inputs = [{}] * rollout.num_sequence
        batch = rollout.to_actor_batch(PROMPT + LEFT, LENGTH + LEFT, 0)
        actor._setup_valid_token_scale(batch)
        with aggregated(type(actor), case):
            actor.training_step(iter([batch]) if case.get("pipeline") else batch)
        of_cases.append(
            {
                "errors": errors_of(
                    model, case, kl=ESTIMATORS[actor.kl_penalty_type], corrected=is_corrected,
                    entropy=case.get("entropy", 0.0),
                ),
                "microbatches": actor.num_microbatches,
            }
        )  # fmt: skip
    return of_cases


def launch(root: str) -> str:
    """On a rank, as in a driver: what the launch of RLinf's own class says beside an aggregation."""
    with_ray = replace(
        RLINF, stand_ins=tuple(name for name in RLINF.stand_ins if name not in ("ray", "rlinf.scheduler"))
    )
    (actors,) = load(with_ray, root, "rlinf.workers.actor.megatron_actor_worker")
    mine: Any = type("Mine", (actors.MegatronActor,), {})
    token_mean.aggregate(mine, "prompt_mean")
    with pytest.raises(AttributeError, match="num_accelerators"):  # of no cluster
        mine.create_group(None, None).launch(cluster=None)
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the text is compared in the test
        actors.MegatronActor.create_group(None, None).launch(cluster=None)
    return str(refused.value)


def test_a_group_of_another_class_does_not_train_unnoticed() -> None:
    pytest.importorskip("ray")
    (refused,) = run_ranks(1, launch, checkout(RLINF))
    assert refused.startswith("launch of a group of MegatronActor, beside aggregate(Mine, ...)")


def test_every_mode_is_exact(record_property: Any) -> None:
    cases: list[dict[str, Any]] = [{"mode": mode, "settings": settings} for mode, settings in MODES.items()]
    cases += [case | {"rows": with_many_empty_rows} for case in cases]
    assert_exact(record_property, train, RLINF, cases, worlds=[(1, 1), (2, 1)])


def test_a_correction_of_advantages_is_no_fault(record_property: Any) -> None:
    """RLinf multiplies them by truncated importance weights before its loss function."""
    correction = {"importance_sampling_fix": True, "importance_sampling_clip": 2.0}
    case = {"mode": "prompt_mean", "settings": MODES["prompt_mean"], "correction": correction}
    assert_exact(record_property, train, RLINF, [case], worlds=[(2, 1)])


def test_terms_beside_the_policy_loss_are_proved(record_property: Any) -> None:
    """KL penalties of all estimators that RLinf has, and an entropy bonus.

    In RLinf a3816b59 the entropy's gradient by logits is wrong, which is no matter of weights: it takes logits less
    their maximum from a mean of logits, and a buffer that the gradient of log-probs has written to.
    """
    case: dict[str, Any] = {"mode": "prompt_mean", "settings": MODES["prompt_mean"] | {"entropy": "token_mean"}}
    says = "token_mean on kl, token_mean on entropy, aggregation proved on"
    bonus = case | {"entropy": 0.01, "says": says}
    cases = [case | {"estimator": estimator} for estimator in ESTIMATORS] + [bonus | {"exact": True}]
    assert_exact(record_property, train, RLINF, cases, worlds=[(2, 1)])
    for (with_theirs,) in run_ranks(2, train, checkout(RLINF), 1, [bonus]):
        assert with_theirs["errors"]["gradient"] > 1e-3


def test_theirs_is_the_token_mean(record_property: Any) -> None:
    case = {"mode": "token_mean", "settings": {}, "setting": "token mean, `use_valid_token_scale`", "full": True}
    ((same, _),) = compare(record_property, train, RLINF, [case], (2, 1))
    assert same["microbatches"] > 1
    assert same["errors"]["gradient"] < TOLERANCE


_ACTOR, _WORKER = "rlinf/workers/actor/megatron_actor_worker.py", "rlinf/workers/megatron_worker.py"
_KL, _KL_ADDED = "token_mean on kl: tokens weigh", "loss = loss + kl_loss * self.kl_beta"
PLANTS = [
    Plant("scaling doubled", {_ACTOR: ("loss *= loss_scale.item()", "loss *= 2 * loss_scale.item()")}),
    Plant("micro-batches not undone", {_ACTOR: ("                        * self.num_microbatches\n", "")}),
    Plant(
        "argument renamed",
        {_WORKER: ("training_step(self, batch:", "training_step(self, rows:")},
        r"RLinf with Actor.training_step\(self, rows\): this package expects",
    ),
    Plant(
        "policy loss by another name",
        {
            _ACTOR: (
                "metrics_data = policy_loss(",
                "metrics_data = __import__('sys').modules['rlinf.algorithms.registry'].policy_loss(",
            )
        },
        "Actor.training_step called no policy loss, or was not called. Use RLinf a3816b59",
    ),
    Plant(
        "log-probs exchanged with old ones",
        {
            _ACTOR: (
                "logprobs=curr_logprobs,\n                    old_logprobs=old_logprobs,",
                "logprobs=old_logprobs,\n                    old_logprobs=curr_logprobs,",
            )
        },
        "tokens weigh 0 times what they should",
    ),
    Plant(
        "a masked row skips its micro-batch",
        {
            _ACTOR: (
                'mask = batch["response_mask"][:, -response_len:]\n\n                loss',
                'mask = batch["response_mask"][:, -response_len:]; mask = mask * mask[0].any()\n\n                loss',
            )
        },
    ),
    Plant(
        "valid tokens counted on one rank",
        {
            _WORKER: (
                "global_valid_token, group=parallel_state.get_data_parallel_group()",
                "global_valid_token, group=parallel_state.get_tensor_model_parallel_group()",
            )
        },
        "global_valid_token=.* in a step of .* tokens and n_minibatches=1",
        world=(2, 1),
    ),
    Plant(
        "valid tokens counted twice",
        {_WORKER: ("self.global_valid_token = global_valid_token", "self.global_valid_token = 2 * global_valid_token")},
        "global_valid_token=.* in a step of .* tokens and n_minibatches=1",
    ),
    Plant("mask of all tokens", {_ACTOR: ("loss_mask=mask,", "loss_mask=torch.ones_like(mask),")}),
    Plant("mask shifted", {_ACTOR: ("loss_mask=mask,", "loss_mask=mask.roll(1),")}),
    Plant(
        "loss not linear in advantages",
        {_ACTOR: ('advantages = batch["advantages"]', 'advantages = batch["advantages"].clamp(-1, 1)')},
    ),
    Plant(
        "KL penalty times 10", {_ACTOR: ("kl_loss * self.kl_beta", "10 * kl_loss * self.kl_beta")}, f"{_KL} 10 times"
    ),
    Plant("KL penalty added twice", {_ACTOR: (_KL_ADDED, f"{_KL_ADDED}; {_KL_ADDED}")}, f"{_KL} 2 times"),
    Plant("KL penalty of another estimator", {_ACTOR: ("self.kl_penalty_type)", '"k2")')}, rf"{_KL} 0\.9"),
    Plant("KL penalty of all tokens", {_ACTOR: ("(kld, mask)", "(kld, torch.ones_like(mask))")}, "token_mean on kl: "),
    Plant(
        "entropy bonus of the other sign",
        {_ACTOR: ("loss - self.cfg.algorithm.entropy_bonus", "loss + self.cfg.algorithm.entropy_bonus")},
        "token_mean on entropy: tokens weigh -1 times",
        {"entropy": 0.01},
    ),
    Plant(
        "log-probs of the tokens after",
        {
            _ACTOR: (
                'output["log_probs"][\n                    :, -response_len - 1 : -1\n',
                'output["log_probs"][:, -response_len:\n',
            )
        },
        "token_mean on kl: tokens weigh 0",
    ),
]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.fault)
def test_a_fault_stops_all_ranks(plant: Plant, record_property: Any, tmp_path: Any) -> None:
    assert_stops(record_property, RLINF, train, plant, tmp_path)
