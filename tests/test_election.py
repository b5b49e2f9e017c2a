"""Votes of the records among draws that the release guides: what they cost, what is elected, and what is refused."""

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import PIN
from straightdp import generator, pipeline, recipe
from straightdp.audits.replay import replay
from straightdp.cli import main
from straightdp.files import file_hash
from straightdp.metrics import inception
from straightdp.moments.elected import Elected
from straightdp.moments.release import VOTES, release_parts
from straightdp.stages.election import weights_of
from straightdp.stages.gather import certificate_of
from test_rival_runs import Eyes

CLASSES, CANDIDATES = 10, 4
LESSONS = 20  # of the classifier that finds names: what it knows does not matter here
SMALL = (
    "privacy.epsilon=4",
    "privacy.interval=0.01",
    "release.votes_share=0.4",
    f"release.candidates={CANDIDATES}",
    "net.depth=1",
    "pretrain.steps=3",
    "distill.steps=0",
    "dpsgd.steps=0",
    "dpsgd.weight=0",
    "sample.n=30",
    "sample.steps=3",
    "sample.port=elected",
    "sample.t0=0.4",
    "sample.guidance=0",
    "sample.labels=found",
    "evaluate.probe_steps=5",
)


@pytest.fixture(autouse=True, scope="module")
def eyes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inception, "find", lambda device, root=None: Eyes())
        patch.setattr(generator, "LESSONS", LESSONS)
        yield


@pytest.fixture(scope="module")
def done(book, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "votes"
    pipeline.run(recipe.load(book, (*SMALL, f"privacy.pinned_key={PIN}")), out)
    return out


def words(book: Path, out: Path, *more: str) -> list[str]:
    given = (*SMALL, f"privacy.pinned_key={PIN}", *more)
    return ["run", str(book), "--out", str(out), *(word for one in given for word in ("--set", one))]


# What they cost


@pytest.mark.parametrize("more", [(), ("release.components=2", "privacy.n=1000"), ("release.covariance=public",)])
def test_votes_take_their_share_of_the_release_and_the_rest_keeps_its_proportions(book, more):
    with_votes = release_parts(recipe.load(book, (*SMALL, *more)))
    without = release_parts(recipe.load(book, (*SMALL, *more, "release.votes_share=0", "sample.port=guide")))
    shares = {part.id: part.part for part in with_votes}
    assert math.isclose(sum(shares.values()), 1)
    assert shares.pop(VOTES) == 0.4
    assert shares == pytest.approx({part.id: 0.6 * part.part for part in without})


def test_the_budget_holds_and_the_votes_have_the_noise_of_their_share(book):
    certificate = certificate_of(recipe.load(book, SMALL))
    assert certificate.epsilon <= 4
    mu2 = {part.id: part.sigma**-2 for part in certificate.workload}
    assert mu2[VOTES] / sum(mu2.values()) == pytest.approx(0.4)


def test_the_transcript_has_one_vote_and_replay_agrees(done):
    lines = [json.loads(line) for line in (done / "release/transcript.jsonl").read_text().splitlines()]
    executed = [line["id"] for line in lines if line["kind"] == "execute"]
    assert executed.count(VOTES) == 1
    assert executed[-1] == VOTES  # after the moments that its candidates are drawn by
    verdict = replay(done / "release")
    assert verdict.holds
    assert verdict.epsilon <= 4


@pytest.mark.parametrize("what", ["changed", "gone"])
def test_what_was_elected_is_sealed(done, tmp_path, what):
    copy = tmp_path / "release"
    subprocess.run(["cp", "-r", done / "release", copy], check=True)
    path = copy / "elected.safetensors"
    state = load_file(path)
    path.unlink()
    if what == "changed":
        save_file(state | {"weights": state["weights"] + 1}, path)
    else:
        path = copy / "transcript.jsonl"
        path.write_text(path.read_text().replace("elected.safetensors", "selected.safetensors"))
    assert not replay(copy).holds


# What is elected


def test_weights_are_votes_above_the_noise_and_a_class_without_any_keeps_all():
    noisy = torch.tensor([[5.0, 1.0, -2.0], [1.4, 0.0, -9.0]]).double()
    assert weights_of(noisy, 1.0).tolist() == [[3.5, 0.0, 0.0], [1.0, 1.0, 1.0]]


def test_pictures_are_drawn_of_their_class_as_often_as_their_weight_says():
    images = torch.arange(6, dtype=torch.uint8).reshape(2, 3, 1, 1, 1).expand(2, 3, 1, 4, 4)
    elected = Elected(images, torch.tensor([[3.0, 1.0, 0.0], [0.0, 0.0, 2.0]]))
    y = torch.tensor([0, 1]).repeat_interleave(4000)
    drawn = ((elected.draw(y, torch.Generator().manual_seed(0))[:, 0, 0, 0] + 1) * 127.5).round()
    counts = torch.bincount(drawn.long(), minlength=6).tolist()
    assert counts[2:] == [0, 0, 0, 4000]
    assert abs(counts[0] - 3000) < 5 * math.sqrt(4000 * 0.75 * 0.25)
    drawn = ((elected.draw(y, torch.Generator().manual_seed(0), 0.6)[:, 0, 0, 0] + 1) * 127.5).round()
    counts = torch.bincount(drawn.long(), minlength=6).tolist()
    for found, share in zip(counts, (0.5, 0.3, 0.2, 0.2, 0.2, 0.6), strict=True):
        assert abs(found - 4000 * share) < 5 * math.sqrt(4000 * share * (1 - share))


def test_what_is_released_are_candidates_and_the_noisy_count_of_each(done):
    state = load_file(done / "release/elected.safetensors")
    candidates = load_file(done / "private/checkpoints/candidates.safetensors")["images"]
    assert candidates.shape[:2] == (CLASSES, CANDIDATES)
    assert torch.equal(state["images"], candidates)
    assert state["weights"].shape == (CLASSES, CANDIDATES)
    assert (state["weights"] >= 0).all()
    assert (state["weights"].sum(dim=1) > 0).all()


def test_the_nearest_candidate_gets_the_vote(book, tmp_path):
    """Without noise, against a plain search."""
    run = recipe.load(book, SMALL)
    pipeline.run(run, tmp_path / "run", noise=False)
    state = load_file(tmp_path / "run/private/not-private/elected.safetensors")
    with np.load(run.private.data) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    records = Eyes()(torch.from_numpy(images).float().reshape(len(images), -1) / 127.5 - 1)
    seen = Eyes()(state["images"].flatten(0, 1).float() / 127.5 - 1).unflatten(0, (CLASSES, CANDIDATES))
    votes = torch.zeros(CLASSES, CANDIDATES)
    for record, label in zip(records, labels, strict=True):
        votes[label, (seen[label] - record).square().sum(dim=1).argmin()] += 1
    torch.testing.assert_close(state["weights"], weights_of(votes.double(), 0.0))


def test_a_release_draws_anew_from_what_was_elected(done, tmp_path):
    for name, more in (("a", ()), ("b", ()), ("c", ("--seed", "5")), ("d", ("--set", "sample.vary=0.999"))):
        assert main(["sample", str(done / "release"), "--n", "20", "--out", str(tmp_path / name), *more]) == 0
    assert file_hash(tmp_path / "a") == file_hash(tmp_path / "b")
    assert file_hash(tmp_path / "a") != file_hash(tmp_path / "c")
    assert file_hash(tmp_path / "a") != file_hash(tmp_path / "d")


# Stops, and what is refused


@pytest.mark.pipeline
def test_kill_9_after_the_vote_was_entered_changes_nothing(done, book, tmp_path):
    script = """
import os, signal, sys
from straightdp import generator
from straightdp.cli import main
from straightdp.metrics import inception
from straightdp.privacy import mechanisms
from test_election import LESSONS
from test_rival_runs import Eyes
generator.LESSONS = LESSONS
inception.find = lambda device, root=None: Eyes()
mechanisms.VoteSum.exact = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
main(sys.argv[1:])
"""
    given = words(book, tmp_path / "run")
    killed = subprocess.run([sys.executable, "-c", script, *given], cwd=Path(__file__).parent, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert b"release/votes" in (tmp_path / "run/private/transcript.jsonl").read_bytes()
    assert main([*given, "--resume"]) == 0
    for name in ("transcript.jsonl", "elected.safetensors", "synthetic"):
        assert file_hash(tmp_path / "run/release" / name) == file_hash(done / "release" / name)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            ("release.weight=0", "sample.port=weights", "sample.labels=asked", "dpsgd.steps=2", "dpsgd.weight=1"),
            "give release.weight",
        ),
        (("privacy.mode=paper",), "set privacy.mode = 'tight'"),
        (("release.condition=global", "sample.labels=asked"), "release.condition = 'class'"),
        (("sample.t0=plateau",), "set sample.t0 to a number"),
        (("release.votes_share=0",), "needs votes: give release.votes_share"),
        (("release.votes_share=1",), "less than 1"),
        (("run.method=dp-merf", "sample.port=weights", "sample.labels=asked"), "leave release.votes_share out"),
        (("release.candidates=1",), "greater than or equal to 2"),
    ],
)
def test_what_cannot_be_voted_on_is_refused_before_anything_is_written(book, tmp_path, capsys, more, said):
    assert main(words(book, tmp_path / "run", *more)) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_without_inception_nothing_is_spent(book, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(inception, "find", lambda device, root=None: None)
    assert main(words(book, tmp_path / "run")) == 2
    assert "straightdp data get inception" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_release_without_votes_has_nothing_elected(book, tmp_path, capsys):
    without = (*SMALL, "release.votes_share=0", "sample.port=guide")
    pipeline.run(recipe.load(book, without), tmp_path / "run")
    given = ["sample", str(tmp_path / "run/release"), "--n", "5", "--out", str(tmp_path / "x")]
    assert main([*given, "--set", "sample.port=elected"]) == 2
    assert "this release has none" in capsys.readouterr().err
