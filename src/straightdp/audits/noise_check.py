"""Was the noise that was added as large as declared? The one audit that looks inside."""

from __future__ import annotations

import json
import math
from collections import defaultdict

import numpy as np
from scipy.stats import chi2

from straightdp.folder import RunFolder
from straightdp.privacy.ledger import Ledger


def noise_ratios(folder: RunFolder) -> dict[str, tuple[float, float]]:
    """For each mechanism: the noise's root mean square over the declared one, and how likely one as far off is (chi^2).

    Of sums from the draws that were kept; of gradients from what each step wrote down.
    """
    declared = Ledger(folder.ledger, reads=True).declared
    squares: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for path in sorted((folder.private / "noise").glob("*.npz")):
        with np.load(path) as kept:
            draw, scale = kept["draw"].astype(np.float64), float(kept["scale"])
        id = next((id for id in declared if path.name.startswith(id.replace("/", "-") + "-")), path.stem)
        squares[id].append((float(np.square(draw / scale).sum()), len(draw)))
    if folder.diagnostics.exists():
        for line in folder.diagnostics.read_text().splitlines():
            row = json.loads(line)
            part = declared[row["id"]]
            ratio = row["noise"] / (part.sigma * row["clip"])
            squares[row["id"]].append((ratio**2 * row["size"], row["size"]))
    return {id: _summary(parts) for id, parts in squares.items()}


def _summary(parts: list[tuple[float, int]]) -> tuple[float, float]:
    total, n = sum(square for square, _ in parts), sum(size for _, size in parts)
    return math.sqrt(total / n), 2 * float(min(chi2.cdf(total, n), chi2.sf(total, n)))
