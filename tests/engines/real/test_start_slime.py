"""slime from its own start: SLIME_PATH=~/slime, and Ray.

Real: slime's command line, placement groups, `RayTrainGroup`, the actor's `__init__`, `init`, `train`, `sleep` and
`wake_up` in Ray's workers with slime's own `ReloadableProcessGroup`, and all that a training step of theirs calls.
Stubbed: the GPU, the sampler, Hugging Face's config and tokenizer, weight transfer, and the model, which is a table of
logits whose optimizer keeps gradients.
"""

import dataclasses
import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkouts import SLIME, checkout, record_errors
from ranks import run_ranks
from ray_workers import gradients_of, local_ray
from slime_launches import (
    CP,
    DP,
    HOOKS,
    NOT_USED,
    STARTED,
    TOLERANCE,
    allow_offloading,
    data_of,
    error_of,
    group_type,
    model_and_optimizer,
    step_of_a_launch,
)  # fmt: skip

ray: Any = pytest.importorskip("ray")
pytestmark = pytest.mark.slow

ENGINE = dataclasses.replace(SLIME, stand_ins=(*SLIME.stand_ins, *NOT_USED))


def stub() -> None:
    """What a machine without GPU, sampler and checkpoint lacks."""
    import numpy as np

    cpu = torch.device("cpu")
    accelerator = importlib.import_module("slime.utils.accelerator")
    vars(accelerator)["_ACCELERATOR"] = SimpleNamespace(
        device=lambda index=None: cpu, device_type="cpu", current_device=lambda: cpu, set_device=lambda index: None,
        set_allocator_expandable_segments=lambda: False, synchronize=lambda *_: None, empty_cache=lambda: None,
        mem_get_info=lambda *_: (2**40, 2**40), memory_allocated=lambda *_: 0, memory_reserved=lambda *_: 0,
        communication_backend_name="gloo", is_available=lambda: True, visible_devices_env_key=lambda: "NONE",
        resolve_visible_device_id=int, communication_backend=lambda default: default, supports=lambda capability: False,
        manual_seed=lambda seed: None, distributed_device_id=lambda index=None: None,
    )  # fmt: skip
    actor = importlib.import_module("slime.backends.megatron_utils.actor")
    arguments = importlib.import_module("slime.backends.megatron_utils.arguments")
    no_checkpoint = SimpleNamespace(from_pretrained=lambda *_, **__: SimpleNamespace(vocab_size=100))
    for module in (actor, arguments):
        vars(module).update(AutoConfig=no_checkpoint, AutoTokenizer=no_checkpoint)
    initialize = importlib.import_module("slime.backends.megatron_utils.initialize")
    vars(initialize)["np"] = SimpleNamespace(__version__="1.26.4", random=np.random)  # the stack wants NumPy 1
    vars(actor)["UpdateWeightFromDistributed"] = lambda *_, **__: SimpleNamespace(pop_metrics=dict)
    backuper = SimpleNamespace(backup=lambda tag: None, restore=lambda tag: None, backup_tags={"actor"})
    vars(actor)["TensorBackuper"] = SimpleNamespace(create=lambda **_: backuper)
    vars(actor)["initialize_model_and_optimizer"] = model_and_optimizer


def drive(root: str, flags: list[str]) -> tuple[list[list[torch.Tensor]], list[str], str]:
    """As slime's train.py up to the first rollouts: gradients of each worker, the workers' lines, how groups look."""
    with local_ray(__name__, root, gpus=DP * CP) as lines:
        sys.argv = ["train.py", *STARTED.split(), *flags]
        args = importlib.import_module("slime.utils.arguments").parse_args()
        placement = importlib.import_module("slime.ray.placement_group")
        boxed = importlib.import_module("slime.utils.misc").Box
        group = placement.allocate_train_group(
            args, args.actor_num_nodes, args.actor_num_gpus_per_node, placement.create_placement_groups(args)["actor"]
        )
        group.create()
        references = [boxed(ray.put(data_of(step_of_a_launch(), dp_rank))) for dp_rank in range(DP)]
        try:
            ray.get(group.async_train(0, references))
            for worker in group._actor_handlers:
                ray.get(worker.__ray_call__.remote(allow_offloading))
            group.offload()
            group.onload()  # slime's groups are other ones from here on, behind the same objects
            for worker in group._actor_handlers:
                ray.get(worker.__ray_call__.remote(allow_offloading, False))
            ray.get(group.async_train(1, references))
        except ray.exceptions.RayTaskError as error:
            return [], lines(), str(error)
        workers = group._actor_handlers
        gradients = ray.get([worker.__ray_call__.remote(gradients_of) for worker in workers])
        return gradients, lines(), ray.get(workers[0].__ray_call__.remote(group_type))


def started(*flags: str) -> tuple[list[list[torch.Tensor]], list[str], str]:
    result: tuple[list[list[torch.Tensor]], list[str], str] = run_ranks(1, drive, checkout(SLIME), list(flags))[0]
    return result


def test_workers_of_a_launch_aggregate_as_asked(record_property: Any) -> None:
    """Two rollouts, with the workers put to sleep in between, which destroys all groups and builds them again."""
    gradients, lines, groups = started(*HOOKS)
    print(groups, *lines, sep="\n")
    assert groups == "ReloadableProcessGroup"
    error = error_of(gradients, "constant", 40.0)
    assert [len(of_worker) for of_worker in gradients] == [2] * DP * CP
    assert error < TOLERANCE
    record_errors(record_property, SLIME, "started: two rollouts, groups built again in between", ours=error)


def test_a_misspelt_option_is_said_in_the_worker() -> None:
    """slime ignores options that it does not know: without `count_steps` a hook is proved in the second step."""
    misspelt = [option.replace("--custom-megatron-init-path", "--custom-megatron-start") for option in HOOKS]
    gradients, lines, _ = started(*misspelt)
    assert len(gradients) == DP * CP
    assert "slime worker 0: count_steps did not run in this worker" in "".join(lines)
