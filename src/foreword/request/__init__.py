"""Requests: sampling parameters, requests, outputs, and the tokens that a request allows.

Knows token ids and token sequences; knows neither text nor tensors.
"""

from foreword.request.request import (
    FACTS,
    NO_ROW,
    NOTHING_ALLOWED,
    CompletionOutput,
    FactRows,
    FinishReason,
    Logprob,
    Request,
    RequestMetrics,
    RequestOutput,
    RequestStatus,
    TokenLogprobs,
    named_record,
)
from foreword.request.sampling_params import SamplingParams, StructuredOutputsParams, TokenConstraint
from foreword.request.token_limits import TokenLimits

__all__ = [
    "FACTS",
    "NOTHING_ALLOWED",
    "NO_ROW",
    "CompletionOutput",
    "FactRows",
    "FinishReason",
    "Logprob",
    "Request",
    "RequestMetrics",
    "RequestOutput",
    "RequestStatus",
    "SamplingParams",
    "StructuredOutputsParams",
    "TokenConstraint",
    "TokenLimits",
    "TokenLogprobs",
    "named_record",
]
