"""`python -m wngrad.conformance module:Class`: parse, run, print."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

from wngrad.conformance.peers import EVERYONE
from wngrad.conformance.runner import PROBES, Outcome, run_probes
from wngrad.conformance.table import Row, explained, halves, parse, publish, record, show


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0 if nothing failed, 1 if something did, 2 for a mistake of the caller."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.list or options.explain:
        print("\n".join(explained() if options.explain else PROBES))
        return 0
    try:
        names, jobs = _chosen(options.only, options.skip), _jobs(options)
        _check(options)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    rows = []
    for text, part, target, kwargs in jobs:
        rows.append(Row(text, _watched(text, target, kwargs, names, options.timeout), part))
        show(rows[-1])
    report = record(rows, f"python -m wngrad.conformance {shlex.join(arguments)}")
    if options.json is not None:
        text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
        print(text) if options.json == "-" else Path(options.json).write_text(text)
    if options.markdown is not None:
        publish(Path(options.markdown), report)
    return int(any(row.count("fail") for row in rows))


def _jobs(options: argparse.Namespace) -> list[tuple[str, str, str, dict[str, Any] | None]]:
    """Of every optimizer its text, its part of the table, its target and its arguments."""
    asked = [(text, "") for text in options.optimizers]
    if options.everyone:
        asked += [(text, part) for part, texts in EVERYONE.items() for text in texts]
    if not asked:
        raise ValueError("name an optimizer as module:Class, or say --everyone.")
    given = None if options.kwargs is None else json.loads(options.kwargs)
    if not isinstance(given, dict | None):
        raise ValueError(f"--kwargs must be a JSON object, got {options.kwargs}.")
    jobs = []
    for text, part in asked:
        target, kwargs = parse(text)
        jobs.append((text, part, target, kwargs if given is None else {**(kwargs or {}), **given}))
    return jobs


def _check(options: argparse.Namespace) -> None:
    """Refuse now what would fail when all probes have run."""
    if options.timeout is not None and not options.timeout > 0:
        raise ValueError(f"--timeout must be > 0, got {options.timeout:g}.")
    if options.markdown is not None:
        halves(Path(options.markdown))
    if options.json not in (None, "-") and not Path(options.json).absolute().parent.is_dir():
        raise ValueError(f"--json must be a file in a folder that is there, got {options.json}.")
    for text in options.optimizers:
        _find(parse(text)[0])


def _find(target: str) -> None:
    """Refuse a module or a class that is not there; the probes say what else is wrong with it."""
    module, _, name = target.partition(":")
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            raise ValueError(f"no module is called {error.name}, got {target}.") from None
        return
    except (Exception, SystemExit):
        return
    try:
        attrgetter(name)(found)
    except AttributeError:
        raise ValueError(f"{module} has no {name}, got {target}.") from None


def _watched(text: str, target: str, kwargs: Any, names: list[str], timeout: Any) -> list[Outcome]:
    """The outcomes, counted on the terminal as they come."""
    outcomes = []
    for outcome in run_probes(target, kwargs, names, timeout):
        outcomes.append(outcome)
        if sys.stderr.isatty():
            print(f"\r{text}: {len(outcomes)}/{len(names)}", end="\r", file=sys.stderr)
    return outcomes


def _chosen(only: list[str], skip: list[str]) -> list[str]:
    kinds = {
        "light": [p.name for p in PROBES.values() if not p.distributed],
        "distributed": [p.name for p in PROBES.values() if p.distributed],
    }

    def names(asked: list[str]) -> set[str]:
        chosen = {name for text in asked for name in text.split(",") if name}
        unknown = chosen - PROBES.keys() - kinds.keys()
        if unknown:
            raise ValueError(f"no probe is called {', '.join(sorted(unknown))}; see --list.")
        return {one for name in chosen for one in kinds.get(name, [name])}

    chosen = [
        name for name in PROBES if name in (names(only) or PROBES) and name not in names(skip)
    ]
    if not chosen:
        raise ValueError("--only and --skip leave no probe.")
    return chosen


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m wngrad.conformance",
        description="Puts torch optimizers through probes, each in a process of its own.",
    )
    add = parser.add_argument
    add("optimizers", nargs="*", metavar="module:Class", help="also module:Class(key=value)")
    add("--everyone", action="store_true", help="all optimizers of the published table")
    add("--kwargs", metavar="JSON", help="""what it is made with, as '{"lr": 1.0}'""")
    add("--only", action="append", default=[], help="probes with commas; or light, or distributed")
    add("--skip", action="append", default=[], help="the same")
    add("--timeout", type=float, metavar="SECONDS", help="for each probe (30, or 120 over ranks)")
    add("--json", metavar="FILE", help="keep the outcomes; - is stdout")
    add("--markdown", metavar="FILE", help="put the tables between the marks of this page")
    add("--explain", action="store_true", help="what each probe does, and why")
    add("--list", action="store_true", help="the names of the probes")
    return parser


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has seen enough: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        code = 141  # as a shell names it: 128 + SIGPIPE
    sys.exit(code)
