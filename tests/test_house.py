"""The report on the house: what counts as a room, an arrow and a circle."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("house", ROOT / ".ci" / "house.py")
assert SPEC is not None
assert SPEC.loader is not None
house = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(house)

FILES = {
    "pack/__init__.py": "",
    "pack/alone.py": "import os\n",
    "pack/hall/__init__.py": "from pack.hall.door import Door\n",
    "pack/hall/door.py": "class Door: ...\n",
    "pack/kitchen/stove.py": "from pack.hall import Door\n\n\ndef cook():\n    from pack.cellar.wine import pour\n",
    "pack/cellar/wine.py": "from pack.kitchen import stove\n\n\ndef pour(): ...\n",
    "pack/cellar/label.py": "if TYPE_CHECKING:\n    from pack.cellar.bottle import Bottle\n",
    "pack/cellar/bottle.py": "from pack.cellar.label import Label\n" + "#\n" * 700,
}


def test_rooms_arrows_and_circles_are_those_of_the_imports(tmp_path):
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    report = house.measure(tmp_path / "pack", tmp_path / "tests")
    assert report["files"] == len(FILES)
    assert report["lines"] == sum(len(text.splitlines()) for text in FILES.values())
    assert report["rooms"] == {"cellar": 707, "kitchen": 5, "hall": 2, "alone": 1, "(package)": 0}
    assert report["arrows_between_rooms"] == 3, "kitchen -> hall, kitchen -> cellar, cellar -> kitchen"
    assert report["circles_of_rooms"] == [["cellar", "kitchen"]]
    assert report["circles_of_modules"] == [["cellar.wine", "kitchen.stove"]]
    assert report["circles_with_types"] == [["cellar.bottle", "cellar.label"], ["cellar.wine", "kitchen.stove"]]
    assert report["files_beyond_700_lines"] == ["cellar.bottle"]


def test_private_names_in_tests_are_those_of_the_package_and_of_another_room_than_the_tests(tmp_path):
    texts = {
        "pack/hall/door.py": "class Door:\n    _lock = 1\n\n    def _open(self): ...\n",
        "pack/cellar/wine.py": "def _pour(): ...\n",
        "tests/doors.py": "def lock_of(door):\n    return door._lock\n",
        "tests/hall/test_door.py": "from pack.cellar.wine import _pour\n\nDoor()._open(them._other, self._lock)\n",
        "tests/test_wine.py": "patch.setattr(door, '_lock', 3)\npatch.setattr('pack.hall.door.Door._open', 4)\n",
        "tests/cellar/test_wine.py": "pair._replace(_pour=1)\nwine._pour()\n",
    }
    for name, text in texts.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    report = house.measure(tmp_path / "pack", tmp_path / "tests")
    assert (report["private_names_in_doors"], report["private_names_in_own_rooms"]) == (1, 2)
    assert report["private_names_elsewhere"] == [
        "hall/test_door.py: _pour",
        "test_wine.py: _lock",
        "test_wine.py: _open",
    ]
