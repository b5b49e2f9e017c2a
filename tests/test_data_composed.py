"""Composed sets: the caption tells what the picture shows, and the picture shows what the caption tells."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from conftest import refusal
from straightdp.data import builtin, composed
from straightdp.data.captions import Template
from straightdp.data.composed import QUADRANTS, SLOTS, STROKES, TEMPLATES
from straightdp.data.sources import load
from straightdp.errors import BadInput

CORNERS = {"upper left": (0, 0), "upper right": (0, 24), "lower left": (24, 0), "lower right": (24, 24)}
HERE = ("composed-mnist:test", "composed-kmnist:test")
PLUS = np.array([[0, 1, 0], [1, 1, 1], [0, 1, 0]], bool)


@pytest.fixture
def noise(tmp_path, monkeypatch):
    """A plain set that is as unkind to the markers as can be: noise up to the edges, one full and one blank glyph."""
    monkeypatch.setenv("STRAIGHTDP_DATA", str(tmp_path))
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, size=(300, 28, 28), dtype=np.uint8)
    images[0], images[1] = 255, 0
    (tmp_path / "kmnist").mkdir()
    np.savez(tmp_path / "kmnist" / "kmnist-train-imgs.npz", images)
    np.savez(tmp_path / "kmnist" / "kmnist-train-labels.npz", rng.integers(10, size=300))
    return images


def template_of(name):
    plain = name.removeprefix("composed-").partition(":")[0]
    return Template.read(TEMPLATES[plain], builtin.CLASSES[plain], SLOTS)


def words_of(text):
    """A caption's stroke and quadrant, read off the end and the beginning of it."""
    quadrant = next(quadrant for quadrant in QUADRANTS if text.endswith(f" marked {quadrant}"))
    return text.split()[1], quadrant


def by_hand(glyph, stroke, quadrant):
    """One picture, slowly: cut pixels in 5 x 5, average 7 x 7 of those, then scipy's morphology and the marker."""
    fine = np.kron(glyph.astype(int), np.ones((5, 5), int))
    small = np.array([[round(fine[7 * i : 7 * i + 7, 7 * j : 7 * j + 7].mean()) for j in range(20)] for i in range(20)])
    picture = np.zeros((28, 28), int)
    picture[4:24, 4:24] = small
    grown = ndimage.grey_dilation(picture, footprint=PLUS, mode="constant")
    if stroke == "thick":
        picture = grown
    else:
        picture = np.maximum(ndimage.grey_erosion(picture, footprint=PLUS, mode="constant"), 2 * picture - grown)
    row, column = CORNERS[quadrant]
    picture[row : row + 4, column : column + 4] = 255
    return picture


def assert_markers(records):
    for x, text in zip(records.x[:, 0], records.texts, strict=True):
        for quadrant, (row, column) in CORNERS.items():
            corner = x[row : row + 4, column : column + 4]
            assert (corner == (255 if quadrant == words_of(text)[1] else 0)).all()


def test_the_names_are_built_in_and_a_missing_split_is_pointed_out():
    assert set(builtin.COMPOSED) <= set(builtin.NAMES)
    refusal("composed-mnist", "composed-mnist:train or composed-mnist:test")
    refusal("composed-mnst:train", "did you mean 'composed-mnist:train'?")


@pytest.mark.parametrize(("name", "plain"), builtin.COMPOSED.items())
def test_a_missing_plain_set_is_what_the_refusal_speaks_of(tmp_path, monkeypatch, name, plain):
    monkeypatch.setenv("STRAIGHTDP_DATA", str(tmp_path))
    kind = plain.partition(":")[0]
    refusal(name, f"data set {plain} was not found in {tmp_path / kind}", f"straightdp data get {kind}")


@pytest.mark.parametrize("name", HERE)
def test_real_sets_keep_order_labels_and_classes_and_get_a_caption_each(data, name):
    plain, made = load(builtin.COMPOSED[name], size=None, channels=1), load(name, size=None, channels=1)
    assert made.x.shape == plain.x.shape == (10_000, 1, 28, 28)
    assert made.x.dtype == np.uint8
    assert made.classes == plain.classes
    assert np.array_equal(made.labels, plain.labels)
    template = template_of(name)
    positions = [template.index(text) for text in made.texts]
    assert None not in positions
    rows = template.combinations()[positions]
    assert np.array_equal(rows[:, 0], made.labels)
    assert [(STROKES[s], QUADRANTS[q]) for _, s, q in rows] == [words_of(text) for text in made.texts]
    counts = np.bincount(rows[:, 1] * 4 + rows[:, 2], minlength=8)
    assert counts == pytest.approx(1_250, abs=5 * np.sqrt(10_000 * 7 / 64))


@pytest.mark.parametrize("name", HERE)
def test_the_marker_of_a_real_picture_is_where_its_caption_says_and_nowhere_else(data, name):
    assert_markers(load(name, size=None, channels=1))


@pytest.mark.parametrize("name", HERE)
def test_every_glyph_has_clearly_more_ink_thick_than_thin_and_none_is_lost(data, name):
    glyphs = load(builtin.COMPOSED[name], size=None, channels=1).x[:, 0]
    nowhere = np.full(len(glyphs), -1)
    thin, thick = (composed.draw(glyphs, np.full(len(glyphs), s), nowhere) for s in range(2))
    assert (thin <= thick).all()
    ink = [x.reshape(len(x), -1).astype(int).sum(axis=1) for x in (thin, thick)]
    assert (ink[1] > 1.3 * ink[0]).all()
    assert np.array_equal(thin.max(axis=(1, 2)), thick.max(axis=(1, 2)))
    assert (thin.max(axis=(1, 2)) > 128).mean() > 0.99


def test_glyphs_and_strokes_can_both_be_read_off_the_pictures(data):
    """Linear classifiers read unseen strokes nearly always and digits far better than one in ten."""
    from sklearn.linear_model import RidgeClassifier

    records = load("composed-mnist:test", size=None, channels=1)
    x = records.x.reshape(len(records), -1) / 255
    strokes = np.array([words_of(text)[0] for text in records.texts])
    for wanted, least in ((strokes, 0.95), (records.labels, 0.75)):
        assert RidgeClassifier(alpha=10).fit(x[:8_000], wanted[:8_000]).score(x[8_000:], wanted[8_000:]) > least


def test_pictures_are_those_made_by_hand_also_from_glyphs_that_fill_the_frame(noise):
    records = load("composed-kmnist:train", size=None, channels=1)
    assert_markers(records)
    assert {words_of(text) for text in records.texts} == {(s, q) for s in STROKES for q in QUADRANTS}
    for glyph, x, text in zip(noise, records.x[:, 0], records.texts, strict=True):
        assert np.array_equal(x, by_hand(glyph, *words_of(text)))


@settings(max_examples=60)
@given(st.binary(min_size=16, max_size=16), st.sampled_from([1, 2, 5]))
def test_thin_never_exceeds_thick_and_crests_are_kept(values, spread):
    """Coarse and fine patterns: 4 x 4 random tiles, drawn out or repeated."""
    tile = np.frombuffer(values, np.uint8).reshape(4, 4)
    glyph = np.tile(np.kron(tile, np.ones((spread, spread), np.uint8)), (7, 7))[None, :28, :28]
    thin, thick = (composed.draw(glyph, np.array([s]), np.array([-1])) for s in range(2))
    assert (thin <= thick).all()
    assert thin.max() == thick.max()
    assert thick.any() == (int(thick.sum()) > int(thin.sum()))


def test_the_same_name_gives_the_same_records_and_other_names_other_attributes(noise):
    a, b = (load("composed-kmnist:train", size=None, channels=1) for _ in range(2))
    assert np.array_equal(a.x, b.x)
    assert a.texts == b.texts
    drawn = {name: np.stack(composed.attributes(name, 1_000)) for name in builtin.COMPOSED}
    for name, own in drawn.items():
        assert np.array_equal(np.stack(composed.attributes(name, 77)), own[:, :77])
        assert sum(np.array_equal(own, other) for other in drawn.values()) == 1


def test_strokes_and_quadrants_are_drawn_apart_from_each_other_and_from_one_record_to_the_next():
    n = 40_000
    strokes, quadrants = composed.attributes("composed-mnist:train", n)
    for a, b in ((strokes, quadrants), (strokes[1:], strokes[:-1]), (quadrants[1:], quadrants[:-1])):
        table = np.histogram2d(a, b, bins=(a.max() + 1, b.max() + 1))[0]
        assert np.abs(table - n / table.size).max() < 5 * np.sqrt(n / table.size)


def test_a_class_list_moves_labels_and_leaves_pictures_and_texts(noise):
    plain = load("composed-kmnist:train", size=None, channels=1)
    turned = load("composed-kmnist:train", size=None, channels=1, classes=plain.classes[::-1])
    assert np.array_equal(turned.labels, 9 - plain.labels)
    assert turned.texts == plain.texts
    assert np.array_equal(turned.x, plain.x)
    refusal("composed-kmnist:train", "of composed-kmnist:train has label", "not in the class list", classes=("o", "ki"))


def test_texts_stay_with_their_records_in_a_subset(noise):
    records = load("composed-kmnist:train", size=None, channels=1)
    order = np.random.default_rng(1).permutation(len(records))[:50]
    mask = np.zeros(len(records), bool)
    mask[order] = True
    for part, chosen in ((records.subset(order), order), (records.subset(mask), np.sort(order))):
        assert_markers(part)
        assert part.texts == tuple(records.texts[i] for i in chosen)
        assert all(f" kana {part.classes[y]} " in text for y, text in zip(part.labels, part.texts, strict=True))


@pytest.mark.parametrize(("size", "channels"), [(28, 3), (14, 1), (32, 3)])
def test_a_composed_set_loads_at_any_size_and_in_colour(noise, size, channels):
    native = load("composed-kmnist:train", size=None, channels=1)
    records = load("composed-kmnist:train", size=size, channels=channels)
    assert records.x.shape == (300, channels, size, size)
    assert records.texts == native.texts
    assert (records.x == records.x[:, :1]).all()
    if size == 28:
        assert np.array_equal(records.x[:, :1], native.x)
    else:
        corner = {"upper left": (0, 0), "upper right": (0, -1), "lower left": (-1, 0), "lower right": (-1, -1)}
        assert all(x[0][corner[words_of(text)[1]]] > 240 for x, text in zip(records.x, records.texts, strict=True))


def test_a_plain_set_of_another_shape_is_refused(noise, tmp_path):
    np.savez(tmp_path / "kmnist" / "kmnist-train-imgs.npz", noise[:, :20, :])
    refusal("composed-kmnist:train", "28x28x1", "20x28x1", "again")
    with pytest.raises(BadInput, match="32x32x3"):
        composed.compose("composed-mnist:test", np.zeros((1, 32, 32, 3), np.uint8), np.zeros(1, int), ("0",))
