"""Array files: idx and npz written by hand, every way they can be wrong, and the pixels that come out."""

import gzip
import io
import struct

import numpy as np
import pytest
from PIL import Image

from conftest import refusal
from straightdp.data import pixels
from straightdp.data.records import to_pixels, to_z
from straightdp.data.sources import load
from straightdp.errors import BadInput

RNG = np.random.default_rng(0)


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(folder, images, labels, *, zipped=False, stem="train", sep="-"):
    pack, end = (gzip.compress, ".gz") if zipped else (bytes, "")
    path = folder / f"{stem}-images{sep}idx3-ubyte{end}"
    path.write_bytes(pack(idx_bytes(images)))
    (folder / f"{stem}-labels{sep}idx1-ubyte{end}").write_bytes(pack(idx_bytes(labels)))
    return path


def pictures(n=12, side=5, channels=None):
    shape = (n, side, side) if channels is None else (n, side, side, channels)
    return RNG.integers(0, 256, size=shape, dtype=np.uint8)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("sep", ["-", "."])
def test_idx_round_trip(tmp_path, zipped, sep):
    images, labels = pictures(), np.arange(12, dtype=np.uint8) % 3 + 4
    records = load(str(write_idx(tmp_path, images, labels, zipped=zipped, sep=sep)), size=None, channels=1)
    assert records.x.dtype == np.uint8
    assert records.labels.dtype == np.int64
    assert np.array_equal(records.x[:, 0], images)
    assert records.classes == ("4", "5", "6")
    assert [records.classes[y] for y in records.labels] == [str(v) for v in labels]
    assert records.x.flags.writeable
    assert np.array_equal(to_pixels(to_z(records.x)), records.x)


def test_idx_labels_may_be_zipped_when_images_are_not(tmp_path):
    images, labels = pictures(), np.zeros(12, np.uint8)
    path = write_idx(tmp_path, images, labels)
    plain = tmp_path / "train-labels-idx1-ubyte"
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    assert np.array_equal(load(str(path), size=None, channels=1).x[:, 0], images)


def test_garbled_idx_files_are_refused(tmp_path):
    images, labels = pictures(), np.zeros(12, np.uint8)
    path = write_idx(tmp_path, images, labels)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    refusal(path, path.name, "promises 300 values but holds 299")
    path.write_bytes(whole + b"x")
    refusal(path, "promises 300 values but holds 301")
    path.write_bytes(b"hello, world, this is not idx")
    refusal(path, "should begin with 00000803", "begins with 68656c6c")
    path.write_bytes(b"")
    refusal(path, "begins with nothing")
    path.write_bytes(gzip.compress(whole)[:-20])
    refusal(path, "could not be read")
    path.write_bytes(b"\x1f\x8b" + b"\x00" * 40)
    refusal(path, "could not be read")
    path.write_bytes(idx_bytes(np.zeros((12, 0, 0), np.uint8)))
    refusal(path, "should have shape")


def test_idx_label_files_that_do_not_fit(tmp_path):
    path = write_idx(tmp_path, pictures(), np.zeros(11, np.uint8))
    refusal(path, "12 images but 11 labels")
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    refusal(path, "train-labels-idx1-ubyte", "missing")
    path = write_idx(tmp_path, pictures(0), np.zeros(0, np.uint8), stem="none")
    refusal(path, "holds no records")
    refusal(tmp_path / "none-labels-idx1-ubyte", "does not have images-idx3 in its name")


@pytest.mark.parametrize("layout", ["nhw", "nhwc", "nchw"])
def test_npz_round_trip_in_every_layout(tmp_path, layout):
    images, labels = pictures(), RNG.integers(0, 3, size=12)
    labels[:3] = range(3)
    shaped = {"nhw": images, "nhwc": images[..., None], "nchw": images[:, None]}[layout]
    np.savez(tmp_path / "a.npz", images=shaped, labels=labels)
    records = load(str(tmp_path / "a.npz"), size=None, channels=1)
    assert np.array_equal(records.x[:, 0], images)
    assert np.array_equal(records.labels, labels)


@pytest.mark.parametrize(("images", "labels"), [("k-imgs", "k-labels"), ("k-images", "k-labels"), ("k", "k-labels")])
def test_npz_with_labels_in_a_second_file(tmp_path, images, labels):
    x, y = pictures(), np.arange(12) % 2
    np.savez(tmp_path / f"{images}.npz", x)
    refusal(tmp_path / f"{images}.npz", f"{labels}.npz", "missing")
    np.savez(tmp_path / f"{labels}.npz", other=y)
    refusal(tmp_path / f"{images}.npz", "arr_0 but has other")
    np.savez(tmp_path / f"{labels}.npz", y)
    records = load(str(tmp_path / f"{images}.npz"), size=None, channels=1)
    assert np.array_equal(records.x[:, 0], x)
    assert np.array_equal(records.labels, y)


def test_npz_text_labels_are_names_and_numbers_sort_as_numbers(tmp_path):
    np.savez(tmp_path / "text.npz", images=pictures(3), labels=np.array(["dog", "cat", "dog"]))
    records = load(str(tmp_path / "text.npz"), size=None, channels=1)
    assert records.classes == ("cat", "dog")
    assert records.labels.tolist() == [1, 0, 1]
    np.savez(tmp_path / "number.npz", images=pictures(3), labels=np.array([10, 9, 2]))
    assert load(str(tmp_path / "number.npz"), size=None, channels=1).classes == ("2", "9", "10")


def test_a_class_list_decides_what_numbers_mean(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, images=pictures(3), labels=np.array([1, 0, 1]))
    by_position = load(str(path), size=None, channels=1, classes=("cat", "dog"))
    assert [by_position.classes[y] for y in by_position.labels] == ["dog", "cat", "dog"]
    by_name = load(str(path), size=None, channels=1, classes=("1", "0"))
    assert by_name.labels.tolist() == [0, 1, 0]
    refusal(path, "record 0 of", "a.npz", "has label 1", "(cat)", classes=("cat",))
    refusal(path, "record 0 of", "label '1'", "(0, 5)", classes=("0", "5"))
    refusal(path, "listed twice", classes=("cat", "cat"))
    refusal(path, "class list is empty", classes=())


def test_bad_npz_files_are_refused(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, images=pictures(), labels=np.zeros(12, int))
    whole = path.read_bytes()
    for garbled in (
        b"",
        b"not a zip at all",
        whole[: len(whole) // 2],
        whole[:200] + b"?" * 50 + whole[250:],
    ):
        path.write_bytes(garbled)
        refusal(path, "a.npz could not be read")
    np.savez(path, images=pictures(), labels=np.array([{}] * 12, dtype=object))
    refusal(path, "could not be read")
    with path.open("wb") as out:
        np.save(out, pictures())
    refusal(path, "could not be read")
    np.savez(path, pixels=pictures())
    refusal(path, "keys images and labels (or arr_0) but has pixels")
    np.savez(path, images=pictures(), labels=np.zeros(5, int))
    refusal(path, "12 images but 5 labels")
    np.savez(path, images=pictures(), labels=np.zeros((12, 10), int))
    refusal(path, "one whole number or text per image")
    np.savez(path, images=pictures(), labels=np.zeros(12))
    refusal(path, "float64")
    np.savez(path, images=pictures() / 255, labels=np.zeros(12, int))
    refusal(path, "should be uint8", "float64")
    np.savez(path, images=pictures().reshape(12, 25), labels=np.zeros(12, int))
    refusal(path, "(12, 25)")
    np.savez(path, images=np.uint8(3), labels=np.zeros(0, int))
    refusal(path, "a.npz")


@pytest.mark.parametrize("kind", ["a.npz", "packed.npz", "train-images-idx3-ubyte", "z-images-idx3-ubyte.gz"])
def test_no_damage_gets_past_as_anything_but_a_sentence(tmp_path, kind):
    labels = np.arange(12, dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=pictures(), labels=labels)
    np.savez_compressed(tmp_path / "packed.npz", images=pictures(), labels=labels)
    write_idx(tmp_path, pictures(), labels)
    write_idx(tmp_path, pictures(), labels, stem="z", zipped=True)
    path = tmp_path / kind
    whole = np.frombuffer(path.read_bytes(), np.uint8)
    rng = np.random.default_rng(7)
    sentences = []
    for _ in range(150):
        damaged = whole[: rng.integers(1, len(whole) + 1)] if rng.random() < 0.3 else whole.copy()
        damaged = damaged.copy()
        damaged[rng.integers(len(damaged), size=3)] = rng.integers(0, 256, size=3)
        path.write_bytes(damaged.tobytes())
        try:
            assert load(str(path), size=None, channels=1).x.dtype == np.uint8
        except BadInput as error:
            sentences.append(str(error))
    assert len(sentences) > 30
    assert not any("\n" in sentence for sentence in sentences)


def test_unknown_files_and_settings_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    refusal(tmp_path / "notes.txt", "of no kind that is read")
    refusal(tmp_path / "nowhere", "neither a path that exists nor a built-in name")
    refusal("", "no data source was given")
    refusal("mnist", "mnist:train or mnist:test")
    refusal("fashion-mnist:valid", "fashion-mnist:train or fashion-mnist:test")
    refusal("leters", "did you mean 'letters'?")
    refusal("digits:train", "image.channels is 4", channels=4)
    refusal("digits:train", "image.size should be a side", size=0)


def test_colour_becomes_grey_exactly_as_pillow_does_it():
    x = pictures(20, 9, 3)
    expected = np.stack([np.asarray(Image.fromarray(p).convert("L")) for p in x])
    assert np.array_equal(pixels.to_channels(x, 1)[..., 0], expected)


def test_grey_to_colour_and_back_is_the_identity():
    x = pictures(4, 6, 1)
    colour = pixels.to_channels(x, 3)
    assert colour.shape == (4, 6, 6, 3)
    assert np.array_equal(pixels.to_channels(colour, 1), x)


def test_transparency_lies_on_black():
    x = pictures(30, 8, 4)
    alpha = x[..., 3:].astype(float) / 255
    expected = np.floor(x[..., :3] * alpha + 0.5)
    assert np.abs(pixels.to_channels(x, 3) - expected).max() <= 1
    clear, solid = x.copy(), x.copy()
    clear[..., 3], solid[..., 3] = 0, 255
    assert not pixels.to_channels(clear, 3).any()
    assert np.array_equal(pixels.to_channels(solid, 3), x[..., :3])


def test_resizing_is_a_centre_crop_and_pillow_bicubic(tmp_path):
    wide = RNG.integers(0, 256, size=(3, 10, 17), dtype=np.uint8)
    np.savez(tmp_path / "wide.npz", images=wide, labels=np.arange(3))
    refusal(tmp_path / "wide.npz", "are 17x10, not square", "image.size=")
    records = load(str(tmp_path / "wide.npz"), size=6, channels=1)
    for got, picture in zip(records.x[:, 0], wide, strict=True):
        square = Image.fromarray(picture).crop((3, 0, 13, 10))
        assert np.array_equal(got, np.asarray(square.resize((6, 6), Image.Resampling.BICUBIC)))
    same = load(str(tmp_path / "wide.npz"), size=10, channels=3)
    assert np.array_equal(same.x[:, 1], wide[:, :, 3:13])


def encode(image: Image.Image, kind="PNG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def test_every_pillow_mode_decodes_to_the_channels_asked_for():
    grey = Image.fromarray(pictures(1, 7)[0])
    colour = Image.fromarray(pictures(1, 7, 3)[0])
    for image, kind in (
        (grey, "PNG"),
        (grey.convert("1"), "PNG"),
        (grey.convert("LA"), "PNG"),
        (colour, "PNG"),
        (colour.convert("P"), "GIF"),
        (colour.convert("RGBA"), "PNG"),
        (colour.convert("CMYK"), "TIFF"),
    ):
        for channels in (1, 3):
            assert pixels.decode(encode(image, kind), channels, "x").shape == (7, 7, channels)
    assert np.array_equal(pixels.decode(encode(grey), 1, "x")[..., 0], np.asarray(grey))
    assert np.array_equal(pixels.decode(encode(colour), 3, "x"), np.asarray(colour))


def test_sixteen_bit_grey_keeps_its_high_byte():
    deep = RNG.integers(0, 65536, size=(6, 6)).astype(np.uint16)
    assert np.array_equal(pixels.decode(encode(Image.fromarray(deep)), 1, "x")[..., 0], deep >> 8)
    with pytest.raises(BadInput, match="no fixed range"):
        pixels.decode(encode(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF"), 1, "x")


def test_palette_transparency_and_camera_orientation_are_obeyed():
    flat = Image.new("P", (4, 4), 1)
    flat.putpalette([255, 255, 255, 0, 200, 0])
    assert pixels.decode(encode(flat), 3, "x")[0, 0].tolist() == [0, 200, 0]
    assert not pixels.decode(encode(flat, transparency=1), 3, "x").any()
    upright = pictures(1, 8)[0][:, :5].copy()
    turned = Image.fromarray(upright)
    exif = turned.getexif()
    exif[0x0112] = 6  # rotate by 90 degrees clockwise to view
    assert np.array_equal(pixels.decode(encode(turned, exif=exif), 1, "x")[..., 0], np.rot90(upright, -1))
