"""A worker of AReaL, as its scheduler starts one, on a CPU: in the place of ``areal.infra.rpc.rpc_server``."""

import importlib
import os

import megatron_on_cpu

megatron_on_cpu.install()

if __name__ == "__main__":
    importlib.import_module("ray_workers").prepare("test_start_areal", os.environ["AREAL_PATH"])
    importlib.import_module("areal.infra.rpc.rpc_server").main()
