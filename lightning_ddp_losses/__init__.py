"""Distributed losses that are right: W ranks compute the gradient of one process, exactly.

```
rank 0: rows -> encoder -> embeddings -+                     +- gradient -+
rank 1: rows -> encoder -> embeddings -+-> loss of all rows -+- gradient -+-> DDP's mean =
rank 2: rows -> encoder -> embeddings -+                     +- gradient -+   one process
```

The guarantee: after ``backward`` and DDP's mean over ranks, every parameter holds the gradient of the loss evaluated in ONE process on the
concatenated global batch (rank order), and the number that a loss returns is that loss, equal on every rank. If this cannot be guaranteed,
an error is raised on every rank, and there is never a silent fallback. Importing the package registers the strategy names
(``Trainer(strategy="ddp_losses")``).

Legend of every file: ``W`` ranks, ``B`` rows on this rank, ``G`` = sum of B, ``D`` embedding size, ``C`` classes, ``c`` classes that this
rank holds. ``local_*`` belongs to one rank, ``global_*`` to all. ``losses/__init__`` describes the mathematics.

Layout. Imports only go down (``tests/test_layers.py``):

| folder | content |
|---|---|
| ``errors`` | the errors a user can cause. Each formats itself: what, expected, got, ranks, fix |
| ``requirements`` | versions of installed packages, read before any of them is imported |
| ``core`` | code for a single rank: precision, autograd graph, inputs, modules and their patched methods, the reader of ``faults.yaml`` |
| ``distributed`` | cooperation of ranks: groups, the handshake before every collective, collectives, shards, fingerprints |
| ``randomness`` | dropout, noise and other draws on W ranks that are equal to the draws of one process |
| ``samplers`` | batches that together form the batch of one process, and predictions of all ranks in one order |
| ``losses`` | losses over the global batch: any loss wrapped, tiles, class shards, two towers |
| ``metrics`` | torchmetrics with one exchange for all states, with a graph or for evaluation |
| ``layers`` | exact batch norm over the ranks |
| ``strategies`` | the Lightning strategy: losses next to the model's DDP, their reduction, checkpoints |
| ``microbatch`` | an encoder over a large batch in pieces |
| ``ssl`` | statistics of self-supervised losses: Sinkhorn, centre, KoLeo, Barlow Twins, VICReg |
| ``integrations`` | other hosts: Fabric, Hugging Face's Trainer, sentence-transformers |
| ``callbacks`` | checks on every rank during a fit |
| ``audit`` | N ranks against one process on the same batches, and why they differ. For a LightningModule, or for any loop |
| ``demo`` | the modules, data and encoders that the included configs train |
| ``testing`` | a plugin for pytest: ranks that live for a whole test run, and parity as an assertion |
| ``cli`` | the ``ddp-losses`` command: training, audits, the manual, the doctor |

The manual is ``ddp-losses explain`` in a terminal, and HTML after ``nox -s docs``: a page for each fault, host, peer and kind of reader,
and the numbers. Names below the top level are in ``lightning_ddp_losses.losses``, ``lightning_ddp_losses.collectives``,
``lightning_ddp_losses.sharding``, ``lightning_ddp_losses.errors``, ``lightning_ddp_losses.metrics``, ``lightning_ddp_losses.layers``,
``lightning_ddp_losses.samplers``, ``lightning_ddp_losses.randomness``,
``lightning_ddp_losses.strategies``, ``lightning_ddp_losses.ssl``, ``lightning_ddp_losses.callbacks``,
``lightning_ddp_losses.audit``, ``lightning_ddp_losses.testing`` and ``lightning_ddp_losses.cli``.

``collectives`` and ``sharding`` are documented import paths for parts of ``distributed``.

Where to add new parts:

| a ... | is added as | its tests |
|---|---|---|
| loss | ``losses/<name>.py`` and one export. A loss of PML: a row in ``losses/pml_registry.py`` | a row in ``tests/losses/cases.py`` |
| check | ``callbacks/<name>.py``: a ``RankCheck`` with ``measure`` and ``judge`` | one healthy and one sabotaged row |
| collective | one function and table row in ``distributed/collectives.py`` | a row in ``tests/distributed`` |
| strategy option | one keyword of ``DDPLossStrategy`` and its use | one row in ``tests/strategies`` |
| config | ``configs/<name>.yaml``, its command in the header | ``tests/cli`` runs each for 2 steps |

From another package: ``losses.check_separable(loss)`` measures which modes are exact for a loss. ``losses.register_row_separable`` and
``losses.register_element_wise`` declare them (``pair_loss=`` adds an evaluation in tiles). ``register_loss_type`` makes the strategy find
losses of a class. A check is a subclass of ``RankCheck``, passed to ``DDPChecks``.
"""

from lightning_ddp_losses import requirements as _requirements

_requirements.refuse_unusable()

# isort: split
import lightning.pytorch as _lightning  # noqa: F401 - first: in the import order of our modules, it takes a tenth longer

from lightning_ddp_losses.audit import AuditReport, assert_parity, audit, parity
from lightning_ddp_losses.callbacks import (
    BatchCheck,
    BufferSyncCheck,
    CheckpointCheck,
    CommunicationMonitor,
    DDPChecks,
    DeviceCheck,
    GradientFlowCheck,
    LossCheck,
    OptimizerCheck,
    ParameterSyncCheck,
    RankCheck,
)
from lightning_ddp_losses.distributed.accumulation import accumulation_window
from lightning_ddp_losses.errors import (
    AuditError,
    ConfigurationError,
    DDPLossError,
    HiddenLossError,
    InputError,
    LossCallError,
    PeerError,
    RankMismatchError,
)
from lightning_ddp_losses.integrations import register_fabric_strategies
from lightning_ddp_losses.layers import SyncBatchNorm
from lightning_ddp_losses.losses import (
    Certificate,
    ClassShardedLoss,
    ClipLoss,
    GlobalBatchLoss,
    GlobalBatchMiner,
    MaxSimLoss,
    SigLipLoss,
    certify,
    global_mean,
    global_rows,
)
from lightning_ddp_losses.metrics import DifferentiableMetric, EmbeddingRetrieval, differentiable, synced
from lightning_ddp_losses.microbatch import microbatched
from lightning_ddp_losses.randomness import global_randomness
from lightning_ddp_losses.samplers import GlobalBatchSampler, gather_predictions
from lightning_ddp_losses.strategies import (
    DDPLossStrategy,
    ModelParallelLossStrategy,
    register_loss_type,
    use_global_wrapper,
    use_layer_sync,
)

__version__ = "0.2.0"

__all__ = [
    "AuditError",
    "AuditReport",
    "BatchCheck",
    "BufferSyncCheck",
    "Certificate",
    "CheckpointCheck",
    "ClassShardedLoss",
    "ClipLoss",
    "CommunicationMonitor",
    "ConfigurationError",
    "DDPChecks",
    "DDPLossError",
    "DDPLossStrategy",
    "DeviceCheck",
    "DifferentiableMetric",
    "EmbeddingRetrieval",
    "GlobalBatchLoss",
    "GlobalBatchMiner",
    "GlobalBatchSampler",
    "GradientFlowCheck",
    "HiddenLossError",
    "InputError",
    "LossCallError",
    "LossCheck",
    "MaxSimLoss",
    "ModelParallelLossStrategy",
    "OptimizerCheck",
    "ParameterSyncCheck",
    "PeerError",
    "RankCheck",
    "RankMismatchError",
    "SigLipLoss",
    "SyncBatchNorm",
    "accumulation_window",
    "assert_parity",
    "audit",
    "certify",
    "differentiable",
    "gather_predictions",
    "global_mean",
    "global_randomness",
    "global_rows",
    "microbatched",
    "parity",
    "synced",
]

# configs and messages refer to a public class by the place where it is documented, so that its file may move
for _name in __all__:
    globals()[_name].__module__ = __name__

# losses, layers and strategies are siblings. This module, above them, registers them with each other
register_loss_type(GlobalBatchLoss)
register_loss_type(ClassShardedLoss)
register_loss_type(ClipLoss)
register_loss_type(SigLipLoss)
register_loss_type(MaxSimLoss)
use_global_wrapper(GlobalBatchLoss)
use_layer_sync(SyncBatchNorm)
register_fabric_strategies()
