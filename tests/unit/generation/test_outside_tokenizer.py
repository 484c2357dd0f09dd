"""Ids that the tokenizer lacks are never sampled, and log-probs stay those of the trainer."""

import logging
from types import SimpleNamespace

import pytest
import torch
from support.families import Letters, make_engine, serve, tiny_model

from hone.data.tokenizer import outside_tokenizer
from hone.generation.native.sampler import never_sampled
from hone.generation.protocol import GenerationRequest, SamplingParams
from hone.trainers.batch_ops import BatchOps

KNOWN = 20
HOLE = 7


class Words(Letters):
    """Twenty tokens with a hole for a model of 61."""

    def get_vocab(self) -> dict[str, int]:
        return {f"w{token}": token for token in range(KNOWN) if token != HOLE}

    def __len__(self) -> int:
        return KNOWN - 1


@pytest.mark.parametrize("engine", ["native", "hf"])
@pytest.mark.parametrize("changes", [{}, {"temperature": 0.0}, {"top_k": 30}, {"repetition_penalty": 1.3}], ids=str)
def test_no_id_outside_is_sampled_and_log_probs_are_the_trainers(engine, changes, caplog):
    plain, model = tiny_model("qwen3"), tiny_model("qwen3")
    requests = [
        GenerationRequest(
            str(seed),
            [3, 4, 5],
            SamplingParams(**{"max_tokens": 12, "temperature": 1.0, "ignore_eos": True} | changes),
            seed,
        )
        for seed in range(8)
    ]
    free = serve(make_engine(tiny_model("qwen3"), engine), requests)
    assert any(not 0 <= token < KNOWN for one in free.values() for token in one.token_ids), "the model wants others"
    with caplog.at_level(logging.INFO, "hone"):
        answers = serve(make_engine(model, engine, tokenizer=Words()), requests)
    assert sum(f"{61 - KNOWN + 1} of 61" in record.getMessage() for record in caplog.records) == 1
    for completion in answers.values():
        ids = completion.token_ids
        assert len(ids) == 12 and all(token < KNOWN and token != HOLE for token in ids)
        with torch.no_grad():
            logits = plain(torch.tensor([[3, 4, 5, *ids]])).logits[0, 2:-1]
        trainer = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.log_probs), trainer, rtol=1e-4, atol=1e-4)
        if not changes:
            kept = logits.clone()
            kept[:, [HOLE, *range(KNOWN, 61)]] = -torch.inf
            drawn = kept.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.sampling_log_probs), drawn, rtol=1e-4, atol=1e-4)


def test_a_tokenizer_with_every_id_masks_nothing():
    assert never_sampled(Words(), HOLE, torch.device("cpu")) is None


def test_ids_outside_are_those_that_no_token_has_and_all_beyond():
    assert outside_tokenizer(Words(), KNOWN + 2).nonzero().flatten().tolist() == [HOLE, KNOWN, KNOWN + 1]
    counted = BatchOps._outside.func(SimpleNamespace(tokenizer=Words()))
    assert counted.nonzero().flatten().tolist() == [HOLE, KNOWN], "the last entry is for all ids beyond"
