"""Features that the installed Megatron-Core lacks for a test: reasons of skips, which docs/support.md states too."""

import importlib.util
from pathlib import Path

import pytest


def _text(file: str) -> str:
    """The text of a file of the package `megatron`; empty for a missing file."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent.parent / file
    return path.read_text() if path.exists() else ""


_schedules, _hybrid = (_text(f"core/pipeline_parallel/{name}.py") for name in ("schedules", "hybrid_cp_schedule"))
_mtp, _packing = _text("core/transformer/multi_token_prediction.py"), _text("core/datasets/data_schedule.py")
_hybrid_block = _text("core/models/hybrid/hybrid_block.py")
_moe_of_hybrid = _hybrid_block.partition("LayerSymbols.MOE:")[2].partition("LayerSymbols.GDN")[0]
#: Of what a test needs: whether it is there, and what is said if not.
NEEDS: dict[str, list[tuple[bool, str]]] = {
    "pretrain": [(bool(_text("training/training.py")), "no megatron.training")],
    "pretrain_cfg_container": [
        ("def pretrain_cfg_container_from_args" in _text("training/argument_utils.py"), "pretrain takes no container")
    ],
    "hybrid pretrain": [
        ("def gpt_config_from_args" in _text("training/argument_utils.py"), "pretrain takes no config of a HybridModel")
    ],
    "experts in a hybrid's MTP": [
        (
            "is_mtp_layer" not in _moe_of_hybrid,
            "the log of MoE losses has one entry for a depth of multi-token prediction, whose layers are two,",
        )
    ],
    "HybridModel": [(bool(_text("core/models/hybrid/hybrid_model.py")), "no HybridModel")],
    "MuP": [("use_mup" in _text("core/transformer/transformer_config.py"), "no MuP")],
    "MTP": [
        ("_roll_tensor_packed_seq" in _mtp, "multi-token prediction refuses packed sequences"),
        ("num_tokens_safe" in _mtp, "multi-token prediction divides by 0 where a rank has no active token"),
    ],
    "changing groups": [
        ("_context_parallel: bool" in _text("core/parallel_state.py"), "no CP groups that change between micro-batches")
    ],
    "hybrid": [
        ("hybrid_context_parallel_forward_backward(" in _schedules, "no hybrid_context_parallel schedule"),
        (
            ("model_type, config)" in _hybrid) == ("output_tensor_grad, model_type, config):" in _schedules),
            "hybrid_context_parallel calls backward_step() with an argument that it does not take",
        ),
    ],
    "DefaultDynamicCPScheduler": [("class DefaultDynamicCPScheduler" in _packing, "no DefaultDynamicCPScheduler")],
    **{
        name: [(f'"{name}"' in _packing, f"wrap_data_iterator knows no scheduler {name}")]
        for name in ("dp_balanced", "default_dynamic_cp")
    },
    "scheduling pretrain": [("wrap_data_iterator(" in _text("training/training.py"), "pretrain runs no scheduler")],
}


def has(need: str) -> bool:
    return all(is_there for is_there, _ in NEEDS[need])


def skip_without(need: str) -> None:
    """Skip the test, with the first thing of a need that this Megatron-Core lacks."""
    for is_there, says in NEEDS[need]:
        if not is_there:
            pytest.skip(f"{says} in this megatron-core")
