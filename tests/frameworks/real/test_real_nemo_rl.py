"""NeMo-RL's own packing, loss, scaling and schedule call with our terms, from a checkout: NEMO_RL_PATH=~/RL.

Real: `ClippedPGLossFn`, `process_global_batch`, `process_microbatch`, `LossPostProcessor` with its wrapper for packed
sequences, `megatron_forward_backward`, Megatron's schedule and DDP with per-token loss, as its worker sets it. The
model is a table of logits. Replaced: `Policy.train`, which sends batches to workers by Ray, by a function that keeps
them.
"""

from types import SimpleNamespace
from typing import Any

import megatron_on_cpu
import oracle
import pytest
import torch
import torch.distributed as dist
from bigram_step import (
    BETA,
    CLIP_HIGH,
    CLIP_LOW,
    CUTS,
    LENGTH,
    ROWS,
    TOLERANCE,
    VOCABULARY,
    expected,
    k3,
    make_batch,
    make_table,
)
from checkouts import NEMO_RL, checkout, load
from planned_steps import CP, DP, errors_in
from ranks import run_ranks
from table_step import relative_error, start, table_model
from torch import Tensor

SETTINGS = {"ratio_clip_min": CLIP_LOW, "ratio_clip_max": CLIP_HIGH, "reference_policy_kl_penalty": BETA}
MODES: dict[str, dict[str, Any]] = {
    "token_mean": {},
    "sample_mean": {"units": "active"},
    "prompt_mean": {"kl": "token_mean"},
    "constant": {"divisor": 40.0, "kl": "sample_mean"},
    "token_sum": {"divisor": 25.0},
}

pytestmark = pytest.mark.slow


def kl_of_nemo_rl(log_probs: Tensor, reference: Tensor) -> Tensor:
    """With the gradient of the policy that it is an expectation over."""
    return k3(log_probs, reference) * (log_probs - log_probs.detach()).exp()


def let_backward_run_here(gather: Any) -> None:
    """Its backward asks for "cuda", and torch's function modes, which redirect that, are off there."""
    original = gather.backward

    def backward(ctx: Any, gradient: Tensor) -> Any:
        with megatron_on_cpu._CudaMeansCpu():
            return original(ctx, gradient)

    gather.backward = staticmethod(backward)


def train(root: str, cp: int, cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """On a rank: the error of each case, and what NeMo-RL reports beside the loss."""
    state = start(cp=cp)
    names = ("algorithms.loss.loss_functions", "models.megatron.train", "models.megatron.data")
    losses, worker, data_module = load(NEMO_RL, root, *(f"nemo_rl.{name}" for name in names))
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    from megatron_rl_loss.frameworks.nemo_rl import aggregate

    let_backward_run_here(worker.allgather_cp_sharded_tensor.__globals__["AllGatherCPTensor"])
    dp_rank, dp = state.get_data_parallel_rank(), state.get_data_parallel_world_size()
    defaults = {name: getattr(losses.ClippedPGLossConfig, name) for name in losses.ClippedPGLossConfig.__annotations__}
    cfg = {"sequence_packing": {"enabled": True}, "logprob_chunk_size": None}
    found = []
    for case in cases:
        loss_fn = losses.ClippedPGLossFn(SimpleNamespace(**{**defaults, **SETTINGS, **case.get("cfg", {})}))
        batch = BatchedDataDict(make_batch())
        if not case.get("stock"):
            sent: list[Any] = []

            def send(data: Any, loss_fn: Any, timer: Any = None, gbs: Any = None, sent: list[Any] = sent) -> None:
                sent.append(data)

            policy = SimpleNamespace(cfg={"train_global_batch_size": ROWS}, train=send)
            loss_fn = aggregate(policy, loss_fn, case["mode"], **case["settings"])
            policy.train(batch, loss_fn, timer=None)
            (batch,) = sent
        mine = BatchedDataDict({name: values[dp_rank::dp] for name, values in batch.items()})
        rows = len(mine["sample_mask"])
        group = state.get_data_parallel_group()
        counted = data_module.process_global_batch(mine, loss_fn, group, batch_idx=0, batch_size=rows)
        counts = {name: counted[name] for name in ("global_valid_seqs", "global_valid_toks")}
        cuts = [(a * rows // 6, b * rows // 6) for a, b in CUTS]
        microbatches = []
        for start_row, end_row in cuts:
            part = mine.slice(start_row, end_row)
            made = data_module.process_microbatch(part, "input_lengths", 2 * cp, pack_sequences=True)
            microbatches.append(data_module.ProcessedMicrobatch(data_dict=part, **vars(made)))
        model = table_model(
            make_table().flatten().tolist(), per_token=True, forward=lambda p, ids: p.view(VOCABULARY, -1)[ids]
        )
        reports = worker.megatron_forward_backward(
            model=model,
            data_iterator=iter(microbatches),
            num_microbatches=len(microbatches),
            seq_length=LENGTH,
            mbs=1,
            post_processing_fn=worker.LossPostProcessor(loss_fn=loss_fn, cfg=cfg, num_microbatches=len(microbatches)),
            **counts,
        )
        names = ("loss", "kl_penalty", "gen_kl_error", "probs_ratio")
        sums = torch.tensor([sum(report[name] for report in reports) for name in names], dtype=torch.float64)
        dist.all_reduce(sums, group=group)
        metrics = dict(zip(names, sums.tolist(), strict=True))
        cfg_of_case = case.get("cfg", {})
        of_samples = cfg_of_case.get("sequence_level_importance_ratios", False)
        corrected = cfg_of_case.get("use_importance_sampling_correction", False)
        value, by_entry, scale = expected(
            case["mode"], case["settings"], kl=kl_of_nemo_rl, of_samples=of_samples, corrected=corrected
        )
        in_gradient = relative_error(model.module.losses.main_grad.view_as(by_entry), by_entry)
        found.append(metrics | {"in gradient": in_gradient, "in value": abs(metrics["loss"] - value) / scale})
    return found


CORRECTED = {"use_importance_sampling_correction": True}
OF_SAMPLES = {"token_level_loss": False, "sequence_level_importance_ratios": True}
CASES: list[dict[str, Any]] = [
    *({"mode": mode, "settings": settings} for mode, settings in MODES.items()),
    {"mode": "sample_mean", "settings": {}, "cfg": OF_SAMPLES},
    {"mode": "prompt_mean", "settings": {"kl": "sample_mean"}, "cfg": OF_SAMPLES},
    {"mode": "prompt_mean", "settings": {}, "cfg": {**OF_SAMPLES, **CORRECTED}},
    {"mode": "prompt_mean", "settings": {}, "cfg": CORRECTED},
]


@pytest.mark.parametrize(("world_size", "cp"), [(1, 1), (4, 2)])
def test_every_term_is_exact(world_size: int, cp: int) -> None:
    for results in run_ranks(world_size, train, checkout(NEMO_RL), cp, CASES):
        for case, found in zip(CASES, results, strict=True):
            assert found["in gradient"] < TOLERANCE, (case, found)
            assert found["in value"] < TOLERANCE, (case, found)


def test_metrics_keep_their_masks_and_theirs_is_what_it_says() -> None:
    """Their token mean is exact, and it is none of the other modes."""
    token_mean: dict[str, Any] = {"mode": "token_mean", "settings": {}}
    cases = [
        token_mean | {"stock": True},
        token_mean,
        {"mode": "prompt_mean", "settings": {}},
        {"mode": "prompt_mean", "settings": {}, "stock": True},
    ]
    stock, same, other, wrong = run_ranks(4, train, checkout(NEMO_RL), 2, cases)[0]
    assert stock["in gradient"] < TOLERANCE
    assert wrong["in gradient"] > 1e-2
    for name in ("gen_kl_error", "probs_ratio"):
        assert same[name] == stock[name] == other[name]
    assert same["kl_penalty"] == pytest.approx(stock["kl_penalty"], rel=TOLERANCE)


def planned(root: str) -> list[float]:
    """On a rank: the error of a planned step in each mode, with what NeMo-RL's workers do to a loss."""
    worker, _ = load(NEMO_RL, root, "nemo_rl.models.megatron.train", "nemo_rl.models.megatron.data")

    def scale(returned: Any, batch: Any, num_microbatches: int) -> Any:
        processor = worker.LossPostProcessor(
            loss_fn=lambda data, **_: returned,
            cfg={"sequence_packing": {"enabled": False}},
            num_microbatches=num_microbatches,
            prepare_fn=lambda logits, data, **_: ({}, data),
        )
        return processor(data_dict={})(torch.zeros(()))

    return errors_in("nemo_rl", scale, per_token=True)


def test_a_planned_step() -> None:
    for errors in run_ranks(DP * CP, planned, checkout(NEMO_RL)):
        assert max(errors) < oracle.EXACT
