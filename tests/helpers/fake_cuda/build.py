"""Builds the two libraries of the device with the system's g++, once for each torch and each state of the sources.

The sources compile against the headers of torch 2.6, 2.8, 2.10, 2.13 and 2.15. They were run with 2.13 alone: on
PyPI the others are builds for CUDA.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
_BUILT = HERE.parents[2] / "build" / "fake_cuda"
_FLAGS = ["-std=c++20", "-O1", "-fPIC", "-shared", "-w", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]


def why_not() -> str:
    """Why the device cannot be built here; "" where it can."""
    if sys.platform != "linux":
        return "the CUDA device in host memory needs Linux"
    if shutil.which("g++") is None:
        return "the CUDA device in host memory needs g++"
    if list((_torch() / "lib").glob("libtorch_cuda*")):
        return f"the CUDA device in host memory needs a CPU build of torch; {version('torch')} is one for CUDA"
    return ""


def built() -> Path:
    """The folder with both libraries. Builds them first where they are missing: a minute.

    Raises:
        RuntimeError: The compiler failed; the message has its first lines.
    """
    sources = [HERE / name for name in ("device.h", "device.cpp", "nccl.cpp")]
    parts = [source.read_bytes() for source in sources] + [version("torch").encode(), sys.version.encode()]
    folder = _BUILT / hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _compile(folder, "device.cpp", "libfake_cuda.so", "-ltorch_cpu", "-lc10")
        _compile(folder, "nccl.cpp", "fake_nccl.so", "-lfake_cuda", "-ltorch_python", "-ltorch_cpu", "-lc10")
    return folder


def _compile(folder: Path, source: str, library: str, *links: str) -> None:
    if (folder / library).exists():
        return
    torch = _torch()
    include = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    places = [f"-L{torch / 'lib'}", f"-L{folder}", f"-Wl,-rpath,{torch / 'lib'},-rpath,$ORIGIN"]
    partial = folder / f"{library}.part"
    command = [
        "g++",
        *_FLAGS,
        *(f"-I{path}" for path in include),
        str(HERE / source),
        *places,
        "-o",
        str(partial),
        *links,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"g++ could not build {source} for torch {version('torch')}:\n" + done.stderr[:3000])
    os.replace(partial, folder / library)


def _torch() -> Path:
    """torch's folder. It is not imported: its first import has to find the device."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


if __name__ == "__main__":
    if reason := why_not():
        print(f"Tests on a device in host memory are skipped: {reason}")
    else:
        print("Building the CUDA device in host memory for the tests (about 1 minute)", flush=True)
        built()
