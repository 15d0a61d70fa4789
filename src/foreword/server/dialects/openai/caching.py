"""Reads the caching fields of OpenAI's calls, and writes the caching fields of the answers.

OpenAI's explicit caching, with its options and breakpoints, becomes marks of a prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from foreword.cache import LookupExplanation, MissReason, common_length
from foreword.engine import BREAKPOINT, Keep, Mark
from foreword.server.answer_stream import AnswerStream
from foreword.server.api_errors import bad_request
from foreword.server.calls import Call, explain_invalid
from foreword.server.dialects.openai.fields import (
    AnyCall,
    Breakpoint,
    CacheOptions,
    ChatRequest,
    ForewordOptions,
    ModulesRequest,
    TextPart,
    Unmarkable,
)
from foreword.server.observe.explanations import cache_report, told_to_client
from foreword.server.records import RequestRecord
from foreword.server.service import ChatMark
from foreword.text.conversation import Place, joined_parts

TTL_S = {"30m": 1800.0, "12h": 43_200.0}
MOST_MARKS = 4
"""Limit of the marks of a prompt, the automatic mark included. If a call has more, only the latest count."""
FORGOTTEN = "forgotten"
"""The reason if the cache has no record of the prompt any more: it was reset, or evicted the prompt long ago."""
UNCACHED = "uncached"
"""The reason if one of the two compared calls asked to bypass the cache."""
HEADER = "x-foreword-cache"


class Breakpoints:
    """The breakpoints of one body. `text` must get all content that can have breakpoints, in the prompt's order."""

    def __init__(self, num_before: int = 0) -> None:
        """`num_before`: the number of the prompt's messages before the message with the index 0."""
        self.seen: list[tuple[Place, str | None]] = []
        """The place and the `ttl` of each breakpoint. Of one content, only the last MOST_MARKS breakpoints are here."""
        self._num_before = num_before

    def text(self, content: str | Sequence[TextPart] | None, where: str, index: int, role: str, begun: str = "") -> str:
        """Return a message's text, which begins with `begun`, and collect its breakpoints.

        Raises APIError 400 for invalid breakpoints.
        """
        if content is None or isinstance(content, str):
            return begun + (content or "")
        texts = [part.text for part in content]
        marked = [
            (number, _breakpoint(part, f"{where}[{number}]").ttl)
            for number, part in enumerate(content)
            if part.prompt_cache_breakpoint is not None
        ]
        for number, ttl in marked[-MOST_MARKS:]:  # earlier ones never count, and joining for each would take long
            size = len(begun) + len(joined_parts(texts[: number + 1], role))
            self.seen.append((Place(index + self._num_before, size), ttl))
        return begun + joined_parts(texts, role)


def _breakpoint(part: TextPart, where: str) -> Breakpoint:
    if part.type not in ("text", "input_text"):
        refuse_breakpoint(part, where)
    try:
        return Breakpoint.model_validate(part.prompt_cache_breakpoint)
    except ValidationError as error:
        at = f"{where}.prompt_cache_breakpoint"
        errors = error.errors(include_url=False, include_input=False)
        raise explain_invalid([{**item, "loc": (at, *item["loc"])} for item in errors]) from None


def refuse_breakpoint(part: Unmarkable | TextPart, where: str) -> None:
    """Raise APIError 400 if a part has a breakpoint although its type cannot have one."""
    if part.prompt_cache_breakpoint is not None:
        at = f"{where}.prompt_cache_breakpoint"
        message = f"Unknown parameter: {at!r}. Only content parts of the types text and input_text can have one."
        raise bad_request(message, param=at, code="unknown_parameter")


class Caching:
    """One call's wishes for the cache."""

    def __init__(self, body: AnyCall, breakpoints: Breakpoints | None = None) -> None:
        """Read the fields. Raises APIError 400 for wishes that exclude each other."""
        options = body.prompt_cache_options or CacheOptions()
        self._explicit = breakpoints.seen if breakpoints is not None else []
        self._mode, self._ttl = options.mode or "implicit", options.ttl or "30m"
        self._has_options = body.prompt_cache_options is not None
        self.compare_with = options.comparison_response_id
        """The id of the response whose prompt is to be compared with this call's prompt; None: no comparison."""
        self.is_prewarm = bool(getattr(options, "prewarm", None))
        """Whether to compute only the prompt, and no answer."""
        self.is_off = self._mode == "explicit" and not self._explicit
        """Whether to bypass the cache."""
        asks = bool(self._explicit or options.mode or options.ttl or self.is_prewarm)
        self._marks_end = asks and self._mode == "implicit"
        if self.is_prewarm and self.is_off:
            at = "prompt_cache_options.prewarm"
            message = f"{at} has nothing to prepare in the mode 'explicit' without a prompt_cache_breakpoint; add one"
            raise bad_request(message, param=at, code="invalid_value")

    @property
    def keeps(self) -> bool:
        """Whether the prompt, or a part of it, is to be kept."""
        return bool(self._explicit) or self._marks_end

    def chat_marks(self, num_messages: int) -> list[ChatMark]:
        explicit = self._explicit[-(MOST_MARKS - 1 if self._marks_end else MOST_MARKS) :]
        marks = [ChatMark(place, self._keep(ttl)) for place, ttl in explicit]
        return [*marks, ChatMark(Place(num_messages - 1), self._keep())] if self._marks_end else marks

    def text_marks(self, num_tokens: int) -> tuple[Mark, ...]:
        """Return the marks of a prompt without messages: if the call asks for caching, one mark at the prompt's end."""
        return (Mark(num_tokens, self._keep()),) if self._marks_end else ()

    def _keep(self, ttl: str | None = None) -> Keep:
        return Keep(TTL_S[ttl or self._ttl], BREAKPOINT)

    def options(self) -> dict[str, Any] | None:
        """Return the applied options, for the answer; None if the call has neither options nor breakpoints."""
        if not self._has_options and not self._explicit:
            return None
        return {"mode": self._mode, "ttl": self._ttl, "comparison_response_id": self.compare_with}


def check_beside_link(call: Call[ChatRequest] | Call[ModulesRequest], caching: Caching) -> None:
    """Raise APIError 400 for a field that calls with `link` cannot have, even if nothing is linked in the end."""
    body, adapters = call.body, call.service.adapters
    for name, is_given in (
        ("logprobs with echo", isinstance(body, ModulesRequest) and body.echo and body.logprobs is not None),
        ("foreword.certificate", body.foreword is not None and body.foreword.certificate),
        ("truncate_prompt_tokens", body.truncate_prompt_tokens is not None),
        ("prompt_cache_options or prompt_cache_breakpoint", caching.keeps),
        ("model that is an adapter", body.model in adapters and call.tenant.may_use(str(body.model))),
    ):
        if is_given:
            raise bad_request(
                f"a linked prompt takes no {name}; leave it out, or leave link out", param=name.partition(" ")[0]
            )


_TEMPLATE_REASONS = {"tools": "tools_changed", "reasoning_effort": "reasoning_effort_changed"}
"""For each template input: OpenAI's name for a change of this input.

OpenAI's other reasons cannot occur. The server has one model and compacts no conversations, and prompts do not depend
on a text's format, its verbosity or a service tier.
"""


def diagnose(record: RequestRecord, earlier: RequestRecord | None, block_size: int) -> dict[str, Any]:
    """Compare a request after its lookup with an earlier request of its tenant (None: no such request was found).

    `unavailable` means that the later prompt repeats or continues the earlier prompt, but was not found. The field
    `reason`, an extension, says why the earlier prompt's blocks were not found.
    """
    if earlier is None:
        return {"type": "comparison_response_not_found"}
    if record.first_scheduled_time is None:
        return {"type": "unavailable"}
    if record.is_uncached or earlier.is_uncached:
        return {"type": "unavailable", "reason": UNCACHED}
    ours, theirs = record.prompt_token_ids, earlier.prompt_token_ids
    shared = common_length(ours, theirs)
    if record.salt != earlier.salt:
        return _miss("prompt_cache_key_changed", len(ours), len(theirs))
    if shared < min(len(ours), len(theirs)):
        before, after = earlier.template_digests, record.template_digests
        changed = (reason for name, reason in _TEMPLATE_REASONS.items() if before.get(name) != after.get(name))
        return _miss(next(changed, "input_changed"), len(ours) - shared, len(theirs))
    # The last token is always computed, and a partial block may not be cached.
    if record.num_cached_tokens >= max(1, shared - max(1, shared % block_size)):
        return {"type": "cache_hit"}
    reason = _reason_of_miss(record.explanation)
    return {"type": "unavailable"} | ({} if reason is None else {"reason": reason})


def _reason_of_miss(explanation: LookupExplanation | None) -> str | None:
    """Say why a prompt that ran before was not found; None without a ledger."""
    if explanation is None or explanation.reason is None:
        return None
    reason = told_to_client(explanation.reason)
    return FORGOTTEN if reason is MissReason.NEVER_SEEN else str(reason)


def _miss(reason: str, num_missed: int, num_reusable: int) -> dict[str, Any]:
    return {
        "type": "cache_miss",
        "reason": reason,
        "cache_missed_tokens": num_missed,
        "comparison_reusable_tokens": num_reusable,
    }


class Extras:
    """The extra fields that a call asks for in its answer, and the call's `Caller`, whose hints one field reports."""

    def __init__(self, call: Call[AnyCall], endpoint: str, caching: Caching) -> None:
        self.caching = caching
        self.caller = replace(call.caller(endpoint), is_uncached=caching.is_off)
        self._hints = self.caller.hints
        self._service, self._tenant = call.service, call.tenant
        options = call.body.foreword or ForewordOptions()
        self._wants_certificate = options.certificate
        self._wants_cache = options.cache or call.request.headers.get(HEADER, "").lower() in ("1", "true", "yes")

    def of(self, answer: AnswerStream) -> dict[str, Any]:
        """Return the fields to add to the body of a finished answer; empty if the call asked for no such fields.

        `foreword.cache` is one report, or a list if the call had several prompts. `foreword.drafts` counts drafted
        tokens, `foreword.certificate` has a digest of logits for each choice, and `foreword.kv_hints` has the outcomes
        of hints.
        """
        ours: dict[str, Any] = {}
        records = [job.record for job in answer.jobs]
        if self._wants_cache:
            reports = [self._report(record) for record in records]
            ours = {"cache": reports[0] if len(reports) == 1 else reports, **_of_drafts(answer)}
        if self._wants_certificate:
            ours["certificate"] = self._service.llm.certificate(answer.outputs)
        if self._hints is not None:
            for record, output in zip(records, answer.outputs, strict=True):
                self._hints.note_request(record.session_id, record.num_prompt_tokens, output.kept)
            ours["kv_hints"] = self._hints.report()
        fields: dict[str, Any] = {"foreword": ours} if ours else {}
        if self.caching.compare_with is not None:
            earlier = self._service.records.of_response(self.caching.compare_with, self._tenant.name)
            block_size = self._service.llm.layout.block_size
            fields["prompt_cache_diagnostics"] = diagnose(records[0], earlier, block_size)
            fields["prompt_cache_options"] = self.caching.options()
        return fields

    def _report(self, record: RequestRecord) -> dict[str, Any]:
        explanation = record.explanation
        similar = None
        if explanation is not None and explanation.reason is not None:
            similar = self._service.insight.similar(record)
        report = cache_report(explanation, record.prompt_token_ids, self._service.llm.tokenizer, similar=similar)
        if record.link is not None:
            report |= {"linked_tokens": record.link.linked_tokens, "computed_tokens": record.num_computed_tokens}
        return report


def _of_drafts(answer: AnswerStream) -> dict[str, Any]:
    """Count the accepted and rejected drafted tokens by source; empty if no token was drafted."""
    counts = [choice.drafts for output in answer.outputs for choice in output.outputs]
    accepted = sum((Counter(drafts.accepted) for drafts in counts), Counter[str]())
    rejected = sum((Counter(drafts.rejected) for drafts in counts), Counter[str]())
    return {"drafts": {"accepted": accepted, "rejected": rejected}} if accepted or rejected else {}
