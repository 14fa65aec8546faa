"""What is refused of a user's input, and what docs/support.md says is: through the entries that a launch uses.

Flags go through Megatron's real `parse_and_validate_args` and `LossAggregation.from_args`; data through `samples_of`
and `begin_step` on real groups (cp 2 x dp 2, gloo); losses through Megatron's schedule into `microbatch.loss` and
`carry`. For each row: the error's type, what it says was given and what to do, on every rank; that no parameter
changed; and that the row's nearest legal neighbour is accepted. All rows of a kind share one launch of ranks.
"""

import contextlib
import functools
import io
import json
import os
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
from ranks import run_ranks
from refusals import Row, in_three_parts
from repository import ROOT
from step_refusals import CONFIG_ROWS, LOSS_ROWS, STEP_ROWS, Change, Losses, Record, records
from table_step import aggregation, start, table_model
from torch import Tensor

from megatron_rl_loss import Samples

NAN, INF = float("nan"), float("inf")
ACCEPTED = "accepted"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one rank saw of a row."""

    error: str  # type of the exception, or "accepted"
    text: str = ""
    neighbour: str = ACCEPTED  # what became of the legal neighbour
    unchanged: bool = True  # all parameters are bit for bit what they were


def attempt(call: Callable[[], Any]) -> tuple[str, str]:
    """The type and text of what is raised; SystemExit's text is what argparse printed."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            call()
    except SystemExit:
        return "SystemExit", printed.getvalue()
    except Exception as error:
        return type(error).__name__, str(error)
    return ACCEPTED, ""


def outcome_of(call: Callable[[], Any]) -> str:
    error, text = attempt(call)
    return ACCEPTED if error == ACCEPTED else f"{error}: {text}"


# ---- flags


def parsed(
    what: Any, *, registered: bool = True, ignore_unknown: bool = False, world: int = 1, connections: str = "1"
) -> Any:
    """As a launch parses: `what` are flags, or the content of a --yaml-cfg file."""
    import pretrain_grpo
    from megatron.core import num_microbatches_calculator
    from megatron.training import arguments, global_vars

    from megatron_rl_loss.megatron import LossAggregation

    os.environ |= {"WORLD_SIZE": str(world), "CUDA_DEVICE_MAX_CONNECTIONS": connections}
    launch = [*MODEL.split(), *DATA.split(), *TRAINING.split()] if registered else [*MODEL.split(), *TRAINING.split()]
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


def prepare_parsing() -> None:
    """Read YAML files without PyYAML where it is not installed, and --help texts of the dataclasses only once."""
    from megatron.training import argument_utils, yaml_arguments

    if not yaml_arguments.HAVE_YAML:
        yaml_arguments.HAVE_YAML = True
        yaml_arguments.yaml = SimpleNamespace(safe_load=json.load)  # the files here are JSON, which is YAML
    factory = argument_utils.ArgumentGroupFactory
    docstrings, known = factory._get_field_docstrings, {}

    def get_field_docstrings(self: Any, config: type) -> Any:
        if config not in known:
            known[config] = docstrings(self, config)
        return known[config]

    factory._get_field_docstrings = get_field_docstrings


def flag_verdicts() -> dict[str, Verdict]:
    prepare_parsing()
    os.chdir(os.environ["TMPDIR"])
    Path("broken_modes.py").write_text("import a_package_that_is_not_installed\n")
    sys.path.insert(0, os.getcwd())
    found, neighbours = {}, {}
    for row in FLAG_ROWS:
        error, text = attempt(functools.partial(parsed, row.bad, **row.options))
        good = row.options | {"registered": True}
        key = f"{row.good}{good}"
        if key not in neighbours:
            neighbours[key] = outcome_of(functools.partial(parsed, row.good, **good))
        found[row.name] = Verdict(error=error, text=text, neighbour=neighbours[key])
    return found


def on_ranks() -> dict[str, Verdict]:
    """All rows that need groups or a model, on one of four ranks."""
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    state = start(cp=2)
    dp_rank, cp_rank = state.get_data_parallel_rank(), state.get_context_parallel_rank()
    weights = torch.arange(8.0)
    found = {}

    def samples_of(record: Record) -> Any:
        return record["make"]() if "make" in record else Samples(**record)

    def train(model: Any, data: list[Record] | None, settings: dict[str, Any], losses_of: Losses) -> None:
        """A step, and the update that would follow it."""
        seen: list[Any] = []

        def forward_step(iterator: Iterator[Any], chunk: Any) -> Any:
            microbatch = next(iterator)
            number = len(seen)
            seen.append(microbatch)
            losses = chunk(torch.arange(len(microbatch.samples.local(cp_rank, 2))) % 8)
            return losses, lambda losses: losses_of(microbatch, losses, number)

        model.zero_grad_buffer()
        aggregation(samples_of, **settings).wrap_schedule(get_forward_backward_func())(
            forward_step_func=forward_step, data_iterator=None if data is None else iter(data), model=model,
            num_microbatches=2, seq_length=8, micro_batch_size=1,
        )  # fmt: skip
        with torch.no_grad():
            model.module.losses.sub_(model.module.losses.main_grad)

    def verdict(bad: Callable[[], None], model: Any, good: Callable[[], None], sound_model: Any = None) -> Verdict:
        """Refused without a change of a weight; and the neighbour trains, which also shows that a change is seen."""
        error, text = attempt(bad)
        unchanged = torch.equal(model.module.losses, weights)
        sound_model = sound_model or model
        neighbour = outcome_of(good)
        if neighbour == ACCEPTED and torch.equal(sound_model.module.losses, weights):
            neighbour = "nothing was trained"
        with torch.no_grad():
            sound_model.module.losses.copy_(weights)
        return Verdict(error=error, text=text, neighbour=neighbour, unchanged=unchanged)

    def right(microbatch: Any, losses: Tensor, number: int) -> Any:
        return microbatch.loss(losses)

    def data_of(change: Change | None) -> Any:
        return records(dp_rank) if change is None else change(records(dp_rank), dp_rank, cp_rank)

    model = table_model(weights.tolist())
    for row in STEP_ROWS:
        bad = functools.partial(train, model, data_of(row.bad), row.options, right)
        good = functools.partial(train, model, data_of(row.good), row.options, right)
        found[row.name] = verdict(bad, model, good)

    class LikeTorchFSDP2(_BaseDataParallel):  # type: ignore[misc]
        """Torch FSDP2's wrapper needs a GPU; like it, this one leaves `scale_gradients` undone."""

        def zero_grad_buffer(self) -> None: ...

    for row in CONFIG_ROWS:
        changed = table_model(weights.tolist(), per_token=row.bad.get("calculate_per_token_loss", False))
        if "average_in_collective" in row.bad:
            changed.ddp_config.average_in_collective = True
        if "wrapper" in row.bad:
            changed = LikeTorchFSDP2(changed.config, changed.module)
        for name, value in row.bad.items():
            if name not in ("wrapper", "average_in_collective"):
                setattr(changed.config, name, value)
        bad = functools.partial(train, changed, data_of(None), row.options, right)
        good = functools.partial(train, model, data_of(None), row.options, right)
        found[row.name] = verdict(bad, changed, good, model)

    for row in LOSS_ROWS:
        bad = functools.partial(train, model, data_of(None), {"mode": "token_mean"}, row.bad)
        good = functools.partial(train, model, data_of(None), {"mode": "token_mean"}, row.good or right)
        found[row.name] = verdict(bad, model, good)
    return found


# ---- the tests

GROUPS = {"flags": (1, flag_verdicts), "ranks": (4, on_ranks)}
LAUNCHED = [("flags", row) for row in FLAG_ROWS] + [("ranks", row) for row in (*STEP_ROWS, *CONFIG_ROWS, *LOSS_ROWS)]
ROWS = [row for _, row in LAUNCHED]


@functools.cache
def verdicts(group: str) -> list[dict[str, Verdict]]:
    world_size, function = GROUPS[group]
    return run_ranks(world_size, function, timeout_s=600)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("launch")))


def check(row: Row, seen: list[Verdict]) -> None:
    for verdict in seen:
        assert verdict.error == row.error, verdict.text
        assert row.given in verdict.text
        if row.styled:
            assert in_three_parts(verdict.text, row), verdict.text
        assert verdict.unchanged, "a parameter changed"
        assert verdict.neighbour == ACCEPTED


@pytest.mark.parametrize(("group", "row"), [pytest.param(*pair, id=pair[1].name) for pair in LAUNCHED])
def test_refused_in_a_launch(
    group: str, row: Row, folder: None, record_property: Callable[[str, object], None]
) -> None:
    check(row, [rank[row.name] for rank in verdicts(group)])
    record_property("bad_inputs_refused", 1)


def refused_phrases() -> list[str]:
    """The phrases of the table of refusals in docs/support.md."""
    page = (ROOT / "docs/support.md").read_text()
    section = page.split("## What is refused\n")[1].split("\n## ")[0]
    cells = [line.split("|")[2] for line in section.splitlines() if line.startswith("|")][2:]
    return [phrase.strip() for cell in cells for phrase in cell.split(";")]


def test_every_refusal_of_the_page_has_a_row() -> None:
    phrases = refused_phrases()
    assert len(phrases) >= 20
    covers = {row.covers for row in ROWS} - {""}
    assert [phrase for phrase in phrases if not any(part in phrase for part in covers)] == []
    assert [part for part in covers if not any(part in phrase for phrase in phrases)] == []
