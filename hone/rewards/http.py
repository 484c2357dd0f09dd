"""JSON over HTTP with retries: judges, remote reward functions and sandboxes are services that may be busy or away."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx2

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before the first retry, doubled each time, up to the longest."""
_BUSY = {408, 409, 425, 429}


class ServiceError(Exception):
    """A service gave no usable answer, after all retries."""


class JsonService:
    """One service that takes and gives JSON.

    Retried are connections that fail, answers that do not come in time, and statuses that mean "later" (408, 409, 425, 429, 5xx);
    any other status is an answer. Used in one event loop after another.

    Args:
        url: of the service; paths are added to it.
        token: sent as bearer token where there is one.
        timeout: seconds that one try may take.
        retries: tries after the first.

    Attributes:
        calls, retried: tries so far, and how many of them were further tries.
    """

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 60.0, retries: int = 4) -> None:
        self.url, self.timeout, self.retries = url.rstrip("/"), timeout, retries
        self.calls = self.retried = 0
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client: httpx2.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def post(self, path: str, body: Any) -> Any:
        """Send ``body`` and return what comes back.

        Raises:
            ServiceError: no answer, a refusal, or something that is no JSON.
        """
        for attempt in range(self.retries + 1):
            self.calls += 1
            self.retried += attempt > 0
            try:
                return await self._once(path, body)
            except _Later as busy:
                if attempt == self.retries:
                    raise ServiceError(f"{self.url}{path}: {busy}, {attempt + 1} times") from busy
                pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt)
                await asyncio.sleep(max(busy.pause, pause * random.uniform(0.5, 1.0)))
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """Give the connections of this event loop back."""
        if self._client is not None and self._loop is asyncio.get_running_loop():
            await self._client.aclose()
        self._client = None

    async def _once(self, path: str, body: Any) -> Any:
        import httpx2

        try:
            response = await self._connections().post(self.url + path, json=body)
        except httpx2.TimeoutException as error:
            raise _Later(f"no answer within {self.timeout:g} s") from error
        except httpx2.TransportError as error:
            raise _Later(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        except httpx2.InvalidURL as error:
            raise ServiceError(f"{self.url}{path} is no URL: {error}") from error
        if response.status_code in _BUSY or response.status_code >= 500:
            wish = response.headers.get("retry-after", "")
            raise _Later(_shown(response), float(wish) if wish.isdigit() else 0.0)
        if response.is_error:
            raise ServiceError(f"{self.url}{path}: {_shown(response)}")
        try:
            return response.json()
        except ValueError as error:
            raise ServiceError(f"{self.url}{path}: the answer is no JSON: {response.text[:100]!r}") from error

    def _connections(self) -> httpx2.AsyncClient:
        import httpx2

        loop = asyncio.get_running_loop()
        if self._client is None or loop is not self._loop:
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
            self._client = httpx2.AsyncClient(headers=self._headers, timeout=self.timeout, limits=limits)
            self._loop = loop
        return self._client


class _Later(Exception):
    """It may work on another try, after so many seconds."""

    def __init__(self, what: str, pause: float = 0.0) -> None:
        super().__init__(what)
        self.pause = min(pause, LONGEST_PAUSE)


def _shown(response: httpx2.Response) -> str:
    return f"status {response.status_code} {response.text[:200]!r}"
