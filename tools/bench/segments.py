"""A sequence's mean log-ratio, and its sums up to each token, under context parallelism (CP), beside others' gathers.

    python tools/bench/segments.py --slime ~/slime --miles ~/miles --out docs/bench
    python tools/bench/segments.py --device cuda --cp 2                 # a GPU per rank and NCCL

GSPO needs mean_t (log pi - log pi_old) of every sequence, whose tokens lie on several ranks, with its gradient.

- *ours*: `segment_mean` and `to_tokens`, forward and backward; *ours, scan*: `segment_scan`.
- *slime*, *miles*: `all_gather_with_cp` of the log-probs and of the old ones, sample by sample, and `compute_gspo_kl`,
  as their `policy_loss_function` calls them; run from their checkouts. *slime, scan*: the same gather of the log-ratio,
  and `cumsum` of each whole response.

Masks are made before, and so is our `Samples`, which a step makes once for everything. All are first compared with
float64, values and gradient. Then they take turns: after a barrier each rank runs forward and backward once, and a
turn's time is that of the slowest rank. Bytes are what a rank hands to collectives.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # theirs takes it for granted
from timing import BACKENDS, count_collectives, flags, on_ranks, peers, publish, synchronize
from torch import Tensor

from megatron_rl_loss import Samples, ZigzagResponse, segment_mean, segment_scan, to_tokens

Run = Callable[[], Tensor]  # the sequence's mean, or its sum up to the token, at this rank's tokens


class Data:
    """Log-probs of this rank, and the expected results at its tokens."""

    def __init__(self, sequences: int, length: int, rank: int, cp_size: int, device: str) -> None:
        generator = torch.Generator().manual_seed(1)
        self.responses, self.totals = [length] * sequences, [length + 300] * sequences
        self.masks = [(torch.rand(n, generator=generator) < 0.8).int().to(device) for n in self.responses]
        whole = [torch.randn(2, n, generator=generator).to(device) for n in self.responses]
        samples = Samples(self.masks, layout=ZigzagResponse(self.totals, self.responses))
        self.local = samples.local(rank, cp_size)
        new, self.old_log_probs = (self.local.of(torch.cat([pair[k] for pair in whole])) for k in range(2))
        self.log_probs = new.requires_grad_()
        self.counts = self.local.counts.tolist()
        self.positions = torch.from_numpy(self.local.positions)
        terms = [(p[0] - p[1]).double() * mask for p, mask in zip(whole, self.masks, strict=True)]
        lengths = torch.stack([mask.sum() for mask in self.masks]).double()
        means = torch.stack([term.sum() for term in terms]) / lengths
        slopes = means * length / lengths
        up_to = [term.cumsum(0) * mask for term, mask in zip(terms, self.masks, strict=True)]
        behind = [sums.flip(0).cumsum(0).flip(0) * mask for sums, mask in zip(up_to, self.masks, strict=True)]
        index, mask = torch.from_numpy(self.local.sample_index), torch.from_numpy(self.local.mask).double()
        #: By whether it is a scan: the right result, and by each log-prob the slope of the sum of its squares / 2.
        self.right = {
            False: (means[index].cpu(), slopes[index].cpu() * mask),
            True: tuple(self.local.of(torch.cat(parts).cpu()) for parts in (up_to, behind)),
        }


def ours(data: Data, group: Any) -> Tensor:
    return to_tokens(segment_mean(data.log_probs - data.old_log_probs, data.local, group), data.local)


def our_scan(data: Data, group: Any) -> Tensor:
    return segment_scan(data.log_probs - data.old_log_probs, data.local, group)


def gathered(cp_utils: Any, data: Data, values: Tensor) -> list[Tensor]:
    parts = zip(values.split(data.counts), data.totals, data.responses, strict=True)
    return [cp_utils.all_gather_with_cp(*part) for part in parts]


def theirs(cp_utils: Any, formulas: Any, data: Data) -> Tensor:
    new, old = (gathered(cp_utils, data, values) for values in (data.log_probs, data.old_log_probs))
    return -formulas.compute_gspo_kl(new, old, data.log_probs.split(data.counts), data.masks)


def their_scan(cp_utils: Any, data: Data) -> Tensor:
    wholes = gathered(cp_utils, data, data.log_probs - data.old_log_probs)
    places = zip(data.positions.split(data.counts), data.local.samples.mask_starts, strict=True)
    sequences = zip(wholes, data.masks, places, strict=True)
    return torch.cat([((whole * mask).cumsum(0) * mask)[at - start] for whole, mask, (at, start) in sequences])


def check(name: str, data: Data, run: Run) -> None:
    """Exit if a function computes other numbers."""
    data.log_probs.grad = None
    result = run()
    (result.square().sum() / 2).backward()
    assert data.log_probs.grad is not None
    for value, right in zip((result.detach(), data.log_probs.grad), data.right[name.endswith("scan")], strict=True):
        if not (error := float((value.cpu() - right).abs().max() / right.abs().max())) < 1e-5:
            raise SystemExit(f"{name} does not agree with float64: {error}")


def measure(rank: int, args: argparse.Namespace) -> list[dict[str, list[tuple[float, int, int]]]]:
    """Milliseconds, number of collectives and their bytes on a rank, for each case, library and turn."""
    group = dist.group.WORLD
    modules = peers(args, SimpleNamespace(cp=SimpleNamespace(rank=rank, size=args.cp, group=group)))
    seen, turns_of_ways = count_collectives(), []
    for sequences, length in args.cases:
        data = Data(sequences, length, rank, args.cp, args.device)
        runs: dict[str, Run] = {"ours": partial(ours, data, group), "ours, scan": partial(our_scan, data, group)}
        for name, (cp_utils, formulas) in modules.items():
            runs |= {name: partial(theirs, cp_utils, formulas, data)}
            runs |= {f"{name}, scan": partial(their_scan, cp_utils, data)}
        for name, run in runs.items():
            check(name, data, run)
        turns: dict[str, list[tuple[float, int, int]]] = {name: [] for name in runs}
        for _ in range(args.repeats):
            for name, run in runs.items():
                dist.barrier()
                synchronize(args.device)
                seen.update(calls=0, bytes=0)
                start = time.perf_counter()
                data.log_probs.grad = None
                run().sum().backward()
                synchronize(args.device)
                turns[name].append(((time.perf_counter() - start) * 1e3, seen["calls"], seen["bytes"]))
        turns_of_ways.append(turns)
    return turns_of_ways


def table(args: argparse.Namespace, ranks: Sequence[Any]) -> list[dict[str, Any]]:
    rows = []
    for k, (sequences, length) in enumerate(args.cases):
        turns = {name: zip(*(row[k][name] for row in ranks), strict=True) for name in ranks[0][k]}
        fastest = {name: min(max(ms for ms, *_ in turn) for turn in of) for name, of in turns.items()}
        for name, ms in fastest.items():
            _, calls, sent = ranks[0][k][name][0]
            ours = fastest["ours, scan" if name.endswith("scan") else "ours"]
            row = {"sequences": sequences, "tokens": length, "CP": args.cp, "whose": name, "ms": ms}
            rows.append(row | {"collectives": calls, "bytes a rank": sent, "ours to it": ours / ms})
    return rows


def main() -> None:
    parser = flags(__doc__, "slime", "miles")
    parser.add_argument("--sizes", nargs="+", default=["32x4096", "32x1024", "8x4096"], help="Sequences x tokens.")
    parser.add_argument("--cp", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    args.cases = [tuple(map(int, size.split("x"))) for size in args.sizes]
    rows = table(args, on_ranks(args.cp, args.device, measure, args))
    publish("segments", args, {"forward and backward": rows}, threads=1, backend=BACKENDS[args.device])


if __name__ == "__main__":
    main()
