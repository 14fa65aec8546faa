"""The recipes of pretrain scripts train through the real `pretrain`, and give the same in other layouts."""

import sys
from typing import Any

import pytest
from pages import commands_of
from ranks import run_ranks
from repository import ROOT

pytestmark = pytest.mark.slow

#: The page's launch line, but for the mode and what a CPU has not.
LAUNCH = next(line for line in commands_of((ROOT / "docs/recipes.md").read_text()) if "--num-layers" in line)
FLAGS = LAUNCH.split()[LAUNCH.split().index("--num-layers") :]
ON_A_CPU = """--transformer-impl local --no-persist-layer-norm --no-rope-fusion --no-masked-softmax-fusion
    --no-gradient-accumulation-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --distributed-backend gloo
    --use-cpu-initialization --attention-dropout 0 --hidden-dropout 0 --padded-vocab-size 32 --disable-bias-linear
    --train-iters 2"""
ATTENTION = {"pretrain_packed": "packed_attention", "pretrain_bshd": "row_attention"}
ROWS = {"pretrain_packed": "1", "pretrain_bshd": "2"}  # of a micro-batch


def train(recipe: str, flags: list[str]) -> list[dict[str, float]]:
    """What Megatron logs, by step."""
    import importlib

    import megatron_on_cpu
    from megatron.core.datasets import utils
    from megatron.training import training

    script = importlib.import_module(f"recipes.{recipe}")
    attention = importlib.import_module(ATTENTION[recipe])

    def config_of(args: Any) -> Any:  # what a CPU lacks: Transformer Engine's attention
        config = original(args)
        config.transformer_layer_spec = attention.layer_spec
        return config

    original, script.gpt_config_from_args = script.gpt_config_from_args, config_of  # type: ignore[attr-defined]
    megatron_on_cpu.prepare_training()
    utils.compile_helpers = lambda: None
    logged: list[dict[str, float]] = []
    training_log = training.training_log

    def catch(loss_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if "pg_loss" in loss_dict:
            logged.append({"pg_loss": float(loss_dict["pg_loss"]), "grad_norm": float(args[6])})
        return training_log(loss_dict, *args, **kwargs)

    training.training_log = catch
    words = [word for word in FLAGS if word != "--bf16"]
    words += [*ON_A_CPU.split(), "--micro-batch-size", ROWS[recipe], *flags]
    sys.argv = [f"{recipe}.py", *words]
    script.main()
    return logged


@pytest.mark.parametrize("recipe", ATTENTION)
def test_it_trains_alike_in_every_layout(recipe: str) -> None:
    mode = ["--loss-aggregation", "prompt_mean"]
    (alone,) = run_ranks(1, train, recipe, mode, timeout_s=300)
    assert len(alone) == 2
    assert all(step["grad_norm"] > 1e-3 for step in alone)
    for flags in (["--context-parallel-size", "2"], ["--tensor-model-parallel-size", "2", "--sequence-parallel"]):
        for step, expected in zip(run_ranks(2, train, recipe, [*mode, *flags], timeout_s=300)[-1], alone, strict=True):
            assert step == pytest.approx(expected, rel=1e-4, abs=1e-6)
    (other,) = run_ranks(1, train, recipe, ["--loss-aggregation", "token_mean"], timeout_s=300)
    assert (other[0] == pytest.approx(alone[0], rel=1e-4)) == (recipe == "pretrain_packed")  # there all masks are alike
