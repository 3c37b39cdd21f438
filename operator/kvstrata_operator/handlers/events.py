"""kopf's handlers: pass on what happened, decide nothing."""

from typing import Any, Final

from kvstrata_api import names
from kvstrata_operator.handlers.lean_kopf import kopf
from kvstrata_operator.observe import kinds

REGISTRY: Final = kopf.OperatorRegistry()


async def login(memo: kopf.Memo, **_: Any) -> kopf.ConnectionInfo:
    """Act under the same identity as the rest of the operator."""
    given = memo.credentials()
    return kopf.ConnectionInfo(
        server=given.server,
        ca_path=given.ca_file,
        insecure=not given.verifies,
        token=given.token,
        certificate_path=given.certificate_file,
        private_key_path=given.key_file,
    )


async def happened(event: kopf.RawEvent, param: kinds.Kind, memo: kopf.Memo, **_: Any) -> None:
    """Pass on one event; its type is None for what a list showed."""
    memo.told(param, event["type"] == "DELETED", event["object"])


kopf.on.login(registry=REGISTRY)(login)
for _kind in kinds.ADMINISTRATOR_KINDS:
    kopf.on.event(names.GROUP, names.VERSION, _kind.plural, registry=REGISTRY, param=_kind)(happened)
