# The service without the training side: PyTorch alone would make the image ten times as large.
# `make compose-check` runs what stands here by hand where there is no container engine.

FROM python:3.11.14-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml constraints.txt ./
# The packages of the extras `server` and `postgres`, but not the package itself, whose base dependency is PyTorch.
RUN python -m venv --without-pip /opt/tsemon && python -c "import tomllib; extras = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; print(*extras['server'], *extras['postgres'], sep='\n')" > requirements.txt && python -m pip --python /opt/tsemon install --constraint constraints.txt --requirement requirements.txt
COPY . .
RUN python -m pip install --constraint constraints.txt hatchling && python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist . && python -m pip --python /opt/tsemon install --no-deps --no-index dist/*.whl

FROM python:3.11.14-slim-bookworm
# pg_dump and pg_restore, for `tsemon admin backup` and `restore`: of the version of docker-compose.yml's PostgreSQL.
RUN apt-get update && apt-get install --yes --no-install-recommends postgresql-client-15 && rm -rf /var/lib/apt/lists/*
# Whoever makes a token writes it to a volume that is mounted on /run/secrets, as the user who will read it.
RUN groupadd --gid 10001 tsemon && useradd --uid 10001 --gid tsemon --home-dir /var/lib/tsemon --create-home --shell /usr/sbin/nologin tsemon && install --directory --mode 1777 /run/secrets
COPY --from=build /opt/tsemon /opt/tsemon
ENV PATH=/opt/tsemon/bin:$PATH TSEMON_HOST=0.0.0.0 TSEMON_PORT=8731 TSEMON_DATABASE=sqlite:////var/lib/tsemon/tsemon.db
USER 10001:10001
WORKDIR /var/lib/tsemon
EXPOSE 8731
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 CMD ["python", "-c", "import http.client as h; c = h.HTTPConnection('127.0.0.1', 8731, timeout=4); c.request('GET', '/readyz'); exit(c.getresponse().status != 200)"]
ENTRYPOINT ["tsemon"]
CMD ["serve"]
