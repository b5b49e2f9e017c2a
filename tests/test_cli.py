"""The front door: help is quick, bad input is one sentence and exit code 2, and nothing is half-written."""

import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from straightdp.cli import main


def test_help_answers_in_under_a_second():
    start = time.monotonic()
    result = subprocess.run([sys.executable, "-m", "straightdp", "--help"], capture_output=True, text=True)
    assert time.monotonic() - start < 1.0
    for name in ("demo", "run", "plan", "replay", "sample", "evaluate", "report", "data"):
        assert name in result.stdout


def test_help_imports_nothing_heavy():
    heavy = "[m for m in ('torch', 'numpy', 'pydantic') if m in sys.modules]"
    code = f"import sys, straightdp.cli as c; c.build_parser(); print({heavy})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def image_folder(root, classes=("cat", "dog"), n=12, size=8):
    rng = np.random.default_rng(len(classes))
    for name in classes:
        (root / name).mkdir(parents=True)
        for k in range(n):
            Image.fromarray(rng.integers(0, 256, (size, size), dtype=np.uint8)).save(root / name / f"{k}.png")
    return root


@pytest.fixture
def folders(tmp_path):
    return image_folder(tmp_path / "private"), image_folder(tmp_path / "public", ("a", "b", "c"), 40)


def missing_folder(private, public):
    return ["--private", str(private / "nowhere")], "nowhere"


def empty_class(private, public):
    (private / "bird").mkdir()
    return [], "bird"


def corrupt_image(private, public):
    (private / "cat" / "3.png").write_bytes(b"not a picture")
    return [], "3.png"


def mixed_sizes(private, public):
    Image.new("L", (12, 12)).save(public / "a" / "3.png")
    return ["--set", "net.patch=4"], "image.size"


def metadata_without_file(private, public):
    (private / "metadata.csv").write_text("file_name,label\ncat/0.png,cat\ncat/999.png,cat\n")
    return [], "999.png"


def label_outside_the_list(private, public):
    return ["--set", 'private.classes=["cat", "bird"]'], "dog"


def epsilon_not_positive(private, public):
    return ["--epsilon", "0"], "epsilon"


def delta_too_large(private, public):
    return ["--delta", "1"], "delta"


def declared_n_too_small(private, public):
    return ["--set", "privacy.n=3"], "privacy.n"


def recipe_typo(private, public):
    return ["--set", "pretrain.step=3"], "'steps'"


def unknown_section(private, public):
    return ["--set", "pretraining.steps=3"], "'pretrain'"


def setting_without_value(private, public):
    return ["--set", "pretrain.steps"], "section.key=value"


def no_recipe_file(private, public):
    return ["absent.toml"], "absent.toml"


def patch_does_not_divide(private, public):
    return ["--set", "net.patch=3"], "net.patch"


def too_few_public(private, public):
    return ["--set", "release.features=500"], "release.features"


def private_records_in_the_public_set(private, public):
    (public / "a" / "copy.png").write_bytes((private / "cat" / "0.png").read_bytes())
    return [], "public.data"


def the_same_set_twice(private, public):
    return ["--public", str(private)], "public.data"


def delta_above_one_over_n(private, public):
    return ["--delta", "0.1"], "1/N"


def dpsgd_steps_without_a_weight(private, public):
    return ["--set", "dpsgd.weight=0"], "dpsgd.steps"


def all_privacy_to_the_means(private, public):
    return ["--set", "release.means_share=1"], "means_share"


def everything_held_out(private, public):
    return ["--set", "private.holdout=1.0"], "private.holdout"


def guided_without_a_release(private, public):
    return ["--set", "release.weight=0", "--set", "sample.port=guide"], "release.weight"


def caption_without_label(private, public):
    return ["--set", "private.caption=a picture"], "label"


@pytest.mark.parametrize(
    "case",
    [
        missing_folder,
        empty_class,
        corrupt_image,
        mixed_sizes,
        metadata_without_file,
        label_outside_the_list,
        epsilon_not_positive,
        delta_too_large,
        declared_n_too_small,
        recipe_typo,
        unknown_section,
        setting_without_value,
        no_recipe_file,
        patch_does_not_divide,
        too_few_public,
        caption_without_label,
        private_records_in_the_public_set,
        the_same_set_twice,
        delta_above_one_over_n,
        dpsgd_steps_without_a_weight,
        all_privacy_to_the_means,
        everything_held_out,
        guided_without_a_release,
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(case, folders, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    private, public = folders
    extra, word = case(private, public)
    out = tmp_path / "out"
    basic = ["--set", "net.patch=4", "--set", "release.features=16", "--set", "privacy.interval=0.001"]
    monkeypatch.setattr("straightdp.stages.public.pretrain", lambda *_: pytest.fail("the input was taken"))
    code = main(["run", "--private", str(private), "--public", str(public), "--out", str(out), *basic, *extra])
    message = capsys.readouterr().err
    assert code == 2, message
    assert word in message
    assert len(message.strip().splitlines()) == 1
    assert "Traceback" not in message
    assert not out.exists()


def test_a_folder_that_is_not_a_run_is_left_alone(folders, tmp_path, capsys):
    private, public = folders
    out = tmp_path / "mine"
    out.mkdir()
    (out / "thesis.txt").write_text("precious")
    assert main(["run", "--private", str(private), "--public", str(public), "--out", str(out)]) == 2
    assert [p.name for p in out.iterdir()] == ["thesis.txt"]
    assert "not a run" in capsys.readouterr().err


def test_a_budget_that_cannot_hold_is_exit_code_3(folders, tmp_path, capsys):
    private, public = folders
    out = tmp_path / "out"
    options = ["--set", "release.sigma=1.0", "--set", "dpsgd.sigma=1.0"]
    assert main(["run", "--private", str(private), "--public", str(public), "--out", str(out), *options]) == 3
    assert "budget refused" in capsys.readouterr().err
    assert not out.exists()


def test_plan_touches_no_data(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--private", "nowhere", "--public", "nowhere", "--set", "privacy.interval=0.001"]) == 0
    text = capsys.readouterr().out
    assert "dpsgd/gradients" in text
    assert "release/means" in text
    assert not list(tmp_path.iterdir())


def test_replay_of_nothing_is_bad_input(tmp_path, capsys):
    assert main(["replay", str(tmp_path)]) == 2
    assert "transcript.jsonl" in capsys.readouterr().err


def test_data_of_an_unknown_name_is_bad_input(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("STRAIGHTDP_DATA", str(tmp_path))
    assert main(["data", "check", "imagenet"]) == 2
    assert main(["data", "check", "mnist"]) == 1
    assert "missing" in capsys.readouterr().out
