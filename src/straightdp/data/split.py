"""Set records aside so that every record decides for itself."""

from __future__ import annotations

import hashlib

import numpy as np

from straightdp.data.records import Records
from straightdp.errors import BadInput


def record_ids(records: Records) -> np.ndarray:
    """(N,) uint64: blake2b of each record's own pixels and class name, nothing else.

    The class's name is hashed, not its index: a new class may shift every index, and no record may notice
    another. Equal records have equal ids.
    """
    x = np.ascontiguousarray(records.x)
    shape = f"{x.dtype.str}{x.shape[1:]}".encode()
    heads = [shape + b"\0" + name.encode("utf-8", "surrogatepass") + b"\0" for name in records.classes]
    digests = (
        hashlib.blake2b(heads[y] + picture.tobytes(), digest_size=8, person=b"straightdp-split").digest()
        for picture, y in zip(x, records.labels.tolist(), strict=True)
    )
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


def split_by_content(records: Records, fraction: float) -> tuple[Records, Records]:
    """(keep, held_out): a record is held out when its id, read as a number in [0, 1), is below `fraction`.

    Guarantee: adding or removing one record moves no other, so add/remove neighbours stay neighbours on both
    sides; order is kept; equal records land on the same side. The share held out is `fraction` on average,
    not exactly. 0 holds out nothing, 1 everything; either side may be empty and keeps the whole class list.
    """
    if not 0 <= fraction <= 1:
        raise BadInput(f"the held-out fraction should be between 0 and 1 but is {fraction}; set private.holdout")
    uniform = (record_ids(records) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    held_out = uniform < fraction
    return records.subset(~held_out), records.subset(held_out)
