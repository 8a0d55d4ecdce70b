"""Which field of a body a request model of vLLM's server cannot even be validated with.

Some of its validators run before types are checked and raise AttributeError or the like for a value of another type:
the server makes a 500 of that, and it is the client's mistake.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError


class RequestModels:
    def __init__(self, app: FastAPI) -> None:
        self._models: dict[str, type[BaseModel]] = {}
        for route in app.routes:
            if isinstance(route, APIRoute) and route.body_field is not None:
                model = route.body_field.field_info.annotation
                if isinstance(model, type) and issubclass(model, BaseModel):
                    self._models[route.path] = model

    def blame(self, path: str, tree: Any) -> str | None:
        """The field that breaks the route's model; "" when it is several together; None when it is no field's doing."""
        model = self._models.get(path)
        if model is None or not isinstance(tree, dict) or not _breaks(model, tree):
            return None
        for name in tree:
            if not _breaks(model, {key: value for key, value in tree.items() if key != name}):
                return str(name)
        return ""


def _breaks(model: type[BaseModel], tree: dict[str, Any]) -> bool:
    try:
        model.model_validate(tree)
    except ValidationError:
        return False
    except Exception:
        return True
    return False
