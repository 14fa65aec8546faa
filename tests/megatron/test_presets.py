"""Presets and logged values of docs/using.md: flags parse to what papers ask for, values are those of the example."""

import re
from argparse import ArgumentParser
from types import SimpleNamespace
from typing import Any

import torch
from ranks import run_ranks
from repository import ROOT
from torch import Tensor

from megatron_rl_loss.losses.by_name import check_goes_with
from megatron_rl_loss.megatron.flags import validate_loss_aggregation_args
from megatron_rl_loss.proof.intervals import METRIC

PAGE = (ROOT / "docs/using.md").read_text()
PRESETS = dict(re.findall(r"^\| ([^|`]+) \| `(--[^`]+)` \|$", PAGE, flags=re.MULTILINE))
#: Policy loss, clip range, division by the std, mode, divisor and counting, as the papers say.
ASKED = {
    "GRPO": ("ppo", None, None, True, "sample_mean", None, "all"),
    "DAPO, by its equation": ("ppo", 0.2, 0.28, True, "prompt_mean", None, "all"),
    "DAPO, as verl and TRL compute it": ("ppo", 0.2, 0.28, True, "token_mean", None, "all"),
    "Dr. GRPO": ("ppo", 0.2, 0.2, False, "constant", 4096, "all"),
    "GSPO as Qwen": ("gspo", 3e-4, 4e-4, True, "sample_mean", None, "all"),
    "agents with compaction": ("ppo", None, None, True, "session_mean", None, "active"),
}


def parsed(presets: dict[str, str]) -> dict[str, tuple[Any, ...]]:
    """What the parser of the example and its checks make of each line."""
    import pretrain_grpo

    parser, settings = pretrain_grpo.add_args(ArgumentParser(allow_abbrev=False)), {}
    for name, flags in presets.items():
        args = parser.parse_args([*flags.split(), "--rollouts", "none"])
        policy = validate_loss_aggregation_args(args).modes.policy
        check_goes_with(args.policy_loss, policy, **pretrain_grpo.clip_range(args))
        loss_flags = args.policy_loss, args.clip_low, args.clip_high, not args.no_advantage_std
        settings[name] = (*loss_flags, policy.mode.name, policy.divisor, policy.units)
    return settings


def test_presets_parse_to_what_their_papers_say() -> None:
    assert run_ranks(1, parsed, PRESETS) == [ASKED]


def logged(log_probs: Tensor, old: Tensor) -> dict[str, list[float]]:
    """The example's metrics of each token; the reference's log-probs are the old ones."""
    import pretrain_grpo

    flags = {"policy_loss": "ppo", "clip_low": None, "clip_high": None, "kl_beta": 0.1, "entropy_bonus": 0.0}
    vars(pretrain_grpo)["get_args"] = lambda: SimpleNamespace(**flags)
    advantages, mask = torch.linspace(-1, 1, len(old)), torch.ones(len(old))
    metrics = pretrain_grpo.per_token_loss(mask, log_probs, None, advantages, old, old)[1]
    return {name: values.tolist() for name, values in metrics.items()}


def test_logged_values_are_those_of_the_example_and_in_their_range() -> None:
    log_probs, others = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).abs().neg()
    (on_policy,) = run_ranks(1, logged, log_probs, log_probs)
    (off_policy,) = run_ranks(1, logged, log_probs, others)
    section = PAGE[PAGE.index("## Logged values") :].split("\n## ")[0]
    shown = set(re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE))
    assert shown == {"pg_loss", "log_prob", "entropy", METRIC, *off_policy}
    for name in ("clip_fraction", "ppo_kl", "reference_kl"):
        assert set(on_policy[name]) == {0.0}, name
    assert set(off_policy["clip_fraction"]) == {0.0, 1.0}
    torch.testing.assert_close(torch.tensor(off_policy["ppo_kl"]), others - log_probs)
    assert min(off_policy["reference_kl"]) > 0
