"""A script as it is launched, on ranks that are forked: torchrun's are processes that import torch and Megatron anew.

A process of its own shows that a script imports all it needs, in its order, and finds the files copied with it. See
tests/examples/test_pretrain_recipes.py, tests/megatron/test_example.py and tests/package/test_example_command.py.
"""

import contextlib
import io
import os
import runpy
import sys
from pathlib import Path


def printed_by(folder: Path, *words: str) -> str:
    """On a rank: what ``python WORDS`` prints in the folder."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    is_module = words[0] == "-m"
    sys.argv = [*words[is_module:]]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            (runpy.run_module if is_module else runpy.run_path)(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise RuntimeError(printed.getvalue()) from end
    return printed.getvalue()
