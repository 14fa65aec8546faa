"""ms-swift's own collation, loss, scaling and schedule call with our factors: MS_SWIFT_PATH=~/ms-swift.

Real: `MegatronGRPOTrainer` with `_replace_data_iterator`, `train_step`, `forward_step` and `loss_func`, its packed rows
and its gather of context-parallel log-probs, `collate_to_grpo_micro_batch`; Megatron's schedule and DDP. The model is a
table of logits. Replaced: the rollout; its template's collator and mcore-bridge's zigzag cut, by the few lines below;
an average over ranks, which gloo has not, by a sum.
"""

from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bigram_step import BETA, CLIP_HIGH, CLIP_LOW, CUTS, TOLERANCE, VOCABULARY, expected, k3, make_batch, make_table
from checkouts import MS_SWIFT, checkout, load
from oracle import zigzag
from ranks import run_ranks
from table_step import relative_error, start, table_model
from torch import Tensor

MODES: dict[str, dict[str, Any]] = {
    "token_mean": {},
    "sample_mean": {"units": "active", "kl": "token_mean"},
    "prompt_mean": {"kl": "token_mean"},
    "constant": {"divisor": 40.0, "kl": "token_mean"},
    "token_sum": {"divisor": 25.0, "kl": "token_mean"},
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
        for one in encoded:
            padding = -len(one["input_ids"]) % (2 * cp)
            one["input_ids"] += [0] * padding  # in place, as theirs
            one["labels"] += [-100] * padding
            for name in ("input_ids", "labels"):
                rows[name] += one[name]
            rows["position_ids"] += range(len(one["input_ids"]))
        lengths = [len(one["input_ids"]) for one in encoded]
        return {name: torch.tensor([values]) for name, values in rows.items()} | {"seq_lens": lengths}

    return collator


def microbatches_of(trainers: Any, dp_rank: int, dp: int, cp: int, template: Any) -> list[dict[str, Any]]:
    """What `_generate_and_score_completions` makes of a rank's rows."""
    batch = {name: values[dp_rank::dp] for name, values in make_batch().items()}
    labels = batch["input_ids"].masked_fill(batch["token_mask"] == 0, -100)
    rows, made = len(labels), []
    for first, last in [(a * rows // 6, b * rows // 6) for a, b in CUTS]:
        numbers = range(first, last)
        lengths = [int(batch["input_lengths"][i]) for i in numbers]
        samples = [
            SimpleNamespace(
                encoded={"input_ids": batch["input_ids"][i, :n].tolist(), "labels": labels[i, :n].tolist()},
                is_truncated=not batch["sample_mask"][i], rollout_logprobs=None,
            )
            for i, n in zip(numbers, lengths, strict=True)
        ]  # fmt: skip
        data, of_batch = trainers.collate_to_grpo_micro_batch(samples, template, device=torch.device("cpu"))
        width = of_batch.completion_mask.shape[1]

        def values(name: str, width: int = width, numbers: Any = numbers, lengths: Any = lengths) -> Tensor:
            """In their frame: at the token before, rows to the right of their padding."""
            found = torch.zeros(len(numbers), width)
            for row, (i, n) in enumerate(zip(numbers, lengths, strict=True)):
                padded = n + -n % (2 * cp)
                found[row, width - padded : width - padded + n - 1] = batch[name][i, 1:n]
            return found

        of_batch.old_per_token_logps, of_batch.advantages = values("prev_logprobs"), values("advantages")
        of_batch.ref_per_token_logps = values("reference_policy_logprobs")
        of_batch.num_items_in_batch = torch.tensor(float((make_batch()["token_mask"] != 0).sum()))
        made.append(data | {"grpo_batch": of_batch})
    return made


def train(root: str, cp: int, cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """On a rank: the errors of each case."""
    state = start(cp=cp)
    (trainers,) = load(MS_SWIFT, root, "swift.megatron.trainers.grpo_trainer")
    from swift.megatron.trainers import base
    from swift.megatron.utils import megatron_lm_utils

    from megatron_rl_loss.frameworks.ms_swift import aggregate

    megatron_lm_utils.split_cp_inputs = cut
    base.logical_and_across_model_parallel_group = base.reduce_max_stat_across_model_parallel_group = lambda value: (
        value
    )
    base.RerunDataIterator = trainers.RerunDataIterator = iter
    dp_rank, dp = state.get_data_parallel_rank(), state.get_data_parallel_world_size()
    stock = trainers.collate_to_grpo_micro_batch, trainers.MegatronGRPOTrainer._on_train_step_batch
    found = []
    for case in cases:
        settings = {name: value for name, value in case["settings"].items() if name != "kl"}
        trainers.collate_to_grpo_micro_batch, trainers.MegatronGRPOTrainer._on_train_step_batch = stock
        if not case.get("stock"):
            aggregate(case["mode"], **settings)
        model = table_model(make_table().flatten().tolist(), forward=lambda p, ids: p.view(VOCABULARY, -1)[ids])
        trainer: Any = object.__new__(trainers.MegatronGRPOTrainer)
        template = SimpleNamespace(padding_free=True, data_collator=collate(cp))
        microbatches = microbatches_of(trainers, dp_rank, dp, cp, template)
        options = {
            "args": SimpleNamespace(
                padding_free=True, context_parallel_size=cp, pipeline_model_parallel_size=1, overlong_filter=True,
                delta=None, num_microbatches=len(microbatches), seq_length=64, micro_batch_size=1,
                global_batch_size=1, task_type="causal_lm", is_multimodal=False, report_to=(),
                cp_partition_mode="zigzag",
            ),
            "loss_type": case.get("loss_type", "dapo"), "beta": BETA, "kl_in_reward": False, "temperature": 1.0,
            "epsilon_low": CLIP_LOW, "epsilon_high": CLIP_HIGH, "importance_sampling_level": "token",
            "_has_teacher": False, "disable_rollout_importance_sampling": True, "log_entropy": False,
            "rollout_importance_sampling_mode": None, "steps_per_generation": 1,
            "log_rollout_offpolicy_metrics": False, "off_policy_sequence_mask_delta": None, "compute_entropy": False,
            "top_entropy_quantile": 1.0, "enable_routing_replay": False,
            "_metrics": {"train": defaultdict(list)}, "unwrapped_models": [model.module], "wrapped_models": [model],
            "_step": 0, "micro_batch_size": None, "max_completion_length": 20,
            "_build_rollout_buffer": lambda _, made=microbatches: [made], "_flush_log_completions": lambda: None,
            "optimizer": SimpleNamespace(zero_grad=lambda: None, step=lambda: (True, 0.0, None)),
            "opt_param_scheduler": SimpleNamespace(step=lambda increment: None),
        }  # fmt: skip
        for name, value in options.items():
            setattr(trainer, name, value)
        sizes = iter([len(one["grpo_batch"].advantages) for one in microbatches])
        forward_step = trainer.forward_step

        def with_its_size(iterator: Any, model: Any, trainer: Any = trainer, step: Any = forward_step) -> Any:
            trainer.micro_batch_size = next(sizes)  # noqa: B023
            return step(iterator, model)

        trainer.forward_step = with_its_size

        def averaged(metric: dict[str, Tensor], **_: Any) -> dict[str, Tensor]:
            values = torch.stack(list(metric.values()))
            dist.all_reduce(values, group=state.get_data_parallel_group())
            return dict(zip(metric, values / dp, strict=True))

        trainer._all_reduce_metric = averaged
        reports, *_ = trainer.train_step(iter([]))
        value, by_entry, scale = expected(case["mode"], case["settings"], kl=k3)
        mean = sum(float(report["loss"]) for report in reports) / len(reports)
        in_gradient = relative_error(model.module.losses.main_grad.view_as(by_entry), by_entry)
        found.append({"gradient": in_gradient, "value": abs(mean - value) / scale})
    return found


CASES: list[dict[str, Any]] = [{"mode": mode, "settings": settings} for mode, settings in MODES.items()]


@pytest.mark.parametrize(("world_size", "cp"), [(1, 1), (4, 2)])
def test_every_mode_is_exact(world_size: int, cp: int) -> None:
    for results in run_ranks(world_size, train, checkout(MS_SWIFT), cp, CASES):
        for case, found in zip(CASES, results, strict=True):
            assert found["gradient"] < TOLERANCE, (case, found)
            assert found["value"] < TOLERANCE, (case, found)


def test_theirs_is_none_of_the_modes() -> None:
    kinds = {"grpo": "sample_mean", "bnpo": "token_mean", "dapo": "token_mean"}
    cases = [{"mode": mode, "settings": {}, "loss_type": kind, "stock": True} for kind, mode in kinds.items()]
    for found in run_ranks(4, train, checkout(MS_SWIFT), 2, cases)[0]:
        assert found["gradient"] > 1e-2
