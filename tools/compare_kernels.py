"""Compare the Triton kernels of log-probs with plain torch, on random cases.

    python tools/compare_kernels.py [--cases 2000] [--tp 1 2 3] [--seed 0] [--device cuda]

Each case draws dtype, sizes, labels, temperature, padding, kept ids, token mask, -inf logits and the way: from logits,
in place or not, or from hidden states in one or two passes. The reference is plain torch on the same values in float64,
with the whole vocabulary. Without a GPU the kernels run in Triton's interpreter, with tiles of a few columns, and a
quarter of the logits have rows more than 2^31 entries apart. With several ranks (--tp) each holds a part of the
vocabulary, and compares its own values and gradients; all ranks draw the same cases.

The table has the largest errors of all ranks as parts of their bound; the exit status is 1 if one is above it, or if
a kernel's first launch took it for wrong. With --out FOLDER it is kept there. The bound is what
float32 sums may lose, 1e-6 of 1 + |value|, or of the terms of a gradient; and, for gradients in bfloat16 or float16,
one rounding of the value. The interpreter cuts bfloat16 off, where a GPU rounds: its bound is twice as large.
"""

import argparse
import json
import math
import mmap
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

if "cuda" not in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from megatron_rl_loss import OutputLayer, log_probs_from_hidden, log_probs_from_logits, loss_from_hidden
from megatron_rl_loss.audit.progress import Progress
from megatron_rl_loss.logprobs import choice, first_launch, triton_kernels
from megatron_rl_loss.logprobs.kept_ids import KeptIds

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WAYS = ("logits", "logits", "logits in place", "two passes", "one pass")
#: What float32 may lose in a sum over the vocabulary, an exponential and a logarithm.
FLOAT32 = 1e-6
#: Entries from one row to the next where rows are far apart, and the rows that a case has at most.
STRIDE, MOST_ROWS = 2**31 + 96, 9
Errors = dict[str, float]
Group = Any


@cache
def reserved() -> mmap.mmap:
    """Addresses for rows that are far apart, of which the pages of these rows alone are ever touched (Linux)."""
    without_reserve = 0x4000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | without_reserve
    return mmap.mmap(-1, 4 * STRIDE * MOST_ROWS, flags)


def far_apart(rows: Tensor) -> Tensor:
    """The rows, [n, columns], in memory where each begins `STRIDE` entries after the one before; differentiable."""
    storage = torch.frombuffer(reserved(), dtype=rows.dtype).untyped_storage()
    apart = torch.empty(0, dtype=rows.dtype).set_(storage, 0, rows.shape, (STRIDE, 1))
    return apart.copy_(rows)


@dataclass(frozen=True)
class Case:
    """A random call. `of` makes (log-probs, entropy, gradient) of logits, in the dtype of what it is given."""

    way: str
    dtype: torch.dtype
    logits: Tensor  # [n, columns], in that dtype
    labels: Tensor
    options: dict[str, Any]
    slopes: tuple[Tensor, Tensor | None]  # of log-probs and entropy, in the loss
    is_far: bool = False  # rows are `far_apart`

    def part(self, group: Group | None) -> slice:
        """The columns of this rank, where the vocabulary lies on the ranks of a group."""
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        columns = self.logits.shape[1] // size
        return slice(rank * columns, (rank + 1) * columns)

    def of(
        self, dtype: torch.dtype, kernel: str | None, device: str, group: Group | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Log-probs, entropy and this rank's gradient: of its logits, or of hidden states, which all ranks have."""
        is_of_logits = self.way.startswith("logits")
        mine = self.logits[:, self.part(group)] if is_of_logits else self.logits
        leaf = mine.to(device, dtype, copy=True).requires_grad_()
        labels, options = self.labels.to(device), dict(self.options)
        if isinstance(options["keep"], Tensor):
            options["keep"] = options["keep"][..., self.part(group)].to(device)
        exact = torch.promote_types(dtype, torch.float32)
        slopes = [None if slope is None else slope.to(device, exact) for slope in self.slopes]
        if is_of_logits:
            options["gradient_in_place"] = self.way == "logits in place"
            logits = far_apart(leaf) if self.is_far and kernel != "torch" and device == "cpu" else leaf * 1
            values = log_probs_from_logits(logits, labels, tp_group=group, kernel=kernel, **options)
        else:  # a weight of ones and zeros: the logits are hidden states
            layer_options = {name: options.pop(name) for name in ("temperature", "vocab_size", "chunk_tokens")}
            weight = torch.eye(leaf.shape[1], dtype=dtype, device=device)[self.part(group)]
            layer = OutputLayer(weight, tp_group=group, **layer_options)
            if self.way == "one pass":
                return self._in_one_pass(leaf, layer, labels, slopes, kernel, options)
            values = log_probs_from_hidden(leaf, layer, labels, kernel=kernel, **options)
        pairs = [(value, slope) for value, slope in zip(values, slopes, strict=True) if slope is not None]
        outputs: list[Any] = [value for value, _ in pairs]
        (gradient,) = torch.autograd.grad(outputs, leaf, [slope for _, slope in pairs])
        return values.log_probs.detach(), values.entropy, gradient

    def _in_one_pass(
        self, leaf: Tensor, layer: OutputLayer, labels: Tensor, slopes: list[Any], kernel: Any, options: Any
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        def loss_of(log_probs: Tensor, entropy: Tensor | None, g: Tensor, **h: Tensor) -> Any:
            losses = (log_probs * g).flatten(1).sum(1) if log_probs.dim() > 1 else log_probs * g
            return losses if entropy is None or not h else losses + entropy * h["h"], {}

        inputs = {"g": slopes[0]} | ({} if slopes[1] is None else {"h": slopes[1]})
        ones = torch.ones(len(leaf), dtype=slopes[0].dtype)
        options = {"token_mask": torch.ones(len(leaf)), **options}
        share, values = loss_from_hidden(leaf, layer, labels, ones, loss_of, inputs, kernel=kernel, **options)
        (gradient,) = torch.autograd.grad(share, leaf)
        return values["log_probs"], values.get("entropy"), gradient


def drawn(draw: random.Random, tp: int = 1) -> Case:
    """A case by the generator alone, with equal parts of the vocabulary for so many ranks."""
    torch.manual_seed(draw.getrandbits(32))
    tokens, columns = draw.randint(1, MOST_ROWS), draw.randint(2, 90)
    columns += -columns % tp
    dtype, way, is_far = draw.choice(DTYPES), draw.choice(WAYS), draw.random() < 0.25
    ids = draw.choice((0, 0, 0, 1, 2, 5))
    held = draw.choice((None, None, draw.randint(1, columns)))
    logits = (torch.randn(tokens, columns) * draw.choice((1e-3, 1, 3, 3, 30))).to(dtype)
    labels = torch.randint(held or columns, (tokens, ids) if ids else (tokens,))
    if way.startswith("logits") and draw.random() < 0.2:
        masked = torch.rand(tokens, columns) < 0.3
        logits = logits.masked_fill(masked.scatter(1, labels.view(tokens, -1), False), -math.inf)
    keep: Any = draw.choice((None, None, torch.rand(tokens, columns) < 0.4, torch.rand(columns) < 0.4))
    if keep is not None and keep.dim() == 2 and draw.random() < 0.5:
        keep[:, held or columns :] = False  # an id of the padding is refused
        keep = KeptIds(keep.nonzero()[:, 1], torch.cat([torch.zeros(1).long(), keep.sum(1).cumsum(0)]))
    mask = draw.choice((None, None, torch.rand(tokens) < 0.6, torch.rand(tokens) * (torch.rand(tokens) < 0.6)))
    if mask is not None:
        labels = labels.masked_fill((mask == 0).view(-1, *[1] * (labels.dim() - 1)), -100)
        if way.startswith("logits"):
            logits = logits.masked_fill((mask == 0)[:, None], math.nan)
    wanted = draw.choice(("log-probs", "entropy", "both", "a metric"))
    options = {
        "temperature": draw.choice((1.0, draw.uniform(0.3, 2))),
        "vocab_size": held,
        "keep": keep,
        "token_mask": mask,
        "entropy": wanted != "log-probs",
        "chunk_tokens": draw.choice((None, draw.randint(1, 4))),
    }
    g, h = torch.randn(labels.shape), torch.randn(tokens) if wanted in ("entropy", "both") else None
    return Case(way, dtype, logits, labels, options, (g * (wanted != "entropy"), h), is_far)


def errors_of(case: Case, kernel: str | None = None, device: str = "cpu", group: Group | None = None) -> Errors:
    """Of kernels, or of another way, by name: the largest, as a part of its bound."""
    computed, expected = case.of(case.dtype, kernel, device, group), case.of(torch.float64, "torch", "cpu")
    if case.way.startswith("logits"):
        expected = *expected[:2], expected[2][:, case.part(group)]
    (g, h), rounding = case.slopes, 0.0
    terms = g.abs().view(len(g), -1).sum(1) + (0 if h is None or expected[1] is None else h.abs() * (1 + expected[1]))
    if case.dtype != torch.float32:
        rounding = torch.finfo(case.dtype).eps / (1 if device == "cpu" and case.dtype == torch.bfloat16 else 2)
    bounds = {
        "log-probs": FLOAT32 * (1 + expected[0].abs()),
        "entropy": None if expected[1] is None else FLOAT32 * (1 + expected[1]),
        "gradient": FLOAT32 * (1 + terms[:, None]) / case.options["temperature"] + rounding * expected[2].abs(),
    }
    errors = Errors()
    for value, right, (name, bound) in zip(computed, expected, bounds.items(), strict=True):
        if value is not None and right is not None:
            error = float(((value.detach().cpu().double() - right.detach()).abs() / bound).max())
            errors[name] = math.inf if math.isnan(error) else error
    return errors


def compare(
    cases: int,
    seed: int,
    device: str = "cpu",
    errors: Callable[[Case], Errors] | None = None,
    group: Group | None = None,
) -> tuple[dict[tuple[str, torch.dtype], float], list[str]]:
    """The largest errors by what and dtype, and the cases beyond a bound."""
    draw, worst, beyond = random.Random(seed), dict[tuple[str, torch.dtype], float](), list[str]()
    with Progress("comparing kernels", cases) as progress:
        for number in range(cases):
            case = drawn(draw, 1 if group is None else group.size())
            case_errors = (errors or (lambda case: errors_of(case, device=device, group=group)))(case)
            for name, error in case_errors.items():
                worst[name, case.dtype] = max(worst.get((name, case.dtype), 0.0), error)
                if error > 1:
                    far = ", rows far apart" * case.is_far
                    beyond.append(f"case {number} ({case.way}, {case.dtype}{far}): {name} {error:.2f} of its bound")
            progress.advance()
    return worst, beyond


def off_by_mistake() -> list[str]:
    """Programs that their first launch took for wrong, and why the kernels are off: plain torch did their work."""
    wrong = [first_launch.in_words(program) for program, is_sound in first_launch.compared.items() if not is_sound]
    return [f"{words} differed from plain torch at its first launch" for words in wrong] + [
        *filter(None, [choice.failure()])
    ]


def use_interpreter() -> None:
    """Have the kernels take tensors of the host, in tiles that loop over a few columns."""
    choice.DEVICES.add("cpu")
    triton_kernels.FORWARD["LANES"], triton_kernels.BACKWARD["BLOCK"], triton_kernels.COMBINED_ROWS = 4, 32, 8


def compare_on_rank(rank: int, tp: int, folder: str, args: argparse.Namespace) -> None:
    """Compare as one rank of a group; leaves the results, or the reason that kernels are off, in the folder."""
    if args.device == "cpu":
        torch.set_num_threads(1)
        use_interpreter()
    else:
        torch.cuda.set_device(rank)
    group = None
    if tp > 1:
        backend = "gloo" if args.device == "cpu" else "nccl"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=tp)
        group = dist.group.WORLD
    worst, beyond = compare(args.cases, args.seed, args.device, group=group)
    errors = [[name, str(dtype)[6:], error] for (name, dtype), error in sorted(worst.items(), key=str)]
    beyond += off_by_mistake()
    Path(folder, f"{rank}.json").write_text(json.dumps({"errors": errors, "beyond": beyond}))
    if group is not None:
        dist.barrier()
        dist.destroy_process_group()


def compare_on_ranks(tp: int, args: argparse.Namespace) -> tuple[dict[tuple[str, str], float], list[str]]:
    """The largest errors of all ranks by what and dtype, and what is beyond a bound."""
    with tempfile.TemporaryDirectory() as folder:
        if tp == 1:
            compare_on_rank(0, 1, folder, args)
        else:
            start = "fork" if args.device == "cpu" else "spawn"
            mp.start_processes(compare_on_rank, args=(tp, folder, args), nprocs=tp, start_method=start)  # type: ignore[attr-defined, no-untyped-call]
        by_rank = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(tp)]
    worst: dict[tuple[str, str], float] = {}
    for name, dtype, error in (row for report in by_rank for row in report["errors"]):
        worst[name, dtype] = max(worst.get((name, dtype), 0.0), error)
    return worst, [f"TP {tp}, rank {rank}: {text}" for rank, report in enumerate(by_rank) for text in report["beyond"]]


def main(flags: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000, help="For each number of ranks.")
    parser.add_argument("--tp", type=int, nargs="+", default=[1], metavar="RANKS", help="Ranks of the vocabulary.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="Folder for the table, as text and JSON.")
    args = parser.parse_args(flags)
    began, rows, beyond = time.monotonic(), list[dict[str, Any]](), list[str]()
    for tp in args.tp:
        worst, texts = compare_on_ranks(tp, args)
        rows += [
            {"TP": tp, "of": name, "dtype": dtype, "largest error / bound": error}
            for (name, dtype), error in worst.items()
        ]
        beyond += texts
    from tabulate import tabulate  # which the tests do not need

    where = torch.cuda.get_device_name() if args.device == "cuda" else "Triton's interpreter"
    about = {"cases": args.cases, "tp": args.tp, "seed": args.seed, "where": where, "torch": torch.__version__}
    about |= {"row stride": STRIDE, "beyond a bound": len(beyond), "seconds": round(time.monotonic() - began)}
    text = ", ".join(f"{key} {value}" for key, value in about.items())
    text += "\n\n" + tabulate(rows, headers="keys", floatfmt=".2f") + "\n"
    print(text)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"compare_kernels-{args.device}.txt").write_text(text)
        (args.out / f"compare_kernels-{args.device}.json").write_text(
            json.dumps({"about": about, "errors": rows}, indent=1) + "\n"
        )
    if beyond:
        sys.exit("\n".join([f"{len(beyond)} beyond a bound", *beyond[:20]]))


if __name__ == "__main__":
    main()
