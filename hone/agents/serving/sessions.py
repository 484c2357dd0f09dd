"""Sessions of an endpoint, by name and by API key."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable

from hone.agents.serving.errors import ApiError, bad_request
from hone.agents.serving.session import Prompt, Session
from hone.generation.protocol import SamplingParams

_NAME = re.compile(r"[\w.:#~@+-]{1,200}")


class Sessions:
    """Registry of open sessions; with ``named_by_path`` a request path with an unknown session name opens that session."""

    def __init__(self, *, max_sessions: int = 10_000, named_by_path: bool = True) -> None:
        self.max_sessions, self.named_by_path = max_sessions, named_by_path
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
        """Open a session with a new API key; see :class:`Session` for the arguments.

        Raises:
            ValueError: a session of this name is open.
        """
        if name in self._by_name:
            raise ValueError(f"session '{name}' is already open")
        session = Session(name, f"hone-{secrets.token_urlsafe(24)}", seed, sampling, allow)
        self._by_name[name] = self._by_key[session.key] = session
        return session

    def close(self, session: Session) -> None:
        """Close a session and invalidate its API key."""
        self._by_name.pop(session.name, None)
        self._by_key.pop(session.key, None)

    def by_key(self, key: str) -> Session | None:
        """Return the session of an API key, or None."""
        return self._by_key.get(key)

    def find(self, name: str) -> Session | None:
        return self._by_name.get(name)

    def named(self, name: str) -> Session:
        """Return the session of this name, opened if necessary."""
        if name not in self._by_name:
            if not self.named_by_path:
                raise ApiError(404, f"session '{name}' does not exist", code="session_not_found")
            if not _NAME.fullmatch(name):
                raise bad_request(
                    f"invalid session name '{name[:50]}': use 1 to 200 letters, digits and . : # ~ @ + - _"
                )
            if len(self._by_name) >= self.max_sessions:
                raise ApiError(
                    429,
                    f"{self.max_sessions} sessions are open, the maximum; end some with DELETE /sessions/<id>",
                    code="too_many_sessions",
                )
            self.open(name, seed=secrets.randbits(62))
        return self._by_name[name]
