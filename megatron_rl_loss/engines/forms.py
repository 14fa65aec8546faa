"""What engines take from a loss function of yours, a row each; `core/carriers.py` says what a row means."""

from megatron_rl_loss.extend import DDP_MEAN, Carrier, Form, register_form

FORMS = (
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

for _form in FORMS:
    register_form(_form)
