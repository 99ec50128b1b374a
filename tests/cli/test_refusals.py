"""What modules, data and metrics of the shipped configs refuse: options, arrays, tables, and rows that are not enough."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_ddp_losses.cli import (
    ArrayDataModule,
    CellsDataModule,
    CellsEncoder,
    DigitsDataModule,
    DigitsEncoder,
    EmbeddingModule,
    LossCLI,
    MLPEncoder,
    configs,
    search,
)
from lightning_ddp_losses.demo.data import check_classes, check_cut, stratified_split
from lightning_ddp_losses.demo.evaluation import HeldOutRows, retrieval_metrics
from lightning_ddp_losses.errors import ConfigurationError, InputError
from tests.cli.test_data import write_arrays
from tests.cli.test_extending_page import fit_with_check
from tests.cli.test_module import held_out_set
from tests.cli.test_own_cli import ENCODER
from tests.cli.test_recipes import EVEN, RECIPES, THEIRS, code_of, run_code, simple
from tests.refusals import Mistake, Refused, refusals, refusals_of_one_process

pytestmark = pytest.mark.usefixtures("empty_folder")


def without(module: str, call: Callable[[], object]) -> None:
    """Call where a module cannot be imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module, None)
        call()


def arrays(features: str, labels: str | None = "labels", *held_out: str, **options: Any) -> Callable[[], object]:
    """Read files of `write_arrays`."""

    def read() -> object:
        files = write_arrays(Path())
        paths = [name and files[name] for name in (features, labels, *held_out)]
        return ArrayDataModule(*paths, **options)  # type: ignore[arg-type]

    return read


LABELS = np.arange(100) % 5
SHARE = "expected 0 or more, below 1"
UNLABELLED = partial(DigitsDataModule, missing_labels=0.1)
OPTIONS: dict[str, Mistake] = {
    "all labels missing": (partial(DigitsDataModule, missing_labels=1), ("missing_labels ", f": {SHARE}, got 1")),
    "fewer than no label missing": (partial(DigitsDataModule, missing_labels=-0.1), f"{SHARE}, got -0.1"),
    "no number of labels missing": (partial(DigitsDataModule, missing_labels=float("nan")), f"{SHARE}, got nan"),
    "a class that is ignored": (
        partial(UNLABELLED, ignore_index=9),
        "ignore_index: expected below 0, as classes are not, got 9",
    ),
    "classes by number and missing labels": (
        partial(UNLABELLED, m_per_class=8),
        ("m_per_class: expected none beside missing_labels", ", got 8"),
    ),
    "a share held out": (partial(DigitsDataModule, held_out=-0.1), "between 0 and 1, got -0.1"),
    "features held out without labels": (
        arrays("features", "labels", "features"),
        "expected both val_features and val_labels",
    ),
    "no type": (partial(CellsDataModule, 300, types=0), "types"),
    "no gene": (partial(CellsDataModule, 300, genes=0), "genes"),
    "all cells held out": (partial(CellsDataModule, 300, held_out_cells=300), "held_out_cells"),
    "rows of a class": (
        partial(check_classes, LABELS, 3, 20),
        ("m_per_class (", " batch of 20): expected a divisor of 20, got 3"),
    ),
    "few rows of a class": (
        partial(check_classes, LABELS, 2, 20),
        "at least 4, as there are 5 classes, got 2\nRaise m_per_class",
    ),
    "no row of a class": (partial(check_classes, LABELS, 0, 20), "expected a divisor"),
    "a batch for 3 ranks": (
        partial(check_cut, 100, 64, 3, shuffle=True),
        ("multiple of the 3 ranks, got 64\n", "63 or 66"),
    ),
    "a batch of no rows": (partial(check_cut, 100, 0, 3, shuffle=True), "got 0"),
    "a split beyond all": (partial(stratified_split, LABELS, 1.5, seed=0), "between 0 and 1, got 1.5"),
    "a name for a list": (
        partial(configs.run_configs, ["digits"]),
        ("expected names out of ", "digits_arcface", ", got digits"),
    ),
    "a loss without its number of classes": (
        lambda: LossCLI(EmbeddingModule, args=[*ENCODER, "pytorch_metric_learning.losses.ArcFaceLoss"], run=False),
        "model.loss.init_args.num_classes: expected a number, got nothing",
    ),
    "digits without scikit-learn": (
        lambda: without("sklearn.datasets", DigitsDataModule),
        "pip install 'lightning-ddp-losses[demo]'",
    ),
    "a search without SQLite": (
        lambda: without("sqlite3", lambda: search.Index([])),
        ("expected Python with SQLite and its FTS5", "explain --all"),
    ),
}
test_options = refusals_of_one_process(OPTIONS, ConfigurationError)


def of_nan() -> object:
    embeddings, labels = held_out_set()
    embeddings[7, 0] = torch.nan
    return retrieval_metrics(embeddings, labels)


ROWS: dict[str, Mistake] = {
    "few rows to train on": (
        partial(check_cut, 63, 64, 2, shuffle=True),
        "training rows: expected at least batch_size=64, got 63",
    ),
    "few rows held out": (
        partial(check_cut, 3, 64, 4, shuffle=False),
        "held-out rows: expected at least one for each of 4 ranks, got 3",
    ),
    "images": (
        partial(DigitsEncoder(), torch.zeros(2, 8, 8)),
        "images: expected (B, 1, 8, 8), got (2, 8, 8)",
    ),
    "features": (
        partial(MLPEncoder(5), torch.zeros(2, 3, 4)),
        "length: expected in_features=5, got 12 (shape (2, 3, 4))",
    ),
    "features, whose option is named": (
        partial(MLPEncoder(6, 3), torch.ones(2, 5)),
        ("expected in_features=6, got 5 ", "encoder.init_args.in_features to 5"),
    ),
    "genes": (
        partial(CellsEncoder(6, 3), torch.ones(2, 5)),
        ("expected genes=6, got 5 ", "encoder.init_args.genes to 5"),
    ),
    "no rows of this rank": (HeldOutRows().gather, "held-out rows of this rank: expected one at least, got 0"),
    "NaN": (of_nan, "finite numbers, got 1 rows of 53"),
}
test_rows = refusals_of_one_process(ROWS, InputError)


# ---------------------------------------------------------------------- files


def table(*lines: str, **options: Any) -> Callable[[], object]:
    """Read a csv file with these lines."""

    def read() -> object:
        Path("t.csv").write_text("".join(f"{line}\n" for line in lines))
        return ArrayDataModule("t.csv", batch_size=2, **options)

    return read


ARRAY, NUMBER, COLUMNS = (
    ".npy: expected an .npy file",
    "of t.csv: expected a finite number, got ",
    "one of the columns ",
)
FILES: dict[str, Mistake] = {
    "no features": (arrays("missing"), ("features ", f"missing{ARRAY}", ", got no such file\nPaths are")),
    "no labels": (arrays("features", "missing"), ("labels ", f"missing{ARRAY}")),
    "labels that are not named": (arrays("features", None), "labels: expected an .npy file"),
    "nonsense": (arrays("nonsense"), ("features ", f"nonsense{ARRAY}")),
    "objects": (arrays("objects"), ("features ", f"objects{ARRAY}")),
    "an archive": (arrays("archive"), "got an .npz archive"),
    "one dimension": (arrays("flat"), ("shape of ", "flat.npy: expected (N, D)", ", got (60,)")),
    "no columns": (arrays("empty"), "got (60, 0)"),
    "text": (arrays("text"), ("dtype of ", "text.npy: expected floating or integer numbers, got <U1")),
    "a label too few": (arrays("features", "short"), ("rows of ", "short.npy: expected 60, as in ", ", got 59")),
    "labels with a fraction": (
        arrays("features", "floats"),
        ("dtype of ", "floats.npy: expected integers, got float64\n", "unique"),
    ),
    "labels in a column": (
        arrays("features", "column"),
        ("shape of ", "column.npy: expected (60,), got (60, 1)"),
    ),
    "labels below 0": (arrays("features", "negative"), ("labels in ", "negative.npy: expected 0 or more, got -1")),
    "features of another shape": (
        arrays("features", "labels", "other_width", "eight"),
        ("shape of ", "other_width.npy: expected (N, 3, 4) like ", ", got (N, 3, 5)"),
    ),
    "an array with a class for each row": (arrays("features", "single"), "at least one of two rows"),
    "identifiers of arrays": (
        arrays("features", id="cell"),
        "data.init_args.id: expected none beside arrays, got cell",
    ),
    # tables
    "no table": (lambda: ArrayDataModule("t.csv"), "t.csv: expected a csv file, got no such file"),
    "a missing value": (table("kind,x,y", "a,1,2", "b,NA,3"), f"x, row 3 {NUMBER}'NA'"),
    "an empty cell": (table("kind,x,y", "a,1,", "b,2,3"), f"y, row 2 {NUMBER}''"),
    "not finite": (table("kind,x", "a,inf", "b,2"), f"x, row 2 {NUMBER}'inf'"),
    "an identifier": (table("kind,id,x", "a,c1,1", "b,c2,2"), ("id, row 2 ", "set data.init_args.id to id.")),
    "a decimal comma": (
        table("kind;x", "a;1,5", "b;2,5"),
        f"x, row 2 {NUMBER}'1,5', a decimal comma\nWrite points: 1.5. With pandas: ",
    ),
    "a quoted decimal comma": (table("kind,x,y", 'a,"1,5",2', 'b,"2,5",3'), "got '1,5', a decimal comma"),
    "decimal commas between commas": (
        table("kind,x,y", "a,1,5,2", "b,2,5,3"),
        ("row 2 of t.csv: expected 3 cells, got 4\n", " Write numbers with a decimal point"),
    ),
    "a short row": (table("kind,x,y", "a,1,2", "b,1"), "row 3 of t.csv: expected 3 cells, got 2"),
    "an identifier that is not there": (
        table("kind,cell_id,x", "a,1,1", "b,2,2", id="cellid"),
        f"id column of t.csv: expected {COLUMNS}kind, cell_id, x, got cellid\nDid you mean cell_id?",
    ),
    "identifiers and labels only": (table("id,kind", "1,a", "2,b", id="id"), "expected rows with a label and numbers"),
    "a label that is misspelled": (
        table("cell_type,x", "a,1", "b,2", label="celltype"),
        "Did you mean cell_type? Set data.init_args.label to it",
    ),
    "no label": (
        table("kind,x", "a,1", ",2"),
        "label in row 3 of t.csv: expected a name or a number, got an empty cell",
    ),
    "another label": (
        table("kind,x", "a,1", "b,2", label="typ"),
        f"label column of t.csv: expected {COLUMNS}kind, x, got typ",
    ),
    "no rows": (table("kind,x"), "expected rows with a label and numbers, got 0 rows"),
    "an empty file": (table(), "got an empty file"),
    "one column": (table("kind", "a"), "got 2 rows of 1 columns"),
    "labels beside a table": (
        table("kind,x", "a,1", "b,2", labels="y.npy"),
        "labels: expected a column of the csv, got y.npy",
    ),
    "a class for each row": (
        table("id,x", "c1,1", "c2,2"),
        "classes in t.csv, column 1: expected at least one of two rows",
    ),
}
test_files = refusals_of_one_process(FILES, InputError)

# ---------------------------------------------------------------------- on ranks

GPU = "SyncBatchNorm layers only work with GPU modules"
ON_RANKS: dict[str, Refused] = {
    "what the check of the page finds": Refused(
        lambda _: fit_with_check(True),
        (
            "EqualWidths, before backward of step 0: width of the batch",
            "\n  rank 1: 4\nPad each batch to one width.",
        ),
    ),
    "batch norm of torch on the CPU": Refused(
        lambda _: run_code(*code_of("sync_batch_norm", THEIRS), simple, EVEN, RECIPES["sync_batch_norm"].options),
        (),
        own={0: GPU, 1: GPU},
    ),
}
test_on_ranks = refusals(__name__, "ON_RANKS")
