"""Mutual TLS between processes of one fleet: contexts from the certificate that is held now, and who the other end is.

TLS 1.3 alone. A peer is known by the URI in its certificate, not by its address: agents move. Whoever accepts or opens
a connection asks for a context each time, so a new certificate is used at once and connections that exist go on.
"""

import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from kvstrata_api.errors import RetryableError, UnauthenticatedError

Contexts = Callable[[], ssl.SSLContext]
"""Gives the context for one new connection; raises `RetryableError` while there is no certificate."""


@dataclass(frozen=True, slots=True)
class Credential:
    """A certificate with its key, and whom to trust; all PEM."""

    certificate_pem: str
    key_pem: str = field(repr=False)
    trust_pem: str
    """Certificate authorities; empty for the system's."""


def client_context(held: Credential, *, checks_host: bool) -> ssl.SSLContext:
    """Make the context of whoever connects. Servers of the fleet's own are checked by `peer_uri` instead of a host.

    Raises `UnauthenticatedError` for what is no certificate, or does not belong to its key.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = checks_host
    return _filled(context, held)


def server_context(held: Credential) -> ssl.SSLContext:
    """Make the context of whoever listens; a client without a certificate is refused. Raises like `client_context`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # A session that is resumed would show no certificate.
    return _filled(context, held)


def answering(contexts: Contexts) -> ssl.SSLContext:
    """Make the context of a listener that answers each connection by the context that is right then.

    While there is none, every handshake fails.
    """
    outer = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    outer.minimum_version = ssl.TLSVersion.TLSv1_3
    outer.verify_mode = ssl.CERT_REQUIRED
    outer.num_tickets = 0

    def choose(connection: Any, _name: str | None, _context: ssl.SSLContext) -> int | None:
        try:
            connection.context = contexts()
        except RetryableError:
            return ssl.ALERT_DESCRIPTION_INTERNAL_ERROR
        return None

    outer.sni_callback = choose  # Called for every ClientHello, with a name or without one.
    return outer


def peer_uri(transport: Any) -> str:
    """URI of the certificate that the other end of a transport showed. Raises `UnauthenticatedError` when none."""
    shown = transport.get_extra_info("peercert") or {}
    uris = [value for kind, value in shown.get("subjectAltName", ()) if kind == "URI"]
    if len(uris) != 1:
        raise UnauthenticatedError(f"the certificate at the other end names {len(uris)} identities, one is wanted")
    return str(uris[0])


def _filled(context: ssl.SSLContext, held: Credential) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        if held.trust_pem:
            context.load_verify_locations(cadata=held.trust_pem)
        else:
            context.load_default_certs()
        if held.certificate_pem:
            _load_chain(context, held)
    except (ssl.SSLError, OSError, ValueError) as e:
        raise UnauthenticatedError(f"certificate cannot be used: {e}") from e
    return context


def _load_chain(context: ssl.SSLContext, held: Credential) -> None:
    """Load certificate and key, which OpenSSL wants as a file, from memory that no other process can open."""
    handle = os.memfd_create("kvstrata-credential")
    try:
        os.fchmod(handle, 0o600)  # Made with 0777, and others may reach it through /proc.
        os.write(handle, f"{held.key_pem}\n{held.certificate_pem}".encode())
        context.load_cert_chain(f"/proc/self/fd/{handle}")
    finally:
        os.close(handle)


SYSTEM_TRUST: Final = Credential("", "", "")
"""No certificate of our own, and the certificate authorities of the system."""
