"""Is training on N ranks the same as in one process? If not, the report names the place, the size, the cause and a fix.

An audit from top to bottom:

* `api`: `audit` and `assert_parity`. It puts the report together: the comparison, ranked diagnoses, and notes.
* `parity`: the same for any training loop, and the part of one process in its runs.
* `runs`: makes the recordings, each once, when a comparison or a rule asks, in processes that it starts and waits for.
* `fit_run`: the part of one process in a run of `audit`.
* `recorder`: records gradients, parameters and losses of one process, for both kinds of run. It has the ablations: runs without random
  draws, batch statistics or low precision, and runs moved by one rounding unit.
* `rank_record`: the record of each rank and its tensors in files.
* `replay`: the plan of a run, and the ranks' batches for another run: joined, cut, or one after the other.
* `compare`: two recordings, tensor by tensor, and the largest error that is rounding.
* `context`: a finished audit as the rules see it, with counterfactual runs made when a rule asks.
* `rules`: one small function for each fault. The texts are in the table of faults.
* `report`: text, JSON, HTML and the figure.

Equal means up to rounding: each gradient's own rounding error is measured (parameters and inputs of the one process moved by one rounding
unit), and a multiple of it is allowed, but never as much as a factor of two at the first step. In 16 bits a gradient is equal within
the spread of such runs, a finding well beyond it, and between the two the report says "cannot tell at this precision". If a step
accumulates, ``AuditReport.accumulation`` states whether the run equals the mean of its micro-batches, or one process on all their rows.
A difference that no rule explains is called *unknown*, with the layer at which activations or gradients first part.

Limits: processes are forked (Linux and macOS, before CUDA is used), on one machine. Ranks hold whole parameters, class shards, or parts by
``fully_shard``. FSDP1 and DeepSpeed are refused. A tensor as long as the batch counts as rows.
Batches and gradients go through temporary files.

A loss that is a sum is asked term by term (`terms`): in a counterfactual run all terms but one are switched off in backward.

A newcomer who adds a fault writes a function in `rules`, gives it its place in one of the stages (or ``DESYNC_RULES``), a case in
``faults.yaml``, and one small module with the fault in ``tests/audit``. A rule reads fields of
`RankRecord`, which the `recorder` fills, and makes further runs through `AuditContext`.
"""

from lightning_ddp_losses.audit.api import assert_parity, audit
from lightning_ddp_losses.audit.parity import parity
from lightning_ddp_losses.audit.report import AuditReport

__all__ = ["AuditReport", "assert_parity", "audit", "parity"]
