"""The hooks of slime and miles, through *their* outer scaling, against the float64 formulas of the modes.

`their_step` states that scaling independently (slime 624b824a, miles 31f1ca96: `loss_function`; Megatron's schedule and
DDP), in float64, over every DP rank, micro-batch and CP rank, with one leaf a token, so that gradients are compared
token by token. Not exercised: slime and miles themselves, NCCL. Megatron's real schedule and groups are, at the end.
"""

import functools
import importlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from ranks import RankError, run_ranks

from megatron_rl_loss import StepTotals
from megatron_rl_loss.frameworks import slime, step_counts
from megatron_rl_loss.frameworks.slime import StepCounts, make_hook

TOLERANCE = oracle.EXACT
LAYOUTS = [(dp, cp) for dp in (1, 2, 4) for cp in (1, 2, 4)]


def load_function(path: str) -> Any:
    """What both loaders do: split at the last dot, import, getattr."""
    module_path, _, attribute = path.rpartition(".")
    return getattr(importlib.import_module(module_path), attribute)


@dataclass(frozen=True)
class Rollouts:
    """A step: samples with int masks, prompt lengths, and where each micro-batch of each DP rank gets them from."""

    samples: list[oracle.Sample]
    total_lengths: list[int]
    dealt: list[list[list[int]]]  # [dp rank][micro-batch] -> sample numbers
    global_batch_size: int

    def rollout_mask_sum(self, i: int) -> float:
        rollout = self.samples[i].rollout_id
        if rollout is None:
            return oracle.mask_tokens([self.samples[i]])
        return oracle.mask_tokens([one for one in self.samples if one.rollout_id == rollout])

    def counts(self, **changed: float) -> StepCounts:
        masked = sum(not bool(one.mask.any()) for one in self.samples)
        values: dict[str, Any] = {
            "step_tokens": oracle.mask_tokens(self.samples),
            "num_samples": len(self.samples),
            "num_masked_samples": masked,
            "global_batch_size": self.global_batch_size,
        }
        return StepCounts(**(values | changed))


def step_of(seed: int, dp: int, *, masked: bool = True, split: bool = False) -> Rollouts:
    """Ragged samples, partly (and fully, if `masked`) masked, dealt unevenly: micro-batches may be empty."""
    rng = random.Random(seed)
    samples = []
    for i in range(14):
        length = rng.choice([1, 2, 3, 5, 8, 13, 21])
        mask = [rng.choice([0, 1, 1]) for _ in range(length)]
        if masked and (i in (3, 8) or rng.random() < 0.1):
            mask = [0] * length
        elif not any(mask):
            mask[0] = 1
        losses = torch.tensor([rng.uniform(-3, 3) for _ in range(length)], dtype=torch.float64)
        samples.append(
            oracle.Sample(losses, torch.tensor(mask, dtype=torch.int32), f"r{i - i % 3 // 2}" if split else None)
        )
    total_lengths = [len(one.mask) + rng.choice([1, 2, 7, 30]) for one in samples]
    dealt: list[list[list[int]]] = [[[] for _ in range(3)] for _ in range(dp)]
    for i in range(len(samples)):
        rng.choice(rng.choice(dealt)).append(i)
    num_rollouts = len({one.rollout_id for one in samples}) if split else len(samples)
    return Rollouts(samples, total_lengths, dealt, num_rollouts)


HookOfRank = Callable[[int, int], Any]


def their_step(
    step: Rollouts,
    cp: int,
    per_token: bool,
    hook_of: HookOfRank,
    *,
    pass_mask_sums: bool = False,
    poison: bool = False,
    kept: list[torch.Tensor] | None = None,
    padded: int | None = None,
) -> tuple[float, torch.Tensor]:
    """Value and gradient of the step's policy loss after slime's or miles's scaling, Megatron's schedule and DDP.

    `kept`: masks after rejection, which the hook is given and their count of tokens is not. `padded`: length of rows.
    """
    samples, dp = step.samples, len(step.dealt)
    leaves = [(one.poisoned() if poison else one).losses.float().requires_grad_() for one in samples]
    value = torch.zeros((), dtype=torch.float64)
    num_tokens = 0.0
    for microbatches in step.dealt:
        for chosen in microbatches:
            responses = [len(samples[i].mask) for i in chosen]
            totals = [step.total_lengths[i] for i in chosen]
            masks = [samples[i].mask for i in chosen]
            for cp_rank in range(cp):
                # Every CP rank counts whole masks, each sample at least one token.
                num_tokens += sum(max(float(mask.sum()), 1.0) for mask in masks)
                keywords = {"rollout_mask_sums": [step.rollout_mask_sum(i) for i in chosen]} if pass_mask_sums else {}
                shown = masks if kept is None else [kept[i] for i in chosen]
                reducer = hook_of(cp_rank, cp)(totals, responses, shown, per_token, **keywords)
                rows = totals if padded is None else [padded] * len(totals)
                held = oracle.response_only(totals, responses, rows, cp_rank, cp)
                local = [leaves[chosen[at[0]]][at[1]] for at in held if at is not None]
                loss = reducer(torch.stack(local) if local else torch.zeros(0, requires_grad=True)).double()
                if per_token:
                    loss = loss * cp
                else:
                    loss = loss * len(microbatches) / step.global_batch_size * (dp * cp)
                    loss = loss / len(microbatches)  # Megatron's schedule, for 1 token
                value = value + loss
    value = value / num_tokens if per_token else value / (dp * cp)
    gradients = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    return float(value.detach()), torch.cat([gradient.double() for gradient in gradients])


def disagreement(result: tuple[float, torch.Tensor], step: Rollouts, mode: str, divisor: float | None = None) -> float:
    """The worse of value's and gradient's error, relative to the oracle's size."""
    value, gradient = result
    expected = torch.cat(oracle.step_gradient(mode, step.samples, divisor))
    in_value = abs(value - float(oracle.step_loss(mode, step.samples, divisor)))
    in_gradient = float((gradient - expected).abs().max() / expected.abs().max())
    scale = oracle.step_scale(mode, step.samples, divisor)
    return oracle.worst_error(in_value / scale, in_gradient, oracle.num_tokens(step.samples))


def hook_of(mode: str, counts: StepCounts | None = None, divisor: float | None = None) -> HookOfRank:
    def of_rank(cp_rank: int, cp_size: int) -> slime.Hook:
        return make_hook(mode, divisor=divisor, cp_rank=cp_rank, cp_size=cp_size, step_counts=lambda: counts)

    return of_rank


# --- parity


@pytest.mark.parametrize(("dp", "cp"), LAYOUTS)
@pytest.mark.parametrize("seed", [1, 2])
def test_sample_mean_and_constant_are_exact_after_their_scaling(dp: int, cp: int, seed: int) -> None:
    step = step_of(seed, dp)
    for mode, divisor in (("sample_mean", None), ("constant", 7.0)):
        result = their_step(step, cp, False, hook_of(mode, divisor=divisor), poison=True)
        assert disagreement(result, step, mode, divisor) < TOLERANCE


@pytest.mark.parametrize(("dp", "cp"), LAYOUTS)
def test_token_mean_is_exact_without_fully_masked_samples(dp: int, cp: int) -> None:
    step = step_of(3, dp, masked=False)
    assert disagreement(their_step(step, cp, True, hook_of("token_mean"), poison=True), step, "token_mean") < TOLERANCE


@pytest.mark.parametrize(("dp", "cp"), LAYOUTS)
@pytest.mark.parametrize("per_token", [True, False])
def test_token_mean_with_the_steps_counts_is_exact_whatever_is_masked(dp: int, cp: int, per_token: bool) -> None:
    step = step_of(4, dp)
    result = their_step(step, cp, per_token, hook_of("token_mean", step.counts()), poison=True)
    assert disagreement(result, step, "token_mean") < TOLERANCE


@pytest.mark.parametrize(("dp", "cp"), LAYOUTS)
def test_rollouts_split_over_samples(dp: int, cp: int) -> None:
    step = step_of(5, dp, split=True)
    result = their_step(step, cp, False, hook_of("sample_mean", step.counts()), pass_mask_sums=True)
    assert disagreement(result, step, "sample_mean") < TOLERANCE
    result = their_step(step, cp, False, hook_of("constant", step.counts(), divisor=7.0))
    assert disagreement(result, step, "constant", 7.0) < TOLERANCE
    with pytest.raises(ValueError, match="Run without the hook"):
        their_step(step, cp, False, hook_of("sample_mean", step.counts()))


@pytest.mark.parametrize("cp", [1, 2])
def test_prompt_mean_by_constant_1_and_folded_advantages(cp: int) -> None:
    """The way out that the refusal names: l proportional to the advantage, so weights times G may go into it."""
    step = step_of(6, 2)
    prompts = [i // 4 for i in range(len(step.samples))]
    samples = [
        oracle.Sample(one.losses, one.mask, None, prompt) for one, prompt in zip(step.samples, prompts, strict=True)
    ]
    weights = []
    for one in samples:
        group = oracle.mask_tokens([other for other in samples if other.prompt_id == one.prompt_id])
        weights.append(step.global_batch_size / (len(set(prompts)) * group))
    folded = [oracle.Sample(one.losses * w, one.mask) for one, w in zip(samples, weights, strict=True)]
    step = Rollouts(folded, step.total_lengths, step.dealt, step.global_batch_size)
    value, _ = their_step(step, cp, False, hook_of("constant", divisor=1.0))
    error = abs(value - float(oracle.step_loss("prompt_mean", samples)))
    assert error < TOLERANCE * oracle.step_scale("prompt_mean", samples)


def test_the_worked_batch() -> None:
    losses = [one.losses for one in oracle.WORKED]
    masks = [one.mask.int() for one in oracle.WORKED]
    step = Rollouts(
        [oracle.Sample(loss, mask) for loss, mask in zip(losses, masks, strict=True)],
        [6, 5, 7, 2],
        [[[0, 1], [2, 3]]],
        4,
    )
    for cp in (1, 2, 4):
        assert their_step(step, cp, False, hook_of("sample_mean"))[0] == pytest.approx(2.541667)
        assert their_step(step, cp, False, hook_of("constant", divisor=8.0))[0] == pytest.approx(0.859375)
        assert their_step(step, cp, True, hook_of("token_mean", step.counts()))[0] == pytest.approx(27.5 / 9)


def rejecting(step: Rollouts) -> tuple[list[torch.Tensor], Rollouts, float]:
    """Masks after rejection, which empties a sample; the step of what is left; and the part of tokens that is left."""
    kept = [one.mask.clone() for one in step.samples]
    emptied = next(i for i, mask in enumerate(kept) if mask.any())
    kept[emptied].zero_()
    for mask in kept[emptied + 1 :: 3]:
        mask[0] = 0
    samples = [oracle.Sample(one.losses, mask) for one, mask in zip(step.samples, kept, strict=True)]
    left = Rollouts(samples, step.total_lengths, step.dealt, step.global_batch_size)
    return kept, left, oracle.mask_tokens(samples) / oracle.mask_tokens(step.samples)


@pytest.mark.parametrize(("dp", "cp"), LAYOUTS)
@pytest.mark.parametrize("per_token", [True, False])
def test_rejection_leaves_every_mode_exact(dp: int, cp: int, per_token: bool) -> None:
    """A token mean then is a sum over the tokens left, divided by those before: their count is taken before, too."""
    step = step_of(9, dp)
    kept, left, share = rejecting(step)
    value, gradient = their_step(step, cp, per_token, hook_of("token_mean", step.counts()), kept=kept)
    assert disagreement((value / share, gradient / share), left, "token_mean") < TOLERANCE
    if not per_token:
        for mode, divisor in (("sample_mean", None), ("constant", 7.0)):
            result = their_step(step, cp, False, hook_of(mode, divisor=divisor), kept=kept)
            assert disagreement(result, left, mode, divisor) < TOLERANCE


@pytest.mark.parametrize(("dp", "cp"), LAYOUTS)
def test_padded_rows_of_known_length(dp: int, cp: int) -> None:
    """miles's qkv_format bshd: rows are cut by a common length, not by their own."""
    step = step_of(10, dp)
    counts = step.counts(padded_length=56)
    for mode, divisor, per_token in (
        ("sample_mean", None, False),
        ("constant", 7.0, False),
        ("token_mean", None, True),
    ):
        result = their_step(step, cp, per_token, hook_of(mode, counts, divisor), padded=56)
        assert disagreement(result, step, mode, divisor) < TOLERANCE


# --- negative controls: each plants a bug in what the parity tests above find sound


def their_own(reduce: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], cp_rank: int, cp: int) -> Any:
    """A hook that reduces the local losses and local masks of one sample at a time, as theirs do."""

    def hook(totals: list[int], responses: list[int], masks: list[torch.Tensor], per_token: bool) -> Any:
        def reducer(losses: torch.Tensor) -> torch.Tensor:
            held = oracle.response_only(totals, responses, totals, cp_rank, cp)
            parts = [
                reduce(
                    losses[[k for k, at in enumerate(held) if at and at[0] == i]],
                    masks[i][[at[1] for at in held if at and at[0] == i]],
                )
                for i in range(len(masks))
            ]
            return sum(parts, torch.zeros(()))

        return reducer

    return hook


def test_negative_control_their_token_sum_has_phantom_tokens() -> None:
    step = step_of(4, 2)
    result = their_step(step, 2, True, functools.partial(their_own, lambda x, m: (x * m).sum()))
    assert disagreement(result, step, "token_mean") > 1e-2


def test_negative_control_local_denominators_under_cp() -> None:
    step = step_of(1, 2)
    local_mean = functools.partial(their_own, lambda x, m: (x * m).sum() / m.sum().clamp(min=1))
    assert disagreement(their_step(step, 1, False, local_mean), step, "sample_mean") < TOLERANCE
    assert disagreement(their_step(step, 2, False, local_mean), step, "sample_mean") > 1e-2


@pytest.mark.parametrize(
    "wrong", [{"num_masked_samples": 0}, {"step_tokens": 60.0}], ids=["phantom tokens left in", "another step's tokens"]
)
def test_negative_control_wrong_counts(wrong: dict[str, float]) -> None:
    step = step_of(4, 2)
    result = their_step(step, 2, True, hook_of("token_mean", step.counts(**wrong)))
    assert disagreement(result, step, "token_mean") > 1e-3


def test_negative_control_wrong_global_batch_size() -> None:
    step = step_of(4, 2)
    result = their_step(step, 2, False, hook_of("token_mean", step.counts(global_batch_size=13)))
    assert disagreement(result, step, "token_mean") > 1e-3


def test_negative_control_padded_rows_taken_for_packed_ones() -> None:
    step = step_of(10, 1)
    with pytest.raises(ValueError, match="per_token_loss of shape"):
        their_step(step, 2, False, hook_of("sample_mean", step.counts()), padded=56)


def test_negative_control_counts_after_rejection() -> None:
    step = step_of(9, 2)
    kept, left, share = rejecting(step)
    value, gradient = their_step(step, 2, True, hook_of("token_mean", left.counts()), kept=kept)
    assert disagreement((value / share, gradient / share), left, "token_mean") > 1e-3


def test_negative_control_the_wrong_cp_rank() -> None:
    def swapped(cp_rank: int, cp_size: int) -> slime.Hook:
        return make_hook("sample_mean", cp_rank=1 - cp_rank, cp_size=cp_size)

    with pytest.raises(ValueError, match="per_token_loss of shape"):
        their_step(step_of(1, 1), 2, False, swapped)


# --- how mode and divisor are said


def test_hooks_load_by_path_as_their_loaders_do() -> None:
    assert load_function("megatron_rl_loss.frameworks.slime.sample_mean").mode == "sample_mean"
    assert load_function("megatron_rl_loss.frameworks.slime.token_mean").mode == "token_mean"
    hook = load_function("megatron_rl_loss.frameworks.slime.constant_40960")
    assert (hook.mode, hook.aggregation.divisor) == ("constant", 40960)
    assert load_function("megatron_rl_loss.frameworks.slime.constant_40960") is hook  # they load it every micro-batch


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("prompt_mean", "constant_1"),
        ("constant", "constant_40960"),
        ("constant_", "constant_40960"),
        ("constant_0", "constant_40960"),
        ("constant_-5", "constant_40960"),
        ("constant_4e4", "constant_40960"),
        ("sample_meen", "sample_mean, .*token_mean or .*constant_40960"),
    ],
)
def test_a_path_without_a_hook_names_the_way_out(name: str, way_out: str) -> None:
    with pytest.raises(AttributeError, match=way_out):
        load_function(f"megatron_rl_loss.frameworks.slime.{name}")


@pytest.mark.parametrize(
    ("mode", "options", "error"),
    [
        ("prompt_mean", {}, "constant_1"),
        ("dapo", {}, "Choose one of sample_mean, token_mean, constant"),
        ("constant", {}, "without a divisor"),
        ("constant", {"divisor": 0}, "above 0"),
        ("sample_mean", {"divisor": 8}, "only 'constant'"),
        ("sample_mean", {"cp_rank": 0}, "both or neither"),
        ("sample_mean", {"cp_rank": 2, "cp_size": 2}, "0 <= cp_rank < cp_size"),
    ],
)
def test_make_hook_refuses(mode: str, options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        make_hook(mode, **options)


MASKS = [torch.tensor([1, 0, 1]), torch.tensor([0, 0])]


@pytest.mark.parametrize("mode", ["sample_mean", "constant"])
def test_a_mean_over_rollouts_contradicts_per_token_loss(mode: str) -> None:
    hook = hook_of(mode, divisor=8.0 if mode == "constant" else None)(0, 1)
    with pytest.raises(ValueError, match=r"Drop --calculate-per-token-loss, or use .*token_mean"):
        hook([5, 4], [3, 2], MASKS, True)


def test_token_mean_refuses_what_it_cannot_see() -> None:
    hook = hook_of("token_mean")(0, 1)
    with pytest.raises(ValueError, match="Add --calculate-per-token-loss"):
        hook([5, 4], [3, 2], MASKS, False)
    with pytest.raises(
        ValueError, match=r"sample 1 has 0 mask tokens.*rejection \(TIS\).*slime\.count_steps.*miles\.cou"
    ):
        hook([5, 4], [3, 2], MASKS, True)
    hook([5, 4], [3, 2], [MASKS[0], MASKS[0][:2]], True)
    counted = hook_of(
        "token_mean", StepCounts(step_tokens=2.5, num_samples=2, num_masked_samples=0, global_batch_size=2)
    )
    with pytest.raises(ValueError, match=r"sample 1 has 0\.5 mask tokens.*Use masks of 0 and 1"):
        counted(0, 1)([5, 4], [3, 2], [torch.ones(3), torch.tensor([0.5, 0])], True)


def test_denominators_in_the_fourth_place_are_refused() -> None:
    """slime's own reducer has them there, miles's has the flag."""
    with pytest.raises(TypeError, match="the fourth argument must be a bool"):
        hook_of("sample_mean")(0, 1)([5, 4], [3, 2], MASKS, torch.tensor([2.0, 2.0]))  # type: ignore[arg-type]


@pytest.mark.parametrize(("sums", "error"), [([2.0], "one a sample"), ([1.0, 4.0], "all its samples' tokens")])
def test_rollout_mask_sums_are_checked(sums: list[float], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        hook_of("sample_mean")(0, 1)([5, 4], [3, 2], MASKS, False, rollout_mask_sums=sums)


@pytest.mark.parametrize(
    "counts",
    [{"num_samples": -1}, {"step_tokens": float("nan")}, {"global_batch_size": True}, {"padded_length": -8}],
)
def test_step_counts_are_checked(counts: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="finite number >= 0"):
        step_of(1, 1).counts(**counts)


# --- the defects of their reducers


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize(
    ("total_lengths", "response_lengths", "error"),
    [
        ([3, 4], [3, 2], "must leave a prompt token"),
        ([2, 4], [3, 2], "must leave a prompt token"),
        ([5, 4], [2, 2], "must have its response_length"),
        ([5, 4], [4, 2], "must have its response_length"),
        ([5], [3], "2 loss masks for 1 response_lengths"),
        ([5, 4], [3], "one of each a sample"),
    ],
    ids=[
        "no prompt",
        "response longer than all",
        "mask too long",
        "mask too short",
        "a sample missing",
        "a length missing",
    ],
)
def test_lengths_that_disagree_are_refused(
    cp: int, total_lengths: list[int], response_lengths: list[int], error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        hook_of("sample_mean")(0, cp)(total_lengths, response_lengths, MASKS, False)


def test_masked_nan_is_ignored_and_active_nan_comes_through() -> None:
    reducer = hook_of("sample_mean")(0, 1)([5, 4], [3, 2], MASKS, False)
    nan = float("nan")
    assert float(reducer(torch.tensor([1.0, nan, 3.0, nan, nan]))) == 2.0
    assert reducer(torch.tensor([nan, 0.0, 3.0, 0.0, 0.0])).isnan()


def test_half_precision_is_summed_in_float32_and_an_empty_batch_keeps_its_graph() -> None:
    mask = torch.ones(4096, dtype=torch.int32)
    reducer = hook_of("constant", divisor=1.0)(0, 1)([4097], [4096], [mask], False)
    assert float(reducer(torch.full((4096,), 1.0, dtype=torch.bfloat16))) == 4096.0
    empty = hook_of("token_mean")(0, 1)([], [], [], True)(torch.zeros(0, requires_grad=True))
    assert float(empty.detach()) == 0.0
    assert empty.requires_grad


# --- Megatron's parallel state


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Megatron's parallel state and global arguments, as rank 1 of 2 in its context-parallel group sees them."""
    from megatron.core import parallel_state
    from megatron.training import global_vars

    args = SimpleNamespace(qkv_format="thd")
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 2)
    monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda: 1)
    monkeypatch.setattr(global_vars, "get_args", lambda: args)
    return args


def test_hooks_by_path_ask_megatron_for_the_cp_place(megatron: SimpleNamespace) -> None:
    losses = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    mask = torch.ones(6, dtype=torch.int32)
    held = [at[1] for at in oracle.response_only([8], [6], [8], 1, 2) if at is not None]
    assert 0 < len(held) < 6
    hook = load_function("megatron_rl_loss.frameworks.slime.constant_2")
    assert float(hook([8], [6], [mask], False)(losses[held])) == float(losses[held].sum() / 2)


def test_bshd_rows_under_cp_are_refused(megatron: SimpleNamespace) -> None:
    megatron.qkv_format = "bshd"
    with pytest.raises(
        ValueError, match=r"--custom-megatron-init-path megatron_rl_loss\.frameworks\.miles\.count_steps"
    ):
        slime.sample_mean([5, 4], [3, 2], MASKS, False)


def test_bshd_rows_under_cp_are_cut_once_their_length_is_known(megatron: SimpleNamespace) -> None:
    megatron.qkv_format = "bshd"
    losses = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    held = [at[1] for at in oracle.response_only([8], [6], [12], 1, 2) if at is not None]
    assert held != [at[1] for at in oracle.response_only([8], [6], [8], 1, 2) if at is not None]
    step_counts.begin(step_of(1, 1).counts(padded_length=12))
    try:
        reducer = slime.constant_2([8], [6], [torch.ones(6, dtype=torch.int32)], False)
    finally:
        step_counts.begin(None)
    assert float(reducer(losses[held])) == float(losses[held].sum() / 2)


def test_without_parallel_state_the_cp_place_must_be_given() -> None:
    with pytest.raises(ValueError, match=r"make_hook\(\.\.\., cp_rank=\.\.\., cp_size=\.\.\.\)"):
        slime.sample_mean([5, 4], [3, 2], MASKS, False)


# --- count_steps and begin_step, with Megatron's groups and schedule


def rollout_data(steps: list[Rollouts], dp_rank: int) -> dict[str, Any]:
    """What slime hands a rank's postprocess hook: this DP rank's samples, and each step's micro-batches."""
    data: dict[str, Any] = {name: [] for name in ("loss_masks", "total_lengths", "losses", "micro_batch_indices")}
    for step in steps:
        for chosen in step.dealt[dp_rank]:
            begun = len(data["loss_masks"])
            data["micro_batch_indices"].append(list(range(begun, begun + len(chosen))))
            data["loss_masks"] += [step.samples[i].mask for i in chosen]
            data["total_lengths"] += [step.total_lengths[i] for i in chosen]
    return data | {
        "num_microbatches": [len(step.dealt[dp_rank]) for step in steps],
        "global_batch_sizes": [step.global_batch_size for step in steps],
    }


def steps_on_megatron(cp: int, per_token: bool) -> list[float]:
    """Worst relative gradient errors of two steps, through the real schedule, DDP and finalisation."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from table_step import relative_error, start, table_model

    state = start(cp=cp)
    dp_rank, dp_size = state.get_data_parallel_rank(), state.get_data_parallel_world_size()
    cp_rank = state.get_context_parallel_rank()
    from megatron.training import global_vars

    global_vars.get_args = lambda: SimpleNamespace(qkv_format="thd")
    steps = [step_of(11, dp_size), step_of(12, dp_size)]
    slime.count_steps(SimpleNamespace(), 7, rollout_data(steps, dp_rank))  # type: ignore[arg-type]
    errors = []
    for step_id, step in enumerate(steps):
        slime.begin_step(SimpleNamespace(), 7, step_id, None, None, None)  # type: ignore[arg-type]
        first = [0]
        for one in step.samples:
            first.append(first[-1] + len(one.mask))
        model = table_model([float(loss) for one in step.samples for loss in one.losses], per_token=per_token)

        def forward_step(
            batches: Iterator[list[int]], model: Any, step: Rollouts = step, first: list[int] = first
        ) -> Any:
            chosen = next(batches)
            masks = [step.samples[i].mask for i in chosen]
            totals, responses = [step.total_lengths[i] for i in chosen], [len(mask) for mask in masks]
            held = oracle.response_only(totals, responses, totals, cp_rank, cp)
            numbers = torch.tensor([first[chosen[at[0]]] + at[1] for at in held if at], dtype=torch.int64)

            def loss_func(losses: torch.Tensor) -> Any:
                loss = slime.token_mean(totals, responses, masks, per_token)(losses)
                num_tokens = sum((mask.sum().clamp(min=1) for mask in masks), torch.zeros((), dtype=torch.int64))
                if per_token:
                    return loss * cp, num_tokens.int(), {"loss": loss.detach()}
                scale = len(step.dealt[dp_rank]) / step.global_batch_size * (dp_size * cp)
                return loss * scale, torch.tensor(1), {"loss": loss.detach()}

            return model(numbers), loss_func

        model.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(step.dealt[dp_rank]),
            model=model,
            num_microbatches=len(step.dealt[dp_rank]),
            seq_length=8,
            micro_batch_size=1,
        )
        expected = torch.cat(oracle.step_gradient("token_mean", step.samples))
        errors.append(relative_error(model.module.losses.main_grad, expected))
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("cp", [1, 2])
def test_counted_steps_train_exactly_on_megatron(cp: int, per_token: bool) -> None:
    for errors in run_ranks(4, steps_on_megatron, cp, per_token):
        assert max(errors) < TOLERANCE


def count_a_bad_rank() -> None:
    from table_step import start

    rank = start().get_data_parallel_rank()
    data = rollout_data([step_of(11, 2)], rank)
    if rank == 1:
        data["loss_masks"][0] = -data["loss_masks"][0] - 1
    slime.count_steps(SimpleNamespace(), 0, data)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_rank_that_cannot_count_stops_all_ranks() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, count_a_bad_rank)
    assert set(caught.value.errors) == {0, 1}
    assert all("must be finite and >= 0" in text for text in caught.value.errors.values())


def test_a_step_that_was_not_counted_has_no_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = step_of(4, 1).counts()
    monkeypatch.setattr(slime, "_counted", {(7, 0): counts})
    monkeypatch.setattr(step_counts, "_this_step", None)
    no_args = SimpleNamespace()
    slime.begin_step(no_args, 7, 0, None, None, None)  # type: ignore[arg-type]
    hook = make_hook("token_mean", cp_rank=0, cp_size=1)
    hook([5, 4], [3, 2], MASKS, True)
    slime.begin_step(no_args, 7, 1, None, None, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="count_steps"):
        hook([5, 4], [3, 2], MASKS, True)


def test_counts_are_those_of_step_totals() -> None:
    """`StepCounts` by hand, as the documentation says, from the masks of a step."""
    step = step_of(4, 1)
    totals = StepTotals.from_loss_masks([one.mask for one in step.samples])
    rollouts = totals.rollouts
    assert rollouts.all is not None
    assert rollouts.active is not None
    assert step.counts().num_masked_samples == rollouts.all - rollouts.active > 0
    assert step.counts().step_tokens == totals.step_tokens
