"""Does score centering matter? The run of `does_it_matter.py`, with a sampler whose logits are rounded.

    OMP_NUM_THREADS=1 python does_centering_matter.py --seeds 0 1 2 3 4 --output runs.jsonl --plot centering.png

The inference engine draws from logits rounded to multiples of 2, the trainer has its own. A wrong answer ends the
episode, so that lengths carry no reward, and every arm has exact token_mean weights. Arms of a seed share start,
problems and random numbers; they differ by the correction alone. The sampler gives its 4 likeliest of 8 ids.
"""

import argparse
import copy
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from does_it_matter import ADAM, GROUP, LIMIT, PROMPT, problems, sample, warm_start
from matter.policy import GPT
from matter.report import spread
from torch import Tensor, nn

from megatron_rl_loss import AtIds, Gate, importance_weights, ppo_clip_loss, score_centering, weights_column

STEPS, GRID, TOP, LATE = 100, 2.0, 4, 50
TRUNCATED, ICEPOP = Gate(high=2.0, action="clamp"), Gate(low=0.5, high=5.0)
#: Of each arm the grid of the sampler's logits (0: the trainer's own), the gate of the weights, and whether it centres.
ARMS: dict[str, tuple[float, Gate | None, bool]] = {
    "the trainer samples": (0.0, None, False),
    "no correction": (GRID, None, False),
    "truncated weights": (GRID, TRUNCATED, False),
    "IcePop": (GRID, ICEPOP, False),
    "centering": (GRID, None, True),
    "centering, truncated weights": (GRID, TRUNCATED, True),
}
STYLES = [("#000000", ":"), ("#d55e00", "-"), ("#cc79a7", "--"), ("#e69f00", "-."), ("#0072b2", "-"), ("#009e73", "--")]


def rounded(logits: Tensor, grid: float) -> Tensor:
    return (logits / grid).round() * grid if grid else logits


class Sampler(nn.Module):
    """The policy as the inference engine has it."""

    def __init__(self, policy: GPT, grid: float) -> None:
        super().__init__()
        self.policy, self.grid = policy, grid

    def forward(self, *inputs: Any) -> Tensor:
        return rounded(self.policy(*inputs), self.grid)


def train(policy: GPT, seed: int, arm: str) -> list[dict[str, float]]:
    """Run GRPO on 16 prompts a step; returns what the sampler wins on 256 new problems."""
    grid, gate, centres = ARMS[arm]
    rng, (drawn, new) = random.Random(seed), (torch.Generator().manual_seed(3 * seed + i) for i in range(2))
    optimizer, log, sampler = ADAM(policy.parameters()), list[dict[str, float]](), Sampler(policy, grid)
    for step in range(STEPS + 1):
        if step % 25 == 0:
            seen = sample(sampler, *problems(256, random.Random(f"new {seed}")), "end", new)  # type: ignore[arg-type]
            log.append({"step": step, "reward": float(seen.reward.mean())})
        prompts, answers = (x.repeat_interleave(GROUP, 0) for x in problems(16, rng))
        batch = sample(sampler, prompts, answers, "end", drawn)  # type: ignore[arg-type]
        groups = batch.reward.view(-1, GROUP)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
        advantages = advantages.view(-1, 1).expand(-1, LIMIT)
        logits = policy(torch.cat([batch.prompts, batch.tokens], 1)[:, :-1])[:, PROMPT - 1 :]
        policy_log_probs, sampler_log_probs = logits.log_softmax(-1), rounded(logits.detach(), grid).log_softmax(-1)
        now, at_sampler = (
            of.gather(-1, batch.tokens[..., None])[..., 0] for of in (policy_log_probs, sampler_log_probs)
        )
        weights = None
        if gate is not None:
            weights = importance_weights((now.detach() - at_sampler) * batch.mask, gate)
        losses = ppo_clip_loss(now, now.detach(), advantages, batch.mask, importance_weights=weights).per_token_loss
        if centres:
            top = sampler_log_probs.topk(TOP)
            at_top, sampler_top = (
                AtIds(of.gather(-1, top.indices), of.scatter(-1, top.indices, -torch.inf).logsumexp(-1))
                for of in (policy_log_probs, sampler_log_probs)
            )
            losses = losses + score_centering(at_top, sampler_top, advantages, batch.mask, gate=gate)
        optimizer.zero_grad()
        (torch.stack(weights_column("token_mean", list(batch.mask))) * losses).sum().backward()
        optimizer.step()
    return log


def late(run: dict[str, Any]) -> float:
    """Mean reward from step 50 on."""
    rewards = [seen["reward"] for seen in run["log"] if seen["step"] >= LATE]
    return sum(rewards) / len(rewards)


def table(runs: Sequence[dict[str, Any]]) -> str:
    lines = [
        "arm | best reward | reward, steps 50 to 100 | difference from the trainer's own | seeds",
        " | ".join(["---"] * 5),
    ]
    own = {run["seed"]: late(run) for run in runs if run["arm"] == next(iter(ARMS))}
    for arm in ARMS:
        ran = [run for run in runs if run["arm"] == arm]
        best = [max(seen["reward"] for seen in run["log"]) for run in ran]
        less = [late(run) - own[run["seed"]] for run in ran if run["seed"] in own and arm != next(iter(ARMS))]
        cells = [arm, spread(best), spread([late(run) for run in ran]), spread(less, "+.2f"), str(len(ran))]
        lines += [" | ".join(cells)] * bool(ran)
    return "\n".join(f"| {line} |" for line in lines)


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw each arm's mean over seeds, and every seed as a thin line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(12, 6), sharex=True, sharey=True, layout="constrained")
    for axis, arm, (color, dashes) in zip(axes.flat, ARMS, STYLES, strict=True):
        logs = [run["log"] for run in runs if run["arm"] == arm]
        for log in logs:
            axis.plot([seen["step"] for seen in log], [seen["reward"] for seen in log], color=color, alpha=0.25)
        means = [sum(seen["reward"] for seen in at) / len(at) for at in zip(*logs, strict=True)]
        axis.plot(
            [seen["step"] for seen in logs[0]] if logs else [], means, color=color, linestyle=dashes, linewidth=2.5
        )
        axis.set(title=arm, ylim=(0.4, 1.02))
        axis.grid(alpha=0.3)
    figure.supxlabel("step of GRPO")
    figure.supylabel("reward")
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[], help="none: show what the file has")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines; runs that it has are not repeated")
    parser.add_argument("--plot", type=Path, help="picture of all runs of the file; needs matplotlib")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.output.open("a").close()
    runs = [json.loads(line) for line in args.output.read_text().splitlines()]
    for seed, arm in ((seed, arm) for seed in args.seeds for arm in ARMS):
        if any((run["seed"], run["arm"]) == (seed, arm) for run in runs):
            continue
        log = train(copy.deepcopy(warm_start(seed, "end")), seed, arm)
        runs.append({"seed": seed, "arm": arm, "log": log})
        with args.output.open("a") as file:
            file.write(json.dumps(runs[-1]) + "\n")
        print(f"seed {seed}, {arm}: reward {log[0]['reward']:.2f} -> {late(runs[-1]):.2f}", flush=True)
    if not runs:
        parser.error(f"--output {args.output} has no runs, and --seeds names none. Pass --seeds 0 1 2.")
    print(table(runs))
    if args.plot:
        plot(runs, args.plot)


if __name__ == "__main__":
    main()
