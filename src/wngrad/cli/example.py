"""`wngrad example`: small programs that run as they are, to read and to start from."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from wngrad.cli.messages import fail
from wngrad.cli.starters import write_new
from wngrad.lab.train.loader import did_you_mean

# What each shows, where its text lies, and how it is run.
EXAMPLES = {
    "plain": ("plain PyTorch, nothing to tune", "examples/plain", "python"),
    "images": ("an image network with batch normalization", "examples/images", "python"),
    "transformer": ("a small language model", "examples/transformer", "python"),
    "lora": ("fine-tuning with LoRA", "examples/lora", "python"),
    "fsdp": ("FSDP2 on two processes", "examples/fsdp", "torchrun --nproc-per-node 2"),
    "jax": ("JAX and optax (needs the extra `jax`)", "examples/with_jax", "python"),
    "certificate": ("minimize, with the paper's bounds checked", "examples/certificate", "python"),
    "sweep": ("your own training over many λ", "lab/sweep/starters/train", "wngrad sweep"),
}


def example(
    name: Annotated[str, typer.Argument(help="Which one; without it they are listed.")] = "",
    out: Annotated[str, typer.Option(help="The file to write; my_NAME.py if not given.")] = "",
) -> None:
    """Write an example that runs in seconds on a CPU, without a download."""
    if not name:
        for each, (words, _, _) in EXAMPLES.items():
            print(f"wngrad example {each:12} {words}")
        return
    if name not in EXAMPLES:
        fail(f"`name` must be {', '.join(EXAMPLES)}, got {name!r}{did_you_mean(name, EXAMPLES)}")
    path = Path(out or f"my_{name}.py")
    command = f"{EXAMPLES[name][2]} {path}"
    write_new("`example`", path, text_of(name).replace(" FILE", f" {path}"))
    print(f"Wrote {path}, which runs as it is. Next: {command}")


def text_of(name: str) -> str:
    """The program, with FILE where its name will be."""
    return files("wngrad").joinpath(f"{EXAMPLES[name][1]}.py").read_text(encoding="utf-8")
