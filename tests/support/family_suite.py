"""The suite that every model family passes, built in or registered by a user; a test class inherits it and defines ``model``."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
import torch
from support.drafters import mixed
from support.families import make_engine, serve
from support.prefix_trees import tree_batch
from torch import Tensor

from hone.config.model import OptimConfig
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.generation.native.speculative import Speculation
from hone.generation.protocol import Completion, GenerationRequest, SamplingParams
from hone.models.attention.packed import PackedContext
from hone.models.heads import PolicyHead
from hone.models.registry import entries_per_token, family_of
from hone.models.routing import attention_of, use_hone_attention
from hone.training.backends.local import LocalBackend
from hone.training.engine import TrainSettings
from hone.training.objectives import imitation_objective
from hone.training.packing import pack

LENGTHS = [9, 1, 17, 9, 4]
TOLERANCE = {"atol": 2e-5, "rtol": 1e-5}
CPU = torch.device("cpu")


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 61, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def request(name: str, ids: list[int], tokens: int = 8, **more: Any) -> GenerationRequest:
    return GenerationRequest(name, ids, SamplingParams(max_tokens=tokens, ignore_eos=True), seed_of(name), **more)


def seed_of(name: str) -> int:
    return sum(ord(letter) * 31**place for place, letter in enumerate(name)) % 10_000


def packed_logits(model: Any, parts: list[list[int]]) -> Tensor:
    context = PackedContext.from_lengths([len(part) for part in parts])
    ids = torch.tensor([[token for part in parts for token in part]])
    return model(input_ids=ids, position_ids=context.position_ids, context=context, use_cache=False).logits[0]


def log_probs(model: Any, requests: list[GenerationRequest], done: dict[str, Completion]) -> list[float]:
    """Log-probs that the trainer computes for the responses; the samples of a prompt share it in the micro-batch."""
    responses = [done[one.request_id].token_ids for one in requests]
    batch = Batch({"prompt_ids": ragged([one.prompt_ids for one in requests]), "response_ids": ragged(responses)})
    return LocalBackend(model, PolicyHead(), TrainSettings(CPU)).infer_batch(batch)["log_probs"].values.tolist()


def ragged(rows: list[list[int]]) -> Ragged:
    return Ragged.from_lengths(torch.tensor([t for row in rows for t in row]), torch.tensor([len(row) for row in rows]))


class ModelFamilySuite:
    """Packing, gradients, decoding, prompt sharing and sessions of a family, against its own packed forward pass."""

    @pytest.fixture
    def subject(self, model: Any) -> Any:
        use_hone_attention(model)
        return model.eval()

    def test_packed_logits_equal_each_sequence_alone(self, subject):
        parts = [prompt(length, length) for length in LENGTHS]
        with torch.no_grad():
            alone = torch.cat([packed_logits(subject, [part]) for part in parts])
            torch.testing.assert_close(packed_logits(subject, parts), alone, **TOLERANCE)

    def test_packed_logits_are_those_of_transformers_in_float64(self, subject):
        if family_of(subject.config.model_type).own_attention:
            pytest.skip("Transformers has no other attention for it")
        parts = [prompt(length, length) for length in LENGTHS]
        oracle = copy.deepcopy(subject).double()
        if oracle._can_set_experts_implementation():
            oracle.set_experts_implementation("eager")  # its grouped products have no float64
        with torch.no_grad(), attention_of(oracle, "eager"):
            alone = [oracle(input_ids=torch.tensor([part]), use_cache=False).logits[0].double() for part in parts]
            torch.testing.assert_close(packed_logits(subject, parts).double(), torch.cat(alone), **TOLERANCE)

    def test_a_later_token_and_another_sequence_change_nothing(self, subject):
        parts = [prompt(length, length) for length in LENGTHS]
        changed = [*parts[:2], [*parts[2][:-1], 60], [t + 1 if t < 60 else 3 for t in parts[3]], parts[4]]
        with torch.no_grad():
            before, after = (packed_logits(subject, each).split(LENGTHS) for each in (parts, changed))
        same = [before[0], before[1], before[2][:-1], before[4]], [after[0], after[1], after[2][:-1], after[4]]
        torch.testing.assert_close(torch.cat(same[1]), torch.cat(same[0]), atol=1e-6, rtol=1e-6)
        assert not torch.allclose(before[3], after[3])

    def test_gradients_of_packed_sequences_are_the_sum_of_their_own(self, subject):
        parts = [prompt(length, length) for length in LENGTHS]
        weights = torch.randn(sum(LENGTHS), 61, generator=torch.Generator().manual_seed(0)).split(LENGTHS)

        def gradients(*packs: list[int]) -> dict[str, Tensor]:
            for members in packs:
                logits = packed_logits(subject, [parts[i] for i in members])
                (logits * torch.cat([weights[i] for i in members])).sum().backward()
            grads = {name: p.grad.clone() for name, p in subject.named_parameters() if p.grad is not None}
            subject.zero_grad()
            return grads

        alone, packed = gradients([0], [1], [2], [3], [4]), gradients([0, 1, 2, 3, 4])
        for name, parameter in subject.named_parameters():
            scale = max(1.0, float(alone[name].abs().max())) if name in alone else 0.0
            assert bool(packed[name].isfinite().all()) and scale > 0, name
            torch.testing.assert_close(packed[name], alone[name], atol=2e-5 * scale, rtol=1e-4)
            assert parameter.shape == packed[name].shape

    def test_a_tree_of_prefixes_gives_what_each_row_alone_gives(self, subject):
        """Log-probs and gradients, where rows share prompts, parts of responses, and everything."""
        batch, head = tree_batch(3, 7), PolicyHead()
        weights = batch.ragged("noise").values

        def outcome(packs: list[list[int]]) -> tuple[Tensor, dict[str, Tensor]]:
            packed = [pack(batch.reorder(rows), CPU) for rows in packs]
            outputs = [one.outputs_by_row(head(subject, one, with_entropy=True)) for one in packed]
            log_probs, entropy = (torch.cat([one[name] for one in outputs]) for name in ("log_probs", "entropy"))
            ((log_probs - 0.1 * entropy) * weights).sum().backward()
            grads = {name: p.grad.clone() for name, p in subject.named_parameters() if p.grad is not None}
            subject.zero_grad()
            return log_probs.detach(), grads

        everyone = list(range(len(batch)))
        together, gradients = outcome([everyone])
        alone, expected = outcome([[row] for row in everyone])
        torch.testing.assert_close(together, alone, **TOLERANCE)
        for name, gradient in expected.items():
            scale = max(1.0, float(gradient.abs().max()))
            torch.testing.assert_close(gradients[name], gradient, atol=2e-5 * scale, rtol=1e-4, msg=name)

    def test_an_update_makes_the_taught_responses_likelier(self, subject):
        rows = [prompt(seed, 5 + seed) for seed in range(4)]
        mask = ragged([[1] * len(row) for row in rows])
        batch = Batch({"prompt_ids": ragged([[7, 8, 9]] * 4), "response_ids": ragged(rows), "response_mask": mask})
        engine = LocalBackend(subject, PolicyHead(), TrainSettings(CPU, optim=OptimConfig(lr=1e-3)))
        before = engine.infer_batch(batch)["log_probs"].values.mean()
        updates = [engine.train_batch(batch, imitation_objective(), step=step) for step in range(3)]
        assert all(update.applied and 0 < update.grad_norm < float("inf") for update in updates)
        assert engine.infer_batch(batch)["log_probs"].values.mean() > before

    def test_decoding_step_by_step_equals_the_trainers_pass(self, subject):
        requests = [request(f"r{length}", prompt(length, length), tokens=3 + length) for length in LENGTHS[:3]]
        done = serve(make_engine(subject), requests)
        sampled = [value for one in requests for value in done[one.request_id].log_probs]
        torch.testing.assert_close(torch.tensor(sampled), torch.tensor(log_probs(subject, requests, done)), **TOLERANCE)

    def test_shared_prompts_change_no_token(self, subject):
        requests = [request(f"r{i}.{j}", prompt(i, (11, 1, 6)[i]), tokens=4 + j) for i in range(3) for j in range(4)]
        engine = make_engine(subject)
        together = serve(engine, requests)
        alone = {one.request_id: serve(make_engine(subject), [one])[one.request_id] for one in requests}
        for name, expected in alone.items():
            assert together[name].token_ids == expected.token_ids
            torch.testing.assert_close(together[name].log_probs, expected.log_probs, **TOLERANCE)
        stats = engine.describe().stats
        assert stats["prefix_hits"] > 0 and stats["prefill_tokens"] < sum(len(one.prompt_ids) - 1 for one in requests)
        sampled = [value for one in requests for value in together[one.request_id].log_probs]
        torch.testing.assert_close(
            torch.tensor(sampled), torch.tensor(log_probs(subject, requests, together)), **TOLERANCE
        )

    def test_drafts_change_no_token(self, subject):
        """A family whose cache is one state a sequence has no drafts, because rejected tokens could not be taken back."""
        requests = [request(str(i), prompt(i % 2, 6), 9 + i) for i in range(4)]
        expected = serve(make_engine(subject), requests)
        engine = make_engine(subject, speculation=Speculation(mixed(expected, seed=2), num_tokens=3))
        done = serve(engine, requests)
        for name, completion in expected.items():
            assert done[name].token_ids == completion.token_ids
            torch.testing.assert_close(done[name].log_probs, completion.log_probs, atol=1e-5, rtol=0)
        assert (engine.describe().stats["accepted_tokens"] > 0) == entries_per_token(subject.config)

    def test_a_next_turn_reuses_the_cache_and_draws_the_same(self, subject):
        engine, fresh = make_engine(subject), make_engine(subject)
        openings = [prompt(i, 3 + 4 * i) for i in range(3)]
        first = serve(engine, [request(f"a{i}", ids, session=f"s{i}") for i, ids in enumerate(openings)])
        second = [ids + first[f"a{i}"].token_ids + prompt(9 + i, 1 + 3 * i) for i, ids in enumerate(openings)]
        kept = serve(engine, [request(f"b{i}", ids, session=f"s{i}") for i, ids in enumerate(second)])
        anew = serve(fresh, [request(f"b{i}", ids) for i, ids in enumerate(second)])
        assert engine.describe().stats["session_hits"] == 3
        for name, expected in anew.items():
            assert kept[name].token_ids == expected.token_ids
            torch.testing.assert_close(kept[name].log_probs, expected.log_probs, **TOLERANCE)

    def test_the_cache_holds_what_the_family_says(self, subject):
        engine: Any = make_engine(subject)
        done = serve(engine, [request("a", prompt(5, 12), session="s")])["a"]
        turn, _ = engine._runner.rows.sessions.find("s", [*prompt(5, 12), *done.token_ids, 3], 0)
        config = subject.get_decoder().config
        size = family_of(config.model_type).cache_size(config.to_dict())
        held = sum(part.numel() for parts in turn.entries.values() for part in parts)
        assert held == len(turn.ids) * size.per_token + size.per_sequence

    def test_sleep_frees_the_cache(self, subject):
        engine: Any = make_engine(subject)
        requests = [request(f"r{i}", prompt(1, 6)) for i in range(3)]
        before = serve(engine, requests)
        asyncio.run(engine.sleep())
        assert engine._runner.rows.cache.tokens == engine._runner.rows.prefixes.cache.tokens == 0
        after = serve(engine, requests)
        assert [after[name].token_ids for name in before] == [before[name].token_ids for name in before]
