"""A forward pass over a step's micro-batches before training: log-probs of the old policy or of a reference.

The pass runs Megatron's own schedule with ``forward_only``, so through every pipeline stage, without gradients and in
evaluation mode. Each micro-batch keeps its values for the loss function.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.utils import get_model_config

from megatron_rl_loss.core.microbatch import Microbatch
from megatron_rl_loss.core.plan import Plan
from megatron_rl_loss.megatron.iterator import MicrobatchIterator

#: (micro-batch, model) -> the model's output: (log_probs, ...) with an `OutputHead`, log-probs, or hidden states.
CallModel = Callable[[Microbatch, Any], Any]


class ForwardPass:
    """The argument of `before_step` of `LossAggregation`: runs models over the step's micro-batches.

    Attributes:
        model: the model chunk, or the list of chunks.
        plan: the step's plan; `measure_tokens` computes statistics of a pass by it. On stages that compute no loss the
            plan has no micro-batches, and `measure_tokens` calls no function.
    """

    def __init__(
        self,
        schedule: Callable[..., Any],
        model: Any,
        chunks: list[list[Microbatch] | None],
        plan: Plan,
        **options: Any,
    ) -> None:
        self.model, self.plan = model, plan
        self._schedule, self._chunks = schedule, chunks
        # Non-loss data is what the schedule returns as it was made; a loss it would divide, and want as a scalar.
        self._options = options | {"forward_only": True, "collect_non_loss_data": True}

    def log_probs(self, name: str | Sequence[str], call_model: CallModel) -> None:
        """Run `call_model` on every micro-batch, and keep the log-probs as ``microbatch.log_probs[name]``.

        All ranks call it together. Only the last pipeline stage, which computes the loss, gets log-probs. Names such as
        ``("now", "entropy")`` keep both outputs of an `OutputHead` with ``entropy=True``. The pass runs without dropout
        and warns if the model trains with dropout.
        """
        names = (name,) if isinstance(name, str) else tuple(name)
        model_chunks = self.model if isinstance(self.model, list) else [self.model]
        config = get_model_config(model_chunks[0])
        if dropout := max(config.hidden_dropout, config.attention_dropout):
            text = f"a forward pass without dropout, of a model that trains with dropout {dropout:g}: the log-probs of"
            warnings.warn(
                f"{text} the two passes differ. Set --hidden-dropout and --attention-dropout to 0.", stacklevel=2
            )

        def forward_step(data_iterator: Iterator[Microbatch], model: Any) -> tuple[Any, Any]:
            return call_model(next(data_iterator), model), lambda output, non_loss_data: output

        iterators = [None if chunk is None else MicrobatchIterator(chunk) for chunk in self._chunks]
        with torch.no_grad(), evaluating(model_chunks):
            outputs = self._schedule(
                forward_step_func=forward_step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.model,
                **self._options,
            )
        for microbatch, output in zip(self._chunks[-1] or [], outputs, strict=bool(outputs)):
            values = output if isinstance(output, tuple) else (output,)
            microbatch.log_probs |= {name: values[k].detach() for k, name in enumerate(names)}


@contextmanager
def evaluating(chunks: list[Any]) -> Iterator[None]:
    """Evaluation mode, so no dropout, inside the ``with``."""
    training = [(module, module.training) for chunk in chunks for module in chunk.modules()]
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for module, was in training:  # each by itself: a part may be frozen in evaluation mode
            module.training = was
