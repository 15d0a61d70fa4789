"""Reports the size of the code: lines by room, arrows, circles of imports, private names in tests. Fails nothing.

    python .ci/house.py [FOLDER] [--tests FOLDER] [--json]       src/foreword, tests

A room is a folder or a module at the top of the package. An arrow is a pair of rooms of which one imports the other,
anywhere in its code; imports for types alone are counted separately. A circle is a group of modules, or of rooms, that
import each other.  A test may read private names of the room that its folder is named after. It takes private names of
other rooms from tests/doors.py, so that a change inside a room breaks no test outside that room.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

LONG_FILE, LONG_FUNCTION = 700, 60
NAMES_OF_TUPLES = {"_", "_asdict", "_fields", "_make", "_replace"}
"""Names of named tuples that begin with an underscore but are public."""

Graph = dict[str, set[str]]


def modules(folder: Path) -> dict[str, Path]:
    """The file of each module by its name, such as cache.keys.hashing. An `__init__.py` has its package's name."""
    found = {}
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(tree: ast.AST, package: str) -> Iterator[tuple[str, bool]]:
    """Names below the package that a module imports, and whether for types alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for name, inner in imports(node, package):
                yield name, inner or for_types
            continue
        for name in names:
            if name.startswith(package + "."):
                yield name.removeprefix(package + "."), False


def graphs(files: dict[str, Path], package: str) -> tuple[Graph, Graph]:
    """The modules that each module imports: those at run time, and those for types alone."""
    runs: Graph = {name: set() for name in files}
    types: Graph = {name: set() for name in files}
    for name, file in files.items():
        for target, for_types in imports(ast.parse(file.read_text(encoding="utf-8")), package):
            module = target if target in files else target.rpartition(".")[0]
            if module in files and module != name:
                (types if for_types else runs)[name].add(module)
    return runs, types


def by_room(graph: Graph) -> Graph:
    """The rooms that each room imports."""
    rooms: Graph = {}
    for name, targets in graph.items():
        others = rooms.setdefault(room_of(name), set())
        others |= {room_of(target) for target in targets} - {room_of(name)}
    return rooms


def room_of(module: str) -> str:
    """The first part of a module's name."""
    return module.partition(".")[0] or "(package)"


def circles(graph: Graph) -> list[list[str]]:
    """Groups of nodes that reach each other, the largest first."""
    reach = {node: reachable(graph, node) for node in graph}
    groups = {frozenset(other for other in reach[node] if node in reach[other]) for node in graph}
    return sorted((sorted(group) for group in groups if len(group) > 1), key=lambda group: (-len(group), group))


def reachable(graph: Graph, start: str) -> set[str]:
    """All nodes to which a path of at least one arrow leads."""
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += graph.get(node, ())
    return seen


def measure(folder: Path, tests: Path) -> dict[str, object]:
    """All figures of a package and of its tests."""
    files = modules(folder)
    lines = {name: len(file.read_text(encoding="utf-8").splitlines()) for name, file in files.items()}
    runs, types = graphs(files, folder.name)
    rooms = Counter[str]()
    for name, count in lines.items():
        rooms[room_of(name)] += count
    both = by_room({name: runs[name] | types[name] for name in runs})
    return {
        "lines": sum(lines.values()),
        "files": len(files),
        "rooms": dict(rooms.most_common()),
        "arrows_between_rooms": sum(map(len, both.values())),
        "arrows_between_modules": sum(map(len, runs.values())),
        "circles_of_rooms": circles(by_room(runs)),
        "circles_of_modules": circles(runs),
        "circles_with_types": circles({name: runs[name] | types[name] for name in runs}),
        **private_names(files, tests),
        f"files_beyond_{LONG_FILE}_lines": [name for name, count in lines.items() if count > LONG_FILE],
        f"functions_beyond_{LONG_FUNCTION}_lines": [name for file in files.items() for name in long_functions(*file)],
    }


def private_names(files: dict[str, Path], tests: Path) -> dict[str, object]:
    """The number of uses of private names in tests, and the places where a test uses one of another room."""
    rooms: dict[str, set[str]] = {}
    for module, file in files.items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    rooms.setdefault(name, set()).add(room_of(module))
                case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                    rooms.setdefault(name, set()).add(room_of(module))
    own, doors, others = 0, 0, []
    for file in sorted(tests.rglob("*.py")):
        place = file.relative_to(tests)
        for name in used_names(ast.parse(file.read_text(encoding="utf-8"))):
            if not name.startswith("_") or name.startswith("__") or name not in rooms.keys() - NAMES_OF_TUPLES:
                continue
            if place.name == "doors.py":
                doors += 1
            elif place.parts[0] in rooms[name]:
                own += 1
            else:
                others.append(f"{place.as_posix()}: {name}")
    return {"private_names_in_doors": doors, "private_names_in_own_rooms": own, "private_names_elsewhere": others}


def used_names(tree: ast.AST) -> Iterator[str]:
    """The names that a test reads of objects, imports or replaces."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super"))):
                pass  # the test's own name
            case ast.Attribute(attr=name) | ast.alias(name=name):
                yield name
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[*given]):
                yield from (
                    each.value.rpartition(".")[2]
                    for each in given[:2]
                    if isinstance(each, ast.Constant) and isinstance(each.value, str)
                )


def long_functions(module: str, file: Path) -> list[str]:
    """The functions of a file that are longer than `LONG_FUNCTION` lines."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [
        f"{module}.{node.name}"
        for node in functions
        if (node.end_lineno or node.lineno) - node.lineno + 1 > LONG_FUNCTION
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = Path(__file__).parent.parent
    parser.add_argument("folder", type=Path, nargs="?", default=root / "src" / "foreword")
    parser.add_argument("--tests", type=Path, default=root / "tests", help="default: tests")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    args = parser.parse_args()
    report = measure(args.folder, args.tests)
    if args.json:
        print(json.dumps(report, indent=1))
        return
    for name, value in report.items():
        if name == "rooms" and isinstance(value, dict):
            for room, count in value.items():
                print(f"{count:8,}  {room}")
        elif isinstance(value, list):
            print(f"{name}: {len(value)}")
            for each in value:
                print(f"          {each if isinstance(each, str) else ' -> '.join(each)}")
        else:
            print(f"{value:8,}  {name}")


if __name__ == "__main__":
    main()
