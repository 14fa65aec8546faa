"""Megatron-Bridge from its own start: BRIDGE_PATH=~/Megatron-Bridge/src.

Real: `recipes/bridge_grpo.py` as the page calls it, Bridge's `ConfigContainer` with its checks, `pretrain`, its `setup`
with groups, the recipe's data and the optimizer, its `train` with evaluations between the steps and a checkpoint at the
end, and another launch of it all from that checkpoint. Stubbed: NVRx, ModelOpt, Hugging Face's files, the count of
operations, and the model, a table of losses. Bridge has no sleep.
"""

import contextlib
import dataclasses
import importlib
import io
import itertools
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from bridge_batches import clipped_samples, grpo_batches, of_entries
from checkouts import BRIDGE, Settings, checkout, record_errors, stand_in
from pages import code_of
from ranks import run_ranks
from ray_workers import lines_of, nothing
from start_stages import ADAM, LEARNING_RATE, Launch, after_step, errors_of_stages, keeping_gradients, record_stages
from table_step import table_chunk
from world import CP, DP

pytestmark = pytest.mark.slow

_TRAINING = "megatron.bridge.training"
_REAL = tuple(name for name in BRIDGE.stand_ins if name.startswith(_TRAINING) and not name.endswith("flop_utils"))
ENGINE = dataclasses.replace(
    BRIDGE,
    replaced=("transformers",),  # another version than ms-swift's
    stand_ins=tuple(name for name in BRIDGE.stand_ins if name not in _REAL),
)
MICROBATCHES = 3


def config_of(per_token: bool, folder: str, steps: int) -> Any:
    """As one of Bridge's recipes makes it, for a model that is a table."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer import TransformerConfig

    configs = importlib.import_module(f"{_TRAINING}.config")
    tokenizers = importlib.import_module(f"{_TRAINING}.tokenizers.config")

    def provide_distributed_model(ddp_config: Any, **_: Any) -> list[Any]:
        return [DistributedDataParallel(model, ddp_config, table_chunk(of_entries()[0].tolist(), model))]

    model: Any = TransformerConfig(
        num_layers=1, hidden_size=4, num_attention_heads=1, use_cpu_initialization=True, context_parallel_size=CP,
        calculate_per_token_loss=per_token,
    )  # fmt: skip
    model.provide_distributed_model, model.finalize = provide_distributed_model, lambda: None
    model.seq_length, model.vocab_size, model.make_vocab_size_divisible_by = 8, 100, 1
    return configs.ConfigContainer(
        train=configs.TrainingConfig(
            train_iters=steps, micro_batch_size=1, global_batch_size=DP * MICROBATCHES, exit_signal_handler=False
        ),
        validation=configs.ValidationConfig(eval_iters=1, eval_interval=1),
        model=model, optimizer=configs.OptimizerConfig(lr=LEARNING_RATE, min_lr=LEARNING_RATE, **ADAM), dataset=None,
        scheduler=configs.SchedulerConfig(
            lr_decay_style="constant", start_weight_decay=0.0, end_weight_decay=0.0, override_opt_param_scheduler=True
        ),
        logger=configs.LoggerConfig(),
        checkpoint=configs.CheckpointConfig(save=folder, load=folder, save_interval=2),
        tokenizer=tokenizers.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=100),
        dist=configs.DistributedInitConfig(distributed_backend="gloo", use_decentralized_pg=False),
        ddp=configs.DistributedDataParallelConfig(),
    )  # fmt: skip


def stock_step(iterator: Any, model: Any) -> Any:
    """The recipe's loss in a user's own forward step, reduced by Bridge's own function."""
    from megatron.core import mpu
    from recipes import bridge_grpo

    losses = importlib.import_module(f"{_TRAINING}.losses")
    batch = next(iterator)
    columns = {name: batch[name] for name in bridge_grpo.COLUMNS} | {"mask": torch.stack(batch["loss_masks"]).float()}
    rank, halves = mpu.get_context_parallel_rank(), {name: rows.chunk(2 * CP, 1) for name, rows in columns.items()}
    local = {name: torch.cat([parts[rank], parts[-1 - rank]], 1) for name, parts in halves.items()}
    reduce = losses.create_masked_next_token_loss_function(local["mask"], False, False)

    def loss_func(loss: torch.Tensor) -> Any:
        ratio, advantages = (-loss - local["old_log_probs"]).exp(), local["advantages"]
        return reduce(-torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages))

    return model(local["tokens"], local["positions"], None, labels=local["labels"]), loss_func


def start(
    root: str, per_token: bool, ours: bool, folder: str, steps: int
) -> tuple[list[torch.Tensor], list[float], str]:
    """On a rank, as torchrun starts a user's script."""
    stand_in(ENGINE, root)
    setup = importlib.import_module(f"{_TRAINING}.setup")
    for name in ("nvidia_resiliency_ext", "nvidia_resiliency_ext.inprocess"):
        sys.modules[name] = ModuleType(name)
    vars(sys.modules["nvidia_resiliency_ext.inprocess"])["CallWrapper"] = object
    kept, losses = list[Any](), list[float]()
    own_setup, evaluation = setup.setup_optimizer, importlib.import_module(f"{_TRAINING}.eval")
    own_evaluate = evaluation.evaluate

    def setup_optimizer(*args: Any, **options: Any) -> Any:
        optimizer, scheduler = own_setup(*args, **options)
        kept.append(keeping_gradients(optimizer, options["model"][0]))
        return optimizer, scheduler

    def evaluate(*args: Any, **options: Any) -> Any:
        results = own_evaluate(*args, **options)
        losses.extend(float(loss) for loss in results[0].values())
        return results

    vars(evaluation)["evaluate"] = evaluate
    initialize = importlib.import_module(f"{_TRAINING}.initialize")
    vars(initialize)["compile_helpers"] = nothing  # of datasets
    vars(setup)["initialize_megatron"] = partial(initialize.initialize_megatron, allow_no_cuda=True)
    vars(setup)["setup_optimizer"] = setup_optimizer
    training = importlib.import_module(f"{_TRAINING}.train")
    for module in training, evaluation:
        vars(module)["get_tensor_shapes_adjust_fn_for_distillation"] = nothing  # of ModelOpt
    of_model: Any = {"resolve_global_flops_runtime_stats": lambda *_, **__: Settings()}
    of_model |= {"num_floating_point_operations": lambda *_, **__: 0}
    vars(training)["flop_utils"] = SimpleNamespace(**of_model)
    from megatron.core import mpu
    from recipes import bridge_grpo

    class WithValidation(bridge_grpo.Rollouts):
        def build_datasets(self, context: Any) -> Any:
            train, *_ = super().build_datasets(context)
            return train, self.read(mpu.get_data_parallel_rank()), None

    vars(bridge_grpo)["Rollouts"] = WithValidation
    sys.modules["bridge_grpo"] = bridge_grpo
    (shown,) = code_of("engines/bridge.md")
    names = {
        "config": config_of(per_token, folder, steps),
        "read": lambda dp_rank: itertools.cycle(grpo_batches(dp_rank)),
    }
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        if ours:
            exec(shown, names)
        else:
            names["config"].dataset = bridge_grpo.Rollouts(read=names["read"])
            importlib.import_module(f"{_TRAINING}.pretrain").pretrain(names["config"], stock_step)
    return list(kept[0].gradients), losses, printed.getvalue()


def value_of(table: torch.Tensor) -> tuple[float, float]:
    """Of the step's loss, and its scale."""
    samples, _ = clipped_samples(table)
    loss, scale = (function("prompt_mean", samples, None) for function in (oracle.step_loss, oracle.step_scale))
    return float(loss), float(scale)


def gradient_at(table: torch.Tensor) -> torch.Tensor:
    samples, factor = clipped_samples(table)
    return torch.cat([*oracle.step_gradient("prompt_mean", samples, None), torch.zeros(1)]) * factor


def launched(per_token: bool, ours: bool, folder: Path, steps: int) -> tuple[Launch, float]:
    """With the loss of its first evaluation; the lines are those of rank 0."""
    by_rank = run_ranks(DP * CP, start, checkout(BRIDGE), per_token, ours, str(folder), steps)
    gradients, losses, printed = zip(*by_rank, strict=True)
    assert ours or not any("aggregation proved" in of_rank for of_rank in printed)
    evaluated, *_ = next(of_rank for of_rank in losses if of_rank)
    return Launch(list(gradients), lines_of(printed[0])), evaluated


@pytest.mark.parametrize("per_token", [False, True])
def test_pretrain_with_the_recipe(per_token: bool, record_property: Any, tmp_path: Path) -> None:
    """Two steps, each with an evaluation after it, and another launch for a third from their checkpoint."""
    table = of_entries()[0]
    own, _ = launched(per_token, False, tmp_path / "own", 2)
    errors_of_stages([own], DP * CP, gradient_at, table).check(is_ours=False)
    launches, losses = zip(*(launched(per_token, True, tmp_path / "ours", steps) for steps in (2, 3)), strict=True)
    for launch in launches:
        print(*launch.lines, sep="\n")
        assert any(line.startswith("megatron_rl_loss: prompt_mean") for line in launch.lines)
        assert any("aggregation proved" in line for line in launch.lines)
    value, scale = value_of(after_step(table, gradient_at(table)))
    of_stages = errors_of_stages(launches, DP * CP, gradient_at, table)
    of_stages.check()
    setting = "started: `pretrain`, prompt mean" + ", per-token loss" * per_token
    record_errors(record_property, BRIDGE, setting, ours=max(of_stages.first, of_stages.woken))
    stages = of_stages._replace(evaluated=abs(losses[0] - value) / scale, woken=None)
    record_stages(record_property, BRIDGE, "`evaluate`", stages)
