"""The audit's report without a launch: what ranks send, by hand, and which mode each term is judged by."""

import json
import pickle
from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from counted_steps import measured, ragged
from published import exact

from megatron_rl_loss import Audit, Samples, ZigzagTHD
from megatron_rl_loss.audit.assembly import portable
from megatron_rl_loss.audit.judge import expected_weights, judge
from megatron_rl_loss.audit.launch import add_audit_options, report
from megatron_rl_loss.audit.megatron.reports import FromRank, assembled
from megatron_rl_loss.audit.tokens import MeasuredStep, PlacedSamples
from megatron_rl_loss.core.aggregation import Aggregation, resolve
from megatron_rl_loss.core.taps import GradientSum, SummedShare, Tap
from megatron_rl_loss.proof.factor import Factor
from megatron_rl_loss.proof.step_state import Stage, StepState


def groups_of(**sizes: int) -> Any:
    """Process groups of these sizes, 1 by default, that only know their size."""
    names = ("dp", "cp", "tp", "pp", "dp_cp")
    return SimpleNamespace(**{name: SimpleNamespace(size=partial(sizes.get, name, 1)) for name in names})


CONFIG = SimpleNamespace(calculate_per_token_loss=False, num_moe_experts=None)
FOUR = torch.ones(4)
TWO_KINDS = Samples([torch.ones(2), torch.ones(2)], labels={"kind": [1.0, 3.0]})


def by_kind(inputs: Any) -> Any:
    return np.array(inputs.label("kind")) / 8


def sent(*tapped: Any, factor: float = 1.0, samples: Samples | None = None, term: str = "pg") -> FromRank:
    """What a rank sends, whose micro-batches were tapped so, after a journey."""
    rank_part = FromRank(StepState(stages={0: Stage(Factor(factor, 1e-8))}), num_microbatches=1)
    for number, losses in enumerate(tapped):
        own = samples or losses.samples or Samples([FOUR])
        rank_part.add(term, losses, own, 1, None, dp_rank=0, microbatch=number, cp_rank=0)
    arrived: FromRank = pickle.loads(pickle.dumps(rank_part))
    return arrived


def losses_of(gradient: Any = 0.25, **said: Any) -> Tap:
    return Tap((4,), hooked=GradientSum(torch.as_tensor(gradient) * FOUR), **said)


def step_of(*from_ranks: FromRank, term: str = "pg", **sizes: int) -> MeasuredStep:
    return assembled(from_ranks, groups_of(**sizes), CONFIG, 1.0, dynamic_cp=False)[term]


# ---- what ranks send


def test_tensor_parallel_ranks_that_are_scaled_apart_have_no_weight() -> None:
    """Both measure the same parameter, each its own piece."""
    alone = FromRank(StepState(stages={0: Stage(Factor(2.0, 1e-8, "tensor-parallel rank 1"))}))
    (why,) = step_of(sent(losses_of()), alone, tp=2).unknown
    assert why.startswith("Gradients are multiplied by")
    assert "no weight holds for all parameters" in why
    alone = FromRank(StepState(stages={0: Stage(Factor(1 + 1e-7, 1e-8, "tensor-parallel rank 1"))}))
    assert not step_of(sent(losses_of()), alone, tp=2).unknown  # within rounding


def test_a_rank_of_the_last_stage_without_a_loss_is_told() -> None:
    silent = FromRank(StepState())
    why = "Some ranks of the last pipeline stage computed no loss."
    assert step_of(sent(losses_of()), silent, dp_cp=2).unknown == (why,)
    assert not step_of(sent(losses_of()), silent, pp=2).unknown  # of another stage


def share(off: float = 0.0, unseen: str = "") -> Tap:
    """A token mean over four tokens, by a reducer of ours."""
    reducer: Any = SimpleNamespace(weights=FOUR / 4, aggregation=resolve("token_mean"), mask=None, plan=None)
    summed = SummedShare(reducer, 1.0, unseen)
    summed.slope, summed.off = torch.tensor(1.0), torch.tensor(off)
    return Tap((4,), samples=Samples([FOUR]), share=summed)


def test_a_reducer_that_sends_other_gradients_than_its_weights_is_told() -> None:
    """The share weighs what it should; the tokens get twice that."""
    rank_part = FromRank(StepState(stages={0: Stage(Factor(1.0, 1e-8))}), num_microbatches=1)
    for off, says in ((1e-7, ""), (1.0, "A reducer's backward pass does not send its weights")):
        rank_part.terms, rank_part.state.findings = {}, []
        rank_part.add("pg", share(off), Samples([FOUR]), 1, None, dp_rank=0, microbatch=0, cp_rank=0)
        verdict = judge(step_of(rank_part), "token_mean")
        assert verdict.sound == (not says)
        assert says in str(verdict)


def test_what_a_tap_could_not_see_is_a_note() -> None:
    rank_part = FromRank(StepState(stages={0: Stage(Factor(1.0, 1e-8))}), num_microbatches=1)
    rank_part.add("pg", share(unseen="compiled"), Samples([FOUR]), 1, None, dp_rank=0, microbatch=0, cp_rank=0)
    assert "measured from the share on (compiled)" in str(judge(step_of(rank_part), "token_mean"))
    for gradient, is_said in ((0.25, False), (0.5, True)):
        verdict = judge(step_of(sent(losses_of(gradient, doubt="the engine clamps."))), "token_mean")
        assert verdict.sound == (not is_said)
        assert ("the difference may be no fault: the engine clamps." in verdict.notes) == is_said


def test_ids_of_samples_that_were_described_are_compared_with_the_taps() -> None:
    """The tap has no samples of its own; those of the iterator have tokens."""
    described = Samples([FOUR], tokens=torch.arange(4))
    for ids, says in ((torch.arange(4), ""), (torch.arange(4) + 1, "4 of 4 tokens differ")):
        step = step_of(sent(losses_of(tokens=ids), samples=described))
        assert says in " ".join(step.unknown)
        assert step.facts["tokens_compared"] == 4
    (note,) = step_of(sent(losses_of(tokens=torch.arange(4)))).notes
    assert note.startswith("4 input ids were tapped and could not be compared")


def test_gradients_that_are_not_finite_are_told_with_their_place() -> None:
    rank_part = sent(losses_of(), losses_of(torch.nan))
    rank_part.limit("the factor is not known.")
    (*_, why) = step_of(rank_part).unknown
    assert why == "Gradients of losses are NaN or infinite at DP 0, micro-batch 1, CP 0."
    assert not step_of(sent(losses_of(torch.nan))).unknown  # the verdict shows where


@pytest.mark.parametrize(("per_token", "factor"), [(False, 1 / 2), (True, 1 / 4)])
def test_auxiliary_losses_that_weigh_too_much_are_a_note(per_token: bool, factor: float) -> None:
    """On average over two ranks, or over four active tokens, they weigh 1."""
    config = SimpleNamespace(calculate_per_token_loss=per_token, num_moe_experts=2, moe_aux_loss_coeff=[0.01])
    samples = Samples([[1, 0, 1], [0.5, 0, 1]])
    for times, is_said in ((1, False), (3, True)):
        losses = Tap((6,), hooked=GradientSum(torch.ones(6)), samples=samples)
        from_rank = sent(losses, factor=times * factor)
        steps = assembled([from_rank], groups_of(dp_cp=2), config, 1.0, dynamic_cp=False)
        says = f"Auxiliary losses (moe_aux_loss_coeff) weigh {times} times what they should"
        assert any(note.startswith(says) for note in steps["pg"].notes) == is_said
    config.moe_aux_loss_coeff = [0.0]
    assert not assembled([from_rank], groups_of(dp_cp=2), config, 1.0, dynamic_cp=False)["pg"].notes


def test_samples_travel_with_what_a_mode_reads_and_nothing_else() -> None:
    class OwnLayout(ZigzagTHD):
        """Of a class that another process cannot import."""

    masks, cu_seqlens_padded = list[list[float]]([[1, 0, 1], [0.5]]), [0, 4, 8]
    known = {"weight": torch.tensor([2.0, 3.0]), "kind": ["a", torch.tensor(1)]}
    options: dict[str, Any] = {"prompt_ids": ["x", "y"], "labels": {**known, "functions": [lambda: 1] * 2}}
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    weights = []
    for layout in (ZigzagTHD, OwnLayout):
        samples = Samples(
            masks, layout=layout(cu_seqlens_padded, total_lengths=[3, 1]), cp_group=group, tokens=torch.arange(8),
            term_masks={"other": [[1, 1, 1], [1]]}, **options,
        )  # fmt: skip
        other: Samples = pickle.loads(pickle.dumps(portable(samples)))
        assert set(other.labels) == {"weight", "kind"}
        assert (other.tokens, other.cp_group, other.by_mask) == (None, None, {})
        assert (other.mask_starts, other.total_tokens) == ([0, 4], 8)
        assert isinstance(other.layout, ZigzagTHD) == (layout is ZigzagTHD)
        placed = PlacedSamples(dp_rank=0, microbatch=0, samples=other, cp_rank=np.zeros(4, np.int64))
        weights.append(
            expected_weights(MeasuredStep(microbatches=(placed,), weights=np.zeros(4)), resolve("prompt_mean"))
        )
        assert samples.labels.keys() == {"weight", "kind", "functions"}  # as they were
    assert [column.tolist() for column in weights] == [[0.25, 0, 0.25, 0.5]] * 2


@pytest.mark.parametrize("mode", [by_kind, lambda inputs: by_kind(inputs)], ids=["imported", "lambda"])
def test_a_terms_own_function_is_sent_where_it_can_be(mode: Any) -> None:
    """On another rank than that which prints; a lambda stays behind."""
    losses = losses_of(torch.tensor([1, 1, 3, 3]) / 8, samples=TWO_KINDS, aggregation=resolve(mode))
    rank_part = sent(losses)
    (part,) = rank_part.terms["pg"]
    assert (part.aggregation is None) == (mode is not by_kind)
    assert judge(step_of(rank_part), resolve(mode)).sound
    assert not judge(step_of(rank_part), "token_mean").sound


# ---- which mode a term is judged by


def options_of(*words: str) -> Namespace:
    parser = ArgumentParser()
    add_audit_options(parser)
    return parser.parse_args(words)


def audit_of(declared: dict[str, Aggregation | None], **facts: Any) -> Any:
    """An audit of a sound token mean, for each of these terms."""
    steps = {name: measured(ragged(3), exact, **facts) for name in declared}
    return SimpleNamespace(
        steps=steps, expected_of=declared.get, log_prob_gap=None, measured=next(iter(steps.values()), None)
    )


@pytest.mark.parametrize(
    ("flags", "words", "status", "says"),
    [
        ([], [], 0, "SOUND: nearest mode token_mean"),
        (["--loss", "ppo", "--kl-loss=0.1"], [], 0, "SOUND: nearest mode"),  # a script's own, which ours begin with
        (["--loss-aggregation", "token_mean"], [], 0, "SOUND: token_mean"),
        (["--lr", "1", "--loss-aggregation", "sample_mean"], [], 1, "NOT SOUND: expected sample_mean"),
        (
            ["--loss-aggregation", "constant", "--loss-aggregation-divisor", "8"],
            [],
            1,
            "expected constant with divisor 8",
        ),
        (["--loss-aggregation", "sample_mean"], ["--expect", "token_mean"], 0, "SOUND: token_mean"),
        (
            [],
            ["--expect", "constant", "--divisor", "9", "--units", "active"],
            1,
            "constant with divisor 9, ",
        ),
    ],
)
def test_without_a_declared_mode_the_flags_decide(
    flags: list[str], words: list[str], status: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a script that uses no LossAggregation, which knows its flags alone."""
    monkeypatch.setattr("sys.argv", ["script.py", *flags])
    text, status_of_report = report(options_of(*words), audit_of({"pg": None}))
    assert says in text
    assert status_of_report == status


def test_flags_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["script.py", "--loss-aggregation-divisor", "many"])
    with pytest.raises(ValueError, match=r"-divisor many: .*invalid float value.*Write the flags as using.md says"):
        report(options_of(), audit_of({"pg": None}))


def test_a_declared_mode_counts_more_than_flags_and_expectations_are_of_the_policy_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["script.py", "--loss-aggregation", "sample_mean"])
    audit = audit_of({"pg": resolve("token_mean"), "kl": resolve("prompt_mean")})
    text, status = report(options_of(), audit)
    assert text.startswith("Term pg:\nSOUND: token_mean")
    assert "Term kl:\nNOT SOUND: expected prompt_mean" in text
    assert status == 1
    text, status = report(options_of("--expect", "prompt_mean"), audit_of({"pg": None, "kl": resolve("token_mean")}))
    assert "Term pg:\nNOT SOUND: expected prompt_mean" in text
    assert "Term kl:\nSOUND: token_mean" in text


def test_a_function_that_stayed_behind_is_no_other_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was compared with the nearest mode, as if the term had asked for it."""
    monkeypatch.setattr("sys.argv", ["script.py"])
    own = {"mode": "script.<lambda>", "divisor": None, "units": "all"}
    text, status = report(options_of(), audit_of({"pg": None}, expected=own))
    assert text.startswith("NO VERDICT: The mode script.<lambda> is a function that the first rank does not have.")
    assert status == 2
    out = tmp_path / "step.html"
    text, status = report(options_of("--plot", str(out)), audit_of({"pg": None}, expected=own))
    assert text.endswith(f"--plot {out}: there is no verdict, so no weight is known. Mend what the verdict names.")
    assert (status, out.exists()) == (2, False)


def test_the_measured_step_is_drawn(tmp_path: Path) -> None:
    """On the first rank, which has it; another one draws nothing."""
    step = step_of(sent(losses_of(torch.tensor([1, 1, 1, 1]) / 4)))
    audit: Any = SimpleNamespace(measured=step)
    Audit.plot(audit, tmp_path / "step.html", expected="sample_mean", title="Mine")
    assert all(text in (tmp_path / "step.html").read_text() for text in ("Mine", "0.25"))
    Audit.plot(SimpleNamespace(measured=None), tmp_path / "other.html")  # type: ignore[arg-type]
    assert not (tmp_path / "other.html").exists()


def test_verdicts_are_written_as_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["script.py"])
    out = tmp_path / "verdicts.json"
    audit = audit_of({"pg": resolve("token_mean"), "kl": resolve("sample_mean")}, coefficient=1.0)
    report(options_of("--json", str(out)), audit)
    data = json.loads(out.read_text())
    assert {name: verdict["sound"] for name, verdict in data.items()} == {"pg": True, "kl": False}
    assert data["kl"]["facts"] == {"coefficient": 1.0}
    for expected, status in (("token_mean", 2), ("sample_mean", 1)):  # a wrong weight counts more
        text, status_of_report = report(options_of("--json", str(tmp_path)), audit_of({"pg": resolve(expected)}))
        assert text.endswith(f"--json {tmp_path}: the file cannot be written (Is a directory). Give a path that can.")
        assert status_of_report == status
    text, status = report(options_of("--plot", str(tmp_path / "gone" / "step.html")), audit_of({"pg": None}))
    assert "step.html: a picture to draw into" in text
    assert status == 2
    assert report(options_of(), audit_of({})) == ("", 0)  # on all ranks but the first
