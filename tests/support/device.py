"""The device of tests marked `gpus`: the host, or with ``TEST_DEVICE=cuda`` a GPU."""

import os

DEVICE = "cuda" if os.environ.get("TEST_DEVICE") == "cuda" else "cpu"
