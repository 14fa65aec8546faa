"""Prompt ids that an engine was given, against the tokens of the prompts."""

from collections import defaultdict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from megatron_rl_loss.modes.loss_modes import LossModes
from megatron_rl_loss.step.collectives import Group, gather_objects, several
from megatron_rl_loss.step.samples import Samples


def is_by_prompt(modes: LossModes) -> bool:
    """True if a mode needs prompt ids."""
    return "prompt" in modes.rehearse(Samples([np.ones(1)], prompt_ids=["0"]))


def misplaced_ids(prompt_ids: Sequence[str], prompts: Sequence[str], dp_group: Group | None) -> str:
    """The reason why ids may stand at rows of other prompts, else empty; all ranks of the group call it.

    An id of several prompts, of which one has another id too, is what ids moved by a row look like. Neither alone is a
    sign: turns of one rollout have prompts of their own, and a prompt may come twice with two ids.

    Args:
        prompt_ids: of this rank's rows.
        prompts: text for the tokens of each row's prompt.
    """
    pairs = {
        (one, blake2b(text.encode(), digest_size=16).hexdigest()) for one, text in zip(prompt_ids, prompts, strict=True)
    }
    for group in several(dp_group):
        pairs = set().union(*gather_objects(pairs, group))
    ids_of, prompts_of = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for one, prompt in pairs:
        ids_of[prompt].add(one)
        prompts_of[one].add(prompt)
    shared = [
        one for one, held in sorted(prompts_of.items()) if len(held) > 1 and any(len(ids_of[p]) > 1 for p in held)
    ]
    if not shared:
        return ""
    return (
        f"the prompt id {shared[0]!r} stands at rows with different prompt tokens, and rows with the tokens of one of "
        "them have another id: ids stand at other rows, or a prompt came several times."
    )
