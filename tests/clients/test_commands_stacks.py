"""The commands on a run whose model has several stacks: they name each stack, and group no layers across a border."""

import csv
import io
import json

import pytest

from tests.clients.command_line import in_this_process, register, send
from tests.service import ServiceProcess
from tsemon.wire import Array, Frame
from tsemon_client import Client

STACKS = [{"name": "encoder", "blocks": 2}, {"name": "decoder", "blocks": 2}]
BLOCKS = [f"{stack['name']}.block.{number}" for stack in STACKS for number in range(2)]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with ServiceProcess(tmp_path_factory.mktemp("service") / "tsemon.db") as service:
        run_id = register(service.url, "t5", blocks=BLOCKS, stacks=STACKS)
        layers = {
            "token_similarity": Array.of([0.1, 0.2, 0.3, 0.4, 0.5, 0.9]),
            "grad_norm": Array.of([1.0, 2.0, 3.0, 4.0]),
        }
        heads = {"attention_entropy": Array.of(range(8), (4, 2))}
        send(service.url, run_id, [Frame(step, step, 1000.0 + step, {"loss": 1.0}, layers, heads) for step in (0, 10)])
        yield service


@pytest.fixture
def run(service, monkeypatch, capsys):
    return in_this_process(service, monkeypatch, capsys)


def layer_of(done):
    assert done.err == ""
    return json.loads(done.out)["layer"]


class TestRuns:
    def test_say_the_stacks(self, run):
        shown = run("runs", "t5").out
        assert "4 in 2 stacks, encoder (2 blocks), decoder (2): encoder.block.0 to decoder.block.1" in shown

    def test_name_the_worst_layer_by_its_stack(self, run):
        assert "encoder 0: grad_norm / grad_norm (max of layers) 0.5" in run("runs", columns=200).out


class TestSeries:
    def test_takes_a_layer_by_its_stack(self, run):
        for layer, number in (("decoder 0", 3), ("decoder -1", 5), ("encoder 2", 2), ("4", 4), ("-1", 5)):
            assert layer_of(run("series", "t5", "token_similarity", "--layer", layer, "--json")) == number
        assert layer_of(run("series", "t5", "grad_norm", "--layer", "decoder 1", "--json")) == 3
        asked = ("attention_entropy", "--layer", "decoder 0", "--head", "1")
        assert layer_of(run("series", "t5", *asked, "--json")) == 2

    def test_has_the_stack_in_the_title_of_a_layer(self, run):
        shown = run("series", "t5", "token_similarity", "--layer", "5", columns=60).out
        assert "t5: token_similarity, layer decoder 2" in shown

    def test_has_a_line_for_each_layer_by_its_stack(self, run):
        shown = run("series", "t5", "token_similarity", columns=100).out
        rows = [line.split() for line in shown.splitlines() if line.strip().startswith(("encoder ", "decoder "))]
        assert [(row[0], row[1], row[-1]) for row in rows] == [
            *(("encoder", "0", "input"), ("encoder", "1", "encoder.block.0"), ("encoder", "2", "encoder.block.1")),
            *(("decoder", "0", "input"), ("decoder", "1", "decoder.block.0"), ("decoder", "2", "decoder.block.1")),
        ]

    def test_has_a_column_for_each_layer_by_its_stack(self, run):
        head = run("series", "t5", "grad_norm").out.splitlines()[0]
        assert head.split() == ["step", "encoder", "0", "encoder", "1", "decoder", "0", "decoder", "1"]

    def test_has_the_numbers_of_layers_for_programs(self, run):
        rows = csv.DictReader(io.StringIO(run("series", "t5", "grad_norm", "--csv", "--to", "0").out))
        assert [row["layer"] for row in rows] == ["0", "1", "2", "3"]

    @pytest.mark.parametrize(
        ("layer", "told"),
        [
            ("decoder 3", "the stack 'decoder' has the layers 0 to 2, -1 is the last; got 3"),
            ("decodr 0", "no stack 'decodr'; did you mean 'decoder'?"),
            ("decoder", "--layer takes a number or 'decoder' and a number, got 'decoder'"),
        ],
    )
    def test_says_what_is_wrong_with_a_layer(self, run, layer, told):
        code, _, err = run("series", "t5", "token_similarity", "--layer", layer)
        assert code != 0
        assert told in err


class TestTail:
    def test_groups_layers_of_one_stack(self, run):
        arguments = "t5", "--once", "--json", "--groups", "2", "--lines", "1", "--metric", "token_similarity"
        sample = json.loads(run("tail", *arguments).out.splitlines()[0])
        assert sample["token_similarity"] == {
            "encoder 0-2": pytest.approx(0.2),
            "decoder 0-2": pytest.approx(0.6),
        }

    def test_has_words_without_spaces_in_a_pipe(self, run):
        arguments = "t5", "--once", "--groups", "1", "--lines", "1", "--metric", "token_similarity"
        assert " token_similarity.decoder.0-2=0.6" in run("tail", *arguments).out


class TestTheClient:
    def test_says_what_a_layer_is(self, service):
        with Client(service.url) as client:
            run = client.run(client.runs(run="t5").all()[0].run_id)
        assert [(stack.name, stack.blocks) for stack in run.stacks] == [("encoder", 2), ("decoder", 2)]
        assert run.layer_name("token_similarity", 4) == "decoder 1"
        assert run.layer_name("grad_norm", 2) == "decoder 0"
        assert run.layer("token_similarity", "decoder", -1) == 5
