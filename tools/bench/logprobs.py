"""Memory and time of log-probs and entropy, beside Megatron's and slime's functions.

    python tools/bench/logprobs.py --slime ~/slime                            # needs 8 GB, some ten minutes
    python tools/bench/logprobs.py --tables logits --sizes 4096x32768         # one table, one size

Three tables, each forward and backward:

- *memory*: of output layer and log-probs. **Peak extra** is torch's largest allocation at a time in the pass, minus the
  returned gradients (of hidden states and weight). On a CPU the allocations are those that torch's profiler
  records, kernels' temporaries included and a BLAS's own buffers not; on a GPU `torch.cuda.max_memory_allocated`.
- *hidden*: time from hidden states.
- *logits*: time from logits, of log-probs alone, and with the entropy and its gradient.

The ways:

- *megatron*: `vocab_parallel_cross_entropy` of the installed Megatron-Core; it has no entropy.
- *read twice* (from logits alone): plain torch on blocks of half a million logits, which autograd differentiates. A
  block's intermediates are dropped and made again backward (`torch.utils.checkpoint`), so that it needs no formula of a
  gradient, and no more memory than ours but for autograd's own copy of the gradient.
- *slime*: `calculate_log_probs_and_entropy` of a checkout, in chunks of as many tokens as ours (its
  `log_probs_chunk_size`), on float32 logits, which it asks for.
- *ours*: from logits `log_probs_from_logits`; from hidden states `log_probs_from_hidden` (two passes) and
  `loss_from_hidden` (one pass, with a clipped policy loss).

They take turns (`timing.take_turns`); ratios are of the fastest turns of one run. One rank holds the vocabulary. *Busy
elsewhere* is how many cores other processes kept busy. On a shared machine ``--clock cpu`` (the default without a GPU)
counts this process's CPU seconds with one thread; ``--threads 2 --clock wall`` needs a free one. *In place* writes the
gradient over the logits, as Megatron's does with float32 logits.
"""

import argparse
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from timing import BACKENDS, Others, flags, keep_freed_memory, peers, publish, take_turns
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from megatron_rl_loss import (
    OutputLayer,
    log_probs_from_hidden,
    log_probs_from_logits,
    loss_from_hidden,
    ppo_clip_loss,
)

MB = 2**20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SIZES = {
    "memory": "4096x32768 16384x32768 131072x32768 4096x152064 131072x152064 16384x32768:bfloat16",
    "hidden": "2048x32768",
    "logits": "8192x32768 4096x131072 1024x152064 4096x32768:bfloat16",
}
HIDDEN = {"memory": 64, "hidden": 256}
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}
ENTROPY = {False: "", True: ", entropy"}
BONUS = 0.01
#: Logits of a block that is read twice, as many as `log_probs_from_logits` takes on one thread of a host.
BLOCK = 2**19
#: (log_probs, entropy or None) of (logits, labels).
FromLogits = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
Pass = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class Size:
    tokens: int
    vocabulary: int
    dtype: str

    @classmethod
    def parse(cls, text: str) -> "Size":
        tokens, vocabulary, dtype = re.split("[x:]", text if ":" in text else f"{text}:float32")
        return cls(int(tokens), int(vocabulary), dtype)

    @property
    def logits(self) -> int:
        """Size of the logits in bytes."""
        return self.tokens * self.vocabulary * DTYPES[self.dtype].itemsize


# --- the ways


def megatron(logits: Tensor, labels: Tensor) -> tuple[Tensor, None]:
    return -vocab_parallel_cross_entropy(logits[:, None], labels[:, None], tp_group=dist.group.WORLD)[:, 0], None


def read_twice(logits: Tensor, labels: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
    def read(rows: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        log_q = rows.float().log_softmax(-1)
        log_probs = log_q.gather(1, ids[:, None])[:, 0]
        return (log_probs, -(log_q.exp() * log_q).sum(-1)) if entropy else (log_probs,)

    tokens = max(1, BLOCK // logits.shape[1])
    blocks = [
        checkpoint(read, *block, use_reentrant=False)
        for block in zip(logits.split(tokens), labels.split(tokens), strict=True)
    ]
    log_probs, *entropies = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    return log_probs, entropies[0] if entropy else None


def slimes(formulas: Any, chunk_tokens: int, logits: Tensor, labels: Tensor, entropy: bool) -> Any:
    log_probs, entropies = formulas.calculate_log_probs_and_entropy(
        logits.float(), labels, dist.group.WORLD, with_entropy=entropy, chunk_size=chunk_tokens
    )
    return log_probs[:, 0], entropies


def from_logits(args: argparse.Namespace) -> dict[str, FromLogits]:
    """Other frameworks' passes from logits."""
    ways: dict[str, FromLogits] = {"megatron": megatron}
    for _, formulas in peers(args, SimpleNamespace()).values():
        slime = partial(slimes, formulas, args.chunk_tokens)
        ways |= {f"slime{name}": partial(slime, entropy=entropy) for entropy, name in ENTROPY.items()}
    return ways


# --- a pass, forward and backward


def per_token(log_probs: Tensor, entropy: Tensor | None, old: Tensor, advantages: Tensor) -> tuple[Tensor, Any]:
    losses = ppo_clip_loss(log_probs, old, advantages, torch.ones_like(old)).per_token_loss
    return losses if entropy is None else losses - BONUS * entropy, {}


def leaf(*size: int, like: Size, device: str, scale: float = 1.0) -> Tensor:
    drawn = torch.randn(*size, generator=torch.Generator().manual_seed(len(size))).mul_(scale)
    return drawn.to(device, DTYPES[like.dtype]).requires_grad_()


def labels_and_advantages(size: Size, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(size.vocabulary, (size.tokens,), generator=generator)
    return labels.to(device), torch.randn(size.tokens, generator=generator).to(device)


def hidden_passes(
    size: Size, hidden_size: int, ways: dict[str, FromLogits], args: argparse.Namespace
) -> dict[str, Pass]:
    """Passes that return the gradients of hidden states and weight, by name."""
    labels, advantages = labels_and_advantages(size, args.device)
    hidden = leaf(size.tokens, hidden_size, like=size, device=args.device)
    weight = leaf(size.vocabulary, hidden_size, like=size, device=args.device, scale=hidden_size**-0.5)
    output_layer = OutputLayer(weight, chunk_tokens=args.chunk_tokens)
    weights = torch.full_like(advantages, 1 / size.tokens)
    inputs = {"old": torch.full_like(advantages, 1 / size.vocabulary).log(), "advantages": advantages}

    def reduced(log_probs: Tensor, entropy: Tensor | None) -> Tensor:
        return (per_token(log_probs, entropy, **inputs)[0] * weights).sum()

    def whole(way: FromLogits) -> Tensor:
        return reduced(*way(hidden @ weight.t(), labels))

    def two_passes(entropy: bool) -> Tensor:
        return reduced(*log_probs_from_hidden(hidden, output_layer, labels, entropy=entropy))

    def one_pass(entropy: bool) -> Tensor:
        return loss_from_hidden(hidden, output_layer, labels, weights, per_token, inputs, entropy=entropy)[0]

    shares: dict[str, Callable[[], Tensor]] = {name: partial(whole, way) for name, way in ways.items()}
    for entropy, name in ENTROPY.items():
        shares[f"ours, two passes{name}"] = partial(two_passes, entropy)
        shares[f"ours, one pass{name}"] = partial(one_pass, entropy)
    return {name: lambda share=share: torch.autograd.grad(share(), (hidden, weight)) for name, share in shares.items()}  # type: ignore[misc]


def logits_passes(size: Size, ways: dict[str, FromLogits], args: argparse.Namespace) -> dict[str, Pass]:
    """Passes that return the gradient of the logits, by name.

    Megatron's overwrites float32 logits in its forward pass, and ours-in-place in its backward pass. Overwritten values
    make neither of them slower or faster.
    """
    labels, advantages = labels_and_advantages(size, args.device)
    logits = leaf(size.tokens, size.vocabulary, like=size, device=args.device)
    spoiled = logits.detach().clone().requires_grad_()

    def run(way: FromLogits, logits: Tensor) -> Sequence[Tensor]:
        values = [value for value in way(logits, labels) if value is not None]
        return torch.autograd.grad(values, logits, [advantages] * len(values))

    def ours(logits: Tensor, labels: Tensor, **more: Any) -> tuple[Tensor, Tensor | None]:
        log_probs, entropy = log_probs_from_logits(logits, labels, **more)
        return log_probs, entropy

    ways = ways | {f"ours{name}": partial(ours, entropy=entropy) for entropy, name in ENTROPY.items()}
    ways |= {f"read twice{name}": partial(read_twice, entropy=entropy) for entropy, name in ENTROPY.items()}
    ways["ours in place, entropy"] = partial(ours, entropy=True, gradient_in_place=True)
    overwrites = ("megatron", "ours in place, entropy")
    return {name: partial(run, way, spoiled if name in overwrites else logits) for name, way in ways.items()}


# --- what is measured


def peak_extra(run: Pass, device: str) -> int:
    """Torch's largest allocation at a time in bytes, minus the bytes that the pass returns."""
    if device == "cuda":
        run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        gradients = run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before - sum(gradient.nbytes for gradient in gradients)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        gradients = run()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most - sum(gradient.nbytes for gradient in gradients)


def rows(table: str, size: Size, ways: dict[str, FromLogits], args: argparse.Namespace) -> list[dict[str, Any]]:
    # Some ways copy the logits, and would not fit in memory.
    copies = {name: 1 if name == "megatron" else 2 for name in ways}
    ways = {name: way for name, way in ways.items() if copies[name] * size.logits <= args.most_logits * 2**30}
    passes = hidden_passes(size, HIDDEN[table], ways, args) if table in HIDDEN else logits_passes(size, ways, args)
    others, unit = Others(), "peak extra MB" if table == "memory" else "ms"
    if table == "memory":
        figures = {name: peak_extra(run, args.device) / MB for name, run in passes.items()}
    else:
        turns = take_turns(passes, args.seconds, args.repeats, args.device, CLOCKS[args.clock])
        figures = {name: min(times) for name, times in turns.items()}
    rows_of_size = []
    for name, figure in figures.items():
        slime = figures.get("slime, entropy" if name.endswith("entropy") else "slime")
        row = asdict(size) | {"logits MB": size.logits / MB, "way": name, unit: figure}
        row |= {"to megatron": figure / figures["megatron"] if "megatron" in figures else None}
        rows_of_size.append(row | {"to slime": slime and figure / slime, "busy elsewhere": others.busy()})
    return rows_of_size


def main() -> None:
    parser = flags(__doc__, "slime")
    parser.add_argument("--tables", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument(
        "--sizes", nargs="+", metavar="TOKENSxVOCABULARY[:DTYPE]", help="Sizes of every table; default: each its own."
    )
    parser.add_argument("--chunk-tokens", type=int, default=1024)
    parser.add_argument(
        "--most-logits", type=float, default=2.4, help="Largest logits with copies, in GiB, for others."
    )
    parser.add_argument("--seconds", type=float, default=20, help="Shortest time for a size.")
    parser.add_argument("--repeats", type=int, default=5, help="Fewest turns.")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch.")
    parser.add_argument("--clock", choices=CLOCKS, help="Default: cpu, or wall on a GPU.")
    args = parser.parse_args()
    args.clock = args.clock or ("wall" if args.device == "cuda" else "cpu")
    torch.set_num_threads(args.threads)
    tables = {}
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(BACKENDS[args.device], init_method=f"file://{folder}/store", rank=0, world_size=1)
        ways = from_logits(args)
        for table in args.tables:
            if table != "memory":
                keep_freed_memory()
            sizes = map(Size.parse, args.sizes or SIZES[table].split())
            tables[table] = [row for size in sizes for row in rows(table, size, ways, args)]
        dist.destroy_process_group()
    publish("logprobs", args, tables, clock=args.clock, chunk_tokens=args.chunk_tokens)


if __name__ == "__main__":
    main()
