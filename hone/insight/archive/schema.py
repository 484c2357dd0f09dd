"""Columns of the rollout archive.

    <run>/rollouts/step_<N>.parquet      sequences of a training step
    <run>/validation/step_<N>.parquet    sequences of a validation
    <run>/rollouts/vocabulary.parquet    text of every token id: columns `id` (int32) and `text`

A row is one sequence: an episode, or a segment of an episode whose history was rewritten (`part`). Its identity is
(`step`, `uid`, `index`, `part`). Columns by token have one value per response token. What a run did not compute is null; so are the
token ids of an import whose source has text alone.

The metadata of a file has `hone.archive`, the version of the format, and `hone.rows`, the number of sequences of the step. A file with
fewer rows has only the prompts that are stored at every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 1  # version of the format
VERSION_KEY, ROWS_KEY = b"hone.archive", b"hone.rows"  # keys of the metadata of a file
INT, NUMBER, TEXT, JSON = "int32", "float64", "string", "json"
IDS, INTS, FLOATS = "list<int64>", "list<int32>", "list<float32>"


@dataclass(frozen=True)
class Column:
    """One column of the archive."""

    name: str
    kind: str  # arrow type; ``json`` is a string with JSON
    about: str  # meaning, with its unit
    required: bool = False  # True if no row may lack a value

    @property
    def by_token(self) -> bool:
        """True if the column has one value per response token."""
        return self.kind in (IDS, INTS, FLOATS) and self.name != "prompt_ids"


COLUMNS = (
    Column("step", INT, "step that trained, or validated, the sequence", required=True),
    Column("uid", TEXT, "prompt group: episodes with the same uid answer the same prompt", required=True),
    Column("index", INT, "number within the group, from 0", required=True),
    Column("part", INT, "segment of an episode whose history was rewritten, from 0", required=True),
    Column("fate", TEXT, "`trained`, `filtered`, `failed` (no verdict), `too_old` or `validation`", required=True),
    Column("data_source", TEXT, "name of the dataset that the prompt is of"),
    Column("row", INT, "row of the dataset, from 0"),
    Column("seed", TEXT, "seed of the episode's random draws, as a decimal number"),
    Column("prompt", TEXT, "text of the prompt"),
    Column("messages", JSON, "messages of the prompt in OpenAI form"),
    Column("text", TEXT, "text of the policy: all its turns, without tool results", required=True),
    Column("ground_truth", JSON, "expected answer"),
    Column("stop_reason", TEXT, "why the last turn ended"),
    Column("seconds", NUMBER, "wall time from admission to the last token"),
    Column("score", NUMBER, "reward; null without a verdict"),
    Column("unshaped", NUMBER, "reward before the trainer's length penalty; null without one"),
    Column("baseline", NUMBER, "reward of the greedy response to the prompt"),
    Column("turn_values", JSON, "value of each forked turn of the episode, by turn"),
    Column("terms", JSON, "named numbers of the scorer"),
    Column("extra", JSON, "other values of the scorer"),
    Column("error", TEXT, "why there is no verdict"),
    Column("cause", TEXT, "kind of that error"),
    Column("episode", JSON, "turns, tool calls with input, output and seconds, end, sub-agents"),
    Column("prompt_ids", IDS, "token ids of the prompt; those of images are below 0"),
    Column("response_ids", IDS, "token ids of everything after the prompt"),
    Column("response_mask", INTS, "1 on tokens that the policy sampled"),
    Column("loss_mask", INTS, "1 on tokens that the update learned from"),
    Column("token_versions", INTS, "weight version that sampled the token, -1 on others"),
    Column("rollout_log_probs", FLOATS, "log-prob of the engine under the temperature"),
    Column(
        "sampling_log_probs",
        FLOATS,
        "log-prob under the distribution that was sampled from; null where that is the same",
    ),
    Column("old_log_probs", FLOATS, "log-prob of the trainer before the update"),
    Column("new_log_probs", FLOATS, "log-prob of the trainer in the last update that saw the token"),
    Column("ref_log_probs", FLOATS, "log-prob of the reference policy"),
    Column("entropy", FLOATS, "entropy of the trainer's distribution in nats"),
    Column("values", FLOATS, "value of the critic"),
    Column("sum_pi_squared", FLOATS, "sum of the squared probabilities of the trainer's distribution"),
    Column("token_rewards", FLOATS, "reward placed on the token, with the KL penalty where it is part of the reward"),
    Column("token_scores", FLOATS, "the same without the KL penalty; null where that is the same"),
    Column("advantages", FLOATS, "advantage"),
    Column("returns", FLOATS, "target of the critic"),
    Column("correction", FLOATS, "weight of the rollout correction"),
)
BY_NAME = {column.name: column for column in COLUMNS}


def arrow_schema() -> pa.Schema:
    """Return the schema of an archive file, without metadata."""
    import pyarrow as pa

    types = {INT: pa.int32(), NUMBER: pa.float64(), TEXT: pa.string(), JSON: pa.string()}
    types |= {IDS: pa.list_(pa.int64()), INTS: pa.list_(pa.int32()), FLOATS: pa.list_(pa.float32())}
    return pa.schema([pa.field(column.name, types[column.kind], nullable=not column.required) for column in COLUMNS])
