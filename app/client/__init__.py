"""The Python client: over HTTP or over a Serve handle, sync and async."""

from app.client.client import (
    AsyncClient,
    Choice,
    Client,
    Completion,
    Delta,
    PageIntegrityError,
    ServiceError,
    Usage,
)

__all__ = ["AsyncClient", "Choice", "Client", "Completion", "Delta", "PageIntegrityError", "ServiceError", "Usage"]
