"""The command line. ``demo`` contains the models and data of the included configs.

* ``app``: the subcommands and their options, including audit and parity.
* ``report``: the table and the pictures at the end of a run.
* ``certify``: the certificate of a loss.
* ``configs``: the configs included in the package.
* ``doctor``: versions, and a short training of two ranks.
* ``manual``: pages of the manual, for ``explain`` and HTML. ``pages/`` contains the recipes for users of other libraries.
* ``search``: pages by the words that people type. ``words.yaml`` has words for a page that it does not use.

A separate script accepts everything that ``LightningCLI`` accepts, with our defaults and the audit
(``python cli.py audit --config my.yaml``)::

    sys.exit(LossCLI(MyModule, MyData).exit_status)

Configs refer to the modules, data modules and encoders of ``demo`` by the paths that are exported by this package. A new config is
``configs/<name>.yaml`` with its command in the header.
"""

from lightning_ddp_losses.cli.app import LossCLI, main
from lightning_ddp_losses.demo.cells import CellsDataModule, CellsEncoder
from lightning_ddp_losses.demo.data import ArrayDataModule, DigitsDataModule
from lightning_ddp_losses.demo.module import (
    DigitsEncoder,
    EmbeddingModule,
    MLPEncoder,
    RegressionModule,
    SelfDistillationModule,
    slant,
)

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
    "SelfDistillationModule",
    "main",
    "slant",
]
