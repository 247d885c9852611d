# The server, without PyTorch, which would make the image ten times as large.
# `make compose-check` runs the installation and the server on a machine without a container engine.

FROM python:3.11.14-slim-bookworm AS build
WORKDIR /src
COPY . .
# The environment variable, unlike --constraint, also holds for what the wheel is built with.
RUN python -m venv --without-pip /opt/tsemon && PIP_CONSTRAINT=constraints.txt python -m pip --python /opt/tsemon install '.[server,postgres]'

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
