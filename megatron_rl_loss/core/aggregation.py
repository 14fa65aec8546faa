"""An `Aggregation` is a mode with its settings, and `weigh` gives the weight of each token by it.

`resolve` makes one of our names, other frameworks' (``verl:seq-mean-token-mean``) or functions. Of a user's function a
`fingerprint` says whether ranks have the same: what it gives in one small step.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss import load_further_tables
from megatron_rl_loss.core.collectives import StepGroups
from megatron_rl_loss.core.counting import COUNTINGS, StepTotals, Sum, UnitCounting, count_step
from megatron_rl_loss.core.errors import check_choice, check_mapping, did_you_mean, is_number, only_if
from megatron_rl_loss.core.ids import hashed
from megatron_rl_loss.core.masks import IN_CACHE, Array, Floats, to_array
from megatron_rl_loss.core.modes import Mode, ModeFunction, ModeInputs, find_mode
from megatron_rl_loss.core.samples import LocalTokens, Samples
from megatron_rl_loss.core.transfers import written_on_host

_GIVE_A_DIVISOR = (
    "Give a number of tokens, e.g. the generation budget: --loss-aggregation-divisor 40960, in code divisor=40960"
)


@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """A mode, a divisor and a unit counting; validated when it is made.

    Attributes:
        mode: how token losses become a step loss.
        divisor: D of a mode that takes one, else None.
        units: which units count, one of `COUNTINGS`.
        remedy: for a divisor that is missing, where it is given in another way than the policy loss's.
    """

    mode: Mode
    divisor: float | None = None
    units: UnitCounting = "all"
    remedy: InitVar[str] = ""

    def __post_init__(self, remedy: str) -> None:
        check_choice("unit counting", self.units, COUNTINGS)
        if self.divisor is None:
            if self.mode.divisor == "required":
                raise ValueError(
                    f"loss aggregation {self.mode.name!r} without a divisor: the mode divides by a constant. "
                    f"{remedy or _GIVE_A_DIVISOR}."
                )
            return
        shown = f"divisor {self.divisor!r} with loss aggregation {self.mode.name!r}"
        if self.mode.divisor == "refused":
            raise ValueError(f"{shown}: this mode takes none. Drop the divisor, or choose constant or token_sum.")
        if not is_number(self.divisor):
            raise TypeError(
                f"{shown}: a divisor must be a Python number. Pass a number of tokens; of a tensor, .item()."
            )
        if not 1e-30 < self.divisor < 1e30:
            raise ValueError(f"{shown}: a divisor must be between 1e-30 and 1e30. Pass a number of tokens.")
        object.__setattr__(self, "divisor", float(self.divisor))  # a Fraction has no format

    def __str__(self) -> str:
        """The mode, its divisor if it has one, and its unit counting where that is not the usual one."""
        divisor = "" if self.divisor is None else f" with divisor {self.divisor:g}"
        return f"{self.mode.name}{divisor}" + only_if(self.units != "all", f", counting {self.units} units")

    def describe(self) -> str:
        """All settings that are not the usual ones in a line, for the log."""
        divisor = "" if self.divisor is None else f", divisor {self.divisor:.15g}"
        units = "" if self.units == "all" else f", counting {self.units} units"
        return f"loss aggregation: {self.mode.name}{divisor}{units}"

    @cached_property
    def compared(self) -> str:
        """The settings that micro-batches and ranks must have alike.

        A function of the user's is in them with what it gives, since its name does not say what it does.
        """
        if self.mode.is_built_in:
            return self.describe()
        return f"{self.describe()} (giving {fingerprint(self) or 'what its name says'})"


#: Reads a name that is no mode's, with the divisor and the unit counting that the user gave: ours for all three. The
#: last argument is the remedy for a divisor that is missing; "" for the usual one.
ReadName = Callable[[str, float | None, UnitCounting | None, str], tuple[str, float | None, UnitCounting | None]]
_READERS: dict[str, ReadName] = {}


def register_names(project: str, read: ReadName) -> None:
    """Make ``project:name`` and ``project@version:name`` readable; for "" what has no colon and is no mode's.

    A reader raises ValueError for a name that it does not know or that no exact mode has.
    """
    _READERS[project] = read


def _reader_of(asked: str) -> ReadName:
    load_further_tables()
    project = asked.partition(":")[0].partition("@")[0] if ":" in asked else ""
    if project not in _READERS:
        known = list(filter(None, _READERS))
        raise ValueError(
            f"loss aggregation {asked!r}: there is no framework {project!r}. {did_you_mean(project, known)}."
        )
    return _READERS[project]


def resolve(
    asked: str | Mode | ModeFunction,
    *,
    divisor: float | None = None,
    units: UnitCounting | None = None,
    remedy: str = "",
) -> Aggregation:
    """The aggregation of a mode, its name, another framework's ``framework:name``, or a function of `ModeInputs`.

    >>> resolve("verl:seq-mean-token-sum-norm", divisor=4096).mode.name
    'constant'

    Args:
        divisor, units: None for what the user left out.
        remedy: as in `Aggregation`.

    Raises:
        ValueError: an unknown name; a name whose loss depends on the cut of the step; a divisor that is missing,
            unusable, without effect, or another than the name's. The message lists the names or the nearest mode.
        TypeError: an object that is neither a name nor a function; a divisor that is no number.
    """
    mode = find_mode(asked) if isinstance(asked, str) else asked
    if isinstance(asked, str) and mode is None:
        name, divisor, units = _reader_of(asked)(asked, divisor, units, remedy)
        return resolve(name, divisor=divisor, units=units, remedy=remedy)
    if not isinstance(mode, Mode):
        if not callable(mode):
            raise TypeError(
                f"loss aggregation {asked!r} ({type(asked).__name__}): it must be a mode, its name or a function of "
                "ModeInputs. Pass one of them; a Term takes a factor as coef=."
            )
        mode = Mode(name=_name_of(mode), function=mode)
    return Aggregation(mode=mode, divisor=divisor, units=units or "all", remedy=remedy)


def _name_of(function: Any) -> str:
    """Module and name of a function, or of the class of a callable object: the same on every rank."""
    function = function.func if isinstance(function, functools.partial) else function
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


#: A step of two micro-batches for `fingerprint`: masks of the first, which the mode is called with, and of the second.
_TRIAL = ([[1.0, 0.0, 1.0], [0.5, 1.0], [0.0, 0.0], [1.0] * 5], [[1.0, 1.0], [0.25], [1.0]])
#: Ids of these samples: rollouts and prompts, which a rollout is within, and those of any other name.
_TRIAL_IDS = {"rollout": ([0, 0, 1, 2], [2, 3, 4]), "prompt": ([0, 0, 0, 1], [1, 2, 3])}
_TRIAL_UNITS = ([0, 1, 1, 2], [2, 3, 3])
#: Keys that one mode asks for, one after the other.
_MOST_KEYS = 16


@cache
def _trial(keys: frozenset[str]) -> list[Samples]:
    """The micro-batches of the trial step, with ids of these names."""
    return [
        Samples(
            masks,
            ids={key: _TRIAL_IDS.get(key, _TRIAL_UNITS)[number] for key in sorted(keys - {"step", "sample"})},
            labels={"counted": [True, *[False] * (len(masks) - 1)]},
        )
        for number, masks in enumerate(_TRIAL)
    ]


def fingerprint(aggregation: "Aggregation") -> str:
    """What a mode gives in one small step that is always the same, in eight hexadecimal digits; "" if it gives nothing.

    They depend on the keys that the mode asks for, on the weights of the micro-batch and on the values of declared
    sums, as float32. A mode that reads labels, or ids in another way than by `ModeInputs`, gives nothing here: of such
    modes ranks compare the names alone.
    """
    mode, keys = aggregation.mode, frozenset(declared.by for declared in aggregation.mode.sums.values())
    for _ in range(_MOST_KEYS):
        trial_values, asked = _try_mode(aggregation, keys)
        if asked <= keys:
            break
        keys |= asked
    if trial_values is None:
        return ""
    named = zip(["weights", *sorted(mode.sums)], trial_values, strict=True)
    texts = [f"{name} {values.shape} {values.astype(np.float32).tobytes().hex()}" for name, values in named]
    return f"{hashed('; '.join([*sorted(keys), *texts]), 32):08x}"


@np.errstate(all="ignore")
def _try_mode(aggregation: "Aggregation", keys: frozenset[str]) -> tuple[list[Floats] | None, frozenset[str]]:
    """Weights and declared sums of the trial step with ids of these names, and the keys that the mode asked for."""
    mode, (batch, rest) = aggregation.mode, _trial(keys)
    inputs = ModeInputs(mode, batch, None, aggregation.divisor, aggregation.units)
    try:
        sums = [mode.sums[name] for name in sorted(mode.sums)]
        inputs.totals = count_step([batch, rest], StepGroups(), sums=sums)
        trial_values = [_beside(mode, inputs), *(declared.values(batch) for declared in sums)]
    except Exception:  # what is wrong with a mode is raised with the user's samples, by `rehearse`
        trial_values = None
    return trial_values, frozenset(inputs.asked)


#: The type of weights: `np.float32`, or `np.float64` for float64 losses.
FloatType = type[np.floating[Any]]
_TINY = float(np.finfo(np.float32).tiny)  # the smallest float32 that is not rounded to fewer bits
_LARGEST = float(np.finfo(np.float32).max)


def rehearse(aggregation: Aggregation, samples: Samples) -> ModeInputs:
    """Call the mode before the step is counted, so that wrong keys, labels and shapes raise already.

    Returns the inputs of the mode, which hold the keys that it `asked` for, and whether it `averages`: a mode that
    divides by numbers of tokens does not only sum losses.
    """
    inputs = ModeInputs(aggregation.mode, samples, None, aggregation.divisor, aggregation.units)
    if len(samples):
        _beside(aggregation.mode, inputs)  # of part of a step they need not be finite
    return inputs


def weigh(aggregation: Aggregation, local: LocalTokens, totals: StepTotals, dtype: FloatType = np.float32) -> Tensor:
    """The weight of every token that this rank holds, mask included: ``sum_t w_t * loss_t`` is its share of the loss.

    [num_local_tokens] of that type on the host, in the order of the layout; 0 where the mask is 0. Where every CP rank
    holds every token (`Gathered`), each has 1/cp_size of the weight.
    """
    if not len(local.samples):
        with torch.inference_mode(False):
            return torch.from_numpy(np.zeros(len(local), dtype))
    inputs = ModeInputs(aggregation.mode, local.samples, totals, aggregation.divisor, aggregation.units)
    return times_mask(local, _beside(aggregation.mode, inputs), f"the mode {aggregation.mode.name!r}", dtype)


def times_mask(local: LocalTokens, beside: Floats, of: str, dtype: FloatType = np.float32) -> Tensor:
    """The mask times weights beside it (as `_beside` gives them), as that type and shared by CP copies.

    ValueError for a weight of an active token that is not finite, below 0, or that float32 rounds to 0.
    """
    # float64 until all divisions are done, then rounded once.
    exact = beside if beside.ndim == 1 else local.of(beside[0])
    if (copies := local.copies) > 1:
        exact = exact / copies
    # Times 0 or 1, numbers within these bounds, which NaN is not, break no rule.
    is_within = exact.size and np.minimum.reduce(exact) >= _TINY and np.maximum.reduce(exact) <= _LARGEST
    if not (is_within and local.samples.holds_flags):
        exact = _checked(local, exact, beside.ndim, of)
    numbers = exact.astype(dtype)
    if not torch.is_inference_mode_enabled():
        return _products(local, numbers, beside.ndim)
    with torch.inference_mode(False):  # they serve in training too
        return _products(local, numbers, beside.ndim)


def _products(local: LocalTokens, numbers: Array, ndim: int) -> Tensor:
    """The masks times the numbers beside them, written once, into memory that is copied to a device as it is."""
    mask = local.mask.astype(numbers.dtype, copy=False)
    if torch.compiler.is_compiling():
        return torch.from_numpy(mask * _at_tokens(local, numbers, ndim))
    products, weights = written_on_host(len(local), numbers.dtype)
    if ndim == 2 or len(numbers) == 1 or len(mask) <= IN_CACHE:
        np.multiply(mask, _at_tokens(local, numbers, ndim), out=products)
        return weights
    ends = local.counts.cumsum()
    begin = first = 0
    while begin < len(mask):
        last = max(int(ends.searchsorted(begin + IN_CACHE, "right")), first + 1)
        end = int(ends[last - 1])
        token_numbers = numbers[first:last].repeat(local.counts[first:last])
        np.multiply(mask[begin:end], token_numbers, out=products[begin:end])
        begin, first = end, last
    return weights


def _at_tokens(local: LocalTokens, numbers: Array, ndim: int) -> Array:
    """The number beside the mask of each token: its sample's (ndim 1) or its own (ndim 2); of one sample one number."""
    return numbers if ndim == 2 or len(numbers) == 1 else local.spread(numbers)


@np.errstate(all="ignore")  # what is not finite is refused
def _checked(local: LocalTokens, exact: Floats, ndim: int, of: str) -> Floats:
    """The numbers beside the mask, where one may break a rule; beside masks that are 0 they are 0."""
    exact = np.where((local.samples.mask_sums if ndim == 1 else local.mask) == 0, 0, exact)
    rounded = exact.astype(np.float32)
    is_finite, vanishes = np.isfinite(rounded).all(), ((np.abs(exact) < _TINY) & (exact != 0)).any()
    if not local.samples.holds_flags:  # a product of two large or small numbers need not be what they are
        token_numbers = _at_tokens(local, rounded, ndim)
        weights = local.mask.astype(np.float32, copy=False) * token_numbers
        is_finite &= np.isfinite(weights).all()
        vanishes |= ((np.abs(weights) < _TINY) & (local.mask != 0) & (token_numbers != 0)).any()
    if not is_finite:
        raise ValueError(
            f"token weights with NaN or Inf from {of}: weights must be finite where a mask is not 0. Use 0 to leave "
            "tokens out."
        )
    if (rounded < 0).any():
        raise ValueError(
            f"token weights down to {rounded.min():.3g} from {of}: a mode averages losses, and a weight below 0 would "
            "train a token away from its loss. Return weights >= 0; put a sign into the losses, or into a Term's coef."
        )
    if vanishes:
        raise ValueError(
            f"a token weight from {of} that float32 rounds to 0: the token would silently not be trained. Use a "
            "smaller divisor, or larger mask values."
        )
    return exact


def _beside(mode: Mode, inputs: ModeInputs) -> Floats:
    """Weights that a mode returns: one number per sample, [num_samples], or per token, [1, total_tokens]."""
    samples = inputs.batch
    if mode.is_built_in:
        returned = mode.function(inputs)  # divides by nothing that is 0
    else:
        with np.errstate(all="ignore"):
            returned = mode.function(inputs)
    if type(returned) is np.ndarray and returned.dtype == np.float64 and returned.shape == (len(samples),):
        return returned  # the usual case
    if isinstance(returned, np.ndarray) and returned.dtype == object:  # of ids per token
        returned = list(returned)
    if isinstance(returned, (list, tuple)) and all(np.ndim(row) == 1 for row in returned):
        return samples.in_buffer([to_array(row) for row in returned]).reshape(1, -1)
    array = to_array(returned)
    if array.dtype.kind not in "fiu" or array.shape not in ((), (len(samples),)):
        what = "None" if returned is None else f"{array.dtype} of shape {array.shape}"
        raise TypeError(
            f"the mode {mode.name!r} returned {what}: it must return a number, "
            f"{len(samples)} numbers (one per sample), or a list of rows (one per sample, one weight per token). Leave "
            "the mask out: the library multiplies by it."
        )
    return array.astype(np.float64, copy=False) if array.ndim else np.full(len(samples), float(array))


@dataclass(frozen=True)
class LossModes:
    """The aggregations of the policy loss and, by name, of terms; a term without one has the policy loss's."""

    policy: Aggregation
    terms: Mapping[str, Aggregation] = field(default_factory=dict)

    @classmethod
    def resolve(
        cls,
        mode: str | Mode | ModeFunction,
        *,
        divisor: float | None = None,
        units: UnitCounting | None = None,
        terms: Mapping[str, str | Mode | ModeFunction | None] | None = None,
    ) -> "LossModes":
        """The modes by names or functions; raises as `make_pg_loss_reducer`."""
        check_mapping("terms", terms or {}, 'Pass {"kl": "token_mean"}')
        return cls(resolve(mode, divisor=divisor, units=units)).with_terms(terms or {})

    def with_terms(self, modes: Mapping[str, str | Mode | ModeFunction | None]) -> "LossModes":
        """With a mode for each term by name; None leaves the term the policy loss's."""
        for name in modes:
            if name in ("pg", "loss", ""):
                raise ValueError(
                    f"terms with {name!r}: terms are those beside the policy loss, whose mode is the plan's own. Pass "
                    'that as the mode, and name the term for what it is, such as "kl".'
                )
        declared = {name: self.term_aggregation(name, mode) for name, mode in modes.items() if mode is not None}
        return replace(self, terms={**self.terms, **declared})

    def term_aggregation(
        self,
        name: str,
        mode: str | Mode | ModeFunction | None = None,
        *,
        divisor: float | None = None,
        units: UnitCounting | None = None,
    ) -> Aggregation:
        """The aggregation of a term: by the term's own mode, else the declared one, else the policy loss's.

        A term counts the units that the policy loss counts; another framework's name brings its own counting. A term
        with the policy loss's mode has the same divisor. ValueError for a divisor or a counting without a mode.
        """
        if mode is None:
            if divisor is not None or units is not None:
                raise ValueError(
                    f"the term {name!r} with units or a divisor and no mode: both are settings of a mode. Pass the "
                    "term's mode too."
                )
            return self.terms.get(name, self.policy)
        is_peer = isinstance(mode, str) and ":" in mode
        if divisor is None and mode in (self.policy.mode, self.policy.mode.name, self.policy.mode.function):
            divisor = self.policy.divisor
        remedy = f"Pass Term(values, {mode!r}, divisor=...), or take another mode"  # flags give the policy loss's
        units = units or (None if is_peer else self.policy.units)
        try:
            return resolve(mode, divisor=divisor, units=units, remedy=remedy)
        except ValueError as error:
            raise ValueError(f"the term {name!r}: {error}") from error

    def describe(self) -> str:
        """All settings that ranks must have alike, in a line."""
        named = [(name, aggregation.compared) for name, aggregation in sorted(self.terms.items())]
        terms = [f"term {name}: {compared.removeprefix('loss aggregation: ')}" for name, compared in named]
        return "; ".join([self.policy.compared, *terms])

    @property
    def sums(self) -> list[Sum]:
        """The sums that the modes declare, each once, in the same order on every rank."""
        modes = [self.policy.mode, *(aggregation.mode for _, aggregation in sorted(self.terms.items()))]
        return list(dict.fromkeys(declared for mode in modes for _, declared in sorted(mode.sums.items())))

    def rehearse(self, samples: Samples, masks: Sequence[str] = ()) -> set[str]:
        """The keys that the modes ask for; ValueError for samples that lack a key or a label, before the count."""
        asked = rehearse(self.policy, samples).asked
        for aggregation in self.terms.values():
            for name in (None, *masks):
                asked |= rehearse(aggregation, samples.with_mask(name)).asked
        return asked
