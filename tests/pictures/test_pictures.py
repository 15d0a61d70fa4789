"""Pictures through `LLM`: the tokens of transformers, equal bits however they come, and keys by what they show."""

from __future__ import annotations

import base64
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from doors import chat_prompt, waiting_in
from foreword import LLM, SamplingParams
from foreword.bench.trace import TraceBenchOptions, prompt_token_ids, read_trace, run_trace
from foreword.cache import ExtraKeys, KeyedSpan, MissReason
from foreword.engine import Keep, Mark, Prompt
from foreword.engine.shares import EncoderBudget
from foreword.engine.tiering import apart
from foreword.errors import InvalidRequestError, MediaBusyError, ModelLoadError
from foreword.model.vision.encoded import PictureRows
from foreword.pictures import PictureFile, pixels_of, taken_apart
from foreword.server.observe.insight import block_keys
from foreword.server.options import ServerConfig
from foreword.server.service import MOST_MEDIA_BYTES
from foreword.text.conversation import pictures_of
from lanes import slow
from live_server import ServerThread, post
from picture_models import SIGNS, TILE, SeeingOracle, asks, file_of, noise, save_family, save_seeing_model
from tiny_models import greedy

OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 4 << 20, "self_check": False, "dtype": "float32"}
QUESTION = "The prefix that two requests share?"
LOGPROBS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing_model(tmp_path_factory.mktemp("pictures") / "idefics3")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> SeeingOracle:
    return SeeingOracle(folder)


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS) as llm:
        yield llm
        llm.engine.check_integrity()


@pytest.fixture(params=["idefics3", "gemma3", *slow("mistral3", "internvl")])
def any_llm(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Iterator[LLM]:
    """A model of each family that says otherwise how pictures are cut."""
    own = folder if request.param == "idefics3" else save_family(tmp_path / "model", request.param)
    with LLM(str(own), **OPTIONS) as llm:
        yield llm
        llm.engine.check_integrity()


def bits(output: Any) -> Any:
    """An answer with its log probabilities: equal only if all bits are."""
    [answer] = output.outputs
    return answer.token_ids, [{token: one.logprob for token, one in each.items()} for each in answer.logprobs or ()]


def ask(llm: LLM, *images: Any, text: str = QUESTION) -> tuple[Any, int]:
    """The bits of an answer, and the number of tokens that were cached."""
    [output] = llm.chat(asks(text, *images), LOGPROBS)
    return bits(output), output.num_cached_tokens


def offset_of(llm: LLM) -> int:
    """The number of tokens before the first that a picture replaces."""
    token_ids = llm.chat(asks(QUESTION, noise(40, 40)), greedy(1))[0].prompt_token_ids
    assert llm.engine.limits.picture_token_id is not None
    return list(token_ids).index(llm.engine.limits.picture_token_id)


@pytest.mark.parametrize(
    "sizes", [[(70, 50)], [(20, 30)], [(50, 70), (96, 96)], [(33, 5)]], ids=["cut", "small", "two", "flat"]
)
def test_tokens_are_those_of_transformers(llm: LLM, oracle: SeeingOracle, sizes: list[tuple[int, int]]) -> None:
    messages = asks(QUESTION, *(noise(*size, seed) for seed, size in enumerate(sizes)))
    prompt, answer = oracle.answer(messages, 12)
    for expected_hit in (False, True):
        [output] = llm.chat(messages, greedy(12))
        assert list(output.prompt_token_ids) == prompt
        assert output.outputs[0].token_ids == answer
        assert bool(output.num_cached_tokens) == expected_hit


def test_smolvlm_is_the_same_family(tmp_path: Path, oracle: SeeingOracle) -> None:
    with LLM(str(save_seeing_model(tmp_path / "smolvlm", "smolvlm")), **OPTIONS) as llm:
        [output] = llm.chat(asks(QUESTION, noise(70, 50)), greedy(8))
        assert output.outputs[0].token_ids == oracle.answer(asks(QUESTION, noise(70, 50)), 8)[1]


def test_bits_are_equal_cold_warm_chunked_preempted_and_beside_other_pictures(folder: Path) -> None:
    one, other = noise(90, 70), noise(70, 90, 1)
    with LLM(str(folder), **OPTIONS) as llm:
        cold, num_cached = ask(llm, one)
        assert num_cached == 0
        warm, num_cached = ask(llm, one)
        assert warm == cold
        assert num_cached > 60
        alone = ask(llm, other)[0]
        assert alone != cold
    with LLM(str(folder), **OPTIONS, max_num_batched_tokens=16, enable_prefix_caching=False) as llm:
        conversations = [asks(QUESTION, image) for image in (one, other, one)]
        assert [bits(output) for output in llm.chat(conversations, LOGPROBS)] == [cold, alone, cold]
        encoded = llm.encoded_pictures
        assert encoded is not None
        assert encoded.num_encoded == 2  # each once, though three prompts came in chunks
    small = {**OPTIONS, "kv_cache_memory_bytes": None, "num_gpu_blocks_override": 16, "max_num_batched_tokens": 64}
    with LLM(str(folder), **small) as llm:
        long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=3)
        outputs = llm.chat([asks(QUESTION, image) for image in (one, other)], long)
        for output, expected in zip(outputs, (cold, alone), strict=True):
            token_ids, logprobs = bits(output)
            assert (token_ids[:6], logprobs[:6]) == expected
        assert llm.engine.snapshot().num_preemptions > 0


def test_two_requests_with_one_new_picture_encode_it_once_and_a_hit_encodes_nothing(folder: Path) -> None:
    with LLM(str(folder), **OPTIONS, picture_cache_bytes=0) as llm:
        encoded = llm.encoded_pictures
        assert encoded is not None
        llm.chat([asks(text, noise(70, 50)) for text in ("The answer?", "The second?")], greedy(2))
        assert encoded.num_encoded == 1
        ask(llm, noise(70, 50, 1))  # and there is room for one only
        ask(llm, noise(70, 50))
        assert encoded.num_encoded == 2
        llm.reset_prefix_cache()
        ask(llm, noise(70, 50))
        assert encoded.num_encoded == 3


@pytest.mark.parametrize(("kind", "most", "piece"), [("idefics3", 1, 4), ("gemma3", 1, 16)])
def test_a_step_encodes_no_more_than_its_budget_and_others_go_on(
    folder: Path, tmp_path: Path, kind: str, most: int, piece: int
) -> None:
    own = folder if kind == "idefics3" else save_family(tmp_path / "model", kind)
    conversations = [asks("A text?"), *(asks(QUESTION, noise(70, 50, seed)) for seed in (1, 2, 2))]
    answers, budget = [], {"max_num_encoder_input_tokens": most}
    for options in ({}, budget, {**budget, "max_num_seqs": 2}, {**budget, "picture_cache_bytes": 0}):
        with LLM(str(own), **OPTIONS, **options, enable_prefix_caching=False) as llm:
            encoded, engine = llm.encoded_pictures, llm.engine
            assert encoded is not None
            for number, conversation in enumerate(conversations):
                engine.add_request(str(number), chat_prompt(llm, conversation), greedy(8 if number else 60))
            rows, ends, texts = list[int](), {}, list[bool]()
            while engine.has_unfinished_requests():
                before = encoded.num_rows
                outputs = {output.request_id: output for output in engine.step()}
                rows.append(encoded.num_rows - before)
                texts.append("0" in outputs)
                ends |= {name: output.outputs[0].token_ids for name, output in outputs.items() if output.finished}
            answers.append(ends)
            engine.check_integrity()
            if options:
                assert max(rows) == piece
            assert all(has_text for has_text, count in zip(texts, rows, strict=True) if count)  # it goes on meanwhile
    assert answers == answers[:1] * 4


def test_a_picture_that_is_shown_twice_is_part_of_estimated_keys() -> None:
    def keys(*digests: str) -> list[int]:
        spans = tuple(KeyedSpan("media", digest, 4 * number, 2) for number, digest in enumerate(digests))
        prompt = Prompt(np.arange(32, dtype=np.int32), extra_keys=ExtraKeys(spans=spans))
        return block_keys(prompt, (), 16).tolist()

    assert len({key for digests in ("", "aa", "bb", "ab", "ba") for key in keys(*digests)}) == 10


def test_what_the_budget_counts_is_what_is_encoded(folder: Path) -> None:
    with LLM(str(folder), **OPTIONS) as llm:
        encoded = llm.encoded_pictures
        assert encoded is not None
        [placed] = chat_prompt(llm, asks(QUESTION, noise(96, 96))).pictures
        picture, size = placed.picture, encoded.vision.tile_rows(placed.picture.shape)
        encoded.of_step([PictureRows(picture, range(size, 2 * size))])  # a tile among those that are missing
        every = range(len(placed.places))
        missing, before = encoded.missing(picture, every), encoded.num_rows
        encoded.of_step([PictureRows(picture, every)])
        assert sum(map(len, missing)) == encoded.num_rows - before > size
        assert encoded.missing(picture, every) == []


def test_only_a_request_that_starts_takes_of_the_budget(folder: Path) -> None:
    with LLM(str(folder), **OPTIONS) as llm:
        for seed in (1, 2):
            llm.engine.add_request(str(seed), chat_prompt(llm, asks(QUESTION, noise(70, 50, seed))), greedy(1))
        one, other = waiting_in(llm.engine)
        budget, length = EncoderBudget(llm.encoded_pictures, 1), len(one)
        first = one.pictures[0].offset
        budget.begin_step()
        end = budget.cut(one, 0, length)  # behind the first tile
        assert first < end < length
        assert budget.cut(other, 0, length) == end  # `one` may have got no blocks
        budget.book(one, 0, end)
        assert budget.cut(one, 0, length) == end
        assert budget.cut(other, 0, length) == first
        budget.begin_step()
        assert budget.cut(other, 0, length) == end


def test_encodings_are_each_salts_own(folder: Path) -> None:
    with LLM(str(folder), **OPTIONS) as llm:
        assert llm.pictures is not None
        assert llm.encoded_pictures is not None
        prompt = "<s>user:<image>Who?</s>"
        for number, salt in enumerate((None, "a", "b"), 1):
            given = {"prompt": prompt, "multi_modal_data": {"image": noise(40, 40)}}
            given |= {} if salt is None else {"cache_salt": salt}
            for question in ("", "Why?"):
                llm.generate({**given, "prompt": question + prompt}, greedy(1))
            assert llm.encoded_pictures.num_encoded == number


@pytest.mark.parametrize(("kind", "dtype"), [("idefics3", "float32"), ("qwen3_vl", "bfloat16")])
def test_what_was_encoded_outlives_the_process_for_its_salt_and_its_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str
) -> None:
    monkeypatch.setattr(apart, "FIRST_WAIT_S", 60.0)  # of a busy machine
    own = folder if kind == "idefics3" else save_family(tmp_path / "model", kind)
    question = asks("Another text, so no KV is found.", noise(96, 96))
    question[0]["content"].reverse()

    def encoded_after(**options: Any) -> tuple[Any, int, int]:
        with LLM(str(own), **{**OPTIONS, "dtype": dtype, "max_num_encoder_input_tokens": 8}, **options) as llm:
            assert llm.encoded_pictures is not None
            prompt = chat_prompt(llm, question)
            if salt:
                prompt = replace(prompt, extra_keys=replace(prompt.extra_keys, salt=salt))
            llm.engine.add_request("1", prompt, LOGPROBS)
            while not (outputs := [one for one in llm.engine.step() if one.finished]):
                pass
            llm.engine.check_integrity()
            return bits(outputs[0]), llm.encoded_pictures.num_rows, llm.encoded_pictures.num_loaded_rows

    salt = ""
    cold, num_rows, _ = encoded_after()
    cached = {"cache_dir": str(tmp_path / "cache"), "kv_cache_dtype": "auto"}
    with LLM(str(own), **OPTIONS | {"dtype": dtype}, **cached, cache_daily_write_bytes=1) as llm:
        ask(llm, noise(96, 96))  # its KV is another, and nothing may be written
    with LLM(str(own), **OPTIONS | {"dtype": dtype}, **cached) as llm:
        ask(llm, noise(96, 96))
        assert llm.encoded_pictures is not None
        assert llm.encoded_pictures.num_rows == num_rows > 0
    assert encoded_after(**cached) == (cold, 0, num_rows)
    salt = "of somebody else"
    assert encoded_after(**cached) == (cold, num_rows, 0)
    assert encoded_after(**cached)[1:] == (0, 0)  # its KV is found, so nobody asks what was encoded
    salt = ""
    other = {"kv_cache_dtype": "int8"}  # another identity
    assert encoded_after(**{**cached, **other})[1:] == (num_rows, 0)


def test_who_skips_the_cache_finds_no_encodings_and_leaves_none(folder: Path, tmp_path: Path) -> None:
    cached, skips = {"cache_dir": str(tmp_path / "cache")}, replace(LOGPROBS, skip_reading_prefix_cache=True)
    with LLM(str(folder), **OPTIONS, **cached, max_num_batched_tokens=16) as llm:
        answers, counts = [], []
        for number, params in enumerate((skips, LOGPROBS, skips, replace(skips, n=2))):
            question = asks(f"Text {min(number, 1)}", noise(90, 70))
            question[0]["content"].reverse()
            [output] = llm.chat(question, params)
            answers.append(bits(replace(output, outputs=output.outputs[:1])))
            counts.append(llm.engine.snapshot().picture_rows)
        assert answers[1] == answers[2] == answers[3]
        num_rows = counts[0]["encoder"]
        assert [own["encoder"] for own in counts] == [count * num_rows for count in (1, 2, 3, 4)], "each tile once"
        assert counts[-1]["tier"] == 0


@pytest.mark.parametrize("changed", ["preprocessor_config.json", "model.safetensors"])
def test_other_settings_or_weights_find_no_encodings(folder: Path, tmp_path: Path, changed: str) -> None:
    counts = []
    for own in (folder, tmp_path / "model"):
        if own != folder:
            shutil.copytree(folder, own)
            content = (own / changed).read_bytes()
            if changed.endswith(".json"):
                content = json.dumps(json.loads(content) | {"image_mean": [0.25] * 3}).encode()
            else:
                content = content[:-1] + bytes([content[-1] ^ 1])
            (own / changed).write_bytes(content)
        with LLM(str(own), **OPTIONS, cache_dir=str(tmp_path / "cache")) as llm:
            ask(llm, noise(70, 50))
            counts.append(llm.engine.snapshot().picture_rows)
    assert counts[0]["encoder"] == counts[1]["encoder"] > counts[1]["tier"] == 0


@pytest.mark.parametrize(
    "fields", [{"max_image_size": {"height": 32, "width": 32}}, {"max_image_size": {"longest_edge": 40}}]
)
def test_a_processor_that_does_not_fit_is_refused_when_the_model_is_loaded(
    folder: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model" / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ModelLoadError, match=r"vision half of model"):
        LLM(str(path.parent), **OPTIONS)


def test_whatever_changes_what_a_picture_shows_is_another_picture(any_llm: LLM) -> None:
    llm, picture = any_llm, noise(70, 50)
    pixels = np.asarray(picture).copy()
    pixels[-1, -1, 2] ^= 1
    # 96 x 64 is 3 x 2 tiles, 64 x 96 is 2 x 3: as many tokens, and another grid. 70 x 50 and 70 x 49 are cut alike.
    others = {
        "one byte": Image.fromarray(pixels),
        "rotated": picture.rotate(180),
        "transposed": picture.transpose(Image.Transpose.TRANSPOSE),
        "smaller": picture.resize((35, 25)),
        "lower": picture.crop((0, 0, 70, 49)),
        "wide": noise(96, 64),
        "high": noise(64, 96),
        "as wide": Image.fromarray(np.asarray(noise(96, 64)).reshape(64, 96, 3)[:, ::-1].copy()),
    }
    before, first = offset_of(llm), ask(llm, picture)
    answers = [first[0]]
    for name, image in others.items():
        answer, num_cached = ask(llm, image)
        assert num_cached <= before, name  # the text before the picture, and the sign of its first tile
        assert answer not in answers, name
        answers.append(answer)
        assert ask(llm, image)[0] == answer, name
    llm.reset_prefix_cache()
    assert [ask(llm, image)[0] for image in (picture, *others.values())] == answers


def test_the_same_pixels_in_other_files_are_the_same_picture(any_llm: LLM, tmp_path: Path) -> None:
    llm, picture = any_llm, noise(70, 50)
    answer, _ = ask(llm, picture)
    length = len(llm.chat(asks(QUESTION, picture), greedy(1))[0].prompt_token_ids)
    most = length - 1 if len(llm.engine.manager.groups) == 1 else (length - 1) // 16 * 16
    png = file_of(picture, "PNG", pnginfo=None)
    (tmp_path / "picture.bmp").write_bytes(file_of(picture, "BMP"))
    exif = Image.Exif()
    exif[0x010E] = "another description"
    url = {"url": "data:image/png;base64," + base64.b64encode(png).decode()}
    for image in (
        *(png, tmp_path / "picture.bmp", str(tmp_path / "picture.bmp"), file_of(picture, "PNG", exif=exif)),
        *(file_of(picture, "WEBP", lossless=True), picture.convert("RGBA")),
    ):
        assert ask(llm, image) == (answer, most)
    parts = [{"type": "image_url", "image_url": url}, {"type": "text", "text": QUESTION}]
    [output] = llm.chat([{"role": "user", "content": parts}], LOGPROBS)
    assert bits(output) == answer
    assert output.num_cached_tokens == most


def test_a_picture_is_shown_as_its_camera_was_held(llm: LLM) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = file_of(noise(50, 70), "PNG", exif=exif)
    upright = ask(llm, noise(50, 70).transpose(Image.Transpose.ROTATE_270))
    assert ask(llm, turned)[0] == upright[0]


def test_a_miss_because_of_another_picture_says_so(llm: LLM) -> None:
    ask(llm, noise(70, 50))
    prompts = [_prompt(llm, noise(70, 50, seed)) for seed in (0, 1)]
    assert llm.engine.explain(prompts[0]).reason is None
    found = llm.engine.explain(prompts[1])
    assert found.reason == MissReason.MEDIA_DIFFERS
    assert found.num_hit_tokens <= offset_of(llm)


def _prompt(llm: LLM, image: Image.Image) -> Prompt:
    assert llm.pictures is not None
    messages = taken_apart(asks(QUESTION, image))
    token_ids = llm.tokenizer.render_chat(messages)
    return llm.pictures.shown(Prompt(token_ids), llm.pictures.read(pictures_of(messages)))


def test_prompts_of_generate_take_pictures_as_vllm_does(llm: LLM, oracle: SeeingOracle) -> None:
    picture = noise(70, 50)
    _, expected = oracle.answer(asks(QUESTION, picture), 6)
    prompt = f"<s>user:<image>{QUESTION}</s><s>assistant:"
    for given in (picture, [file_of(picture)]):
        [output] = llm.generate({"prompt": prompt, "multi_modal_data": {"image": given}}, greedy(6))
        assert output.outputs[0].token_ids == expected
    token_ids = llm.get_tokenizer().encode(prompt, add_special_tokens=False)
    [output] = llm.generate({"prompt_token_ids": token_ids, "multi_modal_data": {"image": picture}}, greedy(6))
    assert output.outputs[0].token_ids == expected
    for wrong, match in (
        ({"prompt": QUESTION, "multi_modal_data": {"image": picture}}, "1 pictures, but 0 signs"),
        ({"prompt": prompt, "multi_modal_data": {"audio": picture}}, "multi_modal_data has"),
        ({"prompt": prompt, "multi_modal_data": {"image": 7}}, "a picture is a int"),
    ):
        with pytest.raises(InvalidRequestError, match=match):
            llm.generate(wrong, greedy(1))


def test_the_sign_of_a_picture_in_a_text_is_text(llm: LLM) -> None:
    [output] = llm.chat(asks("Is <image> a sign?", noise(40, 40)), greedy(1))
    sign = llm.get_tokenizer().convert_tokens_to_ids("<image>")
    assert list(output.prompt_token_ids).count(sign) == 4 * (1 + 3 * 3)
    [output] = llm.chat([{"role": "user", "content": "Is <image> a sign?"}], greedy(1))
    assert sign not in output.prompt_token_ids


def test_pictures_follow_messages_that_a_template_wants_in_another_order(llm: LLM) -> None:
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": {}}} for name in ("a", "b")]
    shown = {name: noise(40, 40, seed) for seed, name in enumerate(("a", "b"))}
    template = (
        "{% for m in messages %}{% if m.tool_calls and m.tool_calls|length > 1 %}{{ raise_exception('1') }}{% endif %}"
        "<s>{{ m.role }}:{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}"
        "{% endif %}{% endfor %}{% for call in m.tool_calls or () %}{{ call.function.name }}"
        "{{ call.function.arguments|tojson }}{% endfor %}</s>{% endfor %}<s>assistant:"
    )
    prompts = [
        chat_prompt(
            llm,
            [
                {"role": "user", "content": "Look."},
                {"role": "assistant", "content": "", "tool_calls": calls},
                *(
                    {"role": "tool", "tool_call_id": name, "content": asks(name, shown[name])[0]["content"]}
                    for name in order
                ),
            ],
            chat_template=template,
        )
        for order in ("ab", "ba")
    ]
    assert prompts[0].token_ids.tolist() == prompts[1].token_ids.tolist()
    assert prompts[0].extra_keys.spans == prompts[1].extra_keys.spans
    assert len({span.digest for span in prompts[0].extra_keys.spans}) == 2


def test_only_a_server_limits_what_the_pictures_of_all_requests_hold(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.pictures is not None
    monkeypatch.setattr(PictureFile, "num_bytes", 2**29)
    held = [llm.pictures.read([PictureFile(file_of(noise(20, 20)))]) for _ in range(3)]
    assert llm.pictures.held.num_bytes >= 3 * 2**29
    llm.pictures.held.limit = MOST_MEDIA_BYTES
    with pytest.raises(MediaBusyError, match="try again when some have ended"):
        llm.pictures.read([PictureFile(file_of(noise(20, 20)))])
    llm.pictures.held.limit = None
    del held


def test_what_a_file_shows_is_remembered_for_its_owner_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.pictures is not None
    file, decoded = PictureFile(file_of(noise(21, 20))), list[PictureFile]()

    def noted(file: PictureFile) -> Any:
        decoded.append(file)
        return pixels_of(file)

    monkeypatch.setattr("foreword.pictures.pixels_of", noted)
    names = {llm.pictures.read([file], owner)[0].digest for owner in ("a", "a", "b", "a", "b")}
    assert (len(names), len(decoded)) == (1, 2)


def test_marks_and_places_move_with_pictures(llm: LLM) -> None:
    assert llm.pictures is not None
    sign = llm.get_tokenizer().convert_tokens_to_ids("<image>")
    read = llm.pictures.read(pictures_of(taken_apart(asks("", noise(20, 20), noise(20, 20, 1)))))
    plain = np.array([5, sign, 6, 7, sign, 8], np.int32)
    shown = llm.pictures.shown(Prompt(plain, message_ends=(1, 2, 4, 5, 6)), read)
    assert shown.token_ids[[0, -1]].tolist() == [5, 8]
    lengths = [len(llm.pictures._placeholders(one.shape).token_ids) for one in read]
    assert shown.message_ends == (1, 1 + lengths[0], 3 + lengths[0], 3 + sum(lengths), 4 + sum(lengths))
    for placed in shown.pictures:
        assert (shown.token_ids[placed.places] == sign).all()


def test_marks_before_in_and_after_a_picture_keep_what_is_before_them(llm: LLM) -> None:
    assert llm.pictures is not None
    sign, before, keep = llm.get_tokenizer().convert_tokens_to_ids("<image>"), 3 * llm.layout.block_size, Keep(60.0)
    read = llm.pictures.read(pictures_of(taken_apart(asks("", noise(70, 50)))))
    prompt = llm.pictures.shown(Prompt(np.array([*[5] * before, sign, 6, 7], np.int32)), read)
    [placed] = prompt.pictures
    end = placed.offset + placed.num_tokens
    marks = tuple(Mark(at, replace(keep, name=str(at))) for at in (before - 1, before, placed.offset + 1, end, end + 1))
    output = llm.engine.add_request("marked", replace(prompt, marks=marks), greedy(1))
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    assert [entry.num_tokens for entry in output.kept] == [before - 1, before, end, end, end + 1]
    assert [entry.is_whole for entry in output.kept] == [True] * len(marks)
    assert llm.engine.explain(prompt).num_hit_tokens >= before


@pytest.mark.parametrize("size", [(96, 96), (97, 31), (31, 97), (1, 60), (60, 1), (400, 300), (33, 32)])
def test_pictures_are_cut_as_the_image_processor_cuts_them(llm: LLM, size: tuple[int, int]) -> None:
    assert llm.encoded_pictures is not None
    vision = llm.encoded_pictures.vision
    pixels = np.asarray(noise(*size))
    shape = vision.shape(size[1], size[0])
    assert len(vision.encode(pixels)) == vision.num_rows(shape)
    assert vision.text(shape).count("<image>") == vision.num_rows(shape)
    assert all(sign in SIGNS or not sign.startswith("<row") for sign in vision.text(shape).split("<image>"))


def test_without_pillow_errors_say_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "data:image/png;base64," + base64.b64encode(b"a picture").decode()
    told = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    monkeypatch.setitem(sys.modules, "PIL", None)
    with LLM(str(folder), **OPTIONS) as llm:
        assert llm.pictures is None
        for call in (
            lambda: llm.chat(told, greedy(1)),
            lambda: llm.generate({"prompt": "a", "multi_modal_data": {"image": b"a picture"}}, greedy(1)),
        ):
            with pytest.raises(InvalidRequestError, match=r"pip install foreword\[vision\]"):
                call()
        with ServerThread(llm, ServerConfig()) as server:
            refused = post(server.url, "/v1/chat/completions", {"messages": told})
        assert refused.status_code == 400
        assert "pip install foreword[vision]" in refused.text


def test_drawn_prompts_have_no_sign_of_a_picture(llm: LLM, tmp_path: Path) -> None:
    recording = tmp_path / "recording.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 8 * 512, "output_length": 1, "hash_ids": [*range(8 * at, 8 * at + 8)]}
        for at in range(60)
    ]
    recording.write_text("\n".join(map(json.dumps, lines)))
    sign, limits = llm.engine.limits.picture_token_id, llm.engine.limits
    drawn = [
        prompt_token_ids(one, limits.vocab_size, 0)
        for one in read_trace(recording, max_requests=99, max_output_tokens=1)
    ]
    assert any(sign in tokens for tokens in drawn)
    for tokens in drawn:
        plain = limits.without_pictures(tokens)
        assert sign not in plain
        assert (plain != tokens).sum() == (tokens == sign).sum()
    options = TraceBenchOptions(file=recording, model=llm.config.model.model, kv_cache_memory_bytes=4 << 20)
    assert run_trace(options, Console(quiet=True)).equal


def test_models_without_eyes_refuse_pictures_in_a_line(tiny_models: Any) -> None:
    with LLM(str(tiny_models.folder_with_tokenizer("llama")), **OPTIONS) as llm:
        with pytest.raises(InvalidRequestError, match="takes only text") as one:
            llm.chat(asks(QUESTION, noise(TILE, TILE)), greedy(1))
        with pytest.raises(InvalidRequestError, match="takes no images") as other:
            llm.generate({"prompt": "a", "multi_modal_data": {"image": noise(TILE, TILE)}}, greedy(1))
        assert "\n" not in f"{one.value}{other.value}"
