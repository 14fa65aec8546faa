"""Check of loss functions in every cut of the step, as trainers call them. Seconds on a CPU, without Megatron."""

from functools import partial

from torch import Tensor

from megatron_rl_loss import check_loss
from megatron_rl_loss.audit.simulation import LossCall


def bnpo(losses: Tensor, mask: Tensor, gradient_accumulation_steps: int) -> Tensor:
    """`trl`'s bnpo: the token mean of each local batch, averaged."""
    return (losses * mask).sum() / mask.sum().clamp(min=1) / gradient_accumulation_steps


def agg_loss(loss_mat: Tensor, loss_mask: Tensor, mode: str, dp_size: int, batch_num_tokens: int) -> Tensor:
    """A loss function as `verl` calls it, with the mask and counts of the whole step."""
    assert mode == "token-mean"
    return (loss_mat * loss_mask).sum() / batch_num_tokens * dp_size


def compute_loss(losses: list[Tensor], masks: list[Tensor], loss_scale: Tensor) -> Tensor:
    """A loss function as `prime_rl` calls it: one tensor per sequence, and one number to divide by."""
    total = sum((loss[mask.bool()].sum() for loss, mask in zip(losses, masks, strict=True)), losses[0].new_zeros(()))
    return total / loss_scale.clamp(min=1)


def mine(losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Tensor:
    """A loss function that ignores DDP's average over ranks."""
    return (losses * mask).sum() / step_tokens


def main() -> None:
    print(check_loss(bnpo, "token_mean", call="trl"), "\n")
    print(check_loss(partial(agg_loss, mode="token-mean"), "verl:token-mean", call="verl"), "\n")
    print(check_loss(compute_loss, "token_mean", call="prime_rl"), "\n")
    print(check_loss(mine, "token_mean", call=LossCall(microbatches="sum", dp="mean")))


if __name__ == "__main__":
    main()
