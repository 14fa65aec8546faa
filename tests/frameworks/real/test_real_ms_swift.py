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
from bigram_step import BETA, CLIP_HIGH, CLIP_LOW, CUTS, assert_exact, bigram_model, compare, errors_of, k3, make_batch
from checkouts import MS_SWIFT, Settings, load
from oracle import zigzag
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


def microbatches_of(case: Any, trainers: Any, dp_rank: int, dp: int, cp: int, template: Any) -> list[dict[str, Any]]:
    """What `_generate_and_score_completions` makes of a rank's rows; one is too long, or not filtered and masked."""
    whole = make_batch()
    if not case.get("filtered", True):
        whole["token_mask"] *= whole["sample_mask"][:, None]
    batch = {name: values[dp_rank::dp] for name, values in whole.items()}
    labels = batch["input_ids"].masked_fill(batch["token_mask"] == 0, -100)
    rows, made = len(labels), []
    for first, last in [(a * rows // 6, b * rows // 6) for a, b in case.get("cuts", CUTS)]:
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
        of_batch.num_items_in_batch = torch.tensor(float((whole["token_mask"] != 0).sum()))
        made.append(data | {"grpo_batch": of_batch})
    return made


def train(root: str, cp: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """On a rank: the errors of each case."""
    state = start(cp=cp)
    (trainers,) = load(MS_SWIFT, root, "swift.megatron.trainers.grpo_trainer")
    from swift.megatron.trainers import base
    from swift.megatron.utils import megatron_lm_utils

    from megatron_rl_loss.frameworks.ms_swift import aggregate

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
    stock = trainers.collate_to_grpo_micro_batch, trainers.MegatronGRPOTrainer._on_train_step_batch
    off = "kl_in_reward _has_teacher log_entropy rollout_importance_sampling_mode log_rollout_offpolicy_metrics "
    off += "off_policy_sequence_mask_delta compute_entropy enable_routing_replay micro_batch_size"
    template = SimpleNamespace(padding_free=True, data_collator=collate(cp))
    found = []
    for case in cases:
        trainers.collate_to_grpo_micro_batch, trainers.MegatronGRPOTrainer._on_train_step_batch = stock
        settings, loss_type = case["settings"], case.get("loss_type")
        if not case.get("stock"):
            aggregate(case["mode"], **settings)
            settings, loss_type = settings | {"kl": "token_mean"}, "dapo"
        model = bigram_model()
        microbatches = microbatches_of(case, trainers, dp_rank, dp, cp, template)
        trainer: Any = object.__new__(trainers.MegatronGRPOTrainer)
        vars(trainer).update(
            args=Settings(
                padding_free=True, context_parallel_size=cp, pipeline_model_parallel_size=1, overlong_filter=True,
                num_microbatches=len(microbatches), seq_length=64, micro_batch_size=1, global_batch_size=1,
                task_type="causal_lm", report_to=(), cp_partition_mode="zigzag",
            ),
            loss_type=loss_type, beta=BETA, temperature=1.0, epsilon_low=CLIP_LOW,
            epsilon_high=CLIP_HIGH, importance_sampling_level="token", disable_rollout_importance_sampling=True,
            steps_per_generation=1, top_entropy_quantile=1.0, _metrics={"train": defaultdict(list)}, _step=0,
            unwrapped_models=[model.module], wrapped_models=[model], max_completion_length=20,
            _build_rollout_buffer=lambda _, made=microbatches: [made], _flush_log_completions=lambda: None,
            optimizer=Settings(zero_grad=lambda: None, step=lambda: (True, 0.0, None)), _all_reduce_metric=averaged,
            opt_param_scheduler=Settings(step=lambda increment: None), **dict.fromkeys(off.split()),
        )  # fmt: skip
        sizes, forward_step = iter([len(one["grpo_batch"].advantages) for one in microbatches]), trainer.forward_step

        def with_its_size(*given: Any, trainer: Any = trainer, sizes: Any = sizes, of: Any = forward_step) -> Any:
            trainer.micro_batch_size = next(sizes)
            return of(*given)

        trainer.forward_step = with_its_size
        reports, *_ = trainer.train_step(iter([]))
        mean = sum(float(report["loss"]) for report in reports) / len(reports)
        found.append({"errors": errors_of(model, case | {"settings": settings}, mean, kl=k3)})
    return found


def test_every_mode_is_exact(record_property: Any) -> None:
    cases = [{"mode": mode, "settings": settings} for mode, settings in MODES.items()]
    assert_exact(record_property, train, MS_SWIFT, cases)


def test_theirs_of_equal_micro_batches(record_property: Any) -> None:
    """As its collation cuts them. A response that is filtered as too long still counts in its tokens."""
    kinds = {"grpo": "sample_mean", "dr_grpo": "constant", "bnpo": "token_mean", "dapo": "token_mean"}
    cases: list[dict[str, Any]] = [
        {"setting": f"`{kind}`", "loss_type": kind, "mode": mode, "cuts": [(0, 2), (2, 4), (4, 6)], "filtered": False,
         "settings": {"divisor": 20.0} if mode == "constant" else {}} for kind, mode in kinds.items()
    ]  # fmt: skip
    cases.append(cases[-1] | {"setting": "`dapo`, `overlong_filter`", "filtered": True})
    pairs = compare(record_property, train, MS_SWIFT, cases)
    exact = [own["errors"]["gradient"] < 2e-6 for own, _ in pairs]
    assert exact in ([True] * 4 + [False], [True] * 2 + [False] * 3)  # 4.6.0, older
