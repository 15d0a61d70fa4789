"""What deploy/ starts a server with: command lines that foreword understands, paths that exist, names that are read."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from doors import command_line
from foreword.config import Environment, user_cache_folder
from foreword.errors import ConfigError
from foreword.server.options import ServerConfig

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
CACHES = ("HF_HOME", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR")
UNIT = DEPLOY / "systemd" / "foreword.service"


def dockerfile(instruction: str) -> list[str]:
    """The arguments of each use of an instruction, lines joined."""
    lines = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text()).splitlines()
    return [line.split(maxsplit=1)[1] for line in lines if line.startswith(f"{instruction} ")]


def unit() -> ConfigParser:
    parser = ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return parser


def service(*files: str) -> dict[str, Any]:
    """As Compose merges files: tables by key, everything else is replaced."""

    def merged(first: Any, second: Any) -> Any:
        if not isinstance(first, dict) or not isinstance(second, dict):
            return second
        return {**first, **{key: merged(first.get(key), value) for key, value in second.items()}}

    content: dict[str, Any] = {}
    for file in files:
        content = merged(content, yaml.safe_load((DEPLOY / file).read_text()))
    found: dict[str, Any] = content["services"]["foreword"]
    return found


def understood(arguments: list[str]) -> dict[str, Any]:
    """The options that `foreword` takes from a command line, which is refused if one is unknown."""
    args, unknown = command_line().parse_known_args(arguments)
    assert not unknown
    options: dict[str, Any] = args.flags.given(args)
    return options


COMMANDS = {
    "the image": lambda: json.loads(dockerfile("CMD")[0]),
    "compose": lambda: service("compose.yaml")["command"],
    "compose on a GPU": lambda: service("compose.yaml", "compose.gpu.yaml")["command"],
    "systemd": lambda: shlex.split(unit()["Service"]["ExecStart"])[1:],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_the_commands_that_start_a_server_are_understood(command: Any) -> None:
    options = understood(command())
    assert options.get("port") == 8000
    assert ServerConfig(**{name: value for name, value in options.items() if name in ServerConfig.__dataclass_fields__})


@pytest.mark.parametrize("files", [("compose.yaml",), ("compose.yaml", "compose.gpu.yaml")], ids=["cpu", "gpu"])
def test_a_container_is_given_the_time_to_answer_what_it_accepted(files: tuple[str, ...]) -> None:
    compose = service(*files)
    grace_s = int(compose["stop_grace_period"].removesuffix("s"))
    assert grace_s > understood(compose["command"])["shutdown_timeout_s"]


def test_systemd_gives_the_server_the_time_to_answer_what_it_accepted() -> None:
    settings = unit()["Service"]
    options = understood(shlex.split(settings["ExecStart"])[1:])
    assert int(settings["TimeoutStopSec"]) > options["shutdown_timeout_s"]


def test_what_the_image_is_built_of_is_there() -> None:
    pairs = [copy.split()[:-1] for copy in dockerfile("COPY")]
    ignored = (ROOT / ".dockerignore").read_text().split()
    for name in (name for names in pairs for name in names):
        assert (ROOT / name).exists()
        assert f"!{name}" in ignored
    compose = service("compose.yaml")["build"]
    assert (DEPLOY / compose["context"] / compose["dockerfile"]).is_file()


def test_the_image_has_a_python_and_the_extras_that_the_package_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = re.match(r"python:(3\.\d+)-slim", dockerfile("FROM")[0])
    assert version
    assert f"Programming Language :: Python :: {version[1]}" in project["classifiers"]
    extras = {
        extra
        for names in re.findall(r"\.\[([\w,]+)(?:\$\{EXTRAS\})?\]", dockerfile("RUN")[0])
        for extra in names.split(",")
    }
    assert {"serve", "gpu"} <= extras <= set(project["optional-dependencies"])


def test_the_variables_that_hold_secrets_are_read() -> None:
    given = {"FOREWORD_API_KEY": "a", "FOREWORD_OPERATOR_KEY": "b", "FOREWORD_SERVER_SECRET": "c"}
    assert set(service("compose.yaml")["environment"]) == set(given)
    assert all(name in UNIT.read_text() for name in given)
    read = Environment.read(given)
    assert (read.api_key, read.operator_key, read.server_secret) == ("a", "b", "c")


IMAGE_CACHE, UNIT_CACHE = Path("/cache"), Path("/var/cache/foreword")


@pytest.mark.parametrize(
    ("settings", "folder"),
    [
        (lambda: shlex.split(dockerfile("ENV")[0]), IMAGE_CACHE),
        (
            lambda: [
                word
                for line in UNIT.read_text().splitlines()
                if line.startswith("Environment=")
                for word in line.removeprefix("Environment=").split()
            ],
            UNIT_CACHE,
        ),
    ],
    ids=["the image", "systemd"],
)
def test_what_makes_the_next_start_faster_is_kept(settings: Callable[[], list[str]], folder: Path) -> None:
    """Models of the hub, compiled kernels, and what foreword computes of weights and GGUF files."""
    environ = dict(word.split("=", 1) for word in settings())
    kept = [user_cache_folder(environ), *(Path(environ[name]) for name in CACHES)]
    assert all(path.is_relative_to(folder) for path in kept), kept


def test_the_folders_that_are_kept_are_a_volume_and_a_cache_of_the_service() -> None:
    assert dockerfile("VOLUME") == [str(IMAGE_CACHE)]
    assert any(volume.endswith(f":{IMAGE_CACHE}") for volume in service("compose.yaml")["volumes"])
    assert unit()["Service"]["CacheDirectory"] == UNIT_CACHE.name


def test_an_image_with_ray_has_what_kuberay_asks_with() -> None:
    """Whether a worker of a RayService is ready, KubeRay asks with wget in its container."""
    assert re.search(r'"\$EXTRAS,"[^;]*\*,cluster,\*\)[^;]* wget ;;', dockerfile("RUN")[0])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    """With a program that is installed here in the place of foreword."""
    copy = tmp_path / UNIT.name
    copy.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", UNIT.read_text(), flags=re.MULTILINE))
    result = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60)
    assert [line for line in result.stderr.splitlines() if UNIT.name in line] == []


def test_hadolint_finds_nothing_wrong_with_the_image() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    if not hadolint.exists():
        pytest.skip("there is no hadolint for this platform")
    result = subprocess.run([hadolint, "--no-color", DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert result.stdout == ""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no shell here")
def test_the_shell_understands_how_the_image_is_built() -> None:
    for command in dockerfile("RUN"):
        assert subprocess.run(["bash", "-n", "-c", command], capture_output=True).stderr == b""


def ray_applications() -> dict[str, Any]:
    """The arguments of foreword's application in each file of deploy/ray."""
    found = {}
    for path in (DEPLOY / "ray").glob("*.yaml"):
        config = yaml.safe_load(path.read_text())
        if config.get("kind") == "RayService":
            config = yaml.safe_load(config["spec"]["serveConfigV2"])
        [application] = config["applications"]
        assert application["import_path"] == "foreword.fleet.ray_ingress:build"
        found[path.name] = application["args"]
    return found


def test_fronts_without_keys_have_no_secret_that_a_restart_would_change(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="needs foreword[cluster]")
    from foreword.fleet import ray_ingress

    made: list[int] = []
    monkeypatch.setattr(ray_ingress.secrets, "token_hex", lambda size: made.append(size) or "secret")
    for name in ("FOREWORD_API_KEY", "FOREWORD_SERVER_SECRET"):
        monkeypatch.delenv(name, raising=False)
    ray_ingress.build({"model": "model"})
    assert made == []
    ray_ingress.build({"model": "model", "api_key": "key"})
    assert made == [16]


def test_ray_serve_takes_what_deploy_gives_it() -> None:
    pytest.importorskip("ray", reason="needs foreword[cluster]")
    from foreword.fleet.ray_ingress import build

    assert set(ray_applications()) == {"serve.yaml", "kuberay.yaml"}
    for name, args in ray_applications().items():
        assert build(args) is not None, name
    args = ray_applications()["serve.yaml"]
    assert (
        build({**args, "max_queued": None, "replicas": None, "server_secret": None, "record": "requests.jsonl"})
        is not None
    )
    for wrong, told in (
        ({"model": None}, "name a folder"),
        ({"fronts": 0}, "fronts=0"),
        ({"replicas": -1}, "replicas=-1"),
        ({"block_sise": 16}, "block_sise"),
        ({"max_queued": "many"}, "max_queued='many' has the wrong type; use an integer"),
        ({"share_prefix": 3}, "share_prefix=3 has the wrong type; use a list"),
    ):
        with pytest.raises(ConfigError, match=told):
            build({**args, **wrong})
