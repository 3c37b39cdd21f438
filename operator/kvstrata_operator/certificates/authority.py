"""The certificate authority of a fleet: makes itself, reads requests, issues certificates. The only x509 here.

Knows nothing of Kubernetes; who may have which certificate is decided in `issuing`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvstrata_api.errors import InvalidInputError

CLOCK_SKEW: Final = timedelta(minutes=5)
"""Certificates begin this much earlier than they are made: clocks of nodes differ."""

REQUEST_BYTES_MAX: Final = 16_384
HOSTS_MAX: Final = 16
_CURVES: Final = (ec.SECP256R1, ec.SECP384R1)
_UNREADABLE: Final = (
    ValueError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)
"""What reading a certificate, a request or its parts raises for what is malformed or of no use here."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """What is public of a certificate authority."""

    pem: str
    fingerprint: str
    """SHA-256 of the certificate, hex."""
    begins: datetime
    ends: datetime


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority that can issue."""

    certificate: Certificate
    key_pem: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Request:
    """What a request asks for; its signature is good."""

    pem: str
    uris: tuple[str, ...]
    hosts: tuple[str, ...]
    """DNS names and IP addresses."""


def make_authority(now: datetime, life: timedelta) -> Authority:
    """Make an authority that signs itself and leaves, and nothing between them."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"kvstrata {now:%Y-%m-%dT%H:%M:%SZ}")])
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = _begun(name, name, now, now + life).public_key(key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(key_usage(signs_certificates=True), critical=True)
    signed = builder.add_extension(identifier, critical=False).sign(key, hashes.SHA256())
    return Authority(_public(signed), _key_pem(key))


def read_authority(certificate_pem: str, key_pem: str) -> Authority:
    """Read an authority, whoever made it.

    Raises `InvalidInputError` unless it is one certificate that signs itself and may issue, with its key: what trusts
    an authority between two others would have to trust all that the upper one signs.
    """
    certificate, key = _load(certificate_pem), _load_key(key_pem)
    _check_issuer(certificate)
    if certificate.public_key() != key.public_key():
        raise InvalidInputError("certificate authority: tls.key is not the key of tls.crt")
    return Authority(_public(certificate), key_pem)


def read_bundle(pem: str) -> tuple[Certificate, ...]:
    """Read the authorities of a bundle; what cannot be read is left out."""
    try:
        return tuple(_public(one) for one in x509.load_pem_x509_certificates(pem.encode()))
    except _UNREADABLE:
        return ()


def read_certificate(pem: str) -> Certificate | None:
    """Read a certificate; None for what is none."""
    return next(iter(read_bundle(pem)), None)


def read_request(pem: str) -> Request:
    """Read a request. Raises `InvalidInputError` for one that is malformed, too large, or not signed by its own key."""
    if len(pem) > REQUEST_BYTES_MAX:
        raise InvalidInputError(f"request of {len(pem)} B, limit {REQUEST_BYTES_MAX} B")
    try:
        request = x509.load_pem_x509_csr(pem.encode())
        if not request.is_signature_valid:
            raise InvalidInputError("request is not signed by its own key")
        key = request.public_key()
        names = request.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (*_UNREADABLE, x509.ExtensionNotFound, InvalidSignature) as e:
        raise InvalidInputError(f"request cannot be read: {e}") from e
    if not (isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, _CURVES)):
        raise InvalidInputError("request with a key that is not on P-256 or P-384")
    return Request(pem, *_names(names))


def issue(authority: Authority, request: Request, now: datetime, life: timedelta) -> str:
    """Certify what a request asks for, as PEM; never longer than the authority itself is good."""
    asked = x509.load_pem_x509_csr(request.pem.encode())
    key = asked.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey), "read_request has seen to that"
    return _issue(authority, key, asked.extensions.get_extension_for_class(x509.SubjectAlternativeName), now, life)


def issue_pair(authority: Authority, uri: str, hosts: Sequence[str], now: datetime, life: timedelta) -> tuple[str, str]:
    """Make a key and certify it, for a server that cannot ask: certificate and key, both PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    wanted = [x509.UniformResourceIdentifier(uri), *(x509.DNSName(host) for host in hosts)]
    names = x509.Extension(x509.SubjectAlternativeName.oid, critical=False, value=x509.SubjectAlternativeName(wanted))
    return _issue(authority, key.public_key(), names, now, life), _key_pem(key)


def is_issued_by(certificate_pem: str, authority: Certificate) -> bool:
    """Return whether an authority signed a certificate."""
    try:
        _load(certificate_pem).verify_directly_issued_by(_load(authority.pem))
    except (*_UNREADABLE, TypeError, InvalidSignature, InvalidInputError):
        return False
    return True


def _issue(
    authority: Authority,
    key: ec.EllipticCurvePublicKey,
    names: x509.Extension[x509.SubjectAlternativeName],
    now: datetime,
    life: timedelta,
) -> str:
    issuer, issuer_key = _load(authority.certificate.pem), _load_key(authority.key_pem)
    ends = min(now + life, authority.certificate.ends)
    subject = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "kvstrata")])
    uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH])
    of_issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    builder = _begun(subject, issuer.subject, now, ends).public_key(key)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(key_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(uses, critical=False).add_extension(of_issuer, critical=False)
    builder = builder.add_extension(names.value, critical=False)
    return builder.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


def _begun(subject: x509.Name, issuer: x509.Name, now: datetime, ends: datetime) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer)
    return builder.serial_number(x509.random_serial_number()).not_valid_before(now - CLOCK_SKEW).not_valid_after(ends)


def key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    """What a key may do: sign certificates, or sign handshakes."""
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _names(names: x509.SubjectAlternativeName) -> tuple[tuple[str, ...], tuple[str, ...]]:
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    hosts = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    if len(uris) + len(hosts) != len(names):
        raise InvalidInputError("request for a name that is no URI, DNS name or IP address")
    if len(hosts) > HOSTS_MAX:
        raise InvalidInputError(f"request for {len(hosts)} hosts, limit {HOSTS_MAX}")
    return tuple(uris), tuple(hosts)


def _check_issuer(certificate: x509.Certificate) -> None:
    try:
        may_issue = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        certificate.verify_directly_issued_by(certificate)
    except (*_UNREADABLE, TypeError, InvalidSignature, x509.ExtensionNotFound) as e:
        raise InvalidInputError(f"certificate authority: it does not sign itself: {e}") from e
    if not may_issue:
        raise InvalidInputError("certificate authority: its certificate may not issue others (isCA is false)")


def _load(pem: str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem.encode())
    except _UNREADABLE as e:
        raise InvalidInputError(f"no certificate: {e}") from e


def _load_key(pem: str) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(pem.encode(), None)
    except (*_UNREADABLE, TypeError) as e:
        raise InvalidInputError(f"no private key: {e}") from e
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InvalidInputError("a private key that is not ECDSA")
    return key


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return key.private_bytes(*form).decode()


def _public(certificate: x509.Certificate) -> Certificate:
    return Certificate(
        certificate.public_bytes(serialization.Encoding.PEM).decode(),
        certificate.fingerprint(hashes.SHA256()).hex(),
        certificate.not_valid_before_utc,
        certificate.not_valid_after_utc,
    )
