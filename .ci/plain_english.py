"""Finds phrases that stop a reader, in docstrings, comments and messages, and in the pages for users.

CONTRIBUTING.md has the same list for people. `python .ci/plain_english.py [PATH ...]` prints one line per finding,
`file:line: message`, and exits with 1 if there is a finding. `--sample SEED [PATH ...]` prints 60 paragraphs instead,
each after the code that it documents, or its page's heading. Somebody who has not seen them should understand each one
at the first reading.
"""

from __future__ import annotations

import ast
import io
import random
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CHECKED = [
    "src/foreword",
    "README.md",
    "ARCHITECTURE.md",
    "BENCHMARKS.md",
    "docs",
    "benchmarks",
    "examples",
    "training",
]
"""Files and folders to check. CONTRIBUTING.md is not among them because it quotes the phrases, nor is the changelog."""

PARTICIPLES = (
    "added|asked|counted|evicted|found|freed|given|handed|kept|left|looked|lost|made|measured|read|released|said|saved|"
    "shared|shown|stored|taken|told|tried|written"
)
SAY_INSTEAD = {
    # regular expression (a space stands for any white space): what to say
    r"behind (which|what|whom|it|them|that|those|these|this|the (last|first|prompt|batch))\b": "after",
    r"\bso many\b(?! that)|\bso much (of|kv|memory)\b|\bfor so much\b": "the number: n, `num_tokens`, this many",
    r"\bso[- ]maniet\w*": "every n-th",
    r"\bhow many of\b": "the number of",
    r"\bas many as tell\b": "up to n",
    r"\bthat that\b|\bthose that those\b": "name the second thing",
    r"\bby the clock\b": "in wall time",
    r"\bclock on the wall\b": "wall clock",
    r"\bdisturbed (hour|machine|run|time)": "noisy",
    r"\bin turn with\b": "interleaved with",
    rf"(^|[.:;] )({PARTICIPLES}) (is|are|was|were)\b(?! (what|how|why|whether|in|by) )": "the subject first",
    r"\b(tells?|told|telling) of\b": "describes, reports, logs",
    r"\bof its(?=[.,;:)]|\Z)|\bof theirs\b": "its, their",
    r"\bto be had\b": "available",
    r"\bnone the worse\b": "not affected",
    r"\b(keep|kept|read|see|seen|know|known|learn|learnt|take|taken|found|made|hold|held)s? of it\b": "which part",
    r"\bwhat is (new|what|ours|theirs|long|common)\b": "a noun: the new tokens",
    r"\b(here and now|by and by|for ever)\b": "at once, gradually, forever",
    r"\bhas (his|her) \w+ (read|computed|kept|made)\b": "the actor first",
    r"\bthere are known to be\b|\bis known to be there\b": "the condition itself",
    r"\bthe like\b": "others, similar ones",
}
COMPILED = [
    (re.compile(regex.replace(" ", r"\s+"), re.IGNORECASE | re.MULTILINE), say) for regex, say in SAY_INSTEAD.items()
]


class Text(NamedTuple):
    """A piece of prose, and the line at which it begins."""

    line: int
    content: str


def prose_of_python(source: str) -> Iterator[Text]:
    """Comments, docstrings and other strings. Comment lines that follow each other are one text."""
    strings = (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    comment: list[str] = []
    begin = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if comment and token.start[0] != begin + len(comment):
                yield Text(begin, "\n".join(comment))
                comment = []
            if not comment:
                begin = token.start[0]
            comment.append(token.string.lstrip("# "))
        elif token.type in strings:
            yield Text(token.start[0], re.sub(r"""^\w*("{3}|'{3}|"|')|("{3}|'{3}|"|')$""", "", token.string))
    if comment:
        yield Text(begin, "\n".join(comment))


def prose_of_page(page: str) -> Text:
    """A Markdown page whose code blocks are replaced by empty lines, so that line numbers stay."""
    page = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), page, flags=re.DOTALL | re.MULTILINE)
    return Text(1, re.sub(r"`[^`\n]*`", "code", page))


def findings(texts: Iterator[Text] | list[Text]) -> list[tuple[int, str, str]]:
    """The (line, phrase, replacement) of each listed phrase in the texts."""
    found = []
    for text in texts:
        for regex, say in COMPILED:
            for match in regex.finditer(text.content):
                line = text.line + text.content.count("\n", 0, match.start())
                found.append((line, " ".join(match[0].split()), say))
    return sorted(found)


def files_of(names: list[str]) -> list[Path]:
    """The Python files and Markdown pages among these files and in these folders."""
    files: set[Path] = set()
    for name in names:
        path = ROOT / name
        assert path.exists(), f"{name} does not exist"
        files |= {path} if path.is_file() else {*path.rglob("*.py"), *path.rglob("*.md")}
    return sorted(files)


def texts_of(path: Path) -> list[Text]:
    """The prose of a file."""
    source = path.read_text(encoding="utf-8")
    return [prose_of_page(source)] if path.suffix == ".md" else [*prose_of_python(source)]


Owner = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def documented(owner: Owner, scope: str = "") -> Iterator[tuple[range, str]]:
    """Lines of a piece of code, and what a reader sees above a text there: the outer code before the inner."""
    name = "" if isinstance(owner, ast.Module) else f"{scope}{owner.name}"
    head = name
    if isinstance(owner, ast.FunctionDef | ast.AsyncFunctionDef):
        head = f"{name}({ast.unparse(owner.args)})" + (f" -> {ast.unparse(owner.returns)}" if owner.returns else "")
    elif isinstance(owner, ast.ClassDef):
        head = f"class {name}({', '.join(map(ast.unparse, owner.bases))})"
    yield range(owner.body[0].lineno if head else 0, (owner.body[-1].end_lineno or 0) + 1), head
    for before, statement in zip([None, *owner.body], owner.body, strict=False):
        if isinstance(statement, Owner):
            yield from documented(statement, f"{name}." if name else "")
        elif isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(statement, ast.Expr):
            code = ast.unparse(before)
            yield range(statement.lineno, statement.lineno + 1), f"{head}: {code[:200]}" if head else code[:200]


def context(path: Path, line: int) -> str:
    """What a reader of a text sees with it: the page's last heading, or the code that the text documents."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return next((text for text in reversed(source.splitlines()[:line]) if text.startswith("#")), "")
    heads = [head for lines, head in documented(ast.parse(source)) if line in lines]
    rest = (text.strip() for text in source.splitlines()[line - 1 :])
    code = next((text for text in rest if text and not text.startswith("#")), "")
    return heads[-1] + (f": {code}" if source.splitlines()[line - 1].lstrip().startswith("#") else "")


def sample(seed: int, names: list[str]) -> None:
    """Print 60 paragraphs of whole sentences, from pages, docstrings and comments, each with its context."""
    paragraphs = [
        (path, text.line + text.content.count("\n", 0, text.content.index(paragraph)), " ".join(paragraph.split()))
        for path in files_of(names or CHECKED)
        for text in texts_of(path)
        for paragraph in re.split(r"\n\s*\n", text.content)
        if re.fullmatch(r"\s*[A-Z\[`(].*[.:]\s*", paragraph, re.DOTALL) and paragraph.count(" ") >= 7
    ]
    for path, line, paragraph in random.Random(seed).sample(paragraphs, 60):
        print(f"{path.relative_to(ROOT)}:{line}  {context(path, line)}\n    {paragraph}")


def main(names: list[str]) -> int:
    if names[:1] == ["--sample"]:
        if not names[1:] or not names[1].isdigit():
            sys.exit(f"--sample needs a seed, and has {names[1:2] or 'none'}; give a number such as 7")
        sample(int(names[1]), names[2:])
        return 0
    num_found = 0
    for path in files_of(names or CHECKED):
        for line, phrase, say in findings(texts_of(path)):
            print(f'{path.relative_to(ROOT)}:{line}: "{phrase}": say {say}')
            num_found += 1
    return min(num_found, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
