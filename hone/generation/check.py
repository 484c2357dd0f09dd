"""Check of an installed engine: a small model is served and compared with transformers, before and after a weight sync."""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

from hone.generation.protocol import Completion, GenerationRequest, SamplingParams
from hone.generation.remote import LaunchPlan, ServedEngine

TOLERANCE = 1e-4
"""Maximum difference of log-probs in float32, in nats."""
_VOCABULARY, _LENGTH, _TOKENS, _PROMPTS = 272, 256, 64, 16


@dataclass(frozen=True)
class EngineCheck:
    """Results of a check."""

    start_seconds: float  # start time of the engine
    gap: float  # largest log-prob difference between the engine and transformers, in nats
    gap_after_update: float  # the same after new weights
    update_seconds: float  # duration of the weight sync
    tokens_per_second: float  # sampled by 16 requests at once
    device: str
    version: str  # of the engine, if it reports one

    @property
    def passed(self) -> bool:
        """True if tokens were the likeliest ones and log-probs agree, before and after the update."""
        return max(self.gap, self.gap_after_update) <= TOLERANCE


def check_engine(name: str, python: Path, log: Path) -> EngineCheck:
    """Start an engine with a random model of 0.3M parameters and compare its completions with those of transformers."""
    with tempfile.TemporaryDirectory(prefix="hone-check-") as folder:
        old, new = _model(0), _model(1)
        old.save_pretrained(folder)
        _tokenizer().save_pretrained(folder)
        start = time.perf_counter()
        plan = LaunchPlan(name, str(python), folder, folder, "float32", _PROMPTS, _LENGTH, _PROMPTS * _LENGTH, log=log)
        engine = ServedEngine.start(plan)
        start_seconds = time.perf_counter() - start
        try:
            return asyncio.run(_compare(engine, old, new, start_seconds))
        finally:
            engine.close()


async def _compare(
    engine: ServedEngine, old: PreTrainedModel, new: PreTrainedModel, start_seconds: float
) -> EngineCheck:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 256, (_PROMPTS, 100), generator=generator).tolist()
    sampling = SamplingParams(max_tokens=_TOKENS, temperature=0.0)
    requests = [GenerationRequest(str(number), prompt, sampling) for number, prompt in enumerate(prompts)]
    before = [completion async for completion in engine.generate(requests)]
    start = time.perf_counter()
    await engine.load_weights(new.named_parameters(), 1)
    update_seconds = time.perf_counter() - start
    start = time.perf_counter()
    after = [completion async for completion in engine.generate(requests)]
    seconds = time.perf_counter() - start
    description = engine.describe()
    return EngineCheck(
        start_seconds,
        max(_gap(old, prompts[int(done.request_id)], done) for done in before),
        max(_gap(new, prompts[int(done.request_id)], done) for done in after),
        update_seconds,
        sum(len(done.token_ids) for done in after) / seconds,
        description.device,
        str(description.stats.get("version", "")),
    )


def _gap(model: PreTrainedModel, prompt: list[int], done: Completion) -> float:
    """Return the largest difference from the log-probs of a full forward pass; infinity if another token was likelier."""
    with torch.no_grad():
        all_log_probs = (
            model(input_ids=torch.tensor([prompt + done.token_ids]))
            .logits[0, len(prompt) - 1 : -1]
            .float()
            .log_softmax(-1)
        )
    tokens = torch.tensor(done.token_ids)
    log_probs = all_log_probs.gather(1, tokens[:, None])[:, 0]
    if ((all_log_probs.max(-1).values - log_probs) > TOLERANCE).any():
        return float("inf")
    return float((log_probs - torch.tensor(done.log_probs)).abs().max())


def _model(seed: int) -> PreTrainedModel:
    config = Qwen3Config(
        vocab_size=_VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=_LENGTH,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def _tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")
