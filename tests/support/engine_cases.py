"""Small models, engines over them, and what they should answer: by one forward pass without cache, in transformers' own words."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerFast

from hone.generation import ENGINES
from hone.generation.environments import interpreter_of
from hone.generation.protocol import Completion, Engine, GenerationRequest, SamplingParams
from hone.generation.remote import LaunchPlan, ServedEngine
from hone.models.routing import attention_of, use_hone_attention

MAX_MODEL_LEN = 256
EOS = 256
VOCABULARY = 272
"""256 bytes and 16 special tokens."""
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": MAX_MODEL_LEN,
    "pad_token_id": EOS + 1,
    "bos_token_id": EOS + 2,
    "eos_token_id": EOS,
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that most characters of most languages are several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<eos>", "<pad>", "<bos>", *(f"<{number}>" for number in range(VOCABULARY - 259))]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")
    tokenizer.add_special_tokens({"additional_special_tokens": specials[2:]})
    assert len(tokenizer) == VOCABULARY and tokenizer.eos_token_id == EOS
    return tokenizer


def make_model(kind: str, seed: int = 0) -> PreTrainedModel:
    """A model whose choices differ: ``tied`` (Qwen 3) or ``untied`` (Llama)."""
    if kind == "tied":
        config = transformers.Qwen3Config(**SHAPE, tie_word_embeddings=True)
    else:
        config = transformers.LlamaConfig(**SHAPE, tie_word_embeddings=False)
    return decided(config, seed)


def decided(config: transformers.PretrainedConfig, seed: int) -> PreTrainedModel:
    """A model of random weights that are large enough for its choices to differ."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def save(model: PreTrainedModel, path: Path) -> Path:
    """Write a model and its tokenizer."""
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@dataclass
class Subject:
    """An engine under test, and how it gets new weights.

    Attributes:
        kind: native, hf, served (native in a process of its own), vllm.
        engine: speaks the protocol.
        model: in this process, of engines that read the trainer's own.
    """

    kind: str
    engine: Engine
    model: PreTrainedModel | None = None

    async def take(self, source: PreTrainedModel, version: int) -> None:
        """Have the engine take the weights of ``source``."""
        if self.kind != "hf":
            await self.engine.load_weights(source.named_parameters(), version)
            return
        assert self.model is not None
        self.model.load_state_dict(source.state_dict())
        await self.engine.load_weights([], version)

    def interrupts(self) -> bool:
        """Whether it can be spoken to while it computes; the golden path answers one request after another."""
        return self.kind != "hf"


def start(kind: str, path: Path, log: Path, **options: object) -> Subject:
    """An engine of a kind over the model at ``path``."""
    if kind in ("native", "hf"):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        use_hone_attention(model)
        copies = {"shares_weights": False} if kind == "native" else {}
        engine = ENGINES.get(kind)(
            model=model,
            tokenizer=byte_tokenizer(),
            device=torch.device("cpu"),
            dtype="float32",
            max_num_seqs=64,
            max_cache_tokens=None,
            max_model_len=MAX_MODEL_LEN,
            **copies,
            **options,
        )
        return Subject(kind, engine, model)
    return Subject(kind, ServedEngine.start(plan(kind, path, log, **options)))


def plan(kind: str, path: Path, log: Path, **options: object) -> LaunchPlan:
    """What to start for an engine in a process of its own."""
    name = "native" if kind == "served" else kind
    return LaunchPlan(
        engine=name,
        python=str(interpreter_of(name)),
        model=str(path),
        tokenizer=str(path),
        dtype="float32",
        max_num_seqs=64,
        max_model_len=MAX_MODEL_LEN,
        max_cache_tokens=64 * MAX_MODEL_LEN,
        options=options,
        log=log,
        start_seconds=800.0,
    )


def requests(sampling: SamplingParams, count: int = 7, *, shortest: int = 1) -> list[GenerationRequest]:
    """Prompts of several lengths, each with a seed of its own."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 256, (shortest + 5 * i,), generator=generator).tolist() for i in range(count)]
    return [GenerationRequest(str(i), prompt, sampling, seed=i) for i, prompt in enumerate(prompts)]


async def collect(engine: Engine, asked: Iterable[GenerationRequest]) -> dict[str, Completion]:
    """All answers of one call, by name."""
    return {completion.request_id: completion async for completion in engine.generate(list(asked))}


def serve(engine: Engine, asked: Iterable[GenerationRequest]) -> dict[str, Completion]:
    """As :func:`collect`, outside of an event loop."""
    return asyncio.run(collect(engine, asked))


def expected_log_probs(
    model: PreTrainedModel, asked: GenerationRequest, tokens: list[int], *, min_p_first: bool = False
) -> tuple[Tensor, Tensor]:
    """Raw and sampling log-probs by one forward pass without cache and transformers' processors, token by token.

    Args:
        min_p_first: apply min-p before top-k and top-p, as vLLM does, and not after them.
    """
    ids, start_at = torch.tensor([asked.prompt_ids + tokens]), len(asked.prompt_ids)
    with attention_of(model, "eager"), torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].float()
    p, processors = asked.sampling, LogitsProcessorList()
    if p.repetition_penalty != 1:
        processors.append(transformers.RepetitionPenaltyLogitsProcessor(p.repetition_penalty))
    if p.temperature > 0:
        processors.append(transformers.TemperatureLogitsWarper(p.temperature))
    if p.min_p > 0 and min_p_first:
        processors.append(transformers.MinPLogitsWarper(p.min_p))
    if p.top_k > 0:
        processors.append(transformers.TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        processors.append(transformers.TopPLogitsWarper(p.top_p))
    if p.min_p > 0 and not min_p_first:
        processors.append(transformers.MinPLogitsWarper(p.min_p))
    raw, drawn = [], []
    for at, token in enumerate(tokens, start=start_at):
        row = logits[at - 1 : at]
        raw.append((row / (p.temperature or 1.0)).log_softmax(-1)[0, token])
        adjusted = adjust(row.clone(), tokens[: at - start_at], p)
        drawn.append(processors(ids[:, :at], adjusted).log_softmax(-1)[0, token])  # type: ignore[arg-type]
    return torch.stack(raw), torch.stack(drawn)


def adjust(logits: Tensor, response: list[int], p: SamplingParams) -> Tensor:
    """Logits ``[1, V]`` with the bias, and with presence and frequency penalties, one token after another."""
    for token, bias in p.logit_bias:
        logits[0, token] += bias
    for token in set(response):
        logits[0, token] -= p.presence_penalty + p.frequency_penalty * response.count(token)
    return logits


def assert_greedy(model: PreTrainedModel, asked: GenerationRequest, got: Completion, tolerance: float = 1e-4) -> None:
    """Every token is the likeliest by a full forward pass, and its log-prob is that one's."""
    ids = torch.tensor([asked.prompt_ids + got.token_ids])
    with attention_of(model, "eager"), torch.no_grad():
        scores = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    rows = scores[len(asked.prompt_ids) - 1 : -1]
    chosen = rows.gather(1, torch.tensor(got.token_ids)[:, None])[:, 0]
    assert got.token_ids == rows.argmax(-1).tolist()
    torch.testing.assert_close(torch.tensor(got.log_probs), chosen, atol=tolerance, rtol=0)
