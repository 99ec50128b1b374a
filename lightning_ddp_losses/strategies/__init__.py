"""The Lightning strategy that gives learnable losses their own distributed data parallelism.

* ``fit_part``: the options of all strategies, and one feature of a strategy as the hooks of a fit that it needs. A new option is a field
  and a part in this file, and a keyword of the strategies.
* ``ddp_losses``: the strategy, and the wrap of the model in DDP. ``ddp_setup``: who reduces what, buffers, batch norm, launchers.
* ``fsdp_losses``: the strategy for models that ``fully_shard`` divides, and what it refuses.
* ``loss_hooks``: Lightning's hooks, in the order of a fit, and those around checkpoints. ``loss_parallelism``: the losses of a fit and
  the list of its parts, and facts that ranks must have in common.
* ``loss_discovery``: which submodules are losses. ``loss_forward``: precision and checks around each call of a loss, the handshake that
  compares the calls in each backward, losses made global, and losses that the module does not register.
* ``loss_reducer``: the mean of the losses' gradients after backward.
* ``epoch_ends``: training epochs that end on every rank at the same batch. ``empty_batches``: batches of 0 rows for a rank that ran out,
  and what a step with such a batch refuses.
* ``training_data``: samplers and data sets of training loaders. ``evaluation``: each row once in evaluation, and one meeting after it.
* ``windows``: accumulation windows in Lightning's loops, and its counters. ``window_batches``: batches of a window that are
  read, and counted, before its first step. ``interruptions``: signals, and checkpoints after errors.
* ``resume``: the next rows and random numbers, in a checkpoint, and loaders that have a state.
* ``shards``: weights with classes divided over the ranks: norms, overflows, parts and wholes.
* ``checkpoint_files``: files that are complete or do not exist, and the same error on
  every rank. ``checkpoint_folder``: folders into which each rank writes its parts.

Differences from plain ``ddp``:

| situation | plain ``ddp`` | ``ddp_losses`` |
|---|---|---|
| losses that alternate, also under accumulation | error, or unused parameters searched in every step | exact, idle losses are free |
| a loss called on some ranks only | hang, later a message about unused parameters | the same error on all ranks, naming loss and ranks |
| a loss in a list, dict, closure or callback | each rank trains its own copy | error with its path, or ``adopt=True`` |
| ``bf16-mixed``, ``bf16-true`` | crash, or a half-precision weight for good | the loss runs in float32; weight and state keep their dtype |
| a zero loss on one rank (no positive pair) | hang | zero gradient from that rank |
| parameters created, replaced or unfrozen after the wrap | silently local | reduced; must start equal, or error |
| parameters registered in another order per rank | silently mixed up | error before the first broadcast |
| labels out of range, wrong width, NaN or no rows on one rank | index error, hang on other ranks | the same error on all ranks |
| ranks with different numbers of rows | silently another gradient | one warning with both counts |
| ranks with different numbers of batches | hang | the same error on all ranks, or ``uneven=`` |
| samples that a padded validation repeats | counted twice | each counted once |
| iterable data sets with a ``state_dict``, resumed | rank 0's loader for all, a batch too far; no data set | each rank's own state |
"""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_ddp_losses.core import lightning_compat
from lightning_ddp_losses.strategies.ddp_losses import DDPLossStrategy
from lightning_ddp_losses.strategies.ddp_setup import nearest_names, register_refusals, use_layer_sync
from lightning_ddp_losses.strategies.fsdp_losses import ModelParallelLossStrategy
from lightning_ddp_losses.strategies.loss_discovery import register_loss_type
from lightning_ddp_losses.strategies.loss_forward import use_global_wrapper
from lightning_ddp_losses.strategies.loss_hooks import whole_checkpoint

__all__ = [
    "DDPLossStrategy",
    "ModelParallelLossStrategy",
    "register_loss_type",
    "use_global_wrapper",
    "use_layer_sync",
    "whole_checkpoint",
]

_OURS = (DDPLossStrategy, ModelParallelLossStrategy)
for _strategy in _OURS:
    _strategy.register_strategies(StrategyRegistry)
register_refusals([name for name in StrategyRegistry if StrategyRegistry[name]["strategy"] in _OURS], STRATEGY_REGISTRY)
lightning_compat.explain_unknown_strategy(nearest_names)
# instances may have the same options as names: both are tested
lightning_compat.allow_precisions(ModelParallelLossStrategy, ("16-mixed", "64-true"))
