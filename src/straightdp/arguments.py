"""What may be said to the front door: every command and its options. Nothing heavy is imported."""

from __future__ import annotations

import argparse
from pathlib import Path

from straightdp import __version__

SD3_ROUTES = {
    "guide": "start sampling at the released mean; trains nothing",
    "lora": "train adapters by DP-SGD",
    "distill": "write the released field into adapters, then DP-SGD: the route that fails in the paper",
    "evolve": "Private Evolution on the frozen model",
}
BUILT_IN_RECIPES = (
    "a recipe.toml, or a built-in one: small (for a CPU), demo, best-mnist, best-fashion; left out, the paper's sizes"
)


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
    demo.set_defaults(command="demo")

    run = commands.add_parser("run", help="run a recipe from data to release")
    _add_recipe(run)
    run.add_argument("--out", type=Path, required=True, help="the run's folder")
    run.add_argument("--resume", action="store_true", help="go on with an unfinished run; repeats its noise")
    _add_without_noise(run)
    run.set_defaults(command="run")

    plan = commands.add_parser("plan", help="resolve, calibrate and certify a recipe; opens no private data")
    _add_recipe(plan)
    plan.set_defaults(command="plan")

    replay = commands.add_parser("replay", help="recompute epsilon from a transcript, or name its first wrong line")
    replay.add_argument("path", type=Path, help="a release, a run, a transcript.jsonl, or a folder of runs")
    replay.set_defaults(command="replay")

    sample = commands.add_parser("sample", help="draw more images from a release")
    sample.add_argument("release", type=Path)
    sample.add_argument("--n", type=int, required=True)
    sample.add_argument("--out", type=Path, required=True)
    sample.add_argument("--seed", type=int, default=1)
    sample.add_argument("--set", dest="settings", action="append", default=[], metavar="sample.KEY=VALUE")
    sample.set_defaults(command="sample")

    evaluate = commands.add_parser("evaluate", help="judge a finished run (internal), or a release by itself")
    evaluate.add_argument("run", type=Path, help="a run's folder, or a release folder")
    evaluate.add_argument("--against", metavar="SET", help="of a release: a data set that you may see, to compare with")
    evaluate.add_argument("--set", dest="settings", action="append", default=[], metavar="evaluate.KEY=VALUE")
    evaluate.set_defaults(command="evaluate")

    audit = commands.add_parser("audit", help="plant canaries, train, attack, and catch a run that leaks (internal)")
    _add_recipe(audit)
    audit.add_argument("--out", type=Path, required=True, help="the audit's folder; going on with one is allowed")
    audit.add_argument("--report", type=Path, metavar="RUN", help="a finished run of the recipe whose page shows it")
    audit.set_defaults(command="audit")

    report = commands.add_parser("report", help="write a run's pages and cards again")
    report.add_argument("run", type=Path, help="the run's folder")
    report.set_defaults(command="report")

    compare = commands.add_parser("compare", help="a table and a page across runs, mean and spread over seeds")
    compare.add_argument("runs", type=Path, nargs="+", help="runs' folders, or release folders")
    compare.add_argument("--out", type=Path, default=Path("comparison"), help="folder for the pages")
    compare.set_defaults(command="compare")

    sd3 = commands.add_parser("sd3", help="guide a frozen Stable Diffusion 3, or train adapters on it")
    routes = sd3.add_subparsers(metavar="ROUTE", required=True)
    for name, what in SD3_ROUTES.items():
        route = routes.add_parser(name, help=what)
        _add_recipe(route, f"a recipe.toml; left out, the built-in sd3-{name}")
        route.add_argument("--model", help="of the frozen model: a folder, or an id on the hub")
        route.add_argument("--out", type=Path, required=True, help="the run's folder")
        route.add_argument("--resume", action="store_true", help="go on with an unfinished run; repeats its noise")
        _add_without_noise(route)
        route.set_defaults(command="sd3", route=name)
    judge = routes.add_parser("evaluate", help="judge a finished run again, with another encoder perhaps (internal)")
    judge.add_argument("run", type=Path, help="a run's folder, or a release folder")
    judge.add_argument("--clip", help="a CLIP model: a folder, or an id on the hub; left out, Inception")
    judge.add_argument("--against", metavar="SET", help="of a release: a data set that you may see, to compare with")
    judge.add_argument("--set", dest="settings", action="append", default=[], metavar="evaluate.KEY=VALUE")
    judge.set_defaults(command="sd3_evaluate")

    reproduce = commands.add_parser(
        "reproduce",
        help="run the paper's tables, row by row; goes on where it was",
        description="Run what is missing of the named tables, keep every result as it comes, and write each table as "
        "Markdown, LaTeX and HTML with the paper's values beside ours. Rows that several tables show run once. "
        "--set changes every run, but not what makes a row what it is.",
        epilog="Rows take turns at a GPU, since two that fill it gain nothing beside each other; a second process "
        "starts, plans, compiles and is evaluated while the first trains. Without a GPU rows share the cores.",
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
    reproduce.set_defaults(command="reproduce")

    data = commands.add_parser("data", help="fetch or check the standard data sets")
    actions = data.add_subparsers(metavar="ACTION", required=True)
    for name in ("get", "check"):
        action = actions.add_parser(name, help=f"{name} a standard data set")
        action.add_argument("name")
        action.set_defaults(command="data", action=name)
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


def _add_recipe(parser: argparse.ArgumentParser, help: str = BUILT_IN_RECIPES) -> None:
    parser.add_argument("recipe", type=Path, nargs="?", help=help)
    parser.add_argument("--private", help="the private set: a folder, a file or a name")
    parser.add_argument("--public", action="append", help="the public set; given several times, all of them as one")
    parser.add_argument("--epsilon", type=float)
    parser.add_argument("--delta", type=float)
    _add_settings(parser)
