"""Builds the C kernels with the package: `hatchling` calls it, and `python hatch_build.py` does.

The library is loaded with ctypes and needs no header of Python's or torch's, so that one wheel for
a platform serves every Python. `cpu.c` is compiled for several instruction sets, one of which is
chosen where it runs. Without a C compiler the package is pure Python, and steps as PyTorch can.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "src/wngrad/optim/fused"
SOURCES = ("cpu.c", "snapshot.c")
LIBRARY = FOLDER / "libkernels.so"
# One rounding for each operation, on any machine. Without errno a square root is one instruction.
FLAGS = ("-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno")
LEVELS = {"x86_64": ("", "-march=x86-64-v3", "-march=x86-64-v4")}  # the last for AVX-512


def compiler() -> list[str] | None:
    """The C compiler's words, or None if there is none."""
    words = shlex.split(os.environ.get("CC", "")) or ["cc"]
    return words if sys.platform != "win32" and shutil.which(words[0]) else None


def build(library: Path = LIBRARY, *flags: str) -> str | None:
    """Compile the library; returns why that could not be done, or None.

    Args:
        library: the file to write.
        flags: more of them, such as a sanitizer's.
    """
    cc = compiler()
    if cc is None:
        return "there was no C compiler (cc)"
    levels = LEVELS.get(platform.machine(), ("",))
    digest = hashlib.sha256(b"".join((FOLDER / name).read_bytes() for name in SOURCES)).hexdigest()
    with tempfile.TemporaryDirectory() as folder:
        objects = []
        for i, level in enumerate(levels):
            first = ["-DFIRST_LEVEL", f'-DSOURCE="{digest}"'] if i == 0 else []
            objects.append([f"-DLEVEL=_{i}", *first, *([level] if level else []), "cpu.c"])
        objects.append(["snapshot.c"])
        names = []
        for i, words in enumerate(objects):
            names.append(str(Path(folder) / f"{i}.o"))
            source = str(FOLDER / words[-1])
            if error := _run([*cc, *FLAGS, *flags, *words[:-1], "-c", source, "-o", names[-1]]):
                return error
        made = Path(folder) / library.name
        if error := _run([*cc, "-shared", *flags, *names, "-o", str(made), "-lm"]):
            return error
        shutil.copy(made, library.with_suffix(".new"))
        os.replace(library.with_suffix(".new"), library)  # whole or not at all
    return None


def _run(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        return f"{command[0]}: {error}"
    return None if done.returncode == 0 else f"{command[0]}: {done.stderr.strip()[:500]}"


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand
    pass
else:

    class KernelBuildHook(BuildHookInterface):  # type: ignore[misc]
        """Adds the library to a wheel, or to the source tree of an editable install."""

        PLUGIN_NAME = "custom"

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            if reason := build():
                LIBRARY.unlink(missing_ok=True)
                self.app.display_warning(f"wngrad is built without its C kernels: {reason}.")
                return
            build_data["artifacts"].append(str(LIBRARY.relative_to(Path(__file__).parent)))
            build_data["pure_python"] = False
            tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{tag}"


if __name__ == "__main__":
    sys.exit(build())
