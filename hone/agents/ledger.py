"""Token ledger: exactly the tokens of an episode and which of them were sampled. Nothing is tokenized twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hone.data.types import ExpertIds, StopReason
from hone.errors import InvariantError
from hone.generation.protocol import Completion


@dataclass(frozen=True)
class SampledTurn:
    """Position of one policy turn in the response."""

    start: int  # index of its first token, counted from the end of the prompt
    stop: int  # index after its last token
    stop_reason: StopReason  # reason for its end


class TokenLedger:
    """Token ids of one conversation: the prompt, then sampled and given tokens in order.

    The ledger only grows at its end, so the tokens after turn k are an exact prefix of those after turn k + 1.

    >>> from hone.data.types import StopReason
    >>> ledger = TokenLedger([1, 2])
    >>> ledger.add_sampled(ledger.ids, Completion("a", [3, 4], [-0.5, -0.25], [-0.5, -0.25], StopReason.STOP))
    >>> ledger.add_given([5])
    >>> ledger.ids, ledger.mask, ledger.log_probs
    ([1, 2, 3, 4, 5], [1, 1, 0], [-0.5, -0.25, 0.0])
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        if not prompt_ids:
            raise ValueError("a conversation begins with at least one token")
        self.prompt_ids = list(prompt_ids)
        self.response_ids: list[int] = []  # all tokens after the prompt, length T
        self.mask: list[int] = []  # 1 on sampled tokens, length T
        self.log_probs: list[float] = []  # of sampled tokens under the policy, 0 elsewhere, length T
        # of sampled tokens under the sampling distribution (temperature, top-k, top-p), 0 elsewhere, length T
        self.sampling_log_probs: list[float] = []
        # number of tokens in the support of each sampled token, 0 elsewhere and where it is the whole vocabulary,
        # length T
        self.support_sizes: list[int] = []
        self.support_ids: list[int] = []  # the tokens of all supports
        # the experts of the first tokens, prompt included, as the newest turn reported them; see
        # :attr:`hone.generation.protocol.Completion.expert_ids`
        self.expert_ids: ExpertIds = ()
        self._expert_tokens = 0
        self.turns: list[SampledTurn] = []  # the sampled turns
        self.token_versions: list[int] = []  # weight version that sampled each token, -1 elsewhere, length T

    @property
    def ids(self) -> list[int]:
        """All tokens: the prompt of the next turn."""
        return self.prompt_ids + self.response_ids

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    def add_sampled(self, prompt: Sequence[int], completion: Completion) -> None:
        """Add the policy's completion of ``prompt``, which must equal the ledger's tokens.

        Raises:
            InvariantError: the prompt differs, or tokens and log-probs differ in number.
        """
        count = len(completion.token_ids)
        if len(prompt) != len(self) or list(prompt) != self.ids:
            raise InvariantError(
                f"turn {len(self.turns)} was sampled after {len(prompt)} tokens; the episode has {len(self)}, and the two are "
                "not the same",
                code="D-prefix",
                why="log-probs would be of a different conversation",
                fix="generate turns with Episode.generate, which uses the episode's tokens",
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
        self.support_sizes += completion.support_sizes or [0] * count
        self.support_ids += completion.support_ids
        if len(completion.expert_ids):
            self.expert_ids, self._expert_tokens = completion.expert_ids, len(prompt) + count - 1
        self.turns.append(SampledTurn(start, start + count, completion.stop_reason))
        self.token_versions += completion.token_versions or _versions(completion)

    def add_given(self, ids: Sequence[int]) -> None:
        """Add tokens that the policy did not sample: tool results, user turns, template tokens."""
        self.response_ids += ids
        self.mask += [0] * len(ids)
        self.log_probs += [0.0] * len(ids)
        self.sampling_log_probs += [0.0] * len(ids)
        self.support_sizes += [0] * len(ids)
        self.token_versions += [-1] * len(ids)

    @property
    def versions(self) -> tuple[int, int] | None:
        """Lowest and highest weight version that sampled; None before the first sampled token."""
        sampled = [version for version in self.token_versions if version >= 0]
        return (min(sampled), max(sampled)) if sampled else None

    def experts_of(self, tokens: int) -> ExpertIds:
        """Return the experts of the first ``tokens`` tokens, -1 where no engine reported them; empty if none did."""
        if not self._expert_tokens:
            return ()
        reported = np.asarray(self.expert_ids, dtype=np.int16).reshape(self._expert_tokens, -1)[:tokens]
        unknown = np.full((tokens - len(reported), reported.shape[1]), -1, dtype=np.int16)
        return np.concatenate([reported, unknown]).ravel()

    @property
    def sampled(self) -> int:
        return sum(self.mask)

    @property
    def trained_length(self) -> int:
        """Length of the response up to its last sampled token; later tokens have no loss."""
        return max((turn.stop for turn in self.turns if turn.stop > turn.start), default=0)


def _versions(completion: Completion) -> list[int]:
    """Return the version of each token; where the engine changed it in mid-response, the oldest that is possible."""
    first, last = completion.weight_versions
    return [first] * (len(completion.token_ids) - 1) + [last] if completion.token_ids else []
