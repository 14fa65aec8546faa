"""Weights as factors of advantages and as columns: AReaL, ms-swift, NeMo-RL and SkyRL; see `real` too."""

import pickle
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from peer_steps import later_tokens_more
from torch import Tensor

from megatron_rl_loss import Mode, Samples, Sum, weights_column
from megatron_rl_loss.frameworks import areal, ms_swift, nemo_rl
from megatron_rl_loss.frameworks.columns import check_even, check_text, prompts_of, token_mean_factors
from megatron_rl_loss.frameworks.skyrl import AggregatedPolicyLoss
from megatron_rl_loss.modes.loss_modes import LossModes

BY_LENGTH = Mode(
    name="by_length",
    function=lambda step: step.tokens("sample") / step.sum("all"),
    sums={"all": Sum(of=lambda samples: samples.mask_sums**2)},
)
MASKS = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 0, 1], [0, 0, 0, 0, 0]])
PROMPTS: list[Any] = [5, 5, 6, 6, 7]
ALONE = [*PROMPTS[:4], "alone"]  # without a token that is trained on, the whole row is the prompt


def expected(mode: str, masks: Any, prompts: list[Any], units: str = "all") -> Tensor:
    """The weights, [rows, tokens]."""
    samples = [
        oracle.Sample(mask.double(), mask.float(), None, prompt) for mask, prompt in zip(masks, prompts, strict=True)
    ]
    return torch.stack(oracle.step_gradient(mode, samples, None, units))


def assert_close(found: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(found.double(), right, rtol=oracle.EXACT, atol=0)


@pytest.mark.parametrize("mode", ["sample_mean", "prompt_mean", "token_mean", BY_LENGTH])
def test_factors_are_weights_times_the_tokens(mode: Any) -> None:
    """For a mode over sums of the step too."""
    masks = list(MASKS.float())
    (factors,), tokens = token_mean_factors(
        LossModes.resolve(mode), lambda: [Samples(masks, prompt_ids=PROMPTS)], dp_group=None
    )
    assert tokens == 8
    right = torch.stack(weights_column(mode, masks)) if mode is BY_LENGTH else expected(mode, MASKS, PROMPTS)
    assert_close(factors, 8 * right.double().flatten())


def test_modes_travel_to_workers() -> None:
    """A mode that is named and one of the engine's own process are the same there."""
    modes = LossModes.resolve("prompt_mean", terms={"kl": "token_mean", "mtp": Mode(name="ones", function=len)})
    sent = pickle.loads(pickle.dumps(modes))
    assert sent == modes
    assert sent.policy.mode is modes.policy.mode


def test_prompts_are_the_tokens_before_the_first_that_is_trained() -> None:
    ids, trained = [[1, 2, 3], [1, 2, 4], [1, 3, 3], [1, 2]], [[False, False, True]] * 3 + [[False, False]]
    first, second, third, masked = prompts_of(ids, trained)
    assert first == second == masked != third


def test_what_is_refused_of_factors_and_prompts() -> None:
    mask = torch.tensor([1.0, 0, 1])
    check_even([torch.tensor([0.5, 0, 0.5]), torch.zeros(0)], [mask, torch.zeros(0)], "Mend it")
    with pytest.raises(ValueError, match=r"one factor must do for a sample\. Mend it, or"):
        check_even([torch.tensor([0.5, 0, 0.4])], [mask], "Mend it")
    samples = [Samples([[1]], prompt_ids=["p"])]
    check_text(LossModes.resolve("sample_mean"), samples, has_media=True)
    check_text(LossModes.resolve("prompt_mean"), samples, has_media=False)
    with pytest.raises(ValueError, match="prompts with images or other media"):
        check_text(LossModes.resolve("prompt_mean"), samples, has_media=True)


# ---- AReaL


class Actor:
    config: Any = SimpleNamespace(importance_sampling_level="token")
    data_parallel_group = None

    def train_batch(self, input_: Any, loss_fn: Any) -> Any:
        return input_


def rows() -> dict[str, Tensor]:
    """Masks are those of the next token."""
    ids = torch.tensor([[1, prompt, *range(3)] for prompt in PROMPTS])
    return {"input_ids": ids, "loss_mask": MASKS.roll(-1, 1), "advantages": torch.arange(25.0).view(5, 5)}


@pytest.mark.parametrize("cut", [None, 2])
def test_areal_trains_on_weighted_advantages(cut: int | None) -> None:
    actor_class: Any = type("Mine", (Actor,), {})
    areal.aggregate(actor_class, "prompt_mean")
    given = rows()
    listed = [{name: values.split([2, 3])[i] for name, values in given.items()} for i in range(2)]
    found = actor_class().train_batch(given if cut is None else listed, loss_fn=None)
    advantages = torch.cat([part["advantages"] for part in ([found] if cut is None else found)])
    assert given["advantages"].equal(rows()["advantages"])
    assert_close(advantages, 8 * expected("prompt_mean", given["loss_mask"], ALONE) * given["advantages"])


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
    for module in ("my_actor", "areal.engine.megatron_engine"):
        made = {"__module__": module, "as_controller": lambda config, scheduler: "made"}
        actor_class = type("Mine", (Actor,), made)
        areal.aggregate(actor_class, "prompt_mean")
        if module == "my_actor":
            assert actor_class.as_controller(None, None) == "made"
            continue
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
        masks = torch.stack([one.mask for one in samples]).bool()
        truncated = torch.tensor([one.truncated for one in samples])
        advantages = torch.ones(masks.shape)
        return {}, SimpleNamespace(completion_mask=masks, advantages=advantages, truncated_mask=truncated)

    module: Any = ModuleType("swift.megatron.trainers.grpo_trainer")
    module.MegatronGRPOTrainer, module.collate_to_grpo_micro_batch = MegatronGRPOTrainer, collate
    state: Any = SimpleNamespace(get_data_parallel_group=lambda: None, get_data_parallel_world_size=lambda: 1)
    for name in ("swift", "swift.megatron", "swift.megatron.trainers", "megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    sys.modules["swift.megatron.trainers"].grpo_trainer = module  # type: ignore[attr-defined]
    sys.modules["megatron.core"].mpu = state  # type: ignore[attr-defined]
    return module


def step(trainers: Any) -> list[dict[str, Any]]:
    samples = []
    for i, (mask, prompt) in enumerate(zip(MASKS, PROMPTS, strict=True)):
        encoded = {"input_ids": [prompt, 1, 0, 1, 2], "labels": [1 if on else -100 for on in mask]}
        samples.append(SimpleNamespace(encoded=encoded, mask=mask, truncated=i == 3))
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
    masks = MASKS * torch.tensor([1, 1, 1, 0, 1])[:, None]
    found = torch.cat([one["grpo_batch"].advantages for one in microbatches])
    assert_close(found, 6 * expected("prompt_mean", masks, ALONE))
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


# ---- NeMo-RL: the columns that a driver sends, and the loss that goes to its workers

VALID = torch.tensor([1.0, 1, 1, 0])


class Kind:
    def __init__(self, value: str) -> None:
        self.value = value


class Loss:
    """As much of a `ClippedPGLossFn` as is asked for here."""

    positive_example_nll_weight, reference_policy_kl_penalty, metric_normalizations = 0.0, 0.1, {"loss": "tokens"}

    def __init__(self, kind: str = "token_level") -> None:
        self.loss_type = Kind(kind)


def policy() -> Any:
    return SimpleNamespace(
        cfg={"train_global_batch_size": 4}, train=lambda data, loss_fn, eval_mode=False, gbs=None: data
    )


def batch() -> dict[str, Tensor]:
    return {"input_ids": rows()["input_ids"][1:], "token_mask": MASKS[1:].float(), "sample_mask": VALID.clone()}


@pytest.mark.parametrize("steps", [1, 2])
def test_columns_are_weights_times_the_count_that_they_are_divided_by(steps: int) -> None:
    driver, given = policy(), batch()
    loss = nemo_rl.aggregate(driver, Loss(), "prompt_mean", kl="sample_mean", units="active")
    found = driver.train(given, loss, gbs=4 // steps)
    assert "loss_weights_of_policy" not in given
    for begin in range(0, 4, 4 // steps):
        rows = slice(begin, begin + 4 // steps)
        masks = (given["token_mask"] * given["sample_mask"][:, None])[rows, 1:]
        for name, mode, units in (("policy", "prompt_mean", "active"), ("kl", "sample_mean", "all")):
            column = found[f"loss_weights_of_{name}"][rows]
            assert not column[:, 0].any()
            assert_close(column[:, 1:], expected(mode, masks, ALONE[1:][rows], units) * masks.sum())


def test_losses_of_samples_get_one_weight_each() -> None:
    driver = policy()
    loss = nemo_rl.aggregate(driver, Loss("sequence_level"), "token_mean")
    column = driver.train(batch(), loss_fn=loss)["loss_weights_of_policy"]
    torch.testing.assert_close(column, 3 * torch.tensor([1.0, 2, 2, 0]) / 5)
    uneven = nemo_rl.aggregate(driver, Loss("sequence_level"), later_tokens_more)
    with pytest.raises(ValueError, match="Set token_level_loss=true"):
        driver.train(batch(), uneven)


def test_other_losses_go_by_and_the_loss_travels() -> None:
    driver, given = policy(), batch()
    loss: Any = nemo_rl.aggregate(driver, Loss(), "token_mean")
    assert driver.train(given, Loss()) is given
    sent = pickle.loads(pickle.dumps(loss))
    assert (sent.metric_normalizations, sent.loss_type.value) == ({"loss": "tokens"}, "token_level")
    loss = Loss()
    loss.positive_example_nll_weight = 0.5
    with pytest.raises(ValueError, match="grpo_train passes no rewards"):
        nemo_rl.aggregate(driver, loss, "token_mean")


# ---- SkyRL: what its policy loss refuses


def test_skyrl_where_it_could_not_be_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mini-batch that no Megatron worker weighs; another SkyRL."""
    below = "skyrl.backends.skyrl_train"
    names = ["skyrl", "skyrl.backends", below, f"{below}.utils", f"{below}.utils.ppo_utils"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    registry = SimpleNamespace(get=lambda name: lambda *_, **__: name)
    sys.modules[names[-1]].PolicyLossRegistry = registry  # type: ignore[attr-defined]
    loss, ones = AggregatedPolicyLoss("regular", "token_mean"), torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"a mini-batch without weights.*trainer.strategy=megatron"):
        loss(ones, ones, ones, SimpleNamespace(), loss_mask=ones)
    worker: Any = SimpleNamespace(masked_mean=lambda values, weights: values, MegatronModelWrapper=None)
    monkeypatch.setitem(sys.modules, f"{below}.workers.megatron.megatron_model_wrapper", worker)
    with pytest.raises(ValueError, match=r"a SkyRL without masked_mean\(dim, mask, tensor\).*Use a9564572"):
        AggregatedPolicyLoss("regular", "token_mean")
    with pytest.raises(ValueError, match="divisor"):
        AggregatedPolicyLoss("regular", "constant")
