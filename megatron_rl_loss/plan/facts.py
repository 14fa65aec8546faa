"""`StepFacts`: everything that the micro-batches of a step share on this rank."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_rl_loss.modes.loss_modes import LossModes
from megatron_rl_loss.plan.carriers import Carrier, Count, product
from megatron_rl_loss.reduction.metrics import Note
from megatron_rl_loss.reduction.sums import WeightedSum
from megatron_rl_loss.step.collectives import StepGroups, size_of
from megatron_rl_loss.step.totals import StepTotals


def check_finished(is_carried: Sequence[bool]) -> None:
    """Raise ValueError for a step of which some micro-batches were trained on and others were not."""
    if any(is_carried) and not all(is_carried):
        left = [number for number, one in enumerate(is_carried) if not one]
        raise ValueError(
            f"a plan of {len(is_carried)} micro-batches, of which {left[:8]} were not trained on: the weights of the "
            "others are those of the whole step. Train on all micro-batches of the plan in one call of the schedule; "
            "after an error in the step call plan.restart()."
        )


@dataclass(eq=False)
class StepFacts:
    """The facts of one step on this rank, and the notes of its micro-batches so far.

    Attributes:
        modes: of the policy loss and of further terms.
        totals: denominators of the whole step.
        num_microbatches: of this step on this rank.
        groups: that the step is spread over.
        per_token_loss: Megatron's `calculate_per_token_loss`.
        notes: the values of each micro-batch, by name.
        is_carried: for each micro-batch, True once its share was returned for training; always this list.
        watched: on a device, values whose sum is checked after the step: description, values, sum, reducer.
        wrong_tokens: on a device, the number of tokens that differ in each comparison with local tokens.
    """

    modes: LossModes
    totals: StepTotals
    num_microbatches: int
    groups: StepGroups = field(default_factory=StepGroups)
    per_token_loss: bool = False
    notes: list[dict[str, Note]] = field(init=False)
    is_carried: list[bool] = field(default_factory=list, init=False)
    watched: list[tuple[str, Tensor, Tensor, WeightedSum]] = field(default_factory=list, init=False)
    wrong_tokens: list[Tensor] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._constants: dict[tuple[float, torch.device], Tensor] = {}
        self.restart()

    def restart(self) -> None:
        """Drop all notes, and count no micro-batch as trained on."""
        self.notes = [{} for _ in range(self.num_microbatches)]
        self.is_carried[:] = [False] * self.num_microbatches
        self.watched.clear()
        self.wrong_tokens.clear()

    @property
    def cp_size(self) -> int:
        return size_of(self.groups.cp_group)

    @property
    def dp_size(self) -> int:
        return size_of(self.groups.dp_group)

    @property
    def dynamic_cp(self) -> bool:
        """True where context-parallel groups change between micro-batches."""
        return self.totals.dynamic_cp

    def factor(self, carrier: Carrier) -> float:
        """The factor of a share as it is returned by that row of the table of carriers."""
        rollouts = self.totals.units.get("rollout")
        counts: dict[Count, float | None] = {
            "num_microbatches": self.num_microbatches,
            "dp_size": 1 if self.dynamic_cp else self.dp_size,  # as verl says there
            "cp_size": self.cp_size,
            "step_active_tokens": self.totals.step_active_tokens,
            "rollouts": None if rollouts is None else rollouts.all,
        }
        return product(carrier.returned, counts)

    def constant(self, value: float, device: torch.device) -> Tensor:
        """A number on the device, 0-dim, int32 or float32, made once."""
        if (value, device) not in self._constants:
            dtype = torch.int32 if isinstance(value, int) else torch.float32
            self._constants[value, device] = torch.full((), value, dtype=dtype, device=device)
        return self._constants[value, device]

    def mark_carried(self, number: int, _: Tensor | None = None) -> None:
        """Note that a micro-batch was handed over for training, or that its gradient was made (a tensor's hook)."""
        self.is_carried[number] = True

    def check_fresh(self, number: int) -> None:
        """Raise ValueError for a micro-batch that was trained on."""
        if self.is_carried[number]:
            state = "was trained on already, all of it" if all(self.is_carried) else "is being trained on"
            raise ValueError(
                f"micro-batch {number} of a plan, a second time: the plan {state}. Call plan_step for each step; to "
                "train on the same samples again (another epoch, or after an error), call plan.restart() first."
            )

    def check_tokens(self) -> None:
        """Raise ValueError for local tokens that differ from the plan's cut of the samples; reads the device."""
        if wrong := sum(int(count) for count in self.wrong_tokens):
            raise ValueError(
                f"{wrong} local tokens that are not those of the plan's layout: the model cuts the micro-batch in "
                "another way, so losses would get the weights of other tokens. Give Samples the model's layout: "
                "ZigzagTHD for Megatron's packed sequences, ZigzagBSHD for its rows."
            )

    def report_not_finite(self) -> None:
        """Log the first bad token of each sum on a device that is NaN or infinite; reads the device."""
        for what, values, total, reducer in self.watched:
            if not bool(total.isfinite()):
                reducer.report_not_finite(what, values)
        self.watched.clear()
