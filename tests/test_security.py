"""What other processes and other users have written is not run when it is read."""

from __future__ import annotations

import collections
import os
import pickle
import socket
import stat
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lightning_ddp_losses import InputError
from lightning_ddp_losses.audit import api
from lightning_ddp_losses.audit.replay import load_batch, save_batch
from lightning_ddp_losses.cli import app
from lightning_ddp_losses.cli.explain import find_page
from lightning_ddp_losses.core import safe_payload
from lightning_ddp_losses.distributed import rendezvous


class Point(NamedTuple):
    x: torch.Tensor


class RunsSomething:
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, ("was-run",)


def test_a_message_with_a_program_in_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pickle.UnpicklingError):
        safe_payload.unpack(safe_payload.pack([RunsSomething()]))
    assert list(tmp_path.iterdir()) == []


def test_a_message_holds_containers_and_named_tuples() -> None:
    nest = {"a": [torch.ones(2), (1, "b")], "c": collections.OrderedDict(d=Point(torch.zeros(1)))}
    found = safe_payload.unpack(safe_payload.pack(nest))
    assert type(found["c"]["d"]) is Point
    assert torch.equal(found["a"][0], nest["a"][0])  # type: ignore[index]


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
        def __init__(self, target: Any, *rest: Any) -> None:
            seen.append((target.scratch, stat.S_IMODE(target.scratch.stat().st_mode)))
            raise ZeroDivisionError

    monkeypatch.setattr(api, "_Auditor", Breaks)
    from lightning.pytorch.demos.boring_classes import BoringModel

    with pytest.raises(ZeroDivisionError):
        api.audit(BoringModel())
    ((folder, mode),) = seen
    assert mode == 0o700
    assert not folder.exists()


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
