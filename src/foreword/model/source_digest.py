"""A digest of Python sources, where code decides bits.

Knows folders.
"""

from __future__ import annotations

import hashlib
from pathlib import Path


def digest_sources(*folders: Path) -> str:
    """A digest of the Python files in these folders."""
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in paths)).hexdigest()
