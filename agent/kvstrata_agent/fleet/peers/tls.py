"""How connections between agents are secured: both ends show a certificate, and each is who the other takes it for.

The directory names an agent, its certificate proves the name. A token of the agents' ServiceAccount stays as second
factor on the answering side: once pod or account are gone it is refused in a minute, long before a certificate ends.
"""

import ssl
from typing import Any, Final, Protocol

from kvstrata_api import names
from kvstrata_api.errors import ForbiddenError
from kvstrata_kube.tls import answering, peer_uri

HANDSHAKE_S: Final = 5.0
"""A caller that has not shown its certificate by then is gone."""


class Certified(Protocol):
    """Contexts for new connections (`kvstrata_kube.certified.OwnCertificate`)."""

    def connecting(self) -> ssl.SSLContext:
        """For a connection that we open. Raises `RetryableError` while there is no certificate."""

    def listening(self) -> ssl.SSLContext:
        """For a connection that another agent has opened. Raises like `connecting`."""


class PeerTls:
    """Mutual TLS between the agents of one namespace."""

    def __init__(self, namespace: str, own: Certified) -> None:
        self._namespace = namespace
        self._own = own

    def listening(self) -> ssl.SSLContext:
        """Context for a listener's whole life: each connection is answered by what is held then."""
        return answering(self._own.listening)

    def connecting(self) -> ssl.SSLContext:
        """Context for one connection. Raises `RetryableError` while there is no certificate."""
        return self._own.connecting()

    def check(self, connection: Any, agent: str) -> None:
        """Accept the other end of a connection as `agent`.

        Raises `UnauthenticatedError` when its certificate names nobody, `ForbiddenError` when it names somebody else.
        """
        shown = peer_uri(connection)
        if shown != names.agent_uri(self._namespace, agent):
            raise ForbiddenError(f"the other end is {shown}, not agent {agent}")
