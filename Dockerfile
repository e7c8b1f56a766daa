# The node agent: no torch, no GPU. Build from the repository's root:
#   docker build -t mp-agent:0.1.0 .
# Runs with a read-only root filesystem, given a writable /tmp and the shared memory of the job.
FROM python:3.11.13-slim-bookworm AS build
WORKDIR /source
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY agent agent
COPY exporters exporters
COPY alerting alerting
COPY grafana/dashboards grafana/dashboards
# The package's dependencies but torch, which only the probe in the trainer needs.
RUN python - <<'LIST' > /tmp/requirements.txt
import tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
wanted = [*project["dependencies"], *project["optional-dependencies"]["otlp"]]
print("\n".join(item for item in wanted if not item.startswith("torch")))
LIST
RUN python -m venv /opt/mp-agent \
 && /opt/mp-agent/bin/pip install --no-cache-dir --requirement /tmp/requirements.txt \
 && /opt/mp-agent/bin/pip install --no-cache-dir --no-deps .

FROM python:3.11.13-slim-bookworm
COPY --from=build /opt/mp-agent /opt/mp-agent
ENV PATH=/opt/mp-agent/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 1000:1000
EXPOSE 9464
# For plain HTTP on the default port; give `docker run --health-cmd` where TLS or a port is set.
HEALTHCHECK --interval=30s --timeout=5s --start-period=20s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9464/healthz', timeout=4)"]
ENTRYPOINT ["mp-agent"]
CMD ["node"]
