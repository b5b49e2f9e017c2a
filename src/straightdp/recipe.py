"""One run as one frozen, validated tree. TOML in, TOML out; an unknown key is refused, with the nearest known one."""

from __future__ import annotations

import hashlib
import json
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from straightdp.errors import BadInput, nearest
from straightdp.sections import (
    ALL,
    OWN_TEXT,
    RIVALS,
    Audit,
    Distill,
    DpSgd,
    Evaluate,
    Image,
    Latent,
    Net,
    Pretrain,
    Privacy,
    Private,
    Public,
    Release,
    Rival,
    Run,
    Sample,
    Sd3,
    Section,
)


class Recipe(Section):
    run: Run = Run()
    privacy: Privacy = Privacy()
    private: Private = Private()
    public: Public = Public()
    image: Image = Image()
    latent: Latent = Latent()
    net: Net = Net()
    pretrain: Pretrain = Pretrain()
    release: Release = Release()
    distill: Distill = Distill()
    dpsgd: DpSgd = DpSgd()
    sample: Sample = Sample()
    evaluate: Evaluate = Evaluate()
    sd3: Sd3 = Sd3()
    rival: Rival = Rival()
    audit: Audit = Audit()

    @model_validator(mode="after")
    def _spends_something(self) -> Recipe:
        if self.run.method in RIVALS:
            if self.latent.d is not None or self.latent.flow != "codes":
                raise ValueError(f"run.method = {self.run.method!r} works on pixels: leave latent.d and flow out")
            if self.private.slots:
                raise ValueError(f"run.method = {self.run.method!r} knows classes alone: leave private.slots out")
            if self.sample.port != "weights":
                raise ValueError(f"run.method = {self.run.method!r} releases no moments: set sample.port=weights")
            if moved := [key for key in ("jitter", "churn", "levels") if getattr(self.sample, key)]:
                cure = " ".join(f"sample.{key}=0" for key in moved)
                raise ValueError(f"run.method = {self.run.method!r} is drawn as it was made: set {cure}")
            if self.sample.labels != "asked" or self.release.votes_share:
                cure = "set sample.labels=asked, and leave release.votes_share out"
                raise ValueError(f"run.method = {self.run.method!r} releases no moments: {cure}")
            if self.sd3.model and self.run.method != "private-evolution":
                raise ValueError(f"run.method = {self.run.method!r} trains a network of its own: leave sd3.model out")
            if self.sd3.model:
                self._fits_frozen_model()
            return self
        if self.run.method == "from-scratch":
            self._has_no_public_data()
        if self.sd3.model:
            self._fits_frozen_model()
        if self.release.weight == 0 and self.release.sigma is None and self.dpsgd.steps == 0:
            raise ValueError("release.weight and dpsgd.steps are both 0: nothing would be released")
        if self.release.weight == 0 and self.release.sigma is None and self.sample.port != "weights":
            raise ValueError(f"sample.port = {self.sample.port!r} needs a release: give release.weight")
        if self.sample.labels == "found":
            self._can_find_labels()
        if self.private.slots and self.private.caption == OWN_TEXT:
            raise ValueError("private.slots has no use when captions are the records' own texts: leave it out")
        if self.release.condition in ("onehot", "slots") and self.private.caption == OWN_TEXT:
            condition = self.release.condition
            raise ValueError(
                f"release.condition = {condition!r} needs a caption template; take 'pooled' for free texts"
            )
        if self.dpsgd.steps and self.dpsgd.weight == 0 and self.dpsgd.sigma is None:
            raise ValueError("dpsgd.weight is 0 but dpsgd.steps is not: set dpsgd.steps = 0")
        if self.release.splits:
            self._can_split_classes()
        if self.release.votes_share:
            self._can_vote()
        if self.latent.flow == "pixels":
            self._can_draw_pixels()
        if self.sample.starts < self.pretrain.t_min:
            raise ValueError(
                f"pretrain.t_min = {self.pretrain.t_min:g} leaves the model without any idea of earlier times, and "
                f"sample.port = {self.sample.port!r} would start there: set pretrain.t_min = 0, or a later sample.t0"
            )
        return self

    def _can_vote(self) -> None:
        section = self.release
        if section.weight == 0 and section.sigma is None:
            raise ValueError("release.votes_share needs a release: give release.weight")
        if self.privacy.mode != "tight" or section.condition != "class":
            raise ValueError(
                "release.votes_share is of classes that moments guide to: set privacy.mode = 'tight' and "
                "release.condition = 'class'"
            )
        if self.private.slots or self.private.caption == OWN_TEXT or self.sd3.model:
            raise ValueError("release.votes_share knows classes alone: leave private.slots, {text} and sd3.model out")
        if self.sample.t0 == "plateau":
            raise ValueError("release.votes_share is of draws that start at a given time: set sample.t0 to a number")

    def _can_draw_pixels(self) -> None:
        said = "latent.flow = 'pixels'"
        if self.latent.d is None:
            raise ValueError(f"{said} is of a release of codes: give latent.d, or leave it out")
        if self.release.weight == 0 and self.release.sigma is None:
            raise ValueError(f"{said} needs a release: give release.weight")
        if self.distill.steps or self.dpsgd.steps:
            raise ValueError(
                f"{said} keeps private records, which are seen as codes, from the network: set distill.steps = 0 and "
                "dpsgd.steps = 0"
            )
        if self.sample.port == "weights":
            raise ValueError(f"{said} leaves the network without any idea of the release: set sample.port = 'guide'")
        if self.sample.port == "guide" and self.sample.t0 == "plateau":
            raise ValueError(
                f"{said} has no plateau, which is found where network and moments are of one kind: set sample.t0 to a "
                "number"
            )

    def _can_find_labels(self) -> None:
        if self.release.weight == 0 and self.release.sigma is None:
            raise ValueError("sample.labels = 'found' needs a release: give release.weight")
        if self.release.condition != "class" or self.private.slots or self.private.caption == OWN_TEXT:
            raise ValueError(
                "sample.labels = 'found' needs moments of every class: set release.condition = 'class', and leave "
                "private.slots and {text} out"
            )

    def _can_split_classes(self) -> None:
        section, n = self.release, self.privacy.n
        said = f"release.components = {section.components}"
        if section.weight == 0 and section.sigma is None:
            raise ValueError(f"{said} needs a release: give release.weight")
        if self.privacy.mode != "tight" or section.condition != "class" or section.covariance != "residual":
            raise ValueError(
                f"{said} splits what is released of each class: set privacy.mode = 'tight', release.condition = "
                "'class' and release.covariance = 'residual'"
            )
        least, cure = (2, "set 1") if section.components == "auto" else (section.components, "set fewer")
        parts = least * len(self.private.classes or ("",))
        if n is not None and n < parts * section.min_count:
            raise ValueError(
                f"{said} makes {parts} components in all at least, and N = {n} leaves each fewer than "
                f"release.min_count = {section.min_count:g} records: {cure}"
            )

    def _fits_frozen_model(self) -> None:
        if self.run.method == "from-scratch" or self.latent.d is not None or self.public.data:
            raise ValueError(
                "sd3.model brings its own code and public set: leave out public.data, latent.d and 'from-scratch'"
            )
        if self.dpsgd.parameters != ALL:
            raise ValueError("of sd3.model its adapters train, all of them: leave dpsgd.parameters out")
        if not self.release.project:
            raise ValueError("sd3.model's codes are too large to be released whole: leave release.project out")
        if self.image.channels != 3 or self.image.size is None:
            raise ValueError("sd3.model draws colour: set image.channels = 3 and image.size")
        if self.sample.labels != "asked":
            raise ValueError("sd3.model's draws of a release are no pictures to learn from: leave sample.labels out")
        if self.private.caption == OWN_TEXT or self.release.condition not in ("class", "global"):
            raise ValueError(
                "sd3.model knows the captions of a template alone: leave {text} out, and set release.condition to "
                "'global' or 'class'"
            )
        if self.privacy.mode == "paper" and self.release.covariance != "public":
            raise ValueError(
                "sd3.model's codes are too large for the paper's covariance: set release.covariance = 'public'"
            )

    def _has_no_public_data(self) -> None:
        wanted = {"release.weight": 0, "release.sigma": None, "pretrain.steps": 0, "dpsgd.clip_quantile": 0}
        for dotted, value in wanted.items():
            section, key = dotted.split(".")
            if getattr(getattr(self, section), key) != value:
                cure = f"leave {dotted} out" if value is None else f"set {dotted} = {value}"
                raise ValueError(f"run.method = 'from-scratch' sees no public data: {cure}")
        if self.public.data or self.dpsgd.plan != "uniform" or self.latent.d is not None or self.sample.t0 == "plateau":
            raise ValueError(
                "run.method = 'from-scratch' sees no public data: leave out public.data, latent.d, dpsgd.plan and a "
                "plateau for sample.t0"
            )
        if self.image.size is None:
            raise ValueError("run.method = 'from-scratch' has no public images to take the size from: set image.size")

    def digest(self) -> str:
        """Hash of all that decides the trained model; sampling, evaluation and what is only speed may change later."""
        tree = self.model_dump(mode="json", exclude={"sample", "evaluate", "audit"})
        tree |= {name: getattr(self, name).identity() for name in ("latent", "net", "pretrain")}
        tree["private"]["slots"] = list(self.private.slots.items())  # their order is the captions' order
        if self.run.method not in RIVALS:
            tree.pop("rival")
        if not self.sd3.model:
            tree.pop("sd3")
        if not self.release.splits:
            for name in ("components", "rounds", "components_share"):
                tree["release"].pop(name)
        if not self.release.votes_share:
            for name in ("votes_share", "candidates"):
                tree["release"].pop(name)
        else:
            drawn = ("t0", "steps", "guidance", "tilt", "jitter", "batch")
            later = {"pull": ("pull", "pull_until"), "churn": ("churn",), "levels": ("levels",)}  # not named where off
            drawn += tuple(key for knob, keys in later.items() if getattr(self.sample, knob) for key in keys)
            tree["candidates"] = {key: getattr(self.sample, key) for key in drawn}
        if self.dpsgd.parameters == ALL:
            tree["dpsgd"].pop("parameters")
        if self.run.method == "private-evolution" or self.sd3.model:  # some public images are drawn as others are
            drawn = ("steps", "batch", "guidance") if self.sd3.model else ("steps", "batch")
            tree["prior"] = {key: getattr(self.sample, key) for key in drawn}
        for section, name in (("run", "title"), ("run", "compile"), ("dpsgd", "micro_batch")):
            tree[section].pop(name)
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()

    def to_toml(self) -> str:
        import tomli_w

        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


BUILT_IN = ("demo", "small", "best-mnist", "best-fashion", "sd3-guide", "sd3-lora", "sd3-distill", "sd3-evolve")


def model_name(model: str) -> str:
    """What may be published of `sd3.model`: a hub id as it is, of a folder on this machine its last part."""
    return Path(model).expanduser().resolve().name if Path(model).expanduser().exists() else model


def load(path: str | Path | None, settings: tuple[str, ...] = ()) -> Recipe:
    """Read a recipe (a file, a built-in name, or the defaults) and apply `section.key=value` settings in order."""
    tree: dict[str, Any] = {} if path is None else _read(path, ())
    for setting in settings:
        _apply(tree, setting)
    return parse(tree)


def _read(path: str | Path, above: tuple[str, ...]) -> dict[str, Any]:
    """A recipe as it is written, over the one that it names as its `base`. `above` are those that build on it."""
    built_in = str(path) in BUILT_IN
    source = files("straightdp") / "recipes" / f"{path}.toml" if built_in else Path(path)
    own = str(path) if built_in else str(Path(path).resolve())
    if own in above:
        raise BadInput(f"recipe {path} builds on itself; take `base` out of one of {', '.join(above)}")
    try:
        tree = tomllib.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(
            f"recipe {path} could not be read ({error.strerror}); give a TOML file, or one of {', '.join(BUILT_IN)}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"recipe {path} is not valid TOML ({error}); mend that line") from None
    base = tree.pop("base", None)
    _refuse_unknown_keys(tree)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise BadInput(f"base of recipe {path} is no recipe; name a TOML file, or one of {', '.join(BUILT_IN)}")
    merged = _read(base if base in BUILT_IN or built_in else Path(path).parent / base, (*above, own))
    for name, section in tree.items():
        merged[name] = {**merged.get(name, {}), **section}
    return merged


def parse(tree: dict[str, Any]) -> Recipe:
    _refuse_unknown_keys(tree)
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        kinds = ("string_type", "int_parsing", "float_parsing")  # where another kind was allowed, that says more
        first = next((e for e in error.errors() if e["type"] not in kinds), error.errors()[0])
        where = ".".join(str(part) for part in first["loc"][:2] if not str(part).startswith("function"))
        if not where:  # about several values: the message names them
            raise BadInput(f"recipe is not allowed: {first['msg']}") from None
        raise BadInput(f"recipe value {where} = {first['input']!r} is not allowed: {first['msg']}") from None


def _apply(tree: dict[str, Any], setting: str) -> None:
    dotted, equals, text = setting.partition("=")
    keys = dotted.strip().split(".")
    if not equals or len(keys) != 2 or "\n" in setting:
        raise BadInput(f"setting {setting!r} is not of the form section.key=value")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    section = tree.setdefault(keys[0], {})
    if not isinstance(section, dict):
        raise BadInput(f"recipe key {keys[0]} must be a section: write [{keys[0]}] and its keys below it")
    section[keys[1]] = value


def _refuse_unknown_keys(tree: dict[str, Any]) -> None:
    sections = Recipe.model_fields
    for name, body in tree.items():
        if name not in sections:
            raise BadInput(f"recipe section [{name}] is not known{nearest(name, sections)}")
        if not isinstance(body, dict):
            raise BadInput(f"recipe key {name} must be a section: write [{name}] and its keys below it")
        known = sections[name].annotation.model_fields  # type: ignore[union-attr]
        for key in body:
            if key not in known:
                raise BadInput(f"recipe key {name}.{key} is not known{nearest(key, known)}")
