"""The guides' programs run, against a server or an engine with the shipped model; their commands are understood."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from doors import command_line
from foreword.demo.run import embedded_model
from live_server import ServerProcess

DOCS = Path(__file__).parents[2] / "docs"
PRINTED = {
    "server.md": r"4821 \d+\n",
    "guides/openai.md": r"[1-9]\d*\n",
    "guides/why-it-missed.md": r"\{.*\n.*'hit_tokens': 8, .*'never_seen'.*'position': 8, .*\n",
    "guides/anthropic.md": "",
    "guides/gemini.md": r"4821 \w+\n",
    "guides/ollama.md": "4821\n",
    "guides/scores.md": r" yes -\d+\.\d+\n no -\d+\.\d+\n",
    "guides/drafts.md": "True\nTrue\n",
    "guides/restart.md": "first False\nsecond True\n",
}
"""What the Python of each page prints."""
FENCE = re.compile(r"^( *)```\w*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", PRINTED)
def test_the_python_of_a_guide_runs(name: str, server: ServerProcess, tmp_path: Path, monkeypatch) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / name).read_text(), re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    Path("manual.txt").write_text("Page 3 says that the code of the amber falcon is 4821.\n" * 20)
    printed = io.StringIO()
    with embedded_model() as folder, contextlib.redirect_stdout(printed):
        program = re.sub(r"http://(127\.0\.0\.1|localhost):8000", server.url, "".join(blocks))
        program = program.replace('"path/to/model"', repr(str(folder))).replace('"MODEL"', '"foreword-demo"')
        exec(compile(program, f"<{name}>", "exec"), {})
    assert re.fullmatch(PRINTED[name], printed.getvalue()), printed.getvalue()


def commands() -> Iterator[tuple[str, list[str]]]:
    """(page, arguments) of each command line of foreword in the blocks of all pages."""
    for path in sorted([DOCS.parent / "README.md", *DOCS.glob("*.md"), *DOCS.glob("guides/*.md")]):
        for _, block in FENCE.findall(path.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                found = re.match(r"(?:\.venv/bin/)?foreword ([a-z][^:]*(?: .*)?)$", line.strip())
                if found:
                    alone = re.split(r"\s(?:[|&;<]|\d?>|#)", found[1])[0]
                    yield path.name, shlex.split(alone)


def test_foreword_understands_every_command_of_the_pages() -> None:
    given = list(commands())
    assert len(given) > 40
    for page, words in given:
        try:
            _, unknown = command_line().parse_known_args(words)
        except SystemExit:
            pytest.fail(f"{page}: foreword {shlex.join(words)} is refused")
        assert not unknown, f"{page}: {shlex.join(words)}"
