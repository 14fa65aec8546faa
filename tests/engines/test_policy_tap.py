"""The tap of engines' policy losses, on losses of plain torch: weights, clamps, paths."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from added_terms import TERMS
from torch import Tensor

from megatron_rl_loss import Samples, tap
from megatron_rl_loss.core.taps import Tap, Taps, observe
from megatron_rl_loss.engines import proving
from megatron_rl_loss.engines.loss_trials import Beside, LossPaths, WeighedMicrobatch, tap_sum
from megatron_rl_loss.engines.places import places, swapped, wrapped
from megatron_rl_loss.engines.policy_tap import tap_policy
from megatron_rl_loss.engines.proving import prove_policy_loss
from megatron_rl_loss.extend import MORE_TERMS, Promises, resolve

MASK = torch.tensor([[1.0, 1, 0, 1], [0, 1, 1, 0]])
FACTORS = torch.tensor([[0.5, 0.5, 0.5, 0.5], [2.0, 2.0, 2.0, 2.0]])
PLAIN = torch.tensor([[1.0, -2, 3, 0], [0.25, 0.5, -1, 4]])
LOSS = LossPaths("log_probs", "batch.advantages", {"batch.old": "old", "batch.rollout?": "old"}, silent=["batch.seen"])
LOW = LOSS._replace(clamps=True)


def ppo(log_probs: Tensor, batch: Any) -> Tensor:
    """PPO's loss with a KL term, TIS and a metric, summed over the mask."""
    batch.seen.append(float(batch.advantages.sum()))
    ratio, advantages = (log_probs - batch.old).exp(), batch.advantages
    losses = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)
    losses = losses * (batch.old - batch.rollout).exp().clamp(max=2.0) if batch.rollout is not None else losses
    return ((losses + 0.1 * (log_probs - batch.old) ** 2) * MASK).sum() / 4


def cispo(log_probs: Tensor, batch: Any) -> Tensor:
    """The ratio is clamped to 0.2, as ms-swift's default does."""
    ratio = (log_probs - batch.old).exp().clamp(max=0.2).detach()
    return (-ratio * batch.advantages * log_probs * MASK).sum() / 4


def clamped(log_probs: Tensor, batch: Any) -> Tensor:
    return (-(log_probs - batch.old).exp() * batch.advantages.clamp(-0.3, 0.3) * MASK).sum() / 4


def by_sign(log_probs: Tensor, batch: Any) -> Tensor:
    return (-(log_probs - batch.old).exp() * batch.advantages.sign() * MASK).sum() / 4


def cubed(log_probs: Tensor, batch: Any) -> Tensor:
    return (-(log_probs - batch.old).exp() * batch.advantages**3 * MASK).sum() / 4


def measured(loss: Callable[..., Tensor], row: LossPaths = LOSS, **changes: Any) -> tuple[Tap, Any]:
    """What the tap wrote down of a step, and the batch afterwards."""
    table = torch.randn(2, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    old = torch.randn(2, 4, generator=torch.Generator().manual_seed(2))
    batch = SimpleNamespace(advantages=PLAIN * FACTORS, old=old, rollout=old + 0.5, seen=[])
    vars(batch).update(changes)
    describe = lambda: WeighedMicrobatch(Samples(list(MASK)), FACTORS, PLAIN, is_followed=False)  # noqa: E731
    tapped = wrapped(loss, lambda stock, arguments: tap_policy(row, stock, arguments, describe))
    taps, before = Taps(), dict(vars(batch))
    with observe(taps):
        taps.begin_microbatch()
        share = tapped(table * 1.0, batch)
        (3 * share).backward()
    alone = SimpleNamespace(**{**before, "seen": []})
    assert torch.equal(share.detach(), loss(table.detach(), alone)), "the result is the loss's own"
    assert {name: id(value) for name, value in vars(batch).items()} == {
        name: id(value) for name, value in before.items()
    }
    (of_loss,) = taps.losses["pg"].values()
    return of_loss, batch


@pytest.mark.parametrize("row", [LOSS, LOW])
@pytest.mark.parametrize("rollout", [True, False])
def test_the_weights_of_tokens(row: LossPaths, rollout: bool) -> None:
    """3 for what the schedule does; clipping, TIS, KL, and advantages of 0 do not change them."""
    tapped, batch = measured(ppo, row, **({} if rollout else {"rollout": None}))
    assert tapped.gradient is not None
    assert torch.allclose(tapped.gradient, (3 * FACTORS * MASK / 4).flatten(), rtol=1e-6)
    assert not tapped.doubt
    assert batch.seen == [float((PLAIN * FACTORS).sum())], "trials leave metrics as they are"


def test_a_trial_reports_to_no_measurement() -> None:
    """Of a loss function that taps its own losses, those of the step count, and of no trial."""

    def tapped_by_itself(log_probs: Tensor, batch: Any) -> Tensor:
        own = tap((log_probs - batch.old).exp() * -batch.advantages, "own", samples=Samples(list(MASK)))
        return (own * MASK).sum() / 4

    taps = Taps()
    table, old = torch.zeros(2, 4, requires_grad=True), torch.zeros(2, 4)
    batch = SimpleNamespace(advantages=PLAIN * FACTORS, old=old, rollout=None, seen=[])
    describe = lambda: WeighedMicrobatch(Samples(list(MASK)), FACTORS, PLAIN, is_followed=False, beside={})  # noqa: E731
    with observe(taps):
        taps.begin_microbatch()
        wrapped(tapped_by_itself, lambda stock, arguments: tap_policy(LOSS, stock, arguments, describe))(table, batch)
    assert {name: [*of_term] for name, of_term in taps.losses.items()} == {"own": [0], "pg": [0]}


def test_advantages_that_changed_before_the_loss_count_as_weights() -> None:
    tapped, _ = measured(ppo, advantages=PLAIN * FACTORS * 1.25)
    right = 3 * FACTORS * MASK / 4 * torch.where(PLAIN == 0, 1.0, 1.25)
    assert tapped.gradient is not None
    assert torch.allclose(tapped.gradient, right.flatten(), rtol=1e-6)


@pytest.mark.parametrize("row", [LOSS, LOW])
def test_log_probs_exchanged_with_old_ones_weigh_nothing(row: LossPaths) -> None:
    """No gradient reaches what stands where the log-probs should."""

    def exchanged(current: Tensor, batch: Any) -> Tensor:
        def loss(log_probs: Tensor, batch: Any) -> Tensor:
            return ppo(log_probs, batch) + 0 * current.sum()

        describe = lambda: WeighedMicrobatch(Samples(list(MASK)), FACTORS, PLAIN)  # noqa: E731
        return wrapped(loss, lambda stock, arguments: tap_policy(row, stock, arguments, describe))(batch.old, batch)

    table, taps = torch.zeros(2, 4, requires_grad=True), Taps()
    with observe(taps):
        taps.begin_microbatch()
        exchanged(table, SimpleNamespace(advantages=PLAIN * FACTORS, old=PLAIN, rollout=None, seen=[])).backward()
    (of_loss,) = taps.losses["pg"].values()
    assert of_loss.gradient is not None
    assert not of_loss.gradient.any()


@pytest.mark.parametrize(
    ("loss", "row", "is_right", "is_doubted"),
    [
        (cispo, LOSS, False, False),  # at a ratio of 1 it is 0.2 times the loss
        (cispo, LOW, True, False),
        (clamped, LOSS, False, True),
        (by_sign, LOSS, False, False),
        (cubed, LOSS, False, False),
    ],
)
def test_clamps_are_no_evidence_and_losses_that_are_not_linear_are(
    loss: Any, row: LossPaths, is_right: bool, is_doubted: bool
) -> None:
    tapped, _ = measured(loss, row)
    assert tapped.gradient is not None
    assert torch.allclose(tapped.gradient, (3 * FACTORS * MASK / 4).flatten(), rtol=1e-5) == is_right
    assert (tapped.doubt != "") == is_doubted


# --- terms beside the policy loss

WHOLE = LOSS._replace(trial={**LOSS.trial, "batch.reference": "reference"}, entropy="entropy_of")
PENALTIES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "abs": torch.abs,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: (-d).exp() + d - 1,
}
NAMED = {"kl": Beside(0.5, resolve("token_mean")), "entropy": Beside(-0.25, resolve("token_mean"))}


def with_terms(
    output: Tensor, log_probs: Tensor, batch: Any, entropy_of: Any, penalty: Any = PENALTIES["k3"], added: Any = None,
    of_entropies: Tensor = MASK,
) -> Tensor:  # fmt: skip
    """A policy loss with a KL penalty and an entropy bonus, over the mask, and what is added beside."""
    ratio = (log_probs - batch.old).exp()
    losses = -ratio * batch.advantages + 0.5 * penalty(log_probs - batch.reference)
    rest = 0.0 if added is None else added(output, log_probs, batch.old)
    return (losses * MASK - 0.25 * entropy_of(output) * of_entropies).sum() / 4 + rest


def entropy_of_output(output: Tensor) -> Tensor:
    return output**2 + 1


def terms_of(
    beside: Any = NAMED, row: LossPaths = WHOLE, entropy_of: Any = entropy_of_output, is_followed: bool = False,
    **of_loss: Any,
) -> tuple[dict[str, Tap], set[str]]:  # fmt: skip
    """What the taps wrote down of a step of that loss, by term, and what the loss has beside them."""
    output = torch.randn(2, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    old, reference = (torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)) for seed in (2, 3))
    batch = SimpleNamespace(advantages=PLAIN * FACTORS, old=old, reference=reference, rollout=None, seen=[])
    describe = lambda: WeighedMicrobatch(  # noqa: E731
        Samples(list(MASK)), FACTORS, PLAIN, is_followed=is_followed, beside=beside
    )
    tapped = wrapped(with_terms, lambda stock, arguments: tap_policy(row, stock, arguments, describe))
    taps = Taps()
    with observe(taps):
        taps.begin_microbatch()
        (3 * tapped(output, output * 1.0, batch, entropy_of, **of_loss)).backward()
    return {name: of_term[0] for name, of_term in taps.losses.items()}, taps.added


@pytest.mark.parametrize("estimator", PENALTIES)
def test_terms_beside_the_policy_loss(estimator: str) -> None:
    """Each token's weight, times its coefficient, whatever the reference's log-probs are."""
    kl = NAMED["kl"]._replace(estimator=estimator)
    taps, added = terms_of(NAMED | {"kl": kl}, penalty=PENALTIES[estimator])
    weights = (3 * MASK / 4).flatten()
    for name, right in {"pg": FACTORS.flatten() * weights, "kl": 0.5 * weights, "entropy": -0.25 * weights}.items():
        assert taps[name].gradient is not None
        assert torch.allclose(taps[name].gradient, right, rtol=1e-5, atol=1e-7), name
    assert not added


@pytest.mark.parametrize("is_followed", [True, False])
def test_a_term_beside_may_have_samples_of_its_own(is_followed: bool) -> None:
    """The way of its log-probs to the model's output is that of the policy loss's."""
    of_all = Samples(list(torch.ones_like(MASK)))
    taps, _ = terms_of(NAMED | {"entropy": NAMED["entropy"]._replace(samples=of_all)}, is_followed=is_followed)
    assert taps["entropy"].samples is of_all
    assert taps["kl"].samples is taps["pg"].samples
    assert {name: tapped.at_log_probs for name, tapped in taps.items()} == dict.fromkeys(taps, is_followed)


@pytest.mark.parametrize("named", PENALTIES)
@pytest.mark.parametrize("real", PENALTIES)
def test_another_estimator_has_another_weight_or_is_a_further_term(named: str, real: str) -> None:
    taps, added = terms_of(NAMED | {"kl": NAMED["kl"]._replace(estimator=named)}, penalty=PENALTIES[real])
    assert taps["kl"].gradient is not None
    is_right = torch.allclose(taps["kl"].gradient, (0.5 * 3 * MASK / 4).flatten(), rtol=1e-3)
    assert (is_right and not added) == (named == real)


def mean_of_term(term: Callable[..., Tensor], output: Tensor, log_probs: Tensor, old: Tensor) -> Tensor:
    return 1e-3 * (term(log_probs, old) * MASK).mean()


FURTHER: dict[str, dict[str, Any]] = {
    "of log-probs": {"added": lambda output, log_probs, old: 1e-3 * (log_probs * MASK).sum()},
    "of a thousandth of the largest slope": {"added": lambda output, log_probs, old: 8e-5 * (log_probs * MASK).sum()},
    "of log-probs, squared": {"added": lambda output, log_probs, old: 1e-3 * log_probs.square().mean()},
    **{name: {"added": partial(mean_of_term, term)} for name, term in TERMS.items()},
    "KL without a coefficient": {"beside": {"entropy": NAMED["entropy"]}},
    "entropy without a coefficient": {"beside": {"kl": NAMED["kl"]}},
    "KL of the other direction": {"penalty": lambda d: d.exp() - d - 1},
}


@pytest.mark.parametrize("is_added", [True, False])
def test_a_term_of_the_advantages_sizes_is_noted(is_added: bool) -> None:
    """It is 0 at advantages of 0, and cancels where their signs differ."""

    def with_sizes(log_probs: Tensor, batch: Any) -> Tensor:
        losses = -(log_probs - batch.old).exp() * batch.advantages
        return ((losses + is_added * 0.1 * batch.advantages.abs() * log_probs) * MASK).sum() / 4

    table, taps = torch.zeros(2, 4, requires_grad=True), Taps()
    batch = SimpleNamespace(advantages=PLAIN * FACTORS, old=torch.zeros(2, 4), rollout=None, seen=[])
    describe = lambda: WeighedMicrobatch(Samples(list(MASK)), FACTORS, PLAIN, beside={})  # noqa: E731
    with observe(taps):
        taps.begin_microbatch()
        wrapped(with_sizes, lambda stock, arguments: tap_policy(LOSS, stock, arguments, describe))(table * 1.0, batch)
    assert [told.startswith(MORE_TERMS) for told in taps.added] == [True] * is_added


@pytest.mark.parametrize("further", FURTHER)
def test_a_further_term_is_noted(further: str) -> None:
    """Beside weights that are right."""
    taps, (added,) = terms_of(**FURTHER[further])
    for name, coef in {"kl": 0.5, "entropy": -0.25}.items():
        if name in taps:
            gradient: Any = taps[name].gradient
            assert torch.allclose(gradient, (coef * 3 * MASK / 4).flatten(), rtol=1e-3, atol=1e-7)
    assert added.startswith(MORE_TERMS)


@pytest.mark.parametrize("masked_by", ["the loss", "the function of entropies"])
def test_an_entropy_of_0_has_the_weight_of_its_token(masked_by: str) -> None:
    """That of a token of which the model is sure is 0 exactly; so is a masked one, where an engine masks entropies."""
    is_sure, bonus = torch.tensor([[1, 0, 0, 0], [0, 0, 1, 0]]).bool(), NAMED["entropy"]
    entropy_of, of_loss = lambda output: entropy_of_output(output).masked_fill(is_sure, 0), dict[str, Any]()
    if masked_by == "the function of entropies":
        bonus, of_loss = bonus._replace(mask=MASK), {"of_entropies": torch.ones_like(MASK)}
        entropy_of = lambda output: entropy_of_output(output).masked_fill(is_sure, 0) * MASK  # noqa: E731
    of_entropy = terms_of(NAMED | {"entropy": bonus}, entropy_of=entropy_of, **of_loss)[0]["entropy"].gradient
    assert of_entropy is not None
    assert torch.allclose(of_entropy, (-0.25 * 3 * MASK / 4).flatten())


def test_terms_that_nobody_named_are_not_measured() -> None:
    taps, added = terms_of(None)
    assert ({*taps}, added) == ({"pg"}, set())


def test_paths() -> None:
    inner = SimpleNamespace(name=1, scale=lambda: 2)
    arguments = {"batch": {"inner": inner}, "many": {"a": {"x": 1}, "b": {"x": 2}}}
    with swapped(arguments, {"batch.inner.name": 5, "batch.inner.scale": 7, "many.*.x": 0, "batch.none?": 1}):
        assert (inner.name, inner.scale(), arguments["many"]) == (5, 7, {"a": {"x": 0}, "b": {"x": 0}})
    assert (inner.name, inner.scale(), arguments["many"]) == (1, 2, {"a": {"x": 1}, "b": {"x": 2}})
    with pytest.raises(ValueError, match=r"a policy loss without batch.other: its arguments are batch, many"):
        places("batch.other", arguments)


def returned(value: Any, arguments: Any) -> Any:
    return value


def test_sums_over_the_same_rows_add_up_and_one_over_others_is_of_another_micro_batch() -> None:
    """Rows that an engine trains on twice weigh twice; without labels nobody knows which rows they are."""
    weights, taps = torch.tensor([0.5, 0.25]), Taps()
    labels: list[Any] = [{"row": ["a"]}, {"row": ["a"]}, {"row": ["b"]}, None, None]
    with observe(taps):
        taps.begin_microbatch()
        for of_row in labels:
            total = torch.ones(2, requires_grad=True).sum() * 2
            tap_sum(total, weights, "pg", samples=Samples([[1, 1]], labels=of_row))
            total.backward()
    gradients = [tapped.gradient for tapped in taps.losses["pg"].values()]
    assert [gradient.tolist() for gradient in gradients if gradient is not None] == [
        [1.0, 0.5], [0.5, 0.25], [0.5, 0.25], [0.5, 0.25]
    ]  # fmt: skip


def test_a_proof_asks_for_the_advantages_before_weighing(capsys: Any) -> None:
    home = SimpleNamespace(loss=ppo)
    for described in (None, WeighedMicrobatch(Samples(list(MASK)), FACTORS, None)):
        replaced = prove_policy_loss(home, "loss", LOSS, "token_mean", partial(returned, described), engine="mine")
        batch = SimpleNamespace(advantages=PLAIN, old=PLAIN, rollout=None, seen=[])
        with observe(Taps()), pytest.raises(TypeError, match="with plain, the advantages before they were weighed"):
            home.loss(torch.zeros(2, 4, requires_grad=True) * 1.0, batch)
        with pytest.raises(ValueError, match="which has a proof already"):
            prove_policy_loss(home, "loss", LOSS, "token_mean", lambda arguments: None, engine="mine")
        replaced.undo()
    assert home.loss is ppo
    with pytest.raises(ValueError, match="group_size is 0: it must be an int >= 1"):
        prove_policy_loss(home, "loss", LOSS, "prompt_mean", lambda arguments: None, group_size=0)
    with pytest.raises(TypeError, match="describe is a NoneType: it must be a function"):
        prove_policy_loss(home, "loss", LOSS, "token_mean", None)
    assert home.loss is ppo
    assert "megatron_rl_loss in proof of mine worker 0: replaced SimpleNamespace.loss" in capsys.readouterr().out


@pytest.mark.parametrize("is_sure", [True, False])
def test_a_proof_compares_groups_with_the_size_that_it_is_told(is_sure: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number is sure; that of an engine's config is not."""
    proof, home = SimpleNamespace(promises=None), SimpleNamespace(loss=ppo)
    monkeypatch.setattr(proving, "prove", lambda *_, **__: proof)
    batch = SimpleNamespace(advantages=PLAIN, old=PLAIN, rollout=None, seen=[], num_samples=3)
    weighed = WeighedMicrobatch(Samples(list(MASK)), FACTORS, PLAIN, is_followed=False)
    size: Any = 3 if is_sure else lambda arguments: arguments["batch"].num_samples
    replaced = prove_policy_loss(home, "loss", LOSS, "token_mean", partial(returned, weighed), group_size=size)
    taps = Taps()
    with observe(taps):
        taps.begin_microbatch()
        home.loss(torch.zeros(2, 4, requires_grad=True) * 1.0, batch)
    assert proof.promises == Promises(3, is_group_size_sure=is_sure)
    replaced.undo()
