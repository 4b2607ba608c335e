"""A transformer: predicts the next character of Python's own documentation.

python FILE
"""

from pydoc_data.topics import topics

import torch
from torch import nn

from wngrad import WNMuon

LENGTH, WIDTH = 32, 64


class Transformer(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.token = nn.Embedding(characters, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, characters)
        self.mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight
        return self.head(self.layers(x, mask=self.mask, is_causal=True))


def main() -> None:
    torch.manual_seed(0)
    text = "\n".join(topics.values())
    letters = sorted(set(text))
    index = {letter: i for i, letter in enumerate(letters)}
    tokens = torch.tensor([index[letter] for letter in text[:200_000]])
    model = Transformer(len(letters))
    opt = WNMuon(model)  # matrices, embeddings and vectors each get the step that suits them
    for step in range(151):
        start = torch.randint(len(tokens) - LENGTH - 1, (32,))
        window = tokens[start[:, None] + torch.arange(LENGTH + 1)]
        opt.zero_grad()
        output = model(window[:, :-1])
        loss = nn.functional.cross_entropy(output.flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        opt.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
