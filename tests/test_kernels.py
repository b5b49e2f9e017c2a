"""The Triton kernels, run by Triton's interpreter on the CPU, against float64 and against the plain formulas.

Triton decides at import whether it interprets, so the kernels run in a process of their own: it takes cases from a
file, and leaves what each kernel returned.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from straightdp.dpsgd import kernels
from straightdp.dpsgd.factors import Outer

pytest.importorskip("triton")

CHILD = """
import sys
import torch
from straightdp.dpsgd import factors, kernels

torch.set_num_threads(1)
factors.kernels.usable = lambda x: True  # the interpreter runs on the CPU
results = []
for case in torch.load(sys.argv[1]):
    a, g, factor, kernels.PROGRAMS = case["a"], case["g"], case["factor"], case.get("programs", kernels.PROGRAMS)
    found = {"ghost": kernels.outer_norms(a, g, True), "direct": kernels.outer_norms(a, g, False)}
    found["weighted"] = kernels.weighted_outer(a, g, factor)
    found["again"] = kernels.weighted_outer(a, g, factor)
    outer = factors.Outer(a, g, bias=True)
    found["fused"], found["norms"], found["sums"] = outer.fused, outer.norms(), outer.weighted(factor)
    results.append(found)
torch.save(results, sys.argv[2])
"""

SHAPES = {  # (records, tokens, inputs, outputs): below, at and beyond each tile, and never all of them whole
    "one tile with padding everywhere": (3, 20, 5, 7),
    "whole tiles": (2, 32, 16, 64),
    "several tiles of inputs": (3, 17, 130, 9),
    "several tiles of outputs": (2, 33, 6, 140),
    "several tiles of tokens": (2, 70, 18, 20),
    "one input and one output": (4, 16, 1, 1),
    "one record": (1, 19, 24, 12),
}


def strided(x: Tensor) -> Tensor:
    """The same values, every other row and record of a larger tensor: channels side by side, tokens apart."""
    larger = torch.full((2 * x.shape[0], 3 * x.shape[1], x.shape[2] + 5), float("nan"))
    view = larger[::2, ::3, 2:-3]
    view.copy_(x)
    assert view.stride(-1) == 1
    assert not view.is_contiguous()
    return view


def make(n: int, tokens: int, d: int, p: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a, g = (torch.randn(n, tokens, width, generator=generator) for width in (d, p))
    factor = torch.rand(n, generator=generator) + 0.1
    if n > 1:
        factor[n // 2] = 0
    return {"a": a, "g": g, "factor": factor}


def all_cases() -> dict[str, dict[str, Tensor]]:
    cases = {name: make(*shape, seed) for seed, (name, shape) in enumerate(SHAPES.items())}
    plain = cases["several tiles of tokens"]
    cases["strided"] = {"a": strided(plain["a"]), "g": strided(plain["g"]), "factor": plain["factor"]}
    turned = {name: plain[name].mT.contiguous().mT for name in ("a", "g")}  # channels apart: copied first
    cases["turned"] = turned | {"factor": plain["factor"]}
    spoilt = {name: x.clone() for name, x in plain.items()}
    spoilt["a"][1], spoilt["g"][1] = float("nan"), float("inf")
    cases["spoilt"] = spoilt
    cases["nobody"] = plain | {"factor": torch.zeros(len(plain["factor"]))}
    cases["nobody, spoilt"] = spoilt | {"factor": torch.zeros(len(plain["factor"]))}
    # Two tiles, so three records a program and one left over; behind the last record lies what must not be read.
    many = {name: x[:7] for name, x in make(12, 20, 70, 5, 77).items()}
    cases["many"] = many | {"programs": 6}
    return cases


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict]:
    """What the kernels make of every case."""
    folder = tmp_path_factory.mktemp("kernels")
    cases = all_cases()
    torch.save(list(cases.values()), folder / "cases.pt")
    source = str(Path(kernels.__file__).parents[2])
    paths = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", CHILD, str(folder / "cases.pt"), str(folder / "results.pt")]
    run = subprocess.run(
        command,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    results = torch.load(folder / "results.pt")
    return {name: case | result for (name, case), result in zip(cases.items(), results, strict=True)}


CASES = [*SHAPES, "strided", "turned", "many"]


def close(mine: Tensor, exact: Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(mine.double(), exact, rtol=tolerance, atol=tolerance * float(exact.abs().max()))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("formula", ["ghost", "direct"])
def test_norms_equal_float64(found, name, formula):
    case = found[name]
    a, g = case["a"].double(), case["g"].double()
    squares, aa, gg, sums = case[formula]
    close(squares.sum(dim=1), (g.mT @ a).square().sum(dim=(1, 2)))
    close(aa.sum(dim=1), a.square().sum(dim=(1, 2)))
    close(gg.sum(dim=1), g.square().sum(dim=(1, 2)))
    close(sums, g.sum(dim=1))


@pytest.mark.parametrize("name", CASES)
def test_the_weighted_sum_equals_float64(found, name):
    case = found[name]
    a, g = case["a"].double(), case["g"].double()
    close(case["weighted"].sum(dim=0), torch.einsum("n,ntp,ntd->pd", case["factor"].double(), g, a))


def test_a_program_that_adds_up_several_records_leaves_fewer_parts(found):
    assert len(found["many"]["weighted"]) == 3
    assert len(found["many"]["factor"]) == 7


@pytest.mark.parametrize("name", CASES)
def test_a_repeated_run_gives_the_same_bits(found, name):
    assert torch.equal(found[name]["weighted"], found[name]["again"])


@pytest.mark.parametrize("name", CASES)
def test_outer_gives_the_same_numbers_by_kernels_and_by_plain_torch(found, name):
    """And the kernels' bound on the rounding is the larger one: a tensor core does not round, it cuts off."""
    case = found[name]
    assert case["fused"]
    plain = Outer(case["a"], case["g"], bias=True)
    assert not plain.fused
    squared, error = plain.norms()
    close(case["norms"][0], squared.double())
    assert bool((case["norms"][1] >= error).all())
    for mine, theirs in zip(case["sums"], plain.weighted(case["factor"]), strict=True):
        close(mine, theirs.double())


def test_the_bound_covers_the_kernels_rounding(found):
    for name in CASES:
        case = found[name]
        a, g = case["a"].double(), case["g"].double()
        exact = (g.mT @ a).square().sum(dim=(1, 2)) + g.sum(dim=1).square().sum(dim=1)
        squared, error = case["norms"]
        assert bool(((squared.double() - exact).abs() <= error.double()).all()), name


def test_a_record_left_out_may_hold_anything(found):
    """The same bits as with finite values in its place: NaN times zero is not added."""
    clean, spoilt = found["several tiles of tokens"], found["spoilt"]
    assert float(spoilt["factor"][1]) == 0
    assert torch.isnan(spoilt["a"]).any()
    assert torch.isfinite(spoilt["weighted"]).all()
    assert torch.equal(spoilt["weighted"], clean["weighted"])
    for mine, theirs in zip(spoilt["sums"], clean["sums"], strict=True):
        assert torch.equal(mine, theirs)


def test_the_norm_of_a_spoilt_record_is_not_finite_and_the_others_are_as_before(found):
    clean, spoilt = found["several tiles of tokens"], found["spoilt"]
    for formula in ("ghost", "direct"):
        mine, theirs = spoilt[formula][0].sum(dim=1), clean[formula][0].sum(dim=1)
        assert not torch.isfinite(mine[1])
        assert torch.equal(mine[0], theirs[0])
    assert not torch.isfinite(spoilt["norms"][0][1])


@pytest.mark.parametrize("name", ["nobody", "nobody, spoilt"])
def test_nobody_sums_to_exactly_zero(found, name):
    assert bool((found[name]["weighted"] == 0).all())
    assert all(bool((part == 0).all()) for part in found[name]["sums"])


@pytest.mark.parametrize("name", [*CASES, "spoilt"])
def test_the_shapes_promised_to_the_compiler_are_those_returned(found, name, monkeypatch):
    """A compiled step is laid out by `register_fake`, before the kernel has run."""
    case = found[name]
    monkeypatch.setattr(kernels, "PROGRAMS", case.get("programs", kernels.PROGRAMS))
    with torch._subclasses.FakeTensorMode() as mode:
        a, g, factor = (mode.from_tensor(case[key]) for key in ("a", "g", "factor"))
        for formula in ("ghost", "direct"):
            promised = torch.ops.straightdp.outer_norms(a, g, formula == "ghost")
            assert [x.shape for x in promised] == [x.shape for x in case[formula]]
        assert torch.ops.straightdp.weighted_outer(a, g, factor).shape == case["weighted"].shape


def test_on_a_cpu_the_plain_path_is_taken():
    assert not Outer(torch.randn(2, 64, 8), torch.randn(2, 64, 8), bias=True).fused
