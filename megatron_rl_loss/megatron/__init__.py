"""For launches under Megatron: `LossAggregation` aggregates the policy loss of a training run as its flags ask.

It hands `Microbatch` objects to the loss function, whose `loss` gets past Megatron's scaling. `OutputHead` and
`ForwardPass` make log-probs; all of it needs Megatron-Core. Its names are importable from `megatron_rl_loss`.
"""

try:
    import megatron.core  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"megatron_rl_loss.megatron needs Megatron-Core: {error}. pip install 'megatron-rl-loss[megatron]', "
        "or put your own checkout on PYTHONPATH; the rest of megatron_rl_loss works without it."
    ) from error

from megatron_rl_loss import refuse_names

__getattr__ = refuse_names(__name__)
