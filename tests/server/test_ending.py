"""What the log says of calls that the end of a server cancels."""

from __future__ import annotations

import asyncio
import logging

import pytest

from foreword.server.run import tell_cancelled


@pytest.mark.parametrize(("error", "has_traceback"), [(asyncio.CancelledError(), False), (ValueError("x"), True)])
def test_a_call_that_the_end_cancels_is_one_line(error: BaseException, has_traceback: bool) -> None:
    record = logging.makeLogRecord({"name": "uvicorn.error", "levelno": logging.ERROR, "msg": "Exception in %s"})
    record.args, record.exc_info = ("ASGI application",), (type(error), error, None)
    assert tell_cancelled(record)
    assert (record.exc_info is not None) == has_traceback
    assert record.getMessage() == (
        "Exception in ASGI application" if has_traceback else "a call was ended because the server stops"
    )
