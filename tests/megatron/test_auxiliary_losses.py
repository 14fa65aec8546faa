"""Auxiliary losses keep Megatron's scale: MoE load balancing and router z-loss, and multi-token prediction (MTP).

A real GPTModel, DDP, schedule and `finalize_model_grads`. With a policy loss of zero weight, all gradients are those of
the auxiliary losses, and must equal what stock Megatron gives in the same layout, bit for bit but for rounding. All
parameters of all ranks are compared, with carrier A (per-token loss off) and C (on).

What Megatron divides by hangs on what a loss function returns only with per-token loss: there gradients are divided by
the summed token counts, so the stock loss function must count the active tokens as they are. Local layers stand in for
Transformer Engine: experts one after the other (no grouped GEMM), `examples/packed_attention.py` for attention. Expert
parallelism takes one conversion on a CPU, see `build`; nothing that MoE or MTP needs had to be left out. Not covered:
the sequence-wise and global load-balancing losses, virtual pipeline stages, grouped GEMM, other token dispatchers.
"""

import functools
import random
from collections.abc import Iterator
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, start_process_group

from megatron_rl_loss.arguments import AggregationSettings

pytestmark = pytest.mark.slow

SEQ_LENGTH, VOCAB = 32, 24
MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.5,
    "moe_z_loss_coeff": 0.1,
    "moe_token_dispatcher_type": "alltoall",
}
MTP = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.5}
MODELS: dict[str, dict[str, Any]] = {"moe": MOE, "mtp": MTP, "moe and mtp": MOE | MTP}
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "1 process": (1, {}),
    "dp 2": (2, {}),
    "cp 2 x dp 2": (4, {"cp": 2}),
    "tp 2 with sequence parallelism": (2, {"tp": 2}),
    "pp 2": (2, {"pp": 2}),
    "ep 2": (2, {"ep": 2}),
    "tp 2 x cp 2": (4, {"tp": 2, "cp": 2}),
}
RUNS = [(layout, model) for layout in LAYOUTS for model in ("moe", "mtp") if layout not in ("ep 2", "tp 2 x cp 2")]
RUNS += [("ep 2", "moe"), *((layout, "moe and mtp") for layout in ("1 process", "pp 2", "tp 2 x cp 2"))]


def build(model: str, per_token: bool, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1) -> Any:
    """A tiny GPT of two layers in Megatron's DDP."""
    from types import SimpleNamespace

    from megatron.core import parallel_state as mpu
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import token_dispatcher
    from packed_attention import layer_spec

    if ep > 1:
        # The sizes of the exchange between experts' ranks become lists where they are copied from a GPU
        # (moe_utils.py:1184), else they stay tensors, which all_to_all_single refuses. On a CPU: convert them here.
        token_dispatcher.maybe_move_tensor_to_cpu = lambda sizes, as_numpy=False, **_: (
            sizes.numpy() if as_numpy and isinstance(sizes, torch.Tensor) else sizes
        )
    if not dist.is_initialized():
        start_process_group()
        mpu.initialize_model_parallel(tp, pp, context_parallel_size=cp, expert_model_parallel_size=ep)
    settings = MODELS[model]
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        ffn_hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=4,
        init_method_std=0.3,  # large weights: routers that prefer some experts
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        sequence_parallel=tp > 1,
        calculate_per_token_loss=per_token,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        **settings,
    )
    config.finalize_model_grads_func = finalize_model_grads
    block = layer_spec(SimpleNamespace(transformer=config))
    if "num_moe_experts" in settings:
        experts = get_gpt_layer_local_spec(num_experts=config.num_moe_experts).submodules.mlp
        for layer in block.layer_specs:
            layer.submodules.mlp = experts
    mtp = None
    if "mtp_num_layers" in settings:
        mtp = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False)
        for layer in mtp.layer_specs if mtp is not None else []:  # the stock local norm refuses sequence parallelism
            layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = block.layer_norm
    torch.manual_seed(3)
    model_parallel_cuda_manual_seed(3, force_reset_rng=True)
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=block,
        mtp_block_spec=mtp,
        vocab_size=VOCAB,
        max_sequence_length=SEQ_LENGTH,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    return DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)


class Packed:
    """A micro-batch: a pack of rollouts, this CP rank's part of it cut by the oracle, and losses' weights for it."""

    def __init__(self, rng: random.Random, cp_rank: int, cp_size: int, with_policy: bool) -> None:
        from rollouts import Rollout, make_pack

        rollouts = []
        for i in range(rng.randint(2, 3)):
            lengths = rng.randint(1, 4), rng.randint(1, 5)
            prompt, response = ([rng.randrange(VOCAB) for _ in range(length)] for length in lengths)
            mask = [float(rng.random() < 0.7) for _ in response]
            rollouts.append(Rollout(prompt, response, mask, 0.0, 0, i))
        self.pack = make_pack(rollouts, seq_length=SEQ_LENGTH, slot_multiple=2 * cp_size)
        self.samples = self.pack.samples
        bounds = self.pack.packed_seq_params.cu_seqlens_q.tolist()
        slots: list[list[oracle.Token]] = [[(0, p) for p in range(a, b)] for a, b in zip(bounds, bounds[1:])]  # noqa: B905, RUF007
        held = [token[1] for token in oracle.zigzag(slots, cp_rank, cp_size) if token is not None]
        mask = torch.zeros(SEQ_LENGTH)
        for start, one in zip(bounds, self.samples.loss_masks, strict=False):  # bounds has an end and filler too
            mask[start : start + one.numel()] = one
        self.mask = mask[held][None]
        self.tokens, self.labels, self.position_ids = (
            values[held][None] for values in (self.pack.tokens, self.pack.labels, self.pack.position_ids)
        )
        advantages = torch.tensor([rng.uniform(-4, 4) * with_policy for _ in range(SEQ_LENGTH)])
        self.advantages = advantages[held][None]


def step_data(num_microbatches: int, with_policy: bool) -> list[Packed]:
    from megatron.core import parallel_state as mpu

    rng = random.Random(mpu.get_data_parallel_rank())  # the same on all ranks that share data
    cp_rank, cp_size = mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()
    return [Packed(rng, cp_rank, cp_size, with_policy) for _ in range(num_microbatches)]


def run_step(model: Any, batches: list[Packed], loss_of: Any, wrap: Any = lambda schedule: schedule) -> Any:
    """One step through Megatron's schedule: the final gradient of every parameter, by name."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(iterator: Iterator[Any], model: Any) -> Any:
        given = next(iterator)
        batch = given if isinstance(given, Packed) else given.data
        output = model(
            batch.tokens,
            batch.position_ids,
            attention_mask=None,
            labels=batch.labels,
            loss_mask=batch.mask,
            packed_seq_params=batch.pack.packed_seq_params,
        )
        return output, functools.partial(loss_of, given)

    model.zero_grad_buffer()
    wrap(get_forward_backward_func())(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=model,
        num_microbatches=len(batches),
        seq_length=SEQ_LENGTH,
        micro_batch_size=1,
        forward_only=False,
    )
    return {name: parameter.main_grad.clone() for name, parameter in model.module.named_parameters()}


def ours(model: Any, batches: list[Packed]) -> Any:
    from megatron_rl_loss.megatron import LossAggregation

    def loss_of(microbatch: Any, losses: torch.Tensor) -> Any:
        return microbatch.loss(microbatch.data.advantages * losses)

    settings = AggregationSettings.resolve("sample_mean", with_per_token_loss=True)
    wrap = LossAggregation(settings, lambda batch: batch.samples).wrap_schedule
    return run_step(model, batches, loss_of, wrap)


def stock(model: Any, batches: list[Packed], *, counts: bool) -> Any:
    """What a user of Megatron alone returns, with a loss of zero: 3-tuple with `counts`, else 2-tuple."""

    def loss_of(batch: Packed, losses: torch.Tensor) -> Any:
        loss, num_tokens = (losses * batch.mask).sum() * 0, batch.mask.sum().int()
        return (loss, num_tokens, {}) if counts else (loss, {})

    return run_step(model, batches, loss_of)


def worst_error(actual: Any, expected: Any) -> float:
    """Largest difference of any parameter's gradient, relative to that gradient's largest entry."""
    assert actual.keys() == expected.keys()
    errors = [0.0]
    for name, wanted in expected.items():
        assert torch.isfinite(actual[name]).all(), name
        difference, scale = float((actual[name] - wanted).abs().max()), float(wanted.abs().max())
        errors.append(difference / scale if scale else float(difference > 0))
    return max(errors)


def without_auxiliary_losses(config: Any) -> dict[str, Any]:
    """Turn them off (Megatron reads these at each forward); what turns them on again."""
    kept = {name: getattr(config, name) for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff")}
    kept["mtp_loss_scaling_factor"] = config.mtp_loss_scaling_factor
    config.moe_aux_loss_coeff, config.moe_z_loss_coeff, config.mtp_loss_scaling_factor = 0.0, None, 0.0
    return kept


def cases_of(model_name: str, layout: dict[str, int]) -> list[dict[str, Any]]:
    found = []
    for per_token in (False, True):
        model = build(model_name, per_token, **layout)
        for num_microbatches in (1, 3):
            case = {"case": f"per_token={per_token}, {num_microbatches} micro-batches"}
            zero = step_data(num_microbatches, with_policy=False)
            auxiliary = ours(model, zero)
            for counts in (True,) if per_token else (True, False):
                expected = stock(model, zero, counts=counts)
                routers = [name for name in expected if "router" in name]
                # Not its experts: some get no token.
                mtp = [name for name in expected if name.startswith("mtp.") and "expert" not in name]
                largest = [float(expected[name].abs().max()) for name in (*routers, *mtp)]
                found.append(
                    case
                    | {"what": f"stock, counts={counts}", "error": worst_error(auxiliary, expected)}
                    | {"routers": len(routers), "mtp": len(mtp), "smallest": min(largest, default=1.0)}
                )
            batches = step_data(num_microbatches, with_policy=True)
            both = ours(model, batches)
            kept = without_auxiliary_losses(model.config)
            policy = ours(model, batches)
            vars(model.config).update(kept)
            added = {name: policy[name] + auxiliary[name] for name in policy}
            found.append(
                case
                | {"what": "sum", "error": worst_error(both, added)}
                | {"without auxiliary": worst_error(policy, both), "without policy": worst_error(auxiliary, both)}
            )
    return found


@pytest.mark.parametrize(("layout", "model"), RUNS)
def test_auxiliary_gradients_are_those_of_megatron_alone(layout: str, model: str, record_property: Any) -> None:
    world_size, sizes = LAYOUTS[layout]
    ranks = run_ranks(world_size, functools.partial(cases_of, model, sizes))
    for rank, cases in enumerate(ranks):
        assert len(cases) == 10
        for case in cases:
            assert case["error"] < oracle.chain_error(3, 32), (rank, case)  # two layers and MTP's, 32 tokens
            if case["what"] == "sum":  # both parts matter, or adding them would prove nothing
                assert min(case["without auxiliary"], case["without policy"]) > 0.01, (rank, case)
            else:
                assert case["smallest"] > 1e-3, (rank, case)
    # Every rank has routers; MTP is on the last pipeline stage.
    assert all(case["routers"] > 0 for case in ranks[0] if "routers" in case) == ("moe" in model)
    assert all(case["mtp"] > 0 for case in ranks[-1] if "mtp" in case) == ("mtp" in model)
    record_property("cases", sum(len(cases) for cases in ranks))


# ---- negative controls: adapters that get the loss right and the auxiliary losses wrong


def error_of_wrong_adapter(wrong: str, model_name: str, layout: dict[str, int]) -> float:
    from megatron_rl_loss.megatron import Microbatch

    model = build(model_name, per_token=wrong == "counts samples", **layout)
    batches = step_data(3, with_policy=False)
    expected = stock(model, batches, counts=True)
    if wrong == "counts samples":
        # The policy loss would be as exact: scale it by the samples of the step instead of its tokens.
        Microbatch._local_active_tokens = lambda self: torch.tensor(len(self.samples), dtype=torch.int32)  # type: ignore[method-assign]
    else:
        # Undoes Megatron's division by the loss scale, which auxiliary losses take part in.
        model.config.grad_scale_func = lambda loss: loss * 3 * dist.get_world_size()
    return worst_error(ours(model, batches), expected)


@pytest.mark.parametrize("model", ["moe", "mtp"])
@pytest.mark.parametrize("wrong", ["counts samples", "scales by grad_scale_func"])
@pytest.mark.parametrize("layout", ["1 process", "cp 2 x dp 2"])
def test_the_comparison_sees_an_adapter_that_rescales_auxiliary_losses(wrong: str, model: str, layout: str) -> None:
    world_size, sizes = LAYOUTS[layout]
    assert min(run_ranks(world_size, functools.partial(error_of_wrong_adapter, wrong, model, sizes))) > 0.1
