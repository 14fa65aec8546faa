"""Other frameworks' own losses, ready to be called on two drawn steps: `LOADERS`.

A package is installed from the index into a folder of its own, without dependencies. Its function is not imported but
cut out of its file, without decorators and annotations. What it calls elsewhere has stand-ins, which its loader names.
"""

import ast
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

from megatron_rl_loss.audit.simulation import DrawnRow, DrawnStep, LossCall
from megatron_rl_loss.engines.names import NAMES, NUMBER

DIVISOR = 7.0
#: Masks of two ragged steps; neighbours share a prompt.
STEPS = (
    ((1, 1, 1, 1), (1, 0, 1), (0, 0), (1, 1), (1,), (1, 1, 0, 1, 1)),
    ((1,), (1, 1, 1), (1, 1), (1, 1, 1, 1, 1, 1), (1, 0, 1, 1), (0,)),
)
#: By name: the data-parallel rank and the micro-batch of each row.
CUTS = {
    "whole": [(0, 0)] * 6,
    "three micro-batches": [(0, 0), (0, 0), (0, 1), (0, 1), (0, 2), (0, 2)],
    "two ranks": [(0, 0), (0, 0), (0, 0), (1, 0), (1, 0), (1, 0)],
    "uneven": [(0, 0), (0, 1), (0, 1), (1, 0), (1, 0), (1, 1)],
}


def drawn(masks: Sequence[Sequence[int]], cut: str) -> DrawnStep:
    """A step in one cut."""
    places = CUTS[cut]
    rows = [DrawnRow(tuple(mask), i, i // 2, *place) for i, (mask, place) in enumerate(zip(masks, places, strict=True))]
    ranks, microbatches = (max(column) + 1 for column in zip(*places, strict=True))
    return DrawnStep(tuple(rows), num_microbatches=microbatches, dp_size=ranks)


# ---- cutting out

_REMEDY = f"Its loader in {Path(__file__).name} needs a change."


class _Bare(ast.NodeTransformer):
    """Takes decorators and annotations away, which name what is not there."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.decorator_list, node.returns = [], None
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node


def cut_out(path: Path, names: Sequence[str], **stand_ins: Any) -> SimpleNamespace:
    """Functions, methods and constants of a file by their last names, defined among the stand-ins."""
    space: dict[str, Any] = {"torch": torch, **vars(typing), **stand_ins}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        targets = [getattr(target, "id", "") for target in node.targets] if isinstance(node, ast.Assign) else []
        if getattr(node, "name", "") in names or {*targets} & {*names}:
            exec(compile(ast.fix_missing_locations(ast.Module([_Bare().visit(node)], [])), str(path), "exec"), space)
    if lacking := [name for name in names if name not in space]:
        raise SystemExit(f"{path}: it has no {', '.join(lacking)}. {_REMEDY}")
    return SimpleNamespace(**{name: space[name] for name in names})


def cut_branch(path: Path, starts: str, *assigns: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A file's first `if` whose test and first statement start like these: it changes a namespace, and returns it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.If) or not ast.unparse(node.test).startswith(starts):
            continue
        if ast.unparse(node.body[0]).startswith(assigns):
            return partial(_changed, compile(ast.Module([node], []), str(path), "exec"))
    raise SystemExit(f"{path}: it has no such branch. {_REMEDY}")


def _changed(code: CodeType, space: dict[str, Any]) -> dict[str, Any]:
    exec(code, space)
    return space


def installed(package: str, version: str, packages: Path) -> Path | None:
    """The folder of a package of the index, installed without dependencies; None where it cannot be had."""
    folder = packages / f"{package}-{version}"
    if not folder.is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--ignore-requires-python"]
        done = subprocess.run([*command, "--target", str(folder), f"{package}=={version}"], check=False)
        if done.returncode:
            return None
    return folder


def _known(framework: str, version: str) -> list[str]:
    """The names of a framework's settings in a version."""
    return [peer.name for peer in NAMES if peer.framework == framework and version in peer.versions]


class Own(NamedTuple):
    """A framework's own loss for one setting: its call, and the loss function of one drawn step of `STEPS`."""

    call: LossCall
    loss_of: Callable[[DrawnStep], Any]


def _always(loss: Any) -> Callable[[DrawnStep], Any]:
    """For a loss function that is the same in every step."""
    return lambda step: loss


Loader = Callable[[Path, str], Iterator[tuple[str, Own]]]  # folder of the package, version -> setting, its loss
MEAN, SUM = LossCall(microbatches="mean"), LossCall()


# ---- loaders


def _rows_at(step: DrawnStep, dp_rank: int, microbatch: int) -> list[int]:
    """The rows of a micro-batch, in order."""
    return [i for i, row in enumerate(step.rows) if (row.dp_rank, row.microbatch) == (dp_rank, microbatch)]


def _padded(step: DrawnStep) -> Tensor:
    """The masks of all rows, [rows, longest]."""
    width = max(len(row.mask) for row in step.rows)
    return torch.tensor([[*row.mask, *[0] * (width - len(row.mask))] for row in step.rows]).float()


def _verl(folder: Path, version: str) -> Iterator[tuple[str, Own]]:
    """Stand-ins: the config, with the global batch info that verl's engines put into it."""
    utils = cut_out(folder / "verl/utils/torch_functional.py", ["masked_sum", "masked_mean"])
    file = folder / "verl/trainer/ppo/core_algos.py"
    config = SimpleNamespace(
        clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2, tau_pos=1.0, tau_neg=1.05, policy_loss=None
    )
    known = _known("verl", version)
    losses = [f"compute_policy_loss_{name}" for name in known if name in ("gspo", "sapo", "geo_mean")]
    own = cut_out(file, ["agg_loss", *losses], verl_F=utils, ActorConfig=SimpleNamespace, AlgoConfig=int)
    is_global = "batch_num_tokens" in own.agg_loss.__code__.co_varnames
    call = SUM if is_global else MEAN  # before, the actor divided by the accumulation steps

    def info(step_tokens: Any, step_samples: int, dp_size: int) -> dict[str, Any]:
        step_counts = {"batch_num_tokens": step_tokens, "global_batch_size": step_samples, "dp_size": dp_size}
        return {**step_counts, "loss_scale_factor": DIVISOR} if is_global else {}

    def aggregated(mode: str) -> Any:
        return lambda losses, mask, step_tokens, step_samples, dp_size: own.agg_loss(
            losses, mask, mode, **info(step_tokens, step_samples, dp_size)
        )

    def policy(name: str) -> Any:
        compute = getattr(own, f"compute_policy_loss_{name}")

        def loss(
            log_probs: Tensor, mask: Tensor, old_log_probs: Tensor, advantages: Tensor,
            step_tokens: Any, step_samples: int, dp_size: int,
        ) -> Any:  # fmt: skip
            config.global_batch_info = info(step_tokens, step_samples, dp_size)
            return compute(old_log_probs, log_probs, advantages, mask, loss_agg_mode="token-mean", config=config)[0]

        return loss

    for name in known:
        if f"compute_policy_loss_{name}" in losses:
            log_prob_call = LossCall(takes="log_probs", microbatches=call.microbatches)
            yield name, Own(log_prob_call, _always(policy(name)))
        else:
            yield name, Own(call, _always(aggregated(name)))


def _trl(folder: Path, version: str) -> Iterator[tuple[str, Own]]:
    """Cut out: the branch of `_compute_loss` that reduces. Stand-ins: the trainer; a generation batch is both steps."""
    reduce = cut_branch(folder / "trl/trainer/grpo_trainer.py", "self.loss_type in", "loss = ")
    for name in _known("trl", version):

        def loss_of(step: DrawnStep, name: str = name) -> Any:
            trainer = SimpleNamespace(
                loss_type=name, max_completion_length=DIVISOR,
                current_gradient_accumulation_steps=step.num_microbatches,
                accelerator=SimpleNamespace(num_processes=step.dp_size),
                args=SimpleNamespace(steps_per_generation=len(STEPS) * step.num_microbatches),
            )  # fmt: skip
            generated = torch.tensor(float(sum(sum(map(sum, masks)) for masks in STEPS)))

            def loss(losses: Tensor, mask: Tensor) -> Any:
                if name == "luspo":  # a loss of each sequence, which its tokens share
                    losses = (losses * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
                given = {"num_items_in_batch": generated}
                return reduce(
                    {"self": trainer, "per_token_loss": losses, "mask": mask, "mode": "train", "inputs": given}
                )["loss"]

            return loss

        yield name, Own(SUM, loss_of)


def _ms_swift(folder: Path, version: str) -> Iterator[tuple[str, Own]]:
    """Cut out: the branches that count and that reduce, of Megatron's trainer. Stand-ins: the trainer, Megatron's
    groups, and an all-reduce that does nothing, since each micro-batch is given the masks of all ranks. A rollout batch
    is both steps."""
    file = folder / "swift/megatron/trainers/grpo_trainer.py"
    reduce = cut_branch(file, "self.loss_type in", "loss = ")
    count = cut_branch(file, "self.loss_type in", "total_token_count = ", "num_mini_batch = ")
    for name in _known("ms_swift", version):

        def loss_of(step: DrawnStep, name: str = name) -> Any:
            cut = next(cut for masks in STEPS for cut in CUTS if drawn(masks, cut) == step)
            number = next(number for number, masks in enumerate(STEPS) if drawn(masks, cut) == step)
            batches = [
                {"grpo_batch": SimpleNamespace(completion_mask=torch.tensor([sum(map(sum, rows))]))}
                for masks in STEPS
                for k in range(step.num_microbatches)
                for rows in [[row.mask for row in drawn(masks, cut).rows if row.microbatch == k]]
            ]
            trainer = SimpleNamespace(
                loss_type=name, max_completion_length=DIVISOR, device="cpu", micro_batch_size=1,
                global_batch_size=step.num_microbatches * step.dp_size,
                args=SimpleNamespace(num_microbatches=step.num_microbatches),
            )  # fmt: skip
            groups = {f"get_{group}_model_parallel_world_size": lambda: 1 for group in ("tensor", "pipeline")}
            mpu = SimpleNamespace(
                **groups, get_context_parallel_world_size=lambda: 1, get_data_parallel_world_size=lambda: step.dp_size
            )
            alone = SimpleNamespace(
                tensor=torch.tensor, int=torch.int, distributed=SimpleNamespace(all_reduce=lambda count: None)
            )
            count({"self": trainer, "mini_batch_data": batches, "torch": alone, "mpu": mpu})
            batch = batches[number * step.num_microbatches]["grpo_batch"]

            def loss(losses: Tensor, mask: Tensor) -> Any:
                space = {"self": trainer, "per_token_loss": losses, "completion_mask": mask, "mpu": mpu}
                return reduce({**space, "grpo_batch": batch, "micro_batch_size": len(mask), "torch": torch})["loss"]

            return loss

        yield name, Own(MEAN, loss_of)


def _skyrl(folder: Path, version: str) -> Iterator[tuple[str, Own]]:
    """Stand-ins: the trainer's division of a whole mini-batch's advantages, the workers' sum, times their number."""
    file = folder / "skyrl/backends/skyrl_train/utils/ppo_utils.py"
    scale = cut_out(file, ["apply_loss_reduction_to_advantages_minibatch"]).apply_loss_reduction_to_advantages_minibatch
    for name in _known("skyrl", version):

        def loss_of(step: DrawnStep, name: str = name) -> Any:
            masks = _padded(step)
            largest = max(sum(row[3:] == other[3:] for row in step.rows) for other in step.rows)
            scaled = scale(torch.ones_like(masks), masks, name, largest, DIVISOR, [(0, 2), (2, 4), (4, 6)])

            def loss(losses: Tensor, mask: Tensor, dp_rank: int, microbatch: int, dp_size: int) -> Any:
                here = scaled[_rows_at(step, dp_rank, microbatch)][:, : losses.shape[1]]
                return (losses * here * mask).sum() * dp_size

            return loss

        yield name, Own(SUM, loss_of)


def _openrlhf(folder: Path, version: str) -> Iterator[tuple[str, Own]]:
    """Stand-ins: the step's tokens and active samples, as counts of the global batch."""
    utils = cut_out(folder / "openrlhf/models/utils.py", ["masked_mean"])
    own = cut_out(folder / "openrlhf/models/loss.py", ["aggregate_loss"], masked_mean=utils.masked_mean)
    made = cut_out(folder / "openrlhf/models/loss.py", ["PolicyLoss"], nn=torch.nn, aggregate_loss=None)
    by_token = {"token-mean": True, "seq-mean-token-mean": False}
    by_token |= {"token_level_loss=true": True, "token_level_loss=false": False}
    by_token["gspo"] = made.PolicyLoss(policy_loss_type="gspo").token_level_loss
    for name in _known("openrlhf", version):

        def loss(
            losses: Tensor, mask: Tensor, step_tokens: Any, step_active_samples: int, dp_size: int, name: str = name
        ) -> Any:
            return own.aggregate_loss(losses, mask, by_token[name], dp_size, step_tokens, step_active_samples)

        yield name, Own(SUM, _always(loss))


def _torchrl(folder: Path, version: str) -> Iterator[tuple[str, Own]]:
    """Stand-ins: the loss module, and tensordict's `expand_as_right`; a loop that averages over micro-batches."""
    reduce = cut_out(folder / "torchrl/objectives/utils.py", ["_reduce"])._reduce
    expand: Any = lambda mask, value: mask.reshape(*mask.shape, 1).expand_as(value)  # noqa: E731
    own = cut_out(
        folder / "torchrl/objectives/llm/grpo.py", ["_aggregate_loss_value"], expand_as_right=expand, _reduce=reduce
    )
    common = folder / "torchrl/objectives/common.py"
    module = SimpleNamespace(reduction="mean", _loss_mask_keys=tuple)
    if "def _expand_loss_mask" in common.read_text():
        methods = cut_out(common, ["_reduce_loss", "_expand_loss_mask"], _reduce=reduce)
        module._expand_loss_mask = methods._expand_loss_mask
        module._reduce_loss = lambda *given, **more: methods._reduce_loss(module, *given, **more)
    for name in ("token_mean", "prompt_mean"):

        def loss(losses: Tensor, mask: Tensor, name: str = name) -> Any:
            module.aggregation = name
            value = losses.unsqueeze(-1)  # of a (batch, token, 1) shape, as the module has it
            bools = (
                mask.bool() if hasattr(module, "_reduce_loss") or name == "prompt_mean" else mask.bool().unsqueeze(-1)
            )
            return own._aggregate_loss_value(module, value, bools).sum()

        yield name, Own(MEAN, _always(loss))


class _Array(Tensor):
    """Stands in for an array of JAX."""

    def astype(self, dtype: torch.dtype) -> Tensor:
        return self.to(dtype)


def _aggregate_of_tunix(folder: Path) -> Callable[..., Tensor]:
    """Stand-in: torch for jax.numpy."""

    def clip(value: Any, min: float) -> Tensor:
        return torch.as_tensor(value).clamp(min=min)

    jnp, jax = SimpleNamespace(clip=clip, float32=torch.float32), SimpleNamespace(Array=Tensor)
    functions = ["_check_get_norm", "aggregate_loss"]
    aggregate: Callable[..., Tensor] = cut_out(
        folder / "tunix/rl/common.py", functions, jnp=jnp, jax=jax, np=np
    ).aggregate_loss
    return aggregate


def _tunix(folder: Path, version: str) -> Iterator[tuple[str, Own]]:
    """Stand-ins: those of its function; an optimizer that averages micro-batches and ranks."""
    aggregate = _aggregate_of_tunix(folder)
    for name in _known("tunix", version):

        def loss(losses: Tensor, mask: Tensor, name: str = name) -> Any:
            arrays = losses.as_subclass(_Array), mask.as_subclass(_Array)
            return aggregate(*arrays, name, norm=DIVISOR).as_subclass(Tensor)

        yield name, Own(MEAN, _always(loss))


def _roll(folder: Path, version: str) -> Iterator[tuple[str, Own]]:
    """Stand-ins: the step's tokens and active samples; a caller that multiplies by the data-parallel size."""
    own = cut_out(folder / "roll/utils/functionals.py", ["agg_loss", "masked_mean", "masked_sum"])
    own.agg_loss.__globals__.update(vars(own))
    for name in _known("roll", version):

        def loss(
            losses: Tensor, mask: Tensor, step_tokens: Any, step_active_samples: int, dp_size: int, name: str = name
        ) -> Any:
            return own.agg_loss(losses, mask, name, step_tokens, step_active_samples) * dp_size

        yield name, Own(SUM, _always(loss))


def _torchtitan(folder: Path, version: str) -> Iterator[tuple[str, Own]]:
    """Stand-ins: `compute_logprobs`, for which the logits are the log-probs. Ranks are summed, as it says."""
    logprobs: Any = lambda logits, labels, return_entropy: (logits, torch.zeros_like(logits))  # noqa: E731
    own = cut_out(
        folder / "torchtitan/experiments/rl/losses/dapo.py", ["__call__", "_MAX_LOG_RATIO"], compute_logprobs=logprobs
    )
    clip = SimpleNamespace(ratio_clip_low=0.2, ratio_clip_high=0.2)

    def loss(log_probs: Tensor, mask: Tensor, old_log_probs: Tensor, advantages: Tensor, step_tokens: Tensor) -> Any:
        given = {"generator_logprobs": old_log_probs, "advantages": advantages, "loss_mask": mask.bool()}
        return own.__call__(clip, log_probs, None, float(step_tokens), **given)[0]

    for name in ("dapo", "grpo"):  # grpo is dapo with one clip
        yield name, Own(LossCall(takes="log_probs", dp="sum"), _always(loss))


def _slime(folder: Path, version: str) -> Iterator[tuple[str, Own]]:
    """Stand-ins: Megatron's parallel state, and a policy loss that is given per-token losses. Megatron's schedule
    divides by what the loss function returns."""
    return _of_megatron_loss(
        folder / "slime/backends/megatron_utils", version, "slime",
        lambda step: {"step_global_batch_size": len(step.rows)},
        lambda dp_size: {
            "mpu": SimpleNamespace(
                get_context_parallel_world_size=lambda: 1,
                get_data_parallel_world_size=lambda with_context_parallel: dp_size,
            ),
            "policy_loss_function": _reduced_losses,
        },
    )  # fmt: skip


def _miles(folder: Path, version: str) -> Iterator[tuple[str, Own]]:
    """Stand-ins as for slime."""

    def parts_of(dp_size: int) -> dict[str, Any]:
        one, all_ranks = SimpleNamespace(size=1), SimpleNamespace(size=dp_size)
        place = SimpleNamespace(cp=one, intra_dp=all_ranks, intra_dp_cp=all_ranks, is_ulysses_cp=False)
        return {
            "get_parallel_state": lambda: place,
            "get_loss_function": lambda args: _reduced_losses,
            "is_multi_lora_enabled": lambda args: False,
        }

    def given(step: DrawnStep) -> dict[str, Any]:
        return {"num_rollouts": len(step.rows), "apply_megatron_loss_scaling": True}

    return _of_megatron_loss(folder / "miles/backends/training_utils", version, "miles", given, parts_of)


def _reduced_losses(args: Any, batch: dict[str, Any], logits: Tensor, reduce: Callable[[Tensor], Tensor]) -> Any:
    """In the place of a policy loss: the per-token losses of the batch, reduced; and nothing to log."""
    return reduce(batch["losses"]), {}


def _of_megatron_loss(
    folder: Path,
    version: str,
    framework: str,
    given: Callable[[DrawnStep], dict[str, Any]],
    stand_ins: Callable[[int], dict[str, Any]],
) -> Iterator[tuple[str, Own]]:
    """`loss_function` of slime or miles, with `get_sum_of_sample_mean`; each row is a rollout.

    `given`: further arguments in a step. `stand_ins`: what a number of data-parallel ranks stands for.
    """
    for name in _known(framework, version):
        is_per_token = name.endswith("true")
        args = SimpleNamespace(
            calculate_per_token_loss=is_per_token, loss_type="policy_loss", recompute_loss_function=False,
            allgather_cp=False, qkv_format="thd", true_on_policy_mode=False,
        )  # fmt: skip

        def loss_of(step: DrawnStep, args: SimpleNamespace = args) -> Any:
            space = stand_ins(step.dp_size)
            reduce = cut_out(folder / "cp_utils.py", ["get_sum_of_sample_mean"], **space)
            own = cut_out(folder / "loss.py", ["loss_function"], **vars(reduce), **space)

            def loss(losses: Tensor, mask: Tensor, num_microbatches: int) -> Any:
                lengths = [mask.shape[1]] * len(mask)
                batch: dict[str, Any] = {"total_lengths": lengths, "response_lengths": lengths}
                batch |= {"loss_masks": list(mask), "rollout_mask_sums": list(mask.sum(1)), "losses": losses.flatten()}
                return own.loss_function(args, batch, num_microbatches, logits=torch.zeros(1), **given(step))

            return loss

        call = LossCall(returns="megatron", microbatches="mean")
        yield name, Own(LossCall(returns="megatron_per_token", dp="sum") if is_per_token else call, loss_of)


def _prime_rl(folder: Path, version: str) -> Iterator[tuple[str, Own]]:
    """Stand-ins: configs, and the step's tokens; the trainer undoes FSDP's division."""
    losses = {name: f"{name}_loss_fn" for name in _known("prime_rl", version)}
    helpers = ["_safe_mean", "compute_importance_ratio_and_mismatch_kl", "compute_loss"]
    own = cut_out(
        folder / "src/prime_rl/trainer/rl/loss.py", [*losses.values(), *helpers],
        LossInputs=SimpleNamespace, LossOutputs=SimpleNamespace,
    )  # fmt: skip
    config = SimpleNamespace(dppo_mask_high=0.2, dppo_mask_low=0.2, ipo_threshold=0.1, adv_tau=1.0, kl_tau=1e-3)

    for name, own_name in losses.items():

        def loss(
            log_probs: list[Tensor], masks: list[Tensor], old_log_probs: list[Tensor], advantages: list[Tensor],
            step_tokens: Any, own_name: str = own_name,
        ) -> Any:  # fmt: skip
            rows = log_probs, old_log_probs, None, advantages, [mask.bool() for mask in masks]
            scales = {"rl_scale": int(step_tokens), "ce_scale": 1, "ref_kl_scale": 1}
            sample_loss: Any = lambda inputs: getattr(own, own_name)(inputs, config)  # noqa: E731
            return own.compute_loss(*rows, None, None, None, rl_loss_fn=sample_loss, **scales)[0]

        yield name, Own(LossCall(takes="log_probs", rows="lists", dp="sum"), _always(loss))


def _nemo_rl(folder: Path, version: str) -> Iterator[tuple[str, Own]]:
    """Cut out: the branch of the loss that reduces. Stand-ins: the loss, whose every sample is valid, and the counts of
    the global batch; Megatron's worker sums gradients."""
    masked_mean = cut_out(folder / "nemo_rl/algorithms/utils.py", ["masked_mean"]).masked_mean
    file = folder / "nemo_rl/algorithms/loss/loss_functions.py"
    reduce = cut_branch(file, "self.loss_type == LossType.TOKEN_LEVEL", "actor_loss = ")
    kinds = SimpleNamespace(TOKEN_LEVEL="token_level_loss=true")
    for name in _known("nemo_rl", version):

        def loss(losses: Tensor, mask: Tensor, step_tokens: Any, step_samples: int, name: str = name) -> Any:
            batch_counts = {"global_valid_toks": step_tokens, "global_valid_seqs": step_samples}
            loss_settings = {"self": SimpleNamespace(loss_type=name), "LossType": kinds, "masked_mean": masked_mean}
            masks = {"mask": mask, "token_mask": mask, "sample_mask": torch.ones(len(mask))}
            values = {"clip_loss": losses, "importance_weights_to_use": torch.ones_like(losses)}
            return reduce({**loss_settings, **batch_counts, **masks, **values})["actor_loss"]

        yield name, Own(LossCall(dp="sum"), _always(loss))


def _open_instruct(folder: Path, version: str) -> Iterator[tuple[str, Own]]:
    """Cut out: the branch that counts. Stand-ins: the trainer, which undoes DeepSpeed's average and whose samples are
    the packed rows of a micro-batch; and an all-reduce that adds the other ranks' samples."""
    folder = folder / "open_instruct"
    masked_mean = cut_out(folder / "rl_utils.py", ["masked_mean"]).masked_mean
    count = cut_branch(folder / "grpo_fast.py", "self.args.loss_denominator", "accumulation_token_counts = ")
    for name in _known("open_instruct", version):
        denominator = DIVISOR if name == NUMBER else name

        def loss_of(step: DrawnStep, denominator: Any = denominator) -> Any:
            number = step.num_microbatches
            masks = [[_padded(step)[_rows_at(step, rank, k)] for k in range(number)] for rank in range(step.dp_size)]

            def add_other_ranks(counts: Tensor, **_: Any) -> None:
                counts.copy_(torch.tensor([[row.sum() for row in rank_masks] for rank_masks in masks]).sum(0))

            dist = SimpleNamespace(all_reduce=add_other_ranks, ReduceOp=SimpleNamespace(SUM=None))
            utils = cut_out(folder / "grpo_utils.py", ["calculate_token_counts"], dist=dist)

            def loss(losses: Tensor, mask: Tensor, dp_rank: int, microbatch: int) -> Any:
                packed = [torch.cat([torch.zeros(1), row.flatten()])[None] for row in masks[dp_rank]]
                data = SimpleNamespace(response_masks=packed, query_responses=packed)
                trainer = SimpleNamespace(args=SimpleNamespace(loss_denominator=denominator))
                space = {"self": trainer, "grpo_utils": utils, "data_BT": data, "device": "cpu"}
                counts = count({**space, "accumulation_steps": number})["accumulation_token_counts"]
                return masked_mean(losses.reshape(1, -1), mask.reshape(1, -1), None, counts[0])

            return loss

        yield name, Own(LossCall(dp="sum"), loss_of)


def _maxtext(folder: Path, version: str) -> Iterator[tuple[str, Own]]:
    """maxtext hands its value to tunix, whose function is run, from its own package; stand-ins as there."""
    file = folder / "maxtext/trainers/post_train/rl/train_rl.py"
    if "loss_agg_mode=trainer_config.rl.loss_agg_mode" not in file.read_text():
        raise SystemExit(f"{file}: it hands no loss_agg_mode on. {_REMEDY}")
    tunix = installed("google-tunix", "0.1.7", folder.parent)
    if tunix is None:
        return
    names, own = _known("maxtext", version), dict(_tunix(tunix, "0.1.7"))
    yield from ((name, own[name]) for name in names if name in own)
    for name in [name for name in names if name not in own]:
        aggregate = _aggregate_of_tunix(tunix)
        try:
            aggregate(torch.ones(1, 1).as_subclass(_Array), torch.ones(1, 1).as_subclass(_Array), name)
        except ValueError:
            continue  # as the row says
        raise SystemExit(f"{tunix}: its aggregate_loss takes {name!r}, which the row of maxtext says it refuses.")


def _agent_lightning(folder: Path, version: str) -> Iterator[tuple[str, Own]]:
    """Stand-ins: verl's masked sums and config; the trainer's call before the update. The rows of a prompt are those of
    one of its rollouts."""
    sums = SimpleNamespace(
        masked_sum=lambda values, mask: (values * mask).sum(),
        masked_mean=lambda values, mask: (values * mask).sum() / mask.sum().clamp(min=1),
    )
    names = [
        "normalize_advantages_by_rollout",
        *(f"compute_policy_loss_{n}" for n in _known("agent_lightning", version)),
    ]
    own = cut_out(folder / "agentlightning/verl/per_rollout_loss.py", names, verl_F=sums)
    for name in _known("agent_lightning", version):
        compute = getattr(own, f"compute_policy_loss_{name}")

        def loss_of(step: DrawnStep, compute: Any = compute) -> Any:
            masks, rollouts = _padded(step), [row.prompt for row in step.rows]
            factors = own.normalize_advantages_by_rollout(
                torch.ones_like(masks), masks, rollouts, num_trained_rows=len(masks)
            )

            def loss(
                log_probs: Tensor, mask: Tensor, old_log_probs: Tensor, advantages: Tensor,
                dp_rank: int, microbatch: int, dp_size: int,
            ) -> Any:  # fmt: skip
                scaled = advantages * factors[_rows_at(step, dp_rank, microbatch)][:, : advantages.shape[1]]
                clips = dict.fromkeys(("clip_ratio", "clip_ratio_low", "clip_ratio_high"), 0.2)
                config = SimpleNamespace(**clips, global_batch_info={"dp_size": dp_size}, get=lambda _, value: value)
                return compute(old_log_probs, log_probs, scaled, mask, config=config)[0]

            return loss

        yield name, Own(LossCall(takes="log_probs"), loss_of)


#: By framework: its package's name on the index, and what calls its own code.
LOADERS: dict[str, tuple[str, Loader]] = {
    "verl": ("verl", _verl),
    "trl": ("trl", _trl),
    "ms_swift": ("ms-swift", _ms_swift),
    "skyrl": ("skyrl", _skyrl),
    "openrlhf": ("openrlhf", _openrlhf),
    "torchrl": ("torchrl", _torchrl),
    "tunix": ("google-tunix", _tunix),
    "torchtitan": ("torchtitan", _torchtitan),
    "roll": ("roll", _roll),
    "slime": ("slime", _slime),
    "miles": ("miles", _miles),
    "prime_rl": ("prime-rl", _prime_rl),
    "nemo_rl": ("nemo-rl", _nemo_rl),
    "open_instruct": ("open-instruct", _open_instruct),
    "maxtext": ("maxtext", _maxtext),
    "agent_lightning": ("agentlightning", _agent_lightning),
}
