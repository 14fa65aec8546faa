"""Score centering: its gradient is the mean score under the sampler, over the whole vocabulary, in any layout."""

import functools
import math
import os
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, start_process_group
from refusals import refusal_tests, refusals
from rests import with_rest
from score_oracle import mean_score, modelled, weights_of
from torch import Tensor

from megatron_rl_loss import (
    AtIds,
    Gate,
    OutputLayer,
    Samples,
    ZigzagTHD,
    log_probs_from_logits,
    loss_from_hidden,
    plan_step,
    ppo_clip_loss,
    score_centering,
)

TOKENS, VOCABULARY, K = 48, 32, 6
GATES: dict[str, dict[str, Any] | None] = {
    "no weights": None,
    "truncated": {"low": 0.4, "high": 1.25, "action": "clamp"},
    "IcePop": {"low": 0.8, "high": 1.5},
}
of_gates = pytest.mark.parametrize("gate", GATES.values(), ids=GATES)


def gate_of(settings: dict[str, Any] | None) -> Gate | None:
    return None if settings is None else Gate(**settings)


@functools.cache
def drawn(spread: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
    """Trainer's logits, exact in float32; the sampler's distribution and its most likely ids."""
    generator = torch.Generator().manual_seed(0)
    logits, noise = (torch.randn(TOKENS, VOCABULARY, generator=generator) for _ in range(2))
    q = (2 * logits + spread * noise).double().softmax(-1)
    return 2 * logits, q, q.topk(K).indices


def centred(logits: Tensor, ids: Tensor, q_at_ids: Tensor, advantages: Tensor, **settings: Any) -> Tensor:
    mask = torch.ones(len(logits))
    log_p = logits.log_softmax(-1)
    at_ids = AtIds(log_p.gather(1, ids), log_p.scatter(1, ids, -torch.inf).logsumexp(-1))
    return score_centering(at_ids, q_at_ids.log(), advantages, mask, **settings)


def gradient(values: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(values.sum(), leaf, retain_graph=True)[0]


@of_gates
def test_its_gradient_is_the_mean_score_of_the_whole_vocabulary(gate: dict[str, Any] | None) -> None:
    """Sums of 32 float64 terms below 10: no more than 1e-13."""
    logits, q, ids = drawn()
    advantages = torch.linspace(-2, 2, TOKENS).double()
    exact = logits.double().requires_grad_()
    mine = gradient(centred(exact, ids, q.gather(1, ids), advantages, gate=gate_of(gate)), exact)
    model = modelled(q.gather(1, ids), ids, exact.detach().softmax(-1))
    right = gradient(advantages * mean_score(exact.log_softmax(-1), model, gate), exact)
    torch.testing.assert_close(mine, right, rtol=0, atol=1e-13)
    others = [gradient(advantages * mean_score(exact.log_softmax(-1), model, other), exact) for other in GATES.values()]
    off = sorted(float((mine - other).abs().max()) for other in others)
    assert off[1] > 1e-3  # negative control: the other corrections'


@of_gates
def test_what_is_left_of_a_policy_gradient_is_0_mean_under_the_sampler(gate: dict[str, Any] | None) -> None:
    """All actions of a token, each as often as the sampler draws it: with the term their gradients sum to 0."""
    logits, q, ids = drawn()
    exact = logits.double().requires_grad_()
    model = modelled(q.gather(1, ids), ids, exact.detach().softmax(-1))
    log_p = exact.log_softmax(-1)
    weights = weights_of(log_p.detach().exp(), model, gate)
    base = gradient((model * weights * -log_p).sum(-1), exact)
    term = gradient(centred(exact, ids, q.gather(1, ids), torch.ones(TOKENS), gate=gate_of(gate)), exact)
    assert base.abs().max() > 1e-2
    torch.testing.assert_close(base + term, torch.zeros_like(base), rtol=0, atol=1e-13)


@of_gates
def test_it_is_0_where_sampler_and_trainer_agree(gate: dict[str, Any] | None) -> None:
    logits, _, ids = drawn()
    exact = logits.double().requires_grad_()
    p = exact.detach().softmax(-1)
    of_equal = gradient(centred(exact, ids, p.gather(1, ids), torch.ones(TOKENS), gate=gate_of(gate)), exact)
    assert of_equal.abs().max() < 1e-14


def test_bounds_that_leave_out_everything_and_weights_without_bounds_make_it_0() -> None:
    """IcePop: trainer and sampler differ tenfold at every id and in the tail. Weights p / q need no centering."""
    log_p = torch.tensor([[0.09, 0.01]]).log().double().requires_grad_()
    q = torch.tensor([[0.9, 0.0999]]).double()
    one = torch.ones(1)
    at_ids = with_rest(log_p)
    assert gradient(score_centering(at_ids, q.log(), one, one), log_p).abs().max() > 0.1
    none_within = score_centering(at_ids, q.log(), one, one, gate=Gate(low=0.9, high=5.0))
    assert gradient(none_within, log_p).tolist() == [[0, 0]]
    unbounded = score_centering(at_ids, q.log(), one, one, gate=Gate(low=0.0, high=1e6, action="clamp"))
    assert gradient(unbounded, log_p).abs().max() < 1e-15


@of_gates
@pytest.mark.parametrize("kept_before", [False, True])
def test_ids_that_are_all_the_sampler_could_draw(gate: dict[str, Any] | None, kept_before: bool) -> None:
    """Top-k: q over these ids alone, p renormalised, whether or not its log-probs are so already."""
    logits, q, ids = drawn()
    exact = logits.double().requires_grad_()
    q = q.gather(1, ids)
    q = q / q.sum(1, keepdim=True)
    log_p = exact.gather(1, ids).log_softmax(-1)
    at_ids = log_p if kept_before else exact.log_softmax(-1).gather(1, ids)
    term = score_centering(at_ids, q.log(), torch.ones(TOKENS), torch.ones(TOKENS), gate=gate_of(gate), support="ids")
    right = gradient(mean_score(log_p, q, gate), exact)
    torch.testing.assert_close(gradient(term, exact), right, rtol=0, atol=1e-13)
    of_all = gradient(centred(exact, ids, q, torch.ones(TOKENS), gate=gate_of(gate)), exact)
    assert (of_all - right).abs().max() > 1e-3 or gate is None  # negative control: as if there were a tail


def test_fewer_ids_masked_tokens_and_dtypes() -> None:
    logits, q, ids = drawn()
    log_p, log_q = logits.log_softmax(-1).gather(1, ids), q.gather(1, ids).log().float()
    log_q[::2, 4:], log_p[::2, 4:] = -torch.inf, torch.nan
    log_p[5], log_q[7], mask = torch.nan, torch.nan, torch.ones(TOKENS)
    mask[[5, 7]] = 0
    leaf = log_p.requires_grad_()
    for settings in ({}, {"support": "ids"}, {"gate": Gate(high=2.0, action="clamp")}):
        restless = "support" in settings
        now = leaf if restless else with_rest(leaf, log_q)
        term = score_centering(now, log_q, torch.ones(TOKENS), mask, **settings)
        slopes = gradient(term, leaf)
        assert term.dtype == torch.float32
        assert term.isfinite().all()
        assert slopes.isfinite().all()
        assert not slopes[[5, 7]].any()
        assert not slopes[::2, 4:].any()
        fewer = log_p[::2, :4].detach() if restless else with_rest(log_p[::2, :4].detach())
        whole = score_centering(fewer, log_q[::2, :4], torch.ones(1), torch.ones(24), **settings)
        torch.testing.assert_close(term[::2].detach(), whole)
    rounded = score_centering(with_rest(leaf.detach().bfloat16(), log_q), log_q, torch.ones(TOKENS), mask)
    assert rounded.dtype == torch.float32
    exact = score_centering(with_rest(leaf.detach().double(), log_q), log_q, torch.ones(TOKENS), mask)
    assert exact.dtype == torch.float64


@pytest.mark.parametrize("tail_of_q", [1e-2, 0.3])
@pytest.mark.parametrize("tail_of_p", [1e-3, 3e-5])
@of_gates
def test_a_trainer_that_is_sure_of_the_ids(gate: dict[str, Any] | None, tail_of_p: float, tail_of_q: float) -> None:
    """The ratio of the tails is made of the rest, not of what float32 log-probs leave.

    Log-probs down to -10 are rounded by up to 5e-7, so p and a bound of it are off by as much, relatively.
    """
    ids = torch.arange(K).expand(TOKENS, K)
    logits = drawn()[0].clone()
    logits[:, K:] += math.log(tail_of_p) - logits[:, K:].logsumexp(1, keepdim=True)
    logits[:, :K] += math.log1p(-tail_of_p) - logits[:, :K].logsumexp(1, keepdim=True)
    q = (logits[:, :K].double() + drawn()[0][:, :K].double()).softmax(-1) * (1 - tail_of_q)
    leaf, exact = logits.requires_grad_(), logits.detach().double().requires_grad_()
    log_probs, _ = log_probs_from_logits(leaf, ids, rest_without=torch.ones(TOKENS, K) > 0)
    at_ids, ones = AtIds(log_probs[:, :-1], log_probs[:, -1]), torch.ones(TOKENS)
    mine = gradient(score_centering(at_ids, q.log(), ones, ones, gate=gate_of(gate)), leaf)
    model = modelled(q, ids, exact.detach().softmax(-1))
    right = gradient(mean_score(exact.log_softmax(-1), model, gate), exact)
    assert (mine - right).abs().max() <= 2e-6 * right.abs().max()


# --- in any layout

LENGTHS, LAYOUTS = [5, 9, 3, 6, 7, 4], [(tp, cp) for tp in (1, 2, 4) for cp in (1, 2, 4)]
RANKS, WIDTH = 16, 8
WAYS = {"logits": "token_mean", "one pass": "prompt_mean"}  # each by a mode of its own


@functools.cache
def data() -> dict[str, list[Tensor]]:
    """Per sample: hidden states, labels, the sampler's ids and log-probs, advantages, old log-probs and a mask."""
    generator = torch.Generator().manual_seed(2)
    of_samples: dict[str, list[Tensor]] = {name: [] for name in ("hidden", "ids", "log_q", "labels", "old", "mask")}
    weight = weight_of_layer().double()
    for i, length in enumerate(LENGTHS):
        hidden = torch.randn(length, WIDTH, generator=generator)
        logits = hidden.double() @ weight.T
        sampler = (logits + 0.5 * torch.randn(length, VOCABULARY, generator=generator)).log_softmax(-1)
        top = sampler.topk(K)
        log_q = top.values.float()
        log_q[::3, K - 2 :] = -torch.inf
        labels = torch.multinomial(sampler.exp(), 1, generator=generator)
        old = logits.log_softmax(-1).gather(1, labels)[:, 0] + 0.2 * torch.randn(length, generator=generator)
        mask = torch.ones(length)
        mask[: i % 3] = 0
        values = hidden, top.indices, log_q, labels[:, 0], old.clamp(max=-0.01).float(), mask * (i != 4)
        for name, value in zip(of_samples, values, strict=True):
            of_samples[name].append(value)
    of_samples["advantages"] = [torch.full((length,), (-1) ** i * (1 + i / 4)) for i, length in enumerate(LENGTHS)]
    return of_samples


def weight_of_layer() -> Tensor:
    return torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(1))


def expected(mode: str, gate: dict[str, Any] | None, centre: bool = True) -> Tensor:
    """The step's gradient by the hidden states of all samples, end to end, float64."""
    of = data()
    leaves = [hidden.double().requires_grad_() for hidden in of["hidden"]]
    samples = list[oracle.Sample]()
    for i, leaf in enumerate(leaves):
        log_p = (leaf @ weight_of_layer().double().T).log_softmax(-1)
        a, there = of["advantages"][i].double(), of["log_q"][i] > -torch.inf
        ratio = (log_p.gather(1, of["labels"][i][:, None])[:, 0] - of["old"][i].double()).exp()
        losses = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
        rows = list[Tensor]()
        for t in range(len(leaf)):
            ids, q = of["ids"][i][t, there[t]][None], of["log_q"][i][t, there[t]].double().exp()[None]
            model = modelled(q, ids, log_p[t : t + 1].detach().exp())
            rows.append(mean_score(log_p[t : t + 1], model, gate)[0])
        samples.append(oracle.Sample(losses + a * torch.stack(rows) * centre, of["mask"][i], i, i // 2))
    return torch.cat(torch.autograd.grad(oracle.step_loss(mode, samples), leaves))


def in_layouts() -> dict[Any, Tensor]:
    """On a rank: by layout, mode, gate and way the gradient by the hidden states that it holds, in the whole step."""
    start_process_group()
    rank, outcomes = int(os.environ["RANK"]), dict[Any, Tensor]()
    for tp, cp in LAYOUTS:
        grid = torch.arange(RANKS).view(-1, cp, tp)
        groups = {name: group_of(rank, grid.movedim(d, -1)) for d, name in enumerate(("dp", "cp", "tp"))}
        dp, dp_rank, tp_rank = len(grid), rank // (tp * cp), rank % tp
        shard = weight_of_layer().chunk(tp)[tp_rank]
        chosen = list(range(len(LENGTHS)))[dp_rank::dp]
        hands = [chosen[:1], chosen[1:]]  # two micro-batches, the second of most ranks without a sample
        cuts = [Samples([]) if not hand else packed(hand, cp) for hand in hands]
        for name, gate in GATES.items():
            for way, mode in WAYS.items():
                whole = torch.zeros(sum(LENGTHS), WIDTH, dtype=torch.float64)
                plan = plan_step(
                    cuts, mode, dp_group=groups["dp"], cp_group=groups["cp"], gradients="summed over ranks"
                )
                for hand, microbatch in zip(hands, plan, strict=True):
                    if not hand:
                        continue
                    batch = {key: microbatch.local(buffer) for key, buffer in buffers(hand, cp).items()}
                    leaf = batch.pop("hidden").requires_grad_()
                    share = share_of(way, microbatch, leaf, shard, batch, gate_of(gate), groups["tp"])
                    share.backward()
                    place = batch["place"]
                    assert leaf.grad is not None
                    assert not leaf.grad[place < 0].any()
                    whole[place[place >= 0]] += leaf.grad[place >= 0].double()
                outcomes[tp, cp, name, way] = whole
    dist.barrier()
    return outcomes


def group_of(rank: int, lines: Tensor) -> Any:
    """This rank's group, one of the last dimension's lines of ranks; every rank makes all groups."""
    groups = [(line, dist.new_group(line)) for line in lines.reshape(-1, lines.shape[-1]).tolist()]
    return next(group for line, group in groups if rank in line) if lines.shape[-1] > 1 else None


def slots(hand: list[int], cp: int) -> list[int]:
    return [0, *torch.tensor([-(-LENGTHS[i] // (2 * cp)) * 2 * cp for i in hand]).cumsum(0).tolist()]


def packed(hand: list[int], cp: int) -> Samples:
    bounds = torch.tensor(slots(hand, cp), dtype=torch.int32)
    layout = ZigzagTHD(bounds, total_lengths=[LENGTHS[i] for i in hand])
    return Samples([data()["mask"][i] for i in hand], layout=layout, prompt_ids=[i // 2 for i in hand])


def buffers(hand: list[int], cp: int) -> dict[str, Tensor]:
    """The columns of a pack, and the place of each token in the step, -1 in padding."""
    bounds, of = slots(hand, cp), data()
    places = [torch.arange(LENGTHS[i]) + sum(LENGTHS[:i]) for i in hand]
    columns = {name: [values[i] for i in hand] for name, values in of.items()} | {"place": places}
    joined = dict[str, Tensor]()
    for name, rows in columns.items():
        buffer = rows[0].new_full((bounds[-1], *rows[0].shape[1:]), -1 if name == "place" else 0)
        for begin, row in zip(bounds, rows, strict=False):
            buffer[begin : begin + len(row)] = row
        joined[name] = buffer
    return joined


def share_of(
    way: str, microbatch: Any, hidden: Tensor, shard: Tensor, batch: dict[str, Tensor], gate: Gate | None, tp: Any
) -> Tensor:
    """The one line is the last of `per_token`."""
    labels = torch.cat([batch["labels"][:, None], batch["ids"]], 1)
    marked = torch.cat([torch.zeros(len(labels), 1, dtype=torch.bool), batch["log_q"] > -torch.inf], 1)

    def per_token(log_probs: Tensor, _: Any, local: Any = None, **of: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        local = torch.ones(len(log_probs)) if local is None else local
        policy = ppo_clip_loss(log_probs[:, 0], of["old"], of["advantages"], local).per_token_loss
        at_ids = AtIds(log_probs[:, 1:-1], log_probs[:, -1])
        return policy + score_centering(at_ids, of["log_q"], of["advantages"], local, gate=gate), {}

    inputs = {name: batch[name] for name in ("old", "advantages", "log_q")}
    if way == "one pass":
        layer = OutputLayer(shard, tp_group=tp)
        return loss_from_hidden(hidden, layer, labels, microbatch.weights, per_token, inputs, rest_without=marked)[0]
    # The gradient of hidden states is summed over the vocabulary's ranks, as Megatron's linear layers do.
    leaf = hidden if tp is None else _SumOverTp.apply(hidden, tp)
    logits = leaf @ shard.T
    mask = microbatch.tokens.mask
    log_probs, _ = log_probs_from_logits(logits, labels, tp_group=tp, token_mask=mask, rest_without=marked)
    return microbatch.loss(per_token(log_probs, None, microbatch, **inputs)[0])


class _SumOverTp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        slope = slope.clone()
        dist.all_reduce(slope, group=ctx.group)
        return slope, None


@pytest.mark.slow
def test_one_gradient_at_tp_1_2_4_and_cp_1_2_4(record_property: Any) -> None:
    by_rank = run_ranks(RANKS, in_layouts)
    worst = 0.0
    for tp, cp, name, way in by_rank[0]:
        right, uncentred = (expected(WAYS[way], GATES[name], centre) for centre in (True, False))
        total = torch.stack([outcomes[tp, cp, name, way] for outcomes in by_rank]).sum(0) / tp
        scale = right.abs().max()
        worst = max(worst, float((total - right).abs().max() / scale))
        assert worst <= 1e-6, (tp, cp, name, way)
        assert (total - uncentred).abs().max() / scale > 1e-2  # negative control
    record_property("relative_error_of_score_centering", worst)


# --- refusals


def call(**changed: Any) -> Tensor:
    log_p = torch.tensor([[0.5, 0.25]]).log().requires_grad_()
    settings: dict[str, Any] = {"log_probs": log_p, "rollout_log_probs": log_p.detach(), "advantages": torch.ones(1)}
    settings |= {"local": torch.ones(1), **changed}
    if settings.pop("rest", True) and settings.get("support", "") != "ids" and settings["log_probs"].numel():
        settings["log_probs"] = with_rest(settings["log_probs"])
    return score_centering(**settings)


LOG_Q = torch.tensor([[0.6, 0.2]]).log()
test_refusals = refusal_tests(
    refusals(
        call,
        ({"rollout_log_probs": LOG_Q[:, :1]}, "rollout_log_probs of shape", {"rollout_log_probs": LOG_Q}),
        ({"rollout_log_probs": LOG_Q.exp()}, "sum to", {"rollout_log_probs": LOG_Q}),
        ({"rollout_log_probs": torch.tensor([[0.6, 0.6]]).log()}, "Give each id once", {"rollout_log_probs": LOG_Q}),
        ({"gate": Gate(high=2.0, level="sequence")}, "weights of single tokens", {"gate": Gate(high=2.0)}),
        ({"gate": "icepop"}, "gate='icepop'", {"gate": None}),
        ({"rest": False}, r"log_probs without the rest, and support='vocabulary': .+ rest_without=rollout_log_p", {}),
        (
            {"support": "ids", "log_probs": with_rest(LOG_Q)},
            "log_probs with a rest, and support='ids'",
            {"support": "ids", "log_probs": LOG_Q.clone().requires_grad_()},
        ),
        (
            {"rest": False, "log_probs": AtIds(LOG_Q, torch.tensor([-9.0]))},
            "log_probs whose probabilities and rest sum to 1 only within 0.2",
            {},
        ),
        ({"support": "top_p"}, "support 'top_p'", {"support": "ids"}),
        ({"advantages": torch.ones(1).requires_grad_()}, "advantages that require grad", {}),
        ({"log_probs": torch.zeros(1, 0), "rollout_log_probs": torch.zeros(1, 0)}, "K >= 1", {}),
        (
            {"log_probs": LOG_Q, "rollout_log_probs": LOG_Q.clone().requires_grad_()},
            "nothing would be trained",
            {"log_probs": LOG_Q.clone().requires_grad_(), "rollout_log_probs": LOG_Q},
        ),
    )
    | refusals(call, ({"log_probs": torch.ones(1, 2).long()}, "log_probs is torch.int64", {}), error=TypeError)
)
