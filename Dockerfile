# llamajax for NVIDIA GPUs: docker build -t llamajax . && docker run --rm --gpus all llamajax doctor
# docs/how-to/docker.md has the options that runs need.

# The `base` flavour holds the CUDA runtime and what the container toolkit reads. cuDNN, NCCL and the rest come from the lock,
# in the versions that jax was built for; those of the `runtime` flavour would only be a second copy.
FROM nvidia/cuda:13.0.2-base-ubuntu24.04 AS build

# hadolint ignore=DL3008 # Ubuntu removes old versions of packages, so that a pinned one cannot be installed later
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3.12 -m venv /opt/llamajax
ENV PATH=/opt/llamajax/bin:$PATH

WORKDIR /build
COPY requirements.cuda13.lock ./
RUN pip install --no-cache-dir --require-hashes --only-binary :all: -r requirements.cuda13.lock
# The build needs setuptools alone, and no network besides it.
RUN echo "setuptools==84.2.1 --hash=sha256:ca140b45d5325a9478f880e351484f62fef15f336462e449ca0c03c873d589c2" > build.lock \
    && pip install --no-cache-dir --require-hashes --only-binary :all: -r build.lock
COPY pyproject.toml README.md LICENSE CHANGELOG.md ./
COPY configs configs
COPY docs docs
COPY converters converters
COPY llamajax llamajax
RUN pip install --no-cache-dir --no-deps --no-build-isolation --no-index . \
    && pip uninstall -y setuptools pip

FROM nvidia/cuda:13.0.2-base-ubuntu24.04

LABEL org.opencontainers.image.title="llamajax" \
      org.opencontainers.image.description="Train LLaMA-family models in JAX on NVIDIA GPUs" \
      org.opencontainers.image.version="0.2.0" \
      org.opencontainers.image.licenses="Apache-2.0"

# hadolint ignore=DL3008 # as above
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3.12 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 llamajax \
    && useradd --uid 10001 --gid 10001 --create-home llamajax \
    && install -d -o 10001 -g 10001 /work
COPY --from=build /opt/llamajax /opt/llamajax

ENV PATH=/opt/llamajax/bin:$PATH
# A number, which Kubernetes can tell from root.
USER 10001:10001
WORKDIR /work
ENTRYPOINT ["llamajax"]
