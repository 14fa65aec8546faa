"""Run other frameworks' own aggregation, and compare each token's weight with the rows of `engines.names`.

    python tools/check_names.py --packages FOLDER --checkout verl=~/verl --checkout roll=~/ROLL

`framework_losses.py` cuts each function out of its package or checkout. It gets two small steps in four cuts. The
weight of a token is the derivative of the step's loss by the token's loss, with the trainer's averages over
micro-batches and ranks applied. The weights are written to docs/names.json, and `name_of` says which mode they are.
"""

import argparse
import json
import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

from framework_losses import CUTS, DIVISOR, LOADERS, STEPS, Own, drawn, installed

from megatron_rl_loss.audit.judge import expected_weights, explain
from megatron_rl_loss.audit.simulation import measure
from megatron_rl_loss.audit.tokens import Floats, MeasuredStep, PlacedSamples, Split
from megatron_rl_loss.core.aggregation import Aggregation, resolve
from megatron_rl_loss.core.samples import Samples
from megatron_rl_loss.engines.names import FRAMEWORKS, NAMES, NUMBER, PeerName

RESULTS = ROOT / "docs" / "names.json"
TOLERANCE = 1e-5  # of weights in float32
EVEN = ("whole", "three micro-batches", "two ranks")  # micro-batches have equally many rows
ALL = [(number, cut) for number in range(len(STEPS)) for cut in CUTS]  # of both steps, in the order of docs/names.json


# ---- what the weights are


class Named(NamedTuple):
    """What measured weights are: in words, and whether they are one mode in every cut."""

    words: str
    exact: bool


#: The modes that are tried first, with their words.
MODES: dict[str, Aggregation] = {
    "token_mean": resolve("token_mean"),
    "sample_mean": resolve("sample_mean"),
    "sample_mean, active units": resolve("sample_mean", units="active"),
    "prompt_mean": resolve("prompt_mean"),
    "constant, divisor 1": resolve("constant", divisor=1),
    "constant, divisor 1, active units": resolve("constant", divisor=1, units="active"),
    "constant, divisor L": resolve("constant", divisor=DIVISOR),
    "constant, divisor L, active units": resolve("constant", divisor=DIVISOR, units="active"),
    "token_sum, divisor 1": resolve("token_sum", divisor=1),
    "token_sum, divisor L": resolve("token_sum", divisor=DIVISOR),
}


Weights = Sequence[Sequence[float | None]]  # by step and cut, as `ALL`, of each mask entry; None for NaN


def name_of(weights: Weights) -> Named:
    """The mode of these weights; else where it is one, or what else was done."""
    if any(None in row for row in weights):
        rest = name_of([[weight or 0.0 for weight in row] for row in weights])
        return Named(f"{rest.words}; NaN in a micro-batch without tokens", exact=False)
    measured = {where: _measured(STEPS[where[0]], where[1], row) for where, row in zip(ALL, weights, strict=True)}

    def mode_in(*cuts: str) -> str:
        """The mode of all steps in these cuts."""
        found = [step for (_, cut), step in measured.items() if cut in cuts]
        return next((words for words, mode in MODES.items() if all(_factor(step, mode) == 1 for step in found)), "")

    if words := mode_in(*CUTS):
        return Named(words, exact=True)
    if any((step.weights[step.tokens.mask == 0] != 0).any() for step in measured.values()):
        return Named("masked tokens have weight, too", exact=False)
    if words := mode_in(*EVEN):
        return Named(f"{words} where all micro-batches have equally many rows, else not", exact=False)
    tokens = [sum(map(sum, masks)) for masks in STEPS]
    found = [_factor(step, MODES["token_mean"]) for step in measured.values()]
    for words, count in (
        ("both steps, not of one", sum(tokens)),
        ("an average step, not of this one", sum(tokens) / 2),
    ):
        for more, power in (("", 0), (", and by micro-batches once more", 1)):
            splits = [step.split.num_microbatches**power for step in measured.values()]
            factors = [tokens[number] / count / split for (number, _), split in zip(ALL, splits, strict=True)]
            if np.allclose(found, factors, rtol=TOLERANCE, atol=0):
                return Named(f"divided by the tokens of {words}{more}", exact=False)
    groups_over_rows = len({row.prompt for row in drawn(STEPS[0], "whole").rows}) / len(STEPS[0])
    for words, mode in MODES.items():
        if np.allclose([_factor(step, mode) for step in measured.values()], groups_over_rows, rtol=TOLERANCE, atol=0):
            return Named(f"{words}, times groups over rows", exact=False)
    if words := _cause_of([*measured.values()]):
        return Named(words, exact=False)
    whole = mode_in("whole")
    widths = [max(map(len, masks)) for masks in STEPS]
    sums = [_factor(measured[number, "whole"], MODES["token_sum, divisor 1"]) for number in range(len(STEPS))]
    if not whole and np.allclose(sums, 1 / np.array(widths), rtol=TOLERANCE, atol=0):
        whole = "token_sum over the padded length"
    parts = [step for (_, cut), step in measured.items() if cut == "uneven"]
    cause = _cause_of(parts) or "none of the known causes"
    return Named(f"of a whole step {whole or 'no mode'}; in uneven parts {cause}", exact=False)


def _cause_of(steps: Sequence[MeasuredStep]) -> str:
    """The first known cause of all these weights, in words; empty for none."""
    causes = explain(steps, MODES["token_mean"], tolerance=TOLERANCE)
    return next((cause.describe({}) for cause in causes if cause.named), "")


def _measured(masks: Sequence[Sequence[int]], cut: str, weights: Sequence[float | None]) -> MeasuredStep:
    step, microbatches = drawn(masks, cut), []
    for place in dict.fromkeys(CUTS[cut]):
        rows = [row for row in step.rows if (row.dp_rank, row.microbatch) == place]
        samples = Samples([row.mask for row in rows], prompt_ids=[row.prompt for row in rows])
        holders = np.full(sum(len(row.mask) for row in rows), -1)
        microbatches.append(PlacedSamples(dp_rank=place[0], microbatch=place[1], samples=samples, cp_rank=holders))
    split = Split(num_microbatches=step.num_microbatches, dp_size=step.dp_size)
    return MeasuredStep(microbatches=tuple(microbatches), weights=np.array(weights, np.float64), split=split)


def _factor(step: MeasuredStep, mode: Aggregation) -> float:
    """The measured weights over the mode's: 1 where they agree, NaN where they are not proportional."""
    wanted = expected_weights(step, mode)
    on = wanted != 0
    ratio = step.weights[on] / wanted[on]
    if np.abs(step.weights[~on]).max(initial=0) > TOLERANCE * wanted.max() or np.ptp(ratio) > TOLERANCE * ratio.max():
        return math.nan
    factor = float(np.median(ratio))
    return 1.0 if abs(factor - 1) <= TOLERANCE else factor


def words_of(peer: PeerName) -> str:
    """A row in the words of `MODES`."""
    given = peer.divisor or (peer.name if peer.name == NUMBER else None)
    divisor = "" if given is None else f", divisor {given if isinstance(given, int) else 'L'}"
    return peer.mode + divisor + ", active units" * (peer.units == "active")


#: What a row says of a framework's own code: what `name_of` then says of its weights.
SEEN = {
    "counts of each micro-batch": "of a whole step",
    "averages micro-batches equally": "where all micro-batches have equally many rows",
    "tokens of the generation batch": "tokens of both steps",
    "tokens of an average window": "tokens of an average step",
    "tokens of all steps of the rollout batch, and": "tokens of both steps, not of one, and by micro-batches once more",
    "sums masked positions": "masked tokens have weight",
    "padded length": "padded length",
    "sums sequences": "of a whole step token_sum",
    "averages the sums": "of a whole step token_sum",
    "one token for each fully masked sample": "one for each fully masked sample",
    "valid responses without an active token": "sample_mean",
    "by the number of rows, not of rollouts": "times groups over rows",
}


#: What a row says of a framework's own code that weighs the tokens of a whole step, too, by a factor of its own.
SCALED = (
    *("tokens of the generation batch", "tokens of an average window", "tokens of all steps", "padded length"),
    *("sums sequences", "averages the sums", "one token for each fully masked sample", "valid responses"),
    *("sums masked positions", "by the number of rows"),
)


def agrees(peer: PeerName, named: Named, weights: Weights) -> bool:
    """True where the code does what the row says: the mode in every cut, or what the row says that it does instead.

    Where that depends on the cut, the weights of a whole step still are the mode's, or proportional to it.
    """
    if peer.refused.startswith("whatever"):
        return named == Named(peer.mode, exact=True)
    if not (peer.refused or peer.own_code):
        return named == Named(words_of(peer), exact=True)
    if not _is_of_mode(peer, weights):
        return False
    if peer.refused:
        return not named.exact
    named_in_code = [words in named.words for said, words in SEEN.items() if said in peer.own_code]
    has_nan = "NaN" in peer.own_code
    return named.words != words_of(peer) and any(named_in_code) and has_nan == ("NaN" in named.words)


def _is_of_mode(peer: PeerName, weights: Weights) -> bool:
    """True if a whole step's weights of active tokens are those of the row's mode; as `SCALED`, times a factor."""
    words = words_of(peer)
    if "not of rollouts" in peer.own_code:  # a rollout of several rows, which a drawn step's prompt stands for
        words = {"sample_mean": "prompt_mean"}.get(words, "")
    scaled = any(said in peer.own_code for said in SCALED)
    modes = [MODES[name] for name in (words, f"{words}, active units") if name in MODES]
    whole = [
        (_measured(STEPS[number], cut, [weight or 0.0 for weight in row]))
        for (number, cut), row in zip(ALL, weights, strict=True)
        if cut == "whole"
    ]
    for mode in modes:
        factors = [_factor(_of_active(step), mode) for step in whole]
        if (scaled and not any(map(math.isnan, factors))) or all(factor == 1 for factor in factors):
            return True
    return False


def _of_active(step: MeasuredStep) -> MeasuredStep:
    return replace(step, weights=np.where(step.tokens.mask != 0, step.weights, 0.0))


# ---- running


def weights_of(own: Own) -> list[list[float | None]]:
    """The weight of each mask entry in each of `ALL`, to seven digits."""
    found = []
    for number, cut in ALL:
        step = drawn(STEPS[number], cut)
        weights: Floats = measure(own.loss_of(step), own.call, step).weights
        found.append([None if np.isnan(weight) else float(f"{weight:.7g}") for weight in weights])
    return found


def run(packages: Path, checkouts: Mapping[str, Path]) -> dict[str, list[dict[str, Any]]]:
    """By ``framework:name``, oldest first: the versions that have the same weights, and these."""
    results: dict[str, list[dict[str, Any]]] = {}
    for framework, (package, load) in LOADERS.items():
        for version in FRAMEWORKS[framework].names:
            is_commit = "." not in version
            folder = checkouts.get(framework) if is_commit else installed(package, version, packages)
            if folder is None:
                print(f"{framework} {version}: read, not run", file=sys.stderr)
                continue
            for name, own in load(folder, version):
                entries = results.setdefault(f"{framework}:{name}", [])
                weights = weights_of(own)
                if not entries or entries[-1]["weights"] != weights:
                    entries.append({"versions": [], "weights": weights})
                entries[-1]["versions"].append(version)
    return results


def stored() -> dict[str, list[dict[str, Any]]]:
    """What `run` gave, from docs/names.json."""
    results: dict[str, list[dict[str, Any]]] = json.loads(RESULTS.read_text())["weights"]
    return results


def compared(results: Mapping[str, Any]) -> Iterator[tuple[str, str, PeerName, Named, Weights]]:
    """Each name and version that was run: alias, version, the row, what the weights are, and these."""
    for alias, spans in results.items():
        framework, _, name = alias.partition(":")
        for span in spans:
            named = name_of(span["weights"])
            for version in span["versions"]:
                peers = [peer for peer in NAMES if (peer.framework, peer.name) == (framework, name)]
                yield alias, version, next(peer for peer in peers if version in peer.versions), named, span["weights"]


def main(arguments: Sequence[str]) -> int:
    """Run what can be had, write docs/names.json and print the table; 1 if a row and its framework's code differ."""
    parser = argparse.ArgumentParser(description="Run other frameworks' own aggregation and compare it with our table.")
    parser.add_argument("--packages", type=Path, required=True, help="folder for packages, each in one of its own")
    parser.add_argument("--checkout", action="append", default=[], metavar="FRAMEWORK=FOLDER", help="of a commit")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # of the frameworks' own code
    checkouts = {
        name: Path(folder).expanduser() for name, _, folder in (given.partition("=") for given in options.checkout)
    }
    results = run(options.packages, checkouts)
    RESULTS.write_text(json.dumps({"masks": STEPS, "cuts": CUTS, "divisor": DIVISOR, "weights": results}) + "\n")
    wrong = 0
    for alias, version, peer, named, weights in compared(results):
        is_right = agrees(peer, named, weights)
        wrong += not is_right
        print(f"{'as the row' if is_right else 'DIFFERS':<12}{alias:<40}{version:<10}{named.words}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
