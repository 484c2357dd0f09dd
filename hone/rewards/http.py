"""JSON over HTTP with retries, for judges, remote reward functions, sandboxes and teachers."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any

from hone.errors import NoVerdict
from hone.text import valid_data

if TYPE_CHECKING:
    import httpx2


class Throttle:
    """Throttle of calls: ``async with throttle: ...``.

    It may be used in successive event loops, as programs that call ``asyncio.run`` several times do. Calls per minute are spaced
    evenly, so that a service never receives a burst.

    Args:
        max_concurrent: maximum concurrent calls; None means unlimited.
        per_minute: maximum calls started per minute; None means unlimited.
    """

    def __init__(self, max_concurrent: int | None = None, per_minute: float | None = None) -> None:
        self.max_concurrent = max_concurrent
        self._pause = 60.0 / per_minute if per_minute else 0.0
        self._next = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._semaphore = asyncio.Semaphore(1)

    @property
    def limits(self) -> bool:
        return self.max_concurrent is not None or self._pause > 0

    def wait_seconds(self, calls: int) -> float:
        """Return the seconds until the last of ``calls`` calls may start under the limit per minute."""
        return self._pause * calls

    async def __aenter__(self) -> None:
        if self.max_concurrent is not None:
            await self._loop_semaphore().acquire()
        if self._pause:
            now = time.monotonic()
            begin = max(now, self._next)
            self._next = begin + self._pause
            try:
                await asyncio.sleep(begin - now)
            except asyncio.CancelledError:
                self._release()
                raise

    async def __aexit__(self, *_: object) -> None:
        self._release()

    def _loop_semaphore(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._semaphore = loop, asyncio.Semaphore(self.max_concurrent or 1)
        return self._semaphore

    def _release(self) -> None:
        if self.max_concurrent is not None:
            self._semaphore.release()


FIRST_PAUSE, MAX_PAUSE = 0.5, 30.0  # seconds before the first retry, doubled for each further one, and the maximum
_BUSY = {408, 409, 425, 429}


class ServiceError(NoVerdict):
    """Error of a service that gave no usable answer after all retries."""

    cause = "service"


class JsonService:
    """Client of a service that accepts and returns JSON.

    Failed connections, timeouts, and statuses that mean "later" (408, 409, 425, 429, 5xx) are retried; other statuses are final.
    The client may be used in successive event loops.

    Args:
        timeout: seconds per try.
        retries: tries after the first.

    Attributes:
        calls, retried: number of tries, and of retries among them.
    """

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 60.0, retries: int = 4) -> None:
        self.url, self.timeout, self.retries = url.rstrip("/"), timeout, retries
        self.calls = self.retried = 0
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client: httpx2.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def post(self, path: str, body: Any) -> Any:
        """Send ``body`` and return the answer.

        Raises ServiceError: no answer, an error status, or an answer that is not JSON.
        """
        return await self._retried(path, json=valid_data(body))

    async def get(self, path: str) -> Any:
        """Return the answer at a path. Raises ServiceError: as for :meth:`post`."""
        return await self._retried(path)

    async def _retried(self, path: str, **content: Any) -> Any:
        for attempt in range(self.retries + 1):
            self.calls += 1
            self.retried += attempt > 0
            try:
                return await self._once(path, content)
            except _RetryableError as busy:
                if attempt == self.retries:
                    raise ServiceError(f"{self.url}{path}: {busy}, {attempt + 1} times") from busy
                pause = min(MAX_PAUSE, FIRST_PAUSE * 2**attempt)
                await asyncio.sleep(max(busy.pause, pause * random.uniform(0.5, 1.0)))
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """Close the connections of this event loop."""
        if self._client is not None and self._loop is asyncio.get_running_loop():
            await self._client.aclose()
        self._client = None

    async def _once(self, path: str, content: dict[str, Any]) -> Any:
        import httpx2

        try:
            response = await self._connections().request("POST" if content else "GET", self.url + path, **content)
        except httpx2.TimeoutException as error:
            raise _RetryableError(f"no answer within {self.timeout:g} s") from error
        except httpx2.TransportError as error:
            raise _RetryableError(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        except httpx2.InvalidURL as error:
            raise ServiceError(f"{self.url}{path} is not a valid URL: {error}") from error
        if response.status_code in _BUSY or response.status_code >= 500:
            retry_after = response.headers.get("retry-after", "")
            raise _RetryableError(_shown(response), float(retry_after) if retry_after.isdigit() else 0.0)
        if response.is_error:
            raise ServiceError(f"{self.url}{path}: {_shown(response)}")
        try:
            return valid_data(response.json())
        except (ValueError, RecursionError) as error:
            raise ServiceError(f"{self.url}{path}: the answer is not JSON: {response.text[:100]!r}") from error

    def _connections(self) -> httpx2.AsyncClient:
        import httpx2

        loop = asyncio.get_running_loop()
        if self._client is None or loop is not self._loop:
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
            self._client = httpx2.AsyncClient(headers=self._headers, timeout=self.timeout, limits=limits)
            self._loop = loop
        return self._client


class _RetryableError(Exception):
    """Failure that a retry after ``pause`` seconds may resolve."""

    def __init__(self, problem: str, pause: float = 0.0) -> None:
        super().__init__(problem)
        self.pause = min(pause, MAX_PAUSE)


def _shown(response: httpx2.Response) -> str:
    return f"status {response.status_code} {response.text[:200]!r}"
