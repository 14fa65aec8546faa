"""Samples that share prefixes, each prefix computed once. Plain PyTorch: FlexAttention on a GPU, runs on a CPU; DDP.

torchrun --nproc-per-node 2 tree_ddp.py
"""

import contextlib
import functools
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.parallel import DistributedDataParallel

from megatron_rl_loss import (
    OutputLayer,
    PrefixTree,
    Samples,
    log_probs_from_hidden,
    plan_step,
    ppo_clip_loss,
    prove_step,
)

Batch = dict[str, list[Any]]  # of each sample: rows (token ids), loss_masks, prompt_ids, old_log_probs, advantages


class Model(nn.Module):
    def __init__(self, words: int = 97, width: int = 64, heads: int = 4, layers: int = 2, longest: int = 4096) -> None:
        super().__init__()
        self.tokens, self.positions, self.heads = nn.Embedding(words, width), nn.Embedding(longest, width), heads
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor, positions: Tensor, attention: Any, edges: Any) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)  # [1, slots, width]
        for qkv, mlp in zip(self.qkv, self.mlp, strict=True):
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv(x).chunk(3, -1))
            x = x + attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + mlp(x)
        return log_probs_from_hidden(x, OutputLayer(self.head.weight, self.head.bias), edges).log_probs


def attention_of(tree: PrefixTree, device: torch.device) -> Any:
    if device.type != "cuda":
        return tree.attend  # FlexAttention has no backward on a CPU
    return functools.partial(torch.compile(flex_attention), block_mask=tree.block_mask(device))


def train_step(model: Any, optimizer: Any, batches: list[Batch], mode: str, divisor: float | None = None) -> Tensor:
    """Run one optimizer step over this rank's micro-batches, a tree each. Returns the step loss of all ranks."""
    device = next(model.parameters()).device

    def describe() -> list[Samples]:  # a function: what it raises on one rank is raised on all
        trees = [PrefixTree(batch["rows"], multiple=128 if device.type == "cuda" else 1) for batch in batches]
        pairs = zip(batches, trees, strict=True)
        return [Samples(batch["loss_masks"], layout=tree, prompt_ids=batch["prompt_ids"]) for batch, tree in pairs]

    PrefixTree.check_model(model)
    plan = plan_step(describe, mode, divisor=divisor, dp_group=dist.group.WORLD, gradients="averaged over ranks")
    optimizer.zero_grad()
    with prove_step(model, plan):  # the first step is proved; a wrong one stops all ranks
        for batch, microbatch in zip(batches, plan, strict=True):
            tree: Any = microbatch.samples.layout
            tokens, positions = tree.inputs(device)
            microbatch.check_tokens(tokens)
            with contextlib.nullcontext() if microbatch is plan[-1] else model.no_sync():
                log_probs = model(tokens, positions, attention_of(tree, device), tree.edges(microbatch.tokens))
                old, advantages = (
                    microbatch.samples.in_buffer(batch[name]) for name in ("old_log_probs", "advantages")
                )
                policy = ppo_clip_loss(log_probs, old.to(log_probs), advantages.to(log_probs), microbatch)
                microbatch.loss(policy.per_token_loss).backward()
    # Clip gradients here.
    values = plan.finish()
    optimizer.step()
    return values["pg_loss"]


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    prompt, answers = torch.randint(97, (256,)), [torch.randint(97, (64,)) for _ in range(8)]
    rows = [torch.cat([prompt, answer]) for answer in answers]  # 8 answers to a prompt
    mask = (torch.arange(320) > 254) & (torch.arange(320) < 319)
    batch: Batch = {"rows": rows, "loss_masks": [mask] * 8, "prompt_ids": [dist.get_rank()] * 8}
    batch |= {"old_log_probs": [torch.full((320,), -4.5)] * 8, "advantages": [torch.tensor(a - 3.5) for a in range(8)]}
    alone = [{name: [column[i]] for name, column in batch.items()} for i in range(8)]  # each sample its own tree
    gradients = []
    for name, batches in (("shared", [batch]), ("alone", alone)):
        torch.manual_seed(0)
        model = DistributedDataParallel(Model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(2):  # the second step is not proved
            begin = time.perf_counter()
            loss = train_step(model, optimizer, batches, "prompt_mean")
            seconds = time.perf_counter() - begin
        slots = sum(PrefixTree(each["rows"]).num_slots for each in batches)
        gradients.append(
            torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
        )
        if not dist.get_rank():
            print(f"{name}: loss {float(loss):.5f}, {slots} slots, {seconds:.2f} s")
    error = float((gradients[0] - gradients[1]).abs().max() / gradients[1].abs().max())
    if not dist.get_rank():
        print(f"gradients differ by {error:.0e} of the largest entry")


if __name__ == "__main__":
    main()
