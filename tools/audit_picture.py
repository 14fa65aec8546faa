"""Draw the weight of each token of a step: by Megatron's stock loss function, and by this library.

    python tools/audit_picture.py --out docs/audit.png

Both are measured in the real Megatron, at context parallelism 2 x data parallelism 2 with 3 micro-batches, by two
launches of `examples/audit_own_loop.py` under torchrun on 4 processes (CPU and gloo without a GPU). The picture needs
matplotlib: pip install -e '.[audit]'.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from megatron_rl_loss.audit.judge import judge
from megatron_rl_loss.audit.picture import Panel, write_picture
from megatron_rl_loss.audit.tokens import MeasuredStep
from megatron_rl_loss.core.aggregation import resolve

LOOP = Path(__file__).parents[1] / "examples" / "audit_own_loop.py"
STOCK = "Megatron's stock loss function, (sum, num_tokens, report), without --calculate-per-token-loss"
OURS = "megatron_rl_loss, token_mean: the same step, the same Megatron"


def measure(*flags: str) -> MeasuredStep:
    """Run the example on 4 processes and return its measured step."""
    with tempfile.NamedTemporaryFile() as written:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(LOOP)]
        command += ["--context-parallel-size", "2", "--num-microbatches", "3", "--measured", written.name, *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return torch.load(written.name, weights_only=False)  # of our own making


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="The picture; its suffix names the format, such as .png or .html."
    )
    options = parser.parse_args()
    expected, steps = resolve("token_mean"), [measure(), measure("--exact")]
    panels = list(zip((STOCK, OURS), steps, strict=True))
    write_picture([Panel.from_step(step, expected, title=title) for title, step in panels], options.out)
    for title, step in panels:
        print(f"{title}\n{judge(step, expected)}")


if __name__ == "__main__":
    main()
