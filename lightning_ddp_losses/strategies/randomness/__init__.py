"""Training steps whose random numbers are those of one process.

* ``part``: the feature of a strategy, between Lightning's hooks and ``lightning_ddp_losses.randomness``
* ``note``: without that feature, a note about the dropout masks of the ranks
"""

from lightning_ddp_losses.strategies.randomness.note import DropoutNote
from lightning_ddp_losses.strategies.randomness.part import StepRandomness

__all__ = ["DropoutNote", "StepRandomness"]
