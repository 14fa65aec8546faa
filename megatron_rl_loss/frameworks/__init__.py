"""Adapters for engines that call the loss themselves: one module per engine, whose path is what users type.

Importing one imports no engine but Megatron.
"""
