"""Every public name has an example in its docstring, and it runs (those that start processes are read by `tests/audit`)."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_ddp_losses as ddl


@pytest.fixture
def folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For what an example's trainer logs."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, .tensorboardX. has been removed")
@pytest.mark.usefixtures("folder_of_its_own")
@pytest.mark.parametrize("name", ddl.__all__)
def test_a_public_name_has_an_example_that_runs(name: str) -> None:
    known = {each: getattr(ddl, each) for each in ddl.__all__} | {"torch": torch, "nn": torch.nn}
    run_examples(getattr(ddl, name), name, known)


# public below the top level; of commands and of what reads a folder that ranks wrote see `test_no_public_name_is_left_out`
PLACES = {
    "callbacks": ["CheckStage", "Finding", "odd_ranks"],
    "cli": [
        "ArrayDataModule",
        "CellsDataModule",
        "CellsEncoder",
        "DigitsDataModule",
        "DigitsEncoder",
        "EmbeddingModule",
        "MLPEncoder",
        "RegressionModule",
        "SelfDistillationModule",
        "slant",
    ],
    "collectives": ["all_gather_with_grad", "all_reduce_with_grad", "reduce_scatter_with_grad"],
    "errors": ["format_error", "register_error"],
    "layers": ["batch_norms"],
    "losses": ["check_separable", "register_element_wise", "register_row_separable"],
    "sharding": ["ClassShard"],
    "strategies": ["register_loss_type", "use_global_wrapper", "use_layer_sync"],
}


@pytest.mark.usefixtures("folder_of_its_own")
@pytest.mark.parametrize(("place", "name"), [(place, name) for place, names in PLACES.items() for name in names])
def test_a_name_below_the_top_level_has_an_example_that_runs(place: str, name: str) -> None:
    module = importlib.import_module(f"lightning_ddp_losses.{place}")
    run_examples(getattr(module, name), name, {**vars(module), "torch": torch})


def test_no_public_name_is_left_out() -> None:
    # commands (the docstring of `cli` shows them), a reader of what ranks wrote, data
    without = {"LossCLI", "main", "whole_checkpoint", "FAULTS"}
    for place, names in PLACES.items():
        said = set(getattr(importlib.import_module(f"lightning_ddp_losses.{place}"), "__all__", names))
        assert said - set(ddl.__all__) - without == set(names), place


def run_examples(thing: Any, name: str, known: dict[str, Any]) -> None:
    """Run the examples of a docstring, of which there is one at least."""
    found = doctest.DocTestFinder(recurse=False).find(thing, name, module=False, globs=known)
    assert any(test.examples for test in found)
    shown: list[str] = []
    for test in found:
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=shown.append)
    assert "".join(shown) == ""
