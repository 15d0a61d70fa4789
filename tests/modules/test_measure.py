"""`foreword pml measure`: what it finds on the embedded model, what it saves, and what it refuses before it runs."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

import pytest

import foreword
from foreword import LLM, SamplingParams
from foreword.cli import main
from foreword.linking import Gate, MeasuredLinks, Method
from foreword.modules.measure import Answer, Arm, Tally, tally, wilson
from foreword.modules.questions import Asked, Questions
from foreword.pml.composition import Composition, Part
from foreword.request import CompletionOutput, LinkReport, RequestMetrics, RequestOutput
from live_server import embedded_llm
from tiny_models import TinyModels

WEIGHTS = Path(foreword.__file__).parent / "demo" / "weights"
OPTIONS = ["--max-model-len", "1024", "--kv-cache-memory-bytes", "16MiB", "--no-self-check"]
MODEL = ["--model", str(WEIGHTS), *OPTIONS]
FACT, QUESTION = "The code of the amber falcon is 4821.\n", "What is the code of the amber falcon?"


def measured(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert main(["pml", "measure", *args, "--json"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def module(part: Part) -> str:
    return part.name.partition(":")[0]


def test_it_reports_each_task_and_method(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--questions", "4", "--tasks", "parameters,leak", "--contexts", "256", "--parts", "2,4"]
    found = measured(capsys, *MODEL, *args, "--methods", "none,all")
    sizes = [(cell["task"], cell["context"], cell["parts"]) for cell in found["cells"]]
    assert sizes == [("parameters", 256, 2), ("parameters", 256, 4), ("leak", 256, 2), ("leak", 256, 4)]
    for cell in found["cells"]:
        assert list(cell["methods"]) == ["none", "all"]
        none, plain = cell["methods"].values()
        assert plain["agreement"] == 100
        assert none["computed_share"] < plain["computed_share"] < 1
        assert none["right"] == (100 if cell["task"] == "parameters" else 0)
        assert none["prompts"] == 4
        assert none["ttft_ms"] > 0
    assert found == {**measured(capsys, *MODEL, *args, "--methods", "none,all"), "cells": found["cells"]}


@pytest.mark.slow
def test_a_saved_file_opens_the_gate_for_this_model_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, file = tmp_path / "prompts.jsonl", tmp_path / "links.json"
    documents = [f"The code of the amber falcon is {number}.\n" * 5 for number in (12, 34, 56)]
    asked = {"documents": documents, "question": QUESTION}
    lines = [{**asked, "answer": answer} for answer in ["12"] * 30 + ["34"] * 30 + ["56"] * 40]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    args = ["--prompts", str(prompts), "--methods", "none,first-16,all", "--max-tokens", "4", "--save", str(file)]
    assert main(["pml", "measure", *MODEL, *args]) == 0
    shown = capsys.readouterr().out
    assert "first-16" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    found = MeasuredLinks.read(file)
    assert {name: one.num_prompts for name, one in found.methods.items()} == {"none": 100, "first-16": 100}
    with LLM(str(WEIGHTS), allow_links=True, max_model_len=1024, kv_cache_memory_bytes="16MiB") as llm:
        gate = Gate(0.01, found)
        gate.check_model(llm.cache_identity.model_id)
        gate.check("first-16")


@pytest.mark.slow
def test_gaps_are_measured_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, file = tmp_path / "prompts.jsonl", tmp_path / "links.json"
    known = {"documents": ["A lamp. " * 9, FACT * 3], "question": QUESTION, "answer": "4821"}
    unknown = {"documents": ["The amber falcon. " * 9, "A lamp. " * 9], "answer": "none"}
    lines = [known if number % 2 else {**unknown, "question": f"{number}?"} for number in range(100)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    args = ["--prompts", str(prompts), "--methods", "first-4,all", "--max-tokens", "3", "--save", str(file)]
    found = measured(capsys, *MODEL, "--gaps", *args)
    dense, spread = (cell["methods"] for cell in found["cells"])
    assert [cell["gaps"] for cell in found["cells"]] == [False, True]
    assert (dense["all"]["agreement"], dense["all"]["linked_prompts"]) == (100, 0)
    assert spread["all"]["agreement"] < 100, "other positions, other answers"
    assert spread["all"]["linked_prompts"] == 100, "a prompt with gaps says something of `all`"
    assert spread["all"]["computed_share"] > dense["all"]["computed_share"], "the first document is moved, too"
    told = MeasuredLinks.read(file)
    assert list(told.methods) == ["first-4"]
    losses = {name: -100 * one.loss for name, one in told.with_gaps.items()}
    assert losses == {name: spread[name]["difference"] for name in ("first-4", "all")}
    assert (dense["all"]["right"], dense["all"]["difference"], dense["all"]["p"]) == (50, 0, 1)


def test_gaps_are_those_of_a_schema_of_which_a_prompt_leaves_out_half() -> None:
    with embedded_llm() as llm:
        assert llm.tokenizer is not None
        asked = Questions(llm.tokenizer).draw(Random(3), "parameters", 300, 3)
    spread = asked.with_gaps()
    assert spread.dense == asked.composition
    assert not asked.composition.has_gaps
    assert spread.composition.token_ids.tolist() == asked.composition.token_ids.tolist()
    sizes = {
        name: sum(len(part.token_ids) for part in parts) for name, parts in groupby(spread.composition.parts, module)
    }
    reached, before = 0, ""
    for part in spread.composition.parts:
        left_out = sizes[module(part)] if module(part) not in ("", before) else 0
        assert part.position == reached + left_out
        reached, before = part.end, module(part)
    num_tokens = sum(size for name, size in sizes.items() if name) + asked.composition.num_tokens
    assert spread.composition.next_position == num_tokens


def test_prompts_of_which_nothing_is_linked_are_no_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, file = tmp_path / "prompts.jsonl", tmp_path / "links.json"
    lines = [{"documents": [FACT], "question": QUESTION, "answer": "4821"}] * 100
    prompts.write_text("\n".join(map(json.dumps, lines)))
    args = ["--prompts", str(prompts), "--methods", "none", "--max-tokens", "4", "--save", str(file)]
    assert main(["pml", "measure", *MODEL, *args]) == 2
    told = capsys.readouterr()
    assert "'none' linked in 0 of 100" in told.err
    assert "100%" in told.out
    assert not file.exists()


@pytest.mark.slow
def test_a_table_in_which_all_itself_fails_is_not_printed(
    tiny_models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tiny_models.folder_with_tokenizer("llama"))
    args = ["--plain", "--questions", "100", "--tasks", "order", "--contexts", "60", "--parts", "2"]
    args += ["--max-tokens", "1", "--save", str(tmp_path / "links.json")]
    model = ["--model", folder, "--no-self-check", "--num-gpu-blocks-override", "400"]
    assert main(["pml", "measure", *model, *args]) == 2
    told = capsys.readouterr()
    assert not told.out
    assert "is right in 0 of 100 prompts of order 60x2, less than 20%" in told.err
    assert not list(tmp_path.iterdir())


def test_what_all_can_answer_is_told_and_the_rest_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--questions", "4", "--tasks", "parameters,hops,leak", "--contexts", "256", "--parts", "2"]
    assert main(["pml", "measure", *MODEL, *args, "--methods", "none"]) == 2
    told = capsys.readouterr()
    assert "parameters" in told.out
    assert "leak" in told.out, "it has nothing to answer"
    assert "hops" not in told.out
    assert " of 4 prompts of hops 256x2, less than 20%" in told.err


def test_a_cell_that_does_not_count_keeps_no_file_from_being_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foreword.modules.measure.LEAST_PROMPTS", 4)
    args = ["--questions", "4", "--tasks", "parameters,hops,edit", "--contexts", "256", "--parts", "2"]
    args += ["--methods", "none", "--save", str(tmp_path / "links.json")]
    assert main(["pml", "measure", *MODEL, *args]) == 2
    told = capsys.readouterr().err
    assert " of 4 prompts of hops 256x2, less than 20%" in told
    assert "is written without it" in told
    found = MeasuredLinks.read(tmp_path / "links.json")
    assert found.methods["none"].num_prompts == 4
    assert found.edits["none"].num_prompts == 4, "edits are counted apart"
    assert [cell["task"] for cell in found.details["cells"]] == ["parameters", "edit"]


def test_a_prompt_with_gaps_counts_for_every_method_whatever_it_links() -> None:
    """Or more prompts were lost than there are, and the interval of the loss has no value."""
    composition = Composition((Part((5, 6), 0, "text"), Part((7,), 9, "text")))

    def answer(text: str, *, has_gaps: bool) -> Answer:
        link = LinkReport("first-16", 1, 0, 0, 3, 0, 0, has_gaps=has_gaps)
        completion = CompletionOutput(0, text=text)
        return Answer(RequestOutput("x", "", [5, 6, 7], [completion], RequestMetrics(0.0), link=link), 1.0)

    found = Tally()
    for _ in range(3):
        found.add(Asked(composition, "4821"), answer("1", has_gaps=True), answer("4821", has_gaps=False), 0)
    found.add(Asked(composition, None), answer("1", has_gaps=True), answer("4821", has_gaps=False), 0)
    assert (found.num_linked, found.num_lost) == (3, 3)
    assert found.beside_all(found.num_linked).loss_interval[1] == 1


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ("--tasks poems", "'poems' is no task"),
        ("--methods last-3", "link='last-3' is no method"),
        ("--methods ,", "--methods is empty"),
        ("--contexts 1e3", "'1e3' is no number"),
        ("--parts 0", "'0' is no number"),
        ("--parts ,", "need one value each"),
        ("--parts 1", "1 parts of 512 tokens"),
        ("--contexts 64 --parts 16", "16 parts of 64 tokens"),
        ("--questions 0", "--questions 0 is too small"),
        ("--max-tokens 0", "--max-tokens 0 is too small"),
        ("--prompts none.jsonl", "cannot be read"),
        ("--save no/such/folder", "name a file in a folder that exists"),
        ("--save x --methods all", "needs a method beside 'all'"),
        ("--save x --questions 33 --gaps", "there are 99"),
        ("--save x --tasks scope,hops", "there are 0"),
        ("--contexts 4096", "max_model_len"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_its_value(
    args: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["pml", "measure", *MODEL, *args.split()]) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_prompts_without_answers_are_not_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"documents": [FACT], "question": QUESTION}] * 100
    prompts.write_text("\n".join(map(json.dumps, [*lines, {**lines[0], "answer": "4821"}])))
    assert main(["pml", "measure", *MODEL, "--prompts", str(prompts), "--save", str(tmp_path / "x")]) == 2
    assert 'with an "answer" in a file of yours, and there are 1' in capsys.readouterr().err


def test_a_model_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pml", "measure"]) == 2
    assert "no model is given" in capsys.readouterr().err


def test_intervals_are_wilsons() -> None:
    assert wilson(500, 500) == (99.2, 100.0)
    assert wilson(450, 500) == (87.1, 92.3)
    assert wilson(0, 10)[0] == 0


@pytest.mark.slow
def test_the_prototypes_order_of_methods_holds() -> None:
    """Facts cut every 16 tokens: more first tokens, more right answers; text after an argument has to be computed."""
    with LLM(str(WEIGHTS), allow_links=True, block_size=1, num_gpu_blocks_override=20_000, max_model_len=1024) as llm:
        assert llm.tokenizer is not None
        questions, params = Questions(llm.tokenizer), SamplingParams(max_tokens=12, temperature=0.0)
        arms = [Arm.of(name) for name in ("none", "first-4", "first-8", "all")]
        rng = Random(0)
        cut = [questions.draw(rng, "cut-16", 460, 2) for _ in range(40)]
        right = {name: own.num_right for name, own in tally(llm, cut, arms, params, at_once=20).items()}
        assert right["none"] + 4 <= right["first-4"] <= right["first-8"] == right["all"] == 40
        arms = [Arm.of("none"), Arm("not-behind", Method("none", 0, after_arguments=False))]
        given = [questions.draw(rng, "parameters", 460, 2) for _ in range(40)]
        found = tally(llm, given, arms, params, at_once=20)
        assert found["none"].num_right == 40
        assert found["not-behind"].num_right < 24
        llm.engine.check_integrity()


def test_times_are_those_of_prompts_of_which_the_sources_alone_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what `all` and other methods have computed of the same prompt before."""
    with LLM(str(WEIGHTS), allow_links=True, block_size=1, num_gpu_blocks_override=8_000, max_model_len=1024) as llm:
        assert llm.tokenizer is not None
        rng, questions = Random(0), Questions(llm.tokenizer)
        asked = [questions.draw(rng, "independent", 300, 3) for _ in range(2)]
        generate, reports = llm.generate, []

        def noted(prompts: Any, params: Any, **options: Any) -> Any:
            outputs = generate(prompts, params, **options)
            reports.extend(output.link for output in outputs if output.link is not None)
            return outputs

        monkeypatch.setattr(llm, "generate", noted)
        tally(llm, asked, [Arm.of("first-4"), Arm.of("first-8")], SamplingParams(max_tokens=2, temperature=0.0))
        exact = [one.composition.num_exact_tokens for one in asked]
        linked = [report for report in reports if report.linked_tokens]
        assert [report.cached_tokens for report in linked] == [exact[0]] * 2 + [exact[1]] * 2
