"""AReaL, ROLL and RLinf: a row for each, with what `token_mean` asks of an engine that trains on a token mean.

Source: AReaL 2.0.0 (cbff54d6), engine/megatron_engine.py, trainer/ppo/actor.py; ROLL 8eb27cc2, distributed/strategy/
megatron_strategy.py, utils/functionals.py; RLinf a3816b59, workers/megatron_worker.py, workers/actor.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_rl_loss.core.counting import StepTotals
from megatron_rl_loss.core.layouts import Gathered
from megatron_rl_loss.core.samples import Samples
from megatron_rl_loss.engines.columns import (
    FACTORS,
    GROUPS,
    IDS,
    MASKS,
    MEDIA,
    PLAIN,
    Batch,
    at_masked_tokens,
    prompts_of,
)
from megatron_rl_loss.engines.loss_trials import Beside, LossPaths, WeighedMicrobatch
from megatron_rl_loss.engines.places import Call, places, swapped, value_at, wrapped
from megatron_rl_loss.engines.policy_tap import tap_policy
from megatron_rl_loss.engines.replacing import Function, announce, is_replaced
from megatron_rl_loss.extend import is_observed, observed_taps, resolve

StepArguments = Mapping[str, Any]  # the arguments of a call of the step method, by name


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
        loses_masked: its policy loss has masked tokens too, whose advantages are 0 by their weights.
        correction: what the engine multiplies advantages by before its loss function, which is no weight.
        facts: of a call: coefficient of the loss and temperature of the logits.
        of_samples: the remedy for a loss that averages within each sample, else empty.
        unproved: the reason why a call cannot be proved, else empty.
        group_size: the number of rows to generate for a prompt, if known.
        trains: True if an instance of the class trains a policy.
        tokens: its divisor, if that is not the number of the step's active tokens; checked against what the step has.
        whole: the row of the function that calls the policy loss and adds other terms, if that is another function.
        around: log-probs before and after those of the masks, in the whole loss function.
        beside: of a call, the terms beside the policy loss, as the config names them; None if they are not measured.
        unmeasured: words for terms beside the policy loss that are not measured.
        further: other methods that are replaced.
        checks: functions of the engine that run where workers train without the class; ours refuse it, or say so.
        runs: another method that calls Megatron's schedule, if the class has it.
    """

    name: str
    versions: str
    step: tuple[str, Sequence[str]]
    wrong: Callable[[StepArguments], Sequence[tuple[bool, str, str]]]
    batches: Callable[[StepArguments], Sequence[Batch]]
    masks: Callable[[StepArguments, Batch], Sequence[Tensor]]
    prompts: Callable[[StepArguments, Batch], Sequence[Any] | str]
    group: Callable[[StepArguments], Any]
    loss: LossPaths
    batch: str
    put: Callable[[StepArguments, Call], AbstractContextManager[None]]
    facts: Callable[[StepArguments, Batch], dict[str, Any]]
    unproved: Callable[[StepArguments], str] = lambda step: ""
    group_size: Callable[[Any], int | None] = lambda owner: None
    trains: Callable[[Any], bool] = lambda owner: True
    of_samples: Callable[[StepArguments], str] = lambda step: ""
    tokens: Callable[[StepArguments, StepTotals], float] | None = None
    whole: LossPaths | None = None
    around: Callable[[StepArguments, Batch], tuple[int, int]] = lambda step, batch: (0, 0)
    beside: Callable[[StepArguments, Batch], Mapping[str, Beside] | None] = lambda step, batch: None
    unmeasured: str = ""
    further: Sequence[tuple[str, Sequence[str], Call]] = ()
    checks: Callable[[Any], Sequence[Function]] = lambda owner: ()
    runs: str = ""
    mends: bool = False
    loses_masked: bool = False
    prompt_tokens: Callable[[Batch], Sequence[str]] | None = None
    correction: Callable[[StepArguments, Batch], Tensor | float] = lambda step, batch: 1.0

    def tap(self, step: StepArguments, stock: Callable[[], Any], loss: dict[str, Any]) -> Any:
        """The result of a call of the loss function, or of the whole one, whose arguments are `loss`, measured."""
        is_whole = self.whole is not None and self.whole.log_probs.partition(".")[0] in loss
        row = self.whole if self.whole is not None and is_whole else self.loss
        return tap_policy(row, stock, loss, lambda: self.measured(step, loss, is_whole=is_whole))

    def measured(self, step: StepArguments, loss: Mapping[str, Any], *, is_whole: bool = False) -> WeighedMicrobatch:
        """The micro-batch of a call of the (whole) loss function, with masks and ids as they were before the step.

        Changes to its advantages count as weights.
        """
        (container, name), *_ = places(self.batch, loss)
        batch = value_at(container, name)
        lengths = [len(row) for row in self.masks(step, batch)]
        edges = [0, *accumulate(lengths)]
        ids = batch[IDS].reshape(-1)[edges[:-1]] if IDS in batch.keys() else None  # noqa: SIM118  of a TensorDict
        masks = batch[MASKS].reshape(-1).split(lengths)
        if is_whole:
            before, after = self.around(step, batch)
            masks = [pad(mask, (before, after)) for mask in masks]
            samples = Samples(masks, layout=Gathered([0, *accumulate(map(len, masks))]), prompt_ids=ids)
            taps = observed_taps()
            is_tapped = taps is not None and "pg" in taps.losses  # else the step is wrong
            return WeighedMicrobatch(samples, None, None, beside=self.beside(step, batch) if is_tapped else None)
        factors, plain = (batch[column].to(batch["advantages"].device) for column in (FACTORS, PLAIN))
        plain = plain * self.correction(step, batch)
        if not self.loses_masked:
            factors, plain = at_masked_tokens(batch[MASKS], factors, plain)
        samples = Samples(masks, layout=Gathered(edges), prompt_ids=ids)
        beside = None if self.whole else self.beside(step, batch)
        return WeighedMicrobatch(samples, factors, plain, beside=beside, **self.facts(step, batch))


def _give_groups(stock: Callable[[], Any], step: dict[str, Any]) -> Any:
    """Number AReaL's trajectory groups, each generated from one item of the data, in a column that is cut as tokens."""
    (groups,), first = step["args"], step["self"].data_parallel_group.rank() << 32
    columns = [torch.full_like(group["input_ids"], first + i, dtype=torch.int64) for i, group in enumerate(groups)]
    step["args"] = ([{**group, GROUPS: column} for group, column in zip(groups, columns, strict=True)],)
    return stock()


def _areal_rows(batch: Batch, column: str) -> Sequence[Tensor]:
    """The rows of a padded or packed column."""
    values = batch[column]
    return list(values) if values.dim() == 2 else values.split(batch["cu_seqlens"].diff().tolist())


def _areal_masks(step: StepArguments, batch: Batch) -> Sequence[Tensor]:
    return [mask.float() for mask in _areal_rows(batch, "loss_mask")]


def _areal_prompts(step: StepArguments, batch: Batch) -> Sequence[Any] | str:
    if GROUPS not in batch:
        return "a step outside of ppo_update: ppo_update numbers the groups"
    return [numbers[0].item() for numbers in _areal_rows(batch, GROUPS)]


def _areal_prompt_tokens(batch: Batch) -> list[str]:
    """A row's tokens before the first one that is trained on, or all; masks are those of the next token."""
    rows = zip(_areal_rows(batch, "input_ids"), _areal_rows(batch, "loss_mask"), strict=True)
    return [str(ids[: int(mask.bool().int().argmax()) + 1 if mask.any() else None].tolist()) for ids, mask in rows]


def _areal_facts(step: StepArguments, batch: Batch) -> dict[str, Any]:
    """AReaL multiplies losses by the loss scale itself, of which its Megatron knows nothing."""
    scale = float(step["self"].optimizer.get_loss_scale())
    coef = scale * (batch.get("rl_loss_weight", 1.0) if "teacher_logp" in batch else 1.0)
    return {"coef": None if coef == 1 else coef, "temperature": step["self"].config.temperature}


@contextmanager
def _put_areal(step: Any, call: Call) -> Iterator[None]:
    """In place of the loss; AReaL calls none for a micro-batch that weighs nothing, so that its weight does."""

    def weigh(stock: Callable[[], Any], of_weight: dict[str, Any]) -> Any:
        weight, (batch, *_) = stock(), of_weight.values()
        if is_observed() and not weight:
            none = torch.zeros_like(batch["advantages"], requires_grad=True)
            of_loss: dict[str, Any] = {"logprobs": none, "entropy": none, "input_data": {**batch, "logprobs": none}}
            call(lambda: none.sum() * 0, of_loss)
        return weight

    loss, weight = (
        wrapped(step[name], replacement) for name, replacement in (("loss_fn", call), ("loss_weight_fn", weigh))
    )
    with swapped(step, {"loss_fn": loss, "loss_weight_fn": weight}):
        yield


def _areal_updates(owner: Any) -> list[Function]:
    """The update of a controller, in the driver, and of the class from which the aggregated one was derived."""
    if not hasattr(owner, "as_controller"):
        return []
    controllers = importlib.import_module("areal.trainer.ppo.actor")

    def update(stock: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        trained = getattr(arguments["self"], "train_engine", type(arguments["self"]))
        if not is_replaced(trained, "train_batch"):
            raise ValueError(
                f"ppo_update of {trained.__name__}, beside aggregate({owner.__name__}, ...): it would train without "
                f"the aggregation. Make the actor by {owner.__name__}.as_controller, as the Trainer of docs/engines.md "
                f"does; without a controller, pass {trained.__name__} to aggregate(...)."
            )
        return stock()

    bases = [base for base in owner.__mro__[1:] if "ppo_update" in vars(base)]
    owners = (controllers.PPOActorController, controllers.PPOActorControllerV2, *bases)
    return [Function(each, "ppo_update", ["args"], update, kind="a check") for each in owners]


def _areal_beside(step: StepArguments, batch: Batch) -> Mapping[str, Beside] | None:
    return None if "teacher_logp" in batch else {}


def _areal_unproved(step: StepArguments) -> str:
    engine = step["self"]
    is_known = isinstance(getattr(engine, "model", None), list) and not engine.enable_tree_training
    return "" if is_known else "only AReaL's Megatron engine, without tree training, is measured."


def _roll_masks(step: StepArguments, batch: Batch) -> Any:
    """The mask whose tokens ROLL counts."""
    has_final = "final_response_mask" in step["batch"].meta_info["loss_mask_keys"] and "final_response_mask" in batch
    return (batch["final_response_mask"] if has_final else batch["response_mask"][:, 1:]).float()


def _roll_prompts(step: StepArguments, batch: Batch) -> Sequence[Any] | str:
    others = step["batch"].non_tensor_batch
    if "traj_group_id" in others:
        return list(others["traj_group_id"])
    return MEDIA if "multi_modal_inputs" in others else prompts_of(batch["input_ids"], batch["prompt_mask"])


def _roll_strategies(owner: Any) -> list[Function]:
    """In a worker: the choice of its strategy, by its config."""
    names = ("strategy", "factory")
    strategies, factory = (importlib.import_module(f"roll.distributed.strategy.{name}") for name in names)

    def create(stock: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        strategy, name = stock(), owner.__name__
        of_worker = f"{type(strategy).__name__} in a worker with aggregate({name}, ...)"
        if isinstance(strategy, strategies.TrainStrategy) and not isinstance(strategy, owner):
            raise ValueError(f"{of_worker}: it would train without the aggregation. Set strategy_name: megatron_train.")
        if not isinstance(strategy, owner):
            announce(f"ROLL: NOT IN FORCE: {of_worker} trains nothing. Set actor_train.worker_cls to your class")
        return strategy

    return [Function(factory, "create_strategy", ["worker"], create, bool, kind="a check")]


def _roll_trains(strategy: Any) -> bool:
    from roll.pipeline.base_worker import CriticWorker  # type: ignore[import-not-found]

    return not isinstance(strategy.worker, CriticWorker)


def _roll_wrong(step: StepArguments) -> Sequence[tuple[bool, str, str]]:
    config, scales = step["self"].worker.pipeline_config, step["self"].worker_config.apply_loss_scale
    mode, is_kimi = config.loss_agg_mode, getattr(config, "pg_variant", None) == "kimi15"
    weighs = any(getattr(config, f"{what}_loss_weight", None) for what in ("difficulty", "length"))
    return (
        (mode != "token-mean", f"loss_agg_mode={mode}", "Set loss_agg_mode: token-mean"),
        (not scales, "apply_loss_scale=False", "Set apply_loss_scale: true"),
        (is_kimi, "pg_variant=kimi15 (not proportional to the advantage)", "Set another pg_variant"),
        (weighs, "difficulty_loss_weight or length_loss_weight", "Remove them"),
    )


def _rlinf_prompts(step: StepArguments, batch: Batch) -> Sequence[Any] | str:
    before = batch["attention_mask"][:, : -step["self"].response_len]
    return MEDIA if "multi_modal_inputs" in batch else prompts_of(batch["input_ids"][:, : before.shape[1]], before)


def _rlinf_groups(owner: Any) -> list[Function]:
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


def _rlinf_correction(step: StepArguments, batch: Batch) -> Tensor | float:
    """The truncated importance weights of RLinf's `importance_sampling_fix`."""
    config = step["self"].cfg.algorithm
    if not config.get("importance_sampling_fix", False):
        return 1.0
    weights: Tensor = (batch["recomputed_logprobs"] - batch["rollout_logprobs"]).exp()
    return weights.clamp(max=config.importance_sampling_clip)


@contextmanager
def _put_rlinf(step: StepArguments, call: Call) -> Iterator[None]:
    """In place of the loss function of the worker's forward step, and of `policy_loss`, which that function calls.

    RLinf skips the loss of a micro-batch whose first row is fully masked, and logs other metrics for it, for which
    ranks then wait for each other. Without that fast path masked rows alone are left out.
    """
    worker = step["self"]
    theirs = worker.get_forward_step_func()

    def forward_step(iterator: Iterator[Batch], model: Any) -> tuple[Any, Any]:
        output, loss_func = theirs(iterator, model)

        def of_whole(output: Any) -> Any:
            batch, calls = inspect.getclosurevars(loss_func).nonlocals["batch"], iter([call])

            def of_policy(stock: Callable[[], Any], of_loss: dict[str, Any]) -> Any:
                """The first call is no trial of the whole loss function yet."""
                of_loss["fast_path_zero_loss_mask"] = False
                return next(calls, _stock)(stock, of_loss)

            ours = wrapped(theirs.__globals__["policy_loss"], of_policy, batch=batch)
            with swapped(theirs.__globals__, {"policy_loss": ours}):
                return wrapped(loss_func, call, batch=batch)(output)

        return output, of_whole

    with swapped({"worker": worker}, {"worker.get_forward_step_func": lambda: forward_step}):
        yield


def _stock(stock: Callable[[], Any], _: Any) -> Any:
    return stock()


def _rlinf_responses(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """Those of the tokens that have advantages."""
    return log_probs.detach()[:, -advantages.shape[1] - 1 : -1]


def _rlinf_beside(step: StepArguments, batch: Batch) -> Mapping[str, Beside]:
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


def _rlinf_tokens(step: StepArguments, totals: StepTotals) -> float:
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


def _rlinf_wrong(step: StepArguments) -> Sequence[tuple[bool, str, str]]:
    config, batch = step["self"].cfg.algorithm, step["batch"]
    is_pipeline = not isinstance(batch, Mapping)
    return (
        (config.loss_agg_func != "token-mean", f"loss_agg_func={config.loss_agg_func}", "Set loss_agg_func=token-mean"),
        (not config.use_valid_token_scale, "use_valid_token_scale=False", "Set use_valid_token_scale=True"),
        (is_pipeline, "the pipeline mode (tokens unknown before a step)", "Choose another placement"),
    )


def _megatron_group(step: StepArguments) -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group()


@contextmanager
def _put_roll(step: Any, call: Call) -> Iterator[None]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    step["self"].forward_backward_func = get_forward_backward_func()  # ROLL keeps one from before the proof
    with swapped(step, {"loss_func": wrapped(step["loss_func"], call)}):
        yield


def _roll_facts(step: StepArguments, batch: Batch) -> dict[str, Any]:
    """An entropy's gradients arrive at logits too."""
    config = step["self"].worker.pipeline_config
    return {"coef": getattr(config, "rl_loss_coef", None), "temperature": None if config.entropy_loss_coef else 1.0}


def _roll_beside(step: StepArguments, batch: Batch) -> Mapping[str, Beside]:
    """An entropy bonus is the mean over all responses, masked tokens too, as ROLL counts these apart."""
    config, masks, beside = step["self"].worker.pipeline_config, batch["response_mask"][:, 1:].float(), {}
    layout = Gathered(range(0, masks.numel() + 1, masks.shape[1]))
    if config.use_kl_loss and config.kl_loss_coef:
        beside["kl"] = Beside(config.kl_loss_coef * getattr(config, "rl_loss_coef", 1.0), resolve("token_mean"))
    if config.entropy_loss_coef > 0:
        of_responses = Samples(list(masks), layout=layout)
        beside["entropy"] = Beside(-config.entropy_loss_coef, resolve("token_mean"), of_responses)
    return beside


def _areal_group_size(actor: Any) -> int | None:
    norms: list[Any] = [getattr(actor.config, name, None) for name in ("adv_norm", "reward_norm")]
    return next((norm.group_size for norm in norms if getattr(norm, "mean_level", None) == "group"), None)


#: By the package of the class.
ENGINES = {
    # Once AReaL#1546 merges, its token_mean, seq_mean, prompt_mean and constant need the proof alone. The weights, and
    # the groups that ppo_update numbers, then stay for all other modes, over a `loss_aggregation` of token_mean.
    "areal": TokenMeanEngine(
        "AReaL", "1.0.4 or 2.0.0 (cbff54d6)", ("train_batch", ["input_", "loss_fn", "loss_weight_fn"]),
        wrong=lambda step: [
            (getattr(step["self"].config, "m2_threshold", None) is not None, "m2_threshold", "Remove m2_threshold")
        ],
        batches=lambda step: step["input_"] if isinstance(step["input_"], list) else [step["input_"]],
        masks=_areal_masks,
        prompts=_areal_prompts,
        prompt_tokens=_areal_prompt_tokens,
        group=lambda step: step["self"].data_parallel_group,
        of_samples=lambda step: "Set importance_sampling_level=token"
        if getattr(step["self"].config, "importance_sampling_level", None) == "sequence" else "",
        loss=LossPaths(
            "logprobs", "input_data.advantages", {"input_data.logprobs": "old", "input_data.prox_logp?": "old"},
            silent=["areal.utils.stats_tracker:TRACKERS.*.stats"],
            entropy="entropy?",
        ),
        batch="input_data",
        put=_put_areal,
        facts=_areal_facts,
        beside=_areal_beside,
        unmeasured="a distillation loss keeps AReaL's token mean",
        unproved=_areal_unproved,
        group_size=_areal_group_size,
        runs="forward_backward_batch",
        further=[("ppo_update", ["args"], _give_groups)],
        checks=_areal_updates,
    ),
    "roll": TokenMeanEngine(
        "ROLL", "8eb27cc2", ("train_step", ["batch", "loss_func"]),
        wrong=_roll_wrong,
        batches=lambda step: [step["batch"].batch],
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
            reference={"data.batch.ref_log_probs?": "old"},
            entropy="self.strategy.op_compute_entropy",
            output="output_tensor",
        ),
        batch="data.batch",
        put=_put_roll,
        facts=_roll_facts,
        beside=_roll_beside,
        loses_masked=True,
        trains=_roll_trains,
        checks=_roll_strategies,
        group_size=lambda strategy: getattr(strategy.worker.pipeline_config, "num_return_sequences_in_group", None),
        of_samples=lambda step: "Set importance_sampling: token"
        if step["self"].worker.pipeline_config.importance_sampling == "seq" else "",
    ),
    "rlinf": TokenMeanEngine(
        "RLinf", "a3816b59", ("training_step", ["batch"]),
        wrong=_rlinf_wrong,
        batches=lambda step: [step["batch"]],
        masks=lambda step, batch: batch["response_mask"][:, -step["self"].response_len :].float(),
        prompts=_rlinf_prompts,
        group=_megatron_group,
        group_size=lambda actor: actor.cfg.algorithm.group_size,
        loss=LossPaths("logprobs", "advantages", {"old_logprobs": "old"}),
        whole=LossPaths(
            "output.log_probs", "batch.advantages",
            {
                "batch.recomputed_logprobs?": _rlinf_responses, "batch.rollout_logprobs?": _rlinf_responses,
                "torch.distributed:all_reduce": "none",  # of metrics
            },
            reference={"batch.ref_logprobs?": _rlinf_responses},
            entropy="output.entropy?",
        ),
        around=lambda step, batch: (batch["input_ids"].shape[1] - step["self"].response_len - 1, 1),
        beside=_rlinf_beside,
        batch="batch",
        put=_put_rlinf,
        mends=True,
        checks=_rlinf_groups,
        correction=_rlinf_correction,
        facts=lambda step, batch: {"temperature": None},  # the model's output is a dict, no logits
        runs="run_forward_backward",
        tokens=_rlinf_tokens,
    ),
}  # fmt: skip
