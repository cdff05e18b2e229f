# NVIDIA GPUs: JAX brings CUDA, cuDNN and NCCL as Python packages, so the image needs only the host's driver.
#   docker build -f docker/gpu.Dockerfile -t maxtext-like:gpu .
#   docker run --rm --gpus all --shm-size 8g -v "$PWD/runs:/work/runs" maxtext-like:gpu train gemma4-tiny
FROM python:3.12-slim-bookworm
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_MEM_FRACTION=0.92
WORKDIR /opt/maxtext_like
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY tpu/xla_flags.yml tpu/xla_flags.yml
COPY src src
COPY maxtext_like maxtext_like
# The package of this folder has no version to pin.
# hadolint ignore=DL3013
RUN pip install '.[cuda,parquet,arrayrecord,zstd,vision,gcs,s3,chat]'
WORKDIR /work
ENTRYPOINT ["maxtext-like"]
CMD ["--help"]
