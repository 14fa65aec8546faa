"""The task: add two numbers of three digits, with written working or without.

    347+586=   933$             or   <13,13,09>933$

The working lists the sums of the columns, units first, carry included. A response is right if the text after its last
">" is the sum and the end mark "$" comes within `MAX_RESPONSE` tokens. The checker ignores the working itself. Pairs
with (3a + b) mod 4 = 0 are held out of training.
"""

import random
from dataclasses import dataclass
from typing import Literal

VOCABULARY = "0123456789+=<,>$"
TOKEN_OF = {character: i for i, character in enumerate(VOCABULARY)}
END = TOKEN_OF["$"]
#: Tokens of every prompt, and of a response at most, the end mark included.
PROMPT_LENGTH, MAX_RESPONSE = 8, 24

Split = Literal["training", "held out"]


@dataclass(frozen=True)
class Problem:
    """a + b, both of three digits."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        return f"{self.a}+{self.b}="

    @property
    def held_out(self) -> bool:
        return (3 * self.a + self.b) % 4 == 0

    def plain(self) -> str:
        """The right response in the fewest tokens."""
        return f"{self.a + self.b}$"

    def worked(self) -> str:
        """The right response with its working."""
        columns, carry = [], 0
        for x, y in zip(reversed(str(self.a)), reversed(str(self.b)), strict=True):
            column = int(x) + int(y) + carry
            columns.append(f"{column:02d}")
            carry = column // 10
        return f"<{','.join(columns)}>{self.plain()}"

    def reward(self, response: str) -> float:
        """The checker: 1.0 for a right response, else 0.0."""
        answer = response.rpartition(">")[2]
        return float(len(response) <= MAX_RESPONSE and answer == self.plain())


def draw_problems(split: Split, count: int, rng: random.Random) -> list[Problem]:
    """`count` problems of a split, with replacement."""
    problems: list[Problem] = []
    while len(problems) < count:
        problem = Problem(rng.randrange(100, 1000), rng.randrange(100, 1000))
        if problem.held_out == (split == "held out"):
            problems.append(problem)
    return problems


def encode(text: str) -> list[int]:
    return [TOKEN_OF[character] for character in text]


def decode(tokens: list[int]) -> str:
    return "".join(VOCABULARY[token] for token in tokens)


def has_working(response: str) -> bool:
    return response.startswith("<")
