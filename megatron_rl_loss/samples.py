"""Samples: what the reducers need to know of the samples of one micro-batch, checked once."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl_loss.errors import explain
from megatron_rl_loss.layouts import Layout, check_cp, concatenated_ranges, is_int

Ids = Sequence[int | str] | Tensor

#: Ids travel between ranks as int64 with one bit for their kind and one for the sign.
_ID_LIMIT = 2**61


def as_ids(name: str, ids: Ids, num_samples: int) -> Tensor:
    """One id a sample as int64 [num_samples]; strings by a 61-bit BLAKE2b hash, the same on every rank.

    Raises TypeError for other types, ValueError for a wrong count or an int beyond 61 bits.
    """
    values = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    if len(values) != num_samples:
        raise ValueError(
            explain(
                f"{len(values)} {name} for {num_samples} loss masks", "there must be one a sample", "Pass both in order"
            )
        )
    numbers = []
    for value in values:
        if isinstance(value, str):
            digest = hashlib.blake2b(value.encode(), digest_size=8).digest()
            numbers.append(int.from_bytes(digest, "little") % _ID_LIMIT)
        elif is_int(value):
            numbers.append(int(value))
        else:
            given = f"{name} holds {value!r} ({type(value).__name__})"
            raise TypeError(explain(given, "an id must be an int or a str", "Pass one such id a sample"))
    if any(not -_ID_LIMIT < number < _ID_LIMIT for number in numbers):
        raise ValueError(explain(f"{name} go beyond 61 bits", "such ids cannot be exchanged", "Pass them as strings"))
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


class Samples:
    """The samples of one micro-batch (or of one rank's whole step).

    Args:
        loss_masks: one 1-D tensor a sample: 0/1, bool, or fractional token weights >= 0, over the sample's full length
            (never cut for a CP rank). Any number, none included.
        layout: where the losses of those tokens are; None for plain concatenation, which has no CP cut.
        rollout_ids: one id (int or str) a sample, equal for samples that are parts of one rollout; None if each sample
            is a rollout. Unique within the step, not only within a prompt.
        prompt_ids: one id a sample, equal for the responses to one prompt. Needed by ``prompt_mean``.

    Raises:
        TypeError: masks that are not tensors, are complex, or ids of another type.
        ValueError: masks that are not 1-D, negative, NaN, infinite or too small for float32; numbers or lengths that
            disagree with the layout or the ids.
    """

    def __init__(
        self,
        loss_masks: Sequence[Tensor],
        *,
        layout: Layout | None = None,
        rollout_ids: Ids | None = None,
        prompt_ids: Ids | None = None,
    ) -> None:
        if isinstance(loss_masks, Tensor):
            given = f"loss_masks is one tensor of shape {tuple(loss_masks.shape)}"
            raise TypeError(explain(given, "it must be a list of 1-D tensors, one a sample", "Pass list(loss_masks)"))
        self.loss_masks = list(loss_masks)
        for i, mask in enumerate(self.loss_masks):
            if not isinstance(mask, Tensor):
                given = f"the loss mask of sample {i} is a {type(mask).__name__}"
                raise TypeError(explain(given, "it must be a 1-D tensor", "Wrap it in torch.tensor"))
            if mask.dim() != 1:
                given = f"the loss mask of sample {i} has shape {tuple(mask.shape)}"
                raise ValueError(explain(given, "it must be 1-D, one entry a token", "Pass one tensor a sample"))
        #: Masks end to end, float32 (float64 if given so), [sum of lengths].
        self.flat_mask = _flatten(self.loss_masks)
        self.mask_lengths = torch.tensor([mask.numel() for mask in self.loss_masks], dtype=torch.int64, device="cpu")
        self._check_values()
        self.layout = layout
        n = len(self.loss_masks)
        self.rollout_ids = None if rollout_ids is None else as_ids("rollout_ids", rollout_ids, n)
        self.prompt_ids = None if prompt_ids is None else as_ids("prompt_ids", prompt_ids, n)
        self._local_positions: dict[tuple[int, int], Tensor] = {}
        self._mask_starts = (
            self.mask_lengths.cumsum(0) - self.mask_lengths if layout is None else layout.mask_starts(self.mask_lengths)
        )

    def _check_values(self) -> None:
        # Beyond 1e30 either way the float32 weight of a token could be infinite or vanish.
        sound = (self.flat_mask == 0) | ((self.flat_mask >= 1e-30) & (self.flat_mask <= 1e30))
        if bool(sound.all()):
            return
        position = int((~sound).nonzero()[0])
        i = int(torch.searchsorted(self.mask_lengths.cumsum(0), position, right=True))
        given = f"the loss mask of sample {i} holds {float(self.flat_mask[position])}"
        rule = "token weights must be finite and >= 0 (0, or from 1e-30 to 1e30)"
        raise ValueError(explain(given, rule, "Pass 0 for tokens that do not count"))

    def __len__(self) -> int:
        return len(self.loss_masks)

    def mask_sums(self) -> Tensor:
        """M_i, the sum of each sample's mask, float64 [num_samples], on the masks' device."""
        return self._sum_by_sample(self.flat_mask)

    def active_tokens(self) -> Tensor:
        """Number of tokens of nonzero weight in each sample, float64 [num_samples], on the masks' device."""
        return self._sum_by_sample(self.flat_mask != 0)

    def _sum_by_sample(self, flat: Tensor) -> Tensor:
        sample_of_token = torch.arange(len(self), device="cpu").repeat_interleave(self.mask_lengths).to(flat.device)
        return torch.zeros(len(self), dtype=torch.float64, device=flat.device).index_add_(
            0, sample_of_token, flat.double()
        )

    def spread(self, per_sample: Tensor) -> Tensor:
        """A value a sample, repeated for each of its mask entries, [sum of lengths]."""
        return per_sample.repeat_interleave(self.mask_lengths.to(per_sample.device))

    def local(self, flat: Tensor, cp_rank: int, cp_size: int) -> Tensor:
        """The part of a flat per-token tensor that this CP rank holds, in the order of its losses; 0 in padding."""
        positions = self.local_positions(cp_rank, cp_size)
        if self.layout is None or positions is None:
            return flat
        at = concatenated_ranges(self._mask_starts, self.mask_lengths)
        buffer = torch.zeros(self.layout.total_tokens, dtype=flat.dtype, device=flat.device)
        buffer[at.to(flat.device)] = flat
        return buffer[positions.to(flat.device)]

    def local_positions(self, cp_rank: int, cp_size: int) -> Tensor | None:
        """Positions of the layout's flat buffer that this CP rank holds; None if it holds the masks as they are.

        Raises ValueError where the layout cannot be cut so, or where none says how.
        """
        check_cp(cp_rank, cp_size)
        if self.layout is not None:
            if (cp_rank, cp_size) not in self._local_positions:
                self._local_positions[cp_rank, cp_size] = self.layout.local_indices(cp_rank, cp_size)
            return self._local_positions[cp_rank, cp_size]
        if cp_size > 1:
            given = f"cp_size is {cp_size} and no layout was given"
            rule = "how tokens are cut over CP ranks must be said, never guessed"
            raise ValueError(explain(given, rule, "Pass one of megatron_rl_loss.layouts (Gathered if they are not)"))
        return None

    def loss_shapes(self, num_local_tokens: int, cp_size: int) -> list[tuple[int, ...]]:
        """Shapes this rank's ``per_token_loss`` may have."""
        if self.layout is not None:
            return self.layout.loss_shapes(num_local_tokens, cp_size)
        shapes: list[tuple[int, ...]] = [(num_local_tokens,), (1, num_local_tokens)]
        lengths = set(self.mask_lengths.tolist())
        return shapes + [(len(self), length) for length in lengths if len(lengths) == 1]


def _flatten(loss_masks: list[Tensor]) -> Tensor:
    for i, mask in enumerate(loss_masks):
        if mask.is_complex():
            given = f"the loss mask of sample {i} is {mask.dtype}"
            raise TypeError(explain(given, "token weights must be real numbers", "Pass 0/1, bool or float weights"))
    devices = {mask.device for mask in loss_masks}
    if len(devices) > 1:
        given = f"loss masks on {sorted(map(str, devices))}"
        raise ValueError(explain(given, "they must share one device", "Move them together"))
    if not loss_masks:
        return torch.zeros(0, dtype=torch.float32, device="cpu")
    if len({mask.dtype for mask in loss_masks}) > 1:
        loss_masks = [mask.double() for mask in loss_masks]
    flat = torch.cat(loss_masks).detach()
    return flat if flat.dtype == torch.float64 else flat.float()
