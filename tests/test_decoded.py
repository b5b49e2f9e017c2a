"""A network in pixels beside a release of codes: where it starts, what leads it, what is shared and what refused."""

import json
from dataclasses import replace

import pytest
import torch

from conftest import PIN
from straightdp import pipeline, recipe
from straightdp.audits.replay import replay
from straightdp.cli import main
from straightdp.errors import BadInput, BudgetRefused
from straightdp.flow.fit import step_generator
from straightdp.flow.jitter import jitter
from straightdp.flow.path import back_to
from straightdp.flow.sampler import euler, pulled
from straightdp.folder import RunFolder
from straightdp.generator import Conditioning, Generator
from straightdp.moments.decoded import DRAWS, GAUSSIANS, decoded
from straightdp.moments.field import MomentModel
from straightdp.nets.autoencoder import Autoencoder
from straightdp.nets.backbone import own_net
from straightdp.nets.captions import Tokenizer
from straightdp.nets.spaces import Codes
from straightdp.progress import quiet
from straightdp.recipe import Latent, Net, Sample
from straightdp.stages.inputs import public_key

CPU = torch.device("cpu")
IMAGE, CODE = (1, 8, 8), (2, 4, 4)
D, R = 32, 3
CLASSES = ("cat", "dog", "eel")


def keyed(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def moments(classes: int = 3, *, spread: float = 0.2, seed: int = 0) -> MomentModel:
    g = keyed(seed)
    V = torch.linalg.qr(torch.randn(classes, D, R, generator=g)).Q.contiguous()
    lam = spread * (1 + torch.rand(classes, R, generator=g))
    return MomentModel(
        torch.randn(classes, D, generator=g), V, lam, torch.tensor([0.5, 0.3, 0.2])[:classes] / classes, 0.02
    )


def released() -> MomentModel:
    return moments().beside(moments(1, seed=1))


def generator(flow: str = "pixels", model: MomentModel | None = None) -> Generator:
    """Random weights."""
    section = Net(width=16, depth=2, heads=2, patch=2, caption_width=8, caption_length=3, vocabulary=16)
    words = Conditioning(CLASSES, CLASSES, Tokenizer.from_captions(CLASSES, 3, 16))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        autoencoder = Autoencoder(Latent(d=D, width=8, flow=flow), IMAGE)  # type: ignore[arg-type]
        autoencoder.settle(torch.rand(200, *IMAGE) * 2 - 1)
        net = own_net(section, IMAGE if flow == "pixels" else CODE)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.normal_(0, 0.2)
    return Generator(net.eval(), words, model or released(), Sample(), Codes(autoencoder, CPU))


# moments of codes, seen through a decoder


def linear(codes: torch.Tensor) -> torch.Tensor:
    """A decoder that adds no curve of its own."""
    return (0.05 * codes @ torch.randn(D, 64, generator=keyed(7))).reshape(-1, 1, 8, 8)


MAP = linear(torch.eye(D)).flatten(1)


def test_through_a_linear_map_a_mixture_has_the_mean_and_covariance_of_the_mapped_gaussian():
    model = replace(released(), floor=1e-4)  # far below what the map gives
    found = decoded(model, linear)
    assert found.means.shape == (3, GAUSSIANS, 64)
    torch.testing.assert_close(found.prior, model.prior / model.prior.sum())
    torch.testing.assert_close(found.mu, model.mu @ MAP, rtol=0, atol=0.02)
    for k in range(3):
        sigma = model.V[k] @ torch.diag(model.lam[k]) @ model.V[k].T + model.floor * torch.eye(D)
        expected = MAP.T @ sigma @ MAP
        got = torch.cov(found.sample(torch.full((20_000,), k), keyed(k)).T)
        assert (got - expected).norm() < 0.1 * expected.norm()


def test_the_public_records_are_one_gaussian_of_decoded_draws_too():
    model = released()
    crowd = decoded(model, linear).crowd
    assert crowd is not None
    assert crowd.mu.shape == (1, 64)
    torch.testing.assert_close(crowd.mu, model.crowd.mu @ MAP, rtol=0, atol=0.02)
    assert decoded(moments(), linear).crowd is None, "nothing is known of a public set that a release does not name"


def test_several_modes_of_pictures_are_told_apart_where_codes_are_one_gaussian():
    """A decoder with a jump: pictures are black or white, and hardly one is grey."""

    def jump(codes):
        return torch.where(codes[:, :1] > codes[:, :1].mean(), 1.0, -1.0).expand(-1, 64).reshape(-1, 1, 8, 8)

    model = MomentModel(torch.zeros(1, D), torch.eye(D)[None, :, :1], torch.tensor([[4.0]]), torch.ones(1), 1e-4)
    found = decoded(model, jump)
    drawn = found.sample(torch.zeros(2000, dtype=torch.int64), keyed(0)).mean(dim=1)
    assert float((drawn.abs() < 0.5).float().mean()) < 0.02
    assert 0.4 < float((drawn > 0).float().mean()) < 0.6


def test_it_hangs_on_the_release_alone():
    model = released()
    torch.manual_seed(1)
    one = decoded(model, linear)
    torch.manual_seed(2)
    torch.rand(5)
    two = decoded(model, linear)
    assert torch.equal(one.means, two.means)
    assert torch.equal(one.lam, two.lam)


def test_a_class_that_decodes_to_one_picture_alone_is_that_picture():
    """Centres that lose their points are no grey between the classes."""
    mu = torch.zeros(2, D)
    mu[0, 0], mu[1, 0] = 1.0, -1.0
    model = MomentModel(mu, torch.zeros(1, D, 0), torch.zeros(1, 0), torch.ones(2) / 2, 1e-4)
    found = decoded(model, lambda codes: codes[:, :1].sign().expand(-1, 64).reshape(-1, 1, 8, 8))
    x, t, y = torch.full((2, 64), 0.2), torch.full((2,), 0.69), torch.tensor([0, 1])
    mean = found.posterior_mean(x, t, y)
    torch.testing.assert_close(mean, mu[:, :1].expand(-1, 64), rtol=0, atol=0.05)


def test_captions_of_one_class_are_decoded_once(monkeypatch):
    seen = []

    def counted(codes):
        seen.append(len(codes))
        return linear(codes)

    model = moments().under((0, 0, 1, 2, 2))
    found = decoded(model, counted)
    assert seen.count(DRAWS) == 3
    assert torch.equal(found.means[0], found.means[1])
    assert torch.equal(found.means[3], found.means[4])
    assert not torch.equal(found.means[1], found.means[2])
    torch.testing.assert_close(found.prior, model.prior / model.prior.sum())


def test_a_release_of_more_classes_than_pictures_are_looked_at_is_fitted(monkeypatch):
    monkeypatch.setattr("straightdp.moments.decoded.SEEN", 10)
    many = MomentModel(torch.randn(40, D), torch.zeros(1, D, 0), torch.zeros(1, 0), torch.ones(40) / 40, 0.01)
    found = decoded(many, linear)
    assert found.means.shape == (40, GAUSSIANS, 64)
    torch.testing.assert_close(found.mu, many.mu @ MAP, rtol=0, atol=0.1)


# drawing


def test_draws_of_the_release_are_decoded_codes():
    still = MomentModel(moments().mu, torch.zeros(1, D, 1), torch.zeros(1, 1), moments().prior, 1e-12)
    one, y = generator(model=still), torch.tensor([2, 0, 1, 1])
    found = one.draw(y, Sample(port="release"), 0, quiet)
    expected = one.space.autoencoder.decode(still.mu[y].reshape(-1, *CODE))
    assert found.shape == (4, *IMAGE)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("moved", [0.0, 1.0])
def test_the_network_starts_from_decoded_draws_in_pixels(moved):
    """One step by hand, with the draws in the order in which they are made."""
    one, y = generator(), torch.tensor([0, 1, 2, 2])
    section = Sample(port="guide", t0=0.4, steps=1, guidance=1.0, jitter=moved)
    found = one.draw(y, section, 5, quiet)
    g = step_generator(5, "sample", 0, CPU)
    pictures = one.space.decode(one.moments.sample(y, g).reshape(-1, *CODE))
    x = back_to(jitter(pictures, moved, g), 0.4, g)
    with torch.no_grad():
        v = one.net(x, torch.full((4,), 0.4), one.conditioning.ids(CPU)[y])
    torch.testing.assert_close(found, (x + 0.6 * v).clamp(-1, 1), rtol=1e-4, atol=1e-4)


def test_what_leads_on_is_the_decoded_field_less_the_public_one():
    one, y = generator(), torch.tensor([0, 1, 2, 2])
    section = Sample(port="guide", t0=0.2, steps=3, guidance=1.0, pull=0.7)
    found = one.draw(y, section, 5, quiet)
    g = step_generator(5, "sample", 0, CPU)
    x = back_to(one.space.decode(one.moments.sample(y, g).reshape(-1, *CODE)), 0.2, g)
    lead = decoded(one.moments, lambda z: one.space.decode(z.reshape(-1, *CODE)))

    def towards(x, t):
        return lead.velocity(x, t, y)

    def field(x, t):
        return one.net(x, t, one.conditioning.ids(CPU)[y])

    with torch.no_grad():
        led = euler(pulled(field, towards, lead.crowd.mixture_velocity, 0.7, 0.7), x, 3, 0.2)
        plain = euler(field, x, 3, 0.2)
    torch.testing.assert_close(found, led.clamp(-1, 1), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, plain.clamp(-1, 1), atol=1e-2)


def test_a_pull_without_public_moments_is_refused():
    with pytest.raises(BadInput, match=r"sample\.pull"):
        generator(model=moments()).draw(torch.tensor([0]), Sample(port="guide", pull=1.0), 0, quiet)


@pytest.mark.parametrize("port", ["weights", "guide", "release"])
@pytest.mark.parametrize("flow", ["pixels", "codes"])
def test_a_generator_comes_back_from_its_files(flow, port, tmp_path):
    one = generator(flow)
    one.save(tmp_path / "model.safetensors", tmp_path / "model.json")
    one.moments.save(tmp_path / "moments.safetensors")
    two = Generator.load(tmp_path, CPU)
    section, y = Sample(port=port, steps=2, pull=0.5 if port == "guide" else 0.0), one.prompts(6, CPU)
    drawn = two.draw(y, section, 5, quiet)
    assert torch.equal(drawn, one.draw(y, section, 5, quiet))
    assert drawn.shape == (6, *IMAGE)
    assert two.image == IMAGE
    assert two.draw(y[:0], section, 5, quiet).shape == (0, *IMAGE)


def test_a_release_from_before_the_knob_works_in_codes(tmp_path):
    one = generator("codes")
    one.save(tmp_path / "model.safetensors", tmp_path / "model.json")
    body = json.loads((tmp_path / "model.json").read_text())
    del body["latent"]["section"]["flow"]
    (tmp_path / "model.json").write_text(json.dumps(body))
    one.moments.save(tmp_path / "moments.safetensors")
    section, y = Sample(port="guide", steps=2), one.prompts(6, CPU)
    assert torch.equal(Generator.load(tmp_path, CPU).draw(y, section, 0, quiet), one.draw(y, section, 0, quiet))


# recipes

OFF = ("distill.steps=0", "dpsgd.steps=0")
PIXELS = ("latent.d=32", "latent.flow=pixels", "sample.port=guide", *OFF)


def test_the_knob_is_part_of_a_recipes_digest_and_of_none_from_before_it():
    codes = recipe.load(None, ("latent.d=32", *OFF))
    assert codes.digest() == "aadf53010abbb3877059b2e4a030f273c5c303aaa8bf8913ff43f9b7a0fb27b9", "as it was before"
    assert recipe.load(None, PIXELS).digest() != codes.digest()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (("latent.flow=pixels", *OFF), "give latent.d"),
        (("latent.d=32", "latent.flow=pixels", "dpsgd.steps=0"), "distill.steps"),
        (("latent.d=32", "latent.flow=pixels", "distill.steps=0"), "dpsgd.steps"),
        ((*PIXELS, "release.weight=0", "release.sigma=1", "sample.t0=plateau"), "sample.t0"),
        (("latent.d=32", "latent.flow=pixels", "distill.steps=0", "release.weight=0"), "release"),
        ((*PIXELS, "sample.port=weights"), "sample.port"),
        (("latent.flow=pixels", "run.method=dp-merf"), "latent.d and flow"),
        (("latent.flow=pixel",), "latent.flow"),
    ],
)
def test_what_does_not_go_with_it_is_refused(settings, named):
    with pytest.raises(BadInput) as caught:
        recipe.load(None, settings)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


# whole runs

SHORT = (
    "latent.width=8",
    "latent.steps=3",
    "latent.batch=8",
    "pretrain.steps=2",
    "pretrain.t_min=0.2",
    "sample.n=20",
    "sample.steps=2",
    "sample.port=guide",
    "sample.t0=0.3",
    "evaluate.probe_steps=5",
    f'privacy.pinned_key="{PIN}"',
)
LED = (*SHORT, *PIXELS, "sample.pull=1.0", "sample.churn=1.0", "sample.jitter=1.0")


@pytest.fixture
def watched(monkeypatch):
    """The inputs of a run, as it leaves its public stages behind."""
    seen = []
    enter = pipeline.prepare.enter_space

    def entered(inputs):
        enter(inputs)
        seen.append(inputs)

    monkeypatch.setattr(pipeline.prepare, "enter_space", entered)
    return seen


def test_a_whole_run_releases_moments_of_codes_and_a_network_of_pixels(tiny, tmp_path, watched, monkeypatch):
    monkeypatch.delenv("STRAIGHTDP_CACHE", raising=False)
    folder = pipeline.run(recipe.load(tiny, LED), tmp_path / "run")
    verdict = replay(folder.release)
    assert verdict.holds, verdict.text
    model = Generator.load(folder.release, CPU)
    assert model.moments.mu.shape == (10, 32)
    assert model.net.shape == IMAGE
    assert model.draw(model.prompts(5, CPU), model.sample, 1, quiet).shape == (5, *IMAGE)
    assert len(list((folder.synthetic / "images").glob("*.png"))) == 20
    scores = {one["name"]: one["mean"] for one in json.loads(folder.evaluation.read_text())["scores"]}
    assert {"synthetic data", "released moments alone"} <= scores.keys()
    (inputs,) = watched
    assert inputs.public_z.shape == (400, 2, 4, 4)
    assert inputs.public_flow.shape == (400, 1, 8, 8)
    assert torch.equal(inputs.public_flow, inputs.public.z())


def test_its_network_is_the_one_of_pixel_runs_and_its_autoencoder_that_of_runs_in_codes(tiny, tmp_path, watched):
    """By the keys under which runs share them."""
    more = {"led": LED, "codes": (*SHORT, "latent.d=32", *OFF), "pixels": (*SHORT, *OFF)}
    for name, settings in more.items():
        pipeline.run(recipe.load(tiny, settings), tmp_path / name)
    led, codes, pixels = watched
    assert public_key(led, "autoencode") == public_key(codes, "autoencode")
    assert public_key(led, "pretrain") == public_key(pixels, "pretrain")
    assert public_key(codes, "pretrain") != public_key(pixels, "pretrain")
    weights = [(tmp_path / name / "private/checkpoints/pretrained.safetensors").read_bytes() for name in more]
    assert weights[0] == weights[2]
    assert weights[0] != weights[1]


@pytest.mark.parametrize("flow", ["pixels", "codes"])
def test_patches_are_of_what_the_network_sees(flow, tiny, tmp_path):
    """8 pixels divide by 8 and the 4 x 4 grid of a code does not."""
    settings = (*SHORT, *PIXELS, f"latent.flow={flow}", "net.patch=8")
    if flow == "pixels":
        assert pipeline.run(recipe.load(tiny, settings), tmp_path / "run") is not None
    else:
        with pytest.raises(BadInput, match=r"net\.patch"):
            pipeline.run(recipe.load(tiny, settings), tmp_path / "run")


def test_after_another_autoencoder_nothing_old_goes_on(tiny, tmp_path, monkeypatch):
    """A run loses its autoencoder once moments of its codes are out: what another would decode is never released."""
    monkeypatch.delenv("STRAIGHTDP_CACHE", raising=False)

    def stops(*_):
        raise KeyboardInterrupt

    rules = recipe.load(tiny, LED)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline.private, "dpsgd", stops)
        with pytest.raises(KeyboardInterrupt):
            pipeline.run(rules, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    assert folder.moments.exists()
    folder.autoencoder.unlink()
    (folder.checkpoints / "autoencode.pt").unlink(missing_ok=True)
    loss = Autoencoder.loss
    monkeypatch.setattr(Autoencoder, "loss", lambda self, x, noise: loss(self, x, 3 * noise))
    with pytest.raises(BudgetRefused):
        pipeline.run(rules, folder.root, resume=True)
    assert not folder.model.exists()


def test_an_audit_of_it_attacks_the_network_in_pixels(tiny, tmp_path):
    """Which knows nothing private: what it gained on every canary is nothing, and ranks none before another."""
    attacks = ("audit.canaries=12", "audit.references=10", "audit.draws=2", "audit.samples=8", "audit.shadows=0")
    wanted = (*(setting for setting in LED if "pinned_key" not in setting), *attacks)
    given = [word for setting in wanted for word in ("--set", setting)]
    assert main(["audit", str(tiny), "--out", str(tmp_path / "audit"), *given]) == 0
    found = json.loads((tmp_path / "audit/private/audit.json").read_text())["honest"]
    assert found["exposure"] == found["chance"] == 0.0
    assert found["from_sums"]["r"] == 6
