"""`tap`: what it writes down, when it does nothing, and that it changes nothing."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_rl_loss import (
    Gathered,
    Samples,
    StepTotals,
    kl_estimate,
    make_pg_loss_reducer,
    ppo_clip_loss,
    tap,
)
from megatron_rl_loss.core.aggregation import resolve
from megatron_rl_loss.core.taps import Taps, expected_aggregation, observe
from megatron_rl_loss.losses.token import cispo_loss

MASK = torch.tensor([1.0, 0, 1, 0.5])


def losses() -> torch.Tensor:
    return torch.tensor([3.0, 1, -2, 5], requires_grad=True) * 1.0


def log_probs() -> torch.Tensor:
    return torch.full((4,), -1.0, requires_grad=True) * 1.0


def test_gradients_are_written_down_by_microbatch_and_term() -> None:
    taps = Taps()
    with observe(taps):
        for factor in (2.0, 3.0):
            taps.begin_microbatch()
            values = losses()
            loss = (tap(values) * MASK * factor).sum() + (tap(values * 2, "kl") * MASK).sum()
            loss.backward()
    assert list(taps.losses) == ["pg", "kl"]
    for number, factor in enumerate((2.0, 3.0)):
        assert torch.equal(taps.losses["pg"][number].gradient, MASK * factor + 2 * MASK)  # the second term's too
        assert torch.equal(taps.losses["kl"][number].gradient, MASK)
    unnumbered = Taps()  # who does not number micro-batches has one a tap
    with observe(unnumbered):
        for _ in range(3):
            tap(losses()).sum().backward()
    assert list(unnumbered.losses["pg"]) == [0, 1, 2]


def test_two_losses_of_one_name_are_two_terms_and_one_that_is_tapped_twice_is_one() -> None:
    taps, samples = Taps(), Samples([torch.ones(4)])
    with observe(taps):
        taps.begin_microbatch()
        first, second = losses(), losses()
        (tap(tap(first), samples=samples).sum() + tap(second).sum() * 3).backward()
    assert list(taps.losses) == ["pg", "pg#2"]
    assert taps.losses["pg"][0].samples is samples
    assert torch.equal(taps.losses["pg"][0].gradient, torch.ones(4))
    assert torch.equal(taps.losses["pg#2"][0].gradient, torch.full((4,), 3.0))


def test_otherwise_it_does_nothing() -> None:
    taps, values = Taps(), losses()
    assert tap(values) is values  # nobody listens
    with observe(taps), torch.no_grad():
        assert tap(values) is values
    with observe(taps):
        assert tap(detached := values.detach()) is detached
    assert taps.losses == {}


def test_a_rank_without_a_token_tells_its_samples() -> None:
    taps, samples = Taps(), Samples([torch.ones(4)])
    with observe(taps):
        assert tap(none := torch.zeros(0), samples=samples) is none
    assert (taps.losses["pg"][0].samples, taps.losses["pg"][0].gradient) == (samples, None)


def test_half_precision_is_kept_in_float32_and_the_rest_goes_on_as_it_is() -> None:
    taps, leaf = Taps(), torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    with observe(taps):
        (tap(leaf * 1) * 3).sum().backward()
    assert taps.losses["pg"][0].gradient.dtype == torch.float32
    assert taps.losses["pg"][0].dtype == torch.bfloat16
    assert leaf.grad.dtype == torch.bfloat16
    assert torch.equal(leaf.grad, torch.full((4,), 3, dtype=torch.bfloat16))


def test_no_graph_is_kept_alive() -> None:
    taps, values = Taps(), losses()
    gone = weakref.ref(values)
    with observe(taps):
        tap(values).sum().backward()
    del values
    gc.collect()
    assert gone() is None
    assert taps.losses["pg"][0].gradient is not None


@pytest.mark.parametrize("cp_size", [1, 2])
def test_a_reducer_taps_what_it_reduces_and_says_what_was_asked(cp_size: int) -> None:
    """Each rank's weights are a part where ranks hold copies; the layout's scale makes up for it in the gradient."""
    masks = [torch.tensor([1.0, 0, 1]), torch.tensor([1.0])]
    samples = Samples(masks, layout=Gathered([0, 3, 4], backward="slice"))
    place: dict[str, Any] = {"cp_rank": 0, "cp_size": cp_size}
    reducer = make_pg_loss_reducer("sample_mean", samples, totals=StepTotals.of(masks), **place)
    assert reducer.gradient_scale == cp_size
    taps, values = Taps(), losses()
    with observe(taps):
        taps.begin_microbatch()
        reducer(values).backward()
    (tapped,) = taps.losses["pg"].values()
    assert torch.equal(tapped.gradient, torch.tensor([0.25, 0, 0.25, 0.5]))
    assert tapped.samples.mask_lengths == [3, 1]


def test_gradients_of_several_backward_passes_add_up() -> None:
    """Those of a loop that sends gradients back term by term, wherever they are recorded."""
    taps, values = Taps(), losses()
    reducer = make_pg_loss_reducer("token_mean", [MASK], totals=StepTotals.of([MASK]))
    with observe(taps):
        taps.begin_microbatch()
        loss = (tap(values, "kl") * MASK).sum()
        ppo_losses = ppo_clip_loss(log_probs(), log_probs(), torch.ones(4), MASK).per_token_loss
        share = reducer(ppo_losses * 2)
        assert not any(taps.losses[name][0].is_reached for name in ("kl", "pg"))
        for factor in (2.0, 3.0):
            (factor * (loss + share)).backward(retain_graph=True)
    kl, share_of_pg = taps.losses["kl"][0], taps.losses["pg"][0]
    assert share_of_pg.share is not None
    assert torch.equal(kl.gradient, 5 * MASK)
    torch.testing.assert_close(share_of_pg.gradient, 5 * MASK / 2.5)
    torch.testing.assert_close(share_of_pg.share.outputs[0].gradient.total, 2 * 5 * MASK / 2.5)
    assert kl.is_reached
    assert share_of_pg.is_reached
    assert float(share_of_pg.share.off) == 0


def test_a_share_names_the_loss_functions_that_its_losses_came_from() -> None:
    """Those of this micro-batch that its graph reaches, each up to the next loss function, and no others."""
    taps, old = Taps(), log_probs().detach()
    reducer = make_pg_loss_reducer("token_mean", [MASK], totals=StepTotals.of([MASK]))
    with observe(taps):
        for _ in range(2):
            taps.begin_microbatch()
            now = log_probs()
            first = ppo_clip_loss(now, old, torch.ones(4), MASK).per_token_loss
            cispo_loss(now, old, torch.ones(4), MASK)  # thrown away
            second = kl_estimate(now, old, MASK)
            reducer(first + 0.5 * second.exp()).backward()
    for share in (tapped.share for tapped in taps.losses["pg"].values()):
        assert share is not None
        assert {output.made_by for output in share.outputs} == {"ppo_clip_loss", "kl_estimate"}
        assert len(share.outputs) == 2
        assert not share.is_beside
    assert len(taps.outputs) == 3


def test_a_deep_model_hides_no_loss_function_beside_it() -> None:
    """Its thousands of nodes come after those that are near; the losses have a part that no loss function made."""
    taps, reducer = Taps(), make_pg_loss_reducer("token_mean", [MASK], totals=StepTotals.of([MASK]))
    with observe(taps):
        taps.begin_microbatch()
        now = log_probs()
        entropy = now
        for _ in range(5000):
            entropy = entropy + 1
        reducer(ppo_clip_loss(now, now.detach(), torch.ones(4), MASK).per_token_loss / 2 + entropy).backward()
    (share,) = (tapped.share for tapped in taps.losses["pg"].values())
    assert share is not None
    assert [output.made_by for output in share.outputs] == ["ppo_clip_loss"]
    assert share.is_beside


def test_what_a_step_is_asked_for_is_known_while_it_runs() -> None:
    assert expected_aggregation() is None
    with observe(aggregation=resolve("token_mean")):
        assert expected_aggregation() == resolve("token_mean")
    assert expected_aggregation() is None


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("is_detached", [False, True])
def test_losses_that_a_checkpoint_computes_again_count_by_the_pass_that_trains(
    use_reentrant: bool, is_detached: bool
) -> None:
    """A reentrant checkpoint runs a pass of its own, inside that of the model, which reaches parameters after it."""
    taps = Taps(is_counted=True)
    first, second = (torch.ones(4, requires_grad=True) for _ in range(2))

    def take(_: torch.Tensor) -> None:
        taps.take()

    for parameter in (first, second):
        parameter.register_post_accumulate_grad_hook(take)

    def loss_of(output: torch.Tensor) -> torch.Tensor:
        return (tap(output * 3.0) * MASK).sum()

    output = (first * 2.0).detach().requires_grad_() if is_detached else first * 2.0
    with observe(taps):
        taps.begin_microbatch()
        checkpoint(loss_of, output * 1.0, use_reentrant=use_reentrant).backward()
        second.sum().backward()
    taps.end(trained=taps.trained)
    gradients = [tapped.gradient for term_taps in taps.losses.values() for tapped in term_taps.values()]
    reached = [gradient for gradient in gradients if gradient is not None]
    assert len(reached) == (not is_detached)
    assert all(torch.equal(gradient, MASK) for gradient in reached)
