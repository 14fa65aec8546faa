"""Taps on the policy losses of AReaL, ROLL and RLinf, for the proof of the first step: see `tap_slopes`."""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_rl_loss.reduction.taps import is_observed, tap_slopes
from megatron_rl_loss.step.layouts import Gathered
from megatron_rl_loss.step.samples import Samples

Given = Mapping[str, Any]  # the arguments of a call of the step method, by name
Batch = MutableMapping[str, Any]
Places = tuple[Any, dict[str, Any]]  # a mapping, and values that replace its own during a call of the step method
#: Columns of a batch: a number for each row's prompt; what the advantages were multiplied by; and what they were.
GROUPS, FACTORS, PLAIN = (f"_megatron_rl_loss_{name}" for name in ("groups", "factors", "advantages"))


def is_running(owner: type, trains: Callable[[Any], bool]) -> bool:
    """True while a method of a policy's instance runs: a critic of the same process trains by methods of another."""
    frame = sys._getframe()
    while frame is not None:
        if isinstance(instance := frame.f_locals.get("self"), owner):
            return trains(instance)
        frame = frame.f_back  # type: ignore[assignment]
    return False


@contextmanager
def instead(mapping: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Replace values of the mapping inside a ``with``."""
    before = {name: mapping[name] for name in values if name in mapping}
    for name, value in values.items():
        mapping[name] = value
    try:
        yield
    finally:
        for name in values:
            if name in before:
                mapping[name] = before[name]
            else:
                del mapping[name]


def _tapped(
    loss: Tensor,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    log_probs: Tensor,
    batch: Batch,
    advantages: Tensor,
    masks: Sequence[Tensor],
    prompts: Sequence[Any] | str,
    **more: Any,
) -> Tensor:
    """`tap_slopes` of a micro-batch whose log-probs every context-parallel rank holds, one for each entry of a mask.

    Changes to the weighted `advantages` before the loss function got them count as weights.
    """
    factors, plain = (batch[name].to(log_probs.device) for name in (FACTORS, PLAIN))
    factors = factors * (advantages / (plain * factors)).nan_to_num(1.0)
    layout = Gathered([0, *accumulate(map(len, masks))])
    samples = Samples(masks, layout=layout, prompt_ids=None if isinstance(prompts, str) else [*map(str, prompts)])
    return tap_slopes(loss, loss_of, log_probs, factors, samples=samples, **more)


def tap_areal(given: Given, engine: Any) -> Places:
    """Replace the functions of the loss and of its weight that `train_batch` gets; batches are packed by then."""
    stock, weigh, temperature = given["loss_fn"], given["loss_weight_fn"], given["self"].config.temperature

    def tapped(loss: Tensor, loss_of: Any, log_probs: Tensor, batch: Batch) -> Tensor:
        lengths = batch["cu_seqlens"].diff().tolist()
        prompts = [one[0].item() for one in batch[GROUPS].split(lengths)] if GROUPS in batch else ""
        masks = batch["loss_mask"].float().split(lengths)
        coef = batch.get("rl_loss_weight", 1.0) if "teacher_logp" in batch else None
        more = {"coef": coef, "temperature": temperature}
        return _tapped(loss, loss_of, log_probs, batch, batch["advantages"], masks, prompts, **more)

    def loss_fn(log_probs: Tensor, entropy: Tensor, batch: Batch, **more: Any) -> Tensor:
        def loss_of(leaf: Tensor, advantages: Tensor) -> Tensor:
            values = {"advantages": advantages, "logprobs": leaf.detach(), "prox_logp": leaf.detach()}
            with instead(batch, values), ExitStack() as stack:
                for tracker in sys.modules["areal.utils.stats_tracker"].TRACKERS.values():
                    stats = defaultdict(list, {name: [*kept] for name, kept in tracker.stats.items()})
                    stack.enter_context(instead(vars(tracker), {"stats": stats}))
                return stock(leaf, entropy, batch, **more)

        return tapped(stock(log_probs, entropy, batch, **more), loss_of, log_probs, batch)

    def loss_weight_fn(batch: Batch) -> Tensor:
        weight = weigh(batch)
        if is_observed() and not weight:  # AReaL does not call the loss function
            none = torch.zeros_like(batch["advantages"], requires_grad=True)
            tapped(none.sum(), lambda leaf, _: leaf.sum() * 0, none, batch)
        return weight

    return given, {"loss_fn": loss_fn, "loss_weight_fn": loss_weight_fn}


def tap_roll(given: Given, engine: Any) -> Places:
    """Replace the loss function that `train_step` gets; that function has its strategy compute log-probs."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    stock, strategy = given["loss_func"], given["self"]
    config = strategy.worker.pipeline_config
    strategy.forward_backward_func = get_forward_backward_func()  # ROLL keeps one from before the proof

    def loss_func(data: Any, output: Tensor) -> tuple[Tensor, Any]:
        compute, seen = strategy.op_compute_log_probs, list[Tensor]()

        def see(*args: Any, **kwargs: Any) -> Tensor:
            seen.append(compute(*args, **kwargs))
            return seen[-1]

        with instead(vars(strategy), {"op_compute_log_probs": see}):
            loss, metrics = stock(data, output)
        if not seen:
            return loss, metrics

        def loss_of(leaf: Tensor, advantages: Tensor) -> Tensor:
            old = leaf.detach()
            columns = {"advantages": advantages, "old_log_probs": old, "infer_logprobs": old}
            columns["train_infer_is_weight"] = torch.ones_like(old)
            now = {"op_compute_log_probs": lambda *_, **__: leaf}
            now["op_compute_entropy"] = lambda *_, **__: torch.zeros_like(leaf)  # ROLL's may change logits
            before = {"get_old_log_probs_with_cache": lambda *_, **__: old}
            with instead(data.batch, columns), instead(vars(strategy), now), instead(vars(strategy.worker), before):
                loss_at_leaf: Tensor = stock(data, output)[0]
                return loss_at_leaf

        call = {"self": strategy, "batch": data}
        masks, prompts = list(engine.masks(call, data.batch).float()), engine.prompts(call, data.batch)
        temperature = None if config.entropy_loss_coef else 1.0  # an entropy's gradients arrive at logits too
        more = {"coef": getattr(config, "rl_loss_coef", None), "temperature": temperature}
        advantages = data.batch["advantages"]
        return _tapped(loss, loss_of, seen[0], data.batch, advantages, masks, prompts, **more), metrics

    return given, {"loss_func": loss_func}


def tap_rlinf(given: Given, engine: Any) -> Places:
    """Replace the worker's forward step; its loss function calls `policy_loss` of its module."""
    worker = given["self"]
    theirs = worker.get_forward_step_func()

    def forward_step(iterator: Iterator[Batch], model: Any) -> tuple[Any, Any]:
        batch = next(iterator)
        output, loss_func = theirs(iter([batch]), model)

        def observed(output: Any) -> Any:
            policy_loss = theirs.__globals__["policy_loss"]

            def tapped(**losses: Any) -> tuple[Tensor, Any]:
                def loss_of(leaf: Tensor, advantages: Tensor) -> Tensor:
                    values = {"logprobs": leaf, "old_logprobs": leaf.detach(), "advantages": advantages}
                    return policy_loss(**losses | values)[0]

                loss, metrics = policy_loss(**losses)
                masks, prompts = list(engine.masks(given, batch).float()), engine.prompts(given, batch)
                is_fixed = worker.cfg.algorithm.get("importance_sampling_fix", False)
                advantages = (batch if is_fixed else losses)["advantages"].to(loss.device)
                log_probs = losses["logprobs"]  # The model's output is a dict, no logits.
                return _tapped(loss, loss_of, log_probs, batch, advantages, masks, prompts, temperature=None), metrics

            with instead(theirs.__globals__, {"policy_loss": tapped}):
                return loss_func(output)

        return output, observed if is_observed() else loss_func

    return vars(worker), {"get_forward_step_func": lambda: forward_step}
