"""`foreword cache prune DIR`: deletes segments that are old, damaged, of other models, or beyond a size.

Whole segments are deleted, because the format has no smaller unit to free. A segment that a live process may be writing
stays. A process whose sealed segments are deleted finds that their blocks are missing, and computes them.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from foreword.config.sizes import format_bytes, parse_bytes
from foreword.errors import ConfigError
from foreword.tiers.cipher import Cipher
from foreword.tiers.disk.directory import VERSION, segments_in
from foreword.tiers.disk.files import RealFiles
from foreword.tiers.disk.manifest import manifest_path
from foreword.tiers.disk.segments import Damage
from foreword.tiers.upkeep.stats import print_unreadable
from foreword.tiers.upkeep.survey import SegmentFile, Survey, held
from foreword.tiers.upkeep.table import counted
from foreword.tiers.upkeep.verify import add_key_argument, cipher_of, verdicts

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True, slots=True)
class Wish:
    """What to delete. Each field adds segments; `max_bytes` adds the oldest of all others until the rest fits."""

    everything: bool = False
    damaged: bool = False
    older_than_s: float | None = None
    namespaces: tuple[str, ...] = ()
    """Hexadecimal digits with which a namespace begins."""
    kept_model: str | None = None
    """The model whose blocks stay; blocks of other models are deleted."""
    max_bytes: int | None = None

    def check(self) -> None:
        if self == Wish():
            raise ConfigError(
                "nothing says what to delete; give --max-size, --older-than, --namespace, --other-models, --damaged "
                "or --all"
            )


@dataclass(slots=True)
class Content:
    """The facts about a segment that prune needs."""

    segment: SegmentFile
    blocks: Counter[bytes] = field(default_factory=Counter)
    """Number of whole blocks by namespace."""
    newest_s: int = 0
    """When the segment's newest run was written, in seconds since 1970; 0 if it has no run."""
    reason: str = ""
    """Why the segment is to be deleted; empty if it stays."""
    is_deleted: bool = False

    @property
    def num_blocks(self) -> int:
        return self.blocks.total()

    @property
    def written_s(self) -> float:
        """When the segment was last written to, according to its runs or, if it has no run, to its file."""
        return self.newest_s or self.segment.modified_s


@dataclass(slots=True)
class Result:
    """The results that belong to no single `Content`."""

    num_mixed: int = 0
    """Segments that stay because they also have blocks of other namespaces."""
    excess_bytes: int = 0
    """Physical bytes beyond `max_bytes` that stay because a process may be writing them."""
    failed: dict[Path, str] = field(default_factory=dict)
    """Files that could not be deleted, and why."""


def contents_of(cache: Survey) -> list[Content]:
    """The content of each segment. Reads all headers."""
    contents = [Content(segment) for segment in cache.segments]
    for content in contents:
        for header in cache.runs(content.segment):
            if not isinstance(header, Damage):
                content.blocks[header.namespace] += len(header.within(content.segment.num_bytes).entries)
                content.newest_s = max(content.newest_s, header.created_s)
    return contents


def choose(cache: Survey, contents: list[Content], wish: Wish, cipher: Cipher | None) -> Result:
    """Set `reason` for each segment that `wish` selects. Raises ConfigError for unknown namespaces and models.

    A segment that a process may be writing gets no reason from `max_bytes`. It may get one from other fields, but the
    caller does not delete it.
    """
    result = Result()
    unwanted = _unwanted(cache, contents, wish)
    damaged = verdicts(cache, cipher) if wish.damaged else {}
    now_s = time.time()
    for content in contents:
        namespaces, verdict = set(content.blocks), damaged.get(content.segment.path)
        if verdict and verdict.findings:
            content.reason = f"damage; {verdict.num_sound:,} of its blocks are sound and go too"
        elif namespaces and namespaces <= unwanted:
            content.reason = "other namespaces" if wish.kept_model else "its namespace"
        elif wish.older_than_s is not None and now_s - content.written_s > wish.older_than_s:
            content.reason = "its age"
        elif wish.everything:
            content.reason = "all"
        result.num_mixed += not content.reason and bool(namespaces & unwanted)
    if wish.max_bytes is not None:  # the oldest are deleted until the rest fits
        excess = cache.physical_bytes - wish.max_bytes
        excess -= sum(part.segment.physical_bytes for part in contents if part.reason and not part.segment.may_grow)
        for content in sorted(contents, key=lambda content: content.written_s):
            if excess > 0 and not content.reason and not content.segment.may_grow:
                content.reason = f"beyond {format_bytes(wish.max_bytes)}"
                excess -= content.segment.physical_bytes
        result.excess_bytes = max(0, excess)
    return result


def _unwanted(cache: Survey, contents: list[Content], wish: Wish) -> set[bytes]:
    namespaces = {namespace for content in contents for namespace in content.blocks} | set(cache.manifests.facts)
    unwanted = set()
    for digits in wish.namespaces:
        if not re.fullmatch(r"[0-9a-fA-F]{1,32}", digits):
            raise ConfigError(
                f"--namespace {digits!r} is not 1 to 32 hexadecimal digits; `foreword cache list` shows them"
            )
        matches = {namespace for namespace in namespaces if namespace.hex().startswith(digits.lower())}
        if len(matches) != 1:
            problem = f"begins {len(matches)} namespaces" if matches else "is no namespace"
            names = ", ".join(sorted(namespace.hex()[:8] for namespace in namespaces)) or "none"
            raise ConfigError(f"--namespace {digits!r} {problem} of {str(cache.path)!r}; there are: {names}")
        unwanted |= matches
    if wish.kept_model is not None:
        names_of = {namespace: facts.get("model_name") for namespace, facts in cache.manifests.facts.items()}
        if wish.kept_model not in names_of.values():
            names = ", ".join(sorted({repr(name) for name in names_of.values()})) or "none"
            raise ConfigError(
                f"--other-models {wish.kept_model!r} is no model with blocks in {str(cache.path)!r}; there are: {names}"
            )
        unwanted |= {namespace for namespace in namespaces if names_of.get(namespace) != wish.kept_model}
    return unwanted


def parse_age(text: str) -> float:
    """`90s`, `30m`, `12h`, `7d` or `2w` in seconds. Raises ConfigError."""
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)([smhdw])", text.strip().lower())
    if match is None:
        raise ConfigError(f"--older-than {text!r} is no age; write it as 90s, 30m, 12h, 7d or 2w")
    return float(Fraction(match[1]) * UNITS_S[match[2]])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `foreword cache prune`."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="the cache's directory")
    parser.add_argument(
        "--max-size", metavar="SIZE", help="delete the oldest segments, until the rest fits, such as 10GB"
    )
    parser.add_argument("--older-than", metavar="AGE", help="delete segments with nothing newer than 7d or 12h")
    parser.add_argument(
        "--namespace",
        action="append",
        default=[],
        metavar="HEX",
        help="delete this namespace (its first digits); may be repeated",
    )
    parser.add_argument("--other-models", metavar="MODEL", help="delete the blocks of all models except this one")
    parser.add_argument("--damaged", action="store_true", help="read all segments, and delete those with damage")
    parser.add_argument("--all", action="store_true", help="delete every segment")
    parser.add_argument("--dry-run", action="store_true", help="say what would be deleted, and delete nothing")
    add_key_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Delete the chosen segments and print the result; returns the exit code, 1 if a file could not be deleted."""
    wish = Wish(
        everything=args.all,
        damaged=args.damaged,
        older_than_s=None if args.older_than is None else parse_age(args.older_than),
        namespaces=tuple(args.namespace),
        kept_model=args.other_models,
        max_bytes=None if args.max_size is None else parse_bytes(args.max_size),
    )
    wish.check()
    cipher = cipher_of(args.key_file)
    with held(RealFiles(), args.directory) as cache:
        contents = contents_of(cache)
        result = choose(cache, contents, wish, cipher)
        for content in contents:
            path = content.segment.path
            if content.reason and not content.segment.may_grow:
                content.is_deleted = args.dry_run or _removed(cache, path, result)
        if not args.dry_run:
            _tidy(cache, contents, result, unsound_too=wish.damaged or wish.everything)
    _print(cache, contents, result, dry=args.dry_run)
    for content in contents:
        if content.is_deleted:
            cache.unreadable.pop(content.segment.path, None)
    print_unreadable(cache)
    return 1 if result.failed else 0


def _removed(cache: Survey, path: Path, result: Result) -> bool:
    try:
        cache.files.unlink(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        result.failed[path] = f"cannot be deleted: {error.strerror}"
        return False
    return True


def _tidy(cache: Survey, contents: list[Content], result: Result, *, unsound_too: bool) -> None:
    """Remove the folders of dead processes that hold no segment now, and manifests of namespaces without blocks."""
    files = cache.files
    for home in cache.homes:
        with contextlib.suppress(OSError):  # what is no file of the cache stays, with its folder
            if not home.is_live and not segments_in(files, home.path):
                for name in files.list_folder(home.path):
                    files.unlink(home.path / name)
                files.remove_folder(home.path)
    if unsound_too:
        for path in list(cache.manifests.unsound):
            if _removed(cache, path, result):
                del cache.manifests.unsound[path]
    if any(home.is_live for home in cache.homes) or cache.unreadable:
        return  # a live process may be about to store the first block of a namespace
    remaining = {namespace for content in contents if not content.is_deleted for namespace in content.blocks}
    for namespace in cache.manifests.facts.keys() - remaining:
        _removed(cache, manifest_path(cache.path / VERSION, namespace), result)


def _print(cache: Survey, contents: list[Content], result: Result, *, dry: bool) -> None:
    verb = "would delete" if dry else "deleted"
    deleted = [content for content in contents if content.is_deleted]
    for content in deleted:
        size = format_bytes(content.segment.physical_bytes)
        what = f"{counted(content.num_blocks, 'block')}, {size} ({content.reason})"
        print(f"{verb} {cache.name(content.segment.path)}: {what}")
    num_blocks = sum(content.num_blocks for content in deleted)
    size = format_bytes(sum(content.segment.physical_bytes for content in deleted))
    print(f"{verb} {counted(len(deleted), 'segment')}, {counted(num_blocks, 'block')}, {size}")
    for content in contents:
        if content.reason and content.segment.may_grow:
            name, owner = cache.name(content.segment.path), content.segment.home.owner
            print(f"kept {name}: {owner} may be writing it; end that process, or wait until it begins a new segment")
    if result.num_mixed:
        print(f"kept {counted(result.num_mixed, 'segment')} in which blocks of other namespaces lie too")
    if result.excess_bytes:
        print(f"{format_bytes(result.excess_bytes)} more than --max-size stay: processes are writing them, or indexes")
    for path, reason in result.failed.items():
        print(f"foreword: {cache.name(path)} {reason}", file=sys.stderr)
