"""Tables as Markdown, LaTeX and HTML; in Markdown and HTML with the pictures that lie beside them."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from straightdp.reproduce.tables import Cell, Table


@dataclass(frozen=True)
class Picture:
    """`alt` says in words what is to be seen."""

    data: bytes
    alt: str


Pictures = Sequence[tuple[str, Picture]]
"""Each with the name of its file."""

# Markdown


def markdown(title: str, tables: Sequence[Table], notes: Sequence[str], pictures: Pictures = ()) -> str:
    parts = [f"# {title}", *(markdown_picture(file, picture.alt) for file, picture in pictures)]
    for table in tables:
        parts += [f"## {table.title}"] if table.title else []
        parts.append(markdown_table(table))
    return "\n\n".join([*parts, *notes]) + "\n"


def markdown_picture(file: str, alt: str) -> str:
    return f"![{alt.replace('[', '(').replace(']', ')')}]({file})"


def markdown_table(table: Table) -> str:
    above = [group for group, count in table.groups for _ in range(count)]
    heads = [f"{group}: {head}" for group, head in zip(above, table.heads, strict=True)] if above else table.heads
    rows = [["", *heads]]
    for line in table.lines:
        rows += [[f"*{line.block}*", *[""] * len(heads)]] if line.block else []
        rows.append([line.name, *map(str, line.cells)])
    found = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
    return "\n".join([found[0], "|---" * len(rows[0]) + "|", *found[1:]])


# LaTeX

TEX = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "ε": r"$\varepsilon$",
    "σ": r"$\sigma$",
    "δ": r"$\delta$",
    "τ": r"$\tau$",
    "ρ": r"$\rho$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "∞": r"$\infty$",
    "−": "$-$",
    "≈": r"$\approx$",
    "–": "--",
}


FITTED = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"  # a wide table is made smaller


def tex(text: str) -> str:
    return "".join(TEX.get(character, character) for character in text)


def latex(title: str, tables: Sequence[Table], notes: Sequence[str], pictures: Pictures = ()) -> str:
    """Needs the packages booktabs and graphicx; leaves the pictures out, for LaTeX reads no SVG."""
    lines = [
        r"\begin{table*}[t]",
        r"\centering",
        r"\footnotesize",
        rf"\caption{{{tex(' '.join([title + '.', *notes]))}}}",
    ]
    for table in tables:
        lines += [rf"\par\medskip \emph{{{tex(table.title)}}}\par\smallskip"] if table.title else []
        lines += _latex_table(table)
    return "\n".join([*lines, r"\end{table*}"]) + "\n"


def _latex_table(table: Table) -> list[str]:
    columns = len(table.heads) + 1
    lines = [FITTED, rf"\begin{{tabular}}{{l{'c' * len(table.heads)}}}", r"\toprule"]
    if table.groups:
        spans = [rf"\multicolumn{{{count}}}{{c}}{{{tex(group)}}}" for group, count in table.groups]
        lines.append(" & ".join(["", *spans]) + r" \\")
    lines += [" & ".join(["", *map(tex, table.heads)]) + r" \\", r"\midrule"]
    for line in table.lines:
        if line.block:
            lines.append(rf"\multicolumn{{{columns}}}{{@{{}}l}}{{\emph{{{tex(line.block)}}}}} \\")
        lines.append(" & ".join([tex(line.name), *(tex(str(cell)) for cell in line.cells)]) + r" \\")
    return [*lines, r"\bottomrule", r"\end{tabular}}"]


# HTML

STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { margin: 2rem auto; max-width: max-content; padding: 0 1rem }
p { max-width: 60rem }
img { max-width: 100%; background: white }
.wide { overflow-x: auto }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
caption { text-align: left; font-weight: 600; padding: .3rem 0 }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #8884; white-space: nowrap }
th[scope=row], th[scope=rowgroup] { text-align: left }
th[scope=rowgroup] { font-style: italic; padding-top: .8rem }
thead th { text-align: center }
td small { display: block; opacity: .75 }
"""


def page(title: str, tables: Sequence[Table], notes: Sequence[str], pictures: Pictures = ()) -> str:
    seen = (f'<img src="{html.escape(file)}" alt="{html.escape(picture.alt)}">' for file, picture in pictures)
    parts = [f"<h1>{html.escape(title)}</h1>", *seen, *map(_html_table, tables)]
    parts += [f"<p>{html.escape(note)}</p>" for note in notes]
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>\n' + "\n".join(
        [*parts, "</body></html>\n"]
    )


def _html_table(table: Table) -> str:
    e, columns = html.escape, len(table.heads) + 1
    lines = ['<div class="wide"><table>', f"<caption>{e(table.title)}</caption>" if table.title else "", "<thead>"]
    if table.groups:
        spans = (f'<th scope="colgroup" colspan="{count}">{e(group)}</th>' for group, count in table.groups)
        lines.append(f"<tr><td></td>{''.join(spans)}</tr>")
    lines.append("<tr><td></td>" + "".join(f'<th scope="col">{e(head)}</th>' for head in table.heads) + "</tr></thead>")
    lines.append("<tbody>")
    for line in table.lines:
        if line.block:
            lines.append(f'<tr><th scope="rowgroup" colspan="{columns}">{e(line.block)}</th></tr>')
        cells = "".join(f"<td>{e(cell.ours)}{_beside(cell)}</td>" for cell in line.cells)
        lines.append(f'<tr><th scope="row">{e(line.name)}</th>{cells}</tr>')
    return "\n".join([*(line for line in lines if line), "</tbody></table></div>"])


def _beside(cell: Cell) -> str:
    beside = "; ".join(part for part in (cell.paper and f"paper {cell.paper}", cell.difference) if part)
    return f"<small>{html.escape(beside)}</small>" if beside else ""


Render = Callable[[str, Sequence[Table], Sequence[str], Pictures], str]
FORMATS: dict[str, tuple[str, Render]] = {  # by name: how a file's name ends, and what writes it
    "markdown": ("md", markdown),
    "latex": ("tex", latex),
    "html": ("html", page),
}
