"""Training steps whose random numbers are those of one process.

* ``part``: the feature of a strategy, between Lightning's hooks and ``lightning_ddp_losses.randomness``
"""

from lightning_ddp_losses.strategies.randomness.part import StepRandomness

__all__ = ["StepRandomness"]
