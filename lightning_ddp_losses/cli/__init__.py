"""The command line and what it trains: an embedding module, three data modules, small encoders.

* ``app``: the subcommands and their options, the audit among them.
* ``module``: ``EmbeddingModule``, which trains an encoder with a loss.
* ``data``: rows of arrays as global batches cut by rank; the user's own arrays.
* ``evaluation``: retrieval metrics of the whole held-out set.
* ``report``: the table and the pictures at the end of a run.
* ``manual``, ``explain``: the manual's pages, and how the terminal shows them; ``pages/`` holds the recipes for those who come from a peer.
* ``configs``, ``doctor``: the configs that come with the package; versions, and two ranks for a second.
* ``demo``: the digits, two encoders and a regression to try it all on.
* ``cells``: counts of a hundred thousand cells, for large batches.

A script of one's own takes what ``LightningCLI`` takes, with our defaults and the audit (``python cli.py audit --config my.yaml``)::

    sys.exit(LossCLI(MyModule, MyData).exit_status)

What is exported here is named in configs by these paths, whatever file it lies in. A new config is ``configs/<name>.yaml`` with its
command in the header.
"""

from lightning_ddp_losses.cli.app import LossCLI, main
from lightning_ddp_losses.cli.cells import CellsDataModule, CellsEncoder
from lightning_ddp_losses.cli.data import ArrayDataModule
from lightning_ddp_losses.cli.demo import DigitsDataModule, DigitsEncoder, MLPEncoder, RegressionModule, slant
from lightning_ddp_losses.cli.module import EmbeddingModule

__all__ = [
    "ArrayDataModule",
    "CellsDataModule",
    "CellsEncoder",
    "DigitsDataModule",
    "DigitsEncoder",
    "EmbeddingModule",
    "LossCLI",
    "MLPEncoder",
    "RegressionModule",
    "main",
    "slant",
]
