"""The linear probe against other solvers and changes it must not notice; its image encoder against transformers."""

import http.server
import shutil
import sys
import threading

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from straightdp.errors import BadInput
from straightdp.metrics import inception
from straightdp.metrics.image_encoder import ImageEncoder, Remembered, clip_pixels, find_encoder
from straightdp.metrics.linear_probe import _optimum, fit_linear

CPU = torch.device("cpu")


def blobs(n: int, p: int, classes: int, noise: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Skewed, correlated, badly scaled features of overlapping classes, as an encoder's are."""
    rng = np.random.default_rng(seed)
    centres, mix = rng.normal(size=(classes, 8)), rng.normal(size=(8, p)) * 0.7 ** np.arange(8)[:, None]
    y = rng.integers(0, classes, size=n)
    x = np.maximum((centres[y] + noise * rng.normal(size=(n, 8))) @ mix + 0.1 * rng.normal(size=(n, p)), 0)
    return torch.from_numpy(x * 10.0 ** rng.uniform(-3, 3, size=p)).float(), torch.from_numpy(y)


def scores_of_scikit(x, y, l2, points) -> tuple[np.ndarray, np.ndarray]:
    """Scores (m, classes) under the same objective, by another solver run to the end, and the classes' names."""
    scaler = StandardScaler().fit(x.double().numpy())
    model = LogisticRegression(C=1 / l2, solver="newton-cg", tol=1e-10, max_iter=1000)
    model.fit(scaler.transform(x.double().numpy()), y.numpy())
    return model.decision_function(scaler.transform(points.double().numpy())), model.classes_


@pytest.mark.parametrize(
    ("n", "p", "classes", "l2"), [(300, 12, 5, 1.0), (300, 12, 5, 1e-3), (40, 60, 3, 1.0), (300, 12, 3, 100.0)]
)
def test_labels_are_those_of_scikit_learn(n, p, classes, l2):
    x, y = blobs(n, p, classes, noise=1.5)
    points = blobs(2000, p, classes, noise=2.5)[0]
    scores, names = scores_of_scikit(x, y, l2, points)
    ordered = np.sort(scores, axis=1)
    clear = ordered[:, -1] - ordered[:, -2] > 2e-3
    found = fit_linear(x, y, classes, l2=l2)(points).numpy()
    assert clear.mean() > 0.95
    assert (found == names[scores.argmax(axis=1)])[clear].all()
    other = scores_of_scikit(x, y, 30 * l2, points)[0]
    assert (found != names[other.argmax(axis=1)])[clear].any(), "another penalty gives other labels here"


@pytest.mark.parametrize("p", [100, 500])
def test_hundreds_of_correlated_features_are_solved_to_the_end(p):
    """The objective is l2-strongly convex in W, so W is within |gradient| / l2 of the optimum."""
    x, y = blobs(300, p, 20, noise=1.0)
    x = (x.double() - x.double().mean(dim=0)) / x.double().std(dim=0, correction=0)
    weight, bias = (value.requires_grad_() for value in _optimum(x, y, 20, 1.0))
    loss = torch.nn.functional.cross_entropy(x @ weight.mT + bias, y, reduction="sum") + weight.square().sum() / 2
    gradients = torch.autograd.grad(loss, [weight, bias])
    assert max(float(g.norm()) for g in gradients) < 1e-2
    assert weight.norm() > 1


def boundary(predict, low: float, high: float) -> float:
    """Where on a line the label changes from 0 to 1."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if int(predict(torch.tensor([[middle]]).double())) == 0 else (low, middle)
    return low


def test_the_boundary_of_one_feature_is_where_gradient_descent_puts_it():
    x, y = torch.tensor([-2.0, -1, 0.5, 1, 4, 7]), torch.tensor([0, 0, 1, 0, 1, 1])
    standard = (x - x.mean()) / x.std(correction=0)
    w = b = 0.0
    for _ in range(20_000):  # two classes with weights +-w/2: the penalty is l2/2 (w/2)^2 twice
        push = torch.sigmoid(w * standard + b) - y
        w, b = w - 0.1 * (float((push * standard).sum()) + 0.5 * w), b - 0.1 * float(push.sum())
    expected = float(x.mean() - b / w * x.std(correction=0))
    assert boundary(fit_linear(x[:, None], y, 2), -2, 7) == pytest.approx(expected, abs=1e-4)


def test_separable_classes_are_separated_and_empty_ones_never_named():
    rng = np.random.default_rng(0)
    y = torch.from_numpy(rng.choice([1, 4, 6], size=90))
    x = 20 * torch.eye(8)[y] + torch.from_numpy(rng.normal(size=(90, 8))).float()
    predict = fit_linear(x, y, 8)
    assert torch.equal(predict(x), y)
    far = torch.from_numpy(rng.normal(size=(500, 8)) * 1e3)
    assert set(predict(far).tolist()) == {1, 4, 6}
    assert predict(x[:0]).shape == (0,)


def test_one_class_alone_is_the_only_answer():
    predict = fit_linear(torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.full((5,), 2), 4)
    assert predict(torch.tensor([[1e6, -1e6, 0.0]])).tolist() == [2]


def test_constant_features_change_nothing_even_where_they_are_not_constant():
    x, y = blobs(120, 6, 4, noise=1.0)
    points = blobs(300, 6, 4, noise=2.0)[0]
    constant = torch.tensor([0.0, 0.1, 1e7], dtype=torch.float64).expand(120, 3)
    last_bit = torch.where(y == 0, 5.0, 5.0 + 2.0**-21)[:, None]  # rounding that happens to tell a class
    with_them = torch.cat([x.double(), constant, last_bit], dim=1)
    elsewhere = torch.cat([points, 1e9 * torch.randn(300, 4, generator=torch.Generator().manual_seed(0))], dim=1)
    assert torch.equal(fit_linear(with_them, y, 4)(elsewhere), fit_linear(x, y, 4)(points))


@pytest.mark.parametrize("shape", [(150, 10), (40, 70)])
def test_neither_order_nor_units_matter(shape):
    n, p = shape
    x, y = blobs(n, p, 5, noise=1.5)
    points = blobs(1000, p, 5, noise=2.0)[0]
    labels = fit_linear(x, y, 5)(points)
    assert len(labels.unique()) == 5
    rng = np.random.default_rng(1)
    records, names = torch.from_numpy(rng.permutation(n)), torch.from_numpy(rng.permutation(5))
    columns, units = torch.from_numpy(rng.permutation(p)), torch.from_numpy(10.0 ** rng.uniform(-4, 4, size=p))
    zero = torch.from_numpy(rng.normal(size=p)) * x.std(dim=0) * units

    def same(found):
        return float((found == labels).double().mean()) >= 0.999  # the solver's tolerance, at a boundary

    assert same(fit_linear(x[records], y[records], 5)(points))
    assert same(names.argsort()[fit_linear(x, names[y], 5)(points)])
    assert same(fit_linear(x[:, columns], y, 5)(points[:, columns]))
    assert same(fit_linear(x * units + zero, y, 5)(points * units + zero))
    assert torch.equal(fit_linear(x, y, 5)(points), labels)
    assert not same(fit_linear(x, names[y], 5)(points))


@pytest.mark.parametrize(
    ("x", "y", "l2", "word"),
    [
        (torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), 1.0, "0 records"),
        (torch.zeros(2, 3), torch.tensor([0, 3]), 1.0, "0..2"),
        (torch.zeros(2, 3), torch.tensor([0, -1]), 1.0, "0..2"),
        (torch.zeros(2, 3), torch.tensor([0]), 1.0, "2 records"),
        (torch.tensor([[0.0], [float("nan")]]), torch.tensor([0, 1]), 1.0, "finite"),
        (torch.zeros(2, 3), torch.tensor([0, 1]), 0.0, "l2"),
    ],
)
def test_what_cannot_be_fitted_is_refused(x, y, l2, word):
    with pytest.raises(ValueError, match=word):
        fit_linear(x, y, 3, l2=l2)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Tiny random models, by folder: the image side of a CLIP, a whole one, and two that are none."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    narrow = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sight = transformers.CLIPVisionConfig(**narrow, projection_dim=12, image_size=32, patch_size=8)
    words = transformers.CLIPTextConfig(**narrow, projection_dim=12, vocab_size=20, bos_token_id=0, eos_token_id=1)
    both = transformers.CLIPConfig(text_config=words.to_dict(), vision_config=sight.to_dict(), projection_dim=12)
    transformers.CLIPVisionModelWithProjection(sight).save_pretrained(folder / "sight")
    transformers.CLIPVisionModel(sight).save_pretrained(folder / "no-projection")
    transformers.CLIPTextModelWithProjection(words).save_pretrained(folder / "words")
    transformers.CLIPModel(both).save_pretrained(folder / "both")
    return folder


def pictures(n: int, height: int, width: int, channels: int = 3) -> np.ndarray:
    """Blocks of four pixels, from black to white: hard edges, on which interpolation overshoots."""
    rng = np.random.default_rng(height + width)
    blocks = rng.integers(0, 256, size=(n, channels, height // 4 + 1, width // 4 + 1), dtype=np.uint8)
    return blocks.repeat(4, axis=2).repeat(4, axis=3)[:, :, :height, :width]


def to_z(pixels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pixels).float() / 127.5 - 1


@pytest.mark.parametrize("shape", [(3, 512, 512), (3, 128, 128), (3, 100, 157), (3, 500, 333), (1, 28, 28)])
def test_clip_sees_what_its_own_processor_shows(shape):
    transformers = pytest.importorskip("transformers")
    pixels = pictures(2, shape[1], shape[2], shape[0])
    images = [Image.fromarray(x[0] if len(x) == 1 else x.transpose(1, 2, 0)) for x in pixels]
    expected = transformers.CLIPImageProcessorPil()(images=images, return_tensors="pt")["pixel_values"]
    level = 1 / 255 / torch.tensor([0.26862954, 0.26130258, 0.27577711]).reshape(3, 1, 1)
    assert clip_pixels(to_z(pixels), 224).shape == expected.shape
    assert ((clip_pixels(to_z(pixels), 224) - expected) / level).abs().max() < 1.5  # PIL rounds, twice


def test_clip_features_are_transformers_own(models):
    import transformers

    encoder = find_encoder(str(models / "sight"), CPU)
    net = transformers.CLIPVisionModelWithProjection.from_pretrained(models / "sight").eval()
    pixels = pictures(19, 32, 32)  # more than a batch
    processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    with torch.no_grad():
        expected = net(processor(list(pixels), return_tensors="pt")["pixel_values"]).image_embeds
    found = encoder(to_z(pixels))
    assert encoder.name == "CLIP sight"
    assert found.shape == (19, 12)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(encoder(to_z(pixels[3:4]))[0], found[3], rtol=1e-4, atol=1e-5)
    assert encoder(to_z(pixels[:0])).shape == (0, 12)
    with pytest.raises(ValueError, match="pictures"):
        encoder(torch.zeros(2, 4, 32, 32))


def test_a_whole_clip_gives_its_image_side_in_silence(models, capfd):
    import transformers

    encoder = find_encoder(str(models / "both"), CPU)
    assert "UNEXPECTED" not in "".join(capfd.readouterr())
    net = transformers.CLIPModel.from_pretrained(models / "both").eval()
    z = to_z(pictures(2, 32, 32))
    with torch.no_grad():
        seen = net.vision_model(pixel_values=clip_pixels(z, 32)).pooler_output
        torch.testing.assert_close(encoder(z), net.visual_projection(seen), rtol=1e-4, atol=1e-5)


def test_the_digest_changes_with_a_weight_and_with_the_number_of_heads(models, tmp_path):
    import transformers

    first = find_encoder(str(models / "sight"), CPU)
    shutil.copytree(models / "sight", tmp_path / "copy")
    assert find_encoder(str(tmp_path / "copy"), CPU).digest == first.digest
    config = tmp_path / "copy" / "config.json"
    config.write_text(config.read_text().replace('"num_attention_heads": 2', '"num_attention_heads": 4'))
    assert find_encoder(str(tmp_path / "copy"), CPU).digest != first.digest
    net = transformers.CLIPVisionModelWithProjection.from_pretrained(models / "sight")
    with torch.no_grad():
        net.visual_projection.weight[0, 0].add_(1e-3)
    net.save_pretrained(tmp_path / "other")
    assert find_encoder(str(tmp_path / "other"), CPU).digest != first.digest


def refusal(clip, *expected) -> None:
    with pytest.raises(BadInput) as caught:
        find_encoder(str(clip), CPU)
    message = str(caught.value)
    assert "\n" not in message
    assert ";" in message, f"no cure in: {message}"
    for part in (str(clip), *expected):
        assert part in message, message


def test_what_is_no_clip_is_refused(models, tmp_path):
    refusal(models / "nowhere", "not a folder")
    refusal("~/nowhere/at/all", "not a folder")
    refusal("nowhere", "not a folder")
    refusal(tmp_path, "could not be loaded")
    refusal(models / "words", "clip_text_model")
    refusal(models / "no-projection", "visual_projection")
    shutil.copytree(models / "sight", tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refusal(tmp_path / "cut", "could not be loaded")


def test_a_missing_package_is_named_with_its_cure(models, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(BadInput, match=r"pip install 'straightdp\[sd3\]'"):
        find_encoder(str(models / "sight"), CPU)


@pytest.mark.parametrize("status", [401, 403])
def test_a_model_that_the_hub_withholds_or_does_not_answer_for(models, tmp_path, monkeypatch, status):
    class Refuse(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("X-Error-Code", "GatedRepo")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuse)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    try:
        refusal("owner/name", "accept the licence", "hf auth login")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refusal("owner/name", "could not be fetched", "check the connection")


def test_without_a_clip_inception_keeps_its_own_name(data):
    if (features := inception.find(CPU)) is None:
        pytest.skip("Inception's weights are not here")
    encoder = find_encoder("", CPU)
    assert encoder.name == {"FID": "Inception-V3", "FD-slim": "Inception-V3 (slim)"}[features.name]
    assert encoder.digest == features.digest
    z = to_z(pictures(4, 16, 16))
    assert torch.equal(encoder(z), features(z))


def test_what_was_seen_is_remembered():
    looked = []

    def sums(z):
        looked.append(len(z))
        return torch.stack([z.sum(dim=(1, 2, 3)), z[:, 0, 0, 0]], dim=1)

    encoder, z = ImageEncoder("sums", "", 2, CPU, sums), torch.randn(7, 3, 8, 8)
    seen = Remembered(encoder, room=5)
    for rows, fresh in (([0, 1, 0], 2), ([1, 2, 3, 0], 2), ([], 0), ([4, 5], 2), ([6, 5, 4, 3, 2, 1, 0], 2), ([5], 1)):
        looked.clear()
        assert torch.equal(seen(z[rows]), encoder(z[rows]))
        assert sum(looked) == fresh + len(rows)  # the last being the plain encoder's


def test_with_neither_there_is_no_encoder(tmp_path, monkeypatch):
    monkeypatch.setenv("STRAIGHTDP_DATA", str(tmp_path))
    assert find_encoder("", CPU) is None
