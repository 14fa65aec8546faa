"""From what a user asks for to a mode: our names, other frameworks' (``verl:seq-mean-token-mean``), a function.

`NAMES` is the one table of others' names; `resolve` makes an `Aggregation` of any of them, `format_modes` prints them.
An alias takes a setting's *documented* formula over the whole optimizer step. docs/names.md says which version was
read, and where its code does something else.
"""

import textwrap
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from typing import get_args

from megatron_rl_loss.errors import check_choice, did_you_mean
from megatron_rl_loss.modes.table import MODES, Mode, ModeFunction, OwnMode, available_modes, find_mode
from megatron_rl_loss.step.masks import LARGEST, SMALLEST
from megatron_rl_loss.step.totals import UnitCounting

#: Stands for a name that is itself a number: the divisor.
NUMBER = "<number>"


@dataclass(frozen=True)
class PeerName:
    """One setting of a framework.

    Attributes:
        framework, name: prefix and the framework's own spelling; written ``framework:name``.
        mode: ours, or None where the setting's value depends on how the step is cut.
        divisor: the number the name stands for; the framework's own word for it where the user must give it; None
            where there is none.
        units: how the framework counts rollouts or prompts; None where the mode counts none.
        note: what to know; for a refused name, why.
        nearest: for a refused name, the exact mode to use.
    """

    framework: str
    name: str
    mode: str | None
    divisor: float | str | None = None
    units: UnitCounting | None = None
    note: str = ""
    nearest: str = ""

    @property
    def names_a_loss(self) -> bool:
        """Whether it is the setting of a loss, which brings its aggregation along."""
        return self.name.startswith("loss_mode=")

    @property
    def alias(self) -> str:
        return f"{self.framework}:{self.name}"


def _inexact(framework: str, name: str, nearest: str, note: str) -> PeerName:
    return PeerName(framework, name, None, note=note, nearest=nearest)


NAMES = (
    PeerName("verl", "token-mean", "token_mean"),
    PeerName("verl", "token-sum", "token_sum", 1),
    PeerName("verl", "seq-mean-token-sum", "constant", 1, "all"),
    PeerName("verl", "seq-mean-token-sum-norm", "constant", "loss_scale_factor", "all"),
    PeerName("verl", "seq-mean-token-mean", "sample_mean", None, "all"),
    PeerName("verl", "loss_mode=gspo", "sample_mean", None, "all", "its loss of a token is gspo_token_loss"),
    PeerName("verl", "loss_mode=sapo", "sample_mean", None, "all", "its loss of a token is sapo_loss"),
    _inexact(
        "verl", "loss_mode=geo_mean", "sample_mean", "a mean of micro-batch means; its loss of a token is gmpo_loss"
    ),
    PeerName("skyrl", "token_mean", "token_mean"),
    PeerName("skyrl", "sequence_mean", "sample_mean", None, "all", "N counts rows, steps of a trajectory included"),
    PeerName("skyrl", "seq_mean_token_sum_norm", "constant", "max_seq_len", "all"),
    PeerName("skyrl", "prompt_mean", "prompt_mean", None, "all"),
    _inexact("skyrl", "token_mean_legacy", "token_mean", "a mean of micro-batch means, which changes with their size"),
    PeerName("tinker", "sum", "token_sum", 1, note="all normalisation is in the advantages"),
    PeerName("open_instruct", "token", "token_mean"),
    PeerName("open_instruct", NUMBER, "token_sum", note="loss_denominator as a number"),
    PeerName("trl", "grpo", "sample_mean", None, "all"),
    PeerName("trl", "sapo", "sample_mean", None, "all", "its loss of a token is sapo_loss"),
    PeerName("trl", "dr_grpo", "constant", "max_completion_length", "all"),
    PeerName("trl", "luspo", "constant", 1, "all", "its loss of a token is gspo_loss"),
    PeerName("trl", "dapo", "token_mean"),
    PeerName("trl", "cispo", "token_mean", note="its loss of a token is cispo_loss"),
    PeerName("trl", "vespo", "token_mean", note="the aggregation alone, not the loss of a token"),
    _inexact("trl", "bnpo", "token_mean", "a mean of local batches' means, which changes with their size"),
    PeerName("openrlhf", "token_level_loss=true", "token_mean"),
    PeerName("openrlhf", "token_level_loss=false", "sample_mean", None, "active"),
    PeerName("nemo_rl", "token_level_loss=true", "token_mean"),
    PeerName("nemo_rl", "token_level_loss=false", "sample_mean", None, "active", "put sample_mask into the loss masks"),
    PeerName("roll", "token-mean", "token_mean", note="the numerator is masked here"),
    PeerName("roll", "seq-mean-token-sum", "constant", 1, "active"),
    PeerName("roll", "seq-mean-token-mean", "sample_mean", None, "active"),
    PeerName("roll", "seq-mean-token-sum-norm", "token_sum", "response length", note="not divided by N, unlike verl's"),
)


@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """What was asked for, checked.

    Attributes:
        mode: a row of the table of modes, or a mode of the user's own.
        divisor: D of a mode that takes one (for a mode of one's own what was given), else None.
        units: count all units, or only those with an active token.
        notice: something the user should be told, or None.
    """

    mode: Mode | OwnMode
    divisor: float | None
    units: UnitCounting
    notice: str | None = None

    def describe(self) -> str:
        """One line for the log."""
        divisor = "" if self.divisor is None else f", divisor {self.divisor:g}"
        return f"loss aggregation: {self.mode.name}{divisor}, unit counting {self.units}"


def resolve(
    asked: str | ModeFunction, *, divisor: float | None = None, units: UnitCounting | None = None
) -> Aggregation:
    """The aggregation of a mode's name, another framework's ``framework:name``, or a function of `ModeInputs`.

    >>> resolve("verl:seq-mean-token-sum-norm", divisor=4096).mode.name
    'constant'

    Args:
        divisor, units: what the user gave explicitly; None for nothing.

    Raises:
        ValueError: an unknown mode, framework or setting, with the known ones; a setting that is not exact in every
            layout, with the nearest that is; a divisor that is missing, unusable, without effect, or that contradicts
            the name's, as a unit counting may.
        TypeError: what is neither a name nor a function; a divisor that is no number.
    """
    notice = None
    if isinstance(asked, str):
        name, divisor, units, notice = _translate(asked, divisor, units)
        mode = find_mode(name)
    elif callable(asked):
        own = getattr(asked, "__qualname__", None)
        mode = OwnMode(repr(asked) if own is None else f"{asked.__module__}.{own}", asked)
    else:
        raise TypeError(
            f"loss aggregation {asked!r} ({type(asked).__name__}): it must be a mode's name or a function of "
            "ModeInputs. Pass one of them."
        )
    if mode is None:
        known = [*available_modes(), *(peer.alias for peer in NAMES if peer.name == asked)]
        raise ValueError(f"loss aggregation {asked!r}: there is no such mode. {did_you_mean(str(asked), known)}.")
    if units is not None:
        check_choice("unit counting", units, get_args(UnitCounting))
    return Aggregation(mode=mode, divisor=_divisor_of(mode, divisor), units=units or "all", notice=notice)


def _divisor_of(mode: Mode | OwnMode, divisor: float | None) -> float | None:
    """The divisor that a mode gets: the user's, else the mode's own; refused if missing, unusable or without effect."""
    if mode.needs_divisor and divisor is None:
        raise ValueError(
            f"loss aggregation {mode.name!r} without a divisor: it divides by a constant number of tokens. Give "
            "one, e.g. the generation budget in tokens (--loss-aggregation-divisor 40960)."
        )
    if isinstance(mode, Mode) and mode.takes_divisor and divisor is None:
        divisor = mode.default_divisor
    elif isinstance(mode, Mode) and not mode.takes_divisor and divisor is not None:
        takers = " and ".join(repr(mode.name) for mode in MODES.values() if mode.takes_divisor)
        raise ValueError(
            f"divisor {divisor!r} with loss aggregation {mode.name!r}: only {takers} have a divisor. Drop the divisor "
            "or choose one of them."
        )
    if divisor is None:
        return None
    if isinstance(divisor, bool) or not isinstance(divisor, Real):
        raise TypeError(
            f"divisor {divisor!r} ({type(divisor).__name__}): it must be a number. Pass a number of tokens."
        )
    if not SMALLEST < divisor < LARGEST:
        raise ValueError(
            f"divisor {divisor!r}: it must be finite and above 0 (above 1e-30 and below 1e30). Pass a number of tokens."
        )
    return float(divisor)


def _translate(
    asked: str, divisor: float | None, units: UnitCounting | None
) -> tuple[str, float | None, UnitCounting | None, str | None]:
    """Our mode, divisor and unit counting of a name, and a notice; our own names pass as they are."""
    if ":" not in asked:
        return asked, divisor, units, None
    peer = find_name(asked)
    if peer.mode is None:
        raise ValueError(
            f"loss aggregation {asked!r}: it is {peer.note}. Choose {peer.nearest!r}, the nearest that is exact."
        )
    own = float(asked.partition(":")[2]) if peer.name == NUMBER else peer.divisor
    if isinstance(own, str):
        if divisor is None:
            raise ValueError(
                f"loss aggregation {asked!r} without a divisor: it divides by its {own}. Give that number "
                "(--loss-aggregation-divisor)."
            )
    elif divisor in (None, own):
        divisor = own
    else:
        stands_for = "the name has none" if own is None else f"the name stands for {own:g}"
        raise ValueError(
            f"divisor {divisor!r} with loss aggregation {asked!r}: {stands_for}. Drop the divisor, or name our mode."
        )
    if None not in (peer.units, units) and units != peer.units:
        raise ValueError(
            f"unit counting {units!r} with loss aggregation {asked!r}: {peer.framework} counts {peer.units} units. "
            f"Drop the counting, or write {peer.mode!r} with it."
        )
    return peer.mode, divisor, peer.units or units, f"{asked}: {peer.note}." if peer.note else None


def find_name(alias: str) -> PeerName:
    """The row of ``framework:name``; ValueError where there is none."""
    framework, _, setting = alias.partition(":")
    peers = {peer.name: peer for peer in NAMES if peer.framework == framework}
    rule, word, known = f"{framework} has no such setting", setting, list(peers)
    if not peers:
        rule, word = f"there is no framework {framework!r}", framework
        known = list(dict.fromkeys(peer.framework for peer in NAMES))
    elif setting == NUMBER:
        raise ValueError(
            f"loss aggregation {alias!r}: <number> stands for the setting's own number. Write that number in its "
            "place, open_instruct:4096 say."
        )
    elif setting in peers:
        return peers[setting]
    elif NUMBER in peers:
        with suppress(ValueError):
            float(setting)
            return peers[NUMBER]
    raise ValueError(f"loss aggregation {alias!r}: {rule}. {did_you_mean(word, known)}.")


def format_modes() -> str:
    """The modes, their formulas and flags, and every framework's names for them: text of at most 120 columns."""
    lines = [
        "A token's loss is l, its mask m; M is a sum of masks: M_i of rollout i, M_g of prompt group g.",
        "Every sum and count is over the whole optimizer step, however it is split over micro-batches and ranks.",
        "",
        f"{'mode':<13}{'step loss':<38}flags",
        *(f"{mode.name:<13}{mode.formula:<38}{_flags_of(mode)}" for mode in MODES.values()),
        "",
        "Without a flag it is sample_mean, or with Megatron's --calculate-per-token-loss token_mean.",
        "N rollouts and P prompt groups: all, or with --loss-aggregation-units active those with an active token.",
        "L and d are yours to give: L in tokens, e.g. the generation budget; d is 1 if you give none.",
        "",
        "Names of other frameworks, for the same flag (--loss-aggregation verl:token-mean). A number under divisor is",
        "what the name stands for; a word is that framework's setting, to be given as --loss-aggregation-divisor.",
        "What is under units goes with the name. A name without a mode is refused.",
        "",
        f"{'name':<36}{'is':<13}{'divisor':<23}{'units':<8}note",
    ]
    for peer in NAMES:
        divisor = "its number" if peer.name == NUMBER else f"{'' if peer.divisor is None else peer.divisor}"
        note = peer.note if peer.mode else f"refused: {peer.note}; nearest is {peer.nearest}"
        first, *rest = textwrap.wrap(note, 40) or [""]
        lines.append(f"{peer.alias:<36}{peer.mode or '-':<13}{divisor:<23}{peer.units or '':<8}{first}".rstrip())
        lines += [f"{'':<80}{line}" for line in rest]
    return "\n".join(lines)


def _flags_of(mode: Mode) -> str:
    flag = f"--loss-aggregation {mode.name}"
    if not mode.takes_divisor:
        return flag
    letter = "L" if mode.default_divisor is None else "d"
    divisor = f"--loss-aggregation-divisor {letter}"
    return f"{flag} {divisor if mode.default_divisor is None else f'[{divisor}]'}"
