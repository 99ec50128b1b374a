"""`AuditReport`: what an audit found, as objects, as a table in the terminal, as JSON, as a page with its figures."""

from __future__ import annotations

import base64
import dataclasses
import html as html_escape
import json
import math
from dataclasses import dataclass, field
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from lightning_ddp_losses.audit import figures
from lightning_ddp_losses.audit.compare import Row
from lightning_ddp_losses.audit.context import Diagnosis

_SHOWN = 12  # rows of the table in the terminal
_WIDE = 100  # characters; a narrower terminal shows fewer columns
_COLORS = {"error": "red", "explanation": "yellow", "note": "cyan"}


@dataclass(frozen=True)
class StepLoss:
    """The loss of one batch.

    Attributes:
        step: Optimizer step that the batch belongs to.
        ranks: Each rank's value; None where training_step returned none.
        mean: Of the ranks.
        one: In one process.
        rows: Samples on each rank.
    """

    step: int
    ranks: tuple[float | None, ...]
    mean: float | None
    one: float | None
    rows: tuple[int, ...]


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

    Example:
        >>> report = AuditReport(True, [], [], [], [], [], {"devices": 2, "steps": 3})
        >>> report.equal
        True
    """

    equal: bool
    rows: list[Row]
    updates: list[Row]
    losses: list[StepLoss]
    diagnoses: list[Diagnosis]
    notes: list[Diagnosis]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def first_step(self) -> int | None:
        """The first optimizer step at which something differs; later differences follow from it."""
        return min((row.step for row in (*self.rows, *self.updates) if not row.exact), default=None)

    def worst(self) -> list[Row]:
        """Rows of the first step at which something differs (else of the last), the largest error first."""
        step = self.first_step or max((row.step for row in self.rows), default=1)
        rows = [row for row in self.rows if row.step == step]
        rows += [row for row in self.updates if row.step == step and not row.exact and not any(
            r.parameter == row.parameter and not r.exact for r in rows
        )]  # fmt: skip
        return sorted(rows, key=lambda row: (row.exact, -_size(row.error)))

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
        yield Text(self.summary(), style="bold green" if self.equal else "bold red")
        yield self._table(wide=options.max_width >= _WIDE)
        if self.losses:
            first = self.losses[0]
            values = ", ".join(_number(loss) for loss in first.ranks)
            yield Text(
                f"Loss of the first batch: ranks {values}; mean {_number(first.mean)}; one process {_number(first.one)}"
            )
        for title, found in (("Diagnosis", self.diagnoses), ("Worth knowing", self.notes)):
            for number, each in enumerate(found, 1):
                head = f"{title} {number}" if title == "Diagnosis" else title
                fault = f" ({each.fault})" if each.fault else ""
                yield Text(f"\n{head}: {each.title}{fault}", style=f"bold {_COLORS[each.severity]}")
                yield Text(each.evidence)
                if each.confirmed:
                    yield Text(f"Confirmed: {each.confirmed}.")
                yield Text(f"Do: {each.fix}")

    def _table(self, *, wide: bool) -> Table:
        rows = self.worst()
        table = Table(
            title=f"Gradients at step {rows[0].step if rows else 0}, worst first", title_justify="left", box=SIMPLE_HEAD
        )
        table.add_column("parameter", overflow="fold")
        for name in ("owner", "ratio", "cosine", "error", "allowed", "verdict")[0 if wide else 1 :]:
            table.add_column(
                name, justify="left" if name in ("owner", "verdict") else "right", no_wrap=name != "verdict"
            )
        for row in rows[:_SHOWN]:
            name = self.name(row.parameter) + ("" if row.what == "gradient" else " (after the step)")
            verdict = row.verdict if row.ranks_agree else f"{row.verdict}, ranks disagree"
            numbers = (f"{row.ratio:.4g}", f"{row.cosine:.4f}", f"{row.error:.1e}", f"{row.tolerance:.1e}")
            table.add_row(
                Text(name), *([row.owner] if wide else []), *numbers, verdict, style=None if row.exact else "red"
            )
        rest = rows[_SHOWN:]
        if rest:
            worst = f"{max(row.error for row in rest):.1e}"
            table.add_row(
                f"... {len(rest)} more",
                *([""] if wide else []),
                "",
                "",
                worst,
                "",
                "exact" if all(r.exact for r in rest) else "",
            )
        return table

    def name(self, parameter: str) -> str:
        """A parameter as the user knows it."""
        return str(self.settings.get("aliases", {}).get(parameter, parameter))

    def __str__(self) -> str:
        console = Console(file=StringIO(), width=140, color_system=None)
        console.print(self)
        assert isinstance(console.file, StringIO)
        return console.file.getvalue()

    # ------------------------------------------------------------------ files

    def to_json(self, path: Path | str | None = None) -> str:
        """Everything as JSON; written to ``path`` too, where one is given. Numbers that JSON lacks become strings."""
        text = json.dumps(_plain(dataclasses.asdict(self)), indent=1)
        if path is not None:
            _made(path).write_text(text + "\n")
        return text

    def plot(self, path: Path | str) -> None:
        """Draw the ratio of each gradient in layer order, the losses, and the rows of each rank.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from lightning_ddp_losses.audit import figures

        figures.save(self, _made(path))

    def to_html(self, path: Path | str) -> None:
        """Write one page that holds everything, figures included (without them where matplotlib is missing)."""
        _made(path).write_text(html(self))


def _made(path: Path | str) -> Path:
    found = Path(path)
    found.parent.mkdir(parents=True, exist_ok=True)
    return found


def _size(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


# ----------------------------------------------------------------------


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
_NUMBERS = frozenset({0, 3, 4, 5, 6, 7})


def html(report: AuditReport) -> str:
    """The page as text; without a figure where matplotlib is missing."""
    state = "equal" if report.equal else "different"
    step = report.first_step or max((row.step for row in report.rows), default=1)
    parts = [
        f'<h1 class="{state}">{_text(report.summary())}</h1>',
        f"<p>{_text(_settings_line(report))}</p>",
        *(_card(each, f"{number}. ") for number, each in enumerate(report.diagnoses, 1)),
        _figure(report),
        f"<h2>Gradients at step {step}, in layer order</h2>",
        _table(report, [row for row in report.rows if row.step == step]),
    ]
    updates = [row for row in report.updates if not row.exact]
    if updates:
        parts += [
            "<details><summary>Parameters that differ after a step</summary>",
            _table(report, updates),
            "</details>",
        ]
    rest = [row for row in report.rows if row.step != step]
    if rest:
        parts += ["<details><summary>Gradients at the other steps</summary>", _table(report, rest), "</details>"]
    if report.notes:
        parts += ["<h2>Worth knowing</h2>", *(_card(each, "") for each in report.notes)]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Audit: {state}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'
    )


def _text(value: object) -> str:
    return html_escape.escape(str(value))


def _settings_line(report: AuditReport) -> str:
    s = report.settings
    without = f"; without {', '.join(s['without'])}" if s.get("without") else ""
    return (
        f"{s.get('devices')} ranks, {s.get('steps')} optimizer steps, strategy {s.get('strategy')}, "
        f"precision {s.get('precision')} (rounding unit "
        f"{s.get('rounding_unit', 0):.1e}), accumulation {s.get('accumulate_grad_batches')}, "
        f"{s.get('parameters', 0):,} parameters; allowed error: {s.get('tolerance')}; "
        f"{s.get('seconds')} s{without}."
    )


def _card(each: Diagnosis, number: str) -> str:
    fault = f" <code>{_text(each.fault)}</code>" if each.fault else ""
    confirmed = f"<p><b>Confirmed:</b> {_text(each.confirmed)}.</p>" if each.confirmed else ""
    return (
        f'<div class="card {each.severity}"><h3>{number}{_text(each.title)}{fault}</h3><p>{_text(each.evidence)}</p>{confirmed}'
        f"<p><b>Do:</b> {_text(each.fix)}</p></div>"
    )


def _figure(report: AuditReport) -> str:
    try:
        figure = figures.draw(report)
    except ImportError:
        return "<p>(No figure: matplotlib is not installed.)</p>"
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    data = base64.b64encode(picture.getvalue()).decode()
    return f'<img alt="Ratio of gradient norms for each parameter, losses, samples per rank" src="data:image/png;base64,{data}">'


def _table(report: AuditReport, rows: list[Row]) -> str:
    head = "".join(f"<th{_number_class(i)}>{name}</th>" for i, name in enumerate(_HEAD))
    lines = []
    for row in rows:
        cells = (
            row.step, report.name(row.parameter), row.owner, f"{row.ratio:.6g}", f"{row.cosine:.6f}", f"{row.error:.1e}",
            f"{row.max_error:.1e}", f"{row.tolerance:.1e}", "yes" if row.ranks_agree else f"no (rank {row.rank} shown)", row.verdict,
        )  # fmt: skip
        line = "".join(f"<td{_number_class(i)}>{_text(cell)}</td>" for i, cell in enumerate(cells))
        lines.append(f'<tr class="{"" if row.exact else "off"}">{line}</tr>')
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(lines)}</table></div>'


def _number_class(column: int) -> str:
    return ' class="n"' if column in _NUMBERS else ""
