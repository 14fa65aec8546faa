"""Try an installed megatron_rl_loss like a user: numbers, commands, examples; away from the repository.

    python check_install.py [--with-megatron]      # in a folder of its own; tools/check_package.sh does it

With Megatron it also copies `launch_grpo.sh` out of the wheel and trains two steps with it, on this machine's CPU.
Wheels of megatron-core up to 0.16 hold no `megatron.training`: with those the adapter is imported.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from pathlib import Path

import torch

import megatron_rl_loss
from megatron_rl_loss import Samples, StepTotals, make_pg_loss_reducer, plan_step


def run(*command: str) -> str:
    environment = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def ours(*words: str) -> str:
    return run(sys.executable, "-m", "megatron_rl_loss", *words)


def check(what: str, holds: bool) -> None:
    if not holds:
        raise SystemExit(f"failed: {what}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--with-megatron", action="store_true", help="Train two steps with the wheel's own example.")
    options = parser.parse_args()
    package = Path(megatron_rl_loss.__file__).parent
    check(f"it is installed, not a checkout: {package}", "site-packages" in package.parts)
    check("it says that it is typed", (package / "py.typed").is_file())
    masks = [torch.tensor([1.0, 1, 0, 1]), torch.tensor([1.0, 1])]
    losses = torch.tensor([1.0, 2, 9, 3, 4, 6], requires_grad=True)
    share = make_pg_loss_reducer("sample_mean", masks, totals=StepTotals.of(masks))(losses)
    share.backward()
    check(f"(6/3 + 10/2) / 2 is 3.5: {share:.7f}", abs(share.item() - 3.5) < 1e-6)
    expected = torch.tensor([1 / 6, 1 / 6, 0, 1 / 6, 1 / 4, 1 / 4])
    check("a gradient is a weight", torch.allclose(losses.grad, expected))  # type: ignore[arg-type]
    check("modes are printed", "verl:seq-mean-token-sum-norm" in ours("modes", "--all"))
    script = Path(sys.executable).with_name("megatron-rl-loss")
    (entry,) = entry_points(group="console_scripts", name=script.name)
    check("the command's script has an entry point", entry.value == "megatron_rl_loss.__main__:main")
    if script.exists():  # pip makes it; a wheel that is only unpacked has none
        check("the script does the same", run(str(script), "modes") == ours("modes"))
    with tempfile.TemporaryDirectory() as folder:
        plan_step([Samples(masks)], "token_mean").plot(page := Path(folder) / "plan.html")
        check("a page is drawn without matplotlib", page.read_text().count('class="bar"') == 2)  # one for each sample
    check("examples are listed", "pretrain_grpo.py" in ours("example"))
    with tempfile.TemporaryDirectory() as folder:
        copied = ours("example", "launch_grpo.sh", "--to", folder).splitlines()
        names = {Path(file).name for file in copied}
        check("an example is copied with the files it needs", names >= {"pretrain_grpo.py", "rollouts.py"})
        if options.with_megatron:
            print(trained(f"{folder}/launch_grpo.sh") if find_spec("megatron.training") else imported())
    print(f"Python {platform.python_version()}, torch {version('torch')}, numpy {version('numpy')}: all checks pass")


def imported() -> str:
    """Import the adapter's names for a loop of your own under this Megatron, in a new process."""
    code = "from megatron_rl_loss import LossAggregation; print(LossAggregation.__module__)"
    offered = run(sys.executable, "-W", "ignore", "-c", code)
    return f"megatron-core {version('megatron-core')} has no megatron.training; imported {offered.strip()}"


def trained(launcher: str) -> str:
    """Train two steps with the launcher, and return the line that names the aggregation."""
    printed = run(launcher, "1", "--train-iters", "2", "--loss-aggregation", "prompt_mean")
    check("two steps were trained", "iteration        2/       2" in printed)
    lines = (line for line in printed.splitlines() if line.startswith("loss aggregation: prompt_mean"))
    return next(line for line in lines if "|" in line)


if __name__ == "__main__":
    main()
