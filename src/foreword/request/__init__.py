"""Requests: sampling parameters, requests, outputs, and the tokens that a request allows."""

from foreword.request.held_bytes import HeldBytes as HeldBytes
from foreword.request.request import Adapter as Adapter
from foreword.request.request import LoRARequest as LoRARequest
from foreword.request.links import LinkedRun as LinkedRun, LinkReport as LinkReport, Links as Links
from foreword.request.request import Alone as Alone, Embeds as Embeds
from foreword.request.request import Picture as Picture, PlacedPicture as PlacedPicture
from foreword.request.request import Reply as Reply
from foreword.request.request import ToolCall as ToolCall
from foreword.request.request import (
    FACTS as FACTS,
    NO_REPORT as NO_REPORT,
    NO_ROW as NO_ROW,
    NOTHING_ALLOWED as NOTHING_ALLOWED,
    CompletionOutput as CompletionOutput,
    DraftCounts as DraftCounts,
    FactRows as FactRows,
    FinishReason as FinishReason,
    Logprob as Logprob,
    Request as Request,
    RequestMetrics as RequestMetrics,
    RequestOutput as RequestOutput,
    RequestStatus as RequestStatus,
    TokenLogprobs as TokenLogprobs,
    named_record as named_record,
    turned_positions as turned_positions,
    whole_end as whole_end,
)
from foreword.request.sampling_params import (
    SamplingParams as SamplingParams,
    StructuredOutputsParams as StructuredOutputsParams,
    TokenConstraint as TokenConstraint,
    one_each as one_each,
)
from foreword.request.sampling_params import TokenLimits as TokenLimits
