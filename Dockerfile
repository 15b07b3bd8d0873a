# docker build -t dlrm . && docker run --rm -it -v "$PWD/data:/data" dlrm
FROM python:3.12-slim-bookworm
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ make openjdk-17-jre-headless \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /workspace/dlrm
COPY . .
RUN make venv
ENV PATH=/workspace/dlrm/.venv/bin:$PATH
CMD ["make", "demo"]
