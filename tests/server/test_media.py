"""Pictures that clients name by URL: fetched from allowed domains alone, and never from this network."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpcore
import httpx
import pytest

from foreword.errors import ConfigError, InvalidRequestError, MediaBusyError
from foreword.llm import LLM
from foreword.pictures import PictureFile, file_of_url
from foreword.request import HeldBytes
from foreword.server.crews import Crew
from foreword.server.media import MediaDomains, is_public
from foreword.server.options import ServerConfig
from live_server import MODEL, ServerThread
from picture_models import asks, file_of, noise, save_seeing_model
from tiny_models import greedy

NAME = "pictures.test"
PNG = file_of(noise(70, 50))


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        site: _Site = self.server.site  # type: ignore[attr-defined]
        site.asked.append((self.path, self.headers["Host"]))
        status = 302 if self.path == "/moved" else 404 if self.path == "/gone" else 200
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/a.png")
        if self.path == "/packed":
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        try:
            if self.path == "/slow":
                while not site.is_closing.wait(0.05):
                    self.wfile.write(b"x")
            elif self.path == "/endless":
                while not site.is_closing.is_set():
                    self.wfile.write(bytes(1 << 16))
            elif status == 200:
                self.wfile.write(gzip.compress(PNG) if self.path == "/packed" else PNG)
        except OSError:
            pass  # the client had enough

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Site:
    """A web server on the loopback interface, and what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.is_closing = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.site = self  # type: ignore[attr-defined]
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.is_closing.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def site() -> Iterator[_Site]:
    site = _Site()
    yield site
    site.close()


@pytest.fixture
def crew() -> Iterator[Crew]:
    crew = Crew("fetches", 2, 8)
    yield crew
    crew.close()


def here(site: _Site, crew: Crew, most: int = 1 << 20, **door: Any) -> MediaDomains:
    """Fetches from the site as if it were far away, under a name that only the test's door knows.

    Only tests that are about the time that a fetch may take give `seconds`: this machine may be slow.
    """
    door = {"resolve": lambda host, port: ["127.0.0.1"], "is_allowed": lambda address: True, "seconds": 60.0, **door}
    return MediaDomains([f"{NAME}:{site.port}"], most, crew, **{"held": HeldBytes(), **door})


def fill(media: MediaDomains, *urls: str) -> list[PictureFile]:
    files = [file_of_url(url) for url in urls]
    with ExitStack() as fetched:
        asyncio.run(media.fill(files, fetched))
    return files


def test_a_picture_comes_from_the_address_that_was_checked(site: _Site, crew: Crew) -> None:
    resolved = []

    def resolve(host: str, port: int) -> list[str]:
        resolved.append((host, port))
        return ["::1", "127.0.0.1"]  # nobody listens at the first

    media = here(site, crew, resolve=resolve)
    [file] = fill(media, f"http://{NAME.upper()}:{site.port}/a.png?size=1")
    assert file.data == PNG
    assert resolved == [(NAME, site.port)]  # no second time, when the name may mean another machine
    assert site.asked == [("/a.png?size=1", f"{NAME}:{site.port}")]
    asyncio.run(media.fill([file], ExitStack()))
    assert len(site.asked) == 1


@pytest.mark.parametrize(
    ("path", "match"),
    [
        ("moved", "answers 302, and redirects are not followed"),
        ("gone", "answers 404"),
        ("packed", "compresses it"),
        ("endless", "more than the 1048576 bytes"),
        ("slow", "more than 1 s"),
    ],
)
def test_answers_that_are_no_picture_are_refused_in_a_line(site: _Site, crew: Crew, path: str, match: str) -> None:
    limit: dict[str, Any] = {"seconds": 1.0} if path == "slow" else {}
    with pytest.raises(InvalidRequestError, match=match) as raised:
        fill(here(site, crew, **limit), f"http://{NAME}:{site.port}/{path}")
    assert "\n" not in str(raised.value)
    assert [asked for asked, _ in site.asked] == [f"/{path}"]


def test_all_pictures_of_a_prompt_share_the_bytes(site: _Site, crew: Crew) -> None:
    url = f"http://{NAME}:{site.port}/a.png"
    assert len(fill(here(site, crew, 2 * len(PNG)), url, url)) == 2
    with pytest.raises(InvalidRequestError, match=f"more than the {len(PNG) - 1} bytes"):
        fill(here(site, crew, 2 * len(PNG) - 1), url, url)


def test_bytes_are_counted_from_the_first_to_those_that_a_request_holds(site: _Site, crew: Crew) -> None:
    url, most = f"http://{NAME}:{site.port}/a.png", 1 << 20
    held = HeldBytes(most + 2 * len(PNG) - 1)
    media = here(site, crew, most, held=held)
    with ExitStack() as fetched:
        asyncio.run(media.fill([file_of_url(url)], fetched))
        assert held.num_bytes == len(PNG)
        asyncio.run(media.fill([file_of_url(url)], fetched))
        assert held.num_bytes == 2 * len(PNG)
        with pytest.raises(MediaBusyError, match="try again"):  # it may have `most`
            asyncio.run(media.fill([file_of_url(url)], fetched))
        assert len(site.asked) == 2
    assert held.num_bytes == 0
    with pytest.raises(InvalidRequestError, match="404"):
        fill(media, f"http://{NAME}:{site.port}/gone")
    assert held.num_bytes == 0


def test_an_address_that_never_answers_leaves_time_for_the_next(
    site: _Site, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = httpcore.AnyIOBackend.connect_tcp

    async def silent(self: Any, host: str, port: int, timeout: float | None = None, **other: Any) -> Any:
        if host == "192.0.2.1":  # as a firewall that drops packets
            assert timeout is not None
            await asyncio.sleep(timeout)
            raise httpcore.ConnectTimeout
        return await connect(self, host, port, timeout, **other)

    monkeypatch.setattr(httpcore.AnyIOBackend, "connect_tcp", silent)
    media = here(site, crew, resolve=lambda host, port: ["192.0.2.1", "127.0.0.1"], seconds=3.0)
    assert fill(media, f"http://{NAME}:{site.port}/a.png")[0].data == PNG


def test_a_resolver_that_never_answers_takes_no_longer_than_a_fetch_may(site: _Site, crew: Crew) -> None:
    def resolve(host: str, port: int) -> list[str]:
        site.is_closing.wait(60)
        return ["127.0.0.1"]

    with pytest.raises(InvalidRequestError, match=r"more than 0\.2 s"):
        fill(here(site, crew, resolve=resolve, seconds=0.2), f"http://{NAME}:{site.port}/a.png")
    assert not site.is_closing.is_set()


@pytest.mark.parametrize(
    "url",
    [
        "http://other.test:{port}/a.png",
        "http://pictures.test/a.png",
        "http://pictures.test.other.test:{port}/a.png",
        "http://pictures.test:{port}@other.test/a.png",
        "http://user@pictures.test:{port}/a.png",
        "http://127.0.0.1:{port}/a.png",
        "http://pictures.test:99999/a.png",
        "http:///a.png",
        "http://[::1/a.png",
    ],
)
def test_other_domains_and_ports_are_not_even_resolved(site: _Site, crew: Crew, url: str) -> None:
    def resolve(host: str, port: int) -> list[str]:
        raise AssertionError(host)

    with pytest.raises(InvalidRequestError, match="its domain is not one"):
        fill(here(site, crew, resolve=resolve), url.format(port=site.port))


@pytest.mark.parametrize(
    "address",
    "127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 255.255.255.255 ::1 :: "
    "fe80::1%eth0 fc00::1 ff02::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 64:ff9b::7f00:1 64:ff9b::a00:1 2002:7f00:1:: "
    "2001:0:7f00:1:: fec0::1 64:ff9b:1::a00:1 ::10.0.0.1 ::127.0.0.1 ::ffff:0:127.0.0.1 5f00::1 3fff::1 "
    "4000::1".split(),
)
def test_a_domain_that_leads_into_this_network_is_refused(site: _Site, crew: Crew, address: str) -> None:
    assert not is_public(address)
    for addresses in ([address], ["8.8.8.8", address]):
        media = here(site, crew, resolve=lambda host, port, found=addresses: found, is_allowed=is_public)
        with pytest.raises(InvalidRequestError, match="an address that is not public"):
            fill(media, f"http://{NAME}:{site.port}/a.png")
    assert not site.asked


def test_public_addresses_are_public() -> None:
    assert all(map(is_public, ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]))


def test_a_name_that_nobody_knows_and_a_port_that_nobody_serves_are_refused(site: _Site, crew: Crew) -> None:
    def unknown(host: str, port: int) -> list[str]:
        raise OSError("no such name")

    url = f"http://{NAME}:{site.port}/a.png"
    for door, match in (({"resolve": unknown}, "has no address"), ({}, "connection failed .ConnectError.")):
        if not door:
            site.close()
        with pytest.raises(InvalidRequestError, match=match):
            fill(here(site, crew, **door), url)


@pytest.mark.parametrize("domain", ["", "https://example.com", "example.com/a", "*.example.com", "a b", "h:port"])
def test_what_is_no_domain_is_refused_at_the_start(crew: Crew, domain: str) -> None:
    with pytest.raises(ConfigError, match="is not a domain"):
        MediaDomains([domain], 1, crew, HeldBytes())


def test_a_server_fetches_once_what_a_conversation_keeps(site: _Site, tmp_path: Any) -> None:
    url = f"http://{NAME}:{site.port}/a.png"
    parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "Who?"}]
    asked = {"model": MODEL, "input": [{"role": "user", "content": parts}], "temperature": 0, "max_output_tokens": 4}
    options: dict[str, Any] = {"kv_cache_memory_bytes": 4 << 20, "self_check": False, "dtype": "float32"}
    with LLM(str(save_seeing_model(tmp_path / "model")), **options) as llm:
        [expected] = llm.chat(asks("Who?", noise(70, 50)), greedy(4))
        config = ServerConfig(log_requests=False, allow_media_domain=(f"localhost:{site.port}",))
        with ServerThread(llm, config) as server:

            def ask(**body: Any) -> httpx.Response:
                return httpx.post(f"{server.url}/v1/responses", json={**asked, **body}, timeout=60)

            assert "is not one that the server fetches from" in ask().json()["error"]["message"]
            local = [{**parts[0], "image_url": f"http://localhost:{site.port}/a.png"}]
            refused = ask(input=[{"role": "user", "content": local}])
            assert refused.status_code == 400
            assert "not public" in refused.json()["error"]["message"]
            assert not site.asked
            service = server.service
            service.media = here(site, service.crews.fetches)
            first = ask().json()
            second = ask(input="And?", previous_response_id=first["id"]).json()
            assert len(site.asked) == 1
            assert second["usage"]["input_tokens_details"]["image_tokens"] == 40
            assert first["output"][0]["content"][0]["text"] == expected.outputs[0].text
