"""The released generator: network, captions and how to draw from it. Loads from `release/` alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from straightdp.compiled import Compiled, Speed, half
from straightdp.errors import BadInput
from straightdp.flow.fit import step_generator
from straightdp.flow.jitter import jitter
from straightdp.flow.path import back_to, noise_like
from straightdp.flow.sampler import Field, Network, euler, guided, pulled
from straightdp.moments.decoded import decoded
from straightdp.moments.elected import Elected
from straightdp.moments.field import MomentModel
from straightdp.nets.autoencoder import Autoencoder
from straightdp.nets.backbone import Backbone, OwnVelocity, own_net
from straightdp.nets.captions import CaptionIds, Tokenizer
from straightdp.nets.classifiers import SMALLEST, LeNet, Shares, fit_shares
from straightdp.nets.spaces import Codes, Pixels, Space, flow_of
from straightdp.nets.velocity import VelocityNet
from straightdp.progress import Track, quiet, tracker
from straightdp.recipe import RIVALS, Latent, Net, Sample

if TYPE_CHECKING:
    from straightdp.rivals.generator import RivalGenerator

AUTOENCODER = "autoencoder."  # what its weights' names begin with
MANY = 50_000  # images: compiling takes half a minute on an H200, which fewer do not win back by our reckoning
LESSONS, LESSON = 1_500, 128  # steps, and pictures a step, of a classifier that finds names
NAMERS = 5  # such classifiers, which are asked together: one by itself is off by what it happened to begin with


@dataclass(frozen=True)
class Conditioning:
    """The captions to generate under, each of one class, and the tokenizer that all captions share."""

    classes: tuple[str, ...]
    captions: tuple[str, ...]
    tokenizer: CaptionIds
    labels: tuple[int, ...] = ()  # each caption's class; left out, one caption a class

    def __post_init__(self) -> None:
        if not self.labels:
            object.__setattr__(self, "labels", tuple(range(len(self.captions))))

    @property
    def names(self) -> tuple[str, ...]:
        """Each caption's class, by name."""
        return tuple(self.classes[k] for k in self.labels)

    def ids(self, device: torch.device) -> Tensor:
        """(M, length)."""
        return self.tokenizer.encode(self.captions).to(device)

    def null(self, device: torch.device) -> Tensor:
        """(1, length)."""
        return self.tokenizer.null().to(device).unsqueeze(0)


def check_names(
    image: tuple[int, int, int],
    conditioning: Conditioning,
    setting: str = "sample.labels = 'found'",
    without: str = "sample.labels=asked",
) -> None:
    """Refuse a setting that has pictures named where no classifier of ours could tell one caption from another."""
    if min(image[1:]) < SMALLEST:
        raise BadInput(f"{setting} needs pictures of at least {SMALLEST} x {SMALLEST} pixels; set {without}")
    if len(conditioning.captions) > len(conditioning.classes):
        raise BadInput(f"{setting} needs one caption a class; set {without}")


def open_generator(release: Path, device: torch.device, backbone: Backbone | None = None) -> Generator | RivalGenerator:
    """Whatever draws the images of a release, by whichever method it was made. A frozen model that the release builds
    on is loaded anew unless it is given."""
    for name in ("model.json", "model.safetensors"):
        if not (release / name).is_file():
            raise BadInput(f"{release} is not a release: {name} is missing")
    try:
        body = json.loads((release / "model.json").read_text(encoding="utf-8"))
        method = body.get("method", "straightdp")
    except (ValueError, AttributeError) as error:
        raise damaged(release, error) from None
    if method in RIVALS:
        from straightdp.rivals.generator import RivalGenerator

        return RivalGenerator.load(release, device)
    if "sd3" in body:
        from straightdp.sd3.backbone import Sd3Backbone
        from straightdp.sd3.generator import Sd3Generator

        return Sd3Generator.load(release, device, backbone if isinstance(backbone, Sd3Backbone) else None)
    return Generator.load(release, device)


def synthesise(
    generator: Generator | RivalGenerator, n: int, section: Sample, seed: int, device: torch.device, *, speed: Speed
) -> tuple[Tensor, Tensor]:
    """n images in [-1, 1], and the captions that they are published under."""
    generator.check(section)
    asked = generator.prompts(n, device)
    images = generator.draw(asked, section, seed, tracker("sample"), speed=speed)
    return images, generator.named(images, asked, section, seed, tracker("names"))


def damaged(release: Path, error: Exception) -> BadInput:
    """What to say of a release whose model cannot be read."""
    why = " ".join(str(error).split())
    return BadInput(f"{release} is damaged: its model could not be loaded ({why})")


@dataclass
class Generator:
    """`space` says what the release's z are; left out, pixels. The network's are of the same space, unless they are
    pixels beside a release of codes. It knows times from `learned_from` on."""

    net: VelocityNet
    conditioning: Conditioning
    moments: MomentModel | None
    sample: Sample
    space: Space | None = None
    elected: Elected | None = None
    learned_from: float = 0.0

    def __post_init__(self) -> None:
        self._space: Space = self.space or Pixels(self.net.shape)
        self._flow = flow_of(self._space)

    @property
    def image(self) -> tuple[int, int, int]:
        """(C, H, W) of what it draws."""
        return self._space.image

    def save(self, weights: Path, card: Path) -> None:
        from safetensors.torch import save_file

        assert isinstance(self.net, OwnVelocity)
        state, latent = dict(self.net.state_dict()), None
        if isinstance(self._space, Codes):
            autoencoder = self._space.autoencoder
            state |= {AUTOENCODER + name: value for name, value in autoencoder.state_dict().items()}
            latent = {"section": autoencoder.section.model_dump(), "image": list(autoencoder.image)}
        save_file(state, weights)
        tokenizer = self.conditioning.tokenizer
        body = {
            "net": self.net.section.model_dump(),
            "shape": list(self.net.shape),
            "classes": list(self.conditioning.classes),
            "captions": list(self.conditioning.captions),
            "labels": list(self.conditioning.labels),
            "words": list(tokenizer.words),
            "sample": self.sample.model_dump(),
            "latent": latent,
            "learned_from": self.learned_from,
        }
        card.write_text(json.dumps(body, indent=1, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, release: Path, device: torch.device) -> Generator:
        from safetensors.torch import load_file

        for name in ("model.json", "model.safetensors"):
            if not (release / name).is_file():
                raise BadInput(f"{release} is not a release: {name} is missing")
        try:
            body = json.loads((release / "model.json").read_text(encoding="utf-8"))
            weights = load_file(release / "model.safetensors")
            section = Net.model_validate(body["net"])
            tokenizer = Tokenizer(tuple(body["words"]), section.caption_length, section.vocabulary)
            conditioning = Conditioning(
                tuple(body["classes"]), tuple(body["captions"]), tokenizer, tuple(body.get("labels", ()))
            )
            net = own_net(section, tuple(body["shape"]))
            net.load_state_dict({k: v for k, v in weights.items() if not k.startswith(AUTOENCODER)})
            space: Space = Pixels(net.shape)
            if body.get("latent"):
                autoencoder = Autoencoder(
                    Latent.model_validate(body["latent"]["section"]), tuple(body["latent"]["image"])
                )
                own = {k.removeprefix(AUTOENCODER): v for k, v in weights.items() if k.startswith(AUTOENCODER)}
                autoencoder.load_state_dict(own)
                space = Codes(autoencoder, device)
            sample = Sample.model_validate(body["sample"])
            path = release / "moments.safetensors"
            moments = MomentModel.load(path).to(device) if path.exists() else None
            path = release / "elected.safetensors"
            elected = Elected.load(path, device) if path.exists() else None
            learned_from = float(body.get("learned_from", 0.0))
        except Exception as error:
            raise damaged(release, error) from None
        return cls(net.to(device).eval(), conditioning, moments, sample, space, elected, learned_from)

    def prompts(self, n: int, device: torch.device) -> Tensor:
        """n captions in the released proportions (equal ones without a release), sorted, by largest remainder."""
        classes = len(self.conditioning.captions)
        prior = torch.full((classes,), 1 / classes) if self.moments is None else self.moments.prior.cpu()
        exact = prior.double() / prior.double().sum() * n
        counts = exact.floor().long()
        counts[(exact - counts).argsort(descending=True)[: n - int(counts.sum())]] += 1
        return torch.repeat_interleave(torch.arange(classes), counts).to(device)

    def named(self, images: Tensor, y: Tensor, section: Sample, seed: int, track: Track = quiet) -> Tensor:
        """Of images drawn under captions y, the captions that they are published under."""
        self.check(section)
        if section.labels == "asked" or self.moments is None or not len(images):
            return y
        find = self._classifiers(self._tilted(self.moments, section.tilt, seed), section, seed, y.device, track)
        return torch.cat(
            [torch.stack([one(part) for one in find]).sum(dim=0).argmax(dim=1) for part in images.split(1000)]
        )

    def _classifiers(
        self, moments: MomentModel, section: Sample, seed: int, device: torch.device, track: Track
    ) -> list[Shares]:
        """They learn captions from the release's own draws, moved like all draws: nothing private is asked."""
        prior = moments.prior.to(device)

        def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
            y = torch.multinomial(prior, LESSON, replacement=True, generator=generator)
            return jitter(self._pictures(moments.sample(y, generator)), section.jitter, generator), y

        with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
            every = track(range(NAMERS), 0, NAMERS)
            seeds = (step_generator(seed, "names", k, device).initial_seed() for k in every)
            return [fit_shares(lambda: LeNet(self.image, len(prior)), batch, LESSONS, own, device) for own in seeds]

    def check(self, section: Sample) -> None:
        """Refuse a start before all that the model learned, and names that this release could not find."""
        if section.starts < self.learned_from:
            raise BadInput(
                f"this release's model learned times from {self.learned_from:g} on, and sample.port = "
                f"{section.port!r} would start before; set a later sample.t0"
            )
        if section.labels == "found":
            if self.moments is None:
                raise BadInput("sample.labels = 'found' needs released moments, and this release has none")
            check_names(self.image, self.conditioning)

    @torch.no_grad()
    def draw(self, y: Tensor, section: Sample, seed: int, track, *, speed: Speed = "plain") -> Tensor:
        """Images in [-1, 1] for captions y, (n, C, H, W), on the CPU. It is compiled where there are MANY."""
        if section.port != "weights" and self.moments is None:
            raise BadInput(f"sample.port = {section.port!r} needs released moments, and this release has none")
        if section.port == "elected" and self.elected is None:
            raise BadInput("sample.port = 'elected' needs votes, and this release has none")
        if speed == "compiled" and len(y) < MANY:
            speed = "plain"
        network = Compiled(half(self.net), speed=speed)
        moments = None if self.moments is None else self._tilted(self.moments, section.tilt, seed)
        leads = self._leading(moments, section) if len(y) else None
        starts = list(range(0, len(y), section.batch))
        pieces = []
        for k in track(range(len(starts)), 0, len(starts)):
            part = y[starts[k] : starts[k] + section.batch]
            missing = section.batch - len(part) if speed == "compiled" else 0  # one shape is compiled, once
            generator = step_generator(seed, "sample", k, y.device)
            drawn = self._batch(network, moments, leads, F.pad(part, (0, missing)), section, generator)
            images = self._flow.decode(drawn[: len(part)])
            moved = section.port in ("guide", "elected")  # before the model took over
            images = images if moved else jitter(images, section.jitter, generator)
            pieces.append(levelled(images, section.levels))
        return torch.cat(pieces).cpu() if pieces else self._flow.decode(torch.zeros(0, *self.net.shape))

    def _tilted(self, moments: MomentModel, tilt: str, seed: int) -> MomentModel:
        try:
            return moments.tilted(tilt, seed)
        except ValueError as error:
            raise BadInput(f"sample.tilt = {tilt!r}: {error}") from None

    def _pictures(self, z: Tensor) -> Tensor:
        """Of the release's z, (n, d)."""
        return self._space.decode(z.reshape(len(z), *self._space.shape))

    def _released(self, moments: MomentModel, y: Tensor, generator: torch.Generator, jittered: float) -> Tensor:
        """Draws of the release as the network's z, moved as pictures."""
        z = moments.sample(y, generator)
        if not jittered and self._flow is self._space:
            return z.reshape(len(y), *self.net.shape)
        return self._flow.encode(jitter(self._pictures(z), jittered, generator)).to(z)

    def _leading(self, moments: MomentModel | None, section: Sample) -> MomentModel | None:
        """The moments that lead draws on after their start, of what the network's z are."""
        if moments is None or not section.pull or section.port not in ("guide", "elected"):
            return None
        if moments.crowd is None:
            raise BadInput(
                "sample.pull needs the public set's moments beside the released ones, and this release, of an earlier "
                "version, has none; set sample.pull=0"
            )
        return moments if self._flow is self._space else decoded(moments, self._pictures)

    def _batch(
        self,
        network: Network,
        moments: MomentModel | None,
        leads: MomentModel | None,
        y: Tensor,
        section: Sample,
        generator: torch.Generator,
    ) -> Tensor:
        """z of the network's, led on by the field of `leads` if there is one."""
        if section.port == "release" and moments is not None:
            return self._released(moments, y, generator, 0.0)
        ids, null = self.conditioning.ids(y.device), self.conditioning.null(y.device)
        field, onward = guided(network, ids[y], null, section.guidance), (section.churn, generator)
        if leads is not None:
            field = _led_on(field, leads, y, section)
        if section.port == "elected" and self.elected is not None:
            z = self._flow.encode(self.elected.draw(y, generator, section.unelected)).to(y.device)
            return euler(field, back_to(z, section.vary, generator), section.steps, section.vary, *onward)
        if section.port == "guide" and moments is not None:
            if not isinstance(section.t0, float | int):
                raise BadInput("sample.t0 = 'plateau' is found by a run, on its public set; give a number here")
            start = back_to(self._released(moments, y, generator, section.jitter), section.t0, generator)
            return euler(field, start, section.steps, section.t0, *onward)
        noise = noise_like(torch.empty(len(y), *self.net.shape, device=y.device), generator)
        return euler(field, noise, section.steps, 0.0, *onward)


def levelled(images: Tensor, part: float) -> Tensor:
    """Images in [-1, 1] with the darkest and the lightest `part` of that range black and white, and what lies between
    stretched evenly: a model leaves a grey veil where those it learned on have none."""
    return (images / (1 - 2 * part)).clamp(-1, 1) if part else images


def _led_on(field: Field, moments: MomentModel, y: Tensor, section: Sample) -> Field:
    """The field, led towards the released moments of classes y and away from the public ones."""
    crowd = moments.crowd
    assert crowd is not None  # `_leading` has seen it

    def towards(x: Tensor, t: Tensor) -> Tensor:
        return moments.velocity(x, t, y)

    return pulled(field, towards, crowd.mixture_velocity, section.pull, section.pull_until)
