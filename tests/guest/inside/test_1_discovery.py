"""What discovery sees before anything is set up, and what a tier says that finds nothing."""

import pytest
from recorded import Record

from kvstrata_agent.backends.device.devdax import open_devdax
from kvstrata_api.errors import UnsupportedError
from kvstrata_api.units import MIB
from kvstrata_node.discovery import discover


def test_memory_that_firmware_describes_is_a_node_without_processors(record_property: Record) -> None:
    facts = discover()

    assert facts.cpu_nodes == (0,)
    assert [n.id for n in facts.cpuless] == [1]
    (far,) = facts.cpuless
    assert 128 * MIB < far.memory_bytes <= 256 * MIB
    record_property("far_bytes", far.memory_bytes)


def test_nvme_devices_are_found_with_model_size_and_node(record_property: Record) -> None:
    devices = discover().nvme

    assert [d.name for d in devices] == ["nvme0n1", "nvme1n1"]
    for device in devices:
        assert device.size_bytes == 64 * MIB
        assert device.model == "QEMU NVMe Ctrl"
        assert device.node in {-1, 0}
    record_property("nodes", [d.node for d in devices])


def test_cxl_memory_that_nobody_has_set_up_is_no_tier() -> None:
    facts = discover()

    assert facts.dax == ()
    with pytest.raises(UnsupportedError, match="no dax device"):
        open_devdax(2 * MIB, facts.dax)
