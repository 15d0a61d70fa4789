"""The engine: requests in, steps, outputs.

Knows requests, blocks' counts and what it asks of a runner; knows neither tensors nor tokenizers.
"""

from foreword.engine.cache_report import CacheReport
from foreword.engine.engine import BlockKeys, Engine, ModelLimits, Prompt
from foreword.engine.snapshot import Snapshot

__all__ = ["BlockKeys", "CacheReport", "Engine", "ModelLimits", "Prompt", "Snapshot"]
