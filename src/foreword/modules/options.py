"""What the commands of `foreword pml` that run a model have in common: the engine's options."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from foreword.config import engine_options
from foreword.config.flags import Flags
from foreword.config.help import grouped
from foreword.config.vllm import ENGINE_OPTIONS
from foreword.errors import ConfigError


def add_engine_flags(parser: argparse.ArgumentParser, arguments: str) -> None:
    """Add the options of an engine; `arguments` stand before them in the usage."""
    flags = Flags(grouped(engine_options()), ENGINE_OPTIONS)
    flags.add_to(parser)
    parser.usage = f"%(prog)s {arguments} [OPTIONS]"
    parser.set_defaults(flags=flags)


def check_model(options: Mapping[str, Any]) -> None:
    """Raise ConfigError if no model is given."""
    if "model" not in options:
        raise ConfigError("no model is given; name a folder or a hub id with --model")
