"""Torch's own context parallelism, no Megatron: rows of tokens are cut over the ranks of a DeviceMesh's "cp".

torchrun --nproc-per-node 2 plain_cp.py

Attention must be torch's `scaled_dot_product_attention` on a GPU, whose kernels `context_parallel` replaces by ring
attention. This model has none, so the file runs on a CPU too.
"""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.parallel import DistributedDataParallel

from megatron_rl_loss import Samples, ZigzagBSHD, plan_step, ppo_clip_loss, prove_step

Batch = dict[
    str, Any
]  # tokens, labels, old_log_probs, advantages, loss_masks: [rows, length], uncut; prompt_ids: [rows]
CUT = ("tokens", "labels", "old_log_probs", "advantages")


def train_step(
    model: Any, optimizer: Any, batches: list[Batch], mode: str, mesh: DeviceMesh, divisor: float | None = None
) -> Tensor:
    """Run one optimizer step over this rank's micro-batches. Returns the step loss of all ranks.

    Args:
        model: DDP or FSDP over all ranks of the mesh.
        batches: the same on the ranks of a "cp" group; the length of rows is a multiple of 2 x CP.
        mesh: with the dimensions "dp" and "cp".
    """
    dp_group, cp_group = mesh["dp"].get_group(), mesh["cp"].get_group()

    def describe() -> list[Samples]:  # a function: what it raises on one rank is raised on all
        described = []
        for batch in batches:
            layout, masks = ZigzagBSHD(*batch["tokens"].shape), list(batch["loss_masks"])
            described.append(Samples(masks, layout=layout, prompt_ids=batch["prompt_ids"], tokens=batch["tokens"]))
        return described

    plan = plan_step(
        describe,
        mode,
        divisor=divisor,
        dp_group=dp_group,
        cp_group=cp_group,
        gradients="averaged over ranks",
    )
    optimizer.zero_grad()
    # The first step is proved; a wrong one stops all ranks.
    with prove_step(model, plan):
        for batch, microbatch in zip(batches, plan, strict=True):
            is_last = microbatch is plan[-1]
            buffers = [batch[name].clone() for name in CUT]
            # Torch cuts the buffers in place.
            cut = context_parallel(mesh["cp"], buffers=buffers, buffer_seq_dims=[1] * 4, no_restore_buffers={*buffers})
            with contextlib.nullcontext() if is_last else model.no_sync(), cut:
                tokens, labels, old, advantages = buffers
                microbatch.check_tokens(tokens)  # torch cuts as ZigzagBSHD
                by_id = model(tokens).log_softmax(-1)
                log_probs = by_id.gather(-1, labels[..., None])[..., 0]
                policy = ppo_clip_loss(log_probs, old, advantages, microbatch)
                microbatch.loss(policy.per_token_loss).backward()
    # Clip gradients here.
    values = plan.finish()
    optimizer.step()
    return values["pg_loss"]


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(0)  # the same rows on all ranks, which are one "cp" group
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Embedding(9, 16), torch.nn.Linear(16, 9)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    rows, length = 4, 16
    tokens = torch.randint(9, (rows, length))
    batch: Batch = {"tokens": tokens, "labels": tokens.roll(-1, 1), "prompt_ids": ["a", "a", "b", "b"]}
    batch["loss_masks"] = torch.arange(length) < torch.tensor([[16], [3], [9], [7]])
    batch["old_log_probs"] = torch.full((rows, length), -2.2)
    batch["advantages"] = torch.tensor([[1.0], [-1.0], [0.5], [-0.5]]).expand(rows, length)
    for step in range(3):
        loss = train_step(model, optimizer, [batch], "prompt_mean", mesh)
        if not dist.get_rank():
            print(step, f"{float(loss):.5f}")  # the same for any number of ranks


if __name__ == "__main__":
    main()
