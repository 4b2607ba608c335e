"""How robust is my training to the learning rate? With a training loop of one's own.

    wngrad sweep FILE --workers 2

`train` is called once for every optimizer, λ and seed.
"""

import torch
from torch import nn

from wngrad import Trial

draw = torch.Generator().manual_seed(0)
x = torch.randn(800, 8, generator=draw)  # yours
y = (x[:, :3].prod(1) > 0).long()


def train(trial: Trial) -> None:
    inputs, labels = x.to(trial.device), y.to(trial.device)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2)).to(trial.device)
    opt = trial.optimizer(model)  # the optimizer of this run, at its λ

    def measure():
        with trial.evaluating(model):  # at the weights that the optimizer wants tested
            output, target = model(inputs[600:]), labels[600:]
            right = (output.argmax(1) == target).float().mean()
            return {"loss": nn.functional.cross_entropy(output, target), "accuracy": right}

    first = trial.resume(model=model, opt=opt)  # 0, or where an interrupted run had come to
    if first == 0:
        trial.report(0, **measure())
    for epoch in range(first, trial.epochs):
        for batch in torch.randperm(600).split(50):
            opt.zero_grad()
            nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            opt.step()
        trial.report(epoch + 1, **measure())
