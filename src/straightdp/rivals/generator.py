"""What a rival method's release draws."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from straightdp.compiled import Speed
from straightdp.data.records import to_z
from straightdp.errors import BadInput
from straightdp.flow.fit import step_generator
from straightdp.generator import Conditioning, damaged
from straightdp.nets.captions import Tokenizer
from straightdp.progress import Track, quiet
from straightdp.recipe import Rival, Sample
from straightdp.rivals import matching


@dataclass
class RivalGenerator:
    """What a rival method releases: the weights of a matched network, or an evolved population of images."""

    method: str
    state: dict[str, Tensor]
    section: Rival
    conditioning: Conditioning
    sample: Sample
    image: tuple[int, int, int]
    moments: None = None

    def save(self, weights: Path, card: Path) -> None:
        from safetensors.torch import save_file

        save_file({name: value.cpu().contiguous() for name, value in self.state.items()}, weights)
        tokenizer = self.conditioning.tokenizer
        body = {
            "method": self.method,
            "rival": self.section.model_dump(mode="json"),
            "shape": list(self.image),
            "classes": list(self.conditioning.classes),
            "captions": list(self.conditioning.captions),
            "words": list(tokenizer.words),
            "length": tokenizer.length,
            "vocabulary": tokenizer.vocabulary,
            "sample": self.sample.model_dump(),
        }
        card.write_text(json.dumps(body, indent=1, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, release: Path, device: torch.device) -> RivalGenerator:
        from safetensors.torch import load_file

        try:
            body = json.loads((release / "model.json").read_text(encoding="utf-8"))
            state = {name: value.to(device) for name, value in load_file(release / "model.safetensors").items()}
            tokenizer = Tokenizer(tuple(body["words"]), body["length"], body["vocabulary"])
            conditioning = Conditioning(tuple(body["classes"]), tuple(body["captions"]), tokenizer)
            section, sample = Rival.model_validate(body["rival"]), Sample.model_validate(body["sample"])
            found = cls(body["method"], state, section, conditioning, sample, tuple(body["shape"]))
            found._released()
            return found
        except Exception as error:
            raise damaged(release, error) from None

    def _released(self) -> Tensor | matching.Generator:
        """The population, or the network with its weights."""
        classes, section = len(self.conditioning.classes), self.section
        if self.method == "private-evolution":
            return self.state["population"].reshape(classes, -1, *self.image)
        net = matching.Generator(self.image, classes, hidden=section.hidden, code=section.code)
        net.load_state_dict(self.state)
        return net

    def prompts(self, n: int, device: torch.device) -> Tensor:
        """n classes in equal parts, sorted: nothing of their proportions is released."""
        return (torch.arange(n, device=device) * len(self.conditioning.classes)) // max(n, 1)

    def named(self, images: Tensor, y: Tensor, section: Sample, seed: int, track: Track = quiet) -> Tensor:
        """The classes y that the images were drawn under."""
        return y

    def check(self, section: Sample) -> None:
        if section.labels == "found":
            raise BadInput(f"sample.labels = 'found' needs released moments, and {self.method} releases none")

    @torch.no_grad()
    def draw(self, y: Tensor, section: Sample, seed: int, track, *, speed: Speed = "plain") -> Tensor:
        """Images in [-1, 1] for classes y, (n, C, H, W), on the CPU. An evolved population is gone through in order,
        as often as it takes."""
        released = self._released()
        if isinstance(released, Tensor):
            population = released.cpu()
            place = torch.zeros(len(y), dtype=torch.int64)
            for c in y.cpu().unique().tolist():
                place[y.cpu() == c] = torch.arange(int((y == c).sum())) % population.shape[1]
            return to_z(population[y.cpu(), place])
        net = released.to(y.device).eval()
        parts = list(y.split(section.batch))
        found = [
            matching.draw(net, parts[k], step_generator(seed, "sample", k, y.device)).cpu()
            for k in track(range(len(parts)), 0, len(parts))
        ]
        return torch.cat(found) if found else torch.zeros(0, *self.image)
