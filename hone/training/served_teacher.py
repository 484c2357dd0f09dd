"""Served teachers: log-probs of token ids by OpenAI's completions with vLLM's field ``prompt_logprobs``.

    policy's ids [prompt | response] -> POST /completions {"prompt": ids, "prompt_logprobs": K} -> for each response token its
    log-prob and those of the K likeliest tokens

vLLM's server and `hone serve` answer so. The log-probs are of temperature 1.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hone.config.distillation import TOP_K_MODES, TeacherConfig, TeacherServerConfig
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.errors import HoneError
from hone.models.teacher import IDS, LOG_PROBS, TEACHER, TEACHER_LOG_PROBS, TEACHER_PROMPTS
from hone.rewards.http import JsonService, ServiceError

_PROBED = 256  # tokens whose text is compared with that of the server's tokenizer
_REPLACEMENT = "\ufffd"  # text of a part of a character


class TeacherError(HoneError):
    """A teacher behind a server gives no usable log-probs."""

    code = "E-teacher"


@dataclass(frozen=True)
class ServedModel:
    """A model of a server."""

    name: str
    max_model_len: int | None = None  # most tokens of a request; None if the server does not say


class ServedTeacher:
    """Client of one teacher. ``address``: URL up to ``/v1``, with ``#NAME`` for one of several models."""

    def __init__(self, address: str, config: TeacherServerConfig) -> None:
        self.address = address
        url, _, self._wanted = address.partition("#")
        token = os.environ.get(config.api_key_env)
        self.service = JsonService(url, token=token, timeout=config.timeout, retries=config.retries)
        self._config, self._model = config, None

    async def model(self) -> ServedModel:
        """Return the model of the address; raise TeacherError if the server does not answer, or has no such model."""
        if self._model is None:
            try:
                cards = [dict(card) for card in (await self.service.get("/models"))["data"]]
                names = [str(card["id"]) for card in cards]
            except ServiceError as problem:
                raise self._silent(problem) from problem
            except (KeyError, TypeError, ValueError) as problem:
                raise self._unusable(f"does not list its models at {self.service.url}/models") from problem
            wanted = self._wanted or (names[0] if len(names) == 1 else "")
            if wanted not in names:
                raise TeacherError(
                    f"the teacher's server {self.service.url} has the models {', '.join(names) or 'none'}"
                    + (f", not '{wanted}'" if wanted else ""),
                    why="the address of a teacher is of one model",
                    fix=f"distillation.path={self.service.url}#{names[0] if names else 'NAME'}",
                    where=self.address,
                )
            self._model = ServedModel(wanted, cards[names.index(wanted)].get("max_model_len"))
        return self._model

    async def score(self, prompt: Sequence[int], response: Sequence[int], top: int) -> Scored:
        """Return what the teacher says about the tokens of a response.

        ``top``: number of likeliest tokens, 0 for none.

        Raises TeacherError: no answer after all retries, or fewer log-probs than are needed.
        """
        entries = await self._entries([*prompt, *response], top)
        sampled, ids, log_probs = [], [], []
        for token, entry in zip(response, entries[len(prompt) :], strict=True):
            sampled.append(self._log_prob(entry, token))
            if top:
                likeliest = sorted(((v["logprob"], int(t)) for t, v in entry.items()), key=lambda pair: -pair[0])[:top]
                if len(likeliest) < top:
                    raise self._unusable(f"gives {len(likeliest)} tokens at a place, of {top}")
                log_probs.append([value for value, _ in likeliest])
                ids.append([other for _, other in likeliest])
        if not all(map(math.isfinite, sampled)):
            raise self._unusable("gives a log-prob that is not finite")
        return Scored(sampled, ids, log_probs)

    async def check(self, tokenizer: PreTrainedTokenizerBase, top: int, needed: int) -> None:
        """Raise TeacherError unless the server has the policy's tokenizer, gives ``top`` log-probs and reads ``needed``
        tokens.
        """
        model = await self.model()
        length = model.max_model_len
        if length is not None and length <= needed:
            raise TeacherError(
                f"the teacher '{model.name}' at {self.service.url} reads at most {length} tokens, and the longest prompt with its "
                f"response and one more token has {needed + 1}",
                why="longer answers would have no log-probs",
                fix=f"start the server with --max-model-len {needed + 1}, or a smaller data.max_response_length",
                where=self.address,
            )
        ids = probed_ids(tokenizer, min(_PROBED, (length or _PROBED + 1) - 1))
        entries = await self._entries(ids, top)
        others = []
        for token, entry in zip(ids[1:], entries[1:], strict=True):
            self._log_prob(entry, token)
            text, theirs = str(tokenizer.decode([token])), entry[str(token)].get("decoded_token")
            if theirs is None or _REPLACEMENT in text + theirs:
                continue
            if text.strip() != theirs.strip():
                others.append(f"{token} is {text!r} and {theirs!r}")
        if others:
            raise TeacherError(
                f"the teacher '{model.name}' at {self.service.url} has another tokenizer: of {len(ids) - 1} token ids {len(others)} "
                f"have another text, such as {others[0]}",
                why="the teacher's server gets the token ids that the policy samples",
                fix="a server of a model with the policy's tokenizer; the directory of a teacher may have another one",
                where=self.address,
            )
        if top and (fewest := min(map(len, entries[1:]), default=top)) < top:
            raise self._unusable(f"gives {fewest} tokens at a place, of distillation.topk={top}")

    async def _entries(self, ids: Sequence[int], top: int) -> list[Any]:
        """Return the log-probs at each token by token id; those of the first token are null."""
        if min(ids) < 0:
            raise TeacherError(
                "a row has an image, which a teacher's server does not get",
                fix="a teacher with a directory, or rows without images",
                where=self.address,
            )
        body = {"model": (await self.model()).name, "prompt": list(ids), "max_tokens": 1, "prompt_logprobs": top}
        try:
            answer = await self.service.post("/completions", body)
            entries = answer["choices"][0]["prompt_logprobs"]
        except ServiceError as problem:
            raise self._silent(problem) from problem
        except (KeyError, IndexError, TypeError):
            entries = None
        if not isinstance(entries, list) or len(entries) != len(ids):
            raise self._unusable("gives no log-probs of a prompt's tokens (prompt_logprobs)")
        return entries

    def _log_prob(self, entry: Any, token: int) -> float:
        try:
            return float(entry[str(token)]["logprob"])
        except (KeyError, TypeError, ValueError) as problem:
            raise self._unusable(f"gives no log-prob of token {token}") from problem

    def _silent(self, problem: ServiceError) -> TeacherError:
        return TeacherError(
            f"the teacher's server gives no answer: {problem}",
            why="without log-probs of a teacher nothing can be learnt from it",
            fix="start the server, e.g. `vllm serve MODEL --max-logprobs 128` or `hone serve MODEL`, whose address ends in /v1; a key "
            f"is read from the environment variable {self._config.api_key_env} (distillation.server.api_key_env); for k log-probs "
            "vLLM needs --max-logprobs k",
            where=self.address,
        )

    def _unusable(self, what: str) -> TeacherError:
        return TeacherError(
            f"the teacher's server {self.service.url} {what}",
            why="every token of an answer needs the teacher's log-probs",
            fix="`vllm serve MODEL --max-logprobs 128`, `hone serve MODEL`, or the teacher's directory in place of an address",
            where=self.address,
        )


@dataclass(frozen=True)
class Scored:
    """Log-probs of a response under a teacher."""

    log_probs: list[float]
    top_ids: list[list[int]]  # the likeliest tokens at each, the likeliest first; empty if none are wanted
    top_log_probs: list[list[float]]


class ServedTeachers:
    """All served teachers of a run. ``vocabulary``: size of the policy's output layer; a teacher's tokens have smaller
    ids.
    """

    def __init__(self, distillation: TeacherConfig, vocabulary: int) -> None:
        self._vocabulary, self._config = vocabulary, distillation.server
        self._top = distillation.topk if distillation.loss_mode in TOP_K_MODES else 0
        self._teachers = {
            number: ServedTeacher(address, distillation.server) for number, address in distillation.addresses.items()
        }

    async def columns(self, batch: Batch) -> Batch:
        """Return the columns of :meth:`~hone.cluster.teacher.TeacherWorker.teach`, with the rows of served teachers filled in.

        Raises TeacherError: a server gives no usable log-probs.
        """
        which = batch.tensor(TEACHER).tolist() if TEACHER in batch else [0] * len(batch)
        rows = [row for row, number in enumerate(which) if number in self._teachers]
        prompts = batch.ragged(TEACHER_PROMPTS if TEACHER_PROMPTS in batch else "prompt_ids")
        responses = batch.ragged("response_ids")
        slots = {number: asyncio.Semaphore(self._config.max_concurrent) for number in self._teachers}

        async def score(row: int) -> Scored:
            async with slots[which[row]]:
                teacher = self._teachers[which[row]]
                return await teacher.score(prompts.row(row).tolist(), responses.row(row).tolist(), self._top)

        scored = dict(zip(rows, await _all([score(row) for row in rows]), strict=True))
        if not self._top:
            return self._filled(
                batch, {TEACHER_LOG_PROBS: {row: torch.tensor(s.log_probs) for row, s in scored.items()}}
            )
        ids = {row: torch.tensor(s.top_ids, dtype=torch.int32) for row, s in scored.items()}
        if any(int(one.max()) >= self._vocabulary for one in ids.values()):
            raise TeacherError(
                f"the teacher's server gives a token with an id that the policy does not have (of {self._vocabulary})",
                fix="a server of a model with the policy's tokenizer",
            )
        return self._filled(
            batch, {IDS: ids, LOG_PROBS: {row: torch.tensor(s.top_log_probs) for row, s in scored.items()}}
        )

    def _filled(self, batch: Batch, columns: Mapping[str, Mapping[int, Tensor]]) -> Batch:
        def column(name: str, rows: Mapping[int, Tensor]) -> Ragged:
            return Ragged.from_rows([rows[n] if n in rows else batch.ragged(name).row(n) for n in range(len(batch))])

        return Batch({name: column(name, rows) for name, rows in columns.items()})


def probed_ids(tokenizer: PreTrainedTokenizerBase, count: int) -> list[int]:
    """Return at most ``count`` token ids: up to a quarter are added tokens, the rest is spread over the vocabulary."""
    added = sorted(tokenizer.added_tokens_decoder)[: max(1, count // 4)]
    others = sorted(set(tokenizer.get_vocab().values()) - set(added))
    step = max(1, -(-len(others) // max(1, count - len(added))))
    return sorted({*added, *others[::step]})[:count]


async def _all(work: Iterable[Any]) -> list[Any]:
    """Await coroutines together; the first error cancels the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
