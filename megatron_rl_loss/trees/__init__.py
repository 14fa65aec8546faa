"""Samples that share prefixes: the layout, packs of it, the edges that are read, attention, and what a model must be.

Users import public names from `megatron_rl_loss` itself.
"""

from megatron_rl_loss import refuse_names

__getattr__ = refuse_names(__name__)
