"""Named sets, the two demo sets, the toy mixture, and captions."""

import numpy as np
import pytest

from straightdp.data import builtin, catalogue, demo, download, mixture
from straightdp.data.captions import from_template
from straightdp.data.sources import load
from straightdp.data.strokes import SHARES, strokes
from straightdp.errors import BadInput


@pytest.mark.parametrize(
    ("name", "n", "classes"),
    [("mnist:train", 60_000, 10), ("mnist:test", 10_000, 10), ("fashion-mnist:train", 60_000, 10),
     ("fashion-mnist:test", 10_000, 10), ("kmnist:test", 10_000, 10), ("kuzushiji-kanji", 46_899, 64)],
)  # fmt: skip
def test_named_sets_have_their_published_shape(data, name, n, classes):
    records = load(name, size=None, channels=1)
    assert records.x.shape == (n, 1, 28, 28)
    assert records.x.dtype == np.uint8
    assert len(records.classes) == len(set(records.classes)) == classes
    assert np.array_equal(np.unique(records.labels), np.arange(classes))


def test_mnist_begins_as_everybody_knows(data):
    records = load("mnist:train", size=None, channels=1)
    assert records.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert records.x.mean() / 255 == pytest.approx(0.1307, abs=1e-4)
    assert records.x.std() / 255 == pytest.approx(0.3081, abs=1e-4)


def test_a_class_list_reorders_a_named_set(data):
    names = load("kmnist:test", size=None, channels=1).classes
    plain, turned = (load("kmnist:test", size=None, channels=1, classes=c) for c in (names, names[::-1]))
    assert np.array_equal(turned.labels, 9 - plain.labels)
    with pytest.raises(BadInput, match="record 0 of kmnist:test has label 'su', which is not in"):
        load("kmnist:test", size=None, channels=1, classes=("o", "ki"))


def test_kanji_are_named_by_their_code_points(data):
    assert load("kuzushiji-kanji", size=None, channels=1).classes[0] == "kanji U+4E00"


def test_the_kanji_split_into_the_ten_commonest_and_others_that_share_no_picture_with_them(data):
    whole, common, rest = (load(f"kuzushiji-kanji{part}", size=None, channels=1) for part in ("", ":common10", ":rest"))
    counts = dict(zip(whole.classes, np.bincount(whole.labels).tolist(), strict=True))
    assert sorted(common.classes) == sorted(sorted(counts, key=lambda name: -counts[name])[:10])
    assert sorted((*common.classes, *rest.classes)) == sorted(whole.classes)
    for name in common.classes[:2]:
        of_whole, of_common = (s.x[s.labels == s.classes.index(name)] for s in (whole, common))
        assert np.array_equal(of_whole, of_common)
    taken = {picture.tobytes() for picture in common.x}
    assert not any(picture.tobytes() in taken for picture in rest.x)
    left_out = len(whole) - len(common) - len(rest)
    assert left_out == sum(
        picture.tobytes() in taken and whole.classes[y] in rest.classes
        for picture, y in zip(whole.x, whole.labels, strict=True)
    )
    assert left_out > 0


def test_flowers_are_called_by_their_names_in_label_order(data):
    records = load("flowers102", size=8, channels=3)
    assert records.x.shape == (8189, 3, 8, 8)
    assert records.classes[:2] == ("pink primrose", "hard-leaved pocket orchid")
    assert len(set(records.classes)) == 102
    assert records.texts is None
    assert np.all(np.diff(records.labels) >= 0)


def test_the_flowers_split_into_twenty_a_class_and_the_rest(data):
    whole, first, rest = (load(f"flowers102{part}", size=8, channels=3) for part in ("", ":first20", ":rest"))
    assert first.classes == rest.classes == whole.classes
    assert np.array_equal(np.bincount(first.labels), np.full(102, 20))
    taken = {picture.tobytes() for picture in first.x}
    for y in range(102):
        own = whole.x[whole.labels == y]
        assert np.array_equal(first.x[first.labels == y], own[:20])
        fresh = [picture for picture in own[20:] if picture.tobytes() not in taken]
        assert np.array_equal(rest.x[rest.labels == y], np.array(fresh))
    assert len(rest) == len(whole) - len(first) - 1  # one picture is in the set twice, on both sides


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_the_catalogue_agrees_with_the_files_that_are_here(data, name):
    assert {status for _, status in download.check(name, data)} == {"ok"}


def test_the_catalogue_agrees_with_the_kmnist_test_split(data):
    status = dict(download.check("kmnist", data))
    assert status["kmnist-test-imgs.npz"] == status["kmnist-test-labels.npz"] == "ok"


@pytest.mark.parametrize("name", list(builtin.FILES))
def test_a_missing_set_says_where_it_was_sought_and_how_to_get_it(tmp_path, monkeypatch, name):
    monkeypatch.setenv("STRAIGHTDP_DATA", str(tmp_path))
    with pytest.raises(BadInput) as caught:
        load(name, size=None, channels=1)
    message, plain = str(caught.value), name.partition(":")[0]
    assert str(tmp_path / plain) in message
    assert "STRAIGHTDP_DATA" in message
    assert (f"straightdp data get {plain}" in message) == (plain in catalogue.CATALOGUE)


def test_the_data_root_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("STRAIGHTDP_DATA", str(tmp_path / "here"))
    assert catalogue.data_root() == tmp_path / "here"
    monkeypatch.setenv("STRAIGHTDP_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert catalogue.data_root() == tmp_path / "cache" / "straightdp"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert catalogue.data_root() == tmp_path / ".cache" / "straightdp"


def test_a_named_set_with_impossible_labels_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("STRAIGHTDP_DATA", str(tmp_path))
    (tmp_path / "kmnist").mkdir()
    np.savez(tmp_path / "kmnist" / "kmnist-train-imgs.npz", np.zeros((2, 4, 4), np.uint8))
    np.savez(tmp_path / "kmnist" / "kmnist-train-labels.npz", np.array([0, 10]))
    with pytest.raises(BadInput, match="should lie in 0 to 9 but do not"):
        load("kmnist:train", size=None, channels=1)
    np.savez(tmp_path / "kmnist" / "kmnist-train-labels.npz", np.array([0, 9]))
    assert load("kmnist:train", size=None, channels=1).labels.tolist() == [0, 9]


def test_digits_are_all_there_once_and_held_out_evenly():
    from sklearn.datasets import load_digits

    train, test = load("digits:train", size=None, channels=1), load("digits:test", size=None, channels=1)
    assert (len(train), len(test)) == (1347, 450)
    values, labels = load_digits(return_X_y=True)
    everything = sorted(zip(np.rint(values * 255 / 16).astype(np.uint8).tolist(), labels.tolist(), strict=True))
    parts = [(x.ravel().tolist(), y) for r in (train, test) for x, y in zip(r.x, r.labels.tolist(), strict=True)]
    assert sorted(parts) == everything
    share = np.bincount(test.labels) - np.bincount(labels) * 450 / 1797
    assert np.abs(share).max() <= 1
    assert train.x.max() == 255
    assert train.classes == tuple("0123456789")
    with pytest.raises(BadInput, match="digits:train or digits:test"):
        demo.digits("valid")


def test_letters_repeat_by_seed_and_resemble_the_digits():
    a, b, c = demo.letters(400, seed=1), demo.letters(400, seed=1), demo.letters(400, seed=2)
    assert np.array_equal(a.x, b.x)
    assert np.array_equal(a.labels, b.labels)
    assert not np.array_equal(a.x, c.x)
    assert a.classes == tuple("abcdefghijklmnopqrstuvwxyz")
    assert a.x.shape == (400, 1, 8, 8)
    digits = demo.digits("train").x / 255
    ink = a.x / 255
    assert ink.mean() == pytest.approx(digits.mean(), rel=0.15)
    assert ink.std() == pytest.approx(digits.std(), rel=0.15)
    assert (a.x.max(axis=(1, 2, 3)) > 128).all()
    assert np.corrcoef(ink.mean(axis=(0, 1, 2)), digits.mean(axis=(0, 1, 2)))[0, 1] > 0.9
    filled = (a.x[:, 0].max(axis=2) > 32).sum(axis=1)
    assert (filled >= 7).mean() > 0.9


def test_letters_can_be_told_apart():
    """A linear classifier reads unseen letters far better than one in 26: labels belong to pictures."""
    from sklearn.linear_model import RidgeClassifier

    records = demo.letters(2_000, seed=3)
    x = records.x.reshape(len(records), -1) / 255
    score = RidgeClassifier().fit(x[:1500], records.labels[:1500]).score(x[1500:], records.labels[1500:])
    assert score > 0.3


def test_strokes_repeat_by_seed_and_lie_in_the_frame():
    a, b, c = strokes(300, seed=1), strokes(300, seed=1), strokes(300, seed=2)
    assert np.array_equal(a.x, b.x)
    assert np.array_equal(a.labels, b.labels)
    assert not np.array_equal(a.x, c.x)
    assert a.x.shape == (300, 1, 28, 28)
    assert (a.x.max(axis=(1, 2, 3)) > 128).all()  # ink everywhere
    tall, broad = ((a.x[:, 0] > 64).any(axis=axis).sum(axis=1) for axis in (2, 1))
    assert (np.maximum(tall, broad) >= 0.5 * 28).mean() > 0.95
    edge = np.concatenate([a.x[:, 0, [0, -1]].reshape(300, -1), a.x[:, 0, :, [0, -1]].reshape(2, 300, 28)[0]], axis=1)
    assert (edge > 64).mean() < 0.02


def test_every_stroke_adds_ink():
    """Of one pen and one frame, drawings of more strokes have more ink, and every count comes as often as it should."""
    records = strokes(4_000, seed=3)
    ink = records.x.reshape(4_000, -1).mean(axis=1)
    means = [ink[records.labels == k].mean() for k in range(len(SHARES))]
    assert means == sorted(means)
    assert means[-1] > 1.3 * means[0]
    counts = np.bincount(records.labels, minlength=len(SHARES))
    assert np.abs(counts - 4_000 * np.array(SHARES)).max() < 5 * np.sqrt(4_000 * 0.25)


def test_drawn_sets_load_at_any_size_and_in_colour(monkeypatch):
    monkeypatch.setattr(demo.letters, "__defaults__", (50, 0, demo.SIDE))
    monkeypatch.setattr(strokes, "__defaults__", (50, 0, 28))
    for size in (None, 8, 12, 28):
        assert load("letters", size=size, channels=3).x.shape == (50, 3, size or 8, size or 8)
        assert load("strokes", size=size, channels=3).x.shape == (50, 3, size or 28, size or 28)
    assert load("digits:test", size=16, channels=1).x.shape == (450, 1, 16, 16)


def test_the_mixture_has_the_moments_it_claims():
    records = mixture.sample(40_000, seed=5)
    means, covariances = mixture.truth()
    x = records.x.reshape(-1, 2).astype(float)
    for mode in range(mixture.MODES):
        own = x[records.labels == mode]
        assert len(own) == pytest.approx(5_000, abs=5 * np.sqrt(40_000 * 7 / 64))
        root = np.linalg.cholesky(covariances[mode])
        white = np.linalg.solve(root, (own - means[mode]).T).T
        assert np.abs(white.mean(axis=0)).max() < 5 / np.sqrt(len(own))
        assert np.abs(white.T @ white / len(own) - np.eye(2)).max() < 5 * np.sqrt(2 / len(own))
        wrong = white * np.sqrt(1.5)
        assert np.abs(wrong.T @ wrong / len(own) - np.eye(2)).max() > 5 * np.sqrt(2 / len(own))


def test_the_mixture_loads_as_two_numbers():
    records = load("mixture", size=None, channels=2)
    assert records.x.shape == (len(records), 2, 1, 1)
    assert records.x.dtype == np.float32
    assert np.abs(records.x).max() < 1
    assert np.array_equal(records.x, load("mixture", size=1, channels=2).x)
    assert np.array_equal(records.z().numpy(), records.x)
    with pytest.raises(BadInput, match=r"image\.channels=2"):
        load("mixture", size=None, channels=1)


def test_captions_fill_the_template_once_per_class():
    classes = ("cat", "{dog}")
    assert from_template("a picture of {label}", classes) == ("a picture of cat", "a picture of {dog}")
    assert from_template("{{x}} {label}, {label}", ("a",)) == ("{x} a, a",)
    assert from_template("{label}", ()) == ()


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("a picture", "has no {label}"),
        ("a picture of {{label}}", "has no {label}"),
        ("{label} in {place}", "'place'"),
        ("{}", "field other than"),
        ("{label.upper}", "field other than"),
        ("{label[0]}", "field other than"),
        ("{label!r}", "field other than"),
        ("{label:>9}", "field other than"),
        ("{label:{width}}", "field other than"),
        ("{label", "not well formed"),
        ("label}", "not well formed"),
    ],
)
def test_bad_templates_are_refused(template, expected):
    with pytest.raises(BadInput) as caught:
        from_template(template, ("cat", "dog"))
    assert expected in str(caught.value)
    assert "a picture of {label}" in str(caught.value)


def test_captions_must_differ():
    with pytest.raises(BadInput, match="'a cat' would stand for more than one class"):
        from_template("a {label}", ("cat", "dog", "cat"))
