"""Other frameworks' names for the modes (``verl:seq-mean-token-mean``), and `peer_meaning`, which reads one.

`NAMES` is the one table of others' names: a setting's *documented* formula over the whole optimizer step, in each
known version. Where versions differ, a name has one in it: ``verl@0.9.0:gspo``. tools/check_names.py runs the
frameworks' own code and compares.
"""

from collections.abc import Iterable, Mapping
from textwrap import wrap
from typing import Any, Literal, NamedTuple

from megatron_rl_loss.core.errors import did_you_mean, only_if
from megatron_rl_loss.extend import COUNTINGS, UnitCounting, available_modes, find_mode, register_names

#: Stands for a name that is itself a number: the divisor.
NUMBER = "<number>"


class PeerName(NamedTuple):
    """One setting of a framework, written ``framework:name``, in a range of its known versions.

    Attributes:
        mode: ours; for a refused name, whose value depends on how the step is cut, the nearest one.
        divisor: the number that the name stands for, or the framework's own word for it where the user must give it.
        units: how the framework counts rollouts or prompts.
        refused: why there is no exact mode.
        since, until: first and last version with this meaning; empty for the first and the last known one.
        loss: the policy loss that the name stands for, too, where it is not the clipped one: of `POLICY_LOSSES`.
        own_code: what the framework's own code does otherwise.
    """

    framework: str
    name: str
    mode: str
    divisor: float | str | None = None
    units: UnitCounting | None = None
    refused: str = ""
    since: str = ""
    until: str = ""
    loss: str = ""
    own_code: str = ""

    @property
    def meaning(self) -> tuple[str, float | str | None, UnitCounting | None, bool]:
        """What `peer_meaning` gives for the name."""
        return self.mode, self.divisor, self.units, bool(self.refused)

    @property
    def versions(self) -> list[str]:
        """The known versions with this meaning, oldest first."""
        known = FRAMEWORKS[self.framework].names
        first = known.index(self.since) if self.since else 0
        return known[first : known.index(self.until) + 1 if self.until else None]

    @property
    def alias(self) -> str:
        """The name as the library takes it, with the last of its versions if the meaning depends on the version."""
        others = {peer.meaning for peer in NAMES if (peer.framework, peer.name) == (self.framework, self.name)}
        return f"{self.framework}{only_if(len(others) > 1, f'@{self.versions[-1]}')}:{self.name}"


class Framework(NamedTuple):
    """A framework: the setting that its names are values of, its default ("" where it has none), and the source.

    Attributes:
        versions: oldest first: a release, or a commit with its date; whether its code was run or only read.
        source: the file, or the document, that says what a name means.
    """

    setting: str
    default: str
    versions: Mapping[str, Literal["run", "read"]]
    source: str

    @property
    def names(self) -> list[str]:
        """The versions as one writes them after ``@``, oldest first."""
        return [version.split()[0] for version in self.versions]


def _run(*versions: str) -> dict[str, Literal["run", "read"]]:
    return dict.fromkeys(versions, "run")


def _read(*versions: str) -> dict[str, Literal["run", "read"]]:
    return dict.fromkeys(versions, "read")


#: In the order of the page and of what is printed.
FRAMEWORKS = {
    "verl": Framework(
        "actor.loss_agg_mode", "token-mean",
        _run("0.6.1", "0.7.0", "0.7.1", "0.8.0", "0.9.0", "1dda039b (2026-08-22)", "0.9.1"),
        "verl/trainer/ppo/core_algos.py",
    ),
    "slime": Framework(
        "--calculate-per-token-loss", "calculate_per_token_loss=false", _run("624b824a (2026-08-21)"),
        "slime/backends/megatron_utils",
    ),
    "miles": Framework(
        "--calculate-per-token-loss", "calculate_per_token_loss=false", _run("31f1ca96 (2026-08-21)"),
        "miles/backends/training_utils",
    ),
    "skyrl": Framework(
        "trainer.algorithm.loss_reduction", "token_mean", _run("a9564572 (2026-08-21)", "0.4.0"),
        "skyrl/backends/skyrl_train/utils/ppo_utils.py",
    ),
    "tinker": Framework("loss_fn", "", _read("0.38.0"), "tinker/types/loss_fn_type.py, and its documentation"),
    "trl": Framework(
        "loss_type", "dapo",
        _run("1.0.0", "1.9.0") | _read("f2cd5771 (2026-07-24)") | _run("1.9.1", "1.10.0", "1.16.0"),
        "trl/trainer/grpo_trainer.py",
    ),
    "ms_swift": Framework(
        "--loss_type", "grpo", _run("4.5.3", "3602360a (2026-08-22)", "4.6.0"),
        "swift/megatron/trainers/grpo_trainer.py",
    ),
    "prime_rl": Framework(
        "trainer.loss.type", "ipo", _run("559b4477 (2026-08-21)") | _read("0.9.0"),
        "src/prime_rl/trainer/rl/loss.py; of 0.9.0 the documentation",
    ),
    "nemo_rl": Framework(
        "loss_fn.token_level_loss", "token_level_loss=true", _run("7ea279ab (2026-08-22)"),
        "nemo_rl/algorithms/loss/loss_functions.py",
    ),
    "roll": Framework(
        "loss_agg_mode", "seq-mean-token-mean", _run("8eb27cc2 (2026-08-19)"), "roll/utils/functionals.py"
    ),
    "openrlhf": Framework(
        "--actor.loss_agg_mode", "token-mean", _run("0.11.0", "0.11.2"), "openrlhf/models/loss.py"
    ),
    "open_instruct": Framework(
        "--loss_denominator", "token", _run("e6c3044a (2026-08-20)"), "open_instruct/grpo_fast.py"
    ),
    "torchrl": Framework(
        "GRPOLoss(aggregation=...)", "token_mean", _run("0.11.1", "0.14.1"), "torchrl/objectives/llm/grpo.py"
    ),
    "tunix": Framework("loss_agg_mode", "sequence-mean-token-mean", _run("0.1.7"), "tunix/rl/common.py"),
    "maxtext": Framework(
        "rl.loss_agg_mode", "sequence-mean-token-mean", _run("0.2.5"),
        "maxtext/configs/types.py, which hands it to tunix 0.1.7",
    ),
    "torchtitan": Framework(
        "trainer.loss", "", _run("0.3.0"), "torchtitan/experiments/rl/losses"
    ),
    "agent_lightning": Framework(
        "actor.policy_loss.loss_mode", "per_rollout_mean", _run("1.0.2"), "agentlightning/verl/per_rollout_loss.py"
    ),
}  # fmt: skip

_CUT = "a mean of micro-batch means, which changes with their size"
_SUMMED = "a sum of micro-batch means, which changes with their number"
_LOCAL = "a mean of local batches' means, which changes with their size"
_FOLLOWS = "whatever loss_agg_mode is, by default token-mean"
_PER_CALL = "divides by counts of each micro-batch, not of the step"
_OR_NAN = f"{_PER_CALL}: NaN in one without tokens"
_EQUALLY = "averages micro-batches equally: exact only if all have equally many rows"
_GENERATED = "divides by the tokens of the generation batch, not of the step"
_WINDOW = "divides by the tokens of an average window of the generation batch, not of the step"
_ROLLOUT_BATCH = "divides by the tokens of all steps of the rollout batch, and by micro-batches once more"
_PADDED_WIDTH = "divides by the padded length of the micro-batch"
_AVERAGED = "averages the sums of micro-batches"
_SEQUENCES = "sums sequences without averaging them"
_MASKED = "counts one token for each fully masked sample"
_BY_ROWS = "divides by the number of rows, not of rollouts"
NAMES = (
    PeerName("verl", "token-mean", "token_mean", until="0.6.1", own_code=_PER_CALL),
    PeerName("verl", "token-mean", "token_mean", since="0.7.0"),
    PeerName("verl", "token-sum", "token_sum", 1, since="0.9.0"),
    PeerName("verl", "seq-mean-token-sum", "constant", 1, "all", until="0.6.1", own_code=_PER_CALL),
    PeerName("verl", "seq-mean-token-sum", "constant", 1, "all", since="0.7.0"),
    PeerName(
        "verl", "seq-mean-token-sum-norm", "constant", "loss_scale_factor", "all", until="0.6.1", own_code=_PADDED_WIDTH
    ),
    PeerName(
        "verl", "seq-mean-token-sum-norm", "constant", "loss_scale_factor", "all", since="0.7.0", until="0.7.0",
        own_code=_SEQUENCES,
    ),
    PeerName("verl", "seq-mean-token-sum-norm", "constant", "loss_scale_factor", "all", since="0.7.1"),
    PeerName("verl", "seq-mean-token-mean", "sample_mean", None, "all", until="0.6.1", own_code=_PER_CALL),
    PeerName("verl", "seq-mean-token-mean", "sample_mean", None, "all", since="0.7.0"),
    PeerName("verl", "gspo", "sample_mean", None, "all", until="0.6.1", loss="gspo_token", own_code=_PER_CALL),
    PeerName("verl", "gspo", "sample_mean", None, "all", since="0.7.0", until="1dda039b", loss="gspo_token"),
    PeerName("verl", "gspo", "token_mean", refused=_FOLLOWS, since="0.9.1"),
    PeerName("verl", "sapo", "sample_mean", None, "all", since="0.7.0", loss="sapo"),
    PeerName("verl", "geo_mean", "sample_mean", refused=_CUT, until="0.6.1"),
    PeerName("verl", "geo_mean", "sample_mean", refused=_SUMMED, since="0.7.0"),
    PeerName("slime", "calculate_per_token_loss=true", "token_mean", own_code=_MASKED),
    PeerName("slime", "calculate_per_token_loss=false", "sample_mean", None, "all"),
    PeerName("miles", "calculate_per_token_loss=true", "token_mean", own_code=_MASKED),
    PeerName("miles", "calculate_per_token_loss=false", "sample_mean", None, "all"),
    PeerName("skyrl", "token_mean", "token_mean"),
    PeerName("skyrl", "sequence_mean", "sample_mean", None, "all"),
    PeerName("skyrl", "seq_mean_token_sum_norm", "constant", "max_seq_len", "all"),
    PeerName("skyrl", "prompt_mean", "prompt_mean", None, "all"),
    PeerName("skyrl", "token_mean_legacy", "token_mean", refused=_CUT),
    PeerName("tinker", "cross_entropy", "token_sum", 1),
    PeerName("tinker", "importance_sampling", "token_sum", 1),
    PeerName("tinker", "ppo", "token_sum", 1),
    PeerName("tinker", "cispo", "token_sum", 1, loss="cispo"),
    PeerName("tinker", "dro", "token_sum", 1),
    PeerName("tinker", "gspo", "token_sum", 1, loss="gspo_token"),
    PeerName("tinker", "stable_reinforce", "token_sum", 1),
    PeerName("tinker", "custom", "token_sum", 1),
    PeerName("open_instruct", "token", "token_mean"),
    PeerName("open_instruct", NUMBER, "token_sum"),
    PeerName("trl", "grpo", "sample_mean", None, "all", own_code=_EQUALLY),
    PeerName("trl", "sapo", "sample_mean", None, "all", loss="sapo", own_code=_EQUALLY),
    PeerName("trl", "dr_grpo", "constant", "max_completion_length", "all", own_code=_EQUALLY),
    PeerName("trl", "luspo", "constant", 1, "all", loss="luspo", own_code=_EQUALLY),
    *(
        PeerName("trl", name, "token_mean", loss=loss, since=since, until=until, own_code=own_code)
        for name, loss in (("dapo", ""), ("cispo", "cispo"), ("vespo", "vespo"))
        for since, until, own_code in (("", "f2cd5771", _GENERATED), ("1.9.1", "", _WINDOW))
    ),
    PeerName("trl", "bnpo", "token_mean", refused=_LOCAL),
    PeerName("ms_swift", "grpo", "sample_mean", None, "all", own_code=_EQUALLY),
    PeerName("ms_swift", "dr_grpo", "constant", "max_completion_length", "all", own_code=_EQUALLY),
    PeerName("ms_swift", "bnpo", "token_mean", until="3602360a", own_code=_PER_CALL),
    PeerName("ms_swift", "bnpo", "token_mean", since="4.6.0"),
    PeerName("ms_swift", "dapo", "token_mean", until="3602360a", own_code=_ROLLOUT_BATCH),
    PeerName("ms_swift", "dapo", "token_mean", since="4.6.0"),
    PeerName("openrlhf", "token-mean", "token_mean", since="0.11.2"),
    PeerName("openrlhf", "seq-mean-token-mean", "sample_mean", None, "active", since="0.11.2"),
    PeerName("openrlhf", "gspo", "sample_mean", None, "active", loss="gspo_token"),
    PeerName("openrlhf", "token_level_loss=true", "token_mean"),
    PeerName("openrlhf", "token_level_loss=false", "sample_mean", None, "active"),
    PeerName("nemo_rl", "token_level_loss=true", "token_mean"),
    PeerName(
        "nemo_rl", "token_level_loss=false", "sample_mean", None, "active",
        own_code="also counts valid responses without an active token",
    ),
    PeerName("prime_rl", "default", "token_mean", until="559b4477", loss="dppo_tv"),
    PeerName("prime_rl", "ipo", "token_mean", loss="ipo"),
    PeerName("prime_rl", "icepop", "token_mean", since="0.9.0"),
    PeerName("roll", "token-mean", "token_mean", own_code="also sums masked positions"),
    PeerName("roll", "seq-mean-token-sum", "constant", 1, "active"),
    PeerName("roll", "seq-mean-token-mean", "sample_mean", None, "active"),
    PeerName("roll", "seq-mean-token-sum-norm", "token_sum", "response length", own_code=_PADDED_WIDTH),
    PeerName("torchrl", "token_mean", "token_mean", until="0.11.1", own_code=_OR_NAN),
    PeerName("torchrl", "token_mean", "token_mean", since="0.14.1", own_code=_PER_CALL),
    PeerName("torchrl", "prompt_mean", "sample_mean", None, "all", own_code=_EQUALLY),
    PeerName("tunix", "token-mean", "token_mean", own_code=_PER_CALL),
    PeerName("tunix", "sequence-mean-token-mean", "sample_mean", None, "active", own_code=_PER_CALL),
    PeerName("tunix", "sequence-mean-token-scale", "constant", "norm", "active", own_code=_PER_CALL),
    PeerName("tunix", "seq-mean-token-sum", "constant", 1, "active", own_code=_PER_CALL),
    PeerName("tunix", "sequence-mean-token-sum-norm", "token_sum", "norm", own_code=_AVERAGED),
    PeerName("maxtext", "token-mean", "token_mean", own_code=_PER_CALL),
    PeerName("maxtext", "sequence-mean-token-mean", "sample_mean", None, "active", own_code=_PER_CALL),
    PeerName("maxtext", "sequence-mean", "sample_mean", refused="a value that tunix 0.1.7 raises an error for"),
    PeerName("torchtitan", "dapo", "token_mean"),
    PeerName("torchtitan", "grpo", "token_mean"),
    PeerName("agent_lightning", "per_rollout_mean", "sample_mean", None, "all", own_code=_BY_ROWS),
)  # fmt: skip


#: Losses of papers that people ask for as a mode, and the mode of each.
_PAPER_NAMES = {
    "grpo": "sample_mean",
    "gspo": "sample_mean",
    "dapo": "token_mean, as DAPO's code, or prompt_mean, as its equation",
    "cispo": "token_mean",
    "drgrpo": "constant, with a divisor",
    **dict.fromkeys(("vlnorm", "balanced"), "a mode of your own: python -m megatron_rl_loss example paper_modes"),
}


def _hint(asked: str) -> str:
    """The mode that a name without a framework most likely means."""
    framework, at, version = asked.lower().replace("-", "_").partition("@")
    if framework in FRAMEWORKS:
        listed = f"python -m megatron_rl_loss modes {framework} lists them"
        return f"It is a framework. Write {framework}{at}{version}:SETTING; {listed}"
    plain = asked.lower().replace("-", "").replace("_", "").replace(" ", "")
    peers = {peer.name.replace("-", "").replace("_", ""): peer for peer in reversed(NAMES) if not peer.refused}
    if plain in _PAPER_NAMES:
        return f"It is {_PAPER_NAMES[plain]}. Choose one of {', '.join(available_modes())}"
    if plain in peers:
        peer = peers[plain]
        return f"Write {peer.mode!r}, or {peer.framework + ':' + peer.name!r} as that framework counts"
    return did_you_mean(asked, available_modes()) + ", or import the module of a mode of your own first"


def peer_meaning(
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
    """The row of ``framework:name`` or ``framework@version:name``; ValueError for none, or several meanings."""
    framework, version, _ = _parts_of(alias)
    rows = [peer for peer in rows_of(alias) if version in ("", *peer.versions)]
    if differs_by_version(alias):
        differ = "; ".join(f"in {_range(peer)} it is {peer.refused or peer.mode}" for peer in _spans(rows))
        raise ValueError(
            f"loss aggregation {alias!r}: versions of {framework} differ: {differ}. Write yours: {versioned(alias)}."
        )
    return rows[-1]


def differs_by_version(alias: str) -> bool:
    """True for a name without a version that means other things in other versions."""
    version = _parts_of(alias)[1]
    return len({peer.meaning for peer in rows_of(alias) if version in ("", *peer.versions)}) > 1


def versioned(alias: str) -> str:
    """The name with each version that tells its meanings apart."""
    return " or ".join(peer.alias for peer in _spans(rows_of(alias)))


def weighable(alias: str) -> str:
    """`versioned`, of the versions that have weights, with the flag of a divisor that the user must give."""
    exact = [peer for peer in _spans(rows_of(alias)) if not peer.refused]
    return " or ".join(f"{peer.alias}{only_if(isinstance(peer.divisor, str), ' --divisor D')}" for peer in exact)


def rows_of(alias: str) -> list[PeerName]:
    """All rows of a name, oldest first; ValueError for a framework's name or version that the table lacks."""
    framework, version, setting = _parts_of(alias)
    known = FRAMEWORKS[framework].names
    if version and version not in known:
        raise ValueError(
            f"loss aggregation {alias!r}: of {framework} the versions {', '.join(known)} are known. "
            "Write the last of these that is not newer than yours."
        )
    peers = [peer for peer in NAMES if peer.framework == framework]
    is_number = setting.replace(".", "", 1).isdigit()
    rows = [peer for peer in peers if peer.name == (NUMBER if is_number else setting) and setting != NUMBER]
    if not rows:
        names = [*dict.fromkeys(peer.name for peer in peers)]
        raise ValueError(
            f"loss aggregation {alias!r}: {framework} has no such setting. {did_you_mean(setting, names)}."
        )
    if version and not any(version in peer.versions for peer in rows):
        raise ValueError(
            f"loss aggregation {alias!r}: {framework} has this setting in {_range(*rows)} alone. Write one of these."
        )
    return rows


def _parts_of(alias: str) -> tuple[str, str, str]:
    """Framework, version and setting; without ``@`` an empty version."""
    project, _, setting = alias.partition(":")
    framework, _, version = project.partition("@")
    return framework, version, setting


def _spans(rows: list[PeerName]) -> list[PeerName]:
    """The rows, neighbours with the same meaning as one."""
    spans: list[PeerName] = []
    for peer in rows:
        if spans and spans[-1].meaning == peer.meaning:
            spans[-1] = spans[-1]._replace(until=peer.until)
        else:
            spans.append(peer)
    return spans


def _range(*rows: PeerName) -> str:
    """The versions of these rows in words."""
    first, last = rows[0].versions[0], rows[-1].versions[-1]
    return first if first == last else f"{first} to {last}"


for _framework in ("", *FRAMEWORKS):
    register_names(_framework, peer_meaning)


def format_modes() -> str:
    """The modes, their formulas and flags, and the frameworks that have names for them: a screen of 100 columns."""
    lines = [
        "A token's loss is l, its mask m; M is a sum of masks: M_i of rollout i, M_g of prompt group g, M_u",
        "of turn u. N rollouts, P prompt groups, U turns, S sessions of n_s samples, i one of these. Sums and",
        "counts are over the whole optimizer step, however it is split over micro-batches and ranks.",
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
        "Other frameworks' names are modes, too: verl:token-mean, for example. Frameworks and their settings:",
    ]
    settings = "; ".join(f"{name} ({row.setting})" for name, row in FRAMEWORKS.items())
    lines += wrap(settings, 100, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(
        [
            *lines,
            "",
            "modes sample_mean    the weights that a mode gives a small step",
            "modes verl:gspo      what a name means in each version",
            "modes verl           all names of a framework; of every framework: modes --all",
        ]
    )


def format_frameworks(names: Iterable[str] = FRAMEWORKS) -> str:
    """All names of some frameworks: text of at most 120 columns."""
    lines = [
        "Names in other frameworks, each a --loss-aggregation: step loss, our mode, divisor, units that N or P counts.",
        "The framework's own code, in the versions named, gives that step loss unless a line below the row differs.",
        "Where the meaning depends on the version, the name has one: verl@0.9.0:gspo. run: the code was run.",
    ]
    for framework in names:
        row = FRAMEWORKS[framework]
        versions = ", ".join(f"{version} {how}" for version, how in row.versions.items())
        lines += ["", f"{framework}, {row.setting}" + only_if(row.default, f", by default {row.default}")]
        lines += [f"    {line}" for line in wrap(f"versions: {versions}; source: {row.source}", 114)]
        lines += [line for peer in NAMES if peer.framework == framework for line in _format_name(peer)]
    return "\n".join(lines)


def modes_as_data() -> dict[str, Any]:
    """The modes, the unit countings and the names in other frameworks as plain data."""
    modes = {name: find_mode(name) for name in available_modes()}
    return {
        "modes": [{"name": name, "formula": row.formula, "divisor": row.divisor} for name, row in modes.items() if row],
        "units": {row.name: row.units for row in COUNTINGS.values()},
        "frameworks": {framework: framework_as_data(framework) for framework in FRAMEWORKS},
    }


def framework_as_data(framework: str) -> dict[str, Any]:
    """A framework's setting, its known versions, and its names as plain data."""
    names = [
        peer._asdict() | {"alias": peer.alias, "formula": formula_of(peer), "versions": peer.versions}
        for peer in NAMES
        if peer.framework == framework
    ]
    return FRAMEWORKS[framework]._asdict() | {"names": names}


def format_versions(alias: str) -> str:
    """What ``framework:name`` means in each known version; the errors of `rows_of`."""
    framework, version, _ = _parts_of(alias)
    row, lines = FRAMEWORKS[framework], list[str]()
    for peer in rows_of(alias):
        for name, (known, how) in zip(row.names, row.versions.items(), strict=True):
            if name in peer.versions and version in ("", name):
                lines.append(f"{framework} {known}, {how}: {_said(peer)}")
                lines += only_if(peer.own_code, [f"    its own code {peer.own_code}"])
    return "\n".join([*lines, f"source: {row.source}"])


def formula_of(peer: PeerName) -> str:
    """The step loss of a name that is not refused."""
    mode = find_mode(peer.mode)
    assert mode is not None
    return mode.formula.replace("(L*N)", "N").replace(" / d", "") if peer.divisor == 1 else mode.formula


def _said(peer: PeerName) -> str:
    """The meaning in a few words."""
    if peer.refused:
        return f"refused, it is {peer.refused}; nearest is {peer.mode}"
    divisor = "" if peer.divisor is None else f", divisor {peer.divisor}"
    return f"{peer.mode}{divisor}" + only_if(peer.units is not None, f", counting {peer.units} units")


def _format_name(peer: PeerName) -> list[str]:
    if peer.refused:
        rows = [f"{peer.alias:<41}refused: {peer.refused}", f"    nearest is {peer.mode}"]
    else:
        divisor = "its number" if peer.name == NUMBER else "" if peer.divisor is None else peer.divisor
        rows = [f"{peer.alias:<41}{formula_of(peer):<36}{peer.mode:<13}{divisor:<22}{peer.units or ''}".rstrip()]
    more = only_if(peer.since or peer.until, [_range(peer)])
    more += only_if(peer.loss, [f"--policy-loss {peer.loss}"])
    more += only_if(peer.own_code, [f"its own code {peer.own_code}"])
    return [*rows, *(f"    {line}" for line in wrap("; ".join(more), 114))]
