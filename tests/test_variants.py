"""Every way through the pipeline, in one process and a few steps each: it ends, and its transcript holds."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from conftest import PIN
from straightdp import pipeline, recipe
from straightdp.audits.replay import replay
from straightdp.data import mixture
from straightdp.data.demo import digits
from straightdp.errors import BadInput
from straightdp.moments.field import MomentModel

SHORT = (
    "pretrain.steps=2",
    "distill.steps=2",
    "dpsgd.steps=2",
    "sample.n=20",
    "evaluate.probe_steps=5",
    f'privacy.pinned_key="{PIN}"',
)
LATENT = ("latent.d=32", "latent.width=8", "latent.steps=3", "latent.batch=8", "net.patch=1")
VARIANTS = {
    "tight, shared covariance": (("release.covariance=shared",), 3),
    "paper": (("privacy.mode=paper",), 3),
    "release alone": (("dpsgd.steps=0",), 3),
    "DP-SGD alone": ((), 1),
    "guided port": (("sample.port=guide",), 4),
    "release port": (("sample.port=release",), 4),
    "guidance weight one": (("sample.guidance=1",), 4),
    "no holdout": (("private.holdout=0",), 4),
    "holdout by fraction": (("private.holdout=0.2",), 4),
    "rgb": (("image.channels=3",), 4),
    "another size": (("image.size=12",), 4),
    "clip by public quantile": (("dpsgd.clip_quantile=0.5",), 4),
    "latent": (LATENT, 4),
    "latent, paper": ((*LATENT, "privacy.mode=paper"), 3),
    "latent, guided": ((*LATENT, "sample.port=guide"), 4),
    "planned": (("dpsgd.plan=tha", "dpsgd.steps=6"), 7),
    "planned, more buckets than steps": (("dpsgd.plan=tha",), 5),
    "planned, paper": (("dpsgd.plan=tha", "dpsgd.steps=6", "privacy.mode=paper"), 6),
    "cross moments of whole captions": (("release.condition=onehot",), 4),
    "cross moments of indicators": (("release.condition=slots",), 4),
    "cross moments of pooled words": (("release.condition=pooled",), 4),
    "cross moments, paper": (("release.condition=pooled", "privacy.mode=paper"), 3),
    "cross moments, shared covariance": (("release.condition=pooled", "release.covariance=shared"), 3),
    "cross moments, nothing centred": (("release.condition=pooled", "release.centre=false"), 4),
    "cross moments, nothing projected": (("release.condition=pooled", "release.project=false"), 4),
    "guided from the public plateau": (("sample.port=guide", "sample.t0=plateau"), 4),
    "not distilled": (("distill.steps=0", "sample.port=guide"), 4),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_runs_and_replays(name, tiny, tmp_path):
    settings, mechanisms = VARIANTS[name]
    if name == "DP-SGD alone":
        text = tiny.read_text().replace("[release]\nsigma = 3.0", "[release]\nweight = 0.0")
        tiny.write_text(text)
    folder = pipeline.run(recipe.load(tiny, SHORT + settings), tmp_path / "run")
    verdict = replay(folder.release)
    assert verdict.holds, verdict.text
    entries = [json.loads(line) for line in folder.transcript.read_text().splitlines()]
    declared = [e["mechanism"]["id"] for e in entries if e["kind"] == "declare"]
    assert len(declared) == mechanisms
    rows = (folder.synthetic / "metadata.csv").read_text().splitlines()
    assert len(rows) == 21
    scores = {s["name"] for s in json.loads(folder.evaluation.read_text())["scores"]}
    assert ("synthetic data" in scores) == (name != "no holdout")


def test_parameters_that_are_not_named_stay_as_they_are(tiny, tmp_path):
    settings = (*SHORT, 'dpsgd.parameters=["blocks.*.image.qkv.*","patch_out.bias"]')
    folder = pipeline.run(recipe.load(tiny, settings), tmp_path / "run")
    assert replay(folder.release).holds
    before, after = (load_file(path) for path in (folder.checkpoints / "distilled.safetensors", folder.model))
    moved = {name for name, value in before.items() if not np.array_equal(value, after[name])}
    assert moved == {f"blocks.{k}.image.qkv.{part}" for k in (0, 1) for part in ("weight", "bias")} | {"patch_out.bias"}


def test_a_parameter_that_is_not_there_is_refused_before_a_record_is_read(tiny, tmp_path):
    with pytest.raises(BadInput, match=r"called 'block\.\*\.qkv'; did you mean 'blocks\.\d\.\w+\.qkv\.\w+'\?"):
        pipeline.run(recipe.load(tiny, (*SHORT, 'dpsgd.parameters=["*","block.*.qkv"]')), tmp_path / "run")
    ledger = tmp_path / "run/private/transcript.jsonl"
    assert not ledger.exists() or '"execute"' not in ledger.read_text()


def test_the_two_dimensional_mixture_goes_all_the_way(tiny, tmp_path):
    """A control whose truth is known: the released means are the true ones, to within their noise."""
    settings = (
        "private.data=mixture",
        "public.data=mixture:public",
        "private.holdout=0",
        "private.caption={label}",
        "public.caption={label}",
        "image.channels=2",
        "image.size=1",
        "net.patch=1",
        "release.features=2",
        "privacy.n=4000",
    )
    folder = pipeline.run(recipe.load(tiny, SHORT + settings), tmp_path / "run")
    assert replay(folder.release).holds
    released = MomentModel.load(folder.moments)
    means, _ = mixture.truth()
    # a feature clip at the public median shortens the means; their directions are the truth's
    lengths = np.linalg.norm(released.mu, axis=1) * np.linalg.norm(means, axis=1)
    cosine = (released.mu.numpy() * means).sum(axis=1) / lengths
    assert cosine.min() > 0.98
    assert len((folder.synthetic / "points.csv").read_text().splitlines()) == 21


def test_a_declared_class_without_records_is_released_as_the_global_mean(tiny, tmp_path):
    declared = 'private.classes=["0","1","2","3","4","5","6","7","8","9","10"]'
    folder = pipeline.run(recipe.load(tiny, (*SHORT, declared)), tmp_path / "run")
    assert replay(folder.release).holds


def test_two_folders_and_an_epsilon_are_enough(tmp_path, monkeypatch):
    """The README's first own-data run, shortened: class subfolders, the small recipe, nothing declared."""
    from PIL import Image

    from straightdp.cli import main

    for name, records in (("mine", digits("train")), ("public", digits("test"))):
        for k in range(120):
            place = tmp_path / name / f"class {records.labels[k]}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.kron(records.x[k, 0], np.ones((2, 2), np.uint8))).save(place / f"{k}.png")
    out = tmp_path / "run"
    short = [word for setting in SHORT[:-1] for word in ("--set", setting)]
    sources = ["--private", str(tmp_path / "mine"), "--public", str(tmp_path / "public")]
    assert main(["run", "small", *sources, "--epsilon", "2", "--out", str(out), "--set", "image.size=8", *short]) == 0
    assert main(["replay", str(out / "release")]) == 0
    header = json.loads((out / "release/transcript.jsonl").read_text().splitlines()[0])
    assert header["epsilon"] == 2.0
    assert header["noise"] == "os"
