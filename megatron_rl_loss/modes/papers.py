"""Modes of papers that need other sums than the built-in ones: a few lines each, over statistics that they declare.

By flag ``--custom-pg-loss-reducer-function-path megatron_rl_loss.modes.papers.balanced``, in code as a mode:
``make_pg_loss_reducer(balanced, ...)``. A launch counts their statistics itself; elsewhere totals are made with
``statistics=resolve(balanced).mode.statistics``. They read as examples for modes of your own.
"""

import torch
from torch import Tensor

from megatron_rl_loss.errors import check_within
from megatron_rl_loss.modes.table import ModeFunction, ModeInputs, with_statistics
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.totals import Statistic


def _inverse(values: Tensor) -> Tensor:
    """1 / values, 0 of 0."""
    return torch.where(values > 0, 1 / values, 0)


def length_to_the_minus(alpha: float, *, divided: bool = False) -> ModeFunction:
    """``sum_i M_i^-alpha sum_t l m / sum_j M_j^-alpha``, M a sample's mask sum: VL Norm, arXiv:2509.07558 (Delta L).

    The weights of samples are those of the least variance where a sample's noise grows with its length. alpha 0 is the
    mean of sample sums, over samples with an active token; alpha 1 that of sample means, times the harmonic mean of
    the M: samples of 1 and 4 tokens whose losses are 1 give 1.6.

    Args:
        alpha: 0.75 or 1 in the paper.
        divided: by L too, the divisor that the user must then give. So is the paper's, and Dr. GRPO's loss. The
            authors' code is the same with the padded width of responses as L, and its sum over j is that of all
            rollouts of a generation, which it may train on in several optimizer steps.

    Raises ValueError for an alpha that is no finite number.
    """
    check_within("alpha", alpha, "(-inf, inf)", "0.75 and 1 are usual")

    def power(samples: Samples) -> Tensor:
        lengths = samples.mask_sums.cpu()
        return torch.where(lengths > 0, lengths.clamp(min=1e-30) ** -alpha, 0)

    @with_statistics(total=Statistic(of=power))
    def mode(inputs: ModeInputs) -> Tensor:
        return power(inputs.samples) * _inverse(inputs.statistic("total")) / (inputs.divisor or 1)

    mode.__qualname__ = f"{'vl_norm' if divided else 'length_to_the_minus'}_{alpha:g}".replace(".", "_")
    mode.needs_divisor = divided  # type: ignore[attr-defined]
    return mode


#: alpha = 0.75, as in the paper's experiments, divided by the L that the user gives, as in its equation.
vl_norm = length_to_the_minus(0.75, divided=True)
#: The same without L: thousands of times as large, to gradient clipping and beside other terms.
vl_norm_undivided = length_to_the_minus(0.75)


def _sign(samples: Samples) -> Tensor:
    return torch.as_tensor(samples.label("advantage"), device="cpu").sign()


def _prompt_and_sign(samples: Samples) -> list[int | str]:
    prompts = [0] * len(samples) if samples.prompt_ids is None else samples.prompt_ids.tolist()
    return [f"{prompt}/{sign:g}" for prompt, sign in zip(prompts, _sign(samples).tolist(), strict=True)]


def _ones(samples: Samples) -> Tensor:
    return torch.ones(len(samples), dtype=torch.float64)


def _tokens(samples: Samples) -> Tensor:
    return samples.mask_sums.cpu()


@with_statistics(
    samples=Statistic(of=_ones, by="prompt"),
    samples_of_sign=Statistic(of=_ones, by=_prompt_and_sign),
    tokens_of_sign=Statistic(of=_tokens, by=_prompt_and_sign),
)
def balanced(inputs: ModeInputs) -> Tensor:
    """``1/P sum_g sum_s (|S_gs| / G_g) sum_{i in S_gs} sum_t l m / M_gs``: Balanced Aggregation, arXiv:2605.04077.

    S_gs are the samples of prompt g whose advantage has sign s, M_gs their mask tokens, G_g the prompt's samples: long
    samples of one sign do not outweigh the other sign's. Needs prompt ids and ``labels={"advantage": ...}``.
    """
    prompts = inputs.totals.prompts.counted(inputs.units)
    share = inputs.statistic("samples_of_sign") / inputs.statistic("samples")
    return share * _inverse(inputs.statistic("tokens_of_sign")) / max(prompts or 0, 1)


def _turns(samples: Samples) -> list[Tensor]:
    return [torch.as_tensor(turns, device="cpu") for turns in samples.label("turns")]


def _tokens_of_turns(samples: Samples) -> list[Tensor]:
    """At each token the mask tokens of its turn."""
    tokens = []
    for turns, mask in zip(_turns(samples), samples.loss_masks, strict=True):
        numbers, turn = turns.unique(return_inverse=True)
        sums = torch.zeros(len(numbers), dtype=torch.float64)
        tokens.append(sums.index_add(0, turn, mask.cpu().double())[turn])
    return tokens


def _active_turns(samples: Samples) -> Tensor:
    pairs = zip(_turns(samples), samples.loss_masks, strict=True)
    return torch.tensor([len(turns[mask.cpu() != 0].unique()) for turns, mask in pairs], dtype=torch.float64)


@with_statistics(turns=Statistic(of=_active_turns, by="rollout"))
def turn_mean(inputs: ModeInputs) -> list[Tensor]:
    """``1/N sum_i 1/T_i sum_{turns u of i} (sum_{t in u} l m / M_u)``: a mean over turns, then over rollouts.

    Needs ``labels={"turns": [...]}``: for each sample the number of the turn of each token, as long as its mask; a turn
    lies in one sample, a rollout may lie in several. T_i counts turns with an active token.
    """
    rollouts = max(inputs.totals.rollouts.counted(inputs.units) or 0, 1)
    of_samples = _inverse(inputs.statistic("turns")) / rollouts
    tokens = _tokens_of_turns(inputs.samples)
    return [_inverse(of_turn) * weight for of_turn, weight in zip(tokens, of_samples, strict=True)]


def _weight(samples: Samples) -> Tensor:
    return torch.as_tensor(samples.label("weight"), dtype=torch.float64, device="cpu")


def _weighted_tokens(samples: Samples) -> Tensor:
    return _weight(samples) * samples.mask_sums.cpu()


@with_statistics(total=Statistic(of=_weighted_tokens))
def weighted_token_mean(inputs: ModeInputs) -> Tensor:
    """``sum_i v_i sum_t l m / sum_j v_j M_j``, v a sample's weight (its task's, say): ``labels={"weight": ...}``."""
    return _weight(inputs.samples) * _inverse(inputs.statistic("total"))


def _adapter(samples: Samples) -> list[int | str]:
    return list(samples.label("adapter"))


@with_statistics(tokens=Statistic(of=_tokens, by=_adapter))
def adapter_token_mean(inputs: ModeInputs) -> Tensor:
    """``sum_a (sum_{i of a} sum_t l m / M_a)``, M_a the mask tokens of adapter a: each adapter has its own token mean.

    For several adapters that train side by side: ``labels={"adapter": ...}``, an id per sample.
    """
    return _inverse(inputs.statistic("tokens"))
