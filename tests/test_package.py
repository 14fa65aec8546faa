"""The package as installed: what it imports, what it asks for."""

import subprocess
import sys
from importlib import metadata


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_the_core_and_the_flags_import_no_megatron() -> None:
    done = python(
        "import sys, megatron_rl_loss, megatron_rl_loss.arguments\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('megatron', 'transformer_engine', 'apex')])"
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_without_megatron_the_core_works_and_the_adapter_says_what_to_install() -> None:
    done = python(
        "import sys; sys.modules['megatron'] = None\nimport megatron_rl_loss\nimport megatron_rl_loss.megatron"
    )
    assert done.returncode != 0
    assert "ImportError: megatron_rl_loss.megatron needs Megatron-Core" in done.stderr
    assert "pip install 'megatron-rl-loss[megatron]'" in done.stderr


def test_torch_is_the_one_requirement() -> None:
    requires = metadata.requires("megatron-rl-loss")
    assert requires is not None
    assert [r for r in requires if "extra ==" not in r] == ["torch>=2.6"]
    assert set(metadata.metadata("megatron-rl-loss").get_all("Provides-Extra")) == {"megatron", "te", "demo", "test"}
    assert not any(r.lower().startswith("apex") for r in requires)
