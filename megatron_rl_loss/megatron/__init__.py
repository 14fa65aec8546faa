"""The Megatron adapter: `LossAggregation` aggregates the policy loss of a launch as its flags ask.

`LossAggregation` hands `Microbatch` objects to the loss function; their method `loss` cancels Megatron's scaling.
`OutputHead` and `ForwardPass` compute log-probs. This folder needs Megatron-Core. Import its public names from
`megatron_rl_loss`.
"""

try:
    import megatron.core  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"megatron_rl_loss.megatron needs Megatron-Core ({error}). Run pip install 'megatron-rl-loss[megatron]', "
        "or put your own checkout on PYTHONPATH; the rest of megatron_rl_loss works without Megatron."
    ) from error

from megatron_rl_loss import refuse_names

__getattr__ = refuse_names(__name__)
