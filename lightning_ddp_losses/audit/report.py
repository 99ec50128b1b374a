"""`AuditReport`: what an audit found, as objects, as a table in the terminal, as JSON, as an HTML page with its figures."""

from __future__ import annotations

import base64
import dataclasses
import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from lightning_ddp_losses.audit.accumulation import AccumulationParity
from lightning_ddp_losses.audit.compare import ComparedRow, Comparison, StepLoss
from lightning_ddp_losses.audit.context import Diagnosis
from lightning_ddp_losses.audit.figures import draw_audit
from lightning_ddp_losses.errors import explained_by

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHOWN = 12  # rows of the table in the terminal
_WIDE = 100  # characters; a narrower terminal shows fewer columns
_COLORS = {"error": "red", "explanation": "yellow", "note": "cyan"}
_DPI = 130
_NO_NUMBERS = ["-", "-", "-"]  # ratio, cosine and error of a gradient that is zero in truth


@dataclass
class AuditReport:
    """Whether N ranks train as one process would; if not, where, by how much, why, and what to change.

    Attributes:
        equal: Whether every gradient and every parameter is the same within rounding, on all ranks, and the batches were
            dealt out right.
        rows: One row for each gradient and step, in the module's order.
        updates: The same for parameters after the step.
        losses: One entry for each batch.
        diagnoses: Likeliest first; empty where nothing is wrong.
        notes: True of both runs, so no difference, but worth knowing.
        settings: Devices, steps, strategy, precision, rounding unit, seconds, ...
        accumulation: Which one process the ranks equal where a step accumulates micro-batches; None where it does not.

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

    @property
    def first_step(self) -> int | None:
        """The first optimizer step at which something differs; later differences follow from it."""
        return Comparison(self.rows, self.updates).first_step

    @property
    def _shown_step(self) -> int:
        """The first step at which something differs, else the last."""
        return self.first_step or max((row.step for row in self.rows), default=1)

    def worst(self) -> list[ComparedRow]:
        """Rows of the first step at which something differs (else of the last), the largest error first."""
        step = self._shown_step
        rows = [row for row in self.rows if row.step == step]
        # a parameter that differs after the step although its gradient does not
        wrong = {row.parameter for row in rows if not row.exact}
        updates = [row for row in self.updates if row.step == step and not row.exact]
        rows += [row for row in updates if row.parameter not in wrong]
        return sorted(rows, key=lambda row: (row.exact, -row.sortable_error))

    def name(self, parameter: str) -> str:
        """A parameter as the user knows it."""
        return str(self.settings.get("aliases", {}).get(parameter, parameter))

    # ------------------------------------------------------------------ text

    def summary(self) -> str:
        """One sentence."""
        s = self.settings
        what = f"{s.get('devices')} ranks under {s.get('strategy')}, {s.get('steps')} steps, {s.get('precision')}"
        if self.equal:
            return f"Equal: {what} give the gradients of one process."
        wrong = sum(not row.exact for row in self.worst())
        if not wrong:
            return f"Different: {what}: gradients agree, the data do not."
        return f"Different: {what}: {wrong} of {len(self.worst())} tensors differ, first at step {self.first_step}."

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, losses, diagnoses and notes for a terminal."""
        color = "green" if self.equal else "red"
        yield Text(self.summary(), style=f"bold {color}")
        yield self._table(wide=options.max_width >= _WIDE)
        if self.losses:
            first = self.losses[0]
            values = ", ".join(map(_loss_cell, first.ranks))
            mean, one = _loss_cell(first.mean), _loss_cell(first.one)
            yield Text(f"Loss of the first batch: ranks {values}; mean {mean}; one process {one}")
        if self.accumulation is not None:
            yield Text(self.accumulation.sentence())
        for number, each in enumerate(self.diagnoses, 1):
            yield from _diagnosis_texts(each, f"Diagnosis {number}")
        for each in self.notes:
            yield from _diagnosis_texts(each, "Worth knowing")

    def _table(self, *, wide: bool) -> Table:
        rows = self.worst()
        step = rows[0].step if rows else 0
        table = Table(title=f"Gradients at step {step}, worst first", title_justify="left", box=SIMPLE_HEAD)
        # columns; a narrow terminal has no owners
        table.add_column("parameter", overflow="fold")
        if wide:
            table.add_column("owner", justify="left", no_wrap=True)
        for name in ("ratio", "cosine", "error", "allowed"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("verdict", justify="left")
        # rows
        for row in rows[:_SHOWN]:
            name, verdict = self.name(row.parameter), str(row.verdict)
            if row.what == "parameter":
                name += " (after the step)"
            if not row.ranks_agree:
                verdict += ", ranks disagree"
            cells: list[Text | str] = [Text(name)]
            if wide:
                cells.append(row.owner)
            numbers = [f"{row.ratio:.4g}", f"{row.cosine:.4f}", f"{row.error:.1e}"]
            if row.verdict == "zero":
                numbers = _NO_NUMBERS
            cells += [*numbers, f"{row.tolerance:.1e}", verdict]
            table.add_row(*cells, style="" if row.exact else "red")
        # what is left out, as one row
        rest = rows[_SHOWN:]
        if rest:
            # the error of a gradient that is zero, and of what rounding makes of it, says nothing
            errors = [row.error for row in rest if row.verdict != "zero"]
            worst = f"{max(errors):.1e}" if errors else _NO_NUMBERS[-1]
            verdict = "exact" if all(row.exact for row in rest) else ""
            cells = [f"... {len(rest)} more"]
            if wide:
                cells.append("")
            table.add_row(*cells, "", "", worst, "", verdict)
        return table

    def __str__(self) -> str:
        console = Console(file=StringIO(), width=140, color_system=None, force_jupyter=False)
        console.print(self)
        assert isinstance(console.file, StringIO)
        return console.file.getvalue()

    # ------------------------------------------------------------------ files

    def to_json(self, path: Path | str | None = None) -> str:
        """Everything as JSON; written to ``path`` too, where one is given. Numbers that JSON lacks become strings."""
        text = json.dumps(_json_value(dataclasses.asdict(self)), indent=1)
        if path is not None:
            _with_folder(path).write_text(text + "\n")
        return text

    def plot(self, path: Path | str) -> None:
        """Draw the ratio of each gradient in layer order, the losses, and the rows of each rank.

        Raises:
            ImportError: matplotlib is not installed.
        """
        self._figure().savefig(_with_folder(path), dpi=_DPI)

    def to_html(self, path: Path | str) -> None:
        """Write one page that holds everything, figures included (without them where matplotlib is missing)."""
        try:
            figure = _image_tag(self._figure())
        except ImportError:
            figure = "<p>(No figure: matplotlib is not installed.)</p>"
        _with_folder(path).write_text(_html_page(self, self._shown_step, figure))

    def _figure(self) -> Figure:
        step = self._shown_step
        return draw_audit(
            [row for row in self.rows if row.step == step],
            self.losses,
            title=self.summary(),
            equal=self.equal,
            step=step,
            world_size=self.settings.get("devices", 2),
            name_of=self.name,
        )


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


def _loss_cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _with_folder(path: Path | str) -> Path:
    """Make the folder of a file."""
    found = Path(path)
    found.parent.mkdir(parents=True, exist_ok=True)
    return found


def _json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


# ---------------------------------------------------------------------- the HTML page

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #1c2430; background: #fff; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.equal { color: #17703c; } .different { color: #b3261e; }
.card { border-left: 4px solid #b3261e; background: #faf7f6; padding: .6rem 1rem; margin: .8rem 0; }
.card.explanation { border-color: #c98a00; } .card.note { border-color: #3a6ea5; }
.card h3 { margin: 0 0 .3rem; font-size: 1rem; } .card p { margin: .25rem 0; }
table { border-collapse: collapse; font-size: 13px; width: 100%; }
th, td { text-align: left; padding: .2rem .6rem; border-bottom: 1px solid #e3e6ea; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; } tr.off td { background: #fdecea; }
code { font-size: 13px; } img { max-width: 100%; } .scroll { overflow-x: auto; } summary { cursor: pointer; margin: .8rem 0; }
"""
_HEAD = ("step", "parameter", "owner", "ratio", "cosine", "error", "largest error", "allowed", "ranks agree", "verdict")
_NUMBERS = frozenset({0, 3, 4, 5, 6, 7})  # columns that are right-aligned


def _html_page(report: AuditReport, step: int, figure: str) -> str:
    """Build the page: summary, diagnoses, figure, tables, notes."""
    # what was found, first
    state = "equal" if report.equal else "different"
    parts = [f'<h1 class="{state}">{_escaped(report.summary())}</h1>', f"<p>{_escaped(_settings_sentence(report))}</p>"]
    if report.accumulation is not None:
        parts.append(f"<p>{_escaped(report.accumulation.sentence())}</p>")
    parts += [_html_card(each, f"{number}. ") for number, each in enumerate(report.diagnoses, 1)]
    # the step at which something differs
    parts += [figure, f"<h2>Gradients at step {step}, in layer order</h2>"]
    parts.append(_html_table(report, [row for row in report.rows if row.step == step]))
    # everything else, folded
    updates = [row for row in report.updates if not row.exact]
    if updates:
        parts += _html_details("Parameters that differ after a step", _html_table(report, updates))
    rest = [row for row in report.rows if row.step != step]
    if rest:
        parts += _html_details("Gradients at the other steps", _html_table(report, rest))
    if report.notes:
        parts.append("<h2>Worth knowing</h2>")
        parts += [_html_card(each, "") for each in report.notes]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Audit: {state}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'
    )


def _escaped(value: object) -> str:
    return html.escape(str(value))


def _settings_sentence(report: AuditReport) -> str:
    s = report.settings
    without = ""
    if s.get("without"):
        without = f"; without {', '.join(s['without'])}"
    return (
        f"{s.get('devices')} ranks, {s.get('steps')} optimizer steps, strategy {s.get('strategy')}, "
        f"precision {s.get('precision')} (rounding unit "
        f"{s.get('rounding_unit', 0):.1e}), accumulation {s.get('accumulate_grad_batches')}, "
        f"{s.get('parameters', 0):,} parameters; allowed error: {s.get('tolerance')}; "
        f"{s.get('seconds')} s{without}."
    )


def _html_card(each: Diagnosis, number: str) -> str:
    title = number + _escaped(each.title)
    if each.fault:
        title += f" <code>{_escaped(each.fault)}</code>"
    text = f"<h3>{title}</h3><p>{_escaped(each.evidence)}</p>"
    if each.confirmed:
        text += f"<p><b>Confirmed:</b> {_escaped(each.confirmed)}.</p>"
    text += f"<p><b>Do:</b> {_escaped(each.fix)}</p>"
    if each.fault:
        text += f"<p><code>{_escaped(explained_by(each.fault))}</code></p>"
    return f'<div class="card {each.severity}">{text}</div>'


def _html_details(summary: str, content: str) -> list[str]:
    return [f"<details><summary>{summary}</summary>", content, "</details>"]


def _html_table(report: AuditReport, rows: Sequence[ComparedRow]) -> str:
    lines = [_html_row("th", _HEAD)]
    for row in rows:
        agree = "yes" if row.ranks_agree else f"no (rank {row.rank} shown)"
        numbers = [f"{row.ratio:.6g}", f"{row.cosine:.6f}", f"{row.error:.1e}", f"{row.max_error:.1e}"]
        if row.verdict == "zero":
            numbers = [*_NO_NUMBERS, "-"]
        name = report.name(row.parameter)
        cells = (row.step, name, row.owner, *numbers, f"{row.tolerance:.1e}", agree, row.verdict)
        lines.append(_html_row("td", cells, "" if row.exact else "off"))
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _html_row(tag: str, cells: Sequence[object], state: str | None = None) -> str:
    line = ""
    for column, cell in enumerate(cells):
        number = ' class="n"' if column in _NUMBERS else ""
        line += f"<{tag}{number}>{_escaped(cell)}</{tag}>"
    if state is None:
        return f"<tr>{line}</tr>"
    return f'<tr class="{state}">{line}</tr>'


def _image_tag(figure: Figure) -> str:
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=_DPI)
    data = base64.b64encode(picture.getvalue()).decode()
    return f'<img alt="Ratio of gradient norms for each parameter, losses, samples per rank" src="data:image/png;base64,{data}">'
