"""`python -m experiments.large`: run what has no record yet; `… report` draws what has."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import fields
from pathlib import Path

from experiments.large import corpus, plan

STARTED = time.monotonic()


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser("python -m experiments.large", description=__doc__)
    add = made.add_argument
    add("what", choices=("run", "report"), nargs="?", default="run")
    add("--out", type=Path, default=Path("results/large"), help="folder of the records")
    add("--figures", type=Path, default=Path("docs/figures/large"), help="of the report")
    add("--minutes", type=float, help="no run is begun that would end later; a later call goes on")
    add("--steps", type=int, default=1_000)
    add("--device", choices=("cpu", "cuda"), default="cuda")
    add("--no-compile", action="store_true", help="without torch.compile")
    add("--text", type=Path, help="a folder with texts; the installed packages if not given")
    add("--test-bytes", type=int, default=1 << 20, help="held out and tested on")
    for name in ("width", "layers", "heads", "context", "batch"):
        add(f"--{name}", type=int)
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run or report; the exit code."""
    options = parser().parse_args(arguments)
    try:
        if options.what == "run":
            return _run(options)
        from experiments.large import report

        for path in report.write(options.out, options.figures, options.steps):
            print(f"Wrote {path}.")
    except (ValueError, OSError, ImportError) as error:
        print(f"large: {error}", file=sys.stderr)
        return 2
    return 0


def _run(options: argparse.Namespace) -> int:
    from experiments.large.train import Size, Trainer

    given = {field.name: getattr(options, field.name) for field in fields(Size)}
    size = Size(**{name: value for name, value in given.items() if value is not None})
    folders = [options.text] if options.text else corpus.installed()
    text = corpus.load(folders, options.test_bytes)
    print(f"The text: {text.facts}.", flush=True)
    records = plan.read(options.out)
    compiled = not options.no_compile
    trainer = Trainer(size, text, options.device, test_bytes=options.test_bytes, compiled=compiled)
    print(f"Compiled in {trainer.facts['compile_seconds']} s.", flush=True)
    for record in records.values():
        if any(record[key] != trainer.facts[key] for key in ("size", "corpus", "tested_bytes")):
            raise ValueError(
                f"`--out` must hold records of this size and text, got {options.out} with those of "
                f"{record['size']} and {record['corpus']}; give another folder."
            )
    same = [r["wall_seconds"] for r in records.values() if r["steps"] == options.steps]
    longest = max(same, default=0.0)
    until = STARTED + 60 * options.minutes if options.minutes else float("inf")
    while run := plan.missing(records, options.steps):
        if time.monotonic() + 1.05 * longest > until:
            print("Stopped: the next run would not end in time.")
            break
        record = plan.append(options.out, run, trainer.train(run))
        records[run] = record
        longest = max(longest, record["wall_seconds"])
        loss = "diverged" if record["loss"] is None else f"loss {record['loss']:.4f}"
        times = f"{record['seconds']:.1f} s of {record['wall_seconds']:.1f} s"
        print(f"{run}: {loss}, {times}", flush=True)
    else:
        print("All runs have a record.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
