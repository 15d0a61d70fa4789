"""The bytes that each token of a vocabulary stands for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from foreword.text.detokenizer import REPLACEMENT

Decode = Callable[[list[int]], str]


class TokenBytes:
    """What tokens add to a text, as bytes."""

    def __init__(
        self, hf_tokenizer: Any, decode: Decode, text_of: Callable[[int], str], *, decodes_plainly: bool
    ) -> None:
        """`decode` decodes without special tokens; `text_of`: the text of a token in the middle of a text.

        `decodes_plainly`: whether it decodes as its backend in Rust does.
        """
        self._hf, self._text_of = hf_tokenizer, text_of
        self.is_byte_level: bool = decodes_plainly and _is_byte_level(hf_tokenizer.backend_tokenizer)
        """Whether a text is the bytes of its tokens, one after the other, as in GPT-2's vocabulary."""
        found = {} if self.is_byte_level else _byte_tokens(hf_tokenizer)
        self.byte_of = found if _reads_runs_whole(found, decode) else {}
        """Tokens of one byte each, if the decoder reads a run of them as a whole; otherwise none."""
        self._single = found
        self._of: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes | None:
        """The bytes of a token, those of a special token's name included; None if they cannot be known."""
        if token_id not in self._of:
            found = self._find(token_id)
            if found is None:
                return None
            self._of[token_id] = found
        return self._of[token_id]

    def _find(self, token_id: int) -> bytes | None:
        if self.is_byte_level:
            token = self._hf.backend_tokenizer.id_to_token(token_id)
            return b"" if token is None else _spelt(token)
        if token_id in self._single:
            return bytes([self._single[token_id]])
        token = self._hf.convert_ids_to_tokens(token_id)
        if isinstance(token, bytes):  # as vocabularies of tiktoken have them
            return token
        text = self._text_of(token_id)
        return None if REPLACEMENT in text and REPLACEMENT not in str(token) else text.encode()


def _is_byte_level(backend: Any) -> bool:
    return type(backend.decoder).__name__ == "ByteLevel"


@functools.cache
def _alphabet() -> dict[str, int]:
    """GPT-2's character for each byte: itself if it can be printed, otherwise the next one from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _spelt(token: str) -> bytes:
    """The bytes of a token in GPT-2's alphabet. One that has other characters too, as added tokens may, is a text."""
    alphabet = _alphabet()
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode()


def _byte_tokens(hf_tokenizer: Any) -> dict[int, int]:
    """Sentencepiece's tokens for single bytes, such as `<0xE2>`: the byte of each."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    ids: Sequence[Any] = hf_tokenizer.convert_tokens_to_ids(names)
    known = [(token_id, byte) for byte, token_id in enumerate(ids) if isinstance(token_id, int)]
    return {token_id: byte for token_id, byte in known if hf_tokenizer.convert_ids_to_tokens(token_id) == names[byte]}


def _reads_runs_whole(byte_of: dict[int, int], decode: Decode) -> bool:
    """Whether one wrong byte makes all bytes of its run unreadable: three bytes, of which two are a character."""
    token_of = {byte: token_id for token_id, byte in byte_of.items()}
    run = [token_of.get(byte) for byte in "é".encode()]
    if None in run:
        return False
    whole = [token_id for token_id in run if token_id is not None]
    return decode(whole) == "é" and decode([*whole, whole[1]]) == 3 * REPLACEMENT
