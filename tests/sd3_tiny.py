"""A whole Stable Diffusion 3 of 170,000 random weights, made offline in a tenth of a second."""

from pathlib import Path

import torch

SIZE = 32  # pixels; a code is (4, 8, 8)


def tiny_sd3(folder: Path, seed: int = 0) -> Path:
    """Save a StableDiffusion3Pipeline whose every part is real and small into `folder`, and return it.

    The text encoders are of different widths, so that their vectors are padded as the real ones are.
    """
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

    def clip(width: int) -> CLIPTextModelWithProjection:
        config = CLIPTextConfig(
            vocab_size=len(words),
            hidden_size=width,
            intermediate_size=2 * width,
            projection_dim=width,
            num_hidden_layers=3,
            num_attention_heads=2,
            max_position_embeddings=77,
            bos_token_id=words.bos_token_id,
            eos_token_id=words.eos_token_id,
            pad_token_id=words.pad_token_id,
        )
        return CLIPTextModelWithProjection(config).eval()

    words, pieces = _clip_tokenizer(), _t5_tokenizer()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformer = SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=32,
            caption_projection_dim=32,
            pooled_projection_dim=24,
            pos_embed_max_size=8,
        )
        vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            block_out_channels=(8, 8, 16),
            norm_num_groups=4,
            latent_channels=4,
            sample_size=SIZE,
            scaling_factor=1.5305,
            shift_factor=0.0609,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )
        t5 = T5Config(vocab_size=len(pieces), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, is_gated_act=True)
        pipeline = StableDiffusion3Pipeline(
            transformer=transformer.eval(),
            vae=vae.eval(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            text_encoder=clip(8),
            tokenizer=words,
            text_encoder_2=clip(16),
            tokenizer_2=words,
            text_encoder_3=T5EncoderModel(t5).eval(),
            tokenizer_3=pieces,
        )
    pipeline.save_pretrained(folder)
    return folder


def _clip_tokenizer():
    """One token a byte, with the two merges that make 'the'."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    letters = sorted(ByteLevel.alphabet())
    tokens = letters + [f"{letter}</w>" for letter in letters] + ["th", "the</w>", "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[("t", "h"), ("th", "e</w>")],
        model_max_length=77,
    )


def _t5_tokenizer():
    """One piece a printable character."""
    from transformers import T5TokenizerFast

    pieces = ["<pad>", "</s>", "<unk>", "▁", *(chr(code) for code in range(33, 127))]
    return T5TokenizerFast(vocab=[(piece, 0.0 if i < 3 else -2.0) for i, piece in enumerate(pieces)], extra_ids=0)
