"""How to install the package: the one place that a release changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def naming_the_extra(owner: str) -> Iterator[None]:
    """Imports in this block say what to install where a library of an extra is missing.

    Args:
        owner: who needs the library, as a user would call it: "WNMuon".

    Raises:
        MissingExtraError: the library is not installed; the message has the command. Of a library
            that no extra brings, the error is left as it is.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (extra := EXTRA_OF.get(error.name or "")) is None:
            raise
        message = f"wngrad: {owner} needs {error.name}: {install_hint(extra)}."
        raise MissingExtraError(message, name=error.name) from None
