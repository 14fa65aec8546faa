"""Packs on layers with a state: what is refused before the first step trains, and what `packed_seq_params` makes."""

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from missing import skip_without
from ranks import run_ranks
from table_step import start
from tiny_gpt import Layout
from tiny_hybrid import MAMBA


def model_of(pattern: str, pp: int) -> Any:
    """A HybridModel in Megatron's DDP: this rank's stage."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from tiny_gpt import tiny_config
    from tiny_hybrid import tiny_hybrid

    model_parallel_cuda_manual_seed(3, force_reset_rng=True)
    layers = sum(symbol not in "|/" for symbol in pattern)
    config = tiny_config(Layout(1, False, pp, 1, 1, 1), per_token=False, num_layers=layers, **MAMBA)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), tiny_hybrid(config, pattern))


def without_total_tokens(batch: Any, model: Any) -> Any:
    return batch.packed_seq_params()


def of_one_sequence(batch: Any, model: Any) -> Any:
    """Numbers of tokens as of a pack of one sample."""
    packed = batch.packed_seq_params(model)
    packed.seq_idx = torch.zeros_like(packed.seq_idx)
    return packed


def right(batch: Any, model: Any) -> Any:
    return batch.packed_seq_params(model)


WAYS = ("LossAggregation", "prove_step", "an engine", "an engine that is not proved")


def said_of(way: str, pattern: str, packs: Callable[[Any, Any], Any], pp: int, level: Any = "error") -> tuple[str, str]:
    """On a rank: the error of a first step, or "", and what it printed."""
    import moe_gpt

    from megatron_rl_loss import LossAggregation, plan_step, prove_step
    from megatron_rl_loss.engines.engine_step import EngineStep
    from megatron_rl_loss.megatron.flags import AggregationSettings

    start(1, pp)
    model, batches = model_of(pattern, pp), moe_gpt.step_data(2, with_policy=True)
    for batch in batches:
        packed = packs(batch, model)
        batch.packed_seq_params = lambda _, packed=packed: packed  # type: ignore[assignment, method-assign, misc]

    def loss_of(microbatch: Any, losses: Any) -> Any:
        return microbatch.loss(losses * (1.5 + microbatch.data.advantages))

    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            if way == "LossAggregation":
                settings = AggregationSettings.resolve("sample_mean", proof=level)
                wrap = LossAggregation(settings, lambda batch: batch.samples).wrap_schedule
                moe_gpt.run_step(model, batches, loss_of, wrap)
            else:
                plan = plan_step([batch.samples for batch in batches], "sample_mean", model=model)
                for microbatch, batch in zip(plan, batches, strict=True):
                    microbatch.data = batch
                if way == "prove_step":
                    proof = prove_step(model, plan, level=level)
                else:
                    engine = EngineStep(None, "the policy loss", level=level)
                    engine.doubt = "its loss is not known." if "not proved" in way else ""
                    proof = engine.step(model, plan=plan.record.use)
                with proof:
                    moe_gpt.run_step(model, [*plan], loss_of)
        except ValueError as error:
            return str(error), out.getvalue()
    return "", out.getvalue()


@pytest.mark.parametrize("way", WAYS)
def test_a_pack_whose_state_runs_on_is_refused_by_every_way(way: str) -> None:
    skip_without("HybridModel")
    outcomes = run_ranks(2, said_of, way, "M-|*-", without_total_tokens, 2)  # the first stage has the state
    assert all(said and "proved on" not in printed for said, printed in outcomes)
    said = "".join(said for said, _ in outcomes)
    times = said.count("PackedSeqParams without total_tokens, on a model with layers that have a state")
    assert times == (2 if "an engine" in way else 1)  # an engine's driver may show the error of any rank
    assert "module.decoder.layers.0.mixer" in said
    assert "total_tokens=int(cu_seqlens[-1])" in said
    assert "aborted before the optimizer step" in said
    for said, _ in run_ranks(2, said_of, way, "M-|*-", right, 2):
        assert said == ""


def test_numbers_of_other_sequences_are_refused() -> None:
    skip_without("HybridModel")
    ((said, _),) = run_ranks(1, said_of, "LossAggregation", "M-", of_one_sequence, 1)
    assert "seq_idx changes elsewhere than at its bounds" in said


def test_a_level_that_trains_on_says_so() -> None:
    skip_without("HybridModel")
    ((said, printed),) = run_ranks(1, said_of, "LossAggregation", "M-", without_total_tokens, 1, "warn")
    assert said == ""
    assert "without total_tokens" in printed
    assert "Training goes on" in printed
    ((said, printed),) = run_ranks(1, said_of, "LossAggregation", "M-", without_total_tokens, 1, "off")
    assert said == ""
    assert "total_tokens" not in printed


def test_a_transformer_needs_nothing() -> None:
    skip_without("HybridModel")
    ((said, printed),) = run_ranks(1, said_of, "LossAggregation", "*-", without_total_tokens, 1)
    assert said == ""
    assert "proved on" in printed
