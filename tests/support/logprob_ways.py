"""Values and gradients of log-probs, entropy, divergence and a loss of them, in every way and case of `head_oracle`."""

import functools
from typing import Any

import head_oracle
import numpy as np
import torch
from head_oracle import (
    BOTH,
    BOUNDS,
    CASES,
    HIDDEN,
    TOKENS,
    VOCABULARY,
    Outputs,
    Wanted,
    batch_of,
    inputs_of,
    relative,
)

from megatron_rl_loss import OutputLayer, Teacher, log_probs_from_hidden, log_probs_from_logits, loss_from_hidden
from megatron_rl_loss.logprobs.kept_ids import KeptIds

WAYS = ("logits", "two passes", "one pass")
#: From logits there is no divergence.
WAYS_OF = [(way, name) for way in WAYS for name in CASES if way != "logits" or "teacher" not in CASES[name]]
#: What the layer is told, not the function.
OF_LAYER = {"temperature", "vocab_size", "chunk_tokens", "main_gradient"}
Parallel = dict[str, Any]


def leaves_of(name: str, dtype: torch.dtype = torch.float32, parallel: Parallel | None = None) -> Outputs:
    """This rank's leaves: its part of the vocabulary and, with sequence parallelism, of tokens."""
    batch, group = inputs_of(name, dtype)[0], (parallel or {}).get("group")
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    columns = slice(rank * VOCABULARY // size, (rank + 1) * VOCABULARY // size)
    mine = slice(rank * TOKENS // size, (rank + 1) * TOKENS // size)
    mine = mine if (parallel or {}).get("sequence_parallel") else slice(None)
    leaves = {"hidden": batch.hidden[mine], "weight": batch.weight[columns], "bias": batch.bias[columns]}
    return {
        key: leaf.to(dtype).requires_grad_() for key, leaf in leaves.items() if key != "bias" or CASES[name].get("bias")
    }


def teacher_of(name: str, dtype: torch.dtype, device: torch.device, parallel: Parallel) -> dict[str, Any]:
    """This rank's teacher: its part of the vocabulary and, for hidden states with sequence parallelism, of tokens."""
    taught, group = inputs_of(name, dtype)[0].taught, parallel.get("group")
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    columns = slice(rank * VOCABULARY // size, (rank + 1) * VOCABULARY // size)
    mine = slice(rank * TOKENS // size, (rank + 1) * TOKENS // size)
    mine = mine if parallel.get("sequence_parallel") and "temperature" in CASES[name]["teacher"] else slice(None)
    if CASES[name].get("logits"):
        shard = {"hidden": (taught["hidden"] @ taught["weight"].T)[:, columns]}
    else:
        shard = {"hidden": taught["hidden"][mine].to(dtype), "weight": taught["weight"][columns].to(dtype)}
    return {key: tensor.to(device) for key, tensor in shard.items()} | CASES[name]["teacher"]


def values_of(
    way: str, name: str, leaves: Outputs, wanted: Wanted = BOTH, parallel: Parallel | None = None, **more: Any
) -> Outputs:
    """The same as `expected_of` but gradients, of the code under test."""
    hidden, weight, bias = leaves["hidden"], leaves["weight"], leaves.get("bias")
    (batch, labels, mask, options), parallel = inputs_of(name, hidden.dtype), parallel or {}
    group, device = parallel.get("group"), hidden.device
    first = 0 if group is None else group.rank() * len(weight)
    exact = torch.promote_types(hidden.dtype, torch.float32)
    labels = labels.index_fill(0, (~mask).nonzero()[:, 0], -100).to(device)
    weights = (batch.weights * mask).to(exact)
    keep = batch.keep[:, first : first + len(weight)] if CASES[name].get("keep") else None
    options |= {"keep": keep, "entropy": wanted[1] != 0, "token_mask": mask, **more}
    loss = functools.partial(head_oracle.losses_of, wanted=wanted)
    near = batch.near.to(device, exact)
    log_probs: Any
    entropy: Any
    if way == "logits":
        logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
        log_probs, entropy = log_probs_from_logits(logits, labels, tp_group=group, **options)
    else:
        layer_options = {key: options.pop(key) for key in OF_LAYER & options.keys()}
        layer_options |= {name: value for name, value in parallel.items() if name != "group"}
        layer = OutputLayer(weight, bias, tp_group=group, **layer_options)
    divergence, taught = None, dict[str, Any]()
    if "teacher" in CASES[name]:
        taught = teacher_of(name, hidden.dtype, device, parallel)
        options["teacher"] = Teacher(**taught)
    if way == "two passes" and taught:
        log_probs, entropy, divergence = log_probs_from_hidden(hidden, layer, labels, **options)
    elif way == "two passes":
        log_probs, entropy = log_probs_from_hidden(hidden, layer, labels, **options)
    if way == "one pass":
        inputs = {"near": near.masked_fill(weights.to(device) == 0, torch.nan)}  # is ignored there
        share, values = loss_from_hidden(hidden, layer, labels, weights, loss, inputs, **options)
        assert set(values) - {"entropy", "divergence"} == {"log_probs", "losses", "mixed"}
        assert not any(value.requires_grad for value in values.values())
        log_probs, entropy, divergence = (values.get(key) for key in ("log_probs", "entropy", "divergence"))
    else:
        share = (loss(log_probs, entropy, near, divergence)[0] * weights.to(device)).sum()
    results = {"log_probs": log_probs, "share": share, "entropy": entropy, "divergence": divergence}
    return {key: value for key, value in results.items() if value is not None}


def results_of(way: str, name: str, dtype: torch.dtype, wanted: Wanted, parallel: Any = None, **more: Any) -> Outputs:
    leaves = leaves_of(name, dtype, parallel)
    results = values_of(way, name, leaves, wanted, parallel, **more)
    assert {value.dtype for value in results.values()} == {torch.promote_types(dtype, torch.float32)}
    (results["share"] * 3).backward()
    gradients: dict[str, Any] = {key: leaf.grad for key, leaf in leaves.items()}
    assert {gradient.dtype for gradient in gradients.values()} == {dtype}
    results |= {key: gradient.double() / 3 for key, gradient in gradients.items()}
    return {key: value.detach() for key, value in results.items()}


def check(results: Outputs, expected: Outputs, dtype: torch.dtype, bound: float | None = None) -> None:
    assert set(results) == set(expected)
    for key, value in expected.items():
        if value.abs().max() > 0:
            assert relative(results[key], value) <= (bound or BOUNDS[dtype]), key
        else:
            assert results[key].count_nonzero() == 0, key


def kept_ids() -> KeptIds:
    """The mask of the case "kept ids", ragged."""
    keep = batch_of(TOKENS, VOCABULARY, HIDDEN).keep.numpy()
    return KeptIds(torch.from_numpy(keep.nonzero()[1]), np.append(0, keep.sum(1).cumsum()))
