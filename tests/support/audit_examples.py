"""The reports that docs/audit-report.md shows, made anew: steps of the simulated trainer, judged.

python tests/support/audit_examples.py           # prints them
python tests/support/audit_examples.py --write   # puts them into the page
"""

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

import simulated_trainer as trainer
from simulated_trainer import Piece, Step, ragged

from megatron_rl_loss.audit.picture import in_terminal
from megatron_rl_loss.audit.tokens import MeasuredStep
from megatron_rl_loss.audit.verdict import judge
from megatron_rl_loss.modes.names import resolve

PAGE = ROOT / "docs" / "audit-report.md"
BLOCK = re.compile(r"<!-- example: (.+?) -->\n```text\n(.*?)```", re.DOTALL)

TOKEN_MEAN = resolve("token_mean")


def step(**options: Any) -> Step:
    """DP 2 x CP 2, 3 micro-batches: responses of ragged lengths behind their prompts."""
    given: dict[str, Any] = {"D": 2, "C": 2, "K": 3, "samples": (2, 3), "responses": True} | options
    return ragged(6, **given)


def exact(p: Piece) -> Any:
    return p.sum / p.of.T


def stock(p: Piece) -> Any:
    return p.sum, p.n_here.clamp(min=1)


def micro_batch_mean_times_cp(p: Piece) -> Any:
    return p.sum / p.n.clamp(min=1) / (p.of.D * p.of.K) * p.of.C


def mean_of_rows(p: Piece) -> Any:
    return (p.sums / p.tokens.clamp(min=1)).mean()


def stock_step() -> MeasuredStep:
    return trainer.measure(step(), stock, trainer.megatron)


def no_verdict() -> MeasuredStep:
    reason = "The factor of gradients cannot be read: ranks were scaled apart, residual 0.49."
    return replace(trainer.measure(step(), exact), unknown=(reason,))


def judged(measured: MeasuredStep) -> str:
    return str(judge(measured, TOKEN_MEAN))


EXAMPLES: dict[str, Callable[[], str]] = {
    "sound": lambda: judged(trainer.measure(step(), exact)),
    "stock": lambda: judged(stock_step()),
    "two bugs": lambda: judged(trainer.measure(step(D=3, K=5), micro_batch_mean_times_cp)),
    "another mode": lambda: judged(trainer.measure(step(C=1), mean_of_rows, trainer.accumulate)),
    "sizes coincide": lambda: judged(trainer.measure(step(K=2), lambda p: exact(p) * 2)),
    "prompt": lambda: judged(trainer.measure(step(masked=0.0), lambda p: p.losses.sum() / p.of.T)),
    "no verdict": lambda: judged(no_verdict()),
    "terminal": lambda: in_terminal(stock_step(), asked=TOKEN_MEAN),
}


def with_examples(page: str) -> str:
    """The page with every example made anew."""
    return BLOCK.sub(lambda found: f"<!-- example: {found[1]} -->\n```text\n{EXAMPLES[found[1]]()}\n```", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="Put them into docs/audit-report.md.")
    if parser.parse_args().write:
        PAGE.write_text(with_examples(PAGE.read_text()))
    else:
        for name, example in EXAMPLES.items():
            print(f"--- {name}\n{example()}\n")


if __name__ == "__main__":
    main()
