"""Is training on N ranks the same as in one process? If not, the report names the location, the size, the cause and a fix.

An audit from top to bottom:

* `api`: `audit` and `assert_parity`. It assembles the report from the comparison, ranked diagnoses, and notes.
* `parity`: the same comparison for any training loop, and one process's part of its runs.
* `runs`: makes each recording once, when a comparison or a rule requests it, in processes that it starts and waits for.
* `fit_run`: one process's part of a run of `audit`.
* `recorder`: records gradients, parameters and losses of one process, for both kinds of run. It implements the ablations: runs without
  random draws, batch statistics or low precision, and runs perturbed by one rounding unit.
* `rank_record`: the record of each rank and its tensors in files.
* `replay`: the plan of a run, and the ranks' batches for another run, which are joined, split, or used in turn.
* `compare`: two recordings, compared tensor by tensor, and the largest error that counts as rounding.
* `context`: the interface of a finished audit for rules, which makes counterfactual runs on request.
* `rules`: one small function for each fault. The texts are in the table of faults.
* `report`: text, JSON, HTML and the figure.

Equality is up to rounding. The rounding error of each gradient is measured by perturbing parameters and inputs of the one process by one
rounding unit. A multiple of it is allowed, but always less than a factor of two at the first step. In 16 bits, a gradient is equal within
the spread of such runs, a finding if it is well outside the spread, and between the two the report says "cannot tell at this precision". If
a step accumulates, ``AuditReport.accumulation`` states whether the run equals the mean of its micro-batches, or one process on all their
rows. A difference that no rule explains is called *unknown*, with the layer at which activations or gradients first differ.

Limits: processes are forked (Linux and macOS, before CUDA is used), on one machine. Ranks store whole parameters, class shards, or parts
created by ``fully_shard``. FSDP1 and DeepSpeed are rejected. A tensor whose length is the batch size is treated as rows. Batches and
gradients are stored in temporary files.

A loss that is a sum is diagnosed term by term (`terms`): in a counterfactual run all terms but one are switched off in backward.

To add a fault, write a function in `rules`, add it to one of the stages (or ``DESYNC_RULES``), add a case to ``faults.yaml``, and add a
small module with the fault to ``tests/audit``. A rule reads fields of `RankRecord`, which the `recorder` fills, and requests further runs
through `AuditContext`.
"""

from lightning_ddp_losses.audit.api import assert_parity, audit
from lightning_ddp_losses.audit.parity import parity
from lightning_ddp_losses.audit.report import AuditReport

__all__ = ["AuditReport", "assert_parity", "audit", "parity"]
