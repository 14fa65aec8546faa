"""A rank that runs our example of `train_rl.py` on a checkout of Megatron-LM, in an interpreter of its own.

Run with the checkout first on PYTHONPATH. Real: the example's `main`, Megatron's parser, `train_rl.forward_step` with
its loss, the packer, the gather of context-parallel log-probs, the schedule and DDP. Replaced: `pretrain`, by one step
of a table of logits (as in `logit_table`) on given sequences; Transformer Engine's index of a zigzag cut; and torch's
differentiable gather, whose backward on gloo knows no subgroups, by one that sums as it does on NCCL. Prints a line of
JSON a case.
"""

import contextlib
import io
import json
import re
import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import megatron_on_cpu

megatron_on_cpu.install()

import logit_table
import numpy as np
import torch
import torch.distributed as dist
from checkouts import MEGATRON_LM, load
from example_run import MODEL
from gloo_gather import all_gather
from oracle import zigzag

SEQ_LENGTH, PAD = 64, 0
FLAGS = f"""--seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH} --micro-batch-size 1 --global-batch-size 8
    --eval-iters 0 --lr 1e-3 --train-iters 2 --perform-rl-step --grpo-clamp-eps-lower {logit_table.CLIP_LOW}
    --grpo-clamp-eps-upper {logit_table.CLIP_HIGH} --grpo-kl-beta 0 --grpo-entropy-term-weight 0
    --grpo-prompts-per-step 2 --grpo-group-size 4"""


def make_step(seed: int, dp: int) -> logit_table.Step:
    """Sequences of one advantage each, dealt to ranks in turn; the last two of them fill the batch up, fully masked."""
    step = logit_table.make_step(seed, dp, masked=False)
    for i, sample in enumerate(step.samples):
        sample.advantages[:] = sample.advantages[0]
        if i >= len(step.samples) - 2:
            sample.mask.zero_()
            sample.kept.zero_()
    return step


def tensors_of(step: logit_table.Step) -> dict[str, torch.Tensor]:
    """Tensors of all sequences, as `prepare_data_for_update` has them."""
    rows = len(step.samples)
    tensors = {name: torch.zeros(rows, SEQ_LENGTH) for name in ("masks", "old_logprobs")}
    trajectories = torch.full((rows, SEQ_LENGTH), PAD, dtype=torch.int64)
    for i, sample in enumerate(step.samples):
        trajectories[i, : sample.total] = sample.ids
        tensors["masks"][i, sample.prompt : sample.total] = sample.mask.float()
        tensors["old_logprobs"][i, sample.prompt - 1 : sample.total - 1] = sample.old_log_probs
    advantages = torch.stack([sample.advantages[0] for sample in step.samples])
    return tensors | {"trajectories": trajectories, "advantages": advantages}


def batches_of(step: logit_table.Step, packed: bool) -> list[Any]:
    """This data-parallel rank's step, of train_rl.py's own making."""
    from megatron.core import parallel_state
    from megatron.rl import rl_utils, sequence_packing_utils

    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    tensors = tensors_of(step)
    if not packed:
        mine = {name: values[rank::size] for name, values in tensors.items()}
        positions = torch.arange(SEQ_LENGTH).expand(1, -1)
        rl_utils.get_rl_runtime_state().packing_context = None
        return [
            [
                mine["trajectories"][i : i + 1],
                mine["advantages"][i : i + 1],
                mine["old_logprobs"][i : i + 1, :-1],
                mine["masks"][i : i + 1],
                positions,
                mine["old_logprobs"][i : i + 1, :-1],
                torch.zeros(1, SEQ_LENGTH - 1),
            ]
            for i in range(len(mine["advantages"]))
        ]
    context = sequence_packing_utils.pack_all_trajectories(
        tensors["trajectories"][rank::size],
        tensors["masks"][rank::size].bool(),
        None,
        torch.cat([tensors["advantages"][other::size] for other in range(size)]),
        SEQ_LENGTH,
        50,
        "fifo",
    )
    context.old_logprobs = torch.zeros(len(context.packed_trajs), SEQ_LENGTH - 1)
    for index, starts in context.packing_info.seq_starts.items():
        for number, start in zip(context.packing_info.bin_seq_indices[index], starts, strict=False):
            source = number % (len(step.samples) // size) * size + number // (len(step.samples) // size)
            old = tensors["old_logprobs"][source, : SEQ_LENGTH - 1 - start]
            context.old_logprobs[index, start:] = torch.where(old != 0, old, context.old_logprobs[index, start:])
    context.ref_logprobs = context.old_logprobs
    rl_utils.get_rl_runtime_state().packing_context = context
    return [(torch.tensor([index]),) for index in range(len(context.packed_trajs))]


def main(root: str, cp: int, cases: list[dict[str, Any]]) -> None:
    from megatron.core import num_microbatches_calculator, parallel_state
    from megatron.training import global_vars, training

    from megatron_rl_loss import Audit
    from megatron_rl_loss.engines.megatron_rl import samples_of

    modules = load(MEGATRON_LM, root, "megatron.rl.rl_utils", "train_rl", "train_rl_with_loss_aggregation")
    rl_utils, train_rl, example = modules
    vars(torch.distributed)["nn"].functional.all_gather = all_gather
    rl_utils.HAVE_TEX, rl_utils.tex = True, SimpleNamespace(thd_get_partitioned_indices=partitioned)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(context_parallel_size=cp)
    for case in cases:
        num_microbatches_calculator.unset_num_microbatches_calculator()
        global_vars.destroy_global_vars()
        step = make_step(case["seed"], parallel_state.get_data_parallel_world_size())
        outcome: dict[str, Any] = {}

        def one_step(
            config: Any,
            datasets: Any,
            model_type: Any,
            forward_step: Any,
            provider: Any,
            step: logit_table.Step = step,
            outcome: dict[str, Any] = outcome,
        ) -> None:
            args = global_vars.get_args()
            global_vars._GLOBAL_TOKENIZER = SimpleNamespace(pad=PAD, eod=PAD)
            model = logit_table.logit_model(step.table, per_token=args.calculate_per_token_loss)
            model.module.pg_collection = groups()
            batches = batches_of(step, args.rl_use_sequence_packing)
            with Audit(model, samples_of=samples_of) as audit:
                reports = training.get_forward_backward_func()(
                    forward_step_func=forward_step,
                    data_iterator=audit.watch(iter(batches)),
                    model=model,
                    num_microbatches=len(batches),
                    seq_length=SEQ_LENGTH,
                    micro_batch_size=1,
                )
            outcome["audit"] = audit.measured
            outcome["stock"] = forward_step is train_rl.forward_step
            of_loss = "lm loss" if outcome["stock"] else "pg_loss"
            outcome["value"] = reduced([report[of_loss] for report in reports])
            outcome["gradient"] = model.module.losses.main_grad.double()

        example.pretrain = one_step
        sys.argv = ["train_rl.py", *MODEL.split(), *FLAGS.split(), "--context-parallel-size", str(cp), *case["flags"]]
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                example.main()
        except (AssertionError, SystemExit, ValueError) as error:
            result: dict[str, Any] = {"refused": str(error)}
        else:
            value, gradient, scale = logit_table.expected(step, case["mode"], case["divisor"], "active")
            in_gradient = float((outcome["gradient"] - gradient).abs().max() / gradient.abs().max())
            in_value = abs(outcome["value"] - value) / scale
            result = {"stock": outcome["stock"], "gradient": in_gradient, "error": max(in_gradient, in_value)}
            result["proof"] = "".join(re.findall(r"megatron_rl_loss: (.* proved on .*)", printed.getvalue()))
            if outcome["audit"] is not None:
                result |= audited(outcome["audit"], case, outcome["stock"])
        if dist.get_rank() == 0:
            print("RESULT " + json.dumps(result), flush=True)


def audited(measured: Any, case: dict[str, Any], stock: bool) -> dict[str, Any]:
    """The worst error of the audited weights, of a loss that is tapped, and what the audit said."""
    if stock:
        return {"unknown": measured.unknown}
    tokens, mask = measured.tokens, measured.tokens.mask
    active = len(set(tokens.sample[mask > 0].tolist()))
    of_sample = np.bincount(tokens.sample, mask)[tokens.sample].clip(1)
    size = {"sample_mean": of_sample, "token_mean": mask.sum() / active, "constant": case["divisor"]}
    expected = mask / size[case["mode"]] / active
    off = np.abs(measured.weights - expected).max() / expected.max()
    return {"audit_error": float(off), "notes": measured.notes}


def partitioned(cu_seqlens: torch.Tensor, total: int, size: int, rank: int) -> torch.Tensor:
    """Positions of a rank's zigzag part of every slot."""
    edges = cu_seqlens.tolist()
    slots = [list(range(begin, end)) for begin, end in pairwise(edges)]
    return torch.tensor(zigzag(slots, rank, size), dtype=torch.int32)  # type: ignore[arg-type]


def groups() -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups()


def reduced(reported: list[torch.Tensor]) -> float:
    """A report, reduced as by `train_step`: numbers over micro-batches, or stock pairs of sum and count over ranks."""
    values = torch.stack([report.detach().double().view(-1) for report in reported])
    if values.size(1) == 1:
        return float(values.mean())
    total = values.sum(0)
    dist.all_reduce(total)
    return float(total[0] / total[1])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
