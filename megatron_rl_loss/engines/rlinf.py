"""What `token_mean` knows of RLinf's Megatron actor.

Source: RLinf a3816b59, workers/megatron_worker.py, workers/actor.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from megatron_rl_loss.core.counting import StepTotals
from megatron_rl_loss.engines.loss_trials import Beside, LossPaths, Trial
from megatron_rl_loss.engines.places import Call, swapped, wrapped
from megatron_rl_loss.engines.prompt_tokens import MEDIA, prompt_texts
from megatron_rl_loss.engines.replacing import Function, is_replaced
from megatron_rl_loss.engines.weighed_batches import Batch, StepArguments, TokenMeanEngine
from megatron_rl_loss.extend import resolve


def _refusals(step: StepArguments) -> Sequence[tuple[bool, str, str]]:
    config, batch = step["self"].cfg.algorithm, step["batch"]
    is_pipeline = not isinstance(batch, Mapping)
    return (
        (config.loss_agg_func != "token-mean", f"loss_agg_func={config.loss_agg_func}", "Set loss_agg_func=token-mean"),
        (not config.use_valid_token_scale, "use_valid_token_scale=False", "Set use_valid_token_scale=True"),
        (is_pipeline, "the pipeline mode (tokens unknown before a step)", "Choose another placement"),
    )


def _prompts(step: StepArguments, batch: Batch) -> Sequence[Any] | str:
    before = batch["attention_mask"][:, : -step["self"].response_len]
    return MEDIA if "multi_modal_inputs" in batch else prompt_texts(batch["input_ids"][:, : before.shape[1]], before)


def _divisor(step: StepArguments, totals: StepTotals) -> float:
    """RLinf's count of the tokens of all `n_minibatches` steps of a batch.

    Weights cancel another count in the policy loss, but not in terms beside it.
    """
    tokens, number = float(step["self"].global_valid_token), step["self"].cfg.algorithm.n_minibatches
    if tokens < totals.step_tokens or (number == 1 and tokens != totals.step_tokens):
        raise ValueError(
            f"global_valid_token={tokens:g} in a step of {totals.step_tokens:g} tokens and n_minibatches={number}: it "
            "must be the count of all steps of the batch, or a KL penalty and entropy would have another weight. Use "
            "RLinf a3816b59, and change no masks after _setup_valid_token_scale."
        )
    return tokens


def _correction(step: StepArguments, batch: Batch) -> Tensor | float:
    """The truncated importance weights of RLinf's `importance_sampling_fix`."""
    config = step["self"].cfg.algorithm
    if not config.get("importance_sampling_fix", False):
        return 1.0
    weights: Tensor = (batch["recomputed_logprobs"] - batch["rollout_logprobs"]).exp()
    return weights.clamp(max=config.importance_sampling_clip)


def _beside(step: StepArguments, batch: Batch) -> Mapping[str, Beside]:
    actor = step["self"]
    config, tokens = actor.cfg.algorithm, float(actor.global_valid_token)
    mode = resolve("token_mean") if config.n_minibatches == 1 else resolve("token_sum", divisor=tokens)
    estimator = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(actor.kl_penalty_type, actor.kl_penalty_type)
    beside = {}
    if actor.kl_beta > 0 and "ref_logprobs" in batch:
        beside["kl"] = Beside(actor.kl_beta, mode, estimator=estimator)
    if actor.calculate_entropy and config.entropy_bonus > 0:
        beside["entropy"] = Beside(-config.entropy_bonus, mode)
    return beside


def _responses(log_probs: Tensor, trial: Trial) -> Tensor:
    """Those of the tokens that have advantages."""
    return log_probs[:, -trial.advantages.shape[1] - 1 : -1]


@contextmanager
def _replace_loss(step: StepArguments, call: Call) -> Iterator[None]:
    """In place of the loss function of the worker's forward step, and of `policy_loss`, which that function calls.

    RLinf skips the loss of a micro-batch whose first row is fully masked, and logs other metrics for it, for which
    ranks then wait for each other. Without that fast path masked rows alone are left out.
    """
    worker = step["self"]
    theirs = worker.get_forward_step_func()

    def forward_step(iterator: Iterator[Batch], model: Any) -> tuple[Any, Any]:
        output, loss_func = theirs(iterator, model)

        def whole_loss(output: Any) -> Any:
            batch = inspect.getclosurevars(loss_func).nonlocals["batch"]

            def policy_loss(stock: Callable[[], Any], arguments: dict[str, Any]) -> Any:
                arguments["fast_path_zero_loss_mask"] = False
                return call(stock, arguments)

            measured = wrapped(theirs.__globals__["policy_loss"], policy_loss, batch=batch)
            with swapped(theirs.__globals__, {"policy_loss": measured}):
                return wrapped(loss_func, call, batch=batch)(output)

        return output, whole_loss

    with swapped({"worker": worker}, {"worker.get_forward_step_func": lambda: forward_step}):
        yield


def _groups(owner: Any) -> list[Function]:
    """In the driver: the launch of workers of the class from which the aggregated one was derived."""
    groups = importlib.import_module("rlinf.scheduler.worker.worker_group")

    def launch(stock: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        launched = arguments["self"]._worker_cls
        if launched in owner.__mro__[1:] and not is_replaced(launched, "training_step"):
            raise ValueError(
                f"launch of a group of {launched.__name__}, beside aggregate({owner.__name__}, ...): its workers would "
                f"train without the aggregation. Make the group by {owner.__name__}.create_group."
            )
        return stock()

    return [Function(groups.WorkerGroup, "launch", ["cluster"], launch, kind="a check")]


ENGINE = TokenMeanEngine(
    "RLinf", versions="a3816b59", step=("training_step", ["batch"]),
    refusals=_refusals,
    batches=lambda step: [step["batch"]],
    masks=lambda step, batch: batch["response_mask"][:, -step["self"].response_len :].float(),
    prompts=_prompts,
    group_size=lambda step: step["self"].cfg.algorithm.group_size,
    loss=LossPaths("logprobs", "advantages", {"old_logprobs": "old"}),
    whole=LossPaths(
        "output.log_probs", "batch.advantages",
        {
            "batch.recomputed_logprobs?": lambda trial: _responses(trial.old, trial),
            "batch.rollout_logprobs?": lambda trial: _responses(trial.old, trial),
            "batch.ref_logprobs?": lambda trial: _responses(trial.reference, trial),
            "torch.distributed:all_reduce": "none",  # of metrics
        },
        entropy="output.entropy?",
    ),
    padding=lambda step, batch: (batch["input_ids"].shape[1] - step["self"].response_len - 1, 1),
    beside=_beside,
    batch="batch",
    replace_loss=_replace_loss,
    checks=_groups,
    correction=_correction,
    facts=lambda step, batch: {"temperature": None},  # the model's output is a dict, no logits
    schedule="run_forward_backward",
    divisor=_divisor,
)  # fmt: skip
