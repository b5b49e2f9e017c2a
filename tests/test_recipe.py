"""A recipe: what it accepts, how it refuses, and that nothing is lost between file and tree."""

import math
import tomllib
from importlib import resources
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from straightdp.errors import BadInput
from straightdp.recipe import (
    Distill,
    DpSgd,
    Evaluate,
    Image,
    Net,
    Pretrain,
    Privacy,
    Private,
    Public,
    Recipe,
    Release,
    Run,
    Sample,
    load,
    parse,
)

COUNT = st.integers(1, 10**9)
STEPS = st.integers(0, 10**9)
# well inside every range: what lies at its edges is for the refusals below
SHARE = st.floats(0.01, 0.99)
RATE = st.floats(1e-6, 1e3)
MAYBE_RATE = st.none() | RATE
TEXT = st.text(max_size=30)
TRAINING = {"steps": STEPS, "batch": COUNT, "lr": RATE, "ema": SHARE, "p_uncond": SHARE}
HEADS = st.integers(1, 8).flatmap(lambda h: st.tuples(st.just(h), st.integers(1, 9).map(lambda k: 4 * h * k)))

NETS = HEADS.flatmap(
    lambda pair: st.builds(
        Net,
        heads=st.just(pair[0]),
        width=st.just(pair[1]),
        depth=COUNT,
        patch=COUNT,
        mlp_ratio=COUNT,
        caption_width=COUNT,
        caption_length=COUNT,
        vocabulary=st.integers(2, 10**6),
    )
)
RECIPES = st.builds(
    Recipe,
    run=st.builds(Run, seed=st.integers(0, 2**62), device=st.sampled_from(["auto", "cpu", "cuda"]), title=TEXT),
    privacy=st.builds(
        Privacy,
        epsilon=RATE,
        delta=st.floats(1e-10, 0.1),
        n=st.none() | COUNT,
        mode=st.sampled_from(["tight", "paper"]),
        interval=st.floats(1e-5, 1e-3),
        pinned_key=st.none() | st.text("0123456789abcdef", min_size=64, max_size=64),
    ),
    private=st.builds(
        Private,
        data=TEXT,
        classes=st.none() | st.lists(TEXT, max_size=4).map(tuple),
        caption=TEXT,
        holdout=TEXT | SHARE,
    ),
    public=st.builds(Public, data=TEXT, caption=TEXT),
    image=st.builds(Image, size=st.none() | COUNT, channels=st.integers(1, 4)),
    net=NETS,
    pretrain=st.builds(Pretrain, **TRAINING),
    release=st.builds(
        Release,
        weight=RATE,
        sigma=MAYBE_RATE,
        features=COUNT,
        covariance=st.sampled_from(["shared", "residual"]),
        means_share=SHARE,
        radius_quantile=SHARE,
        residual_quantile=SHARE,
        rank=COUNT,
        floor=RATE,
        min_count=st.floats(1, 1e6),
    ),
    distill=st.builds(Distill, tau=SHARE, replay=SHARE, **TRAINING),
    dpsgd=st.builds(DpSgd, weight=RATE, sigma=MAYBE_RATE, q=SHARE, steps=STEPS, clip=RATE, t_min=st.none() | SHARE),
    sample=st.builds(Sample, n=COUNT, guidance=RATE, port=st.sampled_from(["weights", "guide", "release"])),
    evaluate=st.builds(Evaluate, seeds=COUNT, real_reference=st.booleans()),
)


def through_toml(recipe: Recipe, path) -> Recipe:
    path.write_bytes(recipe.to_toml().encode("utf-8"))
    return load(path)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("recipes") / "recipe.toml"


@settings(deadline=None, max_examples=150)
@given(RECIPES)
def test_a_recipe_comes_back_from_its_file(scratch, recipe):
    again = through_toml(recipe, scratch)
    assert again == recipe
    assert again.digest() == recipe.digest()
    assert again.to_toml() == recipe.to_toml()


@pytest.mark.parametrize(
    "text", ["", "a\nb", "tab\t", 'quo"te\\', "\x00\x07\x1f\x7f", "\r\n", "größe 日本 🐈", "'''", "# no"]
)
def test_awkward_texts_come_back(scratch, text):
    recipe = Recipe(run=Run(title=text), private=Private(data=text, classes=(text, "b"), holdout=text))
    assert through_toml(recipe, scratch) == recipe


def test_the_defaults_and_the_shipped_recipes(scratch):
    assert load(None) == Recipe() == parse({})
    assert through_toml(Recipe(), scratch) == Recipe()
    shipped = [f for f in resources.files("straightdp").joinpath("recipes").iterdir() if f.name.endswith(".toml")]
    assert shipped
    for file in shipped:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
        recipe = load(file.name.removesuffix(".toml"))
        tree.pop("base", None)
        for section, body in tree.items():
            for key, value in body.items():
                found = getattr(getattr(recipe, section), key)
                assert (list(found) if isinstance(value, list) else found) == value
        assert through_toml(recipe, scratch) == recipe


def test_the_defaults_are_the_papers_table():
    recipe = Recipe()
    net, sample = recipe.net, recipe.sample
    assert (net.width, net.depth, net.heads, net.patch) == (192, 6, 6, 4)
    assert (net.caption_width, net.caption_length, net.vocabulary) == (64, 8, 256)
    assert (recipe.pretrain.steps, recipe.pretrain.batch, recipe.pretrain.lr) == (20_000, 256, 1e-4)
    assert (recipe.distill.steps, recipe.distill.batch, recipe.distill.lr) == (3_000, 256, 1e-4)
    assert (recipe.release.rank, recipe.release.floor, recipe.release.features) == (32, 1e-2, 64)
    assert (recipe.dpsgd.steps, recipe.dpsgd.q, recipe.dpsgd.draws, recipe.dpsgd.lr) == (2_000, 0.02, 4, 5e-5)
    assert {s.ema for s in (recipe.pretrain, recipe.distill, recipe.dpsgd)} == {0.999}
    assert {s.p_uncond for s in (recipe.pretrain, recipe.distill, recipe.dpsgd)} == {0.1}
    assert (sample.n, sample.steps, sample.guidance, recipe.privacy.delta) == (10_000, 25, 1.5, 1e-5)


def test_a_recipe_is_frozen_all_the_way_down():
    recipe = Recipe(private=Private(classes=("a", "b")))
    for name in Recipe.model_fields:
        section = getattr(recipe, name)
        with pytest.raises(ValidationError, match="frozen"):
            setattr(recipe, name, section)
        for key in type(section).model_fields:
            with pytest.raises(ValidationError, match="frozen"):
                setattr(section, key, getattr(section, key))
    assert isinstance(recipe.private.classes, tuple)


# the digest

OTHER: dict[str, dict[str, Any]] = {
    "run": {"method": "dp-merf", "seed": 1, "device": "cpu", "compile": "off", "title": "another"},
    "privacy": {"epsilon": 2.0, "delta": 1e-6, "n": 9, "mode": "paper", "interval": 1e-3, "pinned_key": "a" * 64},
    "private": {
        "data": "x",
        "classes": ("a",),
        "caption": "{label}",
        "slots": {"size": ("small", "large")},
        "prompt": "{label}",
        "holdout": 0.2,
    },
    "public": {"data": "x", "caption": "{label}"},
    "image": {"size": 9, "channels": 3},
    "latent": {
        "d": 32,
        "width": 8,
        "steps": 1,
        "batch": 2,
        "lr": 1.0,
        "noise": 0.5,
        "radius_quantile": 0.5,
        "flow": "pixels",
    },
    "net": {
        "kind": "unet",
        "width": 96,
        "depth": 5,
        "heads": 3,
        "patch": 2,
        "mlp_ratio": 2,
        "caption_width": 8,
        "caption_length": 4,
        "vocabulary": 64,
        "B0": 16.0,
        "l0": 1,
        "decoupled": True,
        "s": 1.0,
        "post_hoc": True,
    },
    "pretrain": {"steps": 1, "batch": 1, "lr": 1.0, "ema": 0.5, "p_uncond": 0.5, "t_min": 0.5},
    "release": {
        "weight": 0.5,
        "sigma": 3.0,
        "features": 8,
        "covariance": "shared",
        "means_share": 0.5,
        "radius_quantile": 0.9,
        "residual_quantile": 0.9,
        "condition": "pooled",
        "ridge": 0.1,
        "text_quantile": 0.5,
        "centre": False,
        "project": False,
        "components": 8,
        "rounds": 3,
        "components_share": 0.3,
        "rank": 4,
        "floor": 0.1,
        "min_count": 5.0,
        "votes_share": 0.5,
        "candidates": 7,
    },
    "distill": {
        "steps": 1,
        "batch": 1,
        "lr": 1.0,
        "ema": 0.5,
        "tau": 0.3,
        "tau_cap": 0.2,
        "replay": 0.2,
        "p_uncond": 0.5,
    },
    "dpsgd": {
        "weight": 0.5,
        "sigma": 3.0,
        "q": 0.5,
        "steps": 1,
        "draws": 1,
        "lr": 1.0,
        "ema": 0.5,
        "p_uncond": 0.5,
        "clip": 0.5,
        "clip_quantile": 0.5,
        "t_min": 0.5,
        "plan": "tha",
        "buckets": 3,
        "parameters": ("blocks.*",),
        "micro_batch": 8,
        "checkpoint_every": 7,
    },
    "sample": {
        "n": 1,
        "steps": 1,
        "guidance": 1.0,
        "port": "release",
        "t0": 0.5,
        "batch": 1,
        "tilt": "zero",
        "jitter": 1.0,
        "pull": 1.0,
        "pull_until": 0.5,
        "churn": 0.5,
        "levels": 0.1,
        "labels": "found",
        "vary": 0.2,
        "unelected": 0.3,
    },
    "evaluate": {
        "probe_steps": 1,
        "probe_batch": 1,
        "seeds": 2,
        "real_reference": True,
        "thorough": "on",
        "images": 10,
        "references": False,
        "probe": "linear",
        "clip": "some/clip",
    },
    "sd3": {
        "model": "some/model",
        "dtype": "float32",
        "offload": True,
        "t5": False,
        "tokens": 3,
        "prior": 2,
        "radius_quantile": 0.5,
        "rank": 2,
        "checkpoint": False,
    },
    "audit": {
        "canaries": 10,
        "kind": "stripes",
        "guesses": 0.2,
        "references": 7,
        "draws": 3,
        "records": 9,
        "samples": 0,
        "shadows": 0,
        "leak": 0.1,
    },
    "rival": {
        "features": 8,
        "order": 2,
        "pairs": 3,
        "pair_order": 1,
        "alpha": 0.2,
        "width": 7,
        "hidden": 8,
        "code": 5,
        "steps": 1,
        "batch": 4,
        "lr": 0.5,
        "rounds": 2,
        "population": 5,
        "variations": 1,
        "times": (0.3, 0.6),
        "threshold": 2.0,
    },
}


def test_every_key_has_another_value_above():
    sections = {name: type(getattr(Recipe(), name)).model_fields for name in Recipe.model_fields}
    assert {name: set(keys) for name, keys in sections.items()} == {name: set(keys) for name, keys in OTHER.items()}


@pytest.mark.parametrize("dotted", [f"{section}.{key}" for section, body in OTHER.items() for key in body])
def test_the_digest_hears_all_that_decides_the_model(dotted, scratch):
    section, key = dotted.split(".")
    needed = {  # beside it
        "sd3.model": {"image": {"channels": 3, "size": 32}},
        "pretrain.t_min": {"sample": {"port": "release"}},
        "latent.flow": {
            "latent": {"d": 32},
            "distill": {"steps": 0},
            "dpsgd": {"steps": 0},
            "sample": {"port": "guide"},
        },
    }
    others = needed.get(dotted, {})
    changed = parse(others | {section: others.get(section, {}) | {key: OTHER[section][key]}})
    assert changed != parse(others)
    assert through_toml(changed, scratch) == changed
    ignored = section in ("sample", "evaluate", "audit", "rival") or dotted in (
        "run.title",
        "run.compile",
        "dpsgd.micro_batch",
        "release.rounds",
        "release.components_share",
        "release.candidates",
        *(f"sd3.{key}" for key in OTHER["sd3"] if key != "model"),
    )
    assert (changed.digest() == parse(others).digest()) == ignored
    if section == "sd3":  # decides the model of a run on SD3 alone
        frozen = {"image": {"channels": 3, "size": 32}, "sd3": {"model": "a/b"}}
        assert parse(frozen | {"sd3": {"model": "a/b", key: OTHER["sd3"][key]}}).digest() != parse(frozen).digest()
    if dotted in ("release.rounds", "release.components_share"):  # decide a model that has components
        several = {"release": {"components": 2}}
        more = {"release": {"components": 2, key: OTHER[section][key]}}
        assert parse(more).digest() != parse(several).digest()
    if dotted == "release.candidates" or section == "sample":  # decide what is voted on, but for what comes after
        votes, other = {"release": {"votes_share": 0.5}, "sample": {}}, {key: OTHER[section][key]}
        if key == "pull_until":
            votes["sample"]["pull"] = 1.0
        more = votes | {section: votes[section] | other}
        after = key in ("n", "port", "labels", "vary", "unelected")
        assert (parse(more).digest() == parse(votes).digest()) == after
    if section == "rival":  # decides the model of a rival alone
        rival = {"run": {"method": "dp-merf"}}
        assert parse(rival | {section: {key: OTHER[section][key]}}).digest() != parse(rival).digest()


# refusals


def refusal(tree_or_settings) -> str:
    with pytest.raises(BadInput) as caught:
        parse(tree_or_settings) if isinstance(tree_or_settings, dict) else load(None, tree_or_settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("epsilon", [0, -1, -1e-300, math.nan, math.inf, -math.inf, "much", None, [1.0]])
def test_epsilon_must_be_a_positive_number(epsilon):
    message = refusal({"privacy": {"epsilon": epsilon}})
    assert "privacy.epsilon" in message
    assert repr(epsilon) in message


@pytest.mark.parametrize("delta", [0, 1e-13, 1, 1.5, -1e-5, math.nan, math.inf])
def test_delta_must_lie_between_zero_and_one(delta):
    message = refusal({"privacy": {"delta": delta}})
    assert "privacy.delta" in message
    assert repr(delta) in message


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    "key",
    [
        f"{s}.{k}"
        for s, body in OTHER.items()
        for k, v in body.items()
        if isinstance(v, float) and (s, k) != ("private", "holdout")
    ],
)
def test_no_number_may_be_nan_or_infinite(key, value):
    assert key in refusal((f"{key}={value}",))


@pytest.mark.parametrize(
    "setting",
    [
        "dpsgd.q=0",
        "dpsgd.q=1.01",
        "dpsgd.steps=-1",
        "dpsgd.steps=1.5",
        "dpsgd.clip=0",
        "dpsgd.sigma=0",
        "release.sigma=-1",
        "release.weight=-0.1",
        "release.min_count=0.5",
        "release.components=0",
        "release.components=101",
        "release.rounds=0",
        "release.rounds=10",
        "release.components_share=1",
        "release.covariance=full",
        "distill.tau=0",
        "distill.replay=1.1",
        "sample.t0=1",
        "sample.n=0",
        "sample.port=door",
        "privacy.n=0",
        "privacy.mode=loose",
        "privacy.pinned_key=abc",
        "privacy.interval=0.1",
        "image.channels=5",
        "net.width=190",
        "net.heads=5",
        "private.holdout=1.5",
        "private.holdout=nan",
        "private.classes=3",
        "run.device=tpu",
    ],
)
def test_values_out_of_range_are_refused_by_name(setting):
    key = setting.partition("=")[0]
    message = refusal((setting,))
    assert key in message or key.split(".")[0] in message.split(" = ")[0]  # a rule over a section names the section
    assert "is not allowed" in message


def test_a_recipe_that_releases_nothing_is_refused():
    assert "nothing would be released" in refusal({"release": {"weight": 0}, "dpsgd": {"steps": 0}})
    parse({"release": {"weight": 0, "sigma": 2.0}, "dpsgd": {"steps": 0}})
    parse({"release": {"weight": 0}})
    parse({"dpsgd": {"steps": 0}})


@pytest.mark.parametrize(
    ("tree", "hint"),
    [
        ({"privcy": {}}, "did you mean 'privacy'?"),
        ({"dpsg": {}}, "did you mean 'dpsgd'?"),
        ({"dp_sgd": {}}, "did you mean 'dpsgd'?"),
        ({"qqqq": {}}, "known: run, privacy"),
        ({"privacy": {"epsilom": 1}}, "did you mean 'epsilon'?"),
        ({"net": {"widht": 1}}, "did you mean 'width'?"),
        ({"release": {"mincount": 1}}, "did you mean 'min_count'?"),
        ({"image": {"zzz": 1}}, "known: size, channels"),
    ],
)
def test_an_unknown_name_brings_the_nearest_one(tree, hint):
    message = refusal(tree)
    assert "is not known" in message
    assert hint in message


def test_a_key_outside_any_section_is_told_where_to_go():
    assert "write [net]" in refusal({"net": 3})
    assert "is not known" in refusal({"epsilon": 3})


# --set


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("privacy.epsilon=3", 3.0),
        ("privacy.epsilon=1e-3", 1e-3),
        ("privacy.delta= 1e-6", 1e-6),
        ("run.seed=4", 4),
        ("run.seed=1_000", 1000),
        ("run.title=plain words, no quotes", "plain words, no quotes"),
        ('run.title="quoted"', "quoted"),
        ("run.title='quoted'", "quoted"),
        ("run.title=", ""),
        ("run.title=a=b", "a=b"),
        ("run.title='12'", "12"),
        ("private.data=mnist:train", "mnist:train"),
        ("private.data=../some folder/x.npz", "../some folder/x.npz"),
        ("private.data=C:\\pictures", "C:\\pictures"),
        ("private.holdout=0.25", 0.25),
        ("private.holdout=digits:test", "digits:test"),
        ('private.classes=["a", "b"]', ("a", "b")),
        ("private.classes=[]", ()),
        ("evaluate.real_reference=true", True),
        ("privacy.mode=paper", "paper"),
        (" privacy.mode =paper", "paper"),
    ],
)
def test_settings_read_as_values_where_they_can(setting, expected):
    section, key = setting.partition("=")[0].strip().split(".")
    found = getattr(getattr(load(None, (setting,)), section), key)
    assert found == expected
    assert type(found) is type(expected)


def test_a_setting_wins_over_the_file_and_the_last_over_all(scratch):
    scratch.write_text("[privacy]\nepsilon = 1.0\ndelta = 1e-7\n[net]\ndepth = 2\n")
    recipe = load(scratch, ("privacy.epsilon=2", "sample.n=5", "privacy.epsilon=4"))
    assert (recipe.privacy.epsilon, recipe.privacy.delta, recipe.net.depth, recipe.sample.n) == (4.0, 1e-7, 2, 5)


@pytest.mark.parametrize("setting", ["", "epsilon=3", "privacy.epsilon", "privacy.epsilon.x=3", "=3", "privacy=3"])
def test_a_setting_of_another_form_is_refused(setting):
    assert "section.key=value" in refusal((setting,))


def test_an_unknown_setting_names_the_nearest_key():
    assert "did you mean 'epsilon'?" in refusal(("privacy.epsilo=3",))
    assert "did you mean 'privacy'?" in refusal(("privac.epsilon=3",))


# files


def test_a_file_that_cannot_be_read_is_refused_in_one_sentence(tmp_path):
    broken, binary = tmp_path / "broken.toml", tmp_path / "binary.toml"
    broken.write_text("[privacy\nepsilon = 1")
    binary.write_bytes(b"\xff\xfe[run]")
    for path, words in ((tmp_path / "none.toml", "could not be read"), (tmp_path, "could not be read")):
        with pytest.raises(BadInput, match=words):
            load(path)
    for path in (broken, binary):
        with pytest.raises(BadInput, match="not valid TOML") as caught:
            load(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("tree", "word"),
    [
        ({"net": {"vocabulary": 1}}, "vocabulary"),
        ({"distill": {"replay": 1.0}}, "replay"),
        ({"run": {"seed": 2**70}}, "seed"),
        ({"private": {"holdout": 2}}, "holdout"),
        ({"dpsgd": {"weight": 0}}, "dpsgd.steps"),
        ({"release": {"means_share": 1.0}}, "means_share"),
        ({"release": {"components": 2, "condition": "global"}}, "release.condition = 'class'"),
        ({"release": {"components": 2, "condition": "pooled"}}, "release.condition = 'class'"),
        ({"release": {"components": 2, "covariance": "shared"}}, "release.covariance = 'residual'"),
        ({"release": {"components": 2, "covariance": "public"}}, "release.covariance = 'residual'"),
        ({"release": {"components": 2}, "privacy": {"mode": "paper"}}, "privacy.mode = 'tight'"),
        ({"release": {"components": 2, "weight": 0}}, "give release.weight"),
        ({"release": {"components": "auto", "weight": 0}}, "give release.weight"),
        ({"release": {"components": "auto"}, "privacy": {"mode": "paper"}}, "privacy.mode = 'tight'"),
        ({"release": {"components": "auto"}, "privacy": {"n": 39}}, "set 1"),
        ({"release": {"components": "Auto"}}, "release.components = 'Auto'"),
        ({"release": {"components": 0}}, "release.components = 0 is not allowed"),
        ({"release": {"components": 8}, "privacy": {"n": 159}}, "8 components in all at least, and N = 159"),
        ({"release": {"components": 8}, "privacy": {"n": 319}, "private": {"classes": ["a", "b"]}}, "16 components"),
    ],
)
def test_values_that_would_fail_later_are_refused_at_once(tree, word):
    with pytest.raises(BadInput, match=word) as caught:
        parse(tree)
    assert "string" not in str(caught.value)


def test_components_that_have_just_enough_records_are_allowed():
    for n, classes in ((160, None), (320, ["a", "b"])):
        found = parse({"release": {"components": 8}, "privacy": {"n": n}, "private": {"classes": classes}})
        assert found.release.components == 8


def test_a_setting_cannot_reach_into_what_is_no_section(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text("run = 3")
    with pytest.raises(BadInput, match="section"):
        load(path, ("run.seed=1",))
    with pytest.raises(BadInput, match="form"):
        load(None, ("run.seed=1\nx = 2",))


# One recipe over another


def written(folder, **texts):
    for name, text in texts.items():
        (folder / f"{name}.toml").write_text(text)
    return folder


@settings(deadline=None, max_examples=30)
@given(
    st.dictionaries(st.sampled_from(["n", "steps", "batch"]), st.integers(1, 99)),
    st.dictionaries(st.sampled_from(["n", "steps", "batch"]), st.integers(1, 99)),
)
def test_a_recipe_has_its_own_values_and_else_those_of_its_base(tmp_path_factory, below, above):
    folder = tmp_path_factory.mktemp("recipes") / "inner"
    folder.mkdir()
    lines = ["[sample]", *(f"{key} = {value}" for key, value in above.items())]
    written(folder.parent, base="[sample]\n" + "\n".join(f"{key} = {value}" for key, value in below.items()))
    written(folder, own="\n".join(['base = "../base.toml"', *lines]))
    found = load(folder / "own.toml").sample
    for key in ("n", "steps", "batch"):
        assert getattr(found, key) == above.get(key, below.get(key, getattr(Recipe().sample, key)))
    assert load(folder / "own.toml", ("sample.n=7",)).sample.n == 7


def test_a_base_may_be_built_in_and_have_one_itself(tmp_path):
    written(tmp_path, mine='base = "sd3-distill"\n[image]\nsize = 256')
    recipe, distill, guide = load(tmp_path / "mine.toml"), load("sd3-distill"), load("sd3-guide")
    assert recipe == distill.model_copy(update={"image": distill.image.model_copy(update={"size": 256})})
    assert (distill.sample.t0, distill.private) == (guide.sample.t0, guide.private)
    assert "base" not in tomllib.loads(recipe.to_toml()), "what a run keeps is whole"


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ('base = "absent.toml"', "absent.toml could not be read"),
        ('base = "own.toml"', "builds on itself"),
        ('base = "other.toml"', "builds on itself"),
        ("base = 3", "base of recipe"),
        ('base = "broken.toml"', "[runn] is not known; did you mean"),
        ('base = "flat.toml"\n[run]\nseed = 1', "must be a section"),
        ('base = "demo"\n[sample]\nm = 3', "sample.m is not known"),
    ],
)
def test_a_base_that_cannot_be_is_refused_in_one_sentence(own, words, tmp_path):
    written(tmp_path, own=own, other='base = "own.toml"', broken="[runn]\nseed = 1", flat="run = 3")
    with pytest.raises(BadInput) as caught:
        load(tmp_path / "own.toml")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
