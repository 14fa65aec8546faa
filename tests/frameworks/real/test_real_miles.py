"""miles's own `train_one_step` and FSDP loss with our hooks, from a checkout: MILES_PATH=~/miles.

Real: its data iterator, `get_batch`, `policy_loss_function`, `loss_function`, `train_one_step`, log-probs and reports,
with Megatron's schedule, groups and DDP, on CPU and gloo. The model is a table of logits, the optimizer keeps
gradients.
Replaced: Megatron's fused cross entropy, whose backward rounds to bfloat16, by its plain one.
"""

import importlib
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from checkouts import MILES, checkout, load
from logit_table import CLIP_HIGH, CLIP_LOW, KeepsGradients, Step, errors_of, logit_model, logits, make_step, reject
from logit_table import rollout_data as data_of
from ranks import RankError, run_ranks, start_process_group

#: Log-probs are float32 sums over the vocabulary.
TOLERANCE = 2e-6
HOOKS = "megatron_rl_loss.frameworks.slime"
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)]

pytestmark = pytest.mark.slow


def arguments(**changed: Any) -> SimpleNamespace:
    off = (
        "custom_megatron_before_train_step_hook_path custom_megatron_init_path allgather_cp enable_mtp_training "
        "ci_test recompute_loss_function custom_pg_loss_reducer_function_path use_rollout_logprobs use_opsm use_tis "
        "skip_actor_forward_only get_mismatch_metrics custom_tis_function_path use_kl_loss eps_clip_c vocab_size "
        "observe_training_entropy dump_details debug_disable_optimizer multi_lora enable_witness true_on_policy_mode "
        "decoder_seq_length use_dynamic_global_batch_size compress_ratios save_local_weight_checksum"
    )
    values: dict[str, Any] = dict.fromkeys(off.split(), False) | {
        "custom_pg_loss_reducer_function_path": None,
        "custom_megatron_init_path": None,
        "custom_tis_function_path": None,
        "dump_details": None,
        "eps_clip_c": None,
        "decoder_seq_length": None,
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
        "log_probs_chunk_size": -1,
        "qkv_format": "thd",
        "check_for_nan_in_loss_and_grad": True,
    }
    return SimpleNamespace(**values | changed)


def train(root: str, cp: int, steps: list[Step], cases: list[dict[str, Any]]) -> list[list[float]]:
    """On a rank: the error of every step in each case."""
    from megatron.training import global_vars
    from table_step import start

    state = start(cp=cp)
    names = "megatron_utils.model", "megatron_utils.parallel", "training_utils.parallel", "training_utils.cp_utils"
    modules = load(MILES, root, *(f"miles.backends.{name}" for name in (*names, "training_utils.data")))
    model_module, megatron_parallel, parallel, cp_utils, data_module = modules
    group_info = importlib.import_module("miles.utils.ft_utils.process_group_utils")
    _compute_in_float32()
    own_train_one_step = model_module.train_one_step
    found = []
    for one in cases:
        args = arguments(**one["flags"])
        global_vars._GLOBAL_ARGS = args
        alone = group_info.GroupInfo(rank=0, size=one.get("replicas", 1), group=None)
        parallel.set_parallel_state(megatron_parallel.create_megatron_parallel_state(indep_dp=alone))
        if args.use_tis:
            args.custom_tis_function_path = "logit_table.rejecting"
            importlib.import_module("logit_table").rejecting = reject(steps)  # type: ignore[attr-defined]
        model_module.train_one_step = own_train_one_step
        if args.custom_megatron_init_path is not None:  # as their `init` does
            importlib.import_module("miles.utils.misc").load_function(args.custom_megatron_init_path)(args)
        padded = one.get("padded")

        def cut(values: Any, total: int, response: int, padded: int | None = padded, args: Any = args) -> Any:
            return cp_utils.slice_log_prob_with_cp(values, total, response, args.qkv_format, padded)

        data = data_of(steps, state.get_data_parallel_rank(), cut)
        if padded is not None:
            data["max_seq_lens"] = [padded] * len(data["tokens"])
        iterators, num_microbatches = data_module.get_data_iterator(args, None, data)
        errors = []
        for step_id, step in enumerate(steps):
            model = logit_model(step.table, per_token=args.calculate_per_token_loss)
            optimizer = KeepsGradients(model)
            report, _, _ = model_module.train_one_step(
                args=args,
                rollout_id=3,
                step_id=step_id,
                data_iterator=iterators,
                model=[model],
                optimizer=optimizer,
                opt_param_scheduler=SimpleNamespace(step=lambda increment: None),
                num_microbatches=num_microbatches[step_id],
                num_rollouts=data_module.get_num_rollouts(args, data, len(steps))[step_id],
                witness_info=None,
                attempt=0,
            )
            errors.append(errors_of(step, one["mode"], one["divisor"], report["pg_loss"], optimizer.gradients[0]))
        found.append(errors)
    return found


def _compute_in_float32() -> None:
    from megatron.core.fusions import fused_cross_entropy

    def plain(logits: torch.Tensor, target: torch.Tensor, group: Any) -> torch.Tensor:
        return -logits.log_softmax(-1).gather(-1, target[..., None]).squeeze(-1)

    fused_cross_entropy.fused_vocab_parallel_cross_entropy = plain


def case(mode: str, hook: str | None, divisor: float | None = None, **flags: Any) -> dict[str, Any]:
    path = {} if hook is None else {"custom_pg_loss_reducer_function_path": f"{HOOKS}.{hook}"}
    return {"mode": mode, "divisor": divisor, "flags": path | flags}


COUNTED = {"custom_megatron_init_path": "megatron_rl_loss.frameworks.miles.count_steps"}
PER_TOKEN = {"calculate_per_token_loss": True}
REJECTING = {"use_tis": True}


def assert_exact(dp: int, cp: int, steps: list[Step], cases: list[dict[str, Any]]) -> None:
    for errors in run_ranks(dp * cp, train, checkout(MILES), cp, steps, cases):
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
    assert_exact(dp, cp, [make_step(seed, dp, rejected=rejected) for seed in (1, 2)], cases)


@pytest.mark.parametrize(("dp", "cp"), [(1, 2), (2, 2), (1, 4)])
def test_all_gather_context_parallelism(dp: int, cp: int) -> None:
    cases = [
        case("sample_mean", "sample_mean", allgather_cp=True),
        case("constant", "constant_40", 40.0, allgather_cp=True),
        case("token_mean", "token_mean", allgather_cp=True, **PER_TOKEN, **COUNTED),
    ]
    assert_exact(dp, cp, [make_step(3, dp)], cases)


@pytest.mark.parametrize(("dp", "cp"), LAYOUTS)
@pytest.mark.parametrize("allgather", [False, True], ids=["zigzag", "all-gather"])
def test_padded_rows(dp: int, cp: int, allgather: bool) -> None:
    """All-gather context parallelism of padded rows, as DeepSeek V4 has it, holds for micro-batches of one row."""
    flags = {"qkv_format": "bshd", "allgather_cp": allgather and cp > 1, **COUNTED}
    cases = [
        case("sample_mean", "sample_mean", **flags),
        case("constant", "constant_40", 40.0, **flags),
        case("token_mean", "token_mean", **PER_TOKEN, **flags),
    ]
    steps = [make_step(9, dp, microbatches=12 // dp if allgather else 2)]
    assert_exact(dp, cp, steps, [one | {"padded": 24} for one in cases])


def test_padded_rows_of_unknown_length() -> None:
    steps = [make_step(9, 1)]
    uncounted = case("sample_mean", "sample_mean", qkv_format="bshd") | {"padded": 24}
    with pytest.raises(RankError, match=r"--custom-megatron-init-path megatron_rl_loss.frameworks.miles.count_steps"):
        run_ranks(2, train, checkout(MILES), 2, steps, [uncounted])
    assert_exact(1, 1, steps, [uncounted])


def test_token_mean_without_counts_where_every_sample_has_a_token() -> None:
    assert_exact(2, 2, [make_step(4, 2, masked=False)], [case("token_mean", "token_mean", **PER_TOKEN)])


@pytest.mark.parametrize("rejected", [False, True], ids=["masked", "rejected"])
def test_token_mean_without_counts_stops_at_a_sample_without_a_token(rejected: bool) -> None:
    steps = [make_step(5, 1, masked=not rejected, rejected=rejected)]
    uncounted = case("token_mean", "token_mean", **PER_TOKEN, **(REJECTING if rejected else {}))
    with pytest.raises(RankError, match=r"rejection \(TIS\) emptied it.*miles\.count_steps"):
        run_ranks(1, train, checkout(MILES), 1, steps, [uncounted])


def test_a_rollout_of_two_samples() -> None:
    """The hook refuses it, and says to run without: their own reducer then is the mean over rollouts."""
    steps = [make_step(6, 2, split=True)]
    assert_exact(2, 1, steps, [case("constant", "constant_40", 40.0, **COUNTED), case("sample_mean", None)])
    with pytest.raises(RankError, match="Run without the hook"):
        run_ranks(2, train, checkout(MILES), 1, steps, [case("sample_mean", "sample_mean", **COUNTED)])


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"multi_lora": True}, "steps to be counted with multi-LoRA"),
        ({"replicas": 2}, "independent data-parallel replicas"),
    ],
)
def test_steps_that_cannot_be_counted(changed: dict[str, Any], error: str) -> None:
    one = case("constant", "constant_40", 40.0, **COUNTED)
    replicas = {"replicas": changed.pop("replicas")} if "replicas" in changed else {}
    one["flags"] |= changed
    with pytest.raises(RankError, match=error):
        run_ranks(1, train, checkout(MILES), 1, [make_step(1, 1)], [one | replicas])


def test_negative_control_their_own_token_mean_has_phantom_tokens() -> None:
    """And without fully masked samples it has none: what is compared is sound."""
    cases = [case("token_mean", None, **PER_TOKEN), case("sample_mean", None)]
    for masked in (True, False):
        for errors in run_ranks(2, train, checkout(MILES), 1, [make_step(7, 2, masked=masked)], cases):
            assert (errors[0][0] > 1e-2) == masked
            assert errors[1][0] < TOLERANCE


# --- the FSDP backend


def train_on_fsdp(root: str, step: Step, cases: list[dict[str, Any]]) -> list[list[float]]:
    """On a rank: the error of a step of their FSDP actor in each case."""
    start_process_group()
    names = "fsdp_utils.actor", "fsdp_utils.parallel", "training_utils.parallel", "training_utils.data"
    modules = load(MILES, root, *(f"miles.backends.{name}" for name in names))
    actor_module, fsdp_parallel, parallel, data_module = modules
    distributed = importlib.import_module("miles.utils.distributed_utils")
    _compute_in_float32()
    distributed.GLOO_GROUP = dist.group.WORLD
    mesh_of = fsdp_parallel.init_device_mesh
    fsdp_parallel.init_device_mesh = lambda device_type, **kwargs: mesh_of("cpu", **kwargs)
    state = fsdp_parallel.create_fsdp_parallel_state(SimpleNamespace(dp_replicate_size=1))
    parallel.set_parallel_state(state)
    found = []
    for one in cases:
        args = arguments(global_batch_size=step.num_rollouts, **one["flags"])
        data = data_of([step], state.intra_dp.rank, lambda values, total, response: values)
        iterators, num_microbatches = data_module.get_data_iterator(args, None, data)
        model = ShardedTable(step.table)
        mesh = state.get_mesh("fsdp")
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=mesh)
        actor = SimpleNamespace(
            args=args,
            model=model,
            precision_policy=SimpleNamespace(autocast_dtype=None),
            _get_model_inputs_args=lambda batch: {"input_ids": batch["tokens"]},
        )
        keys = ("tokens", "loss_masks", "total_lengths", "response_lengths", "log_probs", "advantages", "max_seq_lens")
        reports = []
        for _ in range(num_microbatches[0]):
            batch = data_module.get_batch(
                iterators[0], [*keys, "rollout_log_probs"], args.data_pad_size_multiplier, args.qkv_format
            )
            step_of_actor = actor_module.FSDPTrainRayActor._train_step
            reports.append(step_of_actor(actor, batch, step_id=0, num_microbatches=num_microbatches[0]))
        report = importlib.import_module("miles.backends.training_utils.log_utils").aggregate_train_losses(reports)
        gradient = model.table.grad.full_tensor()
        value = report["pg_loss"] * len(step.samples) / step.num_rollouts  # it reports a mean over samples
        found.append([errors_of(step, one["mode"], one["divisor"], value, gradient)])
    return found


class Output(NamedTuple):  # what FSDP2 can look into for tensors
    logits: torch.Tensor


class ShardedTable(torch.nn.Module):
    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(table.clone())

    def forward(self, input_ids: torch.Tensor) -> Output:
        return Output(logits(self.table, input_ids))


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_fsdp(dp: int) -> None:
    cases = [case("sample_mean", "sample_mean"), case("constant", "constant_40", 40.0)]
    for errors in run_ranks(dp, train_on_fsdp, checkout(MILES), make_step(10, dp), cases):
        assert max(max(errors)) < TOLERANCE
    for flags in (PER_TOKEN, {}):
        with pytest.raises(RankError, match=r"it never divides by the step's tokens.*--train-backend megatron"):
            run_ranks(
                dp, train_on_fsdp, checkout(MILES), make_step(10, dp), [case("token_mean", "token_mean", **flags)]
            )
