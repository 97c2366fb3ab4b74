# The runner and all packages, installed from wheels; docs/slurm.md has the commands. The project has never built this as an
# image: tests/packaging/test_container.py runs the RUN lines in order in an empty environment, and then the job of CMD.
ARG PYTHON=3.12.14-slim-bookworm
ARG DIGEST=sha256:782412e85d0f0984994c290652577d4018aff08145c85b262bb63dc0c7522254

FROM python:${PYTHON}@${DIGEST} AS build
# for CPUs: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH_INDEX=https://pypi.org/simple
COPY . /src
RUN bash /src/scripts/container.sh install /src /opt/forge "$TORCH_INDEX"

FROM python:${PYTHON}@${DIGEST}
COPY scripts/container.sh /opt/container.sh
RUN bash /opt/container.sh compiler && useradd --create-home --uid 1000 forge
COPY --from=build /opt/forge /opt/forge
ENV PATH=/opt/forge/bin:$PATH
USER 1000
WORKDIR /home/forge
RUN forge-train --version
CMD ["forge-train", "run", "/opt/forge/debug.toml"]
