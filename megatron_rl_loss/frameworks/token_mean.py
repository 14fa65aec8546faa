"""AReaL, ROLL and RLinf, which train on the token mean of an optimizer step: any mode, by a worker of your own.

    from areal.engine import MegatronPPOActor  # or FSDPPPOActor
    from megatron_rl_loss.frameworks.token_mean import aggregate

    class Actor(MegatronPPOActor):  # in a module that AReaL's workers can import
        pass

    aggregate(Actor, "prompt_mean")

Each token's advantage is multiplied by its weight in the mode * T during the engine's step method, where T is the
engine's divisor. Losses must be proportional to the advantage; other terms stay token means. Imports no engine.
Source: areal 4aef98d8, engine/megatron_engine.py, trainer/ppo/actor.py; ROLL 8eb27cc2, distributed/strategy/
megatron_strategy.py, utils/functionals.py; RLinf a3816b59, workers/megatron_worker.py, workers/actor.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl_loss.frameworks import token_mean_taps as taps
from megatron_rl_loss.frameworks.columns import MEDIA, prompts_of, samples_of, token_mean_factors
from megatron_rl_loss.frameworks.replacing import Function, Replaced, prove
from megatron_rl_loss.frameworks.token_mean_taps import Batch, Given, Places
from megatron_rl_loss.modes.loss_modes import LossModes
from megatron_rl_loss.modes.table import Mode, ModeFunction
from megatron_rl_loss.step.samples import Samples

__all__ = ["aggregate"]


class _Engine(NamedTuple):
    """An engine whose batches are padded rows with "advantages".

    Attributes:
        step: the name of its step method, called once per optimizer step, and parameters that it must have.
        wrong: conditions that break the token mean, each with words for the error and a remedy.
        batches: this rank's, of a call of the step method.
        masks: a batch's, in the shape of its advantages.
        prompts: an id for each row of a batch, or the reason why prompts are unknown.
        group: the data-parallel group.
        of_samples: the remedy for a loss that averages within each sample, else empty.
        tap: the replacements, during a call of the step method, that put `tap_slopes` into the loss.
        unproved: the reason why a call cannot be proved, else empty.
        group_size: the number of rows to generate for a prompt, if known.
        trains: True if an instance of the class trains a policy.
        tokens: its divisor, if that is not the number of the step's active tokens.
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
    tap: Callable[[Given, Any], Places]
    unproved: Callable[[Given], str] = lambda given: ""
    group_size: Callable[[Any], int | None] = lambda owner: None
    trains: Callable[[Any], bool] = lambda owner: True
    of_samples: Callable[[Given], str] = lambda given: ""
    tokens: Callable[[Given], float] | None = None
    further: Sequence[tuple[str, Sequence[str], Callable[[Callable[[], Any], dict[str, Any]], Any]]] = ()


def aggregate(owner: Any, mode: str | Mode | ModeFunction, **settings: Any) -> Replaced:
    """Make workers of that class train on the mode.

    Args:
        owner: AReaL: a subclass of ``MegatronPPOActor`` or ``FSDPPPOActor``, or, without a controller, that class.
            ROLL: ``MegatronTrainStrategy``. RLinf: a subclass of ``MegatronActor``.
        mode, settings: the mode, its `divisor` and `units`, as in `make_pg_loss_reducer`.

    Raises:
        ValueError, TypeError: a class that has an aggregation, or of another engine; unusable settings.
        BadBatchError: on every rank, in a step: settings of the engine that break the token mean; a mode by prompt
            where prompts are unknown; weights that differ within a sample for losses of sequences; a first step in
            which a token has a weight that the mode does not ask for.
    """
    modes = LossModes.resolve(mode, **settings)
    packages = [one.__module__.partition(".")[0] for one in owner.__mro__]
    engine = next((_ENGINES[one] for one in packages if one in _ENGINES), None)
    if engine is None:
        raise ValueError(f"{owner!r}: it must be a class of {', '.join(_ENGINES)}. Pass one, or a subclass.")

    def step(stock: Callable[[], Any], given: dict[str, Any]) -> Any:
        if not engine.trains(given["self"]):
            return stock()
        batches: list[Batch] = []

        def describe() -> list[Samples]:
            for is_wrong, what, remedy in engine.wrong(given):
                if is_wrong:
                    raise ValueError(
                        f"{what} with a loss aggregation: {engine.name} must train on the mean over the step's "
                        f"tokens. {remedy}."
                    )
            batches.extend(engine.batches(given))
            masks = [list(engine.masks(given, batch).float()) for batch in batches]
            return samples_of(modes, masks, [engine.prompts(given, batch) for batch in batches])

        tokens = None if engine.tokens is None else partial(engine.tokens, given)
        group, even, proof = engine.group(given), engine.of_samples(given), replaced.proof
        factors, _ = token_mean_factors(modes, describe, dp_group=group, even=even, tokens=tokens)
        proves = proof is not None and not proof.is_over
        if proves:
            proof.group_size = engine.group_size(given["self"])
            if why := engine.unproved(given):
                proof.give_up(why)
                proves = False
        with ExitStack() as stack:
            for batch, of_batch in zip(batches, factors, strict=True):
                plain = batch["advantages"]
                column = of_batch.to(plain.device).view_as(plain)
                ours = {"advantages": plain * column} | ({taps.FACTORS: column, taps.PLAIN: plain} if proves else {})
                stack.enter_context(taps.instead(batch, ours))
            if proves:
                stack.enter_context(taps.instead(*engine.tap(given, engine)))
            else:
                for batch in batches:
                    batch.pop(taps.GROUPS, None)
            result = stock()
        if proves and not proof.outcome:
            proof.give_up("no schedule of Megatron ran in the step.")
        return result

    further = [Function(owner, *one) for one in engine.further]
    replaced = Replaced(engine.name, engine.versions, [Function(owner, *engine.step, step), *further])
    where = f"{owner.__name__}.{engine.step[0]}"
    never = f"{where} called no policy loss, or was not called. Use {engine.name} {engine.versions}."
    beside, is_ours = f"other terms keep {engine.name}'s token mean", partial(taps.is_running, owner, engine.trains)
    replaced.proof = prove(engine.name, modes.policy, beside=beside, never=never, is_ours=is_ours)
    if hasattr(owner, "as_controller") and owner.__module__.partition(".")[0] in (*_ENGINES, "__main__"):
        owner.as_controller = _refuse_controller
    return replaced


def _refuse_controller(*_: Any, **__: Any) -> Any:
    raise ValueError(
        "a controller of a class of AReaL's own or of a main script: workers import that class anew, without the "
        "aggregation. Put a subclass, and its aggregate(...) call, into a module that workers can import."
    )


def _give_groups(stock: Callable[[], Any], given: dict[str, Any]) -> Any:
    """Number AReaL's trajectory groups, each generated from one item of the data, in a column that is cut as tokens."""
    (groups,), first = given["args"], given["self"].data_parallel_group.rank() << 32
    columns = [torch.full_like(one["input_ids"], first + i, dtype=torch.int64) for i, one in enumerate(groups)]
    given["args"] = ([{**one, taps.GROUPS: column} for one, column in zip(groups, columns, strict=True)],)
    return stock()


def _areal_prompts(given: Given, batch: Batch) -> Sequence[Any] | str:
    column = batch.get(taps.GROUPS)
    return "a step outside of ppo_update: ppo_update numbers the groups" if column is None else column[:, 0].tolist()


def _areal_unproved(given: Given) -> str:
    engine = given["self"]
    is_known = isinstance(getattr(engine, "model", None), list) and not engine.enable_tree_training
    return "" if is_known else "only AReaL's Megatron engine, without tree training, is measured."


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
    from roll.pipeline.base_worker import CriticWorker  # type: ignore[import-not-found]

    return not isinstance(strategy.worker, CriticWorker)


def _roll_wrong(given: Given) -> Sequence[tuple[bool, str, str]]:
    config, scales = given["self"].worker.pipeline_config, given["self"].worker_config.apply_loss_scale
    mode, is_kimi = config.loss_agg_mode, getattr(config, "pg_variant", None) == "kimi15"
    weighs = any(getattr(config, f"{one}_loss_weight", None) for one in ("difficulty", "length"))
    return (
        (mode != "token-mean", f"loss_agg_mode={mode}", "Set loss_agg_mode: token-mean"),
        (not scales, "apply_loss_scale=False", "Set apply_loss_scale: true"),
        (is_kimi, "pg_variant=kimi15 (not proportional to the advantage)", "Set another pg_variant"),
        (weighs, "difficulty_loss_weight or length_loss_weight", "Remove them"),
    )


def _rlinf_prompts(given: Given, batch: Batch) -> Sequence[Any] | str:
    before = batch["attention_mask"][:, : -given["self"].response_len]
    return MEDIA if "multi_modal_inputs" in batch else prompts_of(batch["input_ids"][:, : before.shape[1]], before)


def _rlinf_masks(given: Given, batch: Batch) -> Tensor:
    masks: Tensor = batch["response_mask"][:, -given["self"].response_len :]
    return masks


def _rlinf_wrong(given: Given) -> Sequence[tuple[bool, str, str]]:
    config, batch = given["self"].cfg.algorithm, given["batch"]
    is_pipeline = not isinstance(batch, Mapping)
    has_empty = not is_pipeline and not batch["response_mask"].any(-1).all()
    return (
        (config.loss_agg_func != "token-mean", f"loss_agg_func={config.loss_agg_func}", "Set loss_agg_func=token-mean"),
        (not config.use_valid_token_scale, "use_valid_token_scale=False", "Set use_valid_token_scale=True"),
        (is_pipeline, "the pipeline mode (tokens unknown before a step)", "Choose another placement"),
        (has_empty, "a row without a token to train on (RLinf may skip its micro-batch)", "Drop such rows"),
    )


def _megatron_group(given: Given) -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group()


_ENGINES = {
    "areal": _Engine(
        "AReaL", "1.0.4 or 4aef98d8", ("train_batch", ["input_", "loss_fn", "loss_weight_fn"]),
        wrong=lambda given: [
            (getattr(given["self"].config, "m2_threshold", None) is not None, "m2_threshold", "Remove m2_threshold")
        ],
        batches=lambda given: given["input_"] if isinstance(given["input_"], list) else [given["input_"]],
        masks=lambda given, batch: batch["loss_mask"],
        prompts=_areal_prompts,
        group=lambda given: given["self"].data_parallel_group,
        of_samples=lambda given: "Set importance_sampling_level=token"
        if getattr(given["self"].config, "importance_sampling_level", None) == "sequence" else "",
        tap=taps.tap_areal,
        unproved=_areal_unproved,
        further=[("ppo_update", ["args"], _give_groups)],
    ),
    "roll": _Engine(
        "ROLL", "8eb27cc2", ("train_step", ["batch", "loss_func"]),
        wrong=_roll_wrong,
        batches=lambda given: [given["batch"].batch],
        masks=_roll_masks,
        prompts=_roll_prompts,
        group=_megatron_group,
        tap=taps.tap_roll,
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
        tap=taps.tap_rlinf,
        tokens=lambda given: float(given["self"].global_valid_token),  # of all the n_minibatches steps of a batch
    ),
}  # fmt: skip
