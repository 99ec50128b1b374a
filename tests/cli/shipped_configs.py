"""The configs of ours in tests: small enough, and on ranks that exist already."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml

from lightning_ddp_losses import DDPLossStrategy
from lightning_ddp_losses.cli import LossCLI
from tests.fits import make_trainer

_SMALLER = {
    "cells_supcon": {
        "data.init_args.cells": 700,
        "data.init_args.genes": 40,
        "data.init_args.types": 40,
        "data.init_args.held_out_cells": 100,
        "data.init_args.batch_size": 120,
        "data.init_args.m_per_class": 4,
        "model.init_args.encoder.init_args.genes": 40,
        "model.init_args.chunk_size": 16,
    }
}


def smaller(config: Path) -> list[str]:
    """The options that make a config small enough for a test; none for one that is small."""
    found = []
    for name, value in _SMALLER.get(config.stem, {}).items():
        found += [f"--{name}", str(value)]
    return found


def fit_config(path: str, options: list[str], **limits: Any) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Train what a config describes on the ranks of the group, in double precision, without its callbacks: metrics, state of the module.

    Args:
        path: Of the config.
        options: Further options of the command, for model and data.
        **limits: Options of the trainer.
    """
    given = yaml.safe_load(Path(path).read_text())["trainer"]
    options = ["--config", path, *options, "--trainer.logger", "false", "--trainer.precision", "64-true"]
    # Lightning 2.6 uses jsonargparse in ways that its next major version changes; Python hides this from users
    with mock.patch.dict(os.environ, JSONARGPARSE_DEPRECATION_WARNINGS="off"):
        cli = LossCLI(args=[*options, "--trainer.devices", "1", "--trainer.strategy", "auto"], run=False)
    strategy = given["strategy"]
    if not isinstance(strategy, str):
        strategy = DDPLossStrategy(**strategy["init_args"])
    kept = {name: given[name] for name in ("sync_batchnorm", "accumulate_grad_batches") if name in given}
    trainer = make_trainer(strategy, precision="64-true", use_distributed_sampler=True, **kept, **limits)
    trainer.fit(cli.model, cli.datamodule)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return metrics, cli.model.state_dict()
