"""The proof in plain PyTorch: loops that it must let pass, stop, or call not proved; a row for each.

All rows of a world run one after the other on the same ranks. Of each, gradients with the proof are compared to the bit
with those without it, and no hook may be left.
"""

import contextlib
import functools
import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from proved_steps import ELSEWHERE, LIMITS, PROVED, attempted
from ranks import run_ranks, start_process_group
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.slow

WORDS, WIDTH = 11, 32
HALF_OR_WHOLE = itertools.cycle([0.5, 1.0])


class Net(torch.nn.Module):
    def __init__(self, run: "Run") -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH, sparse=run.sparse)
        self.hidden = torch.nn.Linear(WIDTH, WIDTH)
        self.temperature = torch.nn.Parameter(torch.ones([1] * (run.kind == "fsdp")))
        self.norm, self.output = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WORDS, bias=not run.tied)
        self.unused = torch.nn.Linear(WIDTH, 3) if run.unused else None
        self.recomputes = run.recomputes
        if run.tied:
            self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        values = self.embedding(tokens)
        inner: Any = lambda values: torch.tanh(self.hidden(values))  # noqa: E731
        recomputed: Any = checkpoint
        hidden = recomputed(inner, values, use_reentrant=False) if self.recomputes else inner(values)
        logits: Tensor = self.output(self.norm(hidden) * self.temperature)
        return logits.float()


class Run(NamedTuple):
    """A loop, and what the first rank prints, or all ranks raise, in each of its steps.

    Attributes:
        says: patterns; one that begins with ``raises`` is of an error.
        change: called with the bare model after it was wrapped.
        reduce: called with the bare model inside the ``with``, after backward.
        times: of the loss, by rank.
        over: of the loss, what it is divided by in a micro-batch.
        changed: of losses and log-probs, what the micro-batch gets as its losses.
        zeroes_each: gradients are zeroed before each micro-batch.
    """

    says: tuple[str, ...]
    world: int = 2
    kind: str = "ddp"
    gradients: Any = "averaged over ranks"
    mode: str = "prompt_mean"
    dtype: torch.dtype = torch.float32
    microbatches: Callable[[int], int] = lambda rank: 2
    options: dict[str, Any] = {}  # noqa: RUF012
    policy: dict[str, Any] = {}  # noqa: RUF012
    mesh: tuple[int, ...] = ()
    tied: bool = False
    unused: bool = False
    sparse: bool = False
    frozen: bool = False
    recomputes: bool = False
    scaler: str = ""
    syncs_all: bool = False
    syncs_none: bool = False
    zeroes: bool = True
    same: bool = False
    outside: bool = False
    lost: int | None = None
    cp: int = 1
    times: Callable[[int], float] = lambda rank: 1.0
    over: Callable[[Any], float] = lambda microbatch: 1.0
    changed: Callable[[Tensor, Tensor], Tensor] = lambda losses, log_probs: losses
    zeroes_each: bool = False
    change: Callable[[Any], Any] | None = None
    reduce: Callable[[Any], Any] | None = None
    late: Callable[[Any], Any] | None = None
    level: str = "error"
    spoils: Callable[[], Any] | None = None
    counts_alone: bool = False


def all_reduced(model: Any, *, but: str = "", mean: bool = False, group: Any = None) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and name != but:
            dist.all_reduce(parameter.grad, group=group)
            if mean:
                parameter.grad /= dist.get_world_size()


def scaled(model: Any, factor: float = 0.5, only: str = "") -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and only in name:
            parameter.grad *= factor


def clipped(model: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def hooked(model: Any, factor: float, only: str = "") -> None:
    for name, parameter in model.named_parameters():
        if only in name:
            parameter.register_hook(lambda gradient: gradient * factor)


def doubled_in_place(model: Any) -> None:
    def double(gradient: Tensor) -> None:
        gradient.mul_(2)

    for name, parameter in model.named_parameters():
        if "norm.bias" in name:
            parameter.register_hook(double)


def compressed(kind: str) -> Callable[[Any], None]:
    def register(model: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        model.register_comm_hook(None, getattr(default_hooks, f"{kind}_compress_hook"))

    return register


def batches_of(run: Run, rank: int, step: int) -> list[dict[str, Any]]:
    rank = 0 if run.same else rank // run.cp
    generator, batches = torch.Generator().manual_seed(100 * step + rank), []
    for number in range(run.microbatches(rank)):
        lengths = torch.randint(2, 9, (4,), generator=generator).tolist()
        if run.cp > 1:
            lengths = [8] * 4
        count = sum(lengths)
        masks = [(torch.rand(length, generator=generator) < 0.8).float() for length in lengths]
        masks[0][0] = 1
        batches.append({
            "tokens": torch.randint(WORDS, (count,), generator=generator), "loss_masks": masks,
            "old": -2.4 + 0.1 * torch.randn(count, generator=generator), "lengths": lengths,
            "advantages": torch.randn(count, generator=generator),
            "prompt_ids": [f"{rank} {number} {k // 2}" for k in range(4)],
        })  # fmt: skip
    return batches


def samples_of(run: Run, batch: dict[str, Any]) -> Any:
    from megatron_rl_loss import Samples, ZigzagBSHD

    layout: Any = {"layout": ZigzagBSHD(4, 8)} if run.cp > 1 else {}
    return Samples(batch["loss_masks"], prompt_ids=batch["prompt_ids"], **layout)


def share_of(run: Run, model: Any, batch: dict[str, Any], microbatch: Any) -> Tensor:
    from megatron_rl_loss import ppo_clip_loss

    names = ("tokens", "old", "advantages")
    tokens, old, advantages = (batch[name] for name in names)
    if run.cp > 1:
        tokens, old, advantages = (microbatch.local(values.view(4, 8)) for values in (tokens, old, advantages))
    labels = tokens.roll(-1)
    log_probs = model(tokens).log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    losses = ppo_clip_loss(log_probs, old, advantages, microbatch).per_token_loss
    share: Tensor = microbatch.loss(run.changed(losses, log_probs))
    return share


def wrapped(run: Run, net: Net) -> Any:
    if run.kind == "ddp":
        model: Any = DistributedDataParallel(net, **run.options)
    elif run.kind == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        shape = run.mesh or (dist.get_world_size(),)
        names = ("replicate", "shard") if run.mesh else ("shard",)
        options = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names), **run.options}
        options["mp_policy"] = MixedPrecisionPolicy(**run.policy)
        fully_shard(net.hidden, **options)
        model = fully_shard(net, **options)
    else:
        model = net
    if run.change is not None:
        run.change(model)
    return model


def groups_of(run: Run) -> dict[str, Any]:
    if run.world == 1 or run.counts_alone:
        return {"dp_group": None}
    if run.cp == 1:
        return {"dp_group": dist.group.WORLD}
    return {"dp_group": MESH["dp"].get_group(), "cp_group": MESH["cp"].get_group()}


MESH: dict[str, Any] = {}


def steps_of(run: Run, level: Any) -> tuple[list[Any], list[Any], int]:
    """On a rank: the outcome of each step, the gradients of the last, and how many hooks are left."""
    from megatron_rl_loss import plan_step, prove_step

    torch.manual_seed(0)
    rank = dist.get_rank()
    net = Net(run).to(run.dtype)
    if run.frozen:
        net.embedding.weight.requires_grad_(False)
    model = wrapped(run, net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12) if run.scaler else None
    outcomes = []
    for number in range(len(run.says)):
        batches = batches_of(run, rank, number)
        plan = plan_step(
            [samples_of(run, batch) for batch in batches], run.mode, gradients=run.gradients, **groups_of(run)
        )
        if run.zeroes:
            optimizer.zero_grad()

        def step(batches: Any = batches, plan: Any = plan) -> float:
            with prove_step(model, plan, level=level):
                for number, (batch, microbatch) in enumerate(zip(batches, plan, strict=True)):
                    is_last = number == len(batches) - 1
                    context: Any = contextlib.nullcontext()
                    if run.kind == "ddp" and not (is_last or run.syncs_all):
                        context = model.no_sync()
                    if run.kind == "fsdp":
                        model.set_requires_gradient_sync((is_last and not run.syncs_none) or run.syncs_all)
                    if run.zeroes_each:
                        optimizer.zero_grad()
                    with context:
                        loss = share_of(run, net if run.outside else model, batch, microbatch)
                        loss = loss * run.times(rank) / run.over(microbatch)
                        if number == run.lost and rank == 0:
                            continue
                        (loss if scaler is None else scaler.scale(loss)).backward()
                if run.reduce is not None:
                    run.reduce(net)
                if run.scaler == "unscaled inside":
                    scaler.unscale_(optimizer)
                if run.lost is None:
                    plan.finish()
            return 0.0

        with contextlib.ExitStack() as stack:
            if run.spoils is not None and level != "off":
                stack.enter_context(run.spoils())
            outcomes.append(attempted(step))
        if outcomes[-1].raised:
            break
        gradients = [None if p.grad is None else _local(p.grad).clone() for p in net.parameters()]
        (run.late or (lambda net: None))(net)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    left = sum(len(p._backward_hooks or {}) for p in net.parameters()) if run.change is None else 0
    return outcomes, [] if outcomes[-1].raised else gradients, left


def _local(values: Any) -> Tensor:
    return values.to_local() if hasattr(values, "to_local") else values.to_dense()


ALL, MEAN = rf"prompt_mean on the policy loss, {PROVED} .*; by the gradients of all 8 parameters {LIMITS}$", "^$"
BF16 = rf"{PROVED} .* parameters \(weights to within 1.6 %, gradients to [\d.]+ %\)"
SUMMED = "summed over ranks"
TWICE = r"tokens weigh 2 times what they should"
#: All of them train rightly: not one may be aborted.
RIGHT = {
    "DDP": Run((ALL, MEAN, MEAN)),
    "DDP, every backward synced": Run((ALL,), syncs_all=True),
    "DDP, bucket views": Run((ALL,), options={"gradient_as_bucket_view": True}),
    "DDP, static graph": Run((ALL,), options={"static_graph": True}, microbatches=lambda rank: 1),
    "DDP, unused parameters": Run(
        (r"of 8 of 10 parameters \(2 have none\)",), unused=True, options={"find_unused_parameters": True}
    ),
    "DDP, bf16 model": Run((BF16,), dtype=torch.bfloat16),
    "DDP, float64 model": Run((ALL,), dtype=torch.float64),
    "DDP, bf16 compression": Run((r"rounded like bfloat16 on the way, weights",), change=compressed("bf16")),
    "DDP, fp16 compression": Run((PROVED,), change=compressed("fp16")),
    "DDP, uneven micro-batches": Run((ALL,), microbatches=lambda rank: 1 + rank),
    "DDP, 3 ranks": Run((ALL,), world=3),
    "DDP, frozen": Run(("of all 7 parameters",), frozen=True),
    "DDP, recomputed": Run((ALL,), recomputes=True),
    "DDP, tied": Run(("of all 6 parameters",), tied=True),
    "DDP, GradScaler": Run((ALL,), scaler="scaled"),
    "DDP, unscaled inside": Run((ALL,), scaler="unscaled inside"),
    "DDP, clipped after": Run((ALL, MEAN), late=clipped),
    "sums by hand": Run((ALL, MEAN), kind="own", gradients=SUMMED, reduce=all_reduced),
    "means by hand": Run((ALL,), kind="own", reduce=functools.partial(all_reduced, mean=True)),
    "one process": Run((ALL, MEAN), world=1, kind="own"),
    "a penalty added to losses": Run(
        (f"{PROVED}.*; losses as given",), changed=lambda losses, log_probs: losses + log_probs.exp().mean()
    ),
    "one process, loss / tokens": Run(
        (r"raises (?s)as if divided by the number of tokens of the micro-batch; .*\nCall backward (?!.*gradients=)",),
        world=1,
        kind="own",
        over=lambda microbatch: sum(microbatch.samples.mask_lengths),
    ),
    "one process, loss / micro-batches": Run(
        (r"raises (?s)0.5 = 1/micro-batches\); [^\n]*\nCall backward once on what each [^\n]*unchanged\.\n",),
        world=1,
        kind="own",
        over=lambda microbatch: 2.0,
    ),
    "a sparse gradient": Run(
        (r"7 of 8 parameters \(1 not covered, as embedding.weight: its gradient is sparse\)",), sparse=True, kind="own",
        gradients=SUMMED, reduce=all_reduced,
    ),
    "one process, a micro-batch x 2": Run(
        (r"raises tokens weigh 1 to 2 times what they should; furthest off",),
        world=1,
        kind="own",
        over=lambda microbatch: next(HALF_OR_WHOLE),
    ),
    "FSDP2": Run((ALL, MEAN, MEAN), kind="fsdp"),
    "FSDP2, every backward synced": Run((ALL,), kind="fsdp", syncs_all=True),
    "FSDP2, no backward synced": Run(
        (r"NOT PROVED: .* fully_shard has reduced no gradients: .*_sync\(True\) before that of the last",),
        kind="fsdp",
        syncs_none=True,
    ),
    "FSDP2, 3 ranks": Run((ALL,), kind="fsdp", world=3),
    "FSDP2, bf16": Run((BF16,), kind="fsdp", policy={"param_dtype": torch.bfloat16}),
    "FSDP2, bf16 reduced in fp32": Run(
        (PROVED,), kind="fsdp", policy={"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    ),
    "FSDP2, kept whole": Run((ALL,), kind="fsdp", options={"reshard_after_forward": False}),
    "FSDP2, frozen": Run(("of all 7 parameters",), kind="fsdp", frozen=True),
    "FSDP2, recomputed": Run((ALL,), kind="fsdp", recomputes=True),
    "FSDP2, replicas of shards": Run((ALL,), kind="fsdp", world=4, mesh=(2, 2)),
    "CP 2": Run((ALL,), world=2, cp=2),
    "DP 2, CP 2": Run((ALL, MEAN), world=4, cp=2),
}  # fmt: skip
IN_PART = r"(?s)PROVED IN PART on .*1 of 8 parameters are not trained by these weights.*{}.*Training goes on"
#: What goes wrong, and is stopped or named.
WRONG = {
    "sum under DDP": Run(
        (r"raises (?s)tokens weigh 0.5 times .*1/DP.*\n.* for gradients summed over ranks\.\nplan_step\(",),
        gradients=SUMMED,
    ),
    "sum under DDP, 3 ranks": Run(
        (r"raises tokens weigh 0.3333 times what they should \(0.3333 = 1/DP\)",), gradients=SUMMED, world=3
    ),
    "sum under DDP, warn": Run((r"(?s)tokens weigh 0.5 times.*Training goes on", "^$"), gradients=SUMMED, level="warn"),
    "sum under FSDP2": Run(("raises tokens weigh 0.5 times",), gradients=SUMMED, kind="fsdp"),
    "mean with sums by hand": Run((f"raises {TWICE}",), kind="own", reduce=all_reduced),
    "nobody reduces": Run(("raises Gradients are not summed over ranks at all",), kind="own"),
    "nobody reduces a sum": Run(
        ("raises Gradients are not summed over ranks at all",), kind="own", gradients=SUMMED
    ),
    "outside DDP": Run(("raises Gradients are not summed over ranks at all",), outside=True, syncs_all=True),
    "a backward lost": Run((r"raises tokens weigh 0 to 1 times what they should",), lost=0),
    "loss x 2": Run((rf"raises (?s){TWICE}.*for gradients av.*\nplan_step(?!.*audit)",), times=lambda rank: 2.0),
    "loss x 2 on a rank": Run((r"raises tokens weigh 1 to 2 times",), times=lambda rank: 2.0 - rank),
    "loss x 0.3": Run((r"raises tokens weigh 0.3 times",), times=lambda rank: 0.3),
    "FSDP2, loss x 2": Run((f"raises {TWICE}",), kind="fsdp", times=lambda rank: 2.0),
    "one process, gradients x 0.5": Run(
        (r"raises (?s)0.5 = 1/micro-batches\); [^\n]*\nGradients were multiplied by 0.5 after the backward",),
        world=1, kind="own", reduce=scaled,
    ),
    "losses halved": Run(
        (r"PROVED IN PART .*: a factor of 0.5 on tokens .* reducer \(0.5 = .*1/micro-batches.*\): if it is meant",),
        changed=lambda losses, log_probs: losses / 2,
    ),
    **{
        f"{kind}, gradients zeroed before each micro-batch": Run(
            ("raises Gradients were set to None between backward passes of the step",),
            world=world, kind=kind, zeroes_each=True,
        )
        for kind, world in (("own", 1), ("ddp", 2))
    },
    "gradients kept elsewhere": Run(
        ("NOT PROVED: .*all final gradients are 0",), world=1, kind="own", zeroes_each=True,
        reduce=lambda net: net.zero_grad(),
    ),
    "gradients made anew": Run(
        ("NOT PROVED: .*no multiple of the sum",), world=1, kind="own", zeroes_each=True,
        reduce=lambda net: [parameter.grad.normal_() for parameter in net.parameters()],
    ),
    "gradients x 0.5 on a rank": Run(
        ("NOT PROVED: .*the final gradients are 0.25 or 0.5 times the sum, on different ranks. Copies of a model",),
        reduce=lambda net: scaled(net, 1 - 0.5 * dist.get_rank()),
    ),
    "gradients x 0.5 inside": Run(
        (r"raises (?s)tokens weigh 0.5 times.*\nGradients were multiplied by 0.5 after the backward (?!.*gradients=)",),
        reduce=scaled,
    ),
    "hooks of all parameters x 2": Run((f"raises {TWICE}",), change=functools.partial(hooked, factor=2.0)),
    "one parameter's hook x 0.5": Run(
        (IN_PART.format(r"hidden.weight \(0.5 times the others\)"),),
        change=functools.partial(hooked, factor=0.5, only="hidden.weight"),
    ),
    "each rank counts its own tokens": Run(
        ("raises DistributedDataParallel reduces gradients over 2 ranks, and the plan counts the tokens of 1: ",),
        counts_alone=True,
    ),
    "FSDP2, each rank counts its own tokens": Run(
        ("raises fully_shard reduces gradients over 2 ranks, and the plan counts the tokens of 1: ",),
        kind="fsdp", counts_alone=True,
    ),
    "one parameter's hook doubles in place": Run(
        (IN_PART.format(r"norm.bias \(2 times the others\)"),), change=doubled_in_place
    ),
    "one parameter x 0.5": Run(
        (IN_PART.format(r"norm.bias \(0.5 times the others\)"),), reduce=functools.partial(scaled, only="norm.bias")
    ),
    "one parameter x 0.5, strict": Run(
        (r"raises (?s)1 of 8 parameters are not trained.*norm.bias.*All ranks aborted",),
        reduce=functools.partial(scaled, only="norm.bias"), level="strict",
    ),
    "a parameter forgotten by hand": Run(
        (IN_PART.format(r"norm.bias \(not summed over ranks at all\)"),), kind="own", gradients=SUMMED,
        reduce=functools.partial(all_reduced, but="norm.bias"),
    ),
    "clipped inside": Run(("NOT PROVED: .*Gradients may have been clipped inside the measured step",), reduce=clipped),
    "FSDP2, one parameter x 0.5": Run(
        (IN_PART.format("norm.bias"),), kind="fsdp", reduce=functools.partial(scaled, only="norm.bias")
    ),
    "gradients never zeroed": Run((ALL, "raises gradients of the step before are still in .grad"), zeroes=False),
    "FSDP2, never zeroed": Run((ALL, "raises gradients of the step before"), zeroes=False, kind="fsdp"),
    "DP 2, CP 2, reduced over DP alone": Run(
        ("raises Gradients are summed over the DP ranks alone, not over CP",), world=4, cp=2, kind="own",
        gradients=SUMMED, reduce=lambda net: all_reduced(net, group=MESH["dp"].get_group()),
    ),
    "CP 2, nobody reduces": Run(
        ("raises Gradients are not summed over ranks at all",), cp=2, kind="own", gradients=SUMMED
    ),
}  # fmt: skip
RUNS = RIGHT | WRONG


def run_all(world: int) -> dict[str, Any]:
    """On a rank: each run with the proof, and without it."""
    start_process_group()
    found = {}
    if world % 2 == 0:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "cp"))
        MESH.update(dp=mesh["dp"], cp=mesh["cp"])
    for name, run in RUNS.items():
        if run.world == world:
            outcomes, gradients, left = steps_of(run, run.level)
            same = True
            if name in RIGHT and gradients:
                _, alone, _ = steps_of(run, "off")
                pairs = zip(gradients, alone, strict=True)
                same = all((a is None and b is None) or torch.equal(a, b) for a, b in pairs)
            found[name] = outcomes, same, left
    return found


@functools.cache
def outcomes_of(world: int) -> list[dict[str, Any]]:
    return run_ranks(world, run_all, world, timeout_s=300)


def test_the_plain_proof_needs_no_megatron() -> None:
    code = "import sys; from megatron_rl_loss import prove_step; print([m for m in sys.modules if 'megatron.' in m])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (run.stdout, run.returncode) == ("[]\n", 0), run.stderr[-2000:]


@pytest.mark.parametrize("name", RUNS)
def test_a_loop_in_plain_torch(name: str) -> None:
    run = RUNS[name]
    for rank, rank_steps in enumerate(outcomes_of(run.world)):
        outcomes, same, left = rank_steps[name]
        assert len(outcomes) == len(run.says), (rank, outcomes)
        for outcome, says in zip(outcomes, run.says, strict=True):
            if says.startswith("raises "):
                why = ELSEWHERE if rank and not run.counts_alone else says.removeprefix("raises ")
                assert re.search(why, outcome.raised), (rank, outcome)
            else:
                assert not outcome.raised, (rank, outcome)
                assert re.search(says if rank == 0 else "^$", outcome.printed, re.MULTILINE), (rank, outcome)
        assert same, "the proof changes gradients"
        assert left == 0
