"""What went wrong with a request, as the exception that vLLM's OpenAI server turns into an HTTP error."""

from __future__ import annotations

from http import HTTPStatus

from vllm.exceptions import GracefulHTTPError

from app.request.events import RequestError


class RequestErrorResponse(GracefulHTTPError):
    """Carries the status and message to the client as they are; `fault` has the Retry-After."""

    def __init__(self, fault: RequestError) -> None:
        super().__init__(fault.message, HTTPStatus(fault.status))
        self.fault = fault


def to_exception(fault: RequestError) -> RequestErrorResponse:
    return RequestErrorResponse(fault)
