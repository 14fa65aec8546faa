"""slime's own `train_one_step` with our hooks, from a checkout: SLIME_PATH=~/slime.

Real: its data iterator, `get_batch`, `policy_loss_function`, `loss_function`, `train_one_step`, log-probs and reports,
with Megatron's schedule, groups and DDP, on CPU and gloo. The model is a table of logits, the optimizer keeps
gradients.
"""

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkouts import SLIME, checkout, load
from logit_table import CLIP_HIGH, CLIP_LOW, KeepsGradients, Step, errors_of, logit_model, make_step, reject
from logit_table import rollout_data as data_of
from ranks import RankError, run_ranks

#: Log-probs are float32 sums over the vocabulary.
TOLERANCE = 2e-6
HOOKS = "megatron_rl_loss.frameworks.slime"
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)]

pytestmark = pytest.mark.slow


def arguments(**changed: Any) -> SimpleNamespace:
    off = (
        "custom_megatron_before_train_step_hook_path allgather_cp save_debug_train_data enable_mtp_training ci_test "
        "calculate_per_token_loss recompute_loss_function custom_pg_loss_reducer_function_path use_rollout_logprobs "
        "use_opsm get_mismatch_metrics use_tis custom_tis_function_path use_kl_loss eps_clip_c decoder_seq_length "
        "use_rollout_top_p_replay vocab_size"
    )
    values: dict[str, Any] = dict.fromkeys(off.split()) | {
        "calculate_per_token_loss": False,
        "data_pad_size_multiplier": 8,
        "seq_length": 8,
        "micro_batch_size": 1,
        "loss_type": "policy_loss",
        "advantage_estimator": "grpo",
        "eps_clip": CLIP_LOW,
        "eps_clip_high": CLIP_HIGH,
        "entropy_coef": 0.0,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "log_probs_chunk_size": -1,
        "qkv_format": "thd",
        "check_for_nan_in_loss_and_grad": True,
    }
    return SimpleNamespace(**values | changed)


def train(root: str, cp: int, steps: list[Step], cases: list[dict[str, Any]]) -> list[list[float]]:
    """On a rank: the error of every step in each case."""
    from megatron.training import global_vars
    from table_step import start

    from megatron_rl_loss.audit.megatron.audit import audited
    from megatron_rl_loss.frameworks import slime

    state = start(cp=cp)
    names = ("backends.megatron_utils.model", "backends.megatron_utils.cp_utils", "backends.megatron_utils.data")
    modules = load(SLIME, root, *(f"slime.{name}" for name in (*names, "utils.accelerator")))
    model_module, cp_utils, data_module, accelerator = modules
    cpu = torch.device("cpu")
    accelerator._ACCELERATOR = SimpleNamespace(device=lambda index: cpu, current_device=lambda: cpu)
    measured: list[Any] = []
    get_schedule = model_module.get_forward_backward_func
    model_module.get_forward_backward_func = lambda: audited(get_schedule(), lambda audit: measured.append(audit))
    data = data_of(steps, state.get_data_parallel_rank(), cp_utils.slice_log_prob_with_cp)
    found = []
    for one in cases:
        args = arguments(**one["flags"])
        global_vars._GLOBAL_ARGS = args
        if args.use_tis:
            args.custom_tis_function_path = "logit_table.rejecting"
            importlib.import_module("logit_table").rejecting = reject(steps)  # type: ignore[attr-defined]
        slime.begin_step(args, 0, 0, None, None, None)  # type: ignore[arg-type]  # nothing is counted yet
        if args.custom_megatron_before_train_step_hook_path:
            slime.count_steps(args, 3, data)  # type: ignore[arg-type]  # as their actor calls it
        iterator = data_module.get_data_iterator(data)
        errors = []
        for step_id, step in enumerate(steps):
            model = logit_model(step.table, per_token=args.calculate_per_token_loss)
            optimizer = KeepsGradients(model)
            report, _ = model_module.train_one_step(
                args=args,
                rollout_id=3,
                step_id=step_id,
                data_iterator=iterator,
                model=[model],
                optimizer=optimizer,
                opt_param_scheduler=SimpleNamespace(step=lambda increment: None),
                num_microbatches=data["num_microbatches"][step_id],
                step_global_batch_size=data["global_batch_sizes"][step_id],
            )
            errors.append(errors_of(step, one["mode"], one["divisor"], report["pg_loss"], optimizer.gradients[0]))
            if measured[-1].is_first_rank and "custom_pg_loss_reducer_function_path" in one["flags"]:
                errors.append(audit_error(measured[-1].measured, one, step))
        found.append(errors)
    return found


def audit_error(measured: Any, one: dict[str, Any], step: Step) -> float:
    """Of an audit of their step, whose loss our hook taps: the largest relative error of a weight."""
    if measured.unknown:
        raise AssertionError(measured.unknown)
    tokens = measured.tokens
    sums = np.bincount(tokens.sample, tokens.mask).clip(1)[tokens.sample]
    in_step = sum(float(sample.mask.sum()) for sample in step.samples)  # before any rejection
    size = {"sample_mean": sums, "token_mean": in_step / step.num_rollouts, "constant": one["divisor"]}[one["mode"]]
    expected = tokens.mask / size / step.num_rollouts
    return float(np.abs(measured.weights - expected).max() / expected.max())


def case(mode: str, hook: str | None, divisor: float | None = None, **flags: Any) -> dict[str, Any]:
    path = {} if hook is None else {"custom_pg_loss_reducer_function_path": f"{HOOKS}.{hook}"}
    return {"mode": mode, "divisor": divisor, "flags": path | flags}


COUNTED = {"custom_megatron_before_train_step_hook_path": f"{HOOKS}.begin_step"}
PER_TOKEN = {"calculate_per_token_loss": True}
REJECTING = {"use_tis": True}


def assert_exact(dp: int, cp: int, steps: list[Step], cases: list[dict[str, Any]]) -> None:
    for errors in run_ranks(dp * cp, train, checkout(SLIME), cp, steps, cases):
        for one, of_steps in zip(cases, errors, strict=True):
            assert max(of_steps) < TOLERANCE, one


@pytest.mark.parametrize(("dp", "cp"), LAYOUTS)
@pytest.mark.parametrize("rejected", [False, True], ids=["as masked", "rejection"])
def test_hooks_are_exact(dp: int, cp: int, rejected: bool) -> None:
    flags = REJECTING if rejected else {}
    cases = [
        case("sample_mean", "sample_mean", **flags),
        case("constant", "constant_40", 40.0, **flags),
        case("token_mean", "token_mean", **PER_TOKEN, **COUNTED, **flags),
        case("token_mean", "token_mean", **COUNTED, **flags),
    ]
    steps = [make_step(seed, dp, rejected=rejected) for seed in (1, 2)]
    assert_exact(dp, cp, steps, cases)


@pytest.mark.parametrize(("dp", "cp"), [(1, 2), (2, 2), (1, 4)])
def test_all_gather_context_parallelism(dp: int, cp: int) -> None:
    cases = [
        case("sample_mean", "sample_mean", allgather_cp=True),
        case("constant", "constant_40", 40.0, allgather_cp=True),
        case("token_mean", "token_mean", allgather_cp=True, **PER_TOKEN, **COUNTED),
    ]
    assert_exact(dp, cp, [make_step(3, dp)], cases)


def test_token_mean_without_counts_where_every_sample_has_a_token() -> None:
    assert_exact(2, 2, [make_step(4, 2, masked=False)], [case("token_mean", "token_mean", **PER_TOKEN)])


@pytest.mark.parametrize("rejected", [False, True], ids=["masked", "rejected"])
def test_token_mean_without_counts_stops_at_a_sample_without_a_token(rejected: bool) -> None:
    steps = [make_step(5, 1, masked=not rejected, rejected=rejected)]
    uncounted = case("token_mean", "token_mean", **PER_TOKEN, **(REJECTING if rejected else {}))
    with pytest.raises(RankError, match=r"rejection \(TIS\) emptied it.*slime\.count_steps"):
        run_ranks(1, train, checkout(SLIME), 1, steps, [uncounted])


def test_a_rollout_of_two_samples() -> None:
    """The hook refuses it, and says to run without: their own reducer then is the mean over rollouts."""
    steps = [make_step(6, 2, split=True)]
    assert_exact(2, 1, steps, [case("constant", "constant_40", 40.0, **COUNTED)])
    with pytest.raises(RankError, match="Run without the hook"):
        run_ranks(2, train, checkout(SLIME), 1, steps, [case("sample_mean", "sample_mean", **COUNTED)])


def test_negative_control_their_own_token_mean_has_phantom_tokens() -> None:
    """And without fully masked samples it has none: what is compared is sound."""
    cases = [case("token_mean", None, **PER_TOKEN), case("sample_mean", None)]
    for masked in (True, False):
        for errors in run_ranks(2, train, checkout(SLIME), 1, [make_step(7, 2, masked=masked)], cases):
            assert (errors[0][0] > 1e-2) == masked
            assert errors[1][0] < TOLERANCE


def test_negative_control_another_steps_loss() -> None:
    errors = run_ranks(1, train, checkout(SLIME), 1, [make_step(8, 1)], [case("constant", "constant_41", 40.0)])
    assert errors[0][0][0] > 1e-2
