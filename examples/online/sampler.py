"""Responses from the current weights.

This file is a short loop over Megatron's forward pass and KV cache. Megatron's own engine (engine.py) is about as fast.
This loop is the default because it returns entropies and the log-prob of the end mark, and takes random numbers as an
input. A step's numbers are drawn for all its responses at once, whichever rank samples them, so every layout draws the
same responses (up to rounding of the probabilities).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.utils import InferenceMode
from torch import Tensor

from online.task import END, MAX_RESPONSE


@dataclass(frozen=True)
class Responses:
    """Sampled responses, one per row; positions from `lengths` on are undefined.

    Attributes:
        tokens: int64 [rows, MAX_RESPONSE].
        lengths: int64 [rows], the end mark included; MAX_RESPONSE for a response without one.
        log_probs: float32, of the tokens under the policy that drew them; None if the sampler returns none.
        entropies: float32, in nats, of the distributions of the tokens; None if the sampler returns none.
    """

    tokens: Tensor
    lengths: Tensor
    log_probs: Tensor | None = None
    entropies: Tensor | None = None

    def mean_entropy(self) -> float | None:
        """Mean over the tokens of all responses."""
        if self.entropies is None:
            return None
        drawn = torch.arange(MAX_RESPONSE, device=self.lengths.device) < self.lengths[:, None]
        return float(self.entropies[drawn].mean())


def one_seed(*seeds: int) -> int:
    """One seed from several numbers, such as a purpose and a step."""
    seed = 0
    for part in seeds:
        seed = seed * 1_000_003 + part
    return seed % 2**63


def draw_uniforms(rows: int, seed: int) -> Tensor:
    """The random numbers of `rows` responses, float32 [rows, MAX_RESPONSE]; the same on every rank."""
    return torch.rand(rows, MAX_RESPONSE, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def sample(model: Any, prompts: Tensor, uniforms: Tensor, *, tp_group: Any) -> Responses:
    """Sample one response per prompt at temperature 1; called by all ranks of a TP group with equal arguments.

    Args:
        model: Megatron's GPTModel, not wrapped.
        prompts: int64 [rows, prompt length], all of one length.
        uniforms: [rows, MAX_RESPONSE] in [0, 1): the place of each token in the cumulated probabilities.
    """
    rows, prompt_length = prompts.shape
    cache = StaticInferenceContext(rows, prompt_length + MAX_RESPONSE)
    tokens = prompts.new_full((rows, MAX_RESPONSE), END)
    log_probs, entropies = torch.zeros(2, rows, MAX_RESPONSE, device=prompts.device)
    lengths = torch.full_like(prompts[:, 0], MAX_RESPONSE)
    going_on = torch.ones_like(prompts[:, 0], dtype=torch.bool)
    first_of_tp = dist.get_process_group_ranks(tp_group)[0]
    fed, position = prompts, 0
    with InferenceMode.active(), _evaluating(model):
        for step in range(MAX_RESPONSE):
            positions = torch.arange(position, position + fed.size(1), device=fed.device).expand_as(fed)
            logits = model(fed, positions, None, inference_context=cache, runtime_gather_output=True)
            cache.increment_sequence_len_offset(fed.size(1))
            position += fed.size(1)
            all_log_probs = logits[:, -1].float().log_softmax(-1)
            probabilities = all_log_probs.exp()
            below = probabilities.cumsum(-1) <= uniforms[:, step, None]
            # The sum of all may round to less than the number drawn.
            token = below.sum(-1).clamp(max=all_log_probs.size(-1) - 1)
            if tp_group.size() > 1:
                dist.broadcast(token, src=first_of_tp, group=tp_group)
            tokens[:, step] = torch.where(going_on, token, END)
            log_probs[:, step] = all_log_probs.gather(-1, token[:, None])[:, 0]
            entropies[:, step] = -(probabilities * all_log_probs).sum(-1)
            ends = going_on & (token == END)
            lengths[ends] = step + 1
            going_on &= ~ends
            if not going_on.any():
                break
            cache.enable_decode_mode()
            fed = tokens[:, step, None]
    return Responses(tokens, lengths, log_probs, entropies)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode inside the ``with``, which Megatron needs for inference."""
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)


def sample_together(draw: Callable[[slice], Responses], rows: int, *, replica_group: Any) -> Responses:
    """Split the rows over the ranks that hold the same weights; every rank gets all responses.

    Args:
        draw: samples responses to some of the rows.
        replica_group: data- and context-parallel ranks; their number must divide `rows`. Each of n ranks samples every
            n-th row, so the responses to one prompt come from several ranks.
    """
    size, rank = replica_group.size(), replica_group.rank()
    if rows % size:
        ranks = f"{size} data- and context-parallel ranks"
        raise ValueError(f"{rows} responses on {ranks}: the ranks must divide them evenly. Ask for a multiple.")
    mine = draw(slice(rank, None, size))
    if size == 1:
        return mine
    parts = {name: part for name, part in vars(mine).items() if part is not None}
    return Responses(**{name: _interleaved(part, replica_group) for name, part in parts.items()})


def _interleaved(part: Tensor, group: Any) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.stack(parts, dim=1).flatten(0, 1)
