"""The Lightning strategy that gives learnable losses distributed data parallelism of their own.

* ``ddp_losses``: the strategy, Lightning's hooks in the order of a fit. A new option is one keyword here, and its use in the part that it
  concerns.
* ``loss_discovery``: which submodules are losses. ``adoption``: losses that nobody registered. ``global_batch_option``: losses made
  global.
* ``ddp_setup``: DDP's options, who reduces what, equal names, data loaders, batch norm.
* ``loss_forward``: what surrounds each call of a loss.
* ``call_check``: the handshake in each backward. ``loss_reducer``, ``gradient_buckets``: the mean of the losses' gradients after it.
* ``uneven_ends``: training epochs that end on every rank at the same batch.
* ``windows``: accumulation windows as Lightning's loops go.
* ``sharded_ddp``: weights of which each rank holds its own classes, their norms and overflows (``sharded_parameters``) and checkpoints
  (``shard_files``; ``shard_folder`` for a file per rank, ``shard_records`` for what loading compares).
* ``advice``: warnings, each once. ``fabric``: what Fabric is told that asks for our names.
"""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_ddp_losses.strategies.ddp_losses import DDPLossStrategy
from lightning_ddp_losses.strategies.ddp_setup import use_layer_sync
from lightning_ddp_losses.strategies.fabric import register_refusals
from lightning_ddp_losses.strategies.global_batch_option import use_global_wrapper
from lightning_ddp_losses.strategies.loss_discovery import register_loss_type

__all__ = ["DDPLossStrategy", "register_loss_type", "use_global_wrapper", "use_layer_sync"]

DDPLossStrategy.register_strategies(StrategyRegistry)
register_refusals(
    [name for name in StrategyRegistry if name.startswith(DDPLossStrategy.strategy_name)], STRATEGY_REGISTRY
)
