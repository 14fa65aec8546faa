"""Importing this module puts `megatron_rl_loss.frameworks.verl.agg_loss` into verl: for ``model.external_lib``.

verl imports it in every worker, before its model is made.
"""

from megatron_rl_loss.frameworks.verl import install

install()
