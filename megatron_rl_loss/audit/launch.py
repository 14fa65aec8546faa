"""The command ``python -m megatron_rl_loss audit SCRIPT ARGS...``: run a training script until one step is measured.

The script runs as usual, with its own flags; Megatron is not imported before the script imports it. The run ends after
the measured step, before the optimizer changes a weight. Then the first rank prints the verdict.
"""

import functools
import json
import os
import runpy
import sys
import traceback
from argparse import REMAINDER, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from megatron_rl_loss.audit.judge import judge
from megatron_rl_loss.audit.picture import Panel, check_path, write_picture
from megatron_rl_loss.core.aggregation import Aggregation, resolve
from megatron_rl_loss.core.collectives import attempt
from megatron_rl_loss.core.counting import COUNTINGS
from megatron_rl_loss.proof.schedules import run_schedules_by

#: Takes the report, empty on all ranks but the first, and the exit status of ``--fail``.
Conclude = Callable[[str, int], None]


def add_audit_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--expect", metavar="MODE", help="Expected mode of the policy loss. Default: the mode that flags ask for.")
    add("--divisor", type=float, metavar="TOKENS", help="Divisor of the expected mode.")
    add("--units", choices=list(COUNTINGS), help="Unit counting of the expected mode.")
    add("--json", metavar="OUT", type=Path, help="Write the verdicts to this JSON file, by term.")
    add("--plot", metavar="OUT", type=Path, help="Draw the weight of each token into this file: step.html, step.png.")
    add("--packing", action="store_true", help="Check, too, that no sample depends on its pack: ~10 forward passes.")
    add("--step", type=step_number, default=1, help="Training step to measure, counted from 1. Default: 1.")


def add_script(parser: ArgumentParser) -> None:
    parser.add_argument("--fail", action="store_true", help="Exit with status 1 for NOT SOUND, 2 for NO VERDICT.")
    parser.add_argument("script", metavar="SCRIPT", help="Your training script.")
    parser.add_argument("arguments", metavar="ARGS", nargs=REMAINDER, help="Flags of the script.")


def step_number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r}: a training step is an int >= 1. Write --step 1 for the first")
    return int(text)


def run_audit(options: Namespace) -> tuple[str, int]:
    """Run the script until the step is measured. Returns the verdict and the exit status: 2 for a script that failed.

    Raises ValueError for a script that is not there or a picture that cannot be drawn, and BrokenPipeError once nobody
    reads standard output.
    """
    if options.plot is not None:
        try:
            check_path(options.plot)
        except ImportError as error:
            raise ValueError(f"--plot: {error}") from error
    if not os.path.exists(options.script):
        raise ValueError(
            f"audit of {options.script!r}: there is no such file. Give the path of your script, after the options."
        )
    conclusions: list[tuple[str, int]] = []

    def conclude(text: str, status: int) -> None:
        conclusions.append((text, status))
        raise SystemExit

    sys.argv = [options.script, *options.arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(options.script)))
    code: Any = 0
    try:
        audit_once(options, conclude)
        runpy.run_path(options.script, run_name="__main__")
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except Exception as error:
        code = 2
        if isinstance(error, BrokenPipeError):
            print(flush=True)  # raises again where nobody reads standard output: no failure of the script
        traceback.print_exc()
    failed = not conclusions and code not in (None, 0)
    if conclusions:
        text, status = conclusions[0]
        if dist.is_initialized():
            dist.destroy_process_group()  # else a backend warns behind the verdict
    else:
        says = failed or os.environ.get("RANK", "0") == "0"
        why = f"The script {'failed' if failed else 'ended'} before training step {options.step} was over."
        if not failed:
            why += " A step is a call of Megatron's schedule; a loop without Megatron is proved by prove_step."
        text, status = f"NO VERDICT: {why}" if says else "", 2
    return text, status if options.fail or failed else 0


def audit_once(options: Namespace, conclude: Conclude) -> None:
    """Measure one training step of this process, then call `conclude` on every rank.

    Megatron's schedules are replaced in their module until that step. The replacement happens at once if Megatron-Core
    is imported already, else when the process makes its first process group after the import, as every training does.
    """
    if "megatron.core.parallel_state" in sys.modules:
        _replace_schedules(options, conclude)
        return
    new_group: Any = dist.new_group
    waiting = [options]

    @functools.wraps(new_group)
    def make_group(*args: Any, **kwargs: Any) -> Any:
        if waiting and "megatron.core.parallel_state" in sys.modules:
            _replace_schedules(waiting.pop(), conclude)
        return new_group(*args, **kwargs)

    # The name that Megatron calls, and the one that torch's own code calls.
    dist.new_group = dist.distributed_c10d.new_group = make_group


def _replace_schedules(options: Namespace, conclude: Conclude) -> None:
    steps = 0

    def run(schedule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        trains = not kwargs.get("forward_only")
        steps += trains
        if not trains or steps != options.step:
            return schedule(*args, **kwargs)
        assert not isinstance(put_back, Exception)
        put_back()
        return _measure(options, conclude, schedule, *args, **kwargs)

    put_back = attempt(lambda: run_schedules_by(run))
    if isinstance(put_back, Exception):
        conclude(f"NO VERDICT: Megatron's schedules cannot be imported. {put_back}", 2)


def _measure(options: Namespace, conclude: Conclude, schedule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the schedule under an audit and return its result; errors of the audit are reported, never raised."""

    def begin() -> Any:
        from megatron_rl_loss.audit.megatron.audit import Audit

        if options.packing:
            keep_batches()
        return stack.enter_context(Audit(kwargs["model"], then=end))

    def keep_batches() -> None:
        from megatron_rl_loss.audit.megatron.packing import KeptBatches

        kept.append(KeptBatches(kwargs["data_iterator"]))
        kwargs["data_iterator"] = kept[0].data_iterator

    def check_packs() -> Any:
        samples = audit.samples_of_microbatch(0)
        return kept[0].check(kwargs["forward_step_func"], kwargs["model"], samples, **shapes)

    def end(failure: Exception | None) -> None:
        packing = attempt(check_packs) if kept and failure is None else None
        outcome: Any = failure or attempt(lambda: report(options, audit, packing))
        conclude(*(_failed(outcome, options.json) if isinstance(outcome, Exception) else outcome))

    kept: list[Any] = []
    shapes = {name: kwargs[name] for name in ("seq_length", "micro_batch_size", "decoder_seq_length") if name in kwargs}
    with ExitStack() as stack:
        audit: Any = attempt(begin)
        result = schedule(*args, **kwargs)
    if isinstance(audit, Exception):
        end(audit)
    return result


def _failed(error: Exception, out: Path | None) -> tuple[str, int]:
    """Text and exit status of an audit that failed; ``--json`` gets the error."""
    if not isinstance(error, ValueError | OSError):
        traceback.print_exception(error)
    why = f"The audit failed. {type(error).__name__}: {error}"
    if out is not None:
        attempt(lambda: out.write_text(json.dumps({"error": why}) + "\n"))
    return f"NO VERDICT: {why}", 2


def mode_of_flags(words: Sequence[str]) -> Aggregation | None:
    """The policy loss's mode by ``--loss-aggregation`` and its companions in a command line; None without them.

    For scripts without `LossAggregation`. Raises ValueError for flags that are unusable.
    """
    # Importing the folder imports Megatron, which the script does first, by itself.
    from megatron_rl_loss.megatron.flags import (
        add_loss_aggregation_args,
        any_flag_given,
        validate_loss_aggregation_args,
    )

    parser = ArgumentParser(add_help=False, allow_abbrev=False)

    def refuse(message: str) -> NoReturn:
        raise ValueError(f"{' '.join(words)}: {message}. Write the flags as using.md says.")

    parser.error = refuse  # type: ignore[method-assign]
    flags, _ = add_loss_aggregation_args(parser).parse_known_args(words)
    return validate_loss_aggregation_args(flags).modes.policy if any_flag_given(flags) else None


def report(options: Namespace, audit: Any, packing: Any = None) -> tuple[str, int]:
    """The verdicts on all terms and the exit status; ``--json`` gets them too. Empty on all ranks but the first.

    `packing` is the report of ``--packing``, or the error that prevented it.
    """
    if not audit.steps:
        return "", 0
    by_flags = mode_of_flags(sys.argv[1:])
    verdicts, panels = {}, []
    for name, step in audit.steps.items():
        expected, own = audit.expected_of(name), step.facts.get("expected")
        if options.expect is not None and step is audit.measured:
            expected = resolve(options.expect, divisor=options.divisor, units=options.units)
        elif expected is None and own is None:
            expected = by_flags
        elif expected is None:
            why = f"The mode {own['mode']} is a function that the first rank does not have. Register it by a decorator."
            step = replace(step, unknown=(*step.unknown, why))
        verdict = verdicts[name] = judge(step, expected)
        if options.plot is not None and not verdict.unknown:
            title = f"{name}: {verdict.expected}" if len(audit.steps) > 1 else verdict.expected
            panels.append(Panel.from_step(step, expected, verdict=verdict, title=title))
    texts = [] if audit.log_prob_gap is None else [str(audit.log_prob_gap)]
    texts += [f"Term {name}:\n{verdict}" if len(verdicts) > 1 else str(verdict) for name, verdict in verdicts.items()]
    statuses = {0 if verdict.sound else 2 if verdict.unknown else 1 for verdict in verdicts.values()}
    is_decided = not (packing is None or isinstance(packing, Exception) or packing.undecided)
    if packing is not None:
        texts.append(f"Packing was not checked. {packing}" if isinstance(packing, Exception) else f"Packing: {packing}")
        statuses.add(int(bool(packing.findings)) if is_decided else 2)
    status = 1 if 1 in statuses else max(statuses)
    if options.json is not None:
        data: dict[str, Any] = {
            name: verdict.to_dict() | {"facts": audit.steps[name].facts} for name, verdict in verdicts.items()
        }
        if packing is not None:
            data["packing"] = [*map(str, packing.findings)] if is_decided else [str(packing)]
        try:
            options.json.write_text(json.dumps(data, indent=1) + "\n")
        except OSError as error:
            texts.append(f"--json {options.json}: the file cannot be written ({error.strerror}). Give a path that can.")
            status = status or 2
    if options.plot is not None:
        try:
            if not panels:
                raise ValueError("there is no verdict, so no weight is known. Mend what the verdict names.")
            write_picture(panels, options.plot)
        except (OSError, ImportError, ValueError) as error:  # a worker's options are not checked before
            texts.append(f"--plot {options.plot}: {error}")
            status = status or 2
    return "\n".join(texts), status
