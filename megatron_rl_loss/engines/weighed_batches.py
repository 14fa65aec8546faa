"""Engines that take weights as columns of their batches: a row for each, a step's weights, and their loss measured.

Such an engine divides the sum of all tokens' losses by a number D of its own, as a rule the step's tokens. It trains on
any mode if the advantage of each token is multiplied by w * D, where w is the token's weight in the mode.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_rl_loss.core.collectives import Group, StepGroups, check_together, several
from megatron_rl_loss.core.counting import StepTotals
from megatron_rl_loss.core.ids import as_ids
from megatron_rl_loss.core.layouts import Gathered
from megatron_rl_loss.core.samples import Samples
from megatron_rl_loss.core.transfers import to_device
from megatron_rl_loss.engines.loss_trials import Beside, LossPaths, WeighedMicrobatch
from megatron_rl_loss.engines.places import places, value_at
from megatron_rl_loss.engines.policy_tap import tap_policy
from megatron_rl_loss.engines.prompt_tokens import ASK_SIZE, is_by_prompt, misplaced_ids
from megatron_rl_loss.extend import LossModes, Plan, Promises, Trainer, make_plan, observed_taps

Batch = MutableMapping[str, Any]
StepArguments = Mapping[str, Any]  # of a call of the function that trains a step, by name
#: Columns of a batch: a number for each row's prompt; what the advantages were multiplied by; and what they were; the
#: prompt ids, the masks and the numbers of the rows by which that was.
GROUPS, FACTORS, PLAIN, IDS, MASKS, ROWS = (
    f"_megatron_rl_loss_{name}" for name in ("groups", "factors", "advantages", "prompt_ids", "masks", "rows")
)


def megatron_group(step: StepArguments) -> Group:
    """Megatron's data-parallel group."""
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group()


@dataclass(frozen=True, kw_only=True)
class BatchEngine:
    """What the library knows of an engine whose batches are padded rows with "advantages": functions of its step.

    Attributes:
        wrong: conditions under which the engine divides by another number, each with words for the error and a remedy.
        batches: this rank's, of a step.
        masks: a row for each sample of a batch; asked for each micro-batch, too.
        prompts: an id for each sample of a batch, or the reason why prompts are unknown.
        prompt_tokens: of a batch, text for the prompt's tokens of each sample, in an engine that is handed ids, too.
        numbers_groups: the library numbers the groups itself, so that the user's group size is sure.
        group: the data-parallel group.
        divisor: the engine's own, if that is not the number of the step's active tokens.
        even: the remedy for a loss that averages within each sample, else empty.
        group_size: the number of rows to generate for a prompt, if the engine's config has it.
        ask_size: words that ask for that number.
        unproved: the reason why a step cannot be proved, else empty.
        loss, batch: the row of the loss function; the path of the micro-batch, in its arguments or beside them.
        loses_masked: its policy loss has masked tokens too, whose advantages are 0 by their weights.
        correction: what the engine multiplies advantages by before its loss function, which is no weight.
        facts: of a call: coefficient of the loss and temperature of the logits.
        beside: of a call, the terms beside the policy loss, as the config names them; None if they are not measured.
        whole: the row of the function that calls the policy loss and adds other terms, if that is another function.
        around: log-probs before and after those of the masks, in the whole loss function.
    """

    name: str = field(kw_only=False)
    versions: str
    wrong: Callable[[StepArguments], Sequence[tuple[bool, str, str]]] = lambda step: ()
    batches: Callable[[StepArguments], Sequence[Any]]
    masks: Callable[[StepArguments, Any], Sequence[Tensor]]
    prompts: Callable[[StepArguments, Any], Sequence[Any] | str]
    prompt_tokens: Callable[[Any], Sequence[str]] | None = None
    numbers_groups: bool = False
    group: Callable[[StepArguments], Group | None] = megatron_group
    divisor: Callable[[StepArguments, StepTotals], float] = lambda step, totals: totals.step_active_tokens
    even: Callable[[StepArguments], str] = lambda step: ""
    group_size: Callable[[StepArguments], int | None] = lambda step: None
    ask_size: str = ASK_SIZE.format("aggregate(...)")
    unproved: Callable[[StepArguments], str] = lambda step: ""
    loss: LossPaths
    batch: str
    loses_masked: bool = False
    correction: Callable[[StepArguments, Batch], Tensor | float] = lambda step, batch: 1.0
    facts: Callable[[StepArguments, Batch], dict[str, Any]] = lambda step, batch: {}
    beside: Callable[[StepArguments, Batch], Mapping[str, Beside] | None] = lambda step, batch: None
    whole: LossPaths | None = None
    around: Callable[[StepArguments, Batch], tuple[int, int]] = lambda step, batch: (0, 0)

    def weigh(self, modes: LossModes, step: StepArguments) -> tuple[Sequence[Any], list[dict[str, Tensor]], float]:
        """Batches of a step, columns with weighed advantages for each, and the engine's divisor; on all ranks."""
        batches: list[Any] = []
        masks: list[list[Tensor]] = []
        prompts: list[Sequence[Any] | str] = []

        def describe() -> list[Samples]:
            for is_wrong, what, remedy in self.wrong(step):
                if is_wrong:
                    raise ValueError(
                        f"{what} with a loss aggregation: {self.name} must train on the mean over the step's tokens. "
                        f"{remedy}."
                    )
            batches.extend(self.batches(step))
            masks.extend(list(self.masks(step, batch)) for batch in batches)
            prompts.extend(self.prompts(step, batch) for batch in batches)
            return described_samples(modes, masks, prompts)

        factors, divisor = advantage_factors(
            modes, describe, dp_group=self.group(step), even=self.even(step), divisor=lambda t: self.divisor(step, t)
        )
        columns, first = list[dict[str, Tensor]](), 0
        for batch, factor, rows, ids in zip(batches, factors, masks, prompts, strict=True):
            plain = value_at(batch, "advantages")
            column = to_device(factor, plain.device).view(len(plain), -1)
            own = {"advantages": plain * column, FACTORS: column, PLAIN: plain}
            own[MASKS] = to_device(torch.stack(rows), plain.device)
            own[ROWS] = _at_tokens(torch.arange(first, first := first + len(rows)), column)
            if not isinstance(ids, str):
                own[IDS] = _at_tokens(torch.from_numpy(as_ids("prompt_ids", [*map(str, ids)], len(ids))), column)
            columns.append(own)
        return batches, columns, divisor

    def promises(self, step: StepArguments, group_size: int | None) -> Promises:
        """What the user, or else the engine's config, says of the groups of prompts."""
        is_sure = self.numbers_groups and group_size is not None
        return Promises(group_size or self.group_size(step), is_group_size_sure=is_sure, ask_size=self.ask_size)

    def misplaced(self, modes: LossModes, step: StepArguments, batches: Sequence[Any], group_size: int | None) -> str:
        """As `misplaced_ids`, of a step's batches; empty for a mode that does not group by prompt."""
        if self.prompt_tokens is None or not is_by_prompt(modes):
            return ""
        ids = [str(prompt_id) for batch in batches for prompt_id in self.prompts(step, batch)]
        texts = [text for batch in batches for text in self.prompt_tokens(batch)]
        return misplaced_ids(ids, texts, self.group(step), group_size)

    def weigh_and_prove(
        self, modes: LossModes, step: StepArguments, proof: Any, group_size: int | None = None
    ) -> tuple[Sequence[Any], list[dict[str, Tensor]], float]:
        """As `weigh`, for a worker that proves its first step; after that with the weighed advantages alone."""
        batches, columns, divisor = self.weigh(modes, step)
        if proof is not None and not proof.is_over:
            proof.promises = self.promises(step, group_size)
            why = self.unproved(step) or self.misplaced(modes, step, batches, proof.promises.group_size)
            if why:
                proof.give_up(why)
        if proof is None or proof.is_over:
            columns = [{"advantages": own["advantages"]} for own in columns]
        return batches, columns, divisor

    def tap(self, step: StepArguments, stock: Callable[[], Any], loss: dict[str, Any]) -> Any:
        """The result of a call of the loss function, or of the whole one, whose arguments are `loss`, measured."""
        is_whole = self.whole is not None and self.whole.log_probs.partition(".")[0] in loss
        row = self.whole if self.whole is not None and is_whole else self.loss
        return tap_policy(row, stock, loss, lambda: self.measured(step, loss, is_whole=is_whole))

    def measured(self, step: StepArguments, loss: Mapping[str, Any], *, is_whole: bool = False) -> WeighedMicrobatch:
        """The micro-batch of a call of the (whole) loss function, with masks and ids as they were before the step.

        Changes to its advantages count as weights.
        """
        (container, name), *_ = places(self.batch, loss)
        batch = value_at(container, name)
        lengths = [len(row) for row in self.masks(step, batch)]
        edges = [0, *accumulate(lengths)]
        columns = {column: value_at(batch, column) for column in (FACTORS, PLAIN, MASKS, ROWS, IDS)}
        rows, ids = (
            None if column is None else column.reshape(-1)[edges[:-1]] for column in (columns[ROWS], columns[IDS])
        )
        labels = {} if rows is None else {"row": rows}
        masks = columns[MASKS].reshape(-1).split(lengths)
        if is_whole:
            before, after = self.around(step, batch)
            masks = [pad(mask, (before, after)) for mask in masks]
            samples = Samples(masks, layout=Gathered([0, *accumulate(map(len, masks))]), prompt_ids=ids, labels=labels)
            taps = observed_taps()
            is_tapped = taps is not None and "pg" in taps.losses  # else the step is wrong
            return WeighedMicrobatch(samples, None, None, beside=self.beside(step, batch) if is_tapped else None)
        device = value_at(batch, "advantages").device
        factors, plain = to_device(columns[FACTORS], device), to_device(columns[PLAIN], device)
        plain = plain * self.correction(step, batch)
        if not self.loses_masked:
            factors, plain = at_masked_tokens(columns[MASKS], factors, plain)
        samples = Samples(masks, layout=Gathered(edges), prompt_ids=ids, labels=labels)
        beside = None if self.whole else self.beside(step, batch)
        return WeighedMicrobatch(samples, factors, plain, beside=beside, **self.facts(step, batch))


def _at_tokens(numbers: Tensor, column: Tensor) -> Tensor:
    """A number of each row at all of its tokens."""
    return to_device(numbers, column.device)[:, None].expand(column.shape).clone()


def step_plan(modes: LossModes, describe: Callable[[], list[Samples]], dp_group: Group | None) -> Plan:
    """The plan of uncut samples, one `Samples` per micro-batch; an error of one rank raises on all of the group."""
    return make_plan(describe, modes, Trainer(groups=StepGroups(dp_group)))


def advantage_factors(
    modes: LossModes,
    describe: Callable[[], list[Samples]],
    *,
    dp_group: Group | None,
    even: str = "",
    divisor: Callable[[StepTotals], float] = lambda totals: totals.step_active_tokens,
) -> tuple[list[Tensor], float]:
    """Factors ``w * D`` of tokens, a 1-D host tensor per micro-batch of this rank, and D, what `divisor` returns.

    The sum over tokens of factor * loss / D is the step loss of the policy's mode. An error of `divisor` raises on all
    ranks of the group; so do, with `even`, a remedy, factors that differ within a sample.
    """
    plan = step_plan(modes, describe, dp_group)
    divided_by = float(check_together(lambda: divisor(plan.totals), several(dp_group)))
    factors = [microbatch.weights * divided_by for microbatch in plan]

    def check() -> None:
        for microbatch, flat in zip(plan, factors, strict=True):
            check_even(flat.split(microbatch.samples.mask_lengths), microbatch.samples.loss_masks, even)

    if even:
        check_together(check, several(dp_group))
    return factors, divided_by


def described_samples(
    modes: LossModes, masks: Sequence[Sequence[Any]], prompts: Sequence[Sequence[Any] | str]
) -> list[Samples]:
    """Samples of micro-batches. `prompts` are ids, or the reason why ids are unknown: modes by prompt then raise."""
    described = []
    for rows, ids in zip(masks, prompts, strict=True):
        known = ["unknown"] * len(rows) if isinstance(ids, str) else [str(prompt_id) for prompt_id in ids]
        described.append(Samples(rows, prompt_ids=known))
        if isinstance(ids, str) and "prompt" in modes.rehearse(described[-1]):
            raise ValueError(f"{modes.describe()}, for {ids}. Choose a mode that does not group by prompt.")
    return described


def at_masked_tokens(masks: Tensor, factors: Tensor, plain: Tensor) -> tuple[Tensor, Tensor]:
    """Factors and plain advantages for a trial: at masked tokens the trial has an advantage, so that masks are seen.

    A loss function with these masks gives such a token the weight 0 all the same.
    """
    is_masked = to_device(masks, factors.device) == 0
    return factors.masked_fill(is_masked, 1), plain.masked_fill(is_masked, 0)


def check_even(factors: Sequence[Tensor], loss_masks: Sequence[Any], remedy: str) -> None:
    """Refuse factors that differ within a sample, for an engine that averages within each sample."""
    for factor, mask in zip(map(np.asarray, factors), map(np.asarray, loss_masks), strict=True):
        if factor.size and (factor != factor.max() * (mask != 0)).any():
            raise ValueError(
                "weights that differ within a sample, or a token mask that is not 0 and 1, for a loss that averages "
                f"within each sample: all tokens of a sample must have one weight. {remedy}, or choose another mode."
            )
