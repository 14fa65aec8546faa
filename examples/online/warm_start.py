"""The supervised beginning: trains on examples of the task, some with working, until some responses are right.

The warm start ends at a reward, not after a number of steps. Reward rises steeply here: after a fixed number of steps
one seed would have 0.1 and another 0.6.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from rollouts import Rollout
from torch import Tensor

from megatron_rl_loss import Microbatch
from megatron_rl_loss.megatron.flags import AggregationSettings
from online.policy import Policy, Trainer
from online.rows import deal
from online.task import draw_problems, encode

BATCH, LEARNING_RATE, BETA2 = 128, 2e-3, 0.95
SHARE_WITH_WORKING = 0.3
TRIED_EVERY, SAID_EVERY, MOST_STEPS = 20, 100, 2000


@dataclass(frozen=True)
class WarmStart:
    steps: int
    reward: float


def supervised_losses(log_probs: Tensor, microbatch: Microbatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -log_probs, {}


def warm_start(
    policy: Policy,
    reward_now: Callable[[int], float],
    *,
    until_reward: float,
    num_microbatches: int,
    seed: int,
    say: Callable[[str], None],
) -> WarmStart:
    """Train `policy` on examples until ``reward_now(step)``, measured every few steps, is `until_reward`.

    Raises RuntimeError if `MOST_STEPS` are not enough.
    """
    say(f"warm start: right answers, some with working, until a sampled one is right with {until_reward:.0%}")
    rng = random.Random(f"warm start {seed}")
    trainer = Trainer(policy, AggregationSettings.resolve("token_mean"), lr=LEARNING_RATE, beta2=BETA2)
    dp, cp = policy.groups.dp, policy.groups.cp
    for step in range(1, MOST_STEPS + 1):
        rollouts = draw_examples(BATCH, rng)
        hand = {"dp_rank": dp.rank(), "dp_size": dp.size(), "cp_size": cp.size()}
        report = trainer.step(deal(rollouts, num_microbatches=num_microbatches, **hand), supervised_losses)
        if step % TRIED_EVERY == 0:
            reward = reward_now(step)
            enough = reward >= until_reward
            if enough or step % SAID_EVERY == 0:
                say(f"warm start, step {step}: loss {report['pg_loss']:.2f}, reward {reward:.2f}")
            if enough:
                return WarmStart(step, reward)
    raise RuntimeError(f"--warm-start-reward {until_reward}: not reached in {MOST_STEPS} steps. Lower it.")


def draw_examples(count: int, rng: random.Random) -> list[Rollout]:
    """Right responses to training prompts."""
    examples = []
    for i, problem in enumerate(draw_problems("training", count, rng)):
        text = problem.worked() if rng.random() < SHARE_WITH_WORKING else problem.plain()
        response = encode(text)
        examples.append(
            Rollout(encode(problem.prompt), response, [1.0] * len(response), 1.0, prompt_id=i, rollout_id=i)
        )
    return examples
