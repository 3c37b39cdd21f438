"""The certificate by which this process shows who it is: asked of the operator, renewed, with whom to trust.

The private key is made here and stays here. The request is a CertificateSigningRequest, so that the API server itself
notes who asks, and on which node that pod runs. Until there is a certificate nobody is reached and nobody is answered.

A private key of our own, and the request (PKCS #10) by which somebody else certifies it. The key never leaves us.
"""

import asyncio
import base64
import hashlib
import logging
import random
import ssl
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvstrata_api import names
from kvstrata_api.errors import InvalidInputError, KvStrataError, RetryableError, UnauthenticatedError
from kvstrata_kube import backoff, tls
from kvstrata_kube.api import Call, KubeApi
from kvstrata_kube.store import Store, version_of
from kvstrata_kube.tls import Credential
from kvstrata_kube.watch import Source, Watch

RENEW_AT: Final = 2 / 3
"""Part of its life after which a certificate is replaced: what is left is for an operator that is away."""
ANSWER_S: Final = 30.0
"""An unsigned request is complained about after so long."""
LOOK_S: Final = (0.1, 2.0)
"""Polling interval of a request, first and longest."""
FILES_POLL_S: Final = 1.0
"""Polling interval of certificates in files."""
PAUSE_S: Final = 10.0
"""Longest pause after a failure."""
_REQUESTS: Final = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
_USAGES: Final = ("digital signature", "client auth", "server auth")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A private key and the request for its certificate, both as PEM."""

    key_pem: bytes = field(repr=False)
    request_pem: bytes


def make_key_pair(uri: str, hosts: Sequence[str] = ()) -> KeyPair:
    """Make a key on P-256 and ask for the identity `uri`, and for the DNS names and IP addresses in `hosts`."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, names.MANAGED_BY)])
    wanted = [x509.UniformResourceIdentifier(uri), *(_host(host) for host in hosts)]
    builder = x509.CertificateSigningRequestBuilder(subject)
    request = builder.add_extension(x509.SubjectAlternativeName(wanted), critical=False).sign(key, hashes.SHA256())
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return KeyPair(key.private_bytes(*form), request.public_bytes(serialization.Encoding.PEM))


def ends_at(certificate_pem: bytes, source: str = "") -> datetime:
    """Last moment of a certificate. Raises `InvalidInputError`, beginning with its `source`, for what is none."""
    try:
        return x509.load_pem_x509_certificate(certificate_pem).not_valid_after_utc
    except ValueError as e:
        raise InvalidInputError(f"{source}no certificate: {e}") from e


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrustSeen:
    """The ConfigMap with the certificate authorities."""

    key: str
    uid: str
    version: int = field(compare=False)
    pem: str


class OwnCertificate:
    """Holds one; run `run` as a supervised task. The contexts are for new connections: ask again for each."""

    def __init__(
        self,
        api: KubeApi,
        namespace: str,
        uri: str,
        hosts: Sequence[str] = (),
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`uri` is who we are, `hosts` where servers of ours are reached; call `changed` whenever contexts differ."""
        self._api = api
        self._uri = uri
        self._hosts = tuple(hosts)
        self._changed = changed
        self._store: Store[TrustSeen] = Store(lambda _old, _new: self._refresh())
        path = f"/api/v1/namespaces/{namespace}/configmaps"
        query = {"fieldSelector": f"metadata.name={names.TRUST_CONFIG_MAP}"}
        self._watch = Watch(api, Source(path, _read_trust, query), self._store)
        self._certificate = b""
        self._key = b""
        self._contexts: tuple[ssl.SSLContext, ssl.SSLContext, ssl.SSLContext] | None = None
        self.credential: Credential | None = None
        """What is held; None until the first certificate and somebody to trust."""
        self.expires_at_s = 0.0
        """Wall-clock second at which the certificate ends; 0 while there is none."""

    def connecting(self) -> ssl.SSLContext:
        """Context of a connection to another agent, whose name is checked by its URI. Raises `RetryableError`."""
        return self._held()[0]

    def connecting_to_host(self) -> ssl.SSLContext:
        """Context of a connection to a server that is known by its host, such as Redis. Raises `RetryableError`."""
        return self._held()[1]

    def listening(self) -> ssl.SSLContext:
        """Context of a connection that another agent has opened. Raises `RetryableError`."""
        return self._held()[2]

    async def run(self) -> NoReturn:
        """Follow the trusted authorities, get a certificate and renew it, for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch.run())
            tasks.create_task(self._keep())
        raise AssertionError("both run for ever")

    def _held(self) -> tuple[ssl.SSLContext, ssl.SSLContext, ssl.SSLContext]:
        if self._contexts is None:
            raise RetryableError(f"no certificate for {self._uri} yet", delay_s=1.0)
        return self._contexts

    async def _keep(self) -> None:
        failures = 0
        pair: KeyPair | None = None
        while True:
            try:
                pair = pair or make_key_pair(self._uri, self._hosts)
                certificate = await self._signed(pair)
                renew_in_s = self._take(pair, certificate)
            except KvStrataError as e:
                # A request that waits to be signed is waited for; any other is made again, with another key.
                pair = pair if isinstance(e, RetryableError) else None
                failures += 1
                _log.warning("no certificate", extra={"uri": self._uri, "failures": failures, "cause": str(e)})
                await asyncio.sleep(backoff.delay_s(failures, random.random(), PAUSE_S))
                continue
            failures, pair = 0, None
            await asyncio.sleep(renew_in_s)

    def _take(self, pair: KeyPair, certificate: bytes) -> float:
        """Use a certificate from now on; seconds until the next one is due, spread over a fleet."""
        ends = ends_at(certificate)
        self._certificate, self._key = certificate, pair.key_pem
        self.expires_at_s = ends.timestamp()
        self._refresh()
        _log.info("certificate held", extra={"uri": self._uri, "expires": ends.isoformat()})
        left_s = (ends - datetime.now(UTC)).total_seconds()
        return max(0.5, left_s * RENEW_AT * random.uniform(0.9, 1.0))

    def _refresh(self) -> None:
        """Make contexts of what is known now."""
        trust = next((seen.pem for seen in self._store.items.values()), "")
        if not self._certificate or not trust:
            return
        held = Credential(self._certificate.decode(), self._key.decode(), trust)
        if held == self.credential:
            return
        try:
            connecting = tls.client_context(held, checks_host=False), tls.client_context(held, checks_host=True)
            self._contexts = (*connecting, tls.server_context(held))
        except UnauthenticatedError as e:
            _log.error("certificate not used", extra={"uri": self._uri, "cause": str(e)})
            return
        self.credential = held
        self._changed()

    async def _signed(self, pair: KeyPair) -> bytes:
        """Ask, and wait for the answer. Raises `RetryableError` when there is none yet, or what was refused."""
        name = f"{_label(self._uri)}.{hashlib.sha256(pair.request_pem).hexdigest()[:16]}"
        loop = asyncio.get_running_loop()
        until_s, pause_s = loop.time() + ANSWER_S, LOOK_S[0]
        while loop.time() < until_s:
            answer = await self._api.call(Call("GET", f"{_REQUESTS}/{name}"))
            if answer.is_absent:
                asked = await self._api.call(Call("POST", _REQUESTS, body=_request_body(name, pair)))
                if not asked.is_conflict:
                    asked.content()
            elif certificate := _certificate_in(answer.content()):
                return certificate
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LOOK_S[1])
        raise RetryableError(f"request {name} is not signed yet: does the operator run, and does it lead?")


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM files: a certificate, its key, and the authorities that certify everybody."""

    certificate: Path
    key: Path
    trust: Path

    @property
    def marks(self) -> list[tuple[int, int, int]]:
        """What differs when one has changed. Raises `OSError`."""
        seen = [path.stat() for path in (self.certificate, self.key, self.trust)]
        return [(s.st_mtime_ns, s.st_size, s.st_ino) for s in seen]


class FileCertificate:
    """A certificate that somebody else keeps in files, which are read again when they change."""

    def __init__(self, files: CertificateFiles, uri: str) -> None:
        """Read the files. Raises `InvalidInputError` that names the file and says what is wanted."""
        self._files = files
        self._uri = uri
        self._marks: object = None
        self.expires_at_s = 0.0
        """Wall-clock second at which the certificate ends."""
        self._contexts = self._read()

    def connecting(self) -> ssl.SSLContext:
        """Context of a connection to another agent, whose name is checked by its URI."""
        return self._contexts[0]

    def listening(self) -> ssl.SSLContext:
        """Context of a connection that another agent has opened."""
        return self._contexts[1]

    async def run(self) -> NoReturn:
        """Follow the files, for ever; what cannot be used is logged, and what was good last goes on."""
        while True:
            await asyncio.sleep(FILES_POLL_S)
            try:
                if self._files.marks != self._marks:
                    self._contexts = self._read()
                    _log.info("certificate held", extra={"uri": self._uri})
            except (OSError, InvalidInputError) as e:
                if self._marks is not None:
                    _log.error("certificate not used", extra={"uri": self._uri, "cause": str(e)})
                self._marks = None

    def _read(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        files = self._files
        try:
            marks = files.marks
            certificate, key, trust = (p.read_text() for p in (files.certificate, files.key, files.trust))
        except (OSError, UnicodeDecodeError) as e:
            raise InvalidInputError(f"certificate files: {e}") from e
        if (mode := files.key.stat().st_mode) & stat.S_IRWXO:
            raise InvalidInputError(f"key {files.key}: mode {stat.S_IMODE(mode):04o}; nobody else may read it: 0600")
        ends = ends_at(certificate.encode(), f"{files.certificate}: ")
        named = _uris(certificate.encode())
        if named != [self._uri]:
            wanted = f"a subjectAltName of URI:{self._uri} alone is wanted"
            raise InvalidInputError(f"certificate {files.certificate}: names {', '.join(named) or 'nobody'}; {wanted}")
        if ends <= datetime.now(UTC):
            raise InvalidInputError(f"certificate {files.certificate}: ended at {ends.isoformat()}")
        if "CERTIFICATE" not in trust:
            raise InvalidInputError(f"certificate file {files.trust}: holds no certificate of an authority")
        held = Credential(certificate, key, trust)
        try:
            contexts = tls.client_context(held, checks_host=False), tls.server_context(held)
        except UnauthenticatedError as e:
            read = f"{files.certificate}, {files.key}, {files.trust}"
            raise InvalidInputError(f"certificate files {read}: {e}") from e
        self._marks, self.expires_at_s = marks, ends.timestamp()
        return contexts


def _uris(certificate_pem: bytes) -> list[str]:
    """URIs that a certificate names."""
    try:
        extensions = x509.load_pem_x509_certificate(certificate_pem).extensions
        named = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    return named.get_values_for_type(x509.UniformResourceIdentifier)


def _request_body(name: str, pair: KeyPair) -> dict[str, Any]:
    request = base64.b64encode(pair.request_pem).decode()
    return {
        "apiVersion": "certificates.k8s.io/v1",
        "kind": "CertificateSigningRequest",
        "metadata": {"name": name, "labels": {names.LABEL_MANAGED_BY: names.MANAGED_BY}},
        "spec": {"request": request, "signerName": names.SIGNER, "usages": list(_USAGES)},
    }


def _certificate_in(request: Any) -> bytes | None:
    """Certificate of a request; None while it is not signed. Raises `UnauthenticatedError` when it was refused."""
    status = request.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition["type"] in ("Denied", "Failed"):
            raise UnauthenticatedError(f"request {condition['type'].lower()}: {condition.get('message', '')}")
    signed = status.get("certificate")
    return base64.b64decode(signed) if signed else None


def _label(uri: str) -> str:
    """Name requests after who asks: `kvstrata.agent.<pool>.<node>`, cut to what leaves room for a digest."""
    _, _, path = uri.removeprefix("spiffe://").split("/", 2)
    return f"kvstrata.{path.replace('/', '.')}"[: names.NAME_CHARS_MAX - 20].rstrip(".-")


class _Meta(msgspec.Struct, rename="camel"):
    name: str
    uid: str = ""
    resource_version: str = ""


class _ConfigMap(msgspec.Struct):
    metadata: _Meta
    data: dict[str, str] = msgspec.field(default_factory=dict)


def _read_trust(raw: bytes) -> TrustSeen:
    seen = msgspec.json.decode(raw, type=_ConfigMap)
    meta = seen.metadata
    return TrustSeen(meta.name, meta.uid, version_of(meta.resource_version), seen.data.get("ca.crt", ""))
