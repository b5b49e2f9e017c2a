"""An experiment file: a title and panels; a panel has rows, budgets, seeds, the figures shown, and the paper's values.

    title = "My table"
    seeds = [0, 1, 2]
    settings = ["evaluate.references=false"]              # of every run

    [[panels]]
    epsilons = [1, 3]                                     # left out, every row has an `epsilon` of its own
    figures = ["accuracy", "distance"]

    [[panels.rows]]
    name = "DP-MERF"
    method = "dp-merf"                                    # of methods.toml; or recipe = "FILE.toml"
    settings = ["rival.features=1000"]
    paper = { accuracy = ["0.856 ± 0.005", "0.842 ± 0.011"] }          # as printed, one for each budget

The built-in ones lie in tables/, what several of them run in methods.toml.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from straightdp.errors import BadInput, nearest
from straightdp.reproduce.figures import FIGURES, SYNTHETIC

Budget = Annotated[float, Field(gt=0)]
Seed = Annotated[int, Field(ge=0)]
ROOM = files("straightdp") / "reproduce"


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Method(Part):
    """What a row runs."""

    recipe: str
    settings: tuple[str, ...] = ()
    command: Literal["run", "audit"] = "run"
    noise: bool = True


class Row(Part):
    name: str = Field(min_length=1)
    method: str | None = None
    recipe: str | None = None
    settings: tuple[str, ...] = ()
    noise: bool = True
    epsilon: Budget | None = None
    of: str = Field(default=SYNTHETIC, description="which set of the run's evaluation is shown")
    ratio: tuple[str, str] | None = Field(default=None, description="runs nothing: one row's figures over another's")
    at: float | None = Field(default=None, description="of a plot over something else than epsilon")
    block: str = Field(default="", description="heads this row and those below it")
    paper: dict[str, tuple[str, ...]] = {}

    @field_validator("recipe")
    @classmethod
    def _beside_the_file(cls, recipe: str | None, info: ValidationInfo) -> str | None:
        """A recipe's path counts from the experiment file that names it."""
        place = Path((info.context or {}).get("folder", "."), recipe or "")
        return str(place.resolve()) if recipe and place.is_file() else recipe

    @model_validator(mode="after")
    def _is_one_thing(self) -> Row:
        if sum(part is not None for part in (self.method, self.recipe, self.ratio)) != 1:
            raise ValueError(f"row {self.name!r} needs a method, a recipe or a ratio, and one of them alone")
        return self

    def runs(self) -> Method:
        """Not of a ratio."""
        base = methods()[self.method] if self.method else Method(recipe=self.recipe or "")
        settings, noise = (*base.settings, *self.settings), base.noise and self.noise
        return base.model_copy(update={"settings": settings, "noise": noise})


class Panel(Part):
    title: str = ""
    epsilons: tuple[Budget, ...] = ()
    seeds: tuple[Seed, ...] = ()
    settings: tuple[str, ...] = ()
    figures: tuple[str, ...] = Field(min_length=1)
    plot: tuple[str, ...] = Field(default=(), description="figures drawn over epsilon, or over the rows' `at`")
    against: str = Field(default="", description="a figure in epsilon's place, better low: the plotted one is a front")
    grid: bool = Field(default=False, description="also a picture of the runs' samples")
    rows: tuple[Row, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _fits_together(self) -> Panel:
        for figure in (*self.figures, *self.plot, *([self.against] if self.against else [])):
            if figure not in FIGURES:
                raise ValueError(f"figure {figure!r} is not known{nearest(figure, FIGURES)}")
        if self.against and (len(self.plot) != 1 or not self.epsilons):
            raise ValueError("a front is of one figure in `plot` against another, at the panel's epsilons")
        for row in self.rows:
            self._fits(row)
        return self

    def _fits(self, row: Row) -> None:
        if row.method and row.method not in methods():
            raise ValueError(f"row {row.name!r}: method {row.method!r} is not known{nearest(row.method, methods())}")
        if row.ratio and (lost := [name for name in row.ratio if name not in self.names()]):
            raise ValueError(f"row {row.name!r}: its ratio is of {lost[0]!r}, which is no row of the panel")
        if bool(self.epsilons) == (row.epsilon is not None):
            raise ValueError(
                f"row {row.name!r} has its budget from the panel's epsilons or from its own, not from both"
            )
        for figure, values in row.paper.items():
            if figure not in self.figures:
                raise ValueError(f"row {row.name!r}: the paper's {figure!r} is not shown; shown: {list(self.figures)}")
            if len(values) != max(1, len(self.epsilons)):
                raise ValueError(
                    f"row {row.name!r}: {len(values)} of the paper's values for {max(1, len(self.epsilons))} budgets"
                )

    def names(self) -> list[str]:
        return [row.name for row in self.rows if row.ratio is None]

    def budgets(self, row: Row) -> tuple[float, ...]:
        return self.epsilons if row.epsilon is None else (row.epsilon,)


class Experiment(Part):
    name: str
    title: str
    note: str = ""
    seeds: tuple[Seed, ...] = (0,)
    settings: tuple[str, ...] = ()
    panels: tuple[Panel, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _every_row_has_a_name_of_its_own(self) -> Experiment:
        names = [row.name for panel in self.panels for row in panel.rows]
        if twice := [name for k, name in enumerate(names) if name in names[:k]]:
            raise ValueError(f"two rows are called {twice[0]!r}: give each a name of its own")
        for values in (self.seeds, *(v for panel in self.panels for v in (panel.seeds, panel.epsilons))):
            if len(set(values)) < len(values):
                raise ValueError(f"a budget or seed is named twice: {list(values)}")
        return self

    def rows(self) -> list[tuple[Panel, Row]]:
        return [(panel, row) for panel in self.panels for row in panel.rows]


def names() -> list[str]:
    """The built-in experiments."""
    tables = (ROOM / "tables").iterdir()
    return sorted(entry.name.removesuffix(".toml") for entry in tables if entry.name.endswith(".toml"))


def read(name: str) -> Experiment:
    """A built-in experiment by its name, or a file's, called by its stem."""
    known = names()
    source = ROOM / "tables" / f"{name}.toml" if name in known else Path(name)
    try:
        tree = tomllib.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        hint = nearest(name, known) if not name.endswith(".toml") else ""
        raise BadInput(
            f"experiment {name} could not be read ({error.strerror}){hint or '; known: ' + ', '.join(known)}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"experiment {name} is not valid TOML ({error}); mend that line") from None
    if "name" in tree:
        raise BadInput(f"experiment {name}: key name is not known: it is called after its file; leave it out")
    called = {"name": name if name in known else Path(name).stem}
    try:
        return Experiment.model_validate(called | tree, context={"folder": Path(name).parent})
    except ValidationError as error:
        raise BadInput(f"experiment {name}: {_first(error)}") from None


@cache
def methods() -> dict[str, Method]:
    tree = tomllib.loads((ROOM / "methods.toml").read_text(encoding="utf-8"))
    return {name: Method.model_validate(body) for name, body in tree.items()}


def _first(error: ValidationError) -> str:
    """What is wrong first, where, and what to do, in one sentence."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        parts = {0: Experiment, 2: Panel, 4: Row}  # how deep a key lies, panels and rows counted
        known = parts.get(len(first["loc"]) - 1, Experiment).model_fields
        return f"key {where} is not known{nearest(str(first['loc'][-1]), known)}"
    if first["type"] == "missing":
        return f"key {where} is missing; add it"
    message = first["msg"].removeprefix("Value error, ")
    return f"{where} is not allowed: {message}; mend it" if where else f"{message}; mend it"
