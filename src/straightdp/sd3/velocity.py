"""The frozen transformer as a network of ours: net(x, t, ids) to a velocity."""

from __future__ import annotations

from torch import Tensor, nn

from straightdp.nets.velocity import VelocityNet
from straightdp.sd3.loading import Prior, PromptTable


class Velocity(VelocityNet):
    """v(x, t, ids): Stable Diffusion 3's path is ours with sigma = 1 - t, and it predicts xi - z, which is -v.

    ids (n, 1) are rows of the prompt table; the last, vocabulary - 1, is the empty prompt. The table is no part of the
    state: it is read again from the prompts. Guarantee: nothing is drawn, and a row's v depends on that row alone.
    """

    embeddings: Tensor
    pooled: Tensor

    def __init__(self, prior: Prior, table: PromptTable):
        super().__init__()
        self.transformer = prior.transformer
        self.shape = prior.shape
        self.vocabulary = len(table.embeddings)
        patches = prior.shape[1] * prior.shape[2] // prior.transformer.config.patch_size**2
        width = prior.transformer.config.num_attention_heads * prior.transformer.config.attention_head_dim
        self.work = (patches + table.embeddings.shape[1]) * width * prior.transformer.config.num_layers
        self.register_buffer("embeddings", table.embeddings, persistent=False)
        self.register_buffer("pooled", table.pooled, persistent=False)

    @property
    def blocks(self) -> nn.ModuleList:  # type: ignore[override]  # as a member it would be registered twice
        return self.transformer.transformer_blocks

    def forward(self, x: Tensor, t: Tensor, ids: Tensor) -> Tensor:
        """x (n, C, h, w), t (n,), ids (n, 1) to v, float32. Inside, the arithmetic is of the weights' type, or
        autocast's."""
        row, dtype = ids[:, 0], self.transformer.pos_embed.proj.weight.dtype
        predicted = self.transformer(
            hidden_states=x.to(dtype),
            timestep=1000 * (1 - t),
            encoder_hidden_states=self.embeddings[row].to(dtype),
            pooled_projections=self.pooled[row].to(dtype),
            return_dict=False,
        )[0]
        return -predicted.float()
