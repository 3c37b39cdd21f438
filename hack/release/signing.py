"""Signatures in cosign's formats, with a key that the releaser has. Pure but for reading the key.

ECDSA on P-256 over SHA-256. The nonce follows from key and message (RFC 6979), so signing twice gives the same bytes.
"""

import base64
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from release.errors import ReleaseError

KEY: Final = "KVSTRATA_RELEASE_KEY"
PASSWORD: Final = "KVSTRATA_RELEASE_KEY_PASSWORD"  # noqa: S105  The name of a variable.
SIMPLE_SIGNING: Final = "application/vnd.dev.cosign.simplesigning.v1+json"
"""Media type of what is signed for an image; cosign's SIGNATURE_SPEC.md."""
DSSE: Final = "application/vnd.dsse.envelope.v1+json"
IN_TOTO: Final = "application/vnd.in-toto+json"
SIGNATURE: Final = "dev.cosignproject.cosign/signature"
"""Annotation of the layer that has what is signed."""
_SIGNED_BY: Final = ec.ECDSA(hashes.SHA256(), deterministic_signing=True)


@dataclass(frozen=True, slots=True)
class Key:
    """A private key that signs."""

    private: ec.EllipticCurvePrivateKey

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read PKCS#8 or SEC 1 in PEM, with the password of $KVSTRATA_RELEASE_KEY_PASSWORD; `ReleaseError`."""
        password = os.environ.get(PASSWORD)
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), password.encode() if password else None)
        except (OSError, ValueError, TypeError) as e:
            raise ReleaseError(f"key {path}: {e}") from e
        if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
            raise ReleaseError(
                f"key {path}: an ECDSA key on P-256 is wanted, as `openssl ecparam -name prime256v1` makes"
            )
        return cls(key)

    @property
    def public(self) -> bytes:
        """The public key in PEM: what verifies."""
        kind = serialization.PublicFormat.SubjectPublicKeyInfo
        return self.private.public_key().public_bytes(serialization.Encoding.PEM, kind)

    def sign(self, message: bytes) -> str:
        """Base64 of the signature in DER, as cosign writes it."""
        return base64.b64encode(self.private.sign(message, _SIGNED_BY)).decode()

    def envelope(self, statement: bytes) -> bytes:
        """Return an in-toto statement in a DSSE envelope, as JSON."""
        signed = {"keyid": "", "sig": self.sign(authenticated(IN_TOTO, statement))}
        envelope = {"payloadType": IN_TOTO, "payload": base64.b64encode(statement).decode(), "signatures": [signed]}
        return _json(envelope)


def authenticated(kind: str, payload: bytes) -> bytes:
    """What is signed of a payload of some type: DSSE's PAE."""
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind.encode(), len(payload), payload)


def of_image(repository: str, digest: str) -> bytes:
    """What is signed for an image: its name and the digest of its manifest."""
    critical = {
        "identity": {"docker-reference": repository},
        "image": {"docker-manifest-digest": digest},
        "type": "cosign container image signature",
    }
    return _json({"critical": critical, "optional": None})


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
