"""Refusals of flags, as Megatron parses them."""

from argparse import ArgumentParser
from typing import Any

from refusals import Row

from megatron_rl_loss import add_loss_aggregation_args

AGGREGATE = "--loss-aggregation"
LIMITED = f"{AGGREGATE} constant {AGGREGATE}-divisor"
PATH = "--custom-pg-loss-reducer-function-path"
FSDP = "--use-torch-fsdp2 --ckpt-format torch_dist"
HYBRID = "--hybrid-context-parallel --dataloader-type single --max-seqlen-per-dp-cp-rank 64"
FULL = "--no-check-for-nan-in-loss-and-grad --cuda-graph-impl"


YAML = {"disable_msc_deprecated": False, "enable_msc": False}
DEFAULTS = vars(add_loss_aggregation_args(ArgumentParser()).parse_args([]))
YAML_FLAGS = YAML | DEFAULTS | {"loss_aggregation": "constant", "loss_aggregation_divisor": 8}


def flag(
    name: str, covers: str, bad: Any, value: str, remedy: str, good: Any = "", error: str = "ValueError", **options: Any
) -> Row:
    styled = error != "SystemExit"
    return Row(
        name=name, covers=covers, error=error, value=value, remedy=remedy, bad=bad, good=good, options=options,
        styled=styled,
    )  # fmt: skip


UNUSABLE = "a divisor that is ≤ 0, NaN, infinite or a bool, or with another mode"
UNKNOWN = "unknown mode, units, empty-step handling or level of the proof"
NO_PATH = "a path that does not load or names no function"
ELSEWHERE = "a setting of another framework that is not exact in every layout"
CONTRADICTED = "a divisor or counting that contradicts its name"
AUDITED = "an audit interval that is no number of steps"
ABSENT = "flags that were never registered, that `--yaml-cfg` dropped, or that are misspelt and ignored"
FLAG_ROWS = [
    flag("no divisor", "`constant` without a divisor", f"{AGGREGATE} constant", "'constant' without a divisor",
         "--loss-aggregation-divisor 40960", f"{LIMITED} 40960"),
    flag("divisor 0", UNUSABLE, f"{LIMITED} 0", "divisor 0.0", "Pass a number of tokens", f"{LIMITED} 1"),
    flag("divisor with another mode", UNUSABLE, f"{AGGREGATE} token_mean {AGGREGATE}-divisor 8",
         "divisor 8.0 with loss aggregation 'token_mean'", "Drop the divisor, or choose constant", f"{LIMITED} 8"),
    flag("unknown mode", UNKNOWN, f"{AGGREGATE} dapo", "loss aggregation 'dapo'",
         "Choose one of sample_mean, prompt_mean, token_mean, constant", f"{AGGREGATE} token_mean"),
    flag("unknown empty-step handling", UNKNOWN, f"{AGGREGATE}-empty-step skip",
         "--loss-aggregation-empty-step: invalid choice: 'skip'", "", f"{AGGREGATE}-empty-step error", "SystemExit"),
    flag("unknown empty-step handling, from YAML", UNKNOWN, YAML_FLAGS | {"loss_aggregation_empty_step": "skip"},
         "empty step handling 'skip'", "Choose one of", YAML_FLAGS | {"loss_aggregation_empty_step": "error"}),
    flag("unknown level of the proof", UNKNOWN, f"{AGGREGATE}-proof maybe",
         "--loss-aggregation-proof: invalid choice: 'maybe'", "", f"{AGGREGATE}-proof warn", "SystemExit"),
    flag("unknown level of the proof, from YAML", UNKNOWN, YAML_FLAGS | {"loss_aggregation_proof": "maybe"},
         "proof level 'maybe'", "Choose one of", YAML_FLAGS | {"loss_aggregation_proof": "off"}),
    flag("another framework's mean of means", ELSEWHERE, f"{AGGREGATE} trl:bnpo",
         "loss aggregation 'trl:bnpo'", "Choose 'token_mean'", f"{AGGREGATE} trl:dapo"),
    flag("another divisor than the name's", CONTRADICTED,
         f"{AGGREGATE} verl:token-sum {AGGREGATE}-divisor 8", "divisor 8.0 with loss aggregation 'verl:token-sum'",
         "Drop the divisor", f"{AGGREGATE} verl:token-sum"),
    flag("another counting than the name's", CONTRADICTED,
         f"{AGGREGATE} trl:grpo {AGGREGATE}-units active", "unit counting 'active' with loss aggregation 'trl:grpo'",
         "Leave the counting out", f"{AGGREGATE} trl:grpo {AGGREGATE}-units all"),
    flag("own mode and a mode", "a custom path with a mode",
         f"{PATH} os.path:join {AGGREGATE} sample_mean", "os.path:join with --loss-aggregation sample_mean",
         "Drop one of the two flags", f"{PATH} os.path:join"),
    flag("the empty text of an unset variable", UNKNOWN, f"{AGGREGATE}=", "loss aggregation ''",
         "Choose one of sample_mean", f"{AGGREGATE}=token_mean"),
    flag("no such module", NO_PATH, f"{PATH} no_such_module.fn", "path 'no_such_module.fn'", "PYTHONPATH",
         f"{PATH} os.path.join"),
    flag("no such function", NO_PATH, f"{PATH} os.path:joint", "path 'os.path:joint'", "Check the spelling",
         f"{PATH} os.path:join"),
    flag("path of a module that breaks", NO_PATH, f"{PATH} broken_modes:fn", "path 'broken_modes:fn'",
         "Check the spelling", f"{PATH} os.path:join"),
    flag("path to a string", NO_PATH, f"{PATH} os.path:sep", "path 'os.path:sep'", "Name a function that",
         f"{PATH} os.path:join", "TypeError"),
    flag("never registered", ABSENT, "", "args without loss_aggregation, loss_aggregation_divisor",
         "Pass add_loss_aggregation_args as Megatron's extra_args_provider", "", registered=False),
    flag("dropped by --yaml-cfg", ABSENT, YAML, "args without loss_aggregation, loss_aggregation_divisor",
         "Add these keys to the file", YAML_FLAGS),
    flag("a file of flags named by --yaml-cfg", ABSENT, YAML_FLAGS | {"loss_aggregation_config": "flags.yaml"},
         "loss_aggregation_config: flags.yaml in the file of --yaml-cfg", "Write the flags' keys", YAML_FLAGS),
    flag("audit interval of 0 steps", AUDITED, f"{AGGREGATE}-audit-interval 0", "-audit-interval is 0",
         "Give a number such as 100, or drop the flag", f"{AGGREGATE}-audit-interval 1"),
    flag("misspelt flag", "", "--loss-agregation token_mean", "--loss-agregation on the command line",
         "Write --loss-aggregation", f"{AGGREGATE} token_mean"),
    flag("misspelt mode flag, unknown ones ignored", "", "--loss-agregation constant --loss-aggregation-divisor 8",
         "--loss-agregation on the command line", "Write --loss-aggregation", f"{LIMITED} 8", ignore_unknown=True),
    flag("per-token loss and another mode", "`--calculate-per-token-loss` with another mode",
         f"--calculate-per-token-loss {AGGREGATE} prompt_mean",
         "--calculate-per-token-loss with mode prompt_mean", "add --loss-aggregation-with-per-token-loss",
         f"--calculate-per-token-loss {AGGREGATE} prompt_mean {AGGREGATE}-with-per-token-loss"),
    flag("per-token loss on Torch FSDP2", "per-token loss with Torch FSDP2", f"--calculate-per-token-loss {FSDP}",
         "--calculate-per-token-loss with --use-torch-fsdp2", "Drop --calculate-per-token-loss", FSDP, connections="2"),
    flag("per-token loss averaged in the collective", "per-token loss with Torch FSDP2",
         "--calculate-per-token-loss --ddp-average-in-collective", "--calculate-per-token-loss with --ddp-average",
         "Drop one of the two flags", "--ddp-average-in-collective"),
    flag("hybrid context parallelism", "hybrid context parallelism",
         f"{HYBRID} --calculate-per-token-loss", "--hybrid-context-parallel", "Use a fixed --context-parallel-size",
         "--calculate-per-token-loss"),
    flag("GTP", "rematerialises weights (GTP)", "--tensor-parallel-num-weight-shards 2", "(GTP)", "Turn it off",
         "--tensor-parallel-num-weight-shards 1", world=2),
    flag("full-iteration CUDA graphs", "`--cuda-graph-impl full_iteration`", f"{FULL} full_iteration",
         "--cuda-graph-impl full_iteration", "Choose another --cuda-graph-impl", f"{FULL} none"),
]  # fmt: skip
