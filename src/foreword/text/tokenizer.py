"""Tokenizers and chat templates: text to tokens and back.

transformers is imported only for a tokenizer that `json_tokenizer.py` does not read, and for `hf_tokenizer`.
"""

from __future__ import annotations

import functools
import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foreword.errors import InvalidRequestError, ModelLoadError, UnsupportedModelError, one_line
from foreword.text.detokenizer import REPLACEMENT, ByteDetokenizer, Detokenizer, WindowDetokenizer
from foreword.text.json_tokenizer import JsonTokenizer, NotPlainError, find_tokenizer_files
from foreword.text.rendering import Renderer
from foreword.text.reply.format import THINK, ReplyFormat, choose_format
from foreword.text.stream import TextStream
from foreword.text.template_form import explained_form

logger = logging.getLogger(__name__)
_MIN_TOKEN_CHARACTERS = 16
"""`max_token_characters` is never below this number, because one token can stand for more characters than its own name
has: some tokenizers drop characters, or have one token for all unknown words."""
MOST_SPELT = 4096
"""The number of words whose spellings are remembered."""
PROMPT_END_TOKENS = (64, 4096)
"""The number of last prompt tokens in which the reply's beginning is looked for. If the first number is too small, the
second is used."""
Decode = Callable[[list[int]], str]


class Tokenizer(Renderer):
    """A Hugging Face tokenizer, fast or slow, as the rest of foreword uses it.

    Text is decoded without special tokens and exactly as the tokens spell it. transformers' optional clean-up of spaces
    is never applied, because it would change characters that are already written.
    """

    def __init__(self, hf_tokenizer: Any) -> None:
        """Wraps a `JsonTokenizer` or a loaded `transformers.PreTrainedTokenizerBase`; see also `load`."""
        super().__init__(hf_tokenizer)
        self._load_own: Callable[[], Any] = lambda: hf_tokenizer
        eos_token_id: int | None = hf_tokenizer.eos_token_id
        self.eos_token_ids: frozenset[int] = frozenset() if eos_token_id is None else frozenset({eos_token_id})
        """The tokenizer's own end token; a model's generation config may name more."""
        self.vocab_size: int = len(hf_tokenizer)
        """Number of tokens that the tokenizer knows, added tokens included. A model's logits may be wider."""
        self._decode = _backend_decode(hf_tokenizer)
        candidates = {*hf_tokenizer.added_tokens_decoder, *hf_tokenizer.all_special_ids}
        self._skipped_ids = frozenset(i for i in candidates if not self.decode([i]))
        self._response_template: str | None = None
        self._token_texts: dict[int, str] = {}
        self._bytes = TokenBytes(
            hf_tokenizer, self._decode, self.token_text, decodes_plainly=_decodes_plainly(hf_tokenizer)
        )
        self._spelt = functools.lru_cache(MOST_SPELT)(self._spell)
        self._form: tuple[tuple[Any, ...], ReplyFormat | None] | None = None
        """The settings that decide the form of replies, and the form; None: not chosen yet."""
        self._markers_of = functools.lru_cache(1)(self._find_markers)

    @classmethod
    def load(cls, model: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Tokenizer | None:
        """Loads the tokenizer of a local folder or a hub id; None if the model comes without one.

        Raises `ModelLoadError` when the folder is missing, the hub cannot be asked, or the files
        are damaged.
        """
        source = find_tokenizer_files(model, revision)
        if source is None:
            return None
        try:
            if not Path(source).is_dir():
                raise NotPlainError("the hub, where it lies")
            hf_tokenizer: Any = JsonTokenizer.load(Path(source), trust_remote_code=trust_remote_code)
        except NotPlainError as reason:
            logger.info("transformers reads the tokenizer of %s, because of %s", model, reason)
            hf_tokenizer = _load_with_transformers(model, source, revision, trust_remote_code)
        # transformers makes an empty tokenizer if the vocabulary file is missing.
        if len(hf_tokenizer) <= len(hf_tokenizer.added_tokens_decoder):
            raise ModelLoadError(
                f"the tokenizer of {model!r} has no vocabulary; add its vocabulary (usually tokenizer.json), "
                "or delete its other tokenizer files to work with token ids alone"
            )
        tokenizer = cls(hf_tokenizer)
        tokenizer._load_own = functools.partial(_load_with_transformers, model, source, revision, trust_remote_code)
        return tokenizer

    @functools.cached_property
    def max_token_characters(self) -> int:
        """Characters of the longest token in the vocabulary. A text of n tokens has at most n times this number."""
        return max(_MIN_TOKEN_CHARACTERS, *map(len, self._hf.get_vocab()))

    @property
    def hf_tokenizer(self) -> Any:
        """The model's `transformers.PreTrainedTokenizerBase`. From now on foreword uses it; it may be changed."""
        if isinstance(self._hf, JsonTokenizer):
            template, self._hf = self._hf.chat_template, self._load_own()
            self._hf.chat_template = template
        return self._hf

    @property
    def placeholder_id(self) -> int:
        """The token id to use where no real token exists: the unknown token, else padding, else the end token."""
        ids = self._hf.unk_token_id, self._hf.pad_token_id, self._hf.eos_token_id
        return next((int(token_id) for token_id in ids if token_id is not None), 0)

    def set_response_template(self, template: str | None) -> None:
        """Choose the form of replies: a family's name, a file, or a response template's JSON; None: the model's own.

        Raises ConfigError for anything else, and ModelLoadError if the model's own form is damaged.
        """
        self._response_template = template
        self._chosen_form()

    @property
    def reply_format(self) -> ReplyFormat | None:
        """The form of the model's replies; None if they are plain text. Raises ModelLoadError for a damaged form."""
        form = self._chosen_form()
        if self._response_template is None and (form is None or form.name == THINK):
            return explained_form(self.template_report().form, form)
        return form

    def _chosen_form(self) -> ReplyFormat | None:
        """The reply format by option, checkpoint or chat template; chosen again if one of these three changes."""
        wishes = self._response_template, getattr(self._hf, "response_template", None), self.chat_template
        if self._form is None or self._form[0] != wishes:
            self._form = wishes, choose_format(*wishes)
        return self._form[1]

    @functools.cached_property
    def added_tokens(self) -> dict[str, int]:
        """Text -> id of each token that was added to the vocabulary."""
        return {str(token): token_id for token_id, token in self._hf.added_tokens_decoder.items()}

    @property
    def marker_ids(self) -> frozenset[int]:
        """Special tokens that are markers in replies, such as the markers around calls; without end tokens."""
        return self._markers_of(self.reply_format)

    def _spared_tokens(self) -> frozenset[str]:
        marks = self.reply_format.thinking if self.reply_format is not None else None
        return frozenset() if marks is None else frozenset((marks.opens, marks.closes))

    def _find_markers(self, form: ReplyFormat | None) -> frozenset[int]:
        markers = {token_id for token, token_id in self.added_tokens.items() if form and form.has_marker(token)}
        return frozenset(markers & self._skipped_ids - self.eos_token_ids)

    def prompt_end(self, token_ids: Sequence[int] | npt.NDArray[np.int32]) -> str:
        """The last text of a prompt, special tokens included. If possible, the reply's opening marker is in it."""
        form, text = self.reply_format, ""
        for count in PROMPT_END_TOKENS:
            text = self.spell(token_ids[-count:])
            if form is None or len(token_ids) <= count or form.template.start_anchor_re.search(text):
                break
        return text

    def definition(self) -> str | None:
        """The tokenizer as the text of a `tokenizer.json`; None for a slow tokenizer."""
        backend = getattr(self._hf, "backend_tokenizer", None)
        return None if backend is None else str(backend.to_str())

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """Token ids of `text`, with the special tokens that the tokenizer adds by default."""
        return np.array(self._encode(text, add_special_tokens=True), dtype=np.int32)

    def encode_part(self, text: str) -> tuple[int, ...]:
        """Token ids of a text that is part of a prompt. The text may contain special tokens; no others are added."""
        return tuple(self._encode(text, add_special_tokens=False))

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if not isinstance(text, str):
            raise InvalidRequestError(f"a prompt's text must be a str, not {type(text).__name__}")
        try:
            token_ids: list[int] = self._hf.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        except (TypeError, UnicodeError) as error:
            raise InvalidRequestError(
                'the text is not valid Unicode (it holds half of a surrogate pair); decode it with errors="replace"'
            ) from error
        return token_ids

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """Token ids of a word alone and after a space, without special tokens; one list if both are equal.

        The most recent words are remembered.
        """
        return list(self._spelt(word))

    def _spell(self, word: str) -> tuple[tuple[int, ...], ...]:
        try:
            both = [self._hf.encode(text, add_special_tokens=False) for text in (word.lstrip(), f" {word.lstrip()}")]
        except (TypeError, UnicodeError) as error:
            raise InvalidRequestError(f"the word {word!r:.60} is not valid Unicode; leave it out") from error
        return tuple(dict.fromkeys(tuple(token_ids) for token_ids in both))

    def decode(self, token_ids: Sequence[int], kept_ids: frozenset[int] = frozenset()) -> str:
        """Text of `token_ids`, without special tokens except `kept_ids`. Ids beyond the vocabulary have no text."""
        if not kept_ids:
            return self._decode([int(token_id) for token_id in token_ids])
        skipped = self._skipped_ids - kept_ids
        return self._decode_all([int(token_id) for token_id in token_ids if token_id not in skipped])

    def num_tokens_in(self, token_ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> int:
        """The number of a reply's tokens, markers included, whose text begins in one of these spans of characters."""
        begins = self.offsets(token_ids, self.detokenizer(self.marker_ids))
        ends = [bisect_left(begins, offset) for span in spans for offset in span]
        return sum(end - begin for begin, end in zip(ends[::2], ends[1::2], strict=True))

    def spell(self, token_ids: Sequence[int] | npt.NDArray[np.int32]) -> str:
        """Text of `token_ids` with the names of special tokens, for people who read prompts."""
        text: str = self._hf.decode(
            [int(token_id) for token_id in token_ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def token_text(self, token_id: int) -> str:
        """Text of one token in the middle of a text, with its leading space. A special token gives its name.

        A token that is only part of a character gives U+FFFD.
        """
        text = self._token_texts.get(token_id)
        if text is None:
            # Decoders drop the space before the first word, so decode the token after a copy of itself.
            once, twice = (self.spell([token_id] * n) for n in (1, 2))
            text = once if REPLACEMENT in once else twice[len(once) :]
            self._token_texts[token_id] = text
        return text

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that a token adds in the middle of a text. A special token gives the bytes of its name.

        None for a token that is part of a character, if the vocabulary does not give its bytes.
        """
        return self._bytes.of(int(token_id))

    def offsets(self, token_ids: Sequence[int], detokenizer: Detokenizer) -> list[int]:
        """Push tokens to a detokenizer. Returns where each token's text begins, in characters of the whole text.

        A token that begins inside a character counts from the character's beginning.
        """
        begins = []
        for token_id in token_ids:
            begins.append(detokenizer.num_characters)
            detokenizer.push(int(token_id))
        return begins

    def prompt_text(self, token_ids: Sequence[int]) -> str:
        """The text of a prompt that an answer continues, without an incomplete character at its end."""
        if not self.detokenizer(after=token_ids).flush():
            return self.decode(token_ids)
        detokenizer = self.detokenizer()
        return "".join([*(detokenizer.push(int(token_id)) for token_id in token_ids), detokenizer.cut()])

    def stream(
        self,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        kept_ids: frozenset[int] = frozenset(),
        after: Sequence[int] = (),
    ) -> TextStream:
        """A new `TextStream` for one output.

        The strings `stop` end it; with `include_stop` they are part of the text. The stream looks for them only after
        the first `min_tokens` tokens. `kept_ids`: special tokens that are part of the text. `after`: the tokens that
        the text continues. Without them, some decoders drop the space before the text's first word.
        """
        if isinstance(stop, str):
            stop = (stop,)
        if not all(stop):
            raise InvalidRequestError("a stop string is empty; leave it out")
        detokenizer = self.detokenizer(kept_ids, after)
        return TextStream(detokenizer, tuple(stop), include_stop=include_stop, min_tokens=min_tokens)

    def detokenizer(self, kept_ids: frozenset[int] = frozenset(), after: Sequence[int] = ()) -> Detokenizer:
        """Make a detokenizer for the tokens after `after`. Of special tokens, only `kept_ids` become text."""
        skipped = self._skipped_ids - kept_ids
        if self._bytes.is_byte_level:
            return ByteDetokenizer(self._bytes.of, skipped, after)
        return WindowDetokenizer(self._decode_all if kept_ids else self._decode, skipped, self._bytes.byte_of, after)

    def _decode_all(self, token_ids: list[int]) -> str:
        """Text of tokens, special tokens included."""
        text: str = self._hf.decode(
            token_ids,
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
            **({} if self._hf.is_fast else {"spaces_between_special_tokens": False}),
        )
        return text


def _load_with_transformers(model: str, source: str, revision: str | None, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, revision=revision or "main", trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers raises bare Exception for damaged files
        _check_config(model, source, revision, trust_remote_code=trust_remote_code)
        raise ModelLoadError(
            f"the tokenizer of {model!r} cannot be loaded: {one_line(error)}; check its tokenizer files, "
            "or delete them to work with token ids alone"
        ) from error


def _check_config(model: str, source: str, revision: str | None, *, trust_remote_code: bool) -> None:
    """Raise ModelLoadError or UnsupportedModelError if config.json, which tokenizers read too, is at fault."""
    from transformers import AutoConfig

    if Path(source).is_dir() and not (Path(source) / "config.json").exists():
        return
    try:
        AutoConfig.from_pretrained(source, revision=revision or "main", trust_remote_code=trust_remote_code)
    except Exception as error:  # config.json may hold anything
        is_unknown = "does not recognize this architecture" in str(error)
        raise (UnsupportedModelError if is_unknown else ModelLoadError)(
            f"the config.json of {model!r} cannot be used: {one_line(error)}; correct it, or download it again"
        ) from error


def _backend_decode(hf_tokenizer: Any) -> Callable[[list[int]], str]:
    """Return a function that decodes like a transformers tokenizer, without special tokens and clean-up.

    If no class overrides `decode`, the function calls the tokenizer in Rust directly, which takes half the time.
    """
    if _decodes_plainly(hf_tokenizer):
        return functools.partial(hf_tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
    decode = functools.partial(hf_tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return lambda token_ids: decode(list(token_ids))  # foreign code may change the list that it gets


def _decodes_plainly(hf_tokenizer: Any) -> bool:
    """Whether a tokenizer decodes as its backend in Rust does."""
    if isinstance(hf_tokenizer, JsonTokenizer):
        return True
    from transformers import PreTrainedTokenizerFast

    kind: Any = type(hf_tokenizer)
    plain: Any = PreTrainedTokenizerFast
    return issubclass(kind, plain) and kind.decode is plain.decode and kind._decode is plain._decode


class TokenBytes:
    """The bytes that tokens add to a text."""

    def __init__(
        self, hf_tokenizer: Any, decode: Decode, text_of: Callable[[int], str], *, decodes_plainly: bool
    ) -> None:
        """`decode` decodes without special tokens; `text_of` gives the text of a token in the middle of a text.

        `decodes_plainly`: whether the tokenizer decodes as its backend in Rust does.
        """
        self._hf, self._text_of = hf_tokenizer, text_of
        self.is_byte_level: bool = (
            decodes_plainly and type(hf_tokenizer.backend_tokenizer.decoder).__name__ == "ByteLevel"
        )
        """Whether the bytes of a text are its tokens' bytes, one after the other, as in GPT-2's vocabulary."""
        single = {} if self.is_byte_level else _byte_tokens(hf_tokenizer)
        self.byte_of = single if _reads_runs_whole(single, decode) else {}
        """The byte of each token for a single byte, if the decoder reads runs of such tokens as a whole; else empty."""
        self._single = single
        self._of: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes | None:
        """The bytes of a token, or of a special token's name; None if they cannot be known."""
        if token_id not in self._of:
            data = self._find(token_id)
            if data is None:
                return None
            self._of[token_id] = data
        return self._of[token_id]

    def _find(self, token_id: int) -> bytes | None:
        if self.is_byte_level:
            token = self._hf.backend_tokenizer.id_to_token(token_id)
            return b"" if token is None else _spelt(token)
        if token_id in self._single:
            return bytes([self._single[token_id]])
        token = self._hf.convert_ids_to_tokens(token_id)
        if isinstance(token, bytes):  # tokens of tiktoken's vocabularies are bytes
            return token
        text = self._text_of(token_id)
        return None if REPLACEMENT in text and REPLACEMENT not in str(token) else text.encode()


@functools.cache
def _alphabet() -> dict[str, int]:
    """Character of GPT-2's alphabet -> byte.

    A printable byte has the character of its own code; the other bytes have the characters with codes from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _spelt(token: str) -> bytes:
    """The bytes of a token in GPT-2's alphabet. A token with other characters, such as an added one, is plain text."""
    alphabet = _alphabet()
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode()


def _byte_tokens(hf_tokenizer: Any) -> dict[int, int]:
    """Token id -> byte, for sentencepiece's tokens that stand for single bytes, such as `<0xE2>`."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    ids: Sequence[Any] = hf_tokenizer.convert_tokens_to_ids(names)
    pairs = [(token_id, byte) for byte, token_id in enumerate(ids) if isinstance(token_id, int)]
    return {token_id: byte for token_id, byte in pairs if hf_tokenizer.convert_ids_to_tokens(token_id) == names[byte]}


def _reads_runs_whole(byte_of: dict[int, int], decode: Decode) -> bool:
    """Whether one wrong byte makes all bytes of its run unreadable. Tries two right bytes and a wrong third."""
    token_of = {byte: token_id for token_id, byte in byte_of.items()}
    run = [token_of.get(byte) for byte in "é".encode()]
    if None in run:
        return False
    whole = [token_id for token_id in run if token_id is not None]
    return decode(whole) == "é" and decode([*whole, whole[1]]) == 3 * REPLACEMENT
