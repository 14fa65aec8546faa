"""What reducing one micro-batch costs, beside slime's and miles's own functions, run from their checkouts.

    python tools/bench/reducers.py --slime ~/slime --miles ~/miles --goals     # every size, about two minutes
    python tools/bench/reducers.py --slime ~/slime --sizes 8x4096 64x1024      # some sizes
    python tools/bench/reducers.py                                             # ours and the floor only

*build* makes the reducer from the loss masks, *fwd+bwd* reduces the losses (and metrics) and differentiates, *whole* is
both, measured as one. What is counted once a step is outside, for all: our `StepTotals`, and their denominators where
they are given any.

- *slime*, *miles*: their `get_sum_of_sample_mean`, called plainly (``--denominators own``), so that it sums its masks,
  or as their `loss_function` calls it, with the step's mask sums (``--denominators step``). A metric is one more call
  of the closure and `.clone().detach()`. What their file imports gets stand-ins that know the CP rank and nothing else,
  and answer sooner than the real ones. Also left out in their favour: the scaling of the loss, the count of tokens, and
  what keeps NaN out of the metrics.
- *floor*: one read of the masks and one write of this rank's weights (build); one read of the losses, one write of the
  gradient and one read of each metric (fwd+bwd).

Losses are a float32 leaf, masks int32, metrics float32 without gradient, and there are no ids. All are first checked
against float64. Then they take turns, in several passes over all cases, because a shared machine is slower for a while
at a time. A turn of one of them is as many calls as fill 4 ms (at least one), timed as one, after one call that warms
the caches; ratios are of the fastest turns. *Busy elsewhere* is how many cores other processes kept busy meanwhile:
repeat a run where that is not near 0.
"""

import argparse
import importlib.util
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from tabulate import tabulate
from timing import busy_elsewhere, commit_of, keep_freed_memory, machine, take_turns
from torch import Tensor

import megatron_rl_loss
from megatron_rl_loss import StepTotals, ZigzagResponse, make_pg_loss_reducer

PARTS = ("whole", "build", "fwd+bwd")
DENOMINATORS = {"own": "theirs sum their masks, a plain call", "step": "theirs are given the step's mask sums"}
Reduce = Callable[[], tuple[Tensor, Sequence[Tensor]]]  # the reduced loss, connected to its graph, and the metrics


@dataclass(frozen=True)
class Case:
    samples: int
    length: int
    cp_size: int = 4
    metrics: int = 0
    goal: float | None = field(default=None, compare=False)  # whole, ours to the faster of theirs

    @property
    def size(self) -> str:
        return f"{self.samples}x{self.length}"


CASES = (
    Case(1, 4096, goal=1.5),
    Case(4, 4096, goal=1),
    Case(8, 4096, goal=1),
    Case(8, 4096, metrics=5, goal=1 / 2),
    Case(32, 2048, goal=1),
    Case(64, 1024, goal=1 / 4),
    Case(64, 1024, metrics=5, goal=1 / 8),
    *(Case(512, 8192, cp_size, metrics, goal=1) for cp_size in (1, 4) for metrics in (0, 5)),
)


@dataclass(frozen=True)
class Contestant:
    """Someone's reducer: `build` makes it, and what it returns runs it; `scale` turns the result into a step loss."""

    build: Callable[[], Reduce]
    scale: float = 1.0


class Data:
    """A micro-batch as slime and miles hold it, this rank's losses, and what must come out, in float64."""

    def __init__(self, case: Case, device: str, equal: bool) -> None:
        generator = torch.Generator().manual_seed(1)

        def integers(low: int, high: int) -> list[int]:
            return torch.randint(low, high + 1, (case.samples,), generator=generator).tolist()

        self.response_lengths = integers(case.length if equal else case.length // 2, case.length)
        prompts = [300] * case.samples if equal else integers(100, 500)
        self.total_lengths = [p + r for p, r in zip(prompts, self.response_lengths, strict=True)]
        self.cp_size, self.cp_rank = case.cp_size, min(1, case.cp_size - 1)  # rank 1 has two chunks of responses, apart
        masks = [(torch.rand(n, generator=generator) < 0.8).int() for n in self.response_lengths]
        self.weights = torch.cat(list(map(self._weights, masks, self.total_lengths))) / case.samples
        self.masks = [mask.to(device) for mask in masks]
        # Both frameworks give each sample's denominator as a 0-dim float32 tensor that the step has counted.
        self.mask_sums = list(torch.tensor([float(mask.sum()) for mask in masks], device=device))
        rows = torch.randn(1 + case.metrics, self.weights.numel(), generator=generator).to(device)
        self.losses = rows[0].clone().requires_grad_()
        self.metrics = [row.clone() for row in rows[1:]]
        self.totals = StepTotals.from_loss_masks(self.masks)

    def _weights(self, mask: Tensor, total: int) -> Tensor:
        """Of this rank's tokens of a sample in its mean: a token belongs to the chunk of the logit that predicts it."""
        chunk = math.ceil(total / (2 * self.cp_size))
        piece = (torch.arange(total - mask.numel(), total) - 1) // chunk
        mine = (piece == self.cp_rank) | (piece == 2 * self.cp_size - 1 - self.cp_rank) | (self.cp_size == 1)
        return mask[mine].double() / max(1, int(mask.sum()))

    def run(self, reduce: Reduce) -> tuple[Tensor, Sequence[Tensor]]:
        self.losses.grad = None
        loss, metrics = reduce()
        loss.backward()
        return loss, metrics

    def check(self, name: str, contestant: Contestant) -> None:
        """Refuse to time what computes something else."""
        loss, metrics = self.run(contestant.build())
        weights = self.weights.to(self.losses.device)
        if len(metrics) != len(self.metrics):
            raise SystemExit(f"{name} returned {len(metrics)} metrics of {len(self.metrics)}")
        for what, found, values in zip(
            ("loss", *("metric" for _ in metrics)), (loss, *metrics), (self.losses, *self.metrics), strict=True
        ):
            terms = values.detach().double() * weights
            error = abs(float(found.detach()) * contestant.scale - float(terms.sum())) / float(terms.abs().sum())
            if not error < 1e-6:
                raise SystemExit(f"{name} does not agree with float64 in a {what}: error {error}")
        gradient = self.losses.grad
        assert gradient is not None
        error = float((gradient.double() * contestant.scale - weights).abs().max() / weights.max())
        if not error < 1e-6:
            raise SystemExit(f"{name} does not agree with float64 in the gradient: error {error}")


def ours(data: Data) -> Contestant:
    place: dict[str, Any] = {"totals": data.totals, "cp_rank": data.cp_rank, "cp_size": data.cp_size}

    def build() -> Reduce:
        layout = ZigzagResponse(data.total_lengths, data.response_lengths)
        reducer = make_pg_loss_reducer("sample_mean", data.masks, layout=layout, **place)
        if data.metrics:
            return lambda: reducer.with_metrics(data.losses, data.metrics)
        return lambda: (reducer(data.losses), ())

    return Contestant(build)


def theirs(name: str, module: ModuleType, data: Data, denominators: str) -> Contestant:
    """Their function as their `loss_function` and `policy_loss_function` use it."""
    keyword = {"slime": "sample_denoms", "miles": "denominators"}[name]
    given = {keyword: data.mask_sums} if denominators == "step" else {}

    def build() -> Reduce:
        reducer = module.get_sum_of_sample_mean(data.total_lengths, data.response_lengths, data.masks, **given)
        return lambda: (reducer(data.losses), [reducer(values).clone().detach() for values in data.metrics])

    return Contestant(build, scale=1 / len(data.masks))


def load_theirs(name: str, checkout: Path, place: SimpleNamespace) -> ModuleType:
    """Run the one file of a checkout that defines their function, with stand-ins for all but torch that it imports."""
    found = [path for path in checkout.rglob("cp_utils.py") if "def get_sum_of_sample_mean(" in path.read_text()]
    if len(found) != 1:
        raise SystemExit(f"--{name} {checkout}: {len(found)} files cp_utils.py with get_sum_of_sample_mean, not 1")
    package, parallel = ModuleType(f"{name}_checkout"), ModuleType(f"{name}_checkout.parallel")
    vars(parallel)["get_parallel_state"] = lambda: place
    core = ModuleType("megatron.core")
    vars(core)["mpu"] = SimpleNamespace(
        get_context_parallel_rank=lambda: place.cp.rank,
        get_context_parallel_world_size=lambda: place.cp.size,
        get_context_parallel_group=lambda: place.cp.group,
    )
    stand_ins: dict[str, Any] = {module.__name__: module for module in (package, parallel, core)}
    stand_ins |= {"megatron": ModuleType("megatron"), "fla": None}  # None: cannot be imported, which is foreseen
    before = {key: sys.modules[key] for key in stand_ins if key in sys.modules}
    spec = importlib.util.spec_from_file_location(f"{name}_checkout.cp_utils", found[0])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.update(stand_ins)
    try:
        spec.loader.exec_module(module)
    finally:
        for key in stand_ins:
            del sys.modules[key]
        sys.modules.update(before)
    return module


def floor(data: Data) -> dict[str, Callable[[], object]]:
    masks = torch.cat(data.masks).float()  # as many bytes as the int32 masks
    weights, losses = data.weights.float().to(masks.device), data.losses.detach()
    gradient = torch.ones((), device=masks.device)

    def build() -> None:
        torch.dot(masks, masks)
        torch.ones_like(weights)

    def run() -> None:
        for values in (losses, *data.metrics):
            torch.dot(values, weights)
        torch.mul(weights, gradient)

    return {"whole": lambda: (build(), run()), "build": build, "fwd+bwd": run}  # type: ignore[func-returns-value]


def parts(data: Data, contestant: Contestant) -> dict[str, Callable[[], object]]:
    build, reduce = contestant.build, contestant.build()
    return {"whole": lambda: data.run(build()), "build": build, "fwd+bwd": lambda: data.run(reduce)}


@dataclass
class Measured:
    """What all passes over a case have found."""

    case: Case
    tokens: int = 0
    local_tokens: int = 0
    times: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0
    elsewhere: float = 0

    def once_more(self, modules: Mapping[str, ModuleType], place: SimpleNamespace, args: argparse.Namespace) -> None:
        data = Data(self.case, args.device, args.equal)
        self.tokens, self.local_tokens = sum(data.response_lengths), data.losses.numel()
        place.cp.rank, place.cp.size = data.cp_rank, data.cp_size
        contestants = {"ours": ours(data)}
        contestants |= {name: theirs(name, module, data, args.denominators) for name, module in modules.items()}
        functions: dict[str, Callable[[], object]] = {}
        for name, contestant in contestants.items():
            data.check(name, contestant)
            functions |= {f"{name} {part}": function for part, function in parts(data, contestant).items()}
        functions |= {f"floor {part}": function for part, function in floor(data).items()}
        began, elsewhere = time.perf_counter(), busy_elsewhere()
        for name, times in take_turns(functions, args.seconds / args.passes, args.repeats, args.device).items():
            self.times.setdefault(name, []).extend(times)
        self.seconds += time.perf_counter() - began
        self.elsewhere += math.nan if elsewhere is None else (busy_elsewhere() or 0) - elsewhere

    def result(self) -> dict[str, Any]:
        busy = round(self.elsewhere / self.seconds, 2)
        found: dict[str, Any] = {"size": self.case.size} | asdict(self.case)
        found |= {"tokens": self.tokens, "local_tokens": self.local_tokens, "turns": len(self.times["ours whole"])}
        found |= {"busy_elsewhere": busy, "ms": {}, "ratios": {}}
        for part in PARTS:
            of = {name.removesuffix(f" {part}"): times for name, times in self.times.items() if name.endswith(part)}
            ms = {name: {"min": min(times), "median": statistics.median(times)} for name, times in of.items()}
            found["ms"][part] = ms
            found["ratios"][part] = {name: ms["ours"]["min"] / ms[name]["min"] for name in ms if name != "ours"}
        return found


def to_faster(result: dict[str, Any]) -> float | None:
    """Whole, ours to the faster of theirs: the greatest of the ratios."""
    ratios = result["ratios"]["whole"]
    return max((ratios[name] for name in ratios if name != "floor"), default=None)


def table(results: Sequence[dict[str, Any]], part: str) -> str:
    rows = []
    for result in results:
        row = {"size": result["size"], "cp": result["cp_size"]}
        row |= {"metrics": result["metrics"], "tokens": result["tokens"], "of this rank": result["local_tokens"]}
        for name, ms in result["ms"][part].items():
            row |= {name: ms["min"], f"{name} median": ms["median"]}
        row |= {"turns": result["turns"], "busy elsewhere": result["busy_elsewhere"]}
        rows.append(row | {f"ours/{name}": ratio for name, ratio in result["ratios"][part].items()})
    title = f"{part}: fastest and median turn, ms; ratios of the fastest"
    return f"{title}\n{tabulate(rows, headers='keys', floatfmt='.3g')}\n"


def goals(results: Sequence[dict[str, Any]]) -> str:
    rows = []
    for result in results:
        ratio, goal = to_faster(result), result["goal"]
        if goal is not None:
            outcome = "not measured" if ratio is None else "met" if ratio <= goal else "MISSED"
            case = f"{result['size']} cp{result['cp_size']}, {result['metrics']} metrics"
            rows.append({"whole, ours / faster of theirs": case, "at most": goal, "is": ratio, "": outcome})
    return f"goals\n{tabulate(rows, headers='keys', floatfmt='.3g')}\n"


def plot(results: Sequence[dict[str, Any]], about: Mapping[str, Any], path: Path) -> None:
    """One marker a size and kind, of its ratio, and a bar at its goal; without a checkout, of our time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    compared = to_faster(results[0]) is not None
    figure, axis = pyplot.subplots(figsize=(6, 4.5))
    axis.set(yscale="log", xlabel="samples x longest response")
    kinds = {(result["cp_size"], result["metrics"]) for result in results}
    for cp_size, metrics in sorted(kinds, key=lambda kind: (-kind[0], kind[1])):
        of = [result for result in results if (result["cp_size"], result["metrics"]) == (cp_size, metrics)]
        color = "C1" if cp_size == 1 else "C0"
        axis.scatter(
            [result["size"] for result in of],
            [to_faster(result) if compared else result["ms"]["whole"]["ours"]["min"] for result in of],
            label=f"CP {cp_size}, {metrics} metrics",
            marker="s" if cp_size == 1 else "o",
            facecolors="none" if metrics else color,
            edgecolors=color,
        )
    if compared:
        of = [result for result in results if result["goal"] is not None]
        sizes, wanted = [result["size"] for result in of], [result["goal"] for result in of]
        axis.scatter(sizes, wanted, label="at most (goal)", marker="_", s=200, color="gray")
    axis.set_ylabel("ours / faster of theirs, build + fwd + bwd" if compared else "build + fwd + bwd, ms")
    axis.grid(visible=True, which="both", alpha=0.3)
    axis.tick_params(axis="x", labelrotation=30)
    axis.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    axis.set_title(f"{about['device']}, {about['threads']} threads", fontsize=9)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def chosen(sizes: Sequence[str] | None) -> list[Case]:
    """The cases of these sizes; a size that is not among them is measured at CP 4 without metrics and with 5."""
    found: list[Case] = []
    for size in sizes or dict.fromkeys(case.size for case in CASES):
        samples, length = map(int, size.split("x"))
        known = [case for case in CASES if case.size == size]
        found += known or [Case(samples, length, metrics=metrics) for metrics in (0, 5)]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    for name in ("slime", "miles"):
        parser.add_argument(f"--{name}", type=Path, metavar="PATH", help=f"A checkout of {name}.")
        parser.add_argument(f"--{name}-commit", metavar="HASH", help="Its commit, if the checkout has no .git.")
    parser.add_argument("--sizes", nargs="+", metavar="SAMPLESxLENGTH", help="Only these, as in 8x4096.")
    parser.add_argument("--equal", action="store_true", help="Equal lengths, not 50 to 100 %% of the nominal one.")
    parser.add_argument("--denominators", choices=DENOMINATORS, default="own",
                        help="; ".join(map(": ".join, DENOMINATORS.items())))  # fmt: skip
    parser.add_argument("--seconds", type=float, default=10, help="For each case in all, at least.")
    parser.add_argument("--passes", type=int, default=3, help="Over all cases, which share their seconds.")
    parser.add_argument("--repeats", type=int, default=3, help="Turns in each pass, at least.")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of torch.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--goals", action="store_true", help="Say of each goal whether it is met.")
    parser.add_argument("--json", type=Path, metavar="OUT", help="Write the figures there.")
    parser.add_argument("--plot", type=Path, metavar="OUT", help="Draw them there (needs matplotlib).")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    if args.device == "cpu":
        keep_freed_memory()
    about = machine(args.device) | {"denominators": args.denominators, "equal lengths": args.equal}
    commits = {"ours": commit_of(Path(megatron_rl_loss.__file__).parents[1])}
    place = SimpleNamespace(cp=SimpleNamespace(rank=0, size=1))
    modules: dict[str, ModuleType] = {}
    for name in ("slime", "miles"):
        checkout = getattr(args, name)
        if checkout is None:
            print(f"{name} is not measured: give a checkout with --{name} PATH.")
            continue
        modules[name] = load_theirs(name, checkout, place)
        commits[name] = commit_of(checkout) or getattr(args, f"{name}_commit")
    print(", ".join(f"{key} {value}" for key, value in about.items()), f"({DENOMINATORS[args.denominators]})", sep="\n")
    print(", ".join(f"{key} {value or 'of an unknown commit'}" for key, value in commits.items()), flush=True)
    measured = [Measured(case) for case in chosen(args.sizes)]
    for _ in range(args.passes):
        for one in measured:
            one.once_more(modules, place, args)
    results = [one.result() for one in measured]
    print("", *(table(results, part) for part in PARTS), sep="\n")
    if args.goals:
        print(goals(results))
    if args.json:
        args.json.write_text(json.dumps({"machine": about, "commits": commits, "cases": results}, indent=1) + "\n")
    if args.plot:
        plot(results, about, args.plot)


if __name__ == "__main__":
    main()
