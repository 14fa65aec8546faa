"""Memory and time of log-probs and entropy, beside other projects' functions and the time that memory needs.

    python tools/bench/logprobs.py --device cuda --slime ~/slime              # at most four minutes
    python tools/bench/logprobs.py --slime ~/slime                            # on a CPU: 8 GB, some ten minutes
    python tools/bench/logprobs.py --tables logits --sizes 4096x32768         # one table, one size

Tables, each forward and backward:

- *logits*: time from logits, of log-probs alone, and with the entropy and its gradient.
- *hidden*: time from hidden states.
- *compiled* (on a GPU): time from logits beside what `torch.compile` makes, which takes some ten seconds for each size.
- *memory*: of output layer and log-probs. **Peak extra** is torch's largest allocation at a time in the pass, minus the
  returned gradients (of hidden states and weight). On a CPU the allocations are those that torch's profiler
  records, kernels' temporaries included and a BLAS's own buffers not; on a GPU `torch.cuda.max_memory_allocated`.

The ways:

- *floor* (from logits): what must move, one read forward, one read and one write backward: 1.5 times a copy of the
  logits in the same turns. *Products* (from hidden states): the matrix products of two passes in chunks, and nothing
  else. Ratios *to the floor* are to these.
- *megatron*: `vocab_parallel_cross_entropy` of the installed Megatron-Core, eager; *megatron, fused*: its
  `fused_vocab_parallel_cross_entropy`, which it compiles. They have no entropy.
- *liger*, *flash_attn*, *transformer_engine*: their kernels, where they are installed.
- *torch.compile*: of plain torch, a `log_softmax` and what is read of it.
- *read twice* (from logits, on a CPU): plain torch on blocks of half a million logits, which autograd differentiates. A
  block's intermediates are dropped and made again backward (`torch.utils.checkpoint`), so that it needs no formula of a
  gradient, and no more memory than ours but for autograd's own copy of the gradient.
- *slime*: `calculate_log_probs_and_entropy` of a checkout, in chunks of as many tokens as ours (its
  `log_probs_chunk_size`), on float32 logits, which it asks for.
- *ours*: from logits `log_probs_from_logits`; from hidden states `log_probs_from_hidden` (two passes) and
  `loss_from_hidden` (one pass, with a clipped policy loss). The title says who reads: kernels or plain torch; where it
  is kernels, *ours, plain torch* has rows of its own.

They take turns (`timing.take_turns`); ratios are of the fastest turns of one run. One rank holds the vocabulary. An
*error* is the largest of 64 log-probs against float64, absolute. *Busy elsewhere* is how many cores others kept busy.
On a shared machine ``--clock cpu`` (the default without a GPU) counts this process's CPU seconds with one thread;
``--threads 2 --clock wall`` needs a free one. *In place* writes the gradient over the logits, as Megatron's does with
float32 logits. A way that fails or takes more than its part of the time is left out, with the reason below the tables.
"""

import argparse
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
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
from megatron_rl_loss.logprobs import kernels
from megatron_rl_loss.logprobs.choice import choose
from megatron_rl_loss.logprobs.layer import WeightGradient, default_chunk_tokens

MB = 2**20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SIZES = {
    "cpu": {
        "logits": "8192x32768 4096x131072 1024x152064 4096x32768:bfloat16",
        "hidden": "2048x32768",
        "memory": "4096x32768 16384x32768 131072x32768 4096x152064 131072x152064 16384x32768:bfloat16",
    },
    "cuda": {
        "logits": "8192x32768 4096x32768:bfloat16 8192x152064:bfloat16 4096x131072 16384x19008:bfloat16",
        "hidden": "8192x32768:bfloat16 8192x152064:bfloat16",
        "compiled": "8192x32768 4096x32768:bfloat16",
        "memory": "16384x152064:bfloat16",
    },
}
#: The width of the hidden states. On a GPU the products must be those of a model, to have their speed.
HIDDEN = {"cpu": {"memory": 64, "hidden": 256}, "cuda": {"memory": 4096, "hidden": 4096}}
#: Of the time of a run, what a table may take.
PARTS = {"logits": 0.35, "hidden": 0.25, "compiled": 0.35, "memory": 0.05}
#: Seconds that a way may take before it is timed: it compiles.
FIRST_CALL = 45
#: Log-probs that are compared with float64.
COMPARED = 64
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


def megatron_fused(logits: Tensor, labels: Tensor) -> tuple[Tensor, None]:
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    loss = fused_vocab_parallel_cross_entropy(logits[:, None], labels[:, None], dist.group.WORLD)
    return -loss[:, 0], None


def plain(logits: Tensor, labels: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
    log_q = logits.float().log_softmax(-1)
    log_probs = log_q.gather(1, labels[:, None])[:, 0]
    return log_probs, -(log_q.exp() * log_q).sum(-1) if entropy else None


def alone(kernel: Callable[[Tensor, Tensor, None], Tensor], logits: Tensor, labels: Tensor) -> tuple[Tensor, None]:
    return kernel(logits, labels, None), None


def ours(logits: Tensor, labels: Tensor, **more: Any) -> tuple[Tensor, Tensor | None]:
    log_probs, entropy = log_probs_from_logits(logits, labels, **more)
    return log_probs, entropy


def is_installed(name: str, args: argparse.Namespace) -> bool:
    """Whether a kernel of another project can be tried."""
    return args.device == "cuda" and find_spec({"liger": "liger_kernel"}.get(name, name)) is not None


def from_logits(args: argparse.Namespace) -> dict[str, FromLogits]:
    """Other frameworks' passes from logits."""
    ways: dict[str, FromLogits] = {"megatron": megatron}
    ways |= {name: partial(alone, kernel) for name, kernel in kernels.KERNELS.items() if is_installed(name, args)}
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
    on_host = torch.ones(size.tokens)  # or the host would wait for the weights
    inputs = {"old": torch.full_like(advantages, 1 / size.vocabulary).log(), "advantages": advantages}

    def reduced(log_probs: Tensor, entropy: Tensor | None) -> Tensor:
        return (per_token(log_probs, entropy, **inputs)[0] * weights).sum()

    def whole(way: FromLogits) -> Tensor:
        return reduced(*way(hidden @ weight.t(), labels))

    def two_passes(entropy: bool, kernel: str | None = None) -> Tensor:
        return reduced(*log_probs_from_hidden(hidden, output_layer, labels, entropy=entropy, kernel=kernel))

    def one_pass(entropy: bool, kernel: Any = None) -> Tensor:
        loss = partial(loss_from_hidden, hidden, output_layer, labels, weights, per_token, inputs)
        return loss(entropy=entropy, kernel=kernel, token_mask=on_host)[0]

    shares: dict[str, Callable[[], Tensor]] = {name: partial(whole, way) for name, way in ways.items()}
    for entropy, name in ENTROPY.items():
        for kernel, says in our_kernels(args).items():
            shares[f"ours, two passes{name}{says}"] = partial(two_passes, entropy, kernel)
            shares[f"ours, one pass{name}{says}"] = partial(one_pass, entropy, kernel)
        if is_installed("liger", args):
            shares[f"liger, hidden{name}"] = partial(two_passes, entropy, "liger")
    passes: dict[str, Pass] = {"products": partial(products, hidden.detach(), weight.detach(), args.chunk_tokens)}

    def run(share: Callable[[], Tensor]) -> Sequence[Tensor]:
        return torch.autograd.grad(share(), (hidden, weight))

    return passes | {name: partial(run, share) for name, share in shares.items()}


def products(hidden: Tensor, weight: Tensor, chunk_tokens: int) -> list[Tensor]:
    """The matrix products of two passes."""
    weight_gradient = WeightGradient(torch.zeros_like(weight, dtype=torch.float32))
    hidden_gradient = torch.empty_like(hidden)
    for chunk, into in zip(hidden.split(chunk_tokens), hidden_gradient.split(chunk_tokens), strict=True):
        for _ in range(2):
            logits = chunk @ weight.t()
        weight_gradient.add_product(logits, chunk)
        torch.mm(logits, weight, out=into)
    return [hidden_gradient, weight_gradient.total]


def our_kernels(args: argparse.Namespace) -> dict[str | None, str]:
    """Who reads in the rows of ours, and what the rows' names say of it."""
    chosen = choose(torch.empty(1, 1, device=args.device), 1, kernel=None)
    return {None: ""} if chosen.kernels is None else {None: "", "torch": ", plain torch"}


def compiled_ways() -> dict[str, FromLogits]:
    ways: dict[str, FromLogits] = {"megatron": megatron, "megatron, fused": megatron_fused}
    for entropy, name in ENTROPY.items():
        ways[f"torch.compile{name}"] = partial(torch.compile(plain, dynamic=False), entropy=entropy)
    return ways


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

    ways = dict(ways)
    for entropy, name in ENTROPY.items():
        for kernel, says in our_kernels(args).items():
            ways[f"ours{name}{says}"] = partial(ours, entropy=entropy, kernel=kernel)
        if args.device == "cpu":
            ways[f"read twice{name}"] = partial(read_twice, entropy=entropy)
    ways["ours in place, entropy"] = partial(ours, entropy=True, gradient_in_place=True)
    keep = torch.rand(size.tokens, size.vocabulary, device=args.device) < 0.5
    ways["ours, kept ids, entropy"] = partial(ours, entropy=True, keep=keep)
    ways["ours, a third masked"] = partial(ours, token_mask=torch.arange(size.tokens) % 3 > 0)
    overwrites = ("megatron", "megatron, fused", "transformer_engine", "ours in place, entropy")
    copy = torch.empty_like(logits)
    passes: dict[str, Pass] = {"floor": lambda: [copy.copy_(logits.detach())]}
    return passes | {name: partial(run, way, spoiled if name in overwrites else logits) for name, way in ways.items()}


def errors_of(size: Size, ways: dict[str, FromLogits], args: argparse.Namespace) -> dict[str, float]:
    """The largest error of some log-probs, by way."""
    few = Size(COMPARED, size.vocabulary, size.dtype)
    labels, _ = labels_and_advantages(few, args.device)
    logits = leaf(few.tokens, few.vocabulary, like=few, device=args.device).detach()
    exact = logits.double().log_softmax(-1).gather(1, labels[:, None])[:, 0]
    errors = dict[str, float]()
    for name, way in (ways | {"ours": ours}).items():
        try:
            errors[name] = float((way(logits.clone().requires_grad_(), labels)[0].detach() - exact).abs().max())
        except Exception:  # the reason is told where it is timed
            continue
    return errors


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


class Clock:
    """The time that is left, and the reasons why something was left out."""

    def __init__(self, seconds: float) -> None:
        self.end, self.left_out = time.monotonic() + seconds, list[str]()

    def left(self) -> float:
        return self.end - time.monotonic()

    @contextmanager
    def told(self, what: str) -> Iterator[None]:
        """Go on after an error."""
        try:
            yield
        except Exception as error:
            self.left_out.append(f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:160]}")

    @contextmanager
    def limit(self, what: str, seconds: float) -> Iterator[None]:
        """Go on after an error, or after that many seconds of Python: a single operation is not cut off."""

        def too_late(*_: Any) -> None:
            raise TimeoutError(f"stopped after {seconds:.0f} s")

        former = signal.signal(signal.SIGALRM, too_late)
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1))
        try:
            with self.told(what):
                yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, former)


def rows(
    table: str, size: Size, ways: dict[str, FromLogits], args: argparse.Namespace, clock: Clock
) -> list[dict[str, Any]]:
    # Some ways copy the logits, and would not fit in memory.
    copies = {name: 1 if name == "megatron" else 2 for name in ways}
    ways = {name: way for name, way in ways.items() if copies[name] * size.logits <= args.most_logits * 2**30}
    hidden_size = HIDDEN[args.device].get(table)
    if hidden_size is None:
        passes = logits_passes(size, compiled_ways() if table == "compiled" else ways, args)
    else:
        passes = hidden_passes(size, hidden_size, ways, args)
    others, unit = Others(), "peak extra MB" if table == "memory" else "ms"
    figures, runs = dict[str, float](), dict[str, Pass]()
    errors = errors_of(size, ways, args) if table == "logits" else {}
    for name, run in passes.items():
        what = f"{table}, {size.tokens}x{size.vocabulary}, {name}"
        with clock.limit(what, min(FIRST_CALL, clock.left())):
            if table == "memory" and name != "products":
                figures[name] = peak_extra(run, args.device) / MB
            elif table != "memory":
                run()
                runs[name] = run
    if runs:
        turns = take_turns(runs, min(args.seconds, clock.left()), args.repeats, args.device, CLOCKS[args.clock])
        figures = {name: min(times) for name, times in turns.items()}
    if "floor" in figures:
        figures["floor"] *= 1.5
    floor = figures.get("floor") or figures.get("products")
    rows_of_size = []
    for name, figure in figures.items():
        slime = figures.get("slime, entropy" if "entropy" in name else "slime")
        row = asdict(size) | {"logits MB": size.logits / MB, "way": name, unit: figure}
        row |= {"to the floor": figure / floor} if floor else {}
        row |= {"to megatron": figure / figures["megatron"] if "megatron" in figures else None}
        row |= {"to slime": slime and figure / slime} | ({"error": errors.get(name)} if errors else {})
        rows_of_size.append(row | {"busy elsewhere": others.busy()})
    return rows_of_size


def main() -> None:
    parser = flags(__doc__, "slime")
    parser.add_argument("--tables", nargs="+", choices=PARTS, help="Default: all, without `compiled` on a CPU.")
    parser.add_argument(
        "--sizes", nargs="+", metavar="TOKENSxVOCABULARY[:DTYPE]", help="Sizes of every table; default: each its own."
    )
    parser.add_argument("--chunk-tokens", type=int, help="Default: as `OutputLayer`.")
    parser.add_argument(
        "--most-logits", type=float, help="Largest logits with copies, in GiB. Default: 2.4, 24 on a GPU."
    )
    parser.add_argument("--seconds", type=float, help="Shortest time for a size. Default: 20, 1.5 on a GPU.")
    parser.add_argument("--repeats", type=int, default=5, help="Fewest turns.")
    parser.add_argument("--limit", type=float, help="Seconds for all tables. Default: 7200, 240 on a GPU.")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch.")
    parser.add_argument("--clock", choices=CLOCKS, help="Default: cpu, or wall on a GPU.")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    args.tables = args.tables or list(SIZES[args.device])
    args.clock = args.clock or ("wall" if on_gpu else "cpu")
    args.limit = args.limit or (240 if on_gpu else 7200)
    args.seconds = args.seconds or (1.5 if on_gpu else 20)
    args.most_logits = args.most_logits or (24 if on_gpu else 2.4)
    args.chunk_tokens = args.chunk_tokens or default_chunk_tokens(torch.device(args.device))
    torch.set_num_threads(args.threads)
    tables, left_out, began = dict[str, list[dict[str, Any]]](), list[str](), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(BACKENDS[args.device], init_method=f"file://{folder}/store", rank=0, world_size=1)
        ways = from_logits(args)
        for table in args.tables:
            if table != "memory":
                keep_freed_memory()
            spared = args.limit - (time.monotonic() - began)
            clock = Clock(min(spared, args.limit * PARTS[table] / sum(PARTS[name] for name in args.tables)))
            tables[table] = []
            sizes = args.sizes or SIZES[args.device].get(table, SIZES[args.device]["logits"]).split()
            for size in map(Size.parse, sizes):
                if clock.left() <= 0:
                    clock.left_out.append(f"{table}, {size.tokens}x{size.vocabulary}: no time is left")
                else:
                    with clock.told(f"{table}, {size.tokens}x{size.vocabulary}"):
                        tables[table] += rows(table, size, ways, args, clock)
            left_out += clock.left_out
        dist.destroy_process_group()
    read_by = "plain torch" if len(our_kernels(args)) == 1 else "Triton kernels"
    publish("logprobs", args, tables, clock=args.clock, chunk_tokens=args.chunk_tokens, read_by=read_by)
    absent = [name for name in kernels.KERNELS if not is_installed(name, args)]
    print("\n".join(["left out:", f"not to be had here: {', '.join(absent) or 'nothing'}", *left_out]))


if __name__ == "__main__":
    main()
