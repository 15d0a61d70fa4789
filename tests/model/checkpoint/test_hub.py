"""Models of the hub by name, from a stand-in of its HTTP API."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from foreword.config import ModelConfig
from foreword.errors import ConfigError, ModelLoadError, UnsupportedModelError
from foreword.model.checkpoint.gguf import unfold
from foreword.model.checkpoint.hub import choose, find_hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    name: f"GGUF of {name}".encode()
    for name in (
        "README.md",
        "tiny-Q4_K_M.gguf",
        "tiny-Q4_K_S.gguf",
        "mmproj-tiny-Q8_0.gguf",
        "big/tiny-Q8_0-00001-of-00002.gguf",
        "big/tiny-Q8_0-00002-of-00002.gguf",
    )
}


SIZES = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings".split()
CONFIG = {"model_type": "llama", **dict.fromkeys(SIZES, 32), "num_attention_heads": 1}
INDEX = {"weight_map": {"a": "layers-1.safetensors", "b": "layers-2.safetensors"}}
CHECKPOINT = {
    "README.md": b"readme",
    "config.json": json.dumps(CONFIG).encode(),
    "1_Pooling/config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    "layers-1.safetensors": b"1",
    "layers-2.safetensors": b"2",
    "pytorch_model.bin": b"old",
}
OTHER = {**CHECKPOINT, "config.json": b'{"model_type": "nobody_knows"}'}
REPOSITORIES = {
    "someone/tiny-GGUF": FILES,
    "someone/tiny": CHECKPOINT,
    "someone/strange": OTHER,
    "someone/old": {"pytorch_model.bin": b"old"},
}


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks for when it fetches files of a repository."""

    protocol_version = "HTTP/1.1"
    fetched: Sequence[str] = ()

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        status, headers, body = 404, {"X-Error-Code": "RepoNotFound"}, b""
        path = self.path.partition("?")[0]
        repository = "/".join(path.removeprefix("/api/models/").strip("/").split("/")[:2])
        files = REPOSITORIES.get(repository)
        if files is None:
            pass
        elif path.startswith(f"/api/models/{repository}/tree/"):
            tree = [{"type": "file", "path": name, "size": len(own), "oid": "0"} for name, own in files.items()]
            status, headers, body = 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
        elif path.startswith("/api/models/"):
            siblings = [{"rfilename": name} for name in files]
            body = json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode()
            status, headers = 200, {"Content-Type": "application/json"}
        elif path.startswith(f"/{repository}/resolve/{COMMIT}/"):
            name = path.partition(f"{COMMIT}/")[2]
            body = files[name]
            if with_body:
                Hub.fetched = [*Hub.fetched, name]
            status, headers = 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{hash(name) & 0xFFFFFFFF:x}"'}
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Hub.fetched = ()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def ask(port: int, cache: Path, *names: str, function: str = "find_hub") -> list[str]:
    """What a function gives or says for each name, in a process that knows no other hub."""
    script = (
        "import sys\nfrom foreword.errors import ModelLoadError\n"
        f"from foreword.model.checkpoint.hub import {function}\n"
        f"for name in sys.argv[1:]:\n    try:\n        print({function}(name, None))\n"
        "    except ModelLoadError as error:\n        print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *names],
        env={
            **{key: value for key, value in os.environ.items() if not key.startswith("HF_")},
            "HF_ENDPOINT": f"http://127.0.0.1:{port}",
            "HF_HOME": str(cache),
            "HF_HUB_DISABLE_XET": "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_name_fetches_its_file_once_and_needs_no_network_then(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    names = ("someone/tiny-GGUF:q4_k_s", "someone/tiny-GGUF", "someone/tiny-GGUF:Q8_0")
    found = ask(hub.server_port, tmp_path, *names)
    assert [Path(path).name for path in found] == [
        "tiny-Q4_K_S.gguf",
        "tiny-Q4_K_M.gguf",
        "tiny-Q8_0-00001-of-00002.gguf",
    ]
    for path in found:
        assert Path(path).read_bytes() == FILES[path.partition(f"{COMMIT}/")[2]]
    assert Path(found[2].replace("-00001-", "-00002-")).exists()
    assert sorted(Hub.fetched) == sorted(name for name in FILES if "mmproj" not in name and name != "README.md")
    hub.shutdown()
    hub.server_close()
    assert ask(hub.server_port, tmp_path, *names) == found


def test_a_checkpoint_is_fetched_without_what_nobody_reads(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    names = (
        "someone/tiny",
        "someone/strange",
        "someone/old",
        "someone/unknown",
        "someone/tiny-GGUF:Q8_0",
        str(tmp_path),
    )
    found, *others = ask(hub.server_port, tmp_path, *names, function="find_folder")
    files = {path.relative_to(found).as_posix(): path.read_bytes() for path in Path(found).rglob("*") if path.is_file()}
    assert files == {name: own for name, own in CHECKPOINT.items() if name not in ("README.md", "pytorch_model.bin")}
    assert others == ["None"] * 5, "transformers or others know these, or say what is wrong"
    assert Hub.fetched.count("layers-1.safetensors") == 1, "no weights that are not read here"
    hub.shutdown()
    hub.server_close()
    assert ask(hub.server_port, tmp_path, *names[:3], function="find_folder") == [found, "None", "None"]
    (Path(found) / "layers-2.safetensors").unlink()
    assert ask(hub.server_port, tmp_path, "someone/tiny", function="find_folder") == ["None"], "no part of a model"


def test_what_is_not_there_is_said(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    no_type, no_repository = ask(hub.server_port, tmp_path, "someone/tiny-GGUF:Q2_K", "someone/other:Q4_0")
    assert "no file of type Q2_K" in no_type
    assert "tiny-Q4_K_M, tiny-Q4_K_S" in no_type
    assert "'someone/other:Q4_0' cannot be fetched from the hub" in no_repository


def test_a_version_is_the_hubs_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def find(name: str, revision: str | None) -> Path:
        asked.append((name, revision))
        return tmp_path

    monkeypatch.setattr(unfold, "find_hub", find)
    monkeypatch.setattr(unfold, "unfold", lambda path, with_tokenizer: path)
    options = ModelConfig(model="someone/tiny-GGUF:Q8_0", revision="v2")
    assert unfold.unfolded(options) == ModelConfig(model=str(tmp_path))
    assert asked == [("someone/tiny-GGUF:Q8_0", "v2")]
    with pytest.raises(UnsupportedModelError, match="runs no GGUF files"):
        unfold.unfolded(ModelConfig(model="someone/tiny-GGUF:Q8_0", device="cuda"))
    assert len(asked) == 1
    (tmp_path / "here.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="names a version on the hub"):
        unfold.unfolded(ModelConfig(model=str(tmp_path / "here.gguf"), revision="v2"))


def test_which_file_is_meant() -> None:
    assert choose(["a.gguf"], "x/a-gguf", None) == ["a.gguf"]
    assert choose(["b-iq4_xs.gguf", "b.q4_k_m.gguf"], "x/b", None) == ["b.q4_k_m.gguf"]
    with pytest.raises(ModelLoadError, match="several files of type Q8_0"):
        choose(["a-Q8_0.gguf", "b-Q8_0.gguf"], "x/y:Q8_0", "Q8_0")
    with pytest.raises(ModelLoadError, match="it has no GGUF files"):
        choose(["model.safetensors"], "x/y-gguf", None)
    for name in ("x/y", "./x-gguf", "a/b/c:Q4_0", "/x/y:Q4_0", "gguf"):
        assert find_hub(name, None) is None
