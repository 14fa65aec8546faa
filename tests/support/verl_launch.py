"""A launch of verl by its own example script, with the lines of our recipe, up to verl's trainer.

Real: the script, verl's Hydra config and `main`. Replaced: `uv`, by which the script starts Python.
"""

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

from checkouts import VERL
from repository import EXAMPLES
from uv_here import words_of_uv

#: What a launch without a GPU, a sampler, data and checkpoints does not use.
_NOT_USED: tuple[str, ...] = ("transformers", "datasets", "orjson", "pandas", "peft", "pyarrow", "accelerate")
_NOT_USED += ("uvicorn", "fastapi", "verl.checkpoint_engine", "verl.workers.rollout", "verl.trainer.ppo.reward")
_NOT_USED += tuple(f"verl.experimental.{name}_loop" for name in ("agent", "reward", "teacher"))
#: With verl's own `__init__`, which is what reads `VERL_USE_EXTERNAL_MODULES`.
ENGINE = dataclasses.replace(VERL, passed_by=(), stand_ins=_NOT_USED)


RECIPE = (EXAMPLES / "recipes" / "verl.sh").read_text()


def overrides_of(command: str, root: str, folder: Path) -> list[str]:
    """What verl's script hands to Hydra, of a shell's command in verl's checkout."""
    words = words_of_uv(["-ec", command], folder, root)
    module = words.index("verl.trainer.main_ppo")
    assert words[module - 2 : module] == ["python3", "-m"]
    return words[module + 1 :]


def main(overrides: list[str], runner: Any) -> None:
    """verl's own `main`, whose task is `runner`: what verl makes a Ray actor of, by `remote()`, and runs."""
    main_ppo = importlib.import_module("verl.trainer.main_ppo")
    vars(main_ppo)["TaskRunnerV1"] = runner
    no_files = ("hydra.output_subdir=null", "hydra.run.dir=.", "hydra/job_logging=none", "hydra/hydra_logging=none")
    sys.argv = ["main_ppo", *overrides, *no_files]
    main_ppo.main()
