"""A small Llama of Hugging Face's library, and LoRA as peft adds it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor, nn


class ByteLlama(nn.Module):
    """Bytes in, the logits of the next one out, as (batch, letters, context)."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        library: Any = import_module("transformers")
        sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
        config = library.LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes)
        self.llama: Any = library.LlamaForCausalLM(config)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.llama(input_ids=x).logits
        return logits.transpose(1, 2)


def add_peft(model: nn.Module, rank: int, alpha: int) -> nn.Module:
    """Put peft's LoRA beside all linear layers but the head, as it does; the same model."""
    peft: Any = import_module("peft")
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear")
    whole: Any = model
    whole.llama = peft.get_peft_model(whole.llama, config)
    return model
