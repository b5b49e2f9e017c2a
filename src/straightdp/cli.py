"""The front door: one thin command per stage. Heavy imports happen inside the command that needs them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from straightdp.arguments import build_parser
from straightdp.errors import BadInput, BudgetRefused, TeamBroken

WRONG, BAD_INPUT, REFUSED, BROKEN = 1, 2, 3, 4


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 done; 1 what was checked does not hold; 2 bad input; 3 budget refused; 4 another process died."""
    options = build_parser().parse_args(argv)
    try:
        return COMMANDS[options.command](options) or 0
    except BadInput as error:
        print(f"straightdp: {error}", file=sys.stderr)
        return BAD_INPUT
    except BudgetRefused as error:
        print(f"straightdp: budget refused: {error}", file=sys.stderr)
        return REFUSED
    except TeamBroken as error:
        print(f"straightdp: {error}", file=sys.stderr)
        return BROKEN
    except KeyboardInterrupt:
        print("straightdp: interrupted; go on with --resume", file=sys.stderr)
        return 130


def _load_recipe(options: argparse.Namespace):
    from straightdp import recipe

    named = (
        ("private.data", options.private and _quoted(options.private)),
        ("public.data", options.public and _quoted(options.public[0] if len(options.public) == 1 else options.public)),
        ("privacy.epsilon", options.epsilon),
        ("privacy.delta", options.delta),
    )
    settings = [f"{key}={value}" for key, value in named if value is not None]
    return recipe.load(options.recipe, tuple(settings + options.settings))


def _quoted(text: str | list[str]) -> str:
    import json

    return json.dumps(text)


def _demo(options: argparse.Namespace) -> None:
    from straightdp import pipeline, recipe

    settings = list(options.settings)
    if options.seed is not None:
        settings.append(f"run.seed={options.seed}")
    _finish(pipeline.run(recipe.load("demo", tuple(settings)), options.out, resume=options.resume))


def _run(options: argparse.Namespace) -> None:
    from straightdp import pipeline

    noise = not options.without_noise
    _finish(pipeline.run(_load_recipe(options), options.out, resume=options.resume, noise=noise), noise)


def _sd3(options: argparse.Namespace) -> None:
    options.recipe = options.recipe or Path(f"sd3-{options.route}")
    if options.model is not None:
        options.settings = [f"sd3.model={_quoted(options.model)}", *options.settings]
    if not _load_recipe(options).sd3.model:
        raise BadInput("no frozen model was named; give --model or set sd3.model in the recipe")
    _run(options)


def _sd3_evaluate(options: argparse.Namespace) -> None:
    if options.clip and not (options.run / "recipe.toml").exists():
        raise BadInput(f"--clip judges a run; {options.run} is none, and a release by itself is judged by a LeNet")
    encoder = ("evaluate.probe=linear", f"evaluate.clip={_quoted(options.clip or '')}")
    options.settings = [*encoder, *options.settings]
    _evaluate(options)


def _finish(folder, noise: bool = True) -> None:
    if folder is None:  # a process that only followed
        return
    if not noise:
        print(f"\nNothing was noised: {folder.root} is not private, all of it is internal.")
        _say_scores(folder)
        return
    from straightdp.privacy.ledger import Ledger

    if (Ledger(folder.ledger).find("header") or {})["noise"] == "os":
        print(f"\nPublish {folder.release}; keep {folder.private} to yourself.")
    else:
        print(f"\nNot to be published: the noise of {folder.release} was pinned, for a test or an experiment.")
    _say_scores(folder)
    print(f"Check it: straightdp replay {folder.release}")
    print("Another run on the same private records costs its epsilon on top of this one.")


def _say_scores(folder) -> None:
    import json

    body = json.loads(folder.evaluation.read_text())
    found = [(f"accuracy of {s['name']} ({s['probe']})", s["mean"], s["std"]) for s in body["scores"]]
    if quality := body.get("quality"):
        found += [(f"{quality['features']} of {one['name']}", one["distance"], None) for one in quality["sets"]]
    for name, mean, std in found:
        spread = "" if std is None else f" ± {std:.3f}"
        print(f"  internal, not for publication: {name} {mean:.3f}{spread}")
    for sentence in body["left_out"]:
        print(f"  {sentence}")


def _plan(options: argparse.Namespace) -> None:
    from straightdp.report.plan import describe_plan

    print(describe_plan(_load_recipe(options)))


def _replay(options: argparse.Namespace) -> int:
    from straightdp.audits.replay import replay

    if _holds_runs(options.path):
        from straightdp.audits.folder import replay_all, table

        found = replay_all(options.path)
        print(table(options.path, found))
        return 0 if all(verdict.holds and verdict.releasable for _, verdict in found) else WRONG
    verdict = replay(options.path)
    print(verdict.text)
    return 0 if verdict.holds and verdict.releasable else WRONG


def _holds_runs(path: Path) -> bool:
    """Whether a folder is neither a run's nor a release, but has such below it."""
    own = (path / "transcript.jsonl", path / "release" / "transcript.jsonl", path / "recipe.toml")
    return path.is_dir() and not any(file.exists() for file in own) and any(path.rglob("transcript.jsonl"))


def _audit(options: argparse.Namespace) -> int:
    from straightdp.audits import attack
    from straightdp.audits.findings import table

    recipe = _load_recipe(options)
    if options.report is not None:
        attack.check_report(recipe, options.report)
    found = attack.audit(recipe, options.out)
    print(table(found))
    if options.report is not None:
        attack.add_to_report(found, options.report)
    print(f"Kept in {options.out / 'private' / 'audit.json'}; the whole folder is internal.")
    honest, control = found[attack.HONEST], found[attack.CONTROL]
    if not control.suspicions:
        print("The control, which leaks, was not caught: this audit proves nothing. Plant more canaries.")
    return WRONG if honest.suspicions or not control.suspicions else 0


def _sample(options: argparse.Namespace) -> None:
    from straightdp.compiled import fastest
    from straightdp.data import synthetic
    from straightdp.generator import open_generator, synthesise
    from straightdp.recipe import load
    from straightdp.team import pick_device

    if options.n < 1:
        raise BadInput(f"--n must be at least 1, it is {options.n}")
    if options.out.exists():
        raise BadInput(f"{options.out} exists; give another --out")
    device = pick_device("auto")
    generator = open_generator(options.release, device)
    _refuse_what_leaks(options.release)
    stored = [f"sample.{k}={_quoted(v) if isinstance(v, str) else v}" for k, v in generator.sample.model_dump().items()]
    section = load(None, (*stored, *options.settings)).sample
    z, y = synthesise(generator, options.n, section, options.seed, device, speed=fastest(device))
    synthetic.write(options.out, z, y, generator.conditioning.names, generator.conditioning.captions)
    print(f"{options.n} records in {options.out}")


def _refuse_what_leaks(release: Path) -> None:
    """Images of an audit, or of a run without noise, would lie about like any others."""
    transcript = release / "transcript.jsonl"
    header = transcript.read_bytes().partition(b"\n")[0] if transcript.exists() else b""
    if b'"noise":"audit"' in header or b'"noise":"leaky"' in header:
        raise BadInput(f"{release} is of an audit, or of a run without noise: nothing of it is private")


def _evaluate(options: argparse.Namespace) -> None:
    from straightdp import pipeline
    from straightdp.folder import RunFolder
    from straightdp.recipe import load
    from straightdp.stages.published import evaluate_release

    pipeline.check_evaluate_settings(tuple(options.settings))
    folder = RunFolder(options.run)
    if folder.recipe.exists() and folder.ledger.exists():
        if options.against is not None:
            raise BadInput(f"--against is for a release by itself; {options.run} is compared with its held-out records")
        pipeline.evaluate_again(options.run, tuple(options.settings))
        _say_scores(folder)
        _say_pages(folder)
    else:
        release = folder.release if folder.release.is_dir() else options.run
        print(evaluate_release(release, options.against, load(None, tuple(options.settings)).evaluate))


def _report(options: argparse.Namespace) -> None:
    from straightdp import pipeline

    _say_pages(pipeline.report_again(options.run))


def _say_pages(folder) -> None:
    print(f"{folder.root / 'report.html'} (internal), {folder.release / 'report.html'} (public)")


def _compare(options: argparse.Namespace) -> None:
    from straightdp.report.compare import compare

    print(compare(options.runs, options.out))


def _reproduce(options: argparse.Namespace) -> int:
    from straightdp.reproduce.command import reproduce

    if options.submit and options.slurm is None:
        raise BadInput("--submit hands over what --slurm FILE writes; give both")
    try:
        return reproduce(options)
    except KeyboardInterrupt:
        print("straightdp: interrupted; the same command goes on", file=sys.stderr)
        return 130


def _data(options: argparse.Namespace) -> int:
    from straightdp.data import catalogue, download

    root = catalogue.data_root()
    rows = (download.get if options.action == "get" else download.check)(options.name, root)
    for file, status in rows:
        print(f"{file}: {status}")
    return WRONG if any(status in ("missing", "wrong content") for _, status in rows) else 0


COMMANDS = {
    "demo": _demo,
    "run": _run,
    "plan": _plan,
    "replay": _replay,
    "sample": _sample,
    "evaluate": _evaluate,
    "audit": _audit,
    "report": _report,
    "compare": _compare,
    "sd3": _sd3,
    "sd3_evaluate": _sd3_evaluate,
    "reproduce": _reproduce,
    "data": _data,
}
