"""What other frameworks call the modes: ``verl:seq-mean-token-mean``, ``trl:dr_grpo``, ...

`NAMES` is the one table; `resolve_name` turns a name into mode, divisor and unit counting, `format_modes` prints it. An
alias takes a setting's *documented* formula over the whole optimizer step; docs/frameworks has a page a framework that
says which version was read, and where its code does something else.
"""

import difflib
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl_loss.errors import explain

if TYPE_CHECKING:
    from megatron_rl_loss.reducers import Units

#: Stands for a name that is itself a number: the divisor.
NUMBER = "<number>"

FORMULAS = {
    "sample_mean": "1/N sum_i (sum_t l*m / M_i)",
    "prompt_mean": "1/P sum_g (sum_{t in g} l*m / M_g)",
    "token_mean": "sum l*m / sum m",
    "constant": "sum l*m / (L*N)",
    "token_sum": "sum l*m / d",
}


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
    units: "Units | None" = None
    note: str = ""
    nearest: str = ""

    @property
    def alias(self) -> str:
        return f"{self.framework}:{self.name}"


_NOT_THE_LOSS = "the aggregation alone, not the loss of a token"

NAMES = (
    PeerName("verl", "token-mean", "token_mean"),
    PeerName("verl", "token-sum", "token_sum", 1),
    PeerName("verl", "seq-mean-token-sum", "constant", 1, "all"),
    PeerName("verl", "seq-mean-token-sum-norm", "constant", "loss_scale_factor", "all"),
    PeerName("verl", "seq-mean-token-mean", "sample_mean", None, "all"),
    PeerName("skyrl", "token_mean", "token_mean"),
    PeerName("skyrl", "sequence_mean", "sample_mean", None, "all", "N counts rows, steps of a trajectory included"),
    PeerName("skyrl", "seq_mean_token_sum_norm", "constant", "max_seq_len", "all"),
    PeerName("skyrl", "prompt_mean", "prompt_mean", None, "all"),
    PeerName(
        "skyrl",
        "token_mean_legacy",
        None,
        note="a mean of micro-batch means, which changes with their size",
        nearest="token_mean",
    ),
    PeerName("tinker", "sum", "token_sum", 1, note="all normalisation is in the advantages"),
    PeerName("open_instruct", "token", "token_mean"),
    PeerName("open_instruct", NUMBER, "token_sum", note="loss_denominator as a number"),
    PeerName("trl", "grpo", "sample_mean", None, "all"),
    PeerName("trl", "sapo", "sample_mean", None, "all", _NOT_THE_LOSS),
    PeerName("trl", "dr_grpo", "constant", "max_completion_length", "all"),
    PeerName("trl", "luspo", "constant", 1, "all", "give each token its sequence's loss"),
    PeerName("trl", "dapo", "token_mean"),
    PeerName("trl", "cispo", "token_mean", note=_NOT_THE_LOSS),
    PeerName("trl", "vespo", "token_mean", note=_NOT_THE_LOSS),
    PeerName(
        "trl",
        "bnpo",
        None,
        note="a mean of local batches' means, which changes with their size",
        nearest="token_mean",
    ),
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
class ResolvedName:
    """What a name means here. `units` is what it fixes or what was given, else ``all``; `notice` is for the user."""

    mode: str
    divisor: float | None
    units: "Units"
    notice: str | None = None


def resolve_name(name: str, *, divisor: float | None = None, units: "Units | None" = None) -> ResolvedName:
    """Mode, divisor and unit counting of `name`: ours, which pass as they are, or ``framework:name`` of `NAMES`.

    >>> resolve_name("verl:seq-mean-token-sum-norm", divisor=4096)
    ResolvedName(mode='constant', divisor=4096, units='all', notice=None)

    Args:
        divisor, units: what the user gave explicitly; None for nothing.

    Raises:
        ValueError: an unknown framework or name, with the known ones; a setting that is not exact in every layout, with
            the nearest that is; a divisor or unit counting that contradicts the name's, or a divisor it lacks.
    """
    if ":" not in name:
        return ResolvedName(mode=name, divisor=divisor, units=units or "all")
    peer = _find(name)
    given = f"loss aggregation {name!r}"
    if peer.mode is None:
        remedy = f"Choose {peer.nearest!r}, the nearest that is exact"
        raise ValueError(explain(given, f"it is {peer.note}", remedy))
    fixed = float(name.partition(":")[2]) if peer.name == NUMBER else peer.divisor
    if isinstance(fixed, str):
        if divisor is None:
            remedy = "Give that number (--loss-aggregation-divisor)"
            raise ValueError(explain(f"{given} without a divisor", f"it divides by its {fixed}", remedy))
    elif divisor is not None and divisor != fixed:
        rule = "the name has none" if fixed is None else f"the name stands for {fixed:g}"
        raise ValueError(explain(f"divisor {divisor!r} with {given}", rule, "Drop the divisor, or name our mode"))
    else:
        divisor = fixed
    if peer.units is not None and units is not None and units != peer.units:
        rule = f"{peer.framework} counts {peer.units} units"
        remedy = f"Drop the counting, or write {peer.mode!r} with it"
        raise ValueError(explain(f"unit counting {units!r} with {given}", rule, remedy))
    notice = f"{name}: {peer.note}." if peer.note else None
    return ResolvedName(mode=peer.mode, divisor=divisor, units=peer.units or units or "all", notice=notice)


def aliases_of(name: str) -> list[str]:
    """``framework:name`` of every setting that is spelt `name` without a prefix."""
    return [peer.alias for peer in NAMES if peer.name == name]


def _find(name: str) -> PeerName:
    framework, _, setting = name.partition(":")
    peers = {peer.name: peer for peer in NAMES if peer.framework == framework}
    if not peers:
        frameworks = list(dict.fromkeys(peer.framework for peer in NAMES))
        rule = f"there is no framework {framework!r}"
        raise ValueError(explain(f"loss aggregation {name!r}", rule, _choose(framework, frameworks)))
    if setting in peers:
        return peers[setting]
    if NUMBER in peers and _is_number(setting):
        return peers[NUMBER]
    raise ValueError(explain(f"loss aggregation {name!r}", f"{framework} has no such setting", _choose(setting, peers)))


def _choose(given: str, known: "list[str] | dict[str, PeerName]") -> str:
    meant = difflib.get_close_matches(given.lower().replace("_", "-"), [k.replace("_", "-") for k in known], n=1)
    close = [f"Did you mean {k}? " for k in known if [k.replace("_", "-")] == meant]
    return f"{''.join(close)}Known are {', '.join(known)}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def format_modes() -> str:
    """The modes, their formulas and flags, and every framework's names for them: text of at most 120 columns."""
    flags = {"constant": " --loss-aggregation-divisor L", "token_sum": " [--loss-aggregation-divisor d]"}
    lines = [
        "A token's loss is l, its mask m; M is a sum of masks. Every sum and count is over the whole optimizer step.",
        "",
        f"{'mode':<13}{'step loss':<38}flags",
        *(
            f"{mode:<13}{formula:<38}--loss-aggregation {mode}{flags.get(mode, '')}"
            for mode, formula in FORMULAS.items()
        ),
        "",
        "N rollouts and P prompt groups: all, or with --loss-aggregation-units active those with an active token.",
        "",
        "Names of other frameworks, for the same flag (--loss-aggregation verl:token-mean):",
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
