"""verl's own `ppo_loss` with our `agg_loss` installed, from a checkout: VERL_PATH=~/verl.

Real: `ppo_loss` with its entropy and KL terms, `value_loss`, the registered policy losses, its `external_lib`, and
verl's own `agg_loss` to compare with; gradients are averaged over gloo, as FSDP does. Of its Megatron engine: its
gather of CP ranks and what it does to a loss, with Megatron's schedule and DDP. Of its trainers, `_update_actor`
around the recipe's. Not run: the rest of the engines and of the trainers, TransferQueue, Ray.
"""

import contextlib
import dataclasses
import importlib
import inspect
import io
import random
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import added_terms
import oracle
import pytest
import torch
import torch.distributed as dist
from added_terms import CALL
from checkouts import VERL, Settings, checkout, load, record_errors
from plants import MORE_TERMS, Plant, assert_stopped, patched, planted, record_plant
from ranks import RankError, run_ranks, start_process_group
from repository import EXAMPLES
from step_samples import dealt
from table_step import Batch, relative_error, run_schedule, start, table_model
from torch import Tensor
from world import CP, DP, STEP, TABLE, batches_of, errors_in

from megatron_rl_loss.engines import replacing

#: exp() of a float32 difference of log-probs.
TOLERANCE = 2e-6
MODES: dict[str, tuple[str, float | None]] = {
    "token-mean": ("token_mean", None),
    "token-sum": ("token_sum", None),
    "seq-mean-token-sum": ("constant", 1.0),
    "seq-mean-token-sum-norm": ("constant", 64.0),
    "seq-mean-token-mean": ("sample_mean", None),
}
ENTROPY_COEFF, KL_COEF, CLIP_C, VALUE_CLIP = 0.01, 0.1, 3.0, 0.5
INSTALL = "megatron_rl_loss.engines.verl_install"

pytestmark = pytest.mark.slow


class Rows(dict[str, Any]):
    """A stand-in for TensorDict with the methods that `ppo_loss` calls."""

    def select(self, *names: str) -> "Rows":
        return Rows({name: self[name] for name in names})

    def to_padded_tensor(self) -> "Rows":
        return Rows(
            {
                name: torch.nested.to_padded_tensor(column, 0.0) if column.is_nested else column
                for name, column in self.items()
            }
        )


def load_verl(root: str, *modules: str) -> list[Any]:
    names = ("trainer.ppo.core_algos", "workers.utils.losses", "workers.config", "utils.import_utils", *modules)
    return load(VERL, root, *(f"verl.{name}" for name in names))


def actor_config(config_module: Any, **options: Any) -> Any:
    options = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1} | options
    return config_module.ActorConfig(**options)


def make_rows(seed: int, count: int = 10) -> dict[str, Tensor]:
    """Responses of up to 9 tokens behind prompts of up to 4, left-padded; two are fully masked."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    prompts, responses = [rng.randint(1, 4) for _ in range(count)], [rng.randint(1, 9) for _ in range(count)]
    attention, mask = torch.zeros(count, 13, dtype=torch.int64), torch.zeros(count, 9)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        attention[i, 4 - prompt : 4 + response] = 1
        mask[i, :response] = torch.tensor([float(rng.random() < 0.7 and i not in (2, 6)) for _ in range(response)])
    log_probs = -torch.rand(count, 9) * 3
    return {
        "attention_mask": attention,
        "response_mask": mask,
        "log_probs": log_probs,
        "old_log_probs": log_probs + torch.randn(count, 9) * 0.4,
        "ref_log_prob": log_probs + torch.randn(count, 9) * 0.2,
        "advantages": torch.randn(count, 9),
        "entropy": torch.rand(count, 9),
        "returns": torch.randn(count, 9),
    }


def actor_losses(log_probs: Tensor, columns: dict[str, Tensor], entropy: Tensor) -> Tensor:
    """PPO's clipped loss with an entropy bonus and a KL penalty, per token."""
    old, ref, advantages = (columns[name] for name in ("old_log_probs", "ref_log_prob", "advantages"))
    ratio = (log_probs - old).exp()
    policy = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    policy = torch.where(advantages < 0, torch.minimum(-advantages * CLIP_C, policy), policy)
    return policy - ENTROPY_COEFF * entropy + KL_COEF * (log_probs - ref)


def expected(rows: dict[str, Tensor], mode: str) -> tuple[float, Tensor, float]:
    """Value, gradient by log-prob and scale, in float64: all terms, the critic's too, follow the mode."""
    ours, divisor = MODES[mode]
    table = rows["log_probs"].double().requires_grad_()
    columns = {name: column.double() for name, column in rows.items()}
    losses = actor_losses(table, columns, columns["entropy"]) + 0.5 * (table - columns["returns"]) ** 2
    samples = [oracle.Sample(loss, mask) for loss, mask in zip(losses, rows["response_mask"], strict=True)]
    value = oracle.step_loss(ours, samples, divisor)
    (gradient,) = torch.autograd.grad(value, table)
    return float(value.detach()), gradient, oracle.step_scale(ours, samples, divisor)


def step_errors(root: str, seed: int, modes: list[str], install: bool) -> list[float]:
    """On a rank: the error of a step in each mode, after the average over ranks."""
    start_process_group()
    core_algos, losses, config_module, import_utils = load_verl(root)
    theirs = losses.agg_loss
    if install:
        import_utils.import_external_libs(INSTALL)  # as HFModelConfig does with model.external_lib
    assert install == (losses.agg_loss is core_algos.agg_loss is not theirs)
    rows, rank, dp = make_rows(seed), dist.get_rank(), dist.get_world_size()
    mine = list(range(rank, len(rows["log_probs"]), dp))
    counts = {"dp_size": dp, "batch_num_tokens": int(rows["response_mask"].sum()), "global_batch_size": 10}
    results = []
    for mode in modes:
        of_mode = {
            "loss_agg_mode": mode,
            "loss_scale_factor": int(MODES[mode][1] or 0) if mode.endswith("norm") else None,
        }
        config = actor_config(
            config_module, **of_mode, entropy_coeff=ENTROPY_COEFF, use_kl_loss=True, kl_loss_coef=KL_COEF,
            kl_loss_type="kl", clip_ratio_c=CLIP_C, policy_loss=SimpleNamespace(get=lambda name, default: default),
        )  # fmt: skip
        table, total = rows["log_probs"].clone().requires_grad_(), torch.zeros(())
        for chosen in filter(None, [mine[:1], mine[1:4], mine[4:]]):
            part = {name: values[chosen] for name, values in rows.items()}
            log_probs = _flat(table[chosen], part["attention_mask"])  # the same table, for a critic
            output = {
                "log_probs": log_probs,
                "values": log_probs,
                "entropy": _flat(part["entropy"], part["attention_mask"]),
            }
            prompts = {"prompts": torch.zeros(len(chosen), 4), "responses": torch.zeros(len(chosen), 9)}
            data = Rows(part | prompts | counts | {"values": table[chosen].detach()})
            critic = SimpleNamespace(**of_mode, cliprange_value=VALUE_CLIP)
            loss = losses.ppo_loss(config, output, data)[0] + losses.value_loss(critic, output, data)[0]
            loss.backward()
            total += loss.detach()
        for values in (table.grad, total):
            dist.all_reduce(values)
        value, gradient, scale = expected(rows, mode)
        assert table.grad is not None
        in_gradient = relative_error(table.grad / dp, gradient)
        results.append(oracle.worst_error(abs(float(total) / dp - value) / scale, in_gradient, table.numel()))
    return results


def _flat(values: Tensor, attention: Tensor) -> Tensor:
    """A model's output for packed rows: each position has the value of the token after it."""
    parts = []
    for row, attended in zip(values, attention, strict=True):
        prompt, response = int(attended[:4].sum()), int(attended[4:].sum())
        parts += [torch.zeros(prompt - 1), row[:response], torch.zeros(1)]
    return torch.cat(parts)


@pytest.mark.parametrize("dp", [1, 4])
def test_ppo_loss_is_exact_with_ours_and_with_theirs(dp: int, record_property: Any) -> None:
    for install in (True, False):
        for errors in run_ranks(dp, step_errors, checkout(VERL), 1, list(MODES), install):
            assert max(errors) < TOLERANCE
            worst = {"ours" if install else "own": max(errors)}
            record_errors(record_property, VERL, "every `loss_agg_mode`", **worst)


CUT = {"geo_mean", "clip_cov", "kl_cov"}


def cut_in_two(root: str) -> tuple[dict[str, float], dict[str, float], list[str]]:
    """Each registered policy loss, of all rows at once and of two micro-batches, without installing and with.

    And those that are refused with.
    """
    core_algos, _, config_module, import_utils = load_verl(root)
    rows = make_rows(2)
    counts = {"dp_size": 1, "batch_num_tokens": int(rows["response_mask"].sum()), "global_batch_size": 10}

    def difference(name: str) -> float:
        config = actor_config(config_module, policy_loss=config_module.PolicyLossConfig(dro_beta=0.5))
        config.global_batch_info.update(counts | {"loss_scale_factor": None})

        def loss_of(chosen: slice) -> float:
            arguments = [rows[key][chosen] for key in ("old_log_probs", "log_probs", "advantages", "response_mask")]
            return float(core_algos.get_policy_loss_fn(name)(*arguments, "token-mean", config)[0])

        whole = loss_of(slice(None))
        return abs(loss_of(slice(3)) + loss_of(slice(3, None)) - whole) / abs(whole)

    names = set(core_algos.POLICY_LOSS_REGISTRY) - {"bypass_mode"}  # which is one of the others
    theirs = {name: difference(name) for name in names}
    import_utils.import_external_libs(INSTALL)
    refused = []
    for name in CUT:
        with pytest.raises(ValueError, match="depends on how the step is cut"):
            core_algos.get_policy_loss_fn(name)
        refused.append(name)
    return theirs, {name: difference(name) for name in names - CUT}, refused


def test_policy_losses_that_depend_on_the_cut_are_refused() -> None:
    """The others do not depend on it. clip_cov chooses at random, and may choose nothing."""
    ((theirs, ours, refused),) = run_ranks(1, cut_in_two, checkout(VERL))
    assert {name for name, error in theirs.items() if error > TOLERANCE} | {"clip_cov"} == CUT == set(refused)
    assert ours.keys() == theirs.keys() - CUT
    assert len(ours) >= 5
    assert max(ours.values()) < TOLERANCE


def guarded(root: str, plant: str) -> str:
    """On a rank: the refusal of verl's `ppo_loss` with a term that goes by another aggregator; empty if it trains.

    A name of ours that another module took before is ours too.
    """
    core_algos, losses, config_module, import_utils = load_verl(root)
    other = ModuleType("other_losses")
    other.aggregate = core_algos.agg_loss  # type: ignore[attr-defined]
    sys.modules[other.__name__] = other
    source = inspect.getsource(losses.ppo_loss)
    assert plant in source
    exec(source.replace(plant, f"{plant.partition('=')[0]}= (lambda loss_mat, **_: loss_mat.mean())(") if plant else "",
         vars(losses))  # fmt: skip
    import_utils.import_external_libs(INSTALL)
    assert other.aggregate is core_algos.agg_loss is losses.agg_loss
    rows = make_rows(3)
    data = Rows(rows | {"prompts": torch.zeros(10, 4), "responses": torch.zeros(10, 9), "dp_size": 1}
                | {"batch_num_tokens": int(rows["response_mask"].sum()), "global_batch_size": 10})  # fmt: skip
    output = {name: _flat(rows[name], rows["attention_mask"]) for name in ("log_probs", "entropy")}
    policy = SimpleNamespace(get=lambda name, default: default)
    config = actor_config(config_module, use_kl_loss=True, kl_loss_type="kl", policy_loss=policy)
    try:
        losses.ppo_loss(config, output, data)
    except ValueError as refusal:
        return str(refusal)
    return ""


@pytest.mark.parametrize("plant", ["", "entropy_loss = agg_loss(", "kl_loss = agg_loss("])
def test_a_term_by_another_aggregator_is_refused(plant: str) -> None:
    (refusal,) = run_ranks(1, guarded, checkout(VERL), plant)
    assert refusal.startswith("a loss of 3 terms and 2 calls of agg_loss") == (plant != "")
    assert plant or not refusal


def megatron_engine(root: str, per_token: bool) -> tuple[Any, Any]:
    """verl's class, and what its methods need of an instance."""
    (module,) = load(VERL, root, "verl.workers.engine.megatron.transformer_impl")
    own = module.MegatronEngineWithLMHead
    engine = Settings(
        prepare_model_outputs=lambda output, data: output, get_data_parallel_group=lambda: None,
        engine_config=Settings(use_remove_padding=True, context_parallel_size=CP),
        tf_config=Settings(calculate_per_token_loss=per_token),
        _routed_num_tokens=lambda data: own._routed_num_tokens(None, data),
    )  # fmt: skip
    return own, engine


def scaling_of(root: str, per_token: bool) -> Any:
    """(what a loss function returns, tokens of the micro-batch, of the step, ...) -> what Megatron is given."""
    own, engine = megatron_engine(root, per_token)

    def scale(returned: Any, tokens: int, of_step: int, num_microbatches: int, mode: str = "") -> Any:
        ids = torch.zeros(tokens, dtype=torch.int64)
        data = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "num_micro_batch": num_microbatches}
        data |= {"dp_size": DP, "routed_num_tokens": of_step}
        loss = partial(lambda config, **_: returned, config=SimpleNamespace(loss_agg_mode=mode))
        *carried, output = own.postprocess_micro_batch_func(engine, None, data, forward_only=False, loss_function=loss)
        return *carried, output["metrics"]

    return scale


def planned_in_its_engine(root: str, per_token: bool) -> list[float]:
    """On a rank: the error of a planned step in each mode, with what verl's Megatron engine does to a loss."""
    scale = scaling_of(root, per_token)
    of_step = sum(len(slot) for rank in range(DP) for batch in batches_of(rank) for slot in batch.numbers)

    def engine(returned: Any, batch: Any, num_microbatches: int) -> Any:
        return scale(returned, sum(map(len, batch.numbers)), of_step, num_microbatches)

    return errors_in("verl", engine, per_token=per_token)


@pytest.mark.parametrize("per_token", [False, True])
def test_a_planned_step_in_its_megatron_engine(per_token: bool, record_property: Any) -> None:
    for errors in run_ranks(DP * CP, planned_in_its_engine, checkout(VERL), per_token):
        assert max(errors) < oracle.EXACT
        record_errors(record_property, VERL, "every mode by `plan_step`", ours=max(errors))


def modes_in_its_engine(root: str, per_token: bool, install: bool) -> dict[str, float | str]:
    """On a rank: each mode's error by `agg_loss`, with verl's gather of CP ranks and its engine's factors."""
    state = start(cp=CP)
    core_algos, _, _, import_utils, util = load_verl(root, "models.mcore.util")
    if install:
        import_utils.import_external_libs(INSTALL)
    samples = [
        oracle.sample(sample.losses.tolist(), sample.mask.tolist(), rollout_id=i) for i, sample in enumerate(STEP)
    ]
    scale, cp_rank = scaling_of(root, per_token), state.get_context_parallel_rank()
    chosen = [dealt(STEP, rank, DP, 3) for rank in range(DP)]
    routed = [[sum(len(STEP[i].mask) for i in rows) for rows in rank] for rank in chosen]
    of_step = sum(map(sum, routed))
    counts: dict[str, Any] = {
        "dp_size": DP,
        "batch_num_tokens": float(torch.cat([sample.mask for sample in STEP]).sum()),
    }
    counts |= {"global_batch_size": len(STEP), "loss_scale_factor": MODES["seq-mean-token-sum-norm"][1]}
    results: dict[str, float | str] = {}
    for name, (mode, divisor) in MODES.items():
        model = table_model(TABLE, per_token=per_token)

        def forward_step(iterator: Any, model: Any, name: str = name) -> Any:
            rows, tokens = next(iterator)
            batch = Batch(STEP, rows, CP)

            def loss_func(output: Tensor) -> Any:
                masks = [STEP[i].mask for i in rows]
                edges = torch.tensor([0, *(len(slot) for slot in batch.numbers)]).cumsum(0)
                ids = torch.nested.nested_tensor(masks, layout=torch.jagged)
                packed = SimpleNamespace(cu_seqlens_q_padded=edges)
                whole = util.postprocess_thd_engine(output[None], packed, ids, len(rows))
                padded = [torch.nested.to_padded_tensor(column, 0.0) for column in (whole, ids)]
                loss = core_algos.agg_loss(*padded, name, **counts)
                return scale((loss, {}), tokens, of_step, len(chosen[0]), name)

            return model(batch.local_numbers(cp_rank, CP).cuda()), loss_func

        dp_rank = state.get_data_parallel_rank()
        steps = iter(list(zip(chosen[dp_rank], routed[dp_rank], strict=True)))
        try:
            run_schedule(forward_step, steps, model, len(chosen[0]))
        except ValueError as refusal:
            results[name] = str(refusal)
            continue
        expected = torch.cat([*oracle.step_gradient(mode, samples, divisor), torch.zeros(1)])
        results[name] = relative_error(model.module.losses.main_grad.cpu(), expected)
    return results


@pytest.mark.parametrize("install", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
def test_every_mode_in_its_megatron_engine(per_token: bool, install: bool, record_property: Any) -> None:
    """The engine refused one with per-token loss until 0.9.1 (verl#7915); its gather of whole rows allows it.

    By itself it rounds per-token counts down on each CP rank, and its gradients are too large by that.
    """
    setting = "every `loss_agg_mode`" + ", CP 2 with per-token loss" * per_token
    for results in run_ranks(DP * CP, modes_in_its_engine, checkout(VERL), per_token, install):
        refused = [name for name, error in results.items() if isinstance(error, str)]
        assert refused in ([], ["seq-mean-token-mean"] * per_token)
        worst = max(error for error in results.values() if isinstance(error, float))
        assert worst > 1e-2 if per_token and not install else worst < oracle.EXACT
        record_errors(record_property, VERL, setting, **{"ours" if install else "own": worst})
        for mode in refused:
            record_errors(record_property, VERL, f"refused by verl, `{mode}`, CP {CP} with per-token loss")


def as_hidden_states(table: Tensor, numbers: Tensor) -> Tensor:
    return table[numbers][:, None, None]


def columns_by_entry() -> dict[str, Tensor]:
    """What `ppo_loss` and `value_loss` read of each token, for each entry of the table."""
    table, noise = torch.tensor(TABLE), torch.randn(5, len(TABLE), generator=torch.Generator().manual_seed(9))
    names = ("old_log_probs", "ref_log_prob", "values", "returns")
    return {name: table + 0.4 * by_entry for name, by_entry in zip(names, noise, strict=False)} | {
        "advantages": noise[4]
    }


def expected_of_step(mode: str, of_actor: bool) -> Tensor:
    """The gradient by table entry of the actor's or the critic's step, in float64."""
    table = torch.tensor(TABLE, dtype=torch.float64, requires_grad=True)
    columns = {name: column.double() for name, column in columns_by_entry().items()}
    near = columns["values"] + (table - columns["values"]).clamp(-VALUE_CLIP, VALUE_CLIP)
    of_critic = 0.5 * torch.maximum((table - columns["returns"]) ** 2, (near - columns["returns"]) ** 2)
    losses = actor_losses(table, columns, 0.5 * table) if of_actor else of_critic
    parts = losses[:-1].split([len(sample.mask) for sample in STEP])
    rows = [oracle.Sample(part, (sample.mask != 0).float()) for part, sample in zip(parts, STEP, strict=True)]
    (gradient,) = torch.autograd.grad(oracle.step_loss(MODES[mode][0], rows, MODES[mode][1]), table)
    return gradient


class FirstSteps(NamedTuple):
    """What two steps of a model print, their gradient by table entry, and its error."""

    printed: str
    gradient: list[float]
    error: float


def first_steps(
    root: str,
    per_token: bool,
    modes: list[str],
    told: int = 0,
    actor: dict[str, Any] | None = None,
    taken_before: bool = False,
    added: Sequence[str] = (),
    **of_model: Any,
) -> list[FirstSteps]:
    """On a rank: two steps of an actor in each mode, and two of a critic.

    With verl's gather of CP ranks, its losses and its Megatron engine. Of the CP ranks' table one entry is a token's
    log-prob, and its value; the entropy is a half of it. verl was told of mini-batches larger by `told` rows.
    `actor`: settings of its config, instead of those of which the error is meant. `taken_before`: verl's own losses,
    which the worker held before it imported our module, as a colocated critic's does. `added`: a term for each mode.
    `of_model`: options of `table_model`, of whose pipeline stages the last one is two ranks.
    """
    state = start(cp=CP, pp=of_model.get("stages", 1))
    _, losses, config_module, import_utils, util = load_verl(root, "models.mcore.util")
    own, engine = megatron_engine(root, per_token)
    of_actor_and_critic = getattr(losses, "ppo_loss", None), losses.value_loss
    import_utils.import_external_libs(INSTALL)
    if not taken_before:
        of_actor_and_critic = losses.ppo_loss, losses.value_loss
    cp_rank, chosen = state.get_context_parallel_rank(), dealt(STEP, state.get_data_parallel_rank(), DP, 3)
    counts: dict[str, Any] = {"dp_size": DP, "batch_num_tokens": sum(int((sample.mask != 0).sum()) for sample in STEP)}
    counts |= {"global_batch_size": len(STEP) + told, "num_micro_batch": len(chosen)}
    counts |= {"routed_num_tokens": sum(1 + len(sample.mask) for sample in STEP)}
    sizes = [*(len(sample.mask) for sample in STEP), 1]
    columns = {name: column.split(sizes) for name, column in columns_by_entry().items()}

    def padded(rows: list[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def forward_step(iterator: Any, model: Any, loss: Any) -> Any:
        rows = next(iterator)
        batch, masks = Batch(STEP, rows, CP), [STEP[i].mask for i in rows]
        output = model(batch.local_numbers(cp_rank, CP).cuda())

        def outputs() -> dict[str, Tensor]:
            """What the last stage of verl's engine hands the schedule: a dict."""
            edges = torch.tensor([0, *(len(slot) for slot in batch.numbers)]).cumsum(0)
            ids = torch.nested.nested_tensor(masks, layout=torch.jagged)
            packed = SimpleNamespace(cu_seqlens_q_padded=edges)
            whole = util.postprocess_thd_engine(output.flatten()[None], packed, ids, len(rows))
            flat = torch.cat([torch.cat([row, torch.zeros(1)]) for row in whole.unbind()])  # behind prompts of a token
            return {"log_probs": flat, "values": flat, "entropy": 0.5 * flat}

        def loss_func(output: dict[str, Tensor]) -> Any:
            lengths = [len(mask) for mask in masks]
            attention = torch.tensor([[1] * (1 + length) + [0] * (max(lengths) - length) for length in lengths])
            responses = padded(masks)
            data = Rows(
                counts | {"attention_mask": attention, "prompts": torch.zeros(len(rows), 1), "responses": responses,
                "input_ids": torch.zeros(sum(lengths), dtype=torch.int64), "response_mask": responses}
            )  # fmt: skip
            data |= {name: padded([column[i] for i in rows]) for name, column in columns.items()}
            return own.postprocess_micro_batch_func(engine, output, data, forward_only=False, loss_function=loss)

        return outputs() if state.is_pipeline_last_stage() else output, loss_func

    def train(model: Any, loss: Any, right: Tensor) -> FirstSteps:
        for _ in range(2):
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                model.zero_grad_buffer()
                run_schedule(partial(forward_step, loss=loss), iter(chosen), model, len(chosen))
            texts.append(printed.getvalue())
        assert not texts.pop()
        gradient = model.module.losses.main_grad
        return FirstSteps(texts.pop(), gradient.tolist(), relative_error(gradient, right))

    texts: list[str] = []
    results = []
    for mode, term in zip(modes, added or [""] * len(modes), strict=True):
        added_terms.choose(term)
        options = {"loss_agg_mode": mode, "loss_scale_factor": 64 if mode.endswith("norm") else None}
        of_actor: dict[str, Any] = {"entropy_coeff": ENTROPY_COEFF, "clip_ratio_c": CLIP_C, "policy_loss": {}}
        of_actor |= {"use_kl_loss": True, "kl_loss_coef": KL_COEF, "kl_loss_type": "kl"}
        config = actor_config(config_module, **options, **of_actor | (actor or {}))
        critic = SimpleNamespace(**options, cliprange_value=VALUE_CLIP)
        for held, of in zip(of_actor_and_critic, (config, critic), strict=True):
            loss = partial(held, of)
            model = table_model(TABLE, per_token=per_token, forward=as_hidden_states, **of_model)
            results.append(train(model, loss, expected_of_step(mode, of is config)))
    return results


#: Two optimizer steps of eight rows: (key, tokens of the prompt, mask), in the order of verl's balanced batch.
KEYS = ["p_0_0", "p_1_0", "q_0_0", "pad_0_0", "p_1_1", "q_0_1", "r_0_0", "r_1_0"]
KEYS += ["p_1_2", "q_1_0", "q_0_2", "p_0_1", "r_0_1", "r_1_1", "pad_1_0", "r_0_2"]
MICROBATCHES = [(0, 1), (1, 4)]  # of four rows of a DP rank
WITH_TRAINER = dataclasses.replace(
    VERL,
    stand_ins=(
        *VERL.stand_ins, *("torchdata", "tqdm", "transfer_queue", "verl.protocol", "verl.single_controller"),
        *("verl.checkpoint_engine", "verl.experimental", "verl.trainer.distillation", "verl.utils.dataset.rl_dataset"),
        *("verl.utils.tracking", "verl.workers.engine_workers", "verl.workers.rollout"),
    ),
)  # fmt: skip


class Config(Settings):
    def get(self, name: str, default: Any = None) -> Any:
        return vars(self).get(name, default)


def keyed_rows(keys: list[str]) -> dict[str, list[Any]]:
    """A row for each key: rows of a session in other lengths, one fully masked, verl's empty rows with one token."""
    rng, rows = random.Random(6), dict[str, list[Any]](key=keys, prompt=[], mask=[], advantages=[], old=[])
    for i, key in enumerate(keys):
        length = 1 if key.startswith("pad") else rng.choice([2, 3, 5, 9])
        mask = torch.tensor([rng.choice([0, 1, 1]) for _ in range(length)])
        mask[rng.randrange(length)] = 1
        rows["prompt"].append(1 if key.startswith("pad") else rng.choice([1, 2, 4]))
        rows["mask"].append(mask * (i != 5 and not key.startswith("pad")))
        rows["advantages"].append(torch.tensor([rng.uniform(-2, 2) for _ in range(length)]))
        rows["old"].append(torch.tensor([rng.uniform(-2.5, -0.5) for _ in range(length)]))
    return rows


def expected_of_rows(mode: str, rows: dict[str, list[Any]], step: list[int], table: Tensor, first: list[int]) -> Tensor:
    """The gradient by table entry of a step's policy loss, in float64."""
    table = table.double().requires_grad_()
    masks, keys = [rows["mask"][i] for i in step], [rows["key"][i] for i in step]
    if mode == "session_mean":
        weights = oracle.weights_by_ids(mode, masks, [key[: key.rindex("_")] for key in keys], [], "active")
    else:
        samples = [oracle.sample([0.0] * len(m), m.tolist(), None, key[0]) for m, key in zip(masks, keys, strict=True)]
        weights = oracle.step_weights(mode, samples, None, "active")
    loss = torch.zeros((), dtype=torch.float64)
    for i, of_row in zip(step, weights, strict=True):
        begin = first[i] + rows["prompt"][i] - 1  # the entry at a token gives the next one's log-prob
        log_probs, advantages = table[begin : begin + len(of_row)], rows["advantages"][i].double()
        ratio = (log_probs - rows["old"][i].double()).exp()
        policy = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        policy = torch.where(advantages < 0, torch.minimum(-advantages * CLIP_C, policy), policy)
        loss = loss + (policy * torch.tensor(of_row, dtype=torch.float64)).sum()
    (gradient,) = torch.autograd.grad(loss, table)
    return gradient


def by_the_recipe(
    root: str, per_token: bool, forgotten: bool = False, keys: list[str] = KEYS, says: str = " proved on "
) -> dict[str, list[float]]:
    """On a rank: the errors of both steps' gradients in each mode, and their distance to the other mode's.

    The first step of each mode is proved; `forgotten`: the driver's weights were not sent. Of other keys, the proof of
    `prompt_mean` says something.
    """
    state = start(cp=CP)
    load(WITH_TRAINER, root)
    sys.modules["verl"].DataProto = object  # type: ignore[attr-defined]
    losses, config_module, import_utils, util = (
        importlib.import_module(f"verl.{name}")
        for name in ("workers.utils.losses", "workers.config", "utils.import_utils", "models.mcore.util")
    )
    sys.path.append(str(EXAMPLES / "recipes"))
    recipe = importlib.import_module("verl_rows")
    assert importlib.import_module("verl.trainer.ppo.v1").get_trainer_cls("rows") is recipe.Trainer
    names = vars(recipe)
    rows, stored = keyed_rows(keys), dict[str, Any]()

    def jagged(values: list[Tensor]) -> Tensor:
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)

    def put(keys: Any, partition_id: Any, fields: Any) -> Any:
        stored.update(fields)
        return SimpleNamespace(keys=keys, partition_id=partition_id, extra_info={})

    names["tq"].kv_batch_get = lambda select_fields, **_: {"response_mask": jagged(rows["mask"])}
    names["tq"].kv_batch_put, names["TensorDict"] = put, lambda fields, batch_size: fields
    trainer, sent = object.__new__(recipe.Trainer), []
    actor = Config(ppo_mini_batch_size=4, shuffle=False, entropy_coeff=0.0, ppo_epochs=1)
    trainer.config = Config(
        actor_rollout_ref=Config(actor=actor, rollout=Config(n=2, temperature=1.0)), algorithm=Config()
    )

    def update_actor(batch: Any) -> Any:
        sent.append(batch)
        return {"metrics": {"mfu": 1.0}}

    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0, 0, 1, 1]}, update_actor=update_actor)
    totals = [prompt + len(mask) for prompt, mask in zip(rows["prompt"], rows["mask"], strict=True)]
    first = torch.tensor([0, *totals]).cumsum(0).tolist()
    table = -torch.rand(first[-1] + 1, generator=torch.Generator().manual_seed(2)) * 2 - 0.5
    whole = [oracle.sample([0.0] * total, [1.0] * total) for total in totals]
    config = actor_config(
        config_module, loss_agg_mode="token-mean", clip_ratio_c=CLIP_C, policy_loss={"loss_mode": "rows"}, rollout_n=2,
    )  # fmt: skip
    scale, results = scaling_of(root, per_token), dict[str, list[float]](error=[], distance=[])
    share, ranks = actor.ppo_mini_batch_size * 2 // DP, range(DP)
    for mode in ("session_mean", "prompt_mean")[keys != KEYS :]:
        names["MODE"] = mode
        import_utils.import_external_libs("verl_rows_proof")
        proof = sys.modules.pop("verl_rows_proof").PROOF
        trainer._update_actor(put(keys, "train", {}), {})
        assert sent[-1].extra_info["mini_batch_size"] == share * DP
        column, units = (
            stored["rollout_is_weights"].unbind(),
            {name: stored[name].unbind() for name in ("prompt", "session")},
        )
        column = [torch.ones_like(row) for row in column] if forgotten else column
        for number in range(2):
            dealt_to = [list(range(len(keys)))[rank * 8 + number * share :][:share] for rank in ranks]  # verl's chunks
            step = [i for of_rank in dealt_to for i in of_rank]
            model = table_model(table.tolist(), per_token=per_token)
            counts = {"dp_size": DP, "global_batch_size": len(step)}
            counts["batch_num_tokens"] = int(sum(rows["mask"][i].sum() for i in step))
            routed = sum(totals[i] for i in step)
            mine = dealt_to[state.get_data_parallel_rank()]

            def forward_step(
                iterator: Any,
                model: Any,
                counts: Any = counts,
                routed: int = routed,
                column: Any = column,
                units: Any = units,
            ) -> Any:
                chosen = next(iterator)
                batch = Batch(whole, chosen, CP)

                def loss_func(output: Tensor) -> Any:
                    edges = torch.tensor([0, *(len(slot) for slot in batch.numbers)]).cumsum(0)
                    ids = jagged([torch.ones(totals[i]) for i in chosen])
                    packed = SimpleNamespace(cu_seqlens_q_padded=edges)
                    log_probs = util.postprocess_thd_engine(output[None], packed, ids, len(chosen))
                    data = Rows(
                        prompts=jagged([torch.zeros(rows["prompt"][i]) for i in chosen]),
                        responses=jagged([rows["mask"][i] for i in chosen]),
                        response_mask=jagged([rows["mask"][i] for i in chosen]),
                        old_log_probs=jagged([rows["old"][i] for i in chosen]),
                        advantages=jagged([rows["advantages"][i] for i in chosen]),
                        rollout_is_weights=jagged([column[i] for i in chosen]),
                        **{name: jagged([numbers[i] for i in chosen]) for name, numbers in units.items()}, **counts,
                    )  # fmt: skip
                    returned = losses.ppo_loss(config, {"log_probs": log_probs}, data)
                    return scale(returned, sum(totals[i] for i in chosen), routed, len(MICROBATCHES))

                return model(batch.local_numbers(state.get_context_parallel_rank(), CP).cuda()), loss_func

            cut = [mine[begin:end] for begin, end in MICROBATCHES]
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                run_schedule(forward_step, iter(cut), model, len(MICROBATCHES))
            assert number or dist.get_rank() or says in printed.getvalue(), printed.getvalue()
            for name, other in ("error", mode), ("distance", {"session_mean": "prompt_mean"}.get(mode, "session_mean")):
                right = expected_of_rows(other, rows, step, table, first)
                results[name].append(relative_error(model.module.losses.main_grad.cpu(), right))
        assert proof.outcome == ("proved" if " proved on " in says else "not proved")
        replacing.installed("proof of verl").undo()
    return results


@pytest.mark.parametrize("per_token", [False, True])
def test_the_first_step_of_actor_and_critic_is_proved(per_token: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is proved once; gradients do not change. verl's engine has no mean of sequences with per-token loss."""
    modes = [mode for mode in MODES if not (per_token and mode == "seq-mean-token-mean")]
    proved = run_ranks(DP * CP, first_steps, checkout(VERL), per_token, modes)
    monkeypatch.setenv("MEGATRON_RL_LOSS_PROOF", "off")
    alone = run_ranks(DP * CP, first_steps, checkout(VERL), per_token, modes)
    for rank, (with_proof, without) in enumerate(zip(proved, alone, strict=True)):
        assert [steps.gradient for steps in with_proof] == [steps.gradient for steps in without]
        assert not any(steps.printed for steps in without)
        assert rank == 0 or not any(steps.printed for steps in with_proof)
        assert max(steps.error for steps in with_proof) < TOLERANCE
    for mode, actor, critic in zip(modes, proved[0][::2], proved[0][1::2], strict=True):
        words = MODES[mode][0] + r"( with divisor \d+)?"
        says = ", ".join(f"{words} on {term}" for term in ("verl's loss", "entropy", "kl", "advantages"))
        assert re.search(f": {says}, aggregation proved on ", actor.printed), actor
        assert re.search(f": {words} on verl's loss, aggregation proved on ", critic.printed), critic


@pytest.mark.parametrize("of_model", [{"stages": 2}, {"frozen": True}, {"taken_before": True}])
def test_pipelines_frozen_parameters_and_losses_taken_before_are_no_faults(of_model: dict[str, Any]) -> None:
    launch = partial(first_steps, **of_model)
    by_rank = run_ranks(CP * DP * of_model.get("stages", 1), launch, checkout(VERL), False, ["token-mean"])
    assert all("aggregation proved on" in steps.printed for steps in by_rank[0])
    assert max(steps.error for of_rank in by_rank for steps in of_rank) < TOLERANCE


SETTINGS: list[dict[str, Any]] = [
    *({"policy_loss": {"loss_mode": name}} for name in ("gspo", "gpg", "sapo", "cispo", "dppo_tv", "dppo_kl")),
    *({"kl_loss_type": name} for name in ("abs", "mse", "low_var_kl", "k1+", "k3+")),
    {"use_kl_loss": False},
    {"entropy_coeff": 0.0},
    {"clip_ratio_high": 0.28},
]


@pytest.mark.parametrize("per_token", [False, True])
def test_other_losses_and_settings_are_no_faults(per_token: bool) -> None:
    """Of dppo advantages are not measured: its slopes at a ratio of 1 are not minus them."""
    for actor in SETTINGS:
        for steps in run_ranks(DP * CP, first_steps, checkout(VERL), per_token, ["token-mean"], 0, actor)[0]:
            assert "aggregation proved on" in steps.printed, (actor, steps.printed)


def test_a_mini_batch_smaller_than_verl_was_told_is_not_proved() -> None:
    for steps in run_ranks(DP * CP, first_steps, checkout(VERL), False, ["seq-mean-token-sum"], 4)[0]:
        assert (
            f"divides by {len(STEP) + 4} samples, and the step has {len(STEP)}, so that tokens weigh" in steps.printed
        )
        assert "NOT PROVED" in steps.printed


ENGINE, ALGORITHMS = "verl/workers/engine/megatron/transformer_impl.py", "verl/trainer/ppo/core_algos.py"
TERMS, OTHER = "verl/workers/utils/losses.py", "the first training step does something else"
REFUSED, BATCHES = "this package expects agg_loss", 'data["num_micro_batch"]'
MASK = '["response_mask"].to(bool)\n    # compute'
LOG_PROBS = 'log_prob = no_padding_2_padding(model_output["log_probs"], data)'
PLANTS = [
    Plant("scaling doubled", {ENGINE: (BATCHES, f"2 * {BATCHES}")}),
    Plant(
        "scaling doubled, per-token loss",
        {ENGINE: ("local_sum = loss", "local_sum = 2 * loss")},
        case={"per_token": True},
    ),
    Plant("CP ranks scaled 1.5 and 0.5", {ENGINE: (BATCHES, f"(1.5 - mpu.get_context_parallel_rank()) * {BATCHES}")}),
    Plant("agg_loss without the ranks", {ALGORITHMS: ("/ batch_num_tokens * dp_size", "/ batch_num_tokens")}),
    Plant("counts of a micro-batch", {TERMS: ('= data["batch_num_tokens"]', '= data["response_mask"].bool().sum()')}),
    Plant("entropy doubled", {TERMS: ("-= entropy_coeff", "-= 2 * entropy_coeff")}, "on entropy: tokens weigh"),
    Plant(
        "entropy left out", {TERMS: ("policy_loss -= entropy_coeff * entropy_loss", "pass")}, "no gradient reaches it"
    ),
    Plant(
        "advantages doubled in the policy loss",
        {ALGORITHMS: ("pg_losses1 = -advantages", "advantages = 2 * advantages; pg_losses1 = -advantages")},
        "on advantages: tokens weigh 2 times",
    ),
    Plant(
        "log-probs half detached",
        {TERMS: (LOG_PROBS, f"{LOG_PROBS}; log_prob = (log_prob + log_prob.detach()) / 2")},
        "on advantages: tokens weigh 0.5",
    ),
    Plant(
        "KL of another estimator",
        {TERMS: ("kl_penalty=config.kl_loss_type", 'kl_penalty="k2"')},
        "is not the kl of kl_pen",
    ),
    Plant(
        "KL clamped",
        {TERMS: ("loss_mat=kld,", "loss_mat=kld.clamp(max=0.1),")},
        "a KL penalty that is not the kl of kl_pen",
    ),
    Plant(
        "KL of another mode",
        {
            TERMS: (
                "loss_mat=kld, loss_mask=response_mask, loss_agg_mode=config.loss_agg_mode",
                'loss_mat=kld, loss_mask=response_mask, loss_agg_mode="token-sum"',
            )
        },
        "token_mean on kl: tokens weigh",
    ),
    Plant("KL not linear", {TERMS: ("kl_loss * config", "kl_loss ** 2 * config")}, "on kl: tokens weigh"),
    Plant("value loss doubled", {ALGORITHMS: ("vf_loss = 0.5 * agg_loss(", "vf_loss = agg_loss(")}),
    Plant(
        "mask shifted in ppo_loss",
        {TERMS: ('["response_mask"].to(bool)\n    # compute', '["response_mask"].to(bool).roll(1, 1)\n    #')},
    ),
    Plant("ppo_loss renamed", {TERMS: ("def ppo_loss(", "def loss_of_ppo(")}, "this package expects ppo_loss"),
    Plant("argument of agg_loss renamed", {ALGORITHMS: ("loss_mat: torch.Tensor", "losses: torch.Tensor")}, REFUSED),
]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.fault)
def test_a_fault_stops_the_first_step(plant: Plant, tmp_path: Path, record_property: Any) -> None:
    launch = first_steps, planted(VERL, tmp_path, plant.edits), plant.case.get("per_token", False), ["token-mean"]
    assert_stopped(record_property, VERL, plant.fault, plant.match, DP * CP, *launch)


@pytest.mark.parametrize("proof", ["off", "error"])
def test_a_count_that_some_ranks_exceed_stops_all_ranks(
    proof: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss function that drops the mask: of some ranks alone a micro-batch then has more tokens than the step."""
    monkeypatch.setenv("MEGATRON_RL_LOSS_PROOF", proof)
    root = planted(VERL, tmp_path, {TERMS: ('data["response_mask"].to(bool)', "torch.ones_like(log_prob).bool()")})
    with pytest.raises(RankError, match="must be a count of the whole step") as caught:
        run_ranks(DP * CP, first_steps, root, False, ["token-mean"])
    assert {*caught.value.errors} == {*range(DP * CP)}
    for text in caught.value.errors.values():
        (ranks,) = re.findall(r"Step aborted on all ranks .* ranks? ([\d, ]+): ValueError: batch_num_tokens is", text)
        assert 0 < len(ranks.split(", ")) < DP * CP


def test_what_the_gather_of_log_probs_does_to_gradients_is_not_seen(tmp_path: Path) -> None:
    """The layout of the samples says what its backward is."""
    gather = "output_list[cp_rank] = output\n", "output_list[cp_rank] = 2 * output - output.detach()\n"
    root = planted(VERL, tmp_path, {"verl/models/mcore/util.py": gather})
    actor, _ = run_ranks(DP * CP, first_steps, root, False, ["token-mean"])[0]
    assert "aggregation proved on" in actor.printed
    assert actor.error > 0.5


def test_a_term_added_to_the_policy_loss_is_not_proved(tmp_path: Path, record_property: Any) -> None:
    """To the losses before `agg_loss`."""
    call = CALL.format(log_probs="log_prob", old="old_log_prob", mask="response_mask")
    added = "clip_pg_losses1)\n\n    # Apply", f"clip_pg_losses1) + {call}\n\n    # Apply"
    root, terms = planted(VERL, tmp_path, {ALGORITHMS: added}), ["", *added_terms.TERMS]
    actors = run_ranks(DP * CP, partial(first_steps, added=terms), root, False, ["token-mean"] * len(terms))[0][::2]
    for term, actor in zip(terms, actors, strict=True):
        assert (MORE_TERMS if term else "aggregation proved on") in actor.printed, (term, actor.printed)
    for term in added_terms.TERMS:
        record_plant(record_property, VERL, f"a term added to the policy loss: {term}", "says that it is not proved")


def test_a_term_of_the_advantages_sizes_is_not_proved(tmp_path: Path, record_property: Any) -> None:
    added = "return policy_loss,", "return policy_loss + 0.1 * (advantages.abs() * log_prob * response_mask).mean(),"
    actor, _ = run_ranks(DP * CP, first_steps, planted(VERL, tmp_path, {TERMS: added}), False, ["token-mean"])[0]
    assert MORE_TERMS in actor.printed, actor.printed
    record_plant(record_property, VERL, "a term of the advantages' sizes", "says that it is not proved")


@pytest.mark.parametrize("per_token", [False, True])
def test_rows_of_sessions_by_the_recipe(per_token: bool, record_property: Any) -> None:
    """`session_mean` and `prompt_mean` by verl's registries, proved."""
    for results in run_ranks(DP * CP, by_the_recipe, checkout(VERL), per_token):
        assert max(results["error"]) < TOLERANCE < 1e-2 < min(results["distance"])
        record_errors(record_property, VERL, "rows of sessions, by weights", ours=max(results["error"]))


#: Keys of two sessions of each prompt, and what is said of the first step, which has the prompts a, b, e and f.
OF_PROMPTS = " ".join(f"{prompt}_{session}_0" for prompt in "abcdefgh" for session in "01")
GROUPS_OF_PROMPTS = {
    "one prompt with two ids": (OF_PROMPTS.replace("a_1_0", "z_0_0"), " proved on 25 tokens of 8 samples"),
    "ids moved by a row": (f"h_1_0 {OF_PROMPTS[:-6]}", " proved on "),
    "right": (OF_PROMPTS, " proved on 25 tokens of 8 samples, 4 prompts of 2"),
    "two prompts, one id": (
        OF_PROMPTS.replace("b_0", "a_2").replace("b_1", "a_3"),
        "NOT PROVED: A prompt has 4 samples where 2 are",
    ),
    "a row in the next group": (
        OF_PROMPTS.replace("b_0", "a_2"),
        "NOT PROVED: A prompt has 3 samples where 2 are generated",
    ),
    "an id for each row": (
        re.sub("(.)_1_0", lambda key: key[0].upper(), OF_PROMPTS),
        "NOT PROVED: Each of 8 prompts has one",
    ),
}


@pytest.mark.parametrize("groups", GROUPS_OF_PROMPTS)
def test_groups_that_rollout_n_does_not_explain_are_not_proved(groups: str) -> None:
    keys, says = GROUPS_OF_PROMPTS[groups]
    for results in run_ranks(DP * CP, by_the_recipe, checkout(VERL), False, False, keys.split(), says):
        assert max(results["error"]) < TOLERANCE, "the weights are those of these ids"


def test_weights_that_the_recipe_forgot_stop_the_first_step(record_property: Any) -> None:
    launch = DP * CP, by_the_recipe, checkout(VERL), False, True
    assert_stopped(record_property, VERL, "the recipe's weights not sent", OTHER, *launch)


def test_a_mask_shifted_in_the_loss_stops_the_recipe(tmp_path: Path, record_property: Any) -> None:
    root = planted(VERL, tmp_path, {TERMS: (MASK, MASK.replace("(bool)", "(bool).roll(1, 1)"))})
    assert_stopped(record_property, VERL, "mask shifted, by the recipe", OTHER, DP * CP, by_the_recipe, root, False)


@pytest.mark.parametrize("installed", [False, True])
def test_verl_counts_every_token_under_cp(installed: bool, tmp_path: Path, record_property: Any) -> None:
    root = patched(VERL, tmp_path, "verl-count-under-cp.patch")
    for results in run_ranks(DP * CP, modes_in_its_engine, root, True, installed):
        errors = [error for error in results.values() if isinstance(error, float)]
        assert len(errors) >= 4
        assert max(errors) < oracle.EXACT
        record_errors(record_property, VERL, "verl-count-under-cp.patch, CP 2 with per-token loss", ours=max(errors))
