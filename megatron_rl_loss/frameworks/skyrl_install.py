"""Replacements by `skyrl.AggregatedPolicyLoss` in the process of one of SkyRL's Megatron workers. Imports no SkyRL.

The weights travel in the micro-batch to SkyRL's loss function, and on its masks to what averages a term.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WEIGHTS = "_megatron_rl_loss_weights"
_MODULE = "skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper"


def install() -> None:
    """Replace SkyRL's functions, once; nothing where no Megatron worker was imported."""
    module: Any = sys.modules.get(_MODULE)
    if module is None or hasattr(module, WEIGHTS):
        return
    found = []
    for owner, name, replacement, parameters in (
        (module, "masked_mean", _mean, {"tensor", "mask", "dim"}),
        (module, "vocab_parallel_entropy_packed_sequences", _entropy, {"loss_mask"}),
        (module, "from_parallel_hidden_to_entropy_packed_sequences", _entropy, {"loss_mask"}),
        (module, "shift_mask_for_mtp", _shift, {"mask", "mtp_layer_number"}),
        (module, "draft_soft_ce", _draft, {"mask", "global_normalization_factor"}),
        (module, "draft_soft_ce_topk", _draft, {"mask", "global_normalization_factor"}),
        (module, "get_forward_backward_func", _schedule, set()),
        (module.MegatronModelWrapper, "forward_backward_mini_batch", _mini_batch, {"micro_batches", "loss_fn"}),
    ):
        stock = getattr(owner, name, None)
        if stock is None or not parameters <= set(inspect.signature(stock).parameters):
            raise ValueError(
                f"a SkyRL without {name}({', '.join(sorted(parameters))}): this package replaces it. Use a9564572, "
                "or 0.4.0."
            )
        found.append((owner, name, _replaced(stock, replacement)))
    for owner, name, replaced in found:
        setattr(owner, name, replaced)
    setattr(module, WEIGHTS, True)


Stock = Callable[[], Any]  # SkyRL's function of the arguments that were given, as they are by now


def _replaced(function: Any, replacement: Callable[[Stock, dict[str, Any]], Any]) -> Any:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        return replacement(lambda: function(*bound.args, **bound.kwargs), bound.arguments)

    return call


def _mini_batch(stock: Stock, given: dict[str, Any]) -> Any:
    by_name, losses = given.get("loss_fn"), sys.modules[_MODULE].PolicyLossRegistry
    loss = given["self"].policy_loss_fn if by_name is None else losses.get(by_name)
    if hasattr(loss, "weigh"):
        given["micro_batches"] = loss.weigh(given["self"], given["micro_batches"])
    return stock()


def _schedule(stock: Stock, given: dict[str, Any]) -> Any:
    schedule = stock()

    def run(*, forward_step_func: Any, **options: Any) -> Any:
        def forward_step(iterator: Any, model: Any) -> Any:
            output, loss_func = forward_step_func(iterator, model)
            of_batch = WEIGHTS in loss_func.keywords["data"]
            return output, functools.partial(_loss, loss_func) if of_batch else loss_func

        return schedule(forward_step_func=forward_step, **options)

    return run


def _loss(loss_func: Any, logits: Tensor) -> Any:
    """SkyRL's loss function, with the weights on its masks, and with metrics whose mean is that of the mini-batch."""
    data = loss_func.keywords["data"]
    weights, packed = data[WEIGHTS], data.get("packed_seq_params") is not None
    real = "mtp_packed_mask" if packed else "attention_mask"
    if weights["mtp"]:
        data[real] = data[real].to(logits.dtype, copy=True)  # the loss function's own cast then keeps the attribute
        setattr(data[real], WEIGHTS, weights["mtp"])
    data["loss_mask"] = data["loss_mask"].detach()
    setattr(data["loss_mask"], WEIGHTS, weights)
    loss, metrics = loss_func(logits)
    done = ("_loss", "_min", "_max", "_std", "policy_kl", "policy_entropy")
    for name, value in metrics.items():
        if isinstance(value, int | float) and not name.endswith(done):
            metrics[name] = value * weights["rows" if "seq" in name else "tokens"]
    return loss, metrics


def _mean(stock: Stock, given: dict[str, Any]) -> Any:
    values, weights = given["tensor"], getattr(given["mask"], WEIGHTS, None)
    if weights is None:
        return stock()
    if given.get("dim") is None:
        return (values * weights["entropy"]).sum()
    return (values * weights["kl"]).sum(given["dim"]) * len(values)  # the mean over rows follows


def _entropy(stock: Stock, given: dict[str, Any]) -> Any:
    weights = getattr(given["loss_mask"], WEIGHTS, None)
    if weights is None:
        return stock()
    total = weights["entropy"].sum()  # what the stock function divides by is then 1
    given["loss_mask"] = weights["entropy"] / total.where(total != 0, 1)
    whole, mine = (value * total for value in stock())
    return whole, whole.detach() + mine - mine.detach()  # the gradient is that of this CP rank's tokens


def _shift(stock: Stock, given: dict[str, Any]) -> Any:
    shifted, weights = stock(), getattr(given["mask"], WEIGHTS, None)
    if weights is None:
        return shifted
    column = torch.zeros_like(shifted, dtype=torch.float32)
    column[shifted != 0] = weights[given.get("mtp_layer_number", 0)]
    setattr(column, WEIGHTS, True)
    return column


def _draft(stock: Stock, given: dict[str, Any]) -> Any:
    if hasattr(given["mask"], WEIGHTS):
        given["global_normalization_factor"] = given["mask"].new_ones(())
    return stock()
