"""What the runner runs: the tasks, the methods and the trainer."""

from experiments.untuned.methods import METHODS
from experiments.untuned.tasks import TASKS
from experiments.untuned.train import Trainer

__all__ = ["METHODS", "TASKS", "Trainer"]
