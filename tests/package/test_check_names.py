"""`tools/check_names.py`: it names weights rightly, and the weights in docs/names.json are what the rows say."""

import json
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path

import check_names
import oracle
import pytest
from check_names import ALL, RESULTS, Named, agrees, compared, name_of, stored, weights_of
from framework_losses import CUTS, DIVISOR, LOADERS, STEPS, cut_branch

from megatron_rl_loss.engines.names import FRAMEWORKS, NAMES, PeerName

ROLL = "roll/utils/functionals.py"


MEASURED = [*compared(stored())]


def words(alias: str) -> dict[str, str]:
    """What the stored weights of a name are, by version."""
    return {version: named.words for name, version, _, named, _ in MEASURED if name == alias}


def row(framework: str, name: str, version: str) -> PeerName:
    return next(peer for peer in NAMES if peer[:2] == (framework, name) and version in peer.versions)


def oracle_weights(mode: str, units: str, divisor: float | None) -> list[list[float]]:
    """By step and cut: those of the whole step, whatever the cut."""
    weights = []
    for number, _ in ALL:
        samples = [oracle.sample([0.0] * len(mask), mask, i, i // 2) for i, mask in enumerate(STEPS[number])]
        weights.append([float(w) for of in oracle.step_weights(mode, samples, divisor, units) for w in of])
    return weights


@pytest.mark.parametrize(
    ("mode", "units", "divisor", "named"),
    [
        ("token_mean", "all", None, "token_mean"),
        ("sample_mean", "all", None, "sample_mean"),
        ("sample_mean", "active", None, "sample_mean, active units"),
        ("prompt_mean", "all", None, "prompt_mean"),
        ("constant", "all", DIVISOR, "constant, divisor L"),
        ("constant", "active", 1.0, "constant, divisor 1, active units"),
        ("token_sum", "all", DIVISOR, "token_sum, divisor L"),
    ],
)
def test_weights_of_a_mode_are_named_and_others_are_not(mode: str, units: str, divisor: float, named: str) -> None:
    weights = oracle_weights(mode, units, divisor)
    assert name_of(weights) == Named(named, exact=True)
    rng = random.Random(0)
    for cut in rng.sample(range(len(ALL)), 3):  # one token of one cut is off by 1e-4
        changed = [list(row) for row in weights]
        changed[cut][0] *= 1 + 1e-4
        assert not name_of(changed).exact


def test_parts_are_told_from_the_whole() -> None:
    """A mean of micro-batch means."""
    weights = []
    for number, cut in ALL:
        places, masks = CUTS[cut], STEPS[number]
        own = [sum(sum(m) for m, other in zip(masks, places, strict=True) if other == place) for place in places]
        parts = len(set(places))
        rows = zip(masks, own, strict=True)
        weights.append([entry / tokens / parts if entry else 0.0 for mask, tokens in rows for entry in mask])
    said = name_of(weights).words
    assert (
        said == "of a whole step token_mean; in uneven parts divided by the tokens of the micro-batch, not of the step"
    )


def test_the_stored_steps_are_those_of_the_code() -> None:
    stored_steps = json.loads(RESULTS.read_text())
    assert stored_steps["masks"] == json.loads(json.dumps(STEPS))
    assert stored_steps["cuts"] == json.loads(json.dumps(CUTS))
    assert stored_steps["divisor"] == DIVISOR


def test_every_row_that_says_run_was_run_and_does_what_it_says() -> None:
    ran = {(alias, version) for alias, version, *_ in MEASURED}
    versions = {name: dict(zip(row.names, row.versions.values(), strict=True)) for name, row in FRAMEWORKS.items()}
    assert ran == {
        (f"{peer.framework}:{peer.name}", version)
        for peer in NAMES
        for version in peer.versions
        if versions[peer.framework][version] == "run" and "raises an error" not in peer.refused
    }
    differ = [
        (alias, version, named) for alias, version, peer, named, weights in MEASURED if not agrees(peer, named, weights)
    ]
    assert not differ


def test_it_finds_what_changed_between_versions() -> None:
    gspo = words("verl:gspo")
    assert (gspo["0.9.0"], gspo["1dda039b"], gspo["0.9.1"]) == ("sample_mean", "sample_mean", "token_mean")
    dapo = words("ms_swift:dapo")  # ms-swift#10117
    assert dapo["3602360a"] == "divided by the tokens of both steps, not of one, and by micro-batches once more"
    assert dapo["4.6.0"] == "token_mean"
    window = words("trl:dapo")
    assert window["1.9.0"] == "divided by the tokens of both steps, not of one"
    assert window["1.9.1"] == window["1.16.0"] == "divided by the tokens of an average step, not of this one"
    assert words("torchrl:prompt_mean")["0.14.1"].startswith("sample_mean where")
    assert words("torchrl:token_mean")["0.11.1"].endswith("NaN in a micro-batch without tokens")


@pytest.mark.parametrize(
    ("name", "its", "others"),
    [
        ("verl:gspo", "0.9.0", "0.9.1"),
        ("verl:token-mean", "0.7.0", "0.6.1"),
        ("trl:dapo", "1.9.0", "1.9.1"),
        ("ms_swift:dapo", "4.6.0", "3602360a"),
        ("torchrl:token_mean", "0.11.1", "0.14.1"),
    ],
)
def test_a_row_does_not_agree_with_the_code_of_another_version(name: str, its: str, others: str) -> None:
    framework, _, setting = name.partition(":")
    found = {version: (named, weights) for alias, version, _, named, weights in MEASURED if alias == name}
    for version, other in ((its, others), (others, its)):
        assert agrees(row(framework, setting, version), *found[version])
        assert not agrees(row(framework, setting, version), *found[other])


@pytest.mark.parametrize(
    "alias",
    [alias for alias, _, peer, *_ in MEASURED if peer.own_code or (peer.refused and "whatever" not in peer.refused)],
)
def test_a_row_of_another_mode_does_not_agree_whatever_it_says_of_its_own_code(alias: str) -> None:
    """Of rows that are refused, too. A sum is a constant times it, so only a mode of other proportions is another."""
    proportions = {"constant": "sum", "token_sum": "sum", "token_mean": "sum"}
    for _, _, peer, named, weights in [row for row in MEASURED if row[0] == alias]:
        assert agrees(peer, named, weights)
        for mode in ("token_mean", "sample_mean", "prompt_mean"):
            if proportions.get(mode, mode) != proportions.get(peer.mode, peer.mode):
                planted = peer._replace(mode=mode, divisor=None)
                assert not agrees(planted, named, weights), mode


SOUND = "(loss_mat * loss_mask).sum() / batch_num_tokens"
LOCAL = "masked_mean(loss_mat, loss_mask)"


@pytest.mark.parametrize(("formula", "named"), [(SOUND, "token_mean"), (LOCAL, "of a whole step token_mean")])
def test_code_of_a_framework_is_cut_out_and_run(formula: str, named: str, tmp_path: Path) -> None:
    """With an import and annotations that cannot be evaluated here."""
    file = tmp_path / ROLL
    file.parent.mkdir(parents=True)
    file.write_text(
        "import no_such_module\n"
        "def masked_mean(values: no_such_module.X, mask): return (values * mask).sum() / mask.sum().clamp(min=1)\n"
        "def masked_sum(values, mask): ...\n"
        "@no_such_module.registered\n"
        "def agg_loss(loss_mat, loss_mask, mode: Z, batch_num_tokens, global_valid_samples) -> Y:\n"
        f"    return {formula}\n"
    )
    for _, own in LOADERS["roll"][1](tmp_path, "8eb27cc2"):
        assert name_of(weights_of(own)).words.startswith(named)


def test_code_that_changed_its_names_is_said(tmp_path: Path) -> None:
    (tmp_path / "roll/utils").mkdir(parents=True)
    (tmp_path / ROLL).write_text("def aggregate(): ...\n")
    with pytest.raises(SystemExit, match="has no agg_loss"):
        next(iter(LOADERS["roll"][1](tmp_path, "8eb27cc2")))
    with pytest.raises(SystemExit, match="no such branch"):
        cut_branch(tmp_path / ROLL, "self.loss_type", "loss = ")


def test_a_package_that_cannot_be_had_is_read_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(command: Sequence[str], **_: object) -> object:
        return type("Done", (), {"returncode": 1})

    monkeypatch.setattr(subprocess, "run", refused)
    assert check_names.run(tmp_path, {}) == {}
    assert "trl 1.16.0: read, not run" in capsys.readouterr().err
