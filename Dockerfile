# Two images, which check the machine and then train a small model on all of it:
#   docker build -t unsloth-multigpu . && docker run --rm --gpus all --shm-size 8g unsloth-multigpu
#   docker build -t unsloth-multigpu:cpu --target cpu . && docker run --rm unsloth-multigpu:cpu    # two CPU ranks, no Unsloth
# With a script of your own: docker run ... -v "$PWD:/work" -w /work unsloth-multigpu unsloth-multigpu run train.py
# Ranks of one container meet on its loopback interface. NCCL wants more shared memory than Docker's 64 MB.

FROM python:3.12.12-slim-bookworm AS cpu
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /opt/unsloth-multigpu
# torch by itself, so that a change of the sources does not fetch it again.
COPY constraints.txt ./
RUN pip install -c constraints.txt --index-url https://download.pytorch.org/whl/cpu torch
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY unsloth_multigpu unsloth_multigpu
RUN pip install -c constraints.txt .
COPY examples examples
RUN useradd --create-home --uid 1001 trainer && mkdir /work && chown 1001 /work
USER 1001
WORKDIR /work
CMD ["sh", "-c", "unsloth-multigpu doctor && python /opt/unsloth-multigpu/examples/plain_transformers.py"]

FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04 AS gpu
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/venv/bin:$PATH
# Triton compiles a small launcher with gcc when Unsloth's kernels run for the first time.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
WORKDIR /opt/unsloth-multigpu
COPY constraints.txt ./
RUN pip install -c constraints.txt torch
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY unsloth_multigpu unsloth_multigpu
RUN pip install -c constraints.txt ".[unsloth]"
COPY examples examples
RUN useradd --create-home --uid 1001 trainer && mkdir /work && chown 1001 /work
USER 1001
WORKDIR /work
CMD ["sh", "-c", "unsloth-multigpu doctor && python /opt/unsloth-multigpu/examples/ddp_quick_start.py"]
