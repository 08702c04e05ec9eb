# A node of a cluster, for AMD GPUs: on vLLM's own image, which brings torch and vLLM for ROCm. From the top of the checkout:
#
#     docker build -f deploy/containers/rocm.Dockerfile -t sluice:0.1.0-rocm .
#     docker run --device /dev/kfd --device /dev/dri --group-add video --ipc host --network host \
#         --ulimit memlock=-1 --ulimit nofile=65536 --volume sluice:/sluice sluice:0.1.0-rocm --node-ip THIS_HOST
#
# NOT BUILT AND NOT RUN: no machine with AMD GPUs has been at hand, and no lock of ours is resolved for ROCm. It is linted.
# The image's Python is 3.12, one that no other part of Sluice is tested with: nodes of other images cannot join its cluster.
ARG BASE=vllm/vllm-openai-rocm:v0.32.0
# hadolint ignore=DL3006
FROM ${BASE}

SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ iproute2 numactl procps python3-dev tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home --shell /bin/bash --groups video sluice \
    && install --directory --owner sluice --mode 755 /opt/sluice \
    && install --directory --owner sluice --mode 700 /sluice

USER 1000
WORKDIR /opt/sluice
# none: start_cluster.sh takes .venv as it is made here.
ENV SLUICE_LOCK=none \
    SLUICE_HOME=/sluice/home \
    PATH=/opt/sluice/.venv/bin:/opt/rocm/bin:/usr/local/bin:/usr/bin:/bin

ARG PIP_INDEX_URL
COPY --chown=1000 . .
# torch, vLLM and what hangs on them stay the image's; the rest has the versions of the CUDA lock.
# hadolint ignore=DL3013
RUN python3 -m venv --system-site-packages .venv \
    && grep -vE '^(torch|torchaudio|torchvision|torchcodec|triton|vllm|xformers|nvidia-|cuda-|flashinfer|numpy|setuptools)' \
        requirements-gpu.lock >/tmp/requirements \
    && .venv/bin/python -m pip install --no-cache-dir --no-deps --requirement /tmp/requirements \
    && .venv/bin/python -m pip install --no-cache-dir --no-deps --no-build-isolation --ignore-requires-python --editable . \
    && rm /tmp/requirements

VOLUME /sluice
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=300s --interval=30s --timeout=20s CMD ["python", "-m", "deploy.cluster", "healthy"]
ENTRYPOINT ["tini", "--", "deploy/start_cluster.sh", "--block"]
