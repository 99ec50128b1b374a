"""Data modules over arrays: the user's own files, and scikit-learn's bundled digits.

Training batches are ``(x, labels)``. Held-out batches are ``(x, labels, indices)``, where the indices are positions in the held-out set.
They are used to restore the results of the ranks to the order of one process, and to count each row once.

The rows of a batch are the same for any number of ranks: `GlobalBatchSampler` distributes training batches to the ranks, and
`HeldOutSlices` divides held-out batches. A user's `features.npy` and `labels.npy` are memory mapped, so a file may be larger than memory.
Invalid files are reported when the module is constructed, before a run writes anything.

The digits are 1,797 handwritten grey images of 8x8 pixels in 10 classes. They do not require a download.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from pytorch_metric_learning.samplers import MPerClassSampler
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler

from lightning_ddp_losses.demo.tables import Array, PathLike, is_table, number_labels, read_table
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.errors import ConfigurationError, InputError, expect
from lightning_ddp_losses.samplers import GlobalBatchSampler

Pair = tuple[Array, Array]
"""Features (N, ...) and labels (N,)."""
_MAGIC = b"\x93NUMPY"


class ArrayRows(Dataset[tuple[Tensor, ...]]):
    """Some rows of two arrays, fetched a batch at a time (only these rows of a memory map are read).

    Args:
        features: (N, ...) numbers.
        labels: (N,) integers.
        rows: Row numbers that belong to this set, (n,).
        dtype: Floating-point dtype of the fetched features.
        with_indices: If True, a batch also contains its positions in this set.
    """

    def __init__(
        self, features: Array, labels: Array, rows: Array, *, dtype: torch.dtype, with_indices: bool = False
    ) -> None:
        self.features, self.labels, self.rows = features, labels, rows
        self.dtype, self.with_indices = dtype, with_indices

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, positions: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the rows at `positions`: features (b, ...) of `dtype`, labels (b,) int64 and, if requested, (b,) int64 positions."""
        rows = self.rows[positions]
        x = torch.as_tensor(np.asarray(self.features[rows]), dtype=self.dtype)
        labels = torch.as_tensor(np.asarray(self.labels[rows]), dtype=torch.int64)
        if not self.with_indices:
            return x, labels
        return x, labels, torch.as_tensor(positions, dtype=torch.int64)

    __getitems__ = __getitem__  # PyTorch uses this name to fetch the rows of a batch sampler


def as_fetched(batch: Any) -> Any:
    """Return the batch unchanged: `ArrayRows` fetches it in one piece."""
    return batch


class BatchedArrayDataModule(LightningDataModule):
    """Two arrays, a split and a global batch size. A subclass sets `features`, `labels`, `train_rows` and `held_out_rows`.

    Args:
        batch_size: Rows of the GLOBAL batch, over all ranks.
        seed: Determines the split and, with the epoch, the order of training.
        num_workers: Processes that read ahead on each rank.
        m_per_class: Rows of each class in a training batch. If None, rows are drawn at random, each once per epoch.
    """

    inputs_name = "raw features"
    """Name of the inputs in the report, next to the embeddings."""
    class_names: Sequence[str] = ()
    """Name of each class, for pictures and tables. Empty if the classes only have numbers."""
    row_ids: Sequence[str] = ()
    """The user's identifier of each row of `features`. Empty if rows only have numbers."""

    features: Array
    labels: Array
    held_out_features: Array
    held_out_labels: Array
    train_rows: Array
    held_out_rows: Array

    def __init__(self, batch_size: int, seed: int, num_workers: int, m_per_class: int | None) -> None:
        super().__init__()
        self.batch_size, self.seed, self.num_workers, self.m_per_class = batch_size, seed, num_workers, m_per_class

    @property
    def num_classes(self) -> int:
        """The largest label of either part, plus one."""
        parts = (self.labels[self.train_rows], self.held_out_labels[self.held_out_rows])
        return 1 + int(np.concatenate(parts).max())

    def check(self, world_size: int, stage: str = "fit") -> None:
        """Check, before anything is written, whether this many ranks can share the batches.

        Args:
            world_size: Number of ranks.
            stage: ``fit`` needs training rows, and does not need held-out rows. ``validate`` and ``test`` need held-out rows, ``predict``
                any rows.

        Raises:
            ConfigurationError: The global batch is not divisible by the ranks, or by classes.
            InputError: Too few rows.
        """
        if stage == "predict":
            check_cut(len(self.labels), self.batch_size, world_size, shuffle=False)
            return
        is_evaluated = stage in ("validate", "test")
        if not is_evaluated:
            check_cut(len(self.train_rows), self.batch_size, world_size, shuffle=True)
            if self.m_per_class is not None:
                check_classes(self.labels[self.train_rows], self.m_per_class, self.batch_size)
        if is_evaluated or len(self.held_out_rows):
            check_cut(len(self.held_out_rows), self.batch_size, world_size, shuffle=False)

    @property
    def held_out_bytes(self) -> int:
        """The size of all held-out rows in their file's dtype."""
        return len(self.held_out_rows) * int(self.held_out_features[:1].nbytes)

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Return all held-out rows in order: features (n, ...) and labels (n,)."""
        x, labels, _ = self._held_out()[range(len(self.held_out_rows))]
        return x, labels

    @property
    def _dtype(self) -> torch.dtype:
        """The floating-point dtype of batches."""
        # in double precision the trainer widens its batches, which is too late for a float64 file read as float32
        if self.trainer is not None and str(self.trainer.precision).startswith("64"):
            return torch.float64
        return torch.get_default_dtype()

    def _held_out(self) -> ArrayRows:
        held_out = (self.held_out_features, self.held_out_labels, self.held_out_rows)
        return ArrayRows(*held_out, dtype=self._dtype, with_indices=True)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Load this rank's slices of the global batches, which differ by epoch."""
        self.check(process_groups.world_size())
        rows = ArrayRows(self.features, self.labels, self.train_rows, dtype=self._dtype)
        # the order of one process, distributed to the ranks
        source: Any = RandomSampler(rows)
        if self.m_per_class is not None:
            # an epoch has as many rows as the dataset, in whole batches. A class with fewer rows repeats some of them
            length = len(rows) // self.batch_size * self.batch_size
            source = MPerClassSampler(self.labels[self.train_rows], self.m_per_class, self.batch_size, length)
        batches = GlobalBatchSampler.batches(source, self.batch_size, drop_last=True, seed=self.seed)
        return DataLoader(rows, batch_sampler=batches, collate_fn=as_fetched, **self._workers())

    def val_dataloader(self) -> Any:
        """Load this rank's slices of the held-out rows, each row on one rank only. Without held-out rows nothing is validated."""
        if not len(self.held_out_rows):
            return []
        return self._in_order(self._held_out(), "validate")

    # a separate dataset for testing is another data module
    test_dataloader = val_dataloader

    def predict_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Load this rank's slices of all rows of `features`, including held-out ones, in the order of the file."""
        every_row = np.arange(len(self.labels))
        rows = ArrayRows(self.features, self.labels, every_row, dtype=self._dtype, with_indices=True)
        return self._in_order(rows, "predict")

    def _in_order(self, rows: ArrayRows, stage: str) -> DataLoader[tuple[Tensor, ...]]:
        self.check(process_groups.world_size(), stage)
        cut = HeldOutSlices(len(rows), self.batch_size)
        return DataLoader(rows, sampler=cut, batch_size=None, **self._workers())

    def _workers(self) -> dict[str, Any]:
        return {"num_workers": self.num_workers, "persistent_workers": self.num_workers > 0}


# ---------------------------------------------------------------------- the user's own arrays


class ArrayDataModule(BatchedArrayDataModule):
    """The user's own rows on disk: a csv file, or arrays of features (N, ...) and labels (N,).

    Args:
        features: Path of an ``.npy`` file, (N, ...), floating-point or integer. Or of a csv file with a label and numbers in each row, and
            column names in the first one.
        labels: Path of an ``.npy`` file, (N,), integers from 0. A csv has its label in a column.
        val_features: Held-out file of the same row shape. Without it a share of every class is held out.
        val_labels: Held-out labels, given together with `val_features` if these are ``.npy`` files.
        label: Name of the label's column in a csv, with texts or whole numbers. If None, its first column.
        id: Name of a column of a csv that identifies rows, such as a barcode. It is not a feature, and ``predict`` writes it beside each
            embedding.
        batch_size: Rows of the GLOBAL batch, over all ranks.
        held_out: Share of every class that is never trained on, if there are no held-out files. 0: train on all rows, without validation.
            1: train on none, to validate or predict with a checkpoint.
        seed: Determines the split and, with the epoch, the order of training.
        num_workers: Processes that read ahead on each rank.
        m_per_class: Rows of each class in a training batch, for losses that compare rows. If None, rows are drawn at random.

    Raises:
        InputError: A file that is missing or neither ``.npy`` nor csv, a wrong shape, a wrong dtype, a length mismatch, a negative label,
            a cell of a csv that is not a number.
        ConfigurationError: One of the two held-out files without the other.

    Example:
        >>> import numpy as np
        >>> np.save("features.npy", np.random.rand(12, 4).astype("float32"))
        >>> np.save("labels.npy", np.arange(12) % 3)
        >>> data = ArrayDataModule("features.npy", "labels.npy", batch_size=6)
    """

    def __init__(
        self,
        features: PathLike,
        labels: PathLike | None = None,
        val_features: PathLike | None = None,
        val_labels: PathLike | None = None,
        *,
        label: str | None = None,
        id: str | None = None,
        batch_size: int = 128,
        held_out: float = 0.25,
        seed: int = 0,
        num_workers: int = 0,
        m_per_class: int | None = None,
    ) -> None:
        super().__init__(batch_size, seed, num_workers, m_per_class)
        source = str(labels)
        if is_table(features):
            source = f"{features}, column {label or 1}"
            pairs = self._read_tables(features, labels, val_features, val_labels, label, id)
        else:
            fix = "Leave it out: embeddings.csv has the number of each row."
            expect(id is None, "data.init_args.id", expected="none beside arrays", got=id, fix=fix, error=InputError)
            pairs = _load_arrays(features, labels, val_features, val_labels, label)
        (self.features, self.labels), (self.held_out_features, self.held_out_labels) = pairs
        if val_features is None:
            self.train_rows, self.held_out_rows = stratified_split(self.labels, held_out, seed)
        else:
            train, held = (", ".join(map(str, array.shape[1:])) for array in (self.features, self.held_out_features))
            expected, got = f"(N, {train}) like {features}", f"(N, {held})"
            expect(
                train == held,
                f"shape of {val_features}",
                expected=expected,
                got=got,
                error=InputError,
                fix="Give both files the same columns.",
            )
            self.train_rows = np.arange(len(self.labels))
            self.held_out_rows = np.arange(len(self.held_out_labels))
        expected, got = "at least one of two rows, so that one can be held out", "one row for each label"
        fix = "Give val_features and val_labels."
        has_rows = len(self.held_out_rows) > 0 or held_out == 0
        expect(has_rows, f"classes in {source}", expected=expected, got=got, fix=fix, error=InputError)

    def _read_tables(
        self,
        features: PathLike,
        labels: PathLike | None,
        val_features: PathLike | None,
        val_labels: PathLike | None,
        label: str | None,
        identifier: str | None,
    ) -> tuple[Pair, Pair]:
        """Return features and labels of the training file and of the held-out file, or the training file again. Set the names."""
        beside = [str(path) for path in (labels, val_labels) if path is not None]
        fix = "Name the label's column: data.init_args.label."
        expect(not beside, "labels", expected="a column of the csv", got=", ".join(beside), fix=fix, error=InputError)
        train = read_table(features, label, identifier)
        held_out = train if val_features is None else read_table(val_features, label, identifier)
        self.row_ids = train.ids
        self.class_names, (numbers, held_out_numbers) = number_labels(train.labels, held_out.labels)
        return (train.features, numbers), (held_out.features, held_out_numbers)


def _load_arrays(
    features: PathLike,
    labels: PathLike | None,
    val_features: PathLike | None,
    val_labels: PathLike | None,
    label: str | None,
) -> tuple[Pair, Pair]:
    """Open features and labels of the training files and of the held-out files, or the training files again."""
    expected, got = "both val_features and val_labels, or neither", f"{val_features=!s}, {val_labels=!s}"
    expect(
        (val_features is None) == (val_labels is None),
        "held-out files",
        expected=expected,
        got=got,
        fix="Give both files.",
    )
    fix = "Give features as a csv file with a label in each row, or labels as an .npy file."
    expect(
        labels is not None and label is None, "labels", expected="an .npy file", got=label, fix=fix, error=InputError
    )
    assert labels is not None
    train = _load_pair(features, labels)
    if val_features is None or val_labels is None:
        return train, train
    return train, _load_pair(val_features, val_labels)


def open_array(path: PathLike, what: str) -> Array:
    """Memory map an .npy file."""
    expected = "an .npy file as numpy.save writes it"
    fix = "Save the numbers with numpy.save, or give features as a .csv file with a label in each row."
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        fix = f"Paths are relative to {os.getcwd()}."
        raise InputError(f"{what} {path}", expected=expected, got="no such file", fix=fix) from error
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{what} {path}", expected=expected, got=_other_content(path, error), fix=fix) from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise InputError(
            f"{what} {path}",
            expected=expected,
            got="an .npz archive",
            fix="Save each array by numpy.save in a file of its own.",
        )
    return array


def _other_content(path: PathLike, error: Exception) -> str:
    """Describe a file that numpy rejects. numpy's own message suggests loading pickles, which executes the content of the file."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        if file.read(len(_MAGIC)) == _MAGIC:
            return "an array of Python objects" if "bject" in str(error) else f"a damaged file: {error}"
        return f"a {os.path.splitext(path)[1] or 'file'} file without numpy's header"
    return str(error)


def _load_pair(features_path: PathLike, labels_path: PathLike) -> tuple[Array, Array]:
    """Open features and labels and check them against each other."""
    features, labels = open_array(features_path, "features"), open_array(labels_path, "labels")
    expect_input = functools.partial(expect, error=InputError)
    # the features
    expected = "(N, D) or (N, channels, height, width), nothing of length 0"
    is_filled = features.ndim > 1 and 0 not in features.shape
    expect_input(
        is_filled,
        f"shape of {features_path}",
        expected=expected,
        got=features.shape,
        fix="Save a table of features, one row for each label.",
    )
    is_number = features.dtype.kind in "fiu"
    expect_input(
        is_number,
        f"dtype of {features_path}",
        expected="floating or integer numbers",
        got=features.dtype,
        fix="Convert them: features.astype('float32').",
    )
    # the labels
    expect_input(
        labels.ndim == 1,
        f"shape of {labels_path}",
        expected=f"({len(features)},)",
        got=labels.shape,
        fix="Save one label for each row.",
    )
    fix = "Number the classes from 0: numpy.unique(names, return_inverse=True)[1]."
    expect_input(labels.dtype.kind in "iu", f"dtype of {labels_path}", expected="integers", got=labels.dtype, fix=fix)
    rows, fix = f"{len(features)}, as in {features_path}", "Write one label for each row of the features."
    expect_input(len(labels) == len(features), f"rows of {labels_path}", expected=rows, got=len(labels), fix=fix)
    labels = np.asarray(labels).astype(np.int64)
    fix = "Number the classes from 0."
    expect_input(labels.min() >= 0, f"labels in {labels_path}", expected="0 or more", got=labels.min(), fix=fix)
    return features, labels


# ---------------------------------------------------------------------- images without a download


class DigitsDataModule(BatchedArrayDataModule):
    """The digits as (1, 8, 8) images in [0, 1], split by class into training and held-out images.

    Args:
        batch_size: Images of the GLOBAL batch, over all ranks.
        held_out: Share of every class that is never trained on.
        seed: Determines the split and, with the epoch, the order of training.
        num_workers: Processes that read ahead on each rank.
        m_per_class: Rows of each class in a training batch, for losses that compare rows. If None, rows are drawn at random.
        missing_labels: Share of the training images whose label is removed, for losses that ignore such rows. Held-out images
            keep their labels.
        ignore_index: Label of these images, as in the loss.

    Raises:
        ConfigurationError: scikit-learn is not installed, or an option is invalid.

    Example:
        >>> data = DigitsDataModule(batch_size=64)
        >>> data.batch_size
        64
    """

    inputs_name = "raw pixels"

    def __init__(
        self,
        batch_size: int = 128,
        *,
        held_out: float = 0.25,
        seed: int = 0,
        num_workers: int = 0,
        m_per_class: int | None = None,
        missing_labels: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(batch_size, seed, num_workers, m_per_class)
        share = "missing_labels (share of the training images)"
        expect(0 <= missing_labels < 1, share, expected="0 or more, below 1", got=missing_labels)
        expect(ignore_index < 0, "ignore_index", expected="below 0, as classes are not", got=ignore_index)
        expected = "none beside missing_labels: an image without a label has no class to be drawn by"
        expect(
            not missing_labels or m_per_class is None,
            "m_per_class",
            expected=expected,
            got=m_per_class,
            fix="Remove one of the two options.",
        )
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            expected, fix = "scikit-learn, which brings the images", "Run: pip install 'lightning-ddp-losses[demo]'"
            got = "no such package"
            raise ConfigurationError("DigitsDataModule", expected=expected, got=got, fix=fix) from error
        digits = load_digits()
        # sixteenths are exact in every floating-point dtype
        self.features = self.held_out_features = digits.images[:, None].astype(np.float32) / 16
        self.labels = self.held_out_labels = digits.target.astype(np.int64)
        self.train_rows, self.held_out_rows = stratified_split(self.labels, held_out, seed)
        if missing_labels:
            # a separate random stream, so that the split is the same as without missing labels
            random = np.random.default_rng([seed, 1])
            count = round(missing_labels * len(self.train_rows))
            self.labels = self.labels.copy()
            self.labels[random.choice(self.train_rows, count, replace=False)] = ignore_index


# ---------------------------------------------------------------------- distribution of rows over batches


class HeldOutSlices(DistributedSampler[list[int]]):
    """This rank's slice of every held-out batch, in rank order: one list of row numbers per step.

    Every row appears exactly once, in order, in batches of at most `batch_size` rows that do not depend on the number of ranks.
    The sizes of the ranks' slices differ by at most one row. (With one row per rank, batches are larger and no rank gets an empty one.)
    Use it as ``DataLoader(dataset, sampler=..., batch_size=None)``: a `DistributedSampler` is the only sampler with which Lightning (2.6,
    measured 2026) evaluates on several ranks without advising against it.

    Args:
        size: Rows in the dataset.
        batch_size: Rows of the global batch.
    """

    def __init__(self, size: int, batch_size: int) -> None:
        super().__init__(range(size), process_groups.world_size(), process_groups.rank(), shuffle=False)  # type: ignore[arg-type]
        self.size, self.batch_size = size, batch_size

    def __len__(self) -> int:
        """Return the number of steps, equal on every rank."""
        full, rest = divmod(self.size, self.batch_size)
        return max(1, full + (rest > 0 and self.batch_size > self.num_replicas))

    def __iter__(self) -> Iterator[list[int]]:
        """Yield row numbers of this rank, one list per step."""
        for batch in np.array_split(np.arange(self.size), len(self)):
            yield np.array_split(batch, self.num_replicas)[self.rank].tolist()


def check_cut(size: int, batch_size: int, world_size: int, *, shuffle: bool) -> None:
    """Raise an error unless every rank gets its share of every batch.

    Args:
        size: Rows in the dataset.
        batch_size: Rows of the global batch.
        world_size: Number of ranks.
        shuffle: Whether to check training, with batches of exactly `batch_size` rows, or evaluation.

    Raises:
        ConfigurationError: `batch_size` is not a positive multiple of `world_size`.
        InputError: Fewer rows than a training batch, or than ranks.
    """
    below = batch_size // world_size * world_size
    choices = " or ".join(str(choice) for choice in (below, below + world_size) if choice > 0)
    what = "batch_size (rows of the global batch, over all ranks)"
    expected = f"a positive multiple of the {world_size} ranks"
    fix = f"Set data.init_args.batch_size to {choices}, or change trainer.devices."
    expect(batch_size > 0 and batch_size % world_size == 0, what, expected=expected, got=batch_size, fix=fix)
    what, least, needs = "held-out rows", world_size, f"at least one for each of {world_size} ranks"
    fix = "Hold out more rows, or use fewer ranks."
    if shuffle:
        what, least, needs = "training rows", batch_size, f"at least batch_size={batch_size}"
        fix = "Lower batch_size, or give more rows."
    expect(size >= least, what, expected=needs, got=size, fix=fix, error=InputError)


def check_classes(labels: np.ndarray, m_per_class: int, batch_size: int) -> None:
    """Raise an error unless `labels` have enough classes to fill a batch with `m_per_class` rows each.

    Raises:
        ConfigurationError: `m_per_class` does not divide `batch_size`, or there are too few classes.
    """
    what = f"m_per_class (rows of a class in the global batch of {batch_size})"
    is_divisor = m_per_class > 0 and batch_size % m_per_class == 0
    expect(
        is_divisor, what, expected=f"a divisor of {batch_size}", got=m_per_class, fix="Choose a divisor of batch_size."
    )
    classes = len(np.unique(labels))
    expected = f"at least {-(-batch_size // classes)}, as there are {classes} classes"
    fix = "Raise m_per_class, or lower batch_size."
    expect(classes * m_per_class >= batch_size, what, expected=expected, got=m_per_class, fix=fix)


def stratified_split(labels: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split row numbers into train and held-out rows, class by class.

    Args:
        labels: (N,) integers.
        fraction: Share of every class that is held out. A class of one row stays in training, unless all rows are held out.
        seed: Determines the choice, the same on every rank.

    Returns:
        Sorted row numbers (train, held out) without overlap.
    """
    expect(
        0 <= fraction <= 1,
        "held_out (share of every class)",
        expected="between 0 and 1",
        got=fraction,
        fix="Give a share, 0.25 for a quarter.",
    )
    every_row, none = np.arange(len(labels)), np.arange(0)
    if fraction == 0:
        return every_row, none
    if fraction == 1:
        return none, every_row
    random = np.random.default_rng(seed)
    held_out = []
    for label in np.unique(labels):
        rows = random.permutation(np.flatnonzero(labels == label))
        count = min(max(1, round(fraction * len(rows))), len(rows) - 1)
        held_out.append(rows[:count])
    held_out_rows = np.sort(np.concatenate(held_out))
    train_rows = np.setdiff1d(np.arange(len(labels)), held_out_rows, assume_unique=True)
    return train_rows, held_out_rows
