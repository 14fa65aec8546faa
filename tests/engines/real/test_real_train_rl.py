"""Our example on Megatron-LM's own `train_rl.py`, from a checkout: MEGATRON_LM_PATH=~/Megatron-LM (0.19 or main).

Each test starts interpreters whose Megatron is the checkout's: see `train_rl_worker`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from checkouts import MEGATRON_LM, checkout, record_errors
from repository import EXAMPLES, ROOT

#: Log-probs are float32 sums over the vocabulary.
TOLERANCE = 2e-6
ACTIVE = ["--loss-aggregation-units", "active"]
PACKED = ["--rl-use-sequence-packing"]

pytestmark = pytest.mark.slow


def case(mode: str | None, *flags: str, divisor: float | None = None, seed: int = 1) -> dict[str, Any]:
    """A case; without a mode it is a launch without flags of ours, compared with a sample mean."""
    ours = [] if mode is None else ["--loss-aggregation", mode]
    ours += [] if divisor is None else ["--loss-aggregation-divisor", str(divisor)]
    return {"mode": mode or "sample_mean", "divisor": divisor, "seed": seed, "flags": [*ours, *flags]}


def launch(world_size: int, cp: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rank 0's result for each case."""
    root = checkout(MEGATRON_LM)
    # In this process, as torchrun has it.
    store = vars(dist)["TCPStore"]("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folders = [root, str(EXAMPLES), str(ROOT / "tests" / "support"), str(ROOT)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(folders),
        "PYTHONWARNINGS": "ignore",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, str(ROOT / "tests" / "support" / "train_rl_worker.py"), root, str(cp), json.dumps(cases)]
    to = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
    ranks: list[Any] = [subprocess.Popen(command, env=environment | place, **to) for place in places]  # type: ignore[call-overload]
    try:
        outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    results = [json.loads(line[7:]) for line in outputs[0].splitlines() if line.startswith("RESULT ")]
    assert len(results) == len(cases), "\n".join(output[-3000:] for output in outputs)
    return results


def source(*parts: str) -> str:
    return Path(checkout(MEGATRON_LM), *parts).read_text()


def cuts_log_probs() -> bool:
    """True if this `train_rl.py` runs with context parallelism: main's does, 0.19's does not."""
    return "_scatter_for_context_parallel" in source("megatron", "rl", "rl_utils.py")


@pytest.mark.parametrize(("world_size", "cp"), [(2, 1), (4, 2)])
def test_modes_are_exact_and_an_audit_measures_them(world_size: int, cp: int, record_property: Any) -> None:
    """The stock loss is none of the modes; of it, which has no tap, there is no verdict."""
    if cp > 1 and not cuts_log_probs():
        pytest.skip("this train_rl.py does not cut log-probs for context parallelism")
    cases = [
        case("sample_mean", *ACTIVE, *PACKED),
        case("sample_mean", *ACTIVE),
        case("token_mean", *PACKED),
        case("token_mean"),
        case("constant", *ACTIVE, *PACKED, divisor=40.0, seed=2),
    ]
    *ours, packed, unpacked = launch(world_size, cp, [*cases, case(None, *PACKED), case(None)])
    for setting, own, mine in (("packed", packed, ours[0]), ("unpacked", unpacked, ours[1])):
        setting = f"sample mean, {setting}, two filler rows"
        record_errors(record_property, MEGATRON_LM, setting, own["gradient"], mine["gradient"])
        assert own["gradient"] > 1e-2
    for of_launch, result in zip(cases, ours, strict=True):
        record_errors(record_property, MEGATRON_LM, "every mode", ours=result["gradient"])
        assert result.get("error", 1.0) < TOLERANCE, (of_launch, result)
        assert not result["stock"]
        assert result["audit_error"] < TOLERANCE, (of_launch, result)
        assert not result["notes"]
        assert result["proof"].startswith(of_launch["mode"])
    for result in (packed, unpacked):
        assert result["stock"]
        assert not result["proof"]
        assert [why[:18] for why in result["unknown"]] == ["Nothing was tapped"]


def test_what_is_refused() -> None:
    cases = [
        case(None, "--loss-agregation", "sample_mean"),
        case("sample_mean"),
        case("token_mean", "--check-for-spiky-loss"),
        case("token_mean", "--reset-attention-mask"),
    ]
    misspelt, rows, spiky, mask = launch(1, 1, cases)
    assert "refused" in misspelt  # by argparse
    assert "Add --loss-aggregation-units active" in rows["refused"]
    assert "a policy loss is near 0" in spiky["refused"]
    if "reset_attention_mask" in source("train_rl.py"):  # refused as where train_rl.py is run itself
        assert "--reset-attention-mask" in mask["refused"]
    else:
        assert mask["error"] < TOLERANCE
