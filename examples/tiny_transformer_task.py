"""A tiny transformer that learns to sort: it reads eight digits, and writes them in order.

    wngrad sweep examples/tiny_transformer_task.py
    wngrad sweep examples/tiny_transformer_task.py \
        --optimizers wngrad,torch.optim:AdamW,examples/tiny_transformer_task.py:clipped_adam
"""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from wngrad import Task

LENGTH, VOCABULARY, WIDTH = 8, 10, 16


class Sorter(nn.Module):
    """Logits (batch, time, vocabulary) for digits (batch, time)."""

    def __init__(self):
        super().__init__()
        self.digit = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.ask, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        wide = 4 * WIDTH
        self.think = nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH))
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, digits):
        h = self.digit(digits) + self.place
        n = self.before(h)
        h = h + F.scaled_dot_product_attention(self.ask(n), self.key(n), self.value(n))
        return self.out(h + self.think(self.between(h)))


def data():
    digits = torch.randint(VOCABULARY, (1200, LENGTH), generator=torch.Generator().manual_seed(0))
    ordered = digits.sort(1).values
    return (digits[:1000], ordered[:1000]), (digits[1000:], ordered[1000:])


def clipped_adam(params, lr):
    """An optimizer of one's own: Adam behind a clipped gradient."""
    params = list(params)
    adam = torch.optim.Adam(params, lr=lr)

    def clip(*_):
        nn.utils.clip_grad_norm_(params, 1.0)

    adam.register_step_pre_hook(clip)
    return adam


task = Task(
    name="sorting",
    model=Sorter,
    train=data,
    loss=lambda logits, digits: F.cross_entropy(logits.mT, digits),
    metric=lambda logits, digits: (logits.argmax(-1) == digits).float().mean(),
    metric_name="accuracy",
    epochs=5,
    batch=50,
)
