"""Every process of the service logs as Ray Serve does: same files, same format, JSON where Serve logs JSON.

Our loggers are all below `pageferry`; in a process that Serve has not set up no handler would take them.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

SERVE = "ray.serve"
ENCODING = "PAGEFERRY_LOG_ENCODING"  # environment of our actors; replicas have Serve's own configuration
FORMAT = "%(levelname)s %(asctime)s %(name)s -- %(message)s"


def below_serve() -> None:
    """In a replica, before vLLM is imported: what we log goes where Serve's own messages of this replica go.

    vLLM sets up logging when it is imported, and Python then closes every handler there is: Serve's would say nothing
    more, without a word.
    """
    serve = logging.getLogger(SERVE)
    logging.getLogger("pageferry").parent = serve
    for handler in serve.handlers:
        handler.close = handler.flush  # type: ignore[method-assign]


def as_component(name: str, ident: str) -> None:
    """In an actor that is none of Serve's: a log file beside theirs, set up by Serve itself; see `of_actor`."""
    from ray.serve._private.logging_utils import configure_component_logger
    from ray.serve.schema import LoggingConfig

    config = LoggingConfig(encoding=os.environ.get(ENCODING, "TEXT"))
    configure_component_logger(component_name=name, component_id=ident, logging_config=config)
    below_serve()


def of_actor() -> dict[str, Any]:
    """In a replica: the `runtime_env` of an actor that it makes, which then logs JSON where this replica does."""
    targets = [getattr(handler, "target", None) or handler for handler in logging.getLogger(SERVE).handlers]
    as_json = any(type(target.formatter).__name__ == "JSONFormatter" for target in targets)
    return {"env_vars": {ENCODING: "JSON"}} if as_json else {}


def to_stderr() -> None:
    """In an engine's process, where there is no Ray: to standard error, which Ray keeps in the worker's files."""
    logger = logging.getLogger("pageferry")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(FORMAT))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
