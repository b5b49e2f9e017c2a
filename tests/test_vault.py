"""The vault gives out declared, noised values and nothing else; a neighbour moves them no further than declared."""

import ast
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import straightdp
from straightdp.data.records import Records
from straightdp.dpsgd.clipping import ClippingEngine
from straightdp.errors import BadInput, BudgetRefused
from straightdp.privacy.accountant import Declaration
from straightdp.privacy.ledger import Ledger
from straightdp.privacy.mechanisms import RowSum
from straightdp.privacy.noise import Noise
from straightdp.privacy.vault import Vault
from straightdp.privacy.workload import Certificate
from straightdp.team import ALONE, Team

ROOT = Path(straightdp.__file__).parent
CPU = torch.device("cpu")
STEPS = 30
WORKLOAD = (
    Declaration("sum", "", "gaussian", 2.0, 3.0),
    Declaration("steps", "", "poisson_gaussian", 1.0, 1.5, 0.4, STEPS),
)


def some_records(n: int, seed: int = 0) -> Records:
    rng = np.random.default_rng(seed)
    return Records(rng.integers(0, 256, (n, 1, 2, 2), dtype=np.uint8), rng.integers(0, 3, n), ("a", "b", "c"))


def make_vault(folder: Path, records: Records, n: int = 50, workload=WORKLOAD) -> Vault:
    folder.mkdir(exist_ok=True)
    ledger = Ledger(folder / "t.jsonl")
    ledger.declare(
        Certificate(workload, 1.0, 1e-5, 1e-3), budget=9, noise="pinned", mode="tight", n=n, recipe="", assumptions=[]
    )
    noise = Noise(b"k" * 32, pinned=True, folder=folder / "noise")
    return Vault(records, ledger, noise, n=n, diagnostics=folder / "diagnostics.jsonl")


def small_engine(clip: float) -> ClippingEngine:
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    engine = ClippingEngine(net, lambda z, xi: (net(z.flatten(1)) - xi).square().sum(dim=1), clip)
    engine.preflight((torch.randn(2, 1, 2, 2), torch.randn(2, 3)))
    return engine


def gradient(
    vault: Vault, step: int, clip: float = 0.3, micro_batch: int = 8, engine: ClippingEngine | None = None
) -> torch.Tensor:
    """A linear map that is to give each record's own secret draw."""
    engine = engine or small_engine(clip)

    def clipped_sum(batch):
        return engine((batch.z, batch.draws.normal((len(batch.z), 3))), batch.mask)

    return vault.noisy_gradient("steps", step, clipped_sum, clip=clip, micro_batch=micro_batch, device=CPU)


def test_a_neighbour_moves_the_noisy_gradient_by_at_most_the_clip(tmp_path):
    """Same key, one record more at the end: what is left of the difference is that record's contribution."""
    few, more = some_records(20), some_records(21)
    more.x[:20], more.labels[:20] = few.x, few.labels
    a, b = make_vault(tmp_path / "a", few), make_vault(tmp_path / "b", more)
    moves = [float((gradient(a, k) - gradient(b, k)).norm()) * 0.4 * 50 for k in range(STEPS)]
    assert max(moves) <= 0.3 * (1 + 1e-4)
    assert max(moves) >= 0.3 * 0.99  # and it is attained
    assert min(moves) < 1e-5  # by no means every batch has the record


def test_a_neighbour_moves_the_noisy_sum_by_at_most_its_sensitivity(tmp_path):
    few, more = some_records(10), some_records(11)
    more.x[:10], more.labels[:10] = few.x, few.labels
    statistic = RowSum(lambda z, y: z * 100, 4, 2.0, blocks=3)
    a = make_vault(tmp_path / "a", few).gaussian_sum("sum", statistic)
    b = make_vault(tmp_path / "b", more).gaussian_sum("sum", statistic)
    assert 2.0 * 0.99 <= np.linalg.norm(a - b) <= 2.0


def test_an_empty_set_gives_pure_noise(tmp_path):
    vault = make_vault(tmp_path, some_records(0))
    draw = torch.cat([gradient(vault, k) for k in range(STEPS)]) * 0.4 * 50 / (1.5 * 0.3)
    assert abs(float(draw.std()) - 1) < 0.15
    written = diagnostics(tmp_path)
    assert [entry["step"] for entry in written] == list(range(STEPS))
    assert all(entry["batch"] == 0 for entry in written)


def test_the_sum_is_divided_by_the_expected_batch_of_the_declared_n(tmp_path):
    """The same records under N = 50 and N = 100: exactly half, whatever batch was drawn."""
    a, b = make_vault(tmp_path / "a", some_records(30), 50), make_vault(tmp_path / "b", some_records(30), 100)
    for step in range(5):
        torch.testing.assert_close(gradient(a, step), 2 * gradient(b, step), rtol=1e-6, atol=0)


@pytest.mark.parametrize("micro_batch", [1, 3, 8])
def test_the_micro_batch_size_changes_neither_the_sum_nor_its_draws(tmp_path, micro_batch):
    """A record's draws hang on its place in the batch, so the split into micro-batches is invisible."""
    records = some_records(40)
    one = gradient(make_vault(tmp_path / "a", records), 0, micro_batch=64)
    many = gradient(make_vault(tmp_path / "b", records), 0, micro_batch=micro_batch)
    torch.testing.assert_close(one, many, rtol=1e-5, atol=1e-7)


def diagnostics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "diagnostics.jsonl").read_text().splitlines()]


def test_diagnostics_wait_until_they_are_due(tmp_path):
    """And tell of every step then: how many records it had, and their norms."""
    workload = (Declaration("steps", "", "poisson_gaussian", 1.0, 1.5, 0.4, 53),)
    vault, sizes = make_vault(tmp_path, some_records(20), workload=workload), []
    engine = small_engine(0.3)

    def clipped_sum(batch):
        sizes[-1] += int(batch.mask.sum())
        return engine((batch.z, batch.draws.normal((len(batch.z), 3))), batch.mask)

    for step in range(53):
        sizes.append(0)
        due = step in (49, 52)
        vault.noisy_gradient("steps", step, clipped_sum, clip=0.3, micro_batch=8, device=CPU, diagnostics_due=due)
        lines = len(diagnostics(tmp_path)) if (tmp_path / "diagnostics.jsonl").exists() else 0
        assert lines == (53 if step == 52 else 50 if step >= 49 else 0)
    written = diagnostics(tmp_path)
    assert [entry["batch"] for entry in written] == sizes
    assert all(0 <= entry["clip_fraction"] <= 1 and entry["q10"] <= entry["q50"] <= entry["q90"] for entry in written)


class Together:
    """What two processes share: each waits for the other at every exchange, and the leader's values are everyone's."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size)
        self.values: dict[int, object] = {}

    def exchange(self, rank: int, value: object) -> dict[int, object]:
        self.values[rank] = value
        self.barrier.wait()
        found = dict(self.values)
        self.barrier.wait()
        return found


class ThreadTeam(Team):
    """A team whose members are threads. Its `summed` spoils the followers' shares, as `reduce` may."""

    def __init__(self, rank: int, size: int, together: Together):
        super().__init__(rank, size)
        self.together = together

    def told(self, value=None):
        return self.together.exchange(self.rank, value)[0]

    def gathered(self, value):
        found = self.together.exchange(self.rank, value)
        return [found[k] for k in range(self.size)] if self.leads else []

    def summed(self, x):
        found = self.together.exchange(self.rank, x.clone())
        return sum(found[k] for k in range(self.size)) if self.leads else torch.full_like(x, float("nan"))

    def from_leader(self, x):
        return self.together.exchange(self.rank, x)[0].clone()


def as_team(size: int, run) -> list:
    """`run(team)` in `size` threads; what each returned, by rank. An error in one is raised here."""
    together = Together(size)

    def member(rank: int):
        try:
            return run(ThreadTeam(rank, size, together))
        except BaseException:
            together.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(member, rank) for rank in range(size)]
    errors = [future.exception() for future in futures]
    for error in sorted(filter(None, errors), key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


@pytest.mark.parametrize("size", [2, 3])
def test_a_team_gives_everyone_the_gradient_of_one_process_alone(tmp_path, size):
    """Every record once, the noise once, divided once; and the diagnostics tell of all shares."""
    records, clip = some_records(40), 0.3
    engines = [small_engine(clip) for _ in range(size + 1)]
    alone = make_vault(tmp_path / "alone", records)
    expected = [gradient(alone, k, engine=engines[size], micro_batch=4) for k in range(STEPS)]
    make_vault(tmp_path / "team", records)

    def run(team):
        vault = open_vault(tmp_path / "team", records, team)
        return [gradient(vault, k, engine=engines[team.rank], micro_batch=4) for k in range(STEPS)]

    for found in as_team(size, run):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
    told, alone_told = diagnostics(tmp_path / "team"), diagnostics(tmp_path / "alone")
    assert [entry["batch"] for entry in told] == [entry["batch"] for entry in alone_told]
    for mine, theirs in zip(told, alone_told, strict=True):
        assert mine["clip_fraction"] == pytest.approx(theirs["clip_fraction"])
        assert mine["q50"] == pytest.approx(theirs["q50"], rel=1e-5)


def open_vault(folder: Path, records: Records, team: Team = ALONE) -> Vault:
    """On a transcript that is declared already."""
    ledger = Ledger(folder / "t.jsonl", reads=not team.leads)
    noise = Noise(b"k" * 32, pinned=True, folder=folder / "noise")
    return Vault(records, ledger, noise, n=50, diagnostics=folder / "diagnostics.jsonl", team=team)


def executed(folder: Path) -> list[int]:
    entries = [json.loads(line) for line in (folder / "t.jsonl").read_text().splitlines()]
    return [entry["step"] for entry in entries if entry["kind"] == "execute"]


def test_only_the_leader_of_a_team_spends_and_before_anyone_reads(tmp_path):
    """Each step is entered once; and whoever computes on records finds the entry on disk."""
    records, engines, found = some_records(40), [small_engine(0.3) for _ in range(2)], []
    make_vault(tmp_path, records)

    def run(team):
        vault = open_vault(tmp_path, records, team)

        def clipped_sum(batch):
            found.append((team.rank, executed(tmp_path)[-1] if executed(tmp_path) else None))
            return engines[team.rank]((batch.z, batch.draws.normal((len(batch.z), 3))), batch.mask)

        for step in range(5):
            vault.noisy_gradient("steps", step, clipped_sum, clip=0.3, micro_batch=64, device=CPU)

    as_team(2, run)
    assert executed(tmp_path) == [0, 1, 2, 3, 4]
    for rank in range(2):
        assert [step for who, step in found if who == rank] == [0, 1, 2, 3, 4]


def test_a_follower_that_tries_to_spend_is_refused(tmp_path):
    make_vault(tmp_path, some_records(4))
    with pytest.raises(BudgetRefused, match="leading process"):
        Ledger(tmp_path / "t.jsonl", reads=True).spend("steps", 0)
    assert executed(tmp_path) == []


def test_a_leader_that_may_not_spend_takes_the_team_down_before_a_record_is_read(tmp_path):
    """A step beyond the declared ones: the leader is refused, and its follower never gets past it."""
    records, touched = some_records(10), []
    make_vault(tmp_path, records)

    def run(team):
        vault = open_vault(tmp_path, records, team)
        vault.noisy_gradient("steps", STEPS, touched.append, clip=0.3, micro_batch=8, device=CPU)

    with pytest.raises(BudgetRefused, match="beyond"):
        as_team(2, run)
    assert not touched


def test_the_entry_is_on_disk_before_a_record_is_read(tmp_path):
    """The statistic looks at the transcript at the moment it first sees records."""
    seen = []

    def vectors(z, y):
        seen.append((tmp_path / "t.jsonl").read_text().splitlines()[-1])
        return z

    make_vault(tmp_path, some_records(4)).gaussian_sum("sum", RowSum(vectors, 4, 2.0))
    entry = json.loads(seen[0])
    assert (entry["kind"], entry["id"]) == ("execute", "sum")


def test_what_is_not_declared_never_reaches_a_record(tmp_path):
    touched = []
    statistic = RowSum(lambda z, y: touched.append(1) or z, 4, 2.0)
    vault = make_vault(tmp_path, some_records(4))
    with pytest.raises(BudgetRefused):
        vault.gaussian_sum("other", statistic)
    with pytest.raises(BudgetRefused):
        vault.gaussian_sum("steps", statistic)
    with pytest.raises(BudgetRefused, match="more than"):
        vault.gaussian_sum("sum", RowSum(lambda z, y: touched.append(1) or z, 4, 2.1))
    assert not touched


def test_more_records_than_the_declared_n_are_refused(tmp_path):
    with pytest.raises(BadInput, match=r"privacy\.n"):
        make_vault(tmp_path, some_records(51), 50)


def test_the_vault_has_no_way_to_read_a_record(tmp_path):
    vault = make_vault(tmp_path, some_records(4))
    public = {name for name in dir(vault) if not name.startswith("_")}
    assert public == {"n", "classes", "gaussian_sum", "noisy_gradient", "vote_histogram", "bind", "released"}


def test_what_was_given_out_is_kept_with_its_noise(tmp_path):
    vault = make_vault(tmp_path, some_records(4))
    assert vault.released == {}
    noisy = vault.gaussian_sum("sum", RowSum(lambda z, y: z, 4, 2.0))
    np.testing.assert_array_equal(vault.released["sum"], noisy)
    assert not np.array_equal(noisy[0], some_records(4).z().flatten(1).sum(dim=0).numpy())


def test_a_mechanism_runs_once(tmp_path):
    """The same noise on two sums would cancel."""
    vault = make_vault(tmp_path, some_records(4))
    vault.gaussian_sum("sum", RowSum(lambda z, y: z, 4, 2.0))
    with pytest.raises(BudgetRefused, match="has run already"):
        vault.gaussian_sum("sum", RowSum(lambda z, y: 2 * z, 4, 2.0))
    gradient(vault, 0)
    with pytest.raises(BudgetRefused, match="has run already"):
        gradient(vault, 0)


def test_noise_is_tied_to_the_sum_it_hides_in_every_session(tmp_path):
    """A second vault on the same folder, as a resumed run opens it: the same sum again, or none."""

    def again() -> Vault:
        ledger = Ledger(tmp_path / "t.jsonl")
        noise = Noise(b"k" * 32, pinned=True, folder=tmp_path / "noise")
        return Vault(some_records(4), ledger, noise, n=50, diagnostics=tmp_path / "d")

    first = make_vault(tmp_path, some_records(4)).gaussian_sum("sum", RowSum(lambda z, y: z, 4, 2.0))
    np.testing.assert_array_equal(again().gaussian_sum("sum", RowSum(lambda z, y: z, 4, 2.0)), first)
    with pytest.raises(BudgetRefused, match="another value"):
        again().gaussian_sum("sum", RowSum(lambda z, y: z / 2, 4, 2.0))
    again().bind("steps", "these weights")
    again().bind("steps", "these weights")
    with pytest.raises(BudgetRefused, match="another value"):
        again().bind("steps", "other weights")


def test_noise_for_another_clip_than_the_engines_is_refused(tmp_path):
    vault = make_vault(tmp_path, some_records(10))
    engine, seen = small_engine(1.0), []

    def clipped_sum(batch):
        seen.append(batch)
        return engine((batch.z, torch.zeros(len(batch.z), 3)), batch.mask)

    with pytest.raises(BudgetRefused, match="clipped to 1"):
        vault.noisy_gradient("steps", 0, clipped_sum, clip=1e-6, micro_batch=8, device=CPU)
    assert len(seen) == 1


def test_a_lost_tie_of_a_mechanism_that_ran_is_refused(tmp_path):
    """It cannot be known any more which sum its noise has hidden."""
    statistic = RowSum(lambda z, y: z[:, :2], 2, 2.0)
    vault = make_vault(tmp_path, some_records(9))
    vault.bind("sum", "this basis")
    vault.gaussian_sum("sum", statistic)
    for path in (tmp_path / "noise").glob("sum-start.bound"):
        path.unlink()
    again = Vault(
        some_records(9),
        Ledger(tmp_path / "t.jsonl"),
        Noise(b"k" * 32, pinned=True, folder=tmp_path / "noise"),
        n=50,
        diagnostics=tmp_path / "diagnostics.jsonl",
    )
    with pytest.raises(BudgetRefused, match=r"sum-start\.bound is lost"):
        again.bind("sum", "this basis")
    again.bind("steps", "these weights")  # which never ran
    with pytest.raises(BudgetRefused, match="not declared"):
        again.bind("another", "anything")


CALLERS = {
    "gaussian_sum": {"moments/release.py", "stages/rivals.py"},
    "vote_histogram": {"stages/election.py", "stages/rivals.py"},
    "noisy_gradient": {"dpsgd/trainer.py"},
    "vault": {"pipeline.py"},
    "accuracy": {"stages/evaluate.py"},
    "agreement": {"stages/evaluate.py"},
    "closeness": {"stages/evaluate.py"},
    "domain_rates": {"stages/evaluate.py"},
    "quality": {"stages/evaluate.py"},
    "quality_of_training": {"stages/evaluate.py"},
    "real_accuracy": {"stages/evaluate.py"},
    "scores": {"audits/attack.py"},
}


def test_only_the_listed_places_give_the_privacy_room_functions_to_run_on_records():
    found = {name: set() for name in CALLERS}
    for path, tree in modules_outside_privacy():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CALLERS:
                found[node.func.attr].add(path.relative_to(ROOT).as_posix())
    assert found == CALLERS


def modules_outside_privacy():
    for path in ROOT.rglob("*.py"):
        if "privacy" not in path.relative_to(ROOT).parts:
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def test_no_other_room_imports_the_raw_private_reader():
    for path, tree in modules_outside_privacy():
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{a.name}" for a in node.names)]
            elif isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            assert not any(name.startswith("straightdp.privacy.reader") for name in names), path
            if isinstance(node, ast.Attribute):
                assert not node.attr.startswith(("_Vault__", "_Intake__", "_Measures__")), path


def test_the_private_data_source_is_opened_only_from_the_privacy_room(monkeypatch, tmp_path):
    """At run time: whoever calls the loader with the private source has the raw reader on its stack."""
    import sys

    from straightdp import pipeline
    from straightdp.data import sources
    from straightdp.folder import RunFolder
    from straightdp.privacy import reader
    from straightdp.recipe import parse

    real, callers = sources.load, []

    def watched(source, **options):
        if source.startswith("digits"):
            callers.append(sys._getframe(1).f_globals["__name__"])
        return real(source, **options)

    monkeypatch.setattr(reader, "load", watched)
    monkeypatch.setattr(sources, "load", watched)  # by which public sets are read
    tree = {"private": {"data": "digits:train", "holdout": "digits:test"}, "public": {"data": "letters"}}
    pipeline.gather(parse(tree | {"image": {"size": 8}}), RunFolder(tmp_path / "none"), CPU)
    assert set(callers) == {"straightdp.privacy.reader"}
