"""slime's log-probs and entropy, from a checkout (SLIME_PATH=~/slime), and ours: values and gradients, TP 1 and 2.

Its `calculate_log_probs_and_entropy` keeps a label outside the kept ids too. Its entropy is that of all ids, whatever
is kept for the log-probs; ours is that of the distribution that the log-probs are of: with kept ids only log-probs are
compared.
"""

import itertools
from typing import Any

import pytest
import torch
from checkouts import SLIME, checkout, load, record_errors
from head_oracle import batch_of, log_probs_and_entropy, relative
from ranks import run_ranks, start_process_group

from megatron_rl_loss import log_probs_from_logits

TOKENS, VOCABULARY = 33, 24
#: Both are float32 sums over the vocabulary.
TOLERANCE = 2e-6

pytestmark = pytest.mark.slow


def errors(root: str) -> list[tuple[float, float]]:
    """On a rank: of slime's and of ours, by float64."""
    start_process_group()
    group: Any = torch.distributed.group.WORLD
    (module,) = load(SLIME, root, "slime.utils.ppo_utils")
    batch = batch_of(TOKENS, VOCABULARY, 8)
    held = VOCABULARY // group.size()
    columns = slice(group.rank() * held, (group.rank() + 1) * held)
    logits = (batch.hidden @ batch.weight.T).float()
    slopes = torch.linspace(-1, 2, TOKENS)
    results = list[Any]()
    for entropy, kept, chunk_tokens in itertools.product((False, True), (False, True), (-1, 7)):
        if entropy and kept:
            continue
        keep = batch.keep[:, columns] if kept else None
        whole = logits.double().requires_grad_()
        expected = log_probs_and_entropy(whole, batch.labels, keep=batch.keep if kept else None)
        theirs, mine = (logits[:, columns].clone().requires_grad_() for _ in range(2))
        log_probs, other = module.calculate_log_probs_and_entropy(
            theirs, batch.labels, group, with_entropy=entropy, chunk_size=chunk_tokens, log_prob_keep_mask=keep
        )
        ours = log_probs_from_logits(mine, batch.labels, tp_group=group, keep=keep, entropy=entropy)
        values: list[Any] = [expected, (log_probs[:, 0], other), (ours.log_probs, ours.entropy)]
        for part in range(1 + entropy):
            right, *of_both = (value[part] for value in values)
            results.append(tuple(relative(value, right) for value in of_both))
        for value, of_entropy in values:
            ((value + 0.3 * of_entropy if entropy else value) * slopes).sum().backward()
        results.append(tuple(relative(leaf.grad, whole.grad[:, columns]) for leaf in (theirs, mine)))
    return results


@pytest.mark.parametrize("tp", [1, 2])
def test_slimes_log_probs_are_ours(tp: int, record_property: Any) -> None:
    for results in run_ranks(tp, errors, checkout(SLIME)):
        assert len(results) == 6 * 2 + 2
        own, ours = map(max, zip(*results, strict=True))
        assert max(own, ours) <= TOLERANCE
        record_errors(record_property, SLIME, "log-probs and entropy", own, ours)
