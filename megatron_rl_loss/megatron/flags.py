"""The ``--loss-aggregation`` flags, their validation, and the Megatron settings that are refused."""

import difflib
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from megatron_rl_loss.errors import check_choice, check_int
from megatron_rl_loss.modes.function_paths import load_function
from megatron_rl_loss.modes.loss_modes import LossModes
from megatron_rl_loss.modes.table import Mode, ModeFunction, available_modes, token_mean
from megatron_rl_loss.plan.checks import EmptyStep
from megatron_rl_loss.step.units import UnitCounting

ProofLevel = Literal["error", "warn", "off"]
#: An environment variable: the level of the first step's proof where no flag says one.
PROOF_VARIABLE = "MEGATRON_RL_LOSS_PROOF"
#: Terms of the loss whose mode has a flag.
_TERMS = ("kl", "entropy", "value")
#: Sizes of weight-rematerialising TP (GTP).
REMAT_SIZES = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")
#: Settings under which the context-parallel group changes between micro-batches.
CHANGING_CP = ("hybrid_context_parallel", "dynamic_context_parallel")


@dataclass(frozen=True, kw_only=True)
class AggregationSettings:
    """The flags' settings, validated; made by `resolve`.

    Attributes:
        modes: of the policy loss and of terms that say no mode themselves; another framework's names are translated.
        empty_step: as in `plan_step`.
        with_per_token_loss: the mode may run on a model whose config calculates per-token loss.
        audit_interval: every how many steps the weights are measured; None for never.
        proof: what follows if the first training step is not as asked: ``error``, ``warn``, or ``off``, not to look.
    """

    modes: LossModes
    empty_step: EmptyStep = "warn"
    with_per_token_loss: bool = False
    audit_interval: int | None = None
    proof: ProofLevel = "error"

    @classmethod
    def resolve(
        cls,
        mode: str | Mode | ModeFunction = "sample_mean",
        divisor: float | None = None,
        units: UnitCounting | None = None,
        *,
        empty_step: EmptyStep = "warn",
        with_per_token_loss: bool = False,
        audit_interval: int | None = None,
        proof: ProofLevel | None = None,
        terms: Mapping[str, str | None] | None = None,
    ) -> "AggregationSettings":
        """From a mode, its name (another framework's, too) or its function; raises as `make_pg_loss_reducer`.

        Without `proof` the environment's ``MEGATRON_RL_LOSS_PROOF`` says the level, else it is ``error``.
        """
        check_choice("empty step handling", empty_step, get_args(EmptyStep))
        if audit_interval is not None:
            remedy = "Give 100, say, or leave it out: then no step is audited"
            check_int("--loss-aggregation-audit-interval", audit_interval, 1, remedy)
        return cls(
            modes=LossModes.resolve(mode, divisor=divisor, units=units, terms=terms),
            empty_step=empty_step,
            with_per_token_loss=with_per_token_loss,
            audit_interval=audit_interval,
            proof=proof_level(proof),
        )


def proof_level(given: str | None = None) -> ProofLevel:
    """The level that was given, else that of the environment, else ``error``. Raises ValueError for another one."""
    level: Any = given or os.environ.get(PROOF_VARIABLE) or "error"
    check_choice("level of the first step's proof", level, get_args(ProofLevel))
    return level


def add_loss_aggregation_args(parser: ArgumentParser) -> ArgumentParser:
    """Add the flags to a parser and return it: an ``extra_args_provider`` for Megatron, to be chained with others."""
    group = parser.add_argument_group("policy-gradient loss aggregation (megatron_rl_loss)")
    group.add_argument(
        "--loss-aggregation",
        metavar="MODE",
        help=f"How per-token losses become the step's loss: {', '.join(available_modes())}, or a name of "
        "another framework (verl:token-mean; python -m megatron_rl_loss modes lists them). "
        "Default: sample_mean, or token_mean with --calculate-per-token-loss.",
    )
    group.add_argument(
        "--loss-aggregation-divisor",
        metavar="TOKENS",
        type=float,
        help="L of --loss-aggregation constant, sum / (L * number of rollouts): e.g. the generation budget. "
        "Or d of token_sum, sum / d (default 1).",
    )
    group.add_argument(
        "--loss-aggregation-units",
        choices=get_args(UnitCounting),
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
        help="Allow another mode than token_mean beside --calculate-per-token-loss, which some models force.",
    )
    group.add_argument(
        "--loss-aggregation-audit-interval",
        metavar="STEPS",
        type=int,
        help="Every so many steps, the first included, measure what the step did to each token and log how far it is "
        "from what was asked, as loss_aggregation_deviation. Default: never.",
    )
    group.add_argument(
        "--loss-aggregation-proof",
        choices=get_args(ProofLevel),
        help="The first training step is measured: if a token has not the weight that was asked, stop on all ranks "
        "before the optimizer (error) or say so (warn); or not look (off). Default: MEGATRON_RL_LOSS_PROOF, or error.",
    )
    group.add_argument(
        "--custom-pg-loss-reducer-function-path",
        metavar="PATH",
        help="A mode of your own, pkg.mod.fn or pkg.mod:fn: a function of ModeInputs that returns a weight for each "
        "sample or token; masked tokens stay at 0.",
    )
    for name in _TERMS:
        group.add_argument(
            f"--{name}-loss-aggregation",
            metavar="MODE",
            help=f"How a term of the loss named {name!r} is aggregated; default: as the policy loss.",
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
    check_megatron_settings(args, per_token)
    mode: str | Mode | ModeFunction | None = args.loss_aggregation
    path, flag = args.custom_pg_loss_reducer_function_path, "--custom-pg-loss-reducer-function-path"
    if path is not None:
        if mode not in (None, "sample_mean"):
            raise ValueError(
                f"{flag} {path} with --loss-aggregation {mode}: only one can make the loss. Drop one of them."
            )
        mode = load_function(path, flag, "it must be a function of ModeInputs", "Name one that returns weights", Mode)
    settings = AggregationSettings.resolve(
        mode or ("token_mean" if per_token else "sample_mean"),
        args.loss_aggregation_divisor,
        args.loss_aggregation_units,
        empty_step=args.loss_aggregation_empty_step,
        with_per_token_loss=args.loss_aggregation_with_per_token_loss,
        audit_interval=args.loss_aggregation_audit_interval,
        proof=args.loss_aggregation_proof,
        terms={name: getattr(args, f"{name}_loss_aggregation") for name in _TERMS},
    )
    check_per_token(settings, per_token)
    return settings


def any_flag_given(args: Namespace) -> bool:
    """True if one of the flags says something else than its default; ValueError where they were not registered."""
    _check_present(args)
    return any(getattr(args, name) != default for name, default in _DEFAULTS.items())


def check_per_token(settings: AggregationSettings, per_token: bool) -> None:
    """Refuse a mode other than token_mean on a model that calculates per-token loss, unless it was opted in."""
    policy = settings.modes.policy
    if per_token and policy.mode != token_mean and not settings.with_per_token_loss:
        raise ValueError(
            f"--calculate-per-token-loss with {policy.describe()}: the flag alone means token_mean, and beside "
            "another mode one of the two is a mistake. Drop one; if the model forces per-token loss, add "
            "--loss-aggregation-with-per-token-loss, which keeps the mode exact."
        )


def check_megatron_settings(settings: Any, per_token: bool, *, looks_ahead: bool = True) -> None:
    """Refuse Megatron settings (of a Namespace or a model config) under which the loss would not be exact.

    `looks_ahead`: `LossAggregation` looks at micro-batches before the schedule, which then must not deal them anew.
    """
    if looks_ahead and getattr(settings, CHANGING_CP[0], False):
        raise ValueError(
            "--hybrid-context-parallel: the schedule deals samples to groups that change between micro-batches, which "
            "cannot be looked ahead at here. Use a fixed --context-parallel-size, or plan_step in a loop."
        )
    if any((getattr(settings, name, 1) or 1) > 1 for name in REMAT_SIZES):
        raise ValueError(
            "weight-rematerialising tensor parallelism (GTP): its ranks hold further data-parallel shares, and how "
            "their gradients are scaled was not tested. Turn it off."
        )
    if getattr(settings, "cuda_graph_impl", None) == "full_iteration":
        raise ValueError(
            "--cuda-graph-impl full_iteration: a captured iteration cannot look ahead at its step's samples. Choose "
            "another --cuda-graph-impl."
        )
    if per_token and getattr(settings, "use_torch_fsdp2", False):
        raise ValueError(
            "per-token loss with --use-torch-fsdp2: Torch FSDP2 never divides gradients by the token count, so they "
            "would be too large by it. Drop --calculate-per-token-loss."
        )
    if per_token and getattr(settings, "ddp_average_in_collective", False):
        raise ValueError(
            "per-token loss with --ddp-average-in-collective: gradients must be summed, not averaged, to be divided by "
            "the token count. Drop --ddp-average-in-collective or --calculate-per-token-loss."
        )


def has_cuda_graphs(config: Any) -> bool:
    """True for a model that replays its passes by CUDA graphs, as a config of any supported version says it."""
    return getattr(config, "cuda_graph_impl", None) not in (None, "none") or getattr(config, "enable_cuda_graph", False)


def check_command_line(args: Namespace, argv: Sequence[str]) -> None:
    """Refuse options on the command line that are one of the flags misspelt.

    Megatron's ``ignore_unknown_args=True`` lets them pass, and the run would go on with another mode.
    """
    flags = [f"--{name.replace('_', '-')}" for name in _DEFAULTS]
    for option in (word.split("=", 1)[0] for word in argv if word.startswith("--")):
        if option in flags or hasattr(args, option.removeprefix("--").replace("-", "_")):
            continue
        for flag in difflib.get_close_matches(option, flags, n=1, cutoff=0.85):
            raise ValueError(f"{option} on the command line: there is no such flag, and it was ignored. Write {flag}.")


def _check_present(args: Namespace) -> None:
    missing = ", ".join(name for name in _DEFAULTS if not hasattr(args, name))
    if missing:
        if getattr(args, "yaml_cfg", None) is not None:
            raise ValueError(
                f"args without {missing}: --yaml-cfg replaces all parsed flags by what the file holds, so the "
                "aggregation would be silently lost. Add these keys to the YAML file, or launch without --yaml-cfg."
            )
        raise ValueError(
            f"args without {missing}: the flags were never registered. Pass add_loss_aggregation_args as (or from) "
            "Megatron's extra_args_provider."
        )


#: The flags as attributes of a Namespace, with their defaults.
_DEFAULTS: dict[str, object] = vars(add_loss_aggregation_args(ArgumentParser()).parse_args([]))
