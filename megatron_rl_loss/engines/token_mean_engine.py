"""What `token_mean` asks of an engine that trains on a token mean, and the measurement of its loss function."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from megatron_rl_loss.core.counting import StepTotals
from megatron_rl_loss.core.layouts import Gathered
from megatron_rl_loss.core.samples import Samples
from megatron_rl_loss.core.transfers import to_device
from megatron_rl_loss.engines.columns import FACTORS, IDS, MASKS, PLAIN, Batch, StepRow, at_masked_tokens
from megatron_rl_loss.engines.loss_trials import Beside, LossPaths, WeighedMicrobatch
from megatron_rl_loss.engines.places import Call, places, value_at
from megatron_rl_loss.engines.policy_tap import tap_policy
from megatron_rl_loss.engines.replacing import Function
from megatron_rl_loss.extend import observed_taps

StepArguments = Mapping[str, Any]  # the arguments of a call of the step method, by name


@dataclass(frozen=True, kw_only=True)
class TokenMeanEngine(StepRow):
    """An engine whose batches are padded rows with "advantages"; its `masks` are asked for each micro-batch, too.

    Attributes:
        step: the name of its step method, called once per optimizer step, and parameters that it must have.
        group: the data-parallel group.
        loss, batch: the row of the loss function; the path of the micro-batch, in its arguments or beside them.
        put: puts a call in place of the loss function, during a call of the step method.
        mends: `put` mends the engine too, and is needed in every step.
        loses_masked: its policy loss has masked tokens too, whose advantages are 0 by their weights.
        correction: what the engine multiplies advantages by before its loss function, which is no weight.
        facts: of a call: coefficient of the loss and temperature of the logits.
        of_samples: the remedy for a loss that averages within each sample, else empty.
        unproved: the reason why a call cannot be proved, else empty.
        group_size: the number of rows to generate for a prompt, if known.
        trains: True if an instance of the class trains a policy.
        tokens: its divisor, if that is not the number of the step's active tokens; checked against what the step has.
        whole: the row of the function that calls the policy loss and adds other terms, if that is another function.
        around: log-probs before and after those of the masks, in the whole loss function.
        beside: of a call, the terms beside the policy loss, as the config names them; None if they are not measured.
        unmeasured: words for terms beside the policy loss that are not measured.
        further: other methods that are replaced.
        checks: functions of the engine that run where workers train without the class; ours refuse it, or say so.
        runs: another method that calls Megatron's schedule, if the class has it.
    """

    versions: str
    step: tuple[str, Sequence[str]]
    group: Callable[[StepArguments], Any]
    loss: LossPaths
    batch: str
    put: Callable[[StepArguments, Call], AbstractContextManager[None]]
    facts: Callable[[StepArguments, Batch], dict[str, Any]]
    unproved: Callable[[StepArguments], str] = lambda step: ""
    group_size: Callable[[Any], int | None] = lambda owner: None
    trains: Callable[[Any], bool] = lambda owner: True
    of_samples: Callable[[StepArguments], str] = lambda step: ""
    tokens: Callable[[StepArguments, StepTotals], float] | None = None
    whole: LossPaths | None = None
    around: Callable[[StepArguments, Batch], tuple[int, int]] = lambda step, batch: (0, 0)
    beside: Callable[[StepArguments, Batch], Mapping[str, Beside] | None] = lambda step, batch: None
    unmeasured: str = ""
    further: Sequence[tuple[str, Sequence[str], Call]] = ()
    checks: Callable[[Any], Sequence[Function]] = lambda owner: ()
    runs: str = ""
    mends: bool = False
    loses_masked: bool = False
    correction: Callable[[StepArguments, Batch], Tensor | float] = lambda step, batch: 1.0

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
        ids = batch[IDS].reshape(-1)[edges[:-1]] if IDS in batch.keys() else None  # noqa: SIM118  of a TensorDict
        masks = batch[MASKS].reshape(-1).split(lengths)
        if is_whole:
            before, after = self.around(step, batch)
            masks = [pad(mask, (before, after)) for mask in masks]
            samples = Samples(masks, layout=Gathered([0, *accumulate(map(len, masks))]), prompt_ids=ids)
            taps = observed_taps()
            is_tapped = taps is not None and "pg" in taps.losses  # else the step is wrong
            return WeighedMicrobatch(samples, None, None, beside=self.beside(step, batch) if is_tapped else None)
        factors, plain = (to_device(batch[column], batch["advantages"].device) for column in (FACTORS, PLAIN))
        plain = plain * self.correction(step, batch)
        if not self.loses_masked:
            factors, plain = at_masked_tokens(batch[MASKS], factors, plain)
        samples = Samples(masks, layout=Gathered(edges), prompt_ids=ids)
        beside = None if self.whole else self.beside(step, batch)
        return WeighedMicrobatch(samples, factors, plain, beside=beside, **self.facts(step, batch))


def megatron_group(step: StepArguments) -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group()
