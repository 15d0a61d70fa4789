"""The engine: takes requests, computes them in steps, and returns outputs."""

from foreword.engine.engine import Engine as Engine
from foreword.engine.offline import depth_first as depth_first, progress_bar as progress_bar, run_all as run_all
from foreword.engine.prompt import BREAKPOINT as BREAKPOINT, RESOURCE as RESOURCE, BlockKeys as BlockKeys, Keep as Keep
from foreword.engine.prompt import Mark as Mark, ModelLimits as ModelLimits, Prompt as Prompt, TextTools as TextTools
from foreword.engine.scheduler import SimulatedScheduler as SimulatedScheduler
from foreword.engine.snapshot import CacheReport as CacheReport, Snapshot as Snapshot
from foreword.engine.tiering.director import OtherIdentity as OtherIdentity, TierDirector as TierDirector
from foreword.engine.tiering.director import TierReport as TierReport, TiersReport as TiersReport
