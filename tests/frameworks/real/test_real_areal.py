"""AReaL's own micro-batches, loss, scaling and schedule call with our factors, from a checkout: AREAL_PATH=~/AReaL.

Real: `MegatronPPOActor.train_batch` with its packing, its cut over context-parallel ranks and what undoes it, its
total of loss weights, `grpo_loss_fn`; Megatron's schedule and DDP. The model is a table of logits, the optimizer keeps
what Megatron hands it; torch's gather of log-probs is one for gloo.
"""

import functools
import logging
from typing import Any

import pytest
import torch
from bigram_step import CLIP_HIGH, CLIP_LOW, TOLERANCE, assert_exact, bigram_model, compare, errors_of, make_batch
from checkouts import AREAL, Settings, checkout, load
from gloo_gather import all_gather
from ranks import run_ranks
from table_step import start
from torch import Tensor

MODES: dict[str, dict[str, Any]] = {
    "token_mean": {},
    "sample_mean": {"units": "active"},
    "prompt_mean": {"units": "active"},
    "constant": {"divisor": 40.0},
    "token_sum": {"divisor": 25.0},
}
GSPO = {"importance_sampling_level": "sequence"}

pytestmark = pytest.mark.slow


def rows_of_rank(dp_rank: int, dp: int) -> dict[str, Tensor]:
    """As AReaL holds them: values belong to the token that predicts them."""
    batch = {name: values[dp_rank::dp] for name, values in make_batch().items()}
    mask = batch["token_mask"] * batch["sample_mask"][:, None]
    lengths = batch["input_lengths"][:, None]
    rows = {
        "input_ids": batch["input_ids"],
        "attention_mask": torch.arange(mask.shape[1])[None] < lengths,
        "loss_mask": mask.roll(-1, 1),
        "logprobs": batch["prev_logprobs"].roll(-1, 1),
        "prox_logp": batch["prev_logprobs"].roll(-1, 1),
        "advantages": batch["advantages"].roll(-1, 1),
    }
    return {name: value[:, : int(lengths.max())] for name, value in rows.items()}


def train(root: str, cp: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """On a rank: the error of each case's gradient."""
    state = start(cp=cp)
    engine, actors = load(AREAL, root, "areal.engine.megatron_engine", "areal.trainer.ppo.actor")
    from areal.api.cli_args import MicroBatchSpec
    from areal.engine.megatron_utils import packed_context_parallel

    from megatron_rl_loss.frameworks.areal import aggregate

    packed_context_parallel.dist_F.all_gather = all_gather
    rows = rows_of_rank(state.get_data_parallel_rank(), state.get_data_parallel_world_size())
    found = []
    for case in cases:

        class Actor(engine.MegatronPPOActor):  # type: ignore[misc, name-defined]
            def __init__(self) -> None: ...

            def _ensure_ready(self) -> None: ...

        if not case.get("stock"):
            aggregate(Actor, case["mode"], **case["settings"])
        model, config, actor = bigram_model(), case.get("config", {}), Actor()
        sizes = {"pipeline_parallel_size": 1, "context_parallel_size": cp, "tensor_parallel_size": 1}
        optimizer = {"get_loss_scale": lambda: torch.ones(()), "step": lambda: (True, 0.0, None)}
        vars(actor).update(
            model=[model], process_group_initialized=True, logger=logging.getLogger("actor"),
            device=torch.device("cpu"), parallel_strategy=Settings(**sizes),
            config=Settings(mb_spec=MicroBatchSpec(n_mbs=3), temperature=1.0, **config),
            optimizer=Settings(zero_grad=lambda: None, param_groups=[{"lr": 0.0}], **optimizer),
            **dict.fromkeys(("enable_tree_training", "enable_fp8", "is_vision_model", "use_padded_seq"), False),
        )  # fmt: skip
        clip = {"eps_clip": CLIP_LOW, "eps_clip_higher": CLIP_HIGH, "c_clip": None}
        loss_fn = functools.partial(actors.grpo_loss_fn, **clip, **{"importance_sampling_level": "token", **config})
        stats = actor.train_batch(rows, loss_fn, loss_weight_fn=lambda x: x["loss_mask"].count_nonzero())
        assert stats["num_micro_batches"] == 3
        found.append({"errors": errors_of(model, case, kl=None, of_samples=config == GSPO)})
    return found


def test_every_mode_is_exact(record_property: Any) -> None:
    of_tokens = [{"mode": mode, "settings": settings} for mode, settings in MODES.items()]
    assert_exact(record_property, train, AREAL, [*of_tokens, {"mode": "sample_mean", "settings": {}, "config": GSPO}])


def test_theirs_is_the_token_mean_and_no_other(record_property: Any) -> None:
    of_tokens, of_prompts = ({"mode": mode, "settings": MODES[mode]} for mode in ("token_mean", "prompt_mean"))
    ((same, _),) = compare(record_property, train, AREAL, [of_tokens | {"setting": "token mean"}])
    (other,) = run_ranks(4, train, checkout(AREAL), 2, [of_prompts | {"stock": True}])[0]
    assert same["errors"]["gradient"] < TOLERANCE
    assert other["errors"]["gradient"] > 1e-2
