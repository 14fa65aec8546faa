"""Other frameworks' names for the modes (``verl:seq-mean-token-mean``), and `of_peer`, which reads one.

`NAMES` is the one table of others' names: a setting's *documented* formula over the whole optimizer step.
docs/names.md says which version was read, and where its code does something else.
"""

from typing import NamedTuple

from megatron_rl_loss.core.errors import did_you_mean
from megatron_rl_loss.extend import COUNTINGS, UnitCounting, available_modes, find_mode, register_names

#: Stands for a name that is itself a number: the divisor.
NUMBER = "<number>"


class PeerName(NamedTuple):
    """One setting of a framework, written ``framework:name``.

    Attributes:
        mode: ours; for a refused name, whose value depends on how the step is cut, the nearest one.
        divisor: the number that the name stands for, or the framework's own word for it where the user must give it.
        units: how the framework counts rollouts or prompts.
        refused: why there is no exact mode.
    """

    framework: str
    name: str
    mode: str
    divisor: float | str | None = None
    units: UnitCounting | None = None
    refused: str = ""


class Framework(NamedTuple):
    """A framework as it was read: the setting that its names are values of, its default, and the version."""

    setting: str
    default: str
    version: str


#: In the order of the page and of what is printed.
FRAMEWORKS = {
    "verl": Framework("actor.loss_agg_mode", "token-mean", "0.10.0.dev, 1dda039b (2026-08-22)"),
    "slime": Framework("--calculate-per-token-loss", "calculate_per_token_loss=false", "624b824a (2026-08-21)"),
    "miles": Framework("--calculate-per-token-loss", "calculate_per_token_loss=false", "31f1ca96 (2026-08-21)"),
    "skyrl": Framework("trainer.algorithm.loss_reduction", "token_mean", "a9564572 (2026-08-21)"),
    "tinker": Framework("loss_fn", "sum", "Tinker's documentation"),
    "trl": Framework("loss_type", "dapo", "1.10.0.dev0, f2cd5771 (2026-07-24)"),
    "ms_swift": Framework("--loss_type", "grpo", "4.6.0, 3602360a (2026-08-22)"),
    "prime_rl": Framework("trainer.loss.type", "default", "559b4477 (2026-08-21)"),
    "nemo_rl": Framework("loss_fn.token_level_loss", "token_level_loss=true", "7ea279ab (2026-08-22)"),
    "roll": Framework("loss_agg_mode", "seq-mean-token-mean", "8eb27cc2 (2026-08-19)"),
    "openrlhf": Framework("PolicyLoss(token_level_loss=...)", "token_level_loss=true", "0.11.0, 3c3be623 (2026-08-13)"),
    "open_instruct": Framework("--loss_denominator", "token", "e6c3044a (2026-08-20)"),
}

_CUT = "a mean of micro-batch means, which changes with their size"
NAMES = tuple(
    PeerName(*row)
    for row in (
        ("verl", "token-mean", "token_mean"),
        ("verl", "token-sum", "token_sum", 1),
        ("verl", "seq-mean-token-sum", "constant", 1, "all"),
        ("verl", "seq-mean-token-sum-norm", "constant", "loss_scale_factor", "all"),
        ("verl", "seq-mean-token-mean", "sample_mean", None, "all"),
        ("verl", "loss_mode=gspo", "sample_mean", None, "all"),
        ("verl", "loss_mode=sapo", "sample_mean", None, "all"),
        ("verl", "loss_mode=geo_mean", "sample_mean", None, None, _CUT),
        ("slime", "calculate_per_token_loss=true", "token_mean"),
        ("slime", "calculate_per_token_loss=false", "sample_mean", None, "all"),
        ("miles", "calculate_per_token_loss=true", "token_mean"),
        ("miles", "calculate_per_token_loss=false", "sample_mean", None, "all"),
        ("skyrl", "token_mean", "token_mean"),
        ("skyrl", "sequence_mean", "sample_mean", None, "all"),
        ("skyrl", "seq_mean_token_sum_norm", "constant", "max_seq_len", "all"),
        ("skyrl", "prompt_mean", "prompt_mean", None, "all"),
        ("skyrl", "token_mean_legacy", "token_mean", None, None, _CUT),
        ("tinker", "sum", "token_sum", 1),
        ("open_instruct", "token", "token_mean"),
        ("open_instruct", NUMBER, "token_sum"),
        ("trl", "grpo", "sample_mean", None, "all"),
        ("trl", "sapo", "sample_mean", None, "all"),
        ("trl", "dr_grpo", "constant", "max_completion_length", "all"),
        ("trl", "luspo", "constant", 1, "all"),
        ("trl", "dapo", "token_mean"),
        ("trl", "cispo", "token_mean"),
        ("trl", "vespo", "token_mean"),
        ("trl", "bnpo", "token_mean", None, None, "a mean of local batches' means, which changes with their size"),
        ("ms_swift", "grpo", "sample_mean", None, "all"),
        ("ms_swift", "dr_grpo", "constant", "max_completion_length", "all"),
        ("ms_swift", "bnpo", "token_mean"),
        ("ms_swift", "dapo", "token_mean"),
        ("openrlhf", "token_level_loss=true", "token_mean"),
        ("openrlhf", "token_level_loss=false", "sample_mean", None, "active"),
        ("nemo_rl", "token_level_loss=true", "token_mean"),
        ("nemo_rl", "token_level_loss=false", "sample_mean", None, "active"),
        ("prime_rl", "default", "token_mean"),
        ("prime_rl", "ipo", "token_mean"),
        ("roll", "token-mean", "token_mean"),
        ("roll", "seq-mean-token-sum", "constant", 1, "active"),
        ("roll", "seq-mean-token-mean", "sample_mean", None, "active"),
        ("roll", "seq-mean-token-sum-norm", "token_sum", "response length"),
    )
)

#: The policy loss that a name stands for beside its aggregation, where it is not the clipped one: of `POLICY_LOSSES`.
LOSSES = {
    "verl:loss_mode=gspo": "gspo_token",
    "verl:loss_mode=sapo": "sapo",
    "prime_rl:default": "dppo_tv",
    "prime_rl:ipo": "ipo",
    **{f"trl:{name}": name for name in ("sapo", "luspo", "cispo", "vespo")},
}

_EQUALLY = "averages micro-batches equally: exact only if all have equally many rows"
_GENERATED = "divides by the tokens of the generation batch"
#: What a framework's own code does otherwise, in the version read, or since when it does as the name says.
OWN_CODE = {
    **dict.fromkeys(("trl:grpo", "trl:sapo", "trl:dr_grpo", "trl:luspo"), _EQUALLY),
    **dict.fromkeys(("trl:dapo", "trl:cispo", "trl:vespo"), _GENERATED),
    **dict.fromkeys(
        ("slime:calculate_per_token_loss=true", "miles:calculate_per_token_loss=true"),
        "counts one token for each fully masked sample",
    ),
    **dict.fromkeys(("ms_swift:bnpo", "ms_swift:dapo"), "depended on the cut and on the number of steps before 4.6.0"),
    "nemo_rl:token_level_loss=false": "also counts valid responses without an active token",
    "roll:token-mean": "also sums masked positions",
    "roll:seq-mean-token-sum-norm": "divides by the padded length of the current batch",
}


#: Losses of papers that people ask for as a mode, and the mode of each.
_OF_PAPERS = {
    "grpo": "sample_mean",
    "gspo": "sample_mean",
    "dapo": "token_mean, as DAPO's code, or prompt_mean, as its equation",
    "cispo": "token_mean",
    "drgrpo": "constant, with a divisor",
    **dict.fromkeys(("vlnorm", "balanced"), "a mode of your own: python -m megatron_rl_loss example paper_modes"),
}


def _hint(asked: str) -> str:
    """The mode that a name without a framework most likely means."""
    plain = asked.lower().replace("-", "").replace("_", "").replace(" ", "")
    peers = {peer.name.replace("-", "").replace("_", ""): peer for peer in reversed(NAMES) if not peer.refused}
    if plain in _OF_PAPERS:
        return f"It is {_OF_PAPERS[plain]}. Choose one of {', '.join(available_modes())}"
    if plain in peers:
        peer = peers[plain]
        return f"Write {peer.mode!r}, or {peer.framework + ':' + peer.name!r} as that framework counts"
    return did_you_mean(asked, available_modes()) + ", or import the module of a mode of your own first"


def of_peer(
    asked: str, divisor: float | None, units: UnitCounting | None, remedy: str = ""
) -> tuple[str, float | None, UnitCounting | None]:
    """Our mode, divisor and unit counting of a name that is none of ours; errors as of `resolve`."""
    if ":" not in asked:
        raise ValueError(f"loss aggregation {asked!r}: there is no such mode. {_hint(asked)}.")
    peer = find_name(asked)
    if peer.refused:
        raise ValueError(f"loss aggregation {asked!r}: it is {peer.refused}. Choose {peer.mode!r}, the nearest exact.")
    own = float(asked.partition(":")[2]) if peer.name == NUMBER else peer.divisor
    if isinstance(own, str) and divisor is None:
        raise ValueError(
            f"loss aggregation {asked!r} without a divisor: {peer.framework} divides by its {own}. "
            f"{remedy or 'Give that number: --loss-aggregation-divisor, in code divisor='}."
        )
    if not isinstance(own, str) and divisor not in (None, own):
        raise ValueError(
            f"divisor {divisor!r} with loss aggregation {asked!r}: the name stands for "
            f"{'no divisor' if own is None else f'divisor {own:g}'}. Drop the divisor, or choose another mode."
        )
    if None not in (peer.units, units) and units != peer.units:
        raise ValueError(
            f"unit counting {units!r} with loss aggregation {asked!r}: {peer.framework} counts {peer.units} units. "
            f"Leave the counting out, or choose {peer.mode!r} with units={units!r}."
        )
    return peer.mode, divisor if isinstance(own, str) else own, peer.units or units


def find_name(alias: str) -> PeerName:
    """The row of ``framework:name``; ValueError where there is none."""
    framework, _, setting = alias.partition(":")
    peers = {peer.name: peer for peer in NAMES if peer.framework == framework}
    if setting in peers and setting != NUMBER:
        return peers[setting]
    if NUMBER in peers and setting.replace(".", "", 1).isdigit():
        return peers[NUMBER]
    raise ValueError(
        f"loss aggregation {alias!r}: {framework} has no such setting. {did_you_mean(setting, list(peers))}."
    )


for _framework in ("", *FRAMEWORKS):
    register_names(_framework, of_peer)


def format_modes() -> str:
    """The modes, their formulas and flags, and every framework's settings in them: text of at most 120 columns."""
    lines = [
        "A token's loss is l, its mask m; M is a sum of masks: M_i of rollout i, M_g of prompt group g, M_u of turn u.",
        "Every sum and count is over the whole optimizer step, however it is split over micro-batches and ranks.",
        "N rollouts, P prompt groups, U turns, S sessions of n_s samples, i one of these.",
        "",
        f"{'--loss-aggregation-units':<26}what N, P, U, S and n_s count",
        *(f"{row.name:<26}{row.units}" for row in COUNTINGS.values()),
        "",
        f"{'--loss-aggregation':<20}{'step loss':<46}--loss-aggregation-divisor",
    ]
    for name in available_modes():
        mode = find_mode(name)
        assert mode is not None
        lines.append(f"{name:<20}{mode.formula:<46}{mode.divisor}")
    lines += [
        "",
        "Names in other frameworks, each a --loss-aggregation: step loss, our mode, divisor, units that N or P counts.",
        "The framework's own code, in the version read, gives that step loss unless a line below the row differs.",
    ]
    for framework, (setting, default, version) in FRAMEWORKS.items():
        lines += ["", f"{framework}, {setting}, by default {default}; read: {version}"]
        lines += [line for peer in NAMES if peer.framework == framework for line in _format_name(peer)]
    return "\n".join(lines)


def formula_of(peer: PeerName) -> str:
    """The step loss of a name that is not refused."""
    mode = find_mode(peer.mode)
    assert mode is not None
    return mode.formula.replace("(L*N)", "N").replace(" / d", "") if peer.divisor == 1 else mode.formula


def _format_name(peer: PeerName) -> list[str]:
    alias = f"{peer.framework}:{peer.name}"
    if peer.refused:
        return [f"{alias:<37}refused: {peer.refused}", f"    nearest is {peer.mode}"]
    divisor = "its number" if peer.name == NUMBER else "" if peer.divisor is None else peer.divisor
    row = f"{alias:<37}{formula_of(peer):<36}{peer.mode:<12}{divisor:<22}{peer.units or ''}".rstrip()
    loss, own = LOSSES.get(alias), OWN_CODE.get(alias)
    more = [f"--policy-loss {loss}"] * (loss is not None) + [f"its own code: {own}"] * (own is not None)
    return [row, *([f"    {'; '.join(more)}"] if more else [])]
