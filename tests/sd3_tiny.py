"""A whole Stable Diffusion 3 of 300,000 random weights, made offline in a tenth of a second."""

from pathlib import Path

from straightdp.sd3.small import make_sd3

SIZE = 32  # pixels; a code is (4, 8, 8)


def tiny_sd3(folder: Path, seed: int = 0) -> Path:
    return make_sd3(folder, image=SIZE, width=32, heads=4, layers=2, captions=("the",), seed=seed)
