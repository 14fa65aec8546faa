"""NeMo-RL's own packing, loss, scaling and schedule call with our terms, from a checkout: NEMO_RL_PATH=~/RL.

Real: `GRPOAdvantageEstimator`, `ClippedPGLossFn`, `process_global_batch`, `process_microbatch`, `LossPostProcessor`
with its wrapper for packed sequences, `megatron_forward_backward`, Megatron's schedule and DDP with per-token loss, as
its worker sets it. The model is a table of logits. Replaced: `Policy.train`, which sends batches to workers by Ray, by
a function that keeps them.
"""

import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import added_terms
import megatron_on_cpu
import oracle
import pytest
import torch
import torch.distributed as dist
from added_terms import CALL
from bigram_step import (
    BETA,
    CLIP_HIGH,
    CLIP_LOW,
    CUTS,
    LENGTH,
    MASKED_ROWS,
    ROWS,
    SHORT_ROWS,
    TOLERANCE,
    assert_exact,
    assert_proof_changes_nothing,
    bigram_model,
    bits_of,
    compare,
    errors_of,
    kl_of_nemo_rl,
    make_batch,
)
from checkouts import NEMO_RL, checkout, load, record_errors
from plants import Plant, assert_stops, planted, record_plant
from ranks import run_ranks
from replacements import scale_weights, undone
from table_step import start
from torch import Tensor
from world import CP, DP, errors_in

SETTINGS = {"ratio_clip_min": CLIP_LOW, "ratio_clip_max": CLIP_HIGH, "reference_policy_kl_penalty": BETA}
MODES: dict[str, dict[str, Any]] = {
    "token_mean": {},
    "sample_mean": {"units": "active"},
    "prompt_mean": {"kl": "token_mean"},
    "constant": {"divisor": 40.0, "kl": "sample_mean"},
    "token_sum": {"divisor": 25.0},
}

pytestmark = pytest.mark.slow


def let_backward_run_here(gather: Any) -> None:
    """NeMo-RL's backward asks for "cuda", and torch's function modes, which redirect that, are off there."""
    original = gather.backward

    def backward(ctx: Any, gradient: Tensor) -> Any:
        with megatron_on_cpu._CudaMeansCpu():
            return original(ctx, gradient)

    gather.backward = staticmethod(backward)


def train(root: str, cp: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """On a rank: the errors of each case, and what NeMo-RL reports beside the loss."""
    state = start(cp=cp)
    names = ("algorithms.loss.loss_functions", "models.megatron.train", "models.megatron.data")
    losses, worker, data_module = load(NEMO_RL, root, *(f"nemo_rl.{name}" for name in names))
    from nemo_rl.algorithms.advantage_estimator import GRPOAdvantageEstimator
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    from megatron_rl_loss.engines import replacing
    from megatron_rl_loss.engines.nemo_rl import aggregate

    estimator = GRPOAdvantageEstimator(SimpleNamespace(use_leave_one_out_baseline=True, normalize_rewards=True), None)
    let_backward_run_here(worker.allgather_cp_sharded_tensor.__globals__["AllGatherCPTensor"])
    dp_rank, dp = state.get_data_parallel_rank(), state.get_data_parallel_world_size()
    group, config = state.get_data_parallel_group(), losses.ClippedPGLossConfig
    fields = getattr(config, "model_fields", {})  # of pydantic, where it is installed
    defaults = {
        name: fields[name].default if name in fields else getattr(config, name) for name in config.__annotations__
    }
    results = []
    for case in cases:
        of_case = case.get("cfg", {})
        added_terms.choose(case.get("term", ""))
        loss_fn = losses.ClippedPGLossFn(SimpleNamespace(**{**defaults, **SETTINGS, **of_case}))
        batch = BatchedDataDict(make_batch())
        os.environ["MEGATRON_RL_LOSS_PROOF"] = case.get("proof", "error")
        scale_weights(case.get("times", 1.0))
        if not case.get("stock"):
            policy: Any = SimpleNamespace(
                cfg={"train_global_batch_size": ROWS}, train=lambda data, loss_fn, timer=None, gbs=None: data
            )
            with undone():
                settings = {"group_size": case.get("group_size", 4), **case["settings"]}
                stock_loss, loss_fn = loss_fn, aggregate(policy, loss_fn, case["mode"], **settings)
                if case.get("twice"):
                    aggregate(policy, loss_fn, case["mode"], **settings)
                prompts = torch.tensor(case["ids"])[:, None] if "ids" in case else batch["input_ids"][:, :3]
                estimator.compute_advantage(prompts, torch.ones(ROWS), batch["token_mask"])
                if not case.get("by_another_name"):
                    batch = policy.train(batch, stock_loss if case.get("not_passed") else loss_fn, timer=None)
            loss_fn = pickle.loads(pickle.dumps(loss_fn))
        mine = BatchedDataDict({name: values[dp_rank::dp] for name, values in batch.items()})
        rows = len(mine["sample_mask"])
        counted = data_module.process_global_batch(mine, loss_fn, group, batch_idx=0, batch_size=rows)
        microbatches = []
        for first, last in CUTS:
            part = mine.slice(first * rows // 6, last * rows // 6)
            packed = data_module.process_microbatch(part, "input_lengths", 2 * cp, pack_sequences=True)
            microbatches.append(data_module.ProcessedMicrobatch(data_dict=part, **vars(packed)))
        packing = {"enabled": True, "fuse_loss": case.get("fused", False)}
        cfg = {"sequence_packing": packing, "logprob_chunk_size": None}
        model, number = bigram_model(per_token=True), {"num_microbatches": len(microbatches)}
        reports = worker.megatron_forward_backward(
            model=model, data_iterator=iter(microbatches), seq_length=LENGTH, mbs=1, **number,
            post_processing_fn=worker.LossPostProcessor(
                loss_fn=loss_fn, cfg=cfg, sampling_params=case.get("sampling"), **number
            ),
            **{name: counted[name] for name in ("global_valid_seqs", "global_valid_toks")},
        )  # fmt: skip
        reported = ("loss", "kl_penalty", "gen_kl_error", "probs_ratio")
        sums = torch.tensor([sum(report[name] for report in reports) for name in reported], dtype=torch.float64)
        dist.all_reduce(sums, group=group)
        metrics = dict(zip(reported, sums.tolist(), strict=True))
        options = {"of_samples": of_case.get("sequence_level_importance_ratios", False)}
        options["corrected"] = of_case.get("use_importance_sampling_correction", False)
        errors = errors_of(model, case, metrics["loss"], kl=kl_of_nemo_rl, **options)
        outcomes = [proof.outcome for proof in replacing._REGISTRY.values() if hasattr(proof, "outcome")]
        is_measured = not case.get("stock") and "proof" not in case
        assert outcomes == ([case.get("outcome", "proved")] if is_measured else outcomes), outcomes
        replacing._REGISTRY.clear()
        results.append(metrics | {"errors": errors, "bits": bits_of(model)})
    return results


CORRECTED = {"use_importance_sampling_correction": True}
OF_SAMPLES = {"token_level_loss": False, "sequence_level_importance_ratios": True}
CASES: list[dict[str, Any]] = [
    *({"mode": mode, "settings": settings} for mode, settings in MODES.items()),
    {"mode": "sample_mean", "settings": {}, "cfg": OF_SAMPLES},
    {"mode": "prompt_mean", "settings": {"kl": "sample_mean"}, "cfg": OF_SAMPLES},
    {"mode": "prompt_mean", "settings": {}, "cfg": {**OF_SAMPLES, **CORRECTED}},
    {"mode": "prompt_mean", "settings": {}, "cfg": CORRECTED},
    {"mode": "prompt_mean", "settings": {}, "fused": True},
]


def test_every_term_is_exact(record_property: Any) -> None:
    assert_exact(record_property, train, NEMO_RL, CASES)


def test_metrics_keep_their_masks_and_theirs_is_what_it_says(record_property: Any) -> None:
    """NeMo-RL's own means are exact, and differ from the other modes."""
    token: dict[str, Any] = {"setting": "`token_level_loss=true`", "mode": "token_mean", "settings": {}}
    sample = {"setting": "`token_level_loss=false`", "mode": "sample_mean", "settings": {"units": "active"}}
    (stock, same), (of_samples, _) = compare(record_property, train, NEMO_RL, [token, sample | {"cfg": OF_SAMPLES}])
    assert max(result["errors"]["gradient"] for result in (stock, of_samples)) < TOLERANCE
    two: list[dict[str, Any]] = [{"mode": "prompt_mean", "settings": {}, "stock": stock} for stock in (True, None)]
    wrong, other = run_ranks(4, train, checkout(NEMO_RL), 2, two)[0]
    assert wrong["errors"]["gradient"] > 1e-2
    for name in ("gen_kl_error", "probs_ratio"):
        assert same[name] == stock[name] == other[name]
    assert same["kl_penalty"] == pytest.approx(stock["kl_penalty"], rel=TOLERANCE)


def test_clamps_of_the_kl_penalty_are_no_faults() -> None:
    """A trial has log-probs 0.1 from the reference policy's; what is clamped below that is not proved."""
    clamps = [{"kl_input_clamp_value": 0.5}, {"kl_output_clamp_value": 0.02}, {"kl_input_clamp_value": None}]
    cases: list[dict[str, Any]] = [{"mode": "prompt_mean", "settings": {}, "cfg": clamp} for clamp in clamps]
    clamped = {"kl_input_clamp_value": 0.05}
    cases.append({"mode": "prompt_mean", "settings": {}, "cfg": clamped, "outcome": "not proved"})
    run_ranks(4, train, checkout(NEMO_RL), 2, cases)


def test_kl_penalties_of_each_type_are_proved() -> None:
    """One of the on-policy approximation has importance weights, too."""
    settings: list[dict[str, Any]] = [{"reference_policy_kl_type": kind} for kind in ("k1", "k2", "k3")]
    settings += [of_type | {"use_on_policy_kl_approximation": True} for of_type in settings]
    run_ranks(1, train, checkout(NEMO_RL), 1, [{"mode": "prompt_mean", "settings": {}, "cfg": cfg} for cfg in settings])


def test_a_rank_without_a_token_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MASKED_ROWS, " ".join(map(str, range(1, ROWS, 2))))
    monkeypatch.setenv(SHORT_ROWS, "0 6 8")
    cases = [{"mode": mode, "settings": {"units": "active"}} for mode in ("prompt_mean", "sample_mean")]
    for results in run_ranks(4, train, checkout(NEMO_RL), 2, cases):
        assert max(result["errors"]["gradient"] for result in results) < TOLERANCE


def test_the_proof_changes_nothing() -> None:
    case = {"mode": "prompt_mean", "settings": MODES["prompt_mean"]}
    assert_proof_changes_nothing(train, NEMO_RL, [case, case | {"cfg": OF_SAMPLES}])


LOSSES, WRAPPER = "nemo_rl/algorithms/loss/loss_functions.py", "nemo_rl/algorithms/loss/wrapper.py"
LOSS_AGAIN = """loss += self.loss_fn(
                data=unpadded_seq_data, global_valid_seqs=global_valid_seqs, global_valid_toks=global_valid_toks,
                **loss_input)[0]
            loss_accum += loss"""
PLANTS = [
    Plant("scaling doubled", {"nemo_rl/models/megatron/train.py": ("return loss * num_", "return 2 * loss * num_")}),
    Plant(
        "counts of one rank",
        {"nemo_rl/models/megatron/data.py": ("all_reduce(to_reduce, group=dp_group)", "barrier()")},
        world=(2, 1),
    ),
    Plant("policy.train by another name", {}, "without our weights: policy.train", {"by_another_name": True}),
    Plant("the driver's own loss kept", {}, "Pass grpo_train the loss that aggregate", {"not_passed": True}),
    Plant("loss computed twice", {WRAPPER: ("loss_accum += loss", LOSS_AGAIN)}, case={"mode": "token_sum"}),
    Plant(
        "arguments in each other's place",
        {WRAPPER: ("valid_seqs=global_valid_seqs,\n                global", "valid_seqs=global_valid_toks,\n global")},
        case={"cfg": OF_SAMPLES},
    ),
    Plant("mask moved", {LOSSES: ('data["token_mask"][:, 1:]', 'data["token_mask"][:, 1:].roll(1, 1)')}),
    Plant("loss not linear in advantages", {LOSSES: ('["advantages"][:, 1:]', '["advantages"][:, 1:].sign()')}),
    Plant(
        "KL coefficient doubled", {LOSSES: ("kl = self.reference", "kl = 2 * self.reference")}, "on kl: tokens weigh"
    ),
    Plant(
        "backward of the gather doubled",
        {
            "nemo_rl/distributed/model_utils.py": (
                "all_reduce(grad_output, group=ctx.cp_group)", "all_reduce(grad_output.mul_(2), group=ctx.cp_group)"
            )
        },
        "arrive 2 times at the model's output",
        world=(2, 2),
    ),
    Plant("own weights times 1.25", {}, "tokens weigh 1.25 times", {"times": 1.25}),
]  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.fault)
def test_a_fault_stops(record_property: Any, tmp_path: Path, plant: Plant) -> None:
    settings = MODES[plant.case.get("mode", "prompt_mean")]
    plant = plant._replace(case={"mode": "prompt_mean", "settings": settings} | plant.case)
    assert_stops(record_property, NEMO_RL, train, plant, tmp_path)


def test_a_term_added_to_the_kl_penalty_is_not_proved(record_property: Any, tmp_path: Path) -> None:
    """NeMo-RL computes it only where there is a penalty."""
    call = CALL.format(log_probs="curr_logprobs", old="prev_logprobs", mask="mask")
    added = "# Reduce KL loss", f"kl = kl + {call}\n            # Reduce KL loss"
    of_case: dict[str, Any] = {"mode": "sample_mean", "settings": {}}
    cases = [of_case, *(of_case | {"term": term, "outcome": "not proved"} for term in added_terms.TERMS)]
    run_ranks(1, train, planted(NEMO_RL, tmp_path, {LOSSES: added}), 1, cases)
    for term in added_terms.TERMS:
        record_plant(record_property, NEMO_RL, f"a term added to the KL penalty: {term}", "says that it is not proved")


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


def test_a_planned_step(record_property: Any) -> None:
    for errors in run_ranks(DP * CP, planned, checkout(NEMO_RL)):
        assert max(errors) < oracle.EXACT
        record_errors(record_property, NEMO_RL, "every mode", ours=max(errors))
