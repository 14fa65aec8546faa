"""Adapters for engines that call the loss themselves: one module per engine, which users name by its path.

Importing an adapter imports no engine but Megatron.
"""

from megatron_rl_loss import refuse_names

__getattr__ = refuse_names(__name__)
