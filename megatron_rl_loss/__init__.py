"""Policy-gradient loss aggregation for Megatron-Core, exact in every parallel layout.

Every name that a user types is importable from here. Importing the package loads none of its folders, and no Megatron.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

#: Names by the module that defines them.
_HOMES = {
    "audit": ("check_loss", "compare_log_probs"),
    "audit.megatron": ("Audit",),
    "errors": ("BadBatchError", "ContractError"),
    "logprobs": ("log_probs_from_hidden", "log_probs_from_logits", "loss_from_hidden"),
    "losses": (),
    "megatron": (
        "LossAggregation",
        "OutputHead",
        "add_loss_aggregation_args",
        "from_first_tp_rank",
        "next_microbatch",
    ),
    "modes": (
        "Mode",
        "ModeInputs",
        "register_pg_loss_reducer",
        "resolve",
        "token_weights",
        "weights_column",
    ),
    "planning": ("plan_step",),
    "reduction": ("Metric", "Term", "fold_into_advantages", "make_pg_loss_reducer", "tap"),
    "step": (
        "Contiguous",
        "Gathered",
        "Layout",
        "Samples",
        "StepTotals",
        "Sum",
        "Units",
        "ZigzagBSHD",
        "ZigzagResponse",
        "ZigzagTHD",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        from megatron_rl_loss.errors import did_you_mean

        raise AttributeError(f"module {__name__!r} has no attribute {name!r}. {did_you_mean(name, __all__)}.")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
