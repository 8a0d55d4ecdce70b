"""Which of the server's routes are for clients. All others, vLLM's own among them, are for administrators. Pure."""

from __future__ import annotations

OPEN = frozenset({"/health", "/ping", "/version", "/metrics", "/pageferry"})  # without a tenant's key
CLIENT = OPEN | {
    "/v1/models",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/v1/systemone",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v2/embed",
    "/v2/rerank",
    "/v2/chat",
    "/classify",
    "/pooling",
    "/score",
    "/rerank",
    "/generative_scoring",
    "/tokenize",
    "/detokenize",
    "/docs",
    "/docs/oauth2-redirect",
    "/redoc",
    "/openapi.json",
}
TRACED = frozenset(path for path in CLIENT - OPEN if not path.startswith(("/docs", "/redoc", "/openapi", "/v1/models")))
# Kept by one process: another frontend would not find them, and a client that knows an id could read a stranger's.
STORED_RESPONSES = "/v1/responses/"


def for_clients(path: str) -> bool:
    return path in CLIENT or path.startswith(STORED_RESPONSES)
