"""AReaL, ROLL and RLinf: a row for each, with what `token_mean` asks of an engine that trains on a token mean.

Source: areal 4aef98d8, engine/megatron_engine.py, trainer/ppo/actor.py; ROLL 8eb27cc2, distributed/strategy/
megatron_strategy.py, utils/functionals.py; RLinf a3816b59, workers/megatron_worker.py, workers/actor.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl_loss.frameworks.columns import FACTORS, GROUPS, IDS, MASKS, MEDIA, PLAIN, Batch, prompts_of
from megatron_rl_loss.frameworks.places import Call, places, swapped, wrapped
from megatron_rl_loss.frameworks.policy_tap import LossPaths, WeighedMicrobatch
from megatron_rl_loss.reduction.taps import is_observed
from megatron_rl_loss.step.layouts import Gathered
from megatron_rl_loss.step.samples import Samples

Given = Mapping[str, Any]  # the arguments of a call of the step method, by name


class TokenMeanEngine(NamedTuple):
    """An engine whose batches are padded rows with "advantages".

    Attributes:
        step: the name of its step method, called once per optimizer step, and parameters that it must have.
        wrong: conditions that break the token mean, each with words for the error and a remedy.
        batches: this rank's, of a call of the step method.
        masks: of a batch, a row each; of a micro-batch, the tensors in which the loss function sees its rows.
        prompts: an id for each row of a batch, or the reason why prompts are unknown.
        prompt_tokens: text for the prompt's tokens of each row, in an engine that is handed ids beside them.
        group: the data-parallel group.
        loss, batch: the row of the loss function; the path of the micro-batch, in its arguments or beside them.
        put: puts a call in place of the loss function, during a call of the step method.
        mends: `put` mends the engine too, and is needed in every step.
        facts: of a call: coefficient of the loss and temperature of the logits.
        of_samples: the remedy for a loss that averages within each sample, else empty.
        unproved: the reason why a call cannot be proved, else empty.
        group_size: the number of rows to generate for a prompt, if known.
        trains: True if an instance of the class trains a policy.
        tokens: its divisor, if that is not the number of the step's active tokens.
        further: other methods that are replaced.
        runs: another method that calls Megatron's schedule, if the class has it.
    """

    name: str
    versions: str
    step: tuple[str, Sequence[str]]
    wrong: Callable[[Given], Sequence[tuple[bool, str, str]]]
    batches: Callable[[Given], Sequence[Batch]]
    masks: Callable[[Given, Batch], Sequence[Tensor]]
    prompts: Callable[[Given, Batch], Sequence[Any] | str]
    group: Callable[[Given], Any]
    loss: LossPaths
    batch: str
    put: Callable[[Given, Call], AbstractContextManager[None]]
    facts: Callable[[Given, Batch], dict[str, Any]]
    unproved: Callable[[Given], str] = lambda given: ""
    group_size: Callable[[Any], int | None] = lambda owner: None
    trains: Callable[[Any], bool] = lambda owner: True
    of_samples: Callable[[Given], str] = lambda given: ""
    tokens: Callable[[Given], float] | None = None
    further: Sequence[tuple[str, Sequence[str], Callable[[Callable[[], Any], dict[str, Any]], Any]]] = ()
    runs: str = ""
    mends: bool = False
    prompt_tokens: Callable[[Batch], Sequence[str]] | None = None

    def measured(self, step: Given, loss: Mapping[str, Any]) -> WeighedMicrobatch:
        """The micro-batch of a call of the loss function, with masks and ids as they were before the step.

        Changes to its advantages count as weights.
        """
        (container, name), *_ = places(self.batch, loss)
        batch = container[name] if hasattr(container, "keys") else getattr(container, name)
        factors, plain = (batch[one].to(batch["advantages"].device) for one in (FACTORS, PLAIN))
        lengths = [len(row) for row in self.masks(step, batch)]
        edges = [0, *accumulate(lengths)]
        ids = batch[IDS].reshape(-1)[edges[:-1]] if IDS in batch.keys() else None  # noqa: SIM118  of a TensorDict
        samples = Samples(batch[MASKS].reshape(-1).split(lengths), layout=Gathered(edges), prompt_ids=ids)
        return WeighedMicrobatch(samples, factors, plain, **self.facts(step, batch))


def _give_groups(stock: Callable[[], Any], given: dict[str, Any]) -> Any:
    """Number AReaL's trajectory groups, each generated from one item of the data, in a column that is cut as tokens."""
    (groups,), first = given["args"], given["self"].data_parallel_group.rank() << 32
    columns = [torch.full_like(one["input_ids"], first + i, dtype=torch.int64) for i, one in enumerate(groups)]
    given["args"] = ([{**one, GROUPS: column} for one, column in zip(groups, columns, strict=True)],)
    return stock()


def _areal_masks(given: Given, batch: Batch) -> Any:
    masks = batch["loss_mask"].float()
    return masks.split(batch["cu_seqlens"].diff().tolist()) if masks.dim() == 1 else masks


def _areal_prompts(given: Given, batch: Batch) -> Sequence[Any] | str:
    if GROUPS not in batch:
        return "a step outside of ppo_update: ppo_update numbers the groups"
    groups = batch[GROUPS] if batch[GROUPS].dim() == 2 else batch[GROUPS].split(batch["cu_seqlens"].diff().tolist())
    return [one[0].item() for one in groups]


def _areal_facts(given: Given, batch: Batch) -> dict[str, Any]:
    """AReaL multiplies losses by the loss scale itself, of which its Megatron knows nothing."""
    scale = float(given["self"].optimizer.get_loss_scale())
    coef = scale * (batch.get("rl_loss_weight", 1.0) if "teacher_logp" in batch else 1.0)
    return {"coef": None if coef == 1 else coef, "temperature": given["self"].config.temperature}


@contextmanager
def _put_areal(given: Any, call: Call) -> Iterator[None]:
    """In place of the loss; AReaL calls none for a micro-batch that weighs nothing, so that its weight does."""

    def weigh(stock: Callable[[], Any], of_weight: dict[str, Any]) -> Any:
        weight, (batch, *_) = stock(), of_weight.values()
        if is_observed() and not weight:
            none = torch.zeros_like(batch["advantages"], requires_grad=True)
            of_loss: dict[str, Any] = {"logprobs": none, "input_data": {**batch, "logprobs": none}}
            call(lambda: none.sum() * 0, of_loss)
        return weight

    loss, weight = (wrapped(given[name], one) for name, one in (("loss_fn", call), ("loss_weight_fn", weigh)))
    with swapped(given, {"loss_fn": loss, "loss_weight_fn": weight}):
        yield


def _areal_unproved(given: Given) -> str:
    engine = given["self"]
    is_known = isinstance(getattr(engine, "model", None), list) and not engine.enable_tree_training
    return "" if is_known else "only AReaL's Megatron engine, without tree training, is measured."


def _roll_masks(given: Given, batch: Batch) -> Any:
    """The mask whose tokens ROLL counts."""
    has_final = "final_response_mask" in given["batch"].meta_info["loss_mask_keys"] and "final_response_mask" in batch
    return (batch["final_response_mask"] if has_final else batch["response_mask"][:, 1:]).float()


def _roll_prompts(given: Given, batch: Batch) -> Sequence[Any] | str:
    others = given["batch"].non_tensor_batch
    if "traj_group_id" in others:
        return list(others["traj_group_id"])
    return MEDIA if "multi_modal_inputs" in others else prompts_of(batch["input_ids"], batch["prompt_mask"])


def _roll_trains(strategy: Any) -> bool:
    from roll.pipeline.base_worker import CriticWorker  # type: ignore[import-not-found]

    return not isinstance(strategy.worker, CriticWorker)


def _roll_wrong(given: Given) -> Sequence[tuple[bool, str, str]]:
    config, scales = given["self"].worker.pipeline_config, given["self"].worker_config.apply_loss_scale
    mode, is_kimi = config.loss_agg_mode, getattr(config, "pg_variant", None) == "kimi15"
    weighs = any(getattr(config, f"{one}_loss_weight", None) for one in ("difficulty", "length"))
    return (
        (mode != "token-mean", f"loss_agg_mode={mode}", "Set loss_agg_mode: token-mean"),
        (not scales, "apply_loss_scale=False", "Set apply_loss_scale: true"),
        (is_kimi, "pg_variant=kimi15 (not proportional to the advantage)", "Set another pg_variant"),
        (weighs, "difficulty_loss_weight or length_loss_weight", "Remove them"),
    )


def _rlinf_prompts(given: Given, batch: Batch) -> Sequence[Any] | str:
    before = batch["attention_mask"][:, : -given["self"].response_len]
    return MEDIA if "multi_modal_inputs" in batch else prompts_of(batch["input_ids"][:, : before.shape[1]], before)


@contextmanager
def _put_rlinf(given: Given, call: Call) -> Iterator[None]:
    """In place of `policy_loss`, which the loss function of the worker's forward step calls, with the micro-batch.

    RLinf skips the loss of a micro-batch whose first row is fully masked, and logs other metrics for it, for which
    ranks then wait for each other. Without that fast path masked rows alone are left out.
    """
    worker = given["self"]
    theirs = worker.get_forward_step_func()

    def whole(stock: Callable[[], Any], of_loss: dict[str, Any]) -> Any:
        of_loss["fast_path_zero_loss_mask"] = False
        return call(stock, of_loss)

    def forward_step(iterator: Iterator[Batch], model: Any) -> tuple[Any, Any]:
        batch = next(iterator)
        output, loss_func = theirs(iter([batch]), model)

        def of_whole(output: Any) -> Any:
            ours = wrapped(theirs.__globals__["policy_loss"], whole, batch=batch)
            with swapped(theirs.__globals__, {"policy_loss": ours}):
                return loss_func(output)

        return output, of_whole

    with swapped({"worker": worker}, {"worker.get_forward_step_func": lambda: forward_step}):
        yield


def _rlinf_wrong(given: Given) -> Sequence[tuple[bool, str, str]]:
    config, batch = given["self"].cfg.algorithm, given["batch"]
    is_pipeline = not isinstance(batch, Mapping)
    return (
        (config.loss_agg_func != "token-mean", f"loss_agg_func={config.loss_agg_func}", "Set loss_agg_func=token-mean"),
        (not config.use_valid_token_scale, "use_valid_token_scale=False", "Set use_valid_token_scale=True"),
        (is_pipeline, "the pipeline mode (tokens unknown before a step)", "Choose another placement"),
    )


def _megatron_group(given: Given) -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group()


@contextmanager
def _put_roll(given: Any, call: Call) -> Iterator[None]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    given["self"].forward_backward_func = get_forward_backward_func()  # ROLL keeps one from before the proof
    with swapped(given, {"loss_func": wrapped(given["loss_func"], call)}):
        yield


def _roll_facts(given: Given, batch: Batch) -> dict[str, Any]:
    """An entropy's gradients arrive at logits too."""
    config = given["self"].worker.pipeline_config
    return {"coef": getattr(config, "rl_loss_coef", None), "temperature": None if config.entropy_loss_coef else 1.0}


def _areal_group_size(actor: Any) -> int | None:
    norms: list[Any] = [getattr(actor.config, name, None) for name in ("adv_norm", "reward_norm")]
    return next((one.group_size for one in norms if getattr(one, "mean_level", None) == "group"), None)


#: By the package of the class.
ENGINES = {
    "areal": TokenMeanEngine(
        "AReaL", "1.0.4 or 4aef98d8", ("train_batch", ["input_", "loss_fn", "loss_weight_fn"]),
        wrong=lambda given: [
            (getattr(given["self"].config, "m2_threshold", None) is not None, "m2_threshold", "Remove m2_threshold")
        ],
        batches=lambda given: given["input_"] if isinstance(given["input_"], list) else [given["input_"]],
        masks=_areal_masks,
        prompts=_areal_prompts,
        group=lambda given: given["self"].data_parallel_group,
        of_samples=lambda given: "Set importance_sampling_level=token"
        if getattr(given["self"].config, "importance_sampling_level", None) == "sequence" else "",
        loss=LossPaths(
            "logprobs", "input_data.advantages", {"input_data.logprobs": "old", "input_data.prox_logp?": "old"},
            silent=["areal.utils.stats_tracker:TRACKERS.*.stats"],
        ),
        batch="input_data",
        put=_put_areal,
        facts=_areal_facts,
        unproved=_areal_unproved,
        group_size=_areal_group_size,
        runs="forward_backward_batch",
        further=[("ppo_update", ["args"], _give_groups)],
    ),
    "roll": TokenMeanEngine(
        "ROLL", "8eb27cc2", ("train_step", ["batch", "loss_func"]),
        wrong=_roll_wrong,
        batches=lambda given: [given["batch"].batch],
        masks=_roll_masks,
        prompts=_roll_prompts,
        prompt_tokens=lambda batch: prompts_of(batch["input_ids"], batch["prompt_mask"]),
        group=_megatron_group,
        loss=LossPaths(
            "self.strategy.op_compute_log_probs", "data.batch.advantages",
            {
                "data.batch.old_log_probs": "old", "data.batch.infer_logprobs?": "old",
                "data.batch.train_infer_is_weight?": "ones", "self.get_old_log_probs_with_cache": "old",
                "self.strategy.op_compute_entropy": "zeros",  # ROLL's may change logits
            },
        ),
        batch="data.batch",
        put=_put_roll,
        facts=_roll_facts,
        trains=_roll_trains,
        group_size=lambda strategy: getattr(strategy.worker.pipeline_config, "num_return_sequences_in_group", None),
        of_samples=lambda given: "Set importance_sampling: token"
        if given["self"].worker.pipeline_config.importance_sampling == "seq" else "",
    ),
    "rlinf": TokenMeanEngine(
        "RLinf", "a3816b59", ("training_step", ["batch"]),
        wrong=_rlinf_wrong,
        batches=lambda given: [given["batch"]],
        masks=lambda given, batch: batch["response_mask"][:, -given["self"].response_len :].float(),
        prompts=_rlinf_prompts,
        group=_megatron_group,
        group_size=lambda actor: actor.cfg.algorithm.group_size,
        loss=LossPaths("logprobs", "advantages", {"old_logprobs": "old"}),
        batch="batch",
        put=_put_rlinf,
        mends=True,
        facts=lambda given, batch: {"temperature": None},  # the model's output is a dict, no logits
        runs="run_forward_backward",
        tokens=lambda given: float(given["self"].global_valid_token),  # of all the n_minibatches steps of a batch
    ),
}  # fmt: skip
