"""Fields for features that this engine lacks are known by name, and any value that asks for something is refused."""

from __future__ import annotations

import pytest

from foreword.server.bodies.fields import Body
from foreword.server.dialects.anthropic import fields as anthropic
from foreword.server.dialects.gemini import fields as gemini
from foreword.server.dialects.ollama import fields as ollama
from foreword.server.dialects.openai import fields as openai

UNSUPPORTED: dict[type[Body], str] = {
    openai.ChatRequest: "functions audio web_search_options",
    openai.CompletionRequest: "suffix",
    openai.ModulesRequest: "suffix",
    openai.ResponsesRequest: "conversation prompt",
    anthropic.CreateMessageRequest: "mcp_servers compaction billing_policy container fallbacks fallback_credit_token",
    anthropic.CountMessageTokensRequest: "mcp_servers compaction billing_policy",
    ollama.GenerateRequest: "suffix template",
    gemini.GenerateContentRequest: "store continuation_token",
    gemini.CreateCachedContentRequest: "name kms_key_name",
    gemini.GenerationConfig: "speech_config image_config media_resolution audio_transcription_config "
    "translation_config response_format enable_enhanced_civic_answers enable_affective_dialog",
    gemini.ContentPart: "file_data executable_code code_execution_result tool_call tool_response "
    "audio_transcription video_metadata media_resolution",
    gemini.GoogleFunctionCall: "partial_args will_continue",
    gemini.GoogleFunctionResponse: "parts scheduling will_continue",
    gemini.GoogleTool: "google_search google_search_retrieval google_maps code_execution url_context file_search "
    "computer_use mcp_servers",
    gemini.FunctionCallingConfig: "stream_function_call_arguments",
    gemini.GoogleToolConfig: "retrieval_config include_server_side_tool_invocations",
}


@pytest.mark.parametrize("body", UNSUPPORTED, ids=lambda body: body.__name__)
def test_what_is_not_supported_is_known_by_name(body: type[Body]) -> None:
    assert tuple(UNSUPPORTED[body].split()) == body.UNSUPPORTED
    for name in body.UNSUPPORTED:
        for value in (True, 0, 1.5, "x", [{}], {"x": None}):
            assert body.model_construct(**{name: value}).asks_for_unsupported() == name
        for value in (None, False, "", "none", [], {}):
            is_tool = body is gemini.GoogleTool and value is not None  # Google's own: an empty object asks for one
            assert body.model_construct(**{name: value}).asks_for_unsupported() == (name if is_tool else None)
