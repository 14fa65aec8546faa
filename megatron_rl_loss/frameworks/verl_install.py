"""Importing this module puts `megatron_rl_loss.frameworks.verl.agg_loss` into verl: for ``model.external_lib``.

    actor_rollout_ref.model.external_lib=megatron_rl_loss.frameworks.verl_install
    critic.model.external_lib=megatron_rl_loss.frameworks.verl_install

verl imports it in every worker, before its model is made. Rank 0 says where it is active.
"""

import os

from megatron_rl_loss.frameworks.verl import install

installed = install()
if os.environ.get("RANK", "0") == "0":
    print(installed, flush=True)
