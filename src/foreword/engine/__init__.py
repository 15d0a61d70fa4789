"""The engine: requests in, steps, outputs."""

from foreword.engine.engine import Engine
from foreword.engine.offline import depth_first, progress_bar, run_all
from foreword.engine.prompt import BREAKPOINT, RESOURCE, BlockKeys, Keep, Mark, ModelLimits, Prompt, TextTools
from foreword.engine.scheduler import SimulatedScheduler
from foreword.engine.snapshot import CacheReport, Snapshot
from foreword.engine.tiering.director import OtherIdentity, TierDirector, TierReport, TiersReport

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
    "depth_first",
    "progress_bar",
    "run_all",
]
