"""The cards and the metadata of a release: the libraries they are written for read them and open the data."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from report_facts import public_facts
from straightdp.cli import main
from straightdp.data import synthetic
from straightdp.generator import Conditioning, Generator
from straightdp.nets.captions import Tokenizer
from straightdp.nets.mmdit import MMDiT
from straightdp.recipe import Net, Sample
from straightdp.report import AssumptionFact, croissant, dataset_card, model_card

CARDS = [dataset_card, model_card]
CLASSES = ("cat", "dog, small")
CAPTIONS = ("a cat", 'a "small" dog,\nsitting')


@pytest.fixture(params=[1, 3], ids=["grey", "colour"])
def release(request, tmp_path) -> Path:
    """A release folder with six images of two classes, one name with a comma, one caption with a line break."""
    folder = tmp_path / "release"
    z = torch.rand(6, request.param, 8, 8, generator=torch.Generator().manual_seed(1)) * 2 - 1
    synthetic.write(folder / "synthetic", z, torch.tensor([0, 1, 1, 0, 1, 0]), CLASSES, CAPTIONS)
    facts = public_facts(classes=CLASSES, n_synthetic=6)
    (folder / "README.md").write_text(dataset_card(facts), encoding="utf-8")
    (folder / "model_card.md").write_text(model_card(facts), encoding="utf-8")
    (folder / "croissant.json").write_text(json.dumps(croissant(facts, folder / "synthetic")), encoding="utf-8")
    return folder


def written(folder: Path) -> list[tuple[str, str, str, np.ndarray]]:
    """The set as Python's own csv and Pillow read it: what every other reader is held against."""
    with open(folder / "metadata.csv", newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    return [(r["file_name"], r["label"], r["text"], np.asarray(Image.open(folder / r["file_name"]))) for r in rows]


# --- the cards --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("card", CARDS)
def test_cards_share_the_privacy_account(card):
    facts = public_facts()
    body = card(facts).split("---\n", 2)[2]
    for said in ("0.9995 of a budget of 1", "1e-05", "one record", "add or remove one record", "60,000", "PLD"):
        assert said in body
    for m in facts.mechanisms:
        assert m.what in body
    assert "straightdp replay" in body
    start, end = body.index("## Privacy"), body.index("## How to verify")
    theirs = [other(facts).split("---\n", 2)[2] for other in CARDS]
    assert all(body[start:end] in text for text in theirs)


def test_each_card_leads_to_the_other():
    facts = public_facts()
    assert "](model_card.md)" in dataset_card(facts)
    assert "](README.md)" in model_card(facts)
    assert "croissant.json" in dataset_card(facts)


@pytest.mark.parametrize("card", CARDS)
def test_a_card_of_a_run_that_is_not_releasable_says_so_first(card):
    bad = card(public_facts(releasable=False, why_not="The noise was pinned."))
    assert bad.index("NOT RELEASABLE") < bad.index("made by StraightDP")
    assert "The noise was pinned." in bad
    assert "NOT RELEASABLE" not in card(public_facts())


@pytest.mark.parametrize("card", CARDS)
def test_card_text_cannot_break_out_of_its_place(card):
    evil = 'a | b\n---\n# c <script> [x](y) "q": `z`'
    text = card(public_facts(title=evil, unit=evil, assumptions=(AssumptionFact(evil, evil, evil),)))
    assert "<script>" not in text.split("---\n", 2)[2]
    assert text.splitlines().count("---") == 2
    rows = [line for line in text.splitlines() if line.startswith("| a \\|")]
    assert [len(re.findall(r"(?<!\\)\|", row)) for row in rows] == [4]


@pytest.mark.parametrize("title", ["Digits", 'a: "b"\n- c # d'])
def test_the_hub_reads_the_data_set_card(title):
    hub = pytest.importorskip("huggingface_hub")
    card = hub.DatasetCard(dataset_card(public_facts(title=title)), ignore_metadata_errors=False)
    assert card.data.license == "other"
    assert card.data.pretty_name == " ".join(title.split())
    assert card.data.task_categories == ["image-classification"]
    assert card.data.size_categories == ["10K<n<100K"]
    assert {"differential-privacy", "synthetic"} <= set(card.data.tags)
    assert card.data.to_dict()["configs"] == [{"config_name": "default", "data_dir": "synthetic"}]
    assert card.text.strip().startswith("# ")


@pytest.mark.parametrize(("n_classes", "task"), [(3, "text-to-image"), (1, "unconditional-image-generation")])
def test_the_hub_reads_the_model_card(n_classes, task):
    hub = pytest.importorskip("huggingface_hub")
    card = hub.ModelCard(model_card(public_facts(n_classes)), ignore_metadata_errors=False)
    assert card.data.license == "other"
    assert card.data.library_name == "straightdp"
    assert card.data.pipeline_tag == task
    assert "differential-privacy" in card.data.tags
    assert card.text.strip().startswith("# Digits: generator")


def test_the_model_cards_command_draws_images(tmp_path, monkeypatch):
    """The command in the card is run as it stands, beside a folder named release/."""
    section = Net(width=16, depth=1, heads=2, patch=2, caption_width=8, caption_length=4)
    conditioning = Conditioning(CLASSES, CAPTIONS, Tokenizer(("a", "cat", "dog"), 4, section.vocabulary))
    (tmp_path / "release").mkdir()
    generator = Generator(MMDiT(section, (1, 8, 8)), conditioning, None, Sample(n=4, steps=1, port="weights"))
    generator.save(tmp_path / "release/model.safetensors", tmp_path / "release/model.json")
    (command,) = re.findall(r"^straightdp sample .*$", model_card(public_facts()), re.M)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command.replace("--n 1000", "--n 3"))
    assert main(words[1:]) in (0, None)
    assert [label for _, label, _, _ in written(tmp_path / words[-1])] == ["cat", "cat", "dog, small"]


# --- the data opens ---------------------------------------------------------------------------------------


def test_pillow_opens_the_set_as_the_card_says(release, monkeypatch):
    monkeypatch.chdir(release)
    code = re.findall(r"```python\n(.*?)```", (release / "README.md").read_text(encoding="utf-8"), re.S)[1]
    found: dict = {}
    exec(code, found)
    expected = written(release / "synthetic")
    assert [(label, text) for _, label, text in found["images"]] == [(label, text) for _, label, text, _ in expected]
    assert {label for _, label, _ in found["images"]} == set(CLASSES)
    assert all(np.array_equal(np.asarray(a[0]), b[3]) for a, b in zip(found["images"], expected, strict=True))


def test_datasets_opens_the_set_as_the_card_says(release, tmp_path):
    """Offline, in a process of its own: by the card's code, and by the folder's name, through the card's configs."""
    pytest.importorskip("datasets")
    code = re.findall(r"```python\n(.*?)```", (release / "README.md").read_text(encoding="utf-8"), re.S)[0]
    look = """
        import json
        import os
        other = datasets.load_dataset(os.getcwd(), split="train")
        for found in (images, other):
            rows = [(r["label"], r["text"], r["image"].convert("RGB").tobytes().hex()) for r in found]
            print(json.dumps(rows))
    """
    cache = str(tmp_path / "cache")
    quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": cache, "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code + textwrap.dedent(look)],
        cwd=release, env=os.environ | quiet, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = written(release / "synthetic")
    expected = [[label, text, Image.fromarray(x).convert("RGB").tobytes().hex()] for _, label, text, x in rows]
    by_code, by_name = (json.loads(line) for line in done.stdout.splitlines())
    assert by_code == expected
    assert by_name == expected


# --- croissant --------------------------------------------------------------------------------------------


def test_croissant_gives_back_every_record(release):
    mlc = pytest.importorskip("mlcroissant")
    dataset = mlc.Dataset(release / "croissant.json")
    assert not dataset.metadata.ctx.issues.errors
    assert dataset.metadata.name == "digits"
    found = {r["records/file_name"].decode(): r for r in dataset.records("records")}
    expected = written(release / "synthetic")
    assert sorted(found) == sorted(name for name, *_ in expected)
    for name, label, text, x in expected:
        record = found[name]
        assert record["records/label"].decode() == label
        assert record["records/text"].decode() == text
        assert record["records/image"].convert("RGB").tobytes() == Image.fromarray(x).convert("RGB").tobytes()


def test_croissant_knows_the_table_it_was_made_for(release):
    table = release / "synthetic" / "metadata.csv"
    (said,) = [f["sha256"] for f in croissant(public_facts(), release / "synthetic")["distribution"] if "sha256" in f]
    assert said == hashlib.sha256(table.read_bytes()).hexdigest()


def test_croissant_of_points(tmp_path):
    mlc = pytest.importorskip("mlcroissant")
    z = torch.tensor([[0.5, -1.25], [2.0, 0.0], [1.0, 3.0]]).reshape(3, 2, 1, 1)
    synthetic.write(tmp_path / "synthetic", z, torch.tensor([0, 1, 0]), CLASSES, CAPTIONS)
    path = tmp_path / "croissant.json"
    path.write_text(json.dumps(croissant(public_facts(), tmp_path / "synthetic")))
    rows = list(mlc.Dataset(path).records("records"))
    assert [(r["records/z0"], r["records/z1"], r["records/label"].decode()) for r in rows] == [
        (0.5, -1.25, "cat"),
        (2.0, 0.0, "dog, small"),
        (1.0, 3.0, "cat"),
    ]


def test_croissant_says_what_it_costs_and_when_not_to_publish(release):
    good = croissant(public_facts(), release / "synthetic")
    assert "ε = 0.9995" in good["description"]
    assert "NOT RELEASABLE" not in json.dumps(good)
    bad = croissant(public_facts(releasable=False, why_not="The noise was pinned."), release / "synthetic")
    assert bad["description"].startswith("NOT RELEASABLE")
    assert "The noise was pinned." in bad["rai:personalSensitiveInformation"]
