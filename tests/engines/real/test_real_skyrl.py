"""SkyRL's own worker, loss, packing, scaling and metrics with our policy loss, from a checkout: SKYRL_PATH=~/SkyRL.

Real: `convert_prompts_responses_to_batch_tensors`, `MegatronPolicyWorkerBase.forward_backward` with both of its cuts
into micro-batches, `MegatronModelWrapper` with its packed rows, context-parallel log-probs and entropy, KL penalty,
MTP loss and deferred `finalize_model_grads`; its reductions of metrics; its trainer's `_normalize_advantages`, with the
recipe's around it; Megatron's schedule and DDP. The model is a table of logits, with a second one as draft head.
Replaced: Ray, by pickling the loss; the model's forward on packed rows; the MTP block, which captures hidden states of
a GPT; the strategy, whose imports fail (`megatron.core.dist_checkpointing.strategies.base`), but not its `all_reduce`.
"""

import contextlib
import dataclasses
import os
import pickle
import re
import runpy
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import added_terms
import bigram_step
import oracle
import pytest
import torch
from bigram_step import (
    BETA,
    CLIP_HIGH,
    CLIP_LOW,
    LENGTH,
    MASKED_ROWS,
    PROMPTS,
    ROWS,
    TOLERANCE,
    VOCABULARY,
    assert_exact,
    assert_proof_changes_nothing,
    compare,
    expected,
    k3,
    make_batch,
    make_table,
)
from checkouts import SKYRL, Settings, checkout, load, record_errors
from plants import Plant, assert_stops, planted, record_plant
from ranks import run_ranks
from repository import EXAMPLES
from skyrl_rows import data_of
from table_step import relative_error, start, table_model
from torch import Tensor

from megatron_rl_loss import Mode
from megatron_rl_loss.engines import weighed_batches

ENTROPY, MTP = 0.02, 0.4  # coefficients
LAST_STEPS = [1, 0, 0, 1, 0, 1, 1, 0, 1, 1, 0, 1]  # of a trajectory, within a prompt
TEACHERS = 2  # depths of the draft head
#: SkyRL's `loss_reduction` of each mode.
REDUCTIONS = {
    "token_mean": "token_mean",
    "sample_mean": "sequence_mean",
    "prompt_mean": "prompt_mean",
    "constant": "seq_mean_token_sum_norm",
}
MODES: dict[str, dict[str, Any]] = {
    "token_mean": {},
    "sample_mean": {"kl": "token_mean"},
    "prompt_mean": {"entropy": "token_mean", "mtp": "sample_mean"},
    "constant": {"divisor": 40.0, "kl": "sample_mean", "entropy": "prompt_mean", "mtp": "prompt_mean"},
}

pytestmark = pytest.mark.slow


def draft(table: Tensor, ids: Tensor) -> list[Tensor]:
    return [table[ids], 0.5 * table[ids]]


def expected_draft(mode: str, settings: dict[str, Any]) -> tuple[float, Tensor]:
    """Value and gradient of the draft head's loss, a mean over its depths."""
    batch, policy = make_batch(), make_table().double()
    table = policy.flip(0).requires_grad_()
    divisor = settings.get("divisor") if "mtp" not in settings else None
    losses = []
    for depth, students in enumerate(draft(table, batch["input_ids"])):
        samples = []
        for row, (ids, length) in enumerate(zip(batch["input_ids"], batch["input_lengths"].tolist(), strict=True)):
            teacher = policy[ids[depth + 1 : length]].softmax(-1)
            losses_of_row = -(teacher * students[row, : length - depth - 1].log_softmax(-1)).sum(-1)
            samples.append(oracle.Sample(losses_of_row, torch.ones(len(losses_of_row)), None, PROMPTS[row]))
        losses.append(oracle.step_loss(settings.get("mtp", mode), samples, divisor))
    loss = MTP * torch.stack(losses).mean()
    (gradient,) = torch.autograd.grad(loss, table)
    return float(loss.detach()), gradient


def config(case: dict[str, Any]) -> Any:
    terms, times, stock = case.get("terms", ("kl", "entropy")), case.get("times", 1), case.get("stock")
    algorithm = Settings(
        policy_loss_type="regular" if case.get("unset") else stock or "mine",
        loss_reduction=case["own"] if stock and "own" in case else case.get("reduction", REDUCTIONS[case["mode"]]),
        max_seq_len=case["settings"].get("divisor", LENGTH), advantage_batch_normalize=case.get("whiten", False),
        eps_clip_low=CLIP_LOW, eps_clip_high=CLIP_HIGH, off_policy_correction=Settings(**case.get("off", {})),
        use_kl_loss="kl" in terms, kl_loss_coef=BETA * times * ("kl" in terms), kl_estimator_type="k3", temperature=1.0,
        use_entropy_loss=True, entropy_loss_coef=ENTROPY * times * ("entropy" in terms),
    )  # fmt: skip
    mtp = Settings(mtp_loss_weight=MTP, mtp_loss_chunk_size=case.get("chunk"), mtp_loss_topk=case.get("topk"))
    return Settings(
        algorithm=algorithm, policy=Settings(megatron_config=mtp, sequence_parallel_size=1),
        remove_microbatch_padding=case.get("packed", True), max_tokens_per_microbatch=case.get("tokens", 0),
        vocab_entropy_chunk_memory_mb=512, micro_train_batch_size_per_gpu=case.get("rows", 4),
    )  # fmt: skip


def train(root: str, cp: int, cases: list[dict[str, Any]], copied: bool = False) -> list[dict[str, Any]]:
    """On a rank: the errors of each case, and SkyRL's metrics; `copied`: with a loss function that copies its mask."""
    state = start(cp=cp, pp=bigram_step.STAGES)
    names = ("workers.megatron.megatron_worker", "utils.ppo_utils", "training_batch", "distributed.strategy")
    below = [f"skyrl.backends.skyrl_train.{name}" for name in names]
    workers, ppo_utils, batches, strategies, preprocess = load(SKYRL, root, *below, "skyrl.train.dataset.preprocess")

    if copied:
        wrapper = sys.modules[workers.MegatronModelWrapper.__module__]
        source, mask = Path(str(wrapper.__file__)).read_text(), 'loss_mask = data["loss_mask"]'
        assert source.count(mask) == 1
        exec(source.replace(mask, mask + ".clone()"), vars(wrapper))
        workers.MegatronModelWrapper = wrapper.MegatronModelWrapper

    from megatron.core.distributed import finalize_model_grads

    from megatron_rl_loss.engines import replacing, skyrl

    trainers = load_trainer(root)

    seen: list[Any] = []

    @contextlib.contextmanager
    def capture(model: Any, enabled: bool) -> Any:
        yield SimpleNamespace(compute_student_hidden_states=lambda: seen[-1], model=model) if enabled else None

    def tables(model: Any) -> Tensor:
        both: Tensor = model.module.losses
        return both.view(2, VOCABULARY, -1)

    def forward(table: Tensor, ids: Tensor) -> Tensor:
        if not state.is_pipeline_first_stage():  # SkyRL hands a later stage other ids: it adds 0, with a gradient
            added = table.view(2, VOCABULARY, -1)[0].sum(0)
            return added - added.detach()
        table = table * bigram_step.STAGES  # of which the first one has a part
        seen.append(ids % VOCABULARY)  # the ids of a micro-batch of padding are drawn from 100
        return table.view(2, VOCABULARY, -1)[0][seen[-1]]

    workers.MegatronModelWrapper.forward_backward_mini_batch.__globals__.update(
        maybe_capture_mtp_hidden=capture,
        project_mtp_hidden_to_logits=lambda ids, model: draft(tables(model)[1], ids),
        finalize_model_grads_with_expert_adapter_sync=finalize_model_grads,  # 0.4.0 has it of Megatron-Bridge
        _copy_tensor_dict_to_device=lambda batch, device: batch,
    )
    rows = slice(state.get_data_parallel_rank(), None, state.get_data_parallel_world_size())
    both, results = torch.stack([make_table(), make_table().flip(0)]), []
    for case in cases:
        cfg, settings = config(case), case["settings"]
        added_terms.choose(case.get("term", ""))
        os.environ["MEGATRON_RL_LOSS_PROOF"] = case.get("proof", "error")
        vars(skyrl)["step_plan"] = partial(scaled_plan, case.get("weighed", 1))
        if case.get("stock"):
            loss = ppo_utils.PolicyLossRegistry.get(case["stock"])
        else:
            own = {"group_size": case.get("group_size", 4)}
            own |= {name: value for name, value in settings.items() if name != "divisor"}
            loss = skyrl.AggregatedPolicyLoss("regular", **own | case.get("own_modes", {}))
            estimators = ppo_utils.AdvantageEstimatorRegistry
            pickle.loads(pickle.dumps(estimators.get("megatron_rl_loss")))  # as in the trainer's process
            loss._loss = ppo_utils.ppo_policy_loss  # cloudpickle, which SkyRL has, pickles a decorated function too
            loss = pickle.loads(pickle.dumps(loss))
            if case.get("unset"):
                loss = ppo_utils.ppo_policy_loss
        of_model: Any = {"stages": bigram_step.STAGES, "frozen": bigram_step.FROZEN}
        model, kept = table_model(both.flatten().tolist(), forward=forward, **of_model), list[Tensor]()
        has_draft = cp == bigram_step.STAGES == 1 and not bigram_step.FROZEN
        model.config.mtp_num_layers = TEACHERS if has_draft else None
        strategy: Any = SimpleNamespace()
        strategy.all_reduce = partial(strategies.DistributedStrategy.all_reduce, strategy)
        strategy.optimizer_step = lambda *_, model=model, kept=kept, **__: kept.append(
            model.module.losses.main_grad.view(2, VOCABULARY, -1).clone()
        )
        worker: Any = object.__new__(workers.MegatronPolicyWorkerBase)
        vars(worker).update(
            cfg=cfg, actor_module=[model], model=workers.MegatronModelWrapper(cfg, [model], policy_loss_fn=loss),
            enable_router_replay=False, enable_sample_support_replay=False, empty_cuda_cache=False,
            strategy=strategy, scheduler=None, optimizer=SimpleNamespace(param_groups=[{"lr": 0.0}]),
        )  # fmt: skip
        normalize = partial(by_trainer, trainers, cfg, case.get("recipe"), batches.TrainingInputBatch, [0, ROWS])
        convert = preprocess.convert_prompts_responses_to_batch_tensors
        data = batches.TrainingInputBatch(data_of(rows, normalize, convert, case.get("ids")))
        for name in case.get("columns", ()):  # one tensor a row, as SkyRL sends images, and rows of several samples
            data[name] = batches.TensorList([torch.tensor([3, 3])] * len(data["sequences"]))
        data.metadata = {"response_length": data["response_mask"].shape[1]}
        for by_name in case.get("by_name", [None]):
            for _ in range(case.get("calls", 1)):
                metrics = worker.forward_backward(data, loss_fn=by_name).metrics
            worker.optim_step()
        of_policy, of_draft = kept[-1] / bigram_step.STAGES
        times, entropy = cfg.algorithm.kl_loss_coef / BETA, cfg.algorithm.entropy_loss_coef
        of_kl = lambda *arguments, times=times: times * k3(*arguments)  # noqa: E731
        right = case.get("weights")
        value, by_entry, scale = expected(case["mode"], settings, kl=of_kl, entropy=entropy, weights=right)
        errors = {"gradient": relative_error(of_policy, by_entry) if state.is_pipeline_first_stage() else 0.0}
        if has_draft:
            draft_loss, by_draft = expected_draft(case["mode"], settings)
            errors["mtp"] = relative_error(of_draft, by_draft)
            errors["mtp value"] = abs(metrics["mtp_loss"] * MTP - draft_loss) / draft_loss
            value, scale = value + draft_loss, scale + draft_loss
        errors["value"] = abs(metrics["final_loss"] - value) / scale
        if not case.get("stock"):
            replaced = replacing.installed("SkyRL")
            assert replaced.proof.outcome == ("" if {"proof", "unset"} & case.keys() else case.get("outcome", "proved"))
            replaced.undo()
            replacing.installed("SkyRL trainer").undo()
        bits = torch.stack([of_policy, of_draft]).numpy().tobytes()
        results.append({"errors": errors, "metrics": metrics, "bits": bits})
    return results


def load_trainer(root: str) -> Any:
    """SkyRL's trainer, without what generates and evaluates."""
    below = [f"skyrl.train.{name}" for name in ("config", "entrypoints", "evaluate", "generators", "utils")]
    below += [f"skyrl.backends.skyrl_train.{name}" for name in ("distributed.dispatch", "workers.worker_dispatch")]
    stand_ins = ("tqdm", *below, "skyrl.train.dataset.dataset")
    framework = dataclasses.replace(SKYRL, passed_by=(), stand_ins=stand_ins)
    load(framework, root)
    sys.modules["skyrl.train.dataset"].PromptDataset = object  # type: ignore[attr-defined]
    (trainers,) = load(framework, root, "skyrl.train.trainer")
    return trainers


def by_trainer(
    trainers: Any, cfg: Any, mode: str | None, batch: Any, cuts: list[int], whole: dict[str, Tensor]
) -> Tensor:
    """The advantages of all rows as SkyRL's trainer weighs them; with a mode, the recipe's trainer."""
    cls, uids = trainers.RayPPOTrainer, [str(prompt) for prompt in PROMPTS]
    if mode is not None:
        recipe = runpy.run_path(str(EXAMPLES / "recipes" / "skyrl_rows.py"))
        cls = recipe["Trainer"]
        cls._normalize_advantages.__globals__["MODE"] = mode
    trainer = object.__new__(cls)
    trainers.RayPPOTrainer.compute_advantages_and_returns = lambda self, data: data  # advantages are given here
    trainer.cfg = Settings(trainer=Settings(algorithm=cfg.algorithm, micro_train_batch_size_per_gpu=2))
    data = batch(whole)
    data.metadata = {"uids": uids, "is_last_step": LAST_STEPS}
    boundaries = list(pairwise(cuts)), trainers.compute_prompt_boundaries(uids)
    data = trainer._normalize_advantages(trainer.compute_advantages_and_returns(data), *boundaries)
    weighed: Tensor = data["advantages"]
    return weighed


def scaled_plan(factor: float, *arguments: Any) -> Any:
    """The weights of a plan times a factor."""
    planned = weighed_batches.step_plan(*arguments)
    return [SimpleNamespace(weights=factor * microbatch.weights) for microbatch in planned]


SIZES: list[dict[str, Any]] = [{"rows": 4}, {"tokens": 24}]  # two equal and unequal micro-batches, and as many as fit
CASES = [{"mode": mode, "settings": settings, **sizes} for mode, settings in MODES.items() for sizes in SIZES]
MEANS = ["token_mean", "sample_mean", "prompt_mean"]
#: Each `loss_reduction` with each mode of each term.
CROSSED = [
    {
        "mode": mode,
        "settings": {**divisor, "kl": MEANS[i], "entropy": MEANS[i - 1], "mtp": MEANS[i - 2]},
        **SIZES[i % 2],
    }
    for mode, divisor in [(mode, {"divisor": 40.0} if mode == "constant" else {}) for mode in REDUCTIONS]
    for i in range(len(MEANS))
]


def test_every_term_is_exact(record_property: Any) -> None:
    """Each mode at CP 1 cuts the draft head's logits in all four ways."""
    ways: list[dict[str, Any]] = [{}, {"packed": False}, {"chunk": 4}, {"topk": VOCABULARY, "packed": False}]
    cases = [case | ways[(i + shift) % 4] for shift in (0, 2) for i, case in enumerate(CASES)]
    assert_exact(record_property, train, SKYRL, cases, worlds=[(1, 1), (2, 1)])
    assert_exact(record_property, train, SKYRL, CASES, worlds=[(4, 2)])
    assert_exact(record_property, train, SKYRL, CROSSED, worlds=[(2, 1)])


def rollout_means(step: Any) -> Any:
    """A mode of the user's own: that of `sample_mean`."""
    return 1 / (step.tokens("rollout") * step.units("rollout"))


def test_a_term_may_have_a_mode_of_the_users_own(record_property: Any) -> None:
    kl = Mode(name="rollout_means", function=rollout_means)
    case = {"mode": "prompt_mean", "settings": {"kl": "sample_mean"}, "own_modes": {"kl": kl}, "rows": 4}
    assert_exact(record_property, train, SKYRL, [case], worlds=[(2, 1)])


def test_rows_of_sessions_by_the_recipe(record_property: Any) -> None:
    """Sessions of one to three rows of other lengths, dealt to both DP ranks and cut into micro-batches.

    By prompt the recipe's is SkyRL's own `prompt_mean`. With our loss, for the KL penalty, the step is proved.
    """
    batch, session = make_batch(), 0
    masks = list(batch["token_mask"][:, 1:] * batch["sample_mask"][:, None])
    sessions = [session := session + before for before in (0, *LAST_STEPS[:-1])]
    of_prompts = [oracle.Sample(mask, mask, None, prompt) for mask, prompt in zip(masks, PROMPTS, strict=True)]
    weights = {
        "session_mean": oracle.weights_by_ids("session_mean", masks, sessions, [], "all"),
        "prompt_mean": oracle.step_weights("prompt_mean", of_prompts),
    }
    case: dict[str, Any] = {"stock": "regular", "mode": "token_mean", "settings": {"kl": "sample_mean"}, "terms": []}
    cases = [case | sizes | {"recipe": mode, "weights": weights[mode]} for mode in weights for sizes in SIZES]
    cases += [case | {"stock": None, "terms": ["kl"], "recipe": mode, "weights": weights[mode]} for mode in weights]
    wrong = [case | {"recipe": "prompt_mean", "weights": weights["session_mean"]}]
    for *results, control in run_ranks(4, train, checkout(SKYRL), 2, cases + wrong):
        worst = max(outcome["errors"]["gradient"] for outcome in results)
        assert worst < TOLERANCE < 1e-2 < control["errors"]["gradient"], results
        record_errors(record_property, SKYRL, "rows of sessions, by weights", ours=worst)


def test_theirs_are_means_of_means(record_property: Any) -> None:
    """SkyRL's policy loss is exact; its other terms are not, in their own counting of rows or of tokens."""
    stock: dict[str, Any] = {"stock": "regular", "mode": "token_mean", "settings": {"kl": "sample_mean"}, "times": 1e4}
    terms = ("policy loss", ""), ("KL penalty", "kl"), ("entropy bonus", "entropy")
    cases = [stock | sizes | {"setting": name, "terms": [term]} for name, term in terms for sizes in SIZES]
    modes = {"sequence_mean": "sample_mean", "seq_mean_token_sum_norm": "constant", "prompt_mean": "prompt_mean"}
    for own, mode in (modes | {"token_mean_legacy": "token_mean"}).items():
        settings = {"kl": "sample_mean"} | ({"divisor": LENGTH} if mode == "constant" else {})
        setting = "policy loss, `token_mean_legacy`" if own.endswith("legacy") else "policy loss"
        cases.append(stock | {"setting": setting, "terms": [], "own": own, "mode": mode, "settings": settings})
    pairs = compare(record_property, train, SKYRL, cases, world=(2, 1))
    exact = [own["errors"]["gradient"] < TOLERANCE for own, _ in pairs]
    assert exact == [True] * 2 + [False] * 4 + [True] * 3 + [False]
    for own, ours in ((outcome["errors"]["mtp"] for outcome in pair) for pair in pairs[:2]):
        assert ours < TOLERANCE < 1e-2 < own
        record_errors(record_property, SKYRL, "MTP loss", own, ours)


def test_a_copied_mask_changes_nothing() -> None:
    cases = [
        {"mode": "prompt_mean", "settings": MODES["prompt_mean"], "rows": 4, "packed": packed} for packed in (1, 0)
    ]
    for results in run_ranks(2, train, checkout(SKYRL), 1, cases, True)[0]:
        assert max(results["errors"].values()) < TOLERANCE, results


def test_reported_terms_are_those_of_one_micro_batch(record_property: Any) -> None:
    """SkyRL's own means of micro-batches' means of ranks' are not."""
    case: dict[str, Any] = {"mode": "token_mean", "settings": {"kl": "sample_mean"}}
    stock, root = case | {"stock": "regular"}, checkout(SKYRL)
    ((whole,),) = run_ranks(1, train, root, 1, [stock | {"rows": ROWS}])
    *ours, theirs = run_ranks(2, train, root, 1, [*(case | sizes for sizes in SIZES), stock])[0]
    terms = {name: whole["metrics"][name] for name in ("policy_kl", "policy_entropy", "final_loss", "mtp_loss")}
    for results in ours:
        assert {name: results["metrics"][name] for name in terms} == pytest.approx(terms, rel=1e-5, abs=1e-7)
    by_case = [
        [abs(outcome["metrics"][name] / value - 1) for name, value in terms.items()] for outcome in (theirs, *ours)
    ]
    assert min(by_case[0]) > 1e-3
    record_errors(record_property, SKYRL, "reported terms", *map(max, by_case[:2]))


def test_the_proof_changes_nothing() -> None:
    case = {"mode": "prompt_mean", "settings": MODES["prompt_mean"], "tokens": 24}
    for world in ((2, 1), (4, 2)):
        assert_proof_changes_nothing(train, SKYRL, [case, *[case | {"packed": False}] * (world[1] == 1)], world)


def test_a_call_that_names_another_loss_is_not_stopped() -> None:
    """It is not the step that is proved, either: the next one is, if it trains with our loss."""
    case = {"mode": "token_mean", "settings": {"kl": "sample_mean"}, "rows": ROWS}
    cases = [case | {"unset": True, "by_name": ["regular"]}, case | {"by_name": ["importance_sampling", None]}]
    run_ranks(1, train, checkout(SKYRL), 1, cases)


WRAPPER = "skyrl/backends/skyrl_train/workers/megatron/megatron_model_wrapper.py"
LOSSES, MODEL = (f"skyrl/backends/skyrl_train/{name}_utils.py" for name in ("utils/ppo", "distributed/megatron/model"))
KL_MEAN = "masked_mean(kl_loss, loss_mask, dim=-1).mean()"
ENTROPY_MEAN = f"memory_mb,\n{20 * ' '})\n{20 * ' '}entropy = masked_mean(entropy_BS, loss_mask)"
AFTER_LOSS = "# Decoupled MTP / draft loss"
LOSS_AGAIN = f"""policy_loss = policy_loss + current_loss_fn(
                action_log_probs, old_action_log_probs, advantages, config=loss_config, loss_mask=loss_mask,
                rollout_logprobs=rollout_action_logprobs)[0]
            {AFTER_LOSS}"""
PLANTS = [
    Plant("scaling doubled", {WRAPPER: ("_correction_factor = num", "_correction_factor = 2 * num")}),
    Plant(
        "KL mean inlined",
        {WRAPPER: (KL_MEAN, "((kl_loss * loss_mask).sum(-1) / loss_mask.sum(-1).clamp(min=1)).mean()")},
        "The kl term went through a reducer of this library in no",
    ),
    Plant(
        "KL mean taken twice",
        {WRAPPER: (KL_MEAN, f"{KL_MEAN} + {KL_MEAN}")},
        "The kl term went through a reducer of this library several times",
    ),
    Plant(
        "entropy by another function",
        {WRAPPER: ("vocab_parallel_entropy_packed_sequences", "vocab_parallel_entropy_of_packed_sequences"),
         MODEL: ("def vocab_parallel_entropy_packed_sequences", "def vocab_parallel_entropy_of_packed_sequences")},
        "SkyRL with no .*vocab_parallel_entropy_packed_sequences",
    ),
    Plant(
        "entropy mean inlined",
        {WRAPPER: (ENTROPY_MEAN, ENTROPY_MEAN.replace("masked_mean(entropy_BS, loss_mask)", "entropy_BS.mean()"))},
        "The entropy term went through a reducer of this library in no",
        {"packed": False},
    ),
    Plant(
        "padding counted in KL, entropy and MTP",
        {WRAPPER: ("= num_microbatches / max(1, num_real_microbatches)", "= 1.0")},
        "on (kl|entropy|mtp 0): tokens weigh",
        {"tokens": 24}, (2, 1),
    ),
    Plant(
        "MTP losses doubled",
        {WRAPPER: ("per_layer_losses).mean()", "per_layer_losses).mean() * 2")},
        "on mtp 0: tokens weigh",
    ),
    Plant(
        "entropy bonus left out",
        {WRAPPER: ("(kl_loss_term - entropy_loss_term)", "kl_loss_term")},
        "The entropy term has a coefficient, -0.02, and no gradient reaches it",
    ),
    Plant(
        "last tokens masked in every function",
        {WRAPPER: ('= data["loss_mask"]', '= data["loss_mask"] * (data["loss_mask"].flip(1).cumsum(1).flip(1) > 1)')},
        case={"mode": "constant", "settings": {"divisor": 40.0}, "terms": []},
    ),
    Plant("another loss than was registered", {}, "SkyRL trained with another loss", {"unset": True}),
    Plant("mask moved", {WRAPPER: ('= data["loss_mask"]', '= data["loss_mask"].roll(1, 1)')}),
    Plant(
        "loss not linear in advantages",
        {LOSSES: ("surr1 = ratio * adv", "advantages = advantages.sign(); surr1 = ratio * adv")},
    ),
    Plant("policy loss computed twice", {WRAPPER: (AFTER_LOSS, LOSS_AGAIN)}),
    Plant("advantages doubled in the worker", {WRAPPER: ('= data["advantages"]', '= 2 * data["advantages"]')}),
    Plant(
        "backward of the gather doubled",
        {MODEL: ("return grad_input, None", "return 2 * grad_input, None")},
        "arrive 2 times at the model's output", world=(2, 2),
    ),
    Plant("own weights times 1.25", {}, "tokens weigh 1.25 times", {"weighed": 1.25}),
]  # fmt: skip


TRAINER, PREPROCESS = "skyrl/train/trainer.py", "skyrl/train/dataset/preprocess.py"
WEIGHTS = "SkyRL's trainer gives response token"
OF_TRAINER = [
    Plant(
        "tokens of one row in SkyRL's mean",
        {LOSSES: ("advantages / loss_mask.sum()", "advantages / loss_mask.sum(-1, keepdim=True)")},
        f"loss_reduction=token_mean: {WEIGHTS}", {"mode": "token_mean"},
    ),
    Plant(
        "prompt means divided by rows",
        {LOSSES: ("(num_prompts * prompt_tokens)", "(batch_size * prompt_tokens)")},
        f"loss_reduction=prompt_mean: {WEIGHTS}", {"mode": "prompt_mean"},
    ),
    Plant(
        "prompts of a mini-batch moved by a row",
        {TRAINER: ("(p_start - start_idx, p_end - start_idx)", "(p_start - start_idx + 1, p_end - start_idx + 1)")},
        f"loss_reduction=prompt_mean: {WEIGHTS}", {"mode": "prompt_mean"},
    ),
    Plant(
        "first row in no prompt",
        {PREPROCESS: ("] = set()\n    start = 0", "] = set()\n    start = 1")},
        "each row must be in one prompt", {"mode": "prompt_mean"},
    ),
    Plant(
        "advantages divided twice",
        {TRAINER: ('data["advantages"] = normalized_advantages', 'data["advantages"] = normalized_advantages / 2')},
        f"loss_reduction=sequence_mean: {WEIGHTS}",
    ),
]  # fmt: skip


def divide(root: str, cp: int, cases: list[dict[str, Any]]) -> list[tuple[list[str], list[float]]]:
    """Of the trainer alone, without a worker: our lines, and each token's weighed advantage, for two mini-batches."""
    names = ("skyrl.backends.skyrl_train.utils.ppo_utils", "skyrl.backends.skyrl_train.training_batch")
    ppo_utils, batches, preprocess = load(SKYRL, root, *names, "skyrl.train.dataset.preprocess")
    trainers = load_trainer(root)

    from megatron_rl_loss.engines import replacing, skyrl

    results = []
    for case in cases:
        os.environ["MEGATRON_RL_LOSS_PROOF"] = case.get("proof", "error")
        skyrl.AggregatedPolicyLoss("regular", group_size=4)
        pickle.loads(pickle.dumps(ppo_utils.AdvantageEstimatorRegistry.get("megatron_rl_loss")))
        cuts, convert = case.get("cuts", [0, 4, ROWS]), preprocess.convert_prompts_responses_to_batch_tensors
        normalize = partial(by_trainer, trainers, config(case), None, batches.TrainingInputBatch, cuts)
        dtype = case.get("dtype", torch.float32)

        def normalized(whole: Any, normalize: Any = normalize, dtype: torch.dtype = dtype) -> Any:
            return normalize(whole | {"advantages": whole["advantages"].to(dtype)})

        data = data_of(slice(None), normalized, convert)
        replacing.installed("SkyRL trainer").undo()
        results.append((replacing.active(), data["advantages"].flatten().tolist()))
    return results


def test_what_the_trainer_divides_by_is_measured() -> None:
    """Of each mini-batch apart, whether SkyRL whitens advantages or not, of any dtype; and it changes nothing."""
    changes: list[dict[str, Any]] = [{}, {"whiten": True}, {"proof": "off"}, {"dtype": torch.bfloat16}]
    cases = [{"mode": mode, "settings": {}} | change for mode in REDUCTIONS for change in changes]
    (results,) = run_ranks(1, divide, checkout(SKYRL), 1, cases)
    lines, _ = results[-1]
    assert [line.partition("=")[2] for line in lines if "measured in" in line] == [
        f"{own}, measured in SkyRL's own division of advantages: each of the step's 74 tokens has the weight of {mode}"
        + f" with divisor {LENGTH}" * (mode == "constant")
        for mode, own in REDUCTIONS.items()
    ]
    for (_, measured), (_, whitened), (_, unmeasured), _ in zip(*[iter(results)] * 4, strict=True):
        assert measured == unmeasured != whitened


@pytest.mark.parametrize("plant", OF_TRAINER, ids=lambda plant: plant.fault)
def test_a_fault_of_the_trainer_stops(record_property: Any, tmp_path: Path, plant: Plant) -> None:
    assert_stops(record_property, SKYRL, divide, plant, tmp_path)
    root, warned = str(tmp_path), plant.case | {"settings": {}, "proof": "warn"}
    ((lines, _),) = run_ranks(1, divide, root, 1, [{"mode": "sample_mean"} | warned])[0]
    assert any(re.search(plant.match, line) for line in lines)


def test_prompts_that_other_rows_have_are_not_proved(record_property: Any, tmp_path: Path) -> None:
    """Boundaries that lie one row too late."""
    given, moved = (f"append((start, {end}))\n            start = {end}" for end in ("i", "i + 1"))
    root = planted(SKYRL, tmp_path, {PREPROCESS: (given, moved)})
    ((lines, _),) = run_ranks(1, divide, root, 1, [{"mode": "prompt_mean", "settings": {}, "cuts": [0, 5, ROWS]}])[0]
    assert any("NOT PROVED: the prompt id '0' stands at rows with different prompt tokens" in line for line in lines)
    record_plant(record_property, SKYRL, "boundaries of prompts moved by a row", "says that it is not proved")


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.fault)
def test_a_fault_stops(record_property: Any, tmp_path: Path, plant: Plant) -> None:
    assert_stops(record_property, SKYRL, train, plant, tmp_path)


def test_a_rank_without_a_token_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MASKED_ROWS, " ".join(map(str, range(1, ROWS, 2))))
    cases: list[Any] = [{"mode": mode, "settings": {}} for mode in ("prompt_mean", "sample_mean")]
    for results in run_ranks(4, train, checkout(SKYRL), 2, cases):
        assert max(outcome["errors"]["gradient"] for outcome in results) < TOLERANCE


def test_gradients_finalised_by_another_name_are_not_proved(record_property: Any, tmp_path: Path) -> None:
    worker = "skyrl/backends/skyrl_train/workers/megatron/megatron_worker.py"
    root = planted(SKYRL, tmp_path, dict.fromkeys((WRAPPER, worker), ("run_pending_grad_sync", "sync_grads")))
    run_ranks(2, train, root, 1, [{"mode": "sample_mean", "settings": {}, "outcome": "not proved"}])
    record_plant(record_property, SKYRL, "gradients finalised by another name", "says that it is not proved")
