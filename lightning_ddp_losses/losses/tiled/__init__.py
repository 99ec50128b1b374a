"""Losses over the global batch in tiles: the value, gradient and statistics of pytorch-metric-learning, never a whole matrix of pairs.

| file | what it holds |
|---|---|
| ``evaluator`` | how a loss is evaluated in tiles, if it is; one call, there and back |
| ``pair_losses`` | what a loss says about one tile (``PairLoss``); NT-Xent, SupCon, multi-similarity |
| ``margin_losses`` | contrastive and triplet margin loss |
| ``tiles`` | a tile: which entries are positives and negatives |
| ``distances`` | how far rows are from columns, and what that gives back |
| ``tile_functions`` | the elementwise part of a tile with masks in place of lists, one pure function per loss and direction |
| ``tile_compiler`` | these functions compiled, where that is asked for |
| ``accumulators`` | pytorch-metric-learning's reducers on row sums |

A new loss in tiles is one ``PairLoss``, named in the row of the loss in ``pml_registry.LOSSES``; its tests come
from ``LOSSES`` in ``tests/losses/test_tiled.py``.
"""

from lightning_ddp_losses.losses.tiled.evaluator import TiledEvaluator
from lightning_ddp_losses.losses.tiled.plan import TiledPlan, tiled_plan
from lightning_ddp_losses.losses.tiled.tile_compiler import TileCompiler

__all__ = ["TileCompiler", "TiledEvaluator", "TiledPlan", "tiled_plan"]
