"""Stable Diffusion 3 as the pretrained network: loaded frozen, guided by the release or fine-tuned by DP-SGD."""
