"""Tokenizing, chat templates, streaming and stop strings, on tokenizers that the tests train and on real ones."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from doors import backend_of, skipped_ids
from foreword.errors import ChatTemplateError, InvalidRequestError, ModelLoadError
from foreword.text import TextStream, Tokenizer
from foreword.text.rendering import MOST_MESSAGE_ENDS
from lanes import slow
from real_models import real_model, real_tokenizer

CORPUS = [
    "The code of the amber falcon is 4821. What is the code of the amber falcon?",
    "A prefix that two requests share is computed once; the second request reads it.",
    "Ein Präfix, zwei Anfragen: größer wird der Speicher dadurch nicht.",
    "前置きは一度だけ計算されます。二度目は読むだけです。",
    "One 🙂, two 🙂🙂, and a family: 👩‍👩‍👧.",
    "ab ba aab abab bbaa abba",
] * 5
SPECIAL_TOKENS = ["<unk>", "<s>", "</s>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
STRICT_TEMPLATE = (
    "{% if messages[0]['role'] != 'user' %}{{ raise_exception('start with the user') }}{% endif %}" + CHAT_TEMPLATE
)

PROPERTY = settings(deadline=None, max_examples=60)


def byte_level_backend() -> Backend:
    """As GPT-2, Llama 3 and Qwen have it: tokens are byte strings, and may end within a character."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=SPECIAL_TOKENS)
    )
    return backend


def metaspace_backend() -> Backend:
    """As sentencepiece has it: a word carries the space before it, except the first."""
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL_TOKENS))
    return backend


def byte_fallback_backend() -> Backend:
    """As Llama 2 and Gemma have it: sentencepiece, and unknown characters as tokens of one byte each."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = json.loads(metaspace_backend().to_str())
    vocab: dict[str, int] = trained["model"]["vocab"]
    vocab.update({token: len(vocab) + index for index, token in enumerate(byte_tokens)})
    merges = [tuple(pair) for pair in trained["model"]["merges"]]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens(SPECIAL_TOKENS)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def word_piece_backend() -> Backend:
    """As BERT has it: pieces within a word are marked, spaces are not kept."""
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL_TOKENS))
    return backend


def save(backend: Backend, folder: Path, chat_template: str | None = None) -> Path:
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return folder


def load(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(str(folder))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(save(byte_level_backend(), tmp_path_factory.mktemp("byte_level"), CHAT_TEMPLATE))


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(save(metaspace_backend(), tmp_path_factory.mktemp("metaspace")))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(save(byte_fallback_backend(), tmp_path_factory.mktemp("byte_fallback")))


@pytest.fixture(scope="module")
def word_piece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(save(word_piece_backend(), tmp_path_factory.mktemp("word_piece")))


class Shouting(PreTrainedTokenizerFast):
    """A tokenizer class with a way of its own to decode."""

    def _decode(self, *args: Any, **options: Any) -> str:
        text: str = super()._decode(*args, **options)
        return text.upper()


def test_a_tokenizer_class_with_its_own_decoding_is_asked() -> None:
    tokenizer = Tokenizer(Shouting(tokenizer_object=byte_level_backend()))
    token_ids = tokenizer.encode("Once, twice").tolist()
    assert tokenizer.decode(token_ids) == "ONCE, TWICE"
    assert tokenizer.stream().push(token_ids).new_text == "ONCE, TWICE"


# --- Loading --------------------------------------------------------------------------------------


def test_importing_the_module_loads_neither_transformers_nor_torch() -> None:
    code = "import sys, foreword.text.tokenizer; print(sorted({'transformers', 'torch'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_model_folder_without_tokenizer_files_has_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    assert Tokenizer.load(str(tmp_path)) is None


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no folder .*nowhere"):
        Tokenizer.load(str(tmp_path / "nowhere"))


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ModelLoadError, match="is a file"):
        Tokenizer.load(str(file))


def test_a_truncated_tokenizer_file_is_a_load_error(tmp_path: Path) -> None:
    save(byte_level_backend(), tmp_path)
    whole = (tmp_path / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        Tokenizer.load(str(tmp_path))


def test_a_tokenizer_whose_vocabulary_file_is_missing_is_a_load_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(ModelLoadError, match="no vocabulary"):
        Tokenizer.load(str(tmp_path))


def test_a_hub_id_is_told_from_one_without_tokenizer_and_from_one_that_does_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline, from a hub cache laid out by hand."""
    revision = "a" * 40
    for name in ("with", "without"):
        repository = tmp_path / f"models--owner--{name}"
        snapshot = repository / "snapshots" / revision
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text('{"model_type": "llama"}')
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(revision)
    save(byte_level_backend(), tmp_path / "models--owner--with" / "snapshots" / revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found = Tokenizer.load("owner/with")
    assert found is not None
    assert found.vocab_size == 420
    assert Tokenizer.load("owner/without") is None
    with pytest.raises(ModelLoadError, match="'owner/never' is neither a folder"):
        Tokenizer.load("owner/never")


def test_the_end_token_and_the_vocabulary_size_come_from_the_tokenizer(byte_level: Tokenizer) -> None:
    assert byte_level.eos_token_ids == {SPECIAL_TOKENS.index("</s>")}
    assert byte_level.vocab_size == 420


# --- Encoding and decoding ------------------------------------------------------------------------


def test_encoding_gives_int32_and_decoding_gives_the_text_back(byte_level: Tokenizer) -> None:
    text = "The falcon says 🙂 twice.\n"
    token_ids = byte_level.encode(text)
    assert token_ids.dtype == np.int32
    assert token_ids.ndim == 1
    assert byte_level.decode(token_ids.tolist()) == text


def test_the_empty_text_has_no_tokens(byte_level: Tokenizer) -> None:
    assert byte_level.encode("").shape == (0,)
    assert byte_level.decode([]) == ""


def test_encoding_adds_the_special_tokens_that_the_tokenizer_adds(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = load(save(backend, tmp_path))
    token_ids = tokenizer.encode("falcon")
    assert token_ids[0] == 1
    assert tokenizer.decode(token_ids.tolist()) == "falcon"


def test_spaces_before_punctuation_survive_decoding(tmp_path: Path) -> None:
    save(word_piece_backend(), tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["clean_up_tokenization_spaces"] = True
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("falcon.").tolist()).endswith(" .")


def test_half_of_a_surrogate_pair_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        byte_level.encode("broken \ud83d text")


def test_a_prompt_that_is_no_string_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="not bytes"):
        byte_level.encode(b"bytes")  # type: ignore[arg-type]


def test_a_token_alone_reads_as_in_the_middle_of_a_text(
    byte_level: Tokenizer, metaspace: Tokenizer, word_piece: Tokenizer
) -> None:
    for tokenizer in (byte_level, metaspace, word_piece):
        *_, last = tokenizer.encode("The falcon").tolist()
        first, *_ = tokenizer.encode("falcon falcon").tolist()
        assert "The falcon".endswith(tokenizer.token_text(last))
        assert tokenizer.token_text(first).strip() == tokenizer.decode([first]).strip()
    space_word = metaspace.encode("the the").tolist()[-1]
    assert metaspace.token_text(space_word) == " the"


def test_a_special_token_reads_by_its_name_and_a_piece_of_a_character_as_a_replacement(
    byte_level: Tokenizer,
) -> None:
    assert byte_level.token_text(SPECIAL_TOKENS.index("</s>")) == "</s>"
    first_byte = byte_level.encode("\U0001f9ff").tolist()[0]
    assert byte_level.token_text(first_byte) == "\ufffd"


# --- Chat -----------------------------------------------------------------------------------------


def test_a_conversation_is_laid_out_by_the_chat_template(byte_level: Tokenizer) -> None:
    messages = [{"role": "user", "content": "What is the code?"}]
    open_end = byte_level.render_chat(messages)
    closed = byte_level.render_chat(messages, add_generation_prompt=False)
    assert closed.dtype == np.int32
    assert byte_level.decode(closed.tolist()) == "user: What is the code?"
    assert byte_level.decode(open_end.tolist()) == "user: What is the code?assistant:"
    assert closed[0] == SPECIAL_TOKENS.index("<s>")


def test_the_next_turn_begins_with_the_tokens_of_the_turn_before(byte_level: Tokenizer) -> None:
    first = [{"role": "user", "content": "What is the code?"}]
    second = [*first, {"role": "assistant", "content": "4821"}, {"role": "user", "content": "Sure?"}]
    earlier, later = (byte_level.render_chat(m, add_generation_prompt=False) for m in (first, second))
    assert later[: len(earlier)].tolist() == earlier.tolist()


def test_only_the_last_messages_of_a_long_conversation_are_looked_for(byte_level):
    messages = [{"role": "user", "content": f"number {number}"} for number in range(MOST_MESSAGE_ENDS + 20)]
    token_ids = byte_level.render_chat(messages)
    ends = byte_level.message_ends(messages, token_ids)
    assert len(ends) == MOST_MESSAGE_ENDS
    assert ends[-1] == len(byte_level.render_chat(messages[:-1], add_generation_prompt=False))
    assert byte_level.message_ends(messages[:3], byte_level.render_chat(messages[:3])) == tuple(
        len(byte_level.render_chat(messages[:count], add_generation_prompt=False)) for count in (1, 2)
    )


def test_chatting_without_a_template_names_the_remedy(metaspace: Tokenizer) -> None:
    with pytest.raises(ChatTemplateError, match=r"generate\(\)"):
        metaspace.render_chat([{"role": "user", "content": "Hello"}])


def test_a_template_that_refuses_the_conversation_is_quoted(tmp_path: Path) -> None:
    tokenizer = load(save(byte_level_backend(), tmp_path, STRICT_TEMPLATE))
    with pytest.raises(ChatTemplateError, match="start with the user"):
        tokenizer.render_chat([{"role": "assistant", "content": "Hello."}])


def test_a_broken_template_is_a_template_error(tmp_path: Path) -> None:
    tokenizer = load(save(byte_level_backend(), tmp_path, "{% for message in %}"))
    with pytest.raises(ChatTemplateError):
        tokenizer.render_chat([{"role": "user", "content": "Hello"}])


CALL = {"function": {"name": "add", "arguments": {}}}
NESTED = functools.reduce(lambda inner, _: [inner], range(2000), [])


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "empty"),
        ("Hello", "list of messages"),
        ({"role": "user", "content": "Hello"}, "list of messages"),
        (["Hello"], "message 0 is a str"),
        ([{"content": "Hello"}], "'role'"),
        ([{"role": "user", "content": "Hi"}, {"role": "user"}], "message 1 needs a string 'content'"),
        ([{"role": "user", "content": None}], "'content'"),
        (5, "list of messages"),
        ([{"role": "assistant", "content": "", "tool_calls": 5}], "message 0 has tool_calls=5"),
        ([{"role": "assistant", "content": "", "tool_calls": [CALL | {"id": []}]}], r"with id=\[\]; give a text"),
        ([{"role": "tool", "content": "4", "tool_call_id": {}}], "message 0 has tool_call_id={}; give a text"),
        ([{"role": "user", "content": "Hi", "extra": NESTED}], "too deep"),
    ],
)
def test_malformed_messages_are_refused(byte_level: Tokenizer, messages: object, complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        byte_level.render_chat(messages)  # type: ignore[arg-type]


# --- Streaming ------------------------------------------------------------------------------------


def stream_in_pieces(stream: TextStream, token_ids: Sequence[int], sizes: Sequence[int] = (1,)) -> list[str]:
    """Pushes all tokens, in pushes of `sizes` (repeated), and returns every piece of text released."""
    pieces: list[str] = []
    start = 0
    while start < len(token_ids):
        size = sizes[len(pieces) % len(sizes)]
        step = stream.push(token_ids[start : start + size])
        assert stream.text == "".join(pieces) + step.new_text
        pieces.append(step.new_text)
        start += size
    pieces.append(stream.finish())
    assert stream.text == "".join(pieces)
    return pieces


ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
LIKELY_TEXT = st.text(st.sampled_from("abc the 🙂👩‍👧é前置き\n\ufffd"), max_size=60)
SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@PROPERTY
@given(text=ANY_TEXT | LIKELY_TEXT, sizes=SIZES)
def test_streamed_byte_level_text_is_the_decoded_text(byte_level: Tokenizer, text: str, sizes: list[int]) -> None:
    token_ids = byte_level.encode(text).tolist()
    assert "".join(stream_in_pieces(byte_level.stream(), token_ids, sizes)) == text


def test_characters_are_released_whole_and_as_soon_as_they_are_complete(byte_level: Tokenizer) -> None:
    text = "\U00103456\U00103456\u1a3c"  # their bytes are not in the training text: one token per byte
    token_ids = byte_level.encode(text).tolist()[-11:]
    stream = byte_level.stream()
    pieces = [stream.push([token_id]).new_text for token_id in token_ids]
    assert pieces == ["", "", "", "\U00103456", "", "", "", "\U00103456", "", "", "\u1a3c"]


def test_an_incomplete_character_comes_out_as_a_replacement_at_the_end(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("code \U0001f9ff").tolist()
    stream = byte_level.stream()
    stream.push(token_ids[:-1])
    assert stream.text == "code "
    assert stream.finish() == "\ufffd"
    assert stream.text == "code \ufffd"
    assert stream.finish() == ""


def test_special_tokens_within_a_text_leave_no_trace(metaspace: Tokenizer) -> None:
    the = metaspace.encode("the").tolist()
    token_ids = [*the, *[2] * 40, *the, *the]
    assert "".join(stream_in_pieces(metaspace.stream(), token_ids)) == "the the the"


@pytest.mark.parametrize("kind", ["metaspace", "byte_fallback", "word_piece"])
def test_the_cost_of_a_token_does_not_grow_with_the_output(kind: str, request: pytest.FixtureRequest) -> None:
    loaded: Tokenizer = request.getfixturevalue(kind)
    tokenizer, decode, lengths = Tokenizer(backend_of(loaded)), loaded._decode, []

    def counting(token_ids: list[int]) -> str:
        lengths.append(len(token_ids))
        return decode(token_ids)

    tokenizer._decode = counting
    random = np.random.default_rng(7)
    invalid_bytes = random.integers(0, loaded.vocab_size, 1500).tolist()
    text = loaded.encode(" ".join(CORPUS)).tolist()
    stream_in_pieces(tokenizer.stream(), text + invalid_bytes + text)
    assert 1 < max(lengths) <= 50


# --- Stop strings ---------------------------------------------------------------------------------


def cut_at_first_complete(text: str, stops: Sequence[str]) -> tuple[str, str] | None:
    """Text before and name of the stop string that a reader of single characters meets first."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return None


AB = st.text(st.sampled_from("ab 🙂"), max_size=40)
STOPS = st.lists(st.text(st.sampled_from("ab 🙂"), min_size=1, max_size=6), min_size=1, max_size=3)


@PROPERTY
@given(text=AB, stops=STOPS, sizes=SIZES, include_stop=st.booleans())
def test_output_ends_at_the_stop_string_that_is_complete_first_however_tokens_arrive(
    byte_level: Tokenizer, text: str, stops: list[str], sizes: list[int], include_stop: bool
) -> None:
    token_ids = byte_level.encode(text).tolist()
    expected = cut_at_first_complete(text, stops)
    stream = byte_level.stream(stops, include_stop=include_stop)
    pieces: list[str] = []
    num_used = start = 0
    stop: str | None = None
    while start < len(token_ids) and stop is None:
        size = sizes[len(pieces) % len(sizes)]
        step = stream.push(token_ids[start : start + size])
        pieces.append(step.new_text)
        num_used += step.num_tokens_used
        stop = step.stop
        start += size
    pieces.append(stream.finish())
    assert stream.text == "".join(pieces)
    if expected is None:
        assert stop is None
        assert stream.text == text
        assert num_used == len(token_ids)
    else:
        before, stop_string = expected
        assert stop == stop_string
        assert stream.text == (before + stop_string if include_stop else before)
        assert stop in byte_level.decode(token_ids[:num_used])
        assert cut_at_first_complete(byte_level.decode(token_ids[: num_used - 1]), stops) is None


@PROPERTY
@given(text=AB, stops=STOPS)
def test_what_may_begin_a_stop_string_is_held_back_and_nothing_more(
    byte_level: Tokenizer, text: str, stops: list[str]
) -> None:
    stream = byte_level.stream(stops)
    token_ids = byte_level.encode(text).tolist()
    for num_tokens, token_id in enumerate(token_ids, start=1):
        if stream.push([token_id]).stop is not None:
            return
        known = byte_level.decode(token_ids[:num_tokens]).rstrip("\ufffd")
        held = known[len(stream.text) :]
        assert known.startswith(stream.text)
        beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
        assert held == max((b for b in beginnings if known.endswith(b)), key=len)


def test_held_text_comes_out_when_it_was_no_stop_string_after_all(byte_level: Tokenizer) -> None:
    stream = byte_level.stream(["abab!"])
    stream.push(byte_level.encode("x abab").tolist())
    assert stream.text == "x "
    assert stream.push(byte_level.encode("a").tolist()).new_text == "ab"
    assert stream.finish() == "aba"


def test_after_a_stop_string_no_more_tokens_are_read(byte_level: Tokenizer) -> None:
    stream = byte_level.stream(["falcon"])
    stream.push(byte_level.encode("a falcon").tolist())
    step = stream.push(byte_level.encode(" and more").tolist())
    assert (step.new_text, step.stop, step.num_tokens_used) == ("", "falcon", 0)
    assert stream.finish() == ""
    assert stream.text == "a "


def test_stop_strings_within_the_first_min_tokens_are_overlooked(byte_level: Tokenizer) -> None:
    first = byte_level.encode("falcon falcon").tolist()
    rest = byte_level.encode(" and a falcon").tolist()
    stream = byte_level.stream(["falcon"], min_tokens=len(first))
    assert stream.push(first).new_text == "falcon falcon"
    step = stream.push(rest)
    assert step.stop == "falcon"
    assert stream.text == "falcon falcon and a "


def test_a_single_stop_string_need_not_stand_in_a_list(byte_level: Tokenizer) -> None:
    stream = byte_level.stream("falcon")
    stream.push(byte_level.encode("on a falcon").tolist())
    assert stream.text == "on a "


def test_an_empty_stop_string_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="stop string is empty"):
        byte_level.stream(["a", ""])


def test_an_incomplete_character_at_the_end_may_complete_a_stop_string(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("code \U0001f9ff").tolist()
    stream = byte_level.stream([" \ufffd"])
    stream.push(token_ids[:-1])
    assert stream.text + stream.finish() == "code"


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


def random_streams(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Random tokens; two of three streams are mostly pieces of characters."""
    random = np.random.default_rng(4)
    texts = [backend_of(tokenizer).convert_ids_to_tokens(i) or "" for i in range(tokenizer.vocab_size)]
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
        kept = skipped_ids(tokenizer) if number % 2 else frozenset()
        whole = tokenizer.decode(token_ids, kept)
        known = [i for i in token_ids if i < tokenizer.vocab_size]
        assert whole == backend_of(tokenizer).decode(
            known, skip_special_tokens=not kept, clean_up_tokenization_spaces=False
        )
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
        shown = [token_id for token_id in token_ids if token_id not in skipped_ids(tokenizer)]
        spelt = b"".join(tokenizer.token_bytes(token_id) or b"" for token_id in shown)
        assert spelt.decode().strip() == tokenizer.decode(token_ids).strip()
