"""Servers that the tests start on this machine: nginx over a folder, a proxy that fails on a schedule, S3."""

from __future__ import annotations

import http.client
import http.server
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest

NGINX_CONF = """
daemon off; master_process off; pid {here}/nginx.pid; error_log {here}/error.log;
events {{ worker_connections 512; }}
http {{
  access_log off; default_type application/octet-stream;
  client_body_temp_path {here}/t1; proxy_temp_path {here}/t2; fastcgi_temp_path {here}/t3;
  uwsgi_temp_path {here}/t4; scgi_temp_path {here}/t5;
  server {{
    listen 127.0.0.1:{port}; root {root};
    location ~ /forbidden/ {{ deny all; }}
    location ~ /private/ {{ if ($http_authorization != "Basic dXNlcjpoaWRkZW4=") {{ return 401; }} }}
    location ~ /signed/ {{ if ($arg_token != "hidden") {{ return 403; }} }}
  }}
}}
"""


@dataclass(frozen=True)
class Served:
    """A folder and the URL under which it is served."""

    folder: Path
    url: str


@pytest.fixture(scope="session")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A folder served by nginx; what is under forbidden/ is 403, private/ wants user:hidden, signed/ ?token=hidden."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        if os.environ.get("CI"):
            pytest.fail("nginx is not installed; .ci/run installs it")
        pytest.skip("nginx is not installed (Debian: apt install nginx-light)")
    here, root = tmp_path_factory.mktemp("nginx"), tmp_path_factory.mktemp("web")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (here / "nginx.conf").write_text(NGINX_CONF.format(here=here, port=port, root=root))
    server = subprocess.Popen([program, "-e", f"{here}/error.log", "-c", f"{here}/nginx.conf", "-p", str(here)])
    try:
        for _ in range(500):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert server.poll() is None, (here / "error.log").read_text()
                time.sleep(0.02)
        yield Served(root, f"http://127.0.0.1:{port}")
    finally:
        server.terminate()
        server.wait(10)


@dataclass
class Proxy:
    """Passes requests on to a server, and counts them; `fault` makes some of them fail.

    Attributes:
        url: where it listens.
        upstream: host and port that it passes requests on to.
        delay: seconds before each is passed on.
        fault: called with the number of a request, from 0, and its path; gives "drop" (no answer), "cut" (half of it),
            a status, or None.
        paths: of the requests, in order; `ranges` what they asked for; `bodies` bytes that were sent.
        most: requests at the same time, at most.
    """

    url: str
    upstream: str
    delay: float = 0.0
    fault: Callable[[int, str], str | int | None] = lambda number, path: None
    paths: list[str] = field(default_factory=list)
    ranges: list[str | None] = field(default_factory=list)
    bodies: int = 0
    now: int = 0
    most: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reset(self) -> None:
        """Count from zero."""
        self.paths.clear()
        self.ranges.clear()
        self.bodies = self.most = 0


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    proxy: Proxy

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        proxy = self.proxy
        with proxy.lock:
            number = len(proxy.paths)
            proxy.paths.append(self.path)
            proxy.ranges.append(self.headers.get("Range"))
            proxy.now += 1
            proxy.most = max(proxy.most, proxy.now)
        try:
            time.sleep(proxy.delay)
            self._answer(proxy, proxy.fault(number, self.path))
        finally:
            with proxy.lock:
                proxy.now -= 1

    do_HEAD = do_GET

    def _answer(self, proxy: Proxy, fault: str | int | None) -> None:
        if fault == "drop":
            self._hang_up()
            return
        if isinstance(fault, int):
            self.send_response(fault)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        connection = http.client.HTTPConnection(proxy.upstream)
        connection.request(self.command, self.path, headers=dict(self.headers))
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "date", "server"):
                self.send_header(name, value)
        self.end_headers()
        if fault == "cut":
            body = body[: len(body) // 2]
        with proxy.lock:
            proxy.bodies += len(body)
        self.wfile.write(body)
        if fault == "cut":
            self._hang_up()

    def _hang_up(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that hung up


@pytest.fixture
def proxied() -> Iterator[Callable[[str], Proxy]]:
    """Makes a proxy in front of a server, given its URL."""
    servers = []

    def make(url: str) -> Proxy:
        handler = type("Handler", (_Handler,), {})
        server = _Server(("127.0.0.1", 0), handler)
        proxy = Proxy(f"http://127.0.0.1:{server.server_address[1]}", urlsplit(url).netloc)
        handler.proxy = proxy  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return proxy

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The URL of an S3 server, which knows no objects yet."""
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()
