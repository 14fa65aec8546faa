"""Compare the Triton kernels of log-probs with plain torch, on random cases.

    python tools/compare_kernels.py [--cases 2000] [--seed 0] [--device cuda]

Each case draws dtype, sizes, labels, temperature, padding, kept ids, token mask, -inf logits and the way: from logits,
in place or not, or from hidden states in one or two passes. The reference is plain torch on the same values in float64.
Without a GPU the kernels run in Triton's interpreter, with tiles of a few columns.

The table has the largest errors as parts of their bound; the exit status is 1 if one is above it. The bound is what
float32 sums may lose, 1e-6 of 1 + |value|, or of the terms of a gradient; and, for gradients in bfloat16 or float16,
one rounding of the value. The interpreter cuts bfloat16 off, where a GPU rounds: its bound is twice as large.
"""

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

if "cuda" not in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

import torch
from torch import Tensor

from megatron_rl_loss import OutputLayer, log_probs_from_hidden, log_probs_from_logits, loss_from_hidden
from megatron_rl_loss.audit.progress import Progress
from megatron_rl_loss.logprobs import choice, triton_kernels
from megatron_rl_loss.logprobs.kept_ids import KeptIds

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WAYS = ("logits", "logits", "logits in place", "two passes", "one pass")
#: What float32 may lose in a sum over the vocabulary, an exponential and a logarithm.
FLOAT32 = 1e-6
Errors = dict[str, float]


@dataclass(frozen=True)
class Case:
    """A random call. `of` makes (log-probs, entropy, gradient) of logits, in the dtype of what it is given."""

    way: str
    dtype: torch.dtype
    logits: Tensor  # [n, columns], in that dtype
    labels: Tensor
    options: dict[str, Any]
    slopes: tuple[Tensor, Tensor | None]  # of log-probs and entropy, in the loss

    def of(self, dtype: torch.dtype, kernel: str | None, device: str) -> tuple[Tensor, Tensor | None, Tensor]:
        leaf = self.logits.to(device, dtype, copy=True).requires_grad_()
        labels, options = self.labels.to(device), dict(self.options)
        if isinstance(options["keep"], Tensor):
            options["keep"] = options["keep"].to(device)
        exact = torch.promote_types(dtype, torch.float32)
        slopes = [None if slope is None else slope.to(device, exact) for slope in self.slopes]
        if self.way.startswith("logits"):
            in_place = self.way == "logits in place"
            values = log_probs_from_logits(leaf * 1, labels, gradient_in_place=in_place, kernel=kernel, **options)
        else:  # a weight of ones and zeros: the logits are hidden states
            of_layer = {name: options.pop(name) for name in ("temperature", "vocab_size", "chunk_tokens")}
            layer = OutputLayer(torch.eye(leaf.shape[1], dtype=dtype, device=device), **of_layer)
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


def drawn(draw: random.Random) -> Case:
    """A case by the generator alone."""
    torch.manual_seed(draw.getrandbits(32))
    tokens, columns, dtype, way = draw.randint(1, 9), draw.randint(2, 90), draw.choice(DTYPES), draw.choice(WAYS)
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
    return Case(way, dtype, logits, labels, options, (g * (wanted != "entropy"), h))


def errors_of(case: Case, kernel: str | None = None, device: str = "cpu") -> Errors:
    """Of kernels, or of another way, by name: the largest, as a part of its bound."""
    computed, expected = case.of(case.dtype, kernel, device), case.of(torch.float64, "torch", "cpu")
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
    cases: int, seed: int, device: str = "cpu", errors: Callable[[Case], Errors] | None = None
) -> tuple[dict[tuple[str, torch.dtype], float], list[str]]:
    """The largest errors by what and dtype, and the cases beyond a bound."""
    draw, worst, beyond = random.Random(seed), dict[tuple[str, torch.dtype], float](), list[str]()
    with Progress("comparing kernels", cases) as progress:
        for number in range(cases):
            case = drawn(draw)
            of_case = (errors or (lambda case: errors_of(case, device=device)))(case)
            for name, error in of_case.items():
                worst[name, case.dtype] = max(worst.get((name, case.dtype), 0.0), error)
                if error > 1:
                    beyond.append(f"case {number} ({case.way}, {case.dtype}): {name} {error:.2f} of its bound")
            progress.advance()
    return worst, beyond


def use_interpreter() -> None:
    """Have the kernels take tensors of the host, in tiles that loop over a few columns."""
    choice.DEVICES.add("cpu")
    triton_kernels.FORWARD["LANES"], triton_kernels.BACKWARD["BLOCK"], triton_kernels.COMBINED_ROWS = 4, 32, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
        use_interpreter()
    began = time.monotonic()
    worst, beyond = compare(args.cases, args.seed, args.device)
    from tabulate import tabulate  # which the tests do not need

    rows = [
        {"of": name, "dtype": str(dtype)[6:], "largest error / bound": error}
        for (name, dtype), error in sorted(worst.items(), key=str)
    ]
    where = torch.cuda.get_device_name() if args.device == "cuda" else "Triton's interpreter"
    print(f"{args.cases} cases, seed {args.seed}, {where}, torch {torch.__version__}, {time.monotonic() - began:.0f} s")
    print(tabulate(rows, headers="keys", floatfmt=".2f"))
    if beyond or choice.failure():
        sys.exit("\n".join([f"{len(beyond)} beyond a bound", *beyond[:20], choice.failure()]))


if __name__ == "__main__":
    main()
