"""Our loggers write where Ray Serve's do, and say to the actors they make whether that is JSON."""

from __future__ import annotations

import json
import logging
import logging.config
import logging.handlers
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray._common.formatters import JSONFormatter

from actors import logs


@pytest.fixture
def serve() -> Iterator[logging.Logger]:
    """Serve's logger without handlers; it and ours are put back as they were."""
    serve, ours = logging.getLogger(logs.SERVE), logging.getLogger("pageferry")
    before = (serve.handlers[:], serve.propagate, serve.level, ours.parent)
    serve.handlers, serve.propagate = [], False
    serve.setLevel(logging.INFO)
    yield serve
    serve.handlers, serve.propagate, _, ours.parent = before
    serve.setLevel(before[2])


def test_what_we_log_goes_where_serve_logs_also_after_it_is_reconfigured(serve: logging.Logger, tmp_path: Path) -> None:
    logs.below_serve()
    for name, formatter in (("text", logging.Formatter("%(message)s")), ("json", JSONFormatter())):
        file = logging.FileHandler(tmp_path / name)
        file.setFormatter(formatter)
        serve.handlers = [logging.handlers.MemoryHandler(1, target=file)]
        logging.getLogger("pageferry.replica").info("the engine of %s is up", name)
        file.close()
    assert (tmp_path / "text").read_text() == "the engine of text is up\n"
    assert json.loads((tmp_path / "json").read_text())["message"] == "the engine of json is up"


def test_vllms_own_set_up_does_not_close_serves_files(serve: logging.Logger, tmp_path: Path) -> None:
    file = logging.FileHandler(tmp_path / "log")
    serve.handlers = [logging.handlers.MemoryHandler(1, target=file)]
    logs.below_serve()
    handlers = logging._handlerList[:]  # type: ignore[attr-defined]
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
    logging.getLogger("pageferry.replica").info("still heard")
    serve.info("Serve too")
    assert (tmp_path / "log").read_text() == "still heard\nServe too\n"
    file.close()
    for reference in handlers:  # what pytest and others rely on
        if reference not in logging._handlerList:  # type: ignore[attr-defined]
            logging._handlerList.append(reference)  # type: ignore[attr-defined]


def test_an_actor_logs_json_where_the_replica_that_made_it_does(serve: logging.Logger, tmp_path: Path) -> None:
    assert logs.of_actor() == {}
    file = logging.FileHandler(tmp_path / "log")
    serve.handlers = [logging.handlers.MemoryHandler(1, target=file)]
    assert logs.of_actor() == {}
    file.setFormatter(JSONFormatter())
    assert logs.of_actor() == {"env_vars": {logs.ENCODING: "JSON"}}
    file.close()
