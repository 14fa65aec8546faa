"""Other frameworks' names: each gives its framework's documented formula, or is refused.

`THEIRS` states those formulas a second time, in float64, on the padded [rows, tokens] matrix of the whole optimizer
step, which is what they are written on. Nothing in it comes from the package.
"""

import runpy
import subprocess
import sys
from collections.abc import Callable

import oracle
import pytest
import torch
from peer_steps import Batch, random_batch
from torch import Tensor

from megatron_rl_loss import Samples, StepTotals, make_pg_loss_reducer, token_weights
from megatron_rl_loss.modes import MODES
from megatron_rl_loss.modes.names import NAMES, NUMBER, format_modes, resolve

DIVISOR = 5.5
TOLERANCE = oracle.EXACT


# ---- their formulas


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()


def row_sums(batch: Batch) -> Tensor:
    return (batch.losses * batch.masks).sum(-1)


def row_means(batch: Batch) -> Tensor:
    return row_sums(batch) / batch.masks.sum(-1).clamp(min=1)


def active_rows(batch: Batch) -> Tensor:
    return (batch.masks.sum(-1) > 0).double()


def all_tokens(batch: Batch) -> Tensor:
    return masked_mean(batch.losses, batch.masks)


def prompt_means(batch: Batch) -> Tensor:
    groups = sorted(set(batch.prompts))
    means = []
    for group in groups:
        rows = [row for row, prompt in enumerate(batch.prompts) if prompt == group]
        means.append((batch.losses[rows] * batch.masks[rows]).sum() / batch.masks[rows].sum().clamp(min=1))
    return torch.stack(means).sum() / len(groups)


def luspo(batch: Batch) -> Tensor:
    """A loss a sequence (here the one its tokens share), times the sequence's length, averaged over sequences."""
    return (row_means(batch) * batch.masks.sum(-1)).mean()


Formula = Callable[[Batch], Tensor]

THEIRS: dict[str, Formula] = {
    "verl:token-mean": all_tokens,
    "verl:token-sum": lambda b: row_sums(b).sum(),
    "verl:seq-mean-token-sum": lambda b: row_sums(b).sum() / b.rows,
    "verl:seq-mean-token-sum-norm": lambda b: row_sums(b).sum() / b.rows / DIVISOR,
    "verl:seq-mean-token-mean": lambda b: row_means(b).sum() / b.rows,
    "verl:loss_mode=gspo": lambda b: row_means(b).sum() / b.rows,
    "verl:loss_mode=sapo": lambda b: row_means(b).sum() / b.rows,
    "skyrl:token_mean": lambda b: row_sums(b).sum() / b.masks.sum().clamp(min=1),
    "skyrl:sequence_mean": lambda b: (b.losses / (b.rows * b.masks.sum(-1, keepdim=True).clamp(min=1)) * b.masks).sum(),
    "skyrl:seq_mean_token_sum_norm": lambda b: (b.losses / (b.rows * DIVISOR) * b.masks).sum(),
    "skyrl:prompt_mean": prompt_means,
    "tinker:sum": lambda b: row_sums(b).sum(),
    "open_instruct:token": all_tokens,
    f"open_instruct:{NUMBER}": lambda b: row_sums(b).sum() / DIVISOR,
    "trl:grpo": lambda b: row_means(b).mean(),
    "trl:sapo": lambda b: row_means(b).mean(),
    "trl:dr_grpo": lambda b: row_sums(b).sum() / (b.rows * DIVISOR),
    "trl:luspo": luspo,
    "trl:dapo": all_tokens,
    "trl:cispo": all_tokens,
    "trl:vespo": all_tokens,
    "openrlhf:token_level_loss=true": all_tokens,
    "openrlhf:token_level_loss=false": lambda b: masked_mean(row_means(b), active_rows(b)),
    "nemo_rl:token_level_loss=true": all_tokens,
    "nemo_rl:token_level_loss=false": lambda b: masked_mean(row_means(b), active_rows(b)),
    "roll:token-mean": all_tokens,
    "roll:seq-mean-token-sum": lambda b: row_sums(b).sum() / active_rows(b).sum(),
    "roll:seq-mean-token-mean": lambda b: row_means(b).sum() / active_rows(b).sum(),
    "roll:seq-mean-token-sum-norm": lambda b: row_sums(b).sum() / DIVISOR,
}
PEERS = {peer.alias: peer for peer in NAMES}


def test_every_name_that_is_taken_has_a_formula_here() -> None:
    assert set(THEIRS) == {alias for alias, peer in PEERS.items() if peer.mode}
    assert len(PEERS) == len(NAMES)


# ---- ours: each micro-batch by itself, with the totals of all; weights are linear, layouts are in test_weights.py


def written(alias: str) -> str:
    return alias.replace(NUMBER, str(DIVISOR))


def ours(alias: str, batch: Batch) -> Tensor:
    """The weights [rows, tokens], two halves of the rows apart."""
    lengths = [int(mask.nonzero().max()) + 1 if mask.any() else 3 for mask in batch.masks]
    masks = [mask[:length] for mask, length in zip(batch.masks, lengths, strict=True)]
    weights = torch.zeros_like(batch.masks)
    for part in (slice(batch.rows // 2), slice(batch.rows // 2, None)):
        totals = StepTotals.from_loss_masks(masks, prompt_ids=batch.prompts)
        divisor = DIVISOR if isinstance(PEERS[alias].divisor, str) else None
        samples = Samples(masks[part], prompt_ids=batch.prompts[part])
        own = token_weights(written(alias), samples, totals, divisor=divisor).split(lengths[part])
        for row, one in zip(range(batch.rows)[part], own, strict=True):
            weights[row, : len(one)] = one
    return weights


def theirs(formula: Formula, batch: Batch) -> Tensor:
    """The slopes of their formula, which is linear in the losses."""
    leaf = batch.losses.double().requires_grad_()
    formula(Batch(leaf, batch.masks.double(), batch.prompts)).backward()
    assert leaf.grad is not None
    return leaf.grad


def error_of(weights: Tensor, expected: Tensor) -> float:
    return float((weights.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("alias", THEIRS)
def test_a_name_gives_its_frameworks_formula(alias: str, record_property: Callable[[str, object], None]) -> None:
    batches = map(random_batch, range(5))
    worst = max(error_of(ours(alias, batch), theirs(THEIRS[alias], batch)) for batch in batches)
    assert worst < TOLERANCE
    record_property("framework_name_parity_error", worst)


# ---- names


@pytest.mark.parametrize("mode", oracle.MODES)
def test_our_own_names_pass_as_they_are(mode: str) -> None:
    divisor = 3.0 if MODES[mode].takes_divisor else None
    named = resolve(mode, divisor=divisor, units="active")
    assert (named.mode, named.divisor, named.units, named.notice) == (MODES[mode], divisor, "active", None)
    assert resolve(mode, divisor=divisor).units == "all"


REFUSED = {
    "unknown framework": (
        "verk:token-mean",
        {},
        "there is no framework 'verk'. Did you mean verl[?] Choose one of verl, skyrl",
    ),
    "unknown setting": (
        "verl:seq-mean-token-men",
        {},
        "verl has no such setting. Did you mean seq-mean-token-mean[?] Choose one of token-mean, token-sum",
    ),
    "another's spelling": ("skyrl:token-mean", {}, "Did you mean token_mean[?]"),
    "another's case": ("openrlhf:token_level_loss=True", {}, "Did you mean token_level_loss=true[?]"),
    "nothing close": ("trl:xyz", {}, "trl has no such setting. Choose one of grpo, sapo, dr_grpo"),
    "no setting": ("verl:", {}, "verl has no such setting"),
    "a number left out": ("open_instruct:<number>", {}, "<number> stands for the setting's own number"),
    "no number": ("open_instruct:many", {}, "open_instruct has no such setting. Choose one of token, <number>"),
    "divisor missing": (
        "verl:seq-mean-token-sum-norm",
        {},
        "without a divisor: it divides by its loss_scale_factor. Give that number \\(--loss-aggregation-divisor\\)",
    ),
    "another divisor": ("verl:seq-mean-token-sum", {"divisor": 8}, "divisor 8 with .*: the name stands for 1"),
    "two numbers": ("open_instruct:16", {"divisor": 8.0}, "divisor 8.0 with .*: the name stands for 16"),
    "no divisor": ("verl:token-mean", {"divisor": 8}, "divisor 8 with .*: the name has none"),
    "other counting": ("openrlhf:token_level_loss=false", {"units": "all"}, "'all' with .*: openrlhf counts active"),
    "not exact in every layout": ("trl:bnpo", {}, "Choose 'token_mean'"),
    "divisor 0 in the name": ("open_instruct:0", {}, "divisor 0.0: it must be finite and above 0"),
    "divisor NaN in the name": ("open_instruct:nan", {}, "divisor nan"),
    "without its framework": (
        "seq-mean-token-mean",
        {},
        "no such mode.*verl:seq-mean-token-mean, roll:seq-mean-token-mean",
    ),
    "other counting, the other way": ("trl:grpo", {"units": "active"}, "'active' with .*: trl counts all units"),
}


@pytest.mark.parametrize(("name", "options", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(name: str, options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        resolve(name, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("verl:seq-mean-token-sum", {"divisor": 1}),
        ("trl:grpo", {"units": "all"}),
        ("verl:token-mean", {"units": "active"}),  # counts no unit
        ("open_instruct:16", {"divisor": 16.0}),
    ],
)
def test_what_only_repeats_a_name_is_accepted(name: str, options: dict[str, object]) -> None:
    plain, repeated = resolve(name), resolve(name, **options)  # type: ignore[arg-type]
    assert (plain.mode, plain.divisor) == (repeated.mode, repeated.divisor)


def test_by_api_an_explicit_counting_is_told_from_none() -> None:
    masks = [torch.ones(2), torch.zeros(3)]
    totals = StepTotals.from_loss_masks(masks)
    name = "openrlhf:token_level_loss=false"
    share = make_pg_loss_reducer(name, masks, totals=totals)(torch.ones(5))
    assert float(share) == 1  # the masked rollout is not counted
    with pytest.raises(ValueError, match="openrlhf counts active units"):
        make_pg_loss_reducer(name, masks, totals=totals, units="all")


# ---- the table


@pytest.mark.slow
def test_modes_may_be_read_by_head() -> None:
    command = f"{sys.executable} -m megatron_rl_loss modes | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=600)
    assert (done.stdout.splitlines()[-1], done.stderr) == ("0", "")


def test_the_printed_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["python -m megatron_rl_loss", "modes"])
    runpy.run_module("megatron_rl_loss", run_name="__main__")
    printed = capsys.readouterr().out
    assert printed == format_modes() + "\n"
    assert printed.isascii()
    assert max(map(len, printed.splitlines())) <= 120
    firsts = [line.split()[0] for line in printed.splitlines() if line]
    for word in (*oracle.MODES, *PEERS):
        assert firsts.count(word) == 1, word
