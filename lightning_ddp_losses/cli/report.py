"""What a run leaves for its reader: a table at the end, two pictures, and the embeddings after predict."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.table import Table

from lightning_ddp_losses.cli.evaluation import HeldOut, retrieval_metrics
from lightning_ddp_losses.cli.pictures import draw_embedding, draw_loss_curve, read_metrics

_ROWS = (
    ("loss", "val_loss"),
    ("precision@1", "precision_at_1"),
    ("R-precision", "r_precision"),
    ("MAP@R", "map_at_r"),
)
_MOST_RAW_BYTES = 2**30  # raw features are read whole for the comparison; beyond this it is left out


class RunReport(Callback):
    """At the end of fit, on rank 0: prints the metrics beside those of the raw inputs and draws the pictures.

    After predict it writes the gathered `embeddings.npy` and `labels.npy`. A missing plotting package costs the pictures
    only.

    Args:
        console: Where to print; standard output if not given.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console
        self.started = time.perf_counter()
        self.outputs: list[tuple[str, str]] = []
        self.tables: list[str | Table] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self.started = time.perf_counter()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the pictures and fill the table."""
        folder = trainer.log_dir  # a broadcast: every rank has to ask
        if not trainer.is_global_zero:
            return
        seconds = time.perf_counter() - self.started
        held_out: HeldOut | None = getattr(pl_module, "held_out", None)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.outputs = [
            ("time", f"{seconds:.1f} s of training on {trainer.world_size} rank{'s' * (trainer.world_size > 1)}")
        ]
        if folder is not None and trainer.loggers:
            self._write(trainer, held_out, metrics, Path(folder))
        rows = "" if held_out is None else f" ({len(held_out.labels)} rows)"
        own = getattr(pl_module, "report_rows", None)  # a module that is not about retrieval says what it measures
        title = getattr(pl_module, "report_title", "Retrieval on the held-out set")
        raw = _raw_metrics(trainer) if own is None else None
        self.tables = [f"{title}{rows}", _table(metrics, own or _ROWS, raw)]

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the embeddings in the order of the held-out set."""
        held_out: HeldOut | None = getattr(pl_module, "held_out", None)
        log_dir = trainer.log_dir  # a broadcast: every rank has to ask
        if not trainer.is_global_zero or held_out is None or log_dir is None or not trainer.loggers:
            return
        folder = Path(log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.tables, self.outputs = [f"Embedded {len(held_out.labels)} rows"], []
        for name, tensor in (("embeddings", held_out.embeddings), ("labels", held_out.labels)):
            np.save(folder / f"{name}.npy", tensor.numpy())
            self.outputs.append((name, f"{folder / name}.npy {tuple(tensor.shape)}"))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Print, now that the progress bar has left the terminal alone."""
        console = self.console or Console()
        for table in self.tables:
            console.print(table, highlight=False)
        for name, value in self.outputs:  # paths and package extras hold brackets, which are no markup
            console.print(f"{name:<11}{value}", soft_wrap=True, highlight=False, markup=False)
        self.tables, self.outputs = [], []

    def _write(self, trainer: Trainer, held_out: HeldOut | None, metrics: dict[str, float], folder: Path) -> None:
        """Draw the pictures and note where everything is."""
        csv = None
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger):
                logger.save()
                csv = Path(logger.log_dir) / logger.experiment.NAME_METRICS_FILE
        if csv is not None and csv.is_file():
            self.outputs.append(("metrics", str(csv)))
        checkpoint = getattr(trainer.checkpoint_callback, "best_model_path", "")
        if checkpoint:
            self.outputs.append(("checkpoint", checkpoint))
        try:
            if csv is not None and csv.is_file() and read_metrics(csv):
                draw_loss_curve(read_metrics(csv), folder / "loss_curve.png")
                self.outputs.append(("picture", str(folder / "loss_curve.png")))
            if held_out is not None and len(held_out.labels) > 3:
                title = f"{len(held_out.labels)} held-out rows, MAP@R {metrics.get('map_at_r', float('nan')):.3f}"
                draw_embedding(held_out.embeddings, held_out.labels, folder / "embedding_2d.png", title=title)
                self.outputs.append(("picture", str(folder / "embedding_2d.png")))
        except ImportError as error:
            package = str(error.name).split(".", maxsplit=1)[0]
            self.outputs.append(("no picture", f"{package} is missing: pip install 'lightning-ddp-losses[demo]'"))


def _raw_metrics(trainer: Trainer) -> tuple[str, dict[str, float]] | None:
    """Name of the inputs and their retrieval metrics, where the data module can hand over the held-out set."""
    data: Any = getattr(trainer, "datamodule", None)
    if not hasattr(data, "held_out") or not hasattr(data, "inputs_name"):
        return None
    if data.held_out_bytes > _MOST_RAW_BYTES:
        return None
    return data.inputs_name, retrieval_metrics(*data.held_out())


def _table(
    metrics: dict[str, float], rows: Sequence[tuple[str, str]], raw: tuple[str, dict[str, float]] | None
) -> Table:
    """The figures of the embeddings, beside those of the raw inputs."""
    table = Table()
    table.add_column("metric")
    table.add_column("embeddings" if rows is _ROWS else "prediction", justify="right")
    if raw is not None:
        table.add_column(raw[0], justify="right")
    for title, name in rows:
        cells = [_cell(metrics.get(name))]
        if raw is not None:
            cells.append(_cell(raw[1].get(name)))
        table.add_row(title, *cells)
    return table


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
