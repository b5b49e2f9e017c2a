"""The data-set card and the model card of a release. Guarantee: they are made from public facts alone, and those of
a run which is not releasable say so first."""

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


FROZEN = "frozen generator"  # the assumption that names it
ELSEWHERE = "`STRAIGHTDP_SD3` names the folder, or the hub's id, that it is loaded from."

SAMPLE = """\
Install StraightDP, then, beside this folder:

```sh
straightdp sample release/ --n 1000 --out more-images
```

It writes images and a `metadata.csv` with their labels and captions. Another `--seed` gives other images, and
`--set sample.KEY=VALUE` changes a setting that `model.json` stores. Drawing more images costs no further privacy: it
reads this folder and nothing else.
"""


def dataset_card(public: PublicFacts) -> str:
    """README.md of a release, in the Hugging Face data-set card format; every cost in it is rounded up."""
    front = [
        "license: other",
        f"pretty_name: {_quoted(public.title)}",
        "task_categories:",
        "- image-classification",
        "tags:",
        *_tags(public),
        "size_categories:",
        f"- {next((name for most, name in SIZES if public.n_synthetic < most), '100M<n<1B')}",
        "configs:",
        "- config_name: default",
        "  data_dir: synthetic",
    ]
    images = words.plural(public.n_synthetic, "synthetic image", "synthetic images")
    what = (
        f"{images} in {_classes(public)}, made by StraightDP {_text(public.version)} from a private image set and a "
        "public one. `synthetic/metadata.csv` gives each image's file name, label and caption, `croissant.json` "
        "describes the set for machines. `report.html` shows samples and the whole privacy account. The generator "
        "that drew the images has [a card of its own](model_card.md)."
    )
    return _card(public, front, public.title, [what], ["## How to load", LOAD.rstrip()])


def _tags(public: PublicFacts) -> list[str]:
    return ["- differential-privacy", "- synthetic"] if public.releasable else ["- synthetic"]


def model_card(public: PublicFacts) -> str:
    """model_card.md of a release, in the Hugging Face model card format: README.md of a model repository."""
    task = "text-to-image" if len(public.classes) > 1 else "unconditional-image-generation"
    front = [
        "license: other",
        "library_name: straightdp",
        f"pipeline_tag: {task}",
        "tags:",
        *_tags(public),
    ]
    title = f"{public.title}: generator"
    what = (
        f"A generator of images in {_classes(public)}, made by StraightDP {_text(public.version)}: "
        "fitted to a private image set under differential privacy. It draws under the "
        "captions listed in `model.json` and is not meant for other words."
    )
    files = (
        "`model.safetensors` holds the weights, `model.json` the network's shape, captions and sampling settings, "
        "`moments.safetensors`, where there is one, the released class moments and the public set's. "
        "The images that came with it are "
        "described in [the data-set card](README.md); `report.html` shows samples and the whole privacy account."
    )
    frozen = [one.value for one in public.assumptions if one.name == FROZEN]
    about = (
        [f"The weights are adapters on {_text(frozen[0])}, which is not part of the release. {ELSEWHERE}"]
        if frozen
        else []
    )
    return _card(public, front, title, [what, files, *about, "## How to sample", SAMPLE.rstrip()], [])


def _card(public: PublicFacts, front: list[str], title: str, first: list[str], last: list[str]) -> str:
    """What both cards share, the privacy account above all, around what is their own."""
    parts = ["\n".join(["---", *front, "---"]), f"# {_text(title)}"]
    if not words.releasable(public):
        parts.append(
            f"> **NOT RELEASABLE. Do not publish this folder.** {_text(words.verdict(public))} "
            "The privacy numbers below are not a promise about this run."
        )
    parts += [
        *first,
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
        *last,
        "## Limits",
        "\n".join(f"- {_text(sentence)}" for sentence in words.limits()),
        "## Licence",
        "The front matter says `other`: whoever publishes this folder sets the licence and names it there.",
    ]
    return "\n\n".join(parts) + "\n"


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


def _classes(public: PublicFacts) -> str:
    return words.plural(len(public.classes), "class", "classes")


def _quoted(text: str) -> str:
    return json.dumps(_one_line(text), ensure_ascii=False)


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", "".join(c if c.isprintable() else " " for c in text)).strip()


def _text(text: str) -> str:
    """Plain text for Markdown: one line, in which no character opens markup, a link or a table cell."""
    text = _one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]|#]|(?<!\w)_|_(?!\w))", r"\\\1", text)
