"""The report: what each edition may show, that the page stands alone, and odd facts still make a page."""

from __future__ import annotations

import base64
import dataclasses
import html
import io
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from straightdp.report import (
    AssumptionFact,
    ClassPictures,
    MechanismFact,
    PrivateFacts,
    PublicFacts,
    Score,
    dataset_card,
    render,
    words,
)

VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
MARK = "Computed from private records without noise. Not for publication."
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")


def pictures(n_classes: int, n: int, side: int = 28, channels: int = 1, seed: int = 0) -> tuple[ClassPictures, ...]:
    """Uniform noise: the worst case for a PNG."""
    draw = np.random.default_rng(seed).integers(0, 256, (n_classes, n, side, side, channels), dtype=np.uint8)
    return tuple(ClassPictures(f"class {i}", images) for i, images in enumerate(draw))


def public_facts(n_classes: int = 3, **changes) -> PublicFacts:
    facts = PublicFacts(
        title="Digits",
        version="0.1.0",
        epsilon_budget=1.0,
        epsilon=0.99941,
        delta=1e-5,
        unit="one record",
        adjacency="add or remove one record",
        n=60_000,
        mode="tight",
        accountant="PLD",
        releasable=True,
        why_not="",
        mechanisms=(
            MechanismFact("means", "class means", "gaussian_sum", 1.118, 15.0, None, 1, 1, 0.29),
            MechanismFact("dpsgd", "clipped gradients", "noisy_gradient", 0.5, 2.77, 0.034, 300, 300, 0.72),
        ),
        assumptions=(AssumptionFact("N", "60000", "recipe"),),
        classes=tuple(f"class {i}" for i in range(n_classes)),
        synthetic=pictures(n_classes, 4),
        public=pictures(n_classes, 4, seed=1),
        moments=pictures(n_classes, 1, seed=2),
        n_synthetic=10_000,
        stages=(("pretrain", 1340.0), ("train", 77.0)),
        files=(("transcript.jsonl", 48_211, "the transcript"),),
    )
    return dataclasses.replace(facts, **changes)


def private_facts(steps: int = 30) -> PrivateFacts:
    """Numbers and words that could come from nowhere else on the page."""
    wave = 31.4159 + np.sin(np.arange(steps))
    norms = {key: list(wave * k) for key, k in (("q10", 0.5), ("q50", 1.0), ("q90", 2.0))}
    return PrivateFacts(
        scores=(
            Score("SENTINEL-score", 0.8642, 0.0137, "SENTINEL-note"),
            Score("reference", 0.7531, None, ""),
        ),
        gradient_norms={
            "step": list(range(steps)),
            **norms,
            "clip_fraction": [0.6271] * steps,
            "batch": [2037] * steps,
        },
        holdout_n=98_765,
        notes=("SENTINEL-remark",),
    )


class Tree(HTMLParser):
    """Checks nesting while reading; keeps every tag, all text, and the page without its private elements."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=False)
        self.stack: list[str] = []
        self.hidden: int | None = None
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.kept: list[str] = []
        self.feed(page)
        self.close()
        assert self.stack == [], f"left open: {self.stack}"

    def keep(self, text: str) -> None:
        if self.hidden is None:
            self.kept.append(text)

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> repeats an attribute"
        self.tags.append((tag, dict(attrs)))
        private = ("data-edition", "private") in attrs
        assert not (private and tag in VOID)
        if private and self.hidden is None:
            self.hidden = len(self.stack)
        self.keep(self.get_starttag_text() or "")
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.keep(self.get_starttag_text() or "")

    def handle_endtag(self, tag):
        assert self.stack, f"</{tag}> closes nothing"
        assert self.stack.pop() == tag, f"</{tag}> closes something else"
        self.keep(f"</{tag}>")
        if self.hidden == len(self.stack):
            self.hidden = None

    def handle_data(self, data):
        self.keep(data)

    def handle_entityref(self, name):
        self.keep(f"&{name};")

    def handle_charref(self, name):
        self.keep(f"&#{name};")

    def handle_decl(self, decl):
        self.keep(f"<!{decl}>")


def squeeze(text: str) -> str:
    return re.sub(r"\s+", "", text)


# --- the two editions -------------------------------------------------------------------------------------


def test_internal_edition_without_its_private_elements_is_the_public_edition():
    public = public_facts()
    outside, inside = render(public, None), render(public, private_facts())
    assert squeeze("".join(Tree(inside).kept)) == squeeze(outside)
    assert not any("data-edition" in attrs for _, attrs in Tree(outside).tags)
    assert any("data-edition" in attrs for _, attrs in Tree(inside).tags)


def test_public_edition_has_no_private_number_or_word():
    public, private = public_facts(), private_facts()
    outside, inside = render(public, None), render(public, private)
    sentinels = ("SENTINEL", "86.4", "75.3", "98,765", "31.4", "2,037", MARK)
    for sentinel in sentinels:
        assert sentinel in inside, sentinel
        assert sentinel not in outside, sentinel


def test_every_private_section_says_so_and_a_banner_comes_first():
    page = render(public_facts(), private_facts())
    body = page[page.index("<body>") :]
    assert body.index('class="banner"') < body.index("<h1>")
    sections = re.findall(r'<section[^>]*data-edition="private".*?</section>', page, re.S)
    assert len(sections) == 2
    assert all(MARK in section for section in sections)
    assert page.count(MARK) == 2


def test_other_private_values_leave_the_public_elements_alone():
    public = public_facts()
    other = PrivateFacts((), {}, 0, ())
    assert squeeze("".join(Tree(render(public, other)).kept)) == squeeze(render(public, None))


# --- the page ---------------------------------------------------------------------------------------------


def test_page_is_well_formed_with_landmarks_headings_and_alternatives():
    page = render(public_facts(), private_facts())
    tree = Tree(page)
    names = [tag for tag, _ in tree.tags]
    for once in ("html", "title", "h1", "main", "header", "footer", "nav"):
        assert names.count(once) == (1 if once != "title" else 1 + names.count("svg")), once
    assert ("html", {"lang": "en"}) in tree.tags
    images = [attrs for tag, attrs in tree.tags if tag == "img"]
    assert len(images) == 9
    assert all((attrs["alt"] or "").strip() and attrs["width"] and attrs["height"] for attrs in images)
    charts = [attrs for tag, attrs in tree.tags if tag == "svg"]
    assert len(charts) == 6
    ids = [attrs["id"] for _, attrs in tree.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for attrs in charts:
        assert attrs["role"] == "img"
        assert set((attrs["aria-labelledby"] or "").split()) <= set(ids)
    levels = [int(tag[1]) for tag in names if re.fullmatch("h[1-6]", tag)]
    assert all(b <= a + 1 for a, b in pairwise(levels)), "a heading level is skipped"
    links = [attrs["href"] for tag, attrs in tree.tags if tag == "a"]
    assert all((link or "")[1:] in ids for link in links)


def test_page_loads_and_runs_nothing():
    page = render(public_facts(), private_facts())
    assert "http://" not in page
    assert "https://" not in page
    assert "url(" not in page
    assert "@import" not in page
    for tag, attrs in Tree(page).tags:
        assert tag not in {"script", "link", "iframe", "object", "embed"}
        assert not any(name.startswith("on") for name in attrs)
        assert (attrs.get("src") or "data:image/png;base64,").startswith("data:image/png;base64,")


def test_hostile_text_is_escaped_everywhere():
    evil = "<script>alert(1)</script>\"'&"
    mechanism = MechanismFact(evil, evil, evil, 1.0, 1.0, None, 1, 1, 1.0)
    images = tuple(dataclasses.replace(one, label=evil + one.label) for one in pictures(2, 2))
    public = public_facts(
        title=evil, version=evil, unit=evil, adjacency=evil, mode=evil, accountant=evil, releasable=False,
        why_not=evil,
        mechanisms=(mechanism,), assumptions=(AssumptionFact(evil, evil, evil),), classes=(evil, "b"),
        synthetic=images, public=images, moments=images, stages=((evil, 1.0),), files=((evil, 1, evil),),
    )  # fmt: skip
    private = dataclasses.replace(private_facts(), scores=(Score(evil, 0.5, None, evil),), notes=(evil,))
    page = render(public, private)
    assert "script" not in {tag for tag, _ in Tree(page).tags}
    assert "<script" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.parametrize(
    ("n_classes", "n", "side", "channels"),
    [(10, 10, 28, 1), (10, 10, 64, 3), (100, 10, 32, 3), (4, 6, 256, 3)],
)
def test_page_stays_below_three_megabytes(n_classes, n, side, channels):
    public = public_facts(
        n_classes,
        synthetic=pictures(n_classes, n, side, channels),
        public=pictures(n_classes, n, side, channels, 1),
        moments=pictures(n_classes, 1, side, channels, 2),
    )
    page = render(public, private_facts(2_000))
    assert len(page.encode()) < 3_000_000
    everything = (n_classes, n, side, channels) == (10, 10, 28, 1)
    assert ("are shown." in page or "are reduced to" in page) != everything
    assert "the median of 5 consecutive steps" in page
    Tree(page)


def test_a_thousand_classes_are_cut_and_the_page_says_so():
    group = pictures(1_000, 1, 32, 3)
    page = render(public_facts(1_000, synthetic=group, public=group, moments=()), None)
    assert len(page.encode()) < 3_000_000
    assert re.search(r"The first \d+ classes are shown\.", page)


def test_contact_sheet_holds_the_pictures_pixel_for_pixel():
    one = pictures(1, 7)[0]
    page = render(public_facts(1, synthetic=(one,), public=(), moments=()), None)
    sources = [attrs["src"] for tag, attrs in Tree(page).tags if tag == "img"]
    assert len(sources) == 1
    sheet = np.asarray(Image.open(io.BytesIO(base64.b64decode((sources[0] or "").partition(",")[2]))))
    assert sheet.shape == (2 * 28 + 2, 4 * 28 + 3 * 2, 2)
    for i, image in enumerate(one.images):
        cell = sheet[i // 4 * 30 :, i % 4 * 30 :][:28, :28]
        assert np.array_equal(cell[..., :1], image)
        assert (cell[..., 1] == 255).all()
    assert (sheet[30:, 90:, 1] == 0).all(), "the place of an eighth picture is transparent"


# --- edges ------------------------------------------------------------------------------------------------

EMPTY = ("mechanisms", "assumptions", "synthetic", "public", "moments", "stages", "files")
BARE = {**dict.fromkeys(EMPTY, ()), "n_synthetic": 0}
NAN = {key: [math.nan, 1.0, math.nan] for key in ("q10", "q50", "q90", "clip_fraction")}


@pytest.mark.parametrize(
    "public",
    [
        public_facts(moments=()),
        public_facts(public=()),
        public_facts(synthetic=()),
        public_facts(1),
        public_facts(100),
        public_facts(0),
        public_facts(0, **BARE),
        public_facts(epsilon=math.inf, epsilon_budget=math.inf, releasable=False),
        public_facts(epsilon=0.0),
        public_facts(synthetic=(ClassPictures("a", np.zeros((0, 28, 28, 1), np.uint8)),)),
        public_facts(synthetic=pictures(2, 3, 8), public=pictures(2, 3, 1, 3), stages=(("none", 0.0),)),
    ],
)
@pytest.mark.parametrize(
    "private",
    [
        None,
        PrivateFacts(),
        private_facts(1),
        PrivateFacts((Score("a", 0.0, 0.0, ""),), {key: [] for key in private_facts(0).gradient_norms}, 0, ()),
        PrivateFacts((Score("a" * 300, 1.0, 0.5, ""),), {"step": [0, 1, 2], "batch": [0, 3, 0], **NAN}, 5, ("note",)),
    ],
)
def test_odd_facts_still_make_a_page(public, private):
    page = render(public, private)
    Tree(page)
    assert not re.search(r"\b(nan|inf|None)\b", re.sub(r"base64,[^\"]*", "", page))
    assert dataset_card(public)


def test_pairs_when_labels_are_shared_and_columns_when_not():
    theirs = tuple(dataclasses.replace(one, label=f"other {i}") for i, one in enumerate(pictures(3, 2)))
    apart = render(public_facts(public=theirs), None)
    assert "their rows are not pairs" in apart
    assert 'role="group"' not in apart
    mixed = render(public_facts(public=pictures(2, 2) + theirs[:1]), None)
    assert mixed.count('role="group"') == 3
    assert "No public images of a class with this name." in mixed
    assert "Other public classes" in mixed


def test_not_releasable_is_loud_in_page_and_card():
    good, bad = public_facts(), public_facts(releasable=False, why_not="The noise was pinned.")
    for text in (render(bad, None), dataset_card(bad)):
        assert text.count("NOT RELEASABLE") >= 1
        assert "The noise was pinned." in text
    for text in (render(good, None), dataset_card(good)):
        assert "NOT RELEASABLE" not in text
    card = dataset_card(bad)
    assert card.index("NOT RELEASABLE") < card.index("synthetic images in")
    assert "conditions for release" in render(public_facts(releasable=False), None)


def test_overspending_is_said():
    over = public_facts(epsilon=1.2, mechanisms=(MechanismFact("a", "b", "c", 1, 1, None, 1, 2, 1.2),))
    page = render(over, None)
    assert "Exceeds the budget." in page
    assert "more than declared" in page
    for text in (page, dataset_card(over)):
        assert "NOT RELEASABLE" in text, "releasable=True does not outweigh the numbers"
        assert "Executed more often than declared: a." in text
        assert "met the conditions" not in text
    assert "Exceeds the budget." not in render(public_facts(), None)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: ClassPictures("a", np.zeros((2, 28, 28), np.uint8)), "uint8 but are"),
        (lambda: ClassPictures("a", np.zeros((2, 28, 28, 1), np.float32)), "uint8 but are"),
        (lambda: Score("a", 95.7, None, ""), "not percentages"),
        (lambda: Score("a", math.nan, None, ""), "mean in"),
        (lambda: PrivateFacts(gradient_norms={"step": [1]}), "must be empty or have the keys"),
    ],
)
def test_wrong_facts_are_refused_with_a_cure(make, match):
    with pytest.raises(ValueError, match=match):
        make()


# --- words ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (0.99941, "0.9995"),
        (1.0, "1"),
        (1.1, "1.1"),
        (0.29, "0.29"),
        (12.3451, "12.35"),
        (1e-5, "10⁻⁵"),
        (0, "0"),
    ],
)
def test_a_cost_is_never_rounded_down(x, said):
    assert words.cost(x) == said
    assert words.cost(math.inf) == "∞"


def test_numbers_sizes_and_times():
    assert [words.number(x) for x in (60_000, 2.5e-7, -0.5, 123456.7)] == [
        "60,000",
        "2.5 × 10⁻⁷",
        "−0.5",
        "123,500",
    ]
    assert [words.size(n) for n in (0, 1, 48_211, 32_900_000)] == ["0 bytes", "1 bytes", "48.2 kB", "32.9 MB"]
    assert [words.duration(s) for s in (0.123, 59, 1340, 7300)] == ["0.12 s", "59 s", "22 min", "2 h"]


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0, 8.0, 16.0])
def test_guess_bound_covers_the_best_test_between_neighbours(epsilon):
    """Oracle: randomised response with a δ of certain loss is (ε, δ)-private and attains the bound."""
    delta = 1e-5
    keep = (1 - delta) / (1 + math.exp(-epsilon))
    best = delta + keep
    said = float(words.guess_bound(epsilon, delta).split("\u00a0")[0]) / 100
    assert best <= said + 1e-12
    assert said - best <= 1.1e-3
    assert said < 1


# --- the card ---------------------------------------------------------------------------------------------


def test_card_has_front_matter_and_every_fact():
    card = dataset_card(public_facts())
    _, front, body = card.split("---\n", 2)
    for line in ("license: other", "- image-classification", "- differential-privacy", "- synthetic"):
        assert line in front.splitlines()
    assert "- 10K<n<100K" in front
    assert "  data_dir: synthetic" in front.splitlines()
    assert json.loads(re.search(r"pretty_name: (.*)", front)[1]) == "Digits"  # type: ignore[index]
    for fact in (
        "0.9995 of a budget of 1",
        "1e-05",
        "one record",
        "add or remove one record",
        "60,000",
        "PLD",
    ):
        assert fact in body
    for m in public_facts().mechanisms:
        assert m.what in body
    assert "straightdp replay" in body
    assert 'load_dataset("imagefolder"' in body


def test_card_text_cannot_break_out_of_its_place():
    evil = 'a | b\n---\n# c <script> [x](y) "q": `z`'
    card = dataset_card(public_facts(title=evil, unit=evil, assumptions=(AssumptionFact(evil, evil, evil),)))
    assert "<script>" not in card.split("---\n", 2)[2]
    assert card.splitlines().count("---") == 2
    rows = [line for line in card.splitlines() if line.startswith("| a \\|")]
    assert [len(re.findall(r"(?<!\\)\|", row)) for row in rows] == [4]


# --- style ------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in np.array(list(bytes.fromhex(colour))) / 255
    ]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


@pytest.mark.parametrize("scheme", [0, 1])
def test_text_contrast_is_aa_in_both_schemes(scheme):
    css = (files("straightdp.report") / "templates" / "report.css").read_text(encoding="utf-8")
    palette = dict(re.findall(r"--([a-z-]+): #([0-9a-f]{6});", re.findall(r":root \{(.*?)\}", css, re.S)[scheme]))
    grounds = ("paper", "card", "inside-ground", "good-ground", "bad-ground")
    pairs = [(text, ground) for text in ("ink", "soft") for ground in grounds]
    pairs += [
        ("accent", "paper"),
        ("accent", "card"),
        ("good", "good-ground"),
        ("bad", "bad-ground"),
        ("bad", "card"),
    ]
    pairs += [("inside", "inside-ground"), ("inside", "paper")]
    for text, ground in pairs:
        low, high = sorted((luminance(palette[text]), luminance(palette[ground])))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground)


# --- in a browser -----------------------------------------------------------------------------------------


def browse(page: str, folder: Path, *flags: str) -> tuple[str, str]:
    """The DOM after loading, and what the console said."""
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    quiet = (
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    )
    command = [
        CHROMIUM or "",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        *quiet,
        *flags,
    ]
    command += [
        f"--user-data-dir={folder / 'profile'}",
        "--enable-logging=stderr",
        "--dump-dom",
        path.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@needs_chromium
def test_browser_shows_the_page_without_console_errors(tmp_path):
    page = render(public_facts(), private_facts())
    dom, console = browse(page, tmp_path)
    assert console == ""
    assert dom.count("<svg") == 6
    assert dom.count("<img") == 9
    assert [tag for tag, _ in Tree(dom).tags] == [tag for tag, _ in Tree(page).tags], "the browser mended the page"


@needs_chromium
@pytest.mark.parametrize("width", [360, 390, 1200])
def test_page_never_scrolls_sideways(width, tmp_path):
    long = "word" * 40
    theirs = tuple(dataclasses.replace(one, label=one.label + long) for one in pictures(2, 10))
    public = public_facts(2, accountant=long, title=long, synthetic=theirs, public=theirs[:1], moments=theirs)
    page = render(public, private_facts())
    frame = (
        f'<!doctype html><iframe style="border:0;width:{width}px" srcdoc="{html.escape(page)}"></iframe>'
        "<script>onload = () => { const d = document.querySelector('iframe').contentDocument;"
        "document.body.dataset.seen = d.documentElement.scrollWidth; console.log('measured'); };</script>"
    )
    dom, console = browse(frame, tmp_path)
    assert "measured" in console, "the console is not being read"
    seen = re.search(r'data-seen="(\d+)"', dom)
    assert seen is not None
    assert int(seen[1]) <= width
