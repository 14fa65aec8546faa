"""What SkyRL's policy loss refuses; the rest is run by real/test_real_skyrl.py."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_rl_loss.frameworks.skyrl import AggregatedPolicyLoss

BELOW = "skyrl.backends.skyrl_train"
ONES = torch.ones(2, 3)


@pytest.fixture(autouse=True)
def skyrl(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["", "skyrl", "skyrl.backends", BELOW, f"{BELOW}.utils", f"{BELOW}.utils.ppo_utils"]
    for name in names[1:]:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    registry = SimpleNamespace(get=lambda name: lambda *_, **__: name)
    sys.modules[names[-1]].PolicyLossRegistry = registry  # type: ignore[attr-defined]


def test_a_mini_batch_that_no_megatron_worker_weighs_is_refused() -> None:
    loss = AggregatedPolicyLoss("regular", "token_mean")
    with pytest.raises(ValueError, match=r"a mini-batch without weights.*trainer.strategy=megatron"):
        loss(ONES, ONES, ONES, SimpleNamespace(), loss_mask=ONES)


def test_another_skyrl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{BELOW}.workers.megatron.megatron_model_wrapper"
    worker = SimpleNamespace(masked_mean=lambda values, weights: values, MegatronModelWrapper=None)
    monkeypatch.setitem(sys.modules, name, worker)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a SkyRL without masked_mean\(dim, mask, tensor\).*Use a9564572"):
        AggregatedPolicyLoss("regular", "token_mean")
    with pytest.raises(ValueError, match="divisor"):
        AggregatedPolicyLoss("regular", "constant")
