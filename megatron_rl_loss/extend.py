"""What an adapter of an engine needs beside the public names and `core/`. The adapters in `engines/` use nothing else.

An adapter of your own, in a repository of your own, imports from here and from `megatron_rl_loss`. `help(name)` tells
the rest. These names may change with a minor version; the public names may not.

How an engine calls the modes, and what it does with a returned loss:

- `register_names`: adds a table of names such as ``verl:token-mean``; `available_modes`, `find_mode`: the modes by name
- `ModeFunction`, `load_function`: a mode of the user's own, and one given as ``path.to.module.function``
- `UnitCounting`, `COUNTINGS`: which rollouts and prompts an engine counts
- `register_form`: adds a `Form`, a way to return a loss; its `Carrier` says who divides and multiplies afterwards, and
  `DDP_MEAN` is the carrier's entry for DDP's mean over ranks

A step, from the modes to the weights:

- `LossModes`: the modes of the policy loss and of other terms; `resolve` makes an `Aggregation` of a mode's name
- `count_step`: the denominators of a step over groups; `weigh`: the weights of an aggregation at the local tokens;
  `times_mask`: weights of your own beside the mask, checked and rounded once
- `make_plan`: the `Plan` of a step for a `Trainer`, which says how the trainer scales a loss; `groups_of`: the groups
  of a Megatron model
- `WeightedSum`: the reducer over weights; `Reducer`: the type of a function from losses to a share

What the first step observes, and its proof:

- `Tap`: the losses of one term of one micro-batch; `observed_taps`: all taps of the step that is being measured, or
  None, and `is_observed` asks for it; `taps_of`: the same, None also where no gradient will reach a value;
  `unobserved`: a ``with`` for a loss function that is tried and does not train; `part_of_loss`: notes a part of the
  loss that is measured, or that the engine aggregates, so that what somebody adds beside the parts is seen, and
  `MORE_TERMS` is how this is said
- `follow_log_probs`, `tap_output`: the way of a loss's gradient from log-probs to the model's output, which a gather
  over ranks multiplies
- `PlanUse`: what became of a plan; `Promises`: what an engine said of its step, for the proof to compare
- `MegatronFirstStep`, `run_schedules_by`: the proof around Megatron's schedules, and `chunks_of` what these take as a
  model; `proof_level`: the level that the user asked for; `not_proved`: the verdict on a step of which nothing can be
  known
- `any_flag_given`, `check_command_line`: the flags of this package on the launch's command line
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_rl_loss.core.aggregation import Aggregation, LossModes, register_names, resolve, times_mask, weigh
from megatron_rl_loss.core.carriers import DDP_MEAN, Carrier, Form, register_form
from megatron_rl_loss.core.counting import COUNTINGS, UnitCounting, count_step
from megatron_rl_loss.core.modes import ModeFunction, available_modes, find_mode, load_function
from megatron_rl_loss.core.plan import Plan, make_plan
from megatron_rl_loss.core.record import PlanUse, Trainer
from megatron_rl_loss.core.reducers import WeightedSum
from megatron_rl_loss.core.taps import Tap, is_observed, observed_taps, part_of_loss, taps_of, unobserved
from megatron_rl_loss.core.totals_by_hand import Reducer
from megatron_rl_loss.proof.findings import not_proved
from megatron_rl_loss.proof.log_prob_gradients import follow_log_probs, tap_output
from megatron_rl_loss.proof.loss_parts import MORE_TERMS
from megatron_rl_loss.proof.outcomes import proof_level
from megatron_rl_loss.proof.promises import Promises
from megatron_rl_loss.proof.schedules import chunks_of, run_schedules_by

if TYPE_CHECKING:
    from megatron_rl_loss.megatron.flags import any_flag_given, check_command_line
    from megatron_rl_loss.megatron.model_settings import groups_of
    from megatron_rl_loss.megatron.proving import MegatronFirstStep

#: Names whose files import Megatron, which not every engine has: they load when an adapter asks for them.
_MEGATRON_NAMES = {
    "MegatronFirstStep": "proving",
    "any_flag_given": "flags",
    "check_command_line": "flags",
    "groups_of": "model_settings",
}

__all__ = [
    "COUNTINGS",
    "DDP_MEAN",
    "MORE_TERMS",
    "Aggregation",
    "Carrier",
    "Form",
    "LossModes",
    "MegatronFirstStep",
    "ModeFunction",
    "Plan",
    "PlanUse",
    "Promises",
    "Reducer",
    "Tap",
    "Trainer",
    "UnitCounting",
    "WeightedSum",
    "any_flag_given",
    "available_modes",
    "check_command_line",
    "chunks_of",
    "count_step",
    "find_mode",
    "follow_log_probs",
    "groups_of",
    "is_observed",
    "load_function",
    "make_plan",
    "not_proved",
    "observed_taps",
    "part_of_loss",
    "proof_level",
    "register_form",
    "register_names",
    "resolve",
    "run_schedules_by",
    "tap_output",
    "taps_of",
    "times_mask",
    "unobserved",
    "weigh",
]


def __getattr__(name: str) -> Any:
    if name not in _MEGATRON_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"megatron_rl_loss.megatron.{_MEGATRON_NAMES[name]}"), name)
