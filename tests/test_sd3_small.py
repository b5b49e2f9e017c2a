"""A Stable Diffusion 3 of a chosen size: it loads as the real one does, tells captions apart, and what is trained in
diffusers' convention flows from noise to data in ours."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from straightdp.flow.path import interpolate, like
from straightdp.flow.sampler import euler
from straightdp.recipe import Sd3
from straightdp.sd3.codes import VaeCodes
from straightdp.sd3.loading import Prior, PromptTable, load_prior, read_prompts
from straightdp.sd3.small import flow_matching_loss, make_sd3
from straightdp.sd3.velocity import Velocity

if find_spec("diffusers") is None:
    pytest.skip("diffusers is not installed: pip install 'straightdp[sd3]'", allow_module_level=True)

CPU = torch.device("cpu")
FLOWERS = """
alpine sea holly, anthurium, artichoke, azalea, ball moss, balloon flower, barbeton daisy, bearded iris, bee balm,
bird of paradise, bishop of llandaff, black-eyed susan, blackberry lily, blanket flower, bolero deep blue,
bougainvillea, bromelia, buttercup, californian poppy, camellia, canna lily, canterbury bells, cape flower, carnation,
cautleya spicata, clematis, colt's foot, columbine, common dandelion, corn poppy, cyclamen, daffodil, desert-rose,
english marigold, fire lily, foxglove, frangipani, fritillary, garden phlox, gaura, gazania, geranium, giant white
arum lily, globe thistle, globe-flower, grape hyacinth, great masterwort, hard-leaved pocket orchid, hibiscus,
hippeastrum, japanese anemone, king protea, lenten rose, lotus lotus, love in the mist, magnolia, mallow, marigold,
mexican aster, mexican petunia, monkshood, moon orchid, morning glory, orange dahlia, osteospermum, oxeye daisy,
passion flower, pelargonium, peruvian lily, petunia, pincushion flower, pink primrose, pink-yellow dahlia, poinsettia,
primula, prince of wales feathers, purple coneflower, red ginger, rose, ruby-lipped cattleya, siam tulip, silverbush,
snapdragon, spear thistle, spring crocus, stemless gentian, sunflower, sweet pea, sweet william, sword lily, thorn
apple, tiger lily, toad lily, tree mallow, tree poppy, trumpet creeper, wallflower, water lily, watercress, wild
pansy, windflower, yellow iris
"""
CAPTIONS = [f"a photo of a {name}" for name in " ".join(FLOWERS.split()).split(", ")]
TOKENS = 16


def made(folder: Path, **settings) -> Path:
    return make_sd3(folder, **({"image": 32, "width": 32, "heads": 4, "layers": 2} | settings))


def loaded(folder: Path, size: int = 32) -> Prior:
    return load_prior(Sd3(model=str(folder)), size, CPU)


@pytest.mark.parametrize(
    ("image", "downsample", "channels", "patch", "shape"), [(32, 4, 8, 1, (8, 8, 8)), (64, 8, 3, 2, (3, 8, 8))]
)
def test_it_is_of_the_size_that_was_asked_for(tmp_path, image, downsample, channels, patch, shape):
    made(tmp_path, image=image, downsample=downsample, latent_channels=channels, patch=patch, width=48, heads=3)
    prior = loaded(tmp_path, image)
    net = Velocity(prior, read_prompts(Sd3(model=str(tmp_path), tokens=3), ["rose"], CPU))
    pictures = torch.rand(2, 3, image, image) * 2 - 1
    with torch.no_grad():
        z = VaeCodes(prior, CPU).encode(pictures)
        v = net(z, torch.tensor([0.1, 0.9]), torch.tensor([[0], [1]]))
        drawn = VaeCodes(prior, CPU).decode(z)
    assert prior.shape == shape == z.shape[1:] == v.shape[1:]
    assert drawn.shape == pictures.shape
    assert net.embeddings.shape == (2, 77 + 3, 32)
    assert prior.transformer.config.num_attention_heads * prior.transformer.config.attention_head_dim == 48


def test_the_weights_hang_on_the_seed_and_nothing_else(tmp_path):
    before = torch.get_rng_state()
    digests = []
    for k, seed in enumerate((0, 0, 1)):
        digests.append(loaded(made(tmp_path / str(k), seed=seed)).digest)
        torch.rand(3)
    torch.set_rng_state(before)
    made(tmp_path / "last")
    assert torch.equal(torch.get_rng_state(), before)
    assert digests[0] == digests[1] != digests[2]


def own_part(vectors: Tensor) -> tuple[float, float]:
    """Of all pairs of rows the least cosine distance, once the mean is taken away; and the least part that is left."""
    centred = vectors - vectors.mean(dim=0)
    length = centred.norm(dim=1, keepdim=True)
    distance = 1 - (centred / length) @ (centred / length).mT
    nearest = distance.fill_diagonal_(2).min()
    return float(nearest), float(length.min() / vectors.norm(dim=1).mean())


def test_captions_that_differ_are_read_as_clearly_different(tmp_path):
    made(tmp_path, text=256, tokens=TOKENS, captions=CAPTIONS)
    table = read_prompts(Sd3(model=str(tmp_path), tokens=TOKENS), CAPTIONS, CPU)
    assert len(CAPTIONS) == 102
    assert table.embeddings.shape == (103, 2 * TOKENS, 256)
    clip, t5 = table.embeddings[:, :TOKENS], table.embeddings[:, TOKENS:]
    for part in (clip, t5, table.pooled):
        nearest, left = own_part(part[:-1].flatten(1))
        assert nearest > 0.15
        assert left > 0.2
        assert 0.5 < float(part[part != 0].std()) < 2  # neither whispered nor shouted
    everything = torch.cat([table.embeddings.flatten(1), table.pooled], dim=1)
    assert own_part(everything)[0] > 0.25  # the empty prompt, too


def test_every_word_of_the_captions_is_one_token_and_what_else_comes_is_spelt_out(tmp_path):
    from transformers import CLIPTokenizer, T5TokenizerFast

    captions = ["the photo of photos", "a snapdragon's café", "nap gnu"]
    made(tmp_path, tokens=9, captions=captions)
    clip = CLIPTokenizer.from_pretrained(tmp_path / "tokenizer")
    t5 = T5TokenizerFast.from_pretrained(tmp_path / "tokenizer_3")
    assert (clip.model_max_length, len(clip("a zebra on a mountain", truncation=True).input_ids)) == (9, 9)
    for caption in captions:
        ids = clip(caption).input_ids[1:-1]
        assert [clip.decode([i]).strip() for i in ids] == caption.replace("'", " '").split()
        assert t5.tokenize(caption) == [f"▁{word}" for word in caption.split()]
    for unknown in ("zebra", "x"):
        assert clip.decode(clip(unknown).input_ids, skip_special_tokens=True).strip() == unknown
        assert t5.decode(t5(unknown).input_ids, skip_special_tokens=True) == unknown
    assert clip.unk_token_id not in clip("žluťoučký 猫").input_ids[1:-1]


def test_what_is_trained_as_stable_diffusion_3_is_flows_from_noise_to_the_image(tmp_path):
    """Records are N(image, I) here, so that the velocity is known: x's part of it turns its sign at t = 1/2."""
    prior = loaded(made(tmp_path, layers=1))
    generator = torch.Generator().manual_seed(0)
    image = 2 * torch.randn(1, *prior.shape, generator=generator)
    table = PromptTable(torch.randn(2, 4, 32, generator=generator), torch.randn(2, 24, generator=generator))
    told = table.embeddings[:1].expand(16, -1, -1), table.pooled[:1].expand(16, -1)
    transformer = prior.transformer.requires_grad_(True)
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=5e-3)
    for _ in range(200):
        optimizer.zero_grad()
        z = image + torch.randn(16, *prior.shape, generator=generator)
        flow_matching_loss(lambda *x: transformer(*x, return_dict=False)[0], z, *told, generator).backward()
        optimizer.step()

    net = Velocity(replace(prior, transformer=transformer.requires_grad_(False)), table)
    xi, ids, t = torch.randn(18, *prior.shape, generator=generator), torch.zeros(18, 1).long(), torch.arange(1, 19) / 19
    x = interpolate(image + torch.randn(18, *prior.shape, generator=generator), xi, t)
    factor = (2 * t - 1) / (t**2 + (1 - t) ** 2)
    with torch.no_grad():
        v = net(x, t, ids)
        drawn = euler(lambda x, t: net(x, t, ids), xi, 10)
    exact = image + like(factor, x) * (x - like(t, x) * image)
    assert torch.cosine_similarity(v.flatten(1), exact.flatten(1)).min() > 0.75
    assert torch.cosine_similarity(drawn.mean(dim=0).flatten(), image.flatten(), dim=0) > 0.9
