"""Engines' own launch scripts with the lines of our page: SLIME_PATH=~/slime, VIME_PATH, MILES_PATH, VERL_PATH.

Real: the scripts of slime, vime and miles, up to `ray job submit`; verl's, with its Hydra config and `main`, up to
`ray.init`, and what verl imports where the variables of that call are set. Replaced: Ray's commands, and in slime's and
vime's scripts what ends other processes; in miles's the shell, the download of a model, and typer, which reads the
options; in verl's `uv`.
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
from types import SimpleNamespace
from typing import Any

import pytest
import verl_launch
from checkouts import MILES, SLIME, VERL, VIME, Framework, checkout, stand_in
from pages import code_of
from ranks import RankError, run_ranks
from repository import EXAMPLES, ROOT

pytestmark = pytest.mark.slow

RECIPES = EXAMPLES / "recipes"
FLAGS = ("--custom-pg-loss-reducer-function-path", "--custom-megatron-init-path")


def submitted(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The runtime environment's variables and the command of a `ray job submit`."""
    (environment,) = (word.split("=", 1)[1] for word in words if word.startswith("--runtime-env-json="))
    return json.loads(environment)["env_vars"], words[words.index("--") + 1 :]


@pytest.mark.parametrize("engine", [SLIME, VIME], ids=["slime", "vime"])
def test_a_script_of_slimes_with_the_recipe_below_its_array(engine: Framework, tmp_path: Path) -> None:
    scripts = Path(checkout(engine), "scripts")
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


def verls_ray_init(root: str, overrides: list[str]) -> Any:
    """The runtime environment with which verl's `main` starts Ray, which is not started."""
    stand_in(verl_launch.ENGINE, root)
    sys.path.append(root)
    ray: Any = importlib.import_module("ray")
    given: list[Any] = []
    ray.init = lambda **settings: given.append(settings["runtime_env"])
    ray.get = lambda reference: None
    run = SimpleNamespace(remote=lambda config: None)
    verl_launch.main(overrides, SimpleNamespace(remote=lambda: SimpleNamespace(run=run)))
    return given[0]


def imported_by_verl(root: str, variables: dict[str, str]) -> set[str]:
    """The modules of a process of verl with these variables: verl's package reads one of them itself."""
    stand_in(verl_launch.ENGINE, root)
    os.environ |= variables
    sys.path += [root, *variables.get("PYTHONPATH", "").split(":")]
    importlib.import_module("verl")
    return set(sys.modules)


_OURS = "megatron_rl_loss.engines.verl_install"
_SCRIPT = "bash examples/grpo_trainer/run_qwen3_8b_megatron.sh"


def lines_of_page() -> list[str]:
    """The page's arguments of verl's script: the first is the recipe's, the others are for a module of one's own."""
    return [line for code in code_of("engines/verl.md", "bash") for line in code.splitlines()]


@pytest.mark.parametrize("own_module", [False, True])
def test_verls_script_with_the_lines_behind_it(own_module: bool, tmp_path: Path) -> None:
    for package in "ray", "hydra", "tensordict":
        pytest.importorskip(package)
    root = checkout(VERL)
    of_recipe, *of_module = lines_of_page()
    assert verl_launch.RECIPE.splitlines()[-1].strip() == of_recipe
    (tmp_path / "my_module.py").touch()
    own = " ".join([_SCRIPT, *of_module]).replace("/root/megatron_rl_loss", str(tmp_path))
    overrides = verl_launch.overrides_of(own if own_module else verl_launch.RECIPE, root, tmp_path)
    (environment,) = run_ranks(1, verls_ray_init, root, overrides)
    assert environment["py_executable"].startswith("uv -v run ")
    (imported,) = run_ranks(1, imported_by_verl, root, environment["env_vars"])
    assert {_OURS, "my_module"} & imported == ({_OURS, "my_module"} if own_module else {_OURS})


def test_a_module_that_is_not_there_ends_a_process_of_verl() -> None:
    for package in "ray", "tensordict":
        pytest.importorskip(package)
    with pytest.raises(RankError, match=r"No module named 'megatron_rl_loss\.engines\.verl_instal'"):
        run_ranks(1, imported_by_verl, checkout(VERL), {"VERL_USE_EXTERNAL_MODULES": _OURS[:-1]})
