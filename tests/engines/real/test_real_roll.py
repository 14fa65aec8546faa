"""ROLL's own rows, masks, loss, scaling and schedule call with our factors, from a checkout: ROLL_PATH=~/ROLL.

Real: `postprocess_generate`, `get_sample_level_mask`, `MegatronTrainStrategy.train_step` with its dynamic
micro-batches, its counts and its log-probs, `ActorWorker.loss_func`, `DataProto`; Megatron's schedule and DDP. The
model is a table of logits. Replaced: Ray, TensorDict, the optimizer, which keeps what Megatron hands it.
"""

import contextlib
import importlib
import io
import logging
import runpy
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bigram_step import (
    BETA,
    CLIP_HIGH,
    CLIP_LOW,
    LENGTH,
    assert_exact,
    bigram_model,
    compare,
    expected,
    k3,
)
from checkouts import ROLL, Settings, checkout, load, stand_in
from plants import MORE_TERMS, Plant, assert_stops, assert_unproved, planted, record_plant
from ranks import run_ranks
from replacements import aggregated
from roll_rows import LEFT, rows_of_rank
from table_step import relative_error, start
from torch import Tensor

from megatron_rl_loss.engines import token_mean

MODES: dict[str, dict[str, Any]] = {
    "token_mean": {},
    "sample_mean": {"units": "active", "kl": "token_mean"},
    "prompt_mean": {"kl": "token_mean"},
    "constant": {"divisor": 40.0, "kl": "token_mean"},
    "token_sum": {"divisor": 25.0, "kl": "token_mean"},
}

pytestmark = pytest.mark.slow


class Rows(dict[str, Tensor]):
    """A stand-in for TensorDict with the methods that ROLL calls."""

    def __init__(self, source: Any, batch_size: Any = None) -> None:
        super().__init__(source)

    @property
    def batch_size(self) -> list[int]:
        return [len(self)]

    def __len__(self) -> int:
        return len(next(iter(self.values())))

    def __getitem__(self, key: Any) -> Any:
        return (
            super().__getitem__(key)
            if isinstance(key, str)
            else Rows({name: column[key] for name, column in self.items()})
        )


def wrap_groups(root: str) -> None:
    """As ROLL's worker does with ``offload_nccl: true``, before it makes any group."""
    stand_in(ROLL, root)
    sys.modules["roll.utils.logging"] = ModuleType("roll.utils.logging")
    vars(sys.modules["roll.utils.logging"])["get_logger"] = logging.getLogger
    runpy.run_path(str(Path(root, "roll/utils/offload_nccl.py")))["monkey_patch_torch_dist"]()
    del sys.modules["roll.utils.logging"]


def load_with_tensordict(root: str, *modules: str) -> list[Any]:
    for name in ("tensordict", "tensordict.utils", "mcore_adapter"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    vars(sys.modules["tensordict"]).update(TensorDict=Rows, set_lazy_legacy=lambda _: SimpleNamespace(set=lambda: None))
    vars(sys.modules["tensordict.utils"]).update(LinkedList=list)
    vars(sys.modules["mcore_adapter"]).update(
        TrainingArguments=Settings, __path__=[str(Path(root, "mcore_adapter/src/mcore_adapter"))]
    )
    return load(ROLL, root, "roll.distributed.strategy.megatron_strategy", *modules)


def train(root: str, cp: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """On a rank: the error of each case's gradient. The first case may ask for ROLL's ``offload_nccl``."""
    if cases[0].get("offload_nccl"):
        wrap_groups(root)
    state = start(cp=cp)
    group = state.get_data_parallel_group()
    assert (type(group).__name__ == "ReloadableProcessGroup") == bool(cases[0].get("offload_nccl"))
    strategies, protocol, functionals, workers = load_with_tensordict(
        root, "roll.distributed.scheduler.protocol", "roll.utils.functionals", "roll.pipeline.rlvr.actor_worker"
    )
    corrections: Any = sys.modules["roll.utils.train_infer_corrections"]
    corrections.compute_segment_masked_mean = lambda values, mask: values
    strategies.collate_fn_to_dict_list = lambda rows: {name: [row[name] for row in rows] for name in rows[0]}
    # It changes logits in place, unless they are of half precision: rows that are packed are views of one tensor.
    log_probs_of = strategies.vocab_parallel_logprobs
    strategies.vocab_parallel_logprobs = lambda logits, *args, **options: log_probs_of(logits.clone(), *args, **options)
    from megatron.core.pipeline_parallel import get_forward_backward_func

    results = []
    for case in cases:
        model, kept = bigram_model(), list[Tensor]()

        def step(model: Any = model, kept: list[Tensor] = kept) -> Any:
            kept.append(model.module.losses.main_grad.clone())
            return True, 0.0, None

        config = Settings(
            loss_agg_mode=case.get("loss_agg_mode", "token-mean"), importance_sampling="token", use_pg_clip_range=True,
            pg_clip_low=CLIP_LOW, pg_clip_high=CLIP_HIGH, train_infer_correction=Settings(is_weight=Settings()),
            enable_old_logprobs_recompute=True, use_kl_loss=True, kl_loss_coef=BETA, rl_loss_coef=1.0,
            entropy_loss_coef=0.0, num_return_sequences_in_group=case.get("group_size", 8),
        )  # fmt: skip
        vars(config).update(case.get("config", {}))
        scales = case.get("apply_loss_scale", True)
        of_worker = Settings(use_dynamic_batching_in_train=True, apply_loss_scale=scales, name="actor_train")
        worker, strategy = object.__new__(workers.ActorWorker), object.__new__(strategies.MegatronTrainStrategy)
        model.get_batch_on_this_cp_rank = lambda batch, dim3_keys: batch
        chunks = type("Models", (list,), {"train": lambda _: None, "get_models": lambda self: list(self)})([model])
        chunks.config = model.config
        vars(worker).update(pipeline_config=config, strategy=strategy)
        vars(strategy).update(
            model=chunks, models_unwrapped=[model], worker=worker, worker_config=of_worker, seq_length=LENGTH + LEFT,
            forward_backward_func=get_forward_backward_func(), optimizer=Settings(step=step, zero_grad=lambda: None),
            scheduler=Settings(step=lambda: None), load_states=lambda **_: None, offload_states=lambda **_: None,
            megatron_train_args=Settings(cross_entropy_loss_fusion=False),
            use_sequence_packing=bool(case.get("packed")), enable_router_replay=False, is_multimodal=False,
        )  # fmt: skip
        data = rows_of_rank(state.get_data_parallel_rank(), state.get_data_parallel_world_size(), protocol, functionals)
        if "ids" in case:
            of_rank = case["ids"][state.get_data_parallel_rank() :: state.get_data_parallel_world_size()]
            data.non_tensor_batch["traj_group_id"] = np.array([f"group {number}" for number in of_rank], dtype=object)
        if case.get("images"):
            data.non_tensor_batch["multi_modal_inputs"] = np.array([{} for _ in range(len(data))], dtype=object)
        model.zero_grad_buffer()
        with aggregated(type(strategy), case):
            strategy.train_step(batch=data, loss_func=worker.loss_func)
        assert torch.equal(data.batch["advantages"], rows_of_rank(
            state.get_data_parallel_rank(), state.get_data_parallel_world_size(), protocol, functionals
        ).batch["advantages"])  # fmt: skip
        _, by_entry, _ = expected(case["mode"], case["settings"], kl=k3)
        results.append({"errors": {"gradient": relative_error(kept[0].view_as(by_entry), by_entry)}})
    return results


def test_every_mode_is_exact(record_property: Any) -> None:
    cases = [{"mode": mode, "settings": settings} for mode, settings in MODES.items()]
    assert_exact(record_property, train, ROLL, cases, worlds=[(1, 1), (2, 1)])


def test_packed_rows_are_proved(record_property: Any) -> None:
    """ROLL then calls its loss function for each row."""
    case = {"mode": "prompt_mean", "settings": MODES["prompt_mean"], "packed": True}
    assert_exact(record_property, train, ROLL, [case], worlds=[(2, 1)])


def test_groups_that_roll_wraps(record_property: Any) -> None:
    case = {"mode": "prompt_mean", "settings": MODES["prompt_mean"], "offload_nccl": True}
    assert_exact(record_property, train, ROLL, [case], worlds=[(2, 1)])


def test_coefficients_and_the_engine_for_rollouts_are_no_faults() -> None:
    weight = Settings(enabled=True, weight_type="token", upper_bound=1.01)
    of_rollouts = {
        "enable_old_logprobs_recompute": False,
        "train_infer_correction": Settings(is_weight=weight, filters=[]),
    }
    cases = [{"rl_loss_coef": 0.5, "entropy_loss_coef": 0.01}, of_rollouts]
    run_ranks(
        1, train, checkout(ROLL), 1, [{"mode": "sample_mean", "settings": {}, "config": config} for config in cases]
    )


def test_theirs_is_none_of_the_modes(record_property: Any) -> None:
    """ROLL's token mean includes tokens that the mask leaves out."""
    case = {"mode": "token_mean", "settings": {}, "setting": "token mean, masked tokens in responses"}
    ((own, _),) = compare(record_property, train, ROLL, [case], (2, 1))
    assert own["errors"]["gradient"] > 1e-2


def choose_strategies(root: str) -> tuple[str, str, str, str]:
    """On a rank, in a worker with an aggregation: ROLL's choice of its strategy, a critic's too; what others say."""
    strategies, workers = load_with_tensordict(root, "roll.pipeline.base_worker")
    of_fsdp: Any = ModuleType("roll.distributed.strategy.fsdp2_strategy")
    sys.modules[of_fsdp.__name__] = of_fsdp
    train_strategy = importlib.import_module("roll.distributed.strategy.strategy").TrainStrategy
    abstract: Any = {"__abstractmethods__": frozenset()}
    of_fsdp.FSDP2TrainStrategy = type("FSDP2TrainStrategy", (train_strategy,), {"__init__": lambda *_: None} | abstract)
    strategies.MegatronTrainStrategy.__init__ = lambda *_: None
    token_mean.aggregate(strategies.MegatronTrainStrategy, "prompt_mean")
    of = {
        name: Settings(worker_config=Settings(strategy_args=Settings(strategy_name=name)))
        for name in ("megatron_train", "mock_infer", "fsdp2_train")
    }
    chosen = workers.create_strategy(of["megatron_train"])
    critic: Any = object.__new__(workers.CriticWorker)
    critic.worker_config = of["fsdp2_train"].worker_config
    of_critic = workers.create_strategy(critic)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        workers.create_strategy(worker=of["mock_infer"])
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the text is compared in the test
        workers.create_strategy(of["fsdp2_train"])
    return type(chosen).__name__, type(of_critic).__name__, printed.getvalue(), str(refused.value)


def test_a_worker_that_trains_without_the_class_says_so() -> None:
    """A critic has no policy loss."""
    ((chosen, of_critic, printed, refused),) = run_ranks(1, choose_strategies, checkout(ROLL))
    assert (chosen, of_critic) == ("MegatronTrainStrategy", "FSDP2TrainStrategy")
    assert printed.startswith("megatron_rl_loss in ROLL worker 0: NOT IN FORCE: MockInferStrategy in a worker with")
    assert refused.startswith("FSDP2TrainStrategy in a worker with aggregate(MegatronTrainStrategy, ...): it would")


_STRATEGY, _WORKER = "roll/distributed/strategy/megatron_strategy.py", "roll/pipeline/rlvr/actor_worker.py"
PLANTS = [
    Plant("scaling doubled", {_STRATEGY: ("data.meta_info['loss_scale']\n", "data.meta_info['loss_scale'] * 2\n")}),
    Plant(
        "argument renamed",
        {
            _STRATEGY: (
                "loss_func: Callable):\n        self.model.train()",
                "loss: Callable):\n        self.model.train()",
            )
        },
        r"ROLL with MegatronTrainStrategy.train_step\(self, batch, loss\): this package expects",
    ),
    Plant(
        "log-probs by another function",
        {
            _STRATEGY: ("def op_compute_log_probs", "def op_log_probs"),
            _WORKER: ("op_compute_log_probs", "op_log_probs"),
        },
        "MegatronTrainStrategy.train_step called no policy loss, or was not called. Use ROLL 8eb27cc2",
    ),
    Plant(
        "counts of one rank",
        {_STRATEGY: ("(batch, dp_group=mpu.get_data_parallel_group())", "(batch, mpu.get_context_parallel_group())")},
        world=(2, 1),
    ),
    Plant("option renamed", {_WORKER: ("loss_agg_mode", "reduction")}, "loss_agg_mode=None", {"loss_agg_mode": None}),
    Plant(
        "loss not linear in advantages",
        {_WORKER: ('advantages = data.batch["advantages"]', 'advantages = data.batch["advantages"] ** 3')},
    ),
    Plant("KL penalty times 10", {_WORKER: ("+ kl_loss *", "+ 10 * kl_loss *")}, "token_mean on kl: tokens weigh 10 t"),
    Plant(
        "KL penalty added twice",
        {
            _WORKER: (
                "+ kl_loss * self.pipeline_config.kl_loss_coef",
                "+ sum([kl_loss * self.pipeline_config.kl_loss_coef] * 2)",
            )
        },
        "token_mean on kl: tokens weigh 2 times",
    ),
    Plant(
        "KL penalty of k2", {_WORKER: ('kl_penalty="k3"', 'kl_penalty="mse"')}, r"token_mean on kl: tokens weigh 0\.9"
    ),
    Plant(
        "KL penalty against old log-probs",
        {_WORKER: ("log_probs_base=ref_log_probs", "log_probs_base=old_log_probs")},
        "token_mean on kl: tokens weigh 0 times",
    ),
    Plant(
        "KL penalty of masked tokens",
        {_WORKER: ('action_mask=final_response_mask, kl_penalty="k3"', 'action_mask=response_mask, kl_penalty="k3"')},
        "token_mean on kl: masked tokens weigh up to 1 times",
    ),
    Plant(
        "entropy bonus of the other sign",
        {_WORKER: ("total_loss - entropy_loss", "total_loss + entropy_loss")},
        "token_mean on entropy: tokens weigh -1 times",
        {"config": {"entropy_loss_coef": 0.01, "rl_loss_coef": 0.5}},
    ),
]
RETURNED = "return total_loss, pg_metrics"
ADDED = [
    Plant(
        "a loss of logits added beside",
        {_WORKER: (RETURNED, "return total_loss + 1e-6 * output_tensor.logsumexp(-1).square().mean(), pg_metrics")},
    ),
    Plant(
        "a KL penalty without a coefficient",
        {_WORKER: ("if self.pipeline_config.use_kl_loss:", "if True:")},
        case={"config": {"use_kl_loss": False}},
    ),
    Plant(
        "KL penalty of the other direction",
        {
            _WORKER: (
                "log_probs=log_probs, log_probs_base=ref_log_probs",
                "log_probs=ref_log_probs, log_probs_base=log_probs",
            )
        },
    ),
]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.fault)
def test_a_fault_stops_all_ranks(plant: Plant, record_property: Any, tmp_path: Any) -> None:
    assert_stops(record_property, ROLL, train, plant, tmp_path)


@pytest.mark.parametrize("plant", ADDED, ids=lambda plant: plant.fault)
def test_a_further_term_is_not_proved(plant: Plant, record_property: Any, tmp_path: Any) -> None:
    plant = plant._replace(match=MORE_TERMS)
    assert_unproved(record_property, ROLL, train, plant, tmp_path)


def test_a_schedule_that_was_not_measured_is_no_proof(record_property: Any, tmp_path: Any) -> None:
    """ROLL fetched the schedule before the adapter, and kept it."""
    schedules = "__import__('megatron.core.pipeline_parallel.schedules', fromlist=[''])"
    fetched = f"{schedules}.forward_backward_no_pipelining.__wrapped__("
    case = {"mode": "sample_mean", "settings": {"kl": "token_mean"}, "outcome": "not proved"}
    root = planted(ROLL, tmp_path, {_STRATEGY: ("self.forward_backward_func(", fetched)})
    run_ranks(1, train, root, 1, [case])
    record_plant(record_property, ROLL, "a schedule from elsewhere", "says that it is not proved")
