"""What other processes and other users have written is not run when it is read."""

from __future__ import annotations

import ast
import collections
import os
import pickle
import socket
import stat
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_ddp_losses import InputError, parity
from lightning_ddp_losses.audit import api
from lightning_ddp_losses.cli import app
from lightning_ddp_losses.cli.manual import find_page
from lightning_ddp_losses.testing import RankPool
from tests.doors import load_batch, rendezvous, safe_values, save_batch
from tests.refusals import assert_same_error
from tests.strategies import test_loader_states as loader_states
from tests.strategies.test_resuming import AFTER
from tests.strategies.test_uneven_ends import Rows, batches_of, stream, train


class Point(NamedTuple):
    x: torch.Tensor


class Plants:
    """Makes a folder where a pickle of it is read."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize(
    "value", [[Plants("was-run")], np.array([Plants("was-run")], dtype=object)], ids=["list", "array"]
)
def test_a_message_with_a_program_in_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: object
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pickle.UnpicklingError):
        safe_values.unpack(safe_values.pack(value))
    assert list(tmp_path.iterdir()) == []


def test_a_message_holds_containers_named_tuples_and_numpy() -> None:
    nest = {"a": [torch.ones(2), (1, "b")], "c": collections.OrderedDict(d=Point(torch.zeros(1)))}
    arrays = {str(dtype): np.arange(3).astype(dtype) for dtype in ("f2", "f8", "i4", "u1", "?", "U3")}
    random = np.random.RandomState(1).get_state()
    found = safe_values.unpack(safe_values.pack(nest | arrays | {"number": np.float64(0.5), "random": random}))
    assert type(found["c"]["d"]) is Point
    assert torch.equal(found["a"][0], nest["a"][0])  # type: ignore[index]
    assert all(np.array_equal(found[key], array) and found[key].dtype == array.dtype for key, array in arrays.items())
    assert found["number"] == 0.5
    assert np.array_equal(found["random"][1], random[1])


class OfTheUser:
    """A class that does nothing bad, which nobody can know."""


def test_a_users_own_value_is_refused_where_it_is_made_and_can_be_allowed() -> None:
    with pytest.raises(InputError, match=r"the batch: expected tensors.*\.OfTheUser"):
        safe_values.pack_readable([OfTheUser()], "the batch")
    with pytest.raises(InputError, match="add_safe_globals"):
        safe_values.pack_readable([lambda: None], "the batch")
    with torch.serialization.safe_globals([OfTheUser]):
        payload = safe_values.pack_readable([OfTheUser()], "the batch")
        assert type(safe_values.unpack_from(payload, "the batch", 1)[0]) is OfTheUser


def receive_planted(folder: str, fit: Callable[..., Any], *args: Any) -> None:
    """Train where rank 0 sends what it likes."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            planted = safe_values.pack(Plants(folder))
            patch.setattr(safe_values, "pack_readable", lambda *args: planted)
        fit(*args)


def join_without_batches(rank: int) -> Any:
    """Rank 1 never has a batch, and hears from rank 0 how one looks."""
    return stream(batches_of([(2,), ()])[rank])


WAYS: dict[str, tuple[Any, ...]] = {
    "structure": (train, Rows, join_without_batches, "join"),
    "states": (loader_states.fit, "data set", (AFTER, 1), "{folder}/saved.ckpt", None),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_peer_plants_is_not_run(pool: RankPool, tmp_path: Path, way: str) -> None:
    arguments = [part.format(folder=tmp_path) if isinstance(part, str) else part for part in WAYS[way]]
    errors = pool.errors(2, receive_planted, str(tmp_path / "was-run"), *arguments)
    assert all(error.is_a("DDPLossError") and not error.timed_out for error in errors), errors
    for error in errors:
        assert all(word in error.message for word in (f"{way} of", "from rank 0", "mkdir")), error.message
    assert list(tmp_path.iterdir()) == []


class OfTheUsersState(loader_states.Rows):
    def state_dict(self) -> dict[str, Any]:
        return {"at": OfTheUser()} if dist.get_rank() == 1 else super().state_dict()


def fit_with_own_state(folder: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(loader_states.KINDS, "of the user", lambda: loader_states.Two(OfTheUsersState()))
        loader_states.fit("of the user", (AFTER, 1), f"{folder}/saved.ckpt", None)


def test_a_state_that_others_could_not_read_is_refused_before_training(pool: RankPool, tmp_path: Path) -> None:
    errors = pool.errors(2, fit_with_own_state, str(tmp_path))
    assert_same_error(errors, "loaders with a state of their own", "test_security.OfTheUser", "add_safe_globals")
    assert list(tmp_path.iterdir()) == []


UNPICKLING = {"loads", "Unpickler", "all_gather_object", "gather_object", "broadcast_object_list", "recv_object_list"}


def test_nothing_is_unpickled_but_a_batch_of_an_audit() -> None:
    """Each name in the package that unpickles, by file: that one reads a file of this user's alone (``refuse_foreign_file``)."""
    package = Path(safe_values.__file__).parents[1]
    found = []
    for path in package.rglob("*.py"):
        attributes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
        for node in attributes:
            module = node.value.id if isinstance(node.value, ast.Name) else ""
            if (node.attr in UNPICKLING and module != "json") or (module, node.attr) == ("pickle", "load"):
                found.append(f"{path.relative_to(package).as_posix()} {module}.{node.attr}")
    # the pool talks to processes that it has started itself, through their pipes
    assert [name for name in found if not name.startswith("testing.py ")] == ["audit/replay.py pickle.load"]


def test_a_batch_that_another_user_could_have_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    save_batch([torch.ones(2)], tmp_path / "batch")
    assert torch.equal(load_batch(tmp_path / "batch")[0], torch.ones(2))
    tmp_path.chmod(0o777)
    with pytest.raises(InputError, match="nobody else can write to"):
        load_batch(tmp_path / "batch")


def test_an_audits_folder_is_for_this_user_alone_and_goes_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Path, int]] = []

    class Breaks:
        def __init__(self, target: Any, scratch: Path, *rest: Any) -> None:
            seen.append((scratch, stat.S_IMODE(scratch.stat().st_mode)))
            raise ZeroDivisionError

    monkeypatch.setattr(api, "Runs", Breaks)
    from lightning.pytorch.demos.boring_classes import BoringModel

    with pytest.raises(ZeroDivisionError):
        api.audit(BoringModel())
    ((folder, mode),) = seen
    assert mode == 0o700
    assert not folder.exists()


def test_an_audit_runs_under_an_umask_that_opens_new_folders_to_the_group() -> None:
    before = os.umask(0o002)
    try:
        report = parity(
            lambda: torch.nn.Linear(2, 1), lambda model, rows: model(rows).square().mean(), [torch.randn(4, 2)]
        )
    finally:
        os.umask(before)
    assert report.equal


def test_a_store_listens_at_the_address_asked_for_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    store = rendezvous._open_store("127.0.0.1", port, 0, timedelta(seconds=10))
    store.set("a", "b")
    # another address of this machine is still free
    with socket.create_server(("127.0.0.2", port)):
        pass
    assert rendezvous._listener("192.0.2.1", port) is None  # an address of nobody's: torch's own way


def test_the_risk_of_a_config_is_stated() -> None:
    page = find_page(["security"])
    assert page is not None
    assert "class_path" in page
    assert "class_path" in (app.__doc__ or "")
