"""Write rollouts of a verifiable task, multi-digit addition, as JSONL for examples/pretrain_grpo.py.

    python tools/make_rollouts.py --prompts 32 --seed 0 --output examples/arithmetic.jsonl

A scripted, fallible solver stands in for the policy. The solver adds column by column, sometimes asks a calculator
(whose answer has loss mask 0), sometimes slips, and sometimes checks itself until the generation budget cuts it off.
The verifier is real: the reward is 1 if the number after the last "=" is the sum and the response ended by itself,
else 0. Responses that were cut off are fully masked (overlong filtering, DAPO,
arXiv:2503.14476 section 3.4).

    347+58=   7+8?15;4+5+1=10;3+1=4;=405<end>     masks: 0 on the calculator's "15", 1 elsewhere
"""

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

END = 0
CHARACTERS = "0123456789+=?;"
TOKEN_OF = {character: i + 1 for i, character in enumerate(CHARACTERS)}


@dataclass
class Response:
    text: str
    written_by_policy: list[bool]
    truncated: bool


def solve(a: int, b: int, budget: int, rng: random.Random) -> Response:
    """One attempt at a + b, at most `budget` tokens with the end token."""
    pieces: list[tuple[str, bool]] = []
    slips, verbosity = rng.random() * 0.25, rng.random()
    while True:
        digits, carry = [], 0
        width = max(len(str(a)), len(str(b)))
        for x, y in (map(int, pair) for pair in zip(f"{a:0{width}d}"[::-1], f"{b:0{width}d}"[::-1], strict=True)):
            column = x + y + carry
            written = max(column + rng.choice([-1, 1, 10]) if rng.random() < slips else column, 0)
            terms = f"{x}+{y}+{carry}" if carry else f"{x}+{y}"
            if rng.random() < 0.3:
                pieces += [(f"{terms}?", True), (str(column), False), (";", True)]
                written = column
            else:
                pieces.append((f"{terms}={written};", True))
            digits.append(written % 10)
            carry = written // 10
        answer = carry * 10 ** len(digits) + sum(digit * 10**i for i, digit in enumerate(digits))
        if rng.random() > 0.45 * verbosity:
            break
    pieces.append((f"={answer}", True))
    text = "".join(piece for piece, _ in pieces)
    written_by_policy = [by_policy for piece, by_policy in pieces for _ in piece]
    truncated = len(text) + 1 > budget
    return Response(text[:budget], written_by_policy[:budget], truncated)


def reward(a: int, b: int, response: Response) -> float:
    """The verifier: 1 if the number after the last "=" is the sum, else 0."""
    if response.truncated:
        return 0.0
    final = response.text.rpartition("=")[2]
    return float(final.isdigit() and int(final) == a + b)


def make_rollouts(num_prompts: int, responses_per_prompt: int, budget: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    records = []
    for prompt in range(num_prompts):
        a, b = (rng.randrange(10 ** rng.randint(1, 5)) for _ in range(2))
        for i in range(responses_per_prompt):
            response = solve(a, b, budget, rng)
            tokens = [TOKEN_OF[character] for character in response.text]
            mask = [0 if response.truncated else int(by_policy) for by_policy in response.written_by_policy]
            if not response.truncated:
                tokens.append(END)
                mask.append(1)
            records.append(
                {
                    "prompt_tokens": [TOKEN_OF[character] for character in f"{a}+{b}="],
                    "response_tokens": tokens,
                    "loss_mask": mask,
                    "reward": reward(a, b, response),
                    "prompt_id": f"{seed}/{prompt}",
                    "rollout_id": f"{seed}/{prompt}/{i}",
                }
            )
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--responses-per-prompt", type=int, default=8)
    parser.add_argument("--generation-budget", type=int, default=64, help="Most response tokens, the end included.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    records = make_rollouts(args.prompts, args.responses_per_prompt, args.generation_budget, args.seed)
    args.output.write_text("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records))
    print(
        f"{args.output}: {len(records)} rollouts, {sum(bool(record['reward']) for record in records)} of them correct"
    )


if __name__ == "__main__":
    main()
