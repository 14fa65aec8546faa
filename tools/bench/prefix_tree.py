"""What a tree of samples saves: tokens and seconds of a small transformer, unshared rows beside the tree in one run.

    python tools/bench/prefix_tree.py [--areal PATH] [--repeats 3]

Forward and backward on this host, attention by runs, the least of the repeats of each kind, which take turns. With a
checkout of AReaL, building is timed beside its own `build_packed_tree_batch` on the same rows.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]

from megatron_rl_loss import PrefixTree

WORDS, WIDTH, HEADS, LAYERS = 1000, 256, 4, 4
Rows = list[np.ndarray[Any, Any]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


def random_rows(rng: Any, *lengths: int) -> Rows:
    return [rng.integers(0, WORDS, length) for length in lengths]


def scenes() -> dict[str, Rows]:
    rng = np.random.default_rng(0)
    (prompt,) = random_rows(rng, 1024)
    answers = [np.concatenate([prompt, answer]) for answer in random_rows(rng, *[256] * 8)]
    level = random_rows(rng, 512)
    for _ in range(4):
        level = [np.concatenate([row, turn]) for row in level for turn in random_rows(rng, 128, 128)]
    return {
        "8 answers of 256 to a prompt of 1,024": answers,
        "a tool-use tree of depth 4, 2 branches each": level,
        "8 rows of 640 that share nothing": random_rows(rng, *[640] * 8),
    }


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def compare(rows: Rows, repeats: int) -> tuple[PrefixTree, float, float, float]:
    """The tree; seconds of rows and of the tree, the least of the repeats; the largest difference of results."""
    torch.manual_seed(0)
    tokens, places = nn.Embedding(WORDS, WIDTH), nn.Embedding(8192, WIDTH)
    blocks = nn.ModuleList(Block() for _ in range(LAYERS))
    tree = PrefixTree(rows)

    def run(ids: Tensor, positions: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        x: Tensor = tokens(ids) + places(positions)
        for block in blocks:
            x = block(x, attention)
        return x[0]

    def by_rows() -> list[Tensor]:
        return [run(torch.from_numpy(row)[None], torch.arange(len(row))[None], causal) for row in rows]

    def by_tree() -> list[Tensor]:
        x = run(*tree.inputs(), tree.attend)
        return [x[torch.tensor(path)] for path in tree.paths]

    seconds, results = {"rows": np.inf, "tree": np.inf}, dict[str, list[Tensor]]()
    for _ in range(repeats):
        for kind, function in (("rows", by_rows), ("tree", by_tree)):
            begin = time.perf_counter()
            results[kind] = function()
            torch.stack([x.square().mean() for x in results[kind]]).sum().backward()
            seconds[kind] = min(seconds[kind], time.perf_counter() - begin)
    differences = [float((a - b).detach().abs().max()) for a, b in zip(results["rows"], results["tree"], strict=True)]
    return tree, seconds["rows"], seconds["tree"], max(differences)


def building(repeats: int, areal: str | None) -> list[str]:
    """Seconds to build trees of many rows, half of each shared, from tensors; AReaL's own beside them."""
    theirs = None if areal is None else builder_of_areal(areal)
    lines = []
    for number, length in ((64, 4096), (512, 8192)):
        rng = np.random.default_rng(0)
        (shared,) = random_rows(rng, length // 2)
        rows = [np.concatenate([shared, row]) for row in random_rows(rng, *[length // 2] * number)]
        batch = torch.tensor(np.stack(rows))
        ours = least(partial(PrefixTree, list(batch)), repeats)
        line = f"| {number} x {length:,} | {ours:.3f} s |"
        if theirs is not None:
            areal_seconds = least(partial(theirs, batch), 1)
            line += f" {areal_seconds:.1f} s | {ours / areal_seconds:.4f} |"
        lines.append(line)
    return lines


def least(function: Callable[[], Any], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def builder_of_areal(root: str) -> Callable[[Tensor], Any]:
    """`build_packed_tree_batch` of one tree; positions by their dense mask are theirs, and a part of it."""
    import dataclasses

    from checkouts import AREAL, load

    more = dataclasses.replace(
        AREAL, passed_by=(*AREAL.passed_by, "areal.models", "areal.api", "areal.models.tree_attn")
    )
    (tree,) = load(more, root, "areal.models.tree_attn.tree")
    cli = importlib.import_module("areal.api.cli_args")

    def build(rows: Tensor) -> Any:
        budget = -(-int(rows.numel()) // 128) * 128
        data = {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
        if rows.numel() ** 2 > 2**33:  # their dense mask of all slots would not fit: only what comes before it
            return tree._greedy_build_tries(data, budget)
        return tree.build_packed_tree_batch(data, cli.MicroBatchSpec(max_tokens_per_mb=budget))

    return build


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--areal", metavar="PATH", help="a checkout of AReaL")
    parser.add_argument("--repeats", type=int, default=3)
    settings = parser.parse_args()
    torch.set_num_threads(1)
    print("| samples | tokens | slots | fewer | seconds, rows | tree | faster | largest difference |")
    print("|---|---|---|---|---|---|---|---|")
    for name, rows in scenes().items():
        tree, row_seconds, tree_seconds, difference = compare(rows, settings.repeats)
        fewer, faster = tree.total_tokens / tree.num_slots, row_seconds / tree_seconds
        print(
            f"| {name} | {tree.total_tokens:,} | {tree.num_slots:,} | {fewer:.1f} | {row_seconds:.2f} | "
            f"{tree_seconds:.2f} | {faster:.1f} | {difference:.0e} |",
            flush=True,
        )
    print("\n| rows | PrefixTree |" + (" AReaL's own | ratio |" if settings.areal else ""))
    print("|---|---|" + ("---|---|" if settings.areal else ""))
    print("\n".join(building(settings.repeats, settings.areal)))


if __name__ == "__main__":
    main()
