"""Losses over the global batch, and the one statement of their gradient.

Legend: ``W`` ranks, ``B`` rows on this rank, ``G`` = sum of B, ``S_r`` and ``n_r`` rank r's part of a sum and of its divisor. DDP divides
the sum of the ranks' gradients by W. Three exact modes evaluate a global loss L = S / N:

| mode | each rank computes | gather's backward | backward communication | exact for |
|---|---|---|---|---|
| ``replicated`` | the full L on all G rows | own slice times W | none | every loss that is deterministic given its inputs |
| ``rows`` | S_r: elements whose anchor is on this rank, against all G rows | sum over ranks | handshake + 1 | sums over anchors |
| ``rows``, symmetric tiles | S_r, and later all that its own rows take part in | never asked | none | four losses (``tiled``) |
| ``elements`` | S_r: elements of local rows | no rows are gathered | none | sums over samples |

In ``rows`` and ``elements`` each rank back-propagates ``W * S_r / N`` and reports ``L = sum(S_r) / sum(n_r)``. DDP's mean over ranks then
gives the gradient of L. Symmetric tiles give this rank's rows W times their gradient of the full ``L``, from one statistic per row of
every rank. ``replicated`` needs no factor for the loss's own parameters: every rank holds the full gradient and DDP's mean leaves it
alone. ``partial_sums`` is the only file that names W as a factor.

A mode costs a handshake (``distributed/handshake.py``), and a gather of the rows unless it is ``elements``. Few rows on the CPU
(``handshake.inline_capacity``) need no separate gather: from the second call on they travel in the handshake.

| file | content |
|---|---|
| ``global_batch``, ``global_batch_options`` | `GlobalBatchLoss`, `GlobalBatchMiner`: prepare, choose, run, and refused options |
| ``plans`` | what the signature of a call decides: of `GlobalBatchLoss` and miners, of class shards, of two towers |
| ``evaluations`` | `by_elements`, `by_moments`, `by_rows`, `replicated`: how a call is evaluated, and `check_separable` |
| ``pml_registry`` | pytorch-metric-learning (PML) by class: losses, reducers, distances |
| ``gathered_call`` | a call's arguments over all ranks: names, shapes, two views as rows with identities, its shared seed |
| ``tuples`` | pairs and triplets of rows, from labels or a miner |
| ``element_losses`` | element losses as sums and divisors: PML's with their reducers, torch.nn's, and PML's statistics |
| ``partial_sums`` | sums and divisors of all ranks, the factor W, the value with its gradient, `global_mean` |
| ``late_interaction`` | `MaxSimLoss`: texts of several vectors each, of different lengths, scored in tiles |
| ``formulas`` | `global_rows`: a formula of one's own over rows that stay on their rank, by rules for each operator |
| ``moments`` | mean and covariance over all ranks: Barlow Twins, VICReg |
| ``products`` | rows times rows in float32 or on tensor cores (``products=``), rows of unit length, running log-sum-exp |
| ``tiled``, ``tile_compiler``, ``kernels`` | the common losses in tiles of our own, their functions, compiled or as kernels in Triton |
| ``class_sharded``, ``sharded_weight``, ``class_heads`` | `ClassShardedLoss`: classes by rank, places of classes and targets, logits |
| ``sharded_softmax`` | its cross entropy |
| ``partial_fc`` | sampled classes |
| ``certificates`` | `certify`: is DDP's mean over ranks right for a loss, and if not, which line? |
| ``clip``, ``siglip``, ``two_towers``, ``tower_tiles`` | losses between two towers, and their products in tiles |

The way of a call: its signature (``core.signature``) leads to a plan, which is made once, refuses bad input and chooses an evaluation
(``plans``). Values are checked in each call. The rows are gathered (``gathered_call``) unless it is ``by_elements``. It computes a
``PartialSum`` of each sub-loss; ``SumExchange.gather`` exchanges them, ``GlobalSums.reduce`` makes the value and the factors, and the value
gets its gradient. ``replicated`` has the value at once.

Under ``torch.compile`` a call is one break of the graph, in forward and in backward: groups and handshakes are not compiled.
The wrapped loss may be compiled by itself.

To add a PML loss: one row in ``pml_registry.LOSSES`` (and a ``PairLoss`` if it runs in tiles), one row in ``tests/losses/cases.py``.
To add a loss of our own: ``losses/<name>.py`` and one export here.

Traps, measured on torch 2.13 and PML 2.9 in 2026: PML's learnable losses assign ``self.W.data`` in the dtype of the embeddings, so a loss
runs with autocast off and its inputs in its parameters' dtype (``core/precision.py``). A zero loss of PML is ``sum(embeddings * 0)``, which
leaves its weight out of the graph on that rank alone, so parameters always stay in the graph (``core/autograd_graph.py``). Rows are
gathered in rank order: own rows first would make losses that depend on the index, and memories, differ by rank.
"""

from lightning_ddp_losses.losses.certificates import Certificate, certify
from lightning_ddp_losses.losses.class_sharded import ClassShardedLoss
from lightning_ddp_losses.losses.clip import ClipLoss
from lightning_ddp_losses.losses.evaluations import check_separable
from lightning_ddp_losses.losses.formulas.global_rows import global_rows
from lightning_ddp_losses.losses.global_batch import GlobalBatchLoss, GlobalBatchMiner
from lightning_ddp_losses.losses.late_interaction.max_sim import MaxSimLoss
from lightning_ddp_losses.losses.partial_sums import global_mean
from lightning_ddp_losses.losses.pml_registry import register_element_wise, register_row_separable
from lightning_ddp_losses.losses.siglip import SigLipLoss

__all__ = [
    "Certificate",
    "ClassShardedLoss",
    "ClipLoss",
    "GlobalBatchLoss",
    "GlobalBatchMiner",
    "MaxSimLoss",
    "SigLipLoss",
    "certify",
    "check_separable",
    "global_mean",
    "global_rows",
    "register_element_wise",
    "register_row_separable",
]
