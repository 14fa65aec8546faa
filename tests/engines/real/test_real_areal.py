"""AReaL's own micro-batches, loss, scaling and schedule call with our factors, from a checkout: AREAL_PATH=~/AReaL.

Real: `PPOActor.ppo_update` on trajectory groups, `MegatronPPOActor.train_batch` with its packing, its cut over
context-parallel ranks and what undoes it, its total of loss weights, `grpo_loss_fn`; Megatron's schedule and DDP. The
model is a table of logits, the optimizer keeps what Megatron hands it; torch's gather of log-probs is one for gloo.
"""

import logging
from typing import Any

import pytest
import torch
from areal_groups import groups_of_rank
from bigram_step import (
    CLIP_HIGH,
    CLIP_LOW,
    MASKED_ROWS,
    PROMPTS,
    SHORT_ROWS,
    TOLERANCE,
    assert_exact,
    bigram_model,
    compare,
    errors_of,
)
from checkouts import AREAL, Settings, checkout, load
from gloo_gather import all_gather
from plants import Plant, assert_stops, planted
from ranks import run_ranks
from replacements import aggregated
from table_step import run_schedule, start

MODES: dict[str, dict[str, Any]] = {
    "token_mean": {},
    "sample_mean": {"units": "active"},
    "prompt_mean": {"units": "active", "group_size": 8},
    "constant": {"divisor": 40.0},
    "token_sum": {"divisor": 25.0},
}
GSPO = {"importance_sampling_level": "sequence"}

pytestmark = pytest.mark.slow


def other(iterator: Any, model: Any) -> Any:
    return model(next(iterator)), lambda output: (output.sum(), {})


def regrouped(groups: list[dict[str, Any]], ids: list[int]) -> list[dict[str, Any]]:
    """The trajectory groups, with their rows put together by those ids."""
    longest = max(group["input_ids"].shape[1] for group in groups)

    def padded(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(values, (0, longest - values.shape[1])) if values.dim() == 2 else values

    rows = {name: torch.cat([padded(group[name]) for group in groups]) for name in groups[0]}
    held = [[i for i, other in enumerate(ids) if other == prompt_id] for prompt_id in dict.fromkeys(ids)]
    return [{name: values[chosen] for name, values in rows.items()} for chosen in held]


def train(root: str, cp: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """On a rank: the error of each case's gradient."""
    state = start(cp=cp)
    modules = ("areal.engine.megatron_engine", "areal.trainer.ppo.actor", "areal.utils.stats_tracker")
    engine, actors, trackers = load(AREAL, root, *modules)
    from areal.api.cli_args import MicroBatchSpec
    from areal.engine.megatron_utils import packed_context_parallel

    packed_context_parallel.dist_F.all_gather = all_gather
    groups = groups_of_rank(state.get_data_parallel_rank(), state.get_data_parallel_world_size())
    results = []
    for case in cases:

        class Actor(engine.MegatronPPOActor):  # type: ignore[misc, name-defined]
            def __init__(self) -> None: ...

            def _ensure_ready(self) -> None: ...

        model, actor = bigram_model(), Actor()
        sizes = {"pipeline_parallel_size": 1, "context_parallel_size": cp, "tensor_parallel_size": 1}
        optimizer = {
            "get_loss_scale": lambda case=case: torch.tensor(case.get("scale", 1.0)),
            "step": lambda: (True, 0.0, None),
        }
        cut: dict[str, int] = {"max_tokens_per_mb": 128} if case.get("tree") else {"n_mbs": case.get("n_mbs", 3)}
        config = Settings(
            mb_spec=MicroBatchSpec(**cut),
            pad_to_maximum=True, is_critic=False, temperature=1.0, ppo_n_minibatches=1, eps_clip=CLIP_LOW,
            eps_clip_higher=CLIP_HIGH, mask_no_eos_with_zero=False, prox_logp_method="recompute",
            logprobs_chunk_size=1024,
            **{"importance_sampling_level": "token", **case.get("config", {})},
        )  # fmt: skip
        actor.__dict__.update(
            model=[model], process_group_initialized=True, logger=logging.getLogger("actor"),
            device=torch.device("cpu"), parallel_strategy=Settings(**sizes), config=config,
            optimizer=Settings(zero_grad=lambda: None, param_groups=[{"lr": 0.0}], **optimizer),
            train=lambda: None, get_version=lambda: 0, actor=object.__new__(actors.PPOActor),
            enable_tree_training=case.get("tree", False), data_parallel_group=state.get_data_parallel_group(),
            **dict.fromkeys(("enable_fp8", "is_vision_model", "use_padded_seq"), False),
            **dict.fromkeys(("_deterministic", "use_model_packed_seq"), False),
            mcore_config=Settings(lm_head_loss_chunk_size=0),
            dtype=torch.float32, _awex_adapter=None, _dte_runtime_config=Settings(enabled=False),
        )  # fmt: skip
        actor.actor.__dict__.update(config=config, engine=actor, m2_threshold=None)
        with aggregated(Actor, case):
            run_schedule(other, iter([groups[0]["input_ids"]]), bigram_model(), 1)  # as a critic's trainer would
            if case.get("own_class"):
                actor.__class__ = engine.MegatronPPOActor
            actor.ppo_update(regrouped(groups, case["ids"]) if "ids" in case else list(map(dict, groups)))
        model.module.losses.main_grad /= case.get("scale", 1.0)  # as the optimizer would
        errors = errors_of(model, case, kl=None, of_samples=bool(case.get("config")))
        stats = {name: str(values) for name, values in trackers.DEFAULT_TRACKER.stats.items()}
        trackers.DEFAULT_TRACKER.stats.clear()
        results.append({"errors": errors, "gradient": model.module.losses.main_grad.tolist(), "stats": stats})
    return results


def test_every_mode_is_exact(record_property: Any) -> None:
    of_tokens = [{"mode": mode, "settings": settings} for mode, settings in MODES.items()]
    assert_exact(record_property, train, AREAL, [*of_tokens, {"mode": "sample_mean", "settings": {}, "config": GSPO}])


def test_tree_training_is_exact() -> None:
    """Rows in AReaL's own tries, whose log-probs it gathers for each row: weights and the proof are as without."""
    cases = [{"mode": mode, "settings": settings, "tree": True} for mode, settings in MODES.items()]
    for results in run_ranks(2, train, checkout(AREAL), 1, cases):
        assert max(result["errors"]["gradient"] for result in results) < TOLERANCE


def test_the_proof_changes_nothing() -> None:
    """Gradients and statistics stay; a micro-batch without a token to train on is counted."""
    case = {"mode": "sample_mean", "settings": {}, "n_mbs": 12}
    with_proof, without = run_ranks(1, train, checkout(AREAL), 1, [case, case | {"level": "off", "outcome": ""}])[0]
    assert with_proof == without
    assert with_proof["errors"]["gradient"] < TOLERANCE
    assert "ppo_actor/update/actor_loss" in with_proof["stats"]


def test_a_loss_scale_that_megatron_does_not_know_is_no_fault() -> None:
    """AReaL multiplies losses by it itself."""
    case = {"mode": "prompt_mean", "settings": {"group_size": 8}, "scale": 256.0}
    for (result,) in run_ranks(4, train, checkout(AREAL), 2, [case]):
        assert result["errors"]["gradient"] < TOLERANCE


def test_a_rank_without_a_token_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    masked = [row for row, prompt in enumerate(PROMPTS) if prompt % 2]  # all of the second rank
    monkeypatch.setenv(MASKED_ROWS, " ".join(map(str, masked)))
    monkeypatch.setenv(SHORT_ROWS, "0 6 8")
    settings: dict[str, Any] = {"prompt_mean": {"group_size": 8}, "sample_mean": {}}
    cases = [{"mode": mode, "settings": of_mode} for mode, of_mode in settings.items()]
    for results in run_ranks(4, train, checkout(AREAL), 2, cases):
        assert max(result["errors"]["gradient"] for result in results) < TOLERANCE


def test_corrections_are_no_faults() -> None:
    """Tokens that are rejected, gates, another old policy: at a ratio of 1 all tokens have the weights of the mode."""
    rejects = Settings(level="token", metric="ratio", action="mask", upper=1.01, lower=0.99, agg="mean")
    cases = [{"rejection_sampling": rejects}, {"use_sapo_loss": True, "sapo_tau_pos": 1.0, "sapo_tau_neg": 1.05}]
    run_ranks(
        1, train, checkout(AREAL), 1, [{"mode": "sample_mean", "settings": {}, "config": config} for config in cases]
    )


def test_the_order_of_the_losss_arguments_does_not_matter(tmp_path: Any) -> None:
    root = planted(AREAL, tmp_path, {_ENGINE: _EXCHANGED, _ACTOR: _ORDER})
    (result,) = run_ranks(1, train, root, 1, [{"mode": "sample_mean", "settings": {}}])[0]
    assert result["errors"]["gradient"] < TOLERANCE


def test_theirs_is_the_token_mean_and_no_other(record_property: Any) -> None:
    of_tokens, of_prompts = ({"mode": mode, "settings": MODES[mode]} for mode in ("token_mean", "prompt_mean"))
    ((same, _),) = compare(record_property, train, AREAL, [of_tokens | {"setting": "token mean"}])
    (other,) = run_ranks(4, train, checkout(AREAL), 2, [of_prompts | {"stock": True}])[0]
    assert same["errors"]["gradient"] < TOLERANCE
    assert other["errors"]["gradient"] > 1e-2


_ENGINE, _ACTOR = "areal/engine/megatron_engine.py", "areal/trainer/ppo/actor.py"
_FUNCTIONAL, _CP = "areal/utils/functional/functional.py", "areal/engine/megatron_utils/packed_context_parallel.py"
_SCALED = "        loss_scale = local_weight / total_loss_weight"
_AGAIN = "loss_fn(logprobs, entropy, inputs, vocab_min_logits=vocab_min_logits, vocab_max_logits=vocab_max_logits)"
_ORDER = (
    "logprobs: torch.Tensor,\n    entropy: torch.Tensor,",
    "entropy: torch.Tensor,\n    logprobs: torch.Tensor,",
)
_EXCHANGED = ("logprobs,\n                entropy,\n", "entropy,\n                logprobs,\n")
PLANTS = [
    Plant(
        "scaling doubled in tree training",
        {_ENGINE: ("return loss * loss_scale", "return 2 * loss * loss_scale")},
        case={"tree": True},
    ),
    Plant("scaling doubled", {_ENGINE: ("return loss * loss_scale", "return 2 * loss * loss_scale")}),
    Plant("loss function called twice", {_ENGINE: (_SCALED, f"        loss = loss + {_AGAIN}\n{_SCALED}")}),
    Plant("method renamed", {_ENGINE: ("def ppo_update(", "def update(")}, r"AReaL with no Actor.ppo_update\(\)"),
    Plant(
        "another step method called",
        {_ACTOR: ("self.engine.train_batch(", "type(self.engine).__mro__[2].train_batch(self.engine,")},
        r"Actor.train_batch called no policy loss, or was not called. Use AReaL 1.0.4",
    ),
    Plant(
        "arguments of the loss exchanged",
        {_ENGINE: _EXCHANGED},
        "first training step does something else|element 0 of tensors does not require grad",
    ),
    Plant("mask shifted", {_ACTOR: ('input_data["loss_mask"].bool()', 'input_data["loss_mask"].bool().roll(1)')}),
    Plant("tokens counted, not active ones", {_FUNCTIONAL: ("loss_mask.count_nonzero() or 1", "loss_mask.numel()")}),
    Plant(
        "counts of one rank",
        {_ENGINE: ("mpu.get_data_parallel_group(with_context_parallel=True)", "mpu.get_context_parallel_group()")},
        world=(2, 1),
    ),
    Plant(
        "loss not linear in advantages",
        {_ACTOR: ('advantages = input_data["advantages"]', 'advantages = input_data["advantages"] ** 3')},
    ),
    Plant(
        "gather over CP: gradients doubled",
        {_CP: ("return gathered_flat[indices]", "return (2 * gathered_flat - gathered_flat.detach())[indices]")},
        "Gradients of log-probs arrive 2 times at the model's output",
        world=(2, 2),
    ),
    Plant("our weights times 1.25", {}, case={"column": 1.25}),
]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.fault)
def test_a_fault_stops_all_ranks(plant: Plant, record_property: Any, tmp_path: Any) -> None:
    assert_stops(record_property, AREAL, train, plant, tmp_path)
