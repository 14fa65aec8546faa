"""The lines of this package that a default launch loads. Apart from other helpers, which import more of the package."""

import sys
from pathlib import Path

import table_step


def lines_by_room() -> dict[str, int]:
    """On a rank: a step of `LossAggregation` with its proof and a loss; then the lines of loaded files, by room."""
    from megatron_rl_loss import add_loss_aggregation_args, next_microbatch, ppo_clip_loss

    assert add_loss_aggregation_args and next_microbatch and ppo_clip_loss  # what a script of the README imports
    table_step.start()
    batches = [table_step.Batch([table_step.oracle.sample([1.0, 2.0], [1, 1], 0, 0)], [0], 1)]
    model = table_step.table_model([1.0, 2.0, 0.0])
    table_step.one_step(model, batches, table_step.aggregation(mode="token_mean"))
    lines = dict[str, int]()
    for name, module in sys.modules.items():
        if name.split(".")[0] == "megatron_rl_loss" and module.__file__:
            room = [*name.split("."), ""][1]
            lines[room] = lines.get(room, 0) + len(Path(module.__file__).read_text().splitlines())
    return lines
