"""The reports that docs/audit.md shows, made anew: steps of ragged responses, judged.

python tests/support/audit_examples.py           # prints them
python tests/support/audit_examples.py --write   # puts them into the page
"""

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")] if str(ROOT) not in sys.path else []

import check_my_loss
import torch
from counted_steps import Step, measured, ragged
from published import exact, own_mean, own_piece

from megatron_rl_loss import check_loss, compare_log_probs
from megatron_rl_loss.audit.judge import judge
from megatron_rl_loss.audit.simulation import LossCall
from megatron_rl_loss.audit.tokens import MeasuredStep
from megatron_rl_loss.modes.names import resolve

PAGE = ROOT / "docs" / "audit.md"
BLOCK = re.compile(r"<!-- example: (.+?) -->\n```text\n(.*?)```", re.DOTALL)

TOKEN_MEAN = resolve("token_mean")


def step(D: int = 2, C: int = 2, K: int = 3) -> Step:
    """Responses of ragged lengths behind their prompts."""
    return ragged(6, D=D, C=C, K=K, samples=(2, 3), responses=True, masked=0.0)


def stock() -> MeasuredStep:
    return measured(step(), own_piece)


def no_verdict() -> MeasuredStep:
    reason = "The factor of gradients cannot be read: ranks were scaled apart, residual 0.49."
    return replace(measured(step(), exact), unknown=(reason,))


def judged(one: MeasuredStep) -> str:
    return str(judge(one, TOKEN_MEAN))


def log_probs() -> str:
    """A rollout whose log-probs are the trainer's one token later, each rounded to bfloat16."""
    draw = torch.Generator().manual_seed(1)
    ours = [-torch.rand(length, generator=draw) * 3 for length in (40, 25, 31)]
    return str(compare_log_probs(ours, [row.roll(1).bfloat16() for row in ours]))


EXAMPLES: dict[str, Callable[[], str]] = {
    "stock": lambda: judged(stock()),
    "two bugs": lambda: judged(measured(step(C=1), lambda t: own_mean(t) * t.K)),
    "sizes coincide": lambda: judged(measured(step(K=2), lambda t: exact(t) * 2)),
    "no verdict": lambda: judged(no_verdict()),
    "sound": lambda: judged(measured(step(), exact)),
    "wrong place": lambda: judged(measured(step(), lambda t: (0 * t.m + 1) / t.T / t.K)),
    "log-probs": log_probs,
    "check_loss": lambda: str(check_loss(check_my_loss.mine, "token_mean", call=LossCall())),
}


def with_examples(page: str) -> str:
    """The page with every example made anew."""
    return BLOCK.sub(lambda found: f"<!-- example: {found[1]} -->\n```text\n{EXAMPLES[found[1]]()}\n```", page)


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
