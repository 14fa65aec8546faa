"""A reading in words, made of its exponents."""

from dataclasses import replace

import numpy as np

from megatron_rl_loss.audit.counts import COUNTINGS, SCOPES, Count
from megatron_rl_loss.audit.fit import Fitter, Reading
from megatron_rl_loss.audit.mode_table import MODE_TABLE, peers_of
from megatron_rl_loss.audit.places import Places, Shape
from megatron_rl_loss.audit.tokens import Floats

#: Where a constant often comes from.
_HINTS = {
    "CP": "Megatron multiplies a 2-tuple by CP already, and a summed (per-token) gradient needs no factor",
    "1/CP": "gradients of CP ranks are summed and then averaged, or tokens were counted on ranks that all hold them",
    "1/DP": "DDP's mean over its ranks was not undone",
    "1/DP²": "a denominator has x DP where / DP was meant",
    "K": "summed over micro-batches where their mean was meant, or divided by their number after the backward pass",
    "1/K": "the schedule divides by the number of micro-batches, and nothing undoes it",
    "1/PP": "pipeline stages were counted as ranks that have other tokens",
    "PP": "pipeline stages were counted as ranks that have other tokens",
    "T": "never divided by the number of tokens: the count was dropped from the tuple, or its division does nothing",
    "T/DP": "never divided by the number of tokens, while DDP took the mean over its ranks",
    "CP·T/K": "a 2-tuple under per-token loss: no token is counted, so nothing divides by their number",
    "1/T": "divided by the number of tokens twice",
    "N": "never divided by the number of units",
    "N/rows": "rows were counted, not rollouts",
    "N/N_active": "fully masked units were left out",
    "N_active/N": "fully masked units were counted",
    "K/steps_per_generation": "the denominator is the generation batch's, not the optimizer step's",
}


def with_words(reading: Reading, fitter: Fitter, ratio: Floats) -> Reading:
    """The reading of measured / asked, [num_active], with its text."""
    mode = _as_mode(reading, fitter, ratio * fitter.expected_weight) if reading.counts else ""
    return replace(reading, text=mode or f"{_counts(reading, fitter)}{_rest(reading, fitter)}")


def place_reading(shape: Shape, places: Places, fitter: Fitter) -> Reading | None:
    """Most places weigh alike and a few apart: that as a reading, if it is so."""
    if shape == "token" or len(places) < 2:
        return None
    values = np.array([value for _, value in places])
    usual = float(np.median(values)) if len(values) > 2 else 1.0
    apart = np.abs(values - usual) > fitter.tolerance * usual
    if not 0 < 2 * apart.sum() < len(values) + (len(values) == 2):
        return None
    odd = tuple((place, value / usual) for (place, value), other in zip(places, apart, strict=True) if other)
    factors = np.array([factor for _, factor in odd])
    alike = np.ptp(factors) <= fitter.tolerance * factors.max()
    whole = bool((np.abs(factors - np.round(factors)) <= fitter.tolerance * factors).all() and factors.min() > 1)
    shown = [f"{place}: x {factor:.4g}" for place, factor in odd[:4]]
    words = {"microbatch": "micro-batch", "cp_place": "CP rank's piece"}.get(shape, shape)
    text = f"one factor for each {words}: {'; '.join(shown)}"
    text += f" and {len(odd) - 4} more" * (len(odd) > 4) + ", as if counted several times" * whole
    reading = Reading(places=odd, factor=usual, cost=0.5 if alike or whole else 1.5)
    if abs(usual - 1) <= fitter.tolerance:
        return replace(reading, text=f"{text}; all others as asked")
    rest = fitter.readings(np.full(len(fitter.active), usual))[0]  # one factor for all, by its simplest name
    reading = replace(reading, constant=rest.constant, named=rest.named, cost=reading.cost + 1 + rest.cost / 4)
    return replace(reading, text=f"{text}; all{_rest(reading, fitter)}")


def _as_mode(reading: Reading, fitter: Fitter, weights: Floats) -> str:
    """The mode of the table that the weights are, perhaps times the reading's constant."""
    for name, mode in MODE_TABLE.items():
        if name == fitter.aggregation.mode.name or (mode.unit == "prompt" and not fitter.cells.has_prompts):
            continue
        for counting in ("all", "active"):
            shape = np.ones(len(weights))
            if not mode.takes_divisor:
                shape /= fitter.value(Count("tokens", unit="scope" if mode.unit == "step" else mode.unit))
            if mode.unit != "step":
                shape /= fitter.value(Count(mode.unit, counting=counting))
            ratios = weights / shape
            if np.ptp(ratios) > fitter.tolerance * ratios.max():
                break
            times, divisor = float(np.median(ratios)), None
            if mode.takes_divisor:
                divisor, times = float(f"{1 / times:.6g}"), 1.0
                if divisor < 2 or abs(divisor - round(divisor)) > fitter.tolerance * divisor:
                    break
            exact = abs(times - 1) <= fitter.tolerance
            if exact or (reading.named and abs(times / reading.factor - 1) <= fitter.tolerance):
                given = "" if divisor is None else f" with divisor {divisor:g}"
                units = f", unit counting {counting}" if mode.unit != "step" else ""
                names = _also(aliases(name, counting, divisor)[:3])
                return f"the weights of {name}{given}{units}{names}{'' if exact else _rest(reading, fitter)}"
    return ""


def _counts(reading: Reading, fitter: Fitter) -> str:
    """What it multiplies and divides by."""
    own = fitter.own_size
    divided = [count for count, power in reading.counts if power < 0]
    times = [count.words for count, power in reading.counts if power > 0 and count != own]
    parts = []
    if divided:
        more = "once more " if reading.baseline == "plain" and reading.formula != "L" else ""
        parts.append(f"divided {more}by {' and by '.join(count.words for count in divided)}")
        if reading.baseline != "plain" and any(count.scope != "step" and count.unit == "scope" for count in divided):
            parts[-1] += ", not of the step"
    if times:
        parts.append(f"multiplied by {' and by '.join(times)}")
    if (own, 1) in reading.counts and own is not None:
        parts.append(f"not divided by {own.words}")
    if not parts:
        return "all tokens"
    plainly = reading.baseline != "plain" and not times
    return "; ".join(parts) + _also(_known_as(divided, fitter) if plainly else [])


def _known_as(divided: list[Count], fitter: Fitter) -> list[str]:
    """What other frameworks call such counts of a part."""
    local = [count for count in divided if count.scope != "step"]
    if len(divided) != 1 or not local or fitter.mode is None:
        return []
    mode = "token_mean" if local[0].what == "tokens" and local[0].unit == "scope" else fitter.aggregation.mode.name
    by_design = local[0] == Count("tokens", "microbatch")
    names = [f"{peer.framework}:{peer.name}" for peer in peers_of(mode, refused=True) if by_design]
    return [*names, *(f"{alias} over the counts of {SCOPES[local[0].scope][0]}" for alias in aliases(mode, "all")[:1])]


def _rest(reading: Reading, fitter: Fitter) -> str:
    """The constant."""
    if abs(reading.factor - 1) <= fitter.tolerance:
        return ""
    if reading.formula == "L":
        return ", not by the divisor"
    hint = _HINTS.get(reading.formula, "")
    if reading.formula.startswith("T/T_"):
        hint = f"counted were {COUNTINGS[reading.formula.removeprefix('T/T_')]}"
    elif not reading.named:
        hint = _as_count(reading, fitter)
    elif reading.counts and reading.formula in ("K", "DP·K", "DP·CP·K", "DP"):
        hint = "the parts' means are added up, not averaged"
    named = f" = {reading.formula}" if reading.formula else ""
    return f", x {reading.factor:.6g}{named}" + (f": {hint}" if hint else "")


def _as_count(reading: Reading, fitter: Fitter) -> str:
    """A constant without a name: the whole number that stands in the place of a count or of the divisor."""
    scalars = fitter.scalars
    for name, what in (("L", "the divisor"), ("T", "the tokens of the step"), ("N", "the number of units")):
        other = scalars.get(name, 0.0) / reading.factor
        whole = round(other)
        if whole >= 1 and abs(other - whole) <= min(0.05, fitter.tolerance * other):
            no_count = "" if name == "L" else ", which is no count of this step"
            return f"as if divided by {whole}, not by {what}, {scalars[name]:g}{no_count}"
    return "no size or count of the step"


def aliases(mode: str, counting: str, divisor: float | None = None) -> list[str]:
    """What other frameworks call a mode with that unit counting and divisor."""
    return [
        f"{peer.framework}:{peer.name}"
        for peer in peers_of(mode)
        if (MODE_TABLE[mode].unit == "step" or peer.units in (None, counting))
        and (divisor is None or peer.divisor == divisor or (isinstance(peer.divisor, str) and divisor != 1))
    ]


def _also(names: list[str]) -> str:
    return f" ({', '.join(names)})" if names else ""
