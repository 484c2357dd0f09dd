"""The sessions of an endpoint: by name, and by the API key that names one."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable

from hone.agents.serving.errors import ApiError, bad_request
from hone.agents.serving.session import Prompt, Session
from hone.generation.protocol import SamplingParams

_NAME = re.compile(r"[\w.:#~@+-]{1,200}")


class Sessions:
    """Open sessions.

    Args:
        most: that may be open at once.
        named_by_path: whether a path with the name of an unknown session begins it.
    """

    def __init__(self, *, most: int = 10_000, named_by_path: bool = True) -> None:
        self.most, self.named_by_path = most, named_by_path
        self._by_name: dict[str, Session] = {}
        self._by_key: dict[str, Session] = {}

    def open(
        self,
        name: str,
        *,
        seed: int = 0,
        sampling: SamplingParams | None = None,
        allow: Callable[[Prompt], int] | None = None,
    ) -> Session:
        """Begin a session with an API key of its own; see :class:`Session` for the arguments.

        Raises:
            ValueError: it is open already.
        """
        if name in self._by_name:
            raise ValueError(f"session '{name}' is open already")
        session = Session(name, f"hone-{secrets.token_urlsafe(24)}", seed, sampling, allow)
        self._by_name[name] = self._by_key[session.key] = session
        return session

    def close(self, session: Session) -> None:
        """Forget a session."""
        self._by_name.pop(session.name, None)
        self._by_key.pop(session.key, None)

    def by_key(self, key: str) -> Session | None:
        """The session that an API key names."""
        return self._by_key.get(key)

    def find(self, name: str) -> Session | None:
        """The open session of this name."""
        return self._by_name.get(name)

    def named(self, name: str) -> Session:
        """The session of this name, which may begin now.

        Raises:
            ApiError: it may not.
        """
        if name not in self._by_name:
            if not self.named_by_path:
                raise ApiError(404, f"there is no session '{name}'", code="session_not_found")
            if not _NAME.fullmatch(name):
                raise bad_request(f"'{name[:50]}' cannot name a session: 1 to 200 letters, digits and . : # ~ @ + - _")
            if len(self._by_name) >= self.most:
                raise ApiError(
                    429, f"{self.most} sessions are open; end some with DELETE /sessions/<id>", code="too_many_sessions"
                )
            self.open(name, seed=secrets.randbits(62))
        return self._by_name[name]
