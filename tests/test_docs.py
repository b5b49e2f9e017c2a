"""The documentation's code runs as it stands, and its commands are accepted."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@pytest.mark.parametrize("page", ["engine.md"])
def test_the_pages_code_runs(page, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    names: dict = {}
    exec(compile(code, page, "exec"), names)
    assert "0.weight (16, 1, 3, 3) convolution" in capsys.readouterr().out
    assert all(torch.isfinite(p.grad).all() for p in names["engine"].parameters())


def test_table_3s_command_is_one_that_is_accepted(tmp_path, capfd):
    """As experiments/sd3_prior.py has it; nothing is run."""
    script = ROOT / "experiments/sd3_prior.py"
    (command,) = re.findall(r"sd3_prior.py (reproduce table3 .*?)\n\n", script.read_text(), re.DOTALL)
    words = [*shlex.split(command), "--dry-run", "--results", str(tmp_path)]
    subprocess.run([sys.executable, script, *words], check=True)
    out = capfd.readouterr().out
    assert "table3: uniform DP-SGD, ε = 2" in out
