"""Is training on N ranks the same as in one process? If not: where, by how much, why, and what to change.

`records` and `recorder` write a run down, `fitting` and `processes` run it, `compare` compares two, `rules` and `diagnose` explain.
"""

from lightning_ddp_losses.audit.api import assert_parity, audit
from lightning_ddp_losses.audit.report import AuditReport

__all__ = ["AuditReport", "assert_parity", "audit"]
