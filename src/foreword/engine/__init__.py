"""The engine: requests in, steps, outputs.

Knows requests, blocks' counts and what it asks of a runner; knows neither tensors nor tokenizers.
"""

from foreword.engine.engine import BlockKeys, Engine, ModelLimits, Prompt

__all__ = ["BlockKeys", "Engine", "ModelLimits", "Prompt"]
