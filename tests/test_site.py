"""The pages of the site that are made from the code."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def test_every_page_of_the_reference_is_made() -> None:
    spec = importlib.util.spec_from_file_location("site_pages", Path(__file__).parents[1] / ".ci" / "site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pages = module.reference()
    assert "`foreword_prefix_cache_hits_total`" in pages["reference/metrics.md"]
    assert all(len(page.splitlines()) > 10 for page in pages.values())
