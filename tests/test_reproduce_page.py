"""Results shown: the page in docs/ follows the results, fronts and their labels, and what is said of the runs."""

import json
import random
import re
import runpy
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from straightdp.recipe import load
from straightdp.reproduce import fronts, labels, plots
from straightdp.reproduce.experiment import names, read
from straightdp.reproduce.figures import INTERNAL
from straightdp.reproduce.jobs import Given, Job, job_of, recipe_source
from straightdp.reproduce.notes import notes_of
from straightdp.reproduce.results import Results

ROOT = Path(__file__).parents[1]
RESULTS, DOCS = ROOT / "experiments" / "results", ROOT / "docs"

FRONT = """
title = "A front"
seeds = [0, 1]
[[panels]]
epsilons = [1, 3]
figures = ["accuracy", "distance"]
plot = ["accuracy"]
against = "distance"
[[panels.rows]]
block = "Old"
name = "one"
method = "dp-merf"
paper = { accuracy = ["0.5 ± 0.1", ""], distance = ["200", "150"] }
[[panels.rows]]
name = "two"
method = "dp-hp"
[[panels.rows]]
block = "New"
name = "three"
recipe = "small"
paper = { accuracy = ["0.7", "0.8"], distance = ["60 ± 2", "≈50"] }
"""


@pytest.fixture(scope="module")
def script() -> dict:
    """experiments/results_page.py, which imports from its own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "experiments")
        return runpy.run_path(str(ROOT / "experiments" / "results_page.py"))


@pytest.mark.parametrize("taker", ["mnist_in_pixels", "best-mnist"])
def test_a_recipe_takes_what_the_rule_says(tmp_path, taker):
    """Smallest distance within 0.01 of the best accuracy; the result's own settings are what is set for it."""
    script = runpy.run_path(str(ROOT / "experiments" / "choose.py"))
    experiment = read(str(ROOT / "experiments" / "choice.toml"))
    table = experiment.panels[script["TAKERS"][taker]]
    results = Results(tmp_path)
    figures = [(0.9701, 30.0), (0.98, 40.0), (0.9702, 20.0), (0.9699, 10.0), (0.5, 5.0)][: len(table.rows)]
    for row, (accuracy, distance) in zip(table.rows, figures, strict=True):
        job = job_of(experiment, table, row, *table.epsilons, 0)
        sets = [{"name": "synthetic data", "distance": distance}]
        body = {"recipe": job.recipe, "settings": job.settings, "accuracy": {"synthetic data": accuracy}}
        results.add("choice", job, body | {"quality": {"sets": sets}})
    for found in (results, Results(tmp_path)):
        taken = script["choose"](list(script["candidates"](found, taker)))
        assert taken.job.row == table.rows[2].name
    said = script["settings"](taken.job, taker)
    assert any(setting.startswith("sample.pull=") for setting in said)
    elsewhere = tuple(f"{key}=7" for key in script["ELSEWHERE"])
    wanted = load(recipe_source(taker), (*said, *elsewhere))
    chosen = load(taken.job.recipe, (*taken.job.settings, *elsewhere))
    for section in script["CHOSEN"]:
        assert getattr(wanted, section) == getattr(chosen, section)


@pytest.fixture(scope="module")
def page(script):
    return script["page"]


@pytest.fixture(scope="module")
def made(page) -> dict[str, bytes]:
    return page(RESULTS)


def description(svg: bytes) -> str:
    """What a picture says that it shows."""
    return next(part.text for part in ElementTree.fromstring(svg).iter() if part.tag.endswith("}description"))


# The page


def test_the_page_is_what_the_results_give(made):
    """If this fails: python experiments/results_page.py, and read whether its words still hold."""
    assert made.keys() >= {"results.md", "pareto.svg", "accuracy-eps.svg"}
    assert (DOCS / "results.md").read_text(encoding="utf-8") == made["results.md"].decode()
    for name in made.keys() - {"results.md"}:  # coordinates may differ in a digit where matplotlib does
        assert description((DOCS / name).read_bytes()) == description(made[name])


def test_the_readme_shows_what_the_results_give(script):
    """If this fails: python experiments/results_page.py."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert script["readme"](RESULTS, text) == text
    assert "| demo, ε = 3" in text


CHANGES = {  # by file: where a value lies, another one, and how the page must show it
    "best": (("best-mnist-eps0.3-seed0-33eeeb62", "seconds", "pretrain"), 5400.0, "cores: 90 minutes to"),
    "choice": (
        ("pseudo_kana-eps7-seed0-a83ab60b", "quality", "sets", 0, "distance"),
        777.0,
        "| from 0.3, pull 1.4 | 0.815 | 0.763 | 777.0 |",
    ),
    "table1": (("latent_uniform_eps1", "accuracy", "synthetic data"), 0.98123, "| 0.981 (0.709 ± 0.016; +0.272) |"),
    "rivals": (("dp-hp_eps1_seed0", "commit"), "fedcba9", "| commit fedcba9 |"),
    "table2": (("mnist_paper-eps0.3-seed0-0c628f32", "pretrain_loss"), 0.59876, "clamp adds 98.8 %"),
    "captions_release_alone": (("mnist_pooled", "accuracy", "synthetic data"), 0.98234, "| 0.982 (0.464 ± 0.049; "),
    "mixture": (("runs", "tha_eps3_seed0", "W2"), 0.98345, "| 0.983 |"),
    "judge_h200": (("against mnist:test", "noise", "recall"), 0.98456, "| 0.985 |"),
    "judge_cpu": (("cpu_seconds",), 99 * 60, "(99 min of CPU time)"),
    "audit_demo": (("audits", "demo", "leaky", "loss", "auc"), 0.98567, "| 0.986 ("),
    "audits": (("mnist_paper-audit-eps1-seed0-a5b6e0ab", "leaky", "loss", "auc"), 0.97567, "| 0.976 ("),
    "fid": (("mnist_paper-eps10-seed0-0266d25a", "seconds", "match"), 987.0, " to 991 s for DP-MERF"),
    "audits_small": (("small-3", "honest", "from_sums", "bound"), 0.93578, "0.936"),
    "figure2_pixel": (("fashion-mnist:test", "knee"), 0.98789, "| pixels | Fashion-MNIST | 0.988 |"),
    "figure2_latent": (("kmnist:test", "knee"), 0.98765, "| the code | KMNIST | 0.988 |"),
    "mnist_epsilon1": (("accuracy", "released moments alone", "mean"), 0.98891, "| 0.989 |"),
    "fashion_epsilon1": (("accuracy", "synthetic data"), 0.98991, "| 0.990 |"),
    "covariance_shrinkage": (("rule",), "keep = 1", "`keep = 1`"),
    "sd3_prior": (("images", "private"), 98765, "Private are 98,765 flowers"),
    "table3": (
        ("sd3-guide-eps2-seed0-d6200af0", "accuracy", "synthetic data"),
        0.98321,
        "| 0.983 (0.625 ± 0.005; +0.358) |",
    ),
    "sd3_prior_again": (("transformer", "curve", -1, "unseen"), 0.98654, "ends at 0.987"),
    "table3_again": (("sd3-guide-eps2-seed0-34724d01", "accuracy", "synthetic data"), 0.98432, "gives 0.984 at"),
    "demo": (("runs", 0, "accuracy", "real private data"), 0.99123, "| 0.991 |"),
}


def test_results_that_change_change_the_page(page, made, tmp_path):
    for file, (where, value, _) in CHANGES.items():
        body = json.loads((RESULTS / f"{file}.json").read_text())
        if file == "table1":  # and no other seeds of it
            body = {name: run for name, run in body.items() if name == where[0] or "latent" not in name}
        inner = body
        for key in where[:-1]:
            inner = inner[key]
        inner[where[-1]] = value
        (tmp_path / f"{file}.json").write_text(json.dumps(body))
    before, after = made["results.md"].decode(), page(tmp_path)["results.md"].decode()
    for file, (_, _, shown) in CHANGES.items():
        assert shown not in before, file
        assert shown in after, file


def test_the_page_shows_every_table_and_marks_it():
    words = (ROOT / "experiments" / "results_page.md.jinja").read_text(encoding="utf-8")
    asked = re.findall(r'table\("([a-z0-9-]+)"\)', words)
    assert sorted(asked) == sorted(set(names()) - {"grids"})  # whose pictures need the runs' folders
    text = (DOCS / "results.md").read_text(encoding="utf-8")
    for section in text.split("\n## ")[1:]:
        if re.search(r"^\| [^|]+ \| 0\.\d", section, re.MULTILINE) and not section.startswith("Figure 2"):
            assert INTERNAL in section, section.splitlines()[0]  # Figure 2 is of public sets


def test_links_of_the_page_lead_somewhere():
    text = (DOCS / "results.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert {"pareto.svg", "accuracy-eps.svg"} <= set(links)
    assert [link for link in links if not (DOCS / link).exists()] == []


# What is said of the runs


def put(folder: Path, job: Job, commit: str, device: str, **figures) -> None:
    about = {"recipe": job.recipe, "settings": list(job.settings), "commit": commit, "device": device}
    Results(folder).add("put", job, about | figures)


@pytest.fixture
def experiment(tmp_path):
    (tmp_path / "front.toml").write_text(FRONT, encoding="utf-8")
    return read(str(tmp_path / "front.toml"))


@pytest.fixture
def measured(experiment, tmp_path):
    """Rows one and three at ε = 1, one of them twice; row two without a distance."""
    (panel,) = experiment.panels
    for row, seed, y, x, commit in (
        (0, 0, 0.50, 100.0, "aaa"),
        (0, 1, 0.54, 120.0, "bbb"),
        (1, 0, 0.90, None, "bbb"),
        (2, 0, 0.80, 40.0, "bbb"),
    ):
        sets = [{"name": "synthetic data", "distance": x}]
        quality = {"quality": {"features": "FD-slim", "sets": sets}} if x else {}
        job = job_of(experiment, panel, panel.rows[row], 1, seed)
        put(tmp_path, job, commit, "a card", accuracy={"synthetic data": y}, **quality)
    return Results(tmp_path)


def test_notes_tell_how_much_was_measured_and_where(experiment, measured, tmp_path):
    notes = notes_of(experiment, measured, (), Given())
    assert "Measured: 3 of 6 rows and budgets (2 with 1 seed, 1 with 2 seeds)." in notes
    assert "Runs of each commit and device: commit aaa, a card (1); commit bbb, a card (3)." in notes
    assert notes[-1] == INTERNAL
    empty = notes_of(experiment, Results(tmp_path / "nothing"), (), Given())
    assert "Measured: 0 of 6 rows and budgets." in empty
    assert not any("commit" in note for note in empty)


# Fronts


@pytest.mark.parametrize("seed", range(20))
def test_on_the_front_is_what_nothing_is_better_than(seed):
    draw = random.Random(seed)
    places = [(float(draw.randint(1, 8)), draw.randint(1, 8) / 8) for _ in range(12)]

    def beaten(a):
        return any(b != a and b[0] <= a[0] and b[1] >= a[1] for b in places)

    assert fronts.front(places) == sorted({a for a in places if not beaten(a)})


def test_marks_are_means_over_seeds_beside_what_the_paper_prints(experiment, measured):
    (panel,) = experiment.panels
    marks, name = fronts.marks_of(experiment, panel, measured, (), Given())
    assert name == "FD-slim"
    assert [(m.row, m.family, m.epsilon, m.ours, m.paper) for m in marks] == [
        ("one", "Old", 1, pytest.approx((110.0, 0.52)), (200.0, 0.5)),
        ("three", "New", 1, (40.0, 0.8), (60.0, 0.7)),
    ]  # no distance of ours of row two, no accuracy or no number of the paper's at ε = 3


def test_a_front_is_drawn_where_its_marks_are(experiment, measured):
    (panel,) = experiment.panels
    marks, name = fronts.marks_of(experiment, panel, measured, (), Given())
    first, second = fronts.figure(panel, marks, name).axes
    drawn = {
        (round(float(x), 6), round(float(y), 6)): (
            to_hex(line.get_markerfacecolor()),
            to_hex(line.get_markeredgecolor()),
        )
        for line in first.lines
        if line.get_marker() == "o"
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    }
    old, new = fronts.COLOURS[:2]
    white = "#ffffff"
    assert drawn == {(110, 0.52): (old, old), (40, 0.8): (new, new), (200, 0.5): (white, old), (60, 0.7): (white, new)}
    assert first.get_xscale() == "log"
    assert not second.lines
    assert {text.get_text() for text in first.texts} == {"one", "three"}


def test_a_picture_says_in_words_what_it_shows_and_is_the_same_each_time(experiment, measured):
    (picture,) = plots.draw(experiment, measured, (), Given())
    assert "On our front at ε = 1: three (0.800 at 40.0)." in picture.alt
    assert "On the paper's front at ε = 1: three (0.700 at 60.0)." in picture.alt
    assert "On our front at ε = 3: nothing yet." in picture.alt
    told = description(picture.data)
    assert told.startswith(picture.alt)
    assert "one, ε = 1: 0.520 at 110.0; the paper's 0.500 at 200.0." in told
    assert told.endswith(INTERNAL)
    texts = {part.text for part in ElementTree.fromstring(picture.data).iter() if part.tag.endswith("}text")}
    assert {"one", "three", "ε = 1", "Old", "New", INTERNAL} <= texts
    assert plots.draw(experiment, measured, (), Given())[0].data == picture.data


def test_nothing_measured_is_no_picture(experiment, tmp_path):
    assert plots.draw(experiment, Results(tmp_path / "nothing"), (), Given()) == []


@pytest.mark.parametrize("seed", range(3))
def test_labels_keep_off_marks_and_each_other(seed):
    """As measured by what draws them."""
    draw = random.Random(seed)
    marks = [(0.1 + 0.8 * draw.random(), 0.1 + 0.8 * draw.random()) for _ in range(12)]
    figure = Figure(figsize=(6, 4))
    canvas, axes = FigureCanvasAgg(figure), figure.add_axes((0.1, 0.1, 0.8, 0.8))
    axes.set(xlim=(0, 1), ylim=(0, 1))
    labels.place(axes, [(at, f"a name, number {k}", "black") for k, at in enumerate(marks)], marks)
    canvas.draw()
    letters = [Text.get_window_extent(text, canvas.get_renderer()) for text in axes.texts]  # without what leads back
    assert len(letters) == 12
    for a, b in combinations(letters, 2):
        assert not a.overlaps(b)
    for box in letters:
        assert not any(box.contains(*axes.transData.transform(mark)) for mark in marks)
        assert axes.bbox.x0 <= box.x0
        assert box.x1 <= axes.bbox.x1
