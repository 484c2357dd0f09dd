"""The tokens of an episode, in the order in which they came, and who wrote each. Nothing is ever tokenized again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hone.data.types import StopReason
from hone.errors import InvariantError
from hone.generation.protocol import Completion


@dataclass(frozen=True)
class SampledTurn:
    """One turn of the policy.

    Attributes:
        start: its first token, counted from the end of the prompt.
        stop: behind its last token.
        stop_reason: why it ended.
    """

    start: int
    stop: int
    stop_reason: StopReason


class TokenLedger:
    """Token ids of one conversation: the prompt, and behind it by turns what was sampled and what was put in.

    It only ever grows at its end, so the tokens after turn k are an exact prefix of those after turn k + 1.

    >>> from hone.data.types import StopReason
    >>> ledger = TokenLedger([1, 2])
    >>> ledger.add_sampled(ledger.ids, Completion("a", [3, 4], [-0.5, -0.25], [-0.5, -0.25], StopReason.STOP))
    >>> ledger.add_given([5])
    >>> ledger.ids, ledger.mask, ledger.log_probs
    ([1, 2, 3, 4, 5], [1, 1, 0], [-0.5, -0.25, 0.0])

    Args:
        prompt_ids: what the model is given at first.

    Attributes:
        response_ids: everything behind the prompt, length T.
        mask: 1 on sampled tokens, length T.
        log_probs: of sampled tokens under the policy, 0 elsewhere, length T.
        sampling_log_probs: of sampled tokens under the distribution really drawn from, 0 elsewhere, length T.
        turns: what was sampled.
        versions: lowest and highest version of the weights that sampled.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        if not prompt_ids:
            raise ValueError("a conversation begins with at least one token")
        self.prompt_ids = list(prompt_ids)
        self.response_ids: list[int] = []
        self.mask: list[int] = []
        self.log_probs: list[float] = []
        self.sampling_log_probs: list[float] = []
        self.turns: list[SampledTurn] = []
        self.versions: tuple[int, int] | None = None

    @property
    def ids(self) -> list[int]:
        """All tokens: the prompt of the next turn."""
        return self.prompt_ids + self.response_ids

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    def add_sampled(self, prompt: Sequence[int], completion: Completion) -> None:
        """Add what the policy sampled behind ``prompt``, which must be exactly what the ledger holds.

        Raises:
            InvariantError: the prompt is another, or tokens and log-probs differ in number.
        """
        count = len(completion.token_ids)
        if len(prompt) != len(self) or list(prompt) != self.ids:
            raise InvariantError(
                f"turn {len(self.turns)} was sampled behind {len(prompt)} tokens, the episode holds {len(self)}, and they are "
                "not the same",
                code="D-prefix",
                why="log-probs would belong to another conversation",
                fix="ask for the next turn with Episode.generate, which takes the episode's own tokens",
            )
        if len(completion.log_probs) != count or len(completion.sampling_log_probs) != count:
            raise InvariantError(
                f"the engine gave {len(completion.log_probs)} log-probs for {count} tokens",
                code="D-prefix",
                why="every sampled token is trained on with its own log-prob",
                fix="check the engine",
            )
        start = len(self.response_ids)
        self.response_ids += completion.token_ids
        self.mask += [1] * count
        self.log_probs += completion.log_probs
        self.sampling_log_probs += completion.sampling_log_probs
        self.turns.append(SampledTurn(start, start + count, completion.stop_reason))
        first, last = completion.weight_versions
        low, high = self.versions or (first, last)
        self.versions = (min(low, first), max(high, last))

    def add_given(self, ids: Sequence[int]) -> None:
        """Add what the policy did not write: tool results, user turns, the template's marks between them."""
        self.response_ids += ids
        self.mask += [0] * len(ids)
        self.log_probs += [0.0] * len(ids)
        self.sampling_log_probs += [0.0] * len(ids)

    @property
    def sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(self.mask)

    @property
    def trained_length(self) -> int:
        """Length of the response up to its last sampled token: what comes behind teaches nothing."""
        return max((turn.stop for turn in self.turns if turn.stop > turn.start), default=0)
