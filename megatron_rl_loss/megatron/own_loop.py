"""The proof of a loop of one's own over Megatron's schedule."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_rl_loss.core.collectives import check_together
from megatron_rl_loss.core.plan import Plan
from megatron_rl_loss.megatron.probe import check_fresh_gradients
from megatron_rl_loss.megatron.proving import MegatronFirstStep, facts_of
from megatron_rl_loss.proof.outcomes import ProofLevel
from megatron_rl_loss.proof.reduced_ranks import uncounted

_REMEDY = "Return what microbatch.loss(...) returned, all of it and unchanged; put a coefficient into a Term."


class MegatronProof:
    """The proof of a model's first step, and a look at gradients before its first two."""

    def __init__(self, level: ProofLevel) -> None:
        self.first, self._num_trained = MegatronFirstStep(None, "the policy loss", level=level, remedy=_REMEDY), 0

    @contextmanager
    def step(self, model: Any, plan: Plan) -> Iterator[None]:
        groups, _ = facts_of(model)
        over = [groups.dp_cp, groups.tp, groups.pp]
        if not self.first.is_agreed:  # before any other collective: ranks of other levels would wait for each other
            self.first.agree(over)
        if self.first.level != "off" and self._num_trained < 2:
            self._num_trained += 1
            chunks = model if isinstance(model, list) else [model]
            check_together(lambda: check_fresh_gradients(chunks), over)
        if not self.first.is_over:
            self.first.refuse(uncounted(model, plan.record.groups), plan.record.use, over)
        with self.first.step(model, plan=plan.record.use):
            yield
