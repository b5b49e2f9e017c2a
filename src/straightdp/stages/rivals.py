"""Stages of the rival methods: the same vault, ledger, accountant and release folder as ours."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from straightdp import __version__
from straightdp.compiled import Compiled, arithmetic, half
from straightdp.data.captions import from_template
from straightdp.data.records import to_pixels
from straightdp.errors import BadInput
from straightdp.files import file_hash
from straightdp.metrics import inception
from straightdp.moments.release import VOTED
from straightdp.privacy.accountant import Declaration
from straightdp.privacy.ledger import Ledger
from straightdp.privacy.vault import Vault
from straightdp.progress import tracker
from straightdp.recipe import OWN_TEXT, Recipe
from straightdp.rivals import dp_hp, dp_merf, dp_ntk, matching, private_evolution
from straightdp.rivals.embedding import Embedding
from straightdp.rivals.generator import RivalGenerator
from straightdp.stages.inputs import Inputs

EMBEDDING, VOTES = "rival/embedding", "rival/votes"


def mechanism(recipe: Recipe) -> Declaration:
    """The one mechanism of a rival, its noise yet to be found."""
    if recipe.run.method == "private-evolution":
        return Declaration(VOTES, VOTED, "gaussian", 1.0, 1.0, count=recipe.rival.rounds)
    return Declaration(EMBEDDING, f"{recipe.run.method} embedding of every class", "gaussian", 1.0, 1.0)


def check(inputs: Inputs) -> None:
    """Refuse, before anything is spent, what a rival cannot work with."""
    if inputs.recipe.run.method == "private-evolution" and inception.find(inputs.device) is None:
        raise BadInput("Private Evolution votes in Inception features; fetch them: `straightdp data get inception`")


def embed(inputs: Inputs, vault: Vault, out: Path) -> None:
    """The released embedding: one noisy sum a class."""
    embedding = embedding_of(inputs)
    vault.bind(EMBEDDING, f"{embedding.digest()}|{inputs.device.type}|{__version__}")
    statistic = embedding.statistic(vault.classes, inputs.device)
    save_file({"sums": torch.from_numpy(vault.gaussian_sum(EMBEDDING, statistic)).float()}, out)


def match(inputs: Inputs, released: Path) -> None:
    """A generator whose samples have the released embedding."""
    section, recipe = inputs.recipe.rival, inputs.recipe
    target = load_file(released)["sums"].to(inputs.device) / inputs.intake.n
    net = matching.match(
        embedding_of(inputs),
        target,
        inputs.public.shape,
        hidden=section.hidden,
        code=section.code,
        steps=section.steps,
        batch=section.batch,
        lr=section.lr,
        seed=recipe.run.seed,
        checkpoint=inputs.folder.checkpoints / "match.pt",
        track=tracker("match"),
        speed=inputs.speed,
    )
    _save(inputs, net.state_dict())


def embedding_of(inputs: Inputs) -> Embedding:
    """phi of the recipe's method, fitted on public records."""
    section, z, seed = inputs.recipe.rival, inputs.public.z().to(inputs.device), inputs.recipe.run.seed
    if inputs.recipe.run.method == "dp-merf":
        return dp_merf.DpMerf.fit(z, features=section.features, seed=seed)
    if inputs.recipe.run.method == "dp-hp":
        orders = {"order": section.order, "pairs": section.pairs, "pair_order": section.pair_order}
        return dp_hp.DpHp.fit(z, **orders, alpha=section.alpha, seed=seed)
    return dp_ntk.DpNtk.fit(z[0].numel(), width=section.width, seed=seed)


def evolve(inputs: Inputs, pretrained: Path, vault: Vault, ledger: Ledger) -> None:
    """Private Evolution from the frozen public prior, voting in Inception features."""
    section, device = inputs.recipe.rival, inputs.device
    features = inception.find(device)
    assert features is not None  # `check` has seen it
    vault.bind(VOTES, f"{file_hash(pretrained)}|{features.digest}|{arithmetic(device)}|{__version__}")
    sigma, see = ledger.declared[VOTES].sigma, inception.quick(features, device)

    def vote(step: int, candidates: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(vault.vote_histogram(VOTES, step, see, candidates)).float()

    null, frozen = inputs.conditioning.null(device), bool(inputs.recipe.sd3.model)
    prior = private_evolution.FlowPrior(
        Compiled(half(inputs.load_net(pretrained).eval()), speed="captured" if inputs.speed == "captured" else "plain"),
        inputs.conditioning.ids(device) if frozen else _prior_captions(inputs),
        inputs.space,
        guidance=(null, inputs.recipe.sample.guidance) if frozen else None,
        steps=inputs.recipe.sample.steps,
        batch=inputs.recipe.sample.batch,
        device=device,
    )
    found = private_evolution.evolve(
        prior,
        see,
        vote,
        classes=vault.classes,
        population=section.population,
        rounds=section.rounds,
        variations=section.variations,
        times=section.times,
        threshold=section.threshold,
        sigma=sigma,
        seed=inputs.recipe.run.seed,
        device=device,
        track=tracker("evolve"),
    )
    _save(inputs, {"population": torch.from_numpy(to_pixels(found.images))})


def _prior_captions(inputs: Inputs) -> torch.Tensor:
    """What the public prior draws the candidates of each class under: the captions of as many public classes, as in the
    paper, which tell it nothing of the private ones; or no caption."""
    public, template = inputs.public.classes, inputs.recipe.public.caption
    if len(public) != len(inputs.intake.classes) or template == OWN_TEXT:
        return inputs.conditioning.null(inputs.device)
    return inputs.conditioning.tokenizer.encode(from_template(template, public)).to(inputs.device)


def _save(inputs: Inputs, state: dict[str, torch.Tensor]) -> None:
    recipe = inputs.recipe
    generator = RivalGenerator(
        recipe.run.method, state, recipe.rival, inputs.conditioning, recipe.sample, inputs.public.shape
    )
    generator.save(inputs.folder.model, inputs.folder.model_card)
