"""Fine-tuning with LoRA: a network that was trained on one task learns another by small matrices.

    python FILE

With `peft` it is the same line: `WNMuon(model, finetune=True)` after `get_peft_model`.
"""

import torch
from torch import nn

from wngrad import WNMuon


class LoRA(nn.Module):
    """A frozen linear layer, and beside it B A of rank r, which is zero at first."""

    def __init__(self, frozen: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.A = nn.Linear(frozen.in_features, rank, bias=False)
        self.B = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.B.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.B(self.A(x))


def train(model: nn.Module, opt: WNMuon, target: nn.Module, steps: int) -> float:
    for _ in range(steps):
        x = torch.randn(64, 16)
        opt.zero_grad()
        nn.functional.mse_loss(model(x), target(x).detach()).backward()
        opt.step()
    x = torch.randn(1000, 16)
    with opt.averaged(), torch.no_grad():
        return nn.functional.mse_loss(model(x), target(x)).item()


def main() -> None:
    torch.manual_seed(0)
    old = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
    new = nn.Sequential(old, nn.Linear(4, 4))  # the new task depends on the old one
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    print(f"before: loss {train(model, WNMuon(model), old, 400):.2g} on the old task")
    model[0], model[2] = LoRA(model[0]), LoRA(model[2])
    untouched = train(model, WNMuon(model, finetune=True), new, 0)
    tuned = train(model, WNMuon(model, finetune=True), new, 400)
    print(f"fine-tuning: loss {untouched:.2g} at first, {tuned:.2g} at the end, on the new task")


if __name__ == "__main__":
    main()
