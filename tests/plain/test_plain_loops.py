"""Loops of one's own in plain PyTorch: scalers, several models, gradients from before, errors on one rank.

A row is a loop of its own, run on the ranks that it names; what each rank prints and raises is compared with its words.
What one loop of `test_plain_proof` can express is a row there.
"""

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from proved_steps import ELSEWHERE, IN_PART, LIMITS, PROVED, Step, attempted
from ranks import run_ranks, start_process_group
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.slow

WIDTH = 8


class Data(NamedTuple):
    """The samples of a step on this rank, and their inputs, one tensor for each micro-batch."""

    samples: list[Any]
    inputs: list[Tensor]


def data(rank: int, lengths: tuple[tuple[int, ...], ...] = ((5, 3), (4, 6))) -> Data:
    from megatron_rl_loss import Samples

    generator = torch.Generator().manual_seed(7 + rank)
    samples, inputs = [], []
    for number, mask_lengths in enumerate(lengths):
        masks = [torch.ones(length + rank) for length in mask_lengths]
        samples.append(Samples(masks, prompt_ids=[f"{rank} {number} {k}" for k in range(len(masks))]))
        inputs.append(torch.randn(sum(map(len, masks)), WIDTH, generator=generator))
    return Data(samples, inputs)


def net(dtype: torch.dtype = torch.float32, outputs: int = 1) -> Any:
    torch.manual_seed(0)
    layers = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, outputs)
    return torch.nn.Sequential(*layers).to(dtype)


def planned(step: Data, mode: str = "token_mean", **groups: Any) -> Any:
    from megatron_rl_loss import plan_step

    over = {"gradients": "averaged over ranks"} | (groups or {"dp_group": dist.group.WORLD})
    return plan_step(step.samples, mode, **over)


def losses_of(model: Any, inputs: Tensor) -> Tensor:
    losses: Tensor = model(inputs).float()[:, 0] ** 2
    return losses


def backward(model: Any, step: Data, plan: Any, scale: Callable[[Tensor], Tensor] = lambda loss: loss) -> None:
    for inputs, microbatch in zip(step.inputs, plan, strict=True):
        is_last = microbatch is plan[-1]
        with contextlib.nullcontext() if is_last or not hasattr(model, "no_sync") else model.no_sync():
            scale(microbatch.loss(losses_of(model, inputs))).backward()


def one_step(
    model: Any,
    step: Data,
    plan: Any = None,
    *,
    scale: Callable[[Tensor], Tensor] = lambda loss: loss,
    before: Callable[[], Any] = lambda: None,
    inside: Callable[[], Any] = lambda: None,
    **options: Any,
) -> Step:
    from megatron_rl_loss import prove_step

    plan = planned(step) if plan is None else plan

    def run() -> float:
        before()
        with prove_step(model, plan, **options):
            backward(model, step, plan, scale)
            inside()
        return 0.0

    return attempted(run)


def wrapped(**options: Any) -> Any:
    return DistributedDataParallel(net(**options))


# ---- loss scales


def scaler_of(kind: str = "plain") -> Any:
    if kind == "sharded":
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(device="cpu", init_scale=2.0**7)
    return torch.amp.GradScaler("cpu", init_scale=2.0**9)


def scaled_by(kind: str) -> list[Step]:
    model, step = wrapped(), data(dist.get_rank())
    scaler: Any = scaler_of(kind)
    return [one_step(model, step, scale=lambda loss: scaler.scale(loss))]


def actor_and_critic(critics: str) -> list[Step]:
    """Each in a ``with`` of its own, one inside the other; the critic by another scaler, the same, or none."""
    from megatron_rl_loss import prove_step

    actor, critic, step = wrapped(), wrapped(), data(dist.get_rank())
    plans = planned(step, "prompt_mean"), planned(step)
    own = scaler_of()
    other = {"another": scaler_of("sharded"), "the same": own}.get(critics)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)

    def run() -> float:
        with prove_step(actor, plans[0]), prove_step(critic, plans[1]):
            backward(actor, step, plans[0], own.scale)
            backward(critic, step, plans[1], (lambda loss: loss) if other is None else other.scale)
            if critics == "another":
                other.unscale_(optimizer)
        return 0.0

    return [attempted(run)]


def critic_beside() -> list[Step]:
    """A critic of no plan is scaled and trained inside the actor's ``with``, and its gradients are divided there."""
    actor, critic, step, scalers = wrapped(), wrapped(), data(dist.get_rank()), [scaler_of(), scaler_of("sharded")]
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)

    def train_critic() -> None:
        scalers[1].scale(losses_of(critic, step.inputs[0]).mean()).backward()
        scalers[1].unscale_(optimizer)

    return [one_step(actor, step, scale=lambda loss: scalers[0].scale(loss), inside=train_critic)]


def scaled_by_hand(is_stated: bool) -> list[Step]:
    model, step = wrapped(), data(dist.get_rank())
    options: Any = {"loss_scale": 1024.0} if is_stated else {}
    return [one_step(model, step, scale=lambda loss: loss * 1024, **options)]


def half_scaled() -> list[Step]:
    """Only the first micro-batch goes through the scaler of the one optimizer."""
    model, step, calls = wrapped(), data(dist.get_rank()), iter(range(9))
    scaler: Any = scaler_of()
    return [one_step(model, step, scale=lambda loss: loss if next(calls) else scaler.scale(loss))]


# ---- FSDP2


def sharded(kind: str) -> list[Step]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, step = net(), data(0 if kind == "tp" else dist.get_rank())
    options: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    if kind == "hsdp":
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if kind == "tp":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        options["mesh"], step = mesh["dp"], data(mesh["dp"].get_local_rank())
        groups = {"dp_group": mesh["dp"].get_group(), "replica_groups": [mesh["tp"].get_group()]}
    if kind == "kept whole":
        options["reshard_after_forward"] = False
    fully_shard(model[0], **options)
    fully_shard(model, **options)
    if kind == "left whole":
        model.unshard()
    with torch.no_grad():
        model(step.inputs[0])  # for old log-probs
    return [one_step(model, step, planned(step, **groups))]


# ---- gradients of other steps


class ActorCritic(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.actor, self.critic = net(outputs=WIDTH), net(), net()
        self.has_trunk = False

    def forward(self, inputs: Tensor, head: str) -> Tensor:
        values: Tensor = getattr(self, head)(self.trunk(inputs) if self.has_trunk else inputs)
        return values


def two_optimizers(is_wrong: bool) -> list[Step]:
    """Two parts of one module, each zeroed before its own step; wrongly, the actor's is never zeroed."""
    from megatron_rl_loss import prove_step

    model: Any = ActorCritic()
    step, outcomes = data(0), []
    optimizers = {head: torch.optim.SGD(getattr(model, head).parameters(), lr=0.1) for head in ("actor", "critic")}
    for _ in range(2):
        for head, mode in (("actor", "prompt_mean"), ("critic", "token_mean")):
            if not is_wrong or head == "critic":
                optimizers[head].zero_grad()
            plan = planned(step, mode, dp_group=None)

            def run(plan: Any = plan, head: str = head) -> float:
                with prove_step(model, plan):
                    backward(functools.partial(model, head=head), step, plan)
                return 0.0

            outcomes.append(attempted(run))
            optimizers[head].step()
    return outcomes


def policy_and_value_before_one_step() -> list[Step]:
    """Policy and value share a trunk, and are trained in two ``with`` before one optimizer step."""
    from megatron_rl_loss import prove_step

    model: Any = ActorCritic()
    model.has_trunk, step, outcomes = True, data(0), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        for head, mode in (("actor", "prompt_mean"), ("critic", "token_mean")):
            plan = planned(step, mode, dp_group=None)

            def run(plan: Any = plan, head: str = head) -> float:
                with prove_step(model, plan):
                    backward(functools.partial(model, head=head), step, plan)
                return 0.0

            outcomes.append(attempted(run))
        optimizer.step()
    return outcomes


def gradients_left() -> list[Step]:
    """Those of a step that was given up, before the first measured one."""
    model, step = wrapped(), data(dist.get_rank())
    losses_of(model, step.inputs[0]).sum().backward()
    return [one_step(model, step)]


def supervised_beside() -> list[Step]:
    """A supervised loss of the same optimizer step, whose backward pass runs after the ``with``."""
    model, step = wrapped(), data(dist.get_rank())
    first = one_step(model, step)
    losses_of(model, step.inputs[0]).mean().backward()
    return [first]


def stepped_inside() -> list[Step]:
    """The optimizer steps after each micro-batch, while gradients accumulate."""
    model, step = wrapped(), data(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return [one_step(model, step, inside=optimizer.step)]


# ---- ranks


def ranks_1_and_2() -> list[Step]:
    """Rank 0 samples; the others train, and the first of them speaks."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return [Step("", "", 0.0)] * 2
    step = data(dist.get_rank())
    model = DistributedDataParallel(net(), process_group=group)
    plan = planned(step, dp_group=group)
    first = one_step(model, step, plan)
    model = DistributedDataParallel(net(), process_group=group)
    return [first, one_step(model, step, planned(step, dp_group=group), scale=lambda loss: loss * 2)]


def replicas(are_stated: bool) -> list[Step]:
    """Both ranks hold the same samples, and DDP averages what they both compute."""
    model, step = wrapped(), data(0)
    groups: Any = {"dp_group": None, **({"replica_groups": [dist.group.WORLD]} if are_stated else {})}
    return [one_step(model, step, planned(step, **groups))]


def error_on_one_rank(number: int) -> list[Step]:
    """What the trainer logs fails on rank 0, inside the ``with`` of that step, and is caught."""
    model, step = wrapped(), data(dist.get_rank())

    def log() -> None:
        if dist.get_rank() == 0:
            raise OSError("disk full")

    outcomes = []
    for current in range(3):
        model.zero_grad()
        fails: Any = {"inside": log} if current == number else {}
        outcomes.append(one_step(model, step, **fails))
    return outcomes


def level_on_one_rank(level: str) -> list[Step]:
    model, step = wrapped(), data(dist.get_rank())
    return [one_step(model, step, level=level if dist.get_rank() else None)]


# ---- losses and models


def tokens_of_ranks() -> list[Step]:
    """A bfloat16 model whose loss is a mean over the tokens of each rank, 1000 and 1030."""
    rank = dist.get_rank()
    step = data(0, ((1000 + 30 * rank,),))
    model = wrapped(dtype=torch.bfloat16)
    step = step._replace(inputs=[inputs.bfloat16() for inputs in step.inputs])
    plan = planned(step)
    wrong = plan.totals.step_active_tokens / (2 * (1000 + 30 * rank))
    return [one_step(model, step, plan, scale=lambda loss: loss * wrong)]


def leaning() -> list[Step]:
    """A hook multiplies the gradients of one rank by 1.01, in float32."""
    model, step = wrapped(), data(dist.get_rank())
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * (1 + 0.01 * dist.get_rank()))
    return [one_step(model, step)]


def microbatch_left_out() -> list[Step]:
    from megatron_rl_loss import prove_step

    model, step = net(), data(0)
    plan = planned(step, dp_group=None)

    def run() -> float:
        with prove_step(model, plan):
            plan[0].loss(losses_of(model, step.inputs[0])).backward()
        return 0.0

    return [attempted(run)]


def form_of_a_schedule() -> list[Step]:
    from megatron_rl_loss import prove_step

    model, step = wrapped(), data(dist.get_rank())
    plan = planned(step)

    def run() -> float:
        with prove_step(model, plan):
            for inputs, microbatch in zip(step.inputs, plan, strict=True):
                with contextlib.nullcontext() if microbatch is plan[-1] else model.no_sync():
                    microbatch.loss(losses_of(model, inputs), form="3-tuple")[0].backward()
        return 0.0

    return [attempted(run)]


def in_a_thread() -> list[Step]:
    from megatron_rl_loss import prove_step

    model, step = net(), data(0)
    plan = planned(step, dp_group=None)

    def run() -> float:
        with prove_step(model, plan):
            thread = threading.Thread(target=backward, args=(model, step, plan))
            thread.start()
            thread.join()
        return 0.0

    return [attempted(run)]


def part_of_the_model(is_told: bool) -> list[Step]:
    """The last layer is given for the model; the optimizer has all of it."""
    from megatron_rl_loss import prove_step

    model, step = net(), data(0)
    plan = planned(step, dp_group=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if is_told else None

    def run() -> float:
        with prove_step(model[2], plan, optimizer=optimizer):
            backward(model, step, plan)
        return 0.0

    return [attempted(run)]


def without_parameters() -> list[Step]:
    from megatron_rl_loss import prove_step

    step = data(0)
    plan = planned(step, dp_group=None)

    def run() -> float:
        with prove_step(torch.nn.Tanh(), plan):
            backward(net(), step, plan)
        return 0.0

    return [attempted(run)]


def zeroed_inside() -> list[Step]:
    model, step = wrapped(), data(dist.get_rank())
    return [one_step(model, step, inside=model.zero_grad)]


def reducers_by_hand() -> list[Step]:
    from megatron_rl_loss import prove_step

    def run() -> float:
        with prove_step(net(), None):
            pass
        return 0.0

    return [attempted(run)]


def another_plan() -> list[Step]:
    model, step = net(), data(0)
    plans = [planned(step, dp_group=None) for _ in range(2)]
    from megatron_rl_loss import prove_step

    def run() -> float:
        with prove_step(model, plans[0]):
            backward(model, step, plans[1])
        return 0.0

    return [attempted(run)]


def compiled(what: str) -> list[Step]:
    """Compiled autograd, or a micro-batch's loss in a compiled function, on two ranks whose gradients are summed."""
    from torch._dynamo import compiled_autograd

    from megatron_rl_loss import prove_step

    model, step = net(), data(dist.get_rank())
    plan = planned(step, dp_group=dist.group.WORLD, gradients="summed over ranks")

    def loss_of(microbatch: Any, inputs: Tensor) -> Any:
        return microbatch.loss(losses_of(model, inputs))

    make: Any = torch.compile(loss_of, backend="eager") if what == "loss" else loss_of

    def run() -> float:
        with prove_step(model, plan):
            for inputs, microbatch in zip(step.inputs, plan, strict=True):
                loss, context = make(microbatch, inputs), contextlib.nullcontext()
                with compiled_autograd._enable(torch.compile(backend="eager")) if what == "autograd" else context:
                    loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        return 0.0

    return [attempted(run)]


def collectives_of_later_steps() -> list[int]:
    """On a rank: how many collectives of ours run in each step's ``with``, by counting their two ways into torch."""
    from unittest.mock import patch

    from megatron_rl_loss import prove_step
    from megatron_rl_loss.core import collectives

    start_process_group()
    model, step, counts = wrapped(), data(dist.get_rank()), []
    for _ in range(4):
        model.zero_grad()
        plan, calls = planned(step), [0]

        def counted(of: Callable[..., Any], calls: list[int] = calls) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                calls[0] += 1
                return of(*args, **options)

            return call

        names = ("reduce_in_place", "all_gather_single")
        ways: dict[str, Any] = {name: counted(getattr(collectives, name)) for name in names}
        with patch.multiple(collectives, **ways), prove_step(model, plan):
            backward(model, step, plan)
        counts.append(calls[0])
    return counts


def plan_for_each_microbatch() -> list[Step]:
    """Two micro-batches of an optimizer step, each in a plan and a ``with`` of its own; two such steps."""
    model, step = wrapped(), data(dist.get_rank())
    optimizer, outcomes = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        for number in range(2):
            outcomes.append(one_step(model, Data(step.samples[number:][:1], step.inputs[number:][:1])))
        optimizer.step()
        optimizer.zero_grad()
    return outcomes


def another_model() -> list[Step]:
    """The ``with`` is given a model that the losses do not come from."""
    from megatron_rl_loss import prove_step

    model, step = wrapped(), data(dist.get_rank())
    plan = planned(step)

    def run() -> float:
        with prove_step(net(), plan):
            backward(model, step, plan)
        return 0.0

    return [attempted(run)]


def gradients_by_autograd_grad() -> list[Step]:
    from megatron_rl_loss import prove_step

    model, step = net(), data(0)
    plan, parameters = planned(step, dp_group=None), [*model.parameters()]

    def run() -> float:
        with prove_step(model, plan):
            for inputs, microbatch in zip(step.inputs, plan, strict=True):
                share = microbatch.loss(losses_of(model, inputs))
                for parameter, gradient in zip(parameters, torch.autograd.grad(share, parameters), strict=True):
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return 0.0

    return [attempted(run)]


def in_a_list() -> list[Step]:
    """The model alone in a list, as Megatron's are."""
    from megatron_rl_loss import prove_step

    model, step = wrapped(), data(dist.get_rank())
    plan = planned(step)

    def run() -> float:
        with prove_step([model], plan):
            backward(model, step, plan)
        return 0.0

    return [attempted(run)]


def optimizer_by_name() -> list[Step]:
    model, step = wrapped(), data(dist.get_rank())
    return [one_step(model, step, optimizer="adam" if dist.get_rank() == 0 else None)]


class Sign(torch.autograd.Function):
    """Losses whose backward ignores the size of what comes from above."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].sign()


def detached_on_a_rank() -> list[Step]:
    """Its losses reach no parameter of the model, while those of the other rank train."""
    from megatron_rl_loss import prove_step

    model, step = net(), data(dist.get_rank())
    plan = planned(step)

    def run() -> float:
        with prove_step(model, plan):
            for inputs, microbatch in zip(step.inputs, plan, strict=True):
                losses = losses_of(model, inputs)
                microbatch.loss(losses.detach().requires_grad_() if dist.get_rank() == 1 else losses).backward()
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        return 0.0

    return [attempted(run)]


def kernel_of_ones_own(is_wrong: bool) -> list[Step]:
    """Each rank states its own losses; that of rank 1 has a wrong backward."""
    from megatron_rl_loss.proof.own_losses import OwnLosses

    model, step = wrapped(), data(dist.get_rank())
    bare = net(torch.float64)
    inputs = step.inputs[0].double()

    def losses() -> Tensor:
        values = bare(inputs)[:, 0]
        apply: Any = Sign.apply
        own: Tensor = apply(values) if is_wrong and dist.get_rank() else values * 1.0
        return own

    return [one_step(model, step, own_losses=OwnLosses(losses, list(bare.parameters())))]


def half_of_the_ranks(kind: str) -> list[Step]:
    """The model is wrapped over ranks 0 and 1, or 2 and 3; the plan counts all four."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    step, model = data(dist.get_rank()), net()
    if kind == "ddp":
        model = DistributedDataParallel(model, process_group=groups[dist.get_rank() // 2])
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))["inner"])
    return [one_step(model, step)]


class Row(NamedTuple):
    world: int
    run: Callable[[], list[Step]]
    says: list[str]
    speaker: int = 0


ON_2, ALONE = functools.partial(Row, 2), functools.partial(Row, 1)
LINE = rf"token_mean on .*, {PROVED} \d+ tokens.*; by the gradients of all 4 parameters; losses as given {LIMITS}$"
BOTH = f"(?=.*prompt_mean on the policy loss, {PROVED})(?=.*token_mean on the policy loss, {PROVED})"
RIGHT = {
    "a scaler": ON_2(functools.partial(scaled_by, "plain"), [LINE]),
    "a sharded scaler": ON_2(functools.partial(scaled_by, "sharded"), [LINE]),
    **{
        f"actor and critic, {critics} scaler": ON_2(functools.partial(actor_and_critic, critics), [BOTH])
        for critics in ("another", "the same", "no")
    },
    "a critic beside": ON_2(critic_beside, [LINE]),
    "scaled by hand, as stated": ON_2(functools.partial(scaled_by_hand, True), [LINE]),
    **{
        f"FSDP2, {kind}": Row(4 if kind in ("hsdp", "tp") else 2, functools.partial(sharded, kind), [LINE])
        for kind in ("sharded again", "hsdp", "tp", "kept whole", "left whole")
    },
    "two optimizers": ALONE(
        functools.partial(two_optimizers, False),
        [f"prompt_mean .*{PROVED}", f"token_mean .*{PROVED}", "^$", "^$"],
    ),
    "policy and value before one step": ALONE(
        policy_and_value_before_one_step,
        [f"prompt_mean .*{PROVED}", f"token_mean .*{PROVED}", "^$", "^$", "^$", "^$"],
    ),
    "a supervised loss beside": ON_2(supervised_beside, [LINE]),
    "ranks 1 and 2": Row(
        3, ranks_1_and_2, [f"token_mean .*{PROVED}", "raises tokens weigh 2 times what they should"], speaker=1
    ),
    "replicas": ON_2(functools.partial(replicas, True), [LINE]),
    "a kernel of one's own": ON_2(functools.partial(kernel_of_ones_own, False), [LINE]),
    # Where torch breaks the graph at the loss, its gradients are seen.
    "a compiled loss": ON_2(
        functools.partial(compiled, "loss"), [f"{PROVED}|NOT PROVED: A micro-batch's loss was made in a compiled graph"]
    ),
    "compiled autograd": ON_2(functools.partial(compiled, "autograd"), [LINE]),
    "in a list": ON_2(in_a_list, [LINE]),
}
#: Which are stopped, or named in their line.
WRONG = {
    "scaled by hand": ON_2(functools.partial(scaled_by_hand, False), ["raises tokens weigh 1024 .*loss_scale=..."]),
    "half scaled": ON_2(half_scaled, ["NOT PROVED: Losses of the step went through several gradient scalers, or some"]),
    "two optimizers, one never zeroed": ALONE(
        functools.partial(two_optimizers, True),
        [f"prompt_mean .*{PROVED}", f"token_mean .*{PROVED}", "raises gradients of the step before are still", "^$"],
    ),
    "gradients of before": ON_2(gradients_left, ["raises Gradients were not 0 before the step, which added to them"]),
    "stepped inside": ON_2(stepped_inside, ["raises 4 of 4 parameters changed inside the measured step, as .*weight"]),
    "replicas, not stated": ON_2(
        functools.partial(replicas, False),
        ["raises DistributedDataParallel reduces .* over 2 ranks, and the plan"],
    ),
    **{
        f"an error on one rank in step {number}": ON_2(
            functools.partial(error_on_one_rank, number),
            [("raises OSError: disk full" if step == number else f"{PROVED}|^$") for step in range(3)],
        )
        for number in range(2)  # the steps that are measured, or looked at
    },
    "an unknown level on one rank": ON_2(
        functools.partial(level_on_one_rank, "loud"), ["raises proof level 'loud': there is no such proof level"]
    ),
    "off on one rank": ON_2(functools.partial(level_on_one_rank, "off"), [f"differs between ranks .*{PROVED}"]),
    "means over the tokens of ranks, bfloat16": ON_2(tokens_of_ranks, [r"raises tokens weigh 0.98\d* to 1.0\d* times"]),
    "a rank's gradients x 1.01": ON_2(leaning, [r"NOT PROVED: .*no multiple of the sum over ranks"]),
    "a micro-batch left out": ALONE(microbatch_left_out, [r"raises Of 2 micro-batches of the plan, \[1\] were not"]),
    "a form of Megatron's schedule": ON_2(
        form_of_a_schedule,
        [r"raises tokens weigh .* times.*returned form='3-tuple', for Megatron's schedule.*plan_step"],
    ),
    "losses made in a thread": ALONE(in_a_thread, ["NOT PROVED: .* or in another thread than the `with`"]),
    "a part of the model": ALONE(
        functools.partial(part_of_the_model, True),
        [rf"{IN_PART} .*2 of 4 parameters \(2 not covered, as .*the optimizer has it, and the model that was given"],
    ),
    **{
        f"{wrapper} over half of the ranks": Row(
            4,
            functools.partial(half_of_the_ranks, kind),
            [f"raises {wrapper} reduces gradients over 2 ranks, and the plan counts the tokens of 4: what the others"],
        )
        for kind, wrapper in (("ddp", "DistributedDataParallel"), ("fsdp", "fully_shard"))
    },
    "a kernel with a wrong backward on one rank": ON_2(
        functools.partial(kernel_of_ones_own, True),
        ["raises The backward of the own losses is wrong, before any weight: the gradients of two weightings"],
    ),
    "losses detached on one rank": ON_2(detached_on_a_rank, [r"raises tokens weigh 0 to 1 times"]),
    "no parameters": ALONE(without_parameters, ["NOT PROVED: .*no parameter is trainable"]),
    "gradients zeroed inside": ON_2(zeroed_inside, ["NOT PROVED: .*all final gradients are 0, .*End the `with`"]),
    "a plan for each micro-batch": ON_2(
        plan_for_each_microbatch,
        [PROVED, "token weights of two plans add up: gradients of the `with` before", "^$", "^$"],
    ),
    "another model": ON_2(another_model, ["NOT PROVED: .*no loss reaches a parameter of the model that was given"]),
    "torch.autograd.grad": ALONE(
        gradients_by_autograd_grad, ["NOT PROVED: .*torch.autograd.grad gives gradients that nobody sees used"]
    ),
    "an optimizer by its name": ON_2(
        optimizer_by_name, ["raises optimizer is a str: it must be one of torch, or None"]
    ),
    "no plan": ALONE(reducers_by_hand, ["raises TypeError: plan is a NoneType: .*made by hand have no plan"]),
    "another plan": ALONE(another_plan, ["NOT PROVED: The step trained on micro-batches of another plan than the one"]),
}
ROWS = RIGHT | WRONG


def run_all(world: int) -> dict[str, list[Step]]:
    start_process_group()
    return {name: row.run() for name, row in ROWS.items() if row.world == world}


@functools.cache
def outcomes_of(world: int) -> list[dict[str, list[Step]]]:
    return run_ranks(world, run_all, world, timeout_s=120)


def mismatches(name: str) -> Iterator[tuple[int, Step]]:
    """Steps of a row that are not what it says."""
    row, flags = ROWS[name], re.MULTILINE | re.DOTALL
    for rank, rank_steps in enumerate(outcomes_of(row.world)):
        assert len(rank_steps[name]) == len(row.says)
        for step, says in zip(rank_steps[name], row.says, strict=True):
            is_speaker, is_right = rank == row.speaker, False
            if "raises " in says[:12]:
                why = says.replace("raises ", "", 1)
                elsewhere = f"{ELSEWHERE}|{why}|Another rank left the measured step with an error"
                is_right = rank < row.speaker or bool(
                    re.search(why if is_speaker else elsewhere, step.raised, re.DOTALL)
                )
            else:
                is_right = not step.raised and bool(re.search(says if is_speaker else "^$", step.printed, flags))
            if not is_right:
                yield rank, step


@pytest.mark.parametrize("name", ROWS)
def test_a_loop_of_ones_own(name: str) -> None:
    assert not list(mismatches(name))


def test_later_steps_of_a_with_cost_no_collective() -> None:
    first, second, *later = run_ranks(2, collectives_of_later_steps, timeout_s=60)[0]
    assert first > 10
    assert second == 1  # the look at gradients that nobody zeroed
    assert later == [0, 0]
