"""The report: what each edition may show, that the page stands alone, and odd facts still make a page."""

from __future__ import annotations

import base64
import dataclasses
import io
import math
import re
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from report_facts import neighbours, pictures, private_facts, public_facts
from straightdp.report import (
    AssumptionFact,
    AuditFact,
    ClassDistance,
    ClassPictures,
    LabelAware,
    MechanismFact,
    Neighbour,
    Neighbours,
    PrivateFacts,
    Quality,
    Score,
    dataset_card,
    model_card,
    render,
    words,
)
from straightdp.report.facts import REFERENCES

VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
MARK = "Computed from private records without noise. Not for publication."


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


def sources(page: str) -> list[str]:
    return [attrs["src"] or "" for tag, attrs in Tree(page).tags if tag == "img"]


def decoded(source: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))))


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
    sentinels = ("SENTINEL", "86.4", "75.3", "91.2", "98,765", "31.4", "2,037", MARK)
    sentinels += ("17.2", "172", "4,321", "31.3", "42.4", "27.3", "59.6", "68.7", "83.8", "3.83", "7.25", "0.246")
    for sentinel in sentinels:
        assert sentinel in inside, sentinel
        assert sentinel not in outside, sentinel
    for word in set(re.findall(r"SENTINEL-\w+", str(private))):
        assert word in inside, f"{word} is shown nowhere"
    theirs = {image.tobytes() for one in neighbours().shown for image in one.nearest}
    assert theirs <= {decoded(source).tobytes() for source in sources(inside)}
    assert not theirs & {decoded(source).tobytes() for source in sources(outside)}


def test_every_private_section_says_so_and_a_banner_comes_first():
    page = render(public_facts(), private_facts())
    body = page[page.index("<body>") :]
    assert body.index('class="banner"') < body.index("<h1>")
    sections = re.findall(r'<section[^>]*data-edition="private".*?</section>', page, re.S)
    assert len(sections) == 3
    assert all(MARK in section for section in sections)
    assert page.count(MARK) == 4, "three sections, and the audit within the privacy section"


def test_other_private_values_leave_the_public_elements_alone():
    public = public_facts()
    other = PrivateFacts()
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
    assert len(images) == 9 + 2 * (1 + 3)
    assert all((attrs["alt"] or "").strip() and attrs["width"] and attrs["height"] for attrs in images)
    charts = [attrs for tag, attrs in tree.tags if tag == "svg"]
    assert len(charts) == 14
    ids = [attrs["id"] for _, attrs in tree.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for attrs in charts:
        assert attrs["role"] == "img"
        assert set((attrs["aria-labelledby"] or "").split()) <= set(ids)
    levels = [int(tag[1]) for tag in names if re.fullmatch("h[1-6]", tag)]
    assert all(b <= a + 1 for a, b in pairwise(levels)), "a heading level is skipped"
    cells = [attrs for tag, attrs in tree.tags if tag == "th"]
    assert cells
    assert all(attrs.get("scope") in ("col", "row") for attrs in cells)
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
    near = neighbours(1)
    shown = (dataclasses.replace(near.shown[0], label=evil),)
    private = private_facts(
        scores=(Score(evil, 0.5, None, evil, evil),), notes=(evil,), distance_name=evil, features_note=evil,
        quality=(Quality(evil, 1, 1.0, None, None, None, evil),), label_aware=(LabelAware(evil, 0.5, 0.5, evil),),
        class_distances=(ClassDistance(evil, 1.0),), audit=(AuditFact(1.0, 0.0, 0.9, evil, evil),),
        neighbours=dataclasses.replace(near, shown=shown, space=evil),
    )  # fmt: skip
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
    page = render(public, private_facts(2_000, neighbours=neighbours(20, 9, side, channels)))
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
    (source,) = sources(page)
    sheet = decoded(source)
    assert sheet.shape == (2 * 28 + 2, 4 * 28 + 3 * 2, 2)
    for i, image in enumerate(one.images):
        cell = sheet[i // 4 * 30 :, i % 4 * 30 :][:28, :28]
        assert np.array_equal(cell[..., :1], image)
        assert (cell[..., 1] == 255).all()
    assert (sheet[30:, 90:, 1] == 0).all(), "the place of an eighth picture is transparent"


# --- numbers beside their references ----------------------------------------------------------------------


def chart(page: str, id: str) -> str:
    return next(svg for svg in re.findall(r"<svg.*?</svg>", page, re.S) if f'id="{id}-title"' in svg)


def widths(svg: str) -> list[float]:
    return [float(width) for width in re.findall(r'<rect class="fill[^>]* width="([\d.]+)"', svg)]


def test_each_mechanism_stands_beside_the_total_and_the_budget():
    page = render(public_facts(), None)
    assert widths(chart(page, "shares")) == pytest.approx([440 * x for x in (0.99941, 0.29, 0.72)], abs=0.06)
    for said in ("all together: 0.9995 (100", "means: 0.29 (29", "dpsgd: 0.72 (72"):
        assert said in page


def test_each_classifier_has_its_chart_with_its_scores_alone():
    page = render(public_facts(4), private_facts())
    assert widths(chart(page, "scores-0")) == pytest.approx([440 * 0.8642, 440 * 0.7531], abs=0.06)
    assert widths(chart(page, "scores-1")) == pytest.approx([440 * 0.9123], abs=0.06)
    assert "guessing at random: 25.0" in chart(page, "scores-1")
    assert "a second was not run" not in page
    assert "a second was not run" in render(public_facts(), private_facts(scores=private_facts().scores[:2]))


NOT_RUN = (
    "No audit was run",
    "No score was measured",
    "no distance between image sets",
    "neither label consistency nor the domain rate",
    "no distance within a class",
    "nobody looked for the training records",
    "No gradient step was recorded",
)


def test_what_was_not_run_is_said_to_be_not_run():
    bare, full = render(public_facts(), PrivateFacts()), render(public_facts(), private_facts())
    for said in NOT_RUN:
        assert said in bare, said
        assert said not in full, said


def test_missing_references_of_the_distance_are_named():
    def page(names) -> str:
        return render(public_facts(), PrivateFacts(quality=tuple(Quality(n, 9, 1.0, 0.5, 0.5, 1.0, "") for n in names)))

    assert "not run" not in page(("synthetic data", *REFERENCES)).partition('id="utility-h"')[2].partition("Labels")[0]
    for left_out in REFERENCES:
        names = [name for name in REFERENCES if name != left_out]
        assert f"Not run: {left_out}." in page(("synthetic data", *names))


def test_only_the_published_weights_make_a_fid():
    slim, fid = render(public_facts(), private_facts()), render(public_facts(), private_facts(distance_name="FID"))
    assert "<strong>not FID</strong>" in slim
    assert "these values are FID" in fid
    assert "not FID" not in fid
    assert "FD-slim" not in fid


def test_nearest_records_are_counted_against_the_held_out_ones():
    """Held-out distances are 1 to 100: two of four synthetic ones are below the 5 % quantile, 7.25 is above seven."""
    page = render(public_facts(), private_facts())
    assert "<strong>50.0\u00a0%</strong> of 4 synthetic images are nearer to a training record than 95.0" in page
    assert page.count('<td class="num">7.0\u00a0%</td>') == 2
    assert "nearer than every one" not in page
    copied = dataclasses.replace(neighbours(1), heldout=[8.0, 9.0])
    assert "nearer than every one" in render(public_facts(), private_facts(neighbours=copied))
    strip = re.search(r'class="middle" d="M([\d.]+) .*?class="middle" d="M([\d.]+) ', chart(page, "closeness"), re.S)
    top = np.quantile(np.arange(1, 101), 0.95)
    assert strip is not None
    assert [float(x) for x in strip.groups()] == pytest.approx([440 * 17 / top, 440 * 50.5 / top], abs=0.06)


def test_an_audit_that_refutes_the_claim_is_loud():
    def page(found: float) -> str:
        return render(public_facts(), PrivateFacts(audit=(AuditFact(1.0, found, 0.95, "a", "b"),)))

    assert "refutes the claim" not in page(1.0)
    assert page(1.01).count("refutes the claim") == 2, "in the summary and beside the claim"


def test_of_many_classes_the_worst_are_shown():
    many = tuple(ClassDistance(f"kind {i:03d}", float(i) if i else None) for i in range(100))
    page = render(public_facts(), private_facts(class_distances=many))
    assert "The 20 classes with the largest distances of 100 are shown." in page
    assert {f"kind {i:03d}" in page for i in range(80, 100)} == {True}
    assert {f"kind {i:03d}" in page for i in range(80)} == {False}


# --- edges ------------------------------------------------------------------------------------------------

X = np.zeros((2, 8, 8, 1), np.uint8)
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
        PrivateFacts(
            quality=(Quality("a", 0, 0.0, 0.0, 1.0, 0.0, ""),),
            label_aware=(LabelAware("a", None, None), LabelAware("b", None, 0.0)),
            class_distances=(ClassDistance("a", 0.0, 0.0), ClassDistance("b", None)),
            neighbours=Neighbours((), [0.0], [0.0, 0.0], ""),
            audit=(AuditFact(0.0, 0.0, 0.5, "", ""), AuditFact(math.inf, 3.0, 0.5, "", "")),
        ),
        PrivateFacts((Score("a", 0.0, 0.0, ""),), {key: [] for key in private_facts(0).gradient_norms}, 0, ()),
        PrivateFacts((Score("a" * 300, 1.0, 0.5, ""),), {"step": [0, 1, 2], "batch": [0, 3, 0], **NAN}, 5, ("note",)),
    ],
)
def test_odd_facts_still_make_a_page(public, private):
    page = render(public, private)
    Tree(page)
    assert not re.search(r"\b(nan|inf|None)\b", re.sub(r"base64,[^\"]*", "", page))
    for card in (dataset_card(public), model_card(public)):
        assert not re.search(r"\b(nan|inf|None)\b", card)


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
        (lambda: Quality("a", 1, math.nan, None, None, None, ""), "must be finite"),
        (lambda: Quality("a", 1, 1.0, None, None, math.inf, ""), "must be finite"),
        (lambda: Quality("a", 1, 1.0, 71.0, None, None, ""), "give fractions"),
        (lambda: LabelAware("a", None, -0.1), "give fractions"),
        (lambda: ClassDistance("a", 1.0, math.nan), "must be finite"),
        (lambda: AuditFact(1.0, -0.1, 0.95, "", ""), "lower bound"),
        (lambda: AuditFact(1.0, 0.1, 95.0, "", ""), "confidence"),
        (lambda: Neighbour("a", X[0], X, (2.0, 1.0)), "nearest first"),
        (lambda: Neighbour("a", X[0], X, (1.0,)), "one distance each"),
        (lambda: Neighbour("a", X[0], X[:0], ()), "one distance each"),
        (lambda: Neighbour("a", X[0, :7], X, (1.0, 2.0)), "records of its shape"),
        (lambda: Neighbour("a", X[0] / 255, X, (1.0, 2.0)), "uint8 but are"),
        (lambda: Neighbours((), [], [1.0], "pixels"), "need both sets"),
        (lambda: Neighbours((*neighbours(1, 2).shown, *neighbours(1, 3).shown), [1.0], [1.0], ""), "the same"),
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


@pytest.mark.parametrize("x", [0.2468, 0.9999, 1.0, 1e-7, 12.349])
def test_a_lower_bound_is_never_rounded_up_and_a_share_never_down(x):
    said = words.at_least(x).replace(" × 10", "e").translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789"))
    said = float(said.replace("10-7", "1e-7"))
    assert x * 0.99 < said <= x
    percent = float(words.share(x, 0.7).removesuffix("\u00a0%"))
    assert x / 0.7 - 1e-9 <= percent / 100 < x / 0.7 + 0.01
    assert words.share(x, math.inf) == words.share(math.inf, x) == words.share(x, 0.0) == ""


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
