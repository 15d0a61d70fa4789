"""Streams of tokens as text, on real tokenizers and on those that the tests train: they equal the decoded whole."""

from __future__ import annotations

import numpy as np
import pytest

from foreword.text import Tokenizer
from lanes import slow
from real_models import real_model, real_tokenizer
from text.test_text import (
    CORPUS,
    byte_fallback_backend,
    byte_level_backend,
    load,
    metaspace_backend,
    save,
    word_piece_backend,
)

MADE = {
    "byte_level": byte_level_backend,
    "byte_fallback": byte_fallback_backend,  # as Llama 2 and Mistral v1 to v3
    "metaspace": metaspace_backend,
    "word_piece": word_piece_backend,
}
REPLACEMENT = "\ufffd"


@pytest.fixture(scope="module", params=list(MADE))
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(save(MADE[request.param](), tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(save(byte_fallback_backend(), tmp_path_factory.mktemp("byte_fallback")))


def random_streams(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Random tokens; two of three streams are mostly pieces of characters."""
    random = np.random.default_rng(4)
    texts = [tokenizer._hf.convert_ids_to_tokens(i) or "" for i in range(tokenizer.vocab_size)]
    bytes_alone = [i for i, text in enumerate(texts) if len(text) == 1 or text.startswith("<0x")]
    broken = [i for i in range(tokenizer.vocab_size) if REPLACEMENT in tokenizer.decode([i])] or bytes_alone
    streams = []
    for number in range(count):
        token_ids = random.integers(0, tokenizer.vocab_size + 2, int(random.integers(1, 40)))
        pieces = random.choice(bytes_alone if number % 3 == 1 else broken, len(token_ids))
        token_ids = np.where(random.random(len(token_ids)) < (0.6 if number % 3 else 0.0), pieces, token_ids)
        streams.append(token_ids.tolist())
    return streams


def assert_streams_equal_wholes(tokenizer: Tokenizer, count: int) -> None:
    for number, token_ids in enumerate(random_streams(tokenizer, count)):
        kept = tokenizer._skipped_ids if number % 2 else frozenset()
        whole = tokenizer.decode(token_ids, kept)
        known = [i for i in token_ids if i < tokenizer.vocab_size]
        assert whole == tokenizer._hf.decode(known, skip_special_tokens=not kept, clean_up_tokenization_spaces=False)
        stream = tokenizer.stream(kept_ids=kept)
        pieces = [stream.push([token_id]).new_text for token_id in token_ids]
        assert "".join(pieces) + stream.finish() == whole, token_ids
        if len(whole) < 3:
            continue
        begin = len(whole) // 2
        stop = whole[begin : begin + 2]
        stream = tokenizer.stream([stop], kept_ids=kept)
        step = stream.push(token_ids)
        stream.finish()
        read = tokenizer.decode(token_ids[: step.num_tokens_used], kept)
        assert stream.text == read[: read.index(stop)], (token_ids, stop)


def test_streams_are_the_decoded_text_with_stop_strings_and_special_tokens_too(tokenizer: Tokenizer) -> None:
    assert_streams_equal_wholes(tokenizer, 300)


@pytest.mark.parametrize("name", ["llama3", "deepseek_v3", "smollm2", *slow("qwen3", "gemma3", "gptoss")])
def test_streams_of_real_tokenizers_are_the_decoded_text(name: str) -> None:
    assert_streams_equal_wholes(load(real_model(name) if name == "smollm2" else real_tokenizer(name)), 600)


def test_an_answer_goes_on_where_the_prompt_ends(tokenizer: Tokenizer) -> None:
    """However a text is cut into prompt and answer, within characters and spaces too, both make the whole."""
    for text in [*CORPUS[:6], "a  b   c \u1a3c\u1a3c \U0001f9ff\U0001f9ff x"]:
        token_ids = tokenizer.encode(text).tolist()
        for cut in range(1, len(token_ids)):
            prompt, answer = token_ids[:cut], token_ids[cut:]
            stream = tokenizer.stream(after=prompt)
            new = "".join([stream.push([token_id]).new_text for token_id in answer]) + stream.finish()
            assert tokenizer.prompt_text(prompt) + new == tokenizer.decode(token_ids)


def test_a_stop_string_may_begin_with_the_space_after_the_prompt(tokenizer: Tokenizer) -> None:
    prompt, whole = (tokenizer.encode(text).tolist() for text in ("The code", "The code of the"))
    assert whole[: len(prompt)] == prompt
    stream = tokenizer.stream([" of"], after=prompt)
    assert stream.push(whole[len(prompt) :]).stop == " of"
    assert stream.text == ""


def test_a_text_of_its_own_loses_the_space_that_the_decoder_drops(byte_fallback: Tokenizer) -> None:
    the = byte_fallback.encode("the").tolist()
    assert byte_fallback.stream().push(the).new_text == "the"
    assert byte_fallback.stream(after=the).push(the).new_text == " the"
    assert byte_fallback.stream(after=[1, 2]).push(the).new_text == "the"  # special tokens have no text


def test_characters_of_a_run_of_bytes_wait_for_its_end_but_stop_strings_do_not(byte_fallback: Tokenizer) -> None:
    valid = byte_fallback.encode("\U0001f9ff").tolist()[-4:]
    stream = byte_fallback.stream()
    assert stream.push(valid).new_text == ""
    assert stream.push(byte_fallback.encode("the").tolist()).new_text == "\U0001f9ff the"
    stream = byte_fallback.stream(["\U0001f9ff"])
    step = stream.push(valid + valid)
    assert (step.stop, step.num_tokens_used, stream.text) == ("\U0001f9ff", 4, "")
    # Not within the first tokens, though: the character was complete before.
    stream = byte_fallback.stream(["\U0001f9ff"], min_tokens=4)
    assert stream.push([*valid, *byte_fallback.encode("the").tolist()]).stop is None
    assert stream.text == "\U0001f9ff the"


def test_an_answer_that_is_cut_off_inside_a_character_ends_before_it(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("the \U0001f9ff\U0001f9ff").tolist()
    for end in range(1, len(token_ids)):
        stream = tokenizer.stream()
        stream.push(token_ids[:end])
        stream.cut()
        assert REPLACEMENT not in stream.text
        assert tokenizer.decode(token_ids).startswith(stream.text)


def test_tokens_begin_where_the_text_before_them_ends(tokenizer: Tokenizer) -> None:
    for text in [*CORPUS, "\U0001f9ff\U0001f9ff x \u1a3c the"]:
        token_ids = tokenizer.encode(text).tolist()
        offsets = tokenizer.offsets(token_ids, tokenizer.detokenizer())
        assert offsets == [len(tokenizer.prompt_text(token_ids[:end])) for end in range(len(token_ids))]


def test_the_bytes_of_tokens_make_the_text(tokenizer: Tokenizer) -> None:
    for text in [*CORPUS, "\U0001f9ff\U0001f9ff x \u1a3c the"]:
        token_ids = tokenizer.encode(text).tolist()
        shown = [token_id for token_id in token_ids if token_id not in tokenizer._skipped_ids]
        spelt = b"".join(tokenizer.token_bytes(token_id) or b"" for token_id in shown)
        assert spelt.decode().strip() == tokenizer.decode(token_ids).strip()
