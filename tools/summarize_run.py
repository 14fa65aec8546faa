"""Print a short table of a run from what Megatron wrote to TensorBoard.

python tools/summarize_run.py runs/demo
"""

import argparse
from pathlib import Path

from tabulate import tabulate
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROWS = {
    "pg_loss": "policy loss",
    "advantage_x_log_prob": "advantage x log-prob, sample mean",
    "log_prob": "log-prob, sample mean",
    "grad-norm": "grad norm",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="Folder given to --tensorboard-dir.")
    run = parser.parse_args().run
    events = EventAccumulator(str(run))
    events.Reload()
    tags = events.Tags()
    if "pg_loss" not in tags["scalars"]:
        parser.exit(1, f"{run} holds no pg_loss: did the run write TensorBoard events there?\n")
    args = {tag.removesuffix("/text_summary"): _text(events, tag) for tag in tags["tensors"]}
    mode = args["loss_aggregation"].replace("None", "by default")
    steps = len(events.Scalars("pg_loss"))
    divisor = f", divisor {args['loss_aggregation_divisor']}".replace(", divisor None", "")
    layout = {"tensor_model": "TP", "context": "CP", "pipeline_model": "PP"}
    sizes = [f"{short} {args[f'{name}_parallel_size']}" for name, short in layout.items()]
    print(f"\nmode    {mode}{divisor}")
    print(f"layout  {' x '.join(sizes)} x DP {args['data_parallel_size']}")
    print(f"steps   {steps}\n")
    table = []
    for tag, name in ROWS.items():
        values = [event.value for event in events.Scalars(tag)]
        # A step's value depends on its prompts, which come round every few steps: means over a round compare.
        round_length = min(4, len(values))
        first, last = values[:round_length], values[-round_length:]
        table.append([name, values[0], values[-1], sum(first) / len(first), sum(last) / len(last)])
    headers = ["", "first step", "last step", "mean of first 4", "mean of last 4"]
    print(tabulate(table, headers=headers, floatfmt=".4f"))


def _text(events: EventAccumulator, tag: str) -> str:
    return str(events.Tensors(tag)[0].tensor_proto.string_val[0].decode())


if __name__ == "__main__":
    main()
