"""What log-probs and entropy cost, in memory and time, beside Megatron's, slime's and the naive way.

    python tools/bench/logprobs.py --slime ~/slime --json out.json        # all tables; needs 8 GB, some ten minutes
    python tools/bench/logprobs.py --tables time --logits 4096x32768      # one table, one size

Three tables, each forward and backward:

- *memory from hidden states*: output layer and log-probs. **Peak extra** is the most that torch has allocated at once
  in the pass, less what it returns (the gradients of hidden states and weight). On a CPU the allocations are those that
  torch's profiler records, kernels' temporaries included and a BLAS's own buffers not; on a GPU
  `torch.cuda.max_memory_allocated`.
- *time from hidden states*
- *time from logits*: log-probs alone, and with the entropy and its gradient.

The ways:

- *megatron*: `vocab_parallel_cross_entropy` of the installed Megatron-Core; it has no entropy.
- *slime*: `calculate_log_probs_and_entropy` of a checkout, in chunks of as many tokens as ours (its
  `log_probs_chunk_size`), on float32 logits, which it asks for.
- *naive*: `log_softmax`, gather, and -(p log p).sum().
- *ours*: from logits `log_probs_from_logits`; from hidden states `log_probs_from_hidden` (two passes) and
  `loss_from_hidden` (one pass, with a clipped policy loss).

All are first checked against each other. They take turns, in an order that rotates; a time is that of the fastest
turn, ratios are of one run. One rank holds the vocabulary. *Busy elsewhere* is how many cores other processes kept
busy. On a shared machine ``--clock cpu`` (the default without a GPU) counts this process's CPU seconds with one thread;
``--threads 2 --clock wall`` needs a free one. *In place* writes the gradient over the logits, as Megatron's does with
float32 logits.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from tabulate import tabulate
from timing import busy_elsewhere, commit_of, keep_freed_memory, machine, take_turns
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megatron_rl_loss.logprobs import log_probs_from_hidden, log_probs_from_logits, loss_from_hidden
from megatron_rl_loss.losses import ppo_clip_loss

MB = 2**20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: (log_probs, entropy or None) of (logits, labels).
FromLogits = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Size:
    tokens: int
    vocabulary: int
    dtype: str

    @classmethod
    def parse(cls, text: str) -> "Size":
        shape, _, dtype = text.partition(":")
        tokens, vocabulary = map(int, shape.split("x"))
        return cls(tokens, vocabulary, dtype or "float32")

    def row(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "vocabulary": self.vocabulary, "dtype": self.dtype}


# --- the ways


def megatron(logits: Tensor, labels: Tensor) -> tuple[Tensor, None]:
    return -vocab_parallel_cross_entropy(logits[:, None], labels[:, None], tp_group=dist.group.WORLD)[:, 0], None


def naive(logits: Tensor, labels: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
    log_q = logits.float().log_softmax(-1)
    return log_q.gather(1, labels[:, None])[:, 0], -(log_q.exp() * log_q).sum(-1) if entropy else None


def ours(logits: Tensor, labels: Tensor, **more: Any) -> tuple[Tensor, Tensor | None]:
    log_probs, entropy = log_probs_from_logits(logits, labels, **more)
    return log_probs, entropy


def slimes(checkout: Path, chunk_tokens: int) -> Callable[..., tuple[Tensor, Tensor | None]]:
    spec = importlib.util.spec_from_file_location("slime_ppo_utils", checkout / "slime" / "utils" / "ppo_utils.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def slime(logits: Tensor, labels: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        log_probs, found = module.calculate_log_probs_and_entropy(
            logits.float(), labels, dist.group.WORLD, with_entropy=entropy, chunk_size=chunk_tokens
        )
        return log_probs[:, 0], found

    return slime


def ways_from_logits(slime: Callable[..., Any] | None) -> dict[str, FromLogits]:
    both: dict[str, Callable[..., Any]] = {"naive": naive, "ours": ours}
    if slime is not None:
        both["slime"] = slime
    ways: dict[str, FromLogits] = {"megatron": megatron}
    ways |= {name: partial(way, entropy=False) for name, way in both.items()}
    return ways | {f"{name}, entropy": partial(way, entropy=True) for name, way in both.items()}


# --- a pass, forward and backward

BONUS = 0.01


@dataclass(frozen=True)
class Batch:
    labels: Tensor
    weights: Tensor
    old_log_probs: Tensor
    advantages: Tensor

    @classmethod
    def of(cls, size: Size, device: str) -> "Batch":
        generator = torch.Generator().manual_seed(0)
        draw = torch.randn(2, size.tokens, generator=generator)
        labels = torch.randint(size.vocabulary, (size.tokens,), generator=generator)
        weights = torch.full((size.tokens,), 1 / size.tokens)
        old = -torch.log(torch.tensor(float(size.vocabulary))) + 0.1 * draw[0]
        return cls(*(one.to(device) for one in (labels, weights, old, draw[1])))

    def loss(self, log_probs: Tensor, entropy: Tensor | None) -> Tensor:
        losses, _ = per_token(log_probs, entropy, self.old_log_probs, self.advantages)
        return (losses * self.weights).sum()


def per_token(log_probs: Tensor, entropy: Tensor | None, old: Tensor, advantages: Tensor) -> tuple[Tensor, Any]:
    losses = ppo_clip_loss(log_probs, old, advantages).per_token_loss
    return losses if entropy is None else losses - BONUS * entropy, {}


def leaf(*size: int, dtype: torch.dtype, device: str, seed: int, scale: float = 1.0) -> Tensor:
    drawn = torch.randn(*size, generator=torch.Generator().manual_seed(seed)).mul_(scale)
    return drawn.to(device, dtype).requires_grad_()


def passes_from_hidden(
    size: Size, hidden_size: int, chunk_tokens: int, device: str, slime: Callable[..., Any] | None
) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """By name: a pass that gives the gradients of hidden states and weight."""
    batch, dtype = Batch.of(size, device), DTYPES[size.dtype]
    hidden = leaf(size.tokens, hidden_size, dtype=dtype, device=device, seed=1)
    weight = leaf(size.vocabulary, hidden_size, dtype=dtype, device=device, seed=2, scale=hidden_size**-0.5)
    inputs = {"old": batch.old_log_probs, "advantages": batch.advantages}

    def whole(way: FromLogits) -> Tensor:
        return batch.loss(*way(hidden @ weight.t(), batch.labels))

    def two_passes(entropy: bool) -> Tensor:
        return batch.loss(
            *log_probs_from_hidden(hidden, weight, batch.labels, entropy=entropy, chunk_tokens=chunk_tokens)
        )

    def one_pass(entropy: bool) -> Tensor:
        more: Any = {"entropy": entropy, "chunk_tokens": chunk_tokens}
        return loss_from_hidden(hidden, weight, batch.labels, batch.weights, per_token, inputs, **more).share

    shares: dict[str, Callable[[], Tensor]] = {
        name: partial(whole, way) for name, way in ways_from_logits(slime).items() if not name.startswith("ours")
    }
    for entropy, name in ((False, ""), (True, ", entropy")):
        shares[f"ours, two passes{name}"] = partial(two_passes, entropy)
        shares[f"ours, one pass{name}"] = partial(one_pass, entropy)
    return {name: lambda share=share: torch.autograd.grad(share(), (hidden, weight)) for name, share in shares.items()}  # type: ignore[misc]


def passes_from_logits(size: Size, device: str, slime: Callable[..., Any] | None) -> dict[str, Callable[[], Tensor]]:
    """By name: a pass that gives the gradient of the logits.

    Megatron's overwrites float32 logits in its forward pass and ours-in-place in its backward pass; neither is slower
    or faster for what it then finds there.
    """
    batch, dtype = Batch.of(size, device), DTYPES[size.dtype]
    logits = leaf(size.tokens, size.vocabulary, dtype=dtype, device=device, seed=1)
    spoiled = logits.detach().clone().requires_grad_()

    def run(way: FromLogits, logits: Tensor) -> Tensor:
        found = [one for one in way(logits, batch.labels) if one is not None]
        return torch.autograd.grad(found, logits, [batch.advantages] * len(found))[0]

    ways = ways_from_logits(slime)
    passes: dict[str, Callable[[], Tensor]]
    passes = {name: partial(run, way, spoiled if name == "megatron" else logits) for name, way in ways.items()}
    in_place = partial(ours, entropy=True, gradient_in_place=True)
    return passes | {"ours in place, entropy": partial(run, in_place, spoiled)}


def check_from_hidden(passes: Mapping[str, Callable[[], tuple[Tensor, ...]]], dtype: str) -> None:
    """Those with entropy agree with each other, and those without."""
    bound = 1e-4 if dtype == "float32" else 0.05
    for entropy in (False, True):
        names = [name for name in passes if name.endswith("entropy") == entropy]
        expected = passes[names[0]]()
        for name in names[1:]:
            for one, other in zip(passes[name](), expected, strict=True):
                error = float((one - other).abs().max() / other.abs().max())
                assert error < bound, (name, names[0], error)


# --- what is measured


def peak_extra(run: Callable[[], Sequence[Tensor]], device: str) -> int:
    """Bytes that torch has allocated at most at once, less those of what the pass returns."""
    if device == "cuda":
        run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        given = run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before - sum(one.nbytes for one in given)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        given = run()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most - sum(one.nbytes for one in given)


def fits(way: str, size: Size, args: argparse.Namespace) -> bool:
    """Whether this many logits may be given to a way that copies them: some would not fit in memory."""
    if way.startswith("ours"):
        return True
    logits = size.tokens * size.vocabulary * DTYPES[size.dtype].itemsize
    return logits <= (2 if way == "megatron" else 1) * args.most_logits * 2**30


def memory_table(sizes: Sequence[Size], args: argparse.Namespace, slime: Any) -> list[dict[str, Any]]:
    rows = []
    for size in sizes:
        passes = passes_from_hidden(size, args.memory_hidden, args.chunk_tokens, args.device, slime)
        logits = size.tokens * size.vocabulary * DTYPES[size.dtype].itemsize
        if size == sizes[0]:
            small = Size(512, 2048, size.dtype)
            check_from_hidden(passes_from_hidden(small, 64, 100, args.device, slime), size.dtype)
        for name, run in passes.items():
            if not fits(name, size, args):
                continue
            extra = peak_extra(run, args.device)
            rows.append(size.row() | {"logits MB": logits / MB, "way": name, "peak extra MB": extra / MB})
            print(".", end="", file=sys.stderr, flush=True)
        mine = [row for row in rows if all(row[key] == value for key, value in size.row().items())]
        base = next((row["peak extra MB"] for row in mine if row["way"] == "megatron"), None)
        for row in mine:
            row["to megatron"] = None if base is None else row["peak extra MB"] / base
    return rows


def time_table(
    sizes: Sequence[Size], args: argparse.Namespace, make: Callable[[Size], Mapping[str, Callable[[], Any]]]
) -> list[dict[str, Any]]:
    rows = []
    for size in sizes:
        passes = {name: run for name, run in make(size).items() if fits(name, size, args)}
        began, busy = time.monotonic(), busy_elsewhere()
        turns = take_turns(passes, args.seconds, args.repeats, args.device, CLOCKS[args.clock])
        ms = {name: min(times) for name, times in turns.items()}
        now = busy_elsewhere()
        others = None if busy is None or now is None else (now - busy) / (time.monotonic() - began)
        for name, one in ms.items():
            row = size.row() | {"way": name, "ms": one, "to megatron": one / ms["megatron"]}
            theirs = ms.get("slime, entropy" if name.endswith("entropy") else "slime")
            rows.append(row | {"to slime": None if theirs is None else one / theirs, "busy elsewhere": others})
        print(".", end="", file=sys.stderr, flush=True)
    return rows


TABLES = ("memory", "hidden", "time")
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--slime", type=Path, help="A checkout of slime.")
    parser.add_argument("--slime-commit", metavar="HASH", help="Its commit, if the checkout has no .git.")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    parser.add_argument(
        "--memory", nargs="+", type=Size.parse, metavar="TOKENSxVOCABULARY[:DTYPE]",
        default=[Size.parse(one) for one in ("4096x32768", "16384x32768", "65536x32768", "2048x131072", "1024x152064",
                                             "16384x32768:bfloat16")],
    )  # fmt: skip
    parser.add_argument("--hidden", nargs="+", type=Size.parse, default=[Size.parse("2048x32768")])
    parser.add_argument(
        "--logits", nargs="+", type=Size.parse,
        default=[Size.parse(one) for one in ("4096x32768", "8192x32768", "2048x131072", "1024x152064",
                                             "4096x32768:bfloat16")],
    )  # fmt: skip
    parser.add_argument("--memory-hidden", type=int, default=64, help="Hidden size where memory is measured.")
    parser.add_argument("--hidden-size", type=int, default=256, help="Hidden size where time is.")
    parser.add_argument("--chunk-tokens", type=int, default=1024)
    parser.add_argument(
        "--most-logits", type=float, default=1.1, help="GiB of logits that others are given at most; megatron's twice."
    )
    parser.add_argument("--seconds", type=float, default=20, help="For the times of a size, at least.")
    parser.add_argument("--repeats", type=int, default=5, help="Turns, at least.")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch.")
    parser.add_argument("--clock", choices=CLOCKS, help="Default: cpu, or wall on a GPU.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, metavar="OUT", help="Write the figures there.")
    args = parser.parse_args(arguments)
    args.clock = args.clock or ("wall" if args.device == "cuda" else "cpu")
    torch.set_num_threads(args.threads)
    about = machine(args.device) | {"clock": args.clock, "chunk tokens": args.chunk_tokens}
    about |= {"slime": args.slime and (commit_of(args.slime) or args.slime_commit)}
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    found: dict[str, list[dict[str, Any]]] = {}

    def keep(title: str, rows: list[dict[str, Any]]) -> None:
        found[title] = rows
        print(f"\n{title}\n{tabulate(rows, headers='keys', floatfmt='.3g')}", flush=True)
        if args.json:
            args.json.write_text(json.dumps({"machine": about, **found}, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if args.device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        slime = None if args.slime is None else slimes(args.slime, args.chunk_tokens)
        if "memory" in args.tables:
            keep("memory from hidden states", memory_table(args.memory, args, slime))
        keep_freed_memory()
        if "hidden" in args.tables:
            from_hidden = partial(passes_from_hidden, hidden_size=args.hidden_size, chunk_tokens=args.chunk_tokens,
                           device=args.device, slime=slime)  # fmt: skip
            keep("time from hidden states", time_table(args.hidden, args, from_hidden))
        if "time" in args.tables:
            from_logits = partial(passes_from_logits, device=args.device, slime=slime)
            keep("time from logits", time_table(args.logits, args, from_logits))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
