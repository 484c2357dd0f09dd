"""Mining pairs from rollouts."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.archives import archive
from support.examples import examples
from support.messages import raises

from hone.apps.lab.rewards.comparison import mine_pairs, write_pairs
from hone.errors import DataError, HoneError
from hone.insight.archive.write import step_file


def record(uid, text, score, **more):
    ids = [ord(c) for c in text]
    return {
        "uid": uid, "data_source": "exact", "messages": [{"role": "user", "content": uid}], "text": text, "score": score,
        "error": None, "stop_reason": "stop", "prompt_ids": [ord(c) for c in uid], "response_ids": ids,
        "response_mask": [1] * len(ids), **more,
    }  # fmt: skip


def run_of(folder: Path, *steps) -> Path:
    for number, records in enumerate(steps, 1):
        archive(folder, number, records)
    return folder


def summary_of(pairs):
    return sorted((p["uid"], p["chosen"][0]["content"], p["rejected"][0]["content"], p["margin"]) for p in pairs)


def test_best_with_worst_then_the_next(tmp_path):
    answers = [record("a", t, s) for t, s in [("w", 0.0), ("b", 1.0), ("m", 0.5), ("n", 0.4), ("k", 0.45)]]
    run = run_of(tmp_path / "run", answers[:2], answers[2:])
    assert summary_of(mine_pairs(run, val_share=0).train) == [("a", "b", "w", 1.0), ("a", "m", "n", pytest.approx(0.1))]
    assert summary_of(mine_pairs(run, val_share=0, per_prompt=1).train) == [("a", "b", "w", 1.0)]
    assert summary_of(mine_pairs(run, val_share=0, margin=0.5).train) == [("a", "b", "w", 1.0)]
    with raises(DataError, "by 2 or more", "5 answers", "1 prompts", "--margin", "trainer.rollout_dump_freq=1"):
        mine_pairs(run, val_share=0, margin=2)


def test_samples_that_cannot_be_in_a_pair(tmp_path):
    run = run_of(
        tmp_path / "run",
        [
            record("a", "good", 1.0), record("a", "bad", 0.0), record("a", "bad", 0.0),
            record("a", "long", -1.0, stop_reason="length"), record("a", "broken", -2.0, error="timeout"),
            record("a", "tool", 3.0, response_mask=[1, 0, 0, 1]),
        ],
    )  # fmt: skip
    mined = mine_pairs(run, val_share=0, form="messages")
    assert summary_of(mined.train) == [("a", "good", "bad", 1.0)]
    assert dict(mined.left_out) == {
        "cut off by the length limit": 1,
        "not scored": 1,
        "several turns (use --as tokens)": 1,
    }
    assert "chosen_mask" not in mined.train[0]


def test_answers_without_token_ids_are_not_called_empty(tmp_path):
    answers = [record("a", "good", 1.0), record("a", "bad", 0.0), record("a", "", 0.5)]
    texts = [record("a", "text", 2.0, response_ids=None, response_mask=None)] * 2
    mined = mine_pairs(run_of(tmp_path / "run", [*answers, *texts]), val_share=0, form="tokens")
    assert sorted(mined.left_out.values()) == [1, 2] and len(mined.train) == 1


def test_episodes_of_several_turns_are_paired_as_tokens_with_their_masks(tmp_path):
    run = run_of(
        tmp_path / "run",
        [
            record("a", "call[51]51", 1.0, index=0, response_mask=[1] * 4 + [0] * 4 + [1] * 2),
            record("a", "guess", 0.0, index=1, stop_reason="length"),
            *(record("a", text, 2.0, index=2, part=part) for part, text in enumerate(["begun", "rewritten"])),
        ],
    )
    mined = mine_pairs(run, val_share=0)
    assert dict(mined.left_out) == {"one of several segments of an episode whose history was rewritten": 2}
    (pair,) = mined.train
    assert bytes(pair["prompt"]).decode() == "a" and bytes(pair["rejected"]).decode() == "guess"
    wrote = [chr(token) for token, sampled in zip(pair["chosen"], pair["chosen_mask"], strict=True) if sampled]
    assert "".join(wrote) == "call51" and pair["rejected_mask"] == [1] * 5


def test_tokens_where_prompts_are_not_messages(tmp_path):
    run = run_of(tmp_path / "run", [record("a", "x", 1.0, messages=None), record("a", "y", 0.0, messages=None)])
    assert mine_pairs(run, val_share=0).train[0]["chosen"] == [ord("x")]
    with raises(DataError, 2, "--as tokens"):
        mine_pairs(run, val_share=0, form="messages")


@examples(30)
@given(st.integers(2, 20), st.floats(0.01, 0.99), st.integers(0, 9))
def test_prompts_not_pairs_are_divided(tmp_path_factory, prompts, share, seed):
    rows = [
        record(f"p{n}", text, score) for n in range(prompts) for text, score in (("x", 1.0), ("y", 0.0), ("z", 0.5))
    ]
    # the same question under two names must not be on both sides
    rows += [{**record("twin", t, s), "prompt_ids": [ord(c) for c in "p0"]} for t, s in (("x", 1.0), ("y", 0.0))]
    run = run_of(tmp_path_factory.mktemp("mined") / "run", rows)
    mined, again = (mine_pairs(run, val_share=share, seed=seed) for _ in range(2))
    assert (mined.train, mined.val) == (again.train, again.val)
    sides = [{p["uid"] for p in pairs} for pairs in (mined.train, mined.val)]
    assert mined.val and not sides[0] & sides[1] and len(sides[0] | sides[1]) == prompts + 1
    assert ("p0" in sides[0]) == ("twin" in sides[0])
    assert len({u for u in sides[1] if u != "twin"} | ({"p0"} & sides[1])) == max(1, round(share * prompts))


def test_files(tmp_path):
    rows = [record(u, t, s) for u in "abcd" for t, s in (("x", 1.0), ("y", 0.0))]
    run = run_of(tmp_path / "run", rows)
    paths = write_pairs(mine_pairs(run, val_share=0.25), tmp_path / "out")
    tables = [pq.read_table(path).to_pylist() for path in paths]
    assert [path.name for path in paths] == ["train.parquet", "val.parquet"] and [len(t) for t in tables] == [3, 1]
    assert tables[0][0]["chosen"] == [{"role": "assistant", "content": "x"}] and tables[0][0]["score_chosen"] == 1.0
    assert write_pairs(mine_pairs(run, val_share=0), tmp_path / "out") == paths[:1]
    assert not paths[1].exists(), "held-out pairs of an earlier division would be training pairs now"
    (tmp_path / "file").write_text("")
    with raises(DataError, "--out", where=str(tmp_path / "file" / "out")):
        write_pairs(mine_pairs(run), tmp_path / "file" / "out")


@pytest.mark.parametrize(
    ("options", "mention"),
    [
        ({"val_share": 1.0}, "--val-share 1.0"), ({"margin": -1}, "--margin -1"), ({"per_prompt": 0}, "--per-prompt 0"),
        ({"form": "mesages"}, "Did you mean messages"), ({"val_share": 0.5}, "--val-share 0"),
    ],
)  # fmt: skip
def test_mistakes(tmp_path, options, mention):
    run = run_of(tmp_path / "run", [record("a", "x", 1.0), record("a", "y", 0.0)])
    with raises(DataError, mention):
        mine_pairs(run, **options)


def test_a_folder_without_rollouts(tmp_path):
    with raises(HoneError, str(tmp_path), "trainer.rollout_dump_freq=1"):
        mine_pairs(tmp_path)
    run = run_of(tmp_path / "run", [record("a", "x", 1.0)])
    step_file(run / "rollouts", 1).write_bytes(b"PAR1")
    with raises(HoneError, where=str(step_file(run / "rollouts", 1))):
        mine_pairs(run)
