"""Refusals of a step's data, of a model's config and of losses: rows for launches on cp 2 x dp 2."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from refusals import Row
from torch import Tensor

from megatron_rl_loss import ZigzagTHD

NAN, INF = float("nan"), float("inf")

Record = dict[str, Any]
TOKENS = torch.arange(16)


def records(dp_rank: int) -> list[Record]:
    """Two micro-batches of two samples, as keyword arguments of `Samples`."""
    return [
        {
            "loss_masks": [torch.ones(8), torch.tensor([0.0, 0, 1, 1, 0.5, 1])],
            "layout": ZigzagTHD([0, 8, 16], total_lengths=[8, 6]),
            "rollout_ids": [f"{dp_rank}.{number}.{i}" for i in range(2)],
            "prompt_ids": [f"prompt {dp_rank}"] * 2,
            "tokens": TOKENS,
        }
        for number in range(2)
    ]


Change = Callable[[list[Record], int, int], Any]  # (good records, DP rank, CP rank) -> an iterator or a list


def put(dp_rank: int | None = 1, cp_rank: int | None = None, number: int = 1, **fields: Any) -> Change:
    """Other `fields` in a micro-batch of that DP (and CP) rank; None for all. Another layout comes without tokens."""
    if "layout" in fields:
        fields = {"tokens": None} | fields

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


def calling(make: Callable[[], Any]) -> Change:
    """A `samples_of` that calls this on DP rank 1."""
    return put(make=make)


def fails() -> Any:
    return dict[str, Any]()["loss_masks"]


def same_rollout_twice(good: list[Record], dp: int, cp: int) -> list[Record]:
    good[1]["rollout_ids"] = [f"{dp}.1.0", "7"]  # under "prompt 0" on one rank, "prompt 1" on the other
    return good


EMPTY: Record = {"loss_masks": [], "layout": ZigzagTHD([0]), "rollout_ids": [], "prompt_ids": [], "tokens": TOKENS[:0]}


def one_sample(record: Record, number: int) -> Record:
    columns = {name: record[name][number : number + 1] for name in ("loss_masks", "rollout_ids", "prompt_ids")}
    return columns | {"layout": ZigzagTHD([0, 8], total_lengths=[8 - 2 * number]), "tokens": TOKENS[:8]}


def step_row(
    name: str, covers: str, bad: Change, value: str, remedy: str, good: Change | None = None, *, styled: bool = True,
    error: str = "BadBatchError", **settings: Any,
) -> Row:  # fmt: skip
    return Row(
        name=name, covers=covers, error=error, value=value, remedy=remedy, bad=bad, good=good, options=settings,
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
    step_row("replicas with other masks", DISAGREE, put(cp_rank=1, loss_masks=masks([1.0] * 8, [0.0, 1, 1, 0.5, 1, 0])),
             "were given different samples", "Shard and seed the loader by DP rank only"),
    step_row("replicas with other tokens", DISAGREE, put(cp_rank=1, tokens=TOKENS.flip(0)),
             "were given different samples", "by DP rank only"),
    step_row("replicas cut into other micro-batches", DISAGREE,
             lambda good, dp, cp: [one_sample(good[0], 0), one_sample(good[0], 1)] if cp else [good[0], EMPTY],
             "were given different samples", "by DP rank only"),
    step_row("a CP rank that reads another DP rank's data", DISAGREE,
             lambda good, dp, cp: records((dp + cp) % 2) if dp else good,
             "DP ranks 0 and 1 hold samples with the same", "by DP rank"),
    step_row("slot of 6 for cp 2", CUT, put(layout=ZigzagTHD([0, 8, 14])), "slot 1 has 6 tokens", "Pad"),
    step_row("no layout under CP", "no layout with CP > 1", put(layout=None), "cp_size is 2 and no layout was given",
             "Pass layout=: ZigzagTHD"),
    step_row("prompt_mean without ids on one rank", "`prompt_mean` without prompt ids", put(prompt_ids=None),
             "'prompt_mean' and samples without prompt_ids", "Pass Samples(..., prompt_ids=", mode="prompt_mean"),
    step_row("a term by prompt without ids on one rank", "`prompt_mean` without prompt ids", put(prompt_ids=None),
             "'prompt_mean' and samples without prompt_ids", "Pass Samples(..., prompt_ids=",
             terms={"kl": "prompt_mean"}),
    step_row("a rollout under two prompts, on two ranks", "a rollout id under two prompts", same_rollout_twice,
             "one rollout id is used under two prompt ids", "Join prompt and rollout index", mode="prompt_mean"),
    step_row("rollout ids on one DP rank only", "ids on some ranks only",
             lambda good, dp, cp: [r | ({"rollout_ids": None} if dp else {}) for r in good],
             "and other ids on other ranks", "Pass the same ids on every rank", everywhere(rollout_ids=None)),
    step_row("rollout ids on some micro-batches only", "ids on some ranks only", put(None, rollout_ids=None),
             "micro-batches with ids of", "Pass the same ids with every micro-batch"),
    step_row("iterator ends", "an iterator that ends or raises", lambda good, dp, cp: good[: 2 - dp],
             "ended after 1 of the step's 2 micro-batches", "Provide more data"),
    step_row("iterator raises", "an iterator that ends or raises", late_error, "rank 2: OSError: disk gone", "",
             styled=False),
    step_row("no iterator on a DP rank", "no iterator on a rank that needs one",
             lambda good, dp, cp: None if dp else good, "no data iterator", "is_distributed = True"),
    step_row("no iterator on a CP rank", "no iterator on a rank that needs one",
             lambda good, dp, cp: None if cp else good, "no data iterator", "is_distributed = True"),
    step_row("a term's mask that is not given", "",
             lambda good, dp, cp: good if dp else [r | {"term_masks": {"correct": r["loss_masks"]}} for r in good],
             "the samples have no mask 'correct'", "Pass Samples(..., term_masks=",
             lambda good, dp, cp: [r | {"term_masks": {"correct": r["loss_masks"]}} for r in good],
             term_masks=["correct"]),
    step_row("samples_of gives nothing", "", calling(lambda: None), "samples_of returned a NoneType",
             "Wrap the masks in Samples"),
    step_row("samples_of fails", "", calling(fails), "KeyError: 'loss_masks'", "", styled=False),
    step_row("no active token", "a step without active tokens",
             everywhere(loss_masks=masks([0.0] * 8, [0.0] * 6)), "a step without one active token",
             "Check the loss masks", everywhere(loss_masks=masks([0.0] * 8, [0.0] * 5 + [1.0])),
             empty_step="error"),
]  # fmt: skip


# ---- the model's config at each step


def config_row(name: str, covers: str, value: str, remedy: str, mode: str = "sample_mean", **changes: Any) -> Row:
    return Row(
        name=name, covers=covers, error="ValueError", value=value, remedy=remedy, bad=changes, options={"mode": mode}
    )


CONFIG_ROWS = [
    config_row("config: hybrid CP", "hybrid context parallelism", "--hybrid-context-parallel", "Use a fixed",
               hybrid_context_parallel=True),
    config_row("config: dynamic CP", "dynamic context parallelism", "dynamic context parallelism without calculate_per",
               "Turn calculate_per_token_loss on", dynamic_context_parallel=True),
    config_row("config: GTP", "rematerialises weights (GTP)", "(GTP)", "Turn it off", gtp_weight_remat_size=2),
    config_row("config: GTP of experts", "rematerialises weights (GTP)", "(GTP)", "Turn it off",
               expert_gtp_weight_remat_size=2),
    config_row("config: full-iteration graphs", "`--cuda-graph-impl full_iteration`",
               "--cuda-graph-impl full_iteration", "Choose another", cuda_graph_impl="full_iteration"),
    config_row("config: gradients that nothing sums", "a model that never sums gradients over ranks",
               "a model config without finalize_model_grads_func", "Set it to megatron.core.distributed",
               finalize_model_grads_func=None),
    config_row("config: per-token loss forced", "`--calculate-per-token-loss` with another mode",
               "--calculate-per-token-loss with mode sample_mean",
               "add --loss-aggregation-with-per-token-loss", calculate_per_token_loss=True),
    config_row("config: per-token loss on a wrapper that never scales", "per-token loss with Torch FSDP2",
               "calculate_per_token_loss with LikeTorchFSDP2", "Turn calculate_per_token_loss off", mode="token_mean",
               calculate_per_token_loss=True, wrapper="LikeTorchFSDP2"),
    config_row("config: per-token loss averaged in the collective", "per-token loss with Torch FSDP2",
               "--calculate-per-token-loss with --ddp-average", "Drop one of the two flags", mode="token_mean",
               calculate_per_token_loss=True, average_in_collective=True),
]  # fmt: skip


# ---- losses, inside Megatron's schedule

Losses = Callable[[Any, Tensor, int], Any]  # (micro-batch, this rank's losses, its number) -> what loss_func returns


def reporting(first: Sequence[str], second: Sequence[str]) -> Losses:
    """Losses with the names that the first micro-batch reports, and the second."""
    return lambda m, losses, n: m.loss(losses, dict.fromkeys(second if n else first, losses))


def on_dp_rank_1(there: Sequence[str], elsewhere: Sequence[str]) -> Losses:
    def losses_of(microbatch: Any, losses: Tensor, number: int) -> Any:
        from megatron.core import parallel_state

        names = there if parallel_state.get_data_parallel_rank() else elsewhere
        return microbatch.loss(losses, dict.fromkeys(names, losses))

    return losses_of


def loss_row(
    name: str, covers: str, bad: Losses, value: str, remedy: str, good: Losses | None = None, error: str = "ValueError",
    takes: int = 1,
) -> Row:  # fmt: skip
    options = {"takes": takes}
    return Row(name=name, covers=covers, error=error, value=value, remedy=remedy, bad=bad, good=good, options=options)


def changing(change: Callable[[Tensor, Tensor, dict[str, Tensor]], Any]) -> Losses:
    """Losses with the micro-batch's return value changed."""
    return lambda m, losses, n: change(*m.loss(losses))


def called_and_ignored(microbatch: Any, losses: Tensor, number: int) -> Any:
    microbatch.loss(losses)
    return losses.sum(), torch.tensor(1, dtype=torch.int32), {}


def earlier_ones(microbatch: Any, losses: Tensor, number: int, kept: list[Any] = []) -> Any:  # noqa: B006
    kept[number:] = [microbatch.loss(losses)]
    return kept[0]


def with_a_kl_term(microbatch: Any, losses: Tensor, number: int) -> Any:
    from megatron_rl_loss import Term

    return microbatch.loss({"pg": losses, "kl": Term(losses.square(), "sample_mean", coef=0.1)})


HANDED_OUT = "a loss or count that it did not hand out"
NOT_ITS_LOSS = "a loss that this micro-batch did not hand out"
PART = "losses or metrics that are not this rank's part of the layout (with the likely mix-up)"
NAMES = "a metric that a micro-batch with tokens leaves out"
LOSS_ROWS = [
    loss_row("losses not cut over CP", PART, lambda m, losses, n: m.loss(torch.cat([losses, losses])),
             "per_token_loss of shape (16,)", "not cut over CP ranks"),
    loss_row("a report renamed", NAMES, reporting(["kl"], ["entropy"]),
             "reports ['pg_loss', 'entropy'], while", "in every micro-batch that has active tokens of it",
             reporting(["kl"], ["kl"]), "BadBatchError"),
    loss_row("one of two reports missing", NAMES, reporting(["kl", "entropy"], ["kl"]),
             "micro-batch 1 reports ['pg_loss', 'kl'], while", "in every micro-batch that has active tokens of it",
             reporting(["kl", "entropy"], ["entropy", "kl"]), "BadBatchError"),  # Megatron reads them by name
    loss_row("a metric on one DP rank alone", NAMES, on_dp_rank_1(["kl"], []),
             "micro-batch 1 reports ['pg_loss'], while", "in every micro-batch that has active tokens of it",
             on_dp_rank_1(["kl", "entropy"], ["entropy", "kl"]), "BadBatchError"),
    loss_row("a metric that hides the loss", "", lambda m, losses, n: m.loss(losses, {"pg_loss": 2 * losses}),
             "pg_loss", "name", lambda m, losses, n: m.loss(losses, {"pg_loss_2": 2 * losses})),
    loss_row("a report of one's own", "", changing(lambda loss, count, report: (loss, count, {"kl": loss.detach()})),
             "a report of kl alone", "Pass values of tokens as metrics",
             changing(lambda loss, count, report: (loss, count, {**report, "kl": loss.detach()}))),
    loss_row("the stock 2-tuple", HANDED_OUT, lambda m, losses, n: (losses.mean(), {}), "loss_func returned 2 values",
             "Return microbatch.loss"),
    loss_row("the stock 3-tuple", HANDED_OUT,
             lambda m, losses, n: (losses.sum(), torch.tensor(losses.numel(), dtype=torch.int32), {}),
             "its loss() was not called", ""),
    loss_row("a bare loss", HANDED_OUT, lambda m, losses, n: losses.mean(), "loss_func returned a Tensor",
             "Return microbatch.loss"),
    loss_row("its count dropped", HANDED_OUT, changing(lambda loss, count, report: (loss, report)),
             "loss_func returned 2 values", "Return microbatch.loss"),
    loss_row("divided by the number of micro-batches", HANDED_OUT,
             changing(lambda loss, count, report: (loss / 2, count, report)), NOT_ITS_LOSS, "Return the result"),
    loss_row("a KL term on top", HANDED_OUT, changing(lambda loss, count, report: (loss + loss**2, count, report)),
             NOT_ITS_LOSS, "put further terms into loss({...})", with_a_kl_term),
    loss_row("changed in place", HANDED_OUT, changing(lambda loss, count, report: (loss.mul_(0.5), count, report)),
             "it was changed in place", ""),
    loss_row("a micro-batch carried twice", "a micro-batch that is carried a second time without `plan.reset()`",
             lambda m, losses, n: (m.loss(losses), m.loss(losses))[1], "a plan, a second time", "call plan.reset()"),
    loss_row("tokens cut in another way", "tokens that are not the plan's cut",
             lambda m, losses, n: (m.check_tokens(TOKENS[:8]), m.loss(losses))[1],
             "local tokens that are not those of the plan's layout", "Give Samples the model's layout",
             lambda m, losses, n: (m.check_tokens(m.local(TOKENS)), m.loss(losses))[1]),
    loss_row("a form that does not exist", HANDED_OUT, lambda m, losses, n: m.loss(losses, form="sum"),
             "form='sum'", "leave form out"),
    loss_row("a loss made without gradients", "", torch.no_grad()(lambda m, losses, n: m.loss(losses)),
             "a loss without gradients in a training step", "Leave torch.no_grad() out"),
    loss_row("called, and something else returned", HANDED_OUT, called_and_ignored, NOT_ITS_LOSS, "Return the result"),
    loss_row("another count", HANDED_OUT, changing(lambda loss, count, report: (loss, count.clone(), report)),
             "a num_tokens that this micro-batch did not hand out", "Return the result",
             changing(lambda loss, count, report: (loss, count, {**report, "lr": torch.ones(())}))),
    loss_row("an earlier micro-batch's", HANDED_OUT, earlier_ones, NOT_ITS_LOSS, "Return the result"),
    loss_row("two micro-batches taken", "", lambda m, losses, n: m.loss(losses),
             "forward_step took 2 micro-batches from its iterator", "Call next(data_iterator) once", takes=2),
]  # fmt: skip
