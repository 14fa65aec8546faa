"""Every k-th training step measured as it runs, for a number in the log; no token's weight is sent anywhere."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import log_single_rank
from torch import Tensor

from megatron_rl_loss.audit.megatron.audit import Audit

logger = logging.getLogger(__name__)

#: What the log calls it.
METRIC = "loss_aggregation_deviation"
#: Logged where a step's weights could not be known.
UNKNOWN = -1.0


class IntervalAudits:
    """The audits of a training run: of every `interval`-th step, the first included."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._steps = 0
        self._last: float | None = None  # of the last audit; None before it and on stages that compute no loss

    @contextmanager
    def step(self, model: Any, pg_collection: ProcessGroupCollection | None) -> Iterator[None]:
        """Around the schedule's call: measures it if it is its turn."""
        self._steps += 1
        if (self._steps - 1) % self._interval:
            yield
            return
        with Audit(model, pg_collection=pg_collection, gather=False) as audit:
            yield
        if audit.computes_loss:
            deviation = audit.deviation()
            self._last = UNKNOWN if deviation is None else deviation
            if deviation is None:
                log_single_rank(logger, logging.WARNING, f"{METRIC} of step {self._steps} is not known. {audit.why}")

    def reported(self, reports: Any) -> Any:
        """The schedule's reports, each with the last deviation: Megatron averages values over the steps between logs,
        so it must be in every step's.
        """
        last = self._last

        def with_deviation(report: Any) -> Any:
            values = list(report.values()) if isinstance(report, dict) else []
            if not values or not all(isinstance(value, Tensor) for value in values):
                return report
            return {**report, METRIC: torch.tensor(last, dtype=torch.float32, device=values[0].device)}

        return reports if last is None or not isinstance(reports, list) else list(map(with_deviation, reports))
