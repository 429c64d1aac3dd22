# One image for every service: `docker run IMAGE python -m ferryman_<service>`.
#
#   docker build -t ferryman .
#
# BASE is any image with python3 (3.11 or newer, with venv) on its PATH. pip's indices can be given
# as build arguments, such as one that has torch without CUDA. Wheels that lie in wheels/ are looked
# at as well; with all of them there and PIP_NO_INDEX=1 the build needs no network.
ARG BASE=python:3.11-slim

FROM ${BASE} AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_NO_INDEX
ENV PIP_CONSTRAINT=/src/constraints.txt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_FIND_LINKS=/src/wheels \
    PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/ferryman
WORKDIR /src
# What is installed from others changes seldom: a layer of its own. (`whee[l]s` may be missing.)
COPY constraints.txt pyproject.toml ./
COPY constraints.txt whee[l]s wheels/
RUN /opt/ferryman/bin/python -c "import tomllib; \
project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print(*project['dependencies'], sep='\n')" > requirements.txt \
    && /opt/ferryman/bin/pip install --quiet --requirement requirements.txt
COPY . .
RUN /opt/ferryman/bin/pip install --quiet . \
    && mkdir /models \
    && ln -s /opt/ferryman/lib/python3*/site-packages/ferryman_cli/demo_model /models/demo

FROM ${BASE}
# Numbers, so that a volume can name them; the cache folder is for loops compiled on first use.
RUN mkdir -p /etc/ferryman /var/cache/ferryman /var/lib/ferryman \
    && chown 10001:10001 /etc/ferryman /var/cache/ferryman /var/lib/ferryman \
    && chmod 700 /etc/ferryman /var/lib/ferryman
COPY --from=build /opt/ferryman /opt/ferryman
COPY --from=build /models /models
ENV PATH=/opt/ferryman/bin:$PATH \
    NUMBA_CACHE_DIR=/var/cache/ferryman \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
CMD ["ferryman", "--help"]
