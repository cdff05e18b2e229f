# TPU VMs and GKE node pools: libtpu is a Python package, the devices come from the host.
#   docker build -f docker/tpu.Dockerfile -t maxtext-like:tpu .
#   docker run --rm --privileged --net=host -v "$PWD/runs:/work/runs" maxtext-like:tpu train gemma4-tiny
FROM python:3.12-slim-bookworm
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
WORKDIR /opt/maxtext_like
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY tpu/xla_flags.yml tpu/xla_flags.yml
COPY src src
COPY maxtext_like maxtext_like
# The package of this folder has no version to pin.
# hadolint ignore=DL3013
RUN pip install '.[tpu,parquet,arrayrecord,zstd,vision,gcs,chat]'
WORKDIR /work
ENTRYPOINT ["maxtext-like"]
CMD ["--help"]
