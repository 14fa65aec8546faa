"""The example `examples/pretrain_grpo.py`, run as a launch would run it, with its logged numbers caught."""

import shlex
import sys
from typing import Any

from repository import EXAMPLES

MODEL = """--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
    --no-position-embedding --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --tokenizer-type NullTokenizer --vocab-size 32 --padded-vocab-size 32 --transformer-impl local
    --no-persist-layer-norm --no-rope-fusion --no-masked-softmax-fusion --no-gradient-accumulation-fusion
    --no-bias-gelu-fusion --no-bias-dropout-fusion --distributed-backend gloo --use-cpu-initialization
    --cp-comm-type all_gather"""
#: For `shlex.split`: a folder may have a space in its name.
DATA = f"""--rollouts {shlex.quote(str(EXAMPLES / "arithmetic.jsonl"))} --prompts-per-step 4 --dataloader-type external
    --seq-length 256 --max-position-embeddings 256 --micro-batch-size 1 --global-batch-size 8
    --eval-iters 0 --eval-interval 1000"""
TRAINING = """--lr 1e-3 --lr-decay-style constant --clip-grad 1.0 --weight-decay 0
    --log-interval 1 --train-iters 2"""


def train(flags: list[str]) -> list[dict[str, float]]:
    """Run the example's `main` on this rank; on the last rank, every step's numbers as `training_log` got them."""
    import pretrain_grpo
    from megatron.training import training

    logged: list[dict[str, float]] = []
    training_log = training.training_log

    def catch(loss_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        iteration, grad_norm = args[2], args[6]
        if loss_dict:
            values = {name: float(value) for name, value in loss_dict.items()}
            logged.append({"iteration": iteration, "grad_norm": float(grad_norm), **values})
        return training_log(loss_dict, *args, **kwargs)

    training.training_log = catch
    sys.argv = ["pretrain_grpo.py", *MODEL.split(), *shlex.split(DATA), *TRAINING.split(), *flags]
    pretrain_grpo.main()
    return logged
