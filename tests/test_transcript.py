"""The ledger writes before it touches, refuses what was not declared, and replay names the first wrong line."""

import json

import pytest

from straightdp.audits.replay import replay
from straightdp.errors import BadInput, BudgetRefused
from straightdp.files import file_hash
from straightdp.privacy import ledger as ledger_module
from straightdp.privacy.accountant import Declaration, epsilon
from straightdp.privacy.ledger import START, Ledger, seal
from straightdp.privacy.workload import Certificate

WORKLOAD = (
    Declaration("release/means", "sums", "gaussian", 1.25**0.5, 15.0),
    Declaration("release/covariance", "moments", "gaussian", 1.0, 8.0),
    Declaration("dpsgd/gradients", "gradients", "poisson_gaussian", 1.0, 4.0, 0.02, 5),
)


def new_ledger(path, noise="os") -> Ledger:
    certificate = Certificate(WORKLOAD, epsilon(WORKLOAD, 1e-5, 1e-3), 1e-5, 1e-3)
    book = Ledger(path)
    names = ("N", "class list", "image range", "public data")
    assumptions = [{"name": name, "value": "10", "source": "declared"} for name in names]
    book.declare(certificate, budget=1.0, noise=noise, mode="tight", n=10, recipe="x", assumptions=assumptions)
    return book


def finished(folder, noise="os"):
    folder.mkdir(exist_ok=True)
    book = new_ledger(folder / "transcript.jsonl", noise)
    book.spend("release/means")
    book.spend("release/covariance")
    for step in range(5):
        book.spend("dpsgd/gradients", step, clip=0.5)
    names = ("model.safetensors", "model.json", "moments.safetensors")
    for name in names:
        (folder / name).write_bytes(name.encode())
    book.close({name: file_hash(folder / name) for name in names})
    return folder / "transcript.jsonl"


def test_an_honest_transcript_holds(tmp_path):
    path = finished(tmp_path / "release")
    for place in (path, path.parent, tmp_path):
        verdict = replay(place)
        assert verdict.holds
        assert verdict.releasable
        assert verdict.epsilon == pytest.approx(epsilon(WORKLOAD, 1e-5, 1e-3))


def test_pinned_noise_is_named_as_not_releasable(tmp_path):
    verdict = replay(finished(tmp_path, "pinned"))
    assert verdict.holds
    assert not verdict.releasable
    assert "NOT RELEASABLE" in verdict.text


def test_any_flipped_byte_is_named(tmp_path):
    path = finished(tmp_path)
    data = path.read_bytes()
    line = 1
    for position in range(len(data)):
        if position % 7 == 0 or data[position : position + 1] == b"\n":
            spoilt = bytearray(data)
            spoilt[position] ^= 1 << (position % 8)
            path.write_bytes(bytes(spoilt))
            verdict = replay(path)
            assert not verdict.holds, position
            assert verdict.line in (line, line + 1), position  # a broken line end may show on either side of it
        if data[position : position + 1] == b"\n":
            line += 1


def test_a_dropped_repeated_or_moved_line_is_named(tmp_path):
    path = finished(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    for k in range(len(lines)):
        variants = {"dropped": lines[:k] + lines[k + 1 :], "repeated": lines[: k + 1] + lines[k:]}
        if k + 1 < len(lines):
            variants["moved"] = [*lines[:k], lines[k + 1], lines[k], *lines[k + 2 :]]
        for name, changed in variants.items():
            path.write_bytes(b"".join(changed))
            verdict = replay(path)
            assert not verdict.holds, (name, k)
            assert verdict.line is not None
            assert abs(verdict.line - (k + 1)) <= 1, (name, k, verdict.text)


def reseal(path, change):
    """What a forger would do: change entries and compute every hash anew."""
    entries = [json.loads(line) for line in path.read_bytes().splitlines()]
    for entry in entries:
        del entry["hash"]
    entries = change(entries)
    previous, data = START, b""
    for number, entry in enumerate(entries, start=1):
        line, previous = seal(entry | {"line": number, "previous": previous})
        data += line
    path.write_bytes(data)


def set_sigma(entries):
    entries[6]["mechanism"]["sigma"] *= 1.5
    return entries


def set_sigma_and_std(entries):
    entries[6]["mechanism"]["sigma"] *= 1.5
    entries[6]["mechanism"]["noise_std"] *= 1.5
    return entries


def drop_execution(entries):
    return [e for e in entries if not (e["kind"] == "execute" and e.get("step") == 3)]


def repeat_execution(entries):
    return [*entries[:11], entries[10], *entries[11:]]


def execute_undeclared(entries):
    entries[10]["id"] = "release/secret"
    return entries


def too_far(entries):
    entries[-2]["step"] = 5
    return entries


def other_budget(entries):
    entries[0]["epsilon"] = 0.1
    return entries


def fractional_count(entries):
    entries[5]["mechanism"]["count"] = 1e-6
    return entries


def no_delta(entries):
    entries[0]["delta"] = 1.0
    return entries


def small_sensitivity(entries):
    entries[5]["mechanism"] |= {"sensitivity": 1e-9, "noise_std": 15e-9}
    return entries


def sampled_release(entries):
    entries[5]["mechanism"] |= {"kind": "poisson_gaussian", "q": 1e-4}
    return entries


def one_pixel(entries):
    entries[0]["unit"] = "one pixel"
    return entries


def unknown_mechanism(entries):
    entries[5]["mechanism"]["id"] = "release/other"
    return entries


def no_header_n(entries):
    del entries[0]["n"]
    return entries


def files_a_list(entries):
    entries[-1]["files"] = []
    return entries


def nothing_executed(entries):
    kept = [e for e in entries if e["kind"] != "execute"]
    kept[-1]["executed"] = dict.fromkeys(kept[-1]["executed"], 0)
    return kept


def coarse_accountant(entries):
    entries[0]["accountant"]["interval"] = 1e6
    return entries


def model_not_named(entries):
    entries[-1]["files"] = {}
    return entries


def no_assumptions(entries):
    return [e for e in entries if e.get("name") != "class list"]


def no_clip(entries):
    del entries[-2]["clip"]
    return entries


def two_clips(entries):
    entries[-2]["clip"] = 0.6
    return entries


def nothing_released(entries):
    entries[-1]["files"] = {}
    return entries


def no_totals(entries):
    return entries[:-1]


def late_declaration(entries):
    return [*entries[:11], entries[6], *entries[11:]]


@pytest.mark.parametrize(
    ("forgery", "line"),
    [
        (set_sigma, 7),
        (set_sigma_and_std, 9),
        (drop_execution, 16),
        (repeat_execution, 12),
        (execute_undeclared, 11),
        (too_far, 16),
        (other_budget, 9),
        (no_totals, 17),
        (late_declaration, 12),
        (fractional_count, 6),
        (no_delta, 1),
        (small_sensitivity, 6),
        (sampled_release, 6),
        (one_pixel, 1),
        (unknown_mechanism, 6),
        (no_header_n, 1),
        (files_a_list, 17),
        (nothing_executed, 10),
        (coarse_accountant, 1),
        (model_not_named, 17),
        (no_assumptions, 8),
        (no_clip, 16),
        (two_clips, 16),
        (nothing_released, 17),
    ],
)
def test_a_forgery_with_fresh_hashes_is_named(tmp_path, forgery, line):
    path = finished(tmp_path)
    reseal(path, forgery)
    verdict = replay(path)
    assert not verdict.holds
    assert verdict.line == line, verdict.text


def test_resealing_without_a_change_is_no_forgery(tmp_path):
    path = finished(tmp_path)
    before = path.read_bytes()
    reseal(path, lambda entries: entries)
    assert path.read_bytes() == before


def test_another_model_beside_the_transcript_is_named(tmp_path):
    path = finished(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    assert not replay(path).holds


def test_what_was_not_declared_is_refused(tmp_path):
    book = new_ledger(tmp_path / "t.jsonl")
    for id, step in (("release/other", 0), ("release/means", 1), ("dpsgd/gradients", 5), ("dpsgd/gradients", -1)):
        with pytest.raises(BudgetRefused):
            book.spend(id, step)
    with pytest.raises(BudgetRefused):
        Ledger(tmp_path / "empty.jsonl").spend("release/means")


def test_a_step_is_recorded_once_across_sessions_and_run_once_in_each(tmp_path):
    path = tmp_path / "t.jsonl"
    book = new_ledger(path)
    book.spend("dpsgd/gradients", 0)
    with pytest.raises(BudgetRefused, match="has run already"):
        book.spend("dpsgd/gradients", 0)
    book = Ledger(path)
    book.spend("dpsgd/gradients", 0)
    book.spend("dpsgd/gradients", 1)
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines() if '"execute"' in line]
    assert steps == [0, 1]


def test_deleting_or_changing_the_published_copy_gives_no_budget_back(tmp_path):
    path, copy = tmp_path / "private.jsonl", tmp_path / "release.jsonl"
    new_ledger(path).spend("release/means")
    for spoil in (lambda: copy.unlink(missing_ok=True), lambda: copy.write_bytes(path.read_bytes()[:-40])):
        spoil()
        book = Ledger(path, copy)
        assert copy.read_bytes() == path.read_bytes()
        assert ("release/means", 0) in book.executed
    with pytest.raises(BudgetRefused, match="declared already"):
        book.declare(
            Certificate(WORKLOAD, 1.0, 1e-5, 1e-3), budget=1, noise="os", mode="tight", n=1, recipe="", assumptions=[]
        )
    before = path.read_bytes()
    book.spend("release/covariance")
    assert copy.read_bytes() == path.read_bytes()
    path.write_bytes(before)  # an older private/ comes back from a backup
    with pytest.raises(BadInput, match="older"):
        Ledger(path, copy)


def test_the_entry_is_synced_before_spend_returns(tmp_path, monkeypatch):
    path = tmp_path / "t.jsonl"
    book = new_ledger(path)
    synced = []
    real = ledger_module.os.fsync
    monkeypatch.setattr(ledger_module.os, "fsync", lambda fd: (synced.append(path.read_bytes()), real(fd)))
    book.spend("release/means")
    assert synced
    assert b'"id":"release/means"' in synced[-1].splitlines()[-1]


def test_a_closed_budget_spends_no_more(tmp_path):
    path = finished(tmp_path)
    with pytest.raises(BudgetRefused, match="closed"):
        Ledger(path).spend("release/means")


def test_a_line_cut_off_by_a_crash_is_removed_and_a_damaged_one_is_refused(tmp_path):
    path = tmp_path / "t.jsonl"
    new_ledger(path).spend("release/means")
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind":"execute","id":"rel')
    book = Ledger(path)
    assert path.read_bytes() == whole
    book.spend("release/covariance")
    assert len(path.read_bytes().splitlines()) == len(whole.splitlines()) + 1
    path.write_bytes(whole.replace(b"15.0", b"25.0"))
    with pytest.raises(BadInput, match="line 6"):
        Ledger(path)


def test_what_replay_takes_for_known_is_what_the_project_declares():
    from straightdp.audits.schema import KNOWN, known
    from straightdp.moments.release import release_parts
    from straightdp.privacy.workload import GRADIENTS, bucket_id
    from straightdp.recipe import RIVALS, parse
    from straightdp.stages.rivals import mechanism

    releases = [release_parts(parse({"release": {"condition": kind}})) for kind in ("class", "global", "pooled")]
    releases.append(release_parts(parse({"release": {"components": 2, "rounds": 9, "votes_share": 0.5}})))
    parts = {p.id: p.sensitivity for release in releases for p in release}
    for method in RIVALS:
        rival = mechanism(parse({"run": {"method": method}}))
        parts[rival.id] = rival.sensitivity
    assert {id: least for id, (kind, least) in KNOWN.items() if kind == "gaussian"} == pytest.approx(parts)
    assert set(KNOWN) - set(parts) == {GRADIENTS}
    for buckets in (1, 4, 16):
        assert all(known(bucket_id(k, buckets)) == KNOWN[GRADIENTS] for k in range(buckets))
    assert not any(known(f"{GRADIENTS}/{k}") for k in ("0", "17", "01", "1/2", "", "one"))


def test_a_stray_or_missing_file_in_a_release_is_not_releasable(tmp_path):
    path = finished(tmp_path / "release")
    (path.parent / "notes.txt").write_text("for my eyes only")
    verdict = replay(path)
    assert verdict.holds
    assert not verdict.releasable
    assert "notes.txt" in verdict.text
    (path.parent / "notes.txt").unlink()
    assert replay(path).releasable
    (path.parent / "synthetic" / "images").mkdir(parents=True)
    (path.parent / "synthetic" / "images" / "0.png").write_bytes(b"")
    assert replay(path).releasable
    (path.parent / "synthetic" / "noise.key").write_bytes(b"")
    assert "noise.key" in replay(path).text
    other = path.parent.rename(tmp_path / "published")
    assert not replay(other).releasable
    (other / "synthetic" / "noise.key").unlink()
    (other / "model.json").unlink()
    assert "missing" in replay(other).text


def test_no_transcript_is_bad_input(tmp_path):
    with pytest.raises(BadInput):
        replay(tmp_path)
