"""A fresh interpreter."""

import subprocess
import sys

from repository import ROOT


def run_code(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
