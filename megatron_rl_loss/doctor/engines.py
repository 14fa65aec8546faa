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
    """A setting of an engine: its name there, the mode it is meant to be, what computes it, how that is called.

    `loss_fn` is given losses, mask and an object with the numbers of `GIVEN`, docs/audit.md.
    """

    name: str
    mode: str
    loss_fn: Callable[[Tensor, Tensor, Any], Any]
    call: LossCall = SUM
    divisor: float | None = None
    units: UnitCounting = "all"


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

    def loss(name: str, losses: Tensor, mask: Tensor, step: Any) -> Any:
        return agg_loss(losses, mask, name, step.dp_size, step.step_tokens, step.step_samples, LENGTH)

    def per_token(name: str, losses: Tensor, mask: Tensor, step: Any) -> Any:
        made: Any = loss(name, losses, mask, step), {}
        data = {"input_ids": mask, "num_micro_batch": 1, "dp_size": step.dp_size, "routed_num_tokens": step.step_tokens}
        loss_function: Any = partial(lambda config, **_: made, config=Named(loss_agg_mode=name))
        loss_sum, _, _ = scale(engine, None, data, forward_only=False, loss_function=loss_function)
        return loss_sum / step.step_tokens  # as Megatron divides at the end of the step

    for name, (mode, divisor) in _VERL_MODES.items():
        yield Setting(name, mode, partial(loss, name), CALLS["verl"], divisor)
        yield Setting(f"{name} (per-token)", mode, partial(per_token, name), SUM, divisor)


_VERL_MODES: dict[str, tuple[str, float | None]] = {
    "token-mean": ("token_mean", None),
    "seq-mean-token-mean": ("sample_mean", None),
    "seq-mean-token-sum": ("constant", 1),
    "seq-mean-token-sum-norm": ("constant", LENGTH),
}


def _roll(root: Path) -> Iterator[Setting]:
    """`agg_loss` of log-probs that are 0 where the mask is; samples count that have a token."""
    agg_loss = lift(root / "utils/functionals.py", "agg_loss")

    def loss(name: str, losses: Tensor, mask: Tensor, step: Any) -> Any:
        return agg_loss(losses * mask, mask, name, step.step_tokens, step.step_active_samples)

    for name, (mode, divisor) in _VERL_MODES.items():
        yield Setting(name, mode, partial(loss, name), SUM, divisor, "active")


def _slime(file: str, root: Path) -> Iterator[Setting]:
    """The reducer, divided by rollouts, or by tokens of which a fully masked sample has one; under CP too."""
    cp = Named(rank=0, size=1)
    mpu = Named(get_context_parallel_rank=lambda: cp.rank, get_context_parallel_world_size=lambda: cp.size)
    reducer = lift(root / file, "get_sum_of_sample_mean", mpu=mpu, get_parallel_state=lambda: Named(cp=cp))

    def loss(per_token: bool, losses: Tensor, mask: Tensor, step: Any) -> Any:
        cp.rank, cp.size = step.cp_rank, step.cp_size
        lengths, prompt = [*map(len, step.loss_masks)], 3 * (cp.size > 1)  # that `responses` has
        totals = [length + prompt for length in lengths]
        counted = step.step_tokens + step.step_samples - step.step_active_samples if per_token else step.step_samples
        return reducer(totals, lengths, step.loss_masks, calculate_per_token_loss=per_token)(losses) / counted

    call = LossCall(rows="packed", dp="sum", cp="sum", cp_cut="responses")
    yield Setting("default", "sample_mean", partial(loss, False), call)
    yield Setting("--calculate-per-token-loss", "token_mean", partial(loss, True), call)


def _skyrl(root: Path) -> Iterator[Setting]:
    """The driver weighs the advantages of the whole step, sorted by prompt; ranks add up."""
    weigh = lift(root / "backends/skyrl_train/utils/ppo_utils.py", "apply_loss_reduction_to_advantages_minibatch")

    def loss(name: str, losses: Tensor, mask: Tensor, step: Any) -> Any:
        order = sorted(range(len(step.step_masks)), key=lambda row: step.step_prompt_ids[row])
        prompts = [step.step_prompt_ids[row] for row in order]
        edges = [prompts.index(prompt) for prompt in sorted(set(prompts))] + [len(prompts)]
        masks = pad_sequence([step.step_masks[row] for row in order], batch_first=True)
        weights = masks * weigh(masks * 0 + 1, masks, name, len(losses), LENGTH, list(pairwise(edges)))
        places = [order.index(step.first_row + i) for i in range(len(losses))]
        return (losses * weights[places][:, : losses.shape[1]]).sum()

    for name in ("token_mean", "token_mean_legacy", "prompt_mean"):
        yield Setting(name, name.removesuffix("_legacy"), partial(loss, name), EVEN)
    yield Setting("sequence_mean", "sample_mean", partial(loss, "sequence_mean"), EVEN)
    name = "seq_mean_token_sum_norm"
    yield Setting(name, "constant", partial(loss, name), EVEN, LENGTH)


def _nemo_rl(root: Path) -> Iterator[Setting]:
    mean = lift(root / "algorithms/utils.py", "masked_mean")

    def by_sample(losses: Tensor, mask: Tensor, step: Any) -> Any:
        rows = mean(losses, mask, dim=-1)
        return mean(rows, rows.detach() * 0 + 1, None, step.step_samples)

    by_token: Any = lambda losses, mask, step: mean(losses, mask, None, step.step_tokens)  # noqa: E731
    yield Setting("token_level_loss: true", "token_mean", by_token)
    yield Setting("token_level_loss: false", "sample_mean", by_sample)


def _areal(root: Path) -> Iterator[Setting]:
    """The mean of a micro-batch, times its share of the step's tokens."""
    ppo = lift(root / "utils/functional/functional.py", "ppo_actor_loss_fn")

    def loss(log_probs: Tensor, mask: Tensor, step: Any) -> Any:
        mean, _ = ppo(log_probs, step.old_log_probs, step.old_log_probs, step.advantages, 0.2, mask.bool())
        return mean * step.microbatch_tokens / step.step_tokens

    yield Setting("default", "token_mean", loss, LossCall(takes="log_probs", dp="sum"))


def _by_loss_type(file: str, function: str, call: LossCall, root: Path) -> Iterator[Setting]:
    """TRL's and ms-swift's branches by `loss_type`; rollouts for one step at a time."""
    aggregate = lift_branches(root / file, function, "self.loss_type", "loss")

    def loss(name: str, losses: Tensor, mask: Tensor, step: Any) -> Any:
        losses, mask, count = losses.repeat(1, TIMES), mask.repeat(1, TIMES), step.step_tokens * TIMES
        number = step.num_microbatches
        trainer = Named(
            loss_type=name, args=Named(steps_per_generation=number, num_microbatches=number),
            model=Named(training=True), max_completion_length=LENGTH * TIMES,
            accelerator=Named(num_processes=step.dp_size), current_gradient_accumulation_steps=number,
        )  # fmt: skip
        return aggregate(
            self=trainer, mode="train", per_token_loss=losses, mask=mask, completion_mask=mask,
            inputs={"num_items_in_batch": count}, grpo_batch=Named(num_items_in_batch=count),
            micro_batch_size=len(losses), mpu=Named(get_data_parallel_world_size=lambda: step.dp_size),
        )  # fmt: skip

    for name, mode in (("grpo", "sample_mean"), ("bnpo", "token_mean"), ("dapo", "token_mean")):
        yield Setting(name, mode, partial(loss, name), call)
    yield Setting("dr_grpo", "constant", partial(loss, "dr_grpo"), call, LENGTH)


def _bridge(root: Path) -> Iterator[Setting]:
    """Its next-token loss, divided by Megatron: by the tokens of a rank's micro-batch, or of the step."""
    masked = lift(root / "training/losses.py", "masked_next_token_loss", get_rerun_state_machine=lambda: None)

    def loss(per_token: bool, losses: Tensor, mask: Tensor, step: Any) -> Any:
        total, num_tokens, _ = masked(mask, losses, check_for_nan_in_loss=False)
        return total / (step.step_tokens if per_token else num_tokens.clamp(min=1))

    mean = LossCall(microbatches="mean", cp="mean", even_microbatches=True)
    yield Setting("default", "token_mean", partial(loss, False), mean)
    yield Setting("calculate_per_token_loss", "token_mean", partial(loss, True), LossCall(dp="sum", cp="sum"))


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
