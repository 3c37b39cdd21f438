"""Certificates of agents without a cluster: the operator's own authority, requests as agents make them."""

import json
import ssl
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from kvstrata_agent.fleet.peers.connection import PeerTls
from kvstrata_api import names
from kvstrata_kube import tls
from kvstrata_kube.certified import make_key_pair
from kvstrata_kube.tls import Credential
from kvstrata_operator.certificates import authority as certificates
from kvstrata_operator.certificates.authority import Authority

LIFE = timedelta(hours=1)


@dataclass
class Fleet:
    """One authority and what it has signed."""

    authority: Authority = field(default_factory=lambda: certificates.make_authority(datetime.now(UTC), LIFE))

    def certify(
        self, uri: str, hosts: tuple[str, ...] = (), *, began: datetime | None = None, life: timedelta = LIFE
    ) -> Credential:
        """Certificate of anybody, as the operator signs it."""
        pair = make_key_pair(uri, hosts)
        request = certificates.read_request(pair.request_pem.decode())
        signed = certificates.issue(self.authority, request, began or datetime.now(UTC), life)
        return Credential(signed, pair.key_pem.decode(), self.authority.certificate.pem)

    def agent(self, name: str) -> Credential:
        """Certificate of an agent of the system namespace."""
        return self.certify(names.agent_uri(names.SYSTEM_NAMESPACE, name))


@dataclass
class Holder:
    """Holds what it was given, as `OwnCertificate` holds what it has got."""

    held: Credential

    def connecting(self) -> ssl.SSLContext:
        return tls.client_context(self.held, checks_host=False)

    def listening(self) -> ssl.SSLContext:
        return tls.server_context(self.held)


def peer_tls(held: Credential) -> PeerTls:
    """What an agent that holds this uses."""
    return PeerTls(names.SYSTEM_NAMESPACE, Holder(held))


def save(held: Credential, path: Path) -> Path:
    """Write a credential for another process."""
    path.write_text(json.dumps(asdict(held)))
    return path


def load(path: Path) -> Credential:
    """Read what `save` wrote."""
    return Credential(**json.loads(path.read_text()))
