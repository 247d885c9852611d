"""`tsemon token` from the command line."""

import json
import stat

import pytest
from typer.testing import CliRunner

from tsemon.errors import InvalidArgument
from tsemon.tools.cli import app
from tsemon_client import Client
from tsemon_server.access.tokens import is_secret_of, parts_of
from tsemon_server.store import Store


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 't.db'}"


@pytest.fixture
def run(url):
    def call(*arguments):
        done = CliRunner().invoke(app, ["token", *map(str, arguments), "--database", url])
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done

    return call


def listed(run):
    return json.loads(run("list", "--json").stdout)


class TestCreating:
    def test_shows_the_token_once(self, run, url):
        text = run("create", "laptop", "--scope", "read", "--scope", "ingest", "--project", "p").stdout.strip()
        token_id, secret = parts_of(text)
        store = Store(url)
        token = store.tokens.find(token_id)
        store.close()
        assert is_secret_of(secret, token.digest)
        assert (token.name, token.scopes, token.project, token.expires_at) == ("laptop", ("ingest", "read"), "p", None)
        assert secret not in run("list").stdout + run("list", "--json").stdout

    def test_lets_it_end_by_itself(self, run, url):
        token_id, _ = parts_of(run("create", "t", "--scope", "read", "--expires", "2d").stdout.strip())
        store = Store(url)
        token = store.tokens.find(token_id)
        store.close()
        assert (token.expires_at - token.created_at).total_seconds() == pytest.approx(2 * 86_400, abs=60)

    def test_writes_it_to_a_file_for_its_owner_alone_and_leaves_one_that_is_good(self, run, tmp_path):
        path = tmp_path / "token"
        path.touch(0o644)
        assert str(path) in run("create", "t", "--scope", "metrics", "--out", path).stdout
        first = path.read_text()
        assert parts_of(first.strip())
        assert first.strip() not in run("list").stdout
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert "valid token already" in run("create", "t", "--scope", "metrics", "--out", path).stdout
        assert (path.read_text(), len(listed(run))) == (first, 1)

    def test_hides_one_that_is_good_and_lies_open(self, run, tmp_path):
        path = tmp_path / "token"
        run("create", "t", "--scope", "metrics", "--out", path)
        path.chmod(0o644)
        run("create", "t", "--scope", "metrics", "--out", path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

    @pytest.mark.parametrize("content", [b"a key of somebody", bytes(range(256)), b"tsm_short"])
    def test_leaves_a_file_of_another_kind(self, run, tmp_path, content):
        path = tmp_path / "token"
        path.write_bytes(content)
        with pytest.raises(InvalidArgument, match="which is left as it is"):
            run("create", "t", "--scope", "read", "--out", path)
        assert (path.read_bytes(), listed(run)) == (content, [])

    def test_leaves_a_good_one_for_something_else(self, run, tmp_path):
        path = tmp_path / "token"
        run("create", "t", "--scope", "metrics", "--out", path)
        before = path.read_text()
        with pytest.raises(InvalidArgument, match="holds a valid token for something else"):
            run("create", "t", "--scope", "read", "--out", path)
        assert (path.read_text(), len(listed(run))) == (before, 1)

    def test_replaces_one_that_is_revoked(self, run, tmp_path):
        path = tmp_path / "token"
        run("create", "t", "--scope", "metrics", "--out", path)
        before = path.read_text()
        run("revoke", parts_of(before.strip())[0])
        run("create", "t", "--scope", "metrics", "--out", path)
        assert path.read_text() != before
        assert sorted(token["state"] for token in listed(run)) == ["revoked", "valid"]

    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            (("t", "--scope", "root"), "expected scopes of ingest, read, admin, metrics, got 'root'"),
            (("", "--scope", "read"), "expected a name of 1 to 128 characters"),
            (("a\nb", "--scope", "read"), "expected a name of 1 to 128 characters"),
            (("t", "--scope", "metrics", "--project", "p"), "for /metrics shows all runs"),
            (("t", "--scope", "read", "--expires", "soon"), "expected a span of time"),
            (("t", "--scope", "read", "--expires", "999999w"), "expected a span of time up to 365000d, or forever"),
            (("t", "--scope", "read", "--out", "/nowhere/token"), "expected a file that can be written"),
        ],
    )
    def test_with_something_wrong_is_told_and_makes_none(self, run, arguments, problem):
        with pytest.raises(InvalidArgument, match=problem):
            run("create", *arguments)
        assert listed(run) == []


class TestRevoking:
    def test_is_seen_in_the_list(self, run):
        token_id, _ = parts_of(run("create", "t", "--scope", "read").stdout.strip())
        assert [token["state"] for token in listed(run)] == ["valid"]
        run("revoke", token_id)
        assert [token["state"] for token in listed(run)] == ["revoked"]

    def test_is_for_those_too_that_last_longer_than_there_are_years(self, run, url):
        store = Store(url)
        known = {"name": "far", "digest": "", "scopes": ("admin",), "project": None}
        store.tokens.add("0123456789abcdef", expires_at=6e11, **known)
        store.close()
        (token,) = listed(run)
        assert (token["state"], token["expires_at"]) == ("valid", "9999-12-31T23:59:59+00:00")
        assert "far" in run("list").stdout
        run("revoke", "0123456789abcdef")
        assert [token["state"] for token in listed(run)] == ["revoked"]

    def test_needs_an_id_and_never_repeats_a_token(self, run):
        text = run("create", "t", "--scope", "read").stdout.strip()
        for given in ("0123456789abcdef", text):
            with pytest.raises(InvalidArgument) as caught:
                run("revoke", given)
            assert text not in str(caught.value)


class TestTheClient:
    @pytest.mark.parametrize("wrong", ["two words", "två", "a\nb"])
    def test_refuses_what_cannot_be_one_and_does_not_repeat_it(self, wrong):
        with pytest.raises(InvalidArgument) as caught:
            Client("http://127.0.0.1:1", token=wrong)
        assert wrong not in str(caught.value)
