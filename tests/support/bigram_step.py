"""A step for engines whose batches are padded rows, on a model that is a table of logits: one row for each token id.

What must come out is stated in float64 apart from all that is tested: the clipped loss and a KL penalty, each by its
mode, as functions of the table.

No `World`: the engines' own code cuts the rows, calls the model and makes log-probs of its logits.
"""

import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import oracle
import torch
from checkouts import Framework, checkout, record_errors
from ranks import run_ranks
from table_step import relative_error, table_model
from torch import Tensor

VOCABULARY, LENGTH, BETA = 11, 17, 0.03
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
#: The rows of a step. A test of other rows puts its own here, and where these are imported, on its ranks.
ROWS = 12
CUTS = [(0, 1), (1, 4), (4, 6)]  # micro-batches, in sixths of a rank's rows
PROMPTS = [0, 0, 0, 0, 1, 1, 2, 3, 3, 4, 5, 5]
LATE, SPARSE, INVALID, SHORT = [1, 7], [10], [4], list[int]()  # see `make_batch`
SEED = 3
STAGES, FROZEN = 1, False  # of the model, see `table_model`
#: Numbers of further rows that are fully masked, and of those with a response of one token, in a launch's environment.
MASKED_ROWS, SHORT_ROWS = "ROWS_WITHOUT_TOKENS", "ROWS_OF_ONE_TOKEN"
#: Log-probs are float32 sums over the vocabulary.
TOLERANCE = 2e-6
Names = dict[str, Any]  # of this file, with other values


def on_these_rows(engine: str, rows: Names, root: str, cp: int, cases: list[Names]) -> Any:
    """On a rank: what the `train` of the engine's own file of tests returns for a step of other rows."""
    module = importlib.import_module(f"test_real_{engine}")
    for names in (globals(), vars(module)):
        names.update({name: value for name, value in rows.items() if name in names})
    return module.train(root, cp, cases)


def make_batch() -> dict[str, Tensor]:
    """Ragged rows of six prompts of one to four responses each; of two turns.

    The first token of a response is masked in the rows `LATE`, most tokens in `SPARSE`; `INVALID` rows are fully
    masked, and `SHORT` ones have a response of one token.
    """
    generator = torch.Generator().manual_seed(SEED)

    def drawn(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=generator)
    lengths = torch.randint(6, LENGTH + 1, (ROWS,), generator=generator)
    lengths[[*SHORT, *rows_in(SHORT_ROWS)]] = 4
    mask = torch.zeros(ROWS, LENGTH)
    for row, prompt in enumerate(PROMPTS):
        ids[row, :3] = torch.tensor([1 + prompt, 2, 1 + prompt])
        mask[row, 3 : lengths[row]] = 1
        mask[row, 5] = 0  # a tool's token
    mask[LATE, 3] = 0
    for row in SPARSE:
        mask[row, 3 : lengths[row]] = (drawn(int(lengths[row]) - 3) < 0.3).float()
        mask[row, 3] = 1
    valid = torch.ones(ROWS)
    valid[[*INVALID, *rows_in(MASKED_ROWS)]] = 0
    old = -2.4 + 0.3 * torch.randn(ROWS, LENGTH, generator=generator)
    return {
        "input_ids": ids,
        "input_lengths": lengths,
        "token_mask": mask,
        "sample_mask": valid,
        "advantages": torch.randn(ROWS, 1, generator=generator).expand(ROWS, LENGTH).clone(),
        "prev_logprobs": old,
        "generation_logprobs": old + 0.1 * torch.randn(ROWS, LENGTH, generator=torch.Generator().manual_seed(5)),
        "reference_policy_logprobs": old + 0.2 * torch.randn(ROWS, LENGTH, generator=generator),
        "prompts": torch.tensor(PROMPTS),
    }


def with_prompts(batch: dict[str, Tensor], ids: Sequence[int]) -> dict[str, Tensor]:
    """The rows with other prompts, whose tokens tell these ids apart."""
    tokens, numbers = batch["input_ids"].clone(), torch.tensor(ids)
    tokens[:, 0], tokens[:, 2] = 1 + numbers % 10, 1 + numbers // 10
    return batch | {"input_ids": tokens}


def rows_in(variable: str) -> list[int]:
    return [int(number) for number in os.environ.get(variable, "").split()]


def make_table() -> Tensor:
    return 0.6 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(4))


def logits(table: Tensor, ids: Tensor) -> Tensor:
    return table.view(VOCABULARY, -1)[ids.long()]


def bigram_model(**options: Any) -> Any:
    """The table as a model, in Megatron's own DDP."""
    of_model: dict[str, Any] = {"stages": STAGES, "frozen": FROZEN}
    return table_model(make_table().flatten().tolist(), forward=logits, **of_model, **options)


def right_log_probs() -> Tensor:
    """Of each token but the first of the rows, in float64."""
    ids = make_batch()["input_ids"]
    return make_table().double().log_softmax(-1)[ids[:, :-1], ids[:, 1:]]


def k3(log_probs: Tensor, reference: Tensor) -> Tensor:
    return (reference - log_probs).exp() - (reference - log_probs) - 1


def kl_of_nemo_rl(log_probs: Tensor, reference: Tensor) -> Tensor:
    """NeMo-RL's KL, with the gradient of the policy that it is an expectation over."""
    return k3(log_probs, reference) * (log_probs - log_probs.detach()).exp()


def expected(
    mode: str,
    settings: dict[str, Any],
    *,
    kl: Callable[[Tensor, Tensor], Tensor] | None = k3,
    of_samples: bool = False,
    corrected: bool = False,
    entropy: float = 0.0,
    weights: list[list[float]] | None = None,
    table: Tensor | None = None,
) -> tuple[float, Tensor, float]:
    """Value, gradient by table entry and scale of the step's loss; `corrected` for the sampler's log-probs.

    `entropy`: the coefficient of its bonus. `weights`: of the policy loss, in the place of the mode. `table`: after
    earlier steps.
    """
    batch, table = make_batch(), (make_table() if table is None else table).double().requires_grad_()
    ids = batch["input_ids"]
    log_probs = table.log_softmax(-1)[ids[:, :-1], ids[:, 1:]]
    old, reference = (batch[name][:, 1:].double() for name in ("prev_logprobs", "reference_policy_logprobs"))
    advantages = batch["advantages"][:, 1:].double()
    masks = batch["token_mask"][:, 1:].double() * batch["sample_mask"][:, None]
    log_ratio = log_probs - old
    if of_samples:
        token_mask = batch["token_mask"][:, 1:].double()
        log_ratio = ((log_ratio * token_mask).sum(-1) / token_mask.sum(-1))[:, None].expand_as(old)
    ratio = log_ratio.exp()
    policy = torch.maximum(-ratio * advantages, -ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantages)
    if corrected:
        gap = old - batch["generation_logprobs"][:, 1:].double()
        policy = policy * ((gap * masks).sum(-1, keepdim=True) if of_samples else gap).exp()
    of_policy = {name: value for name, value in settings.items() if name in ("divisor", "units")}
    scale = 0.0

    def step(mode: str, losses: Tensor, masks: Tensor, divisor: float | None = None, units: str = "all") -> Tensor:
        nonlocal scale
        samples = [oracle.Sample(losses[i], masks[i], None, prompt) for i, prompt in enumerate(PROMPTS)]
        scale += oracle.step_scale(mode, samples, divisor, units)
        return oracle.step_loss(mode, samples, divisor, units)

    if weights is None:
        loss = step(mode, policy, masks, **of_policy)
    else:
        loss = step("token_sum", policy, torch.tensor(weights, dtype=torch.float64))
    if kl is not None:
        of_kl = {} if "kl" in settings else of_policy
        loss = loss + BETA * step(settings.get("kl", mode), kl(log_probs, reference), masks, **of_kl)
    if entropy:
        of_entropy = {} if "entropy" in settings else of_policy
        rows = table[ids[:, :-1]].log_softmax(-1)
        loss = loss - entropy * step(settings.get("entropy", mode), -(rows.exp() * rows).sum(-1), masks, **of_entropy)
    (gradient,) = torch.autograd.grad(loss, table)
    return float(loss.detach()), gradient, scale


def errors_of(model: Any, case: dict[str, Any], value: float | None = None, **options: Any) -> dict[str, float]:
    """Errors of Megatron's gradient and of the reported loss; `options` as in `expected`."""
    right, by_entry, scale = expected(case["mode"], case["settings"], **options)
    in_gradient = relative_error(model.module.losses.main_grad.view_as(by_entry), by_entry)
    return {"gradient": in_gradient} | ({} if value is None else {"value": abs(value - right) / scale})


def bits_of(model: Any) -> bytes:
    """The gradient that Megatron arrived at."""
    bits: bytes = model.module.losses.main_grad.numpy().tobytes()
    return bits


def assert_proof_changes_nothing(
    train: Any, framework: Framework, cases: Sequence[dict[str, Any]], world: tuple[int, int] = (4, 2)
) -> None:
    """The gradient of each case is to the bit that of a step that is not measured."""
    both = [case | proof for case in cases for proof in ({}, {"proof": "off"})]
    for results in run_ranks(world[0], train, checkout(framework), world[1], both):
        bits = [outcome["bits"] for outcome in results]
        assert bits[::2] == bits[1::2]


def assert_exact(
    record_property: Any,
    train: Any,
    framework: Framework,
    cases: Sequence[dict[str, Any]],
    worlds: Sequence[tuple[int, int]] = ((1, 1), (4, 2)),
) -> None:
    """Every error on every rank, of launches of (ranks, context-parallel ranks), in cases that are our modes."""
    for ranks, cp in worlds:
        for results in run_ranks(ranks, train, checkout(framework), cp, cases):
            for case, outcome in zip(cases, results, strict=True):
                assert max(outcome["errors"].values()) < TOLERANCE, (case, outcome)
                record_errors(record_property, framework, "every mode", ours=outcome["errors"]["gradient"])


def compare(
    record_property: Any, train: Any, framework: Framework, cases: Sequence[dict[str, Any]], world: Any = (4, 2)
) -> list[Any]:
    """Rank 0's findings for each case: with the engine's own setting and, exact, with ours in the same step."""
    both = [case | {"stock": stock} for case in cases for stock in (case.get("stock", True), None)]
    outcomes = run_ranks(world[0], train, checkout(framework), world[1], both)[0]
    for case, *pair in zip(cases, outcomes[::2], outcomes[1::2], strict=True):
        own, ours = (outcome["errors"]["gradient"] for outcome in pair)
        assert ours < TOLERANCE, case
        record_errors(record_property, framework, case["setting"], own, ours)
    return list(zip(outcomes[::2], outcomes[1::2], strict=True))
