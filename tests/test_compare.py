"""Comparisons of runs: who is grouped with whom, what is refused, what each edition shows, and the charts' geometry."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import stat
import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from browser import CHROMIUM, Browser
from conftest import PIN, TINY
from straightdp import pipeline, recipe
from straightdp.audits.replay import replay
from straightdp.errors import BadInput
from straightdp.report.compare import charts, compare, page
from straightdp.report.compare.charts import Axis, Point, Series
from straightdp.report.compare.facts import Measure, Run, read_measured, read_run
from straightdp.report.compare.groups import grouped, together
from straightdp.report.compare.page import render
from straightdp.report.compare.tables import cautions, measured_table, settings_table
from test_report import MARK, Tree, luminance, squeeze

SHORT = ("pretrain.steps=2", "distill.steps=2", "dpsgd.steps=2", "sample.n=40", "evaluate.probe_steps=5", "net.depth=1")
RUNS = {  # folder: settings
    "five-a": ("run.seed=0",),
    "five-b": ("run.seed=1", "run.title=Another title", "dpsgd.micro_batch=8"),
    "five-c": ("run.seed=2", "dpsgd.checkpoint_every=1", "sample.batch=7"),
    "eight-a": ("run.seed=0", "privacy.epsilon=8"),
    "eight-b": ("run.seed=1", "privacy.epsilon=8", f'privacy.pinned_key="{PIN}"'),
    "longer": ("run.seed=0", "dpsgd.steps=5"),
}
FIVE, EIGHT, LONGER = "epsilon=5, dpsgd.steps=2", "epsilon=8, dpsgd.steps=2", "epsilon=5, dpsgd.steps=5"
ACCURACY = {"five-a": 0.71234, "five-b": 0.73456, "five-c": 0.75111, "eight-a": 0.81717, "eight-b": 0.83939}
DISTANCE = {"five-a": 41.213, "five-b": 43.455, "five-c": 47.917, "eight-a": 31.333, "eight-b": 29.019}


def evaluation(accuracy: float, distance: float, features: str = "FD-slim", digest: str = "d1") -> dict:
    """An evaluation.json with figures that could come from nowhere else."""
    return {
        "holdout_n": 98_765,
        "scores": [
            {"name": "synthetic data", "mean": accuracy, "std": 0.5, "note": "", "values": [accuracy]},
            {"name": "synthetic data", "mean": accuracy + 0.1, "std": None, "note": "", "probe": "residual net"},
            {"name": "released moments alone", "mean": 0.61616, "std": None, "note": "", "values": []},
            {"name": "real private data", "mean": 0.97979, "std": None, "note": "", "values": []},
            {"name": "chance", "mean": 0.1, "std": None, "note": "", "values": []},
        ],
        "quality": {
            "features": features,
            "digest": digest,
            "sets": [
                {"name": "synthetic data", "n": 40, "distance": distance, "precision": 0.35353, "recall": None},
                {"name": "public images", "n": 40, "distance": 777.0, "precision": None, "recall": None},
                {"name": "real private training records", "n": 40, "distance": 2.0202, "precision": 0.9},
            ],
        },
        "label_aware": [
            {"name": "synthetic data", "consistency": 0.26262, "domain_rate": None},
            {"name": "public images", "consistency": None, "domain_rate": 0.77},
        ],
    }


@pytest.fixture(scope="module")
def made(tiny_data, tmp_path_factory) -> Path:
    """Six real runs; all but the last have their figures written by hand."""
    root = tmp_path_factory.mktemp("runs")
    (root / "tiny.toml").write_text(TINY.format(**tiny_data))
    for name, settings in RUNS.items():
        pipeline.run(recipe.load(root / "tiny.toml", (*SHORT, *settings)), root / name)
        if name in ACCURACY:
            body = evaluation(ACCURACY[name], DISTANCE[name])
            (root / name / "private/evaluation.json").write_text(json.dumps(body))
    return root


@pytest.fixture(scope="module")
def compared(made, tmp_path_factory) -> tuple[str, Path]:
    out = tmp_path_factory.mktemp("out") / "new" / "compared"
    return compare([made / name for name in RUNS], out), out


def known(*settings: str, **facts) -> Run:
    """A run that is nowhere on disk, of the default recipe with these settings."""
    base = {"private.data": "private", "public.data": "public"}
    named = [f"{key}={value}" for key, value in base.items()] + list(settings)
    values = {"epsilon": 1.0, "delta": 1e-5, "name": "run"} | facts
    return Run(
        release=Path("nowhere"), identity="", declared="", reasons=(), classes=("0", "1"), n_synthetic=10,
        recipe=recipe.load(None, tuple(named)), **values,
    )  # fmt: skip


def row(text: str, name: str, table: int = 0) -> list[str]:
    """The cells of this row of the privacy (0), settings (1), utility (2) or reference (3) table; [] without one."""
    blocks = [block for block in text.split("\n\n") if block.startswith("|")]
    rows = [line for line in blocks[table].splitlines() if line.startswith(f"| {name} ")]
    return [cell.strip() for cell in rows[0].strip("|").split("|")] if rows else []


# --- real folders -----------------------------------------------------------------------------------------


def test_seeds_share_a_row_with_mean_and_deviation(compared):
    text, _ = compared
    for name, members in ((FIVE, ("five-a", "five-b", "five-c")), (EIGHT, ("eight-a", "eight-b"))):
        cells = row(text, name, 2)
        values = [100 * ACCURACY[m] for m in members]
        assert cells[1] == f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f} %"
        mean, std = (float(x) for x in cells[3].split(" ± "))
        values = [DISTANCE[m] for m in members]
        assert mean == pytest.approx(statistics.mean(values), abs=6e-3)
        assert std == pytest.approx(statistics.stdev(values), rel=0.05)
        assert row(text, name)[4] == str(len(members))
    head = row(text, "Compared", 2)
    assert head[1:4] == ["Accuracy, LeNet", "Accuracy, residual net", "FD-slim"]
    references = dict(zip(row(text, "Compared", 3), row(text, FIVE, 3), strict=True))
    assert references == {
        "Compared": FIVE,
        "Released moments alone: accuracy, LeNet": "61.6 ± 0.0 %",
        "Real private data: accuracy, LeNet": "98.0 ± 0.0 %",
        "Real private training records: FD-slim": "2.02 ± 0",
    }
    assert "Chance" not in text
    assert "777" not in text


def test_a_single_run_has_no_deviation_and_its_own_figure(compared, made):
    text, _ = compared
    body = json.loads((made / "longer/private/evaluation.json").read_text())
    own = next(s["mean"] for s in body["scores"] if s["name"] == "synthetic data")
    cells = row(text, LONGER, 2)
    assert cells[1] == f"{100 * own:.1f} %"
    assert "±" not in " ".join(cells)


def test_privacy_is_that_of_the_transcripts(compared, made):
    text, _ = compared
    for name, member in ((FIVE, "five-a"), (EIGHT, "eight-a"), (LONGER, "longer")):
        epsilon, shown = replay(made / member / "release").epsilon, float(row(text, name)[1])
        assert epsilon <= shown <= epsilon * 1.001
    assert [row(text, name)[3] for name in (FIVE, EIGHT, LONGER)] == ["yes", "NO", "yes"]
    assert "eight-b: not releasable: line 1 says the noise key was pinned" in text
    total = sum(replay(made / name / "release").epsilon for name in RUNS)
    said = re.search(r"publishing all 6 spends ε = ([\d.]+) at δ = 6 × 10⁻⁵, had each been releasable\.", text)
    assert said is not None
    assert total <= float(said[1]) <= total * 1.001


def test_text_is_a_markdown_table(compared):
    text, _ = compared
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 4
    for table in tables:
        assert len({len(line) for line in table}) == 1, "columns are aligned"
        assert re.fullmatch(r"\|( -{2,}[-:] \|)+", table[1])
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1


def test_a_release_alone_brings_public_figures_only(made, tmp_path):
    """Even when private/ lies beside it: what was not given is not looked at."""
    alone = tmp_path / "theirs"
    shutil.copytree(made / "five-b/release", alone)
    text = compare([made / "five-a/release", alone, made / "five-c"], tmp_path / "out")
    assert row(text, "five-c", 2)[1] == f"{100 * ACCURACY['five-c']:.1f} %"
    for name in ("five-a", "theirs"):
        assert row(text, name)[1] == row(text, "five-c")[1]
        assert f"{name}: its release alone was given, so its settings and internal figures are left out." in text
        assert row(text, name, 2) == row(text, name, 3) == []
    assert "Which private set a release alone comes from (five-a, theirs) is not known here" in text
    page = (tmp_path / "out/compare.html").read_text()
    assert f"{100 * ACCURACY['five-a']:.1f}" not in page
    assert page.count("<figcaption><strong>") == 3


def test_pictures_are_those_of_the_release(made, tmp_path):
    compare([made / "five-a"], tmp_path / "out")
    page = (tmp_path / "out/public/compare.html").read_text()
    rows = (made / "five-a/release/synthetic/metadata.csv").read_text().splitlines()[1:]
    labels = [line.split(",")[1] for line in rows]
    for label in sorted(set(labels)):
        n = min(5, labels.count(label))
        assert f'alt="{n} synthetic image{"s" if n > 1 else ""} of class {label}"' in page
    assert page.count("<img") == len(set(labels))
    assert page.count("no picture") == 10 - len(set(labels))


# --- what is refused --------------------------------------------------------------------------------------


def copy(source: Path, to: Path) -> Path:
    shutil.copytree(source, to)
    return to


def unfinished(made, folder):
    """The transcript as it was before the run closed it."""
    run = copy(made / "five-a", folder / "run")
    for place in ("release", "private"):
        file = run / place / "transcript.jsonl"
        file.write_text("".join(line for line in file.read_text().splitlines(True) if '"totals"' not in line))
    return [made / "five-b", run]


def without_samples(made, folder):
    run = copy(made / "five-a", folder / "run")
    shutil.rmtree(run / "release/synthetic")
    return [run]


def forged(made, folder):
    run = copy(made / "five-a", folder / "run")
    file = run / "release/transcript.jsonl"
    file.write_text(file.read_text().replace('"delta":1e-05', '"delta":1e-06'))
    return [run]


def damaged_evaluation(made, folder):
    run = copy(made / "five-a", folder / "run")
    (run / "private/evaluation.json").write_text('{"scores": [{"mean": 1')
    return [run]


def damaged_recipe(made, folder):
    run = copy(made / "five-a", folder / "run")
    (run / "recipe.toml").write_text("[run]\nsede = 1\n")
    return [run]


def twice_in_disguise(made, folder):
    return [made / "five-a", copy(made / "five-a/release", folder / "copy")]


def other_folder(made, folder):
    (folder / "run").mkdir()
    (folder / "run/recipe.toml").write_text("")
    return [folder / "run"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda made, folder: [], "nothing to compare"),
        (lambda made, folder: [made / "five-a", made / "nothing-here"], "nothing-here is neither"),
        (lambda made, folder: [made], "is neither"),
        (lambda made, folder: [made / "five-a/private"], "private is neither"),
        (lambda made, folder: [made / "five-a/release/transcript.jsonl"], "is neither"),
        (other_folder, "run is neither"),
        (unfinished, "run is not finished; finish it"),
        (without_samples, "run is not finished"),
        (forged, "does not hold"),
        (damaged_evaluation, "straightdp evaluate"),
        (damaged_recipe, "did you mean 'seed'"),
        (lambda made, folder: [made / "five-a", made / "five-a"], "are the same run"),
        (twice_in_disguise, "are the same run"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(given, said, made, tmp_path):
    with pytest.raises(BadInput, match=re.escape(said)) as caught:
        compare(given(made, tmp_path), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_only_a_new_folder_or_an_earlier_comparison_is_written_to(made, tmp_path):
    runs = [made / "five-a"]
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder/sub").mkdir(parents=True)
    (tmp_path / "folder/sub/thesis.tex").write_text("mine")
    copy(made / "five-a", tmp_path / "run")
    for out in ("file", "folder", "run", "run/release/page", "run/release/synthetic", "run/private/new"):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(BadInput, match="give another --out"):
            compare(runs, tmp_path / out)
        assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "empty").mkdir()
    for out in ("empty", "empty", "run/compared"):
        compare(runs, tmp_path / out)
        assert (tmp_path / out / "compare.html").exists()


# --- who is grouped with whom -----------------------------------------------------------------------------

SEEDS = (
    "run.seed=7", "run.title=other", "run.device=cpu", "run.compile=off", "dpsgd.micro_batch=3",
    "dpsgd.checkpoint_every=9", "sample.batch=3", f'privacy.pinned_key="{PIN}"',
)  # fmt: skip
OTHERS = (
    "privacy.epsilon=2", "privacy.delta=1e-6", "privacy.n=500", "privacy.mode=paper", "private.data=elsewhere",
    "private.holdout=0.2", "private.caption={label}", 'private.classes=["0","1"]', "public.data=elsewhere",
    "image.size=8", "latent.d=8", "net.s=0.5", "release.floor=0.011", "distill.tau=knee", "dpsgd.clip=1.0000000001",
    "sample.n=11", "sample.t0=plateau", "evaluate.probe_steps=9",
)  # fmt: skip


def test_only_what_repeats_a_recipe_is_grouped():
    groups = grouped([known(), *(known(setting) for setting in SEEDS)])
    assert [len(group.runs) for group in groups] == [1 + len(SEEDS)]
    assert groups[0].name == f"run and {len(SEEDS)} more"
    for setting in OTHERS:
        assert len(grouped([known(), known(setting)])) == 2, setting


def test_names_are_the_settings_that_differ():
    def names(*runs):
        return [group.name for group in grouped(runs)]

    assert names(known("privacy.epsilon=3"), known("privacy.epsilon=1", epsilon=0.5)) == ["epsilon=1", "epsilon=3"]
    plans = [known(f"privacy.epsilon={e}", f"dpsgd.plan={p}", epsilon=e) for p in ("tha", "uniform") for e in (3, 1)]
    assert names(*plans) == [f"epsilon={e}, plan={p}" for p in ("tha", "uniform") for e in (1, 3)]
    assert names(known("dpsgd.steps=9"), known("dpsgd.t_min=0.5", "dpsgd.steps=9"), known()) == [
        "dpsgd.steps=9, dpsgd.t_min=none", "dpsgd.steps=9, dpsgd.t_min=0.5", "dpsgd.steps=2000, dpsgd.t_min=none",
    ]  # fmt: skip
    assert names(known(name="one"), replace(known(name="two"), recipe=None)) == ["one", "two"]
    alone = [replace(known(name="same"), recipe=None) for _ in range(3)]
    assert names(*alone) == ["same", "same (2)", "same (3)"]


def test_names_tell_groups_apart_and_hold_nothing_needless():
    draw = random.Random(1)
    choices = {
        "privacy.epsilon": (1, 3), "dpsgd.plan": ("tha", "uniform"), "dpsgd.steps": (5, 6, 7), "sample.n": (8, 9),
        "net.l0": (1, 2), "release.rank": (3, 4),
    }  # fmt: skip
    shorter = 0
    for _ in range(30):
        runs = [known(*(f"{key}={draw.choice(values)}" for key, values in choices.items())) for _ in range(4)]
        groups = grouped(runs)
        names = [group.name for group in groups]
        assert len(set(names)) == len(names)
        if len(groups) == 1:
            continue
        parts = [dict(part.split("=") for part in name.split(", ")) for name in names]
        differing = groups[0].settings
        assert all(group.settings.keys() == differing.keys() for group in groups)
        assert all(
            group.settings[key] == value
            for group, part in zip(groups, parts, strict=True)
            for key, value in part.items()
        )
        assert ("epsilon" in parts[0]) == ("epsilon" in differing)
        shorter += len(parts[0]) < len(differing)
        for key in parts[0].keys() - {"epsilon"}:
            rest = {tuple(value for k, value in part.items() if k != key) for part in parts}
            assert len(rest) < len(groups), f"{key} could be left out of {names}"
        assert settings_table(groups).head == ("Compared", *differing, "Folders")
    assert shorter > 5


def test_series_join_what_differs_in_epsilon_alone():
    runs = [known(f"privacy.epsilon={e}", f"sample.guidance={g}", epsilon=e) for g in (2, 1) for e in (3, 1, 10)]
    groups = grouped(runs)
    assert [(g.series, g.epsilon) for g in groups] == [(f"guidance={g}", e) for g in (2, 1) for e in (1, 3, 10)]
    odd = grouped([known("privacy.epsilon=1", "sample.n=5"), known("privacy.epsilon=3", "sample.n=6", epsilon=3)])
    assert [group.series for group in odd] == ["sample.n=5", "sample.n=6"]
    assert [group.name for group in odd] == ["epsilon=1", "epsilon=3"]


def test_a_group_is_as_private_as_its_worst_run():
    worse = replace(known(epsilon=1.25), reasons=("why",))
    group = grouped([known(epsilon=0.75), worse, known(epsilon=1.0)])[0]
    assert (group.epsilon, group.releasable) == (1.25, False)


def test_costs_add_up_for_each_private_set():
    same = [known(epsilon=0.1, delta=1e-5, name=f"r{k}") for k in range(13)]
    ((name, members, *costs),) = together(grouped(same))
    assert (name, set(members), costs) == ("", set(same), [1.3, 0.00013])
    assert "All of these runs use the same private set" in cautions(grouped(same))[0]
    assert "ε = 1.3 at δ = 0.00013." in cautions(grouped(same))[0]
    other = [known("private.data=secret-place", epsilon=2.0, name=f"o{k}") for k in range(2)]
    found = cautions(grouped(same + other))
    assert "13 of these 15 runs use private set 1," in found[0]
    assert "2 of these 15 runs use private set 2," in found[1]
    assert "ε = 4 at" in found[1]
    assert cautions(grouped(same[:1])) == []


def test_no_source_is_called_by_its_path():
    runs = [
        known(f"private.data=/home/jane/patients-{k}", f"private.holdout=/home/jane/kept-{k}", f"public.data=/srv/p{k}")
        for k in "ab"
    ]
    runs += [known("private.holdout=0.5")]
    groups = grouped(runs)
    page = render(runs, internal=True)
    for word in ("jane", "patients", "kept", "/srv"):
        assert word not in page
        assert word not in str(settings_table(groups))
    assert [group.settings["public.data"] for group in groups] == ["pa", "pb", "public"]
    assert [group.settings["private.data"] for group in groups] == ["set 1", "set 2", "set 3"]
    assert [group.settings["holdout"] for group in groups] == ["set 1", "set 2", "0.5"]
    alike = grouped([known("public.data=/a/images"), known("public.data=/b/images")])
    assert [group.name for group in alike] == ["public.data=set 1", "public.data=set 2"]


# --- figures ----------------------------------------------------------------------------------------------


def test_old_evaluations_are_read_and_what_is_missing_is_left_out():
    old = {"holdout_n": 5, "scores": [{"name": "synthetic data", "mean": 0.5, "std": None, "note": "", "values": []}]}
    assert read_measured(old) == {Measure("accuracy", "LeNet", "synthetic data"): 0.5}
    body = evaluation(math.nan, 3.0)
    found = {(m.what, m.by, m.on): value for m, value in read_measured(body).items()}
    assert found == {
        ("accuracy", "LeNet", "released moments alone"): 0.61616,
        ("accuracy", "LeNet", "real private data"): 0.97979,
        ("distance", "FD-slim", "synthetic data"): 3.0,
        ("precision", "FD-slim", "synthetic data"): 0.35353,
        ("distance", "FD-slim", "real private training records"): 2.0202,
        ("label consistency", "", "synthetic data"): 0.26262,
    }
    for empty in ({"quality": None, "label_aware": None}, {"quality": {"features": "FID", "sets": None}}):
        assert read_measured(old | empty) == read_measured(old)


def test_distances_by_different_features_never_share_a_column():
    kinds = (
        ("FD-slim", "aaaa1111ff", 40.0),
        ("FID", "", 8.0),
        ("FD-slim", "bbbb2222ff", 90.0),
        ("FD-slim", "aaaa1111ff", 42.0),
    )
    runs = [
        replace(
            known(f"run.seed={k}"), measured=read_measured(evaluation(0.5, distance, features, digest)), holdout_n=9
        )
        for k, (features, digest, distance) in enumerate(kinds)
    ]
    table = measured_table(grouped(runs))
    assert table is not None
    cells = dict(zip(table.head, table.rows[0], strict=True))
    assert cells["FID"] == "8 (1 of 4 runs)"
    assert cells["FD-slim aaaa1111"] == "41 ± 1.4 (2 of 4 runs)"
    assert cells["FD-slim bbbb2222"] == "90 (1 of 4 runs)"
    page = render(runs, internal=True)
    assert page.count("<h3>FD-slim aaaa1111 against ε</h3>") == page.count("<h3>FID against ε</h3>") == 1


# --- the page ---------------------------------------------------------------------------------------------


def test_editions_differ_in_private_elements_alone(compared):
    _, out = compared
    inside, outside = ((out / name).read_text() for name in ("compare.html", "public/compare.html"))
    assert squeeze("".join(Tree(inside).kept)) == squeeze(outside)
    assert not any("data-edition" in attrs for _, attrs in Tree(outside).tags)
    sections = re.findall(r'<section[^>]*data-edition="private".*?</section>', inside, re.S)
    assert len(sections) == 3
    assert all(MARK in section for section in sections)
    assert stat.S_IMODE((out / "compare.html").stat().st_mode) == 0o600
    body = inside[inside.index("<body>") :]
    assert body.index("Internal edition. Not for publication.") < body.index("<h1>")


def test_public_edition_has_no_private_number_or_word(compared):
    _, out = compared
    inside, outside = ((out / name).read_text() for name in ("compare.html", "public/compare.html"))
    private = (
        "98,765",
        "73.3",
        "82.8",
        "44.2",
        "30.18",
        "61.6",
        "98.0",
        "2.02",
        "35.4",
        "26.3",
        "LeNet",
        "FD-slim",
        MARK,
    )
    for word in private:
        assert word in inside, word
        assert word not in outside, word
    outside_words = re.sub(r"base64,[^\"]*|<style>.*?</style>", "", outside, flags=re.S)
    assert "accuracy" not in outside_words.lower()
    assert "<svg" not in outside


def test_public_edition_is_made_without_seeing_private_figures(made, monkeypatch):
    run, seen = read_run(made / "five-a"), []
    assert run.measured
    monkeypatch.setattr(page, "grouped", lambda runs: seen.extend(runs) or grouped(runs))
    render([run], internal=False)
    assert [(one.measured, one.holdout_n) for one in seen] == [(None, 0)]


def test_page_stands_alone_with_names_for_everything(compared):
    _, out = compared
    page = (out / "compare.html").read_text()
    tree = Tree(page)
    for word in ("http://", "https://", "url(", "@import"):
        assert word not in page
    csp = next(a["content"] for t, a in tree.tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy")
    assert csp == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    ids = [attrs["id"] for _, attrs in tree.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for tag, attrs in tree.tags:
        assert tag not in {"script", "link", "iframe", "object", "embed"}
        assert not any(name.startswith("on") for name in attrs)
        if tag == "img":
            assert (attrs["src"] or "").startswith("data:image/png;base64,")
            assert (attrs["alt"] or "").strip()
        if tag == "svg" and attrs.get("aria-hidden") != "true":
            assert attrs["role"] == "img"
            assert set((attrs["aria-labelledby"] or "").split()) <= set(ids)
        if tag == "a":
            assert (attrs["href"] or "")[1:] in ids
    names = [tag for tag, _ in tree.tags]
    levels = [int(tag[1]) for tag in names if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))
    assert "73.3 ± 1.9" in page[page.index('<desc id="eps0-desc">') : page.index("</desc>")], "charts are said in words"


def test_hostile_names_are_text(made, tmp_path):
    evil = copy(made / "five-a", tmp_path / "<script>alert(1)<|script>\n# \x1b[31mred")
    text = compare([evil], tmp_path / "out")
    page = (tmp_path / "out/compare.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "\x1b" not in text
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("|")}) <= 3
    assert not any(line.startswith("#") for line in text.splitlines())


@pytest.mark.parametrize("n_runs", [2, 24])
def test_page_stays_below_three_megabytes(n_runs, tmp_path):
    """Noise of 128 x 128 colours, the worst case for a PNG, twelve classes of six."""
    draw = np.random.default_rng(0)
    (tmp_path / "synthetic/images").mkdir(parents=True)
    lines = ["file_name,label,text"]
    for k in range(72):
        Image.fromarray(draw.integers(0, 256, (128, 128, 3), dtype=np.uint8)).save(
            tmp_path / f"synthetic/images/{k}.png"
        )
        lines.append(f"images/{k}.png,class {k % 12},a picture")
    (tmp_path / "synthetic/metadata.csv").write_text("\n".join(lines) + "\n")
    classes = tuple(f"class {k}" for k in range(12))
    runs = [replace(known(f"sample.guidance={k}"), release=tmp_path, classes=classes) for k in range(n_runs)]
    page = render(runs, internal=True)
    assert len(page.encode()) < 3_000_000
    assert page.count("<img") == 10 * n_runs
    assert re.search(r"The first 10 classes are shown, and the first \d pictures? of each\.", page)


def test_nothing_measured_and_no_pictures_still_make_a_page():
    for internal in (True, False):
        page = render([known()], internal=internal)
        Tree(page)
        assert "No pictures are shown." in page
        assert ("Nothing was measured in these runs." in page) == internal
        assert "Before you publish" not in page


# --- charts -----------------------------------------------------------------------------------------------

EPSILON = Axis("ε", str, log=True)
SHARE = Axis("accuracy", str, low=0.0, high=1.0)


def places(chart: str) -> list[tuple[float, float]]:
    return [(float(a), float(b)) for a, b in re.findall(r'class="point[^"]*" d="M([\d.]+) ([\d.]+)m', chart)]


def test_equal_ratios_of_epsilon_are_equal_distances():
    values = (0.3, 1.2, 4.8)
    chart = charts.points("c", [Series(tuple(Point(e, 0.5 + e / 10) for e in values))], EPSILON, SHARE, "t", "d")
    (a, _), (b, _), (c, _) = places(chart)
    assert b - a == pytest.approx(c - b, abs=0.2)
    ticks = [float(t) for t in re.findall(r'text-anchor="middle">([\d.]+)<', chart)]
    assert 3 <= len(ticks) <= 7
    assert all(0.2 < tick < 8 for tick in ticks)


def test_bars_reach_as_far_as_the_deviation():
    ends = [Series((Point(1.0, 0.5, None, 0.1), Point(2.0, 0.6), Point(3.0, 0.4)))]
    chart = charts.points("c", ends, EPSILON, SHARE, "t", "d")
    (_, middle), (_, high), (_, low) = places(chart)
    bar = re.search(r'class="error" d="M[\d.]+ ([\d.]+)V([\d.]+)', chart)
    assert bar is not None
    assert [float(bar[1]), float(bar[2])] == pytest.approx([low, high], abs=0.2)
    assert middle == pytest.approx((low + high) / 2, abs=0.2)
    assert chart.count('class="error"') == 1


def test_points_over_one_epsilon_do_not_hide_each_other_and_markers_differ():
    series = [Series((Point(1.0, 0.5, None, 0.1),)) for _ in range(10)]
    chart = charts.points("c", series, EPSILON, SHARE, "t", "d", [(0.9, "real <data>")])
    across = [x for x, _ in places(chart)]
    assert min(b - a for a, b in pairwise(across)) > 3
    assert charts.LEFT < min(across) < max(across) < charts.WIDTH - charts.RIGHT
    assert "real &lt;data&gt;" in chart
    shapes = {re.sub(r"M[\d.]+ [\d.]+", "", path) for path in re.findall(r'class="point[ "].*?/>', chart)}
    assert len(shapes) == 10
    assert len({str(charts.marker(k)) for k in range(10)}) == 10


@pytest.mark.parametrize("value", [0.0, 1.0, 0.5, 1e-9])
@pytest.mark.parametrize("epsilon", [1e-3, 1.0, 1e6])
def test_a_lone_point_lies_inside_its_chart(value, epsilon):
    chart = charts.points("c", [Series((Point(epsilon, value),)), Series(())], EPSILON, SHARE, "t", "d")
    ((x, y),) = places(chart)
    assert charts.LEFT < x < charts.WIDTH - charts.RIGHT
    assert charts.TOP <= y <= charts.HEIGHT - charts.BOTTOM
    assert "nan" not in chart


def test_nearly_equal_values_still_have_ticks():
    near = [Series((Point(7.0, 0.91), Point(7.0001, 0.910001)))]
    chart = charts.points("c", near, EPSILON, SHARE, "t", "d")
    assert re.findall(r'text-anchor="middle">([\d.]+)<', chart)
    ticks = re.findall(r'text-anchor="end">([\d.]+)<', chart)
    assert 2 <= len(ticks) == len(set(ticks)) <= 8


def test_an_epsilon_of_zero_or_infinity_is_in_the_table_but_not_on_the_axis():
    figures = read_measured(evaluation(0.5, 9.0))
    runs = [
        replace(known(f"privacy.epsilon={k}", epsilon=e), measured=figures, holdout_n=9)
        for k, e in ((1, 0.0), (2, 2.0), (3, math.inf))
    ]
    page = render(runs, internal=True)
    Tree(page)
    assert "∞" in page
    chart = page[page.index('aria-labelledby="eps0-title') :]
    assert len(places(chart[: chart.index("</svg>")])) == 1
    assert 'id="against-epsilon"' not in render(runs[:1], internal=True)


@pytest.mark.parametrize("scheme", [0, 1])
def test_markers_stand_out_in_both_schemes(scheme):
    folder = Path(charts.__file__).parents[1] / "templates"
    palettes = [
        re.findall(r":root \{(.*?)\}", (folder / name).read_text(), re.S) for name in ("compare.css", "report.css")
    ]
    colours = dict(re.findall(r"--(\w+): #([0-9a-f]{6})", palettes[0][scheme]))
    ground = luminance(dict(re.findall(r"--([\w-]+): #([0-9a-f]{6})", palettes[1][scheme]))["inside-ground"])
    assert len(colours) == charts.COLOURS
    for colour in colours.values():
        low, high = sorted((luminance(colour), ground))
        assert (high + 0.05) / (low + 0.05) >= 3


# --- in a browser -----------------------------------------------------------------------------------------


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")
def test_browser_mends_nothing_says_nothing_and_never_scrolls_sideways(compared, tmp_path):
    _, out = compared
    browser = Browser(tmp_path / "profile")
    try:
        page = browser.page()
        for name in ("compare.html", "public/compare.html"):
            page.open(out / name)
            assert page.console == []
            assert all(url.startswith(("data:", "file:")) for url in page.requests)
            dom = page.js("document.documentElement.outerHTML")
            assert [tag for tag, _ in Tree(dom).tags] == [tag for tag, _ in Tree((out / name).read_text()).tags]
            for width in (360, 390, 1200):
                page.view(width)
                assert page.js("document.documentElement.scrollWidth") <= width
    finally:
        browser.close()


def test_a_run_knows_when_its_recipe_was_changed(made, tmp_path):
    run = copy(made / "five-a", tmp_path / "run")
    assert read_run(run).notes == ()
    text = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(text.replace("epsilon = 5.0", "epsilon = 1.0"))
    assert "is not the one that its transcript names" in read_run(run).notes[0]
