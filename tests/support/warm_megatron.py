"""What the fork server imports before it forks ranks: the real Megatron stack, redirected to the CPU."""

import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"

import megatron_on_cpu

megatron_on_cpu.install()

import gpt_steps  # noqa: F401
import megatron.training  # noqa: F401
import packed_attention  # noqa: F401
import pretrain_grpo  # noqa: F401
import table_step  # noqa: F401

gc.collect()
gc.freeze()  # ranks share these pages as long as no collection of theirs goes through them
