"""The evaluate stage and its commands: what is written and where, what it is compared with, and that none of it
changes or reaches what is published."""

import base64
import io
import json
import math
import re
import shutil
import statistics
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file

from conftest import TINY
from straightdp import pipeline, recipe
from straightdp.cli import main
from straightdp.data.records import to_pixels, to_z
from straightdp.folder import RunFolder
from straightdp.metrics.probe import PROBES
from straightdp.report import words
from straightdp.report.assemble import private_facts
from straightdp.report.facts import REFERENCES
from straightdp.stages import published
from straightdp.stages.evaluate import NEAREST, NO_HOLDOUT, NO_WEIGHTS, NOT_THOROUGH, SHOWN
from test_measures import slow_frechet

SHORT = (
    "pretrain.steps=2",
    "distill.steps=2",
    "dpsgd.steps=3",
    "sample.n=40",
    "evaluate.probe_steps=5",
    "evaluate.thorough=off",
    "net.depth=1",
)
QUICK = ("--set", "evaluate.probe_steps=3", "--set", "evaluate.thorough=off")
THOROUGH = ("evaluate.thorough=on", "evaluate.images=100", "evaluate.probe_steps=3")
OWN, MOMENTS, PUBLIC_MODEL = "synthetic data", "released moments alone", "public model only"
TRAINING, PUBLIC = "real private training records", "public images"


@pytest.fixture(scope="module")
def made(tiny_data, tmp_path_factory) -> Path:
    """Three real runs: two seeds, and one without held-out records."""
    root = tmp_path_factory.mktemp("runs")
    (root / "tiny.toml").write_text(TINY.format(**tiny_data))
    for name, setting in (("one", "run.seed=0"), ("two", "run.seed=1"), ("bare", "private.holdout=0.0")):
        pipeline.run(recipe.load(root / "tiny.toml", (*SHORT, setting)), root / name)
    return root


@pytest.fixture
def copy(made, tmp_path) -> Path:
    """A run that a test may change."""
    return Path(shutil.copytree(made / "one", tmp_path / "run"))


class Sixteen:
    """Stands for Inception's features: sixteen sums of a picture's pixels."""

    name, digest, resize = "FD-slim", "0123456789abcdef" * 4, "not at all"

    def __call__(self, z: torch.Tensor, track=None) -> torch.Tensor:
        look = np.random.default_rng(3).normal(size=(z[0].numel(), 16))
        return z.flatten(1).float() @ torch.from_numpy(look).float()

    def batches(self, z: torch.Tensor, track=None):
        yield from map(self, z.split(7))


@pytest.fixture(scope="module")
def judged(made, tmp_path_factory) -> Path:
    """The first run after a thorough evaluation, as its own `left_out` advises."""
    run = Path(shutil.copytree(made / "one", tmp_path_factory.mktemp("judged") / "run"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("straightdp.metrics.inception.find", lambda device: Sixteen())
        pipeline.evaluate_again(run, THOROUGH)
    return run


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def evaluation(run: Path) -> dict:
    """Strict JSON: no NaN."""
    text = (run / "private/evaluation.json").read_text()
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in evaluation.json"))


def labelled(file: Path) -> tuple[np.ndarray, list[str]]:
    """One of the tiny sets: pictures (n, 8, 8) and class names."""
    with np.load(file) as arrays:
        return arrays["images"], arrays["labels"].astype(str).tolist()


def pixels(file: Path) -> np.ndarray:
    return labelled(file)[0]


def synthetic(release: Path) -> tuple[np.ndarray, list[str]]:
    """Pictures and labels in the table's order."""
    rows = [line.split(",") for line in (release / "synthetic/metadata.csv").read_text().splitlines()[1:]]
    return np.stack([np.asarray(Image.open(release / "synthetic" / name)) for name, *_ in rows]), [r[1] for r in rows]


def apart(one: np.ndarray, two: np.ndarray) -> float:
    """The distance between two sets of pictures, the slow way."""
    return slow_frechet(*(Sixteen()(to_z(x[:, None])).double() for x in (one, two)))


def windows(page: str) -> set[bytes]:
    """Every 8 x 8 window of every picture on a page."""
    found = set()
    for code in re.findall(r"data:image/png;base64,([A-Za-z0-9+/=]+)", page):
        picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(code))))
        grey = picture if picture.ndim == 2 else picture[..., 0]
        views = np.lib.stride_tricks.sliding_window_view(grey, (8, 8))
        found |= {view.tobytes() for view in views.reshape(-1, 64)}
    return found


def refused(capsys, *arguments, word: str) -> None:
    """Exit code 2 and one sentence."""
    assert main([str(a) for a in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.strip().splitlines()) == 1, err
    assert word in err


# --- what the stage writes --------------------------------------------------------------------------------


def test_a_quick_evaluation_says_what_it_measured_and_what_it_left_out(made):
    body = evaluation(made / "one")
    assert set(body) == {"holdout_n", "scores", "left_out"}
    assert body["holdout_n"] == 100
    assert body["left_out"] == [NOT_THOROUGH]
    assert [(s["name"], s["probe"]) for s in body["scores"]] == [(OWN, "LeNet"), (MOMENTS, "LeNet")]
    for score in body["scores"]:
        assert set(score) == {"name", "probe", "mean", "std", "note", "values"}
        assert score["std"] is None
        assert score["values"] == [score["mean"]]
        assert 100 * score["mean"] == pytest.approx(round(100 * score["mean"]))  # of 100 held-out records
        assert 0 <= score["mean"] <= 1


def test_several_seeds_have_a_spread_and_the_upper_bound_can_be_asked_for(copy):
    pipeline.evaluate_again(copy, ("evaluate.seeds=3", "evaluate.real_reference=true"))
    scores = evaluation(copy)["scores"]
    assert [s["name"] for s in scores] == [OWN, MOMENTS, "real private data"]
    for score in scores:
        assert len(score["values"]) == 3
        assert score["mean"] == pytest.approx(statistics.mean(score["values"]))
        assert score["std"] == pytest.approx(statistics.stdev(score["values"]))


def test_neighbours_are_those_that_a_loop_finds(made, tiny_data):
    """From the files alone: private records, held-out ones and the published images."""
    found = load_file(made / "one/private/neighbours.safetensors")
    train, holdout = (pixels(tiny_data[name]) / 255 for name in ("private", "holdout"))
    images, labels = synthetic(made / "one/release")

    def far(one: np.ndarray) -> np.ndarray:
        return np.sqrt(((train - one) ** 2).sum(axis=(1, 2)))

    for name, pictures in (("images", images / 255), ("heldout", holdout)):
        nearest = sorted(far(one).min() for one in pictures)
        assert sorted(found[name].tolist()) == pytest.approx(nearest, rel=1e-5)
    assert found["samples"].shape == (SHOWN, 1, 8, 8)
    assert found["nearest"].shape == (SHOWN, NEAREST, 1, 8, 8)
    assert len(set(found["labels"][:10])) == len(set(labels))  # each class once before any comes twice
    places = {picture.tobytes(): k for k, picture in enumerate(images)}
    for sample, label, records, distances in zip(
        found["samples"], found["labels"], found["nearest"], found["distances"], strict=True
    ):
        assert labels[places[sample.tobytes()]] == str(label)
        expected = np.sort(far(sample[0] / 255))[:NEAREST]
        assert distances.tolist() == pytest.approx(expected.tolist(), rel=1e-5)
        shown = [np.sqrt(((one[0] / 255 - sample[0] / 255) ** 2).sum()) for one in records]
        assert shown == pytest.approx(expected.tolist(), rel=1e-5)
        assert {one.tobytes() for one in records} <= {one.tobytes() for one in pixels(tiny_data["private"])}


def test_what_shows_private_records_is_for_its_owner_alone(made):
    places = [p.relative_to(made / "one").as_posix() for p in (made / "one").rglob("neighbours*")]
    assert places == ["private/neighbours.safetensors"]
    for name in ("private/neighbours.safetensors", "report.html"):
        assert (made / "one" / name).stat().st_mode & 0o777 == 0o600
    assert (made / "one/private").stat().st_mode & 0o777 == 0o700


def test_private_records_are_on_the_internal_page_and_not_on_the_public_one(made, tiny_data):
    run = made / "one"
    internal, public = (run / "report.html").read_text(), (run / "release/report.html").read_text()
    private = {x.tobytes() for name in ("private", "holdout") for x in pixels(tiny_data[name])}
    found = load_file(run / "private/neighbours.safetensors")
    shown = {x.tobytes() for x in found["nearest"].reshape(-1, 64)}
    samples = {x.tobytes() for x in found["samples"].reshape(-1, 64)}
    assert windows(internal) & private == shown
    assert samples <= windows(internal)
    assert not windows(public) & private
    assert samples <= windows(public)  # the first images of each class: the search does find what is there
    for said in ('id="neighbours"', "private training record", "at least as near", NOT_THOROUGH.split(";")[0]):
        assert said in internal
        assert said not in public


def test_without_held_out_records_nothing_is_measured_and_the_page_says_so(made, tmp_path):
    """Nor do neighbours of an earlier evaluation stay."""
    run = Path(shutil.copytree(made / "bare", tmp_path / "run"))
    expected = {"holdout_n": 0, "scores": [], "left_out": [NO_HOLDOUT]}
    assert evaluation(run) == expected
    shutil.copy(made / "one/private/neighbours.safetensors", run / "private")
    pipeline.evaluate_again(run)
    assert evaluation(run) == expected
    assert not (run / "private/neighbours.safetensors").exists()
    page = (run / "report.html").read_text()
    assert NO_HOLDOUT in page
    assert "Not run: nobody looked" in page


def test_what_was_measured_is_told_to_the_page_as_it_was_written(made, judged):
    for run in (made / "one", judged):
        body, facts = evaluation(run), private_facts(RunFolder(run))
        assert facts.holdout_n == body["holdout_n"]
        assert list(facts.notes) == body["left_out"]
        assert [(s.name, s.mean, s.std, s.note, s.probe) for s in facts.scores] == [
            (s["name"], s["mean"], s["std"], s["note"], s["probe"]) for s in body["scores"]
        ]
        sets = body["quality"]["sets"] if "quality" in body else []
        assert [vars(q) for q in facts.quality] == sets
        assert [(a.name, a.consistency, a.domain_rate) for a in facts.label_aware] == [
            (a["name"], a["consistency"], a["domain_rate"]) for a in body.get("label_aware", ())
        ]
        assert [vars(c) for c in facts.class_distances] == body.get("class_distances", [])
        written = load_file(run / "private/neighbours.safetensors")
        assert facts.neighbours is not None
        assert list(facts.neighbours.synthetic) == written["images"].tolist()
        assert [one.label for one in facts.neighbours.shown] == [str(k) for k in written["labels"]]
        assert all(one.nearest.shape == (NEAREST, 8, 8, 1) for one in facts.neighbours.shown)
    assert facts.distance_name == Sixteen.name
    assert Sixteen.digest[:12] in facts.features_note
    assert Sixteen.resize in facts.features_note


def test_gradient_norms_survive_a_crash_and_an_older_evaluation_is_read(copy):
    """A step that was repeated counts once, a line that was cut off not at all; the first files named no probe."""
    folder = RunFolder(copy)
    lines = folder.diagnostics.read_text().splitlines()
    before = private_facts(folder).gradient_norms
    assert before["step"] == [0, 1, 2]
    folder.diagnostics.write_text("\n".join([lines[0], lines[1][:20], *lines]) + "\n")
    assert private_facts(folder).gradient_norms == before
    body = evaluation(copy)
    old = {"holdout_n": 100, "scores": [{k: v for k, v in s.items() if k != "probe"} for s in body["scores"]]}
    folder.evaluation.write_text(json.dumps(old))
    folder.neighbours.unlink()
    folder.diagnostics.unlink()
    facts = private_facts(folder)
    assert {s.probe for s in facts.scores} == {"LeNet"}
    assert (facts.notes, facts.quality, facts.neighbours, facts.gradient_norms) == ((), (), None, {})


# --- a thorough evaluation --------------------------------------------------------------------------------


def test_every_reference_stands_beside_the_synthetic_data(judged):
    body = evaluation(judged)
    assert body["left_out"] == []
    quality = body["quality"]
    assert (quality["features"], quality["digest"], quality["resize"]) == ("FD-slim", Sixteen.digest, "not at all")
    sets = {one["name"]: one for one in quality["sets"]}
    assert quality["sets"][0]["name"] == OWN
    assert set(sets) == {OWN, *REFERENCES}
    assert {name: one["n"] for name, one in sets.items()} == {
        OWN: 40, MOMENTS: 40, PUBLIC_MODEL: 40, PUBLIC: 100, TRAINING: 40,
    }  # fmt: skip
    assert sets[PUBLIC]["per_class"] is None
    for probe in PROBES:
        names = [s["name"] for s in body["scores"] if s["probe"] == probe]
        assert names == [OWN, MOMENTS, PUBLIC_MODEL, "real private data"]
    assert len(body["scores"]) == 4 * len(PROBES) == 8


def test_distances_are_those_of_the_files(judged, tiny_data):
    """All held-out records take part, so that the slow way knows which."""
    body = evaluation(judged)
    sets = {one["name"]: one for one in body["quality"]["sets"]}
    images, labels = synthetic(judged / "release")
    real, classes = labelled(tiny_data["holdout"])
    assert sets[OWN]["distance"] == pytest.approx(apart(real, images), rel=1e-4)
    named, classes = np.array(labels), np.array(classes)
    for one in body["class_distances"]:
        inside = images[named == one["label"]], real[classes == one["label"]]
        expected = apart(*inside) if len(inside[0]) > 1 else None
        assert one["distance"] == (None if expected is None else pytest.approx(expected, rel=1e-4))
    assert [one["label"] for one in body["class_distances"]] == list("0123456789")
    for key, name in (("distance", OWN), ("reference", TRAINING)):
        known = [one[key] for one in body["class_distances"] if one[key] is not None]
        assert sets[name]["per_class"] == pytest.approx(statistics.mean(known))
    assert sets[TRAINING]["distance"] < sets[OWN]["distance"]  # digits are nearer to digits than three steps' work
    assert sets[TRAINING]["distance"] < sets[PUBLIC]["distance"]


def test_label_aware_rows_end_with_real_records_and_public_images(judged):
    body = evaluation(judged)
    rows = body["label_aware"]
    assert [row["name"] for row in rows] == [OWN, MOMENTS, PUBLIC_MODEL, "held-out real records", PUBLIC]
    assert [row["name"] for row in rows if row["consistency"] is None] == [PUBLIC]
    shares = [row[key] for row in rows for key in ("consistency", "domain_rate") if row[key] is not None]
    assert all(0 <= share <= 1 for share in shares)
    upper = next(s for s in body["scores"] if s["name"] == "real private data" and s["probe"] == "LeNet")
    assert rows[3]["consistency"] == upper["values"][0]  # the same classifier on the same records


def test_figures_are_those_of_their_classifiers(copy, monkeypatch, tiny_data):
    """Classifiers that repeat what was said of the nearest picture, so that a loop over the files finds the same."""

    def copycat(z, y, *_):
        known = to_pixels(z).astype(int)
        return lambda batch: y[[((known - one) ** 2).sum(axis=(1, 2, 3)).argmin() for one in to_pixels(batch)]]

    monkeypatch.setattr("straightdp.stages.evaluate.fit_probe", copycat)
    monkeypatch.setattr("straightdp.metrics.inception.find", lambda device: None)
    pipeline.evaluate_again(copy, THOROUGH)
    body = evaluation(copy)
    images, labels = synthetic(copy / "release")
    (real, y), (heldout, y_heldout), (public, _) = map(labelled, (tiny_data[k] for k in tiny_data))

    def right(pictures, said, known, names) -> float:
        hits = 0
        for picture, word in zip(pictures.astype(float), said, strict=True):
            hits += names[np.argmin([((picture - other) ** 2).sum() for other in known])] == word
        return hits / len(pictures)

    both, sides = np.concatenate([real, public]), ["private"] * len(real) + ["public"] * len(public)
    rows = {row["name"]: (row["consistency"], row["domain_rate"]) for row in body["label_aware"]}
    own = right(images, labels, real, y), right(images, ["private"] * 40, both, sides)
    assert rows[OWN] == own
    upper = right(heldout, y_heldout, real, y)
    assert rows["held-out real records"] == (upper, right(heldout, ["private"] * 100, both, sides))
    assert rows[PUBLIC] == (None, 0.0)
    scores = {score["name"]: score["mean"] for score in body["scores"]}
    assert scores[OWN] == right(heldout, y_heldout, images, labels)
    assert scores["real private data"] == upper > 0.8


def test_without_weights_the_rest_is_measured_and_the_absence_is_said(copy, monkeypatch):
    monkeypatch.setattr("straightdp.metrics.inception.find", lambda device: None)
    pipeline.evaluate_again(copy, THOROUGH)
    body = evaluation(copy)
    assert body["left_out"] == [NO_WEIGHTS]
    assert "quality" not in body
    assert "class_distances" not in body
    assert len(body["label_aware"]) == 5
    assert {s["probe"] for s in body["scores"]} == set(PROBES)
    page = (copy / "report.html").read_text()
    assert NO_WEIGHTS.split(";")[0] in page


def test_evaluation_spends_nothing_and_changes_nothing_that_is_published(made, judged):
    before, after = tree(made / "one"), tree(judged)
    assert set(before) == set(after)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"recipe.toml", "report.html", "private/evaluation.json"}
    settings = recipe.load(judged / "recipe.toml"), recipe.load(made / "one/recipe.toml")
    assert settings[0].evaluate.thorough == "on"
    assert settings[0].digest() == settings[1].digest()
    figures = [one["distance"] for one in evaluation(judged)["quality"]["sets"]]
    published_text = (judged / "release/report.html").read_text()
    internal = (judged / "report.html").read_text()
    assert all(words.number(figure, 3) in internal for figure in figures)
    assert "FD-slim" in internal
    assert "FD-slim" not in published_text


def test_the_same_evaluation_twice_writes_the_same(copy):
    before = tree(copy)
    pipeline.evaluate_again(copy)
    assert tree(copy) == before


# --- the commands -----------------------------------------------------------------------------------------


def test_report_again_changes_no_byte(copy, capsys):
    before = tree(copy)
    for _ in range(2):
        assert main(["report", str(copy)]) == 0
        assert tree(copy) == before
    out = capsys.readouterr().out
    assert f"{copy / 'report.html'} (internal)" in out
    assert f"{copy / 'release/report.html'} (public)" in out


def test_report_makes_lost_pages_anew(copy):
    before = tree(copy)
    pages = ("report.html", *(f"release/{n}" for n in ("report.html", "README.md", "model_card.md", "croissant.json")))
    for name in pages:
        (copy / name).unlink()
    assert main(["report", str(copy)]) == 0
    assert tree(copy) == before


def test_the_release_has_its_cards_and_replay_takes_them_for_part_of_it(made, capsys):
    names = {path.name for path in (made / "one/release").iterdir()}
    assert names == {
        "transcript.jsonl", "moments.safetensors", "model.safetensors", "model.json", "synthetic", "README.md",
        "model_card.md", "croissant.json", "report.html",
    }  # fmt: skip
    json.loads((made / "one/release/croissant.json").read_text())
    assert main(["replay", str(made / "one/release")]) == 0
    assert "NOT RELEASABLE" not in capsys.readouterr().out


def test_evaluate_prints_what_it_wrote_as_internal(copy, capsys):
    assert main(["evaluate", str(copy), "--set", "evaluate.probe_steps=4"]) == 0
    out = capsys.readouterr().out
    for score in evaluation(copy)["scores"]:
        line = f"internal, not for publication: accuracy of {score['name']} (LeNet) {score['mean']:.3f}"
        assert line in out
    assert NOT_THOROUGH in out
    assert recipe.load(copy / "recipe.toml").evaluate.probe_steps == 4


@pytest.fixture
def elsewhere(made, tmp_path, monkeypatch) -> Path:
    """A release that was copied away, in a place where nothing private can be read; the working folder is empty."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.delenv("STRAIGHTDP_CACHE", raising=False)
    monkeypatch.setattr("straightdp.privacy.intake.read_private", lambda *_: pytest.fail("private data was opened"))
    return Path(shutil.copytree(made / "one/release", tmp_path / "theirs"))


def test_a_release_by_itself_is_judged_and_nothing_is_left_behind(elsewhere, tmp_path, capsys):
    """A class without images is counted too."""
    table = elsewhere / "synthetic/metadata.csv"
    table.write_text(table.read_text().replace(",9,", ",8,"))
    before = tree(tmp_path)
    assert main(["evaluate", str(elsewhere), *QUICK]) == 0
    out = capsys.readouterr().out
    counts = Counter(synthetic(elsewhere)[1])
    assert f"synthetic images: {counts.total()} in 10 classes, 0 to {max(counts.values())} a class" in out
    assert "lines hold. Recomputed epsilon" in out
    assert re.search(r"labels found in one half by a LeNet trained on the other: [01]\.\d{3} \(a guess: 0\.100\)", out)
    assert "--against" in out
    assert published.LEFT_OUT in out
    assert tree(tmp_path) == before


def test_a_run_without_its_private_part_is_judged_as_a_release(elsewhere, copy, tmp_path, capsys):
    shutil.rmtree(copy / "private")
    before = tree(tmp_path)
    assert main(["evaluate", str(copy), *QUICK]) == 0
    assert published.LEFT_OUT in capsys.readouterr().out
    assert tree(tmp_path) == before
    assert not (copy / "private").exists()


def test_against_a_known_set_the_accuracy_is_printed(elsewhere, tmp_path, capsys):
    before = tree(tmp_path)
    assert main(["evaluate", str(elsewhere), "--against", "digits:test", *QUICK]) == 0
    out = capsys.readouterr().out
    accuracy = re.search(r"accuracy on digits:test of a LeNet trained on the release: (\d\.\d{3})\n", out)
    assert accuracy is not None
    assert 0 <= float(accuracy[1]) <= 1
    assert "Fréchet distance to digits:test: not measured (--set evaluate.thorough=on measures it)" in out
    assert "No reference set" not in out
    assert tree(tmp_path) == before


def test_classes_are_matched_by_name(elsewhere, tmp_path, capsys, monkeypatch):
    """A classifier that always says "7", on a set of sevens and threes whose first class is "3"."""
    always = torch.tensor(list("0123456789").index("7"))
    monkeypatch.setattr(published, "fit_probe", lambda *_: lambda z: always.expand(len(z)))
    images = np.random.default_rng(0).integers(0, 256, (20, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "some.npz", images=images, labels=np.array([3] * 13 + [7] * 7))
    np.savez(tmp_path / "other.npz", images=images, labels=np.array(["x", "7"] * 10))
    assert main(["evaluate", str(elsewhere), "--against", str(tmp_path / "some.npz"), *QUICK]) == 0
    assert "of a LeNet trained on the release: 0.350" in capsys.readouterr().out
    assert main(["evaluate", str(elsewhere), "--against", str(tmp_path / "other.npz"), *QUICK]) == 0
    out = capsys.readouterr().out
    assert "not measured, its classes are not those of the release" in out
    assert "trained on the release" not in out


def test_a_thorough_look_at_a_release_has_both_probes_and_the_distance(elsewhere, capsys, monkeypatch, tiny_data):
    monkeypatch.setattr("straightdp.metrics.inception.find", lambda device: Sixteen())
    against, settings = str(tiny_data["holdout"]), ("--set", "evaluate.probe_steps=2", "--set", "evaluate.thorough=on")
    assert main(["evaluate", str(elsewhere), "--against", against, *settings]) == 0
    out = capsys.readouterr().out
    for probe in PROBES:
        assert f"of a {probe} trained on the release" in out
    found = re.search(r"FD-slim of 40 images to 100 of .*: (\d+\.\d\d)\n", out)
    assert found is not None
    expected = apart(synthetic(elsewhere)[0], pixels(tiny_data["holdout"]))
    assert math.isclose(float(found[1]), expected, abs_tol=0.006)
    monkeypatch.setattr("straightdp.metrics.inception.find", lambda device: None)
    assert main(["evaluate", str(elsewhere), "--against", against, *settings]) == 0
    assert "not measured (no Inception weights were found)" in capsys.readouterr().out


def test_what_is_no_release_is_refused_in_a_sentence(elsewhere, tmp_path, capsys):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/thesis.txt").write_text("precious")
    (elsewhere / "model.safetensors").write_bytes(b"damaged")
    before = tree(tmp_path)
    refused(capsys, "evaluate", tmp_path / "notes", word="not a release")
    refused(capsys, "evaluate", tmp_path / "notes/thesis.txt", word="not a release")
    refused(capsys, "evaluate", tmp_path / "nowhere", word="not a release")
    refused(capsys, "evaluate", elsewhere, word="damaged")
    shutil.rmtree(elsewhere / "synthetic")
    refused(capsys, "evaluate", elsewhere, word=str(elsewhere))
    refused(capsys, "report", tmp_path / "notes", word="not a run's folder")
    assert not (tmp_path / "nowhere").exists()
    assert {n: b for n, b in before.items() if "synthetic/" not in n} == tree(tmp_path)


def test_a_set_that_is_not_there_is_refused(elsewhere, capsys):
    refused(capsys, "evaluate", elsewhere, "--against", "digitz:test", *QUICK, word="digitz:test")


@pytest.mark.parametrize(("stage", "word"), [("public.pretrain", "not a release"), ("private.dpsgd", "--resume")])
def test_an_unfinished_run_is_not_judged(stage, word, tiny, tmp_path, capsys, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"straightdp.stages.{stage}", stop)
    settings = [word for setting in SHORT for word in ("--set", setting)]
    assert main(["run", str(tiny), "--out", str(tmp_path / "run"), *settings]) == 130
    capsys.readouterr()
    before = tree(tmp_path)
    refused(capsys, "evaluate", tmp_path / "run", word=word)
    refused(capsys, "report", tmp_path / "run", word="--resume")
    assert tree(tmp_path) == before


def test_settings_and_options_that_do_not_fit_are_refused_and_change_nothing(copy, capsys):
    before = tree(copy)
    refused(capsys, "evaluate", copy, "--against", "digits:test", word="--against")
    refused(capsys, "evaluate", copy, "--set", "sample.n=3", word="sample.n=3")
    refused(capsys, "evaluate", copy, "--set", "evaluate.images=50", "--set", "privacy.epsilon=9", word="epsilon")
    refused(capsys, "evaluate", copy, "--set", "evaluate.thorough=maybe", word="evaluate.thorough")
    refused(capsys, "evaluate", copy, "--set", "evaluate.image=50", word="'images'")
    refused(capsys, "evaluate", copy / "release", "--set", "sample.n=3", word="sample.n=3")
    assert tree(copy) == before


def test_compare_prints_a_table_over_seeds(made, tmp_path, capsys):
    assert main(["compare", str(made / "one"), str(made / "two"), "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    accuracies = [evaluation(made / name)["scores"][0]["mean"] for name in ("one", "two")]
    spread = f"{100 * statistics.mean(accuracies):.1f} ± {100 * statistics.stdev(accuracies):.1f} %"
    lines = [line for line in out.splitlines() if line.startswith("|")]
    head = next(k for k, line in enumerate(lines) if "Accuracy, LeNet" in line)
    column = [cell.strip() for cell in lines[head].split("|")].index("Accuracy, LeNet")
    assert lines[head + 2].split("|")[column].strip() == spread
    assert (tmp_path / "out/compare.html").is_file()
    assert (tmp_path / "out/public/compare.html").is_file()


def test_compare_refuses_a_folder_that_is_no_run_and_writes_nothing(made, tmp_path, capsys):
    (tmp_path / "notes").mkdir()
    for bad in (tmp_path / "notes", tmp_path / "nowhere", made / "one/private"):
        refused(capsys, "compare", made / "one", bad, "--out", tmp_path / "out", word=str(bad))
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
