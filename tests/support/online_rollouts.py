"""Made-up rollouts for tests of the online example."""

import itertools
import random

from online.task import MAX_RESPONSE, PROMPT_LENGTH, VOCABULARY
from rollouts import Rollout


def some_rollouts(prompts: int, responses: int, seed: int, *, empty: float = 0.1) -> list[Rollout]:
    """Ragged, with fractional masks, a share of them `empty`, and rewards of either kind."""
    rng = random.Random(seed)
    prompt_tokens = [[rng.randrange(len(VOCABULARY)) for _ in range(PROMPT_LENGTH)] for _ in range(prompts)]
    rollouts = []
    for prompt, attempt in itertools.product(range(prompts), range(responses)):
        n = rng.randint(1, MAX_RESPONSE)
        mask = [1, *(rng.choice([0, 0.5, 1, 1]) for _ in range(n - 1))]
        rollouts.append(
            Rollout(
                prompt_tokens=prompt_tokens[prompt],
                response_tokens=[rng.randrange(len(VOCABULARY)) for _ in range(n)],
                loss_mask=mask if rng.random() >= empty else [0] * n,
                reward=float(rng.random() < 0.4),
                prompt_id=prompt,
                rollout_id=f"{prompt}.{attempt}",
                old_log_probs=[-rng.uniform(1, 4) for _ in range(n)],
            )
        )
    return rollouts
