"""The linter's core: planted causes are found where they are, and a cache gives what it promises."""

from __future__ import annotations

import json
from itertools import combinations
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.cache import HashIndex, KVCacheManager, TokenSequence, common_length
from foreword.demo.run import embedded_model
from foreword.errors import ConfigError
from foreword.lint.bodies import _in_brackets
from foreword.lint.check import lint_prompts
from foreword.lint.prompts import LintPrompt
from foreword.text import Tokenizer
from lint.planted import FACTS, NUM_REQUESTS, conversation, planted, question, rendered
from tiny_models import save_tokenizer

NAMES = {
    "date": "a date or time",
    "uuid": "an id",
    "counter": "a counter",
    "header": "a header",
    "name": "a name",
    "tools": "tools in another order",
    "keys": "keys of JSON in another order",
    "space": "white space",
    "order": "the same parts in another order",
    "picture": "a picture",
    "passages": "a passage, such as retrieved documents",
}


@pytest.fixture(scope="module")
def tokenizer():
    with embedded_model() as folder:
        return Tokenizer.load(str(folder))


def cached_share(prompts):
    """The share of the tokens that the cache itself finds, whole blocks of 16."""
    manager = KVCacheManager(10_000, block_size=16, index=HashIndex(10_000))
    found = 0
    for number, tokens in enumerate(prompts):
        manager.begin_step()
        sequence = TokenSequence(str(number), tokens, block_size=16)
        hit = manager.get_computed_blocks(sequence)
        found += hit.num_tokens
        assert manager.allocate_slots(sequence, len(tokens), hit) is not None
        manager.take_copies()
        manager.free(sequence.request_id)
    return found / sum(map(len, prompts))


def num_computed(prompts, hit_rate):
    return sum(map(len, prompts)) * (1 - hit_rate)


@pytest.mark.parametrize("cause", NAMES)
def test_a_planted_cause_is_named_where_it_is_and_a_cache_gives_the_promised_hit_rate(tokenizer, cause):
    prompts = planted(tokenizer, cause)
    report = lint_prompts(prompts, tokenizer.spell)
    as_sent = [prompt.token_ids for prompt in prompts]
    (finding,) = report.findings
    assert finding.causes[0] == NAMES[cause]
    assert finding.num_prompts == NUM_REQUESTS
    parts = [common_length(one.token_ids, other.token_ids) for one, other in combinations(prompts, 2)]
    assert finding.position == min(parts)
    assert cached_share(as_sent) == pytest.approx(report.hit_rate)
    assert cached_share(report.mended) == pytest.approx(report.hit_rate_after)
    assert finding.hit_rate_after == report.hit_rate_after > report.hit_rate
    saved = num_computed(as_sent, report.hit_rate) - num_computed(report.mended, report.hit_rate_after)
    assert finding.wasted_tokens == pytest.approx(saved)
    assert report.a_day(finding.wasted_tokens) == pytest.approx(finding.wasted_tokens / (NUM_REQUESTS - 1) * 24 * 60)


@pytest.mark.parametrize("cause", ["date", "uuid", "counter", "header", "name", "tools", "order"])
def test_what_a_client_gains_by_following_the_remedy_is_what_was_promised(tokenizer, cause):
    promised = lint_prompts(planted(tokenizer, cause), tokenizer.spell).hit_rate_after
    random, chats = Random(1), []
    for number in range(NUM_REQUESTS):
        (system, asked), tools = conversation(cause, number, random)
        own, same = system["content"].removesuffix(FACTS), FACTS
        if cause == "order":
            own, same = "", f"{''.join(sorted(own.splitlines(keepends=True)))}{FACTS}"
        tools.sort(key=lambda tool: tool["function"]["name"])
        chats.append(([{**system, "content": same}, {**asked, "content": f"{asked['content']}\n{own}"}], tools))
    gained = cached_share([prompt.token_ids for prompt in rendered(tokenizer, chats)])
    assert gained == pytest.approx(promised, abs=0.06)  # a client moves a whole line


def test_clean_traffic_has_no_findings(tokenizer):
    random = Random(5)
    several = [[{"role": "system", "content": FACTS}, question(random)] for _ in range(8)]
    growing = [several[0]]
    for _ in range(8):
        answer = {"role": "assistant", "content": question(random)["content"]}
        growing.append([*growing[-1], answer, question(random)])
    prompts = rendered(tokenizer, [(messages, []) for messages in [*several, *growing]])
    report = lint_prompts(prompts, tokenizer.spell)
    assert report.findings == []
    assert report.hit_rate_after == report.hit_rate > 0.8
    assert lint_prompts(planted(tokenizer, "clean"), tokenizer.spell).findings == []


def test_a_time_before_long_conversations_is_one_finding_for_all_of_them(tokenizer):
    random, chats = Random(2), []
    for _ in range(5):
        told = []
        for _ in range(5):
            told.append(question(random))
            time = f"{random.randrange(24):02d}:{random.randrange(60):02d}"
            chats.append(([{"role": "system", "content": f"Be brief. It is {time} now."}, *told], []))
            told.append({"role": "assistant", "content": " ".join(question(random)["content"] for _ in range(3))})
    prompts = rendered(tokenizer, chats)
    report = lint_prompts(prompts, tokenizer.spell)
    (finding,) = report.findings
    assert finding.causes == ("a date or time",)
    assert report.hit_rate < 0.05 < 0.6 < report.hit_rate_after
    assert cached_share(report.mended) == pytest.approx(report.hit_rate_after)


def test_two_causes_share_what_both_together_save(tokenizer):
    random, chats = Random(3), []
    for number in range(NUM_REQUESTS):
        system = f"Today is 2026-11-{1 + number:02d}.\n{FACTS}Trace {random.getrandbits(64):016x}.\n{FACTS[::-1]}"
        chats.append(([{"role": "system", "content": system}, question(random)], []))
    report = lint_prompts(rendered(tokenizer, chats), tokenizer.spell)
    assert [finding.causes for finding in report.findings] == [("a date or time",), ("an id",)]
    assert report.findings[0].hit_rate_after < report.findings[1].hit_rate_after == report.hit_rate_after
    assert report.wasted_tokens == round((report.hit_rate_after - report.hit_rate) * report.num_tokens)


REWRITING = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}"
    "{% if m.reasoning_content and loop.index > messages | map(attribute='role') | list | length - 2 %}"
    " ({{ m.reasoning_content }}){% endif %}</s>{% endfor %}<s>assistant: "
)


def test_a_template_that_rewrites_earlier_turns_is_found(tmp_path):
    tokenizer = Tokenizer.load(str(save_tokenizer(tmp_path, chat_template=REWRITING)))
    random, chats = Random(4), []
    for _ in range(3):
        told = [{"role": "system", "content": FACTS[:200]}, question(random)]
        for _ in range(5):
            thought, answer = question(random)["content"], question(random)["content"]
            told += [{"role": "assistant", "content": answer * 3, "reasoning_content": thought}, question(random)]
            chats.append((list(told), []))
    prompts = rendered(tokenizer, chats)
    report = lint_prompts(prompts, tokenizer.spell)
    (finding,) = report.findings
    assert finding.causes == ("a chat template that rewrites earlier turns",)
    assert finding.num_prompts == 15
    assert finding.wasted_tokens > 12 * 60  # in each turn but the first, the question before
    assert cached_share(report.mended) == pytest.approx(report.hit_rate_after)


def test_a_small_cache_is_promised_no_more_than_it_holds(tokenizer):
    prompts = planted(tokenizer, "date")
    large, small = (lint_prompts(prompts, tokenizer.spell, cache_tokens=size) for size in (None, 320))
    assert large.hit_rate_after > 0.8
    assert small.hit_rate_after < large.hit_rate_after
    with pytest.raises(ConfigError, match="cache_tokens=8"):
        lint_prompts(prompts, tokenizer.spell, cache_tokens=8)


@given(st.lists(st.lists(st.integers(0, 3), max_size=200), max_size=12), st.integers(1, 4), st.randoms())
def test_odd_prompts_never_fail_and_figures_add_up(shapes, repeats, random):
    alphabet = [np.arange(20) * (one + 1) % 97 for one in range(4)]
    drawn = [
        LintPrompt(
            np.concatenate([np.empty(0), *(alphabet[one][: random.randrange(1, 20)] for one in shape)]).astype(np.int32)
        )
        for shape in shapes
    ] * repeats
    report = lint_prompts(drawn, lambda tokens: " ".join(map(str, tokens)), block_tokens=2)
    assert len(report.mended) == len(drawn)
    as_sent = [prompt.token_ids for prompt in drawn]
    saved = num_computed(as_sent, report.hit_rate) - num_computed(report.mended, report.hit_rate_after)
    assert report.wasted_tokens == pytest.approx(saved, abs=1e-3)
    assert all(0 < finding.wasted_tokens <= report.num_tokens for finding in report.findings)
    if not report.findings:
        assert all((one.token_ids == other).all() for one, other in zip(drawn, report.mended, strict=True))


def test_a_picture_is_the_same_with_other_fields_beside_it():
    anthropic = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
    responses = {"type": "input_image", "image_url": "data:image/png;base64,aaaa"}
    chat = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}
    google = {"inlineData": {"mimeType": "image/png", "data": "aaaa"}}
    for part, other in (
        (anthropic, {**anthropic, "cache_control": {"type": "ephemeral"}}),
        (responses, {**responses, "detail": "high"}),
        (chat, {**chat, "image_url": {**chat["image_url"], "detail": "low"}}),
        (google, {**google, "mediaResolution": "LOW"}),
    ):
        kind = part.get("type", "inlineData")
        shown = [_in_brackets(kind, one) for one in (part, other, json.loads(json.dumps(part).replace("aaaa", "bbbb")))]
        assert shown[0] == shown[1] != shown[2]
