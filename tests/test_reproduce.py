"""Experiments by their files: what is refused, which rows are one run, what the built-in tables say and show."""

import html.parser
import json
import os
import re
import statistics
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest

from straightdp.arguments import build_parser
from straightdp.cli import main
from straightdp.errors import BadInput
from straightdp.recipe import load
from straightdp.reproduce import slurm
from straightdp.reproduce.experiment import methods, names, read
from straightdp.reproduce.figures import FIGURES
from straightdp.reproduce.jobs import Given, Job, job_of, jobs_of, recipe_source
from straightdp.reproduce.notes import notes_of
from straightdp.reproduce.plots import curves_of
from straightdp.reproduce.render import FORMATS, Picture, latex, markdown, page
from straightdp.reproduce.results import Results
from straightdp.reproduce.tables import Cell, Line, Table, compared, tables_of

RESULTS = Path(__file__).parents[1] / "experiments" / "results"
KEPT = ("table1", "rivals", "captions_release_alone", "audits_small")
FROZEN = Given(frozen=('sd3.model="a/model"',))

GOOD = """
title = "A table"
seeds = [0, 1]
[[panels]]
epsilons = [1, 3]
figures = ["accuracy"]
[[panels.rows]]
name = "first"
recipe = "small"
paper = { accuracy = ["0.5 ± 0.1", "0.6"] }
[[panels.rows]]
name = "second"
method = "dp-merf"
[[panels.rows]]
name = "gain"
ratio = ["second", "first"]
"""


@pytest.fixture
def file(tmp_path):
    def write(text: str, name: str = "mine") -> str:
        path = tmp_path / f"{name}.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def put(folder: Path, job: Job, **figures) -> None:
    """A result as a run would leave it."""
    Results(folder).add("put", job, {"recipe": job.recipe, "settings": list(job.settings), **figures})


# What is refused

BAD = {
    "no TOML": (GOOD + "\n[[", "not valid TOML"),
    "no title": (GOOD.replace('title = "A table"', ""), "key title is missing; add it"),
    "a name": ('name = "mine"\n' + GOOD, "called after its file; leave it out"),
    "an unknown key": ("sedes = [1]\n" + GOOD, "did you mean 'seeds'?"),
    "an unknown key of a panel": (GOOD.replace("epsilons =", "epsilon ="), "did you mean 'epsilons'?"),
    "an unknown key of a row": (GOOD.replace("recipe =", "recipes ="), "did you mean 'recipe'?"),
    "no panels": ('title = "A table"', "panels is missing"),
    "an unknown figure": (GOOD.replace('["accuracy"]\n[', '["acuracy"]\n['), "did you mean 'accuracy'?"),
    "an unknown method": (GOOD.replace('"dp-merf"', '"dp-mref"'), "did you mean 'dp-merf'?"),
    "nothing to run": (GOOD.replace('recipe = "small"', ""), "'first' needs a method, a recipe or a ratio"),
    "two things to run": (GOOD.replace('recipe = "small"', 'recipe = "small"\nmethod = "dp-hp"'), "one of them alone"),
    "a name twice": (GOOD.replace('"second"\nmethod', '"first"\nmethod'), "is no row of the panel"),
    "a row twice": (GOOD.replace('name = "gain"', 'name = "first"'), "two rows are called 'first'"),
    "a budget twice": (GOOD.replace("[1, 3]", "[1, 1]"), "named twice"),
    "a seed twice": (GOOD.replace("seeds = [0, 1]", "seeds = [0, 0]"), "named twice"),
    "a budget of 0": (GOOD.replace("[1, 3]", "[0, 3]"), "panels.0.epsilons.0 is not allowed"),
    "too few of the paper's": (GOOD.replace(', "0.6"', ""), "1 of the paper's values for 2 budgets"),
    "the paper's of what is not shown": (GOOD.replace("{ accuracy", "{ recall"), "'recall' is not shown"),
    "two budgets of a row": (GOOD.replace('"small"', '"small"\nepsilon = 2'), "not from both"),
    "no budget": (GOOD.replace("epsilons = [1, 3]", ""), "from the panel's epsilons or from its own"),
    "a bad setting": (
        GOOD.replace('"small"', '"small"\nsettings = ["net.widht=8"]'),
        "mine: first: recipe key net.widht",
    ),
    "a front of nothing": (GOOD.replace("figures =", 'against = "distance"\nfigures ='), "a front is of one figure"),
    "a front against what is not known": (
        GOOD.replace("figures =", 'plot = ["accuracy"]\nagainst = "distances"\nfigures ='),
        "did you mean 'distance'?",
    ),
    "no such recipe": (GOOD.replace('"small"', '"tiny.toml"'), "mine: first: recipe tiny.toml could not be read"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_refused_in_one_sentence_and_nothing_is_written(what, file, tmp_path, capsys):
    text, expected = BAD[what]
    path = file(text)
    assert main(["reproduce", path, "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tabel1"], "did you mean 'table1'?"),
        (["nowhere.toml"], "nowhere.toml could not be read"),
        (["table1", "table1"], "named twice"),
        (["table1", "--rows", "pixel, unifrom"], "did you mean 'pixel, uniform'?"),
        (["table1", "--epsilons", "2"], "there is no ε = 2; there is 0.3, 1, 3"),
        (["table1", "--set", "privacy.epsilon=2"], "give --epsilons instead"),
        (["table1", "--set", "run.seed=2"], "give --seeds instead"),
        (["table1", "--set", "dpsgd.plan=tha"], "tells rows of this table apart"),
        (["table1", "--set", "dpsgd.steps = 0"], "tells rows of this table apart"),
        (["table1", "--set", "nett.width=2"], "did you mean 'net'?"),
        (["table1", "--processes", "0"], "--processes must be at least 1"),
        (["table1", "--submit"], "--slurm FILE"),
        (["table3"], "no frozen model was named; give --model"),
    ],
)
def test_a_bad_command_is_refused_too(words, expected, tmp_path, capsys):
    assert main(["reproduce", *words, "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line
    assert not (tmp_path / "out").exists()


def test_a_stage_that_a_row_leaves_out_stays_out_whatever_the_others_are_given(tmp_path, capsys):
    given = ("dpsgd.steps=200", "distill.steps = 400")
    words = ["--model", "a/model", "--seeds", "0", "--out", str(tmp_path), "--dry-run"]
    assert main(["reproduce", "table3", *words, *(word for one in given for word in ("--set", one))]) == 0
    assert "table3: uniform DP-SGD, ε = 2" in capsys.readouterr().out
    jobs = jobs_of(read("table3"), seeds=(0,), given=Given(given, FROZEN.frozen))
    steps = {Path(job.recipe).stem: (job.loaded.distill.steps, job.loaded.dpsgd.steps) for job in jobs}
    assert steps["sd3-guide"] == (0, 0)
    assert steps["sd3-lora"] == (0, 200)
    assert steps["sd3-distill"] == (400, 200)


def test_a_file_of_results_that_is_broken_is_named(tmp_path, capsys):
    (tmp_path / "main.json").write_text('{"half": ')
    assert main(["reproduce", "table1", "--print", "--results", str(tmp_path)]) == 2
    assert f"{tmp_path / 'main.json'} could not be read" in capsys.readouterr().err


# Which rows are one run


def test_what_runs_is_told_by_its_recipe_whole_and_not_by_how_that_is_written(tmp_path):
    plain = Job("mnist_paper", ("dpsgd.plan=tha",))
    whole = tmp_path / "whole.toml"
    whole.write_text(plain.loaded.to_toml())
    for same in (
        Job(str(whole)),
        Job("experiments/mnist_paper.toml", ('dpsgd.plan="tha"', "run.seed=0", "privacy.epsilon=1")),
        Job("mnist_paper", ("dpsgd.plan=tha", "evaluate.thorough=off", "run.device=cpu", 'run.title="other"')),
    ):
        assert same.identity == plain.identity
    for other in (
        Job("mnist_paper"),
        Job("mnist_paper", ("dpsgd.plan=tha", "run.seed=1")),
        Job("mnist_paper", ("dpsgd.plan=tha",), "audit"),
        Job("mnist_paper", ("dpsgd.plan=tha",), noise=False),
    ):
        assert other.identity != plain.identity
        assert other.training != plain.training
    drawn = Job("mnist_paper", ("dpsgd.plan=tha", "sample.guidance=2"))
    assert drawn.identity != plain.identity
    assert drawn.training == plain.training
    assert drawn.words(tmp_path)[-1] == plain.words(tmp_path)[-1]  # the pinned key


def test_seeds_and_budgets_pin_noise_of_their_own(tmp_path):
    jobs = jobs_of(read("table1"), ["pixel, uniform"])
    assert len({job.words(tmp_path)[-1] for job in jobs}) == len(jobs) == 9
    assert all("privacy.pinned_key" in job.words(tmp_path)[-1] for job in jobs)


def test_first_seeds_come_first_and_what_is_given_changes_all_but_what_makes_a_row(file):
    experiment = read(file('settings = ["net.depth=7"]\n' + GOOD))
    given = Given(("net.depth=1", "run.method=dp-hp"), ('sd3.model="x"',))
    jobs = jobs_of(experiment, seeds=(4, 2), epsilons=(3,), given=given)
    assert [(job.shown, job.loaded.run.seed) for job in jobs] == [
        ("mine: first", 4),
        ("mine: second", 4),
        ("mine: first", 2),
        ("mine: second", 2),
    ]
    assert {(j.loaded.privacy.epsilon, j.loaded.net.depth, j.loaded.sd3.model) for j in jobs} == {(3.0, 1, "")}
    assert [job.loaded.run.method for job in jobs[:2]] == ["dp-hp", "dp-merf"]


def test_a_recipe_is_looked_for_beside_the_file_that_names_it(file, tmp_path, monkeypatch):
    path = file(GOOD.replace('"small"', '"own.toml"'))
    file("[net]\ndepth = 1\n", "own")
    monkeypatch.chdir(Path(sys.executable).parent)
    assert jobs_of(read(path), ["first"])[0].loaded.net.depth == 1


# The built-in tables


@pytest.mark.parametrize("name", names())
def test_every_built_in_table_loads_with_every_setting_it_names(name):
    experiment = read(name)
    jobs = jobs_of(experiment, given=FROZEN)
    assert jobs
    for job in jobs:
        assert load(recipe_source(job.recipe), job.settings) == job.loaded
        assert Path(recipe_source(job.recipe)).stem == job.recipe
    for panel in experiment.panels:  # no two rows beside each other show the same
        rows = [row for row in panel.rows if row.ratio is None]
        shown = {
            (job_of(experiment, panel, row, e, 0, FROZEN).identity, row.of) for row in rows for e in panel.budgets(row)
        }
        assert len(shown) == sum(len(panel.budgets(row)) for row in rows)


def test_every_method_is_used_and_the_tables_are_those_of_the_paper():
    used = {row.method for name in names() for _, row in read(name).rows()}
    assert set(methods()) <= used
    wanted = "table1 table2 fid precision-recall label-aware text audits table3 fashion share t0 accuracy-eps"
    assert set(wanted.split()) <= set(names())


def test_tables_that_show_the_same_run_give_the_same_value_of_the_paper():
    said: dict[tuple, set[str]] = {}
    for name in names():
        experiment = read(name)
        for panel, row in experiment.rows():
            if row.ratio is not None or "alone" in row.name:  # there the paper's values are of other runs
                continue
            for figure, values in row.paper.items():
                for epsilon, value in zip(panel.budgets(row), values, strict=True):
                    identity = job_of(experiment, panel, row, epsilon, 0, FROZEN).identity
                    said.setdefault((identity, row.of, figure), set()).add(value.partition(" ")[0])
    assert all(len(values) == 1 for values in said.values()), said
    assert sum(len(values) for values in said.values()) > 150


def test_tables_share_their_runs():
    main_runs = {job.identity for job in jobs_of(read("table1"))}
    for name in ("precision-recall", "label-aware"):
        assert {job.identity for job in jobs_of(read(name))} <= main_runs
    extra = [job for job in jobs_of(read("fid")) if job.identity not in main_runs]
    assert {job.loaded.privacy.epsilon for job in extra} == {10.0}
    guided = jobs_of(read("t0"), epsilons=(1.2,))
    assert len({job.training for job in guided}) == 1 < len({job.identity for job in guided}) == len(guided)


def test_no_figure_that_was_kept_is_lost(tmp_path, monkeypatch):
    """Every result is found by a row of a table, from whatever folder."""
    monkeypatch.chdir(tmp_path)
    results = Results(RESULTS)
    found = [results.find(job) for name in names() for job in jobs_of(read(name), given=FROZEN) if results.find(job)]
    for file in KEPT:
        for key, body in json.loads((RESULTS / f"{file}.json").read_text()).items():
            assert body in found, f"{file}: {key}"


def test_the_table_shows_what_was_kept(tmp_path, capsys):
    kept = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in ("table1", "rivals")}
    rows = {"pixel, THA + moments": "pixel_THA_moments_eps1", "latent, uniform": "latent_uniform_eps1"}
    alone = {key: kept["table1"][key] for key in rows.values()}  # without other seeds
    alone["rival"] = kept["rivals"]["dp-merf_eps10_seed0"]
    (tmp_path / "kept.json").write_text(json.dumps(alone))
    assert main(["reproduce", "table1", "fid", "--print", "--results", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for row, key in rows.items():
        (line,) = (line for line in text.splitlines() if line.startswith(f"| {row} |"))
        assert f" {alone[key]['accuracy']['synthetic data']:.3f} (" in line.split("|")[4]
    distance = alone["rival"]["quality"]["sets"][0]["distance"]
    lines = [line for line in text.splitlines() if line.startswith("| DP-MERF |")]
    assert f" {distance:.1f} (97.4 ± 1.9; " in lines[1].split("|")[5]


def test_names_are_listed_with_their_titles(capsys):
    assert main(["reproduce"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == names()
    assert all(read(name).title in line for name, line in zip(names(), lines, strict=True))


# Tables


@pytest.mark.parametrize("values", [[0.5], [0.25, 0.5], [0.1, 0.4, 0.7]])
def test_seeds_are_shown_by_their_mean_and_spread_and_compared_with_the_paper(values):
    n, centre = len(values), sum(values) / len(values)
    spread = (sum((v - centre) ** 2 for v in values) / (n - 1)) ** 0.5 if n > 1 else None
    cell = compared(values, "0.600 ± 0.010", 3)
    assert cell.ours == f"{centre:.3f}" + ("" if spread is None else f" ± {spread:.3f}")
    assert cell.difference.replace("−", "-") == f"{centre - 0.6:+.3f}"


@pytest.mark.parametrize("paper", ["0/50", "≈64", "3.0–3.2 ×", "+27%", ""])
def test_what_is_no_number_has_no_difference(paper):
    assert compared([0.5], paper, 3) == Cell("0.500", paper)


def test_a_panel_is_of_the_seeds_that_are_there(file, tmp_path):
    experiment = read(file(GOOD))
    jobs = jobs_of(experiment)
    for job in jobs:
        if job.loaded.privacy.epsilon == 1:
            value = 0.5 + 0.1 * job.loaded.run.seed + (0.2 if "second" in job.shown else 0)
            put(tmp_path, job, accuracy={"synthetic data": value})
    (table,) = tables_of(experiment, Results(tmp_path), (), Given())
    first, second, gain = table.lines
    assert first.cells == (Cell("0.550 ± 0.071", "0.5 ± 0.1", "+0.050"), Cell("not yet", "0.6"))
    assert second.cells[0].ours == "0.750 ± 0.071"
    assert gain.cells == (Cell(f"{0.75 / 0.55:.2f} ×"), Cell("not yet"))
    (panel,) = experiment.panels
    assert curves_of(experiment, panel, "accuracy", Results(tmp_path), (), Given()) == {
        "first": [(1.0, pytest.approx(0.55), pytest.approx(statistics.stdev([0.5, 0.6])))],
        "second": [(1.0, pytest.approx(0.75), pytest.approx(statistics.stdev([0.7, 0.8])))],
    }


def test_of_two_results_the_one_with_the_figures_is_shown(file, tmp_path):
    job = jobs_of(read(file(GOOD)))[0]
    quality = {"features": "FD", "sets": [{"name": "synthetic data", "distance": 7.0}]}
    put(tmp_path / "a", job, accuracy={"synthetic data": 0.1})
    put(tmp_path / "b", job, accuracy={"synthetic data": 0.2}, quality=quality)
    both = {k: v for f in "ab" for k, v in [(f, *json.loads((tmp_path / f / "put.json").read_text()).values())]}
    (tmp_path / "put.json").write_text(json.dumps(both))
    results = Results(tmp_path)
    assert FIGURES["distance"].of(results.find(job, ("accuracy", "distance"))) == 7.0
    assert FIGURES["accuracy"].of(results.find(job, ("accuracy",))) == 0.1
    assert FIGURES["recall"].of(results.find(job)) is None


def test_again_also_runs_what_lacks_a_figure(file, tmp_path, capsys):
    path = file(GOOD.replace('["accuracy"]\n[', '["accuracy", "distance"]\n['))
    quality = {"features": "FD", "sets": [{"name": "synthetic data", "distance": 7.0}]}
    first, second, *_ = jobs_of(read(path), epsilons=(1,))
    put(tmp_path, first, accuracy={"synthetic data": 0.5})
    put(tmp_path, second, accuracy={"synthetic data": 0.5}, quality=quality)
    words = ["reproduce", path, "--dry-run", "--results", str(tmp_path), "--epsilons", "1", "--seeds", "0"]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("0 to run")
    assert main([*words, "--again"]) == 0
    assert first.name in (out := capsys.readouterr().out)
    assert out.startswith("1 to run")


NASTY = 'a|b & <i>50% of "$x_1"</i> #{~^} \\ ε ± –'
TABLE = Table(NASTY, (NASTY, "h"), (Line(NASTY, (Cell(NASTY, NASTY, "+1"), Cell("2")), block=NASTY),), ((NASTY, 2),))


def test_markdown_keeps_its_columns():
    lines = markdown(NASTY, [TABLE], [NASTY]).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 4
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {4}


def test_latex_has_no_character_that_would_act():
    text = latex(NASTY, [TABLE], [NASTY])
    body = text.partition(r"\toprule")[2].partition(r"\bottomrule")[0]
    for row in body.replace(r"\midrule", "").split(r"\\" + "\n"):
        bare = re.sub(r"\\multicolumn\{\d\}\{[@{}lc]+\}|\\emph|\\text\w+\{\}|\\[&%$#_{}]", "", row)
        assert not re.search(r"[%#_~^]", bare), row
        assert bare.count("&") in (0, 1, 2)
        assert bare.count("$") % 2 == 0
        assert bare.count("{") == bare.count("}")
    assert "ε" not in text
    assert "±" not in text


@pytest.mark.parametrize("name", names())
def test_latex_needs_no_letters_that_it_does_not_know(name, tmp_path):
    experiment = read(name)
    shared = (experiment, Results(tmp_path), (), FROZEN)
    text = latex(experiment.title, tables_of(*shared), notes_of(*shared))
    assert set(re.findall(r"[^\x00-\x7f]", text)) <= {"é"}
    assert text.count("{") == text.count("}")


class Reader(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.cells: list[str] = []
        self.pictures: list[tuple] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag == "img":
            self.pictures.append((dict(attrs)["src"], dict(attrs)["alt"]))
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.cells[-1] += data


def test_html_says_what_was_said_and_nothing_of_it_acts():
    reader = Reader()
    reader.feed(page(NASTY, [TABLE], [NASTY], [("x.svg", Picture(b"", NASTY))]))
    assert reader.open == []
    assert reader.pictures == [("x.svg", NASTY)]
    assert "i" not in reader.tags
    assert reader.cells == ["", NASTY, "", NASTY, "h", NASTY, NASTY, f"{NASTY}paper {NASTY}; +1", "2"]


def test_every_format_is_printed(capsys):
    starts = {"markdown": "# Table 1", "latex": r"\begin{table*}", "html": "<!doctype html>"}
    assert starts.keys() == FORMATS.keys()
    for name, start in starts.items():
        assert main(["reproduce", "table1", "--print", "--format", name, "--results", str(RESULTS)]) == 0
        assert capsys.readouterr().out.startswith(start)


# Results, Slurm


def test_writers_beside_each_other_lose_nothing(tmp_path):
    jobs = [Job("small", (f"run.seed={k}",)) for k in range(24)]
    for job in jobs:
        job.identity  # noqa: B018  (computed beforehand, so that the writing is what overlaps)
    writers = [
        threading.Thread(target=lambda part=part: [put(tmp_path, job) for job in part])
        for part in (jobs[::2], jobs[1::2])
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(json.loads((tmp_path / "put.json").read_text())) == 24
    assert all(Results(tmp_path).find(job) for job in jobs)


def tasks_of(script: Path) -> list[list[str]]:
    """What each task of an array job would be told, by running the script with an echo in Python's place."""
    last = int(re.findall(r"--array=0-(\d+)", script.read_text())[0])
    told = []
    for k in range(last + 1):
        surroundings = {"SLURM_ARRAY_TASK_ID": str(k), "PATH": os.defpath}
        done = subprocess.run(["bash", str(script)], env=surroundings, capture_output=True, text=True, check=True)
        told.append(done.stdout.split("\0")[:-1])
    return told


@pytest.fixture
def echo(tmp_path, monkeypatch) -> None:
    program = tmp_path / "it's an echo"
    program.write_text("#!/bin/sh\nfor word; do printf '%s\\0' \"$word\"; done\n")
    program.chmod(0o755)
    monkeypatch.setattr(slurm.sys, "executable", str(program))


def test_slurm_gets_every_missing_row_once_and_rows_of_one_model_together(file, echo, tmp_path, capsys):
    path, script, out = file(GOOD.replace('"second"', '"sec\'ond $HOME"')), tmp_path / "array.sh", tmp_path / "o u t"
    given, epsilons = Given(("net.mlp_ratio=2",)), (1, 3, 1.2)
    wanted = [job for name in (path, "t0") for job in jobs_of(read(name), (), epsilons, (0,), given)]
    put(out / "private", wanted.pop(0), accuracy={})
    words = ["reproduce", path, "t0", "--seeds", "0", "--out", str(out), "--set", "net.mlp_ratio=2"]
    assert main([*words, "--epsilons", *map(str, epsilons), "--slurm", str(script)]) == 0
    assert f"sbatch {script}" in capsys.readouterr().out
    every, models = [], []
    for told in tasks_of(script):
        assert told[:2] == ["-m", "straightdp"]
        options = build_parser().parse_args(told[2:])
        assert (options.out, tuple(options.settings)) == (out, given.settings)
        (name,) = options.names
        jobs = jobs_of(read(name), options.rows, options.epsilons, options.seeds, given)
        assert all(a.training == b.training for a, b in pairwise(jobs))
        every += jobs
        models.append(jobs[0].training)
    assert sorted(job.identity for job in every) == sorted(job.identity for job in wanted)
    assert len(set(models)) == len(models) < len(every)


def test_sbatch_is_called_when_asked_for(file, tmp_path, monkeypatch, capsys):
    words = ["reproduce", file(GOOD), "--out", str(tmp_path / "out"), "--slurm", str(tmp_path / "array.sh"), "--submit"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(words) == 2
    assert "sbatch is not on this machine's PATH" in capsys.readouterr().err
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f'#!/bin/sh\n[ "$1" = "{tmp_path / "array.sh"}" ] && echo "Submitted batch job 7"\n')
    sbatch.chmod(0o755)
    assert main(words) == 0
    assert "8 rows; Submitted batch job 7" in capsys.readouterr().out
    sbatch.write_text("#!/bin/sh\necho no account >&2; exit 1\n")
    assert main(words) == 2
    assert "no account" in capsys.readouterr().err
    with pytest.raises(BadInput, match="no account"):
        slurm.submit(tmp_path / "array.sh")


def test_a_dry_run_says_what_would_run_and_of_table3_what_it_takes(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["reproduce", "table3", "--dry-run", "--seeds", "0", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "12 to run" in text  # thirteen rows: the one without tuning is read from the guidance run
    assert "| moment guidance | 11.4 | 0.35 | 171,360 |" in text
    assert not out.exists()


def test_what_a_frozen_model_takes_is_told_by_the_recipe_and_not_by_the_tables_name(file, tmp_path, capsys):
    frozen = GOOD.replace('"second"', '"moment guidance"').replace('method = "dp-merf"', 'method = "sd3-guide"')
    for text, told in ((GOOD.replace('"first"', '"moment guidance"'), False), (GOOD, False), (frozen, True)):
        assert main(["reproduce", file(text), "--dry-run", "--out", str(tmp_path)]) == 0
        assert ("| moment guidance | 11.4 |" in capsys.readouterr().out) == told


def test_a_result_is_of_the_recipe_that_was_run_whatever_its_file_says_today(tmp_path):
    job = Job("small")
    run = job.loaded.model_dump(mode="json")
    older = {name: dict(part) for name, part in run.items()}
    older["release"].pop("centre")  # from before there was such a choice
    other = {name: dict(part) for name, part in run.items()}
    other["dpsgd"]["steps"] += 1
    for resolved, found in ((run, True), (older, True), (other, False)):
        body = {"recipe": "small", "settings": [], "resolved": resolved}
        (tmp_path / "some.json").write_text(json.dumps({"row": body}))
        assert (Results(tmp_path).find(job) is not None) == found
