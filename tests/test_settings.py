"""The table of settings: what a row says once holds everywhere."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path

import pytest

from wngrad import WNAdam, WNGrad, WNMuon
from wngrad.optim.settings import Options, Settings
from wngrad.optim.wngrad import MomentumOptions
from wngrad.optim.wnmuon import MuonOptions

PAGE = Path(__file__).parents[1] / "docs" / "api" / "optimizers.md"
OPTIMIZERS = (WNGrad, WNAdam, WNMuon)
BY_GROUP = {"role", "layout"}  # which `matrix_groups` fills in


def in_words(default: object) -> str:
    return f"`{default!r}`".replace("'", '"')


def page_of_settings() -> str:
    """The table as docs/api/optimizers.md prints it."""
    lines = ["| setting | WNGrad | WNAdam | WNMuon | |", "|---|---|---|---|---|"]
    rates = [in_words(inspect.signature(cls).parameters["lr"].default) for cls in OPTIMIZERS]
    lines.append(f"| `lr` | {' | '.join(rates)} | λ, or ρ: a number, or a tensor of one element |")
    names = dict.fromkeys(name for cls in OPTIMIZERS for name in cls.Settings.rows)
    for name in names:
        rows = [cls.Settings.rows.get(name) for cls in OPTIMIZERS]
        cells = ["" if row is None else in_words(row.default) for row in rows]
        doc = "; ".join(dict.fromkeys(row.doc for row in rows if row is not None))
        lines.append(f"| `{name}` | {' | '.join(cells)} | {doc} |")
    return "\n".join(lines) + "\n"


def test_the_page_prints_the_table():
    assert page_of_settings() in PAGE.read_text()


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_help_shows_every_row_with_its_default(cls):
    shown = inspect.signature(cls).parameters
    for name, row in cls.Settings.rows.items():
        if name == "momentum" and cls is WNAdam:
            continue  # a second name of `beta`
        assert shown[name].default == row.default
    assert shown.keys() - cls.Settings.rows.keys() <= {"params", "lr", "foreach", "beta"}


@pytest.mark.parametrize(
    ("cls", "options"), [(WNGrad, MomentumOptions), (WNAdam, Options), (WNMuon, MuonOptions)]
)
def test_the_types_name_every_row(cls, options):
    named = options.__annotations__.keys() | Options.__annotations__.keys()
    assert named - {"foreach", "momentum"} == cls.Settings.rows.keys() - BY_GROUP - {"momentum"}


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_whatever_differs_between_two_settings_shows_in_the_key(cls):
    """Numbers apart, which a kernel reads in every step: of them, whether they are there."""
    defaults = {name: row.default for name, row in cls.Settings.rows.items()}
    base = cls.Settings(**defaults)
    for row in fields(cls.Settings):
        other = cls.Settings(**{**defaults, row.name: object()})
        gone = cls.Settings(**{**defaults, row.name: None})
        assert base.key != other.key or base.key != gone.key, row.name
    assert base.key == cls.Settings(**defaults).key


def test_a_row_that_is_like_another_has_its_check():
    for name, row in Settings.rows.items():
        assert WNMuon.Settings.rows[name].check is row.check
        assert WNMuon.Settings.rows[name].doc == row.doc


if __name__ == "__main__":  # after a change of a row
    print(page_of_settings(), end="")
