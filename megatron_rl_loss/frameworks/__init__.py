"""Adapters for engines that call the loss themselves: one module per engine, whose path is what users type.

For launches of slime, miles, verl, SkyRL and Megatron-LM's own RL. Importing one imports no engine but Megatron.
"""
