# docker build -t dlrm . && docker run --rm -it -v "$PWD/data:/data" dlrm
# With nvcc, so that the operators for GPUs are compiled into the image:
# docker build -t dlrm-gpu --build-arg IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04 .
ARG IMAGE=python:3.12-slim-bookworm
FROM $IMAGE
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ make openjdk-17-jre-headless \
 && { command -v python3 || apt-get install -y --no-install-recommends python3-dev python3-venv; } \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /workspace/dlrm
COPY . .
RUN make venv
ENV PATH=/workspace/dlrm/.venv/bin:$PATH
CMD ["make", "demo"]
