"""An audit as one HTML page that holds everything: summary, diagnoses, figure, tables."""

from __future__ import annotations

import base64
import html as escape
from io import BytesIO
from typing import TYPE_CHECKING

from lightning_ddp_losses.audit import pictures
from lightning_ddp_losses.audit.context import Diagnosis
from lightning_ddp_losses.audit.rows import Row

if TYPE_CHECKING:
    from lightning_ddp_losses.audit.report import AuditReport


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
        f"<p>{_text(_settings(report))}</p>",
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
    return escape.escape(str(value))


def _settings(report: AuditReport) -> str:
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
        figure = pictures.draw(report)
    except ImportError:
        return "<p>(No figure: matplotlib is not installed.)</p>"
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    data = base64.b64encode(picture.getvalue()).decode()
    return f'<img alt="Ratio of gradient norms for each parameter, losses, samples per rank" src="data:image/png;base64,{data}">'


def _table(report: AuditReport, rows: list[Row]) -> str:
    head = "".join(f"<th{_number(i)}>{name}</th>" for i, name in enumerate(_HEAD))
    lines = []
    for row in rows:
        cells = (
            row.step, report.name(row.parameter), row.owner, f"{row.ratio:.6g}", f"{row.cosine:.6f}", f"{row.error:.1e}",
            f"{row.max_error:.1e}", f"{row.tolerance:.1e}", "yes" if row.ranks_agree else f"no (rank {row.rank} shown)", row.verdict,
        )  # fmt: skip
        line = "".join(f"<td{_number(i)}>{_text(cell)}</td>" for i, cell in enumerate(cells))
        lines.append(f'<tr class="{"" if row.exact else "off"}">{line}</tr>')
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(lines)}</table></div>'


def _number(column: int) -> str:
    return ' class="n"' if column in _NUMBERS else ""
