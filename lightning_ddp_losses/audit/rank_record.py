"""What a run leaves behind: a folder of gradients and parameters as raw bytes, and a page of facts for each rank.

Tensors go to files one at a time and come back in pieces, so that neither writing nor comparing holds a second copy of the
parameters. A rank whose tensor equals rank 0's bit for bit does not store it again.

Layout: ``rank-<r>/facts.json``; ``rank-<r>/<step>.<kind>.json`` (name -> dtype, shape, digest, file); ``rank-<r>/<number>.bin``.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

KINDS = ("initial", "gradient", "parameter", "buffer")
PIECE = 1 << 18
"""Elements that are in memory at a time when tensors are compared."""

_PATIENCE_SECONDS = 20.0  # how long a rank waits to hear whether rank 0 has the same tensors; then it stores its own
_BYTES = 1 << 24


@dataclass(frozen=True)
class Entry:
    """One tensor at one step: its dtype, shape, digest, and the file that holds it (empty: there was no tensor)."""

    dtype: str
    shape: tuple[int, ...]
    digest: str
    file: str

    @property
    def exists(self) -> bool:
        """False for a parameter without gradient."""
        return bool(self.file)

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    def pieces(self, size: int = PIECE) -> Iterator[Tensor]:
        """The elements, flat and in order, at most ``size`` at a time, in the dtype they were stored in."""
        dtype = getattr(torch, self.dtype)
        with open(self.file, "rb") as file:
            while read := file.read(size * dtype.itemsize):
                yield torch.frombuffer(bytearray(read), dtype=dtype)

    def tensor(self) -> Tensor:
        """The whole tensor."""
        flat = [*self.pieces(max(1, self.numel))]
        whole = flat[0] if flat else torch.empty(0, dtype=getattr(torch, self.dtype))
        return whole.reshape(self.shape)


def _bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """The tensor's bytes in pieces, without a copy where it is contiguous on the CPU."""
    flat = tensor.detach()
    flat = flat.to_dense() if flat.layout != torch.strided else flat
    flat = flat.cpu().contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), _BYTES):
        yield flat[start : start + _BYTES].numpy().data


def digest_of(tensor: Tensor) -> str:
    """A digest of dtype, shape and every bit."""
    found = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=12)
    for piece in _bytes_of(tensor):
        found.update(piece)
    return found.hexdigest()


class Writer:
    """Stores what one rank of a run does.

    Args:
        folder: Of the run.
        rank: This process's.
        start: How its files' names begin.
    """

    def __init__(self, folder: Path, rank: int, start: str = "") -> None:
        self.home, self.rank, self.start = folder / f"rank-{rank}", rank, start
        self._first = folder / "rank-0"
        self._files = 0
        self.home.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, kind: str, tensors: Iterable[tuple[str, Tensor | None]]) -> None:
        """Store the tensors of one step under a kind; None is a tensor that is not there."""
        named = [(name, t, "" if t is None else digest_of(t)) for name, t in tensors]
        known = self._rank_0(f"{step}.{kind}.json") if self.rank else {}
        index: dict[str, Any] = {}
        for name, tensor, digest in named:
            if tensor is None:
                index[name] = ("", (), "", "")
                continue
            same = known.get(name)
            file = same[3] if same is not None and same[2] == digest else self._store(tensor)
            index[name] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), digest, file)
        _write_whole(self.home / f"{step}.{kind}.json", index)

    def entry(self, tensor: Tensor) -> Entry:
        """Store one tensor by itself."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Entry(dtype, tuple(tensor.shape), digest_of(tensor), self._store(tensor))

    def facts(self, facts: dict[str, Any]) -> None:
        """Store the page of facts; it is the last thing a run writes."""
        _write_whole(self.home / "facts.json", facts)

    def _store(self, tensor: Tensor) -> str:
        self._files += 1
        path = self.home / f"{self.start}{self._files}.bin"
        with path.open("wb") as file:
            for piece in _bytes_of(tensor):
                file.write(piece)
        return str(path)

    def _rank_0(self, name: str) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not (self._first / name).exists():
            if time.monotonic() > deadline or (self._first / "facts.json").exists():
                return {}  # rank 0 is somewhere else in the program
            time.sleep(0.001)
        found: dict[str, Any] = json.loads((self._first / name).read_text())
        return found


def _write_whole(path: Path, value: Any) -> None:
    """Write so that a reader finds all of it or nothing."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.rename(path)


@dataclass
class Recording:
    """The folder of a run, read.

    Attributes:
        folder: Of the run.
        ranks: How many processes it had.
    """

    folder: Path
    ranks: int
    _cache: dict[tuple[int, int, str], dict[str, Entry]] = field(default_factory=dict, repr=False)

    @cached_property
    def facts(self) -> list[dict[str, Any]]:
        """One page of facts for each rank."""
        return [json.loads((self.folder / f"rank-{r}" / "facts.json").read_text()) for r in range(self.ranks)]

    @property
    def steps(self) -> int:
        """Optimizer steps that every rank made."""
        return min(int(page["steps"]) for page in self.facts)

    def entries(self, rank: int, step: int, kind: str) -> dict[str, Entry]:
        """The tensors of one rank at one step (from 1; ``initial`` is step 0), by name, in the module's order."""
        key = (rank, step, kind)
        if key not in self._cache:
            path = self.folder / f"rank-{rank}" / f"{step}.{kind}.json"
            found = json.loads(path.read_text()) if path.exists() else {}
            self._cache[key] = {n: Entry(d, tuple(s), h, f) for n, (d, s, h, f) in found.items()}
        return self._cache[key]

    def names(self, step: int, kind: str) -> list[str]:
        """Names on any rank, in order."""
        return list(dict.fromkeys(n for r in range(self.ranks) for n in self.entries(r, step, kind)))

    def shards(self, name: str) -> list[tuple[int, int]] | None:
        """First class and dimension of each rank's block, where the ranks hold blocks of the parameter by design."""
        found = [page["shards"].get(name) for page in self.facts]
        return [(int(start), int(dim)) for start, dim in found] if all(found) else None

    def joined(self, step: int, kind: str, name: str) -> Entry | None:
        """The ranks' blocks as the one tensor that they are parts of."""
        places = self.shards(name)
        entries = [self.entries(r, step, kind).get(name) for r in range(self.ranks)]
        if places is None or not all(entry is not None and entry.exists for entry in entries):
            return None
        blocks = sorted(
            ((place, entry.tensor()) for place, entry in zip(places, entries, strict=True) if entry), key=lambda x: x[0]
        )
        writer = Writer(self.folder, 0, start=f"joined-{step}-{kind}-{hashlib.sha256(name.encode()).hexdigest()[:12]}-")
        return writer.entry(torch.cat([block for _, block in blocks], dim=places[0][1]))

    def agree(self, step: int, kind: str, name: str) -> bool:
        """Whether all ranks hold the same bits."""
        found = [self.entries(r, step, kind).get(name) for r in range(self.ranks)]
        return all(
            entry is not None and entry.digest == found[0].digest for entry in found if found[0] is not None
        ) and (found[0] is not None)
