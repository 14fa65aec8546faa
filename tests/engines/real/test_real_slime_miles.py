"""Training steps of slime, miles and vime with our hooks: SLIME_PATH=~/slime MILES_PATH=~/miles VIME_PATH=~/vime.

Real: their data iterator, `get_batch`, `policy_loss_function`, `loss_function`, `train_one_step`, log-probs, reports,
with Megatron's schedule, groups and DDP, on gloo; for rows of sessions the `Sample`, `build_dp_schedule` and
`compute_advantages_and_returns` of slime and vime too. The model is a table of logits; the optimizer keeps gradients.
Replaced: Megatron's fused cross entropy, whose backward rounds to bfloat16, by its plain one.
"""

import dataclasses
import importlib
import inspect
import json
import random
import re
import runpy
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import added_terms
import numpy as np
import oracle
import pytest
import torch
from checkouts import MILES, SLIME, VIME, checkout, load, record_errors
from logit_table import KeepsGradients, Step, errors_of, logit_model, make_step, reject
from logit_table import rollout_data as data_of
from plants import MORE_TERMS, Plant, assert_stopped, planted, record_plant
from ranks import RankError, run_ranks
from repository import EXAMPLES
from slime_launches import TOLERANCE, MakeStep, arguments, case, compute_in_float32, with_steps

from megatron_rl_loss import Samples, ZigzagResponse, plan_step
from megatron_rl_loss.engines import replacing, slime
from megatron_rl_loss.engines.slime import unit_weights

PEERS = {"slime": SLIME, "miles": MILES, "vime": VIME}

pytestmark = pytest.mark.slow
each_peer = pytest.mark.parametrize("peer", PEERS)


def train(peer: str, root: str, cp: int, cases: list[dict[str, Any]]) -> list[list[float]]:
    """On a rank: the error of every step of each case."""
    from megatron.training import global_vars
    from table_step import start

    from megatron_rl_loss import Audit

    def audited(**options: Any) -> Any:
        with Audit(options["model"], then=lambda _: measured.append(audit.measured)) as audit:
            return get_schedule()(**options)

    state = start(cp=cp)
    setup = setup_miles(root) if peer == "miles" else setup_slime(peer, root)
    model_module, measured = setup.model, list[Any]()
    get_schedule, own_loss_function = model_module.get_forward_backward_func, model_module.loss_function
    load_function = importlib.import_module(f"{peer}.utils.misc").load_function
    if peer != "miles":
        model_module.get_forward_backward_func = lambda: audited
    results = []
    cases = list(map(with_steps, cases))
    every_step = [step for launch in cases for step in launch["steps"]]
    importlib.import_module("logit_table").rejecting = reject(every_step)  # type: ignore[attr-defined]
    for launch in cases:
        args, steps = arguments(**launch["flags"]), launch["steps"]
        added_terms.choose(launch.get("term", ""))
        global_vars._GLOBAL_ARGS = args
        if args.use_tis:
            args.custom_tis_function_path = "logit_table.rejecting"
        model_module.loss_function = without_phantom(own_loss_function) if launch["mended"] else own_loss_function
        vars(slime)["unit_weights"] = launch.get("weights", unit_weights)
        weights: list[Any] = [None] * len(steps)
        if "recipe" in launch:
            steps, weights, launch["rewards"] = by_the_recipe(
                peer, launch["recipe"], launch["right"], args, steps, state
            )
        replacing._REGISTRY.clear()
        if args.custom_megatron_init_path is not None:  # as their `init` does
            load_function(args.custom_megatron_init_path)(args)
        step_arguments = setup.prepare(args, launch | {"steps": steps}, state.get_data_parallel_rank())
        errors = []
        for step_id, step in enumerate(steps):
            if args.loss_type == "custom_loss":
                plan_losses(setup.losses, step, launch, state)
            model = logit_model(step.table, per_token=args.calculate_per_token_loss)
            optimizer = KeepsGradients(model)
            report, *_ = model_module.train_one_step(
                args=args,
                rollout_id=3,
                step_id=step_id,
                model=[model],
                optimizer=optimizer,
                opt_param_scheduler=SimpleNamespace(step=lambda increment: None),
                **step_arguments(step_id),
            )
            reported_loss, options = (
                report["pg_loss"],
                {} if weights[step_id] is None else {"weights": weights[step_id]},
            )
            mode = "token_sum" if options else launch["mode"]
            errors.append(errors_of(step, mode, launch["divisor"], reported_loss, optimizer.gradients[0], **options))
            if measured and measured[-1] is not None and args.custom_pg_loss_reducer_function_path:
                errors.append(audit_error(measured[-1], launch, step))
        says = [line for line in replacing.active() if line.startswith(f"{peer}: policy loss by {launch['mode']}")]
        assert len(says) == (args.custom_pg_loss_reducer_function_path is not None), replacing.active()
        if "says" in launch:  # nothing is replaced
            assert launch["says"] in replacing.active(), replacing.active()
        elif says:  # without counts, the hook is loaded inside the first step
            (replaced,) = (line for line in replacing._REGISTRY if isinstance(line, replacing.Replaced))
            proof, is_counted = replaced.proof, args.custom_megatron_init_path is not None
            printed = [line or "" for line in (*replacing.active(), proof and proof.beside)]
            of_terms = [line for line in printed if re.search("NOT (PROVED|CHECKED)", line)]
            assert not of_terms, of_terms
            assert (proof and proof.outcome) == ("proved" if is_counted or len(steps) > 1 else None)
            replaced.undo()
        results.append(errors)
    return results


def by_the_recipe(peer: str, mode: str, right: str, args: Any, steps: list[Step], state: Any) -> Any:
    """Steps as the engine schedules them, with GRPO's advantages; the weights of `right`; each row's reward.

    A session is one to three rows of other lengths, a prompt two sessions. The engine's flag removes fully masked rows.
    """
    types, schedule = (importlib.import_module(f"{peer}.utils.{name}") for name in ("types", "dp_schedule"))
    recipe = runpy.run_path(str(EXAMPLES / "recipes" / "slime_rows.py"))
    recipe["rewards"].__globals__["MODE"] = mode
    numbers, rng = [session for session, size in enumerate([1, 3, 2, 1, 3, 2]) for _ in range(size)], random.Random(4)
    sessions = [number + 6 * k for k in range(len(steps)) for number in numbers]
    reward = {session: rng.uniform(-1, 1) for session in sessions}
    rollouts = [sample for step in steps for sample in step.samples]
    samples = [
        types.Sample(
            group_index=session // 2, rollout_id=session, reward=reward[session], response_length=sample.response,
            loss_mask=sample.mask.tolist() if sample.mask.any() else None, remove_sample=not sample.mask.any(),
        ) for session, sample in zip(sessions, rollouts, strict=True)
    ]  # fmt: skip
    raw, rewards = recipe["rewards"](args, samples)
    assert raw == [reward[session] for session in sessions]
    parallel = {"dp_size": state.get_data_parallel_world_size(), "cp_size": state.get_context_parallel_world_size()}
    partitions, indices, counts, of_steps = schedule.build_dp_schedule(
        args, parallel | {"vpp_size": 1, "microbatch_group_size_per_vp_stage": 1},
        [sample.total for sample in rollouts], global_batch_size=args.global_batch_size, rollout_indices=sessions,
    )  # fmt: skip
    dealt = [
        [[partition[i] for i in chosen] for chosen in of_rank]
        for partition, of_rank in zip(partitions, indices, strict=True)
    ]
    results, weights = [], []
    for k, step in enumerate(steps):
        begin, end = sum(counts[:k]), sum(counts[: k + 1])
        of_step = [[[i - 12 * k for i in chosen] for chosen in of_rank[begin:end]] for of_rank in dealt]
        rows = []
        for sample, number in zip(step.samples, numbers, strict=True):
            ours, other = reward[number + 6 * k], reward[(number ^ 1) + 6 * k]
            advantage = (ours - other) / 2 / (abs(ours - other) / 2**0.5 + 1e-6)  # of two; std with Bessel's correction
            rows.append(
                dataclasses.replace(sample, rollout=number, advantages=torch.full_like(sample.advantages, advantage))
            )
        results.append(dataclasses.replace(step, samples=rows, dealt=of_step, num_rollouts=of_steps[k]))
        masks = [row.mask for row in rows]
        grouped = [oracle.Sample(mask, mask, None, number // 2) for mask, number in zip(masks, numbers, strict=True)]
        by_ids = oracle.weights_by_ids("session_mean", masks, numbers, [], "all")
        weights.append(by_ids if right == "session_mean" else oracle.step_weights("prompt_mean", grouped))
    return results, weights, [rewards[12 * k :][:12] for k in range(len(steps))]


def without_phantom(loss_function: Any) -> Any:
    """The engines' loss function, mended: a sample without a mask token counts none."""
    source = inspect.getsource(loss_function)
    assert "torch.clamp_min(loss_mask.sum(), 1)" in source
    names = dict(vars(importlib.import_module(loss_function.__module__)))
    exec(source.replace("torch.clamp_min(loss_mask.sum(), 1)", "loss_mask.sum()"), names)
    return names["loss_function"]


def plan_losses(losses: Any, step: Step, launch: dict[str, Any], state: Any) -> None:
    """A function for their ``--custom-loss-function-path``: their policy loss by a planned step."""
    mine = [[step.samples[i] for i in chosen] for chosen in step.dealt[state.get_data_parallel_rank()]]
    plan = plan_step(
        [
            Samples(
                [sample.mask for sample in of_batch],
                layout=ZigzagResponse([sample.total for sample in of_batch], [sample.response for sample in of_batch]),
                rollout_ids=[sample.rollout for sample in of_batch],
            )
            for of_batch in mine
        ],
        launch["mode"], divisor=launch["divisor"], dp_group=state.get_data_parallel_group(),
        cp_group=state.get_context_parallel_group(), gradients="averaged over ranks",
    )  # fmt: skip
    by_first_id = {int(of_batch[0].ids[0]): microbatch for of_batch, microbatch in zip(mine, plan, strict=True)}

    def of_step(args: Any, batch: Any, logits: torch.Tensor, _: Any) -> Any:
        microbatch = by_first_id[int(batch["unconcat_tokens"][0][0])]
        of_tokens: list[torch.Tensor] = []  # what the loss function hands to its reducer, the policy loss first

        def keep(values: torch.Tensor) -> torch.Tensor:
            of_tokens.append(values)
            return values.sum()

        _, log = losses.policy_loss_function(args, batch, logits, keep)
        values = of_tokens[0] + 0 * logits.sum()  # miles's log-probs of no token have no graph
        loss, _ = microbatch.loss(values, form="slime")
        return loss, log | {"pg_loss": loss.detach()}

    table: Any = importlib.import_module("logit_table")
    table.of_step = of_step
    table.planned = lambda *passed: table.of_step(*passed)  # slime looks a function up once


def setup_slime(peer: str, root: str) -> Any:
    """slime, or vime, a fork of it."""
    names = (f"{peer}.backends.megatron_utils.{name}" for name in ("model", "cp_utils", "data", "loss"))
    model, cp_utils, data_module, losses = load(PEERS[peer], root, *names)
    if peer == "slime":
        cpu = torch.device("cpu")
        vars(sys.modules["slime.utils.accelerator"])["_ACCELERATOR"] = SimpleNamespace(
            device=lambda index: cpu, current_device=lambda: cpu
        )

    def prepare(args: Any, launch: dict[str, Any], dp_rank: int) -> Any:
        data = data_of(launch["steps"], dp_rank, cp_utils.slice_log_prob_with_cp)
        if "rewards" in launch:
            of_steps = zip(launch["steps"], launch["rewards"], strict=True)
            data["rewards"] = [
                rewards[i] for step, rewards in of_steps for chosen in step.dealt[dp_rank] for i in chosen
            ]
            losses.compute_advantages_and_returns(args, data)
        iterator = data_module.get_data_iterator(data)
        return lambda step_id: {
            "data_iterator": iterator,
            "num_microbatches": data["num_microbatches"][step_id],
            "step_global_batch_size": data["global_batch_sizes"][step_id],
        }

    return SimpleNamespace(model=model, prepare=prepare, losses=losses)


def setup_miles(root: str) -> Any:
    names = (
        *("megatron_utils.model", "megatron_utils.parallel"),
        *(f"training_utils.{name}" for name in ("parallel", "cp_utils", "data", "loss_hub.losses")),
    )
    modules = load(MILES, root, *(f"miles.backends.{name}" for name in names))
    model, megatron_parallel, parallel, cp_utils, data_module, losses = modules
    group_info = importlib.import_module("miles.utils.ft_utils.process_group_utils")
    compute_in_float32()

    def prepare(args: Any, launch: dict[str, Any], dp_rank: int) -> Any:
        alone = group_info.GroupInfo(rank=0, size=1, group=None)
        parallel.set_parallel_state(megatron_parallel.create_megatron_parallel_state(indep_dp=alone))
        padded = launch.get("padded")

        def cut(values: Any, total: int, response: int) -> Any:
            return cp_utils.slice_log_prob_with_cp(values, total, response, args.qkv_format, padded)

        data = data_of(launch["steps"], dp_rank, cut) | ({} if padded is None else {"max_seq_lens": [padded] * 100})
        iterators, num_microbatches = data_module.get_data_iterator(args, None, data)
        return lambda step_id: {
            "data_iterator": iterators,
            "num_microbatches": num_microbatches[step_id],
            "num_rollouts": data_module.get_num_rollouts(args, data, len(launch["steps"]))[step_id],
            "witness_info": None,
            "attempt": 0,
        }

    return SimpleNamespace(model=model, prepare=prepare, losses=losses)


def audit_error(measured: Any, launch: dict[str, Any], step: Step) -> float:
    """The largest relative error of a weight, by an audit of their step, whose loss our hook taps."""
    if measured.unknown:
        raise AssertionError(measured.unknown)
    tokens = measured.tokens
    sums = np.bincount(tokens.sample, tokens.mask).clip(1)[tokens.sample]
    in_step = sum(float(sample.mask.sum()) for sample in step.samples)  # before any rejection
    size = {"sample_mean": sums, "token_mean": in_step / step.num_rollouts, "constant": launch["divisor"]}[
        launch["mode"]
    ]
    expected = tokens.mask / size / step.num_rollouts
    return float(np.abs(measured.weights - expected).max() / expected.max())


def three(peer: str, steps: Sequence[MakeStep], counted: bool = False, **flags: Any) -> list[dict[str, Any]]:
    """Each mode; a token mean with the step's counts."""
    return [
        case(peer, "sample_mean", "sample_mean", steps, counted=counted, **flags),
        case(peer, "constant", "constant_40", steps, counted=counted, **flags),
        case(peer, "token_mean", "token_mean", steps, counted=True, calculate_per_token_loss=True, **flags),
    ]


def errors(peer: str, dp: int, cp: int, *cases: dict[str, Any]) -> list[list[list[float]]]:
    """Errors by rank, case and step."""
    return run_ranks(dp * cp, train, peer, checkout(PEERS[peer]), cp, cases)


def assert_exact(record_property: Any, peer: str, dp: int, cp: int, *cases: dict[str, Any]) -> None:
    for of_rank in errors(peer, dp, cp, *cases):
        for launch, of_steps in zip(cases, of_rank, strict=True):
            assert max(of_steps) < TOLERANCE, (launch["mode"], launch["flags"])
            record_errors(record_property, PEERS[peer], "every hook and `plan_step`", ours=max(of_steps))


@each_peer
@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (2, 2), (1, 4)])
def test_hooks_are_exact(peer: str, dp: int, cp: int, record_property: Any) -> None:
    """Cases: with and without rejection; all-gather context parallelism; miles's padded rows, by either cut.

    All-gather of padded rows, as DeepSeek V4 has it, holds for micro-batches of one row.
    """
    cases = []
    for rejected in (False, True):
        steps = [partial(make_step, seed, dp, rejected=rejected) for seed in (1, 2)]
        cases += three(peer, steps, use_tis=rejected)
        cases.append(case(peer, "token_mean", "token_mean", steps, counted=True, use_tis=rejected))
    if cp > 1:
        cases += three(peer, [partial(make_step, 3, dp)], allgather_cp=True)
    for allgather in {False, cp > 1} if peer == "miles" else ():
        steps = [partial(make_step, 9, dp, microbatches=12 // dp if allgather else 2)]
        cases += three(peer, steps, counted=True, qkv_format="bshd", allgather_cp=allgather)
        if cp == 1:  # where the length of rows is not needed
            cases.append(case("miles", "sample_mean", "sample_mean", steps, qkv_format="bshd"))
    assert_exact(record_property, peer, dp, cp, *cases)


SETTINGS: list[dict[str, Any]] = [
    {"entropy_coef": 0.01},
    *({"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": kind} for kind in ("k1", "low_var_kl")),
    {"advantage_estimator": "gspo"},
    {"use_opsm": True, "opsm_delta": 0.1},
    {"eps_clip_c": 3.0},
    {"recompute_loss_function": True},
    {"get_mismatch_metrics": True, "tis_clip": 2.0, "tis_clip_low": 0.0, "entropy_coef": 0.01},
    {"use_rollout_logprobs": True},
]


@each_peer
@pytest.mark.parametrize("per_token", [False, True])
def test_other_losses_and_terms_are_no_faults(peer: str, per_token: bool) -> None:
    """Each step is proved, as `train` asserts; their gradients are of other losses than the oracle's."""
    mode, steps = "token_mean" if per_token else "sample_mean", [partial(make_step, 7, 2)]
    cases = [case(peer, mode, mode, steps, counted=True, calculate_per_token_loss=per_token, **of) for of in SETTINGS]
    errors(peer, 2, 2, *cases)


@each_peer
def test_their_own_reducers(peer: str, record_property: Any) -> None:
    """The engines' reducers are exact, but for the phantom token of each fully masked sample in a token mean."""
    settings = {"sample mean": "sample_mean", "token mean": "token_mean", "token mean, masked samples": "token_mean"}
    cases = [
        case(peer, mode, hook, [partial(make_step, 7, 2, masked=name != "token mean")], counted=hook == "token_mean",
             calculate_per_token_loss=mode == "token_mean") for name, mode in settings.items() for hook in (None, mode)
    ]  # fmt: skip
    results = [max(of_steps) for of_steps in errors(peer, 2, 2, *cases)[0]]
    for setting, own, ours in zip(settings, results[::2], results[1::2], strict=True):
        assert ours < TOLERANCE
        record_errors(record_property, PEERS[peer], setting, own, ours)
    assert max(results[:4]) < TOLERANCE < 1e-2 < results[4]


@each_peer
def test_other_ways_and_negative_controls(peer: str, record_property: Any) -> None:
    """A planned step, as their custom loss. A token mean without counts is exact where each sample has a token.

    Of rollouts of two samples their own reducer is the mean. Without phantom tokens theirs is exact, and so is ours.
    """
    uncounted: dict[str, Any] = {"calculate_per_token_loss": True}
    flags: dict[str, Any] = {"loss_type": "custom_loss", "custom_loss_function_path": "logit_table.planned"}
    full, split = [partial(make_step, 4, 2, masked=False)], [partial(make_step, 6, 2, split=True)]
    exact = [case(peer, mode, None, [partial(make_step, 8, 2, split=of_two)], **flags)
             for mode in ("sample_mean", "constant", "token_mean") for of_two in (False, True)]  # fmt: skip
    exact += [
        case(peer, "token_mean", "token_mean", full, **uncounted),
        case(peer, "constant", "constant_40", split, counted=True),
        case(peer, "sample_mean", None, split),
    ]
    exact += [
        case(peer, "token_mean", hook, [partial(make_step, 7, 2)], counted=hook is not None, mended=True, **uncounted)
        for hook in ("token_mean", None)
    ]
    assert_exact(record_property, peer, 2, 2, *exact)
    for of_rank in errors(peer, 2, 1, case(peer, "constant", "constant_41", [partial(make_step, 7, 2)])):
        assert all(of_steps[0] > 1e-2 for of_steps in of_rank)


def test_an_audit_and_counts_by_one_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Any) -> None:
    verdict = tmp_path / "verdict.json"
    monkeypatch.setenv("MEGATRON_RL_LOSS_AUDIT", f"--expect token_mean --json {verdict}")
    of_tokens = {"counted": True, "calculate_per_token_loss": True}
    counted = case("miles", "token_mean", "token_mean", [partial(make_step, 7, 2)], **of_tokens)
    assert_exact(record_property, "miles", 2, 1, counted)
    (results,) = json.loads(verdict.read_text()).values()
    assert results["sound"] is True


@each_peer
@pytest.mark.parametrize("refused", ["masked", "rejected", "split"])
def test_refused(peer: str, refused: str) -> None:
    """A sample without a token, masked or rejected, of which nobody has counted; a rollout of two samples."""
    options: dict[str, Any] = {refused: True} if refused != "rejected" else {"masked": False, "rejected": True}
    steps = [partial(make_step, 5, 1, **options)]
    flags = {"calculate_per_token_loss": True, "use_tis": refused == "rejected"}
    launch, error = (
        case(peer, "token_mean", "token_mean", steps, **flags),
        r"rejection \(TIS\) left.*slime\.count_steps",
    )
    if refused == "split":
        launch, error = case(peer, "sample_mean", "sample_mean", steps, counted=True), "Run without the hook"
    with pytest.raises(RankError, match=error):
        errors(peer, 1, 1, launch)


COUNT_STEPS = "add --custom-megatron-init-path megatron_rl_loss.engines.slime.count_steps"


@each_peer
def test_a_pipeline_without_counts_is_not_proved(peer: str) -> None:
    launch = case(peer, "sample_mean", "sample_mean", [partial(make_step, 5, 1)], pipeline_model_parallel_size=2)
    says = f"{peer}: NOT PROVED: only the last pipeline stage loads the hook. To measure the first step, {COUNT_STEPS}"
    errors(peer, 1, 1, launch | {"says": says})


LOSS, MODEL = "slime/backends/megatron_utils/loss.py", "slime/backends/megatron_utils/model.py"
OF_VIME = "vime/backends/megatron_utils/loss.py"
OF_MILES, LOSSES = (f"miles/backends/training_utils/{name}" for name in ("loss.py", "loss_hub/losses.py"))
ARGUMENTS, PER_STEP, LAST_MASKS = (
    "total_lengths, response_lengths",
    "* num_microbatches\n",
    'else batch["loss_masks"]\n',
)
MODEL_OF_MILES, OF_BATCH = (
    "miles/backends/megatron_utils/model.py",
    '"rollout_mask_sums",\n            ],\n            args.data_pad_size_multiplier,\n            args.qkv_format,\n'
    "            allgather_cp=args.allgather_cp,\n        )\n",
)
DATA_OF_MILES, NEXT = "miles/backends/training_utils/data.py", "    batch = data_iterator.get_next(keys)\n"
TWICE_THE_SAME = f"    if data_iterator.offset == 2:\n        data_iterator.offset = 0\n    {NEXT}"
FEWER = (
    "num_microbatches=num_microbatches,\n        seq_length=args.seq_length,\n"
    "        micro_batch_size=args.micro_batch_size,\n        decoder_seq_length=args.decoder_seq_length,\n"
    "        forward_only=False"
)
NOT_ALL_DATA = "each micro-batch must be trained on once"
SHIFTED = 'batch["loss_masks"] = [mask.roll(1) for mask in batch["loss_masks"]]'
REDUCED, READS = "pg_loss = pg_loss_reducer(pg_loss)", "custom_pg_loss_reducer_function_path"
OWN, TWICE = "sum_of_sample_mean(pg_loss)", (REDUCED, f"{REDUCED} + pg_loss_reducer(pg_loss)")


REFUSED = "this package expects train_one_step"
PLANTS = {
    "slime": [
        Plant("scaling doubled", {LOSS: (PER_STEP, "* num_microbatches * 2\n")}),
        Plant(
            "scaling doubled, per-token loss",
            {LOSS: ("loss * mpu.get_context", "loss * 2 * mpu.get_context")},
            case={"hook": "token_mean"},
        ),
        Plant("counts of one rank", {LOSS: ("/ step_global_batch_size", "/ len(batch['loss_masks'])")}, world=(2, 1)),
        Plant(
            "CP ranks scaled 1.5 and 0.5",
            {LOSS: (PER_STEP, "* num_microbatches * (1.5 - mpu.get_context_parallel_rank())\n")},
            world=(2, 2),
        ),
        Plant("option renamed", {LOSS: (f'args, "{READS}"', 'args, "custom_reducer"')}, "never called"),
        Plant("option misspelt", {}, "slime ignores options that it does not know", case={"hook": None}),
        Plant("hook called twice", {LOSS: TWICE}),
        Plant(
            "hook for the report alone",
            {LOSS: (REDUCED, f"{REDUCED}.detach() + {OWN} - {OWN}.detach()")},
            case={"hook": "constant_40"},
        ),
        Plant("loss not linear", {LOSS: (REDUCED, f"{REDUCED} ** 2")}),
        Plant(
            "masks changed for the hook",
            {LOSS: (LAST_MASKS, 'else [torch.ones_like(one) for one in batch["loss_masks"]]\n')},
        ),
        Plant(
            "arguments of the hook swapped",
            {LOSS: (f"{ARGUMENTS}, pg_loss_masks", "response_lengths, total_lengths, pg_loss_masks")},
            "leave a prompt token",
        ),
        Plant("train_one_step renamed", {MODEL: ("def train_one_step(", "def train_a_step(")}, REFUSED),
        Plant("its argument renamed", {MODEL: ("step_global_batch_size: int", "global_size: int")}, REFUSED),
        Plant("our weights times 1.25", {}),
    ],
    "miles": [
        Plant("masks shifted in a batch", {MODEL_OF_MILES: (OF_BATCH, f"{OF_BATCH}        {SHIFTED}\n")}),
        Plant(
            "masks changed in place, per-token loss",
            {
                MODEL_OF_MILES: (
                    OF_BATCH,
                    f"{OF_BATCH}        [mask.__setitem__(0, 1) for mask in batch['loss_masks']]\n",
                )
            },
            case={"hook": "token_mean"},
        ),
        Plant("scaling doubled", {OF_MILES: ("* num_microbatches", "* num_microbatches * 2")}),
        Plant(
            "a micro-batch left out",
            {MODEL_OF_MILES: (FEWER, FEWER.replace("=num_microbatches", "=num_microbatches - 1"))},
            NOT_ALL_DATA,
        ),
        Plant("a micro-batch twice", {DATA_OF_MILES: (NEXT, f"{NEXT}{TWICE_THE_SAME}")}, NOT_ALL_DATA),
        Plant("option renamed", {LOSSES: (f"if args.{READS}", "if args.custom_reducer")}, "never called"),
        Plant("hook called twice", {LOSSES: TWICE}),
    ],
    "vime": [
        Plant("scaling doubled", {OF_VIME: (PER_STEP, "* num_microbatches * 2\n")}),
        Plant("option renamed", {OF_VIME: (f'args, "{READS}"', 'args, "custom_reducer"')}, "never called"),
        Plant("hook called twice", {OF_VIME: TWICE}),
    ],
}


def too_large(*passed: Any) -> torch.Tensor:
    return 1.25 * unit_weights(*passed)


@pytest.mark.parametrize(
    ("peer", "plant"),
    [(peer, plant) for peer, plants in PLANTS.items() for plant in plants],
    ids=lambda value: getattr(value, "fault", value),
)
def test_a_fault_stops_the_first_step(peer: str, plant: Plant, tmp_path: Path, record_property: Any) -> None:
    framework, hook, (ranks, cp) = PEERS[peer], plant.case.get("hook", "sample_mean"), plant.world
    mode, steps = "constant" if hook == "constant_40" else hook or "sample_mean", [partial(make_step, 7, ranks // cp)]
    launch = case(peer, mode, hook, steps, counted=True, calculate_per_token_loss=hook == "token_mean")
    launch |= {"weights": too_large} if "our weights" in plant.fault else {}
    root = planted(framework, tmp_path, plant.edits) if plant.edits else checkout(framework)
    assert_stopped(record_property, framework, plant.fault, plant.match, ranks, train, peer, root, cp, [launch])


IN_TERMS = {"slime": LOSS, "miles": LOSSES, "vime": OF_VIME}
OTHER_WEIGHT = "NOT PROVED: Beside the policy loss, .* means have these factors"
#: What stands in the policy loss, what comes in its place, and what is said; the KL penalty is not 0.
TERMS = {
    "KL penalty times 10": ("loss + args.kl_loss_coef", "loss + 10 * args.kl_loss_coef", OTHER_WEIGHT),
    "KL penalty without a gradient": (
        "loss + args.kl_loss_coef * kl_loss", "loss + args.kl_loss_coef * kl_loss.detach()", OTHER_WEIGHT
    ),
    "a mean of the engine's own added, of the value 0": (
        "loss + args.kl_loss_coef * kl_loss",
        "loss + args.kl_loss_coef * kl_loss + sum_of_sample_mean(kl - kl.detach())", OTHER_WEIGHT
    ),
    "the engine's mean of KL added": (
        "loss + args.kl_loss_coef * kl_loss", "loss + args.kl_loss_coef * kl_loss + kl_loss", OTHER_WEIGHT
    ),
    "a loss added beside": (
        "loss + args.kl_loss_coef * kl_loss", "loss + args.kl_loss_coef * kl_loss + kl.sum()", MORE_TERMS
    ),
}  # fmt: skip


@each_peer
@pytest.mark.parametrize("name", TERMS)
def test_terms_of_other_weights_are_said(peer: str, name: str, tmp_path: Path, record_property: Any) -> None:
    framework, steps = PEERS[peer], [partial(make_step, 7, 1)]
    flags: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl"}
    launch = case(peer, "sample_mean", "sample_mean", steps, counted=True, **flags)
    *edit, says = TERMS[name]
    root = planted(framework, tmp_path, {IN_TERMS[peer]: (edit[0], edit[1])})
    with pytest.raises(RankError, match=says):
        run_ranks(1, train, peer, root, 1, [launch])
    record_plant(record_property, framework, name, "says that it is not proved")


@pytest.mark.parametrize("peer", ["slime", "vime"])
def test_rows_of_sessions_by_the_recipe(peer: str, record_property: Any) -> None:
    """Two optimizer steps of one rollout. The engine's own mean of a session pools the tokens of its rows."""
    packed: dict[str, Any] = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 16}
    packed |= {"global_batch_size": 6, "kl_coef": 0}
    steps: list[MakeStep] = [partial(make_step, seed, 2) for seed in (1, 2)]

    def of(mode: str, right: str, hook: str | None = "constant_1") -> dict[str, Any]:
        return case(peer, "constant", hook, steps, **packed) | {"divisor": 1.0, "recipe": mode, "right": right}

    modes = ["session_mean", "prompt_mean"]
    cases = [*(of(mode, mode) for mode in modes), of("session_mean", "prompt_mean"), of(modes[0], modes[0], None)]
    for *results, other, own in errors(peer, 2, 2, *cases):
        assert max(map(max, results)) < TOLERANCE < 1e-2 < min(max(other), max(own)), results
        record_errors(record_property, PEERS[peer], "rows of sessions, by weights", ours=max(map(max, results)))
