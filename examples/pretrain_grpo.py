"""Train a GPT or HybridModel on rollouts with GRPO: a real `pretrain` launch. A flag sets the aggregation.

    torchrun --nproc-per-node 4 examples/pretrain_grpo.py <Megatron's flags> --rollouts rollouts.jsonl \\
        --tensor-model-parallel-size 2 --context-parallel-size 2 \\
        --loss-aggregation constant --loss-aggregation-divisor 40960

`launch_grpo.sh` has a whole command line. The lines of megatron_rl_loss are marked (1) to (5). The rollouts come from a
file; to generate them, replace `data_provider`. Micro-batches are packs of ragged rollouts, so --micro-batch-size is 1
and --global-batch-size counts the packs of a step.
"""

import functools
from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

if not torch.cuda.is_available():
    import megatron_on_cpu

    megatron_on_cpu.install()  # before megatron is imported

from megatron.core import mpu
from megatron.core.datasets import utils as dataset_utils
from megatron.core.utils import unwrap_model
from megatron.training import get_args, print_rank_0
from pretrain_of_version import parse_args, pretrain_gpt
from rollouts import Pack, Rollout, packs_of_rank, read_rollouts

from megatron_rl_loss import (
    Folded,
    LossAggregation,
    Microbatch,
    OutputHead,
    Tokens,
    add_loss_aggregation_args,
    kl_estimate,
    next_microbatch,
    packed_seq_params,
    policy_loss,
)
from megatron_rl_loss.losses.by_name import POLICY_LOSSES, check_goes_with
from megatron_rl_loss.megatron.forward_pass import ForwardPass

DEFAULTS = {"tokenizer_type": "NullTokenizer"}


def add_args(parser: ArgumentParser) -> ArgumentParser:
    group = parser.add_argument_group("GRPO on a file of rollouts")
    group.add_argument("--rollouts", required=True, help="JSONL file; rollouts.py lists its keys.")
    group.add_argument("--prompts-per-step", type=int, default=8, help="Prompt groups per step, with all rollouts.")
    group.add_argument("--policy-loss", choices=POLICY_LOSSES, default="ppo", help="Its formula: docs/losses.md.")
    group.add_argument("--clip-low", type=float, help="Clip range below 1; default: the loss's, PPO 0.2.")
    group.add_argument("--clip-high", type=float, help="Clip range above 1; default: the loss's, PPO 0.2.")
    group.add_argument("--no-advantage-std", action="store_true", help="Do not divide advantages by the group's std.")
    group.add_argument(
        "--log-probs",
        choices=("stock", "chunked"),
        default="stock",
        help="stock: minus Megatron's cross-entropy. chunked: log-probs, entropy and loss in one pass over chunks of "
        "tokens, which never holds all logits.",
    )
    group.add_argument("--log-probs-chunk-tokens", type=int, help="Tokens per chunk. Default: 1024, 4096 on a GPU.")
    group.add_argument("--temperature", type=float, default=1.0, help="Sampling temperature; with chunked alone.")
    group.add_argument("--entropy-bonus", type=float, default=0.0, help="Coefficient; with chunked alone.")
    group.add_argument(
        "--old-log-probs",
        choices=("file", "recomputed"),
        default="file",
        help="file: read from the rollouts. recomputed: a forward pass of the policy before each step.",
    )
    group.add_argument(
        "--kl-beta",
        type=float,
        default=0.0,
        help="Coefficient of a KL term (k3) to the launch's first policy.",
    )
    return add_loss_aggregation_args(parser)  # (1) the flags, chained


def data_provider(
    rollouts: list[Rollout], num_samples: Any, vp_stage: int | None = None
) -> tuple[Iterator[Pack], None, None]:
    """Packs of this data-parallel rank; the same on all its tensor, context and pipeline parallel ranks."""
    args = get_args()
    packs = packs_of_rank(
        rollouts,
        prompts_per_step=args.prompts_per_step,
        packs_per_step=args.global_batch_size,
        seq_length=args.seq_length,
        slot_multiple=2 * args.context_parallel_size,
        dp_rank=mpu.get_data_parallel_rank(),
        dp_size=mpu.get_data_parallel_world_size(),
        first_step=args.iteration,  # go on where a checkpoint stopped
    )
    return packs, None, None


def forward_step(data_iterator: Iterator[Microbatch], model: Any) -> tuple[Any, Any]:
    args = get_args()
    microbatch = next_microbatch(data_iterator)  # (2) your batch in .data, and what its losses need
    pack: Pack = microbatch.data

    def local(values: Tensor) -> Tensor:
        """The part of a pack's tensor that this context-parallel rank holds, [1, seq_length / cp]."""
        return microbatch.local(values)[None].cuda(non_blocking=True)

    inputs = {"advantages": local(pack.advantages)} | microbatch.log_probs
    if pack.old_log_probs is not None and args.old_log_probs == "file":
        inputs["old_log_probs"] = local(pack.old_log_probs)
    losses_of = functools.partial(per_token_loss, microbatch)  # which says what is masked, and where sequences lie
    if args.log_probs == "stock":

        def loss_func(negative_log_probs: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            log_probs = -negative_log_probs
            losses, metrics = losses_of(log_probs, None, **inputs)
            return microbatch.loss(losses, {"log_prob": log_probs, **metrics})  # (3) Megatron's return value out

        return call_model(microbatch, model), loss_func

    head = output_head(args, entropy=True)
    if POLICY_LOSSES[args.policy_loss].per_sequence:  # its chunks are not losses of their own

        def loss_of_sequences(output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            log_probs, entropy = output
            losses, metrics = losses_of(log_probs, entropy, **inputs)
            return microbatch.loss(losses, {"log_prob": log_probs, "entropy": entropy, **metrics})

        return call_model(microbatch, model, head, Tokens(microbatch.tokens.mask)), loss_of_sequences

    def losses_of_chunk(log_probs: Tensor, entropy: Tensor, **inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return per_token_loss(torch.ones_like(log_probs), log_probs, entropy, **inputs)  # masked tokens are in no chunk

    context = Folded(microbatch, losses_of_chunk, inputs)  # the loss is made where its logits are
    return call_model(microbatch, model, head, context), functools.partial(hand_over, microbatch)


def call_model(microbatch: Microbatch, model: Any, head: OutputHead | None = None, context: Any = None) -> Any:
    """Minus the log-probs of this context-parallel rank's tokens, [1, seq_length / cp], or the head's output."""
    pack: Pack = microbatch.data

    def local(values: Tensor) -> Tensor:
        return microbatch.local(values)[None].cuda(non_blocking=True)

    call = model if head is None else functools.partial(head, model, context=context)
    return call(
        local(pack.tokens),
        local(pack.position_ids),
        attention_mask=None,
        labels=local(pack.labels),
        packed_seq_params=packed_seq_params(pack.cu_seqlens, model),
    )


def output_head(args: Any, entropy: bool = False) -> OutputHead:
    return OutputHead(chunk_tokens=args.log_probs_chunk_tokens, temperature=args.temperature, entropy=entropy)


def per_token_loss(
    local: Microbatch | Tensor,
    log_probs: Tensor,
    entropy: Tensor | None,
    advantages: Tensor,
    old_log_probs: Tensor | None = None,
    reference_log_probs: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Unreduced losses and metrics of a micro-batch, or of some of its tokens and their mask."""
    args = get_args()
    metrics = {"advantage_x_log_prob": advantages * log_probs}
    if old_log_probs is None and args.policy_loss == "ppo":
        losses = -advantages * log_probs  # REINFORCE: the gradient of the clipped loss at ratio 1
    else:
        policy = policy_loss(
            args.policy_loss,
            log_probs,
            log_probs.detach() if old_log_probs is None else old_log_probs,
            advantages,
            local,
            **clip_range(args),
        )
        losses = policy.per_token_loss
        metrics |= {"clip_fraction": policy.clipped, "ppo_kl": policy.ppo_kl}
    if reference_log_probs is not None:
        kl = kl_estimate(log_probs, reference_log_probs, local, estimator="k3")
        losses, metrics["reference_kl"] = losses + args.kl_beta * kl, kl.detach()
    if entropy is not None and args.entropy_bonus:
        losses = losses - args.entropy_bonus * entropy
    return losses, metrics


def hand_over(microbatch: Microbatch, output: tuple[Any, dict[str, Tensor]]) -> Any:
    """(3) Turn the head's sum and values of each token into the return value for Megatron."""
    summed, values = output
    names = {"log_probs": "log_prob"}
    return microbatch.loss(summed, {names.get(name, name): value for name, value in values.items()})


class OtherPolicies:
    """Log-probs of the old policy and of a reference, from forward passes before each training step."""

    def __init__(self) -> None:
        self.reference: list[Tensor] | None = None

    def __call__(self, forward: ForwardPass) -> None:
        args = get_args()
        chunks = forward.model if isinstance(forward.model, list) else [forward.model]
        weights = [parameter.data for chunk in chunks for parameter in chunk.parameters()]
        head = output_head(args) if args.log_probs == "chunked" else None

        def log_probs(microbatch: Microbatch, model: Any) -> Any:
            output = call_model(microbatch, model, head)
            return output if head or not is_last_stage(model) else -output

        if args.old_log_probs == "recomputed":
            forward.log_probs("old_log_probs", log_probs)
        if args.kl_beta:
            if self.reference is None:
                self.reference = [weight.cpu().clone() for weight in weights]
            policy = [weight.clone() for weight in weights]
            copy_into(weights, self.reference)
            forward.log_probs("reference_log_probs", log_probs)
            copy_into(weights, policy)


def copy_into(weights: list[Tensor], others: list[Tensor]) -> None:
    for weight, other in zip(weights, others, strict=True):
        weight.copy_(other)


def is_last_stage(model: Any) -> bool:
    return bool(unwrap_model(model).post_process)


def clip_range(args: Any) -> dict[str, Any]:
    """The clip range of the flags; None stands for the loss's own."""
    return {"clip_low": args.clip_low, "clip_high": args.clip_high}


def main() -> None:
    args = parse_args(add_args, DEFAULTS)
    check_example_args(args)
    rollouts = read_rollouts(args.rollouts, vocab_size=args.vocab_size, normalize_by_std=not args.no_advantage_std)
    provider = functools.partial(data_provider, rollouts)
    provider.is_distributed = True  # type: ignore[attr-defined]  # every rank reads: the step's totals need its masks
    # (4) validates the flags, before the model's config is made; knows how to find the masks and ids in a batch
    before_step = OtherPolicies() if args.old_log_probs == "recomputed" or args.kl_beta else None
    aggregation = LossAggregation.from_args(args, samples_of=lambda pack: pack.samples, before_step=before_step)
    check_goes_with(args.policy_loss, aggregation.settings.modes.policy, **clip_range(args))
    print_rank_0(aggregation.settings.modes.describe())
    layer_spec: Any = None
    if args.transformer_impl == "local":
        import packed_attention

        is_hybrid = getattr(args, "hybrid_layer_pattern", None)
        layer_spec = packed_attention.hybrid_stack_spec(args.num_experts) if is_hybrid else packed_attention.layer_spec
    if not torch.cuda.is_available():
        megatron_on_cpu.prepare_training()
    skip_building_dataset_helpers()
    with aggregation.attached():  # (5) every step looks ahead at its data before the pipeline starts
        pretrain_gpt(args, add_args, DEFAULTS, layer_spec, provider, forward_step)


def check_example_args(args: Any) -> None:
    """Reject flags that this example does not support, before the model is built."""
    if args.micro_batch_size != 1:
        raise ValueError(f"--micro-batch-size {args.micro_batch_size}: a micro-batch is one pack. Give 1.")
    if args.dataloader_type != "external":
        raise ValueError(f"--dataloader-type {args.dataloader_type}: the data is an iterator. Give external.")
    if args.log_probs == "stock" and (args.temperature != 1 or args.entropy_bonus):
        raise ValueError("--temperature or --entropy-bonus with --log-probs stock: it has neither. Give chunked.")
    if args.kl_beta and args.overlap_param_gather:
        raise ValueError("--kl-beta with --overlap-param-gather: weights are exchanged in place. Drop a flag.")
    for flag in ("--rampup-batch-size", "--step-batch-size-schedule"):
        if getattr(args, flag[2:].replace("-", "_"), None) is not None:
            raise ValueError(f"{flag}: a step's packs are fixed here. Drop the flag.")


def skip_building_dataset_helpers() -> None:
    """Skip Megatron's build of its index helpers, unused here: the wheel lacks their Makefile."""
    dataset_utils.compile_helpers = lambda: None


if __name__ == "__main__":
    main()
