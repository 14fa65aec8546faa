"""How exact a float32 sum of 4 million products is, and what it costs beside the `torch.dot` that it replaced.

    python tools/bench/sums.py

Losses are one sample's, reduced by `token_mean`, whose weights are 1/M or 0. *loss* is the reducer's sum, *metric* that
of `with_metrics`, *dot* `torch.dot` of the same losses and weights. Errors are to float64 and relative to the sum of
what is added, without signs. *Warm* takes the same losses and weights in every call; *cold* takes twelve different ones
in turn, more than caches hold. The times are those of the fastest turn (see timing.py).
"""

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from timing import keep_freed_memory, machine, take_turns
from torch import Tensor

from megatron_rl_loss import StepTotals, make_pg_loss_reducer

MOST_ERROR, MOST_RATIO = 1e-6, 1.3
COLD = 12
Sum = Callable[[Tensor], Tensor]


class Pair:
    """Losses, and what sums them."""

    def __init__(self, tokens: int, seed: int, active: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        masks = [torch.rand(tokens, generator=generator) < active]
        self.reducer = make_pg_loss_reducer("token_mean", masks, totals=StepTotals.from_loss_masks(masks))
        self.losses = torch.randn(tokens, generator=generator, requires_grad=True)

    def ours(self, losses: Tensor) -> Tensor:
        return self.reducer(losses)

    def dot(self, losses: Tensor) -> Tensor:
        return torch.dot(losses, self.reducer.weights)

    def metric(self, losses: Tensor) -> Tensor:
        return self.reducer.with_metrics(self.losses, [losses])[1][0]


def errors(tokens: int) -> list[dict[str, Any]]:
    """Of every way to sum, for each kind of losses, over all tokens and over half of them."""
    generator = torch.Generator().manual_seed(0)
    kinds = {
        "constant": torch.full((tokens,), 0.1),
        "0 or 1": torch.randint(0, 2, (tokens,), generator=generator).float(),
        "random, of both signs": torch.randn(tokens, generator=generator),
        "random, above 0": torch.rand(tokens, generator=generator),
    }
    found = []
    for (kind, losses), active in itertools.product(kinds.items(), (1.0, 0.5)):
        pair = Pair(tokens, seed=0, active=active)
        terms = losses.double() * pair.reducer.weights

        def error(total: Sum, losses: Tensor = losses, terms: Tensor = terms) -> float:
            return float((total(losses).double() - terms.sum()).abs() / terms.abs().sum())

        row = {"losses": kind, "active": active, "loss": error(pair.ours), "metric": error(pair.metric)}
        found.append(row | {"dot": error(pair.dot)})
    return found


def costs(tokens: int, seconds: float, repeats: int) -> list[dict[str, Any]]:
    """Ours to `torch.dot`'s."""
    pairs = [Pair(tokens, seed, active=0.8) for seed in range(COLD)]

    def forward(name: str, among: Sequence[Pair]) -> Callable[[], object]:
        turns = itertools.cycle(among)

        def run() -> None:
            pair = next(turns)
            getattr(pair, name)(pair.losses)

        return run

    def both(name: str, among: Sequence[Pair]) -> Callable[[], object]:
        turns = itertools.cycle(among)

        def run() -> None:
            pair = next(turns)
            pair.losses.grad = None
            getattr(pair, name)(pair.losses).backward()

        return run

    found = []
    for (part, make), (caches, among) in itertools.product(
        (("forward", forward), ("forward + backward", both)), (("warm", pairs[:1]), ("cold", pairs))
    ):
        functions = {name: make(name, among) for name in ("ours", "dot")}
        ms = {name: min(times) for name, times in take_turns(functions, seconds / 4, repeats).items()}
        found.append({"caches": caches, "part": part, **ms, "ours/dot": ms["ours"] / ms["dot"]})
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=4_000_000)
    parser.add_argument("--seconds", type=float, default=20, help="For all times, at least.")
    parser.add_argument("--repeats", type=int, default=5, help="Turns, at least.")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of torch.")
    parser.add_argument("--json", type=Path, metavar="OUT", help="Write the figures there.")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    about = machine() | {"tokens": args.tokens}
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    found, times = errors(args.tokens), costs(args.tokens, args.seconds, args.repeats)
    worst = max(max(row["loss"], row["metric"]) for row in found)
    print(f"\nerror to float64; ours at most {worst:.1e}, goal {MOST_ERROR:.0e}: {verdict(worst <= MOST_ERROR)}")
    print(tabulate(found, headers="keys", floatfmt=".1e"))
    for row in times:
        row[f"at most {MOST_RATIO}"] = verdict(row["ours/dot"] <= MOST_RATIO)
    print(f"\nms of the fastest turn\n{tabulate(times, headers='keys', floatfmt='.3g')}")
    if args.json:
        args.json.write_text(json.dumps({"machine": about, "errors": found, "costs": times}, indent=1) + "\n")


def verdict(met: bool) -> str:
    return "met" if met else "MISSED"


if __name__ == "__main__":
    main()
