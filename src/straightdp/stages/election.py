"""Records vote for the draws that look most like them; those that were voted for are what is varied later.

Candidates are drawn as `sample.port = "guide"` draws them, and called what classifiers of the release's own draws see
in them, so that a record has a choice among pictures of its class. It sees them, and itself, in Inception's features.
The histogram of the votes is one Gaussian mechanism of the release: a record has one vote.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from straightdp import __version__
from straightdp.compiled import arithmetic
from straightdp.data.records import to_pixels, to_z
from straightdp.errors import BadInput
from straightdp.files import file_hash, write_durably
from straightdp.generator import Generator, check_names, open_generator
from straightdp.metrics import inception
from straightdp.moments.elected import Elected, above_noise
from straightdp.moments.release import VOTES
from straightdp.privacy.ledger import Ledger
from straightdp.privacy.vault import Vault
from straightdp.progress import tracker
from straightdp.stages.inputs import Inputs

DRAWN = 2  # times as many as are wanted: not every class is found as often as it is asked for
SEEN = 139  # side of the pictures that Inception sees here: a fifth of the work, and a vote is no FID
THRESHOLD = 1.5  # standard deviations of the noise that a candidate's votes must exceed, as in Private Evolution


def check(inputs: Inputs) -> None:
    """Refuse, before anything is spent, what could not be voted on."""
    if inputs.recipe.release.votes_share:
        check_names(inputs.public.shape, inputs.conditioning, "release.votes_share", "release.votes_share=0")
        if inception.find(inputs.device) is None:
            raise BadInput("records vote in Inception features; fetch them: `straightdp data get inception`")


def propose(inputs: Inputs, out: Path) -> None:
    """Write the candidates down: uint8 (classes, candidates, C, H, W), whole pixels, each called its class. A class
    that is found too seldom is filled up with its own from the first again, or with what was drawn for it."""
    generator = open_generator(inputs.folder.release, inputs.device)
    assert isinstance(generator, Generator)
    section, wanted = inputs.recipe.sample, inputs.recipe.release.candidates
    section = section.model_copy(update={"port": "guide", "labels": "found"})
    classes, seed = len(inputs.conditioning.captions), inputs.recipe.run.seed
    asked = torch.arange(classes, device=inputs.device).repeat_interleave(DRAWN * wanted)
    images = generator.draw(asked, section, seed, tracker("candidates"), speed=inputs.speed)
    found = generator.named(images, asked, section, seed, tracker("names")).cpu()
    pixels, asked = torch.from_numpy(to_pixels(images)), asked.cpu()
    chosen = []
    for label in range(classes):
        mine = (found == label).nonzero().flatten()
        mine = mine if len(mine) else (asked == label).nonzero().flatten()
        chosen.append(mine[torch.arange(wanted) % len(mine)])
    write_durably(out, save({"images": pixels[torch.stack(chosen)]}))


def vote(inputs: Inputs, candidates: Path, vault: Vault, ledger: Ledger, out: Path) -> None:
    """One vote of every record, and what is left of the counts above the noise."""
    device, features = inputs.device, inception.find(inputs.device)
    assert features is not None  # `check` has seen it
    images, see = load_file(candidates)["images"], inception.quick(features, device, SEEN)
    seen = see(to_z(images.flatten(0, 1)))
    vault.bind(VOTES, f"{file_hash(candidates)}|{features.digest}|{SEEN}|{arithmetic(device)}|{__version__}")
    noisy = torch.from_numpy(vault.vote_histogram(VOTES, 0, see, seen.unflatten(0, images.shape[:2])))
    drawn = 1.0 if inputs.leak is None else inputs.leak  # of the declared noise
    write_durably(out, save(Elected(images, weights_of(noisy, ledger.declared[VOTES].sigma * drawn)).state()))


def weights_of(noisy: Tensor, sigma: float) -> Tensor:
    """Votes (classes, candidates) above the noise; of a class in which none are, all count alike."""
    weights = above_noise(noisy, THRESHOLD * sigma).float()
    return torch.where(weights.sum(dim=1, keepdim=True) > 0, weights, 1.0)
