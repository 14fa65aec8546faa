"""What the engines' pages promise, in lists and in sentences, and what shows each: the pages' lists are made from here.

A `Launch` and a `Change` run in ``tests/engines/real/test_real_promises.py``; a `Fault` is a plant of the engine's own
file there. Of another test, `Tested`, tests/package looks whether it is there.
"""

import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

from checkouts import Settings
from peer_steps import later_tokens_more
from promises import ADDED, DOUBLED, ENGINES, HOOKS, KL_MEAN, NOT_PROVED, NOT_SEEN, SCALED, STOPS

STEP: dict[str, Any] = {"mode": "prompt_mean", "settings": {}}


class Launch(NamedTuple):
    """A step of an engine's `train` with those settings, and other code if there are edits.

    Attributes:
        case: its settings; ``outcome`` is that of the proof, or "stops" for an error on all ranks.
        says: a pattern of the error, or of what the first rank prints where the engine's `train` looks at that.
        world: ranks, and context-parallel ones.
        edits: by file, what stands there and what comes in its place.
    """

    case: dict[str, Any]
    says: str = ""
    world: tuple[int, int] = (1, 1)
    edits: dict[str, tuple[str, str]] = {}  # noqa: RUF012

    @property
    def stops(self) -> bool:
        return self.case.get("outcome", "stops" if self.says else "proved") == "stops"


class Fault(NamedTuple):
    """The name of one of the engine's own plants, in that file of ``tests/engines/real``."""

    name: str
    engine: str = ""


class Tested(NamedTuple):
    """Another test by ``path::name``, whose code, or the tables that it names, have those words."""

    where: str
    setting: str


class Source(NamedTuple):
    """A file of the engine's that lacks a text."""

    file: str
    lacks: str


class Change(NamedTuple):
    """A change of `promises.PROMISES`, in each of these engines."""

    name: str
    engines: tuple[str, ...]


Shown = Launch | Fault | Tested | Source | Change


class Promise(NamedTuple):
    words: str
    shown: tuple[Shown, ...]


def stops(words: str, says: str, *cases: dict[str, Any], world: tuple[int, int] = (1, 1)) -> Promise:
    """Each of the cases ends with that error."""
    return Promise(words, tuple(Launch(STEP | case, says, world) for case in cases))


def unproved(words: str, *cases: dict[str, Any], outcome: str = "not proved") -> Promise:
    return Promise(words, tuple(Launch(STEP | {"outcome": outcome} | case) for case in cases))


def shown(words: str, *by: Shown) -> Promise:
    return Promise(words, by)


# ---- groups of prompts: what becomes of wrong ids

Ids = list[int]


def _with(row: int, prompt_id: int, ids: Ids) -> Ids:
    return [*ids[:row], prompt_id, *ids[row + 1 :]]


#: By fault, the ids of rows that were generated for the prompts of these ids, in their order.
FAULTS: dict[str, Callable[[Ids], Ids]] = {
    "two prompts with one id": lambda ids: [ids[0] if i == ids[ids.count(ids[0])] else i for i in ids],
    "one prompt with two ids": lambda ids: _with(0, 1 + max(ids), ids),
    "an id for each row": lambda ids: [*range(len(ids))],
    "a row in the next group": lambda ids: _with(ids.count(ids[0]), ids[0], ids),
    "ids moved by a row": lambda ids: ids[-1:] + ids[:-1],
}
IN_PART = "PROVED IN PART"


class Groups(NamedTuple):
    """A row of the table: an engine, what says how many samples a prompt has, and what becomes of each of `FAULTS`.

    `case` are the settings of its `train`; without it, `by` is the test that plants them.
    """

    engine: str
    words: tuple[str, str]
    outcomes: tuple[str, str, str, str, str]
    case: dict[str, Any] | None = None
    by: Tested | None = None


_ALL, _BY_TOKENS = (NOT_PROVED,) * 5, (NOT_PROVED, NOT_SEEN, NOT_PROVED, NOT_PROVED, NOT_SEEN)
_UNSAID, _BY_TOKENS_UNSAID = (IN_PART, IN_PART, *_ALL[2:]), (IN_PART, IN_PART, NOT_PROVED, IN_PART, IN_PART)
_NORM: dict[str, Any] = {"config": {"adv_norm": Settings(mean_level="group", group_size=4)}}
GROUPS = [
    Groups("ms_swift", ("ms-swift's", "`num_generations`"), _ALL, {}),
    Groups("nemo_rl", ("NeMo-RL's", "`group_size=` of `aggregate`"), _ALL, {"settings": {"group_size": 4}}),
    Groups("roll", ("ROLL's", "`num_return_sequences_in_group`"), _ALL, {"group_size": 4}),
    Groups(
        "areal", ("AReaL's", "`group_size=` of `aggregate`"), (STOPS, *_ALL[1:]),
        {"settings": {"group_size": 4}},
    ),
    Groups("areal", ("AReaL's", "group normalisation"), _ALL, _NORM),
    Groups("areal", ("AReaL", "if nobody says it"), _UNSAID, {}),
    Groups("nemo_rl", ("NeMo-RL", "if nobody says it"), _UNSAID, {"group_size": None}),
    Groups("roll", ("ROLL", "if nobody says it"), _UNSAID, {"group_size": None}),
    Groups("rlinf", ("RLinf", "if nobody says it"), _BY_TOKENS_UNSAID, {"group_size": None}),
    Groups("skyrl", ("SkyRL", "if nobody says it"), _BY_TOKENS_UNSAID, {"group_size": None}),
    Groups("rlinf", ("RLinf's", "`algorithm.group_size`"), _BY_TOKENS, {"group_size": 4}),
    Groups("skyrl", ("SkyRL's", "`group_size=` of the loss"), _BY_TOKENS, {"settings": {"group_size": 4}}),
    Groups(
        "verl", ("verl's recipe", "`actor.rollout_n`"), _BY_TOKENS,
        by=Tested("tests/engines/real/test_real_verl.py::test_groups_that_rollout_n_does_not_explain_are_not_proved",
                "one prompt with two ids"),
    ),
    Groups(
        "", ("`train_rl.py`'s `--grpo-group-size`, Megatron-Bridge's", "`group_size=`"), _BY_TOKENS,
        by=Tested("tests/engines/test_megatron_rl.py::test_wrong_ids_of_prompts_are_not_proved", "FAULTS"),
    ),
]  # fmt: skip


# ---- the lists of each page

_BATCHES, _COUNTS = "tests/engines/test_weighed_batches.py", "tests/engines/test_step_counts.py"
_REAL = "tests/engines/real/test_real_{}.py"
_OF_ROLL = f"{_REAL.format('roll')}::test_a_worker_that_trains_without_the_class_says_so"
_START = _REAL.replace("real_", "start_")
_HOOKS, _VERL = _REAL.format("slime_miles"), _REAL.format("verl")
_OF_COUNTS = "tests/engines/test_verl.py::test_counts_of_a_part_of_the_step_are_refused"
_GSPO = {"importance_sampling_level": "sequence"}
_BY_SAMPLES = {"token_level_loss": False, "sequence_level_importance_ratios": True}
#: By page and heading, what stands there.
LISTS: dict[str, dict[str, list[Promise]]] = {
    "areal": {
        "Refused": [
            stops("`m2_threshold`", "m2_threshold with a loss aggregation", {"config": {"m2_threshold": 0.04}}),
            stops(
                "GSPO in a mode whose weights differ within a sample", "Set importance_sampling_level=token",
                {"mode": later_tokens_more, "config": _GSPO},
            ),
            stops(
                "in a process that imported your class, an update by AReaL's own",
                r"ppo_update of MegatronPPOActor, beside aggregate\(Actor, ", {"own_class": True},
            ),
        ],
        "Not proved": [
            shown("FSDP", Tested(f"{_BATCHES}::test_areal_trains_on_weighted_advantages", "NOT PROVED")),
            unproved("one group, or groups of one row, of which nobody said the size", {"ids": [0] * 12},
                     {"ids": [*range(12)]}),
        ],
        "Proved in part": [
            unproved("groups of which nobody said the size, but for those of the next line", {},
                     outcome="proved in part"),
        ],
    },
    "ms_swift": {
        "Refused": [
            stops("every `--loss_type` but `cispo` and `dapo`", "--loss_type .* with a loss aggregation",
                  *({"loss": kind} for kind in ("grpo", "bnpo", "dr_grpo"))),
            stops("modes by prompt with images", "for prompts with images or other media", {"images": True}),
            shown("a loss function that multiplies the policy loss by another factor than the number of micro-batches",
                  Fault("advantages doubled in the loss")),
        ],
        "Not proved": [
            unproved("`cispo` with `--epsilon_high` below 0.05", {"loss": "cispo", "epsilon_high": 0.03}),
        ],
    },
    "nemo_rl": {
        "Refused": [
            shown("training with another `ClippedPGLossFn`", Fault("the driver's own loss kept")),
            stops("a second `aggregate`", "train, which has a loss aggregation already", {"twice": True}),
            stops("`positive_example_nll_weight`", "grpo_train passes no rewards",
                  {"cfg": {"positive_example_nll_weight": 0.5}}),
            shown("`data_plane.enabled`", Fault("policy.train by another name")),
            stops("with `token_level_loss=false`, weights that differ within a sample", "Set token_level_loss=true",
                  {"mode": later_tokens_more, "cfg": _BY_SAMPLES}),
        ],
        "Not served": [
            shown("`run_grpo_single_controller.py`, which has no `policy.train`",
                  Source("nemo_rl/algorithms/single_controller.py", "policy.train(")),
        ],
        "Not proved": [
            shown("workers other than Megatron's",
                  Tested(f"{_BATCHES}::test_workers_of_nemo_rl_without_megatron_are_not_proved", "NOT PROVED")),
            Promise("CP above 1 with top-k or top-p and a KL penalty", (Launch(
                STEP | {"sampling": Settings(top_k=3, top_p=0.9), "outcome": "not proved"}, world=(2, 2)),)),
        ],
    },
    "rlinf": {
        "Refused": [
            stops("other values of these two settings", "Set (loss_agg_func=token-mean|use_valid_token_scale=True)",
                  {"scale": False}, {"loss_agg_func": "seq-mean-token-mean"}, world=(2, 1)),
            stops("the pipeline mode", "the pipeline mode .* Choose another placement", {"pipeline": True}),
            stops("modes by prompt with images", "for prompts with images or other media", {"images": True}),
            shown("in a driver that imported your class, a worker group of `MegatronActor`",
                  Tested(f"{_REAL.format('rlinf')}::test_a_group_of_another_class_does_not_train_unnoticed", "launch")),
        ],
        "Aborts": [
            stops("`early_stop_imp_ratio`, if it drops a micro-batch of the first step",
                  "the first training step does something else", {"config": {"early_stop_imp_ratio": 1.01}}),
        ],
        "Not exact": [
            shown("`entropy_bonus`: its weights are right, but `a3816b59` computes a wrong gradient of the entropy",
                  Tested(f"{_REAL.format('rlinf')}::test_terms_beside_the_policy_loss_are_proved", "with_theirs")),
        ],
        "Not proved": [
            Promise("without a KL penalty, what RLinf does to log-probs before it calls `policy_loss`",
                    (Launch(STEP | {"beta": 0.0, "outcome": "proved"}, edits={
                        "rlinf/workers/actor/megatron_actor_worker.py": (
                            "                    :, -response_len - 1 : -1\n                ].contiguous()\n\n"
                            "                advantages",
                            "                    :, -response_len:\n                ].contiguous()\n\n"
                            "                advantages",
                        )}),)),
        ],
    },
    "roll": {
        "Refused": [
            stops("`apply_loss_scale: false`", "Set apply_loss_scale: true", {"apply_loss_scale": False}),
            stops("another `loss_agg_mode`", "Set loss_agg_mode: token-mean", {"loss_agg_mode": "seq-mean-token-mean"},
                  world=(2, 1)),
            stops("`kimi15`", "Set another pg_variant", {"config": {"pg_variant": "kimi15"}}),
            stops("weights by difficulty or length", "Remove them",
                  *({"config": {f"{what}_loss_weight": 0.5}} for what in ("difficulty", "length"))),
            stops("`importance_sampling: seq` in a mode whose weights differ within a sample",
                  "Set importance_sampling: token",
                  {"mode": later_tokens_more, "config": {"importance_sampling": "seq"}}),
            stops("a mode by prompt with images and without `traj_group_id`", "for prompts with images or other media",
                  {"images": True}),
            shown("in a worker that imported your class, training with another strategy than `megatron_train`",
                  Tested(_OF_ROLL, "fsdp2_train")),
        ],
        "Not in force": [
            shown("a worker that trains nothing may have another strategy, and prints `NOT IN FORCE`",
                  Tested(_OF_ROLL, "NOT IN FORCE")),
        ],
    },
    "skyrl": {
        "Refused": [
            stops("`token_mean_legacy`", "loss_reduction=token_mean_legacy: .* Choose 'token_mean'",
                  *({"mode": "token_mean", "reduction": "token_mean_legacy"} | off for off in ({}, {"proof": "off"})),
                  world=(2, 1)),
            stops("modes by prompt with images", "for prompts with images or other media",
                  {"columns": ["pixel_values"]}),
            stops("several `forward_backward` calls before `optim_step`",
                  "gradients of another call.*call optim_step after each", {"mode": "token_mean", "calls": 2},
                  world=(2, 1)),
            stops("rows of several samples, as SkyRL's collator for SFT makes them", "rows of several samples",
                  {"mode": "token_mean", "columns": ["sub_seq_lengths"]}),
            shown("FSDP", Tested(f"{_BATCHES}::test_skyrl_where_it_could_not_be_exact", "trainer.strategy=megatron")),
        ],
        "Not proved": [
            Promise("what SkyRL's functions of packed entropies and of MTP make of the library's weights",
                    (Launch(STEP | {"outcome": "proved"}, edits={
                        "skyrl/backends/skyrl_train/distributed/megatron/model_utils.py": (
                            "entropy_for_loss = local_entropy_sum / global_count",
                            "entropy_for_loss = 2 * local_entropy_sum / global_count")}),)),
        ],
    },
    "slime_miles_vime": {
        "Refused": [
            shown("by `count_steps`, a launch without a hook, since the engines ignore misspelt options",
                  Fault("option misspelt", "slime_miles"),
                  Tested(f"{_COUNTS}::test_launches_that_cannot_be_counted_are_refused", "ignores options")),
            shown("multi-LoRA, and independent DP replicas of miles",
                  Tested(f"{_COUNTS}::test_launches_that_cannot_be_counted_are_refused", "multi_lora"),
                  Tested(f"{_COUNTS}::test_launches_that_cannot_be_counted_are_refused", "indep_dp")),
            shown("`sample_mean` for rollouts that are split into samples", Tested(f"{_HOOKS}::test_refused", "split")),
            shown("without `count_steps`, `token_mean` if a sample has no token",
                  Tested(f"{_HOOKS}::test_refused", "masked")),
            shown("and miles's `bshd` under CP",
                  Tested("tests/engines/test_slime.py::test_hooks_by_path_ask_megatron_for_the_cp_place_and_the_step",
                       "bshd")),
        ],
        "Aborts": [
            shown("a first step whose losses are not those of all its data, each once",
                  Fault("a micro-batch left out", "slime_miles"), Fault("a micro-batch twice", "slime_miles")),
        ],
        "Not proved": [
            shown("what the engine does to losses before it calls the hook", Change(DOUBLED, HOOKS)),
            shown("a KL penalty or entropy that the engine's own reducer did not return", Change(KL_MEAN, HOOKS)),
            shown("pipeline parallelism without `count_steps`",
                  Tested(f"{_HOOKS}::test_a_pipeline_without_counts_is_not_proved", "pipeline_model_parallel_size")),
            shown("miles's FSDP, which takes `sample_mean` and `constant_L`",
                  Tested(f"{_REAL.format('miles_fsdp')}::test_fsdp_of_miles", "NOT PROVED")),
        ],
    },
    "bridge": {
        "Refused": [
            shown("a forward step with Bridge's own loss",
                  Tested(f"{_REAL.format('bridge')}::test_its_own_forward_step_is_refused_on_all_ranks",
                       "did not hand out")),
        ],
    },
    "train_rl": {
        "Refused": [
            shown("`--check-for-spiky-loss`",
                  Tested(f"{_REAL.format('train_rl')}::test_what_is_refused", "--check-for-spiky-loss")),
            shown("every mode but `token_mean` without `--loss-aggregation-units active`, since `train_rl.py` adds "
                  "fully masked rows",
                  Tested(f"{_REAL.format('train_rl')}::test_what_is_refused", "Add --loss-aggregation-units active")),
        ],
    },
    "verl": {
        "Refused": [
            shown("`seq-mean-token-sum-norm` without `loss_scale_factor`",
                  Tested(_OF_COUNTS, "Set actor.loss_scale_fac")),
            shown("a missing or too small `batch_num_tokens` or `global_batch_size`",
                  Tested(_OF_COUNTS, '"batch_num_tokens": None'), Tested(_OF_COUNTS, '"global_batch_size": None'),
                  Tested(f"{_VERL}::test_a_count_that_some_ranks_exceed_stops_all_ranks", "DP * CP")),
            shown("the losses `geo_mean`, `clip_cov` and `kl_cov`",
                  Tested(f"{_VERL}::test_policy_losses_that_depend_on_the_cut_are_refused",
                       '"geo_mean", "clip_cov", "kl_cov"')),
            shown("a term that does not call `agg_loss`",
                  Tested(f"{_VERL}::test_a_term_by_another_aggregator_is_refused", "kl_loss = agg_loss(")),
            shown("a KL penalty other than that of `kl_loss_type`", Fault("KL of another estimator")),
        ],
        "Aborts": [
            shown("a loss function that trains on tokens that the batch masks",
                  Fault("mask shifted in ppo_loss")),
        ],
        "Not proved": [
            shown("FSDP", Tested("tests/engines/test_verl.py::test_steps_of_another_engine_are_said_not_to_be_proved",
                               "only steps of verl's Megatron engine")),
            shown("a loss function that leaves out tokens of the batch's mask, as rejection does",
                  Tested("tests/engines/test_verl.py::test_a_loss_function_may_leave_tokens_of_the_batch_out",
                       "leaves out")),
            shown("the gather of log-probs",
                  Tested(f"{_VERL}::test_what_the_gather_of_log_probs_does_to_gradients_is_not_seen", "cp_rank")),
            shown("a first step that is a smaller last mini-batch, for which verl divides by too many samples",
                  Tested(f"{_VERL}::test_a_mini_batch_smaller_than_verl_was_told_is_not_proved", "NOT PROVED")),
        ],
    },
}  # fmt: skip


#: By page, further sentences and rows of tables that promise something, as they stand there.
SENTENCES: dict[str, dict[str, tuple[Shown, ...]]] = {
    "engines": {
        "Each engine's page has the lines that give its policy loss a mode, and what they cover and refuse.": (),
        "| [SkyRL](engines/skyrl.md) | `uv run --with`; without `uv`, `SKYRL_PYTHONPATH_EXPORT=1` and `PYTHONPATH` | "
        "the registration left out; with it, another `policy_loss_type` aborts the first step |": (
            Fault("another loss than was registered", "skyrl"),
            Tested(f"{_START.format('skyrl')}::test_a_launch_with_another_loss_stops", "regular"),
        ),
        "After the first step the first worker prints `megatron_rl_loss: prompt_mean on AReaL's policy loss, "
        "aggregation proved on 74 tokens of 12 samples, ...`, or `NOT PROVED` and the reason.": (
            Change(DOUBLED, (*ENGINES,)), Change(ADDED, (*ENGINES,)),
        ),
        "If a weight is wrong, [the step aborts](proof.md).": (Change(SCALED, (*ENGINES,)),),
        "*Stops* means that the step ends with an error.": (),
        "If nobody says the number, right ids give PROVED IN PART.": (
            Tested(f"{_REAL.format('rows')}::test_groups_of_which_nobody_said_the_size", "proved in part"),
        ),
        "SkyRL's trainer groups the policy loss by ids of its own; its driver's line says NOT PROVED if these disagree "
        "with the prompt tokens.": (
            Tested(f"{_REAL.format('skyrl')}::test_prompts_that_other_rows_have_are_not_proved", "NOT PROVED"),
        ),
        "*Stops* means that all ranks abort before the optimizer, *NOT PROVED* that the line says "
        "so, *not seen* that the step is proved all the same:": (),
        "If a loss clamps even this trial, it is not proved.": (
            Tested(f"{_REAL.format('nemo_rl')}::test_clamps_of_the_kl_penalty_are_no_faults", "not proved"),
            Tested("tests/engines/test_policy_tap.py::test_clamps_are_no_evidence_and_losses_that_are_not_linear_are",
                 "clamped"),
        ),
    },
    "ms_swift": {
        "Pass it to `megatron rlhf`; `swift rollout` and `swift rlhf` refuse it:": (
            Tested(f"{_START.format('ms_swift')}::"
                 "test_a_plugin_is_refused_where_another_trainer_runs", "`swift rlhf` and `swift rollout`"),
        ),
    },
    "skyrl": {
        "If a weight is wrong, the trainer stops.": (Fault("prompt means divided by rows", "skyrl"),),
    },
    "slime_miles_vime": {
        "If one has another weight, the step is NOT PROVED.": (
            Tested(f"{_HOOKS}::test_terms_of_other_weights_are_said", "KL penalty times 10"),
        ),
    },
    "verl": {
        "Each process that verl starts in Ray imports this module before anything else of verl, or ends with an "
        "error.": (
            Tested("tests/engines/real/test_launch_scripts.py::test_a_module_that_is_not_there_ends_a_process_of_verl",
                 "ends"),
        ),
        "| `1dda039b` | every `loss_agg_mode` | refuses `seq-mean-token-mean` in the first update |": (
            Tested(f"{_VERL}::test_every_mode_in_its_megatron_engine", "seq-mean-token-mean"),
        ),
        "The refusal is verl's own.": (Tested(f"{_VERL}::test_every_mode_in_its_megatron_engine", "refused by verl"),),
    },
}  # fmt: skip


def bullet(heading: str, promises: list[Promise]) -> str:
    """A list of a page, in lines of at most 120 columns."""
    head = "[**Not proved**](../engines.md#what-proved-does-not-cover)" if heading == "Not proved" else f"**{heading}**"
    text = f"- {head}: {'; '.join(promise.words for promise in promises)}."
    return textwrap.fill(text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def groups_table() -> str:
    """The page's table of wrong ids; engines that end alike are one row."""
    rows: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for row in GROUPS:
        engine, said_by = row.words
        rows.setdefault(row.outcomes, {}).setdefault(said_by, []).append(engine)
    lines = ["| number of samples, as said by | ends |", "|---|---|"]
    for outcomes, words in rows.items():
        faults: dict[str, list[str]] = {}
        for fault, end in zip(FAULTS, outcomes, strict=True):
            if end != NOT_PROVED:
                faults.setdefault(end, []).append(fault)
        others = "; ".join(f"{', '.join(those)}: {end}" for end, those in faults.items())
        said = "; ".join(f"{', '.join(engines)} {said_by}" for said_by, engines in words.items())
        lines.append(f"| {said} | {NOT_PROVED}{others and f'; {others}'} |")
    return "\n".join(lines) + "\n"
