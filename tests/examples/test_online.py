"""The online example on ranks: its sampler, and the same steps in every layout. That it learns: test_tour.py."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from compare_layouts import BOUNDS, differences, weights_in
from online.report import describe
from online.task import MAX_RESPONSE, PROMPT_LENGTH, VOCABULARY, decode, draw_problems, encode
from online_rollouts import some_rollouts
from ranks import RankError, run_ranks, start_process_group
from rollouts import read_rollouts, write_rollouts

pytestmark = pytest.mark.slow

# ---- on ranks

PROBLEMS = 12


def policy_of(tp: int, cp: int) -> Any:
    from megatron.core import parallel_state
    from online.policy import build_policy

    start_process_group()
    parallel_state.initialize_model_parallel(tp, context_parallel_size=cp)
    return build_policy(0)


def prompts_and_uniforms() -> tuple[torch.Tensor, torch.Tensor]:
    from online.sampler import draw_uniforms

    problems = draw_problems("training", PROBLEMS, random.Random(2))
    return torch.tensor([encode(problem.prompt) for problem in problems]), draw_uniforms(PROBLEMS, seed=3)


def drawn_responses(tp: int, cp: int) -> dict[str, Any]:
    from online.sampler import sample, sample_together

    policy = policy_of(tp, cp)
    prompts, uniforms = prompts_and_uniforms()
    drawn = sample_together(
        lambda rows: sample(policy.model, prompts[rows], uniforms[rows], tp_group=policy.groups.tp),
        PROBLEMS,
        replica_group=policy.groups.dp_cp,
    )
    assert policy.model.training, "the model is left as it was"
    return {name: value.numpy() for name, value in vars(drawn).items()}


def whole_log_probs(responses: dict[str, Any]) -> Any:
    """One forward pass over prompts and responses, no cache: log-probs of all words, [rows, MAX_RESPONSE, words]."""
    policy = policy_of(1, 1)
    prompts, _ = prompts_and_uniforms()
    tokens = torch.cat([prompts, torch.from_numpy(responses["tokens"])], dim=1)[:, :-1]
    with torch.no_grad():
        logits = policy.model(tokens, torch.arange(tokens.size(1)).expand_as(tokens), None)
    return logits[:, PROMPT_LENGTH - 1 :].double().log_softmax(-1).numpy()


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    (drawn,) = run_ranks(1, drawn_responses, 1, 1)
    return drawn


def test_the_sampler_agrees_with_a_whole_forward_pass(alone: dict[str, Any]) -> None:
    """Log-probs and entropies do, and each token is where its random number falls in the cumulated probabilities."""
    (expected,) = run_ranks(1, whole_log_probs, alone)
    _, uniforms = prompts_and_uniforms()
    # Two layers of sums over 256 products, as the layout tests have it; logits here are below 10.
    error = 10 * oracle.chain_error(2, 256)
    seen = 0
    for row, length in enumerate(alone["lengths"]):
        for t in range(length):
            token, all_log_probs = alone["tokens"][row, t], expected[row, t]
            assert abs(alone["log_probs"][row, t] - all_log_probs[token]) < error
            assert abs(alone["entropies"][row, t] + (np.exp(all_log_probs) * all_log_probs).sum()) < error * len(
                VOCABULARY
            )
            reached = np.exp(all_log_probs).cumsum()
            below = reached[token - 1] if token else 0.0
            assert below - error <= float(uniforms[row, t]) <= reached[token] + error
            seen += 1
        text = decode(alone["tokens"][row, :length].tolist())
        assert "$" not in text[:-1]
        assert text.endswith("$") or length == MAX_RESPONSE
    assert seen > 100
    assert len(set(alone["lengths"])) > 3, "rows end at different tokens"


def test_every_layout_draws_the_same(alone: dict[str, Any]) -> None:
    for drawn in run_ranks(4, drawn_responses, 2, 1):
        assert (drawn["lengths"] == alone["lengths"]).all()
        for row, length in enumerate(alone["lengths"]):
            assert (drawn["tokens"][row, :length] == alone["tokens"][row, :length]).all()
            np.testing.assert_allclose(drawn["log_probs"][row, :length], alone["log_probs"][row, :length], atol=1e-4)


def drawn_greedily(tp: int, cp: int) -> list[str]:
    """Responses drawn greedily by Megatron's engine."""
    from megatron.core.inference.utils import InferenceMode
    from online.engine import sample_with_engine

    policy = policy_of(tp, cp)
    prompts, _ = prompts_and_uniforms()
    drawn = sample_with_engine(policy.model, prompts, seed=1, greedy=True)
    assert policy.model.training, "the model is left as it was"
    assert not InferenceMode.is_active()
    return [decode(row[:n]) for row, n in zip(drawn.tokens.tolist(), drawn.lengths.tolist(), strict=True)]


def greedy_by_whole_passes() -> list[str]:
    """The likeliest token, again and again, by forward passes over all that is there; no cache, no engine."""
    policy = policy_of(1, 1)
    responses = []
    for prompt in prompts_and_uniforms()[0].tolist():
        response: list[int] = []
        while len(response) < MAX_RESPONSE and "$" not in decode(response):
            tokens = torch.tensor([prompt + response])
            with torch.no_grad():
                logits = policy.model(tokens, torch.arange(tokens.size(1))[None], None)
            response.append(int(logits[0, -1].argmax()))
        responses.append(decode(response))
    return responses


def test_megatron_s_engine_draws_from_the_same_policy() -> None:
    pytest.importorskip("tqdm", reason="Megatron's static engine needs it")
    (expected,) = run_ranks(1, greedy_by_whole_passes)
    assert len({len(response) for response in expected}) > 1
    assert run_ranks(2, drawn_greedily, 2, 1) == [expected] * 2


def test_rows_that_cannot_be_split_evenly_are_refused_on_every_rank() -> None:
    with pytest.raises(RankError, match="11 responses on 2 data- and context-parallel ranks") as caught:
        run_ranks(2, split_unevenly)
    assert set(caught.value.errors) == {0, 1}


def split_unevenly() -> None:
    from online.sampler import sample_together

    sample_together(lambda rows: pytest.fail("drawn"), PROBLEMS - 1, replica_group=policy_of(1, 1).groups.dp_cp)


# ---- whole runs

SHORT = ["--warm-start-reward", "0", "--eval-prompts", "16", "--prompts-per-step", "8"]


def run_online(flags: list[str]) -> None:
    import online_grpo

    online_grpo.main(flags)


def steps_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]


def replayed(folder: Path, steps: int, *, empty: float = 0.1) -> list[str]:
    """Flags to train on made-up rollouts: a policy that was hardly warmed is never right."""
    folder.mkdir()
    for step in range(1, steps + 1):
        write_rollouts(folder / f"step_{step:04}.jsonl", some_rollouts(8, 5, seed=step, empty=empty))
    return ["--replay-rollouts", str(folder), "--steps", str(steps)]


def test_the_first_ratio_is_one_and_the_second_is_not(tmp_path: Path) -> None:
    made_up = replayed(tmp_path / "rollouts", 1, empty=0)  # metrics are sample means: an empty mask is a 0 in them
    once, twice = ([*SHORT, *made_up, "--output", str(tmp_path / n), "--inner-steps", n] for n in ("1", "2"))
    run_ranks(1, run_online, [*once, "--lr-warmup-steps", "0"])
    run_ranks(1, run_online, [*twice, "--lr-warmup-steps", "0", "--lr", "3e-3"])
    for step in steps_of(tmp_path / "1")[1:]:
        assert step["ratio"] == pytest.approx(1, abs=1e-6)
        assert step["ratio_gap"] < 1e-6
        assert step["clip_fraction"] == 0
        assert step["ppo_kl"] == pytest.approx(0, abs=1e-6)
        assert step["sampler_gap"] > 0.1, "another policy than this one made those rollouts up"
    for step in steps_of(tmp_path / "2")[1:]:
        assert step["ratio_gap"] < 1e-6, "of the first inner step"
        assert step["clip_fraction"] > 0.01
        assert step["ppo_kl"] != 0


@pytest.mark.filterwarnings("ignore:all rewards are equal")  # a policy that was hardly warmed is never right
def test_sampled_rollouts_have_the_trainer_s_log_probs(tmp_path: Path) -> None:
    flags = [*SHORT, "--output", str(tmp_path), "--steps", "2", "--save-rollouts", str(tmp_path / "rollouts")]
    run_ranks(1, run_online, flags)
    for step in steps_of(tmp_path)[1:]:
        assert step["sampler_gap"] < 10 * oracle.chain_error(2, 256)
        rollouts = read_rollouts(tmp_path / "rollouts" / f"step_{step['step']:04}.jsonl", vocab_size=len(VOCABULARY))
        assert len(rollouts) == 8 * 8
        for name, value in describe(rollouts).items():
            assert step[name] == pytest.approx(value)
        assert step["entropy"] > 0.1


def test_a_run_on_megatron_s_engine(tmp_path: Path) -> None:
    pytest.importorskip("tqdm", reason="Megatron's static engine needs it")
    flags = [*SHORT, "--output", str(tmp_path), "--steps", "2", "--sampler", "megatron"]
    run_ranks(2, run_online, flags)
    for step in steps_of(tmp_path)[1:]:
        assert step["ratio"] == pytest.approx(1, abs=1e-6)
        assert step["length"] > 1
        assert not {"entropy", "sampler_gap"} & set(step), "the engine does not say"


#: Over processes, micro-batches and samples; the last for every mode.
LAYOUTS = {
    "tp 2 x cp 2": (4, ["--tensor-model-parallel-size", "2", "--context-parallel-size", "2"]),
    "rollouts in 3 samples, other micro-batches": (1, ["--samples-per-rollout", "3", "--num-microbatches", "5"]),
    "rollouts in 2 samples, dp 2": (2, ["--samples-per-rollout", "2"]),
}
MODES = {
    "sample_mean": [],
    "prompt_mean": ["--loss-aggregation", "prompt_mean"],
    "constant": ["--loss-aggregation", "constant", "--loss-aggregation-divisor", "40960"],
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder with weights to start from, and the flags of two steps on the same rollouts."""
    folder = tmp_path_factory.mktemp("online")
    start = str(folder / "start")
    run_ranks(1, run_online, [*SHORT, "--output", str(folder / "first"), "--steps", "1", "--save-start", start])
    steps = ["--inner-steps", "2", "--lr-warmup-steps", "0", "--eval-prompts", "16"]
    return folder, ["--load", start, *steps, *replayed(folder / "rollouts", 2)]


def finished(world_size: int, name: str, flags: list[str], begun: tuple[Path, list[str]]) -> Path:
    folder, common = begun
    run = folder / name
    if not run.exists():
        run_ranks(world_size, run_online, [*common, *flags, "--output", str(run), "--save", str(run / "weights")])
    return run


@pytest.mark.parametrize("mode", MODES)
def test_steps_are_the_same_in_every_layout(mode: str, begun: tuple[Path, list[str]], record_property: Any) -> None:
    reference = finished(1, mode, MODES[mode], begun)
    start = weights_in(begun[0] / "start")
    for layout in LAYOUTS if mode == "sample_mean" else list(LAYOUTS)[-1:]:
        world_size, flags = LAYOUTS[layout]
        run = finished(world_size, f"{mode} on {layout}", [*flags, *MODES[mode]], begun)
        errors = differences(run, reference, start)
        assert all(errors[name] <= bound for name, bound in BOUNDS.items()), (layout, errors)
        record_property("relative_error_of_online_losses", errors["loss"])
        record_property("relative_error_of_online_grad_norms", errors["grad norm"])


def test_steps_with_a_teacher_are_the_same_over_tp_and_cp(begun: tuple[Path, list[str]]) -> None:
    """The teacher gives its top 6 of 16 ids, and is the model that an earlier run left."""
    taught = ["--teacher", str(finished(1, "sample_mean", [], begun) / "weights"), "--teacher-top-k", "6"]
    reference = finished(1, "taught", taught, begun)
    assert min(step["teacher_kl"] for step in steps_of(reference)[1:]) > 1e-5
    start, (world_size, flags) = weights_in(begun[0] / "start"), LAYOUTS["tp 2 x cp 2"]
    errors = differences(finished(world_size, "taught over tp and cp", [*taught, *flags], begun), reference, start)
    assert all(errors[name] <= bound for name, bound in BOUNDS.items()), errors
    untaught = differences(finished(1, "sample_mean", [], begun), reference, start)  # negative control
    assert untaught["grad norm"] > 10 * BOUNDS["grad norm"]


def test_other_modes_would_be_seen(begun: tuple[Path, list[str]]) -> None:
    """Negative control: what the layouts are held to tells the modes apart."""
    start = weights_in(begun[0] / "start")
    runs = [finished(1, mode, flags, begun) for mode, flags in MODES.items()]
    for a, b in itertools.combinations(runs, 2):
        errors = differences(a, b, start)
        assert min(errors["loss"], errors["grad norm"]) > 10 * BOUNDS["loss"], (a, b, errors)
