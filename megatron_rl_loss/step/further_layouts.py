"""Layouts that a launch with `ZigzagTHD` does not load; that one is in `step/layouts.py`."""

from itertools import accumulate
from typing import Literal

from megatron_rl_loss.errors import check_choice, check_int, check_one_each
from megatron_rl_loss.step.layouts import SAME_MICROBATCH, IntList, Layout, Pieces, Slots, Zigzag, as_ints, check_cp


class ZigzagBSHD(Zigzag):
    """An unpacked batch ``[batch_size, seq_length]`` cut along the sequence, zigzag, row by row.

    Losses: ``[batch_size, seq_length / cp_size]`` (batch first) or flat. Source: Megatron `core/utils.py`,
    `get_batch_on_this_cp_rank`.
    """

    def __init__(
        self, batch_size: int, seq_length: int, total_lengths: IntList | None = None, filler_slots: int = 0
    ) -> None:
        for name, value in (("batch_size", batch_size), ("seq_length", seq_length)):
            check_int(name, value, 1, "Pass the padded shape")
        super().__init__([row * seq_length for row in range(batch_size + 1)], total_lengths, filler_slots)

    def loss_shapes(self, num_local_tokens: int, cp_size: int) -> list[tuple[int, ...]]:
        return [(num_local_tokens,), self.rows(num_local_tokens)]

    def rows(self, num_tokens: int) -> tuple[int, ...]:
        return len(self.sizes), num_tokens // len(self.sizes)

    def slot_name(self, number: int) -> str:
        return f"row {number}"

    @classmethod
    def drawn(cls, bounds: list[int], lengths: list[int]) -> Layout:
        return cls(len(lengths), bounds[1], total_lengths=lengths)


class Contiguous(Slots):
    """Contiguous pieces, as with all-gather context parallelism: rank r holds piece r of ``cp_size`` equal ones.

    The packed buffer as a whole is cut; with ``per_slot`` every slot is (each row of an unpacked batch, say).
    """

    cut = "contiguous"

    def __init__(
        self,
        cu_seqlens_padded: IntList,
        total_lengths: IntList | None = None,
        filler_slots: int = 0,
        *,
        per_slot: bool = False,
    ) -> None:
        super().__init__(cu_seqlens_padded, total_lengths, filler_slots)
        self.per_slot = per_slot

    def cut_at(self) -> list[int]:
        return self.bounds if self.per_slot else [0, self.total_tokens]

    def slot_name(self, number: int) -> str:
        return super().slot_name(number) if self.per_slot else "the packed buffer"

    @classmethod
    def drawn(cls, bounds: list[int], lengths: list[int]) -> Layout:
        return cls(bounds, total_lengths=lengths, per_slot=True)


class Gathered(Slots):
    """Losses gathered over CP (or never sliced) before the reducer: every CP rank holds every position.

    Each rank is given 1/cp_size of the weights, so that the sum over CP ranks is the step loss. ``backward="sum"``: the
    gather adds the gradients of the CP ranks, as Megatron's `gather_from_sequence_parallel_region` does;
    ``backward="slice"``: each rank gets the gradient of its own loss alone, which is then multiplied by cp_size.
    """

    cut, is_whole = "gathered", True

    def __init__(
        self,
        cu_seqlens_padded: IntList,
        total_lengths: IntList | None = None,
        filler_slots: int = 0,
        *,
        backward: Literal["sum", "slice"] = "sum",
    ) -> None:
        super().__init__(cu_seqlens_padded, total_lengths, filler_slots)
        check_choice("backward of a gather", backward, ("sum", "slice"))
        self.gather_sums_gradients = backward == "sum"


class ZigzagResponse(Layout):
    """Response tokens only, zigzag by sample, as slime and miles keep their log-probs.

    Sample i is cut into 2 * cp_size chunks of ``ceil(total_lengths[i] / (2 * cp_size))`` tokens (with
    ``padded_lengths``, of these). Rank r owns the logits of chunks r and 2 * cp_size - 1 - r, and keeps those that
    predict a response token (logit t predicts token t + 1). Losses: ``[num_local_tokens]``.
    """

    cut = "responses"
    total_lengths: list[int]
    response_lengths: list[int]

    def __init__(
        self, total_lengths: IntList, response_lengths: IntList, padded_lengths: IntList | None = None
    ) -> None:
        totals = as_ints("total_lengths", total_lengths)
        responses = as_ints("response_lengths", response_lengths)
        padded = totals if padded_lengths is None else as_ints("padded_lengths", padded_lengths)
        check_one_each("response_lengths", len(responses), "total_lengths", len(totals), SAME_MICROBATCH)
        check_one_each("padded_lengths", len(padded), "total_lengths", len(totals), SAME_MICROBATCH)
        for i, (response, total, size) in enumerate(zip(responses, totals, padded, strict=True)):
            if not 0 <= response < total <= size:
                raise ValueError(
                    f"sample {i} has response_length {response}, total_length {total}, padded length {size}: "
                    "lengths must be 0 <= response < total <= padded, and leave a prompt token, whose logit predicts "
                    "the first response token. Count the prompt in total_lengths."
                )
        self.total_lengths, self.response_lengths, self.padded_lengths = totals, responses, padded
        self.bounds = [0, *accumulate(responses)]

    @property
    def total_tokens(self) -> int:
        return self.bounds[-1]

    def mask_starts(self, mask_lengths: list[int]) -> list[int]:
        check_one_each("loss masks", len(mask_lengths), "response_lengths", len(self.response_lengths))
        for i, (length, response) in enumerate(zip(mask_lengths, self.response_lengths, strict=True)):
            if length != response:
                raise ValueError(
                    f"the loss mask of sample {i} has {length} entries: it must have one per response token, "
                    f"{response}. Cut a mask of the whole sample to the response, or use ZigzagTHD."
                )
        return self.bounds[:-1]

    def pieces(self, cp_rank: int, cp_size: int) -> Pieces:
        check_cp(cp_rank, cp_size)
        if cp_size == 1:
            return [(0, self.total_tokens)]
        pieces = Pieces()
        lengths = zip(self.total_lengths, self.response_lengths, self.padded_lengths, self.bounds, strict=False)
        for total, response, padded, start in lengths:
            size, first_logit = -(-padded // (2 * cp_size)), total - response - 1  # the one that predicts a response
            for chunk in (cp_rank, 2 * cp_size - 1 - cp_rank):
                begin = chunk * size - first_logit
                end = begin + size
                # min and max would take as long as all the rest
                begin = 0 if begin < 0 else response if begin > response else begin
                end = 0 if end < 0 else response if end > response else end
                pieces.append((start + begin, start + end))
        return pieces

    @classmethod
    def drawn(cls, bounds: list[int], lengths: list[int]) -> Layout:
        """Responses of these lengths behind prompts of three tokens, for `check_loss`; they have no other slots."""
        return cls([length + 3 for length in lengths], lengths)
