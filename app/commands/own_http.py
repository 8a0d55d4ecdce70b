"""HTTP to a service from its own commands: what runs on this machine is never asked through a proxy."""

from __future__ import annotations

import ipaddress
import ssl
import urllib.parse
import urllib.request

_UNVERIFIED = ssl.create_default_context()  # a certificate is for the service's public name, not for 127.0.0.1
_UNVERIFIED.check_hostname, _UNVERIFIED.verify_mode = False, ssl.CERT_NONE
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=_UNVERIFIED))
_BY_ENVIRONMENT = urllib.request.build_opener()


def opener(url: str) -> urllib.request.OpenerDirector:
    """Without proxies for this machine's own addresses; else as `http_proxy` and `no_proxy` say."""
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
        own = address.is_loopback or address.is_unspecified
    except ValueError:
        own = host == "localhost"
    return DIRECT if own else _BY_ENVIRONMENT
