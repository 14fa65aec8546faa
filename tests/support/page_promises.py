"""What the engines' pages promise, in lists and in sentences, and what shows each: the pages' lists are made from here.

A `Launch` and an `Edit` of it run in ``tests/engines/real/test_real_promises.py``, a `Fault` is among the engine's own
plants, and a `Test` is another test, which has the words `setting`.
"""

import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

from checkouts import Settings
from peer_steps import later_tokens_more

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


class Test(NamedTuple):
    """A test by ``path::name``, whose code, or the tables that it names, have those words."""

    where: str
    setting: str


class Source(NamedTuple):
    """A file of the engine's that lacks a text."""

    file: str
    lacks: str


class Promise(NamedTuple):
    words: str
    shown: tuple[Launch | Fault | Test | Source, ...]


def stops(words: str, says: str, *cases: dict[str, Any], world: tuple[int, int] = (1, 1)) -> Promise:
    """Each of the cases ends with that error."""
    return Promise(words, tuple(Launch(STEP | case, says, world) for case in cases))


def unproved(words: str, *cases: dict[str, Any], outcome: str = "not proved") -> Promise:
    return Promise(words, tuple(Launch(STEP | {"outcome": outcome} | case) for case in cases))


def shown(words: str, *by: Launch | Fault | Test | Source) -> Promise:
    return Promise(words, by)


# ---- groups of prompts: what becomes of wrong ids

Ids = list[int]


def _with(row: int, prompt_id: int, ids: Ids) -> Ids:
    return [*ids[:row], prompt_id, *ids[row + 1 :]]


#: By fault, the ids of rows that were generated for the prompts of these ids, in their order.
FAULTS: dict[str, Callable[[Ids], Ids]] = {
    "two prompts, one id": lambda ids: [ids[0] if i == ids[ids.count(ids[0])] else i for i in ids],
    "one prompt, two ids": lambda ids: _with(0, 1 + max(ids), ids),
    "an id for each row": lambda ids: [*range(len(ids))],
    "a row in the next group": lambda ids: _with(ids.count(ids[0]), ids[0], ids),
    "ids moved by a row": lambda ids: ids[-1:] + ids[:-1],
}
STOPS, NOT_PROVED, IN_PART, AS_GIVEN, NEVER = "stops", "NOT PROVED", "PROVED IN PART", "not seen", "cannot occur"


class Groups(NamedTuple):
    """A row of the table: an engine, what says how many samples a prompt has, and what becomes of each of `FAULTS`.

    `case` are the settings of its `train`; without it, `by` is the test that plants them.
    """

    engine: str
    words: tuple[str, str]
    outcomes: tuple[str, str, str, str, str]
    case: dict[str, Any] | None = None
    by: Test | None = None


_ALL, _BY_TOKENS = (NOT_PROVED,) * 5, (NOT_PROVED, AS_GIVEN, NOT_PROVED, NOT_PROVED, AS_GIVEN)
_UNSAID, _BY_TOKENS_UNSAID = (IN_PART, IN_PART, *_ALL[2:]), (IN_PART, IN_PART, NOT_PROVED, IN_PART, IN_PART)
_NORM: dict[str, Any] = {"config": {"adv_norm": Settings(mean_level="group", group_size=4)}}
GROUPS = [
    Groups("ms_swift", ("ms-swift", "`num_generations`"), _ALL, {}),
    Groups("nemo_rl", ("NeMo-RL", "`group_size=` of `aggregate`"), _ALL, {"settings": {"group_size": 4}}),
    Groups("roll", ("ROLL", "`num_return_sequences_in_group`"), _ALL, {"group_size": 4}),
    Groups(
        "areal", ("AReaL", "`group_size=` of `aggregate`"), (STOPS, NOT_PROVED, NOT_PROVED, STOPS, NOT_PROVED),
        {"settings": {"group_size": 4}},
    ),
    Groups("areal", ("AReaL", "`group_size` of group normalisation in AReaL's config"), _ALL, _NORM),
    Groups("areal", ("AReaL", "neither"), _UNSAID, {}),
    Groups("nemo_rl", ("NeMo-RL", "not said"), _UNSAID, {"group_size": None}),
    Groups("roll", ("ROLL", "not said"), _UNSAID, {"group_size": None}),
    Groups("rlinf", ("RLinf", "not said"), _BY_TOKENS_UNSAID, {"group_size": None}),
    Groups("skyrl", ("SkyRL", "not said"), _BY_TOKENS_UNSAID, {"group_size": None}),
    Groups("rlinf", ("RLinf", "`algorithm.group_size`"), _BY_TOKENS, {"group_size": 4}),
    Groups("skyrl", ("SkyRL", "`group_size=` of the loss"), _BY_TOKENS, {"settings": {"group_size": 4}}),
]  # fmt: skip


# ---- the lists of each page

_COLUMNS, _COUNTS = "tests/engines/test_weighed_batches.py", "tests/engines/test_step_counts.py"
_REAL = "tests/engines/real/test_real_{}.py"
_HOOKS, _VERL = _REAL.format("slime_miles"), _REAL.format("verl")
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
            shown("FSDP", Test(f"{_COLUMNS}::test_areal_trains_on_weighted_advantages", "NOT PROVED")),
            unproved("one group, or groups of one row, of which nobody said the size", {"ids": [0] * 12},
                     {"ids": [*range(12)]}),
        ],
        "Proved in part": [unproved("other groups of which nobody said the size", {}, outcome="proved in part")],
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
                  Test(f"{_COLUMNS}::test_other_losses_go_by_and_the_loss_travels", "NOT PROVED")),
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
                  Test(f"{_REAL.format('rlinf')}::test_a_group_of_another_class_does_not_train_unnoticed", "launch")),
        ],
        "Not exact": [
            shown("`entropy_bonus`: its weights are right, but `a3816b59` computes a wrong gradient of the entropy",
                  Test(f"{_REAL.format('rlinf')}::test_terms_beside_the_policy_loss_are_proved", "with_theirs")),
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
            stops("a mode by prompt with images and without `traj_group_id`", "for prompts with images or other media",
                  {"images": True}),
            shown("in a worker that imported your class, training with another strategy than `megatron_train`",
                  Test(f"{_REAL.format('roll')}::test_a_worker_that_trains_without_the_class_says_so", "fsdp2_train")),
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
            shown("FSDP", Test(f"{_COLUMNS}::test_skyrl_where_it_could_not_be_exact", "trainer.strategy=megatron")),
        ],
    },
}  # fmt: skip


def bullet(heading: str, promises: list[Promise]) -> str:
    """A list of a page, in lines of at most 120 columns."""
    head = "[**Not proved**](../engines.md#what-proved-does-not-cover)" if heading == "Not proved" else f"**{heading}**"
    text = f"- {head}: {'; '.join(promise.words for promise in promises)}."
    return textwrap.fill(text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
