"""Construction of the configured speculation, and drafts by a small model of the same vocabulary, with a KV cache of its own."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from hone.config.limits import PREFILL_TOKENS
from hone.config.model import ModelConfig
from hone.config.rollout import SpeculativeConfig
from hone.generation.native.cache import KVCache, closing_moves, with_spare
from hone.generation.native.contexts import DecodeContext, Part, Prefill, RowExtent
from hone.generation.native.sampler import RowSampling, sample
from hone.generation.native.scheduler import Job
from hone.generation.native.sessions import SessionCache
from hone.generation.native.speculative.drafts import Drafter, DraftRow, Speculation
from hone.generation.native.speculative.verification import DraftedContext, Places
from hone.models.attention.packed import PackedContext
from hone.models.heads import PolicyHead, autocast
from hone.models.inputs import PackedSequences
from hone.models.llama.choice import generation_forward
from hone.models.loading import load_policy
from hone.models.module_forward import Forward
from hone.models.registry import family_of


@dataclass
class _Slot:
    """A row of the draft model's cache."""

    job: Job  # whose tokens it has
    length: int = 0  # number of its prompt and sampled tokens in the cache
    drafts: Sequence[int] = ()  # tokens in the cache after these

    @property
    def end(self) -> int:
        """Number of tokens in the cache."""
        return self.length + len(self.drafts)

    def accept(self, ids: Sequence[int]) -> None:
        """Count the drafts that the policy sampled, too, given all tokens ``ids``; the last of them is always computed again."""
        pairs = zip(self.drafts, ids[self.length :], strict=False)
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.length, self.drafts = min(self.length + right, len(ids) - 1), ()


class ModelDrafter:
    """Drafts of a causal language model.

    Each is sampled with the draw that the policy uses at that position: where both agree on a distribution they choose the same token.

        slot    tokens of the row    in the cache            computed next
        0       [p p p p s s]        [p p p p s] [d d]       what follows the last right draft, then new drafts one by one
        1       [q q s]              [q q] [d]

    Args:
        model: the draft model, which uses Hone's attention; its cache has one entry a token.
        trainer: trains it whenever the policy has new weights; None keeps it as it is.
    """

    def __init__(
        self, model: nn.Module, *, device: torch.device, dtype: torch.dtype, trainer: DraftTrainer | None = None
    ) -> None:
        self._device, self._trainer = device, trainer
        causal: Any = model
        config = causal.get_decoder().config
        self._vocabulary: int = causal.get_input_embeddings().num_embeddings
        self._forward: Forward = generation_forward(causal, dtype=dtype)
        self._cache = KVCache(device, dtype, functools.partial(family_of(config.model_type).layer_cache, config))
        sessions: SessionCache[Any] = SessionCache(0)
        counters: dict[str, int] = {"prefill_tokens": 0}
        self._prefill = Prefill(self._forward, sessions, counters, device=device, max_tokens=PREFILL_TOKENS)
        self._slots: list[_Slot] = []
        self._sampling: RowSampling | None = None

    def draft(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        if not rows:
            return []
        with self._forward.computing():
            by_job = {row.job: row for row in rows}
            self._place(by_job)
            ordered = [by_job[slot.job] for slot in self._slots]
            drafts = self._compute(ordered)
        by_slot = {slot.job: tokens for slot, tokens in zip(self._slots, drafts, strict=True)}
        for slot, row, tokens in zip(self._slots, ordered, drafts, strict=True):
            slot.length, slot.drafts = len(row.ids), tokens[:-1]
        return [by_slot[row.job][: row.most] for row in rows]

    def end(self, job: Job, ids: list[int]) -> None:
        """Keep the response for training; the slot of the job is reused when other rows are drafted."""
        sampling = job.request.sampling
        if self._trainer is not None and all(0 <= token < self._vocabulary for token in ids):
            self._trainer.add(Example(ids, len(job.request.prompt_ids), sampling.temperature))

    def begin_version(self) -> None:
        """Train the draft model on the responses since the last version."""
        if self._trainer is not None and self._trainer.train() is not None:
            self._drop()

    def _drop(self) -> None:
        """Drop what the weights have computed, and their fused copies."""
        self._slots, self._sampling = [], None
        self._forward.release()

    def free(self) -> None:
        self._drop()
        self._cache.free()

    def _place(self, rows: dict[Job, DraftRow]) -> None:
        """Give each row a slot, and compute in it all tokens but the last; other jobs lose theirs."""
        most = max(row.most for row in rows.values())
        longest = max(len(row.ids) for row in rows.values()) + most
        removed = {index for index, slot in enumerate(self._slots) if slot.job not in rows}
        if removed:
            gaps, movers = closing_moves(len(self._slots), removed)
            self._cache.copy_rows(movers, gaps, max((self._slots[mover].end for mover in movers), default=0))
            for gap, mover in zip(gaps, movers, strict=True):
                self._slots[gap] = self._slots[mover]
            del self._slots[len(self._slots) - len(removed) :]
        entered = rows.keys() - {slot.job for slot in self._slots}
        new = [row for job, row in rows.items() if job in entered]
        used = len(self._slots)
        self._cache.reserve(used + len(new), longest, used=used, generous=with_spare(longest), limit=1 << 62)
        if removed or new:
            self._slots += [_Slot(row.job) for row in new]
            params = [slot.job.request.sampling for slot in self._slots]
            seeds = [slot.job.request.seed for slot in self._slots]
            self._sampling = RowSampling.from_params(params, seeds, self._device)
        self._catch_up(rows, most)

    def _catch_up(self, rows: dict[Job, DraftRow], most: int) -> None:
        """Compute what a slot lacks, where that is more than the tokens of a step; equal prompts once."""
        first: dict[bytes, int] = {}
        copies: list[tuple[int, int]] = []
        added: list[Part] = []
        for index, slot in enumerate(self._slots):
            ids = rows[slot.job].ids
            slot.accept(ids)
            if slot.length > 0 and len(ids) - slot.length <= most + 2:
                continue
            prompt = slot.job.prompt if slot.length == 0 and len(ids) == len(slot.job.request.prompt_ids) else None
            if prompt is not None and prompt in first:
                copies.append((first[prompt], index))
            else:
                added.append(Part(index, slot.length, self._known(ids[slot.length : -1])))
            if prompt is not None:
                first.setdefault(prompt, index)
            slot.length = len(ids) - 1
        self._prefill.extend(self._cache, added)
        longest = max((self._slots[source].length for source, _ in copies), default=0)
        self._cache.copy_rows([source for source, _ in copies], [target for _, target in copies], longest)

    def _compute(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """Return drafts of the rows, which are in the order of the slots."""
        sampling = self._sampling
        assert sampling is not None
        cached = [slot.length for slot in self._slots]
        fed = [self._known(row.ids[count:]) for row, count in zip(rows, cached, strict=True)]
        places = Places([len(ids) for ids in fed], self._device)
        past = torch.tensor(cached, device=self._device)
        shared = torch.zeros_like(past)
        lengths = [len(row.ids) for row in rows]
        context: DecodeContext = DraftedContext(self._cache, past, shared, max(lengths), None, places)
        ids = torch.tensor([[token for tokens in fed for token in tokens]], device=self._device)
        logits = self._forward.logits(ids, context)[0, places.first + places.lengths - 1]
        counters = torch.tensor([row.sampled for row in rows], device=self._device)
        past, extent = torch.tensor(lengths, device=self._device), RowExtent(min(lengths), max(lengths), 0)
        drafts: list[Tensor] = []
        for number in range(max(row.most for row in rows)):
            if number:
                context = DecodeContext(self._cache, past, shared, extent, None)
                logits = self._forward.logits(self._clamped(drafts[-1])[:, None], context)[:, -1]
                past, extent = past + 1, RowExtent(extent.shortest + 1, extent.longest + 1, 0)
            drafts.append(sample(self._with_biased(logits), sampling, counters + number, None).tokens)
        return torch.stack(drafts, 1).tolist()

    def _with_biased(self, logits: Tensor) -> Tensor:
        """Return logits with a column for every token with a bias; one that the draft model does not have is never drafted."""
        assert self._sampling is not None
        biased = self._sampling.biased
        missing = int(biased.max()) + 1 - logits.shape[1] if biased.numel() else 0
        return nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing > 0 else logits

    def _known(self, ids: Sequence[int]) -> list[int]:
        """Return the tokens, each that the draft model does not have, those of images included, replaced by its last one."""
        last = self._vocabulary - 1
        return [token if 0 <= token < last else last for token in ids]

    def _clamped(self, tokens: Tensor) -> Tensor:
        return tokens.clamp(max=self._vocabulary - 1)


class _Continuations:
    """For each n-gram of a part of a sequence, the place of the token after its last occurrence."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._places: dict[tuple[int, ...], int] = {}

    def add(self, ids: Sequence[int], first: int, end: int) -> None:
        """Add the n-grams that the tokens ``first .. end - 1`` continue."""
        for place in range(first, end):
            for size in self._sizes:
                if size <= place:
                    self._places[tuple(ids[place - size : place])] = place

    def place(self, ngram: tuple[int, ...]) -> int | None:
        """Return the place of the token after the last occurrence of an n-gram."""
        return self._places.get(ngram)


class _Row:
    """The n-grams of a row: those of its prompt, which rows of the same prompt share, and those of its response."""

    def __init__(self, prompt: _Continuations, response: _Continuations, num_added: int) -> None:
        self.prompt, self.response, self.num_added = prompt, response, num_added


class NgramDrafter(Drafter):
    """Drafts what followed the last tokens before, whatever weights sampled them."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._prompts: WeakValueDictionary[bytes, _Continuations] = WeakValueDictionary()
        self._rows: dict[Job, _Row] = {}

    def draft(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """Return what followed the longest n-gram that occurred before."""
        return [self._draft(row) for row in rows]

    def end(self, job: Job, ids: list[int]) -> None:
        del ids
        self._rows.pop(job, None)

    def _draft(self, row: DraftRow) -> list[int]:
        ids = row.ids
        entry = self._rows.get(row.job) or self._enter(row.job)
        entry.response.add(ids, entry.num_added, len(ids))
        entry.num_added = len(ids)
        for size in range(min(self._longest, len(ids)), self._shortest - 1, -1):
            ngram = tuple(ids[-size:])
            place = entry.response.place(ngram) or entry.prompt.place(ngram)
            if place is not None:
                return _copied(ids, place, row.most)
        return []

    def _enter(self, job: Job) -> _Row:
        prompt_ids = job.request.prompt_ids
        prompt = self._prompts.get(job.prompt)
        if prompt is None:
            prompt = self._prompts[job.prompt] = _Continuations(self._shortest, self._longest)
            prompt.add(prompt_ids, 0, len(prompt_ids))
        row = self._rows[job] = _Row(prompt, _Continuations(self._shortest, self._longest), len(prompt_ids))
        return row


def _copied(ids: Sequence[int], place: int, count: int) -> list[int]:
    """Return ``count`` tokens from ``place`` on; after the end of ``ids`` the copy reads itself, so that a cycle continues."""
    drafts: list[int] = []
    for index in range(place, place + count):
        drafts.append(ids[index] if index < len(ids) else drafts[index - len(ids)])
    return drafts


def speculation_from_config(
    config: SpeculativeConfig, *, device: torch.device, dtype: str, trust_remote_code: bool = False
) -> Speculation | None:
    """Return the configured speculation of an engine, with the draft model loaded; None without one."""
    if config.method is None:
        return None
    drafter: Drafter = NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
    if config.method == "draft_model":
        settings = ModelConfig(path=config.model, trust_remote_code=trust_remote_code)
        model = load_policy(settings, device=device, seed=0, trainable=False)
        trainer = None
        if config.draft_lr > 0:
            trainer = DraftTrainer(model, learning_rate=config.draft_lr, device=device, dtype=dtype)
        drafter = ModelDrafter(model, device=device, dtype=getattr(torch, dtype), trainer=trainer)
    return Speculation(drafter, num_tokens=config.num_speculative_tokens, max_rows=config.disable_by_batch_size)


MAX_TOKENS = 1 << 18
"""Most tokens that are kept for the next training; older responses are dropped."""
MICRO_BATCH_TOKENS = 4096
"""Most tokens of an update, if every response has fewer."""
_GRADIENT_NORM = 1.0


class Example(NamedTuple):
    """A response of the policy."""

    ids: list[int]  # prompt and sampled tokens
    first: int  # place of the first sampled token
    temperature: float  # at which it was sampled


class DraftTrainer:
    """Fits a draft model to the policy's samples: cross-entropy of the sampled tokens at their temperature, by AdamW."""

    def __init__(
        self,
        model: nn.Module,  # the draft model, float32
        *,
        learning_rate: float,  # of AdamW
        device: torch.device,
        dtype: str,  # of matmuls: float32, bfloat16 or float16
        max_tokens: int = MAX_TOKENS,  # most tokens kept for the next training
    ) -> None:
        self._model, self._device, self._dtype, self._max_tokens = model, device, dtype, max_tokens
        self._parameters = list(model.parameters())
        self._optimizer = torch.optim.AdamW(self._parameters, lr=learning_rate, weight_decay=0.0)
        self._examples: list[Example] = []
        self._tokens = 0

    def add(self, example: Example) -> None:
        """Keep a response for the next training."""
        if example.first < len(example.ids) <= self._max_tokens:
            self._examples.append(example)
            self._tokens += len(example.ids)
        while self._tokens > self._max_tokens:
            self._tokens -= len(self._examples.pop(0).ids)

    def train(self) -> float | None:
        """Take one update per micro-batch of the responses since the last training.

        Return the mean cross-entropy of the micro-batches in nats, each before its update; None without responses.
        """
        examples, self._examples, self._tokens = self._examples, [], 0
        losses = []
        with torch.inference_mode(False), torch.enable_grad():
            for parameter in self._parameters:
                parameter.requires_grad_(True)
            for part in _micro_batches(examples):
                loss = self._loss(part)
                loss.backward()
                nn.utils.clip_grad_norm_(self._parameters, _GRADIENT_NORM)
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=True)
                losses.append(loss.detach())
            for parameter in self._parameters:
                parameter.requires_grad_(False)
        return float(torch.stack(losses).mean()) if losses else None

    def _loss(self, examples: Sequence[Example]) -> Tensor:
        """Return the mean cross-entropy of the sampled tokens of responses of one temperature."""
        with autocast(self._device, self._dtype):
            head = PolicyHead(examples[0].temperature)
            return -head(self._model, _packed(examples, self._device), with_entropy=False)["log_probs"].mean()


def _packed(examples: Sequence[Example], device: torch.device) -> PackedSequences:
    """Pack responses with their prompts end to end."""
    ids = torch.tensor([token for example in examples for token in example.ids], device=device)
    start, targets = 0, []
    for example in examples:
        targets.append(torch.arange(start + example.first, start + len(example.ids)))
        start += len(example.ids)
    index = torch.cat(targets).to(device)
    context = PackedContext.from_lengths([len(example.ids) for example in examples], device)
    return PackedSequences(ids[None], context, index - 1, ids[index], index)


def _micro_batches(examples: Sequence[Example]) -> list[list[Example]]:
    """Divide responses into micro-batches of one temperature and :data:`MICRO_BATCH_TOKENS`, or of one longer response."""
    batches: list[list[Example]] = []
    tokens = 0
    for example in sorted(examples, key=lambda example: example.temperature):
        same = bool(batches) and batches[-1][0].temperature == example.temperature
        if same and tokens + len(example.ids) <= MICRO_BATCH_TOKENS:
            batches[-1].append(example)
            tokens += len(example.ids)
        else:
            batches.append([example])
            tokens = len(example.ids)
    return batches
