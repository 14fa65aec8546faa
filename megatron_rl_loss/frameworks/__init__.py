"""Adapters for engines that call the loss themselves: one module per engine, which users name by its path.

Importing an adapter imports no engine but Megatron.
"""
