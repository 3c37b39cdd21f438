"""The policy that keeps node preparation away from what agents observe knows every field that they write."""

from pathlib import Path

import pytest

from kvstrata_api.models.poolnode import KVPoolNodeStatus

pytestmark = pytest.mark.unit

TEMPLATE = Path(__file__).resolve().parents[3] / "charts/kvstrata/templates/admission-objects.yaml"


def test_every_field_of_the_status_that_is_an_agents_is_compared() -> None:
    text = TEMPLATE.read_text(encoding="utf-8")
    listed = text.partition("!variables.isNode || [")[2].partition("]")[0].replace("\n", "").replace(" ", "")
    fields = {info.alias or name for name, info in KVPoolNodeStatus.model_fields.items()}

    assert set(listed.replace('"', "").split(",")) == fields - {"node", "conditions"}
