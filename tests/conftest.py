"""Every test runs on the CPU, one thread a process, whatever the machine has. The summary counts what was shown.

With pytest-xdist and ``-n auto --dist loadfile`` (tools/test.sh), files are shared out among workers: the tests of a
file run in one process and in their order, since they share launches.

With ``TEST_DEVICE=cuda`` the tests marked `gpus` run instead, on the machine's GPUs and over NCCL (see `ranks`).
"""

import gc
import importlib.util
import logging
import os
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ON_GPUS = os.environ.get("TEST_DEVICE") == "cuda"
if not ON_GPUS:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHDYNAMO_DISABLE"] = "1"
gc.disable()  # until all is imported: collections while torch and Megatron are cost a fifth of it
# pytest puts this folder on the path, where `megatron` would become a part of the namespace package of that name.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent.resolve()]


def pytest_addoption(parser: pytest.Parser) -> None:
    if importlib.util.find_spec("pytest_timeout") is None:  # where torch, NumPy, pytest and hypothesis are all there is
        parser.addini("timeout", "seconds a test may take; without pytest-timeout any")


def pytest_configure(config: pytest.Config) -> None:
    if not is_worker(config):
        import fork_server

        fork_server.start()
        config.add_cleanup(fork_server.stop)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A worker a core, at most four, each of which imports Megatron. None for one file, nor on GPUs."""
    files = {argument.split("::")[0] for argument in config.args}
    if ON_GPUS or (len(files) == 1 and files.pop().endswith(".py")):
        return 0
    return min(4, len(os.sched_getaffinity(0)))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of slow tests alone is not imported where slow tests are deselected."""
    if config.option.markexpr != "not slow" or not collection_path.is_file():
        return None
    return "\npytestmark = pytest.mark.slow" in collection_path.read_text(errors="replace") or None


@pytest.hookimpl(trylast=True)  # of those that are left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if ON_GPUS:
        config.hook.pytest_deselected(items=[item for item in items if "gpus" not in item.keywords])
        items[:] = [item for item in items if "gpus" in item.keywords]
    items.sort(key=forks_ranks)  # last: by then, what they are forked from has imported Megatron
    if is_worker(config):  # files are dealt in this order: the long ones first, so that all workers end together
        long = {item.path for item in items if "slow" in item.keywords}
        items.sort(key=lambda item: item.path not in long)


def is_worker(config: pytest.Config) -> bool:
    """True in a worker of pytest-xdist."""
    return hasattr(config, "workerinput")


def forks_ranks(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and hasattr(item.module, "run_ranks")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start what takes a while beside the first tests: what ranks are forked from, and modules' own processes."""
    if session.config.option.collectonly:
        return
    if any(map(forks_ranks, session.items)):
        sys.modules["ranks"].warm_up()
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True  # or pytest visits each of torch's that does not, in each phase of a test
    gc.freeze()  # what was imported is here to stay: no collection goes through it
    gc.enable()
    if is_worker(session.config):  # which does not know what modules it will get
        return
    for module in {item.module for item in session.items if isinstance(item, pytest.Function)}:
        getattr(module, "start_early", lambda: None)()


@pytest.fixture(autouse=True)
def modes_end_with_their_test() -> Iterator[None]:
    """A mode that a test registers, or a module that it is the first to import, is not there for other tests."""
    from megatron_rl_loss.core import modes

    known = dict(modes._MODES)
    yield
    modes._MODES.clear()
    modes._MODES.update(known)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make plain numbers of what a test recorded: NumPy's do not travel from pytest-xdist's workers."""
    report = yield
    recorded: list[tuple[str, Any]] = report.user_properties
    report.user_properties = [
        (name, value if name in ("engine", "plant") else float(value)) for name, value in recorded
    ]
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Add up what tests recorded with `record_property`: numbers of cases, and the worst of errors."""
    recorded: dict[str, list[float]] = defaultdict(list)
    engines: dict[tuple[str, ...], list[Sequence[float | None]]] = defaultdict(list)
    plants: list[tuple[str, str, str]] = []
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties if report.when == "call" else ():
            if name == "engine":
                engines[tuple(value[:3])].append(value[3:])
            elif name == "plant":
                plants.append(tuple(value))
            else:
                recorded[name].append(value)
    if engines:  # see `checkouts.record_errors`
        terminalreporter.write_line("| engine | version | setting | its own error | with ours |\n|---|---|---|---|---|")
    for place, pairs in sorted(engines.items()):
        known = [[error for error in errors if error is not None] for errors in zip(*pairs, strict=True)]
        worst = [f"{max(errors):.2g}" if errors else "-" for errors in known]
        terminalreporter.write_line(f"| {' | '.join([*place, *worst])} |")
    if plants:  # see `plants.record_plant`
        terminalreporter.write_line("| engine | fault planted in its code | outcome |\n|---|---|---|")
    for plant in sorted(plants):
        terminalreporter.write_line(f"| {' | '.join(plant)} |")
    for name, values in sorted(recorded.items()):
        is_bound = "error" in name or "seconds" in name
        total = f"at most {max(values):.2g}" if is_bound else f"{sum(values):g}"
        terminalreporter.write_line(f"{name.replace('_', ' ')}: {total} (in {len(values)} tests)")
