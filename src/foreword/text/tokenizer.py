"""Text at the two ends of a request: tokenizing, chat templates, streaming, stop strings.

Knows what a model's tokenizer does with strings and token ids. Knows nothing of tensors, of when a
token is computed, or of what is cached. transformers is imported when a tokenizer is loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foreword.errors import ChatTemplateError, ConfigError, InvalidRequestError, ModelLoadError, UnsupportedModelError
from foreword.text.conversation import plain_messages

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "tiktoken.model",
)
"""A model that has none of these has no tokenizer."""

_REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are not, or not yet, a character."""

_MAX_INCOMPLETE = 3
"""Most replacement characters that bytes still to come can turn into one character (UTF-8: 4 bytes)."""

_WINDOW_TOKENS = 12
"""A detokenizer's window is shortened when it reaches this length..."""

_KEPT_TOKENS = 6
"""...to this one: enough bytes (one or more per token) to hold any incomplete character."""

_MAX_WINDOW_TOKENS = 256
"""A window that could not be shortened until now is shortened regardless."""

_NO_INPUTS = frozenset(
    "conversation chat_template add_generation_prompt tokenize padding truncation max_length return_tensors "
    "return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)
"""Arguments of transformers' rendering that are no inputs of a template."""

_MIN_TOKEN_CHARACTERS = 16
"""Leaves room for tokenizers that drop characters, such as spaces at the end, or have one token for unknown words."""

MOST_SPELT = 4096
"""Words whose spellings are remembered."""

MOST_MESSAGE_ENDS = 64
"""Messages of a conversation behind which recurrent states may be saved, the last ones."""


class Tokenizer:
    """A Hugging Face tokenizer, fast or slow, as the rest of foreword sees it.

    Text is decoded without special tokens and exactly as the tokens spell it: transformers' optional
    clean-up of spaces, which takes back characters already written, is never applied.
    """

    def __init__(self, hf_tokenizer: Any) -> None:
        """Wraps a loaded `transformers.PreTrainedTokenizerBase`; see also `load`."""
        self._hf = hf_tokenizer
        eos_token_id: int | None = hf_tokenizer.eos_token_id
        self.eos_token_ids: frozenset[int] = frozenset() if eos_token_id is None else frozenset({eos_token_id})
        """What the tokenizer alone calls the end; a model's generation config may name more."""
        self.vocab_size: int = len(hf_tokenizer)
        """Tokens the tokenizer knows, added ones included; a model's logits may be padded beyond."""
        self._decode = _backend_decode(hf_tokenizer)
        candidates = {*hf_tokenizer.added_tokens_decoder, *hf_tokenizer.all_special_ids}
        self._skipped_ids = frozenset(i for i in candidates if not self.decode([i]))
        self._token_texts: dict[int, str] = {}
        self._spelt = functools.lru_cache(MOST_SPELT)(self._spell)

    @classmethod
    def load(cls, model: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Tokenizer | None:
        """Loads the tokenizer of a local folder or a hub id; None when the model comes without one.

        Raises `ModelLoadError` when the folder is missing, the hub cannot be asked, or the files
        are damaged.
        """
        source = _find_tokenizer_files(model, revision)
        if source is None:
            return None
        from transformers import AutoTokenizer

        try:
            hf_tokenizer = AutoTokenizer.from_pretrained(
                source, revision=revision or "main", trust_remote_code=trust_remote_code
            )
        except Exception as error:  # tokenizers raises bare Exception for damaged files
            raise ModelLoadError(
                f"The tokenizer of {model!r} cannot be loaded: {_one_line(error)} Check its tokenizer files, "
                "or delete them to work with token ids alone."
            ) from error
        # transformers makes an empty tokenizer when the vocabulary file is missing.
        if len(hf_tokenizer) <= len(hf_tokenizer.added_tokens_decoder):
            raise ModelLoadError(
                f"The tokenizer of {model!r} has no vocabulary. Add its vocabulary (usually tokenizer.json), "
                "or delete its other tokenizer files to work with token ids alone."
            )
        return cls(hf_tokenizer)

    @functools.cached_property
    def max_token_characters(self) -> int:
        """Characters of the longest token in the vocabulary. A text of n tokens has at most n times as many."""
        return max(_MIN_TOKEN_CHARACTERS, *map(len, self._hf.get_vocab()))

    @property
    def hf_tokenizer(self) -> Any:
        """The `transformers.PreTrainedTokenizerBase` that does the work."""
        return self._hf

    @property
    def chat_template(self) -> str | None:
        """The template's source; None if there is none, or if it is one of several by name."""
        template = self._hf.chat_template
        return template if isinstance(template, str) else None

    def set_chat_template(self, template: str) -> None:
        """Lay conversations out by another template: its source, or the path of a file that holds it.

        Raises ConfigError for a file that cannot be read, or a source that is no template.
        """
        source = template
        if "\n" not in template and "{" not in template:
            try:
                source = Path(template).expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"chat_template={template!r} cannot be read as UTF-8 text: {error}") from error
        from jinja2 import Environment, TemplateSyntaxError

        try:
            Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
        except TemplateSyntaxError as error:
            if "generation" not in str(error):  # transformers has a block of that name
                raise ConfigError(f"chat_template={template!r:.60} is not a Jinja template: {error}") from error
        self._hf.chat_template = source

    def definition(self) -> str | None:
        """The contents of a `tokenizer.json` that defines it; None for a slow tokenizer, which has no such form."""
        backend = getattr(self._hf, "backend_tokenizer", None)
        return None if backend is None else str(backend.to_str())

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """Token ids of `text`, with the special tokens that the tokenizer adds by default."""
        if not isinstance(text, str):
            raise InvalidRequestError(f"A prompt's text has to be a str, not {type(text).__name__}.")
        try:
            token_ids = self._hf.encode(text, verbose=False)
        except (TypeError, UnicodeError) as error:
            raise InvalidRequestError(
                'The text is not valid Unicode (it holds half of a surrogate pair); decode it with errors="replace".'
            ) from error
        return np.array(token_ids, dtype=np.int32)

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """Token ids of a word alone and after a space, without special tokens; one where both are the same.

        The last ones are remembered.
        """
        return list(self._spelt(word))

    def _spell(self, word: str) -> tuple[tuple[int, ...], ...]:
        try:
            both = [self._hf.encode(text, add_special_tokens=False) for text in (word.lstrip(), f" {word.lstrip()}")]
        except (TypeError, UnicodeError) as error:
            raise InvalidRequestError(f"The word {word!r:.60} is not valid Unicode; leave it out.") from error
        return tuple(dict.fromkeys(tuple(token_ids) for token_ids in both))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without special tokens. Ids beyond the vocabulary have no text."""
        return self._decode([int(token_id) for token_id in token_ids])

    def spell(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` with special tokens by name: for people who look at prompts."""
        text: str = self._hf.decode(
            [int(token_id) for token_id in token_ids],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        return text

    def token_text(self, token_id: int) -> str:
        """One token as it reads in the middle of a text: with its leading space, special tokens by name.

        A token that is only part of a character reads as U+FFFD.
        """
        text = self._token_texts.get(token_id)
        if text is None:
            # Decoders drop the space before the first word, so the token is read as its own successor.
            once, twice = (
                self._hf.decode([int(token_id)] * n, skip_special_tokens=False, clean_up_tokenization_spaces=False)
                for n in (1, 2)
            )
            text = once if _REPLACEMENT in once else twice[len(once) :]
            self._token_texts[token_id] = text
        return text

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        template_inputs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> npt.NDArray[np.int32]:
        """Token ids of a conversation, laid out by the tokenizer's chat template, or by the one given.

        `messages` are mappings with at least `role` and `content`, a text or a list of text parts. `template_inputs`
        are what the template may use besides them, such as `tools` or `reasoning_effort`; it leaves alone what it
        does not know. The result ends where the assistant's answer begins; after the last message if
        `add_generation_prompt` is False; inside the last message if `continue_final_message`. Raises
        `InvalidRequestError` for malformed messages or inputs and `ChatTemplateError` when there is no template or it
        refuses them.
        """
        conversation = plain_messages(messages)
        if continue_final_message:
            _check_continued(conversation, add_generation_prompt)
        wrong = sorted(_NO_INPUTS & set(template_inputs or ()))
        if wrong:
            raise InvalidRequestError(f"{wrong[0]!r} is no input of a chat template; leave it out.")
        if not chat_template and not self._hf.chat_template:
            raise ChatTemplateError(
                "The tokenizer has no chat template. Use generate() with a prompt written out in full, or "
                "add a chat_template.jinja file to the model's folder."
            )
        try:
            token_ids = self._hf.apply_chat_template(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt is not False and not continue_final_message,
                continue_final_message=continue_final_message,
                tokenize=True,
                return_dict=False,
                **(template_inputs or {}),
            )
        except Exception as error:  # a template is a program: it may fail in any way
            raise ChatTemplateError(
                f"The chat template does not accept these messages (roles: "
                f"{', '.join(str(message['role']) for message in conversation)}): {_one_line(error)}"
            ) from error
        return np.array(token_ids, dtype=np.int32)

    def message_ends(
        self,
        messages: Sequence[Mapping[str, Any]],
        token_ids: npt.NDArray[np.int32],
        *,
        template_inputs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> tuple[int, ...]:
        """Numbers of leading tokens of a rendered conversation that end its last messages, ascending.

        Of the messages before the last one MOST_MESSAGE_ENDS are looked at: each takes a rendering of its own.

        A conversation that goes on otherwise after a message has these tokens in common with this one. A
        message is left out where the template does not accept the conversation up to there. `template_inputs` and
        `chat_template` are what `token_ids` were rendered with.
        """
        ends = set()
        for count in range(max(1, len(messages) - MOST_MESSAGE_ENDS), len(messages)):
            try:
                beginning = self.render_chat(
                    messages[:count],
                    add_generation_prompt=False,
                    template_inputs=template_inputs,
                    chat_template=chat_template,
                )
            except ChatTemplateError:
                continue
            length = min(len(beginning), len(token_ids))
            parts = np.flatnonzero(beginning[:length] != token_ids[:length])
            ends.add(int(parts[0]) if len(parts) else length)
        return tuple(sorted(ends - {0}))

    def stream(self, stop: Sequence[str] = (), *, include_stop: bool = False, min_tokens: int = 0) -> TextStream:
        """A new `TextStream` for one output.

        `stop` are strings that end it; they are left out of the text unless `include_stop`. They are
        looked for only in what follows the first `min_tokens` tokens.
        """
        if isinstance(stop, str):
            stop = (stop,)
        if not all(stop):
            raise InvalidRequestError("A stop string is empty; leave it out.")
        detokenizer = _Detokenizer(self._decode, self._skipped_ids)
        return TextStream(detokenizer, tuple(stop), include_stop=include_stop, min_tokens=min_tokens)


@dataclass(frozen=True, slots=True)
class StreamStep:
    """What one `TextStream.push` brought."""

    new_text: str
    """Text released by it; may be empty."""
    stop: str | None
    """The stop string that ended the output, if one did."""
    num_tokens_used: int
    """How many of the pushed tokens were read: all, or those up to the one that completed the stop string."""


class TextStream:
    """The text of one output while its tokens arrive.

    What it releases is final: whole characters, nothing beyond a stop string, and nothing that may
    turn out to be the beginning of one. Without a stop string the pieces add up to
    `Tokenizer.decode` of all tokens. (One exception: decoders with byte fallback read a run of byte
    tokens that turns invalid as invalid from its start; characters released before that stand. So does
    a U+FFFD too many, if the text itself has one in the middle of such a run.)
    """

    def __init__(
        self, detokenizer: _Detokenizer, stops: tuple[str, ...], *, include_stop: bool, min_tokens: int
    ) -> None:
        """Made by `Tokenizer.stream`."""
        self._detokenizer = detokenizer
        self._stops = stops
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""  # ends with the longest possible beginning of a stop string
        self._pieces: list[str] = []
        self._stop: str | None = None
        self._finished = False

    @property
    def text(self) -> str:
        """All text released so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def push(self, token_ids: Sequence[int]) -> StreamStep:
        """Reads tokens, up to the one that completes a stop string; after that it reads no more."""
        assert not self._finished, "push() after finish()"
        released: list[str] = []
        num_used = 0
        for token_id in token_ids:
            if self._stop is not None:
                break
            num_used += 1
            self._num_tokens += 1
            piece = self._detokenizer.push(int(token_id))
            if piece and self._num_tokens > self._min_tokens:
                piece = self._release(piece)
            released.append(piece)
        return StreamStep(self._append("".join(released)), self._stop, num_used)

    def finish(self) -> str:
        """Ends the output: returns the text held back until now, incomplete characters as U+FFFD."""
        if self._finished:
            return ""
        self._finished = True
        if self._stop is not None:
            return ""
        piece = self._detokenizer.flush()
        if self._num_tokens > self._min_tokens:
            piece = self._release(piece)  # U+FFFD may be part of a stop string
        return self._append(piece + self._held)

    def _append(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text

    def _release(self, piece: str) -> str:
        """The part of held text + `piece` that may be shown; sets `_stop`, keeps the rest in `_held`.

        held + piece:  |------- shown -------|-- stop string --|~~ dropped ~~|
                   or  |------- shown -------|-- beginning of a stop string --|
        """
        if not self._stops:
            return piece
        buffer = self._held + piece
        match = _first_match(buffer, self._stops)
        if match is not None:
            start, self._stop = match
            self._held = ""
            return buffer[: start + len(self._stop)] if self._include_stop else buffer[:start]
        num_shown = len(buffer) - max(_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[num_shown:]
        return buffer[:num_shown]


class _Detokenizer:
    """Turns tokens into text one at a time, at a cost that does not grow with the output.

    A token's text depends on its neighbours (a byte of a character, a space that only the first word
    loses), so it is read off the difference between two decodings. Only a window of the last tokens is
    decoded:

        window:   | t0 t1 t2 t3 t4 | t5 t6 |
        its text: |   released     | at most 3 U+FFFD: perhaps the start of a character |
    """

    def __init__(self, decode: Callable[[list[int]], str], skipped_ids: frozenset[int]) -> None:
        self._decode = decode
        self._skipped_ids = skipped_ids
        self._window: list[int] = []
        self._released = ""  # of the window's text
        self._num_settled = 0  # leading tokens of the window whose text is released completely
        self._max_tokens = _WINDOW_TOKENS

    def push(self, token_id: int) -> str:
        """The text that is now certain."""
        if token_id in self._skipped_ids:
            return ""
        self._window.append(token_id)
        text = self._text()
        num_certain = len(text) - _num_incomplete(text)
        piece = text[len(self._released) : num_certain]
        self._released += piece
        if len(self._released) == len(text):
            self._num_settled = len(self._window)
        if len(self._window) >= self._max_tokens:
            self._shorten(text)
        return piece

    def flush(self) -> str:
        """The remaining text, U+FFFD for incomplete characters."""
        piece = self._text()[len(self._released) :]
        self._released += piece
        return piece

    def _text(self) -> str:
        """The window's text, which begins with what was released of it."""
        text = self._decode(self._window)
        if not text.startswith(self._released):
            # The decoder changed its mind about text already released, as byte fallback does when a
            # character is followed by the first byte of another. Go on from the unreleased tokens.
            del self._window[: self._num_settled]
            self._num_settled = 0
            self._released = ""
            text = self._decode(self._window)
        return text

    def _shorten(self, text: str) -> None:
        """Drops the window's first tokens if the rest decodes to an end of `text` without them.

        Starting inside a character spoils only the start of the new window's text, which counts as released.
        """
        window = self._window[-_KEPT_TOKENS:]
        new_text = self._decode(window)
        num_pending = len(text) - len(self._released)
        num_compared = num_pending + 1  # the pending text, and a character to lean on
        agrees = len(new_text) >= num_compared and text.endswith(new_text[-num_compared:])
        if not agrees and len(self._window) < _MAX_WINDOW_TOKENS:
            self._max_tokens = 2 * len(self._window)  # tried rarely: the cost per token stays constant
            return
        self._num_settled = max(0, self._num_settled - (len(self._window) - len(window)))
        self._window = window
        self._released = new_text[: max(0, len(new_text) - num_pending)]
        self._max_tokens = _WINDOW_TOKENS


def _backend_decode(hf_tokenizer: Any) -> Callable[[list[int]], str]:
    """What `decode` of a transformers tokenizer gives, without special tokens and clean-up.

    That hands the tokens to a tokenizer in Rust, if no class has one of its own: asked directly it takes half the time.
    """
    from transformers import PreTrainedTokenizerFast

    own: Any = type(hf_tokenizer)
    plain: Any = PreTrainedTokenizerFast
    if issubclass(own, plain) and own.decode is plain.decode and own._decode is plain._decode:
        return functools.partial(hf_tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
    decode = functools.partial(hf_tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return lambda token_ids: decode(list(token_ids))  # foreign code may change what it is given


def _num_incomplete(text: str) -> int:
    """How many characters at the end of `text` may yet become another character."""
    return len(text) - len(text[-_MAX_INCOMPLETE:].rstrip(_REPLACEMENT)) - len(text[:-_MAX_INCOMPLETE])


def _first_match(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Start and string of the stop string that is complete first, the longest of several.

    "Complete first" makes the answer independent of how the text was cut into tokens.
    """
    found = [(start + len(stop), start, stop) for stop in stops if (start := text.find(stop)) >= 0]
    if not found:
        return None
    _, start, stop = min(found)
    return start, stop


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, without being all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _check_continued(conversation: Sequence[Mapping[str, Any]], add_generation_prompt: bool | None) -> None:
    if add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message=True and add_generation_prompt=True cannot be had together; leave one out."
        )
    if not conversation[-1]["content"].strip():
        raise InvalidRequestError("continue_final_message=True needs a last message with text, to go on from.")


def _find_tokenizer_files(model: str, revision: str | None) -> str | None:
    """The folder or hub id to load from; None when it is there, but has no tokenizer."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return str(folder) if _holds_tokenizer(folder) else None
    if folder.suffix == ".gguf":
        raise UnsupportedModelError(
            f"{str(model)!r} is a GGUF file, which cannot be loaded; name the folder of a Hugging Face checkpoint "
            "(safetensors: unquantized, FP8 or MXFP4)."
        )
    if folder.exists():
        raise ModelLoadError(f"{model!r} is a file; name the folder that holds the model.")
    if folder.is_absolute() or model.startswith(".") or len(folder.parts) > 2:
        raise ModelLoadError(f"There is no folder {model!r}; give a model's folder or a hub id (owner/name).")
    from huggingface_hub import snapshot_download

    try:
        snapshot = Path(snapshot_download(model, revision=revision, allow_patterns=list(_TOKENIZER_FILES)))
    except Exception as error:
        raise ModelLoadError(
            f"{model!r} is neither a folder here nor a model that the hub provides: {_one_line(error)}"
        ) from error
    return model if _holds_tokenizer(snapshot) else None


def _holds_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def _one_line(error: Exception) -> str:
    """An error's message, fit to stand inside another's."""
    return " ".join(str(error).split()) or type(error).__name__
