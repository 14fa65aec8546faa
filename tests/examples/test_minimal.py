"""The README's script trains through the real `pretrain`, saves, and gives the same in another layout."""

import sys
from pathlib import Path
from typing import Any

import pytest
from example_run import MODEL, TRAINING
from ranks import run_ranks

pytestmark = pytest.mark.slow

DATA = """--dataloader-type external --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1
    --global-batch-size 4 --eval-iters 0 --eval-interval 1000"""


def train(flags: list[str]) -> list[float]:
    """The losses that Megatron logs, by step."""
    import megatron_on_cpu
    import packed_attention
    import pretrain_minimal
    from megatron.core.datasets import utils
    from megatron.training import training

    def config_of(args: Any) -> Any:  # what a CPU lacks: Transformer Engine's attention
        config = original(args)
        config.transformer_layer_spec = packed_attention.layer_spec
        return config

    original, pretrain_minimal.gpt_config_from_args = pretrain_minimal.gpt_config_from_args, config_of  # type: ignore[attr-defined]
    megatron_on_cpu.prepare_training()
    utils.compile_helpers = lambda: None
    logged: list[float] = []
    training_log = training.training_log

    def catch(loss_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        logged.extend(float(value) for name, value in loss_dict.items() if name == "pg_loss")
        return training_log(loss_dict, *args, **kwargs)

    training.training_log = catch
    sys.argv = ["pretrain_minimal.py", *MODEL.split(), *DATA.split(), *TRAINING.split(), *flags]
    pretrain_minimal.main()
    return logged


def test_it_trains_and_saves(tmp_path: Path) -> None:
    flags = ["--loss-aggregation", "prompt_mean", "--save", str(tmp_path), "--save-interval", "2"]
    (losses,) = run_ranks(1, train, flags, timeout_s=300)
    assert len(losses) == 2
    assert list(tmp_path.glob("iter_*2"))
    cut = ["--loss-aggregation", "prompt_mean", "--context-parallel-size", "2"]
    assert run_ranks(2, train, cut, timeout_s=300)[-1] == pytest.approx(losses, rel=1e-4, abs=1e-6)
