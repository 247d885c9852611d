"""Files and texts of others are read, or refused with a sentence: rules, receivers, recordings, cursors."""

import base64
import gzip
import json
import tempfile
from contextlib import closing, suppress
from importlib import resources
from pathlib import Path

import pytest
import yaml
from hypothesis import strategies as st

from tests.databases import SqliteFile
from tests.fuzz.cases import ANY_JSON, AWKWARD, altered, replaced
from tests.server.conftest import Api, problem
from tsemon.errors import InvalidDocument, InvalidRecording, InvalidRules
from tsemon.wire import Array, Frame
from tsemon_server.notify.configuration import load as load_receivers
from tsemon_server.rules import PACK
from tsemon_server.rules.documents import load
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.rules.views import views_of
from tsemon_server.services.replay.replaying import replay
from tsemon_server.services.replay.traces import Trace

PACK_FILES = [
    file.read_text() for file in (resources.files("tsemon_server.rules") / "pack").iterdir() if "yaml" in file.name
]
FRAMES = [
    Frame(step, step, 1e9, {"loss": value}, {"token_similarity": Array.of([value] * 3)}, {})
    for step, value in enumerate([1.0, float("nan"), 1e38, float("-inf"), 0.0, 0.99, 0.99, 0.99])
]


def one_rule(text):
    return st.sampled_from(yaml.safe_load(text)["rules"]).map(lambda rule: {"rules": [rule]})


RULES = st.sampled_from(PACK_FILES).flatmap(one_rule)
RULE_FILES = (
    replaced(RULES).map(lambda data: json.dumps(data).encode())
    | altered(st.sampled_from([text.encode() for text in PACK_FILES]))
    | altered(replaced(RULES).map(lambda data: yaml.safe_dump(data).encode()))
    | st.binary(max_size=200)
    | st.sampled_from(AWKWARD)
)


def read_rules(raw):
    with suppress(InvalidDocument, InvalidRules):
        evaluator = Evaluator(load(raw.decode(errors="replace")))
        state = evaluator.start()
        for view in views_of(FRAMES, frozenset()):
            for event in evaluator.advance(state, view):
                json.dumps(event.evidence, allow_nan=False)


class TestARuleFile:
    def test_is_taken_or_refused_and_can_be_used_where_it_is_taken(self, look):
        look(read_rules, RULE_FILES, 200)


RECEIVERS = {
    "group_wait": "5s",
    "receivers": [
        {"name": "hook", "type": "webhook", "url": "http://example.org/x", "secret": "file:key"},
        {"name": "mail", "type": "email", "host": "mail.example.org", "from": "a@example.org", "to": ["b@example.org"]},
    ],
    "routes": [{"receivers": ["hook"], "project": "x*", "group_by": ["run"]}],
}


class TestAFileOfReceivers:
    def test_is_taken_or_refused(self, tmp_path, look):
        path = tmp_path / "notify.yaml"

        def read(raw):
            path.write_bytes(raw)
            with suppress(InvalidDocument):
                load_receivers(path, {})

        whole = replaced(st.just(RECEIVERS)).map(lambda data: json.dumps(data).encode())
        look(read, whole | altered(whole) | st.sampled_from(AWKWARD), 200)


LINES = [
    {"t": "run", "format": "tsemon-trace/1", "name": "x", "frozen_blocks": [0, -1]},
    {"t": "loss", "loss": [1.0, None, 3.0, 1e308], "first_step": 0},
    {"t": "frame", "step": 1, "scalars": {"a": 1, "b": None}, "layers": {"token_similarity": [1, None]}, "heads": {}},
    {"t": "frame", "step": 3, "layers": {"grad_norm": []}, "heads": {"attention_entropy": [[1, 2], [3, None]]}},
    {"t": "end"},
]


def as_lines(lines):
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


TRACES = replaced(st.just(LINES)).map(as_lines)
RECORDINGS = TRACES | altered(TRACES) | altered(TRACES.map(gzip.compress)) | st.binary(max_size=100)


BUILT_IN = Evaluator(PACK)


def read_trace(raw):
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(raw)
        with suppress(InvalidRecording):
            replay(Trace(Path(file.name)), BUILT_IN)


class TestATrace:
    def test_is_read_as_far_as_it_is_sound_or_refused(self, look):
        look(read_trace, RECORDINGS | st.sampled_from(AWKWARD), 250)


def encoded(data):
    return base64.urlsafe_b64encode(data if isinstance(data, bytes) else json.dumps(data).encode()).decode()


LISTS = ("runs -updated", "runs name", "runs loss", "runs -step", "runs alerts", "alerts", "notifications")
PARTS = st.sampled_from(LISTS) | ANY_JSON
CURSORS = st.lists(PARTS, max_size=4).map(encoded) | altered(
    st.lists(PARTS, max_size=4).map(encoded).map(str.encode)
).map(lambda raw: raw.decode("latin-1"))
KEYS = st.text(max_size=5) | st.floats() | st.integers() | st.sampled_from(["\0", "\ud800", 2**53, 1e999, True, None])
NUM_KEYS = {"alerts": 1, "notifications": 1, "runs alerts": 3}
NEARLY_CURSORS = st.tuples(st.sampled_from(LISTS), KEYS, KEYS, KEYS).map(
    lambda parts: encoded(list(parts[: 1 + NUM_KEYS.get(parts[0], 2)]))
)


class TestACursor:
    @pytest.mark.parametrize("listed", LISTS)
    def test_is_a_place_or_refused(self, tmp_path, look, listed):
        path, _, order = listed.partition(" ")
        with closing(Api(SqliteFile(tmp_path / "tsemon.db"))) as api:
            api.open_alert(api.register())

            def ask(cursor):
                reply = api.http.get(f"/api/v1/{path}", params={"cursor": cursor} | ({"order": order} if order else {}))
                assert reply.status_code == 200 or problem(reply)[0] in (414, 422)

            look(ask, CURSORS | NEARLY_CURSORS, 100)
