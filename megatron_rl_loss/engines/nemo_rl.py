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
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_rl_loss.core.columns import weights_column
from megatron_rl_loss.core.ids import as_ids
from megatron_rl_loss.core.layouts import Gathered
from megatron_rl_loss.core.modes import Mode
from megatron_rl_loss.core.samples import Samples
from megatron_rl_loss.engines.columns import check_even, prompts_of
from megatron_rl_loss.engines.loss_trials import PENALTIES, Beside, LossPaths, WeighedMicrobatch
from megatron_rl_loss.engines.places import wrapped
from megatron_rl_loss.engines.policy_tap import tap_policy
from megatron_rl_loss.engines.prompt_tokens import is_by_prompt, misplaced_ids
from megatron_rl_loss.engines.proving import prove
from megatron_rl_loss.engines.replacing import Function, Replaced, announce, once
from megatron_rl_loss.extend import Aggregation, LossModes, ModeFunction, Promises, resolve

__all__ = ["AggregatedPGLossFn", "aggregate"]
_ROWS, _PROMPTS = "loss_row_numbers", "loss_prompt_ids"  # columns


#: A distance to the reference of at most 3/32, below most clamps.
_LOSS = LossPaths(
    "next_token_logprobs", "data.advantages",
    {
        "data.prev_logprobs": lambda trial: pad(trial.old, (1, 0)),
        "data.generation_logprobs": lambda trial: pad(trial.old, (1, 0)),
        "data.reference_policy_logprobs?": lambda trial: pad(trial.reference, (1, 0)),
        "data.curr_logprobs_unfiltered?": lambda trial: trial.log_probs,
    },
    distance=2.0**-3,
)  # fmt: skip


def aggregate(
    policy: Any,
    loss_fn: Any,
    mode: str | Mode | ModeFunction,
    *,
    kl: str | None = None,
    group_size: int | None = None,
    **settings: Any,
) -> "AggregatedPGLossFn":
    """The loss in that mode; ``policy.train`` of this driver then adds columns of weights to every batch.

    Args:
        policy, loss_fn: what `grpo_train` is called with, a `ClippedPGLossFn`.
        mode: of the policy loss, and of the KL penalty unless `kl` names another.
        group_size: ``num_generations_per_prompt``, which the proof compares.
        settings: `divisor` and `units` of the policy loss, as in `weights_column`.

    Raises ValueError and TypeError for unusable settings, ``positive_example_nll_weight``, and a driver that has an
    aggregation; in training, as `weights_column`.
    """
    from nemo_rl.algorithms import advantage_estimator

    modes = {"policy": resolve(mode, **settings)}
    of_kl = modes["policy"] if kl is None else resolve(kl)
    if loss_fn.positive_example_nll_weight > 0:
        raise ValueError(
            f"positive_example_nll_weight={loss_fn.positive_example_nll_weight}: grpo_train passes no rewards, which "
            "that term needs, and the term is averaged per micro-batch. Set positive_example_nll_weight=0."
        )
    if loss_fn.reference_policy_kl_penalty != 0:
        modes["kl"] = of_kl
    loss, prompts = AggregatedPGLossFn(loss_fn, modes, Promises.checked_size(group_size)), list[str]()
    has_prompts = is_by_prompt(LossModes.resolve(mode, **settings)) or (
        kl is not None and is_by_prompt(LossModes.resolve(kl))
    )

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
            known = prompts if len(prompts) == len(data["sample_mask"]) else None
            if known is not None and has_prompts:
                loss.doubt(known, data)
            data.update(loss.columns(data, arguments.get("gbs") or policy.cfg["train_global_batch_size"], known))
        return stock()

    estimators = [
        estimator
        for estimator in vars(advantage_estimator).values()
        if "compute_advantage" in getattr(estimator, "__dict__", {})
    ]
    functions = [Function(estimator, "compute_advantage", ["prompt_ids"], keep_prompts) for estimator in estimators]
    Replaced("NeMo-RL", "7ea279ab", [Function(policy, "train", ["data", "loss_fn", "gbs"], with_columns), *functions])
    return loss


class AggregatedPGLossFn:
    """A `ClippedPGLossFn` whose terms are weighted by columns of the batch; other attributes are that loss's."""

    def __init__(self, loss_fn: Any, modes: dict[str, Aggregation], group_size: int | None = None) -> None:
        self._loss_fn, self._modes, self._group_size = loss_fn, modes, group_size
        self._policy, self._number, self._doubt = copy.copy(loss_fn), uuid4().hex, ""
        self._policy.reference_policy_kl_penalty = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickle in a worker, whose first step is then proved."""
        self.__dict__.update(state)
        proof = once(self._number, self._prove)  # a loss is unpickled for each step
        if proof is not None:
            proof.doubt = self._doubt  # not said here: ranks unpickle when they like

    def doubt(self, prompts: list[str], data: Any) -> None:
        """Send workers the reason why prompts may stand at other rows, by the tokens before the first trained one."""
        tokens = prompts_of(data["input_ids"], data["token_mask"].cumsum(-1) == 0)
        self._doubt = misplaced_ids(prompts, tokens, None, self._group_size)

    def _prove(self) -> Any:
        terms = ", ".join(f"{term} by {aggregation.mode.name}" for term, aggregation in self._modes.items())
        announce(f"NeMo-RL: {terms}, with the weights that the driver adds to each batch")
        beside = "NeMo-RL aggregates MoE, MTP and draft losses"
        never = "NeMo-RL did not call aggregate(...)'s loss. Pass that loss to grpo_train of NeMo-RL 7ea279ab."
        proof = prove("NeMo-RL", self._modes["policy"], beside=beside, never=never)
        if proof is not None:
            proof.terms, proof.promises = ["pg", "kl"][: len(self._modes)], Promises(self._group_size)
        return proof

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pickle looks these up before there is a loss
            raise AttributeError(name)
        return getattr(self._loss_fn, name)

    def columns(self, data: Any, batch_size: int, prompts: list[str] | None) -> dict[str, Tensor]:
        """A column per term, [rows, tokens], or [rows] for losses of samples; `batch_size` rows are a step."""
        columns: dict[str, list[Tensor]] = {_column(name): [] for name in self._modes}
        columns[_ROWS] = [torch.arange(len(data["sample_mask"]))]
        if prompts is not None:
            columns[_PROMPTS] = [torch.from_numpy(as_ids("prompt_ids", prompts, len(prompts)))]
        for start in range(0, len(data["sample_mask"]), batch_size):
            rows = slice(start, start + batch_size)
            masks = (data["token_mask"][rows, 1:].float() * data["sample_mask"][rows, None]).cpu()
            ids = None if prompts is None else prompts[rows]
            for name, aggregation in self._modes.items():
                settings: Any = {"divisor": aggregation.divisor, "units": aggregation.units, "dp_group": None}
                of_rows = weights_column(aggregation.mode, Samples(list(masks), prompt_ids=ids), **settings)
                weights = torch.stack(of_rows)
                if self.loss_type.value == "token_level":
                    column = pad(weights * masks.sum(), (1, 0))
                else:
                    check_even(of_rows, list(masks), "Set token_level_loss=true")
                    column = weights.sum(-1) * data["sample_mask"][rows].sum()
                columns[_column(name)].append(column)
        return {name: torch.cat(parts) for name, parts in columns.items()}

    def __call__(
        self, next_token_logprobs: Tensor, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """The rank's share of the step loss, and NeMo-RL's metrics; each term, and the metrics, call its loss once."""
        if _column("policy") not in data:
            raise ValueError(
                "a NeMo-RL batch without our weights: policy.train of the driver adds them, and was not called. Train "
                "by grpo_train with data_plane.enabled=false."
            )
        counts = {"global_valid_seqs": global_valid_seqs, "global_valid_toks": global_valid_toks}
        with torch.no_grad():
            _, metrics = self._loss_fn(next_token_logprobs.detach(), data, **counts)
        column = data[_column("policy")]
        plain_advantages = data["advantages"]
        factors = (column[:, None] if column.dim() == 1 else column).expand_as(plain_advantages)
        of_policy = {**data, "advantages": plain_advantages * factors}
        masks = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).float()
        prompts = data.get(_PROMPTS)
        layout = Gathered(range(0, masks.numel() + 1, masks.shape[1]))
        is_unknown = getattr(self, "use_fused_linear_logprobs", False)  # the gradients by logits
        is_unknown |= "curr_logprobs_unfiltered" in data and "kl" in self._modes

        def call(loss: Any, data: Any, factors: Tensor | None, beside: dict[str, Beside]) -> Any:
            """A call of NeMo-RL's loss that is measured: its policy loss by factors, or the terms beside it."""
            samples = Samples(list(masks), layout=layout, prompt_ids=prompts, labels={"row": data[_ROWS]})
            plain = None if factors is None else plain_advantages
            temperature = None if is_unknown else 1.0
            microbatch = WeighedMicrobatch(samples, factors, plain, temperature=temperature, beside=beside)
            tapped = wrapped(loss, lambda stock, arguments: tap_policy(_LOSS, stock, arguments, lambda: microbatch))
            return tapped(next_token_logprobs, data, **counts)

        total, _ = call(self._policy, of_policy, factors, {})
        if "kl" in self._modes:
            column = data[_column("kl")]
            ones = torch.ones_like(data["sample_mask"])
            weighed = {"sample_mask": column} if column.dim() == 1 else {"token_mask": column, "sample_mask": ones}
            of_kl = {**data, **weighed, "advantages": torch.zeros_like(plain_advantages)}
            share, of_part = call(self._loss_fn, of_kl, None, {"kl": self._kl()})
            total, metrics["kl_penalty"] = total + share, of_part["kl_penalty"]
        return total, metrics | {"loss": total.item()}

    def _kl(self) -> Beside:
        """The KL penalty, whose gradient has that of the policy over which it is an expectation."""
        penalty, is_on_policy = PENALTIES[self.reference_policy_kl_type], self.use_on_policy_kl_approximation

        def of_nemo_rl(d: Tensor, ratio: Tensor) -> Tensor:
            return penalty(d, ratio) * (d - d.detach()).exp() * (ratio if is_on_policy else 1.0)

        lowest, doubt = (self.kl_input_clamp_value or 1.0, self.kl_output_clamp_value or 1.0), ""
        if lowest[0] < 0.1 or lowest[1] < 0.01:
            doubt = f"NeMo-RL clamps the KL penalty, its input at {lowest[0]:g} and its output at {lowest[1]:g}."
        return Beside(self.reference_policy_kl_penalty, self._modes["kl"], estimator=of_nemo_rl, doubt=doubt)


def _column(term: str) -> str:
    return f"loss_weights_of_{term}"
