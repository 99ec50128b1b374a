"""Losses over the global batch in tiles: the value, gradient and statistics of pytorch-metric-learning, never a whole matrix of pairs.

| file | content |
|---|---|
| ``evaluator`` | which losses are evaluated in tiles; one call, forward and backward |
| ``call_tiles`` | the rows and columns of a call in tiles |
| ``half_tiles`` | tiles of half of a symmetric matrix, on the CPU |
| ``pair_losses`` | a loss on tiles (``PairLoss``): NT-Xent, SupCon, multi-similarity, contrastive, triplet margin |
| ``tile_functions`` | their formulas: one pure function per loss and direction; compiled (``compile_tiles=True``) |
| ``reductions`` | pytorch-metric-learning's reducers on numbers of rows |
| ``tiles`` | a tile, and masks of its positives and negatives |
| ``distances`` | distances of a tile's rows and columns, with their gradient |

To add a loss, write its formula and a ``PairLoss``, and name the class in the loss's row of ``pml_registry.LOSSES``. Tests are
parametrized by ``LOSSES`` in ``tests/losses/test_tiled.py``.
"""

from lightning_ddp_losses.losses.tiled.evaluator import TiledCall, TiledPlan, tiled_plan

__all__ = ["TiledCall", "TiledPlan", "tiled_plan"]
