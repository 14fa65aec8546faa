"""A forward pass over a step's micro-batches before it is trained on: log-probs of the old policy, or of a reference.

It goes through Megatron's own schedule with ``forward_only``, so through every pipeline stage, without gradients and in
evaluation mode. Its values lie with each micro-batch, for the loss function.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.utils import get_model_config

from megatron_rl_loss.megatron.iterator import MicrobatchIterator
from megatron_rl_loss.plan.microbatch import Microbatch
from megatron_rl_loss.plan.plan import Plan

#: (micro-batch, model) -> the model's output: (log_probs, ...) with an `OutputHead`, log-probs, or hidden states.
CallModel = Callable[[Microbatch, Any], Any]
#: For each model chunk the step's micro-batches, or None where no data is read.
StepChunks = list[list[Microbatch] | None]


class ForwardPass:
    """The argument of `before_step` of `LossAggregation`: the step's micro-batches, and a way to put them through.

    Attributes:
        model: the model chunk, or the list of chunks.
        plan: of the step, to `measure` what a pass gave. On stages that compute no loss it has no micro-batches, and
            calls no function that it is given.
    """

    def __init__(
        self, schedule: Callable[..., Any], model: Any, chunks: StepChunks, plan: Plan, **options: Any
    ) -> None:
        self.model, self.plan = model, plan
        self._schedule, self._chunks = schedule, chunks
        self._options = options | {"forward_only": True, "collect_non_loss_data": True}

    def log_probs(self, name: str | Sequence[str], call_model: CallModel) -> None:
        """Run `call_model` on every micro-batch, and keep the log-probs as ``microbatch.log_probs[name]``.

        All ranks call it together. On the last pipeline stage it keeps them; on others there are none, as there is no
        loss there. ``("now", "entropy")`` names all that an `OutputHead` with ``entropy=True`` gives. The pass runs
        without dropout, and warns of a model that trains with it.
        """
        names = (name,) if isinstance(name, str) else tuple(name)
        model_chunks = self.model if isinstance(self.model, list) else [self.model]
        config = get_model_config(model_chunks[0])
        if dropout := max(config.hidden_dropout, config.attention_dropout):
            text = f"a forward pass without dropout, of a model that trains with {dropout:g}: its log-probs differ from"
            warnings.warn(f"{text} those of the training pass. Switch dropout off.", stacklevel=2)

        def forward_step(data_iterator: Iterator[Microbatch], model: Any) -> tuple[Any, Any]:
            return call_model(next(data_iterator), model), lambda output, non_loss_data: output

        iterators = [None if one is None else MicrobatchIterator(one) for one in self._chunks]
        with torch.no_grad(), _evaluating(model_chunks):
            outputs = self._schedule(
                forward_step_func=forward_step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.model,
                **self._options,
            )
        for microbatch, output in zip(self._chunks[-1] or [], outputs, strict=bool(outputs)):
            given = output if isinstance(output, tuple) else (output,)
            microbatch.log_probs |= {name: given[k].detach() for k, name in enumerate(names)}


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
