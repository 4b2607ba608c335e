"""How to install the package: the one place that a release changes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

RELEASED = False  # True once `pip install wngrad` finds it; a test then names the lines to change
REPOSITORY = "REPOSITORY"  # the address to clone from, once there is one

# The extra that brings a library, by the name under which the library is imported. NumPy is all
# that the package needs by itself.
EXTRA_OF = {
    "torch": "torch",
    "jax": "jax",
    "optax": "jax",
    "matplotlib": "lab",
    "plotly": "lab",
    "pooch": "lab",
    "rich": "lab",
    "sklearn": "lab",
    "tqdm": "lab",
    "typer": "lab",
    "ray": "ray",
    "lightning": "integrations",
    "transformers": "integrations",
}

# The oldest releases that the tests pass with (docs/versions.md). pip sees to them for an extra;
# without one, a library is checked when it is imported.
OLDEST = {"torch": "2.6", "jax": "0.4.30", "optax": "0.2.5"}


def install_command(*extras: str) -> str:
    """The command that installs the package with these extras; in a clone, until a release.

    Example:
        >>> install_command("lab", "ray")
        "pip install '.[lab,ray]'"
    """
    return f"pip install '{'wngrad' if RELEASED else '.'}[{','.join(extras)}]'"


def install_hint(*extras: str) -> str:
    """The same for a message, whose reader may have a wheel instead of a clone."""
    otherwise = f" in a clone, or 'FILE.whl[{','.join(extras)}]' of a wheel"
    return install_command(*extras) + ("" if RELEASED else otherwise)


class MissingExtraError(ModuleNotFoundError):
    """A library is not installed that an extra of this package brings."""


class OldLibraryError(ImportError):
    """A library is older than the oldest release that the tests pass with."""


@contextmanager
def naming_the_extra(owner: str, *libraries: str) -> Iterator[None]:
    """Imports in this block say what to install where a library of an extra is missing.

    Args:
        owner: who needs the library, as a user would call it: "WNMuon".
        libraries: are imported first, and must not be too old.

    Raises:
        OldLibraryError: one of these is older than `OLDEST` says.
        MissingExtraError: the library is not installed; the message has the command. Of a library
            that no extra brings, the error is left as it is.
    """
    try:
        for library in libraries:
            _check_age(owner, library, import_module(library).__version__)
        yield
    except ModuleNotFoundError as error:
        if (extra := EXTRA_OF.get(error.name or "")) is None:
            raise
        message = f"wngrad: {owner} needs {error.name}: {install_hint(extra)}."
        raise MissingExtraError(message, name=error.name) from None


def _check_age(owner: str, library: str, version: str) -> None:
    oldest = OLDEST[library]
    if _numbers(version) < _numbers(oldest):
        raise OldLibraryError(
            f"wngrad: {owner} needs {library} {oldest} or later, found {version}: "
            f"{install_hint(EXTRA_OF[library])}.",
            name=library,
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))
