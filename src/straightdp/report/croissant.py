"""Croissant metadata (JSON-LD, version 1.0) of the synthetic set: `croissant.json` in a release. Guarantee: made from
public facts and the files of the synthetic set alone. Where it will be published, by whom, when and under which
licence is left to the publisher to add."""

from __future__ import annotations

import csv
import hashlib
import re
from pathlib import Path

from straightdp.report import words
from straightdp.report.facts import PublicFacts

SPECIFICATIONS = ["http://mlcommons.org/croissant/1.0", "http://mlcommons.org/croissant/RAI/1.0"]
CONTEXT = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    **{
        name: f"cr:{name}"
        for name in (
            "citeAs", "column", "equivalentProperty", "extract", "field", "fileObject", "fileProperty", "fileSet",
            "format", "includes", "isLiveDataset", "jsonPath", "key", "md5", "parentField", "path", "recordSet",
            "references", "regex", "repeated", "replace", "samplingRate", "separator", "source", "subField",
            "transform",
        )
    },
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "rai": "http://mlcommons.org/croissant/RAI/",
    "sc": "https://schema.org/",
}  # fmt: skip
MEANINGS = {
    "label": "the class of the record",
    "text": "the caption of the record",
}


def croissant(public: PublicFacts, synthetic: Path) -> dict:
    """The metadata to lie beside the folder `synthetic`, which holds metadata.csv and images, or points.csv."""
    images = (synthetic / "metadata.csv").is_file()
    table = synthetic / ("metadata.csv" if images else "points.csv")
    with open(table, newline="", encoding="utf-8") as lines:
        columns = next(csv.reader(lines))
    files = [
        {
            "@type": "cr:FileObject",
            "@id": table.name,
            "name": table.name,
            "description": "one row a record",
            "contentUrl": f"{synthetic.name}/{table.name}",
            "encodingFormat": "text/csv",
            "sha256": hashlib.sha256(table.read_bytes()).hexdigest(),
        }
    ]
    if images:
        files.append(
            {
                "@type": "cr:FileSet",
                "@id": "images",
                "name": "images",
                "description": "one PNG a record",
                "encodingFormat": "image/png",
                "includes": f"{synthetic.name}/images/*.png",
            }
        )
    records = {
        "@type": "cr:RecordSet",
        "@id": "records",
        "name": "records",
        "description": "the synthetic records",
        **({"key": {"@id": "records/file_name"}} if images else {}),
        "field": [field for name in columns for field in _fields(name, table.name, synthetic.name)],
    }
    said = " ".join(words.promise(public)) if words.releasable(public) else _warning(public)
    return {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": SPECIFICATIONS,
        "name": re.sub(r"[^a-z0-9]+", "-", public.title.lower()).strip("-") or "synthetic",
        "alternateName": public.title,
        "description": _description(public),
        "version": "1.0.0",
        "isLiveDataset": False,
        "keywords": ["differential privacy", "synthetic data"],
        "rai:personalSensitiveInformation": said,
        "rai:dataLimitations": " ".join(words.limits()),
        "distribution": files,
        "recordSet": [records],
    }


def _fields(column: str, table: str, folder: str) -> list[dict]:
    """One field a column; that of the file name is taken from the files, joined with the table, and the picture
    comes with it."""
    if column != "file_name":
        kind = "sc:Text" if column in MEANINGS else "sc:Float"
        what = MEANINGS.get(column, "one coordinate of the record")
        return [_field(column, kind, what, {"fileObject": {"@id": table}, "extract": {"column": column}})]
    path = {
        "fileSet": {"@id": "images"},
        "extract": {"fileProperty": "fullpath"},
        "transform": {"regex": f"^(?:{re.escape(folder)}/)?(.+)$"},
    }
    content = {"fileSet": {"@id": "images"}, "extract": {"fileProperty": "content"}}
    name = _field("file_name", "sc:Text", "where the picture lies in the folder", path)
    name["references"] = {"fileObject": {"@id": table}, "extract": {"column": "file_name"}}
    return [name, _field("image", "sc:ImageObject", "the picture", content)]


def _field(name: str, kind: str, what: str, source: dict) -> dict:
    return {
        "@type": "cr:Field",
        "@id": f"records/{name}",
        "name": name,
        "description": what,
        "dataType": kind,
        "source": source,
    }


def _description(public: PublicFacts) -> str:
    what = words.plural(public.n_synthetic, "synthetic record", "synthetic records")
    classes = words.plural(len(public.classes), "class", "classes")
    spent = f"ε = {words.cost(public.epsilon)}, δ = {words.number(public.delta)}, unit: {public.unit}"
    said = f"{what} in {classes}, made by StraightDP {public.version} under differential privacy ({spent})."
    return said if words.releasable(public) else f"{_warning(public)} {said}"


def _warning(public: PublicFacts) -> str:
    return f"NOT RELEASABLE, do not publish. {words.verdict(public)}"
