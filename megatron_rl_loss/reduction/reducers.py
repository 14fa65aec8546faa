"""A reducer made by hand, from masks and the totals of the step; a plan makes those of its micro-batches itself."""

from collections.abc import Callable, Iterable

from torch import Tensor

from megatron_rl_loss.modes.aggregation import resolve
from megatron_rl_loss.modes.table import Mode, ModeFunction
from megatron_rl_loss.modes.users_totals import checked_weights
from megatron_rl_loss.reduction.sums import WeightedSum
from megatron_rl_loss.step.ids import Ids, IdsByName
from megatron_rl_loss.step.layouts import Layout
from megatron_rl_loss.step.masks import Mask
from megatron_rl_loss.step.samples import Labels, Samples
from megatron_rl_loss.step.totals import StepTotals
from megatron_rl_loss.step.units import UnitCounting

Reducer = Callable[[Tensor], Tensor]


def make_pg_loss_reducer(
    mode: str | Mode | ModeFunction,
    loss_masks: Iterable[Mask],
    *,
    totals: StepTotals,
    divisor: float | None = None,
    units: UnitCounting | None = None,
    rollout_ids: Ids | None = None,
    prompt_ids: Ids | None = None,
    ids: IdsByName | None = None,
    labels: Labels | None = None,
    layout: Layout | None = None,
    cp_rank: int | None = None,
    cp_size: int = 1,
) -> WeightedSum:
    """``reducer(per_token_loss) -> share``: this rank's share of the step loss of one micro-batch.

    >>> masks = [[1, 1, 0], [1]]
    >>> totals = StepTotals.from_loss_masks(masks)
    >>> make_pg_loss_reducer("token_mean", masks, totals=totals)(torch.tensor([1.0, 2.0, 9.0, 6.0]))
    tensor(3.)

    Shares add up. A trainer that averages gradients over ranks (plain `DistributedDataParallel`, FSDP) trains on
    ``world_size * share``, with the number of these ranks.

    Args:
        mode: ``sample_mean``, ``prompt_mean``, ``token_mean``, ``constant``, ``token_sum``, a registered name, another
            framework's (``verl:token-mean``; `python -m megatron_rl_loss modes` lists them), or a function of
            `ModeInputs`.
        loss_masks, rollout_ids, prompt_ids, ids, labels, layout: the micro-batch, as in `Samples`.
        totals: the step's denominators.
        divisor: L of ``constant``, in tokens (the generation budget, say), or d of ``token_sum``; with no other mode.
        units: count every unit (``all``, unless a framework's name says otherwise) or only those with a token of
            nonzero weight (``active``).
        cp_rank, cp_size: this rank's place in its context-parallel group; cp_rank is required where cp_size > 1.

    Returns:
        A `WeightedSum`, to be called. It takes the local per-token losses (float, in the layout's order) and returns a
        0-dim float32 tensor that stays connected to the graph even without active tokens. float16 and bfloat16 are
        summed in float32; the gradient of float16 losses is float16, too small for most weights without a loss scale,
        which is warned of. NaN and Inf at masked positions are ignored, at active ones they come through. It raises
        ValueError for losses whose shape is not this rank's part of the layout.

    Raises:
        ValueError, TypeError: unknown mode, a divisor that is missing, unusable or without effect, totals without the
            count the mode needs, or that are smaller than this micro-batch; anything `Samples` refuses.
    """
    samples = Samples(loss_masks, layout=layout, rollout_ids=rollout_ids, prompt_ids=prompt_ids, ids=ids, labels=labels)
    aggregation = resolve(mode, divisor=divisor, units=units)
    local = samples.local(place_in_cp(cp_rank, cp_size), cp_size)
    return WeightedSum(checked_weights(aggregation, local, totals), local, aggregation)


def place_in_cp(cp_rank: int | None, cp_size: int) -> int:
    """The CP rank; None is allowed where cp_size is 1."""
    if cp_rank is None and cp_size != 1:
        raise ValueError(
            f"cp_size={cp_size} without a cp_rank: each CP rank holds other tokens. Pass cp_rank=cp_group.rank()."
        )
    return 0 if cp_rank is None else cp_rank
