"""A job: one run or audit, known by what it runs. Its evaluation, title and device are not part of that."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import as_file
from pathlib import Path

from straightdp.errors import BadInput, nearest
from straightdp.recipe import BUILT_IN, Recipe, load
from straightdp.reproduce.experiment import ROOM, Experiment, Panel, Row

STAGE_STEPS = ("pretrain.steps", "distill.steps", "dpsgd.steps")  # of stages that a recipe leaves out with 0
MOVED = ("experiments", "src/straightdp/recipes")  # under which older results name a built-in recipe


@dataclass(frozen=True)
class Given:
    """Settings from the command line: of every run, and of runs on a frozen model alone."""

    settings: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()

    def to(self, recipe: str) -> tuple[str, ...]:
        return (*self.frozen, *self.settings) if is_frozen(recipe) else self.settings


NOTHING_GIVEN = Given()


def is_frozen(recipe: str) -> bool:
    return recipe in BUILT_IN and recipe.startswith("sd3-")


@dataclass(frozen=True)
class Job:
    """`experiment` and `row` are those that asked for it first."""

    recipe: str
    settings: tuple[str, ...] = ()
    command: str = "run"
    noise: bool = True
    experiment: str = field(default="", compare=False)
    row: str = field(default="", compare=False)

    @property
    def shown(self) -> str:
        return f"{self.experiment}: {self.row}"

    @cached_property
    def loaded(self) -> Recipe:
        return load(recipe_source(self.recipe), self.settings)

    @cached_property
    def identity(self) -> str:
        """Equal for two jobs that run the same, whatever is written in a recipe and whatever is set beside it."""
        return identity(self.command, self.noise, self.loaded)

    @cached_property
    def training(self) -> str:
        """Equal for jobs that differ in how they sample alone: they can go on from one trained model."""
        return _hash(self.command, self.noise, self.loaded.digest())

    @property
    def name(self) -> str:
        """Of the run's folder."""
        kind = ("" if self.command == "run" else "-audit") + ("" if self.noise else "-no-noise")
        about = f"eps{self.loaded.privacy.epsilon:g}-seed{self.loaded.run.seed}"
        return f"{Path(self.recipe).stem}{kind}-{about}-{self.identity[:8]}"

    @property
    def key(self) -> str:
        """What its noise is pinned with: jobs that can share a model have one key, any others keys of their own."""
        return _hash("pinned", self.training)

    def words(self, run: Path) -> list[str]:
        """Its command line; goes on with a run that is there."""
        words = [sys.executable, "-m", "straightdp", self.command, recipe_source(self.recipe), "--out", str(run)]
        settings = list(self.settings)
        if self.command == "run":
            settings.append(f'privacy.pinned_key="{self.key}"')
            words += ["--resume"] if (run / "recipe.toml").exists() else []
        words += [] if self.noise else ["--without-noise"]
        return words + [word for setting in settings for word in ("--set", setting)]


def identity(command: str, noise: bool, recipe: Recipe) -> str:
    """Of all that a run hangs on, and of what it is judged by; how thoroughly, and how fast, is left out."""
    tree = recipe.model_dump(mode="json", exclude={"evaluate"} if command == "audit" else {"evaluate", "audit"})
    for section, key in (("run", "title"), ("run", "device"), ("run", "compile"), ("dpsgd", "micro_batch")):
        tree[section].pop(key)
    return _hash(command, noise, tree, recipe.evaluate.probe, recipe.evaluate.clip)


def recipe_source(name: str) -> str:
    """What `straightdp run` takes: a built-in name, or a path; of the recipes that lie beside this file their path."""
    stem = Path(name).stem if str(Path(name).parent) in MOVED else name
    own = ROOM / "recipes" / f"{stem}.toml"
    if own.is_file():
        with as_file(own) as path:
            return str(path)
    return stem if stem in BUILT_IN else name


def jobs_of(
    experiment: Experiment,
    rows: Sequence[str] = (),
    epsilons: Sequence[float] = (),
    seeds: Sequence[int] = (),
    given: Given = NOTHING_GIVEN,
) -> list[Job]:
    """The experiment's jobs, every row's first seed first; of the rows and budgets that are named, else of all."""
    found = [
        (order, job_of(experiment, panel, row, epsilon, seed, given))
        for panel, row in experiment.rows()
        if row.ratio is None and (not rows or row.name in rows)
        for epsilon in panel.budgets(row)
        if not epsilons or epsilon in epsilons
        for order, seed in enumerate(seeds or panel.seeds or experiment.seeds)
    ]
    return [job for _, job in sorted(found, key=lambda pair: pair[0])]


def job_of(
    experiment: Experiment, panel: Panel, row: Row, epsilon: float, seed: int, given: Given = NOTHING_GIVEN
) -> Job:
    """What is given changes every run, but not what makes a row what it is: its own settings come last, and a stage
    that its recipe leaves out stays out."""
    method = row.runs()
    own = (*panel.settings, *method.settings, f"privacy.epsilon={float(epsilon)}", f"run.seed={seed}")
    steps, others = _parted(given.to(method.recipe))
    try:
        before = load(recipe_source(method.recipe), (*experiment.settings, *others, *own))
        steps = [one for one in steps if getattr(before, one.partition(".")[0].strip()).steps]
        settings = (*experiment.settings, *others, *steps, *own)
        job = Job(method.recipe, settings, method.command, method.noise, experiment.name, row.name)
        loaded = job.loaded
    except BadInput as error:
        raise BadInput(f"{experiment.name}: {row.name}: {error}") from None
    if is_frozen(method.recipe) and not loaded.sd3.model:
        raise BadInput(f"{job.shown}: no frozen model was named; give --model")
    return job


def _parted(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Settings that give a stage steps, and the others."""
    steps: list[str] = []
    others: list[str] = []
    for setting in given:
        key, _, value = (part.strip() for part in setting.partition("="))
        (steps if key in STAGE_STEPS and value != "0" else others).append(setting)
    return steps, others


def check_chosen(
    experiments: Sequence[Experiment], rows: Sequence[str], epsilons: Sequence[float], given: Sequence[str]
) -> None:
    """Refuse a row or budget that no experiment has, and settings that would belie a row."""
    for key, cure in (("privacy.epsilon", "--epsilons"), ("run.seed", "--seeds"), ("privacy.pinned_key", "no key")):
        if any(setting.partition("=")[0].strip() == key for setting in given):
            raise BadInput(f"{key} is every row's own and cannot be set for all of them; give {cure} instead")
    every = [(panel, row) for one in experiments for panel, row in one.rows() if row.ratio is None]
    own = {setting for _, row in every for setting in row.runs().settings}
    for setting in given:
        if any(_belies(setting, one) for one in own):
            key = setting.partition("=")[0].strip()
            raise BadInput(f"{key} tells rows of this table apart and cannot be set for all of them; leave it out")
    names = {row.name for _, row in every}
    budgets = {epsilon for panel, row in every for epsilon in panel.budgets(row)}
    for name in rows:
        if name not in names:
            raise BadInput(f"there is no row {name!r}{nearest(name, names)}")
    for epsilon in epsilons:
        if epsilon not in budgets:
            raise BadInput(f"there is no ε = {epsilon:g}; there is {', '.join(f'{e:g}' for e in sorted(budgets))}")


def _belies(given: str, own: str) -> bool:
    """Whether a setting for all rows takes away what a row's own setting tells. A stage that a row leaves out stays
    out, however many steps the others' is given."""
    (key, _, value), (own_key, _, own_value) = ([part.strip() for part in one.partition("=")] for one in (given, own))
    leaves_out = own_key in STAGE_STEPS and own_value == "0"
    return key == own_key and not (leaves_out and value != "0")


def _hash(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
