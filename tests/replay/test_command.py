"""`foreword replay`: what it prints, draws and refuses."""

import functools
import json
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

from foreword.cli import main
from foreword.errors import ConfigError, ModelLoadError
from foreword.replay.capacity import Capacity, kv_bytes_per_token, parse_capacity
from foreword.replay.keys import as_content_ids, chain
from foreword.replay.picture import HEIGHT, WIDTH, as_html, as_png
from foreword.replay.policies import POLICIES
from foreword.replay.report import advice, capacity_for, interval_shares, knee
from foreword.replay.timing import StepCost
from foreword.replay.trace import RecordedRequest
from replay.workloads import simulate

CONFIG = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "torch_dtype": "bfloat16",
}
BYTES_PER_TOKEN = 2 * 4 * 2 * 32 * 2


@pytest.fixture
def trace(tmp_path):
    file = tmp_path / "trace.jsonl"
    lines = [
        json.dumps({"timestamp": n, "input_length": 1024, "output_length": 1, "hash_ids": [n % 3, 100 + n % 7]})
        for n in range(60)
    ]
    file.write_text("\n".join([*lines, "{"]), encoding="utf-8")
    return file


def run(*arguments):
    return main(["replay", *map(str, arguments)])


def test_the_last_line_is_json_with_hit_ratios_by_policy_and_capacity(trace, capsys):
    assert run(trace, "--policy", "lru,value,optimum", "--capacity", "4,100", "--json") == 0
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 1
    report = json.loads(printed.out)
    ratios = report["hit_ratio"]
    assert list(ratios) == ["lru", "value", "optimum"]
    assert all(list(by_capacity) == ["4", "100"] for by_capacity in ratios.values())
    assert ratios["lru"]["4"] <= ratios["optimum"]["4"] < ratios["lru"]["100"] == ratios["optimum"]["100"]
    assert ratios["lru"]["100"] == pytest.approx((60 - 3 + 60 - 21) / 120, abs=1e-6)
    assert report["malformed_lines"] == 1
    assert "line 61" in printed.err
    assert "missed because they had been evicted" in printed.err
    assert "Never seen before, and missed by any cache: 24 blocks (20.0%)" in printed.err


def test_a_capacity_with_a_unit_is_bytes_of_the_models_kv(trace, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    size = f"{4 * 512 * BYTES_PER_TOKEN / 1e6}MB"
    assert run(trace, "--capacity", f"4,{size}", "--model", tmp_path, "--policy", "lru", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["hit_ratio"]["lru"]["4"] == report["hit_ratio"]["lru"][size]
    assert report["capacity_blocks"] == {"4": 4, size: 4}


def test_a_trace_of_full_blocks_is_replayed_whole_prompts_shorter_than_a_block_too(tmp_path, capsys):
    file = tmp_path / "trace.jsonl"
    prompts = [[], [1], [1, 2], []] * 10
    lines = [json.dumps({"timestamp": 0, "input_length": 512 * len(ids) + 9, "hash_ids": ids}) for ids in prompts]
    file.write_text("\n".join(lines), encoding="utf-8")
    policies = ",".join(["lru", "optimum", *(policy for policy in POLICIES if policy != "lru")])
    assert run(file, "--policy", policies, "--capacity", "10", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["requests"], report["blocks"], report["malformed_lines"]) == (40, 30, 0)
    assert {ratio["10"] for ratio in report["hit_ratio"].values()} == {round(28 / 30, 6)}
    file.write_text(lines[0], encoding="utf-8")
    assert run(file, "--policy", policies, "--capacity", "10", "--json", "--picture", tmp_path / "page.html") == 0
    assert json.loads(capsys.readouterr().out)["hit_ratio"]["lru"]["10"] == 0


def test_a_policy_has_points_where_it_was_measured_and_no_line_between(trace, tmp_path):
    drawn = {}
    for policies in ("lru", "lru,value,optimum"):
        svg = tmp_path / "curve.svg"
        assert run(trace, "--policy", policies, "--capacity", "4,8,20", "--picture", svg) == 0
        text = svg.read_text(encoding="utf-8")
        drawn[policies] = (text.count("<polyline"), text.count("<circle"))
    assert drawn["lru,value,optimum"][0] == drawn["lru"][0]
    assert drawn["lru,value,optimum"][1] == drawn["lru"][1] + 2 * (3 + 1)


def test_pictures_are_well_formed_and_need_nothing_else(trace, tmp_path):
    svg, page = tmp_path / "curve.svg", tmp_path / "curve.html"
    assert run(trace, "--capacity", "4,20", "--picture", svg, "--picture", page) == 0
    root = xml.etree.ElementTree.fromstring(svg.read_text(encoding="utf-8"))
    texts = [each.text for each in root.iter() if each.text]
    assert {"lru", "value", "optimum"} <= set(texts)
    assert any(each.startswith("knee: ") for each in texts)
    text = page.read_text(encoding="utf-8")
    assert "<svg" in text
    assert "src=" not in text
    assert "href=" not in text


def test_a_png_shows_what_the_svg_shows_and_its_letters_are_there(trace, tmp_path):
    pytest.importorskip("resvg_py")
    if not any(Path("/usr/share/fonts").rglob("*.[ot]tf")):
        pytest.skip("there are no fonts here")
    png = tmp_path / "curve.png"
    assert run(trace, "--capacity", "4,20", "--picture", png) == 0
    image = png.read_bytes()
    assert image.startswith(b"\x89PNG")
    assert int.from_bytes(image[16:20]) == 2 * WIDTH
    assert int.from_bytes(image[20:24]) == 2 * HEIGHT


def test_a_png_without_letters_is_refused(monkeypatch):
    resvg = pytest.importorskip("resvg_py")
    without_fonts = functools.partial(resvg.svg_to_bytes, skip_system_fonts=True)
    monkeypatch.setattr(resvg, "svg_to_bytes", without_fonts)
    with pytest.raises(ConfigError, match="none of the fonts"):
        as_png('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"><text x="1" y="8">A</text></svg>')


def test_a_png_without_the_library_names_the_remedy_before_any_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    assert run(tmp_path / "no-such-trace", "--picture", tmp_path / "curve.png") == 2
    assert "pip install foreword[picture]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strict"], "line 61"),
        (["--capacity", "4GB"], "--model"),
        (["--capacity", "4XB"], "'4XB'"),
        (["--capacity", "0"], "'0'"),
        (["--policy", "best"], "'best'"),
        (["--picture", "curve.gif"], "curve.gif"),
        (["--sample", "0"], "sampling_rate=0"),
        (["--sample", "0.5"], "lru only"),
        (["--model", "no-such-folder"], "no-such-folder"),
        (["--kv-bytes-per-token", "0"], "kv_bytes_per_token=0"),
        (["--max-requests", "0"], "max_requests=0"),
        (["--capacity", "99999999", "--policy", "value"], "use at most 50,000,000, or lru"),
        (["--picture", "no-such-folder/curve.svg"], "'no-such-folder'"),
        (["--flops", "1e14"], "--model"),
    ],
)
def test_mistakes_are_named(trace, capsys, arguments, message):
    assert run(trace, *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "best"], "'best'"),
        (["--capacity", "4XB"], "'4XB'"),
        (["--capacity", "1__000"], "'1__000' is no capacity"),
        (["--capacity", "1,0"], "'0'"),
        (["--capacity", "4GB"], "--model"),
        (["--sample", "2"], "sampling_rate=2"),
        (["--sample", "0.5"], "lru only"),
        (["--flops", "0", "--model", "{folder}"], "flops_per_s=0"),
        (["--flops", "1e9", "--model", "{folder}", "--bandwidth", "5"], "'5' is no number of bytes"),
        (["--flops", "1e9", "--model", "{folder}", "--replicas", "0"], "num_replicas=0"),
    ],
)
def test_mistakes_in_arguments_are_told_before_the_trace_is_opened(tmp_path, capsys, arguments, message):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    assert run(tmp_path / "no-such-trace", *(each.format(folder=tmp_path) for each in arguments)) == 2
    assert message in capsys.readouterr().err


def test_a_full_disk_is_told_in_one_line(trace, capsys, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("foreword.replay.command.print_report", fail)
    assert run(trace, "--policy", "lru") == 2
    assert "the output cannot be written" in capsys.readouterr().err


def test_sampling_prints_its_error(trace, capsys):
    assert run(trace, "--policy", "lru", "--capacity", "4", "--sample", "0.9") == 0
    assert "standard error at most" in capsys.readouterr().out


def test_capacities_and_kv_sizes_are_worked_out():
    assert parse_capacity("1GiB", 16, 1024).num_blocks == 2**30 // 16384
    assert parse_capacity("2.5kb", 1, 5).num_blocks == 500
    with pytest.raises(ConfigError, match="is 0 blocks; give one that holds 1 to"):
        parse_capacity("1KB", 16, 1024)
    with pytest.raises(ConfigError, match="99,999,999,999 blocks"):
        parse_capacity("99999999999", 16, None)
    assert kv_bytes_per_token(CONFIG) == BYTES_PER_TOKEN
    latent = {"num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "model_type": "deepseek_v3"}
    assert kv_bytes_per_token(latent) == 2 * 576 * 2
    with pytest.raises(ConfigError, match="kv_cache_dtype='int8' stores keys and values of heads"):
        kv_bytes_per_token(latent, "int8")
    expanded = {**latent, "model_type": "kimi_linear", "num_attention_heads": 3, "qk_nope_head_dim": 8, "v_head_dim": 5}
    assert kv_bytes_per_token(expanded) == 2 * 3 * (8 + 64 + 5) * 2
    assert kv_bytes_per_token(expanded, "int8") == 2 * 3 * (8 + 64 + 2 + 5 + 2)
    eight_bits = {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 64, "num_attention_heads": 4}
    assert kv_bytes_per_token(eight_bits, "int8") == 2 * 3 * 2 * (64 + 2)
    for wrong in ({}, {**CONFIG, "num_hidden_layers": 0}, {**CONFIG, "num_hidden_layers": float("inf")}):
        with pytest.raises(ModelLoadError, match="does not tell the size of its KV"):
            kv_bytes_per_token(wrong)
    with pytest.raises(ModelLoadError, match=r"does not tell its weights \('hidden_size'\)"):
        StepCost.of_model(eight_bits, flops_per_s=1e12, bytes_per_s=1e10)


def requests(*prompts):
    return [RecordedRequest(None, chain(as_content_ids(ids)), len(ids), 1, 1) for ids in prompts]


def test_the_knee_is_where_a_loop_begins_to_fit():
    result = simulate(requests(*[[10 * (n % 20) + at for at in range(5)] for n in range(400)]), ["lru"], [])
    assert 90 <= knee(result) <= 100
    assert capacity_for(result, 0.9) >= 90
    assert "nine tenths" in advice(result)


def test_lrus_dots_lie_on_its_curve_and_the_histogram_has_no_gaps():
    trace = [*requests([1], [2], [1]), *requests(*[[100 + n] for n in range(40)], [2])]
    result = simulate(trace, ["lru"], [Capacity("37", 37), Capacity("1000", 1000)])
    at_37 = result.curve_capacities.index(37)
    assert result.curve_ratios[at_37] == result.block_ratio(result.hits["lru"]["37"]) == 1 / 44
    assert max(result.curve_capacities) == result.num_different_blocks
    assert [name for name, _ in interval_shares(result)] == ["2 to 4", "4 to 8", "8 to 16", "16 to 32", "32 to 64"]
    assert [share for _, share in interval_shares(result)] == [0.5, 0, 0, 0, 0.5]


@pytest.mark.parametrize(("bytes_per_token", "headings"), [(None, 2), (1000, 3)])
def test_the_page_tells_gigabytes_only_where_a_model_is_known(bytes_per_token, headings):
    page = as_html(simulate(requests([1, 2], [1, 3]), ["lru"], [Capacity("7", 7)]), "a <trace>", bytes_per_token)
    assert page.count("<th>GB</th>") == 2 * (headings - 2)
    assert "<h1>a &lt;trace&gt;</h1>" in page
    rows = [row for row in page.split("<tr>") if row.startswith(("<td>7<", "<td>unlimited<"))]
    assert [row.count("<td>") for row in rows] == [headings + 1] * 3


def test_traffic_without_reuse_is_told_plainly():
    result = simulate(requests(*[[5 * n, 5 * n + 1] for n in range(50)]), ["lru"], [])
    assert "no cache of prefixes" in advice(result)


def test_the_advice_names_the_policy_and_the_capacity_that_pay():
    loop = requests(*[[10 * (n % 20) + at for at in range(5)] for n in range(400)])
    result = simulate(loop, ["lru", "slru", "optimum"], [Capacity("60", 60), Capacity("200", 200)])
    text = advice(result)
    assert "95.0% of the prompts' blocks had been there before" in text
    assert "Beyond 200 blocks, memory finds hardly anything more" in text
    short = advice(simulate(loop, ["lru"], [Capacity("60", 60)]))
    assert "With 60 blocks, 95.0% of the blocks are still evicted before they are wanted again" in short
    scans = simulate(requests_with_scans(), ["lru", "slru", "value"], [Capacity("30", 30)])
    assert "With 30 blocks, choose value: it finds" in advice(scans)
    without = simulate(requests_with_scans(), ["lru", "slru"], [Capacity("30", 30)])
    assert without.hits["slru"]["30"].blocks > without.hits["lru"]["30"].blocks
    assert "slru" not in advice(without), "the engine has none"


def requests_with_scans():
    """Two prompts that come again and again, with floods between them that nobody repeats."""
    prompts = []
    for n in range(60):
        prompts += [
            [1, 2, 3, 4],
            [1, 2, 5, 6],
            [1, 2, 3, 4],
            *([1000 * n + 10 * k + at for at in range(9)] for k in range(5)),
        ]
    return requests(*prompts)
