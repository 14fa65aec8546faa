"""`compare_log_probs` and the command: planted patterns are named, and nothing else is."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refusal_tests, refusals
from torch import Tensor
from torch.nn.functional import pad

from megatron_rl_loss import compare_log_probs
from megatron_rl_loss.__main__ import main
from megatron_rl_loss.audit.log_prob_gap import PATTERNS

Rows = list[Tensor]
MIXED, ORDER = [3, 1, 0, 2, 6, 4, 5], [14, 11, 10, 12, 16, 13, 15]


def drawn(seed: int = 1, vocabulary: int = 48, longest: int = 60, number: int = 7) -> Any:
    """Ragged samples with prompts, their logits and, as `ours`, the log-probs of these."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (torch.randint(10, longest, (number,), generator=generator)).tolist()
    masks = [(torch.rand(length, generator=generator) < 0.8).float() for length in lengths]
    for mask in masks:
        mask[: len(mask) // 4] = 0
    size = 0.5 + 5 * torch.rand(len(lengths), 1, 1, generator=generator)
    logits = [scale * torch.randn(n, vocabulary, generator=generator) for n, scale in zip(lengths, size, strict=True)]
    labels = [z.softmax(-1).multinomial(1, generator=generator)[:, 0] for z in logits]
    step = SimpleNamespace(logits=logits, labels=labels, masks=masks, lengths=lengths)
    return SimpleNamespace(**vars(step), ours=at_temperature(step, 1))


def at_temperature(step: Any, temperature: float) -> Rows:
    of = zip(step.logits, step.labels, strict=True)
    return [(z.double() / temperature).log_softmax(-1)[torch.arange(len(ids)), ids].float() for z, ids in of]


def noise(rows: Rows, size: float, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    return [row + size * torch.randn(row.shape, generator=generator) for row in rows]


def test_the_table_shows_the_numbers() -> None:
    ours = [torch.tensor([-1.0, -2.0, -3.0, -4.0]), torch.tensor([-4.0]), torch.tensor([-1.0])]
    theirs = [torch.tensor([-1.5, -9.0, -2.75, -4.0]), torch.tensor([-1.0]), torch.tensor([-2.0])]
    masks = [torch.tensor([1.0, 0, 1, 1]), torch.zeros(1), torch.ones(1)]
    gap = compare_log_probs(ours, theirs, masks, ids=["a", "b", "c"])
    assert [row.tolist() for row in gap.gaps] == [[-0.5, -7.0, 0.25, 0], [3.0], [-1]]
    assert gap.num_tokens.tolist() == [3, 0, 1]
    ratios = [torch.tensor(value).exp().item() for value in (0.5, -0.25, 0.0, 1.0)]
    share = sum(ratios) ** 2 / sum(ratio**2 for ratio in ratios) / 4
    assert str(gap).splitlines() == [
        "log-probs of 4 tokens in 3 samples; gap: rollout - train",
        "  |gap|: 50 % 0.25, 90 % 0.5, 99 % 0.5, largest 1",
        "  mean |gap|: first third of samples 0.75, middle 0.25, last 0",
        "  mean |gap|, worst: sample c: 1, sample a: 0.25",
        f"  ratio exp(train - rollout): mean {sum(ratios) / 4:.3g}, effective sample size / tokens {share:.3g}",
        "  no known pattern brings the gap within rounding",
    ]
    assert "all gaps are within rounding" in str(compare_log_probs(ours, ours))
    assert str(compare_log_probs([], [])).splitlines()[0].startswith("log-probs of 0 tokens in 0 samples")


def by_rank(row: Tensor, cp_size: int, before: int = 0, of_logits: int = 0) -> Tensor:
    """A row as its zigzag ranks hold it, one rank after the other; a prompt of `before` tokens is cut with it."""
    chunk = -(-(len(row) + before) // (2 * cp_size))
    ranks: list[list[Tensor]] = [[] for _ in range(cp_size)]
    for place, value in enumerate(row):
        number = max(place + before - of_logits, 0) // chunk
        ranks[min(number, 2 * cp_size - 1 - number)].append(value)
    return torch.stack([value for rank in ranks for value in rank])


def padded(step: Any, left: bool) -> Any:
    """Rows of 70: ours with padding on one side, theirs on the other."""
    more = [70 - n for n in step.lengths]
    sides = [[pad(row, (k * n, (1 - k) * n)) for row, n in zip(step.ours, more, strict=True)] for k in (left, not left)]
    return *sides, [(row != 0).float() for row in sides[0]]


def responses(step: Any) -> Any:
    prompts = [5, 2, 17, 3, 8, 1, 11]
    theirs = [by_rank(row, 2, prompt, 1) for row, prompt in zip(step.ours, prompts, strict=True)]
    return step.ours, theirs, [], [n + prompt for n, prompt in zip(step.lengths, prompts, strict=True)]


def shifted_behind(step: Any) -> Any:
    """One side has a token more, in the middle of each sample."""
    more = torch.tensor([-7.0])
    theirs = [torch.cat([row[: len(row) // 2], more, row[len(row) // 2 : -1]]) for row in step.ours]
    return step.ours, theirs


def with_placeholders(step: Any) -> Rows:
    """SkyRL#2148: the sampler's log-probs of tokens that were put in by hand are 0, of likely ones too."""
    return [row.masked_fill(torch.arange(len(row)) % 3 == 0, 0) for row in step.ours]


#: Theirs beside our log-probs and masks, or all of these and total lengths; and what is named.
PLANTED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "later": (lambda step: [row.roll(1) for row in step.ours], "one_token_later"),
    "earlier": (lambda step: [row.roll(-1) for row in step.ours], "one_token_earlier"),
    "left": (lambda step: padded(step, False), "padded_left"),
    "right": (lambda step: padded(step, True), "padded_right"),
    "order": (lambda step: ([row[:10] for row in step.ours], [step.ours[k][:10] for k in MIXED]), "sample_order"),
    "CP 4": (lambda step: ([by_rank(row, 4) for row in step.ours], step.ours), "cp_order"),
    "CP 8": (lambda step: [by_rank(row, 8) for row in step.ours], "cp_order"),
    "CP 2, responses": (responses, "cp_order"),
    "bfloat16": (lambda step: [row.bfloat16().float() for row in step.ours], "bf16_rounding"),
    "behind a position": (lambda step: shifted_behind(step), "shifted_behind"),
    "placeholders": (lambda step: with_placeholders(step), "placeholders"),
    "masked": (lambda step: [a * b for a, b in zip(step.ours, step.masks, strict=True)], "masked_tokens"),
}


def compared(ours: Rows, theirs: Rows, masks: Any = (), totals: Any = (), top: Any = ()) -> Any:
    return compare_log_probs(ours, theirs, masks, total_lengths=totals, top=top)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_pattern_is_named_alone(name: str) -> None:
    step = drawn()
    plant, expected = PLANTED[name]
    sides = plant(step)
    ours, theirs, *more = sides if isinstance(sides, tuple) else (step.ours, sides, step.masks)
    gap = compared(ours, theirs, *more)
    assert list(gap.patterns) == [expected]
    assert "explained: " in str(gap)
    if expected not in ("bf16_rounding", "masked_tokens", "shifted_behind", "placeholders"):
        noisy, far = (compared(ours, noise(theirs, size), *more) for size in (0.02, 3.0))
        assert (list(noisy.patterns), list(noisy.suggestions)) == ([], [expected])
        assert "only suggested: " in str(noisy)
        assert (far.patterns, far.suggestions) == ({}, {})


@pytest.mark.parametrize(("temperature", "columns"), [(0.7, 48), (1.5, 48), (0.8, 40)])
def test_a_temperature_is_fitted_to_the_most_likely_tokens(temperature: float, columns: int) -> None:
    step = drawn(3)
    gap = compared(
        step.ours, at_temperature(step, temperature), top=[z.log_softmax(-1).topk(columns)[0] for z in step.logits]
    )
    texts = gap.patterns if columns == 48 else gap.patterns | gap.suggestions
    assert list(texts) == ["temperature"]
    assert float(texts["temperature"].split("temperature ")[1].split()[0]) == pytest.approx(temperature, rel=0.02)


def truncated(step: Any, *, top_p: float | None = None, top_k: int | None = None) -> Rows:
    """TRL#6789: a sampler keeps the likeliest ids, and its log-probs are those of what it kept."""
    rows = []
    for z, ids in zip(step.logits, step.labels, strict=True):
        p, order = z.double().softmax(-1).sort(-1, descending=True)
        before = p.cumsum(-1) - p
        kept = before < top_p if top_p is not None else torch.arange(p.shape[1]).expand_as(p) < (top_k or 0)
        kept = torch.zeros_like(kept).scatter(-1, order, kept)
        # What it could not have drawn, it drew otherwise: the likeliest id in its place.
        drawn_ids = torch.where(kept.gather(-1, ids[:, None])[:, 0], ids, order[:, 0])
        ids.copy_(drawn_ids)
        rows.append(z.double().masked_fill(~kept, -torch.inf).log_softmax(-1).gather(-1, ids[:, None])[:, 0])
    step.ours = at_temperature(step, 1)
    return rows


@pytest.mark.parametrize("settings", [{"top_p": 0.9}, {"top_p": 0.8}, {"top_k": 5}, {"top_k": 2}])
def test_a_sampler_that_truncates_is_named_and_no_temperature(settings: dict[str, Any]) -> None:
    step = drawn(6, number=40)
    theirs = truncated(step, **settings)
    alone = compare_log_probs(step.ours, theirs, step.masks)
    assert "temperature" not in alone.patterns | alone.suggestions
    assert ("truncated_sampler" in alone.suggestions) == ("top_p" in settings)
    gap = compare_log_probs(step.ours, theirs, step.masks, top=[z.log_softmax(-1) for z in step.logits])
    assert list(gap.patterns) == ["truncated_sampler"]
    (found,) = re.findall(r"up to ([\d.]+) \(top-p|its (\d+) likeliest", gap.patterns["truncated_sampler"])
    assert float(found[0] or found[1]) == pytest.approx(next(iter(settings.values())), abs=0.0051)


def test_each_pattern_is_planted() -> None:
    planted = {name for _, name in PLANTED.values()} | {"temperature", "truncated_sampler"}
    assert {pattern.name for pattern in PATTERNS} <= planted
    assert all(pattern.case for pattern in PATTERNS)


@pytest.mark.parametrize("temperature", [0.6, 0.8, 1.25, 1.5])
def test_log_probs_alone_suggest_a_temperature(temperature: float) -> None:
    step = drawn(5, number=40)
    gap = compare_log_probs(step.ours, noise(at_temperature(step, temperature), 0.005), step.masks)
    assert gap.patterns == {}
    suggested = float(gap.suggestions["temperature"].split("near ")[1].split()[0])
    assert suggested == pytest.approx(temperature, rel=0.2)


def unrelated(kind: int, size: float, seed: int, step: Any) -> Rows:
    """Gaps that no pattern made: noise of tokens or logits, one-sided, in proportion, heavy-tailed; a mixed order."""
    generator, noisy = torch.Generator().manual_seed(seed), noise(step.ours, size, seed)
    if kind == 6:
        return at_temperature(SimpleNamespace(logits=noise(step.logits, size, seed), labels=step.labels), 1)
    change: Callable[[Tensor, Tensor], Tensor] = [
        lambda row, off: row + off,
        lambda row, off: (row + off).clamp(max=0),
        lambda row, off: row - off.abs(),
        lambda row, off: row * (1 + off).clamp(min=0.1),
        lambda row, off: row + off / torch.rand(len(row), generator=generator),
        lambda row, off: row[torch.randperm(len(row), generator=generator)],
    ][kind]
    return [change(row, other - row) for row, other in zip(step.ours, noisy, strict=True)]


def test_random_gaps_have_no_name() -> None:
    """Every kind of gap of every size, in steps of every kind."""
    for seed in range(7 * 3 * 4):
        step = drawn(seed, number=[7, 40][seed % 2], longest=[12, 60][seed // 2 % 2])
        theirs = unrelated(seed % 7, [0.03, 0.3, 1.0][seed % 3], seed, step)
        first, second = (step.ours, theirs)[:: -1 if seed // 7 % 2 else 1]
        top = [z.log_softmax(-1) for z in step.logits] if seed % 5 == 0 else ()
        gap = compared(first, second, step.masks, [n + seed % 9 for n in step.lengths], top)
        assert (gap.patterns, gap.suggestions) == ({}, {}), (seed, str(gap))


ROW = torch.zeros(3)
REFUSALS = refusals(
    compare_log_probs,
    (((ROW,), (ROW, ROW)), "2 samples of rollout, 1 of train", (([0.0, 1.0],), ([0.0, 1.0],))),
    ({"train": (ROW,), "rollout": (ROW,), "ids": "ab"}, "2 ids and 1 total_lengths for 1 samples", ((ROW,), (ROW,))),
    (
        ((ROW,), (ROW,), (ROW[:2],)),
        "1 of 1 samples, first 0: train 3, loss_masks 2.*Cut both",
        ((ROW,), (ROW,), (ROW,)),
    ),
)
test_refusals = refusal_tests(REFUSALS)


def trained(ours: Rows, masks: Rows, order: list[int]) -> dict[str, Any]:
    """A dump as slime's train_data_utils.py writes it: a dict per sample."""
    samples = [{"data_parallel_rank": k % 2, "sample_index": index, "rollout_position": k, "log_probs": row,
                "rollout_log_probs": row - 9.0, "loss_masks": mask.int(), "total_lengths": len(row) + 3}
               for k, (index, row, mask) in enumerate(zip(order, ours, masks, strict=True))]  # fmt: skip
    return {"format_version": 2, "rollout_id": 3, "rank": 0, "samples": samples, "dp_shards": []}


def rolled_out(theirs: Rows, order: list[int]) -> dict[str, Any]:
    """A dump of slime's Sample.to_dict."""
    nothing: dict[str, Any] = {"loss_mask": None, "status": "completed", "metadata": {}}
    samples = [
        nothing | {"index": k, "rollout_log_probs": row.tolist(), "response_length": len(row)}
        for k, row in zip(order, theirs, strict=True)
    ]
    return {"rollout_id": 3, "samples": samples}


def written(path: Path, content: Any) -> str:
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    return str(path)


def test_slime_dumps_are_joined_by_sample_index(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """The rollout is in another order, and masked tokens count for nothing."""
    step = drawn()
    later = [row.roll(1) + 5 * (1 - mask) * (1 - mask.roll(1)) for row, mask in zip(step.ours, step.masks, strict=True)]
    rollout = written(tmp_path / "rollout.pt", rolled_out([later[k] for k in MIXED], [ORDER[k] for k in MIXED]))
    train = written(tmp_path / "train.pt", trained(step.ours, step.masks, ORDER))
    monkeypatch.setattr(sys, "argv", ["megatron_rl_loss", "log-probs", train, rollout])
    assert main() == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    tokens = int(sum(mask.sum() for mask in step.masks))
    assert lines[0] == f"train: log_probs of {train}, rollout: rollout_log_probs of {rollout}"
    assert lines[1] == f"log-probs of {tokens} tokens in 7 samples; gap: rollout - train"
    means = {k: (b - a).abs()[on != 0].mean() for k, a, b, on in zip(ORDER, step.ours, later, step.masks, strict=True)}
    assert f"worst: sample {max(means, key=lambda k: means[k])}: " in printed.out
    assert "explained: rollout equals train one token later" in lines[-1]
    assert len(lines) <= 15


STEP = drawn()
LISTS = [row.tolist() for row in STEP.ours]
WITHOUT = trained(STEP.ours, STEP.masks, ORDER)
del WITHOUT["samples"][1]["log_probs"]
#: Dumps of both sides, the exit status, and what is printed.
DUMPS: dict[str, tuple[str, Any, Any, int, str]] = {
    "lists": ("a.jsonl", "\n".join(map(json.dumps, LISTS)).encode(), STEP.ours, 0, "all gaps are within rounding"),
    "SGLang's tuples": (
        "a.jsonl",
        "\n".join(json.dumps({"output_token_logprobs": [[x, 5, None] for x in row]}) for row in LISTS).encode(),
        STEP.ours, 0, "all gaps are within rounding"),
    "NeMo-Gym's name": (
        "a.jsonl", "\n".join(json.dumps({"generation_log_probs": row}) for row in LISTS).encode(),
        STEP.ours, 0, "all gaps are within rounding"),
    "vLLM's dicts": (
        "a.jsonl", json.dumps({"rollout_log_probs": [{"5": {"logprob": -1.0}}]}).encode(), STEP.ours, 2,
        "a.jsonl: a log-prob of .* at token 0: it must be a number, .*SGLang's"),
    "ids": ("a.pt", dict(zip(ORDER, STEP.ours, strict=True)), dict(zip(ORDER, LISTS, strict=True)), 0, "all gaps are"),
    "one side": ("a.pt", {7: [0.0], 8: [1.0]}, {8: [1.0]}, 2, "1 samples of .*a.pt alone, 0 of .*b.pt alone, first 7"),
    "no id": ("a.pt", {7: [0.0]}, {8: [1.0]}, 2, r"a.pt has samples \['7'\], .*b.pt \['8'\]: they share none"),
    "lengths": ("a.pt", [[0.0]], [[0.0, 1.0]], 2, "differ in 1 of 1 samples, first 0: train 2, rollout 1: .*Cut both"),
    "order": ("a.pt", LISTS[::-1], LISTS, 2, "the same lengths in another order: give both by sample id"),
    "2-D": ("a.pt", torch.zeros(2, 1, 3), torch.zeros(2, 3), 2, r"sample 0: rollout of shape \[1, 3\].*1-D tensor"),
    "NaN": ("a.pt", [row / row.ne(row[2]) for row in STEP.ours], STEP.ours, 2, "left out: 7 tokens with NaN or inf"),
    "probabilities": (
        "a.pt", [[0.5, 0.25]], [[0.5, 0.25]], 2, "no log-probs: train has values up to 0.5, none below 0"),
    "losses": ("a.pt", [[-0.5, -1.0]], [[0.5, -1.0]], 2, "no log-probs: train has values up to 0.5\n"),
    "no samples": ("a.jsonl", b"", STEP.ours, 2, "a.jsonl: no log-probs .*EOFError"),
    "text": ("a.pt", b"log-probs", STEP.ours, 2, "a.pt: no log-probs .*UnpicklingError"),
    "code": ("a.pt", [re.compile("a")], STEP.ours, 2, "a.pt: it holds code, re._compile .*; a dump"),
    "no log-probs": ("a.pt", rolled_out(STEP.ours, ORDER), WITHOUT, 2,
        "b.pt has the fields .*: the train side is read from log_probs or prev_logprobs .*are the files exchanged"),
    "exchanged": ("a.pt", WITHOUT["samples"][:1], rolled_out(STEP.ours, ORDER), 2,
        "b.pt has the fields .*the train side is read from .*rollout_log_probs, of the rollout side: are the files ex"),
    "two names of a side": (
        "a.pt", [{"rollout_log_probs": [0.0], "generation_logprobs": [0.0]}], [[0.0]], 2,
        "a.pt has rollout_log_probs and generation_logprobs: the rollout side is read from .*, one of them"),
    "null beside numbers": (
        "a.jsonl", json.dumps([None, *LISTS[0][1:]]).encode(), STEP.ours[:1], 2, "left out: 1 tokens with NaN or inf"),
    "SGLang's meta_info": (
        "a.jsonl",
        "\n".join(
            json.dumps({"text": "", "meta_info": {"output_token_logprobs": [[x, 5, None] for x in row]}})
            for row in LISTS).encode(),
        STEP.ours, 0, "rollout: output_token_logprobs of .*\n.*\n.*"),
    "miles and vime": (
        "a.pt", rolled_out(STEP.ours, list(range(7))),
        {"rollout_id": 3, "rank": 0, "rollout_data": {
            "log_probs": STEP.ours, "rollout_log_probs": [row - 9 for row in STEP.ours], "tokens": STEP.ours,
            "loss_masks": STEP.masks, "total_lengths": [n + 3 for n in STEP.lengths], "partition": [0]}},
        0, "train: log_probs of .*all gaps are within rounding"),
    "missing": ("a.pt", None, STEP.ours, 2, "a.pt: there is no such file"),
}  # fmt: skip


@pytest.mark.parametrize("name", DUMPS)
def test_dumps_that_do_not_go_together_give_a_line(name: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    file, left, right, status, text = DUMPS[name]
    files = str(tmp_path / file) if left is None else written(tmp_path / file, left), written(tmp_path / "b.pt", right)
    monkeypatch.setattr(sys, "argv", ["megatron_rl_loss", "log-probs", *reversed(files)])
    try:
        ended: Any = main()
    except SystemExit as refused:
        ended = refused.code
    printed = "".join(capsys.readouterr())
    assert ended == status, printed
    assert re.search(text, printed, flags=re.DOTALL), printed


def of_nemo_rl(path: Path, ours: Rows, theirs: Rows, masks: Rows) -> str:
    """A `train_data_step*.jsonl`: both sides in each line, rows padded to the longest."""
    lines = []
    for number, (row, other, mask) in enumerate(zip(ours, theirs, masks, strict=True)):
        padding = [0.0] * (70 - len(row))
        columns = {"prev_logprobs": row, "generation_logprobs": other, "token_loss_mask": mask}
        padded_columns = {name: [*column.tolist(), *padding] for name, column in columns.items()}
        more = {"idx": number, "content": "...", "rewards": 1.0, "input_lengths": len(row), "sample_loss_mask": 1.0}
        lines.append(json.dumps(padded_columns | more))
    path.write_text("\n".join(lines))
    return str(path)


def test_one_file_with_both_sides_is_read_by_side(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """The column of the trainer as TRAIN and the sampler's as ROLLOUT, not one of them twice."""
    file = of_nemo_rl(tmp_path / "train_data_step3.jsonl", STEP.ours, [row.roll(1) for row in STEP.ours], STEP.masks)
    monkeypatch.setattr(sys, "argv", ["megatron_rl_loss", "log-probs", file, file])
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"train: prev_logprobs of {file}, rollout: generation_logprobs of {file}"
    assert f"log-probs of {int(sum(mask.sum() for mask in STEP.masks))} tokens in 7 samples" in lines[1]
    assert "explained: rollout equals train one token later" in lines[-1]


def test_a_column_is_not_compared_with_itself(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    file = written(tmp_path / "a.pt", STEP.ours)
    monkeypatch.setattr(sys, "argv", ["megatron_rl_loss", "log-probs", file, file])
    with pytest.raises(SystemExit):
        main()
    assert "a column would be compared with itself" in " ".join(capsys.readouterr().err.split())
