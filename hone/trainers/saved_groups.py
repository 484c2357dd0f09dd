"""Finished groups in a checkpoint: what was generated and scored before it is not generated again after a resume.

One line of JSON per trajectory, compressed. The row of the dataset is not stored: a resumed run reads it again.
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
from collections.abc import Mapping
from typing import Any

from hone.cluster.columns import TOKENS
from hone.data.batch import Batch
from hone.data.episode_log import CallRecord, CallStatus, EpisodeEnd, EpisodeLog
from hone.data.images import ImageData
from hone.data.trajectories import to_batch
from hone.data.types import Sample, StopReason, Trajectory
from hone.rewards.score import Score
from hone.trainers.verdicts import scored
from hone.training.checkpoints.storage import Storage

FILE = "groups.jsonl.gz"


def save_groups(location: str, batch: Batch) -> None:
    """Write scored trajectories to the checkpoint at ``location``."""
    pairs = zip(batch.objects("trajectory"), batch.objects("score"), strict=True)
    with Storage(location).create(FILE) as file, gzip.open(file, "wt", compresslevel=1, encoding="utf-8") as lines:
        for trajectory, score in pairs:
            lines.write(json.dumps(_record(trajectory, score), default=_plain) + "\n")


def load_groups(location: str, samples: Mapping[str, Sample], *, reads_images: bool = False) -> Batch:
    """Return the batch that :func:`save_groups` wrote, given the sample of every uid; ``reads_images`` as for :func:`to_batch`."""
    with Storage(location).open(FILE) as file, gzip.open(file, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    scores = [_score(record.pop("score")) for record in records]
    batch = to_batch([_trajectory(record, samples[record["uid"]]) for record in records], reads_images=reads_images)
    return batch.updated(scored(scores))


def _record(trajectory: Trajectory, score: Score) -> dict[str, Any]:
    values = {name: value for name, value in vars(trajectory).items() if name not in ("sample", "episode")}
    values |= {name: list(values[name]) for name in ("prompt_ids", *TOKENS)}
    later = trajectory.images[len(trajectory.sample.images) :]
    values["images"] = [base64.b64encode(image.content).decode() for image in later]
    episode = None if trajectory.episode is None else dataclasses.asdict(trajectory.episode)
    return {**values, "episode": episode, "score": dataclasses.asdict(score)}


def _plain(value: Any) -> Any:
    """Return a value of the user's that JSON lacks as numbers, lists or text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _trajectory(record: dict[str, Any], sample: Sample) -> Trajectory:
    episode = record["episode"] and _episode(record["episode"])
    later = tuple(ImageData(base64.b64decode(content)) for content in record.pop("images"))
    values = {**record, "stop_reason": StopReason(record["stop_reason"]), "episode": episode}
    return Trajectory(**values, sample=sample, images=sample.images + later)


def _episode(record: dict[str, Any]) -> EpisodeLog:
    calls = [CallRecord(**{**call, "status": CallStatus(call["status"])}) for call in record["calls"]]
    return EpisodeLog(**{**record, "end": EpisodeEnd(record["end"]), "calls": calls})


def _score(record: dict[str, Any]) -> Score:
    return Score(**{**record, "placed": {int(token): reward for token, reward in record["placed"].items()}})
