"""Plain PyTorch: a small network learns two spirals, with no learning rate to choose.

python FILE
"""

import torch
from torch import nn

from wngrad import WNMuon


def spirals(n: int, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Two spirals in the plane, with a little noise; the label says which."""
    angle = 9 * torch.rand(n, generator=draw).sqrt()
    label = torch.randint(2, (n,), generator=draw)
    turned = angle + torch.pi * label
    x = torch.stack([angle * turned.cos(), angle * turned.sin()], 1) / 4
    return x + 0.03 * torch.randn(n, 2, generator=draw), label


def main() -> None:
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    (x, y), (x_test, y_test) = spirals(1000, draw), spirals(500, draw)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
    )
    opt = WNMuon(model)  # given the model, it knows which parameters are matrices
    losses = []
    for _ in range(30):
        for batch in torch.randperm(len(x)).split(50):
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            opt.step()
            losses.append(loss.detach())
    with opt.averaged(), torch.no_grad():  # the average of the weights is what is evaluated
        accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
    print(*opt.diagnose(losses), sep="\n")  # does the loss fall? has a rate run away?
    print(f"accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
