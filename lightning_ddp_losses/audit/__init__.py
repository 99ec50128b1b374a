"""Is training on N ranks the same as in one process? If not: where, by how much, why, and what to change.

An audit from top to bottom:

* `api`: `audit` and `assert_parity`; puts the report together.
* `parity`: the same for any training loop.
* `runs`: makes the recordings, each once, when a comparison or a rule asks.
* `worker`: starts processes, awaits them within a time limit; in each a Trainer.
* `loop_run`: the part of one process in a run of `parity`.
* `recorder`: the callback that writes down what a run does.
* `rank_record`: what it writes, one `RankRecord` and the tensors of each rank, and how they are read.
* `replay`: what a run is, and the ranks' batches for another run: joined, cut, or one after the other.
* `ablations`: what a run can be without (random draws, batch statistics, precision), and runs moved by one rounding unit.
* `compare`: two recordings, tensor by tensor, and the largest error that is rounding.
* `context`: a finished audit as the rules see it, with counterfactual runs made when a rule asks.
* `diagnosis`: from a context to ranked diagnoses and notes.
* `rules`: one small function for each fault; the texts are in the table of faults.
* `report`: text, JSON, HTML and the figure.

What counts as equal: each gradient's own rounding error is measured (parameters and inputs of the one process moved by one rounding
unit), and a multiple of it is allowed, in half precision too, but never as much as a factor of two at the first step. Where a step
accumulates, ``AuditReport.accumulation`` says whether the run equals the mean of its micro-batches, or one process on all their rows.
What no rule knows is called *unknown*, with where activations or gradients first part.

Limits: processes are forked (Linux, macOS; before CUDA is used), on one machine, with whole parameters on every rank (class shards are
joined; FSDP and DeepSpeed are refused). A tensor as long as the batch counts as rows. Batches and gradients go through temporary files.

A newcomer who adds a fault writes a function in `rules`, gives it its place in ``STAGES`` (or ``DESYNC_RULES``), a case in
``faults.yaml``, and one small module with the fault in ``tests/audit``. What a rule must know of a rank is a field of
`RankRecord` that the `recorder` fills; what it must try is a method of `AuditContext`.
"""

from lightning_ddp_losses.audit.api import assert_parity, audit
from lightning_ddp_losses.audit.parity import parity
from lightning_ddp_losses.audit.report import AuditReport

__all__ = ["AuditReport", "assert_parity", "audit", "parity"]
