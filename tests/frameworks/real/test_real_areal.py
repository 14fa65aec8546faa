"""AReaL's own micro-batches, loss, scaling and schedule call with our factors, from a checkout: AREAL_PATH=~/AReaL.

Real: `MegatronPPOActor.train_batch` with its packing, its cut over context-parallel ranks and what undoes it, its
total of loss weights, `grpo_loss_fn`; Megatron's schedule and DDP. The model is a table of logits, the optimizer keeps
what Megatron hands it; torch's gather of log-probs is one for gloo.
"""

import functools
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bigram_step import CLIP_HIGH, CLIP_LOW, TOLERANCE, VOCABULARY, expected, make_batch, make_table
from checkouts import AREAL, checkout, load
from gloo_gather import all_gather
from ranks import run_ranks
from table_step import relative_error, start, table_model
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


def train(root: str, cp: int, cases: list[dict[str, Any]]) -> list[float]:
    """On a rank: the error of each case's gradient."""
    state = start(cp=cp)
    engine, actors = load(AREAL, root, "areal.engine.megatron_engine", "areal.trainer.ppo.actor")
    from areal.api.cli_args import MicroBatchSpec
    from areal.engine.megatron_utils import packed_context_parallel

    from megatron_rl_loss.frameworks.areal import aggregate

    packed_context_parallel.dist_F.all_gather = all_gather
    dp_rank, dp = state.get_data_parallel_rank(), state.get_data_parallel_world_size()
    found = []
    for case in cases:

        class Actor(engine.MegatronPPOActor):  # type: ignore[misc, name-defined]
            def __init__(self) -> None: ...

            def _ensure_ready(self) -> None: ...

        if not case.get("stock"):
            aggregate(Actor, case["mode"], **case["settings"])
        model = table_model(make_table().flatten().tolist(), forward=lambda p, ids: p.view(VOCABULARY, -1)[ids.long()])
        actor = Actor()
        actor.model = [model]
        actor.optimizer = SimpleNamespace(
            zero_grad=lambda: None, get_loss_scale=lambda: torch.ones(()), step=lambda: (True, 0.0, None),
            param_groups=[{"lr": 0.0}],
        )  # fmt: skip
        settings = {"mb_spec": MicroBatchSpec(n_mbs=3), "pad_to_maximum": False, "temperature": 1.0, "is_critic": False}
        actor.config = SimpleNamespace(**settings, **case.get("config", {}))
        names = ("pipeline_parallel_size", "context_parallel_size", "tensor_parallel_size")
        actor.parallel_strategy = SimpleNamespace(**dict(zip(names, (1, cp, 1), strict=True)))
        actor.process_group_initialized = True
        actor.enable_tree_training = actor.enable_fp8 = actor.is_vision_model = actor.use_padded_seq = False
        actor.logger, actor.device = logging.getLogger("actor"), torch.device("cpu")
        loss_fn = functools.partial(
            actors.grpo_loss_fn, eps_clip=CLIP_LOW, eps_clip_higher=CLIP_HIGH, c_clip=None,
            importance_sampling_level=case.get("config", {}).get("importance_sampling_level", "token"),
        )  # fmt: skip
        stats = actor.train_batch(
            rows_of_rank(dp_rank, dp), loss_fn, loss_weight_fn=lambda x: x["loss_mask"].count_nonzero()
        )
        assert stats["num_micro_batches"] == 3
        of_samples = case.get("config") == GSPO
        _, by_entry, _ = expected(case["mode"], case["settings"], kl=None, of_samples=of_samples)
        found.append(relative_error(model.module.losses.main_grad.view_as(by_entry), by_entry))
    return found


CASES: list[dict[str, Any]] = [
    *({"mode": mode, "settings": settings} for mode, settings in MODES.items()),
    {"mode": "sample_mean", "settings": {}, "config": GSPO},
]


@pytest.mark.parametrize(("world_size", "cp"), [(1, 1), (4, 2)])
def test_every_mode_is_exact(world_size: int, cp: int) -> None:
    for errors in run_ranks(world_size, train, checkout(AREAL), cp, CASES):
        for case, error in zip(CASES, errors, strict=True):
            assert error < TOLERANCE, (case, error)


def test_theirs_is_the_token_mean_and_no_other() -> None:
    cases = [{"mode": mode, "settings": MODES[mode], "stock": True} for mode in ("token_mean", "prompt_mean")]
    same, other = run_ranks(4, train, checkout(AREAL), 2, cases)[0]
    assert same < TOLERANCE
    assert other > 1e-2
