"""The user's own data: `features.npy` and `labels.npy`, memory mapped, so that a file may be larger than memory.

Everything that can be wrong with the files is found when the module is made, before a run writes anything.
"""

from __future__ import annotations

import os
from typing import Union

import numpy as np

from lightning_ddp_losses.cli.data import Array, BatchedArrayDataModule
from lightning_ddp_losses.cli.sampling import stratified_split
from lightning_ddp_losses.errors import ConfigurationError, InputError

PathLike = Union[str, "os.PathLike[str]"]


class ArrayDataModule(BatchedArrayDataModule):
    """Arrays on disk: features (N, ...) of numbers and labels (N,) of integers from 0.

    Args:
        features: Path of an ``.npy`` file, (N, ...), floating or integer.
        labels: Path of an ``.npy`` file, (N,), integers from 0.
        val_features: Held-out features of the same row shape; without them a share of every class is held out.
        val_labels: Held-out labels; given together with `val_features`.
        batch_size: Rows of the GLOBAL batch, over all ranks.
        held_out: Share of every class that is never trained on, where there are no held-out files.
        seed: Fixes the split and, with the epoch, the order of training.
        num_workers: Processes that read ahead on each rank.
        m_per_class: Rows of each class in a training batch, for losses that compare rows; None: rows at random.

    Raises:
        InputError: A file that is missing or not ``.npy``, a wrong shape, a wrong dtype, a length mismatch, a negative label.
        ConfigurationError: One of the two held-out files without the other.
    """

    def __init__(
        self,
        features: PathLike,
        labels: PathLike,
        val_features: PathLike | None = None,
        val_labels: PathLike | None = None,
        *,
        batch_size: int = 128,
        held_out: float = 0.25,
        seed: int = 0,
        num_workers: int = 0,
        m_per_class: int | None = None,
    ) -> None:
        super().__init__(batch_size, seed, num_workers, m_per_class)
        if (val_features is None) != (val_labels is None):
            raise ConfigurationError(
                "held-out files",
                expected="both val_features and val_labels, or neither",
                got=f"val_features={val_features}, val_labels={val_labels}",
            )
        self.features, self.labels = _load_pair(features, labels)
        if val_features is None or val_labels is None:
            self.held_out_features, self.held_out_labels = self.features, self.labels
            self.train_rows, self.held_out_rows = stratified_split(self.labels, held_out, seed)
        else:
            self.held_out_features, self.held_out_labels = _load_pair(val_features, val_labels)
            if self.held_out_features.shape[1:] != self.features.shape[1:]:
                raise InputError(
                    f"shape of {val_features}",
                    expected=f"(N, {_sizes(self.features)}) like {features}",
                    got=f"(N, {_sizes(self.held_out_features)})",
                )
            self.train_rows = np.arange(len(self.labels))
            self.held_out_rows = np.arange(len(self.held_out_labels))
        if not len(self.held_out_rows):
            raise InputError(
                f"classes in {labels}",
                expected="at least one of two rows, so that one can be held out",
                got="one row for each label",
                fix="Give val_features and val_labels.",
            )


def _sizes(array: Array) -> str:
    return ", ".join(str(size) for size in array.shape[1:])


def _open(path: PathLike, what: str) -> Array:
    """Memory map an .npy file."""
    expected = "an .npy file as numpy.save writes it"
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        fix = f"Paths are relative to {os.getcwd()}."
        raise InputError(f"{what} {path}", expected=expected, got="no such file", fix=fix) from error
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{what} {path}", expected=expected, got=str(error)) from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise InputError(f"{what} {path}", expected=expected, got="an .npz archive")
    return array


def _load_pair(features_path: PathLike, labels_path: PathLike) -> tuple[Array, Array]:
    """Open features and labels and check one against the other."""
    features, labels = _open(features_path, "features"), _open(labels_path, "labels")
    if features.ndim < 2 or 0 in features.shape:
        shape = "(N, D) or (N, channels, height, width), nothing of length 0"
        raise InputError(f"shape of {features_path}", expected=shape, got=features.shape)
    if features.dtype.kind not in "fiu":
        raise InputError(f"dtype of {features_path}", expected="floating or integer numbers", got=features.dtype)
    if labels.ndim != 1:
        raise InputError(f"shape of {labels_path}", expected=f"({len(features)},)", got=labels.shape)
    if labels.dtype.kind not in "iu":
        fix = "Number the classes from 0: numpy.unique(names, return_inverse=True)[1]."
        raise InputError(f"dtype of {labels_path}", expected="integers", got=labels.dtype, fix=fix)
    if len(labels) != len(features):
        raise InputError(
            f"rows of {labels_path}",
            expected=f"{len(features)}, as in {features_path}",
            got=len(labels),
            fix="Write one label for each row of the features.",
        )
    labels = np.asarray(labels).astype(np.int64)
    if labels.min() < 0:
        fix = "Number the classes from 0."
        raise InputError(f"labels in {labels_path}", expected="0 or more", got=labels.min(), fix=fix)
    return features, labels
