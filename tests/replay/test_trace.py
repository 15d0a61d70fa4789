"""Recorded traffic: every format gives the same prefixes, malformed lines are located, no text is written."""

import gzip
import json
import os
import threading

import numpy as np
import pytest

from foreword.cache import TokenSequence
from foreword.errors import ConfigError, TraceError
from foreword.replay.keys import as_content_ids, chain, chain_each, content_ids_of_tokens
from foreword.replay.trace import RecordedRequest, TraceReader, TraceWriter


def write(folder, *lines, name="trace.jsonl"):
    file = folder / name
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    if name.endswith(".gz"):
        file.write_bytes(gzip.compress(text.encode()))
    else:
        file.write_text(text, encoding="utf-8")
    return file


def mooncake(ids, length=None, timestamp=0):
    return {
        "timestamp": timestamp,
        "input_length": length or 512 * len(ids),
        "output_length": 7,
        "hash_ids": ids,
    }


def read(file, **options):
    return list(TraceReader(file, **options))


def shared(one, other):
    """Leading blocks that two requests have in common."""
    length = min(len(one.keys), len(other.keys))
    equal = one.keys[:length] == other.keys[:length]
    return length if equal.all() else int(equal.argmin())


class Letters:
    """A tokenizer that has one token per character."""

    def encode(self, text):
        return np.array([ord(letter) for letter in text], np.int32)

    def render_chat(self, messages):
        return self.encode("".join(f"<{each['role']}>{each['content']}" for each in messages))


# ---------------------------------------------------------------------------------------------- keys


def of_tokens(tokens, block_tokens):
    return chain(content_ids_of_tokens(tokens, block_tokens))


def test_many_prompts_are_keyed_as_each_alone():
    rng = np.random.default_rng(2)
    prompts = [as_content_ids(rng.integers(0, 9, n).tolist()) for n in (3, 1, 0, 2000, 7)]
    keys = chain_each(np.concatenate(prompts), [len(each) for each in prompts])
    assert keys.tolist() == np.concatenate([chain(each) for each in prompts]).tolist()


def test_equal_keys_mean_equal_whole_prefixes():
    rng = np.random.default_rng(0)
    seen = {}
    for _ in range(3000):
        ids = rng.integers(0, 3, rng.integers(1, 9)).tolist()
        for depth, key in enumerate(chain(as_content_ids(ids)).tolist()):
            assert seen.setdefault(key, ids[: depth + 1]) == ids[: depth + 1]
    assert len(seen) > 1500


def test_keys_of_tokens_agree_with_the_hash_chain_of_the_cache():
    rng = np.random.default_rng(1)
    key_of = {}
    for _ in range(500):
        tokens = rng.integers(0, 2, rng.integers(4, 30)).tolist()
        hashes = TokenSequence("a", tokens, block_size=4).block_hashes()
        for ours, theirs in zip(of_tokens(tokens, 4).tolist(), hashes, strict=False):
            assert key_of.setdefault(theirs, ours) == ours
    assert len(set(key_of.values())) == len(key_of)


def test_a_partial_block_is_another_than_the_full_one_that_continues_it():
    assert of_tokens([0, 0, 0, 0, 0], 4)[1] != of_tokens([0] * 8, 4)[1]
    assert of_tokens([5, 5, 5, 5, 5], 4)[1] == of_tokens([5, 5, 5, 5, 5], 4)[1]


# ------------------------------------------------------------------------------------------- formats


def test_a_mooncake_line_is_read_with_its_lengths_and_time(tmp_path):
    (request,) = read(write(tmp_path, mooncake([4, 9], 700, timestamp=1500)))
    assert (request.timestamp_ms, request.num_prompt_tokens, request.num_output_tokens) == (1500.0, 700, 7)
    assert (request.block_tokens, len(request.keys)) == (512, 2)
    assert (request.tokens_of(1), request.tokens_of(2)) == (512, 700)


def test_lines_may_list_full_blocks_only(tmp_path):
    lines = [mooncake([1, 2], 1200), mooncake([1, 2, 3], 1200), mooncake([1, 2], 1024)]
    short = [mooncake([], 100), '{"hash_ids":[ ], "input_length": 511}']
    reader = TraceReader(write(tmp_path, *lines, *short))
    requests = list(reader)
    assert reader.num_malformed == 0
    assert [len(request.keys) for request in requests] == [2, 3, 2, 0, 0]
    assert [request.num_prompt_tokens for request in requests] == [1200, 1200, 1024, 100, 511]
    assert shared(requests[0], requests[1]) == 2


def test_ids_of_single_blocks_are_keyed_again_by_what_is_before_them(tmp_path):
    one, other, longer = read(write(tmp_path, mooncake([1, 2, 3]), mooncake([9, 2, 3]), mooncake([1, 2, 4])))
    assert shared(one, other) == 0
    assert not set(one.keys.tolist()) & set(other.keys.tolist())
    assert shared(one, longer) == 2


def test_ids_may_be_large_or_digests(tmp_path):
    one, other = read(write(tmp_path, mooncake([2**70, 2**63]), mooncake([2**70, 2**63 + 1])))
    assert shared(one, other) == 1
    one, other = read(write(tmp_path, mooncake(["ab", "cd"]), mooncake(["ab", "ce"])))
    assert shared(one, other) == 1
    one, other = read(write(tmp_path, mooncake(["ab", "\ud800"]), mooncake(["ab", "\ud801"])))  # half a character
    assert shared(one, other) == 1


@pytest.mark.parametrize(
    "as_line",
    [
        lambda tokens: tokens,
        lambda tokens: {"prompt_token_ids": tokens},
        lambda tokens: {"token_ids": tokens},
        lambda tokens: {"prompt": tokens},
        lambda tokens: {"prompt": "".join(map(chr, tokens))},
        lambda tokens: {"custom_id": "a", "body": {"model": "m", "prompt": "".join(map(chr, tokens))}},
    ],
)
def test_tokens_and_texts_give_equal_prefixes_in_every_format(tmp_path, as_line):
    prompts = [list(range(40, 80)), [*range(40, 72), 1, 2], list(range(41, 80))]
    first, second, third = read(write(tmp_path, *map(as_line, prompts)), tokenizer=Letters(), block_tokens=16)
    assert (shared(first, second), shared(first, third)) == (2, 0)
    assert first.keys.tolist() == of_tokens(prompts[0], 16).tolist()
    assert first.num_prompt_tokens == 40


def test_a_conversation_shares_its_earlier_turns(tmp_path):
    turns = [{"role": "user", "content": "x" * 30}]
    more = [*turns, {"role": "assistant", "content": "y" * 20}, {"role": "user", "content": "z"}]
    lines = [{"messages": turns, "created": 3}, {"body": {"messages": more, "max_tokens": 9}}]
    first, second = read(write(tmp_path, *lines), tokenizer=Letters())
    assert shared(first, second) == 2
    assert (first.timestamp_ms, second.timestamp_ms, second.num_output_tokens) == (3000.0, None, 9)


SIMPLE = '{"timestamp": 3, "input_length": 1400, "output_length": 7, "hash_ids": [4, 5, 6]}'


@pytest.mark.parametrize(
    "line",
    [
        SIMPLE.replace(", ", ","),
        SIMPLE.replace(": ", ":").replace(", ", ","),
        SIMPLE.replace(", ", " ,  "),
        SIMPLE.replace("[4", "[ 4").replace("6]", "6 ]"),
        SIMPLE.replace(", ", ",\t"),
        SIMPLE.replace("}", ', "note": "]"}'),
        SIMPLE.replace("}", ', "hash_ids": [4, 5, 6]}'),
        SIMPLE.replace("{", '{"hash_ids": [9], "block_tokens": null, '),
        SIMPLE.replace("{", '{"note": "\\"hash_ids\\": [1, 2]", '),
        SIMPLE.replace('"hash_ids"', '"hash\\u005fids"'),
    ],
)
def test_lines_with_ids_are_read_alike_however_they_are_written(tmp_path, line):
    expected, one, other = read(write(tmp_path, SIMPLE, line, mooncake([4, 5, 6], 1400, timestamp=3)))
    for request in (one, other):
        assert request.keys.tolist() == expected.keys.tolist()
        assert (request.timestamp_ms, *request[2:]) == (3.0, 1400, 7, 512) == (expected.timestamp_ms, *expected[2:])


@pytest.mark.parametrize(
    "ids",
    [
        "[1, 02]",
        "[1,, 2]",
        "[1, 2,]",
        "[1 2]",
        "[, 1]",
        "[1, 2",
        "[1.0, 2]",
        "[+1, 2]",
        "[true, 2]",
        "[1, [2]]",
        "[null, 1]",
    ],
)
def test_ids_that_json_or_the_format_does_not_allow_are_malformed_and_the_lines_beside_them_are_not(tmp_path, ids):
    line = f'{{"input_length": 1024, "hash_ids": {ids}}}'
    lines = [mooncake([7, 8]), line, mooncake([0, 10**19 - 1])]
    reader = TraceReader(write(tmp_path, *lines))
    first, last = reader
    assert (reader.num_malformed, "line 2" in reader.malformed[0]) == (1, True)
    assert [first.keys.tolist(), last.keys.tolist()] == [
        chain(as_content_ids(each)).tolist() for each in ([7, 8], [0, 10**19 - 1])
    ]


def test_ids_up_to_64_bits_and_beyond_are_told_apart(tmp_path):
    numbers = [10**18, 10**19 - 1, 10**19, 2**64 - 1, 2**64, 10**30]
    keys = [request.keys[0] for request in read(write(tmp_path, *([mooncake([each]) for each in numbers])))]
    assert len(set(keys)) == len(numbers)
    assert keys[:4] == [chain(as_content_ids([each]))[0] for each in numbers[:4]]


def test_gzipped_traces_are_known_by_their_content(tmp_path):
    plain = write(tmp_path, mooncake([1, 2]), mooncake([1, 3]))
    packed = write(tmp_path, mooncake([1, 2]), mooncake([1, 3]), name="trace.gz")
    packed = packed.rename(tmp_path / "no_suffix")
    assert [r.keys.tolist() for r in read(packed)] == [r.keys.tolist() for r in read(plain)]


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.gz"])
def test_a_trace_may_come_from_a_pipe(tmp_path, name):
    file = write(tmp_path, *([mooncake([1, number]) for number in range(600)]), name=name)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(file.read_bytes()), daemon=True)
    writer.start()
    reader = TraceReader(pipe)
    reader.on_progress = lambda num_bytes: pytest.fail(f"{num_bytes} bytes of a pipe, which knows no position")
    assert [request.keys.tolist() for request in reader] == [request.keys.tolist() for request in read(file)]
    writer.join()


def test_lines_are_read_one_at_a_time_and_as_often_as_asked(tmp_path):
    reader = TraceReader(write(tmp_path, mooncake([1]), mooncake([2]), "{"), max_requests=2)
    assert len(list(reader)) == len(list(reader)) == 2
    assert (reader.num_requests, reader.num_malformed) == (2, 0)


def test_requests_before_a_malformed_line_come_before_its_error(tmp_path):
    reader = TraceReader(write(tmp_path, [1], [2], "{", [3]), strict=True)
    requests = iter(reader)
    assert [next(requests).num_prompt_tokens, next(requests).num_prompt_tokens] == [1, 1]
    with pytest.raises(TraceError, match="line 3"):
        next(requests)


# ---------------------------------------------------------------------------------------- malformed

MALFORMED = [
    ("{", "not JSON (Expecting property name enclosed in double quotes in column 2)"),
    ("[1] [2]", "not JSON (Extra data in column 5)"),
    ("7", "must be a JSON object or a list"),
    ("[]", "give a list of at least one token id"),
    ("[1, -2]", "token ids -2 to 1"),
    ('[{"a": 1}, {"a": 2}]', "is a list of 2 objects; write each of them on a line of its own"),
    ('["a"]', "give a list of at least one token id"),
    ('{"a": 1}', "has the keys a; give hash_ids"),
    ('{"prompt": "text"}', "--tokenizer"),
    ('{"input_length": 512, "hash_ids": [1, 2]}', "2 ids, but input_length=512 takes 1 blocks"),
    ('{"input_length": 512, "hash_ids": [-1]}', "hash_ids="),
    ('{"input_length": 512, "hash_ids": [1], "timestamp": -1}', "timestamp=-1"),
    ('{"input_length": 512, "hash_ids": [1], "timestamp": Infinity}', "timestamp=inf"),
    ('{"input_length": 512, "hash_ids": [1], "timestamp": 1' + "0" * 400 + "}", "timestamp=1"),
    ('{"input_length": 512, "hash_ids": ["a", 1]}', "hash_ids="),
    ('{"input_length": 512, "hash_ids": 7}', "hash_ids=7"),
    ('{"input_length": 512, "hash_ids": [1], "block_tokens": 0}', "block_tokens=0"),
    ('{"input_length": 512, "hash_ids": [1], "block_tokens": 1' + "0" * 30 + "}", "at most 2147483647"),
    ('{"input_length": 512, "hash_ids": [1], "timestamp": 1e100}', "timestamp=1e+100"),
    ('{"hash_ids":[], "x": {"hash_ids": [5]}, "input_length": 512}', "0 ids, but input_length=512"),
    ('{"input_length": 1025, "hash_ids": [1]}', "takes 2 full or 3 blocks of 512 tokens; give one id per block"),
    ('{"prompt_token_ids": [1], "max_tokens": "9"}', "max_tokens='9'"),
]


@pytest.mark.parametrize(("line", "complaint"), MALFORMED)
def test_a_malformed_line_is_counted_located_and_passed_over(tmp_path, line, complaint):
    reader = TraceReader(write(tmp_path, [1, 2], "", line, [3]), block_tokens=None)
    assert len(list(reader)) == 2
    assert reader.num_malformed == 1
    assert "line 3" in reader.malformed[0]
    assert complaint in reader.malformed[0]
    with pytest.raises(TraceError, match="line 3"):
        read(write(tmp_path, [1, 2], "", line, [3]), strict=True)


def test_only_the_first_malformed_lines_are_kept_but_all_are_counted(tmp_path):
    reader = TraceReader(write(tmp_path, [1], *["{"] * 50))
    list(reader)
    assert (reader.num_malformed, len(reader.malformed)) == (50, 5)


def test_a_gzip_file_that_ends_early_gives_what_it_has(tmp_path):
    packed = gzip.compress("".join(json.dumps([n, 2, 3]) + "\n" for n in range(20000)).encode())
    (tmp_path / "cut.gz").write_bytes(packed[: len(packed) // 2])
    reader = TraceReader(tmp_path / "cut.gz")
    assert 0 < len(list(reader)) < 20000
    assert reader.num_malformed == 1
    assert "after line" in reader.malformed[0]


def test_a_gzip_file_that_is_damaged_gives_what_comes_before(tmp_path):
    packed = bytearray(gzip.compress("".join(json.dumps([n, 2, 3]) + "\n" for n in range(20000)).encode()))
    packed[len(packed) // 2 :] = b"\xff" * (len(packed) // 2)
    (tmp_path / "damaged.gz").write_bytes(packed)
    reader = TraceReader(tmp_path / "damaged.gz")
    assert 0 < len(list(reader)) < 20000
    assert reader.num_malformed
    with pytest.raises(TraceError):
        read(tmp_path / "damaged.gz", strict=True)
    (tmp_path / "broken.gz").write_bytes(packed[:10] + b"\xff" * 50)
    with pytest.raises(TraceError, match="cannot be read"):
        read(tmp_path / "broken.gz")


def test_a_byte_order_mark_is_no_part_of_the_first_line_and_other_bytes_than_utf8_are_malformed(tmp_path):
    (tmp_path / "trace").write_bytes(b"\xef\xbb\xbf[1, 2]\n\xff[3]\n[4]\n")
    reader = TraceReader(tmp_path / "trace")
    assert len(list(reader)) == 2
    assert "line 2" in reader.malformed[0]
    assert "not UTF-8" in reader.malformed[0]


def test_files_without_any_request_are_refused(tmp_path):
    with pytest.raises(TraceError, match=r"holds no requests.*not JSON"):
        read(write(tmp_path, "{"))
    with pytest.raises(TraceError, match="holds no requests"):
        read(write(tmp_path))
    with pytest.raises(TraceError, match="cannot be read"):
        read(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="mixes blocks of 512 and 16"):
        read(write(tmp_path, mooncake([1]), [1, 2]))
    with pytest.raises(ConfigError, match="block_tokens=0"):
        TraceReader(tmp_path / "nowhere", block_tokens=0)
    with pytest.raises(ConfigError, match="use 1 to 2147483647"):
        TraceReader(tmp_path / "nowhere", block_tokens=10**30)


# ------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_what_is_written_is_read_back_with_the_same_sharing_and_no_token(tmp_path, name):
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 2, rng.integers(1, 40)).tolist() for _ in range(200)]
    with TraceWriter(tmp_path / name, block_tokens=4) as writer:
        for number, prompt in enumerate(prompts):
            writer.write(timestamp_ms=number, prompt_token_ids=prompt, num_output_tokens=3)
    back = read(tmp_path / name)
    assert [r.num_prompt_tokens for r in back] == list(map(len, prompts))
    assert {r.block_tokens for r in back} == {4}
    plain = [RecordedRequest(0, of_tokens(prompt, 4), len(prompt), 3, 4) for prompt in prompts]
    for one in range(0, 200, 7):
        for other in range(200):
            assert shared(back[one], back[other]) == shared(plain[one], plain[other])


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_a_writer_that_is_killed_loses_no_line(tmp_path, name):
    writer = TraceWriter(tmp_path / name)
    for number in range(3):
        writer.write(timestamp_ms=number, prompt_token_ids=range(40), num_output_tokens=1)
    (tmp_path / f"left-{name}").write_bytes((tmp_path / name).read_bytes())
    assert len(read(tmp_path / f"left-{name}")) == 3
    writer.close()


def test_ids_cannot_be_compared_without_the_secret(tmp_path):
    def ids(file, **options):
        with TraceWriter(tmp_path / file, **options) as writer:
            writer.write(timestamp_ms=0, prompt_token_ids=range(32), num_output_tokens=1)
        return json.loads((tmp_path / file).read_text())["hash_ids"]

    assert not set(ids("a")) & set(ids("b"))
    assert ids("c", secret=b"k" * 16) == ids("d", secret=b"k" * 16)
    with pytest.raises(ConfigError, match="3 bytes"):
        TraceWriter(tmp_path / "e", secret=b"abc")


def test_namespaces_share_nothing(tmp_path):
    with TraceWriter(tmp_path / "a") as writer:
        for namespace in ("", "tenant", "tenant"):
            writer.write(timestamp_ms=0, prompt_token_ids=range(32), num_output_tokens=1, namespace=namespace)
    first, second, third = read(tmp_path / "a")
    assert (shared(first, second), shared(second, third)) == (0, 2)


def test_pictures_are_part_of_the_blocks_that_show_them_and_of_those_after(tmp_path):
    spans = [(), ((4, "a"),), ((4, "b"),), ((4, "a"), (6, "b")), ((4, "b"), (6, "a")), ((4, "a"),)]
    with TraceWriter(tmp_path / "t.jsonl", block_tokens=4) as writer:
        for own in spans:
            writer.write(timestamp_ms=0, prompt_token_ids=range(12), num_output_tokens=1, spans=own)
    lines = [json.loads(line)["hash_ids"] for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert len({line[0] for line in lines}) == 1
    assert lines[1] == lines[5]
    for block in (1, 2):
        assert len({line[block] for line in lines}) == 5
