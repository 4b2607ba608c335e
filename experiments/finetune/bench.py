"""What the runner runs: the tasks, the methods and the trainer."""

from experiments.finetune.methods import METHODS
from experiments.finetune.tasks import TASKS
from experiments.finetune.train import Trainer

__all__ = ["METHODS", "TASKS", "Trainer"]
