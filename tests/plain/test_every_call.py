"""An error in any function of this package, on one rank of two: no rank waits for another in a plan, proof or finish.

The functions are those that a right step calls on that rank, found by tracing it; each raises once, at its first call.
Left out are the collectives themselves, whose own errors `test_proof_failures` plants, and functions that call one: an
error at their first line is one of whoever calls them.
"""

import contextlib
import datetime
import io
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, start_process_group
from torch.nn.parallel import DistributedDataParallel

import megatron_rl_loss

pytestmark = pytest.mark.slow

PACKAGE = str(Path(megatron_rl_loss.__file__).parent)
#: Files of collectives, in which an error is one of a collective.
COLLECTIVES = ("core/collectives.py", "core/transfers.py", "proof/exchange.py", "proof/leaving.py")
#: What says through whom other ranks can be told: the plan and its groups, the claim, the context of the step; and what
#: raises itself where a step is wrong.
NEEDED = (
    "FirstStep._tell", "StepRecord.groups", "check_plan", "LossModes.describe", "FirstStep.__init__", "observe",
    "expected_aggregation",
    "observed_taps", "TorchGradients._add_parts",  # which exchanges where parameters are cut
)  # fmt: skip
WAIT = datetime.timedelta(seconds=20)


class Planted(Exception):
    pass


def is_ours(code: CodeType) -> bool:
    name = code.co_filename
    is_local = not name.endswith(COLLECTIVES) and not code.co_name.startswith("<") and code.co_qualname not in NEEDED
    return name.startswith(PACKAGE) and is_local


def callers(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


@contextlib.contextmanager
def traced(see: Callable[[CodeType], None], exchanges: set[CodeType]) -> Iterator[None]:
    """In the ``with``: each of our functions is told when it is called; those around a collective are noted."""

    def trace(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.endswith(COLLECTIVES):
            exchanges.update(callers(frame))
        elif event == "call" and is_ours(frame.f_code):
            see(frame.f_code)

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


class Job:
    """A step over DDP 2 that is done as often as one likes."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        torch.manual_seed(0)
        self.inputs = [torch.randn(3 + self.rank, 4), torch.randn(5 - self.rank, 4)]
        self.seen: Callable[[CodeType], None] = lambda code: None
        self.exchanges = set[CodeType]()

    def run(self, phase: str) -> None:
        """A step, of which one phase is traced on rank 1."""
        from megatron_rl_loss import Samples, plan_step, ppo_clip_loss, prove_step

        model = DistributedDataParallel(torch.nn.Linear(4, 1))

        def traces(name: str) -> Any:
            return traced(self.seen, self.exchanges) if name == phase and self.rank == 1 else contextlib.nullcontext()

        def describe() -> list[Samples]:
            return [Samples([torch.ones(len(of))], prompt_ids=[f"{self.rank} {k}"]) for k, of in enumerate(self.inputs)]

        with traces("plan"):
            plan = plan_step(describe, "prompt_mean", dp_group=dist.group.WORLD, gradients="averaged over ranks")
        if phase == "plan":
            return
        proof = prove_step(model, plan)
        with traces("proof"):
            proof.__enter__()
        error: BaseException | None = None
        try:
            for number, (of, microbatch) in enumerate(zip(self.inputs, plan, strict=True)):
                with contextlib.nullcontext() if number else model.no_sync():
                    log_probs = torch.nn.functional.logsigmoid(model(of)[:, 0])
                    policy = ppo_clip_loss(log_probs, log_probs.detach(), torch.ones(len(of)), microbatch)
                    microbatch.loss(policy.per_token_loss).backward()
        except BaseException as caught:
            error = caught
        with traces("proof"):
            proof.__exit__(type(error) if error else None, error, None)
        if error is not None:
            raise error
        with traces("finish"):
            plan.finish()


def outcome(job: Job, phase: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            job.run(phase)
        except Exception as error:
            return f"raised {type(error).__name__}: {error}"
    return out.getvalue()


def every_call(phase: str) -> list[tuple[str, str]]:
    """On a rank: what became of a step with an error in each function of a phase."""
    start_process_group()
    job = Job()
    codes: dict[CodeType, None] = {}
    job.seen = lambda code: codes.update({code: None})
    outcomes = [("nothing", outcome(job, phase))]
    listed = [code for code in codes if code not in job.exchanges]
    names = [f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_qualname}" for code in listed]
    told: list[Any] = [names if job.rank == 1 else None]
    dist.broadcast_object_list(told, src=1)
    for number, name in enumerate(told[0]):
        raised: list[bool] = []

        def plant(code: CodeType, number: int = number, raised: list[bool] = raised) -> None:
            if code is listed[number] and not raised:
                raised.append(True)
                raise Planted(name)  # noqa: B023  # called before the next

        job.seen = plant
        outcomes.append((name, outcome(job, phase)))
        try:
            dist.monitored_barrier(timeout=WAIT)
        except RuntimeError as error:
            raise RuntimeError(f"a rank waits after an error in {name}: {outcomes[-1]}") from error
    return outcomes


@pytest.mark.parametrize("phase", ["plan", "proof", "finish"])
def test_an_error_in_any_function_leaves_no_rank_waiting(phase: str) -> None:
    first, second = run_ranks(2, every_call, phase, timeout_s=300)
    assert not first[0][1].startswith("raised")
    assert len(first) > {"plan": 60, "proof": 60, "finish": 8}[phase]
    for (name, of_first), (_, of_second) in zip(first[1:], second[1:], strict=True):
        if phase == "proof":  # training goes on, or both ranks raise before the step
            assert of_first.startswith("raised") == of_second.startswith("raised"), (name, of_first, of_second)
            assert re.search("^raised|aggregation proved|NOT PROVED", of_first, re.MULTILINE), (name, of_first)
        else:  # an error after the last exchange is one of that rank alone, and no other waits for it
            assert not of_first.startswith("raised") or of_second.startswith("raised"), (name, of_first, of_second)
