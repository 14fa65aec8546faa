"""Slurm and Apptainer in small, as processes of this machine: commands in the place of those that AReaL calls.

A job's script is run as it is, with none of the submitter's `PYTHONPATH`: what its tasks import must come from the
script. `srun` starts all tasks here, `singularity exec` runs the command with the variables of its `--env`.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

_COMMANDS = ("sbatch", "scancel", "singularity", "squeue", "srun")


def install(folder: Path) -> None:
    """Put the commands into the folder, and the folder before all others of this process's `PATH`."""
    for name in _COMMANDS:
        command = folder / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {name} "$@"\n')
        command.chmod(0o755)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


def sbatch(script: str) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    job = subprocess.Popen(["bash", script], env=variables, stdout=subprocess.DEVNULL, start_new_session=True)
    print(f"Submitted batch job {job.pid}")


def scancel(*words: str) -> None:
    os.killpg(int(words[-1]), signal.SIGKILL)


def squeue(*words: str) -> None:
    values = (words[words.index("-j") + 1], "RUNNING", "", "", "", "here", "")
    print("header", "__PSI__".join(values), sep="\n")


def srun(*words: str) -> None:
    (tasks,) = (int(word.partition("=")[2]) for word in words if word.startswith("--ntasks="))
    command = words[words.index("singularity") :]
    started = [
        subprocess.Popen(command, env=os.environ | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)})
        for task in range(tasks)
    ]
    sys.exit(max(task.wait() for task in started))


def singularity(*words: str) -> None:
    given = dict(words[i + 1].split("=", 1) for i, word in enumerate(words) if word == "--env")
    command = words[words.index("bash") :]
    os.execvpe(command[0], command, os.environ | given)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
