"""Routes for the engine's replicas: their state, and draining one while the others continue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hone.agents.serving.errors import ApiError
from hone.agents.serving.gateway import Gateway
from hone.generation.pool import EnginePool


class ReplicaRoutes:
    """Routes below ``/replicas``; ``check`` raises if the caller has no access."""

    def __init__(self, gateway: Callable[[], Gateway], check: Callable[[Request], None]) -> None:
        self._gateway, self._check = gateway, check
        self.routes = [
            Route("/replicas", self.show, methods=["GET"]),
            Route("/replicas/{index:int}/drain", self.drain, methods=["POST"]),
            Route("/replicas/{index:int}/admit", self.admit, methods=["POST"]),
        ]

    async def show(self, request: Request) -> Response:
        return JSONResponse({"replicas": await self._reports(self._pool(request))})

    async def drain(self, request: Request) -> Response:
        """Give a replica no new requests; answer when its current ones have finished."""
        pool, index = self._replica(request)
        await self._gateway().on_engine(pool.drain(index))
        return JSONResponse((await self._reports(pool))[index])

    async def admit(self, request: Request) -> Response:
        pool, index = self._replica(request)

        async def admit() -> None:
            pool.admit(index)

        await self._gateway().on_engine(admit())
        return JSONResponse((await self._reports(pool))[index])

    async def _reports(self, pool: EnginePool) -> list[dict[str, Any]]:
        async def reports() -> list[dict[str, Any]]:
            return [replica.report() for replica in pool.replicas]

        return await self._gateway().on_engine(reports())

    def _pool(self, request: Request) -> EnginePool:
        self._check(request)
        engine = self._gateway().client.engine
        if not isinstance(engine, EnginePool):
            raise ApiError(404, "the engine runs in this process and has no replicas", code="no_replicas")
        return engine

    def _replica(self, request: Request) -> tuple[EnginePool, int]:
        pool, index = self._pool(request), request.path_params["index"]
        if index >= len(pool.replicas):
            raise ApiError(
                404, f"replica {index} does not exist; replicas: 0 to {len(pool.replicas) - 1}", code="no_replicas"
            )
        return pool, index
