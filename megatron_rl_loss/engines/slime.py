"""slime, miles and vime: hooks for ``--custom-pg-loss-reducer-function-path``; the path alone carries mode and divisor.

    --custom-pg-loss-reducer-function-path megatron_rl_loss.engines.slime.constant_40960

The engines call a hook for each micro-batch. The closure that the hook returns gives a share of the sum of means
(`sample_mean`), of sum / L (`constant`), or of the sum over tokens (`token_mean`). Shares are added up over
micro-batches and ranks, and divided by G, the step's rollouts; with ``calculate_per_token_loss`` the divisor is the
step's token count, in which a fully masked sample counts as one token unless `count_steps` runs. The layout is
`ZigzagResponse`, as in their `cp_utils.py`; all-gather context parallelism returns to that layout before the loss.
"""

import importlib
import math
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.core.collectives import StepGroups, attempt, world_rank
from megatron_rl_loss.core.layouts import IntList, ZigzagResponse
from megatron_rl_loss.core.masks import Mask
from megatron_rl_loss.core.samples import LocalTokens, Samples
from megatron_rl_loss.core.taps import tap
from megatron_rl_loss.engines.places import swapped
from megatron_rl_loss.engines.proving import prove
from megatron_rl_loss.engines.replacing import Function, Replaced, announce, installed, once
from megatron_rl_loss.extend import (
    Aggregation,
    Promises,
    Reducer,
    WeightedSum,
    count_step,
    is_observed,
    load_function,
    proof_level,
    resolve,
    times_mask,
)

__all__ = ["Hook", "count_steps", "make_hook", "sample_mean", "token_mean"]

_COUNT_STEPS = "add --custom-megatron-init-path megatron_rl_loss.engines.slime.count_steps"
_OPTION = "--custom-pg-loss-reducer-function-path"
_HOOKS = (
    "the hooks are ...slime.sample_mean, ...slime.token_mean and ...slime.constant_40960 (your divisor for 40960, an "
    "integer above 0). Other modes need more of the step than a hook's four arguments carry: fold the weights into the "
    "advantages (fold_into_advantages), multiply by the global batch size, and use ...slime.constant_1."
)
#: Versions known, and the name of the step's rollouts in `train_one_step`.
_ENGINES = {
    "slime": ("624b824a (2026-08-21)", "step_global_batch_size"),
    "miles": ("31f1ca96 (2026-08-21)", "num_rollouts"),
    "vime": ("c0ed6d83 (2026-07-21)", "step_global_batch_size"),
}
_NO_COUNTS_NEEDED = "Drop --custom-megatron-init-path; ...slime.sample_mean and ...slime.constant_40960 need no counts."


class StepCounts(NamedTuple):
    """Counts of the step over all DP ranks, from the masks before any rejection.

    `num_rollouts` is the engine's divisor; `padded_length` is the length of this rank's rows, where rows are padded.
    """

    step_tokens: float
    num_samples: int
    num_rollouts: int
    padded_length: int | None = None


@dataclass
class Now:
    """The `now` of slime's `Replaced` in a step.

    Attributes:
        counts: the step's, if kept.
        loss: args and whole masks of the micro-batch whose loss is computed.
        masks: whole masks of each micro-batch that is still to come, as the step's iterator has them.
    """

    counts: StepCounts | None = None
    loss: tuple[Namespace, Sequence[Mask]] | None = None
    masks: list[Sequence[Mask]] = field(default_factory=list)


def _engine() -> str:
    """The name of this process's engine."""
    return next((name for name in ("miles", "vime") if name in sys.modules), "slime")


def _now() -> Now:
    """What is known of the step that the engine is in."""
    replaced = installed(_engine())
    return replaced.now if replaced is not None and replaced.now is not None else Now()


@dataclass(frozen=True, eq=False)
class Hook:
    """``hook(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> closure``; see `make_hook`."""

    aggregation: Aggregation

    @property
    def mode(self) -> str:
        return self.aggregation.mode.name

    def __str__(self) -> str:
        return f"{self.mode}{'' if self.aggregation.divisor is None else f' {self.aggregation.divisor:.15g}'}"

    def __call__(
        self,
        total_lengths: IntList,
        response_lengths: IntList,
        loss_masks: Sequence[Tensor],
        calculate_per_token_loss: bool = False,
    ) -> Reducer:
        """The reducer of one micro-batch, to be scaled by slime or miles.

        Args:
            total_lengths, response_lengths: tokens of each sample, with and without its prompt.
            loss_masks: masks over the whole response (never cut for a CP rank), one 1-D tensor per sample.
            calculate_per_token_loss: as Megatron's flag.

        Raises ValueError and TypeError for a mode that ``calculate_per_token_loss`` contradicts, a step whose samples
        or padding the four arguments do not describe, masks and lengths that disagree.
        """
        if not isinstance(calculate_per_token_loss, bool):
            raise TypeError(
                f"calculate_per_token_loss is a {type(calculate_per_token_loss).__name__}: the fourth argument must be "
                "a bool. Pass args.calculate_per_token_loss."
            )
        now = _now()
        counts = now.counts
        self._check_flag(calculate_per_token_loss, counts)
        row = None if counts is None else counts.padded_length
        cp_rank, cp_size, is_first = _place(row is not None)
        rows = None if row is None else [row] * len(total_lengths)
        layout = ZigzagResponse(total_lengths, response_lengths, rows)
        samples = Samples(loss_masks, layout=layout)
        local = samples.local(cp_rank, cp_size)
        divisor = self.aggregation.divisor
        if self.mode == "token_mean":
            divisor = _token_divisor(samples, now, calculate_per_token_loss)
        elif self.mode == "sample_mean" and counts is not None and counts.num_samples != counts.num_rollouts:
            raise ValueError(
                f"a step of {counts.num_samples} samples and {counts.num_rollouts} rollouts: a hook's four arguments "
                "do not say which samples belong to one rollout. Run without the hook: the engine's own reducer "
                "averages whole rollouts by rollout_mask_sums."
            )
        weigh = partial(unit_weights, local, None if divisor is None else [divisor] * len(samples))
        engine, theirs = _engine(), "token" if calculate_per_token_loss else "sample"
        announce(f"{engine}: policy loss by {self}; KL and entropy keep {engine}'s own {theirs} mean", is_first)
        if counts is None and installed(engine) is None:
            _prove_next_step(engine, is_first)
        reducer = WeightedSum(weigh, local, self.aggregation)
        if not is_observed():
            return reducer
        if now.loss is not None and not _rejects(now.loss[0]):
            samples = Samples(now.loss[1], layout=layout)  # whatever masks the hook was given
        return lambda losses: reducer(tap(losses, samples=samples))

    def _check_flag(self, per_token: bool, counts: StepCounts | None) -> None:
        if self.mode != "token_mean":
            if per_token:
                raise ValueError(
                    f"{self} with calculate_per_token_loss on: the sum would be divided by the step's tokens, not by "
                    "its rollouts. Drop --calculate-per-token-loss, or use ...slime.token_mean."
                )
        elif _fsdp_of_miles() is not None:
            raise ValueError(
                f"{self} on miles's FSDP backend: that backend never divides by the step's tokens, and count_steps "
                "needs Megatron. Use ...slime.sample_mean or ...slime.constant_40960 (your divisor), or "
                "--train-backend megatron."
            )
        elif not per_token and counts is None:
            raise ValueError(
                f"{self} with calculate_per_token_loss off: the sum would be divided by the step's rollouts, and the "
                f"hook does not know the step's tokens. Add --calculate-per-token-loss, or {_COUNT_STEPS}."
            )


def unit_weights(
    local: LocalTokens, sizes: Sequence[float] | None, dtype: type[np.floating[Any]] = np.float32
) -> Tensor:
    """``m / D`` for every token that this rank holds: the weight inside its unit, without the number of units.

    The engine divides by that number itself. ``sizes``: D of each sample; None for its own mask sum.
    """
    divisors = local.samples.mask_sums if sizes is None else np.asarray(sizes, np.float64)
    with np.errstate(divide="ignore"):  # the weight of a fully masked sample is 0, whatever D is
        return times_mask(local, 1 / divisors, "unit sizes", dtype)


def _token_divisor(samples: Samples, now: Now, per_token: bool) -> float:
    """The divisor of masks that makes a token mean, for an engine that divides by tokens or by rollouts."""
    if now.counts is None:
        for i in np.flatnonzero(samples.mask_sums < 1)[:1]:
            raise ValueError(
                f"sample {i} has {samples.mask_sums[i]:g} mask tokens: the engine may count 1 there, and a hook sees "
                "only the tokens that rejection (TIS) left. Leave samples without a token out of the batch; with "
                f"rejection, or where you cannot, {_COUNT_STEPS}."
            )
        return 1.0
    if not per_token:
        return now.counts.step_tokens / max(now.counts.num_rollouts, 1)
    if now.loss is None:
        raise ValueError(
            f"a hook called outside of {_engine()}'s loss_function: count_steps replaced that function, and another "
            f"caller may divide by another token count. Use {_engine()} {_ENGINES[_engine()][0]}."
        )
    return 1.0


def make_hook(mode: str, *, divisor: float | None = None) -> Hook:
    """A hook for a module of your own; `sample_mean`, `token_mean` and `constant_<L>` of this module are made by it.

    >>> constant_1_5 = make_hook("constant", divisor=1.5)

    Raises ValueError and TypeError for another mode, a divisor that is missing, unusable or without effect.
    """
    if mode not in ("sample_mean", "token_mean", "constant"):
        raise ValueError(f"a slime or miles hook for {getattr(mode, 'name', mode)}: {_HOOKS}")
    return Hook(resolve(mode, divisor=divisor))


sample_mean = make_hook("sample_mean")
token_mean = make_hook("token_mean")


def __getattr__(name: str) -> Hook:
    """`constant_<L>`, for any L; AttributeError with the remedy for every other name."""
    if match := re.fullmatch(r"constant_([1-9]\d*)", name):
        return _constant(int(match[1]))
    raise AttributeError(f"megatron_rl_loss.engines.slime.{name}: {_HOOKS}")


@cache
def _constant(divisor: int) -> Hook:
    return make_hook("constant", divisor=divisor)


def _fsdp_of_miles() -> Any:
    """The parallel state of miles's FSDP backend, which runs without Megatron; None elsewhere."""
    parallel = sys.modules.get("miles.backends.training_utils.parallel")
    state = getattr(parallel, "_parallel_state", None)
    return state if state is not None and "fsdp" in state.meshes else None


def _place(row_length_is_known: bool) -> tuple[int, int, bool]:
    """CP rank, CP size, True on the first rank with a loss; refuses padded rows of unknown length if ranks cut rows."""
    if (fsdp := _fsdp_of_miles()) is not None:
        return fsdp.cp.rank, fsdp.cp.size, world_rank() == 0
    from megatron.core import parallel_state as state

    if not state.model_parallel_is_initialized():
        raise ValueError(
            "no parallel state in Megatron: the hook reads the context-parallel rank and size there. Call "
            "initialize_model_parallel before."
        )
    cp_size = state.get_context_parallel_world_size()
    if cp_size > 1 and not row_length_is_known:
        from megatron.training.global_vars import get_args

        qkv_format = getattr(get_args(), "qkv_format", "thd")
        if qkv_format != "thd":
            raise ValueError(
                f"qkv_format {qkv_format!r} with a context-parallel size of {cp_size}: ranks cut rows by the padded "
                f"length, which the hook's four arguments do not carry. Use --qkv-format thd, or {_COUNT_STEPS}."
            )
    is_first = state.get_data_parallel_rank(with_context_parallel=True) == state.get_tensor_model_parallel_rank() == 0
    return state.get_context_parallel_rank(), cp_size, is_first


def count_steps(args: Namespace) -> None:
    """Count each step and prove the first one: for ``--custom-megatron-init-path`` of slime and of miles.

    The engine calls this function once on every rank. Each `train_one_step` then begins with one round of collectives.
    With per-token loss the engine then divides by the step's mask tokens alone; an empty sample no longer counts as one
    token. If the flag names a function of yours already, call this one from there. An audit that the environment asks
    for is attached, too.

    Raises ValueError for an engine whose functions have other parameters, a launch without a hook, multi-LoRA, and, in
    a step, independent data-parallel replicas; BadBatchError on every rank, in a step, if one rank cannot count its
    samples, or if tokens of the first step have weights that the hook's mode does not ask for.
    """
    if args.loss_type == "policy_loss" and args.custom_pg_loss_reducer_function_path is None:
        raise ValueError(
            f"count_steps without {_OPTION}: {_engine()} ignores options that it does not know. Check the spelling; "
            f"{_HOOKS}"
        )
    _check_countable(args)
    if "MEGATRON_RL_LOSS_AUDIT" in os.environ:
        importlib.import_module("megatron_rl_loss.audit.attach")
    _replace(_engine(), keeps_counts=True)


def _check_countable(args: Namespace) -> None:
    if rule := _why_uncountable(args):
        raise ValueError(f"counting steps {rule}. {_NO_COUNTS_NEEDED}")


def _why_uncountable(args: Namespace) -> str:
    """Why nobody can count this launch's steps; empty if they can be counted."""
    if _engine() != "miles":
        return ""
    from miles.backends.training_utils import parallel
    from miles.utils.multi_lora import is_multi_lora_enabled

    if is_multi_lora_enabled(args):
        return "with multi-LoRA: every adapter has a batch of its own, and miles divides by that batch"
    if parallel._parallel_state is not None and parallel._parallel_state.indep_dp.size > 1:
        return "with independent data-parallel replicas: Megatron's groups span one replica only"
    return ""


def _replace(engine: str, *, keeps_counts: bool) -> None:
    """Replace the engine's step and loss, once. With `keeps_counts` hooks use the counts too, else the proof alone."""
    once((engine, keeps_counts), lambda: _replaced(engine, keeps_counts))


def _replaced(engine: str, keeps_counts: bool) -> Replaced:
    versions, num_rollouts = _ENGINES[engine]
    model = importlib.import_module(f"{engine}.backends.megatron_utils.model")
    needed = ("data_iterator", "num_microbatches", num_rollouts)

    def counted(stock: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        args = arguments["args"]
        if keeps_counts:
            _check_countable(args)
        elif replaced.proof is not None and replaced.proof.is_over:
            return stock()
        iterators, num_microbatches, rollouts = (arguments[name] for name in needed)
        counts, masks = _counts(iterators[0], num_microbatches, rollouts)
        if args.loss_type == "policy_loss":  # a critic has another
            _prove(replaced, engine, args, counts)
        with swapped(vars(replaced), {"now": Now(counts if keeps_counts else None, masks=masks)}):
            return stock()

    step = Function(model, "train_one_step", ("args", *needed), counted)
    terms = _Terms(engine, is_over=proof_level() == "off")
    loss = Function(model, "loss_function", ("args", "batch"), partial(_with_mask_tokens, terms))
    backend = f"{engine}.backends.{'training' if engine == 'miles' else 'megatron'}_utils"
    cp_utils = importlib.import_module(f"{backend}.cp_utils")
    means = Function(cp_utils, "get_sum_of_sample_mean", (), terms.keep, lambda name: name == f"{backend}.loss")
    replaced = terms.replaced = Replaced(engine, versions, [step, loss, means])
    return replaced


def _prove_next_step(engine: str, is_first: bool) -> None:
    """Measure the next step, for a hook without `count_steps`: the engine loads the hook inside the first step."""
    if _fsdp_of_miles() is not None:
        says = "NOT PROVED: gradients on miles's FSDP backend are not measured"
    elif f"{engine}.backends.megatron_utils.model" not in sys.modules:
        return
    else:
        from megatron.training.global_vars import get_args

        says = (
            f"count_steps did not run in this worker, so the next step is measured; {engine} ignores options that it "
            f"does not know. To measure the first step, check the spelling: {_COUNT_STEPS}"
        )
        if get_args().pipeline_model_parallel_size > 1:
            says = f"NOT PROVED: only the last pipeline stage loads the hook. To measure the first step, {_COUNT_STEPS}"
        elif rule := _why_uncountable(get_args()):
            says = f"NOT PROVED: counting steps {rule}"
        else:
            _replace(engine, keeps_counts=False)
    announce(f"{engine}: {says}", is_first)


def _prove(replaced: Replaced, engine: str, args: Namespace, counts: StepCounts) -> None:
    """Measure the step, unless one was proved already."""
    if replaced.proof is not None and replaced.proof.is_over:
        return
    path = args.custom_pg_loss_reducer_function_path
    hook = load_function(path, _OPTION, "it must be a hook", "Make it by make_hook", Hook)
    if not isinstance(hook, Hook):
        announce(f"{engine}: NOT PROVED: {path} is not made by make_hook")
        return
    asked = hook.aggregation
    if hook.mode == "token_mean" and _rejects(args):  # over the tokens before rejection
        asked = resolve("token_sum", divisor=counts.step_tokens)
    elif hook.mode == "constant" and counts.num_samples != counts.num_rollouts:
        asked = resolve("token_sum", divisor=(asked.divisor or 0) * counts.num_rollouts)
    if replaced.proof is None:
        never = f"{engine}'s policy loss never called {path}. Use {engine} {_ENGINES[engine][0]}."
        replaced.proof = prove(engine, asked, beside=_beside(engine, args), never=never)
    replaced.proof.asked = asked
    data = None if _rejects(args) else (counts.step_tokens, counts.num_samples)
    replaced.proof.promises = Promises(data=data)


def _beside(engine: str, args: Namespace) -> str:
    """Words for what becomes of the terms beside the policy loss."""
    return f"KL and entropy keep {engine}'s {'token' if args.calculate_per_token_loss else 'sample'} mean"


def _rejects(args: Namespace) -> bool:
    """True if the engine's policy loss may reject tokens."""
    return bool(args.use_tis or args.get_mismatch_metrics)


@dataclass
class _Terms:
    """The engine's loss against ``pg_loss - entropy_coef * entropy_loss + kl_loss_coef * kl_loss`` of its report.

    The proof measures the policy loss alone; a KL penalty of another weight, or a loss that is added, shows here. A
    reported term that is none of the means that the engine's reducer returned may be another mean: it is not checked.
    The penalty is 0 as long as the policy is its reference, so micro-batches are compared until no term is.

    Attributes:
        is_over: nothing is left to compare.
        remaining: micro-batches to compare at most, since a penalty may stay 0 and each waits for the device.
        replaced: has the proof of the policy loss.
        amended: what the line of that proof, once printed, says of all weights, or of one term.
        means: what the engine's reducers returned in the loss function that runs.
        unchecked: terms with a coefficient that were none of these means yet; None before the first micro-batch.
    """

    engine: str
    is_over: bool = False
    remaining: int = 4096
    replaced: Any = None
    amended: dict[str, str] = field(default_factory=dict)
    means: list[Tensor] = field(default_factory=list)
    unchecked: set[str] | None = None

    def keep(self, stock: Callable[[], Any], arguments: dict[str, Any]) -> Reducer:
        """The engine's reducer, which keeps what it returns."""
        reduce, means = stock(), self.means

        def kept(values: Tensor) -> Tensor:
            mean: Tensor = reduce(values)
            if not self.is_over and isinstance(mean, Tensor):
                means.append(mean.detach())
            return mean

        return kept

    def compare(self, args: Namespace, dtype: torch.dtype, log: dict[str, Any]) -> None:
        """Compare a micro-batch on the first rank, and print what differs; `dtype` is that of the loss."""
        report = dict(zip(log["keys"], log["values"][1:].tolist(), strict=True))
        kl_coef = args.kl_loss_coef if args.use_kl_loss else 0.0
        coefs = {"pg_loss": 1.0, "entropy_loss": -args.entropy_coef, "kl_loss": kl_coef}
        parts = {name: coef * report.get(name, math.nan) for name, coef in coefs.items() if coef}
        size, eps = sum(map(abs, parts.values())), torch.finfo(dtype).eps
        total = sum(parts.values())
        if abs(report.get("loss", math.nan) - total) > 8 * eps * size:
            terms = " + ".join(f"{coef:g} * {name}" for name, coef in coefs.items() if coef)
            self._say(
                "weights",
                f"NOT PROVED are the terms beside it: the loss is {report['loss']:.6g} where {terms} is {total:.6g}, "
                f"so one has another weight, or one is added. Use {self.engine} {_ENGINES[self.engine][0]}",
            )
        else:
            named = {name: report.get(name, math.nan) for name in parts if name != "pg_loss"}
            self._find_means(args, named, 8 * eps)
        self.remaining -= 1
        self.is_over |= not self.remaining
        self.is_over |= all(abs(part) > 64 * eps * size for name, part in parts.items() if name != "pg_loss")

    def _find_means(self, args: Namespace, reported: dict[str, float], tolerance: float) -> None:
        """Say of reported terms if they are means of the engine's own; one that is 0 may be any mean."""
        self.unchecked = {*reported} if self.unchecked is None else self.unchecked
        to_check = [name for name in sorted(self.unchecked) if reported[name]]
        means = torch.stack(self.means).tolist() if to_check and self.means else []
        for name in to_check:
            if not any(math.isclose(mean, reported[name], rel_tol=tolerance) for mean in means):
                self._say(name, f"{name} is NOT CHECKED: it is none of the means that get_sum_of_sample_mean returned")
            self.unchecked.discard(name)
        proof = self.replaced.proof
        if proof is not None and not proof.is_over and not self.amended:
            zeros = ", ".join(sorted(self.unchecked))
            not_yet = f"; not checked yet, as 0 in this step: {zeros}" if zeros else ""
            proof.amend(f"{_beside(self.engine, args)}{not_yet}")

    def _say(self, what: str, says: str) -> None:
        """In the line that proves the policy loss, so that one line says all; after it, in a line of its own.

        Of the weights of all terms, or of one term's mean, once.
        """
        proof = self.replaced.proof
        if proof is not None and not proof.is_over:
            self.amended[what] = says
            proof.amend("; ".join(self.amended.values()))
            return
        if not (what in self.amended and proof.outcome == "proved"):
            announce(f"{self.engine}: the policy loss is as its line says, and {says}", True)
        self.is_over |= what == "weights"


def _with_mask_tokens(terms: _Terms, stock: Callable[[], Any], arguments: dict[str, Any]) -> Any:
    """The engine's scaled loss; Megatron and the engine's report then divide by the micro-batch's mask tokens."""
    now, args, masks = _now(), arguments["args"], arguments["batch"]["loss_masks"]
    step_masks = now.masks.pop(0) if now.masks else masks
    is_cut_alike = [*map(len, step_masks)] == [*map(len, masks)]  # responses may have been expanded
    now.loss = args, step_masks if is_cut_alike else masks  # for a recomputed loss too
    with swapped(vars(terms), {"means": []}):
        loss, tokens, log = stock()
        if args.loss_type == "policy_loss" and not terms.is_over and _place(True)[2]:
            terms.compare(args, loss.dtype, log)
    if args.calculate_per_token_loss and now.counts is not None:
        tokens = sum((mask.sum() for mask in masks), start=tokens * 0)
        log["values"][0] = tokens
    return loss, tokens, log


def _counts(iterator: Any, num_microbatches: int, num_rollouts: int) -> tuple[StepCounts, list[Sequence[Mask]]]:
    """Counts of the step that comes next in the engine's `DataIterator`, and copies of each micro-batch's masks."""

    def describe() -> list[Samples]:
        masks: list[Tensor] = iterator.rollout_data["loss_masks"]
        if iterator.micro_batch_indices is None:
            size, end = iterator.micro_batch_size, iterator.offset + num_microbatches * iterator.micro_batch_size
            microbatches = [range(begin, begin + size) for begin in range(iterator.offset, end, size)]
        else:
            microbatches = iterator.micro_batch_indices[iterator.offset : iterator.offset + num_microbatches]
        return [Samples([masks[i] for i in indices]) for indices in microbatches]

    from megatron_rl_loss.extend import groups_of  # which needs Megatron

    groups = groups_of(None, None)
    microbatches: Any = attempt(describe)
    counted_over = StepGroups(groups.dp, groups.cp, (groups.tp, groups.pp))
    totals, rows = count_step(microbatches, counted_over), iterator.rollout_data.get("max_seq_lens")
    padded_length = int(rows[0]) if rows else None  # a rank pads all its rows alike
    counts = StepCounts(totals.step_tokens, totals.units["rollout"].number["all"], num_rollouts, padded_length)
    return counts, [samples.loss_masks for samples in microbatches]
