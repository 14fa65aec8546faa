"""A step of `tiny_gpt`'s model as an audit measures it, and what its weights should be, from the oracle alone.

`run_steps` runs steps of a loss function on a rank, each in a fresh model of one layout; `expected_weights` says what
the loss functions of `STOCK` do to a token, as formulas of the counts of each micro-batch and rank.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import gpt_oracle
import numpy as np
import oracle
import torch
from gpt_oracle import Rollout
from gpt_steps import output_of, prepared, run_batches, settings_of, start_layout
from tiny_gpt import Batch, Case, Layout, Ready, dealt, fully_masked
from torch import Tensor

from megatron_rl_loss import Samples, tap

OURS = ("ours", "several terms")
#: Of "several terms": mode (None: the policy loss's), coefficient and mask of each.
TERMS: dict[str, tuple[str | None, float, str | None]] = {
    "pg": (None, 1.0, None),
    "kl": ("token_mean", 0.05, None),
    "entropy": ("prompt_mean", -0.3, None),
    "nll": ("sample_mean", 0.2, "correct"),
}


def correct_masks(rollouts: Sequence[Rollout]) -> list[Tensor]:
    """A mask of its own: whole samples, those whose advantage is above 0, without their first token."""
    return [torch.tensor(one.mask) * (one.advantages[0] > 0) * (torch.arange(len(one.mask)) > 0) for one in rollouts]


STOCK: dict[str, Callable[..., Any]] = {
    # The mean over this rank's own active tokens; its sum over the tokens of all CP ranks; Megatron's own.
    "2-tuple, local": lambda losses, mask, **_: ((losses * mask).sum() / (mask != 0).sum().clamp(min=1), {}),
    "2-tuple, over CP": lambda losses, mask, full_count: ((losses * mask).sum() / max(full_count, 1), {}),
    "3-tuple": lambda losses, mask, **_: ((losses * mask).sum(), (mask != 0).sum().int(), {}),
}


class Ask(NamedTuple):
    """A step to run.

    Attributes:
        loss: a key of `STOCK`; "ours", which is `microbatch.loss`; or "several terms", its `TERMS`.
        how: "tap", "alone" (not audited), or a key of `TAPS` or `DESCRIBED`, for losses of `STOCK`.
        mutation: a key of `MUTATIONS`: what breaks the one factor; "" is nothing.
    """

    case: Case
    loss: str = "ours"
    how: str = "tap"
    mutation: str = ""


class Outcome(NamedTuple):
    """The outcome of a step on one rank.

    Attributes:
        steps: what was measured of each term, on the first rank.
        expected: mode, divisor and unit counting of each, as an audit of LossAggregation's own step knows it.
        deviation: on the last pipeline stage, of losses of ours.
        after: gradients, and weights after the optimizer's step.
    """

    steps: dict[str, Any]
    expected: dict[str, Any]
    deviation: float | None
    after: list[Any]

    @property
    def measured(self) -> Any:
        """The step of the policy loss, or of what was measured instead."""
        return self.steps.get("pg", next(iter(self.steps.values()), None))


def run_ask(layout: Layout, ask: Ask, rollouts: list[Rollout]) -> Outcome:
    from megatron_rl_loss import Audit, LossAggregation, Term
    from megatron_rl_loss.audit.megatron.reports import shown

    ready, batches = prepared(layout, ask.case, rollouts, "packed")
    if ask.mutation:
        MUTATIONS[ask.mutation][0](ready)

    def forward_step(iterator: Iterator[Any], model: Any) -> Any:
        taken = next(iterator)
        batch: Batch = taken.data if ask.loss in OURS else taken

        def loss_func(negative_log_probs: Tensor) -> Any:
            losses = negative_log_probs * (1.5 + batch.advantages)  # a factor of its own
            if ask.loss == "ours":
                return taken.loss(losses)
            if ask.loss == "several terms":
                return taken.loss({
                    name: Term(losses * (k + 1), mode, coef=coef, mask=mask)
                    for k, (name, (mode, coef, mask)) in enumerate(TERMS.items())
                })  # fmt: skip
            full_count = sum(int((mask != 0).sum()) for mask in batch.samples.loss_masks)
            losses = TAPS.get(ask.how, TAPS["tap"])[0](losses, batch)
            return STOCK[ask.loss](losses, batch.mask, full_count=full_count)

        return output_of(model, batch), loss_func

    wrap = samples_of = None
    if ask.loss in OURS:
        several: Any = {"terms": {"entropy": "prompt_mean"}, "term_masks": ["correct"]}
        declared = several if ask.loss == "several terms" else {}
        describe = functools.partial(Batch.described, correct=correct_masks)
        proof = "off" if ask.mutation or ask.how == "alone" else "error"
        wrap = LossAggregation(settings_of(ask.case, proof=proof), describe, **declared).wrap_schedule
    else:
        samples_of = DESCRIBED.get(ask.how, (operator.attrgetter("samples"), ""))[0]
    step = functools.partial(run_batches, layout, ready, forward_step, batches, wrap)
    steps, expected, deviation = {}, {}, None
    if ask.how == "alone":
        step()
    else:
        with Audit(ready.chunks, samples_of=samples_of) as audit:
            step(audit.watch)
        steps = audit.steps
        expected = {name: shown(audit.expected_of(name)) for name in steps if audit.expected_of(name) is not None}
        deviation = audit.deviation() if ask.loss in OURS else None
    parameters = [parameter for chunk in ready.chunks for parameter in chunk.parameters()]
    after = [parameter.main_grad.clone() for parameter in parameters]
    succeeded, _, _ = ready.optimizer.step()
    assert succeeded
    after += [parameter.detach() for parameter in parameters]
    return Outcome(steps, expected, deviation, [value.float().numpy().copy() for value in after])


def run_steps(layout: Layout, asks: list[Ask], rollouts: dict[Any, list[Rollout]]) -> list[Outcome]:
    """The outcomes of all asks on one rank."""
    start_layout(layout)
    return [run_ask(layout, ask, rollouts[ask.case.shape(layout)]) for ask in asks]


# ---- taps that are missing, or say more


def tapped_with_ids(losses: Tensor, batch: Batch, ids: Tensor) -> Tensor:
    rows = [torch.tensor(one.tokens) for one in batch._rollouts]
    masks, layout = batch.samples.loss_masks, batch.samples.layout
    return tap(losses, samples=Samples(masks, layout=layout, tokens=batch.samples.in_buffer(rows)), tokens=ids)


def tapped_terms(losses: Tensor, batch: Batch) -> Tensor:
    """Three terms; the audit is told one coefficient."""
    policy, kl, entropy = (losses.view_as(losses) for _ in range(3))
    return tap(policy) + 0.5 * tap(kl, "kl", coef=0.5) - 0.25 * tap(entropy, "entropy")


#: What is tapped, and what the audit then says.
TAPS: dict[str, tuple[Callable[[Tensor, Batch], Tensor], str]] = {
    "tap": (lambda losses, batch: tap(losses), ""),
    "terms": (tapped_terms, ""),
    "ids": (lambda losses, batch: tapped_with_ids(losses, batch, batch.tokens), ""),
    "other ids": (
        lambda losses, batch: tapped_with_ids(losses, batch, batch.tokens + (batch.positions == 1)),
        "The layout or the batch given is not the model's",
    ),
    "half": (
        lambda losses, batch: tap(losses[:, ::2]).repeat_interleave(2, 1),
        "by its layout the rank holds",
    ),
    "no tap": (lambda losses, batch: losses, "Nothing was tapped"),
}
#: What describes a batch, and what the audit then says.
DESCRIBED: dict[str, tuple[Any, str]] = {
    "nothing": (None, "The masks are not known (None). Give"),
    "an error": (operator.attrgetter("masks"), "The masks are not known (AttributeError("),
}

# ---- what breaks the one factor


def scale(ready: Ready, factor: float) -> None:
    """DDP's scaling."""
    for bucket in (bucket for chunk in ready.chunks for buffer in chunk.buffers for bucket in buffer.buckets):
        bucket.gradient_scaling_factor *= factor


def scale_ranks_apart(ready: Ready) -> None:
    from megatron.core import parallel_state as mpu

    scale(ready, 1 + mpu.get_data_parallel_rank())


def scale_a_stage_apart(ready: Ready) -> None:
    from megatron.core import parallel_state as mpu

    scale(ready, 3 if mpu.is_pipeline_first_stage() else 1)


def freeze_the_anchors(ready: Ready) -> None:
    """Freeze all as with LoRA, but for the one parameter of the output layer, which may be shared."""
    for chunk in ready.chunks:
        for name, parameter in chunk.module.named_parameters():
            if "output_layer" not in name:
                parameter.requires_grad_(False)
                chunk.param_to_bucket_group.pop(parameter, None)


def capture_graphs(ready: Ready) -> None:
    ready.config.cuda_graph_impl = "local"


def leave_gradients(ready: Ready) -> None:
    """An earlier step's, not zeroed."""
    zero = [chunk.zero_grad_buffer for chunk in ready.chunks]

    def begin(number: int) -> None:
        zero[number]()
        for parameter in ready.chunks[number].parameters():
            parameter.main_grad += torch.arange(parameter.numel()).view_as(parameter) / parameter.numel()

    for number, chunk in enumerate(ready.chunks):
        chunk.zero_grad_buffer = lambda number=number: begin(number)


def scale_losses(ready: Ready) -> None:
    """Scale losses as fp16 training does; the optimizer would divide by the scale again."""
    ready.config.grad_scale_func = lambda loss: loss * 2.0**10


#: What is done, and what the audit then says.
MUTATIONS: dict[str, tuple[Callable[[Ready], None], str]] = {
    "ranks are scaled apart": (scale_ranks_apart, "scaled differently"),
    "stages are scaled apart": (scale_a_stage_apart, "no weight holds for all parameters"),
    "no anchor": (freeze_the_anchors, "no parameter is trainable, whole"),
    "graphs": (capture_graphs, "CUDA graphs replay"),
    "losses are scaled": (scale_losses, ""),
    "gradients of before": (leave_gradients, "gradients were not 0 before the step"),
}


# ---- what the weights should be


def expected_weights(layout: Layout, ask: Ask, masks: Sequence[Tensor] | None = None) -> dict[str, Any]:
    """Every entry of the step's masks, in order of DP rank, micro-batch, sample and position, and its weight.

    `masks`: a term's own, of all samples, in the place of the loss masks.
    """
    case = ask.case
    rollouts = gpt_oracle.rollouts_of(case.shape(layout))
    hands = dealt(len(rollouts), fully_masked(rollouts), layout.dp, case.microbatches, case.lopsided)
    if masks is not None:
        rollouts = [replace(one, mask=mask.tolist()) for one, mask in zip(rollouts, masks, strict=True)]
    samples = [oracle.sample([0.0] * len(one.mask), one.mask, one.rollout_id, one.prompt_id) for one in rollouts]
    divisor = gpt_oracle.DIVISOR if case.mode == "constant" else None
    asked = oracle.step_gradient(case.mode, samples, divisor, case.units)
    columns: dict[str, list[Any]] = {name: [] for name in ("mask", "dp_rank", "microbatch", "cp_rank", "position")}
    weights: list[float] = []
    active = sum(1 for one in rollouts for entry in one.mask if entry)
    for d, m in ((d, m) for d in range(layout.dp) for m in range(case.microbatches)):
        hand = hands[d][m]
        multiple = 2 * layout.cp
        lengths = [len(rollouts[i].mask) for i in hand]
        slots = oracle.padded_slots(lengths, [-(-length // multiple) * multiple for length in lengths])
        holder = {token: c for c in range(layout.cp) for token in oracle.zigzag(slots, c, layout.cp) if token}
        counts = [
            sum(1 for (k, t), r in holder.items() if r == c and rollouts[hand[k]].mask[t]) for c in range(layout.cp)
        ]
        for k, i in enumerate(hand):
            for t, entry in enumerate(np.float32(rollouts[i].mask).tolist()):
                c = holder[k, t]
                for name, value in zip(columns, (entry, d, m, c, t), strict=True):
                    columns[name].append(value)
                if ask.loss in OURS:
                    weights.append(float(asked[i][t]))
                    continue
                size = counts[c] if ask.loss != "2-tuple, over CP" else sum(counts)
                by_rank, whole = entry / max(size, 1) / case.microbatches, case.scaling == "per token"
                weights.append(
                    {
                        ("3-tuple", False): by_rank / (layout.dp * layout.cp),
                        ("3-tuple", True): entry / active,
                        ("2-tuple", False): by_rank / layout.dp,
                        ("2-tuple", True): by_rank * layout.cp,
                    }[ask.loss.split(",")[0], whole]
                )
    return {name: np.array(values) for name, values in columns.items()} | {"weights": np.array(weights)}
