"""A tiny encoder from a configuration, saved once: no download."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tests.integrations.encoders import save_encoder


@pytest.fixture(scope="session")
def encoder_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a BERT with one layer."""
    folder: Path = tmp_path_factory.mktemp("encoder")
    save_encoder(folder)
    return str(folder)
