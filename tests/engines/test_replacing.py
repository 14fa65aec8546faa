"""Functions replaced in plain modules, classes and objects."""

import pickle
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_rl_loss.engines import replacing
from megatron_rl_loss.engines.replacing import Function, Replaced, active, announce


@pytest.fixture(autouse=True)
def nothing_active(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacing, "_REGISTRY", {})


def doubled(stock: Callable[[], float], arguments: dict[str, Any]) -> float:
    arguments["loss"] *= 2
    return stock() + 0.5


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module `home` with `scale`, and others that took it: by name, by another name, to keep; one function of it."""

    def scale(loss: float, *, by: float = 1.0) -> float:
        return loss * by

    modules = {name: ModuleType(f"engine.{name}") for name in ("home", "by_name", "renamed", "trainer", "other")}
    for module in modules.values():
        monkeypatch.setitem(sys.modules, module.__name__, module)
    modules["home"].scale = modules["by_name"].scale = modules["renamed"]._s = modules["trainer"].scale = scale  # type: ignore[attr-defined]
    modules["other"].scale = lambda loss: -loss  # type: ignore[attr-defined]
    return SimpleNamespace(**modules, stock=scale)


def replace(owner: Any, name: str = "scale", *parameters: str, **how: Any) -> Replaced:
    return Replaced("Engine", "1.0 or 1.1", [Function(owner, name, parameters or ("loss",), doubled, **how)])


def test_what_is_sent_to_a_worker_is_what_the_worker_replaced(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """RLinf sends methods of the class by value, and with them what they replaced in the driver."""
    replaced = replace(engine.home)
    replaced._all = []  # lambdas of this file, which only cloudpickle can send
    sent = pickle.dumps(replaced)
    assert pickle.loads(sent) is replaced
    monkeypatch.setattr(replacing, "_REGISTRY", {})
    elsewhere = pickle.loads(sent)
    assert elsewhere is not replaced
    assert elsewhere.engine == "Engine"


class Ray:
    """What a process asks Ray about itself."""

    def __init__(self, actor: str | None) -> None:
        self.actor = actor

    def is_initialized(self) -> bool:
        return self.actor is not None

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_actor_id=lambda: self.actor)


@pytest.mark.parametrize(
    ("ray", "rank", "process", "after"),
    [
        (None, None, "worker 0", ""),
        (Ray(None), None, "driver", "; each worker prints a line of its own"),
        (Ray(""), None, "driver", "; each worker prints a line of its own"),
        (Ray("an actor"), None, "worker 0", ""),
        (Ray(None), "0", "worker 0", ""),
    ],
)
def test_a_line_says_of_which_process_it_speaks(
    ray: Any, rank: str | None, process: str, after: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A driver replaces functions that its workers never call."""
    monkeypatch.setattr(replacing, "_REGISTRY", {})
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    announce("Engine: replaced a: b")
    assert capsys.readouterr().out == f"megatron_rl_loss in Engine {process}: replaced a: b{after}\n"


def test_replaced_wherever_it_is_and_put_back(engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    replaced = replace(engine.home, also_in=lambda module: module not in ("engine.trainer", __name__))
    assert engine.home.scale is engine.by_name.scale is engine.renamed._s
    assert engine.home.scale(3, by=10) == engine.renamed._s(loss=3, by=10) == 60.5
    assert (engine.trainer.scale(3), engine.other.scale(3)) == (3, -3)
    line = "Engine: replaced engine.by_name.scale, engine.home.scale, engine.renamed._s"
    assert active() == [line]
    assert capsys.readouterr().out == f"megatron_rl_loss in {line.replace(': ', ' worker 0: ', 1)}\n"

    engine.other.late = engine.stock
    engine.other.ours = engine.home.scale
    replaced.put_everywhere()
    assert engine.other.late(3) == 6.5
    replaced.undo()
    assert active() == []
    holders = (engine.home.scale, engine.by_name.scale, engine.renamed._s, engine.other.late, engine.other.ours)
    assert all(function is engine.stock for function in holders)


def test_what_was_undone_is_replaced_again(engine: Any) -> None:
    """An adapter keeps its `Replaced` under a key of its own, too."""
    first = replacing.once("key", lambda: replace(engine.home))
    assert (active(), replacing.once("key", lambda: replace(engine.home))) == ([str(first)], first)
    first.undo()
    assert active() == []
    assert replacing.once("key", lambda: replace(engine.home)) is not first
    assert engine.home.scale(3) == 6.5


def test_one_module_alone_by_default(engine: Any) -> None:
    replaced = replace(engine.home)
    assert (engine.home.scale(3), engine.by_name.scale(3)) == (6.5, 3)
    replaced.undo()


class Trainer:
    def step(self, loss: float) -> float:
        return loss + 1

    @classmethod
    def describe(cls, loss: float) -> str:
        return f"{cls.__name__} {loss}"


class Actor(Trainer):
    pass


class Overriding(Trainer):
    def step(self, loss: float) -> float:
        return super().step(loss)


def test_methods_of_a_class_and_of_one_object() -> None:
    replaced = replace(Actor, "step", "self", "loss")
    assert (Actor().step(3), Trainer().step(3)) == (7.5, 4)
    assert active() == ["Engine: replaced Actor.step"]
    replaced.undo()
    assert "step" not in vars(Actor)
    trainer = Trainer()
    replaced = replace(trainer, "step")
    assert (trainer.step(3), Trainer().step(3)) == (7.5, 4)
    replaced.undo()
    assert vars(trainer) == {}
    raw = vars(Trainer)["describe"]
    replaced = Replaced("Engine", "1.0", [Function(Trainer, "describe", ["loss"], lambda stock, arguments: stock())])
    assert Trainer.describe(2) == "Trainer 2"
    replaced.undo()
    assert vars(Trainer)["describe"] is raw


@pytest.mark.parametrize(("first", "second"), [(Trainer, Trainer), (Trainer, Actor), (Trainer, Overriding)])
def test_twice_is_refused(first: Any, second: Any) -> None:
    """A subclass, which overrides the method or not, a base class and an object are refused too, until `undo`."""
    replaced = replace(first, "step")
    for owner in (second, second()):
        with pytest.raises(ValueError, match=r"\.step, which has a loss aggregation already"):
            replace(owner, "step")
    assert active() == ["Engine: replaced Trainer.step"]
    replaced.undo()
    replaced = replace(second, "step")
    with pytest.raises(ValueError, match=rf"{second.__name__}\.step, which has a loss aggregation already"):
        replace(first, "step")
    replaced.undo()
    replace(first, "step").undo()


def test_another_version_is_refused_and_nothing_replaced(engine: Any) -> None:
    known = Function(engine.home, "scale", ["loss"], doubled)
    with pytest.raises(ValueError, match=r"^Engine with no engine\.home\.gone\(\): .* gone\(a\)\. Use Engine 1\.0\.$"):
        Replaced("Engine", "1.0", [known, Function(engine.home, "gone", ["a"], doubled)])
    with pytest.raises(ValueError, match=r"^Engine with engine\.home\.scale\(loss, by\): .* scale\(loss, masks\)\."):
        Replaced("Engine", "1.0", [known, Function(engine.home, "scale", ["loss", "masks"], doubled)])
    assert engine.home.scale is engine.stock
    assert active() == []
