"""The hooks of slime and miles, through *their* outer scaling, against the float64 formulas of the modes.

`their_step` states that scaling independently (slime 624b824a, miles 31f1ca96: `loss_function`; Megatron's schedule and
DDP), in float64, over all DP ranks, micro-batches and CP ranks, with one leaf per token, so that gradients are compared
token by token. Not exercised: NCCL, and slime and miles themselves (`real`, which CI skips: it has no
checkout). How steps are counted: test_step_counts.py.
"""

import functools
import importlib
import random
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from refusals import refusal_tests, refusals

from megatron_rl_loss import Mode, Samples, Sum, fold_into_advantages
from megatron_rl_loss.engines import replacing, slime
from megatron_rl_loss.engines.slime import StepCounts, make_hook

HookOfRank = Callable[[int, int], Any]


@dataclass(frozen=True)
class Case:
    """A launch, and what its step holds."""

    mode: str
    divisor: float | None = None
    per_token: bool = False
    counted: bool = False
    masked: bool = True  # some samples throughout
    split: bool = False  # rollouts, over samples
    rejected: bool = False  # some tokens, and all of a sample
    padded: int | None = None  # length of rows
    seed: int = 1


NEEDS_NO_COUNTS = {"sample_mean": Case("sample_mean"), "constant": Case("constant", 7.0)}
COUNTED = {
    "token_mean": Case("token_mean", per_token=True, counted=True),
    "token_mean, not per token": Case("token_mean", counted=True),
}
PADDED: Any = {"counted": True, "padded": 56}
CASES = {
    **(NEEDS_NO_COUNTS | COUNTED),
    "token_mean, not counted": Case("token_mean", per_token=True, masked=False),
    "constant, split": Case("constant", 7.0, counted=True, split=True),
    **{f"{name}, rejection": replace(case, rejected=True) for name, case in (NEEDS_NO_COUNTS | COUNTED).items()},
    **{f"{name}, padded": replace(case, **PADDED) for name, case in (NEEDS_NO_COUNTS | COUNTED).items()},
}


@dataclass(frozen=True)
class Step:
    samples: list[oracle.Sample]  # with masks as they are before rejection
    kept: list[torch.Tensor]  # masks after it
    total_lengths: list[int]
    dealt: list[list[list[int]]]  # [dp rank][micro-batch] -> sample numbers
    num_rollouts: int

    def counts(self, case: Case) -> StepCounts:
        return StepCounts(
            step_tokens=oracle.mask_tokens(self.samples),
            num_samples=len(self.samples),
            num_rollouts=self.num_rollouts,
            padded_length=case.padded,
        )


def step_of(case: Case, dp: int) -> Step:
    """Ragged samples, partly (and fully, if `masked`) masked, dealt unevenly: micro-batches may be empty."""
    rng = random.Random(case.seed)
    samples, kept = [], []
    for i in range(14):
        length = rng.choice([1, 2, 3, 5, 8, 13, 21])
        mask = torch.tensor([rng.choice([0, 1, 1]) for _ in range(length)], dtype=torch.int32)
        mask[0] = 1
        if case.masked and (i in (3, 8) or rng.random() < 0.1):
            mask.zero_()
        losses = torch.tensor([rng.uniform(-3, 3) for _ in range(length)], dtype=torch.float64)
        samples.append(oracle.Sample(losses, mask, f"r{i - i % 3 // 2}" if case.split else None))
        kept.append(mask.clone())
    if case.rejected:
        kept[0].zero_()
        for mask in kept[1::3]:
            mask[0] = 0
    totals = [len(sample.mask) + rng.choice([1, 2, 7, 30]) for sample in samples]
    dealt: list[list[list[int]]] = [[[] for _ in range(3)] for _ in range(dp)]
    for i in range(len(samples)):
        rng.choice(rng.choice(dealt)).append(i)
    return Step(samples, kept, totals, dealt, len({sample.rollout_id or i for i, sample in enumerate(samples)}))


def their_step(step: Step, case: Case, cp: int, hook_of: HookOfRank) -> tuple[float, torch.Tensor]:
    """Value and gradient of the step's policy loss after slime's or miles's scaling, Megatron's schedule and DDP."""
    samples, dp = step.samples, len(step.dealt)
    leaves = [
        replace(sample, mask=kept).poisoned().losses.float().requires_grad_()
        for sample, kept in zip(samples, step.kept, strict=True)
    ]
    value, num_tokens = torch.zeros((), dtype=torch.float64), 0.0
    for microbatches in step.dealt:
        for chosen in microbatches:
            responses, totals = [len(samples[i].mask) for i in chosen], [step.total_lengths[i] for i in chosen]
            for cp_rank in range(cp):
                # Every CP rank counts whole masks, of each sample at least one token unless `count_steps` is there.
                at_least = 0.0 if case.counted else 1.0
                num_tokens += sum(max(float(samples[i].mask.sum()), at_least) for i in chosen)
                with at_place(cp_rank, cp):
                    hook = hook_of(cp_rank, cp)
                    reducer = hook(totals, responses, [step.kept[i] for i in chosen], case.per_token)
                rows = totals if case.padded is None else [case.padded] * len(totals)
                held = oracle.response_only(totals, responses, rows, cp_rank, cp)
                local = [leaves[chosen[at[0]]][at[1]] for at in held if at is not None]
                loss = reducer(torch.stack(local) if local else torch.zeros(0, requires_grad=True)).double()
                if case.per_token:
                    loss = loss * cp
                else:
                    loss = loss * len(microbatches) / step.num_rollouts * (dp * cp)
                    loss = loss / len(microbatches)  # Megatron's schedule, for 1 token
                value = value + loss
    value = value / num_tokens if case.per_token else value / (dp * cp)
    gradients = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    return float(value.detach()), torch.cat([gradient.double() for gradient in gradients])


@contextmanager
def at_place(cp_rank: int, cp_size: int) -> Iterator[None]:
    """A context-parallel rank."""
    slime._place, before = lambda row_length_is_known: (cp_rank, cp_size, False), slime._place
    try:
        yield
    finally:
        slime._place = before


@contextmanager
def in_step(counts: StepCounts | None, in_loss_function: bool = True) -> Iterator[None]:
    """A step of which `count_steps` made these counts."""
    now = slime.Now(counts, (Namespace(), []) if in_loss_function else None)
    slime._now, before = lambda: now, slime._now
    try:
        yield
    finally:
        slime._now = before


def error_of(case: Case, dp: int, cp: int, hook_of: HookOfRank | None = None, **wrong: Any) -> float:
    """The worse of value's and gradient's error, relative to the oracle's size. `wrong`: counts to tell instead.

    A token mean divides by the tokens before rejection: their count of tokens is taken before, too.
    """
    step = step_of(case, dp)

    def ours(cp_rank: int, cp_size: int) -> Any:
        return make_hook(case.mode, divisor=case.divisor)

    with in_step(step.counts(case)._replace(**wrong) if case.counted else None):
        value, gradient = their_step(step, case, cp, hook_of or ours)
    left = [replace(sample, mask=kept) for sample, kept in zip(step.samples, step.kept, strict=True)]
    share = oracle.mask_tokens(left) / oracle.mask_tokens(step.samples) if case.mode == "token_mean" else 1.0
    expected = torch.cat(oracle.step_gradient(case.mode, left, case.divisor)) * share
    in_value = abs(value - float(oracle.step_loss(case.mode, left, case.divisor)) * share)
    in_gradient = float((gradient - expected).abs().max() / expected.abs().max())
    scale = oracle.step_scale(case.mode, left, case.divisor) * share
    return oracle.worst_error(in_value / scale, in_gradient, oracle.num_tokens(left))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dp", "cp"), [(2, 1), (1, 2), (2, 4)])
def test_hooks_are_exact_after_their_scaling(name: str, dp: int, cp: int) -> None:
    assert error_of(CASES[name], dp, cp) < oracle.EXACT


# --- negative controls: each plants a bug in what the test above finds sound


def their_own(size: Any, cp_rank: int, cp: int) -> Any:
    """A hook that divides the local losses of one sample at a time by a size of the local masks, as theirs do."""

    def hook(totals: list[int], responses: list[int], masks: list[torch.Tensor], per_token: bool) -> Any:
        held = [at for at in oracle.response_only(totals, responses, totals, cp_rank, cp) if at is not None]
        mine = [torch.stack([mask[t] for i, t in held if i == k] or [mask[:0].sum()]) for k, mask in enumerate(masks)]
        weights = [float(masks[i][t]) / size(mine[i]) for i, t in held]
        return lambda losses: (losses.nan_to_num() * torch.tensor(weights)).sum()

    return hook


def test_negative_control_their_own_reducers() -> None:
    """Phantom tokens in the token mean; denominators that are local under CP."""
    uncounted = replace(CASES["token_mean"], counted=False)
    assert error_of(uncounted, 2, 2, functools.partial(their_own, lambda mask: 1)) > 1e-2
    local_mean = functools.partial(their_own, lambda mask: max(float(mask.sum()), 1))
    assert error_of(CASES["sample_mean"], 2, 1, local_mean) < oracle.EXACT
    assert error_of(CASES["sample_mean"], 2, 2, local_mean) > 1e-2


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("token_mean, not per token, rejection", {"step_tokens": 55.0}),
        ("token_mean, not per token", {"num_rollouts": 13}),
    ],
)
def test_negative_control_wrong_counts(name: str, wrong: dict[str, Any]) -> None:
    assert error_of(CASES[name], 2, 2, **wrong) > 1e-3


def at_another_place(cp_rank: int, cp_size: int) -> Any:
    def hook(*arguments: Any) -> Any:
        with at_place(1 - cp_rank, cp_size):
            return slime.sample_mean(*arguments)

    return hook


def test_negative_control_wrong_places() -> None:
    """Padded rows taken for packed ones; another CP rank's place."""
    with pytest.raises(ValueError, match="per_token_loss of shape"):
        error_of(CASES["sample_mean, padded"], 1, 2, padded_length=None)
    with pytest.raises(ValueError, match="per_token_loss of shape"):
        error_of(CASES["sample_mean"], 1, 2, at_another_place)


SQUARES = Sum(of=lambda samples: samples.mask_sums**2)
BY_LENGTH = Mode(name="by_length", function=lambda step: step.tokens("sample") / step.sum("all"), sums={"all": SQUARES})


def test_a_mode_over_its_own_sums_by_way_of_folded_advantages() -> None:
    """Losses proportional to the advantage, by two samples: the way out of slime's refusal."""
    masks = torch.tensor([[1.0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 1]])
    advantages, size = [1.5, -1.0, 2.0, 0.5], len(masks)
    folded = torch.stack(fold_into_advantages(advantages, list(masks), mode=BY_LENGTH))
    losses = torch.linspace(0.1, 2.0, masks.numel()).double().view_as(masks)
    plain = losses * torch.tensor(advantages)[:, None]
    lengths = masks.double().sum(1, keepdim=True)
    expected = float((plain * masks * lengths).sum() / lengths.square().sum())
    constant_1, results = make_hook("constant", divisor=1), 0.0
    for part in (slice(0, 2), slice(2, 4)):
        weighted = losses[part] * folded[part]
        with at_place(0, 1):
            reducer = constant_1([6, 6], [4, 4], list(masks[part]), False)
        results += float(reducer(weighted.flatten() * size)) / size
    assert abs(results / expected - 1) <= oracle.sum_error(masks.numel()) * 8


MASKS = [torch.tensor([1, 0, 1]), torch.tensor([0, 0])]

# --- how mode and divisor are said


def load_function(path: str) -> Any:
    """Split at the last dot, import, getattr, as both loaders do."""
    module_path, _, attribute = path.rpartition(".")
    return getattr(importlib.import_module(module_path), attribute)


FRACTIONS = [torch.tensor([1.0, 0, 0.5]), torch.zeros(2), torch.tensor([1.0, 1])]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (None, [2 / 3, 0, 1 / 3, 0, 0, 0.5, 0.5]),
        ([3, 0, 4], [1 / 3, 0, 1 / 6, 0, 0, 0.25, 0.25]),
    ],
)
def test_weights_inside_a_unit(sizes: Any, expected: list[float]) -> None:
    weights = slime.unit_weights(Samples(FRACTIONS).local(0, 1), sizes)
    assert weights.tolist() == pytest.approx(expected, rel=oracle.EXACT)


def test_hooks_load_by_path_as_their_loaders_do() -> None:
    for name, said in (("sample_mean", "sample_mean"), ("constant_40960", "constant 40960")):
        hook = load_function(f"megatron_rl_loss.engines.slime.{name}")
        assert str(hook) == said
        assert load_function(f"megatron_rl_loss.engines.slime.{name}") is hook  # they load it every micro-batch


@pytest.mark.parametrize(
    ("name", "way_out"),
    [("prompt_mean", "constant_1"), ("sample_meen", "sample_mean, .*token_mean and .*constant_40960")]
    + [(f"constant{end}", "constant_40960") for end in ("", "_", "_0", "_-5", "_4e4")],
)
def test_a_path_without_a_hook_names_the_way_out(name: str, way_out: str) -> None:
    with pytest.raises(AttributeError, match=way_out):
        load_function(f"megatron_rl_loss.engines.slime.{name}")


SOUND: Any = {"mode": "sample_mean"}
test_make_hook_refuses = refusal_tests(
    refusals(
        make_hook,
        ({"mode": "prompt_mean"}, "constant_1", {"mode": "token_mean"}),
        ({"mode": "dapo"}, "hook for dapo: the hooks are ...slime.sample_mean, ...slime.token_mean and", SOUND),
        ({"mode": "constant"}, "without a divisor", {"mode": "constant", "divisor": 8}),
        ({"mode": "constant", "divisor": 0}, "between 1e-30", {"mode": "constant", "divisor": 8}),
        (SOUND | {"divisor": 8}, "Drop the divisor", SOUND),
        ({"mode": BY_LENGTH}, "hook for by_length: .*constant_1", SOUND),
    )
)


# --- what a hook refuses

FULL = [MASKS[0], MASKS[0][:2]]
COUNTS: dict[str, Any] = {"step_tokens": 4.5, "num_samples": 2, "num_rollouts": 2}


def call(
    mode: str, masks: Any = MASKS, per_token: Any = False, *, totals: Any = (5, 4), responses: Any = (3, 2),
    counts: dict[str, Any] | None = None, in_loss_function: bool = True,
) -> Any:  # fmt: skip
    hook = make_hook(mode, divisor=oracle.divisor_of(mode, 8.0))
    with in_step(None if counts is None else StepCounts(**counts), in_loss_function), at_place(0, 1):
        return hook(list(totals), list(responses), masks, per_token)


CONSTANT, SAMPLE_MEAN, TOKEN_MEAN = (dict[str, Any](mode=mode) for mode in ("constant", "sample_mean", "token_mean"))
PER_TOKEN = TOKEN_MEAN | {"per_token": True}
COUNTED = PER_TOKEN | {"counts": COUNTS}
FULL_STEP, FRACTION = PER_TOKEN | {"masks": FULL}, [torch.ones(3), torch.tensor([0.5, 0])]
test_refused = refusal_tests(
    {
        **refusals(
            call,
            (CONSTANT | {"per_token": True}, r"Drop --calculate-per-token-loss, or use .*token_mean", CONSTANT),
            (TOKEN_MEAN, "Add --calculate-per-token-loss", FULL_STEP),
            (PER_TOKEN, r"sample 1 has 0 mask tokens.*rejection \(TIS\).*slime\.count_steps", FULL_STEP),
            (PER_TOKEN, r"sample 1 has 0 mask tokens", COUNTED),
            (COUNTED | {"in_loss_function": False}, "called outside of slime's loss_function", COUNTED),
            (PER_TOKEN | {"masks": FRACTION}, r"sample 1 has 0\.5 mask tokens", FULL_STEP),
            (SAMPLE_MEAN | {"counts": COUNTS | {"num_samples": 3}}, "Run without the hook", SAMPLE_MEAN),
            (SAMPLE_MEAN | {"totals": [3, 4]}, "leave a prompt token", SAMPLE_MEAN),
        ),
        **refusals(  # slime's own reducer has denominators in the fourth place, miles's has the flag
            call,
            (SAMPLE_MEAN | {"per_token": torch.ones(2)}, "the fourth argument must be a bool", SAMPLE_MEAN),
            error=TypeError,
        ),
    }
)


# --- Megatron's parallel state and args


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Megatron's global arguments; its parallel state is that of rank 1 of 2 in a context-parallel group."""
    from megatron.core import parallel_state
    from megatron.training import global_vars

    args = SimpleNamespace(qkv_format="thd")
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 2)
    monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda: 1)
    monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda with_context_parallel: 0)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
    return args


def test_hooks_by_path_ask_megatron_for_the_cp_place_and_the_step(args: SimpleNamespace) -> None:
    losses, mask = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0]), torch.ones(6, dtype=torch.int32)
    hook = load_function("megatron_rl_loss.engines.slime.constant_2")

    def assert_sums(row: int) -> None:
        held = [at[1] for at in oracle.response_only([8], [6], [row], 1, 2) if at is not None]
        assert 0 < len(held) < 6
        assert float(hook([8], [6], [mask], False)(losses[held])) == float(losses[held].sum() / 2)

    assert_sums(8)
    args.qkv_format = "bshd"
    with pytest.raises(ValueError, match=r"-init-path megatron_rl_loss\.engines\.slime\.count_steps"):
        hook([8], [6], [mask], False)
    with in_step(StepCounts(**COUNTS, padded_length=12)):
        assert_sums(12)


def test_the_first_call_says_what_is_active(
    args: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, on one of the ranks that have a loss, which need not be the first of all."""
    monkeypatch.setattr(replacing, "_REGISTRY", {})
    constant = load_function("megatron_rl_loss.engines.slime.constant_8")
    token_mean = load_function("megatron_rl_loss.engines.slime.token_mean")
    for _ in range(2):
        constant([5, 4], [3, 2], MASKS, False)
    token_mean([5, 4], [3, 2], FULL, True)
    lines = [
        "slime: policy loss by constant 8; KL and entropy keep slime's own sample mean",
        "slime: policy loss by token_mean; KL and entropy keep slime's own token mean",
    ]
    assert replacing.active() == lines
    assert capsys.readouterr().out == "".join(
        f"megatron_rl_loss in {line.replace(':', ' worker 0:', 1)}\n" for line in lines
    )
    from megatron.core import parallel_state

    monkeypatch.setattr(replacing, "_REGISTRY", {})
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 1)
    constant([5, 4], [3, 2], MASKS, False)
    assert (replacing.active(), capsys.readouterr().out) == (lines[:1], "")


def test_a_hook_needs_megatrons_parallel_state() -> None:
    with pytest.raises(ValueError, match="no parallel state in Megatron"):
        slime.sample_mean([5, 4], [3, 2], MASKS, False)
