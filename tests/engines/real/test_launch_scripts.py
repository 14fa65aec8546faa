"""slime's and miles's own launch scripts with the lines of our page: SLIME_PATH=~/slime, MILES_PATH=~/miles.

Real: the scripts, up to `ray job submit`. Replaced: Ray's command, and in slime's script what ends other processes; in
miles's the shell, the download of a model, and typer, which reads the options.
"""

import importlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkouts import MILES, SLIME, checkout, stand_in
from ranks import run_ranks
from repository import EXAMPLES, ROOT

pytestmark = pytest.mark.slow

RECIPES = EXAMPLES / "recipes"
FLAGS = ("--custom-pg-loss-reducer-function-path", "--custom-megatron-init-path")


def submitted(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The runtime environment's variables and the command of a `ray job submit`."""
    (environment,) = (word.split("=", 1)[1] for word in words if word.startswith("--runtime-env-json="))
    return json.loads(environment)["env_vars"], words[words.index("--") + 1 :]


def test_slimes_script_with_the_recipe_below_its_array(tmp_path: Path) -> None:
    scripts = Path(checkout(SLIME), "scripts")
    shutil.copytree(scripts / "models", tmp_path / "models")
    text = re.sub(r"(?m)^(pkill|sleep) .*\n", "", (scripts / "run-qwen3-4B.sh").read_text())
    recipe = (RECIPES / "slime.sh").read_text()
    text, places = re.subn(r"(?ms)^GRPO_ARGS=\(.*?^\)\n", lambda array: array[0] + recipe, text)
    assert places == 1
    assert text.count("/root/Megatron-LM/") == 1
    script = tmp_path / "run.sh"
    script.write_text(text.replace("/root/Megatron-LM/", f"/root/Megatron-LM/:{ROOT}"))
    ray = tmp_path / "ray"
    ray.write_text('#!/bin/sh\n[ "$1" = job ] && printf "%s\\0" "$@"\nexit 0\n')
    ray.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NUM_GPUS": "8"}
    printed = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=True, env=variables).stdout
    submit = printed[printed.index("job\0submit\0") :].rstrip("\0").split("\0")
    environment, command = submitted(submit)
    assert command[:2] == ["python3", "train.py"]
    assert str(ROOT) in environment["PYTHONPATH"].split(":")
    assert [command[command.index(flag) + 1].rpartition(".")[2] for flag in FLAGS] == ["sample_mean", "count_steps"]


def submit_by_miles(root: str, arguments: str) -> list[str]:
    """What miles's script submits with these `--extra-args`."""
    stand_in(replace(MILES, passed_by=("miles",), stand_ins=(*MILES.stand_ins, "typer")), root)
    sys.path.append(root)
    commands: list[str] = []
    utils: Any = importlib.import_module("miles.utils.external_utils.command_utils")
    utils.exec_command_cpu = commands.append
    utils.exec_command_gpu = lambda command, capture_output=False: "0"
    utils.dataclass_cli = lambda function: function
    script = runpy.run_path(str(Path(root, "scripts/run_qwen3_4b.py")))
    script["execute"](script["ScriptArgs"](extra_args=arguments))
    (submit,) = (command for command in commands if "ray job submit" in command)
    return shlex.split(submit[submit.index("ray job submit") :])


def test_miless_script_with_the_recipes_option() -> None:
    words = shlex.split((RECIPES / "miles.sh").read_text().replace('"$@"', ""), comments=True)
    assert words[:2] == ["python3", "scripts/run_qwen3_4b.py"]
    (submit,) = run_ranks(1, submit_by_miles, checkout(MILES), words[words.index("--extra-args") + 1])
    environment, command = submitted(submit)
    assert str(ROOT) in environment["PYTHONPATH"].split(":")  # of this test's own environment
    assert "--calculate-per-token-loss" in command
    assert [command[command.index(flag) + 1].rpartition(".")[2] for flag in FLAGS] == ["token_mean", "count_steps"]
