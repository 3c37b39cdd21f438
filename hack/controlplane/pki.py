"""Keys and certificates of one control plane, made fresh at each start. The only `cryptography` import.

Everything is ECDSA on P-256: making a key takes well under a millisecond, RSA-2048 a tenth of a second.
"""

import datetime as dt
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvstrata_operator.certificates.authority import key_usage

_LIFETIME = dt.timedelta(days=365)
_CLOCK_SLACK = dt.timedelta(minutes=5)  # A component may read a clock slightly behind ours.


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A private key with its certificate, or with its bare public key, in PEM."""

    key_pem: bytes
    public_pem: bytes
    """The certificate; for the service-account key the public key."""


class Authority:
    """A certificate authority. Clients and servers that trust it trust everything that it issued."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        """Use an existing certificate and its key; see `create` and `load`."""
        self._certificate = certificate
        self._key = key

    @classmethod
    def create(cls, common_name: str) -> "Authority":
        """Make a new self-signed authority."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(common_name)
        usage = key_usage(signs_certificates=True)
        builder = (
            _certificate(subject, subject, key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def load(cls, pair: KeyPair) -> "Authority":
        """Read back the PEM of an authority that `create` made."""
        key = serialization.load_pem_private_key(pair.key_pem, password=None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return cls(x509.load_pem_x509_certificate(pair.public_pem), key)

    @property
    def pair(self) -> KeyPair:
        """The authority's own key and certificate."""
        return KeyPair(_key_pem(self._key), _certificate_pem(self._certificate))

    def issue_client(self, user: str, groups: Iterable[str] = ()) -> KeyPair:
        """Issue a client certificate; the API server reads CN as the user and each O as a group."""
        return self._issue(_name(user, groups), (ExtendedKeyUsageOID.CLIENT_AUTH,), ())

    def issue_server(self, common_name: str, hosts: Iterable[str], *, also_client: bool = False) -> KeyPair:
        """Issue a serving certificate for DNS names and IP addresses; etcd uses its own as a client too."""
        usages = (ExtendedKeyUsageOID.SERVER_AUTH, *((ExtendedKeyUsageOID.CLIENT_AUTH,) * also_client))
        return self._issue(_name(common_name), usages, tuple(_general_name(host) for host in hosts))

    def _issue(
        self, subject: x509.Name, usages: tuple[x509.ObjectIdentifier, ...], hosts: tuple[x509.GeneralName, ...]
    ) -> KeyPair:
        """Sign a certificate over a new key."""
        key = ec.generate_private_key(ec.SECP256R1())
        issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = (
            _certificate(subject, self._certificate.subject, key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(issuer_key, critical=False)
        )
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        signed = builder.sign(self._key, hashes.SHA256())
        return KeyPair(_key_pem(key), _certificate_pem(signed))


def service_account_keys() -> KeyPair:
    """Make the pair that signs (API server) and checks service-account tokens."""
    key = ec.generate_private_key(ec.SECP256R1())
    encoding, shape = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    return KeyPair(_key_pem(key), key.public_key().public_bytes(encoding, shape))


def _certificate(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    """Begin a certificate with names, serial number, life span and key."""
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SLACK)
        .not_valid_after(now + _LIFETIME)
        .public_key(public_key)
    )


def _name(common_name: str, organizations: Iterable[str] = ()) -> x509.Name:
    """Return a distinguished name."""
    groups = (x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in organizations)
    return x509.Name((*groups, x509.NameAttribute(NameOID.COMMON_NAME, common_name)))


def _general_name(host: str) -> x509.GeneralName:
    """Return an IP address entry when `host` is one, else a DNS entry."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key as unencrypted PKCS#8; the state folder is readable by its owner alone."""
    encoding, shape = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, shape, serialization.NoEncryption())


def _certificate_pem(certificate: x509.Certificate) -> bytes:
    """Return a certificate as PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)
