"""AReaL: any mode for its PPO, GRPO, GSPO and SAPO losses, by an actor of your own.

    from areal.engine import MegatronPPOActor  # or FSDPPPOActor
    from megatron_rl_loss.frameworks.areal import aggregate

    class Actor(MegatronPPOActor):  # in a module that AReaL's workers can import
        pass

    aggregate(Actor, "prompt_mean")

AReaL trains on the mean over the T tokens of an optimizer step; its losses are proportional to the advantage. So each
token's advantage is multiplied by its weight in the mode * T. Imports no AReaL.
Source: areal 4aef98d8, trainer/ppo/actor.py (_ppo_update, grpo_loss_fn), engine/megatron_engine.py (train_batch).
"""

import functools
from typing import Any

from megatron_rl_loss.frameworks.columns import check_text, mark, prompts_of, token_mean_factors
from megatron_rl_loss.modes.loss_modes import LossModes
from megatron_rl_loss.modes.table import Mode, ModeFunction
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.units import UnitCounting

__all__ = ["aggregate"]


def aggregate(
    actor_class: Any,
    mode: str | Mode | ModeFunction,
    *,
    divisor: float | None = None,
    units: UnitCounting | None = None,
) -> None:
    """From now on actors of that class train on the mode.

    Args:
        actor_class: a subclass of ``MegatronPPOActor`` or ``FSDPPPOActor``; its `train_batch` is replaced. Without a
            controller (AReaL's SPMD launchers) that class itself will do.
        mode, divisor, units: as in `make_pg_loss_reducer`. Prompts are told apart by their tokens.

    Raises:
        ValueError, TypeError: an actor with an aggregation; settings that are unusable; a controller of a class that
            workers import from AReaL or from a main script, where nothing is aggregated.
        BadBatchError: on every rank, when a step is trained on: ``m2_threshold``; a mode by prompt with images; weights
            that differ within a sample for losses of sequences.
    """
    modes = LossModes.resolve(mode, divisor=divisor, units=units)
    train_batch = actor_class.train_batch

    def as_controller(*_: Any, **__: Any) -> Any:
        raise ValueError(
            f"a controller of {actor_class.__module__}.{actor_class.__name__}: its workers import that class anew, "
            "without the aggregation. Put a subclass, and aggregate(...) of it, into a module that workers can import."
        )

    @functools.wraps(train_batch)
    def with_factors(self: Any, input_: Any, *args: Any, **kwargs: Any) -> Any:
        batches = input_ if isinstance(input_, list) else [input_]

        def describe() -> list[Samples]:
            if getattr(self.config, "m2_threshold", None) is not None:
                raise ValueError(
                    "m2_threshold beside a loss aggregation: AReaL then divides by the tokens that it keeps, which are "
                    "known in the training forward alone. Leave one of them out."
                )
            described = []
            for batch in batches:  # a mask is that of the label, which is the next token
                trained = batch["loss_mask"].roll(1, -1).bool().tolist()
                prompts = prompts_of(batch["input_ids"].tolist(), trained)
                described.append(Samples(list(batch["loss_mask"].float()), prompt_ids=prompts))
            check_text(modes, described, any("multi_modal_input" in batch for batch in batches))
            return described

        of_sequences = getattr(self.config, "importance_sampling_level", "token") == "sequence"
        even = "Set importance_sampling_level=token" if of_sequences else ""
        factors, _ = token_mean_factors(modes, describe, dp_group=self.data_parallel_group, even=even)
        weighted = [
            {
                **batch,
                "advantages": batch["advantages"] * of_batch.to(batch["loss_mask"].device).view_as(batch["loss_mask"]),
            }
            for batch, of_batch in zip(batches, factors, strict=True)
        ]
        return train_batch(self, weighted if isinstance(input_, list) else weighted[0], *args, **kwargs)

    mark(with_factors, train_batch)
    if actor_class.__module__.partition(".")[0] in ("areal", "__main__"):
        actor_class.as_controller = as_controller
    actor_class.train_batch = with_factors
