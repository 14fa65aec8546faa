"""How a trainer calls its loss function: what it passes in, and what it sums or averages afterwards."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args, get_type_hints

from megatron_rl_loss.errors import check_choice

#: What a loss function may ask for by the name of a parameter, beside its first two. Counts of tokens are sums of
#: masks, 0-dim int64 tensors; a *step* is all micro-batches of all data-parallel ranks.
GIVEN: dict[str, str] = {
    "step_tokens": "mask tokens of the step",
    "rank_tokens": "mask tokens of this data-parallel rank's micro-batches",
    "microbatch_tokens": "mask tokens of this micro-batch, not cut for context parallelism",
    "step_samples": "rows of the step, masked ones too",
    "step_active_samples": "rows of the step with a token whose mask is not 0",
    "rank_samples": "rows of this data-parallel rank's micro-batches",
    "step_rollouts": "rollouts of the step",
    "step_prompts": "prompts of the step",
    "num_microbatches": "micro-batches of a rank",
    "microbatch": "the number of this one, from 0",
    "dp_size": "data-parallel ranks",
    "dp_rank": "the number of this one",
    "cp_size": "context-parallel ranks",
    "cp_rank": "the number of this one",
    "world_size": "data- times context-parallel ranks",
    "sample_tokens": "int64 [num_samples]: mask tokens of each row, not cut for context parallelism",
    "rollout_tokens": "int64 [num_samples]: mask tokens, in the whole step, of the rollout of each row",
    "prompt_tokens": "int64 [num_samples]: mask tokens, in the whole step, of the prompt of each row",
    "rollout_ids": "list [num_samples]: the rollout of each row",
    "prompt_ids": "list [num_samples]: the prompt of each row",
    "cu_seqlens": "int64 [num_samples + 1]: where rows begin in packed losses, not cut for context parallelism",
    "sample_index": "int64, shaped as the losses: the row of each token",
    "old_log_probs": "shaped as the log-probs: equal to them, without gradient",
    "advantages": "shaped as the log-probs: equal within a row, never 0",
    "sample_advantages": "[num_samples]: the same, one a row",
    "loss_masks": "list [num_samples]: the 1-D mask of each row, not padded and not cut for context parallelism",
    "labels": "a dict of lists [num_samples] of what a mode of one's own may look at, random",
    "layout": "the `Layout` of the losses",
    "totals": "the `StepTotals` of the step",
}


@dataclass(frozen=True, kw_only=True)
class LossCall:
    """How a trainer calls its loss function, and divides afterwards. The defaults are plain PyTorch: DDP, without CP.

    >>> LossCall(microbatches="mean", names={"total": "step_tokens"}).describe()
    'padded rows, micro-batches averaged, DP ranks averaged'

    Of ``log_probs`` the function makes losses itself; then a weight is what a policy gradient at ratio 1 puts on a
    token, beside its advantage. `cp_cut` is what a CP rank holds of every row: if ``gathered`` all, and gradients
    of all copies count; ``responses`` is a zigzag over prompt and response, of which the response is kept (packed).
    """

    takes: Literal["losses", "log_probs"] = "losses"  # the first thing the function is given, of tokens
    rows: Literal["padded", "packed", "lists"] = "padded"  # [batch, seq], [num_tokens], or one tensor a row
    names: Mapping[str, str] = field(default_factory=dict)  # parameters that are called otherwise than in `GIVEN`
    microbatches: Literal["sum", "mean"] = "sum"  # "mean": the trainer divides what is returned by their number
    dp: Literal["mean", "sum"] = "mean"  # "mean" as DDP and FSDP do, "sum" where a trainer undoes that
    cp: Literal["mean", "sum"] | None = None  # None: there are no context-parallel ranks
    cp_cut: Literal["zigzag", "contiguous", "gathered", "responses"] = "zigzag"
    even_microbatches: bool = False  # whether all micro-batches have as many rows
    masked_samples: bool = True  # whether fully masked rows occur; without them micro-batches have active tokens
    split_rollouts: bool = False  # whether a rollout may be several rows (turns, branches)

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(LossCall).items():
            value = getattr(self, name)
            if hint is bool and not isinstance(value, bool):
                raise TypeError(f"LossCall.{name} is {value!r}: it must be True or False. Say whether it is so.")
            if get_args(hint) and name not in ("names", "cp"):
                check_choice(f"LossCall.{name}", value, get_args(hint))
        if self.cp is not None:
            check_choice("LossCall.cp", self.cp, ("mean", "sum"))
        elif self.cp_cut != "zigzag":
            raise ValueError(
                f"LossCall.cp_cut is {self.cp_cut!r}, and LossCall.cp None: without context-parallel ranks nothing is "
                'cut. Say what becomes of them: cp="sum" or cp="mean".'
            )
        if self.cp_cut == "responses" and self.rows != "packed":
            raise ValueError(
                f"LossCall.cp_cut is 'responses', and LossCall.rows {self.rows!r}: what is left of rows is packed. "
                'Say rows="packed".'
            )
        if not isinstance(self.names, Mapping):
            raise TypeError(
                f"LossCall.names is a {type(self.names).__name__}: it must map parameters of the loss function to what "
                'they are given. Write names={"num_items_in_batch": "step_tokens"}, say.'
            )
        for parameter, given in self.names.items():
            check_choice(f"number for LossCall.names[{parameter!r}]", given, GIVEN)

    def describe(self) -> str:
        """One line of what was assumed."""
        done = {"sum": "summed", "mean": "averaged"}
        rows = f"{self.rows} rows" if self.rows != "lists" else "a tensor a row"
        parts = ["log-probs"] * (self.takes == "log_probs") + [rows]
        parts += [f"micro-batches {done[self.microbatches]}", f"DP ranks {done[self.dp]}"]
        if self.cp:
            parts.append(f"{self.cp_cut} CP ranks {done[self.cp]}")
        return ", ".join(parts)


#: The calls of trainers by name, from their public sources (TRL 1.10.0.dev0, verl 0.10.0.dev).
CALLS: dict[str, LossCall] = {
    "pytorch": LossCall(),
    # transformers.LossCall with a `compute_loss_func` and `average_tokens_across_devices` multiplies what the function
    # returns by the number of processes, which DDP divides by.
    "transformers": LossCall(names={"num_items_in_batch": "step_tokens"}, dp="sum", even_microbatches=True),
    # trl.GRPOTrainer switches off the division by accumulation steps: its loss function divides by itself. Its
    # `num_items_in_batch` is that of a generation batch, the step's where `steps_per_generation` is the accumulation.
    "trl": LossCall(
        names={
            "num_items_in_batch": "step_tokens",
            "num_processes": "dp_size",
            "gradient_accumulation_steps": "num_microbatches",
            "current_gradient_accumulation_steps": "num_microbatches",
        },
        even_microbatches=True,
    ),
    # verl's `agg_loss` as its engines call it: global counts, times dp_size against averaged gradients.
    "verl": LossCall(names={"batch_num_tokens": "step_tokens", "global_batch_size": "step_samples"}),
    # prime-rl's `compute_loss`: lists of sequences, one global `loss_scale`; FSDP's division is undone.
    "prime_rl": LossCall(rows="lists", names={"loss_scale": "step_tokens"}, dp="sum"),
}
