"""The reports that docs/audit.md shows, made anew: steps of ragged responses, judged.

python tests/support/audit_examples.py           # prints them
python tests/support/audit_examples.py --write   # puts them into the page
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")] if str(ROOT) not in sys.path else []

import check_my_loss
from counted_steps import measured, ragged
from published import own_piece

from megatron_rl_loss import check_loss
from megatron_rl_loss.audit.judge import judge
from megatron_rl_loss.audit.simulation import LossCall
from megatron_rl_loss.core.aggregation import resolve

PAGE = ROOT / "docs" / "audit.md"
BLOCK = re.compile(r"<!-- example: (.+?) -->\n```text\n(.*?)```", re.DOTALL)


def stock() -> str:
    """Responses of ragged lengths behind their prompts, each divided by the tokens of its rank's piece."""
    step = ragged(6, D=2, C=2, K=3, samples=(2, 3), responses=True, masked=0.0)
    return str(judge(measured(step, own_piece), resolve("token_mean")))


EXAMPLES: dict[str, Callable[[], str]] = {
    "stock": stock,
    "check_loss": lambda: str(check_loss(check_my_loss.mine, "token_mean", call=LossCall())),
}


def with_examples(page: str) -> str:
    """The page with every example made anew."""
    return BLOCK.sub(lambda comment: f"<!-- example: {comment[1]} -->\n```text\n{EXAMPLES[comment[1]]()}\n```", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="Put them into docs/audit.md.")
    if parser.parse_args().write:
        PAGE.write_text(with_examples(PAGE.read_text()))
    else:
        for name, example in EXAMPLES.items():
            print(f"--- {name}\n{example()}\n")


if __name__ == "__main__":
    main()
