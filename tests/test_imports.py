"""The front door: names, laziness, and what is loaded unasked."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import wngrad
import wngrad.lab


def fresh(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.strip()


def test_importing_the_package_loads_no_framework():
    loaded = "import wngrad, sys; print({'torch', 'jax', 'numpy', 'scipy'} & set(sys.modules))"
    assert fresh(loaded) == "set()"


def test_the_rule_alone_loads_no_framework():
    code = "import wngrad.rule as r, sys; print(r.next_b(1.0, 0.5625, 1.0), 'torch' in sys.modules)"
    assert fresh(code) == "1.5625 False"


def test_every_public_name_is_there():
    assert set(dir(wngrad)) == set(wngrad.__all__)
    assert all(getattr(wngrad, name) is not None for name in wngrad.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'WNSgd'"):
        _ = wngrad.WNSgd


@pytest.mark.parametrize(("module", "name"), [("spec", "Sweep"), ("data", "Data")])
def test_an_address_that_the_docs_once_named_still_leads_there(module, name):
    old = importlib.import_module(f"wngrad.lab.{module}")
    with pytest.deprecated_call(match=f"import {name} from wngrad.lab.train.{module}"):
        assert getattr(old, name) is getattr(wngrad.lab, name)
