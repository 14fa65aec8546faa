"""Recipes that need no launch of `pretrain`: value and gradient of a step on several ranks are the float64 oracle's.

Those for other frameworks are checked for what they name; that framework's real code runs in tests/engines/real.
"""

import dataclasses
import itertools
import os
import re
import runpy
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from missing import skip_without
from ranks import RankError, run_ranks, start_process_group
from repository import EXAMPLES, ROOT
from scripts import printed_by
from step_samples import DIVISOR, dealt, step_samples
from table_step import Batch, relative_error, start, table_model
from torch import Tensor

from megatron_rl_loss.__main__ import copy_example
from megatron_rl_loss.core import modes
from megatron_rl_loss.core.aggregation import resolve
from megatron_rl_loss.engines import slime

RECIPES = EXAMPLES / "recipes"
SAMPLES = step_samples(seed=11)
VOCABULARY = 9
MODES = [mode for mode in oracle.MODES if mode != "token_sum"]
#: By mode, a step's loss and the gradient of each parameter.
StepsByMode = dict[str, tuple[float, list[Tensor]]]


def divisor_of(mode: str) -> float | None:
    return oracle.divisor_of(mode, DIVISOR)


def clipped(log_probs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """PPO's loss of a token, arXiv:1707.06347 eq. 7, as written there."""
    ratio = (log_probs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


# ---- plain torch


def plain_model() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 16), torch.nn.Linear(16, VOCABULARY))


def token_values(i: int) -> dict[str, Tensor]:
    """The values of a rollout's tokens, of sample i. Half of the old log-probs lie beyond the clip."""
    generator = torch.Generator().manual_seed(i)
    length = len(SAMPLES[i].mask)
    tokens = torch.randint(VOCABULARY, (length + 1,), generator=generator)
    return {
        "tokens": tokens[:-1],
        "labels": tokens[1:],
        "old_log_probs": -2.2 + torch.randn(length, generator=generator).double() / 2,
        "advantages": torch.randn(1, generator=generator).double().expand(length),
    }


def plain_batch(chosen: list[int]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for name in ("tokens", "labels", "old_log_probs", "advantages"):
        values = torch.cat([token_values(i)[name] for i in chosen])
        joined[name] = values.float() if values.is_floating_point() else values
    ids = [str(SAMPLES[i].prompt_id) for i in chosen]
    return joined | {"loss_masks": [SAMPLES[i].mask for i in chosen], "prompt_ids": ids}


def plain_oracle(mode: str) -> tuple[float, float, list[Tensor]]:
    """The step loss, what its rounding is relative to, and the gradient of every parameter."""
    model = plain_model().double()
    samples = []
    for i, sample in enumerate(SAMPLES):
        values = token_values(i)
        log_probs = model(values["tokens"]).log_softmax(-1)[torch.arange(len(sample.mask)), values["labels"]]
        losses = clipped(log_probs, values["old_log_probs"].float().double(), values["advantages"].float().double())
        samples.append(oracle.Sample(losses, sample.mask, None, sample.prompt_id))
    loss = oracle.step_loss(mode, samples, divisor_of(mode))
    detached = [dataclasses.replace(sample, losses=sample.losses.detach()) for sample in samples]
    scale = oracle.step_scale(mode, detached, divisor_of(mode))
    return float(loss.detach()), scale, list(torch.autograd.grad(loss, list(model.parameters())))


def steps_by_mode(train: Callable[..., Tensor], wrap: Callable[[torch.nn.Module], Any]) -> StepsByMode:
    """Loss and gradients of ``train(model, optimizer, mode, divisor)`` on this rank."""
    by_mode: StepsByMode = {}
    for mode in MODES:
        model = wrap(plain_model())
        loss = train(model, torch.optim.SGD(model.parameters(), lr=0.0), mode, divisor_of(mode))
        gradients = [parameter.grad for parameter in model.parameters()]
        by_mode[mode] = float(loss), [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]
    return by_mode


def plain_steps(recipe: str) -> StepsByMode:
    """On a rank: the recipe's step in every mode."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    train_step = runpy.run_path(str(RECIPES / f"{recipe}.py"))["train_step"]
    start_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chosen = dealt(SAMPLES, rank, ranks, 2)
    if recipe == "plain_ddp" and rank == 1:
        chosen = [[i for part in chosen for i in part]]  # one micro-batch where others have two

    def train(model: Any, optimizer: Any, mode: str, divisor: float | None) -> Tensor:
        loss: Tensor = train_step(model, optimizer, [plain_batch(part) for part in chosen], mode, divisor)
        return loss

    def shard(model: torch.nn.Module) -> Any:
        return fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))

    return steps_by_mode(train, torch.nn.parallel.DistributedDataParallel if recipe == "plain_ddp" else shard)


PLAIN_ERROR = oracle.chain_error(2, oracle.num_tokens(SAMPLES))


def check_steps(of_ranks: list[StepsByMode]) -> None:
    """Loss and gradients of every rank and mode are the oracle's."""
    for mode in MODES:
        loss, scale, gradients = plain_oracle(mode)
        for by_mode in of_ranks:
            assert by_mode[mode][0] == pytest.approx(loss, abs=PLAIN_ERROR * scale), mode
            for gradient, expected in zip(by_mode[mode][1], gradients, strict=True):
                assert relative_error(gradient, expected) < PLAIN_ERROR, mode


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["plain_ddp", "plain_fsdp2"])
def test_plain_torch_trains_on_the_step_loss(recipe: str) -> None:
    check_steps(run_ranks(3, plain_steps, recipe))


def rows_of(chosen: list[int], length: int) -> dict[str, Any]:
    """Samples as rows of one length, filled up behind the sample."""

    def stacked(rows: Iterable[Tensor]) -> Tensor:
        return torch.stack([torch.nn.functional.pad(row, (0, length - len(row))) for row in rows])

    names = ("tokens", "labels", "old_log_probs", "advantages")
    columns: dict[str, Any] = {name: stacked(token_values(i)[name] for i in chosen) for name in names}
    columns |= {name: columns[name].float() for name in ("old_log_probs", "advantages")}
    masks = stacked(torch.as_tensor(SAMPLES[i].mask) for i in chosen)
    return columns | {"loss_masks": masks, "prompt_ids": [str(SAMPLES[i].prompt_id) for i in chosen]}


def cp_steps_of_torch() -> StepsByMode:
    """On a rank of DP 2 x CP 2: the recipe's step in every mode."""
    from torch.distributed.device_mesh import init_device_mesh

    train_step = runpy.run_path(str(RECIPES / "plain_cp.py"))["train_step"]
    start_process_group()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    chosen = dealt(SAMPLES, mesh["dp"].get_local_rank(), 2, 2)
    length = -(-max(len(sample.mask) for sample in SAMPLES) // 4) * 4

    def train(model: Any, optimizer: Any, mode: str, divisor: float | None) -> Tensor:
        batches = [rows_of(part, length) for part in chosen]
        loss: Tensor = train_step(model, optimizer, batches, mode, mesh, divisor)
        return loss

    return steps_by_mode(train, torch.nn.parallel.DistributedDataParallel)


@pytest.mark.slow
def test_torchs_context_parallelism_trains_on_the_step_loss() -> None:
    check_steps(run_ranks(4, cp_steps_of_torch))


@pytest.mark.slow
def test_plain_torch_runs_as_it_is_launched() -> None:
    printed = "".join(run_ranks(2, printed_by, RECIPES, "plain_ddp.py"))
    losses = [float(value) for value in re.findall(r"-?\d\.\d{6,}", printed)]
    assert len(losses) == 6
    assert min(losses) < -0.2 < 0 < max(losses)


# ---- Megatron's schedule


def table() -> list[float]:
    """A log-prob a token, and one that stands for padding."""
    return [-0.1 - abs(float(loss)) for sample in SAMPLES for loss in sample.losses] + [-1.0]


def of_tokens(seed: int, scale: float, shift: float) -> Tensor:
    return shift + scale * torch.randn(len(table()), generator=torch.Generator().manual_seed(seed))


def as_samples(losses: Tensor) -> list[oracle.Sample]:
    parts = losses[:-1].split([len(sample.mask) for sample in SAMPLES])
    return [
        oracle.Sample(part, sample.mask, None, sample.prompt_id) for part, sample in zip(parts, SAMPLES, strict=True)
    ]


BETA = 0.3


def old_log_probs() -> Tensor:
    return of_tokens(1, 0.4, -1.5)


def ref_log_probs() -> Tensor:
    return of_tokens(2, 0.2, -1.5)


def advantages() -> Tensor:
    return of_tokens(3, 1.0, 0.0)


def gradients_of_own_loop() -> dict[tuple[str, str], tuple[Tensor, dict[str, float]]]:
    """On a rank: the recipe's gradient of every mode and form of loss, and the step's values."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from recipes import own_loop
    from recipes.kl_term import loss_with_kl

    def loss(batch: Any, microbatch: Any, log_probs: Tensor) -> Any:
        return microbatch.loss(-log_probs)  # the pair of the recipe is for models without per-token loss

    def with_kl(batch: Any, microbatch: Any, log_probs: Tensor) -> Any:
        names = ("old_log_probs", "ref_log_probs", "advantages")
        old, reference, of_tokens = (microbatch.local(batch[name]) for name in names)
        return loss_with_kl(microbatch, log_probs, old, reference, of_tokens, beta=BETA)

    def of_table(batch: Any, microbatch: Any, model: Any) -> Any:
        return model(microbatch.local(batch["tokens"]))

    state = start(cp=2)
    of_tokens = {"old_log_probs": old_log_probs(), "ref_log_probs": ref_log_probs(), "advantages": advantages()}
    forms = {"pair": (own_loop.policy_loss, False), "per token": (loss, True)}
    forms |= {"kl": (with_kl, False), "kl per token": (with_kl, True)}
    by_case = {}
    for mode, form in itertools.product((mode for mode in MODES if mode != "constant"), forms):
        batches = []
        for part in dealt(SAMPLES, state.get_data_parallel_rank(), 2, 3):
            packed = Batch(SAMPLES, part, 2)
            samples, numbers = packed.samples, packed.local_numbers(0, 1)
            batch = {"loss_masks": samples.loss_masks, "layout": samples.layout, "prompt_ids": samples.ids["prompt"]}
            batches.append(batch | {"tokens": numbers} | {name: of[numbers] for name, of in of_tokens.items()})
        function, per_token = forms[form]
        model = table_model(table(), per_token=per_token)
        schedule = get_forward_backward_func()
        values = own_loop.forward_backward(schedule, model, batches, function, mode, of_table)
        by_case[mode, form] = (
            model.module.losses.main_grad.clone(),
            {name: float(value) for name, value in values.items()},
        )
    return by_case


@pytest.mark.slow
def test_a_loop_of_ones_own_and_a_kl_term_have_the_oracles_gradient() -> None:
    bound = oracle.chain_error(1, oracle.num_tokens(SAMPLES))
    old, ref, of_tokens = (values.double() for values in (old_log_probs(), ref_log_probs(), advantages()))
    for by_case in run_ranks(4, gradients_of_own_loop):
        for (mode, form), (gradient, logged) in by_case.items():
            log_probs = torch.tensor(table()).double().requires_grad_()
            losses = -log_probs if form == "per token" else clipped(log_probs, old, of_tokens)
            # Without rollout ids, which the recipe does not pass: each sample is one.
            expected = {"pg_loss": oracle.step_loss(mode, as_samples(losses))}
            if "kl" in form:
                k3 = (ref - log_probs).exp() - 1 + log_probs - ref
                expected["kl"] = oracle.step_loss("sample_mean", as_samples(k3))
            whole = expected["pg_loss"] + BETA * expected.get("kl", torch.zeros(()))
            assert relative_error(gradient, torch.autograd.grad(whole, log_probs)[0]) < bound, (mode, form)
            assert logged.keys() == (expected if form in ("pair", "per token") else {"loss": whole, **expected}).keys()
            for name, value in expected.items():
                assert logged[name] == pytest.approx(float(value.detach()), rel=bound)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [[], ["*-*-"]], ids=["a GPTModel", "a HybridModel"])
def test_a_loop_of_ones_own_runs_as_it_is_launched(pattern: list[str], tmp_path: Path) -> None:
    """The copied file, with its companions; an update lowers the loss, and the first step is proved."""
    if pattern:
        skip_without("HybridModel")
    copy_example("own_loop", tmp_path)
    done = "".join(run_ranks(2, printed_by, tmp_path, "own_loop.py", *pattern))
    assert re.search(
        r"prompt_mean on the policy loss, aggregation proved on \d+ tokens of 6 samples, 3 prompts of 2\b", done
    )
    losses = [float(value) for value in re.findall(r"tensor\((-?\d\.\d+)", done)]
    assert len(losses) == 6
    assert sorted(losses, reverse=True)[::2] == sorted(set(losses), reverse=True)  # three steps, alike on both ranks


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["M*-", "*E*-"])
def test_layers_that_the_loop_has_not_are_refused(pattern: str, tmp_path: Path) -> None:
    skip_without("HybridModel")
    copy_example("own_loop", tmp_path)
    with pytest.raises(RankError, match=r"a layer pattern with another layer than attention \(\*\), MLP \(-\)"):
        run_ranks(2, printed_by, tmp_path, "own_loop.py", pattern)


# ---- a mode of one's own


@pytest.mark.slow
def test_a_mode_of_ones_own_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(RECIPES / "own_mode.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.match(r"(?s)SOUND: root_length is invariant.*20 draws", printed)
    assert "NOT SOUND: microbatch_mean is not invariant" in printed
    assert {"root_length", "microbatch_mean"} <= set(modes.available_modes())


# ---- other frameworks


def launch_line(recipe: str, tmp_path: Path) -> list[str]:
    """The words that the recipe hands to Python, or to an engine's launch script."""
    bash = shutil.which("bash")
    assert bash
    for name in "python3", "bash":
        fake = tmp_path / name
        fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        fake.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [bash, str(RECIPES / recipe), "--mine"]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.split()


def words_of_slime() -> list[str]:
    """The array of a launch script that has the recipe below it."""
    script = f'GRPO_ARGS=(--mine)\n{(RECIPES / "slime.sh").read_text()}\nprintf "%s\\n" "${{GRPO_ARGS[@]}}"'
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize(("recipe", "mode"), [("slime.sh", "sample_mean"), ("miles.sh", "token_mean")])
def test_the_flags_of_slime_and_miles(recipe: str, mode: str, tmp_path: Path) -> None:
    words = words_of_slime() if recipe == "slime.sh" else launch_line(recipe, tmp_path)
    assert "--mine" in words
    module, _, name = words[words.index("--custom-pg-loss-reducer-function-path") + 1].rpartition(".")
    assert module == slime.__name__
    assert getattr(slime, name).mode == mode
    counts = words[words.index("--custom-megatron-init-path") + 1]
    assert getattr(slime, counts.removeprefix(f"{slime.__name__}.")) is slime.count_steps
    assert ("--calculate-per-token-loss" in words) == (mode == "token_mean")  # else their division is by rollouts


def test_the_settings_of_verl(tmp_path: Path) -> None:
    words = launch_line("verl.sh", tmp_path)
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    assert resolve(f"verl:{settings.pop('actor_rollout_ref.actor.loss_agg_mode')}").mode.name == "sample_mean"
    assert list(settings) == ["+ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES"]
    (module,) = settings.values()
    assert (ROOT / f"{module.replace('.', '/')}.py").is_file()
