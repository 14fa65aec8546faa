"""Time to reduce one micro-batch, beside slime's and miles's own functions, run from their checkouts.

    python tools/bench/reducers.py --slime ~/slime --miles ~/miles --goals     # every size, about two minutes
    python tools/bench/reducers.py --slime ~/slime --sizes 8x4096 64x1024      # some sizes
    python tools/bench/reducers.py                                             # ours alone

*build* makes the reducer from the loss masks, *fwd+bwd* reduces the losses (and metrics) and differentiates, *whole* is
both, measured as one. What is counted once per step is outside, for all: our `StepTotals`, and their denominators where
they are given any.

*slime*, *miles*: their `get_sum_of_sample_mean`, called plainly, so that it sums its masks, or with
``--step-denominators`` as their `loss_function` calls it, with the step's mask sums. A metric is one more call of the
closure and `.clone().detach()`. Their parallel state is a stand-in, which answers sooner than the real one. Also left
out in their favour: the scaling of the loss, the count of tokens, and what keeps NaN out of the metrics.

Losses are a float32 leaf, masks int32, metrics float32 without gradient, and there are no ids. All are first checked
against float64. Then they take turns (`timing.take_turns`), in several passes over all cases, because a shared machine
is slower for a while at a time; ratios are of the fastest turns. *Busy elsewhere* is how many cores other processes
kept busy meanwhile: repeat a run where that is not near 0. *Parts* are those of our whole step of the first size, in
their order, each in the time that nine of ten steps took at least.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from timing import Others, flags, keep_freed_memory, peers, publish, take_turns
from torch import Tensor

from megatron_rl_loss import Samples, StepTotals, ZigzagResponse, make_pg_loss_reducer
from megatron_rl_loss.core import samples as samples_module
from megatron_rl_loss.core import totals_by_hand

PARTS = ("whole", "build", "fwd+bwd")
Reduce = Callable[[], tuple[Tensor, Sequence[Tensor]]]  # the reduced loss, connected to its graph, and the metrics
Build = Callable[[], Reduce]


@dataclass
class Case:
    samples: int
    length: int
    cp_size: int = 4
    metrics: int = 0
    goal: float | None = None  # whole, ours to the faster of theirs
    times: dict[str, list[float]] = field(default_factory=dict)
    busy: list[float] = field(default_factory=list)

    @property
    def size(self) -> str:
        return f"{self.samples}x{self.length}"


CASES = (
    *(Case(samples, 4096, cp_size, goal=1) for samples in (1, 4, 8) for cp_size in (1, 4)),
    Case(8, 4096, metrics=5, goal=1 / 2),
    Case(32, 2048, goal=1),
    Case(64, 1024, goal=1 / 4),
    Case(64, 1024, metrics=5, goal=1 / 8),
    *(Case(512, 8192, cp_size, metrics, goal=1) for cp_size in (1, 4) for metrics in (0, 5)),
)


class Data:
    """A micro-batch as slime and miles hold it, this rank's losses, and the expected results in float64."""

    def __init__(self, case: Case, device: str) -> None:
        generator = torch.Generator().manual_seed(1)

        def integers(low: int, high: int) -> list[int]:
            return torch.randint(low, high + 1, (case.samples,), generator=generator).tolist()

        self.response_lengths = integers(case.length // 2, case.length)
        self.total_lengths = [p + r for p, r in zip(integers(100, 500), self.response_lengths, strict=True)]
        self.cp_size, self.cp_rank = case.cp_size, min(1, case.cp_size - 1)  # rank 1 has two chunks of responses, apart
        masks = [(torch.rand(n, generator=generator) < 0.8).int() for n in self.response_lengths]
        self.weights = torch.cat(list(map(self._weights, masks, self.total_lengths))) / case.samples
        self.masks = [mask.to(device) for mask in masks]
        # Both frameworks give each sample's denominator as a 0-dim float32 tensor that the step has counted.
        self.mask_sums = list(torch.tensor([float(mask.sum()) for mask in masks], device=device))
        rows = torch.randn(1 + case.metrics, self.weights.numel(), generator=generator).to(device)
        self.losses = rows[0].clone().requires_grad_()
        self.metrics = [row.clone() for row in rows[1:]]
        self.totals = StepTotals.of(self.masks)

    def _weights(self, mask: Tensor, total: int) -> Tensor:
        """Weights of this rank's tokens in a sample's mean; a token belongs to the chunk of its logit."""
        chunk = math.ceil(total / (2 * self.cp_size))
        piece = (torch.arange(total - mask.numel(), total) - 1) // chunk
        mine = (piece == self.cp_rank) | (piece == 2 * self.cp_size - 1 - self.cp_rank) | (self.cp_size == 1)
        return mask[mine].double() / max(1, int(mask.sum()))

    def run(self, reduce: Reduce) -> tuple[Tensor, Sequence[Tensor]]:
        self.losses.grad = None
        loss, metrics = reduce()
        loss.backward()
        return loss, metrics

    def check(self, name: str, build: Build) -> None:
        """Exit if a function computes other numbers; theirs is the sum over samples, ours their mean."""
        loss, metrics = self.run(build())
        scale, weights = 1 if name == "ours" else 1 / len(self.masks), self.weights.to(self.losses.device)
        errors = []
        for reduced, values in zip((loss, *metrics), (self.losses, *self.metrics), strict=True):
            terms = values.detach().double() * weights
            errors.append(abs(float(reduced.detach()) * scale - float(terms.sum())) / float(terms.abs().sum()))
        assert self.losses.grad is not None
        errors.append(float((self.losses.grad.double() * scale - weights).abs().max() / weights.max()))
        if not max(errors) < 1e-6:
            raise SystemExit(f"{name} does not agree with float64 in the loss, each metric or the gradient: {errors}")


def ours(data: Data) -> Reduce:
    layout = ZigzagResponse(data.total_lengths, data.response_lengths)
    place: dict[str, Any] = {"totals": data.totals, "cp_rank": data.cp_rank, "cp_size": data.cp_size}
    reducer = make_pg_loss_reducer("sample_mean", Samples(data.masks, layout=layout), **place)
    if data.metrics:
        return lambda: (reducer(data.losses), reducer.sums(data.metrics))
    return lambda: (reducer(data.losses), ())


def theirs(cp_utils: Any, data: Data, **denominators: Any) -> Reduce:
    """Call their function, which sums its masks where it is not given their sums."""
    reducer = cp_utils.get_sum_of_sample_mean(data.total_lengths, data.response_lengths, data.masks, **denominators)
    return lambda: (reducer(data.losses), [reducer(values).clone().detach() for values in data.metrics])


def measure(case: Case, modules: dict[str, tuple[Any, Any]], place: SimpleNamespace, args: argparse.Namespace) -> None:
    """Measure a case once more."""
    data = Data(case, args.device)
    place.cp.rank, place.cp.size = data.cp_rank, data.cp_size
    builds: dict[str, Build] = {"ours": partial(ours, data)}
    for name, (cp_utils, _) in modules.items():
        keyword = {"slime": "sample_denoms", "miles": "denominators"}[name]
        builds[name] = partial(theirs, cp_utils, data, **({keyword: data.mask_sums} if args.step_denominators else {}))
    functions: dict[str, Callable[[], object]] = {}
    for name, build in builds.items():
        data.check(name, build)
        functions[f"{name} whole"] = lambda build=build: data.run(build())  # type: ignore[misc]
        functions[f"{name} build"] = build
        functions[f"{name} fwd+bwd"] = partial(data.run, build())
    others = Others()
    for name, times in take_turns(functions, args.seconds / args.passes, 3, args.device).items():
        case.times.setdefault(name, []).extend(times)
    case.busy.append(others.busy())


#: Parts of a step: where each begins and ends, and which of them are inside another.
PARTS_OF_STEP: tuple[tuple[str, Any, str], ...] = (
    ("layout", ZigzagResponse, "__init__"),
    ("samples", Samples, "__init__"),
    ("of these, types and shapes of masks", samples_module, "check_masks"),
    ("of these, entries of masks", samples_module, "is_sound"),
    ("cut over CP", Samples, "local"),
    ("weights", totals_by_hand, "WeightedSum"),
    ("totals cover the samples", totals_by_hand, "_check_covers"),
)


def parts_of_step(data: Data, steps: int = 1000) -> list[dict[str, Any]]:
    """Microseconds of each part of our step; one part at a time is timed, so that others are not slowed down."""
    rows = []
    for name, owner, attribute in PARTS_OF_STEP:
        original, taken = getattr(owner, attribute), list[float]()

        def timed(*args: Any, original: Any = original, taken: list[float] = taken, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = original(*args, **kwargs)
            taken.append(time.perf_counter() - began)
            return result

        setattr(owner, attribute, timed)
        for _ in range(steps):
            data.run(ours(data))
        setattr(owner, attribute, original)
        rows.append({"part": name, "us": sorted(taken)[len(taken) // 10] * 1e6})
    passes: dict[str, list[float]] = {"reducing": [], "backward": []}
    for _ in range(steps):
        reduce, data.losses.grad = ours(data), None
        began = time.perf_counter()
        loss, _ = reduce()
        then = time.perf_counter()
        loss.backward()
        passes["reducing"].append(then - began)
        passes["backward"].append(time.perf_counter() - then)
    return rows + [{"part": name, "us": sorted(times)[steps // 10] * 1e6} for name, times in passes.items()]


def row(case: Case, part: str, *, goals: bool) -> dict[str, Any]:
    ms = {name.split()[0]: min(times) for name, times in case.times.items() if name.endswith(part)}
    columns: dict[str, Any] = {"size": case.size, "cp": case.cp_size, "metrics": case.metrics} | ms
    if len(ms) > 1:
        columns["ours to the faster"] = ratio = ms["ours"] / min(ms[name] for name in ms if name != "ours")
        if goals and part == "whole" and case.goal is not None:
            columns |= {"at most": case.goal, "goal": "met" if ratio <= case.goal else "MISSED"}
    return columns | {"turns": len(case.times[f"ours {part}"]), "busy elsewhere": sum(case.busy) / len(case.busy)}


def chosen(sizes: Sequence[str]) -> list[Case]:
    """The cases of these sizes; a size that is not among them is measured at CP 4 without metrics and with 5."""
    cases: list[Case] = []
    for size in sizes:
        samples, length = map(int, size.split("x"))
        known = [case for case in CASES if case.size == size]
        cases += known or [Case(samples, length, metrics=metrics) for metrics in (0, 5)]
    return cases


def main() -> None:
    parser = flags(__doc__, "slime", "miles")
    sizes = list(dict.fromkeys(case.size for case in CASES))
    parser.add_argument("--sizes", nargs="+", default=sizes, metavar="SAMPLESxLENGTH", help="As in 8x4096.")
    parser.add_argument("--step-denominators", action="store_true", help="Give theirs the step's mask sums.")
    parser.add_argument("--seconds", type=float, default=10, help="Shortest time for each case.")
    parser.add_argument("--passes", type=int, default=3, help="Passes over all cases.")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of torch.")
    parser.add_argument("--goals", action="store_true", help="Print the goals, met or not.")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.device == "cpu":
        keep_freed_memory()
    place = SimpleNamespace(cp=SimpleNamespace(rank=0, size=1, group=None))
    modules, cases = peers(args, place), chosen(args.sizes)
    for case in cases * args.passes:
        measure(case, modules, place, args)
    titles = {part: f"{part}: fastest turn, ms" for part in PARTS}
    tables = {titles[part]: [row(case, part, goals=args.goals) for case in cases] for part in PARTS}
    first = Data(next((case for case in cases if case.cp_size > 1), cases[0]), args.device)
    tables[f"parts of a step of {len(first.masks)} samples, CP {first.cp_size}"] = parts_of_step(first)
    publish("reducers", args, tables, step_denominators=args.step_denominators)


if __name__ == "__main__":
    main()
