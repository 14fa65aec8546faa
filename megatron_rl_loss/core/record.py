"""`StepRecord`: what the micro-batches of a step share on this rank, its settings and what became of them so far."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from megatron_rl_loss.core.aggregation import Aggregation, LossModes
from megatron_rl_loss.core.carriers import DEFAULT, Carrier, Count, Form, product
from megatron_rl_loss.core.collectives import Group, StepGroups, size_of
from megatron_rl_loss.core.counting import StepTotals
from megatron_rl_loss.core.metrics import Note
from megatron_rl_loss.core.reducers import WeightedSum
from megatron_rl_loss.core.samples import Samples


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Who trains a step: the ranks that it is spread over, and how their trainer scales what a loss function returns.

    Attributes:
        groups: that the step is spread over.
        per_token_loss: Megatron's `calculate_per_token_loss`.
        form: that `Microbatch.loss` returns unless another one is asked for.
        check_form: of a Megatron model, whose schedule calls the loss functions: raises ContractError for a form that
            the installed schedule scales in another way than the form's row says. None without a model.
        device: of the model; without a model the host.
    """

    groups: StepGroups = field(default_factory=StepGroups)
    per_token_loss: bool = False
    form: Form = DEFAULT
    check_form: Callable[[Form], object] | None = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009


def check_finished(is_carried: Sequence[bool]) -> None:
    """Raise ValueError for a step of which some micro-batches were trained on and others were not."""
    if any(is_carried) and not all(is_carried):
        left = [number for number, was_carried in enumerate(is_carried) if not was_carried]
        raise ValueError(
            f"a plan of {len(is_carried)} micro-batches, of which {left[:8]} were not trained on: the weights of the "
            "others hold only for the whole step. Train on all micro-batches of the plan, in one call of the schedule "
            "or one loop; after an error in the step call plan.reset()."
        )


@dataclass(eq=False)
class PlanUse:
    """What became of a plan on this rank; it outlives the plan, whose samples it does not keep.

    Attributes:
        policy: the aggregation of the policy loss.
        cp_group: by which micro-batches are cut that have no group of their own.
        is_carried: for each micro-batch, True once its share was returned for training; one list for good.
        is_used: True once a micro-batch made a reducer or a share.
        was_compiled: some share was made in a compiled graph, where no hook can be set.
        forms: by name, those in which micro-batches returned their shares.
    """

    policy: Aggregation
    cp_group: Group | None = None
    is_carried: list[bool] = field(default_factory=list)
    is_used: bool = False
    was_compiled: bool = False
    forms: dict[str, Form] = field(default_factory=dict)
    _samples: list["ReferenceType[Samples]"] = field(default_factory=list)

    @property
    def samples(self) -> list[Samples]:
        """Those of each micro-batch; none of a plan that is gone, or on a pipeline stage that reads no data."""
        alive = [samples() for samples in self._samples]
        return [samples for samples in alive if samples is not None] if None not in alive else []

    @samples.setter
    def samples(self, microbatch_samples: Sequence[Samples]) -> None:
        self._samples = [ref(samples) for samples in microbatch_samples]


@dataclass(eq=False)
class StepRecord:
    """The settings of one step on this rank, and what its micro-batches have done so far.

    Attributes:
        modes: of the policy loss and of further terms.
        totals: denominators of the whole step.
        num_microbatches: of this step on this rank.
        trainer: the ranks of the step, and how their trainer scales a loss.
        notes: the values of each micro-batch, by name.
        use: what became of the step's plan.
        watched: values whose sum is checked after the step, on a device or summed in an output head:
            description, values, sum, reducer.
        wrong_tokens: on a device, the number of tokens that differ in each comparison with local tokens.
        counted: by name, numbers that micro-batches of this rank have added up.
    """

    modes: LossModes
    totals: StepTotals
    num_microbatches: int
    trainer: Trainer = field(default_factory=Trainer)
    notes: list[dict[str, Note]] = field(init=False)
    use: PlanUse = field(init=False)
    cp_size: int = field(init=False)
    dp_size: int = field(init=False)
    watched: list[tuple[str, Tensor, Tensor, WeightedSum]] = field(default_factory=list, init=False)
    wrong_tokens: list[Tensor] = field(default_factory=list, init=False)
    counted: dict[str, list[float]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.use = PlanUse(self.modes.policy, self.groups.cp_group)
        # Read here, since torch.compile follows no process group: a micro-batch's loss may be compiled.
        self.cp_size, self.dp_size = size_of(self.groups.cp_group), size_of(self.groups.dp_group)
        self._constants: dict[tuple[str, torch.device], Tensor] = {}
        self.reset()

    @property
    def is_carried(self) -> list[bool]:
        return self.use.is_carried

    def reset(self) -> None:
        """Drop all notes, and count no micro-batch as trained on."""
        self.notes = [{} for _ in range(self.num_microbatches)]
        self.is_carried[:] = [False] * self.num_microbatches
        self.use.is_used = self.use.was_compiled = False
        self.use.forms.clear()
        self.watched.clear()
        self.wrong_tokens.clear()
        self.counted.clear()

    @property
    def groups(self) -> StepGroups:
        return self.trainer.groups

    @property
    def dynamic_cp(self) -> bool:
        """True where context-parallel groups change between micro-batches."""
        return self.totals.dynamic_cp

    def factor(self, carrier: Carrier) -> float:
        """The factor of a share as that carrier returns it."""
        counts: dict[Count, float] = {
            "num_microbatches": self.num_microbatches,
            "ranks": self.dp_size * self.cp_size,  # where CP groups change, dp_group has the ranks of both
            "dp_size": 1 if self.dynamic_cp else self.dp_size,  # as verl says there
            "cp_size": self.cp_size,
            "step_active_tokens": self.totals.step_active_tokens,
            "rollouts": self.totals.units["rollout"].number["all"],
        }
        return product(carrier.returned, counts)

    def constant(self, value: float, device: torch.device) -> Tensor:
        """A number on the device, 0-dim, int32 or float32, made once."""
        if (key := (repr(value), device)) not in self._constants:  # torch.compile has no guard for a key of NaN
            dtype = torch.int32 if isinstance(value, int) else torch.float32  # Megatron sums token counts as int32
            with torch.inference_mode(False):  # they serve in training too
                self._constants[key] = torch.full((), value, dtype=dtype, device=device)
        return self._constants[key]

    def placeholder(self, device: torch.device) -> Tensor:
        """NaN, in the place of a value of this step in a report."""
        return self.constant(math.nan, device)

    def check_fresh(self, number: int) -> None:
        """Raise ValueError for a micro-batch that was trained on."""
        if self.is_carried[number]:
            state = "was trained on already, all of it" if all(self.is_carried) else "is being trained on"
            raise ValueError(
                f"micro-batch {number} of a plan, a second time: the plan {state}. Pass all terms in one call of "
                "loss, and call plan_step for each step; to train on the same samples again (another "
                "epoch, or after an error), call plan.reset() first."
            )

    def take_form(self, form: Form) -> None:
        """Note the form of a micro-batch; ValueError for another form than the step's others had."""
        for name, other in self.use.forms.items():
            if name != form.name:
                raise ValueError(
                    f"a loss for {form} in a step whose other micro-batches were returned for {other}: a trainer "
                    "scales all micro-batches alike, so all must have one form. Pass the same form in every "
                    "micro-batch, or none."
                )
        if self.trainer.check_form is not None and form.name not in self.use.forms:
            self.trainer.check_form(form)
        self.use.forms[form.name] = form

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
