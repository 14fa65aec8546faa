"""`python -m megatron_rl_loss audit`: real scripts with their own flags, and audits inside a training run."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from example_run import DATA, MODEL, TRAINING, train
from ranks import PYTHONPATH, environment, run_ranks
from repository import EXAMPLES

pytestmark = pytest.mark.slow

FLAGS = [*MODEL.split(), *DATA.split(), *TRAINING.split()]
CP = ["--context-parallel-size", "2"]


def audited(*words: str) -> tuple[int, str]:
    """The exit status of ``python -m megatron_rl_loss audit`` on a rank, and its output."""
    from megatron_rl_loss.__main__ import main

    sys.argv = ["megatron_rl_loss", "audit", *words]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        return main(), printed.getvalue()


def test_a_script_on_two_ranks_is_what_its_flags_ask(tmp_path: Path) -> None:
    out, saved = tmp_path / "verdict.json", tmp_path / "saved"
    mode = ["--loss-aggregation", "constant", "--loss-aggregation-divisor", "400"]
    words = ["--fail", "--json", str(out), str(EXAMPLES / "pretrain_grpo.py"), *FLAGS, *CP, *mode]
    (status, text), (other, _) = run_ranks(2, audited, *words, "--save", str(saved), "--save-interval", "1")
    assert status == other == 0, text[-3000:]
    assert re.search(r"^SOUND: constant", text, re.MULTILINE)
    assert "iteration        1/" not in text  # it ends before the optimizer's step, and saves nothing
    assert not saved.exists()
    (found,) = json.loads(out.read_text()).values()  # of the one term
    assert found["sound"] is True
    assert found["deviation"] < 1e-6
    assert found["facts"]["anchor"] == "decoder.final_layernorm.weight"


#: A stock loss function; `TAP` is what an audit takes, `PPO` a correct loss whose
#: weights the model's output does not show.
STOCK = """
import contextlib
import torch
import pretrain_grpo
pretrain_grpo.LossAggregation.attached = lambda self: contextlib.nullcontext()  # stock: no look-ahead
def forward_step(data_iterator, model):
    pack = pretrain_grpo.pack = next(data_iterator)
    values = [getattr(pack, name)[None] for name in ("tokens", "position_ids", "labels")]
    params = pretrain_grpo.on_device(pack)
    output = model(values[0], values[1], attention_mask=None, labels=values[2], packed_seq_params=params)
    mask = torch.from_numpy(pack.samples.local(0, 1).mask)[None]
    def loss_func(losses):
        losses = per_token_loss(losses, pack.advantages[None])
        return (losses * mask).sum(), (mask != 0).sum().int(), {}
    return output, loss_func
pretrain_grpo.forward_step = forward_step
def per_token_loss(losses, advantages):
    return losses
"""
TAP = """
from megatron_rl_loss import tap
untapped = per_token_loss
def per_token_loss(losses, advantages):
    return tap(untapped(losses, advantages), samples=pretrain_grpo.pack.samples)
"""
PPO = """
def per_token_loss(losses, advantages):
    ratio = (losses.detach() - losses + 0.1 * losses.detach().sin()).exp()
    return -(ratio * advantages).minimum(ratio.clamp(0.95, 1.05) * advantages)
"""
TERMS = """
import pretrain_grpo
from megatron_rl_loss import Term
from megatron_rl_loss import Microbatch
reduce = Microbatch.loss
def loss(self, losses, metrics=None):
    return reduce(self, {"pg": losses, "kl": Term(losses.square(), "token_mean", coef=COEF)}, metrics)
Microbatch.loss = loss
COEF = 0.05
"""
OWN_MODE = """
from megatron_rl_loss import register_pg_loss_reducer
@register_pg_loss_reducer("by_label")
def by_label(step):
    return [float(label) for label in step.label("weight")]
"""
MAIN = "pretrain_grpo.main()"
PER_TOKEN, SAMPLE_MEAN = ["--calculate-per-token-loss"], ["--loss-aggregation", "sample_mean"]
DIVIDED = "coefficient, 0.05, is divided out"
# name: (script, the audit's options, the script's, exit status, what is printed)
LAUNCHES: dict[str, tuple[str, list[str], list[str], int, list[str]]] = {
    "the second step": (
        TERMS + MAIN, ["--fail", "--expect", "sample_mean", "--step", "2"], SAMPLE_MEAN,
        0, ["iteration +1/", "^Term pg:\nSOUND: sample_mean", "^Term kl:\nSOUND: token_mean", DIVIDED],
    ),
    "one of two terms is not what was expected": (
        TERMS + MAIN, ["--fail", "--expect", "token_mean"], SAMPLE_MEAN,
        1, ["^Term pg:\nNOT SOUND: asked token_mean", "^Term kl:\nSOUND: token_mean"],
    ),
    "without --fail": (
        "import pretrain_grpo\ntry:\n    pretrain_grpo.main()\nfinally:\n    print('left')",
        ["--expect", "token_mean"], SAMPLE_MEAN, 0, ["^left\nNOT SOUND: asked token_mean"],
    ),
    "an audit that cannot begin": (
        "from megatron_rl_loss.audit.megatron import audit\naudit.choose = None\n" + STOCK + MAIN, [], [],
        0, ["^TypeError", "^NO VERDICT: The audit failed\\. TypeError"],
    ),
    "a term of coefficient 0": (
        TERMS + "COEF = 0.0\n" + MAIN, ["--fail"], SAMPLE_MEAN,
        2, ["^Term pg:\nSOUND: sample_mean", "^Term kl:\nNO VERDICT: The term's coefficient is 0"],
    ),
    "a mode over labels": (
        OWN_MODE + TERMS + MAIN, ["--fail", "--expect", "by_label"], SAMPLE_MEAN,
        2, ["^Term pg:\nNO VERDICT: The weights of by_label cannot be computed"],
    ),
    "PPO": (STOCK + PPO + TAP + MAIN, ["--fail", "--expect", "token_mean"], PER_TOKEN, 0, ["^SOUND: token_mean"]),
    "PPO without a tap": (
        STOCK + PPO + MAIN, ["--fail", "--expect", "token_mean"], PER_TOKEN,
        2, [r"^NO VERDICT: Nothing was tapped\. Write per_token_loss = tap\(per_token_loss, samples=\.\.\.\)"],
    ),
    "nothing trained": ("print('nothing')", ["--fail"], [], 2, ["^nothing\nNO VERDICT: The script ended before"]),
    "an end with a reason": ("raise SystemExit('no data')", [], [], 2, ["^no data\nNO VERDICT: The script failed"]),
    "an error of the script": ("1 / 0", [], [], 2, ["^ZeroDivisionError.*\nNO VERDICT: The script failed before"]),
}  # fmt: skip


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_verdict_is_last_and_the_exit_status_is_that_of_fail(name: str, tmp_path: Path) -> None:
    code, options, flags, expected, says = LAUNCHES[name]
    script = tmp_path / "script.py"
    script.write_text(code)
    ((status, text),) = run_ranks(1, audited, *options, str(script), *FLAGS, *flags)
    assert status == expected, text[-3000:]
    for words in says:
        assert len(re.findall(words, text, re.MULTILINE)) == 1, text[-3000:]


def test_the_script_imports_megatron_by_itself_and_nothing_is_hooked(tmp_path: Path) -> None:
    """The script runs in a fresh process; the other tests find Megatron imported."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nassert sys.meta_path == sys.finders\nassert 'megatron.core' not in sys.modules\n"
        "import audit_own_loop\naudit_own_loop.main()"
    )
    code = (
        "import runpy, sys, torch\nsys.finders = list(sys.meta_path)\n"
        f"sys.argv = ['', 'audit', '--expect', 'token_mean', {str(script)!r}, '--exact']\n"
        "runpy.run_module('megatron_rl_loss', run_name='__main__')"
    )
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = os.environ | environment(1, store.port) | {"RANK": "0", "LOCAL_RANK": "0", "PYTHONPATH": PYTHONPATH}
    ended = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.startswith("SOUND: token_mean")


def own_loop(flags: list[str]) -> str:
    """The example's output on a rank."""
    import audit_own_loop

    sys.argv = ["audit_own_loop.py", *flags]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        audit_own_loop.main()
    return printed.getvalue()


def test_a_loop_of_ones_own_in_three_lines() -> None:
    """The example that docs/audit.md shows."""
    text = run_ranks(4, own_loop, CP)[0]
    low, high = map(float, re.findall(r"NOT SOUND: asked token_mean.* weigh ([\d.]+) to ([\d.]+) times what", text)[0])
    assert low < 0.7 < 1.5 < high
    assert re.search(r"^SOUND: token_mean", run_ranks(4, own_loop, [*CP, "--exact"])[0], re.MULTILINE)


def test_every_kth_step_of_a_run_is_measured_and_nothing_else_changes() -> None:
    flags = ["--pipeline-model-parallel-size", "2", "--train-iters", "2", "--loss-aggregation", "prompt_mean"]
    without: Any = run_ranks(2, train, flags)[-1]
    audited: Any = run_ranks(2, train, [*flags, "--loss-aggregation-audit-interval", "2"])[-1]
    assert len(audited) == len(without) == 2
    for step, reference in zip(audited, without, strict=True):
        assert 0 <= step.pop("loss_aggregation_deviation") < 1e-6
        assert step == reference  # every number of every step, to the bit
