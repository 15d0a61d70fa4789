"""OpenTelemetry traces (optional): one span per request, with the result of the request's cache lookup.

Names follow the semantic conventions for generative AI. Names of foreword itself begin with `foreword.`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from foreword.errors import extra_for
from foreword.server.records import ListenerHealth, RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
    from opentelemetry.util.types import AttributeValue


class Tracing:
    """Turns records into spans and sends them."""

    def __init__(self, model_name: str, processor: SpanProcessor, health: ListenerHealth | None = None) -> None:
        """`health`: the state of the spans' receiver."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        self.health = health or ListenerHealth("trace_export")
        self._model = model_name
        self._provider = TracerProvider(resource=Resource.create({"service.name": "foreword"}), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("foreword")

    @classmethod
    def to_endpoint(cls, endpoint: str, model_name: str) -> Tracing:
        """Send spans as OTLP over HTTP, in batches. Raises ConfigError if packages are missing."""
        with extra_for("otlp_traces_endpoint", "trace"):
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
        health = ListenerHealth("trace_export")

        class Watched(OTLPSpanExporter):
            def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
                result = super().export(spans)
                if result is SpanExportResult.SUCCESS:
                    health.worked()
                else:
                    health.num_lost += len(spans)
                    health.failed("the endpoint for traces refused them")
                return result

        return cls(model_name, BatchSpanProcessor(Watched(endpoint=endpoint)), health)

    def record(self, record: RequestRecord) -> None:
        """Queue the span of a request that has ended. Called on the engine's thread."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = {} if record.trace_parent is None else {"traceparent": record.trace_parent}

        def at(moment: float) -> int:
            """Convert a monotonic time to nanoseconds since 1970."""
            return round(1e9 * (record.created + moment - record.arrival_time))

        span = self._tracer.start_span(
            f"{record.endpoint} {self._model}",
            context=TraceContextTextMapPropagator().extract(parent),
            kind=SpanKind.SERVER,
            start_time=at(record.arrival_time),
            attributes=_attributes(record, self._model),
        )
        if record.first_scheduled_time is not None:
            span.add_event("foreword.scheduled", timestamp=at(record.first_scheduled_time))
        if record.token_times:
            span.add_event("foreword.first_token", timestamp=at(record.token_times[0]))
        if record.outcome in ("failed", "refused", "timeout"):
            span.set_status(Status(StatusCode.ERROR, record.outcome))
        span.end(end_time=at(record.finished_time if record.finished_time is not None else time.monotonic()))

    def close(self) -> None:
        """Send the waiting spans. May be called twice."""
        self._provider.shutdown()


def _attributes(record: RequestRecord, model_name: str) -> dict[str, AttributeValue]:
    explanation = record.explanation
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": "text_completion" if record.endpoint == "completions" else "chat",
        "gen_ai.provider.name": "foreword",
        "gen_ai.request.model": model_name,
        "gen_ai.response.id": record.response_id,
        "gen_ai.response.finish_reasons": (str(record.outcome),),
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
        "foreword.tenant": record.tenant,
        "foreword.cache.computed_tokens": record.num_computed_tokens,
    }
    if record.time_to_first_token is not None:
        attributes["foreword.time_to_first_token_s"] = record.time_to_first_token
    if explanation is not None and explanation.reason is not None:
        attributes["foreword.cache.miss_reason"] = str(explanation.reason)
    if explanation is not None and explanation.divergence is not None:
        attributes["foreword.cache.diverged_at"] = explanation.divergence.position
    return attributes
