"""Which one process the ranks equal where an optimizer step accumulates micro-batches: one that accumulates them too, or one on all rows.

Lightning's accumulation is the mean of the micro-batches' losses; with ``accumulation="window"`` it is the loss of all rows of a window.
The two are equal where a loss is a mean over rows and every micro-batch counts as many of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_ddp_losses.audit.compare import Comparison


@dataclass(frozen=True)
class AccumulationParity:
    """What the ranks equal.

    Attributes:
        micro_batches: The most that an optimizer step has.
        equals_micro_batches: Whether one process that accumulates the same micro-batches, as Lightning does, has the ranks' gradients and
            parameters.
        equals_whole_window: Whether one process on all rows of each window at once has them.
        micro_batches_error: Largest error of a gradient against the former, at the first step at which something differs, else at any.
        whole_window_error: Against the latter.
    """

    micro_batches: int
    equals_micro_batches: bool
    equals_whole_window: bool
    micro_batches_error: float
    whole_window_error: float

    def sentence(self) -> str:
        """Say it."""
        processes = [
            (
                "one process that accumulates the same micro-batches",
                self.equals_micro_batches,
                self.micro_batches_error,
            ),
            ("one process on all rows of each window at once", self.equals_whole_window, self.whole_window_error),
        ]
        equal = [text for text, is_equal, _ in processes if is_equal]
        others = [f"{text} (error {error:.1e})" for text, is_equal, error in processes if not is_equal]
        said = []
        if equal:
            said.append(f"equal {' and '.join(equal)}")
        if others:
            said.append(f"differ from {' and '.join(others)}")
        return f"Accumulation of up to {self.micro_batches} micro-batches a step: the ranks {', and '.join(said)}."


def judge_accumulation(micro_batches: int, same: Comparison, whole: Comparison) -> AccumulationParity:
    """Put both comparisons of the ranks together.

    Args:
        micro_batches: The most that an optimizer step has.
        same: With one process that accumulates the same micro-batches.
        whole: With one process on all rows of each window.
    """
    return AccumulationParity(micro_batches, same.equal, whole.equal, same.worst(), whole.worst())
