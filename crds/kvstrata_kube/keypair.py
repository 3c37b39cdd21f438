"""A private key of our own, and the request (PKCS #10) by which somebody else certifies it. The key never leaves us."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from ipaddress import ip_address

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvstrata_api import names
from kvstrata_api.errors import InvalidInputError


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


def ends_at(certificate_pem: bytes) -> datetime:
    """Last moment of a certificate. Raises `InvalidInputError` for what is none."""
    try:
        return x509.load_pem_x509_certificate(certificate_pem).not_valid_after_utc
    except ValueError as e:
        raise InvalidInputError(f"no certificate: {e}") from e


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)
