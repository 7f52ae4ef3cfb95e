# syntax=docker/dockerfile:1
# The service. The hook goes into vLLM's own image: target `vllm`.
ARG PYTHON=3.11.13-slim-bookworm
ARG VLLM=v0.32.0

FROM python:${PYTHON} AS build
WORKDIR /src
RUN pip install --no-cache-dir "hatchling==1.27.0"
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY guard guard
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM vllm/vllm-openai:${VLLM} AS vllm
COPY --from=build /wheels /tmp/wheels
RUN pip install --no-cache-dir --no-deps /tmp/wheels/*.whl && rm -r /tmp/wheels

FROM python:${PYTHON} AS service
RUN groupadd --gid 10001 kvguard \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/kvguard --shell /usr/sbin/nologin kvguard \
    && install -d -o 10001 -g 10001 -m 0700 /var/lib/kvguard
COPY requirements/service.txt /tmp/service.txt
RUN pip install --no-cache-dir --require-hashes -r /tmp/service.txt && rm /tmp/service.txt
COPY --from=build /wheels /tmp/wheels
RUN pip install --no-cache-dir --no-deps /tmp/wheels/*.whl && rm -r /tmp/wheels
USER 10001:10001
ENV PYTHONUNBUFFERED=1 KVGUARD_SERVE_STATE_DIR=/var/lib/kvguard
VOLUME /var/lib/kvguard
EXPOSE 8420
HEALTHCHECK --interval=10s --timeout=4s --start-period=20s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8420/livez', timeout=3)"]
ENTRYPOINT ["kvguard"]
CMD ["serve"]
