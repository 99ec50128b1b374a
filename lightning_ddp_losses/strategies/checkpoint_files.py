"""Checkpoint files that are whole or do not exist. Every rank reports the defect of one that cannot be used.

A checkpoint is written to a temporary name in its folder, brought to the disk and renamed. If the run ends in between (a signal, a full
disk, a power failure), the name still holds the former file. (Lightning 2.6 writes to the folder of temporary files. If that is another
file system, it copies from there to the final name.) Paths that are not of this machine's file system stay with
Lightning.

Partial files of a killed rank (``.partial-*``) are removed by the next save into that folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem

from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.errors import DDPLossError, InputError

SAVING, LOADING = "saving a checkpoint", "loading a checkpoint"

METADATA = "meta.pt"
"""File of a checkpoint that is a folder: everything but tensors; Lightning's name."""

BLOCKS = "ddp_losses_blocks"
"""Key of that file: the folder of the blocks, and the checksums of its files. A loaded checkpoint with this key is a folder."""

LOSS_KINDS = "ddp_losses_kinds"
"""Key of a checkpoint: the class of each loss."""

_PARTIAL = ".partial-"
_OWNER = re.compile(re.escape(_PARTIAL) + r"(?P<host>.*)-(?P<pid>\d+)-[0-9a-f]+")
_SHOWN_CHARACTERS = 600  # of a library's error; torch's advice about weights_only is long


class WholeFileIO(TorchCheckpointIO):
    """Saves and loads like Lightning's default, but a local file is either complete or does not exist."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint. Remote paths, and storage options, are handled by Lightning."""
        if storage_options is not None or not is_local(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        write_whole(local_path(path), lambda file: torch.save(checkpoint, file))


def use_whole_files(plugin: CheckpointIO | None) -> CheckpointIO:
    """Return the checkpoint plugin to use: what would be Lightning's default is ours, also below a plugin that wraps it."""
    if plugin is None or type(plugin) is TorchCheckpointIO:
        return WholeFileIO()
    innermost: Any = plugin
    while isinstance(getattr(innermost, "checkpoint_io", None), CheckpointIO):
        innermost = innermost.checkpoint_io
    if getattr(innermost, "checkpoint_io", innermost) is None:  # it wraps an IO that is chosen later
        innermost.checkpoint_io = WholeFileIO()
    return plugin


def is_folder(path: Any) -> bool:
    """Return whether a checkpoint is a folder into which each rank wrote its part."""
    return (Path(path) / METADATA).is_file()


def is_local(path: Any) -> bool:
    """Return whether a path is of this machine's file system, and not of one that ``fsspec`` reaches."""
    protocol = get_filesystem(path).protocol
    return "file" in ((protocol,) if isinstance(protocol, str) else protocol)


def local_path(path: Any) -> Path:
    """Return a local path without the scheme that it may have."""
    return Path(str(path).removeprefix("file://"))


# ---------------------------------------------------------------------- out


def write_whole(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write a file so that its name never holds a part of it.

    Args:
        path: Path of the file. Its folder is created.
        write: Writes the content to an open file.

    Raises:
        OSError: if the file system refuses. The former file stays, and no partial file does.
    """
    folder = path.absolute().parent
    folder.mkdir(parents=True, exist_ok=True)
    _remove_partials_of_dead(folder)
    partial = folder / f"{_PARTIAL}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        # 1. the content, on the disk. No other process writes to this name
        with file_errors(), partial.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        # 2. the name, and that the folder has it
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    sync_folder(folder)


@contextlib.contextmanager
def file_errors() -> Iterator[None]:
    """Raise the file system's error in place of ``torch.save``'s, which names no cause."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, if the system lets one open a folder."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove_partials_of_dead(folder: Path) -> None:
    """Remove the partial files of ended processes of this machine from a folder."""
    for found in folder.glob(f"{_PARTIAL}*"):
        owner = _OWNER.fullmatch(found.name)
        if owner is None or owner["host"] != socket.gethostname():
            continue
        with contextlib.suppress(OSError):  # a process of another user runs too
            try:
                os.kill(int(owner["pid"]), 0)
            except ProcessLookupError:
                found.unlink(missing_ok=True)


@contextlib.contextmanager
def saved_on_all_ranks(path: Any, *, is_collective: bool) -> Iterator[None]:
    """Let a checkpoint that one rank cannot write be an error on every rank.

    Args:
        path: Path of the checkpoint, quoted in the error.
        is_collective: True if every rank calls this. Otherwise (after an error, in a signal) only this rank raises.

    Raises:
        DDPLossError: on every rank, naming the rank and the file.

    Communication: one handshake if ``is_collective``.
    """
    try:
        yield
    except OSError as error:
        failed = unwritten(path, {process_groups.rank(): error})
        failed.__cause__ = error
        if is_collective:
            handshake.raise_on_all_ranks(failed, SAVING)
        raise failed from error
    if is_collective:
        handshake.all_gather_between_steps(SAVING, {"written": True})


def unwritten(path: Any, failures: Mapping[int, BaseException], *, collective: bool = False) -> DDPLossError:
    """Return the error for a checkpoint that could not be written.

    Args:
        path: Path of the checkpoint that the user passed.
        failures: Errors by rank.
        collective: Set if every rank has these errors.
    """
    return DDPLossError(
        f"checkpoint {path}",
        expected="a file that can be written",
        ranks={rank: _shown(error) for rank, error in failures.items()},
        fix="Make room there, or save somewhere else; former checkpoints are as they were, and nothing of this one is left.",
        collective=collective,
    )


# ---------------------------------------------------------------------- in


def load_on_all_ranks(path: Any, load: Callable[[], dict[str, Any]], *, checks_bits: bool) -> dict[str, Any]:
    """Load a checkpoint. One that any rank cannot read is an error on every rank, and so are ranks that read different ones.

    Args:
        path: Path of the file.
        load: Function that reads it.
        checks_bits: This rank compares the file with the checksums in it. Torch does not.

    Returns:
        What ``load`` returned.

    Raises:
        InputError: on every rank, naming the file and the ranks that cannot read it.
        RankMismatchError: on every rank, for different checkpoints.

    Communication: two handshakes.
    """
    checkpoint, content, problem = dict[str, Any](), "", ""
    cause: Exception | None = None
    try:
        if is_local(path):
            content = _content_of(local_path(path), checks_bits=checks_bits)
        checkpoint = load()
        if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
            raise ValueError("it holds no 'state_dict': it is no checkpoint of Lightning")
    except Exception as error:
        cause, problem = error, _shown(error)
    payloads = handshake.all_gather_between_steps(LOADING, {}, problem.encode())
    problems = [payload.decode() for payload in payloads]
    if any(problems):
        is_one = len(set(problems)) == 1
        raise InputError(
            f"checkpoint {path}",
            expected="a whole file, readable on every rank",
            got=problems[0] if is_one else None,
            ranks=None if is_one else [problem or "nothing wrong" for problem in problems],
            fix="Load another checkpoint. This one is damaged, was cut off, is not there, or holds other objects than tensors and plain "
            "values.",
            collective=True,
        ) from cause
    places = {name: checkpoint.get(name) for name in ("epoch", "global_step")} | {"content": content}
    handshake.all_gather_between_steps(f"{LOADING}: what each rank read", places)
    return checkpoint


def _content_of(path: Path, *, checks_bits: bool) -> str:
    """Return a text that is equal for equal files. Empty for a file without checksums, which ``torch.load`` judges.

    Raises:
        ValueError: if bits are checked, for a file that is not what its own checksums say, naming the part.
    """
    if not zipfile.is_zipfile(path):
        return ""
    with zipfile.ZipFile(path) as file:
        damaged = file.testzip() if checks_bits else None
        checksums = [(part.filename, part.CRC) for part in file.infolist()]
    if damaged is not None:
        raise ValueError(f"{damaged} in it is not what was written (checksum)")
    return f"{zlib.crc32(repr(checksums).encode()):08x}"


@contextlib.contextmanager
def loaded_on_all_ranks(path: Any, what: str) -> Iterator[None]:
    """Raise an error of the block on every rank: a checkpoint that does not fit this module.

    Args:
        path: Path of the checkpoint.
        what: Loaded part, for the message.

    Raises:
        InputError: on every rank.

    Communication: none, or one handshake that is paired with the peers' next one.
    """
    try:
        yield
    except DDPLossError:
        raise
    except Exception as error:
        refused = InputError(
            f"checkpoint {path}: {what}",
            expected="what this module has",
            got=_shown(error, lines=12),
            fix="Load a checkpoint of the same module: its losses, numbers of classes, sizes and optimizers.",
        )
        refused.__cause__ = error
        handshake.raise_on_all_ranks(refused, LOADING)


def refuse_other_losses(path: Any, saved: Sequence[str] | None, own: Sequence[str]) -> None:
    """Refuse to continue with another loss than the one that was trained, if both accept the same weights.

    Args:
        path: Path of the checkpoint.
        saved: ``name: class`` of each saved loss. None if the checkpoint lacks this entry.
        own: ``name: class`` of each loss of this module.

    Raises:
        InputError: the same on every rank.
    """
    saved_kinds = dict(entry.split(": ", 1) for entry in saved or ())
    own_kinds = dict(entry.split(": ", 1) for entry in own)
    different = sorted(name for name, kind in own_kinds.items() if saved_kinds.get(name, kind) != kind)
    if different:
        raise InputError(
            f"checkpoint {path}",
            expected=", ".join(f"{name}: {own_kinds[name]}" for name in different),
            got=", ".join(f"{name}: {saved_kinds[name]}" for name in different),
            fix="Go on with the loss that was trained. To begin another one from these weights, load the state_dict alone, or delete "
            f"checkpoint['{LOSS_KINDS}'] in on_load_checkpoint.",
            collective=True,
        )


def _shown(error: BaseException, lines: int = 1) -> str:
    shown = "\n".join(str(error).strip().splitlines()[:lines])[:_SHOWN_CHARACTERS]
    return f"{type(error).__name__}: {shown}"
