"""verl: its `agg_loss` guarded, and its Megatron engine exact under context parallelism, in each of verl's workers.

    VERL_USE_EXTERNAL_MODULES=megatron_rl_loss.engines.verl_install  # in Ray's runtime environment

verl's `agg_loss` returns the step's share in every mode if it gets counts of the whole step, as from verl's engine. The
guard refuses other counts, never reads masked losses, sums in float32, and taps losses: the first training step of each
model is proved. A row of paths measures what `ppo_loss` does to advantages before. Importing this module imports no
verl; `install` does. Source: verl 0.9.1, 1dda039b, trainer/ppo/core_algos.py, workers/utils/losses.py,
workers/engine/megatron/transformer_impl.py.
"""

import importlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl_loss.core.collectives import check_together, several
from megatron_rl_loss.core.errors import require
from megatron_rl_loss.core.layouts import Gathered
from megatron_rl_loss.core.samples import Samples
from megatron_rl_loss.core.taps import tap
from megatron_rl_loss.engines.loss_trials import LossPaths, WeighedMicrobatch, first_of
from megatron_rl_loss.engines.places import swapped
from megatron_rl_loss.engines.policy_tap import tap_policy
from megatron_rl_loss.engines.proving import prove
from megatron_rl_loss.engines.replacing import Function, Replaced, announce, installed
from megatron_rl_loss.extend import is_observed, observed_taps, part_of_loss, resolve, run_schedules_by

__all__ = ["install", "response_mask_of", "response_samples"]

_VERSIONS = "0.9.1, or 1dda039b (2026-08-22)"
_CUT = {
    "geo_mean": "averages the sequences of each micro-batch separately",
    "clip_cov": "selects tokens within each micro-batch",
    "kl_cov": "selects tokens within each micro-batch",
}
_WHOLE_STEP = "Pass the count of the whole step, over all its micro-batches and DP ranks."
_ALONE = f"verl would count this micro-batch alone, and the loss would depend on how the step is cut. {_WHOLE_STEP}"
#: The arguments by which a mode divides, and what verl does without one. Other modes divide by samples alone.
_DIVISORS = {"token-mean": ["batch_num_tokens"], "token-sum": []}
_DIVISORS["seq-mean-token-sum-norm"] = ["global_batch_size", "loss_scale_factor"]
_WITHOUT = {
    "global_batch_size": _ALONE,
    "batch_num_tokens": _ALONE,
    "loss_scale_factor": "verl would divide by the padded length of this micro-batch. Set actor.loss_scale_factor, "
    "e.g. to the maximal response length.",
}
#: Policy losses with the slope -advantage by a log-prob at a ratio of 1, whose advantages are measured too.
_LINEAR = ("vanilla", "gspo", "gpg", "sapo", "cispo")
_PPO_LOSS = LossPaths(
    "verl.workers.utils.losses:no_padding_2_padding",
    "data.advantages",
    {"data.old_log_probs": "old", "data.rollout_is_weights?": "ones"},
)
_Terms = list[tuple[str, float]]  # with their coefficients
_UNNAMED_TERM = ("pg", math.nan)


@dataclass
class _Running:
    """verl's loss function that is running, if one is.

    Attributes:
        terms: those that it has still to aggregate; then one for a call too many.
        mask: the response mask of its batch, not as the function changed it since.
        mode: of its terms beside the policy loss, as the config names it.
        estimator: of the KL penalty, as the config names it; empty without a KL penalty.
        kl: the KL penalty of that estimator.
        is_other_kl: another one was aggregated.
        policy: what the policy loss was tapped as, if it was.
        taps: losses are measured.
        is_trial: the loss has the policy loss, and terms that the config does not name, without the named ones.
        on_megatron: a step of verl's Megatron engine came.
        counts: of that step, each count of the whole step with the micro-batch's own; None outside of such a step.
    """

    terms: _Terms = field(default_factory=list)
    mask: Tensor | None = None
    mode: str = ""
    estimator: str = ""
    kl: Tensor | None = None
    is_other_kl: bool = False
    policy: Any = None
    taps: bool = True
    is_trial: bool = False
    on_megatron: bool = False
    counts: "list[_Count] | None" = None


class _Count(NamedTuple):
    """An argument that counts the whole step, its value, and the micro-batch's own count, which may be on a device."""

    name: str
    step_count: float | Tensor
    here: Tensor

    def check(self) -> None:
        """Raise ValueError if the micro-batch alone has more."""
        require(
            self.step_count * (1 + 1e-6) >= self.here,  # on a device without making it wait
            lambda: f"{self.name} is {float(self.step_count):g} where this micro-batch alone has {float(self.here):g}",
            f"{self.name} must be a count of the whole step. {_WHOLE_STEP}",
        )


def install(*, proves: bool = True) -> Replaced:
    """Guard verl's `agg_loss` in every loaded module that imported it, by whatever name.

    Modules loaded later import the guard; a second call guards modules that were loaded meanwhile. A trainer's metric
    of a whole batch, of values without counts and without a graph, is verl's own. With per-token loss verl's Megatron
    engine then reports every token to Megatron. Policy losses that depend on how the step is cut raise in use, and so
    do losses with a term that does not call `agg_loss`.

    Args:
        proves: prove the first step of each model by verl's own mode; False for a recipe that proves another mode.

    Raises ValueError for a verl whose functions have other parameters, ImportError without verl.
    """
    replaced: Replaced = installed("verl") or _replace(_Running(taps=proves))
    replaced.put_everywhere()
    # A driver sends its critic's loss to workers that may never import `external_lib`. pickle finds it by this name,
    # so a worker that gets it imports our module, which installs there.
    value_loss = importlib.import_module("verl.workers.utils.losses").value_loss
    value_loss.__module__, value_loss.__qualname__ = "megatron_rl_loss.engines.verl_install", "value_loss"
    return replaced


def _replace(running: _Running) -> Replaced:
    from verl.trainer.ppo import core_algos

    losses = importlib.import_module("verl.workers.utils.losses")
    needed = ["loss_mat", "loss_mask", "loss_agg_mode", "batch_num_tokens", "global_batch_size", "loss_scale_factor"]
    functions = [
        Function(core_algos, "agg_loss", needed, partial(_agg_loss, running), bool),
        Function(core_algos, "get_policy_loss_fn", ("name",), partial(_uncut, running), bool),
        Function(core_algos, "kl_penalty", ["kl_penalty"], partial(_kl_penalty, running), bool),
        Function(losses, "ppo_loss", ("config", "model_output", "data"), partial(_ppo_loss, running), bool),
        Function(losses, "value_loss", ("data",), partial(_checked, running, lambda arguments: [("pg", 0.5)]), bool),
    ]
    try:
        from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead as Engine
    except ImportError:  # no Megatron: its engine cannot run here
        return Replaced("verl", _VERSIONS, functions)
    run_schedules_by(partial(_step, running))
    name, every_token = "postprocess_micro_batch_func", partial(_with_every_token, running)
    functions.append(Function(Engine, name, ("self", "data", "loss_function"), every_token))
    replaced = Replaced("verl", _VERSIONS, functions)
    replaced.proof = prove("verl", None, "loss", each_model=True) if running.taps else None
    return replaced


def _agg_loss(running: _Running, stock: Callable[[], Any], arguments: dict[str, Any]) -> Any:
    """verl's share of the step loss; 0 for a step whose count is 0."""
    is_metric = not running.terms and not arguments["loss_mat"].requires_grad
    term, coef = running.terms.pop(0) if running.terms else _UNNAMED_TERM
    losses, mask, mode = arguments["loss_mat"], arguments["loss_mask"], arguments["loss_agg_mode"]
    running.is_other_kl |= term == "kl" and losses is not running.kl
    if running.is_trial and term != "pg":
        return losses.reshape(-1)[:0].sum()
    divisors = _DIVISORS.get(mode, ["global_batch_size"])
    for name in divisors:
        if arguments.get(name) is None:
            if is_metric:
                return stock()
            raise ValueError(f"{mode} without {name}: {_WITHOUT[name]}")
    for name in divisors[:1]:
        here = mask.sum() if name == "batch_num_tokens" else (mask != 0).any(-1).sum()
        arguments[name] = _step_count(running, _Count(name, arguments[name], here))
    if running.taps and (taps := observed_taps()):
        batch_mask = mask if running.mask is None else running.mask
        asked = mode if term == "pg" else running.mode  # a policy loss may have its own
        scale = arguments["loss_scale_factor"] if asked == "seq-mean-token-sum-norm" else None
        aggregation = resolve(f"verl:{asked}", divisor=scale)
        losses = tap(losses, term, samples=response_samples(batch_mask), coef=coef, aggregation=aggregation)
        if (tapped := taps.find(losses)) is not None:
            tapped.count = float(arguments["global_batch_size"]) if mode.startswith("seq-mean") else None
            differ = (
                (mask != 0).int() - (batch_mask != 0).int() if mask.shape == batch_mask.shape else mask.new_ones(())
            )
            if differ.min() < 0 and differ.max() == 0:
                tapped.doubt = "the loss function leaves out tokens of the batch's response_mask."
            running.policy = tapped if term == "pg" else running.policy
    elif running.taps and losses.requires_grad and not running.on_megatron:
        announce("verl: NOT PROVED: only steps of verl's Megatron engine are measured")
    arguments["loss_mat"] = losses.masked_fill(mask == 0, 0).to(torch.promote_types(losses.dtype, torch.float32))
    return stock()


def _kl_penalty(running: _Running, stock: Callable[[], Any], arguments: dict[str, Any]) -> Any:
    """The KL penalty of `ppo_loss`, noted if it is the config's."""
    penalty = stock()
    running.kl = penalty if arguments["kl_penalty"] == running.estimator else None
    return penalty


def _step_count(running: _Running, count: _Count) -> float | Tensor:
    """The count of the whole step, validated against this micro-batch's own; 1 instead of 0."""
    if running.counts is None:
        count.check()
    else:
        running.counts.append(count)
    step_count = count.step_count
    return torch.where(step_count == 0, 1, step_count) if isinstance(step_count, Tensor) else step_count or 1


def _step(running: _Running, schedule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call of Megatron's schedule, after which a count that is too small on one rank stops all ranks.

    Inside, other ranks would wait for the gradients and activations of a rank that raises.
    """
    if kwargs.get("forward_only"):
        return schedule(*args, **kwargs)
    from megatron.core import parallel_state as state

    def check() -> None:
        for count in counts:
            _Count(count.name, float(count.step_count), count.here.cpu()).check()

    counts = list[_Count]()
    with swapped(vars(running), {"counts": counts}):
        result = schedule(*args, **kwargs)
    groups = state.get_tensor_model_parallel_group(), state.get_pipeline_model_parallel_group()
    check_together(check, several(state.get_data_parallel_group(with_context_parallel=True), *groups))
    return result


def response_mask_of(data: Any) -> Tensor:
    """The mask of responses, bool [rows, tokens], of a micro-batch as verl's engine passes it to a loss function."""
    mask: Tensor = data["response_mask"]
    return (torch.nested.to_padded_tensor(mask, 0) if mask.is_nested else mask) != 0


def response_samples(mask: Tensor, **ids: Any) -> Samples:
    """Rows of responses: each context-parallel rank has whole rows, and its gather's backward returns its slice."""
    cp_size = 1
    if (state := sys.modules.get("megatron.core.parallel_state")) and state.model_parallel_is_initialized():
        cp_size = state.get_context_parallel_world_size()
    edges = [row * mask.shape[1] for row in range(len(mask) + 1)]
    return Samples(list(mask), layout=Gathered(edges, backward="slice") if cp_size > 1 else None, **ids)


def _ppo_loss(running: _Running, stock: Callable[[], Any], arguments: dict[str, Any]) -> Any:
    """verl's `ppo_loss`; its slopes show what it does to advantages and losses before it calls `agg_loss`."""
    checked = partial(_checked, running, _terms_of_ppo, stock, arguments)
    observes = running.taps and is_observed()
    if not observes or arguments["config"].policy_loss.get("loss_mode", "vanilla") not in _LINEAR:
        return checked()

    def tried() -> Any:
        """The loss; a trial, which nobody observes, is without the terms whose losses are tapped in `_agg_loss`."""
        with swapped(vars(running), {"is_trial": not is_observed()}):
            return checked()

    def measured() -> WeighedMicrobatch:
        mask, advantages = response_mask_of(arguments["data"]), arguments["data"]["advantages"]
        plain = torch.nested.to_padded_tensor(advantages, 0) if advantages.is_nested else advantages
        return WeighedMicrobatch(
            response_samples(mask), torch.ones(mask.shape), plain, "advantages", 1.0,
            running.policy and running.policy.aggregation, is_followed=False, beside={},
        )  # fmt: skip

    returned = tap_policy(_PPO_LOSS, tried, arguments, measured)
    if (taps := observed_taps()) and running.policy is not None:
        tapped = taps.losses["advantages"][taps.num_microbatches - 1]
        tapped.doubt, tapped.count = tapped.doubt or running.policy.doubt, running.policy.count
    return returned


def _checked(
    running: _Running, terms_of: Callable[[dict[str, Any]], _Terms], stock: Callable[[], Any], arguments: dict[str, Any]
) -> Any:
    """verl's loss; raises if the loss calls `agg_loss` fewer times than it has terms."""
    terms, running.is_other_kl = terms_of(arguments), False
    running.terms, running.mask = [*terms, _UNNAMED_TERM], response_mask_of(arguments["data"])
    config = arguments.get("config")
    running.mode, running.estimator = getattr(config, "loss_agg_mode", ""), str(getattr(config, "kl_loss_type", ""))
    try:
        returned, left = stock(), len(running.terms)
    finally:
        running.terms, running.mask, running.kl = [], None, None
    if left > 1:
        raise ValueError(
            f"a loss of {len(terms)} terms and {len(terms) + 1 - left} calls of agg_loss: each term must call "
            "agg_loss, or it may depend on how the step is cut. Use a policy loss that calls core_algos.agg_loss, or "
            "do not import megatron_rl_loss.engines.verl_install."
        )
    if left == 1 and running.is_other_kl:
        raise ValueError(
            f"a KL penalty that is not the {running.estimator} of kl_penalty: ppo_loss must aggregate the one that "
            f"kl_loss_type names. Use verl {_VERSIONS}, or do not import megatron_rl_loss.engines.verl_install."
        )
    if not left and (taps := observed_taps()):  # calls are no longer told apart
        for term, microbatches in taps.losses.items():
            for tapped in microbatches.values() if term != "pg" else ():
                tapped.aggregation = None
    if running.taps:
        part_of_loss(first_of(returned))
    return returned


def _terms_of_ppo(arguments: dict[str, Any]) -> _Terms:
    config, output = arguments["config"], arguments["model_output"]
    entropy = [("entropy", -config.entropy_coeff)] * (output.get("entropy") is not None)
    return [("pg", 1.0), *entropy, *[("kl", config.kl_loss_coef)] * bool(config.use_kl_loss)]


def _uncut(running: _Running, stock: Callable[[], Any], arguments: dict[str, Any]) -> Any:
    if arguments["name"] in _CUT:
        raise ValueError(
            f"the policy loss {arguments['name']}: it {_CUT[arguments['name']]}, so it depends on how the step is cut. "
            "Choose another policy_loss.loss_mode (gspo also averages over sequences), or do not import "
            "megatron_rl_loss.engines.verl_install."
        )
    if arguments["name"] == "bypass_mode" and running.terms:  # it may reject tokens that verl has counted
        running.terms[0] = _UNNAMED_TERM
    return stock()


def _with_every_token(running: _Running, stock: Callable[[], Any], arguments: dict[str, Any]) -> Any:
    """The engine's return value; with per-token loss the counts of CP ranks add up to the micro-batch's tokens.

    verl rounds the count down on each CP rank, and Megatron divides by the sum. A verl whose ranks round up, too, so
    that its counts add up, passes.
    """
    running.on_megatron = True
    engine, loss_function = arguments["self"], arguments.get("loss_function")
    if isinstance(loss_function, partial):  # a worker may have got verl's own before it installed this
        replaced: Replaced = installed("verl")
        arguments["loss_function"] = partial(
            replaced.replacement(loss_function.func), *loss_function.args, **loss_function.keywords
        )
    loss, *tokens, output = stock()
    if not tokens or engine.engine_config.dynamic_context_parallel:
        return loss, *tokens, output
    from megatron.core import parallel_state

    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    routed = engine._routed_num_tokens(arguments["data"])
    require(
        (tokens[0] == routed // size) | (tokens[0] == (routed + size - 1) // size),
        lambda: f"verl's count of {int(tokens[0])} tokens on a CP rank of {size}, of a micro-batch of {int(routed)}",
        f"a rank's count must be the micro-batch's divided by the CP size, rounded. Use verl {_VERSIONS}.",
    )
    return loss, ((routed + size - 1 - rank) // size).to(tokens[0]), output
