"""A fresh interpreter."""

import subprocess
import sys

from repository import ROOT


def begin(code: str) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True, cwd=ROOT)


def finish(process: "subprocess.Popen[str]") -> "subprocess.CompletedProcess[str]":
    out, error = process.communicate(timeout=600)
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)
