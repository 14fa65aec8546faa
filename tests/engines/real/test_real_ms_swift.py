"""ms-swift's own collation, loss, scaling and schedule call with our factors: MS_SWIFT_PATH=~/ms-swift.

Real: `MegatronGRPOTrainer` with `_preprocess_inputs`, `_replace_data_iterator`, `train_step`, `forward_step` and
`loss_func`, its packed rows and its gather of context-parallel log-probs, `collate_to_grpo_micro_batch`; with Ray,
`expand_for_generation` and `_collate_for_workers` of the driver and `train_step` of the worker; Megatron's schedule and
DDP. The model is a table of logits. Replaced: Ray; the rollout; its template's collator and mcore-bridge's zigzag cut,
by the few lines below; an average over ranks, which gloo has not, by a sum.
"""

import functools
import os
import runpy
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import added_terms
import bigram_step
import pytest
import torch
import torch.distributed as dist
from bigram_step import (
    BETA,
    CLIP_HIGH,
    CLIP_LOW,
    CUTS,
    PROMPTS,
    ROWS,
    assert_exact,
    assert_proof_changes_nothing,
    bigram_model,
    bits_of,
    compare,
    errors_of,
    k3,
    make_batch,
)
from checkouts import MS_SWIFT, Settings, checkout, load
from oracle import zigzag
from packaging.version import Version
from plants import Plant, assert_stops
from ranks import run_ranks
from replacements import scale_weights, undone
from table_step import start
from torch import Tensor

MODES: dict[str, dict[str, Any]] = {
    "token_mean": {},
    "sample_mean": {"units": "active"},
    "prompt_mean": {},
    "constant": {"divisor": 40.0},
    "token_sum": {"divisor": 25.0},
}

pytestmark = pytest.mark.slow


def cut(values: Tensor, cu_seqlens: Tensor, dim: int) -> Tensor:
    """This rank's zigzag part of packed rows, in the place of mcore-bridge's."""
    from megatron.core import mpu

    edges = cu_seqlens.tolist()
    slots = [list(range(begin, end)) for begin, end in pairwise(edges)]
    held = zigzag(slots, mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size())  # type: ignore[arg-type]
    return values.index_select(dim, torch.tensor(held))


def collate(cp: int) -> Any:
    """Rows one after the other, each padded to what a context-parallel cut needs."""

    def collator(encoded: list[dict[str, Any]], padding_to: Any = None) -> dict[str, Any]:
        rows: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": []}
        for row in encoded:
            padding = -len(row["input_ids"]) % (2 * cp)
            row["input_ids"] += [0] * padding  # in place, as theirs
            row["labels"] += [-100] * padding
            for name in ("input_ids", "labels"):
                rows[name] += row[name]
            rows["position_ids"] += range(len(row["input_ids"]))
        lengths = [len(row["input_ids"]) for row in encoded]
        return {name: torch.tensor([values]) for name, values in rows.items()} | {"seq_lens": lengths}

    return collator


def rows_of(case: Any) -> dict[str, Tensor]:
    batch = make_batch()
    if not case.get("filtered", True):
        batch["token_mask"] *= batch["sample_mask"][:, None]
    return batch


def generated(expand: Any, case: Any) -> list[Any]:
    """Samples of all rows, in the order of ranks; `expand(row, times)` makes those of a prompt.

    One is too long, or not filtered and masked.
    """
    batch, samples = rows_of(case), list[Any]()
    labels = batch["input_ids"].masked_fill(batch["token_mask"] == 0, -100)
    for prompt in range(max(PROMPTS) + 1):
        samples += expand({"messages": [{"role": "user", "content": str(prompt)}]}, PROMPTS.count(prompt))
    for number, (sample, n) in enumerate(zip(samples, batch["input_lengths"].tolist(), strict=True)):
        sample.messages.append({"role": "assistant", "content": str(number)})
        sample.images = ["an image"] * bool(case.get("images"))
        sample.number, sample.finish_reason = number, "stop" if batch["sample_mask"][number] else "length"
        sample.encoded = {"input_ids": batch["input_ids"][number, :n].tolist(), "labels": labels[number, :n].tolist()}
    return samples


def fill(of_batch: Any, samples: list[Any], cp: int, case: Any) -> None:
    """Add what `_generate_and_score_completions` adds."""
    batch, width = rows_of(case), of_batch.completion_mask.shape[1]

    def values(name: str) -> Tensor:
        """Values in ms-swift's frame: at the token before, rows to the right of their padding."""
        results = torch.zeros(len(samples), width)
        for row, sample in enumerate(samples):
            n = int(batch["input_lengths"][sample.number])
            padded = n + -n % (2 * cp)
            results[row, width - padded : width - padded + n - 1] = batch[name][sample.number, 1:n]
        return results

    of_batch.old_per_token_logps, of_batch.advantages = values("prev_logprobs"), values("advantages")
    of_batch.ref_per_token_logps = values("reference_policy_logprobs")
    of_batch.num_items_in_batch = torch.tensor(float((batch["token_mask"] != 0).sum()))


def train(root: str, cp: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """On a rank: the errors of each case."""
    state = start(cp=cp, pp=bigram_step.STAGES)
    names = ("megatron.trainers.grpo_trainer", "ray.megatron.grpo_trainer", "ray.megatron.megatron_worker")
    trainers, driver, workers, losses = load(
        MS_SWIFT, root, *(f"swift.{name}" for name in names), "swift.ray.megatron.loss.grpo"
    )
    from swift.megatron.trainers import base
    from swift.megatron.utils import megatron_lm_utils
    from swift.rl_core.data import GRPOSample

    from megatron_rl_loss.engines import ms_swift

    def as_it_is(value: Any) -> Any:
        return value

    def averaged(metric: dict[str, Tensor], **_: Any) -> dict[str, Tensor]:
        values = torch.stack(list(metric.values()))
        dist.all_reduce(values, group=state.get_data_parallel_group())
        return dict(zip(metric, values / dp, strict=True))

    megatron_lm_utils.split_cp_inputs = cut
    base.logical_and_across_model_parallel_group = base.reduce_max_stat_across_model_parallel_group = as_it_is
    base.RerunDataIterator = trainers.RerunDataIterator = iter
    dp_rank, dp = state.get_data_parallel_rank(), state.get_data_parallel_world_size()
    workers.get_current_device = lambda: torch.device("cpu")
    off = "kl_in_reward _has_teacher log_entropy rollout_importance_sampling_mode log_rollout_offpolicy_metrics "
    off += "off_policy_sequence_mask_delta compute_entropy enable_routing_replay micro_batch_size"
    template = SimpleNamespace(padding_free=True, data_collator=collate(cp), template_meta=Settings())
    results, loss_func = [], trainers.MegatronGRPOTrainer.loss_func

    @functools.wraps(loss_func)
    def in_place(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss, metrics = loss_func(self, *args, **kwargs)
        loss *= self.args.num_microbatches
        metrics["loss"] *= self.args.num_microbatches
        return loss, metrics

    for case in cases:
        settings, loss_type = case["settings"], case.get("loss_type")
        added_terms.choose(case.get("term", ""))
        trainers.MegatronGRPOTrainer.loss_func = in_place if case.get("in_place") else loss_func
        model, trainer = bigram_model(), object.__new__(trainers.MegatronGRPOTrainer)
        args = Settings(
            padding_free=True, context_parallel_size=cp, pipeline_model_parallel_size=bigram_step.STAGES,
            overlong_filter=True,
            num_microbatches=len(CUTS), seq_length=64, micro_batch_size=ROWS // dp // len(CUTS), global_batch_size=1,
            task_type="causal_lm", report_to=(), cp_partition_mode="zigzag", router_replay_mode="disabled",
            delta=case.get("delta"),
        )  # fmt: skip
        shared = {
            "args": args, "wrapped_models": [model], "opt_param_scheduler": Settings(step=lambda increment: None),
            "optimizer": Settings(zero_grad=lambda: None, step=lambda: (True, 0.0, None)),
            "enable_routing_replay": None,
        }  # fmt: skip
        vars(trainer).update(
            **dict.fromkeys(off.split()) | shared,
            loss_type=loss_type, beta=case.get("beta", BETA), temperature=1.0, epsilon_low=CLIP_LOW,
            epsilon_high=case.get("epsilon_high", CLIP_HIGH), importance_sampling_level="token",
            disable_rollout_importance_sampling=True,
            steps_per_generation=1, num_generations=case.get("group_size", 4), top_entropy_quantile=1.0,
            _metrics={"train": defaultdict(list)}, _step=0,
            unwrapped_models=[model.module], max_completion_length=20, template=template,
            _flush_log_completions=lambda: None, _all_reduce_metric=averaged,
        )  # fmt: skip
        with undone():
            proof = None
            if not case.get("stock"):
                scale_weights(case.get("times", 1.0))
                os.environ["MEGATRON_RL_LOSS_PROOF"] = case.get("proof", "error")
                proof = ms_swift.aggregate(case["mode"], **settings).proof
                settings, trainer.loss_type = settings | {"kl": "token_mean"}, case.get("loss", "dapo")
            if case.get("ray"):
                reports = step_of_worker(driver, workers, losses, trainer, shared, cp, case)
            else:

                def expand(row: Any, times: int, trainer: Any = trainer) -> list[Any]:
                    samples: list[Any] = trainer._preprocess_inputs([GRPOSample.from_row(row) for _ in range(times)])
                    return samples

                reports = step_of_trainer(trainers, trainer, generated(expand, case)[dp_rank::dp], cp, case)
        assert proof is None or proof.outcome == ("" if "proof" in case else case.get("outcome", "proved"))
        mean = sum(float(report["loss"]) for report in reports) / len(reports) if reports else None
        errors = errors_of(model, case | {"settings": settings}, mean, kl=k3)
        results.append({"errors": errors, "bits": bits_of(model)})
    return results


def step_of_trainer(trainers: Any, trainer: Any, samples: list[Any], cp: int, case: Any) -> Any:
    """The report of a step without Ray."""
    microbatches, sizes, forward_step = [], list[int](), trainer.forward_step
    for first, last in case.get("cuts", CUTS):
        part = samples[first * len(samples) // 6 : last * len(samples) // 6]
        for sample in part if "ids" in case else ():
            sample.prompt_id = str(case["ids"][sample.number])
        data, of_batch = trainers.collate_to_grpo_micro_batch(part, trainer.template, device=torch.device("cpu"))
        fill(of_batch, part, cp, case)
        microbatches.append(data | {"grpo_batch": of_batch})
        sizes.append(len(part))

    def with_its_size(*arguments: Any) -> Any:
        trainer.micro_batch_size = sizes.pop(0)
        return forward_step(*arguments)

    trainer.forward_step, trainer._build_rollout_buffer = with_its_size, lambda _: [microbatches]
    reports, *_ = trainer.train_step(iter([]))
    return reports


def step_of_worker(
    driver: Any, workers: Any, losses: Any, trainer: Any, shared: dict[str, Any], cp: int, case: Any
) -> Any:
    """The report of a step with Ray, whose driver holds all samples."""
    from megatron.core import mpu
    from swift.megatron.trainers.rlhf_mixin import MegatronRLHFTrainer

    dp_rank, dp = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    of_driver = object.__new__(driver.GRPOTrainer)
    vars(of_driver).update(args=shared["args"], template=trainer.template, device=torch.device("cpu"), _padding_to=None)

    def expand(row: Any, times: int) -> list[Any]:
        of_driver.num_generations = times
        samples: list[Any] = of_driver.expand_for_generation([row])
        return samples

    samples = generated(expand, case)
    samples = [sample for first in range(dp) for sample in samples[first::dp]]
    dispatch, batches = of_driver._collate_for_workers(SimpleNamespace(dp_size=dp), samples)
    size = shared["args"].micro_batch_size
    for i, of_batch in enumerate(batches):
        fill(of_batch, samples[i * size : (i + 1) * size], cp, case)
    reports: list[Any] = []
    loss, worker = object.__new__(losses.GRPOLoss), object.__new__(workers.MegatronWorker)
    loss._dummy, trainer.micro_batch_size = trainer, size
    of_worker: Any = object.__new__(type("OfWorker", (MegatronRLHFTrainer,), {"forward_step": None}))
    step = of_worker.train_step
    if case.get("by_another_name"):  # as if the worker's trainer were no MegatronRLHFTrainer
        step = functools.partial(super(MegatronRLHFTrainer, of_worker).train_step)
    vars(of_worker).update(
        shared, forward_step=loss.forward_step, state=SimpleNamespace(iteration=1),
        run_train_step=lambda data, _: reports.extend(step(data)[0]),
    )  # fmt: skip
    worker._megatron, worker._loss_fn, worker._cached_teacher_logits = of_worker, loss, None
    worker.train_step(dispatch[dp_rank])
    return reports


def test_every_mode_is_exact(record_property: Any) -> None:
    cases = [{"mode": mode, "settings": settings} for mode, settings in MODES.items()]
    assert_exact(record_property, train, MS_SWIFT, cases)


def test_with_ray_and_with_another_scaling(record_property: Any) -> None:
    cases = [
        {"mode": mode, "settings": MODES[mode], **how}
        for mode in ("prompt_mean", "constant")
        for how in ({"ray": True}, {"in_place": True}, {"in_place": True, "ray": True})
    ]
    assert_exact(record_property, train, MS_SWIFT, cases)


def test_theirs_of_equal_micro_batches(record_property: Any) -> None:
    """ms-swift's collation cuts them. Its token count includes responses that are filtered as too long.

    The release 4.6.0 is newer than 3602360a, which calls itself 4.6.0.dev0, and mends its `bnpo` and `dapo`.
    """
    kinds = {"grpo": "sample_mean", "dr_grpo": "constant", "bnpo": "token_mean", "dapo": "token_mean"}
    cases: list[dict[str, Any]] = [
        {"setting": f"`{kind}`", "loss_type": kind, "mode": mode, "cuts": [(0, 2), (2, 4), (4, 6)], "filtered": False,
         "settings": {"divisor": 20.0} if mode == "constant" else {}} for kind, mode in kinds.items()
    ]  # fmt: skip
    cases.append(cases[-1] | {"setting": "`dapo`, `overlong_filter`", "filtered": True})
    pairs = compare(record_property, train, MS_SWIFT, cases)
    exact = [own["errors"]["gradient"] < 2e-6 for own, _ in pairs]
    version = Version(runpy.run_path(str(Path(checkout(MS_SWIFT), "swift", "version.py")))["__version__"])
    is_mended = version >= Version("4.6.0")  # whose dev0 comes before it
    assert exact == [True, True, is_mended, is_mended, False], version


def test_clamped_ratios_are_no_faults() -> None:
    """CISPO's default clamps ratios of 1 already."""
    cases: list[dict[str, Any]] = [
        {"loss": "cispo", "epsilon_high": 0.2},
        {"delta": 1.1},
        {"delta": 0.5},
        {"beta": 5.0},  # whose slopes are larger than those of the policy loss
    ]
    run_ranks(4, train, checkout(MS_SWIFT), 2, [{"mode": "prompt_mean", "settings": {}} | case for case in cases])


def test_the_proof_changes_nothing() -> None:
    case = {"mode": "prompt_mean", "settings": {}}
    assert_proof_changes_nothing(train, MS_SWIFT, [case, case | {"ray": True}])


GRPO, LOSS_FUNC = "swift/megatron/trainers/grpo_trainer.py", "partial(self.loss_func, data=data)"
PLANTS = [
    Plant("scaling doubled", {GRPO: (LOSS_FUNC, "lambda x: (2 * self.loss_func(x, data)[0], {})")}),
    Plant("counts of one micro-batch", {GRPO: ("num_items_in_batch / dp_size", "completion_mask.sum().float()")}),
    Plant(
        "hooked method renamed",
        {"swift/megatron/trainers/rollout_mixin.py": ("_on_train_step_batch", "_on_train_batch")},
        "ms-swift with no MegatronGRPOTrainer._on_train_step_batch",
    ),
    Plant(
        "hooked method not called",
        {"swift/megatron/trainers/rollout_mixin.py": ("self._on_train_step_batch(encoded_batches)", "pass")},
        "No policy loss had our weights",
    ),
    Plant("--use_ray: train_step by another name", {}, "No policy loss had our", {"ray": 1, "by_another_name": 1}),
    Plant(
        "loss computed twice",
        {GRPO: (LOSS_FUNC, "lambda x: (sum(self.loss_func(x, data)[0] for _ in '12'), {})")},
        case={"mode": "token_sum", "settings": {"divisor": 25.0}},
    ),
    Plant("advantages without their sign", {GRPO: ("= grpo_batch.advantages  #", "= grpo_batch.advantages.abs()  #")}),
    Plant(
        "mask changed before the loss",
        {
            GRPO: (
                "data = self._prepare_batch(data)",
                "data = self._prepare_batch(data); grpo_batch.completion_mask[:, -4:] = False",
            )
        },
        case={"mode": "token_sum", "settings": {"divisor": 25.0}},
    ),
    Plant(
        "advantages doubled in the loss",
        {GRPO: ("= grpo_batch.advantages  #", "= 2 * grpo_batch.advantages  #")},
        "multiplies the policy loss by 2: that must be 1 or the number of micro-batches",
    ),
    Plant(
        "rows of the overlong filter trained",
        {GRPO: ("completion_mask = completion_mask & (~truncated_mask_expanded)", "pass")},
        case={"mode": "constant", "settings": {"divisor": 40.0}},
    ),
    Plant("mask moved", {GRPO: ("= grpo_batch.completion_mask  #", "= grpo_batch.completion_mask.roll(1, 1)  #")}),
    Plant("loss not linear in advantages", {GRPO: ("= grpo_batch.advantages  #", "= grpo_batch.advantages.sign()  #")}),
    Plant(
        "backward of the gather doubled",
        {
            "swift/megatron/trainers/utils.py": (
                "output_list[cp_rank] = tensor\n", "output_list[cp_rank] = 2 * tensor - tensor.detach()\n"
            )
        },
        world=(2, 2),
    ),
    Plant("KL penalty times 10", {GRPO: ("self.beta * per_t", "10 * self.beta * per_t")}, "kl: tokens weigh 10 times"),
    Plant(
        "KL penalty of another estimator",
        {GRPO: ("torch.exp(safe_ratio) - safe_ratio - 1", "safe_ratio**2 / 2")},
        r"token_mean on kl: tokens weigh 0\.9",
    ),
    Plant("own weights times 1.25", {}, "tokens weigh 1.25 times", {"times": 1.25}),
]  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.fault)
def test_a_fault_stops(record_property: Any, tmp_path: Path, plant: Plant) -> None:
    assert_stops(record_property, MS_SWIFT, train, plant, tmp_path)
