"""Backends and codecs import where little is installed: a machine with an accelerator and no network, for instance."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.contract

LEAN = {"numpy", "msgspec", "xxhash", "torch"}
TORCHS_OWN = {"*"}
OWN = {
    "kvstrata_agent.backends.object.client": {"obstore"},
    "kvstrata_agent.backends.record.cipher": {"cryptography", "_cffi_backend"},
    "kvstrata_agent.backends.device.hbm": TORCHS_OWN,
    "kvstrata_agent.codec.triton_kernels": TORCHS_OWN,
}
"""Modules that are nothing but the use of one more library."""

IMPORT_ALL = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or top.startswith("kvstrata") or top in allowed or "*" in allowed:
            return None
        raise ImportError(f"{name} is not installed here")

own, allowed, names = OWN, set(LEAN), []
sys.meta_path.insert(0, Absent())
for package in ("kvstrata_agent.backends", "kvstrata_agent.codec"):
    path = importlib.import_module(package).__path__
    names += [module.name for module in pkgutil.walk_packages(path, package + ".")]
for name in sorted(names, key=own.__contains__):
    allowed = set(LEAN) | own.get(name, set())
    importlib.import_module(name)
assert "pydantic" not in sys.modules
print(len(names))
"""


def test_backends_and_codecs_import_with_torch_numpy_msgspec_and_xxhash_alone() -> None:
    script = IMPORT_ALL.replace("OWN", repr(OWN), 1).replace("LEAN", repr(LEAN))
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > len(OWN)
