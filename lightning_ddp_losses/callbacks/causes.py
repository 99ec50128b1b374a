"""Groups findings by their cause: one fault shows in many places, and only the most telling is worth a warning.

A parameter that nobody reduces is another one on each rank in its gradient, then in itself, then, through clipping, in every other
parameter. Which fault brings which along is in ``faults.FOLLOWING``; of the same fault the finding that is nearest to the cause comes
first. Every rank has the same findings in the same order, so every rank groups them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_ddp_losses.callbacks.findings import Finding
from lightning_ddp_losses.core.faults import FOLLOWING

_SEVERITIES = ("error", "warning", "note")
_RESULTS = "ParameterSyncCheck"  # what it finds is the result of gradients and optimizers
_MOST_FOLLOWERS = 8  # that a warning names


@dataclass
class Cause:
    """One finding, and those that follow from it.

    Attributes:
        lead: The finding that tells most.
        followers: The others, in the order in which they were found.
    """

    lead: Finding
    followers: list[Finding] = field(default_factory=list)

    def text(self) -> str:
        """Format the lead, and in a line what else it shows in."""
        if not self.followers:
            return self.lead.text()
        shown = "; ".join(f"{each.fault} {each.what}" for each in self.followers[:_MOST_FOLLOWERS])
        if len(self.followers) > _MOST_FOLLOWERS:
            shown += f" and {len(self.followers) - _MOST_FOLLOWERS} more"
        return self.lead.text(f"  of the same cause: {shown}")


def group_by_cause(
    found: Sequence[Finding], earlier: Sequence[Finding] = ()
) -> tuple[list[Cause], list[tuple[Finding, Finding]]]:
    """Return the causes among new findings, the most telling first; and pairs of a finding and the earlier lead that it follows from.

    Args:
        found: New findings of one place in the fit.
        earlier: The leads of causes that have been reported.
    """
    causes: list[Cause] = []
    late: list[tuple[Finding, Finding]] = []
    for finding in sorted(found, key=lambda each: _distance(each, found)):
        lead = next((each for each in earlier if _spreads(each, finding)), None)
        cause = next((each for each in causes if _brings(each.lead, finding)), None)
        if lead is not None:
            late.append((finding, lead))
        elif cause is not None:
            cause.followers.append(finding)
        else:
            causes.append(Cause(finding))
    return causes, late


def _brings(lead: Finding, finding: Finding) -> bool:
    """Say whether a finding of the same place follows from ``lead``, or is the same fault of something else."""
    same = finding.fault == lead.fault and finding.check == lead.check and finding.fix == lead.fix
    return same or _spreads(lead, finding)


def _spreads(lead: Finding, finding: Finding) -> bool:
    """Say whether a finding anywhere later follows from ``lead``."""
    return finding.fault in FOLLOWING.get(lead.fault, ())


def _distance(finding: Finding, found: Sequence[Finding]) -> tuple[int, bool, bool]:
    """Tell how far a finding is from its cause: grave ones first, causes before what they bring, gradients before parameters."""
    is_brought = any(_spreads(other, finding) and not _spreads(finding, other) for other in found)
    return _SEVERITIES.index(finding.severity), is_brought, finding.check == _RESULTS
