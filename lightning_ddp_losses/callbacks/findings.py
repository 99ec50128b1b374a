"""What a check says when it found something: one record, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_ddp_losses.core.faults import FAULTS, Severity
from lightning_ddp_losses.errors import ConfigurationError, format_error


@dataclass(frozen=True)
class Finding:
    """One finding of one check.

    Attributes:
        fault: Id of the fault (``faults.FAULTS``; the README's troubleshooting table has a row for it).
        what: What is wrong, as the user knows it.
        expected: What it should have been.
        ranks: The ranks it concerns; empty where it concerns all alike.
        name: The parameter, buffer, loss or option.
        values: One entry per rank, where ranks differ.
        fix: What to do, as a sentence.
        check: The check's class; filled in by the session, like the next two.
        step: Optimizer steps before this one.
        moment: Where in the run.
        max_difference: Between ranks, of the tensor's elements, where the check named a tensor.
    """

    fault: str
    what: str
    expected: str = ""
    ranks: tuple[int, ...] = ()
    name: str = ""
    values: tuple[Any, ...] = ()
    fix: str = ""
    check: str = ""
    step: int = 0
    moment: str = ""
    max_difference: float | None = None

    def __post_init__(self) -> None:
        if self.fault not in FAULTS:
            raise ConfigurationError("Finding.fault", expected="an id of FAULTS", got=repr(self.fault))

    @property
    def severity(self) -> Severity:
        """From the one table of faults."""
        return FAULTS[self.fault].severity

    @property
    def key(self) -> tuple[str, str, str]:
        """Findings of the same key are one fault seen again."""
        return self.check, self.fault, self.name

    def text(self) -> str:
        """For an error or a warning: what, expected, one line per rank, what to do."""
        where = f" (rank {', '.join(map(str, self.ranks))})" if self.ranks else ""
        what = f"{self.check}, {self.fault}, {self.moment} of step {self.step}: {self.what}{where}"
        expected = self.expected or None
        if self.max_difference is not None:
            what += f", max difference {self.max_difference:.3g}"
        return format_error(what, expected=expected, ranks=list(self.values) or None, fix=self.fix or None)

    def record(self) -> dict[str, Any]:
        """For ``ddp_checks.jsonl``."""
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        return {"step": plain.pop("step"), "check": plain.pop("check"), "severity": self.severity, **plain}


def odd_ranks(column: Sequence[Any]) -> tuple[int, ...]:
    """The ranks that differ from the majority; on a tie, from the first such value."""
    values = list(column)
    usual = max(values, key=lambda value: (values.count(value), -values.index(value)))
    return tuple(rank for rank, value in enumerate(values) if value != usual)


def failed_check(title: str, failures: Mapping[int, str]) -> Finding:
    """The finding of a check that failed by itself, with the errors of its ranks."""
    return Finding(
        "CHECK",
        f"{title} itself failed",
        "a row of every rank",
        tuple(failures),
        name=title,
        values=tuple(f"{rank}: {text}" for rank, text in failures.items()),
        fix="Mend the check, or leave it out of DDPChecks(checks=[...]).",
    )
