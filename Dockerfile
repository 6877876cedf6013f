# docker build -t quire . && docker run -p 8000:8000 -e QUIRE_API_KEY=secret -v /models:/models quire /models/NAME
# Without a model, the bundled demo model. Everyone who reaches the port needs the key. `make image` tries the same root
# without docker. For GPUs, and what else needs PyTorch: --build-arg EXTRAS='[torch]'.
FROM python:3.11-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY csrc csrc
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim
ARG EXTRAS=
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    pip install --no-cache-dir --no-compile -c /constraints.txt "$(echo /wheels/quire-*.whl)$EXTRAS" \
 && useradd --create-home --uid 1000 quire
USER quire
ENV QUIRE_HOST=0.0.0.0
EXPOSE 8000
HEALTHCHECK CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
# The shell form would stand between the server and SIGTERM.
ENTRYPOINT ["quire", "serve"]
