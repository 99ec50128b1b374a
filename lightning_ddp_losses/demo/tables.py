"""Tables of the user: a csv file with a label and numbers in each row.

The first row contains the column names, unless it is a row of numbers. One column is the label, a name or a number. Another one may be
the identifier of each row. All other columns are features. The delimiter is the character among comma, semicolon and tab that occurs
most often in the first row.
"""

from __future__ import annotations

import csv
import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Union

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from lightning_ddp_losses.errors import InputError, format_error

Array = np.ndarray[Any, Any]
PathLike = Union[str, "os.PathLike[str]"]
_ENDINGS = frozenset((".csv", ".tsv"))
_DELIMITERS = ",;\t"
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
_MISSING = frozenset(("na", "n/a", "nan", "null", "none", "inf", "-inf"))
_FEWEST_ROWS = 20  # from which different whole numbers look like identifiers
_DISTINCT = 0.95  # share of different numbers in a column of identifiers


class Table(NamedTuple):
    """Holds the rows of a file.

    Attributes:
        features: (N, D) float64.
        labels: Label of each row as written in the file, N texts.
        label_column: Name of the label's column.
        columns: Names of the D features.
        ids: Identifier of each row as written in the file, N texts. Empty if no column has them.
    """

    features: Array
    labels: list[str]
    label_column: str
    columns: list[str]
    ids: list[str]


def is_table(path: PathLike) -> bool:
    """Return whether a path names a csv file."""
    return Path(path).suffix.lower() in _ENDINGS


def read_table(path: PathLike, label: str | None = None, identifier: str | None = None) -> Table:
    """Read a csv file, and warn of a feature that looks like an identifier.

    Args:
        path: Path of the file, with commas, semicolons or tabs.
        label: Name of the label's column. If None, the first column that is not the identifier.
        identifier: Name of the column that identifies rows and is not a feature. If None, the file does not have any.

    Raises:
        InputError: A file that is missing or empty, a column that does not exist, rows of different lengths, a cell that is not a finite
            number, a row without a label.
    """
    rows = _read_rows(path)
    header, first = _header(rows[0], [label, identifier])
    if header:
        rows = rows[1:]
    id_place = None if identifier is None else _place(identifier, first, "id", path)
    others = [number for number in range(len(first)) if number != id_place]
    place = others[0] if label is None and others else _place(label or first[0], first, "label", path)
    kept = [number for number in others if number != place]
    columns = [first[number] for number in kept]
    if not rows or not columns:
        fix = "Give a file with a column of labels and at least one column of numbers."
        got = f"{len(rows)} rows of {len(first)} columns"
        raise InputError(f"table {path}", expected="rows with a label and numbers", got=got, fix=fix)
    features = np.empty((len(rows), len(columns)))
    labels, ids = [], []
    for number, cells in enumerate(rows):
        line = number + 1 + header
        if len(cells) != len(first):
            fix = "Put quotes around a cell that contains the delimiter. Write numbers with a decimal point."
            raise InputError(f"row {line} of {path}", expected=f"{len(first)} cells", got=len(cells), fix=fix)
        labels.append(cells[place].strip())
        if not labels[-1]:
            fix = "Give the row a label, or leave the row out."
            what = f"label in row {line} of {path}"
            raise InputError(what, expected="a name or a number", got="an empty cell", fix=fix)
        if id_place is not None:
            ids.append(cells[id_place].strip())
        numbers = [cells[number] for number in kept]
        features[number] = _features_of(numbers, columns, f"row {line} of {path}")
    _warn_of_identifiers(features, columns, path)
    return Table(features, labels, first[place], columns, ids)


def _place(name: str, columns: Sequence[str], option: str, path: PathLike) -> int:
    """Return the number of the column that an option names."""
    if name in columns:
        return columns.index(name)
    similar = difflib.get_close_matches(name, columns, n=1)
    fix = f"Set data.init_args.{option} to the name of a column."
    if similar:
        fix = f"Did you mean {similar[0]}? Set data.init_args.{option} to it."
    expected = f"one of the columns {', '.join(columns)}"
    raise InputError(f"{option} column of {path}", expected=expected, got=name, fix=fix)


def _warn_of_identifiers(features: Array, columns: Sequence[str], path: PathLike) -> None:
    """Warn of a column of whole numbers that are nearly all different, if the other columns are not like it."""
    count = len(features)
    if count < _FEWEST_ROWS:
        return
    whole = np.flatnonzero((features == np.floor(features)).all(0)).tolist()
    found = [number for number in whole if len(np.unique(features[:, number])) > _DISTINCT * count]
    if len(found) != 1 or len(columns) == 1:
        return
    name = columns[found[0]]
    what = f"column {name} of {path}, which is a feature"
    got = f"{len(np.unique(features[:, found[0]]))} different whole numbers in {count} rows, as an identifier has them"
    fix = f"If it identifies rows, set data.init_args.id to {name}: it is then written to embeddings.csv and not trained on."
    rank_zero_warn(format_error(what, expected="measurements", got=got, fix=fix))


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
        raise InputError(
            f"table {path}", expected="a csv file", got=str(error), fix="Save the table as csv with UTF-8 letters."
        ) from error
    if not rows:
        raise InputError(
            f"table {path}",
            expected="rows with a label and numbers",
            got="an empty file",
            fix="Save the table again as csv.",
        )
    return rows


def _header(cells: Sequence[str], named: Sequence[str | None]) -> tuple[bool, list[str]]:
    """Return whether the first row contains column names, and the names. A column without a name has its number, from 1."""
    names = [cell.strip() for cell in cells]
    numbered = [f"column {number}" for number in range(1, len(names) + 1)]
    if any(name in names for name in named) or not all(map(_is_number, names[1:])):
        return True, [name or number for name, number in zip(names, numbered, strict=True)]
    return False, numbered


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _features_of(cells: Sequence[str], columns: Sequence[str], where: str) -> Array:
    """Return the features of one row, (D,) float64."""
    try:
        found = np.array(cells, dtype=np.float64)
    except ValueError:
        found = np.array([float(cell) if _is_number(cell) else np.nan for cell in cells])
    if not np.isfinite(found).all():
        wrong = int(np.flatnonzero(~np.isfinite(found))[0])
        name, cell = columns[wrong], cells[wrong].strip()
        got = repr(cells[wrong])
        fix = "Leave out rows with missing values, or fill them."
        if _DECIMAL_COMMA.fullmatch(cell):
            got += ", a decimal comma"
            pandas = "read_csv(path, sep=None, engine='python', decimal=',').to_csv('points.csv', index=False)"
            fix = f"Write points: {cell.replace(',', '.')}. With pandas: {pandas}."
        elif re.search("[^\\W\\d_]", cell) and cell.lower() not in _MISSING:
            fix = (
                f"Every column but the label's is a feature. If {name} identifies rows, set data.init_args.id to {name}. "
                "Leave out other columns of names."
            )
        raise InputError(f"{name}, {where}", expected="a finite number", got=got, fix=fix)
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
