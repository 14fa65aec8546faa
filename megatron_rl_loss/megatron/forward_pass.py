"""A forward pass over a step's micro-batches before it is trained on: log-probs of the old policy, or of a reference.

It goes through Megatron's own schedule with ``forward_only``, so through every pipeline stage, without gradients and in
evaluation mode. What it gives lies with each micro-batch, for the loss function.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_rl_loss.plan.microbatch import Microbatch

#: (micro-batch, model) -> what the model gives: (log_probs, ...) with an `OutputHead`, log-probs, or hidden states.
CallModel = Callable[[Microbatch, Any], Any]


class ForwardPass:
    """What `before_step` of `LossAggregation` is given: the step's micro-batches, and a way to put them through.

    Attributes:
        model: the model chunk, or the list of chunks.
    """

    def __init__(
        self, schedule: Callable[..., Any], model: Any, chunks: list[list[Microbatch] | None], **options: Any
    ) -> None:
        self.model = model
        self._schedule = schedule
        self._chunks = chunks
        self._options = options | {"forward_only": True, "collect_non_loss_data": True}

    def log_probs(self, name: str, call_model: CallModel) -> None:
        """Run `call_model` on every micro-batch, and keep the log-probs as ``microbatch.log_probs[name]``.

        All ranks call it together. On the last pipeline stage it keeps them; on others there are none, as there is no
        loss there.
        """

        def forward_step(data_iterator: Iterator[Microbatch], model: Any) -> tuple[Tensor, Any]:
            output = call_model(next(data_iterator), model)
            output = output[0] if isinstance(output, tuple) else output
            return output, lambda output, non_loss_data: output.detach()

        iterators = [None if chunk is None else iter(chunk) for chunk in self._chunks]
        with torch.no_grad(), _evaluating(self.model if isinstance(self.model, list) else [self.model]):
            outputs = self._schedule(
                forward_step_func=forward_step,
                data_iterator=iterators if isinstance(self.model, list) and len(iterators) > 1 else iterators[0],
                model=self.model,
                **self._options,
            )
        for microbatch, log_probs in zip(self._chunks[-1] or [], outputs, strict=bool(outputs)):
            microbatch.log_probs[name] = log_probs


@contextmanager
def _evaluating(chunks: list[Any]) -> Iterator[None]:
    """In evaluation mode, so without dropout."""
    training = [(module, module.training) for chunk in chunks for module in chunk.modules()]
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for module, was in training:  # each by itself: a part may be frozen in evaluation mode
            module.training = was
