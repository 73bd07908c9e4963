# Images: `gateway` (engine and HTTP in one process, or HTTP in front of Triton servers), `gateway-gpu` (the same on a GPU), `triton` (a worker), `loadtest`.
# docs/deployment.md tells how to build and run them, their sizes, and the rules that tests/deploy/test_image_rules.py checks.
ARG BASE_IMAGE=debian:bookworm-slim
ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver:24.12-py3

# Everything Python, with a compiler; only /opt/venv leaves this stage.
FROM ${BASE_IMAGE} AS gateway-packages
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
RUN apt-get update -qq \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends ca-certificates g++ python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
ARG TORCH_VERSION=2.13.0
ARG TORCH_PIP_ARGS=
COPY deploy/image/packages deploy/image/build.lock deploy/image/requirements.lock deploy/image/
RUN deploy/image/packages "${TORCH_VERSION}" ${TORCH_PIP_ARGS}
COPY LICENSE README.md pyproject.toml ./
COPY nsm_core nsm_core
COPY service service
COPY nsm_lab nsm_lab
COPY deploy/image/product deploy/image/
RUN deploy/image/product

# The same for the Python of Triton's image, which is another one.
FROM ${TRITON_IMAGE} AS triton-packages
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
RUN apt-get update -qq \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends ca-certificates g++ python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
ARG TORCH_VERSION=2.13.0
ARG TRITON_TORCH_PIP_ARGS=
COPY deploy/image/packages deploy/image/build.lock deploy/image/requirements.lock deploy/image/
RUN deploy/image/packages "${TORCH_VERSION}" ${TRITON_TORCH_PIP_ARGS}
COPY LICENSE README.md pyproject.toml ./
COPY nsm_core nsm_core
COPY service service
COPY nsm_lab nsm_lab
COPY deploy/image/product deploy/image/
RUN deploy/image/product

FROM ${TRITON_IMAGE} AS triton
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# The compiler stays: on a GPU the kernels are compiled when the model is loaded, for the GPU that is there, and their launchers
# are C with Python's headers.
RUN apt-get update -qq \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends gcc libc6-dev python3 python3-dev \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 nsm \
    && useradd --uid 10001 --gid nsm --no-create-home --home-dir /tmp --shell /usr/sbin/nologin nsm
COPY --from=triton-packages /opt/venv /opt/venv
COPY model_repository /models
COPY deploy/triton/launch deploy/triton/probe /opt/nsm/
# The backend's process embeds Python: it finds the environment by PATH, or else by PYTHONPATH. Compiled kernels go to the one place that is writable.
ENV PATH=/opt/venv/bin:/opt/tritonserver/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONPATH=/opt/venv/packages \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    TRITON_CACHE_DIR=/tmp/kernels
# Last, as it differs from commit to commit
ARG TRITON_IMAGE
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="nsm-serve triton" \
      org.opencontainers.image.description="A Triton server with the worker of nsm-serve" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${TRITON_IMAGE}"
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000 8001 8002
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=6s --start-period=120s --retries=2 CMD ["/opt/nsm/probe", "readiness"]
# Not the vendor's entry point: it prints a banner and writes to the home directory.
ENTRYPOINT ["/opt/nsm/launch"]

FROM ${BASE_IMAGE} AS gateway
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
RUN apt-get update -qq \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log \
    && groupadd --gid 10001 nsm \
    && useradd --uid 10001 --gid nsm --no-create-home --home-dir /data --shell /usr/sbin/nologin nsm \
    && install -d -m 700 -o nsm -g nsm /data
COPY --from=gateway-packages /opt/venv /opt/venv
COPY deploy/image/healthy /opt/nsm/
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    NSM_HOST=0.0.0.0 \
    NSM_DATA_DIR=/data
ARG BASE_IMAGE
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="nsm-serve gateway" \
      org.opencontainers.image.description="Serves recurrent language models whose conversations are small, durable states" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"
USER 10001:10001
WORKDIR /data
VOLUME ["/data"]
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 CMD ["/opt/nsm/healthy"]
ENTRYPOINT ["nsm"]
CMD ["serve"]

# The same with what compiles the kernels for the GPU that is there, at the start; TORCH_PIP_ARGS must name a build of torch for GPUs.
FROM gateway AS gateway-gpu
USER 0:0
RUN apt-get update -qq \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    TRITON_CACHE_DIR=/tmp/kernels
LABEL org.opencontainers.image.title="nsm-serve gateway-gpu" \
      org.opencontainers.image.description="The gateway of nsm-serve with its model on a GPU"
USER 10001:10001
HEALTHCHECK --interval=5s --timeout=5s --start-period=120s --retries=3 CMD ["/opt/nsm/healthy"]

# A load test against gateways that run elsewhere (docs/load-testing.md).
FROM gateway-packages AS loadtest-packages
COPY deploy/image/loadtest.lock deploy/image/
RUN /opt/build/bin/pip --python /opt/venv/bin/python install --quiet --no-cache-dir --require-hashes -r deploy/image/loadtest.lock

FROM gateway AS loadtest
LABEL org.opencontainers.image.title="nsm-serve loadtest" \
      org.opencontainers.image.description="Load tests of nsm-serve, by Locust"
USER 0:0
RUN install -d -m 700 -o nsm -g nsm /report
COPY --from=loadtest-packages /opt/venv /opt/venv
COPY loadtests /opt/nsm/loadtests
ENV MPLCONFIGDIR=/tmp
USER 10001:10001
WORKDIR /opt/nsm
VOLUME ["/report"]
HEALTHCHECK NONE
ENTRYPOINT ["python", "-m", "loadtests"]
CMD ["--profile", "short", "--url", "http://proxy:8080", "--out", "/report"]
