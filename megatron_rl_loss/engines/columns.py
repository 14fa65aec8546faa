"""Helpers of adapters that weigh advantages: a step's weights, prompt ids, checks."""

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.core.collectives import Group, StepGroups, check_together, several
from megatron_rl_loss.core.counting import StepTotals
from megatron_rl_loss.core.ids import as_ids
from megatron_rl_loss.core.samples import Samples
from megatron_rl_loss.core.transfers import to_device
from megatron_rl_loss.engines.places import value_at
from megatron_rl_loss.engines.prompt_tokens import is_by_prompt, misplaced_ids
from megatron_rl_loss.extend import LossModes, Plan, Trainer, make_plan

Batch = MutableMapping[str, Any]
#: Columns of a batch: a number for each row's prompt; what the advantages were multiplied by; and what they were; the
#: prompt ids and masks by which that was.
GROUPS, FACTORS, PLAIN, IDS, MASKS = (
    f"_megatron_rl_loss_{name}" for name in ("groups", "factors", "advantages", "prompt_ids", "masks")
)
MEDIA = "prompts with images or other media: prompts are identified by their tokens, and media tokens are placeholders"


def plan_of(
    modes: LossModes, describe: Callable[[], list[Samples]], dp_group: Group | None, term_masks: Sequence[str] = ()
) -> Plan:
    """The plan of uncut samples, one `Samples` per micro-batch; an error of one rank raises on all of the group."""
    return make_plan(describe, modes, Trainer(groups=StepGroups(dp_group)), term_masks=term_masks)


def token_mean_factors(
    modes: LossModes,
    describe: Callable[[], list[Samples]],
    *,
    dp_group: Group | None,
    even: str = "",
    tokens: Callable[[StepTotals], float] | None = None,
) -> tuple[list[Tensor], float]:
    """Factors ``w * T`` of tokens, a 1-D host tensor per micro-batch of this rank, and T.

    T is the number of the step's active tokens, or what `tokens` returns; an error that it raises does so on all ranks.

    The sum over tokens of factor * loss / T is the step loss of the policy's mode. With `even`, a remedy, factors that
    differ within a sample raise on all ranks of the group.
    """
    plan = plan_of(modes, describe, dp_group)
    count = float(plan.totals.step_active_tokens)
    if tokens is not None:
        count = check_together(lambda: tokens(plan.totals), several(dp_group))
    factors = [microbatch.weights * count for microbatch in plan]

    def check() -> None:
        for microbatch, flat in zip(plan, factors, strict=True):
            check_even(flat.split(microbatch.samples.mask_lengths), microbatch.samples.loss_masks, even)

    if even:
        check_together(check, several(dp_group))
    return factors, count


@dataclass(frozen=True)
class StepRow:
    """What `weigh_advantages` asks an engine about a step: functions of its `arguments`.

    Attributes:
        wrong: conditions that break the token mean, each with words for the error and a remedy.
        batches: this rank's, of a step.
        masks: a row for each sample of a batch.
        prompts: an id for each sample of a batch, or the reason why prompts are unknown.
        prompt_tokens: of a batch, text for the prompt's tokens of each sample, in an engine that is handed ids beside
            them.
    """

    name: str
    wrong: Callable[[Any], Sequence[tuple[bool, str, str]]]
    batches: Callable[[Any], Sequence[Any]]
    masks: Callable[[Any, Any], Sequence[Tensor]]
    prompts: Callable[[Any, Any], Sequence[Any] | str]
    prompt_tokens: Callable[[Any], Sequence[str]] | None = None

    def misplaced(
        self, modes: LossModes, arguments: Any, batches: Sequence[Any], dp_group: Group | None, group_size: int | None
    ) -> str:
        """As `misplaced_ids`, of a step's batches; empty for a mode that does not group by prompt."""
        if self.prompt_tokens is None or not is_by_prompt(modes):
            return ""
        ids = [str(prompt_id) for batch in batches for prompt_id in self.prompts(arguments, batch)]
        prompts = [prompt for batch in batches for prompt in self.prompt_tokens(batch)]
        return misplaced_ids(ids, prompts, dp_group, group_size)


def weigh_advantages(
    engine: StepRow, modes: LossModes, arguments: Any, *, dp_group: Group | None, **settings: Any
) -> tuple[list[Any], list[dict[str, Tensor]], float]:
    """Batches of a step of an engine that trains on a token mean, columns with weighed advantages for each, and T.

    `settings` as in `token_mean_factors`.
    """
    batches: list[Any] = []
    masks: list[list[Tensor]] = []
    prompts: list[Sequence[Any] | str] = []

    def describe() -> list[Samples]:
        for is_wrong, what, remedy in engine.wrong(arguments):
            if is_wrong:
                raise ValueError(
                    f"{what} with a loss aggregation: {engine.name} must train on the mean over the step's tokens. "
                    f"{remedy}."
                )
        batches.extend(engine.batches(arguments))
        masks.extend(list(engine.masks(arguments, batch)) for batch in batches)
        prompts.extend(engine.prompts(arguments, batch) for batch in batches)
        return samples_of(modes, masks, prompts)

    factors, tokens = token_mean_factors(modes, describe, dp_group=dp_group, **settings)
    columns = []
    for batch, of_batch, rows, ids in zip(batches, factors, masks, prompts, strict=True):
        plain = value_at(batch, "advantages")
        column = to_device(of_batch, plain.device).view(len(plain), -1)
        of_masks = to_device(torch.stack(rows), plain.device)
        columns.append({"advantages": plain * column, FACTORS: column, PLAIN: plain, MASKS: of_masks})
        if not isinstance(ids, str):
            numbers = torch.from_numpy(as_ids("prompt_ids", [*map(str, ids)], len(ids)))
            columns[-1][IDS] = to_device(numbers, plain.device)[:, None].expand(column.shape).clone()
    return batches, columns, tokens


def samples_of(
    modes: LossModes, masks: Sequence[Sequence[Any]], prompts: Sequence[Sequence[Any] | str], **more: Any
) -> list[Samples]:
    """Samples of micro-batches. `prompts` are ids, or the reason why ids are unknown: modes by prompt then raise."""
    described = []
    for of_batch, ids in zip(masks, prompts, strict=True):
        known = ["unknown"] * len(of_batch) if isinstance(ids, str) else [str(prompt_id) for prompt_id in ids]
        described.append(Samples(of_batch, prompt_ids=known, **more))
        if isinstance(ids, str) and "prompt" in modes.rehearse(described[-1]):
            raise ValueError(f"{modes.describe()}, for {ids}. Choose a mode that does not group by prompt.")
    return described


def at_masked_tokens(masks: Tensor, factors: Tensor, plain: Tensor) -> tuple[Tensor, Tensor]:
    """Factors and plain advantages for a trial: at masked tokens the trial has an advantage, so that masks are seen.

    A loss function with these masks gives such a token the weight 0 all the same.
    """
    is_masked = to_device(masks, factors.device) == 0
    return factors.masked_fill(is_masked, 1), plain.masked_fill(is_masked, 0)


def prompts_of(token_ids: Tensor, prompt_mask: Tensor) -> list[str]:
    """Prompt ids: the id of a row is its tokens where the mask is not 0."""
    return [str(ids[mask != 0].tolist()) for ids, mask in zip(token_ids, prompt_mask, strict=True)]


def check_even(factors: Sequence[Tensor], loss_masks: Sequence[Any], remedy: str) -> None:
    """Refuse factors that differ within a sample, for an engine that averages within each sample."""
    for factor, mask in zip(map(np.asarray, factors), map(np.asarray, loss_masks), strict=True):
        if factor.size and (factor != factor.max() * (mask != 0)).any():
            raise ValueError(
                "weights that differ within a sample, or a token mask that is not 0 and 1, for a loss that averages "
                f"within each sample: all tokens of a sample must have one weight. {remedy}, or choose another mode."
            )
