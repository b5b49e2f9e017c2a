"""The data-set card of a release. Guarantee: it is made from public facts alone, and that of a run which is
not releasable says so first."""

from __future__ import annotations

import json
import re

from straightdp.report import words
from straightdp.report.facts import PublicFacts

SIZES = (
    (10**3, "n<1K"),
    (10**4, "1K<n<10K"),
    (10**5, "10K<n<100K"),
    (10**6, "100K<n<1M"),
    (10**7, "1M<n<10M"),
    (10**8, "10M<n<100M"),
)

LOAD = """\
With the Hugging Face `datasets` library, from this folder:

```python
import datasets

images = datasets.load_dataset("imagefolder", data_dir="synthetic", split="train")
```

With Pillow alone:

```python
import csv
from pathlib import Path

from PIL import Image

folder = Path("synthetic")
with open(folder / "metadata.csv", newline="", encoding="utf-8") as lines:
    rows = list(csv.DictReader(lines))
images = [(Image.open(folder / row["file_name"]), row["label"], row["text"]) for row in rows]
```
"""


def dataset_card(public: PublicFacts) -> str:
    """README.md of a release, in the Hugging Face data-set card format; every cost in it is rounded up."""
    parts = [_front_matter(public), f"# {_text(public.title)}"]
    if not words.releasable(public):
        parts.append(
            f"> **NOT RELEASABLE. Do not publish this folder.** {_text(words.verdict(public))} "
            "The privacy numbers below are not a promise about this run."
        )
    parts += [
        _what(public),
        "## Privacy",
        _privacy(public),
        "## Mechanisms",
        _mechanisms(public),
        "## Assumed to be public",
        _assumptions(public),
        "## How to verify",
        "`transcript.jsonl` lists every mechanism that was declared and executed. From it, and without the "
        "private data, this command recomputes ε or names the first line that is wrong (give it the path "
        "of this folder):",
        "```sh\nstraightdp replay release/\n```",
        "## How to load",
        LOAD.rstrip(),
        "## Limits",
        "\n".join(f"- {_text(sentence)}" for sentence in words.limits()),
        "## Licence",
        "The front matter says `other`: whoever publishes this folder sets the licence and names it there.",
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(public: PublicFacts) -> str:
    lines = [
        "---",
        "license: other",
        f"pretty_name: {json.dumps(_one_line(public.title), ensure_ascii=False)}",
        "task_categories:",
        "- image-classification",
        "tags:",
        "- differential-privacy",
        "- synthetic",
        "size_categories:",
        f"- {next((name for most, name in SIZES if public.n_synthetic < most), '100M<n<1B')}",
        "configs:",
        "- config_name: default",
        "  data_dir: synthetic",
        "---",
    ]
    return "\n".join(lines)


def _what(public: PublicFacts) -> str:
    images = words.plural(public.n_synthetic, "synthetic image", "synthetic images")
    classes = words.plural(len(public.classes), "class", "classes")
    return (
        f"{images} in {classes}, made by StraightDP {_text(public.version)} from a private image set and a "
        "public one. `synthetic/metadata.csv` gives each image's file name, label and caption. `report.html` "
        "shows samples and the whole privacy account."
    )


def _privacy(public: PublicFacts) -> str:
    rows = [
        ("ε achieved", f"{words.cost(public.epsilon)} of a budget of {words.number(public.epsilon_budget)}"),
        ("δ", f"{public.delta:g}"),
        ("unit", _text(public.unit)),
        ("adjacency", _text(public.adjacency)),
        ("declared N", words.count(public.n)),
        ("accountant", _text(public.accountant)),
        ("mode", _text(public.mode)),
        ("releasable", "yes" if words.releasable(public) else f"**NO**: {_text(words.verdict(public))}"),
    ]
    table = _table(("", ""), rows)
    lead = "" if words.releasable(public) else "This is what the numbers would mean had the run been releasable. "
    return f"{table}\n\n{lead}{_text(' '.join(words.promise(public)))}"


def _mechanisms(public: PublicFacts) -> str:
    if not public.mechanisms:
        return "No mechanism is listed."
    head = (
        "mechanism",
        "computes",
        "kind",
        "sensitivity",
        "noise σ",
        "sampling rate",
        "declared",
        "executed",
        "ε alone",
    )
    rows = [
        (
            _text(m.id),
            _text(m.what),
            _text(m.kind),
            words.number(m.sensitivity),
            words.number(m.sigma),
            "none" if m.q is None else words.number(m.q),
            words.count(m.count),
            words.count(m.executed),
            words.cost(m.epsilon_alone),
        )
        for m in public.mechanisms
    ]
    note = "What the release costs is the accountant's total above, not the sum of the last column."
    return f"{_table(head, rows)}\n\n{note}"


def _assumptions(public: PublicFacts) -> str:
    if not public.assumptions:
        return "No assumption is listed."
    rows = [(_text(a.name), _text(a.value), _text(a.source)) for a in public.assumptions]
    note = "These values are taken as known to everyone. The guarantee does not protect them."
    return f"{_table(('assumption', 'value', 'source'), rows)}\n\n{note}"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", "".join(c if c.isprintable() else " " for c in text)).strip()


def _text(text: str) -> str:
    """Plain text for Markdown: one line, in which no character opens markup, a link or a table cell."""
    text = _one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]|#]|(?<!\w)_|_(?!\w))", r"\\\1", text)
