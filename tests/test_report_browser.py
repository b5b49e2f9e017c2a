"""The report in a real browser: what it asks for and says, how it fits, what a keyboard and a screen reader find."""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise
from pathlib import Path

import pytest

from browser import CHROMIUM, Browser, Page
from report_facts import neighbours, pictures, private_facts, public_facts, realistic
from straightdp.report import PrivateFacts, Score, render

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")

# Text whose contrast with what lies behind it is below 4.5, with that contrast. A shade at an edge is not looked at.
FAINT = """(() => {
  const rgba = c => { const v = c.match(/[\\d.]+/g).map(Number); return v.length < 4 ? [...v, 1] : v; };
  const over = (a, b) => [0, 1, 2].map(i => a[i] * a[3] + b[i] * (1 - a[3]));
  const linear = x => x <= 10.31475 ? x / 255 / 12.92 : ((x / 255 + .055) / 1.055) ** 2.4;
  const light = c => .2126 * linear(c[0]) + .7152 * linear(c[1]) + .0722 * linear(c[2]);
  const ground = e => rgba(getComputedStyle(e).backgroundColor);
  const behind = e => e ? over(ground(e), behind(e.parentElement)) : [255, 255, 255];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), faint = []; let seen = 0;
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
    if (!text || ['title', 'desc', 'style', 'script'].includes(e.tagName.toLowerCase())) continue;
    const style = getComputedStyle(e), back = behind(e.closest('svg') ? e.closest('svg').parentElement : e);
    const ink = over(rgba(e.closest('svg') ? style.fill : style.color), back);
    const [low, high] = [light(ink), light(back)].sort((a, b) => a - b);
    const contrast = (high + .05) / (low + .05); seen += 1;
    if (contrast < 4.5) faint.push([text.slice(0, 40), contrast]);
  }
  return {seen, faint};
})()"""


def outside(page: Page, width: int) -> list[str]:
    """What sticks out of the window and is not inside a box that scrolls on its own."""
    return page.js(
        "[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, pre, .skip')"
        f" && e.getBoundingClientRect().right > {width} + 1).map(e => e.outerHTML.slice(0, 80))"
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """One tab of one browser for all tests."""
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser.page()
    browser.close()


@pytest.fixture
def show(page, tmp_path):
    """Write a page's text to a file and open it, by default in a wide light window."""

    def opened(text: str, width: int = 1200, scheme: str = "light") -> Page:
        path = tmp_path / "page.html"
        path.write_text(text, encoding="utf-8")
        page.view(width, scheme=scheme)
        page.open(path)
        return page

    return opened


def long_words() -> str:
    """Every text a word too long for a line."""
    long = "word" * 40
    theirs = tuple(dataclasses.replace(one, label=one.label + long) for one in pictures(2, 10))
    public = public_facts(
        2, title=long, unit=long, accountant=long, synthetic=theirs, public=theirs[:1], moments=theirs
    )
    near = neighbours()
    shown = tuple(dataclasses.replace(one, label=long) for one in near.shown)
    private = private_facts(
        scores=(Score(long, 0.5, None, long, long),),
        neighbours=dataclasses.replace(near, shown=shown, space=long),
        notes=(long,),
        distance_name=long,
        features_note=long,
    )
    return render(public, private)


# --- it stands alone --------------------------------------------------------------------------------------


@pytest.mark.parametrize("edition", ["public", "internal"])
def test_page_asks_for_nothing_and_the_console_stays_silent(show, edition):
    public, private = realistic()
    seen = show(render(public, private if edition == "internal" else None))
    assert seen.console == []
    own, *others = seen.requests
    assert own.startswith("file:")
    assert others, "the pictures are seen as requests too"
    assert all(url.startswith("data:image/png;base64,") for url in others)


def test_a_request_and_a_word_on_the_console_would_be_noticed(show):
    """Positive control: the same page with one picture from elsewhere, with its content policy and without."""
    text = render(*realistic())
    asking = text.replace("</main>", '<img alt="a" src="http://127.0.0.1:9/x.png"></main>')
    assert asking != text
    with_policy = show(asking)
    assert any("Content Security Policy" in line for line in with_policy.console), "the policy is in force"
    without = show(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", asking))
    assert "http://127.0.0.1:9/x.png" in without.requests


def test_the_browser_mends_nothing(show):
    """Tags and attributes are in the document as they are in the text; only a parser that is strict sees the same."""
    text = render(*realistic())
    found = show(text).js("[...document.querySelectorAll('*')].map(e => e.tagName.toLowerCase())")
    assert found == re.findall(r"<([a-z][a-zA-Z0-9]*)[\s>/]", re.sub(r"<style.*?</style>", "<style>", text, flags=re.S))


@pytest.mark.parametrize("private", [realistic()[1], PrivateFacts()], ids=["full", "empty"])
def test_editions_differ_in_the_private_elements_alone(show, private):
    public = realistic()[0]
    tree = "document.documentElement.outerHTML.replace(/\\s+/g, '')"
    drop = "document.querySelectorAll('[data-edition=private]').forEach(e => e.remove())"
    outside = show(render(public, None)).js(tree)
    inside = show(render(public, private))
    assert inside.js("document.querySelectorAll('[data-edition=private]').length") > 5
    assert inside.js(tree) != outside
    inside.js(drop)
    assert inside.js(tree) == outside


# --- it fits and can be read ------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [360, 768, 1200])
@pytest.mark.parametrize("make", [lambda: render(*realistic()), long_words], ids=["realistic", "long words"])
def test_page_is_never_wider_than_the_window(show, width, make):
    seen = show(make(), width)
    assert outside(seen, width) == []
    assert seen.js("document.documentElement.scrollWidth") <= width
    assert seen.js("innerWidth") == width


def test_something_too_wide_would_be_noticed(show):
    seen = show(render(public_facts(), None).replace("<h1>", '<h1 style="width: 500px">'), 360)
    assert seen.js("document.documentElement.scrollWidth") > 360
    assert any(one.startswith("<h1") for one in outside(seen, 360))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("releasable", [True, False])
def test_all_text_has_enough_contrast(show, scheme, releasable):
    public, private = realistic()
    audit = (dataclasses.replace(private.audit[0], lower_bound=2.0),)
    public = dataclasses.replace(public, releasable=releasable, why_not="" if releasable else "The noise was pinned.")
    seen = show(render(public, dataclasses.replace(private, audit=audit)), scheme=scheme)
    ground = seen.js("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(250, 249, 246)", "dark": "rgb(20, 24, 26)"}[scheme]
    found = seen.js(FAINT)
    assert found["seen"] > 300
    assert found["faint"] == []


def test_faint_text_would_be_noticed(show):
    seen = show(render(public_facts(), None).replace("<h1>", '<h1 style="color: #aaa">'))
    assert [text for text, _ in seen.js(FAINT)["faint"]] == ["Digits"]


def test_it_prints(show):
    seen = show(render(*realistic()))
    data = seen.pdf()
    assert data.startswith(b"%PDF")
    seen.view(720, media="print")
    assert seen.js("document.documentElement.scrollWidth") <= 720, "nothing is cut off at the edge of the paper"
    assert seen.js("getComputedStyle(document.querySelector('.scroll')).overflowX") == "visible"
    assert seen.js("getComputedStyle(document.querySelector('nav')).display") == "none"


# --- with a keyboard and a screen reader ------------------------------------------------------------------


def test_tab_reaches_links_and_everything_that_scrolls_in_reading_order(show):
    seen = show(render(*realistic()), 360)
    stops = seen.js("document.querySelectorAll('a[href], .scroll, pre').length")
    assert seen.js("document.querySelectorAll('.scroll').length") >= 9
    where = "[...document.querySelectorAll('*')].indexOf(document.activeElement)"
    visited = []
    for _ in range(stops):
        seen.press("Tab")
        visited.append(seen.js(where))
    every = "[...document.querySelectorAll('*')].flatMap((e, i) => e.matches('a[href], .scroll, pre') ? [i] : [])"
    assert visited == seen.js(every)
    assert seen.js("[...document.querySelectorAll('.scroll')].every(e => e.getAttribute('aria-label'))")
    wide = "[...document.querySelectorAll('body *')].filter(e => e.scrollWidth > e.clientWidth + 1"
    wide += " && ['auto', 'scroll'].includes(getComputedStyle(e).overflowX) && e.tabIndex < 0).length"
    assert seen.js(wide) == 0, "what scrolls can be reached"


def test_screen_reader_finds_names_headings_and_landmarks(show):
    seen = show(render(*realistic()))
    seen.call("Accessibility.enable")
    nodes = [n for n in seen.call("Accessibility.getFullAXTree")["nodes"] if not n["ignored"]]

    def named(*roles: str) -> list[str]:
        return [n.get("name", {}).get("value", "").strip() for n in nodes if n["role"]["value"] in roles]

    images = named("image", "img")
    assert len(images) >= seen.js("document.querySelectorAll('img, svg').length") > 50
    assert all(images)
    regions = named("region")
    assert all(regions)
    assert len(regions) == len(set(regions)), "no two regions share a name"
    for landmark in ("main", "banner", "navigation", "contentinfo", "complementary"):
        assert len(named(landmark)) == 1, landmark
    levels = [
        next(p["value"]["value"] for p in n["properties"] if p["name"] == "level")
        for n in nodes
        if n["role"]["value"] == "heading"
    ]
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(b <= a + 1 for a, b in pairwise(levels)), "a heading level is skipped"
    assert named("columnheader")
    assert named("rowheader")


def test_every_screenshot_shows_something(show, tmp_path):
    """A page that paints nothing, or the same in both schemes, would pass all of the above."""
    shots = {}
    for scheme in ("light", "dark"):
        path = Path(tmp_path / f"{scheme}.png")
        show(render(*realistic()), 360, scheme).shoot(path)
        shots[scheme] = path.read_bytes()
    assert min(map(len, shots.values())) > 50_000
    assert shots["light"] != shots["dark"]
