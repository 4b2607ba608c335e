"""What the docs and docstrings show of these libraries is run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest
import wandb

import wngrad.integrations
from test_docs import KINDS, PAGES, blocks, run_blocks

SHOWN = [page for page in PAGES if blocks(page, "python integrations")]
MODULES = [module.name for module in pkgutil.iter_modules(wngrad.integrations.__path__)]


@pytest.mark.parametrize("page", SHOWN, ids=lambda p: p.name)
def test_a_page_runs_from_top_to_bottom(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    wandb.teardown()  # or it would go on in the folder of an earlier test
    run_blocks(page, *KINDS, capsys=capsys)
    wandb.teardown()


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_the_docstrings_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(f"wngrad.integrations.{name}")
    assert doctest.testmod(module).failed == 0
