"""Other frameworks' names: each gives its framework's documented formula, or is refused.

`THEIRS` states those formulas a second time, in float64, on the padded [rows, tokens] matrix of the whole optimizer
step, which is what they are written on. Nothing in it comes from the package.
"""

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import oracle
import pytest
import torch
from peer_steps import Batch, random_batch
from refusals import refusal_tests, refusals
from steps import token_weights
from torch import Tensor

from megatron_rl_loss import Samples, StepTotals, make_pg_loss_reducer
from megatron_rl_loss.core.aggregation import Aggregation, resolve
from megatron_rl_loss.engines.names import (
    FRAMEWORKS,
    NAMES,
    NUMBER,
    PeerName,
    format_frameworks,
    format_modes,
    format_versions,
)
from megatron_rl_loss.losses.by_name import check_goes_with

DIVISOR = 5.5

# ---- their formulas

Formula = Callable[[Batch], Tensor]


def sums(batch: Batch) -> Tensor:
    return (batch.losses * batch.masks).sum(-1)


def means(batch: Batch) -> Tensor:
    return sums(batch) / batch.masks.sum(-1).clamp(min=1)


def active(batch: Batch) -> Tensor:
    return (batch.masks.sum(-1) > 0).sum()


def prompt_means(batch: Batch) -> Tensor:
    groups = [[i for i, prompt in enumerate(batch.prompts) if prompt == group] for group in set(batch.prompts)]
    return sum(sums(batch)[rows].sum() / batch.masks[rows].sum().clamp(min=1) for rows in groups) / len(groups)  # type: ignore[return-value]


OF_TINKER = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce", "custom")
THEIRS: dict[str, Formula] = {
    name: formula
    for formula, names in (
        (
            lambda b: sums(b).sum() / b.masks.sum(),
            "verl:token-mean skyrl:token_mean open_instruct:token trl:dapo trl:cispo trl:vespo roll:token-mean "
            "openrlhf:token-mean torchrl:token_mean tunix:token-mean maxtext:token-mean torchtitan:dapo "
            "torchtitan:grpo "
            "slime:calculate_per_token_loss=true miles:calculate_per_token_loss=true ms_swift:bnpo ms_swift:dapo "
            "prime_rl:default prime_rl:ipo prime_rl:icepop "
            "openrlhf:token_level_loss=true nemo_rl:token_level_loss=true",
        ),
        (
            lambda b: means(b).sum() / b.rows,
            "verl:seq-mean-token-mean verl@0.6.1:gspo verl@1dda039b:gspo verl:sapo skyrl:sequence_mean trl:grpo "
            "trl:sapo torchrl:prompt_mean "
            "slime:calculate_per_token_loss=false miles:calculate_per_token_loss=false ms_swift:grpo "
            "agent_lightning:per_rollout_mean",
        ),
        (
            lambda b: means(b).sum() / active(b),
            "openrlhf:token_level_loss=false nemo_rl:token_level_loss=false roll:seq-mean-token-mean "
            "openrlhf:seq-mean-token-mean openrlhf:gspo tunix:sequence-mean-token-mean "
            "maxtext:sequence-mean-token-mean",
        ),
        (prompt_means, "skyrl:prompt_mean"),
        (lambda b: sums(b).sum(), "verl:token-sum " + " ".join(f"tinker:{loss}" for loss in OF_TINKER)),
        (
            lambda b: sums(b).sum() / DIVISOR,
            f"open_instruct:{NUMBER} roll:seq-mean-token-sum-norm tunix:sequence-mean-token-sum-norm",
        ),
        (lambda b: sums(b).sum() / b.rows, "verl:seq-mean-token-sum"),
        # A loss a sequence (here the one its tokens share), times the sequence's length, averaged over sequences.
        (lambda b: (means(b) * b.masks.sum(-1)).mean(), "trl:luspo"),
        (lambda b: sums(b).sum() / active(b), "roll:seq-mean-token-sum tunix:seq-mean-token-sum"),
        (lambda b: sums(b).sum() / active(b) / DIVISOR, "tunix:sequence-mean-token-scale"),
        (
            lambda b: sums(b).sum() / b.rows / DIVISOR,
            "verl:seq-mean-token-sum-norm skyrl:seq_mean_token_sum_norm trl:dr_grpo ms_swift:dr_grpo",
        ),
    )
    for name in names.split()
}
PEERS = {peer.alias: peer for peer in NAMES}


def test_every_name_that_is_taken_has_a_formula_here() -> None:
    assert set(THEIRS) == {alias for alias, peer in PEERS.items() if not peer.refused}


def test_versions_of_a_name_are_in_order_and_apart() -> None:
    by_name: dict[tuple[str, str], list[PeerName]] = {}
    for peer in NAMES:
        by_name.setdefault((peer.framework, peer.name), []).append(peer)
    for (framework, _), peers in by_name.items():
        versions = [version for peer in peers for version in peer.versions]
        known = FRAMEWORKS[framework].names
        assert versions == known[known.index(versions[0]) : known.index(versions[-1]) + 1]
        assert all(peer[2:6] + peer[8:] != other[2:6] + other[8:] for peer, other in pairwise(peers))


def test_a_name_whose_versions_differ_asks_for_one() -> None:
    assert resolve("verl@0.9.0:gspo").mode.name == "sample_mean"
    assert resolve("trl@1.16.0:dapo") == resolve("trl:dapo") == resolve("token_mean")
    for version in FRAMEWORKS["verl"].names[:-1]:
        assert resolve(f"verl@{version}:gspo").mode.name == "sample_mean"


def test_what_a_name_means_in_each_version() -> None:
    lines = format_versions("verl:gspo").splitlines()
    assert [line.split()[1].strip(",") for line in lines if line.startswith("verl ")] == FRAMEWORKS["verl"].names
    assert lines[-2].startswith("verl 0.9.1, run: refused, it is whatever loss_agg_mode is")
    assert format_versions("verl@0.9.0:gspo").startswith("verl 0.9.0, run: sample_mean, counting all units")


# ---- ours: each micro-batch by itself, with the totals of all; weights are linear, layouts are in test_weights.py


def ours(alias: str, batch: Batch) -> Tensor:
    """The weights [rows, tokens], two halves of the rows apart."""
    lengths = [int(mask.nonzero().max()) + 1 if mask.any() else 3 for mask in batch.masks]
    masks = [mask[:length] for mask, length in zip(batch.masks, lengths, strict=True)]
    weights = torch.zeros_like(batch.masks)
    divisor = DIVISOR if isinstance(PEERS[alias].divisor, str) else None
    totals = StepTotals.of(Samples(masks, prompt_ids=batch.prompts, ids={"session": batch.prompts}))
    for part in (slice(batch.rows // 2), slice(batch.rows // 2, None)):
        samples = Samples(masks[part], prompt_ids=batch.prompts[part], ids={"session": batch.prompts[part]})
        own = token_weights(alias.replace(NUMBER, str(DIVISOR)), samples, totals, divisor=divisor).split(lengths[part])
        for row, row_weights in zip(range(batch.rows)[part], own, strict=True):
            weights[row, : len(row_weights)] = row_weights
    return weights


@pytest.mark.parametrize("alias", THEIRS)
def test_a_name_gives_its_frameworks_formula(alias: str, record_property: Callable[[str, object], None]) -> None:
    """Weights are slopes of the framework's formula, which is linear in the losses."""
    worst = 0.0
    for batch in map(random_batch, range(5)):
        leaf = batch.losses.double().requires_grad_()
        (expected,) = torch.autograd.grad(THEIRS[alias](Batch(leaf, batch.masks.double(), batch.prompts)), leaf)
        worst = max(worst, float((ours(alias, batch).double() - expected).abs().max() / expected.abs().max()))
    assert worst < oracle.EXACT
    record_property("framework_name_parity_error", worst)


# ---- names


@pytest.mark.parametrize("mode", oracle.MODES)
def test_our_own_names_pass_as_they_are(mode: str) -> None:
    divisor = oracle.divisor_of(mode, 3.0, optional=True)
    named = resolve(mode, divisor=divisor, units="active")
    assert (named.mode.name, named.divisor, named.units) == (mode, divisor, "active")
    assert resolve(named.mode, divisor=divisor).units == "all"


def named(name: str, divisor: Any = None, units: Any = None) -> Aggregation:
    return resolve(name, divisor=divisor, units=units)


SOUND = ("verl:token-mean", None, "active")  # which counts no unit
NUMBERED = ("open_instruct:16", 16.0)
test_refused = refusal_tests(
    refusals(
        named,
        (("verk:token-mean",), "there is no framework 'verk'. Did you mean verl[?] Choose one of verl, slime", SOUND),
        (
            ("verl:seq-mean-token-men",),
            "verl has no such setting. Did you mean seq-mean-token-mean[?] Choose one of token-mean, token-sum",
            SOUND,
        ),
        (("skyrl:token-mean",), "Did you mean token_mean[?]", ("skyrl:token_mean",)),  # another's spelling
        (("openrlhf:token_level_loss=True",), "Did you mean token_level_loss=true[?]", SOUND),
        (("trl:xyz",), "trl has no such setting. Choose one of grpo, sapo, dr_grpo", ("trl:grpo",)),
        (("verl:",), "verl has no such setting", SOUND),
        (("open_instruct:<number>",), "open_instruct has no such setting.* Choose one of token, <number>", NUMBERED),
        (("open_instruct:many",), "open_instruct has no such setting", NUMBERED),
        (
            ("verl:seq-mean-token-sum-norm",),
            "without a divisor: verl divides by its loss_scale_factor. Give that number",
            ("verl:seq-mean-token-sum-norm", 8),
        ),
        (
            ("verl:seq-mean-token-sum", 8),
            "divisor 8 with .*: the name stands for divisor 1",
            ("verl:seq-mean-token-sum", 1),
        ),
        (("open_instruct:16", 8.0), "divisor 8.0 with .*: the name stands for divisor 16", NUMBERED),
        (("verl:token-mean", 8), "divisor 8 with .*: the name stands for no divisor", SOUND),
        (("openrlhf:token_level_loss=false", None, "all"), "'all' with .*: openrlhf counts active", SOUND),
        (("trl:grpo", None, "active"), "'active' with .*: trl counts all units", ("trl:grpo", None, "all")),
        (
            ("verl:gspo",),
            "versions of verl differ: in 0.6.1 to 1dda039b it is sample_mean; in 0.9.1 it is whatever loss_agg_mode "
            "is, by default token-mean. Write yours: verl@1dda039b:gspo or verl@0.9.1:gspo",
            ("verl@0.8.0:gspo",),
        ),
        (("verl@0.9.1:gspo",), "it is whatever loss_agg_mode is.*Choose 'token_mean'", ("verl@0.9.0:gspo",)),
        (
            ("verl@0.8.5:gspo",),
            "of verl the versions 0.6.1, .* are known. Write the last of these",
            ("verl@0.8.0:gspo",),
        ),
        (
            ("verl@0.8.0:token-sum",),
            "verl has this setting in 0.9.0 to 0.9.1 alone",
            ("verl@0.9.1:token-sum",),
        ),
        (("verk@1:token-mean",), "there is no framework 'verk'", SOUND),
        (("trl:bnpo",), "local batches' means.*Choose 'token_mean', the nearest exact", ("trl:dapo",)),
        (("open_instruct:0",), "divisor 0.0 with .*between", NUMBERED),
        (("open_instruct:nan",), "no such setting", NUMBERED),
        *(
            ((asked,), f"'{asked}': there is no such mode. {said}", SOUND)
            for asked, said in (
                ("seq_mean_token_mean", "Write 'sample_mean', or 'verl:seq-mean-token-mean' as that framework counts"),
                ("seq-mean-token-sum", "Write 'constant'"),
                ("GSPO", "It is sample_mean. Choose one of sample_mean"),
                ("dr_grpo", "It is constant, with a divisor"),
                ("vl_norm", "It is a mode of your own"),
                ("Agent-Lightning", "It is a framework. Write agent_lightning:SETTING"),
                ("verl@0.9.0", "It is a framework. Write verl@0.9.0:SETTING"),
                ("token_men", "Did you mean token_mean[?]"),
                ("xyz", "Choose one of sample_mean, prompt_mean"),
            )
        ),
    )
    | refusals(
        named,
        ((3,), "loss aggregation 3 \\(int\\): it must be a mode, its name or a function", SOUND),
        error=TypeError,
    )
)


def test_by_api_an_explicit_counting_is_told_from_none() -> None:
    masks, name = [torch.ones(2), torch.zeros(3)], "openrlhf:token_level_loss=false"
    totals = StepTotals.of(masks)
    assert float(make_pg_loss_reducer(name, masks, totals=totals)(torch.ones(5))) == 1  # the masked one is not counted
    with pytest.raises(ValueError, match="openrlhf counts active units"):
        make_pg_loss_reducer(name, masks, totals=totals, units="all")


def test_what_stands_beside_a_name_is_of_one_that_is() -> None:
    """A policy loss goes with its aggregation, too."""
    assert {peer.framework for peer in NAMES} == set(FRAMEWORKS)
    assert all(f"{name}:{row.default}" in THEIRS for name, row in FRAMEWORKS.items() if row.default)
    for peer in NAMES:
        if peer.loss:
            check_goes_with(peer.loss, resolve(peer.alias))


def test_the_printed_table() -> None:
    screen, printed = format_modes(), format_frameworks()
    assert (screen + printed).isascii()
    assert max(map(len, screen.splitlines())) <= 100
    assert 24 <= len(screen.splitlines()) <= 40
    assert max(map(len, printed.splitlines())) <= 120
    firsts = [line.split()[0] for line in screen.splitlines() if line]
    assert all(firsts.count(word) == 1 for word in oracle.MODES)
    assert all(re.search(rf"\b{name}\s+\(", screen) for name in FRAMEWORKS)
    firsts = [line.split()[0] for line in printed.splitlines() if line]
    assert [word for word in firsts if word in PEERS] == [peer.alias for peer in sorted(NAMES, key=_on_the_page)]


def _on_the_page(peer: PeerName) -> int:
    return list(FRAMEWORKS).index(peer.framework)
