"""The guide's example runs, and prints what the guide says."""

import re
from pathlib import Path

from foreword.cli import main
from foreword.demo.run import embedded_model

GUIDE = Path(__file__).parents[2] / "docs/guides/lint.md"


def test_the_example_prints_what_the_guide_says(tmp_path, monkeypatch, capsys):
    blocks = dict(re.findall(r"^```(\w+)\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE))
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks["python"], "<guide>", "exec"), {})
    with embedded_model() as folder:
        assert main(["lint", "requests.jsonl", "--model", str(folder)]) == 0
    assert capsys.readouterr().out == blocks["text"]
