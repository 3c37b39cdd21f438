"""A real S3 server for tests and measurements: versitygw on a directory, from its pinned Go module like the rest."""

import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from controlplane.assets import find_tool
from controlplane.errors import StartError
from controlplane.ports import free_ports

ACCESS_KEY = "kvstrata-test"
SECRET_KEY = "kvstrata-test-secret"  # noqa: S105  Of a server on loopback that ends with its test.
START_S = 30.0


@contextmanager
def s3_gateway(directory: Path, bucket: str) -> Iterator[dict[str, str]]:
    """Run the server on `directory`, which has the bucket as a folder; yields a client's settings.

    Raises `StartError`.
    """
    binary = str(find_tool("versitygw"))
    (directory / bucket).mkdir(parents=True, exist_ok=True)
    (port,) = free_ports(1)
    environment = os.environ | {"ROOT_ACCESS_KEY_ID": ACCESS_KEY, "ROOT_SECRET_ACCESS_KEY": SECRET_KEY}
    command = [binary, "--port", f"127.0.0.1:{port}", "--quiet", "posix"]
    # Part checksums of multipart uploads need a place: beside the objects, for not every file system has attributes.
    sidecar = directory.with_name(f"sidecar-of-{directory.name}")
    sidecar.mkdir()
    command += ["--sidecar", str(sidecar), str(directory)]
    log = directory.with_name(f"log-of-{directory.name}")
    with log.open("wb") as said:
        server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=said)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait(address, server, log)
        yield {
            "aws_access_key_id": ACCESS_KEY,
            "aws_secret_access_key": SECRET_KEY,
            "aws_endpoint": address,
            "aws_region": "us-east-1",
        }
    finally:
        server.kill()
        server.wait()


def _wait(address: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    ends_s = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < ends_s:
        try:
            urllib.request.urlopen(address, timeout=1).close()  # noqa: S310  Ours, by http.
        except urllib.error.HTTPError:
            return  # It answers, and wants a signature.
        except OSError:
            time.sleep(0.05)
    raise StartError(f"versitygw did not start: {log.read_text(errors='replace').strip()[-400:]}")
