"""What all kinds share: camelCase aliases, quantities, object metadata. Pure."""

from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema
from pydantic.alias_generators import to_camel

from kvstrata_api import units
from kvstrata_api.errors import InvalidInputError

NAME_PATTERN: Final = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
"""RFC 1123 label; pool, tier, tenant and domain names keep to it because they become metric labels."""


SUBDOMAIN_PATTERN: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
LABEL_VALUE_PATTERN: Final = r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"

QUANTITY_PATTERN: Final = (
    r"^([1-9]([0-9]{0,17}|[0-9]{0,14}(Ki|k)|[0-9]{0,11}(Mi|M)|[0-9]{0,8}(Gi|G)|[0-9]{0,5}(Ti|T)|[0-9]{0,2}(Pi|P))"
    r"|[1-7][0-9]{3}Pi|[1-7]Ei)$"
)
"""Positive whole quantities below 2^63 bytes, so that no rule over them can overflow."""

COUNT_MAX: Final = units.SIZE_BYTES_MAX
"""Bound of everything counted."""

SET: Final[dict[str, Any]] = {"x-kubernetes-list-type": "set"}
"""For lists of scalars without repetition, to which several may add."""


def unique_by(*keys: str) -> dict[str, Any]:
    """Extra schema of a list whose items are identified by `keys`, all required: no repetition, merged by key."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


class ApiModel(BaseModel):
    """Frozen value with camelCase on the wire; unknown fields are ignored so that newer objects still parse."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True, extra="ignore")

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with wire names, without fields that are None."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def _to_bytes(value: Any) -> int:
    try:
        return min(units.parse_quantity(value), units.SIZE_BYTES_MAX)
    except InvalidInputError as e:
        raise ValueError(str(e)) from e


Quantity = Annotated[
    int,
    BeforeValidator(_to_bytes),
    PlainSerializer(units.format_quantity, return_type=str),
    WithJsonSchema({"x-kubernetes-int-or-string": True, "pattern": QUANTITY_PATTERN, "minimum": 1, "maxLength": 20}),
]
"""Whole bytes inside, a Kubernetes quantity on the wire."""

Name = Annotated[str, Field(min_length=1, max_length=63, pattern=NAME_PATTERN)]
"""RFC 1123 label, 1 to 63 characters."""

ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=SUBDOMAIN_PATTERN)]
"""RFC 1123 subdomain: names of Nodes, Secrets and ServiceAccounts."""

LabelValue = Annotated[str, Field(max_length=63, pattern=LABEL_VALUE_PATTERN)]

Text = Annotated[str, Field(max_length=64)]
"""Short text that a program writes for a reader, such as `12/12` or `1.2Ti`."""

Timestamp = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]
"""RFC 3339."""

Count = Annotated[int, Field(ge=0, le=COUNT_MAX)]
"""Something counted, or bytes."""


class ObjectMeta(ApiModel):
    """The part of `metadata` that kvstrata reads."""

    name: str
    namespace: str | None = None
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    finalizers: tuple[str, ...] = ()
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
