"""A step of `tiny_gpt`'s model as an audit measures it, and what its weights should be, from the oracle alone.

`run_steps` runs steps of a loss function on a rank, each in a fresh model of one layout; `weights_by` says what the
loss functions of `STOCK` do to a token, as formulas of the counts of each micro-batch and rank.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import gpt_oracle
import numpy as np
import oracle
import torch
from gpt_oracle import Rollout
from ranks import start_process_group
from tiny_gpt import Batch, Case, Layout, Ready, batches_of, build, dealt, fully_masked, gather_sharded_gradients
from torch import Tensor

from megatron_rl_loss.megatron import AggregationSettings


def loss_2_local(losses: Tensor, mask: Tensor, **_: Any) -> Any:
    """The mean over this rank's own active tokens."""
    return (losses * mask).sum() / (mask != 0).sum().clamp(min=1), {}


def loss_2_over_cp(losses: Tensor, mask: Tensor, full_count: int, **_: Any) -> Any:
    """This rank's sum over the tokens of all context-parallel ranks."""
    return (losses * mask).sum() / max(full_count, 1), {}


def loss_3(losses: Tensor, mask: Tensor, **_: Any) -> Any:
    """Megatron's own: the sum, and this rank's count."""
    return (losses * mask).sum(), (mask != 0).sum().int(), {}


OURS = ("ours", "two terms", "several terms")
BETA = 0.25  # of the second term
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
    "2-tuple, local": loss_2_local, "2-tuple, over CP": loss_2_over_cp, "3-tuple": loss_3,
}  # fmt: skip


class Ask(NamedTuple):
    """A step to run.

    Attributes:
        loss: a key of `STOCK`; "ours", which is `microbatch.loss`; "several terms", its `TERMS`; or "two terms", which
            are put together by hand.
        how: "tap", "output" (nothing tapped, A = 1 and ratio 1) or "alone" (not audited).
        with_theta: also measure by the probe parameter (see `Theta`).
    """

    case: Case
    loss: str = "ours"
    how: str = "tap"
    with_theta: bool = False


def loss_of(ask: Ask, negative_log_probs: Tensor, batch: Batch) -> Tensor:
    """Of each token: with a factor of its own, unless the model's output is all that an audit sees."""
    if ask.how == "output":
        return negative_log_probs
    return negative_log_probs * (1.5 + batch.advantages)


class Theta:
    """The other way to measure, an oracle: a parameter with an entry for each token of the step, added to its loss.

    It is 0, so no number changes. Its finalised gradient is each token's weight by definition, whatever scaled it on
    the way. The last entry is padding's. `installed` puts it into the model before DDP is made.
    """

    def __init__(self, rollouts: list[Rollout]) -> None:
        self.first = [0]
        for one in rollouts:
            self.first.append(self.first[-1] + len(one.mask))
        self.parameter = torch.nn.Parameter(torch.zeros(self.first[-1] + 1))

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        from megatron.core import distributed

        make = distributed.DistributedDataParallel

        def make_with_theta(config: Any, ddp_config: Any, model: Any) -> Any:
            if model.post_process:
                model.theta = self.parameter
            return make(config, ddp_config, model)

        distributed.DistributedDataParallel = make_with_theta
        try:
            yield
        finally:
            distributed.DistributedDataParallel = make

    def of(self, chosen: list[int], bounds: Tensor, cp_rank: int, cp_size: int) -> Tensor:
        """Of the tokens that a rank holds of a pack, in order; [1, num_local_tokens]."""
        lengths = [self.first[i + 1] - self.first[i] for i in chosen]
        sizes = bounds.diff().tolist()
        slots = oracle.padded_slots([*lengths, *[0] * (len(sizes) - len(lengths))], sizes)
        held = oracle.zigzag(slots, cp_rank, cp_size)
        return self.parameter[[[-1 if at is None else self.first[chosen[at[0]]] + at[1] for at in held]]]

    def weights(self, ready: Ready, hands: list[list[list[int]]]) -> Any:
        """In the order of `expected_weights`."""
        if ready.chunks[0].ddp_config.use_distributed_optimizer:
            gather_sharded_gradients(ready.chunks)
        gradient = self.parameter.main_grad.double()  # type: ignore[attr-defined]
        chosen = [i for rank in hands for hand in rank for i in hand]
        parts = [gradient[self.first[i] : self.first[i + 1]] for i in chosen]
        return torch.cat(parts).numpy(), float(gradient[-1])


class Outcome(NamedTuple):
    """Of one rank.

    Attributes:
        steps: what was measured of each term, on the first rank.
        expected: what each should be, as an audit of LossAggregation's own step knows it.
        deviation: on the last pipeline stage, of losses of ours.
        after: gradients, and weights after the optimizer's step.
        by_theta: on the last stage: the weights, and that of padding.
    """

    steps: dict[str, Any]
    expected: dict[str, Any]
    deviation: float | None
    after: list[Any]
    by_theta: Any

    @property
    def measured(self) -> Any:
        """Of the policy loss, or of what was measured instead."""
        return self.steps.get("pg", next(iter(self.steps.values()), None))


def run_ask(layout: Layout, ask: Ask, rollouts: list[Rollout], mutate: Callable[[Ready], None] | None) -> Outcome:
    from megatron.core import parallel_state as mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_rl_loss.audit.megatron import Audit, tap
    from megatron_rl_loss.megatron import LossAggregation
    from megatron_rl_loss.reduction import Term

    case = ask.case
    theta = Theta(rollouts)
    with theta.installed() if ask.with_theta else contextlib.nullcontext():
        ready = build(layout, case, "packed")
    if mutate is not None:
        mutate(ready)
    dp_rank, cp_rank = mpu.get_data_parallel_rank(), mpu.get_context_parallel_rank()
    batches = [batch.cuda() for batch in batches_of(rollouts, case, layout.dp, dp_rank, layout.cp, cp_rank)]
    hands = dealt(len(rollouts), fully_masked(rollouts), layout.dp, case.microbatches, case.lopsided)
    number = {id(batch): m for m, batch in enumerate(batches)}

    def forward_step(iterator: Iterator[Any], model: Any) -> Any:
        taken = next(iterator)
        batch: Batch = taken.data if ask.loss in OURS else taken
        output = model(
            batch.tokens, batch.positions, None, labels=batch.labels, packed_seq_params=batch.packed_seq_params()
        )

        def loss_func(negative_log_probs: Tensor) -> Any:
            losses = loss_of(ask, negative_log_probs, batch)
            if ask.with_theta:
                losses = losses + theta.of(hands[dp_rank][number[id(batch)]], batch.bounds, cp_rank, layout.cp)
            if ask.loss == "ours":
                return taken.loss(losses)
            if ask.loss == "several terms":
                terms = {
                    name: Term(losses * (k + 1), mode, coef=coef, mask=mask)
                    for k, (name, (mode, coef, mask)) in enumerate(TERMS.items())
                }
                return taken.loss(terms)
            if ask.loss == "two terms":
                share = taken.pg_loss(losses) + BETA * taken.token_mean(negative_log_probs.square())
                return taken.carry(share, {"both": share})
            full_count = sum(int((mask != 0).sum()) for mask in batch.samples.loss_masks)
            if ask.how == "tap":
                tap(losses)
            return STOCK[ask.loss](losses, batch.mask, full_count=full_count)

        return output, loss_func

    for chunk in ready.chunks:
        chunk.zero_grad_buffer()
    ready.optimizer.zero_grad()
    settings = AggregationSettings.resolve(
        mode=case.mode,
        divisor=gpt_oracle.DIVISOR if case.mode == "constant" else None,
        units=case.units,  # type: ignore[arg-type]
        with_per_token_loss=case.scaling == "per token",
    )
    schedule = get_forward_backward_func()
    virtual = layout.vp > 1

    def step(data_iterator: Any) -> None:
        run = schedule
        if ask.loss in OURS:
            several: Any = {"terms": {"entropy": "prompt_mean"}, "term_masks": ["correct"]}
            declared = several if ask.loss == "several terms" else {}
            run = LossAggregation(settings, lambda batch: batch.described(correct_masks), **declared).wrap_schedule(
                schedule
            )
        run(
            forward_step_func=forward_step,
            data_iterator=data_iterator,
            model=ready.chunks if virtual else ready.chunks[0],
            num_microbatches=len(batches),
            seq_length=64,
            micro_batch_size=1,
        )

    data_iterator = [iter(batches) for _ in range(layout.vp)] if virtual else iter(batches)
    audit = None
    if ask.how == "alone":
        step(data_iterator)
    else:
        samples_of = None if ask.loss in OURS else (lambda batch: batch.samples)
        with Audit(ready.chunks, samples_of=samples_of) as audit:
            step(audit.watch(data_iterator))
    by_theta = None
    if ask.with_theta and mpu.is_pipeline_last_stage(ignore_virtual=True):
        by_theta = theta.weights(ready, hands)
    grads = [parameter.main_grad.clone() for chunk in ready.chunks for parameter in chunk.parameters()]
    succeeded, _, _ = ready.optimizer.step()
    assert succeeded
    after = [parameter.detach().clone() for chunk in ready.chunks for parameter in chunk.parameters()]
    steps = {} if audit is None else audit.steps
    expected = {} if audit is None else {name: audit.expected_of(name) for name in steps}
    deviation = None if audit is None or ask.loss not in OURS else audit.deviation()
    return Outcome(steps, expected, deviation, [value.float().numpy() for value in [*grads, *after]], by_theta)


def run_steps(
    layout: Layout, asks: list[Ask], rollouts: dict[Any, list[Rollout]], mutation: str | None = None
) -> list[Outcome]:
    """On one rank."""
    mutate = None if mutation is None else mutations[mutation].make
    from megatron.core import parallel_state as mpu

    start_process_group()
    mpu.initialize_model_parallel(
        layout.tp,
        layout.pp,
        virtual_pipeline_model_parallel_size=layout.vp if layout.vp > 1 else None,
        context_parallel_size=layout.cp,
    )
    return [run_ask(layout, ask, rollouts[ask.case.shape(layout)], mutate) for ask in asks]


# ---- what breaks the one factor


def scale_ranks_apart(ready: Ready) -> None:
    """DDP's scaling, on one data-parallel rank alone."""
    from megatron.core import parallel_state as mpu

    if mpu.get_data_parallel_rank() == 1:
        for chunk in ready.chunks:
            for buffer in chunk.buffers:
                for bucket in buffer.buckets:
                    bucket.gradient_scaling_factor *= 2


def scale_a_stage_apart(ready: Ready) -> None:
    from megatron.core import parallel_state as mpu

    if mpu.is_pipeline_first_stage():
        scale_all(ready)


def scale_all(ready: Ready) -> None:
    for chunk in ready.chunks:
        for buffer in chunk.buffers:
            for bucket in buffer.buckets:
                bucket.gradient_scaling_factor *= 3


def freeze_the_anchors(ready: Ready) -> None:
    """As with LoRA, but for the one parameter of the output layer, which may be shared."""
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
    """As fp16 training does; the optimizer would divide by it again."""
    ready.config.grad_scale_func = lambda loss: loss * 2.0**10


class Mutation(NamedTuple):
    make: Callable[[Ready], None]
    layout: Layout
    says: str


_DP2, _PP2 = Layout(1, False, 1, 1, 1, 2), Layout(1, False, 2, 1, 1, 1)
mutations = {
    "ranks are scaled apart": Mutation(scale_ranks_apart, _DP2, "scaled apart"),
    "stages are scaled apart": Mutation(scale_a_stage_apart, _PP2, "no weight holds for all parameters"),
    "no anchor": Mutation(freeze_the_anchors, _DP2, "no parameter can be relied on"),
    "graphs": Mutation(capture_graphs, _DP2, "CUDA graphs replay"),
    "losses are scaled": Mutation(scale_losses, _DP2, ""),
    "gradients of before": Mutation(leave_gradients, _DP2, "gradients were there before the step"),
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
