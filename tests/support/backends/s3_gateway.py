"""A real S3 server for tests: versitygw on a directory, built from its pinned Go module like the control plane."""

import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from controlplane.assets import find_tool
from controlplane.ports import free_ports

ACCESS_KEY = "kvstrata-test"
SECRET_KEY = "kvstrata-test-secret"


@contextmanager
def s3_gateway(directory: Path, bucket: str) -> Iterator[dict[str, str]]:
    """Run the server on `directory`; yields the client's settings."""
    binary = str(find_tool("versitygw"))
    (directory / bucket).mkdir(parents=True)
    (port,) = free_ports(1)
    environment = os.environ | {"ROOT_ACCESS_KEY_ID": ACCESS_KEY, "ROOT_SECRET_ACCESS_KEY": SECRET_KEY}
    command = [binary, "--port", f"127.0.0.1:{port}", "--quiet", "posix"]
    # Part checksums of multipart uploads need a place: beside the objects, for not every file system has attributes.
    sidecar = directory.with_name(f"sidecar-of-{directory.name}")
    sidecar.mkdir()
    command += ["--sidecar", str(sidecar), str(directory)]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        _wait(port, server)
        yield {
            "aws_access_key_id": ACCESS_KEY,
            "aws_secret_access_key": SECRET_KEY,
            "aws_endpoint": f"http://127.0.0.1:{port}",
            "aws_region": "us-east-1",
        }
    finally:
        server.kill()
        server.communicate()


def _wait(port: int, server: "subprocess.Popen[bytes]") -> None:
    for _ in range(200):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=1).close()
        except urllib.error.HTTPError:
            return  # It answers, and wants a signature.
        except OSError:
            assert server.poll() is None, server.communicate()[1].decode()
            time.sleep(0.05)
    raise AssertionError("versitygw did not start")
