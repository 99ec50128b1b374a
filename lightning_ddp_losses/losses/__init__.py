"""Losses over the global batch, and how their gradient is computed in each mode.

Legend: ``W`` ranks, ``B`` rows on this rank, ``G`` = sum of B, ``S_r`` and ``n_r`` rank r's part of a sum and of its divisor. DDP divides
the sum of the ranks' gradients by W. Three exact modes evaluate a global loss L = S / N:

| mode | each rank computes | gather's backward | backward communication | exact for |
|---|---|---|---|---|
| ``replicated`` | the full L on all G rows | own slice times W | none | every loss that is deterministic given its inputs |
| ``rows`` | S_r: elements whose anchor is on this rank, against all G rows | sum over ranks | handshake + 1 | sums over anchors |
| ``rows``, symmetric tiles | S_r, and in backward all pairs of its own rows | not used | none | four losses (``tiled``) |
| ``elements`` | S_r: elements of local rows | no rows are gathered | none | sums over samples |

In ``rows`` and ``elements``, each rank back-propagates ``W * S_r / N`` and reports ``L = sum(S_r) / sum(n_r)``. DDP's mean over ranks then
yields the gradient of L. Symmetric tiles compute W times the gradient of the full ``L`` for this rank's rows, from one statistic per row of
every rank. In ``replicated``, parameters of the loss do not take a factor: every rank has the full gradient, and DDP's mean does not change
it. ``partial_sums`` is the only file that uses W as a factor.

Each mode takes a handshake (``distributed/handshake.py``), and all except ``elements`` take a gather of the rows. A small number of rows on
the CPU (``handshake.inline_capacity``) does not take a separate gather, because they are sent in the handshake from the second call on.

| file | content |
|---|---|
| ``global_batch``, ``global_batch_options`` | `GlobalBatchLoss`, `GlobalBatchMiner`: prepare, choose, run, and refused options |
| ``plans`` | rules determined by the signature of a call, for `GlobalBatchLoss` and miners, class shards, and two towers |
| ``evaluations`` | `by_elements`, `by_moments`, `by_rows`, `replicated`: how a call is evaluated, and `check_separable` |
| ``pml_registry`` | pytorch-metric-learning (PML) by class: losses, reducers, distances |
| ``gathered_call`` | a call's arguments over all ranks: names, shapes, two views as labelled rows, its shared seed |
| ``tuples`` | pairs and triplets of rows, from labels or a miner |
| ``element_losses`` | element losses as sums and divisors: PML's with their reducers, torch.nn's, and PML's statistics |
| ``partial_sums`` | sums and divisors of all ranks, the factor W, the value with its gradient, `global_mean` |
| ``late_interaction`` | `MaxSimLoss`: texts of several vectors each, of different lengths, scored in tiles |
| ``formulas`` | `global_rows`: custom formulas over rows that stay on their rank, with a rule for each operator |
| ``moments`` | mean and covariance over all ranks: Barlow Twins, VICReg |
| ``products`` | rows times rows in float32 or on tensor cores (``products=``), rows of unit length, running log-sum-exp |
| ``tiled``, ``tile_compiler``, ``kernels`` | the common losses in our own tiles, and their functions, compiled or as Triton kernels |
| ``class_sharded``, ``sharded_weight``, ``class_heads`` | `ClassShardedLoss`: classes by rank, positions of classes and targets, logits |
| ``sharded_softmax`` | its cross entropy |
| ``partial_fc`` | sampled classes |
| ``certificates`` | `certify`: is DDP's mean over ranks right for a loss, and if not, which line? |
| ``clip``, ``siglip``, ``two_towers``, ``tower_tiles`` | losses between two towers, and their products in tiles |

Steps of a call: its signature (``core.signature``) determines a plan, which is created once, rejects invalid input and selects an
evaluation (``plans``). Values are checked in each call. The rows are gathered (``gathered_call``), except in ``by_elements``. The selected
evaluation computes a ``PartialSum`` of each sub-loss, ``SumExchange.gather`` exchanges them, ``GlobalSums.reduce`` computes the value and
the factors, and the gradient is attached to the value. ``replicated`` computes the value directly.

Under ``torch.compile``, a call is one graph break in forward and in backward, because groups and handshakes are not compiled.
The wrapped loss may be compiled separately.

To add a PML loss: one row in ``pml_registry.LOSSES`` (and a ``PairLoss`` if it runs in tiles), one row in ``tests/losses/cases.py``.
To add a loss of our own: ``losses/<name>.py`` and one export here.

Pitfalls, measured on torch 2.13 and PML 2.9 in 2026: PML's learnable losses assign ``self.W.data`` in the dtype of the embeddings, so a
loss runs with autocast disabled and its inputs in its parameters' dtype (``core/precision.py``). A zero loss of PML is
``sum(embeddings * 0)``, whose graph does not contain the weight on that rank, so parameters are always added to the graph
(``core/autograd_graph.py``). Rows are gathered in rank order: with own rows first, memories and losses that depend on the index would
differ by rank.
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
