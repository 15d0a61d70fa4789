"""Models that other programs keep are found by name, described, and served from where they lie."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from foreword import LLM, SamplingParams
from foreword.cli import main
from foreword.errors import ModelLoadError
from foreword.model.checkpoint.gguf.unfold import find_gguf, find_local, local_models
from gguf_writer import write_gguf
from tiny_models import RECIPES, save_model, save_tokenizer


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    return tmp_path


def pull(root: Path, place: str, content: bytes, *others: str) -> Path:
    """Keep a model as Ollama does; `others`: kinds of further layers."""
    digest = hashlib.sha256(content).hexdigest()
    blob = root / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    layers = [
        {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}", "size": len(content)}
        for kind in ("model", "template", *others)
    ]
    manifest = root / "manifests" / place
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return blob


@pytest.mark.parametrize("end", ["", ".gguf"])
def test_a_name_that_no_file_can_have_is_refused(home: Path, end: str) -> None:
    with pytest.raises(ModelLoadError, match="cannot be looked up: File name too long; give a folder, a file or"):
        find_gguf("x" * 300 + end)


def test_names_of_ollama_and_lm_studio(home: Path) -> None:
    root = home / ".ollama" / "models"
    plain = pull(root, "registry.ollama.ai/library/llama3.2/latest", b"1")
    pull(root, "registry.ollama.ai/somebody/own/1b", b"2")
    pull(root, "hf.co/user/repo/Q4_K_M", b"3")
    pull(root, "registry.ollama.ai/library/adapted/latest", b"4", "adapter")
    (root / "manifests" / "registry.ollama.ai" / "library" / "llama3.2" / "damaged").write_text("[")
    studio = home / ".lmstudio" / "models" / "user" / "repo"
    studio.mkdir(parents=True)
    for name in ("a.gguf", "mmproj-a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf"):
        (studio / name).touch()
    assert [one.name for one in local_models() if not one.name.startswith("package:")] == [
        "lmstudio:user/repo/a.gguf",
        "lmstudio:user/repo/b-00001-of-00002.gguf",
        "ollama:adapted:latest",
        "ollama:hf.co/user/repo:Q4_K_M",
        "ollama:llama3.2:latest",
        "ollama:somebody/own:1b",
    ]
    assert find_local("ollama:llama3.2") == find_local("ollama:llama3.2:latest") == plain
    assert find_local("user/repo") is None
    with pytest.raises(ModelLoadError, match="adapter"):
        find_local("ollama:adapted")
    with pytest.raises(ModelLoadError, match=r"'ollama:other' is not on this machine, which has ollama:adapted:latest"):
        find_local("ollama:other")


def test_a_pulled_model_is_listed_and_answers(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = save_model(home / "plain", RECIPES["qwen3"])
    write_gguf(plain, home / "model.gguf")
    root = home / "elsewhere"
    monkeypatch.setenv("OLLAMA_MODELS", str(root))
    pull(root, "registry.ollama.ai/library/tiny/latest", (home / "model.gguf").read_bytes())
    pull(root, "registry.ollama.ai/library/wrong/latest", b"no model")
    write_gguf(plain, home / "odd.gguf", change=lambda writer: writer.add_array("general.type", [1, 2]))
    pull(root, "registry.ollama.ai/library/odd/latest", (home / "odd.gguf").read_bytes())
    assert main(["models", "--json"]) == 0
    listed = {one["name"]: one for one in map(json.loads, capsys.readouterr().out.splitlines())}
    assert (listed["ollama:tiny:latest"]["type"], listed["ollama:tiny:latest"]["context"]) == ("Q8_0", 1024)
    assert "is no GGUF file" in listed["ollama:wrong:latest"]["why_not"]
    assert "contradicts itself" in listed["ollama:odd:latest"]["why_not"]
    assert main(["models"]) == 0
    assert "1,024 tokens" in capsys.readouterr().out
    tokenizer = str(save_tokenizer(home / "tokenizer"))
    with LLM("ollama:tiny", tokenizer=tokenizer, dtype="float32", kv_cache_memory_bytes=2**22) as llm:
        [output] = llm.generate(["The prefix"], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 4
