"""What a loss has beside its parts, by its graph alone: a term's value may be 0 in the step that is observed."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_rl_loss.core.taps import Taps, observe, part_of_loss
from megatron_rl_loss.proof.loss_parts import has_more

#: What a loss function makes of log-probs and the model's output, all of which is measured but for what is beside.
INSIDE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "log-probs": (lambda log_probs, output: log_probs.sum(), False),
    "a sum of no log-probs, times 0": (lambda log_probs, output: log_probs.sum() + 0 * output.sum(), False),
    "the output": (lambda log_probs, output: log_probs.sum() + output.logsumexp(0), True),
    "the output, where it is 0": (lambda log_probs, output: log_probs.sum() + (output * torch.zeros(4)).sum(), True),
}
#: What becomes of the loss afterwards.
AFTER: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], bool]] = {
    "scaled": (lambda loss, log_probs, output: 3 * loss / 2, False),
    "connected": (lambda loss, log_probs, output: loss + 0.0 * output.sum(), False),
    "times a tensor that is 0 now": (lambda loss, log_probs, output: loss + output.sum() * torch.zeros(()), True),
    "a term of log-probs": (lambda loss, log_probs, output: loss + 0.1 * log_probs.exp().mean(), True),
    "a term of the output": (lambda loss, log_probs, output: loss + 0.1 * output.sigmoid().mean(), True),
    "detached": (lambda loss, log_probs, output: loss + log_probs.detach().mean(), False),
}


def judged(inside: str, after: str, *, knows_inputs: bool = True) -> bool:
    weight = torch.ones(4, requires_grad=True)
    output = weight * torch.arange(4.0)
    log_probs, taps = output * 2, Taps()
    with observe(taps):
        loss = part_of_loss(INSIDE[inside][0](log_probs, output), [log_probs] if knows_inputs else None)
        returned = AFTER[after][0](loss, log_probs, output)
    return has_more(returned, output, taps.parts)


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("inside", INSIDE)
def test_a_term_is_seen_by_its_way_to_the_model(inside: str, after: str) -> None:
    assert judged(inside, after) == (INSIDE[inside][1] or AFTER[after][1])


def test_an_output_may_be_a_dict_and_a_loss_may_have_many_parts() -> None:
    """As of verl, and of a loss that is called for each of many sequences."""
    weight, taps = torch.ones(4, requires_grad=True), Taps()
    log_probs, entropy = weight * 2, (weight * 3).exp()
    output = {"log_probs": log_probs, "entropy": [entropy]}
    with observe(taps):
        parts = [part_of_loss(log_probs[i % 4].exp(), [log_probs]) for i in range(3000)]
        loss = sum(parts, start=torch.zeros(()))
    assert not has_more(loss, output, taps.parts)
    assert has_more(loss + log_probs.exp().mean(), output, taps.parts)
    assert has_more(loss + entropy.mean(), output, taps.parts)


@pytest.mark.parametrize("inside", INSIDE)
def test_a_part_of_which_nobody_named_the_inputs_may_have_any(inside: str) -> None:
    assert not judged(inside, "scaled", knows_inputs=False)


def test_a_parameter_is_a_way_too() -> None:
    """As of logits that the model's output was made of."""
    weight, taps = torch.ones(4, requires_grad=True), Taps()
    logits = weight * 2
    output = logits.log_softmax(0)
    with observe(taps):
        loss = part_of_loss(output.sum(), [output])
        assert has_more(loss + logits.square().sum(), output, taps.parts)
        assert not has_more(loss + 1, output, taps.parts)


def test_a_graph_without_other_ways_is_not_computed_again() -> None:
    """A checkpoint would run the loss function now, in which ranks may wait for each other."""
    calls = list[int]()

    def function(log_probs: Tensor) -> Tensor:
        calls.append(1)
        return part_of_loss((log_probs * log_probs.exp()).sum() * log_probs.mean(), [log_probs])

    weight, taps = torch.ones(4, requires_grad=True), Taps()
    output = weight * 2
    with observe(taps):
        loss = checkpoint(function, output, use_reentrant=False)
        assert not has_more(loss * 2, output, taps.parts)
    assert calls == [1]
