"""storage_options by the names of fsspec's file systems (s3fs, gcsfs, adlfs, http), as obstore calls them."""

from __future__ import annotations

import base64
import json
from typing import Any

NAMES = {
    "s3": {
        "key": "access_key_id",
        "secret": "secret_access_key",
        "token": "session_token",
        "endpoint_url": "endpoint",
        "region_name": "region",
        "requester_pays": "request_payer",
    },
    "gs": {"endpoint_url": "base_url"},
    "az": {"sas_token": "sas_key", "endpoint_url": "endpoint"},
}
"""Scheme -> name in fsspec -> name in obstore."""
WITHOUT_MEANING = ("asynchronous", "loop", "use_listings_cache", "use_ssl", "project", "consistency", "cache_regions")
"""Options of fsspec that change nothing here."""


def for_obstore(scheme: str, root: str, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration and client options for obstore."""
    config = {**options, **options.get("config", {})}
    client: dict[str, Any] = dict(config.pop("client_options", None) or {})
    kept = dict(config.pop("client_kwargs", None) or {})
    headers = {**(kept.pop("headers", None) or {}), **(config.pop("headers", None) or {})}
    user = config.pop("userinfo", "")
    for name in ("config", "retry_config", *WITHOUT_MEANING):
        config.pop(name, None)
    config = {**kept, **config}
    kind = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "http": "http", "https": "http"}.get(scheme, "az")
    if config.pop("anon", False):
        config["skip_signature"] = True
    if kind == "gs" and "token" in config:
        config.update(_google_token(config.pop("token")))
    for name, other in NAMES.get(kind, {}).items():
        if name in config:
            config.setdefault(other, config.pop(name))
    if user and kind == "http":
        headers = {**headers, "Authorization": basic(user)}
    elif user:
        config["access_key_id"], _, config["secret_access_key"] = user.partition(":")
    if headers:
        client["default_headers"] = {**client.get("default_headers", {}), **headers}
    if root.startswith("http://") or str(config.get("endpoint", "")).startswith("http://"):
        client.setdefault("allow_http", True)
    return {name: value for name, value in config.items() if value is not None}, client


def basic(user: str) -> str:
    """The header by which a "user:password" is told to an HTTP server."""
    return "Basic " + base64.b64encode(user.encode()).decode()


def _google_token(token: Any) -> dict[str, Any]:
    if token == "anon":
        return {"skip_signature": True}
    if isinstance(token, dict):
        return {"service_account_key": json.dumps(token)}
    if isinstance(token, str) and token.endswith(".json"):
        return {"application_credentials": token}
    return {}
