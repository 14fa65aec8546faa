"""Factors of engines that train on a token mean, as the adapters of AReaL and ms-swift use them; see `real` too."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from peer_steps import later_tokens_more
from torch import Tensor

from megatron_rl_loss import Samples, weights_column
from megatron_rl_loss.frameworks import areal, ms_swift
from megatron_rl_loss.frameworks.columns import check_even, check_text, prompts_of, token_mean_factors
from megatron_rl_loss.modes.loss_modes import LossModes
from megatron_rl_loss.modes.papers import vl_norm

MASKS = [[0, 0, 1, 1, 1], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 0, 1], [0, 0, 0, 0, 0]]
PROMPTS = [5, 5, 6, 6, 7]


def expected(mode: str, masks: list[Tensor], prompts: list[Any]) -> list[Tensor]:
    samples = [
        oracle.Sample(torch.zeros(len(mask)).double(), mask, None, prompt)
        for mask, prompt in zip(masks, prompts, strict=True)
    ]
    tokens = oracle.mask_tokens(samples)
    return [weights * tokens for weights in oracle.step_gradient(mode, samples)]


@pytest.mark.parametrize("mode", ["sample_mean", "prompt_mean", "token_mean", vl_norm])
def test_factors_are_weights_times_the_tokens(mode: Any) -> None:
    """Of a mode over sums of the step too."""
    masks, divisor = [torch.tensor(mask).float() for mask in MASKS], 4 if mode is vl_norm else None
    if divisor is None:
        right = torch.cat(expected(mode, masks, PROMPTS))
    else:
        right = torch.cat(weights_column(mode, masks, divisor=divisor)).double() * 8
    modes = LossModes.resolve(mode, divisor=divisor)
    (factors,), tokens = token_mean_factors(modes, lambda: [Samples(masks, prompt_ids=PROMPTS)], dp_group=None)
    assert tokens == 8
    torch.testing.assert_close(factors.double(), right, rtol=oracle.EXACT, atol=0)


def test_prompts_are_the_tokens_before_the_first_that_is_trained() -> None:
    ids, trained = [[1, 2, 3], [1, 2, 4], [1, 3, 3], [1, 2]], [[False, False, True]] * 3 + [[False, False]]
    first, second, third, masked = prompts_of(ids, trained)
    assert first == second == masked != third


def test_what_is_refused_of_factors_and_prompts() -> None:
    mask = torch.tensor([1.0, 0, 1])
    check_even([torch.tensor([0.5, 0, 0.5]), torch.zeros(0)], [mask, torch.zeros(0)], "Mend it")
    with pytest.raises(ValueError, match=r"one factor must do for a sample\. Mend it, or"):
        check_even([torch.tensor([0.5, 0, 0.4])], [mask], "Mend it")
    check_text(LossModes.resolve("sample_mean"), has_media=True)
    check_text(LossModes.resolve("prompt_mean"), has_media=False)
    with pytest.raises(ValueError, match="prompts with images or other media"):
        check_text(LossModes.resolve("prompt_mean"), has_media=True)


# ---- AReaL


class Actor:
    config: Any = SimpleNamespace(importance_sampling_level="token")
    data_parallel_group = None

    def train_batch(self, input_: Any, loss_fn: Any) -> Any:
        return input_


def rows() -> dict[str, Tensor]:
    """Masks are those of the next token."""
    ids = torch.tensor([[1, prompt, *range(3)] for prompt in PROMPTS])
    return {
        "input_ids": ids,
        "loss_mask": torch.tensor(MASKS).roll(-1, 1),
        "advantages": torch.arange(25.0).view(5, 5),
    }


@pytest.mark.parametrize("cut", [None, 2])
def test_areal_trains_on_weighted_advantages(cut: int | None) -> None:
    actor_class: Any = type("Mine", (Actor,), {})
    areal.aggregate(actor_class, "prompt_mean")
    given = rows()
    parts = {name: list(values.split([2, 3])) for name, values in given.items()}
    listed = [{name: values[i] for name, values in parts.items()} for i in range(2)]
    found = actor_class().train_batch(given if cut is None else listed, loss_fn=None)
    advantages = torch.cat([part["advantages"] for part in ([found] if cut is None else found)])
    assert given["advantages"].equal(rows()["advantages"])
    prompts = [*PROMPTS[:4], "alone"]
    factors = torch.stack(expected("prompt_mean", list(given["loss_mask"].float()), prompts))
    torch.testing.assert_close(advantages.double(), factors * given["advantages"], rtol=oracle.EXACT, atol=0)


def test_areal_where_it_could_not_be_exact() -> None:
    of_sequences = SimpleNamespace(importance_sampling_level="sequence")
    for mode, config, text in [
        (later_tokens_more, of_sequences, "Set importance_sampling_level=token"),
        ("token_mean", SimpleNamespace(m2_threshold=0.1), "m2_threshold beside a loss aggregation"),
    ]:
        actor_class: Any = type("Mine", (Actor,), {"config": config})
        areal.aggregate(actor_class, mode)
        with pytest.raises(ValueError, match=text):
            actor_class().train_batch(rows(), loss_fn=None)
        with pytest.raises(ValueError, match="its weights would count twice"):
            areal.aggregate(type("Mine", (actor_class,), {}), mode)
    with pytest.raises(ValueError, match="Did you mean prompt_mean"):
        areal.aggregate(Actor, "prompt_meen")


@pytest.mark.parametrize(("module", "reached"), [("areal.engine.megatron_engine", False), ("my_actor", True)])
def test_areal_workers_that_import_another_class(module: str, reached: bool) -> None:
    actor_class: Any = type("Mine", (Actor,), {"__module__": module, "as_controller": lambda config, scheduler: "made"})
    areal.aggregate(actor_class, "prompt_mean")
    if reached:
        assert actor_class.as_controller(None, None) == "made"
    else:
        with pytest.raises(ValueError, match="its workers import that class anew, without the aggregation"):
            actor_class.as_controller(None, None)


# ---- ms-swift


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As much of `swift.megatron.trainers.grpo_trainer`, and of Megatron's parallel state, as is asked for."""

    class MegatronGRPOTrainer:
        loss_type, args = "dapo", SimpleNamespace(overlong_filter=True)

        def _on_train_step_batch(self, microbatches: Any) -> None: ...

        def loss_func(self, loss: Any) -> Any:
            return loss

    def collate(samples: Any) -> Any:
        masks = torch.tensor([one.mask for one in samples]).bool()
        return {}, SimpleNamespace(
            completion_mask=masks, advantages=torch.ones(masks.shape),
            truncated_mask=torch.tensor([one.truncated for one in samples]),
        )  # fmt: skip

    module: Any = ModuleType("swift.megatron.trainers.grpo_trainer")
    module.MegatronGRPOTrainer, module.collate_to_grpo_micro_batch = MegatronGRPOTrainer, collate
    state: Any = SimpleNamespace(get_data_parallel_group=lambda: None, get_data_parallel_world_size=lambda: 1)
    for name in ("swift", "swift.megatron", "swift.megatron.trainers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    sys.modules["swift.megatron.trainers"].grpo_trainer = module  # type: ignore[attr-defined]
    sys.modules["megatron.core"].mpu = state  # type: ignore[attr-defined]
    return module


def step(trainers: Any) -> list[dict[str, Any]]:
    samples = [
        SimpleNamespace(
            encoded={"input_ids": [prompt, 1, 0, 1, 2], "labels": [1 if on else -100 for on in mask]},
            mask=mask, truncated=i == 3,
        )
        for i, (mask, prompt) in enumerate(zip(MASKS, PROMPTS, strict=True))
    ]  # fmt: skip
    return [{"grpo_batch": trainers.collate_to_grpo_micro_batch(part)[1]} for part in (samples[:2], samples[2:])]


def undoing_loss_func(self: Any, loss: Any) -> Any:
    return loss * self.args.num_microbatches


@pytest.mark.parametrize("undoes_mean", [False, True])
def test_ms_swift_trains_on_weighted_advantages(undoes_mean: bool, trainers: Any) -> None:
    if undoes_mean:  # as 4.6.0 does
        trainers.MegatronGRPOTrainer.loss_func = undoing_loss_func
    ms_swift.aggregate("prompt_mean")
    microbatches = step(trainers)
    trainers.MegatronGRPOTrainer()._on_train_step_batch(microbatches)
    masks = [torch.tensor(mask).float() * (i != 3) for i, mask in enumerate(MASKS)]
    found = [row for one in microbatches for row in one["grpo_batch"].advantages]
    for row, factors in zip(found, expected("prompt_mean", masks, [*PROMPTS[:4], "alone"]), strict=True):
        torch.testing.assert_close(row.double(), factors, rtol=oracle.EXACT, atol=0)
    assert [float(one["grpo_batch"].num_items_in_batch) for one in microbatches] == [6 if undoes_mean else 6 / 2] * 2


def test_ms_swift_where_it_could_not_be_exact(trainers: Any) -> None:
    ms_swift.aggregate("token_mean")
    trainer = trainers.MegatronGRPOTrainer()
    microbatches = step(trainers)
    for one in microbatches:
        one["grpo_batch"].completion_mask[:] = False
    microbatches[0]["grpo_batch"].completion_mask[0, 2] = True
    with pytest.raises(ValueError, match="1 tokens in 2 parts of the step"):
        trainer._on_train_step_batch(microbatches)
    with pytest.raises(ValueError, match="its weights would count twice"):
        ms_swift.aggregate("token_mean")
    trainer.loss_type = "grpo"
    with pytest.raises(ValueError, match="--loss_type grpo beside a loss aggregation"):
        trainer._on_train_step_batch(step(trainers))
