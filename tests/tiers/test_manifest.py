"""Manifests: what they say, who may read them, and which of them are ignored."""

from __future__ import annotations

import json
import stat
from pathlib import Path

from foreword.tiers.disk.files import RealFiles
from foreword.tiers.disk.manifest import MAX_BYTES, manifest_facts, manifest_path, read_manifests
from foreword.tiers.identity import CacheIdentity
from tiers.block_world import NAMESPACE, OTHER_NAMESPACE, opened

FILES = RealFiles()
FACTS = {"model_name": "mine", "block_size": 16}


def described(path: Path, namespace: bytes = NAMESPACE, facts: dict[str, object] = FACTS) -> Path:
    with opened(path) as tier:
        tier.describe(namespace, facts)
    return manifest_path(path / "v1", namespace)


def test_a_manifest_has_the_identity_and_what_the_user_called_the_model(tmp_path):
    identity = CacheIdentity.of({"weights": "w"}, {"path": {"device": "cpu"}}, {"version": 1})
    path = described(tmp_path, identity.namespace, manifest_facts(identity, "./model", 16))
    (facts,) = read_manifests(FILES, path.parent).facts.values()
    assert facts == manifest_facts(identity, "./model", 16)
    assert facts["arithmetic_id"] == identity.arithmetic_id
    assert (facts["model_name"], facts["block_size"]) == ("./model", 16)
    assert facts["foreword_version"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_manifest_is_written_once_and_replaced_when_facts_change(tmp_path):
    path = described(tmp_path)
    first = path.stat().st_ino
    described(tmp_path)
    assert path.stat().st_ino == first
    described(tmp_path, facts={**FACTS, "model_name": "yours"})
    assert read_manifests(FILES, path.parent).facts[NAMESPACE]["model_name"] == "yours"
    assert not list(tmp_path.rglob("*.new"))


def test_a_manifest_of_which_any_byte_is_flipped_or_missing_is_ignored_with_a_reason(tmp_path):
    path = described(tmp_path)
    content = path.read_bytes()
    for at, byte in enumerate(content):
        path.write_bytes(content[:at] + bytes([byte ^ 1]) + content[at + 1 :])
        found = read_manifests(FILES, path.parent)
        spaces = byte in b" \n"  # they may become other white space, which says the same
        assert not found.facts or (spaces and found.facts[NAMESPACE]["model_name"] == "mine"), at
        assert len(found.facts) + len(found.unsound) == 1
    for length in range(len(content) - 2):
        path.write_bytes(content[:length])
        assert list(read_manifests(FILES, path.parent).unsound) == [path], length


def test_manifests_of_other_namespaces_and_things_that_are_none_are_ignored(tmp_path):
    path = described(tmp_path)
    foreign = manifest_path(path.parent, OTHER_NAMESPACE)
    foreign.write_bytes(path.read_bytes())
    others = [manifest_path(path.parent, bytes([number] * 16)) for number in range(5)]
    others[0].symlink_to(path)
    others[1].mkdir()
    others[2].write_text("[]")
    others[3].write_text("[" * 100_000)
    others[4].write_bytes(b" " * MAX_BYTES + path.read_bytes())
    found = read_manifests(FILES, path.parent)
    assert list(found.facts) == [NAMESPACE]
    assert found.unsound[foreign] == "the manifest is that of another namespace"
    assert set(found.unsound) == {foreign, *others}
    assert all("manifest" in reason for reason in found.unsound.values())


def test_facts_that_json_does_not_know_become_text(tmp_path):
    path = described(tmp_path, facts={"folder": Path("model"), "numbers": (1, 2)})
    facts = read_manifests(FILES, path.parent).facts[NAMESPACE]
    assert facts == {"folder": "model", "numbers": [1, 2], "namespace": NAMESPACE.hex()}
    assert json.loads(path.read_text())["checksum"]


class NoRename(RealFiles):
    """A system that renames no manifest."""

    def rename(self, source: Path, target: Path) -> None:
        if target.suffix == ".json":
            raise OSError(28, "No space left on device")
        super().rename(source, target)


def test_a_manifest_that_cannot_be_written_is_logged_and_harms_nobody(tmp_path, caplog):
    with opened(tmp_path, files=NoRename()) as tier:
        tier.describe(NAMESPACE, FACTS)
    assert "cannot be written: [Errno 28]" in caplog.text
    assert not read_manifests(FILES, tmp_path / "v1").facts
    assert described(tmp_path).exists()
