"""What an engine's script hands to `uv`, by which it starts Python: another `uv`, which prints its arguments."""

import os
import subprocess
from pathlib import Path


def words_of_uv(bash: list[str], folder: Path, root: str | None = None) -> list[str]:
    """Of bash with these arguments, in a checkout; the `uv` is put into the folder."""
    uv = folder / "uv"
    uv.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    uv.chmod(0o755)
    variables = {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder)}
    ran = subprocess.run(["bash", *bash], capture_output=True, text=True, check=True, env=variables, cwd=root)
    return ran.stdout.rstrip("\0").split("\0")
