"""The policy: Megatron's GPTModel under Megatron's DDP, its optimizer, a training step, and checkpoints."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_rl_loss import LossAggregation, Microbatch, OutputHead, Term, Tokens, next_microbatch
from megatron_rl_loss.megatron.flags import AggregationSettings
from online.attention import row_layer_spec
from online.rows import Rows
from online.task import MAX_RESPONSE, PROMPT_LENGTH, VOCABULARY

#: Log-probs and their micro-batch -> losses of tokens, or terms by name, and metrics, each [rows, local positions].
Losses = Callable[[Tensor, Microbatch], tuple[Tensor | dict[str, Term], dict[str, Tensor]]]
HIDDEN_SIZE = 64


@dataclass(frozen=True)
class Policy:
    """A model under Megatron's DDP, and its process groups."""

    config: TransformerConfig
    ddp: DistributedDataParallel
    groups: ProcessGroupCollection

    @property
    def model(self) -> GPTModel:
        return self.ddp.module


def build_policy(seed: int, hidden_size: int = HIDDEN_SIZE) -> Policy:
    """Build a GPT, by default of 0.1 M parameters, the same in every layout. Needs the process groups."""
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=hidden_size,
        ffn_hidden_size=4 * hidden_size,
        num_attention_heads=4,
        normalization="RMSNorm",
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=0.1,  # about hidden_size ** -0.5; Megatron's 0.02 is for wide models, and learns slowly here
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        use_cpu_initialization=True,  # whole weights are drawn, then cut: the same for every tensor-parallel size
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = GPTModel(
        config=config,
        transformer_layer_spec=row_layer_spec(config),
        vocab_size=len(VOCABULARY),
        max_sequence_length=PROMPT_LENGTH + MAX_RESPONSE,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=False,
        pg_collection=groups,
    ).cuda()
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    return Policy(config, ddp, groups)


def log_probs_of(model: Any, rows: Rows, local: Callable[[Tensor], Tensor]) -> Tensor:
    """Log-probs of this context-parallel rank's tokens, [rows, local positions]; `local` cuts a tensor for it.

    With a teacher's ids [rows, local positions, 2 + K]: log-probs of the token, of these ids, and of all others.
    """
    tokens, position_ids, labels = (local(x).cuda() for x in (rows.tokens, rows.position_ids, rows.labels))
    if rows.teacher_ids is None:
        return -model(tokens, position_ids, None, labels=labels)
    ids = torch.cat([labels[..., None], rows.teacher_ids], dim=-1)
    teacher_ids = torch.cat([torch.zeros_like(ids[..., :1]), torch.ones_like(rows.teacher_ids)], dim=-1) > 0
    rest = Tokens(rest_without=teacher_ids)
    return OutputHead()(model, tokens, position_ids, None, labels=ids, context=rest)[0]


def cut(policy: Policy, rows: Rows) -> Callable[[Tensor], Tensor]:
    """Cut a tensor of these rows for this context-parallel rank, as a micro-batch does."""
    own = rows.samples.local(policy.groups.cp.rank(), policy.groups.cp.size())
    return lambda values: own.of(values.flatten(0, 1)).unflatten(0, (len(values), -1))


@torch.no_grad()
def old_log_probs(policy: Policy, rows: Rows) -> Tensor:
    """Log-probs under the current weights, by the forward pass of training; this rank's part."""
    return log_probs_of(policy.ddp, rows, cut(policy, rows))


@torch.no_grad()
def likeliest(teacher: Policy, rows: Rows, k: int) -> tuple[Tensor, Tensor]:
    """The teacher's k likeliest ids after each token and their log-probs, as a server gives them; this rank's part."""
    local = cut(teacher, rows)
    tokens, position_ids = (local(x).cuda() for x in (rows.tokens, rows.position_ids))
    logits = teacher.model(tokens, position_ids, None, runtime_gather_output=True)
    log_probs, ids = logits.float().log_softmax(-1).topk(k)
    return ids, log_probs


class Trainer:
    """Optimizer steps of a policy, on losses aggregated as `settings` say."""

    def __init__(self, policy: Policy, settings: AggregationSettings, *, lr: float, beta2: float) -> None:
        self.policy, self.lr = policy, lr
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=lr,
                adam_beta1=0.9,
                adam_beta2=beta2,
                adam_eps=1e-8,
                weight_decay=0.0,
                clip_grad=0.0,
                params_dtype=torch.float32,
            ),
            [policy.ddp],
        )
        policy.config.finalize_model_grads_func = finalize_model_grads
        policy.config.grad_scale_func = self.optimizer.scale_loss
        aggregation = LossAggregation(settings, samples_of=lambda rows: rows.samples)
        self.schedule = aggregation.wrap_schedule(get_forward_backward_func())

    def step(self, microbatches: Sequence[Rows], losses: Losses, *, lr_factor: float = 1.0) -> dict[str, float]:
        """Run one optimizer step. Returns the metrics of `losses` and the gradient norm, both of the whole step."""

        def forward_step(data_iterator: Iterator[Microbatch], model: Any) -> tuple[Tensor, Any]:
            microbatch = next_microbatch(data_iterator)
            log_probs = log_probs_of(model, microbatch.data, microbatch.local)

            def loss_func(log_probs: Tensor) -> Any:
                return microbatch.loss(*losses(log_probs, microbatch))

            return log_probs, loss_func

        self.policy.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = self.schedule(
            forward_step_func=forward_step,
            data_iterator=iter(microbatches),
            model=self.policy.ddp,
            num_microbatches=len(microbatches),
            seq_length=microbatches[0].tokens.size(1),
            micro_batch_size=len(microbatches[0].tokens),
        )
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * lr_factor
        self.optimizer.step()
        return {**{name: float(value) for name, value in reports[0].items()}, "grad_norm": grad_norm}


def save_policy(policy: Policy, folder: Path) -> None:
    """Save the weights in Megatron's distributed format, which any layout can load."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(policy.model.sharded_state_dict(), str(folder))


def load_policy(policy: Policy, folder: Path) -> None:
    state = dist_checkpointing.load(policy.model.sharded_state_dict(), str(folder))
    policy.model.load_state_dict(state, strict=False)  # Transformer Engine's extra states are not there
