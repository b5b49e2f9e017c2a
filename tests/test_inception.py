"""Inception's features: a check file's, an oracle with its batch norms unfolded, and files that must be refused."""

import hashlib
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from straightdp.data import catalogue, download
from straightdp.data.records import to_z
from straightdp.errors import BadInput
from straightdp.metrics import inception
from straightdp.metrics.inception import Features, find, load_published, load_slim

CPU = torch.device("cpu")


class Oracle:
    """The published graph in float64 and in the file's own names; its weights are drawn as they are first needed."""

    def __init__(self):
        self.state: dict[str, torch.Tensor] = {}
        self.generator = torch.Generator().manual_seed(0)

    def conv(self, name, x, outputs, height, width, stride=1, padding=None):
        weight = f"{name}.conv.weight"
        if weight not in self.state:
            fan = x.shape[1] * height * width
            drawn = torch.randn(outputs, x.shape[1], height, width, generator=self.generator)
            self.state[weight] = drawn * (2 / fan) ** 0.5
            mean, spread, gain, shift = torch.rand(4, outputs, generator=self.generator)
            self.state[f"{name}.bn.running_mean"] = mean - 0.5
            self.state[f"{name}.bn.running_var"] = spread + 0.5
            self.state[f"{name}.bn.weight"] = gain + 0.6
            self.state[f"{name}.bn.bias"] = shift - 0.3
            self.state[f"{name}.bn.num_batches_tracked"] = torch.tensor(7)
        if padding is None:
            padding = (height // 2, width // 2) if stride == 1 else 0
        x = F.conv2d(x, self.state[weight].double(), stride=stride, padding=padding)
        norm = (self.state[f"{name}.bn.{k}"].double() for k in ("running_mean", "running_var", "weight", "bias"))
        return F.batch_norm(x, *norm, eps=1e-3).relu()

    def chain(self, name, x, *steps):
        """Steps (end of the name, outputs, height, width), each on what the last one gave."""
        for end, *size in steps:
            x = self.conv(f"{name}.{end}", x, *size)
        return x

    def five(self, name, x, pooled):
        return torch.cat(
            [
                self.conv(f"{name}.branch1x1", x, 64, 1, 1),
                self.chain(name, x, ("branch5x5_1", 48, 1, 1), ("branch5x5_2", 64, 5, 5)),
                self.chain(
                    name, x, ("branch3x3dbl_1", 64, 1, 1), ("branch3x3dbl_2", 96, 3, 3), ("branch3x3dbl_3", 96, 3, 3)
                ),
                self.conv(f"{name}.branch_pool", average(x), pooled, 1, 1),
            ],
            dim=1,
        )

    def six(self, name, x, c):
        seven = (("branch7x7_1", c, 1, 1), ("branch7x7_2", c, 1, 7), ("branch7x7_3", 192, 7, 1))
        double = [(f"branch7x7dbl_{k}", c, *((7, 1) if k % 2 == 0 else (1, 7))) for k in (2, 3, 4)]
        return torch.cat(
            [
                self.conv(f"{name}.branch1x1", x, 192, 1, 1),
                self.chain(name, x, *seven),
                self.chain(name, x, ("branch7x7dbl_1", c, 1, 1), *double, ("branch7x7dbl_5", 192, 1, 7)),
                self.conv(f"{name}.branch_pool", average(x), 192, 1, 1),
            ],
            dim=1,
        )

    def seven(self, name, x, pool):
        three = self.conv(f"{name}.branch3x3_1", x, 384, 1, 1)
        double = self.chain(name, x, ("branch3x3dbl_1", 448, 1, 1), ("branch3x3dbl_2", 384, 3, 3))
        return torch.cat(
            [
                self.conv(f"{name}.branch1x1", x, 320, 1, 1),
                self.conv(f"{name}.branch3x3_2a", three, 384, 1, 3),
                self.conv(f"{name}.branch3x3_2b", three, 384, 3, 1),
                self.conv(f"{name}.branch3x3dbl_3a", double, 384, 1, 3),
                self.conv(f"{name}.branch3x3dbl_3b", double, 384, 3, 1),
                self.conv(f"{name}.branch_pool", pool(x), 192, 1, 1),
            ],
            dim=1,
        )

    def __call__(self, pictures):
        """Pictures (n, 3, H, W) in [0, 1]."""
        x = 2 * F.interpolate(pictures.double(), (299, 299), mode="bilinear", align_corners=False) - 1
        x = self.conv("Conv2d_1a_3x3", x, 32, 3, 3, stride=2)
        x = self.conv("Conv2d_2a_3x3", x, 32, 3, 3, padding=0)
        x = F.max_pool2d(self.conv("Conv2d_2b_3x3", x, 64, 3, 3), 3, 2)
        x = self.conv("Conv2d_3b_1x1", x, 80, 1, 1)
        x = F.max_pool2d(self.conv("Conv2d_4a_3x3", x, 192, 3, 3, padding=0), 3, 2)
        for letter, pooled in (("b", 32), ("c", 64), ("d", 64)):
            x = self.five(f"Mixed_5{letter}", x, pooled)
        double = self.chain("Mixed_6a", x, ("branch3x3dbl_1", 64, 1, 1), ("branch3x3dbl_2", 96, 3, 3))
        x = torch.cat(
            [
                self.conv("Mixed_6a.branch3x3", x, 384, 3, 3, stride=2),
                self.conv("Mixed_6a.branch3x3dbl_3", double, 96, 3, 3, stride=2),
                F.max_pool2d(x, 3, 2),
            ],
            dim=1,
        )
        for letter, c in (("b", 128), ("c", 160), ("d", 160), ("e", 192)):
            x = self.six(f"Mixed_6{letter}", x, c)
        three = self.conv("Mixed_7a.branch3x3_1", x, 192, 1, 1)
        steps = (("branch7x7x3_1", 192, 1, 1), ("branch7x7x3_2", 192, 1, 7), ("branch7x7x3_3", 192, 7, 1))
        seven = self.chain("Mixed_7a", x, *steps)
        x = torch.cat(
            [
                self.conv("Mixed_7a.branch3x3_2", three, 320, 3, 3, stride=2),
                self.conv("Mixed_7a.branch7x7x3_4", seven, 192, 3, 3, stride=2),
                F.max_pool2d(x, 3, 2),
            ],
            dim=1,
        )
        self.before_last = self.seven("Mixed_7b", x, average)
        return self.end(maximum)

    def end(self, pool):
        return self.seven("Mixed_7c", self.before_last, pool).mean(dim=(2, 3))


def average(x):
    return F.avg_pool2d(x, 3, 1, padding=1, count_include_pad=False)


def maximum(x):
    return F.max_pool2d(x, 3, 1, padding=1)


@pytest.fixture(scope="module")
def drawn():
    """A colour picture, its features in the published graph and with an average in the last block, and the weights."""
    picture = torch.rand(1, 3, 40, 33, generator=torch.Generator().manual_seed(1))
    oracle = Oracle()
    right, wrong = oracle(picture), oracle.end(average)
    state = oracle.state | {"fc.weight": torch.zeros(1008, 2048), "fc.bias": torch.zeros(1008)}
    return picture, right, wrong, state


@pytest.fixture
def published(monkeypatch):
    """Declare whatever is at a path to be the published file."""

    def declare(path):
        digest = "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()
        monkeypatch.setattr(inception, "PUBLISHED", replace(inception.PUBLISHED, digest=digest))

    return declare


@pytest.fixture
def root(drawn, published, tmp_path):
    """A data root with drawn weights in the published file's place."""
    path = tmp_path / "inception" / inception.PUBLISHED.name
    path.parent.mkdir()
    torch.save(drawn[3], path)
    published(path)
    yield tmp_path
    path.unlink()  # 95 MB


@pytest.fixture
def slim(data):
    path = data / "weights" / "inception_v3_slim_q8.safetensors"
    if not path.is_file():
        pytest.skip("the slim weights are not here")
    return path


def refusal(load, path, *expected):
    with pytest.raises(BadInput) as caught:
        load(path, CPU)
    message = str(caught.value)
    assert "\n" not in message
    for part in (str(path), "; run 'straightdp data get inception'", *expected):
        assert part in message, message


def test_the_drawn_weights_are_laid_out_as_the_published_file(drawn):
    """94 convolutions of six entries each, and the classifier's two: 566, as the file is known to have."""
    assert len(drawn[3]) == 94 * 6 + 2


def test_folded_weights_give_what_convolutions_and_batch_norms_give(drawn, root):
    picture, right, wrong, _ = drawn
    features = find(CPU, root)
    assert features is not None
    assert features.name == "FID"
    assert f"sha256:{features.digest}" == inception.PUBLISHED.digest
    found = features(2 * picture - 1).double()
    scale = right.std()
    assert (found - right).abs().max() < 1e-4 * scale
    assert (found - wrong).abs().max() > 0.1 * scale, "the last block's pool should be a maximum"


def test_the_slim_weights_give_the_features_of_the_check_file(slim):
    check = np.load(slim.with_name("inception_v3_slim_check.npz"))
    features = load_slim(slim, CPU)
    assert features.name == "FD-slim"
    assert features.digest == hashlib.sha256(slim.read_bytes()).hexdigest()
    z = to_z(check["images"])[:, None]
    found = features(z)
    assert found.dtype == torch.float32
    assert np.abs(found.numpy() - check["features"]).max() < 1e-3
    alone = features(z[3:4].expand(-1, 3, -1, -1))  # no batch mates, and grey written as colour
    torch.testing.assert_close(alone, found[3:4], rtol=1e-4, atol=1e-4)


def test_votes_may_see_smaller_pictures(slim):
    """The same network over a smaller picture of the same: other features, batch by batch."""
    features, z = load_slim(slim, CPU), torch.rand(17, 1, 28, 28, generator=torch.Generator().manual_seed(1)) * 2 - 1
    small = inception.quick(features, CPU, 139)(z)
    with torch.no_grad():
        expected = features.net(F.interpolate(z, (139, 139), mode="bilinear").expand(-1, 3, -1, -1))
    torch.testing.assert_close(small, expected, rtol=1e-3, atol=1e-4)
    whole = inception.quick(features, CPU)(z[:2])
    torch.testing.assert_close(whole, features(z[:2]), rtol=1e-3, atol=1e-4)
    assert float((small[:2] - whole).norm() / whole.norm()) > 0.1


def test_the_slim_weights_stand_in_where_the_published_are_missing(slim, tmp_path):
    assert find(CPU, tmp_path) is None
    (tmp_path / "weights").symlink_to(slim.parent)
    features = find(CPU, tmp_path)
    assert features is not None
    assert features.name == "FD-slim"


def test_a_damaged_slim_file_is_refused(slim, tmp_path):
    """Cut short, or with one bit turned over: the features would be wrong without a word."""
    whole, path = slim.read_bytes(), tmp_path / "slim.safetensors"
    for damaged in (b"", whole[:100_000], whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(damaged)
        refusal(load_slim, path, hashlib.sha256(whole).hexdigest(), hashlib.sha256(damaged).hexdigest())
    refusal(load_slim, tmp_path / "missing", "could not be read")


def test_what_is_not_the_published_file_is_refused(drawn, tmp_path):
    """Not even weights of the right layout pass: a distance in their features is no FID."""
    path = tmp_path / inception.PUBLISHED.name
    torch.save(drawn[3], path)
    refusal(load_published, path, inception.PUBLISHED.digest, "but has sha256:")
    path.unlink()
    refusal(load_published, path, "could not be read")


class Trap:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_the_published_file_is_read_as_weights_and_runs_no_code(published, tmp_path):
    path = tmp_path / inception.PUBLISHED.name
    path.write_bytes(pickle.dumps(Trap(tmp_path / "sprung"), protocol=2))
    published(path)
    with pytest.raises(pickle.UnpicklingError):
        load_published(path, CPU)
    assert not (tmp_path / "sprung").exists()


def test_a_damaged_published_file_is_not_passed_over_for_the_slim_one(tmp_path):
    (tmp_path / "inception").mkdir()
    path = tmp_path / "inception" / inception.PUBLISHED.name
    path.write_bytes(b"half of it")
    refusal(lambda _, device: find(device, tmp_path), path)


def test_the_catalogue_knows_the_published_file(tmp_path):
    (file,) = catalogue.find("inception")
    short = file.name.removesuffix(".pth").rsplit("-", 1)[1]
    assert file.digest.startswith(f"sha256:{short}")
    assert download.check("inception", tmp_path) == [(file.name, "missing")]
    (tmp_path / "inception").mkdir()
    (tmp_path / "inception" / file.name).write_bytes(b"something else")
    assert download.check("inception", tmp_path) == [(file.name, "wrong content")]


class Stub(nn.Module):
    """Some of the pixels, and a look at the switch while it runs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.tf32: list[bool] = []

    def forward(self, x):
        assert x.shape[1:] == (3, 299, 299)
        self.tf32.append(torch.backends.cudnn.allow_tf32)
        return x[:, :, ::200, ::200].flatten(1) * self.weight


def test_batches_are_whole_ordered_and_shown(monkeypatch):
    monkeypatch.setitem(inception.BATCH, "cpu", 4)
    features = Features("stub", "0", Stub())
    z = torch.linspace(-1, 1, 10)[:, None, None, None].expand(-1, 1, 5, 5)
    seen = []

    def track(steps, done, total):
        seen.append((done, total))
        return steps

    found = features(z, track)
    torch.testing.assert_close(found, z[:, 0, 0, :1].expand(-1, 12))
    assert seen == [(0, 3)]
    assert not found.requires_grad
    assert [len(batch) for batch in features.batches(z)] == [4, 4, 2]


def test_no_pictures_have_no_features():
    assert Features("stub", "0", Stub())(torch.zeros(0, 1, 28, 28)).shape == (0, 2048)


@pytest.mark.parametrize("shape", [(2, 28, 28), (2, 2, 28, 28), (2, 4, 28, 28)])
def test_what_is_no_picture_is_refused(shape):
    with pytest.raises(ValueError, match="1 or 3"):
        Features("stub", "0", Stub())(torch.zeros(shape))


@pytest.mark.parametrize("before", [True, False])
def test_convolutions_are_exact_float32_and_the_switch_is_put_back(before, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", before)
    stub = Stub()
    Features("stub", "0", stub)(torch.zeros(2, 1, 8, 8))
    assert stub.tf32 == [False]
    assert torch.backends.cudnn.allow_tf32 is before
