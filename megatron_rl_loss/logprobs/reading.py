"""Arithmetic of log-probs: a chunk's statistics, their sums over the ranks of a vocabulary, and the chunk's gradient.

With z = logits / temperature and q = softmax(z) over the vocabulary of all tensor-parallel (TP) ranks,

    log_prob = z[label] - logsumexp(z)        d log_prob / d z[j] = [j = label] - q[j]      for each label of a token
    entropy  = - sum_j q[j] log q[j]          d entropy / d z[j]  = - q[j] (log q[j] + entropy)
    log_rest = log sum_{j in rest} q[j]       d log_rest / d z[j] = [j in rest] q[j] / rest - q[j]

No [tokens, vocabulary] tensor is made or kept beside the logits and their gradient. Forward reads the logits once, each
rank against its own maximum; the ranks then gather a few numbers per token. Backward makes the softmax again from the
logits, and takes no collective. Nothing is read back from a device.

Each of the three steps (`statistics`, `combine`, `differentiate`) is done by a Triton kernel or by plain torch, as
`choice` says. Both exchange the same tables, so that a rank whose Triton fails can go on in plain torch beside others.

Plain torch has its gradients written by hand, too. Reading each block twice, and leaving gradients to autograd, takes
1.35 times as long with entropy and as long without, for a vocabulary on one rank (`tools/bench/logprobs.py --tables
logits --sizes 64x32768`, *read twice*; CPU time on a busy Intel host). It is fast by torch's fused `log_softmax`, which
cannot serve where ranks must add up sums before the logarithm.
"""

import copy
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_rl_loss.core.collectives import Group, all_gather_single, rank_in, size_of
from megatron_rl_loss.core.errors import check_within, is_int, require
from megatron_rl_loss.core.masks import Array, to_array
from megatron_rl_loss.core.transfers import on_device, to_device
from megatron_rl_loss.logprobs import first_launch, flags
from megatron_rl_loss.logprobs.choice import Choice, fall_back, give_up
from megatron_rl_loss.logprobs.kept_ids import Keep, Kept, KeptIds, check_keep, kept_mask

#: Bool or numbers, one per token. On the host best: plain torch and the output layer wait for one on a device.
TokenMask = Tensor | Array | Sequence[Any]

#: Some tokens of the batch.
Places = Tensor | slice

#: Exponentials are taken to base 2. Whether `torch.exp2` or `torch.exp` takes less time depends on torch's vector code
#: for the host; neither does on all.
LN_2 = math.log(2)

#: Below it exp and exp2 are 0 in float32 and float64 alike, and products with it are finite: a stand-in for -inf.
_NEVER = -1e4

#: Entries of scratch: on the host as many as caches hold for a thread, on a device enough to fill it.
_HOST_BLOCK, _HOST_MOST, _DEVICE_BLOCK = 2**19, 2**23, 2**25


def check_rows(what: str, rows: Tensor) -> None:
    """Raise ValueError for one row without a dimension of tokens: labels [K] could be those of K tokens."""
    if rows.dim() < 2:
        raise ValueError(
            f"{what} of shape {tuple(rows.shape)}: there must be a dimension of tokens before the last. Pass row[None] "
            "for a single token, with labels [1] or [1, K]."
        )


class LogProbs(NamedTuple):
    """Log-probs in the shape of the labels, entropy one per token, float32 (float64 of float64 logits).

    Both are 0 where the token mask is 0.
    """

    log_probs: Tensor
    entropy: Tensor | None


class Reading:
    """The tokens of a batch that are read, and the arithmetic on a chunk of their logits.

    `statistics` reduces a chunk's logits, `combine` adds up statistics over ranks, `differentiate` makes the gradient.

    `choice` is that of `choice.choose`, and the last arguments are those of `log_probs_from_logits`. `from_logits`:
    logits of all tokens are there, so that kernels can pass over those that the mask leaves out.

    Attributes:
        labels: [n] or [n, K], of the tokens that are read; without labels [n, 0].
        rows: their places in the batch, on the labels' device; None for all.
        shape: of one value per token of the batch.
        scale: 1 / temperature.
        entropy: whether it is asked for.
        keep: the ids that count, bool [tokens, columns] or [1, columns], or `KeptIds`; None for all.
    """

    def __init__(
        self,
        labels: Tensor | None,
        shape: tuple[int, ...],
        columns: int,
        tp_group: Group | None,
        device: torch.device,
        choice: Choice,
        *,
        from_logits: bool,
        temperature: float,
        keep: Keep | None,
        vocab_size: int | None,
        entropy: bool,
        token_mask: TokenMask | None,
        chunk_tokens: int | None,
        rest_without: Tensor | None,
    ) -> None:
        check_within("temperature", temperature, "(0, inf)", "Greedy sampling has no ratio of policies")
        self.shape, self.entropy = torch.Size(shape), entropy
        if labels is None:
            labels = torch.zeros(*shape, 0, dtype=torch.int64, device=device)
        else:
            _check_labels(labels, self.shape)
        size = columns * size_of(tp_group)  # Megatron's shards are equal: it pads the vocabulary
        if vocab_size is not None:
            if not is_int(vocab_size) or not 1 <= vocab_size <= size:
                raise ValueError(
                    f"vocab_size {vocab_size!r} for logits of {size} columns on all TP ranks: it must be an int from 1 "
                    "to that, the size without padding. Leave it out if all columns count, and pass the tp_group if "
                    "the vocabulary is cut."
                )
            size = vocab_size
        self.tp_group = tp_group if size_of(tp_group) > 1 else None
        self.labels, self.rows = labels.reshape(self.shape.numel(), *labels.shape[len(shape) :]), None
        self._kernels, self._compares, self._mask, self._host_rows = choice.kernels, choice.compares, None, None
        self.begin_pass()
        if self._kernels is not None and from_logits:
            self._mask = _mask_on(token_mask, self.shape, device)
        else:
            self._host_rows = _rows_of(token_mask, self.shape)
        if self._host_rows is not None:
            self.rows = on_device(self._host_rows, labels.device)
            self.labels = self.labels[self.rows]
        # Ranks of a vocabulary exchange tables of all tokens: another rank's kernels may pass over some by a mask.
        self._spreads = from_logits and self.rows is not None
        self._without = None
        if rest_without is not None:
            _check_rest(rest_without, labels, self.shape)
            self._without = self.select(to_device(rest_without, labels.device, torch.bool))
        self._size = size
        if self._kernels is None:
            # After the mask: labels of tokens that are passed over may be anything, such as -100.
            self.labels = self.labels.long()
            self._check_labels_in_range()
        else:
            self.labels = self.labels.contiguous()
        self.keep = check_keep(keep, self.shape, columns, size, by_kernels=self._kernels is not None)
        if self._kernels is not None and isinstance(self.keep, Tensor) and self.keep.stride(1) != 1:
            self.keep = self.keep.contiguous()
        if self._kernels is not None and isinstance(self.keep, KeptIds):
            tokens = slice(None) if self._host_rows is None else self._host_rows
            self._kept_ids = self.keep.for_kernels(tokens, size, device)
        self.scale = 1 / temperature
        self._is_first_row_checked = from_logits and self.tp_group is None and columns > 1
        self._width = columns
        self._first = columns * rank_in(tp_group)  # the id of this rank's first column
        self._held = min(max(size - self._first, 0), columns)  # this rank's columns without padding
        # Kernels need no scratch: logits that are there already are one chunk.
        self._chunk_tokens = chunk_tokens or (self._block_tokens(device) if self._kernels is None else sys.maxsize)

    def at(self, temperature: float | None) -> "Reading":
        """The same tokens without entropy, at another temperature if one is given."""
        other = copy.copy(self)  # shares labels and rows; the checks have been made
        other._without = None
        other.scale, other.entropy = self.scale if temperature is None else 1 / temperature, False
        return other

    def begin_pass(self) -> None:
        """Raise ValueError for what kernels found wrong before, as far as the host knows by now."""
        if self._kernels is not None:
            flags.raise_flagged()

    @property
    def read_in_backward(self) -> list[Tensor]:
        """Tensors that backward reads again: the caller's own, or copies of them."""
        kept = [self.keep]
        if isinstance(self.keep, KeptIds):
            kept = [self.keep.ids] if self._kernels is None else [*self._kept_ids]
        return [value for value in (self.labels, self._mask, self._without, *kept) if isinstance(value, Tensor)]

    # --- tokens

    def chunks(self) -> Iterator[tuple[slice, Places]]:
        """Places among the tokens that are read, and the same tokens' places in the batch; at least one chunk."""
        for begin in range(0, max(len(self.labels), 1), self._chunk_tokens):
            part = slice(begin, min(begin + self._chunk_tokens, len(self.labels)))
            yield part, part if self.rows is None else self.rows[part]

    @property
    def is_one_chunk(self) -> bool:
        return len(self.labels) <= self._chunk_tokens

    def spread(self, values: Tensor) -> Tensor:
        """Values of the tokens that are read, [n] or [n, K], among all tokens of the batch, with 0 at the others."""
        if self.rows is not None:
            values = values.new_zeros(self.shape.numel(), *values.shape[1:]).index_copy_(0, self.rows, values)
        return values.view(*self.shape, *values.shape[1:])

    def select(self, values: Tensor | None) -> Tensor | None:
        """The inverse of `spread`."""
        if values is None:
            return None
        values = values.reshape(self.shape.numel(), *values.shape[len(self.shape) :])
        return values if self.rows is None else values[self.rows]

    # --- arithmetic

    def statistics(self, logits: Tensor, part: slice) -> Tensor:
        """The table [chunk, 3 + K] of this rank's columns: top, the largest logit; sum z exp z; sum exp z; labels' z.

        z = scale * (logits - top). The second is 0 unless entropy is asked for, the labels' are -inf where another
        rank has the label. Where no id counts here, top is -inf and the sums 0. With a rest two more columns have its
        largest logit, -inf where none of it is here, and the log of the sum of exp z over it, z from that logit on.
        """
        table = self._launch(
            "statistics",
            logits=logits,
            **self._kernel_arguments(part),
            size=self._size,
            entropy=self.entropy,
            check_first_row=self._is_first_row_checked and part.start == 0,
            flags=flags.tensor(),
        )
        if table is not None:
            return table
        (column, here), in_rest = self._columns(part), self._in_rest(part)
        exact = torch.promote_types(logits.dtype, torch.float32)
        columns = 3 + column.shape[1] + 2 * (in_rest is not None)
        statistics = logits.new_zeros(len(column), columns, dtype=exact)
        (top, weighted, total), label = statistics[:, :3].unbind(1), statistics[:, 3 : 3 + column.shape[1]]
        top.fill_(-math.inf)
        label.fill_(-math.inf)  # a rank of padding alone has no block
        if in_rest is not None:
            statistics[:, -2:] = -math.inf
        for rows, x, z, q in self._blocks(logits, part, top.dtype):
            top[rows] = x.amax(-1)
            # Where no id counts here, -inf - -inf would be NaN; another rank has ids that count.
            finite = top[rows].masked_fill(top[rows] == -math.inf, 0)
            label_logits = (x.gather(1, column[rows]) - finite[:, None]) * self.scale
            label[rows] = label_logits.masked_fill(~here[rows], -math.inf)
            if in_rest is not None:
                top_of_rest = self._rest(x, column[rows], in_rest[rows], q).amax(-1)
                sums = self._relative_to(top_of_rest, q).exp2_().sum(-1)
                statistics[rows, -2:] = torch.stack([top_of_rest, sums.log()], -1)
            self._centre(x, finite, z)
            total[rows] = torch.exp2(z, out=q).sum(-1)
            if self.entropy:
                weighted[rows] = z.mul_(q).sum(-1) * LN_2
        if self._mask is not None:
            statistics = statistics.where(self._counts(part)[:, None], self._row_without_token(statistics))
        return statistics

    def combine(self, statistics: Tensor, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Log-probs like the labels, with a rest another column; and the norm [3, tokens] or more.

        The norm: top, sum exp z of the whole vocabulary, entropy; then of a rest its largest logit and the log of its
        sum from there on, or a kernel's labels' z.
        """
        tables, shape = self._tables_of_ranks(statistics), self.labels[part].shape
        combined = self._launch("combine", tables=tables, scale=self.scale)
        log_probs, norm = self._combined(tables) if combined is None else combined
        return (log_probs.view(shape) if self._without is None else log_probs), norm

    def _combined(self, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs [chunk, K] of the tables of ranks, and the norm."""
        label, rest = tables[..., 3:], None
        if self._without is not None:
            label, rest = tables[..., 3:-2], tables[..., -2:]
        if len(tables) == 1:
            (top, weighted, total), label = tables[0, :, :3].unbind(1), label[0]
        else:
            tops, weighted, total = tables[..., :3].unbind(-1)
            top = tops.amax(0)
            # -inf where no id counts on a rank: the factor is 0, and its product with the shift must be 0, not NaN.
            shift = (tops - top) * self.scale
            finite = shift.clamp(min=_NEVER)
            factor = finite.exp()
            weighted, total = ((weighted + total * finite) * factor).sum(0), (total * factor).sum(0)
            label = (label + shift[..., None]).amax(0)  # -inf on the ranks without the label
        log_total = total.log()
        norms = [top, total, log_total - weighted / total]
        if rest is not None:
            top_of_rest = rest[..., 0].amax(0)
            is_empty = top_of_rest == -math.inf
            gaps = (rest[..., 0] - top_of_rest.masked_fill(is_empty, 0)) * self.scale
            others = (rest[..., 1] + gaps).logsumexp(0)
            # A rest without an id has the smallest normal number as probability, a constant: losses of it are finite.
            nothing = math.log(torch.finfo(total.dtype).tiny)
            log_rest = ((top_of_rest - top) * self.scale + (others - log_total)).masked_fill(is_empty, nothing)
            log_probs = torch.cat([label - log_total[:, None], log_rest[:, None]], 1)
            return log_probs, torch.stack([*norms, top_of_rest, others])
        if self._kernels is not None:  # a kernel may go on with the norm
            norms += label.unbind(1)
        return (label - log_total[:, None]).contiguous(), torch.stack(norms)

    def _tables_of_ranks(self, statistics: Tensor) -> Tensor:
        """The tables of all ranks of the vocabulary, [ranks, chunk, columns], by one all-gather."""
        if self.tp_group is None:
            return statistics[None]
        if self._spreads and self.rows is not None:
            mine = self._row_without_token(statistics).repeat(self.shape.numel(), 1)
            statistics = mine.index_copy_(0, self.rows, statistics)
        tables = statistics.new_empty(size_of(self.tp_group), *statistics.shape)
        if statistics.numel():  # all ranks of the vocabulary have the same tokens, so all skip it
            all_gather_single(tables.flatten(0, 1), statistics.contiguous(), group=self.tp_group)
        return tables[:, self.rows] if self._spreads else tables

    def _row_without_token(self, statistics: Tensor) -> Tensor:
        """The row of a table where the mask leaves out a token: combined, its log-probs and entropy are 0."""
        row = statistics.new_zeros(statistics.shape[1])
        if self._first == 0:
            row[2] = 1  # the sum over the vocabulary, whose logarithm is 0
        else:
            row[0] = row[3:] = -math.inf
        return row

    def probabilities(self, logits: Tensor, norm: Tensor, part: slice) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Rows at a time: log2 of each id's probability, -inf for none, and the probability; both are scratch."""
        for rows, x, z, q in self._blocks(logits, part, norm.dtype):
            torch.sub(x, norm[0, rows, None], out=z).mul_(self.scale / LN_2).sub_(norm[1, rows, None].log2())
            yield rows, z, torch.exp2(z, out=q)

    def differentiate(
        self,
        logits: Tensor,
        part: slice,
        norm: Tensor,
        g: Tensor | None,
        h: Tensor | None,
        into: Tensor,
        more: Iterator[Tensor] | None = None,
    ) -> None:
        """Write ``scale (sum_k g_k [j = label_k] - q (sum_k g_k + h (log q + entropy)))`` into `into`.

        g, like the chunk's log-probs, and h, [chunk], are the gradients of log-probs and entropy, None for 0; `norm` is
        the chunk's. `into` may be the logits. `more` is added, a block's part at a time. Of a rest with gradient r,
        ``scale r ([j in rest] exp z_j / sum exp z of the rest - q)`` is written too.
        """
        label_gradients = None if g is None else g if g.dim() == 2 else g[:, None]
        arguments = self._kernel_arguments(part)
        if self._launch("differentiate", logits=logits, into=into, norm=norm, g=label_gradients, h=h, **arguments):
            return
        (top, total, entropy), (column, here), in_rest = norm[:3], self._columns(part), self._in_rest(part)
        into[:, self._held :] = 0  # padding of the vocabulary takes no part
        is_divergence_alone = g is None and h is None
        g = top.new_zeros(column.shape) if g is None else g if g.dim() == 2 else g[:, None]
        factor, gradient_sum, tilt = -self.scale / total, g.sum(1), None
        if in_rest is not None and g.shape[1] > column.shape[1]:
            g_of_rest = g[:, -1].masked_fill(norm[3] == -math.inf, 0)
            g = g[:, :-1]
            gradient_sum, tilt = g.sum(1) + g_of_rest, (self.scale * g_of_rest)[:, None]
        level = (factor * (gradient_sum if h is None else gradient_sum + h * (entropy - total.log())))[:, None]
        slope = None if h is None else (factor * h * LN_2)[:, None]
        at_label = g * here * self.scale
        for rows, x, z, q in self._blocks(logits, part, norm.dtype, into):
            added = None if more is None else next(more)  # reads logits, which `into` may overwrite: so first
            rest_slopes = None
            if tilt is not None and in_rest is not None:  # the rest's own softmax, from its own largest logit on
                rest_slopes = self._relative_to(
                    norm[3, rows], self._rest(x, column[rows], in_rest[rows], torch.empty_like(q))
                )
                rest_slopes = rest_slopes.sub_(
                    norm[4, rows, None].masked_fill(norm[3, rows, None] == -math.inf, 0) / LN_2
                )
                rest_slopes = rest_slopes.exp2_().mul_(tilt[rows])
            self._centre(x, top[rows], z)
            if is_divergence_alone:
                z.zero_()
            elif slope is None:
                z.exp2_().mul_(level[rows])
            else:
                torch.exp2(z, out=q)
                z.mul_(slope[rows]).add_(level[rows]).mul_(q)
            if rest_slopes is not None:
                z.add_(rest_slopes)
            z.scatter_add_(1, column[rows], at_label[rows])
            if added is not None:
                z.add_(added)
            if into.dtype != z.dtype:  # otherwise z is that part of `into`
                into[rows, : self._held] = z
        if self._mask is not None:
            into.masked_fill_(~self._counts(part)[:, None], 0)

    def _centre(self, x: Tensor, top: Tensor, z: Tensor) -> None:
        """z = scale * (x - top) / log 2, finite, for exp2."""
        torch.sub(x, top[:, None], out=z).mul_(self.scale / LN_2).clamp_(min=_NEVER)

    def _blocks(
        self, logits: Tensor, part: slice, dtype: torch.dtype, into: Tensor | None = None
    ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Rows at a time: logits, -inf where an id is not kept, and two pieces of scratch.

        The first is a part of `into` where the dtype allows it, and holds the logits where ids are kept.
        """
        column, here = self._columns(part)
        size = min(self._block_tokens(logits.device), max(len(logits), 1))
        into = into if into is not None and into.dtype == dtype else None
        scratch = logits.new_empty(1 if into is not None else 2, size, self._held, dtype=dtype)
        for begin in range(0, len(logits) if self._held else 0, size):
            rows = slice(begin, min(begin + size, len(logits)))
            number = rows.stop - rows.start
            z = scratch[0, :number] if into is None else into[rows, : self._held]
            x = logits[rows, : self._held]
            if self._mask is not None:
                x = x.masked_fill(~self._counts(part)[rows, None], 0)
            yield rows, self._kept(x, z, part, rows, column, here), z, scratch[-1, :number]

    def _block_tokens(self, device: torch.device) -> int:
        """Tokens of a block, whose scratch fits."""
        entries, threads = _DEVICE_BLOCK, torch.get_num_threads()
        if device.type == "cpu":  # threads wait for each other after each operation: for several, fewer and larger ones
            entries = _HOST_BLOCK if threads == 1 else min(2 * threads * _HOST_BLOCK, _HOST_MOST)
        return max(1, entries // max(self._held, 1))

    def _columns(self, part: slice) -> tuple[Tensor, Tensor]:
        """The labels' columns [n, K], and True where this rank has them; otherwise the column is arbitrary."""
        column = self._table_of_labels(part).long() - self._first
        here = (column >= 0) & (column < self._held)
        return column.clamp(0, max(self._held - 1, 0)), here

    def _table_of_labels(self, part: slice) -> Tensor:
        """[n, K]."""
        labels = self.labels[part]
        return labels if labels.dim() == 2 else labels[:, None]

    def _check_labels_in_range(self) -> None:
        labels, size = self.labels, self._size
        if not labels.numel():
            return
        in_range = (labels >= 0) & (labels < size)
        if self._mask is not None:
            in_range |= ~self._counts(slice(None)).view(-1, *[1] * (labels.dim() - 1))
        require(
            in_range.all(),
            lambda: (
                f"a label {next(label for label in labels.ravel().tolist() if not 0 <= label < size)} "
                f"in a vocabulary of {size}"
            ),
            flags.LABEL_RULE,
        )

    # --- kernels

    def _launch(self, step: str, **arguments: Any) -> Any:
        """What a step's kernel gives; None where plain torch reads: also of a wrong program, or if Triton fails."""
        if self._kernels is None:
            return None
        try:
            launch = getattr(self._kernels, step)
            return launch(**arguments) if self._is_sound(step, launch, arguments) else None
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler that is missing, a cache that is full, another version of Triton
            self._give_up(error)
            return None

    def _give_up(self, error: Exception) -> None:
        give_up(error)
        self._kernels = None
        self._check_ids_in_range()

    def _check_ids_in_range(self) -> None:
        """Raise ValueError for labels and kept ids that a kernel would have flagged."""
        self._check_labels_in_range()
        if isinstance(self.keep, KeptIds):
            self.keep.check_in_range(self._size)

    def _is_sound(self, step: str, launch: Callable[..., Any], arguments: dict[str, Any]) -> bool:
        """False for a program that differs from plain torch; compared on a few rows before its first launch."""
        of = arguments.get("logits", arguments.get("tables"))
        assert of is not None
        is_captured = of.is_cuda and torch.cuda.is_current_stream_capturing()
        rows = of.shape[-2] if step == "combine" else len(of)
        if not self._compares or is_captured or not rows:
            return True
        further = {"ids": _power_of_2(self.labels), "padded": self._held < self._width}
        further["ranks"] = len(of) if step == "combine" else 1
        program = first_launch.program_of(step, {**arguments, **further})
        if program not in first_launch.compared:
            excess = float(getattr(self, f"_excess_of_{step}")(launch, arguments))
            first_launch.compared[program] = excess <= 1
            if not excess <= 1:
                fall_back(first_launch.in_words(program), excess)
        if not first_launch.compared[program] and step == "statistics":  # which looks at labels and ids
            self._check_ids_in_range()
        return first_launch.compared[program]

    def _excess_of_combine(self, launch: Callable[..., Any], arguments: dict[str, Any]) -> Tensor:
        few = arguments["tables"][:, : first_launch.COUNTED].contiguous()
        (log_probs, norm), (right_log_probs, right_norm) = launch(tables=few, scale=self.scale), self._combined(few)
        pairs = (log_probs.t(), right_log_probs.t()), (norm, right_norm)
        return torch.stack([first_launch.excess(*pair, floor=1) for pair in pairs]).amax()

    def _excess_of_statistics(self, launch: Callable[..., Any], arguments: dict[str, Any]) -> Tensor:
        alone, few, _ = self._few(arguments)
        few["flags"] = torch.zeros_like(arguments["flags"], device=few["logits"].device)
        table, right = launch(**few), alone.statistics(few["logits"], slice(0, len(few["logits"])))
        # A wrong label makes a sum NaN, which plain torch refuses before.
        is_wrong = ((few["labels"] < 0) | (few["labels"] >= self._size)).any(1)
        if few["mask"] is not None:
            is_wrong &= few["mask"] != 0
        launched, expected = (values.masked_fill(is_wrong[:, None], 0).t() for values in (table, right))
        return first_launch.excess(launched, expected, floor=1)

    def _excess_of_differentiate(self, launch: Callable[..., Any], arguments: dict[str, Any]) -> Tensor:
        alone, few, at = self._few(arguments)
        logits, rows = few["logits"], slice(0, len(few["logits"]))
        into = arguments["into"]
        is_in_place = into.data_ptr() == arguments["logits"].data_ptr()
        few["norm"] = first_launch.rows_of(arguments["norm"].t(), at).t()
        few["g"], few["h"] = (
            None if arguments[name] is None else first_launch.rows_of(arguments[name], at, fill=fill)
            for name, fill in (("g", 1.0), ("h", 0.5))
        )
        right, terms = (torch.empty(logits.shape, dtype=into.dtype, device=into.device) for _ in range(2))
        alone.differentiate(logits, rows, few["norm"], few["g"], few["h"], into=right)
        # The probabilities: where few ids lie on this rank, the terms of log-probs and entropy may cancel in all.
        ones = torch.ones(few["labels"].shape, dtype=few["norm"].dtype, device=into.device)
        alone.differentiate(logits, rows, few["norm"], ones, None, into=terms)
        few["into"] = logits if is_in_place else first_launch.rows_of(into, at)
        launch(**few)
        gradient, (column, here) = few["into"].clone(), alone._columns(rows)
        # Entries at labels are far larger than others: apart from them.
        places, nothing = column.masked_fill(~here, 0), torch.zeros_like(column, dtype=into.dtype)
        at_labels, expected = (values.gather(1, places).where(here, nothing) for values in (gradient, right))
        eps = torch.finfo(into.dtype).eps
        excesses = [first_launch.excess(at_labels, expected, eps, floor=self.scale)]
        for values in (gradient, right, terms):
            values.scatter_(1, places, values.gather(1, places).where(~here, nothing))
        least = max(torch.finfo(into.dtype).tiny, 1e-30)  # below it a device may round to 0
        return torch.stack([*excesses, first_launch.excess(gradient, right, eps, terms=terms, row_floor=least)]).amax()

    def _few(self, arguments: dict[str, Any]) -> tuple["Reading", dict[str, Any], Tensor]:
        """These tokens in plain torch, the arguments of a kernel with a few rows, and the places of the rows."""
        logits, mask, keep, kept = (arguments[name] for name in ("logits", "mask", "keep", "kept"))
        at = first_launch.few_of(mask, logits)
        few = {**arguments, **{name: first_launch.rows_of(arguments[name], at) for name in ("logits", "labels")}}
        few["mask"] = None if mask is None else first_launch.rows_of(mask, at)
        few["keep"] = keep if keep is None or len(keep) == 1 else first_launch.rows_of(keep, at)
        alone = copy.copy(self)
        alone._kernels, alone.tp_group, alone._spreads, alone.rows, alone._host_rows = None, None, False, None, None
        alone.labels, alone._mask, alone.keep = few["labels"].long(), few["mask"], few["keep"]
        if kept is not None:
            few["kept"] = Kept(kept.ids, first_launch.rows_of(kept.bounds.t(), at).t())
            alone.keep = kept_mask(few["kept"], self._first, self._width)
        return alone, few, at

    def _counts(self, part: slice) -> Tensor:
        """True for the tokens that the mask on the device does not leave out."""
        assert self._mask is not None
        return self._mask[part] != 0

    def _kernel_arguments(self, part: slice) -> dict[str, Any]:
        mask = None if self._mask is None else self._mask[part]
        shard = {"first": self._first, "held": self._held, "scale": self.scale}
        tables: dict[str, Any] = {"labels": self._table_of_labels(part), "mask": mask, "keep": None, "kept": None}
        if self._kernels is None:  # none is launched
            return shard | tables
        if isinstance(self.keep, KeptIds):
            tables["kept"] = Kept(self._kept_ids.ids, self._kept_ids.bounds[:, part])
        else:
            tables["keep"] = self._keep_mask(part)
        return shard | tables

    def _keep_mask(self, part: slice) -> Tensor | None:
        """The ids of this rank that count, bool [tokens of the part or 1, columns]; None for all."""
        if self.keep is None or (isinstance(self.keep, Tensor) and len(self.keep) == 1):
            return self.keep
        if isinstance(self.keep, Tensor):
            return self.keep[part if self.rows is None else self.rows[part]]
        tokens = np.arange(part.start, part.stop) if self._host_rows is None else self._host_rows[part]
        return self.keep.mask(tokens, self._first, self._first + self._width, self.labels.device)

    def _rest(self, x: Tensor, column: Tensor, in_rest: Tensor, into: Tensor) -> Tensor:
        """The logits, in `into`, with -inf at the marked ids, which are not in the rest."""
        return into.copy_(x).scatter_reduce_(1, column, torch.where(in_rest, math.inf, -math.inf).to(into), "amin")

    def _relative_to(self, top: Tensor, x: Tensor) -> Tensor:
        """scale * (x - top) / log 2, for exp2, in place: -inf for an id that does not count.

        From its own maximum on, since sums against the largest logit of all vanish in float32 87 below it, and
        differences of them have few digits long before.
        """
        return x.sub_(top.masked_fill(top == -math.inf, 0)[:, None]).mul_(self.scale / LN_2)

    def _in_rest(self, part: slice) -> Tensor | None:
        """False where a label's column is here and not in the rest, [n, K]; None without a rest."""
        return None if self._without is None else ~(self._columns(part)[1] & self._without[part])

    def _kept(self, x: Tensor, z: Tensor, part: slice, rows: slice, column: Tensor, here: Tensor) -> Tensor:
        """The logits, in `z` with -inf where an id is not kept."""
        kept = self._keep_mask(slice(part.start + rows.start, part.start + rows.stop))
        if kept is None:
            return x
        kept = kept[:, : self._held]
        label = x.gather(1, column[rows]).to(z.dtype).masked_fill_(~here[rows], -math.inf)
        return z.copy_(x).masked_fill_(~kept, -math.inf).scatter_reduce_(1, column[rows], label, "amax")


def _power_of_2(labels: Tensor) -> int:
    """The number of labels of a token, rounded up as kernels take it."""
    return 1 if labels.dim() == 1 else 1 << (labels.shape[1] - 1).bit_length()


def _check_labels(labels: Tensor, shape: torch.Size) -> None:
    """Raise ValueError unless labels are [...] or [..., K] for tokens [...], and TypeError unless they are integers."""
    ids_shape = labels.shape[len(shape) :]
    if labels.shape[: len(shape)] != shape or len(ids_shape) > 1 or not ids_shape.numel():
        raise ValueError(
            f"labels of shape {tuple(labels.shape)}: for these tokens they must be {tuple(shape)}, or for several "
            f"ids each ({', '.join(map(str, (*shape, 'K')))}), K >= 1. Labels are in the order of the tokens: "
            "transpose them to [s, b] or [s, b, K] where hidden states are [s, b, h]."
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"labels of {labels.dtype}: they must be integers, ids of the vocabulary. Pass token ids.")


def _check_rest(rest_without: object, labels: Tensor, shape: torch.Size) -> None:
    """Raise ValueError unless the ids that a rest leaves out are marked among K labels per token."""
    marked = tuple(rest_without.shape) if isinstance(rest_without, Tensor) else type(rest_without).__name__
    if marked != tuple(labels.shape) or labels.dim() == len(shape):
        raise ValueError(
            f"rest_without of {marked} for labels of shape {tuple(labels.shape)}: it must be a tensor in the shape of "
            "labels [..., K], true for the ids that are not in the rest. Pass teacher_log_probs > -inf."
        )


def _rows_of(token_mask: TokenMask | None, shape: torch.Size) -> npt.NDArray[np.intp] | None:
    """Places of the tokens that are read; None for all of them."""
    mask = None if token_mask is None else _mask_of(token_mask, shape)
    return None if mask is None or mask.all() else np.flatnonzero(mask)


def _mask_of(token_mask: TokenMask, shape: torch.Size) -> npt.NDArray[np.bool_]:
    """True for the tokens that count, on the host."""
    numbers = to_array(token_mask)
    if numbers.dtype.kind not in "biuf" or not (numbers >= 0).all():
        least = numbers.min() if numbers.dtype.kind in "iuf" else numbers.dtype
        raise ValueError(f"a token mask with {least}: {flags.MASK_RULE}")
    _check_mask_shape(numbers.shape, shape)
    return np.asarray(numbers != 0)


def _mask_on(token_mask: TokenMask | None, shape: torch.Size, device: torch.device) -> Tensor | None:
    """[tokens] on the device of the logits, not 0 where a token counts; None for all. Waits for nothing."""
    if token_mask is None:
        return None
    if isinstance(token_mask, Tensor) and token_mask.device == device and not token_mask.is_cpu:
        _check_mask_shape(token_mask.shape, shape)
        return token_mask.reshape(-1).contiguous()  # its kernel looks at the numbers
    mask = _mask_of(token_mask, shape)
    return None if mask.all() else on_device(mask.ravel(), device)


def _check_mask_shape(mask_shape: Sequence[int], shape: torch.Size) -> None:
    if tuple(mask_shape) != tuple(shape):
        raise ValueError(
            f"a token mask of shape {tuple(mask_shape)}: it must have one entry per token, {tuple(shape)}. Cut it for "
            "this context-parallel rank as the labels are."
        )
