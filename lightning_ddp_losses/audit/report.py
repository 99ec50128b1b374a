"""`AuditReport`: the results of an audit as objects, as a table in the terminal, as JSON, as an HTML page with a figure.

The HTML page contains the terminal's text, exported by rich, with all rows. The figure shows the ratio of each gradient in layer order.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from lightning_ddp_losses.audit.compare import COARSE, AccumulationParity, ComparedRow, Comparison, StepLoss
from lightning_ddp_losses.audit.context import Diagnosis, number_text
from lightning_ddp_losses.audit.loss_verdicts import LossVerdict
from lightning_ddp_losses.errors import explained_by

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHOWN = 12  # largest number of rows of the table in the terminal
_PAGE_WIDTH = 150  # width in characters of tables on the HTML page
_WIDE = 100  # width in characters below which a terminal shows fewer columns
_COLORS = {"error": "red", "explanation": "yellow", "unclear": "yellow", "note": "cyan"}
_DPI = 130
_SHOWN_FIRST = ("unclear", "no gradient")  # verdicts listed first among rows that do not differ for certain
_NO_NUMBERS = ["-", "-", "-"]  # shown as ratio, cosine and error of a gradient that is zero up to rounding


@dataclass
class AuditReport:
    """Comparison of N ranks with one process: equal or not, the differences, their causes and fixes.

    Attributes:
        equal: True if every gradient and every parameter is equal within rounding on all ranks, and the batches were distributed
            correctly.
        rows: One row for each gradient and step, in the module's order.
        updates: The same for parameters and floating-point buffers after the step.
        losses: One entry for each batch.
        diagnoses: Causes, most likely first. Empty for an equal run.
        notes: Facts about both runs, which are not differences but worth knowing.
        settings: Devices, steps, strategy, precision, rounding unit, seconds, ...
        accumulation: Comparison with both kinds of one process if a step accumulates micro-batches, otherwise None.
        loss_verdicts: Results of ``certify`` for each loss of the module that a step called.

    Example:
        >>> report = AuditReport(True, [], [], [], [], [], {"devices": 2, "steps": 3})
        >>> report.equal
        True
    """

    equal: bool
    rows: list[ComparedRow]
    updates: list[ComparedRow]
    losses: list[StepLoss]
    diagnoses: list[Diagnosis]
    notes: list[Diagnosis]
    settings: dict[str, Any] = field(default_factory=dict)
    accumulation: AccumulationParity | None = None
    loss_verdicts: list[LossVerdict] = field(default_factory=list)

    @property
    def verdict(self) -> Literal["equal", "different", "cannot tell"]:
        """``"cannot tell"`` if differences may be caused by rounding or by a fault, or if gradients are not finite."""
        if self.equal:
            return "equal"
        is_unclear = self.diagnoses and all(each.severity == "unclear" for each in self.diagnoses)
        return "cannot tell" if is_unclear else "different"

    @property
    def first_step(self) -> int | None:
        """The first optimizer step at which something differs. Later differences follow from it."""
        return Comparison(self.rows, self.updates).first_step

    @property
    def _shown_step(self) -> int:
        """The first step at which something differs, or the last step if nothing differs."""
        return self.first_step or max((row.step for row in self.rows), default=1)

    def worst(self) -> list[ComparedRow]:
        """Return rows of the first step at which something differs (or of the last step), with the largest error first."""
        step = self._shown_step
        rows = [row for row in self.rows if row.step == step]
        # add parameters that differ after the step although their gradients do not
        wrong = {row.parameter for row in rows if not row.exact}
        updates = [row for row in self.updates if row.step == step and not row.exact]
        rows += [row for row in updates if row.parameter not in wrong]
        return sorted(rows, key=lambda row: (row.exact, row.verdict not in _SHOWN_FIRST, -row.sortable_error))

    def name(self, parameter: str) -> str:
        """Return the name of a parameter for messages."""
        return str(self.settings.get("aliases", {}).get(parameter, parameter))

    def raise_if_different(self) -> None:
        """Fail a test if the ranks differ from one process.

        Raises:
            AssertionError: with the report as its text.
        """
        __tracebackhide__ = True
        if not self.equal:
            raise AssertionError(str(self))

    # ------------------------------------------------------------------ text

    def summary(self) -> str:
        """Return the result as one sentence."""
        s = self.settings
        steps = "1 step" if s.get("steps") == 1 else f"{s.get('steps')} steps"
        what = f"{s.get('devices')} ranks under {s.get('strategy')}, {steps}, {s.get('precision')}"
        if self.equal:
            return f"Equal: {what} give the gradients of one process{self._without_gradient()}."
        if self.verdict == "cannot tell":
            return f"Cannot tell: {what}: {self.diagnoses[0].title}."
        wrong = sum(not row.exact for row in self.worst())
        if not wrong:
            return f"Different: {what}: gradients agree, the data do not."
        return f"Different: {what}: {wrong} of {len(self.worst())} tensors differ, first at step {self.first_step}."

    def _without_gradient(self) -> str:
        """Return the end of the sentence about trainable parameters without a gradient in both runs."""
        names = [name for each in self.notes if each.fault == "F38" for name in each.parameters]
        if not names:
            return ""
        return f", which are none for {len(names)} trainable parameter{'s' * (len(names) > 1)} that forward uses"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lay out the table, losses, diagnoses and notes for a terminal."""
        rows = self.worst()
        step = rows[0].step if rows else 0
        title = f"Gradients at step {step}, worst first"
        yield from self._parts([self._table(rows, title, wide=options.max_width >= _WIDE, most=_SHOWN)])

    def _parts(self, tables: Sequence[Table]) -> Iterator[RenderableType]:
        """Yield the summary, the tables, the losses, the diagnoses and the notes."""
        yield Text(self.summary(), style="bold green" if self.equal else "bold red")
        yield from tables
        if self.losses and self.losses[0].one is not None:  # the user's loop may return no loss
            first = self.losses[0]
            values = ", ".join(map(number_text, first.ranks))
            mean, one = number_text(first.mean), number_text(first.one)
            yield Text(f"Loss of the first batch: ranks {values}; mean {mean}; one process {one}")
        if self.settings.get("rounding_unit", 0.0) > COARSE:
            yield Text(f"Allowed error: {self.settings['tolerance']}.")
        if self.accumulation is not None:
            yield Text(self.accumulation.sentence())
        if self.loss_verdicts:
            yield Text("\nThe losses under plain DDP (certify):")
            yield Text("\n".join(f"  {each}" for each in self.loss_verdicts))
        for number, each in enumerate(self.diagnoses, 1):
            yield from _diagnosis_texts(each, f"Diagnosis {number}")
        for each in self.notes:
            yield from _diagnosis_texts(each, "Worth knowing")

    def _table(self, rows: Sequence[ComparedRow], title: str, *, wide: bool, most: int) -> Table:
        """Return rows as a table, with all rows after the first ``most`` in one line."""
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        # add columns, without owners in a narrow terminal
        table.add_column("parameter", overflow="fold")
        if wide:
            table.add_column("owner", justify="left", no_wrap=True)
        for name in ("ratio", "cosine", "error", "allowed"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("verdict", justify="left")
        # add rows
        for row in rows[:most]:
            name, verdict = self.name(row.parameter), str(row.verdict)
            if row.what != "gradient":
                name += f" ({row.owner}, after the step)" if row.what == "buffer" else " (after the step)"
            if not row.ranks_agree:
                verdict += ", ranks disagree"
            numbers = [f"{row.ratio:.4g}", f"{row.cosine:.4f}", f"{row.error:.1e}"]
            if row.verdict in ("zero", "no gradient"):
                numbers = _NO_NUMBERS
            owner = [row.owner] if wide else []
            table.add_row(
                Text(name), *owner, *numbers, f"{row.tolerance:.1e}", verdict, style="" if row.exact else "red"
            )
        # summarise the remaining rows in one line
        rest = rows[most:]
        if rest:
            # the error of a gradient that is zero up to rounding is meaningless
            errors = [row.error for row in rest if row.verdict not in ("zero", "no gradient")]
            worst = f"{max(errors):.1e}" if errors else _NO_NUMBERS[-1]
            verdict = "exact" if all(row.exact for row in rest) else ""
            blank = [""] if wide else []
            table.add_row(f"... {len(rest)} more", *blank, "", "", worst, "", verdict)
        return table

    def __str__(self) -> str:
        console = Console(file=StringIO(), width=140, color_system=None, force_jupyter=False)
        console.print(self)
        assert isinstance(console.file, StringIO)
        return console.file.getvalue()

    def _repr_html_(self) -> str:
        """Return the summary, the diagnoses and the figure for a notebook cell, with the full report in a collapsed section."""
        parts = [f"<b>{html.escape(self.summary())}</b>"]
        for each in self.diagnoses:
            fault = f" ({each.fault})" if each.fault else ""
            parts.append(f"{html.escape(each.title)}{fault}: {html.escape(each.fix)}")
        parts.append(self._figure_as_html())
        parts.append(f"<details><summary>All</summary><pre>{html.escape(str(self))}</pre></details>")
        return "<br>".join(parts)

    # ------------------------------------------------------------------ files

    def to_json(self, path: Path | str | None = None) -> str:
        """Return the report as JSON, and write it to ``path`` if given. Numbers that are not valid JSON become strings."""
        strict = json.loads(json.dumps(dataclasses.asdict(self)), parse_constant=lambda name: str(float(name)))
        text = json.dumps(strict, indent=1)
        if path is not None:
            _with_folder(path).write_text(text + "\n")
        return text

    def plot(self, path: Path | str) -> None:
        """Draw the ratio of each gradient in layer order.

        Raises:
            ImportError: matplotlib is not installed.
        """
        draw_audit(self).savefig(_with_folder(path), dpi=_DPI)

    def to_html(self, path: Path | str) -> None:
        """Write one page with the whole report, including the figure if matplotlib is installed."""
        page = _PAGE.replace("$state", self.verdict).replace("$figure", self._figure_as_html())
        # list rows of the shown step first, then rows of all other steps
        groups = [(f"Gradients at step {self._shown_step}, worst first", self.worst())]
        groups.append(("Gradients at the other steps", [row for row in self.rows if row.step != self._shown_step]))
        tables = [self._table(rows, title, wide=True, most=len(rows)) for title, rows in groups if rows]
        # long lines are wrapped by the page instead of the console
        console = Console(file=StringIO(), record=True, width=_PAGE_WIDTH, force_jupyter=False)
        for part in (*self._parts(tables), Text(f"\n{self._settings_sentence()}", style="dim")):
            console.print(part, soft_wrap=not isinstance(part, Table))
        _with_folder(path).write_text(console.export_html(inline_styles=True, code_format=page))

    def _figure_as_html(self) -> str:
        """Return the figure as an embedded image, or a sentence if matplotlib is missing."""
        picture = BytesIO()
        try:
            draw_audit(self).savefig(picture, format="png", dpi=_DPI)
        except ImportError:
            return "<p>(No figure: matplotlib is not installed.)</p>"
        data = base64.b64encode(picture.getvalue()).decode()
        return f'<img alt="Ratio of gradient norms for each parameter" src="data:image/png;base64,{data}">'

    def _settings_sentence(self) -> str:
        s = self.settings
        without = ""
        if s.get("without"):
            without = f"; without {', '.join(s['without'])}"
        return (
            f"{s.get('devices')} ranks, {s.get('steps')} optimizer steps, strategy {s.get('strategy')}, precision {s.get('precision')} "
            f"(rounding unit {s.get('rounding_unit', 0):.1e}), accumulation {s.get('accumulate_grad_batches')}, "
            f"{s.get('parameters', 0):,} parameters; allowed error: {s.get('tolerance')}; {s.get('seconds')} s{without}."
        )


# rich fills in the braces, after the names with a dollar sign have been replaced
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Audit: $state</title><meta name="viewport" content="width=device-width">
<style>body {{ max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }} img {{ max-width: 100%; }}
pre {{ font: 13px/1.4 monospace; white-space: pre-wrap; }}</style></head>
<body><h1>Audit: $state</h1>$figure<pre>{code}</pre></body></html>
"""


def _diagnosis_texts(each: Diagnosis, head: str) -> list[Text]:
    title = f"\n{head}: {each.title}"
    if each.fault:
        title += f" ({each.fault})"
    texts = [Text(title, style=f"bold {_COLORS[each.severity]}"), Text(each.evidence)]
    if each.confirmed:
        texts.append(Text(f"Confirmed: {each.confirmed}."))
    texts.append(Text(f"Do: {each.fix}"))
    if each.fault:
        texts.append(Text(explained_by(each.fault), style="dim"))
    return texts


def _with_folder(path: Path | str) -> Path:
    """Create the folder of a file, and return its path."""
    found = Path(path)
    found.parent.mkdir(parents=True, exist_ok=True)
    return found


# ---------------------------------------------------------------------- the figure

# style of each verdict
_MARKS: dict[str, dict[str, str]] = {
    "exact": {"marker": "o", "color": "tab:blue"},
    "wrong scale": {"marker": "^", "color": "tab:orange"},
    "wrong direction": {"marker": "X", "color": "tab:red"},
    "unclear": {"marker": "D", "color": "tab:olive"},
    "missing": {"marker": "s", "color": "tab:purple"},
    "not finite": {"marker": "P", "color": "black"},
    "zero up to rounding": {"facecolors": "white", "edgecolors": "tab:blue"},
}
_NAMED = 40  # largest number of parameters whose names fit under the axis
_LOW, _HIGH = 1 / 16, 16.0  # edges of the axis of ratios


def draw_audit(report: AuditReport) -> Figure:
    """Draw the ratio of each gradient in layer order, at the first step at which something differs, or at the last step.

    Args:
        report: The audit.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # without pyplot, drawing does not require a display or global state

    step = report._shown_step
    rows = [row for row in report.rows if row.step == step]
    width = min(16.0, max(9.0, 3.0 + 0.32 * min(len(rows), _NAMED)))  # wider with more names under the axis
    figure = Figure(figsize=(width, 5.2), layout="constrained")
    axes = figure.subplots()
    _draw_ratios(axes, rows, report.settings.get("devices", 2))
    heading = f"Gradients at step {step}, in layer order"
    if _label_parameters(axes, rows, report):
        heading += " (brown: not the encoder's)"
    axes.set_title(heading, fontsize=10)
    figure.suptitle(report.summary(), fontsize=11, wrap=True, color="tab:green" if report.equal else "tab:red")
    return figure


def _draw_ratios(axes: Axes, rows: Sequence[ComparedRow], world_size: int) -> None:
    heights = [1.0 if row.noise else _height(row.ratio) for row in rows]

    def scatter(label: str, at: Sequence[int], **style: Any) -> None:
        if at:
            axes.scatter(at, [heights[i] for i in at], label=f"{label} ({len(at)})", **style)

    # a mark for each verdict, and a ring if the ranks differ
    verdicts = ["zero up to rounding" if row.noise else row.verdict for row in rows]
    for verdict, style in _MARKS.items():
        scatter(verdict, [i for i, of_row in enumerate(verdicts) if of_row == verdict], s=62, zorder=3, **style)
    ring = {"facecolors": "none", "edgecolors": "black", "s": 190, "zorder": 2}
    scatter("ranks disagree", [i for i, row in enumerate(rows) if not row.ranks_agree], **ring)
    # ratios that are usual: equal, W times, 1/W
    W = float(world_size)
    for value, name in ((1.0, "1 (one process)"), (W, f"{W:g} (W)"), (1 / W, f"1/{W:g} (1/W)")):
        color, line = ("black", "-") if value == 1 else ("0.6", ":")
        axes.axhline(value, color=color, linewidth=1.0, linestyle=line, zorder=1)
        axes.annotate(name, (1.005, value), xycoords=("axes fraction", "data"), va="center", fontsize=8)
    # axes
    axes.set_yscale("log", base=2)
    axes.set_ylim(min(1.0, *heights, 1 / W) / 1.6, max(1.0, *heights, W) * 1.6)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlim(-0.7, len(rows) - 0.3)
    axes.set_ylabel("norm on the ranks / norm in one process")
    axes.grid(axis="y", alpha=0.25)
    if rows:
        axes.legend(loc="upper left", fontsize=8, ncols=3, framealpha=0.9)


def _label_parameters(axes: Axes, rows: Sequence[ComparedRow], report: AuditReport) -> bool:
    """Label the axis with parameters, annotate wrong directions with their cosine, and return whether any label is brown."""
    if len(rows) > _NAMED:
        axes.set_xlabel(f"{len(rows)} parameters")
        return False
    names = [report.name(row.parameter) for row in rows]
    shown = [name if len(name) <= 34 else f"...{name[-31:]}" for name in names]
    axes.set_xticks(range(len(rows)), shown, rotation=40, ha="right", fontsize=8)
    for i, (label, row) in enumerate(zip(axes.get_xticklabels(), rows, strict=False)):
        if row.owner != "encoder":
            label.set_color("tab:brown")
        if row.verdict == "wrong direction" and math.isfinite(row.cosine):
            text, place = f"cos {row.cosine:.2f}", (i, _height(row.ratio))
            axes.annotate(text, place, xytext=(0, 8), textcoords="offset points", ha="center", fontsize=7)
    return any(row.owner != "encoder" for row in rows)


def _height(ratio: float) -> float:
    """Return the position of a ratio on the axis. Zero, infinity and NaN are drawn at its edge."""
    return _HIGH if math.isnan(ratio) else min(_HIGH, max(_LOW, ratio))
