"""What `token_mean` knows of AReaL's Megatron and FSDP engines.

Source: AReaL 2.0.0 (cbff54d6), engine/megatron_engine.py, trainer/ppo/actor.py.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_rl_loss.engines.loss_trials import LossPaths
from megatron_rl_loss.engines.places import Call, swapped, wrapped
from megatron_rl_loss.engines.replacing import Function, is_replaced
from megatron_rl_loss.engines.weighed_batches import Batch, StepArguments, TokenMeanEngine
from megatron_rl_loss.extend import is_observed

#: A column of a batch: the number of each row's group, which is one prompt's.
GROUPS = "_megatron_rl_loss_groups"


def _batches(step: StepArguments) -> Sequence[Batch]:
    return step["input_"] if isinstance(step["input_"], list) else [step["input_"]]


def _prompts(step: StepArguments, batch: Batch) -> Sequence[Any] | str:
    if GROUPS not in batch:
        return "a step outside of ppo_update: ppo_update numbers the groups"
    return [numbers[0].item() for numbers in _rows(batch, GROUPS)]


def _prompt_tokens(batch: Batch) -> list[str]:
    """A row's tokens before the first one that is trained on, or all; masks are those of the next token."""
    rows = zip(_rows(batch, "input_ids"), _rows(batch, "loss_mask"), strict=True)
    return [str(ids[: int(mask.bool().int().argmax()) + 1 if mask.any() else None].tolist()) for ids, mask in rows]


def _rows(batch: Batch, column: str) -> Sequence[Tensor]:
    """The rows of a padded or packed column."""
    values = batch[column]
    return list(values) if values.dim() == 2 else values.split(_lengths(batch))


def _lengths(batch: Batch) -> list[int]:
    """Of each row of a packed batch; a tree's has the rows that run through it, one after the other."""
    if "trie_node" not in batch:
        return list(batch["cu_seqlens"].diff().tolist())
    trie = batch["trie_node"]
    return [sum(node.num_tokens for node in trie.nodes if i in node.sequence_ids) for i in trie.all_sequence_ids]


def _give_groups(stock: Callable[[], Any], step: dict[str, Any]) -> Any:
    """Number AReaL's trajectory groups, each generated from one item of the data, in a column that is cut as tokens."""
    (groups,), first = step["args"], step["self"].data_parallel_group.rank() << 32
    columns = [torch.full_like(group["input_ids"], first + i, dtype=torch.int64) for i, group in enumerate(groups)]
    step["args"] = ([{**group, GROUPS: column} for group, column in zip(groups, columns, strict=True)],)
    return stock()


def _group_size(step: StepArguments) -> int | None:
    norms: list[Any] = [getattr(step["self"].config, name, None) for name in ("adv_norm", "reward_norm")]
    return next((norm.group_size for norm in norms if getattr(norm, "mean_level", None) == "group"), None)


def _facts(step: StepArguments, batch: Batch) -> dict[str, Any]:
    """AReaL multiplies losses by the loss scale itself, of which its Megatron knows nothing."""
    scale = float(step["self"].optimizer.get_loss_scale())
    coef = scale * (batch.get("rl_loss_weight", 1.0) if "teacher_logp" in batch else 1.0)
    # Gradients of rows that share a slot add up there, so that their sizes do not: those of a tree are not followed.
    temperature = None if "trie_node" in batch else step["self"].config.temperature
    return {"coef": None if coef == 1 else coef, "temperature": temperature}


@contextmanager
def _replace_loss(step: Any, call: Call) -> Iterator[None]:
    """In place of the loss; AReaL calls none for a micro-batch that weighs nothing, so that its weight does.

    Groups were read by then: what AReaL cuts into micro-batches, and sends, has them no more.
    """
    for batch in _batches(step):
        batch.pop(GROUPS, None)

    def weigh(stock: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        weight, (batch, *_) = stock(), arguments.values()
        if is_observed() and not weight:
            none = torch.zeros_like(batch["advantages"], requires_grad=True)
            loss: dict[str, Any] = {"logprobs": none, "entropy": none, "input_data": {**batch, "logprobs": none}}
            call(lambda: none.sum() * 0, loss)
        return weight

    calls = {"loss_fn": call, "loss_weight_fn": weigh}
    with swapped(step, {name: wrapped(step[name], replacement) for name, replacement in calls.items()}):
        yield


def _updates(owner: Any) -> list[Function]:
    """The update of a controller, in the driver, and of the class from which the aggregated one was derived."""
    if not hasattr(owner, "as_controller"):
        return []
    controllers = importlib.import_module("areal.trainer.ppo.actor")

    def update(stock: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        trained = getattr(arguments["self"], "train_engine", type(arguments["self"]))
        if not is_replaced(trained, "train_batch"):
            raise ValueError(
                f"ppo_update of {trained.__name__}, beside aggregate({owner.__name__}, ...): it would train without "
                f"the aggregation. Make the actor by {owner.__name__}.as_controller, as the Trainer of "
                f"docs/engines/areal.md does; without a controller, pass {trained.__name__} to aggregate(...)."
            )
        return stock()

    bases = [base for base in owner.__mro__[1:] if "ppo_update" in vars(base)]
    owners = (controllers.PPOActorController, controllers.PPOActorControllerV2, *bases)
    return [Function(each, "ppo_update", ["args"], update, kind="a check") for each in owners]


# Once AReaL#1546 merges, its token_mean, seq_mean, prompt_mean and constant need the proof alone. The weights, and
# the groups that ppo_update numbers, then stay for all other modes, over a `loss_aggregation` of token_mean.
ENGINE = TokenMeanEngine(
    "AReaL", versions="1.0.4 or 2.0.0 (cbff54d6)", step=("train_batch", ["input_", "loss_fn", "loss_weight_fn"]),
    refusals=lambda step: [
        (getattr(step["self"].config, "m2_threshold", None) is not None, "m2_threshold", "Remove m2_threshold")
    ],
    batches=_batches,
    masks=lambda step, batch: [mask.float() for mask in _rows(batch, "loss_mask")],
    prompts=_prompts,
    prompt_tokens=_prompt_tokens,
    numbers_groups=True,
    group=lambda step: step["self"].data_parallel_group,
    uneven=lambda step: "Set importance_sampling_level=token"
    if getattr(step["self"].config, "importance_sampling_level", None) == "sequence" else "",
    loss=LossPaths(
        "logprobs", "input_data.advantages", {"input_data.logprobs": "old", "input_data.prox_logp?": "old"},
        silent=["areal.utils.stats_tracker:TRACKERS.*.stats"],
        entropy="entropy?",
    ),
    batch="input_data",
    replace_loss=_replace_loss,
    facts=_facts,
    beside=lambda step, batch: None if "teacher_logp" in batch else {},
    unmeasured="a distillation loss keeps AReaL's token mean",
    unproved=lambda step: ""
    if isinstance(getattr(step["self"], "model", None), list) else "only AReaL's Megatron engine is measured.",
    group_size=_group_size,
    schedule="forward_backward_batch",
    further=[("ppo_update", ["args"], _give_groups)],
    checks=_updates,
)  # fmt: skip
