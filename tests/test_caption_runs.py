"""Whole runs under captions: templates with slots, records' own texts, public texts; what they leave and refuse."""

import csv
import json
import os
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import PIN, TINY
from straightdp import pipeline, recipe
from straightdp.audits.replay import replay
from straightdp.cli import main
from straightdp.data.composed import QUADRANTS
from straightdp.data.demo import digits, letters
from straightdp.data.records import to_pixels
from straightdp.errors import BadInput
from straightdp.files import file_hash
from straightdp.folder import RunFolder
from straightdp.moments.field import MomentModel
from straightdp.moments.text import MINILM_PACKAGE
from straightdp.nets.captions import Tokenizer
from straightdp.privacy import intake
from straightdp.privacy.measures import Measures
from straightdp.privacy.vault import Vault

BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data"
DATA = Path(os.environ.get("STRAIGHTDP_DATA") or BESIDE)
CLASSES, SIZES = ("0", "1", "2"), ("small", "large")
EVERY = [(label, f"a {size} {label}") for label in CLASSES for size in SIZES]
SHORT = (
    "pretrain.steps=2",
    "distill.steps=2",
    "dpsgd.steps=2",
    "dpsgd.q=1.0",
    "sample.n=30",
    "evaluate.probe_steps=5",
    f'privacy.pinned_key="{PIN}"',
)
SLOTS = ("private.caption=a {size} {label}", 'private.slots={size = ["small", "large"]}', "release.condition=slots")
FREE = (
    "private.caption={text}",
    "private.prompt=a sketch of {label}",
    "release.condition=pooled",
    "net.caption_length=8",
)
SECRET = "plughxyzzy"


def write_folder(root: Path, pictures: np.ndarray, rows: list[tuple[str, ...]]) -> Path:
    """An image folder; rows are (label,) or (label, text)."""
    root.mkdir(parents=True)
    names = [f"{k:03}.png" for k in range(len(pictures))]
    for name, picture in zip(names, pictures, strict=True):
        Image.fromarray(picture).save(root / name)
    header = ("file_name", "label", "text")[: 1 + len(rows[0])]
    with open(root / "metadata.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *[(name, *row) for name, row in zip(names, rows, strict=True)]])
    return root


def drawn(split: str, n: int) -> tuple[np.ndarray, list[str], list[str]]:
    """Digits 0 to 2: pictures, labels and sizes. A small one is shrunk to the middle."""
    records = digits(split)
    keep = np.flatnonzero(records.labels < 3)[:n]
    pictures, sizes = records.x[keep, 0].copy(), np.arange(len(keep)) % 2
    shrunk = pictures.reshape(-1, 4, 2, 4, 2).mean(axis=(2, 4)).astype(np.uint8)
    pictures[sizes == 0] = np.pad(shrunk, ((0, 0), (2, 2), (2, 2)))[sizes == 0]
    return pictures, [str(k) for k in records.labels[keep]], [SIZES[k] for k in sizes]


def free_text(k: int, label: str, size: str) -> str:
    return f"my {size} {label}, lot wordlet{k:03}quizjet" + (f", {SECRET}" if k == 7 else "")


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> dict[str, Path]:
    """One set of pictures with three kinds of texts, held-out records, and public letters."""
    root = tmp_path_factory.mktemp("sets")
    pictures, labels, sizes = drawn("train", 200)
    assert len({picture.tobytes() for picture in pictures}) == 200
    both = list(zip(labels, sizes, strict=True))
    held_out, held_labels, _ = drawn("test", 40)
    public = letters(n=120)
    names = [public.classes[k] for k in public.labels]
    return {
        "slots": write_folder(root / "slots", pictures, [(label, f"a {size} {label}") for label, size in both]),
        "free": write_folder(
            root / "free", pictures, [(label, free_text(k, label, size)) for k, (label, size) in enumerate(both)]
        ),
        "plain": write_folder(root / "plain", pictures, [(label,) for label in labels]),
        "holdout": write_folder(root / "holdout", held_out, [(label,) for label in held_labels]),
        "public": write_folder(root / "public", public.x[:, 0], [(name, f"glyph named {name}") for name in names]),
        "public plain": write_folder(root / "public plain", public.x[:, 0], [(name,) for name in names]),
    }


def texts_of(folder: Path) -> dict[bytes, str]:
    """From a picture's pixels to its text."""
    with open(folder / "metadata.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {np.asarray(Image.open(folder / row["file_name"])).tobytes(): row["text"] for row in rows}


def write_recipe(path: Path, private: Path, public: Path, holdout: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(TINY.format(private=private, public=public, holdout=holdout))
    return path


def run(private: Path, sets: dict[str, Path], root: Path, *settings: str, public: str = "public") -> RunFolder:
    path = write_recipe(root / "recipe.toml", private, sets[public], sets["holdout"])
    folder = pipeline.run(recipe.load(path, (*SHORT, *settings)), root / "run")
    assert folder is not None
    verdict = replay(folder.release)
    assert verdict.holds, verdict.text
    return folder


def spied_run(private: Path, sets: dict[str, Path], root: Path, *settings: str) -> SimpleNamespace:
    """A run, with the captions that went into its vault and the batches that came to DP-SGD."""
    seen = SimpleNamespace(batches=[], captions=None, records=None, texts=texts_of(private))
    plain = Vault.noisy_gradient

    def noisy_gradient(self, id, step, clipped_sum, **options):
        def watched(batch):
            seen.batches.append(batch)
            return clipped_sum(batch)

        return plain(self, id, step, watched, **options)

    def vault(records, *arguments, captions, **options):
        seen.records, seen.captions = records, captions
        return Vault(records, *arguments, captions=captions, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Vault, "noisy_gradient", noisy_gradient)
        patch.setattr(intake, "Vault", vault)
        seen.folder = run(private, sets, root, *settings)
    return seen


@pytest.fixture(scope="module")
def slotted(sets, tmp_path_factory):
    return spied_run(sets["slots"], sets, tmp_path_factory.mktemp("slotted"), *SLOTS)


@pytest.fixture(scope="module")
def free(sets, tmp_path_factory):
    return spied_run(sets["free"], sets, tmp_path_factory.mktemp("free"), *FREE)


def card(folder: RunFolder) -> dict:
    return json.loads(folder.model_card.read_text(encoding="utf-8"))


def scores(folder: RunFolder) -> dict[str, float]:
    return {score["name"]: score["mean"] for score in json.loads(folder.evaluation.read_text())["scores"]}


def rows_of(folder: Path) -> list[tuple[str, str]]:
    with open(folder / "metadata.csv", newline="", encoding="utf-8") as file:
        return [(row["label"], row["text"]) for row in csv.DictReader(file)]


def tokenizer_of(folder: RunFolder) -> Tokenizer:
    body = card(folder)
    return Tokenizer(tuple(body["words"]), body["net"]["caption_length"], body["net"]["vocabulary"])


def captions_assumption(folder: RunFolder) -> dict[str, str]:
    lines = folder.transcript.read_text(encoding="utf-8").splitlines()
    (found,) = (e for e in map(json.loads, lines) if e["kind"] == "assumption" and e["name"] == "captions")
    return found


# templates with slots


def test_a_release_with_slots_has_every_combination_as_a_caption_of_its_class(slotted):
    body = card(slotted.folder)
    assert body["captions"] == [caption for _, caption in EVERY]
    assert [body["classes"][k] for k in body["labels"]] == [label for label, _ in EVERY]
    assert MomentModel.load(slotted.folder.moments).mu.shape == (6, 64)


def test_synthetic_records_have_the_combinations_in_equal_parts_with_the_right_label(slotted):
    rows = rows_of(slotted.folder.synthetic)
    assert sorted(rows) == sorted(EVERY * 5)


def test_each_slot_is_scored_beside_the_class(slotted):
    found = scores(slotted.folder)
    assert list(found) == [
        "synthetic data",
        "released moments alone",
        "captions' label",
        "captions' size",
    ]
    assert all(0 <= value <= 1 for value in found.values())
    assert "captions' size" not in (slotted.folder.release / "report.html").read_text()


@pytest.mark.parametrize("kind", ["slotted", "free"])
def test_every_record_is_trained_under_its_own_text(kind, request):
    seen = request.getfixturevalue(kind)
    tokenizer = tokenizer_of(seen.folder)
    trained = set()
    for batch in seen.batches:
        for z, ids, mask in zip(batch.z, batch.captions, batch.mask, strict=True):
            if mask:
                text = seen.texts[to_pixels(z)[0].tobytes()]
                assert ids.tolist() == tokenizer.ids(text)
                trained.add(text)
    assert trained == set(seen.texts.values())  # all, at a sampling rate of 1
    assert any(SECRET in text for text in trained) == (kind == "free")


def test_cross_moments_see_each_records_own_slots(slotted):
    assert len(slotted.records) == 200
    for picture, e in zip(slotted.records.x, slotted.captions.features(), strict=True):
        _, size, label = slotted.texts[picture[0].tobytes()].split()
        assert e.tolist() == [float(word in (label, size)) for word in (*CLASSES, *SIZES)]


def test_the_transcript_lists_the_template_and_its_words(slotted):
    found = captions_assumption(slotted.folder)
    assert found["value"].startswith("a {size} {label} ")
    assert json.loads(found["value"].removeprefix("a {size} {label} ")) == {"size": list(SIZES)}
    assert "public template" in found["source"]


def test_a_release_with_slots_can_be_sampled_scored_and_reported_again(slotted, tmp_path):
    assert main(["sample", str(slotted.folder.release), "--n", "12", "--out", str(tmp_path / "more")]) == 0
    assert sorted(rows_of(tmp_path / "more")) == sorted(EVERY * 2)
    before = scores(slotted.folder)
    for command in ("evaluate", "report"):
        assert main([command, str(slotted.folder.root)]) == 0
    assert scores(slotted.folder) == before


def test_a_slots_score_is_how_often_its_classifier_finds_the_word_of_the_caption(slotted, monkeypatch):
    """By a classifier that knows every private record by heart, on those records and on ones it gets all wrong."""
    asked = {}

    def by_heart(z, values):
        return lambda new: values[torch.cdist(new.flatten(1), z.flatten(1)).argmin(dim=1)]

    def agreement(self, fit, sets, slot):
        [(_, asked[slot])] = sets
        own = slotted.records.z()
        said = [text.split()[2 - slot] for text in slotted.records.texts]  # "a small 1": the label is slot 0
        truth = torch.tensor([(CLASSES, SIZES)[slot].index(word) for word in said])
        assert plain(self, by_heart, [(own, truth)], slot) == [1.0]
        half = torch.where(torch.arange(len(truth)) % 2 == 0, truth, (truth + 1) % (3 - slot))
        assert plain(self, by_heart, [(own, half)], slot) == [0.5]
        return [0.125]

    plain = Measures.agreement
    with monkeypatch.context() as patch:
        patch.setattr(Measures, "agreement", agreement)
        assert main(["evaluate", str(slotted.folder.root)]) == 0
    found = scores(slotted.folder)
    assert found["captions' label"] == found["captions' size"] == 0.125
    rows = rows_of(slotted.folder.synthetic)
    assert [CLASSES[k] for k in asked[0]] == [label for label, _ in rows]
    assert [SIZES[k] for k in asked[1]] == [text.split()[1] for _, text in rows]
    assert main(["evaluate", str(slotted.folder.root)]) == 0


def test_the_released_mean_of_a_small_digit_is_darker_at_the_edge_than_that_of_a_large_one(sets, tmp_path):
    """The slots reach the means: with little noise, and features enough to see it."""
    more = ("release.features=40", "release.sigma=0.9", "release.radius_quantile=0.99", "privacy.epsilon=60")
    folder = run(sets["slots"], sets, tmp_path, *SLOTS, *more, "dpsgd.steps=0", "distill.steps=0")
    pictures = MomentModel.load(folder.moments).mu.reshape(3, 2, 8, 8)
    edge = torch.ones(8, 8, dtype=torch.bool)
    edge[2:6, 2:6] = False
    small, large = pictures[:, 0, edge].mean(dim=1), pictures[:, 1, edge].mean(dim=1)
    assert bool((large > small + 0.1).all())


WAYS = {
    "pooled words": ("release.condition=pooled",),
    "sentence encoder": ("release.condition=minilm",),
    "paper": ("privacy.mode=paper",),
    "guided": ("sample.port=guide",),
    "release port": ("sample.port=release",),
    "release alone": ("dpsgd.steps=0",),
    "latent": ("latent.d=32", "latent.width=8", "latent.steps=3", "latent.batch=8", "net.patch=1"),
    "holdout by fraction": ("private.holdout=0.2",),
}


@pytest.mark.parametrize("way", WAYS)
def test_slots_go_every_way_through_the_pipeline(way, sets, tmp_path):
    if way == "sentence encoder" and not (find_spec("transformers") and find_spec(MINILM_PACKAGE)):
        pytest.skip("the packages of the text extra are not installed")
    folder = run(sets["slots"], sets, tmp_path, *SLOTS, *WAYS[way])
    assert sorted(rows_of(folder.synthetic)) == sorted(EVERY * 5)


def test_slots_without_any_release_are_trained_and_sampled_in_equal_parts(sets, tmp_path):
    path = write_recipe(tmp_path / "recipe.toml", sets["slots"], sets["public"], sets["holdout"])
    path.write_text(path.read_text().replace("[release]\nsigma = 3.0", "[release]\nweight = 0.0"))
    folder = pipeline.run(recipe.load(path, (*SHORT, *SLOTS)), tmp_path / "run")
    assert replay(folder.release).holds
    assert sorted(rows_of(folder.synthetic)) == sorted(EVERY * 5)


def test_slots_with_a_release_by_class_run_or_are_refused_before_anything_is_spent(sets, tmp_path):
    try:
        folder = run(sets["slots"], sets, tmp_path, *SLOTS, "release.condition=class")
    except BadInput:
        assert not (tmp_path / "run").exists()
    else:
        assert set(rows_of(folder.synthetic)) == set(EVERY)


# records' own texts


def published(folder: RunFolder) -> bytes:
    files = sorted(path for path in folder.release.rglob("*") if path.is_file())
    assert {"transcript.jsonl", "model.json", "metadata.csv", "README.md", "report.html"} <= {p.name for p in files}
    return b"\n".join(str(path.relative_to(folder.release)).encode() + b"\n" + path.read_bytes() for path in files)


def test_no_word_of_a_private_text_is_published(free):
    everything = published(free.folder).lower()
    assert len(everything) > 10_000
    for word in (SECRET, "wordlet", "quizjet", "my small", "my large"):
        assert word.encode() not in everything
    assert not {"my", "lot", *SIZES} & set(card(free.folder)["words"])
    assert b"a sketch of 1" in everything


def test_free_texts_are_sampled_under_the_prompts(free):
    rows = rows_of(free.folder.synthetic)
    assert sorted(rows) == sorted([(label, f"a sketch of {label}") for label in CLASSES] * 10)
    assert card(free.folder)["captions"] == [f"a sketch of {label}" for label in CLASSES]
    assert "captions' label" not in scores(free.folder)


def test_the_transcript_of_free_texts_lists_the_prompts_template_alone(free):
    found = captions_assumption(free.folder)
    assert found["value"] == "a sketch of {label}"
    assert "own texts are private" in found["source"]


def test_free_texts_may_have_a_release_by_class(sets, tmp_path):
    """Means by class, DP-SGD under each record's own text."""
    folder = run(sets["free"], sets, tmp_path, *FREE, "release.condition=class")
    assert SECRET.encode() not in published(folder)


def test_a_text_without_a_word_is_the_empty_caption(sets, tmp_path):
    private = copied(sets["free"], tmp_path / "private", {0: "?!", 1: "-"})
    seen = spied_run(private, sets, tmp_path, *FREE)
    assert not seen.captions.ids()[:2].any()
    assert not seen.captions.features()[:2].any()
    assert seen.captions.ids()[2:].any(dim=1).all()


# public texts


def test_public_records_may_be_captioned_by_their_own_texts(sets, tmp_path):
    settings = ("private.caption=the digit {label}", "public.caption={text}")
    folder = run(sets["plain"], sets, tmp_path, *settings)
    public = rows_of(sets["public"])
    assert set(card(folder)["words"]) == {"the", "digit", *CLASSES, "glyph", "named", *(name for name, _ in public)}
    loaded = recipe.load(folder.recipe)
    inputs = pipeline.gather(loaded, RunFolder(tmp_path / "none"), torch.device("cpu"))
    tokenizer = tokenizer_of(folder)
    for (_, text), ids in zip(public, inputs.public_ids, strict=True):
        assert ids.tolist() == tokenizer.ids(text)
    assert not (tmp_path / "none").exists()


# refusals


def copied(source: Path, target: Path, texts: dict[int, str], *, n: int | None = None) -> Path:
    """The first n records of a folder, some with other texts."""
    with open(source / "metadata.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))[:n]
    pictures = np.stack([np.asarray(Image.open(source / row["file_name"])) for row in rows])
    return write_folder(target, pictures, [(row["label"], texts.get(k, row["text"])) for k, row in enumerate(rows)])


def without(setting: str) -> tuple[str, ...]:
    return tuple(s for s in SLOTS if not s.startswith(setting))


REFUSALS = {
    "slots without texts": ("plain", SLOTS, {}, "add a text column to metadata.csv"),
    "a text that no combination reads like": ("slots", SLOTS, {3: "a tiny 0"}, "1 private records do not fit"),
    "a text that says more than the template": ("slots", SLOTS, {3: "a large 0 here"}, "do not fit"),
    "a text of another class": ("slots", SLOTS, {0: "a small 2"}, "name another class"),
    "an empty text": ("slots", SLOTS, {4: ""}, "row 6 of metadata.csv"),
    "own texts that are not there": ("plain", FREE, {}, "private.caption is {text} but the records have none"),
    "indicators of free texts": ("free", (*FREE, "release.condition=slots"), {}, "take 'pooled' for free texts"),
    "a slot without words": ("slots", without("private.slots"), {}, "or list the words of 'size' in slots"),
    "a slot with no field": ("slots", (*SLOTS, "private.caption=a {label}"), {}, "slot 'size' has words but"),
    "a slot of no words": ("slots", (*SLOTS, "private.slots={size = []}"), {}, "slot 'size' has no words"),
    "a word twice": ("slots", (*SLOTS, 'private.slots={size = ["small", "small"]}'), {}, "'small' twice"),
    "a template that is no longer plain": ("slots", (*SLOTS, "private.caption=a {size!r} {label}"), {}, "'sizer'"),
    "text among other words": ("slots", (*SLOTS, "private.caption=a {size} {label} {text}"), {}, "'text'"),
    "a prompt that is the same for all": ("free", (*FREE, "private.prompt=a sketch"), {}, "has no {label}"),
    "a public template with a slot": ("slots", (*SLOTS, "public.caption=a {size} {label}"), {}, "'size'"),
}


def refused(private: Path, public: Path, sets, tmp_path, monkeypatch, capsys, settings) -> str:
    """The one line that a run is refused with, by exit code 2 and with nothing written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("straightdp.stages.public.pretrain", lambda *_: pytest.fail("the input was taken"))
    path = write_recipe(tmp_path / "recipe.toml", private, public, sets["holdout"])
    before = sorted(tmp_path.rglob("*"))
    words = [word for setting in (*SHORT, *settings) for word in ("--set", setting)]
    code = main(["run", str(path), "--out", str(tmp_path / "out"), *words])
    message = capsys.readouterr().err
    assert code == 2, message
    assert len(message.strip().splitlines()) == 1
    assert ";" in message, f"no cure in: {message}"
    assert "Traceback" not in message
    assert sorted(tmp_path.rglob("*")) == before
    return message


@pytest.mark.parametrize("case", REFUSALS)
def test_captions_that_do_not_fit_are_refused_in_one_line_and_nothing_is_written(
    case, sets, tmp_path, monkeypatch, capsys
):
    kind, settings, texts, words = REFUSALS[case]
    private = copied(sets[kind], tmp_path / "private", texts, n=30) if texts else sets[kind]
    assert words in refused(private, sets["public"], sets, tmp_path, monkeypatch, capsys, settings)


def test_public_texts_that_are_not_there_are_refused(sets, tmp_path, monkeypatch, capsys):
    settings = (*SLOTS, "public.caption={text}")
    message = refused(sets["slots"], sets["public plain"], sets, tmp_path, monkeypatch, capsys, settings)
    assert "public.caption is {text} but the records have none; give a template over {label}" in message


def test_a_refusal_does_not_repeat_a_private_text(sets, tmp_path, monkeypatch, capsys):
    private = copied(sets["slots"], tmp_path / "private", {3: f"a {SECRET} 0"}, n=30)
    assert SECRET not in refused(private, sets["public"], sets, tmp_path, monkeypatch, capsys, SLOTS)


def test_a_missing_sentence_encoder_is_refused_before_anything_is_written(sets, tmp_path, monkeypatch, capsys):
    known = find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == MINILM_PACKAGE else known(name))
    settings = (*SLOTS, "release.condition=minilm")
    message = refused(sets["slots"], sets["public"], sets, tmp_path, monkeypatch, capsys, settings)
    assert "pip install 'straightdp[text]'" in message


# resuming


@pytest.mark.parametrize(("kind", "settings", "text"), [("slots", SLOTS, "a small 0"), ("free", FREE, "another text")])
def test_a_run_is_not_resumed_with_a_changed_text(kind, settings, text, sets, tmp_path):
    private = copied(sets[kind], tmp_path / "private", {})
    folder = run(private, sets, tmp_path, *settings)
    loaded, table = recipe.load(folder.recipe), private / "metadata.csv"
    before, original = file_hash(folder.release), table.read_text()
    with open(table, newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    _, label, old = rows[2]
    rows[2][2] = text.replace("0", label)
    assert rows[2][2] != old
    with open(table, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    with pytest.raises(BadInput, match=r"not those that .* began with; give another --out"):
        pipeline.run(loaded, folder.root, resume=True)
    assert file_hash(folder.release) == before
    table.write_text(original)
    assert pipeline.run(loaded, folder.root, resume=True) is not None
    assert (folder.release / "transcript.jsonl").read_text().count('"kind":"totals"') == 1


def test_a_run_resumed_with_other_public_texts_is_refused_or_pretrained_again(sets, tmp_path, monkeypatch):
    """Its network was fitted under the old texts, and the words' ids have moved."""
    public = copied(sets["public"], tmp_path / "public", {})
    path = write_recipe(tmp_path / "recipe.toml", sets["plain"], public, sets["holdout"])
    loaded = recipe.load(path, (*SHORT, "public.caption={text}"))

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("straightdp.stages.private.release", stop)
        with pytest.raises(KeyboardInterrupt):
            pipeline.run(loaded, tmp_path / "run")
    pretrained = RunFolder(tmp_path / "run").checkpoints / "pretrained.safetensors"
    before = file_hash(pretrained)
    table = public / "metadata.csv"
    table.write_text(table.read_text().replace("glyph named", "an aardvark beside"))
    try:
        pipeline.run(loaded, tmp_path / "run", resume=True)
    except BadInput:
        return
    assert file_hash(pretrained) != before


# composed pictures


@pytest.mark.skipif(not (DATA / "mnist").is_dir(), reason="the data sets are not here: set STRAIGHTDP_DATA")
def test_composed_digits_go_all_the_way_and_their_markers_are_in_the_released_means(sets, tmp_path, monkeypatch):
    monkeypatch.setenv("STRAIGHTDP_DATA", str(DATA))
    path = write_recipe(tmp_path / "recipe.toml", sets["slots"], sets["public"], sets["holdout"])
    settings = (
        "private.data=composed-mnist:test",
        "private.holdout=0.1",
        "private.caption=a {stroke} {label} marked {quadrant}",
        f'private.slots={{stroke = ["thin", "thick"], quadrant = {json.dumps(QUADRANTS)}}}',
        "public.data=composed-kmnist:test",
        "public.caption={text}",
        "image.size=28",
        "net.patch=7",
        "net.caption_length=8",
        "privacy.n=10000",
        "release.condition=slots",
        "dpsgd.q=0.01",
        "sample.n=80",
        "evaluate.probe_batch=32",
    )
    folder = pipeline.run(recipe.load(path, (*SHORT, *settings)), tmp_path / "run")
    assert replay(folder.release).holds
    assert {"captions' label", "captions' stroke", "captions' quadrant"} <= set(scores(folder))
    captions = card(folder)["captions"]
    assert sorted(text for _, text in rows_of(folder.synthetic)) == sorted(captions)
    pictures = MomentModel.load(folder.moments).mu.reshape(80, 28, 28)
    first, last = slice(0, 4), slice(24, 28)
    corners = torch.stack([pictures[:, a, b].mean(dim=(1, 2)) for a in (first, last) for b in (first, last)], dim=1)
    brightest = [QUADRANTS[k] for k in corners.argmax(dim=1)]  # upper left, upper right, lower left, lower right
    assert all(caption.endswith(f"marked {quadrant}") for caption, quadrant in zip(captions, brightest, strict=True))
