"""A tiny random model and ragged batches, for tests of training."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.models.routing import use_hone_attention

VOCABULARY = 61


def tiny_model(arch: str = "qwen3", seed: int = 0) -> torch.nn.Module:
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "attention_dropout": 0.0,
    }
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**shape)) if arch == "qwen3" else LlamaForCausalLM(LlamaConfig(**shape))
    for parameter in model.parameters():  # larger than the usual 0.02, so that distributions are far from uniform
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    use_hone_attention(model)
    return model


def random_batch(rows: int, seed: int, longest: int = 12, holes: bool = True, group: int = 2) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def lengths(low: int) -> torch.Tensor:
        return torch.randint(low, longest, (rows,), generator=generator)

    prompts, responses = lengths(1)[: (rows + group - 1) // group], lengths(1)
    count = int(responses.sum())
    mask = torch.ones(count, dtype=torch.int64)
    if holes:
        mask = (torch.rand(count, generator=generator) < 0.8).long()
    ids = torch.randint(0, VOCABULARY, (count,), generator=generator)
    column = Ragged.from_lengths(ids, responses)
    noise = {
        name: column.with_values(torch.randn(count, generator=generator))
        for name in ("advantages", "returns", "values", "noise")
    }
    return Batch(
        {
            "prompt_ids": Ragged.from_lengths(
                torch.randint(0, VOCABULARY, (int(prompts.sum()),), generator=generator), prompts
            ).select([row // group for row in range(rows)]),
            "response_ids": column,
            "response_mask": column.with_values(mask),
            "uid": [f"p{row // group}" for row in range(rows)],
            **noise,
        }
    )
