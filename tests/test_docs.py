"""The documentation's code runs as it stands."""

import re
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("page", ["engine.md"])
def test_the_pages_code_runs(page, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    names: dict = {}
    exec(compile(code, page, "exec"), names)
    assert "0.weight (16, 1, 3, 3) convolution" in capsys.readouterr().out
    assert all(torch.isfinite(p.grad).all() for p in names["engine"].parameters())
