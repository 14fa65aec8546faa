"""Does the aggregation decide a run? A tiny GPT learns by GRPO; only the weights of its tokens differ between arms.

    OMP_NUM_THREADS=1 python does_it_matter.py --seeds 0 1 2 3 4 --output runs.jsonl --plot matter.png

The task is designed to show it. Are the ones among six bits odd or even? The policy guesses at once ("=1", right half
of the time), or writes the running parities first ("#101100=0", right nearly always). A right answer ends the episode;
after a wrong one nothing can be won any more: see --after-wrong. Arms of a seed share start, problems, random numbers.
"default" weighs as Megatron without --calculate-per-token-loss; with --through-megatron its own schedule runs.
"""

import argparse
import copy
import json
import random
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matter.policy import GPT
from matter.report import late, plot, read, table
from torch import Generator, Tensor, nn

from megatron_rl_loss import Samples, plan_step, weights_column

BITS, PROMPT, LIMIT, VOCABULARY, GROUP, STEPS = 6, 7, 24, 8, 8, 40
ANSWER, WORK, GO_ON, STOP, ASK = 2, 3, 4, 5, 6  # tokens; 0 and 1 are bits
AFTER_WRONG = {"limit": "goes on to 24 tokens", "free": "may stop; never works it out", "end": "ends too"}


def problems(count: int, rng: random.Random) -> tuple[Tensor, Tensor]:
    bits = torch.tensor([[rng.randrange(2) for _ in range(BITS)] for _ in range(count)])
    return F.pad(bits, (0, 1), value=ASK), bits.sum(1) % 2


def demonstration(bits: Tensor, answer: int, after_wrong: str, rng: random.Random) -> list[int]:
    works = after_wrong != "free" and rng.random() < 0.5
    said = answer if works else rng.randrange(2)
    row = ([WORK, *(bits.cumsum(0) % 2).tolist()] if works else []) + [ANSWER, said]
    more = {"limit": LIMIT, "end": 0, "free": 1 + int(rng.expovariate(0.14))}[after_wrong] * (said != answer)
    return (row + [GO_ON] * (more - 1) + [STOP] * (more > 0))[:LIMIT]


@lru_cache(maxsize=1)
def warm_start(seed: int, after_wrong: str, steps: int = 250) -> GPT:
    torch.manual_seed(seed)
    rng, model = random.Random(f"warm {seed}"), GPT(VOCABULARY, PROMPT + LIMIT)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98))
    for step in range(steps):
        prompts, answers = problems(96, rng)
        rows = [demonstration(p[:BITS], a, after_wrong, rng) for p, a in zip(prompts, answers.tolist(), strict=True)]
        labels = torch.tensor([row + [-1] * (LIMIT - len(row)) for row in rows])
        logits = model(torch.cat([prompts, labels.clamp(min=0)], 1)[:, :-1])[:, PROMPT - 1 :]
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 30) * (1 - 0.9 * step / steps)
        optimizer.step()
    return model


class Batch(NamedTuple):
    prompts: Tensor
    tokens: Tensor  # of responses [rows, LIMIT], as their masks
    mask: Tensor
    reward: Tensor


@torch.no_grad()
def sample(model: GPT, prompts: Tensor, answers: Tensor, after_wrong: str, generator: Generator) -> Batch:
    tokens, uniforms = torch.empty(len(prompts), LIMIT).long(), torch.rand(len(prompts), LIMIT, generator=generator)
    mask, reward = torch.zeros_like(uniforms), torch.zeros(len(prompts))
    alive, lost = torch.ones_like(answers).bool(), torch.zeros_like(answers).bool()
    fed, cache = prompts, dict[int, list[Tensor]]()
    for t in range(LIMIT):
        cumulated = model(fed, cache, PROMPT + t - 1 if t else 0)[:, -1].softmax(-1).cumsum(-1)
        token = (cumulated <= uniforms[:, t, None]).sum(-1).clamp(max=VOCABULARY - 1)
        tokens[:, t], mask[:, t] = token, alive.float()
        answered = alive & ~lost & (fed[:, -1] == ANSWER) & (token < 2)
        right = answered & (token == answers)
        reward[right] = 1.0
        alive &= ~{"limit": right, "end": answered, "free": right | (lost & (token == STOP))}[after_wrong]
        lost, fed = lost | answered, token[:, None]
    return Batch(prompts, tokens, mask, reward)


def token_losses(model: GPT, batch: Batch, rows: Tensor | slice = slice(None)) -> Tensor:
    """Losses of GRPO, [rows, LIMIT]. A step's only update is on-policy, so that its clipping does nothing."""
    groups = batch.reward.view(-1, GROUP)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).view(-1, 1)
    logits = model(torch.cat([batch.prompts[rows], batch.tokens[rows]], 1)[:, :-1])[:, PROMPT - 1 :]
    log_probs = -F.cross_entropy(logits.transpose(1, 2), batch.tokens[rows], reduction="none")
    return -(log_probs - log_probs.detach()).exp() * advantages[rows]


class Arm(NamedTuple):
    name: str
    rows: int = 1  # of a micro-batch
    sorts: bool = False  # by length; else the rows are shuffled
    exact: bool = False


EXACT, ONE_ROW = Arm("exact token_mean, any cut", exact=True), Arm("default, 1 row")
ARMS = [EXACT, ONE_ROW, Arm("default, 8 rows sorted by length", 8, sorts=True), Arm("default, 4 rows shuffled", 4)]


def cut(arm: Arm, mask: Tensor, generator: Generator) -> Sequence[Tensor]:
    """The rows of each micro-batch."""
    order = mask.sum(1).argsort(stable=True) if arm.sorts else torch.randperm(len(mask), generator=generator)
    return order.split(arm.rows)


def weights_of(arm: Arm, mask: Tensor, microbatches: Sequence[Tensor]) -> Tensor:
    if arm.exact:  # whatever the micro-batches
        return torch.stack(weights_column("token_mean", list(mask)))
    weights = torch.zeros_like(mask)  # Megatron's forward_step_calc_loss: / num_tokens, then / num_microbatches
    for rows in microbatches:
        weights[rows] = mask[rows] / mask[rows].sum() / len(microbatches)
    return weights


def backward(arm: Arm, model: GPT, batch: Batch, generator: Generator) -> None:
    weights = weights_of(arm, batch.mask, cut(arm, batch.mask, generator))
    (weights * token_losses(model, batch)).sum().backward()


def backward_in_megatron(arm: Arm, model: Any, batch: Batch, generator: Generator) -> None:
    import megatron_on_cpu

    megatron_on_cpu.install()
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig

    if not torch.distributed.is_initialized():
        alone: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group("gloo", store=alone, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    model.config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4)
    model.set_input_tensor, model.model_type = lambda received: None, None  # which a Megatron model has
    microbatches = cut(arm, batch.mask, generator)
    masks = [batch.mask[rows] for rows in microbatches]
    samples = [Samples(list(batch.mask[rows]), tokens=batch.tokens[rows]) for rows in microbatches]
    plan: Any = plan_step(samples, "token_mean", model=model) if arm.exact else masks

    def forward_step(step: Iterator[Any], model: Any) -> Any:
        rows, mask, microbatch = next(step)

        def loss_func(losses: Tensor) -> Any:
            return microbatch.loss(losses.flatten()) if arm.exact else ((losses * mask).sum(), mask.sum().int(), {})

        return token_losses(model, batch, rows), loss_func

    step = iter(list(zip(microbatches, masks, plan, strict=True)))
    sizes = {"num_microbatches": len(masks), "seq_length": LIMIT, "micro_batch_size": 1}
    get_forward_backward_func()(forward_step_func=forward_step, data_iterator=step, model=model, **sizes)


ADAM = partial(torch.optim.AdamW, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0)


def train(model: GPT, seed: int, after_wrong: str, backward: Any, make_optimizer: Any = ADAM) -> list[dict[str, Any]]:
    """Run GRPO on 16 prompts a step; `backward(model, batch, generator)`. Returns what 256 new samples show."""
    rng, (drawn, dealt, new) = random.Random(seed), (torch.Generator().manual_seed(3 * seed + i) for i in range(3))
    optimizer, log = make_optimizer(model.parameters()), list[dict[str, Any]]()
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=4)
    for step in range(STEPS + 1):
        if step % 5 == 0:
            seen = sample(model, *problems(256, random.Random(f"new {seed}")), after_wrong, new)
            works, wrong = (seen.tokens[:, 0] == WORK).float().mean(), seen.mask.sum(1)[seen.reward == 0].tolist()
            log.append({"step": step, "reward": float(seen.reward.mean()), "works": float(works)})
            log[-1]["wrong"] = sum(wrong) / len(wrong) if wrong else None  # their mean length
        prompts, answers = (x.repeat_interleave(GROUP, 0) for x in problems(16, rng))
        optimizer.zero_grad()
        backward(model, sample(model, prompts, answers, after_wrong, drawn), dealt)
        optimizer.step()
        warm_up.step()
    return log


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[], help="none: show what the file has")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines; runs that it has are not repeated")
    parser.add_argument("--after-wrong", choices=AFTER_WRONG, default="limit", help=str(AFTER_WRONG))
    parser.add_argument("--through-megatron", action="store_true", help="two arms only; minutes a seed")
    parser.add_argument("--plot", type=Path, help="picture of all runs of the file; needs matplotlib")
    args = parser.parse_args()
    if args.plot and args.plot.suffix not in (".png", ".pdf", ".svg"):
        parser.error(f"--plot {args.plot}: no picture has that ending. Write .png, .pdf or .svg.")
    torch.set_num_threads(1)
    try:
        runs = read(args.output)
    except (OSError, ValueError, LookupError, TypeError) as error:
        parser.error(f"--output {args.output}: {error!r}. Name a file that this script wrote, or a new one.")
    setting: dict[str, Any] = {"after_wrong": args.after_wrong, "in_megatron": args.through_megatron}
    arms = ARMS if setting == {"after_wrong": "limit", "in_megatron": False} else ARMS[:2]
    keys = [(arm, setting | {"arm": arm.name, "seed": seed}) for seed in dict.fromkeys(args.seeds) for arm in arms]
    missing, begun = [(arm, key) for arm, key in keys if not any(run | key == run for run in runs)], time.monotonic()
    for done, (arm, key) in enumerate(missing, 1):
        start = copy.deepcopy(warm_start(key["seed"], args.after_wrong))
        learn = partial(backward_in_megatron if args.through_megatron else backward, arm)
        runs.append(key | {"log": train(start, key["seed"], args.after_wrong, learn)})
        with args.output.open("a") as file:
            file.write(json.dumps(runs[-1]) + "\n")
        left = (time.monotonic() - begun) / done * (len(missing) - done)
        rewards = f"reward {runs[-1]['log'][0]['reward']:.2f} -> {late(runs[-1], 'reward'):.2f}"
        print(f"seed {key['seed']}, {arm.name}: {rewards}; {left:.0f} s left", flush=True)
    if not runs:
        parser.error(f"--output {args.output} has no runs, and --seeds names none. Pass --seeds 0 1 2.")
    print(table(runs, AFTER_WRONG, EXACT.name))
    if args.plot:
        plot(runs, [arm.name for arm in ARMS], args.plot)


if __name__ == "__main__":
    main()
