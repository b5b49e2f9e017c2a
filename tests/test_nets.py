"""The MM-DiT, its frozen caption encoder and the probe classifier."""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import straightdp
from straightdp.errors import BadInput
from straightdp.nets.captions import CaptionEncoder, Tokenizer, split_words
from straightdp.nets.classifiers import LeNet
from straightdp.nets.mmdit import MMDiT, grid_positions, waves
from straightdp.recipe import Net

SMALL = {"width": 16, "depth": 2, "heads": 2, "patch": 2, "caption_width": 8, "caption_length": 3, "vocabulary": 16}


def random_net(shape=(1, 4, 4), seed=0, **changes) -> MMDiT:
    """Every weight random, so that no layer is silent because of its initial zeros."""
    torch.manual_seed(seed)
    net = MMDiT(Net(**{**SMALL, **changes}), shape).double()
    with torch.no_grad():
        for p in net.parameters():
            p.normal_(0, 0.3)
    return net


def batch(net: MMDiT, n=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, *net.shape, generator=generator, dtype=torch.float64)
    t = torch.rand(n, generator=generator, dtype=torch.float64)
    length, vocabulary = net.section.caption_length, net.section.vocabulary
    return x, t, torch.randint(1, vocabulary, (n, length), generator=generator)


# parameters


def counted_by_hand(width, depth, patch, channels, caption_width, mlp_ratio) -> int:
    """A linear map from a to b has (a + 1) b parameters; the last block's caption half has modulation, k and v only."""

    def linear(a, b):
        return (a + 1) * b

    def half(modulations, projections):
        return linear(width, modulations * width) + linear(width, projections * width)

    values = channels * patch**2
    whole = half(6, 3) + linear(width, width) + linear(width, mlp_ratio * width) + linear(mlp_ratio * width, width)
    ends = linear(values, width) + linear(width, 2 * width) + linear(width, values)
    conditions = linear(caption_width, width) + 2 * linear(width, width)
    return ends + conditions + depth * whole + (depth - 1) * whole + half(2, 2)


def test_the_size_of_the_papers_backbone():
    """Width 192, depth 6, 6 heads, patch 4 on 28 x 28: 7,646,032 parameters.

    A whole last block in the caption stream would make it 8.16 M, half a million of them without a gradient.
    """
    net = MMDiT(Net(), (1, 28, 28))
    count = sum(p.numel() for p in net.parameters() if p.requires_grad)
    assert count == counted_by_hand(192, 6, 4, 1, 64, 4) == 7_646_032
    dead = 14 * 192**2 + (4 + 1 + 1 + 4 + 1) * 192
    assert count + dead == pytest.approx(8.16e6, rel=1e-3)


@pytest.mark.parametrize("changes", [{}, {"depth": 1}, {"depth": 3, "mlp_ratio": 2}, {"patch": 4, "caption_width": 5}])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_size_of_other_backbones(changes, channels):
    s = {**SMALL, "mlp_ratio": 4, **changes}
    net = MMDiT(Net(**s), (channels, 8, 8))
    expected = counted_by_hand(s["width"], s["depth"], s["patch"], channels, s["caption_width"], s["mlp_ratio"])
    assert sum(p.numel() for p in net.parameters()) == expected


def test_every_trainable_parameter_sits_in_a_linear_map():
    net = MMDiT(Net(), (1, 28, 28))
    in_linear = {id(p) for m in net.modules() if type(m) is nn.Linear for p in (m.weight, m.bias)}
    assert {id(p) for p in net.parameters()} == in_linear
    assert all(p.requires_grad for p in net.parameters())


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("shape", [(1, 4, 4), (3, 4, 6)])
def test_no_entry_of_any_parameter_is_dead(depth, shape):
    net = random_net(shape, depth=depth)
    x, t, ids = batch(net, 6)
    (net(x, t, ids) * torch.randn(6, *shape, dtype=torch.float64)).sum().backward()
    for name, p in net.named_parameters():
        assert p.grad is not None, name
        assert bool((p.grad != 0).all()), name
    last = net.blocks[-1].caption
    assert float(last.qkv.weight.grad.abs().max()) > 1e-6
    assert float(last.modulation.weight.grad.abs().max()) > 1e-6


def test_a_new_net_is_the_zero_field_and_can_leave_it():
    net = MMDiT(Net(**SMALL), (1, 4, 4)).double()
    x, t, ids = batch(net)
    out = net(x, t, ids)
    assert torch.equal(out, torch.zeros_like(x))
    (out - x).square().sum().backward()
    assert float(net.patch_out.weight.grad.abs().max()) > 0


# patches


@pytest.mark.parametrize(
    ("shape", "patch"),
    [((1, 28, 28), 4), ((3, 8, 8), 2), ((1, 6, 10), 2), ((3, 3, 9), 3), ((2, 1, 1), 1), ((4, 5, 5), 5)],
)
def test_patches_come_back(shape, patch):
    net = MMDiT(Net(**{**SMALL, "patch": patch}), shape)
    x = torch.arange(2 * math.prod(shape), dtype=torch.float32).reshape(2, *shape)
    tokens = net._to_patches(x)
    assert tokens.shape == (2, (shape[1] // patch) * (shape[2] // patch), shape[0] * patch**2)
    assert torch.equal(net._from_patches(tokens), x)
    # each token is one square of the picture, in reading order
    columns = shape[2] // patch
    for i, token in enumerate(tokens[1]):
        r, c = patch * (i // columns), patch * (i % columns)
        assert sorted(token.tolist()) == sorted(x[1, :, r : r + patch, c : c + patch].flatten().tolist())


def test_positions_tell_every_patch_apart():
    positions = grid_positions(5, 7, 16)
    assert positions.shape == (35, 16)
    distances = torch.cdist(positions, positions) + 9 * torch.eye(35)
    assert float(distances.min()) > 0.1
    table = positions.reshape(5, 7, 16)
    assert torch.equal(table[:, :1, :8].expand(-1, 7, -1), table[..., :8])  # one half knows the row alone
    assert torch.equal(table[:1, :, 8:].expand(5, -1, -1), table[..., 8:])


def test_waves_are_unit_circles_turning_ever_slower():
    found = waves(torch.tensor([0.0, 1.0, 250.0]), 8).double()
    cosines, sines = found[:, :4], found[:, 4:]
    torch.testing.assert_close(cosines**2 + sines**2, torch.ones(3, 4, dtype=torch.float64), rtol=1e-5, atol=1e-5)
    assert found[0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    speeds = torch.atan2(sines[1], cosines[1])
    torch.testing.assert_close(speeds, torch.tensor([1, 0.1, 0.01, 0.001]).double(), rtol=1e-4, atol=1e-7)


# what the output depends on


@torch.no_grad()
def test_the_output_hears_caption_time_and_image():
    net = random_net()
    x, t, ids = batch(net, 3)
    out = net(x, t, ids)
    assert out.shape == x.shape
    null = torch.zeros_like(ids)
    swapped = ids.flip(1)
    for other in (net(x, t, null), net(x, t, swapped), net(x, t + 0.001, ids), net(x + 0.01, t, ids)):
        assert float((other - out).flatten(1).abs().max(dim=1).values.min()) > 1e-6


def test_a_record_hears_no_other_record():
    """Clipping by record needs this: the output of a row is a function of that row alone."""
    net = random_net((3, 4, 4), depth=3)
    x, t, ids = batch(net, 5)
    out = net(x, t, ids)
    for i in range(5):
        torch.testing.assert_close(net(x[i : i + 1], t[i : i + 1], ids[i : i + 1])[0], out[i], rtol=1e-9, atol=1e-11)
    order = torch.tensor([3, 0, 4, 1, 2])
    torch.testing.assert_close(net(x[order], t[order], ids[order]), out[order], rtol=1e-9, atol=1e-11)


@torch.no_grad()
def test_patches_hear_each_other():
    net = random_net()
    x, t, ids = batch(net, 1)
    moved = x.clone()
    moved[0, 0, 0, 0] += 1
    changed = (net(moved, t, ids) - net(x, t, ids)).abs()
    assert float(changed.min()) > 1e-9  # attention carries it to all pixels


def test_attention_is_the_slow_one():
    """One query at a time: unit-RMS queries and keys, scores over sqrt of the head's width, a softmax by hand."""
    net = random_net(heads=4)
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, n, 16, generator=generator, dtype=torch.float64) for n in (3, 5, 5))
    found = net.blocks[0]._attend(q, k, v)
    for b, i, head in itertools.product(range(2), range(3), range(4)):
        part = slice(4 * head, 4 * head + 4)
        query = q[b, i, part].numpy() / np.sqrt(np.mean(q[b, i, part].numpy() ** 2))
        keys = [key / np.sqrt(np.mean(key**2)) for key in k[b, :, part].numpy()]
        scores = np.exp([query @ key / 2 for key in keys])
        expected = sum(s * value for s, value in zip(scores, v[b, :, part].numpy(), strict=True)) / scores.sum()
        np.testing.assert_allclose(found[b, i, part].numpy(), expected, rtol=1e-6, atol=1e-7)


# captions


def test_the_encoder_has_nothing_to_train_or_to_save():
    encoder = CaptionEncoder(16, 3, 8)
    assert list(encoder.parameters()) == []
    assert not encoder.state_dict()
    assert not any("caption_encoder" in key for key in MMDiT(Net(**SMALL), (1, 4, 4)).state_dict())


def test_the_encoder_tells_words_and_places_apart_and_padding_is_zero():
    encoder = CaptionEncoder(16, 3, 8)
    found = encoder(torch.tensor([[5, 7, 0], [7, 5, 0], [0, 0, 0]]))
    assert found.shape == (3, 3, 8)
    assert torch.equal(found[2], torch.zeros(3, 8))
    assert torch.equal(found[:, 2], torch.zeros(3, 8))
    distinct = [found[0, 0], found[0, 1], found[1, 0], found[1, 1]]
    assert all(float((a - b).norm()) > 0.5 for a, b in itertools.combinations(distinct, 2))


FINGERPRINT = """
import torch
from straightdp.flow.fit import step_generator
from straightdp.nets.captions import CaptionEncoder, Tokenizer
torch.manual_seed({seed})
torch.rand(5)
encoder = CaptionEncoder(256, 8, 64)
tokens = Tokenizer(("digit", "letter", "one", "the", "two"), 8, 4)  # too few ids for its words: some are shared by hash
print(encoder(torch.arange(16).reshape(2, 8)).double().sum(dim=(1, 2)).tolist())
print(tokens.encode(("the digit one", "quite another word")).tolist())
print(torch.rand(3, generator=step_generator(3, "stage", 9, torch.device("cpu"))).tolist())
"""


def test_another_process_finds_the_same_vectors_ids_and_draws():
    """Also under another hash seed and another global seed."""
    source = str(Path(straightdp.__file__).parents[1])
    running = [
        subprocess.Popen(
            [sys.executable, "-c", FINGERPRINT.format(seed=seed)],
            env={**os.environ, "PYTHONPATH": source, "PYTHONHASHSEED": str(seed)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in (1, 2)
    ]
    first, second = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert first == second
    assert len(first.splitlines()) == 3


WORD = st.text("abcdefghij", min_size=1, max_size=6)


@settings(deadline=None, max_examples=100)
@given(st.lists(WORD, min_size=1, max_size=12, unique=True), st.integers(0, 8))
def test_words_have_ids_of_their_own_while_the_vocabulary_lasts(words, spare):
    tokenizer = Tokenizer.from_captions((" ".join(words),), len(words) + 1, len(words) + 1 + spare)
    ids = tokenizer.ids(" ".join(words))
    assert len(ids) == len(words) + 1
    assert ids[-1] == 0
    assert sorted(set(ids[:-1])) == sorted(ids[:-1])
    assert all(0 < i < len(words) + 1 + spare for i in ids[:-1])


@settings(deadline=None, max_examples=100)
@given(st.lists(st.text(max_size=20), max_size=4), st.integers(1, 5), st.integers(2, 9), st.text(max_size=30))
def test_ids_are_always_in_the_table(captions, length, vocabulary, other):
    """Whatever the text, also one that was not there when the tokenizer was made."""
    words = tuple(sorted({word for caption in captions for word in split_words(caption)}))
    ids = Tokenizer(words, length, vocabulary).encode((*captions, other))
    assert ids.shape == (len(captions) + 1, length)
    assert ids.dtype == torch.int64
    assert int(ids.min()) >= 0
    assert int(ids.max()) < vocabulary
    for row, caption in zip(ids, (*captions, other), strict=True):
        assert int((row > 0).sum()) == min(len(split_words(caption)), length)  # words are never padding


@pytest.mark.parametrize(
    ("captions", "length", "vocabulary", "why"),
    [
        (("a long way to one", "a long way to two"), 4, 256, "differ after the last word that is read"),
        (("The digit", "the digit"), 4, 256, "differ in case alone"),
        (("one-two", "one two"), 4, 256, "differ in punctuation alone"),
        (tuple(f"w{i}" for i in range(40)), 4, 8, "more words than ids"),
    ],
)
def test_captions_that_read_alike_are_refused(captions, length, vocabulary, why):
    with pytest.raises(BadInput, match="same to the encoder") as refusal:
        Tokenizer.from_captions(captions, length, vocabulary)
    message = str(refusal.value)
    assert "\n" not in message, why
    assert "net.caption_length" in message
    assert sum(repr(c) in message for c in captions) == 2  # both captions are named


def test_the_same_caption_twice_is_no_clash():
    """A public and a private class may share a caption; it is the same text."""
    tokenizer = Tokenizer.from_captions(("one thing", "one thing", "another"), 4, 16)
    assert tokenizer.ids("one thing") == tokenizer.ids("One  THING!")
    assert tokenizer.null().tolist() == [0, 0, 0, 0]


# the probe's classifier


@pytest.mark.parametrize(("shape", "classes"), [((1, 8, 8), 2), ((3, 28, 28), 10), ((1, 9, 11), 3), ((3, 32, 32), 102)])
def test_lenet_takes_any_picture(shape, classes):
    net = LeNet(shape, classes)
    out = net(torch.randn(3, *shape))
    assert out.shape == (3, classes)
    out.square().sum().backward()
    assert all(p.grad is not None and float(p.grad.abs().max()) > 0 for p in net.parameters())


def test_a_caption_without_words_is_refused():
    """It would be the null caption, and its class the unconditional branch."""
    with pytest.raises(BadInput, match="no word"):
        Tokenizer.from_captions(("the digit 1", "?"), 4, 16)
