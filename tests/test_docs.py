"""Python in the documentation runs, prints what the page says, and links lead somewhere."""

import contextlib
import io
import re

import pytest

PAGES = ["docs/concepts/cache.md", "docs/concepts/compiled-kernels.md"]


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
            exec(compile(block, name, "exec"), namespace)
    said = [line for block in blocks for line in re.findall(r"^print\(.*\) +# (.*)$", block, re.MULTILINE)]
    assert printed.getvalue().splitlines() == said


@pytest.mark.parametrize(
    "name",
    [
        *PAGES,
        "docs/concepts/keys.md",
        "docs/guides/serve.md",
        "docs/benchmarks/claims.md",
        "docs/guides/capacity.md",
        "docs/guides/hit-rate.md",
        "docs/server.md",
        "README.md",
        "ARCHITECTURE.md",
    ],
)
def test_links_to_files_and_headings_lead_somewhere(name, request):
    path = request.config.rootpath / name
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    headings = {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        assert not file or (path.parent / file).exists(), f"{name} links to {target}, which does not exist"
        assert file or anchor in headings, f"{name} links to #{anchor}, which is no heading"


def test_the_files_that_the_page_names_exist(request):
    root = request.config.rootpath
    for name in re.findall(r"`((?:tests|examples|docs|benchmarks)/[\w/.]+)`", (root / PAGES[0]).read_text()):
        assert (root / name).exists()
