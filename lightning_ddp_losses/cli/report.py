"""Reports of a run: a table at the end, two pictures, and the embeddings of all rows after predict."""

from __future__ import annotations

import csv
import shlex
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from lightning_ddp_losses.demo.data import BatchedArrayDataModule
from lightning_ddp_losses.demo.evaluation import HeldOut, HeldOutModule

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CURVES = {"train_loss": ("training", "tab:blue"), "val_loss": ("held out", "tab:orange")}
_MOST_RAW_BYTES = 2**30  # raw features are read completely for the comparison, which is skipped for larger ones
_LEAST_RATIO = 10  # ratio of largest to smallest loss from which the scale is logarithmic, with labels at powers of ten
_MOST_POINTS = 4000  # maximum number of held-out rows in the map
_MOST_CLASSES_IN_LEGEND = 20


class RunReport(Callback):
    """At the end of fit, on rank 0: prints the metrics and draws the pictures.

    A module may describe its metrics: ``report_rows`` (title and logged name of each), ``report_title`` and ``report_heading``. For
    any other module, everything that it logged is shown. Retrieval metrics are shown next to the metrics of the raw inputs, and of the
    untrained encoder if all held-out rows are evaluated before training (``num_sanity_val_steps: -1``).

    After predict it writes the gathered `embeddings.npy` and `labels.npy`, and `embeddings.csv`, which also contains the number of each
    row. Without a plotting package, only the pictures are omitted.
    """

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.shown: list[Text | Table] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self.started = time.perf_counter()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the pictures and fill the table."""
        folder = trainer.log_dir  # a broadcast, which every rank has to call
        if not trainer.is_global_zero:
            return
        seconds = time.perf_counter() - self.started
        held_out = pl_module.held_out if isinstance(pl_module, HeldOutModule) else None
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        ranks = f"{trainer.world_size} rank{'s' * (trainer.world_size > 1)}"
        # the rows that the module defines, otherwise everything that it logged. Without metrics the table is omitted.
        own = getattr(pl_module, "report_rows", None)
        rows = own or [(name, name) for name in sorted(metrics)]
        if rows:
            title = getattr(pl_module, "report_title", "Logged")
            columns = [(getattr(pl_module, "report_heading", "last value"), metrics)]
            if isinstance(pl_module, HeldOutModule) and held_out is not None:
                title += f" ({len(held_out.labels)} rows)"
                columns += _compared_metrics(trainer, pl_module)
            self.shown += [Text(title), _metrics_table(columns, rows)]
        self._show("time", f"{seconds:.1f} s of training on {ranks}")
        if folder is not None and trainer.loggers:
            data: Any = getattr(trainer, "datamodule", None)
            of_ours = isinstance(data, BatchedArrayDataModule)
            self._write(trainer, held_out, metrics, Path(folder), data.class_names if of_ours else ())
            if of_ours and isinstance(pl_module, HeldOutModule):
                self._show_next_commands(trainer, Path(folder))

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the embeddings in the order of the dataset."""
        held_out = pl_module.held_out if isinstance(pl_module, HeldOutModule) else None
        log_dir = trainer.log_dir  # a broadcast, which every rank has to call
        if not trainer.is_global_zero or held_out is None or log_dir is None or not trainer.loggers:
            return
        folder = Path(log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        data: Any = getattr(trainer, "datamodule", None)
        of_ours = data if isinstance(data, BatchedArrayDataModule) else None
        self.shown.append(Text(_embedded_rows(held_out, of_ours)))
        for name, tensor in (("embeddings", held_out.embeddings), ("labels", held_out.labels)):
            np.save(folder / f"{name}.npy", tensor.numpy())
            self._show(name, f"{folder / name}.npy {tuple(tensor.shape)}")
        write_embeddings(held_out, of_ours, folder / "embeddings.csv")
        self._show("table", str(folder / "embeddings.csv"))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Print the report, after the progress bar has released the terminal."""
        console = Console()
        for part in self.shown:  # do not wrap paths
            console.print(part, soft_wrap=isinstance(part, Text))
        self.shown = []

    def _show(self, name: str, value: str) -> None:
        self.shown.append(Text(f"{name:<11}{value}"))

    def _write(
        self,
        trainer: Trainer,
        held_out: HeldOut | None,
        metrics: dict[str, float],
        folder: Path,
        class_names: Sequence[str],
    ) -> None:
        """Draw the pictures and list all outputs."""
        logged: dict[str, list[tuple[float, float]]] = {}
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger):
                logger.save()
                file = Path(logger.log_dir) / logger.experiment.NAME_METRICS_FILE
                if file.is_file():
                    self._show("metrics", str(file))
                    logged = read_metrics(file)
        checkpoint = getattr(trainer.checkpoint_callback, "best_model_path", "")
        if checkpoint:
            self._show("checkpoint", checkpoint)
        try:
            if _CURVES.keys() & logged.keys():
                draw_loss_curve(logged, folder / "loss_curve.png")
                self._show("picture", str(folder / "loss_curve.png"))
            if held_out is not None and len(held_out.labels) > 3:
                title = f"{len(held_out.labels)} held-out rows, MAP@R {metrics.get('map_at_r', float('nan')):.3f}"
                picture = folder / "embedding_2d.png"
                draw_embedding(held_out.embeddings, held_out.labels, picture, title=title, class_names=class_names)
                self._show("picture", str(folder / "embedding_2d.png"))
        except ImportError as error:
            package = str(error.name).split(".", maxsplit=1)[0]
            self._show("no picture", f"{package} is missing: pip install 'lightning-ddp-losses[demo]'")

    def _show_next_commands(self, trainer: Trainer, folder: Path) -> None:
        """Show the command that embeds every row with the checkpoint, and the page about the table."""
        config, checkpoint = folder / "config.yaml", getattr(trainer.checkpoint_callback, "best_model_path", "")
        if checkpoint and config.is_file():
            command = ["ddp-losses", "predict", "--config", str(config), "--ckpt_path", str(checkpoint)]
            self._show("embed rows", shlex.join(command))
        self._show("meaning", "ddp-losses explain fit_numbers")


def _compared_metrics(trainer: Trainer, module: HeldOutModule) -> list[tuple[str, dict[str, float]]]:
    """Return names and metrics of the untrained encoder and of the inputs, if available."""
    columns = []
    # a shorter check before training has not evaluated all rows
    if module.untrained and trainer.num_sanity_val_steps == float("inf"):
        columns.append(("untrained", module.untrained))
    data: Any = getattr(trainer, "datamodule", None)
    if isinstance(data, BatchedArrayDataModule) and data.held_out_bytes <= _MOST_RAW_BYTES:
        columns.append((data.inputs_name, module.measure(*data.held_out())))
    return columns


def _metrics_table(columns: Sequence[tuple[str, dict[str, float]]], rows: Sequence[tuple[str, str]]) -> Table:
    """Return the metrics of a run as a table.

    Args:
        columns: Heading and values by name of each column.
        rows: Title and name of each row.
    """
    table = Table("metric")
    for heading, _ in columns:
        table.add_column(heading, justify="right")
    for title, name in rows:
        cells = [f"{figures[name]:.4f}" if name in figures else "-" for _, figures in columns]
        table.add_row(title, *cells)
    return table


# ---------------------------------------------------------------------- embeddings


def _embedded_rows(found: HeldOut, data: BatchedArrayDataModule | None) -> str:
    """Return how many rows were embedded, and how many of them are held out from training, if known."""
    text = f"Embedded {len(found.labels)} rows"
    if data is not None:
        own = len(data.held_out_rows) if data.held_out_features is data.features else 0
        text += f", all of the data: {own} of them are held out from training"
    return text


def write_embeddings(found: HeldOut, data: BatchedArrayDataModule | None, path: Path) -> None:
    """Write a csv file with a line for each row: number from 0, the user's identifier if any, label, whether held out, embedding.

    Args:
        found: Embeddings (G, D) and labels (G,) in the order of the dataset.
        data: The data. None if it does not belong to this package, in which case labels are numbers and held-out rows are unknown.
        path: Path of the file.
    """
    embeddings = torch.flatten(found.embeddings, 1).numpy()
    ids = () if data is None else data.row_ids
    heads = ["row", "id", "label"] if ids else ["row", "label"]
    held_out: set[int] = set()
    if data is not None:
        heads.append("held_out")
        held_out = set(data.held_out_rows.tolist()) if data.held_out_features is data.features else set()
    names = () if data is None else data.class_names
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*heads, *(f"embedding_{dimension}" for dimension in range(embeddings.shape[1]))])
        for row, (label, embedding) in enumerate(zip(found.labels.tolist(), embeddings, strict=True)):
            cells = [row, *ids[row : row + 1], class_name(label, names)]
            if data is not None:
                cells.append(int(row in held_out))
            writer.writerow([*cells, *embedding.tolist()])


def class_name(label: int, names: Sequence[str]) -> str:
    """Return the name of a class, or its number if it does not have a name."""
    return names[label] if 0 <= label < len(names) else str(label)


# ---------------------------------------------------------------------- pictures


def read_metrics(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Read a metrics.csv of Lightning's logger as {name: [(epoch, value), ...]}."""
    columns: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value and row.get("epoch") and name not in {"epoch", "step"}:  # callbacks may log without an epoch
                    columns[name].append((float(row["epoch"]), float(value)))
    return dict(columns)


def draw_loss_curve(metrics: dict[str, list[tuple[float, float]]], path: Path) -> None:
    """Draw train_loss and val_loss over the epochs.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.ticker import MaxNLocator

    axes = _axes(path)
    for name, (label, color) in _CURVES.items():
        if name in metrics:
            epochs, values = zip(*metrics[name], strict=True)
            axes.plot([epoch + 1 for epoch in epochs], values, marker="o", markersize=4, label=label, color=color)
    axes.set(xlabel="epochs trained", ylabel="loss (mean over rows)", title="Loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    # a positive loss decreases by factors. On a logarithmic scale, a nearly constant one would not include a labelled power of ten
    shown = [value for name in _CURVES for _, value in metrics.get(name, [])]
    least, largest = min(shown, default=0.0), max(shown, default=0.0)
    if least > 0 and largest > _LEAST_RATIO * least:
        axes.set(yscale="log")
    else:
        axes.ticklabel_format(axis="y", useOffset=False)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    _save(axes, path)


def draw_embedding(
    embeddings: Tensor, labels: Tensor, path: Path, *, title: str, class_names: Sequence[str] = ()
) -> None:
    """Draw rows (G, D) as a t-SNE map by cosine distance, coloured by label. Many rows are drawn as a fixed sample.

    Args:
        embeddings: (G, D).
        labels: (G,) integers.
        path: Path of the picture.
        title: Title of the picture.
        class_names: Name of each class for the legend. If empty, their numbers.

    Raises:
        ImportError: matplotlib or scikit-learn is not installed.
    """
    from sklearn.manifold import TSNE

    # a fixed sample, on the unit sphere, where the squared Euclidean distance is twice the cosine distance
    axes = _axes(path, width=7.4)
    chosen = np.sort(np.random.default_rng(0).permutation(len(labels))[:_MOST_POINTS])
    rows = torch.nn.functional.normalize(torch.flatten(embeddings, 1)[chosen].double()).numpy()
    names = labels[chosen].numpy()
    perplexity = min(30.0, (len(rows) - 1) / 3)
    points = TSNE(perplexity=perplexity, init="random", random_state=0).fit_transform(rows)
    # few classes get a colour and a name each, many classes a colour scale
    classes = np.unique(names)
    is_named = len(classes) <= _MOST_CLASSES_IN_LEGEND
    colors = np.searchsorted(classes, names) if is_named else names
    palette = "turbo"
    if is_named:
        palette = "tab10" if len(classes) <= 10 else "tab20"
    dots = axes.scatter(points[:, 0], points[:, 1], c=colors, cmap=palette, s=8, linewidths=0)
    if is_named:
        handles, _ = dots.legend_elements(num=list(range(len(classes))))
        legend = [class_name(label, class_names) for label in classes.tolist()]
        axes.legend(handles, legend, title="class", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    else:
        axes.figure.colorbar(dots, ax=axes, label="class")
    axes.set(xlabel="t-SNE 1 (no unit)", ylabel="t-SNE 2 (no unit)", title=title, aspect="equal")
    _save(axes, path)


def _axes(path: Path, width: float = 6.4) -> Axes:
    from matplotlib.figure import Figure  # not pyplot: drawing does not need a display or global state

    path.parent.mkdir(parents=True, exist_ok=True)
    return Figure(figsize=(width, 4.8), layout="compressed").subplots()


def _save(axes: Axes, path: Path) -> None:
    figure = axes.get_figure(root=True)
    assert figure is not None  # _axes made it
    figure.savefig(path, dpi=130)
