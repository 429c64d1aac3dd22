"""A finding of the doctor, and the report of all findings for people and programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from rich.console import Console


class Severity(StrEnum):
    """Whether a finding fails the command."""

    BREAKS = "breaks"
    WARNS = "warns"


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """Something wrong. `name` is one word for its kind, `words` say what is so, and `mend` is the
    command, or the change, that mends it."""

    name: str
    words: str
    mend: str
    severity: Severity = Severity.BREAKS


def warning(name: str, words: str, mend: str) -> DoctorFinding:
    """A finding that does not fail the command."""
    return DoctorFinding(name, words, mend, Severity.WARNS)


@dataclass(slots=True)
class DoctorReport:
    """The findings so far, the checks that were made, and those that could not be, with why."""

    findings: list[DoctorFinding] = field(default_factory=list)
    made: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def take(self, check: str, findings: Sequence[DoctorFinding]) -> None:
        """The results of one check."""
        self.made.append(check)
        self.findings += findings

    def leave_out(self, check: str, why: str) -> None:
        self.left_out.append(f"{check}: {why}")

    @property
    def breaks(self) -> bool:
        return any(finding.severity is Severity.BREAKS for finding in self.findings)


def print_report(examination: DoctorReport, *, as_json: bool) -> None:
    """Prints findings, those that break something first."""
    ordered = sorted(examination.findings, key=lambda finding: finding.severity)
    if as_json:
        content = {
            "findings": [asdict(finding) for finding in ordered],
            "checks": examination.made,
            "left_out": examination.left_out,
        }
        print(json.dumps(content))
        return
    console = Console(soft_wrap=True, highlight=False)
    for finding in ordered:
        console.print(f"{finding.severity}  {finding.name}: {finding.words}", markup=False)
        console.print(f"        mend: {finding.mend}", markup=False)
    for why in examination.left_out:
        console.print(f"not tried  {why}", markup=False)
    console.print(_summary(examination), markup=False)


def _summary(examination: DoctorReport) -> str:
    checked = f"checked: {', '.join(examination.made)}"
    if not examination.findings:
        return f"nothing is wrong; {checked}"
    num_breaks = sum(f.severity is Severity.BREAKS for f in examination.findings)
    num_warns = len(examination.findings) - num_breaks
    return f"{num_breaks} that break something, {num_warns} to know of; {checked}"
