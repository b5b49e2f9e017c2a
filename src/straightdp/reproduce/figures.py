"""What a table may show of a run: each figure's head, its digits, and where it lies in the run's result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

INTERNAL = "Internal: measured on private records without noise."
SYNTHETIC, PUBLIC = "synthetic data", "public model only"  # sets of an evaluation


@dataclass(frozen=True)
class Figure:
    """`get` takes a result and the name of a set; KeyError and None mean that it was not measured."""

    head: str
    digits: int
    get: Callable[[dict, str], float | None]

    def of(self, body: dict, name: str = SYNTHETIC) -> float | None:
        try:
            return self.get(body, name)
        except KeyError:
            return None


def _quality(key: str) -> Callable[[dict, str], float | None]:
    return lambda body, of: _named(body["quality"]["sets"], of)[key]


def _label_aware(key: str) -> Callable[[dict, str], float | None]:
    return lambda body, of: _named(body["label_aware"], of)[key]


def _named(sets: list[dict], name: str) -> dict:
    return next((one for one in sets if one["name"] == name), {})


def _slot(name: str) -> Callable[[dict, str], float | None]:
    return lambda body, of: body["accuracy"][f"captions' {name}"]


def _norm(key: str) -> Callable[[dict, str], float | None]:
    return lambda body, of: body["gradient_norms"][key]


def _tail(body: dict, of: str) -> float:
    norms = body["gradient_norms"]
    return norms["q90"] / norms["q50"]


def _guessed(attack: str, who: str = "honest") -> Callable[[dict, str], float | None]:
    def share(body: dict, of: str) -> float | None:
        guesses = body[who].get(attack)
        return guesses and guesses["v"] / guesses["r"]

    return share


def _bound(body: dict, of: str) -> float:
    """Of both one-run audits; older results have the first alone."""
    found = (body["honest"].get(attack) for attack in ("one_run", "from_sums"))
    return max(one["bound"] for one in found if one)


FIGURES: dict[str, Figure] = {
    "accuracy": Figure("accuracy", 3, lambda body, of: body["accuracy"][of]),
    "stronger": Figure("accuracy, residual net", 3, lambda body, of: body["accuracy of the residual net"][of]),
    "release": Figure("release alone", 3, lambda body, of: body["accuracy"]["released moments alone"]),
    "distance": Figure("Fréchet distance", 1, _quality("distance")),
    "precision": Figure("precision", 3, _quality("precision")),
    "recall": Figure("recall", 3, _quality("recall")),
    "per_class": Figure("per-class distance", 1, _quality("per_class")),
    "consistency": Figure("label consistency", 3, _label_aware("consistency")),
    "domain": Figure("domain rate", 3, _label_aware("domain_rate")),
    "class": Figure("class", 3, _slot("label")),
    "quadrant": Figure("quadrant", 3, _slot("quadrant")),
    "stroke": Figure("stroke", 3, _slot("stroke")),
    "p50": Figure("gradient norm, median", 2, _norm("q50")),
    "p90": Figure("gradient norm, 90 %", 2, _norm("q90")),
    "tail": Figure("90 % over median", 2, _tail),
    "clipped": Figure("clip fraction", 3, _norm("clip_fraction")),
    "pretraining": Figure("pretraining loss", 4, lambda body, of: body["pretrain_loss"]),
    "claimed": Figure("ε claimed", 3, lambda body, of: body["honest"]["claimed"]),
    "bound": Figure("ε, lower bound", 3, _bound),
    "above": Figure("bounds above the claim", 2, lambda b, of: float(_bound(b, of) > b["honest"]["claimed"])),
    "guessed": Figure("right guesses, network", 3, _guessed("one_run")),
    "guessed_sums": Figure("right guesses, sums", 3, _guessed("from_sums")),
    "control_sums": Figure("the control's", 3, _guessed("from_sums", "leaky")),
    "auc": Figure("membership AUC", 3, lambda body, of: body["honest"]["loss"]["auc"]),
    "extracted": Figure("canaries ranked first", 3, lambda b, of: b["honest"]["first"] / b["honest"]["included"]),
    "generated": Figure("canaries generated", 0, lambda body, of: body["honest"]["generated"]),
    "suspicious": Figure("under suspicion", 2, lambda body, of: float(bool(body["honest"]["suspicions"]))),
    "caught": Figure("controls caught", 2, lambda body, of: float(bool(body["leaky"]["suspicions"]))),
}


def features_of(body: dict) -> str | None:
    """The space in which distances of this result were taken."""
    return (body.get("quality") or {}).get("features")
