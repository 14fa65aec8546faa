"""Refusals of a user's input, and those that docs/support.md states: through the entries that a launch uses.

Flags go through Megatron's real `parse_and_validate_args` and `LossAggregation.from_args`; data through `samples_of`
and `begin_step` on real groups (cp 2 x dp 2, gloo); losses through Megatron's schedule into `microbatch.loss`.
For each row: the error's type, what it says was given and what to do, on every rank; that no
parameter changed; and that the row's nearest legal neighbour is accepted. All rows of a kind share one launch of ranks.
"""

import functools
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from example_run import DATA, MODEL, TRAINING
from flag_refusals import FLAG_ROWS
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from ranks import run_ranks
from refusals import Row, in_three_parts, outcome_of
from repository import ROOT
from step_refusals import CONFIG_ROWS, HANDED_OUT, LOSS_ROWS, STEP_ROWS, Change, Losses, Record, records
from table_step import aggregation, run_schedule, start, table_model
from torch import Tensor

from megatron_rl_loss import Samples

pytestmark = pytest.mark.slow

ACCEPTED = "accepted"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One rank's outcomes of a row: those of its call and of its legal neighbour."""

    outcome: str
    neighbour: str
    unchanged: bool = True  # all parameters are bit for bit what they were


# ---- flags


def parsed(
    what: Any, *, registered: bool = True, ignore_unknown: bool = False, world: int = 1, connections: str = "1"
) -> Any:
    """Args as a launch parses them: `what` are flags, or the content of a --yaml-cfg file."""
    import pretrain_grpo
    from megatron.core import num_microbatches_calculator
    from megatron.training import arguments, global_vars

    from megatron_rl_loss import LossAggregation

    os.environ |= {"WORLD_SIZE": str(world), "CUDA_DEVICE_MAX_CONNECTIONS": connections}
    launch = shlex.split(f"{MODEL} {DATA if registered else ''} {TRAINING}")
    provider = pretrain_grpo.add_args if registered else None
    if isinstance(what, dict):
        Path("run.yaml").write_text(json.dumps(what))  # JSON is YAML
        sys.argv = ["pretrain_mine.py", *launch, "--yaml-cfg", "run.yaml"]
        # `validate_yaml` then wants a hundred further keys, none of which is ours.
        args = arguments.parse_args(provider)
    else:
        if not registered:
            launch += ["--micro-batch-size", "1", "--seq-length", "64", "--max-position-embeddings", "64"]
        sys.argv = ["pretrain_mine.py", *launch, *what.split()]
        num_microbatches_calculator.destroy_num_microbatches_calculator()
        global_vars.destroy_global_vars()
        args = arguments.parse_and_validate_args(provider, ignore_unknown_args=ignore_unknown)
    return LossAggregation.from_args(args, lambda batch: batch)


def read_yaml() -> None:
    """A stand-in for PyYAML where it is not installed: the files here are JSON, which is YAML."""
    from megatron.training import yaml_arguments

    if not yaml_arguments.HAVE_YAML:
        yaml_arguments.HAVE_YAML = True
        yaml_arguments.yaml = SimpleNamespace(safe_load=json.load)


def flag_verdicts() -> dict[str, Verdict]:
    read_yaml()
    os.chdir(os.environ["TMPDIR"])
    Path("broken_modes.py").write_text("import a_package_that_is_not_installed\n")
    sys.path.insert(0, os.getcwd())
    neighbour = functools.cache(lambda good, **options: outcome_of(lambda: parsed(json.loads(good), **options)))
    return {
        row.name: Verdict(
            outcome=outcome_of(functools.partial(parsed, row.bad, **row.options)),
            neighbour=neighbour(json.dumps(row.good), **row.options | {"registered": True}),
        )
        for row in FLAG_ROWS
    }


class LikeTorchFSDP2(_BaseDataParallel):  # type: ignore[misc]
    """Torch FSDP2's wrapper needs a GPU; like it, this one leaves `scale_gradients` undone."""

    def zero_grad_buffer(self) -> None: ...


def on_ranks() -> dict[str, Verdict]:
    """All rows that need groups or a model, on one of four ranks."""
    state = start(cp=2)
    dp_rank, cp_rank = state.get_data_parallel_rank(), state.get_context_parallel_rank()
    weights = torch.arange(8.0)
    verdicts = {}

    def samples_of(record: Record) -> Any:
        return record["make"]() if "make" in record else Samples(**record)

    def train(
        model: Any, data: Any, losses_of: Losses, settings: dict[str, Any], takes: int = 1, forward_only: bool = False
    ) -> None:
        """A step, and the update that would follow it."""
        seen: list[Any] = []

        def forward_step(iterator: Iterator[Any], chunk: Any) -> Any:
            microbatch = [next(iterator) for _ in range(takes)][-1]
            number = len(seen)
            seen.append(microbatch)
            losses = chunk(torch.arange(len(microbatch.samples.local(cp_rank, 2))) % 8)
            return losses, lambda losses: losses_of(microbatch, losses, number)

        wrap = aggregation(samples_of, **settings).wrap_schedule
        iterator = None if data is None else iter(data)
        run_schedule(forward_step, iterator, model, 2, wrap, forward_only=forward_only)
        with torch.no_grad():
            model.module.losses.sub_(model.module.losses.main_grad)

    def verdict(bad: Callable[[], None], model: Any, good: Callable[[], None], sound_model: Any) -> Verdict:
        """Refused without a change of a weight; and the neighbour trains, which also shows that a change is seen."""
        outcome = outcome_of(bad)
        unchanged = torch.equal(model.module.losses, weights)
        neighbour = outcome_of(good)
        if neighbour == ACCEPTED and torch.equal(sound_model.module.losses, weights):
            neighbour = "nothing was trained"
        with torch.no_grad():
            sound_model.module.losses.copy_(weights)
        return Verdict(outcome=outcome, neighbour=neighbour, unchanged=unchanged)

    def right(microbatch: Any, losses: Tensor, number: int) -> Any:
        return microbatch.loss(losses)

    def with_kl(microbatch: Any, losses: Tensor, number: int) -> Any:
        return microbatch.loss({"pg": losses, "kl": losses})

    def data_of(change: Change | None = None) -> Any:
        return records(dp_rank) if change is None else change(records(dp_rank), dp_rank, cp_rank)

    models = [table_model(weights.tolist(), per_token=per_token) for per_token in (False, True)]
    model = models[0]
    for row in STEP_ROWS:
        row_loss = with_kl if "terms" in row.options else right
        bad, good = (
            functools.partial(train, model, data_of(change), row_loss, row.options) for change in (row.bad, row.good)
        )
        verdicts[row.name] = verdict(bad, model, good, model)
    for row in CONFIG_ROWS:
        changed = table_model(weights.tolist(), per_token=row.bad.get("calculate_per_token_loss", False))
        if "average_in_collective" in row.bad:
            changed.ddp_config.average_in_collective = True
        if "wrapper" in row.bad:
            changed = LikeTorchFSDP2(changed.config, changed.module)
        for name, value in row.bad.items():
            if name not in ("wrapper", "average_in_collective"):
                setattr(changed.config, name, value)
        bad, good = (
            functools.partial(train, own_model, data_of(), right, row.options) for own_model in (changed, model)
        )
        verdicts[row.name] = verdict(bad, changed, good, model)
    for number, row in enumerate(LOSS_ROWS):
        carrier_model, settings = models[number % 2], {"mode": "token_mean"}
        bad = functools.partial(train, carrier_model, data_of(), row.bad, settings, **row.options)
        good = functools.partial(train, carrier_model, data_of(), row.good or right, settings)
        verdicts[row.name] = verdict(bad, carrier_model, good, carrier_model)
        if row.covers == HANDED_OUT:
            evaluated = outcome_of(functools.partial(bad, forward_only=True))
            assert evaluated == verdicts[row.name].outcome, evaluated
    return verdicts


# ---- the tests

GROUPS = {"flags": (1, flag_verdicts), "ranks": (4, on_ranks)}
LAUNCHED = [("flags", row) for row in FLAG_ROWS] + [("ranks", row) for row in (*STEP_ROWS, *CONFIG_ROWS, *LOSS_ROWS)]


@functools.cache
def verdicts(group: str) -> list[dict[str, Verdict]]:
    world_size, function = GROUPS[group]
    return run_ranks(world_size, function, timeout_s=600)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("launch")))


@pytest.mark.parametrize(("group", "row"), [pytest.param(*pair, id=pair[1].name) for pair in LAUNCHED])
def test_refused_in_a_launch(
    group: str, row: Row, folder: None, record_property: Callable[[str, object], None]
) -> None:
    for verdict in (rank[row.name] for rank in verdicts(group)):
        error, _, text = verdict.outcome.partition(": ")
        assert error == row.error, verdict
        assert row.value in text
        if row.styled:
            assert in_three_parts(text, row), text
        assert verdict.unchanged, "a parameter changed"
        assert verdict.neighbour == ACCEPTED
    record_property("bad_inputs_refused", 1)


def test_every_configuration_of_the_page_has_a_row() -> None:
    section = (ROOT / "docs/support.md").read_text().split("## What is refused\n")[1].split("\n## ")[0]
    phrases = re.findall(r"^- (.*)$", section.partition("These configurations are refused:")[2], flags=re.MULTILINE)
    covers = {row.covers for _, row in LAUNCHED} - {""}
    assert len(phrases) > 6
    assert [phrase for phrase in phrases if not any(part in phrase for part in covers)] == []
