"""Requests: sampling parameters, requests, outputs, and the tokens that a request allows."""

from foreword.request.held_bytes import HeldBytes as HeldBytes
from foreword.request.links import LinkReport as LinkReport, LinkedRun as LinkedRun, Links as Links
from foreword.request.request import Adapter as Adapter, Alone as Alone, CompletionOutput as CompletionOutput
from foreword.request.request import DraftCounts as DraftCounts, Embeds as Embeds, FACTS as FACTS, FactRows as FactRows
from foreword.request.request import FinishReason as FinishReason, LoRARequest as LoRARequest, Logprob as Logprob
from foreword.request.request import NOTHING_ALLOWED as NOTHING_ALLOWED, NO_REPORT as NO_REPORT, NO_ROW as NO_ROW
from foreword.request.request import Picture as Picture, PlacedPicture as PlacedPicture, Reply as Reply
from foreword.request.request import Request as Request, RequestMetrics as RequestMetrics
from foreword.request.request import RequestOutput as RequestOutput, RequestStatus as RequestStatus
from foreword.request.request import TokenLogprobs as TokenLogprobs, ToolCall as ToolCall, named_record as named_record
from foreword.request.request import turned_positions as turned_positions, whole_end as whole_end
from foreword.request.sampling_params import SamplingParams as SamplingParams
from foreword.request.sampling_params import StructuredOutputsParams as StructuredOutputsParams
from foreword.request.sampling_params import TokenConstraint as TokenConstraint, TokenLimits as TokenLimits
from foreword.request.sampling_params import one_each as one_each
