"""The loader of "module:name" and "file.py:name", and what it answers to a wrong name."""

from __future__ import annotations

import pytest

from wngrad.lab.optimizers import OPTIMIZERS
from wngrad.lab.recipes import find
from wngrad.lab.train import data, models
from wngrad.lab.train.loader import load, load_callable


def test_a_module_or_a_file_with_a_name_leads_to_the_object(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)  # put back afterwards, with what the loader adds
    (tmp_path / "mine.py").write_text("two = 2\ndef f(): return two\n")
    assert load("math:pi", "number") == pytest.approx(3.14159, abs=1e-5)
    assert load(f"{tmp_path}/mine.py:two", "number") == 2
    assert load_callable(f"{tmp_path}/mine.py:f", "function")() == 2


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: find("figure-4"), "figure-"),
        (lambda: data.load("minst"), "mnist"),
        (lambda: models.build("resnet", (3, 8, 8), 10, 0), "resnet18"),
        (lambda: load("wngard", "optimizer", OPTIMIZERS), "wngrad"),
        (lambda: load("math:tua", "number"), "tau"),
    ],
)
def test_a_name_that_is_nearly_right_is_answered_with_the_right_one(call, name):
    with pytest.raises(ValueError, match=rf"Did you mean '{name}.*'\?$"):
        call()


def test_a_name_that_is_like_no_other_is_answered_with_the_list_alone():
    with pytest.raises(ValueError, match=r"must be one of mlp, cnn, .* got 'transformer'\.$"):
        models.build("transformer", (3, 8, 8), 10, 0)
