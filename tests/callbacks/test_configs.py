"""Every config of ours runs without an error or a warning of a check, and one config names every option there is."""

from __future__ import annotations

import inspect
import os
import tempfile
from pathlib import Path
from typing import Any, get_type_hints
from unittest import mock

import pytest
import yaml

import lightning_ddp_losses
from lightning_ddp_losses import DDPChecks
from lightning_ddp_losses.callbacks.base import DEFAULT_CHECKS
from lightning_ddp_losses.cli import CellsDataModule, LossCLI
from lightning_ddp_losses.testing import RankPool
from tests.callbacks.test_notes_and_files import Found, listed
from tests.cli.shipped_configs import smaller
from tests.lightning_ranks import make_trainer

CONFIGS = sorted((Path(lightning_ddp_losses.__file__).parents[1] / "configs").glob("*.yaml"))


def run(path: str, shared_folder: str) -> Found:
    """Train two epochs of a few steps on the ranks of the pool, with the checks of the config."""
    given = yaml.safe_load(Path(path).read_text())["trainer"]
    # Lightning 2.6 uses jsonargparse in ways that its next major version changes; Python hides this from users
    quiet = mock.patch.dict(os.environ, JSONARGPARSE_DEPRECATION_WARNINGS="off")
    with quiet, tempfile.TemporaryDirectory() as folder:
        options = ["--config", path, *smaller(Path(path)), "--trainer.devices", "1", "--trainer.strategy", "auto"]
        cli = LossCLI(args=[*options, "--trainer.logger.init_args.save_dir", folder], run=False)
    # warnings of checks are errors here, as all warnings are
    (checks,) = (c for c in cli.trainer.callbacks if isinstance(c, DDPChecks))  # type: ignore[attr-defined]
    accumulate = given.get("accumulate_grad_batches", 1)
    limits = {"limit_train_batches": 6, "limit_val_batches": 1, "max_epochs": 2, "accumulate_grad_batches": accumulate}
    strategy = given["strategy"]
    if not isinstance(strategy, str):
        kind = getattr(lightning_ddp_losses, strategy["class_path"].rpartition(".")[2])
        strategy = kind(**strategy["init_args"])
    if isinstance(cli.datamodule, CellsDataModule):  # the file that ranks share
        cli.datamodule.path = Path(shared_folder, cli.datamodule.path.name)
    trainer = make_trainer(strategy, callbacks=[checks], **limits, use_distributed_sampler=True)
    trainer.fit(cli.model, cli.datamodule)
    return listed(checks)


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_of_ours_is_healthy(pool: RankPool, path: Path, tmp_path: Path) -> None:
    for found in pool.run(2, run, str(path), str(tmp_path)):
        assert [entry for entry in found if entry[1] != "note"] == []


def test_one_config_names_every_check_and_every_option_at_its_default() -> None:
    path = next(path for path in CONFIGS if path.stem == "checks_all")
    (callback,) = yaml.safe_load(path.read_text())["trainer"]["callbacks"]
    options: dict[str, Any] = callback["init_args"]
    assert set(options) == set(inspect.signature(DDPChecks).parameters)
    checks = {entry["class_path"].rpartition(".")[2]: entry.get("init_args", {}) for entry in options["checks"]}
    assert list(checks) == [check.__name__ for check in DEFAULT_CHECKS]
    for check in DEFAULT_CHECKS:
        defaults = {name: p.default for name, p in inspect.signature(check).parameters.items()}
        assert checks[check.__name__].items() <= defaults.items()
        assert set(defaults) - set(checks[check.__name__]) <= {"action", "every_n_steps"}
        # LightningCLI checks types by them
        assert set(get_type_hints(check.__init__)) == {*defaults, "return"}
