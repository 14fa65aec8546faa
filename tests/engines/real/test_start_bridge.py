"""Megatron-Bridge from its own start: BRIDGE_PATH=~/Megatron-Bridge/src.

Real: `recipes/bridge_grpo.py` as the page calls it, Bridge's `ConfigContainer` with its checks, `pretrain`, its `setup`
with groups and the recipe's data, its `train` up to the last step. Stubbed: NVRx, Hugging Face's files, the count of
operations, the optimizer, which keeps gradients, and the model, a table of losses.
"""

import contextlib
import dataclasses
import importlib
import io
import sys
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from bridge_batches import clipped_samples, grpo_batches, of_entries
from checkouts import BRIDGE, Settings, checkout, record_errors, stand_in
from logit_table import KeepsGradients
from pages import code_of
from ranks import run_ranks
from table_step import relative_error, table_chunk
from world import CP, DP

pytestmark = pytest.mark.slow

_TRAINING = "megatron.bridge.training"
_REAL = tuple(name for name in BRIDGE.stand_ins if name.startswith(_TRAINING) and not name.endswith("flop_utils"))
ENGINE = dataclasses.replace(
    BRIDGE,
    replaced=("transformers",),  # another version than ms-swift's
    stand_ins=tuple(name for name in BRIDGE.stand_ins if name not in _REAL),
)
MICROBATCHES, STEPS = 3, 2
TOLERANCE = 2e-6


def config_of(per_token: bool) -> Any:
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
            train_iters=STEPS, micro_batch_size=1, global_batch_size=DP * MICROBATCHES, exit_signal_handler=False
        ),
        validation=configs.ValidationConfig(eval_iters=0),
        model=model, optimizer=configs.OptimizerConfig(lr=0.0), scheduler=configs.SchedulerConfig(), dataset=None,
        logger=configs.LoggerConfig(), checkpoint=configs.CheckpointConfig(save=None),
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


def start(root: str, per_token: bool, ours: bool) -> tuple[list[torch.Tensor], str]:
    """On a rank, as torchrun starts a user's script: the gradients of its steps, and what it printed."""
    stand_in(ENGINE, root)
    setup = importlib.import_module(f"{_TRAINING}.setup")
    for name in ("nvidia_resiliency_ext", "nvidia_resiliency_ext.inprocess"):
        sys.modules[name] = ModuleType(name)
    vars(sys.modules["nvidia_resiliency_ext.inprocess"])["CallWrapper"] = object
    kept = list[Any]()

    def setup_optimizer(model: list[Any], **_: Any) -> Any:
        kept.append(KeepsGradients(model[0]))
        kept[0].param_groups, kept[0].scale_loss = [{"lr": 0.0, "is_decoupled_lr": False}], None
        return kept[0], SimpleNamespace(step=lambda increment: None)

    initialize = importlib.import_module(f"{_TRAINING}.initialize")
    vars(initialize)["compile_helpers"] = lambda: None  # of datasets
    vars(setup)["initialize_megatron"] = partial(initialize.initialize_megatron, allow_no_cuda=True)
    vars(setup)["setup_optimizer"] = setup_optimizer
    training = importlib.import_module(f"{_TRAINING}.train")
    vars(training)["get_tensor_shapes_adjust_fn_for_distillation"] = lambda *_, **__: None  # of ModelOpt
    of_model: Any = {"resolve_global_flops_runtime_stats": lambda *_, **__: Settings()}
    of_model |= {"num_floating_point_operations": lambda *_, **__: 0}
    vars(training)["flop_utils"] = SimpleNamespace(**of_model)
    from recipes import bridge_grpo

    sys.modules["bridge_grpo"] = bridge_grpo
    (shown,) = code_of("engines/bridge.md")
    names = {"config": config_of(per_token), "read": lambda dp_rank: iter(grpo_batches(dp_rank) * STEPS)}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        if ours:
            exec(shown, names)
        else:
            names["config"].dataset = bridge_grpo.Rollouts(read=names["read"])
            importlib.import_module(f"{_TRAINING}.pretrain").pretrain(names["config"], stock_step)
    return list(kept[0].gradients), printed.getvalue()


@pytest.mark.parametrize("per_token", [False, True])
def test_pretrain_with_the_recipe(per_token: bool, record_property: Any) -> None:
    samples, factor = clipped_samples()
    right = torch.cat([*oracle.step_gradient("prompt_mean", samples, None), torch.zeros(1)]) * factor
    for ours in (False, True):
        by_rank = run_ranks(DP * CP, start, checkout(BRIDGE), per_token, ours)
        errors = [relative_error(gradient, right) for gradients, _ in by_rank for gradient in gradients]
        assert len(errors) == STEPS * DP * CP
        assert max(errors) < TOLERANCE if ours else min(errors) > 1e-2
        assert ("megatron_rl_loss: prompt_mean" in by_rank[0][1] and "aggregation proved" in by_rank[0][1]) == ours
    setting = "started: `pretrain`, prompt mean" + ", per-token loss" * per_token
    record_errors(record_property, BRIDGE, setting, ours=max(errors))
