"""Repeat examples/does_it_matter.py with other weights, optimizers and loss terms: which of them matter?

    OMP_NUM_THREADS=1 python tools/vary_matter.py --seeds 0 1 2 3 4 --exact docs/matter/runs.jsonl \
        --output docs/matter/variations.jsonl  # two minutes a seed; without --seeds: the table alone

Each variation is compared with an exact run of the same seed. Runs that the output file has are not repeated.
"""

import argparse
import copy
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from does_it_matter import (
    ADAM,
    EXACT,
    GROUP,
    LIMIT,
    ONE_ROW,
    PROMPT,
    Arm,
    Batch,
    cut,
    token_losses,
    train,
    warm_start,
    weights_of,
)
from matter.policy import GPT
from matter.report import columns, late, read
from torch import Generator, Tensor, nn

from megatron_rl_loss import Samples, weights_column

PADDED_PROMPT = 64  # tokens of a prompt, where rows are packed
Weights = Callable[[Batch, Generator], Tensor]  # [rows, LIMIT]
Backward = Callable[..., None]  # backward(model, batch, generator, start=...)


class Variation(NamedTuple):
    name: str
    backward: Backward
    against: str = EXACT.name
    optimizer: Any = ADAM


def exact_weights(batch: Batch, generator: Generator) -> Tensor:
    return weights_of(EXACT, batch.mask, [])


def default(rows: int, *, shuffled: bool = True) -> Weights:
    arm = Arm("", rows)

    def weights(batch: Batch, generator: Generator) -> Tensor:
        ranks = torch.arange(len(batch.mask)).split(rows)
        return weights_of(arm, batch.mask, cut(arm, batch.mask, generator) if shuffled else ranks)

    return weights


def zigzag(batch: Batch, generator: Generator) -> Tensor:
    """Two CP ranks divide by the tokens of their own pieces of 4 rows; DDP averages over both."""
    quarter = (PROMPT + LIMIT + 1) // 4
    chunk = (PROMPT - 1 + torch.arange(LIMIT)) // quarter
    microbatches = cut(Arm("", 4), batch.mask, generator)
    ranks = [batch.mask * held for held in ((chunk == 0) | (chunk == 3), (chunk == 1) | (chunk == 2))]
    weights = torch.zeros_like(batch.mask)
    for mask in ranks:
        for rows in microbatches:
            weights[rows] += mask[rows] / mask[rows].sum().clamp(min=1) / len(microbatches) / len(ranks)
    return weights


def packed(size: int) -> Weights:
    """Rows, longest first, go to the first bin of `size` tokens with room (first-fit decreasing)."""

    def weights(batch: Batch, generator: Generator) -> Tensor:
        lengths = batch.mask.sum(1).long() + PADDED_PROMPT
        bins: list[list[int]] = []
        for at in lengths.argsort(descending=True, stable=True).tolist():
            fitting = [rows for rows in bins if int(lengths[[*rows, at]].sum()) <= size]
            if not fitting:
                bins.append([])
            (fitting or bins)[0 if fitting else -1].append(at)
        return weights_of(ONE_ROW, batch.mask, [torch.tensor(rows) for rows in bins])

    return weights


def only_signal(batch: Batch, generator: Generator) -> Tensor:
    """The denominator counts only rows of prompts whose rewards differ."""
    differs = batch.reward.view(-1, GROUP).std(1).repeat_interleave(GROUP) > 0
    return torch.stack(weights_column("token_mean", list(batch.mask * differs[:, None])))


def mode_of_rows(mode: str, length: int) -> Weights:
    """An exact mode of responses cut into rows of that length; a response is a session."""

    def weights(batch: Batch, generator: Generator) -> Tensor:
        rows = batch.mask.reshape(-1, length)
        there = rows.sum(1) > 0
        sessions = (torch.arange(len(rows)) * length // LIMIT)[there].tolist()
        weights = torch.zeros_like(rows)
        weights[there] = torch.stack(weights_column(mode, Samples(list(rows[there]), ids={"session": sessions})))
        return weights.view_as(batch.mask)

    return weights


def without_std(weights: Weights) -> Weights:
    def scaled(batch: Batch, generator: Generator) -> Tensor:
        std = batch.reward.view(-1, GROUP).std(1).repeat_interleave(GROUP) + 1e-6
        return weights(batch, generator) * std[:, None]

    return scaled


@contextmanager
def outputs_of(module: nn.Module) -> Iterator[list[Tensor]]:
    outputs: list[Tensor] = []
    hook = module.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    yield outputs
    hook.remove()


def backward(
    model: Any,
    batch: Batch,
    generator: Generator,
    *,
    start: GPT,
    weights: Weights = exact_weights,
    policy: float = 1.0,
    noise: float = 1.0,
    max_norm: float = float("inf"),
    kl: float = 0.0,
    entropy: float = 0.0,
    value: float = 0.0,
) -> None:
    """Gradients of the policy loss, times `policy` and a factor between 1/noise and noise, and of exact other terms."""
    with outputs_of(model.head) as logits, outputs_of(model.norm) as hidden:
        losses = token_losses(model, batch)
    spread = 2 * torch.rand((), generator=generator).item() - 1 if noise != 1 else 0.0
    loss = policy * noise**spread * (weights(batch, generator) * losses).sum()
    log_probs, terms = logits[0][:, PROMPT - 1 :].log_softmax(-1), torch.zeros_like(batch.mask)
    if kl:
        with torch.no_grad(), outputs_of(start.head) as first:
            token_losses(start, batch)
        terms = terms + kl * (log_probs.exp() * (log_probs - first[0][:, PROMPT - 1 :].log_softmax(-1))).sum(-1)
    if entropy:
        terms = terms + entropy * (log_probs.exp() * log_probs).sum(-1)
    if value:
        values = model.value(hidden[0][:, PROMPT - 1 :]).squeeze(-1)
        terms = terms + value * (values - batch.reward[:, None]) ** 2
    (loss + (exact_weights(batch, generator) * terms).sum()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)


SGD = partial(torch.optim.SGD, lr=0.05)
VARIATIONS = [
    *(Variation(f"default, {rows} rows shuffled", partial(backward, weights=default(rows))) for rows in (2, 32)),
    Variation("default, means of 8 DP ranks", partial(backward, weights=default(16, shuffled=False))),
    Variation("default, CP 2 zigzag, 4 rows shuffled", partial(backward, weights=zigzag)),
    *(Variation(f"default, bins of {size} tokens with prompts of {PADDED_PROMPT}",
                partial(backward, weights=packed(size))) for size in (512, 1024)),
    Variation("prompts without a signal left out of the denominator", partial(backward, weights=only_signal)),
    Variation("whole loss x 1/8", partial(backward, policy=1 / 8)),
    Variation("whole loss x 16, gradient clipped at 1", partial(backward, policy=16.0, max_norm=1.0)),
    Variation("whole loss x 1/4 to 4 by chance, clipped at 1", partial(backward, noise=4.0, max_norm=1.0)),
    Variation("sample_mean, exact", partial(backward, weights=mode_of_rows("sample_mean", LIMIT))),
    Variation("session_mean of rows of 8 tokens, exact", partial(backward, weights=mode_of_rows("session_mean", 8))),
    Variation("sample_mean of rows of 8 tokens, exact", partial(backward, weights=mode_of_rows("sample_mean", 8))),
    Variation("exact, SGD", backward, optimizer=SGD),
    Variation("default, 1 row, SGD", partial(backward, weights=default(1)), "exact, SGD", SGD),
    Variation("exact, advantages without std", partial(backward, weights=without_std(exact_weights))),
    Variation("default, 1 row, advantages without std", partial(backward, weights=without_std(default(1))),
              "exact, advantages without std"),
    *(Variation(f"exact, KL term{name}", partial(backward, kl=0.04, policy=policy),
                EXACT.name if policy == 1 else "exact, KL term")
      for name, policy in (("", 1.0), (", policy x 1/8", 1 / 8), (", policy x 1/64", 1 / 64))),
    *(Variation(f"exact, entropy term{name}", partial(backward, entropy=0.01, policy=policy),
                EXACT.name if policy == 1 else "exact, entropy term")
      for name, policy in (("", 1.0), (", policy x 1/8", 1 / 8), (", policy x 1/64", 1 / 64))),
    *(Variation(f"exact, value term{name}", partial(backward, value=value),
                EXACT.name if value == 1 else "exact, value term")
      for name, value in (("", 1.0), (" x 8", 8.0), (" x 32", 32.0))),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[], help="none: the table alone")
    parser.add_argument("--exact", type=Path, required=True, help="output of does_it_matter.py, with the same seeds")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines; runs that it has are not repeated")
    parser.add_argument("--only", default="", help="regular expression of the variations to run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = read(args.output)
    for seed in args.seeds:
        for variation in VARIATIONS:
            key = {"after_wrong": "limit", "in_megatron": False, "arm": variation.name, "seed": seed}
            if re.search(args.only, variation.name) and not any(run | key == run for run in runs):
                start = copy.deepcopy(warm_start(seed, "limit"))
                torch.manual_seed(seed)
                start.value = nn.Linear(start.head.in_features, 1)  # used by the value term alone
                learn = partial(variation.backward, start=start)
                runs.append(key | {"log": train(copy.deepcopy(start), seed, "limit", learn, variation.optimizer)})
                with args.output.open("a") as file:
                    file.write(json.dumps(runs[-1]) + "\n")
                print(f"seed {seed}, {variation.name}: {late(runs[-1], 'reward'):.2f}", flush=True)
    exact = [run for run in read(args.exact) if run["after_wrong"] == "limit" and not run["in_megatron"]]
    print("| variation | reward | difference |\n| --- | --- | --- |")
    rows = [[x.name, *columns(exact + runs, x.name, x.against)[:2]] for x in VARIATIONS]
    for row in sorted(rows, key=lambda row: -float(row[2].partition(",")[0] or 0)):
        print("|", " | ".join(row), "|")


if __name__ == "__main__":
    main()
