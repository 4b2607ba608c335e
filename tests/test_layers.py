"""Import directions: who may import whom, read from the source, imports in functions included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
FILES = sorted((SRC / "wngrad").rglob("*.py"))
ROOMS = {  # a package or module, and what of wngrad it may import beside itself
    "wngrad.rule": set[str](),
    "wngrad.conformance": set[str](),
    "wngrad.optim": {"wngrad.rule"},
    "wngrad.transforms": {"wngrad.rule"},
    "wngrad.batch": {"wngrad.rule"},
    "wngrad.lab.optimizers": {"wngrad.rule"},
    "wngrad.lab.atomic": set[str](),
    "wngrad.lab.train": {"wngrad.rule", "wngrad.optim", "wngrad.batch", "wngrad.lab.optimizers"},
    "wngrad.lab.run": {"wngrad.lab.train", "wngrad.lab.optimizers", "wngrad.lab.atomic"},
    "wngrad.lab.report": {"wngrad.lab.train", "wngrad.lab.optimizers", "wngrad.lab.atomic"},
    "wngrad.lab.recipes": {"wngrad.lab.train", "wngrad.lab.run", "wngrad.lab.report"},
    "wngrad.lab.sweep": {
        "wngrad.lab.train",
        "wngrad.lab.run",
        "wngrad.lab.report",
        "wngrad.lab.optimizers",
    },
}
TOP = ("wngrad.cli", "wngrad.__main__", "wngrad.integrations")  # Nothing imports these.


def module_of(file: Path) -> str:
    name = ".".join(file.relative_to(SRC).with_suffix("").parts)
    return name.removesuffix(".__init__")


def imports(file: Path) -> Iterator[str]:
    """Every module of ours that a file imports, wherever in it, under TYPE_CHECKING, too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file} has a relative import"
            assert node.module is not None
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if _is_module(whole) else node.module


def _is_module(name: str) -> bool:
    path = SRC.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def within(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def room_of(module: str) -> str | None:
    rooms = [room for room in ROOMS if within(module, room)]
    return max(rooms, key=len, default=None)


def reached(file: Path, seen: frozenset[str] = frozenset()) -> Iterator[str]:
    """The rooms' modules that a file imports, itself or by modules that are in no room.

    `wngrad` itself is left out: it is where the version is, and its names are lazy.
    """
    for name in imports(file):
        if not within(name, "wngrad") or name == "wngrad" or name in seen:
            continue
        if room_of(name) or any(within(name, top) for top in TOP):
            yield name
        else:
            beside = SRC.joinpath(*name.split("."))
            path = beside.with_suffix(".py")
            yield from reached(path if path.is_file() else beside / "__init__.py", seen | {name})


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_a_room_imports_only_what_lies_below_it(file: Path) -> None:
    module = module_of(file)
    room = room_of(module)
    for name in reached(file):
        if room is not None:
            assert room_of(name) in {room, *ROOMS[room]}, name
        elif module != "wngrad" and not any(within(module, top) for top in ("wngrad.lab", *TOP)):
            assert not within(name, "wngrad.lab"), name


def test_the_conformance_kit_imports_nothing_of_ours() -> None:
    for file in FILES:
        if within(module_of(file), "wngrad.conformance"):
            names = [name for name in imports(file) if within(name, "wngrad")]
            assert all(within(name, "wngrad.conformance") for name in names), file


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_nothing_imports_the_command_line_or_the_experiments(file: Path) -> None:
    for name in imports(file):
        assert not within(name, "experiments"), name
        if not any(within(module_of(file), top) for top in TOP):
            assert not any(within(name, top) for top in TOP), name


def test_every_room_is_there() -> None:
    modules = {module_of(file) for file in FILES}
    assert {room for room in ROOMS if room not in modules} == set()


def test_the_lab_has_no_module_outside_its_rooms() -> None:
    modules = {module_of(file) for file in FILES}
    lab = {name for name in modules if within(name, "wngrad.lab")} - {"wngrad.lab"}
    outside = {name for name in lab if room_of(name) is None}
    assert outside == {"wngrad.lab.data", "wngrad.lab.spec"}  # old addresses that the docs named


def test_no_module_has_the_name_of_a_library_or_of_anything() -> None:
    stems = {part for file in FILES for part in module_of(file).split(".")}
    assert stems & {"torch", "jax", "numpy", "ray", "utils", "misc"} == set()
