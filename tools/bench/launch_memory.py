"""Peak resident memory of a launch of the example with a vocabulary of 128k, with either way to make log-probs.

    python tools/bench/launch_memory.py --json out.json      # on a CPU; some minutes

Each row is a whole process, `examples/pretrain_grpo.py` as a user launches it: Megatron imported, a model of 2 layers
built, two steps trained with Adam on one pack of `--seq-length` tokens. *Peak MB* is the process's largest resident
set, as the operating system counts it (`ru_maxrss`). *Above base* is that less a launch with a vocabulary of 32. What
the vocabulary costs elsewhere is in it too: embedding, output layer, their gradients and Adam's two moments, together
*weights MB*. What is left beside them is what making log-probs takes.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tabulate import tabulate
from timing import machine

ROOT = Path(__file__).parents[2]
MB = 2**20
MODEL = """--num-layers 2 --ffn-hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --no-position-embedding
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer
    --transformer-impl local --no-persist-layer-norm --no-rope-fusion --no-masked-softmax-fusion
    --no-gradient-accumulation-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion"""
TRAINING = """--dataloader-type external --micro-batch-size 1 --global-batch-size 1 --eval-iters 0 --eval-interval 1000
    --lr 1e-3 --lr-decay-style constant --clip-grad 1.0 --weight-decay 0 --log-interval 1 --train-iters 2
    --distributed-backend gloo --use-cpu-initialization"""


def launch(vocabulary: int, log_probs: str, args: argparse.Namespace) -> dict[str, Any]:
    """One launch; its peak, its time, and the numbers of its last step."""
    flags = [*MODEL.split(), *TRAINING.split(), "--rollouts", str(ROOT / "examples" / "arithmetic.jsonl")]
    flags += ["--vocab-size", str(vocabulary), "--padded-vocab-size", str(vocabulary)]
    flags += ["--hidden-size", str(args.hidden_size), "--prompts-per-step", str(args.prompts)]
    flags += ["--seq-length", str(args.seq_length), "--max-position-embeddings", str(args.seq_length)]
    flags += ["--log-probs", log_probs, "--log-probs-chunk-tokens", str(args.chunk_tokens)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")]),
        "OMP_NUM_THREADS": str(args.threads),
        "GLOO_SOCKET_IFNAME": "lo",
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
    }
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, str(ROOT / "examples" / "pretrain_grpo.py"), *flags]
        began = time.monotonic()
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - began
        log.seek(0)
        text = log.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{text[-3000:]}")
    norms = re.findall(r"iteration +2/ +2 \|.*grad norm: (\S+) \|", text)
    entropy = re.findall(r"of iteration +2 alone \|.*entropy: (\S+)", text)
    return {
        "vocabulary": vocabulary,
        "log-probs": log_probs,
        "peak MB": usage.ru_maxrss * 1024 / MB,
        "seconds": seconds,
        "grad norm": float(norms[0]),
        "entropy": float(entropy[0]) if entropy else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--hidden-size", type=int, default=32)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--prompts", type=int, default=10, help="Prompt groups in the pack.")
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="OUT", help="Write the figures there.")
    args = parser.parse_args()
    rows = [launch(32, "stock", args), *(launch(args.vocabulary, one, args) for one in ("stock", "chunked"))]
    for row in rows:
        row["above base MB"] = row["peak MB"] - rows[0]["peak MB"]
        # Embedding and output layer, float32: weight, gradient, two moments.
        row["weights MB"] = 2 * 4 * 4 * row["vocabulary"] * args.hidden_size / MB
    settings = {"threads": args.threads, "tokens": args.seq_length, "hidden": args.hidden_size}
    sizes = {"chunk tokens": args.chunk_tokens, "logits MB": 4 * args.seq_length * args.vocabulary / MB}
    about = machine() | settings | sizes
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(tabulate(rows, headers="keys", floatfmt=".6g"))
    if args.json:
        args.json.write_text(json.dumps({"machine": about, "launches": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
