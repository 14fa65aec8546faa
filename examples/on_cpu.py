"""Try a Megatron pretrain script of your own without a GPU: put this file before the script in its launch line.

    torchrun --nproc-per-node 2 on_cpu.py pretrain_packed.py --context-parallel-size 2 <your flags>

The script runs on CPU and gloo (`megatron_on_cpu.py`), on Megatron's local layers with `packed_attention.py`, for
packed sequences and for rows, with RMSNorm and without dropout. The run is slow, and no test of GPU kernels.
"""

import os
import runpy
import sys
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import megatron_on_cpu

megatron_on_cpu.install()  # before megatron is imported

import packed_attention
import torch
from megatron.core.datasets import utils as dataset_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.training import argument_utils
from torch import Tensor

from megatron_rl_loss import packed_seq_params

#: What a CPU has not: Transformer Engine, fused kernels, NCCL.
WITHOUT_GPU = """--transformer-impl local --no-persist-layer-norm --no-rope-fusion --no-masked-softmax-fusion
    --no-gradient-accumulation-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --distributed-backend gloo
    --use-cpu-initialization --attention-dropout 0 --hidden-dropout 0 --disable-bias-linear --cp-comm-type all_gather"""
FLAGS = WITHOUT_GPU.split()


class Attention(packed_attention.PackedAttention):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run packed sequences at once, and rows, [local tokens, rows, heads, channels], one by one."""
        if kwargs.get("packed_seq_params") is not None:
            return super().forward(query, key, value, *args, **kwargs)
        bounds = torch.tensor([0, len(query) * self.cp_group.size()], dtype=torch.int32)
        packed = packed_seq_params(bounds)
        rows = zip(query.unbind(1), key.unbind(1), value.unbind(1), strict=True)
        return torch.stack([super(Attention, self).forward(*row, None, packed_seq_params=packed) for row in rows], 1)


def layer_spec(model_config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """`packed_attention.layer_spec` that takes rows, too."""
    spec = packed_attention.layer_spec(model_config, vp_stage)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = Attention
    return spec


def prepare() -> None:
    """Make `gpt_config_from_args` ask for these layers, and `pretrain` start; before the script is imported."""
    original = argument_utils.gpt_config_from_args

    def gpt_config_from_args(args: Any, *more: Any, **settings: Any) -> Any:
        config = original(args, *more, **settings)
        config.transformer_layer_spec = layer_spec
        return config

    argument_utils.gpt_config_from_args = gpt_config_from_args
    megatron_on_cpu.prepare_training()
    dataset_utils.compile_helpers = lambda: None  # the wheel lacks its Makefile, and pretrain on rollouts its need


def main() -> None:
    if len(sys.argv) < 2 or not os.path.isfile(sys.argv[1]):
        raise SystemExit(f"usage: torchrun --nproc-per-node 2 {sys.argv[0]} YOUR_SCRIPT.py [MEGATRON FLAGS...]")
    sys.argv = [*sys.argv[1:], *FLAGS]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    prepare()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
