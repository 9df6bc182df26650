# minipaged serve in a container, on the CPU:
#   docker build -t minipaged --build-arg TORCH_INDEX=URL .     URL: PyTorch's CPU-only package index, see README
#   docker run --rm -p 127.0.0.1:8000:8000 minipaged            the bundled demo model
#   docker run --rm -p 127.0.0.1:8000:8000 -v qwen:/models -e MINIPAGED_API_KEY=secret minipaged serve Qwen/Qwen3-0.6B --host 0.0.0.0
# Number of threads and size of the KV pool follow the container's limits (--cpus, --memory).
FROM python:3.12-slim AS build
ARG TORCH_INDEX=
RUN apt-get update && apt-get install -y --no-install-recommends build-essential && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/minipaged
ENV PATH=/opt/minipaged/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} 'torch>=2.9,<2.14'
WORKDIR /src
COPY . .
RUN pip install .

FROM python:3.12-slim
RUN useradd --create-home --uid 10001 minipaged && mkdir /models && chown minipaged /models
COPY --from=build /opt/minipaged /opt/minipaged
ENV PATH=/opt/minipaged/bin:$PATH HF_HOME=/models PYTHONUNBUFFERED=1
USER minipaged
VOLUME /models
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=300s \
  CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["minipaged"]
CMD ["serve", "--host", "0.0.0.0"]
