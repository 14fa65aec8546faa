"""Prompt ids that an engine was given, against the tokens of the prompts."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from torch import Tensor

from megatron_rl_loss.core.collectives import Group, gather_objects, several
from megatron_rl_loss.core.samples import Samples
from megatron_rl_loss.extend import LossModes

MEDIA = "prompts with images or other media: prompts are identified by their tokens, and media tokens are placeholders"
ASK_SIZE = "pass group_size=, the samples of each prompt, to {}"


def prompt_texts(token_ids: Tensor, prompt_mask: Tensor) -> list[str]:
    """Text for the prompt of each row: its tokens where the mask is not 0."""
    return [str(ids[mask != 0].tolist()) for ids, mask in zip(token_ids, prompt_mask, strict=True)]


def is_by_prompt(modes: LossModes) -> bool:
    """True if a mode needs prompt ids."""
    return "prompt" in modes.rehearse(Samples([np.ones(1)], prompt_ids=["0"]))


def check_prompts(modes: LossModes, unknown: str) -> None:
    """Refuse a mode that needs ids of prompts, where a reason says why they are unknown."""
    if unknown and is_by_prompt(modes):
        raise ValueError(f"{modes.describe()}, for {unknown}. Choose a mode that does not group by prompt.")


def misplaced_ids(
    prompt_ids: Sequence[str], prompts: Sequence[str], dp_group: Group | None, group_size: int | None = None
) -> str:
    """The reason why ids may not be those of the rows' prompts, else empty; all ranks of the group call it.

    An id of several prompts, of which one has another id too, is what ids moved by a row look like. Neither alone is a
    sign: turns of one rollout have prompts of their own, and a prompt may come twice with two ids. But a prompt that
    comes twice has more rows than one group: fewer rows with several ids are a group whose ids differ.

    Args:
        prompt_ids: of this rank's rows.
        prompts: text for the tokens of each row's prompt.
        group_size: rows that are generated for each prompt, if known.
    """
    digests = [blake2b(text.encode(), digest_size=16).hexdigest() for text in prompts]
    num_rows = Counter(zip(prompt_ids, digests, strict=True))
    for group in several(dp_group):
        num_rows = sum(gather_objects(num_rows, group), Counter[tuple[str, str]]())
    ids_of, prompts_of = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    rows_of = Counter[str]()
    for (prompt_id, prompt), count in num_rows.items():
        ids_of[prompt].add(prompt_id)
        prompts_of[prompt_id].add(prompt)
        rows_of[prompt] += count
    for prompt_id, held in sorted(prompts_of.items()):
        if len(held) > 1 and any(len(ids_of[prompt]) > 1 for prompt in held):
            return (
                f"the prompt id {prompt_id!r} stands at rows with different prompt tokens, and rows with the tokens of "
                "one of them have another id: ids stand at other rows, or a prompt came several times."
            )
    for prompt, ids in sorted(ids_of.items()):
        if group_size is not None and len(ids) > 1 and rows_of[prompt] <= group_size:
            return (
                f"{rows_of[prompt]} rows with the same prompt tokens have {len(ids)} prompt ids where {group_size} "
                "are generated for each prompt: ids differ within a group."
            )
    return ""
