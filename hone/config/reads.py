"""Which keys of a configuration a run reads, so that a key which the user set and nothing read can be named.

From :func:`watch` to the end of the first step every access to a key is noted. The blocks stay what they are: while they are
watched, their class is a subclass of their own that notes the access first; afterwards they are plain again. Copies of a
watched block, and what other processes are sent, are plain.

>>> from hone.config import RLConfig, load_config
>>> config = load_config(RLConfig, ["actor_rollout_ref.rollout.n=4", "reward.timeout=5"])
>>> log = watch(config)
>>> config.actor_rollout_ref.rollout.n, log.unread()
(4, ['reward.timeout'])
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hone.config.check import place
from hone.config.keys import KeyDoc, documentation
from hone.config.overrides import COMMAND_LINE
from hone.config.problems import raise_together
from hone.config.trees import AnyConfig
from hone.errors import ConfigError

LATER: dict[str, tuple[str, ...]] = {
    "validation": ("actor_rollout_ref.rollout.val_kwargs.", "trainer.log_val_generations", "data.val_batch_size"),
    "checkpoint": ("trainer.async_save", "trainer.max_ckpt_to_keep", "trainer.best_ckpt_", "trainer.checkpoint_dir"),
    "policy update": (
        "actor_rollout_ref.actor.",
        "actor_rollout_ref.ref.",
        "algorithm.use_pf_ppo",
        "algorithm.pf_ppo.",
    ),
}
"""Keys (beginnings) that are first read when the run validates, saves or (after trainer.critic_warmup) updates the policy,
which may be after the first step."""
UNREAD = "R10"
"""The code of the finding. It is made while the run is under way, but silenced like those made before."""
BEFORE = ("preflight.", "data.train_max_samples", "data.val_max_samples")
"""Keys (beginnings) that are read before the run starts."""

log = logging.getLogger("hone.config")
_watched: dict[int, tuple[ReadLog, str]] = {}


class ReadLog:
    """What has been read of a configuration; made by :func:`watch`.

    Attributes:
        read: dotted paths.
    """

    def __init__(self, config: AnyConfig) -> None:
        self.config = config
        self.read: set[str] = set()
        self.paused = False
        self._tree: type = type(config)
        self._blocks = list(_blocks(config, ""))
        for block, prefix in self._blocks:
            _watched[id(block)] = (self, prefix)
            object.__setattr__(block, "__class__", _recording(type(block)))

    def unread(self, elsewhere: Iterable[str] = ()) -> list[str]:
        """Return the keys that the user set to something else than their default, and that nothing has read or will read.

        Args:
            elsewhere: keys read by other processes of the run.
        """
        with unrecorded():
            seen = {*self.read, *elsewhere}
            defaults = {key.path: key.default for key in documentation(self._tree)}
            values = {path: value for block, prefix in self._blocks for path, value in _values(block, prefix)}
            later = tuple(key for what, keys in LATER.items() if _happens(self.config, what) for key in keys)
            return [
                path
                for path, origin in provenance_of(self.config).items()
                if (origin == COMMAND_LINE or origin.startswith("file "))
                and path in values
                and values[path] != defaults[path]
                and path not in seen
                and not path.startswith((*later, *BEFORE))
            ]

    def finish(self, elsewhere: Callable[[], Iterable[str]] = tuple) -> None:
        """End the watch after the first step; later calls do nothing.

        Args:
            elsewhere: returns the keys read by other processes of the run.

        Raises:
            ConfigError: R10, for every key that the user set and nothing read.
        """
        if not self._blocks or id(self._blocks[0][0]) not in _watched:
            return
        unread = self.unread(elsewhere())
        values = {path: value for block, prefix in self._blocks for path, value in _values(block, prefix)}
        self.stop()
        origins = provenance_of(self.config)
        keys = {key.path: key for key in documentation(self._tree)}
        problems = [_unread(keys[path], values[path], origins[path]) for path in unread]
        if UNREAD not in self.config.preflight.allow:
            raise_together(problems)
        for problem in problems:
            log.warning("%s", problem.render())

    def stop(self) -> None:
        """Make the blocks plain again."""
        for block, _ in self._blocks:
            if _watched.pop(id(block), None) is not None:
                object.__setattr__(block, "__class__", type(block).__mro__[1])


def watch(config: AnyConfig) -> ReadLog:
    """Begin to note which keys of ``config`` are read; the log of a configuration that is watched already goes on."""
    known = _watched.get(id(config))
    return known[0] if known is not None and known[0].config is config else ReadLog(config)


def provenance_of(config: AnyConfig) -> dict[str, str]:
    """Where the values of a loaded configuration were written; empty for one that was made in Python."""
    return getattr(config, "_provenance", {})


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Within the block no access counts: keys are printed or compared, not acted on."""
    logs = {id(log): log for log, _ in _watched.values()}.values()
    before = [(log, log.paused) for log in logs]
    try:
        for log in logs:
            log.paused = True
        yield
    finally:
        for log, paused in before:
            log.paused = paused


def _happens(config: Any, what: str) -> bool:
    if what == "checkpoint":
        return config.trainer.save_freq != 0
    if what == "policy update":
        return getattr(config.trainer, "critic_warmup", 0) > 0
    return config.data.val_files is not None and (config.trainer.test_freq != 0 or config.trainer.val_before_train)


def _unread(key: KeyDoc, value: Any, origin: str) -> ConfigError:
    return ConfigError(
        "is set, and nothing read it in the first step",
        why=f"the run does not do what its configuration says; the key means: {key.meaning}",
        fix=f"leave {key.path} out, or switch on what it belongs to (hone config explain {key.path})",
        where=place(key.path, value, origin),
        code=UNREAD,
    )


def _blocks(block: Any, prefix: str) -> Iterator[tuple[Any, str]]:
    yield block, prefix
    for item in dataclasses.fields(block):
        value = getattr(block, item.name)
        if dataclasses.is_dataclass(value):
            yield from _blocks(value, f"{prefix}{item.name}.")


def _values(block: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in object.__getattribute__(block, "__dict__").items():
        if not dataclasses.is_dataclass(value):
            yield f"{prefix}{name}", value


def _plain(cls: type, values: dict[str, Any]) -> Any:
    block = object.__new__(cls)
    block.__dict__.update(values)
    return block


@functools.cache
def _recording(cls: type) -> type:
    """A subclass of a block's class that notes what is read."""
    names = {item.name for item in dataclasses.fields(cls)}

    def __getattribute__(self: Any, name: str) -> Any:  # noqa: N807
        if name in names or name == "__dict__":
            notes, prefix = _watched.get(id(self), (None, ""))
            if notes is not None and not notes.paused:
                notes.read |= {f"{prefix}{name}"} if name in names else {f"{prefix}{field}" for field in names}
        return object.__getattribute__(self, name)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:  # noqa: N807
        return _plain, (cls, dict(object.__getattribute__(self, "__dict__")))

    members = {"__getattribute__": __getattribute__, "__reduce_ex__": __reduce_ex__, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), members)
