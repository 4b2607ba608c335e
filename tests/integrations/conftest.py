"""Every test of this folder has the marker, and needs the libraries of the extra."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# Nothing here may ask the network, or a person.
os.environ.update(
    HF_HUB_OFFLINE="1",
    WANDB_MODE="offline",
    WANDB_SILENT="true",
    WANDB_ERROR_REPORTING="false",
    MLFLOW_DISABLE_TELEMETRY="true",
    MLFLOW_ALLOW_FILE_STORE="true",  # MLflow 3 would rather have a database
)

# What the libraries say of themselves, or of runs as small as these. All else is an error still.
IGNORED = [
    r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",  # Lightning 2.6
    "ignore:.* does not have many workers:UserWarning",  # Lightning, where there are many cores
    "ignore:GPU available but not used:UserWarning",  # Lightning, where there is one
    "ignore:'pin_memory' argument is set as true:UserWarning",  # Trainer, where there is none
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",  # peft, of transformers 5.23
]


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Where other markers are asked for, do not even import what may not be installed."""
    asked = config.option.markexpr
    wanted = not asked or ("integrations" in asked and "not integrations" not in asked)
    return None if wanted else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("integrations")
            for warning in IGNORED:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps its settings for the whole process; no test may leave them to the next."""
    yield
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
