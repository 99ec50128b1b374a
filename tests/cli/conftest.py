"""Where the tests of the command run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.doors import process_groups


@pytest.fixture
def empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Run in an empty folder; afterwards the environment, the seed, the path and the process group are as before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    # Lightning 2.6 uses jsonargparse in ways that its next major version changes; Python hides this from users
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    monkeypatch.setattr(sys, "argv", ["ddp-losses"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    environment, state = dict(os.environ), torch.get_rng_state()
    yield
    process_groups.close(world=True)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_rng_state(state)
