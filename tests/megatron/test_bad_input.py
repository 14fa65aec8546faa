"""Bad input from a user's side: one table over "What is refused" in docs/support.md, through the entries a launch uses.

Flags go through Megatron's real `parse_and_validate_args` and `LossAggregation.from_args`; data through `samples_of`
and `begin_step` on real groups (cp 2 x dp 2, gloo); losses through Megatron's schedule into `microbatch.loss` and
`carry`; rollout files through the example's `main`. Every row says the error's
type, what it must name as given, and what it must tell to do; that it is raised on every rank; that no parameter
changed; and that the row's nearest legal neighbour is accepted. Rows name the phrase of that page they cover, and every
phrase must be covered.

Many rows share one launch of ranks. The edge cases that are defined, not refused, are compared with the oracle below.
"""

import contextlib
import functools
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from example_run import DATA, MODEL, TRAINING
from flag_refusals import FLAG_ROWS
from ranks import run_ranks
from refusals import Row, in_three_parts
from repository import ROOT
from table_step import ALL_SETTINGS, Batch, aggregation, one_step, relative_error, start, step_samples, table_model
from torch import Tensor

from megatron_rl_loss import Contiguous, Samples, ZigzagBSHD, ZigzagResponse, ZigzagTHD

NAN, INF = float("nan"), float("inf")
ACCEPTED = "accepted"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one rank saw of a row."""

    error: str  # type of the exception, or "accepted"
    text: str = ""
    neighbour: str = ACCEPTED  # what became of the legal neighbour
    unchanged: bool = True  # all parameters are bit for bit what they were


def attempt(call: Callable[[], Any]) -> tuple[str, str]:
    """The type and text of what is raised; SystemExit's text is what argparse printed."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            call()
    except SystemExit:
        return "SystemExit", printed.getvalue()
    except Exception as error:
        return type(error).__name__, str(error)
    return ACCEPTED, ""


def outcome_of(call: Callable[[], Any]) -> str:
    error, text = attempt(call)
    return ACCEPTED if error == ACCEPTED else f"{error}: {text}"


# ---- flags


def parsed(
    what: Any, *, registered: bool = True, ignore_unknown: bool = False, world: int = 1, connections: str = "1"
) -> Any:
    """As a launch parses: `what` are flags, or the content of a --yaml-cfg file."""
    import pretrain_grpo
    from megatron.core import num_microbatches_calculator
    from megatron.training import arguments, global_vars

    from megatron_rl_loss.megatron import LossAggregation

    os.environ |= {"WORLD_SIZE": str(world), "CUDA_DEVICE_MAX_CONNECTIONS": connections}
    launch = [*MODEL.split(), *DATA.split(), *TRAINING.split()] if registered else [*MODEL.split(), *TRAINING.split()]
    provider = pretrain_grpo.add_args if registered else None
    if isinstance(what, dict):
        Path("run.yaml").write_text(json.dumps(what))  # JSON is YAML
        sys.argv = ["pretrain_mine.py", *launch, "--yaml-cfg", "run.yaml"]
        # `validate_yaml` then wants a hundred further keys, none of which is ours.
        args = arguments.parse_args(provider)
    else:
        if not registered:
            launch += ["--micro-batch-size", "1", "--seq-length", "64", "--max-position-embeddings", "64"]
        sys.argv = ["pretrain_mine.py", *launch, *what.split()]
        num_microbatches_calculator.destroy_num_microbatches_calculator()
        global_vars.destroy_global_vars()
        args = arguments.parse_and_validate_args(provider, ignore_unknown_args=ignore_unknown)
    return LossAggregation.from_args(args, lambda batch: batch)


def prepare_parsing() -> None:
    """Read YAML files without PyYAML where it is not installed, and --help texts of the dataclasses only once."""
    from megatron.training import argument_utils, yaml_arguments

    if not yaml_arguments.HAVE_YAML:
        yaml_arguments.HAVE_YAML = True
        yaml_arguments.yaml = SimpleNamespace(safe_load=json.load)  # the files here are JSON, which is YAML
    factory = argument_utils.ArgumentGroupFactory
    docstrings, known = factory._get_field_docstrings, {}

    def get_field_docstrings(self: Any, config: type) -> Any:
        if config not in known:
            known[config] = docstrings(self, config)
        return known[config]

    factory._get_field_docstrings = get_field_docstrings


def flag_verdicts() -> dict[str, Verdict]:
    prepare_parsing()
    os.chdir(os.environ["TMPDIR"])
    Path("broken_modes.py").write_text("import a_package_that_is_not_installed\n")
    sys.path.insert(0, os.getcwd())
    found, neighbours = {}, {}
    for row in FLAG_ROWS:
        error, text = attempt(functools.partial(parsed, row.bad, **row.options))
        good = row.options | {"registered": True}
        key = f"{row.good}{good}"
        if key not in neighbours:
            neighbours[key] = outcome_of(functools.partial(parsed, row.good, **good))
        found[row.name] = Verdict(error=error, text=text, neighbour=neighbours[key])
    return found


# ---- a step's data, on cp 2 x dp 2

Record = dict[str, Any]


def records(dp_rank: int) -> list[Record]:
    """Two micro-batches of two samples, as keyword arguments of `Samples`."""
    return [
        {
            "loss_masks": [torch.ones(8), torch.tensor([0.0, 0, 1, 1, 0.5, 1])],
            "layout": ZigzagTHD([0, 8, 16], total_lengths=[8, 6]),
            "rollout_ids": [f"{dp_rank}.{number}.{i}" for i in range(2)],
            "prompt_ids": [f"prompt {dp_rank}"] * 2,
        }
        for number in range(2)
    ]


Change = Callable[[list[Record], int, int], Any]  # (good records, DP rank, CP rank) -> an iterator or a list


def put(dp_rank: int | None = 1, cp_rank: int | None = None, number: int = 1, **fields: Any) -> Change:
    """Other `fields` in a micro-batch of that DP (and CP) rank; None for all."""

    def change(good: list[Record], dp: int, cp: int) -> list[Record]:
        if dp_rank in (None, dp) and cp_rank in (None, cp):
            good[number] = good[number] | fields
        return good

    return change


def everywhere(**fields: Any) -> Change:
    return lambda good, dp, cp: [record | fields for record in good]


def masks(*values: Any) -> list[Tensor]:
    return [torch.tensor(value) for value in values]


def late_error(good: list[Record], dp: int, cp: int) -> Iterator[Record]:
    yield good[0]
    if dp == 1 and cp == 0:
        raise OSError("disk gone")
    yield good[1]


def made(make: Callable[[], Any]) -> Change:
    """A `samples_of` that calls this on DP rank 1."""
    return put(make=make)


def fails() -> Any:
    return {}["loss_masks"]


def same_rollout_twice(good: list[Record], dp: int, cp: int) -> list[Record]:
    good[1]["rollout_ids"] = [f"{dp}.1.0", "7"]  # under "prompt 0" on one rank, "prompt 1" on the other
    return good


def step_row(
    name: str, covers: str, bad: Change, given: str, todo: str, good: Change | None = None, *, styled: bool = True,
    error: str = "BadBatchError", **settings: Any,
) -> Row:  # fmt: skip
    return Row(
        name=name, covers=covers, error=error, given=given, todo=todo, bad=bad, good=good, options=settings,
        styled=styled,
    )  # fmt: skip


MASKS = "masks that are negative, NaN, infinite, complex or not 1-D"
DISAGREE = "masks, ids or lengths that disagree in number, with the layout, or between replicas of the same data"
CUT = "slots that the layout cannot cut for this CP size"
HALF = [1.0, 0, 1, 1, 0, 1]
STEP_ROWS = [
    step_row("negative mask", MASKS, put(loss_masks=masks([1.0] * 8, [1.0, -1, 1, 1, 1, 1])),
             "the loss mask of sample 1 holds -1.0", "Pass 0 for tokens that do not count",
             put(loss_masks=masks([1.0] * 8, [1.0, 0, 1, 1, 1, 1]))),
    step_row("NaN mask", MASKS, put(loss_masks=masks([NAN] * 8, HALF)), "mask of sample 0 holds nan", "Pass 0"),
    step_row("infinite mask", MASKS, put(loss_masks=masks([INF] * 8, HALF)), "sample 0 holds inf", "Pass 0"),
    step_row("complex mask", MASKS, put(loss_masks=masks([1j] * 8, HALF)), "sample 0 is torch.complex64",
             "Pass 0/1, bool or float weights", put(loss_masks=[torch.ones(8).bool(), torch.ones(6).int()])),
    step_row("2-D mask", MASKS, put(loss_masks=[torch.ones(1, 8), torch.ones(6)]), "has shape (1, 8)",
             "Pass one tensor a sample"),
    step_row("one tensor for all masks", MASKS, put(loss_masks=torch.ones(2, 8)), "one tensor of shape (2, 8)",
             "Pass list(loss_masks)", put(loss_masks=list(torch.ones(2, 8)))),
    step_row("masks as lists", MASKS, put(loss_masks=[[1.0] * 8, HALF]), "the loss mask of sample 0 is a list",
             "Wrap it in torch.tensor"),
    step_row("one prompt id too few", DISAGREE, put(prompt_ids=["p"]), "1 prompt_ids for 2 loss masks",
             "Pass both in order"),
    step_row("one rollout id too many", DISAGREE, put(rollout_ids=[1, 2, 3]), "3 rollout_ids for 2 loss masks",
             "Pass both in order"),
    step_row("mask of the response alone", DISAGREE, put(loss_masks=masks([1.0] * 8, [1.0] * 3)),
             "the loss mask of sample 1 has 3 entries", "ZigzagResponse"),
    step_row("mask longer than its slot", DISAGREE, put(loss_masks=masks([1.0] * 9, HALF)),
             "the loss mask of sample 0 has 9 entries", "total_lengths"),
    step_row("a mask for filler", DISAGREE,
             put(loss_masks=masks([1.0] * 8, HALF, [0.0] * 4), rollout_ids=[1, 2, 3], prompt_ids=[1, 1, 1],
                 layout=ZigzagTHD([0, 8, 16, 20], filler_slots=1)),
             "3 loss masks for 2 slots", "do not add masks for them",
             put(layout=ZigzagTHD([0, 8, 16, 20], [8, 6], filler_slots=1))),
    step_row("total_lengths of another micro-batch", DISAGREE, put(layout=ZigzagTHD([0, 8, 16], [8, 6, 3])),
             "3 total_lengths for 2 loss masks", "Pass those of this micro-batch"),
    step_row("total_length beyond its slot", DISAGREE,
             put(layout=ZigzagTHD([0, 8, 16], [8, 12]), loss_masks=masks([1.0] * 8, [1.0] * 12)),
             "sample 1 has total_length 12 in a slot of 8", "of the same micro-batch"),
    step_row("replicas with other masks", DISAGREE, put(cp_rank=1, loss_masks=masks([1.0] * 8, [1.0, 1, 0, 0, 0, 0])),
             "were given different samples", "Shard and seed the loader by DP rank only"),
    step_row("replicas with other rollout ids", DISAGREE, put(cp_rank=1, rollout_ids=["1.1.0", "another"]),
             "were given different samples", "Shard and seed the loader by DP rank only"),
    step_row("a CP rank that reads another DP rank's data", DISAGREE,
             lambda good, dp, cp: records((dp + cp) % 2) if dp else good, "were given different samples",
             "by DP rank only"),
    step_row("slot of 6 for cp 2", CUT, put(layout=ZigzagTHD([0, 8, 14])), "slot 1 has 6 tokens", "Pad"),
    step_row("rows of 6 for cp 2", CUT, put(layout=ZigzagBSHD(2, 6), loss_masks=masks(HALF, HALF)),
             "row 0 has 6 tokens", "Pad", put(layout=ZigzagBSHD(2, 8), loss_masks=[torch.ones(8)] * 2)),
    step_row("contiguous buffer of 15 for cp 2", CUT, put(layout=Contiguous([0, 8, 15], [8, 6])),
             "the packed buffer has 15 tokens", "Pad it", put(layout=Contiguous([0, 8, 14]))),
    step_row("no layout under CP", "no layout with CP > 1", put(layout=None), "cp_size is 2 and no layout was given",
             "Pass one of megatron_rl_loss.step.layouts"),
    step_row("prompt_mean without ids", "`prompt_mean` without prompt ids", everywhere(prompt_ids=None),
             "'prompt_mean' and samples without prompt_ids", "Give samples_of prompt_ids", mode="prompt_mean"),
    step_row("prompt_mean without ids on one rank", "`prompt_mean` without prompt ids", put(prompt_ids=None),
             "'prompt_mean' and samples without prompt_ids", "Give samples_of prompt_ids", mode="prompt_mean"),
    step_row("a rollout under two prompts", "a rollout id under two prompts",
             put(rollout_ids=[7, 7], prompt_ids=[1, 2]),
             "one rollout id is used under two prompt ids", "Join prompt and rollout index",
             put(rollout_ids=[7, 7], prompt_ids=[1, 1]), mode="prompt_mean"),
    step_row("a rollout under two prompts, on two ranks", "a rollout id under two prompts", same_rollout_twice,
             "one rollout id is used under two prompt ids", "Join prompt and rollout index", mode="prompt_mean"),
    step_row("rollout ids on one DP rank only", "ids on some ranks only",
             lambda good, dp, cp: [r | ({"rollout_ids": None} if dp else {}) for r in good],
             "rollout_ids on 1 of the 2 DP ranks", "Pass rollout_ids everywhere", everywhere(rollout_ids=None)),
    step_row("rollout ids on some micro-batches only", "ids on some ranks only", put(None, rollout_ids=None),
             "rollout_ids on 1 of 2 micro-batches", "Pass rollout_ids with every micro-batch"),
    step_row("ids that are floats", DISAGREE, put(prompt_ids=[0.5, 1.0]), "prompt_ids holds 0.5 (float)",
             "Pass one such id a sample"),
    step_row("ids beyond 61 bits", DISAGREE, put(rollout_ids=[2**61, 0]), "rollout_ids go beyond 61 bits",
             "Pass them as strings", put(rollout_ids=[str(2**61), "0"])),
    step_row("cu_seqlens without the 0", DISAGREE, made(lambda: ZigzagTHD([8, 16])), "cu_seqlens_padded is [8, 16]",
             "0 included", made(lambda: Samples([], layout=ZigzagTHD([0])))),
    step_row("lengths for cu_seqlens", DISAGREE, made(lambda: ZigzagTHD([0, 8, 4])), "cu_seqlens_padded is [0, 8, 4]",
             "Pass cumulative lengths"),
    step_row("a response without a prompt", DISAGREE, made(lambda: ZigzagResponse([8], [8])),
             "response_length 8 and total_length 8", "Count the prompt in total_lengths"),
    step_row("rows shorter than their samples", DISAGREE, made(lambda: ZigzagResponse([8], [4], [4])),
             "padded length 4 and total_length 8", "Pass the padded length"),
    step_row("iterator ends", "an iterator that ends or raises", lambda good, dp, cp: good[: 2 - dp],
             "ended after 1 of the step's 2 micro-batches", "Give it more data"),
    step_row("iterator is empty", "an iterator that ends or raises", lambda good, dp, cp: [] if dp else good,
             "ended after 0 of the step's 2 micro-batches", "Give it more data"),
    step_row("iterator raises", "an iterator that ends or raises", late_error, "rank 2: OSError: disk gone", "",
             styled=False),
    step_row("no iterator on a DP rank", "no iterator on a rank that needs one",
             lambda good, dp, cp: None if dp else good, "no data iterator", "is_distributed = True"),
    step_row("no iterator on a CP rank", "no iterator on a rank that needs one",
             lambda good, dp, cp: None if cp else good, "no data iterator", "is_distributed = True"),
    step_row("no iterator anywhere", "no iterator on a rank that needs one", lambda good, dp, cp: None,
             "no data iterator", "is_distributed = True"),
    step_row("samples_of gives nothing", "", made(lambda: None), "samples_of returned a NoneType",
             "Wrap the masks in Samples"),
    step_row("samples_of fails", "", made(fails), "KeyError: 'loss_masks'", "", styled=False),
    step_row("no active token", "a step without active tokens, if asked",
             everywhere(loss_masks=masks([0.0] * 8, [0.0] * 6)), "a step without one active token",
             "Look at the masks of the data", everywhere(loss_masks=masks([0.0] * 8, [0.0] * 5 + [1.0])),
             empty_step="error"),
]  # fmt: skip


# ---- the model's config at each step


def config_row(name: str, covers: str, given: str, todo: str, mode: str = "sample_mean", **changes: Any) -> Row:
    return Row(
        name=name, covers=covers, error="ValueError", given=given, todo=todo, bad=changes, options={"mode": mode}
    )


CONFIG_ROWS = [
    config_row("config: hybrid CP", "hybrid or dynamic context parallelism", "--hybrid-context-parallel", "Use a fixed",
               hybrid_context_parallel=True),
    config_row("config: dynamic CP", "hybrid or dynamic context parallelism", "--dynamic-context-parallel",
               "Use a fixed", dynamic_context_parallel=True),
    config_row("config: GTP", "weight-rematerialising TP (GTP)", "(GTP)", "Turn it off", gtp_weight_remat_size=2),
    config_row("config: GTP of experts", "weight-rematerialising TP (GTP)", "(GTP)", "Turn it off",
               expert_gtp_weight_remat_size=2),
    config_row("config: full-iteration graphs", "`--cuda-graph-impl full_iteration`",
               "--cuda-graph-impl full_iteration", "Choose another", cuda_graph_impl="full_iteration"),
    config_row("config: per-token loss forced", "`--calculate-per-token-loss` with an explicit other mode",
               "--calculate-per-token-loss with loss aggregation: sample_mean",
               "add --loss-aggregation-with-per-token-loss", calculate_per_token_loss=True),
    config_row("config: per-token loss on a wrapper that never scales", "per-token loss with Torch FSDP2",
               "per-token loss with LikeTorchFSDP2", "Turn calculate_per_token_loss off", mode="token_mean",
               calculate_per_token_loss=True, wrapper="LikeTorchFSDP2"),
    config_row("config: per-token loss averaged in the collective", "per-token loss with Torch FSDP2",
               "per-token loss with --ddp-average-in-collective", "Drop --ddp-average-in-collective", mode="token_mean",
               calculate_per_token_loss=True, average_in_collective=True),
]  # fmt: skip


# ---- losses, inside Megatron's schedule

Losses = Callable[[Any, Tensor, int], Any]  # (micro-batch, this rank's losses, its number) -> what loss_func returns


def named(*names: str) -> Losses:
    """The first micro-batch reports "kl", the second `names`."""
    return lambda m, losses, n: m.loss(losses, dict.fromkeys(names if n else ("kl",), losses))


def two_reports(*names: str) -> Losses:
    """The first micro-batch reports "kl" and "entropy", the second `names`."""
    return lambda m, losses, n: m.loss(losses, dict.fromkeys(names if n else ("kl", "entropy"), losses))


def loss_row(
    name: str, covers: str, bad: Losses, given: str, todo: str, good: Losses | None = None, error: str = "ValueError"
) -> Row:
    return Row(name=name, covers=covers, error=error, given=given, todo=todo, bad=bad, good=good)


def halved(microbatch: Any, losses: Tensor, number: int) -> Any:
    loss, count, report = microbatch.loss(losses)
    return loss / 2, count, report


PART = "losses or metrics that are not this rank's part of the layout (with the likely mix-up)"
NAMES = "reports whose names change within a step"
LOSS_ROWS = [
    loss_row("losses not cut over CP", PART, lambda m, losses, n: m.loss(torch.cat([losses, losses])),
             "per_token_loss of shape (16,)", "not cut over CP ranks"),
    loss_row("losses cut twice", PART, lambda m, losses, n: m.loss(losses[:4]), "per_token_loss of shape (4,)",
             "check that cp_size is right"),
    loss_row("losses transposed", PART, lambda m, losses, n: m.loss(losses[:, None]), "of shape (8, 1)",
             "transpose to batch first", lambda m, losses, n: m.loss(losses[None])),
    loss_row("losses unpadded and uncut", PART, lambda m, losses, n: m.loss(torch.cat([losses, losses[:6]])),
             "of shape (14,)", "unpadded, uncut tokens"),
    loss_row("losses of active tokens only", PART, lambda m, losses, n: m.loss(torch.cat([losses, losses[:4]])),
             "of shape (12,)", "pass the losses of all positions"),
    loss_row("losses of another batch", PART, lambda m, losses, n: m.loss(losses.repeat(3)[:17]), "of shape (17,)",
             "Pass the losses of this micro-batch"),
    loss_row("losses already reduced", PART, lambda m, losses, n: m.loss(losses.mean()), "of shape ()", "unreduced"),
    loss_row("losses that are ints", PART, lambda m, losses, n: m.loss(losses.long()), "per_token_loss is torch.int64",
             "Pass unreduced losses", error="TypeError"),
    loss_row("a loss that is a number", PART, lambda m, losses, n: m.loss(0.5), "per_token_loss is float",
             "Pass unreduced losses", error="TypeError"),
    loss_row("metric not cut over CP", PART, lambda m, losses, n: m.loss(losses, {"kl": losses.repeat(2)}),
             "of shape (16,)", "not cut over CP ranks", lambda m, losses, n: m.loss(losses, {"kl": losses})),
    loss_row("metric already reduced", PART, lambda m, losses, n: m.loss(losses, {"kl": losses.mean()}), "of shape ()",
             "unreduced"),
    loss_row("a report renamed", NAMES, named("entropy"), "reports ['pg_loss', 'entropy'] after one that reported",
             "Report the same names every time", named("kl")),
    loss_row("a report missing", NAMES, named(), "reports ['pg_loss'] after one that reported ['pg_loss', 'kl']",
             "Report the same names every time", named("kl")),
    loss_row("a report more", NAMES, named("kl", "entropy"), "reports ['pg_loss', 'kl', 'entropy']",
             "Report the same names every time", named("kl")),
    loss_row("one of two reports missing", NAMES, two_reports("kl"), "reports ['pg_loss', 'kl'] after one",
             "Report the same names every time", two_reports("entropy", "kl")),  # Megatron reads them by name
    loss_row("a loss divided once more", "a loss or count that the micro-batch did not hand out", halved,
             "a loss that this micro-batch did not hand out", "Return what"),
    loss_row("a metric that hides the loss", "", lambda m, losses, n: m.loss(losses, {"pg_loss": 2 * losses}),
             "pg_loss", "name", lambda m, losses, n: m.loss(losses, {"pg_loss_2": 2 * losses})),
    loss_row("losses detached", "", lambda m, losses, n: m.loss(losses.detach()), "a loss without a graph",
             "Do not detach the model's output"),
    loss_row("share detached", "", lambda m, losses, n: m.carry(m.pg_loss(losses).detach(), {}),
             "a loss without a graph", "Do not detach", lambda m, losses, n: m.carry(m.pg_loss(losses), {})),
    loss_row("share unreduced", "", lambda m, losses, n: m.carry(losses, {}), "the loss is of shape (8,)", "Reduce it",
             lambda m, losses, n: m.carry(m.sample_mean(losses), {})),
    loss_row("report of a float", "", lambda m, losses, n: m.carry(m.pg_loss(losses), {"kl": 0.5}), "kl is 0.5",
             "Reduce it", lambda m, losses, n: m.carry(m.pg_loss(losses), {"kl": m.sample_mean(losses)})),
    loss_row("report unreduced", "", lambda m, losses, n: m.carry(m.pg_loss(losses), {"kl": losses}),
             "kl is of shape (8,)", "Reduce it"),
]  # fmt: skip


def on_ranks() -> dict[str, Verdict]:
    """All rows that need groups or a model, on one of four ranks."""
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    state = start(cp=2)
    dp_rank, cp_rank = state.get_data_parallel_rank(), state.get_context_parallel_rank()
    weights = torch.arange(8.0)
    found = {}

    def samples_of(record: Record) -> Any:
        return record["make"]() if "make" in record else Samples(**record)

    def train(model: Any, data: list[Record] | None, settings: dict[str, Any], losses_of: Losses) -> None:
        """A step, and the update that would follow it."""
        seen: list[Any] = []

        def forward_step(iterator: Iterator[Any], chunk: Any) -> Any:
            microbatch = next(iterator)
            number = len(seen)
            seen.append(microbatch)
            losses = chunk(torch.arange(len(microbatch.samples.local(cp_rank, 2))) % 8)
            return losses, lambda losses: losses_of(microbatch, losses, number)

        model.zero_grad_buffer()
        aggregation(samples_of, **settings).wrap_schedule(get_forward_backward_func())(
            forward_step_func=forward_step, data_iterator=None if data is None else iter(data), model=model,
            num_microbatches=2, seq_length=8, micro_batch_size=1,
        )  # fmt: skip
        with torch.no_grad():
            model.module.losses.sub_(model.module.losses.main_grad)

    def verdict(bad: Callable[[], None], model: Any, good: Callable[[], None], sound_model: Any = None) -> Verdict:
        """Refused without a change of a weight; and the neighbour trains, which also shows that a change is seen."""
        error, text = attempt(bad)
        unchanged = torch.equal(model.module.losses, weights)
        sound_model = sound_model or model
        neighbour = outcome_of(good)
        if neighbour == ACCEPTED and torch.equal(sound_model.module.losses, weights):
            neighbour = "nothing was trained"
        with torch.no_grad():
            sound_model.module.losses.copy_(weights)
        return Verdict(error=error, text=text, neighbour=neighbour, unchanged=unchanged)

    def right(microbatch: Any, losses: Tensor, number: int) -> Any:
        return microbatch.loss(losses)

    def data_of(change: Change | None) -> Any:
        return records(dp_rank) if change is None else change(records(dp_rank), dp_rank, cp_rank)

    model = table_model(weights.tolist())
    for row in STEP_ROWS:
        bad = functools.partial(train, model, data_of(row.bad), row.options, right)
        good = functools.partial(train, model, data_of(row.good), row.options, right)
        found[row.name] = verdict(bad, model, good)

    class LikeTorchFSDP2(_BaseDataParallel):  # type: ignore[misc]
        """Torch FSDP2's wrapper needs a GPU; like it, this one leaves `scale_gradients` undone."""

        def zero_grad_buffer(self) -> None: ...

    for row in CONFIG_ROWS:
        changed = table_model(weights.tolist(), per_token=row.bad.get("calculate_per_token_loss", False))
        if "average_in_collective" in row.bad:
            changed.ddp_config.average_in_collective = True
        if "wrapper" in row.bad:
            changed = LikeTorchFSDP2(changed.config, changed.module)
        for name, value in row.bad.items():
            if name not in ("wrapper", "average_in_collective"):
                setattr(changed.config, name, value)
        bad = functools.partial(train, changed, data_of(None), row.options, right)
        good = functools.partial(train, model, data_of(None), row.options, right)
        found[row.name] = verdict(bad, changed, good, model)

    for row in LOSS_ROWS:
        bad = functools.partial(train, model, data_of(None), {"mode": "token_mean"}, row.bad)
        good = functools.partial(train, model, data_of(None), {"mode": "token_mean"}, row.good or right)
        found[row.name] = verdict(bad, model, good)
    return found


# ---- the example's file of rollouts

LINE: dict[str, Any] = {
    "prompt_tokens": [1, 2],
    "response_tokens": [3, 4, 0],
    "loss_mask": [1, 0.5, 0],
    "reward": 1.0,
    "prompt_id": "p",
    "rollout_id": "p/0",
}


def file_row(name: str, bad: Any, given: str, good: Any = LINE) -> Row:
    """`bad` is the third of a file's lines; the reader's texts are its own, with file and line."""
    return Row(name=f"file: {name}", covers="", error="ValueError", given=given, bad=bad, good=good, styled=False)


FILE_ROWS = [
    file_row("no JSON", "{", "line 3: not JSON"),
    file_row("a list", [1], "line 3: a list, not an object"),
    file_row("a key missing", {k: v for k, v in LINE.items() if k != "reward"}, "line 3: missing keys ['reward']"),
    file_row("a key misspelt", LINE | {"old_logprobs": [0]}, "line 3: missing keys [], unknown keys ['old_logprobs']"),
    file_row("a mask too short", LINE | {"loss_mask": [1, 1]}, "line 3: loss_mask has 2 entries for 3 response tokens"),
    file_row("a negative mask", LINE | {"loss_mask": [1, -1, 0]}, "line 3: loss_mask has a negative entry"),
    file_row("a NaN mask", LINE | {"loss_mask": [1, NAN, 0]}, "line 3: loss_mask must be a list of finite numbers"),
    file_row("a token beyond the vocabulary", LINE | {"response_tokens": [3, 32, 0]}, "ints in [0, 32)",
             LINE | {"response_tokens": [3, 31, 0]}),
    file_row("no response", LINE | {"response_tokens": [], "loss_mask": []}, "line 3: response_tokens must be a list"),
    file_row("an infinite reward", LINE | {"reward": INF}, "line 3: reward is inf"),
    file_row("an id of another type", LINE | {"prompt_id": None}, "line 3: prompt_id is None"),
    file_row("a rollout under two prompts", LINE | {"prompt_id": "q"}, "line 3: rollout_id 'p/0' came before"),
    file_row("a positive old log-prob", LINE | {"old_log_probs": [-1, 0.5, -1]}, "above 0"),
    file_row("old log-probs on one line", LINE | {"old_log_probs": [-1, -1, -1]}, "on all lines or on none"),
]  # fmt: skip


def file_verdicts() -> dict[str, Verdict]:
    """Each file through the example's `main`, up to where training would begin."""
    import pretrain_grpo
    from megatron.core import num_microbatches_calculator
    from megatron.training import global_vars

    prepare_parsing()

    class Trains(Exception): ...

    def pretrain(*_: Any) -> None:
        raise Trains

    pretrain_grpo.pretrain = pretrain
    path = Path(os.environ["TMPDIR"]) / "rollouts.jsonl"

    def main(line: Any) -> None:
        last = line if isinstance(line, str) else json.dumps(line)
        path.write_text(f"{json.dumps(LINE)}\n\n{last}\n")
        num_microbatches_calculator.destroy_num_microbatches_calculator()
        global_vars.destroy_global_vars()
        sys.argv = ["pretrain_grpo.py", *MODEL.split(), *DATA.split(), *TRAINING.split(), "--rollouts", str(path)]
        with contextlib.suppress(Trains):
            pretrain_grpo.main()

    found = {}
    neighbours: dict[str, str] = {}
    for row in FILE_ROWS:
        error, text = attempt(functools.partial(main, row.bad))
        key = json.dumps(row.good)
        if key not in neighbours:
            neighbours[key] = outcome_of(functools.partial(main, row.good))
        found[row.name] = Verdict(error=error, text=text, neighbour=neighbours[key])
    return found


# ---- the tests

GROUPS = {"flags": (1, flag_verdicts), "ranks": (4, on_ranks), "files": (1, file_verdicts)}
LAUNCHED = (
    [("flags", row) for row in FLAG_ROWS]
    + [("ranks", row) for row in (*STEP_ROWS, *CONFIG_ROWS, *LOSS_ROWS)]
    + [("files", row) for row in FILE_ROWS]
)
ROWS = [row for _, row in LAUNCHED]


@functools.cache
def verdicts(group: str) -> list[dict[str, Verdict]]:
    world_size, function = GROUPS[group]
    return run_ranks(world_size, function, timeout_s=120)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("launch")))


def check(row: Row, seen: list[Verdict]) -> None:
    for verdict in seen:
        assert verdict.error == row.error, verdict.text
        assert row.given in verdict.text
        if row.styled:
            assert in_three_parts(verdict.text, row), verdict.text
        assert verdict.unchanged, "a parameter changed"
        assert verdict.neighbour == ACCEPTED


@pytest.mark.parametrize(("group", "row"), [pytest.param(*pair, id=pair[1].name) for pair in LAUNCHED])
def test_refused_in_a_launch(
    group: str, row: Row, folder: None, record_property: Callable[[str, object], None]
) -> None:
    check(row, [rank[row.name] for rank in verdicts(group)])
    record_property("bad_inputs_refused", 1)


def swallowed(flags: str) -> str:
    return outcome_of(functools.partial(parsed, flags, ignore_unknown=True))


def test_a_misspelt_mode_flag_is_not_swallowed(folder: None) -> None:
    """With `ignore_unknown_args` Megatron lets it pass, and the run would silently average by another mode."""
    assert "--loss-agregation" in run_ranks(1, functools.partial(swallowed, "--loss-agregation token_mean"))[0]


def refused_phrases() -> list[str]:
    """The phrases of the table of refusals in docs/support.md."""
    page = (ROOT / "docs/support.md").read_text()
    section = page.split("## What is refused\n")[1].split("\n## ")[0]
    cells = [line.split("|")[2] for line in section.splitlines() if line.startswith("|")][2:]
    return [phrase.strip() for cell in cells for phrase in cell.split(";")]


def test_every_refusal_of_the_page_has_a_row() -> None:
    phrases = refused_phrases()
    assert len(phrases) >= 20
    covers = {row.covers for row in ROWS} - {""}
    assert [phrase for phrase in phrases if not any(part in phrase for part in covers)] == []
    assert [part for part in covers if not any(part in phrase for phrase in phrases)] == []


def test_there_are_many_rows_and_none_twice() -> None:
    assert len(ROWS) >= 60
    assert len({row.name for row in ROWS}) == len(ROWS)


# ---- edge cases that are defined


def masked(samples: list[oracle.Sample]) -> list[oracle.Sample]:
    return [oracle.sample(s.losses.tolist(), [0] * len(s.mask), s.rollout_id, str(s.prompt_id)) for s in samples]


EDGES: dict[str, tuple[list[oracle.Sample], list[list[list[int]]]]] = {
    # samples, and their numbers by DP rank and micro-batch
    "a rank without samples": (step_samples(3), [[[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11, 12]], [[], []]]),
    "5 samples on 2 DP ranks": (step_samples(3)[:5], [[[0, 1], [2]], [[3], [4]]]),
    "one sample in the step": (step_samples(3)[:1], [[[], []], [[], [0]]]),
    "no active token": (masked(step_samples(3)), [[[0, 1, 2, 3], [4, 5, 6]], [[7, 8, 9], [10, 11, 12]]]),
}


def edge_errors() -> dict[str, tuple[float, float, int]]:
    """Worst errors of gradient and logged values against the oracle, over modes, counting and carriers."""
    state = start(cp=2)
    found = {}
    for name, (samples, dealt) in EDGES.items():
        table = [float(loss) for one in samples for loss in one.losses] + [0.0]
        worst_gradient = worst_value = 0.0
        cases = 0
        for per_token in (False, True):
            model = table_model(table, per_token=per_token)
            for settings in ALL_SETTINGS:
                batches = [Batch(samples, chosen, 2) for chosen in dealt[state.get_data_parallel_rank()]]
                step = aggregation(**settings, with_per_token_loss=True)
                gradient, logged = one_step(model, batches, step)
                of_oracle: Any = (settings["mode"], samples, settings["divisor"], settings["units"])
                expected = torch.cat([*oracle.step_gradient(*of_oracle), torch.zeros(1)])
                metric: Any = ("sample_mean", samples, None, settings["units"])
                errors = [
                    abs(logged["pg_loss"] - float(oracle.step_loss(*of_oracle))) / (oracle.step_scale(*of_oracle) or 1),
                    abs(logged["twice"] / 2 - float(oracle.step_loss(*metric))) / (oracle.step_scale(*metric) or 1),
                ]
                off = relative_error(gradient, expected)
                assert all(error == error for error in (*errors, off)), (name, settings, "NaN")
                worst_gradient, worst_value = max(worst_gradient, off), max(worst_value, *errors)
                cases += 1
        found[name] = (worst_gradient, worst_value, cases)
    return found


@pytest.mark.slow
def test_defined_edge_cases_equal_the_oracle() -> None:
    for rank in run_ranks(4, edge_errors):
        for name, (gradient, value, cases) in rank.items():
            assert cases == 2 * len(ALL_SETTINGS)
            # Without an active token the gradient must be zero itself: relative to 1e-30, any other fails.
            assert gradient < oracle.EXACT, name
            assert value < oracle.sum_error(oracle.num_tokens(EDGES[name][0])), name
