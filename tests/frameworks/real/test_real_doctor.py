"""What the doctor says of engines by their real sources: checkouts that environment variables name, and packages."""

import sys

import pytest
from checkouts import AREAL, MILES, MS_SWIFT, NEMO_RL, SKYRL, SLIME, VERL, Framework, checkout

from megatron_rl_loss.doctor.engines import ENGINES
from megatron_rl_loss.doctor.report import _judged, _root

PHANTOMS = {"--calculate-per-token-loss"}
#: An engine's package, its checkout, and what is not exact in any version that was read; in some versions.
ENGINE_SETTINGS: list[tuple[str, Framework | None, set[str], set[str]]] = [
    ("slime", SLIME, PHANTOMS, set()),
    ("miles", MILES, PHANTOMS, set()),
    ("verl", VERL, set(), set()),
    ("skyrl", SKYRL, {"token_mean_legacy"}, set()),
    ("nemo_rl", NEMO_RL, set(), set()),
    ("areal", AREAL, set(), set()),
    ("swift", MS_SWIFT, set(), {"bnpo", "dapo"}),  # until 4.6.0
    ("trl", None, {"bnpo"}, set()),
    ("megatron.bridge", None, {"default"}, set()),
    ("roll", None, {"seq-mean-token-sum-norm"}, set()),
]
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("package", "framework", "always", "sometimes"), ENGINE_SETTINGS)
def test_what_it_says(
    package: str, framework: Framework | None, always: set[str], sometimes: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All else is exact, or refused by the engine itself."""
    if framework is not None:
        monkeypatch.syspath_prepend(checkout(framework))
    (engine,) = (one for one in ENGINES if one.package == package)
    root = _root(package)
    if root is None:
        pytest.skip(f"{package} is not installed")
    found = {setting.name: _judged(setting) for setting in engine.settings(root)}
    wrong = {name for name, one in found.items() if one["verdict"] == "not exact"}
    assert always <= wrong <= always | sometimes
    unknown = {name: one["says"] for name, one in found.items() if one["verdict"] == "cannot judge"}
    assert set(unknown) <= {"seq-mean-token-mean (per-token)"}
    assert all("is incompatible with calculate_per_token_loss" in says for says in unknown.values())
    assert package == "megatron.bridge" or package not in sys.modules
