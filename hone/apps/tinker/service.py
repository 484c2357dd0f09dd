"""Models in training, their operations in the order of the client, and sampling sessions."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from hone.apps.tinker import wire
from hone.apps.tinker.adapters import AdamSettings, AdapterSet, AdapterShape, Datum, loss_named, shape_of
from hone.apps.tinker.sampling import Sampler
from hone.data.seeding import derive_seed
from hone.data.types import StopReason
from hone.errors import HoneError, RequestError
from hone.generation.protocol import GenerationRequest, SamplingParams

KEPT_SECONDS, KEPT_BYTES = 3600.0, 256 * 2**20
"""How long a result is kept, and how many bytes of results: beyond them, those that were fetched go first, then the oldest."""
_OVERHEAD = 2**11
"""Bytes of a result besides its protobuf."""


@dataclass(frozen=True)
class Result:
    """A result of a request: JSON, or a message of the protocol's protobuf."""

    json: dict[str, Any] | None = None
    protobuf: bytes | None = None


@dataclass(frozen=True)
class Failure:
    """The error of a request; ``user`` if the request was wrong."""

    message: str
    user: bool


@dataclass
class TrainedModel:
    """An adapter in training."""

    adapter: str
    rank: int  # of the adapter
    used: float  # when it, or its session, was last heard of
    following: int = 1  # number of the next operation
    # events of operations that came before their turn, by number
    arrived: dict[int, asyncio.Event] = field(default_factory=dict)
    # numbers of requests that were refused; the client may repeat one, or send the next
    refused: set[int] = field(default_factory=set)
    about: Mapping[str, Any] = field(default_factory=dict)  # metadata of the client

    def pass_refused(self) -> None:
        """Give the turn to the next operation that was not refused."""
        while self.following in self.refused:
            self.refused.discard(self.following)
            self.following += 1
        if event := self.arrived.pop(self.following, None):
            event.set()


class Futures:
    """Futures by name, on the event loop that computes them."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Result | Failure]] = {}
        self._ended: dict[str, float] = {}
        self._fetched: dict[str, None] = {}
        self._bytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._tasks

    def start(self, name: str, work: Coroutine[Any, Any, Result]) -> None:
        """Begin a request, unless one of that name has begun: a client repeats a request whose answer it did not get."""
        self._forget_old()
        if name in self._tasks:
            work.close()
            return
        task = self._tasks[name] = asyncio.get_running_loop().create_task(_outcome(work))
        task.add_done_callback(lambda task: self._end(name, task))

    def _end(self, name: str, task: asyncio.Task[Result | Failure]) -> None:
        self._ended[name] = time.monotonic()
        self._bytes += _size(task)
        while self._bytes > KEPT_BYTES and len(self._ended) > 1:
            self._forget(next(iter(self._fetched), next(iter(self._ended))))

    def _forget(self, name: str) -> None:
        self._bytes -= _size(self._tasks.pop(name))
        self._fetched.pop(name, None)
        del self._ended[name]

    async def wait(self, name: str, seconds: float) -> Result | Failure | None:
        """Return the outcome of a request, or None if it is not there within ``seconds``.

        Raises:
            KeyError: there is no request of that name, or its outcome is no longer kept.
        """
        task = self._tasks[name]
        done, _ = await asyncio.wait([task], timeout=seconds)
        if name in self._ended:
            self._fetched[name] = None
        return task.result() if done else None

    def cancel(self, name: str) -> None:
        """End a request, if it is under way."""
        if name in self._tasks:
            self._tasks[name].cancel()

    def _forget_old(self) -> None:
        limit = time.monotonic() - KEPT_SECONDS
        while self._ended and self._ended[oldest := next(iter(self._ended))] < limit:
            self._forget(oldest)


def _size(task: asyncio.Task[Result | Failure]) -> int:
    outcome = None if task.cancelled() else task.result()
    return _OVERHEAD + len(getattr(outcome, "protobuf", None) or b"")


async def _outcome(work: Coroutine[Any, Any, Result]) -> Result | Failure:
    try:
        return await work
    except asyncio.CancelledError:
        return Failure("cancelled", user=True)
    except HoneError as error:
        return Failure(str(error), user=True)
    except Exception as error:
        log.exception("a request failed")
        return Failure(f"{type(error).__name__}: {error}", user=False)


SCHEME = "tinker://"
MODEL = re.compile(r"[A-Za-z0-9_-]{1,64}:train:[0-9]{1,9}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_KINDS = ("weights", "sampler_weights")
_NEW, _OLD, _UNSAVED, _ABOUT = ".new", ".old", "unsaved", "run.json"


class SavedWeights:
    """Folder of saved weights; opening it finishes what a kill interrupted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._recover()

    def _recover(self) -> None:
        """Finish replacements that a kill interrupted, remove unfinished files, and say which models were not saved."""
        for half in self._folder.glob("*/*/.*-*") if not self._folder.is_symlink() else ():
            state, _, name = half.name.partition("-")
            if any(part.is_symlink() for part in (half, *list(half.parents)[:2])) or state not in (_NEW, _OLD):
                continue
            if state == _OLD and not (half.parent / name).exists():
                half.rename(half.parent / name)
            else:
                shutil.rmtree(half)
        for mark in sorted((self._folder / _UNSAVED).glob("*")):
            log.warning(
                "'%s' was in training when the server ended: what it learned after its last save is lost", mark.name
            )
            mark.unlink()

    def mark(self, model: str, *, unsaved: bool) -> None:
        """Note on the disk that a model has, or no longer has, weights that are not saved."""
        mark = self._folder / _UNSAVED / model
        try:
            if unsaved:
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.touch()
            else:
                mark.unlink(missing_ok=True)
        except OSError as error:
            raise _unwritable(error) from error

    def write(
        self, adapters: AdapterSet, trained: TrainedModel, model: str, kind: str, name: str, *, overwrite: bool
    ) -> Path:
        """Save an adapter under another name, and rename its folder when it is whole; return the folder.

        Raises:
            RequestError: the name is none, or has weights already, or a weight is not finite, or the disk is full.
        """
        folder = self._place(model, kind, name)
        new, old = (folder.with_name(f"{state}-{name}") for state in (_NEW, _OLD))
        if folder.exists() and not overwrite:
            raise RequestError(f"{kind} '{name}' of this model exist already", field="path")
        try:
            adapters.save(trained.adapter, new, optimizer=kind == "weights")
            (new / _ABOUT).write_text(json.dumps(trained.about))
            for file in new.iterdir():
                with file.open("rb") as written:
                    os.fsync(written.fileno())
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
        except BaseException as error:
            shutil.rmtree(new, ignore_errors=True)
            if old.exists() and not folder.exists():
                old.rename(folder)
            if isinstance(error, OSError | SafetensorError):
                raise _unwritable(error) from error
            raise
        shutil.rmtree(old, ignore_errors=True)
        if kind == "weights":
            self.mark(model, unsaved=False)
        return folder

    def find(self, path: str) -> Path:
        """Return the folder of saved weights."""
        model, _, rest = path.removeprefix(SCHEME).partition("/")
        kind, _, name = rest.partition("/")
        if not path.startswith(SCHEME) or not rest:
            raise RequestError(f"'{path}' is not a path of saved weights", field="path")
        folder = self._place(model, kind, name)
        if not folder.exists():
            raise RequestError(f"there are no weights at '{path}'", field="path")
        return folder

    def remove(self, path: str) -> Path:
        """Delete saved weights; return the folder that they were in."""
        folder = self.find(path)
        unfinished = folder.with_name(f"{_NEW}-{folder.name}")  # what a kill leaves of it is removed at the next start
        try:
            folder.rename(unfinished)
            shutil.rmtree(unfinished)
        except OSError as error:
            raise _unwritable(error) from error
        return folder

    def about(self, model: str) -> tuple[float, dict[str, Any]]:
        """Return the time of the newest weights of a model, and the metadata of its client."""
        files = self._folder.glob(f"{model}/*/*/{_ABOUT}") if MODEL.fullmatch(model) else ()
        newest = max(files, key=lambda file: file.stat().st_mtime, default=None)
        if newest is None:
            raise RequestError(f"there are no weights of a model '{model[:80]}'", field="training_run_id")
        file = self._place(model, *newest.parts[-3:-1]) / _ABOUT
        return file.stat().st_mtime, json.loads(file.read_text())

    def _place(self, model: str, kind: str, name: str) -> Path:
        """Return the folder of weights, from names that a client gave: below the service's own, and through no link."""
        if not _NAME.fullmatch(name) or set(name) == {"."}:
            raise RequestError(f"'{name[:80]}' is not a name of letters, digits, '.', '_' and '-'", field="path")
        if not MODEL.fullmatch(model) or kind not in _KINDS:
            raise RequestError(f"'{model[:80]}/{kind[:80]}' is not a model with saved weights", field="path")
        folder = self._folder / model / kind / name
        if any(part.is_symlink() for part in (folder, *list(folder.parents)[:2])):
            raise RequestError(f"{kind} '{name}' of this model is a link, which is not followed", field="path")
        return folder


def _unwritable(error: Exception) -> RequestError:
    return RequestError(
        f"the server's disk cannot be written ({error})",
        why="nothing was changed",
        fix="free space there, then send it again as the next operation",
    )


_SESSION = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MOST_SESSIONS = 2**16
"""Sampling sessions; the one that was not used for the longest time is forgotten."""
_MOST_WAITING = 4096
"""Operations of a model that wait for those before them."""
ABANDONED_SECONDS = 3600.0
"""Time after which an adapter is dropped whose client was not heard of."""
log = logging.getLogger("hone.serve")


@dataclass(frozen=True)
class ServiceLimits:
    max_model_len: int  # tokens of a sequence
    max_rank: int = 128  # of an adapter
    max_adapters: int = 16  # adapters in training at once


def _model_name(session: Any, number: Any) -> str:
    """Return the name of a model, which is also that of its folder."""
    if not isinstance(session, str) or not _SESSION.fullmatch(session):
        raise RequestError("session_id has letters, digits, '_' and '-' only, 64 at most", field="session_id")
    if type(number) is not int or not 0 <= number < 10**9:
        raise RequestError("model_seq_id is a number from 0 to 999999999", field="model_seq_id")
    return f"{session}:train:{number}"


class TrainingService:
    """Trains adapters of one model, and samples from what was saved. All methods run on the engine's event loop."""

    def __init__(
        self,
        name: str,  # of the base model, as clients name it
        adapters: AdapterSet,
        sampler: Sampler,
        folder: Path,  # where weights are saved: ``<folder>/<model>/<weights or sampler_weights>/<name>``
        *,
        stop_token_ids: Sequence[int],  # tokens that end a response
        limits: ServiceLimits,
        tokenizer: str,  # directory or name from which a client on this machine loads the tokenizer
    ) -> None:
        self.tokenizer = tokenizer
        self.name, self.limits, self.futures = name, limits, Futures()
        self._adapters, self._sampler, self._saved = adapters, sampler, SavedWeights(folder)
        self._stop_token_ids = tuple(stop_token_ids)
        self._models: dict[str, TrainedModel] = {}
        self._sessions: OrderedDict[str, Path | None] = OrderedDict()
        self._numbers = 0

    # sessions and models ---------------------------------------------------------------------------------------------

    def create_session(self) -> str:
        """Return the name of a new session of a client."""
        return f"session-{secrets.token_hex(8)}"

    def create_model(
        self,
        session: str,
        number: int,
        base: str,
        shape: AdapterShape,
        seed: int | None,
        about: Mapping[str, Any] | None = None,
    ) -> str:
        """Begin to create an adapter; return the model's name, which is also that of the future.

        ``number`` is that of the model within the session. A ``seed`` of None derives one from the model's name. ``about`` is
        metadata that is kept with saved weights.
        """
        model = _model_name(session, number)

        async def create() -> Result:
            self._check_base(base)
            self._add(model, shape, derive_seed(0, model) if seed is None else seed, about)
            return Result({"model_id": model, "type": "create_model"})

        self.futures.start(model, create())
        return model

    def _check_base(self, base: str | None) -> None:
        if base is not None and base != self.name:
            raise RequestError(
                f"this server has no model '{base}'", fix=f"base_model='{self.name}'", field="base_model"
            )

    def _add(self, model: str, shape: AdapterShape, seed: int, about: Mapping[str, Any] | None) -> None:
        if not 1 <= shape.rank <= self.limits.max_rank:
            raise RequestError(f"rank {shape.rank} is not in 1 to {self.limits.max_rank}", field="lora_config.rank")
        self._drop_abandoned()
        if len(self._models) >= self.limits.max_adapters:
            raise RequestError(
                f"{len(self._models)} adapters are in training, the most of this server",
                fix="unload one, or start the server with a larger --max-adapters",
            )
        self._numbers += 1
        adapter = f"hone_training_{self._numbers}"
        self._adapters.add(adapter, shape, seed=seed % 2**63)
        self._models[model] = TrainedModel(adapter, shape.rank, time.monotonic(), about=about or {})

    def info(self, model: str) -> dict[str, Any]:
        data = {"arch": "causal_lm", "model_name": self.name, "tokenizer_id": self.tokenizer}
        rank = self._model(model).rank
        return {"model_id": model, "model_data": data, "is_lora": True, "lora_rank": rank, "model_name": self.name}

    def _model(self, name: str) -> TrainedModel:
        if name not in self._models:
            raise RequestError(f"there is no model '{name}' in training", field="model_id")
        return self._models[name]

    def heard_of(self, session: str) -> None:
        """Note that the client of a session lives."""
        for name, model in self._models.items():
            if name.startswith(f"{session}:"):
                model.used = time.monotonic()

    def _drop_abandoned(self) -> None:
        """Save and drop the adapters of clients that were not heard of for an hour."""
        for name, model in list(self._models.items()):
            if time.monotonic() - model.used > ABANDONED_SECONDS:
                path = f"abandoned-{model.following}"
                try:
                    self._saved.write(self._adapters, model, name, "weights", path, overwrite=False)
                    log.warning("'%s' was not heard of for an hour: saved as '%s', and dropped", name, path)
                except RequestError as error:  # weights that are not finite, or saved under this name
                    log.warning("'%s' was not heard of for an hour: dropped, not saved (%s)", name, error.what)
                self._drop(name)

    def _drop(self, model: str) -> None:
        trained = self._models.pop(model)
        self._adapters.remove(trained.adapter)
        self._sampler.activate()
        self._saved.mark(model, unsaved=False)
        for event in trained.arrived.values():
            event.set()

    # operations ------------------------------------------------------------------------------------------------------

    def submit(self, model: str, number: int, compute: Callable[[TrainedModel], Result]) -> str:
        """Begin an operation of a model, in its turn, by its number from 1 on; return the name of its future."""
        name = f"{model}:{number}"
        self.futures.start(name, self._in_turn(model, number, compute))
        return name

    def refuse(self, model: str, number: int) -> None:
        """Note that a request for an operation was refused: later ones do not wait for it."""
        trained = self._models.get(model)
        if trained is not None and trained.following <= number < trained.following + _MOST_WAITING:
            trained.refused.add(number)
            if trained.arrived:
                trained.pass_refused()

    async def _in_turn(self, model: str, number: int, compute: Callable[[TrainedModel], Result]) -> Result:
        trained = self._model(model)
        if number < trained.following:
            raise RequestError(f"operation {number} of this model has ended, its result is not kept", field="seq_id")
        trained.refused.discard(number)
        trained.pass_refused()
        if number > trained.following:
            if len(trained.arrived) >= _MOST_WAITING:
                raise RequestError(
                    f"{_MOST_WAITING} operations of this model wait already", fix=f"send operation {trained.following}"
                )
            await trained.arrived.setdefault(number, asyncio.Event()).wait()
            self._model(model)
        trained.used = time.monotonic()
        try:
            return compute(trained)
        finally:
            self._sampler.activate()
            trained.following = number + 1
            if trained.arrived:
                trained.pass_refused()

    def forward_backward(
        self,
        model: str,
        number: int,
        data: Sequence[Datum],
        loss: str,
        settings: Mapping[str, float],
        *,
        backward: bool,
    ) -> str:
        """Begin a forward pass, and a backward pass that adds to the gradient."""

        def compute(trained: TrainedModel) -> Result:
            for place, datum in enumerate(data):
                self._check_length(len(datum.tokens) + 1, f"datum {place}")
            chosen, complete = loss_named(loss, settings)
            if backward:
                self._saved.mark(model, unsaved=True)
            passed = self._adapters.forward_backward(trained.adapter, data, chosen, complete, backward=backward)
            return Result(protobuf=wire.forward_backward_output(passed))

        return self.submit(model, number, compute)

    def optim_step(self, model: str, number: int, settings: AdamSettings) -> str:
        """Begin an update by AdamW."""

        def compute(trained: TrainedModel) -> Result:
            self._saved.mark(model, unsaved=True)
            return Result({"metrics": self._adapters.step(trained.adapter, settings)})

        return self.submit(model, number, compute)

    def save(self, model: str, number: int, name: str | None, kind: str, *, overwrite: bool = False) -> str:
        """Begin to save an adapter; a name of None saves it for one sampling session.

        The kind is ``weights``, with the state of the optimizer, or ``sampler_weights``.
        """

        def compute(trained: TrainedModel) -> Result:
            stored = name if name is not None else f"step-{number}"
            folder = self._saved.write(self._adapters, trained, model, kind, stored, overwrite=overwrite)
            self._sampler.forget(folder)
            path = f"{SCHEME}{model}/{kind}/{stored}"
            if kind == "weights":
                return Result({"path": path, "type": "save_weights"})
            answer: dict[str, Any] = {"path": path, "type": "save_weights_for_sampler"}
            if name is None:
                answer["sampling_session_id"] = self._open(folder)
            return Result(answer)

        return self.submit(model, number, compute)

    def load(self, model: str, number: int, path: str, *, optimizer: bool) -> str:
        """Begin to load saved weights into an adapter of the same shape."""

        def compute(trained: TrainedModel) -> Result:
            self._adapters.load(trained.adapter, self._saved.find(path), optimizer=optimizer)
            return Result({"path": path, "model_id": model, "type": "load_weights"})

        return self.submit(model, number, compute)

    def create_from(
        self,
        session: str,
        number: int,
        path: str,
        base: str | None,
        *,
        optimizer: bool,
        about: Mapping[str, Any] | None = None,
    ) -> str:
        """Begin to create an adapter with saved weights; return the name of the future."""
        model = _model_name(session, number)

        async def create() -> Result:
            self._check_base(base)
            folder = self._saved.find(path)
            self._add(model, shape_of(folder), 0, about)
            try:
                self._adapters.load(self._models[model].adapter, folder, optimizer=optimizer)
            except BaseException:
                self._drop(model)
                raise
            self._sampler.activate()
            return Result({"path": path, "model_id": model, "type": "load_weights"})

        self.futures.start(model, create())
        return model

    def unload(self, model: str) -> str:
        """Begin to drop an adapter; return the name of the future."""
        name = f"{model}:unload"

        async def drop() -> Result:
            self._model(model)
            self._drop(model)
            return Result({"model_id": model, "type": "unload_model"})

        self.futures.start(name, drop())
        return name

    # sampling --------------------------------------------------------------------------------------------------------

    def create_sampling_session(self, base: str | None, path: str | None) -> str:
        """Return the name of a new sampling session of saved weights, or of the base model without a path."""
        self._check_base(base)
        return self._open(None if path is None else self._saved.find(path))

    def _open(self, weights: Path | None) -> str:
        self._numbers += 1
        name = f"sampling-{self._numbers}-{secrets.token_hex(4)}"
        self._sessions[name] = weights
        if len(self._sessions) > _MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return name

    def sampler(self, name: str) -> dict[str, Any]:
        weights = self._weights_of(name)
        path = None if weights is None else SCHEME + "/".join(weights.parts[-3:])
        return {"sampler_id": name, "base_model": self.name, "model_path": path}

    def training_run(self, model: str) -> dict[str, Any]:
        """Describe a model with saved weights, which need not be in training."""
        seconds, about = self._saved.about(model)
        run = {"training_run_id": model, "base_model": self.name, "model_owner": "", "is_lora": True}
        return {**run, "last_request_time": datetime.fromtimestamp(seconds, UTC).isoformat(), "user_metadata": about}

    def delete(self, path: str) -> dict[str, Any]:
        """Delete saved weights; requests under way still use them."""
        self._sampler.forget(self._saved.remove(path))
        return {}

    def weights_info(self, path: str) -> dict[str, Any]:
        shape = shape_of(self._saved.find(path))
        trains = {"train_attn": shape.attention, "train_mlp": shape.mlp, "train_unembed": shape.unembedding}
        return {"base_model": self.name, "is_lora": True, "lora_rank": shape.rank, **trains}

    def _weights_of(self, session: str) -> Path | None:
        if session not in self._sessions:
            raise RequestError(f"there is no sampling session '{session}'", field="sampling_session_id")
        self._sessions.move_to_end(session)
        return self._sessions[session]

    def sample(self, request: Mapping[str, Any]) -> tuple[str, list[str]]:
        """Begin to sample; return the name of the future, and a name for each sequence."""
        session, number = request.get("sampling_session_id"), request.get("seq_id")
        if session not in self._sessions or number is None:  # a name of another kind would take that of an operation
            self._numbers += 1
            name = f"sample-{self._numbers}-{secrets.token_hex(4)}"
        else:
            name = f"{session}:{number}"
        self.futures.start(name, self._sample(name, request))
        return name, [f"{name}:{index}" for index in range(request.get("num_samples", 1))]

    def cancel(self, name: str) -> None:
        """End the request of a sample; operations of models are never left out, because those after them depend on them."""
        if name.startswith(("sampling-", "sample-")):
            self.futures.cancel(name)

    async def _sample(self, name: str, request: Mapping[str, Any]) -> Result:
        session = request.get("sampling_session_id")
        if session is None:
            path = request.get("model_path")
            self._check_base(request.get("base_model"))
            weights = None if path is None else self._saved.find(path)
        else:
            weights = self._weights_of(session)
        for unserved in ("topk_prompt_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k"):
            if request.get(unserved):
                raise RequestError(f"this server cannot serve '{unserved}'", field=unserved)
        prompt = _tokens(request["prompt"], self._adapters.vocabulary)
        params = self._params(request["sampling_params"], request.get("topk_sample_logprobs", 0), len(prompt))
        seed = request["sampling_params"].get("seed")
        seed = secrets.randbits(62) if seed is None else seed
        requests = [
            GenerationRequest(f"{name}:{index}", prompt, params, derive_seed(seed, index))
            for index in range(request.get("num_samples", 1))
        ]
        prompt_log_probs = await self._prompt_log_probs(weights, prompt) if request.get("prompt_logprobs") else None
        completions = await asyncio.gather(*(self._sampler.complete(weights, one) for one in requests))
        sequences = [
            {
                "tokens": completion.token_ids,
                "log_probs": completion.log_probs,
                "stopped": completion.stop_reason is StopReason.STOP,
                "likeliest": completion.alternatives,
            }
            for completion in completions
        ]
        return Result(protobuf=wire.sample_response(sequences, prompt_log_probs))

    def _params(self, given: Mapping[str, Any], top_log_probs: int, prompt: int) -> SamplingParams:
        self._check_length(prompt + 1, "the prompt with one token of an answer")
        room = self.limits.max_model_len - prompt
        most = given.get("max_tokens", room)
        self._check_length(prompt + most, "prompt and max_tokens")
        stop = given.get("stop")
        texts = (stop,) if isinstance(stop, str) else tuple(part for part in stop or () if isinstance(part, str))
        ids = tuple(part for part in stop or () if not isinstance(part, str)) if not isinstance(stop, str) else ()
        return SamplingParams(
            max_tokens=most,
            temperature=given.get("temperature", 1.0),
            top_k=given.get("top_k", -1),
            top_p=given.get("top_p", 1.0),
            stop=texts,
            stop_token_ids=self._stop_token_ids if stop is None else ids,
            ignore_eos=stop is not None and not ids,
            top_log_probs=top_log_probs,
        )

    async def _prompt_log_probs(self, weights: Path | None, prompt: Sequence[int]) -> list[float | None]:
        if len(prompt) == 1:
            return [None]
        return [None, *await self._sampler.score(weights, Datum(prompt[:-1], prompt[1:], {}))]

    def _check_length(self, tokens: int, what: str) -> None:
        if tokens > self.limits.max_model_len:
            raise RequestError(
                f"{what}: {tokens} tokens, the most of this server is {self.limits.max_model_len}",
                fix="shorter sequences, or a server with a larger --max-model-len",
            )


def _tokens(prompt: Mapping[str, Any], vocabulary: int) -> list[int]:
    tokens: list[int] = []
    for chunk in prompt.get("chunks") or ():
        if "tokens" not in chunk:
            raise RequestError("the prompt has a chunk that is not text", field="prompt")
        tokens += chunk["tokens"]
    if not tokens:
        raise RequestError("the prompt has no tokens", field="prompt")
    if not 0 <= min(tokens) <= max(tokens) < vocabulary:
        raise RequestError(f"the prompt has ids that are not in 0 to {vocabulary - 1}", field="prompt")
    return tokens
