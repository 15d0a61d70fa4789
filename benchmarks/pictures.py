"""A first and a second question about a picture, on a random model of SmolVLM-256M's shape or on a real one.

Prints the time to the first token of both questions, and the time that an already known picture adds: to read its file,
place its tokens, and find the rows that the encoder computed. The last line is JSON.

    .venv/bin/python benchmarks/pictures.py
    .venv/bin/python benchmarks/pictures.py --vision-layers 2 --text-layers 4 --repeats 2
    .venv/bin/python benchmarks/pictures.py --model FOLDER
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from foreword import LLM, SamplingParams
from foreword.model.vision.encoded import PictureRows
from foreword.pictures import PictureFile

TILE = 512
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}:{% for part in m.content %}{% if part.type == 'image' %}<image>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}</s>{% endfor %}<s>assistant:"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model; default: a random one")
    parser.add_argument("--vision-layers", type=int, default=12)
    parser.add_argument("--text-layers", type=int, default=30)
    parser.add_argument(
        "--width",
        type=int,
        default=2560,
        help="width in pixels; by default the picture has 15 tiles, and the whole as one more",
    )
    parser.add_argument("--height", type=int, default=1536)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = options.model or stack.enter_context(tempfile.TemporaryDirectory())
        if options.model is None:
            make_model(Path(folder), options.vision_layers, options.text_layers, options.width)
        found = measure(folder, options)
        waits = {most: longest_wait(folder, options, most) for most in (1 << 20, 512, 64)}
    print(f"{found['picture_tokens']} tokens of a picture; first token after")
    print(f"  {found['first_s']:.3f} s, a new picture, of which {found['encoder_s']:.3f} s are the encoder's")
    print(f"  {found['second_s']:.3f} s, a second question about it: {found['ratio']:.1f} times as fast")
    print(f"a picture that is known adds {found['known_ms']:.2f} ms, of which its rows take {found['rows_ms']:.3f} ms")
    for most, waited in waits.items():
        print(f"an answer beside it waits {waited:.3f} s at most with max_num_encoder_input_tokens={most}")
    print(json.dumps({**vars(options), **found, "longest_wait_s": waits}))


def measure(folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds to the first token of both questions, and milliseconds that a known picture adds."""
    first, second, known, rows = list[float](), list[float](), list[float](), list[float]()
    with LLM(folder, dtype="float32", kv_cache_memory_bytes="1GB", max_model_len=4096, self_check=False) as llm:
        pictures, encoded = llm.pictures, llm.encoded_pictures
        assert pictures is not None
        assert encoded is not None
        ask(llm, png(64, 64, 99), "Why?")  # pays what only a first request pays
        encoded.seconds = 0.0
        for number in range(options.repeats):
            data = png(options.width, options.height, number)
            took, num_tokens = ask(llm, data, "What is in this picture?")
            first.append(took)
            second.append(ask(llm, data, "And who painted it?")[0])
            read: list[Any] = []
            known.append(timed(lambda data=data, read=read: read.extend(pictures.read([PictureFile(data)]))))
            rows.append(
                timed(lambda every=range(num_tokens), read=read: encoded.of_step([PictureRows(read[0], every)]))
            )
            known[-1] += rows[-1]
        encoder_s = encoded.seconds / options.repeats
    first_s, second_s = statistics.median(first), statistics.median(second)
    return {
        "picture_tokens": num_tokens,
        "first_s": first_s,
        "encoder_s": encoder_s,
        "second_s": second_s,
        "ratio": first_s / second_s,
        "known_ms": 1e3 * statistics.median(known),
        "rows_ms": 1e3 * statistics.median(rows),
    }


def longest_wait(folder: str, options: argparse.Namespace, most: int) -> float:
    """The longest step, in seconds, of an answer that is written while a new picture is encoded."""
    with LLM(
        folder,
        dtype="float32",
        kv_cache_memory_bytes="1GB",
        max_model_len=4096,
        self_check=False,
        max_num_encoder_input_tokens=most,
    ) as llm:
        parts = [
            {"type": "image", "image": png(options.width, options.height, 0)},
            {"type": "text", "text": "What is in this picture?"},
        ]
        params = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)
        llm.engine.add_request("text", llm._chat_prompt([{"role": "user", "content": "Tell me more."}], {}), params)
        for _ in range(4):
            llm.engine.step()
        prompt = llm._chat_prompt([{"role": "user", "content": parts}], {})
        llm.engine.add_request("picture", prompt, SamplingParams(max_tokens=1, temperature=0.0))
        longest, is_answered = 0.0, False
        while not is_answered:
            started = time.monotonic()
            outputs = llm.engine.step()
            longest = max(longest, time.monotonic() - started)
            is_answered = any(output.request_id == "picture" and output.finished for output in outputs)
        llm.engine.abort_request("text")
    return longest


def ask(llm: LLM, data: bytes, text: str) -> tuple[float, int]:
    """Seconds from the call to the first token, and the picture's tokens."""
    parts = [{"type": "image", "image": data}, {"type": "text", "text": text}]
    started = time.monotonic()
    [output] = llm.chat([{"role": "user", "content": parts}], SamplingParams(max_tokens=1, temperature=0.0))
    return time.monotonic() - started, output.num_picture_tokens


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def png(width: int, height: int, seed: int) -> bytes:
    """A PNG file whose picture differs for each seed."""
    from PIL import Image

    small = np.random.default_rng(seed).integers(0, 256, (height // 16, width // 16, 3), np.uint8)
    target = io.BytesIO()
    Image.fromarray(small).resize((width, height)).save(target, "PNG")
    return target.getvalue()


def make_model(folder: Path, vision_layers: int, text_layers: int, longest: int) -> None:
    """Write a random model of SmolVLM-256M's shape with its own tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, SmolVLMConfig, SmolVLMForConditionalGeneration
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    letters = pre_tokenizers.ByteLevel.alphabet()
    signs = ["<s>", "</s>", "<image>", "<fake_token_around_image>", "<global-img>"]
    signs += [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    backend = Tokenizer(models.BPE({text: number for number, text in enumerate([*signs, *sorted(letters)])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", additional_special_tokens=signs[2:]
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    text = {
        "model_type": "llama",
        "vocab_size": 49280,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": text_layers,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    vision = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": vision_layers,
        "num_attention_heads": 12,
        "image_size": TILE,
        "patch_size": 16,
    }
    config = SmolVLMConfig(text_config=text, vision_config=vision, image_token_id=2, scale_factor=4)
    torch.manual_seed(0)
    SmolVLMForConditionalGeneration(config).save_pretrained(folder)
    SmolVLMImageProcessorPil(size={"longest_edge": longest}, max_image_size={"longest_edge": TILE}).save_pretrained(
        folder
    )


if __name__ == "__main__":
    main()
