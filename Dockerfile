# syntax=docker/dockerfile:1
# The node agent: no torch, no GPU. Build from the repository's root:
#   docker build -t mp-agent:0.1.0 .
# On another base with Python 3.11 or newer, such as a mirror's or a hardened one:
#   docker build --build-arg BASE=registry.example.com/python:3.12-slim -t mp-agent:0.1.0 .
# Runs with a read-only root filesystem, given a writable /tmp and the shared memory of the job.
ARG BASE=python:3.11.13-slim-bookworm

FROM ${BASE} AS build
WORKDIR /source
COPY pyproject.toml constraints.txt hatch_build.py README.md LICENSE ./
COPY agent agent
COPY exporters exporters
COPY alerting alerting
COPY grafana/dashboards grafana/dashboards
COPY packaging packaging
RUN python -m venv /opt/mp-agent \
 && /opt/mp-agent/bin/pip install --no-cache-dir --constraint constraints.txt '.[otlp-grpc]'

FROM ${BASE}
COPY --from=build /opt/mp-agent /opt/mp-agent
ENV PATH=/opt/mp-agent/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 1000:1000
EXPOSE 9464
# For plain HTTP on the default port; give `docker run --health-cmd` where TLS or a port is set.
HEALTHCHECK --interval=30s --timeout=5s --start-period=20s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9464/healthz', timeout=4)"]
ENTRYPOINT ["mp-agent"]
CMD ["node"]
