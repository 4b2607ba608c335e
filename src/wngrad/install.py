"""How to install the package: the one place that a release changes."""

from __future__ import annotations

RELEASED = False  # True once `pip install wngrad` finds it; a test then names the lines to change
REPOSITORY = "REPOSITORY"  # the address to clone from, once there is one


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
