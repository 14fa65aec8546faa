"""Importing this module guards verl by `megatron_rl_loss.engines.verl.install`: for ``model.external_lib``.

verl imports it in every worker, before its model is made.
"""

from megatron_rl_loss.engines.verl import install

install()
