"""docker-compose.yml and the Dockerfile: what is wrong in them is seen, and what stands in them works."""

import copy
import os
import subprocess
import sys

import pytest
import yaml

import tsemon
from scripts import compose_check
from scripts.compose_check import PASSWORDS, Failed, check_compose, check_grafana, context_of, interpolated, stages_of


@pytest.fixture
def raw():
    return yaml.safe_load(compose_check.COMPOSE.read_text())


def changed(raw, service, **values):
    other = copy.deepcopy(raw)
    other["services"][service] |= values
    return other


class TestTheComposeFile:
    def test_is_as_it_should_be(self, raw):
        check_compose(raw)

    @pytest.mark.parametrize("name", sorted(PASSWORDS))
    @pytest.mark.parametrize("value", ["", None])
    def test_does_not_start_without_a_password(self, raw, name, value):
        environment = {**PASSWORDS, name: value} if value is not None else {**PASSWORDS}
        if value is None:
            del environment[name]
        with pytest.raises(Failed, match=name):
            interpolated(raw, environment)

    @pytest.mark.parametrize(
        ("service", "values", "why"),
        [
            ("server", {"imagee": "x"}, r"services\.server.*imagee"),
            ("server", {"healthcheck": {"test": 3}}, r"services\.server"),
            ("prometheus", {"image": "prom/prometheus:latest"}, "prometheus: expected an image of one version"),
            ("prometheus", {"image": "prom/prometheus"}, "prometheus: expected an image of one version"),
            ("grafana", {"read_only": False}, "grafana: expected read_only"),
            ("grafana", {"security_opt": []}, "grafana: expected read_only and no-new-privileges"),
            ("server", {"logging": {"driver": "local"}}, "server: expected a log that is bounded"),
            ("postgres", {"logging": {"options": {"max-size": "9m"}}}, "postgres: expected a log that is bounded"),
            ("server", {"ports": ["8731:8731"]}, r"server: expected a port on 127\.0\.0\.1"),
            ("server", {"ports": ["0.0.0.0:8731:8731"]}, r"server: expected a port on 127\.0\.0\.1"),
            ("postgres", {"environment": {"POSTGRES_PASSWORD": "secret"}}, "expected POSTGRES_PASSWORD from outside"),
            ("postgres", {"environment": {"POSTGRES_PASSWORD": "${X:-secret}"}}, "POSTGRES_PASSWORD from outside"),
            (
                "grafana",
                {"volumes": ["./clients/grafna:/x:ro"]},
                "grafana: mounts ./clients/grafna, which is not there",
            ),
            (
                "alertmanager",
                {"volumes": ["${X:-./none.yml}:/x"]},
                "alertmanager: mounts ./none.yml, which is not there",
            ),
            ("grafana", {"volumes": []}, "volumes that nothing uses: grafana"),
        ],
    )
    def test_is_refused_where_it_is_not(self, raw, service, values, why):
        with pytest.raises(Failed, match=why):
            check_compose(changed(raw, service, **values))

    def test_is_refused_where_a_service_may_take_all_memory(self, raw):
        for service in raw["services"]:
            without = copy.deepcopy(raw)
            del without["services"][service]["mem_limit"]
            with pytest.raises(Failed, match=f"{service}: expected a mem_limit"):
                check_compose(without)

    def test_has_alertmanager_tell_whom_a_file_of_ones_own_names(self, raw):
        for more, source in (
            ({}, "./clients/prometheus/alertmanager.yml"),
            ({"ALERTMANAGER_CONFIG": "./alertmanager.local.yml"}, "./alertmanager.local.yml"),
        ):
            mounted = interpolated(raw, PASSWORDS | more)["services"]["alertmanager"]["volumes"]
            assert f"{source}:/etc/alertmanager/alertmanager.yml:ro" in mounted

    def test_makes_an_image_of_this_version(self, raw):
        assert raw["services"]["server"]["image"] == f"tsemon:{tsemon.__version__}"
        kustomization = yaml.safe_load((compose_check.ROOT / "deploy/kubernetes/kustomization.yaml").read_text())
        assert kustomization["images"][0]["newTag"] == tsemon.__version__

    def test_is_filled_in_as_compose_does_it(self):
        environment = {"A": "1", "EMPTY": ""}
        texts = {"$A": "1", "${A}b": "1b", "${B:-x}": "x", "${EMPTY:-x}": "x", "${A:-x}": "1", "$$A": "$A", "${B}": ""}
        assert interpolated(list(texts), environment) == list(texts.values())


class TestGrafanasFiles:
    def without(self, raw, text):
        services = copy.deepcopy(raw["services"])
        grafana = services["grafana"]
        grafana["volumes"] = [volume for volume in grafana["volumes"] if text not in volume]
        grafana["environment"] = {name: value for name, value in grafana["environment"].items() if name != text}
        return services

    def test_lead_to_what_is_there(self, raw):
        assert check_grafana(raw["services"]) >= 5

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("TSEMON_PROMETHEUS_URL", r"needs \$TSEMON_PROMETHEUS_URL"),
            ("grafana-token", "reads /run/secrets/tsemon_read_token, which nothing writes"),
            ("dashboards/tsemon", "where nothing is mounted"),
        ],
    )
    def test_are_refused_where_they_do_not(self, raw, text, why):
        with pytest.raises(Failed, match=why):
            check_grafana(self.without(raw, text))

    def test_name_services_that_there_are(self, raw):
        services = copy.deepcopy(raw["services"])
        services["grafana"]["environment"]["TSEMON_URL"] = "http://sever:8731"
        with pytest.raises(Failed, match="there is no service sever"):
            check_grafana(services)


class TestTheDockerfile:
    def test_ends_in_a_stage_that_is_not_root_and_has_a_healthcheck(self):
        final = stages_of(compose_check.DOCKERFILE.read_text())["final"]
        assert final.user == "10001:10001"
        assert final.entrypoint == ["tsemon"]
        assert final.healthcheck[:2] == ["CMD", "python"]
        assert final.environment["TSEMON_HOST"] == "0.0.0.0"

    def test_is_refused_with_a_base_of_no_version(self):
        with pytest.raises(Failed, match="python:latest"):
            stages_of("FROM python:latest\n")

    def test_is_refused_with_what_the_script_cannot_do(self):
        with pytest.raises(Failed, match="ONBUILD is nothing"):
            stages_of("FROM python:3.11.14-slim-bookworm\nONBUILD RUN true\n")

    def test_sees_what_the_package_is_built_from_and_nothing_else(self):
        context = {str(path) for path in context_of((compose_check.ROOT / ".dockerignore").read_text())}
        assert {"pyproject.toml", "constraints.txt", "tsemon/wire.py", "server/tsemon_server/main.py"} <= context
        tops = {path.partition("/")[0] for path in context}
        assert tops == {"pyproject.toml", "constraints.txt", "README.md", "LICENSE"} | {
            "tsemon",
            "server",
            "clients",
            "migrations",
        }
        assert not any("__pycache__" in path for path in context)


@pytest.mark.skipif(
    bool(compose_check.missing()) and "CI" not in os.environ, reason=f"not run: {'; '.join(compose_check.missing())}"
)
class TestAllOfIt:
    def test_does_what_it_says(self):
        done = subprocess.run(
            [sys.executable, compose_check.__file__],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        for name in ("postgres", "alertmanager", "server", "prometheus"):
            assert f"{name}: healthy after" in done.stdout
        assert "grafana: not run" in done.stdout
