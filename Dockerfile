# docker build -t quire . && docker run -p 8000:8000 -e QUIRE_API_KEY=secret -v /models:/models quire /models/NAME
# Without a model, the bundled demo model. Everyone who reaches the port needs the key.
FROM python:3.11-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends make g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
COPY csrc csrc
RUN python -m venv /opt/quire \
 && PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu /opt/quire/bin/pip install --no-cache-dir -c constraints.txt .

FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home quire
COPY --from=build /opt/quire /opt/quire
USER quire
ENV PATH=/opt/quire/bin:$PATH QUIRE_HOST=0.0.0.0
EXPOSE 8000
HEALTHCHECK CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
# The shell form would stand between the server and SIGTERM.
ENTRYPOINT ["quire", "serve"]
