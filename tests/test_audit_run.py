"""`straightdp audit`, whole: what it trains, what it may leave behind, and that it catches a run that leaks."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import numpy as np
import pytest

from straightdp.audits import sums
from straightdp.audits.findings import Findings, table
from straightdp.audits.noise_check import noise_ratios
from straightdp.audits.replay import replay
from straightdp.cli import main
from straightdp.data.records import Records
from straightdp.errors import BadInput
from straightdp.folder import RunFolder
from straightdp.privacy.noise import AuditNoise, Noise
from straightdp.privacy.planted import Planted, coins

TINY = (
    "net.width=16", "net.depth=2", "net.heads=2", "pretrain.steps=20", "pretrain.batch=32", "distill.steps=10",
    "dpsgd.steps=6", "dpsgd.draws=2", "sample.n=60", "sample.steps=3", "evaluate.probe_steps=20", "evaluate.seeds=1",
    "evaluate.real_reference=false", "release.components=2",
)  # fmt: skip
ATTACKS = ("audit.canaries=40", "audit.references=50", "audit.draws=4", "audit.samples=30", "audit.shadows=2")


def command(*words: object) -> int:
    return main([str(word) for word in words])


def settings(*given: str) -> list[str]:
    return [word for setting in given for word in ("--set", setting)]


@pytest.fixture(scope="module")
def attacked() -> list[np.ndarray]:
    """The canaries' scores of each released sum: of the honest run's, then of the leaky one's."""
    return []


@pytest.fixture(scope="module")
def audited(tmp_path_factory, attacked) -> Path:
    out, scores = tmp_path_factory.mktemp("audit") / "demo", sums.canary_scores
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "canary_scores", lambda *given: attacked.append(scores(*given)) or attacked[-1])
        assert command("audit", "demo", "--out", out, *settings(*TINY, *ATTACKS)) == 0
    return out


def test_nothing_of_an_audit_can_be_taken_for_a_release(audited):
    assert not list(audited.rglob("release"))
    assert stat.S_IMODE((audited / "private/audit.json").stat().st_mode) == 0o600
    words = {"honest": "an audit, not a release", "shadow-1": "an audit", "leaky": "not what was declared"}
    for name, word in words.items():
        verdict = replay(audited / name / "audited")
        assert verdict.holds
        assert not verdict.releasable
        assert word in verdict.text


def test_the_honest_run_is_clean_and_the_leaky_one_is_caught(audited):
    found = json.loads((audited / "private/audit.json").read_text())
    assert found["honest"]["suspicions"] == []
    bounds = [found["honest"][one]["bound"] for one in ("one_run", "from_sums")]
    assert max(bounds) <= found["honest"]["claimed"] <= 3.0
    assert found["leaky"]["from_sums"]["v"] == found["leaky"]["from_sums"]["r"]  # an attack that can succeed
    assert any("dpsgd/gradients is not what was declared" in said for said in found["leaky"]["suspicions"])
    assert all(ratio < 0.01 for ratio, _ in found["leaky"]["noise"].values())
    for one in found.values():
        assert one["one_run"]["m"] == 40
        assert one["one_run"]["r"] == 20
        assert 0 <= one["loss"]["auc"] <= 1
        assert one["lira"] is not None
        assert one["references"] == 50


def test_every_released_sum_is_attacked(audited, attacked):
    """The class means' and both rounds' of the components: each gives a run without noise away by itself."""
    assert len(attacked) == 6
    included = coins(40, RunFolder(audited / "leaky").coins)
    for scores in attacked[3:]:  # a class whose coins fell alike says nothing of them
        assert (scores[included][:, None] > scores[~included]).mean() > 0.85


def test_canaries_are_among_the_records_by_their_coins_and_n_does_not_tell(audited):
    heads = {}
    for name in ("honest", "leaky"):
        folder = RunFolder(audited / name, release="audited")
        heads[name] = json.loads(folder.transcript.read_text().splitlines()[0])
        assert heads[name]["n"] == 1347 + 40
    kept = [coins(40, RunFolder(audited / name).coins) for name in ("honest", "leaky")]
    assert 0 < kept[0].sum() < 40
    assert not np.array_equal(*kept)


def test_an_audit_goes_on_where_it_was_and_attacks_alike(audited, capsys):
    before = (audited / "private/audit.json").read_text()
    models = {path: path.stat().st_mtime_ns for path in audited.rglob("model.safetensors")}
    assert command("audit", "demo", "--out", audited, *settings(*TINY, *ATTACKS)) == 0
    kept = {name: Findings.read(found) for name, found in json.loads(before).items()}
    assert table(kept) in capsys.readouterr().out  # and it is shown alike from what is kept
    assert models == {path: path.stat().st_mtime_ns for path in audited.rglob("model.safetensors")}
    assert (audited / "private/audit.json").read_text() == before


def test_a_runs_internal_page_shows_the_audit_and_the_public_one_does_not(audited, tmp_path, capsys):
    run = tmp_path / "run"
    assert command("run", "demo", "--out", run, *settings(*TINY)) == 0
    public = (run / "release/report.html").read_bytes()
    assert command("audit", "demo", "--out", audited, "--report", run, *settings(*TINY, *ATTACKS)) == 0
    assert "40 canaries" in (run / "report.html").read_text()
    assert (run / "release/report.html").read_bytes() == public
    capsys.readouterr()
    assert command("audit", "demo", "--out", audited, "--report", run, *settings(*TINY, "dpsgd.steps=7")) == 2
    assert "another recipe" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (("run.method=dp-merf", "sample.port=weights"), "no velocity field"),
        (("audit.shadows=1",), "no spread"),
        (("private.holdout=0",), "held-out"),
        (("audit.canaries=5",), "audit.canaries"),
    ],
)
def test_bad_input_ends_in_one_sentence(given, word, tmp_path, capsys):
    assert command("audit", "demo", "--out", tmp_path / "out", *settings(*TINY, *given)) == 2
    said = capsys.readouterr().err
    assert word in said
    assert said.count("\n") == 1


def test_a_runs_folder_is_not_taken_for_an_audits(tmp_path, capsys):
    (tmp_path / "recipe.toml").write_text("")
    assert command("audit", "demo", "--out", tmp_path, *settings(*TINY)) == 2
    assert "run's folder" in capsys.readouterr().err


def test_an_audits_noise_is_that_of_no_other_run(tmp_path):
    key = b"k" * 32
    plain, marked, weak = (
        Noise(key, pinned=True, folder=tmp_path / "a", context="c"),
        AuditNoise(key, pinned=True, folder=tmp_path / "b", context="c"),
        AuditNoise(key, pinned=True, folder=tmp_path / "c", context="c", leak=0.1),
    )
    assert [n.label for n in (plain, marked, weak)] == ["pinned", "audit", "leaky"]
    draws = [n.integer_gaussian("x", 1e6, 20_000) for n in (plain, marked, weak)]
    assert np.std(draws[0]) == pytest.approx(1e6, rel=0.03)
    assert np.std(draws[1]) == pytest.approx(1e6, rel=0.03)
    assert np.std(draws[2]) == pytest.approx(1e5, rel=0.03)
    assert not np.array_equal(draws[0], draws[1])


def test_the_noise_check_sees_a_tenth_and_passes_the_whole(audited):
    """On the files of real runs, against the declared scale; a tenth by shrinking what was kept."""
    honest = noise_ratios(RunFolder(audited / "honest", release="audited"))
    rounds = {"release/components/1", "release/components/2"}
    assert set(honest) == {"release/means", "release/covariance", "release/trace", "dpsgd/gradients"} | rounds
    assert all(p > 1e-6 for _, p in honest.values())
    assert honest["dpsgd/gradients"][0] == pytest.approx(1, rel=0.02)


def test_shadows_see_no_record_that_is_scored():
    records = Records(np.arange(40, dtype=np.uint8).reshape(10, 1, 2, 2), np.zeros(10, np.int64), ("a", "b"))
    holdout = Records(np.arange(100, 148, dtype=np.uint8).reshape(12, 1, 2, 2), np.ones(12, np.int64), ("a", "b"))
    pictures = np.full((4, 1, 2, 2), 255, np.uint8)
    included = np.array([True, False, True, True])

    def sets(shadow):
        train, others = Planted(pictures, np.array([7, 8, 9, 11]), included, 3, shadow).among(records, holdout)
        return [{row.tobytes() for row in part.x} for part in (train, others)], train

    (target, others), train = sets(None)
    assert len(train) == 13
    assert train.labels[10:].tolist() == [1, 1, 1]
    for k in (0, 1):
        (seen, same), _ = sets(k)
        assert same == others
        assert not seen & (target | others)
        assert len(seen) == 4
    with pytest.raises(BadInput, match="held-out"):
        Planted(pictures, np.zeros(4, np.int64), included, 7).among(records, holdout)
