"""Importing this module guards verl by `megatron_rl_loss.frameworks.verl.install`: for ``model.external_lib``.

verl imports it in every worker, before its model is made.
"""

from megatron_rl_loss.frameworks.verl import install

install()
