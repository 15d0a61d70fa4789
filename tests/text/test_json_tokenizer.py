"""Tokenizers that are read without transformers give its ids, texts and special tokens, or are left to it."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from doors import backend_of
from foreword.text import Tokenizer
from foreword.text.json_tokenizer import JsonTokenizer, NotPlainError
from real_models import real_model, real_tokenizer

REAL = "qwen3 llama3 gemma3 deepseek_v3 gptoss".split()
CORPUS = ["The prefix that two requests share is computed once.", "The answer of the second is the same. äö 漢字"]
NAMES = "<|endoftext|> <s> </s> <|im_end|> <tool> Wort <new> <bos> <eos> <pad> <unk> <mask> The".split()
PIECES = [*NAMES, " ", "The prefix", "  share's", "漢", "\n", "e", "🙂", "\u200d", "ö", "12"]
CLASSES = "PreTrainedTokenizerFast TokenizersBackend Qwen2Tokenizer GemmaTokenizerFast GPT2Tokenizer".split()
KINDS = "llama qwen2 qwen3 gemma3_text phi3 granite mistral cohere2 gpt_oss".split()


def byte_level(chance: random.Random) -> Backend:
    backend = Backend(models.BPE())
    backend.decoder = decoders.ByteLevel()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=chance.random() < 0.2, trim_offsets=False)
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), NAMES[: chance.choice([3, 4])]
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=special)
    )
    return backend


def gemma_like(chance: random.Random) -> Backend:
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=special))
    return backend


def write(folder: Path, chance: random.Random) -> None:
    """A tokenizer of some kind, with fields in its config as files have them, or might."""
    backend = chance.choice([byte_level, gemma_like])(chance)
    if chance.random() < 0.6:
        flags = {"special": chance.random() < 0.5, "normalized": chance.random() < 0.5, "lstrip": chance.random() < 0.3}
        backend.add_tokens([AddedToken("<tool>", **flags), AddedToken("Wort", special=False)])
    if chance.random() < 0.4 and backend.token_to_id("<s>") is not None:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(folder / "tokenizer.json"))

    def token() -> Any:
        flags = {"lstrip": chance.random() < 0.3, "rstrip": False, "single_word": False, "normalized": True}
        return chance.choice([*NAMES, None, {"__type": "AddedToken", "content": chance.choice(NAMES), **flags}])

    names = ("bos_token", "eos_token", "unk_token", "pad_token", "mask_token", "boi_token")
    config: dict[str, Any] = {name: token() for name in names if chance.random() < 0.4}
    config["tokenizer_class"] = chance.choice(CLASSES)
    if isinstance(config.get("boi_token"), Mapping):
        config["boi_token"] = "<boi>"
    if chance.random() < 0.5:
        fields = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
        listed = backend.get_added_tokens_decoder().items()
        config["added_tokens_decoder"] = {str(n): {name: getattr(one, name) for name in fields} for n, one in listed}
    further: Mapping[str, Any] = {
        "additional_special_tokens": ["<tool>", "<new>"],
        "extra_special_tokens": chance.choice([{"image_token": "<img>"}, ["<tool>"], []]),
        "split_special_tokens": True,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": True,
        "chat_template": chance.choice(
            ["one", [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]]
        ),
    }
    config |= {name: value for name, value in further.items() if chance.random() < 0.25}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if chance.random() < 0.2:
        (folder / "chat_template.jinja").write_text("of the file")
    (folder / "config.json").write_text(json.dumps({"model_type": chance.choice(KINDS)}))


def check_same(own: JsonTokenizer, theirs: Any, chance: random.Random, num_texts: int) -> None:
    added = [{number: repr(one) for number, one in each.added_tokens_decoder.items()} for each in (own, theirs)]
    assert added[0] == added[1]
    assert own.get_vocab() == theirs.get_vocab()
    names = "special_tokens_map all_special_tokens all_special_ids eos_token_id unk_token_id pad_token_id chat_template"
    for name in names.split():
        assert getattr(own, name) == getattr(theirs, name), name
    first, second = Tokenizer(own), Tokenizer(theirs)
    for _ in range(num_texts):
        text = "".join(chance.choices(PIECES, k=chance.randrange(8)))
        for add in (True, False):
            encoded, expected = own(text, add_special_tokens=add), theirs(text, add_special_tokens=add, verbose=False)
            assert encoded["input_ids"] == expected["input_ids"], text
            assert encoded.encodings[0].offsets == expected.encodings[0].offsets, text
        ids = [chance.randrange(len(own) + 5) for _ in range(chance.randrange(12))]
        for skip in (True, False):
            kept = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert own.decode(ids, skip_special_tokens=skip) == kept
        assert first.decode(ids) == second.decode(ids)
        assert [first.token_bytes(one) for one in ids] == [second.token_bytes(one) for one in ids]
        streams = first.stream(after=ids[:3]), second.stream(after=ids[:3])
        pieces = [[stream.push([one]) for one in ids[3:]] for stream in streams]
        assert pieces[0] == pieces[1]


def test_made_up_files_give_what_transformers_makes_of_them(tmp_path: Path) -> None:
    num_read = 0
    for seed in range(40):
        folder, chance = tmp_path / str(seed), random.Random(seed)
        folder.mkdir()
        write(folder, chance)
        try:
            own = JsonTokenizer.load(folder)
        except NotPlainError:
            continue
        check_same(own, AutoTokenizer.from_pretrained(folder), chance, 8)
        num_read += 1
    assert num_read >= 15


@pytest.mark.slow
@pytest.mark.parametrize("name", [*REAL, "smollm2", "gemma"])
def test_real_ones_give_what_transformers_makes_of_them(name: str) -> None:
    models_of = {"smollm2": "smollm2", "gemma": "gemma3"}
    folder = real_model(models_of[name]) if name in models_of else real_tokenizer(name)
    check_same(JsonTokenizer.load(folder), AutoTokenizer.from_pretrained(folder), random.Random(name), 40)


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("tokenizer_config.json", {"tokenizer_class": "T5TokenizerFast"}, "tokenizer_class='T5TokenizerFast'"),
        ("tokenizer_config.json", {"auto_map": {}}, "code of its own"),
        ("tokenizer_config.json", {"fast_tokenizer_files": []}, "tokenizer_config.json's fast_tokenizer_files"),
        ("config.json", {"model_type": "mamba2"}, "model_type='mamba2'"),
        ("special_tokens_map.json", {}, "special_tokens_map.json"),
        ("tokenizer.json", {}, "files that cannot be read"),
    ],
)
def test_what_transformers_may_make_otherwise_is_left_to_it(
    tmp_path: Path, file: str, content: Any, reason: str
) -> None:
    byte_level(random.Random(1)).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(NotPlainError, match=reason):
        JsonTokenizer.load(tmp_path)


def test_transformers_own_tokenizer_keeps_the_template_and_then_does_the_work(tmp_path: Path) -> None:
    byte_level(random.Random(1)).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend", "eos_token": "</s>"}')
    tokenizer = Tokenizer.load(str(tmp_path))
    assert tokenizer is not None
    assert isinstance(backend_of(tokenizer), JsonTokenizer)
    tokenizer.set_chat_template("{{ 1 }}")
    own = tokenizer.hf_tokenizer
    assert type(own).__name__ == "TokenizersBackend"
    assert own.chat_template == "{{ 1 }}"
    own.chat_template = "{{ 2 }}"
    assert tokenizer.chat_template == "{{ 2 }}"
    assert tokenizer.hf_tokenizer is own
