"""Losses by name: clip flags, the modes that they go with, and refusals."""

import inspect
from functools import partial
from typing import Any

import oracle
import pytest
import torch
from refusals import refusal_tests, refusals

from megatron_rl_loss import Samples, kl_estimate, policy_loss, value_loss
from megatron_rl_loss.core.aggregation import resolve
from megatron_rl_loss.losses.by_name import POLICY_LOSSES, check_goes_with, formula_of
from megatron_rl_loss.losses.token import dppo_loss

HELD = Samples([[1, 1, 0], [1, 1]]).local(0, 1)
OLDS, ACTIVE = torch.full((5,), -2.0), [0, 1, 3, 4]
# Mean log-ratios over the masks: 0.2 and -0.1. The third token is masked.
LOG_RATIOS = torch.tensor([0.5, -0.1, 1.0, -0.3, 0.1])


@pytest.mark.parametrize(
    ("name", "clip", "advantages", "clipped"),
    [
        ("ppo", (0.2, 0.3), (1, 1), [1, 0, 0, 0]),
        ("ppo", (0.2, 0.3), (-1, 0), [0, 0, 0, 0]),
        ("ppo", (0.09, 0.3), (0, -1), [0, 0, 1, 0]),
        ("cispo", (0.2, 0.3), (-1, 1), [1, 0, 1, 0]),
        ("gspo", (0.5, 0.5), (1, 1), [0, 0, 0, 0]),
        ("gspo", (0.05, 0.1), (1, 1), [1, 1, 0, 0]),
        ("gspo", (0.05, 0.1), (-1, -1), [0, 0, 1, 1]),
        ("gspo_token", (0.05, 0.1), (1, -1), [1, 1, 1, 1]),
        ("gmpo", (0.4, 0.4), (1, 1), [1, 0, 0, 0]),  # 0.5 to 0.4
        ("gmpo", (0.2, 0.4), (-1, -1), [0, 0, 1, 0]),  # -0.3 to -0.2
    ],
)
def test_what_is_clipped(name: str, clip: Any, advantages: Any, clipped: list[float]) -> None:
    token_advantages = torch.tensor(advantages).float().repeat_interleave(torch.tensor([3, 2]))
    loss = policy_loss(name, OLDS + LOG_RATIOS, OLDS, token_advantages, HELD, clip_low=clip[0], clip_high=clip[1])
    assert loss.clipped[ACTIVE].tolist() == clipped
    assert loss.ppo_kl[ACTIVE].tolist() == pytest.approx((-LOG_RATIOS[ACTIVE]).tolist(), abs=1e-6)


Aggregations = list[tuple[str, float | None]]
#: The only modes that a loss goes with, if it does not go with all.
GOES_WITH: dict[str, Aggregations] = {
    "gspo": [("sample_mean", None)],
    "gmpo": [("sample_mean", None)],
    "luspo": [("constant", 1.0)],
}
AGGREGATIONS: Aggregations = [(mode, oracle.divisor_of(mode, 3.0, optional=True)) for mode in oracle.MODES]
AGGREGATIONS += [("constant", 1.0)]


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_name_is_its_function_and_goes_with_its_modes(name: str) -> None:
    function, tokens = POLICY_LOSSES[name].compute, (OLDS + LOG_RATIOS, OLDS, torch.ones(5), HELD)
    assert torch.equal(policy_loss(name, *tokens, clip_low=None).per_token_loss, function(*tokens).per_token_loss)
    assert ("cp_group" in inspect.signature(function).parameters) == POLICY_LOSSES[name].per_sequence
    for mode, divisor in AGGREGATIONS:
        if (mode, divisor) in GOES_WITH.get(name, AGGREGATIONS):
            goes(name, mode, divisor)
        else:
            with pytest.raises(ValueError, match=f"the policy loss {name} aggregated by {mode}, divisor"):
                goes(name, mode, divisor)
    check_goes_with(name, resolve(lambda inputs: 1.0))  # a user's own mode


# --- refusals: what is wrong, the text, and the nearest legal neighbour


def goes(name: str, mode: str = "sample_mean", divisor: float | None = None, **settings: Any) -> None:
    check_goes_with(name, resolve(mode, divisor=divisor), **settings)


FIVE, ONE, COLUMN, NONE, OFTEN = torch.zeros(5), torch.zeros(1), torch.zeros(5, 1), dict[str, Any](), torch.ones(5)
LIKELY, RARE = torch.tensor([0.09, -1, 0, 0, 0]), torch.tensor([2e-5, 0.03, 0.02, 1e-4, 2e-5])  # probabilities are RARE
WITH_GRAPH = torch.ones(5, requires_grad=True)
CLIPPED, SAPO = {"returns": FIVE, "clip": 0.1, "old_values": FIVE}, {"name": "sapo", "tau_positive": 0.9}


def call(
    name: str = "ppo", log_probs: Any = FIVE, old_log_probs: Any = FIVE, advantages: Any = FIVE, **changed: Any
) -> Any:
    return policy_loss(name, log_probs, old_log_probs, advantages, changed.pop("local", HELD), **changed)


RANGE = r"it must be a number in"
REFUSALS = {
    **refusals(
        goes,
        (("grpo",), "there is no such policy loss.+Choose one of ppo, cispo", ("ppo",)),
        (SAPO | {"clip_low": 0.2}, "clip_low=0.2 for the policy loss sapo: this loss", SAPO | {"clip_low": None}),
        ({"name": "gspo", "dual_clip": 3.0}, "dual_clip=3.0 for the policy loss gspo", {"name": "ppo", "dual_clip": 3}),
        (("gspo", "token_mean"), "gspo aggregated by token_mean.+by sample_mean alone", ("gspo_token", "token_mean")),
        (("luspo", "constant", 2.0), "divisor 2.0.+by constant with divisor 1 alone", ("luspo", "constant", 1.0)),
    ),
    **refusals(
        call,
        ({"old_log_probs": ONE}, r"old_log_probs of shape \(1,\) for values of shape \(5,\)", {"advantages": ONE}),
        ({"advantages": COLUMN}, r"advantages of shape \(5, 1\)", {"advantages": ONE}),
        ({"advantages": WITH_GRAPH}, "advantages that require grad.*Detach them", NONE),
        ({"importance_weights": COLUMN}, r"importance_weights of shape \(5, 1\)", {"importance_weights": FIVE}),
        ({"local": COLUMN}, r"a mask of shape \(5, 1\)", {"local": OFTEN.bool().numpy()}),
        ({"log_probs": FIVE[:4].view(2, 2), "old_log_probs": FIVE[:4].view(2, 2), "local": OFTEN[:4].view(2, 2) * 0 + 1,
          "advantages": FIVE[:2]}, r"advantages of shape \(2,\) for values of shape \(2, 2\).* one value for each row",
         {"log_probs": FIVE[:4].view(2, 2), "old_log_probs": FIVE[:4].view(2, 2), "local": OFTEN[:4].view(2, 2) * 0 + 1,
          "advantages": FIVE[:2, None]}),
        ({"importance_weights": FIVE - 2}, "importance_weights with values down to .* weights are ratios",
         {"importance_weights": FIVE.exp()}),
        ({"local": torch.tensor([1.0, 0, 1, -100, 1])}, "a mask with -100: .*neither labels, token ids nor an", NONE),
        ({"local": torch.tensor([1.0, 0, 1, torch.nan, 1])}, "a mask with nan", NONE),
        ({"local": torch.tensor([1.0, 0, 1, torch.inf, 1])}, "a mask with inf", {"local": OFTEN * 1e9}),
        ({"local": torch.tensor([17, 0, 5, 1, 1])}, "a mask with 17: .*integers has 0 and 1.*token ids",
         {"local": torch.tensor([1, 0, 1, 1, 1])}),
        ({"local": torch.tensor([17, 0, 5, -100, 1]).numpy()}, "a mask with -100", {"local": OFTEN.int().numpy()}),
        ({"clip_low": 0.8}, "ratio would be clipped at 0.2 and 1.8. Pass 0.2 for a bound of 0.8",
         {"clip_low": 0.2, "clip_high": 0.3}),
        ({"clip_low": 0.8, "clip_high": 0.28}, "clipped at 0.2 and 1.28. Pass clip_low=0.2 for a bound of 0.8",
         {"clip_low": 0.8, "clip_high": 0.8}),
        ({"clip_low": 0}, rf"clip_low is 0: {RANGE} \(0, 1\]", {"clip_low": 1e-3}),
        ({"clip_high": 0.0}, rf"clip_high is 0.0: {RANGE} \(0, inf\)", {"clip_high": 3}),
        ({"clip_high": 1.28}, "width above 1, .* clipped at 2.28. Pass 0.28 for a bound of 1.28", {"clip_high": 0.28}),
        ({"dual_clip": 1}, rf"dual_clip is 1: {RANGE} \(1, inf\)", {"dual_clip": 1.001}),
        ({"log_probs": LIKELY * 2}, "log_probs with values up to 0.18: .*order of the arg", {"log_probs": LIKELY}),
        ({"old_log_probs": -FIVE.log()}, "old_log_probs with values up to inf", {"log_probs": FIVE.log()}),
        ({"log_probs": RARE}, "^log_probs with values up to 0.03, none below 0: .*log-probs for probabilities",
         {"log_probs": RARE.log()}),
        ({"old_log_probs": RARE.double()}, "^old_log_probs with values up to 0.03, none below 0",
         {"old_log_probs": RARE.bfloat16()}),  # whose roundings are as large
        ({"log_probs": FIVE + 2e-5}, "up to 2e-05, none below 0", {"log_probs": FIVE + 5e-6, "old_log_probs": FIVE}),
        ({"name": "sapo", "tau_negative": 0.0}, rf"tau_negative is 0.0: {RANGE} \[0.1, 100\]", {"name": "sapo"}),
        ({"name": "dppo_tv", "threshold": 1.0}, rf"1.0: {RANGE} \(0, 1\)", {"name": "dppo_kl", "threshold": 1.0}),
        ({"name": "ipo", "threshold": 1.0}, rf"1.0: {RANGE} \(0, 1\)", {"name": "ipo", "threshold": 0.99}),
        ({"name": "cfpo", "epsilon": 0.0}, rf"epsilon is 0.0: {RANGE} \(0, 1\]", {"name": "cfpo", "epsilon": 1}),
        ({"name": "vespo", "k_negative": 0}, rf"k_negative is 0: {RANGE} \(0, 100\]", {"name": "vespo"}),
        ({"name": "vespo", "lambda_positive": 0.0}, rf"lambda_positive is 0.0: {RANGE} \[1e-4", {"name": "vespo"}),
        ({"name": "gmpo", "clip_low": 0.0}, rf"clip_low is 0.0: {RANGE} \(0, inf\)", {"name": "gmpo", "clip_low": 1.2}),
        ({"name": "gspo", "mean_log_ratio": FIVE}, r"a statistic of shape \(5,\)", {"name": "gspo"}),
        (("gspo", FIVE[:4], FIVE[:4], ONE), r"a loss's input of shape \(4,\)", ("gspo", FIVE[None], FIVE[None])),
    ),
    **refusals(
        call,
        ({"log_probs": FIVE.numpy()}, "^log_probs is a ndarray: it must be a float tensor", NONE),
        ({"advantages": 1.0}, "advantages is a float", {"advantages": torch.tensor(1.0)}),
        ({"advantages": FIVE * 1j}, "advantages is torch.complex64: it must hold real", {"advantages": FIVE.int()}),
        ({"importance_weights": FIVE * 1j}, "importance_weights is torch.complex64", {"importance_weights": FIVE}),
        ({"local": None}, "local is a NoneType: it must say which tokens", {"local": OFTEN}),
        ({"name": "gspo", "local": OFTEN}, "local is a Tensor: it must say which tokens", {"name": "gspo"}),
        ({"cp_group": 0.3}, "a process group of type float: it must be a ProcessGroup", {"clip_low": 0.3}),
        ({"old_log_probs": -OFTEN.int()}, "old_log_probs is torch.int32: it must be a float tensor", NONE),
        ({"name": "dppo_tv", "both_directions": "no"}, "both_directions is 'no': it must be True or False",
         {"name": "dppo_tv", "both_directions": False}),
        error=TypeError,
    ),
    **refusals(
        partial(dppo_loss, FIVE, FIVE, FIVE, OFTEN),
        ({"divergence": "js"}, "there is no such divergence. Choose one of tv, kl", {"divergence": "kl"}),
    ),
    **refusals(
        lambda **more: value_loss(FIVE, **{"returns": FIVE, "local": OFTEN} | more),
        ({"returns": ONE}, r"returns of shape \(1,\) for values of shape \(5,\)", NONE),
        ({"clip": 0.2}, "clip=0.2 with no old_values: values are clipped", NONE),
        ({"old_values": FIVE}, "clip=None with some old_values", NONE),
        (CLIPPED | {"clip": 0.0}, rf"clip is 0.0: {RANGE} \(0, inf\)", CLIPPED),
    ),
    **refusals(
        lambda reference=FIVE, **more: kl_estimate(FIVE, reference, OFTEN, **more),
        ((FIVE + 2,), "ref_log_probs with values up to 2, none below 0: log-probs are at most 0", (LIKELY,)),
        ({"old_log_probs": FIVE + 2}, "old_log_probs with values up to 2", {"old_log_probs": LIKELY}),
        ((RARE,), "ref_log_probs with values up to 0.03, none below 0", (RARE.log(),)),
        ({"old_log_probs": RARE}, "old_log_probs with values up to 0.03", {"old_log_probs": RARE.log()}),
        ({"estimator": "k4"}, "'k4': there is no such KL estimator. Choose one of", NONE),
        ({"estimator": 2}, "KL estimator 2: that of open-instruct is 'k3' here", {"estimator": "k3"}),
        ({"estimator": "low_var_kl"}, "that of verl and slime is 'k3' here", {"estimator": "k3"}),
        ((COLUMN,), r"ref_log_probs of shape \(5, 1\)", (FIVE,)),
        ({"old_log_probs": COLUMN}, r"old_log_probs of shape \(5, 1\)", {"old_log_probs": FIVE}),
        ({"old_log_probs": FIVE, "estimator": "k2"}, "k2 with old_log_probs: .+Take k3", {"estimator": "k2"}),
    ),
    **refusals(
        lambda reference=FIVE, **more: kl_estimate(FIVE, reference, OFTEN, **more),
        ((-OFTEN.int(),), "ref_log_probs is torch.int32: it must be a float tensor", (-OFTEN,)),
        ({"old_log_probs": -OFTEN.int()}, "old_log_probs is torch.int32", {"old_log_probs": -OFTEN}),
        error=TypeError,
    ),
}  # fmt: skip

test_refusals = refusal_tests(REFUSALS)


# --- formulas that others can carry away

TRACED = [name for name, loss in POLICY_LOSSES.items() if loss.formula is not None]
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.5},
    "cispo": {"clip_low": 0.2, "clip_high": 0.5},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", TRACED)
def test_a_formula_is_traced_by_torch_fx_and_equals_the_loss(name: str, dtype: Any) -> None:
    """Value and gradient, in ratios that overflow too; the graph has functions of torch, math and operator alone."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(64, generator=generator, dtype=dtype) - 0.1
    now = (old + 0.5 * torch.randn(64, generator=generator, dtype=dtype)).clamp(max=-0.01)
    old[:2], now[2:4] = -900.0, -60.0
    advantages = torch.randn(64, generator=generator, dtype=dtype)
    settings = SETTINGS.get(name, {})
    graph = torch.fx.symbolic_trace(formula_of(name, dtype=dtype, **settings))
    graph.graph.eliminate_dead_code()
    graph.recompile()
    for node in graph.graph.nodes:
        if node.op == "call_function":
            module = node.target.__module__ or "torch"
            assert module.partition(".")[0] in ("torch", "math", "_operator", "_VariableFunctions"), node
        assert node.op in ("placeholder", "output", "call_function", "call_method"), node
    results = []
    for loss in (
        lambda leaf: graph(leaf, old, advantages),
        lambda leaf: policy_loss(name, leaf, old, advantages, torch.ones(64), **settings).per_token_loss,
    ):
        leaf = now.clone().requires_grad_()
        losses = loss(leaf)
        assert losses.dtype == dtype
        results.append((losses.detach(), torch.autograd.grad(losses.sum(), leaf)[0]))
    for traced, eager in zip(*results, strict=True):
        assert eager.isfinite().all()
        torch.testing.assert_close(traced, eager, rtol=1e-7, atol=0)


test_refused_formulas = refusal_tests(
    refusals(
        formula_of,
        (("gspo",), "the formula of gspo with no settings: only losses of single tokens", ("sapo",)),
        ({"name": "ppo", "tau_positive": 2.0}, "this loss takes clip_low", {"name": "sapo", "tau_positive": 2.0}),
        ({"name": "ppo", "importance_weights": 1}, "without importance weights", {"name": "ppo"}),
        ({"name": "ppo", "clip_low": 0.0}, "clip_low is 0.0", {"name": "ppo", "clip_low": 0.1}),
    )
)
