"""A Hugging Face checkpoint: Megatron-Bridge loads and saves it, a loop of your own trains it.

    bridge, model = load("Qwen/Qwen3-0.6B", tensor_model_parallel_size=2, context_parallel_size=2)
    schedule = get_forward_backward_func()
    values = own_loop.forward_backward(schedule, model, batches, own_loop.policy_loss, "prompt_mean")
    bridge.save_hf_pretrained(model, "trained")

Under torchrun, after `torch.distributed.init_process_group`. `import megatron.bridge` needs Transformer Engine.
"""

from typing import Any

from megatron.bridge import AutoBridge
from megatron.core.distributed import DistributedDataParallelConfig


def load(path: str, **settings: Any) -> tuple[Any, list[Any]]:
    """The bridge of a checkpoint, by name or folder, and its weights in Megatron's DistributedDataParallel.

    `settings` are fields of Megatron's `TransformerConfig` and override what the checkpoint's config says.
    """
    bridge = AutoBridge.from_hf_pretrained(path)
    provider = bridge.to_megatron_provider()
    for name, value in settings.items():
        setattr(provider, name, value)
    provider.finalize()
    provider.initialize_model_parallel(seed=0)
    return bridge, provider.provide_distributed_model(
        ddp_config=DistributedDataParallelConfig(), fp16=provider.fp16, bf16=provider.bf16
    )
