"""Memory and time of distillation, beside a naive way and the functions of other frameworks.

    python tools/bench/distillation.py --verl ~/verl --nemo-rl ~/RL --ms-swift ~/ms-swift --trl ~/trl --liger ~/Liger
    python tools/bench/distillation.py --tables top-k --sizes 1024x32768 --k 16         # ours and the naive way alone

Two tables, forward and backward, from hidden states to the gradients of hidden states and weight:

- *top-k*: forward KL from the teacher's K likeliest ids and their log-probs.
- *whole*: forward KL over the vocabulary, from the teacher's hidden states and weight.

The ways:

- *naive*: the formula on ``log_softmax`` of all logits. *Differs by* is to its gradient: NeMo-RL and ms-swift define
  another divergence of the top-k, of softmaxes over the K ids.
- *verl*: `_VocabParallelKLDivergence` of its Megatron engine. *NeMo-RL*: `ChunkedDistributedGatherLogprob` by chunks of
  1,024 tokens, as it calls it, with `DistillationLossFn`. Both start from the logits of all tokens.
- *ms-swift*: `gkd_loss`; from top-k it takes the softmax over the K ids alone, and reads no other logit.
- *TRL*: `GKDTrainer.generalized_jsd_loss`. *Liger*: `LigerFusedLinearJSDLoss` in chunks of as many tokens as ours, not
  compiled.
- *ours*: `log_probs_from_hidden` at K ids with `divergence_at_ids`, with a teacher (two passes);
  `loss_from_hidden` (one pass).

**Peak extra** is as in logprobs.py. A way that would need more memory than the machine has left is not run: its peak
is then *foreseen*, by the line through those at one and two chunks of tokens. Times are CPU seconds of one thread, the
least of some turns. One rank holds the vocabulary.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from logprobs import MB, Pass, Size, leaf, peak_extra
from megatron.core import parallel_state
from timing import BACKENDS, Others, commit_of, flags, publish, synchronize
from torch import Tensor

from checkouts import MS_SWIFT, NEMO_RL, TRL, VERL, Framework, load  # isort: skip
from megatron_rl_loss import OutputLayer, Teacher, divergence_at_ids, log_probs_from_hidden, loss_from_hidden

LIGER = Framework(
    "LIGER_PATH", "src/liger_kernel/chunked_loss/jsd_loss.py", ("liger_kernel", "liger_kernel.chunked_loss"), ()
)
PEERS = ("verl", "nemo_rl", "ms_swift", "trl", "liger")
#: Of memory that is left, for other processes.
SPARE = 2 * 2**30


class Inputs:
    """Hidden states and weights of student and teacher, and the teacher's ids and log-probs."""

    def __init__(self, size: Size, hidden: int, k: int, device: str) -> None:
        self.tokens, self.k = size.tokens, k
        scale = hidden**-0.5
        self.hidden = leaf(size.tokens, hidden, like=size, device=device)
        self.weight = leaf(size.vocabulary, hidden, like=size, device=device, scale=scale)
        with torch.no_grad():
            self.teacher = self.hidden + 0.5 * torch.randn_like(self.hidden)
            self.teacher_weight = self.weight.detach().clone()
            parts = [(part @ self.weight.t()).float().log_softmax(-1).topk(k) for part in self.teacher.split(256)]
        self.log_probs, self.ids = (torch.cat(parts_of) for parts_of in zip(*parts, strict=True))
        self.mask = torch.ones(size.tokens, device=device)

    def logits(self) -> Tensor:
        return self.hidden @ self.weight.t()

    def taught(self) -> Tensor:
        with torch.no_grad():
            return self.teacher @ self.teacher_weight.t()


Way = Callable[[Inputs], Tensor]  # the sum over the tokens


def naive_top_k(x: Inputs) -> Tensor:
    at_ids = x.logits().log_softmax(-1).gather(-1, x.ids)
    return (x.log_probs.exp() * (x.log_probs - at_ids)).sum()


def naive_whole(x: Inputs) -> Tensor:
    student, teacher = x.logits().log_softmax(-1), x.taught().log_softmax(-1)
    return (teacher.exp() * (teacher - student)).sum()


def verl_loss(module: Any, x: Inputs) -> Tensor:
    return module._VocabParallelKLDivergence.apply(x.logits()[None], x.log_probs[None], x.ids[None], None)[0].sum()


def nemo_rl_loss(utils: Any, losses: Any, x: Inputs) -> Tensor:
    cfg = SimpleNamespace(kl_type="forward", mixed_kl_weight=0.5, zero_outside_topk=True)
    teacher, ids = x.log_probs[None], x.ids[None]
    both = utils.get_distillation_topk_logprobs_from_logits(
        x.logits()[None], teacher, ids, True, False, 0, dist.group.WORLD
    )
    data = {"token_mask": x.mask[None], "sample_mask": x.mask[:1], "input_ids": ids}
    return losses.DistillationLossFn(cfg)(*both, data, None, x.mask[0])[0]


def ms_swift_loss(gkd: Any, utils: Any, vocabulary: Any, whole: bool, x: Inputs) -> Tensor:
    kinds = (
        {"full_logits": x.taught()[None]}
        if whole
        else {"topk_logprobs": x.log_probs[None], "topk_indices": x.ids[None]}
    )
    labels = torch.zeros(1, x.tokens, dtype=torch.int64, device=x.ids.device)
    functions = utils.tp_gather_topk, vocabulary.vocab_parallel_log_softmax, vocabulary.vocab_parallel_kl_div
    return gkd.gkd_loss(x.logits()[None], gkd.TeacherOutput(**kinds), labels, 0.0, 1.0, *functions)[0]


def trl_loss(module: Any, x: Inputs) -> Tensor:
    return module.GKDTrainer.generalized_jsd_loss(x.logits(), x.taught(), beta=0.0, reduction="sum")


def liger_loss(module: Any, chunk_tokens: int, x: Inputs) -> Tensor:
    loss = module.LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0, compiled=False, chunk_size=chunk_tokens
    )
    return loss(x.hidden, x.weight, x.teacher, x.teacher_weight, torch.zeros_like(x.ids[:, 0])) * x.tokens


def ours_top_k(chunk_tokens: int, x: Inputs) -> Tensor:
    at_ids, _ = log_probs_from_hidden(x.hidden, OutputLayer(x.weight, chunk_tokens=chunk_tokens), x.ids)
    return divergence_at_ids(at_ids, x.log_probs, x.mask, kind="forward_kl", tail="drop").sum()


def ours_top_k_in_one(chunk_tokens: int, x: Inputs) -> Tensor:
    def losses(at_ids: Tensor, _: Any, teacher: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return divergence_at_ids(at_ids, teacher, mask, kind="forward_kl", tail="drop"), {}

    inputs = {"teacher": x.log_probs, "mask": x.mask}
    output_layer = OutputLayer(x.weight, chunk_tokens=chunk_tokens)
    return loss_from_hidden(x.hidden, output_layer, x.ids, x.mask, losses, inputs)[0]


def ours_whole(chunk_tokens: int, x: Inputs) -> Tensor:
    teacher = Teacher(x.teacher, x.teacher_weight, kind="forward_kl")
    output_layer = OutputLayer(x.weight, chunk_tokens=chunk_tokens)
    return log_probs_from_hidden(x.hidden, output_layer, teacher=teacher).divergence.sum()


def ours_whole_in_one(chunk_tokens: int, x: Inputs) -> Tensor:
    def losses(log_probs: Tensor, _: Any, divergence: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return divergence, {}

    teacher = Teacher(x.teacher, x.teacher_weight, kind="forward_kl")
    output_layer, labels = OutputLayer(x.weight, chunk_tokens=chunk_tokens), x.ids[:, 0]
    return loss_from_hidden(x.hidden, output_layer, labels, x.mask, losses, teacher=teacher)[0]


def load_apart(framework: Framework, root: Path, module: str) -> Any:
    """Load a module, then hide its package from modules that are loaded later and would import it."""
    (loaded,) = load(framework, str(root), module)
    for name in [
        loaded_name for loaded_name in sys.modules if loaded_name.partition(".")[0] == module.partition(".")[0]
    ]:
        del sys.modules[name]
    return loaded


def ways(args: argparse.Namespace) -> dict[str, dict[str, Way]]:
    """The ways to measure, by table and name."""
    ways_by_table: dict[str, dict[str, Way]] = {"top-k": {"naive": naive_top_k}, "whole": {"naive": naive_whole}}
    if args.liger:
        module = load_apart(LIGER, args.liger / "src", "liger_kernel.chunked_loss.jsd_loss")
        ways_by_table["whole"]["Liger"] = partial(liger_loss, module, args.chunk_tokens)
    if args.trl:
        ways_by_table["whole"]["TRL"] = partial(trl_loss, load_apart(TRL, args.trl, "trl.experimental.gkd.gkd_trainer"))
    if args.verl:
        ways_by_table["top-k"]["verl"] = partial(
            verl_loss, *load(VERL, str(args.verl), "verl.trainer.distillation.megatron.losses")
        )
    if args.nemo_rl:
        names = "nemo_rl.distributed.model_utils", "nemo_rl.algorithms.loss.loss_functions"
        ways_by_table["top-k"]["NeMo-RL"] = partial(nemo_rl_loss, *load(NEMO_RL, str(args.nemo_rl), *names))
    if args.ms_swift:
        trainers = "swift.megatron.trainers"
        gkd, utils, vocabulary = load(
            MS_SWIFT,
            str(args.ms_swift),
            "swift.rlhf_trainers.gkd_loss",
            f"{trainers}.gkd_utils",
            f"{trainers}.vocab_parallel_utils",
        )
        for table, ways_of_table in ways_by_table.items():
            ways_of_table["ms-swift"] = partial(ms_swift_loss, gkd, utils, vocabulary, table == "whole")
    for table, two_passes, one_pass in (
        ("top-k", ours_top_k, ours_top_k_in_one),
        ("whole", ours_whole, ours_whole_in_one),
    ):
        ways_by_table[table]["ours, two passes"] = partial(two_passes, args.chunk_tokens)
        ways_by_table[table]["ours, one pass"] = partial(one_pass, args.chunk_tokens)
    return ways_by_table


def run_of(way: Way, x: Inputs) -> Pass:
    return lambda: torch.autograd.grad(way(x) / x.tokens, (x.hidden, x.weight))


def left(device: str) -> int:
    """Bytes of free memory."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def measured(run: Pass, args: argparse.Namespace) -> tuple[float, float, Sequence[Tensor]]:
    """Peak extra in MB, the shortest time of a turn in seconds, and the gradients."""
    peak, clock, times = peak_extra(run, args.device) / MB, time.perf_counter, list[float]()
    if args.device == "cpu":
        clock = time.process_time
    for _ in range(args.repeats):
        synchronize(args.device)
        begun = clock()
        gradients = run()
        synchronize(args.device)
        times.append(clock() - begun)
    return peak, min(times), gradients


def foreseen(way: Way, size: Size, args: argparse.Namespace) -> float:
    """Bytes of the peak, extrapolated from smaller sizes; 0 without smaller sizes."""
    if size.tokens <= 2 * args.chunk_tokens:
        return 0.0
    one_chunk, two_chunks = (
        peak_extra(run_of(way, inputs_of(replace(size, tokens=n * args.chunk_tokens), args)), args.device)
        for n in (1, 2)
    )
    return one_chunk + (two_chunks - one_chunk) * (size.tokens / args.chunk_tokens - 1)


def inputs_of(size: Size, args: argparse.Namespace) -> Inputs:
    return Inputs(size, args.hidden, args.k, args.device)


def rows(size: Size, ways: dict[str, Way], args: argparse.Namespace) -> list[dict[str, Any]]:
    x, others, measured_rows, naive, right = inputs_of(size, args), Others(), list[dict[str, Any]](), 0.0, None
    for name, way in ways.items():
        row: dict[str, Any] = {"tokens": size.tokens, "vocabulary": size.vocabulary, "way": name}
        needs = foreseen(way, size, args)
        if needs > left(args.device) - SPARE:
            row |= {"peak extra MB": needs / MB, "foreseen": "yes"}
        else:
            row["peak extra MB"], seconds, gradients = measured(run_of(way, x), args)
            row |= {"foreseen": "", "seconds": seconds}
            right = gradients if name == "naive" else right
            if right is not None:
                pairs = zip(gradients, right, strict=True)
                row["differs by"] = max(
                    float((gradient - expected).abs().max() / expected.abs().max()) for gradient, expected in pairs
                )
            del gradients
        naive = naive or row["peak extra MB"]
        measured_rows.append(row | {"of naive": row["peak extra MB"] / naive})
    return [row | {"busy elsewhere": others.busy()} for row in measured_rows]


def main() -> None:
    parser = flags(__doc__)
    for name in PEERS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=Path, metavar="PATH", help="A checkout.")
    parser.add_argument("--tables", nargs="+", choices=("top-k", "whole"), default=["top-k", "whole"])
    parser.add_argument(
        "--sizes", nargs="+", metavar="TOKENSxVOCABULARY[:DTYPE]", default=["8192x151936", "2048x151936"]
    )
    parser.add_argument("--hidden", type=int, default=64, help="Width of the hidden states.")
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--chunk-tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=2, help="Number of turns.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(BACKENDS[args.device], init_method=f"file://{folder}/store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        ways_by_table, sizes = ways(args), [Size.parse(text) for text in args.sizes]
        tables = {
            name: [row for size in sizes for row in rows(size, ways_by_table[name], args)] for name in args.tables
        }
        dist.destroy_process_group()
    commits = {name: commit_of(root) for name in PEERS if (root := getattr(args, name))}
    publish("distillation", args, tables, chunk_tokens=args.chunk_tokens, hidden=args.hidden, k=args.k, **commits)


if __name__ == "__main__":
    main()
