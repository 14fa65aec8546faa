"""The ``--loss-aggregation`` flags, their validation, and the Megatron settings that are rejected."""

import difflib
import functools
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn, get_args

from megatron_rl_loss.core.aggregation import LossModes
from megatron_rl_loss.core.collectives import attempt
from megatron_rl_loss.core.counting import COUNTINGS, UnitCounting
from megatron_rl_loss.core.errors import check_choice, check_int
from megatron_rl_loss.core.modes import Mode, ModeFunction, available_modes, load_function, token_mean
from megatron_rl_loss.core.plan import EmptyStep
from megatron_rl_loss.proof.outcomes import ProofLevel, proof_level

#: Loss terms whose mode has a flag.
_TERMS = ("kl", "entropy", "value")
#: Sizes of weight-rematerialising TP (GTP).
REMAT_SIZES = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")
#: Settings under which the context-parallel group changes between micro-batches.
CHANGING_CP = ("hybrid_context_parallel", "dynamic_context_parallel")


@dataclass(frozen=True, kw_only=True)
class AggregationSettings:
    """Validated settings of a launch; `resolve` makes them.

    Each field but `modes` has a flag of its name; its metadata are the arguments of argparse.

    Attributes:
        modes: modes of the policy loss and of terms without a mode of their own; names of other frameworks are
            translated.
        empty_step: as in `plan_step`.
        with_per_token_loss: allow any mode on a model whose config calculates per-token loss.
        audit_interval: number of steps from one measured step to the next; None to measure none.
        proof: reaction to wrong weights in the first training step: ``strict``, ``error``, ``warn``, or ``off`` for no
            measurement.
            The default is the environment's ``MEGATRON_RL_LOSS_PROOF``, else ``error``.
    """

    modes: LossModes
    empty_step: EmptyStep = field(
        default="warn",
        metadata={
            "choices": get_args(EmptyStep),
            "help": "Reaction to a step without an active token: warn and train on with zero gradients (the default), "
            "or raise an error on all ranks.",
        },
    )
    with_per_token_loss: bool = field(
        default=False,
        metadata={
            "action": "store_true",
            "help": "Allow a mode other than token_mean with --calculate-per-token-loss, which some models force.",
        },
    )
    audit_interval: int | None = field(
        default=None,
        metadata={
            "metavar": "STEPS",
            "type": int,
            "help": "Measure the weight of each token in every STEPS-th step, the first included, and log the largest "
            "relative error as loss_aggregation_deviation. Default: never.",
        },
    )
    proof: ProofLevel = field(
        default=None,  # type: ignore[arg-type]  # then the environment's
        metadata={
            "choices": get_args(ProofLevel),
            "help": "The first training step is measured. If a token has a wrong weight, abort all ranks before the "
            "optimizer step (error; strict also where single parameters are reduced differently) or print a report "
            "(warn); off measures nothing. Default: MEGATRON_RL_LOSS_PROOF, or error.",
        },
    )

    def __post_init__(self) -> None:
        check_choice("empty step handling", self.empty_step, get_args(EmptyStep))
        if self.audit_interval is not None:
            remedy = "Give a number such as 100, or drop the flag to audit no step"
            check_int("--loss-aggregation-audit-interval", self.audit_interval, 1, remedy)
        object.__setattr__(self, "proof", proof_level(self.proof))

    @classmethod
    def resolve(
        cls,
        mode: str | Mode | ModeFunction = "sample_mean",
        divisor: float | None = None,
        units: UnitCounting | None = None,
        *,
        terms: Mapping[str, str | None] | None = None,
        **settings: Any,
    ) -> "AggregationSettings":
        """Validate a mode, its name (also another framework's) or its function; `settings` are the other fields.

        Raises as `make_pg_loss_reducer`, and ValueError or TypeError for settings that are unknown or unusable.
        """
        return cls(modes=LossModes.resolve(mode, divisor=divisor, units=units, terms=terms), **settings)


#: By the name of its flag in a Namespace, each field that has one.
_FIELDS = {f"loss_aggregation_{row.name}": row for row in fields(AggregationSettings) if row.metadata}


def _flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


#: The flag of a file that holds the others, by its name in a Namespace.
_CONFIG = "loss_aggregation_config"


def _add_flags(add: Callable[..., Action]) -> None:
    add(
        "--loss-aggregation",
        metavar="MODE",
        help=f"Mode that averages per-token losses into the step loss: {', '.join(available_modes())}, or another "
        "framework's name such as verl:token-mean (list: python -m megatron_rl_loss modes --all). "
        "Default: sample_mean, or token_mean with --calculate-per-token-loss.",
    )
    add(
        "--loss-aggregation-divisor",
        metavar="TOKENS",
        type=float,
        help="Divisor of two modes. constant: L in sum / (L * number of rollouts), for example the generation budget. "
        "token_sum: d in sum / d (default 1).",
    )
    add(
        "--loss-aggregation-units",
        choices=list(COUNTINGS),
        help="Rollouts or prompt groups that a mean counts. "
        + "; ".join(f"{row.name}: {row.units}" for row in COUNTINGS.values())
        + f". Default: {next(iter(COUNTINGS))}.",
    )
    for name, row in _FIELDS.items():
        add(_flag_of(name), default=row.default, **row.metadata)
    add(
        "--custom-pg-loss-reducer-function-path",
        metavar="PATH",
        help="Mode of your own, pkg.mod.fn or pkg.mod:fn: a function that takes ModeInputs and returns a weight for "
        "each sample or token. Masked tokens always weigh 0.",
    )
    for name in _TERMS:
        add(
            f"--{name}-loss-aggregation",
            metavar="MODE",
            help=f"Mode of the loss term named {name!r}. Default: the mode of the policy loss.",
        )


def add_loss_aggregation_args(parser: ArgumentParser) -> ArgumentParser:
    """Add the flags to a parser and return it. Pass this function to Megatron as ``extra_args_provider``.

    The parser validates their values when it parses: raises as `AggregationSettings.resolve`.
    """
    group = parser.add_argument_group("policy-gradient loss aggregation (megatron_rl_loss)")
    _add_flags(group.add_argument)
    group.add_argument(
        _flag_of(_CONFIG),
        metavar="FILE",
        help="YAML file with any of these flags, such as loss_aggregation: prompt_mean. Flags must not contradict it.",
    )
    parse_known_args = parser.parse_known_args

    @functools.wraps(parse_known_args)
    def parse_and_validate(args: Sequence[str] | None = None, namespace: Namespace | None = None) -> Any:
        namespace = Namespace() if namespace is None else namespace
        names = [name for name in _DEFAULTS if not hasattr(namespace, name)]
        for name in names:
            setattr(namespace, name, _NOT_GIVEN)  # argparse leaves it there, unless the flag is given
        parsed, rest = parse_known_args(args, namespace)
        check_command_line(parsed, rest)
        _complete(parsed, [name for name in names if getattr(parsed, name) is _NOT_GIVEN], parser)
        if _has_flags(parsed) and parsed.custom_pg_loss_reducer_function_path is None:
            _settings_of(parsed, parsed.loss_aggregation)  # an error now stands below no log of Megatron's
        return parsed, rest

    parser.parse_known_args = parse_and_validate  # type: ignore[method-assign,assignment]  # which parse_args calls
    return parser


_NOT_GIVEN = object()


def _complete(args: Namespace, missing: Sequence[str], parser: ArgumentParser) -> None:
    """Set the flags that are missing: as their file says, or else to their defaults.

    Raises as `_read_file`, and ValueError where a flag that is given contradicts the file.
    """
    for name in missing:
        delattr(args, name)
        if (default := parser.get_default(name)) is not SUPPRESS:
            setattr(args, name, default)
    path = getattr(args, _CONFIG, None)
    for name, value in ({} if path is None else _read_file(path)).items():
        if name not in missing and (stated := getattr(args, name)) != value:
            raise ValueError(
                f"{_flag_of(name)} {stated} with {name}: {value} in {path}: the flags must not contradict the file of "
                f"{_flag_of(_CONFIG)}. Drop one of the two."
            )
        setattr(args, name, value)


class _ParserOfFile(ArgumentParser):
    """The flags alone; its Namespace has only those that are given, and its errors are ValueErrors."""

    def __init__(self, source: str) -> None:
        super().__init__(prog=source, add_help=False)
        self.source = source
        _add_flags(self.add_argument)
        for action in self._actions:
            action.default = SUPPRESS

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.source}: {message}. Write the values as the flags take them.")


def _read_file(path: str) -> dict[str, Any]:
    """The flags that a YAML file gives, a flag without a value as a bool.

    Raises ImportError without PyYAML, and ValueError for an unusable file.
    """
    source = f"{_flag_of(_CONFIG)} {path}"
    try:
        import yaml
    except ImportError:
        raise ImportError(
            f"{source}: the file needs PyYAML, which is not installed. Run pip install pyyaml, or write flags."
        ) from None
    try:
        text = Path(path).read_text(encoding="utf-8")
        # Scalars stay the texts that stand there: YAML would read `off` as false.
        fields, lines = yaml.load(text, Loader=yaml.BaseLoader), yaml.compose(text, Loader=yaml.BaseLoader)
    except OSError as error:
        raise ValueError(f"{source}: the file cannot be read ({error.strerror}). Give the path of a file.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        said = " ".join(f"{error}".split())
        raise ValueError(f"{source}: the file is no YAML ({said}). Write such as loss_aggregation: constant.") from None
    if not isinstance(fields, dict):
        raise ValueError(
            f"{source}: the file must hold names and values. Write lines such as loss_aggregation: constant."
        )
    names = [key.value for key, _ in lines.value]
    if twice := [name for name in fields if names.count(name) > 1]:
        raise ValueError(f"{source}: {twice[0]} has several lines: a field must have one. Drop the others.")
    parser, words, values = _ParserOfFile(source), list[str](), dict[str, Any]()
    known = {action.dest: action for action in parser._actions}
    for name, value in fields.items():
        check_choice(f"field of {path}", name, known)
        if not isinstance(value, str) or not value:
            raise ValueError(
                f"{source}: {name} is {value!r}: it must be one value. Write {name}: VALUE, or drop the line."
            )
        if known[name].nargs == 0:  # a flag without a value
            check_choice(f"{name} of {path}", value.lower(), ("true", "false"))
            values[name] = value.lower() == "true"
        else:
            words.append(f"{_flag_of(name)}={value}")
    return values | vars(parser.parse_args(words))


def _settings_of(args: Namespace, mode: str | Mode | ModeFunction | None) -> "AggregationSettings":
    per_token = bool(getattr(args, "calculate_per_token_loss", False))
    return AggregationSettings.resolve(
        ("token_mean" if per_token else "sample_mean") if mode is None else mode,
        args.loss_aggregation_divisor,
        args.loss_aggregation_units,
        terms={name: getattr(args, f"{name}_loss_aggregation") for name in _TERMS},
        **{row.name: getattr(args, name) for name, row in _FIELDS.items()},
    )


def _has_flags(args: Namespace) -> bool:
    return all(hasattr(args, name) for name in _DEFAULTS)


def validate_loss_aggregation_args(args: Namespace) -> AggregationSettings:
    """Validate the flags in parsed `args` and return their settings; `args` is not changed.

    Call it after Megatron's own validation (`parse_and_validate_args`) and before the model's config is made.

    Raises:
        ValueError, TypeError: flags that are missing from `args`, unknown, unusable or contradictory, or a Megatron
            setting under which the loss would not be exact. The message names the flag and the remedy.
    """
    _check_present(args)
    per_token = bool(getattr(args, "calculate_per_token_loss", False))
    check_megatron_settings(args, per_token)
    settings = _settings_of(args, _mode_of(args))
    check_per_token(settings, per_token)
    return settings


def _mode_of(args: Namespace) -> str | Mode | ModeFunction | None:
    """The mode by its name or its path; None for the default."""
    mode, path = args.loss_aggregation, args.custom_pg_loss_reducer_function_path
    if path is None:
        return mode
    flag = "--custom-pg-loss-reducer-function-path"
    if mode is not None:
        raise ValueError(
            f"{flag} {path} with --loss-aggregation {mode}: a launch has one mode. Drop one of the two flags."
        )
    return load_function(
        path, flag, "it must be a function of ModeInputs", "Name a function that returns weights", Mode
    )


def modes_of_checkpoint(args: Namespace) -> str | None:
    """The modes that the flags in a checkpoint's `args` ask for, in words; None where it was saved without flags."""
    if not hasattr(args, "loss_aggregation"):
        return None
    known = Namespace(**(_DEFAULTS | vars(args)))  # an earlier version had fewer flags
    modes = attempt(lambda: _settings_of(known, _mode_of(known)).modes.describe())
    return modes if isinstance(modes, str) else f"a mode that cannot be loaded here ({modes})"


def any_flag_given(args: Namespace) -> bool:
    """True if a flag differs from its default. Raises ValueError if the flags were not registered."""
    _check_present(args)
    return any(getattr(args, name) != default for name, default in _DEFAULTS.items())


def check_per_token(settings: AggregationSettings, per_token: bool) -> None:
    """Reject a mode other than token_mean on a model that calculates per-token loss, unless the user allowed it."""
    policy = settings.modes.policy
    if per_token and policy.mode != token_mean and not settings.with_per_token_loss:
        raise ValueError(
            f"--calculate-per-token-loss with mode {policy.mode.name}: the flag asks for token_mean, which contradicts "
            "the mode. Drop one of the two; if the model forces per-token loss, add "
            "--loss-aggregation-with-per-token-loss, which keeps the mode exact."
        )


def check_megatron_settings(settings: Any, per_token: bool, *, looks_ahead: bool = True) -> None:
    """Reject Megatron settings (of a Namespace or a model config) under which the loss would not be exact.

    `looks_ahead`: `LossAggregation` fetches all micro-batches before the schedule runs, so the schedule must not
    redistribute them.
    """
    if looks_ahead and getattr(settings, CHANGING_CP[0], False):
        raise ValueError(
            "--hybrid-context-parallel: the schedule redistributes samples over ranks during the step, so "
            "LossAggregation cannot count them before it. Use a fixed --context-parallel-size, or plan_step in your "
            "own loop."
        )
    if any((getattr(settings, name, 1) or 1) > 1 for name in REMAT_SIZES):
        raise ValueError(
            "weight-rematerialising tensor parallelism (GTP): its scaling of gradients was not tested with this "
            f"library. Turn it off, so that {' and '.join(REMAT_SIZES)} are 1."
        )
    if getattr(settings, "cuda_graph_impl", None) == "full_iteration":
        raise ValueError(
            "--cuda-graph-impl full_iteration: a captured iteration cannot count its samples before the first "
            "micro-batch. Choose another --cuda-graph-impl."
        )
    if per_token and getattr(settings, "use_torch_fsdp2", False):
        raise ValueError(
            "--calculate-per-token-loss with --use-torch-fsdp2: Torch FSDP2 never divides gradients by the token "
            "count, so they would be too large. Drop --calculate-per-token-loss."
        )
    if per_token and getattr(settings, "ddp_average_in_collective", False):
        raise ValueError(
            "--calculate-per-token-loss with --ddp-average-in-collective: Megatron divides by the token count, so DDP "
            "must sum gradients, not average them. Drop one of the two flags."
        )


def has_cuda_graphs(config: Any) -> bool:
    """True for a model that replays its passes with CUDA graphs; reads configs of all supported versions."""
    return getattr(config, "cuda_graph_impl", None) not in (None, "none") or getattr(config, "enable_cuda_graph", False)


def check_command_line(args: Namespace, argv: Sequence[str]) -> None:
    """Reject misspelt flags on the command line.

    Megatron's ``ignore_unknown_args=True`` ignores them, so the run would use another mode.
    """
    flags = [_flag_of(name) for name in _DEFAULTS]
    for option in (word.split("=", 1)[0] for word in argv if word.startswith("--")):
        if option in flags or hasattr(args, option.removeprefix("--").replace("-", "_")):
            continue
        for flag in difflib.get_close_matches(option, flags, n=1, cutoff=0.85):
            raise ValueError(f"{option} on the command line: there is no such flag. Write {flag}.")


def _check_present(args: Namespace) -> None:
    missing = ", ".join(name for name in _DEFAULTS if not hasattr(args, name))
    if missing:
        if getattr(args, "yaml_cfg", None) is not None:
            raise ValueError(
                f"args without {missing}: --yaml-cfg replaces all parsed flags with the keys of the YAML file. Add "
                "these keys to the file, or launch without --yaml-cfg."
            )
        raise ValueError(
            f"args without {missing}: the flags were never registered. Pass add_loss_aggregation_args as Megatron's "
            "extra_args_provider, or call it in yours."
        )
    if getattr(args, "yaml_cfg", None) is not None and getattr(args, _CONFIG) is not None:
        raise ValueError(
            f"{_CONFIG}: {getattr(args, _CONFIG)} in the file of --yaml-cfg: only the command line reads a file of "
            "flags, and --yaml-cfg replaces it. Write the flags' keys into the file of --yaml-cfg."
        )


#: Names of the flags in a Namespace, and their defaults.
_DEFAULTS: dict[str, object] = {}
_DEFAULTS |= vars(add_loss_aggregation_args(ArgumentParser()).parse_args([]))
