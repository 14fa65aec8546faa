"""``python -m megatron_rl_loss audit SCRIPT ARGS...``: a user's own training script, until one step of it is measured.

The script runs as it would by itself, from its beginning, with its own flags. Nothing is imported before it that it
would import itself: Megatron's schedule is wrapped at the moment somebody imports it. After the measured step the
process ends, on all ranks and before the optimizer changes a weight.
"""

import functools
import importlib.util
import json
import os
import runpy
import sys
import traceback
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

from torch import Tensor

from megatron_rl_loss.audit.verdict import judge
from megatron_rl_loss.errors import check_choice
from megatron_rl_loss.modes.function_paths import load_function
from megatron_rl_loss.modes.names import resolve
from megatron_rl_loss.step.collectives import attempt
from megatron_rl_loss.step.layouts import ZigzagBSHD
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.units import UnitCounting

SOUND, NOT_SOUND, NO_VERDICT = 0, 1, 2
SCHEDULES = "megatron.core.pipeline_parallel.schedules"


def add_audit_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--expect", metavar="MODE", help="What the policy loss, or --term, should be. Default: as flags ask."
    )
    parser.add_argument("--divisor", type=float, help="The divisor of the expected mode.")
    parser.add_argument("--units", choices=get_args(UnitCounting), help="The unit counting of the expected mode.")
    parser.add_argument("--json", metavar="OUT", type=Path, help="Write the verdicts there, by term.")
    parser.add_argument(
        "--step", type=step_number, default=1, help="The training step to measure, from 1 on. Default: 1."
    )
    parser.add_argument("--term", help="The one loss term to judge, by its tap's name. Default: every term.")
    parser.add_argument(
        "--samples-of", metavar="PATH", help="pkg.mod:fn that describes a batch of the script as Samples."
    )


def step_number(text: str) -> int:
    if (step := int(text)) < 1:
        raise ValueError
    return step


def add_script(parser: ArgumentParser) -> None:
    parser.add_argument("script", metavar="SCRIPT", help="Your training script.")
    parser.add_argument("arguments", metavar="ARGS", nargs=REMAINDER, help="Its own flags.")


def run_audit(options: Namespace) -> int:
    """Run the script until the step is measured. 0: as expected, 1: a term is not, 2: no verdict, for any reason."""
    when_imported(SCHEDULES, functools.partial(measure_once, options, _measure_and_end))
    sys.argv = [options.script, *options.arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(options.script)))
    try:
        runpy.run_path(options.script, run_name="__main__")
    except _Measured as measured:
        return int(measured.code)  # type: ignore[arg-type]
    except (Exception, SystemExit) as error:  # the script's own exit status would read as a verdict
        if isinstance(error, Exception):
            traceback.print_exc()
    print("NO VERDICT: The script ended before the step was measured.", flush=True)
    return NO_VERDICT


class _Measured(SystemExit):
    """Ends the script, with the exit status of the audit."""


def measure_once(options: Namespace, measure: Callable[..., Any], schedules: ModuleType) -> None:
    """Whoever asks Megatron for its schedule gets one that ``measure(options, schedule, ...)`` calls at the step."""
    get_schedule = schedules.get_forward_backward_func
    steps = 0

    def run(schedule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += not kwargs.get("forward_only")
        if steps != options.step or kwargs.get("forward_only"):
            return schedule(*args, **kwargs)
        replace_everywhere(get_wrapped, get_schedule)
        return measure(options, schedule, *args, **kwargs)

    @functools.wraps(get_schedule)
    def get_wrapped(*args: Any, **kwargs: Any) -> Any:
        schedule = get_schedule(*args, **kwargs)
        return functools.wraps(schedule)(functools.partial(run, schedule))

    replace_everywhere(get_schedule, get_wrapped)


def _measure_and_end(options: Namespace, schedule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from megatron_rl_loss.audit.megatron.audit import audited

    return audited(schedule, functools.partial(_end, options), samples_of=samples_of(options))(*args, **kwargs)


def _end(options: Namespace, audit: Any) -> None:
    status = attempt(lambda: report_verdicts(options, audit)) if audit.is_first_rank else None
    if isinstance(status, Exception):
        print(f"NO VERDICT: {status}", flush=True)
        if not isinstance(status, ValueError | OSError):
            traceback.print_exception(status)
        status = NO_VERDICT
    raise _Measured(audit.agree(status))


def replace_everywhere(function: Callable[..., Any], by: Callable[..., Any]) -> None:
    """In every module that has Megatron's function, or what stood for it, by its name: where it is defined too."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(function.__name__) is function:  # a lazy module loads nothing by this
            setattr(module, function.__name__, by)


def report_verdicts(options: Namespace, audit: Any) -> int:
    """Print and write a verdict for each term, the policy loss first; the exit status."""
    terms = sorted(audit.steps, key=lambda name: audit.steps[name] is not audit.measured)
    if options.term is not None:
        check_choice("--term", options.term, terms)
        terms = [options.term]
    expected = {name: audit.expected_of(name) for name in terms}
    if options.expect is not None:
        expected[terms[0]] = resolve(options.expect, divisor=options.divisor, units=options.units)
    verdicts = {name: judge(audit.steps[name], expected[name]) for name in terms}
    for name, verdict in verdicts.items():
        print(f"Term {name}:\n{verdict}" if len(terms) > 1 else verdict, flush=True)
    gap = audit.log_prob_gap
    if gap is not None:
        print(gap, flush=True)
    if options.json is not None:
        found = {name: verdict.to_dict(facts=audit.steps[name].facts) for name, verdict in verdicts.items()}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if any(not verdict.sound and not verdict.unknown for verdict in verdicts.values()):
        return NOT_SOUND
    return SOUND if all(verdict.sound for verdict in verdicts.values()) else NO_VERDICT


def samples_of(options: Namespace) -> Callable[[Any], Samples]:
    """What describes a batch of the script as `Samples`: the function that ``--samples-of`` names, if it is given."""
    if options.samples_of is None:
        return samples_of_known_batch
    rule, remedy = "it must be a function of a batch", "Name a function that returns Samples"
    return load_function(options.samples_of, "--samples-of", rule, remedy)


def samples_of_known_batch(batch: Any) -> Samples:
    """The samples of a batch that says so itself, or of Megatron's own scripts.

    Known are whatever has them as ``.samples``; rows of Megatron's GPT data sets, by their ``loss_mask``; and what
    `train_rl.py` iterates over (with the losses of all context-parallel ranks gathered, as main has them).

    Raises ValueError for any other.
    """
    samples = getattr(batch, "samples", None)
    if isinstance(samples, Samples):
        return samples
    if isinstance(batch, Mapping) and isinstance(batch.get("loss_mask"), Tensor) and batch["loss_mask"].dim() == 2:
        return Samples(list(batch["loss_mask"]), layout=ZigzagBSHD(*batch["loss_mask"].shape))
    if isinstance(batch, Sequence) and "megatron.rl.rl_utils" in sys.modules:
        from megatron_rl_loss.frameworks import megatron_rl

        return megatron_rl.samples_of(batch)
    raise ValueError(
        f"an audit of a loop whose batches are {type(batch).__name__}: it must know the loss masks, and they are "
        'looked for in .samples and in the "loss_mask" rows of a mapping. Give samples_of, which describes a batch '
        "as Samples: --samples-of pkg.mod:fn on the command line."
    )


def when_imported(name: str, function: Callable[[ModuleType], None]) -> None:
    """Call the function with a module as soon as somebody has imported it; at once if somebody has."""
    if name in sys.modules:
        function(sys.modules[name])
        return

    def find_spec(wanted: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if wanted != name:
            return None
        sys.meta_path.remove(finder)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_tell(module: ModuleType) -> None:
                execute(module)
                function(module)

            spec.loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec

    finder: Any = SimpleNamespace(find_spec=find_spec)
    sys.meta_path.insert(0, finder)
