"""Facts: numbers of one rank that all ranks compare, and the columns of all ranks.

A `Fact` specifies what is read, at which stage of a run, and the rule for its columns. A stage sends the facts of all due checks in one
note, as JSON: an entry for each check, which contains a list of values for each of its facts (``row_exchange.py``). Every number arrives
unchanged. A rule is a pure function from columns to findings, so every rank has the same findings. Rows of users' checks are converted to
facts in ``user_rows.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from lightning_ddp_losses.callbacks.findings import CheckStage, Finding

Numbers: TypeAlias = "Mapping[str, float | Sequence[float]]"
"""Numbers of one rank by the name of their column: an int, a float, or a list of either."""

Columns: TypeAlias = "dict[str, Sequence[Any]]"
"""Numbers of all ranks by the name of their column, in rank order."""


@dataclass(frozen=True)
class Fact:
    """Numbers that ranks compare at one or several stages.

    Attributes:
        name: Name of the numbers.
        stage: Stage of the run at which they are read, or several stages.
        read: Function of the check that returns the numbers of this rank, without communication. It may return a function, which is called
            when the numbers are sent. After a step that is one step later, when copies from a device have been completed. It may return
            None if there are no numbers in this step.
        rule: Pure function that returns the findings in the columns of all ranks. None for numbers that are only stored, and for facts
            whose findings are added by single ranks while reading.
        see: Function of the check that receives the columns before the rule. It stores figures, and may add columns of earlier steps.
        equal: Columns in which healthy ranks have the same number.
        zero: Columns in which healthy ranks have zero. If all columns in ``equal`` and ``zero`` are healthy, the rule is not called,
            because it would find nothing. Leave both empty for a rule that depends on other columns.
    """

    name: str
    stage: CheckStage | tuple[CheckStage, ...]
    read: Callable[[Any], Numbers | Callable[[], Numbers] | None]
    rule: Callable[[Columns], list[Finding]] | None = None
    see: Callable[[Any, Columns], None] | None = None
    equal: tuple[str, ...] = ()
    zero: tuple[str, ...] = ()

    @property
    def stages(self) -> tuple[CheckStage, ...]:
        """Stages of the run at which the numbers are read."""
        return self.stage if isinstance(self.stage, tuple) else (self.stage,)

    def is_healthy(self, columns: Columns) -> bool:
        """Return whether the columns in ``equal`` and ``zero`` imply that the rule finds nothing."""
        for name in self.equal:
            column = columns.get(name, (0, 1))  # a column that is missing on some rank is not healthy
            if column.count(column[0]) != len(column):
                return False
        is_zero = not any(any(columns.get(name, (1,))) for name in self.zero)
        return is_zero and bool(self.equal or self.zero)


def columns_of(names: Iterable[str], values_by_rank: Sequence[Sequence[Any]]) -> Columns:
    """Return the columns of one fact. Columns that are missing on some ranks are omitted; another column tells the rule that ranks differ.

    Args:
        names: Names of the columns on this rank, in the order of the values.
        values_by_rank: Values that each rank sent.
    """
    return dict(zip(names, zip(*values_by_rank, strict=False), strict=False))
