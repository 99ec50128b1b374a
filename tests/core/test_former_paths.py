"""Whole objects that the package pickled before its modules moved: they load and compute what they computed then."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_ddp_losses
from lightning_ddp_losses.core import former_paths
from lightning_ddp_losses.errors import ConfigurationError
from tests.data import write_former_objects

ARCHIVE = Path(write_former_objects.__file__).with_name("former_objects.tar.xz")


@cache
def members() -> dict[str, bytes]:
    with tarfile.open(ARCHIVE) as archive:
        files = {member.name: archive.extractfile(member) for member in archive.getmembers()}
        return {name.removesuffix(".pt"): file.read() for name, file in files.items() if file is not None}


def tensors(name: str) -> Any:
    """A member that is made of tensors, numbers and texts."""
    return torch.load(io.BytesIO(members()[name]), weights_only=True)


def load(name: str) -> Any:
    return torch.load(io.BytesIO(members()[name]), weights_only=False)


NAMES = [(module, name) for module, name in json.loads(members()["names.json"])]
OBJECTS = sorted(members().keys() - {"values", "states", "checkpoint", "names.json"})
CALLED = [name for name in OBJECTS if "arguments" in tensors("values").get(name.removesuffix(", used"), ())]
DRAWN = [name for name in OBJECTS if name.startswith("GlobalBatchSampler")]
LOADED = [name for name in OBJECTS if name not in CALLED and name not in DRAWN]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_every_name_that_a_pickle_holds_is_found(module: str, name: str) -> None:
    """A class that moved or was renamed since: add a row to `CLASSES` of `core/former_paths.py`."""
    pickled = f"c{module}\n{name}\n.".encode()  # what protocol 0 writes for a class
    assert callable(pickle.loads(pickled))


@pytest.mark.parametrize("name", CALLED)
def test_an_object_computes_what_it_did(name: str) -> None:
    """An attribute that was renamed since: add a row to `ATTRIBUTES` of `core/former_paths.py`."""
    known = tensors("values")[name.removesuffix(", used")]
    torch.manual_seed(0)
    found = write_former_objects.flat(load(name)(*known["arguments"]))
    torch.testing.assert_close(found, known["value"])


@pytest.mark.parametrize("name", DRAWN)
def test_a_sampler_draws_what_it_did(name: str) -> None:
    sampler = load(name)
    drawn = list(sampler)
    if not name.endswith("used"):
        assert drawn == tensors("values")[name]["value"]
    else:  # its second epoch
        assert sorted(map(str, drawn)) != []
        fresh = load(name.removesuffix(", used"))
        assert [list(fresh), list(fresh)][1] == drawn


@pytest.mark.parametrize("name", LOADED)
def test_what_is_not_called_has_the_attributes_of_a_new_one(name: str) -> None:
    """An attribute that was renamed since: add a row to `ATTRIBUTES` of `core/former_paths.py`."""
    known = write_former_objects.others() | {key: made for key, (made, _) in write_former_objects.modules().items()}
    found, new = load(name), known[name]
    assert type(found) is type(new)
    assert vars(found).keys() <= vars(new).keys()
    # what came later has its default in the class
    assert all(hasattr(type(found), name) for name in vars(new).keys() - vars(found).keys())


def test_a_check_of_an_earlier_release_keeps_its_options() -> None:
    check = load("check with options")
    assert (check.action, check.parts) == ({"error": "warn"}, 4)


def test_state_dicts_fit_new_objects() -> None:
    states, new = tensors("states"), write_former_objects.modules()
    assert states.keys() == {name for name, (made, _) in new.items() if isinstance(made, nn.Module)}
    for name, state in states.items():
        made = new[name][0]
        assert list(made.state_dict()) == list(state)
        made.load_state_dict(state)
        for key, value in made.state_dict().items():
            torch.testing.assert_close(value, state[key])


def test_a_checkpoint_loads_with_weights_only() -> None:
    model = write_former_objects.Model()
    checkpoint = tensors("checkpoint")
    model.load_state_dict(checkpoint["state_dict"])
    assert checkpoint["global_step"] == 2
    assert model.state_dict().keys() == checkpoint["state_dict"].keys()
    assert {type(value) for value in checkpoint["state_dict"].values()} == {Tensor}


def test_a_name_that_is_no_more_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match=r"got lightning_ddp_losses\.sending\.Sending\n.*state_dict"):
        pickle.loads(b"clightning_ddp_losses.sending\nSending\n.")
    with pytest.raises(AttributeError, match="Missing"):  # of a module that is still there
        pickle.loads(b"clightning_ddp_losses.errors\nMissing\n.")
    with pytest.raises(ModuleNotFoundError):
        pickle.loads(b"clightning_ddp_losses.never\nMissing\n.")


def test_rows_of_the_tables_are_names_of_today() -> None:
    for name in [*former_paths.CLASSES.values(), *former_paths.ATTRIBUTES]:
        assert callable(former_paths.present(name))


@pytest.mark.parametrize("name", lightning_ddp_losses.__all__)
def test_public_names_are_pickled_by_their_documented_path(name: str) -> None:
    public = getattr(lightning_ddp_losses, name)
    assert public.__module__ == "lightning_ddp_losses"
    assert f"lightning_ddp_losses\n{name}\n".encode() in pickle.dumps(public, protocol=0)
    assert pickle.loads(pickle.dumps(public)) is public
