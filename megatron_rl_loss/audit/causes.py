"""What is likely to have gone wrong, as data: a row a cause, with the public bugs that had it (``rows`` of `MUSEUM`).

Many projects had one bug: the weights of tokens cannot tell whose it was. `tests/museum` plants them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """A cause in words, and the rows of `MUSEUM` that had it."""

    text: str
    rows: tuple[int, ...] = ()


#: One factor for all tokens. Products of sizes that are not listed here are named by their formula alone.
FACTORS = {
    "times_cp": Cause(
        "multiplied by the context-parallel size once too often: a 2-tuple is multiplied by CP already, and a summed"
        " (per-token) gradient needs none",
        (1, 2, 25, 41, 57),
    ),
    "over_cp": Cause(
        "divided by the context-parallel size once more: gradients of CP ranks are summed and then averaged, or a token"
        " count was summed over CP ranks that hold the full masks",
        (0, 3, 7, 16, 41),
    ),
    "times_dp": Cause("the mean over data-parallel ranks was undone where nothing took it"),
    "over_dp": Cause("DDP's mean over data-parallel ranks was not undone: a sum was meant", (18,)),
    "over_dp_squared": Cause("divided by DP twice: the denominator has x DP where / DP was meant", (17,)),
    "times_microbatches": Cause(
        "summed over micro-batches where their mean was meant, or the division by their number came after the backward",
        (15, 20, 21, 27, 33, 53),
    ),
    "over_microbatches": Cause(
        "divided by the number of micro-batches once more: the schedule divides by it and nothing undoes it",
        (36, 52, 57),
    ),
    "times_pp": Cause("multiplied by the number of pipeline stages: they share the step's tokens, each has all"),
    "over_pp": Cause(
        "divided by the number of pipeline stages: they were counted as ranks that have other tokens (the world size"
        " over TP, say)"
    ),
    "over_tp_cp": Cause("a sum over TP (sequence-parallel) and CP ranks was left out", (6,)),
    "times_dp_cp": Cause("the mean over all data- and context-parallel ranks was undone twice"),
    "over_dp_cp": Cause("the mean over all data- and context-parallel ranks was not undone: a sum was meant"),
    "times_tokens": Cause(
        "never divided by the number of tokens: the count was dropped from the tuple, or its division is a no-op",
        (19, 39, 49, 57),
    ),
    "times_tokens_over_dp": Cause("never divided by the tokens, while DDP took the mean over its ranks", (50,)),
    "times_cp_tokens_over_microbatches": Cause(
        "a 2-tuple under per-token loss: no token is counted, and the schedule multiplies by CP and divides by the"
        " number of micro-batches instead",
        (19, 57),
    ),
    "over_tokens": Cause("divided by the number of tokens twice", (5, 24)),
    "times_units": Cause("never divided by the number of units", (18,)),
    "over_units": Cause("divided by the number of units once more"),
    "clamped": Cause("at least one token was counted for every sample: phantom tokens of fully masked ones", (42,)),
    "clamped_pieces": Cause("at least one token was counted for every CP rank's piece: phantom tokens", (10,)),
    "clamped_microbatches": Cause("at least one token was counted for every micro-batch: phantom tokens", (10,)),
    "length": Cause("tokens were counted by length, ignoring the mask", (40,)),
    "response": Cause("tokens were counted by response length, ignoring the mask", (40,)),
    "total": Cause("tokens were counted by total length, prompts too", (40,)),
    "rectangle": Cause("padding was counted: rows times the longest row", (40,)),
    "masked_length": Cause("tokens of fully masked samples (truncated ones, say) were counted", (30,)),
    "shifted": Cause(
        "one token more was counted for each sample than is trained: the term's mask is a token shorter, the count is"
        " the main loss's",
        (8,),
    ),
    "active": Cause("tokens were counted where their (fractional) masks were to be added up"),
    "rows_for_rollouts": Cause("rows were counted, not rollouts", (45,)),
    "unit_counting": Cause("fully masked units were counted, or left out, other than asked"),
    "divisor": Cause("another divisor than asked", (43,)),
    "other_count": Cause(
        "divided by a whole number that is no count of this step: totals of another step or of a generation batch, or"
        " counted before the mask was cut",
        (29, 56, 58),
    ),
    "parts_summed": Cause(
        "the parts' means are added up, not averaged: parts of the step are treated as if each were the step",
        (20, 21, 33, 53, 58),
    ),
    "empty_parts": Cause("only parts that have an active token are averaged over", (34, 54)),
    "generation": Cause("the denominator is the generation batch's, not the optimizer step's", (29,)),
    "factor": Cause("a factor that no size or count of the step explains"),
    "sign": Cause("the sign is turned: what was to be minimised is maximised"),
}

#: Denominators of a part of the step, by what was counted and where.
PARTS = {
    ("tokens", "microbatch"): Cause(
        "each micro-batch is divided by its own tokens (a mean of means), not by the step's",
        (9, 10, 20, 23, 26, 28, 31, 33, 34, 35, 46, 47, 53, 54, 58),
    ),
    ("tokens", "microbatch_over_dp"): Cause(
        "each micro-batch is divided by its own tokens over all data-parallel ranks, not by the step's", (9, 23, 31, 58)
    ),
    ("tokens", "dp_rank"): Cause(
        "each data-parallel rank is divided by its own tokens, not by the step's", (26, 28, 32, 38, 58)
    ),
    ("tokens", "rank"): Cause("each rank is divided by the tokens it holds itself, its CP part alone", (3, 32, 38)),
    ("tokens", "cp_place"): Cause(
        "each CP rank is divided by the tokens it holds itself of the micro-batch (stock Megatron's 3-tuple does so"
        " without --calculate-per-token-loss)",
        (3, 9),
    ),
    ("units", "microbatch"): Cause("each micro-batch is divided by its own number of {unit}s", (11, 21, 47, 58)),
    ("units", "microbatch_over_dp"): Cause(
        "each micro-batch is divided by its own number of {unit}s over DP", (11, 58)
    ),
    ("units", "dp_rank"): Cause("each data-parallel rank is divided by its own number of {unit}s", (32, 58)),
    ("units", "rank"): Cause("each rank is divided by its own number of {unit}s", (58,)),
    ("units", "cp_place"): Cause("each CP rank is divided by the number of {unit}s it holds something of", (58,)),
    ("by_rows", "microbatch"): Cause(
        "micro-batches' own token means are averaged by their number of rows, which is no token mean", (14,)
    ),
    ("by_rows", "dp_rank"): Cause(
        "ranks' own token means are averaged by their number of rows, which is no token mean", (14,)
    ),
    ("real", "microbatch"): Cause(
        "each micro-batch is divided by its own tokens, and a rank averages over those of its micro-batches that are"
        " not empty",
        (34, 54),
    ),
    ("divided_again", "microbatch"): Cause("divided once more by the micro-batch's own tokens", (5,)),
}

#: What does not fit into either.
OTHERS = {
    "other_mode": Cause("another mode than asked", (12,)),
    "rows_as_rollouts": Cause("each row is taken for a rollout of its own", (45,)),
    "own_tokens_of_part": Cause("a {unit}'s tokens are counted in each part of it alone, not in the step", (45, 58)),
    "own_width": Cause(
        "each micro-batch is divided by the length that its rows are padded to, not by one divisor (verl's"
        " seq-mean-token-sum-norm does so without loss_scale_factor)"
    ),
    "samples_of_prompt": Cause("the mean over prompts of the mean over their samples"),
    "counted_otherwise": Cause("a {unit}'s tokens are counted otherwise: {counting}", (40, 42)),
    "power_of_length": Cause("weighted by a power of its length"),
    "law": Cause("a factor that follows a count"),
    "no_law": Cause("a factor that follows no count of the step"),
    "mask_ignored": Cause("the mask is not applied to the losses", (37,)),
    "masked_samples_trained": Cause(
        "fully masked samples are trained: rows of padding that keep their advantages, or truncated ones", (48,)
    ),
    "prompt_trained": Cause("tokens before the response are trained", (37,)),
    "masked_trained": Cause("some masked tokens are trained"),
    "misaligned": Cause(
        "masks and losses are cut or laid out differently (rows cut as packed data, chunks of another length): weights"
        " lie on other tokens",
        (44,),
    ),
    "shift": Cause("masks and losses are off by one"),
    "missing": Cause("active tokens have no weight"),
    "stray": Cause("weight lies on padding, or on other samples' slots", (44, 48)),
    "twice": Cause("tokens are counted several times: duplicated rows, or pieces that overlap", (48,)),
    "fraction_ignored": Cause("fractional masks act as if they were 1: weights normalised to nothing", (55,)),
    "mask_squared": Cause("the mask is multiplied twice"),
    "odd_tokens": Cause("a few tokens weigh unlike all others"),
    "within": Cause("weights differ between tokens that the asked mode weighs alike"),
    "nan_empty": Cause("0/0: a part of the step without one active token is divided by its own count", (4, 13)),
    "nan_masked": Cause(
        "NaN at a masked token, multiplied by its mask: use where(mask, loss, 0), since 0 x NaN is NaN", (22,)
    ),
    "nan": Cause("weights are NaN or infinite"),
}

#: The published bugs by their number in the museum, and where they were.
MUSEUM = {
    0: "verl #5983, #5993 (a fix that was proposed)",
    1: "Megatron-LM #673, #906, #1124",
    2: "Megatron-LM !2756",
    3: "Megatron-LM !3139, #7452, #7513",
    4: "Megatron-LM #1764",
    5: "Megatron-LM !2851",
    6: "Megatron-LM #5047",
    7: "Megatron-LM #2237",
    8: "Megatron-LM #2417",
    9: "Megatron-LM adfa873",
    10: "Megatron-LM train_rl",
    11: "verl #141",
    12: "verl #931",
    13: "verl #782",
    14: "verl #906, #5625, #5877, #3294",
    15: "verl #436, #3332",
    16: "verl #4250",
    17: "verl #4510",
    18: "verl #3741, #5417",
    19: "verl #6609, #6836",
    20: "verl #6957",
    21: "verl geo_mean",
    22: "verl seq-* modes",
    23: "SkyRL #925 → #1296",
    24: "SkyRL #925 review",
    25: "SkyRL #1420 → #1751",
    26: "open-instruct #1137, #1161",
    27: "TRL #2647",
    28: "TRL #3231, #3938",
    29: "TRL #5619 → #6024",
    30: "TRL #6439",
    31: "transformers #34191",
    32: "transformers #34242 → #39395",
    33: "NeMo-RL #86",
    34: "NeMo-RL #212 → #266",
    35: "OpenRLHF #1249",
    36: "AReaL #1273",
    37: "ROLL #444",
    38: "prime-rl #2358 → #2562",
    39: "prime-rl #816",
    40: "slime #364",
    41: "slime #987, #990",
    42: "miles #2796",
    43: "miles DrGRPO example",
    44: "miles #1328 review",
    45: "agent-lightning #593",
    46: "tunix #1662",
    47: "twinkle #292",
    48: "verl-omni #602",
    49: "Megatron torch-FSDP2",
    50: "miles #3231",
    51: "Relax #290, Megatron-LM #5376",
    52: "ms-swift dapo, cispo, fipo",
    53: "NeMo-RL VAPO NLL, PR #3791",
    54: "SkyRL Megatron KL, entropy",
    55: "ROLL sample weights",
    56: "verl bypass mode, #4852",
    57: "habit",
    58: "habit",
}
