"""An image network: convolutions with batch normalization, on scikit-learn's digits (8 × 8).

    python FILE

It needs scikit-learn, which brings the images: nothing is downloaded.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from wngrad import WNMuon


def block(inputs: int, outputs: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x))
    train, test = order[:1400], order[1400:]
    model = nn.Sequential(block(1, 16), block(16, 32), nn.Flatten(), nn.Linear(128, 10))
    opt = WNMuon(model)
    for _ in range(6):
        for batch in train[torch.randperm(len(train))].split(50):
            opt.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            opt.step()
    # The averaged weights need batch statistics of their own, which ten batches find.
    batches = [x[batch] for batch in train.split(140)]
    with opt.averaged(model, batches=batches), torch.no_grad():
        model.eval()
        accuracy = (model(x[test]).argmax(1) == y[test]).float().mean().item()
    print(f"accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
