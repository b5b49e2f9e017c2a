"""A small Stable Diffusion 3, pretrained on public flowers: Table 3's frozen model where the real one is not at hand.

  python experiments/sd3_prior.py train --out runs/prior            (on an H200: four minutes)
  python experiments/sd3_prior.py train --out runs/small --small --steps 100 --vae-steps 100             (on a CPU)

On an H200 the loss of images that it does not train on falls until some 2,500 steps, and then no more.

It writes OUT/model (a StableDiffusion3Pipeline), OUT/private and OUT/heldout (image folders with metadata.csv),
OUT/prior.json (sizes, losses, speed) and OUT/samples.png (64 guided samples through our own sampler). Of each class of
Flowers-102 the first twenty images are private, 2,040 in all; two thirds of the others are public, 4,062, and the last
third is held out, 2,086. Captions are "a photo of a NAME", as the recipes sd3-*.toml have them.

Then Table 3, with the options of `straightdp reproduce`, and with SETTINGS for every run:

  python experiments/sd3_prior.py reproduce table3 guidance --prior runs/prior --out runs/table3 --seeds 0 --processes 4

A first look: --rows zero-shot. What a row is compared with is the same for all, so the others may do without:
--set evaluate.references=false.

To a machine without a network travel 55 MiB, with 3 MiB of straightdp's own wheels (dp-accounting, pydantic, tomli-w):

  pip download --no-deps --python-version 3.12 --only-binary=:all: -d wheels diffusers==0.42.1 transformers==5.22.2 \\
    peft==0.21.2 accelerate==1.15.0                              (6.1 + 12.5 + 0.8 + 0.4 MiB)
  python experiments/sd3_prior.py pack --out flowers64.zip       (11.6 MiB; at 128 pixels the flowers have 51)
  $STRAIGHTDP_DATA/weights/inception_v3_slim_q8.safetensors      (20.8 MiB, for the probe and the distance)

  for wheel in wheels/*.whl; do python -m zipfile -e $wheel site; done; export PYTHONPATH=src:site
  python experiments/sd3_prior.py train --data flowers64.zip --out runs/prior
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import sys
import time
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from straightdp.cli import main as straightdp
from straightdp.compiled import half
from straightdp.data import builtin, folder, pixels
from straightdp.data.records import Records, to_pixels, to_z
from straightdp.flow.fit import trainable
from straightdp.flow.sampler import euler, guided
from straightdp.progress import say
from straightdp.recipe import Sd3
from straightdp.reproduce.gather import device as device_name
from straightdp.reproduce.jobs import Given
from straightdp.sd3.codes import VaeCodes
from straightdp.sd3.loading import PromptTable, load_prior, read_prompts
from straightdp.sd3.small import flow_matching_loss, make_sd3
from straightdp.sd3.velocity import Velocity

CAPTION = "a photo of a {}"
TOKENS = 16  # of a caption; the longest of the flowers' has eleven
DROPPED = 0.1  # captions
KL = 1e-4  # the VAE's, per number of a code
WARM_UP, EMA = 200, 0.999  # steps; and of the weights' average
REPORT = 10.0  # seconds
GUIDANCE, STEPS = 3.0, 20  # of the samples that are shown
QUALITY = 80  # of packed images

FULL = {"image": 64, "width": 512, "layers": 12, "vae_width": 64, "text": 256, "batch": 256, "vae_batch": 128}
SMALL = {"image": 32, "width": 64, "layers": 2, "vae_width": 16, "text": 32, "batch": 32, "vae_batch": 16}
LR, VAE_LR = 2e-4, 4e-4

SETTINGS = (
    "privacy.n=2040", "privacy.delta=2.45e-4", "image.size=64",
    f"sd3.tokens={TOKENS}", "sd3.prior=10", "sd3.checkpoint=false",
    "dpsgd.q=0.1", "dpsgd.steps=150", "dpsgd.lr=5e-4", "dpsgd.micro_batch=128",
    "distill.steps=400", "distill.batch=128",
    "sample.n=2040", f"sample.steps={STEPS}", "sample.batch=256", f"sample.guidance={GUIDANCE:g}",
)  # of Table 3's runs on it  # fmt: skip

Loss = Callable[[], Tensor]


def parts(source: Path | None, size: int) -> dict[str, Records]:
    """Public, private and held-out records, by their place in the file; no picture is in two of them."""
    tree = folder.open_tree(source or builtin.locate("flowers102"))
    with tree.held_open:
        private, rest = (
            folder.read(tree, found, size=size, channels=3, classes=own)
            for found, own in (builtin.flowers(f"flowers102:{name}", tree) for name in ("first20", "rest"))
        )
    late = np.zeros(len(rest), bool)
    for label in range(len(rest.classes)):
        mine = np.flatnonzero(rest.labels == label)
        late[mine[len(mine) * 2 // 3 :]] = True
    public = rest.subset(~late)
    taken = {picture.tobytes() for picture in public.x}
    late &= [picture.tobytes() not in taken for picture in rest.x]
    return {"public": public, "private": private, "heldout": rest.subset(late)}


def write_folder(records: Records, out: Path) -> None:
    out.mkdir(parents=True)
    rows: list[tuple[str, ...]] = [("file_name", "label")]
    for i, (picture, label) in enumerate(zip(records.x, records.labels, strict=True)):
        rows.append((f"{i:05d}.png", records.classes[label]))
        Image.fromarray(picture.transpose(1, 2, 0)).save(out / rows[-1][0])
    (out / folder.METADATA).write_text(as_csv(rows), encoding="utf-8")


def as_csv(rows: list[tuple[str, ...]]) -> str:
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows(rows)
    return table.getvalue()


def pack(out: Path, size: int) -> None:
    """The flowers again, at a smaller size and in a smaller format."""
    tree = folder.open_tree(builtin.locate("flowers102"))
    with tree.held_open, zipfile.ZipFile(out, "w") as archive:
        found, rows = folder.list_records(tree), [("file_name", "label", "text")]
        for file, label, text in zip(found.files, found.labels, found.texts or (), strict=True):
            picture = pixels.crop_resize(pixels.decode(tree.read(file), 3, file), size)
            buffer = io.BytesIO()
            Image.fromarray(picture).save(buffer, "WEBP", quality=QUALITY, method=6)
            rows.append((str(PurePosixPath(file).with_suffix(".webp")), label, text))
            archive.writestr(rows[-1][0], buffer.getvalue())
        archive.writestr(folder.METADATA, as_csv(rows))
    say(f"{out}: {len(rows) - 1} images of {size} pixels, {out.stat().st_size / 2**20:.1f} MiB")


def train(name: str, net: nn.Module, loss: Loss, unseen: Loss, lr: float, steps: int) -> dict[str, Any]:
    """AdamW, the rate falling to zero in the last fifth of the steps; leaves averaged weights in `net`.

    The clock starts after the first step, which may compile. `unseen` is the loss on images that are not trained on:
    where it rises while the loss falls, the network learns its images by heart.
    """
    parameters = trainable(net)
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), fused=parameters[0].is_cuda)
    average = [p.detach().clone() for p in parameters]
    curve: list[dict[str, float]] = []
    losses: list[Tensor] = []  # since the last report

    def report() -> None:
        known, elapsed = float(torch.stack(losses).mean()), time.monotonic() - start
        curve.append({"seconds": elapsed, "step": step, "loss": known, "unseen": unseen().item()})
        say(f"{name}: step {step}, loss {known:.4f}, unseen {curve[-1]['unseen']:.4f}, {step / elapsed:.1f} steps/s")
        losses.clear()

    step, start = 0, time.monotonic()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / WARM_UP, 5 * (1 - step / steps))
        optimizer.zero_grad(set_to_none=True)
        value = loss()
        value.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        decay = min(EMA, (1 + step) / (10 + step))  # a short run is not dominated by its start
        torch._foreach_lerp_(average, [p.data for p in parameters], 1 - decay)  # type: ignore
        losses.append(value.detach())
        if step == 0:
            say(f"{name}: the first step's loss is {value.item():.4f}, after {time.monotonic() - start:.0f} s")
            start = time.monotonic()
        elif time.monotonic() - start >= REPORT * (len(curve) + 1):
            report()
    for parameter, mean in zip(parameters, average, strict=True):
        parameter.data.copy_(mean)
    losses.append(loss().detach())
    report()  # of the averaged weights
    return {"parameters": sum(p.numel() for p in parameters), "curve": curve}


def train_vae(vae: Any, seen: Tensor, unseen: Tensor, batch: int, steps: int) -> dict[str, Any]:
    """Mean squared error and a little KL on uint8 images and their mirror images; sets the codes' shift and scale."""
    generator = torch.Generator(seen.device).manual_seed(0)
    vae.to(memory_format=torch.channels_last).train()

    def reconstruct(z: Tensor) -> Tensor:
        posterior = vae.encode(z).latent_dist
        error = (vae.decode(posterior.sample()).sample.float() - z).square().mean()
        return error + KL * posterior.kl().mean() / posterior.mean[0].numel()

    def loss() -> Tensor:
        z = to_z(seen[torch.randint(len(seen), (batch,), generator=generator, device=seen.device)])
        mirrored = torch.rand(batch, 1, 1, 1, generator=generator, device=seen.device) < 0.5
        return network(torch.where(mirrored, z.flip(3), z))

    network = half(reconstruct)
    body = train("VAE", vae, loss, lambda: network(to_z(unseen[:batch])), VAE_LR, steps)
    latents = encode(vae.eval(), seen)
    scaling = {"shift_factor": float(latents.mean()), "scaling_factor": 1 / float(latents.std())}
    vae.register_to_config(**scaling)
    return body | scaling


@torch.no_grad()
def encode(vae: Any, images: Tensor) -> Tensor:
    """uint8 images to the modes of their codes, not scaled."""
    return torch.cat([vae.encode(to_z(part)).latent_dist.mode() for part in images.split(128)])


def train_transformer(
    transformer: Any, codes: Tensor, y: Tensor, table: PromptTable, held: Tensor, batch: int, steps: int
) -> dict[str, Any]:
    """Flow matching on codes (2, n, C, h, w) of images and their mirror images; those in `held` are not trained on."""
    start_from_zero(transformer)
    transformer.requires_grad_(True).train()
    network = half(lambda *inputs: transformer(*inputs, return_dict=False)[0])
    generator, null = torch.Generator(y.device).manual_seed(1), len(table.embeddings) - 1
    seen, unseen = (~held).nonzero()[:, 0], held.nonzero()[:, 0]

    def draw(among: Tensor, generator: torch.Generator) -> Tensor:
        chosen = among[torch.randint(len(among), (batch,), generator=generator, device=y.device)]
        side = torch.randint(2, (batch,), generator=generator, device=y.device)
        dropped = torch.rand(batch, generator=generator, device=y.device) < DROPPED
        row = y[chosen].masked_fill(dropped, null)
        return flow_matching_loss(network, codes[side, chosen], table.embeddings[row], table.pooled[row], generator)

    def check() -> Tensor:  # the same draws every time; not under no_grad, which would be compiled anew
        return draw(unseen, torch.Generator(y.device).manual_seed(2))

    return train("transformer", transformer, lambda: draw(seen, generator), check, LR, steps)


def start_from_zero(transformer: nn.Module) -> None:
    """Each block adds nothing at first, as transformers for diffusion are usually started."""
    for name, module in transformer.named_modules():
        if name.endswith(("norm1.linear", "norm1_context.linear", "norm_out.linear", "proj_out")):
            for parameter in module.parameters():
                nn.init.zeros_(parameter)


@torch.no_grad()
def show(section: Sd3, size: int, captions: list[str], device: torch.device, out: Path) -> None:
    """Sixty-four samples, as straightdp draws them from the model on the disk, of captions from first to last."""
    table, prior = read_prompts(section, captions, device), load_prior(section, size, device)
    ids = torch.linspace(0, len(captions) - 1, 64, device=device).round().long()[:, None]
    null = torch.full((1, 1), len(captions), device=device)
    noise = torch.randn(64, *prior.shape, generator=torch.Generator().manual_seed(0)).to(device)
    z = euler(guided(half(Velocity(prior, table).eval()), ids, null, GUIDANCE), noise, STEPS)
    images = to_pixels(VaeCodes(prior, device).decode(z)).reshape(8, 8, 3, size, size)
    Image.fromarray(images.transpose(0, 3, 1, 4, 2).reshape(8 * size, 8 * size, 3)).save(out)


def settings(prior: str) -> tuple[str, ...]:
    return (f"private.holdout={prior}/heldout", *SETTINGS)


def given(prior: str) -> Given:
    """What makes runs of `straightdp reproduce` runs on this model and its private images."""
    named = {"sd3.model": f"{prior}/model", "private.data": f"{prior}/private"}
    return Given(frozen=(*(f"{key}={json.dumps(value)}" for key, value in named.items()), *settings(prior)))


def reproduce(options: argparse.Namespace, words: list[str]) -> int:
    prior = options.prior.rstrip("/")
    words = [*words, "--model", f"{prior}/model", "--private", f"{prior}/private"]
    return straightdp(["reproduce", *words, *(word for one in settings(prior) for word in ("--set", one))])


def pretrain(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    began, device, out = time.monotonic(), torch.device(options.device), options.out
    sizes = (SMALL if options.small else FULL) | {k: v for k, v in vars(options).items() if k in FULL and v is not None}
    sets = parts(options.data, sizes["image"])
    counts = {name: len(records) for name, records in sets.items()}
    say(f"images: {counts}, of {len(sets['public'].classes)} classes")
    for name in ("private", "heldout"):
        write_folder(sets[name], out / name)
    captions = [CAPTION.format(name) for name in sets["public"].classes]
    shape = {name: sizes[name] for name in ("image", "width", "layers", "vae_width", "text")}
    shape |= {"heads": sizes["width"] // 64, "latent_channels": 8, "tokens": TOKENS}
    model = make_sd3(out / "model", captions=captions, **shape)
    diffusers, section = import_module("diffusers"), Sd3(model=str(model), tokens=TOKENS)
    images, y = torch.from_numpy(sets["public"].x).to(device), torch.from_numpy(sets["public"].labels).to(device)
    held = torch.arange(len(y), device=device) % 20 == 0
    vae = diffusers.AutoencoderKL.from_pretrained(model, subfolder="vae").to(device)
    about = {"vae": train_vae(vae, images[~held], images[held], sizes["vae_batch"], options.vae_steps)}
    vae.save_pretrained(model / "vae")
    codes = torch.stack([encode(vae, side) for side in (images, images.flip(3))])
    codes = (codes - vae.config.shift_factor) * vae.config.scaling_factor
    table = read_prompts(section, captions, device)
    transformer = diffusers.SD3Transformer2DModel.from_pretrained(model, subfolder="transformer").to(device)
    if device.type == "cuda" and not options.eager:
        for block in transformer.transformer_blocks:
            block.compile()
    about["transformer"] = train_transformer(transformer, codes, y, table, held, sizes["batch"], options.steps)
    transformer.eval().save_pretrained(model / "transformer")
    show(section, sizes["image"], captions, device, out / "samples.png")
    about |= {"images": counts, "sizes": sizes, "tokens": TOKENS, "wall_seconds": round(time.monotonic() - began, 1)}
    about |= {"device": device_name(), "commit": os.environ.get("STRAIGHTDP_COMMIT", "unknown")}
    (out / "prior.json").write_text(json.dumps(about, indent=1))
    say(f"{out}: model, private, heldout, prior.json, samples.png after {about['wall_seconds']:.0f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    packing = commands.add_parser("pack", help="write the flowers again, small enough to travel")
    packing.add_argument("--out", type=Path, required=True)
    packing.set_defaults(command=lambda options, _: pack(options.out, FULL["image"]))
    training = commands.add_parser("train", help="make a model and pretrain it")
    training.add_argument("--out", type=Path, required=True, help="a folder that is not there yet")
    training.add_argument("--data", type=Path, help="what `pack` wrote; left out, flowers102 of $STRAIGHTDP_DATA")
    training.add_argument("--steps", type=int, default=3000, help="of the transformer's training (3000)")
    training.add_argument("--vae-steps", type=int, default=800, help="of the autoencoder's (800)")
    for name in ("image", "width", "layers", "batch"):
        training.add_argument(f"--{name}", type=int, help=f"{FULL[name]}, or {SMALL[name]} with --small")
    training.add_argument("--small", action="store_true", help="of a size that a CPU trains in seconds, to no good")
    training.add_argument("--eager", action="store_true", help="do not compile")
    training.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    training.set_defaults(command=lambda options, _: pretrain(options))
    rows = commands.add_parser("reproduce", help="tables of a frozen model, on this one")
    rows.add_argument("--prior", required=True, help="what `train` wrote")
    rows.set_defaults(command=reproduce)
    options, words = parser.parse_known_args()
    if words and options.command is not reproduce:
        parser.error(f"unrecognized arguments: {' '.join(words)}")
    return options.command(options, words) or 0


if __name__ == "__main__":
    sys.exit(main())
