"""A whole Stable Diffusion 3 of a chosen size, made offline: for tests, or to be pretrained.

Every part is diffusers' or transformers' own class with random weights. The text encoders are never trained: what they
make of a caption is random, fixed and its own, and the transformer learns what that means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from straightdp.flow.path import like, noise_like


def make_sd3(
    folder: Path,
    *,
    image: int,
    width: int,
    heads: int,
    layers: int,
    downsample: int = 4,
    latent_channels: int = 4,
    patch: int = 2,
    vae_width: int = 8,
    text: int = 32,
    tokens: int = 77,
    captions: Sequence[str] = (),
    seed: int = 0,
) -> Path:
    """Save a StableDiffusion3Pipeline for images of `image` pixels a side into `folder`, and return it.

    `width` is the transformer's, `vae_width` that of the VAE's first level (each of log2(downsample) more has twice
    as many channels), `text` that of a text token. Every word of `captions` is one token; what else is read is spelt
    out. `tokens` is the length of what both CLIPs see, as `sd3.tokens` is the third encoder's. `downsample` is a power
    of two, `width` a multiple of `heads`, `text` and `vae_width` are of 8. The same seed gives the same weights.
    """
    diffusers, transformers = import_module("diffusers"), import_module("transformers")
    words, pieces = _clip_tokenizer(captions, tokens), _t5_tokenizer(captions)
    side, levels = image // downsample, downsample.bit_length()
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        transformer = diffusers.SD3Transformer2DModel(
            sample_size=side,
            patch_size=patch,
            in_channels=latent_channels,
            out_channels=latent_channels,
            num_layers=layers,
            attention_head_dim=width // heads,
            num_attention_heads=heads,
            joint_attention_dim=text,
            caption_projection_dim=width,
            pooled_projection_dim=text // 4 + text // 2,
            pos_embed_max_size=2 * side // patch,
        )
        vae = diffusers.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            block_out_channels=tuple(vae_width * 2**k for k in range(levels)),
            norm_num_groups=vae_width // 2,
            latent_channels=latent_channels,
            sample_size=image,
            scaling_factor=1.5305,
            shift_factor=0.0609,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )
        t5 = transformers.T5Config(
            vocab_size=len(pieces), d_model=text, d_kv=8, d_ff=2 * text, num_layers=2, num_heads=4, is_gated_act=True
        )
        pipeline = diffusers.StableDiffusion3Pipeline(
            transformer=transformer.eval(),
            vae=vae.eval(),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
            text_encoder=_clip(words, text // 4),  # of different widths, so that they are padded as the real ones are
            tokenizer=words,
            text_encoder_2=_clip(words, text // 2),
            tokenizer_2=words,
            text_encoder_3=transformers.T5EncoderModel(t5).eval(),
            tokenizer_3=pieces,
        )
    pipeline.save_pretrained(folder)
    return folder


def flow_matching_loss(
    transformer: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    z: Tensor,
    embeddings: Tensor,
    pooled: Tensor,
    generator: torch.Generator,
) -> Tensor:
    """What Stable Diffusion 3 is trained with: the mean of |transformer(x, text, pooled, 1000 sigma) - (xi - z)|^2
    at x = (1 - sigma) z + sigma xi, for sigma = sigmoid(N(0, 1))."""
    sigma = torch.randn(len(z), generator=generator, device=z.device).sigmoid()
    xi = noise_like(z, generator)
    x = (1 - like(sigma, z)) * z + like(sigma, z) * xi
    return (transformer(x, embeddings, pooled, 1000 * sigma) - (xi - z)).square().mean()


@torch.no_grad()
def _clip(tokenizer: Any, width: int) -> Any:
    """Words are 50 times louder than at CLIP's own start, and the end of the text, whose vector stands for the whole,
    says nothing but what it hears: of a caption's vectors a third is then its own, and an eighth would be."""
    transformers = import_module("transformers")
    config = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = transformers.CLIPTextModelWithProjection(config).eval()
    weight = model.get_input_embeddings().weight.mul_(50)
    weight[tokenizer.eos_token_id] = 0
    return model


def _clip_tokenizer(captions: Sequence[str], length: int) -> Any:
    """One token a byte, but for the captions' words: neighbours within a word are joined until it is one token."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    letters += [f"{letter}</w>" for letter in letters]
    merges: dict[tuple[str, str], None] = {}
    while True:
        tokens = dict.fromkeys([*letters, *(a + b for a, b in merges), "<|startoftext|>", "<|endoftext|>"])
        tokenizer = import_module("transformers").CLIPTokenizer(
            vocab={token: i for i, token in enumerate(tokens)}, merges=list(merges)
        )
        read = [tokenizer.tokenize(caption) for caption in captions]
        apart = [(a, b) for one in read for a, b in pairwise(one) if not a.endswith("</w>")]
        if not apart:
            tokenizer.model_max_length = length
            return tokenizer
        merges |= dict.fromkeys(apart)


def _t5_tokenizer(captions: Sequence[str]) -> Any:
    """One piece a printable character, but for the captions' words."""
    special = {"<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0}
    words = dict.fromkeys((f"▁{word}" for caption in captions for word in caption.split()), -1.0)
    pieces = special | dict.fromkeys(["▁", *(chr(code) for code in range(33, 127))], -2.0) | words
    return import_module("transformers").T5TokenizerFast(vocab=list(pieces.items()), extra_ids=0)
