"""Tables of the user: a csv file with a label and numbers in each row.

The first row contains the column names, unless it is a row of numbers. One column is the label, a name or a number, and all other columns
are features. The delimiter is the character among comma, semicolon and tab that occurs most often in the first row.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Union

import numpy as np

from lightning_ddp_losses.errors import InputError

Array = np.ndarray[Any, Any]
PathLike = Union[str, "os.PathLike[str]"]
_ENDINGS = frozenset((".csv", ".tsv"))
_DELIMITERS = ",;\t"


class Table(NamedTuple):
    """Holds the rows of a file.

    Attributes:
        features: (N, D) float64.
        labels: Label of each row as written in the file, N texts.
        label_column: Name of the label's column.
        columns: Names of the D features.
    """

    features: Array
    labels: list[str]
    label_column: str
    columns: list[str]


def is_table(path: PathLike) -> bool:
    """Return whether a path names a csv file."""
    return Path(path).suffix.lower() in _ENDINGS


def read_table(path: PathLike, label: str | None = None) -> Table:
    """Read a csv file.

    Args:
        path: Path of the file, with commas, semicolons or tabs.
        label: Name of the label's column. If None, the first column.

    Raises:
        InputError: A file that is missing or empty, a column that does not exist, rows of different lengths, a cell that is not a finite
            number, a row without a label.
    """
    rows = _read_rows(path)
    header, first = _header(rows[0], label)
    if header:
        rows = rows[1:]
    if label is not None and label not in first:
        expected = f"one of the columns {', '.join(first)}"
        raise InputError(f"label column of {path}", expected=expected, got=label, fix="Set data.init_args.label.")
    place = 0 if label is None else first.index(label)
    columns = [*first[:place], *first[place + 1 :]]
    if not rows or not columns:
        raise InputError(
            f"table {path}", expected="rows with a label and numbers", got=f"{len(rows)} rows of {len(first)} columns"
        )
    features = np.empty((len(rows), len(columns)))
    labels = []
    for number, cells in enumerate(rows):
        line = number + 1 + header
        if len(cells) != len(first):
            raise InputError(f"row {line} of {path}", expected=f"{len(first)} cells", got=len(cells))
        labels.append(cells[place].strip())
        if not labels[-1]:
            raise InputError(f"label in row {line} of {path}", expected="a name or a number", got="an empty cell")
        numbers = [*cells[:place], *cells[place + 1 :]]
        features[number] = _numbers(numbers, columns, f"row {line} of {path}")
    return Table(features, labels, first[place], columns)


def _read_rows(path: PathLike) -> list[list[str]]:
    """Return the cells of all rows that are not empty."""
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            delimiter = max(_DELIMITERS, key=file.readline().count)
            file.seek(0)
            rows = [cells for cells in csv.reader(file, delimiter=delimiter) if cells]
    except FileNotFoundError as error:
        fix = f"Paths are relative to {os.getcwd()}."
        raise InputError(f"table {path}", expected="a csv file", got="no such file", fix=fix) from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"table {path}", expected="a csv file", got=str(error)) from error
    if not rows:
        raise InputError(f"table {path}", expected="rows with a label and numbers", got="an empty file")
    return rows


def _header(cells: Sequence[str], label: str | None) -> tuple[bool, list[str]]:
    """Return whether the first row contains column names, and the names. Without names the columns are numbered from 1."""
    names = [cell.strip() for cell in cells]
    if label in names or not all(map(_is_number, names[1:])):
        return True, names
    return False, [f"column {number}" for number in range(1, len(names) + 1)]


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _numbers(cells: Sequence[str], columns: Sequence[str], where: str) -> Array:
    """Return the features of one row, (D,) float64."""
    try:
        found = np.array(cells, dtype=np.float64)
    except ValueError:
        found = np.array([float(cell) if _is_number(cell) else np.nan for cell in cells])
    if not np.isfinite(found).all():
        wrong = int(np.flatnonzero(~np.isfinite(found))[0])
        fix = "Every column but the label's is a feature. Leave out columns of names, and rows with missing values."
        raise InputError(f"{columns[wrong]}, {where}", expected="a finite number", got=repr(cells[wrong]), fix=fix)
    return found


def number_labels(*columns: Sequence[str]) -> tuple[list[str], list[Array]]:
    """Return the names of the classes, and the labels of each column as numbers from 0, (N,) int64.

    Labels that are whole numbers from 0 are kept, and the list of names is empty. Other labels are numbered in alphabetical order.

    Args:
        *columns: Labels of one or several tables, as written in the files.
    """
    if all(label.isdecimal() for column in columns for label in column):
        return [], [np.array([int(label) for label in column], dtype=np.int64) for column in columns]
    names = sorted({label for column in columns for label in column})
    numbers = {name: number for number, name in enumerate(names)}
    return names, [np.array([numbers[label] for label in column], dtype=np.int64) for column in columns]
