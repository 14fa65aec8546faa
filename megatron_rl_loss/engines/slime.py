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
    observed_taps,
    part_of_loss,
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
        policy: the share of the policy loss that our reducer made in the loss function that runs.
        means: those that the engine's reducers made in that function, of a measured step.
    """

    counts: StepCounts | None = None
    loss: tuple[Namespace, Sequence[Mask]] | None = None
    masks: list[Sequence[Mask]] = field(default_factory=list)
    policy: Tensor | None = None
    means: list[Tensor] = field(default_factory=list)


class HookEngine(NamedTuple):
    """What the library knows of an engine that calls a hook: a row of `ENGINES`.

    Attributes:
        num_rollouts: the name of the step's rollouts in `train_one_step`.
        losses: the package below ``backends`` that has the loss function.
        uncountable: a launch's args -> the reason why nobody can count its steps; empty if they can be counted.
        fsdp: the parallel state of a backend that runs without Megatron; None elsewhere.
    """

    name: str
    versions: str
    num_rollouts: str = "step_global_batch_size"
    losses: str = "megatron_utils"
    uncountable: Callable[[Namespace], str] = lambda args: ""
    fsdp: Callable[[], Any] = lambda: None

    def says_of_terms(self, per_token: bool) -> str:
        return f"KL and entropy keep {self.name}'s own {'token' if per_token else 'sample'} mean"

    def check_countable(self, args: Namespace) -> None:
        if rule := self.uncountable(args):
            raise ValueError(f"counting steps {rule}. {_NO_COUNTS_NEEDED}")


def _uncountable_by_miles(args: Namespace) -> str:
    from miles.backends.training_utils import parallel
    from miles.utils.multi_lora import is_multi_lora_enabled

    if is_multi_lora_enabled(args):
        return "with multi-LoRA: every adapter has a batch of its own, and miles divides by that batch"
    if parallel._parallel_state is not None and parallel._parallel_state.indep_dp.size > 1:
        return "with independent data-parallel replicas: Megatron's groups span one replica only"
    return ""


def _fsdp_of_miles() -> Any:
    parallel = sys.modules.get("miles.backends.training_utils.parallel")
    state = getattr(parallel, "_parallel_state", None)
    return state if state is not None and "fsdp" in state.meshes else None


ENGINES = (
    HookEngine(
        "miles", "31f1ca96 (2026-08-21)", "num_rollouts", "training_utils", _uncountable_by_miles, _fsdp_of_miles
    ),
    HookEngine("vime", "c0ed6d83 (2026-07-21)"),
    HookEngine("slime", "624b824a (2026-08-21)"),
)


def _engine() -> HookEngine:
    """This process's engine; by default slime."""
    return next((engine for engine in ENGINES if engine.name in sys.modules), ENGINES[-1])


def _now() -> Now:
    """What is known of the step that the engine is in."""
    replaced = installed(_engine().name)
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
        engine = _engine()
        announce(f"{engine.name}: policy loss by {self}; {engine.says_of_terms(calculate_per_token_loss)}", is_first)
        if counts is None and installed(engine.name) is None:
            _prove_next_step(engine, is_first)
        reducer = WeightedSum(weigh, local, self.aggregation)
        if not is_observed():
            return reducer
        if now.loss is not None and not _rejects(now.loss[0]):
            samples = Samples(now.loss[1], layout=layout)  # whatever masks the hook was given

        def observed(losses: Tensor) -> Tensor:
            now.policy = part_of_loss(reducer(tap(losses, samples=samples)))
            return now.policy

        return observed

    def _check_flag(self, per_token: bool, counts: StepCounts | None) -> None:
        if self.mode != "token_mean":
            if per_token:
                raise ValueError(
                    f"{self} with calculate_per_token_loss on: the sum would be divided by the step's tokens, not by "
                    "its rollouts. Drop --calculate-per-token-loss, or use ...slime.token_mean."
                )
        elif _engine().fsdp() is not None:
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
            f"a hook called outside of {_engine().name}'s loss_function: count_steps replaced that function, and "
            f"another caller may divide by another token count. Use {_engine().name} {_engine().versions}."
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


def _place(row_length_is_known: bool) -> tuple[int, int, bool]:
    """CP rank, CP size, True on the first rank with a loss; refuses padded rows of unknown length if ranks cut rows."""
    if (fsdp := _engine().fsdp()) is not None:
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
    engine = _engine()
    if args.loss_type == "policy_loss" and args.custom_pg_loss_reducer_function_path is None:
        raise ValueError(
            f"count_steps without {_OPTION}: {engine.name} ignores options that it does not know. Check the spelling; "
            f"{_HOOKS}"
        )
    engine.check_countable(args)
    if "MEGATRON_RL_LOSS_AUDIT" in os.environ:
        importlib.import_module("megatron_rl_loss.audit.attach")
    _replace(engine, keeps_counts=True)


def _replace(engine: HookEngine, *, keeps_counts: bool) -> None:
    """Replace the engine's step and loss, once. With `keeps_counts` hooks use the counts too, else the proof alone."""
    once((engine.name, keeps_counts), lambda: _replaced(engine, keeps_counts))


def _replaced(engine: HookEngine, keeps_counts: bool) -> Replaced:
    model = importlib.import_module(f"{engine.name}.backends.megatron_utils.model")
    needed = ("data_iterator", "num_microbatches", engine.num_rollouts)

    def counted(stock: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        args = arguments["args"]
        if keeps_counts:
            engine.check_countable(args)
        elif replaced.proof is not None and replaced.proof.is_over:
            return stock()
        iterators, num_microbatches, rollouts = (arguments[name] for name in needed)
        counts, masks = _counts(iterators[0], num_microbatches, rollouts)
        if args.loss_type == "policy_loss":  # a critic has another
            _prove(replaced, engine, args, counts)
        with swapped(vars(replaced), {"now": Now(counts if keeps_counts else None, masks=masks)}):
            return stock()

    step = Function(model, "train_one_step", ("args", *needed), counted)
    loss = Function(model, "loss_function", ("args", "batch"), partial(_with_mask_tokens, engine))
    losses = f"{engine.name}.backends.{engine.losses}"
    cp_utils = importlib.import_module(f"{losses}.cp_utils")
    means = Function(
        cp_utils, "get_sum_of_sample_mean", (), _note_means, lambda name: name.startswith(f"{losses}.loss")
    )
    replaced = Replaced(engine.name, engine.versions, [step, loss, means])
    return replaced


def _note_means(stock: Callable[[], Any], arguments: dict[str, Any]) -> Reducer:
    """The engine's reducer, each of whose means is a part of the loss, or a metric."""
    reduce = stock()

    def noted(values: Tensor) -> Tensor:
        mean = reduce(values)
        if isinstance(mean, Tensor) and mean.requires_grad and is_observed():
            _now().means.append(part_of_loss(mean))
        return mean

    return noted


def _prove_next_step(engine: HookEngine, is_first: bool) -> None:
    """Measure the next step, for a hook without `count_steps`: the engine loads the hook inside the first step."""
    if engine.fsdp() is not None:
        says = f"NOT PROVED: gradients on {engine.name}'s FSDP backend are not measured"
    elif f"{engine.name}.backends.megatron_utils.model" not in sys.modules:
        return
    else:
        from megatron.training.global_vars import get_args

        says = (
            f"count_steps did not run in this worker, so the next step is measured; {engine.name} ignores options that "
            f"it does not know. To measure the first step, check the spelling: {_COUNT_STEPS}"
        )
        if get_args().pipeline_model_parallel_size > 1:
            says = f"NOT PROVED: only the last pipeline stage loads the hook. To measure the first step, {_COUNT_STEPS}"
        elif rule := engine.uncountable(get_args()):
            says = f"NOT PROVED: counting steps {rule}"
        else:
            _replace(engine, keeps_counts=False)
    announce(f"{engine.name}: {says}", is_first)


def _prove(replaced: Replaced, engine: HookEngine, args: Namespace, counts: StepCounts) -> None:
    """Measure the step, unless one was proved already."""
    if replaced.proof is not None and replaced.proof.is_over:
        return
    path = args.custom_pg_loss_reducer_function_path
    hook = load_function(path, _OPTION, "it must be a hook", "Make it by make_hook", Hook)
    if not isinstance(hook, Hook):
        announce(f"{engine.name}: NOT PROVED: {path} is not made by make_hook")
        return
    asked = hook.aggregation
    if hook.mode == "token_mean" and _rejects(args):  # over the tokens before rejection
        asked = resolve("token_sum", divisor=counts.step_tokens)
    elif hook.mode == "constant" and counts.num_samples != counts.num_rollouts:
        asked = resolve("token_sum", divisor=(asked.divisor or 0) * counts.num_rollouts)
    if replaced.proof is None:
        never = f"{engine.name}'s policy loss never called {path}. Use {engine.name} {engine.versions}."
        beside = engine.says_of_terms(args.calculate_per_token_loss)
        if args.recompute_loss_function:
            beside = "KL and entropy are not measured with --recompute-loss-function"
        replaced.proof = prove(engine.name, asked, beside=beside, never=never)
    replaced.proof.asked = asked
    data = None if _rejects(args) else (counts.step_tokens, counts.num_samples)
    replaced.proof.promises = Promises(data=data)


def _rejects(args: Namespace) -> bool:
    """True if the engine's policy loss may reject tokens."""
    return bool(args.use_tis or args.get_mismatch_metrics)


def _check_factors(engine: HookEngine, args: Namespace, loss: Tensor, now: Now) -> None:
    """Note a loss that is not ``pg_loss - entropy_coef * entropy_loss + kl_loss_coef * kl_loss``, by its slopes.

    These show a mean that is 0 too, as a KL penalty is while the policy is its reference.
    """
    taps = observed_taps()
    if taps is None or now.policy is None:
        return
    if args.recompute_loss_function:
        taps.parts.clear()  # to see more of a graph that is computed again would compute it now
        return
    own, *others = torch.autograd.grad(loss, [now.policy, *now.means], retain_graph=True, allow_unused=True)
    if own is None:
        return
    factors = sorted(float(slope / own) for slope in others if slope is not None and slope)
    asked = sorted(coef for coef in (args.use_kl_loss and args.kl_loss_coef, -args.entropy_coef) if coef)
    is_right = len(factors) == len(asked)
    if not (is_right and all(math.isclose(*pair, rel_tol=1e-5) for pair in zip(factors, asked, strict=True))):
        shown, wanted = (", ".join(f"{factor:.6g}" for factor in sizes) or "none" for sizes in (factors, asked))
        taps.added.add(
            f"Beside the policy loss, {engine.name}'s means have these factors in the loss: {shown}; by --kl-loss-coef "
            f"and --entropy-coef they are: {wanted}. A term has another weight, or somebody added one. Use "
            f"{engine.name} {engine.versions}."
        )


def _with_mask_tokens(engine: HookEngine, stock: Callable[[], Any], arguments: dict[str, Any]) -> Any:
    """The engine's scaled loss; Megatron and the engine's report then divide by the micro-batch's mask tokens."""
    now, args, masks = _now(), arguments["args"], arguments["batch"]["loss_masks"]
    step_masks = now.masks.pop(0) if now.masks else masks
    is_cut_alike = [*map(len, step_masks)] == [*map(len, masks)]  # responses may have been expanded
    now.loss = args, step_masks if is_cut_alike else masks  # for a recomputed loss too
    now.policy, now.means = None, []
    loss, tokens, log = stock()
    _check_factors(engine, args, loss, now)
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
