"""Losses and advantages of papers by the code of those who train with them, by ours, and by float64.

TRL's `_compute_loss` (TRL_PATH), prime-rl's `ipo_loss_fn` (PRIME_RL_PATH), slime's KL (SLIME_PATH), GDPO in verl,
NeMo-RL and ms-swift, verl's GMPO, GSPO and k3 (VERL_PATH, NEMO_RL_PATH, MS_SWIFT_PATH). CFPO is in none of them: verl
#5252 is open.
verl whitens GDPO's sums over tokens, the others over samples: the same here, where responses have one token.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import sequence_formulas as stated
import torch
from checkouts import MS_SWIFT, NEMO_RL, PRIME_RL, SLIME, TRL, VERL, Framework, Settings, checkout, load, record_errors
from ranks import run_ranks
from table_step import relative_error
from torch import Tensor

from megatron_rl_loss import Gate, Samples, importance_weights, kl_estimate, policy_loss
from megatron_rl_loss.losses.advantages import gdpo_advantages

LENGTHS, BETA = [5, 1, 9, 7], 0.04
#: Theirs sum and divide in float32.
TOLERANCE = 2e-6

pytestmark = pytest.mark.slow


def batch() -> dict[str, Tensor]:
    """Padded rows in float32, log-ratios on both sides of every bound; a token in the midst is masked."""
    generator = torch.Generator().manual_seed(2)

    def drawn(width: float) -> Tensor:
        return width * (2 * torch.rand(len(LENGTHS), max(LENGTHS), generator=generator) - 1)

    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).float()
    mask[2, 3] = 0
    old = -1.5 + drawn(1)
    return {
        "mask": mask,
        "old_log_probs": old,
        "log_probs": old + drawn(0.6).clamp(max=-0.01 - old),
        "rollout_log_probs": old + drawn(0.5),
        "token_advantages": torch.tensor([1.0, -1.5, 0.7, -0.4])[:, None].expand_as(mask),
    }


# --- theirs: a loss of the step, from the log-probs that are trained


def of_trl(module: Any, x: Tensor, v: dict[str, Tensor], **settings: Any) -> Tensor:
    trainer = Settings(
        _get_per_token_logps_and_entropies=lambda *_, **__: (x, torch.zeros_like(x), None),
        _metrics={"train": defaultdict(list)},
        top_entropy_quantile=1.0, importance_sampling_level="token", beta=0.0, epsilon_low=0.2, epsilon_high=0.2,
        get_gamma_weights=module.GRPOTrainer.get_gamma_weights, model=Settings(training=True),
        accelerator=Settings(num_processes=1, reduce=lambda values, reduction: values, gather=lambda values: values),
    )  # fmt: skip
    rates = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    trainer.args = Settings(**rates, use_bias_correction_kl=True)
    vars(trainer).update(settings)
    mask = v["mask"]
    inputs = {"prompt_ids": mask, "prompt_mask": mask, "completion_ids": mask, "completion_mask": mask}
    inputs |= {"advantages": v["token_advantages"][:, 0], "old_per_token_logps": v["old_log_probs"]}
    inputs |= {"ref_per_token_logps": v["rollout_log_probs"], "num_items_in_batch": mask.sum()}
    if trainer.vllm_importance_sampling_correction:
        inputs["importance_sampling_ratio"] = torch.where(mask > 0, stated.mismatch(v).exp().clamp(max=1.3), 1)
    return module.GRPOTrainer._compute_loss(trainer, None, inputs)


def of_prime_rl(module: Any, x: Tensor, v: dict[str, Tensor]) -> Tensor:
    config = Settings(ipo_threshold=0.1, eps=0.1, adv_tau=1.0, kl_tau=BETA)
    rows = zip(x, v["old_log_probs"], v["token_advantages"], v["mask"].bool(), strict=True)
    inputs = [module.LossInputs(row, old, None, advantages, mask) for row, old, advantages, mask in rows]
    return sum(module.ipo_loss_fn(row_inputs, config).loss for row_inputs in inputs) / v["mask"].sum()


def of_verl_loss(module: Any, x: Tensor, v: dict[str, Tensor], *, loss: str, **weights: float) -> Tensor:
    """A row at a time: its mean over the row, times the row's tokens, is the step's sum."""
    module.ActorConfig = Settings
    config = Settings(clip_ratio=0.2, clip_ratio_low=0.1, clip_ratio_high=0.15, global_batch_info={})
    of_rows = []
    for i, mask in enumerate(v["mask"]):
        row = [column[None] for column in (v["old_log_probs"][i], x[i], v["token_advantages"][i], mask)]
        of_rows.append(
            getattr(module, loss)(*row, config=config, rollout_is_weights=capped(v, **weights)[i : i + 1])[0]
        )
    return (torch.stack(of_rows) * v["mask"].sum(1)).sum() / v["mask"].sum()


def of_verl_k3(module: Any, x: Tensor, v: dict[str, Tensor]) -> Tensor:
    return (module.kl_penalty(x, v["rollout_log_probs"], "low_var_kl") * v["mask"]).sum() / v["mask"].sum()


def capped(v: dict[str, Tensor], high: float) -> Tensor:
    """Weights of tokens of the policy that drew them."""
    return importance_weights(stated.mismatch(v).float(), Gate(high=high, action="clamp"))


def of_slime(module: Any, x: Tensor, v: dict[str, Tensor]) -> Tensor:
    kl = module.compute_approx_kl(x, v["rollout_log_probs"], "k3", importance_ratio=(x - v["old_log_probs"]).exp())
    return (kl * v["mask"]).sum() / v["mask"].sum()


# --- ours, and float64: losses of tokens


def ours(name: str, v: dict[str, Tensor], **settings: Any) -> Tensor:
    local = Samples(list(v["mask"])).local(0, 1)
    now, old, advantages = (v[key].flatten() for key in ("log_probs", "old_log_probs", "token_advantages"))
    return policy_loss(name, now, old, advantages, local, **settings).per_token_loss.view_as(v["mask"])


def weighted_k3(v: dict[str, Tensor]) -> Tensor:
    return kl_estimate(v["log_probs"], v["rollout_log_probs"], v["mask"], old_log_probs=v["old_log_probs"])


def ipo(v: dict[str, Tensor]) -> Tensor:
    """IPO's KL, (log r)^2, is twice k2, to the policy that drew the tokens."""
    k2 = kl_estimate(v["log_probs"], v["old_log_probs"], v["mask"], estimator="k2")
    return ours("ipo", v, threshold=0.1) + 2 * BETA * k2


def vespo_from_rollouts(v: dict[str, Tensor]) -> Tensor:
    weights = importance_weights(stated.mismatch(v), Gate(high=1.3, action="clamp"))
    return ours("vespo", v | {"old_log_probs": v["old_log_probs"] - weights.log()})


def stated_from_rollouts(v: dict[str, Tensor], m: Tensor) -> Tensor:
    return stated.vespo(v | {"old_log_probs": v["old_log_probs"] - stated.mismatch(v).exp().clamp(max=1.3).log()}, m)


def gmpo_with_rollout_weights(v: dict[str, Tensor]) -> Tensor:
    """No token's weight is capped: the geometric mean of a sequence's weights is exp of its mean log-ratio."""
    local = Samples(list(v["mask"])).local(0, 1)
    weights = importance_weights(stated.mismatch(v).flatten(), Gate(high=9.0, level="sequence", action="clamp"), local)
    return ours("gmpo", v, clip_low=0.1, clip_high=0.15, importance_weights=weights)


def stated_gmpo(v: dict[str, Tensor], m: Tensor) -> Tensor:
    c, a = stated.log_ratio(v), v["token_advantages"]
    c = torch.where(a < 0, c.clamp(min=-0.1), c.clamp(max=0.15))
    weight = ((stated.mismatch(v) * m).sum() / m.sum()).exp().detach()
    return -a * ((c * m).sum() / m.sum()).exp() * weight


def gspo_with_rollout_weights(v: dict[str, Tensor]) -> Tensor:
    weights = capped(v, high=1.3).flatten()
    return ours("gspo_token", v, clip_low=0.1, clip_high=0.15, importance_weights=weights)


def stated_gspo(v: dict[str, Tensor], m: Tensor) -> Tensor:
    s = ((stated.log_ratio(v) * m).sum() / m.sum()).exp().detach() * (v["log_probs"] - v["log_probs"].detach()).exp()
    a = v["token_advantages"]
    return torch.maximum(-a * s, -a * s.clamp(0.9, 1.15)) * stated.mismatch(v).exp().clamp(max=1.3).detach()


def with_kl(v: dict[str, Tensor], m: Tensor) -> Tensor:
    return stated.ppo(v, m, high=0.2, dual=None) + BETA * stated.weighted_k3(v, m)


VESPO: dict[str, Any] = {"loss_type": "vespo", "use_vllm": True}
CASES: dict[str, tuple[Framework, str, str, Callable[..., Tensor], Any, Any]] = {
    "`vespo`": (TRL, "", "trl.trainer.grpo_trainer", partial(of_trl, **VESPO), partial(ours, "vespo"), stated.vespo),
    "`vespo`, capped ratios": (
        TRL, "", "trl.trainer.grpo_trainer", partial(of_trl, **VESPO, vllm_importance_sampling_correction=True),
        vespo_from_rollouts, stated_from_rollouts,
    ),
    "`use_bias_correction_kl`": (
        TRL, "", "trl.trainer.grpo_trainer", partial(of_trl, loss_type="dapo", beta=BETA),
        lambda v: ours("ppo", v) + BETA * weighted_k3(v), with_kl,
    ),
    "`ipo_loss_fn`": (
        PRIME_RL, "/src", "prime_rl.trainer.rl.loss", of_prime_rl, ipo,
        lambda v, m: stated.ipo(v, m, threshold=0.1) + BETA * stated.log_ratio(v).square(),
    ),
    "`geo_mean` with rollout weights": (
        VERL, "", "verl.trainer.ppo.core_algos",
        partial(of_verl_loss, loss="compute_policy_loss_geo_mean", high=9.0), gmpo_with_rollout_weights, stated_gmpo,
    ),
    "`gspo` with rollout weights": (
        VERL, "", "verl.trainer.ppo.core_algos", partial(of_verl_loss, loss="compute_policy_loss_gspo", high=1.3),
        gspo_with_rollout_weights, stated_gspo,
    ),
    "`low_var_kl` within its clamps": (
        VERL, "", "verl.trainer.ppo.core_algos", of_verl_k3,
        lambda v: kl_estimate(v["log_probs"], v["rollout_log_probs"], v["mask"]),
        lambda v, m: (d := v["log_probs"] - v["rollout_log_probs"]) + torch.expm1(-d),
    ),
    "`use_unbiased_kl`": (SLIME, "", "slime.utils.ppo_utils", of_slime, weighted_k3, stated.weighted_k3),
}  # fmt: skip


def errors(root: str, setting: str) -> list[float]:
    """On a rank: of the gradients of theirs and of ours."""
    framework, below, name, theirs, mine, formula = CASES[setting]
    (module,) = load(framework, root + below, name)
    v = batch()
    exact = {key: value.double() for key, value in v.items()}
    leaves = [columns["log_probs"].clone().requires_grad_() for columns in (exact, v, v)]
    rows = exact | {"log_probs": leaves[0]}
    losses = [formula({key: column[i] for key, column in rows.items()}, exact["mask"][i]) for i in range(len(LENGTHS))]
    of_tokens = torch.stack(losses), mine(v | {"log_probs": leaves[1]})
    expected, ours = (torch.where(v["mask"] > 0, of_way, 0).sum() / v["mask"].sum() for of_way in of_tokens)
    for loss in (expected, ours, theirs(module, leaves[2], v)):
        loss.backward()
    right, *gradients = (leaf.grad for leaf in leaves)
    return [relative_error(gradient, right) for gradient in gradients[::-1]]


@pytest.mark.parametrize("setting", CASES)
def test_their_loss_is_ours(setting: str, record_property: Any) -> None:
    framework = CASES[setting][0]
    ((own, with_ours),) = run_ranks(1, errors, checkout(framework), setting)
    record_errors(record_property, framework, setting, own, with_ours)
    assert max(own, with_ours) < TOLERANCE


# --- GDPO: two rewards of responses to three prompts

GROUP, WEIGHTS = 4, (1.0, 0.5)


def rewards() -> Tensor:
    return torch.tensor(
        [[1, 0], [0, 0], [1, 3], [0, -3], [1, 1], [1, 2], [0, 2], [0, 0], [0, 1], [1, 1], [1, 0], [1, 0.5]]
    )


def of_verl(module: Any) -> Tensor:
    size = len(rewards())
    named = {f"reward{k}": column.numpy() for k, column in enumerate(rewards().T)}
    prompts = torch.arange(size).div(GROUP, rounding_mode="floor").numpy()
    advantages, _ = module.compute_gdpo_outcome_advantage(
        torch.zeros(size, 1), torch.ones(size, 1), prompts, non_tensor_batch=named,
        config={"gdpo_reward_keys": list(named), "gdpo_reward_weights": WEIGHTS},
        batch={"prompts": torch.zeros(size, 1), "attention_mask": torch.ones(size, 2).long()},
    )  # fmt: skip
    return advantages[:, 0]


def of_nemo_rl(module: Any) -> Tensor:
    config = SimpleNamespace(use_leave_one_out_baseline=False, normalize_rewards=True, reward_weights=WEIGHTS)
    prompts = torch.arange(len(rewards())).div(GROUP, rounding_mode="floor")[:, None]
    named = {f"reward/{k}": column for k, column in enumerate(rewards().T)}
    return module.GDPOAdvantageEstimator(config, None).compute_advantage(
        prompts, None, torch.ones(len(prompts), 1), named
    )[:, 0]


def of_ms_swift(module: Any) -> Tensor:
    return module.compute_advantages(rewards(), torch.tensor(WEIGHTS), GROUP, scale_rewards="gdpo")[0]


ADVANTAGES: dict[str, tuple[Framework, str, Callable[[Any], Tensor], float]] = {
    "verl": (VERL, "verl.trainer.ppo.core_algos", of_verl, 1e-6),
    "NeMo-RL": (NEMO_RL, "nemo_rl.algorithms.advantage_estimator", of_nemo_rl, 1e-6),
    "ms-swift": (MS_SWIFT, "swift.rl_core.advantage", of_ms_swift, 1e-8),
}


def advantages(root: str, name: str) -> Tensor:
    framework, module, theirs, _ = ADVANTAGES[name]
    return theirs(*load(framework, root, module))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_their_gdpo_is_ours(name: str, record_property: Any) -> None:
    framework, _, _, epsilon = ADVANTAGES[name]
    (theirs,) = run_ranks(1, advantages, checkout(framework), name)
    grouped = rewards().double().view(-1, GROUP, 2)
    normalised = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + epsilon)
    together = (normalised * torch.tensor(WEIGHTS)).sum(-1).flatten()
    right = (together - together.mean()) / (together.std() + epsilon)
    prompts = [i // GROUP for i in range(len(right))]
    mine = gdpo_advantages(list(rewards().T), prompts, weights=WEIGHTS, epsilon=epsilon)
    own, with_ours = (relative_error(values, right) for values in (theirs, mine))
    record_errors(record_property, framework, "GDPO", own, with_ours)
    assert max(own, with_ours) < TOLERANCE
