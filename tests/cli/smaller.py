"""Options that make a config of ours small enough for a test."""

from __future__ import annotations

from pathlib import Path

_OPTIONS = {
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
    """The options for a config; none for one that is small."""
    found = []
    for name, value in _OPTIONS.get(config.stem, {}).items():
        found += [f"--{name}", str(value)]
    return found
