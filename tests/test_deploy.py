"""What deploy/ holds: the reverse proxies run, in front of the service; systemd and Kubernetes are asked what they think."""

import ipaddress
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from pathlib import Path

import httpx
import kubernetes_validate
import pytest
import yaml

from tests import commands
from tests.ports import free_port
from tests.processes import start_tsemon

DEPLOY = Path(__file__).parent.parent / "deploy"
NAME = "tsemon.example.org"


@pytest.fixture
def service(tmp_path):
    """`tsemon serve` as behind a proxy; its port, its log, and a token."""
    database = f"sqlite:///{tmp_path}/tsemon.db"
    token = commands.tsemon("token", "create", "me", "--scope", "admin", "--database", database).stdout.strip()
    port, log = free_port(), tmp_path / "service.log"
    serve = ["serve", "--tokens", "--allowed-host", NAME, "--port", port, "--database", database]
    with log.open("w") as stderr, start_tsemon(*serve, stdout=subprocess.PIPE, stderr=stderr) as process:
        process.stdout.readline()
        yield port, log, token
        process.terminate()


@pytest.fixture
def certificate(tmp_path):
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    made += ["-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(made, cwd=tmp_path, stderr=subprocess.DEVNULL, check=True)
    return tmp_path / "cert.pem", tmp_path / "key.pem"


def replaced(text, *pairs):
    for found, instead in pairs:
        assert found in text, found
        text = text.replace(found, str(instead))
    return text


def nginx(folder, service_port, port, plain_port, certificate):
    text = replaced(
        (DEPLOY / "nginx.conf").read_text(),
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("listen [::]:443 ssl;", ""),
        ("listen 80", f"listen 127.0.0.1:{plain_port}"),
        ("listen [::]:80;", ""),
        (f"/etc/letsencrypt/live/{NAME}/fullchain.pem", certificate[0]),
        (f"/etc/letsencrypt/live/{NAME}/privkey.pem", certificate[1]),
        ("127.0.0.1:8731", f"127.0.0.1:{service_port}"),
    )
    paths = "".join(
        f"{name}_temp_path {folder}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    main = f"daemon off; pid {folder}/pid; error_log stderr;\nevents {{}}\nhttp {{ access_log off;\n{paths}{text}\n}}\n"
    (folder / "main.conf").write_text(main)
    return ["nginx", "-p", str(folder), "-e", "stderr", "-c", "main.conf"]


def caddy(folder, service_port, port, plain_port, certificate):
    text = replaced(
        (DEPLOY / "Caddyfile").read_text(),
        (f"\n{NAME} {{", f"\nhttps://{NAME}:{port} {{\n\ttls {certificate[0]} {certificate[1]}\n\tbind 127.0.0.1"),
        ("127.0.0.1:8731", f"127.0.0.1:{service_port}"),
    )
    (folder / "Caddyfile").write_text(f"{{\n\tadmin off\n\thttp_port {plain_port}\n\thttps_port {port}\n}}\n{text}")
    return ["caddy", "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]


@pytest.fixture(params=[nginx, caddy], ids=["nginx", "caddy"])
def http(request, service, certificate, tmp_path):
    """Asks the service through a proxy, as from elsewhere."""
    name = request.param.__name__
    if not shutil.which(name):
        by_whom = "scripts/system_parts.py does it where it can" if name == "nginx" else "install it to try it, too"
        pytest.skip(f"{name} is not installed; {by_whom}")
    port = free_port()
    (folder := tmp_path / "proxy").mkdir()
    command = request.param(folder, service[0], port, free_port(), certificate)
    environment = os.environ | {"HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log, env=environment) as proxy:
        try:
            await_port(port, proxy, folder / "log")
            trusting = ssl.create_default_context(cafile=certificate[0])
            with httpx.Client(
                base_url=f"https://127.0.0.1:{port}", verify=trusting, timeout=30, trust_env=False
            ) as client:
                client.headers["Host"] = NAME
                yield lambda method, path, **more: client.request(
                    method, path, extensions={"sni_hostname": NAME}, **more
                )
        finally:
            proxy.terminate()


def await_port(port, process, log):
    deadline = time.monotonic() + 120
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)


class TestBehindAProxy:
    def test_a_program_with_a_token_is_answered_and_no_other(self, http, service):
        _, _, token = service
        assert http("GET", "/api/v1/runs").status_code == 401
        assert http("GET", "/api/v1/runs", headers={"Authorization": f"Bearer {token}"}).json()["runs"] == []

    def test_a_browser_signs_in_and_its_cookie_is_for_tls_only(self, http, service):
        _, _, token = service
        own_page = {"Origin": f"https://{NAME}"}
        reply = http("POST", "/api/v1/session", json={"token": token}, headers=own_page)
        assert reply.status_code == 200, reply.text
        cookie = reply.headers["set-cookie"]
        assert {"HttpOnly", "SameSite=strict", "Secure"} <= set(cookie.split("; "))
        signed_in = {"Cookie": cookie.partition(";")[0]}
        assert http("POST", "/api/v1/runs", json={"run": "gpt"}, headers=signed_in | own_page).status_code == 200
        elsewhere = signed_in | {"Origin": "https://evil.example"}
        assert http("POST", "/api/v1/runs", json={"run": "csrf"}, headers=elsewhere).status_code == 403

    def test_the_log_has_the_proxys_id_and_believes_no_address_that_a_client_made_up(self, http, service):
        made_up = {"X-Forwarded-For": "6.6.6.6", "X-Request-ID": "made-up", "X-Forwarded-Proto": "http"}
        reply = http("GET", "/nope", headers=made_up)
        deadline = time.monotonic() + 120
        while not service[1].read_text().endswith("\n"):  # it is told of when it is answered
            assert time.monotonic() < deadline
        (line,) = map(json.loads, service[1].read_text().splitlines())
        assert line["request_id"] == reply.headers["x-request-id"] != "made-up"
        assert (line["client"], line["status"]) == ("127.0.0.1", 401)

    def test_a_body_that_is_too_large_is_refused(self, http, service):
        token = {"Authorization": f"Bearer {service[2]}"}
        assert http("POST", "/api/v1/runs", content=bytes(16 * 2**20 + 1), headers=token).status_code == 413

    def test_browsers_are_told_to_come_by_tls_only(self, http):
        assert http("GET", "/healthz").headers["strict-transport-security"] == "max-age=31536000"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
class TestTheUnit:
    @pytest.fixture
    def unit(self, tmp_path):
        """With a program that is here in place of the one that is not."""
        text = replaced((DEPLOY / "tsemon.service").read_text(), ("/opt/tsemon/bin/tsemon", shutil.which("true")))
        path = tmp_path / "tsemon.service"
        path.write_text(text)
        return path

    def verify(self, unit):
        return subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)

    def test_is_one(self, unit):
        done = self.verify(unit)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    def test_would_not_be_with_a_word_misspelt(self, unit):
        unit.write_text(unit.read_text().replace("StateDirectory=", "StateDirektory="))
        assert "'StateDirektory' in section" in self.verify(unit).stderr

    def test_is_shut_in_well(self, unit):
        command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", unit]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


class TestTheManifests:
    FOLDER = DEPLOY / "kubernetes"

    @pytest.fixture
    def manifests(self):
        """As they are applied, where kubectl is here; otherwise as they are written."""
        if not shutil.which("kubectl"):
            resources = yaml.safe_load((self.FOLDER / "kustomization.yaml").read_text())["resources"]
            return [yaml.safe_load((self.FOLDER / name).read_text()) for name in resources]
        built = subprocess.run(["kubectl", "kustomize", self.FOLDER], stdout=subprocess.PIPE, check=True).stdout
        return list(yaml.safe_load_all(built))

    @pytest.mark.parametrize("version", ["1.31", "1.37"])
    def test_are_what_kubernetes_takes(self, manifests, version):
        assert {manifest["kind"] for manifest in manifests} == {"Namespace", "Deployment", "Service"}
        for manifest in manifests:
            kubernetes_validate.validate(manifest, version, strict=True)

    def test_would_not_be_with_a_field_misspelt(self, manifests):
        deployment = next(manifest for manifest in manifests if manifest["kind"] == "Deployment")
        deployment["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
        with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
            kubernetes_validate.validate(deployment, "1.37", strict=True)

    def test_probe_what_there_is_by_a_name_that_is_answered_to(self, manifests, service):
        deployment = next(manifest for manifest in manifests if manifest["kind"] == "Deployment")
        container = deployment["spec"]["template"]["spec"]["containers"][0]
        probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
        for probe in probes:
            headers = {header["name"]: header["value"] for header in probe["httpHeaders"]}
            reply = httpx.get(f"http://127.0.0.1:{service[0]}{probe['path']}", headers=headers, trust_env=False)
            assert reply.status_code == 200

    def test_let_the_service_be_found_and_its_name_not_be_a_setting(self, manifests):
        by_kind = {manifest["kind"]: manifest for manifest in manifests}
        pod = by_kind["Deployment"]["spec"]["template"]
        assert by_kind["Service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        assert by_kind["Service"]["spec"]["ports"][0]["targetPort"] == pod["spec"]["containers"][0]["ports"][0]["name"]
        # Kubernetes sets TSEMON_PORT=tcp://10.0.0.1:8731 otherwise, for the Service is called tsemon.
        assert pod["spec"]["enableServiceLinks"] is False

    def test_say_which_proxy_is_believed_and_never_everybody(self, manifests):
        deployment = next(manifest for manifest in manifests if manifest["kind"] == "Deployment")
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        named = {variable["name"]: variable.get("value") for variable in container["env"]}
        believed = [ipaddress.ip_network(text) for text in named["FORWARDED_ALLOW_IPS"].split(",")]
        assert all(network.prefixlen >= 8 for network in believed)

    def test_run_as_the_user_of_the_image(self, manifests):
        deployment = next(manifest for manifest in manifests if manifest["kind"] == "Deployment")
        user = re.search(r"^USER (\d+):(\d+)$", (DEPLOY.parent / "Dockerfile").read_text(), re.M)
        context = deployment["spec"]["template"]["spec"]["securityContext"]
        assert (context["runAsUser"], context["runAsGroup"]) == (int(user[1]), int(user[2]))
