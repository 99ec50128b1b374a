"""`Certificate`: what ``certify`` found, as objects, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from typing import Literal

_SHOWN = 4  # reasons of each kind in the text
Verdict = Literal["right", "right for equal counts only", "right on this path only", "wrong", "cannot tell"]


@dataclass(frozen=True)
class Reason:
    """A line of the program and what it does.

    Attributes:
        file: Path of the file.
        line: Number of the line.
        text: Its source.
        operator: The operator of torch, or what else the line calls.
        why: What is wrong with it, or what it limits.
    """

    file: str
    line: int
    text: str
    operator: str
    why: str

    def __str__(self) -> str:
        place = "no line of Python"
        if self.file:
            place = f"{os.path.basename(self.file)}:{self.line}: {self.text}"
        return f"{place}\n    {self.operator}: {self.why}"


@dataclass(frozen=True)
class Sent:
    """What ``GlobalBatchLoss`` sends for a loss.

    Attributes:
        evaluation: The cheapest exact evaluation: ``"elements"``, ``"moments"``, ``"rows"`` or ``"replicated"``. Empty if it refuses the
            loss.
        text: The plan, as ``print(GlobalBatchLoss(loss).plan)`` shows it, or the refusal.
        ranks: Number of ranks for which ``gathered_bytes`` is computed.
        rows: Number of rows on each of these ranks, equal to the number of rows of the example.
        gathered_bytes: Size in bytes of the rows that each rank holds after the gather. 0 if no rows are gathered. For a function, the
            maximum size of a gather of its arguments: rows stay on their rank unless an operator requires the rows of all ranks.
    """

    evaluation: str
    text: str
    ranks: int
    rows: int
    gathered_bytes: int

    def __str__(self) -> str:
        if not self.evaluation:
            return f"GlobalBatchLoss refuses this loss: {self.text}"
        moved = "no rows are gathered"
        if self.gathered_bytes:
            limit = "at most " if self.evaluation == "rows" else ""
            moved = f"each rank gathers {limit}{self.gathered_bytes:,} bytes of rows"
        return f"GlobalBatchLoss is exact for any ranks. {self.text}\n{self.ranks} ranks with {self.rows} rows each: {moved}."


_SENTENCES: dict[str, str] = {
    "right": "Right under plain DDP for ranks with equally many rows: the loss is a mean over rows.",
    "right for equal counts only": "Right under plain DDP only if all ranks have equally many rows, and equal counts above 0.",
    "right on this path only": "Right under plain DDP only where these branches come out alike on all ranks and on the whole batch.",
    "wrong": "Wrong under plain DDP: the mean over ranks is not the loss of the whole batch.",
    "cannot tell": "Cannot tell whether this loss is right under plain DDP.",
}
_RIGHT_ON_A_PATH = (
    "Right under plain DDP for ranks with equally many rows, on the path that the example takes: "
    "the loss is a mean over rows."
)


@dataclass(frozen=True)
class Certificate:
    """Whether DDP's mean over ranks is right for a loss. ``print`` shows it.

    Attributes:
        verdict: ``"right"``: for ranks with equally many rows, whatever their number and the rows. ``"right for equal counts only"``: if
            the counts that ``reasons`` names are also equal on all ranks. ``"right on this path only"``: if the Python branches that
            ``reasons`` names have the same outcome as on the example. ``"wrong"``: two simulated ranks yield a different value or gradient
            than the whole example. ``"cannot tell"``: neither was shown.
        reasons: The lines that decide, unless the verdict is ``"right"``.
        limits: Lines whose outcome the verdict assumes: branches of Python on values, and targets that are not ignored.
        sent: What ``GlobalBatchLoss`` sends for the loss.
        difference: Largest relative difference between two simulated ranks and the whole example. None if it could not be measured.


    Example:
        >>> import torch
        >>> from lightning_ddp_losses import certify
        >>> certify(torch.nn.MSELoss(), torch.randn(6, 2), torch.randn(6, 2)).verdict
        'right'
    """

    verdict: Verdict
    reasons: tuple[Reason, ...]
    limits: tuple[Reason, ...]
    sent: Sent
    difference: float | None

    def __str__(self) -> str:
        headline = _RIGHT_ON_A_PATH if self.verdict == "right" and self.limits else _SENTENCES[self.verdict]
        lines = [headline, *_shown(self.reasons)]
        if self.verdict == "wrong" and self.difference is not None:
            lines.append(f"Two simulated ranks differ from the whole example by {self.difference:.1e} of its size.")
        limits: tuple[Reason, ...] = ()
        if self.verdict.startswith("right"):
            limits = tuple(limit for limit in self.limits if limit not in self.reasons)
        if limits:
            lines.append("The verdict is about this path only, and other rows may take another one:")
        return "\n".join([*lines, *_shown(limits), str(self.sent)])

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1)


def _shown(reasons: tuple[Reason, ...]) -> list[str]:
    """Return the first reasons as lines."""
    lines = [f"  {line}" for reason in reasons[:_SHOWN] for line in str(reason).splitlines()]
    if len(reasons) > _SHOWN:
        lines.append(f"  and {len(reasons) - _SHOWN} more")
    return lines
