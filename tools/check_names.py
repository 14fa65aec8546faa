"""Run other frameworks' own aggregation, and compare each token's weight with the rows of `engines.names`.

    python tools/check_names.py --packages FOLDER --checkout verl=~/verl --checkout roll=~/ROLL

A package is installed from the index into a folder of its own, without dependencies. Its function is not imported but
cut out of its file, without decorators and annotations; what it calls elsewhere has stand-ins, named in `LOADERS`. The
function gets two small steps in four cuts. The weight of a token is the derivative of the step's loss by the token's
loss, with the trainer's averages over micro-batches and ranks applied. The weights are written to docs/names.json, and
`name_of` says which mode they are.
"""

import argparse
import ast
import json
import math
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

from megatron_rl_loss.audit.judge import expected_weights, explain
from megatron_rl_loss.audit.simulation import DrawnRow, DrawnStep, LossCall, measure
from megatron_rl_loss.audit.tokens import Floats, MeasuredStep, PlacedSamples, Split
from megatron_rl_loss.core.aggregation import Aggregation, resolve
from megatron_rl_loss.core.samples import Samples
from megatron_rl_loss.engines.names import FRAMEWORKS, NAMES, PeerName

RESULTS = ROOT / "docs" / "names.json"
DIVISOR = 7.0
TOLERANCE = 1e-5  # of weights in float32
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
EVEN = ("whole", "three micro-batches", "two ranks")  # micro-batches have equally many rows


def drawn(masks: Sequence[Sequence[int]], cut: str) -> DrawnStep:
    """A step in one cut."""
    places = CUTS[cut]
    rows = [DrawnRow(tuple(mask), i, i // 2, *place) for i, (mask, place) in enumerate(zip(masks, places, strict=True))]
    ranks, microbatches = (max(column) + 1 for column in zip(*places, strict=True))
    return DrawnStep(tuple(rows), num_microbatches=microbatches, dp_size=ranks)


ALL = [(number, cut) for number in range(len(STEPS)) for cut in CUTS]  # of both steps, in the order of docs/names.json


# ---- what the weights are


class Named(NamedTuple):
    """What measured weights are: in words, and whether they are one mode in every cut."""

    words: str
    exact: bool


#: The modes that are tried first, with their words.
MODES: dict[str, Aggregation] = {
    "token_mean": resolve("token_mean"),
    "sample_mean": resolve("sample_mean"),
    "sample_mean, active units": resolve("sample_mean", units="active"),
    "prompt_mean": resolve("prompt_mean"),
    "constant, divisor 1": resolve("constant", divisor=1),
    "constant, divisor 1, active units": resolve("constant", divisor=1, units="active"),
    "constant, divisor L": resolve("constant", divisor=DIVISOR),
    "constant, divisor L, active units": resolve("constant", divisor=DIVISOR, units="active"),
    "token_sum, divisor 1": resolve("token_sum", divisor=1),
    "token_sum, divisor L": resolve("token_sum", divisor=DIVISOR),
}


Weights = Sequence[Sequence[float | None]]  # by step and cut, as `ALL`, of each mask entry; None for NaN


def name_of(weights: Weights) -> Named:
    """The mode of these weights; else where it is one, or what else was done."""
    if any(None in of_cut for of_cut in weights):
        rest = name_of([[weight or 0.0 for weight in of_cut] for of_cut in weights])
        return Named(f"{rest.words}; NaN in a micro-batch without tokens", exact=False)
    measured = {where: _measured(STEPS[where[0]], where[1], of_cut) for where, of_cut in zip(ALL, weights, strict=True)}

    def mode_in(*cuts: str) -> str:
        """The mode of all steps in these cuts."""
        found = [step for (_, cut), step in measured.items() if cut in cuts]
        return next((words for words, mode in MODES.items() if all(_factor(step, mode) == 1 for step in found)), "")

    if words := mode_in(*CUTS):
        return Named(words, exact=True)
    if any((step.weights[step.tokens.mask == 0] != 0).any() for step in measured.values()):
        return Named("masked tokens have weight, too", exact=False)
    if words := mode_in(*EVEN):
        return Named(f"{words} where all micro-batches have equally many rows, else not", exact=False)
    tokens = [sum(map(sum, masks)) for masks in STEPS]
    found = [_factor(step, MODES["token_mean"]) for step in measured.values()]
    for words, count in (
        ("both steps, not of one", sum(tokens)),
        ("an average step, not of this one", sum(tokens) / 2),
    ):
        for more, power in (("", 0), (", and by micro-batches once more", 1)):
            splits = [step.split.num_microbatches**power for step in measured.values()]
            factors = [tokens[number] / count / split for (number, _), split in zip(ALL, splits, strict=True)]
            if np.allclose(found, factors, rtol=TOLERANCE, atol=0):
                return Named(f"divided by the tokens of {words}{more}", exact=False)
    whole = mode_in("whole")
    widths = [max(map(len, masks)) for masks in STEPS]
    sums = [_factor(measured[number, "whole"], MODES["token_sum, divisor 1"]) for number in range(len(STEPS))]
    if not whole and np.allclose(sums, 1 / np.array(widths), rtol=TOLERANCE, atol=0):
        whole = "token_sum over the padded length"
    parts = [step for (_, cut), step in measured.items() if cut == "uneven"]
    causes = [cause for cause in explain(parts, MODES["token_mean"], tolerance=TOLERANCE) if cause.named]
    said = causes[0].describe({}) if causes else "none of the known causes"
    return Named(f"of a whole step {whole or 'no mode'}; in uneven parts {said}", exact=False)


def _measured(masks: Sequence[Sequence[int]], cut: str, weights: Sequence[float | None]) -> MeasuredStep:
    step, microbatches = drawn(masks, cut), []
    for place in dict.fromkeys(CUTS[cut]):
        rows = [row for row in step.rows if (row.dp_rank, row.microbatch) == place]
        samples = Samples([row.mask for row in rows], prompt_ids=[row.prompt for row in rows])
        holders = np.full(sum(len(row.mask) for row in rows), -1)
        microbatches.append(PlacedSamples(dp_rank=place[0], microbatch=place[1], samples=samples, cp_rank=holders))
    split = Split(num_microbatches=step.num_microbatches, dp_size=step.dp_size)
    return MeasuredStep(microbatches=tuple(microbatches), weights=np.array(weights, np.float64), split=split)


def _factor(step: MeasuredStep, mode: Aggregation) -> float:
    """The measured weights over the mode's: 1 where they agree, NaN where they are not proportional."""
    wanted = expected_weights(step, mode)
    on = wanted != 0
    ratio = step.weights[on] / wanted[on]
    if np.abs(step.weights[~on]).max(initial=0) > TOLERANCE * wanted.max() or np.ptp(ratio) > TOLERANCE * ratio.max():
        return math.nan
    factor = float(np.median(ratio))
    return 1.0 if abs(factor - 1) <= TOLERANCE else factor


def words_of(peer: PeerName) -> str:
    """A row in the words of `MODES`."""
    divisor = "" if peer.divisor is None else f", divisor {peer.divisor if isinstance(peer.divisor, int) else 'L'}"
    return peer.mode + divisor + ", active units" * (peer.units == "active")


#: What a row says of a framework's own code: what `name_of` then says of its weights.
SEEN = {
    "counts of each micro-batch": "of a whole step",
    "averages micro-batches equally": "where all micro-batches have equally many rows",
    "tokens of the generation batch": "tokens of both steps",
    "tokens of an average window": "tokens of an average step",
    "tokens of all steps of the rollout batch, and": "tokens of both steps, not of one, and by micro-batches once more",
    "sums masked positions": "masked tokens have weight",
    "padded length": "padded length",
    "sums sequences": "of a whole step token_sum",
    "averages the sums": "of a whole step token_sum",
}


def agrees(peer: PeerName, named: Named) -> bool:
    """True where the code does what the row says: the mode in every cut, or what the row says that it does instead."""
    if peer.refused.startswith("whatever"):
        return named == Named(peer.mode, exact=True)
    if peer.refused or peer.own_code:
        of_code = [words in named.words for said, words in SEEN.items() if said in peer.own_code]
        has_nan = "NaN" in peer.own_code
        return not named.exact and (bool(peer.refused) or (any(of_code) and has_nan == ("NaN" in named.words)))
    return named == Named(words_of(peer), exact=True)


# ---- the frameworks' own code


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
        raise SystemExit(f"{path}: it has no {', '.join(lacking)}. The loader in tools/check_names.py needs a change.")
    return SimpleNamespace(**{name: space[name] for name in names})


def cut_branch(path: Path, starts: str, *assigns: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A file's first `if` whose test and first statement start like these: it changes a namespace, and returns it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.If) or not ast.unparse(node.test).startswith(starts):
            continue
        if ast.unparse(node.body[0]).startswith(assigns):
            return partial(_changed, compile(ast.Module([node], []), str(path), "exec"))
    raise SystemExit(f"{path}: it has no such branch. The loader in tools/check_names.py needs a change.")


def _changed(code: CodeType, space: dict[str, Any]) -> dict[str, Any]:
    exec(code, space)
    return space


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
        of_step = {"batch_num_tokens": step_tokens, "global_batch_size": step_samples, "dp_size": dp_size}
        return {**of_step, "loss_scale_factor": DIVISOR} if is_global else {}

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
            of_log_probs = LossCall(takes="log_probs", microbatches=call.microbatches)
            yield name, Own(of_log_probs, _always(policy(name)))
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
            width = max(len(row.mask) for row in step.rows)
            masks = torch.tensor([[*row.mask, *[0] * (width - len(row.mask))] for row in step.rows]).float()
            largest = max(sum(row[3:] == other[3:] for row in step.rows) for other in step.rows)
            scaled = scale(torch.ones_like(masks), masks, name, largest, DIVISOR, [(0, 2), (2, 4), (4, 6)])

            def loss(losses: Tensor, mask: Tensor, dp_rank: int, microbatch: int, dp_size: int) -> Any:
                here = [i for i, row in enumerate(step.rows) if (row.dp_rank, row.microbatch) == (dp_rank, microbatch)]
                return (losses * scaled[here][:, : losses.shape[1]] * mask).sum() * dp_size

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


def _tunix(folder: Path, version: str) -> Iterator[tuple[str, Own]]:
    """Stand-ins: torch for jax.numpy; an optimizer that averages micro-batches and ranks."""

    def clip(value: Any, min: float) -> Tensor:
        return torch.as_tensor(value).clamp(min=min)

    jnp = SimpleNamespace(clip=clip, float32=torch.float32)
    own = cut_out(
        folder / "tunix/rl/common.py",
        ["_check_get_norm", "aggregate_loss"],
        jnp=jnp,
        jax=SimpleNamespace(Array=Tensor),
        np=np,
    )
    for name in _known("tunix", version):

        def loss(losses: Tensor, mask: Tensor, name: str = name) -> Any:
            arrays = losses.as_subclass(_Array), mask.as_subclass(_Array)
            return own.aggregate_loss(*arrays, name, norm=DIVISOR).as_subclass(Tensor)

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
}


def weights_of(own: Own) -> list[list[float | None]]:
    """The weight of each mask entry in each of `ALL`, to seven digits."""
    found = []
    for number, cut in ALL:
        step = drawn(STEPS[number], cut)
        weights: Floats = measure(own.loss_of(step), own.call, step).weights
        found.append([None if np.isnan(weight) else float(f"{weight:.7g}") for weight in weights])
    return found


def installed(package: str, version: str, packages: Path) -> Path | None:
    """The folder of a package of the index, installed without dependencies; None where it cannot be had."""
    folder = packages / f"{package}-{version}"
    if not folder.is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--ignore-requires-python"]
        done = subprocess.run([*command, "--target", str(folder), f"{package}=={version}"], check=False)
        if done.returncode:
            return None
    return folder


def run(packages: Path, checkouts: Mapping[str, Path]) -> dict[str, list[dict[str, Any]]]:
    """By ``framework:name``, oldest first: the versions that have the same weights, and these."""
    results: dict[str, list[dict[str, Any]]] = {}
    for framework, (package, load) in LOADERS.items():
        for version in FRAMEWORKS[framework].names:
            is_commit = "." not in version
            folder = checkouts.get(framework) if is_commit else installed(package, version, packages)
            if folder is None:
                print(f"{framework} {version}: read, not run", file=sys.stderr)
                continue
            for name, own in load(folder, version):
                of_name = results.setdefault(f"{framework}:{name}", [])
                weights = weights_of(own)
                if not of_name or of_name[-1]["weights"] != weights:
                    of_name.append({"versions": [], "weights": weights})
                of_name[-1]["versions"].append(version)
    return results


def stored() -> dict[str, list[dict[str, Any]]]:
    """What `run` gave, from docs/names.json."""
    results: dict[str, list[dict[str, Any]]] = json.loads(RESULTS.read_text())["weights"]
    return results


def compared(results: Mapping[str, Any]) -> Iterator[tuple[str, str, PeerName, Named]]:
    """Each name and version that was run: alias, version, the row, and what the weights are."""
    for alias, spans in results.items():
        framework, _, name = alias.partition(":")
        for span in spans:
            named = name_of(span["weights"])
            for version in span["versions"]:
                peers = [peer for peer in NAMES if (peer.framework, peer.name) == (framework, name)]
                yield alias, version, next(peer for peer in peers if version in peer.versions), named


def main(arguments: Sequence[str]) -> int:
    """Run what can be had, write docs/names.json and print the table; 1 if a row and its framework's code differ."""
    parser = argparse.ArgumentParser(description="Run other frameworks' own aggregation and compare it with our table.")
    parser.add_argument("--packages", type=Path, required=True, help="folder for packages, each in one of its own")
    parser.add_argument("--checkout", action="append", default=[], metavar="FRAMEWORK=FOLDER", help="of a commit")
    options = parser.parse_args(arguments)
    checkouts = {
        name: Path(folder).expanduser() for name, _, folder in (given.partition("=") for given in options.checkout)
    }
    results = run(options.packages, checkouts)
    RESULTS.write_text(json.dumps({"masks": STEPS, "cuts": CUTS, "divisor": DIVISOR, "weights": results}) + "\n")
    wrong = 0
    for alias, version, peer, named in compared(results):
        wrong += not agrees(peer, named)
        print(f"{'as the row' if agrees(peer, named) else 'DIFFERS':<12}{alias:<40}{version:<10}{named.words}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
