"""`LossReport`: what `check_loss` found, as text and as plain data."""

import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_rl_loss.audit.drawing import UNCUT
from megatron_rl_loss.audit.findings import Finding
from megatron_rl_loss.audit.picture import Panel, write_picture
from megatron_rl_loss.core.aggregation import Aggregation
from megatron_rl_loss.core.errors import only_if


@dataclass(frozen=True)
class LossReport:
    """The findings of `check_loss`."""

    name: str  # of the loss function, or of the mode
    expected: Aggregation | None  # the mode that was asked
    call: str  # the assumed trainer, in words
    draws: int  # random steps of each cut
    seed: int  # of the random steps
    findings: tuple[Finding, ...]  # faults; empty if there are none
    causes: tuple[str, ...] = ()  # each fits all of some larger steps, the simplest first
    notes: tuple[str, ...] = ()
    #: the weights of a larger random step, cut in all of these ways at once; None where none were measured
    panel: Panel | None = field(default=None, repr=False, compare=False)
    cuts: str = "however the step is cut"  # which cuts the call makes, in words

    @property
    def sound(self) -> bool:
        """True without findings: weights are invariant, and those of the mode if one was asked."""
        return not self.findings

    @property
    def invariant(self) -> bool:
        """True if tokens weigh the same in every cut of the step, by the right mode or another."""
        return all(finding.kind == "weights" and finding.cut == UNCUT for finding in self.findings)

    def __str__(self) -> str:
        mode = "" if self.expected is None or self.expected.mode.name == self.name else str(self.expected)
        if self.sound:
            lines = [f"SOUND: {self.name} is {mode or 'invariant'}, {self.cuts}"]
        elif self.invariant:
            lines = [f"NOT SOUND: {self.name} is invariant, but not {mode}"]
        else:
            fails = all(finding.kind != "weights" for finding in self.findings)
            how = "fails, or is no aggregation of losses" if fails else "is not invariant"
            lines = [f"NOT SOUND: {self.name} {how}" + only_if(mode, f"; expected {mode}")]
        said = f"assumed: {self.call}; {self.draws} draws of each cut, seed {self.seed}"
        assumed = textwrap.wrap(said, 118, initial_indent="  ", subsequent_indent="    ")
        lines += [f"  {finding.cut}: {finding.says}" for finding in self.findings]
        lines += [f"  fits: {cause}" for cause in self.causes[:1]]
        for first in self.findings[:1]:
            named = f"{self.name} {mode} {self.causes} {only_if('rollouts over several' in self.call, 'rollout')}"
            should = ", should weigh" if self.expected and mode else ", uncut"
            rows = first.rows([unit for unit in ("rollout", "prompt") if unit in named], should)
            cp = only_if(first.step.cp_size > 1, f", each row cut over {first.step.cp_size} CP ranks")
            room = max(1, 11 - len(self.findings) - len(self.notes) - len(assumed))  # of 15 lines
            if first.kind != "backward":
                lines += [f"  the smallest step {first.cut} that shows it (x trained, . masked{cp}):"]
                more = only_if(len(rows) > room, [f"    and {len(rows) - room} more"])
                lines += [*(f"    {row}" for row in rows[:room]), *more]
        lines += assumed
        if not self.findings:
            cp = only_if("no CP" not in self.call, " and 4 CP")
            lines += [f"  covers rows of at most 11 tokens, 5 micro-batches, 4 DP{cp} ranks; not checked: the calls"]
            lines += ["  and divisions of your own loop, the losses of tokens, other terms (KL, entropy), clipping"]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data; unknown values of a finding are left out."""
        known = [{name: value for name, value in vars(finding).items() if value == value} for finding in self.findings]
        findings = [fields | {"step": repr(fields["step"])} for fields in known]
        expected = None if self.expected is None else str(self.expected)
        said = {"sound": self.sound, "invariant": self.invariant, "expected": expected, "findings": findings}
        return {name: value for name, value in vars(self).items() if name != "panel"} | said

    def plot(self, path: str | Path) -> None:
        """Draw the weight of each token of a random step that is cut over micro-batches and ranks.

        A line is the weight that the mode gives the token; without a mode, the weight in the same step uncut. The
        formats and errors are those of `plot_weights`; ValueError for a function whose weights cannot be measured.
        """
        if self.panel is None:
            raise ValueError(
                f"a picture of {self.name}: its weights in a cut step cannot be measured. Print the report, which says "
                "why."
            )
        write_picture([replace(self.panel, title=str(self).partition("\n")[0])], path)
