"""What the prior learns on: the public batch, at the times that it is asked for."""

from __future__ import annotations

import json

import pytest
import torch

from straightdp import pipeline
from straightdp.cli import main
from straightdp.errors import BadInput
from straightdp.folder import RunFolder
from straightdp.recipe import load
from straightdp.stages.evaluate import LATE
from straightdp.stages.inputs import public_key
from straightdp.stages.public import _public_batch

CPU = torch.device("cpu")
GUIDED = ("sample.port=guide", "sample.t0=0.5")


def gathered(recipe, tmp_path, *settings: str):
    return pipeline.gather(load(str(recipe), settings), RunFolder(tmp_path / "none"), CPU)


def test_a_late_prior_learns_on_late_times_and_on_the_same_pictures(tiny, tmp_path):
    whole, late = (gathered(tiny, tmp_path, *GUIDED, f"pretrain.t_min={t}") for t in (0.0, 0.4))
    every, some = (_public_batch(inputs, 300, torch.Generator().manual_seed(1)) for inputs in (whole, late))
    assert float(every[1].min()) < 0.1
    torch.testing.assert_close(some[1], 0.4 + 0.6 * every[1])
    for (x, t, captions, v), inputs in ((every, whole), (some, late)):
        z = x + (1 - t)[:, None, None, None] * v
        public = inputs.public_z.flatten(1)
        assert float((torch.cdist(z.flatten(1), public).min(dim=1).values).max()) < 1e-2
        assert torch.equal(captions, every[2])


def test_a_prior_that_learned_on_all_times_is_known_as_it_was(tiny, tmp_path):
    """Half-done runs and cached priors are known by these."""
    assert "t_min" not in load("demo").pretrain.identity()
    digests = {load(str(tiny), (*GUIDED, f"pretrain.t_min={t}")).digest() for t in (0, 0.2, 0.4)}
    keys = {public_key(gathered(tiny, tmp_path, *GUIDED, f"pretrain.t_min={t}"), "pretrain") for t in (0, 0.2, 0.4)}
    assert len(digests) == len(keys) == 3


@pytest.mark.parametrize(
    "settings",
    [
        ("sample.port=weights",),
        ("sample.port=guide", "sample.t0=0.3"),
        ("sample.port=guide", "sample.t0=plateau"),
        ("release.votes_share=0.5", "sample.port=elected", "sample.t0=0.3", "sample.vary=0.5"),
        ("release.votes_share=0.5", "sample.port=elected", "sample.t0=0.5", "sample.vary=0.3"),
    ],
)
def test_a_start_before_all_that_was_learned_is_refused(tiny, settings):
    tight = ("privacy.mode=tight",)
    load(str(tiny), (*tight, *settings, "pretrain.t_min=0.2") if "sample.t0=0.3" in settings else ())
    with pytest.raises(BadInput, match=r"pretrain\.t_min = 0\.4 leaves"):
        load(str(tiny), (*tight, *settings, "pretrain.t_min=0.4"))


def test_the_release_alone_starts_nowhere(tiny):
    assert load(str(tiny), ("sample.port=release", "pretrain.t_min=0.4")).pretrain.t_min == 0.4


def test_a_release_remembers_from_where_its_model_learned(tiny, tmp_path, capsys):
    run, short = tmp_path / "run", ("pretrain.steps=20", "distill.steps=0", "dpsgd.steps=0", "sample.n=20")
    settings = [word for one in (*GUIDED, "pretrain.t_min=0.4", *short) for word in ("--set", one)]
    assert main(["run", str(tiny), "--out", str(run), *settings]) == 0
    draw = ["sample", str(run / "release"), "--n", "12", "--out"]
    assert main([*draw, str(tmp_path / "later"), "--set", "sample.t0=0.6"]) == 0
    capsys.readouterr()
    assert main([*draw, str(tmp_path / "sooner"), "--set", "sample.t0=0.3"]) == 2
    said = capsys.readouterr().err
    assert "learned times from 0.4 on" in said
    assert "later sample.t0" in said
    assert not (tmp_path / "sooner").exists()


def test_a_late_prior_is_no_public_model_to_compare_with(tiny, tmp_path):
    """It would begin at noise, of which it knows nothing."""
    short = ("pretrain.steps=20", "distill.steps=0", "dpsgd.steps=0", "sample.n=20", "evaluate.thorough=on")
    sets = {}
    for t_min in ("0", "0.4"):
        run = tmp_path / t_min
        settings = [word for one in (*GUIDED, f"pretrain.t_min={t_min}", *short) for word in ("--set", one)]
        assert main(["run", str(tiny), "--out", str(run), *settings]) == 0
        body = json.loads((run / "private/evaluation.json").read_text())
        sets[t_min] = {one["name"] for one in body["label_aware"]}
        assert (LATE in body["left_out"]) == (t_min == "0.4")
    assert sets["0"] - sets["0.4"] == {"public model only"}
