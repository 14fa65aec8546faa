"""Samples that share prefixes through Megatron's GPTModel and schedule: TP 2 with sequence parallelism, PP 2.

torchrun --nproc-per-node 4 tree_gpt.py
"""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

if not torch.cuda.is_available():
    import megatron_on_cpu

    megatron_on_cpu.install()  # before megatron is imported

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from packed_attention import layer_spec

from megatron_rl_loss import Microbatch, OutputHead, PrefixTree, Samples, plan_step, ppo_clip_loss, prove_step

Batch = dict[str, list[Any]]  # of each sample: rows (token ids), loss_masks, prompt_ids, old_log_probs, advantages
HEAD = OutputHead()


def forward_step(step: Iterator[tuple[Batch, Microbatch]], model: Any) -> Any:
    batch, microbatch = next(step)
    tree: Any = microbatch.samples.layout
    tokens, positions = tree.inputs("cuda")
    forbidden = ~tree.visible("cuda")[None, None]  # True where Megatron's attention may not look
    with tree.rotary_by_depth(model):
        values = HEAD(model, tokens, positions, forbidden, labels=tree.edges(microbatch.tokens))

    def loss(output: Any) -> Any:
        log_probs, _ = output
        old, advantages = (microbatch.samples.in_buffer(batch[name]) for name in ("old_log_probs", "advantages"))
        policy = ppo_clip_loss(log_probs, old.to(log_probs), advantages.to(log_probs), microbatch)
        return microbatch.loss(policy.per_token_loss, form="2-tuple")

    return values, loss


def train_step(model: Any, batches: list[Batch], mode: str, num_slots: int) -> dict[str, Any]:
    """Compute gradients of the step loss. Returns the step's values by name, on ranks of the last pipeline stage."""

    def describe() -> list[Samples]:  # every tree padded to the sequence length of the pipeline
        trees = [PrefixTree(batch["rows"], multiple=num_slots) for batch in batches]
        pairs = zip(batches, trees, strict=True)
        return [Samples(batch["loss_masks"], layout=tree, prompt_ids=batch["prompt_ids"]) for batch, tree in pairs]

    plan = plan_step(describe, mode, model=model)  # refuses layers that a tree does not fit
    step = iter(list(zip(batches, plan, strict=True)))
    sizes = {"num_microbatches": len(plan), "seq_length": num_slots, "micro_batch_size": 1}
    with prove_step(model, plan):  # the first step is proved; a wrong one stops all ranks
        schedule = get_forward_backward_func()
        reports = schedule(forward_step_func=forward_step, data_iterator=step, model=model, **sizes)
    return plan.finish(reports) if reports else {}


def make_model() -> Any:
    sizes: Any = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "pipeline_dtype": torch.float32}
    parallel: Any = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2}
    nothing: Any = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "gradient_accumulation_fusion": False}
    config = TransformerConfig(**sizes, **parallel, **nothing, normalization="RMSNorm", masked_softmax_fusion=False)
    config.finalize_model_grads_func = finalize_model_grads
    block = layer_spec(SimpleNamespace(transformer=config))  # whose norms sequence parallelism may have
    block.layer_specs[0].submodules.self_attention.submodules.core_attention = DotProductAttention
    is_first, is_last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    rope: Any = {"position_embedding_type": "rope", "pre_process": is_first, "post_process": is_last}
    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    model = GPTModel(config, block, vocab_size=96, max_sequence_length=4096, **rope).cuda()
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


def main() -> None:
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.cuda.set_device(torch.distributed.get_node_local_rank())
    parallel_state.initialize_model_parallel(2, 2)
    torch.manual_seed(1)
    prompt, answers = torch.randint(96, (192,)), [torch.randint(96, (32,)) for _ in range(8)]
    rows = [torch.cat([prompt, answer]) for answer in answers]  # 8 answers to a prompt
    mask = (torch.arange(224) > 190) & (torch.arange(224) < 223)
    batch: Batch = {"rows": rows, "loss_masks": [mask] * 8, "prompt_ids": ["a"] * 8}
    batch |= {"old_log_probs": [torch.full((224,), -4.5)] * 8, "advantages": [torch.tensor(a - 3.5) for a in range(8)]}
    halves = [{name: column[4 * i :][:4] for name, column in batch.items()} for i in range(2)]
    alone = [{name: [column[i]] for name, column in batch.items()} for i in range(8)]  # each sample its own tree
    gradients = []
    for name, batches, num_slots in (("shared", halves, 320), ("alone", alone, 224)):
        model = make_model()
        for _ in range(2):  # the second step is not proved
            model.zero_grad_buffer()
            begin = time.perf_counter()
            values = train_step(model, batches, "prompt_mean", num_slots)
            seconds = time.perf_counter() - begin
        gradients.append(torch.cat([parameter.main_grad.flatten() for parameter in model.parameters()]))
        if values and parallel_state.get_tensor_model_parallel_rank() == 0:
            print(f"{name}: loss {float(values['pg_loss']):.5f}, {num_slots * len(batches)} slots, {seconds:.2f} s")
    error = float((gradients[0] - gradients[1]).abs().max() / gradients[1].abs().max())
    print(f"rank {torch.distributed.get_rank()}: gradients differ by {error:.0e} of the largest entry")


if __name__ == "__main__":
    main()
