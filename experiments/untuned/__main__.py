"""`python -m experiments.untuned`: run what has no record yet, or write the page from records."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from experiments.untuned.plan import PARTS, absent, plan
from experiments.untuned.run import Runner


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser("python -m experiments.untuned", description=__doc__)
    add = made.add_argument
    add("--data", type=Path, help="folder with MNIST, CIFAR-10 and tinyshakespeare.txt")
    add("--tasks", default="", help="with commas; all if not given")
    add("--methods", default="", help="with commas; all if not given")
    add("--parts", default="", help=f"with commas, of {', '.join(PARTS)}; all if not given")
    add("--seeds", type=int, default=3)
    add("--seeds-first", action="store_true", help="grids with one seed, then the best λ with all")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--workers", type=int, default=1, help="processes on the GPU")
    add("--cpu-workers", type=int, default=1, help="processes on cores; 0: all on the GPU")
    add("--limit", type=float, help="seconds after which to stop; a later call goes on")
    add("--eager", action="store_true", help="without CUDA graphs")
    add("--no-compile", action="store_true", help="without torch.compile")
    add("--out", type=Path, default=Path("results/untuned"), help="folder of the records")
    add("--report", action="store_true", help="write the page from the records; train nothing")
    add("--page", type=Path, default=Path("docs/nothing-to-tune.md"))
    add("--front", default="shakespeare", help="the task of the first figure")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run or report; the exit code."""
    options = parser().parse_args(arguments)
    try:
        if options.report:
            from experiments.untuned import page

            for path in page.write(options.out, options.page, options.front):
                print(f"Wrote {path}.")
            return 0
        return _run(options)
    except (ValueError, OSError, ImportError) as error:
        print(f"untuned: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    import torch

    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    lists = (options.tasks, options.methods, options.parts)
    names = [[name for name in text.split(",") if name] for text in lists]
    wanted = plan(names[0], names[1], names[2], options.seeds, options.seeds_first)
    for line in absent():
        print(line, file=sys.stderr)
    runner = Runner(
        wanted,
        options.out,
        device=device,
        workers=options.workers,
        cpu_workers=options.cpu_workers,
        limit=options.limit,
        folder=options.data,
        captured="nothing" if options.eager else "all",
        compiled=not options.no_compile,
        say=lambda line: print(line, flush=True),
    )
    done = runner.run()
    left = len(wanted.missing(runner.records))
    print(f"{done} runs recorded in {options.out}, {len(runner.failed)} failed, {left} to go.")
    return 1 if runner.failed else 0


if __name__ == "__main__":
    sys.exit(main())
