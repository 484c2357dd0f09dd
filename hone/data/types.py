"""Records shared by several packages: a dataset row (input) and an episode (output)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from hone.data.episode_log import EpisodeLog

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hone.data.images import ImageData

    ExpertIds = Sequence[int] | NDArray[np.int16]
else:  # reward workers start without numpy
    ExpertIds = Sequence
"""Experts of tokens: by token, router and rank, end to end."""


class StopReason(StrEnum):
    """Reason for the end of a generation."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # the token limit
    TOOL_CALL = "tool_call"  # a tool call that the agent loop must execute
    ABORTED = "aborted"  # cancelled by the caller; the tokens sampled before are valid
    ERROR = "error"  # the engine failed


@dataclass
class Sample:
    """One dataset row, ready for generation."""

    uid: str  # identity of the row within its dataset; names the prompt group
    prompt_ids: list[int]  # token ids of the rendered prompt, chat template and generation prompt included
    messages: list[dict[str, Any]] | None  # chat messages of the prompt, or None if none were rendered
    data_source: str  # kind of problem; selects the scorer and groups validation metrics
    ground_truth: Any = None  # ``reward_model.ground_truth`` of the row, passed to the scorer
    # ``extra_info`` of the row, passed to the scorer; for an agent loop also ``tools_kwargs``,
    # ``tool_selection``, ``interaction_kwargs`` and ``environment``
    extra_info: dict[str, Any] = field(default_factory=dict)
    agent_name: str | None = None  # agent loop that plays the row; None: the run's default
    images: tuple[ImageData, ...] = ()  # images of the prompt, in order
    text: str | None = None  # the prompt of a row that has a plain string, before it was a message


def row_of(uid: str) -> str:
    """Return the uid of the dataset row of a group; a row that is drawn again within a step has a number after ``~``.

    >>> row_of("train:17~2"), row_of("train:17"), row_of("a~b:3")
    ('train:17', 'train:17', 'a~b:3')
    """
    name, mark, number = uid.rpartition("~")
    return name if mark and number.isdigit() else uid


@dataclass
class Trajectory:
    """One segment of an episode, of which most have one. Text is never re-tokenized: the run trains on the tokens that were sampled."""

    uid: str  # prompt group of the trajectory (``Sample.uid``)
    index: int  # number within the group, 0 to n - 1
    prompt_ids: list[int]  # the prompt's token ids, length P
    response_ids: list[int]  # everything after the prompt, length T
    response_mask: list[int]  # 1 exactly on tokens that the policy sampled, length T
    rollout_log_probs: list[float]  # log-prob of every sampled token under the temperature-scaled policy, length T
    # log-prob under the distribution that was sampled from (after top-k, top-p, min-p and repetition penalty),
    # length T; equal to ``rollout_log_probs`` when nothing was truncated
    sampling_log_probs: list[float]
    # text of the policy, decoded without special tokens: all its turns, joined by newlines, and nothing else (no
    # tool results)
    text: str
    stop_reason: StopReason  # why the last turn ended
    sample: Sample  # dataset row of the prompt
    # weight version that sampled each token, -1 on others, length T; empty if unknown
    token_versions: list[int] = field(default_factory=list)
    seconds: float = 0.0  # wall time from admission to the last token
    episode: EpisodeLog | None = None  # record of the episode; None for an episode of one turn
    part: int = 0  # segment number within the episode; above 0 only if its history was rewritten
    # number of tokens that each token was sampled from, length T; 0 on tokens that were not sampled and where it
    # is the whole vocabulary. Empty if no token was restricted
    support_sizes: list[int] = field(default_factory=list)
    support_ids: list[int] = field(default_factory=list)  # the tokens of all supports, end to end
    seed: int | None = None  # seed of the episode's random draws; None if unknown
    # the experts that the engine's routers chose for each token of prompt and response: by token, router and
    # rank, end to end; -1 where it reported none. Empty if it reported none at all
    expert_ids: ExpertIds = field(default_factory=list, compare=False)
    # images of the sample, then those of tool results, in order; by default the sample's, shared by its group
    images: tuple[ImageData, ...] = ()

    def __post_init__(self) -> None:
        self.images = self.images or self.sample.images

    @property
    def weight_versions(self) -> tuple[int, int]:
        """Lowest and highest weight version that sampled a token; (0, 0) if unknown."""
        sampled = [version for version in self.token_versions if version >= 0]
        return (min(sampled), max(sampled)) if sampled else (0, 0)
