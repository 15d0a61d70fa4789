"""Requests: sampling parameters, requests, outputs, and the tokens that a request allows.

Knows token ids and token sequences; knows neither text nor tensors.
"""

from foreword.request.request import (
    FACTS,
    NOTHING_ALLOWED,
    AnswerTokens,
    CompletionOutput,
    FactRows,
    FinishReason,
    Logprob,
    Request,
    RequestMetrics,
    RequestOutput,
    RequestStatus,
    TokenLogprobs,
)
from foreword.request.sampling_params import SamplingParams, StructuredOutputsParams, TokenConstraint
from foreword.request.token_limits import TokenLimits

__all__ = [
    "FACTS",
    "NOTHING_ALLOWED",
    "AnswerTokens",
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
]
