"""Finished groups survive a checkpoint exactly: tokens, log-probs, versions, tool calls and scores."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch

from hone.data.batch import to_batch
from hone.data.episode_log import CallRecord, CallStatus, EpisodeEnd, EpisodeLog
from hone.data.images import ImageData
from hone.data.types import Sample, StopReason, Trajectory
from hone.rewards.score import Score
from hone.trainers.batch_ops import load_groups, save_groups

SAMPLE = Sample("p~2", [1, 2], [{"role": "user", "content": "?"}], "x", {"a": 1})


def trajectory(index: int, episode: EpisodeLog | None) -> Trajectory:
    logs = torch.tensor([-0.1234567, -3.3333333, 0.0]).tolist()
    return Trajectory(
        "p~2", index, [1, 2], [5, 6, 7], [1, 1, 0], logs, [-1.0, float("-inf"), 0.0], "text", StopReason.TOOL_CALL, SAMPLE,
        token_versions=[3, 4, -1], seconds=0.25, episode=episode, part=index,
    )  # fmt: skip


def test_groups_come_back_as_they_were(tmp_path: Path) -> None:
    call = CallRecord("search", {"q": "é"}, CallStatus.TIMEOUT, "none", 1, 0.5, metrics={"hits": 0.0})
    log = EpisodeLog(
        [{"role": "tool", "content": "x"}], EpisodeEnd.TIME, 2, calls=[call], turn_rewards=[0.0, 1.0], error="E"
    )
    scores = [
        Score(0.1, {"acc": 1.0}, {"pred": "7"}, placed={2: 0.5}, turn_rewards=[0.1]),
        Score(float("nan"), error="timeout", token_rewards=[0.0, 0.1, 0.2]),
    ]
    batch = to_batch([trajectory(0, None), trajectory(1, log)]).with_columns(score=scores)
    save_groups(str(tmp_path), batch)
    restored = load_groups(str(tmp_path), {"p~2": SAMPLE})
    assert set(restored.names()) == {*batch.names(), "verdict"} and restored.tensor("verdict").tolist() == [1, 0]
    for one, other in zip(restored.objects("trajectory"), batch.objects("trajectory"), strict=True):
        assert one == other
    for name in ("rollout_log_probs", "token_versions", "response_ids"):
        assert torch.equal(restored.ragged(name).values, batch.ragged(name).values)
    first, second = restored.objects("score")
    assert first == scores[0] and dataclasses.replace(second, total=0.0) == dataclasses.replace(scores[1], total=0.0)
    assert second.total != second.total


def test_values_that_json_lacks_are_numbers_or_text(tmp_path: Path) -> None:
    score = Score(1.0, extra={"array": np.arange(2), "path": Path("a")})
    save_groups(str(tmp_path), to_batch([trajectory(0, None)]).with_columns(score=[score]))
    (restored,) = load_groups(str(tmp_path), {"p~2": SAMPLE}).objects("score")
    assert restored.extra == {"array": [0, 1], "path": "a"}


def test_images_of_tool_results_are_stored_and_those_of_the_row_are_its_own(tmp_path: Path) -> None:
    seen, shown = ImageData(b"row"), ImageData(b"tool")
    sample = dataclasses.replace(SAMPLE, images=(seen,))
    rows = [dataclasses.replace(trajectory(0, None), sample=sample, images=images) for images in ((), (seen, shown))]
    assert rows[0].images is sample.images
    batch = to_batch(rows)
    assert batch.objects("images") == [(seen,), (seen, shown)] and "images" not in to_batch([trajectory(0, None)])
    save_groups(str(tmp_path), batch.with_columns(score=[Score(0.0), Score(1.0)]))
    assert to_batch([trajectory(0, None)], reads_images=True).objects("images") == [()]
    restored = load_groups(str(tmp_path), {"p~2": sample})
    assert restored.objects("images") == [(seen,), (seen, shown)]
    assert all(images[0] is seen for images in restored.objects("images"))
