"""A line of progress: on a terminal alone, after some seconds, and gone at the end."""

import io
import sys
import time

import pytest

from megatron_rl_loss.audit.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown_on(stderr: io.StringIO, seconds: float, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is written of four parts that take these seconds each."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", stderr)
    with Progress("a check", 4) as progress:
        for _ in range(4):
            now[0] += seconds
            progress.advance()
    return stderr.getvalue().split("\r")[1:]


def test_the_line_says_how_far_it_is_and_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    *lines, last = shown_on(Terminal(), 3.0, monkeypatch)
    texts = [line.removesuffix("\x1b[K") for line in lines]
    assert texts == [f"a check: {share} %, {left} s left" for share, left in ((25, 9), (50, 6), (75, 3), (100, 0))]
    assert last == "\x1b[K"  # an empty line


def test_nothing_is_written_to_a_file_or_of_a_short_check(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown_on(io.StringIO(), 3.0, monkeypatch) == []
    assert shown_on(Terminal(), 0.4, monkeypatch) == []
    monkeypatch.setattr(sys, "stderr", None)  # closed by a shell
    with Progress("a check", 1) as progress:
        progress.advance()


def test_the_line_disappears_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    now, terminal = [0.0], Terminal()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", terminal)

    def fail() -> None:
        with Progress("a check", 2) as progress:
            now[0] = 5.0
            progress.advance()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert terminal.getvalue().endswith("\r\x1b[K")
