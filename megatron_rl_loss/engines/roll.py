"""What `token_mean` knows of ROLL's Megatron strategy.

Source: ROLL 8eb27cc2, distributed/strategy/megatron_strategy.py, utils/functionals.py.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from megatron_rl_loss.core.layouts import Gathered
from megatron_rl_loss.core.samples import Samples
from megatron_rl_loss.engines.loss_trials import Beside, LossPaths
from megatron_rl_loss.engines.places import Call, swapped, wrapped
from megatron_rl_loss.engines.prompt_tokens import MEDIA, prompt_texts
from megatron_rl_loss.engines.replacing import Function, announce
from megatron_rl_loss.engines.weighed_batches import Batch, StepArguments, TokenMeanEngine
from megatron_rl_loss.extend import resolve


def _is_critic(worker: Any) -> bool:
    from roll.pipeline.base_worker import CriticWorker  # type: ignore[import-not-found]

    return isinstance(worker, CriticWorker)


def _refusals(step: StepArguments) -> Sequence[tuple[bool, str, str]]:
    config, scales = step["self"].worker.pipeline_config, step["self"].worker_config.apply_loss_scale
    mode, is_kimi = config.loss_agg_mode, getattr(config, "pg_variant", None) == "kimi15"
    weighs = any(getattr(config, f"{what}_loss_weight", None) for what in ("difficulty", "length"))
    return (
        (mode != "token-mean", f"loss_agg_mode={mode}", "Set loss_agg_mode: token-mean"),
        (not scales, "apply_loss_scale=False", "Set apply_loss_scale: true"),
        (is_kimi, "pg_variant=kimi15 (not proportional to the advantage)", "Set another pg_variant"),
        (weighs, "difficulty_loss_weight or length_loss_weight", "Remove them"),
    )


def _masks(step: StepArguments, batch: Batch) -> Any:
    """The mask whose tokens ROLL counts."""
    has_final = "final_response_mask" in step["batch"].meta_info["loss_mask_keys"] and "final_response_mask" in batch
    return (batch["final_response_mask"] if has_final else batch["response_mask"][:, 1:]).float()


def _prompts(step: StepArguments, batch: Batch) -> Sequence[Any] | str:
    others = step["batch"].non_tensor_batch
    if "traj_group_id" in others:
        return list(others["traj_group_id"])
    return MEDIA if "multi_modal_inputs" in others else prompt_texts(batch["input_ids"], batch["prompt_mask"])


def _facts(step: StepArguments, batch: Batch) -> dict[str, Any]:
    """An entropy's gradients arrive at logits too."""
    config = step["self"].worker.pipeline_config
    return {"coef": getattr(config, "rl_loss_coef", None), "temperature": None if config.entropy_loss_coef else 1.0}


def _beside(step: StepArguments, batch: Batch) -> Mapping[str, Beside]:
    """An entropy bonus is the mean over all responses, masked tokens too, as ROLL counts these apart."""
    config, masks, beside = step["self"].worker.pipeline_config, batch["response_mask"][:, 1:].float(), {}
    layout = Gathered(range(0, masks.numel() + 1, masks.shape[1]))
    if config.use_kl_loss and config.kl_loss_coef:
        beside["kl"] = Beside(config.kl_loss_coef * getattr(config, "rl_loss_coef", 1.0), resolve("token_mean"))
    if config.entropy_loss_coef > 0:
        responses = Samples(list(masks), layout=layout)
        beside["entropy"] = Beside(-config.entropy_loss_coef, resolve("token_mean"), responses, masks)
    return beside


@contextmanager
def _replace_loss(step: Any, call: Call) -> Iterator[None]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    step["self"].forward_backward_func = get_forward_backward_func()  # ROLL keeps one from before the proof
    with swapped(step, {"loss_func": wrapped(step["loss_func"], call)}):
        yield


def _strategies(owner: Any) -> list[Function]:
    """In a worker: the choice of its strategy, by its config."""
    names = ("strategy", "factory")
    strategies, factory = (importlib.import_module(f"roll.distributed.strategy.{name}") for name in names)

    def create(stock: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        strategy, name = stock(), owner.__name__
        chosen = f"{type(strategy).__name__} in a worker with aggregate({name}, ...)"
        if isinstance(strategy, owner) or _is_critic(arguments["worker"]):
            return strategy
        if isinstance(strategy, strategies.TrainStrategy):
            raise ValueError(f"{chosen}: it would train without the aggregation. Set strategy_name: megatron_train.")
        announce(f"ROLL: NOT IN FORCE: {chosen} trains nothing. Set actor_train.worker_cls to your class")
        return strategy

    return [Function(factory, "create_strategy", ["worker"], create, bool, kind="a check")]


ENGINE = TokenMeanEngine(
    "ROLL", versions="8eb27cc2", step=("train_step", ["batch", "loss_func"]),
    refusals=_refusals,
    batches=lambda step: [step["batch"].batch],
    masks=_masks,
    prompts=_prompts,
    prompt_tokens=lambda batch: prompt_texts(batch["input_ids"], batch["prompt_mask"]),
    loss=LossPaths(
        "self.strategy.op_compute_log_probs", "data.batch.advantages",
        {
            "data.batch.old_log_probs": "old", "data.batch.infer_logprobs?": "old",
            "data.batch.train_infer_is_weight?": "ones", "self.get_old_log_probs_with_cache": "old",
            "self.strategy.op_compute_entropy": "zeros",  # ROLL's may change logits
            "data.batch.ref_log_probs?": "reference",
        },
        entropy="self.strategy.op_compute_entropy",
    ),
    batch="data.batch",
    replace_loss=_replace_loss,
    facts=_facts,
    beside=_beside,
    sums_masked=True,
    trains=lambda strategy: not _is_critic(strategy.worker),
    checks=_strategies,
    group_size=lambda step: getattr(step["self"].worker.pipeline_config, "num_return_sequences_in_group", None),
    uneven=lambda step: "Set importance_sampling: token"
    if step["self"].worker.pipeline_config.importance_sampling == "seq" else "",
)  # fmt: skip
