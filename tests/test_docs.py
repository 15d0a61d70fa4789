"""Python in the documentation runs, prints what the page says, and links lead somewhere."""

import contextlib
import io
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ["docs/concepts/cache.md", "docs/concepts/compiled-kernels.md"]
LINKING = [
    "README.md",
    "ARCHITECTURE.md",
    "BENCHMARKS.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    *(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md")),
]


def blocks_of(page):
    return re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", PAGES)
def test_the_code_of_a_page_runs_from_top_to_bottom_and_prints_what_it_says(name, request):
    page = (request.config.rootpath / name).read_text()
    namespace, printed = {}, io.StringIO()
    blocks = blocks_of(page)
    assert blocks
    for block in blocks:
        with contextlib.redirect_stdout(printed):
            exec(compile(block, f"<{name}>", "exec"), namespace)  # no file, so numba keeps nothing
    said = [line for block in blocks for line in re.findall(r"^print\(.*\) +# (.*)$", block, re.MULTILINE)]
    assert printed.getvalue().splitlines() == said


def anchors_of(page):
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", LINKING)
def test_links_to_files_and_headings_lead_somewhere(name, request):
    path = request.config.rootpath / name
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        other = path.parent / file if file else path
        assert other.exists(), f"{name} links to {target}, which does not exist"
        if anchor and other.suffix == ".md":
            assert anchor in anchors_of(other), f"{name} links to {target}, which is no heading"


def test_the_files_that_the_page_names_exist(request):
    root = request.config.rootpath
    for name in re.findall(r"`((?:tests|examples|docs|benchmarks)/[\w/.]+)`", (root / PAGES[0]).read_text()):
        assert (root / name).exists()


def paths_in(page):
    """The files and folders in a page's code: `cache/manager.py`, `kernels/`; programs of an environment are none."""
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", page, re.DOTALL)).replace("`", " ")
    words = (word.strip("()[],;:") for word in code.split())
    return {word for word in words if re.search(r"\w/|\w\.(py|md|toml)$", word) and not word.startswith(".venv/")}


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_the_files_and_folders_that_a_page_names_exist(name):
    named = paths_in((ROOT / name).read_text())
    assert len(named) >= 15
    missing = {path for path in named if not (ROOT / path).exists() and not (ROOT / "src" / "foreword" / path).exists()}
    assert not missing, f"{name} names {sorted(missing)}, which do not exist"


def test_a_file_that_was_moved_is_found_out():
    page = (
        "Read `engine/scheduler.py`, `cache/`, `.venv/bin/pytest tests/x.py -k a`:\n\n```\ntext.py  -> (queues/)\n```\n"
    )
    assert paths_in(page) == {"engine/scheduler.py", "cache/", "tests/x.py", "text.py", "queues/"}


def test_the_layers_of_the_page_are_those_that_are_enforced():
    page = (ROOT / "ARCHITECTURE.md").read_text()
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["id"] == "layers")
    assert "```\n" + "\n".join(layers) + "\n```" in page


def test_every_decision_is_listed_with_a_status():
    page = (ROOT / "docs" / "decisions" / "README.md").read_text()
    listed = re.findall(r"^\| \[\d+\]\(([\w.-]+)\) \| .+ \| (?:in force|superseded by) ?.*\|$", page, re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in ROOT.glob("docs/decisions/0*.md"))
