"""Presets and logged values of docs/using.md: flags parse to what papers ask for, values are those of the example."""

import re
from argparse import ArgumentParser
from types import SimpleNamespace

import pretrain_grpo
import pytest
import torch
from repository import ROOT

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


def test_presets_parse_to_what_their_papers_say() -> None:
    assert PRESETS.keys() == ASKED.keys()
    parser = pretrain_grpo.add_args(ArgumentParser(allow_abbrev=False))
    for name, flags in PRESETS.items():
        args = parser.parse_args([*flags.split(), "--rollouts", "none"])
        policy = validate_loss_aggregation_args(args).modes.policy
        check_goes_with(args.policy_loss, policy, **pretrain_grpo.clip_range(args))
        of_loss = args.policy_loss, args.clip_low, args.clip_high, not args.no_advantage_std
        assert (*of_loss, policy.mode.name, policy.divisor, policy.units) == ASKED[name], name


def test_logged_values_are_those_of_the_example_and_in_their_range(monkeypatch: pytest.MonkeyPatch) -> None:
    section = PAGE[PAGE.index("## Logged values") :].split("\n## ")[0]
    shown = set(re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE))
    flags = {"policy_loss": "ppo", "clip_low": None, "clip_high": None, "kl_beta": 0.1, "entropy_bonus": 0.0}
    monkeypatch.setattr(pretrain_grpo, "get_args", lambda: SimpleNamespace(**flags))
    generator = torch.Generator().manual_seed(0)
    log_probs, others = torch.randn(2, 64, generator=generator).abs().neg()
    advantages = torch.randn(64, generator=generator)
    on_policy, off_policy = (
        pretrain_grpo.per_token_loss(torch.ones(64), log_probs, None, advantages, old, others)[1]
        for old in (log_probs, others)
    )
    assert shown == {"pg_loss", "log_prob", "entropy", METRIC, *off_policy}
    for name in ("clip_fraction", "ppo_kl"):
        assert on_policy[name].abs().max() == 0
        assert off_policy[name].abs().max() > 0
    assert set(off_policy["clip_fraction"].tolist()) == {0.0, 1.0}
    torch.testing.assert_close(off_policy["ppo_kl"], others - log_probs)
    assert off_policy["reference_kl"].min() >= 0
