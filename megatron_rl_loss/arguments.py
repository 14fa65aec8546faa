"""The ``--loss-aggregation`` flags and their validation: plain argparse and a Namespace, no Megatron needed."""

import difflib
import importlib
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from megatron_rl_loss.errors import explain
from megatron_rl_loss.names import resolve_name
from megatron_rl_loss.reducers import MODES, ReducerFactory, Units, check_divisor, check_mode, check_units

EmptyStep = Literal["warn", "error"]

_FLAGS = (
    "loss_aggregation",
    "loss_aggregation_divisor",
    "loss_aggregation_units",
    "loss_aggregation_empty_step",
    "loss_aggregation_with_per_token_loss",
    "custom_pg_loss_reducer_function_path",
)


@dataclass(frozen=True, kw_only=True)
class AggregationSettings:
    """What the flags ask for, validated. Another framework's name becomes its mode, divisor and unit counting.

    Attributes:
        mode: a mode's name, or the reducer factory that ``--custom-pg-loss-reducer-function-path`` names.
        divisor: L of ``constant`` in tokens, d of ``token_sum``, or None.
        units: count all units or only those with an active token; by default what a framework's name says, else all.
        empty_step: what a step without one active token is: a ``warn``-ing and zero gradients, or an ``error``.
        with_per_token_loss: the mode may run on a model whose config calculates per-token loss.
        notice: something the user should be told, or None.
    """

    mode: str | ReducerFactory = "sample_mean"
    divisor: float | None = None
    units: Units = None  # type: ignore[assignment]  # never None once made
    empty_step: EmptyStep = "warn"
    with_per_token_loss: bool = False
    notice: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.mode, str):
            named = resolve_name(self.mode, divisor=self.divisor, units=self.units)
            check_mode(named.mode, named.divisor)
            vars(self).update(vars(named) | {"notice": self.notice or named.notice})
        elif not callable(self.mode):
            given = f"loss aggregation {self.mode!r} ({type(self.mode).__name__})"
            raise TypeError(explain(given, "it must be a mode's name or a reducer factory", "Pass one of them"))
        elif self.divisor is not None:
            check_divisor(self.divisor)
        vars(self).update(units=self.units or "all")
        check_units(self.units)
        if self.empty_step not in get_args(EmptyStep):
            given = f"empty step handling {self.empty_step!r}"
            raise ValueError(explain(given, "there is no such handling", "Choose warn or error"))

    @property
    def uses_prompt_ids(self) -> bool:
        """Whether the mode groups samples by prompt (a user's own reducer may)."""
        return self.mode == "prompt_mean" or self.mode not in MODES

    def describe(self) -> str:
        """One line for the log."""
        name = self.mode if isinstance(self.mode, str) else _name_of(self.mode)
        divisor = "" if self.divisor is None else f", divisor {self.divisor:g}"
        return f"loss aggregation: {name}{divisor}, units: {self.units}"


def _name_of(factory: ReducerFactory) -> str:
    name = getattr(factory, "__qualname__", None)
    return repr(factory) if name is None else f"{factory.__module__}.{name}"


def add_loss_aggregation_args(parser: ArgumentParser) -> ArgumentParser:
    """Add the flags to a parser and return it: an ``extra_args_provider`` for Megatron, to be chained with others."""
    group = parser.add_argument_group("policy-gradient loss aggregation (megatron_rl_loss)")
    group.add_argument(
        "--loss-aggregation",
        metavar="MODE",
        default=None,
        help=f"How per-token losses become the step's loss: {', '.join(MODES)}, a registered name or another "
        "framework's (verl:token-mean; python -m megatron_rl_loss modes lists them). "
        "Default: sample_mean, or token_mean with --calculate-per-token-loss.",
    )
    group.add_argument(
        "--loss-aggregation-divisor",
        metavar="TOKENS",
        type=float,
        default=None,
        help="L of --loss-aggregation constant, sum / (L * number of rollouts): e.g. the generation budget. "
        "Or d of token_sum, sum / d (default 1).",
    )
    group.add_argument(
        "--loss-aggregation-units",
        choices=get_args(Units),
        default=None,
        help="Count every rollout or prompt group (the default), or only those with a token of nonzero weight.",
    )
    group.add_argument(
        "--loss-aggregation-empty-step",
        choices=get_args(EmptyStep),
        default="warn",
        help="A step without one active token: warn and go on with zero gradients, or stop with an error.",
    )
    group.add_argument(
        "--loss-aggregation-with-per-token-loss",
        action="store_true",
        help="Keep the mode exact on a model that forces --calculate-per-token-loss.",
    )
    group.add_argument(
        "--custom-pg-loss-reducer-function-path",
        metavar="PATH",
        default=None,
        help="pkg.mod.fn or pkg.mod:fn of a reducer factory: fn(ReducerInputs) -> reducer.",
    )
    return parser


def validate_loss_aggregation_args(args: Namespace) -> AggregationSettings:
    """The settings that parsed and Megatron-validated `args` ask for; `args` is not changed.

    Call it after Megatron's own validation (`parse_and_validate_args`) and before the model's config is made.

    Raises:
        ValueError, TypeError: flags that are missing from `args`, unknown, unusable or contradictory, or combined with
            a Megatron setting under which the loss would not be exact; the text says which, and the way out.
    """
    _check_present(args)
    per_token = bool(getattr(args, "calculate_per_token_loss", False))
    check_parallel_settings(args, per_token)
    mode: str | ReducerFactory | None = args.loss_aggregation
    path = args.custom_pg_loss_reducer_function_path
    notice = None
    if path is not None:
        if mode not in (None, "sample_mean"):
            given = f"--custom-pg-loss-reducer-function-path {path} with --loss-aggregation {mode}"
            raise ValueError(explain(given, "only one can make the loss", "Drop one of them"))
        mode = load_reducer_factory(path)
    elif mode is None and per_token:
        mode = "token_mean"
        notice = "--calculate-per-token-loss without --loss-aggregation: aggregating by token_mean."
    elif mode is None:
        mode = "sample_mean"
    settings = AggregationSettings(
        mode=mode,
        divisor=args.loss_aggregation_divisor,
        units=args.loss_aggregation_units,
        empty_step=args.loss_aggregation_empty_step,
        with_per_token_loss=args.loss_aggregation_with_per_token_loss,
        notice=notice,
    )
    check_per_token(settings, per_token)
    return settings


def check_per_token(settings: AggregationSettings, per_token: bool) -> None:
    """Refuse a mode other than token_mean on a model that calculates per-token loss, unless it was opted in."""
    if per_token and settings.mode != "token_mean" and not settings.with_per_token_loss:
        given = f"--calculate-per-token-loss with {settings.describe()}"
        rule = "the flag alone means token_mean, and beside another mode one of the two is a mistake"
        remedy = "Drop one; if the model forces per-token loss, add --loss-aggregation-with-per-token-loss"
        raise ValueError(explain(given, rule, f"{remedy}, which keeps the mode exact"))


def check_parallel_settings(settings: Any, per_token: bool) -> None:
    """Refuse Megatron settings (of a Namespace or a model config) under which the loss would not be exact."""

    def is_set(*names: str) -> str | None:
        return next((name for name in names if getattr(settings, name, False)), None)

    if name := is_set("hybrid_context_parallel", "dynamic_context_parallel"):
        rule = "the context-parallel group changes from micro-batch to micro-batch, which is not supported"
        raise ValueError(explain(f"--{name.replace('_', '-')}", rule, "Use a fixed --context-parallel-size"))
    if (
        max(
            getattr(settings, "gtp_weight_remat_size", 1) or 1,
            getattr(settings, "expert_gtp_weight_remat_size", 1) or 1,
        )
        > 1
    ):
        rule = "its ranks hold further data-parallel shares, and how their gradients are scaled was not tested"
        raise ValueError(explain("weight-rematerialising tensor parallelism (GTP)", rule, "Turn it off"))
    if getattr(settings, "cuda_graph_impl", None) == "full_iteration":
        rule = "a captured iteration cannot look ahead at its step's samples"
        raise ValueError(explain("--cuda-graph-impl full_iteration", rule, "Choose another --cuda-graph-impl"))
    if per_token and is_set("use_torch_fsdp2"):
        rule = "Torch FSDP2 never divides gradients by the token count, so they would be too large by it"
        raise ValueError(explain("per-token loss with --use-torch-fsdp2", rule, "Drop --calculate-per-token-loss"))
    if per_token and is_set("ddp_average_in_collective"):
        rule = "gradients must be summed, not averaged, to be divided by the token count"
        remedy = "Drop --ddp-average-in-collective or --calculate-per-token-loss"
        raise ValueError(explain("per-token loss with --ddp-average-in-collective", rule, remedy))


def load_reducer_factory(path: str) -> ReducerFactory:
    """The function at ``pkg.mod.fn`` or ``pkg.mod:fn``. Raises ValueError or TypeError if there is none."""
    given = f"--custom-pg-loss-reducer-function-path {path!r}"
    if not isinstance(path, str):
        raise TypeError(explain(given, "it must be a string", "Write pkg.mod.fn or pkg.mod:fn"))
    module_name, separator, name = path.partition(":") if ":" in path else path.rpartition(".")
    if module_name.startswith(".") or not separator or not module_name or not name:
        raise ValueError(explain(given, "it must name a module and a function", "Write pkg.mod.fn or pkg.mod:fn"))
    try:
        factory = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        remedy = "Check the spelling, and that the module's folder is on PYTHONPATH"
        raise ValueError(explain(given, f"it does not load ({error})", remedy)) from error
    if not callable(factory):
        rule = f"it is a {type(factory).__name__}, not a function of ReducerInputs"
        raise TypeError(explain(given, rule, "Name a reducer factory"))
    return factory


def check_command_line(args: Namespace, argv: Sequence[str]) -> None:
    """Refuse options on the command line that are one of the flags misspelt.

    Megatron's ``ignore_unknown_args=True`` lets them pass, and the run would go on with another mode.
    """
    flags = [f"--{name.replace('_', '-')}" for name in _FLAGS]
    for option in (word.split("=", 1)[0] for word in argv if word.startswith("--")):
        known = option in flags or hasattr(args, option.removeprefix("--").replace("-", "_"))
        meant = [] if known else difflib.get_close_matches(option, flags, n=1, cutoff=0.85)
        if meant:
            rule = "there is no such flag, and it was ignored"
            raise ValueError(explain(f"{option} on the command line", rule, f"Write {meant[0]}"))


def _check_present(args: Namespace) -> None:
    missing = [name for name in _FLAGS if not hasattr(args, name)]
    if not missing:
        return
    given = f"args without {', '.join(missing)}"
    if getattr(args, "yaml_cfg", None) is not None:
        rule = "--yaml-cfg replaces all parsed flags by what the file holds, so the aggregation would be silently lost"
        raise ValueError(explain(given, rule, "Add these keys to the YAML file, or launch without --yaml-cfg"))
    remedy = "Pass add_loss_aggregation_args as (or from) Megatron's extra_args_provider"
    raise ValueError(explain(given, "the flags were never registered", remedy))
