"""What mkdocs.yml cannot configure: pages outside docs/, links to them, and the generated reference.  mkdocs calls the
functions `on_*`. Generated pages are not in the repository: `make site` writes them anew.
"""

from __future__ import annotations

import argparse
import html
import os
import posixpath
import re
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ROOT_PAGES = ["README.md", "ARCHITECTURE.md", "BENCHMARKS.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
LINK = re.compile(r"(\]\(|(?:src|href)=\")(?![a-z]+:|#)([^)\s#\"]+)(#[^)\s\"]*)?(\)|\")")
COLUMNS = "100"


# ------------------------------------------------------------------------------ pages and links


def place_of(path: str) -> str:
    """The place in the site of a file of the repository. A file that is not a page is shown as code."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if path.endswith(".md") else f"source/{path}.md"


def path_of(shown: str) -> str:
    """The file of the repository that the site shows at this place."""
    if shown == "index.md":
        return "README.md"
    return f"docs/{shown}" if (ROOT / "docs" / shown).exists() else shown


def target_of(own: str, link: str) -> str:
    """The path from the root of the repository to the target of a link in the file `own`."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(own), link))


def pages_outside() -> dict[str, str]:
    """The texts of files outside docs/ that the site shows: pages at the root, and all files that pages link to."""
    waiting = [*ROOT_PAGES, *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]
    found: dict[str, str] = {}
    while waiting:
        own = waiting.pop()
        text = (ROOT / own).read_text(encoding="utf-8")
        if not own.startswith("docs/"):
            found[own] = text
        if own.endswith(".md"):
            targets = {target_of(own, link[2]) for link in LINK.finditer(text)}
            waiting += [
                path
                for path in targets
                if not path.startswith("docs/") and path not in found and (ROOT / path).is_file()
            ]
    return found


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    for path, text in pages_outside().items():
        if not path.endswith(".md"):
            text = f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n````{Path(path).suffix[1:]}\n{text}\n````\n"
        files.append(File.generated(config, place_of(path), content=text))
    for place, text in reference().items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    shown = page.file.src_uri
    own = path_of(shown)
    if own.startswith("docs/decisions/"):
        page.meta.setdefault("search", {"boost": 0.5})  # a reader who searches mostly wants a guide or a reference

    def rewritten(link: re.Match[str]) -> str:
        before, target, anchor, after = link.groups()
        path = target_of(own, target)
        if path.startswith("docs/") and own.startswith("docs/"):
            return link[0]
        return f"{before}{posixpath.relpath(place_of(path), posixpath.dirname(shown) or '.')}{anchor or ''}{after}"

    return LINK.sub(rewritten, markdown)


# ------------------------------------------------------------------------------ reference


def reference() -> dict[str, str]:
    """The generated pages, by place."""
    os.environ["COLUMNS"] = COLUMNS
    return {
        "reference/cli.md": command_line(),
        "reference/errors.md": errors(),
        "reference/metrics.md": metrics(),
        "reference/options.md": options(),
        "reference/python.md": python(),
    }


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines) + "\n"


def prose(text: str, folder: str = "..") -> str:
    """A help text as Markdown, with HTML escaped and names of pages turned into links."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    escaped = "".join(part if part.startswith("`") else html.escape(part, quote=False) for part in parts)
    return re.sub(r"docs/([\w/-]+)\.md", rf"[\1]({folder}/\1.md)", escaped)


def python() -> str:
    import foreword

    names = [name for name in foreword.__all__ if name not in ("__version__", "ForewordError")]
    return (
        "# Python\n\nThe names that `import foreword` gives. Options of `LLM` are on [their own page](options.md), "
        "errors [too](errors.md).\n\n" + "".join(f"::: foreword.{name}\n\n" for name in names)
    )


def errors() -> str:
    from foreword import errors as module

    tree = textwrap.dedent((module.__doc__ or "").partition("remedy.")[2])
    names = re.findall(r"^class (\w+)", Path(module.__file__).read_text(encoding="utf-8"), re.MULTILINE)
    return (
        "# Errors\n\nEvery error that foreword raises on purpose is a `ForewordError`. Its message names the wrong "
        "value and the remedy. A command prints it and ends with exit code 2; a server answers with the status that "
        f"[its page](../server.md#limits) lists.\n\n```text\n{tree.strip()}\n```\n\n"
        + "".join(f"::: foreword.errors.{name}\n\n" for name in names)
    )


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and the parsers of its commands, with all their arguments."""
    later = getattr(parser, "later", None)
    if later is not None:
        parser.later = None  # type: ignore[attr-defined]
        later(parser)
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from commands(one)


def command_line() -> str:
    from foreword.cli import _parser
    from foreword.config.flags import PREFIX

    top, *others = commands(_parser())
    text = f"# Command line\n\nEach command has `--help`.\n\n```text\n{top.format_help().strip()}\n```\n\n"
    for parser in others:
        if any(isinstance(action, argparse._SubParsersAction) for action in parser._actions):
            continue
        text += f"## {parser.prog}\n\n"
        text += f"```text\n{parser.format_usage().strip()}\n```\n\n"
        shown = [
            action
            for action in parser._actions
            if not action.dest.startswith((PREFIX, "help")) and argparse.SUPPRESS not in (action.help, action.dest)
        ]
        form = parser._get_formatter()
        rows = [(f"`{form._format_action_invocation(one)}`", prose(form._expand_help(one))) for one in shown]
        text += table(("argument", "meaning"), rows) if rows else ""
        if parser.get_default("flags") is not None:
            text += "It takes [options](options.md) too.\n\n"
    return text


def options() -> str:
    from foreword.cli import _parser
    from foreword.config import engine_options
    from foreword.config.flags import example

    flags = {parser.prog: parser.get_default("flags") for parser in commands(_parser())}
    engine = engine_options()
    text = (
        "# Options\n\nAn option has one name everywhere: `max_num_seqs` is a keyword of `LLM`, `--max-num-seqs` a flag "
        "of `foreword serve` and `foreword generate`, and a [config file](../server.md#options) takes either. Those "
        "marked *server* belong to `foreword serve` alone.\n\n"
    )
    groups = {"sampling (generate)": flags["foreword generate"].groups["sampling"], **flags["foreword serve"].groups}
    for title, of in groups.items():
        rows = []
        for name, option in of.items():
            meaning, none, otherwise = option.help.rstrip(".").partition("None: ")
            default = otherwise if none and option.default is None else option.default_text
            such = example(title, option)
            said = prose(meaning.rstrip(" .;")) + "." + (f" For example `{such}`." if such else "")
            server = "" if name in engine or "generate" in title else " *server*"
            choices = f" `{'`, `'.join(option.choices)}`" if option.choices else ""
            rows.append((f"`{option.flag}`{server}", said + (f" One of{choices}." if choices else ""), prose(default)))
        text += f"## {title.capitalize()}\n\n" + table(("option", "meaning", "default"), rows)
    return text


def metrics() -> str:
    """The page of metrics, from a server with the shipped model and a cache directory, so that tiers have metrics."""
    from foreword import LLM
    from foreword.demo.run import embedded_model
    from foreword.server.observe.metrics import Scrape
    from foreword.server.options import ServerConfig
    from foreword.server.service import Service

    text = (
        "# Metrics\n\n`GET /metrics` has them in Prometheus' format. Each has the label `model_name` too. Counters "
        "never go back, even when the cache is reset. Hits are tokens. [The server](../server.md#metrics) says who may "
        "read them and what to make of them.\n\n"
    )
    small = {"kv_cache_memory_bytes": 16 * 2**20, "attention_kernel": "reference", "self_check": False}
    with (
        tempfile.TemporaryDirectory() as cache,
        embedded_model() as folder,
        LLM(folder, cache_dir=cache, **small) as llm,
    ):
        service = Service(llm, ServerConfig(dashboard=False), "foreword-demo")
        service.metrics.write(Scrape(llm.engine.snapshot(), service.records, service.listeners(), service.kept_bytes()))
        rows = []
        for family in service.metrics._registry.collect():
            given = getattr(family, "_labelnames", ()) or {name for one in family.samples for name in one.labels}
            labels = sorted({*given} - {"model_name", "le"})
            name = family.name + ("_total" if family.type == "counter" else "")
            rows.append((f"`{name}`<br>*{family.type}*", prose(family.documentation), ", ".join(labels)))
    return text + table(("metric", "meaning", "labels"), sorted(rows))
