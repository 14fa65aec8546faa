"""Engines that take weights as columns of their batches: a row for each, a step's weights, and their loss measured.

Such an engine divides the sum of all tokens' losses by a number D of its own, as a rule the step's tokens. It trains on
any mode if the advantage of each token is multiplied by w * D, where w is the token's weight in the mode.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

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
from megatron_rl_loss.engines.places import Call, places, value_at
from megatron_rl_loss.engines.policy_tap import tap_policy
from megatron_rl_loss.engines.prompt_tokens import ASK_SIZE, check_prompts, is_by_prompt, misplaced_ids
from megatron_rl_loss.engines.replacing import Function
from megatron_rl_loss.extend import LossModes, Plan, Promises, Trainer, make_plan, observed_taps

Batch = MutableMapping[str, Any]
StepArguments = Mapping[str, Any]  # of a call of the function that trains a step, by name
#: Columns of a batch. FACTORS: w * D of each token, by which its advantage is multiplied. PLAIN: the advantages before.
#: IDS, MASKS, ROWS: prompt ids, masks and numbers of the rows by which the factors were made.
FACTORS, PLAIN, IDS, MASKS, ROWS = (
    f"_megatron_rl_loss_{name}" for name in ("factors", "advantages", "prompt_ids", "masks", "rows")
)


def megatron_group(step: StepArguments) -> Group:
    """Megatron's data-parallel group."""
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group()


class WeighedBatch(NamedTuple):
    """A batch with a mask and an id for each sample, or why ids are unknown, and by what advantages are multiplied."""

    batch: Any
    masks: list[Tensor]
    prompts: Sequence[Any] | str
    factors: Tensor


@dataclass(frozen=True, kw_only=True)
class BatchEngine:
    """What the library knows of an engine whose batches are padded rows with "advantages": functions of its step.

    Attributes:
        refusals: conditions under which the engine divides by another number, with words for the error and a remedy.
        batches: this rank's, of a step.
        masks: a row for each sample of a batch; asked for each micro-batch, too.
        prompts: an id for each sample of a batch, or the reason why prompts are unknown.
        prompt_tokens: of a batch, text for the prompt's tokens of each sample, in an engine that is handed ids, too.
        numbers_groups: the library numbers the groups itself, so that the user's group size is sure.
        group: the data-parallel group.
        divisor: the engine's own, if that is not the number of the step's active tokens.
        uneven: the remedy for weights that differ in a sample, of a loss that averages within each, else empty.
        group_size: the number of rows to generate for a prompt, if the engine's config has it.
        ask_size: words that ask for that number.
        unproved: the reason why a step cannot be proved, else empty.
        loss, batch: the row of the loss function; the path of the micro-batch, in its arguments or beside them.
        sums_masked: its policy loss has masked tokens too, at advantages of 0 by their weights, and in a trial none.
            Else they have advantages in a trial, so that masks are seen.
        correction: what the engine multiplies advantages by before its loss function, which is no weight.
        facts: of a call: coefficient of the loss and temperature of the logits.
        beside: of a call, the terms beside the policy loss, as the config names them; None if they are not measured.
        whole: the row of the function that calls the policy loss and adds other terms, if that is another function.
        padding: log-probs before and after those of the masks, in the whole loss function.
    """

    name: str = field(kw_only=False)
    versions: str
    refusals: Callable[[StepArguments], Sequence[tuple[bool, str, str]]] = lambda step: ()
    batches: Callable[[StepArguments], Sequence[Any]]
    masks: Callable[[StepArguments, Any], Sequence[Tensor]]
    prompts: Callable[[StepArguments, Any], Sequence[Any] | str]
    prompt_tokens: Callable[[Any], Sequence[str]] | None = None
    numbers_groups: bool = False
    group: Callable[[StepArguments], Group | None] = megatron_group
    divisor: Callable[[StepArguments, StepTotals], float] = lambda step, totals: totals.step_active_tokens
    uneven: Callable[[StepArguments], str] = lambda step: ""
    group_size: Callable[[StepArguments], int | None] = lambda step: None
    ask_size: str = ASK_SIZE.format("aggregate(...)")
    unproved: Callable[[StepArguments], str] = lambda step: ""
    loss: LossPaths
    batch: str
    sums_masked: bool = False
    correction: Callable[[StepArguments, Batch], Tensor | float] = lambda step, batch: 1.0
    facts: Callable[[StepArguments, Batch], dict[str, Any]] = lambda step, batch: {}
    beside: Callable[[StepArguments, Batch], Mapping[str, Beside] | None] = lambda step, batch: None
    whole: LossPaths | None = None
    padding: Callable[[StepArguments, Batch], tuple[int, int]] = lambda step, batch: (0, 0)

    def factors(self, modes: LossModes, step: StepArguments) -> tuple[list[WeighedBatch], float]:
        """The batches of a step, and the engine's divisor. All ranks call it."""
        batches: list[Any] = []
        masks: list[list[Tensor]] = []
        prompts: list[Sequence[Any] | str] = []

        def describe() -> list[Samples]:
            for is_so, what, remedy in self.refusals(step):
                if is_so:
                    raise ValueError(
                        f"{what} with a loss aggregation: {self.name} must train on the mean over the step's tokens. "
                        f"{remedy}."
                    )
            batches.extend(self.batches(step))
            masks.extend(list(self.masks(step, batch)) for batch in batches)
            prompts.extend(self.prompts(step, batch) for batch in batches)
            return described_samples(modes, masks, prompts)

        group, uneven = self.group(step), self.uneven(step)
        factors, divisor = advantage_factors(
            modes, describe, dp_group=group, uneven=uneven, divisor=lambda totals: self.divisor(step, totals)
        )
        return [WeighedBatch(*row) for row in zip(batches, masks, prompts, factors, strict=True)], divisor

    def weigh(
        self, modes: LossModes, step: StepArguments, proof: Any, group_size: int | None = None
    ) -> tuple[Sequence[Any], list[dict[str, Tensor]], float]:
        """Batches of a step, columns with weighed advantages for each, and the engine's divisor; on all ranks.

        In the step that the proof measures, columns say by what advantages were weighed, and the proof what of groups.
        """
        (weighed, divisor), columns, first = self.factors(modes, step), list[dict[str, Tensor]](), 0
        if proof is not None and not proof.is_over:
            proof.promises = self.promises(step, group_size)
            prompts = [(batch, ids) for batch, _, ids, _ in weighed]
            why = self.unproved(step) or self.misplaced(modes, step, prompts, proof.promises.group_size)
            if why:
                proof.give_up(why)
        for batch, rows, ids, factor in weighed:
            plain = value_at(batch, "advantages")
            column = to_device(factor, plain.device).view(len(plain), -1)
            columns.append({"advantages": plain * column})
            if proof is None or proof.is_over:
                continue
            columns[-1] |= {FACTORS: column, PLAIN: plain, MASKS: to_device(torch.stack(rows), plain.device)}
            columns[-1][ROWS] = _at_tokens(torch.arange(first, first := first + len(rows)), column)
            if not isinstance(ids, str):
                columns[-1][IDS] = _at_tokens(hashed_ids(ids), column)
        return [batch for batch, *_ in weighed], columns, divisor

    def promises(self, step: StepArguments, group_size: int | None) -> Promises:
        """What the user, or else the engine's config, says of the groups of prompts."""
        is_sure = self.numbers_groups and group_size is not None
        return Promises(group_size or self.group_size(step), is_group_size_sure=is_sure, ask_size=self.ask_size)

    def misplaced(
        self,
        modes: LossModes,
        step: StepArguments,
        prompts: Sequence[tuple[Any, Sequence[Any] | str]],
        group_size: int | None,
    ) -> str:
        """As `misplaced_ids`, of a step's batches and their ids; empty for a mode that does not group by prompt."""
        if self.prompt_tokens is None or not is_by_prompt(modes):
            return ""
        ids = [str(prompt_id) for _, known in prompts for prompt_id in known]
        texts = [text for batch, _ in prompts for text in self.prompt_tokens(batch)]
        return misplaced_ids(ids, texts, self.group(step), group_size)

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
        columns = {column: value_at(batch, column) for column in (FACTORS, PLAIN, MASKS, ROWS, IDS)}
        masks: Sequence[Tensor] = self.masks(step, batch)
        lengths = [len(mask) for mask in masks]
        if columns[MASKS] is not None:
            masks = columns[MASKS].reshape(-1).split(lengths)
        firsts = [0, *accumulate(lengths)][:-1]
        rows, ids = (
            column if column is None else column.reshape(-1)[firsts if column.numel() > len(firsts) else slice(None)]
            for column in (columns[ROWS], columns[IDS])
        )
        if is_whole:
            masks = [pad(mask, self.padding(step, batch)) for mask in masks]
        layout, labels = Gathered([0, *accumulate(map(len, masks))]), {} if rows is None else {"row": rows}
        samples = Samples(list(masks), layout=layout, prompt_ids=ids, labels=labels)
        factors, plain = None if is_whole else columns[FACTORS], None
        beside = self.beside(step, batch) if is_whole or self.whole is None else None
        if is_whole and ((taps := observed_taps()) is None or "pg" not in taps.losses):  # the step is wrong
            beside = None
        if factors is not None:
            device = value_at(batch, "advantages").device
            factors, plain = to_device(factors, device), to_device(columns[PLAIN], device)
            plain = plain * self.correction(step, batch)
            if not self.sums_masked:  # a loss function with these masks gives the token the weight 0 all the same
                is_masked = to_device(columns[MASKS], device) == 0
                factors, plain = factors.masked_fill(is_masked, 1), plain.masked_fill(is_masked, 0)
        return WeighedMicrobatch(samples, factors, plain, beside=beside, **self.facts(step, batch))


@dataclass(frozen=True, kw_only=True)
class TokenMeanEngine(BatchEngine):
    """An engine whose worker is a class with a method that trains a step: a row of `token_mean`.

    Attributes:
        step: the name of its step method, called once per optimizer step, and parameters that it must have.
        replace_loss: puts a call in place of the loss function, during a call of the step method.
        trains: True if an instance of the class trains a policy.
        unmeasured: words for terms beside the policy loss that are not measured.
        further: other methods that are replaced.
        checks: functions of the engine that run where workers train without the class; ours refuse it, or say so.
        schedule: another method that calls Megatron's schedule, if the class has it.
    """

    step: tuple[str, Sequence[str]]
    replace_loss: Callable[[StepArguments, Call], AbstractContextManager[None]]
    trains: Callable[[Any], bool] = lambda owner: True
    unmeasured: str = ""
    further: Sequence[tuple[str, Sequence[str], Call]] = ()
    checks: Callable[[Any], Sequence[Function]] = lambda owner: ()
    schedule: str = ""


def _at_tokens(numbers: Tensor, column: Tensor) -> Tensor:
    """A number of each row at all of its tokens."""
    return to_device(numbers, column.device)[:, None].expand(column.shape).clone()


def hashed_ids(prompt_ids: Sequence[Any]) -> Tensor:
    """An int64 for each id, by its text."""
    return torch.from_numpy(as_ids("prompt_ids", [*map(str, prompt_ids)], len(prompt_ids)))


def step_plan(modes: LossModes, describe: Callable[[], list[Samples]], dp_group: Group | None) -> Plan:
    """The plan of uncut samples, one `Samples` per micro-batch; an error of one rank raises on all of the group."""
    return make_plan(describe, modes, Trainer(groups=StepGroups(dp_group)))


def advantage_factors(
    modes: LossModes,
    describe: Callable[[], list[Samples]],
    *,
    dp_group: Group | None,
    uneven: str,
    divisor: Callable[[StepTotals], float],
) -> tuple[list[Tensor], float]:
    """Factors ``w * D`` of tokens, a 1-D host tensor per micro-batch of this rank, and D, what `divisor` returns.

    The sum over tokens of factor * loss / D is the step loss of the policy's mode. An error of `divisor` raises on all
    ranks of the group; so do, with `uneven`, a remedy, weights that differ within a sample.
    """
    plan = step_plan(modes, describe, dp_group)
    divided_by = float(check_together(lambda: divisor(plan.totals), several(dp_group)))

    def check() -> None:
        for microbatch in plan:
            check_even(microbatch.weights, microbatch.samples, uneven)

    if uneven:
        check_together(check, several(dp_group))
    return [microbatch.weights * divided_by for microbatch in plan], divided_by


def described_samples(
    modes: LossModes, masks: Sequence[Sequence[Any]], prompts: Sequence[Sequence[Any] | str]
) -> list[Samples]:
    """Samples of micro-batches. `prompts` are ids, or the reason why ids are unknown: modes by prompt then raise."""
    described = []
    for rows, ids in zip(masks, prompts, strict=True):
        check_prompts(modes, ids if isinstance(ids, str) else "")
        if not isinstance(ids, str) and any(prompt_id is None or prompt_id != prompt_id for prompt_id in ids):
            raise ValueError(
                "prompt ids with None or NaN: each row must have the id of its prompt. Give every row one."
            )
        known = ["unknown"] * len(rows) if isinstance(ids, str) else [str(prompt_id) for prompt_id in ids]
        described.append(Samples(rows, prompt_ids=known))
    return described


def check_even(weights: Tensor, samples: Samples, remedy: str) -> None:
    """Refuse weights that differ within a sample, for an engine that averages within each sample."""
    for own, mask in zip(map(np.asarray, weights.split(samples.mask_lengths)), samples.loss_masks, strict=True):
        if own.size and (own != own.max() * (np.asarray(mask) != 0)).any():
            raise ValueError(
                "weights that differ within a sample, or a token mask that is not 0 and 1, for a loss that averages "
                f"within each sample: all tokens of a sample must have one weight. {remedy}, or choose another mode."
            )
