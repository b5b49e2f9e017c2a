"""What each row of Table 3 would need with the real SD3-medium: GPU memory, hours and forward passes, from arithmetic.

Nothing is loaded or measured. Parameters and the FLOPs of a forward pass are exact counts of diffusers' model. Memory
is weights, the tensors that a pass holds at once (small models in float32 take 4 to 7 % more), and an assumed CONTEXT;
what compiling adds is not in it. Time is FLOPs over an assumed rate. Left out, being small: reading the prompts once,
the adapters' own products, the calibration of the clip, the release. Left out too: scoring the images, and drawing a
second set to compare them with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from straightdp.errors import BadInput
from straightdp.sd3.codes import PIXELS

GIB = 2.0**30
BYTES = {"bfloat16": 2, "float32": 4}
TEXT_ENCODERS = {"CLIP-L": 123_650_304, "CLIP-G": 694_659_840, "T5-XXL": 4_762_310_656}  # parameters
VAE = 83_819_683
DECODE, ENCODE = 9_462_784, 4_132_096  # the VAE's FLOPs a pixel, beside the one attention of its middle
DECODE_BYTES = 4 * 256 * 4  # a pixel: its last level holds four float32 tensors of 256 channels at once
VAE_SLOWER = 6  # it runs in float32: assumed to reach this part of the rate of bfloat16

# Bytes a token and channel. Under autocast to bfloat16 layer norms keep float32, and every adapter a copy of its input.
# The most that one block holds: the stream; its norm, twice (in bfloat16 thrice); the MLP's middle, twice.
FORWARD = {"bfloat16": 2 + (4 + 4 + 2) + (4 + 4) * 2, "float32": (1 + 2 + 4 + 4) * 4}
# For a block's backward pass: the norms' inputs; adapters' inputs; q, k, v and what attention gave; the MLP's middle.
SAVED = {"bfloat16": 2 * 4 + (4 + 4 + 4) * 2, "float32": (2 + 2 + 4 + 4) * 4}
CLIPPING = 4  # values: the gradient at each of a token's four adapters, kept until the records' norms are known
COPIES = 7 * 4  # bytes for each value in the adapters: it, its average, AdamW's two, and three of its gradient
CONTEXT = 1.0 * GIB  # CUDA's own, workspaces, and what the allocator cannot use


@dataclass(frozen=True)
class Transformer:
    """SD3's dual-stream transformer as diffusers builds it; the defaults are SD3-medium's."""

    layers: int = 24
    heads: int = 24
    head: int = 64
    text: int = 4096  # width of a text token
    pooled: int = 2048
    channels: int = 16
    patch: int = 2
    positions: int = 192  # on each side of the fixed table

    @property
    def width(self) -> int:
        return self.heads * self.head

    def maps(self, image: int, text: int) -> list[tuple[int, int, int]]:
        """Every linear map as (inputs, outputs, how often it is used on one row of that many image and text tokens).

        The last block gives no text: there it has no MLP, no map of what attention gave it, and fewer modulations.
        """
        d, pixels = self.width, self.channels * self.patch**2
        block = [(d, d, image)] * 4 + [(d, 4 * d, image), (4 * d, d, image), (d, 6 * d, 1)] + [(d, d, text)] * 3
        not_last = [(d, d, text), (d, 4 * d, text), (4 * d, d, text), (d, 6 * d, 1)]
        conditioning = [(256, d, 1), (self.pooled, d, 1)] + [(d, d, 1)] * 2 + [(d, 2 * d, 1)] * 2
        ends = [(pixels, d, image), (self.text, d, text), (d, pixels, image)]
        return block * self.layers + not_last * (self.layers - 1) + conditioning + ends

    def parameters(self) -> int:
        return sum(a * b + b for a, b, _ in self.maps(0, 0))

    def weights(self) -> int:
        """The parameters and the table of positions, which is fixed."""
        return self.parameters() + self.positions**2 * self.width

    def adapters(self, rank: int) -> int:
        """Values in adapters on a block's eight maps of the attention; in the last, the text's q and end have none."""
        return (8 * self.layers - 2) * 2 * rank * self.width

    def flops(self, image: int, text: int) -> tuple[int, int]:
        """Of a row's forward pass, and of its backward pass, where frozen maps cost as much and attention twice."""
        linear = sum(2 * a * b * times for a, b, times in self.maps(image, text))
        attention = 4 * (image + text) ** 2 * self.width * self.layers  # scores and their use, all tokens with all
        return linear + attention, linear + 2 * attention


@dataclass(frozen=True)
class Phase:
    """A part of a row: what it holds at its worst, what it computes, and its passes of one image each."""

    bytes: float
    flops: float = 0
    passes: int = 0


@dataclass(frozen=True)
class Settings:
    """The defaults are those of the recipes sd3-*.toml, Flowers-102's sizes and one H200."""

    size: int = 512
    classes: int = 102
    per_class: int = 20  # images drawn for evaluation, and Private Evolution's population
    n: int = 2_040
    prior: int = 10  # images a class, drawn for every calibration
    sample_steps: int = 28
    guidance: float = 5.0
    batch: int = 8  # images drawn at once
    steps: int = 500  # of DP-SGD
    q: float = 0.02
    draws: int = 4
    micro_batch: int = 2  # records at once
    distill_steps: int = 1_000
    distill_batch: int = 8
    rounds: int = 8
    variations: int = 2
    times: tuple[float, float] = (0.2, 0.65)
    rank: int = 16
    text_tokens: int = 154  # 77 of both CLIPs, and sd3.tokens
    t5: bool = True
    dtype: str = "bfloat16"
    checkpoint: bool = True  # DP-SGD computes blocks again in its backward pass
    tflops: float = 300.0  # sustained; assumed of an H200 in bfloat16
    net: Transformer = Transformer()

    @property
    def tokens(self) -> tuple[int, int]:
        """Of one image and its text; the VAE makes one point of 8 x 8 pixels."""
        return (self.size // 8 // self.net.patch) ** 2, self.text_tokens

    @property
    def row(self) -> int:
        """Tokens times channels."""
        return sum(self.tokens) * self.net.width

    def _flops(self, forward: int, backward: int = 0) -> int:
        """Of so many passes of one row."""
        costs = self.net.flops(*self.tokens)
        return forward * costs[0] + backward * costs[1]

    def frozen_bytes(self) -> float:
        """The transformer, the VAE (float32 always) and the prompts' table, which stay all along."""
        table = (self.classes + 1) * (self.text_tokens * self.net.text + self.net.pooled)
        return (self.net.weights() + table) * BYTES[self.dtype] + VAE * 4 + CONTEXT

    def step_bytes(self, rows: int, *, records: int = 0, checkpoint: bool = False) -> float:
        """What a training step of `rows` rows holds beside the weights; clipped by records, if there are any.

        With checkpointing that is every block's input and one block's tensors, and every record's gradient; a map's
        inputs and gradients are then taken to float64 once more.
        """
        block = SAVED[self.dtype] + (CLIPPING * BYTES[self.dtype] if records else 0)
        held = self.net.layers * (BYTES[self.dtype] if checkpoint else block)
        at_once = block + (2 * 8 if records else 0) if checkpoint else 0
        each = COPIES + (4 * records if checkpoint else 0)
        return rows * self.row * (held + at_once) + self.net.adapters(self.rank) * each

    def read_prompts(self) -> Phase:
        parts = [size for name, size in TEXT_ENCODERS.items() if self.t5 or name != "T5-XXL"]
        return Phase(sum(parts) * BYTES[self.dtype] + CONTEXT)

    def draw(self, images: int, steps: int | None = None) -> Phase:
        """Images from noise, or from some way on: with guidance, two passes a step, side by side."""
        branches = 1 if self.guidance in (0, 1) else 2
        passes = images * (self.sample_steps if steps is None else steps) * branches
        held = max(FORWARD[self.dtype] * self.row * self.batch * branches, DECODE_BYTES * max(PIXELS, self.size**2))
        flops = self._flops(passes) + images * self._vae_flops(DECODE)
        return Phase(self.frozen_bytes() + held, flops, passes)

    def encode(self, images: int) -> Phase:
        return Phase(self.frozen_bytes(), images * self._vae_flops(ENCODE))  # it holds less than decoding does

    def _vae_flops(self, per_pixel: int) -> float:
        """In FLOPs of the transformer's speed. The middle's attention is over (size / 8)^2 tokens of 512 channels."""
        return VAE_SLOWER * (per_pixel * self.size**2 + self.size**4 / 2)

    def tune(self) -> Phase:
        """DP-SGD of the adapters, with as many rows as are expected; without noise it costs the same."""
        rows = round(self.steps * self.q * self.n * self.draws)
        held = self.step_bytes(self.micro_batch * self.draws, records=self.micro_batch, checkpoint=self.checkpoint)
        passes = rows * (2 if self.checkpoint else 1)
        return Phase(self.frozen_bytes() + held, self._flops(passes, rows), passes)

    def distill(self) -> Phase:
        rows = self.distill_steps * self.distill_batch
        return Phase(self.frozen_bytes() + self.step_bytes(self.distill_batch), self._flops(rows, rows), rows)

    def synthetic(self) -> Phase:
        return self.draw(self.classes * self.per_class)

    def evolve(self) -> list[Phase]:
        """Every round varies every candidate, `variations` times to be voted on and once, but after the last vote."""
        images, first, last = self.classes * self.per_class, *self.times
        phases = [self.synthetic()]
        for r in range(self.rounds):
            t = first + (last - first) * r / max(1, self.rounds - 1)
            varied = images * (self.variations + (r + 1 < self.rounds))
            phases += [self.encode(varied), self.draw(varied, max(1, round(self.sample_steps * (1 - t))))]
        return phases


def _guided(s: Settings) -> list[Phase]:
    """The public set is the frozen model's own samples."""
    public = s.classes * s.prior
    return [s.draw(public), s.encode(public + s.n), s.synthetic()]


def _tuned(s: Settings) -> list[Phase]:
    return [*_guided(s), s.tune()]


ROWS: dict[str, Callable[[Settings], list[Phase]]] = {
    "zero-shot": lambda s: [s.synthetic()],
    "uniform DP-SGD, ε = 10": _tuned,
    "uniform DP-SGD, ε = 2": _tuned,
    "Private Evolution": Settings.evolve,
    "distillation + DP-SGD": lambda s: [*_tuned(s), s.distill()],
    "moment guidance": _guided,
    "DP-SGD + guidance": _tuned,
    "non-private LoRA": _tuned,
    "non-private LoRA + guidance": _tuned,
    "control: zero mean": _guided,
    "control: random direction": _guided,
    "control: public-prior mean": _guided,
    "control: exact moments": _guided,
}


@dataclass(frozen=True)
class Estimate:
    row: str
    gpu_gib: float
    hours: float
    forward_passes: int  # of one image through the transformer, those that a backward pass repeats included


def estimate(rows: Sequence[str] = tuple(ROWS), **settings: Any) -> list[Estimate]:
    """One seed of each row, as if alone: rows that share a cache draw the public set once. `settings`: see there."""
    s = Settings(**settings)
    if unknown := [row for row in rows if row not in ROWS]:
        raise BadInput(f"Table 3 has no row {unknown[0]!r}; its rows are {', '.join(ROWS)}")
    estimates = []
    for row in rows:
        phases = [s.read_prompts(), *ROWS[row](s)]
        gib, hours = max(p.bytes for p in phases) / GIB, sum(p.flops for p in phases) / s.tflops / 1e12 / 3600
        estimates.append(Estimate(row, gib, hours, sum(p.passes for p in phases)))
    return estimates


def table(estimates: Sequence[Estimate]) -> str:
    lines = ["| row | GPU memory, GiB | hours | forward passes |", "|---|---:|---:|---:|"]
    lines += [f"| {e.row} | {e.gpu_gib:.1f} | {e.hours:.2f} | {e.forward_passes:,} |" for e in estimates]
    return "\n".join(lines)
