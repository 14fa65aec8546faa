"""Steps whose context-parallel groups change between micro-batches: the sequences, Megatron's groups, its loops.

No `World`: its layout has one context-parallel size, and Megatron's hybrid schedule takes a whole step at once, and
cuts it into micro-batches itself.
"""

import inspect
import random
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import oracle
import torch.distributed as dist
from table_step import run_schedule, start

RANKS = 4
LENGTHS = [64, 33, 1, 17, 5, 9, 40, 2, 3, 12, 8, 1, 27, 6]
#: Of each micro-batch, the sequences of each rank: what a scheduler returns.
Groups = list[list[list[int]]]


def step_of_lengths() -> list[oracle.Sample]:
    """Losses, which are log-probs too; fractional and full masks, split rollouts, uneven prompt groups."""
    rng, samples = random.Random(23), []
    for i, length in enumerate(LENGTHS):
        mask = [0.0 if i in (4, 10) else rng.choice([0, 1, 1, 0.5]) for _ in range(length)]
        mask[-1] = float(i not in (4, 10))
        losses = [rng.uniform(-3, -0.1) for _ in range(length)]
        samples.append(oracle.sample(losses, mask, rollout_id=f"r{i - i % 3 // 2}", prompt_id=f"p{min(i // 3, 2)}"))
    return samples


STEP = step_of_lengths()
TABLE = [float(loss) for sample in STEP for loss in sample.losses] + [0.0]


def start_dynamic(tp: int = 1, cp: int | None = None, **more: Any) -> tuple[Any, Any, Callable[[int], Any]]:
    """On a rank: Megatron's state, its group over DP x CP, and its group of each size."""
    from megatron.core import parallel_state

    known = inspect.signature(parallel_state.initialize_model_parallel).parameters
    name = "dynamic" if "dynamic_context_parallel" in known else "hybrid"
    barrier = dist.barrier
    with patch.object(dist, "barrier", lambda group=None, **_: barrier(group)):  # dev names a device: gloo refuses it
        state = start(tp=tp, cp=cp or 2 // tp, **{f"{name}_context_parallel": True}, **more)
    of_size = getattr(state, f"get_{name}_data_context_parallel_groups")
    dp_cp = state.get_data_parallel_group(with_context_parallel=True)
    return state, dp_cp, lambda size: None if size == 1 else of_size(group_size=size)  # before dev there is none of one


def balanced(dp_cp: Any, lengths: Sequence[int]) -> Groups:
    """Groups by Megatron's scheduler, a longest sequence over all ranks."""
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    groups: Groups
    scheduler = BalancedCPScheduler(-(-max(lengths) // dp_cp.size()), dp_cp)
    _, groups = scheduler.get_groups_and_subsamples(list(enumerate(lengths)), None)
    return groups


def hands_of(groups: Groups, rank: int, one_by_one: bool) -> list[tuple[list[int], int]]:
    """The sequences and the group size of each micro-batch of a rank."""
    return [
        (ids, sum(set(ids) <= set(others) for others in group))
        for group in groups
        for ids in ([[i] for i in group[rank]] if one_by_one else [group[rank]])
    ]


def run_loop(hybrid: bool, model: Any, groups: Groups, hands: Any, forward_step: Any) -> Any:
    """Megatron's hybrid schedule, to which one `next` gives the step, on the first TP rank; or its usual one."""
    if not hybrid:
        return run_schedule(forward_step, iter([{}] * len(hands)), model, len(hands))
    from megatron.core import parallel_state

    model.config.hybrid_context_parallel = True
    whole: Any = iter([({i: {} for ids, _ in hands for i in ids}, groups)])
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    return run_schedule(forward_step, whole if first else None, model, 1)
