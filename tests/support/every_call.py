"""An error in any function of this package, on one rank of two: no rank waits for another in a plan, proof or finish.

The functions are those that a right step calls on that rank, found by tracing it; each raises once, at its first call.
Left out are the collectives themselves, whose own errors `test_proof_failures` plants, and functions that call one: an
error at their first line is one of whoever calls them.
"""

import contextlib
import datetime
import inspect
import io
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch.distributed as dist
from ranks import run_ranks, start_process_group

import megatron_rl_loss

PACKAGE = str(Path(megatron_rl_loss.__file__).parent)
#: Files of collectives, in which an error is one of a collective.
COLLECTIVES = ("core/collectives.py", "core/transfers.py", "proof/exchange.py", "proof/leaving.py")
#: What says through whom other ranks can be told: the model and the plan with its groups, the claim, the context of the
#: step; and what raises itself where a step is wrong.
NEEDED = (
    "FirstStep._tell", "chunks_of", "StepRecord.groups", "check_plan", "LossModes.describe", "FirstStep.__init__",
    "observe", "expected_aggregation", "observed_taps",
    "TorchGradients._add_parts",  # which exchanges where parameters are cut
)  # fmt: skip
WAIT = datetime.timedelta(seconds=20)


class Planted(Exception):
    pass


def is_ours(code: CodeType) -> bool:
    name = code.co_filename
    is_function = bool(code.co_flags & inspect.CO_OPTIMIZED) and not code.co_name.startswith("<")  # no body of a class
    is_local = not name.endswith(COLLECTIVES) and code.co_qualname not in NEEDED
    return name.startswith(PACKAGE) and is_function and is_local


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
    """A step over two data-parallel ranks, done as often as one likes, of which one phase is traced on rank 1."""

    def __init__(self, phase: str) -> None:
        self.phase, self.rank = phase, dist.get_rank()
        self.seen: Callable[[CodeType], None] = lambda code: None
        self.exchanges = set[CodeType]()

    def traces(self, phase: str) -> Any:
        is_traced = phase == self.phase and self.rank == 1
        return traced(self.seen, self.exchanges) if is_traced else contextlib.nullcontext()

    def plan(self) -> Any:
        raise NotImplementedError

    def train(self, plan: Any) -> None:
        """Forward and backward passes of the step."""
        raise NotImplementedError

    def run(self) -> None:
        from megatron_rl_loss import prove_step

        with self.traces("plan"):
            plan = self.plan()
        if self.phase == "plan":
            return
        proof = prove_step(self.model(), plan)
        with self.traces("proof"):
            proof.__enter__()
        error: BaseException | None = None
        try:
            self.train(plan)
        except BaseException as caught:
            error = caught
        with self.traces("proof"):
            proof.__exit__(type(error) if error else None, error, None)
        if error is not None:
            raise error
        with self.traces("finish"):
            plan.finish()

    def model(self) -> Any:
        """Of this step, which is proved as the first one."""
        raise NotImplementedError


def outcome(job: Job) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            job.run()
        except Exception as error:
            return f"raised {type(error).__name__}: {error}"
    return out.getvalue()


def every_call(make: Callable[[str], Job], phase: str) -> list[tuple[str, str]]:
    """On a rank: what became of a step with an error in each function of a phase."""
    start_process_group()
    job = make(phase)
    codes: dict[CodeType, None] = {}
    job.seen = lambda code: codes.update({code: None})
    outcomes = [("nothing", outcome(job))]
    listed = [code for code in codes if code not in job.exchanges]
    names = [f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_qualname}" for code in listed]
    told: list[Any] = [names if job.rank == 1 else None]
    dist.broadcast_object_list(told, src=1)
    missed = list[str]()
    for number, name in enumerate(told[0]):
        raised: list[bool] = []

        def plant(code: CodeType, number: int = number, raised: list[bool] = raised) -> None:
            if code is listed[number] and not raised:
                raised.append(True)
                raise Planted(name)  # noqa: B023  # called before the next

        job.seen = plant
        outcomes.append((name, outcome(job)))
        if job.rank == 1 and not raised:
            missed.append(name)
        try:
            dist.monitored_barrier(timeout=WAIT)
        except RuntimeError as error:
            raise RuntimeError(f"a rank waits after an error in {name}: {outcomes[-1]}") from error
    if missed:
        raise AssertionError(f"functions that the first step called, and a later one did not: {missed}")
    return outcomes


def check_every_call(make: Callable[[str], Job], phase: str, least: int) -> None:
    """No rank waits after an error in any of at least so many functions; and what both then do."""
    first, second = run_ranks(2, every_call, make, phase, timeout_s=300)
    assert not first[0][1].startswith("raised")
    assert len(first) > least
    for (name, of_first), (_, of_second) in zip(first[1:], second[1:], strict=True):
        if phase == "proof":  # training goes on, or both ranks raise before the step
            assert of_first.startswith("raised") == of_second.startswith("raised"), (name, of_first, of_second)
            assert re.search("^raised|aggregation proved|NOT PROVED", of_first, re.MULTILINE), (name, of_first)
        else:  # an error after the last exchange is one of that rank alone, and no other waits for it
            assert not of_first.startswith("raised") or of_second.startswith("raised"), (name, of_first, of_second)
