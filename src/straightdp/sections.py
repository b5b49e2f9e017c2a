"""The sections of a recipe: every setting, its default, and what it may be."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Fraction = Annotated[float, Field(gt=0, le=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Start = Annotated[float, Field(ge=0, lt=1)]
Steps = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]


OWN_TEXT = "{text}"  # as a caption: each record's own
ALL = ("*",)  # as names of parameters


class Section(BaseModel):
    """`LATER` are knobs that came after releases were made, with the values that change nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    LATER: ClassVar[dict[str, Any]] = {}

    def identity(self) -> dict[str, Any]:
        """What it is known by. A later knob that changes nothing is not named, so that what was made before is
        found."""
        tree = self.model_dump(mode="json")
        return {key: value for key, value in tree.items() if key not in self.LATER or value != self.LATER[key]}


class Privacy(Section):
    """The promise. Adjacency is add/remove of one record; `n` is the declared public constant N."""

    epsilon: Annotated[float, Field(gt=0)] = 1.0
    delta: Annotated[float, Field(ge=1e-12, lt=1)] = 1e-5
    n: Count | None = Field(
        default=None, description="declared N; left out, the count found is declared and listed as assumed public"
    )
    mode: Literal["tight", "paper"] = "tight"
    interval: Annotated[float, Field(ge=1e-6, le=0.01)] = Field(
        default=1e-4, description="discretisation of the PLD accountant"
    )
    pinned_key: str | None = Field(
        default=None, pattern="^[0-9a-f]{64}$", description="tests and experiments only: the run is not releasable"
    )


class Private(Section):
    data: str = Field(default="", description="a folder, an .npz, an idx file, or a name such as mnist:train")
    classes: tuple[str, ...] | None = Field(
        default=None, description="the public class list; left out, the one found is assumed public"
    )
    caption: str = Field(
        default="a picture of {label}",
        description="template of the captions; it may have slots; {text} alone stands for each record's own text",
    )
    slots: dict[str, tuple[str, ...]] = Field(
        default={}, description="the template's other fields and the words each may hold: public knowledge"
    )
    prompt: str = Field(
        default="a picture of {label}", description="what to generate under, when captions are the records' own texts"
    )
    holdout: str | Share = Field(
        default=0.1, description="where held-out records come from: a source, or a fraction set aside"
    )


class Public(Section):
    data: str | tuple[str, ...] = Field(
        default="", description="a folder, a file or a name; or a list of such, taken as one set"
    )
    caption: str = Field(
        default="a public picture of {label}", description="template over {label}; {text} stands for each record's own"
    )

    @field_validator("data", mode="before")
    @classmethod
    def _names_sets(cls, data: object) -> object:
        listed = isinstance(data, list | tuple) and all(isinstance(name, str) for name in data)
        if not (listed or isinstance(data, str)):
            raise ValueError("it should be a folder, a file or a name, or a list of such")
        return data

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.data,) if isinstance(self.data, str) else self.data


class Image(Section):
    size: Count | None = Field(
        default=None, description="side in pixels; images of another size are cropped to a square and resized"
    )
    channels: Annotated[int, Field(ge=1, le=4)] = 1


class Latent(Section):
    """A convolutional autoencoder trained on public images; everything private then happens in its code."""

    LATER: ClassVar = {"flow": "codes"}
    d: Annotated[int, Field(ge=2)] | None = Field(
        default=None, description="numbers in a code (the paper's is 32); left out, the work is done on pixels"
    )
    width: Count = 32
    steps: Steps = 4_000
    batch: Annotated[int, Field(ge=2)] = 256
    lr: Rate = 1e-3
    noise: Share = Field(
        default=0.1, description="on codes while it trains, in parts of their spread: drawn codes may be off by as much"
    )
    radius_quantile: Fraction = Field(
        default=0.99, description="R: this quantile of the public codes' norms; every code is brought within it"
    )
    flow: Literal["codes", "pixels"] = Field(
        default="codes",
        description="what the network makes: codes; or pixels, started and led by decoded draws of what is released "
        "of codes",
    )

    @property
    def is_flow(self) -> bool:
        """Whether the network works in codes."""
        return self.d is not None and self.flow == "codes"


class Net(Section):
    """The dual-stream MM-DiT of the paper's last table, or a convolutional U-Net."""

    LATER: ClassVar = {"kind": "mmdit"}
    kind: Literal["mmdit", "unet"] = Field(
        default="mmdit",
        description="unet: convolutions, width channels at full resolution; sooner crisp on small pictures",
    )
    width: Count = 192
    depth: Count = 6
    heads: Count = 6
    patch: Count = 4
    mlp_ratio: Count = 4
    caption_width: Count = 64
    caption_length: Count = 8
    vocabulary: Annotated[int, Field(ge=2)] = 256
    B0: Rate | None = Field(default=None, description="radius that every token is kept within between blocks")
    l0: Count | None = Field(default=None, description="captions flow into images in the last l0 blocks alone")
    decoupled: bool = Field(default=False, description="own softmax for captions: a block is F(h) + G(h, e) exactly")
    s: Rate | None = Field(default=None, description="cap on the spectral norm of the map that captions flow in by")
    post_hoc: bool = Field(default=False, description="constraints from after pretraining on: the paper's ablation")

    @property
    def while_pretraining(self) -> Net:
        """This network, or one without constraints where they come post hoc."""
        free = {"B0": None, "l0": None, "decoupled": False, "s": None, "post_hoc": False}
        return self.model_copy(update=free) if self.post_hoc else self

    @model_validator(mode="after")
    def _has_what_it_constrains(self) -> Net:
        if self.kind == "unet":
            for name in ("B0", "l0", "decoupled", "s", "post_hoc"):
                if getattr(self, name) not in (None, False):
                    raise ValueError(f"net.{name} constrains the MM-DiT's streams: leave it out, or set net.kind=mmdit")
            if self.width % 8:
                raise ValueError(f"width {self.width} must be a multiple of 8: a U-Net's norms have groups of channels")
        return self

    @model_validator(mode="after")
    def _divides(self) -> Net:
        if self.l0 is not None and self.l0 > self.depth:
            raise ValueError(f"l0 = {self.l0} is more than the {self.depth} blocks")
        if self.width % self.heads or self.width % 4:
            raise ValueError(f"width {self.width} must be a multiple of 4 and of the {self.heads} heads")
        return self


class Pretrain(Section):
    LATER: ClassVar = {"t_min": 0.0}
    steps: Steps = 20_000
    batch: Count = 256
    lr: Rate = 1e-4
    ema: Share = 0.999
    p_uncond: Share = 0.1
    t_min: Start = Field(
        default=0.0, description="learn on t in [t_min, 1] alone: for a model that never starts earlier"
    )


class Release(Section):
    """Stage 1. `weight` is its part of the budget; `sigma` fixes its noise multiplier instead."""

    weight: Annotated[float, Field(ge=0)] = 0.28
    sigma: Rate | None = None
    features: Count = Field(default=64, description="p: size of the public PCA basis")
    covariance: Literal["shared", "residual", "public"] = Field(
        default="residual",
        description="one covariance for all, one per class around the released means, or that of public records",
    )
    means_share: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.25, description="part of the release's privacy that goes to counts and means"
    )
    radius_quantile: Fraction = Field(default=0.5, description="R_feat: this quantile of the public feature norms")
    residual_quantile: Fraction = Field(
        default=0.1, description="radius of the residuals: this quantile of the public ones"
    )
    condition: Literal["class", "global", "onehot", "slots", "pooled", "minilm"] = Field(
        default="class",
        description="what means hang on: the class, nothing, or a feature of the caption (cross moments)",
    )
    ridge: Rate = Field(default=1e-3, description="lambda of the regression on caption features")
    text_quantile: Fraction = Field(default=0.99, description="R_txt: 1.1 x this quantile of the prompts' norms")
    centre: bool = Field(default=True, description="centre caption features at their public mean, with an intercept")
    project: bool = Field(default=True, description="cross moments in the public PCA basis, not of whole records")
    components: Annotated[int, Field(ge=1, le=100)] | Literal["auto"] = Field(
        default=1,
        description="Gaussians a class; beyond 1 by rounds of noisy k-means around the released class moments; auto: "
        "as many as the declared noise lets be told apart among N records",
    )
    rounds: Annotated[int, Field(ge=1, le=9)] = Field(default=2, description="of the components, a mechanism each")
    components_share: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.47, description="part of the release's privacy that goes to the rounds, if there are components"
    )
    votes_share: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0,
        description="part of the release's privacy that goes to the records' votes among draws that it guides",
    )
    candidates: Annotated[int, Field(ge=2)] = Field(default=500, description="draws a class that are voted on")
    rank: Count = 32
    floor: Rate = Field(default=1e-2, description="lambda_0: covariance floor eigenvalue")
    min_count: Annotated[float, Field(ge=1)] = Field(
        default=20.0, description="a class whose released count is below this takes the released global mean"
    )

    @property
    def splits(self) -> bool:
        """Whether a class is several Gaussians."""
        return self.components != 1


class Distill(Section):
    steps: Steps = 3_000
    batch: Count = 256
    lr: Rate = 1e-4
    ema: Share = 0.999
    tau: Fraction | Literal["knee"] = Field(
        default=0.5, description="the moments' horizon; knee: where their field and public data's part, at most tau_cap"
    )
    tau_cap: Fraction = Field(default=0.35, description="of a measured tau")
    replay: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.5, description="part of each batch that replays public images for t > tau"
    )
    p_uncond: Share = 0.1


class DpSgd(Section):
    """Stage 2. `steps = 0` releases moments alone."""

    weight: Annotated[float, Field(ge=0)] = 0.72
    sigma: Rate | None = None
    q: Fraction = Field(default=0.02, description="Poisson sampling rate")
    steps: Steps = 2_000
    draws: Count = Field(default=4, description="noise multiplicity: (t, xi) draws per record")
    lr: Rate = 5e-5
    ema: Share = 0.999
    p_uncond: Share = 0.1
    clip: Rate = Field(
        default=1.0, description="C: a declared constant, or, with clip_quantile, a factor on the public quantile"
    )
    clip_quantile: Share = Field(
        default=0.0, description="0: C = clip; else C = clip x this quantile of the public gradient norms"
    )
    t_min: Share | None = Field(default=None, description="DP-SGD trains on t in [t_min, 1]; left out, t_min = tau")
    plan: Literal["uniform", "tha"] = Field(
        default="uniform", description="one clip and noise for all times, or the best public proxy of several shapes"
    )
    buckets: Annotated[int, Field(ge=1, le=16)] = Field(default=4, description="K of plan = 'tha': parts of [t_min, 1]")
    parameters: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        default=ALL,
        description="names of the parameters that train, * standing for anything; noise grows with their number",
    )
    micro_batch: Count | None = Field(
        default=None, description="records per fixed-shape micro-batch; left out, as many as suit the device"
    )
    checkpoint_every: Count = 50


class Sample(Section):
    n: Count = 10_000
    steps: Count = 25
    guidance: Annotated[float, Field(ge=0)] = 1.5
    port: Literal["weights", "guide", "release", "elected"] = Field(
        default="weights",
        description="draw from the model, from the model started at the tilted marginal, from the release alone, or "
        "vary draws that records voted for",
    )
    vary: Start = Field(
        default=0.5, description="time to which port = 'elected' takes a draw back, to go on from there"
    )
    unelected: Share = Field(
        default=0.0, description="port = 'elected': the part of the pictures that vary any candidate, voted for or not"
    )
    t0: Start | Literal["plateau"] = Field(
        default=0.2, description="start time of port = 'guide'; plateau: the latest that costs public quality nothing"
    )
    tilt: Literal["released", "zero", "random", "public"] = Field(
        default="released",
        description="mean of the tilted start; or a control: none, a random one as long, that of the public set",
    )
    pull: Annotated[float, Field(ge=0, le=10)] = Field(
        default=0.0,
        description="port = 'guide' or 'elected': on the way the model is led on by so many times what sets the "
        "released moments apart from those of the public set",
    )
    pull_until: Annotated[float, Field(gt=0, le=1)] = Field(default=0.7, description="time at which the pull ends")
    churn: Share = Field(
        default=0.0,
        description="noise drawn anew at each step; 0: none, the straight flow; 1: all that an ancestral sampler draws",
    )
    levels: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        default=0.0, description="the darkest and the lightest part of the range that become black and white"
    )
    jitter: Annotated[float, Field(ge=0, le=3)] = Field(
        default=0.0,
        description="every picture is turned, slanted, stretched and shifted at random (guide: before the model takes "
        "over); 1: by 8 degrees, 0.1, 8 % and 1/28 of the side, standard deviations",
    )
    labels: Literal["asked", "found"] = Field(
        default="asked",
        description="what a picture is called: the caption it was drawn under, or the one that classifiers of the "
        "release's own draws find in it, for a model that knows no private class",
    )
    batch: Count = 500

    @property
    def starts(self) -> float:
        """The earliest time at which the model is asked; 1 if it is not."""
        t0 = 0.0 if self.t0 == "plateau" else float(self.t0)  # which tries every time
        return {"weights": 0.0, "guide": t0, "elected": min(t0, self.vary), "release": 1.0}[self.port]


class Evaluate(Section):
    probe: Literal["convolutional", "linear"] = Field(
        default="convolutional",
        description="classifiers trained on images, or a linear one on a frozen encoder's features",
    )
    clip: str = Field(default="", description="of a linear probe: a CLIP model's folder or id; empty: Inception")
    probe_steps: Count = 1_500
    probe_batch: Count = 128
    seeds: Count = 1
    real_reference: bool = Field(
        default=False, description="also train the probe on the private records themselves; internal edition only"
    )
    thorough: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Frechet distance, precision and recall, label-aware measures, a second classifier, every "
        "reference: auto is on a GPU; two cores take hours for 10,000 images",
    )
    images: Annotated[int, Field(ge=10)] = Field(
        default=10_000, description="at most so many of each set go through Inception"
    )
    references: bool = Field(
        default=True, description="thorough: also judge what the synthetic set is compared with, not that set alone"
    )

    def is_thorough(self, device: str) -> bool:
        return device == "cuda" if self.thorough == "auto" else self.thorough == "on"


RIVALS = ("dp-merf", "dp-hp", "dp-ntk", "private-evolution")


class Sd3(Section):
    """A frozen Stable Diffusion 3 in the place of a network of our own; its own samples are the public set."""

    model: str = Field(default="", description="a folder or an id that diffusers' from_pretrained takes; empty: no SD3")
    dtype: Literal["bfloat16", "float32"] = Field(default="bfloat16", description="of the frozen weights")
    offload: bool = Field(default=False, description="keep the VAE in main memory when it is not used")
    t5: bool = Field(default=True, description="use the third text encoder: 9 GB more while captions are read, once")
    tokens: Count = Field(default=77, description="of a caption that the third text encoder sees")
    prior: Count = Field(default=10, description="images a class drawn from the frozen model, for every calibration")
    radius_quantile: Fraction = Field(
        default=0.99, description="R: this quantile of the prior's codes' norms; every code is brought within it"
    )
    rank: Count = Field(default=16, description="of the adapters that DP-SGD or distillation trains; alpha is the same")
    checkpoint: bool = Field(
        default=True, description="run blocks again in the backward pass: less memory and less rounding, slower"
    )


class Rival(Section):
    """The rivals' settings, with the paper's values; ours takes none of them."""

    features: Annotated[int, Field(ge=2)] = Field(default=10_000, description="DP-MERF: cosines and sines")
    order: Count = Field(default=20, description="DP-HP: of the sum kernel")
    pairs: Count = Field(default=1_500, description="DP-HP: pixel pairs of the product kernel")
    pair_order: Count = Field(default=3, description="DP-HP: of the product kernel")
    alpha: Fraction = Field(default=0.5, description="DP-HP: weight of the product kernel")
    width: Count = Field(default=300, description="DP-NTK: hidden units")
    hidden: Count = Field(default=512, description="the matching generator's hidden units, twice")
    code: Count = Field(default=100, description="its input noise")
    steps: Steps = 6_000
    batch: Count = 500
    lr: Rate = 1e-3
    rounds: Annotated[int, Field(ge=1, le=100)] = Field(default=10, description="Private Evolution: votes")
    population: Count = Field(default=1_000, description="candidates a class")
    variations: Steps = Field(default=2, description="variations whose mean features stand for a candidate")
    times: tuple[Start, Start] = Field(default=(0.45, 0.85), description="t_v of the first round and the last")
    threshold: Annotated[float, Field(ge=0)] = Field(default=1.5, description="votes below this times sigma count as 0")


class Audit(Section):
    """Of `straightdp audit`: what is planted, and how it is attacked. Declared before anything is scored."""

    canaries: Annotated[int, Field(ge=10)] = Field(default=200, description="m: each in or out by a coin of its own")
    kind: Literal["noise", "stripes", "checker"] = "noise"
    guesses: Annotated[float, Field(gt=0, le=1)] = Field(default=0.5, description="the share of canaries guessed on")
    references: Count = Field(default=500, description="pictures drawn like canaries but never trained on")
    draws: Count = Field(default=32, description="(t, xi) at which every record's velocity residual is taken")
    records: Count = Field(default=5_000, description="at most so many members and others are scored")
    samples: Steps = Field(default=1_000, description="drawn, to see whether a canary is generated")
    shadows: Annotated[int, Field(ge=0, le=64)] = Field(
        default=2, description="networks trained alike on parts of the held-out records, for LiRA; 0 or at least 2"
    )
    leak: Share = Field(default=0.0, description="the control's noise, as a part of what was declared")


class Run(Section):
    method: Literal["straightdp", "from-scratch", "dp-merf", "dp-hp", "dp-ntk", "private-evolution"] = Field(
        default="straightdp", description="ours, DP-SGD without public data, or a rival of [rival]"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        default=0, description="drives public training and sampling only, never the privacy noise"
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: Literal["auto", "on", "captured", "off"] = Field(
        default="auto",
        description="steps: auto is on a GPU, where it pays within a minute; captured: only as a CUDA graph",
    )
    title: str = "StraightDP release"
