"""The engines as a table: what of each aggregates, how it calls that and divides afterwards, the line that mends it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_rl_loss.audit.simulation import CALLS, LossCall
from megatron_rl_loss.doctor.source import Named, lift, lift_branches
from megatron_rl_loss.step.totals import UnitCounting

LENGTH = 100  # the constant of Dr. GRPO's mode
TIMES = 8  # how often each token is given to trainers that clamp small counts: the steps drawn are tiny
SUM, EVEN = LossCall(dp="sum"), LossCall(dp="sum", even_microbatches=True)  # the engine undoes what DDP divides by


@dataclass(frozen=True)
class Setting:
    """A setting of an engine: its name there, the mode it is meant to be, what computes it, how that is called."""

    name: str
    mode: str
    loss_fn: Callable[..., Any]  # of losses, mask and what it asks for, `GIVEN` in docs/audit.md
    call: LossCall
    divisor: float | None = None
    units: UnitCounting = "all"


#: The modes that settings are meant to be, with the divisor of `constant`.
Modes = dict[str, tuple[str, float | None]]
TOKEN_MEAN, SAMPLE_MEAN, DR_GRPO = ("token_mean", None), ("sample_mean", None), ("constant", LENGTH)
_VERL_MODES: Modes = {
    "token-mean": TOKEN_MEAN,
    "seq-mean-token-mean": SAMPLE_MEAN,
    "seq-mean-token-sum": ("constant", 1),
    "seq-mean-token-sum-norm": DR_GRPO,
}


def _settings(
    loss: Callable[..., Any], modes: Modes, call: LossCall = SUM, units: UnitCounting = "all"
) -> Iterator[Setting]:
    """Of a function that is given their names first."""
    for name, (mode, divisor) in modes.items():
        yield Setting(name, mode, partial(loss, name), call, divisor, units)


def _verl(root: Path) -> Iterator[Setting]:
    """`agg_loss` with global counts; with per-token loss what the Megatron engine makes of it, at CP 1."""
    masked_sum = lift(root / "utils/torch_functional.py", "masked_sum")
    agg_loss = lift(root / "trainer/ppo/core_algos.py", "agg_loss", verl_F=Named(masked_sum=masked_sum))
    tu = Named(get_non_tensor_data=lambda data, key, default: data.get(key, default))
    file = root / "workers/engine/megatron/transformer_impl.py"
    scale = lift(file, "postprocess_micro_batch_func", tu=tu, detach_tree=lambda tree: tree)
    engine = Named(
        prepare_model_outputs=lambda output, data: output, get_data_parallel_group=lambda: None,
        engine_config=Named(dynamic_context_parallel=False, use_remove_padding=True, context_parallel_size=1),
        tf_config=Named(calculate_per_token_loss=True), _routed_num_tokens=lambda data: data["input_ids"].sum(),
    )  # fmt: skip

    def loss(name: str, losses: Tensor, mask: Tensor, dp_size: int, step_tokens: int, step_samples: int) -> Any:
        return agg_loss(losses, mask, name, dp_size, step_tokens, step_samples, LENGTH)

    def per_token(name: str, losses: Tensor, mask: Tensor, dp_size: int, step_tokens: int, step_samples: int) -> Any:
        mode = name.removesuffix(" (per-token)")
        made = loss(mode, losses, mask, dp_size, step_tokens, step_samples), dict[str, Any]()
        data = {"input_ids": mask, "num_micro_batch": 1, "dp_size": dp_size, "routed_num_tokens": step_tokens}
        loss_function: Any = partial(lambda config, **_: made, config=Named(loss_agg_mode=mode))
        loss_sum, _, _ = scale(engine, None, data, forward_only=False, loss_function=loss_function)
        return loss_sum / step_tokens  # as Megatron divides at the end of the step

    yield from _settings(loss, _VERL_MODES, CALLS["verl"])
    yield from _settings(per_token, {f"{name} (per-token)": mode for name, mode in _VERL_MODES.items()})


def _roll(root: Path) -> Iterator[Setting]:
    """`agg_loss` of log-probs that are 0 where the mask is; samples count that have a token."""
    agg_loss = lift(root / "utils/functionals.py", "agg_loss")

    def loss(name: str, losses: Tensor, mask: Tensor, step_tokens: int, step_active_samples: int) -> Any:
        return agg_loss(losses * mask, mask, name, step_tokens, step_active_samples)

    return _settings(loss, _VERL_MODES, units="active")


def _slime(file: str, root: Path) -> Iterator[Setting]:
    """The reducer, divided by rollouts, or by tokens of which a fully masked sample has one; under CP too."""
    cp = Named(rank=0, size=1)
    mpu = Named(get_context_parallel_rank=lambda: cp.rank, get_context_parallel_world_size=lambda: cp.size)
    reducer = lift(root / file, "get_sum_of_sample_mean", mpu=mpu, get_parallel_state=lambda: Named(cp=cp))

    def loss(
        name: str, losses: Tensor, mask: Tensor, loss_masks: list[Tensor], step_tokens: int, step_samples: int,
        step_active_samples: int, cp_rank: int, cp_size: int,
    ) -> Any:  # fmt: skip
        cp.rank, cp.size = cp_rank, cp_size
        lengths, prompt = [*map(len, loss_masks)], 3 * (cp_size > 1)  # that `responses` has
        totals, per_token = [length + prompt for length in lengths], name != "default"
        counted = step_tokens + step_samples - step_active_samples if per_token else step_samples
        return reducer(totals, lengths, loss_masks, calculate_per_token_loss=per_token)(losses) / counted

    call = LossCall(rows="packed", dp="sum", cp="sum", cp_cut="responses")
    return _settings(loss, {"default": SAMPLE_MEAN, "--calculate-per-token-loss": TOKEN_MEAN}, call)


def _skyrl(root: Path) -> Iterator[Setting]:
    """The driver weighs the advantages of the whole step, sorted by prompt; ranks add up."""
    weigh = lift(root / "backends/skyrl_train/utils/ppo_utils.py", "apply_loss_reduction_to_advantages_minibatch")

    def loss(
        name: str, losses: Tensor, mask: Tensor, step_masks: list[Tensor], step_prompt_ids: list[int], first_row: int
    ) -> Any:
        order = sorted(range(len(step_masks)), key=lambda row: step_prompt_ids[row])
        prompts = sorted(step_prompt_ids)
        edges = [prompts.index(prompt) for prompt in sorted(set(prompts))] + [len(prompts)]
        masks = pad_sequence([step_masks[row] for row in order], batch_first=True)
        weights = masks * weigh(masks * 0 + 1, masks, name, len(losses), LENGTH, list(pairwise(edges)))
        places = [order.index(first_row + i) for i in range(len(losses))]
        return (losses * weights[places][:, : losses.shape[1]]).sum()

    modes: Modes = {"token_mean": TOKEN_MEAN, "token_mean_legacy": TOKEN_MEAN, "prompt_mean": ("prompt_mean", None)}
    return _settings(loss, modes | {"sequence_mean": SAMPLE_MEAN, "seq_mean_token_sum_norm": DR_GRPO}, EVEN)


def _nemo_rl(root: Path) -> Iterator[Setting]:
    mean = lift(root / "algorithms/utils.py", "masked_mean")

    def loss(name: str, losses: Tensor, mask: Tensor, step_tokens: int, step_samples: int) -> Any:
        if name == "token_level_loss: true":
            return mean(losses, mask, None, step_tokens)
        rows = mean(losses, mask, dim=-1)
        return mean(rows, rows.detach() * 0 + 1, None, step_samples)

    return _settings(loss, {"token_level_loss: true": TOKEN_MEAN, "token_level_loss: false": SAMPLE_MEAN})


def _areal(root: Path) -> Iterator[Setting]:
    """The mean of a micro-batch, times its share of the step's tokens."""
    ppo = lift(root / "utils/functional/functional.py", "ppo_actor_loss_fn")

    def loss(
        _: str, log_probs: Tensor, mask: Tensor, old_log_probs: Tensor, advantages: Tensor, microbatch_tokens: int,
        step_tokens: int,
    ) -> Any:  # fmt: skip
        mean, _stats = ppo(log_probs, old_log_probs, old_log_probs, advantages, 0.2, mask.bool())
        return mean * microbatch_tokens / step_tokens

    return _settings(loss, {"default": TOKEN_MEAN}, LossCall(takes="log_probs", dp="sum"))


def _by_loss_type(file: str, function: str, call: LossCall, root: Path) -> Iterator[Setting]:
    """TRL's and ms-swift's branches by `loss_type`; rollouts for one step at a time."""
    aggregate = lift_branches(root / file, function, "self.loss_type", "loss")

    def loss(name: str, losses: Tensor, mask: Tensor, step_tokens: int, num_microbatches: int, dp_size: int) -> Any:
        losses, mask, count = losses.repeat(1, TIMES), mask.repeat(1, TIMES), step_tokens * TIMES
        trainer = Named(
            loss_type=name, args=Named(steps_per_generation=num_microbatches, num_microbatches=num_microbatches),
            model=Named(training=True), max_completion_length=LENGTH * TIMES,
            accelerator=Named(num_processes=dp_size), current_gradient_accumulation_steps=num_microbatches,
        )  # fmt: skip
        return aggregate(
            self=trainer, mode="train", per_token_loss=losses, mask=mask, completion_mask=mask,
            inputs={"num_items_in_batch": count}, grpo_batch=Named(num_items_in_batch=count),
            micro_batch_size=len(losses), mpu=Named(get_data_parallel_world_size=lambda: dp_size),
        )  # fmt: skip

    return _settings(loss, {"grpo": SAMPLE_MEAN, "bnpo": TOKEN_MEAN, "dapo": TOKEN_MEAN, "dr_grpo": DR_GRPO}, call)


def _bridge(root: Path) -> Iterator[Setting]:
    """Its next-token loss, divided by Megatron: by the tokens of a rank's micro-batch, or of the step."""
    masked = lift(root / "training/losses.py", "masked_next_token_loss", get_rerun_state_machine=lambda: None)

    def loss(name: str, losses: Tensor, mask: Tensor, step_tokens: int) -> Any:
        total, num_tokens, _ = masked(mask, losses, check_for_nan_in_loss=False)
        return total / (num_tokens.clamp(min=1) if name == "default" else step_tokens)

    mean = LossCall(microbatches="mean", cp="mean", even_microbatches=True)
    yield from _settings(loss, {"default": TOKEN_MEAN}, mean)
    yield from _settings(loss, {"calculate_per_token_loss": TOKEN_MEAN}, LossCall(dp="sum", cp="sum"))


@dataclass(frozen=True)
class Engine:
    """An engine: package, distribution, settings, versions that were read or run here, and the line that mends it."""

    package: str
    distribution: str
    settings: Callable[[Path], Iterator[Setting]]
    known: tuple[str, ...]
    mend: str


_HOOK = "--custom-pg-loss-reducer-function-path megatron_rl_loss.frameworks.slime.sample_mean (or .token_mean)"
_FROM = "from megatron_rl_loss.frameworks"
_SWIFT = LossCall(microbatches="mean", even_microbatches=True)
ENGINES = (
    Engine("slime", "slime", partial(_slime, "backends/megatron_utils/cp_utils.py"), ("624b824a",), _HOOK),
    Engine("miles", "miles", partial(_slime, "backends/training_utils/cp_utils.py"), ("31f1ca96",), _HOOK),
    Engine("verl", "verl", _verl, ("0.9.1", "1dda039b"),
           "actor_rollout_ref.model.external_lib=megatron_rl_loss.frameworks.verl_install"),
    Engine("skyrl", "skyrl", _skyrl, ("a9564572", "0.4.0"),
           f'{_FROM}.skyrl import AggregatedPolicyLoss; PolicyLossRegistry.register("mine", AggregatedPolicyLoss('
           '"regular", "sample_mean")); trainer.algorithm: policy_loss_type=mine '
           "loss_reduction=token_mean"),
    Engine("nemo_rl", "nemo-rl", _nemo_rl, ("7ea279ab",),
           f'{_FROM}.nemo_rl import aggregate; loss_fn = aggregate(policy, loss_fn, "sample_mean")'),
    Engine("areal", "areal", _areal, ("1.0.4", "4aef98d8"),
           f'{_FROM}.areal import aggregate; aggregate(Actor, "sample_mean")'),
    Engine("swift", "ms-swift", partial(_by_loss_type, "megatron/trainers/grpo_trainer.py", "loss_func", _SWIFT),
           ("4.6.0", "3602360a"),
           f'--loss_type dapo, and in a file of --external_plugins {_FROM}.ms_swift import aggregate; '
           'aggregate("sample_mean")'),
    Engine("megatron.bridge", "megatron-bridge", _bridge, ("067f987d", "0.6.2"),
           f"{_FROM}.bridge import attached; with attached(LossAggregation(settings, samples_of)): pretrain(...)"),
    Engine("roll", "roll", _roll, ("8eb27cc2",), 'apply_loss_scale; plan_step(...); carry(share, form="sum")'),
    Engine("trl", "trl", partial(_by_loss_type, "trainer/grpo_trainer.py", "_compute_loss", CALLS["trl"]),
           ("f2cd5771",), 'loss_type="dapo"; for other modes plan_step(...); carry(share, form="mean")'),
)  # fmt: skip
