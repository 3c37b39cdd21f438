"""One host of two: starts the process that has the pooled tier, kills it when it is told to, and passes commands on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import regions

HOST = [sys.executable, str(Path(__file__).with_name("host.py"))]
DEVICE = "dax0.0"


def main() -> None:
    """Serve until the other end says `end`."""
    regions.make_region(regions.VOLATILE_SERIAL, "ram", 256 << 20)
    regions.until(regions.dax_devices)
    regions.make_mappable(DEVICE)
    port = next(p for p in Path("/sys/class/virtio-ports").iterdir() if (p / "name").read_text().strip() == "commands")
    host: subprocess.Popen[str] | None = None
    with open(f"/dev/{port.name}", "r+b", buffering=0) as line:  # noqa: PTH123  A character device.
        pending = b""
        while True:
            while b"\n" not in pending:
                pending += os.read(line.fileno(), 65536)
            text, _, pending = pending.partition(b"\n")
            command = json.loads(text)
            if command["do"] == "start":
                host = subprocess.Popen(
                    [*HOST, command["node"], str(command["size_bytes"])],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                answer = _answer(host)
            elif command["do"] == "kill":
                assert host is not None
                host.kill()
                answer = json.dumps({"status": host.wait()})
            elif command["do"] == "end":
                if host is not None and host.poll() is None:
                    host.kill()
                return
            else:
                assert host is not None
                assert host.stdin is not None
                host.stdin.write(text.decode() + "\n")
                host.stdin.flush()
                answer = _answer(host)
            os.write(line.fileno(), answer.encode() + b"\n")


def _answer(host: "subprocess.Popen[str]") -> str:
    assert host.stdout is not None
    return host.stdout.readline().strip() or json.dumps({"ended": host.wait()})


main()
