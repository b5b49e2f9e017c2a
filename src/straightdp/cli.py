"""The front door: one thin command per stage. Heavy imports happen inside the command that needs them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from straightdp import __version__
from straightdp.errors import BadInput, BudgetRefused, TeamBroken

WRONG, BAD_INPUT, REFUSED, BROKEN = 1, 2, 3, 4


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 done; 1 what was checked does not hold; 2 bad input; 3 budget refused; 4 another process died."""
    options = build_parser().parse_args(argv)
    try:
        return options.command(options) or 0
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


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="straightdp",
        description="From a private image set and a public one to a release publishable under one privacy budget.",
        epilog="Exit codes: 0 done, 1 what was checked does not hold, 2 bad input, 3 budget refused, "
        "4 another process of the run ended.",
    )
    parser.add_argument("--version", action="version", version=f"straightdp {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    demo = commands.add_parser("demo", help="a whole run on built-in data, in minutes, on a CPU")
    demo.add_argument("--out", type=Path, default=Path("demo-run"))
    demo.add_argument("--resume", action="store_true", help="go on with an unfinished demo")
    demo.add_argument("--seed", type=int, default=None, help="of public training and sampling; never of the noise")
    _add_settings(demo)
    demo.set_defaults(command=_demo)

    run = commands.add_parser("run", help="run a recipe from data to release")
    _add_recipe(run)
    run.add_argument("--out", type=Path, required=True, help="the run's folder")
    run.add_argument("--resume", action="store_true", help="go on with an unfinished run; repeats its noise")
    _add_without_noise(run)
    run.set_defaults(command=_run)

    plan = commands.add_parser("plan", help="resolve, calibrate and certify a recipe; opens no private data")
    _add_recipe(plan)
    plan.set_defaults(command=_plan)

    replay = commands.add_parser("replay", help="recompute epsilon from a transcript, or name its first wrong line")
    replay.add_argument("path", type=Path, help="a release, a run, a transcript.jsonl, or a folder of runs")
    replay.set_defaults(command=_replay)

    sample = commands.add_parser("sample", help="draw more images from a release")
    sample.add_argument("release", type=Path)
    sample.add_argument("--n", type=int, required=True)
    sample.add_argument("--out", type=Path, required=True)
    sample.add_argument("--seed", type=int, default=1)
    sample.add_argument("--set", dest="settings", action="append", default=[], metavar="sample.KEY=VALUE")
    sample.set_defaults(command=_sample)

    evaluate = commands.add_parser("evaluate", help="judge a finished run (internal), or a release by itself")
    evaluate.add_argument("run", type=Path, help="a run's folder, or a release folder")
    evaluate.add_argument("--against", metavar="SET", help="of a release: a data set that you may see, to compare with")
    evaluate.add_argument("--set", dest="settings", action="append", default=[], metavar="evaluate.KEY=VALUE")
    evaluate.set_defaults(command=_evaluate)

    audit = commands.add_parser("audit", help="plant canaries, train, attack, and catch a run that leaks (internal)")
    _add_recipe(audit)
    audit.add_argument("--out", type=Path, required=True, help="the audit's folder; going on with one is allowed")
    audit.add_argument("--report", type=Path, metavar="RUN", help="a finished run of the recipe whose page shows it")
    audit.set_defaults(command=_audit)

    report = commands.add_parser("report", help="write a run's pages and cards again")
    report.add_argument("run", type=Path, help="the run's folder")
    report.set_defaults(command=_report)

    compare = commands.add_parser("compare", help="a table and a page across runs, mean and spread over seeds")
    compare.add_argument("runs", type=Path, nargs="+", help="runs' folders, or release folders")
    compare.add_argument("--out", type=Path, default=Path("comparison"), help="folder for the pages")
    compare.set_defaults(command=_compare)

    sd3 = commands.add_parser("sd3", help="guide a frozen Stable Diffusion 3, or train adapters on it")
    routes = sd3.add_subparsers(metavar="ROUTE", required=True)
    for name, what in SD3_ROUTES.items():
        route = routes.add_parser(name, help=what)
        _add_recipe(route, f"a recipe.toml; left out, the built-in sd3-{name}")
        route.add_argument("--model", help="of the frozen model: a folder, or an id on the hub")
        route.add_argument("--out", type=Path, required=True, help="the run's folder")
        route.add_argument("--resume", action="store_true", help="go on with an unfinished run; repeats its noise")
        _add_without_noise(route)
        route.set_defaults(command=_sd3, route=name)
    judge = routes.add_parser("evaluate", help="judge a finished run again, with another encoder perhaps (internal)")
    judge.add_argument("run", type=Path, help="a run's folder, or a release folder")
    judge.add_argument("--clip", help="a CLIP model: a folder, or an id on the hub; left out, Inception")
    judge.add_argument("--against", metavar="SET", help="of a release: a data set that you may see, to compare with")
    judge.add_argument("--set", dest="settings", action="append", default=[], metavar="evaluate.KEY=VALUE")
    judge.set_defaults(command=_sd3_evaluate)

    reproduce = commands.add_parser(
        "reproduce",
        help="run the paper's tables, row by row; goes on where it was",
        description="Run what is missing of the named tables, keep every result as it comes, and write each table as "
        "Markdown, LaTeX and HTML with the paper's values beside ours. Rows that several tables show run once. "
        "--set changes every run, but not what makes a row what it is.",
        epilog="Rows take turns at a GPU, since two that fill it gain nothing beside each other; a second process "
        "starts, plans and reads while the first trains. Without a GPU rows share the cores.",
    )
    reproduce.add_argument(
        "names", nargs="*", metavar="NAME", help="tables, or files like those in experiments/tables; none lists them"
    )
    reproduce.add_argument("--rows", nargs="+", default=[], metavar="ROW", help="left out, all of them")
    reproduce.add_argument("--epsilons", nargs="+", type=float, default=[], metavar="E", help="left out, all of them")
    reproduce.add_argument("--seeds", nargs="+", type=int, default=[], metavar="S", help="left out, the table's own")
    reproduce.add_argument("--model", help="of table3: the frozen model, a folder or an id on the hub")
    reproduce.add_argument("--private", help="of table3: the private set, a folder, a file or a name")
    reproduce.add_argument("--out", type=Path, default=Path("reproduced"), help="folder of the runs and their logs")
    reproduce.add_argument("--results", type=Path, help="folder of figures and tables; left out, OUT/private")
    reproduce.add_argument("--processes", type=int, default=1, metavar="K", help="rows at once; 2 suit one GPU (1)")
    reproduce.add_argument(
        "--stop", type=float, default=float("inf"), metavar="SECONDS", help="then end what runs: it can go on"
    )
    reproduce.add_argument("--again", action="store_true", help="run also what lacks a figure that its table shows")
    reproduce.add_argument("--print", action="store_true", help="only show what is there")
    reproduce.add_argument(
        "--format", choices=["markdown", "latex", "html"], default="markdown", help="of what is shown"
    )
    reproduce.add_argument(
        "--dry-run", action="store_true", help="only say what would run; of table3 also its memory and time"
    )
    reproduce.add_argument("--slurm", type=Path, metavar="FILE", help="write an array job of the missing rows instead")
    reproduce.add_argument("--submit", action="store_true", help="with --slurm: hand it to sbatch")
    _add_settings(reproduce)
    reproduce.set_defaults(command=_reproduce)

    data = commands.add_parser("data", help="fetch or check the standard data sets")
    actions = data.add_subparsers(metavar="ACTION", required=True)
    for name in ("get", "check"):
        action = actions.add_parser(name, help=f"{name} a standard data set")
        action.add_argument("name")
        action.set_defaults(command=_data, action=name)
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="change a recipe value",
    )


def _add_without_noise(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--without-noise",
        action="store_true",
        help="what the recipe would give if nothing had to be private: internal, never to be published",
    )


SD3_ROUTES = {
    "guide": "start sampling at the released mean; trains nothing",
    "lora": "train adapters by DP-SGD",
    "distill": "write the released field into adapters, then DP-SGD: the route that fails in the paper",
    "evolve": "Private Evolution on the frozen model",
}
BUILT_IN_RECIPES = "a recipe.toml, or the built-in small (for a CPU) or demo; left out, the paper's sizes"


def _add_recipe(parser: argparse.ArgumentParser, help: str = BUILT_IN_RECIPES) -> None:
    parser.add_argument("recipe", type=Path, nargs="?", help=help)
    parser.add_argument("--private", help="the private set: a folder, a file or a name")
    parser.add_argument("--public", help="the public set")
    parser.add_argument("--epsilon", type=float)
    parser.add_argument("--delta", type=float)
    _add_settings(parser)


def _load_recipe(options: argparse.Namespace):
    from straightdp import recipe

    named = (
        ("private.data", options.private and _quoted(options.private)),
        ("public.data", options.public and _quoted(options.public)),
        ("privacy.epsilon", options.epsilon),
        ("privacy.delta", options.delta),
    )
    settings = [f"{key}={value}" for key, value in named if value is not None]
    return recipe.load(options.recipe, tuple(settings + options.settings))


def _quoted(text: str) -> str:
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

    recipe = _load_recipe(options)
    if options.report is not None:
        attack.check_report(recipe, options.report)
    found = attack.audit(recipe, options.out)
    print(attack.table(found))
    if options.report is not None:
        attack.add_to_report(found, options.report)
    print(f"Kept in {options.out / 'private' / 'audit.json'}; the whole folder is internal.")
    honest, control = found[attack.HONEST], found[attack.CONTROL]
    if not control.suspicions:
        print("The control, which leaks, was not caught: this audit proves nothing. Plant more canaries.")
    return WRONG if honest.suspicions or not control.suspicions else 0


def _sample(options: argparse.Namespace) -> None:
    from straightdp.data import synthetic
    from straightdp.generator import open_generator
    from straightdp.progress import tracker
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
    y = generator.prompts(options.n, device)
    compile = device.type == "cuda" and options.n >= 5000
    z = generator.draw(y, section, options.seed, tracker("sample"), compile=compile)
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
