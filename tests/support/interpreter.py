"""A fresh interpreter."""

import subprocess
import sys

from repository import ROOT


def python(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, cwd=ROOT)


def run_code(code: str) -> "subprocess.CompletedProcess[str]":
    return python("-c", code)
