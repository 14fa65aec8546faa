"""AReaL, ROLL and RLinf, which train on the mean over an optimizer step's tokens: any mode, by a worker of your own.

    from areal.engine import MegatronPPOActor  # or FSDPPPOActor
    from megatron_rl_loss.frameworks.token_mean import aggregate

    class Actor(MegatronPPOActor):  # in a module that AReaL's workers can import
        pass

    aggregate(Actor, "prompt_mean")

Each token's advantage is multiplied by its weight in the mode * T during the engine's step method, where T is what the
engine divides by. Losses must be proportional to the advantage; other terms stay token means. Imports no engine.
Source: areal 4aef98d8, engine/megatron_engine.py, trainer/ppo/actor.py; ROLL 8eb27cc2, distributed/strategy/
megatron_strategy.py, utils/functionals.py; RLinf a3816b59, workers/megatron_worker.py, workers/actor.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl_loss.frameworks.columns import MEDIA, prompts_of, samples_of, token_mean_factors
from megatron_rl_loss.frameworks.replacing import Function, Replaced, announce
from megatron_rl_loss.modes.loss_modes import LossModes
from megatron_rl_loss.modes.table import Mode, ModeFunction
from megatron_rl_loss.reduction.taps import is_observed, tap_slopes
from megatron_rl_loss.step.layouts import Gathered
from megatron_rl_loss.step.samples import Samples

__all__ = ["aggregate"]
Given = Mapping[str, Any]  # the arguments of a call of the step method, by name
Batch = MutableMapping[str, Any]
_GROUPS, _FACTORS, _PLAIN = (f"_megatron_rl_loss_{name}" for name in ("groups", "factors", "advantages"))


class _Engine(NamedTuple):
    """An engine whose batches are padded rows with "advantages".

    Attributes:
        step: its step method, called once for each optimizer step, and parameters of it.
        wrong: conditions under which it is no token mean, each in words and with a remedy.
        batches: of this rank.
        masks: of a batch, beside its advantages.
        prompts: an id for each row of a batch, or in words why prompts are not known.
        group: the data-parallel group.
        of_samples: the remedy where a loss takes means of samples, else empty.
        tap: has the loss function of a call go through `tap_slopes`, which proves the first step.
        group_size: how many rows of a prompt it was told to generate, if that is known.
        trains: whether an instance of the class trains a policy.
        tokens: what it divides by, where that is not the step's active tokens.
        further: other methods that are replaced.
    """

    name: str
    versions: str
    step: tuple[str, Sequence[str]]
    wrong: Callable[[Given], Sequence[tuple[bool, str, str]]]
    batches: Callable[[Given], Sequence[Batch]]
    masks: Callable[[Given, Batch], Tensor]
    prompts: Callable[[Given, Batch], Sequence[Any] | str]
    group: Callable[[Given], Any]
    tap: Callable[[dict[str, Any]], None] = lambda given: None
    group_size: Callable[[Any], int | None] = lambda owner: None
    trains: Callable[[Any], bool] = lambda owner: True
    of_samples: Callable[[Given], str] = lambda given: ""
    tokens: Callable[[Given], float] | None = None
    further: Sequence[tuple[str, Sequence[str], Callable[[Callable[[], Any], dict[str, Any]], Any]]] = ()


def aggregate(owner: Any, mode: str | Mode | ModeFunction, **settings: Any) -> Replaced:
    """From now on workers with that class train on the mode.

    Args:
        owner: AReaL: a subclass of ``MegatronPPOActor`` or ``FSDPPPOActor``, or, without a controller, that class.
            ROLL: ``MegatronTrainStrategy``. RLinf: a subclass of ``MegatronActor``.
        mode, settings: the mode, its `divisor` and `units`, as in `make_pg_loss_reducer`.

    Raises:
        ValueError, TypeError: a class with an aggregation, or of another engine; settings that are unusable.
        BadBatchError: on every rank, when a step is trained on: settings of the engine that are no token mean; a mode
            by prompt where prompts are not known; weights that differ within a sample for losses of sequences; a first
            step that gives a token another weight than was asked.
    """
    modes = LossModes.resolve(mode, **settings)
    packages = [one.__module__.partition(".")[0] for one in owner.__mro__]
    engine = next((_ENGINES[one] for one in packages if one in _ENGINES), None)
    if engine is None:
        raise ValueError(f"{owner!r}: it must be a class of {', '.join(_ENGINES)}. Pass it, or a subclass.")

    def step(stock: Callable[[], Any], given: dict[str, Any]) -> Any:
        if not engine.trains(given["self"]):
            return stock()
        batches: list[Batch] = []

        def describe() -> list[Samples]:
            for is_wrong, what, remedy in engine.wrong(given):
                if is_wrong:
                    raise ValueError(
                        f"{what} beside a loss aggregation: {engine.name} must train on the mean over the step's "
                        f"tokens. {remedy}."
                    )
            batches.extend(engine.batches(given))
            masks = [list(engine.masks(given, batch).float()) for batch in batches]
            return samples_of(modes, masks, [engine.prompts(given, batch) for batch in batches])

        tokens = None if engine.tokens is None else partial(engine.tokens, given)
        group, even, proof = engine.group(given), engine.of_samples(given), replaced.proof
        proves = proof is not None and not proof.is_over
        factors, _ = token_mean_factors(modes, describe, dp_group=group, even=even, tokens=tokens)
        with ExitStack() as stack:
            for batch, of_batch in zip(batches, factors, strict=True):
                plain = batch["advantages"]
                column = of_batch.to(plain.device).view_as(plain)
                ours = {"advantages": plain * column} | ({_FACTORS: column, _PLAIN: plain} if proves else {})
                stack.enter_context(_instead(batch, ours))
            if proves:
                proof.group_size = engine.group_size(given["self"])
                engine.tap(given)
            result = stock()
        if proves and not proof.outcome:
            proof.give_up("none of Megatron's schedules ran in the step.")
        return result

    further = [Function(owner, *one) for one in engine.further]
    replaced = Replaced(engine.name, engine.versions, [Function(owner, *engine.step, step), *further])
    if "megatron.core" in sys.modules:
        from megatron_rl_loss.audit.megatron.first_step import prove_engine

        never = f"{owner.__name__}.{engine.step[0]} called no policy loss, or was not called. Use {engine.versions}."
        words = {"beside": f"other terms keep {engine.name}'s token mean", "never": f"{engine.name}: {never}"}
        is_ours = partial(_trains_policy, owner, engine.trains)
        replaced.proof = prove_engine(modes.policy, f"{engine.name}'s policy loss", is_ours=is_ours, **words)
    else:
        announce(f"{engine.name}: NOT PROVED, Megatron-Core is not loaded")
    if hasattr(owner, "as_controller") and owner.__module__.partition(".")[0] in (*_ENGINES, "__main__"):
        owner.as_controller = _refuse_controller
    return replaced


def _refuse_controller(*_: Any, **__: Any) -> Any:
    raise ValueError(
        "a controller of a class of AReaL's own or of a main script: its workers import that class anew, without the "
        "aggregation. Put a subclass, and aggregate(...) of it, into a module that workers can import."
    )


def _trains_policy(owner: type, trains: Callable[[Any], bool]) -> bool:
    """True while a method of a policy's instance runs: a critic of the same process trains by methods of another."""
    frame = sys._getframe()
    while frame is not None:
        if isinstance(instance := frame.f_locals.get("self"), owner):
            return trains(instance)
        frame = frame.f_back  # type: ignore[assignment]
    return False


@contextmanager
def _instead(mapping: MutableMapping[str, Any], values: Mapping[str, Any]) -> Iterator[None]:
    """In a ``with``: other values."""
    before = {name: mapping[name] for name in values if name in mapping}
    for name, value in values.items():
        mapping[name] = value
    try:
        yield
    finally:
        for name in values:
            if name in before:
                mapping[name] = before[name]
            else:
                del mapping[name]


def _tapped(
    loss: Tensor,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    log_probs: Tensor,
    batch: Batch,
    advantages: Tensor,
    masks: Sequence[Tensor],
    prompts: Sequence[Any] | str,
    **more: Any,
) -> Tensor:
    """`tap_slopes` for a micro-batch whose log-probs all context-parallel ranks hold, one for each entry of a mask.

    What became of the `advantages` since they were weighed, until the loss function got them, counts as a weight.
    """
    factors, plain = (batch[name].to(log_probs.device) for name in (_FACTORS, _PLAIN))
    factors = factors * (advantages / (plain * factors)).nan_to_num(1.0)
    layout = Gathered([0, *accumulate(map(len, masks))])
    samples = Samples(masks, layout=layout, prompt_ids=None if isinstance(prompts, str) else [*map(str, prompts)])
    return tap_slopes(loss, loss_of, log_probs, factors, samples=samples, **more)


def _give_groups(stock: Callable[[], Any], given: dict[str, Any]) -> Any:
    """Number AReaL's trajectory groups, each generated from one item of the data, in a column that is cut as tokens."""
    (groups,), first = given["args"], given["self"].data_parallel_group.rank() << 32
    columns = [torch.full_like(one["input_ids"], first + i, dtype=torch.int64) for i, one in enumerate(groups)]
    given["args"] = ([{**one, _GROUPS: column} for one, column in zip(groups, columns, strict=True)],)
    return stock()


def _areal_prompts(given: Given, batch: Batch) -> Sequence[Any] | str:
    column = batch.get(_GROUPS)
    return "a step that did not come from ppo_update" if column is None else column[:, 0].tolist()


def _tap_areal(given: dict[str, Any]) -> None:
    stock, weigh, temperature = given["loss_fn"], given["loss_weight_fn"], given["self"].config.temperature

    def tapped(loss: Tensor, loss_of: Any, log_probs: Tensor, batch: Batch) -> Tensor:
        lengths = batch["cu_seqlens"].diff().tolist()
        prompts = [one[0].item() for one in batch[_GROUPS].split(lengths)] if _GROUPS in batch else ""
        masks = batch["loss_mask"].float().split(lengths)
        coef = batch.get("rl_loss_weight", 1.0) if "teacher_logp" in batch else None
        more = {"coef": coef, "temperature": temperature}
        return _tapped(loss, loss_of, log_probs, batch, batch["advantages"], masks, prompts, **more)

    def loss_fn(log_probs: Tensor, entropy: Tensor, batch: Batch, **more: Any) -> Tensor:
        def loss_of(leaf: Tensor, advantages: Tensor) -> Tensor:
            values = {"advantages": advantages, "logprobs": leaf.detach(), "prox_logp": leaf.detach()}
            with _instead(batch, values), ExitStack() as stack:
                for tracker in sys.modules["areal.utils.stats_tracker"].TRACKERS.values():
                    stats = defaultdict(list, {name: [*kept] for name, kept in tracker.stats.items()})
                    stack.enter_context(_instead(vars(tracker), {"stats": stats}))
                return stock(leaf, entropy, batch, **more)

        return tapped(stock(log_probs, entropy, batch, **more), loss_of, log_probs, batch)

    def loss_weight_fn(batch: Batch) -> Tensor:
        weight = weigh(batch)
        if is_observed() and not weight:  # AReaL does not call the loss function
            none = torch.zeros_like(batch["advantages"], requires_grad=True)
            tapped(none.sum(), lambda leaf, _: leaf.sum() * 0, none, batch)
        return weight

    given |= {"loss_fn": loss_fn, "loss_weight_fn": loss_weight_fn}


def _roll_masks(given: Given, batch: Batch) -> Any:
    """The mask whose tokens ROLL counts."""
    has_final = "final_response_mask" in given["batch"].meta_info["loss_mask_keys"] and "final_response_mask" in batch
    return batch["final_response_mask"] if has_final else batch["response_mask"][:, 1:]


def _roll_prompts(given: Given, batch: Batch) -> Sequence[Any] | str:
    others = given["batch"].non_tensor_batch
    if "traj_group_id" in others:
        return list(others["traj_group_id"])
    return MEDIA if "multi_modal_inputs" in others else prompts_of(batch["input_ids"], batch["prompt_mask"])


def _roll_trains(strategy: Any) -> bool:
    from roll.pipeline.base_worker import CriticWorker

    return not isinstance(strategy.worker, CriticWorker)


def _tap_roll(given: dict[str, Any]) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    stock, strategy = given["loss_func"], given["self"]
    config = strategy.worker.pipeline_config
    strategy.forward_backward_func = get_forward_backward_func()  # ROLL keeps one from before the proof

    def loss_func(data: Any, output: Tensor) -> tuple[Tensor, Any]:
        compute, seen = strategy.op_compute_log_probs, list[Tensor]()

        def see(*args: Any, **kwargs: Any) -> Tensor:
            seen.append(compute(*args, **kwargs))
            return seen[-1]

        with _instead(vars(strategy), {"op_compute_log_probs": see}):
            loss, metrics = stock(data, output)
        if not seen:
            return loss, metrics

        def loss_of(leaf: Tensor, advantages: Tensor) -> Tensor:
            old = leaf.detach()
            columns = {"advantages": advantages, "old_log_probs": old, "infer_logprobs": old}
            columns["train_infer_is_weight"] = torch.ones_like(old)
            now = {"op_compute_log_probs": lambda *_, **__: leaf}
            now["op_compute_entropy"] = lambda *_, **__: torch.zeros_like(leaf)  # ROLL's may change logits
            before = {"get_old_log_probs_with_cache": lambda *_, **__: old}
            with _instead(data.batch, columns), _instead(vars(strategy), now), _instead(vars(strategy.worker), before):
                loss_at_leaf: Tensor = stock(data, output)[0]
                return loss_at_leaf

        call = {"self": strategy, "batch": data}
        masks, prompts = list(_roll_masks(call, data.batch).float()), _roll_prompts(call, data.batch)
        temperature = None if config.entropy_loss_coef else 1.0  # an entropy's gradients arrive at logits too
        more = {"coef": getattr(config, "rl_loss_coef", None), "temperature": temperature}
        advantages = data.batch["advantages"]
        return _tapped(loss, loss_of, seen[0], data.batch, advantages, masks, prompts, **more), metrics

    given["loss_func"] = loss_func


def _roll_wrong(given: Given) -> Sequence[tuple[bool, str, str]]:
    config, scales = given["self"].worker.pipeline_config, given["self"].worker_config.apply_loss_scale
    mode, is_kimi = config.loss_agg_mode, getattr(config, "pg_variant", None) == "kimi15"
    weighs = any(getattr(config, f"{one}_loss_weight", None) for one in ("difficulty", "length"))
    return (
        (mode != "token-mean", f"loss_agg_mode={mode}", "Set loss_agg_mode: token-mean"),
        (not scales, "apply_loss_scale=False", "Set apply_loss_scale: true"),
        (is_kimi, "pg_variant=kimi15, whose loss is not proportional to the advantage,", "Set another pg_variant"),
        (weighs, "difficulty_loss_weight or length_loss_weight", "Leave them out"),
    )


def _rlinf_prompts(given: Given, batch: Batch) -> Sequence[Any] | str:
    before = batch["attention_mask"][:, : -given["self"].response_len]
    return MEDIA if "multi_modal_inputs" in batch else prompts_of(batch["input_ids"][:, : before.shape[1]], before)


def _rlinf_masks(given: Given, batch: Batch) -> Tensor:
    masks: Tensor = batch["response_mask"][:, -given["self"].response_len :]
    return masks


def _tap_rlinf(stock: Callable[[], Any], given: dict[str, Any]) -> Any:
    """RLinf's forward step, whose loss function calls `policy_loss` of its module."""
    theirs = stock()

    def forward_step(iterator: Iterator[Batch], model: Any) -> tuple[Any, Any]:
        batch = next(iterator)
        output, loss_func = theirs(iter([batch]), model)

        def observed(output: Any) -> Any:
            policy_loss = theirs.__globals__["policy_loss"]

            def tapped(**losses: Any) -> tuple[Tensor, Any]:
                def loss_of(leaf: Tensor, advantages: Tensor) -> Tensor:
                    values = {"logprobs": leaf, "old_logprobs": leaf.detach(), "advantages": advantages}
                    return policy_loss(**losses | values)[0]

                loss, metrics = policy_loss(**losses)
                masks, prompts = list(_rlinf_masks(given, batch).float()), _rlinf_prompts(given, batch)
                is_fixed = given["self"].cfg.algorithm.get("importance_sampling_fix", False)
                advantages = (batch if is_fixed else losses)["advantages"].to(loss.device)
                log_probs = losses["logprobs"]  # The model's output is a dict, no logits.
                return _tapped(loss, loss_of, log_probs, batch, advantages, masks, prompts, temperature=None), metrics

            with _instead(theirs.__globals__, {"policy_loss": tapped}):
                return loss_func(output)

        return output, observed if is_observed() else loss_func

    return forward_step


def _rlinf_wrong(given: Given) -> Sequence[tuple[bool, str, str]]:
    config, batch = given["self"].cfg.algorithm, given["batch"]
    is_pipeline = not isinstance(batch, Mapping)
    has_empty = not is_pipeline and not batch["response_mask"].any(-1).all()
    return (
        (config.loss_agg_func != "token-mean", f"loss_agg_func={config.loss_agg_func}", "Set token-mean"),
        (not config.use_valid_token_scale, "use_valid_token_scale=False", "Set it to True"),
        (is_pipeline, "the pipeline mode, whose tokens are not known before a step,", "Set another placement"),
        (has_empty, "a row without a token to train on, which may cost RLinf its micro-batch,", "Drop such rows"),
    )


def _megatron_group(given: Given) -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group()


_ENGINES = {
    "areal": _Engine(
        "AReaL", "1.0.4 or 4aef98d8", ("train_batch", ["input_", "loss_fn", "loss_weight_fn"]),
        wrong=lambda given: [
            (getattr(given["self"].config, "m2_threshold", None) is not None, "m2_threshold", "Leave one of them out")
        ],
        batches=lambda given: given["input_"] if isinstance(given["input_"], list) else [given["input_"]],
        masks=lambda given, batch: batch["loss_mask"],
        prompts=_areal_prompts,
        group=lambda given: given["self"].data_parallel_group,
        of_samples=lambda given: "Set importance_sampling_level=token"
        if getattr(given["self"].config, "importance_sampling_level", None) == "sequence" else "",
        tap=_tap_areal,
        further=[("ppo_update", ["args"], _give_groups)],
    ),
    "roll": _Engine(
        "ROLL", "8eb27cc2", ("train_step", ["batch", "loss_func"]),
        wrong=_roll_wrong,
        batches=lambda given: [given["batch"].batch],
        masks=_roll_masks,
        prompts=_roll_prompts,
        group=_megatron_group,
        tap=_tap_roll,
        trains=_roll_trains,
        group_size=lambda strategy: getattr(strategy.worker.pipeline_config, "num_return_sequences_in_group", None),
        of_samples=lambda given: "Set importance_sampling: token"
        if given["self"].worker.pipeline_config.importance_sampling == "seq" else "",
    ),
    "rlinf": _Engine(
        "RLinf", "a3816b59", ("training_step", ["batch"]),
        wrong=_rlinf_wrong,
        batches=lambda given: [given["batch"]],
        masks=_rlinf_masks,
        prompts=_rlinf_prompts,
        group=_megatron_group,
        group_size=lambda actor: actor.cfg.algorithm.group_size,
        further=[("get_forward_step_func", [], _tap_rlinf)],
        tokens=lambda given: float(given["self"].global_valid_token),  # of all the n_minibatches steps of a batch
    ),
}  # fmt: skip
