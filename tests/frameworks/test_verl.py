"""verl's `agg_loss` from explicit counts: its formulas in float64, however a step is cut; and the installer.

It is given whole rows on every context-parallel rank, so nothing here depends on CP; its real engines: `real`.
"""

import functools
import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from peer_steps import deal, random_batch
from torch import Tensor

from megatron_rl_loss.frameworks import replacing, verl
from megatron_rl_loss.frameworks.verl import agg_loss

FACTOR = 5.5


def row_sums(losses: Tensor, masks: Tensor) -> Tensor:
    return torch.where(masks != 0, losses * masks, 0.0).sum(-1)


THEIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token-mean": lambda losses, m: row_sums(losses, m).sum() / m.sum(),
    "token-sum": lambda losses, m: row_sums(losses, m).sum(),
    "seq-mean-token-sum": lambda losses, m: row_sums(losses, m).sum() / len(m),
    "seq-mean-token-sum-norm": lambda losses, m: row_sums(losses, m).sum() / (len(m) * FACTOR),
    "seq-mean-token-mean": lambda losses, m: (row_sums(losses, m) / m.sum(-1).clamp(min=1)).sum() / len(m),
}


Aggregate = Callable[..., Tensor]


def error_of(mode: str, seed: int, dp_size: int, aggregate: Aggregate = agg_loss) -> float:
    """The error of a step of ragged rows, two of them masked, dealt to ranks whose gradients are averaged."""
    batch = random_batch(seed)
    masks, leaf = batch.masks, batch.losses.masked_fill(batch.masks == 0, float("nan")).requires_grad_()
    counts = {"batch_num_tokens": int(masks.sum()), "global_batch_size": len(masks), "loss_scale_factor": FACTOR}
    value = torch.zeros(())
    for rows in filter(None, itertools.chain(*deal(len(masks), dp_size, seed))):
        width = int(masks[rows].any(0).nonzero().max()) + 1 if masks[rows].any() else 2  # of this micro-batch
        mask = masks[rows][:, :width].bool()
        value = value + aggregate(leaf[rows][:, :width], mask, mode, dp_size=dp_size, **counts) / dp_size
    (gradient,) = torch.autograd.grad(value, leaf)
    exact = batch.losses.double().requires_grad_()
    expected = THEIRS[mode](exact, masks.double())
    (slopes,) = torch.autograd.grad(expected, exact)
    scale = float((slopes.abs() * batch.losses.abs()).sum())
    worst = float((gradient.double() - slopes).abs().max() / slopes.abs().max())
    return oracle.worst_error(abs(float(value.detach()) - float(expected.detach())) / scale, worst, leaf.numel())


@pytest.mark.parametrize("mode", THEIRS)
def test_the_step_is_the_formula(mode: str, record_property: Any) -> None:
    worst = max(error_of(mode, seed, dp_size) for seed, dp_size in ((0, 1), (1, 2), (2, 4)))
    assert worst < oracle.EXACT
    record_property("verl_agg_loss_error", worst)


def without_dp_size(*args: Any, dp_size: int, **counts: Any) -> Tensor:
    return agg_loss(*args, **counts)


def from_local_counts(losses: Tensor, mask: Tensor, mode: str, **options: Any) -> Tensor:
    """verl's fallback: the micro-batch's tokens, its sequences with an active token, its padded length."""
    sequences, length = int(mask.any(-1).sum()), mask.shape[-1]
    local = {"batch_num_tokens": int(mask.sum()), "global_batch_size": sequences, "loss_scale_factor": length}
    return agg_loss(losses, mask, mode, **options | local)


@pytest.mark.parametrize("mode", THEIRS)
def test_the_comparison_sees(mode: str) -> None:
    for bug in (without_dp_size, from_local_counts)[: 1 if mode == "token-sum" else 2]:  # which needs no count
        assert error_of(mode, 2, 2, bug) > 0.05


# ---- its signature, and what it refuses


def verls_own(
    loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str, dp_size: int = 1, batch_num_tokens: Any = None,
    global_batch_size: Any = None, loss_scale_factor: Any = None,
) -> Tensor:  # fmt: skip
    """The signature of verl 0.9.1 and 1dda039b, which `install` compares."""
    return (loss_mat * loss_mask).sum()


LOSSES, MASK = torch.tensor([[1.0, 2, 3], [4, 5, 6]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
WHOLE = {"batch_num_tokens": 12, "global_batch_size": 4, "loss_scale_factor": 8}


def call(mode: str = "token-mean", losses: Any = LOSSES, mask: Any = MASK, **changes: Any) -> Tensor:
    return agg_loss(losses, mask, mode, **{**WHOLE, **changes})


@pytest.mark.parametrize(
    ("mode", "value"),
    [
        ("token-mean", 7 / 12),
        ("token-sum", 7),
        ("seq-mean-token-sum", 7 / 4),
        ("seq-mean-token-sum-norm", 7 / 32),
        ("seq-mean-token-mean", 5.5 / 4),
    ],
)
def test_worked_by_hand(mode: str, value: float) -> None:
    assert float(call(mode)) == pytest.approx(value)
    assert float(call(mode, dp_size=3)) == pytest.approx(3 * value)
    assert float(call(mode, mask=MASK.bool())) == pytest.approx(value)
    tensors = {name: torch.tensor(count) for name, count in WHOLE.items() if name != "loss_scale_factor"}
    assert float(call(mode, **tensors)) == pytest.approx(value)
    halved = call(mode, mask=MASK * 0.5)
    assert float(halved) == pytest.approx(value if mode == "seq-mean-token-mean" else value / 2)


@pytest.mark.parametrize(
    ("mode", "changes", "text"),
    [
        ("token-mean", {"batch_num_tokens": None}, "token-mean without batch_num_tokens: verl would take this micro-"),
        ("seq-mean-token-sum", {"global_batch_size": None}, "without global_batch_size: verl would take"),
        ("seq-mean-token-sum-norm", {"loss_scale_factor": None}, "without loss_scale_factor.*Set actor.loss_scale_fac"),
        ("seq-mean-token-sum-norm", {"loss_scale_factor": 0}, "divisor 0 .*it must be within 1e-30"),
        ("token-mean", {"batch_num_tokens": 2}, "batch_num_tokens is 2 where this micro-batch alone has 3"),
        ("token-mean", {"batch_num_tokens": 0}, "batch_num_tokens is 0 where this micro-batch alone has 3"),
        ("token-mean", {"batch_num_tokens": float("nan")}, "batch_num_tokens is nan"),
        ("seq-mean-token-sum", {"global_batch_size": 1}, "global_batch_size is 1 where this micro-batch alone has 2"),
        ("seq-mean-token-mean", {"global_batch_size": torch.tensor(1)}, "global_batch_size is 1"),
        # Rows of weights that add up to 0.5 and 0.25 are rows.
        ("seq-mean-token-sum", {"global_batch_size": 1, "mask": MASK * 0.25}, "this micro-batch alone has 2"),
        ("seq-mean-token-mean", {"global_batch_size": 1, "mask": MASK * 0.25}, "this micro-batch alone has 2"),
        ("token_mean", {}, "verl has no such setting. Did you mean token-mean"),
        ("prompt_mean", {}, "verl has no such setting"),
        ("token-mean", {"dp_size": 0}, "dp_size is 0"),
        ("token-mean", {"mask": MASK[:, :2]}, r"loss_mask of shape \(2, 2\)"),
        ("token-mean", {"losses": LOSSES[0], "mask": MASK[0]}, r"both must be \[rows, response_length\]"),
    ],
)
def test_refused(mode: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call(mode, **changes)


def test_integer_losses_are_refused_and_masked_rows_need_no_count() -> None:
    with pytest.raises(TypeError, match=r"loss_mat is torch\.int64"):
        call(losses=MASK)
    masked = torch.cat([MASK[:1], torch.zeros_like(MASK[1:])])
    for mode in ("seq-mean-token-sum", "seq-mean-token-mean"):
        assert float(call(mode, mask=masked, global_batch_size=1)) > 0
        call(mode, mask=MASK * 0.25, global_batch_size=2)


@pytest.mark.parametrize("mode", THEIRS)
def test_missing_counts_and_steps_without_tokens(mode: str) -> None:
    unused = {"loss_scale_factor": None} if mode != "seq-mean-token-sum-norm" else {}
    unused["global_batch_size" if mode.startswith("token") else "batch_num_tokens"] = None
    assert float(call(mode, **unused)) == float(call(mode)), "what a mode does not use may be missing"
    for counts in (WHOLE, {"batch_num_tokens": 0, "global_batch_size": 0}):
        losses = torch.full((2, 3), float("nan"), requires_grad=True)
        loss = call(mode, losses, torch.zeros(2, 3), **counts)
        assert float(loss.detach()) == 0
        assert not torch.autograd.grad(loss, losses)[0].any()


# ---- the installer, on modules of verl's names


LOSSES_MODULE, TRAINER = "verl.workers.utils.losses", "verl.trainer.ppo.ray_trainer"


@pytest.fixture
def core_algos(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """verl's module of that name, where others took `agg_loss` from."""
    names = ["verl", "verl.trainer", "verl.trainer.ppo", "verl.trainer.ppo.core_algos", LOSSES_MODULE, TRAINER]
    modules: list[Any] = [ModuleType(name) for name in names]
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    own = functools.partial(verls_own)  # which this module has not
    modules[3].agg_loss = modules[4]._aggregate = modules[5].agg_loss = own
    modules[2].core_algos = modules[3]
    modules[3].get_policy_loss_fn = lambda name: f"verl's {name}"
    modules[4].ppo_loss = lambda config, model_output: config.loss(modules[4]._aggregate)
    modules[4].value_loss = lambda config, model_output: config.loss(modules[4]._aggregate)
    monkeypatch.delitem(sys.modules, "megatron_rl_loss.frameworks.verl_install", raising=False)
    monkeypatch.setattr(replacing, "_ACTIVE", [])
    verl._replace.cache_clear()
    yield modules[3]
    verl._replace.cache_clear()


def test_importing_the_installer_puts_ours_everywhere_but_into_trainers(
    core_algos: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Into a module that took it by another name too, and into one that took it meanwhile, by a second call."""
    defaults = [[one.default for one in inspect.signature(its).parameters.values()] for its in (verls_own, agg_loss)]
    assert defaults[0] == defaults[1]
    losses, trainer, own = sys.modules[LOSSES_MODULE], sys.modules[TRAINER], core_algos.agg_loss
    importlib.import_module("megatron_rl_loss.frameworks.verl_install")
    assert core_algos.agg_loss is losses._aggregate
    assert trainer.agg_loss is own
    assert float(core_algos.agg_loss(LOSSES, MASK, "token-mean", **WHOLE)) == float(call())
    line = f"{core_algos.__name__}.agg_loss, {core_algos.__name__}.get_policy_loss_fn, {LOSSES_MODULE}._aggregate, "
    line = f"verl: {line}{LOSSES_MODULE}.ppo_loss, {LOSSES_MODULE}.value_loss"
    assert replacing.active() == [line]
    losses._aggregate = own  # type: ignore[attr-defined]
    replaced = verl.install()
    assert core_algos.agg_loss is losses._aggregate
    assert capsys.readouterr().out == f"megatron_rl_loss in {line}\n"
    replaced.undo()
    assert core_algos.agg_loss is losses._aggregate is own


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

    def of_terms(calls: int) -> Any:
        return lambda aggregate: sum(aggregate(LOSSES, MASK, "token-mean", **WHOLE) for _ in range(calls))

    losses: Any = sys.modules[LOSSES_MODULE]
    for entropy, kl in itertools.product((None, LOSSES), (False, True)):
        terms = 1 + (entropy is not None) + kl
        config, output = SimpleNamespace(loss=of_terms(terms), use_kl_loss=kl), {"entropy": entropy}
        assert float(losses.ppo_loss(config, output)) == pytest.approx(float(call()) * terms)
        config.loss = of_terms(terms - 1)
        with pytest.raises(ValueError, match=f"a loss of {terms} terms and {terms - 1} calls of agg_loss"):
            losses.ppo_loss(config, output)
    with pytest.raises(ValueError, match="a loss of 1 terms and 0 calls of agg_loss"):
        losses.value_loss(SimpleNamespace(loss=of_terms(0)), {})


@dataclass
class EngineOfVerl:
    """Of its Megatron engine: the count that it rounds down."""

    dynamic: bool = False

    def __post_init__(self) -> None:
        self.engine_config = SimpleNamespace(dynamic_context_parallel=self.dynamic)

    def _routed_num_tokens(self, data: Tensor) -> Tensor:
        return torch.tensor(len(data))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_context_parallel_ranks_share_out_every_token(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: size)
    for tokens in range(9):
        returned, shares = ("loss", torch.tensor(tokens // size, dtype=torch.int), "output"), []
        for rank in range(size):
            monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda rank=rank: rank)
            given = {"self": EngineOfVerl(), "data": torch.zeros(tokens)}
            loss, share, output = verl._with_every_token(lambda returned=returned: returned, given)
            assert (loss, share.dtype, output) == ("loss", torch.int32, "output")
            shares.append(int(share))
            given["self"] = EngineOfVerl(dynamic=True)
            assert verl._with_every_token(lambda returned=returned: returned, given) == returned
        assert sum(shares) == tokens
    assert verl._with_every_token(lambda: ("loss", "output"), given) == ("loss", "output")
