"""docker-compose.yml and the Dockerfile: they say what they should, and the services start with their commands.

The services run as ordinary processes of this machine, in one folder. Addresses are changed to free ports, and the paths of
volumes to this folder. Not run: Grafana, and the images of others.
"""

import importlib.resources
import json
import os
import pwd
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import httpx
import jsonschema
import pytest
import yaml

import tsemon
from tests.ports import free_port
from tests.service import ServiceProcess

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SECRETS = {"POSTGRES_PASSWORD": "postgres-0123456789", "GRAFANA_PASSWORD": "grafana-0123456789"}
PINNED = re.compile(r"[\w./-]+:v?\d+\.\d+(\.\d+)?(-[\w.-]+)?")
SCHEMA = json.loads(
    (importlib.resources.files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json").read_text()
)


def filled_in(value):
    """Replace `${NAME:?reason}` by a password, and `${NAME:-default}` by the default."""
    text = re.sub(r"\$\{(\w+):\?[^}]*\}", lambda found: SECRETS[found[1]], json.dumps(value))
    return json.loads(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))


SERVICES = filled_in(COMPOSE["services"])


def mounts(name):
    """{path in the container: volume, or path in this repository}"""
    return {target: source for source, target, *_ in (text.split(":") for text in SERVICES[name].get("volumes", ()))}


class TestTheComposeFile:
    def test_has_the_schema_of_the_compose_specification(self):
        jsonschema.validate(COMPOSE, SCHEMA)

    @pytest.mark.parametrize("wrong", [{"imagee": "x"}, {"healthcheck": {"test": 3}}])
    def test_would_not_have_it_with_a_mistake(self, wrong):
        server = COMPOSE["services"]["server"] | wrong
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(COMPOSE | {"services": {"server": server}}, SCHEMA)

    def test_names_volumes_that_are_used(self):
        used = {source for name in SERVICES for source in mounts(name).values() if not source.startswith(".")}
        assert used == COMPOSE["volumes"].keys()

    def test_takes_every_password_from_outside_and_refuses_to_start_without(self):
        values = [
            value
            for service in COMPOSE["services"].values()
            for name, value in service.get("environment", {}).items()
            if re.search("PASSWORD|SECRET|TOKEN$", name)
        ]
        found = [re.fullmatch(r"\$\{(\w+):\?[^}]+\}", value) for value in values]
        assert all(found), values
        assert {password[1] for password in found} == SECRETS.keys()

    def test_makes_an_image_of_this_version(self):
        assert SERVICES["server"]["image"] == f"tsemon:{tsemon.__version__}"
        kustomization = yaml.safe_load((ROOT / "deploy/kubernetes/kustomization.yaml").read_text())
        assert kustomization["images"][0]["newTag"] == tsemon.__version__

    def test_lets_users_name_their_own_configuration_of_alertmanager(self):
        name, default = "ALERTMANAGER_CONFIG", "./clients/prometheus/alertmanager.yml"
        mounted = COMPOSE["services"]["alertmanager"]["volumes"]
        assert f"${{{name}:-{default}}}:/etc/alertmanager/alertmanager.yml:ro" in mounted


@pytest.mark.parametrize("name", SERVICES)
class TestEachService:
    def test_has_an_image_of_one_version(self, name):
        assert PINNED.fullmatch(SERVICES[name]["image"])

    def test_cannot_write_to_its_image_or_gain_rights(self, name):
        assert SERVICES[name]["read_only"] is True
        assert "no-new-privileges:true" in SERVICES[name]["security_opt"]
        assert SERVICES[name].get("cap_drop") == (None if name == "postgres" else ["ALL"])

    def test_has_bounds_on_its_memory_and_its_log(self, name):
        assert "mem_limit" in SERVICES[name]
        assert {"max-size", "max-file"} <= SERVICES[name]["logging"]["options"].keys()

    def test_listens_on_this_machine_alone_by_default(self, name):
        assert all(port.startswith("127.0.0.1:") for port in SERVICES[name].get("ports", ()))

    def test_mounts_files_that_exist(self, name):
        for source in mounts(name).values():
            assert not source.startswith(".") or (ROOT / source).exists()


GRAFANA = [
    yaml.safe_load(path.read_text())
    for source in mounts("grafana").values()
    if source.startswith(".")
    for path in (ROOT / source).rglob("*.yaml")
]


class TestGrafana:
    def test_has_the_variables_that_its_files_name(self):
        named = set(re.findall(r"\$(\w+)", json.dumps(GRAFANA))) - {"__file"}
        assert named
        assert named <= SERVICES["grafana"]["environment"].keys()

    def test_reads_secrets_that_another_service_writes(self):
        (path,) = map(Path, re.findall(r"\$__file\{([^}]+)\}", json.dumps(GRAFANA)))
        volume = mounts("grafana")[str(path.parent)]
        assert str(path) in SERVICES["grafana-token"]["command"]
        assert mounts("grafana-token")[str(path.parent)] == volume

    def test_reads_dashboards_from_a_mounted_folder(self):
        (folder,) = (provider["options"]["path"] for file in GRAFANA for provider in file.get("providers", ()))
        assert list((ROOT / mounts("grafana")[folder]).glob("*.json"))

    def test_asks_services_of_this_file(self):
        urls = [value for name, value in SERVICES["grafana"]["environment"].items() if name.startswith("TSEMON_")]
        assert {re.fullmatch(r"http://(\w+):\d+", url)[1] for url in urls} == {"server", "prometheus"}


class TestTheDockerfile:
    def test_starts_from_images_of_one_version(self):
        images = re.findall(r"^FROM (\S+)", DOCKERFILE, re.M)
        assert images
        assert all(map(PINNED.fullmatch, images))

    def test_runs_the_server_as_a_user_without_rights(self):
        assert re.findall(r"^USER (.+)$", DOCKERFILE, re.M) == ["10001:10001"]
        assert last("ENTRYPOINT") == ["tsemon"]
        assert "TSEMON_HOST=0.0.0.0" in DOCKERFILE

    def test_sees_the_files_that_the_package_is_built_from_and_no_others(self):
        first, *patterns = re.findall(r"^[^#\n].*", (ROOT / ".dockerignore").read_text(), re.M)
        assert first == "*"
        wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
        built = {"server" if name.startswith("server/") else name for name in wheel["packages"]} | {
            *wheel["force-include"]
        }
        assert {name[1:] for name in patterns if name[0] == "!"} == built | {
            "pyproject.toml",
            "constraints.txt",
            "README.md",
            "LICENSE",
        }
        assert {name for name in patterns if name[0] != "!"} == {"**/__pycache__", "**/*.pyc"}

    @pytest.mark.thorough
    def test_installs_a_server_that_serves_without_pytorch(self, tmp_path):
        for name in re.findall(r"^!(.*)", (ROOT / ".dockerignore").read_text(), re.M):
            target = tmp_path / "src" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(ROOT / name, target) if (ROOT / name).is_dir() else shutil.copy(ROOT / name, target)
        (install,) = re.findall(r"^RUN (python -m venv .*)$", DOCKERFILE, re.M)
        done = subprocess.run(
            ["sh", "-ec", install.replace("/opt/tsemon", str(tmp_path / "installed"))],
            cwd=tmp_path / "src",
            env=environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        python = tmp_path / "installed/bin/python"
        with ServiceProcess(tmp_path / "runs.db", python=python) as service:
            assert httpx.get(f"{service.url}/readyz", trust_env=False).status_code == 200
        code = "import psycopg, importlib.util as u; print(u.find_spec('torch'))"
        assert subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True).stdout == "None\n"


def last(instruction):
    """Return the list that ends the last instruction of this kind in the Dockerfile."""
    return json.loads(re.findall(rf"^{instruction} [^[]*(\[.*\])$", DOCKERFILE, re.M)[-1])


def environment(**variables):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TSEMON_", "PG", "PYTHONPATH"))}
    return kept | variables


POSTGRES = max(
    Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parts[-2]), default=Path("/usr/bin")
)
PROGRAMS = {
    "tsemon": [sys.executable, "-m", "tsemon"],
    "postgres": [str(POSTGRES / "postgres")],
    "prom/prometheus": ["prometheus"],
    "prom/alertmanager": ["prometheus-alertmanager"],
}
PORTS = {"server": "8731", "postgres": "5432", "prometheus": "9090", "alertmanager": "9093"}
MISSING = [program for program, *_ in PROGRAMS.values() if not shutil.which(program)]


class Stack:
    """The services of the file, except Grafana, as processes with their files in `folder`."""

    def __init__(self, folder):
        self.folder = folder
        self.ports = {name: str(free_port()) for name in PORTS}
        self.processes, self.done, self.was_healthy = {}, {}, {}

    def start(self):
        """Start every service when those that it depends on are healthy or done."""
        for name in TopologicalSorter(
            {name: spec.get("depends_on", ()) for name, spec in SERVICES.items()}
        ).static_order():
            if name == "grafana":
                continue
            self.provide_mounts(name)
            if SERVICES[name].get("healthcheck", {}).get("disable"):
                self.done[name] = [self.output_of(self.command(name), name) for _ in range(2)]
                continue
            self.was_healthy[name] = self.is_healthy(name)
            if name == "postgres":
                self.make_database()
            self.launch(name)
            self.wait_for(lambda name=name: self.is_healthy(name), name)

    def provide_mounts(self, name):
        for target, source in mounts(name).items():
            inside = self.inside(name, target)
            if not source.startswith("."):
                inside.mkdir(parents=True, exist_ok=True)
                continue
            for path in [ROOT / source] if (ROOT / source).is_file() else (ROOT / source).iterdir():
                copy = inside if (ROOT / source).is_file() else inside / path.name
                copy.parent.mkdir(parents=True, exist_ok=True)
                text = self.here(path.read_text(), name)
                copy.write_text(text.replace(": 15s", ": 1s").replace(": 10s", ": 1s"))  # intervals and timeouts

    def inside(self, name, target):
        source = mounts(name)[target]
        return self.folder / name / target[1:] if source.startswith(".") else self.folder / "volumes" / source

    def here(self, text, name):
        """Replace addresses and mounted paths by those of this machine."""
        for service, port in PORTS.items():
            text = re.sub(rf"\b({service}|127\.0\.0\.1):{port}\b", f"127.0.0.1:{self.ports[service]}", text)
        text = text.replace("@postgres/", f"@127.0.0.1:{self.ports['postgres']}/")
        for target in sorted(mounts(name), key=len, reverse=True):
            text = re.sub(rf"(?<![\w.]){target}\b", str(self.inside(name, target)), text)
        return text

    def command(self, name):
        image = SERVICES[name]["image"].partition(":")[0]
        command = SERVICES[name].get("command", last("CMD") if image == "tsemon" else [])
        address = f"--web.listen-address=127.0.0.1:{self.ports.get(name)}"
        more = [address] if image.startswith("prom/") else []
        if name == "postgres":
            (data,) = mounts(name)
            more = ["-D", str(self.inside(name, data)), "-p", self.ports[name], "-k", str(self.folder / "volumes")]
        return [*PROGRAMS[image], *(self.here(word, name) for word in command), *more]

    def environment(self, name):
        given = {key: self.here(str(value), name) for key, value in SERVICES[name].get("environment", {}).items()}
        image = dict(word.split("=", 1) for word in shlex.split(" ".join(re.findall(r"^ENV (.+)$", DOCKERFILE, re.M))))
        own = {**image, "TSEMON_PORT": self.ports["server"]} if SERVICES[name]["image"].startswith("tsemon:") else {}
        path = f"{POSTGRES}:{os.environ['PATH']}"
        return environment(**own | given | {"PGPORT": self.ports["postgres"], "PATH": path, "HOME": str(self.folder)})

    def spawn(self, command, name, **options):
        user = pwd.getpwnam("postgres").pw_name if name == "postgres" and os.geteuid() == 0 else None
        rights = {} if user is None else {"user": user, "group": user, "extra_groups": ()}
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment(name), stdin=subprocess.DEVNULL, **rights, **options
        )

    def launch(self, name):
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = self.spawn(self.command(name), name, stdout=log, stderr=log)

    def output_of(self, command, name):
        done = self.spawn(command, name, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        printed, _ = done.communicate(timeout=60)
        assert done.returncode == 0, printed
        return printed

    def make_database(self):
        """Do what the entrypoint of PostgreSQL's image does in an empty folder."""
        given, (data,) = SERVICES["postgres"]["environment"], mounts("postgres")
        folder, password = self.inside("postgres", data), self.folder / "volumes/password"
        password.write_text(given["POSTGRES_PASSWORD"])
        if os.geteuid() == 0:
            for path in (self.folder / "volumes", folder, password):
                shutil.chown(path, "postgres", "postgres")
        user, options = given["POSTGRES_USER"], shlex.split(given["POSTGRES_INITDB_ARGS"])
        arguments = [f"--pgdata={folder}", f"--username={user}", f"--pwfile={password}", "--no-sync", *options]
        self.output_of([POSTGRES / "initdb", *arguments], "postgres")
        single = [POSTGRES / "postgres", "--single", "-D", folder, "postgres"]
        password.write_text(f"CREATE DATABASE {given['POSTGRES_DB']}\n")
        self.output_of(["sh", "-c", '"$@" < "$0"', password, *single], "postgres")

    def is_healthy(self, name):
        if name == "server":
            words = [sys.executable, *last("HEALTHCHECK")[1:]]
            words = [word.replace(PORTS[name], self.ports[name]) for word in words]
        else:
            kind, *command = SERVICES[name]["healthcheck"]["test"]
            assert kind == "CMD"
            words = [self.here(word, name) for word in command]
        with self.spawn(words, name, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as check:
            return check.wait() == 0

    def wait_for(self, is_so, name, timeout_s=60):
        deadline = time.monotonic() + timeout_s
        while not is_so():
            assert self.processes[name].poll() is None, self.log(name)
            assert time.monotonic() < deadline, self.log(name)
            time.sleep(0.1)

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def stop(self):
        for process in reversed(self.processes.values()):
            process.terminate()
            process.wait(60)

    def token(self, name):
        (volume,) = mounts(f"{name}-token").values()
        (path,) = (self.folder / "volumes" / volume).iterdir()
        return {"Authorization": f"Bearer {path.read_text().strip()}"}

    def get(self, name, path, **options):
        return httpx.get(f"http://127.0.0.1:{self.ports[name]}{path}", trust_env=False, timeout=30, **options)

    def query(self, path, **parameters):
        return self.get("prometheus", f"/api/v1/{path}", params=parameters).json()["data"]


@pytest.fixture(scope="module")
def stack():
    folder = Path(tempfile.mkdtemp(prefix="tsemon-compose-"))
    folder.chmod(0o755)  # PostgreSQL runs as another user than root
    stack = Stack(folder)
    try:
        stack.start()
        yield stack
    finally:
        stack.stop()
        shutil.rmtree(folder)


@pytest.mark.skipif(
    bool(MISSING) and "CI" not in os.environ,
    reason=f"not installed: {', '.join(MISSING)}; scripts/system_parts.py does it where it can",
)
class TestTheServices:
    def test_are_healthy_when_they_run_and_not_before(self, stack):
        assert stack.was_healthy == {"postgres": False, "server": False, "alertmanager": False, "prometheus": False}

    def test_make_each_token_once(self, stack):
        assert stack.done.keys() == {"prometheus-token", "grafana-token"}
        for first, second in stack.done.values():
            assert "valid token already" not in first
            assert "valid token already" in second

    def test_answer_whoever_has_a_token(self, stack):
        by_name = {"Host": f"server:{PORTS['server']}"}
        assert stack.get("server", "/api/v1/runs").status_code == 401
        assert stack.get("server", "/metrics").status_code == 401
        assert stack.get("server", "/api/v1/runs", headers=by_name | stack.token("grafana")).json()["runs"] == []
        assert stack.get("server", "/metrics", headers=by_name | stack.token("prometheus")).status_code == 200

    def test_scrape_the_server_and_know_alertmanager(self, stack):
        def is_scraped():
            found = stack.query("query", query='up{job="tsemon"}')["result"]
            return [sample["value"][1] for sample in found] == ["1"]

        stack.wait_for(is_scraped, "prometheus")
        stack.wait_for(lambda: stack.query("alertmanagers")["activeAlertmanagers"], "prometheus")
        rules = [rule for group in stack.query("rules")["groups"] for rule in group["rules"]]
        assert rules
        assert all(rule["health"] != "err" for rule in rules)

    def test_keep_secrets_out_of_their_logs(self, stack):
        secrets = [*SECRETS.values(), *(stack.token(name)["Authorization"][7:] for name in ("grafana", "prometheus"))]
        for name in stack.processes:
            assert not any(secret in stack.log(name) for secret in secrets)

    @pytest.mark.thorough
    def test_are_healthy_again_when_the_database_is_back(self, stack):
        stack.processes["postgres"].send_signal(signal.SIGINT)
        stack.processes["postgres"].wait(60)
        assert not stack.is_healthy("server")
        stack.launch("postgres")
        stack.wait_for(lambda: stack.is_healthy("server"), "server")
