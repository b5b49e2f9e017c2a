"""Stable Diffusion 3 in our pipeline's place for a network: what we draw is what diffusers' own pipeline draws, codes
are bounded and each is its record's alone, and what cannot be loaded is refused with the cure."""

import copy
import dataclasses
import gc
import http.server
import json
import math
import re
import shutil
import socket
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sd3_tiny import SIZE, tiny_sd3
from straightdp.errors import BadInput
from straightdp.flow.path import interpolate
from straightdp.flow.sampler import euler, guided
from straightdp.nets.spaces import Space
from straightdp.recipe import Sd3
from straightdp.sd3 import loading
from straightdp.sd3.codes import MOST, VaeCodes
from straightdp.sd3.loading import Prior, PromptTable, load_prior, read_prompts
from straightdp.sd3.velocity import Velocity

if find_spec("diffusers") is None:
    pytest.skip("diffusers is not installed: pip install 'straightdp[sd3]'", allow_module_level=True)

CPU = torch.device("cpu")
PROMPTS = ["the cat", "a photo of a rose", "two dogs, on a hill"]
TOKENS = 12
CLIP_LENGTH = 77


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_sd3(tmp_path_factory.mktemp("sd3"))


def section(model: Path | str, **settings) -> Sd3:
    return Sd3(model=str(model), tokens=TOKENS, **settings)


@pytest.fixture(scope="module")
def pipeline(folder):
    """diffusers' own, with the shift of its schedule undone, so that sigmas are taken as they are given."""
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    found = StableDiffusion3Pipeline.from_pretrained(folder)
    found.scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    found.set_progress_bar_config(disable=True)
    return found


@pytest.fixture(scope="module")
def prior(folder) -> Prior:
    return load_prior(section(folder), SIZE, CPU)


@pytest.fixture(scope="module")
def table(folder) -> PromptTable:
    return read_prompts(section(folder), PROMPTS, CPU)


@pytest.fixture(scope="module")
def net(prior, table) -> Velocity:
    return Velocity(prior, table)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pictures(n: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def norms(codes: torch.Tensor) -> np.ndarray:
    return np.linalg.norm(codes.double().flatten(1).numpy(), axis=1)


# prompts


def encoded(pipeline, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        found = pipeline.encode_prompt(prompts, None, None, max_sequence_length=TOKENS)
    return torch.cat([found[0], found[1][:1]]), torch.cat([found[2], found[3][:1]])  # negative ones are of ""


def test_the_table_is_what_the_pipeline_makes_of_the_prompts_and_of_the_empty_one(pipeline, table):
    embeddings, pooled = encoded(pipeline, PROMPTS)
    assert table.embeddings.shape == (len(PROMPTS) + 1, CLIP_LENGTH + TOKENS, 32)
    torch.testing.assert_close(table.embeddings, embeddings, rtol=0, atol=1e-5)
    torch.testing.assert_close(table.pooled, pooled, rtol=0, atol=1e-5)
    rows = table.embeddings.flatten(1)
    assert torch.cdist(rows, rows).add(10 * torch.eye(len(rows))).min() > 0.1  # no two prompts are read alike
    assert not table.embeddings.requires_grad


def test_without_t5_zeros_stand_for_it_as_in_the_pipeline(folder, table):
    from diffusers import StableDiffusion3Pipeline

    without = StableDiffusion3Pipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None)
    found = read_prompts(section(folder, t5=False), PROMPTS, CPU)
    embeddings, pooled = encoded(without, PROMPTS)
    torch.testing.assert_close(found.embeddings, embeddings, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.pooled, pooled, rtol=0, atol=1e-5)
    assert not found.embeddings[:, CLIP_LENGTH:].any()
    assert table.embeddings[:, CLIP_LENGTH:].any()


def test_a_prompt_is_read_alike_to_the_bit_every_time_and_whatever_the_others_are(folder, table):
    again = read_prompts(section(folder), PROMPTS[1:2], CPU)
    assert torch.equal(again.embeddings[0], table.embeddings[1])
    assert torch.equal(again.pooled[-1], table.pooled[-1])


def test_the_text_encoders_are_gone_at_once(folder):
    from transformers import CLIPTextModelWithProjection, T5EncoderModel

    def alive() -> int:
        return sum(type(thing) in (CLIPTextModelWithProjection, T5EncoderModel) for thing in gc.get_objects())

    gc.collect()
    before = alive()
    gc.disable()  # their memory is wanted now, not when the collector happens to come by
    try:
        read_prompts(section(folder), PROMPTS[:1], CPU)
        assert alive() == before
    finally:
        gc.enable()


# the network


def test_the_prior_is_frozen_and_float32_on_a_cpu(folder, prior):
    parameters = [*prior.transformer.parameters(), *prior.vae.parameters()]
    assert prior.name == str(folder)
    assert (prior.image, prior.shape) == ((3, SIZE, SIZE), (4, 8, 8))
    assert not any(p.requires_grad for p in parameters)
    assert {p.dtype for p in parameters} == {torch.float32}  # although bfloat16 is the recipe's default
    assert not any(m.training for part in (prior.transformer, prior.vae) for m in part.modules())


def test_the_velocity_is_minus_what_the_transformer_says_at_sigma_one_minus_t(pipeline, net):
    embeddings, pooled = encoded(pipeline, PROMPTS)
    z, xi, sigma = noise(4, *net.shape, seed=1), noise(4, *net.shape, seed=2), torch.tensor([1.0, 0.95, 0.4, 0.01])
    latents = (1 - sigma)[:, None, None, None] * z + sigma[:, None, None, None] * xi  # diffusers' path
    with torch.no_grad():
        expected = pipeline.transformer(latents, embeddings, pooled, 1000 * sigma).sample
        found = net(interpolate(z, xi, 1 - sigma), 1 - sigma, torch.tensor([[0], [1], [2], [net.vocabulary - 1]]))
    torch.testing.assert_close(found, -expected, rtol=0, atol=1e-5)
    assert expected.std() > 0.1
    assert net.vocabulary == len(PROMPTS) + 1


@torch.no_grad()
def test_a_row_of_a_batch_is_that_row_alone(net):
    x, t, ids = noise(5, *net.shape), torch.tensor([0.0, 0.05, 0.3, 0.7, 0.99]), torch.tensor([[3], [0], [2], [1], [0]])
    together = net(x, t, ids)
    assert torch.equal(together, net(x, t, ids))  # nothing is drawn
    louder = net(torch.cat([x[:1], 1e3 * x[1:]]), torch.cat([t[:1], t[1:].flip(0)]), torch.cat([ids[:1], ids[1:] * 0]))
    torch.testing.assert_close(louder[0], together[0], rtol=0, atol=1e-5)
    for i in range(len(x)):
        alone = net(x[i : i + 1], t[i : i + 1], ids[i : i + 1])[0]
        torch.testing.assert_close(together[i], alone, rtol=0, atol=1e-5)


def test_weights_and_prompts_are_of_the_type_that_is_asked_for_but_the_vae_is_float32(folder, table, monkeypatch):
    monkeypatch.setattr(loading, "_dtype", lambda asked, device: getattr(torch, asked.dtype))  # as on a GPU
    found, read = load_prior(section(folder), SIZE, CPU), read_prompts(section(folder), PROMPTS, CPU)
    assert {p.dtype for p in found.transformer.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in found.vae.parameters()} == {torch.float32}
    assert (read.embeddings.dtype, read.pooled.dtype) == (torch.bfloat16, torch.bfloat16)
    assert 0 < (read.embeddings - table.embeddings).norm() / table.embeddings.norm() < 0.05


@torch.no_grad()
def test_half_precision_stays_inside(prior, table, net):
    half = Velocity(dataclasses.replace(prior, transformer=copy.deepcopy(prior.transformer).bfloat16()), table)
    inputs = noise(3, *net.shape), torch.tensor([0.1, 0.5, 0.9]), torch.tensor([[0], [1], [3]])
    full, halved = net(*inputs), half(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        cast = net(*inputs)
    for found in (halved, cast):
        assert found.dtype == torch.float32
        assert 1e-4 < (found - full).norm() / full.norm() < 0.05


def test_the_table_is_no_part_of_the_networks_state(net):
    assert not any("transformer." not in name for name in net.state_dict())
    assert {name for name, _ in net.named_buffers()} >= {"embeddings", "pooled"}


# what we draw is what diffusers draws


@pytest.mark.parametrize(("sigma0", "weight"), [(1.0, 4.0), (1.0, 1.0), (0.95, 2.5)])
def test_our_sampler_draws_what_the_pipeline_draws(pipeline, prior, net, sigma0, weight):
    """diffusers' guidance_scale is our weight: both are null + w (caption - null), and 1 is no guidance. Below 1 it
    goes without guidance too, where ours goes on towards the null: nothing to compare there."""
    steps, start = 6, noise(len(PROMPTS), *net.shape, seed=3)
    expected = pipeline(
        PROMPTS,
        height=SIZE,
        width=SIZE,
        latents=start,
        sigmas=[sigma0 * (1 - k / steps) for k in range(steps)],
        guidance_scale=weight,
        max_sequence_length=TOKENS,
        output_type="pt",
    ).images
    captions, null = torch.arange(len(PROMPTS))[:, None], torch.tensor([[net.vocabulary - 1]])
    with torch.no_grad():
        z = euler(guided(net, captions, null, weight), start, steps, 1 - sigma0)
        other = euler(guided(net, captions, null, weight + 1), start, steps, 1 - sigma0)
    codes = VaeCodes(prior, CPU)
    found = (codes.decode(z) + 1) / 2
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert (codes.decode(other) / 2 + 0.5 - expected).abs().max() > 1e-3  # guidance is not without effect here


# codes


def test_codes_are_the_vaes_mode_scaled_as_diffusers_scales_it_and_decode_likewise(pipeline, prior):
    space: Space = VaeCodes(prior, CPU)
    images, vae = pictures(MOST + 3), pipeline.vae
    assert (space.shape, space.image, space.bound) == (prior.shape, prior.image, math.inf)
    with torch.no_grad():
        z = (vae.encode(images).latent_dist.mode() - vae.config.shift_factor) * vae.config.scaling_factor
        found = space.encode(images)
        torch.testing.assert_close(found, z, rtol=0, atol=1e-5)
        assert (found.dtype, found.device) == (torch.float32, CPU)
        expected = vae.decode(3 * z / vae.config.scaling_factor + vae.config.shift_factor).sample
    assert expected.abs().max() > 1
    torch.testing.assert_close(space.decode(3 * z), expected.clamp(-1, 1), rtol=0, atol=1e-5)


def test_no_images_are_no_codes_and_no_codes_no_images(prior):
    space = VaeCodes(prior, CPU)
    assert space.encode(pictures(0)).shape == (0, *prior.shape)
    assert space.decode(torch.zeros(0, *prior.shape)).shape == (0, *prior.image)


def wild(n: int) -> torch.Tensor:
    images = pictures(n, seed=5)
    images[0] *= 1e30
    images[1, 0, 0, 0] = math.nan
    images[2, :, 3] = math.inf
    images[3] = -math.inf
    images[4] = 0
    return images


@pytest.mark.parametrize("gain", [1.0, 1e15, math.inf, math.nan])
def test_codes_are_within_the_radius_whatever_the_images_or_the_weights(prior, gain):
    vae = copy.deepcopy(prior.vae)
    with torch.no_grad():
        vae.encoder.conv_out.weight *= gain
    for radius in (0.5, math.inf):
        space = VaeCodes(dataclasses.replace(prior, vae=vae), CPU, radius=radius)
        for codes in (space.encode(wild(10)), space.within(1e38 * noise(3, *prior.shape))):
            assert torch.isfinite(codes).all()
            assert (norms(codes) <= radius * (1 + 1e-6)).all()
            assert float(codes.abs().max()) <= space.bound


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e38])
def test_images_are_in_range_whatever_the_code(prior, value):
    images = VaeCodes(prior, CPU).decode(torch.full((2, *prior.shape), value))
    assert float(images.abs().max()) <= 1  # fails for NaN too


def test_within_shortens_what_is_too_long_and_leaves_the_rest(prior):
    space = VaeCodes(prior, CPU, radius=2.0)
    z = noise(4, *prior.shape)
    z = z / z.flatten(1).norm(dim=1)[:, None, None, None] * torch.tensor([0.1, 1.99, 4.0, 4e20])[:, None, None, None]
    found = space.within(z)
    assert torch.equal(found[:2], z[:2])
    torch.testing.assert_close(found[2], z[2] / 2)
    torch.testing.assert_close(found[3], z[3] / 2e20)


def test_the_radius_is_the_quantile_of_the_public_norms(prior):
    space = VaeCodes(prior, CPU)
    public = space.encode(pictures(20) * torch.linspace(0.1, 3, 20)[:, None, None, None])
    space.settle(public, 0.75)
    assert space.radius == pytest.approx(np.quantile(norms(public), 0.75), rel=1e-9)
    assert space.radius < space.bound < space.radius * 1.001
    again = norms(space.encode(pictures(20) * torch.linspace(0.1, 3, 20)[:, None, None, None]))
    np.testing.assert_allclose(again, np.minimum(norms(public), space.radius), rtol=1e-5)
    np.testing.assert_allclose(norms(space.within(public)), again, rtol=1e-5)


@pytest.mark.parametrize(("n", "value"), [(0, 1.0), (3, 0.0), (3, math.nan)])
def test_a_radius_cannot_be_had_of_nothing(prior, n, value):
    space, codes = VaeCodes(prior, CPU), torch.full((n, *prior.shape), value)
    with pytest.raises(BadInput, match=r"; see that sd3\.model draws"):
        space.settle(codes, 0.99)
    assert space.radius == math.inf


def test_a_records_code_is_its_own_to_the_bit(prior):
    space = VaeCodes(prior, CPU, radius=3.0)
    images, order = pictures(2 * MOST + 6), torch.randperm(2 * MOST + 6, generator=torch.Generator().manual_seed(0))
    codes = space.encode(images)
    assert torch.equal(space.encode(images[order]), codes[order])
    assert torch.equal(space.encode(images[:7]), codes[:7])
    for i in (0, MOST, 2 * MOST + 5):
        assert torch.equal(space.encode(images[i : i + 1])[0], codes[i])
    assert torch.equal(space.encode(torch.cat([wild(6), images[:3]]))[6:], codes[:3])
    assert torch.equal(VaeCodes(prior, CPU, radius=3.0).encode(images[3:9]), codes[3:9])


@pytest.mark.parametrize("offload", [True, False])
def test_an_offloaded_vae_is_on_the_device_only_while_it_is_used(prior, monkeypatch, offload):
    vae, moves = copy.deepcopy(prior.vae), []
    place, encode = vae.to, vae.encode
    monkeypatch.setattr(vae, "to", lambda device: (moves.append(str(device)), place("cpu"))[1])
    monkeypatch.setattr(vae, "encode", lambda *a, **k: (moves.append("used"), encode(*a, **k))[1])
    space = VaeCodes(dataclasses.replace(prior, vae=vae), torch.device("cpu:0"), offload=offload)
    codes = space.encode(pictures(3))
    assert torch.equal(codes, VaeCodes(prior, CPU).encode(pictures(3)))
    assert "used" in moves
    assert (moves[0], moves[-1]) == ("cpu:0", "cpu" if offload else "used")
    moves.clear()
    with pytest.raises(RuntimeError):
        space.decode(torch.zeros(1, 99, 8, 8))
    assert moves == (["cpu:0", "cpu"] if offload else ["cpu:0"])


# the weights' name


def copied(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target))


@pytest.mark.parametrize("part", ["transformer", "vae"])
def test_the_digest_is_of_the_weights_that_are_loaded(folder, prior, tmp_path, part):
    other = copied(folder, tmp_path / "other")
    (other / part / "diffusion_pytorch_model.fp16.safetensors").write_bytes(b"another copy, not loaded")
    assert re.fullmatch("[0-9a-f]{64}", prior.digest)
    assert load_prior(section(other), SIZE, CPU).digest == prior.digest  # wherever it lies
    weights = other / part / loading.WEIGHTS
    values = load_file(weights)
    name = sorted(values)[0]
    values[name].view(-1)[0] += 1e-3
    save_file(values, weights, metadata={"format": "pt"})
    assert load_prior(section(other), SIZE, CPU).digest != prior.digest


def test_the_digest_of_weights_in_several_files_covers_each(folder, prior, tmp_path):
    other = copied(folder, tmp_path / "other")
    prior.transformer.save_pretrained(other / "transformer", max_shard_size="100kB")
    (other / "transformer" / loading.WEIGHTS).unlink()
    shards = sorted((other / "transformer").glob("*.safetensors"))
    assert len(shards) > 2
    found = {load_prior(section(other), SIZE, CPU).digest}
    for shard in shards:
        values = load_file(shard)
        next(iter(values.values())).view(-1)[0] += 1e-3
        save_file(values, shard, metadata={"format": "pt"})
        found.add(load_prior(section(other), SIZE, CPU).digest)
    assert len(found) == 1 + len(shards)


# refusals


def refusal(model: Path | str, *expected: str, size: int = SIZE, read: bool = False, **settings) -> None:
    """One sentence with the cure, which holds every expected part."""
    asked = section(model, **settings)
    with pytest.raises(BadInput) as caught:
        read_prompts(asked, PROMPTS, CPU) if read else load_prior(asked, size, CPU)
    message = str(caught.value)
    assert "\n" not in message
    assert ";" in message, f"no cure in: {message}"
    for part in expected:
        assert part in message, message


@pytest.mark.parametrize("package", ["diffusers", "transformers"])
@pytest.mark.parametrize("read", [True, False])
def test_without_the_extra_its_command_is_named(folder, monkeypatch, package, read):
    monkeypatch.setitem(sys.modules, package, None)
    refusal(folder, "pip install 'straightdp[sd3]'", package, read=read)


def test_a_size_that_does_not_fit_is_refused_before_weights_are_read(folder, tmp_path):
    other = copied(folder, tmp_path / "other")
    (other / "transformer" / loading.WEIGHTS).write_bytes(b"")
    for size in (4, 30, 36, 72):  # patches of 2 x 4 pixels, a table of 8 places a side
        refusal(other, f"{size} x {size}", "multiple of 8, at most 64", size=size)
    assert load_prior(section(folder), 64, CPU).shape == (4, 16, 16)


def test_what_is_not_a_folder_with_a_stable_diffusion_3_is_refused(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    refusal(tmp_path / "nowhere", "not a folder", "OWNER/NAME")
    refusal("nowhere", "not a folder")
    (tmp_path / "model.safetensors").write_bytes(b"")
    refusal(tmp_path / "model.safetensors", "not a folder")
    refusal("", "no model_index.json")
    refusal(tmp_path, "no model_index.json")
    other = copied(folder, tmp_path / "other")
    index = json.loads((other / "model_index.json").read_text())
    for broken in ("", "[]", "{}", '"text"'):
        (other / "model_index.json").write_text(broken)
        refusal(other, "no model_index.json that can be read")
    (other / "model_index.json").write_text(json.dumps(index | {"_class_name": "StableDiffusionXLPipeline"}))
    refusal(other, "StableDiffusionXLPipeline", read=True)


def test_a_folder_goes_before_a_hub_id_of_the_same_name(folder, prior, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    monkeypatch.chdir(tmp_path)
    copied(folder, tmp_path / "owner" / "name")
    assert load_prior(section("owner/name"), SIZE, CPU).digest == prior.digest


def test_a_part_that_is_missing_or_broken_is_refused_where_it_is_needed(folder, tmp_path):
    other = copied(folder, tmp_path / "other")
    shutil.rmtree(other / "text_encoder_3")
    load_prior(section(other), SIZE, CPU)
    read_prompts(section(other, t5=False), PROMPTS, CPU)
    refusal(other, "lacks text_encoder_3;", read=True)
    (other / "text_encoder" / "model.safetensors").write_bytes(b"not weights")
    refusal(other, "could not be loaded", read=True, t5=False)
    values = load_file(other / "transformer" / loading.WEIGHTS)
    values.pop("proj_out.weight")
    save_file(values, other / "transformer" / loading.WEIGHTS, metadata={"format": "pt"})
    refusal(other, "transformer has no weights proj_out.weight")  # which diffusers would draw at random
    (other / "transformer" / loading.WEIGHTS).write_bytes(b"not weights")
    refusal(other, "could not be loaded")
    (other / "transformer" / loading.WEIGHTS).unlink()
    refusal(other, "could not be loaded")
    (other / "vae" / "config.json").unlink()
    refusal(other, "could not be loaded")
    shutil.rmtree(other / "vae")
    refusal(other, "lacks vae;")


@pytest.mark.parametrize("read", [True, False])
def test_too_little_memory_names_what_makes_room(folder, monkeypatch, read):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.\nOf the allocated memory")

    monkeypatch.setattr("diffusers.StableDiffusion3Pipeline.to" if read else "diffusers.SD3Transformer2DModel.to", full)
    refusal(folder, "sd3.dtype", "sd3.offload", "sd3.t5", read=read)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The hub's cache, empty; what is asked over the net goes to a port of this machine where nobody answers."""
    from huggingface_hub import constants

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    return tmp_path / "cache"


def test_a_hub_that_is_not_reached_is_said_to_be(hub, monkeypatch):
    refusal("owner/name", "owner/name", "could not be fetched", "check the connection")
    refusal("owner/name", "could not be fetched", read=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refusal("owner/name", "could not be fetched", "HF_HUB_OFFLINE")


@pytest.mark.parametrize(("status", "code"), [(401, "GatedRepo"), (403, "GatedRepo"), (403, None), (401, None)])
def test_a_licence_to_accept_or_a_token_to_give_is_said(hub, monkeypatch, status, code):
    class Refuse(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
                self.send_header("X-Error-Message", "Access is restricted.")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuse) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            refusal("owner/name", "owner/name", "accept the licence", "hf auth login", "HF_TOKEN")
        finally:
            server.shutdown()


def test_a_hub_id_is_taken_from_the_cache_and_is_the_same_model(hub, folder, prior, table):
    commit = "a" * 40
    repository = hub / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.rmtree(copied(folder, repository / "snapshots" / commit) / "scheduler")  # it is not asked for
    found = load_prior(section("owner/name"), SIZE, CPU)
    assert (found.name, found.digest) == ("owner/name", prior.digest)
    assert torch.equal(read_prompts(section("owner/name"), PROMPTS, CPU).embeddings, table.embeddings)
