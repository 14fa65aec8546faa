"""Importing this module guards verl by `megatron_rl_loss.engines.verl.install`, for ``VERL_USE_EXTERNAL_MODULES``.

verl imports it in every process, before anything else of verl is used there. With ``model.external_lib`` alone only the
driver and the actor's workers import it. The critic's workers get their loss from the driver, and import it then.
"""

import importlib
from typing import Any

from megatron_rl_loss.engines.verl import install

install()
#: What pickle looks for in a worker that gets the critic's loss: see `install`.
value_loss: Any = importlib.import_module("verl.workers.utils.losses").value_loss
