"""Where data lies on this machine, and the public files that `straightdp data get` may fetch."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from straightdp.errors import BadInput


@dataclass(frozen=True)
class File:
    """One public file. `size` and `digest` ("md5:..." or "sha256:...") are of its content.

    With `gunzip`, the content is what the gzip holds: any gzip of it passes, and the bare content too.
    """

    name: str
    url: str
    size: int
    digest: str
    gunzip: bool = False


def _mnist_like(base: str, digests: tuple[str, str, str, str]) -> tuple[File, ...]:
    """The four files of MNIST's layout; their sizes follow from 60,000 and 10,000 images of 28x28."""
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    sizes = (16 + 60_000 * 784, 8 + 60_000, 16 + 10_000 * 784, 8 + 10_000)
    return tuple(
        File(f"{name}-ubyte.gz", f"{base}{name}-ubyte.gz", size, f"md5:{digest}", gunzip=True)
        for name, size, digest in zip(names, sizes, digests, strict=True)
    )


_CODH = "https://codh.rois.ac.jp/kmnist/dataset/kmnist/"

# KMNIST's train split is taken in idx form: the digest of that file is the widely published one.
CATALOGUE: dict[str, tuple[File, ...]] = {
    "mnist": _mnist_like(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        (
            "6bbc9ace898e44ae57da46a324031adb",
            "a25bea736e30d166cdddb491f175f624",
            "2646ac647ad5339dbf082846283269ea",
            "27ae3e4e09519cfbb04c329615203637",
        ),
    ),
    "fashion-mnist": _mnist_like(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        (
            "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "9018921c3c673c538a1fc5bad174d6f9",
            "8181f5470baa50b63fa0f6fddb340f0a",
            "15d484375f8d13e6eb1aabb0c3f46965",
        ),
    ),
    "kmnist": (
        File(
            "train-images-idx3-ubyte.gz",
            _CODH + "train-images-idx3-ubyte.gz",
            18_165_135,
            "sha256:51467d22d8cc72929e2a028a0428f2086b092bb31cfb79c69cc0a90ce135fde4",
        ),
        File(
            "train-labels-idx1-ubyte.gz",
            _CODH + "train-labels-idx1-ubyte.gz",
            29_497,
            "sha256:e38f9ebcd0f3ebcdec7fc8eabdcdaef93bb0df8ea12bee65224341c8183d8e17",
        ),
        File(
            "kmnist-test-imgs.npz",
            _CODH + "kmnist-test-imgs.npz",
            3_079_479,
            "sha256:692d824896bec8f3c357ebf7a0fe904ed67ac632ce953d0b58f7fbef7bb27d87",
        ),
        File(
            "kmnist-test-labels.npz",
            _CODH + "kmnist-test-labels.npz",
            5_304,
            "sha256:660f13a4705431ea2a6391c41ecbe384cd0d932c595a101ec4f3b8989e785046",
        ),
    ),
    # The weights of 2015-12-05 in which an FID is measured, in the form that PyTorch reads.
    "inception": (
        File(
            "pt_inception-2015-12-05-6726825d.pth",
            "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth",
            95_628_359,
            "sha256:6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2",
        ),
    ),
}


def find(name: str) -> tuple[File, ...]:
    """The files of a catalogue entry; "mnist:train" means "mnist"."""
    plain = name.partition(":")[0]
    if plain not in CATALOGUE:
        near = difflib.get_close_matches(plain, CATALOGUE, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(CATALOGUE)}"
        raise BadInput(f"data set {name!r} is not in the catalogue; {hint}")
    return CATALOGUE[plain]


def data_root() -> Path:
    """$STRAIGHTDP_DATA if it is set, else straightdp in the user's cache ($XDG_CACHE_HOME or ~/.cache)."""
    if chosen := os.environ.get("STRAIGHTDP_DATA"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "straightdp"
