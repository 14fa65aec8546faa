"""Log-probs as rollout engines write them: of the sampled tokens, and of the likeliest ids at each of them.

sampled    vLLM, NeMo-Gym (``generation_log_probs``): a number per token; SGLang: (log-prob, id, ...) per token
likeliest  vLLM: {id: {"logprob": ...}} or {id: log-prob} per token; SGLang: [(log-prob, id, ...), ...] per token;
           OpenAI's form: [{"token": "token_id:7", "logprob": ...}, ...] per token
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

#: vLLM writes it for a log-prob of -inf, which JSON does not have.
_FLOOR = -9999.0
_BY_ID = "token_id:"


def sampled_log_probs(column: Sequence[Any]) -> list[float]:
    """The log-prob of each sampled token, of numbers or of SGLang's (log-prob, id, ...) tuples.

    Raises ValueError for anything else, and for what is above 0.
    """
    return [_log_prob(t, entry[0] if _is_pair(entry) else entry) for t, entry in enumerate(column)]


def likeliest_ids(column: Sequence[Any]) -> list[list[tuple[float, int]]]:
    """(log-prob, id) of the likeliest ids of each token, the likeliest first, each id once.

    Raises ValueError for tokens that are texts, which name no id, and for anything else that is not listed above.
    """
    return [_pairs_of_token(t, entry) for t, entry in enumerate(column)]


def ids_and_log_probs(pairs: Sequence[Sequence[tuple[float, int]]], most: int | None = None) -> tuple[Tensor, Tensor]:
    """`likeliest_ids` as int64 and float32 [tokens, K], the columns of `score_centering`: -inf where there are fewer.

    K is the largest number of ids of a token, or `most` if there are more; at least 1.
    """
    number = max([1, *map(len, pairs)])
    number = number if most is None else min(number, most)
    ids = torch.zeros(len(pairs), number, dtype=torch.int64, device="cpu")
    log_probs = torch.full((len(pairs), number), -math.inf, dtype=torch.float32, device="cpu")
    for t, token_pairs in enumerate(pairs):
        for k, (log_prob, token_id) in enumerate(token_pairs[:number]):
            ids[t, k], log_probs[t, k] = token_id, log_prob
    return ids, log_probs


def _pairs_of_token(t: int, entry: Any) -> list[tuple[float, int]]:
    if isinstance(entry, Mapping):
        pairs: Iterable[tuple[Any, Any]] = [(_value(value), key) for key, value in entry.items()]
    elif isinstance(entry, list | tuple) and all(_is_pair(pair) for pair in entry):
        pairs = [(pair[0], pair[1]) for pair in entry]
    elif isinstance(entry, list | tuple) and all(isinstance(each, Mapping) and "token" in each for each in entry):
        pairs = [(each.get("logprob"), each["token"]) for each in entry]
    else:
        raise ValueError(
            f"likeliest ids of token {t} as {str(entry)[:60]!r}: they must be {{id: log-prob}} as of vLLM, or pairs "
            "(log-prob, id) as of SGLang. Convert them to [[log-prob, id], ...] per token."
        )
    by_id = {_id(t, key): _log_prob(t, log_prob) for log_prob, key in pairs}
    return sorted(((log_prob, token_id) for token_id, log_prob in by_id.items()), key=lambda pair: (-pair[0], pair[1]))


def _is_pair(entry: Any) -> bool:
    return isinstance(entry, list | tuple) and len(entry) >= 2 and not isinstance(entry[0], list | tuple | Mapping)


def _value(value: Any) -> Any:
    """Of vLLM's `Logprob`, as an object or as JSON, the log-prob."""
    return value.get("logprob") if isinstance(value, Mapping) else getattr(value, "logprob", value)


def _id(t: int, key: Any) -> int:
    text = str(key).removeprefix(_BY_ID)
    if isinstance(key, bool) or not text.isdecimal():
        raise ValueError(
            f"the token {key!r} among the likeliest of token {t}: a text names no id of the vocabulary. Ask the engine "
            "for ids: return_tokens_as_token_ids of vLLM's server, or SGLang's output_top_logprobs."
        )
    return int(text)


def _log_prob(t: int, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value <= 0.1:
        raise ValueError(
            f"a log-prob of {value!r} at token {t}: it must be a number, at most 0. Pass a number per token, or "
            "SGLang's (log-prob, id, text) tuples; leave out the prompt's first token, which has none."
        )
    return -math.inf if value <= _FLOOR else float(value)
