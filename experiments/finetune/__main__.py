"""`python -m experiments.finetune`: run what has no record yet, or write the page from records."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from experiments.finetune import tasks as tasks_
from experiments.finetune.plan import PARTS, plan


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser("python -m experiments.finetune", description=__doc__)
    add = made.add_argument
    add("--data", type=Path, help="folder with MNIST and tinyshakespeare.txt")
    add("--tasks", default="", help="with commas; all of the ordinary size if not given")
    add("--tiny", action="store_true", help="all tasks of a GPT that a core can train")
    add("--methods", default="", help="with commas; all if not given")
    add("--parts", default="", help=f"with commas, of {', '.join(PARTS)}; all if not given")
    add("--seeds", type=int, default=3)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--workers", type=int, default=1, help="processes")
    add("--limit", type=float, help="seconds after which to stop; a later call goes on")
    add("--eager", action="store_true", help="without CUDA graphs")
    add("--out", type=Path, default=Path("results/finetune"), help="folder of the records")
    add("--plan", action="store_true", help="say what would be run; train nothing")
    add("--report", action="store_true", help="write the page from the records; train nothing")
    add("--page", type=Path, default=Path("docs/fine-tuning.md"))
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run or report; the exit code."""
    options = parser().parse_args(arguments)
    try:
        if options.report:
            from experiments.finetune.page import write

            for path in write(options.out, options.page):
                print(f"Wrote {path}.")
            return 0
        return _run(options)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        print(f"finetune: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    import torch

    from experiments.finetune.train import Folders, prepare
    from experiments.untuned.plan import read
    from experiments.untuned.run import Runner

    begun = time.monotonic()
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    lists = (options.tasks, options.methods, options.parts)
    names = [[name for name in text.split(",") if name] for text in lists]
    tasks = tasks_.find(names[0])
    if options.tiny:
        tasks = [task for name, task in tasks_.TASKS.items() if name.startswith("tiny-")]
    wanted = plan(tasks, names[1], names[2], options.seeds)
    if options.plan:
        missing = set(wanted.missing(records := read(options.out, tasks_.TASKS)))
        for part, run in wanted.stages(records):
            if run in missing:
                print(f"{part}: {run.task}, {run.method}, {run.lam:g}, {run.seed}, {run.steps}")
        print(f"{len(missing)} runs to go, {sum(run.steps for run in missing):,} steps.")
        return 0
    folders = Folders(options.data, (options.out / "starts").resolve())
    captured = "nothing" if options.eager else "all"
    prepare([task.source for task in tasks], folders, device, captured)
    limit = options.limit and options.limit - (time.monotonic() - begun)
    on_gpu = device == "cuda"
    runner = Runner(
        wanted,  # type: ignore[arg-type]
        options.out,
        device=device,
        workers=options.workers,
        cpu_workers=0 if on_gpu else options.workers,
        limit=limit,
        folder=folders,  # type: ignore[arg-type]
        captured=captured,
        bench="experiments.finetune.bench",
        say=lambda line: print(line, flush=True),
    )
    done = runner.run()
    left = len(wanted.missing(runner.records))
    print(f"{done} runs recorded in {options.out}, {len(runner.failed)} failed, {left} to go.")
    return 1 if runner.failed else 0


if __name__ == "__main__":
    sys.exit(main())
