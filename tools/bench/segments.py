"""A sequence's mean log-ratio, and its sums up to each token, under context parallelism (CP), beside others' gathers.

    python tools/bench/segments.py --slime ~/slime --miles ~/miles      # writes docs/bench/segments-cpu.txt and .json
    python tools/bench/segments.py --device cuda --cp 2                 # a GPU per rank and NCCL: segments-cuda

GSPO needs mean_t (log pi - log pi_old) of every sequence, whose tokens lie on several ranks, with its gradient.

- *ours*: `segment_mean` and `to_tokens`, forward and backward; *ours, scan*: `segment_scan`.
- *slime*, *miles*: `all_gather_with_cp` of the log-probs and of the old ones, sample by sample, and `compute_gspo_kl`,
  as their `policy_loss_function` calls them; run from their checkouts, with stand-ins that know the CP group. *slime,
  scan*: the same gather of the log-ratio, and `cumsum` of each whole response.

Masks are made before, and so is our `Samples`, which a step makes once for everything. All are first compared with
float64, values and gradient. Then they take turns: after a barrier each rank runs forward and backward once, and a
turn's time is that of the slowest rank. Bytes are what a rank hands to collectives.
"""

import argparse
import ast
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # theirs takes it for granted
import torch.multiprocessing as mp
from reducers import load_theirs
from timing import BACKENDS, commit_of, machine, publish, start_rank
from torch import Tensor
from totals import count_collectives

from megatron_rl_loss import Samples, ZigzagResponse
from megatron_rl_loss.losses import segment_mean, segment_scan, to_tokens

OUT = Path(__file__).parents[2] / "docs" / "bench"


@dataclass(frozen=True)
class Case:
    sequences: int
    length: int


class Data:
    """This rank's log-probs, and what must come out at its tokens."""

    def __init__(self, case: Case, rank: int, cp_size: int, device: str) -> None:
        generator = torch.Generator().manual_seed(1)
        self.responses = [case.length] * case.sequences
        self.totals = [case.length + 300] * case.sequences
        self.masks = [(torch.rand(n, generator=generator) < 0.8).int().to(device) for n in self.responses]
        whole = [torch.randn(2, n, generator=generator).to(device) for n in self.responses]
        samples = Samples(self.masks, layout=ZigzagResponse(self.totals, self.responses))
        self.local = samples.local(rank, cp_size)
        new, old = (self.local.of(torch.cat([pair[k] for pair in whole])) for k in range(2))
        self.log_probs, self.old_log_probs = new.requires_grad_(), old
        self.counts = self.local.counts.tolist()
        lengths = torch.stack([mask.sum() for mask in self.masks]).double()
        sums = [((p[0] - p[1]).double() * mask).sum() for p, mask in zip(whole, self.masks, strict=True)]
        self.means = torch.stack(sums) / lengths
        # Of the sum over all ranks' tokens of square(mean) / 2, by each log-prob.
        of_sample = self.means * torch.tensor(self.responses, device=device) / lengths
        self.slopes = of_sample[self.local.sample_index] * self.local.mask
        terms = [(p[0] - p[1]).double() * mask for p, mask in zip(whole, self.masks, strict=True)]
        up_to = [term.cumsum(0) * mask for term, mask in zip(terms, self.masks, strict=True)]
        behind = [one.flip(0).cumsum(0).flip(0) * mask for one, mask in zip(up_to, self.masks, strict=True)]
        mean = self.means[self.local.sample_index]
        #: Of what runs: the right result at this rank's tokens, and the slopes of the sum of squares / 2.
        self.right = {"": (mean, self.slopes), ", scan": tuple(self.local.of(torch.cat(x)) for x in (up_to, behind))}


Run = Callable[[], Tensor]  # the sequence's mean, or its sum up to the token, at this rank's tokens


def ours(data: Data, group: Any) -> Run:
    def run() -> Tensor:
        log_ratio = data.log_probs - data.old_log_probs
        return to_tokens(segment_mean(log_ratio, data.local, group), data.local)

    return run


def our_scan(data: Data, group: Any) -> Run:
    return lambda: segment_scan(data.log_probs - data.old_log_probs, data.local, group)


def their_scan(module: ModuleType, data: Data) -> Run:
    starts = data.local.samples.mask_starts
    mine = [at - start for at, start in zip(data.local.positions.split(data.counts), starts, strict=True)]

    def run() -> Tensor:
        log_ratios = (data.log_probs - data.old_log_probs).split(data.counts)
        found = []
        for part, total, response, mask, places in zip(
            log_ratios, data.totals, data.responses, data.masks, mine, strict=True
        ):
            whole = module.all_gather_with_cp(part, total, response)
            found.append(((whole * mask).cumsum(0) * mask)[places])
        return torch.cat(found)

    return run


def theirs(module: ModuleType, gspo_kl: Callable[..., Tensor], data: Data) -> Run:
    def gathered(values: Sequence[Tensor]) -> list[Tensor]:
        lengths = zip(values, data.totals, data.responses, strict=True)
        return [module.all_gather_with_cp(*one) for one in lengths]

    def run() -> Tensor:
        new, old = data.log_probs.split(data.counts), data.old_log_probs.split(data.counts)
        return -gspo_kl(gathered(new), gathered(old), new, data.masks)

    return run


def function_of(checkout: Path, name: str) -> Callable[..., Tensor]:
    """One function of a checkout that needs torch alone, whatever its file imports."""
    for path in sorted(checkout.rglob("*_utils.py")):
        if f"def {name}(" in (text := path.read_text()):
            found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == name]
            names: dict[str, Any] = {"torch": torch}
            exec(compile(ast.Module(list(found), []), str(path), "exec"), names)
            return names[name]
    raise SystemExit(f"{checkout}: no {name}")


def check(name: str, data: Data, run: Run) -> None:
    """Refuse to time what computes something else."""
    data.log_probs.grad = None
    found = run()
    (found.square().sum() / 2).backward()
    assert data.log_probs.grad is not None
    right, slopes = data.right[", scan" if name.endswith(", scan") else ""]
    in_value = float((found.detach() - right).abs().max() / right.abs().max())
    in_slope = float((data.log_probs.grad - slopes).abs().max() / slopes.abs().max())
    if not max(in_value, in_slope) < 1e-5:
        raise SystemExit(f"{name} does not agree with float64: {in_value} in the value, {in_slope} in its gradient")


def once(data: Data, run: Run) -> None:
    data.log_probs.grad = None
    run().sum().backward()


def run_rank(rank: int, args: argparse.Namespace, folder: str) -> None:
    wait_for_device = start_rank(args.device, rank, args.cp, folder)
    group = dist.group.WORLD
    place = SimpleNamespace(cp=SimpleNamespace(rank=rank, size=args.cp, group=group))
    checkouts = {name: getattr(args, name) for name in ("slime", "miles") if getattr(args, name)}
    modules = {name: load_theirs(name, path, place) for name, path in checkouts.items()}
    gspo_kl = {name: function_of(path, "compute_gspo_kl") for name, path in checkouts.items()}
    seen, found = count_collectives(), []
    for case in args.cases:
        data = Data(case, rank, args.cp, args.device)
        runs = {"ours": ours(data, group), "ours, scan": our_scan(data, group)}
        runs |= {name: theirs(module, gspo_kl[name], data) for name, module in modules.items()}
        runs |= {f"{name}, scan": their_scan(module, data) for name, module in modules.items()}
        for name, run in runs.items():
            check(name, data, run)
        times: dict[str, list[float]] = {name: [] for name in runs}
        counts: dict[str, list[int]] = {}
        for _ in range(args.repeats):
            for name, run in runs.items():
                dist.barrier()
                wait_for_device()
                seen.update(calls=0, bytes=0)
                start = time.perf_counter()
                once(data, run)
                wait_for_device()
                times[name].append((time.perf_counter() - start) * 1e3)
                counts[name] = [seen["calls"], seen["bytes"]]
        found.append({"times": times, "counts": counts})
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # the group's threads would wait for ranks that are gone


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(args, folder), nprocs=args.cp)  # type: ignore[attr-defined, no-untyped-call]
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(args.cp)]
    rows = []
    for k, case in enumerate(args.cases):
        fastest = {}
        for name in ranks[0][k]["times"]:
            turns = zip(*(of_rank[k]["times"][name] for of_rank in ranks), strict=True)
            fastest[name] = min(max(turn) for turn in turns)
        for name, ms in fastest.items():
            calls, sent = ranks[0][k]["counts"][name]
            ours = "ours, scan" if name.endswith(", scan") else "ours"
            row = {"sequences": case.sequences, "tokens": case.length, "CP": args.cp, "whose": name, "ms": ms}
            rows.append(row | {"collectives": calls, "bytes a rank": sent, "ours to it": fastest[ours] / ms})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slime", type=Path, help="A checkout.")
    parser.add_argument("--miles", type=Path, help="A checkout.")
    parser.add_argument("--sizes", nargs="+", default=["32x4096", "32x1024", "8x4096"], help="Sequences x tokens.")
    parser.add_argument("--cp", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    args.cases = [Case(*map(int, size.split("x"))) for size in args.sizes]
    rows = measure(args)
    commits = {name: commit_of(getattr(args, name)) for name in ("slime", "miles") if getattr(args, name)}
    about = machine(args.device) | {"threads": 1, "backend": BACKENDS[args.device]}
    publish(args.out, f"segments-{args.device}", about | commits, rows)


if __name__ == "__main__":
    main()
