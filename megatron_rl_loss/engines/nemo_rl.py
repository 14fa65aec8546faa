"""NeMo-RL: any mode for its clipped policy loss and its KL penalty, by one line in a copy of its run script.

    from megatron_rl_loss.engines.nemo_rl import aggregate

    loss_fn = aggregate(policy, loss_fn, "prompt_mean", kl="token_mean")  # after setup(...), before grpo_train(...)

NeMo-RL divides the sum over all tokens by the global batch's T valid tokens. With ``token_level_loss=false`` NeMo-RL
divides the sum of sample means by the N valid samples. The driver holds a whole batch and writes a column for each
term: the mode's weights * T, or a sample's sum of weights * N. The policy loss gets advantage * column, the KL penalty
gets the column as its mask; metrics keep the masks. Prompts are those by which NeMo-RL computed the advantages; the
driver compares them with the rows' tokens. Workers prove their first step.
Source: nemo_rl 7ea279ab, algorithms/loss/loss_functions.py (ClippedPGLossFn), algorithms/utils.py (masked_mean).
"""

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_rl_loss.core.modes import Mode
from megatron_rl_loss.engines.loss_trials import PENALTIES, Beside, LossPaths
from megatron_rl_loss.engines.places import wrapped
from megatron_rl_loss.engines.prompt_tokens import prompt_texts
from megatron_rl_loss.engines.proving import prove
from megatron_rl_loss.engines.replacing import Function, Replaced, announce, once
from megatron_rl_loss.engines.weighed_batches import FACTORS, IDS, PLAIN, ROWS, BatchEngine, StepArguments, hashed_ids
from megatron_rl_loss.extend import LossModes, ModeFunction, Promises, UnitCounting, part_of_loss

__all__ = ["AggregatedPGLossFn", "aggregate"]
#: The column of a term's weights.
_WEIGHTS = {"pg": "policy_loss_weights", "kl": "kl_loss_weights"}


def _sums_tokens(loss: Any) -> bool:
    """Else it averages within each sample."""
    return bool(loss.loss_type.value == "token_level")


def _facts(step: StepArguments, batch: Any) -> dict[str, Any]:
    """Gradients by logits are unknown of fused log-probs, and of two kinds of log-probs."""
    loss, has_two = step["loss"], "curr_logprobs_unfiltered" in batch and "kl" in step["loss"].modes
    return {"temperature": None if has_two or getattr(loss, "use_fused_linear_logprobs", False) else 1.0}


#: A step is the loss with the data of the driver's step, which has all rows, or of a micro-batch.
ENGINE = BatchEngine(
    "NeMo-RL", versions="7ea279ab",
    batches=lambda step: [step["data"]],
    # Of log-probs, which a row's first token has not; in the batch, a term's weights may be in the masks' place.
    masks=lambda step, batch: list((step["data"]["token_mask"][:, 1:] * step["data"]["sample_mask"][:, None]).float()),
    prompts=lambda step, batch: step["prompts"],
    prompt_tokens=lambda batch: prompt_texts(batch["input_ids"], batch["token_mask"].cumsum(-1) == 0),
    group=lambda step: None,
    divisor=lambda step, totals: totals.step_tokens
    if _sums_tokens(step["loss"]) else float(step["data"]["sample_mask"].sum()),
    uneven=lambda step: "" if _sums_tokens(step["loss"]) else "Set token_level_loss=true",
    facts=_facts,
    beside=lambda step, batch: step["beside"],
    sums_masked=True,
    loss=LossPaths(
        "next_token_logprobs", "data.advantages",
        {
            "data.prev_logprobs": lambda trial: pad(trial.old, (1, 0)),
            "data.generation_logprobs": lambda trial: pad(trial.old, (1, 0)),
            "data.reference_policy_logprobs?": lambda trial: pad(trial.reference, (1, 0)),
            "data.curr_logprobs_unfiltered?": lambda trial: trial.log_probs,
        },
        distance=2.0**-3,  # of at most 3/32 to the reference, below most clamps
    ),
    batch="data",
)  # fmt: skip


def aggregate(
    policy: Any, loss_fn: Any, mode: str | Mode | ModeFunction,
    *, kl: str | None = None, group_size: int | None = None,
    divisor: float | None = None, units: UnitCounting | None = None,
) -> "AggregatedPGLossFn":  # fmt: skip
    """The loss in that mode; ``policy.train`` of this driver then adds columns of weights to every batch.

    Args:
        policy, loss_fn: what `grpo_train` is called with, a `ClippedPGLossFn`.
        mode: of the policy loss, and of the KL penalty unless `kl` names another.
        group_size: ``num_generations_per_prompt``, which the proof compares. If it is not known, a mode by prompt is
            proved in part.
        divisor, units: of the policy loss, as in `weights_column`.

    Raises ValueError and TypeError for unusable settings, ``positive_example_nll_weight``, and a driver that has an
    aggregation; in training, as `weights_column`.
    """
    from nemo_rl.algorithms import advantage_estimator

    if isinstance(loss_fn, type) or not hasattr(loss_fn, "positive_example_nll_weight"):
        raise TypeError(
            f"loss_fn is a {getattr(loss_fn, '__name__', type(loss_fn).__name__)}: it must be a ClippedPGLossFn. Call "
            "aggregate(policy, loss_fn, mode) with what setup(...) returned."
        )
    modes = {"pg": LossModes.resolve(mode, divisor=divisor, units=units)}
    modes["kl"] = modes["pg"] if kl is None else LossModes.resolve(kl)
    if loss_fn.positive_example_nll_weight > 0:
        raise ValueError(
            f"positive_example_nll_weight={loss_fn.positive_example_nll_weight}: grpo_train passes no rewards, which "
            "that term needs, and the term is averaged per micro-batch. Set positive_example_nll_weight=0."
        )
    if loss_fn.reference_policy_kl_penalty == 0:
        del modes["kl"]
    loss, prompts = AggregatedPGLossFn(loss_fn, modes, Promises.checked_size(group_size)), list[str]()

    def keep_prompts(stock: Any, arguments: dict[str, Any]) -> Any:
        prompts[:] = map(str, arguments["prompt_ids"].tolist())
        return stock()

    def with_columns(stock: Any, arguments: dict[str, Any]) -> Any:
        if isinstance(arguments["loss_fn"], type(loss_fn)):
            raise ValueError(
                f"policy.train with a {type(loss_fn).__name__} beside aggregate(...): that loss has no weights. Pass "
                "grpo_train the loss that aggregate(...) returned."
            )
        if arguments["loss_fn"] is loss:
            data = arguments["data"] = copy.copy(arguments["data"])
            batch_size = arguments.get("gbs") or policy.cfg["train_global_batch_size"]
            data.update(loss.columns(data, batch_size, prompts))
        return stock()

    functions = [Function(policy, "train", ["data", "loss_fn", "gbs"], with_columns)]
    for estimator in vars(advantage_estimator).values():
        if "compute_advantage" in getattr(estimator, "__dict__", {}):
            functions.append(Function(estimator, "compute_advantage", ["prompt_ids"], keep_prompts))
    Replaced(ENGINE.name, ENGINE.versions, functions)
    return loss


def _know_draft() -> Replaced:
    """In a worker that trains a draft model: the loss of that model is a part of the loss that NeMo-RL aggregates."""
    from nemo_rl.algorithms.loss.loss_functions import DraftCrossEntropyLossFn

    draft = Function(DraftCrossEntropyLossFn, "__call__", ["student_logits"], lambda stock, _: part_of_loss(stock()))
    return Replaced("NeMo-RL draft", ENGINE.versions, [draft])


class AggregatedPGLossFn:
    """A `ClippedPGLossFn` whose terms are weighted by columns of the batch; other attributes are that loss's."""

    def __init__(self, loss_fn: Any, modes: dict[str, LossModes], group_size: int | None = None) -> None:
        self._loss_fn, self.modes, self._group_size = loss_fn, modes, group_size
        self._policy, self._number, self._doubt = copy.copy(loss_fn), uuid4().hex, ""
        self._policy.reference_policy_kl_penalty = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickle in a worker, whose first step is then proved."""
        self.__dict__.update(state)
        proof = once(self._number, self._prove)  # a loss is unpickled for each step
        if proof is not None:
            proof.doubt = self._doubt  # not said here: ranks unpickle when they like

    def _prove(self) -> Any:
        words = {"pg": "policy", "kl": "kl"}
        terms = ", ".join(f"{words[term]} by {modes.policy.mode.name}" for term, modes in self.modes.items())
        announce(f"NeMo-RL: {terms}, with the weights that the driver adds to each batch")
        beside = "NeMo-RL aggregates MoE, MTP and draft losses"
        never = "NeMo-RL did not call aggregate(...)'s loss. Pass that loss to grpo_train of NeMo-RL 7ea279ab."
        proof = prove(ENGINE.name, self.modes["pg"].policy, beside=beside, never=never)
        if proof is not None:
            proof.terms, proof.promises = [*self.modes], ENGINE.promises({}, self._group_size)
        return proof

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pickle looks these up before there is a loss
            raise AttributeError(name)
        return getattr(self._loss_fn, name)

    def columns(self, data: Any, batch_size: int, prompts: Sequence[str]) -> dict[str, Tensor]:
        """A column per term, [rows, tokens], or [rows] for losses of samples; `batch_size` rows are a step.

        Workers hear with it why prompts may stand at other rows, by the tokens before the first trained one.
        """
        num_rows, parts = len(data["sample_mask"]), defaultdict[str, list[Tensor]](list)
        unknown = "" if len(prompts) == num_rows else "rows whose advantages NeMo-RL did not compute by prompts"
        for start in range(0, num_rows, batch_size):
            rows = slice(start, start + batch_size)
            own = {name: data[name][rows] for name in ("token_mask", "sample_mask")}
            step = {"loss": self, "data": own, "prompts": unknown or prompts[rows]}
            for term, modes in self.modes.items():
                ((*_, token_factors),), _ = ENGINE.factors(modes, step)
                factors = token_factors.view(len(own["sample_mask"]), -1)
                parts[_WEIGHTS[term]].append(pad(factors, (1, 0)) if _sums_tokens(self) else factors.sum(-1))
        written = {name: torch.cat(columns) for name, columns in parts.items()} | {ROWS: torch.arange(num_rows)}
        self._doubt = ""
        if not unknown:
            written[IDS], known = hashed_ids(prompts), [(data, prompts)]
            doubts = (ENGINE.misplaced(modes, {}, known, self._group_size) for modes in self.modes.values())
            self._doubt = next(filter(None, doubts), "")
        return written

    def __call__(
        self, next_token_logprobs: Tensor, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """The rank's share of the step loss, and NeMo-RL's metrics; each term, and the metrics, call its loss once."""
        if _WEIGHTS["pg"] not in data:
            raise ValueError(
                "a NeMo-RL batch without our weights: policy.train of the driver adds them, and was not called. Train "
                "by grpo_train with data_plane.enabled=false."
            )
        if "student_logits" in data:
            once("NeMo-RL draft", _know_draft)
        counts = {"global_valid_seqs": global_valid_seqs, "global_valid_toks": global_valid_toks}
        with torch.no_grad():
            _, metrics = self._loss_fn(next_token_logprobs.detach(), data, **counts)

        def call(loss: Any, changed: Mapping[str, Tensor], beside: Mapping[str, Beside]) -> Any:
            """A call of NeMo-RL's loss that is measured: its policy loss by factors, or the terms beside it."""
            tap = partial(ENGINE.tap, {"loss": self, "data": data, "beside": beside})
            return wrapped(loss, tap)(next_token_logprobs, {**data, **changed}, **counts)

        column, plain = data[_WEIGHTS["pg"]], data["advantages"]
        factors = (column[:, None] if column.dim() == 1 else column).expand_as(plain)
        total, _ = call(self._policy, {"advantages": plain * factors, FACTORS: factors, PLAIN: plain}, {})
        if "kl" in self.modes:
            column, ones = data[_WEIGHTS["kl"]], torch.ones_like(data["sample_mask"])
            weighed = {"sample_mask": column} if column.dim() == 1 else {"token_mask": column, "sample_mask": ones}
            weighed["advantages"] = torch.zeros_like(plain)
            penalty, reported = call(self._loss_fn, weighed, {"kl": self._kl()})
            total, metrics["kl_penalty"] = total + penalty, reported["kl_penalty"]
        return total, metrics | {"loss": total.item()}

    def _kl(self) -> Beside:
        """The KL penalty, whose gradient has that of the policy over which it is an expectation."""
        penalty, is_on_policy = PENALTIES[self.reference_policy_kl_type], self.use_on_policy_kl_approximation

        def expectation(d: Tensor, ratio: Tensor) -> Tensor:
            return penalty(d, ratio) * (d - d.detach()).exp() * (ratio if is_on_policy else 1.0)

        lowest, doubt = (self.kl_input_clamp_value or 1.0, self.kl_output_clamp_value or 1.0), ""
        if lowest[0] < 0.1 or lowest[1] < 0.01:
            doubt = f"NeMo-RL clamps the KL penalty, its input at {lowest[0]:g} and its output at {lowest[1]:g}."
        aggregation = self.modes["kl"].policy
        return Beside(self.reference_policy_kl_penalty, aggregation, estimator=expectation, doubt=doubt)
