"""Draw what Megatron's stock loss function does to each token of a step, beside what this package does.

    python tools/audit_picture.py --out docs/audit.png

Measures both in the real Megatron, at context parallelism 2 x data parallelism 2 with 3 micro-batches: it launches
`examples/audit_own_loop.py` twice under torchrun on 4 processes (CPU and gloo where there is no GPU). Steps that were
measured before are drawn with --stock and --ours. Needs matplotlib: pip install -e '.[audit]'. Without it --terminal
prints the picture as text.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_rl_loss.audit.picture import draw, in_terminal
from megatron_rl_loss.audit.tokens import MeasuredStep
from megatron_rl_loss.audit.verdict import judge
from megatron_rl_loss.modes.names import resolve

LOOP = Path(__file__).parents[1] / "examples" / "audit_own_loop.py"
STOCK = "Megatron's stock loss function, (sum, num_tokens, report), without --calculate-per-token-loss"
OURS = "megatron_rl_loss, token_mean: the same step, the same Megatron"


def measure(*flags: str) -> MeasuredStep:
    """Run the loop on 4 processes."""
    with tempfile.NamedTemporaryFile() as written:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(LOOP)]
        command += ["--context-parallel-size", "2", "--num-microbatches", "3", "--measured", written.name, *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return MeasuredStep.from_json(Path(written.name).read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="The picture, a PNG or whatever matplotlib knows by its ending.")
    parser.add_argument("--terminal", action="store_true", help="Print the picture as text, too.")
    parser.add_argument("--stock", type=Path, help="A step measured before, as JSON; with --ours.")
    parser.add_argument("--ours", type=Path, help="The step beside it.")
    options = parser.parse_args()
    if (options.stock is None) != (options.ours is None):
        parser.error("--stock and --ours go together")
    if options.out is None and not options.terminal:
        parser.error("say --out FILE, or --terminal")
    expected = resolve("token_mean")
    if options.stock is None:
        steps = [measure(), measure("--exact")]
    else:
        steps = [MeasuredStep.from_json(file.read_text()) for file in (options.stock, options.ours)]
    panels = list(zip((STOCK, OURS), steps, strict=True))
    if options.out is not None:
        draw(panels, options.out, expected=expected)
    for title, step in panels:
        print(f"{title}\n{judge(step, expected).headline}")
        if options.terminal:
            print(in_terminal(step, expected=expected, colour=sys.stdout.isatty()))


if __name__ == "__main__":
    main()
