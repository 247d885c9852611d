"""Try docker-compose.yml and the Dockerfile by hand, where there is no container engine.

Both files are read, and what stands in them is done: the Dockerfile's steps; then each service with its command,
environment, user, volumes, read-only file system and dropped rights, in the order of its dependencies, until its
healthcheck passes. The programs are our own and Debian's PostgreSQL, Prometheus and Alertmanager. Not tried: Grafana, of
which the files are looked at; the images of others; apt-get.

It needs Linux and root: each service runs in a copy-on-write copy of this machine's file system, in which the paths of its
volumes are where the file says, and all of them in a network of their own, in which they have their names and ports.

    python scripts/compose_check.py
"""

from __future__ import annotations

import ctypes
import fcntl
import fnmatch
import importlib.resources
import json
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import yaml

ROOT = Path(__file__).parent.parent
COMPOSE, DOCKERFILE = ROOT / "docker-compose.yml", ROOT / "Dockerfile"
PASSWORDS = {"POSTGRES_PASSWORD": "postgres-0123456789", "GRAFANA_PASSWORD": "grafana-0123456789"}
"""What whoever starts it has to give."""
OURS = "tsemon"
"""The image that the Dockerfile makes."""
POSTGRES_BIN = max(
    Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parts[-2]), default=Path("/usr/bin")
)
START_S = 60.0
INSIDE = "TSEMON_COMPOSE_CHECK_INSIDE"
"""The folder to mount in, and the mounts of whoever started this: they must not be ours."""
CLONE_NEWNET = 0x40000000
PINNED = re.compile(r"[\w./-]+:v?\d+\.\d+(\.\d+)?(-[\w.-]+)?")
"""An image of one version, not of whichever is newest."""


class Failed(Exception):
    """What is wrong with the files."""


# What the files say


def interpolated(value: Any, environment: Mapping[str, str]) -> Any:
    """As compose fills in `$NAME`, `${NAME:-default}` and `${NAME:?reason}`."""
    if isinstance(value, dict):
        return {name: interpolated(item, environment) for name, item in value.items()}
    if isinstance(value, list):
        return [interpolated(item, environment) for item in value]
    return _VARIABLE.sub(lambda found: _variable(found, environment), value) if isinstance(value, str) else value


_VARIABLE = re.compile(r"\$(?:(?P<dollar>\$)|(?P<bare>\w+)|\{(?P<name>\w+)(?:(?P<sign>:[-?])(?P<text>[^}]*))?\})")


def _variable(found: re.Match[str], environment: Mapping[str, str]) -> str:
    if found["dollar"]:
        return "$"
    value = environment.get(found["bare"] or found["name"], "")
    if not value and found["sign"] == ":?":
        raise Failed(f"{found['name']} is not set: {found['text']}")
    return found["text"] if not value and found["sign"] == ":-" else value


def check_compose(raw: dict[str, Any]) -> None:
    """What can be said of the file without running anything."""
    schema = importlib.resources.files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json"
    try:
        jsonschema.validate(raw, json.loads(schema.read_text()))
    except jsonschema.ValidationError as error:
        raise Failed(f"docker-compose.yml is none: {error.json_path}: {error.message:.200}") from None
    for name in PASSWORDS:
        _check_is_refused(raw, PASSWORDS | {name: ""}, name)
    for name, service in raw["services"].items():
        _check_service(name, service)
    services = interpolated(raw, PASSWORDS)["services"]
    used = {volume.partition(":")[0] for service in services.values() for volume in service.get("volumes", ())}
    if unused := set(raw["volumes"]) - used:
        raise Failed(f"volumes that nothing uses: {', '.join(sorted(unused))}")


def _check_is_refused(raw: dict[str, Any], environment: Mapping[str, str], name: str) -> None:
    try:
        interpolated(raw, environment)
    except Failed as error:
        if name in str(error):
            return
    raise Failed(f"it should not start without {name}: write ${{{name}:?why}} wherever it stands")


def _check_service(name: str, service: dict[str, Any]) -> None:
    if not PINNED.fullmatch(service["image"]):
        raise Failed(f"{name}: expected an image of one version, got {service['image']}")
    if "no-new-privileges:true" not in service.get("security_opt", ()) or not service.get("read_only"):
        raise Failed(f"{name}: expected read_only and no-new-privileges")
    if not {"max-size", "max-file"} <= service.get("logging", {}).get("options", {}).keys():
        raise Failed(f"{name}: expected a log that is bounded, by max-size and max-file")
    if "mem_limit" not in service:
        raise Failed(f"{name}: expected a mem_limit")
    for port in service.get("ports", ()):
        if not re.match(r"(\$\{\w+:-)?127\.0\.0\.1:", str(port)):
            raise Failed(f"{name}: expected a port on 127.0.0.1 where nothing else is said, got {port}")
    for variable, value in service.get("environment", {}).items():
        if re.search("PASSWORD|SECRET|TOKEN$", variable) and not re.fullmatch(r"\$\{\w+:\?[^}]+\}", str(value)):
            raise Failed(f"{name}: expected {variable} from outside, as in ${{NAME:?why}}, got {value}")
    for mounted in interpolated(service.get("volumes", []), PASSWORDS):
        source = mounted.partition(":")[0]
        if source.startswith(".") and not (ROOT / source).exists():
            raise Failed(f"{name}: mounts {source}, which is not there")


@dataclass
class Stage:
    """What becomes of one FROM."""

    steps: list[tuple[str, str]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    user: str = "0:0"
    folder: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)


def stages_of(text: str) -> dict[str, Stage]:
    """The stages of a Dockerfile by name; the one without a name is `final`."""
    stages: dict[str, Stage] = {}
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        word, rest = line.split(maxsplit=1)
        if word == "FROM":
            image, _, name = rest.partition(" AS ")
            if not PINNED.fullmatch(image):
                raise Failed(f"Dockerfile: expected an image of one version, got {image}")
            stage = stages[name or "final"] = Stage()
        elif word == "ENV":
            stage.environment |= dict(part.split("=", 1) for part in shlex.split(rest))
        elif word == "USER":
            stage.user = rest
        elif word in ("ENTRYPOINT", "CMD"):
            setattr(stage, "entrypoint" if word == "ENTRYPOINT" else "command", json.loads(rest))
        elif word == "HEALTHCHECK":
            stage.healthcheck = ["CMD", *json.loads(rest.partition(" CMD ")[2])]
        elif word in ("RUN", "COPY", "WORKDIR"):
            stage.steps.append((word, rest))
            stage.folder = rest if word == "WORKDIR" else stage.folder
        elif word != "EXPOSE":
            raise Failed(f"Dockerfile: {word} is nothing that this script can do; teach it")
    return stages


def context_of(ignore: str) -> list[Path]:
    """The files that a build sees: of a .dockerignore that leaves out everything and lets some through."""
    patterns = [line for line in ignore.splitlines() if line and not line.startswith("#")]
    if patterns[0] != "*":
        raise Failed(".dockerignore: expected * first, and then what is needed")
    found = []
    for name in (pattern[1:] for pattern in patterns if pattern.startswith("!")):
        path = ROOT / name
        if not path.exists():
            raise Failed(f".dockerignore: lets {name} through, which is not there")
        found += [path] if path.is_file() else [file for file in sorted(path.rglob("*")) if file.is_file()]
    left_out = [pattern.removeprefix("**/") for pattern in patterns if pattern.startswith("**/")]
    relative = [path.relative_to(ROOT) for path in found]
    return [path for path in relative if not any(fnmatch.filter(path.parts, pattern) for pattern in left_out)]


def check_grafana(services: Mapping[str, Any]) -> int:
    """Whether Grafana's files are where they are looked for, and lead to what is there; how many there are."""
    service, num_files = services["grafana"], 0
    mounts = {target: source for source, target, *_ in (mounted.split(":") for mounted in service["volumes"])}
    for source in mounts.values():
        for path in sorted((ROOT / source).rglob("*")) if source.startswith(".") else ():
            text = path.read_text()
            if path.suffix == ".json":
                json.loads(text)
                num_files += 1
                continue
            document = yaml.safe_load(text)
            num_files += 1
            for name in re.findall(r"\$(\w+)", json.dumps(document)):
                if name != "__file" and name not in service["environment"]:
                    raise Failed(f"{path.name} needs ${name}, which the service grafana has not")
            for name in re.findall(r"\$__file\{([^}]+)\}", json.dumps(document)):
                if str(Path(name).parent) not in mounts or not _is_written(
                    services, mounts[str(Path(name).parent)], name
                ):
                    raise Failed(f"{path.name} reads {name}, which nothing writes")
            for provider in document.get("providers", ()):
                if provider["options"]["path"] not in mounts:
                    raise Failed(f"{path.name} looks in {provider['options']['path']}, where nothing is mounted")
    for name, value in service["environment"].items():
        found = re.fullmatch(r"http://(\w+):\d+", str(value)) if name.startswith("TSEMON_") else None
        if found and found[1] not in services:
            raise Failed(f"grafana: {name} is {value}, and there is no service {found[1]}")
    return num_files


def _is_written(services: Mapping[str, Any], volume: str, path: str) -> bool:
    return any(
        path in service.get("command", ()) and f"{volume}:{Path(path).parent}" in service.get("volumes", ())
        for service in services.values()
    )


# Running them


@dataclass(frozen=True)
class Image:
    """What somebody else's image brings, as far as is needed here."""

    program: str
    """What its entrypoint starts."""
    folder: str
    """That belongs to its user, and so does a new volume there."""
    path: str = os.defpath


IMAGES = {
    "postgres": Image(str(POSTGRES_BIN / "postgres"), "/var/lib/postgresql/data", f"{POSTGRES_BIN}:{os.defpath}"),
    "prom/prometheus": Image("prometheus", "/prometheus"),
    "prom/alertmanager": Image("prometheus-alertmanager", "/alertmanager"),
}


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)
    if done.returncode != 0:
        raise Failed(f"{' '.join(map(str, command))}: exit status {done.returncode}\n{done.stdout[-3000:]}")
    return done


class Scratch:
    """Copies of this machine's file system, each with changes of its own, in memory.

    All are mounted in a folder that is seen by this process alone. Nothing is deleted: it is gone with the process.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", folder)

    def copy(self, name: str, *changes: Path) -> Path:
        """Another copy, with changes that were made to others."""
        parts = {part: self.folder / name / part for part in ("changed", "work", "root")}
        for part in parts.values():
            part.mkdir(parents=True)
        lower = ":".join(map(str, (*changes, "/")))
        options = f"lowerdir={lower},upperdir={parts['changed']},workdir={parts['work']}"
        run("mount", "-t", "overlay", "overlay", "-o", options, parts["root"])
        run("mount", "-t", "proc", "proc", parts["root"] / "proc")
        _make_devices(parts["root"] / "dev")
        return parts["root"]

    def changed(self, name: str) -> Path:
        return self.folder / name / "changed"


def _make_devices(folder: Path) -> None:
    """Those that every container has."""
    run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", folder)
    for name, minor in (("null", 3), ("zero", 5), ("full", 7), ("random", 8), ("urandom", 9)):
        os.mknod(folder / name, stat.S_IFCHR | 0o666, os.makedev(1, minor))
        (folder / name).chmod(0o666)
    (folder / "shm").mkdir(mode=0o777)
    (folder / "shm").chmod(0o1777)
    (folder / "fd").symlink_to("/proc/self/fd")


def within(root: Path, path: str) -> Path:
    """Where a path of a copy is, seen from outside: its links lead elsewhere in that copy."""
    return root / run("chroot", root, "realpath", "--canonicalize-missing", path).stdout.strip().lstrip("/")


class Build:
    """The Dockerfile's steps, one after the other."""

    def __init__(self, scratch: Scratch, stages: Mapping[str, Stage]) -> None:
        self.not_run: list[str] = []
        self._roots: dict[str, Path] = {}
        for name, stage in stages.items():
            self._roots[name] = root = scratch.copy(name)
            if name != "final":
                run(sys.executable, "-m", "venv", root / "image")  # the Python of the image, with its pip
            _let_all_reach_python(root)
            self._do(stage, root)
        self.root = self._roots["final"]

    def _do(self, stage: Stage, root: Path) -> None:
        folder = "/"
        for word, rest in stage.steps:
            if word == "WORKDIR":
                folder = rest
                within(root, folder).mkdir(parents=True, exist_ok=True)
            elif word == "COPY":
                self._copy(rest.split(), root, within(root, folder))
            elif rest.startswith("apt-get "):
                self.not_run.append(rest)
            else:
                environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", INSIDE)}
                path = f"/image/bin:{os.environ['PATH']}"
                run("chroot", root, "env", f"--chdir={folder}", f"PATH={path}", "sh", "-ec", rest, env=environment)

    def _copy(self, words: Sequence[str], root: Path, folder: Path) -> None:
        *sources, target = words
        if sources[0].startswith("--from="):
            other = self._roots[sources.pop(0).removeprefix("--from=")]
            run("cp", "--archive", within(other, sources[0]), within(root, target))
            return
        context = context_of((ROOT / ".dockerignore").read_text())
        wanted = [path for path in context if sources == ["."] or str(path) in sources]
        if not wanted or (sources != ["."] and len(wanted) != len(sources)):
            raise Failed(f"Dockerfile: COPY {' '.join(words)}: not all of it is let through by .dockerignore")
        for path in wanted:
            destination = folder / target / path
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, destination)


def _let_all_reach_python(root: Path) -> None:
    """In the image it is not in somebody's home folder, closed to others."""
    python = Path(os.path.realpath(sys.executable))
    for folder in python.parents[:-1]:
        path = root / folder.relative_to("/")
        path.chmod(path.stat().st_mode | 0o055)


class Service:
    """One service of the file, as a process of this machine."""

    def __init__(self, name: str, spec: Mapping[str, Any], stack: Stack) -> None:
        self.name, self.spec = name, spec
        self.log = stack.scratch.folder / f"{name}.log"
        image = spec["image"].partition(":")[0]
        final, self.other = stack.final, IMAGES.get(image)
        if self.other is None:
            if image != OURS:
                raise Failed(f"{name}: this script does not know the image {image}; teach it")
            self._environment = {**final.environment}
            self._command = [*final.entrypoint, *spec.get("command", final.command)]
            self.healthcheck, self._folder = final.healthcheck, final.folder
            user = spec.get("user", final.user)
        else:
            self._environment = {"PATH": self.other.path}
            self._command = [self.other.program, *spec.get("command", ())]
            self.healthcheck, self._folder = spec["healthcheck"]["test"], "/"
            user = spec.get("user", _user_of("postgres"))
        self._environment |= {key: str(value) for key, value in spec.get("environment", {}).items()}
        self._environment["PATH"] = self._environment["PATH"].replace("$PATH", os.defpath)
        self._uid, self._gid = user.split(":")
        changes = [stack.scratch.changed("final")] if self.other is None else []
        self.root = stack.scratch.copy(f"service-{name}", *changes)
        self._set_up(stack)
        self._process: subprocess.Popen[bytes] | None = None

    def _set_up(self, stack: Stack) -> None:
        hosts = self.root / "etc/hosts"
        hosts.write_text("127.0.0.1 localhost " + " ".join(stack.services) + "\n")
        for mounted in self.spec.get("volumes", ()):
            source, target, *modes = mounted.split(":")
            inside = within(self.root, target)
            if source.startswith("."):
                outside = ROOT / source
                inside.parent.mkdir(parents=True, exist_ok=True)
                inside.touch() if outside.is_file() else inside.mkdir(exist_ok=True)
            else:
                inside.mkdir(parents=True, exist_ok=True)
                outside = stack.volume(source, self, target, inside)
            run("mount", "--bind", outside, inside)
            if "ro" in modes:
                run("mount", "-o", "remount,bind,ro", inside)
        for target in self.spec.get("tmpfs", ()):
            inside = within(self.root, target)
            inside.mkdir(parents=True, exist_ok=True)
            run("mount", "-t", "tmpfs", "tmpfs", inside)
        if self.spec.get("read_only"):
            run("mount", "-o", "remount,ro", self.root)

    @property
    def owner(self) -> tuple[int, int]:
        return int(self._uid), int(self._gid)

    def as_here(self, command: Sequence[str]) -> list[str]:
        """The command in this service's file system, as its user, with its rights and environment."""
        rights = ["--no-new-privs"] if "no-new-privileges:true" in self.spec.get("security_opt", ()) else []
        rights += ["--bounding-set=-all", "--inh-caps=-all"] if self.spec.get("cap_drop") == ["ALL"] else []
        user = [f"--reuid={self._uid}", f"--regid={self._gid}", "--clear-groups"]
        variables = [f"{name}={value}" for name, value in self._environment.items()]
        inside = ["setpriv", *rights, *user, "env", "-i", f"--chdir={self._folder}", *variables, *command]
        return ["chroot", str(self.root), *inside]

    def run(self, *command: str) -> str:
        """What `docker compose exec` or `run` would do."""
        return run(*self.as_here(command)).stdout

    def once(self) -> str:
        return self.run(*self._command)

    def start(self) -> None:
        if self.is_healthy():
            raise Failed(f"{self.name}: its healthcheck passes before it runs")
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self.as_here(self._command), stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while not self.is_healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise Failed(f"{self.name}: not healthy; its log ends with\n{self.log.read_text()[-3000:]}")
            time.sleep(0.2)

    def is_healthy(self) -> bool:
        kind, *command = self.healthcheck
        if kind != "CMD":
            raise Failed(f"{self.name}: expected a healthcheck of the form [CMD, program, ...]")
        done = subprocess.run(self.as_here(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        return done.returncode == 0

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(60)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def make_database(self) -> None:
        """What the entrypoint of PostgreSQL's image does in an empty folder."""
        data, environment = self.spec["volumes"][0].split(":")[1], self._environment
        arguments = shlex.split(environment.get("POSTGRES_INITDB_ARGS", ""))
        user, database = environment["POSTGRES_USER"], environment["POSTGRES_DB"]
        secret = self.root / "tmp/password"
        secret.write_text(environment["POSTGRES_PASSWORD"])
        os.chown(secret, *self.owner)
        self.run("initdb", f"--pgdata={data}", f"--username={user}", "--pwfile=/tmp/password", *arguments)
        secret.unlink()
        for name, text in (
            ("pg_hba.conf", "host all all all scram-sha-256\n"),
            ("postgresql.conf", "listen_addresses='*'\n"),
        ):
            with (within(self.root, data) / name).open("a") as file:
                file.write(text)
        single = self.as_here(["postgres", "--single", "-D", data, "postgres"])
        run(*single, input=f"CREATE DATABASE {database}\n")
        self._command += ["-D", data]


def _user_of(name: str) -> str:
    import pwd

    found = pwd.getpwnam(name)
    return f"{found.pw_uid}:{found.pw_gid}"


class Stack:
    """All services of the file."""

    def __init__(self, scratch: Scratch, final: Stage, services: Mapping[str, Any]) -> None:
        self.scratch, self.final, self.services = scratch, final, services
        self.running: dict[str, Service] = {}

    def volume(self, name: str, service: Service, target: str, inside: Path) -> Path:
        """The folder behind a volume; a new one belongs to whom the folder in the image belongs that it covers."""
        folder = self.scratch.folder / "volumes" / name
        if not folder.exists():
            folder.mkdir(parents=True)
            if service.other is not None and service.other.folder == target:
                os.chown(folder, *service.owner)
                folder.chmod(0o700)
            else:
                known = inside.stat()
                os.chown(folder, known.st_uid, known.st_gid)
                folder.chmod(known.st_mode & 0o7777)
        return folder

    def order(self) -> list[str]:
        """The names, each after those that it depends on."""
        done: list[str] = []
        while len(done) < len(self.services):
            ready = [
                name
                for name, spec in self.services.items()
                if name not in done and set(spec.get("depends_on", ())) <= set(done)
            ]
            if not ready:
                raise Failed(f"services that wait for each other: {', '.join(set(self.services) - set(done))}")
            done += ready
        return done

    def start(self) -> None:
        for name in self.order():
            spec = self.services[name]
            if spec["image"].startswith("grafana/"):
                num_files = check_grafana(self.services)
                say(
                    f"{name}: not run, for there is no Grafana here; its {num_files} files parse and lead to what is there"
                )
                continue
            began = time.monotonic()
            service = self.running[name] = Service(name, spec, self)
            if spec["image"].startswith("postgres:"):
                service.make_database()
            if spec.get("healthcheck", {}).get("disable"):
                service.once()
                if "valid token already" not in service.once():
                    raise Failed(f"{name}: made another token, though there was one")
                say(f"{name}: done, and once more to no effect, in {time.monotonic() - began:.1f} s")
                continue
            service.start()
            say(f"{name}: healthy after {time.monotonic() - began:.1f} s, and was not before")


def say(text: str) -> None:
    print(text, flush=True)


# What must be true then


def check_stack(stack: Stack) -> None:
    server, postgres = stack.running["server"], stack.running["postgres"]
    if "torch" in (server.root / f"proc/{server.pid}/maps").read_text():
        raise Failed("server: it has loaded torch")
    has_torch = "import importlib.util as u; print(u.find_spec('torch') is not None)"
    if server.run("python", "-c", has_torch).strip() != "False":
        raise Failed("server: the image has torch")
    count = "import importlib.metadata as m; print(len(list(m.distributions())))"
    size = run("du", "-sm", server.root / "opt/tsemon").stdout.split()[0]
    say(f"server: {server.run('python', '-c', count).strip()} packages, {size} MB, torch not among them")
    if ask("http://127.0.0.1:8731/api/v1/runs")[0] != 401 or ask("http://127.0.0.1:8731/metrics")[0] != 401:
        raise Failed("server: it answers without a token")
    token = server.run("tsemon", "token", "create", "people", "--scope", "admin").strip()
    registered = ask("http://server:8731/api/v1/runs", token, {"run": "compose"}, stack)
    if registered[0] != 200:
        raise Failed(f"server: it refuses a run: {registered}")
    say("server: answers who has a token, by the name `server` too, and nobody else")
    await_that(lambda: query('up{job="tsemon"}') == ["1"], "prometheus: does not reach the server", 40)
    rules = [rule for group in prometheus("rules")["groups"] for rule in group["rules"]]
    if not rules or any(rule["health"] == "err" for rule in rules):
        raise Failed(f"prometheus: rules that fail, or none: {[rule['name'] for rule in rules]}")
    await_that(
        lambda: bool(prometheus("alertmanagers")["activeAlertmanagers"]), "prometheus: knows no Alertmanager", 20
    )
    await_that(lambda: query("tsemon_run_info") == ["1"], "prometheus: does not see the run", 40)
    say(f"prometheus: scrapes with its token, sees the run, has {len(rules)} rules and an Alertmanager")
    server.run("tsemon", "admin", "backup", "/tmp/backup")
    postgres.stop(signal.SIGINT)
    if server.is_healthy():
        raise Failed("server: its healthcheck passes without a database")
    postgres.start()
    await_that(server.is_healthy, "server: does not come back with its database", 30)
    if len(json.loads(ask("http://127.0.0.1:8731/api/v1/runs", token)[1])["runs"]) != 1:
        raise Failed("server: the run is gone after PostgreSQL was started again")
    say("postgres: stopped, the server says so; started, the server is well and has its run; a backup can be made")
    check_logs(stack, token)


def check_logs(stack: Stack, token: str) -> None:
    lines = [line for line in stack.running["server"].log.read_text().splitlines() if line.startswith("{")]
    if not any(json.loads(line)["message"] == "run registered" for line in lines):
        raise Failed("server: its log does not tell of the run")
    texts = {name: service.log.read_text() for name, service in stack.running.items() if service.log.exists()}
    for name, text in texts.items():
        if any(secret in text for secret in (*PASSWORDS.values(), token)):
            raise Failed(f"{name}: a secret stands in its log")
    say(f"server: {len(lines)} lines of JSON in its log; no secret in any log")


def ask(url: str, token: str | None = None, body: Any = None, stack: Stack | None = None) -> tuple[int, str]:
    """Status and text of an answer; by a service's name, as other services ask, where the stack is given."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    if stack is not None:
        name = url.split("/")[2].partition(":")[0]
        headers["Host"] = url.split("/")[2]
        url = url.replace(f"//{name}:", "//127.0.0.1:")
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers=headers)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def prometheus(path: str) -> Any:
    return json.loads(ask(f"http://127.0.0.1:9090/api/v1/{path}")[1])["data"]


def query(expression: str) -> list[str]:
    found = prometheus(f"query?query={urllib.request.quote(expression)}")["result"]
    return [result["value"][1] for result in found]


def await_that(is_so: Callable[[], bool], otherwise: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            raise Failed(otherwise)
        time.sleep(0.3)


def use_network_of_our_own() -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        raise Failed(f"no network of our own: {os.strerror(ctypes.get_errno())}")
    with socket.socket() as any_socket:  # its loopback interface is down at first
        is_up_and_running = 0x1 | 0x40
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh22x", b"lo", is_up_and_running))


# From here


def missing() -> list[str]:
    """What stands in the way of running it."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return ["it takes Linux and root"]
    programs = [image.program for image in IMAGES.values()]
    found = [
        f"there is no {name} here" for name in (*programs, "unshare", "setpriv", "chroot") if not shutil.which(name)
    ]
    if not found and subprocess.run([*_APART, "true"], stderr=subprocess.DEVNULL).returncode != 0:
        return ["this machine lets nobody mount anything"]
    return found


_APART = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]


def main() -> int:
    raw = yaml.safe_load(COMPOSE.read_text())
    try:
        check_compose(raw)
        stages = stages_of(DOCKERFILE.read_text())
        services = interpolated(raw, PASSWORDS)["services"]
        check_grafana(services)
        if INSIDE in os.environ:
            folder, _, mounts = os.environ[INSIDE].partition(":")
            assert os.readlink("/proc/self/ns/mnt") != mounts
            check_inside(Path(folder), stages, services)
            return 0
    except Failed as error:
        print(f"compose check: {error}", file=sys.stderr)
        return 1
    if reasons := missing():
        print(f"docker-compose.yml and Dockerfile were read and not run: {'; '.join(reasons)}")
        return 1 if os.environ.get("CI") else 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = tempfile.mkdtemp(prefix="tsemon-compose-")
    inside = {INSIDE: f"{folder}:{os.readlink('/proc/self/ns/mnt')}"}
    try:
        return subprocess.run([*_APART, sys.executable, __file__], env=os.environ | inside, check=False).returncode
    finally:
        os.rmdir(folder)  # not with what is in it: from here it is empty


def check_inside(folder: Path, stages: Mapping[str, Stage], services: Mapping[str, Any]) -> None:
    began = time.monotonic()
    scratch = Scratch(folder)
    build = Build(scratch, stages)
    say(f"Dockerfile: built in {time.monotonic() - began:.1f} s; not run: {'; '.join(build.not_run)}")
    use_network_of_our_own()
    stack = Stack(scratch, stages["final"], services)
    try:
        stack.start()
        check_stack(stack)
    finally:
        for service in reversed(stack.running.values()):
            service.stop()
    say(f"docker-compose.yml: all of it does what it says, in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
