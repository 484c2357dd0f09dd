"""Paths of OpenAI's and vLLM's servers that this server does not have, each with the reason."""

from __future__ import annotations

from hone.agents.serving.errors import ApiError

SERVED = (
    "/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/models, /tokenize, /detokenize, /metrics, /version, "
    "/health and /sessions/<id>"
)
ANOTHER_KIND = {
    "/v1/embeddings": "embeddings",
    "/v1/audio": "speech",
    "/v1/images": "images",
    "/v1/moderations": "moderation",
    "/v1/rerank": "scores of documents",
    "/v1/score": "scores of texts",
    "/pooling": "embeddings",
    "/classify": "classes",
    "/score": "scores of texts",
    "/rerank": "scores of documents",
}
"""What the paths below a prefix give."""
ANOTHER_SERVICE = ("/v1/files", "/v1/uploads", "/v1/batches", "/v1/fine_tuning", "/v1/vector_stores", "/v1/assistants",
                   "/v1/threads", "/v1/realtime", "/v1/conversations", "/v1/evals")  # fmt: skip
"""Prefixes of OpenAI's services apart from a model."""


def no_such_path(method: str, path: str) -> ApiError:
    """Return the error for a path without a route."""
    kind = next((kind for prefix, kind in ANOTHER_KIND.items() if _is_below(path, prefix)), None)
    if kind is not None:
        problem = f"this server's model generates text, and {path} is for {kind}"
    elif any(_is_below(path, prefix) for prefix in ANOTHER_SERVICE):
        problem = f"{path} is a service of OpenAI that this server does not have"
    else:
        problem = f"{method} {path} does not exist"
    return ApiError(404, f"{problem}; served are {SERVED}", code="not_found")


def _is_below(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}/")
