# One image for every service: `docker run IMAGE python -m ferryman_<service>`.
#
#   docker build -t ferryman .
#
# or of a wheel that lies in dist/:
#
#   docker build -t ferryman --build-arg FERRYMAN=./dist/ferryman-0.1.0-py3-none-any.whl .
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
print(*project['dependencies'], *project['optional-dependencies']['s3'], sep='\n')" > requirements.txt \
    && /opt/ferryman/bin/pip install --quiet --no-compile --requirement requirements.txt
COPY . .
# This tree, or a wheel in it.
ARG FERRYMAN=.
RUN /opt/ferryman/bin/pip install --quiet --no-compile "${FERRYMAN}[s3]" \
    && mkdir /models \
    && ln -s /opt/ferryman/lib/python3*/site-packages/ferryman_cli/demo_model /models/demo
# tools/left_out.toml says what stays behind, and why. Bytecode is kept of the modules that services
# import: no container can write any, and that of all modules of torch and its like is 170 MB. numba
# asks for OpenMP by a name that torch's own library does not have. Symbols that debuggers alone read
# are cut off before, so that those imports try the libraries as they are left.
RUN cd /opt/ferryman/lib/python3*/site-packages \
    && /opt/ferryman/bin/python /src/tools/leave_out.py /src/tools/left_out.toml \
    && /opt/ferryman/bin/python /src/tools/strip_libraries.py . \
    && mkdir /opt/ferryman/openmp \
    && ln -s "$PWD/torch/lib/libgomp.so.1" /opt/ferryman/openmp/libgomp.so.1.0.0 \
    && for module in router.service prefill.service decode.service both.service hostcache.service \
        cli.app; do \
        /opt/ferryman/bin/python -c "import ferryman_$module" || exit 1; \
    done

FROM ${BASE}
# Numbers, so that a volume can name them; the cache folder is for loops compiled on first use.
RUN for reader in key router prefill decode both hostcache observer metrics nats redis authority; do \
        mkdir -p -m 700 /etc/ferryman/$reader; \
    done \
    && mkdir -p -m 700 /var/lib/ferryman \
    && mkdir -p /var/cache/ferryman \
    && chown -R 10001:10001 /etc/ferryman /var/cache/ferryman /var/lib/ferryman
COPY --from=build /opt/ferryman /opt/ferryman
COPY --from=build /models /models
ENV PATH=/opt/ferryman/bin:$PATH \
    LD_LIBRARY_PATH=/opt/ferryman/openmp \
    NUMBA_CACHE_DIR=/var/cache/ferryman \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
CMD ["ferryman", "--help"]
