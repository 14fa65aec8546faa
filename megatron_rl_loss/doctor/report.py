"""`python -m megatron_rl_loss doctor`: looks, judges, and prints one screen or JSON."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import textwrap
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl_loss.audit.launch import NO_VERDICT, NOT_SOUND, SOUND
from megatron_rl_loss.audit.loss_check import check_loss
from megatron_rl_loss.doctor.engines import ENGINES, Engine, Setting

_PROBE = "from megatron_rl_loss.doctor.report import probe_megatron; probe_megatron()"
_PROBE_SECONDS = 300


def run_doctor(options: Namespace) -> int:
    """Print what was found; 0 if all of it is exact, 1 if something is not, 2 if something could not be judged."""
    found = examine()
    print(json.dumps(found, indent=1) if options.json else "\n".join(screen(found)), flush=True)
    judged = [found["probe"], *(setting for engine in found["engines"] for setting in engine["settings"])]
    verdicts = {one["verdict"] for one in judged}
    return NOT_SOUND if "not exact" in verdicts else NO_VERDICT if "cannot judge" in verdicts else SOUND


def examine(engines: Iterable[Engine] = ENGINES) -> dict[str, Any]:
    """All that the doctor says, as plain data. Each verdict is exact, not exact, or cannot judge."""
    roots = {engine: _root(engine.package) for engine in engines}
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("megatron-rl-loss", "torch", "megatron-core"):
        versions[name] = next((one.version for one in importlib.metadata.distributions(name=name)), None)
    return {
        "versions": versions,
        "probe": _probe(),
        "engines": [_examined(engine, root) for engine, root in roots.items() if root is not None],
        "not_found": [engine.distribution for engine, root in roots.items() if root is None],
    }


def _root(package: str) -> Path | None:
    """The folder of a package, which is not imported."""
    try:
        spec = importlib.util.find_spec(package)
    except Exception:  # of the package it lies in, which is imported: it is not there, or fails
        return None
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
    places += [place / package for place in places]  # in a checkout's folder of the same name
    return next((place for place in places if (place / "__init__.py").exists()), None)


def _examined(engine: Engine, root: Path) -> dict[str, Any]:
    version = _version(engine, root)
    known = any(one in version for one in engine.known)
    said = {"name": engine.distribution, "version": version, "known": known, "read_or_run": list(engine.known)}
    settings: list[dict[str, str]] = []
    try:
        settings.extend(map(_judged, engine.settings(root)))
    except Exception as error:  # of its code: other engines are judged all the same
        settings.append({"name": "its settings", "meant": "", **_failure(error)})
    return {**said, "path": str(root), "settings": settings, "mend": engine.mend}


def _judged(setting: Setting) -> dict[str, str]:
    """What `check_loss` says of a setting; where it is not exact, whether fully masked samples are why."""
    check = partial(check_loss, setting.loss_fn, setting.mode, divisor=setting.divisor, units=setting.units)
    said = {"name": setting.name, "meant": setting.mode}
    try:
        findings = check(call=setting.call, draws=8).findings
        if not findings:
            return {**said, "verdict": "exact", "says": ""}
        other = check(call=replace(setting.call, masked_samples=False), draws=4).findings
    except Exception as error:
        return {**said, **_failure(error)}
    widest = max(findings, key=lambda one: (one.kind == "weights") + (one.shape == "spread"))
    only = "" if other else "with fully masked samples, "
    return {**said, "verdict": "not exact", "says": f"{only}{widest.cut}: {widest.says}"}


def _failure(error: BaseException) -> dict[str, str]:
    while error.__cause__ is not None:
        error = error.__cause__
    return {"verdict": "cannot judge", "says": f"{type(error).__name__}: {error}"}


def _version(engine: Engine, root: Path) -> str:
    """That of the distribution, if the package is its; else what files of a checkout say, and the commit."""
    for one in importlib.metadata.distributions(name=engine.distribution):
        if Path(str(one.locate_file(engine.package.replace(".", "/")))).resolve() == root.resolve():
            return one.version
    above = list(root.parents)[:3]
    files = [root / "version/version", *(root / f"{name}.py" for name in ("version", "package_info", "__init__"))]
    files += [folder / name for folder in above for name in ("pyproject.toml", "setup.py")]
    pattern = r"""(?:version\w*\s*=\s*["']|^)(\d+\.[\w.]+)"""
    said = [re.search(pattern, file.read_text(errors="replace")) for file in files if file.is_file()]
    version = next((found[1] for found in said if found), "of unknown version")
    if any((folder / ".git").exists() for folder in above):
        command = ["git", "-C", str(root), "rev-parse", "--short=8", "HEAD"]
        version += f", {subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()}"
    return version


def _probe() -> dict[str, str]:
    """What the probe says of the installed Megatron, in a process that sees no GPU and may take its time or crash."""
    try:
        if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
            return {"verdict": "none", "says": "there is no megatron.core"}
    except Exception as error:  # of the package megatron
        return _failure(error)
    options: Any = {"env": {**os.environ, "CUDA_VISIBLE_DEVICES": ""}, "capture_output": True, "text": True}
    try:
        process = subprocess.run([sys.executable, "-c", _PROBE], timeout=_PROBE_SECONDS, check=False, **options)
    except subprocess.TimeoutExpired:
        return {"verdict": "cannot judge", "says": f"it took more than {_PROBE_SECONDS} s"}
    if process.returncode == 0:
        return {"verdict": "exact", "says": process.stdout.strip().splitlines()[-1]}
    last = (process.stderr.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
    return {"verdict": "not exact" if "ContractError" in last else "cannot judge", "says": last}


def probe_megatron() -> None:
    """As rank 0 of DP 2 x CP 2, whose collectives do nothing: the contract of each kind of loss."""
    import megatron.core
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_rl_loss.megatron.probe import check_contract

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    parallel_state.initialize_model_parallel(context_parallel_size=2, create_gloo_process_groups=False)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    for per_token in (False, True):
        options = {"num_layers": 1, "hidden_size": 4, "num_attention_heads": 1, "calculate_per_token_loss": per_token}
        check_contract(TransformerConfig(**options), [], groups, num_microbatches=3)
    version = megatron.core.__version__.partition("+")[0]
    print(f"the schedule of {version} scales as relied on, with and without per-token loss")


def screen(found: dict[str, Any]) -> list[str]:
    """Lines of at most 120 columns."""
    lines = [", ".join(f"{name} {version or '-'}" for name, version in found["versions"].items())]
    lines += _wrapped("megatron", f"{found['probe']['verdict']}: {found['probe']['says']}")
    for engine in found["engines"]:
        known = "" if engine["known"] else f" was {', '.join(engine['read_or_run'])}"
        lines.append(f"{engine['name']} {engine['version']} (read or run here{known})")
        by_verdict: dict[tuple[str, str], list[str]] = {}
        for setting in engine["settings"]:
            by_verdict.setdefault((setting["verdict"], setting["says"]), []).append(setting["name"])
        for (verdict, says), names in by_verdict.items():
            lines += _wrapped(f"  {verdict}", ", ".join(names) + (f": {says}" if says else ""))
        lines += _wrapped("  ours" if engine["known"] else "  ours, not run with this version", engine["mend"])
    return lines + _wrapped("not found", ", ".join(found["not_found"]) or "none")


def _wrapped(name: str, text: str) -> list[str]:
    """At most two lines."""
    options: Any = {"subsequent_indent": "    ", "max_lines": 2, "placeholder": " ...", "break_on_hyphens": False}
    return textwrap.wrap(f"{name}: {text}", 120, **options)
