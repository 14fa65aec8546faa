"""The guards of verl's `agg_loss`, and the installer, by modules of verl's shape.

real/test_real_verl.py has verl's own formulas with them, where there is a checkout; CI has none, and skips it.
"""

import contextlib
import functools
import importlib
import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl_loss.core.taps import Taps, observe
from megatron_rl_loss.engines import replacing, verl

NAN = float("nan")
LOSSES, MASK = torch.tensor([[1.0, 2, NAN], [4, NAN, NAN]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
WHOLE = {"batch_num_tokens": 12, "global_batch_size": 4, "loss_scale_factor": 8}
MODES = {
    "token-mean": 7 / 12,
    "token-sum": 7,
    "seq-mean-token-sum": 7 / 4,
    "seq-mean-token-sum-norm": 7 / 4 / 8,
    "seq-mean-token-mean": (1.5 + 4) / 4,
}


def verls_own(
    loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str, dp_size: int = 1, batch_num_tokens: Any = None,
    global_batch_size: Any = None, loss_scale_factor: Any = None,
) -> Tensor:  # fmt: skip
    """verl's formulas of these modes."""
    rows = (loss_mat * loss_mask).sum(-1)
    if loss_agg_mode.startswith("token"):
        return rows.sum() / (batch_num_tokens if loss_agg_mode == "token-mean" else 1)
    size = loss_scale_factor if loss_agg_mode.endswith("norm") else 1
    lengths = loss_mask.sum(-1) + 1e-8 if loss_agg_mode.endswith("token-mean") else 1
    return (rows / lengths).sum() / global_batch_size / size


def call(mode: str = "token-mean", losses: Tensor = LOSSES, mask: Tensor = MASK, **changes: Any) -> Tensor:
    arguments = {"loss_mat": losses, "loss_mask": mask, "loss_agg_mode": mode, **WHOLE, **changes}
    share: Tensor = verl._agg_loss(verl._Running(), lambda: verls_own(**arguments), arguments)
    return share


@pytest.mark.parametrize("mode", MODES)
def test_masked_losses_are_not_looked_at_and_half_precision_is_summed_in_float32(mode: str) -> None:
    leaf = LOSSES.clone().requires_grad_()
    share = call(mode, leaf)
    assert float(share.detach()) == pytest.approx(MODES[mode])
    (gradient,) = torch.autograd.grad(share, leaf)
    assert bool((gradient[MASK == 0] == 0).all())
    assert bool((gradient[MASK != 0] != 0).all())
    assert call(mode, LOSSES.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("mode", MODES)
def test_missing_counts_and_steps_without_tokens(mode: str) -> None:
    unused: dict[str, Any] = {"loss_scale_factor": None} if mode != "seq-mean-token-sum-norm" else {}
    unused["global_batch_size" if mode.startswith("token") else "batch_num_tokens"] = None
    assert float(call(mode, **unused)) == float(call(mode)), "what a mode does not use may be missing"
    for zero in (0, torch.tensor(0)):
        leaf = torch.full((2, 3), NAN, requires_grad=True)
        share = call(mode, leaf, torch.zeros(2, 3), batch_num_tokens=zero, global_batch_size=zero)
        assert float(share.detach()) == 0
        assert not torch.autograd.grad(share, leaf)[0].any()


def test_an_audit_sees_the_losses() -> None:
    taps, leaf = Taps(), LOSSES.clone().requires_grad_()
    with observe(taps):
        (call("seq-mean-token-sum-norm", leaf * 1) * 2).backward()
    tapped = taps.losses["pg"][0]
    assert tapped.gradient is not None
    assert tapped.gradient.tolist() == [2 / 32, 2 / 32, 0, 2 / 32, 0, 0]
    assert tapped.aggregation is not None
    assert (tapped.aggregation.mode.name, tapped.aggregation.divisor) == ("constant", 8)
    assert tapped.coef is not None
    assert math.isnan(tapped.coef), "in a loss of one's own"
    assert tapped.samples is not None
    assert tapped.samples.layout is None, "without Megatron no rank shares rows"


def test_steps_of_another_engine_are_said_not_to_be_proved(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(replacing, "_REGISTRY", {})
    call(losses=LOSSES.clone().requires_grad_())
    assert "verl worker 0: NOT PROVED: only steps of verl's Megatron engine are measured" in capsys.readouterr().out


@pytest.mark.parametrize("calls", [0, 1])
def test_what_a_loss_leaves_behind_is_not_the_next_ones(calls: int) -> None:
    """Also where it raises, for want of a call: a call of agg_loss by itself has no term and no batch."""
    running = verl._Running()
    checked = functools.partial(verl._checked, running, lambda arguments: [("pg", 0.5)])

    def loss() -> Tensor:
        del running.terms[:calls]
        return torch.zeros(())

    with contextlib.suppress(ValueError):
        checked(loss, {"data": {"response_mask": MASK}})
    assert (running.terms, running.mask) == ([], None)


@pytest.mark.parametrize(
    ("kept", "is_doubted"), [(MASK, False), (torch.tensor([[1, 0, 0], [1, 0, 0]]), True), (torch.ones(2, 3), False)]
)
def test_a_loss_function_may_leave_tokens_of_the_batch_out(kept: Tensor, is_doubted: bool) -> None:
    """As a recipe that drops outliers: its weights are not those of the response mask, and that is no fault."""
    taps, losses = Taps(), torch.ones(2, 3, requires_grad=True) * 1
    arguments: dict[str, Any] = {"loss_mat": losses, "loss_mask": kept, "loss_agg_mode": "token-mean", **WHOLE}
    with observe(taps):
        verl._agg_loss(verl._Running(mask=MASK), lambda: verls_own(**arguments), arguments)
    assert ("leaves out tokens" in taps.losses["pg"][0].doubt) == is_doubted


@pytest.mark.parametrize(("term", "asked"), [("pg", "token_sum"), ("entropy", "token_mean"), ("kl", "token_mean")])
def test_a_term_beside_the_policy_loss_has_the_mode_of_the_config(term: str, asked: str) -> None:
    taps, losses = Taps(), torch.ones(2, 3, requires_grad=True) * 1
    arguments: dict[str, Any] = {"loss_mat": losses, "loss_mask": MASK, "loss_agg_mode": "token-sum", **WHOLE}
    with observe(taps):
        running = verl._Running([(term, 1.0)], MASK, mode="token-mean")
        verl._agg_loss(running, lambda: verls_own(**arguments), arguments)
    aggregation = taps.losses[term][0].aggregation
    assert aggregation is not None
    assert aggregation.mode.name == asked


@pytest.mark.parametrize(
    ("mode", "changes", "text"),
    [
        ("token-mean", {"batch_num_tokens": None}, "token-mean without batch_num_tokens: verl would count this "),
        ("seq-mean-token-sum", {"global_batch_size": None}, "without global_batch_size: verl would count"),
        ("seq-mean-token-sum-norm", {"loss_scale_factor": None}, "without loss_scale_factor.*Set actor.loss_scale_fac"),
        ("token-mean", {"batch_num_tokens": 2}, "batch_num_tokens is 2 where this micro-batch alone has 3"),
        ("token-mean", {"batch_num_tokens": 0}, "batch_num_tokens is 0 where this micro-batch alone has 3"),
        ("token-mean", {"batch_num_tokens": NAN}, "batch_num_tokens is nan"),
        ("seq-mean-token-sum", {"global_batch_size": 1}, "global_batch_size is 1 where this micro-batch alone has 2"),
        ("seq-mean-token-mean", {"global_batch_size": torch.tensor(1)}, "global_batch_size is 1"),
    ],
)
def test_counts_of_a_part_of_the_step_are_refused(mode: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call(mode, LOSSES.clone().requires_grad_(), **changes)


def test_a_trainers_metric_of_a_whole_batch_is_verls_own() -> None:
    """It has no counts and no graph."""
    arguments: dict[str, Any] = {"loss_mat": LOSSES, "loss_mask": MASK, "loss_agg_mode": "token-mean"}
    assert verl._agg_loss(verl._Running(), lambda: "verl's own", arguments) == "verl's own"


# ---- the installer, on modules of verl's names


LOSSES_MODULE, TRAINER = "verl.workers.utils.losses", "verl.trainer.ppo.ray_trainer"


@pytest.fixture
def core_algos(monkeypatch: pytest.MonkeyPatch) -> Any:
    """verl's module of that name, where others took `agg_loss` from."""
    names = ["verl", "verl.trainer", "verl.trainer.ppo", "verl.trainer.ppo.core_algos", LOSSES_MODULE, TRAINER]
    modules: list[Any] = [ModuleType(name) for name in names]
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    own = functools.partial(verls_own)  # which this module has not
    modules[3].agg_loss = modules[4]._aggregate = modules[5].agg_loss = own
    modules[2].core_algos = modules[3]
    modules[3].get_policy_loss_fn = lambda name: f"verl's {name}"
    modules[3].kl_penalty = lambda logprob, ref_logprob, kl_penalty: LOSSES * 1
    modules[4].ppo_loss = lambda config, model_output, data: config.loss(modules[4]._aggregate)
    modules[4].value_loss = lambda config, model_output, data: config.loss(modules[4]._aggregate)
    monkeypatch.delitem(sys.modules, "megatron_rl_loss.engines.verl_install", raising=False)
    monkeypatch.setattr(replacing, "_REGISTRY", {})
    return modules[3]


def test_importing_the_installer_guards_agg_loss_everywhere(
    core_algos: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A module that imported it by another name is guarded too; one that imports it later, by a second call."""
    losses, trainer, own = sys.modules[LOSSES_MODULE], sys.modules[TRAINER], core_algos.agg_loss
    importlib.import_module("megatron_rl_loss.engines.verl_install")
    assert core_algos.agg_loss is losses._aggregate is trainer.agg_loss
    assert float(core_algos.agg_loss(LOSSES, MASK, "token-mean", **WHOLE)) == pytest.approx(7 / 12)
    of_algos = ", ".join(f"{core_algos.__name__}.{name}" for name in ("agg_loss", "get_policy_loss_fn", "kl_penalty"))
    of_losses = ", ".join(f"{LOSSES_MODULE}.{name}" for name in ("_aggregate", "ppo_loss", "value_loss"))
    line = f"verl: replaced {of_algos}, {TRAINER}.agg_loss, {of_losses}"
    assert replacing.active() == [line]
    losses._aggregate = own  # type: ignore[attr-defined]
    replaced = verl.install()
    assert core_algos.agg_loss is losses._aggregate
    assert capsys.readouterr().out == f"megatron_rl_loss in {line.replace(':', ' worker 0:', 1)}\n"
    replaced.undo()
    assert core_algos.agg_loss is losses._aggregate is own
    again = verl.install()
    assert core_algos.agg_loss is not own
    assert replacing.active() == [line]
    again.undo()


def test_what_the_installer_refuses(core_algos: Any) -> None:
    own, core_algos.agg_loss = core_algos.agg_loss, lambda loss_mat, loss_mask, loss_agg_mode: loss_mat
    with pytest.raises(ValueError, match=r"agg_loss\(loss_mat, loss_mask, loss_agg_mode\): .*Use verl 0.9.1"):
        verl.install()
    core_algos.agg_loss = own
    verl.install()
    assert core_algos.get_policy_loss_fn("gspo") == "verl's gspo"
    for name in ("geo_mean", "clip_cov", "kl_cov"):
        with pytest.raises(ValueError, match=f"the policy loss {name}: it .*, so it depends on how the step is cut"):
            core_algos.get_policy_loss_fn(name)

    def of_terms(calls: int, estimator: str = "") -> Any:
        """A loss of so many terms, the last of which is a KL penalty by that estimator."""

        def loss(aggregate: Any) -> Any:
            kl = [core_algos.kl_penalty(LOSSES, LOSSES, estimator)] if estimator else []
            values = [LOSSES] * (calls - len(kl)) + kl
            return sum(aggregate(term, MASK, "token-mean", **WHOLE) for term in values)

        return loss

    losses: Any = sys.modules[LOSSES_MODULE]
    for entropy, kl in itertools.product((None, LOSSES), (False, True)):
        terms = 1 + (entropy is not None) + kl
        loss, output = of_terms(terms, "low_var_kl" * kl), {"entropy": entropy}
        config = SimpleNamespace(loss=loss, use_kl_loss=kl, kl_loss_type="low_var_kl", **COEFS)
        assert float(losses.ppo_loss(config, output, BATCH)) == pytest.approx(7 / 12 * terms)
        config.loss = of_terms(terms - 1)
        with pytest.raises(ValueError, match=f"a loss of {terms} terms and {terms - 1} calls of agg_loss"):
            losses.ppo_loss(config, output, BATCH)
        for other in ("", "kl") if kl else ():
            config.loss = of_terms(terms, other)
            with pytest.raises(ValueError, match="a KL penalty that is not the low_var_kl of kl_penalty"):
                losses.ppo_loss(config, output, BATCH)
    with pytest.raises(ValueError, match="a loss of 1 terms and 0 calls of agg_loss"):
        losses.value_loss(SimpleNamespace(loss=of_terms(0)), {}, BATCH)


def test_a_measured_step_whose_advantages_are_0_keeps_its_kl_penalty(core_algos: Any) -> None:
    """Only a trial leaves it out."""
    losses: Any = sys.modules[LOSSES_MODULE]
    losses.no_padding_2_padding = lambda values, data: values
    verl.install()
    zeros = torch.zeros(MASK.shape)
    data = {"response_mask": MASK, "advantages": zeros, "old_log_probs": zeros}

    def loss(aggregate: Any) -> Any:
        log_probs = losses.no_padding_2_padding(zeros.clone().requires_grad_() * 1, data)
        of_policy = -(log_probs - data["old_log_probs"]).exp() * data["advantages"]
        penalty = core_algos.kl_penalty(log_probs, zeros, "low_var_kl")
        return sum(aggregate(term, MASK, "token-mean", **WHOLE) for term in (of_policy, penalty))

    config = SimpleNamespace(
        loss=loss, use_kl_loss=True, kl_loss_type="low_var_kl", policy_loss={}, loss_agg_mode="token-mean", **COEFS
    )  # fmt: skip
    taps = Taps()
    with observe(taps):
        taps.begin_microbatch()
        measured = losses.ppo_loss(config, {}, data)
    assert {*taps.losses} == {"pg", "advantages"}
    assert float(measured.detach()) == pytest.approx(7 / 12)


COEFS, BATCH = {"entropy_coeff": 0.1, "kl_loss_coef": 0.2}, {"response_mask": MASK}


@dataclass
class EngineOfVerl:
    """A stand-in for verl's Megatron engine: the count that verl rounds down."""

    dynamic: bool = False

    def __post_init__(self) -> None:
        self.engine_config = SimpleNamespace(dynamic_context_parallel=self.dynamic)

    def _routed_num_tokens(self, data: Tensor) -> Tensor:
        return torch.tensor(len(data))


def rounded_down(tokens: int, rank: int, size: int) -> int:
    return tokens // size


def adding_up(tokens: int, rank: int, size: int) -> int:
    """As in docs/upstream/verl-count-under-cp.patch."""
    return (tokens + rank) // size


@pytest.mark.parametrize("count", [rounded_down, adding_up])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_context_parallel_ranks_share_out_every_token(
    size: int, count: Callable[[int, int, int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: size)
    for tokens in range(9):
        shares = []
        for rank in range(size):
            returned = ("loss", torch.tensor(count(tokens, rank, size), dtype=torch.int), "output")
            monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda rank=rank: rank)
            arguments = {"self": EngineOfVerl(), "data": torch.zeros(tokens)}
            loss, share, output = verl._with_every_token(verl._Running(), functools.partial(tuple, returned), arguments)
            assert (loss, share.dtype, output) == ("loss", torch.int32, "output")
            shares.append(int(share))
            arguments["self"] = EngineOfVerl(dynamic=True)
            assert verl._with_every_token(verl._Running(), functools.partial(tuple, returned), arguments) == returned
        assert sum(shares) == tokens
    arguments["self"] = EngineOfVerl()
    with pytest.raises(ValueError, match=rf"count of 7 tokens on a CP rank of {size}, of a micro-batch of 8: "):
        verl._with_every_token(verl._Running(), lambda: ("loss", torch.tensor(7), "output"), arguments)
    assert verl._with_every_token(verl._Running(), lambda: ("loss", "output"), arguments) == ("loss", "output")
