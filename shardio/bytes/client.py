"""Clients of remote stores, one per server and options in a process: through obstore, or fsspec for other schemes."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

import fsspec

from shardio import extras
from shardio.bytes.options import basic, for_obstore
from shardio.errors import MissingExtraError
from shardio.location import CONTAINER, visible

REQUESTS = 32
"""Requests in flight to one server."""
TIMEOUT_S = 30.0
"""Seconds without a byte after which a request has failed."""
OBSTORE = ("http", "https", "s3", "s3a", "gs", "gcs", *CONTAINER)
"""Schemes that obstore knows."""


class Failure(NamedTuple):
    """Why a request failed.

    Attributes:
        kind: there is no such object; it may not be read; the server has too much to do; a new try may help; or not.
        reason: for people; no part of a library's text, which can hold credentials.
    """

    kind: Literal["absent", "refused", "busy", "again", "final"]
    reason: str


class Client(ABC):
    """Connections to one server. Paths are those of objects on it, whole.

    Attributes:
        requests: requests in flight at most. Fewer after the server has said that there are too many: half at each
            such time, and one more for each round without.
        process: id of the process that made it.
        lists: can tell the folders; HTTP servers cannot.
    """

    def __init__(self, requests: int, lists: bool = True) -> None:
        self.requests = requests
        self.lists = lists
        self.process = os.getpid()
        self._most, self._now, self._good = requests, 0, 0
        self._not_before = 0.0
        self._turn = threading.Condition()

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        """Threads for the requests of one read."""
        return ThreadPoolExecutor(self.requests, "shardio-fetch")

    def begin(self) -> None:
        """Wait until one more request may be in flight."""
        with self._turn:
            while self._now >= self._most or time.monotonic() < self._not_before:
                pause = self._not_before - time.monotonic()
                self._turn.wait(pause if pause > 0 else None)
            self._now += 1

    def end(self, good: bool, pause_s: float = 0.0) -> None:
        """A request is over; if the server had too much to do, none begins for `pause_s` seconds."""
        with self._turn:
            self._now -= 1
            if pause_s and time.monotonic() >= self._not_before:  # the first to say so since the last pause
                self._most = max(1, self._most // 2)
            if pause_s:
                self._not_before = max(self._not_before, time.monotonic() + pause_s)
            self._good = self._good + 1 if good else 0
            if self._good >= self._most:
                self._most, self._good = min(self.requests, self._most + 1), 0
            self._turn.notify_all()

    @abstractmethod
    def get(self, path: str, start: int, stop: int | None) -> memoryview:
        """Bytes start..stop of an object, fewer if it ends before; a negative start counts from its end."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Bytes of an object."""

    @abstractmethod
    def folders(self, path: str) -> list[str]:
        """Names of the folders directly under a path, which is "" or ends in "/"."""

    @abstractmethod
    def failure(self, error: Exception) -> Failure:
        """What an error of get, size or folders means."""


def failure_of(status: int | None, text: str) -> Failure:
    """What an HTTP status means, or a text without one."""
    if status is None:
        if re.search(r"169\.254\.169\.254|metadata\.google|credential|InstanceMetadata", text):
            return Failure("final", "no credentials were found; give them as storage_options, or anon=True if public")
        if re.search(r"TimedOut|TimeoutError|operation timed out", text):
            return Failure("again", "timed out")
        if re.search(r"dns|resolve|Name or service", text, re.IGNORECASE):
            return Failure("again", "the name of the server is not known")
        if re.search(r"kind: Connect|ConnectionRefused|Cannot connect|ConnectError", text):
            return Failure("again", "no connection to the server")
        return Failure("again", "the connection was dropped")
    reason = f"HTTP status {status}"
    if status in (404, 410):
        return Failure("absent", reason)
    if status in (401, 403):
        return Failure("refused", reason)
    if status in (429, 503):
        return Failure("busy", reason)
    if status == 408 or status >= 500:
        return Failure("again", reason)
    return Failure("final", reason + (": is region= right?" if status in (301, 307) else ""))


class ObstoreClient(Client):
    """A client of obstore; its own retries are off, so that all kinds of failures are counted in one place."""

    def __init__(self, store: Any, scheme: str, requests: int) -> None:
        super().__init__(requests, lists=not scheme.startswith("http"))
        self._library = extras.load("obstore")
        self._store = store
        self._suffixes = scheme not in CONTAINER
        self._ranges = True

    def get(self, path: str, start: int, stop: int | None) -> memoryview:
        """See Client.get."""
        if start == 0 and stop is None:
            return self._whole(path)
        if start < 0 and not self._suffixes:
            start, stop = max(0, start + self.size(path)), None
        if self._ranges:
            try:
                return self._range(path, start, stop)
            except self._library.exceptions.NotSupportedError:  # a server that sends the whole object always
                self._ranges = False
        found = self._whole(path)
        return found[start:] if stop is None else found[start:stop]

    def _whole(self, path: str) -> memoryview:
        return memoryview(self._library.get(self._store, path).bytes())

    def _range(self, path: str, start: int, stop: int | None) -> memoryview:
        try:
            if stop is not None:
                return memoryview(self._library.get_range(self._store, path, start=start, end=stop))
            wanted = {"suffix": -start} if start < 0 else {"offset": start}
            return memoryview(self._library.get(self._store, path, options={"range": wanted}).bytes())
        except Exception as error:
            if _status(str(error)) == 416:  # the object ends before the range begins
                return memoryview(b"")
            raise

    def size(self, path: str) -> int:
        """See Client.size."""
        return int(self._library.head(self._store, path)["size"])

    def folders(self, path: str) -> list[str]:
        """See Client.folders."""
        found = self._library.list_with_delimiter(self._store, path)["common_prefixes"]
        return [name.rstrip("/").rpartition("/")[2] for name in found]

    def failure(self, error: Exception) -> Failure:
        """See Client.failure."""
        text, kinds = str(error), self._library.exceptions
        status = _status(text)
        if isinstance(error, FileNotFoundError):
            return failure_of(status if status is not None else 404, text)
        if isinstance(error, (kinds.PermissionDeniedError, kinds.UnauthenticatedError, PermissionError)):
            return Failure("refused", f"HTTP status {status or 403}")
        if isinstance(error, kinds.GenericError):
            return failure_of(status, text)
        return Failure("final", f"{type(error).__name__} of the library obstore")


def _status(text: str) -> int | None:
    found = re.search(r"status(?: code)?: (\d{3})", text)
    return int(found[1]) if found else None


class FsspecClient(Client):
    """A file system of fsspec."""

    def __init__(self, files: Any, requests: int, query: str = "") -> None:
        super().__init__(requests, lists=not query)
        self._files = files
        self._query = query

    def _path(self, path: str) -> str:
        return f"{path}?{self._query}" if self._query else path

    def get(self, path: str, start: int, stop: int | None) -> memoryview:
        """See Client.get."""
        if start == 0 and stop is None:
            return memoryview(self._files.cat_file(self._path(path)))
        if start >= 0 and stop is not None:
            try:
                return memoryview(self._files.cat_file(self._path(path), start=start, end=stop))[: stop - start]
            except Exception as error:
                if getattr(error, "status", None) == 416:
                    return memoryview(b"")
                raise
        start = max(0, start + self.size(path)) if start < 0 else start
        return memoryview(self._files.cat_file(self._path(path), start=start))

    def size(self, path: str) -> int:
        """See Client.size."""
        info = self._files.info(self._path(path))
        if info.get("type") == "directory" or info.get("size") is None:
            raise FileNotFoundError(path)
        return int(info["size"])

    def folders(self, path: str) -> list[str]:
        """See Client.folders."""
        found = self._files.ls(path.rstrip("/"), detail=True)
        return [entry["name"].rstrip("/").rpartition("/")[2] for entry in found if entry["type"] == "directory"]

    def failure(self, error: Exception) -> Failure:
        """See Client.failure."""
        status = getattr(error, "status", None)
        if isinstance(status, int):  # aiohttp
            return failure_of(status, "")
        if isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError)):
            return Failure("absent", "not found")
        if isinstance(error, PermissionError):
            return Failure("refused", "permission denied")
        if isinstance(error, (OSError, TimeoutError)) or type(error).__module__.startswith("aiohttp"):
            return failure_of(None, f"{type(error).__name__}")
        return Failure("final", f"{type(error).__name__} of the library fsspec")


class _HideQueries(logging.Filter):
    """fsspec logs the URLs that it fetches, with the tokens in them."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = re.sub(r"(://)(?:[^/\s@]*@)?([^?\s]*)\?\S*", r"\1\2", record.getMessage()), ()
        return True


_hide = _HideQueries()
_clients: dict[tuple[Any, ...], Client] = {}
_connecting = threading.Lock()


def connect(url: str, options: dict[str, Any]) -> tuple[Client, str]:
    """The process's client for a URL and options, and the path of the URL on it."""
    requests, timeout = int(options.pop("requests", REQUESTS)), float(options.pop("timeout", TIMEOUT_S))
    parts = urlsplit(url)
    web = parts.scheme in ("http", "https")
    # A query (a signature, a token) belongs to each request; obstore cannot add it.
    if "::" in url or parts.scheme not in OBSTORE or (web and parts.query) or not _has_obstore(url):
        query = parts.query if web else ""
        files, path = _fsspec(url.partition("?")[0] if query else url, options, web)
        with _connecting:
            key: tuple[Any, ...] = (id(files), requests, query, os.getpid())  # fsspec keeps one for the same options
            client = _clients.setdefault(key, FsspecClient(files, requests, query))
        return client, path.rstrip("/")
    user = "" if parts.scheme in CONTAINER else parts.netloc.rpartition("@")[0]
    root = f"{parts.scheme}://{parts.netloc.removeprefix(user + '@')}"
    config, client_options = for_obstore(parts.scheme, root, {**options, "userinfo": unquote(user)})
    client_options.setdefault("read_timeout", f"{round(timeout * 1000)}ms")
    key = (root, repr(sorted(config.items())), repr(sorted(client_options.items())), requests, os.getpid())
    with _connecting:
        if key not in _clients:
            _clients[key] = ObstoreClient(_obstore(root, config, client_options), parts.scheme, requests)
        return _clients[key], unquote(parts.path).strip("/")


def _has_obstore(url: str) -> bool:
    """Whether obstore can be used; raises MissingExtraError if it cannot, nor can fsspec."""
    try:
        extras.load("obstore")
    except MissingExtraError:
        try:
            fsspec.get_filesystem_class(urlsplit(url).scheme)
        except (ImportError, ValueError):
            pass
        else:
            return False
        raise
    return True


def _obstore(root: str, config: dict[str, Any], client_options: dict[str, Any]) -> Any:
    stores = extras.load("obstore").store
    common = {"client_options": {"timeout": "1h", **client_options}, "retry_config": {"max_retries": 0}}
    try:
        if root.startswith("http"):
            return stores.HTTPStore.from_url(root, **common)
        return stores.from_url(root.replace("gcs://", "gs://"), config=config, **common)
    except Exception as error:  # its text can hold values of options
        names = ", ".join(sorted({*config, *client_options}))
        raise ValueError(
            f"no connection to {visible(root)} can be made ({type(error).__name__} of obstore); check the URL and the "
            f"names and values of storage_options: {names}"
        ) from None


def _fsspec(url: str, options: dict[str, Any], web: bool) -> tuple[Any, str]:
    logging.getLogger("fsspec.http").addFilter(_hide)
    user = urlsplit(url).netloc.rpartition("@")[0] if web else ""
    if user:
        options["headers"] = {**options.get("headers", {}), "Authorization": basic(unquote(user))}
        url = url.replace(f"{user}@", "", 1)
    try:
        files, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        raise MissingExtraError(f"{visible(url)}: {error}") from error
    except (TypeError, ValueError):
        names = ", ".join(sorted(options)) or "none"
        raise ValueError(
            f"fsspec cannot open {visible(url)} with the storage_options {names}; check the scheme and their names"
        ) from None
    return files, str(path)
