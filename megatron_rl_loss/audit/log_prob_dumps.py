"""Dumps of log-probs: the columns that a trainer and a sampler write, and the comparison of two files.

Which side a file is decides which of its columns is read, by `COLUMNS`: one file may hold both sides.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl_loss.audit.log_prob_gap import LogProbGap, compare_log_probs
from megatron_rl_loss.losses.sampler_columns import sampled_log_probs

#: By side, the names of its column.
COLUMNS = {
    # slime's, miles's and vime's trainers; NeMo-RL's, whose training data has both sides; AReaL's and verl's
    "train": ("log_probs", "prev_logprobs", "old_log_probs"),
    # slime's, miles's, vime's and this library's; NeMo-Gym's; NeMo-RL's; SGLang's, in `meta_info` or alone
    "rollout": ("rollout_log_probs", "generation_log_probs", "generation_logprobs", "output_token_logprobs"),
}
_MASKS = ("loss_masks", "loss_mask", "token_loss_mask")
_NAMES = ("sample_index", "sample_indices", "index", "idx")
_DUMP = "a dump is a .pt without code or a .jsonl, with a list of log-probs per sample. Write torch.save([tensor, ...])"


class Sample(NamedTuple):
    """The log-probs of a sample, its mask, empty if there is none, and its length with the prompt."""

    log_probs: Tensor
    mask: list[float]
    total: int


class Dump(NamedTuple):
    """One side of a comparison: the samples by id, and the column that they were read from; None for plain lists."""

    samples: dict[str, Sample]
    column: str | None
    path: Path

    def __str__(self) -> str:
        return f"{self.path}" if self.column is None else f"{self.column} of {self.path}"


def compare_dumps(train: Path, rollout: Path) -> LogProbGap:
    """Compare two files, joined by sample id, with the masks of `train`, else of `rollout`."""
    left, right = _read(rollout, "rollout"), _read(train, "train")
    if train.resolve() == rollout.resolve() and right.column == left.column:
        raise ValueError(
            f"{train} twice, and plain lists in it: a column would be compared with itself. Give one file for each "
            "side, or rows with both columns by name."
        )
    if not (ids := [sample_id for sample_id in right.samples if sample_id in left.samples]):
        raise ValueError(
            f"{rollout} has samples {[*left.samples][:3]}, {train} {[*right.samples][:3]}: they share none. Dump the "
            "same step twice."
        )
    pairs = [(right.samples[sample_id], left.samples[sample_id]) for sample_id in ids]
    gap = compare_log_probs(
        [trained.log_probs for trained, _ in pairs],
        [sampled.log_probs for _, sampled in pairs],
        [torch.tensor(trained.mask or sampled.mask or [1.0] * len(trained.log_probs)) for trained, sampled in pairs],
        total_lengths=[trained.total for trained, _ in pairs],
        ids=ids,
    )
    gap.compared = f"train: {right}, rollout: {left}"
    if alone := sorted({*left.samples} ^ {*right.samples}):
        num_alone = len(left.samples) - len(ids), len(right.samples) - len(ids)
        counts = f"{num_alone[0]} samples of {rollout} alone, {num_alone[1]} of {train} alone"
        gap.left_out.append(f"left out: {counts}, first {alone[0]}")
    return gap


class _NotRead(ValueError):
    """What a dump lacks, in words that name the accepted fields."""


def _read(path: Path, side: str) -> Dump:
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.suffix == ".jsonl" else []
        content: Any = [*map(json.loads, lines)] or torch.load(path, map_location="cpu", weights_only=True)
        by_id, columns = dict[str, Sample](), set[str | None]()
        for number, entry in _rows(content):
            fields = entry if isinstance(entry, Mapping) else {}
            fields = {**fields, **fields.get("meta_info", {})}  # of SGLang
            column = _column_of(fields, side, path) if fields else None
            columns.add(column)
            row = _as_row(fields[column] if column is not None else entry)
            length = int(fields.get("input_lengths", len(row)))  # of NeMo-RL, whose rows are padded
            name = str(next((fields[key] for key in _NAMES if key in fields), number))
            name += f", entry {number}" if name in by_id else ""
            total = int(fields.get("total_lengths", length))
            by_id[name] = Sample(row[:length], _mask_of(fields)[:length], total)
        if len(columns) > 1:
            raise _NotRead(f"{path}: rows with the columns {sorted(map(str, columns))}: all must have the same one.")
        return Dump(by_id, columns.pop() if columns else None, path)
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file. Give the paths of two dumps, TRAIN and ROLLOUT.") from None
    except _NotRead as error:
        raise ValueError(str(error)) from None
    except Exception as error:  # of many kinds
        code = str(error).partition("GLOBAL ")[2].split(" ")[0]
        why = f"it holds code, {code}" if code else "no log-probs were found in it"
        if str(error).startswith("a log-prob of "):
            raise ValueError(f"{path}: {error}") from None
        raise ValueError(f"{path}: {why} ({type(error).__name__}); {_DUMP}.") from None


def _rows(content: Any) -> Iterable[tuple[Any, Any]]:
    """Number or id, and entry, of each sample."""
    if isinstance(content, Mapping):
        content = content.get("samples", content.get("rollout_data", content))  # of slime; of miles and vime
    if not isinstance(content, Mapping):
        return enumerate(content)
    known = {name for names in COLUMNS.values() for name in names}
    if not known & {*content}:
        return content.items()
    # Columns by name, each with an entry per sample.
    sizes = {name: len(content[name]) for name in known & {*content}}
    number = min(sizes.values())
    columns = {name: values for name, values in content.items() if hasattr(values, "__len__") and len(values) == number}
    return ((i, {name: values[i] for name, values in columns.items()}) for i in range(number))


def _column_of(fields: Mapping[str, Any], side: str, path: Path) -> str:
    """The one column of that side; an error that names the accepted ones where there are none or several."""
    fitting = [name for name in COLUMNS[side] if fields.get(name) is not None]
    if len(fitting) == 1:
        return fitting[0]
    accepted = f"the {side} side is read from {' or '.join(COLUMNS[side])}"
    if fitting:
        raise _NotRead(f"{path} has {' and '.join(fitting)}: {accepted}, one of them. Drop the others from the file.")
    (other,) = {*COLUMNS} - {side}
    others = [name for name in COLUMNS[other] if fields.get(name) is not None]
    hint = f" It has {' and '.join(others)}, of the {other} side: are the files exchanged?" if others else ""
    raise _NotRead(f"{path} has the fields {', '.join(list(map(str, fields))[:8])}: {accepted}.{hint}")


def _as_row(column: Any) -> Tensor:
    """float64 [length]; NaN where a file has null, which is left out of the comparison."""
    if not isinstance(column, list):
        return torch.as_tensor(column, dtype=torch.float64)
    nothing = [each is None or (isinstance(each, list | tuple) and each[:1] in ([None], (None,))) for each in column]
    known = [each for each, is_nothing in zip(column, nothing, strict=True) if not is_nothing]
    if any(isinstance(each, list | tuple | Mapping) for each in known):
        known = sampled_log_probs(known)
    values = iter(known)
    return torch.as_tensor([math.nan if empty else next(values) for empty in nothing], dtype=torch.float64)


def _mask_of(fields: Mapping[str, Any]) -> list[float]:
    """The mask, empty if there is none; that of NeMo-RL times the sample's."""
    mask = next((fields[name] for name in _MASKS if fields.get(name) is not None), None)
    whole = float(fields.get("sample_loss_mask", 1.0))
    return [] if mask is None else [float(entry) * whole for entry in mask]
