"""The forms of a return value, a row each. The default, which most launches use alone, is in `plan/carriers.py`."""

from megatron_rl_loss.plan.carriers import DDP_MEAN, DEFAULT, Carrier, Form

#: A row for each form.
FORMS = {
    form.name: form
    for form in (
        DEFAULT,
        # The schedule multiplies the loss of a pair by the CP size, and divides it by the number of micro-batches.
        Form(
            name="2-tuple",
            parts=("loss", "report"),
            caller="schedule",
            carriers={
                False: Carrier(
                    returned={"num_microbatches": 1, "dp_size": 1},
                    schedule={"num_microbatches": -1, "cp_size": 1},
                    ddp=DDP_MEAN,
                )
            },
        ),
        # For a trainer that adds up the gradients of ranks and micro-batches and divides by nothing.
        Form(
            name="sum",
            parts=("loss",),
            caller="loop",
            carriers=dict.fromkeys((False, True), Carrier(dynamic_cp=True)),
        ),
        # For a trainer that averages gradients over the DP and CP ranks and adds up micro-batches: torch's DDP and
        # FSDP, or Megatron's DDP in a loop without its schedule.
        Form(
            name="mean",
            parts=("loss",),
            caller="loop",
            carriers={False: Carrier(returned={"dp_size": 1, "cp_size": 1}, ddp=DDP_MEAN)},
        ),
        # slime 624b824a, backends/megatron_utils/loss.py, and miles 31f1ca96, backends/training_utils/loss.py:
        # `loss_function`. They divide by the global batch size, which counts rollouts. Not for per-token loss: there
        # they divide by tokens of which each fully masked sample has one.
        Form(
            name="slime",
            parts=("loss", "report"),
            caller="engine",
            carriers={
                False: Carrier(
                    returned={"rollouts": 1},
                    engine={"num_microbatches": 1, "rollouts": -1, "dp_size": 1, "cp_size": 1},
                    schedule={"num_microbatches": -1},
                    ddp=DDP_MEAN,
                )
            },
        ),
        # verl 1dda039b and 0.9.1, workers/engine/megatron/transformer_impl.py, `postprocess_micro_batch_func`. With
        # per-token loss the step's tokens cancel: verl multiplies by them, Megatron divides. In dynamic CP dp_size is
        # 1.
        Form(
            name="verl",
            parts=("loss", "report"),
            caller="engine",
            carriers={
                False: Carrier(
                    returned={"dp_size": 1},
                    engine={"num_microbatches": 1},
                    schedule={"num_microbatches": -1, "cp_size": 1},
                    ddp=DDP_MEAN,
                ),
                True: Carrier(returned={"dp_size": 1}, engine={"dp_size": -1}, dynamic_cp=True),
            },
        ),
        # NeMo-RL 7ea279ab, models/megatron/train.py, `LossPostProcessor`: a pair with per-token loss, whose count of
        # tokens is 0, so that Megatron divides by nothing.
        Form(
            name="nemo_rl",
            parts=("loss", "report"),
            caller="engine",
            carriers={
                True: Carrier(
                    returned={"cp_size": 1},
                    engine={"num_microbatches": 1, "cp_size": -2},
                    schedule={"num_microbatches": -1, "cp_size": 1},
                )
            },
        ),
    )
}


def refusal(form: Form, per_token: bool, for_schedule: bool) -> ValueError:
    """Why the form is not exact in a plan with these settings."""
    if for_schedule and form.caller == "loop":
        return ValueError(
            f"form={form.name!r} in a plan of a Megatron model: such a plan is for Megatron's schedule, which takes "
            f"({', '.join(DEFAULT.parts)}), and the form is for loops without the schedule. Leave form out; in a loop "
            "of your own without the schedule, give plan_step dp_group= and cp_group= in place of model=."
        )
    has, alike = "with" if per_token else "without", [row for row in FORMS.values() if per_token in row.carriers]
    if per_token not in form.carriers:
        return ValueError(
            f"form={form.name!r} {has} per-token loss: this form does not cancel Megatron's scaling then. Turn "
            f"calculate_per_token_loss {'off' if per_token else 'on'}, or choose one of "
            f"{', '.join(repr(row.name) for row in alike)}."
        )
    exact = [repr(row.name) for row in FORMS.values() if True in row.carriers and row.carriers[True].dynamic_cp]
    return ValueError(
        f"form={form.name!r} {has} per-token loss, in a step whose cp_groups change between micro-batches: this "
        "form scales by group sizes and numbers of micro-batches, which then differ between ranks. Plan with "
        f"per-token loss, and return one of {', '.join(exact)}."
    )
