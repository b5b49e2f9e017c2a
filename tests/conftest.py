"""What several test files share: a tiny run on real files, and how a refusal must read."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

from straightdp.data.demo import digits, letters
from straightdp.data.sources import load
from straightdp.errors import BadInput

settings.register_profile("here", deadline=None)  # a busy machine is no failure
settings.load_profile("here")

TINY = """
[run]
device = "cpu"
[privacy]
epsilon = 5.0
n = 400
interval = 1e-3
[private]
data = "{private}"
holdout = "{holdout}"
caption = "the digit {{label}}"
[public]
data = "{public}"
caption = "the letter {{label}}"
[image]
size = 8
[net]
width = 16
depth = 2
heads = 2
patch = 2
caption_width = 8
caption_length = 4
[pretrain]
steps = 120
batch = 32
lr = 2e-3
[release]
sigma = 3.0
features = 8
rank = 8
[distill]
steps = 120
batch = 32
lr = 2e-3
[dpsgd]
sigma = 3.0
q = 0.05
steps = 150
draws = 2
micro_batch = 16
checkpoint_every = 10
[sample]
n = 60
[evaluate]
probe_steps = 30
"""
PIN = "aa" * 32


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """The tensors in tests are small: threads only get in each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def refusal(source, *expected, size=None, channels=1, classes=None) -> str:
    """The one sentence with which a source is refused; it must hold every expected part."""
    with pytest.raises(BadInput) as caught:
        load(str(source), size=size, channels=channels, classes=classes)
    message = str(caught.value)
    assert "\n" not in message
    assert ";" in message, f"no cure in: {message}"
    for part in expected:
        assert str(part) in message, message
    return message


def save(path: Path, records, n: int) -> Path:
    names = np.array(records.classes)[records.labels[:n]]
    if all(name.isdigit() for name in names):
        names = names.astype(np.int64)
    np.savez(path, images=records.x[:n, 0], labels=names)
    return path


@pytest.fixture(autouse=True, scope="session")
def in_float32():
    """Oracles are compared with the networks' float32, on every processor, in this process and those that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRAIGHTDP_BFLOAT16", "off")
        yield


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    return {
        "private": save(folder / "private.npz", digits("train"), 400),
        "holdout": save(folder / "holdout.npz", digits("test"), 100),
        "public": save(folder / "public.npz", letters(n=400), 400),
    }


@pytest.fixture
def tiny(tiny_data, tmp_path) -> Path:
    """The path of a recipe file."""
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.format(**tiny_data))
    return path


DATA = Path(os.environ.get("STRAIGHTDP_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")


@pytest.fixture
def data(monkeypatch) -> Path:
    """The standard data sets, where they are at hand."""
    if not (DATA / "mnist").is_dir():
        pytest.skip("the data sets are not here: set STRAIGHTDP_DATA to the folder that has them")
    monkeypatch.setenv("STRAIGHTDP_DATA", str(DATA))
    return DATA


@pytest.fixture(scope="module")
def book(tiny_data, tmp_path_factory) -> Path:
    """The tiny recipe, with its noise left to the budget."""
    path = tmp_path_factory.mktemp("recipe") / "tiny.toml"
    path.write_text(TINY.format(**tiny_data).replace("sigma = 3.0\n", ""))
    return path
