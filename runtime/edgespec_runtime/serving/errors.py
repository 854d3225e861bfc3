"""Answers in JSON, and errors in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from edgespec.core.errors import EdgespecError, InputError
from edgespec_runtime.serving.line import ClientLeft
from edgespec_runtime.serving.request import Refused

LEFT = "edgespec.left"  # in a request's scope: the client did not wait


def refusal(error: Refused) -> Response:
    """OpenAI's form of an error."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 408:  # what comes yet is no request
        headers["Connection"] = "close"
    return JsonAnswer(error_of(error), error.status, headers)


def error_of(error: Refused) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


class JsonAnswer(JSONResponse):
    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=False).encode()


def refused_by(error: Exception) -> Refused:
    """What to say of an error: a mistake of ours has its traceback on standard error."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, EdgespecError):
        return Refused(400 if isinstance(error, InputError) else 500, str(error))
    return Refused(500, "the server made a mistake; its standard error says more")


async def _answer(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientLeft | ClientDisconnect):
        request.scope[LEFT] = True
        return Response(status_code=400)  # nobody reads it
    if not isinstance(error, HTTPException):
        return refusal(refused_by(error))
    words = f"there is no {request.method[:20]} {request.scope['path'][:200]}"
    answer = refusal(Refused(error.status_code, words))
    answer.headers.update(error.headers or {})
    return answer


HANDLERS: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = dict.fromkeys(
    (Refused, EdgespecError, ClientLeft, ClientDisconnect, HTTPException, Exception), _answer
)
