"""The single-turn episode: what an engine returns becomes the trajectory that is trained on, token by token."""

import asyncio

from hone.agents.base import EpisodeContext
from hone.agents.player import Player
from hone.data.types import Sample, StopReason
from hone.generation.protocol import Completion, SamplingParams


class Scripted:
    """An engine that answers the last request of a call first."""

    def __init__(self) -> None:
        self.calls = []

    async def generate(self, requests):
        self.calls.append(list(requests))
        for request in reversed(requests):
            tokens = [*request.prompt_ids, request.seed]
            yield Completion(
                request_id=request.request_id,
                token_ids=tokens,
                log_probs=[-0.5] * len(tokens),
                sampling_log_probs=[-0.25] * len(tokens),
                stop_reason=StopReason.LENGTH,
                weight_versions=(3, 4),
                seconds=0.5,
            )


class Tokens:
    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return "-".join(map(str, ids))


def test_every_sample_is_asked_n_times_and_tokens_pass_through_untouched():
    samples = [
        Sample(uid=uid, prompt_ids=[number], messages=None, data_source="x") for number, uid in enumerate(["a#b", "c"])
    ]
    engine, sampling = Scripted(), SamplingParams(max_tokens=5)
    player = Player(engine, EpisodeContext(Tokens()))  # type: ignore[arg-type]
    played = asyncio.run(player.play(samples, sampling, n=2, seed_of=lambda uid, index: 100 * len(uid) + index))

    asked = [request for call in engine.calls for request in call]  # in the order of the samples
    assert [len(call) for call in engine.calls] == [1] * 4, "an error of one request is not an error of the others"
    assert [request.prompt_ids for request in asked] == [[0], [0], [1], [1]]
    assert all(request.sampling == sampling and request.session is None for request in asked)
    assert [(t.uid, t.index) for t in played] == [("a#b", 0), ("a#b", 1), ("c", 0), ("c", 1)]
    first = played[0]
    assert first.sample is samples[0]
    assert (first.prompt_ids, first.response_ids, first.response_mask) == ([0], [0, 300], [1, 1])
    assert (first.rollout_log_probs, first.sampling_log_probs) == ([-0.5, -0.5], [-0.25, -0.25])
    assert (first.text, first.stop_reason, first.weight_versions) == ("0-300", StopReason.LENGTH, (3, 4))
    assert first.episode is None, "one answer to one prompt needs no record besides the trajectory"
