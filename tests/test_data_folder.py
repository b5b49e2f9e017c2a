"""Image folders: both layouts, a zip of one, the order of records, and every way a folder can be wrong."""

import csv
import os
import shutil
import zipfile

import numpy as np
import pytest
from PIL import Image

from conftest import refusal
from straightdp.data.sources import load

RNG = np.random.default_rng(1)


def save(path, side=6, *, height=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = RNG.integers(0, 256, size=(height or side, side), dtype=np.uint8)
    Image.fromarray(picture).save(path)
    return picture


def write_csv(folder, rows, header=("file_name", "label")):
    with (folder / "metadata.csv").open("w", newline="", encoding="utf-8") as out:
        csv.writer(out).writerows([header, *rows])


@pytest.fixture
def pets(tmp_path):
    """Four pictures in two class subfolders, and what they hold in the order they must come out."""
    root = tmp_path / "pets"
    names = ("cat/1.png", "cat/2.png", "dog/1.PNG", "dog/more/3.png")
    return root, {name: save(root / name) for name in reversed(names)}, names


def test_class_subfolders_come_in_sorted_order(pets):
    root, held, names = pets
    (root / "README.txt").write_text("about")
    (root / ".hidden").mkdir()
    (root / "cat" / ".DS_Store").write_text("junk")
    (root / "dog" / "Thumbs.db").write_text("junk")
    records = load(str(root), size=None, channels=1)
    assert records.classes == ("cat", "dog")
    assert records.labels.tolist() == [0, 0, 1, 1]
    assert records.texts is None
    assert np.array_equal(records.x[:, 0], np.stack([held[name] for name in names]))


def test_a_class_list_sets_the_order_and_is_enforced(pets):
    root, *_ = pets
    assert load(str(root), size=None, channels=1, classes=("dog", "cat")).labels.tolist() == [1, 1, 0, 0]
    refusal(root, "file dog/1.PNG", "label 'dog'", "(cat, bird)", classes=("cat", "bird"))
    declared = load(str(root), size=None, channels=1, classes=("cat", "dog", "bird"))
    assert declared.classes == ("cat", "dog", "bird")  # a declared class may have no record


def test_numbered_classes_sort_as_numbers(tmp_path):
    for name in ("10", "9", "2"):
        save(tmp_path / name / "a.png")
    assert load(str(tmp_path), size=None, channels=1).classes == ("2", "9", "10")


def test_metadata_rows_decide_order_labels_and_texts(tmp_path):
    held = {name: save(tmp_path / name) for name in ("a.png", "sub/b.png", "c.png")}
    rows = [("c.png", "dog", 'a "big" dog, asleep'), ("./sub/b.png", "cat", "katzë"), ("a.png", " dog ", "x")]
    write_csv(tmp_path, rows, ("file_name", "label", "text"))
    records = load(str(tmp_path), size=None, channels=1)
    assert np.array_equal(records.x[:, 0], np.stack([held[n] for n in ("c.png", "sub/b.png", "a.png")]))
    assert records.classes == ("cat", "dog")
    assert records.labels.tolist() == [1, 0, 1]
    assert records.texts == ('a "big" dog, asleep', "katzë", "x")


def test_metadata_as_a_spreadsheet_writes_it(tmp_path):
    save(tmp_path / "a.png")
    (tmp_path / "metadata.csv").write_bytes("\ufefffile_name,label\r\na.png,cat\r\n\r\n".encode())
    records = load(str(tmp_path), size=None, channels=1)
    assert records.classes == ("cat",)
    assert records.texts is None


def test_a_zip_reads_like_its_folder(pets, tmp_path):
    root, *_ = pets
    packed = shutil.make_archive(str(tmp_path / "pets"), "zip", root)
    from_zip, from_folder = (load(str(p), size=4, channels=3) for p in (packed, root))
    assert np.array_equal(from_zip.x, from_folder.x)
    assert np.array_equal(from_zip.labels, from_folder.labels)
    assert from_zip.classes == from_folder.classes
    whole = open(packed, "rb").read()  # noqa: SIM115
    for cut in (b"", whole[:100]):
        with open(packed, "wb") as out:
            out.write(cut)
        refusal(packed, "zip file", "could not be read")


def test_damage_inside_a_zip_names_the_image(tmp_path):
    picture = tmp_path / "x.png"
    save(picture, 20)
    path = tmp_path / "set.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(picture, "cat/x.png")
    data = bytearray(path.read_bytes())
    data[120:140] = bytes(20)
    path.write_bytes(bytes(data))
    refusal(path, "cat/x.png", "could not be read")


def test_size_crops_and_resizes_mixed_images(tmp_path):
    for i, side in enumerate((6, 9, 30)):
        save(tmp_path / "cat" / f"{i}.png", side)
    save(tmp_path / "cat" / "tall.png", 8, height=20)
    refusal(tmp_path, "mixed sizes", "cat/0.png is 6x6", "cat/1.png is 9x9", "set image.size=")
    records = load(str(tmp_path), size=8, channels=3)
    assert records.x.shape == (4, 3, 8, 8)
    tall = np.asarray(Image.open(tmp_path / "cat" / "tall.png"))
    assert np.array_equal(records.x[3, 0], tall[6:14])


def test_images_that_are_not_square_need_a_size(tmp_path):
    save(tmp_path / "cat" / "a.png", 8, height=5)
    refusal(tmp_path, "8x5, not square", "image.size=")


def test_folders_without_images_are_refused(tmp_path):
    refusal(tmp_path / "nowhere", "neither a path that exists")
    refusal(tmp_path, tmp_path, "holds no images")
    (tmp_path / "notes.txt").write_text("x")
    refusal(tmp_path, "holds no images")
    save(tmp_path / "cat" / "a.png")
    (tmp_path / "dog").mkdir()
    refusal(tmp_path, "class subfolder dog", "has no images")


def test_loose_images_and_stray_files_are_refused(pets):
    root, *_ = pets
    save(root / "z.png")
    save(root / "y.png")
    refusal(root, "2 images of", "have no label", "y.png first", "metadata.csv")
    (root / "y.png").unlink()
    (root / "z.png").unlink()
    (root / "cat" / "photo.heic").write_bytes(b"x")
    refusal(root, "cat/photo.heic", "not of a kind that is read")


def test_a_linked_class_folder_is_refused(pets):
    root, *_ = pets
    os.symlink(root / "cat", root / "tiger", target_is_directory=True)
    refusal(root, "tiger is a link")


@pytest.mark.parametrize("kind", ["png", "jpg"])
def test_corrupt_images_are_named(tmp_path, kind):
    for name in ("a", "b", "c"):
        save(tmp_path / "cat" / f"{name}.{kind}", 40)
    bad = tmp_path / "cat" / f"b.{kind}"
    whole = bad.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"certainly not an image"):
        bad.write_bytes(damaged)
        refusal(tmp_path, f"cat/b.{kind}", "could not be read", "replace or remove")
        refusal(tmp_path, f"cat/b.{kind}", size=8)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read every folder")
def test_a_folder_that_may_not_be_read_is_refused(pets):
    root, *_ = pets
    (root / "cat").chmod(0)
    try:
        refusal(root, "could not be read", "permissions")
    finally:
        (root / "cat").chmod(0o755)


@pytest.mark.parametrize(
    ("rows", "header", "expected"),
    [
        ([("a.png", "x"), ("nope.png", "x")], ("file_name", "label"), ("row 3", "nope.png", "not in")),
        ([("a.png",)], ("file_name",), ("has no column label", "it has file_name")),
        ([("a.png", "x")], ("name", "label"), ("has no column file_name", "name, label")),
        ([("a.png", "x"), ("a.png", "x")], ("file_name", "label"), ("rows 2 and 3", "both name a.png")),
        ([("a.png", "")], ("file_name", "label"), ("row 2", "has no label")),
        ([("", "x")], ("file_name", "label"), ("row 2", "has no file_name")),
        ([("a.png", "x", " ")], ("file_name", "label", "text"), ("row 2", "has no text")),
        ([("a.png", "x", "y")], ("file_name", "label"), ("row 2", "3 cells where the header has 2", "quote")),
        ([("a.png",)], ("file_name", "label"), ("row 2", "1 cells where the header has 2")),
        (
            [("a.png", "x")],
            ("file_name", "label"),
            ("1 images of", "not listed in metadata.csv", "b.png first"),
        ),
        ([("../a.png", "x")], ("file_name", "label"), ("row 2", "../a.png", "leads out of")),
        ([("b/../../a.png", "x")], ("file_name", "label"), ("row 2", "leads out of")),
        ([("/etc/a.png", "x")], ("file_name", "label"), ("row 2", "leads out of")),
        ([("C:\\a.png", "x")], ("file_name", "label"), ("row 2", "leads out of")),
        ([], ("file_name", "label"), ("lists no image",)),
    ],
)
def test_bad_metadata_is_refused(tmp_path, rows, header, expected):
    folder = tmp_path / "set"
    save(tmp_path / "a.png")
    save(folder / "a.png")
    save(folder / "b.png")
    write_csv(folder, rows, header)
    refusal(folder, *expected)


def test_metadata_that_is_no_table_is_refused(tmp_path):
    save(tmp_path / "a.png")
    path = tmp_path / "metadata.csv"
    for garbled in (b"\xff\xfe\x00bad", b'file_name,label\na.png,"open'):
        path.write_bytes(garbled)
        refusal(tmp_path, "metadata.csv", "not a UTF-8 CSV table")
    path.write_bytes(b"")
    refusal(tmp_path, "has no column file_name", "it has none")


def test_a_label_outside_the_class_list_names_its_row(tmp_path):
    save(tmp_path / "a.png")
    save(tmp_path / "b.png")
    write_csv(tmp_path, [("a.png", "cat"), ("b.png", "cow")])
    refusal(tmp_path, "row 3 of metadata.csv", "label 'cow'", "(cat, dog)", classes=("cat", "dog"))
