"""What the engines' page promises of changes in an engine's code: each is a plant, which tests run in each engine.

`PROMISES` says by change and engine what happens. Where it is not a term of `added_terms`, the plant is an edit in
`EDITS`, or a fault of that name among the engine's own in ``tests/engines/real``.
"""

from typing import Any, NamedTuple

from added_terms import TERMS

STOPS, NOT_PROVED, NOT_SEEN = "stops", "NOT PROVED", "not seen"
ENGINES = {
    "verl": "verl", "skyrl": "SkyRL", "nemo_rl": "NeMo-RL", "areal": "AReaL", "roll": "ROLL", "rlinf": "RLinf",
    "ms_swift": "ms-swift", "slime": "slime", "miles": "miles", "vime": "vime",
}  # fmt: skip
HOOKS = ("slime", "miles", "vime")
Edit = dict[str, tuple[str, str]]  # by file: what stands there, and what comes in its place


class Site(NamedTuple):
    """Where a term is added in the loss function: ``{}`` in `new`; the names of log-probs, old ones and the mask."""

    file: str
    old: str
    new: str
    names: tuple[str, str, str]


_VERL, _NEMO_RL = "verl/workers/utils/losses.py", "nemo_rl/algorithms/loss/loss_functions.py"
_AREAL, _ROLL = "areal/trainer/ppo/actor.py", "roll/pipeline/rlvr/actor_worker.py"
_RLINF, _MS_SWIFT = "rlinf/workers/actor/megatron_actor_worker.py", "swift/megatron/trainers/grpo_trainer.py"
_SKYRL = "skyrl/backends/skyrl_train/utils/ppo_utils.py"
_SKYRL_WORKER = "skyrl/backends/skyrl_train/workers/megatron/megatron_model_wrapper.py"
_SLIME, _VIME = (f"{engine}/backends/megatron_utils/loss.py" for engine in ("slime", "vime"))
_MILES, _MILES_LOSS_FUNCTION = (f"miles/backends/training_utils/{name}.py" for name in ("loss_hub/losses", "loss"))
_DISTILLATION, _LOSS_WITH_KL = "    # Joint Distillation KL Loss\n", "loss + args.kl_loss_coef * kl_loss"
_HOOK_NAMES = ("log_probs", "old_log_probs", "torch.ones_like(log_probs)")
SITES = {
    "verl": Site(
        _VERL, "return policy_loss,", "return policy_loss + {},", ("log_prob", "old_log_prob", "response_mask")
    ),
    "nemo_rl": Site(
        _NEMO_RL, "actor_loss + kl +", "actor_loss + kl + {} +", ("curr_logprobs", "prev_logprobs", "mask")
    ),
    "areal": Site(
        _AREAL, _DISTILLATION, "    loss = loss + {}\n" + _DISTILLATION, ("logprobs", "old_logp", "loss_mask")
    ),
    "roll": Site(
        _ROLL, "return total_loss, pg_metrics", "return total_loss + {}, pg_metrics",
        ("log_probs", "old_log_probs", "final_response_mask"),
    ),
    "rlinf": Site(
        _RLINF, "loss + kl_loss * self.kl_beta", "loss + kl_loss * self.kl_beta + {}",
        ("curr_logprobs", "old_logprobs", "mask"),
    ),
    "ms_swift": Site(
        _MS_SWIFT, "self.beta * per_token_kl", "self.beta * per_token_kl + {}",
        ("per_token_logps", "old_per_token_logps", "completion_mask"),
    ),
    "skyrl": Site(
        _SKYRL, "    clip_pg_losses1 = loss\n", "    clip_pg_losses1 = loss = loss + {}\n",
        ("log_probs", "old_log_probs", "loss_mask"),
    ),
    "slime": Site(_SLIME, _LOSS_WITH_KL, f"{_LOSS_WITH_KL} + {{}}", _HOOK_NAMES),
    "miles": Site(_MILES, _LOSS_WITH_KL, f"{_LOSS_WITH_KL} + {{}}", _HOOK_NAMES),
    "vime": Site(_VIME, _LOSS_WITH_KL, f"{_LOSS_WITH_KL} + {{}}", _HOOK_NAMES),
}  # fmt: skip

_TERM = dict.fromkeys(SITES, NOT_PROVED)
KL_MEAN, _UNMASKED = "KL penalty by the mean of a micro-batch", "mask dropped in the loss function"
_TERM_ADDED = "term added to the loss function"
ADDED = f"{_TERM_ADDED}: {next(iter(TERMS))}"
DOUBLED = "advantages or losses doubled before the sum"
SCALED, _RENAMED = "loss scaled", "function or argument renamed"
_AFTER = "term of {} added after the loss function"
_AFTER_LOG_PROBS, _AFTER_LOGITS = _AFTER.format("log-probs"), _AFTER.format("logits")
#: By change and engine, what happens; an engine that is not named has no such place.
PROMISES: dict[str, dict[str, str]] = {
    **{f"{_TERM_ADDED}: {term}": _TERM for term in TERMS},
    KL_MEAN: {
        **dict.fromkeys(("verl", "skyrl", "nemo_rl", "roll", "rlinf", "ms_swift"), STOPS),
        **dict.fromkeys(HOOKS, NOT_PROVED),
    },
    _UNMASKED: dict.fromkeys(ENGINES, STOPS),
    DOUBLED: dict.fromkeys(ENGINES, STOPS) | dict.fromkeys(HOOKS, NOT_SEEN),
    SCALED: dict.fromkeys(ENGINES, STOPS),
    _RENAMED: dict.fromkeys(ENGINES, STOPS),
    _AFTER_LOG_PROBS: dict.fromkeys(("verl", "skyrl", "nemo_rl", "areal", "ms_swift"), NOT_PROVED),
    _AFTER_LOGITS: {
        **dict.fromkeys(("nemo_rl", "areal", "roll"), STOPS),
        **dict.fromkeys(("skyrl", "ms_swift", *HOOKS), NOT_PROVED),
    },
}
#: Names of faults among an engine's own plants.
OWN: dict[str, dict[str, str]] = {
    KL_MEAN: {"skyrl": "KL mean inlined"},
    _UNMASKED: {"rlinf": "mask of all tokens"},
    DOUBLED: {
        "verl": "advantages doubled in the policy loss", "skyrl": "advantages doubled in the worker",
        "ms_swift": "advantages doubled in the loss",
    },
    SCALED: dict.fromkeys(ENGINES, "scaling doubled"),
    _RENAMED: {
        "verl": "argument of agg_loss renamed", "skyrl": "entropy by another function",
        "nemo_rl": "policy.train by another name", "areal": "method renamed", "roll": "argument renamed",
        "rlinf": "argument renamed", "ms_swift": "hooked method renamed", "slime": "its argument renamed",
        "miles": "option renamed", "vime": "option renamed",
    },
}  # fmt: skip
_IN_SKYRL = f"{12 * ' '}# Decoupled MTP / draft loss"
_NEMO_RL_KL_MEAN = (
    "kl = masked_mean(\n                    kl, mask, global_normalization_factor=global_valid_toks\n                )"
)
_LOSSES = "loss_mat=kld, loss_mask=response_mask, loss_agg_mode=config.loss_agg_mode, **config.global_batch_info"
_POLICY, _LOSS_FUNCTION = (
    {"slime": _SLIME, "miles": _MILES, "vime": _VIME},
    "loss, log = func(args, batch, logits, sum_of_sample_mean)\n",
)
_BY_MS_SWIFT = "partial(self.loss_func, data=data)"
_ADDED_BY_MS_SWIFT = "lambda x: (lambda loss, log: (loss + 0.1 * {}.mean(), log))(*self.loss_func(x, data))"
_MASKS = 'else batch["loss_masks"]\n'
EDITS: dict[str, dict[str, Edit]] = {
    KL_MEAN: {
        "verl": {_VERL: (f"agg_loss(\n            {_LOSSES}\n        )", "kld.mean()")},
        "nemo_rl": {_NEMO_RL: (_NEMO_RL_KL_MEAN, "kl = kl.mean()")},
        "roll": {_ROLL: ("= agg_loss(loss_mat=kl_loss", "= (lambda loss_mat, **_: loss_mat.mean())(loss_mat=kl_loss")},
        "rlinf": {_RLINF: ("self.loss_agg_func(kld, mask)", "kld.mean()")},
        "ms_swift": {_MS_SWIFT: ("self.beta * per_token_kl", "self.beta * per_token_kl.mean()")},
        **{engine: {file: ("= sum_of_sample_mean(kl)", "= kl.mean()")} for engine, file in _POLICY.items()},
    },
    _UNMASKED: {
        "verl": {_VERL: ('data["response_mask"].to(bool)', 'torch.ones_like(data["response_mask"]).to(bool)')},
        "nemo_rl": {_NEMO_RL: ("= token_mask * sample_mask", "= torch.ones_like(token_mask) * sample_mask")},
        "skyrl": {_SKYRL_WORKER: ('= data["loss_mask"]', '= torch.ones_like(data["loss_mask"])')},
        "areal": {_AREAL: ('input_data["loss_mask"].bool()', 'torch.ones_like(input_data["loss_mask"]).bool()')},
        "roll": {
            _ROLL: (
                'data.batch.get("final_response_mask", response_mask)\n        ref',
                'torch.ones_like(data.batch.get("final_response_mask", response_mask))\n        ref',
            )
        },
        "ms_swift": {
            _MS_SWIFT: ("= grpo_batch.completion_mask  #", "= torch.ones_like(grpo_batch.completion_mask)  #")
        },
        **{
            engine: {file: (_MASKS, f"else [torch.ones_like(mask) for mask in {_MASKS[5:-1]}]\n")}
            for engine, file in _POLICY.items()
        },
    },
    DOUBLED: {
        "nemo_rl": {_NEMO_RL: ('["advantages"][:, 1:]', '["advantages"][:, 1:] * 2')},
        "areal": {_AREAL: ('advantages = input_data["advantages"]', 'advantages = 2 * input_data["advantages"]')},
        "roll": {_ROLL: ('advantages = data.batch["advantages"]', 'advantages = 2 * data.batch["advantages"]')},
        "rlinf": {_RLINF: ('advantages = batch["advantages"]', 'advantages = 2 * batch["advantages"]')},
        **{engine: {file: ("reducer(pg_loss)", "reducer(2 * pg_loss)")} for engine, file in _POLICY.items()},
    },
    _AFTER_LOG_PROBS: {
        "skyrl": {
            _SKYRL_WORKER: (_IN_SKYRL, f"{12 * ' '}policy_loss += 0.1 * action_log_probs.exp().mean()\n{_IN_SKYRL}")
        },
        "nemo_rl": {
            "nemo_rl/algorithms/loss/wrapper.py": (
                "loss_accum += loss\n", "loss_accum += loss + 0.1 * loss_input['next_token_logprobs'].exp().mean()\n"
            )
        },
        "verl": {
            "verl/workers/engine/megatron/transformer_impl.py": (
                '= loss * data["num_micro_batch"]',
                '= (loss + 0.1 * model_output["log_probs"].exp().mean()) * data["num_micro_batch"]',
            )
        },
        "areal": {
            "areal/engine/megatron_engine.py": (
                "return loss * loss_scale", "return loss * loss_scale + 0.1 * logprobs.exp().mean()"
            )
        },
        "ms_swift": {
            _MS_SWIFT: (
                _BY_MS_SWIFT,
                _ADDED_BY_MS_SWIFT.format("x.exp()"),
            )
        },
    },
    _AFTER_LOGITS: {
        "ms_swift": {
            _MS_SWIFT: (
                _BY_MS_SWIFT,
                _ADDED_BY_MS_SWIFT.format("logits_packed.sigmoid()"),
            )
        },
        "skyrl": {_SKYRL_WORKER: (_IN_SKYRL, f"{12 * ' '}policy_loss += 0.1 * logits.sigmoid().mean()\n{_IN_SKYRL}")},
        "areal": {
            "areal/engine/megatron_engine.py": (
                "return loss * loss_scale", "return loss * loss_scale + 0.1 * output.sigmoid().mean()"
            )
        },
        **{
            engine: {file: (_LOSS_FUNCTION, f"{_LOSS_FUNCTION}    loss = loss + 0.1 * logits.sigmoid().mean()\n")}
            for engine, file in (_POLICY | {"miles": _MILES_LOSS_FUNCTION}).items()
        },
        "nemo_rl": {
            "nemo_rl/models/megatron/train.py": (
                "return loss * num_microbatches / cp_size, metrics",
                "return loss * num_microbatches / cp_size + 0.1 * args[0].exp().mean(), metrics",
            )
        },
        "roll": {
            "roll/distributed/strategy/megatron_strategy.py": (
                "return loss, metrics\n            return output_tensor",
                "return loss + 0.1 * output_tensor.sigmoid().mean(), metrics\n            return output_tensor",
            )
        },
    },
}  # fmt: skip


def table() -> str:
    """The page's table; changes of one kind that end alike are one row."""
    rows: list[list[str]] = []
    for change, outcomes in PROMISES.items():
        of_outcome: dict[str, list[str]] = {}
        for engine, name in ENGINES.items():
            of_outcome.setdefault(outcomes.get(engine, "no such place"), []).append(name)
        most = max(of_outcome, key=lambda outcome: len(of_outcome[outcome]))
        ends = [most, *(f"{', '.join(names)}: {end}" for end, names in of_outcome.items() if end != most)]
        kind, _, what = change.partition(": ")
        if what and rows and rows[-1][0].startswith(kind) and rows[-1][1] == "; ".join(ends):
            rows[-1][0] += f"; {what}"
        else:
            rows.append([change, "; ".join(ends)])
    return "\n".join(f"| {change} | {ends} |" for change, ends in [["change", "ends"], ["---"] * 2, *rows]) + "\n"


def own_faults(module: Any, engine: str) -> set[str]:
    """The names of an engine's own plants, of its module of tests; of "slime_miles" those of its three engines."""
    plants = module.PLANTS
    if isinstance(plants, dict):
        plants = plants.get(engine) or [plant for those in plants.values() for plant in those]
    return {plant.fault for plant in (*plants, *getattr(module, "OF_TRAINER", ()))}
