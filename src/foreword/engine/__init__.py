"""The engine: requests in, steps, outputs."""

from foreword.engine.cache_report import CacheReport
from foreword.engine.engine import Engine
from foreword.engine.prompt import BREAKPOINT, RESOURCE, BlockKeys, Keep, Mark, ModelLimits, Prompt, TextTools
from foreword.engine.simulated import SimulatedScheduler
from foreword.engine.snapshot import Snapshot
from foreword.engine.tiering.below import OtherIdentity
from foreword.engine.tiering.director import TierDirector, TierReport, TiersReport

__all__ = [
    "BREAKPOINT",
    "RESOURCE",
    "BlockKeys",
    "CacheReport",
    "Engine",
    "Keep",
    "Mark",
    "ModelLimits",
    "OtherIdentity",
    "Prompt",
    "SimulatedScheduler",
    "Snapshot",
    "TextTools",
    "TierDirector",
    "TierReport",
    "TiersReport",
]
