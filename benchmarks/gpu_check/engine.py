"""Parts that compare the native engine with float64 and with the trainer, on the device."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from transformers import Qwen3Config

from gpu_check.measuring import TINY, config_of, engine_of, on_device, prompts_of, release, rows_of, serve
from gpu_check.results import Result
from hone.config.model import ModelConfig, OptimConfig
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.generation.protocol import Completion, GenerationRequest, SamplingParams
from hone.models.heads import PolicyHead
from hone.models.loading import prepare
from hone.training.backends.local import LocalBackend
from hone.training.engine import TrainSettings
from hone.training.objectives import imitation_objective


def engine(result: Result) -> None:
    """Hold the engine against transformers in float64: greedy tokens, log-probs, rows alone and together, turns of a session."""
    sizes = {**TINY, "hidden_size": 256, "num_hidden_layers": 4}
    config = Qwen3Config(vocab_size=512, num_key_value_heads=2, head_dim=64, **sizes)
    reference = on_device(result, config).double().eval()
    prompts, tokens = prompts_of(8, 48, 512), 32
    greedy = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    sampled = SamplingParams(max_tokens=tokens, ignore_eos=True)
    for dtype, most in (("float32", 1e-4), ("bfloat16", 0.2)):
        native = engine_of(result, on_device(result, config), dtype, 32, 160)
        requests = [
            GenerationRequest(f"{row}.{n}", ids, sampled, seed=8 * row + n)
            for row, ids in enumerate(prompts)
            for n in range(4)
        ]
        together = serve(native, requests)
        _note_rows(result, dtype, native)
        gaps = [_gap(reference, request.prompt_ids, answer) for request, answer in zip(requests, together, strict=True)]
        result.add(f"{dtype}: log-probs against float64, largest", max(map(max, gaps)), most=most)
        result.add(f"{dtype}: log-probs against float64, mean", statistics.mean(map(statistics.mean, gaps)))
        alone = [serve(native, [request])[0] for request in requests[:4]]
        same = sum(one.token_ids == other.token_ids for one, other in zip(alone, together[:4], strict=True))
        result.add(f"{dtype}: responses equal alone and together, of 4", same, least=4 if dtype == "float32" else None)
        turn, ids = 0.0, prompts[0]
        for number in range(3):  # a prompt that continues cached pages
            answer = serve(native, [GenerationRequest(f"turn {number}", ids, sampled, seed=5, session="episode")])[0]
            turn = max(turn, *_gap(reference, ids, answer))
            ids = [*ids, *answer.token_ids, 7, 9]
        result.add(f"{dtype}: log-probs of three turns of a session, largest", turn, most=most)
        if dtype == "float32":
            answers = serve(native, [GenerationRequest(str(row), ids, greedy) for row, ids in enumerate(prompts)])
            theirs = _greedy(reference, prompts, tokens)
            same = sum(answer.token_ids == expected for answer, expected in zip(answers, theirs, strict=True))
            result.add("float32: greedy responses equal to float64 transformers, of 8", same, least=8)
        native.close()


def _note_rows(result: Result, name: str, native: Any) -> None:
    """Say which cache and how many graphs an engine used: a fallback would look like success."""
    rows = rows_of(native)
    result.notes.append(f"{name}: rows are {type(rows).__name__}, {getattr(rows, 'graphs', 0)} graphs captured")
    if not result.small and not getattr(rows, "graphs", 0):
        result.problems.append(f"{name}: decode steps ran without pages or without a CUDA graph")
    result.write()


def _gap(reference: Any, prompt: list[int], answer: Completion) -> list[float]:
    ids = torch.tensor([[*prompt, *answer.token_ids]], device=reference.device)
    with torch.no_grad():
        scores = reference(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    expected = scores.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
    return (expected - torch.tensor(answer.log_probs, dtype=torch.float64)).abs().tolist()


def _greedy(reference: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    ids = torch.tensor(prompts, device=reference.device)
    out = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens,
                             min_new_tokens=tokens, eos_token_id=None, pad_token_id=0)  # fmt: skip
    return out[:, ids.shape[1] :].tolist()


def same(result: Result) -> None:
    """Compare engine and trainer in one dtype (K3), rows alone and together, and a second run bit for bit."""
    config = config_of(result, "0.6B")
    for dtype in ("float32",) if result.small else ("float32", "bfloat16"):
        model = on_device(result, config)
        with torch.no_grad():
            model.get_decoder().norm.weight.mul_(6.0)  # logits as wide as those of a trained model
        tokens = 16 if result.small else 128
        native = engine_of(result, model, dtype, 64, 2 * tokens)
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        prompts = [ids for ids in prompts_of(4, 16, config.vocab_size) for _ in range(8)]
        requests = [GenerationRequest(str(i), ids, sampling, seed=i) for i, ids in enumerate(prompts)]
        answers, again = serve(native, requests), serve(native, requests)
        alone = [serve(native, [one])[0] for one in requests[:4]]
        pairs = list(zip(answers, again, strict=True))
        result.add(f"{dtype}: responses that differ in a second run, of 32",
                   sum((a.token_ids, a.log_probs) != (b.token_ids, b.log_probs) for a, b in pairs), most=0)  # fmt: skip
        result.add(f"{dtype}: responses that differ alone, of 4",
                   sum(a.token_ids != b.token_ids for a, b in zip(answers[:4], alone, strict=True)))  # fmt: skip
        native.close()
        batch = Batch(
            {
                "prompt_ids": Ragged.from_rows(prompts, torch.int64),
                "response_ids": Ragged.from_rows([answer.token_ids for answer in answers], torch.int64),
                "response_mask": Ragged.from_rows([[1] * tokens] * len(answers), torch.int64),
            }
        )
        prepare(model, ModelConfig())
        settings = TrainSettings(torch.device(result.device), OptimConfig(lr=0.0), dtype, total_steps=9)
        backend = LocalBackend(model, PolicyHead(), settings)
        trained = backend.infer_batch(batch)["log_probs"].values.double().cpu()
        gap = trained - torch.tensor([x for answer in answers for x in answer.log_probs], dtype=torch.float64)
        result.add(f"{dtype}: K3 of engine and trainer", float((gap.exp() - 1 - gap).mean()))
        result.add(f"{dtype}: largest difference of a log-prob", float(gap.abs().max()))
        kept = []
        for _ in range(2):
            backend.begin_update()
            model.train()
            backend._loop.accumulate_gradients(batch, backend.head, imitation_objective())
            kept.append([parameter.grad.clone() for parameter in model.parameters()])
        differ = sum(not torch.equal(a, b) for a, b in zip(*kept, strict=True))
        result.add(f"{dtype}: gradients that differ in a second run, of {len(kept[0])}", differ)
        del model, backend, kept, native
        release(result)
