"""Sizes in bytes: parses texts that people write, and formats numbers for people."""

from __future__ import annotations

import re
from fractions import Fraction

from foreword.errors import ConfigError

UNITS = {
    "": 1,
    **{unit: 1000**power for power, unit in enumerate("KMGT", start=1)},
    **{f"{unit}i": 1024**power for power, unit in enumerate("KMGT", start=1)},
}
MOST_CHARACTERS = 100


def parse_bytes(text: str) -> int:
    """Parse `4GB`, `512MiB`, `1.5G` or `4000000000` to a number of bytes. Raises ConfigError."""
    match = re.fullmatch(r"([0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?)\s*([KMGT]i?)?B?", text.strip(), re.IGNORECASE)
    if match is None or len(text) > MOST_CHARACTERS:
        raise ConfigError(f"{text!r} is no number of bytes; write it as 4GB, 512MiB or 4000000000")
    return int(Fraction(match[1]) * UNITS[(match[2] or "").capitalize()])


def format_bytes(num_bytes: float) -> str:
    """Format a number of bytes for people, in the largest binary unit that it fills: `1.5 GiB`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        size = UNITS[unit[:-1].capitalize()]
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes:.0f} bytes"
