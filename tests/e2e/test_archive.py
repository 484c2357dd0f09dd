"""The archive of a run: followed prompts, fates, log-probs after the update, and a run that is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from support.archives import records
from support.world import World

import hone
from hone.data.seeding import derive_seed
from hone.insight.archive.read import open_archive
from hone.trainers.archiving import place

pytestmark = [
    pytest.mark.slow,
    pytest.mark.application(
        "hone/insight",
        "hone/apps/lab",
        "hone/trainers/archiving.py",
        "hone/trainers/batch_ops.py",
        "hone/trainers/session.py",
    ),
]
SHAPE = {"max_prompt_length": 32, "max_response_length": 8, "train_batch_size": 4, "n": 3, "lr": 1e-2}


def rows_of(world: World) -> list[dict[str, object]]:
    return [{"prompt": row["prompt"]} for row in pq.read_table(world.train).to_pylist()]


def ones(completions: list[list[dict[str, str]]], **columns: list[object]) -> list[float]:
    return [float(completion[0]["content"].count("1")) for completion in completions]


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "seconds"}


def train(world: World, out: Path, steps: int, **keys: Any) -> None:
    config = {"trainer.logger": [], "actor_rollout_ref.actor.ppo_mini_batch_size": 2, "trainer.save_freq": 1}
    keys = {"rollout_dump_freq": 0, "rollout_dump_steps": [1, 3], "rollout_dump_share": 0.4, "reward": ones, **keys}
    hone.train(str(world.model), rows_of(world), steps=steps, out=out, config=config, **keys, **SHAPE)


def test_a_run_is_archived_and_resumed_exactly(world: World, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(world, whole, 3)
    archive = open_archive(whole)
    assert [archive.complete(step) for step in (1, 2, 3)] == [True, False, True] and archive.steps() == [1, 2, 3]
    assert all(place(record["uid"]) <= 0.4 for record in records(whole, 2)) and len(records(whole, 2)) % 3 == 0
    followed = {record["uid"] for record in records(whole, 3) if place(record["uid"]) <= 0.4}
    assert followed < {record["uid"] for record in records(whole, 3)}
    seed = 1
    for record in records(whole, 1):
        assert record["seed"] == str(derive_seed(seed, "rollout", 1, record["uid"], record["index"]))
        for name in ("old_log_probs", "new_log_probs", "rollout_log_probs", "entropy", "advantages", "loss_mask"):
            assert len(record[name]) == len(record["response_ids"]), name
        assert record["old_log_probs"] == pytest.approx(record["rollout_log_probs"], abs=1e-4)
    moved = [
        max(abs(new - old) for new, old in zip(record["new_log_probs"], record["old_log_probs"], strict=True))
        for record in records(whole, 1)
    ]
    assert sorted(gap > 1e-4 for gap in moved) == [False] * 6 + [True] * 6, (
        "the second mini-batch sees the first update"
    )
    texts = archive.vocabulary()
    assert texts is not None
    first = records(whole, 1)[0]
    sampled = [token for token, mask in zip(first["response_ids"], first["response_mask"], strict=True) if mask]
    assert first["text"].replace(" ", "") in "".join(texts[token] for token in sampled).replace(" ", "")
    train(world, parts, 2)
    train(world, parts, 3)
    for step in (1, 2, 3):
        assert list(map(timeless, records(parts, step))) == list(map(timeless, records(whole, step)))


def test_answers_that_are_not_trained_on_keep_their_fate(world: World, tmp_path: Path) -> None:
    def partly(
        completions: list[list[dict[str, str]]], prompts: list[Any], **columns: list[object]
    ) -> list[float | None]:
        texts = [prompt[-1]["content"] for prompt in prompts]
        scores = ones(completions)
        return [
            1.0 if text.endswith("0") else None if "111" in text else score
            for text, score in zip(texts, scores, strict=True)
        ]

    extra = {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.max_num_gen_batches": 20}
    config = {"trainer.logger": [], "reward.max_no_verdict_rate": 1.0, "preflight.reward_rows": 0, **extra}
    run = hone.train(
        str(world.model), rows_of(world), steps=1, out=tmp_path / "run", config=config, reward=partly, **SHAPE
    )  # fmt: skip
    by_fate: dict[str, list[dict[str, Any]]] = {}
    for record in records(tmp_path / "run", 1):
        by_fate.setdefault(record["fate"], []).append(record)
    assert by_fate.keys() == {"trained", "filtered", "failed"}
    assert len(by_fate["trained"]) == 12 and all(record["advantages"] for record in by_fate["trained"])
    assert {record["score"] for record in by_fate["failed"]} == {None}
    assert all(record["error"] and record["advantages"] is None for record in by_fate["failed"])
    assert all(record["loss_mask"] is None and record["score"] is not None for record in by_fate["filtered"])
    counts = run.coverage()["counts"]
    assert (counts["trained"], counts["filtered"], counts["failed"]) == tuple(
        len({record["uid"] for record in by_fate[fate]}) for fate in ("trained", "filtered", "failed")
    )
