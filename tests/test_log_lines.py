"""Log lines: their two forms, and a reader that does not read."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from foreword.errors import ConfigError
from foreword.log_lines import JsonLines, LogConfig, PatientHandler, TextLines
from foreword.model.checkpoint.tensors import weights_progress
from foreword.model.loading_log import LoadingLog
from live_server import wait_until


def a_record(message: str = "five %s", *args: object, **more: object) -> logging.LogRecord:
    record = logging.LogRecord("foreword.room", logging.INFO, "", 1, message, args or ("blocks",), None)
    record.__dict__.update(more)
    return record


def test_a_line_for_people_has_time_level_and_place() -> None:
    assert TextLines().format(a_record())[8:] == " INFO foreword.room: five blocks"


def test_a_line_for_programs_is_one_json_object_with_the_fields() -> None:
    line = JsonLines().format(a_record("two\nlines of %s", "ü", fields={"event": "e", "rate": 0.5}))
    assert len(line.splitlines()) == 1
    read = json.loads(line)
    assert (read["message"], read["level"], read["logger"]) == ("two\nlines of ü", "INFO", "foreword.room")
    assert (read["event"], read["rate"]) == ("e", 0.5)
    try:
        raise ValueError("no")
    except ValueError:
        read = json.loads(JsonLines().format(a_record(exc_info=sys.exc_info())))
    assert "ValueError: no" in read["traceback"]


def test_a_level_is_read_in_any_case_and_an_unknown_one_is_named() -> None:
    assert LogConfig(log_level="INFO").log_level == "info"  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="log_format='xml'"):
        LogConfig(log_format="xml")  # type: ignore[arg-type]


def test_lines_are_written_in_their_order_and_closing_writes_the_rest() -> None:
    stream = io.StringIO()
    handler = PatientHandler(stream)
    for number in range(500):
        handler.emit(a_record("%d", number))
    handler.close()
    handler.close()
    assert stream.getvalue().split() == [str(number) for number in range(500)]


class Stuck(io.StringIO):
    """A stream whose reader sleeps until it is woken."""

    def __init__(self) -> None:
        super().__init__()
        self.awake = threading.Event()

    def write(self, text: str) -> int:
        self.awake.wait()
        return super().write(text)


def test_a_logger_never_waits_for_who_reads_and_lost_lines_are_told() -> None:
    stream = Stuck()
    handler = PatientHandler(stream, max_lines=10, close_timeout_s=0.05)
    for number in range(1000):  # would never end if one of them waited
        handler.emit(a_record("%d", number))
    assert handler.num_lost > 0
    handler.close()  # gives up
    stream.awake.set()
    wait_until(lambda: "9" in stream.getvalue())
    patient = PatientHandler(stream, max_lines=10)
    patient.num_lost = 7
    patient.emit(a_record("after %s"))
    patient.close()
    assert "7 lines were lost" in stream.getvalue()
    assert stream.getvalue().endswith("after blocks\n")


def test_a_long_load_is_told_of_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with LoadingLog("a-model", seconds_between_lines=0.01) as log:
        log.enter("reading the weights")
        wait_until(lambda: "still reading the weights" in caplog.text)
    assert "a-model: loaded in" in caplog.text
    caplog.clear()
    with pytest.raises(OSError, match="gone"), LoadingLog("a-model"):
        raise OSError("gone")
    assert "loaded" not in caplog.text


def test_the_share_of_weights_that_are_read_is_told(chat_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with weights_progress("a-model", seconds_between_lines=0.0):
        model = AutoModelForCausalLM.from_pretrained(chat_model)
    assert model.num_parameters() > 0
    assert "% of the weights (1 of " in caplog.text
    caplog.clear()
    AutoModelForCausalLM.from_pretrained(chat_model)
    assert "a-model" not in caplog.text
