"""The division of advantages by SkyRL's trainer, measured in the process in which the trainer runs, a Ray task.

SkyRL sends no policy loss there. But its trainer unpickles every registered estimator of advantages before it first
divides, so `Division` is registered as one.
Source: SkyRL a9564572, train/trainer.py (_normalize_advantages), utils/ppo_utils.py (BaseFunctionRegistry).
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_rl_loss.core.collectives import StepGroups
from megatron_rl_loss.core.samples import Samples
from megatron_rl_loss.engines.places import swapped
from megatron_rl_loss.engines.prompt_tokens import ASK_SIZE, is_by_prompt, misplaced_ids, prompt_texts
from megatron_rl_loss.engines.replacing import Function, Replaced, announce, installed
from megatron_rl_loss.extend import Aggregation, LossModes, Promises, count_step, proof_level, resolve, weigh

VERSIONS = "a9564572 (2026-08-21)"
ASK = ASK_SIZE.format("AggregatedPolicyLoss(...)")
_TRAINER, _NAME = "skyrl.train.trainer", "megatron_rl_loss"


class Division:
    """Measures the trainer's first division of advantages.

    Made or unpickled in a process that has imported the trainer, it takes the place of `_normalize_advantages` there.

    Args:
        group_size: rows that are generated for each prompt, if known.
    """

    def __init__(self, group_size: int | None) -> None:
        self._group_size, self._is_measured = group_size, False
        trainer: Any = sys.modules.get(_TRAINER)
        if trainer is not None and installed("SkyRL trainer") is None:
            parameters = ["data", "mini_batch_boundaries", "prompt_boundaries"]
            function = Function(trainer.RayPPOTrainer, "_normalize_advantages", parameters, self.normalize)
            Replaced("SkyRL trainer", VERSIONS, [function])

    def __reduce__(self) -> Any:
        return Division, (self._group_size,)

    @classmethod
    def register(cls, estimators: Any, group_size: int | None) -> None:
        """Register one in SkyRL's registry, once; ValueError for a second group size."""
        if _NAME not in estimators.list_available():
            estimators.register(_NAME, cls(group_size))
        elif None not in (other := estimators.get(_NAME)._group_size, group_size) and other != group_size:
            raise ValueError(
                f"group_size={group_size} beside a loss with group_size={other}: each loss must have "
                "generator.n_samples_per_prompt. Pass that number to both, in a new process."
            )

    def __call__(self, *_: Any, **__: Any) -> None:
        raise ValueError(f"advantage_estimator={_NAME}: it estimates nothing. Choose one of SkyRL's estimators.")

    def normalize(self, stock: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        """SkyRL's `_normalize_advantages`, which is tried once before."""
        if not self._is_measured and proof_level() != "off":
            try:
                says = self._measure(stock, arguments)
            except ValueError as error:
                if proof_level() != "warn":
                    raise
                says = str(error)
            self._is_measured = bool(says)
            if says:
                announce(f"SkyRL: {says}")
        return stock()

    def _measure(self, stock: Callable[[], Any], arguments: dict[str, Any]) -> str:
        """What weights the trainer gives to advantages of 1, in words; "" without a token to train on.

        Raises ValueError where they are not the weights, float64, of the mode that ``loss_reduction`` names.
        """
        data, prompts = arguments["data"], arguments.get("prompt_boundaries") or []
        mini_batches, algorithm = arguments["mini_batch_boundaries"], arguments["self"].cfg.trainer.algorithm
        asked, name, num_rows = mode_of_trainer(algorithm), algorithm.loss_reduction, mini_batches[-1][1]
        on_ones = {
            "data.advantages": torch.ones_like(data["advantages"], dtype=torch.float64),
            "self.cfg.trainer.algorithm.advantage_batch_normalize": False,
        }
        with swapped(arguments, on_ones):
            divided = stock()["advantages"]
        by_prompt, tokens = is_by_prompt(LossModes(asked)), 0
        ids = [str(number) for number, (first, last) in enumerate(prompts) for _ in range(first, last)][:num_rows]
        if by_prompt and [row for bounds in prompts for row in range(*bounds)][:num_rows] != [*range(num_rows)]:
            raise ValueError(
                f"loss_reduction={name} with prompt_boundaries {prompts} for {num_rows} rows: each row must be in one "
                f"prompt. Use SkyRL {VERSIONS}."
            )
        is_last_step = (getattr(data, "metadata", None) or {}).get("is_last_step", [])
        # Where rows are steps of trajectories, nobody says how many a prompt has.
        promises = Promises(self._group_size, ask_size=ASK) if all(is_last_step) else Promises()
        doubts, as_given = list[str](), list[str]()
        for start, end in mini_batches:
            mask = data["loss_mask"][start:end].double()
            step = Samples(list(mask), prompt_ids=ids[start:end] if by_prompt else None)
            totals = count_step([step], StepGroups(None))
            right = weigh(asked, step.local(0, 1), totals, np.float64).view(mask.shape)
            weights = divided[start:end] * mask  # the workers multiply losses by the mask
            is_right = (weights - right).abs() <= 1e-5 * right
            for row, token in (~is_right).nonzero()[:1].tolist():
                raise ValueError(
                    f"loss_reduction={name}: SkyRL's trainer gives response token {token} of row {start + row} the "
                    f"weight {weights[row, token]:.6g}: each token must have that of {asked}, here "
                    f"{right[row, token]:.6g}. Use SkyRL {VERSIONS}; MEGATRON_RL_LOSS_PROOF=warn trains on."
                )
            tokens += int((right != 0).sum())
            groups = promises.misgrouped(totals, asked)
            doubts += groups.doubts
            as_given += groups.assumptions
        says = f"loss_reduction={name}, measured in SkyRL's own division of advantages"
        if by_prompt and data.get("pixel_values") is None:
            prompt_tokens = (data["attention_mask"] != 0) & ~response_tokens(data)
            texts = prompt_texts(data["sequences"][:num_rows], prompt_tokens[:num_rows])
            if misplaced := misplaced_ids(ids, texts, None, self._group_size):
                doubts.append(misplaced)
        if doubts:
            return f"{says}, NOT PROVED: {doubts[0]}"
        part = f"; PROVED IN PART: {as_given[0]}" if as_given else ""
        return f"{says}: each of the step's {tokens:,} tokens has the weight of {asked}{part}" if tokens else ""


def mode_of_trainer(algorithm: Any) -> Aggregation:
    """The mode that ``loss_reduction`` names; ValueError for one that depends on how the step is cut."""
    name = algorithm.loss_reduction
    divisor = algorithm.max_seq_len if name == "seq_mean_token_sum_norm" else None
    try:
        return resolve(f"skyrl:{name}", divisor=divisor)
    except ValueError as error:
        raise ValueError(f"trainer.algorithm.loss_reduction={name}: {error}") from error


def response_tokens(batch: Mapping[str, Any]) -> Tensor:
    """True at response tokens, the last ones of a row, bool [rows, tokens]."""
    response = batch["response_mask"] != 0
    return pad(response, (batch["sequences"].shape[1] - response.shape[1], 0))
