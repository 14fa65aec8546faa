"""Peak resident memory of a launch of the example with a vocabulary of 128k, with either way to compute log-probs.

    python tools/bench/launch_memory.py --out docs/bench      # on a CPU; some minutes

Each row is a launch of `examples/launch_grpo.sh` on one process: two steps of a model of 2 layers with Adam on one
pack. *Peak MB* is the largest resident set of its processes, as the operating system counts it (`ru_maxrss`). *Above
base* is that minus a launch with a vocabulary of 32. It includes *Weights MB*, the vocabulary's cost elsewhere:
embedding, output layer, their gradients and Adam's two moments. The rest is the cost of computing log-probs.
"""

import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from timing import ROOT, flags, publish

MB = 2**20
HIDDEN, TOKENS, VOCABULARY = 32, 4096, 131072
FLAGS = f"""--num-layers 2 --hidden-size {HIDDEN} --ffn-hidden-size 64 --seq-length {TOKENS} --lr 1e-3 --train-iters 2
    --max-position-embeddings {TOKENS} --global-batch-size 1 --prompts-per-step 10 --log-probs-chunk-tokens 256"""


def launch(vocabulary: int, log_probs: str) -> dict[str, Any]:
    sizes = ["--vocab-size", str(vocabulary), "--padded-vocab-size", str(vocabulary), "--log-probs", log_probs]
    command = [str(ROOT / "examples" / "launch_grpo.sh"), "1", *FLAGS.split(), *sizes]
    with tempfile.TemporaryFile("w+") as log:
        began = time.monotonic()
        environment = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{log.read()[-3000:]}")
    row = {"vocabulary": vocabulary, "log-probs": log_probs, "seconds": time.monotonic() - began}
    return row | {"peak MB": usage.ru_maxrss * 1024 // MB, "weights MB": 2 * 4 * 4 * vocabulary * HIDDEN // MB}


def main() -> None:
    args = flags(__doc__).parse_args()
    rows = [launch(32, "stock"), launch(VOCABULARY, "stock"), launch(VOCABULARY, "chunked")]
    rows = [row | {"above base MB": row["peak MB"] - rows[0]["peak MB"]} for row in rows]
    publish(
        "launch-128k", args, {"launches": rows}, tokens=TOKENS, hidden=HIDDEN, logits_MB=4 * TOKENS * VOCABULARY // MB
    )


if __name__ == "__main__":
    main()
