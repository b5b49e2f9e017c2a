"""What a run on Stable Diffusion 3 releases: adapters, moments, and which frozen model they belong to."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from straightdp.compiled import Speed
from straightdp.errors import BadInput
from straightdp.generator import Conditioning, Generator, damaged
from straightdp.moments.field import MomentModel
from straightdp.recipe import Sample, Sd3, model_name
from straightdp.sd3.backbone import PromptIds, Sd3Backbone
from straightdp.sd3.codes import VaeCodes
from straightdp.sd3.loading import HUB_ID


@dataclass
class Sd3Generator(Generator):
    backbone: Sd3Backbone = field(kw_only=True)

    def check(self, section: Sample) -> None:
        super().check(section)
        if section.labels == "found":
            raise BadInput("sd3.model's draws of a release are no pictures to learn from; set sample.labels=asked")

    def draw(self, y: Tensor, section: Sample, seed: int, track, *, speed: Speed = "plain") -> Tensor:
        """Captured where another network would be compiled: for one so large that would take minutes."""
        return super().draw(y, section, seed, track, speed="captured" if speed == "compiled" else speed)

    def save(self, weights: Path, card: Path) -> None:
        from safetensors.torch import save_file

        save_file(self.backbone.state(self.net), weights)
        body = {
            "sd3": self.backbone.section.model_dump() | {"model": model_name(self.backbone.section.model)},
            "digest": self.backbone.prior.digest,
            "size": self.backbone.prior.image[1],
            "classes": list(self.conditioning.classes),
            "captions": list(self.conditioning.captions),
            "labels": list(self.conditioning.labels),
            "sample": self.sample.model_dump(),
        }
        card.write_text(json.dumps(body, indent=1, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, release: Path, device: torch.device, backbone: Sd3Backbone | None = None) -> Sd3Generator:
        """BadInput where the frozen model is not to be had, or is another than the release was made with. One that
        is loaded already, with these captions, may be given; $STRAIGHTDP_SD3 says where it lies if not where it did."""
        from safetensors.torch import load_file

        try:
            body = json.loads((release / "model.json").read_text(encoding="utf-8"))
            elsewhere = {"model": os.environ["STRAIGHTDP_SD3"]} if os.environ.get("STRAIGHTDP_SD3") else {}
            section, sample = Sd3.model_validate(body["sd3"] | elsewhere), Sample.model_validate(body["sample"])
            captions, labels = tuple(body["captions"]), tuple(body["labels"])
            conditioning = Conditioning(tuple(body["classes"]), captions, PromptIds(captions), labels)
            path, state = release / "moments.safetensors", load_file(release / "model.safetensors")
            moments = MomentModel.load(path).to(device) if path.exists() else None
            size, digest = int(body["size"]), body["digest"]
        except Exception as error:
            raise damaged(release, error) from None
        if backbone is None and not (Path(section.model).expanduser().is_dir() or HUB_ID.fullmatch(section.model)):
            raise BadInput(
                f"{release} draws with the frozen model that it was made with, and {section.model} is no folder here; "
                "name the model's folder in STRAIGHTDP_SD3"
            )
        backbone = backbone or Sd3Backbone(section, captions, size, 0, device)
        if backbone.prior.digest != digest:
            raise BadInput(
                f"{release} was made with other weights than {section.model} holds; fetch the model it was made with, "
                "and name its folder in STRAIGHTDP_SD3"
            )
        net = backbone.new_net(backbone.prior.shape, 0)
        backbone.restore(net, state)
        space = VaeCodes(backbone.prior, device, offload=section.offload)
        return cls(net, conditioning, moments, sample, space, backbone=backbone)
