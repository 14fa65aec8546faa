"""The lines of this package that a default launch loads, by room, as JSON; run in a process of its own."""

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / folder) for folder in ("", "examples", "tests/support")]

import megatron_on_cpu

megatron_on_cpu.install()

import oracle
import table_step

from megatron_rl_loss import add_loss_aggregation_args, next_microbatch, ppo_clip_loss


def main() -> None:
    print(f"the script's own imports: {add_loss_aggregation_args}, {next_microbatch}, {ppo_clip_loss}", file=sys.stderr)
    table_step.start()
    batches = [table_step.Batch([oracle.sample([1.0, 2.0], [1, 1], 0, 0)], [0], 1)]
    model = table_step.table_model([1.0, 2.0, 0.0])
    table_step.one_step(model, batches, table_step.aggregation(mode="token_mean"))
    lines = dict[str, int]()
    for name, module in sys.modules.items():
        if name.split(".")[0] == "megatron_rl_loss" and module.__file__:
            room = [*name.split("."), ""][1]
            lines[room] = lines.get(room, 0) + len(Path(module.__file__).read_text().splitlines())
    print(json.dumps(lines))


if __name__ == "__main__":
    main()
