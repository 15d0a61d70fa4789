"""`foreword cache prune DIR`: deletes segments that are old, damaged, of other models, or too many.

Knows deleting and the terminal; `selection` knows which segments. Whole segments go, for the format has no smaller unit
that could be freed. A segment that a live process may be writing stays. A process whose sealed segments go finds their
blocks missing, and computes them.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from foreword.config.sizes import format_bytes, parse_bytes
from foreword.tiers.disk.directory import VERSION, segments_in
from foreword.tiers.disk.files import RealFiles
from foreword.tiers.disk.manifest import manifest_path
from foreword.tiers.upkeep.selection import Choice, Content, Wish, choose, contents_of, parse_age
from foreword.tiers.upkeep.stats import print_unreadable
from foreword.tiers.upkeep.survey import Survey, held
from foreword.tiers.upkeep.table import counted
from foreword.tiers.upkeep.verify import add_key_argument, cipher_of


@dataclass(slots=True)
class Deletion:
    """What was deleted, or would be."""

    deleted: list[tuple[Content, str]] = field(default_factory=list)
    """Segments and reasons."""
    spared: list[Content] = field(default_factory=list)
    """Segments that a live process may be writing."""
    failed: dict[Path, str] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `foreword cache prune`."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="the cache's directory")
    parser.add_argument("--max-size", metavar="SIZE", help="the oldest segments, until the rest fits, such as 10GB")
    parser.add_argument("--older-than", metavar="AGE", help="segments with nothing newer than that, such as 7d or 12h")
    parser.add_argument(
        "--namespace", action="append", default=[], metavar="HEX", help="first digits of a namespace; may be repeated"
    )
    parser.add_argument("--other-models", metavar="MODEL", help="blocks of all models but this one")
    parser.add_argument("--damaged", action="store_true", help="segments with damage, after reading all of them")
    parser.add_argument("--all", action="store_true", help="every segment")
    parser.add_argument("--dry-run", action="store_true", help="say what would be deleted, and delete nothing")
    add_key_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Delete what was asked for, and say so; returns the exit code, 1 if a file could not be deleted."""
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
    with held(RealFiles(), args.directory) as found:
        contents = contents_of(found)
        choice = choose(found, contents, wish, cipher)
        deletion = _delete(found, contents, choice, dry=args.dry_run)
        if not args.dry_run:
            _tidy(found, contents, deletion, unsound_too=wish.damaged or wish.everything)
    _print(found, choice, deletion, dry=args.dry_run)
    for content, _ in deletion.deleted:
        found.unreadable.pop(content.segment.path, None)
    print_unreadable(found)
    return 1 if deletion.failed else 0


def _delete(found: Survey, contents: list[Content], choice: Choice, *, dry: bool) -> Deletion:
    deletion = Deletion()
    for content in contents:
        segment = content.segment
        if segment not in choice.reasons:
            continue
        if segment.may_grow:
            deletion.spared.append(content)
        elif dry or _removed(found.files.unlink, segment.path, deletion):
            deletion.deleted.append((content, choice.reasons[segment]))
    return deletion


def _removed(remove: Callable[[Path], None], path: Path, deletion: Deletion) -> bool:
    """Remove a file; True if it is gone by our hand."""
    try:
        remove(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        deletion.failed[path] = f"cannot be deleted: {error.strerror}"
        return False
    return True


def _tidy(found: Survey, contents: list[Content], deletion: Deletion, *, unsound_too: bool) -> None:
    """Remove the folders of dead processes that hold no segment now, and manifests of namespaces without blocks."""
    files = found.files
    deleted = {content.segment for content, _ in deletion.deleted}
    kept = [content for content in contents if content.segment not in deleted]
    for home in found.homes:
        with contextlib.suppress(OSError):  # what is no file of the cache stays, and so does its folder
            if not home.is_live and not segments_in(files, home.path):
                for name in files.list_folder(home.path):
                    files.unlink(home.path / name)
                files.remove_folder(home.path)
    if unsound_too:
        for path in list(found.manifests.unsound):
            if _removed(files.unlink, path, deletion):
                del found.manifests.unsound[path]
    if any(home.is_live for home in found.homes) or found.unreadable:
        return  # a live process may be about to store the first block of a namespace
    left = {namespace for content in kept for namespace in content.blocks}
    for namespace in found.manifests.facts.keys() - left:
        _removed(files.unlink, manifest_path(found.path / VERSION, namespace), deletion)


def _print(found: Survey, choice: Choice, deletion: Deletion, *, dry: bool) -> None:
    verb = "would delete" if dry else "deleted"
    for content, reason in deletion.deleted:
        size = format_bytes(content.segment.physical_bytes)
        print(f"{verb} {found.name(content.segment.path)}: {counted(content.num_blocks, 'block')}, {size} ({reason})")
    num_blocks = sum(content.num_blocks for content, _ in deletion.deleted)
    size = format_bytes(sum(content.segment.physical_bytes for content, _ in deletion.deleted))
    print(f"{verb} {counted(len(deletion.deleted), 'segment')}, {counted(num_blocks, 'block')}, {size}")
    for content in deletion.spared:
        name, home = found.name(content.segment.path), content.segment.home
        print(f"kept {name}: {home.owner} may be writing it; end that process, or wait until it begins a new segment")
    if choice.num_mixed:
        print(f"kept {counted(choice.num_mixed, 'segment')} in which blocks of other namespaces lie too")
    if choice.excess_bytes:
        print(f"{format_bytes(choice.excess_bytes)} more than --max-size stay: processes are writing them, or indexes")
    for path, reason in deletion.failed.items():
        print(f"foreword: {found.name(path)} {reason}", file=sys.stderr)
