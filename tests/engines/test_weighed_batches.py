"""Weights as factors of advantages and as columns: AReaL, ms-swift, NeMo-RL and SkyRL, by code of their shape.

Their own code runs in `real`, where there is a checkout; CI has none, and skips it.
"""

import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from peer_steps import later_tokens_more
from replacements import in_few_modules, undone
from torch import Tensor

from megatron_rl_loss import Mode, Samples, Sum, weights_column
from megatron_rl_loss.core.aggregation import LossModes
from megatron_rl_loss.core.taps import Taps, observe
from megatron_rl_loss.engines import ms_swift, nemo_rl, replacing, weighed_batches
from megatron_rl_loss.engines.prompt_tokens import MEDIA, prompt_texts
from megatron_rl_loss.engines.skyrl import AggregatedPolicyLoss
from megatron_rl_loss.engines.skyrl_trainer import Division
from megatron_rl_loss.engines.token_mean import ENGINES, aggregate
from megatron_rl_loss.engines.weighed_batches import advantage_factors, check_even, described_samples

BY_LENGTH = Mode(
    name="by_length",
    function=lambda step: step.tokens("sample") / step.sum("all"),
    sums={"all": Sum(of=lambda samples: samples.mask_sums**2)},
)
MASKS = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 0, 1], [0, 0, 0, 0, 0]])
PROMPTS: list[Any] = [5, 5, 6, 6, 7]


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    with in_few_modules(), undone():
        yield


def expected(mode: str, masks: Any, prompts: list[Any], units: str = "all", divisor: float | None = None) -> Tensor:
    """The weights, [rows, tokens]."""
    samples = [
        oracle.Sample(mask.double(), mask.float(), None, prompt) for mask, prompt in zip(masks, prompts, strict=True)
    ]
    return torch.stack(oracle.step_gradient(mode, samples, divisor, units))


def assert_close(actual: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(actual.double(), right, rtol=oracle.EXACT, atol=0)


@pytest.mark.parametrize("mode", ["sample_mean", "prompt_mean", "token_mean", BY_LENGTH])
def test_factors_are_weights_times_the_tokens(mode: Any) -> None:
    """A mode over sums of the step is among them."""
    masks = list(MASKS.float())
    (factors,), tokens = advantage_factors(
        LossModes.resolve(mode), lambda: [Samples(masks, prompt_ids=PROMPTS)], dp_group=None, uneven="",
        divisor=lambda totals: totals.step_active_tokens,
    )  # fmt: skip
    assert tokens == 8
    right = torch.stack(weights_column(mode, masks)) if mode is BY_LENGTH else expected(mode, MASKS, PROMPTS)
    assert_close(factors, 8 * right.double().flatten())


def num_samples(step: Any) -> Any:
    return len(step)


def test_modes_travel_to_workers() -> None:
    """A mode that is named and one of the engine's own process are the same there."""
    modes = LossModes.resolve("prompt_mean", terms={"kl": "token_mean", "mtp": Mode(name="ones", function=num_samples)})
    sent = pickle.loads(pickle.dumps(modes))
    assert sent == modes
    assert sent.policy.mode is modes.policy.mode


def test_prompts_are_the_tokens_of_their_mask() -> None:
    ids = torch.tensor([[0, 1, 2, 3], [1, 2, 4, 0], [1, 3, 3, 0]])
    first, second, third = prompt_texts(ids, torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0], [1, 1, 0, 0]]))
    assert first == second != third


def test_what_is_refused_of_factors_and_prompts() -> None:
    mask = torch.tensor([1.0, 0, 1])
    check_even(torch.tensor([0.5, 0, 0.5]), Samples([mask, torch.zeros(0)]), "Fix it")
    with pytest.raises(ValueError, match=r"all tokens of a sample must have one weight\. Fix it, or"):
        check_even(torch.tensor([0.5, 0, 0.4]), Samples([mask]), "Fix it")
    described_samples(LossModes.resolve("sample_mean"), [[[1]]], [MEDIA])
    described_samples(LossModes.resolve("prompt_mean"), [[[1]]], [["p"]])
    with pytest.raises(ValueError, match="prompts with images or other media"):
        described_samples(LossModes.resolve("prompt_mean"), [[[1]]], [MEDIA])


# ---- AReaL


class Actor:
    __module__ = "areal.engine.megatron_engine"
    config: Any = SimpleNamespace(importance_sampling_level="token", m2_threshold=None)
    data_parallel_group = SimpleNamespace(rank=lambda: 1, size=lambda: 1)

    def ppo_update(self, *args: Any) -> Any:
        (groups,) = args
        self.batch = {name: torch.cat([group[name] for group in groups]) for name in groups[0]}
        advantages = self.batch["advantages"]
        trained = self.train_batch(self.batch, lambda: None, lambda: None)
        assert self.batch["advantages"] is advantages
        return trained

    def train_batch(self, input_: Any, loss_fn: Any, loss_weight_fn: Any) -> Any:
        return input_["advantages"]


def actors(**config: Any) -> Any:
    changed = SimpleNamespace(**vars(Actor.config) | config)
    return type("Mine", (Actor,), {"__module__": "my_actor", "config": changed})


def groups() -> list[dict[str, Tensor]]:
    """Masks are those of the next token."""
    rows = {"loss_mask": MASKS.roll(-1, 1), "advantages": torch.arange(25.0).view(5, 5)}
    rows["input_ids"] = torch.ones(5, 5, dtype=torch.int64)
    cut = {name: values.split([2, 2, 1]) for name, values in rows.items()}
    return [{name: values[i] for name, values in cut.items()} for i in range(3)]


def test_areal_trains_on_weighted_advantages(capsys: Any) -> None:
    """The engine has no schedule of Megatron, and the adapter prints NOT PROVED."""
    actor_class = actors()
    aggregate(actor_class, "prompt_mean")
    weighed = actor_class().ppo_update(groups())
    columns = {name: torch.cat([group[name] for group in groups()]) for name in ("loss_mask", "advantages")}
    assert_close(weighed, 8 * expected("prompt_mean", columns["loss_mask"], PROMPTS) * columns["advantages"])
    assert "NOT PROVED" in capsys.readouterr().out


def test_areal_where_it_could_not_be_exact() -> None:
    rows: list[tuple[Any, dict[str, Any], str]] = [
        (later_tokens_more, {"importance_sampling_level": "sequence"}, "Set importance_sampling_level=token"),
        ("token_mean", {"m2_threshold": 0.1}, "m2_threshold with a loss aggregation"),
    ]
    for mode, changed, text in rows:
        actor_class = actors(**changed)
        aggregate(actor_class, mode)
        with pytest.raises(ValueError, match=text):
            actor_class().ppo_update(groups())
        with pytest.raises(ValueError, match="a second one would apply or measure weights twice"):
            aggregate(type("Further", (actor_class,), {}), mode)
    actor_class = actors()
    aggregate(actor_class, "prompt_mean")
    with pytest.raises(ValueError, match=r"prompt_mean.*, for a step outside of ppo_update: "):
        actor_class().train_batch(groups()[0], None, None)
    with pytest.raises(ValueError, match="Did you mean prompt_mean"):
        aggregate(actors(), "prompt_meen")
    for other in (SimpleNamespace, "MegatronPPOActor"):
        with pytest.raises(ValueError, match="must be a class of areal, roll, rlinf"):
            aggregate(other, "prompt_mean")
    with pytest.raises(ValueError, match="group_size is '4': it must be an int >= 1"):
        aggregate(actors(), "prompt_mean", group_size="4")  # type: ignore[arg-type]


@pytest.mark.parametrize("is_packed", [False, True])
def test_prompts_of_areal_are_the_tokens_before_the_first_trained_one(is_packed: bool) -> None:
    """A row that is masked throughout has no such token, and stands for itself."""
    columns = {"input_ids": torch.arange(25).view(5, 5), "loss_mask": MASKS.roll(-1, 1)}
    if is_packed:
        columns = {name: values.flatten() for name, values in columns.items()}
        columns["cu_seqlens"] = torch.arange(0, 26, 5)
    prompt_tokens = ENGINES["areal"].prompt_tokens
    assert prompt_tokens is not None
    assert prompt_tokens(columns) == ["[0, 1]", "[5, 6]", "[10, 11]", "[15, 16]", "[20, 21, 22, 23, 24]"]


@pytest.mark.parametrize("has_teacher", [False, True])
def test_a_distillation_loss_of_areal_is_not_measured(has_teacher: bool) -> None:
    """It is a token mean beside the policy loss, which has a coefficient then; without it there is no further term."""
    optimizer = SimpleNamespace(get_loss_scale=lambda: torch.tensor(256.0))
    arguments = {"self": SimpleNamespace(optimizer=optimizer, config=SimpleNamespace(temperature=0.5))}
    batch = {"loss_mask": MASKS, "rl_loss_weight": 0.5} | ({"teacher_logp": MASKS} if has_teacher else {})
    assert ENGINES["areal"].beside(arguments, batch) == (None if has_teacher else {})
    assert ENGINES["areal"].facts(arguments, batch) == {"coef": 128 if has_teacher else 256, "temperature": 0.5}


def test_areal_says_which_engines_are_measured_and_how_many_rows_a_prompt_has() -> None:
    trees, measured, of_fsdp = (SimpleNamespace(model=[], enable_tree_training=has_trees) for has_trees in (1, 0, 0))
    of_fsdp.model = None
    unproved = [ENGINES["areal"].unproved({"self": engine}) for engine in (measured, trees, of_fsdp)]
    assert unproved == ["", "", "only AReaL's Megatron engine is measured."]
    by_batch, by_group = (SimpleNamespace(mean_level=level, group_size=4) for level in ("batch", "group"))
    for norms, size in (((by_group, None), 4), ((by_batch, by_group), 4), ((by_batch, None), None)):
        config = SimpleNamespace(**dict(zip(("adv_norm", "reward_norm"), norms, strict=True)))
        assert ENGINES["areal"].group_size({"self": SimpleNamespace(config=config)}) == size


class PPOActorController:
    def __init__(self, train_engine: type[Any]) -> None:
        self.train_engine = train_engine

    def ppo_update(self, *args: Any, **kwargs: Any) -> str:
        return "updated"


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for AReaL's module with its controller."""
    module: Any = ModuleType("areal.trainer.ppo.actor")
    for name in ("PPOActorController", "PPOActorControllerV2"):
        setattr(module, name, type(name, (PPOActorController,), {}))
    for name in ("areal", "areal.trainer", "areal.trainer.ppo"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_a_controller_of_another_class_does_not_train_unnoticed(controller: Any) -> None:
    """Two classes may have an aggregation each."""
    made = (controller.PPOActorController, controller.PPOActorControllerV2)
    mine, other = actors(), actors()
    for actor_class in (mine, other):
        actor_class.as_controller = None
        aggregate(actor_class, "prompt_mean")
        assert [of(actor_class).ppo_update(groups()) for of in made] == ["updated"] * 2
    for of in made:
        with pytest.raises(ValueError, match=r"ppo_update of Actor, beside aggregate\(Mine, \.\.\.\)"):
            of(Actor).ppo_update(groups())
    assert isinstance(mine().ppo_update(groups()), Tensor)
    with pytest.raises(ValueError, match=r"ppo_update of Actor, .* without a controller, pass Actor to aggregate"):
        Actor().ppo_update(groups())


@pytest.mark.usefixtures("controller")
def test_a_controller_of_a_class_that_workers_import_anew_is_refused() -> None:
    for module in ("my_actor", "areal.engine.megatron_engine"):
        actor_class = actors()
        actor_class.__module__, actor_class.as_controller = module, lambda config, scheduler: "made"
        aggregate(actor_class, "prompt_mean")
        if module == "my_actor":
            assert actor_class.as_controller(None, None) == "made"
            continue
        with pytest.raises(ValueError, match="workers import that class anew, without the aggregation"):
            actor_class.as_controller(None, None)


# ---- ms-swift


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand-ins for `swift.megatron.trainers.grpo_trainer` and Megatron's parallel state."""

    class MegatronGRPOTrainer:
        loss_type, factor, num_generations, _metrics = "dapo", 1, 2, dict[str, Any]()
        args, beta, kl_in_reward = SimpleNamespace(overlong_filter=True), 0.0, False

        def _preprocess_inputs(self, samples: Any) -> Any:
            return samples

        def _on_train_step_batch(self, encoded_batches: Any) -> None: ...

        def loss_func(self, output_tensor: Tensor, data: Any) -> Any:
            batch = data["grpo_batch"]
            ratio = (output_tensor - batch.old_per_token_logps).exp()
            loss = -(ratio * batch.advantages * batch.completion_mask).sum() / batch.num_items_in_batch
            return loss * self.factor, {}

    def collate(samples: Any) -> Any:
        masks = torch.stack([row.mask for row in samples]).bool()
        truncated = torch.tensor([row.truncated for row in samples])
        advantages = torch.ones(masks.shape)
        return {}, SimpleNamespace(completion_mask=masks, advantages=advantages, truncated_mask=truncated)

    names = ("grpo_trainer", "utils")
    modules: list[Any] = [ModuleType(f"swift.{name}") for name in names]
    modules[0].MegatronGRPOTrainer, modules[1].collate_to_grpo_micro_batch = MegatronGRPOTrainer, collate
    modules[0].collate_to_grpo_micro_batch = collate
    modules[0].compute_logps_and_entropy_from_logits = lambda logits: logits
    state: Any = SimpleNamespace(get_data_parallel_group=lambda: None, get_data_parallel_world_size=lambda: 1)
    for name in ("swift", "swift.megatron", "swift.megatron.trainers", "swift.rlhf_trainers", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module, name, below in zip(modules, names, ("megatron.trainers", "rlhf_trainers"), strict=True):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        setattr(sys.modules[f"swift.{below}"], name, module)
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    sys.modules["megatron.core"].parallel_state = state  # type: ignore[attr-defined]
    return modules[0]


def step(trainers: Any, has_ids: bool = True) -> list[dict[str, Any]]:
    samples = []
    for i, (mask, prompt) in enumerate(zip(MASKS, PROMPTS, strict=True)):
        media = dict.fromkeys(("images", "videos", "audios"), ())
        encoded = {"input_ids": [1] * len(mask), "labels": [-100] * len(mask)}
        samples.append(
            SimpleNamespace(messages=[prompt], mask=mask, truncated=i == 3, prompt_id="", encoded=encoded, **media)
        )
    if has_ids:
        trainers.MegatronGRPOTrainer()._preprocess_inputs(samples)
    return [{"grpo_batch": trainers.collate_to_grpo_micro_batch(part)[1]} for part in (samples[:2], samples[2:])]


@pytest.mark.parametrize("factor", [1, 2])
def test_ms_swift_trains_on_weighted_advantages(factor: float, trainers: Any) -> None:
    """The loss function may multiply by a factor: 4.6.0 by the number of micro-batches."""
    trainers.MegatronGRPOTrainer.factor = factor
    ms_swift.aggregate("prompt_mean")
    microbatches = step(trainers)
    trainers.MegatronGRPOTrainer()._on_train_step_batch(microbatches)
    masks = MASKS * torch.tensor([1, 1, 1, 0, 1])[:, None]
    weighed = torch.cat([microbatch["grpo_batch"].advantages for microbatch in microbatches])
    assert_close(weighed, 6 * expected("prompt_mean", masks, PROMPTS))
    counts = [float(microbatch["grpo_batch"].num_items_in_batch) for microbatch in microbatches]
    assert counts == pytest.approx([6 * factor / 2] * 2, rel=1e-6)


@pytest.mark.parametrize(("has_kl", "terms"), [(True, {"pg", "kl"}), (False, {"pg"})])
def test_a_kl_penalty_in_the_reward_is_no_term_of_the_loss(has_kl: bool, terms: set[str], trainers: Any) -> None:
    replaced = ms_swift.aggregate("token_mean")
    replaced.proof = SimpleNamespace(is_over=False)  # Megatron is not here, so there is none
    trainer, microbatches, taps = trainers.MegatronGRPOTrainer(), step(trainers), Taps()
    trainer.beta, trainer.kl_in_reward = 0.1, not has_kl
    trainer._on_train_step_batch(microbatches)
    (batch, _) = (microbatch["grpo_batch"] for microbatch in microbatches)
    log_probs = torch.zeros(batch.advantages.shape, requires_grad=True) * 1.0
    batch.old_per_token_logps = batch.ref_per_token_logps = log_probs.detach()
    with observe(taps):
        taps.begin_microbatch()
        trainer.loss_func(log_probs, {"grpo_batch": batch})
    assert {*taps.losses} == terms


def test_ms_swift_where_it_could_not_be_exact(trainers: Any) -> None:
    replaced = ms_swift.aggregate("token_mean")
    trainer = trainers.MegatronGRPOTrainer()
    microbatches = step(trainers)
    for microbatch in microbatches:
        microbatch["grpo_batch"].completion_mask[:] = False
    microbatches[0]["grpo_batch"].completion_mask[0, 2] = True
    with pytest.raises(ValueError, match="1 tokens in a step of 2 micro-batches on 1 ranks"):
        trainer._on_train_step_batch(microbatches)
    with pytest.raises(ValueError, match="a second one would apply or measure weights twice"):
        ms_swift.aggregate("token_mean")
    trainer.factor = 0.5
    with pytest.raises(
        ValueError, match=r"multiplies the policy loss by 0\.5: that must be 1 or the number of micro-batches"
    ):
        trainer._on_train_step_batch(step(trainers))
    trainer.factor = 0
    with pytest.raises(ValueError, match=r"is 0 for a token to train on whose advantage is 1: .* Use the loss_func of"):
        trainer._on_train_step_batch(step(trainers))
    trainer.factor, trainer.loss_type = 1, "grpo"
    with pytest.raises(ValueError, match="--loss_type grpo with a loss aggregation"):
        trainer._on_train_step_batch(step(trainers))
    replaced.undo()
    ms_swift.aggregate("prompt_mean")
    with pytest.raises(ValueError, match="samples without prompt_id"):
        trainers.MegatronGRPOTrainer()._on_train_step_batch(step(trainers, has_ids=False))
    del sys.modules["swift.megatron"]
    with pytest.raises(ValueError, match="in a process without Megatron-SWIFT"):
        ms_swift.aggregate("prompt_mean")


# ---- NeMo-RL: the columns that a driver sends, and the loss that goes to its workers

VALID = torch.tensor([1.0, 1, 1, 0])


class Kind:
    def __init__(self, value: str) -> None:
        self.value = value


class Loss:
    """A stand-in for `ClippedPGLossFn`."""

    positive_example_nll_weight, reference_policy_kl_penalty, metric_normalizations = 0.0, 0.1, {"loss": "tokens"}

    def __init__(self, kind: str = "token_level") -> None:
        self.loss_type = Kind(kind)


class Estimator:
    def compute_advantage(self, prompt_ids: Tensor) -> None: ...


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A policy, and as much of `nemo_rl` as is asked for."""
    for name in ("nemo_rl", "nemo_rl.algorithms", "nemo_rl.algorithms.advantage_estimator"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    estimators: Any = sys.modules["nemo_rl.algorithms.advantage_estimator"]
    estimators.Estimator = sys.modules["nemo_rl.algorithms"].advantage_estimator = estimators  # type: ignore[attr-defined]
    estimators.Estimator = Estimator
    return SimpleNamespace(
        cfg={"train_global_batch_size": 4}, train=lambda data, loss_fn, eval_mode=False, gbs=None: data
    )


def batch() -> dict[str, Tensor]:
    prompts = torch.tensor(PROMPTS[1:])[:, None].expand(4, 5)
    columns = {"token_mask": MASKS[1:].float(), "sample_mask": VALID.clone(), "input_ids": prompts}
    return columns | {"advantages": torch.ones(4, 5)}


@pytest.mark.parametrize("steps", [1, 2])
def test_columns_are_weights_times_the_count_that_they_are_divided_by(steps: int, driver: Any) -> None:
    data = batch()
    loss = nemo_rl.aggregate(driver, Loss(), "prompt_mean", kl="sample_mean", units="active")
    Estimator().compute_advantage(torch.tensor(PROMPTS[1:]))
    sent = driver.train(data, loss, gbs=4 // steps)
    assert "policy_loss_weights" not in data
    for begin in range(0, 4, 4 // steps):
        rows = slice(begin, begin + 4 // steps)
        masks = (data["token_mask"] * data["sample_mask"][:, None])[rows, 1:]
        for name, mode, units in (("policy", "prompt_mean", "active"), ("kl", "sample_mean", "all")):
            column = sent[f"{name}_loss_weights"][rows]
            assert not column[:, 0].any()
            assert_close(column[:, 1:], expected(mode, masks, PROMPTS[1:][rows], units) * masks.sum())


def test_losses_of_samples_get_one_weight_each(driver: Any) -> None:
    loss = nemo_rl.aggregate(driver, Loss("sequence_level"), "token_mean")
    column = driver.train(batch(), loss_fn=loss)["policy_loss_weights"]
    torch.testing.assert_close(column, 3 * torch.tensor([1.0, 2, 2, 0]) / 5)
    with pytest.raises(ValueError, match="a second one would apply or measure weights twice"):
        nemo_rl.aggregate(driver, loss, "token_mean")
    replaced = replacing.installed("NeMo-RL")
    assert replaced is not None
    replaced.undo()
    uneven = nemo_rl.aggregate(driver, Loss("sequence_level"), later_tokens_more)
    with pytest.raises(ValueError, match="Set token_level_loss=true"):
        driver.train(batch(), uneven)


@pytest.mark.parametrize(("moved", "is_doubted"), [(0, False), (1, True)])
def test_workers_of_nemo_rl_hear_of_prompts_at_other_rows(moved: int, is_doubted: bool, driver: Any) -> None:
    loss = nemo_rl.aggregate(driver, Loss(), "prompt_mean")
    Estimator().compute_advantage(torch.tensor([9, 9, 9, 9]))  # of the step before
    Estimator().compute_advantage(torch.tensor(PROMPTS[1:]).roll(moved))
    driver.train(batch(), loss)
    sent = pickle.loads(pickle.dumps(loss))
    assert ("ids stand at other rows" in vars(sent)["_doubt"]) == is_doubted


def test_other_losses_go_by_and_the_loss_travels(driver: Any) -> None:
    data = batch()
    loss: Any = nemo_rl.aggregate(driver, Loss(), "token_mean")
    assert driver.train(data, SimpleNamespace()) is data
    with pytest.raises(ValueError, match=r"policy\.train with a Loss beside aggregate"):
        driver.train(data, Loss())
    sent = pickle.loads(pickle.dumps(loss))
    assert (sent.metric_normalizations, sent.loss_type.value) == ({"loss": "tokens"}, "token_level")
    loss = Loss()
    loss.positive_example_nll_weight = 0.5
    with pytest.raises(ValueError, match="grpo_train passes no rewards"):
        nemo_rl.aggregate(driver, loss, "token_mean")
    for other in (None, Loss, driver):
        with pytest.raises(TypeError, match=r"loss_fn is a .*: it must be a ClippedPGLossFn. Call aggregate\(policy"):
            nemo_rl.aggregate(driver, other, "token_mean")


def test_workers_of_nemo_rl_without_megatron_are_not_proved(
    driver: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "megatron.core.pipeline_parallel", raising=False)
    monkeypatch.setattr(replacing, "_REGISTRY", {})  # a line is printed once in a process
    pickle.loads(pickle.dumps(nemo_rl.aggregate(driver, Loss(), "token_mean")))
    assert "NeMo-RL worker 0: NOT PROVED: Megatron-Core is not loaded" in capsys.readouterr().out


# ---- SkyRL: what its policy loss refuses


def test_skyrl_where_it_could_not_be_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch that no Megatron worker brings; another SkyRL; a mode that there is not."""
    below = "skyrl.backends.skyrl_train"
    names = ["skyrl", "skyrl.backends", below, f"{below}.utils", f"{below}.utils.ppo_utils"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    losses = SimpleNamespace(get=lambda name: lambda *_, **__: name)
    estimators = SimpleNamespace(list_available=lambda: ["megatron_rl_loss"], get=lambda name: Division(4))
    vars(sys.modules[names[-1]]).update(PolicyLossRegistry=losses, AdvantageEstimatorRegistry=estimators)
    loss, ones = AggregatedPolicyLoss("regular"), torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"a micro-batch without weights.*trainer.strategy=megatron"):
        loss(ones, ones, ones, SimpleNamespace(), loss_mask=ones)
    with pytest.raises(ValueError, match=r"group_size=8 beside a loss with group_size=4: .* Pass that number"):
        AggregatedPolicyLoss("regular", group_size=8)
    worker: Any = SimpleNamespace(
        MegatronModelWrapper=SimpleNamespace(forward_backward_mini_batch=lambda loss_fn: None)
    )
    monkeypatch.setitem(sys.modules, f"{below}.workers.megatron.megatron_model_wrapper", worker)
    with pytest.raises(ValueError, match=r"SkyRL with .*forward_backward_mini_batch\(loss_fn\).*Use SkyRL a9564572"):
        AggregatedPolicyLoss("regular")
    with pytest.raises(ValueError, match=r"the term 'kl': .* there is no such mode"):
        AggregatedPolicyLoss("regular", kl="sequence_means")
    with pytest.raises(ValueError, match=r"group_size is 4\.0: .* Pass the number of samples"):
        AggregatedPolicyLoss("regular", group_size=4.0)  # type: ignore[arg-type]


@pytest.fixture
def skyrl_trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for SkyRL's trainer, with its division of advantages times a factor."""

    class RayPPOTrainer:
        factor = 1.0

        def __init__(self, name: str) -> None:
            algorithm = SimpleNamespace(loss_reduction=name, max_seq_len=10, advantage_batch_normalize=True)
            self.cfg = SimpleNamespace(trainer=SimpleNamespace(algorithm=algorithm))

        def _normalize_advantages(self, data: Any, mini_batch_boundaries: Any, prompt_boundaries: Any = None) -> Any:
            algorithm, advantages = self.cfg.trainer.algorithm, data["advantages"]
            if algorithm.advantage_batch_normalize:
                advantages = advantages - advantages.mean()
            mode = {"sequence_mean": "sample_mean", "seq_mean_token_sum_norm": "constant"}[algorithm.loss_reduction]
            parts = [data["loss_mask"][start:end] for start, end in mini_batch_boundaries]
            weights = torch.cat([expected(mode, masks, PROMPTS[: len(masks)], divisor=10.0) for masks in parts])
            weights += data["loss_mask"] == 0  # of tokens that the workers mask
            data["advantages"] = self.factor * weights * advantages
            return data

    module: Any = ModuleType("skyrl.train.trainer")
    module.RayPPOTrainer = RayPPOTrainer
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return RayPPOTrainer


@pytest.mark.parametrize(
    ("name", "says"),
    [("sequence_mean", "sample_mean"), ("seq_mean_token_sum_norm", "constant with divisor 10")],
)
def test_the_first_division_of_advantages_with_a_token_is_measured(name: str, says: str, skyrl_trainer: Any) -> None:
    """By mini-batches, of which one may be masked throughout, and whether or not SkyRL whitens advantages."""
    trainer = skyrl_trainer(name)
    Division(None)

    def normalized(masks: Tensor) -> list[str]:
        data = {"loss_mask": masks, "advantages": torch.arange(25.0).view(5, 5)}
        trainer._normalize_advantages(data, [(0, 3), (3, 5)])
        return [line for line in replacing.active() if f"{name}, measured in SkyRL's own" in line]

    assert normalized(torch.zeros_like(MASKS)) == []
    skyrl_trainer.factor = 1.001
    with pytest.raises(ValueError, match=f"loss_reduction={name}: SkyRL's trainer gives response token 2 of row 0"):
        normalized(MASKS)
    skyrl_trainer.factor = 1.0
    (line,) = normalized(MASKS)
    assert line.endswith(f"each of the step's 8 tokens has the weight of {says}")
    skyrl_trainer.factor = 1.001
    assert normalized(MASKS) == [line], "only the first one"


# ---- ROLL and RLinf: what they ask of a step; and the terms beside RLinf's policy loss

BREAKS_THE_TOKEN_MEAN: list[tuple[str, dict[str, Any], str]] = [
    ("roll", {}, ""),
    ("roll", {"loss_agg_mode": "seq-mean-token-mean"}, "Set loss_agg_mode: token-mean"),
    ("roll", {"apply_loss_scale": False}, "Set apply_loss_scale: true"),
    ("roll", {"pg_variant": "kimi15"}, "Set another pg_variant"),
    ("roll", {"difficulty_loss_weight": 0.5}, "Remove them"),
    ("roll", {"length_loss_weight": 0.5}, "Remove them"),
    ("rlinf", {}, ""),
    ("rlinf", {"loss_agg_func": "seq-mean-token-mean"}, "Set loss_agg_func=token-mean"),
    ("rlinf", {"use_valid_token_scale": False}, "Set use_valid_token_scale=True"),
    ("rlinf", {"batch": iter(())}, "Choose another placement"),
]


@pytest.mark.parametrize(("engine", "changed", "remedy"), BREAKS_THE_TOKEN_MEAN)
def test_settings_that_break_the_token_mean(engine: str, changed: dict[str, Any], remedy: str) -> None:
    means = {"loss_agg_mode": "token-mean", "loss_agg_func": "token-mean"}
    config = SimpleNamespace(**means | {"apply_loss_scale": True, "use_valid_token_scale": True} | changed)
    worker = SimpleNamespace(pipeline_config=config)
    owner = SimpleNamespace(worker=worker, worker_config=config, cfg=SimpleNamespace(algorithm=config))
    wrong = ENGINES[engine].refusals({"self": owner, "batch": changed.get("batch", {})})
    assert [text for is_wrong, _, text in wrong if is_wrong] == [remedy] * bool(remedy)


@pytest.mark.parametrize(("tokens", "steps", "is_right"), [(8, 1, True), (9, 1, False), (9, 2, True), (7, 2, False)])
def test_rlinf_counts_the_tokens_of_all_steps(tokens: int, steps: int, is_right: bool) -> None:
    config, count = SimpleNamespace(n_minibatches=steps), ENGINES["rlinf"].divisor
    actor = SimpleNamespace(cfg=SimpleNamespace(algorithm=config), global_valid_token=torch.tensor(tokens))
    assert count is not None
    totals: Any = SimpleNamespace(step_tokens=8.0)
    if is_right:
        assert count({"self": actor}, totals) == tokens
        return
    says = f"global_valid_token={tokens} in a step of 8 tokens and n_minibatches={steps}"
    with pytest.raises(ValueError, match=says):
        count({"self": actor}, totals)


@pytest.mark.parametrize(("num_minibatches", "aggregation"), [(1, "token_mean"), (2, "token_sum with divisor 9")])
def test_rlinf_divides_terms_beside_by_the_tokens_of_all_steps(num_minibatches: int, aggregation: str) -> None:
    """With one step they are token means."""
    config = SimpleNamespace(n_minibatches=num_minibatches, entropy_bonus=0.01)
    kinds = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    for kind, estimator in kinds.items():
        actor = SimpleNamespace(
            cfg=SimpleNamespace(algorithm=config), global_valid_token=torch.tensor(9), kl_beta=0.1,
            kl_penalty_type=kind, calculate_entropy=True,
        )  # fmt: skip
        beside = ENGINES["rlinf"].beside({"self": actor}, {"ref_logprobs": MASKS})
        assert beside is not None
        assert {name: str(term.aggregation) for name, term in beside.items()} == dict.fromkeys(
            ("kl", "entropy"), aggregation
        )
        assert (beside["kl"].estimator, beside["kl"].coef, beside["entropy"].coef) == (estimator, 0.1, -0.01)


@pytest.mark.parametrize("sums_masked", [False, True])
def test_a_trial_has_advantages_at_masked_tokens(sums_masked: bool) -> None:
    """Where an engine's loss leaves these out: weighed advantages are 0 there, and would hide another mask."""
    engine = replace(ENGINES["areal"], facts=lambda *_: {}, sums_masked=sums_masked)
    plain, factors, is_masked = torch.full((5, 5), 2.0), MASKS * 3.0, MASKS == 0
    weighed = {"advantages": plain * factors, weighed_batches.FACTORS: factors, weighed_batches.PLAIN: plain}
    batch = {**weighed, weighed_batches.MASKS: MASKS, "loss_mask": MASKS}
    measured = engine.measured({}, {"input_data": batch})
    trial = measured.factors_of(batch["advantages"])
    assert (trial[is_masked] == (0 if sums_masked else 1)).all()
    assert (trial[~is_masked] == 3).all()


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("by_token", [False, True])
def test_a_column_of_ids_has_one_for_each_row_or_for_each_of_its_tokens(by_token: bool, is_packed: bool) -> None:
    """Engines cut columns as tokens, and AReaL packs them."""
    engine = replace(ENGINES["areal"], facts=lambda *_: {})
    columns = {
        "advantages": MASKS * 1.0,
        "loss_mask": MASKS,
        weighed_batches.FACTORS: MASKS,
        weighed_batches.MASKS: MASKS,
    }
    columns[weighed_batches.PLAIN] = MASKS * 1.0
    ids = torch.tensor(PROMPTS)
    columns[weighed_batches.IDS] = ids[:, None].expand(5, 5) if by_token else ids
    if is_packed:
        columns = {name: values.flatten() for name, values in columns.items()}
        columns["cu_seqlens"] = torch.arange(0, 26, 5)
    samples = engine.measured({}, {"input_data": columns}).samples
    assert len(samples) == len(samples.ids["prompt"]) == 5
    assert len({*samples.ids["prompt"].tolist()}) == 3
