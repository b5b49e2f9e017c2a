"""Several public sets as one: every record once, under a class of its own set."""

import json
from zlib import crc32

import numpy as np
import pytest
from PIL import Image

from straightdp.arguments import build_parser
from straightdp.cli import _load_recipe, main
from straightdp.data.sources import load, load_together
from straightdp.errors import BadInput
from straightdp.recipe import load as load_recipe


def folder_of(root, classes, n=6, size=8, texts=False):
    rng = np.random.default_rng(crc32(f"{root.parent.name} {root.name} {classes}".encode()))
    rows = []
    for name in classes:
        (root / name).mkdir(parents=True)
        for k in range(n):
            Image.fromarray(rng.integers(0, 256, (size, size), dtype=np.uint8)).save(root / name / f"{k}.png")
            rows.append(f"{name}/{k}.png,{name},a {name} number {k}")
    if texts:
        (root / "metadata.csv").write_text("\n".join(["file_name,label,text", *rows]))
    return str(root)


def test_every_record_is_there_once_under_its_own_sets_class(tmp_path):
    names = [
        folder_of(tmp_path / "one", ("cat", "dog")),
        folder_of(tmp_path / "two", ("dog", "eel")),
        folder_of(tmp_path / "six", ("fox",)),
    ]
    whole = load_together(names, size=None, channels=1)
    assert whole.classes == ("cat", "dog of one", "dog of two", "eel", "fox")
    start = 0
    for name in names:
        part = load(name, size=None, channels=1)
        here = slice(start, start + len(part))
        assert np.array_equal(whole.x[here], part.x)
        said = [whole.classes[label].split(" of ")[0] for label in whole.labels[here]]
        assert said == [part.classes[label] for label in part.labels]
        start += len(part)
    assert start == len(whole)
    assert str(tmp_path) not in " ".join(whole.classes)  # a caption is released


def test_one_set_is_itself(tmp_path):
    name = folder_of(tmp_path / "one", ("cat", "dog"))
    alone, listed = load(name, size=None, channels=1), load_together((name,), size=None, channels=1)
    assert np.array_equal(alone.x, listed.x)
    assert alone.classes == listed.classes


def test_texts_are_kept_where_all_have_them(tmp_path):
    one, two = (folder_of(tmp_path / name, (name,), texts=True) for name in ("cat", "dog"))
    bare = folder_of(tmp_path / "bare", ("eel",))
    texts = load_together((one, two), size=None, channels=1).texts
    assert texts[0] == "a cat number 0"
    assert texts[-1] == "a dog number 5"
    assert load_together((one, bare), size=None, channels=1).texts is None


def test_sets_that_do_not_go_together_are_refused(tmp_path):
    small, large = folder_of(tmp_path / "small", ("cat",)), folder_of(tmp_path / "large", ("dog",), size=12)
    with pytest.raises(BadInput, match=r"image\.size"):
        load_together((small, large), size=None, channels=1)
    assert load_together((small, large), size=8, channels=1).shape == (1, 8, 8)
    with pytest.raises(BadInput, match="once"):
        load_together((small, small), size=None, channels=1)
    with pytest.raises(BadInput, match="at least one"):
        load_together((), size=None, channels=1)
    twin = folder_of(tmp_path / "elsewhere" / "small", ("cat",))
    with pytest.raises(BadInput, match="same name"):
        load_together((small, twin), size=None, channels=1)


RUN = (
    "net.width=16 net.depth=1 net.heads=2 pretrain.steps=2 distill.steps=2 dpsgd.steps=2 sample.n=4 sample.steps=2 "
    "release.features=4 release.rank=4 release.sigma=3 dpsgd.sigma=3 dpsgd.q=0.05 evaluate.probe_steps=2 "
    "privacy.epsilon=20 privacy.delta=1e-3 privacy.interval=1e-3 private.holdout=0.2"
)


def test_a_run_takes_a_list_and_so_does_the_command_line(tmp_path):
    private = folder_of(tmp_path / "private", ("cat", "dog"), n=20)
    public = [folder_of(tmp_path / "one", ("a", "b"), n=20), folder_of(tmp_path / "two", ("b",), n=20)]
    words = [word for setting in RUN.split() for word in ("--set", setting)]
    (tmp_path / "recipe.toml").write_text(f"[public]\ndata = {json.dumps(public)}\n")
    given = ["run", "--private", private, "--public", public[0], "--public", public[1], "--out", "anywhere"]
    assert _load_recipe(build_parser().parse_args(given)).public == load_recipe(tmp_path / "recipe.toml").public
    out = tmp_path / "out"
    assert main(["run", str(tmp_path / "recipe.toml"), "--private", private, "--out", str(out), *words]) == 0
    told = (out / "release/model.json").read_text()
    assert '"two"' in told  # a word of the caption that tells the sets' classes apart
    assert str(tmp_path) not in told
